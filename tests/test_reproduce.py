"""Seeds, flags and fingerprints; and runs that end with the same bits in processes of their own."""

import os
import random
import re
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tsunax as ts
from tests.helpers import assert_trees_equal
from tsunax import reproduce
from tsunax.errors import DataError, DeviceError, HyperparameterError, MissingLibraryError, StateError, WrongTypeError


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
    with ts.reproduce.isolated_rng():
        yield


def draws():
    return random.random(), float(np.random.rand())


def test_all_generators_start_from_the_seed():
    key = ts.reproduce.reproducible(3)
    first = draws()
    assert_trees_equal(key, jax.random.key(3))
    ts.reproduce.reproducible(3)
    assert draws() == first
    ts.reproduce.reproducible(2**40)
    high = draws()
    ts.reproduce.reproducible(2**41)
    assert len({first, high, draws()}) == 3


def test_every_bit_of_a_seed_counts():
    """`jax.random.key` drops what is above 32 bits."""
    seeds = [7, 2**32 + 7, 2**33 + 7, 2**63 - 1, 2**32 - 1]
    keys = [jax.random.key_data(ts.reproduce.reproducible(seed)).tolist() for seed in seeds]
    assert len(set(map(tuple, keys))) == len(seeds) and keys[0] == jax.random.key_data(jax.random.key(7)).tolist()
    state = ts.setup(ts.rules.sgd(0.1), {"w": jnp.ones(2)}, key=seeds[1])
    assert jax.random.key_data(state.key).tolist() == keys[1]
    assert (reproduce.key_of(-1) == jax.random.key(-1)).all() and (
        reproduce.key_of(-(2**40)) != jax.random.key(0)
    ).all()


def test_a_block_leaves_the_generators_alone():
    random.seed(1), np.random.seed(1)
    expected = draws()
    random.seed(1), np.random.seed(1)
    with pytest.raises(KeyError), ts.reproduce.isolated_rng(5):
        inside = draws()
        raise KeyError
    assert draws() == expected != inside
    with ts.reproduce.isolated_rng(5):
        assert draws() == inside


def test_seeds_of_workers_differ():
    found = {
        ts.reproduce.worker_seed(s, e, p, w) for s in (0, 1) for e in range(20) for p in range(8) for w in range(8)
    }
    assert len(found) == 2 * 20 * 8 * 8 and all(0 <= seed < 2**63 for seed in found)
    assert ts.reproduce.worker_seed(0) != ts.reproduce.worker_seed(0, 0)


def test_a_fingerprint_is_of_every_bit():
    tree = {"w": jnp.array([1.0, 0.0]), "k": jax.random.key(1), "n": 3, "none": None, "s": "relu"}
    same = {**tree, "w": np.array([1.0, 0.0], np.float32)}
    assert ts.reproduce.fingerprint(tree) == ts.reproduce.fingerprint(same)
    others = [
        {**tree, "w": jnp.array([1.0, -0.0])},
        {**tree, "w": jnp.array([1.0, 0.0], jnp.bfloat16)},
        {**tree, "w": jnp.array([[1.0, 0.0]])},
        {**tree, "k": jax.random.key(2)},
        {**tree, "n": 4},
        {**tree, "s": "tanh"},
        {"v": tree["w"], **{k: v for k, v in tree.items() if k != "w"}},
    ]
    assert len({ts.reproduce.fingerprint(other) for other in [tree, *others]}) == len(others) + 1


@pytest.mark.medium
def test_a_step_is_checked():
    def loss_fn(params, batch, key):
        return jnp.mean((batch + jax.random.normal(key, batch.shape)) @ params["w"])

    state = ts.setup(ts.rules.adam(0.1), {"w": jnp.ones(3)}, key=0)
    batches = [np.full((4, 3), i, np.float32) for i in range(4)]
    found = ts.reproduce.check_reproducible(ts.train_step(loss_fn), state, batches)
    for batch in batches:
        state, _ = ts.train_step(loss_fn)(state, batch)
    assert found == ts.reproduce.fingerprint(state)

    calls = []

    def careless(state, batch):
        calls.append(1)
        return {"w": state["w"] + 1e-3 * (len(calls) > 5), "b": state["b"]}, None

    with pytest.raises(StateError, match=r"step at batch 2: got other bits in state\['w'\], expected the same"):
        ts.reproduce.check_reproducible(careless, {"w": jnp.ones(2), "b": jnp.zeros(1)}, batches)


def test_a_check_of_nothing_is_none():
    def step(state, batch):
        return {"w": state["w"] + batch}, None

    with pytest.raises(DataError, match=r"batches at check_reproducible\(\): got no batch at all"):
        ts.reproduce.check_reproducible(step, {"w": jnp.ones(2)}, [])


@pytest.mark.parametrize("seed", [1.0, -1, None, "0", np.zeros(2, np.uint32)])
def test_seeds_that_are_none(seed):
    for call in (
        ts.reproduce.reproducible,
        ts.reproduce.worker_seed,
        *([] if seed is None else [lambda s: ts.reproduce.isolated_rng(s).__enter__()]),
    ):
        with pytest.raises((TypeError, ValueError)):
            call(seed)


