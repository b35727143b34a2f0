"""Checkpoints: what comes back, what is refused and in which words, what survives damage, kills and full disks."""

# ruff: noqa: B023, the lambdas are called where they are made

import collections
import dataclasses
import enum
import errno
import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
import tsunax as ts
from campaigns import manifests, training_run
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tests.helpers import assert_trees_equal, error_of, need
from tsunax._core import durable_files
from tsunax.checkpoints import _background, _blocks, _home, _matching, _safetensors, checksums, leaves, reading, saving
from tsunax.checkpoints import manifest as _manifest
from tsunax.checkpoints.saving import Best, Checkpoints
from tsunax.errors import (
    CheckpointError,
    DataError,
    HyperparameterError,
    RowError,
    SaveError,
    StateError,
    WrongTypeError,
)

PARAMS = {
    "body": {"w": np.arange(12.0, dtype=np.float32).reshape(3, 4), "b": np.ones(4, np.float32)},
    "head": np.ones((4, 2), np.float32),
}


def make(rate=1e-2, rule=None, params=None, **options):
    rule = ts.rules.adam(rate) if rule is None else rule
    return ts.setup(rule, PARAMS if params is None else params, **options)


def grads(state, scale=1.0):
    return jax.tree.map(lambda x: scale * jnp.ones_like(x), ts.trainable(state))


@jax.jit
def updated(state):
    return ts.update(state, grads(state))[0]


def save(path, *states, **about):
    """One checkpoint after the other, all of them kept."""
    with Checkpoints(path, keep_last=None) as checkpoints:
        for state in states:
            checkpoints.save(state, **about)


def restored(path, like, **how):
    return Checkpoints(path, read_only=True).restore(like, **how)


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """States at the steps 0, 1, 2 and a directory with a checkpoint of each; tests work on copies."""
    path = tmp_path_factory.mktemp("three")
    states = [make()]
    for _ in range(2):
        states.append(updated(states[-1]))
    with Checkpoints(path, keep_last=None) as checkpoints:
        for n, state in enumerate(states):
            checkpoints.save(state, data={"epoch": n}, history={"loss": np.arange(n + 1.0)}, metrics={"loss": n})
    return path, states


@pytest.fixture
def copy(three, tmp_path):
    path = tmp_path / "run"
    shutil.copytree(three[0], path)
    return path, three[1]


# --------------------------------------------------------------------------------------------------- what comes back

LEAVES = {
    "f32": jnp.array([1.5, -0.0, jnp.nan, jnp.inf, 1e-42]),
    "bf16": jnp.array([[1.5, 3e38]], jnp.bfloat16),
    "f16": jnp.array([6e-8], jnp.float16),
    "f8": jnp.array([0.5, 448], jnp.float8_e4m3fn),
    "i4": jnp.array([-8, 7], jnp.int4),
    "u8": jnp.array([255], jnp.uint8),
    "i32": jnp.array(16_777_217),
    "bool": jnp.array([True, False]),
    "c64": jnp.array([1 - 2j]),
    "empty": jnp.zeros((0, 3)),
    "key": jax.random.key(3),
    "keys": jax.random.split(jax.random.key(3), 4),
    "rbg": jax.random.key(1, impl="rbg"),
    "raw key": jax.random.PRNGKey(3),
    "np": {"f64": np.array([0.1]), "i64": np.array(2**60), "scalar": np.float32(0.1), "int": np.int64(-3)},
    "np bf16": np.array(1.5, ml_dtypes.bfloat16),
    "python": [True, 7, -(2**60), 0.1, float("nan"), 1 - 2j, "text", None],
    "a.b": jnp.ones(1),
    "a": {"b": jnp.zeros(1)},
    "x/y": (jnp.ones(2), [jnp.ones(3)]),
    "": jnp.full(1, 5.0),
    "../nul\0": jnp.full(1, 6.0),
    "ü" * 300: jnp.full(1, 7.0),
    "order": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
}


def test_every_kind_of_leaf_comes_back_with_its_bits_and_type(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(LEAVES, step=3)
        found = checkpoints.restore(LEAVES)
    assert found.step == 3
    assert_trees_equal(found.state, LEAVES)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(found.state), jax.tree.leaves(LEAVES), strict=True):
        assert isinstance(a, type(b)), path
        assert getattr(a, "dtype", None) == getattr(b, "dtype", None), path


def test_no_file_is_named_after_a_leaf(tmp_path):
    save(tmp_path, make())
    names = [name for _, folders, files in os.walk(tmp_path) for name in [*folders, *files]]
    assert not [name for name in names if "body" in name or "head" in name]


def test_any_tool_opens_a_checkpoint_and_finds_the_names_of_its_arrays(tmp_path):
    safetensors = need("safetensors.numpy")
    state = updated(make())
    save(tmp_path, state, history={"loss": np.arange(2.0)})
    found = safetensors.load_file(tmp_path / "1" / "arrays" / "0.safetensors")
    assert_trees_equal(found["params/body/w"], np.asarray(state.params["body"]["w"]))
    assert {"clock", "opt_state/0/mu/head", "numbers/values", "@0/history/loss"} <= set(found), sorted(found)
    odd = {"a/b": np.ones(1), "a": {"b": np.zeros(1)}, "": np.ones(2), "[0:1]": np.ones(3), "@0": [np.ones(4)],
           "__metadata__": np.ones(5)}  # fmt: skip
    save(tmp_path / "odd", odd, step=0)
    names = set(safetensors.load_file(tmp_path / "odd" / "0" / "arrays" / "0.safetensors"))
    assert names == {"a%2fb", "a/b", "%", "%5b0:1%5d", "%400/0", "%__metadata__"}
    assert_trees_equal(restored(tmp_path / "odd", odd).state, odd)


def test_parts_come_back_as_they_were(tmp_path):
    data = {"epoch": 3, "tuple": (1, [2.5, None]), "nan": float("nan"), "big": 10**40, "$array": 1, "yes": True}
    callbacks = [{"best": {"w": jnp.ones(2)}}, "patience", jax.random.key(4), np.float32(2), {}]
    history = {"loss": np.arange(3, dtype=np.float32), "step": np.arange(3)}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(make(), data=data, history=history, callbacks=callbacks)
        found = checkpoints.restore(make())
    assert repr(found.data) == repr(data) and type(found.data["yes"]) is bool
    assert_trees_equal(found.history, history)
    assert_trees_equal(found.callbacks[0]["best"]["w"], np.ones(2, np.float32))
    assert found.callbacks[1] == "patience" and found.callbacks[3].dtype == np.float32 and found.callbacks[4] == {}
    assert_trees_equal(found.callbacks[2], jax.random.key(4))
    assert restored(tmp_path, make()).callbacks is not None and found.step == 0


VALUES = {
    "bytes": [b"", b"\x00\xff", {"a": (b"x", [bytearray(b"y")])}],
    "NumPy's numbers": [np.float64(0.1), np.float32("nan"), np.int8(-3), np.bool_(True), np.complex64(1j)],
    "arrays": [np.zeros((0, 2)), jnp.ones(2, jnp.bfloat16), jnp.array(3), [jax.random.key(1), jax.random.PRNGKey(1)]],
    "keys of dicts": [{1: {2: "x"}, "1": np.ones(2), None: (), (1, b"k"): {}, "$tuple": 1.5}],
    "states of generators": [random.Random(1).getstate(), np.random.default_rng(1).bit_generator.state],
}


@pytest.mark.parametrize("name", VALUES)
def test_values_of_the_user_come_back_with_their_types(tmp_path, name):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(make(), data=VALUES[name])
        found = checkpoints.restore(make()).data

    def compare(x, y):
        assert type(x) is type(y) or (type(x), type(y)) == (bytearray, bytes)
        if isinstance(x, dict | list | tuple):
            keys = x if isinstance(x, dict) else range(len(x))
            assert len(x) == len(y)
            [compare(x[key], y[key]) for key in keys]
        elif isinstance(x, jax.Array | np.ndarray | np.generic):
            assert x.dtype == y.dtype and x.shape == y.shape
            assert_trees_equal(x, y)
        else:
            assert x == y

    compare(VALUES[name], found)


def test_members_of_enums_come_back_as_the_values_that_they_are(tmp_path):
    """They equal their values, but `str` of one is its name."""

    class Phase(str, enum.Enum):  # noqa: UP042
        WARM = "warm"

    data = {"phase": Phase.WARM, Phase.WARM: [Phase.WARM]}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(make(), data=data)
        assert checkpoints.restore(make()).data == {"phase": "warm", "warm": ["warm"]} == data


@pytest.mark.medium
def test_tensors_come_back_as_tensors_and_without_torch_the_error_says_so(tmp_path, monkeypatch):
    torch = need("torch")
    tensors = [torch.Generator().manual_seed(1).get_state(), torch.ones(2, 1), torch.tensor(3), torch.zeros(0).bool()]
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(make(), data={"generator": tensors})
        found = checkpoints.restore(make()).data["generator"]
        for x, y in zip(tensors, found, strict=True):
            assert type(y) is torch.Tensor and x.dtype == y.dtype and torch.equal(x, y)
        for tensor in (torch.ones(2).bfloat16(), torch.ones(2, device="meta"), torch.eye(2).to_sparse()):
            text = error_of(lambda tensor=tensor: checkpoints.save(make(), data=tensor), WrongTypeError)
            assert "value at data: got Tensor, expected" in text and "torch's tensors on the CPU" in text
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ts.errors.MissingLibraryError, match=r"torch at restore\(\).*pip install torch"):
        restored(tmp_path, make())
    assert restored(tmp_path, make(), params_only=True).step == 0


@pytest.mark.parametrize(
    "value",
    [
        [{"$bytes": 0}, {"$bytes": 0}], [{"$jax": 0}, {"$array": 0}], {"$torch": 7}, {"$bytes": -1}, {"$jax": "0"},
        {"$numpy": ["object", "00"]}, {"$numpy": ["float32", "00"]}, {"$numpy": ["int8", "xx"]},
        {"$items": [1]}, {"$items": [[[], 1]]}, {"$pickle": 0}, {"$array": 0, "more": 1},
    ],
    ids=str,
)  # fmt: skip
def test_a_hostile_value_of_the_user_is_damage(copy, value):
    """An array that two values refer to could fill the memory with its copies."""
    path, _ = copy
    rewrite(path / "2", lambda body: body["parts"][0][0].__setitem__("history", value))
    with pytest.warns(UserWarning, match=r"step 2: manifest: a value that cannot be read"):
        assert restored(path, make()).step == 1


