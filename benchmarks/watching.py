"""What `watch=` costs a step: between the calls that it measures, and at them, beside norms by hand.

`between` has a watch whose calls never come; `at` measures every call; `by hand` takes the same norms of
every gradient after `value_and_grad`, in one program with `update`.
"""

import time

import jax
import jax.numpy as jnp
import tsunax as ts

from benchmarks._common import batch_of, interleave, mlp, mlp_loss, note, ratio, save, table

SIZES, ROWS = [512, 512, 512, 512, 10], 256


def contenders():
    batch = batch_of(ROWS, SIZES[0])

    def by_hand(state, batch):
        loss, grads = ts.value_and_grad(mlp_loss)(state, batch)
        norms = [jnp.sqrt(jnp.sum(jnp.square(g))) for g in jax.tree.leaves(grads)]
        return *ts.update(state, grads, loss=loss), norms

    steps = {
        "without": ts.train_step(mlp_loss),
        "between": ts.train_step(mlp_loss, watch=ts.Watch("**", every=1 << 30)),
        "at": ts.train_step(mlp_loss, watch=ts.Watch("**", every=1)),
        "by hand": jax.jit(by_hand, donate_argnums=0),
    }

    def burst_of(step):
        holder = [ts.setup(ts.rules.adam(1e-3), mlp(SIZES))]

        def burst(steps):
            for _ in range(steps):
                holder[0], *_ = step(holder[0], batch)
            jax.block_until_ready(holder[0])

        return burst

    return {name: burst_of(step) for name, step in steps.items()}


def main():
    times = interleave(contenders(), rounds=12, steps=6, clock=time.process_time)
    rows = [
        (f"{name} / {floor}", *ratio(times, name, floor))
        for name, floor in (("between", "without"), ("at", "by hand"), ("at", "without"))
    ]
    table("CPU time of a step: quartiles of the ratio", rows, ("step", "low", "median", "high"))
    state, batch = ts.setup(ts.rules.adam(1e-3), mlp(SIZES)), batch_of(ROWS, SIZES[0])
    for name, watch in (("without", None), ("with a watch", ts.Watch("**", every=100))):
        compiled = ts.train_step(mlp_loss, watch=watch).lower(state, batch).compile()
        flops, memory = compiled.cost_analysis()["flops"], compiled.memory_analysis()
        note(f"{name}: {flops:,.0f} FLOPs, {memory.temp_size_in_bytes:,} temporary bytes")
    save("watching")


if __name__ == "__main__":
    main()
