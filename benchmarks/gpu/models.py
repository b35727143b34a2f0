"""The models of the programme in plain JAX, and their steps by hand."""

import functools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.gpu.results import Results

SHAPES = {  # of a GPT that reads bytes: width, depth, rows, context. GPT-2 124M but for its vocabulary; nanochat's d8
    "gpt": (768, 12, 16, 1024),
    "gpt_small": (512, 8, 32, 1024),
    "tiny": (64, 2, 2, 32),
}
PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}  # FLOP/s of dense bfloat16, from NVIDIA's data sheets


def gpt_params(width, depth):
    rng = np.random.default_rng(0)
    kernel = lambda *shape: jnp.asarray(0.02 * rng.standard_normal(shape, np.float32))

    def block():
        attention = {"norm1": jnp.ones(width), "qkv": kernel(width, 3 * width), "out": kernel(width, width)}
        return attention | {"norm2": jnp.ones(width), "up": kernel(width, 4 * width), "down": kernel(4 * width, width)}

    blocks = [block() for _ in range(depth)]
    return {"embed": kernel(256, width), "blocks": blocks, "norm": jnp.ones(width), "head": kernel(width, 256)}


def attention_here(results: Results):
    """cuDNN's attention if it compiles on this device, else XLA's own, which stores all scores."""
    x = jnp.ones((1, 128, 2, 64), jnp.bfloat16)
    try:
        total = lambda x: jax.nn.dot_product_attention(x, x, x, is_causal=True, implementation="cudnn").sum()
        jax.block_until_ready(jax.jit(jax.grad(total))(x))
        implementation = "cudnn"
    except Exception as error:
        implementation = "xla"
        results.note("why not cuDNN", str(error)[:300])
    results.note("attention", implementation)
    return functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation=implementation)


