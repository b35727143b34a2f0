"""32 learning rates of one model at once: a population, halved three times, and what is left of it.

Real data (scikit-learn's digits), a small network, Adam. `--plot curves.png` draws all curves
(needs matplotlib).
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import tsunax as ts

parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
parser.add_argument("--members", type=int, default=32)
parser.add_argument("--plot", help="a PNG to write")
options = parser.parse_args()

images, labels = load_digits(return_X_y=True)
images = (images / 16).astype(np.float32)
order = np.random.default_rng(0).permutation(len(labels))
train, held_out = order[:1300], order[1300:]


def make(key, learning_rate):
    keys, sizes = jax.random.split(key, 2), [(64, 64), (64, 10)]
    params = [
        {"w": jax.random.normal(k, size) * (2 / size[0]) ** 0.5, "b": jnp.zeros(size[1])}
        for k, size in zip(keys, sizes, strict=True)
    ]
    return ts.setup(ts.rules.adam(learning_rate), params, key=key)


def loss_fn(params, batch):
    x, y = batch
    logits = jax.nn.relu(x @ params[0]["w"] + params[0]["b"]) @ params[1]["w"] + params[1]["b"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
    return ts.Loss.mean(losses, metrics={"accuracy": (logits.argmax(-1) == y).astype(jnp.float32)})


step, score = ts.train_step(loss_fn), ts.eval_step(loss_fn)
data = ts.batches((images[train], labels[train]), 64, shuffle=True, seed=1)
rates = np.logspace(-4.5, -0.5, options.members)
runs = ts.population(make, options.members, key=0, learning_rate=rates)

start, calls, first = time.perf_counter(), 0, None
while True:
    calls += 150
    runs, history = ts.fit(step, runs, data, steps=calls, log_every=10, progress=False)
    first = first or history
    found = ts.evaluate(score, runs, ts.batches((images[held_out], labels[held_out]), 500))
    members = len(runs.calls)
    losses = np.array([found[f"loss/{i}"] for i in range(members)])
    here = np.asarray(ts.hyperparams(runs)["learning_rate"])
    best = int(np.argmin(losses))
    print(
        f"call {calls:4d}   {members:2d} members, learning rates {here.min():.1e} to {here.max():.1e}   "
        f"best {here[best]:.1e}: loss {losses[best]:.3f}, accuracy {found[f'accuracy/{best}']:.3f}"
    )
    if members <= options.members // 8:
        break
    runs = ts.populations.select(runs, np.sort(np.argsort(losses)[: members // 2]))

if options.plot:
    figure = first.plot()
    figure.savefig(options.plot, dpi=100)
print(f"{time.perf_counter() - start:.1f} s with compilation")
print(f"best learning rate: {here[best]:.1e}, held-out accuracy: {found[f'accuracy/{best}']:.3f}")
assert found[f"accuracy/{best}"] > 0.96