def test_a_whole_training_state_goes_on_to_the_last_bit(tmp_path):
    rule = ts.rules.chain(ts.rules.clip_by_global_norm(1.0), ts.rules.adamw(lambda step: 0.1 / (step + 1)))
    options = dict(key=3, ema=0.9, precision="float16", model_state={"mean": np.ones(2, np.float32)})
    state = updated(make(rule=rule, **options))
    save(tmp_path, state)
    found = restored(tmp_path, make(rule=rule, **options)).state
    assert_trees_equal(found, state)
    assert jax.tree.structure(found) == jax.tree.structure(state)
    assert_trees_equal(updated(found), updated(state))


def test_what_is_saved_is_the_state_at_the_call_whatever_happens_to_it(tmp_path, at_sync):
    go = threading.Event()
    at_sync(lambda path: go.wait(20))
    array = np.ones(3)
    state = {"w": jnp.ones(3), "n": array}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, step=0)
        assert checkpoints.latest() is None  # it is still being written
        state["w"].delete()
        array[:] = 7
        go.set()
        checkpoints.wait()
    assert_trees_equal(restored(tmp_path, {"w": jnp.zeros(3), "n": array}).state, {"w": jnp.ones(3), "n": np.ones(3)})


def test_a_host_copy_leaves_the_state_free_to_be_donated(tmp_path):
    state = {"w": jnp.ones(1000)}
    with Checkpoints(tmp_path) as checkpoints:
        before = state["w"].unsafe_buffer_pointer()
        checkpoints.save(state, step=0)
        after = jax.jit(lambda s: {"w": s["w"] + 1}, donate_argnums=0)(state)
        assert after["w"].unsafe_buffer_pointer() == before  # in place: no copy was needed


def test_restored_leaves_do_not_compile_the_step_again(tmp_path):
    from tests.helpers import count_compiles

    state = make()
    step = ts.train_step(lambda p, x: jnp.mean(x @ p["body"]["w"] @ p["head"]) + jnp.sum(p["body"]["b"]))
    x = np.ones((2, 3), np.float32)
    state, _ = step(state, x)
    save(tmp_path, state)
    found = restored(tmp_path, make()).state
    with count_compiles() as c:
        for _ in range(2):
            found, _ = step(found, x)
    assert c.traces == 0
    assert int(found.step) == 3


def test_cuts_and_frozen_leaves_are_built_anew(tmp_path):
    state = ts.adjust(make(), "body/**", learning_rate=0.5)
    state = ts.adjust(ts.freeze(updated(state), "head"), "body/b", learning_rate=0.25)
    save(tmp_path, state)
    for like in (make(), make(freezable=True), jax.eval_shape(make)):
        found = restored(tmp_path, like).state
        assert_trees_equal(found, state)
        assert jax.tree.structure(found) == jax.tree.structure(state)
    assert ts.hyperparams(found) == ts.hyperparams(state)


def test_a_state_whose_step_was_set_keeps_its_own_counts(tmp_path):
    state = updated(make()).replace(step=40)
    save(tmp_path, state)
    found = restored(tmp_path, make())
    assert found.step == 40
    assert_trees_equal(found.state, state)


def test_a_freeze_of_the_script_stays_where_the_run_never_froze(tmp_path):
    save(tmp_path, make())
    like = ts.freeze(make(), "head")
    assert_trees_equal(restored(tmp_path, like).state.frozen, like.frozen)


def test_numbers_go_on_live_and_an_edited_one_is_the_scripts(tmp_path):
    save(tmp_path, ts.adjust(make(1e-2), learning_rate=0.5, b1=0.8))
    live = ts.hyperparams(restored(tmp_path, make(1e-2)).state)
    assert (live["learning_rate"], live["b1"]) == (0.5, 0.8)
    with pytest.warns(UserWarning, match=r"learning_rate: 0\.01 then, 0\.02 now: the script's is used") as told:
        found = restored(tmp_path, make(2e-2))
    assert len(told) == 1
    live = ts.hyperparams(found.state)
    assert (live["learning_rate"], live["b1"]) == (0.02, 0.8)
    again = tmp_path / "again"  # the edited value is what the run goes by from here on
    save(again, ts.adjust(found.state, learning_rate=0.7))
    assert ts.hyperparams(restored(again, make(2e-2)).state)["learning_rate"] == 0.7


def test_schedules(tmp_path):
    rule = lambda start, steps=100: ts.rules.sgd(ts.schedules.linear_schedule(start, 0.0, steps))
    state = make(rule=rule(0.5)).replace(step=50)
    save(tmp_path / "a", state)
    save(tmp_path / "held", ts.adjust(state, learning_rate=0.7))
    rate = lambda name, like: ts.hyperparams(restored(tmp_path / name, like).state)["learning_rate"]
    assert rate("a", make(rule=rule(0.5))) == 0.25
    assert rate("held", make(rule=rule(0.5))) == pytest.approx(0.7)
    with pytest.warns(UserWarning, match=r"learning_rate \(init_value\): 0.5 then, 0.8 now"):
        assert rate("held", make(rule=rule(0.8))) == pytest.approx(0.4)
    with pytest.warns(UserWarning, match=r"learning_rate \(transition_steps\): 100 then, 200 now"):
        assert rate("a", make(rule=rule(0.5, 200))) == pytest.approx(0.375)
    with pytest.warns(UserWarning, match="rate: a schedule then, a number now"):
        assert rate("a", make(rule=ts.rules.sgd(0.3))) == pytest.approx(0.3)
    save(tmp_path / "number", make(rule=ts.rules.sgd(0.3)))
    with pytest.warns(UserWarning, match="rate: a number then, a schedule now"):
        assert rate("number", make(rule=rule(0.5))) == 0.5


# ---------------------------------------------------------------------------------------------------- other devices


def sharded(tree, n, axis):
    mesh = Mesh(np.array(jax.devices()[:n]), ("data",))
    spec = lambda x: PartitionSpec(*[None] * axis, "data") if np.ndim(x) > axis and x.shape[axis] % n == 0 else None
    put = lambda x: jax.device_put(x, NamedSharding(mesh, spec(x) or PartitionSpec()))
    return jax.tree.map(put, tree)


TREE = {"w": np.arange(128.0, dtype=np.float32).reshape(8, 16), "b": np.arange(8, dtype=np.int32), "s": np.float32(3)}


@pytest.fixture(scope="module")
def saved_sharded(tmp_path_factory):
    out = {}
    for n, axis in ((1, 0), (2, 0), (4, 0), (8, 0), (4, 1)):
        out[n, axis] = tmp_path_factory.mktemp(f"on{n}")
        tree = sharded(TREE, n, axis)
        save_at = Checkpoints(out[n, axis])
        save_at.save({**tree, "key": jax.random.split(jax.random.key(0), 8)}, step=1)
        save_at.close()
    return out


@pytest.mark.parametrize("there", [(1, 0), (2, 0), (4, 0), (8, 0), (4, 1)])
def test_a_state_moves_between_topologies(saved_sharded, there):
    for here in ((1, 0), (2, 0), (4, 0), (8, 0), (4, 1), (8, 1)):
        like = {**sharded(jax.tree.map(np.zeros_like, TREE), *here), "key": jax.random.split(jax.random.key(1), 8)}
        found = restored(saved_sharded[there], like).state
        assert_trees_equal(found, {**TREE, "s": jnp.float32(3), "key": jax.random.split(jax.random.key(0), 8)})
        assert jax.tree.map(lambda x: x.sharding, found) == jax.tree.map(lambda x: x.sharding, like)


@pytest.mark.slow  # twenty seconds
def test_a_run_moves_between_all_numbers_of_devices(tmp_path):
    """Saved in the middle of an epoch: the same values, no row left out or read twice, a warning; the same curve."""
    rows = {"x": np.random.default_rng(0).normal(size=(40, 8)).astype(np.float32), "id": np.arange(40)}
    start = {"w": np.random.default_rng(1).normal(size=(8, 16)).astype(np.float32), "v": np.ones(16, np.float32)}
    on = lambda n: ts.mesh(data=1, fsdp=-1, devices=jax.devices()[:n])
    step = ts.train_step(lambda p, batch: jnp.mean((jnp.tanh(batch["x"] @ p["w"]) @ p["v"] - 1) ** 2))

    def run(n, first, last, path):
        """The losses of some steps and the rows of each, on n devices."""
        data = ts.batches(rows, 8, shuffle=True, seed=1)
        state, losses, seen = ts.shard(lambda: ts.setup(ts.rules.adam(1e-2), start, key=0, ema=0.9), on(n)), [], []
        with Checkpoints(path, read_only=bool(first)) as checkpoints:
            found = checkpoints.restore(state)
            if first:
                homes = ([x.sharding for x in jax.tree.leaves(tree)] for tree in (found.state, state))
                assert len(set(map(tuple, homes))) == 1
                assert_trees_equal(found.state, saved[path])
                data.set_state(found.data)
            state = found.state
            while first + len(losses) < last:
                for batch in data:
                    seen.extend(batch["id"].tolist())
                    state, info = step(state, batch)
                    losses.append(float(info.loss))
                    if first + len(losses) == last:
                        break
            if not first:
                saved[path] = jax.tree.map(jnp.copy, state)
                checkpoints.save(state, data=data.get_state())
        return losses, seen

    counted, saved = 0, {}
    expected, order = run(1, 0, 10, tmp_path / "whole")
    assert sorted(order[:40]) == sorted(order[40:]) == list(range(40))
    for a in (1, 2, 4, 8):
        path = tmp_path / str(a)
        before = run(a, 0, 7, path)
        for b in (1, 2, 4, 8):
            if a == b:
                continue
            after = run(b, 7, 10, path)
            assert before[1] + after[1] == order
            np.testing.assert_allclose(before[0] + after[0], expected, rtol=1e-5)
            counted += 1
    assert counted == 12


def test_arrays_on_several_devices_are_stored_whole_and_once(saved_sharded):
    safetensors = need("safetensors.numpy")
    for there in saved_sharded.values():
        found = safetensors.load_file(there / "1" / "arrays" / "0.safetensors")
        assert_trees_equal({name: found[name] for name in TREE}, jax.tree.map(np.asarray, TREE))
        assert set(found) == {*TREE, "key"}


