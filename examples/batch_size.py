"""The largest batch that fits into a given memory, and a learning rate for it, before the run.

    python examples/batch_size.py           # options: --memory, --epochs, --target, --seed

Device: any. Two CPU cores take about 15 seconds. It ends in `test accuracy: 0.98` and fails below
0.95.

A wide network on scikit-learn's handwritten digits. The step is compiled at a few sizes and never
executed, a hundred steps on a copy find the learning rate, and `fit` takes both.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

import tsunax as ts
from tsunax import find_batch_size, find_learning_rate

WIDTH = 1024


def load():
    """Training and test data, always the same cut: pixels in [0, 1], labels."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    x, y = (digits.data[order] / 16).astype(np.float32), digits.target[order].astype(np.int32)
    return (x[360:], y[360:]), (x[:360], y[:360])


def init(seed):
    sizes = (64, WIDTH, WIDTH, 10)
    keys = jax.random.split(jax.random.key(seed), len(sizes) - 1)
    layer = lambda key, n, m: {
        "w": jax.random.normal(key, (n, m)) * (2 / n) ** 0.5,
        "b": jnp.zeros(m),
    }
    return [layer(*given) for given in zip(keys, sizes, sizes[1:], strict=False)]


def loss_fn(params, batch):
    x, labels = batch
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    logits = x @ params[-1]["w"] + params[-1]["b"]
    losses = ts.losses.softmax_cross_entropy_with_integer_labels(logits, labels)
    return ts.Loss.mean(losses, metrics={"accuracy": logits.argmax(-1) == labels})


def main(memory, epochs, target, seed):
    began = time.perf_counter()
    train, test = load()
    state, step = ts.setup(ts.rules.adam(1e-3), init(seed)), ts.train_step(loss_fn)

    one = jax.tree.map(
        lambda x: x[:1], train
    )  # shapes would do; more than 256 rows would leave too few steps
    size, report = find_batch_size(
        step, state, one, memory=memory << 20, multiple_of=8, max_size=256
    )
    print(report, end="\n\n")

    data = ts.batches(train, size, shuffle=True, seed=seed, drop_remainder=True)
    rate, report = find_learning_rate(step, state, data, low=1e-6, high=1.0)
    print(report, end="\n\n")

    state, _ = ts.fit(step, ts.adjust(state, learning_rate=min(rate, 1e-2)), data, epochs=epochs)
    result = ts.evaluate(ts.eval_step(loss_fn), state, ts.batches(test, 120))["accuracy"]
    print(f"\nbatches of {size} rows, {state.step} steps, {time.perf_counter() - began:.0f} s")
    print(f"test accuracy: {result:.4f}")
    assert result >= target, f"expected at least {target}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    what = "MiB for state, batch and step on one device"
    parser.add_argument("--memory", type=int, default=128, help=what)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--target", type=float, default=0.95, help="fail below this test accuracy")
    parser.add_argument("--seed", type=int, default=0, help="of the params and the shuffling")
    main(**vars(parser.parse_args()))
