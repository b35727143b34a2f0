"""Muon over eight devices: bytes that a step receives, and FLOPs of each device, beside optax's Muon and Adam.

Read from the compiled programs, so the machine does not matter. FLOPs are those of the update: of a step, less those of
Adam's step.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tsunax as ts
from tsunax.insight._cost import collectives_in

from benchmarks._common import save, table

MATRICES = {"4 of 256 x 256": [(256, 256)] * 4, "8 of 256 x 256": [(256, 256)] * 8}
LAYOUTS = {"fully sharded": (dict(data=1, fsdp=8), {}), "data": ({}, {}), "data 2 x fsdp 4": (dict(data=2, fsdp=4), {})}
RULES = {"Adam": ts.rules.adam(1e-3), "optax's Muon": optax.contrib.muon(1e-3), "rules.muon": ts.rules.muon(1e-3)}


def loss_fn(params, batch):
    return sum(jnp.mean(jnp.tanh(batch[:, : len(w)] @ w) ** 2) for w in params.values())


def compiled(rule, params, axes, options):
    state = ts.setup(rule, params)
    if axes is not None:
        state = ts.shard(state, ts.mesh(**axes), **options)
    batch = np.ones((64, 1024), np.float32)
    return ts.train_step(loss_fn).lower(state, batch).compile()


def sent(program) -> float:
    return sum(c.bytes for c in collectives_in(program.as_text())) / 1e6


def flops(program) -> float:
    return program.cost_analysis()["flops"]


def main() -> None:
    if len(jax.devices()) == 1:
        raise SystemExit("benchmarks muon: one device only; XLA_FLAGS=--xla_force_host_platform_device_count=8")
    for name, shapes in MATRICES.items():
        params = {f"w{i:02}": np.ones(shape, np.float32) for i, shape in enumerate(shapes)}
        alone = {rule: flops(compiled(tx, params, None, {})) for rule, tx in RULES.items()}
        alone = alone["optax's Muon"] - alone["Adam"]
        rows = []
        for layout, where in LAYOUTS.items():
            programs = {rule: compiled(tx, params, *where) for rule, tx in RULES.items()}
            adam = programs["Adam"]
            for rule, program in programs.items():
                share = (flops(program) - flops(adam)) / alone
                rows.append((f"{layout}: {rule}", sent(program), sent(program) / sent(adam), share))
        head = ("layout", "MB received", "x of Adam's", "FLOPs of the update, x of one device's")
        table(f"{name}, 8 devices", rows, head)
    save("muon")
