"""What training steps cost on the device, beside plain JAX: a GPT, a CNN, an MLP of a few launches, a population."""

import functools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tsunax as ts
from tsunax.run import fused_loop

from benchmarks import _common, population, verdict
from benchmarks._common import batch_of, mlp, mlp_loss
from benchmarks.gpu import models
from benchmarks.gpu.models import by_hand, copied, note_program, repeated, take_turns, with_rates
from benchmarks.gpu.results import Results

RATE, DECAY = 3e-4, 0.1


def matrix_flops(results: Results) -> None:
    """FLOP/s of a bfloat16 product of 8192: the ceiling of this card, and what `measured_peak` says."""
    from tsunax.insight.description import measured_peak

    x = jax.random.normal(jax.random.key(0), (8192, 8192), jnp.bfloat16)
    product, seconds = jax.jit(lambda x: x @ x), []
    for _ in range(8):
        start = time.perf_counter()
        for _ in range(10):
            y = product(x)
        jax.block_until_ready(y)
        seconds.append((time.perf_counter() - start) / 10)
    measured = {
        "of random numbers": 2 * 8192**3 / statistics.median(seconds),
        "measured_peak": measured_peak(dtype="bfloat16"),
    }
    results.note("TFLOP/s", {name: flops / 1e12 for name, flops in measured.items()})


def gpt(results: Results, tiny: bool, name: str = "gpt") -> None:
    """A GPT that reads bytes, in bfloat16: our step and `fit` beside JAX by hand, with the same attention."""
    shape = models.SHAPES["tiny" if tiny else name]
    width, depth, rows, context = shape
    params, loss_fn = models.gpt_params(width, depth), models.gpt_loss(models.attention_here(results))
    host_batch = np.random.default_rng(1).integers(0, 256, (rows, context + 1), np.int32)
    batch, tx = jax.device_put(host_batch), optax.adamw(RATE, weight_decay=DECAY)
    size, tokens = sum(x.size for x in jax.tree.leaves(params)), rows * context
    flops = models.gpt_flops(size, shape)
    results.note("params", size)
    make = lambda: ts.setup(ts.rules.adamw(RATE, weight_decay=DECAY), copied(params), precision="bfloat16")
    make_by_hand = lambda: (copied(params), tx.init(params))
    low = models.in_bfloat16(loss_fn)
    step = ts.train_step(loss_fn)
    programs = {
        "raw JAX, bare": (by_hand(low, tx, guarded=False), make_by_hand()),
        "raw JAX, same info": (by_hand(low, tx, guarded=True), make_by_hand()),
        "tsunax": (step, make()),
        "tsunax, no norms, no verdict": (ts.train_step(loss_fn, norms=False, on_nonfinite="ignore"), make()),
    }
    for contender, (function, state) in programs.items():
        note_program(results, contender, function, state, batch)
    bursts = {contender: repeated(*program, batch) for contender, program in programs.items()}
    turns = {"rounds": 3, "steps": 2} if tiny else {"rounds": 9, "steps": 6}
    rows_of_steps = take_turns(bursts, **turns, floor="raw JAX, bare")
    results.note("steps", with_rates(rows_of_steps, tokens, flops))
    counted = ts.describe(step, jax.eval_shape(make), host_batch).flops
    results.note("FLOPs of a step", {"by PaLM's formula": flops, "ts.describe": counted})
    if not tiny and name == "gpt":
        matrix_flops(results)
    del programs, bursts
    fitted(results, step, make, host_batch, tokens, flops, tiny)
    if name == "gpt":  # three compilations more, which the smaller model can do without
        fitted_by_default_options(results, step, make, host_batch, tokens, flops, tiny)


def runner(step, make, data, **options):
    """`fit` of n steps more at each call, of one run."""
    held = {"state": make(), "steps": 0}

    def run_fit(n):
        held["steps"] += n
        held["state"], _ = ts.fit(step, held["state"], data, steps=held["steps"], progress=False, **options)
        jax.block_until_ready(held["state"].params)

    return run_fit


