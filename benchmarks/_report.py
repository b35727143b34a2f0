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
    "step": "over the bare loop <= 1.15, 200 leaves <= 1.05; over the same info <= 1.0; compile <= 1.1",
    "verdict": "which choice is the cheapest; no target",
    "watching": "between due calls <= 1.01 of the step without a watch; at them <= 1.05 of norms by hand",
    "prediction": "x <= 1.05",
    "verify": "x <= 1 + 1/every, and a little for copies, comparison and boundary",
    "leaves": "200 and 1,000 leaves: trace and compile x <= 1.1 over by hand with the same information",
    "rules": "a live rule <= 1.05 x plain optax",
    "convolutions": "a compiled loop no slower than a Python loop",
    "kept_sums": "a GPT <= 0.75 of the plain step, compiled in <= 0.7; no model slower; the same bits",
    "packed": "gain and cost of packing small leaves into one vector, by hand; no target",
    "ppo": "<= 1.02 x of PPO by hand in JAX and optax, at 1 and 64 agents",
    "accumulate": "temporary memory of one micro-batch and one f32 gradient",
    "precision": "norms and guard x <= 1.05",
    "remat": "what XLA:CPU makes of each policy; no target",
    "data": "at least NumPy's fancy indexing; prefetch hides 90 %; first batch of 1e8 rows in 1 s and 100 MB",
    "loop": "beside each table",
    "loaders": "what a copy costs; one batch for all steps at the price of the loop",
    "checkpoint": "blocks <= 1.2 x a host copy; save and restore <= 1.10 x orbax",
    "sharding": "x <= 1.05",
    "muon": "fully sharded: <= 2 x Adam's bytes; FLOPs: one device's x ceil(k / 8) / k for k equal matrices",
    "population": "population <= 1.1 x the vmapped scan, and no slower than 32 runs in turn",
    "startup": "98 % on the digits in <= 4 s cold, <= 1.5 s warm",
    "search": "the size found is right; faster than Lightning's power, >= 4 x its binsearch; range test <= 1.1",
    "planning": "plan / growth 0.85 to 1.15; x fastest <= 1.1 in 9 of 10 searches; compiled <= a third of the candidates",
    "insight": "products within 2 % of a hand count",
    "importing": "x <= 1.15",
    "compiled": "MB moved by the default step x <= 1.11 of bare, temporary memory <= bare's and one gradient, no callback",
    "gpu": "GPTs x <= 1.02 of raw JAX with the same information, and <= 1.0 of torch.compile",
}
SHORT = [  # tsunax, baseline, and the place: "benchmark: title: row", or the ratio of that row to another's
    ("a step with norms and the check for NaN", "the donated loop by hand with the same norms, check and select: 64-64-10 MLP; 200 leaves",
     ["step: tiny MLP: tsunax, live adam", "step: 200 leaves: tsunax, live adam"]),
    ("the same", "the same by hand with one cond, the fastest form known: 64-64-10 MLP; 200 leaves",
     ["step: tiny MLP: tsunax, default step over one cond", "step: 200 leaves: tsunax, default step over one cond"]),
    ("trace and compile", "the loop by hand with the same norms, check and select: 200; 1,000 leaves",
     [f"leaves: {n} leaves: tsunax" for n in (200, 1000)]),
    ("a step without norms and check", "the bare donated loop by hand: 64-64-10 MLP; 200 leaves",
     ["step: tiny MLP: tsunax, bare, live adam", "step: 200 leaves: tsunax, bare, live adam"]),
    ("a step with the check for NaN", "the step without norms and check: a GPT; 200 leaves; the MLP of 60 us",
     [f"precision: guards, {on}, over tsunax: tsunax, verdict" for on in ("GPT", "200 leaves", "tiny MLP 64-64-10")]),
    ("the update of a live rule", "the same rule of plain optax, a million parameters: the slowest rule; `adam`; `sgd`",
     ["rules: update: polyak_sgd", "rules: update: adam", "rules: update: sgd"]),
    ("a step with a frozen leaf; compiling a step with room for freezing", "a step without them, 200 leaves",
     ["step: 200 leaves: tsunax, live, one leaf frozen / tsunax, live adam",
      "step: trace and compile: tsunax, live, freezable / tsunax, live adam"]),
    ("`accumulate=8`, a GPT", "`optax.MultiSteps` over 8 calls; a scan by hand",
     [f"accumulate: GPT: {row}" for row in ("optax.MultiSteps", "scan by hand")]),
    ("temporary memory of `accumulate=8`, a GPT", "one micro-batch and one float32 gradient", ["accumulate: temporary memory: GPT"]),
    ("FLOPs if 2 of 8 layers are trained", "a step by hand that trains the two layers",
     ["selection: 6 of 8: tsunax, trainable= two layers / two layers by hand"]),
    ("bfloat16 on a CPU", "float32: an MLP; a GPT", ["precision: MLP: bfloat16", "precision: GPT: bfloat16"]),
    ("`fit`", "a scan by hand, steps of 30 us; a Python loop by hand, steps of a GPT; that loop with the same norms and select",
     ["loop: tiny MLP: fit", "loop: GPT: fit", "loop: GPT: fit / loop by hand, same info"]),
    ("the time for which a save blocks the loop", "a copy of the same 480 MB to the host; a save by plain orbax",
     ["checkpoint: checkpoint of 480 MB in 12 leaves: blocks: files",
      "checkpoint: checkpoint of 480 MB in 12 leaves: blocks: files / blocks: plain orbax"]),
    ("a sharded step", "the sharded step by hand, eight simulated devices: MLP of 512; MLP of 64",
     ["sharding: a step: MLP 512-512-512-10, replicated", "sharding: a step: MLP 64-64-10, replicated"]),
    ("a population of 32 members", "the vmapped scan by hand; 32 fused runs, one after the other",
     ["population: 32 MLPs: population", "population: 32 MLPs: population / 32 fused runs in turn"]),
    ("`import tsunax`", "`import jax, optax`", ["importing: import: import tsunax"]),
]  # fmt: skip
RATIOS = ("x median", "median", "x", "x both", "ratio to both")  # columns that hold one
HEAD = """# Results

Written by `python -m benchmarks` from `benchmarks/results/`. Contenders take turns in short bursts; a ratio (`x`) is
taken within one round: its median, between its quartiles. Single times are those of one shared machine and say little.
"""


