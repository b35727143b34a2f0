"""`fit` over the loops that one writes by hand, and over other libraries', each in an environment of its own.

    python -m benchmarks loop               # makes .peers/ the first time: 3 GB and some minutes
    python -m benchmarks loop --no-peers
    python -m benchmarks loop --long        # and 100,000 steps: memory, threads, open files

Everyone takes turns of many steps; a turn of `fit`, or of another library's, is one call, and its cost is in it. By
hand, loops compute both norms, the finite check and the select, as tsunax's step does; "bare" ones, and the GPT's plain
one, the loss alone, as other libraries do.
"""

import argparse
import contextlib
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tsunax as ts
from examples import gpt
from flax import nnx

from benchmarks import convolutions
from benchmarks._common import copied, mlp, mlp_loss, note, ratio, save, table
from benchmarks._peers._protocol import BATCHES, ROWS, data, ready_batches
from benchmarks.data import by_numpy
from benchmarks.step import TX, guarded, same_info, unguarded

ROOT = Path(__file__).resolve().parents[1]
PEERS = ROOT / ".peers"
HEAD = ("contender", "us/step", "x low", "x median", "x high")


# -------------------------------------------------------------------------------------------------------------- turns


def turns(contenders, rounds: int) -> dict[str, list[float]]:
    """Microseconds per step, by round; `contenders` are `name -> (burst, steps of a turn)`.

    A burst that answers gives its own microseconds per step; of the others the time is taken here.
    """
    for burst, steps in contenders.values():
        burst(steps)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for i in range(rounds):
        for name in list(contenders)[:: 1 if i % 2 else -1]:
            burst, steps = contenders[name]
            start = time.perf_counter()
            told = burst(steps)
            times[name].append((time.perf_counter() - start) / steps * 1e6 if told is None else told)
    return times


def compare(title: str, contenders, floor: str, targets, *, rounds: int) -> None:
    """Prints the table over `floor`, and `targets`: (contender, over which other one, at most)."""
    before = os.getloadavg()[0]
    times = turns(contenders, rounds)
    found = {name: (statistics.median(us), *ratio(times, name, floor)) for name, us in times.items()}
    table(f"{title}; x over {floor}", [(name, *numbers) for name, numbers in found.items()], HEAD)
    held = [(f"{a} / {b}", *ratio(times, a, b), f"<= {most:g}", verdict(times, a, b, most)) for a, b, most in targets]
    table("targets", held, ("ratio", "low", "median", "high", "target", ""))
    loads = before, os.getloadavg()[0]
    note(f"{rounds} rounds; load of the machine before and after: {loads[0]:.1f}, {loads[1]:.1f}")


def verdict(times, a: str, b: str, most: float) -> str:
    return "reached" if ratio(times, a, b)[1] <= most else "MISSED"


# ---------------------------------------------------------------------------------------------------------- contenders


def by_loop(step, params, batches):
    """A Python loop over ready batches, again and again, or over an iterator of them."""
    held, stream = [copied(params)], itertools.cycle(batches) if isinstance(batches, list) else batches
    held.append(TX.init(held[0]))

    def burst(n):
        params, opt_state = held
        for batch in itertools.islice(stream, n):
            params, opt_state, _ = step(params, opt_state, batch)
        jax.block_until_ready(params)
        held[:] = params, opt_state

    return burst


