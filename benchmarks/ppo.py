"""PPO by tsunax over PPO by hand (jitted JAX and optax), of one agent and of 64 at once.

    python -m benchmarks ppo

Both sides play the same carts and compute the same loss (examples/ports/ppo.py). By hand: gradients, clipping,
Adam with a scheduled rate. tsunax besides: both norms, the finite check and the choice of each step, and rates that
can be changed while it runs.
"""

import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import tsunax as ts
from flax import nnx

from benchmarks._common import note, save
from benchmarks.loop import compare

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "ports"))
import ppo

UPDATES = 976


def by_hand(seed):
    """The same training in JAX and optax alone: `(carry, update)`."""
    graphdef, params = nnx.split(ppo.Network(nnx.Rngs(jax.random.key(seed))), nnx.Param)
    apply = lambda params, seen: nnx.merge(graphdef, params)(seen)
    rate = optax.linear_schedule(2.5e-4, 0.0, UPDATES * ppo.EPOCHS * ppo.PARTS)
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(rate, eps=1e-5))

    def learn(agent, rows):
        params, opt_state = agent
        loss, grads = jax.value_and_grad(lambda params: ppo.loss_of(apply(params, rows[0]), rows))(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    def update(carry):
        agent, cart, key = carry
        key, playing, mixing = jax.random.split(key, 3)
        cart, batch = ppo.play(lambda seen: apply(agent[0], seen), cart, playing)

        def epoch(agent, key):
            order = jax.random.permutation(key, ppo.STEPS * ppo.ENVS).reshape(ppo.PARTS, -1)
            return jax.lax.scan(lambda agent, at: learn(agent, jax.tree.map(lambda x: x[at], batch)), agent, order)

        agent, losses = jax.lax.scan(epoch, agent, jax.random.split(mixing, ppo.EPOCHS))
        return (agent, cart, key), {"loss": jnp.mean(losses), "stands": jnp.mean(cart.last)}

    keys = jax.random.split(jax.random.key(seed))
    return ((params, tx.init(params)), ppo.begin(keys[0]), keys[1]), update


def many(step, carry, n: int):
    """A turn of n updates in one scan. It begins where the turn before ended."""
    held = [carry]
    run = jax.jit(lambda carry: jax.lax.scan(lambda carry, _: step(carry), carry, length=n), donate_argnums=0)

    def burst(_):
        held[0], infos = run(held[0])
        jax.block_until_ready(infos)

    return burst


def main() -> None:
    for agents, n, rounds in ((1, 40, 11), (64, 2, 9)):
        (carry, update), (run, step) = by_hand(0), ppo.make(UPDATES)
        if agents > 1:
            carry = jax.vmap(lambda seed: by_hand(seed)[0])(jnp.arange(agents))
            make = lambda key, seed: ppo.make(UPDATES, seed)[0]
            run = ts.population(make, agents, seed=jnp.arange(agents))
            update, step = jax.vmap(update), jax.vmap(step)
        contenders = {"by hand": (many(update, carry, n), n), "tsunax": (many(step, run, n), n)}
        title = f"PPO, {agents} agent{'s' * (agents > 1)} of {ppo.ENVS} carts, updates of {ppo.STEPS} steps"
        compare(title, contenders, "by hand", [("tsunax", "by hand", 1.02)], rounds=rounds)
    begun = time.perf_counter()
    ts.fit(ppo.make(UPDATES)[1], ppo.make(UPDATES)[0], steps=UPDATES, progress=False)
    note(f"a whole training by fit, {UPDATES} updates, with compilation: {time.perf_counter() - begun:.1f} s")
    save("ppo")


if __name__ == "__main__":
    main()
