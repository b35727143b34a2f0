"""Proximal policy optimization of a pole on a cart: agent, environments and updates in one program.

    python examples/ports/ppo.py            # half a minute on two CPU cores; options: --updates, --seed

It ends in `steps that the pole stands, in the last tenth: 485` (of 500) and fails below 400.

Follows PureJaxRL's purejaxrl/ppo.py (luchris429/purejaxrl at 31756b1), with its numbers: its
training is 167 lines of code at 88 columns, lines 62-68, 73-80, 82-104 and 110-271.
"""

import argparse
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import tsunax as ts

ENVS, STEPS, EPOCHS, PARTS = 4, 128, 4, 4  # PARTS divides ENVS * STEPS


class Network(nnx.Module):
    """What is seen (n, 4) -> logits (n, 2) of the actions, and the value (n,)."""

    def __init__(self, rngs):
        scale = nnx.initializers.orthogonal
        layer = lambda n, m, by: nnx.Linear(n, m, kernel_init=scale(by), rngs=rngs)
        body = lambda last, by: nnx.Sequential(
            layer(4, 64, 2**0.5), jnp.tanh, layer(64, 64, 2**0.5), jnp.tanh, layer(64, last, by)
        )  # fmt: skip
        self.actor, self.critic = body(2, 0.01), body(1, 1.0)

    def __call__(self, seen):
        return self.actor(seen), self.critic(seen)[:, 0]


class Cart(NamedTuple):
    """Carts: place, velocity, angle and its velocity; steps so far, and those of the last episode."""

    seen: jax.Array  # (n, 4)
    age: jax.Array  # (n,)
    last: jax.Array  # (n,)


def move(cart, action, key):
    """The carts after a step (Barto, Sutton and Anderson 1983, as in Gym's CartPole-v1), and which
    episodes have ended. Those begin again.
    """
    x, v, angle, spin = cart.seen.T
    force, cos, sin = jnp.where(action == 1, 10.0, -10.0), jnp.cos(angle), jnp.sin(angle)
    push = (force + 0.05 * spin**2 * sin) / 1.1
    turn = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
    seen = jnp.stack([x + 0.02 * v, v + 0.02 * (push - 0.05 * turn * cos / 1.1),
                      angle + 0.02 * spin, spin + 0.02 * turn], -1)  # fmt: skip
    age = cart.age + 1
    done = (jnp.abs(seen[:, 0]) > 2.4) | (jnp.abs(seen[:, 2]) > 0.2095) | (age >= 500)
    new = jax.random.uniform(key, seen.shape, minval=-0.05, maxval=0.05)
    seen = jnp.where(done[:, None], new, seen)
    return Cart(seen, jnp.where(done, 0, age), jnp.where(done, age, cart.last)), done


def begin(key, n=ENVS):
    seen = jax.random.uniform(key, (n, 4), minval=-0.05, maxval=0.05)
    return Cart(seen, jnp.zeros(n, jnp.int32), jnp.zeros(n, jnp.int32))


# training
def loss_of(out, batch):
    """The clipped loss of a batch of rows, from what the network says of them."""
    (logits, now), (_, action, before, value, advantage, target) = out, batch
    log_probs = jax.nn.log_softmax(logits)
    ratio = jnp.exp(jnp.take_along_axis(log_probs, action[:, None], 1)[:, 0] - before)
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    gain = jnp.minimum(ratio * advantage, ratio.clip(0.8, 1.2) * advantage)
    near = value + (now - value).clip(-0.2, 0.2)
    error = jnp.maximum((now - target) ** 2, (near - target) ** 2) / 2
    entropy = -jnp.sum(jnp.exp(log_probs) * log_probs, -1)
    return jnp.mean(-gain + 0.5 * error - 0.01 * entropy)


def play(network, cart, key):
    """The carts after STEPS steps of the policy, and the rows (STEPS * ENVS) of its training."""

    def one(cart, key):
        logits, value = network(cart.seen)
        action = jax.random.categorical(key, logits)
        before = jnp.take_along_axis(jax.nn.log_softmax(logits), action[:, None], 1)[:, 0]
        new, done = move(cart, action, jax.random.fold_in(key, 1))
        return new, (cart.seen, action, before, value, done)

    def back(after, now):
        (advantage, then), (value, done) = after, now
        error = 1.0 + 0.99 * then * (1 - done) - value
        advantage = error + 0.99 * 0.95 * (1 - done) * advantage
        return (advantage, value), advantage

    cart, path = jax.lax.scan(one, cart, jax.random.split(key, STEPS))
    last = network(cart.seen)[1]
    _, advantage = jax.lax.scan(back, (jnp.zeros(ENVS), last), path[3:], reverse=True)
    return cart, jax.tree.map(jnp.concatenate, (*path[:4], advantage, advantage + path[3]))


# end of training


def make(updates, seed=0):
    """The run and its step, for `main` and for the tests; `seed` may be traced."""
    # with dropout or batch statistics: ts.models.nnx, as in vit.py
    graphdef, params = nnx.split(Network(nnx.Rngs(jax.random.key(seed))), nnx.Param)
    apply = lambda params, seen: nnx.merge(graphdef, params)(seen)

    # training
    learn = ts.train_step(lambda params, rows: loss_of(apply(params, rows[0]), rows))

    def step(run):
        (cart, key), agent = run.carry, run.agent
        key, playing, mixing = jax.random.split(key, 3)
        cart, batch = play(functools.partial(apply, agent.params), cart, playing)

        def epoch(agent, key):
            order = jax.random.permutation(key, STEPS * ENVS).reshape(PARTS, -1)
            train = lambda agent, rows: learn(agent, jax.tree.map(lambda x: x[rows], batch))
            return jax.lax.scan(train, agent, order)

        agent, infos = jax.lax.scan(epoch, agent, jax.random.split(mixing, EPOCHS))
        run = run.advance(agent=agent, carry=(cart, key))
        return run, {"loss": jnp.mean(infos.loss), "stands": jnp.mean(cart.last)}

    rate = ts.schedules.linear_schedule(2.5e-4, 0.0, updates * EPOCHS * PARTS)
    rule = ts.rules.chain(ts.rules.clip_by_global_norm(0.5), ts.rules.adam(rate, eps=1e-5))
    keys = jax.random.split(jax.random.key(seed))
    run = ts.States(agent=ts.setup(rule, params), carry=(begin(keys[0]), keys[1]))
    # end of training
    return run, step


def main(updates, seed, target=400):
    run, step = make(updates, seed)
    # training
    run, history = ts.fit(step, run, steps=updates, log_every=1)
    # end of training
    stands = float(np.mean(history["stands"][-updates // 10 :]))
    print(f"steps that the pole stands, in the last tenth: {stands:.0f}")
    assert stands >= target, f"expected at least {target}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=976)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
