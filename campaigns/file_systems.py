"""File systems that fail: on one change of a run, or because the disk is full.

    python -m campaigns.file_systems --fault KILL --seeds 0:100    # killed on entry to a change, spread over all
    python -m campaigns.file_systems --fault POWER --seeds 0:100   # the same, and what was not synced by then is lost
    python -m campaigns.file_systems --fault ENOSPC --sticky --seeds 0:30
    python -m campaigns.file_systems --fault DISK                  # a small tmpfs; where mounting is allowed

Needs a C compiler: a library in front of the system's calls makes them fail.
"""

import collections
import contextlib
import ctypes
import errno
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax

from campaigns import training_run
from campaigns.runs import EVERY, HERE, STEPS, Run, arguments, arm, judge, parse, record, scratch, undisturbed


def with_faults() -> None:
    """Build the library and start again with it, unless it is there."""
    if hasattr(ctypes.CDLL(None), "fault_arm"):
        return
    lib = Path(tempfile.gettempdir()) / f"tsunax-fault-{os.getpid()}.so"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-O1", "-o", str(lib), str(HERE / "file_system_faults.c"), "-ldl"], check=True
    )
    os.environ["LD_PRELOAD"] = str(lib)
    os.execv(sys.executable, [sys.executable, "-m", "campaigns.file_systems", *sys.argv[1:]])


def fs(kind: str, sticky: bool, seeds: range, cache: Path, wanted: str, counts, leave_out: str = "") -> None:
    """Seed i of n hits the change that is i/n of the way through an undisturbed run's."""
    with scratch(cache) as run:
        pid = os.fork()
        if not pid:
            arm(run.folder, -1, 0, 0)
            jax.config.update("jax_compilation_cache_dir", str(cache))
            training_run.main(str(run.folder), str(run.log), STEPS, EVERY, store=Run.store)
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


def main() -> None:
    parser = arguments(__doc__, "0:10")
    faults = ["KILL", "POWER", "EIO", "ENOSPC", "EACCES", "EROFS", "DISK"]
    parser.add_argument("--fault", choices=faults, default="KILL")
    parser.add_argument("--sticky", action="store_true", help="the fault stays")
    args, about = parse(parser)
    counts: collections.Counter = collections.Counter()
    if args.fault != "DISK":
        with_faults()
        with contextlib.suppress(OSError, KeyError):
            os.unlink(os.environ["LD_PRELOAD"])
    with tempfile.TemporaryDirectory() as cache:
        wanted, _ = undisturbed(Path(cache))
        if args.fault == "DISK":
            disk(Path(cache), wanted, counts)
            record(args.results, {"what": "disk"} | about, counts)
        else:
            fs(args.fault, args.sticky, args.seeds, Path(cache), wanted, counts, args.leave_out)
            what = f"fs {args.fault}" + (" sticky" if args.sticky else "")
            record(args.results, {"what": what} | about, counts)


if __name__ == "__main__":
    main()
