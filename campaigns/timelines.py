"""The promises of `timeline`, tried many times: every question plants something, and counts whether it is found.

python -m campaigns.timelines                              # all questions
python -m campaigns.timelines --only bisect explain        # some of them
python -m campaigns.timelines --count 20 --steps 10000     # less of each
"""

import argparse
import collections
import contextlib
import functools
import io
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import tsunax as ts
from tsunax.reproduce import fingerprint
from tsunax.run import mailboxes
from tsunax.timelines.command_line import ask

from campaigns.runs import HERE, record

STEPS, EVERY, BATCH = 48, 8, 8
ROWS, WIDTH = STEPS * BATCH // 2, 6  # two epochs


def rows(seed: int, count: int = ROWS) -> dict[str, np.ndarray]:
    x = np.random.default_rng(seed).normal(size=(count, WIDTH)).astype(np.float32)
    return {"x": x, "y": np.sin(x.sum(1)), "flip": np.zeros(count, np.float32)}


def loss_fn(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["a"]) @ params["b"]
    return jnp.mean((hidden - batch["y"]) ** 2) + jnp.sum(batch["flip"]) * params["a"][2, 3]


def noisy(params, batch, key):
    return loss_fn(params, batch | {"x": batch["x"] + 0.01 * jax.random.normal(key, batch["x"].shape)})


def state(rule=None, **options):
    key = jax.random.key(0)
    params = {"a": jax.random.normal(key, (WIDTH, 8)) / 3, "b": jax.random.normal(key, (8,)) / 3}
    return ts.setup(ts.rules.adam(1e-2) if rule is None else rule, params, **options)


def data_of(x, shuffle: bool = True, **options):
    return ts.batches(x, BATCH, shuffle=shuffle, seed=5, **options)


# ------------------------------------------------------------------------------------------ every step of a run


def step_of_two(run, batch):
    first, info = ts.train_step(noisy, donate=False).pure(run.first, batch, {})
    return run.advance(first=first, second=run.second, carry=run.carry + info.loss), info


def population():
    make = lambda key, rate: state(ts.rules.sgd(rate))
    return ts.population(make, 3, rate=jnp.array([0.01, 0.02, 0.05]))


def bad_rows():
    x = rows(1)
    x["y"][[5, 77]] = np.nan
    return x


def edited(run):
    """Edits at some steps, as functions of the step alone."""
    changes = {
        7: lambda s: ts.adjust(s, learning_rate=3e-3),
        14: lambda s: ts.freeze(s, "a"),
        21: lambda s: ts.adjust(ts.thaw(s, "a"), "b", learning_rate=1e-2),
        35: lambda s: s.replace(params={**s.params, "b": s.params["b"] * 0.5}),
    }
    return changes[run.step](run.state) if run.step in changes else None


def watched():
    evaluate = lambda s: {"val/loss": float(jnp.sum(s.params["b"] ** 2))}
    callbacks = [
        ts.callbacks.plateau("val/loss", factor=0.5, patience=1),
        ts.callbacks.early_stopping("val/loss", patience=40),
    ]
    return {"evaluate": evaluate, "evaluate_every": 7, "callbacks": callbacks}


with_edits = lambda: {"callbacks": [ts.callbacks.every(7, edited)]}
CASES = {
    "key, average": {"loss": noisy, "make": lambda: state(key=1, ema=0.9)},
    "edits by callbacks": {"loss": noisy, "make": lambda: state(key=1, ema=0.9), "fit": with_edits},
    "plateau, early stopping": {"loss": noisy, "make": lambda: state(key=1), "fit": watched},
    "rejected steps": {"x": bad_rows, "fit": with_edits},
    "accumulation over calls": {"make": lambda: state(ts.rules.accumulate(ts.rules.adam(1e-2), 3))},
    "micro-batches": {"step": {"accumulate": 4}, "fit": with_edits},
    "a population": {"make": population},
    "several states": {
        "step": step_of_two,
        "make": lambda: ts.States(first=state(key=1), second=state(), carry=jnp.zeros(())),
    },
    "8 devices": {"make": lambda: ts.shard(state(key=1, ema=0.9), ts.mesh()), "loss": noisy, "fit": with_edits},
    "commands": {"loss": noisy, "make": lambda: state(key=1), "commands": True},
}


