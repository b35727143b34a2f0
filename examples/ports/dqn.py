"""Q-learning of a pole on a cart, with a replay buffer and a target network.

    python examples/ports/dqn.py            # half a minute on two CPU cores; options: --steps, --seed

It needs ppo.py beside it, for the pole and the cart.

It ends in `steps that the pole stands, by the greedy policy: 500`, all of them, and fails below 400.

Follows CleanRL's cleanrl/dqn_jax.py (vwxyzjn/cleanrl at fe8d8a0), with eight environments for its
one: its training is 72 lines of code at 119 columns, lines 102-108, 136-137, 145-156, 158-164,
166-179, 184-196 and 206-240.
"""

import argparse

import jax
import jax.numpy as jnp
from flax import nnx
from ppo import begin, move

import tsunax as ts

ENVS, BUFFER, ROWS = 8, 16_384, 128  # ENVS divides BUFFER


class Network(nnx.Module):
    def __init__(self, rngs):
        self.first, self.second = nnx.Linear(4, 120, rngs=rngs), nnx.Linear(120, 84, rngs=rngs)
        self.last = nnx.Linear(84, 2, rngs=rngs)

    def __call__(self, seen):
        return self.last(nnx.relu(self.second(nnx.relu(self.first(seen)))))


def make(steps, seed=0):
    """The run, its step and the network, for `main` and for the tests."""
    # with dropout or batch statistics: ts.models.nnx, as in vit.py
    graphdef, params = nnx.split(Network(nnx.Rngs(seed)), nnx.Param)
    apply = lambda params, seen: nnx.merge(graphdef, params)(seen)

    # training
    def loss_fn(params, batch, ema):
        seen, action, then, done = batch
        target = 1.0 + 0.99 * (1 - done) * apply(ema, then).max(-1)
        found = jnp.take_along_axis(apply(params, seen), action[:, None], 1)[:, 0]
        return ts.Loss.mean((found - target) ** 2)

    learn = ts.train_step(loss_fn)

    def step(run):
        cart, buffer, key = run.carry
        key, acting, moving, choosing = jax.random.split(key, 4)
        random = jnp.maximum(1 - run.calls / (steps / 2) * 0.95, 0.05)
        best = apply(run.agent.params, cart.seen).argmax(-1)
        coin, other = jax.random.uniform(acting, (2, ENVS))
        action = jnp.where(coin < random, (other < 0.5).astype(best.dtype), best)
        new, done = move(cart, action, moving)
        at = run.calls * ENVS % BUFFER
        put = lambda x, row: jax.lax.dynamic_update_slice_in_dim(x, row.astype(x.dtype), at, 0)
        buffer = jax.tree.map(put, buffer, (cart.seen, action, new.seen, done))
        rows = jax.random.randint(choosing, ROWS, 0, jnp.minimum((run.calls + 1) * ENVS, BUFFER))
        agent, info = learn(run.agent, jax.tree.map(lambda x: x[rows], buffer))
        run = run.advance(agent=agent, carry=(new, buffer, key))
        return run, {"loss": info.loss, "stands": jnp.mean(new.last)}

    target = ts.averages.ema(0.0, every=100)  # a copy of the parameters, every 100 steps
    agent = ts.setup(ts.rules.adam(2.5e-4), params, ema=target)
    empty = [jnp.zeros((BUFFER, 4)), jnp.zeros(BUFFER, jnp.int32), jnp.zeros((BUFFER, 4)),
             jnp.zeros(BUFFER)]  # fmt: skip
    keys = jax.random.split(jax.random.key(seed))
    run = ts.States(agent=agent, carry=(begin(keys[0], ENVS), tuple(empty), keys[1]))
    # end of training
    return run, step, apply


def main(steps, seed, target=400):
    run, step, apply = make(steps, seed)
    # training
    run, _ = ts.fit(step, run, steps=steps, log_every=100)
    # end of training

    @jax.jit
    def play(cart, key):
        greedy = lambda cart, key: move(cart, apply(run.agent.params, cart.seen).argmax(-1), key)
        return jax.lax.scan(greedy, cart, jax.random.split(key, 500))

    _, done = play(begin(jax.random.key(9), 100), jax.random.key(10))
    stands = float(jnp.mean(jnp.where(done.any(0), done.argmax(0) + 1, 500)))
    print(f"steps that the pole stands, by the greedy policy: {stands:.0f}")
    assert stands >= target, f"expected at least {target}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30_000)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
