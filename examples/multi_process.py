"""Digits over several processes, with the numbers of one.

    mpirun -np 2 python examples/multi_process.py       # as root: --allow-run-as-root; few cores: --oversubscribe
    python examples/multi_process.py                    # one process, which compares itself with itself, and says so

Real data (scikit-learn's digits), whose rows divide neither by the processes nor by the batches.
Each process reads its part of each batch; the state is one, over all devices. Every process then
trains once more by itself, and compares.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import tsunax as ts

argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
ts.distributed.start()  # before anything asks JAX for a device

EPOCHS, BATCH, SEED = 10, 128, 0
images, labels = load_digits(return_X_y=True)
images = (images / 16).astype(np.float32)
order = np.random.default_rng(SEED).permutation(len(labels))
train, test = order[:1501], order[1501:]


def init():
    keys = jax.random.split(jax.random.key(SEED), 2)
    sizes = [(64, 128), (128, 10)]
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
    return ts.Loss.mean(losses, where=mask, metrics={"accuracy": logits.argmax(-1) == y})


def run(mesh, process):
    state = ts.shard(lambda: ts.setup(ts.rules.adam(2e-3), init()), mesh)
    data = ts.batches(
        (images[train], labels[train]), BATCH, shuffle=True, seed=SEED, process=process
    )
    state, history = ts.fit(
        ts.train_step(loss_fn), state, data, epochs=EPOCHS, log_every=5, progress=False
    )
    held_out = ts.batches((images[test], labels[test]), BATCH, process=process)
    return state, history["loss"], ts.evaluate(ts.eval_step(loss_fn), state, held_out)


state, losses, found = run(ts.mesh(), None)  # the default: as many processes as there are
ts.distributed.check_in_sync(seed=SEED, rows=len(train), losses=losses.tolist(), state=state)

_, alone, expected = run(ts.mesh(devices=jax.local_devices()[:1]), (0, 1))
worst = float(np.max(np.abs(losses / alone - 1)))
assert (
    worst < 1e-4
    and abs(found["accuracy"] - expected["accuracy"]) < 1e-6
    and found["accuracy"] > 0.9
)

if ts.distributed.is_main():
    print(
        f"{ts.distributed.process_count()} processes, {jax.device_count()} devices, loss "
        f"{losses[-1]:.4f}"
    )
    print(f"test accuracy: {found['accuracy']:.3f}")
    print(f"largest distance from one process: {worst:.1e}")
    if ts.distributed.process_count() == 1:
        print(
            "That was one process, compared with itself: start several with mpirun -np 2 python ..."
        )
