"""A small convolutional network on scikit-learn's handwritten digits, changed while it runs.

    python examples/digits.py        # options: --seed, --epochs (5 or more), --target

Device: any. Two CPU cores take about 20 seconds. It ends in `test accuracy: 0.99` and fails below
0.98.

The features start frozen and the head learns on them as they are. Then they thaw, first at a lower
rate than the head's, then on the same schedule, and the last epochs run at a rate set by hand. Each
of these changes is a callback that edits the state; the step compiles once. `digits_by_hand.py` is
the same run with a loop of its own.
"""

import argparse
import functools
import time

import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import tsunax as ts

BATCH = 64


class Net(nnx.Module):
    """Images (n, 8, 8, 1) -> logits (n, 10). Dropout only where a key is given."""

    def __init__(self, rngs):
        block = lambda i, o: (
            nnx.Conv(i, o, (3, 3), rngs=rngs),
            nnx.GroupNorm(o, 8, rngs=rngs),
            nnx.relu,
        )
        pool = functools.partial(nnx.max_pool, window_shape=(2, 2), strides=(2, 2))
        self.features = nnx.Sequential(*block(1, 16), *block(16, 32), pool, *block(32, 64), pool)
        self.dropout = nnx.Dropout(0.4)
        self.head = nnx.Linear(2 * 2 * 64, 10, rngs=rngs)

    def __call__(self, images, key=None):
        x = self.features(images).reshape(len(images), -1)
        return self.head(self.dropout(x, deterministic=key is None, rngs=key))


def load():
    """Training, validation and test data, always the same cut: images in [0, 1], labels."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = (digits.images[order, :, :, None] / 16).astype(np.float32)
    labels = digits.target[order].astype(np.int32)
    return [
        (images[rows], labels[rows]) for rows in (slice(480, None), slice(360, 480), slice(360))
    ]


def main(seed, epochs, target):
    began = time.perf_counter()
    train, validation, test = load()
    steps = len(train[1]) // BATCH  # per epoch
    graphdef, params = nnx.split(Net(nnx.Rngs(seed)), nnx.Param)

    def loss_fn(params, batch, key=None):  # a step gives a key, an evaluation does not
        images, labels = batch
        logits = nnx.merge(graphdef, params)(images, key)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return ts.Loss.mean(losses, metrics={"accuracy": logits.argmax(-1) == labels})

    rule = ts.rules.chain(
        ts.rules.clip_by_global_norm(1.0),
        ts.rules.add_decayed_weights(1e-4, where=["**", "!**/bias", "!**/scale"]),
        ts.rules.adam(
            optax.warmup_cosine_decay_schedule(0.0, 3e-3, steps, epochs * steps, end_value=3e-4)
        ),
    )
    state = ts.setup(rule, params, key=seed)
    state = ts.freeze(state, "features/**")
    print(state, end="\n\n")
    state = ts.adjust(
        state, "features/**", learning_rate=None
    )  # a rate of their own, as yet the schedule's
    thaw, join, last = (part * steps for part in (epochs // 5, 2 * epochs // 5, 4 * epochs // 5))
    eval_step = ts.eval_step(loss_fn)

    state, history = ts.fit(
        ts.train_step(loss_fn),
        state,
        ts.batches(train, BATCH, shuffle=True, seed=seed, drop_remainder=True),
        epochs=epochs,
        evaluate=lambda state: ts.evaluate(eval_step, state, {"val": ts.batches(validation, 120)}),
        callbacks=[
            ts.callbacks.thaw_at(thaw, "features/**"),
            ts.callbacks.adjust_at(
                thaw, "features/**", learning_rate=1e-3
            ),  # held, whatever the schedule says
            ts.callbacks.adjust_at(join, learning_rate=None),  # one schedule for all
            ts.callbacks.adjust_at(last, learning_rate=1e-4),  # by hand
        ],
        log_every=steps,
    )
    print(
        table(
            history,
            {
                "head alone": thaw,
                "features follow": join,
                "one schedule": last,
                "by hand": epochs * steps,
            },
        )
    )
    result = ts.evaluate(eval_step, state, ts.batches(test, 120))["accuracy"]
    print(f"\n{state.step} steps, {time.perf_counter() - began:.0f} s\ntest accuracy: {result:.4f}")
    assert result >= target, f"expected at least {target}"


def table(history, phases):
    """The numbers at the end of each phase."""
    names = ["loss", "val/accuracy", "learning_rate", "learning_rate@features/**"]
    lines = [
        f"{'step':>5}{'loss':>9}{'validation':>12}{'head rate':>12}{'feature rate':>14}   phase"
    ]
    for phase, step in phases.items():
        loss, accuracy, head, features = (
            history[name][history["step"] == step].item() for name in names
        )
        shown = "frozen" if phase == "head alone" else f"{features:.1e}"
        lines.append(f"{step:5}{loss:9.4f}{accuracy:12.4f}{head:12.1e}{shown:>14}   {phase}")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--seed", type=int, default=0, help="of the params, the dropout and the shuffling"
    )
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--target", type=float, default=0.98, help="fail below this test accuracy")
    main(**vars(parser.parse_args()))
