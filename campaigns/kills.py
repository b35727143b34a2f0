"""`kill -9` to a run, every second one aimed at saves; the same command again must end with the same bits.

python -m campaigns.kills                          # 10 runs, each killed up to 3 times
python -m campaigns.kills --most 4 --seeds 0:500
python -m campaigns.kills --fit                    # by `fit`: also, `history.time` is the wall clock, +- 1 %
"""

import collections
import contextlib
import os
import random
import signal
import tempfile
import time
from pathlib import Path

from campaigns.runs import EVERY, PATIENCE, STEPS, Run, arguments, is_alive, judge, parse, record, scratch, undisturbed


def saving(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return any(
            name.startswith(".tsunax-") or "checkpoint-tmp" in name or name.endswith(".unfinished")
            for name in os.listdir(folder)
        )
    return False


def kills(seed: int, most: int, run: Run, seconds: float, counts, fitted: bool | None = None) -> None:
    rng = random.Random(seed)
    for _ in range(most):
        pid, start = run.start(fitted=fitted), time.monotonic()
        if seed % 2:  # at a save: one of those to come, some way into it
            skip = rng.randrange(0, 3 if fitted else STEPS // EVERY)
            until = start + PATIENCE
            for _ in range(skip + 1):
                while time.monotonic() < until and not saving(run.folder) and is_alive(pid):
                    time.sleep(0.001)
                while skip and time.monotonic() < until and saving(run.folder) and is_alive(pid):
                    time.sleep(0.001)
                skip = max(0, skip - 1)
            time.sleep(rng.uniform(0, 0.08))
        else:
            time.sleep(rng.uniform(0, seconds))
        struck = is_alive(pid)
        if struck:
            os.kill(pid, signal.SIGKILL)
            counts["kills"] += 1
        run.end(pid)
        if run.digest() is not None:
            break


def main() -> None:
    parser = arguments(__doc__, "0:10")
    parser.add_argument("--most", type=int, default=3, help="kills of a run (3)")
    parser.add_argument("--fit", action="store_true", help="runs of fit, and of their time")
    args, about = parse(parser)
    fitted = True if args.fit else None
    counts: collections.Counter = collections.Counter()
    with tempfile.TemporaryDirectory() as cache:
        wanted, seconds = undisturbed(Path(cache), fitted)
        for seed in args.seeds:
            with scratch(Path(cache), leave_out=args.leave_out) as run:
                kills(seed, args.most, run, seconds, counts, fitted)
                counts["runs"] += 1
                judge(run, wanted, counts, fitted)
            print(f"  {seed}: {dict(counts)}", flush=True)
    record(args.results, {"what": "kills", "each": args.most, "fit": args.fit} | about, counts)


if __name__ == "__main__":
    main()