def fitted(results: Results, step, make, host_batch, tokens, flops, tiny) -> None:
    """`fit` beside a Python loop of the same step: runs of two lengths, so that the fixed cost of a call shows."""
    batch, rows = jax.device_put(host_batch), len(host_batch)
    data = ts.batches(np.concatenate([host_batch] * 8), rows)
    k = 4 if tiny else 24
    start, run_fit = time.perf_counter(), runner(step, make, data)
    run_fit(k)
    results.note(f"fit: first {k} steps, s", time.perf_counter() - start)
    contenders = {
        "the step in a Python loop": repeated(step, make(), batch),
        "fit": run_fit,
        "fit, steps_per_call=1": runner(step, make, data, steps_per_call=1),
    }
    for n in (k, 4 * k):
        table = take_turns(contenders, rounds=3, steps=n, floor="the step in a Python loop")
        results.note(f"fit of {n} steps", with_rates(table, tokens, flops))


def fitted_by_default_options(results: Results, step, make, host_batch, tokens, flops, tiny) -> None:
    """`fit` without the options of the compiler that make its loop one CUDA graph."""
    data = ts.batches(np.concatenate([host_batch] * 8), len(host_batch))
    options = dict(fused_loop.ONE_GRAPH)
    fused_loop.ONE_GRAPH.clear()
    fused_loop._shared.cache_clear()
    contenders = {
        "the step in a Python loop": repeated(step, make(), jax.device_put(host_batch)),
        "fit, no graph of the loop": runner(step, make, data),
    }
    table = take_turns(contenders, rounds=3, steps=8 if tiny else 48, floor="the step in a Python loop")
    results.note("fit with the compiler's default options", with_rates(table, tokens, flops))
    fused_loop.ONE_GRAPH.update(options)
    fused_loop._shared.cache_clear()


def gpt_small(results: Results, tiny: bool) -> None:
    gpt(results, tiny, "gpt_small")


def launch(results: Results, tiny: bool) -> None:
    """The MLP of a few launches: a call for each step, a compiled loop of many, and guards by select and cond."""
    params, batch, tx, k = mlp([64, 64, 10]), batch_of(32, 64), optax.adam(1e-3), 20 if tiny else 200
    make = lambda: ts.setup(ts.rules.adam(1e-3), copied(params))
    make_by_hand = lambda: (copied(params), tx.init(params))
    guarded, step = by_hand(mlp_loss, tx, guarded=True), ts.train_step(mlp_loss)
    programs = {
        "raw JAX, bare": (by_hand(mlp_loss, tx, guarded=False), make_by_hand()),
        "raw JAX, same info": (guarded, make_by_hand()),
        "tsunax": (step, make()),
        "tsunax, no norms, no verdict": (ts.train_step(mlp_loss, norms=False, on_nonfinite="ignore"), make()),
    }
    for contender, (function, state) in programs.items():
        note_program(results, contender, function, state, batch)
    rounds = 3 if tiny else 15
    bursts = {contender: repeated(*program, batch) for contender, program in programs.items()}
    results.note("calls", take_turns(bursts, rounds=rounds, steps=k, floor="raw JAX, bare"))
    results.note("loops", loops(make, make_by_hand, guarded, step, batch, k, rounds))
    kinds = ("bare", "early, select", "early, cond", "late, select", "late, cond", "late, cond, twice")
    for sizes in ([64, 64, 10], *([] if tiny else [[2048, 2048, 2048, 10]])):
        params, batch = mlp(sizes), batch_of(32, sizes[0])
        contenders = {kind: verdict.single(kind, params, batch)[0] for kind in kinds}
        results.note(f"guards, MLP {sizes[0]}", take_turns(contenders, rounds=rounds, steps=50, floor="bare"))


