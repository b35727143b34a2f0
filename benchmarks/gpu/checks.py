"""Is tsunax right on this device? Small checks, each a function that raises: `tests/test_gpu.py` runs the same.

On a CPU they hold as well, except where a comment says so. Products of float32 have to be computed as such
(`jax_default_matmul_precision="highest"`): the comparisons are of tsunax, not of TF32.
"""

import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tsunax as ts

from benchmarks.gpu.results import Results

CHECKS: list[Callable[[], None]] = []
SIZES = [64, 128, 10]
RATE, DECAY, NORM = 1e-2, 0.1, 1.0
fingerprint = ts.reproduce.fingerprint


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS.append(function)
    return function


def init_params():
    rng = np.random.default_rng(0)
    kernel = lambda a, b: jnp.asarray(rng.standard_normal((a, b), np.float32) / a**0.5)
    layers = itertools.pairwise(SIZES)
    return {str(i): {"kernel": kernel(a, b), "bias": jnp.zeros(b)} for i, (a, b) in enumerate(layers)}


def make_batch(i, rows=64):
    rng = np.random.default_rng(1 + i)
    return {"x": rng.standard_normal((rows, SIZES[0]), np.float32), "y": rng.integers(0, 10, rows).astype(np.int32)}


def loss_fn(params, batch):
    x = batch["x"]
    for layer in params.values():
        x = jnp.tanh(x @ layer["kernel"] + layer["bias"][None])
    return optax.softmax_cross_entropy_with_integer_labels(x, batch["y"]).mean()


def make_rule():
    return ts.rules.chain(ts.rules.clip_by_global_norm(NORM), ts.rules.adamw(RATE, weight_decay=DECAY))


def make_state(rule=None, **options):
    return ts.setup(rule or make_rule(), init_params(), **options)


def largest_difference(tree, expected) -> float:
    """The largest ‖a - b‖ / ‖b‖ over the leaves, in float64."""
    pairs = zip(jax.tree.leaves(ts.to_host(tree)), jax.tree.leaves(ts.to_host(expected)), strict=True)
    norm = lambda x: float(np.linalg.norm(np.float64(x).ravel()))
    return max(norm(np.float64(x) - y) / (norm(y) + 1e-12) for x, y in pairs)


def assert_close(tree, expected, tolerance: float) -> None:
    difference = largest_difference(tree, expected)
    assert difference < tolerance, difference  # NaN passes no comparison


def take_steps(state, n=6, step=None):
    step = step or ts.train_step(loss_fn)
    for i in range(n):
        state, info = step(state, make_batch(i))
    return state, info


def fit(state, data, **options):
    return ts.fit(ts.train_step(loss_fn), state, data, progress=False, **options)[0]


@check
def a_step_is_that_of_plain_optax():
    state, _ = take_steps(make_state())
    params = init_params()
    tx = optax.chain(optax.clip_by_global_norm(NORM), optax.adamw(RATE, weight_decay=DECAY))
    opt_state, grad = tx.init(params), jax.jit(jax.grad(loss_fn))
    for i in range(6):
        updates, opt_state = tx.update(grad(params, make_batch(i)), opt_state, params)
        params = optax.apply_updates(params, updates)
    assert_close(state.params, params, 1e-5)


@check
def micro_batches_are_the_whole_batch():
    whole, _ = take_steps(make_state())
    cut, _ = take_steps(make_state(), step=ts.train_step(loss_fn, accumulate=4))
    assert_close(cut.params, whole.params, 1e-5)


@check
def frozen_leaves_keep_their_bits():
    state = ts.freeze(make_state(freezable=True), "0/**")
    before = fingerprint(state.params["0"])
    state, _ = take_steps(state)
    assert fingerprint(state.params["0"]) == before
    assert fingerprint(state.params["1"]) != fingerprint(init_params()["1"])


@check
def a_rejected_step_changes_nothing():
    state, _ = take_steps(make_state())
    before = fingerprint((state.params, state.opt_state))
    bad = make_batch(9)
    bad["x"][3, 2] = np.nan
    state, info = ts.train_step(loss_fn)(state, bad)
    assert not bool(info.applied) and int(state.rejected) == 1
    assert fingerprint((state.params, state.opt_state)) == before
    state, info = ts.train_step(loss_fn)(state, make_batch(10))
    assert bool(info.applied)


