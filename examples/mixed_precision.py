"""One network on scikit-learn's digits in several precisions, and a loss scale far too high.

    python examples/mixed_precision.py      # options: --seeds, --epochs

Device: any. Two CPU cores take about 30 seconds. It ends in the largest distance of a mean test
accuracy from that of float32, and fails above 0.5 points. CPUs compute float16, and many of them
bfloat16, in float32, and pay for the conversion: the seconds are worth reading on a GPU or TPU
only.
"""

import argparse
import time

import jax.numpy as jnp
import numpy as np
from flax import nnx
from sklearn.datasets import load_digits

import tsunax as ts
from tsunax.precision import LossScale, Policy

BATCH = 64
RUNS = {  # precision, loss scale
    "float32": ("float32", None),
    "bfloat16": ("bfloat16", None),  # params and optimizer float32, the network bfloat16
    "float16": ("float16", None),  # as before, and a dynamic loss scale
    "float16, scale from 2^24": ("float16", LossScale(2.0**24)),  # overflows until it has come down
    "bfloat16 params, float32 copy": (Policy(param="bfloat16", compute="bfloat16"), None),
    "bfloat16 params, no copy": (
        Policy(param="bfloat16", compute="bfloat16", rounding="stochastic"),
        None,
    ),
}


class Net(nnx.Module):
    """Images (n, 8, 8, 1) -> logits (n, 10)."""

    def __init__(self, rngs):
        self.conv1, self.conv2 = (
            nnx.Conv(1, 16, (3, 3), rngs=rngs),
            nnx.Conv(16, 32, (3, 3), strides=2, rngs=rngs),
        )
        self.norm, self.head = nnx.LayerNorm(512, rngs=rngs), nnx.Linear(512, 10, rngs=rngs)

    def __call__(self, images):
        x = nnx.relu(self.conv2(nnx.relu(self.conv1(images))))
        return self.head(self.norm(x.reshape(len(images), -1)))


def load():
    """Training and test data, half each and always the same cut: images in [0, 1], labels."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = (digits.images[order, :, :, None] / 16).astype(np.float32)
    labels = digits.target[order].astype(np.int32)
    half = len(labels) // 2
    return (images[:half], labels[:half]), (images[half:], labels[half:])


def main(seeds, epochs, within):
    train, test = load()
    steps = len(train[1]) // BATCH  # per epoch
    graphdef = nnx.split(nnx.eval_shape(lambda: Net(nnx.Rngs(0))))[0]

    def loss_fn(params, batch):
        images, labels = batch
        logits = nnx.merge(graphdef, params)(images).astype(
            jnp.float32
        )  # optax computes in the dtype that it gets
        losses = ts.losses.softmax_cross_entropy_with_integer_labels(logits, labels)
        return ts.Loss.mean(losses, metrics={"accuracy": logits.argmax(-1) == labels})

    rule = ts.rules.adamw(
        ts.schedules.cosine_decay_schedule(3e-3, epochs * steps), weight_decay=1e-2
    )
    step, evaluate = ts.train_step(loss_fn), ts.eval_step(loss_fn)

    def run(seed, precision, loss_scale):
        """Test accuracy in points, the last state, and for each step whether it was applied."""
        params = nnx.state(Net(nnx.Rngs(seed)), nnx.Param)
        state = ts.setup(rule, params, key=seed, precision=precision, loss_scale=loss_scale)
        rng, infos = np.random.default_rng(seed), []
        for _ in range(epochs):
            for rows in np.split(rng.permutation(len(train[1]))[: steps * BATCH], steps):
                state, info = step(state, (train[0][rows], train[1][rows]))
                infos.append(info)
        accuracy = evaluate(state, test).metrics["accuracy"].compute()
        return 100 * float(accuracy), state, [bool(info.applied) for info in infos]

    print(
        f"{'':32}{'accuracy':>9}{'against float32':>17}{'loss scale':>12}{'rejected':>10}{'seconds':>9}"
    )
    means = {}
    for name, settings in RUNS.items():
        run(0, *settings)  # compiles
        began = time.perf_counter()
        accuracies, states, applied = zip(
            *(run(seed, *settings) for seed in range(seeds)), strict=True
        )
        seconds = (time.perf_counter() - began) / seeds
        means[name] = np.mean(accuracies)
        scale = states[0].loss_scale
        shown = "none" if scale is None else f"2^{int(np.log2(scale.scale))}"
        rejected = np.mean([state.rejected for state in states])
        distance = means[name] - means["float32"]
        print(
            f"{name:32}{means[name]:9.2f}{distance:+17.2f}{shown:>12}{rejected:10.1f}{seconds:9.2f}"
        )
        if name.endswith("2^24"):
            overflows = [flags.index(True) for flags in applied]  # in a row, from the first step on
            assert min(overflows) > 0, "expected an overflow at the first step"
            assert all(all(flags[-steps:]) for flags in applied), (
                "expected it to be over by the last epoch"
            )

    print(
        f"\nFrom 2^24 the first {overflows[0]} steps were rejected, each halved the scale, "
        "and training went on."
    )
    worst = max(abs(mean - means["float32"]) for mean in means.values())
    print(f"largest distance from float32: {worst:.2f} points")
    assert worst <= within, f"expected at most {within}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument(
        "--within", type=float, default=0.5, help="fail beyond this distance, in points"
    )
    main(**vars(parser.parse_args()))