def parts_of(case) -> tuple:
    """Step, a function that makes the first state, and data of a case."""
    step = case.get("step", {})
    step = step if callable(step) else ts.train_step(case.get("loss", loss_fn), **step)
    return step, case.get("make", state), data_of(case.get("x", lambda: rows(1))())


def one_run(name: str, folder: Path, log: Path, note_every: int, keep_last: int | None) -> None:
    """A run of a case, which may be killed. It writes a line `[step, fingerprint]` at its boundaries."""
    case = CASES[name]
    step, make, data = parts_of(case)
    mailboxes.FolderMailbox.look_seconds = 0.0
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(run):
        os.write(out, (json.dumps([run.step, fingerprint(run.state)]) + "\n").encode())
        time.sleep(0.01)

    options = case.get("fit", dict)()
    note_end = lambda run: note(run) if run.event == "end" else None  # a command may come as late as that
    callbacks = [*options.pop("callbacks", []), ts.callbacks.every(note_every, note), note_end]
    with ts.Checkpoints(folder, every=EVERY, keep_last=keep_last) as checkpoints:
        if case.get("commands"):
            threading.Thread(target=send_commands, args=(folder,), daemon=True).start()
        ts.fit(
            step, make(), data, steps=STEPS, checkpoint=checkpoints, progress=False, max_bad=100,
            callbacks=callbacks, **options,
        )  # fmt: skip


def send_commands(folder: Path) -> None:
    rng = random.Random()
    while True:
        time.sleep(rng.uniform(0, 0.1))
        command = rng.choice([("adjust", {"learning_rate": rng.uniform(1e-3, 1e-2)}, None), ("freeze", {}, "a"),
                              ("thaw", {}, "**"), ("save", {}, None)])  # fmt: skip
        with contextlib.suppress(Exception):
            ask(folder, *command, wait=5.0)


def visited(name: str, folder: Path, log: Path, answer: Path) -> None:
    """The fingerprints of all steps of the line, from its checkpoints."""
    step, make, data = parts_of(CASES[name])
    line = ts.timeline(folder, step, make, data)
    last = max(line.steps)
    answer.write_text(json.dumps([[k, fingerprint(line.at(k))] for k in range(1, last + 1)]))