@check
def steps_per_call_change_no_bit():
    data = [make_batch(i) for i in range(12)]
    digests = {fingerprint(fit(make_state(), data, epochs=1, steps_per_call=k).params) for k in (1, 3, 12)}
    assert len(digests) == 1, digests


@check
def a_loop_as_one_graph_has_the_bits_of_one_with_default_options():
    from tsunax.run import fused_loop

    data, options = [make_batch(i) for i in range(12)], dict(fused_loop.ONE_GRAPH)
    expected = fingerprint(fit(make_state(), data, epochs=1))
    try:
        fused_loop.ONE_GRAPH.clear()
        fused_loop._shared.cache_clear()
        assert fingerprint(fit(make_state(), data, epochs=1)) == expected
    finally:
        fused_loop.ONE_GRAPH.update(options)
        fused_loop._shared.cache_clear()


@check
def a_resumed_run_has_the_bits_of_one_that_was_not_interrupted():
    rows = jax.tree.map(lambda *x: np.concatenate(x), *[make_batch(i) for i in range(8)])
    data = ts.batches(rows, 64, shuffle=True, seed=1)
    whole = fit(make_state(), data.afresh(), steps=20)
    with tempfile.TemporaryDirectory() as folder:
        fit(make_state(), data.afresh(), steps=9, checkpoint=folder)
        resumed = fit(make_state(), data.afresh(), steps=20, checkpoint=folder)
    assert fingerprint(whole.params) == fingerprint(resumed.params)


def check_save_beside_steps(make: Callable[[], ts.TrainState]) -> None:
    """A save that is written while the next steps run has the bits of its own step."""
    step = ts.train_step(loss_fn)
    state, _ = take_steps(make(), step=step)
    expected = fingerprint(state)
    with tempfile.TemporaryDirectory() as folder, ts.Checkpoints(folder) as checkpoints:
        checkpoints.save(state)
        take_steps(state, 20, step)
        checkpoints.wait()
        assert fingerprint(checkpoints.restore(make()).state) == expected


@check
def a_save_beside_the_next_steps_has_the_bits_of_its_step():
    check_save_beside_steps(lambda: make_state(ts.rules.adam(1e-3)))


@check
def a_save_of_host_memory_beside_the_next_steps_has_the_bits_of_its_step():
    mesh = ts.mesh(devices=jax.devices()[:1])
    check_save_beside_steps(lambda: ts.shard(make_state(), mesh, host="moments"))


@check
def donation_reuses_memory():
    step = ts.train_step(lambda p, x: jnp.mean((x @ p["w"]) ** 2))
    state, x = ts.setup(ts.rules.adam(1e-3), {"w": jnp.ones((4096, 4096))}), jnp.ones((8, 4096))
    state, _ = step(state, x)
    donated, pointer = state.params["w"], state.params["w"].unsafe_buffer_pointer()
    in_use = lambda: (jax.devices()[0].memory_stats() or {}).get("bytes_in_use", 0)
    before = in_use()
    state, _ = step(state, x)
    same_pointer = lambda: jax.block_until_ready(state.params["w"]).unsafe_buffer_pointer() == pointer
    assert donated.is_deleted() and same_pointer() and in_use() <= before + (1 << 20)
    host_copy = ts.to_host(state)
    state, _ = step(state, x)
    assert same_pointer(), "to_host kept the state from being donated"
    del host_copy


@check
def no_step_waits_for_the_host():
    state, step = make_state(), ts.train_step(loss_fn)
    data = [jax.device_put(make_batch(i)) for i in range(8)]
    state, info = step(state, data[0])
    with jax.transfer_guard_device_to_host("disallow"):  # a CPU takes no notice of it
        for batch in data:
            state, info = step(state, batch)
    float(info.loss)


@check
def edits_compile_no_step():
    compiled = []
    note = lambda event, *_, **more: compiled.append(str(more.get("fun_name"))) if "backend_compile" in event else None
    jax.monitoring.register_event_duration_secs_listener(note)
    step = ts.train_step(loss_fn)
    state, _ = take_steps(make_state(freezable=True), step=step)
    compiled.clear()
    state, _ = take_steps(ts.freeze(state, "0/**"), 2, step)
    state, _ = take_steps(ts.thaw(state, "0/**"), 2, step)
    take_steps(ts.adjust(state, learning_rate=1e-3), 2, step)
    assert not [name for name in compiled if "train_step" in name], compiled


