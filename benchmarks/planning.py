"""Bytes that `plan` names beside the growth of a process, and its choice beside the fastest candidate as measured.

    python -m benchmarks planning               # a quarter of an hour on two cores
    python -m benchmarks planning --part=memory    # or speed

Memory: the trainings of examples/ports, each as its own program calls `fit`, in a separate process. The rows of a
batch are repeated until the step needs about 512 MiB, because the growth of small steps is that of allocators and
threads. A port without a batch gets more rows from the constant of its module. Growth is the peak of resident memory
over two calls, less what was resident after compilation, and the state and the batch, which were resident then.

Speed: all candidates of a search are compiled and timed, also those that `plan` does not compile; in CPU seconds, the
least of nine steps by turns.
"""

import argparse
import contextlib
import ctypes
import dataclasses
import functools
import importlib
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tsunax as ts
from examples import gpt
from flax import nnx
from tsunax.insight import _memory, find_batch_size
from tsunax.run import fused_loop

from benchmarks._common import mlp, mlp_loss, note, save, table
from benchmarks.search import status

PORTS = Path(__file__).resolve().parents[1] / "examples" / "ports"
LIMIT = 512 << 20
FITS_BEFORE = {"lora": 1, "pinn": 1}  # calls of `fit` before the one that is measured
ROWS_OF = {"maml": "TASKS", "ppo": "STEPS", "dqn": "ROWS"}  # constants of ports whose step has no batch


class Reached(Exception):
    """The call of `fit` that is measured."""


def captured(name: str, factor: int = 1):
    """The step, state and batch with which a port calls `fit`; `factor` times the rows of a step without a batch."""
    calls = []

    def fit(step, state, data=None, **_):
        calls.append((step, state, None if data is None else next(iter(data))))
        if len(calls) > FITS_BEFORE.get(name, 0):
            raise Reached
        return state, None

    sys.path.insert(0, str(PORTS))
    module = importlib.import_module(name)
    if constant := ROWS_OF.get(name):
        setattr(module, constant, factor * getattr(module, constant))
    with mock.patch.object(ts, "fit", fit), contextlib.suppress(Reached):
        module.main(100, 0)
    return calls[-1]


def rows_of(batch) -> int:
    return max(x.shape[0] for x in jax.tree.leaves(batch) if np.ndim(x))


def repeated(batch, factor: int):
    return jax.tree.map(lambda x: np.repeat(x, factor, 0) if np.ndim(x) else x, batch)


