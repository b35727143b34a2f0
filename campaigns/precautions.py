"""Whether the campaigns see: each on tsunax as it is, then with one precaution left out, and only then it may fail.

python -m campaigns.precautions
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from campaigns.runs import HERE, is_well, record

KILLS = ["kills", "--most", "2", "--seeds", "1:6"]
NOTICED_BY = {  # what is left out: the campaign, in short
    "key": KILLS,
    "step": KILLS,
    "data": KILLS,
    "history": KILLS,
    "sync": ["file_systems", "--fault", "POWER", "--seeds", "0:6"],
    "hash": ["damage", "--count", "120"],
    "lock": ["writers", "--seeds", "0:3"],
}


def run(campaign: list[str], left_out: str) -> dict:
    """The counts of one campaign in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "counts")
        command = [sys.executable, "-m", f"campaigns.{campaign[0]}", *campaign[1:]]
        more = ["--leave-out", left_out, "--results", str(out)]
        done = subprocess.run([*command, *more], capture_output=True, text=True)
        if not out.exists():
            sys.exit(done.stdout + done.stderr)
        return json.loads(out.read_text())["counts"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--results", type=Path, default=HERE / "results" / "counts.jsonl")
    args, seen = parser.parse_args(), {}
    whole = {"nothing: " + " ".join(campaign): ("", campaign) for campaign in NOTICED_BY.values()}
    for name, (left_out, campaign) in {**whole, **{k: (k, v) for k, v in NOTICED_BY.items()}}.items():
        counts = run(campaign, left_out)
        seen[name] = "green" if is_well(counts) else "red"
        print(f"  {name}: {seen[name]} {counts}", flush=True)
    record(args.results, {"what": "mutations"}, seen)
    sys.exit(any((color == "green") != name.startswith("nothing") for name, color in seen.items()))


if __name__ == "__main__":
    main()
