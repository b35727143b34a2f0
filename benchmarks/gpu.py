"""One accelerator: training steps of GPTs beside raw JAX, NNX and torch, and what else only a GPU can say.

    python -m benchmarks gpu                # under nine minutes on a GPU; names the sections that the time left out
    python -m benchmarks gpu --tiny         # small shapes, on any device

Raw JAX computes the bare step, or with "same info" also norms, check and select, as the default step of tsunax does.
"""

import argparse
import functools
import importlib.util
import os
import statistics
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tsunax as ts
from examples.gpt import GPT
from flax import nnx

from benchmarks import checkpoint, population, verdict
from benchmarks._common import batch_of, interleave, mlp, mlp_loss, note, ratio, save, table
from benchmarks.step import bare, by_hand, by_tsunax, guarded, same_info, unguarded

SHAPES = {  # of a byte-level GPT: width, depth, rows, context. The sizes of nanochat d8, and of GPT-2 124M but for the vocabulary
    "GPT d8": (512, 8, 32, 1024),
    "GPT 124M": (768, 12, 16, 1024),
}
TINY = {"GPT tiny": (64, 2, 2, 32)}
MINUTES = 8.5


def model(shape):
    """`(graphdef, params, batch, loss_fn)` of a GPT."""
    width, depth, rows, context = shape
    graphdef, params = nnx.split(GPT(width, depth, nnx.Rngs(0)), nnx.Param)
    batch = jnp.asarray(np.random.default_rng(0).integers(0, 256, (rows, context + 1), np.int32))

    def loss_fn(params, batch):
        logits = nnx.merge(graphdef, params)(batch[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    return graphdef, params, batch, loss_fn


def by_nnx(graphdef, params, batch):
    """The step of flax's own documentation: `nnx.jit` over a module and its optimizer."""
    net = nnx.merge(graphdef, jax.tree.map(jnp.copy, params))
    optimizer = nnx.Optimizer(net, optax.adam(1e-3), wrt=nnx.Param)

    @nnx.jit
    def step(net, optimizer, batch):
        def loss_fn(net):
            logits = net(batch[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

        loss, grads = nnx.value_and_grad(loss_fn)(net)
        optimizer.update(net, grads)
        return loss

    def burst(n):
        for _ in range(n):
            loss = step(net, optimizer, batch)
        jax.block_until_ready((loss, nnx.state(net)))

    return burst


def by_torch(shape):
    """The same layers in torch: compiled, its own attention, fused Adam, TF32 as JAX's default precision on a GPU."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    width, depth, rows, context = shape
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            linear = functools.partial(nn.Linear, bias=False)
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = linear(width, 3 * width), linear(width, width)
            self.up, self.down = linear(width, 4 * width), linear(4 * width, width)
            angles = torch.arange(context)[:, None] * 1000.0 ** -torch.linspace(0, 1, 32)
            self.register_buffer("cos", angles.cos()[None, None])
            self.register_buffer("sin", angles.sin()[None, None])

        def rotated(self, x):
            a, b = x.chunk(2, -1)
            return torch.cat([a * self.cos - b * self.sin, a * self.sin + b * self.cos], -1)

        def forward(self, x):
            n, t, _ = x.shape
            q, k, v = (y.reshape(n, t, -1, 64).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, -1))
            y = F.scaled_dot_product_attention(self.rotated(q), self.rotated(k), v, is_causal=True)
            x = x + self.out(y.transpose(1, 2).reshape(n, t, width))
            return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))

    net = nn.Sequential(nn.Embedding(256, width), *[Block() for _ in range(depth)], nn.LayerNorm(width))
    net.append(nn.Linear(width, 256, bias=False))
    net.to(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, fused=True)
    batch = torch.randint(0, 256, (rows, context + 1), device=device)
    forward = torch.compile(lambda x: F.cross_entropy(net(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten()))

    def burst(n):
        for _ in range(n):
            optimizer.zero_grad(set_to_none=True)
            forward(batch).backward()
            optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()

    return burst


def peak() -> float:
    """Gigabytes that the device has held at most since the process began; NaN where it does not say."""
    stats = jax.devices()[0].memory_stats() or {}
    return stats.get("peak_bytes_in_use", float("nan")) / 1e9


def steps(name, shape, rounds):
    """Milliseconds a step of all contenders, and what the compiler plans in temporary memory."""
    graphdef, params, batch, loss_fn = model(shape)
    fresh = lambda **more: ts.setup(ts.rules.adam(1e-3), params, **more)
    programs = {
        "raw JAX, bare": unguarded(loss_fn),
        "raw JAX, same info": guarded(jax.value_and_grad(loss_fn)),
        "tsunax, no norms, no verdict": ts.train_step(loss_fn, norms=False, on_nonfinite="ignore"),
        "tsunax, no norms": ts.train_step(loss_fn, norms=False),
        "tsunax": ts.train_step(loss_fn),
        "tsunax, bfloat16": ts.train_step(loss_fn),
    }
    contenders, planned = {}, {}
    for who, step in programs.items():
        if who.startswith("raw"):
            contenders[who] = by_hand(step, params, batch)
            lowered = step.lower(params, optax.adam(1e-3).init(params), batch)
        else:
            state = fresh(precision="bfloat16") if "bfloat16" in who else fresh()
            contenders[who], lowered = by_tsunax(step, state, batch), step.lower(state, batch)
        planned[who] = lowered.compile().memory_analysis().temp_size_in_bytes / 1e6
    contenders["flax NNX, nnx.jit"] = by_nnx(graphdef, params, batch)
    if importlib.util.find_spec("torch"):
        contenders["torch.compile"] = by_torch(shape)
    times = interleave(contenders, rounds=rounds, steps=3)
    rows = []
    for who in contenders:
        ms = statistics.median(times[who]) / 1e3
        rows.append((who, ms, *ratio(times, who, "raw JAX, bare"), planned.get(who, float("nan"))))
    head = ("contender", "ms/step", "x low", "x median", "x high", "temporary MB")
    table(f"{name}, {shape[2]} x {shape[3]} bytes, Adam; x over raw JAX, bare", rows, head)
    note(f"peak of all contenders together: {peak():.2f} GB")


def deterministic(tiny):
    """The step under XLA's deterministic flags, in a process of its own each."""
    flags = {"default": "", "deterministic": "--xla_gpu_deterministic_ops=true"}
    rows = []
    for name, flag in flags.items():
        flags_now = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
        env = os.environ | {"XLA_FLAGS": flags_now, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        command = [sys.executable, "-m", "benchmarks.gpu", "--alone", *(["--tiny"] if tiny else [])]
        out = subprocess.run(command, env=env, capture_output=True, text=True)
        if out.returncode:
            note(f"{name}: failed: {out.stderr.strip().splitlines()[-1:]}")
            continue
        ms, digest = out.stdout.split()[-2:]
        rows.append((name, float(ms), digest))
    table("deterministic flags, the first shape", rows, ("flags", "ms/step", "digest after 12 steps"))


def alone(shape):
    """Prints the milliseconds of a step, and a digest of the params after 12 of them."""
    _, params, batch, loss_fn = model(shape)
    state, step = ts.setup(ts.rules.adam(1e-3), params), ts.train_step(loss_fn)
    times = []
    for _ in range(12):
        start = time.perf_counter()
        state, _ = step(state, batch)
        jax.block_until_ready(state.params)
        times.append(time.perf_counter() - start)
    print(1e3 * statistics.median(times[2:]), ts.reproduce.fingerprint(state.params))


def search(shape):
    """The largest batch that fits by the compiler's plan, beside the largest that runs: doubled, then halved."""
    _, params, batch, loss_fn = model(shape)
    state, step = ts.setup(ts.rules.adam(1e-3), params), ts.train_step(loss_fn, donate=False)
    start = time.perf_counter()
    size, _ = ts.find_batch_size(step, state, batch[:1])
    seconds = time.perf_counter() - start

    def runs(n):
        try:
            jax.block_until_ready(step(state, jnp.repeat(batch[:1], n, 0)))
        except Exception as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return False
        return True

    low, high = size, size
    while low > 1 and not runs(low):
        high, low = low, low // 2
    while high == low or runs(high):
        low, high = high, 2 * high
    while high - low > max(1, low // 32):
        middle = (low + high) // 2
        low, high = (middle, high) if runs(middle) else (low, middle)
    rows = [("find_batch_size", size, seconds), ("the largest that runs", low, float("nan"))]
    table("rows of a batch", rows, ("found by", "rows", "seconds"))


def launches(rounds):
    """The small MLP, where a step is a handful of launches."""
    params, batch = mlp([64, 64, 10]), batch_of(32, 64)
    fresh = lambda: ts.setup(ts.rules.adam(1e-3), params)
    contenders = {
        "raw JAX, bare": by_hand(bare, params, batch),
        "raw JAX, same info": by_hand(same_info, params, batch),
        "tsunax": by_tsunax(ts.train_step(mlp_loss), fresh(), batch),
    }
    times = interleave(contenders, rounds=rounds, steps=100)
    rows = [(who, statistics.median(times[who]), *ratio(times, who, "raw JAX, bare")) for who in contenders]
    table("MLP 64-64-10", rows, ("contender", "us/step", "x low", "x median", "x high"))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks gpu", description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="small shapes, on any device")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    shapes, rounds = (TINY, 3) if options.tiny else (SHAPES, 7)
    first = next(iter(shapes.values()))
    if options.alone:
        return alone(first)
    if jax.default_backend() == "cpu" and not options.tiny:
        return print("  gpu: left out, there is no accelerator; --tiny runs it on any device")
    sections = {
        **{name: functools.partial(steps, name, shape, rounds) for name, shape in shapes.items()},
        "deterministic flags": functools.partial(deterministic, options.tiny),
        "launches": functools.partial(launches, rounds),
        "checkpoint": functools.partial(checkpoint.compare, *((1, 4, 2) if options.tiny else (480, 12, 3))),
        "batch size": functools.partial(search, first),
        "verdict": verdict.tables,
        "population": population.tables,
    }
    if jax.default_backend() == "cpu":
        del sections["batch size"]  # the host gives memory until the process ends
    if options.tiny:  # these have one size, and results of their own
        del sections["verdict"], sections["population"]
    began = time.perf_counter()
    for name, section in sections.items():
        if time.perf_counter() - began > 60 * MINUTES:
            note(f"{name}: left out, the time is over")
            continue
        start = time.perf_counter()
        section()
        print(f"  {name}: {time.perf_counter() - start:.0f} s", flush=True)
    if not options.tiny:
        save("gpu")


if __name__ == "__main__":
    main()