@check
def bfloat16_follows_float32():
    low, _ = take_steps(make_state(precision="bfloat16"), 20)
    high, _ = take_steps(make_state(), 20)
    assert_close(low.params, high.params, 0.1)


@check
def float8_trains():
    from flax import linen

    layer = linen.Dense(64, dot_general_cls=linen.Fp8DirectDotGeneralOp)
    x = np.random.default_rng(0).standard_normal((64, 64), np.float32)
    state = ts.setup(ts.rules.adam(1e-2), layer.init(jax.random.key(0), x))
    step = ts.train_step(lambda params, x: jnp.mean((layer.apply(params, x) - 1) ** 2))
    losses = []
    for _ in range(20):
        state, info = step(state, x)
        losses.append(float(info.loss))
    assert losses[-1] < losses[0] and bool(info.applied), losses


@check
def host_memory_has_the_bits_of_device_memory():
    mesh, data = ts.mesh(devices=jax.devices()[:1]), [make_batch(i) for i in range(4)]
    digests = []
    for host in ((), ("moments",)):
        make = lambda host=host: ts.shard(make_state(), mesh, host=host)
        kinds = {x.sharding.memory_kind for x in jax.tree.leaves(make().opt_state)}
        assert ("pinned_host" in kinds) == bool(host), kinds
        digests.append((fingerprint(take_steps(make())[0]), fingerprint(fit(make(), data, epochs=2).params)))
    assert digests[0] == digests[1]


@check
def arrays_that_were_moved_are_copies():
    source, device = np.ones(1 << 26, np.float32), jax.devices()[0]
    ways = {
        "to_device": lambda: ts.to_device(source, device),
        "prefetch": lambda: next(iter(ts.prefetch(iter([source]), device))),
    }
    for name, move in ways.items():
        moved = move()
        source[:] = 7
        assert float(moved.max()) == 1, f"{name}: an array that was refilled afterwards is on the device"
        source[:] = 1


@check
def norms_are_those_of_numpy():
    _, info = ts.train_step(loss_fn, donate=False)(make_state(), make_batch(0))
    grads = ts.to_host(jax.jit(jax.grad(loss_fn))(init_params(), make_batch(0)))
    norm = np.sqrt(sum(np.sum(np.float64(x) ** 2) for x in jax.tree.leaves(grads)))
    assert abs(float(info.grad_norm) / norm - 1) < 1e-5


@check
def the_same_run_has_the_same_bits():
    assert fingerprint(take_steps(make_state())[0]) == fingerprint(take_steps(make_state())[0])


DETERMINISTIC = """
import tsunax as ts
ts.reproduce.reproducible(0)
from benchmarks.gpu.checks import jnp, np
state = ts.setup(ts.rules.adam(1e-2), {"table": jnp.ones((50, 16)), "kernel": jnp.ones((16, 16))})
loss_fn = lambda params, rows: jnp.mean((params["table"][rows] @ params["kernel"]) ** 2)  # its gradient is a scatter
rows = np.random.default_rng(0).integers(0, 50, (3, 256))
print(ts.reproduce.check_reproducible(ts.train_step(loss_fn), state, list(rows)))
"""


@check
def deterministic_programs_compile_and_repeat():
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # this process holds the most
    command = [sys.executable, "-c", DETERMINISTIC]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert process.returncode == 0, process.stderr[-400:]


def run(results: Results, tiny: bool) -> None:
    """All checks, each with a verdict of its own."""
    jax.config.update("jax_default_matmul_precision", "highest")
    results.note("device", str(ts.devices.device_info()))
    failed = []
    for function in CHECKS:
        start = time.perf_counter()
        try:
            function()
            verdict = "ok"
        except BaseException as error:
            verdict = f"{type(error).__name__}: {error}"[:600]
            failed.append(function.__name__)
        results.note(function.__name__, f"{verdict} ({time.perf_counter() - start:.1f} s)")
    results.note("right", f"{len(CHECKS) - len(failed)} of {len(CHECKS)}")
