"""A network knows five digits. Low-rank adapters beside its frozen weights learn the other five.

    python examples/ports/lora.py           # ten seconds on two CPU cores; options: --steps, --seed

It ends in `accuracy on the new digits: 0.99` and fails below 0.95. The base has no gradient, no moments
and the same bits at the end; the adapters are 5 % of the numbers.

Follows davisyoshida/lorax at 1ebd0ef, examples/simple.py: its training is 20 lines of code at 119
columns, lines 17, 28-32, 39-53 and 56-68.
"""

import argparse
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

import tsunax as ts


def load(classes):
    """Training and held-out rows of these digits."""
    digits, order = load_digits(), np.random.default_rng(0).permutation(1797)
    x, y = (digits.data[order] / 16).astype(np.float32), digits.target[order].astype(np.int32)
    chosen = np.isin(y, classes)
    rows = [chosen & (np.arange(1797) >= 400), chosen & (np.arange(1797) < 400)]
    return [(x[part], y[part]) for part in rows]


def apply(params, x):
    for i, layer in enumerate(params):
        kernel = layer["kernel"]
        if "lora" in layer:
            kernel = kernel + layer["lora"]["a"] @ layer["lora"]["b"]
        x = x @ kernel + layer["bias"]
        x = jax.nn.relu(x) if i < len(params) - 1 else x
    return x


def trained(seed, sizes=(64, 256, 256, 10)):
    """A network trained on the digits 0 to 4, with an adapter of rank 4 beside each kernel."""
    keys = jax.random.split(jax.random.key(seed), (2, len(sizes) - 1))
    base = [
        {"kernel": jax.random.normal(key, (n, m)) * (2 / n) ** 0.5, "bias": jnp.zeros(m)}
        for key, (n, m) in zip(keys[0], itertools.pairwise(sizes), strict=True)
    ]
    data = ts.batches(load(range(5))[0], 64, shuffle=True, seed=seed)
    state = ts.setup(ts.rules.adam(1e-3), base)
    state, _ = ts.fit(ts.train_step(loss_fn), state, data, steps=120, progress=False)
    adapter = lambda key, kernel: {
        "a": jax.random.normal(key, (len(kernel), 4)) / len(kernel) ** 0.5,
        "b": jnp.zeros((4, kernel.shape[1])),
    }
    pairs = zip(keys[1], state.params, strict=True)
    return [layer | {"lora": adapter(key, layer["kernel"])} for key, layer in pairs]


def loss_fn(params, batch):
    x, y = batch
    logits = apply(params, x)
    losses = ts.losses.softmax_cross_entropy_with_integer_labels(logits, y)
    return ts.Loss.mean(losses, metrics={"accuracy": logits.argmax(-1) == y})


def make(params, steps, seed=0):
    """Data, state and loss function, for `main` and for the tests."""
    # training
    rule = ts.rules.adam(ts.schedules.cosine_decay_schedule(1e-2, steps))
    state = ts.setup(rule, params, trainable="**/lora/*")
    # end of training
    return ts.batches(load(range(5, 10))[0], 64, shuffle=True, seed=seed), state, loss_fn


def main(steps, seed, target=0.95):
    params = trained(seed)
    data, state, _ = make(jax.tree.map(jnp.copy, params), steps, seed)
    # training
    state, _ = ts.fit(ts.train_step(loss_fn), state, data, steps=steps)
    found = ts.evaluate(ts.eval_step(loss_fn), state, [load(range(5, 10))[1]])
    # end of training
    for before, after in zip(params, state.params, strict=True):
        assert jnp.array_equal(before["kernel"], after["kernel"])
    print(f"accuracy on the new digits: {found['accuracy']:.4f}")
    assert found["accuracy"] >= target, f"expected at least {target}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
