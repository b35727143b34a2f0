"""How often XLA compiles the step over a life of adjusts, freezes and rebuilt rules: counted at the compiler."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tsunax as ts

from benchmarks._common import batch_of, mlp, mlp_loss, save, table

NAMES: list[str] = []


def _listen(event: str, duration: float, **about) -> None:
    if "backend_compile" in event:
        NAMES.append(str(about.get("fun_name", "?")))


def main() -> None:
    jax.monitoring.register_event_duration_secs_listener(_listen)
    params, batch = mlp([64, 64, 64, 10]), batch_of(32, 64)
    step = ts.train_step(mlp_loss)
    schedule = optax.cosine_decay_schedule(1e-2, 100)
    state = ts.setup(ts.rules.chain(ts.rules.clip_by_global_norm(1.0), ts.rules.adam(schedule)), params)
    paths = ["0/**", "1/**", "2/**", "**/0", "**/1"]
    draw, rows = random.Random(0), []

    def count(title, expected, n, edit):
        nonlocal state
        before = len(NAMES)
        for i in range(n):
            state = edit(state, i)
            state, _ = step(state, batch)
        compiled = sum("train_step" in name for name in NAMES[before:])
        rows.append((title, n, compiled, expected))

    kinds = [float, np.float32, jnp.float32, np.float64, lambda v: int(v > 5e-3)]
    rebuilt = lambda i: ts.setup(ts.rules.chain(ts.rules.clip_by_global_norm(1.0 + i), ts.rules.adam(schedule)), params)
    first_freeze = lambda s, i: ts.freeze(s, "0/**")
    switch = lambda s, i: (ts.freeze if i % 2 else ts.thaw)(s, draw.choice(paths))
    count("first step", 1, 1, lambda s, i: s)
    count("steps under a schedule", 0, 100, lambda s, i: s)
    count(
        "adjust, whole tree, five types",
        0,
        100,
        lambda s, i: ts.adjust(s, learning_rate=kinds[i % 5](draw.random() / 100)),
    )
    count("rebuilt rule, other numbers", 0, 20, lambda s, i: rebuilt(i))
    count("first cut of a subtree", 1, 1, lambda s, i: ts.adjust(s, "0/**", learning_rate=1e-3))
    count("adjust of that subtree", 0, 100, lambda s, i: ts.adjust(s, "0/**", learning_rate=draw.random()))
    count("first freeze", 1, 1, first_freeze)
    count("freeze and thaw, any pattern", 0, 100, switch)
    table("compilations of the step", rows, ("edit", "edits", "compiled", "expected"))
    assert all(compiled == expected for _, _, compiled, expected in rows), rows
    save("recompiles")
