"""A run that is killed with `kill -9` again and again, and ends with the bits of one left alone.

    python examples/resume.py        # options: --steps, --kills, --seed

Device: any. Two CPU cores take about 40 seconds. It ends in `the same bits after 3 kills` and fails
if they differ.

The run is `train`, an ordinary script: dropout, a schedule, an average, shuffled data, a checkpoint
every 250 steps. The rest of this file starts it in processes of its own, kills them at any moment,
and compares what the last one ends with to a run in one go: parameters, optimizer, average, and the
history of the loss.
"""

import argparse
import hashlib
import random
import subprocess
import sys
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import tsunax as ts


def load():
    """Training and test data, always the same cut: images in [0, 1], labels."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images, labels = (
        (digits.data[order] / 16).astype(np.float32),
        digits.target[order].astype(np.int32),
    )
    return (images[360:], labels[360:]), (images[:360], labels[:360])


def loss_fn(params, batch, key=None):  # a step gives a key, an evaluation does not
    images, labels = batch
    hidden = jax.nn.relu(images @ params["in"]["w"] + params["in"]["b"])
    if key is not None:
        hidden = hidden * jax.random.bernoulli(key, 0.8, hidden.shape) / 0.8
    logits = hidden @ params["out"]["w"] + params["out"]["b"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return ts.Loss.mean(losses, metrics={"accuracy": logits.argmax(-1) == labels})


def layer(key, n_in, n_out):
    return {"w": jax.random.normal(key, (n_in, n_out)) * n_in**-0.5, "b": jnp.zeros(n_out)}


def train(folder, steps, seed):
    """The script: whatever is in `folder` already, it goes on to the last step."""
    training, test = load()
    keys = jax.random.split(jax.random.key(seed))
    rule = ts.rules.chain(
        ts.rules.clip_by_global_norm(1.0), ts.rules.adamw(optax.cosine_decay_schedule(3e-3, steps))
    )
    params = {"in": layer(keys[0], 64, 128), "out": layer(keys[1], 128, 10)}
    state = ts.setup(rule, params, key=seed, ema=0.99)
    data = ts.batches(training, 64, shuffle=True, seed=seed)
    say = lambda run: print(f"step {run.step}", flush=True)
    with ts.Checkpoints(folder, every=250) as checkpoints:
        state, history = ts.fit(
            ts.train_step(loss_fn),
            state,
            data,
            steps=steps,
            checkpoint=checkpoints,
            callbacks=ts.callbacks.every(100, say),
            progress=False,
        )
    accuracy = ts.evaluate(ts.eval_step(loss_fn), ts.averaged(state), ts.batches(test, 120))[
        "accuracy"
    ]
    bits = hashlib.sha256(history["loss"].tobytes())
    for leaf in jax.tree.leaves((state.params, state.opt_state, state.average, state.step)):
        bits.update(np.asarray(leaf).tobytes())
    print(f"end {accuracy:.4f} {bits.hexdigest()[:16]}", flush=True)


def run(folder, steps, seed, kill_at=None, delay=0.0):
    """`train` in a process of its own: its last line.

    None if it was killed, a little after it said `kill_at`.
    """
    command = [
        sys.executable,
        __file__,
        "--folder",
        folder,
        "--steps",
        str(steps),
        "--seed",
        str(seed),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if line.startswith("end"):
                return line.strip()
            if kill_at is not None and int(line.split()[1]) >= kill_at:
                time.sleep(delay)
                process.kill()
                return None
    raise RuntimeError(f"the run ended with {process.returncode} and said nothing")


def main(steps, kills, seed):
    began, rng = time.perf_counter(), random.Random(seed)
    with tempfile.TemporaryDirectory() as whole, tempfile.TemporaryDirectory() as folder:
        expected = run(whole, steps, seed)
        print(f"in one go: {expected}")
        for n in range(kills):
            at = steps * (n + 1) // (kills + 2)
            ended = run(folder, steps, seed, at, rng.uniform(0.0, 0.1))
            assert ended is None, "the run was faster than the kill: give more --steps"
            print(
                f"killed after step {at}, {ts.Checkpoints(folder, read_only=True).steps()} "
                "are there"
            )
        found = run(folder, steps, seed)
    print(f"in {kills + 1} pieces: {found}")
    assert found == expected, "a run that was killed ended with other bits"
    assert float(found.split()[1]) >= 0.95, "expected a test accuracy of 0.95"
    print(f"\n{time.perf_counter() - began:.0f} s\nthe same bits after {kills} kills")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of the params, the dropout, the shuffling and the kills",
    )
    parser.add_argument("--folder", help="only train, with the checkpoints here")
    options = vars(parser.parse_args())
    folder = options.pop("folder")
    train(folder, options["steps"], options["seed"]) if folder else main(**options)
