"""Three problems that several test files share, so that their programs are compiled once.

The dense one is a linear model of 64 rows. In the one of masked sequences, a loss function may name a mask, a key and
a model state, in rows that do not see each other. In the one of images, a convolution is followed by batch norm.
"""

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


def with_a_bad_row(x=X):
    return np.where(np.arange(len(x)).reshape(-1, *[1] * (x.ndim - 1)) == 21, np.nan, x).astype(np.float32)


def two_states():
    return ts.States(first=state(key=jax.random.key(1)), second=state(), carry=jnp.zeros(()))


def step_of_two(run, x):
    step = ts.train_step(noisy, donate=False).pure
    first, info = step(run.first, x, {})
    return run.advance(first=first, second=run.second, carry=run.carry + info.loss), info


# ---------------------------------------------------------------------------------------------------- masked sequences

ROWS = 52
_RNG = np.random.default_rng(1)
SEQUENCES = {
    "x": _RNG.normal(size=(ROWS, 5, 4)).astype(np.float32),
    "is_real": np.arange(5) < _RNG.integers(1, 6, (ROWS, 1)),
}


def sequence_params():
    hidden = np.random.default_rng(2).normal(size=(4, 6)) / 2
    return {"hidden": {"kernel": jnp.asarray(hidden, jnp.float32)}, "out": {"kernel": jnp.ones((6, 1))}}


def sequence_errors(params, batch, noise=0.0):
    """The mean error of each row, over positions that are no padding."""
    x = batch["x"] + jnp.asarray(noise, batch["x"].dtype)
    hidden = jnp.cumsum(jnp.tanh(x @ params["hidden"]["kernel"]), 1)
    errors = (hidden @ params["out"]["kernel"])[..., 0] - jnp.sin(batch["x"].sum(-1))
    return jnp.mean(errors**2 * batch["is_real"], 1)


def sequence_loss(params, batch):
    return ts.Loss.mean(sequence_errors(params, batch))


def named_sequence_loss(params, batch, mask, model_state, key, noise=0.1):
    """Everything that a loss function may name, and a metric; the noise is one for all rows."""
    errors = sequence_errors(params, batch, noise * jax.random.normal(key))
    seen = model_state["rows"] + (jnp.float32(len(errors)) if mask is None else mask.sum())
    return ts.Loss.mean(errors, mask, metrics={"worst": jnp.max(errors)}, model_state={"rows": seen})


def quiet_sequence_loss(params, batch, mask, model_state, key):
    return named_sequence_loss(params, batch, mask, model_state, key, 0.0)


# -------------------------------------------------------------------------------------------------------------- images

IMAGES = _RNG.normal(size=(ROWS, 6, 6, 2)).astype(np.float32)
STATISTICS = {"mean": jnp.zeros(3), "variance": jnp.ones(3)}


def image_params():
    kernel = np.random.default_rng(3).normal(size=(3, 3, 2, 3)) / 3
    return {"hidden": {"kernel": jnp.asarray(kernel, jnp.float32)}, "out": {"kernel": jnp.ones((3, 1))}}


def image_loss(params, x, model_state):
    shape = jax.lax.conv_dimension_numbers(x.shape, (3, 3, 2, 3), ("NHWC", "HWIO", "NHWC"))
    out = jax.lax.conv_general_dilated(x, params["hidden"]["kernel"], (1, 1), "SAME", dimension_numbers=shape)
    mean, variance = jnp.mean(out, (0, 1, 2)), jnp.var(out, (0, 1, 2))
    moved = {"mean": 0.9 * model_state["mean"] + 0.1 * mean, "variance": 0.9 * model_state["variance"] + 0.1 * variance}
    normed = (out - mean[None, None, None]) / jnp.sqrt(variance[None, None, None] + 1e-5)
    errors = jnp.mean(jnp.tanh(normed), (1, 2)) @ params["out"]["kernel"] - jnp.mean(x, (1, 2))[:, :1]
    moved = jax.tree.map(lambda x: x.astype(jnp.float32), moved)
    return ts.Loss.mean(jnp.mean(errors**2, 1), model_state=moved)