def test_a_part_of_an_array_is_read_without_the_rest(tmp_path, monkeypatch):
    draw, arrays = np.random.default_rng(0), {"scalar": np.float32(3)}
    for dtype in ("float32", "bfloat16", "float8_e4m3fn", "int8", "bool"):
        arrays[dtype] = draw.integers(0, 2, (40, 6, 5)).astype(np.float32).astype(dtype)
    _safetensors.write(tmp_path / "a.safetensors", arrays, {})
    entries = _safetensors.contents(tmp_path / "a.safetensors")
    assert_trees_equal({name: _safetensors.read(x) for name, x in entries.items()}, arrays)
    for at_once in (_safetensors._BYTES_AT_ONCE, 64):
        monkeypatch.setattr(_safetensors, "_BYTES_AT_ONCE", at_once)
        for bounds in (((3, 7), (0, 6), (0, 5)), ((0, 40), (2, 3), (1, 4)), ((5, 5), (0, 6), (0, 5))):
            for name in arrays.keys() - {"scalar"}:
                part = arrays[name][tuple(slice(*cut) for cut in bounds)]
                assert_trees_equal(_safetensors.read(entries[name], bounds), part)


def test_a_manifest_does_not_grow_with_the_devices_and_takes_no_time(tmp_path):
    """A model of 7e9 parameters, its 290 arrays and the moments of Adam, described and read in under a second."""
    layer = {"q": (4096, 4096), "k": (4096, 4096), "v": (4096, 4096), "o": (4096, 4096), "up": (4096, 11008),
             "gate": (4096, 11008), "down": (11008, 4096), "norm": (4096,), "norm2": (4096,)}  # fmt: skip
    struct = lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    params = {str(i): {name: struct(shape) for name, shape in layer.items()} for i in range(32)}
    tree = leaves.tree_of({"params": params, "mu": params, "nu": params})
    start = time.thread_time()
    found = [leaves.leaf_of(path, x, name) for (path, x), name in zip(tree.leaves, tree.names, strict=True)]
    known = _manifest.Manifest(0, found, {}).with_hashes({x.name: 2**64 - 1 for x in found})
    assert _manifest.Manifest.parse(known.dump()) == known and len(found) == 864
    assert time.thread_time() - start < 1


def test_the_hash_of_an_array_does_not_depend_on_its_sharding(saved_sharded):
    """So that what one topology saved, another one verifies; and a flip of any bit changes it."""
    hashes = [
        {leaf.name: leaf.hash for leaf in _home.CheckpointHome(path).manifest(1).leaves}
        for path in saved_sharded.values()
    ]
    assert hashes[0] == hashes[-1] and all(known == hashes[0] for known in hashes)
    draw = np.random.default_rng(0)
    for dtype in ("float32", "bfloat16", "int8", "float64", "complex128", "bool", "int4"):
        x = draw.integers(0, 2, (6, 5, 8)).astype(np.float32).astype(dtype)
        cuts = [((0, 2), (2, 6)), ((0, 5),), ((0, 3), (3, 4), (4, 8))]
        parts = [
            checksums.block_hash(x[tuple(slice(*cut) for cut in bounds)], bounds, x.shape)
            for bounds in itertools.product(*cuts)
        ]
        assert sum(parts) % checksums.MODULUS == checksums.block_hash(x), dtype
    missed, x = 0, draw.standard_normal((100, 70)).astype(np.float32)
    known = checksums.block_hash(x)
    for _ in range(2000):
        flat = x.reshape(-1).view(np.uint32)
        at, bit = draw.integers(flat.size), np.uint32(1 << draw.integers(32))
        flat[at] ^= bit
        missed += checksums.block_hash(x) == known
        flat[at] ^= bit
    assert missed == 0 and checksums.block_hash(x) == known
    assert len({checksums.block_hash(np.roll(x, n)) for n in range(50)}) == 50


# --------------------------------------------------------------------------------------------------- kinds of trees


def test_nnx_linen_and_equinox_parameters(tmp_path):
    from flax import linen, nnx

    def of(seed):
        yield nnx.state(nnx.Linear(3, 2, rngs=nnx.Rngs(seed)), nnx.Param)
        yield linen.Dense(2).init(jax.random.key(seed), jnp.ones((1, 3)))["params"]

    for i, (saved, like) in enumerate(zip(of(0), of(1), strict=True)):
        save(tmp_path / str(i), make(params=saved))
        found = restored(tmp_path / str(i), make(params=like)).state
        assert_trees_equal(found.params, saved)
        assert jax.tree.structure(found.params) == jax.tree.structure(saved)
    names = [leaf.path for leaf in _home.CheckpointHome(tmp_path / "0").manifest(0).leaves if leaf.path[0] == ".params"]
    assert ("value" in str(names), len(names)) == (False, 2)


def test_equinox_parameters(tmp_path):
    eqx = need("equinox")
    params = lambda seed: eqx.partition(eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(seed)), eqx.is_array)[0]
    save(tmp_path, make(params=params(0)))
    assert_trees_equal(restored(tmp_path, make(params=params(1))).state.params, params(0))


def test_a_pair_of_states(tmp_path):
    pair = lambda: {"g": make(key=1), "d": ts.adjust(make(rule=ts.rules.sgd(0.1, momentum=0.9)), "head", momentum=0.5)}
    both = {name: updated(state) for name, state in pair().items()}
    save(tmp_path, both)
    found = restored(tmp_path, {"g": make(key=1), "d": make(rule=ts.rules.sgd(0.1, momentum=0.9))})
    assert found.step == 1
    assert_trees_equal(found.state, both)
    assert ts.hyperparams(found.state["d"]) == ts.hyperparams(both["d"])
    with pytest.raises(CheckpointError, match=r"rule of state\['d'\]: saved sgd\(.*expected adam\("):
        restored(tmp_path, {"g": make(key=1), "d": make()})


# -------------------------------------------------------------------------------------------------- parts of a state


def test_params_only(three):
    path, states = three
    zeros = jax.tree.map(np.zeros_like, PARAMS)
    found = restored(path, make(rule=ts.rules.sgd(0.1), params=zeros, ema=0.5), params_only=True)
    assert_trees_equal(found.state.params, states[2].params)
    assert_trees_equal(found.state.average.params, states[2].params)
    assert (int(found.state.step), found.step, found.data) == (0, 2, None)
    bare = restored(path, zeros, params_only=True).state
    assert_trees_equal(bare, jax.tree.map(np.asarray, states[2].params))
    assert isinstance(bare["head"], np.ndarray)
    with pytest.raises(CheckpointError, match=r"state\['more'\]: nothing saved, expected float64\[1\]"):
        restored(path, {**zeros, "more": np.ones(1)}, params_only=True)
    with pytest.raises(CheckpointError, match=r"state\.params\['head'\]: saved float32\[4,2\], expected nothing"):
        restored(path, {"body": zeros["body"]}, params_only=True)


def test_partial(three):
    path, states = three
    other = {"body": jax.tree.map(np.zeros_like, PARAMS["body"]), "new": np.full(5, 2, np.float32)}
    state = make(params=other, precision=ts.precision.Policy(param="bfloat16"))
    with pytest.raises(CheckpointError, match=r"saved float32\[3,4\], expected bfloat16\[3,4\]"):
        restored(path, state, partial="body/**")
    found = restored(path, state, partial="body/**", cast=True).state
    body = jax.tree.map(lambda x: x.astype(jnp.bfloat16), states[2].params["body"])
    assert_trees_equal(found.params["body"], body)
    assert_trees_equal(found.masters["body"], jax.tree.map(lambda x: x.astype(np.float32), body))
    assert_trees_equal(found.params["new"], jnp.full(5, 2, jnp.bfloat16))
    with pytest.raises(ts.errors.PatternError, match="no match among 3 leaves"):
        restored(path, state, partial="boddy/**")
    with pytest.raises(CheckpointError, match=r"params\['new'\]: nothing saved"):
        restored(path, state, partial=["body/**", "new"], cast=True)


def test_cast_is_for_floats_only(tmp_path):
    save_at = Checkpoints(tmp_path)
    save_at.save({"w": jnp.array([1.1]), "n": jnp.array([3])}, step=0)
    save_at.close()
    found = restored(tmp_path, {"w": jnp.zeros(1, jnp.bfloat16), "n": jnp.array([0])}, cast=True).state
    assert_trees_equal(found, {"w": jnp.array([1.1], jnp.bfloat16), "n": jnp.array([3])})
    for like in ({"w": jnp.zeros(1), "n": jnp.zeros(1)}, {"w": jnp.array([0]), "n": jnp.array([3])}):
        with pytest.raises(CheckpointError, match=r"saved .*, expected"):
            restored(tmp_path, like, cast=True)


# --------------------------------------------------------------------------------------------------------- mismatches