def need(name: str) -> None:
    """Prints the factor by which the rows grow to LIMIT, and the bytes that the step then needs."""
    step, state, batch = captured(name)
    if name not in ROWS_OF:
        rows = rows_of(batch)
        size, report = find_batch_size(step, state, batch, mode="binsearch", multiple_of=rows, memory=LIMIT, margin=0.0)
        print(json.dumps([size // rows, next(trial.need.total for trial in report.trials if trial.size == size)]))
        return
    factor, total = 1, 0
    while total < LIMIT / 2:
        factor *= 4
        step, state, _ = captured(name, 4)  # four times the last time's
        total = _memory.need_of(fused_loop.lowerable(step, state), state, None, {}).total
    print(json.dumps([factor, total]))


def growth(name: str, factor: int) -> None:
    """Prints the bytes that this process takes for two calls of a step, with state and batch."""
    step, state, batch = captured(name, factor)
    if name not in ROWS_OF:
        batch = jax.tree.map(jnp.asarray, repeated(batch, factor))
    if hasattr(step, "check_rows"):  # the first call would compile the comparison of rows
        step = dataclasses.replace(step, check_rows=False)
    jitted = fused_loop.lowerable(step, state)
    jitted.lower(state, batch).compile()  # the memory of the compiler is not that of the step
    state, batch = jax.block_until_ready((jax.tree.map(jnp.copy, state), batch))
    resident = sum(x.nbytes for x in jax.tree.leaves((state, batch)))
    ctypes.CDLL(None).malloc_trim(0)  # or the step would take what the compiler gave back
    before = status()["VmRSS"]
    Path("/proc/self/clear_refs").write_text("5")
    for _ in range(2):
        state, _ = jax.block_until_ready(jitted(state, batch))
    print(json.dumps(status()["VmHWM"] - before + resident))


def in_a_process(*arguments: str):
    """What this file prints with these arguments, in a separate process; or the last line of its error."""
    command = [sys.executable, "-m", "benchmarks.planning", *arguments]
    ran = subprocess.run(command, capture_output=True, text=True)
    return json.loads(ran.stdout.splitlines()[-1]) if not ran.returncode else ran.stderr.splitlines()[-1]


def memory() -> None:
    rows = []
    for name in sorted(path.stem for path in PORTS.glob("*.py")):
        answer = in_a_process("--need", name)
        grown = answer if isinstance(answer, str) else in_a_process("--growth", name, str(answer[0]))
        if isinstance(grown, str):
            note(f"{name}: {grown}")
            continue
        factor, needed = answer
        rows.append((name, factor, needed / 1e6, grown / 1e6, needed / grown))
        print(rows[-1], flush=True)
    near = sum(abs(row[-1] - 1) <= 0.15 for row in rows)
    head = ("port", "rows x", "plan MB", "growth MB", "plan / growth")
    table("bytes of a step, each in a separate process", rows, head)
    note(f"within 15 %: {near} of {len(rows)} ports")


def problems():
    """(name, step, state, batch) of searches over micro-batches and remat."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(1024, 64)).astype(np.float32), rng.integers(10, size=1024)
    yield "MLP", ts.train_step(mlp_loss), ts.setup(ts.rules.adam(1e-3), mlp([64, 2048, 64, 2048, 10])), (x, y)
    graphdef, params = nnx.split(gpt.GPT(128, 2, nnx.Rngs(0)), nnx.Param)

    def loss_fn(params, rows):
        logits = nnx.merge(graphdef, params)(rows[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:]).mean()

    tokens = rng.integers(256, size=(16, 129)).astype(np.int32)
    yield "GPT", ts.train_step(loss_fn), ts.setup(ts.rules.adam(1e-3), params), tokens
    step, state, (images, labels) = captured("vit")
    step = dataclasses.replace(step, check_rows=False)  # the first call would compile the comparison of rows
    yield "ViT", step, state, (np.concatenate([images] * 2)[:64], np.concatenate([labels] * 2)[:64])


def speed(folder: str) -> None:
    jax.config.update("jax_compilation_cache_dir", folder)  # the searches of a problem share candidates
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    rows = []
    for name, step, state, batch in problems():
        shapes, size = jax.eval_shape(lambda state=state: state), rows_of(batch)
        options = {"margin": 0.0, "vary": ("accumulate", "remat")}
        search = functools.partial(ts.plan, step, shapes, batch, size, **options)
        candidates = {repr(row): row for row in search(memory=1 << 40).rows}
        needs, bursts = {}, {}
        for key, row in candidates.items():
            needs[key] = _memory.need_in(row.step.lower(state, batch).compile(), state, batch).total
            bursts[key] = burst_of(row.step, jax.tree.map(jnp.copy, state), batch)
        times = {key: [] for key in candidates}
        for _ in range(9):
            for key, burst in bursts.items():
                start = time.process_time()
                burst()
                times[key].append(time.process_time() - start)
        seconds = {key: min(values) for key, values in times.items()}
        for share in (0.05, 0.3, 0.6, 0.95):
            limit = sorted(needs.values())[int(share * len(needs))]
            report = search(memory=limit)
            best = min(seconds[key] for key in needs if needs[key] <= limit)
            worst = max(seconds[key] for key in needs if needs[key] <= limit)
            compiled_count = sum(not row.reason for row in report.rows)
            ratio = seconds[repr(report.best)] / best
            rows.append(
                (f"{name}, {limit / 1e6:.0f} MB", len(needs), compiled_count, repr(report.best), ratio, worst / best)
            )
            print(rows[-1], flush=True)
    head = ("search", "candidates", "compiled", "chosen", "x fastest", "slowest x fastest")
    table("the choice of `plan`, in measured CPU seconds over the fastest candidate that fits", rows, head)
    differing = [row for row in rows if row[-1] > 1.1]
    near, third = sum(row[-2] <= 1.1 for row in differing), sum(row[2] <= row[1] / 3 for row in rows)
    note(f"at most 1.1 x the fastest: {near} of {len(differing)} searches whose candidates differ by more than 10 %")
    note(f"at most a third of the candidates compiled: {third} of {len(rows)} searches")


def burst_of(step, state, batch):
    held = [state]

    def burst():
        held[0], _ = jax.block_until_ready(step(held[0], batch))

    burst()
    return burst


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks planning", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--part", choices=["memory", "speed"], help="measure this part only")
    options, _ = parser.parse_known_args()
    if options.part != "speed":
        memory()
        save("planning")
    if options.part != "memory":
        with tempfile.TemporaryDirectory() as folder:
            speed(folder)
        save("planning-choice")


if __name__ == "__main__":
    if "--need" in sys.argv:
        need(sys.argv[-1])
    elif "--growth" in sys.argv:
        growth(sys.argv[-2], int(sys.argv[-1]))
    else:
        main()
