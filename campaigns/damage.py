"""Flipped, cut, zeroed, swapped, removed bytes of a checkpoint: each must be noticed, the older one restored.

python -m campaigns.damage --count 300
"""

import collections
import random
import tempfile
import warnings
from pathlib import Path

import numpy as np
import tsunax as ts

from campaigns import training_run
from campaigns.runs import Run, arguments, parse, record


def damage(n: int, seed: int, counts) -> None:
    """Damage one file of the newest of two checkpoints, restore in this process, compare with what was saved.

    The state is wide: arrays of more than some bytes are files without any checksum of TensorStore's.
    """
    rng = random.Random(seed)
    state, step = training_run.make(60_000)
    batch = np.ones((4, 6), np.float32), np.ones((4, 2), np.float32)
    digests = {}
    with tempfile.TemporaryDirectory() as folder:
        with (Run.store or ts.Checkpoints)(folder) as checkpoints:
            for _ in range(2):
                state, _info = step(state, batch)
                checkpoints.save(state, data={"epoch": 1, "position": 2}, history={"loss": np.arange(50.0)})
                digests[int(state.step)] = training_run.digest(state)
        like, _ = training_run.make(60_000)
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
            found = (Run.store or ts.Checkpoints)(folder, read_only=True).restore(like)
        except Exception as error:
            counts["refused"] += 1
            assert not Run.is_ours or isinstance(error, ts.errors.CheckpointError), error
            return
    if training_run.digest(found.state) != digests[found.step]:
        counts["silently wrong"] += 1
        print(f"  wrong: {what}", flush=True)
    elif found.step == 2:
        counts["harmless"] += 1
    elif any("step 2" in str(w.message) for w in told):
        counts["older one, with a warning"] += 1
    else:
        counts["older one, unsaid"] += 1


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--count", type=int, default=300, help="damaged copies (300)")
    parser.add_argument("--seed", type=int, default=0)
    args, about = parse(parser)
    counts: collections.Counter = collections.Counter()
    training_run.leave_out(args.leave_out)
    damage(args.count, args.seed, counts)
    record(args.results, {"what": "damage", "seed": args.seed} | about, counts)


if __name__ == "__main__":
    main()
