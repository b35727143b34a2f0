"""What steps cost by their programs for an H100 and for TPUs: kernels, bytes moved, temporary memory, collectives.

Compiled here and run nowhere: `pip install ".[gpu-compile]"` for the H100, `".[tpu]"` for v5e. The counts depend on no
clock, so `tests/test_topologies.py` holds them. "Same information" is by hand with both norms, the check for finite
numbers and a select of each array; "early" judges loss and gradient before the rule runs. MB moved are the bytes that
each operation of the program reads and writes, if nothing of it is in a cache.
"""

import collections
import functools
import importlib.util
import itertools
import os
import re
from typing import NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # what is compiled for is not here

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tsunax as ts
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tsunax.insight import _cost
from tsunax.run import fused_loop
from tsunax.states import split_any

from benchmarks._common import mlp_loss, save, table
from benchmarks.gpu import models

PLATFORMS = {  # name: the topology of one device, of eight, and the module that compiles for it
    "H100": ("h100", "h100:8", "jax_cuda13_plugin"),
    "v5e": ("v5e:2x4", "v5e:2x4", "libtpu"),
}
TX = optax.adam(1e-3)


class Counts(NamedTuple):
    """What a compiled program does in a step."""

    kernels: int  # operations that run, most of them a kernel each
    megabytes: float  # read and written by them
    temporary: float  # megabytes
    collectives: float  # megabytes on each device
    conditionals: int
    callbacks: int
    copied: int  # leaves that are donated in vain


# ------------------------------------------------------------------------------------------------- reading a program

BYTES = {"pred": 1, "bf16": 2} | {f"{kind}{bits}": bits // 8 for kind in "fsu" for bits in (8, 16, 32, 64)}
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "iota", "partition-id"}


def size_of(shape: str) -> int:
    """Bytes of "f32[64,10]{1,0}", or of a tuple of shapes."""
    arrays = re.findall(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]", shape)
    return sum(BYTES.get(kind, 1) * int(np.prod([int(n) for n in d.split(",") if n] or [1])) for kind, d in arrays)


def computations_in(text: str) -> tuple[str, dict[str, list[str]]]:
    """The name of the entry, and the lines of each computation."""
    entry, name, lines = "", "", collections.defaultdict(list)
    for line in text.splitlines():
        if match := re.match(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            name = match[2]
            entry = name if match[1] else entry
        elif line.startswith("  ") and name:
            lines[name].append(line)
    return entry, lines


def operations_of(lines: list[str]) -> tuple[collections.Counter, int]:
    """How often each operation stands in a computation, and the bytes that all of them read and write."""
    counts, total, shapes = collections.Counter(), 0, {}
    for line in lines:
        match = re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = (.+?) ([a-z][a-z\-]*)\((.*)", line)
        if match is None:
            continue
        name, shape, operation, arguments = match.groups()
        shapes[name] = shape
        if operation in FREE or operation.endswith("-done"):
            continue
        counts[operation] += 1
        if operation == "conditional":  # Its branch that moves bytes is not taken.
            continue
        read = re.findall(r"%([\w.\-]+)", arguments.split("), ")[0])
        total += size_of(shape) + sum(size_of(shapes.get(argument, "")) for argument in read)
    return counts, total


def counts_of(lowered, in_loop: bool = False) -> Counts:
    """The counts of a program, or of one turn of its loop."""
    compiled = lowered.compile()
    text, plan = compiled.as_text(), compiled.memory_analysis()
    entry, lines = computations_in(text)
    if in_loop:
        (loop,) = (line for line in lines[entry] if " while(" in line)
        entry = re.search(r"body=%?([\w.\-]+)", loop)[1]
    operations, total = operations_of(lines[entry])
    donated, aliased = _cost.donated_in(text)
    return Counts(
        kernels=sum(operations.values()),
        megabytes=total / 1e6,
        temporary=plan.temp_size_in_bytes / 1e6,
        collectives=sum(c.bytes for c in _cost.collectives_in(text)) / 1e6,
        conditionals=operations["conditional"],
        callbacks=len(re.findall(r"custom_call_target=\"[^\"]*callback", text)),
        copied=len({name for name in donated if name.startswith("moving")} - set(aliased)),
    )


# ------------------------------------------------------------------------------------------------------- the programs


def step_by_hand(kind, loss_fn, tx, params, opt_state, batch):
    """`((params, opt_state), info)`: "bare", "early" (loss and gradient are judged) or "same information"."""
    loss, grads = jax.value_and_grad(loss_fn)(params, batch)
    updates, new_opt = tx.update(grads, opt_state, params)
    new = optax.apply_updates(params, updates), new_opt
    if kind == "bare":
        return new, (loss,)
    norms = [optax.tree.norm(grads)]
    if kind == "same information":
        norms.append(optax.tree.norm(updates))
    ok = functools.reduce(jnp.logical_and, map(jnp.isfinite, norms), jnp.isfinite(loss))
    return jax.tree.map(lambda n, o: jnp.where(ok, n, o), new, (params, opt_state)), (loss, *norms, ok)


def shapes_on(mesh, tree, axes=()):
    place = NamedSharding(mesh, P(*axes))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), jax.eval_shape(lambda: tree))