def test_flags_come_before_the_backend(monkeypatch):
    monkeypatch.setattr(reproduce.xla_bridge, "backends_are_initialized", lambda: False)
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=x")
    ts.reproduce.reproducible(0)
    flags = os.environ["XLA_FLAGS"].split()
    assert flags == ["--xla_dump_to=x", *reproduce._DETERMINISTIC_FLAGS]
    ts.reproduce.reproducible(0)
    assert os.environ["XLA_FLAGS"].split() == flags
    monkeypatch.setattr(reproduce.xla_bridge, "backends_are_initialized", lambda: True)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    ts.reproduce.reproducible(0)  # they were set in time
    monkeypatch.setenv("XLA_FLAGS", "")
    with pytest.raises(DeviceError, match="a GPU that has started without its flags, expected an earlier call"):
        ts.reproduce.reproducible(0)
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_deterministic_ops=false")
    with pytest.raises(DeviceError, match=r"XLA_FLAGS at reproducible.*=false, expected true"):
        ts.reproduce.reproducible(0)


CACHED = """
import sys
import jax
import jax.numpy as jnp
import tsunax as ts

seen = []
jax.monitoring.register_event_listener(lambda event, **_: seen.append(event.rpartition("/")[2]))
if "late" in sys.argv:
    jnp.ones(5)  # what was compiled before is not kept
ts.reproduce.compile_cache(sys.argv[1])
step = ts.train_step(lambda params, x: jnp.mean((x @ params["w"]) ** 2))
state = ts.setup(ts.rules.adam(0.1), {"w": jnp.ones((3, 2))})
state, _ = ts.fit(step, state, ts.batches(jnp.ones((8, 3)), 4), steps=4, progress=False)
print(ts.reproduce.fingerprint(state), seen.count("cache_hits"), seen.count("cache_misses"))
"""


@pytest.mark.medium
def test_a_second_process_compiles_nothing(tmp_path):
    """Programs that compile in milliseconds are kept, too, and they give the same bits."""
    env = {name: x for name, x in os.environ.items() if not name.startswith("JAX_COMPILATION")}

    def run(*arguments):
        command = [sys.executable, "-W", "error", "-c", CACHED, str(tmp_path / "a" / "cache"), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=env)
        assert done.returncode == 0, done.stderr[-2000:]
        bits, hits, misses = done.stdout.split()
        return bits, int(hits), int(misses)

    (bits, none, most), again = run(), run()
    assert none == 0 and most > 3 and again == (bits, most, 0)
    bits_late, hits, misses = run("late")
    assert bits_late == bits and hits >= most - 3 and misses == 0


def test_a_cache_keeps_everything_up_to_a_size(monkeypatch, tmp_path):
    said = {}
    config = types.SimpleNamespace(update=said.__setitem__, jax_compilation_cache_dir=None)
    monkeypatch.setattr(jax, "config", config)
    monkeypatch.setattr(reproduce.compilation_cache, "_cache", None)
    monkeypatch.setattr(reproduce.compilation_cache, "reset_cache", lambda: said.update(anew=True))
    wanted = {
        "jax_compilation_cache_dir": str(tmp_path / "new"),
        "jax_compilation_cache_max_size": -1,
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
        "anew": True,
    }
    reproduce.compile_cache(tmp_path / "new")
    assert said == wanted and list((tmp_path / "new").iterdir()) == []
    monkeypatch.setitem(sys.modules, "filelock", types.ModuleType("filelock"))
    reproduce.compile_cache(tmp_path / "new", max_bytes=10**9)
    assert said == wanted | {"jax_compilation_cache_max_size": 10**9}
    reproduce.compile_cache("gs://bucket/cache")
    assert said["jax_compilation_cache_dir"] == "gs://bucket/cache"
    monkeypatch.setitem(sys.modules, "filelock", None)
    with pytest.raises(MissingLibraryError, match=r"filelock at compile_cache\(\) with max_bytes: got no such package"):
        reproduce.compile_cache(tmp_path, max_bytes=1)


def test_a_cache_that_comes_too_late_or_nowhere(tmp_path):
    jax.jit(lambda x: x + 5)(jnp.ones(3))  # into the folder of the tests
    used = jax.config.jax_compilation_cache_dir
    with pytest.raises(DeviceError, match=re.escape(f"expected {used}, which is in use already. Call it first")):
        reproduce.compile_cache(tmp_path)
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "in it", ""):
        with pytest.raises(OSError):
            reproduce.compile_cache(path)
    for size, kind in ((0, HyperparameterError), (1e9, WrongTypeError), (True, WrongTypeError)):
        with pytest.raises(kind, match=r"max_bytes"):
            reproduce.compile_cache(tmp_path, max_bytes=size)
    assert jax.config.jax_compilation_cache_dir == used


SCRIPT = """
import jax, jax.numpy as jnp, numpy as np, tsunax as ts
key = ts.reproduce.reproducible(5)
x = np.random.rand(64, 8).astype(np.float32)
step = ts.train_step(lambda p, b, key: jnp.mean((jnp.tanh(b @ p["w"]) * jax.random.bernoulli(key, 0.8, (16, 4))) ** 2))
state = ts.setup(ts.rules.adam(1e-2), {"w": jax.random.normal(key, (8, 4))}, key=key)
state, history = ts.fit(step, state, ts.batches(x, 16, shuffle=True), epochs=3, progress=False)
print(ts.reproduce.fingerprint(state), ts.reproduce.fingerprint(history["loss"]))
"""


@pytest.mark.parametrize("n", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_processes_end_with_the_same_bits(n):
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    run = lambda: subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, timeout=120)
    found = [run() for _ in range(n)]
    assert all(done.returncode == 0 for done in found), found[0].stderr
    assert len({done.stdout for done in found}) == 1 and len(found[0].stdout.split()) == 2