Moments = lambda **changes: make(params={**PARAMS, **changes})
MISMATCHES = {
    "shape": (lambda: Moments(head=np.ones((4, 3), np.float32)), r"params\['head'\]: saved float32\[4,2\], .*\[4,3\]"),
    "dtype": (lambda: Moments(head=jnp.ones((4, 2), jnp.bfloat16)), r"saved float32\[4,2\], expected bfloat16\[4,2\]"),
    "more": (lambda: Moments(x=np.ones(1, np.float32)), r"params\['x'\]: nothing saved, expected float32\[1\]"),
    "fewer": (lambda: make(params={"head": PARAMS["head"]}), r"\['b'\]: saved float32\[4\], expected nothing"),
    "renamed": (
        lambda: make(params={"body": PARAMS["body"], "top": PARAMS["head"]}),
        r"params\['top'\]: nothing saved",
    ),
    "list for dict": (lambda: make(params=[PARAMS["body"], PARAMS["head"]]), r"params\[0\]\['b'\]: nothing saved"),
    "adamax": (lambda: make(rule=ts.rules.adamax(1e-2)), r"rule of state: saved adam\(.*expected adamax\("),
    "adamw": (lambda: make(rule=ts.rules.adamw(1e-2)), r"rule of state: saved adam\(.*expected adamw\("),
    "sgd": (lambda: make(rule=ts.rules.sgd(1e-2)), r"rule of state: saved adam\(.*expected sgd\("),
    "nesterov": (lambda: make(rule=ts.rules.adam(1e-2, nesterov=True)), r"nesterov=False\), .*nesterov=True"),
    "clipped": (lambda: make(rule=ts.rules.chain(ts.rules.clip(1.0), ts.rules.adam(1e-2))), r"clip\(max_delta\)"),
    "groups": (lambda: make(rule=ts.rules.partition({"**": ts.rules.adam(1e-2)})), r"expected _Partition"),
    "plain": (lambda: make(rule=optax.adam(1e-2)), r"rule of state: saved adam\(.*expected chain\(\("),
    "selected": (lambda: make(trainable="head"), "trained of state: saved None, expected head"),
    "average": (lambda: make(ema=0.9), "averages of state: saved None, expected average \\(exponential\\)"),
    "precision": (lambda: make(precision="bfloat16"), "precision of state: saved None, expected Policy"),
    "key": (lambda: make(key=1), r"state\.key: nothing saved, expected key:fry\[2\]"),
    "model state": (lambda: make(model_state={"n": np.ones(1)}), r"model_state\['n'\]: nothing saved"),
    "no state": (lambda: PARAMS, r"state\['head'\]: nothing saved, expected float32\[4,2\]"),
    "state within": (lambda: {"a": make()}, r"state\['a'\]: saved no TrainState, expected one"),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_another_state_is_refused_with_both_sides(three, name):
    like, expected = MISMATCHES[name]
    with pytest.raises(CheckpointError, match=expected) as told:
        restored(three[0], like())
    lines = str(told.value).splitlines()
    assert lines[0] == f"checkpoint of another state at {three[0] / '2'}:"
    assert len(lines) <= 13 and "params_only=True" in lines[-1]
    with pytest.raises(CheckpointError) as of_fit:
        reading.resumed(Checkpoints(three[0], read_only=True), like(), "auto")
    assert str(of_fit.value) == str(told.value)


PAIRS = {  # trees that only differ in what holds their leaves
    "int key and index": ({"a": {0: jnp.ones(1)}}, {"a": [jnp.ones(1)]}),
    "typed and raw key": ({"k": jax.random.key(0)}, {"k": jax.random.PRNGKey(0)}),
    "generators": ({"k": jax.random.key(0)}, {"k": jax.random.key(0, impl="rbg")}),
    "python and array": ({"n": 1}, {"n": jnp.array(1)}),
    "int and bool": ({"n": 1}, {"n": True}),
    "int32 and float32": ({"n": jnp.array(1)}, {"n": jnp.array(1.0)}),
    "(1,) and ()": ({"n": jnp.ones(1)}, {"n": jnp.ones(())}),
}


def test_trees_that_differ_in_their_containers_are_refused(tmp_path):
    for name, (a, b) in PAIRS.items():
        for n, (saved, like) in enumerate(((a, b), (b, a))):
            path = tmp_path / f"{name} {n}"
            with Checkpoints(path) as checkpoints:
                checkpoints.save({"x": jnp.ones(1), "t": saved}, step=0)
                assert checkpoints.restore({"x": jnp.ones(1), "t": saved}).step == 0, name
                with pytest.raises(CheckpointError, match=r"state\['t'\].*: (saved .*|nothing saved), expected"):
                    checkpoints.restore({"x": jnp.ones(1), "t": like})


# ------------------------------------------------------------------------------------------------- the inputs' errors


def test_paths(tmp_path, monkeypatch):
    file = tmp_path / "model.pt"
    file.write_bytes(b"\x80\x04")
    assert f"path at {file}: got FileExistsError" in error_of(lambda: Checkpoints(file))
    assert "NotADirectoryError" in error_of(lambda: Checkpoints(file / "under"))
    for bad in ("", None, 3, b"bytes", "a\0b"):
        assert "path at Checkpoints(): got " in error_of(lambda bad=bad: Checkpoints(bad))
    assert "File name too long" in error_of(lambda: Checkpoints(tmp_path / ("x" * 300)))
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert "got PermissionError not writable, expected a directory that can be written" in error_of(
        lambda: Checkpoints(tmp_path / "locked")
    )
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    checkpoints = Checkpoints("relative")
    monkeypatch.chdir("/")
    checkpoints.save(make())
    checkpoints.close()
    assert (tmp_path / "relative" / "0" / "manifest.json").exists()


def test_settings(tmp_path):
    endless = {"timeout": float("inf"), "timeout ": 1e12, " timeout": float("nan")}
    for name, value in {"every": 0, "keep_last": 0, "keep_every": -1, "timeout": 0, **endless}.items():
        name = name.strip()
        assert f"{name} at Checkpoints(): got " in error_of(
            lambda: Checkpoints(tmp_path, **{name: value}), HyperparameterError
        )
    for name, value in {"every": 2.5, "keep_last": True, "keep_every": "4", "keep_best": 3}.items():
        assert " at " in error_of(lambda: Checkpoints(tmp_path, **{name: value}), WrongTypeError)
    assert "got 'least' (str), expected 'min' or 'max'" in error_of(
        lambda: Best("a", mode="least"), HyperparameterError
    )
    assert "got 'yes' (str), expected 'auto' or 'must' or 'never'" in error_of(
        lambda: Checkpoints(tmp_path).restore(make(), resume="yes"), HyperparameterError
    )
    for name in ("cast", "params_only"):
        assert f"{name} at restore(): got 'no' (str), expected True or False" in error_of(
            lambda: Checkpoints(tmp_path).restore(make(), **{name: "no"}), WrongTypeError
        )
    checkpoints = Checkpoints(tmp_path, every=3)
    assert [checkpoints.due(i) for i in range(7)] == [False, False, False, True, False, False, True]
    assert not Checkpoints(tmp_path).due(3)


def test_a_duration_is_due_once_it_has_passed_since_the_last_save(tmp_path, clock):
    with Checkpoints(tmp_path, every=(5, "epoch", "10 minutes")) as checkpoints:
        clock.now += 599
        assert [i for i in range(7) if checkpoints.due(i)] == [5]
        clock.now += 1
        assert [i for i in range(4) if checkpoints.due(i)] == [1, 2, 3]
        checkpoints.save(make(), step=3)
        assert not checkpoints.due(4)
        clock.now += 600
        assert checkpoints.due(4)
    with Checkpoints(tmp_path, every="2 epochs") as checkpoints:
        assert error_of(lambda: checkpoints.due(4), HyperparameterError) == (
            "every at due(): got '2 epochs', expected steps or a duration: only fit counts epochs."
        )


def test_an_empty_directory(tmp_path):
    checkpoints, state = Checkpoints(tmp_path), make()
    assert (checkpoints.latest(), checkpoints.steps()) == (None, [])
    found = checkpoints.restore(state)
    assert (found.state is state, found.step, found.data) == (True, None, None)
    assert f"checkpoints at {tmp_path}: got nothing, expected at least one step" in error_of(
        lambda: checkpoints.restore(state, resume="must")
    )
    assert error_of(lambda: checkpoints.restore(state, step=3)) == (
        f"checkpoint at {tmp_path}: got step 3, expected one of none."
    )
    with pytest.raises(CheckpointError, match="got nothing, expected at least one step"):
        checkpoints.restore(state, params_only=True)  # a path with a mistake, and no trained params
    missing = Checkpoints(tmp_path / "not there", read_only=True)
    assert missing.restore(state).step is None and not (tmp_path / "not there").exists()


def test_steps_that_are_not_there_and_fresh_starts(three):
    path, states = three
    checkpoints = Checkpoints(path, read_only=True)
    assert checkpoints.steps() == [0, 1, 2] and checkpoints.latest() == 2
    assert error_of(lambda: checkpoints.restore(make(), step=7)) == (
        f"checkpoint at {path}: got step 7, expected one of 0, 1, 2."
    )
    assert error_of(lambda: checkpoints.restore(make(), resume="never")) == (
        f"steps at {path}: got 0, 1, 2, expected none: resume='never'. Give another path, or delete them yourself."
    )
    found = checkpoints.restore(make(), step=1)
    assert (found.step, found.data, list(found.history["loss"])) == (1, {"epoch": 1}, [0.0, 1.0])
    assert_trees_equal(found.state, states[1])
    assert "read_only=True" in error_of(lambda: checkpoints.save(make()))


def test_other_formats_are_not_opened(tmp_path):
    from orbax.checkpoint import v1 as ocp

    plain = tmp_path / "plain"
    ocp.save(plain, {"w": np.ones(3)})
    managed = tmp_path / "managed"
    shutil.copytree(plain, managed / "4")
    assert error_of(lambda: Checkpoints(managed).restore(make())) == (
        f"checkpoints at {managed}: got step 4: no manifest, expected a good one. Give an earlier step, or another path."
    )


def rewrite(folder: Path, change) -> None:
    """Edit a manifest, and make its checksum fit."""
    body = json.loads((folder / "manifest.json").read_bytes())
    content = json.dumps(change(body) or body).encode()
    (folder / "manifest.json").write_bytes(content)
    (folder / "manifest.sha256").write_text(f"{hashlib.sha256(content).hexdigest()}  manifest.json\n")


def test_a_newer_format_is_named(copy):
    path, _ = copy
    rewrite(path / "2", lambda body: {"format": 9, "anything": body})
    assert error_of(lambda: restored(path, make())) == (
        f"checkpoint at {path / '2'}: got format 9, expected format 1 or earlier: update tsunax."
    )
    assert Checkpoints(path, read_only=True).steps() == [0, 1]


def test_odd_names_are_ignored(copy, tmp_path):
    path, states = copy
    outside = tmp_path / "outside"
    shutil.copytree(path / "2", outside)
    (path / "11").symlink_to(outside)
    for name in ("007", "-4", "٣", "2.5", "notes"):
        (path / name).mkdir()
    (path / "12").write_text("a file")
    found = restored(path, make())
    assert found.step == 2
    assert_trees_equal(found.state, states[2])


def test_leaves_that_cannot_be_saved(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    bad = {
        "object": object(),
        "function": jnp.sin,
        "strings": np.array(["a"]),
        "bytes": b"x",
        "dates": np.array(1, "M8[s]"),
        "masked": np.ma.array([1.0, 2.0], mask=[False, True]),
    }
    for value in bad.values():
        text = error_of(lambda value=value: checkpoints.save({"a": jnp.ones(1), "x": value}, step=0), WrongTypeError)
        assert text.startswith("leaf at state['x']: got ") and text.endswith("expected an array, a number or a string.")
    for name, value in {"data": {1: object()}, "history": object(), "callbacks": [jnp.sin, bad["masked"]]}.items():
        assert f" at {name}" in error_of(lambda: checkpoints.save(make(), **{name: value}), WrongTypeError)
    assert "without a TrainState" in error_of(lambda: checkpoints.save({"a": jnp.ones(1)}), WrongTypeError)
    assert "without leaves" in error_of(lambda: checkpoints.save({}, step=0), WrongTypeError)
    for step, kind in ((-1, HyperparameterError), (2.5, WrongTypeError), ("7", WrongTypeError), (True, WrongTypeError)):
        assert "step at save(): got" in error_of(lambda: checkpoints.save(make(), step=step), kind)
    state = make()
    jax.tree.map(lambda x: x.delete(), state.params)
    assert "donated" in error_of(lambda: checkpoints.save(state), StateError)
    traced = lambda x: checkpoints.save({"x": x}, step=0)
    assert "Save outside of jit" in error_of(lambda: jax.jit(traced)(1.0), WrongTypeError)
    for value in (np.ones(2), "x", None):
        text = error_of(lambda value=value: checkpoints.save(make(), metrics={"a": value}), WrongTypeError)
        assert text.startswith("metric 'a' at save(): got ") and text.endswith("expected a name and a number.")
    assert checkpoints.steps() == []


def test_steps_only_go_up_and_a_step_can_be_replaced(copy):
    path, states = copy
    with Checkpoints(path, keep_last=None) as checkpoints:
        assert error_of(lambda: checkpoints.save(states[1])) == (
            f"step at save(): got 1, expected ≥ 2, the newest in {path}. "
            "To go on from an earlier step, give another path: Checkpoints(other).save(...)."
        )
        checkpoints.save(ts.adjust(states[2], learning_rate=0.5), data="other")
    assert sorted(os.listdir(path)) == ["0", "1", "2", "tsunax.lock"]
    assert restored(path, make()).data == "other"
    assert ts.hyperparams(restored(path, make()).state)["learning_rate"] == 0.5


def data(rows=16, size=4, seed=0, shuffle=True):
    return ts.batches(np.arange(rows * 3, dtype=np.float32).reshape(rows, 3), size, shuffle=shuffle, seed=seed)


STEP = ts.train_step(lambda p, x: jnp.mean(x @ p["body"]["w"] @ p["head"]) + jnp.sum(p["body"]["b"]))


def damaged(path):
    for step in os.listdir(path):
        if step.isdigit():
            os.truncate(path / step / "manifest.json", 9)


def newer(path):
    for step in os.listdir(path):
        if step.isdigit():
            rewrite(path / step, lambda body: {"format": 9})


def replaced(path, write):
    shutil.rmtree(path)
    write()


IN_A_RUN = {  # what is wrong with the directory that `fit` is given, and what it says before anything is compiled
    "a file": (lambda p: replaced(p, lambda: p.write_text("x")), {}, "got FileExistsError"),
    "below a file": (lambda p: replaced(p, lambda: p.write_text("x")), {"under": "x"}, "NotADirectoryError"),
    "NUL": (None, {"under": "a\0"}, "path at Checkpoints"),
    "a long name": (None, {"under": "x" * 300}, "File name too long"),
    "nothing, but must": (
        lambda p: replaced(p, p.mkdir),
        {"resume": "must"},
        "got nothing, expected at least one step",
    ),
    "something, but never": (None, {"resume": "never"}, "expected none: resume='never'"),
    "all damaged": (damaged, {}, "expected a good one. Give an earlier step, or another path"),
    "a newer format": (newer, {}, "format 9, expected format 1 or earlier"),
    "another rule": (
        None,
        {"state": lambda: make(rule=ts.rules.sgd(0.1))},
        r"rule of state: saved adam\(.*expected sgd",
    ),
    "another shape": (
        None,
        {"state": lambda: make(params={**PARAMS, "head": np.ones((4, 5), np.float32)})},
        r"saved float32\[4,2\], expected float32\[4,5\]",
    ),
    "data of another seed": (None, {"data": lambda: data(seed=1)}, "got seed 1, expected seed 0"),
    "data of another length": (None, {"data": lambda: data(rows=20)}, "got rows 20, expected rows 16"),
    "another batch size": (None, {"data": lambda: data(size=8)}, "got batch_size 8, expected batch_size 4"),
    "data in order": (
        None,
        {"data": lambda: data(shuffle=False)},
        "got shuffle False, expected shuffle True, as in the checkpoint",
    ),
    "in use": ("hold", {}, "directory in use at .*: got process"),
}


@pytest.mark.medium
@pytest.mark.parametrize("name", IN_A_RUN)
def test_fit_refuses_a_directory_before_it_compiles(tmp_path, run_of_two_steps, name):
    from tests.helpers import count_compiles

    prepare, given, text = IN_A_RUN[name]
    path = tmp_path / "run"
    shutil.copytree(run_of_two_steps, path)
    if prepare == "hold":
        shutil.rmtree(path)
    holder = program(path, "hold") if prepare == "hold" else None
    if holder is not None:
        assert holder.stdout.readline() == "saved\n", holder.stderr.read()
    elif prepare is not None:
        prepare(path)
    state, rows = given.get("state", make)(), given.get("data", data)()
    where = path / given["under"] if "under" in given else path
    with count_compiles() as compiled, pytest.raises((CheckpointError, DataError), match=text):
        ts.fit(STEP, state, rows, steps=9, checkpoint=where, progress=False, resume=given.get("resume", "auto"))
    assert compiled.traces == 0 and not os.path.exists("x")
    if holder is not None:
        holder.communicate("", timeout=60)
        holder.stdout.close(), holder.stderr.close()


@pytest.fixture(scope="module")
def run_of_two_steps(tmp_path_factory):
    path = tmp_path_factory.mktemp("two") / "run"
    ts.fit(STEP, make(), data(), steps=2, checkpoint=path, progress=False)
    return path


# ------------------------------------------------------------------------------------------------------------ damage


def files_of(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file())


def flipped(content: bytes) -> bytes:
    at = len(content) * 2 // 3
    return content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :]


DAMAGE = {
    "flipped": flipped,
    "cut": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
    "zeros": lambda content: bytes(len(content)),
    "text": lambda content: b"{}\n" * 9,
    "gone": None,
    "a directory": None,
}


@pytest.mark.parametrize("how", DAMAGE)
def test_no_damaged_file_is_believed(copy, tmp_path, how):
    """Each file of the newest checkpoint in turn: its bits, or the older one's with a warning; never others."""
    path, states = copy
    like, outcomes = make(), []
    for file in files_of(path / "2"):
        content = file.read_bytes()
        file.unlink()
        if DAMAGE[how]:
            file.write_bytes(DAMAGE[how](content))
        elif how == "a directory":
            file.mkdir()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found = restored(path, like)
        outcomes.append(found.step)
        assert_trees_equal(found.state, states[found.step])
        told = [str(w.message) for w in told]
        assert found.step == 1 and len(told) == 1, (file, told)
        assert told[0].startswith(f"checkpoint skipped in {path}, step 2: ")
        assert all(len(line) < 400 for line in told)
        file.rmdir() if how == "a directory" else file.unlink(missing_ok=True)
        file.write_bytes(content)
    assert len(outcomes) == 3
    assert restored(path, like).step == 2


def test_a_flip_in_a_large_array_names_the_leaf(tmp_path):
    tree = {"a": jnp.arange(600_000, dtype=jnp.float32), "b": jnp.ones(3)}
    save(tmp_path, tree, step=2)
    data = max(files_of(tmp_path / "2"), key=lambda p: p.stat().st_size)
    size = data.stat().st_size
    for at in (size // 3, size // 2, size - 1000):
        with open(data, "r+b") as file:
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 1]))
        assert error_of(lambda: restored(tmp_path, tree, step=2)) == (
            f"checkpoints at {tmp_path}: got step 2: state['a']: other bytes than were saved (hash), "
            "expected a good one. Give an earlier step, or another path."
        )
        with open(data, "r+b") as file:
            file.seek(at)
            file.write(byte)
    assert_trees_equal(restored(tmp_path, tree, step=2).state, tree)