def by_scan(step, params, chunk: int, stream, xs_of=lambda x: x, batch_of=lambda arrays, x: x, arrays=None):
    """A `lax.scan` of `chunk` steps a call: over `xs_of(next(stream))`, with `batch_of(arrays, x)` for batches."""
    held = [(copied(params), TX.init(params))]

    @partial(jax.jit, donate_argnums=0)
    def run(carry, arrays, x):
        def one(carry, x):
            *carry, info = step.__wrapped__(*carry, batch_of(arrays, x))
            return tuple(carry), info

        return jax.lax.scan(one, carry, xs_of(x))

    def burst(n):
        for x in itertools.islice(stream, n // chunk):
            held[0], infos = run(held[0], arrays, x)
        jax.block_until_ready((held[0], infos))

    return burst


def by_fit(step, state, data, *, logged: bool = False, **options):
    """`fit`; `logged` with a file of rows and lines of progress, which nobody reads."""
    held, reached, files = [state], [0], itertools.count()
    folder = tempfile.TemporaryDirectory(prefix="tsunax-benchmark-") if logged else None

    def burst(n):
        reached[0] += n
        logger = ts.loggers.jsonl(Path(folder.name) / f"{next(files)}.jsonl") if folder else ()
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            held[0], _ = ts.fit(step, held[0], data, steps=reached[0], logger=logger, progress=logged, **options)
        jax.block_until_ready(held[0].params)

    return burst


# --------------------------------------------------------------------------------------------------------------- peers


def requirements(script: Path) -> list[str]:
    """What a script's own head asks for (inline script metadata, PEP 723)."""
    found = re.search(r"(?m)^# /// script$\n((?:^#.*$\n)+?)^# ///$", script.read_text(encoding="utf-8"))
    assert found, f"no requirements in {script}"
    about = tomllib.loads(re.sub(r"(?m)^# ?", "", found[1]))
    return [*about["dependencies"], *about.get("tool", {}).get("benchmarks", {}).get("pip", [])]


def script_of(name: str) -> Path:
    return ROOT / "benchmarks" / "_peers" / f"with_{name}.py"


def environment(name: str) -> Path:
    """The Python of a peer's environment, which is made where it is missing or its requirements are others.

    pip must find torch's CPU wheel, which is not on PyPI: set PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS.
    """
    home, wanted = PEERS / name, requirements(script_of(name))
    python, stamp = home / "bin" / "python", home / "requirements.json"
    if not stamp.exists() or json.loads(stamp.read_text()) != wanted:
        print(f"  making .peers/{name}: {' '.join(wanted)}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", home], check=True, capture_output=True, text=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *wanted], check=True, capture_output=True, text=True, cwd=ROOT)
        stamp.write_text(json.dumps(wanted))
    return python


