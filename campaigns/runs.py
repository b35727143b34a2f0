"""Runs that a campaign hurts: started, watched, and compared with an undisturbed one.

A run is one process, forked from this one after its imports. It must end with the digest of the undisturbed run, and
have seen every record once an epoch. Counts, with the seeds and versions, are appended to `--results`.
"""

import argparse
import contextlib
import ctypes
import functools
import json
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import tsunax as ts
from orbax.checkpoint import v1 as _imported  # noqa: F401, once for all children

from campaigns import other_stores, training_run

HERE = Path(__file__).parent
STEPS, EVERY, PATIENCE = 12, 2, 90.0
FIT_STEPS, FIT_EVERY = 200, 63  # both kinds of runs note the step 63


def arguments(doc: str | None, seeds: str = "") -> argparse.ArgumentParser:
    """What all campaigns on runs take; `main` reads it with `parse`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawTextHelpFormatter)
    if seeds:
        parser.add_argument("--seeds", default=seeds, help=f"first:last, one run each ({seeds})")
    about = "leave this precaution out of a run, or of tsunax: the campaign must notice"
    parser.add_argument("--leave-out", choices=training_run.LEAVE_OUT, default="", help=about)
    about = "the home of Checkpoints, or who else saves: orbax's own CheckpointManager"
    parser.add_argument("--store", choices=["files", "orbax", "manager"], default="files", help=about)
    parser.add_argument("--results", type=Path, default=HERE / "results" / "counts.jsonl")
    return parser


def parse(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, dict]:
    """The arguments, and those of them that belong into the record."""
    args = parser.parse_args()
    about = {"left out": args.leave_out} if args.leave_out else {}
    if "seeds" in args:
        about["seeds"] = args.seeds
        args.seeds = range(*map(int, args.seeds.split(":")))
    if args.store == "orbax":
        Run.store, about["store"] = functools.partial(ts.Checkpoints, store="orbax"), "orbax"
    if args.store == "manager":
        Run.store, Run.is_ours = other_stores.Orbax, False
        about["store"] = "orbax's CheckpointManager"
    return args, about


class Run:
    """One directory, its log, and the processes that work on it."""

    store: Callable | None = None  # None: Checkpoints
    is_ours = True

    def __init__(self, folder: Path, cache: Path, leave_out: str = ""):
        self.folder, self.log, self.cache, self.leave_out = folder / "run", folder / "log", cache, leave_out
        self.errors = folder / "stderr"

    def start(self, fault=None, fitted: bool | None = None) -> int:
        """A process that runs the target from where it is; `fault` is what to arm in it. With `fitted`, by `fit`."""
        pid = os.fork()
        if pid:
            return pid
        code = 1
        try:
            err = os.open(self.errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(err, 1), os.dup2(err, 2)
            jax.config.update("jax_compilation_cache_dir", str(self.cache))
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
            jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
            if fault is not None:
                arm(self.folder, *fault)
            if fitted is None:
                training_run.main(str(self.folder), str(self.log), STEPS, EVERY, self.leave_out, self.store)
            else:
                training_run.fitted(str(self.folder), str(self.log), FIT_STEPS, FIT_EVERY, fitted, self.store)
            code = 0
        except SystemExit as error:
            code = int(error.code or 0)
        except KeyboardInterrupt:
            code = 128 + signal.SIGINT
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def end(self, pid: int, limit: float = PATIENCE):
        """The exit status, negative for a signal; "hung" after `limit` seconds, and it is killed."""
        until = time.monotonic() + limit
        while time.monotonic() < until:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.002)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return "hung"

    def lines(self, word: str) -> list[list[str]]:
        text = self.log.read_text() if self.log.exists() else ""
        return [line.split(" ", 2) for line in text.splitlines() if line.startswith(word + " ")]

    def digest(self) -> str | None:
        found = self.lines("DIGEST")
        return found[-1][1] if found else None

    def repeated(self) -> int:
        """The most steps that one resume did again."""
        most = reached = 0
        for line in self.log.read_text().splitlines() if self.log.exists() else []:
            word, number = line.split(" ", 2)[:2]
            if word == "RESUMED":
                most = max(most, reached - int(number))
            elif word == "STEP":
                reached = max(reached, int(number))
        return most

    def time_is_off(self) -> float:
        """By which fraction of the wall clock, beyond 10 ms, the seconds of the history differ from it."""
        told = [tuple(map(float, line[1:])) for line in self.lines("TIME")]
        return max((max(0.0, abs(spent - wall) - 0.01) / wall for spent, wall in told), default=0.0)

    def records_are_right(self) -> bool:
        """Of each step the last word counts; an epoch's batches together are every record once."""
        by_step = {int(step): json.loads(ids) for _, step, ids in self.lines("STEP")}
        per_epoch = training_run.ROWS // training_run.SIZE
        epochs = [by_step.get(i + 1, []) for i in range(STEPS)]
        return sorted(by_step) == list(range(1, STEPS + 1)) and all(
            sorted(i for ids in epochs[e : e + per_epoch] for i in ids) == list(range(training_run.ROWS))
            for e in range(0, STEPS, per_epoch)
        )


