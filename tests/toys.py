"""A small problem that several test files share, so that its programs are compiled once: a linear model of 64 rows."""

import jax
import jax.numpy as jnp
import numpy as np
import tsunax as ts

X = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)


def loss_fn(params, x):
    return jnp.mean((x @ params["w"] - jnp.sin(x.sum(1))) ** 2)


def noisy(params, x, key):
    return loss_fn(params, x + jax.random.normal(key, x.shape))


def drawn(params, key):
    """A loss that draws its own batch."""
    return loss_fn(params, jax.random.normal(key, (512, 8)))


def state(**options):
    return ts.setup(ts.rules.sgd(0.1), {"w": jnp.ones(8)}, **options)
