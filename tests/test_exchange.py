"""Exchange: what others read of our files and we of theirs, what is refused, what a failed write leaves."""

import functools
import json
import os
import random
import resource
import shutil
import stat
import time
import warnings
from pathlib import Path

import flax.serialization
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
import tsunax as ts
from campaigns import manifests
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tests.helpers import assert_trees_equal, error_of, need
from tsunax.checkpoints import exchange
from tsunax.checkpoints._blocks import Pieces, stored_in
from tsunax.checkpoints.leaves import Damaged
from tsunax.errors import (
    CheckpointError,
    HyperparameterError,
    PatternError,
    SaveError,
    StateError,
    TsunaxError,
    WrongTypeError,
)

PARAMS = {
    "body": {"w": np.arange(12.0, dtype=np.float32).reshape(3, 4), "b": np.ones(4, np.float32)},
    "head": [np.full((4, 2), 2.0, np.float32)],
}
ARRAYS = {
    "f32": jnp.array([1.5, -0.0, jnp.nan, jnp.inf, 1e-42]),
    "bf16": jnp.array([[1.5, 3e38]], jnp.bfloat16),
    "f16": jnp.array([6e-8], jnp.float16),
    "f8": {"e4m3": jnp.array([0.5, 448], jnp.float8_e4m3fn), "e5m2": jnp.array([0.5, 57344], jnp.float8_e5m2)},
    "ints": [jnp.array(-7, jnp.int8), jnp.array([255], jnp.uint8), jnp.array(16_777_217), np.array(2**60)],
    "more": (np.array([-3], np.int16), np.array([3], np.uint16), np.array([3], np.uint32), np.array([3], np.uint64)),
    "bool": jnp.array([True, False, True]),
    "empty": jnp.zeros((0, 3)),
    "f64": np.array([0.1]),
    "c64": jnp.array([1 - 2j]),
    "order": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "scalar": np.float32(0.1),
}
OTHERS = {
    "key": jax.random.key(3),
    "keys": jax.random.split(jax.random.key(3), 4),
    "rbg": jax.random.key(1, impl="rbg"),
    "a.b": jnp.ones(1),
    "a": {"b": jnp.zeros(1)},
    "ü": np.array(1.5, ml_dtypes.bfloat16),
}


def make(rule=None, params=None, **options):
    return ts.setup(ts.rules.adam(1e-2) if rule is None else rule, PARAMS if params is None else params, **options)


restore_flax = functools.partial(exchange.restore, format="flax")
restore_orbax = functools.partial(exchange.restore, format="orbax")


@jax.jit
def updated(state):
    return ts.update(state, jax.tree.map(jnp.ones_like, ts.trainable(state)))[0]


def zeros(tree):
    return jax.tree.map(lambda x: x * 0 if jnp.issubdtype(np.asarray(x).dtype, np.number) else x, tree)


def by_hand(path) -> tuple[dict, dict]:
    """A file as its specification reads: header, and the bytes of each name."""
    content = Path(path).read_bytes()
    n = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + n])
    cut = lambda x: content[8 + n + x["data_offsets"][0] : 8 + n + x["data_offsets"][1]]
    return header, {name: cut(x) for name, x in header.items() if name != "__metadata__"}


# ---------------------------------------------------------------------------------------------------------- formats


def test_every_kind_of_leaf_comes_back_with_its_bits_and_type(tmp_path):
    tree = {"arrays": ARRAYS, **OTHERS}
    exchange.save(tmp_path / "a.safetensors", tree)
    found = exchange.restore(tmp_path / "a.safetensors", tree)
    assert_trees_equal(found, tree)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(tree), strict=True):
        assert isinstance(a, type(b)) and getattr(a, "dtype", None) == getattr(b, "dtype", None), path


def test_the_file_is_as_the_format_says(tmp_path):
    exchange.save(tmp_path / "a.safetensors", ARRAYS)
    header, parts = by_hand(tmp_path / "a.safetensors")
    assert list(parts) == sorted(parts, key=lambda name: header[name]["data_offsets"])
    assert header["bf16"]["dtype"] == "BF16" and header["bf16"]["shape"] == [1, 2]
    assert parts["bf16"] == bytes.fromhex("c03f623f".replace("623f", "627f"))
    assert parts["ints/2"] == (16_777_217).to_bytes(4, "little") and header["ints/2"]["shape"] == []
    assert parts["bool"] == b"\1\0\1" and parts["empty"] == b"" and header["empty"]["shape"] == [0, 3]
    assert parts["order"] == np.arange(6.0).tobytes()
    assert header["f8/e4m3"]["dtype"] == "F8_E4M3" and parts["f8/e4m3"] == b"\x30\x7e"
    size = {
        "F64": 8,
        "I64": 8,
        "U64": 8,
        "C64": 8,
        "F32": 4,
        "I32": 4,
        "U32": 4,
        "BF16": 2,
        "F16": 2,
        "I16": 2,
        "U16": 2,
    }
    start = (8 + int.from_bytes((tmp_path / "a.safetensors").read_bytes()[:8], "little")) % 8
    assert start == 0
    assert all(header[name]["data_offsets"][0] % size.get(header[name]["dtype"], 1) == 0 for name in parts)
    about = header["__metadata__"]
    assert about == {"format": "flax"}