def test_swapped_arrays_of_one_shape_are_found(tmp_path):
    tree = {"a": jnp.ones(4), "b": jnp.zeros(4)}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(tree, step=1)
    file = tmp_path / "1" / "arrays" / "0.safetensors"
    content = file.read_bytes()
    file.write_bytes(content.replace(b'"a"', b'"c"').replace(b'"b"', b'"a"').replace(b'"c"', b'"b"'))
    with pytest.raises(CheckpointError, match=r"state\['a'\]: other bytes"):
        restored(tmp_path, tree)


def test_where_none_is_good_all_are_listed_and_nothing_is_deleted(copy):
    path, _ = copy
    for step in range(3):
        os.truncate(path / str(step) / "manifest.json", 10)
    (path / "9").mkdir()
    shutil.rmtree(path / "0" / "arrays")
    checkpoints = Checkpoints(path)
    text = error_of(lambda: checkpoints.restore(make()))
    assert text == (
        f"checkpoints at {path}: got step 9: no manifest; step 2: manifest: other bytes than were saved (sha256); "
        "step 1: manifest: other bytes than were saved (sha256); "
        "step 0: manifest: other bytes than were saved (sha256), "
        "expected a good one. Give an earlier step, or another path."
    )
    assert sorted(os.listdir(path)) == ["0", "1", "2", "9", "tsunax.lock"]
    assert checkpoints.latest() is None


def test_a_run_goes_on_over_a_damaged_newest(copy):
    path, states = copy
    shutil.rmtree(path / "2" / "arrays")
    with Checkpoints(path) as checkpoints:
        with pytest.warns(UserWarning, match="step 2: arrays: missing"):
            state = checkpoints.restore(make()).state
        checkpoints.save(updated(state))
        checkpoints.wait()
        assert checkpoints.steps() == [1, 2]
    assert_trees_equal(restored(path, make()).state, states[2])


# -------------------------------------------------------------------------------------------------- which ones are kept


def kept(path, steps, metrics=None, **policy):
    with Checkpoints(path, **policy) as checkpoints:
        for step in steps:
            checkpoints.save({"w": jnp.ones(1)}, step=step, metrics=metrics and {"loss": metrics[step]})
        checkpoints.wait()
        return checkpoints.steps()


