"""A byte-level GPT on the source files of Python's own standard library.

    python examples/gpt.py                  # two CPU cores: four to five minutes
    python examples/gpt.py --size large     # one GPU. Other options: --steps, --target, --precision, --seed

It ends in 200 bytes of its own and in `bits per held-out byte: 1.94`, on files that it never saw,
and fails above 2.05.

Every step is cut into two micro-batches (`accumulate=2`: same gradients, the memory of one),
clipped, and averaged into an EMA, which is what is evaluated and sampled from. Norms and biases are
spared by the decay.

Follows nanoGPT (karpathy/nanoGPT at 3adf61e, train.py) with a loop by hand: its training is 94
lines of code at 100 columns, lines 195-202, 204-208, 214-228, 230-242, 249-288 and 290-333.
"""

import argparse
import functools
import math
import sysconfig
import time
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import tsunax as ts

SIZES = {
    "small": {"width": 192, "depth": 4, "context": 128, "batch": 16, "steps": 700, "rate": 3e-3},
    "large": {"width": 768, "depth": 12, "context": 512, "batch": 64, "steps": 2000, "rate": 1e-3},
}
HEAD = 64  # features of one attention head; divides the width


def rotated(x):
    """Queries or keys (n, t, heads, HEAD), turned by angles that grow with t: products know the
    distance (RoPE).
    """
    angles = np.arange(x.shape[1])[:, None] * 1000.0 ** -np.linspace(0, 1, HEAD // 2)
    cos, sin = (jnp.asarray(f(angles)[None, :, None], x.dtype) for f in (np.cos, np.sin))
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


class Block(nnx.Module):
    def __init__(self, width, depth, rngs):
        linear = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
        small = nnx.initializers.normal(
            0.02 / (2 * depth) ** 0.5
        )  # what adds to the residual stream starts small
        self.norm1, self.norm2 = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
        self.qkv, self.out = linear(width, 3 * width), linear(width, width, kernel_init=small)
        self.up, self.down = linear(width, 4 * width), linear(4 * width, width, kernel_init=small)

    def __call__(self, x):
        n, t, width = x.shape
        q, k, v = jnp.split(self.qkv(self.norm1(x)).reshape(n, t, -1, HEAD), 3, 2)
        attended = jax.nn.dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        x = x + self.out(attended.reshape(n, t, width))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class GPT(nnx.Module):
    """Bytes (n, t) -> logits (n, t, 256) of the byte that follows each."""

    def __init__(self, width, depth, rngs):
        # A byte and the three before it, each with a table of its own: spelling is not left to
        # attention.
        self.embed = nnx.Embed(
            4 * 256, width, embedding_init=nnx.initializers.normal(0.5), rngs=rngs
        )
        self.blocks = nnx.Sequential(*(Block(width, depth, rngs) for _ in range(depth)))
        self.norm, self.head = nnx.LayerNorm(width, rngs=rngs), nnx.Linear(width, 256, rngs=rngs)

    def __call__(self, rows):
        before = [jnp.pad(rows, ((0, 0), (i, 0)))[:, : rows.shape[1]] + 256 * i for i in range(4)]
        return self.head(self.norm(self.blocks(self.embed(jnp.stack(before, -1)).sum(2))))


def load():
    """Training and held-out bytes: the library's modules, about one file in 16 held out, the same
    on every Python.
    """
    files = sorted(
        Path(sysconfig.get_paths()["stdlib"]).glob("*.py")
    )  # no packages, and so no tests
    held_out = lambda file: zlib.crc32(file.name.encode()) % 16 == 0
    parts = (
        [file for file in files if not held_out(file)],
        [file for file in files if held_out(file)],
    )
    return [np.frombuffer(b"".join(file.read_bytes() for file in part), np.uint8) for part in parts]


def main(size, steps, target, precision, seed):
    began = time.perf_counter()
    width, depth, context, batch = (
        SIZES[size][name] for name in ("width", "depth", "context", "batch")
    )
    steps = steps or SIZES[size]["steps"]
    train, test = load()
    graphdef, params = nnx.split(GPT(width, depth, nnx.Rngs(seed)), nnx.Param)

    # training
    def logits_of(params, rows):
        return nnx.merge(graphdef, params)(rows.astype(jnp.int32)).astype(jnp.float32)

    def loss_fn(params, rows):
        losses = ts.losses.softmax_cross_entropy_with_integer_labels(
            logits_of(params, rows[:, :-1]), rows[:, 1:]
        )
        return ts.Loss.mean(losses / math.log(2))  # bits

    rule = ts.rules.chain(
        ts.rules.clip_by_global_norm(1.0),
        ts.rules.adamw(
            ts.schedules.warmup_cosine_decay_schedule(0.0, SIZES[size]["rate"], steps // 10, steps),
            b2=0.98,
            weight_decay=0.1,
            mask=["**", "!**/bias", "!**/scale"],
        ),
    )
    state = ts.setup(rule, params, ema=ts.averages.ema(0.98, warmup=True), precision=precision)
    step, evaluate = ts.train_step(loss_fn, accumulate=2), ts.eval_step(loss_fn)
    print(state, f"{len(train)} bytes to train on, {len(test)} held out", sep="\n", end="\n\n")

    rng, bits = np.random.default_rng(seed), []
    for i in range(1, steps + 1):
        starts = rng.integers(0, len(train) - context, (batch, 1))
        state, info = step(state, train[starts + np.arange(context + 1)])
        bits.append(info.loss)
        if i % -(-steps // 10) == 0 or i == steps:
            about = f"norm {info.grad_norm:.2f}   rate {info.hyperparams['learning_rate']:.1e}"
            print(
                (
                    f"step {i:5}   bits {np.mean(bits):.3f}   {about}   "
                    f"{time.perf_counter() - began:4.0f} s"
                ),
                flush=True,
            )
            bits = []

    state = ts.averaged(state)
    rows = test[: len(test) // (context + 1) * (context + 1)].reshape(-1, context + 1)
    parts = [evaluate(state, rows[i : i + 4 * batch]) for i in range(0, len(rows), 4 * batch)]
    result = float(functools.reduce(ts.Loss.merge, parts).compute())
    # end of training

    @jax.jit
    def sample(params, row, keys):
        def one(row, key):
            byte = jax.random.categorical(key, logits_of(params, row[None])[0, -1] / 0.7)
            return jnp.append(row[1:], byte.astype(row.dtype)), byte

        return jax.lax.scan(one, row, keys)[1]

    prompt = b"\n" * (context - 4) + b"def "
    written = sample(
        state.params, np.frombuffer(prompt, np.uint8), jax.random.split(jax.random.key(seed), 200)
    )
    print(f"\ndef {bytes(written.tolist()).decode('ascii', 'backslashreplace')}\n")
    print(
        f"{state.step} steps, {time.perf_counter() - began:.0f} s\nbits per held-out byte: "
        f"{result:.3f}"
    )
    assert result <= target, f"expected at most {target}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--steps", type=int)
    parser.add_argument(
        "--target", type=float, default=2.05, help="fail above so many bits per held-out byte"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the params, the batches and the sample"
    )
    # On the CPU where this was written both cost the same; on a GPU bfloat16 is much faster.
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="bfloat16")
    main(**vars(parser.parse_args()))
