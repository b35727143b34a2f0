"""Sweeps that are killed: no trial may be lost, none run again once it is in the journal.

    python -m campaigns.sweeps --kills 100       # kill -9 at any time, on one sweep after the other
    python -m campaigns.sweeps --kills 100 --backend optuna
    python -m campaigns.sweeps --writers 20      # two sweeps start in one directory

A run is one process, forked from this one after its imports; its objective is arithmetic and a short sleep. Counts are
appended to `--results`.
"""

import argparse
import collections
import contextlib
import json
import os
import platform
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

import jax  # only for its version
import optuna
from tsunax import tuning
from tsunax.errors import CheckpointError
from tsunax.tuning import spaces

from campaigns.runs import HERE, is_alive

TRIALS = 60
SPACE = {"x": spaces.log_uniform(1e-3, 1.0), "rule": spaces.choice(["a", "b", "c"]), "m": spaces.integer(1, 9)}


def ended(folder: Path, trial: int) -> int:
    """How often the end of a trial stands in the journal."""
    lines = map(json.loads, (folder / "optuna.journal").open())
    return sum(line.get("user_attrs", {}).get("tsunax", {}).get("index") == trial for line in lines)


def objective(log: Path, trial, x, rule, report, m):
    """Says when it begins and how often its trial stood in the journal by then; some fail, some are pruned."""
    there = ended(log.parent / "sweep", trial)
    with log.open("a") as file:
        file.write(f"{trial} {there}\n")
    time.sleep(0.004)
    report(1, x + m + 1)
    time.sleep(0.004)
    if trial % 11 == 5:
        raise ValueError(f"trial {trial}")
    report(2, x + m)
    return {"loss": x + m, "other": float("nan") if trial % 13 == 7 else 1.0}


def sweep(folder: Path, backend: str) -> tuning.Result:
    warnings.simplefilter("ignore")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    pruner = optuna.pruners.MedianPruner() if backend == "optuna" else None
    log = folder / "log"

    def mine(trial, x, rule, report, m):
        return objective(log, trial, x, rule, report, m)

    options = dict(trials=TRIALS, metric="loss", pruner=pruner, backend=backend)
    return tuning.tune(mine, SPACE, directory=folder / "sweep", progress=False, **options)


def start(folder: Path, backend: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        err = os.open(folder / "stderr", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(err, 1), os.dup2(err, 2)
        sweep(folder, backend)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def end(pid: int, limit: float = 60.0):
    until = time.monotonic() + limit
    while time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return "hung"


def told(result: tuning.Result) -> list:
    return [(t.index, t.values, t.status, t.value, repr(t.metrics), t.cause, t.reports) for t in result.trials]


@contextlib.contextmanager
def scratch():
    folder = Path(tempfile.mkdtemp(prefix="tsunax-sweep-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def undisturbed(backend: str) -> tuple[list, float]:
    with scratch() as folder:
        began = time.monotonic()
        if status := end(start(folder, backend)):
            sys.exit(f"the undisturbed sweep ended with {status}:\n{(folder / 'stderr').read_text()[-3000:]}")
        return told(tuning.read(folder / "sweep")), time.monotonic() - began


def kills(n: int, seed: int, backend: str, counts) -> None:
    """n kills, on as many sweeps as it takes; each then runs to its end, and is compared."""
    wanted, seconds = undisturbed(backend)
    rng = random.Random(seed)
    while counts["kills"] < n:
        with scratch() as folder:
            while counts["kills"] < n:
                pid = start(folder, backend)
                time.sleep(rng.uniform(0, seconds / 3))
                if is_alive(pid):
                    os.kill(pid, signal.SIGKILL)
                    counts["kills"] += 1
                if end(pid) == 0:
                    break
            status = end(start(folder, backend))
            judge(folder, status, wanted, counts)


def judge(folder: Path, status, wanted: list, counts) -> None:
    counts["sweeps"] += 1
    if status != 0:
        counts["no end"] += 1
        print(f"  ended with {status}: {(folder / 'stderr').read_text()[-800:]}", flush=True)
        return
    try:
        found = told(tuning.read(folder / "sweep"))
    except CheckpointError as error:
        counts["journals that cannot be read"] += 1
        print(f"  {error}", flush=True)
        return
    began = [tuple(map(int, line.split())) for line in (folder / "log").read_text().splitlines()]
    counts["trials"] += len(found)
    counts["lost"] += len({t[0] for t in wanted} - {t[0] for t in found})
    counts["doubled"] += sum(there > 0 for _, there in began)  # begun although it had an end
    counts["other results"] += sum(a != b for a, b in zip(found, wanted, strict=False))
    counts["begun again"] += len(began) - len({trial for trial, _ in began})


def writers(n: int, counts) -> None:
    """Two at once in one directory: one is refused, or comes after the other's end."""
    wanted, _ = undisturbed("random")
    for _ in range(n):
        with scratch() as folder:
            statuses = sorted(end(pid) for pid in [start(folder, "random"), start(folder, "random")])
            counts["starts"] += 1
            counts["one refused"] += statuses == [0, 1] and "directory in use at" in (folder / "stderr").read_text()
            judge(folder, statuses[0], wanted, counts)


def is_well(counts) -> bool:
    return not any(
        counts.get(name) for name in ("no end", "journals that cannot be read", "lost", "doubled", "other results")
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="campaigns.sweeps", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--writers", type=int, default=0)
    parser.add_argument("--backend", choices=["random", "optuna"], default="random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=HERE / "results" / "counts.jsonl")
    args = parser.parse_args()
    counts: collections.Counter = collections.Counter()
    what = {"what": "sweeps", "backend": args.backend, "seed": args.seed}
    if args.kills:
        kills(args.kills, args.seed, args.backend, counts)
    if args.writers:
        writers(args.writers, counts)
        what["what"] = "sweeps, writers"
    about = {"jax": jax.__version__, "python": platform.python_version(), "date": time.strftime("%Y-%m-%d")}
    line = json.dumps({**what, **about, "counts": dict(counts)})
    print(line, flush=True)
    with args.results.open("a") as file:
        file.write(line + "\n")
    sys.exit(not is_well(counts))


if __name__ == "__main__":
    main()