@pytest.mark.medium
def test_what_is_kept(tmp_path):
    losses = {1: 3.0, 2: 1.0, 3: float("nan"), 4: 1.0, 5: 2.0, 6: 5.0}
    assert kept(tmp_path / "a", losses) == [5, 6]
    assert kept(tmp_path / "b", losses, keep_last=1) == [6]
    assert kept(tmp_path / "c", losses, keep_last=None) == [1, 2, 3, 4, 5, 6]
    assert kept(tmp_path / "d", losses, keep_every=3) == [3, 5, 6]
    assert kept(tmp_path / "e", losses, losses, keep_best=Best("loss", mode="min")) == [4, 5, 6]
    assert kept(tmp_path / "f", losses, losses, keep_last=1, keep_best=Best("loss", k=2, mode="max")) == [1, 6]
    assert kept(tmp_path / "f", [7], {7: 4.0}, keep_last=1, keep_best=Best("loss", k=2, mode="max")) == [6, 7]


def test_an_old_one_goes_only_when_the_newer_reads_back_as_it_was(tmp_path, at_sync, monkeypatch):
    checkpoints = Checkpoints(tmp_path, keep_last=1)
    checkpoints.save({"w": jnp.ones(3)}, step=1)
    checkpoints.wait()
    at_sync(lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\1"))
    checkpoints.save({"w": jnp.ones(3)}, step=2)
    with pytest.raises(SaveError, match=r"save of step 2 at .*2: got state\['w'\]: other bytes than were saved"):
        checkpoints.wait()
    assert checkpoints.steps() == [1] and sorted(os.listdir(tmp_path)) == ["1", "tsunax.lock"]
    monkeypatch.undo()
    checkpoints.save({"w": jnp.ones(3)}, step=2)
    checkpoints.close()
    assert Checkpoints(tmp_path).steps() == [2]


def test_nothing_foreign_is_deleted(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    run = tmp_path / "run"
    run.mkdir()
    for name in ("3", "12.tmp", "notes", ".tsunax-tmp-x", ".hidden"):
        (run / name).mkdir()
        (run / name / "mine").write_text("x")
    (run / ".tsunax-tmp-5-0123abcd").symlink_to(outside)
    (run / "8").symlink_to(outside)
    with Checkpoints(run, keep_last=1) as checkpoints:
        for step in range(4, 8):
            checkpoints.save({"w": jnp.ones(1)}, step=step)
            if step == 5:
                checkpoints.wait()
                (run / "5" / "mine").write_text("x")  # a file of ours in one of its directories keeps that
    names = ["3/mine", "12.tmp/mine", "notes/mine", ".tsunax-tmp-x/mine", ".hidden/mine", "5/mine"]
    assert all((run / name).read_text() == "x" for name in names)
    assert (outside / "precious").read_text() == "x" and (run / "8").is_symlink()
    with Checkpoints(run) as checkpoints:
        checkpoints.save({"w": jnp.ones(1)}, step=8)
        with pytest.raises(SaveError, match=r"FileExistsError.*holds what is not tsunax"):
            checkpoints.wait()
    assert os.listdir(outside) == ["precious"]


def test_what_a_killed_run_left_is_tidied_up(copy):
    path, states = copy
    shutil.copytree(path / "2", path / ".tsunax-tmp-3-0123abcd")
    shutil.copytree(path / "0", path / ".tsunax-old-0-0123abcd")
    os.rename(path / "2", path / ".tsunax-old-2-0123abcd")  # between the two renames of a replaced step
    assert Checkpoints(path, read_only=True).steps() == [0, 1]
    checkpoints = Checkpoints(path)
    assert sorted(os.listdir(path)) == ["0", "1", "2", "tsunax.lock"]
    assert_trees_equal(checkpoints.restore(make()).state, states[2])


# ------------------------------------------------------------------------------------------------------- failing saves


def full_disk(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_failed_save_is_told_by_the_next_call(tmp_path, at_sync, monkeypatch):
    state = make()
    save(tmp_path, state)
    expected = (
        f"save of step 1 at {tmp_path / '1'}: got OSError [Errno 28] No space left on device, "
        "expected a finished save. Earlier checkpoints are as they were."
    )
    for call in ("save", "wait", "close", "restore"):
        at_sync(full_disk)
        checkpoints = Checkpoints(tmp_path)
        checkpoints.save(updated(state))
        checkpoints._job.completion.wait(20)
        monkeypatch.undo()
        arguments = (state,) if call in ("save", "restore") else ()
        with pytest.raises(SaveError) as told:
            getattr(checkpoints, call)(*arguments)
        assert str(told.value) == expected and told.value.__cause__.errno == errno.ENOSPC
        assert sorted(os.listdir(tmp_path)) == ["0", "tsunax.lock"]
        if call != "close":
            checkpoints.wait()  # told once
            checkpoints.close()


def test_leaving_a_with_block_never_hides_a_lost_save(tmp_path, at_sync):
    at_sync(full_disk)
    with pytest.raises(SaveError), Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(make())
    with pytest.raises(KeyError) as told, Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(make())
        raise KeyError("mine")
    assert "save of step 0" in told.value.__notes__[0]


def test_a_save_that_hangs_is_given_up(tmp_path, at_sync):
    go = threading.Event()
    at_sync(lambda _: go.wait(30) and full_disk())
    checkpoints = Checkpoints(tmp_path, timeout=0.05)
    checkpoints.save(make())
    start = time.monotonic()
    for call in (checkpoints.wait, lambda: checkpoints.save(make())):
        with pytest.raises(
            SaveError, match=r"save of step 0 at .*: got nothing after 0.05 s, expected a finished save"
        ):
            call()
    assert time.monotonic() - start < 5
    go.set()
    checkpoints.timeout = 20
    with pytest.raises(SaveError, match="No space"):
        checkpoints.close()


def test_fit_does_not_let_go_of_signals_before_its_last_save_is_written(tmp_path, at_sync):
    seen = []
    at_sync(lambda path: (time.sleep(0.05), seen.append(signal.getsignal(signal.SIGTERM))))
    step = ts.train_step(lambda params, x: jnp.mean((x.mean(0) - params["w"]) ** 2))
    data = ts.batches(np.full((8, 2), 3.0, np.float32), 4)
    ts.fit(step, ts.setup(ts.rules.sgd(0.1), {"w": jnp.zeros(2)}), data, steps=3, checkpoint=tmp_path, progress=False)
    assert len(seen) > 1 and signal.SIG_DFL not in seen


@pytest.mark.medium
def test_a_second_sigterm_does_not_cut_the_save_short(tmp_path, at_sync):
    again = []
    at_sync(lambda path: (again.append(os.kill(os.getpid(), signal.SIGTERM)), time.sleep(0.2)))
    stop = ts.callbacks.every(3, lambda run: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit) as ended:
        ts.fit(STEP, make(), data(), steps=10**6, checkpoint=tmp_path, callbacks=[stop], progress=False)
    assert ended.value.code == 143 and again and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert Checkpoints(tmp_path, read_only=True).latest() == int(ended.value.state.step) >= 3


def test_a_directory_that_goes_away_under_a_run_is_not_made_anew(tmp_path):
    """Nor one written into that has come in its place: only the lock that was taken keeps others out."""
    cases = {
        "moved": lambda path: os.rename(path, tmp_path / "elsewhere"),
        "deleted": shutil.rmtree,
        "another in its place": lambda path: (os.rename(path, tmp_path / "old"), path.mkdir(), lock(path)),
        "lock deleted": lambda path: (path / "tsunax.lock").unlink(),
        "lock of another run": lambda path: ((path / "tsunax.lock").unlink(), lock(path)),
    }
    lock = lambda path: (path / "tsunax.lock").touch()
    for name, change in cases.items():
        path = tmp_path / name
        checkpoints = Checkpoints(path)
        checkpoints.save(make())
        checkpoints.wait()
        change(path)
        before = sorted(os.listdir(path)) if path.exists() else None
        checkpoints.save(updated(make()))
        with pytest.raises(SaveError, match=r"save of step 1 at .*(No such file|another directory)"):
            checkpoints.close()
        assert (sorted(os.listdir(path)) if path.exists() else None) == before, name


def test_a_lock_whose_close_failed_is_not_closed_again_in_a_forked_child(tmp_path, monkeypatch):
    """Its number may be that of another file by then."""
    lock, closed = durable_files.Lock(tmp_path), []

    def close(fd):
        closed.append(fd)
        raise OSError(5, "Input/output error")

    fd = lock._fd
    with monkeypatch.context() as patch:
        patch.setattr(os, "close", close)
        patch.setattr(durable_files, "_LOCKS", [lock])
        lock.release()
        durable_files._close_all()  # what a forked child does
    assert closed == [fd]
    os.close(fd)


def test_the_lock_is_kept_from_those_who_delete_what_is_old(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        os.utime(tmp_path / "tsunax.lock", (0, 0))
        checkpoints.save(make())
        checkpoints.wait()
        assert time.time() - os.stat(tmp_path / "tsunax.lock").st_mtime < 60


def test_a_save_that_was_given_up_never_appears_after_the_lock_has_gone(tmp_path, at_sync):
    go = threading.Event()
    at_sync(lambda path: go.wait(30))
    checkpoints = Checkpoints(tmp_path, timeout=1.0)
    checkpoints.save(make())
    job = checkpoints._job
    with pytest.raises(SaveError, match="got nothing after 0 s"):
        checkpoints.wait(0.0)
    _background.release(checkpoints)
    go.set()
    assert job.completion.wait(30) and "closed before it was written" in str(job.error)
    job.is_reported = True
    assert os.listdir(tmp_path) == ["tsunax.lock"]


def test_a_restore_that_hangs_is_given_up(three, monkeypatch):
    go = threading.Event()
    monkeypatch.setattr(_blocks, "read_leaf", lambda *_: go.wait(30) and {})
    with pytest.raises(CheckpointError, match=r"restore of step 2 at restore\(\): got nothing after 0.05 s"):
        Checkpoints(three[0], read_only=True, timeout=0.05).restore(make())
    go.set()


def test_everything_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    events, fsync, rename = [], os.fsync, os.rename
    name = lambda fd: os.readlink(f"/proc/self/fd/{fd}")
    monkeypatch.setattr(os, "fsync", lambda fd: (events.append(("sync", name(fd))), fsync(fd)))
    monkeypatch.setattr(os, "rename", lambda a, b: (events.append(("rename", str(b))), rename(a, b)))
    save(tmp_path, make())
    final = str(tmp_path / "0")
    at = events.index(("rename", final))
    synced = {path.split("/", len(final.split("/")))[-1] for kind, path in events[:at] if kind == "sync"}
    files = {str(p.relative_to(final)) for p in Path(final).rglob("*")}
    assert files <= synced, files - synced
    order = [path.rpartition("/")[2] for kind, path in events[:at] if kind == "sync"]
    assert order[-1].startswith(".tsunax-tmp-0-")  # the directory itself last
    assert events[at + 1] == ("sync", str(tmp_path))


# --------------------------------------------------------------------------------------------------------- processes

PROGRAM = """
import os, sys, time, signal
import jax.numpy as jnp
from tsunax.checkpoints.saving import Checkpoints
path, what = sys.argv[1:]
def fsync(fd, sync=os.fsync):
    if what in ("full", "hang") and ".safetensors" in os.readlink(f"/proc/self/fd/{fd}"):
        time.sleep(60 if what == "hang" else 0)
        raise OSError(28, "No space left on device")
    sync(fd)
os.fsync = fsync
checkpoints = Checkpoints(path, timeout=1.0 if what == "hang" else 60.0)
checkpoints.save({"w": jnp.ones(3)}, step=1)
if what == "fork" and os.fork() == 0:
    try:
        checkpoints.save({"w": jnp.ones(3)}, step=2)
    except Exception as error:
        print(error, flush=True)
    time.sleep(20)
    os._exit(0)
if what in ("kill", "fork"):
    checkpoints.wait()
    print("saved", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
if what == "hold":
    checkpoints.wait()
    print("saved", flush=True)
    sys.stdin.read()
print("end", flush=True)
"""


def program(path, what, **options):
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(path), what],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, **options
    )  # fmt: skip


@pytest.mark.medium
def test_scripts_that_do_not_close(tmp_path):
    """The last save is waited for at the end; where it fails or hangs, the exit status says so, and soon."""
    runs = {what: program(tmp_path / what, what) for what in ("plain", "full", "hang")}
    ended = {what: (*run.communicate(timeout=90), run.returncode) for what, run in runs.items()}
    assert ended["plain"][2] == 0 and Checkpoints(tmp_path / "plain").steps() == [1]
    for what, why in {"full": "OSError [Errno 28] No space left on device", "hang": "nothing after 1 s"}.items():
        out, err, code = ended[what]
        assert code == 1 and "end" in out
        assert err.splitlines()[-1] == (
            f"tsunax: save of step 1 at {tmp_path / what / '1'}: got {why}, expected a finished save. "
            "Call close() in time, or write `with Checkpoints(...)`."
        )


@pytest.mark.medium
def test_one_writer_a_directory(tmp_path):
    """Another process is refused while one lives; neither a killed one nor its forked child is in the way."""
    run = program(tmp_path, "hold")
    dead = {what: program(tmp_path / what, what) for what in ("kill", "fork")}
    assert run.stdout.readline() == "saved\n", run.stderr.read()
    text = error_of(lambda: Checkpoints(tmp_path))
    assert text.startswith(f"directory in use at {tmp_path}: got process {run.pid}, since 2")
    assert text.endswith("Wait for it to end, give another path, or read with read_only=True.")
    assert restored(tmp_path, {"w": jnp.zeros(3)}).step == 1
    run.communicate("", timeout=60)
    assert Checkpoints(tmp_path).steps() == [1]
    for what, other in dead.items():
        said = sorted(other.stdout.readline() for _ in range(2 if what == "fork" else 1))
        assert said[-1] == "saved\n", other.stderr.read()
        if what == "fork":
            assert said[0].startswith(
                "checkpoints at save(): got closed ones, or of another process, expected the newest"
            )
        assert other.wait(60) == -9
        checkpoints = Checkpoints(tmp_path / what)
        checkpoints.save({"w": jnp.ones(3)}, step=2)
        checkpoints.close()
        other.stdout.close(), other.stderr.close(), other.stdin.close()


def test_in_one_process_the_last_one_made_writes(tmp_path):
    first = Checkpoints(tmp_path)
    first.save(make())
    second = Checkpoints(tmp_path)
    assert second.steps() == [0]  # it waited for the first one's save
    assert error_of(lambda: first.save(make())) == (
        "checkpoints at save(): got closed ones, or of another process, "
        "expected the newest Checkpoints of the directory in this process."
    )
    first.close()
    second.save(updated(make()))
    second.close()
    assert "closed ones" in error_of(lambda: second.save(make()))
    assert json.loads((tmp_path / "tsunax.lock").read_bytes()).keys() == {"run_id", "file"}  # nobody has it


def test_nothing_of_the_machine_or_the_user_is_written(tmp_path, monkeypatch):
    import getpass
    import socket

    monkeypatch.setenv("SECRET_TOKEN", "hunter2hunter2")
    run = tmp_path / "run"
    checkpoints = Checkpoints(run)
    checkpoints.save(make(), data={"n": 1})
    checkpoints.wait()
    content = b"".join(p.read_bytes() for p in files_of(run))
    for secret in ("hunter2hunter2", str(tmp_path), socket.gethostname() + "!", "/home", getpass.getuser() + "@"):
        assert secret.encode() not in content
    checkpoints.close()


@pytest.mark.parametrize("mask", [0o077, 0o022, 0o000])
def test_modes_are_the_umasks(tmp_path, mask):
    old = os.umask(mask)
    try:
        save(tmp_path / "run", {"w": jnp.ones(1)}, step=0)
    finally:
        os.umask(old)
    paths = [tmp_path / "run", *(tmp_path / "run").rglob("*")]
    assert all((p.stat().st_mode & 0o777 & mask) == 0 for p in paths)


@pytest.mark.medium
def test_readers_while_a_run_rotates(tmp_path):
    like = {"w": jnp.zeros(100)}
    done, wrong, reads = threading.Event(), [], 0

    def write():
        try:
            with Checkpoints(tmp_path, keep_last=1) as checkpoints:
                for step in range(30):
                    checkpoints.save({"w": jnp.full(100, float(step))}, step=step)
        finally:
            done.set()

    writer = threading.Thread(target=write)
    writer.start()
    reader = Checkpoints(tmp_path, read_only=True)
    last = -1
    while not done.is_set():
        found = reader.restore(like)
        if found.step is not None:
            reads += 1
            wrong += [found.step] if found.step < last or found.state["w"][0] != found.step else []
            last = found.step
    writer.join()
    assert reads > 3 and not wrong
    assert reader.latest() == 29  # the writer came to its end, too


@pytest.mark.parametrize("store", ["files", "orbax"])
@pytest.mark.parametrize("asked", ["restore", "latest"])
def test_a_run_rotates_within_a_listing(tmp_path, store, asked):
    """The writer replaces the only step after a reader listed it, and before the reader looks at it."""
    with Checkpoints(tmp_path, keep_last=1, store=store) as writer:

        def save(step):
            writer.save({"w": jnp.full(3, float(step))}, step=step)
            writer.wait()

        for moment in range(1, 5):  # the listing after which it happens
            save(10 * moment)
            reader = Checkpoints(tmp_path, read_only=True, store=store)
            listing, count = reader.home.names, itertools.count(1)

            def names(path, moment=moment, listing=listing, count=count):
                listed = listing(path)
                if next(count) == moment:
                    save(10 * moment + 1)
                return listed

            reader.home.names = names
            step = reader.restore({"w": jnp.zeros(3)}).step if asked == "restore" else reader.latest()
            assert step in (10 * moment, 10 * moment + 1)


# ---------------------------------------------------------------------------------------------------- hostile files


@pytest.mark.medium
def test_mutated_manifests(capfd):
    counts = collections.Counter()
    with jax.numpy_rank_promotion("allow"):
        manifests.run(120, 0, counts)
    assert manifests.is_well(counts), counts
    assert counts["refused"] > 90 and counts["manifests"] == 120


@pytest.mark.slow  # three minutes
def test_ten_thousand_mutated_manifests():
    counts = collections.Counter()
    with jax.numpy_rank_promotion("allow"):
        manifests.run(10_000, 1, counts)
    assert manifests.is_well(counts), counts


@pytest.mark.medium
def test_small_files_that_claim_much_cost_nothing(copy):
    import resource

    path, _ = copy
    folder = path / "2"
    good = (folder / "manifest.json").read_bytes()

    def claim(body):
        body["parts"][0][1][0][3] = [2**40]

    def claim_leaf(body):
        next(x for x in body["leaves"] if x[0] == "params/head")[3] = [2**40, 2]

    contents = {
        "history": claim,
        "leaf": claim_leaf,
        "nested": b"[" * 100_000 + b"]" * 100_000,
        "many": b"[" + b"[]," * 2_000_000 + b"[]]",
        "long": b'{"format": 1' + b" " * (65 << 20) + b"}",
        "digits": b'{"format": ' + b"9" * 100_000 + b"}",
        "a string": b'{"format": 1, "a": "' + b"x" * (60 << 20) + b'"}',
        "a string that fits": b'{"format": 1, "a": "' + b"x" * (27 << 20) + b'"}',
        "wide letters": b'{"format": 1, "a": "' + b"x" * (27 << 20) + "\U0001f600".encode() + b'"}',
    }
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name, content in contents.items():
        (folder / "manifest.json").write_bytes(good)
        if callable(content):
            rewrite(folder, content)
        else:
            (folder / "manifest.json").write_bytes(content)
            (folder / "manifest.sha256").write_text(f"{hashlib.sha256(content).hexdigest()}  manifest.json\n")
        start = time.monotonic()
        with pytest.raises(CheckpointError):
            restored(path, make(), step=2)
        assert time.monotonic() - start < 2, name
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10


def test_empty_arrays_of_huge_shape_are_no_raw_error(copy):
    def claim(body):
        next(x for x in body["leaves"] if x[0] == "params/head")[3] = [2**47, 2**47, 0]

    rewrite(copy[0] / "2", claim)
    with pytest.raises(CheckpointError, match="ValueError no shape"):
        restored(copy[0], make(), step=2)


def test_a_manifest_with_fewer_axes_than_the_arrays_is_no_raw_error(copy):
    def claim(body):
        next(x for x in body["leaves"] if x[0] == "numbers/values")[3] = [4]

    rewrite(copy[0] / "2", claim)
    with pytest.raises(CheckpointError):
        restored(copy[0], make(), step=2)
    tree = {"w": jnp.ones((4, 11))}
    save(copy[0] / "other", tree, step=0)
    rewrite(copy[0] / "other" / "0", lambda body: body["leaves"][0].__setitem__(3, [4]))
    with pytest.raises(CheckpointError, match="'w' is not as the manifest says"):
        restored(copy[0] / "other", {"w": jnp.ones(4)})


@pytest.mark.slow  # twelve seconds
def test_the_memory_that_parsing_takes_is_bounded():
    import tracemalloc

    for piece, n in {b'{"ab":"cd"}': 330_000, b'{"ab":"cd" }': 499_000, b'["ab"]': 499_000, b'"ab"': 999_000}.items():
        content = b"[" + b",".join([piece] * n) + b"]"
        tracemalloc.start()
        with pytest.raises(leaves.Damaged):
            _manifest.Manifest.parse(content)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 100_000_000, piece


def test_links_within_a_checkpoint_are_not_followed_for_the_manifest_or_the_arrays(copy, tmp_path):
    path, _ = copy
    for name in ("manifest.json", "arrays"):
        target = tmp_path / f"elsewhere-{name}"
        os.rename(path / "2" / name, target)
        (path / "2" / name).symlink_to(target)
        with pytest.warns(UserWarning, match="step 2: (manifest: OSError|arrays: missing)"):
            assert restored(path, make()).step == 1
        os.unlink(path / "2" / name)
        os.rename(target, path / "2" / name)


# --------------------------------------------------------------------------------------------------------------- kills


def campaign(tmp_path, name, *arguments, timeout=300):
    results = tmp_path / "counts.jsonl"
    env = {**os.environ, "XLA_FLAGS": ""}
    run = subprocess.run(
        [sys.executable, "-m", f"campaigns.{name}", *arguments, "--results", str(results)],
        cwd=Path(__file__).parents[1], env=env, capture_output=True, text=True, timeout=timeout,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    return [json.loads(line)["counts"] for line in results.read_text().splitlines()][-1]


@pytest.mark.slow  # a minute
def test_killed_runs_end_with_the_same_bits(tmp_path):
    counts = campaign(tmp_path, "kills", "--most", "2", "--seeds", "0:4")
    assert counts["runs"] == counts["same bits"] == 4 and counts["kills"] > 3
    assert counts["most steps repeated"] <= 4


@pytest.mark.slow  # two minutes
def test_runs_that_end_in_any_phase_lose_nothing(tmp_path):
    counts = campaign(tmp_path, "endings", "--count", "10", "--homes", "files", "orbax", timeout=600)
    assert counts["cases"] == counts["good"] == 10


@pytest.mark.slow
def test_the_seconds_of_killed_runs_are_those_of_what_led_to_their_end(tmp_path):
    counts = campaign(tmp_path, "kills", "--fit", "--most", "2", "--seeds", "0:4")
    assert counts["runs"] == counts["same bits"] == 4 and counts["kills"] > 3


@pytest.mark.slow
def test_the_example():
    script = Path(__file__).parents[1] / "examples" / "resume.py"
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"PYTHONPATH": str(script.parents[1])}
    command = [sys.executable, "-W", "error", script, "--steps", "2000", "--kills", "2"]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0 and run.stdout.splitlines()[-1] == "the same bits after 2 kills", run.stdout + run.stderr


@pytest.mark.slow  # three minutes
def test_what_is_left_out_is_noticed(tmp_path):
    """A key, a step, a place in the data, a history, the syncs, the hashes, the lock: each alone turns a driver red."""
    seen = campaign(tmp_path, "precautions", timeout=1200)
    assert {name for name, colour in seen.items() if colour == "red"} == set(training_run.LEAVE_OUT) - {""}


def test_details_that_other_modules_lean_on():
    assert dataclasses.fields(saving.Restored)[0].name == "state"
    assert durable_files.step_in_name("1" * 30) is None and durable_files.ours(".tsunax-tmp-3-0123abcd") == ("tmp", 3)
    assert [leaves.dtype_of(name) for name in ("O", "object", "void", "U3", "datetime64", "float8_", "int2x")] == [
        None
    ] * 7


def test_it_prints_its_path_and_its_steps(tmp_path):
    with ts.Checkpoints(tmp_path / "run", keep_last=2) as checkpoints:
        assert repr(checkpoints) == f"Checkpoints({str(tmp_path / 'run')!r}, steps none)"
        for step in (1000, 2000, 3000):
            checkpoints.save(make(), step=step)
        checkpoints.wait()
        assert repr(checkpoints) == f"Checkpoints({str(tmp_path / 'run')!r}, steps 3,000, 2,000)"


# ---------------------------------------------------------------------------------------------------------- the best


def test_the_best_says_which_way_and_comes_back(tmp_path):
    for bad in ("val/acc", 3):
        text = error_of(lambda bad=bad: Checkpoints(tmp_path, keep_best=bad), WrongTypeError)
        assert "keep_best at Checkpoints(): got " in text and "Best(metric, mode='min')" in text
    assert "mode at Best(): got None, expected 'min' or 'max'" in error_of(lambda: Best("val/acc"), HyperparameterError)
    with Checkpoints(tmp_path, keep_last=None, keep_best=Best("acc", mode="max")) as checkpoints:
        text = error_of(lambda: checkpoints.restore(make(), step="best"))
        assert "got 'best', expected Checkpoints(keep_best=Best(metric)), and steps saved with that metric" in text
        for step, value in enumerate((0.1, 0.9, 0.5, 0.4)):
            more = {"acc": value} if step < 3 else {"loss": 1.0}
            checkpoints.save(make().replace(step=step), metrics=more)
        checkpoints.wait()
        assert checkpoints.metrics() == {0: {"acc": 0.1}, 1: {"acc": 0.9}, 2: {"acc": 0.5}, 3: {"loss": 1.0}}
        assert checkpoints.restore(make(), step="best").step == 1
        (tmp_path / "1" / "arrays" / "0.safetensors").unlink()
        with pytest.warns(UserWarning, match="checkpoint skipped"):
            assert checkpoints.restore(make(), step="best").step == 2
    assert "expected Checkpoints(keep_best=Best(metric))" in error_of(lambda: restored(tmp_path, make(), step="best"))
    assert "got step last" in error_of(lambda: restored(tmp_path, make(), step="last"))


def test_a_name_that_no_metric_has_is_told_at_the_first_save(tmp_path):
    with Checkpoints(tmp_path, keep_best=Best("val/los", mode="min")) as checkpoints:
        checkpoints.save(make())  # without metrics nobody can tell
        text = error_of(lambda: checkpoints.save(make(), metrics={"val/loss": 1.0}), RowError)
    assert text.startswith("metric of keep_best at save(): got 'val/los'") and "Did you mean 'val/loss'?" in text


# --------------------------------------------------------------------------------------------- states that are lost


def poisoned(state, value=np.nan):
    head = jnp.asarray(state.params["head"]).at[0, 0].set(value)
    return state.replace(params={**state.params, "head": head})


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_state_that_is_not_finite_is_not_saved(tmp_path, value):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(make().replace(step=1))
        for step in (3, 1):  # the last one would replace a good one
            checkpoints.save(poisoned(make().replace(step=step), value))
            with pytest.raises(SaveError, match=r"got state\.params\['head'\], which is not finite.*Earlier"):
                checkpoints.wait()
        assert checkpoints.steps() == [1] and sorted(os.listdir(tmp_path)) == ["1", "tsunax.lock"]
        assert checkpoints.restore(make()).step == 1


def test_a_leaf_that_its_gradient_replaces_has_to_be_finite_too(tmp_path):
    key = "_overwrite_with_gradient"
    state = ts.setup(ts.rules.sgd(0.1), {"w": jnp.ones(2), key: {"scale": jnp.ones(1)}})
    bad = state.replace(params={**state.params, key: {"scale": jnp.array([jnp.nan])}})
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state.replace(step=1))
        checkpoints.save(bad.replace(step=2))
        with pytest.raises(SaveError, match=r"got state.*'scale'\], which is not finite"):
            checkpoints.wait()
        assert checkpoints.steps() == [1]


def test_infinities_that_belong_there_are_no_matter(tmp_path):
    params = {"w": jnp.ones(2), "mask": jnp.array([0.0, -jnp.inf])}
    state = ts.setup(ts.rules.sgd(0.1), params, trainable="w", model_state={"best": jnp.array(jnp.inf)})
    pair = ts.population(lambda key, w: ts.setup(ts.rules.sgd(0.1), {"w": w}), 2, w=jnp.array([[1.0], [jnp.nan]]))
    for i, saved in enumerate((state, pair, {"bare": jnp.array(jnp.nan)})):
        save(tmp_path / str(i), saved, step=1)
        assert Checkpoints(tmp_path / str(i), read_only=True).steps() == [1]


@pytest.mark.parametrize("what", ["masters", "average"])
def test_masters_and_averages_are_looked_at_too(tmp_path, what):
    state = ts.setup(ts.rules.sgd(0.1), {"w": jnp.ones(2)}, precision=ts.precision.Policy(param="bfloat16"), ema=0.9)
    odd = jnp.array([1.0, jnp.nan])
    part = {"masters": {"w": odd}, "average": dataclasses.replace(state.average, params={"w": odd})}[what]
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(dataclasses.replace(state, **{what: part}))
        with pytest.raises(SaveError, match=rf"got state\.{what}.*not finite"):
            checkpoints.wait()


def test_copies_to_devices_begin_while_other_arrays_are_read(tmp_path, monkeypatch):
    make = lambda: ts.setup(ts.rules.adam(1e-3), {"w": jnp.ones(64), "v": jnp.ones(3)}, key=0)
    with ts.Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(make())
    placed, threads = _matching.placed, {}

    def recorded(value, like, kind):
        result = placed(value, like, kind)
        threads.setdefault(threading.current_thread() is threading.main_thread(), []).append(np.shape(result))
        return result

    monkeypatch.setattr(_matching, "placed", recorded)
    with jax.default_device(jax.devices()[3]):
        state = ts.Checkpoints(tmp_path / "run", read_only=True).restore(make()).state
    assert threads[False].count((64,)) == threads[False].count((3,)) == 3
    assert {x.device for x in jax.tree.leaves(state)} == {jax.devices()[3]}
    assert_trees_equal(state.params, make().params)


def test_arrays_of_64_bits_are_restored_as_they_were(tmp_path):
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        state = ts.setup(ts.rules.adam(1e-3), {"w": jnp.full(3, np.pi, jnp.float64)})
        with ts.Checkpoints(tmp_path / "run") as checkpoints:
            checkpoints.save(state)
        restored = ts.Checkpoints(tmp_path / "run", read_only=True).restore(state).state
    assert restored.params["w"].dtype == np.float64 and (np.asarray(restored.params["w"]) == np.pi).all()