def forked(f, *args) -> int:
    """A process that calls `f`, with eight simulated devices; this one must not have begun with JAX."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=8"
        jax.config.update("jax_compilation_cache_dir", os.environ["TSUNAX_CAMPAIGN_CACHE"])
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        warnings.simplefilter("ignore")
        f(*args)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def ended(pid: int) -> bool:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def killed_run(run, log: Path, rng: random.Random, counts) -> bool:
    """Run to the end, with up to three kills, each after some further lines of the log."""
    size = lambda: log.stat().st_size if log.exists() else 0
    for _ in range(rng.randrange(1, 4)):
        pid, limit, start = forked(run), size() + rng.randrange(1, 1 + STEPS // 7 * 30), time.monotonic()
        while size() < limit and time.monotonic() - start < 120:
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                return ended(pid)
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.02))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        counts["kills"] += 1
    return ended(forked(run))


def read(log: Path) -> dict[int, str]:
    return dict(map(json.loads, log.read_text().splitlines())) if log.exists() else {}


def at(args, counts) -> None:
    """`at(k)` of a killed run has the bits of the uninterrupted one, for every k."""
    rng = random.Random(args.seed)
    for name, i in itertools.product(CASES, range(args.repeats)):
        if args.cases and name not in args.cases:
            continue
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            is_commanded, keep_last = "commands" in CASES[name], (None, 2)[i % 2]
            # The undisturbed run holds a boundary at every step, the killed one at every seventh.
            run = functools.partial(one_run, name, folder / "b", folder / "b.log", 1 if is_commanded else 7, keep_last)
            is_good = killed_run(run, folder / "b.log", rng, counts)
            log = folder / "b.log"
            if not is_commanded:
                log = folder / "a.log"
                is_good &= ended(forked(one_run, name, folder / "a", log, 1, None))
            is_good &= ended(forked(visited, name, folder / "b", log, folder / "answer"))
            expected = read(log)
            steps = read_answer(folder / "answer") if is_good else {}
            wrong = [k for k in expected if steps.get(k) != expected[k]]
            counts["runs"] += 1
            counts["steps"] += len(expected)
            counts["steps with other bits"] += len(wrong)
            print(f"  at: {name}, {len(expected)} steps, wrong {wrong[:9]}", flush=True)


def read_answer(path: Path) -> dict[int, str]:
    return {k: x for k, x in json.loads(path.read_text())}


# ---------------------------------------------------------------------------------------------- planted causes


def fitted(folder, step, make, data, steps=STEPS, every=EVERY, keep_last=None, **options):
    with ts.Checkpoints(folder, every=every, keep_last=keep_last) as checkpoints:
        return ts.fit(step, make(), data, steps=steps, checkpoint=checkpoints, progress=False, max_bad=100, **options)


def first_step_of(row: int, data) -> int:
    return int(np.flatnonzero(data.order(0) == row)[0]) // BATCH + 1


def bisect(args, counts) -> None:
    """`bisect` finds the exact step of a row that leaves a mark, or of an edit."""
    rng, step = random.Random(args.seed), ts.train_step(loss_fn)
    for i in range(args.count):
        x, callbacks, planted_step = rows(i), [], rng.randrange(1, STEPS)
        if i % 2:
            row = rng.randrange(ROWS)
            x["y"][row] = 1e6
            planted_step = first_step_of(row, data_of(x))
            test = lambda s: max(float(jnp.abs(m).max()) for m in jax.tree.leaves(s.opt_state)) > 1e3
        else:
            rate = rng.uniform(1e-3, 9e-3)
            callbacks = [ts.callbacks.adjust_at(planted_step, learning_rate=rate)]
            test = lambda s, rate=rate: abs(ts.hyperparams(s)["learning_rate"] / rate - 1) < 1e-5
        with tempfile.TemporaryDirectory() as folder:
            fitted(folder, step, state, data_of(x), callbacks=callbacks)
            with contextlib.redirect_stdout(io.StringIO()):
                step_of_line = ts.timeline(folder, step, state, data_of(x)).bisect(test)
        counts["planted"] += 1
        counts["found"] += step_of_line == planted_step


def explain(args, counts) -> None:
    """`explain` at the step with the largest loss, or after the rejected step, names the planted row first."""
    rng = random.Random(args.seed)
    for i in range(args.count):
        loss = (loss_fn, noisy)[i % 2]
        step, make = ts.train_step(loss), functools.partial(state, key=1)
        x, row = rows(i), rng.randrange(ROWS)
        if i % 3 == 0:
            x["y"][row] = rng.choice([np.nan, np.inf])
        else:
            x["y"][row] += rng.choice([-1, 1]) * 10 ** rng.uniform(2, 6)
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _, history = fitted(folder, step, make, data_of(x), log_every=1)
            line = ts.timeline(folder, step, make, data_of(x))
            call = first_step_of(row, data_of(x))
            if i % 3:  # as a user finds it
                steps, losses = history.series("loss")
                call = int(steps[np.argmax(losses[: STEPS // 2])])
            explanation = line.explain(calls=call)
        counts["planted"] += 1
        counts["named"] += len(explanation.rows) > 0 and int(explanation.rows[0]) == row


# -------------------------------------------------------------------------------------------------------- audits


def audit(args, counts) -> None:
    """Replays of a long run have the saved bits, and its links hold."""
    step, make = ts.train_step(noisy), functools.partial(state, key=1, ema=0.99)
    data = lambda: data_of(rows(0, 4096), device=True)
    count = args.steps // 10
    with tempfile.TemporaryDirectory() as folder:
        fitted(folder, step, make, data(), steps=args.steps, every=count)
        line = ts.timeline(folder, step, make, data(), max_replay=count)
        for first, last in itertools.pairwise(line.steps):
            counts["steps"] += last - first
            counts["false alarms"] += bool(line.audit(first, last))
        counts["false alarms"] += bool(line.audit())


class Fault(ts.callbacks.Part):
    """One flipped bit in one leaf after a step, which no callback returned."""

    def __init__(self, step: int, field: str, rng: random.Random):
        self.step, self.field, self.rng = step, field, rng

    def read(self, run, has_row):
        if run.step == self.step:
            self.step = -1
            leaves, treedef = jax.tree.flatten(getattr(run.state, self.field))
            i = self.rng.choice([i for i, x in enumerate(leaves) if jnp.size(x) > 1])
            leaves[i] = jnp.asarray(flipped(np.asarray(leaves[i]), self.rng))
            run.state = run.state.replace(**{self.field: treedef.unflatten(leaves)})


def flipped(x: np.ndarray, rng: random.Random) -> np.ndarray:
    """An array of float32 with one bit other than before, in a mantissa: a small error, as most are."""
    bits = x.copy().view(np.uint32)
    bits.reshape(-1)[rng.randrange(x.size)] ^= np.uint32(1 << rng.randrange(23))
    return bits.view(np.float32)


def flips(args, counts) -> None:
    """`audit` finds a flipped bit of params, moments, batch or gradient, in the interval where it first shows."""
    rng, step = random.Random(args.seed), ts.train_step(loss_fn)
    x = rows(0, STEPS * BATCH)
    with tempfile.TemporaryDirectory() as clean:
        fitted(clean, step, state, data_of(x))
        clean_line = ts.timeline(clean)
        while counts["planted"] < 2 * args.count:
            kind, planted_step = (
                rng.choice(["params", "opt_state", "batch", "gradient"]),
                rng.randrange(EVERY + 1, STEPS),
            )
            y, callbacks = {name: a.copy() for name, a in x.items()}, [Fault(planted_step, kind, rng)]
            if kind in ("batch", "gradient"):
                callbacks, row = [], data_of(x).order(0)[(planted_step - 1) * BATCH + rng.randrange(BATCH)]
                if kind == "batch":
                    y["x"][row] = flipped(y["x"][row], rng)
                else:
                    y["flip"][row] = 10 ** rng.uniform(-6, -3)
            with tempfile.TemporaryDirectory() as folder:
                fitted(folder, step, state, data_of(y), callbacks=callbacks)
                if (first := clean_line.compare(folder).differs_at) is None:
                    counts["flips that no saved bit shows"] += 1
                    continue
                line = ts.timeline(folder, step, state, data_of(x))
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of other data: a sample of the rows may show the flip
                    pairs = [*itertools.pairwise(line.steps)]
                    differing = [last for start, last in pairs if line.audit(start, last)]
            counts["planted"] += 1
            counts["found"] += differing == [first]
            if differing != [first]:
                print(f"  {kind} at {planted_step}: {differing}, expected {first}", flush=True)


# ----------------------------------------------------------------------------------------- edits, branches, verify


def random_edit(rng: random.Random):
    changes = [
        lambda s: ts.adjust(s, learning_rate=10 ** rng.uniform(-4, -2)),
        lambda s: ts.adjust(s, rng.choice("ab"), learning_rate=10 ** rng.uniform(-4, -2)),
        lambda s: ts.adjust(s, weight_decay=rng.uniform(0, 0.1)),
        lambda s: ts.freeze(s, rng.choice("ab")),
        lambda s: ts.thaw(s, "**"),
        lambda s: s.replace(params=jax.tree.map(lambda p: p * rng.uniform(0.5, 1.0), s.params)),
        lambda s: s.replace(params={**s.params, "b": s.params["b"] + jnp.float32(rng.uniform(0, 0.01))}),
    ]
    return rng.choice(changes)


def edits(args, counts) -> None:
    """Random edits at random steps: the run and its replay from step 0 have the same bits."""
    rng, step = random.Random(args.seed), ts.train_step(noisy)
    make = lambda: state(ts.rules.adamw(1e-2, weight_decay=1e-3), key=1, ema=0.9)
    while counts["edits"] < 2 * args.count:
        at_steps = {rng.randrange(1, STEPS - 1): random_edit(rng) for _ in range(10)}
        prints = {}

        def edited(run):
            state = at_steps[run.step](run.state) if run.step in at_steps else run.state  # noqa: B023
            prints[run.step] = fingerprint(state)  # noqa: B023
            return state

        with tempfile.TemporaryDirectory() as folder:
            fitted(folder, step, make, data_of(rows(0)), keep_last=1, callbacks=[ts.callbacks.every(1, edited)])
            line = ts.timeline(folder, step, make, data_of(rows(0)))
            is_same = fingerprint(line.at(STEPS - 1)) == prints[STEPS - 1]
            counts["edits"] += len(line.edits)
            counts["runs"] += 1
            counts["runs with other bits"] += not is_same or line.steps != [STEPS]


def branch(args, counts) -> None:
    """A branch with nothing changed has the bits of its parent at every later step."""
    rng, step = random.Random(args.seed), ts.train_step(noisy)
    make = lambda: state(key=1, ema=0.9)
    noted = lambda prints: ts.callbacks.every(
        1, lambda run: prints.setdefault(run.step, fingerprint(run.state)) and None
    )
    for i in range(max(1, args.count // 4)):
        callbacks = [ts.callbacks.every(7, edited)] if i % 2 else []
        with tempfile.TemporaryDirectory() as folder:
            expected, prints, parts = {}, {}, (step, make)
            fitted(f"{folder}/a", *parts, data_of(rows(i)), callbacks=[*callbacks, noted(expected)])
            k = rng.randrange(1, STEPS)
            ts.timeline(f"{folder}/a", *parts, data_of(rows(i))).branch(k, f"{folder}/b")
            fitted(f"{folder}/b", *parts, data_of(rows(i)), callbacks=[*callbacks, noted(prints)])
            line = ts.timeline(f"{folder}/b", *parts, data_of(rows(i)))
            later = {j: x for j, x in expected.items() if j > k}
            counts["branches"] += 1
            counts["branches with other bits"] += {j: x for j, x in prints.items() if j > k} != later
            counts["branches with other lines"] += fingerprint(line.at(max(1, k - 2))) != expected[max(1, k - 2)]


def verify(args, counts) -> None:
    """CPU time of runs that check every n-th step, over that of runs that check none, interleaved."""
    key = jax.random.key(0)
    make = lambda: ts.setup(ts.rules.adam(1e-3), {"w": jax.random.normal(key, (512, 512)) / 30})
    x = np.random.default_rng(0).normal(size=(256, 512)).astype(np.float32)
    step = ts.train_step(lambda params, x: jnp.mean((jnp.tanh(x @ params["w"]) @ params["w"] - x) ** 2))
    seconds = collections.defaultdict(list)
    for _ in range(6):
        for n in (None, 2, 10, 50):
            callbacks = [] if n is None else [ts.callbacks.verify(every=n)]
            start = time.process_time()
            ts.fit(step, make(), ts.batches(x, 128), steps=200, log_every=50, progress=False, callbacks=callbacks)
            seconds[n].append(time.process_time() - start)
    best = {n: min(x) for n, x in seconds.items()}
    for n in (2, 10, 50):
        counts[f"every={n}: CPU time, %, beyond the run without"] = round(100 * (best[n] / best[None] - 1))


QUESTIONS = {f.__name__: f for f in (at, bisect, explain, audit, flips, edits, branch, verify)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=QUESTIONS, default=[*QUESTIONS])
    parser.add_argument("--count", type=int, default=100, help="planted steps and rows; twice as many flips and edits")
    parser.add_argument("--repeats", type=int, default=2, help="killed runs of each case of `at` (2)")
    parser.add_argument("--cases", nargs="*", choices=CASES, help="only these cases of `at`")
    parser.add_argument("--steps", type=int, default=100_000, help="audited steps without a fault (100,000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=HERE / "results" / "counts.jsonl")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TSUNAX_CAMPAIGN_CACHE"] = cache
        for name in sorted(args.only, key=[*QUESTIONS].index):  # `at` first, which forks
            counts: collections.Counter = collections.Counter()
            start = time.monotonic()
            QUESTIONS[name](args, counts)
            seconds = round(time.monotonic() - start)
            record(args.results, {"what": f"timelines: {name}", "seed": args.seed, "seconds": seconds}, counts)


if __name__ == "__main__":
    sys.exit(main())
