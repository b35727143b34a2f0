"""Hurt runs and compare: kills, failing file systems, damaged bytes, full disks.

    python -m tests.faults --kills 3 --seeds 0:50     # 50 runs, each killed up to 3 times, every second aimed at saves
    python -m tests.faults --fs KILL --seeds 0:100    # killed on entry to a change of the file system, spread over all
    python -m tests.faults --fs POWER --seeds 0:100   # the same, and what was not synced by then is lost
    python -m tests.faults --fs ENOSPC --sticky --seeds 0:30
    python -m tests.faults --signals --seeds 0:200    # SIGTERM and SIGINT to a run of `fit`, at any time
    python -m tests.faults --writers --seeds 0:20     # two runs start in one directory
    python -m tests.faults --mutations                # what is left out of a run or of tsunax must be noticed
    python -m tests.faults --damage 300               # flipped, cut, emptied bytes of one checkpoint, in one process
    python -m tests.faults --manifests 10000          # mutated manifests, metadata and headers, in one process
    python -m tests.faults --disk                     # a small tmpfs; where mounting is allowed

A run is one process, forked from this one after its imports. It must end with the digest of the undisturbed run, and
have seen every record once an epoch. Counts, with the seeds and versions, are appended to `--results`.
"""

import argparse
import collections
import contextlib
import ctypes
import errno
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
import tsunax as ts
from orbax.checkpoint import v1 as _imported  # noqa: F401, once for all children
from tests.faults import hostile, others, target
from tsunax.checkpoints import saving as _saving

HERE = Path(__file__).parent
STEPS, EVERY, PATIENCE = 12, 2, 90.0
FIT_STEPS, GRACE = 200, 30.0


class Run:
    """One directory, its log, and the processes that work on it."""

    store: type | None = None  # None: Checkpoints

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
                target.main(str(self.folder), str(self.log), STEPS, EVERY, self.leave_out, self.store)
            else:
                target.fitted(str(self.folder), str(self.log), FIT_STEPS, 60, fitted)
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

    def records_are_right(self) -> bool:
        """Of each step the last word counts; an epoch's batches together are every record once."""
        by_step = {int(step): json.loads(ids) for _, step, ids in self.lines("STEP")}
        per_epoch = target.ROWS // target.SIZE
        epochs = [by_step.get(i + 1, []) for i in range(STEPS)]
        return sorted(by_step) == list(range(1, STEPS + 1)) and all(
            sorted(i for ids in epochs[e : e + per_epoch] for i in ids) == list(range(target.ROWS))
            for e in range(0, STEPS, per_epoch)
        )


def arm(folder: Path, k: int, mode: int, error: int) -> None:
    ctypes.CDLL(None).fault_arm(os.fsencode(str(folder)), ctypes.c_long(k), mode, error)


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
    else:
        counts["same bits"] += 1
    counts["most steps repeated"] = max(counts["most steps repeated"], run.repeated())


