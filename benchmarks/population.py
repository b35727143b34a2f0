"""A population of 32 small MLPs in `train_steps` beside the hand-written vmapped scan, and beside 32 runs in turn.

The hand-written scan computes the same info (norms, finite check, select) under `vmap`, from the same batches.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import tsunax as ts

from benchmarks._common import batch_of, copied, interleave, mlp, mlp_loss, ratio, save, table
from benchmarks.step import TX, guarded

N, K = 32, 50


def by_hand(params, batches):
    inner = guarded(jax.value_and_grad(mlp_loss)).__wrapped__
    opt_state = jax.vmap(TX.init)(params)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def steps(params, opt_state, batches):
        def one(carry, batch):
            params, opt_state, info = jax.vmap(inner, in_axes=(0, 0, None))(*carry, batch)
            return (params, opt_state), info

        (params, opt_state), infos = jax.lax.scan(one, (params, opt_state), batches)
        return params, opt_state, infos

    held = [copied(params), opt_state]

    def burst(n):
        params, opt_state = held
        for _ in range(n):
            params, opt_state, _ = steps(params, opt_state, batches)
        jax.block_until_ready(params)
        held[:] = params, opt_state

    return burst


def by_tsunax(step, states, batches):
    held = list(states)

    def burst(n):
        for i, state in enumerate(held):
            for _ in range(n):
                state, _ = ts.loop.run_steps(step, state, batches)
            jax.block_until_ready(state.params)
            held[i] = state

    return burst


def tables() -> None:
    sizes, step = [64, 64, 10], ts.train_step(mlp_loss)
    batches = jax.tree.map(lambda x: np.stack([np.asarray(x)] * K), batch_of(32, 64))
    batches = jax.device_put(batches)
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *[mlp(sizes, seed) for seed in range(N)])
    make = lambda key, at: ts.setup(ts.rules.adam(1e-3), jax.tree.map(lambda x: x[at], stacked), key=key)
    singles = [ts.setup(ts.rules.adam(1e-3), mlp(sizes, seed)) for seed in range(N)]
    contenders = {
        "vmapped scan by hand": by_hand(stacked, batches),
        "population": by_tsunax(step, [ts.population(make, N, at=np.arange(N))], batches),
        "32 fused runs in turn": by_tsunax(step, singles, batches),
    }
    times = interleave(contenders, rounds=15, steps=3)
    rows = [(name, *ratio(times, name, "vmapped scan by hand")) for name in contenders]
    title = f"{N} MLPs of 64-64-10, batches of 32, {K} steps a call"
    table(title, rows, ("", "x low", "x median", "x high"))


def main() -> None:
    tables()
    save("population")
