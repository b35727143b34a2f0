"""Digits on eight devices: data parallel, fully sharded, and both, each equal to one device.

It simulates eight devices on the CPU. Real data (scikit-learn's digits), a small network, Adam, an
average of the parameters, two micro-batches a step.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import tsunax as ts

argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
STEPS, BATCH = 100, 128
ts.devices.simulate(8)

images, labels = load_digits(return_X_y=True)
images = (images / 16).astype(np.float32)
rng = np.random.default_rng(0)
order = rng.permutation(len(labels))
train, test = order[:1500], order[1500:]


def init():
    keys = jax.random.split(jax.random.key(0), 3)
    sizes = [(64, 256), (256, 256), (256, 10)]
    return [
        {"kernel": jax.random.normal(k, s) * (2 / s[0]) ** 0.5, "bias": jnp.zeros(s[1])}
        for k, s in zip(keys, sizes, strict=True)
    ]


def loss_fn(params, batch, mask):
    x, y = batch
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["kernel"] + layer["bias"])
    logits = x @ params[-1]["kernel"] + params[-1]["bias"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
    return ts.Loss.mean(
        losses, where=mask, metrics={"accuracy": (logits.argmax(-1) == y).astype(jnp.float32)}
    )


def setup():
    return ts.setup(
        ts.rules.adam(ts.schedules.cosine_decay_schedule(2e-3, STEPS)), init(), ema=0.95
    )


def run(state):
    data = ts.batches((images[train], labels[train]), BATCH, shuffle=True, seed=1)
    step = ts.train_step(loss_fn, accumulate=2)
    return ts.fit(step, state, data, steps=STEPS, log_every=10, progress=False)


_, expected = run(setup())
layouts = {
    "data parallel": ts.mesh(),
    "fully sharded": ts.mesh(data=1, fsdp=-1),
    "four copies of two halves": ts.mesh(data=4, fsdp=2),
}
worst = 0.0
for name, mesh in layouts.items():
    state, history = run(ts.shard(setup, mesh))
    off = float(np.max(np.abs(history["loss"] / expected["loss"] - 1)))
    worst = max(worst, off)
    held = max(
        ts.devices.describe_sharding((state.params, state.opt_state, state.average)).bytes.values()
    )
    print(
        f"{name:<26} loss {history['loss'][-1]:.4f}   off by {off:.1e}   {held / 1024:7.1f} "
        "KiB on a device"
    )

found = ts.evaluate(
    ts.eval_step(loss_fn), ts.averaged(state), ts.batches((images[test], labels[test]), 100)
)
print(f"test accuracy of the last one: {found['accuracy']:.3f}")
print(f"largest distance from one device: {worst:.1e}")
assert worst < 1e-4 and found["accuracy"] > 0.95