def saving(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return any(name.startswith(".tsunax-") or "checkpoint-tmp" in name for name in os.listdir(folder))
    return False


def kills(seed: int, most: int, run: Run, seconds: float, counts, kind=signal.SIGKILL) -> None:
    rng = random.Random(seed)
    for _ in range(most):
        pid, start = run.start(), time.monotonic()
        if seed % 2:  # at a save: one of those to come, some way into it
            skip = rng.randrange(0, STEPS // EVERY)
            until = start + PATIENCE
            for _ in range(skip + 1):
                while time.monotonic() < until and not saving(run.folder) and _alive(pid):
                    time.sleep(0.001)
                while skip and time.monotonic() < until and saving(run.folder) and _alive(pid):
                    time.sleep(0.001)
                skip = max(0, skip - 1)
            time.sleep(rng.uniform(0, 0.08))
        else:
            time.sleep(rng.uniform(0, seconds))
        struck = _alive(pid)
        if struck:
            os.kill(pid, kind)
            counts["kills"] += 1
        run.end(pid)
        if run.digest() is not None:
            break


def signals(seed: int, run: Run, seconds: float, counts) -> None:
    """A signal, or three, at a random time: the run must save what it has done, and end with the status of it."""
    rng = random.Random(seed)
    kind = (signal.SIGTERM, signal.SIGINT)[seed % 2]
    pid, start = run.start(fitted=seed % 4 < 2), time.monotonic()
    while seed % 8 > 1 and not run.lines("RESUMED") and _alive(pid):  # the others: also before `fit`
        time.sleep(0.002)
    time.sleep(rng.uniform(0, max(0.1, seconds - (time.monotonic() - start))))
    struck, began = _alive(pid), bool(run.lines("RESUMED"))
    for _ in range(3 if seed % 10 == 0 else 1):
        if _alive(pid):
            os.kill(pid, kind)
            time.sleep(0.005)
    start = time.monotonic()
    status = run.end(pid)
    counts["signals"] += struck
    counts["hung"] += status == "hung" or time.monotonic() - start > GRACE
    counts["slowest end, s"] = max(counts["slowest end, s"], round(time.monotonic() - start, 2))
    known = {0: "had ended", 128 + kind: "saved, with its status"}
    if not began and status in (-signal.SIGTERM, 128 + signal.SIGINT):  # Python's own, before `fit` listens
        known[status] = "had not begun"
    if status == -signal.SIGTERM and run.digest():  # and after
        known[status] = "had ended"
    counts[known.get(status, f"status {status}")] += struck
    if status not in known:
        print(f"  {seed}: {status} {run.errors.read_text()[-1500:]}", flush=True)


def writers(run: Run, wanted: str, counts) -> None:
    """Two at once in one directory: one is refused, the other ends as if it had been alone."""
    other = Run(run.folder.parent, run.cache, run.leave_out)
    other.log, other.errors = run.folder.parent / "log 2", run.folder.parent / "stderr 2"
    pids = [(one, one.start()) for one in (run, other)]
    ended = [(one, one.end(pid)) for one, pid in pids]
    refused = [one for one, status in ended if status == 1 and "directory in use at" in one.errors.read_text()]
    counts["starts"] += 1
    counts["one refused, the other the same bits"] += len(refused) == 1 and any(
        one.digest() == wanted for one, _ in ended
    )
    after_the_end = any(one.lines("RESUMED")[:1] == [["RESUMED", str(STEPS)]] for one, _ in ended)
    counts["one after the other"] += not refused and after_the_end
    counts["both let in"] += not refused and not after_the_end


def _alive(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def fs(kind: str, sticky: bool, seeds: range, cache: Path, wanted: str, counts, leave_out: str = "") -> None:
    """Seed i of n hits the change that is i/n of the way through an undisturbed run's."""
    with scratch(cache) as run:
        pid = os.fork()
        if not pid:
            arm(run.folder, -1, 0, 0)
            jax.config.update("jax_compilation_cache_dir", str(cache))
            target.main(str(run.folder), str(run.log), STEPS, EVERY, store=Run.store)
            (run.folder.parent / "seen").write_text(str(ctypes.CDLL(None).fault_seen()))
            os._exit(0)
        os.waitpid(pid, 0)
        total = int((run.folder.parent / "seen").read_text())
    counts["changes in a run"] = total
    mode = {"KILL": 1, "POWER": 4}.get(kind, 3 if sticky else 2)
    for i in seeds:
        k = int(total * (i % 1000) / max(1, len(seeds))) if len(seeds) < total else i % total
        with scratch(cache, leave_out=leave_out) as run:
            status = run.end(run.start((k, mode, getattr(errno, kind, 0))))
            counts["struck"] += status != 0
            if status == "hung":
                counts["hung"] += 1
                print(f"  hung at change {k}", flush=True)
            if kind not in ("KILL", "POWER") and status == 0 and run.digest() != wanted:
                counts["false success"] += 1
            judge(run, wanted, counts)


def damage(n: int, seed: int, counts) -> None:
    """Damage one file of the newest of two checkpoints, restore in this process, compare with what was saved.

    The state is wide: arrays of more than some bytes are files without any checksum of TensorStore's.
    """
    rng = random.Random(seed)
    state, step = target.make(60_000)
    batch = np.ones((4, 6), np.float32), np.ones((4, 2), np.float32)
    digests = {}
    with tempfile.TemporaryDirectory() as folder:
        with (Run.store or _saving.Checkpoints)(folder) as checkpoints:
            for _ in range(2):
                state, _info = step(state, batch)
                checkpoints.save(state, data={"epoch": 1, "position": 2}, history={"loss": np.arange(50.0)})
                digests[int(state.step)] = target.digest(state)
        like, _ = target.make(60_000)
        paths = [p for p in sorted(Path(folder, "2").rglob("*")) if p.is_file() and p.stat().st_size]
        contents = [p.read_bytes() for p in paths]
        for i in range(n):
            path, good = paths[i % len(paths)], contents[i % len(paths)]
            content = bytearray(good)
            how = rng.choice(["flip", "flip", "flip", "cut", "zeros", "remove", "random", "swap"])
            at = rng.randrange(len(content))
            if how == "flip":
                content[at] ^= 1 << rng.randrange(8)
            elif how == "cut":
                del content[at:]
            elif how in ("zeros", "random"):
                size = min(len(content) - at, 512)
                content[at : at + size] = bytes(size) if how == "zeros" else rng.randbytes(size)
            elif how == "swap":
                content = bytearray(contents[(i + 1) % len(paths)])
            if how == "remove":
                path.unlink()
            elif content == good:  # zeros where there were zeros
                continue
            else:
                path.write_bytes(content)
            counts["damaged"] += 1
            restored(folder, like, digests, counts, f"{path} {how} {at}")
            path.write_bytes(good)


def restored(folder, like, digests: dict[int, str], counts, what: str) -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            found = (Run.store or _saving.Checkpoints)(folder, read_only=True).restore(like)
        except Exception as error:
            counts["refused"] += 1
            assert Run.store or isinstance(error, ts.errors.CheckpointError), error
            return
    if target.digest(found.state) != digests[found.step]:
        counts["silently wrong"] += 1
        print(f"  wrong: {what}", flush=True)
    elif found.step == 2:
        counts["harmless"] += 1
    elif any("step 2" in str(w.message) for w in told):
        counts["older one, with a warning"] += 1
    else:
        counts["older one, unsaid"] += 1


def disk(cache: Path, wanted: str, counts) -> None:
    """Runs on a tmpfs of 0 to 1.2 times what they need; then it grows, and the same command must end well."""
    for size in range(16, 1216, 60):
        where = Path(tempfile.mkdtemp(prefix="tsunax-disk-"))
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}k", "tsunax", str(where)], capture_output=True
        )
        if done.returncode:
            counts["mounting is not allowed"] += 1
            where.rmdir()
            return
        try:
            with scratch(cache) as outside:
                run = Run(where, cache)
                run.log, run.errors = outside.log, outside.errors
                outside.log.parent.mkdir(exist_ok=True)
                start = time.monotonic()
                status = run.end(run.start())
                counts["sizes"] += 1
                counts["failed"] += status not in (0, "hung")
                counts["hung"] += status == "hung"
                counts["slowest end, s"] = max(counts["slowest end, s"], round(time.monotonic() - start, 1))
                counts["false success"] += status == 0 and run.digest() != wanted
                subprocess.run(["mount", "-o", "remount,size=64m", str(where)], check=True)
                judge(run, wanted, counts)
        finally:
            subprocess.run(["umount", str(where)], check=True)
            where.rmdir()


MUTATIONS = {  # what notices it, in short
    "key": ["--kills", "2", "--seeds", "1:6"],
    "step": ["--kills", "2", "--seeds", "1:6"],
    "data": ["--kills", "2", "--seeds", "1:6"],
    "history": ["--kills", "2", "--seeds", "1:6"],
    "sync": ["--fs", "POWER", "--seeds", "0:6"],
    "hash": ["--damage", "120"],
    "lock": ["--writers", "--seeds", "0:3"],
}


def is_well(counts) -> bool:
    """Whether nothing of what may not be is among these counts."""
    bad = ("no end", "refused", "other bits", "records", "hung", "false success", "silently wrong", "older one, unsaid")
    return not any(counts.get(name) for name in (*bad, "both let in"))


def mutations(results: Path) -> bool:
    """Each driver on tsunax as it is, then with one thing left out: only then may it find something."""
    seen = {}
    for left, arguments in [
        *(("", a) for a in map(list, dict.fromkeys(map(tuple, MUTATIONS.values())))),
        *MUTATIONS.items(),
    ]:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "counts")
            more = [*arguments, "--leave-out", left, "--results", str(out)]
            done = subprocess.run([sys.executable, "-m", "tests.faults", *more], capture_output=True, text=True)
            if not out.exists():
                sys.exit(done.stdout + done.stderr)
            counts = json.loads(out.read_text())["counts"]
        name = left or f"nothing: {' '.join(arguments)}"
        seen[name] = "green" if is_well(counts) else "red"
        print(f"  {name}: {seen[name]} {counts}", flush=True)
    record(results, {"what": "mutations"}, seen)
    return all((colour == "green") == name.startswith("nothing") for name, colour in seen.items())


