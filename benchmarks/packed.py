"""Gain and cost of packing small leaves into one vector, written by hand in plain JAX.

All guarded contenders compute the same: both norms, the finite check, one choice. `flat` carries one vector for params
and for each moment from call to call; `packed inside` takes and gives pytrees. Not in the package: docs/decisions.md.
"""

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks._common import batch_of, copied, interleave, mlp, mlp_loss, ratio, save, table

CASES = {  # sizes, rows, single steps of a burst
    "tiny MLP 64-64-10": ([64, 64, 10], 32, 300),
    "200 leaves of 32 x 32": ([32] * 100 + [10], 8, 15),
    "40 leaves of 128 x 128": ([128] * 20 + [10], 32, 40),
}
TX = optax.adam(1e-3)
SCANNED = 100  # steps of a scan


def norm(tree):
    return jnp.sqrt(sum(jnp.sum(x * x) for x in jax.tree.leaves(tree)))


def bare(carry, batch):
    params, opt_state = carry
    loss, grads = jax.value_and_grad(mlp_loss)(params, batch)
    updates, opt_state = TX.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss


def moved(carry, loss, grads):
    """The guarded update of whatever pytree: leaves, or one vector."""
    grad_norm = norm(grads)
    ok = jnp.isfinite(loss) & jnp.isfinite(grad_norm)

    def applied():
        updates, opt_state = TX.update(grads, carry[1], carry[0])
        return (optax.apply_updates(carry[0], updates), opt_state), norm(updates)

    carry, update_norm = jax.lax.cond(ok, applied, lambda: (carry, jnp.float32(0)))
    return carry, (loss, grad_norm, update_norm, ok)


def guarded(carry, batch):
    return moved(carry, *jax.value_and_grad(mlp_loss)(carry[0], batch))


def raveled(tree):
    return jnp.concatenate([x.reshape(-1) for x in jax.tree.leaves(tree)])


def packed(carry):
    adam, rest = carry[1]
    return raveled(carry[0]), (adam._replace(mu=raveled(adam.mu), nu=raveled(adam.nu)), rest)


def unpacked(like, carry):
    leaves, treedef = jax.tree.flatten(like)
    ends = np.cumsum([x.size for x in leaves])
    parts = [(int(end) - x.size, int(end), x.shape) for x, end in zip(leaves, ends, strict=True)]
    back = lambda v: treedef.unflatten([jax.lax.slice(v, (a,), (b,)).reshape(shape) for a, b, shape in parts])
    adam, rest = carry[1]
    return back(carry[0]), (adam._replace(mu=back(adam.mu), nu=back(adam.nu)), rest)


def flat(like, carry, batch):
    params = unpacked(like, carry)[0]
    loss, grads = jax.value_and_grad(mlp_loss)(params, batch)
    return moved(carry, loss, raveled(grads))


def inside(like, carry, batch):
    carry, info = flat(like, packed(carry), batch)
    return unpacked(like, carry), info


def single(step, carry, batch):
    run, carry = jax.jit(step, donate_argnums=0), [copied(carry)]

    def burst(n):
        for _ in range(n):
            carry[0], info = run(carry[0], batch)
        jax.block_until_ready((carry, info))

    return burst


def scanned(step, carry, batch):
    run, carry = jax.jit(lambda c, xs: jax.lax.scan(step, c, xs), donate_argnums=0), [copied(carry)]
    many = jax.tree.map(lambda x: jnp.broadcast_to(x, (SCANNED, *x.shape)), batch)

    def burst(n):
        for _ in range(max(n // SCANNED, 1)):
            carry[0], info = run(carry[0], many)
        jax.block_until_ready((carry, info))

    return burst


def compiled_in(step, carry, batch) -> float:
    jax.clear_caches()
    lowered = jax.jit(step, donate_argnums=0).lower(carry, batch)
    start = time.perf_counter()
    lowered.compile()
    return time.perf_counter() - start


def main(rounds: int = 12) -> None:
    for title, (sizes, rows, steps) in CASES.items():
        params, batch = mlp(sizes), batch_of(rows, sizes[0])
        carry = params, TX.init(params)
        steps_of = {
            "bare": (bare, carry),
            "guarded": (guarded, carry),
            "guarded, flat": (functools.partial(flat, params), packed(carry)),
            "guarded, packed inside": (functools.partial(inside, params), carry),
        }
        for kind, make, n in (("a step a call", single, steps), (f"a scan of {SCANNED}", scanned, SCANNED)):
            contenders = {name: make(step, start, batch) for name, (step, start) in steps_of.items()}
            times = interleave(contenders, rounds=rounds, steps=n)
            found = [(name, float(np.median(t)), *ratio(times, name, "bare")) for name, t in times.items()]
            table(f"{title}, {kind}", found, ("contender", "us/step", "x low", "x median", "x high"))
        seconds = [(name, compiled_in(step, start, batch)) for name, (step, start) in steps_of.items()]
        table(f"{title}, compiled", seconds, ("contender", "seconds"))
    save("packed")


if __name__ == "__main__":
    main()
