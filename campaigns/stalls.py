"""Stalls of runs of `fit`, of five kinds: does the watchdog say what the run waits for, once?

python -m campaigns.stalls --count 100
"""

import argparse
import collections
import functools
import itertools
import json
import platform
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tsunax as ts

HERE = Path(__file__).parent
AFTER = 0.25  # seconds until a stall is told
SECONDS = 1.5  # the length of a stall; on a busy machine the watchdog looks late
STEPS = 6
WORDS = {
    "data": "data",
    "device": "the device",
    "trace": "compilation",
    "compile": "compilation",
    "evaluation": "evaluation (slow_evaluation)",
    "save": "a save",
}


def spin(n: jax.Array) -> jax.Array:
    """About n nanoseconds of work that XLA cannot leave out."""
    return jax.lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, jnp.sin(c[1])), (0, jnp.float32(1)))[1]


def loss_fn(params, batch):
    spun = jax.lax.stop_gradient(spin(jnp.max(batch["n"])))
    return jnp.mean((batch["x"] - params["w"][None]) ** 2) + 0 * spun


step = ts.train_step(loss_fn)
numbers = itertools.count(1)  # each program that is compiled for a stall is another one


@functools.cache
def turns() -> int:
    """Turns of `spin` in `SECONDS`."""
    timed, n, seconds = jax.jit(spin), 1 << 22, []
    for _ in range(4):  # the first call compiles; the fastest is of no busy moment
        start = time.perf_counter()
        timed(n).block_until_ready()
        seconds.append(time.perf_counter() - start)
    return int(SECONDS / min(seconds) * n)


def batches(kind: str) -> Iterator[dict[str, np.ndarray]]:
    for i in range(STEPS):
        is_slow = i == STEPS // 2
        if kind == "data" and is_slow:
            time.sleep(SECONDS)
        n = turns() if kind == "device" and is_slow else 1
        yield {"x": np.ones((4, 3), np.float32), "n": np.full(4, n, np.int32)}


def slow_trace(params, batch):
    time.sleep(SECONDS)
    return loss_fn(params, batch)


def slow_compile(number: int, params, batch):
    x = params["w"]
    for i in range(60):  # a program that takes XLA long, and no time to run
        x = jnp.sort(jnp.sin(x + i)) * number
    return loss_fn(params, batch) + 0 * jax.lax.stop_gradient(jnp.sum(x))


def slow_evaluation(state) -> dict[str, float]:
    time.sleep(SECONDS)
    return {"val/loss": 1.0}


def run(kind: str, folder: str, **options: Any) -> ts.loop.History:
    """A run that stands still once."""
    train = step
    if kind in ("trace", "compile"):
        number = next(numbers)
        train = ts.train_step(lambda params, batch: (
            slow_trace(params, batch) if kind == "trace" else slow_compile(number, params, batch)
        ))  # fmt: skip
    if kind == "evaluation":
        options |= {"evaluate": slow_evaluation}
    state = ts.setup(ts.rules.sgd(0.1), {"w": jnp.zeros(3)})
    fit = functools.partial(ts.fit, train, state, batches(kind), steps=STEPS, progress=False)
    if kind != "save":
        return fit(**options)[1]
    with ts.Checkpoints(folder) as checkpoints:
        write = checkpoints.home.write
        checkpoints.home.write = lambda *args, **how: time.sleep(SECONDS) or write(*args, **how)
        return fit(**options, checkpoint=checkpoints, fast_forward=True)[1]


def stalls(kind: str, after: Any = AFTER) -> list[str]:
    """The texts of the stalls that the watchdog of such a run tells."""
    events: list[tuple[str, str]] = []
    tell = lambda event, text, row: events.append((event, text))
    with tempfile.TemporaryDirectory() as folder:
        run(kind, folder, callbacks=ts.callbacks.watchdog(after=after, tell=tell))
    return [text for event, text in events if event == "stall"]


def is_named(kind: str, texts: list[str]) -> bool:
    """Whether there is one stall, and its text has the reason."""
    return len(texts) == 1 and f" s for {WORDS[kind]}, after step" in texts[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--results", type=Path, default=HERE / "results" / "counts.jsonl")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run("", folder)  # compiles the program of all runs but those of the compiler
    turns()
    counts: collections.Counter = collections.Counter()
    kinds = itertools.cycle(["data", "device", "trace", "evaluation", "save"] * 2)
    for i, kind in enumerate(itertools.islice(kinds, args.count)):
        kind = "compile" if kind == "trace" and i % 10 > 4 else kind
        texts = stalls(kind)
        counts[f"{kind} {'named' if (is_right := is_named(kind, texts)) else 'wrong'}"] += 1
        if not is_right:
            print(f"  {i}: {kind} was told as {texts}", flush=True)
    right = sum(n for name, n in counts.items() if name.endswith("named"))
    print(f"named rightly: {right} of {args.count}  {dict(counts)}")
    about = {"what": "stalls", "jax": jax.__version__, "python": platform.python_version()}
    about["date"] = time.strftime("%Y-%m-%d")
    with args.results.open("a") as file:
        file.write(json.dumps(about | {"named rightly": right, "counts": dict(counts)}) + "\n")
    raise SystemExit(right < args.count)


if __name__ == "__main__":
    main()
