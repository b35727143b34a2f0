"""What the searches find against memory as it is used, and how long they take beside Lightning's tuner.

    python -m benchmarks search             # Lightning in .peers/, as for `loop`
    python -m benchmarks search --no-peers

Resident memory is that of a process of its own: what it grows by while the step runs at the size found, and the state.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tsunax as ts
from examples import gpt
from flax import nnx
from tsunax.insight.batch_size import find_batch_size
from tsunax.insight.learning_rate import _Ramp

from benchmarks._common import copied, interleave, mlp, mlp_loss, note, ratio, save, table
from benchmarks.loop import environment

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 1 << 30
MODELS = ("mlp", "cnn", "gpt", "gpt, accumulate=4", "gpt, remat", "mlp, sharded over 4")


def made(name: str):
    """`(step, state, one row)` of a model, and the multiple that its sizes have."""
    kind, _, option = name.partition(", ")
    if kind == "mlp":
        params, loss_fn = mlp([512, 2048, 2048, 512]), lambda params, x: jnp.mean((_forward(params, x) - x) ** 2)
        row, unit = jnp.zeros((1, 512)), 256
    elif kind == "cnn":
        net = nnx.Sequential(
            nnx.Conv(3, 64, (3, 3), rngs=nnx.Rngs(0)), nnx.relu, nnx.Conv(64, 128, (3, 3), rngs=nnx.Rngs(1)), nnx.relu
        )
        graphdef, params = nnx.split(net, nnx.Param)
        loss_fn = lambda params, x: jnp.mean(nnx.merge(graphdef, params)(x) ** 2)
        row, unit = jnp.zeros((1, 32, 32, 3)), 8
    else:
        graphdef, params = nnx.split(gpt.GPT(384, 6, nnx.Rngs(0)), nnx.Param)
        row, unit = jnp.zeros((1, 129), jnp.int32), 4

        def loss_fn(params, rows):
            logits = nnx.merge(graphdef, params)(rows[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:]).mean()

    more = {"accumulate=4": {"accumulate": 4}, "remat": {"remat": "dots_saveable"}}.get(option, {})
    state = ts.setup(ts.rules.adam(1e-3), params)
    if "sharded" in option:
        state = ts.shard(state, ts.mesh(data=1, fsdp=4))
    return ts.train_step(loss_fn, **more), state, row, unit


def _forward(params, x):
    for w, b in params[:-1]:
        x = jax.nn.relu(x @ w + b)
    return x @ params[-1][0] + params[-1][1]


def status() -> dict[str, int]:
    lines = Path("/proc/self/status").read_text().splitlines()
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith("Vm")}


def resident(name: str, size: int) -> None:
    """Prints the bytes that a process takes for a step of this size, the state included."""
    if "sharded" in name:
        ts.devices.simulate(4)
    step, state, row, _ = made(name)
    batch = np.repeat(np.asarray(row), size, 0)
    held = sum(x.nbytes for x in jax.tree.leaves(state))
    step.lower(state, batch).compile()  # what the compiler takes is not the step's
    now = lambda field: status()[field]
    before = now("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    for _ in range(2):
        state, _ = step(state, batch)
        jax.block_until_ready(state.params)
    print(json.dumps(now("VmHWM") - before + held))


def accuracy() -> None:
    rows = []
    for name in MODELS:
        command = [sys.executable, "-m", "benchmarks.search", "--found", name]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
        command = [sys.executable, "-m", "benchmarks.search", "--resident", name, str(found["size"])]
        used = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
        need = found["need"] * found["devices"]
        rows.append((name, found["size"], found["compiles"], found["seconds"], need / 2**20, used / 2**20, used / need))
    head = ("model", "size", "compiles", "s", "need MiB", "resident MiB", "resident / need")
    table("within 1 GiB, no margin; each in a process of its own", rows, head)


def found(name: str) -> None:
    if "sharded" in name:
        ts.devices.simulate(4)
    step, state, row, unit = made(name)
    devices, began = 4 if "sharded" in name else 1, time.perf_counter()
    options = dict(mode="binsearch", multiple_of=unit, memory=LIMIT // devices, margin=0.0)
    size, report = find_batch_size(step, state, row, **options)
    need = next(t.need.total for t in report.trials if t.size == size)
    seconds = time.perf_counter() - began
    print(json.dumps(dict(size=size, need=need, devices=devices, compiles=len(report.trials), seconds=seconds)))


def beside_lightning(rounds: int = 3) -> None:
    """The same GPT, by turns; in torch the limit is that of the address space, since on a CPU nothing else raises."""
    rows = []
    for mode in ("power", "binsearch"):
        script = [ROOT / "benchmarks" / "_peers" / "tuner.py", mode]
        contenders = {
            f"tsunax, {mode}": (ROOT, [sys.executable, "-c", f"from benchmarks.search import *; beside({mode!r})"]),
            f"Lightning, {mode}": (ROOT / ".peers", [environment("lightning"), *script]),
        }
        runs: dict[str, list] = {name: [] for name in contenders}
        for _ in range(rounds):
            for name, (folder, command) in contenders.items():
                ran = subprocess.run(command, capture_output=True, text=True, cwd=folder)
                if ran.returncode:
                    note(f"{name} ended with {ran.returncode}: {(ran.stderr.strip() or 'no word').splitlines()[-1]}")
                else:
                    runs[name].append(json.loads(ran.stdout.splitlines()[-1]))
        for name, found in runs.items():
            if not found:
                continue
            seconds = sorted(s for s, _, _ in found)
            size, trials = (sorted(n[k] for n in found)[len(found) // 2] for k in (1, 2))
            rows.append((name, seconds[0], seconds[len(seconds) // 2], seconds[-1], size, trials))
    title = f"GPT of 4 layers of 192, 128 bytes a row, 1 GiB beyond the state; seconds of {rounds} runs, by turns"
    table(title, rows, ("", "low", "median", "high", "size", "trials"))


def beside(mode: str) -> None:
    graphdef, params = nnx.split(gpt.GPT(192, 4, nnx.Rngs(0)), nnx.Param)

    def loss_fn(params, rows):
        logits = nnx.merge(graphdef, params)(rows[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:]).mean()

    step, state = ts.train_step(loss_fn), ts.setup(ts.rules.adam(1e-3), params)
    memory = LIMIT + sum(x.nbytes for x in jax.tree.leaves(state))
    jax.block_until_ready(jnp.zeros(3) + 1)
    began = time.perf_counter()
    size, report = find_batch_size(step, state, jax.ShapeDtypeStruct((1, 129), jnp.int32), mode=mode, memory=memory)
    print(json.dumps([time.perf_counter() - began, size, len(report.trials)]))


def range_test(rounds: int = 9) -> None:
    """A hundred steps of a range test over a hundred plain ones, in the same compiled loop."""
    x, y = np.random.default_rng(0).normal(size=(100, 256, 64)).astype(np.float32), np.zeros((100, 256), np.int32)
    step, ramp = ts.train_step(mlp_loss), (np.float32(1e-6), np.float32(0.1), np.int32(0))
    rising, batches = _Ramp(step, "learning_rate", "exponential"), jax.device_put((x, y))

    def bursts(step, **extra):
        held = [ts.setup(ts.rules.adam(1e-3), copied(mlp([64, 512, 512, 10])))]

        def burst(n):
            for _ in range(n):
                held[0], _ = ts.loop.run_steps(step, held[0], batches, **extra)
            jax.block_until_ready(held[0].params)

        return burst

    times = interleave({"plain": bursts(step), "rising": bursts(rising, ramp=ramp)}, rounds=rounds, steps=1)
    found = ratio(times, "rising", "plain")
    table(
        "100 steps of a range test over 100 plain ones",
        [("ratio", *found, "<= 1.1")],
        ("", "low", "median", "high", ""),
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks search", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--no-peers", action="store_true", help="leave Lightning out")
    options, _ = parser.parse_known_args()
    accuracy()
    range_test()
    if not options.no_peers:
        beside_lightning()
    save("search")


if __name__ == "__main__":
    if "--found" in sys.argv:
        found(sys.argv[-1])
    elif "--resident" in sys.argv:
        resident(sys.argv[-2], int(sys.argv[-1]))
    else:
        main()
