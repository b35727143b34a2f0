"""Runs that save into a bucket are killed at random: the checkpoint that a next run restores has the bits of its step.

The bucket is an emulator on the loopback.

python -m campaigns.buckets --kills 50      # needs gcsfs and gcp-storage-emulator
"""

import argparse
import collections
import os
import random
import subprocess
import sys
import time
import warnings

import tsunax as ts

from campaigns import training_run
from campaigns.runs import HERE, record

STEPS = 400
BATCH = "np.ones((4, 6), np.float32), np.ones((4, 2), np.float32)"
PROGRAM = f"""
import sys, numpy as np, tsunax as ts
from campaigns import training_run
state, step = training_run.make(600)
checkpoints = ts.Checkpoints(sys.argv[1], timeout=60)
state = checkpoints.restore(state).state
for _ in range({STEPS}):
    state, _info = step(state, ({BATCH}))
    checkpoints.save(state, data={{"step": int(state.step)}})
    print(int(state.step), training_run.digest(state), flush=True)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    from tests.programs import bucket

    counts: collections.Counter = collections.Counter()
    rng, digests, at = random.Random(args.seed), {}, 0
    command = [sys.executable, "-m", "tests.programs.bucket"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        os.environ.update(bucket.address(int(server.stdout.readline())))  # type: ignore[union-attr]
        path, like = "gs://bucket/run", training_run.make(600)[0]
        while counts["kills"] < args.kills:
            environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
            run = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, path], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                text=True, env=environment,
            )  # fmt: skip
            for _ in range(rng.randint(2, 6)):
                words = run.stdout.readline().split()  # type: ignore[union-attr]
                if not words:
                    break
                step, counts["saves"] = int(words[0]), counts["saves"] + 1
                counts["other bits"] += digests.setdefault(step, words[1]) != words[1]
            time.sleep(rng.uniform(0, 0.3))
            run.kill()
            run.wait()
            counts["kills"] += 1
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = ts.Checkpoints(path, read_only=True, timeout=60).restore(like)
            done = found.step or 0
            counts["steps lost, at most"] = max(counts["steps lost, at most"], max(digests, default=0) - done)
            counts["gone back"] += done < at
            if done in digests:
                counts["same bits" if training_run.digest(found.state) == digests[done] else "silently wrong"] += 1
            at = done
            print(f"  {dict(counts)}", flush=True)
        server.kill()
    record(HERE / "results" / "counts.jsonl", {"what": "buckets", "seed": args.seed}, counts)


if __name__ == "__main__":
    main()