def test_the_library_reads_ours_and_we_read_its(tmp_path):
    need("safetensors")
    import safetensors
    import safetensors.flax
    import safetensors.numpy

    exchange.save(tmp_path / "ours.safetensors", ARRAYS)
    tree = {name: np.ascontiguousarray(x) for name, x in exchange_names(ARRAYS).items()}
    theirs = dict(safetensors.deserialize((tmp_path / "ours.safetensors").read_bytes()))
    assert {name: (x["shape"], bytes(x["data"])) for name, x in theirs.items()} == {
        name: (list(np.shape(exchange_names(ARRAYS)[name])), x.tobytes()) for name, x in tree.items()
    }
    for framework, known in {"numpy": "f64", "flax": "bf16"}.items():
        with safetensors.safe_open(tmp_path / "ours.safetensors", framework) as file:
            got = np.asarray(file.get_tensor(known))
            assert (got.dtype, got.tobytes()) == (tree[known].dtype, tree[known].tobytes())
            assert file.metadata()["format"] == "flax"
    some = {
        name: jnp.asarray(x) for name, x in ARRAYS.items() if name in ("f32", "bf16", "f16", "bool", "empty", "c64")
    }
    safetensors.flax.save_file({**some}, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    assert_trees_equal(exchange.restore(tmp_path / "theirs.safetensors"), jax.tree.map(np.asarray, some))
    assert_trees_equal(exchange.restore(tmp_path / "theirs.safetensors", zeros(some)), some)
    small = {"empty": ARRAYS["empty"], "half": {"b": ARRAYS["bf16"]}}
    back = exchange.restore(
        tmp_path / "theirs.safetensors",
        zeros(small),
        where="**",
        rename=lambda name: {"half/b": "bf16"}.get(name, name),
    )
    assert_trees_equal(back, small)


def exchange_names(tree):
    from tsunax._core import trees

    return {"/".join(name): x for name, _, x in trees.leaves_with_names(tree)}


def in_parts(folder, tree):
    """Files and an index as the Hugging Face hub has them, a name in each."""
    files = {name: f"model-{i + 1:05}-of-{len(tree):05}.safetensors" for i, name in enumerate(tree)}
    for name, x in tree.items():
        exchange.save(folder / files[name], {name: x})
    body = {"metadata": {"total_size": 1}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(body))


def test_several_files_with_an_index(tmp_path):
    tree = {"a": np.arange(100, dtype=np.float32), "b": np.ones(30, np.int8), "c": jnp.full(300, 2.0)}
    in_parts(tmp_path, tree)
    for where in (tmp_path / "model.safetensors", tmp_path, tmp_path / "model.safetensors.index.json"):
        assert_trees_equal(exchange.restore(where, tree), tree)
    assert exchange.contents(tmp_path)["b"] == jax.ShapeDtypeStruct((30,), np.int8)


def test_without_a_tree(tmp_path):
    exchange.save(tmp_path / "a.safetensors", {**PARAMS, "key": jax.random.key(1)})
    found = exchange.restore(tmp_path / "a.safetensors")
    assert_trees_equal(
        found,
        {
            **{f"body/{name}": x for name, x in PARAMS["body"].items()},
            "head/0": PARAMS["head"][0],
            "key": np.asarray(jax.random.key_data(jax.random.key(1))),
        },
    )
    assert "rename" in error_of(lambda: exchange.restore(tmp_path / "a.safetensors", rename=str.upper), WrongTypeError)


# ------------------------------------------------------------------------------------------------------ into states


def test_a_whole_state_comes_back(tmp_path):
    rule = ts.rules.chain(ts.rules.clip_by_global_norm(1.0), ts.rules.adamw(lambda step: 0.1 / (step + 1)))
    options = dict(rule=rule, key=3, ema=0.9, precision="float16", model_state={"mean": np.ones(2, np.float32)})
    state = ts.adjust(updated(make(**options)), learning_rate=0.5)
    exchange.save(tmp_path / "a.safetensors", state)
    found = exchange.restore(tmp_path / "a.safetensors", make(**options))
    assert_trees_equal(found, state)
    assert jax.tree.structure(found) == jax.tree.structure(state)
    assert_trees_equal(updated(found), updated(state))
    names = set(exchange.contents(tmp_path / "a.safetensors"))
    assert {"params/body/w", "model_state/mean", "key", "clock"} <= names
    assert any(name.startswith("opt_state/") and name.endswith("/mu/body/w") for name in names)
    assert "nothing named" in error_of(
        lambda: exchange.restore(tmp_path / "a.safetensors", make(ts.rules.sgd(0.1, momentum=0.9)))
    )


def test_a_pair_of_states(tmp_path):
    pair = lambda: {"g": make(key=1), "d": make(ts.rules.sgd(0.1, momentum=0.9))}
    both = {name: updated(state) for name, state in pair().items()}
    exchange.save(tmp_path / "a.safetensors", both)
    assert_trees_equal(exchange.restore(tmp_path / "a.safetensors", pair()), both)


def test_params_of_a_state_and_into_one(tmp_path):
    state = updated(updated(make()))
    exchange.save(tmp_path / "state.safetensors", state)
    exchange.save(tmp_path / "params.safetensors", state.params)
    for name in ("state", "params"):
        path = tmp_path / f"{name}.safetensors"
        bare = exchange.restore(path, PARAMS)
        assert_trees_equal(bare, jax.tree.map(np.asarray, state.params))
        assert isinstance(bare["head"][0], np.ndarray)
        other = make(ts.rules.sgd(0.1), params=zeros(PARAMS), ema=0.5, precision="bfloat16")
        into = exchange.restore(path, other, where="**")
        assert_trees_equal((into.params, into.average.params), (state.params, state.params))
        assert int(into.step) == 0 and into.plan is other.plan
        part = exchange.restore(path, other, where="head/**").params
        assert_trees_equal(part, {"body": zeros(PARAMS)["body"], "head": state.params["head"]})
    into = exchange.restore(tmp_path / "params.safetensors", make(ts.rules.sgd(0.1)))
    assert_trees_equal(into.params, state.params)


def test_copies_of_params_in_a_rule_follow_restored_params(tmp_path):
    """From its old copies, a schedule-free rule would make the initial params again."""
    goal, loss_fn = np.full(3, 5, np.float32), lambda params, x: jnp.mean((params["w"] - x[0]) ** 2)
    rule = ts.rules.chain(ts.rules.clip_by_global_norm(1.0), ts.rules.schedule_free_sgd(0.1))
    make = lambda x: ts.adjust(ts.setup(rule, {"w": x, "v": jnp.ones(2)}, ema=0.9), "w", learning_rate=0.2)
    exchange.save(tmp_path / "a.safetensors", {"w": goal, "v": jnp.ones(2)})
    state = exchange.restore(tmp_path / "a.safetensors", make(jnp.zeros(3)))
    assert_trees_equal(state, make(goal))
    with ts.Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(state)
        part = checkpoints.restore(make(jnp.zeros(3)), partial="w").state
    assert_trees_equal(part, make(goal))
    assert_trees_equal(ts.train_step(loss_fn)(state, goal[None])[0].params["w"], goal)
    concrete = optax.GradientTransformation(lambda params: float(params["v"][0]), lambda g, state, _: (g, state))
    state = exchange.restore(tmp_path / "a.safetensors", ts.setup(concrete, {"w": jnp.zeros(3), "v": jnp.ones(2)}))
    assert_trees_equal(state.params["w"], goal)


@pytest.mark.parametrize("param", ["float32", "bfloat16"])
@pytest.mark.parametrize("explicit", [False, True])
def test_restored_params_leave_copies_of_params_spread_as_they_are(tmp_path, explicit, param):
    params, precision = {"w": jnp.zeros((64, 64), param)}, ts.precision.Policy(compute=param, param=param)
    exchange.save(tmp_path / "a.safetensors", {"w": jnp.ones((64, 64), param)})
    state = ts.setup(ts.rules.schedule_free_sgd(0.1), params, ema=0.9, precision=precision)
    state = ts.shard(state, ts.mesh(data=4, fsdp=2, explicit=explicit), zero1=True)
    restored = exchange.restore(tmp_path / "a.safetensors", state)
    assert all(
        x.sharding.is_equivalent_to(y.sharding, x.ndim)
        for x, y in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True)
    )
    assert_trees_equal(restored.average.params, {"w": np.ones((64, 64), np.float32)})


