"""A denoising diffusion model of handwritten digits; its averaged parameters draw new ones.

    python examples/ports/ddpm.py           # a minute on two CPU cores; options: --steps, --seed

It ends in `Frechet distance of the drawn digits: 1.0`, between the mean and the covariance of the
pixels of drawn and real digits, and fails above 2. Two halves of the real ones are 1.4 apart, and
noise is 39.8 away.

Follows yiyixuxu/denoising-diffusion-flax at d09e271, denoising_diffusion_flax/train.py, but for
self-conditioning, samples and wandb: its training is 122 lines of code at 100 columns, lines
156-158, 184-191, 196-200, 222-261, 284-341, 350-359, 374-376, 390-391, 397-398, 403-406, 410-417,
427-430, 439-459 and 466-468.
"""

import argparse
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from sklearn.datasets import load_digits

import tsunax as ts

TIMES, PIXELS = 200, 64
KEPT = np.cumprod(1 - np.linspace(1e-4, 0.05, TIMES)).astype(np.float32)  # of the image's variance


class Denoiser(nnx.Module):
    """(images, times) -> the noise in them."""

    def __init__(self, width, rngs):
        self.first, self.last = (
            nnx.Linear(PIXELS, width, rngs=rngs),
            nnx.Linear(width, PIXELS, rngs=rngs),
        )
        self.times = nnx.Embed(TIMES, width, rngs=rngs)
        block = lambda: nnx.Sequential(
            nnx.LayerNorm(width, rngs=rngs), nnx.Linear(width, width, rngs=rngs), nnx.silu,
            nnx.Linear(width, width, kernel_init=nnx.initializers.zeros, rngs=rngs),
        )  # fmt: skip
        self.blocks = nnx.List([block() for _ in range(4)])

    def __call__(self, x, t):
        x = self.first(x) + self.times(t)
        for block in self.blocks:
            x = x + block(x)
        return self.last(nnx.silu(x))


def load():
    return (load_digits().data / 8 - 1).astype(np.float32)


def distance(a, b):
    """Between two sets of images as normal distributions (Frechet)."""
    means, (one, other) = a.mean(0) - b.mean(0), (np.cov(x.T) for x in (a, b))
    shared = np.sqrt(np.linalg.eigvals(one @ other).real.clip(0)).sum()
    return float(means @ means + np.trace(one) + np.trace(other) - 2 * shared)


def sample(predict, key, n=500):
    """Images from noise, a time after the other; `predict(x, t)` is the noise in them."""

    def back(x, now):
        t, key = now
        kept, before = jnp.asarray(KEPT)[t], jnp.where(t > 0, jnp.asarray(KEPT)[t - 1], 1.0)
        noise = predict(x, jnp.full(n, t))
        clean = jnp.clip((x - jnp.sqrt(1 - kept) * noise) / jnp.sqrt(kept), -1, 1)
        beta = 1 - kept / before
        mean = (jnp.sqrt(before) * beta * clean + jnp.sqrt(1 - beta) * (1 - before) * x) / (
            1 - kept
        )
        spread = jnp.sqrt(beta * (1 - before) / (1 - kept))
        return mean + spread * jax.random.normal(key, x.shape), None

    first, *keys = jax.random.split(key, TIMES + 1)
    return jax.lax.scan(
        back, jax.random.normal(first, (n, PIXELS)), (jnp.arange(TIMES)[::-1], jnp.stack(keys))
    )[0]


def make(steps, seed=0):
    """Data, state and loss function, for `main` and for the tests."""
    # with dropout or batch statistics: ts.models.nnx, as in vit.py
    graphdef, params = nnx.split(Denoiser(256, nnx.Rngs(seed)), nnx.Param)
    predict = lambda params, x, t: nnx.merge(graphdef, params)(x, t)

    # training
    def loss_fn(params, x, key):
        keys = jax.random.split(key)
        t, noise = (
            jax.random.randint(keys[0], len(x), 0, TIMES),
            jax.random.normal(keys[1], x.shape),
        )
        kept = jnp.asarray(KEPT)[t].reshape(-1, *[1] * (x.ndim - 1))
        seen = jnp.sqrt(kept) * x + jnp.sqrt(1 - kept) * noise
        return ts.Loss.mean((predict(params, seen, t) - noise) ** 2)

    rule = ts.rules.adam(ts.schedules.cosine_decay_schedule(2e-3, steps))
    state = ts.setup(rule, params, key=seed, ema=ts.averages.ema(0.995, warmup=True))
    # end of training
    return ts.batches(load(), 128, shuffle=True, seed=seed), state, loss_fn, predict


def main(steps, seed, target=2.0):
    data, state, loss_fn, predict = make(steps, seed)
    with tempfile.TemporaryDirectory() as folder:
        # training
        logger = ts.loggers.jsonl(f"{folder}/log.jsonl")
        checkpoint = ts.Checkpoints(f"{folder}/run", every=1000, keep_last=3)
        state, _ = ts.fit(
            ts.train_step(loss_fn), state, data, steps=steps, logger=logger, checkpoint=checkpoint
        )
        params = ts.averaged(state).params
        # end of training
    drawn = jax.jit(lambda key: sample(lambda x, t: predict(params, x, t), key))(jax.random.key(1))
    found = distance(np.asarray(drawn), load())
    print(f"Frechet distance of the drawn digits: {found:.2f}")
    assert found <= target, f"expected at most {target}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