def loops(make, make_by_hand, guarded, step, batch, k, rounds):
    """Compiled loops of k steps: microseconds a step, and the ratio to a scan by hand."""
    stacked = jax.device_put(jax.tree.map(lambda x: np.stack([np.asarray(x)] * k), batch))
    scan = jax.jit(lambda s, b: jax.lax.scan(guarded.__wrapped__, s, b), donate_argnums=0)

    def loop(state, batches, n):  # a trip count that the compiler does not see, as in `fit`
        batch_at = lambda i: jax.tree.map(lambda x: x[i], batches)
        body = lambda carry: (carry[0] + 1, guarded.__wrapped__(carry[1], batch_at(carry[0]))[0])
        return jax.lax.while_loop(lambda carry: carry[0] < n, body, (jnp.int32(0), state))[1], 0

    plain_loop = jax.jit(loop, donate_argnums=0)
    one_graph = jax.jit(loop, donate_argnums=0, compiler_options=fused_loop.ONE_GRAPH)
    held = {"run_steps": make(), "fit": make(), "steps": 0}
    resident = ts.batches(jax.tree.map(lambda x: np.concatenate([np.asarray(x)] * k), batch), 32, device=True)

    def run_steps(n):
        for _ in range(n):
            held["run_steps"], _ = ts.loop.run_steps(step, held["run_steps"], stacked)
        jax.block_until_ready(held["run_steps"].params)

    def run_fit(n):
        held["steps"] += n * k
        held["fit"], _ = ts.fit(step, held["fit"], resident, steps=held["steps"], progress=False)

    contenders = {
        "scan by hand": repeated(scan, make_by_hand(), stacked),
        "while by hand": repeated(functools.partial(called_with, plain_loop, k), make_by_hand(), stacked),
        "while by hand, one CUDA graph": repeated(
            functools.partial(called_with, one_graph, k), make_by_hand(), stacked
        ),
        "run_steps": run_steps,
        "fit, data on the device": run_fit,
        "fit of ten times as many steps": lambda n: run_fit(10 * n),
    }
    table = take_turns(contenders, rounds=rounds, steps=2, floor="scan by hand")
    for name, row in table.items():
        row["us/step"] = 1e3 * row["ms"] / (10 * k if "ten times" in name else k)
    return table


def called_with(loop, k, state, batches):
    return loop(state, batches, np.int32(k))


def cnn(results: Results, tiny: bool) -> None:
    """A residual CNN on images of 32 x 32 in bfloat16."""
    widths, rows = ((16, 16), 4) if tiny else ((128, 256, 512, 512), 1024)
    params, loss_fn = models.cnn(widths)
    rng, tx = np.random.default_rng(0), optax.adam(1e-3)
    x, y = rng.standard_normal((rows, 32, 32, 3), np.float32), rng.integers(0, 10, rows).astype(np.int32)
    batch = jax.device_put({"x": x, "y": y})
    low = models.in_bfloat16(loss_fn)
    programs = {
        "raw JAX, bare": (by_hand(low, tx, guarded=False), (copied(params), tx.init(params))),
        "raw JAX, same info": (by_hand(low, tx, guarded=True), (copied(params), tx.init(params))),
        "tsunax": (ts.train_step(loss_fn), ts.setup(ts.rules.adam(1e-3), copied(params), precision="bfloat16")),
    }
    for contender, (function, state) in programs.items():
        note_program(results, contender, function, state, batch)
    bursts = {contender: repeated(*program, batch) for contender, program in programs.items()}
    table = take_turns(bursts, rounds=3 if tiny else 7, steps=5, floor="raw JAX, bare")
    for row in table.values():
        row["images/s"] = rows / row["ms"] * 1e3
    results.note("steps", table)


def members(results: Results, tiny: bool) -> None:
    """A population of 32 beside the vmapped scan by hand, and beside 32 runs in turn."""
    if tiny:
        population.N, population.K = 4, 5
    population.tables()
    results.note(
        "tables", [{**shown, "rows": [list(row) for row in shown.get("rows", ())]} for shown in _common._shown]
    )
