"""What memory costs and holds: moments in host memory, saves, and the batch that `find_batch_size` says."""

import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
import tsunax as ts

from benchmarks import _common, checkpoint
from benchmarks.gpu import models
from benchmarks.gpu.models import copied, note_program, repeated, take_turns
from benchmarks.gpu.results import Results


def device_bytes(which: str) -> int:
    return (jax.devices()[0].memory_stats() or {}).get(which, 0)


def host(results: Results, tiny: bool) -> None:
    """Adam's moments in host memory: bytes on the device, time, and whether a save beside the next steps is whole."""
    width, depth = (64, 2) if tiny else (4096, 8)
    params = {str(i): jnp.full((width, width), 0.01) for i in range(depth)}

    def loss_fn(params, x):
        for kernel in params.values():
            x = jnp.tanh(x @ kernel.astype(x.dtype))
        return (x.astype(jnp.float32) ** 2).mean()

    batch = jax.device_put(np.random.default_rng(0).standard_normal((8 if tiny else 2048, width), np.float32))
    step, mesh = ts.train_step(loss_fn), ts.mesh(devices=jax.devices()[:1])
    make = lambda host: ts.shard(ts.setup(ts.rules.adam(1e-3), copied(params)), mesh, host=host)
    states = {}
    for name, parts in {"on the device": (), "moments in host memory": ("moments",)}.items():
        before = device_bytes("bytes_in_use")
        states[name] = jax.block_until_ready(make(parts))
        results.note(f"GB of a state {name}", (device_bytes("bytes_in_use") - before) / 1e9)
        note_program(results, name, step, states[name], batch)
    bursts = {name: repeated(step, state, batch) for name, state in states.items()}
    results.note("steps", take_turns(bursts, rounds=5, steps=3, floor="on the device"))
    state, _ = step(make(("moments",)), batch)
    expected = ts.reproduce.fingerprint(state)
    with tempfile.TemporaryDirectory() as folder, ts.Checkpoints(folder) as checkpoints:
        checkpoints.save(state)
        for _ in range(3):  # while the save is under way
            state, _ = step(state, batch)
        checkpoints.wait()
        saved = checkpoints.restore(make(("moments",))).state
    results.note("a save beside the next steps has the same bits", ts.reproduce.fingerprint(saved) == expected)


def saves(results: Results, tiny: bool) -> None:
    """For how long a save blocks the loop, beside orbax's and a copy to the host; whole saves and restores."""
    checkpoint.compare(*((1, 4, 2) if tiny else (480, 12, 2)))
    results.note(
        "tables", [{**shown, "rows": [list(row) for row in shown.get("rows", ())]} for shown in _common._shown]
    )


def sizes(results: Results, tiny: bool) -> None:
    """The rows that `find_batch_size` answers, and whether they and twice as many run."""
    width, depth, _, context = models.SHAPES["tiny" if tiny else "gpt_small"]
    loss_fn = models.gpt_loss(models.attention_here(results))
    row = jax.ShapeDtypeStruct((1, context + 1), jnp.int32)
    state = ts.setup(ts.rules.adamw(3e-4), models.gpt_params(width, depth), precision="bfloat16")
    step, limit = ts.train_step(loss_fn), {"memory": 64 << 20} if tiny else {}
    before, start = device_bytes("peak_bytes_in_use"), time.perf_counter()
    size, report = ts.find_batch_size(step, state, row, **limit)
    results.note("rows", {"answer": size, "seconds": time.perf_counter() - start, "report": repr(report)})
    results.note("GB that the search itself took at most", (device_bytes("peak_bytes_in_use") - before) / 1e9)
    for n in [size] if tiny else [size, 2 * size]:
        start = time.perf_counter()
        try:
            state, info = step(state, jnp.zeros((n, context + 1), jnp.int32))
            verdict = f"runs, loss {float(info.loss):.2f}"
        except Exception as error:
            verdict = f"{type(error).__name__}: {error}"[:200]
        seconds, peak = time.perf_counter() - start, device_bytes("peak_bytes_in_use") / 1e9
        results.note(f"a step of {n} rows", {"verdict": verdict, "seconds": seconds, "peak GB": peak})
