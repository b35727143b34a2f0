"""A step over eight devices against the hand-written jitted one with the same shardings, batches from the host.

The hand-written step computes the same info (norms, finite check, select), spreads its batch with one `device_put`, and
keeps its shardings with `out_shardings`. Simulated devices on a CPU share its cores: only the ratio says something.
"""

import jax
import numpy as np
import tsunax as ts
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks._common import batch_of, interleave, mlp, mlp_loss, ratio, save, table
from benchmarks.step import TX, by_tsunax, guarded

CASES = {  # sizes, rows of a batch, steps of a burst, rounds
    "MLP 64-64-10": ([64, 64, 10], 64, 40, 40),
    "MLP 512-512-512-10": ([512, 512, 512, 10], 256, 10, 30),
}
LAYOUTS = {"replicated": {}, "fsdp": {"data": 1, "fsdp": -1}}


def by_hand(state, batch):
    """The same arrays at the same places, and a loop that spreads its batch."""
    params, opt_state = jax.tree.map(lambda x: x.copy(), (state.params, state.opt_state))
    mesh = state.clock.sharding.mesh
    rows, places = NamedSharding(mesh, P(("data", "fsdp"))), jax.tree.map(lambda x: x.sharding, (params, opt_state))
    inner = guarded(jax.value_and_grad(mlp_loss)).__wrapped__
    step = jax.jit(inner, donate_argnums=(0, 1), out_shardings=(*places, NamedSharding(mesh, P())))
    held = [params, opt_state]

    def burst(n):
        params, opt_state = held
        for _ in range(n):
            params, opt_state, _ = step(params, opt_state, jax.device_put(batch, rows))
        jax.block_until_ready(params)
        held[:] = params, opt_state

    return burst


def main() -> None:
    if len(jax.devices()) == 1:
        raise SystemExit("benchmarks sharding: one device only; XLA_FLAGS=--xla_force_host_platform_device_count=8")
    results: dict = {}
    for name, (sizes, rows, steps, rounds) in CASES.items():
        params, batch = mlp(sizes), jax.tree.map(np.asarray, batch_of(rows, sizes[0]))
        for layout, axes in LAYOUTS.items():
            make = lambda axes=axes, params=params: ts.shard(ts.setup(TX, params), ts.mesh(**axes))
            contenders = {
                "by hand": by_hand(make(), batch),
                "tsunax": by_tsunax(ts.train_step(mlp_loss), make(), batch),
            }
            times = interleave(contenders, rounds=rounds, steps=steps)
            results[f"{name}, {layout}"] = ratio(times, "tsunax", "by hand")
    table("a step over a mesh", [(k, *v) for k, v in results.items()], ("case", "x low", "x median", "x high"))
    save("sharding")