def test_structures_dtypes_and_devices_of_the_target(tmp_path):
    exchange.save(tmp_path / "a.safetensors", PARAMS)
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))
    placed = NamedSharding(mesh, PartitionSpec(None, "data"))
    like = {"body": {"w": jax.ShapeDtypeStruct((3, 4), jnp.bfloat16, sharding=placed)}}
    found = exchange.restore(tmp_path / "a.safetensors", like, where="**", cast=True)["body"]["w"]
    assert found.sharding == placed and found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(found, np.float32), PARAMS["body"]["w"])
    exchange.save(
        tmp_path / "b.safetensors", {"w": found, "r": jax.device_put(jnp.ones(2), NamedSharding(mesh, PartitionSpec()))}
    )
    back = exchange.restore(tmp_path / "b.safetensors")
    np.testing.assert_array_equal(back["w"].astype(np.float32), PARAMS["body"]["w"])
    np.testing.assert_array_equal(back["r"], [1, 1])
    assert "is float32[3,4], expected bfloat16[3,4]" in error_of(
        lambda: exchange.restore(tmp_path / "a.safetensors", like, where="**")
    )


def test_wrapped_parameters(tmp_path):
    from flax import nnx

    of = lambda seed: nnx.state(nnx.Linear(3, 2, rngs=nnx.Rngs(seed)), nnx.Param)
    exchange.save(tmp_path / "a.safetensors", of(0))
    assert set(exchange.contents(tmp_path / "a.safetensors")) == {"kernel", "bias"}
    assert_trees_equal(exchange.restore(tmp_path / "a.safetensors", of(1)), of(0))


def test_a_saved_state_can_still_be_donated(tmp_path):
    state = {"w": jnp.ones(1000)}
    exchange.save(tmp_path / "a.safetensors", state)
    before = state["w"].unsafe_buffer_pointer()
    after = jax.jit(lambda s: {"w": s["w"] + 1}, donate_argnums=0)(state)
    assert after["w"].unsafe_buffer_pointer() == before
    assert "donated" in error_of(lambda: exchange.save(tmp_path / "b.safetensors", state), ValueError)


# --------------------------------------------------------------------------------------------------- what is refused


def test_names_shapes_and_dtypes_that_do_not_fit(tmp_path):
    path = tmp_path / "a.safetensors"
    exchange.save(
        path, {"model.embed": np.ones((2, 3), np.float32), "model.bias": np.ones(2, np.int32), "head": np.ones(1)}
    )
    like = {"embed": np.ones((2, 3), np.float32), "bias": np.ones(2, np.float32), "extra": np.ones(5)}
    assert error_of(lambda: exchange.restore(path, like, rename=lambda name: "model." + name)) == (
        f"other arrays in {path}:\n"
        "  tree['bias']: 'model.bias' is int32[2], expected float32[2]\n"
        "  tree['extra']: nothing named 'model.extra', expected float64[5]\n"
        "  'head' is float64[1], expected nothing of that name\n"
        "  Nearest to 'model.extra': 'model.bias', 'model.embed', 'head'. where= takes a part, rename= finds other names, "
        "cast=True takes other dtypes."
    )
    found = exchange.restore(path, like, where="embed", rename={"embed": "model.embed"}.__getitem__)
    assert found["embed"].sum() == 6 and found["extra"] is like["extra"]
    many = {f"n{i}": np.ones(1) for i in range(15)}
    lines = error_of(lambda: exchange.restore(path, many)).splitlines()
    assert len(lines) == 13 and lines[11] == "  and 8 more"
    assert "no match among 3 leaves" in error_of(lambda: exchange.restore(path, like, where="nothing"), PatternError)


def test_floats_of_another_dtype_are_cast_on_request(tmp_path):
    exchange.save(tmp_path / "a.safetensors", {"w": np.ones(2)})
    with pytest.raises(CheckpointError, match=r"is float64.2., expected float32.2.\n  .*cast=True takes other dtypes"):
        exchange.restore(tmp_path / "a.safetensors", {"w": jnp.zeros(2)})


def test_cast_is_true_or_false(tmp_path):
    exchange.save(tmp_path / "a.safetensors", PARAMS)
    for like in (PARAMS, None):
        said = error_of(lambda like=like: exchange.restore(tmp_path / "a.safetensors", like, cast="no"), WrongTypeError)
        assert "cast at restore(): got 'no' (str), expected True or False" in said


def test_what_cannot_be_saved(tmp_path):
    path = tmp_path / "a.safetensors"
    one = jnp.ones(1)
    cases = {
        "int4[1], expected a safetensors dtype": {"x": jnp.ones(1, jnp.int4)},
        "complex128[1], expected a safetensors dtype": {"x": np.ones(1, complex)},
        "leaf at state['x']: got object": {"x": np.array([None])},
        "got int 3": {"x": 3},
        "without leaves": {},
        "name 'a/b' at save(): got two arrays, tree['a']['b'] and tree['a/b']": {"a": {"b": one}, "a/b": one},
        "name at tree['__metadata__']": {"__metadata__": one},
        "name at tree['']": {"": one},
        "name at tree['a\\n']": {"a\n": one},
        "name at tree: got ''": one,
    }
    for text, tree in cases.items():
        assert text in error_of(lambda tree=tree: exchange.save(path, tree), (WrongTypeError, CheckpointError))
    assert "two arrays" in error_of(lambda: exchange.save(path, PARAMS, rename=lambda _: "x"))
    no_name = error_of(lambda: exchange.save(path, {"a": one}, rename=lambda _: None), WrongTypeError)
    assert "rename('a') at save(): got None, expected the name in the file" in no_name
    assert "Save outside of jit" in error_of(
        lambda: jax.jit(lambda x: exchange.save(path, {"x": x}))(1.0), WrongTypeError
    )
    for name in ("a.pt", "a", ".safetensors"):
        assert "a name that ends in .safetensors" in error_of(lambda name=name: exchange.save(tmp_path / name, PARAMS))
    for bad in ("", None, 3, "a\0.safetensors"):
        assert "path: got" in error_of(lambda bad=bad: exchange.save(bad, PARAMS))
    assert os.listdir(tmp_path) == []


