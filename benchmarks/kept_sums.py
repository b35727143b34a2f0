"""Gradients with and without sums of cotangents kept in memory: CPU seconds of a step and of its compilation.

Both are the same jitted, donated step of plain JAX and optax (Adam): one of `value_and_grad`, one of
`keep_sums(value_and_grad)`.
CPU seconds (all threads) and not the clock: the ratio is that of the work.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from tsunax._cpu.kept_sums import keep_sums

from benchmarks._common import save, table

DRAW = np.random.default_rng(0)


def weights(*shape):
    return jnp.asarray(DRAW.standard_normal(shape) / np.sqrt(np.prod(shape[:-1])), jnp.float32)


def norm(x, g):
    x = x - x.mean(-1, keepdims=True)
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * g


def attention(x, p, heads=4, causal=True):
    b, t, d = x.shape
    q, k, v = jnp.split((norm(x, p["g1"]) @ p["qkv"]).reshape(b, t, heads, 3 * d // heads), 3, -1)
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / np.sqrt(d // heads)
    scores = jnp.where(jnp.tril(jnp.ones((t, t), bool)), scores, -1e9) if causal else scores
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v).reshape(b, t, d) @ p["o"]


def block(x, p, causal=True):
    x = x + attention(x, p, causal=causal)
    return x + jax.nn.gelu(norm(x, p["g2"]) @ p["up"]) @ p["down"]


def block_params(d, *more):
    shapes = {"qkv": (d, 3 * d), "o": (d, d), "up": (d, 4 * d), "down": (4 * d, d)}
    ones = {"g1": jnp.ones((*more, d)), "g2": jnp.ones((*more, d))}
    return {name: weights(*more, *shape) for name, shape in shapes.items()} | ones


def gpt(depth=6, d=256, t=128, rows=8, scan=False):
    blocks = block_params(d, depth) if scan else [block_params(d) for _ in range(depth)]
    params = {"e": weights(512, d), "p": weights(t, d), "b": blocks, "g": jnp.ones(d)}

    def loss_fn(params, tokens):
        x = params["e"][tokens] + params["p"]
        if scan:
            x, _ = lax.scan(lambda x, p: (block(x, p), None), x, params["b"])
        for p in [] if scan else params["b"]:
            x = block(x, p)
        logits = norm(x, params["g"]) @ params["e"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()

    return loss_fn, params, jnp.asarray(DRAW.integers(0, 512, (rows, t)))


def vit(depth=4, d=192, rows=16):
    params = {"in": weights(48, d), "b": [block_params(d) for _ in range(depth)], "out": weights(d, 10)}

    def loss_fn(params, x):
        x = x.reshape(rows, 8, 4, 8, 4, 3).swapaxes(2, 3).reshape(rows, 64, 48) @ params["in"]
        for p in params["b"]:
            x = block(x, p, causal=False)
        return jnp.mean((x.mean(1) @ params["out"] - 1) ** 2)

    return loss_fn, params, weights(rows, 32, 32, 3)


def resnet(depth=4, c=32, rows=16):
    params = [[(weights(3, 3, c, c), jnp.ones(c)) for _ in range(2)] for _ in range(depth)]

    def conv(x, w):
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def batch_norm(x, g):
        return (x - x.mean((0, 1, 2))) * lax.rsqrt(x.var((0, 1, 2)) + 1e-5) * g

    def loss_fn(params, x):
        for (w1, g1), (w2, g2) in params:
            x = x + batch_norm(conv(jax.nn.relu(batch_norm(conv(x, w1), g1)), w2), g2)
        return jnp.mean(x**2)

    return loss_fn, params, weights(rows, 16, 16, c)


def mlp(depth=6, d=512, rows=256):
    params = [(weights(d, d), jnp.zeros(d)) for _ in range(depth)]

    def loss_fn(params, x):
        for w, b in params:
            x = jax.nn.gelu(x @ w + b)
        return jnp.mean(x**2)

    return loss_fn, params, weights(rows, d)


def lstm(d=128, t=64, rows=128):
    params = {"x": weights(d, 4 * d), "h": weights(d, 4 * d)}

    def loss_fn(params, xs):
        def cell(carry, x):
            h, c = carry
            i, f, g, o = jnp.split(x @ params["x"] + h @ params["h"], 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zero = jnp.zeros((rows, d))
        return jnp.mean(lax.scan(cell, (zero, zero), xs)[1] ** 2)

    return loss_fn, params, weights(t, rows, d)


MODELS = {
    "GPT, 2 blocks of 256": lambda: gpt(2),
    "GPT, 4 blocks of 256": lambda: gpt(4),
    "GPT, 6 blocks of 256": gpt,
    "GPT, 12 blocks of 128": lambda: gpt(12, 128),
    "the same, blocks in a scan": lambda: gpt(12, 128, scan=True),
    "ViT, 4 blocks of 192": vit,
    "ViT, 8 blocks of 192": lambda: vit(8),
    "ViT, 12 blocks of 128": lambda: vit(12, 128),
    "ResNet, 8 convolutions": resnet,
    "MLP, 6 layers of 512": mlp,
    "LSTM of 128": lstm,
}


def measured(make, bursts=7):
    loss_fn, params, batch = make()
    rule, runs = optax.adam(1e-3), {}
    for name, wrapper in {"plain": lambda f: f, "kept": keep_sums}.items():
        gradient = wrapper(jax.value_and_grad(loss_fn))

        def step(params, state, batch, gradient=gradient):
            loss, grads = gradient(params, batch)
            updates, state = rule.update(grads, state, params)
            return optax.apply_updates(params, updates), state, loss

        state = jax.tree.map(jnp.copy, params), rule.init(params)
        begin = time.process_time()
        program = jax.jit(step, donate_argnums=(0, 1)).lower(*state, batch).compile()
        runs[name] = [program, state, time.process_time() - begin, []]
    for _ in range(bursts):
        for run in runs.values():
            begin = time.process_time()
            *state, _ = run[0](*run[1], batch)
            jax.block_until_ready(state)
            run[1] = state
            run[3].append(time.process_time() - begin)
    same = jax.tree.map(lambda a, b: bool((a == b).all()), runs["plain"][1], runs["kept"][1])
    plain, found = ((run[2], min(run[3])) for run in (runs["plain"], runs["kept"]))
    return {
        "compile_plain": plain[0],
        "compile_kept": found[0],
        "step_plain": plain[1],
        "step_kept": found[1],
        "same_bits": all(jax.tree.leaves(same)),
    }


def main() -> None:
    rows = []
    for name, make in MODELS.items():
        r = measured(make)
        rows.append(
            (
                name,
                f"{r['step_plain']:.3f}",
                f"{r['step_kept'] / r['step_plain']:.2f}",
                f"{r['compile_plain']:.1f}",
                f"{r['compile_kept'] / r['compile_plain']:.2f}",
                "the same" if r["same_bits"] else "OTHER",
            )
        )
    head = ("model", "step, CPU s", "kept x", "compile, CPU s", "kept x", "bits")
    table("sums of cotangents", rows, head)
    save("kept_sums")


if __name__ == "__main__":
    main()
