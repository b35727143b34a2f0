"""A variational autoencoder of handwritten digits, whose KL term grows from 0 to 1.

    python examples/ports/vae.py            # ten seconds on two CPU cores; options: --steps, --seed

It ends in `bits of a held-out image: 26.8` (the negative evidence lower bound) and fails above 28.

Follows flax's examples/vae/train.py (google/flax at 18f8f31), which has no slow start of the KL
term: its training is 51 lines of code at 80 columns, lines 32-64, 98-106 and 115-135.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from sklearn.datasets import load_digits

import tsunax as ts


class VAE(nnx.Module):
    def __init__(self, latents, rngs):
        self.up, self.code = nnx.Linear(64, 256, rngs=rngs), nnx.Linear(256, 2 * latents, rngs=rngs)
        self.down, self.out = nnx.Linear(latents, 256, rngs=rngs), nnx.Linear(256, 64, rngs=rngs)

    def __call__(self, x, key):
        mean, log_var = jnp.split(self.code(nnx.relu(self.up(x))), 2, -1)
        z = mean + jnp.exp(log_var / 2) * jax.random.normal(key, mean.shape)
        return self.out(nnx.relu(self.down(z))), mean, log_var


def load():
    """Training and held-out images, their pixels 0 or 1."""
    images = (load_digits().data[np.random.default_rng(0).permutation(1797)] > 7).astype(np.float32)
    return images[297:], images[:297]


def make(steps, seed=0):
    """Data, state and loss function, for `main` and for the tests."""
    # with dropout or batch statistics: ts.models.nnx, as in vit.py
    graphdef, params = nnx.split(VAE(8, nnx.Rngs(seed)), nnx.Param)

    # training
    def loss_fn(params, x, step, train, key=None):
        key = key if train else jax.random.key(0)
        logits, mean, log_var = nnx.merge(graphdef, params)(x, key)
        seen = -ts.losses.sigmoid_binary_cross_entropy(logits, x).sum(-1)
        kl = ((mean**2 + jnp.exp(log_var) - 1 - log_var) / 2).sum(-1)
        bound = (kl - seen) / jnp.log(2.0)
        return ts.Loss.mean(
            kl * jnp.minimum(1.0, step / (steps / 2)) - seen, metrics={"bits": bound, "kl": kl}
        )

    state = ts.setup(ts.rules.adam(2e-3), params, key=seed)
    # end of training
    return ts.batches(load()[0], 50, shuffle=True, seed=seed), state, loss_fn


def main(steps, seed, target=28.0):
    data, state, loss_fn = make(steps, seed)
    # training
    score, test = ts.eval_step(loss_fn), ts.batches(load()[1], 99)
    state, _ = ts.fit(
        ts.train_step(loss_fn),
        state,
        data,
        steps=steps,
        evaluate=lambda state: ts.evaluate(score, state, {"held_out": test}),
        evaluate_every="20 epochs",
    )
    found = ts.evaluate(score, state, test)
    # end of training
    print(f"KL: {found['kl']:.1f} nats\nbits of a held-out image: {found['bits']:.2f}")
    assert found["bits"] <= target, f"expected at most {target}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
