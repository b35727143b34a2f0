"""Two runs that start in one directory at once: one is refused, the other ends as if it had been alone.

python -m campaigns.writers --seeds 0:20
"""

import collections
import tempfile
from pathlib import Path

from campaigns.runs import STEPS, Run, arguments, parse, record, scratch, undisturbed


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


def main() -> None:
    args, about = parse(arguments(__doc__, "0:20"))
    counts: collections.Counter = collections.Counter()
    with tempfile.TemporaryDirectory() as cache:
        wanted, _ = undisturbed(Path(cache))
        for _ in args.seeds:
            with scratch(Path(cache), leave_out=args.leave_out) as run:
                writers(run, wanted, counts)
    record(args.results, {"what": "writers"} | about, counts)


if __name__ == "__main__":
    main()