def test_paths_that_lead_to_nothing(tmp_path):
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "text.safetensors").write_text("no")
    cases = {
        "none.safetensors": "FileNotFoundError",
        "pipe.safetensors": "not a regular file",
        "text.safetensors": "header too small",
    }
    for name, text in cases.items():
        got = error_of(lambda name=name: exchange.restore(tmp_path / name))
        assert got.startswith(f"safetensors file at {tmp_path / name}: got ") and text in got
    assert "FileNotFoundError" in error_of(lambda: exchange.restore(tmp_path))
    assert "FileNotFoundError" in error_of(lambda: restore_flax(tmp_path / "none"))
    assert "FileNotFoundError" in error_of(lambda: restore_orbax(tmp_path / "none"))
    assert "'safetensors' or 'flax' or 'orbax'" in error_of(
        lambda: exchange.restore(tmp_path, format="torch"), HyperparameterError
    )


def raw(header, data=b"", length=None) -> bytes:
    body = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(body) if length is None else length).to_bytes(8, "little") + body + data


def entry(dtype="F32", shape=(1,), start=0, stop=4, **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop], **more}


HEADERS = {  # file, what the error says
    "empty": (b"", "header too small"),
    "short": (b"\2\0\0", "header too small"),
    "length beyond the file": (raw({}, length=1 << 20), "invalid header length"),
    "length beyond all": (raw({}, length=2**64 - 1), "header too large"),
    "not json": (raw(b"{]"), "invalid JSON"),
    "no dict": (raw([1]), "invalid JSON"),
    "nested": (raw(b"[" * 50_000 + b"]" * 50_000), "invalid JSON"),
    "NaN": (raw(b'{"a": NaN}'), "invalid JSON"),
    "long number": (raw(b'{"a": ' + b"9" * 10_000 + b"}"), "number out of range"),
    "twice": (raw(b'{"a": 1, "a": 2}'), "invalid JSON"),
    "not utf-8": (raw(b'{"\xff": 1}'), "invalid UTF-8"),
    "no fields": (raw({"a": {}}), "missing field `dtype`"),
    "a list": (raw({"a": []}), "invalid length 0"),
    "negative": (raw({"a": entry(shape=(-1,))}, bytes(4)), "invalid value: integer `-1`"),
    "a float": (raw({"a": entry(shape=(1.0,))}, bytes(4)), "floating point `1.0`"),
    "a bool": (raw({"a": entry(shape=(True,))}, bytes(4)), "boolean `true`"),
    "huge": (raw({"a": entry(shape=(2**40,), stop=2**42)}, bytes(4)), "not fully covered"),
    "huge, wrapped": (raw({"a": entry(shape=(2**47, 2**47))}, bytes(4)), "overflow computing"),
    "huge and empty": (raw({"a": entry(shape=(2**47, 2**47, 0), stop=0)}), "overflow computing"),
    "many axes": (raw({"a": entry(shape=(1,) * 65)}, bytes(4)), "shape that NumPy does not have"),
    "unknown dtype": (raw({"a": entry(dtype="O")}, bytes(4)), "unknown variant `O`"),
    "packed dtype": (raw({"a": entry(dtype="F4", shape=(8,))}, bytes(4)), "dtype 'F4'"),
    "dtype of numpy": (raw({"a": entry(dtype="float32")}, bytes(4)), "unknown variant `float32`"),
    "backwards": (raw({"a": entry(start=4, stop=0)}, bytes(4)), "invalid offset"),
    "overlap": (raw({"a": entry(), "b": entry(start=2, stop=6)}, bytes(6)), "invalid offset"),
    "the same": (raw({"a": entry(), "b": entry()}, bytes(4)), "invalid offset"),
    "a gap": (raw({"a": entry(start=4, stop=8)}, bytes(8)), "invalid offset"),
    "bytes left": (raw({"a": entry()}, bytes(5)), "not fully covered"),
    "bytes missing": (raw({"a": entry()}, bytes(3)), "not fully covered"),
    "text that is none": (raw({"__metadata__": {"a": 1}}), "expected a string"),
    "a bool of 2": (raw({"a": entry("BOOL", (4,))}, b"\0\1\2\3"), "neither 0 nor 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADERS)
def test_hostile_headers(tmp_path, name):
    content, text = HEADERS[name]
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    got = error_of(lambda: exchange.restore(path))
    assert got.startswith(f"safetensors file at {path}: got ") and text in got, got


@pytest.mark.medium
def test_small_files_that_claim_much_cost_nothing(tmp_path):
    path = tmp_path / "a.safetensors"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    many = b"{" + b",".join(b'"%d":[]' % i for i in range(600_000)) + b"}"
    for content in (raw(many), raw({"a": entry(shape=(2**40, 8), stop=2**45)}), raw(b" " * (99 << 20))):
        path.write_bytes(content)
        start = time.process_time()
        error_of(lambda: exchange.restore(path))
        assert time.process_time() - start < 3
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 500 << 10, grown  # the last file alone is 99 MB, and is read


def test_an_index_leads_nowhere_else(tmp_path):
    folder = tmp_path / "in"
    exchange.save(tmp_path / "out.safetensors", {"a": jnp.ones(3)})
    in_parts(folder, {"a": jnp.ones(3), "b": jnp.ones(3)})
    index = folder / "model.safetensors.index.json"
    body = json.loads(index.read_text())
    elsewhere = ["../out.safetensors", str(tmp_path / "out.safetensors"), "x/../y.safetensors", "..\\out.safetensors"]
    for bad in (
        *elsewhere,
        "..",
        "",
        ".",
        "a\0.safetensors",
        "C:out.safetensors",
        3,
        None,
        "out.pt",
        "x" * 300,
        [],
        {},
    ):
        index.write_text(json.dumps({**body, "weight_map": {"a": bad}}))
        assert "an index that names" in error_of(lambda: exchange.restore(folder))
    index.write_text(json.dumps({**body, "weight_map": {"z": body["weight_map"]["a"]}}))
    assert "'z' is not in model-00001-of-00002.safetensors" in error_of(lambda: exchange.restore(folder))
    index.write_text(json.dumps({**body, "weight_map": {"a": "gone.safetensors"}}))
    assert "FileNotFoundError" in error_of(lambda: exchange.restore(folder))
    for content in ("[]", "{}", '{"weight_map": []}', "nonsense"):
        index.write_text(content)
        error_of(lambda: exchange.restore(folder))
    rng, outcomes = random.Random(0), {"refused": 0, "read": 0}
    for _ in range(200):
        index.write_bytes(manifests.mutated(rng, body))
        try:
            assert set(exchange.restore(folder)) <= {"a", "b"}
            outcomes["read"] += 1
        except TsunaxError:
            outcomes["refused"] += 1
    assert outcomes["refused"] > 100, outcomes


@pytest.mark.medium
def test_a_name_that_is_missing_among_very_many(tmp_path):
    path, start = tmp_path / "a.safetensors", time.process_time()
    many = {f"{i}{'x' * 100 * (i % 50)}": entry(start=4 * i, stop=4 * i + 4) for i in range(20_000)}
    path.write_bytes(raw(many, bytes(80_000)))
    text = error_of(lambda: exchange.restore(path, {"0y": np.ones(1, np.float32)}))
    assert "nothing named '0y'" in text and "and 19991 more" in text and len(text) < 8000
    assert time.process_time() - start < 10


# -------------------------------------------------------------------------------------------------- whole or not at all


def test_a_failed_write_leaves_the_older_file(tmp_path, monkeypatch):
    path = tmp_path / "a.safetensors"
    exchange.save(path, {"a": jnp.zeros(3)})
    before, fsync = path.read_bytes(), os.fsync

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert error_of(lambda: exchange.save(path, {"a": jnp.ones(3)}), SaveError) == (
        f"save at {path}: got OSError [Errno 28] No space left on device, expected a finished file."
    )
    monkeypatch.setattr(os, "fsync", fsync)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["a.safetensors"]
    (tmp_path / "folder.safetensors").mkdir()
    assert "IsADirectoryError" in error_of(lambda: exchange.save(tmp_path / "folder.safetensors", PARAMS), SaveError)


def test_files_are_synced_before_they_have_their_names(tmp_path, monkeypatch):
    path, events = tmp_path / "m.safetensors", []
    fsync, replace = os.fsync, os.replace
    name = lambda fd: os.readlink(f"/proc/self/fd/{fd}").rpartition("/")[2]
    monkeypatch.setattr(os, "fsync", lambda fd: (events.append(("sync", name(fd))), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda a, b: (events.append(("name", b.name, a.name)), replace(a, b)))
    exchange.save(path, {"a": jnp.ones(3)})
    aside = events[0][1]
    assert events == [("sync", aside), ("name", "m.safetensors", aside), ("sync", tmp_path.name)]


def test_links_are_replaced_and_not_followed(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("x")
    (tmp_path / "a.safetensors").symlink_to(precious)
    exchange.save(tmp_path / "a.safetensors", PARAMS)
    assert precious.read_text() == "x" and not (tmp_path / "a.safetensors").is_symlink()
    (tmp_path / "hub.safetensors").symlink_to(tmp_path / "a.safetensors")  # the hub's cache is made of links
    assert_trees_equal(exchange.restore(tmp_path / "hub.safetensors", PARAMS), PARAMS)


@pytest.mark.parametrize("mask", [0o077, 0o022, 0o000])
def test_modes_are_the_umasks(tmp_path, mask):
    old = os.umask(mask)
    try:
        exchange.save(tmp_path / "run" / "a.safetensors", PARAMS)
    finally:
        os.umask(old)
    found = [p.stat().st_mode for p in (tmp_path / "run", tmp_path / "run" / "a.safetensors")]
    assert [stat.S_IMODE(mode) for mode in found] == [0o777 & ~mask, 0o666 & ~mask]


# ------------------------------------------------------------------------------------------------ flax's and orbax's


def test_flax_files(tmp_path):
    import optax

    tree = {
        "params": {**PARAMS, "bf16": ARRAYS["bf16"], "n": 3, "c": 1 - 2j},
        "opt": optax.adam(0.1).init(PARAMS["body"]),
    }
    path = tmp_path / "params.msgpack"
    path.write_bytes(flax.serialization.to_bytes(tree))
    assert_trees_equal(restore_flax(path, zeros(tree)), tree)
    found = restore_flax(path)
    zero = {name.removeprefix("opt/0/mu/"): x for name, x in found.items() if name.startswith("opt/0/mu/")}
    assert_trees_equal(zero, jax.tree.map(np.zeros_like, PARAMS["body"]))
    into = restore_flax(path, make(params=zeros(PARAMS)), where="**", rename=lambda name: "params/" + name)
    assert_trees_equal(into.params, jax.tree.map(jnp.asarray, PARAMS))
    found["params/body/w"][0] = 7  # one's own
    assert "nothing named 'params/z'" in error_of(lambda: restore_flax(path, {"params": {"z": jnp.ones(1)}}))


def test_flax_files_in_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(flax.serialization, "MAX_CHUNK_SIZE", 16)
    path = tmp_path / "params.msgpack"
    path.write_bytes(flax.serialization.to_bytes(PARAMS))
    assert b"__msgpack_chunked_array__" in path.read_bytes()
    assert_trees_equal(restore_flax(path, PARAMS), PARAMS)


def test_hostile_flax_files(tmp_path):
    import msgpack

    array = lambda *x: msgpack.packb({"a": msgpack.ExtType(1, msgpack.packb(x))})
    chunked = lambda shape, *chunks: flax.serialization.msgpack_serialize(
        {"a": {"__msgpack_chunked_array__": True, "shape": shape, "chunks": dict(zip("0123", chunks, strict=False))}}
    )
    cases = {
        "objects": array([1], "object", bytes(8)),
        "objects by letter": array([1], "O", bytes(8)),
        "records": array([1], "i4,O", bytes(12)),
        "strings": array([1], "U1", bytes(4)),
        "too few": array([2**40], "float32", bytes(4)),
        "negative": array([-1, -1], "float32", bytes(8)),
        "huge and empty": array([2**47, 2**47, 0], "float32", b""),
        "a dtype of 5": array([1], 5, bytes(4)),
        "a shape of 5": array(5, "float32", bytes(4)),
        "another extension": msgpack.packb({"a": msgpack.ExtType(99, b"x")}),
        "a list": msgpack.packb([1, 2]),
        "cut": flax.serialization.to_bytes(PARAMS)[:50],
        "more": flax.serialization.to_bytes(PARAMS) + b"x",
        "pickle": b"\x80\x04\x95\x00cos\nsystem\n(S'true'\ntR.",
        "nested": b"\x81\xa1a" * 100_000 + b"\x01",
        "long list": b"\xdd\xff\xff\xff\xff",
        "chunks": chunked({"0": 3}, np.ones(2)),
        "no chunks": chunked({"0": 2**40}),
        "bytes": msgpack.packb({"a": b"x"}),
        "keys that meet": msgpack.packb({"a": {1: 2, "1": 3}}),
    }
    for name, content in cases.items():
        path = tmp_path / name
        path.write_bytes(content)
        start = time.process_time()
        assert error_of(lambda path=path: restore_flax(path)).startswith(f"flax file at {path}: got "), name
        assert time.process_time() - start < 2


@pytest.fixture(scope="module")
def orbax_dirs(tmp_path_factory):
    import optax
    import orbax.checkpoint as v0
    from orbax.checkpoint import v1

    top = tmp_path_factory.mktemp("orbax")
    opt = optax.adam(0.1).init({"w": jnp.ones(2)})
    tree = {"params": {**PARAMS, "bf16": ARRAYS["bf16"], "n": 3, "f64": np.array([0.1])}, "opt": opt}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with v0.StandardCheckpointer() as checkpointer:
            checkpointer.save(top / "standard", tree)
        v0.PyTreeCheckpointer().save(top / "pytree", tree)
        v0.PyTreeCheckpointer(use_ocdbt=False).save(top / "plain", tree)
        with v0.CheckpointManager(top / "manager", item_names=("state", "notes")) as manager:
            manager.save(3, args=v0.args.Composite(state=v0.args.StandardSave(tree), notes=v0.args.JsonSave({"a": 1})))
            manager.wait_until_finished()
        v1.save(top / "v1", tree)
    return top, tree


@pytest.mark.parametrize("name", ["standard", "pytree", "plain", "manager/3", "v1"])
def test_orbax_directories(orbax_dirs, name):
    top, tree = orbax_dirs
    assert_trees_equal(restore_orbax(top / name, zeros(tree)), tree)
    into = restore_orbax(top / name, make(params=zeros(PARAMS)), where="**", rename=lambda n: "params/" + n)
    assert_trees_equal(into.params, jax.tree.map(jnp.asarray, PARAMS))
    text = error_of(lambda: restore_orbax(top / name, {"params": {"w": jnp.ones(1)}}))
    assert "nothing named 'params/w', expected float32[1]" in text and "expected nothing of that name" in text


def test_other_directories_are_no_orbax_checkpoints(orbax_dirs, tmp_path):
    for path in (orbax_dirs[0] / "manager", tmp_path):
        text = error_of(lambda path=path: restore_orbax(path))
        assert text.startswith(f"orbax directory of one step at {path}: got ")


def test_a_pipe_in_an_orbax_directory_is_refused_at_once(orbax_dirs, tmp_path):
    shutil.copytree(orbax_dirs[0] / "plain", tmp_path / "run")
    chunk = max((p for p in (tmp_path / "run").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    chunk.unlink()
    os.mkfifo(chunk)
    start = time.monotonic()
    text = error_of(lambda: restore_orbax(tmp_path / "run"))
    assert time.monotonic() - start < 2 and f"{chunk.name} is no regular file" in text


def test_nothing_is_unpickled():
    text = "".join(path.read_text() for path in Path(exchange.__file__).parent.glob("*.py"))
    assert not any(
        f"{name}" in text for name in ("import pickle", "eval(", "exec(", "allow_pickle", "import_module(about")
    )


# --------------------------------------------------------------------------------------------- files that others wrote


def kinds_of_files():
    import gzip
    import io
    import pickle
    import zipfile

    def archive(*names):
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as opened:
            for name in names:
                opened.writestr(name, bytes(9))
        return file.getvalue()

    npz, npy = io.BytesIO(), io.BytesIO()
    np.savez(npz, w=np.ones(3))
    np.save(npy, np.ones(3))
    return {
        "a NumPy .npz file": npz.getvalue(),
        "a NumPy .npy file": npy.getvalue(),
        "a PyTorch file": archive("model/data.pkl", "model/data/0"),
        "a zip archive": archive("a.txt"),
        "a pickle": pickle.dumps({"w": np.ones(3)}),
        "an HDF5 file": b"\x89HDF\r\n\x1a\n" + bytes(500),
        "a pointer of git-lfs": b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n",
        "a web page": b"<!DOCTYPE html>\n<html><head><title>Sign in</title></head></html>",
        "a compressed file": gzip.compress(bytes(500)),
        "a GGUF file": b"GGUF\3\0\0\0" + bytes(100),
    }


@pytest.mark.parametrize("kind", kinds_of_files())
def test_files_of_other_kinds_are_named(tmp_path, kind):
    path, index = tmp_path / "a.safetensors", tmp_path / "in" / "model.safetensors.index.json"
    path.write_bytes(kinds_of_files()[kind])
    got = error_of(lambda: exchange.restore(path))
    assert got.startswith(f"safetensors file at {path}: got a.safetensors: {kind}"), got
    assert error_of(lambda: restore_flax(path)).startswith(f"flax file at {path}: got {kind}")
    index.parent.mkdir()
    shutil.copy(path, index)
    assert f": got {kind}" in error_of(lambda: exchange.restore(index))
    index.write_text('{"weight_map": {"w": "b.safetensors"}}')
    shutil.copy(path, index.parent / "b.safetensors")
    assert f": got b.safetensors: {kind}" in error_of(lambda: exchange.contents(index))


def test_a_file_of_the_other_format_is_named(tmp_path):
    exchange.save(tmp_path / "a.safetensors", PARAMS)
    assert "got a safetensors file" in error_of(lambda: restore_flax(tmp_path / "a.safetensors"))
    (tmp_path / "b.safetensors").write_bytes(flax.serialization.to_bytes(PARAMS))
    assert "format='flax'" in error_of(lambda: exchange.restore(tmp_path / "b.safetensors"))


def test_save_below_a_file_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "a.safetensors", tmp_path / "file" / "b" / "a.safetensors"):
        got = error_of(lambda path=path: exchange.save(path, PARAMS), SaveError)
        assert got.startswith(f"save at {path}: got ")
    error_of(lambda: exchange.save(tmp_path / "\ud800.safetensors", PARAMS), SaveError)
    assert "UnicodeEncodeError" in error_of(lambda: exchange.restore(tmp_path / "\ud800.safetensors"))


def test_integers_of_another_dtype_are_cast_if_they_fit(tmp_path):
    path = tmp_path / "a.safetensors"
    numbers = np.array([-(2**31), 2**31 - 1])
    exchange.save(path, {"n": numbers})
    assert "cast=True takes" in error_of(lambda: exchange.restore(path, {"n": jnp.zeros(2, jnp.int32)}))
    for like in (jnp.zeros(2, jnp.int32), np.zeros(2, np.int32)):
        found = exchange.restore(path, {"n": like}, cast=True)["n"]
        assert found.dtype == np.int32 and isinstance(found, type(like))
        np.testing.assert_array_equal(found, numbers)
    for value, dtype in [(2**31, np.int32), (-1, np.uint64), (300, np.uint8), (2**15, np.int16), (8, jnp.int4)]:
        exchange.save(path, {"n": np.array([0, value])})
        got = error_of(lambda dtype=dtype: exchange.restore(path, {"n": np.zeros(2, dtype)}, cast=True))
        assert got.startswith("array at restore(): got 1 of 2 numbers that"), (value, dtype)
    exchange.save(path, {"n": np.array([2**64 - 1], np.uint64)})
    error_of(lambda: exchange.restore(path, {"n": np.zeros(1, np.int64)}, cast=True))
    exchange.save(path, {"n": np.int64(300)})
    error_of(lambda: exchange.restore(path, {"n": np.int8(0)}, cast=True))
    error_of(lambda: exchange.restore(path, {"n": np.float32(0)}, cast=True))
    with ts.Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save({"n": numbers}, step=1)
        checkpoints.save({"n": numbers + 1}, step=2)
        like = {"n": jnp.zeros(2, jnp.int32)}
        assert checkpoints.restore(like, step=1, cast=True).state["n"].tolist() == numbers.tolist()
        assert "int32 cannot hold" in error_of(lambda: checkpoints.restore(like, step=2, cast=True))
    parts = Pieces((4,), np.dtype(np.int64), {((0, 2),): np.array([1, 2**31]), ((2, 4),): np.array([3, 4])})
    assert parts.astype(np.uint32)[(slice(0, 2),)].tolist() == [1, 2**31]
    assert "int32 cannot hold" in error_of(lambda: parts.astype(np.int32))


def test_two_arrays_whose_keys_join_to_one_name(tmp_path, orbax_dirs):
    from orbax.checkpoint import v1

    tree = {"a/b": np.ones(1, np.float32), "a": {"b": np.zeros(1, np.float32)}}
    (tmp_path / "flax").write_bytes(flax.serialization.to_bytes(tree))
    v1.save(tmp_path / "orbax", tree)
    for read, name in ((restore_flax, "flax"), (restore_orbax, "orbax")):
        for like in (None, {"a": {"b": np.zeros(1, np.float32)}}):
            got = error_of(lambda read=read, name=name, like=like: read(tmp_path / name, like))
            assert "two arrays whose keys join to one name, 'a/b'" in got
    exchange.save(tmp_path / "a.safetensors", {"a": {"b": np.ones(1, np.float32)}})
    got = error_of(lambda: exchange.restore(tmp_path / "a.safetensors", tree))
    assert "name 'a/b' at restore(): got two arrays, tree['a']['b'] and tree['a/b']" in got
    tied = exchange.restore(tmp_path / "a.safetensors", tree, rename=lambda _: "a/b")
    assert tied["a"]["b"] == tied["a/b"] == 1  # two names that a user gave


def test_what_orbax_saved_of_an_nnx_state(tmp_path):
    from flax import nnx
    from orbax.checkpoint import v1

    of = lambda seed: nnx.state(nnx.Linear(3, 2, rngs=nnx.Rngs(seed)), nnx.Param)
    v1.save(tmp_path / "orbax", of(0))
    assert set(restore_orbax(tmp_path / "orbax")) == {"kernel/value", "bias/value"}
    assert_trees_equal(restore_orbax(tmp_path / "orbax", of(1)), of(0))
    pure = {"kernel": jnp.zeros((3, 2)), "bias": jnp.ones(2)}
    assert_trees_equal(restore_orbax(tmp_path / "orbax", pure)["kernel"], jax.tree.leaves(of(0)["kernel"])[0])
    again = restore_orbax(tmp_path / "orbax", of(1), rename=lambda name: f"{name}/value")
    assert_trees_equal(again, of(0))
    assert "nothing named 'bias2'" in error_of(lambda: restore_orbax(tmp_path / "orbax", {"bias2": jnp.ones(2)}))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # TensorStore calls orbax's closed loop
@pytest.mark.medium
def test_mutated_files_of_others_are_read_or_refused():
    from collections import Counter

    manifests.read_files(200, 3, counts := Counter())
    assert manifests.is_well(counts), counts
    assert counts["files refused"] > 50 and counts["files read"] > 20, counts


def header_of(entries: str) -> bytes:
    return len(entries).to_bytes(8, "little") + entries.encode()


def many(piece: str, n: int) -> str:
    return ",".join(piece.replace("#", str(i)) for i in range(n))


BOMBS = {  # name, content: what would take hundreds of MiB or a minute
    "empty maps": ("a.msgpack", lambda: b"\x81\xa1a\xdd" + (2_000_000).to_bytes(4, "big") + b"\x80" * 2_000_000),
    "empty lists": ("a.msgpack", lambda: b"\x81\xa1a\xdd" + (2_000_000).to_bytes(4, "big") + b"\x90" * 2_000_000),
    "lists within lists": ("a.msgpack", lambda: b"\xdd\0\x20\0\0" * 400_000),
    "a dtype of many": (
        "a.msgpack",
        lambda: b"\x81\xa1a\xc9\0\1\x86\xaf\1\x93\x91\1\xc6\0\1\x86\xa0" + b"f4," * 33_333 + b"f" + b"\xc4\4\0\0\0\0",
    ),
    "an index of empty maps": (
        "model.safetensors.index.json",
        lambda: b'{"weight_map":{"a":[' + many("{}", 6_600_000).encode() + b"]}}",
    ),
    "empty arrays": (
        "a.safetensors",
        lambda: header_of("{" + many('"#":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}', 400_000) + "}"),
    ),
    "much metadata": ("a.safetensors", lambda: header_of('{"__metadata__":{' + many('"#":""', 2_000_000) + "}}")),
    "a shape of many axes": (
        "a.safetensors",
        lambda: header_of('{"a":{"dtype":"F32","shape":[' + many("0", 10_000_000) + '],"data_offsets":[0,0]}}'),
    ),
}


@pytest.mark.medium
@pytest.mark.parametrize("name", BOMBS)
def test_small_files_take_little_memory(tmp_path, name):
    file, content = BOMBS[name]
    path, format = tmp_path / file, "flax" if file == "a.msgpack" else "safetensors"
    path.write_bytes(content())
    exchange.save(tmp_path / "warm.safetensors", {"a": jnp.ones(1)})
    exchange.restore(tmp_path / "warm.safetensors")
    start = time.process_time()
    error, grown = manifests.memory(lambda: exchange.restore(path, format=format))
    assert isinstance(error, CheckpointError), error
    assert grown < 4 * path.stat().st_size + (64 << 20) and time.process_time() - start < 5


def test_many_files_share_one_allowance(tmp_path):
    empty = many('"#":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}', 40_000)
    files = [tmp_path / f"{i}.safetensors" for i in range(3)]
    for file in files:
        file.write_bytes(header_of("{" + empty + "}"))
    assert len(stored_in(files[:1])) == 40_000
    with pytest.raises(Damaged, match="a description that would take"):
        stored_in(files)


def test_names_of_a_flax_file_are_short(tmp_path):
    tree = functools.reduce(lambda inner, _: {"x" * 100: inner}, range(8), {str(i): 1 for i in range(9)})
    (tmp_path / "a").write_bytes(flax.serialization.msgpack_serialize(tree))
    assert len(restore_flax(tmp_path / "a")) == 9
    (tmp_path / "a").write_bytes(flax.serialization.msgpack_serialize({"y" * 300: tree}))
    assert "a name of 1" in error_of(lambda: restore_flax(tmp_path / "a"))


@pytest.mark.medium
def test_descriptions_of_orbax_take_little_memory(orbax_dirs, tmp_path):
    shutil.copytree(orbax_dirs[0] / "plain", tmp_path / "run")
    file, size = tmp_path / "run" / "_METADATA", lambda: sum(p.stat().st_size for p in (tmp_path / "run").rglob("*"))
    body = json.loads(file.read_text())
    entry = next(iter(body["tree_metadata"].values()))
    for n in (8_000, 120_000):
        key = lambda i: {**entry, "key_metadata": [{"key": f"a{i}", "key_type": 2}]}
        file.write_text(json.dumps({**body, "tree_metadata": {f"('a{i}',)": key(i) for i in range(n)}}))
        error, grown = manifests.memory(lambda: restore_orbax(tmp_path / "run"))
        assert isinstance(error, CheckpointError) and "a description that would take" in str(error)
        assert grown < 4 * size() + (64 << 20)


def test_keys_of_orbax_lead_nowhere_else(orbax_dirs, tmp_path):
    for name in ("in", "out"):
        shutil.copytree(orbax_dirs[0] / "plain", tmp_path / name)
    file = tmp_path / "in" / "_METADATA"
    body = json.loads(file.read_text())
    array = next(p.parent for p in (tmp_path / "out").rglob(".zarray"))
    entry = next(iter(body["tree_metadata"].values()))
    keys = [{"key": str(array), "key_type": 2}]
    file.write_text(json.dumps({**body, "tree_metadata": {"x": {**entry, "key_metadata": keys}}}))
    assert "a key that leads elsewhere" in error_of(lambda: restore_orbax(tmp_path / "in"))


def test_arrays_far_larger_than_their_files_need_a_tree(tmp_path):
    from orbax.checkpoint import v1

    tree = {"w": np.zeros(20_000_000, np.float32)}  # compressed to next to nothing
    v1.save(tmp_path / "run", tree)
    assert "80000000 bytes of arrays in files of" in error_of(lambda: restore_orbax(tmp_path / "run"))
    assert restore_orbax(tmp_path / "run", tree)["w"].shape == (20_000_000,)


# ---------------------------------------------------------------------------------------------------------------- links


def as_links(folder: Path, blobs: Path) -> None:
    """Every file below `folder` moved to `blobs`, a link in its place."""
    blobs.mkdir()
    for i, path in enumerate([p for p in folder.rglob("*") if p.is_file()]):
        os.rename(path, blobs / str(i))
        path.symlink_to(os.path.relpath(blobs / str(i), path.parent))


@pytest.mark.parametrize("kind", ["single", "parts", "standard", pytest.param("plain", marks=pytest.mark.medium), "v1"])
def test_links_out_of_a_directory_are_refused(orbax_dirs, tmp_path, kind):
    folder = tmp_path / "hub" / "snapshots" / "0a1b" / "in"
    if kind in ("standard", "plain", "v1"):
        shutil.copytree(orbax_dirs[0] / kind, folder)
        read = restore_orbax
    elif kind == "single":
        exchange.save(folder / "model.safetensors", PARAMS["body"])
        read = exchange.restore
    else:
        in_parts(folder, PARAMS["body"])
        read = exchange.restore
    expected = read(folder)
    shutil.copytree(folder, tmp_path / "good")
    for path in sorted(tmp_path.joinpath("good").rglob("*")):
        if kind == "parts" and path.name.startswith("model-00001"):
            continue  # the other part is enough
        shutil.rmtree(folder)
        shutil.copytree(tmp_path / "good", folder)
        place = folder / path.relative_to(tmp_path / "good")
        shutil.rmtree(place) if place.is_dir() else place.unlink()
        place.symlink_to(path)
        assert f"{place.name} is a link that leads out of" in error_of(lambda: read(folder)), place
        place.unlink()
        shutil.copytree(path, folder / "..inside") if path.is_dir() else shutil.copy(path, folder / "..inside")
        place.symlink_to(folder / "..inside")
        if kind in ("single", "parts"):
            assert_trees_equal(read(folder), expected)
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "good", folder)
    as_links(folder, tmp_path / "hub" / "blobs")  # as Hugging Face's cache
    assert_trees_equal(read(folder), expected)


def test_the_length_of_a_header_is_no_sign_of_a_pickle(tmp_path):
    """A header of 640 bytes begins with the bytes of a pickle of protocol 2."""
    text = b"{" + b" " * 639
    (tmp_path / "x.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(CheckpointError) as error:
        exchange.restore(tmp_path / "x.safetensors", {"w": jnp.ones(2)})
    assert "pickle" not in str(error.value)


def test_a_leaf_called_clock_is_no_state(tmp_path):
    path, tree = tmp_path / "a.safetensors", {"clock": jnp.ones(3), "w": jnp.ones(2)}
    exchange.save(path, tree)
    assert exchange.restore(path, tree)["clock"].shape == (3,)
    exchange.save(path, {"clock": jnp.ones(4, jnp.int32), "params": {"w": jnp.full(2, 7.0)}, "w": jnp.full(2, 3.0)})
    np.testing.assert_array_equal(exchange.restore(path, {"w": jnp.zeros(2)}, where="**")["w"], [3, 3])
    state = ts.setup(ts.rules.adam(1e-2), {"w": jnp.full(2, 7.0)})
    exchange.save(path, state)
    np.testing.assert_array_equal(exchange.restore(path, {"w": jnp.zeros(2)}, where="**")["w"], [7, 7])


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float16"])
def test_numbers_that_do_not_fit_are_not_saved(dtype, tmp_path):
    path, tree = tmp_path / "a.safetensors", {"w": jnp.array([1e6, 1.0, jnp.inf])}
    with pytest.raises(CheckpointError, match=r"got 1 of 3 numbers that \w+ cannot hold"):
        exchange.save(path, tree, transform={"w": exchange.cast(dtype)})
    exchange.save(path, tree)
    with pytest.raises(CheckpointError, match=r"restore\(\): got 1 of 3 numbers that float16 cannot hold"):
        exchange.restore(path, {"w": jnp.zeros(3, jnp.float16)}, cast=True)


def test_a_state_of_shapes_takes_no_params_from_a_file(tmp_path):
    params = {"w": np.zeros((64, 64), np.float32)}
    like = ts.shard(jax.eval_shape(lambda: ts.setup(ts.rules.adam(1e-2), params)), ts.mesh(data=1, fsdp=-1))
    exchange.save(tmp_path / "p.safetensors", params)
    with pytest.raises(StateError, match=r"got a state of shapes.* Restore into state.params, then ts.shard"):
        exchange.restore(tmp_path / "p.safetensors", like)
    assert exchange.restore(tmp_path / "p.safetensors", like.params)["w"].sharding == like.params["w"].sharding