def peer(stack: contextlib.ExitStack, name: str, kind: str):
    """A burst that another process runs."""
    python, said = environment(name), PEERS / f"{name}, {kind}.log"
    with open(said, "w") as log:
        process = subprocess.Popen(
            [python, script_of(name), kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        )
    stack.callback(process.wait)
    stack.callback(process.stdin.close)

    def answer() -> str:
        line = process.stdout.readline()
        if not line:
            raise RuntimeError((said.read_text().strip().splitlines() or ["ended without a word"])[-1])
        return line

    def burst(n):
        process.stdin.write(f"{n}\n")
        process.stdin.flush()
        return float(answer())

    answer()  # ready
    return burst


OTHERS = {  # name: environment, kind, steps of a turn
    "Keras on JAX, 50 steps an execution": ("keras", "fused", 4000),
    "Keras on JAX": ("keras", "plain", 1000),
    "Lightning": ("lightning", "fit", 500),
    "Flax NNX, nnx.jit": ("flax", "nnx.jit", 500),
    "Flax NNX, split and merge in jax.jit": ("flax", "split and merge", 2000),
    "equinox, filter_jit, donated": ("equinox", "filter_jit", 1000),
    "torch": ("torch", "plain", 1000),
    "torch, fused Adam": ("torch", "fused", 1000),
}


def others(stack: contextlib.ExitStack) -> dict:
    """Peers as contenders; those that are missing are named."""
    there = {}
    PEERS.mkdir(exist_ok=True)
    (PEERS / ".gitignore").write_text("*\n")
    for name, (where, kind, steps) in OTHERS.items():
        try:
            there[name] = (peer(stack, where, kind), steps)
        except subprocess.CalledProcessError as error:
            note(f"{name} is not measured: {(error.stderr.strip().splitlines() or [error])[-1]}")
        except (RuntimeError, OSError) as error:
            note(f"{name} is not measured: {error}")
    return there


def from_a_dataloader() -> None:
    """Train from a torch DataLoader, where torch is."""
    try:
        script = ROOT / "benchmarks" / "_peers" / "dataloader.py"
        done = subprocess.run([environment("torch"), script], check=True, capture_output=True, text=True)
        said = done.stdout.strip()
    except subprocess.CalledProcessError as error:
        said = f"FAILED: {(error.stderr.strip().splitlines() or [error])[-1]}"
    note(f"a training from a torch DataLoader, and from a list of its batches: {said}")


# --------------------------------------------------------------------------------------------------------------- cases


def tiny(peers: bool, rounds: int = 15) -> None:
    """An MLP of 64-64-10 numbers, batches of 32, Adam."""
    params, step = mlp([64, 64, 10]), ts.train_step(mlp_loss)
    state = lambda: ts.setup(ts.rules.adam(1e-3), params)
    shuffled = partial(ts.batches, data(), ROWS, shuffle=True, seed=0)

    ready, rng = ready_batches(), np.random.default_rng(0)
    stacked = jax.tree.map(lambda *x: np.stack(x), *ready)
    chunks = [jax.device_put(jax.tree.map(lambda x, i=i: x[i : i + 100], stacked)) for i in range(0, BATCHES, 100)]
    keys = (jax.random.key(rng.integers(1 << 31)) for _ in itertools.count())
    orders = (rng.permutation(BATCHES * ROWS).astype(np.int32).reshape(BATCHES, ROWS) for _ in itertools.count())
    order_of = lambda key: jax.random.permutation(key, BATCHES * ROWS).reshape(BATCHES, ROWS)
    resident = {
        "batch_of": lambda arrays, rows: jax.tree.map(lambda x: x[rows], arrays),
        "arrays": jax.device_put(data()),
    }

    contenders = {
        "scan by hand": (by_scan(same_info, params, 100, itertools.cycle(chunks)), 10_000),
        "scan by hand, bare": (by_scan(unguarded(mlp_loss), params, 100, itertools.cycle(chunks)), 10_000),
        "loop by hand": (by_loop(same_info, params, ready), 5000),
        "loop by hand, bare": (by_loop(unguarded(mlp_loss), params, ready), 5000),
        "loop by hand, batches on the device": (by_loop(same_info, params, jax.device_put(ready)), 5000),
        "fit": (by_fit(step, state(), shuffled(), logged=True), 10_000),
        "fit, no logger, no progress": (by_fit(step, state(), shuffled()), 10_000),
        "fit, a step a call": (by_fit(step, state(), shuffled(), logged=True, steps_per_call=1), 5000),
        "epochs by hand": (by_scan(same_info, params, BATCHES, keys, order_of, **resident), 10 * BATCHES),
        "epochs by hand, order from NumPy": (by_scan(same_info, params, BATCHES, orders, **resident), 10 * BATCHES),
        "fit, resident": (by_fit(step, state(), shuffled(device=True), logged=True), 10 * BATCHES),
    }
    targets = [
        ("fit", "scan by hand", 1.10),
        ("fit", "scan by hand, bare", 1.15),
        ("fit, a step a call", "loop by hand", 1.15),
        ("fit, a step a call", "loop by hand, bare", 1.20),
        ("fit, a step a call", "loop by hand, batches on the device", 1.15),
        ("fit, resident", "epochs by hand", 1.05),
        ("fit, resident", "epochs by hand, order from NumPy", 1.05),
    ]
    with contextlib.ExitStack() as stack:
        there = others(stack) if peers else {}
        title = "tiny MLP 64-64-10, batches of 32, Adam; fit with logger and progress; by hand the same, or bare"
        compare(title, contenders | there, "scan by hand", targets, rounds=rounds)


def convolutional(rounds: int = 9) -> None:
    """Convolutions are slow in a loop of XLA's on CPU, unless somebody brings them into another layout."""
    params, xs, loss_fn = convolutions.model(convolutions.LAST[2], 64, (32, 32), (3, 32, 32, 32), 1)
    batches, step = list(np.asarray(xs)), ts.train_step(loss_fn)
    contenders = {
        "loop by hand": (by_loop(guarded(jax.value_and_grad(loss_fn)), params, batches), 8),
        "fit": (by_fit(step, ts.setup(ts.rules.adam(1e-3), params), batches, logged=True), 8),
    }
    title = "three 3x3 convolutions, 64 x 32 x 32 x 3, Adam"
    compare(title, contenders, "loop by hand", [("fit", "loop by hand", 1.0)], rounds=rounds)


def transformer(rounds: int = 9) -> None:
    """The model of examples/gpt.py at its small size, in float32."""
    size, (train, _) = gpt.SIZES["small"], gpt.load()
    graphdef, params = nnx.split(gpt.GPT(size["width"], size["depth"], nnx.Rngs(0)), nnx.Param)

    def loss_fn(params, rows):
        logits = nnx.merge(graphdef, params)(rows[:, :-1].astype(jnp.int32))
        return optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:].astype(jnp.int32)).mean()

    starts = np.random.default_rng(0).integers(0, len(train) - size["context"], (8, size["batch"], 1))
    batches, step = list(train[starts + np.arange(size["context"] + 1)]), ts.train_step(loss_fn)
    contenders = {
        "loop by hand": (by_loop(unguarded(loss_fn), params, batches), 4),
        "loop by hand, same info": (by_loop(guarded(jax.value_and_grad(loss_fn)), params, batches), 4),
        "fit": (by_fit(step, ts.setup(ts.rules.adam(1e-3), params), batches, logged=True), 4),
    }
    targets = [("fit", "loop by hand", 1.02), ("fit", "loop by hand, same info", 1.02)]
    title = f"GPT of {size['depth']} layers of {size['width']}, {size['batch']} x {size['context']} bytes, Adam"
    compare(title, contenders, "loop by hand", targets, rounds=rounds)