def with_shim() -> None:
    """Build the shim and start again with it, unless it is there."""
    if hasattr(ctypes.CDLL(None), "fault_arm"):
        return
    lib = Path(tempfile.gettempdir()) / f"tsunax-fault-{os.getpid()}.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(lib), str(HERE / "shim.c"), "-ldl"], check=True)
    os.environ["LD_PRELOAD"] = str(lib)
    os.execv(sys.executable, [sys.executable, "-m", "tests.faults", *sys.argv[1:]])


def record(results: Path, what: dict, counts) -> None:
    about = {"jax": jax.__version__, "python": platform.python_version(), "date": time.strftime("%Y-%m-%d")}
    line = json.dumps({**what, **about, "counts": dict(counts)})
    print(line, flush=True)
    results.parent.mkdir(parents=True, exist_ok=True)
    with results.open("a") as file:
        file.write(line + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="tests.faults", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=0, help="kills per run")
    parser.add_argument("--fs", choices=["KILL", "POWER", "EIO", "ENOSPC", "EACCES", "EROFS"])
    parser.add_argument("--sticky", action="store_true", help="the fault stays")
    parser.add_argument("--damage", type=int, default=0, help="damaged copies")
    parser.add_argument("--manifests", type=int, default=0, help="mutated manifests")
    parser.add_argument("--disk", action="store_true")
    parser.add_argument("--signals", action="store_true")
    parser.add_argument("--writers", action="store_true")
    parser.add_argument("--mutations", action="store_true")
    parser.add_argument("--leave-out", choices=target.LEAVE_OUT, default="", help="a run, or a tsunax, without this")
    parser.add_argument("--seeds", default="0:10")
    parser.add_argument("--store", choices=["tsunax", "orbax"], default="tsunax")
    parser.add_argument("--results", type=Path, default=HERE / "results" / "counts.jsonl")
    args = parser.parse_args()
    seeds = range(*map(int, args.seeds.split(":")))
    if args.fs:
        with_shim()
        with contextlib.suppress(OSError, KeyError):
            os.unlink(os.environ["LD_PRELOAD"])
    counts: collections.Counter = collections.Counter()
    left = {"left out": args.leave_out} if args.leave_out else {}
    if args.store == "orbax":
        Run.store = others.Orbax
        left["store"] = "orbax's CheckpointManager"
    if args.mutations:
        sys.exit(not mutations(args.results))
    if args.damage:
        target.leave_out(args.leave_out)
        damage(args.damage, seeds.start, counts)
        record(args.results, {"what": "damage", "seed": seeds.start} | left, counts)
        return
    if args.manifests:
        hostile.run(args.manifests, seeds.start, counts)
        record(args.results, {"what": "manifests", "seed": seeds.start}, counts)
        sys.exit(not hostile.is_well(counts))
    with tempfile.TemporaryDirectory() as cache:
        wanted, seconds = undisturbed(Path(cache))
        if args.kills:
            for seed in seeds:
                with scratch(Path(cache), leave_out=args.leave_out) as run:
                    kills(seed, args.kills, run, seconds, counts)
                    counts["runs"] += 1
                    judge(run, wanted, counts)
                print(f"  {seed}: {dict(counts)}", flush=True)
            record(args.results, {"what": "kills", "each": args.kills, "seeds": args.seeds} | left, counts)
        if args.fs:
            fs(args.fs, args.sticky, seeds, Path(cache), wanted, counts, args.leave_out)
            what = {"what": f"fs {args.fs}" + (" sticky" if args.sticky else ""), "seeds": args.seeds}
            record(args.results, what | left, counts)
        if args.signals:
            ends = {fitted: undisturbed(Path(cache), fitted) for fitted in (True, False)}
            for seed in seeds:
                fitted = seed % 4 < 2
                with scratch(Path(cache)) as run:
                    signals(seed, run, ends[fitted][1], counts)
                    judge(run, ends[fitted][0], counts, fitted)
                print(f"  {seed}: {dict(counts)}", flush=True)
            record(args.results, {"what": "signals", "seeds": args.seeds}, counts)
        if args.writers:
            for _ in seeds:
                with scratch(Path(cache), leave_out=args.leave_out) as run:
                    writers(run, wanted, counts)
            record(args.results, {"what": "writers", "seeds": args.seeds} | left, counts)
        if args.disk:
            disk(Path(cache), wanted, counts)
            record(args.results, {"what": "disk"}, counts)


if __name__ == "__main__":
    main()