def report() -> None:
    """Writes RESULTS.md."""
    parts = [HEAD, short()]
    for name, target in TARGETS.items():
        paths = sorted(RESULTS.glob(f"{name}-*jax*.json"))
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


def short() -> str:
    """What everything costs, in one table: docs/cost.md takes it in."""
    rows = [f"| {what} | {over} | {'; '.join(map(_figure, places))} |" for what, over, places in SHORT]
    head = "| tsunax | baseline | ratio |\n| --- | --- | --- |"
    return "\n".join(["## In short\n\n<!-- short -->\n", head, *rows, "\n<!-- in full -->\n"])


def _figure(place: str) -> str:
    """The ratio of a row, or that to the ratio of another; "not measured" where there is no such row."""
    name, title, row = place.split(": ", 2)
    row, _, other = row.partition(" / ")
    for path in sorted(RESULTS.glob(f"{name}-*jax*.json")):
        for one in json.loads(path.read_text())["shown"]:
            rows = {cells[0]: dict(zip(one["head"], cells, strict=True)) for cells in one.get("rows", [])}
            if one.get("title", "").startswith(title) and row in rows and (other or row) in rows:
                ratio = next(x for x in (*RATIOS, one["head"][1]) if x in rows[row])
                return f"{rows[row][ratio] / (rows[other][ratio] if other else 1):.2f}"
    return "not measured"


def _shown(one: dict) -> str:
    if "note" in one:
        return f"- {one['note']}\n"
    head, *rows = cells_of(one["head"], one["rows"])
    line = lambda cells: f"| {' | '.join(cells)} |"
    rule = line(["---", *["---:"] * (len(head) - 1)])
    return "\n".join([f"**{one['title']}**\n", line(head), rule, *map(line, rows), ""])
