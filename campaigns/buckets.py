"""Runs that save into a bucket are killed, and objects are damaged: what a next run restores has the bits of its step.

Half of the kills come at a random time, half just before a random request to the bucket. Then objects of the newest
checkpoint are damaged, one at a time. The bucket is an emulator on the loopback.

python -m campaigns.buckets --kills 50               # Google's; needs obstore
python -m campaigns.buckets --kills 50 --bucket s3   # needs moto[s3,server], too
"""

import argparse
import collections
import importlib
import itertools
import os
import random
import subprocess
import sys
import time
import warnings
from contextlib import ExitStack

import tsunax as ts

from campaigns import training_run
from campaigns.runs import HERE, record

STEPS = 400
BATCH = "np.ones((4, 6), np.float32), np.ones((4, 2), np.float32)"
PROGRAM = f"""
import dataclasses, os, signal, sys, numpy as np, tsunax as ts
from campaigns import training_run
state, step = training_run.make(600)
checkpoints = ts.Checkpoints(sys.argv[1], timeout=60)
state = checkpoints.restore(state).state

class Store:  # the process dies just before a request
    def __init__(self, store, count):
        self.store, self.count = store, count
    def __getattr__(self, name):
        self.count -= 1
        if self.count == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return getattr(self.store, name)

path = checkpoints.home.path
checkpoints.home.path = dataclasses.replace(path, store=Store(path.store, int(sys.argv[2])))
for _ in range({STEPS}):
    state, _info = step(state, ({BATCH}))
    print(int(state.step), training_run.digest(state), flush=True)
    checkpoints.save(state, data={{"step": int(state.step)}})
"""


def restored(path: str, like):
    """The newest checkpoint, and whether a warning was given."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        found = ts.Checkpoints(path, read_only=True, timeout=60).restore(like)
    return found, bool(heard)


def kill(path: str, rng: random.Random, counts: collections.Counter, digests: dict[int, str]) -> int:
    """Start a run and kill it; returns its last step."""
    last, request = 0, rng.choice([0, rng.randint(5, 60)])
    command = [sys.executable, "-c", PROGRAM, path, str(request)]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)
    lines = iter(run.stdout.readline, "")  # type: ignore[union-attr]
    seen = list(itertools.islice(lines, STEPS if request else rng.randint(2, 6)))
    if not request:
        time.sleep(rng.uniform(0, 0.3))
    run.kill()
    run.wait()
    for words in map(str.split, [*seen, *lines]):
        if len(words) == 2:  # the process may have died within a line
            last, counts["saves"] = int(words[0]), counts["saves"] + 1
            counts["other bits"] += digests.setdefault(last, words[1]) != words[1]
    counts["kills before a request" if request else "kills at a time"] += 1
    return last


def damage(path: str, like, rng: random.Random, counts: collections.Counter, digests: dict[int, str]) -> None:
    """Change an object of the newest checkpoint, restore, and put it back."""
    folder = ts.Checkpoints(path, read_only=True, timeout=60).path
    newest = max(int(key.partition("/")[0]) for key in folder.keys() if key.endswith("manifest.json"))  # noqa: SIM118
    target = folder / rng.choice(folder.keys(f"{newest}/"))
    content, _ = target.read(10**9)
    position, kind = rng.randrange(len(content)), rng.choice(["bit", "cut", "empty", "absent"])
    if kind == "absent":
        target.unlink()
    else:
        flipped = bytes([content[position] ^ 1 << rng.randrange(8)])
        changed = {
            "bit": content[:position] + flipped + content[position + 1 :],
            "cut": content[:position],
            "empty": b"",
        }
        target.write(changed[kind])
    found, is_warned = restored(path, like)
    target.write(content)
    is_right = training_run.digest(found.state) == digests.get(found.step or 0)
    outcome = "silently wrong" if not is_right else "harmless" if found.step == newest else "older one"
    is_lost = kind == "absent" and str(target).endswith("manifest.json")
    counts["damaged: " + outcome + ("" if outcome != "older one" or is_warned else ", no warning")] += 1
    counts["damaged: manifests that were absent"] += is_lost


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--damages", type=int, default=100)
    parser.add_argument("--bucket", choices=["gs", "s3"], default="gs")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    program = importlib.import_module(f"tests.programs.{args.bucket}_bucket")

    counts: collections.Counter = collections.Counter()
    rng, digests, at = random.Random(args.seed), {}, 0
    command = [sys.executable, "-m", program.__name__]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server,
        ExitStack() as stack,
    ):
        stack.callback(server.kill)
        os.environ.update(program.address(int(server.stdout.readline())))  # type: ignore[union-attr]
        path, like = f"{args.bucket}://bucket/run", training_run.make(600)[0]
        for _ in range(args.kills):
            last = kill(path, rng, counts, digests)
            found, _ = restored(path, like)
            done = found.step or 0
            counts["steps lost, at most"] = max(counts["steps lost, at most"], last - done)
            counts["gone back"] += done < at
            if done:
                is_right = training_run.digest(found.state) == digests[done]
                counts["same bits" if is_right else "silently wrong"] += 1
            at = done
            print(f"  {dict(counts)}", flush=True)
        for _ in range(args.damages):
            damage(path, like, rng, counts, digests)
        print(f"  {dict(counts)}", flush=True)
    record(HERE / "results" / "counts.jsonl", {"what": "buckets", "bucket": args.bucket, "seed": args.seed}, counts)


if __name__ == "__main__":
    main()
