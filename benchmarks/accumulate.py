"""Eight micro-batches in a step: time over a scan by hand, the full batch and optax.MultiSteps; bytes by XLA's count.

All apply one Adam update to the same sums, and compute both norms, the finite check and the select; MultiSteps, eight
calls of a smaller step, only the update. Targets: at most 1.05 times the scan by hand, 1.1 times the full batch, as
fast as MultiSteps, and temporary bytes at most 1.1 times those of one micro-batch and one float32 gradient.

On CPU a convolution in a scan by hand is many times slower than the same outside (jax#12868); see `convolutions`.
"""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import optax
import tsunax as ts

from benchmarks._common import copied, interleave, ratio, save, table
from benchmarks.step import TX, by_hand, by_tsunax, guarded

MICRO = 8


def gpt(rows, *, width=128, depth=4, context=64, heads=4):
    """Params, a batch of bytes, and a loss: pre-norm blocks, learned positions."""
    keys = iter(jax.random.split(jax.random.key(0), 4 * depth + 4))
    normal = lambda *shape: jax.random.normal(next(keys), shape) / math.sqrt(shape[0])
    norm = lambda: {"scale": jnp.ones(width), "bias": jnp.zeros(width)}
    sizes = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
    blocks = [{name: normal(*s) for name, s in sizes.items()} | {"a": norm(), "b": norm()} for _ in range(depth)]
    params = {"bytes": normal(256, width), "positions": normal(context, width), "blocks": blocks, "norm": norm()}
    params["head"] = normal(width, 256)
    batch = jax.random.randint(next(keys), (rows, context + 1), 0, 256)

    def normed(p, x):
        y = x.astype(jnp.float32)
        y = y - y.mean(-1, keepdims=True)
        y = y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-6)
        return y.astype(x.dtype) * p["scale"] + p["bias"]

    def attended(q, k, v):  # jax.nn.dot_product_attention has no float16 on CPU
        scores = jnp.einsum("nqhd,nkhd->nhqk", q, k).astype(jnp.float32) / math.sqrt(q.shape[-1])
        scores = jnp.where(jnp.tri(context, dtype=bool), scores, -jnp.inf)
        return jnp.einsum("nhqk,nkhd->nqhd", jax.nn.softmax(scores).astype(v.dtype), v)

    def loss_fn(params, batch):
        x = params["bytes"][batch[:, :-1]] + params["positions"]
        for p in params["blocks"]:
            parts = (normed(p["a"], x) @ p["qkv"]).reshape(*x.shape[:2], 3, heads, -1)
            q, k, v = (parts[:, :, i] for i in range(3))
            x = x + attended(q, k, v).reshape(x.shape) @ p["out"]
            x = x + jax.nn.gelu(normed(p["b"], x) @ p["up"]) @ p["down"]
        logits = (normed(params["norm"], x) @ params["head"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    return params, batch, loss_fn


def cnn(rows, *, features=(3, 16, 32, 32), size=16):
    """Params, a batch of images and labels, and a loss: 3x3 convolutions with ReLU, a mean over space, a head."""
    keys = iter(jax.random.split(jax.random.key(0), len(features) + 2))
    he = lambda *shape: jax.random.normal(next(keys), shape) * math.sqrt(2 / math.prod(shape[:-1]))
    params = {"convs": [he(3, 3, i, o) for i, o in itertools.pairwise(features)], "head": he(features[-1], 10)}
    images = jax.random.normal(next(keys), (rows, size, size, features[0]))
    batch = images, jax.random.randint(next(keys), (rows,), 0, 10)

    def loss_fn(params, batch):
        x, labels = batch
        for w in params["convs"]:
            layout = ("NHWC", "HWIO", "NHWC")
            x = jax.nn.relu(jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=layout))
        logits = (x.mean((1, 2)) @ params["head"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return params, batch, loss_fn


MODELS = {"GPT": (gpt, 32), "CNN": (cnn, 64)}  # rows of the full batch
# XLA:CPU reports no temporary memory for small programs. Compiled only, never run.
LARGE = {
    "GPT": lambda rows: gpt(rows, width=256, depth=6, context=256),
    "CNN": lambda rows: cnn(rows, features=(3, 32, 64, 128), size=32),
}


def scanned(loss_fn):
    """Value and gradient as a mean over micro-batches, in a plain scan."""

    def f(params, batch):
        micro = jax.tree.map(lambda x: x.reshape(MICRO, -1, *x.shape[1:]), batch)
        zeros = jnp.float32(0), jax.tree.map(jnp.zeros_like, params)
        add = lambda sums, rows: (jax.tree.map(jnp.add, sums, jax.value_and_grad(loss_fn)(params, rows)), None)
        return jax.tree.map(lambda x: x / MICRO, jax.lax.scan(add, zeros, micro)[0])

    return f


def by_multisteps(loss_fn, params, batch):
    tx = optax.MultiSteps(TX, MICRO)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, opt_state, rows):
        loss, grads = jax.value_and_grad(loss_fn)(params, rows)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    part = lambda i: jax.tree.map(lambda x: x.reshape(MICRO, -1, *x.shape[1:])[i], batch)
    micro = [part(i) for i in range(MICRO)]
    held = [copied(params)]
    held.append(tx.init(held[0]))

    def burst(n):
        params, opt_state = held
        for _ in range(n):
            for rows in micro:
                params, opt_state, _ = step(params, opt_state, rows)
        jax.block_until_ready(params)
        held[:] = params, opt_state

    return burst


def temporary_bytes(accumulate, params, batch, loss_fn) -> int:
    lowered = ts.train_step(loss_fn, accumulate=accumulate).lower(ts.setup(ts.rules.adam(1e-3), params), batch)
    return lowered.compile().memory_analysis().temp_size_in_bytes


def main(rounds: int = 15) -> None:
    ours = "tsunax, accumulate=8"
    for name, (make, rows) in MODELS.items():
        params, batch, loss_fn = make(rows)
        fresh = lambda params=params: ts.setup(ts.rules.adam(1e-3), params)
        contenders = {
            ours: by_tsunax(ts.train_step(loss_fn, accumulate=MICRO), fresh(), batch),
            "scan by hand": by_hand(guarded(scanned(loss_fn)), params, batch),
            "full batch": by_tsunax(ts.train_step(loss_fn), fresh(), batch),
            "optax.MultiSteps": by_multisteps(loss_fn, params, batch),
        }
        times = interleave(contenders, rounds=rounds, steps=1)
        middle = {k: sorted(v)[len(v) // 2] / 1e3 for k, v in times.items()}
        ratios = {k: ratio(times, ours, k) for k in times}
        head = ("contender", "ms/update", "tsunax over it, low", "median", "high")
        table(f"{name}, {rows} rows", [(k, middle[k], *ratios[k]) for k in times], head)

    rows = []
    for name, make in LARGE.items():
        params, batch, loss_fn = make(4 * MICRO)
        cut = temporary_bytes(MICRO, params, batch, loss_fn)
        one = temporary_bytes(1, params, jax.tree.map(lambda x: x[:4], batch), loss_fn)
        whole = temporary_bytes(1, params, batch, loss_fn)
        gradient = 4 * sum(x.size for x in jax.tree.leaves(params))
        found = tuple(x / 2**20 for x in (whole, cut, one, gradient))
        rows.append((name, *found, cut / (one + gradient)))
    head = ("32 rows, MiB", "full batch", ours, "one micro-batch", "f32 gradient", "ratio to both")
    table("temporary memory, counted by XLA", rows, head)
    save("accumulate")


if __name__ == "__main__":
    main()