def arm(folder: Path, k: int, mode: int, error: int) -> None:
    ctypes.CDLL(None).fault_arm(os.fsencode(str(folder)), ctypes.c_long(k), mode, error)


def is_alive(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


@contextlib.contextmanager
def scratch(cache: Path, where=None, leave_out: str = ""):
    folder = Path(tempfile.mkdtemp(prefix="tsunax-faults-", dir=where))
    try:
        yield Run(folder, cache, leave_out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def undisturbed(cache: Path, fitted: bool | None = None) -> tuple[str, float]:
    """The digest that every run must end with, and how long one takes with its programs compiled."""
    seconds, digests = 0.0, set()
    for _ in range(2):
        with scratch(cache) as run:
            start = time.monotonic()
            status = run.end(run.start(fitted=fitted), 300.0)
            seconds = time.monotonic() - start
            if status != 0:
                sys.exit(f"the undisturbed run ended with {status}:\n{run.errors.read_text()[-3000:]}")
            digests.add(run.digest())
    assert len(digests) == 1, digests
    return digests.pop() or "", seconds


def judge(run: Run, wanted: str, counts, fitted: bool | None = None) -> None:
    """Let the run finish and say how it ended."""
    status = run.end(run.start(fitted=fitted))
    tail = run.errors.read_text()[-1500:] if run.errors.exists() else ""
    if status != 0:
        counts["no end" if status == "hung" else "refused"] += 1
        print(f"  ended with {status}: {tail}", flush=True)
    elif run.digest() != wanted:
        counts["other bits"] += 1
    elif fitted is None and not run.records_are_right():
        counts["records"] += 1
    elif fitted is not None and run.time_is_off() > 0.01:
        counts["time is off"] += 1
        print(f"  history.time is off by {run.time_is_off():.1%}", flush=True)
    else:
        counts["same bits"] += 1
    counts["most steps repeated"] = max(counts["most steps repeated"], run.repeated())


def is_well(counts) -> bool:
    """Whether nothing of what may not be is among these counts."""
    bad = ("no end", "refused", "other bits", "records", "hung", "false success", "silently wrong", "older one, unsaid")
    return not any(counts.get(name) for name in (*bad, "both let in", "time is off"))


def record(results: Path, what: dict, counts) -> None:
    about = {"jax": jax.__version__, "python": platform.python_version(), "date": time.strftime("%Y-%m-%d")}
    line = json.dumps({**what, **about, "counts": dict(counts)})
    print(line, flush=True)
    results.parent.mkdir(parents=True, exist_ok=True)
    with results.open("a") as file:
        file.write(line + "\n")