def mlp_params(sizes):
    return [(jnp.zeros((a, b)), jnp.zeros(b)) for a, b in itertools.pairwise(sizes)]


def mlp_batch(rows, features):
    return jnp.zeros((rows, features)), jnp.zeros(rows, jnp.int32)


def table_loss(params, batch):
    users, items, score = batch
    return jnp.mean((jnp.sum(params["users"][users] * params["items"][items], -1) - score) ** 2)


def problems():
    """`{name: (init, loss_fn, tx, rule, batch)}`; nothing of it is computed."""
    rng = np.random.default_rng(0)
    adam = TX, ts.rules.adam(1e-3)
    sizes = {"tiny MLP": [64, 64, 10], "wide MLP": [2048, 2048, 2048, 2048, 10]}
    widths = [int(n) for n in rng.integers(2, 6, 101)]
    found = {
        name: (functools.partial(mlp_params, widths), mlp_loss, *adam, functools.partial(mlp_batch, 32, widths[0]))
        for name, widths in {**sizes, "200 leaves": widths}.items()
    }
    attention = functools.partial(jax.nn.dot_product_attention, is_causal=True)
    tables = lambda: {name: jnp.zeros((120_000, 16)) for name in ("users", "items")}
    pairs = lambda: (jnp.zeros(256, jnp.int32), jnp.zeros(256, jnp.int32), jnp.zeros(256))
    return found | {
        "GPT of 2 layers": (lambda: models.gpt_params(768, 2), models.gpt_loss(attention), *adam,
                            lambda: jnp.zeros((4, 513), jnp.int32)),
        "tables under Adagrad": (tables, table_loss, optax.adagrad(1e-2), ts.rules.adagrad(1e-2), pairs),
    }  # fmt: skip


VARIANTS = {"tsunax": {}, "tsunax, no norms": {"norms": False},
            "tsunax, no norms, no verdict": {"norms": False, "on_nonfinite": "ignore"}}  # fmt: skip
CONTENDERS = (*(f"by hand, {kind}" for kind in ("bare", "early", "same information")), *VARIANTS)


def programs_of(name: str, topology: str, contenders=CONTENDERS) -> dict[str, Counts]:
    """The counts of the step by hand, of ours and of its variants, on one device."""
    init, loss_fn, tx, rule, batch = problems()[name]
    mesh = ts.mesh(devices=ts.devices.topology(topology)[:1])
    params, batch = shapes_on(mesh, jax.eval_shape(init)), shapes_on(mesh, jax.eval_shape(batch))
    opt_state = shapes_on(mesh, jax.eval_shape(tx.init, params))
    state = ts.shard(lambda: ts.setup(rule, init()), mesh)
    counts = {}
    for contender in contenders:
        if contender in VARIANTS:
            lowered = ts.train_step(loss_fn, **VARIANTS[contender]).lower(state, batch)
        else:
            function = functools.partial(step_by_hand, contender.removeprefix("by hand, "), loss_fn, tx)
            lowered = jax.jit(function, donate_argnums=(0, 1)).lower(params, opt_state, batch)
        counts[contender] = counts_of(lowered)
    return counts