def gpt_loss(attention):
    """Bytes in, mean cross-entropy out; it computes in the dtype of its params."""

    def layer_norm(x, scale):
        wide = x.astype(jnp.float32)
        wide = wide - wide.mean(-1, keepdims=True)
        return (wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-5)).astype(x.dtype) * scale

    def rotate(x):
        angles = jnp.arange(x.shape[1])[:, None] * 1000.0 ** -jnp.linspace(0, 1, x.shape[-1] // 2)
        cos, sin = (f(angles)[None, :, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
        a, b = jnp.split(x, 2, -1)
        return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)

    def block(x, p):
        rows, context, width = x.shape
        q, k, v = jnp.split((layer_norm(x, p["norm1"]) @ p["qkv"]).reshape(rows, context, -1, 64), 3, 2)
        x = x + attention(rotate(q), rotate(k), v).reshape(rows, context, width) @ p["out"]
        return x + jax.nn.gelu(layer_norm(x, p["norm2"]) @ p["up"]) @ p["down"]

    def loss_fn(params, batch):
        x = params["embed"][batch[:, :-1]]
        for p in params["blocks"]:
            x = block(x, p)
        logits = (layer_norm(x, params["norm"]) @ params["head"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    return loss_fn


def gpt_flops(size: int, shape) -> float:
    """FLOPs of a step of `size` params by PaLM's convention: six for each and token, attention without its mask."""
    width, depth, rows, context = shape
    return rows * context * (6 * size + 12 * depth * width * context)


def cnn(widths, classes=10):
    """`(params, loss_fn)` of a ResNet with group norms: three 3 x 3 convolutions and a skip for each width."""
    rng = np.random.default_rng(0)
    kernel = lambda *shape: jnp.asarray(rng.standard_normal(shape, np.float32) * (2 / np.prod(shape[:-1])) ** 0.5)
    block = lambda a, b: {"in": kernel(3, 3, a, b), "one": kernel(3, 3, b, b), "two": kernel(3, 3, b, b),
                          "scale": jnp.ones((3, b))}  # fmt: skip
    blocks = [block(a, b) for a, b in zip([3, *widths], widths, strict=False)]

    def conv(x, kernel, scale, stride=1):
        x = jax.lax.conv_general_dilated(x, kernel, (stride,) * 2, "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        groups = x.reshape(*x.shape[:3], 8, -1).astype(jnp.float32)
        mean, var = groups.mean((1, 2, 4), keepdims=True), groups.var((1, 2, 4), keepdims=True)
        return (((groups - mean) * jax.lax.rsqrt(var + 1e-5)).reshape(x.shape)).astype(x.dtype) * scale

    def loss_fn(params, batch):
        x, y = batch["x"].astype(params["head"].dtype), batch["y"]
        for p in params["blocks"]:
            x = jax.nn.relu(conv(x, p["in"], p["scale"][0], 2))
            x = jax.nn.relu(x + conv(jax.nn.relu(conv(x, p["one"], p["scale"][1])), p["two"], p["scale"][2]))
        logits = (x.mean((1, 2)) @ params["head"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    return {"blocks": blocks, "head": kernel(widths[-1], classes)}, loss_fn


def in_bfloat16(loss_fn):
    """The loss in bfloat16 of float32 params, as `precision="bfloat16"` of tsunax."""
    return lambda params, batch: loss_fn(jax.tree.map(lambda x: x.astype(jnp.bfloat16), params), batch)


def by_hand(loss_fn, tx, *, guarded: bool):
    """The donated optax step: bare, or with both norms, the check for finite numbers and a select of each array."""

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, batch):
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, new_opt = tx.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates), new_opt
        if not guarded:
            return new, (loss,)
        norms = optax.tree.norm(grads), optax.tree.norm(updates)
        ok = jnp.isfinite(loss) & jnp.isfinite(norms[0]) & jnp.isfinite(norms[1])
        return jax.tree.map(lambda n, o: jnp.where(ok, n, o), new, state), (loss, *norms, ok)

    return step


def copied(tree):
    return jax.tree.map(lambda x: jnp.array(x, copy=True) if isinstance(x, jax.Array) else x, tree)


def repeated(step, state, batch):
    """`burst(n)`: n steps one after the other, and a wait for the last one."""
    held = [state]

    def burst(n):
        state = held[0]
        for _ in range(n):
            state, _ = step(state, batch)
        jax.block_until_ready(jax.tree.leaves(state))
        held[0] = state

    return burst


def note_program(results: Results, name, step, state, batch) -> None:
    """Compiles a contender, and notes the seconds, the memory that XLA plans for it, and its operations."""
    start = time.perf_counter()
    program = step.lower(state, batch).compile()
    seconds, plan = time.perf_counter() - start, program.memory_analysis()
    text = program.as_text()
    entry = text[text.rfind("\nENTRY") :]
    counts = {kind: entry.count(f" {kind}(") for kind in ("fusion", "custom-call", "copy", "conditional", "while")}
    total = plan.argument_size_in_bytes + plan.output_size_in_bytes - plan.alias_size_in_bytes
    memory = {"GB": (total + plan.temp_size_in_bytes) / 1e9, "temporary GB": plan.temp_size_in_bytes / 1e9}
    results.note(f"program: {name}", {"compile s": round(seconds, 2), **memory, **counts})


def take_turns(bursts, *, rounds: int, steps: int, floor: str) -> dict[str, dict[str, float]]:
    """Milliseconds a step of each contender, and quartiles of its ratio to `floor` over the rounds."""
    for burst in bursts.values():
        burst(2)
    times: dict[str, list[float]] = {name: [] for name in bursts}
    for i in range(rounds):
        for name in list(bursts)[:: 1 if i % 2 else -1]:
            start = time.perf_counter()
            bursts[name](steps)
            times[name].append(1e3 * (time.perf_counter() - start) / steps)
    rows = {}
    for name, ms in times.items():
        quartiles = statistics.quantiles([a / b for a, b in zip(ms, times[floor], strict=True)], n=4)
        low, middle, high = (round(q, 4) for q in quartiles)
        rows[name] = {"ms": statistics.median(ms), "x low": low, "x": middle, "x high": high}
    return rows


def with_rates(rows, tokens: float, flops: float):
    """The rows of `take_turns` with tokens a second and, on a card whose peak is listed, model FLOPs utilization."""
    kind = jax.devices()[0].device_kind
    peak = next((peak for name, peak in PEAKS.items() if name in kind), None)
    for row in rows.values():
        row["tokens/s"] = tokens / row["ms"] * 1e3
        if peak is not None:
            row["MFU"] = flops / row["ms"] * 1e3 / peak
    return rows
