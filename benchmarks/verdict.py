"""What a verdict costs a hand-written step: where the choice is made, and whether it sees the update.

`select` chooses each array; `cond` the whole state. `before` judges loss and gradient before the rule
runs, and has no norm of the update; `early` has it, in the taken branch; `late` judges the update too,
from that norm. `twice` runs the rule again in the cond's taken branch, so that XLA drops all but the
norm from the first run. `one vector` sums leaves of up to 16,384 elements together. On a CPU tsunax takes `before,
cond, one vector`, or `late, select` for rules that may make infinite updates of finite gradients.
"""

import functools
import statistics

import jax
import jax.numpy as jnp
import optax

from benchmarks._common import batch_of, copied, interleave, mlp, mlp_loss, ratio, save, table

TX = optax.adam(1e-3)
CASES = {"tiny MLP 64-64-10": ([64, 64, 10], 32, 300, 40), "MLP 2048-2048-2048-10": ([2048, 2048, 2048, 10], 32, 3, 6)}
KINDS = (
    *("bare", "before, select", "before, cond", "before, cond, one vector"),
    *("early, select", "early, cond", "early, cond, one vector"),
    *("late, select", "late, cond", "late, cond, twice", "late, cond, twice, one vector"),
)


def norm(kind, tree):
    leaves = jax.tree.leaves(tree)
    if "one vector" in kind:
        small = [x.ravel() for x in leaves if x.size <= 1 << 14]
        leaves = [x for x in leaves if x.size > 1 << 14] + ([jnp.concatenate(small)] if small else [])
    return jnp.sqrt(sum(jnp.sum(x * x) for x in leaves))


def step(kind, params, opt_state, clock, batch, *, loss_fn=mlp_loss, tx=TX):
    """One step: `((params, opt_state, clock), info)`."""
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)

    def applied():
        updates, new = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), new), updates

    old = params, opt_state
    judged_before = kind.startswith("before")
    if kind == "bare":
        new, _ = applied()
        return (*new, clock + 1), (loss,)
    grad_norm = norm(kind, grads)
    ok = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    if kind.startswith("early, cond"):
        taken = lambda: (lambda new, updates: (new, norm(kind, updates)))(*applied())
        new, update_norm = jax.lax.cond(ok, taken, lambda: (old, jnp.float32(0)))
        return (*new, clock + ok), (loss, grad_norm, update_norm, ok)
    new, updates = applied()
    update_norm = jnp.float32(0) if judged_before else norm(kind, updates)
    if kind.startswith("late"):
        ok &= jnp.isfinite(update_norm)
    if "select" in kind:
        new = jax.tree.map(lambda a, b: jnp.where(ok, a, b), new, old)
    else:
        again = "twice" in kind or judged_before
        new = jax.lax.cond(ok, (lambda: applied()[0]) if again else lambda: new, lambda: old)
    return (*new, clock + ok), (loss, grad_norm, update_norm, ok)


def jitted(kind, **problem):
    return jax.jit(functools.partial(step, kind, **problem), donate_argnums=(0, 1, 2))


def single(kind, params, batch, *, loss_fn=mlp_loss, tx=TX):
    run = jitted(kind, loss_fn=loss_fn, tx=tx)
    held = [copied(params), tx.init(params), jnp.zeros(4, jnp.int32)]
    program = run.lower(*held, batch).compile()

    def burst(n):
        for _ in range(n):
            held[:], _ = run(*held, batch)
        jax.block_until_ready(held)

    return burst, program.memory_analysis().temp_size_in_bytes / 1e6


def scanned(kind, params, batch):
    def loop(state, n):
        return jax.lax.scan(lambda state, _: step(kind, *state, batch), state, None, length=n)

    run = jax.jit(loop, static_argnums=1, donate_argnums=0)
    held = [(copied(params), TX.init(params), jnp.zeros(4, jnp.int32))]

    def burst(n):
        held[0], _ = run(held[0], n)
        jax.block_until_ready(held)

    return burst


def tables() -> None:
    for name, (sizes, rows, steps, rounds) in CASES.items():
        params, batch = mlp(sizes), batch_of(rows, sizes[0])
        bursts = {kind: single(kind, params, batch) for kind in KINDS}
        alone = interleave({kind: burst for kind, (burst, _) in bursts.items()}, rounds=rounds, steps=steps)
        loops = interleave({kind: scanned(kind, params, batch) for kind in KINDS}, rounds=rounds, steps=steps)
        found = []
        for kind in KINDS:
            row = [statistics.median(alone[kind]), ratio(alone, kind, "bare")[1]]
            row += [statistics.median(loops[kind]), ratio(loops, kind, "bare")[1], bursts[kind][1]]
            found.append((kind, *row))
        table(name, found, ("step", "single us", "x bare", "in a scan us", "x bare", "temporary MB"))


def main() -> None:
    tables()
    save("verdict")


if __name__ == "__main__":
    main()