def loop_of(name: str, topology: str, k: int = 64) -> dict[str, Counts]:
    """One turn of the compiled loop of `fit`, beside that of a scan by hand with the same information."""
    init, loss_fn, tx, rule, batch = problems()[name]
    mesh = ts.mesh(devices=ts.devices.topology(topology)[:1])
    stacked = jax.tree.map(lambda x: jax.ShapeDtypeStruct((k, *x.shape), x.dtype), jax.eval_shape(batch))
    stacked, params = shapes_on(mesh, stacked), shapes_on(mesh, jax.eval_shape(init))
    opt_state = shapes_on(mesh, jax.eval_shape(tx.init, params))
    inner = functools.partial(step_by_hand, "same information", loss_fn, tx)
    scan = jax.jit(lambda p, o, b: jax.lax.scan(lambda c, x: inner(*c, x), (p, o), b), donate_argnums=(0, 1))
    lowered = loop_program(ts.train_step(loss_fn), ts.shard(lambda: ts.setup(rule, init()), mesh), stacked)
    counts = {"scan by hand": scan.lower(params, opt_state, stacked), "loop of fit": lowered}
    return {contender: counts_of(lowered, in_loop=True) for contender, lowered in counts.items()}


def loop_program(step, state, stacked):
    """The program of `fit` for a state of shapes on one device: as on a GPU, with the options for one graph."""
    kind, moving, still = split_any(state)
    (device,) = jax.tree.leaves(stacked)[0].sharding.device_set
    program = fused_loop.fused(step, True).programs[None, device.platform]
    place = jax.tree.leaves(stacked)[0].sharding
    n = jax.ShapeDtypeStruct((2,), jnp.int32, sharding=place)
    return program.lower(kind, moving, still, fused_loop.Stacked(stacked), n, {})


def fully_sharded(topology: str) -> dict[str, Counts]:
    """The wide MLP over eight devices, params and moments divided."""
    init, loss_fn, tx, rule, _ = problems()["wide MLP"]
    mesh = ts.mesh(data=1, fsdp=8, devices=ts.devices.topology(topology))
    state = ts.shard(lambda: ts.setup(rule, init()), mesh)
    batch = shapes_on(mesh, jax.eval_shape(functools.partial(mlp_batch, 256, 2048)), ["fsdp"])
    places = jax.tree.map(lambda x: x.sharding, state.params)
    opt_state = jax.eval_shape(tx.init, state.params)
    moments = {x.shape: x.sharding for x in jax.tree.leaves(state.params)}
    place_of = lambda x: moments.get(x.shape, NamedSharding(mesh, P()))
    opt_state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place_of(x)), opt_state)
    out = (places, jax.tree.map(lambda x: x.sharding, opt_state))
    counts = {}
    for kind in ("bare", "early", "same information"):
        step = functools.partial(step_by_hand, kind, loss_fn, tx)
        jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=(out, NamedSharding(mesh, P())))
        counts[f"by hand, {kind}"] = counts_of(jitted.lower(state.params, opt_state, batch))
    counts["tsunax"] = counts_of(ts.train_step(loss_fn).lower(state, batch))
    return counts


HEAD = ("program", "kernels", "MB moved", "x of bare", "temporary MB", "collectives MB", "conditionals")


def show(title: str, counts: dict[str, Counts]) -> None:
    floor = next(iter(counts.values())).megabytes
    rows = [(name, c.kernels, c.megabytes, c.megabytes / floor, c.temporary, c.collectives, c.conditionals)
            for name, c in counts.items()]  # fmt: skip
    table(title, rows, HEAD)


def main() -> None:
    for platform, (one, eight, module) in PLATFORMS.items():
        if importlib.util.find_spec(module) is None:
            print(f"  {platform}: left out, {module} is not installed")  # its results stay those of the last time
            continue
        for name in problems():
            show(f"{platform}: {name}", programs_of(name, one))
        show(f"{platform}: one turn of the loop of fit, tiny MLP", loop_of("tiny MLP", one))
        show(f"{platform}: wide MLP, fully sharded over 8", fully_sharded(eight))
        save(f"compiled-{platform.lower()}")
