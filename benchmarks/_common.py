"""Interleaved timing: contenders take turns in short bursts, and only ratios of one round are compared.

A machine that others use too changes its speed from second to second; a ratio within one round hardly does.
"""

import json
import platform
import statistics
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

RESULTS = Path(__file__).parent / "results"
_shown: list[dict] = []  # tables and notes since the last save


def interleave(contenders, *, rounds: int, steps: int, clock=time.perf_counter) -> dict[str, list[float]]:
    """Microseconds a step of each contender, per round; `contenders` are `name -> burst(steps)`.

    With `clock=time.process_time` of all threads of this process: a busy machine does not count.
    """
    for burst in contenders.values():
        burst(5)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for i in range(rounds):
        for name in list(contenders)[:: 1 if i % 2 else -1]:
            start = clock()
            contenders[name](steps)
            times[name].append((clock() - start) / steps * 1e6)
    return times


def ratio(times, name: str, floor: str) -> tuple[float, float, float]:
    """Quartiles of the ratio of two contenders, round by round."""
    low, middle, high = statistics.quantiles([a / b for a, b in zip(times[name], times[floor], strict=True)], n=4)
    return low, middle, high


def cells_of(head, rows) -> list[list[str]]:
    """A table's texts, its head first."""
    return [[f"{x:.3f}" if isinstance(x, float) else str(x) for x in row] for row in [head, *rows]]


def table(title: str, rows: list[tuple], head: tuple) -> None:
    _shown.append({"title": title, "head": head, "rows": rows})
    cells = cells_of(head, rows)
    width = [max(len(row[i]) for row in cells) for i in range(len(head))]
    print(f"\n{title}")
    for row in cells:
        print(
            "  "
            + "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, width, strict=True)))
        )


def note(text: str) -> None:
    """A line that belongs to the results."""
    _shown.append({"note": text})
    print(f"  {text}", flush=True)


def save(name: str) -> None:
    """Writes what `table` and `note` showed since the last time; `report` makes RESULTS.md of all these files."""
    about = {"jax": jax.__version__, "optax": optax.__version__, "python": platform.python_version()}
    about |= {"device": jax.devices()[0].device_kind, "machine": platform.machine(), "date": time.strftime("%Y-%m-%d")}
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}-jax{jax.__version__}.json"
    path.write_text(json.dumps({"about": about, "shown": _shown}, indent=1) + "\n")
    _shown.clear()
    print(f"  -> {path.relative_to(RESULTS.parent.parent)}", flush=True)


def mlp(sizes, seed=0):
    keys = jax.random.split(jax.random.key(seed), len(sizes))
    return [
        (jax.random.normal(k, (a, b)) / a**0.5, jnp.zeros(b)) for k, a, b in zip(keys, sizes, sizes[1:], strict=False)
    ]


def mlp_loss(params, batch):
    x, y = batch
    for w, b in params[:-1]:
        x = jax.nn.relu(x @ w + b)
    w, b = params[-1]
    return optax.softmax_cross_entropy_with_integer_labels(x @ w + b, y).mean()


def batch_of(rows, features, classes=10):
    x = jax.random.normal(jax.random.key(1), (rows, features))
    return x, jax.random.randint(jax.random.key(2), (rows,), 0, classes)


def copied(tree):
    return jax.tree.map(lambda x: jnp.array(x, copy=True), tree)
