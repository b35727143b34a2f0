"""`describe` and `replay`: counted FLOPs beside a hand count and XLA's own, and what both cost.

XLA counts the body of a loop once, so that its number falls with `accumulate`. Ratios of times are of one process.
"""

import dataclasses
import itertools
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
import tsunax as ts
from tsunax.insight.description import describe
from tsunax.insight.replaying import replay

from benchmarks._common import batch_of, mlp, mlp_loss, note, save, table
from benchmarks.remat import blocks, gpt


def counts():
    """(model, options, step, state, batch, FLOPs of its products counted by hand)."""
    sizes, rows = (256, 512, 512, 10), 1024
    params, batch = mlp(list(sizes)), batch_of(rows, sizes[0])
    layers = [2 * rows * a * b for a, b in itertools.pairwise(sizes)]
    forward, backward = sum(layers), sum(layers) + sum(layers[1:])
    for options, by_hand in (
        ({}, forward + backward),
        ({"accumulate": 8}, forward + backward),
        ({"remat": True}, 2 * forward + backward),
    ):
        yield "MLP", options, mlp_loss, params, batch, by_hand

    loss_fn, params, batch = gpt()
    width, depth, t, rows = 192, 4, batch.shape[1] - 1, batch.shape[0]
    tokens = rows * t
    block = 2 * tokens * width * 12 * width + 2 * 2 * tokens * t * width
    forward = depth * block + 2 * tokens * width * 256
    for options, times in (({}, 3), ({"accumulate": 8}, 3), ({"remat": True}, 4)):
        yield "GPT", options, loss_fn, params, batch, times * forward

    loss_fn, params, batch = blocks()
    layer = 2 * 2 * 2048 * 128 * 512
    yield "8 blocks in a scan", {}, loss_fn, params, batch, 3 * 8 * layer


def main() -> None:
    rows = []
    for name, options, loss_fn, params, batch, by_hand in counts():
        step, state = ts.train_step(loss_fn, **options), ts.setup(ts.rules.adam(1e-3), params)
        start = time.perf_counter()
        about = describe(step, state, batch)
        took = time.perf_counter() - start
        start = time.perf_counter()
        compiled = dataclasses.replace(step).lower(state, batch).compile()
        share = took / (time.perf_counter() - start)
        costs = compiled.cost_analysis()
        of_xla = (costs[0] if isinstance(costs, list) else costs or {}).get("flops", math.nan)
        title = f"{name} {', '.join(f'{k}={v}' for k, v in options.items())}".strip()
        rows.append((title, by_hand / 1e9, about.flops / by_hand, of_xla / by_hand, share))
    head = ("step", "GFLOP by hand", "products x", "XLA x", "describe / compiling")
    table("FLOPs against a hand count of the products, and the time of describe over that of compiling", rows, head)

    loss_fn, params, batch = gpt()
    step, state = (
        ts.train_step(lambda params, x: jnp.log(0 * loss_fn(params, x))),
        ts.setup(ts.rules.adam(1e-3), params),
    )
    start = time.perf_counter()
    report = replay(step, state, batch)
    seconds = time.perf_counter() - start
    start = time.perf_counter()
    step.lower(state, batch).compile()
    compiling = time.perf_counter() - start
    note(f"replay of a GPT whose loss is log(0): {report.primitive}, {seconds / compiling:.2f} x compiling it")

    moved = jax.block_until_ready(jnp.asarray(np.zeros((64, 1024), np.float32)))
    start = time.perf_counter()
    for _ in range(100):
        jax.device_get(moved)
    note(f"a rejected call: {(time.perf_counter() - start) * 1e4:.0f} us for a batch of 256 KiB")
    save("insight")


if __name__ == "__main__":
    main()
