"""A vision transformer of handwritten digits.

    python examples/ports/vit.py            # half a minute on two CPU cores; options: --epochs, --seed

It ends in `test accuracy: 0.96` and fails below 0.94.

Follows equinox's docs/examples/vision_transformer.ipynb (patrick-kidger/equinox at 9336d82): its
training is 62 lines of code at 88 columns, cells 11, 12 (from the optimizer on) and 14.
"""

import argparse

import jax.numpy as jnp
import numpy as np
from flax import nnx
from sklearn.datasets import load_digits

import tsunax as ts


class Block(nnx.Module):
    def __init__(self, width, rngs):
        self.norms = nnx.List([nnx.LayerNorm(width, rngs=rngs) for _ in range(2)])
        self.attend = nnx.MultiHeadAttention(4, width, decode=False, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        x = x + self.dropout(self.attend(self.norms[0](x)))
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norms[1](x)))))


class ViT(nnx.Module):
    """Images (n, 8, 8) as 16 patches and a token of the class -> logits (n, 10)."""

    def __init__(self, width, depth, rngs):
        self.patches = nnx.Linear(4, width, rngs=rngs)
        normal = nnx.initializers.normal(0.02)
        self.token = nnx.Param(normal(rngs.params(), (1, 1, width)))
        self.places = nnx.Param(normal(rngs.params(), (1, 17, width)))
        self.blocks = nnx.List([Block(width, rngs) for _ in range(depth)])
        self.norm, self.head = nnx.LayerNorm(width, rngs=rngs), nnx.Linear(width, 10, rngs=rngs)

    def __call__(self, x):
        x = x.reshape(len(x), 4, 2, 4, 2).transpose(0, 1, 3, 2, 4).reshape(-1, 16, 4)
        token = jnp.broadcast_to(self.token[...], (len(x), 1, self.token.shape[-1]))
        x = jnp.concatenate([token, self.patches(x)], 1) + self.places[...]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))


def load():
    """Training and test data: images, labels."""
    digits, order = load_digits(), np.random.default_rng(0).permutation(1797)
    x, y = (digits.images[order] / 8 - 1).astype(np.float32), digits.target[order].astype(np.int32)
    return (x[297:], y[297:]), (x[:297], y[:297])


def make(epochs, seed=0):
    """Data, state and loss function, for `main` and for the tests."""
    data = ts.batches(load()[0], 60, shuffle=True, seed=seed)
    steps = epochs * len(data)
    model = ts.models.nnx(ViT(48, 3, nnx.Rngs(seed)))

    # training
    def loss_fn(params, batch, model_state, train, key=None):
        x, y = batch
        logits, model_state = model.apply(params, x, model_state=model_state, key=key, train=train)
        losses = ts.losses.softmax_cross_entropy_with_integer_labels(logits, y)
        right = logits.argmax(-1) == y
        return ts.Loss.mean(losses, metrics={"accuracy": right}, model_state=model_state)

    rule = ts.rules.adamw(ts.schedules.warmup_cosine_decay_schedule(0.0, 2e-3, steps // 10, steps))
    state = ts.setup(rule, model.params, model_state=model.model_state, key=seed)
    # end of training
    return data, state, loss_fn


def main(epochs, seed, target=0.94):
    data, state, loss_fn = make(epochs, seed)
    # training
    state, _ = ts.fit(ts.train_step(loss_fn), state, data, epochs=epochs)
    found = ts.evaluate(ts.eval_step(loss_fn), state, ts.batches(load()[1], 99))
    # end of training
    print(f"test accuracy: {found['accuracy']:.4f}")
    assert found["accuracy"] >= target, f"expected at least {target}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
