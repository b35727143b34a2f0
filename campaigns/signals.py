"""SIGTERM and SIGINT to a run of `fit` at any time, sometimes thrice: it saves what it has done, and ends.

python -m campaigns.signals --seeds 0:200
"""

import collections
import os
import random
import signal
import tempfile
import time
from pathlib import Path

from campaigns.runs import Run, arguments, is_alive, judge, parse, record, scratch, undisturbed

GRACE = 30.0  # seconds


def signals(seed: int, run: Run, seconds: float, counts) -> None:
    """A signal, or three, at a random time: the run must save what it has done, and end with the status of it."""
    rng = random.Random(seed)
    kind = (signal.SIGTERM, signal.SIGINT)[seed % 2]
    pid, start = run.start(fitted=seed % 4 < 2), time.monotonic()
    while seed % 8 > 1 and not run.lines("RESUMED") and is_alive(pid):  # the others: also before `fit`
        time.sleep(0.002)
    time.sleep(rng.uniform(0, max(0.1, seconds - (time.monotonic() - start))))
    struck, began = is_alive(pid), bool(run.lines("RESUMED"))
    for _ in range(3 if seed % 10 == 0 else 1):
        if is_alive(pid):
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


def main() -> None:
    args, about = parse(arguments(__doc__, "0:20"))
    counts: collections.Counter = collections.Counter()
    with tempfile.TemporaryDirectory() as cache:
        ends = {fitted: undisturbed(Path(cache), fitted) for fitted in (True, False)}
        for seed in args.seeds:
            fitted = seed % 4 < 2
            with scratch(Path(cache)) as run:
                signals(seed, run, ends[fitted][1], counts)
                judge(run, ends[fitted][0], counts, fitted)
            print(f"  {seed}: {dict(counts)}", flush=True)
    record(args.results, {"what": "signals"} | about, counts)


if __name__ == "__main__":
    main()
