"""Learning rate, decay and width of one model: 48 trials, as populations if only numbers vary.

Real data (scikit-learn's digits), a small network, AdamW. With `--directory sweep` (needs
optuna) it goes on where it was ended: press Ctrl-C and start it again. `--backend optuna` searches
(needs optuna).
"""

import argparse
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import tsunax as ts

parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
parser.add_argument("--trials", type=int, default=48)
parser.add_argument("--backend", choices=["random", "optuna"], default="random")
parser.add_argument("--directory", help="where to keep the sweep")
options = parser.parse_args()

images, labels = load_digits(return_X_y=True)
images = (images / 16).astype(np.float32)
order = np.random.default_rng(0).permutation(len(labels))
train, held_out = order[:1300], order[1300:]
rest = ts.batches((images[held_out], labels[held_out]), 500)


def make(key, learning_rate, decay, width):
    w, v = jax.random.split(jax.random.key(0))  # the same start for all trials
    params = [
        {"w": jax.random.normal(w, (64, width)) * (2 / 64) ** 0.5, "b": jnp.zeros(width)},
        {"w": jax.random.normal(v, (width, 10)) * (2 / width) ** 0.5, "b": jnp.zeros(10)},
    ]
    return ts.setup(ts.rules.adamw(learning_rate, weight_decay=decay), params)


def loss_fn(params, batch):
    x, y = batch
    logits = jax.nn.relu(x @ params[0]["w"] + params[0]["b"]) @ params[1]["w"] + params[1]["b"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
    return ts.Loss.mean(losses, metrics={"accuracy": (logits.argmax(-1) == y).astype(jnp.float32)})


def data():
    return ts.batches((images[train], labels[train]), 64, shuffle=True, seed=1)


step, score = ts.train_step(loss_fn), ts.eval_step(loss_fn)


def single(learning_rate, decay, width, report):
    state, mine = make(None, learning_rate, decay, width), data()
    for epoch in range(1, 9):
        state, _ = ts.fit(step, state, mine, steps=21 * epoch, progress=False)
        found = ts.evaluate(score, state, rest)
        report(epoch, found["loss"])
    return found


def together(learning_rate, decay, width):
    """As `single`, of arrays of learning rates and decays: all of them in one program."""
    n = len(learning_rate)
    runs = ts.population(
        functools.partial(make, width=width), n, learning_rate=learning_rate, decay=decay
    )
    runs, _ = ts.fit(step, runs, data(), steps=21 * 8, progress=False)
    found = ts.evaluate(score, runs, rest)
    return {
        name: np.array([found[f"{name}/{i}"] for i in range(n)]) for name in ("loss", "accuracy")
    }


space = {
    "learning_rate": ts.tuning.spaces.log_uniform(1e-4, 1e-1),
    "decay": ts.tuning.spaces.log_uniform(1e-4, 1.0),
    "width": ts.tuning.spaces.choice([16, 64]),
}
start = time.perf_counter()
common = dict(trials=options.trials, metric="loss", directory=options.directory)
if options.backend == "optuna":
    import optuna

    pruner = optuna.pruners.MedianPruner()
    result = ts.tune(single, space, backend="optuna", pruner=pruner, **common)
else:
    result = ts.tune(together, space, vectorized=["learning_rate", "decay"], **common)

print(result)
print(f"{time.perf_counter() - start:.1f} s with compilation")
best = result.best
print(f"best: {best.values}, held-out accuracy: {best.metrics['accuracy']:.3f}")
assert best.metrics["accuracy"] > 0.96