def rows(rounds: int = 9, size: int = 128) -> None:
    """A million small records in memory, shuffled, and a step with little to do."""
    arrays = {"x": np.random.default_rng(0).random((1_000_000, 8), np.float32)}
    arrays["y"] = arrays["x"].sum(1)
    params = {"w": jnp.zeros(8)}
    loss_fn = lambda params, batch: jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)
    step, shuffled = ts.train_step(loss_fn), partial(ts.batches, arrays, size, shuffle=True, seed=0)
    fitting = lambda data, **options: by_fit(step, ts.setup(ts.rules.adam(1e-3), params), data, **options)
    by_hand = itertools.chain.from_iterable(by_numpy(arrays, size)() for _ in itertools.count())
    contenders = {
        "fit": (fitting(shuffled()), 20_000),
        "fit, resident": (fitting(shuffled(device=True)), 40_000),
        "fit, a step a call": (fitting(shuffled(), steps_per_call=1), 10_000),
        "loop and indexing by hand": (by_loop(guarded(jax.value_and_grad(loss_fn)), params, by_hand), 5000),
    }
    times = turns(contenders, rounds)
    least = {"fit": 5.0, "fit, resident": 5.0, "fit, a step a call": 2.0}
    found = {}
    for name, us in times.items():
        low, middle, high = statistics.quantiles([size / x for x in us], n=4)
        target = (
            (f">= {least[name]:g}", "reached" if middle >= least[name] else "MISSED") if name in least else ("", "")
        )
        found[name] = (low, middle, high, *target)
    title = f"a million rows of 9 numbers, batches of {size}, Adam: million examples/s"
    table(title, [(name, *numbers) for name, numbers in found.items()], ("", "low", "median", "high", "target", ""))


def long(steps: int = 100_000) -> None:
    """What a process holds after 10, 50 and 100 % of many steps."""
    count = lambda what: len(os.listdir(f"/proc/self/{what}"))
    resident = lambda: int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    for name, per_call in {"fused": "auto", "a step a call": 1}.items():
        seen: dict[int, tuple] = {}
        look = lambda run, seen=seen: seen.update({run.step: (resident(), count("task"), count("fd"))})
        state = ts.setup(ts.rules.adam(1e-3), mlp([64, 64, 10]))
        arrays = ts.batches(data(), ROWS, shuffle=True, seed=0)
        watch = ts.callbacks.every(steps // 10, look)
        by_fit(ts.train_step(mlp_loss), state, arrays, logged=True, callbacks=watch, steps_per_call=per_call)(steps)
        shown = [(f"{name}, step {at}", *seen[at]) for at in (steps // 10, steps // 2, steps)]
        table("100,000 steps of the tiny MLP", shown, ("", "MiB", "threads", "open files"))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks loop", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--no-peers", action="store_true", help="leave the other libraries out")
    parser.add_argument("--long", action="store_true", help="also 100,000 steps: memory, threads, open files")
    options, _ = parser.parse_known_args()
    if options.long:
        long()
    tiny(not options.no_peers)
    convolutional()
    transformer()
    rows()
    if not options.no_peers:
        from_a_dataloader()
        for name in dict.fromkeys(where for where, *_ in OTHERS.values()):
            note(f"{name}: {', '.join(x for x in requirements(script_of(name)) if '==' in x)}")
    save("loop")


if __name__ == "__main__":
    main()
