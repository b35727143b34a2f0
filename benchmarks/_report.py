"""`RESULTS.md`: every table of `results/`, as it was printed, with what it was measured on and what it should reach.

Nothing is judged here and nothing left out: a row that misses its target stands beside one that does not.
"""

import importlib
import inspect
import json

from benchmarks._common import RESULTS, cells_of

TARGETS = {  # what each has to reach; `x` is over the contender named in the table
    "recompiles": "no edit but the first cut and the first freeze compiles",
    "selection": "FLOPs and optimizer bytes of the two-layer problem",
    "step": "same info x <= 1.05, bare x <= 1.05; 200 leaves also <= 1.2 to compile",
    "rules": "a live rule <= 1.05 x plain optax",
    "convolutions": "a compiled loop no slower than a Python loop",
    "accumulate": "temporary memory of one micro-batch and one f32 gradient",
    "precision": "norms and guard x <= 1.05",
    "remat": "what XLA:CPU makes of each policy; no target",
    "data": "at least NumPy's fancy indexing; prefetch hides 90 %",
    "loop": "beside each table",
    "checkpoint": "blocks <= 1.2 x a host copy; save and restore <= 1.10 x orbax",
    "sharding": "x <= 1.05",
    "population": "population <= 1.1 x the vmapped scan, and no slower than 32 runs in turn",
    "search": "the size found is right; faster than Lightning's power, >= 4 x its binsearch; range test <= 1.1",
    "insight": "products within 2 % of a hand count",
    "importing": "x <= 1.15",
}
HEAD = """# Results

Written by `python -m benchmarks` from `benchmarks/results/`. Contenders take turns in short bursts; a ratio (`x`) is
taken within one round: its median, between its quartiles. Single times are those of one shared machine and say little.
"""


def report() -> None:
    """Writes RESULTS.md."""
    parts = [HEAD]
    for name, target in TARGETS.items():
        paths = sorted(RESULTS.glob(f"{name}-jax*.json"))
        doc = inspect.getdoc(importlib.import_module(f"benchmarks.{name}")) or ""
        parts.append(f"## {name}\n\n{doc.splitlines()[0]}\n\nTo reach: {target}.\n")
        if not paths:
            parts.append("Not measured here.\n")
        for path in paths:
            found = json.loads(path.read_text())
            about = found["about"]
            parts.append(
                f"*jax {about['jax']}, optax {about['optax']}, Python {about['python']}, {about['device']} "
                f"({about['machine']}), {about['date']}*\n"
            )
            parts += [_shown(one) for one in found["shown"]]
    path = RESULTS.parent / "RESULTS.md"
    path.write_text("\n".join(parts))
    print(f"-> {path.relative_to(RESULTS.parent.parent)}")


def _shown(one: dict) -> str:
    if "note" in one:
        return f"- {one['note']}\n"
    head, *rows = cells_of(one["head"], one["rows"])
    line = lambda cells: f"| {' | '.join(cells)} |"
    rule = line(["---", *["---:"] * (len(head) - 1)])
    return "\n".join([f"**{one['title']}**\n", line(head), rule, *map(line, rows), ""])
