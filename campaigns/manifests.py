"""Descriptions of checkpoints as somebody else might write them: mutated manifests, metadata of orbax, headers.

Each one is given to the loader with its checksums made to fit, under an audit hook. What must come of it: a
CheckpointError, or the params that were saved.

    python -m campaigns.manifests --count 10000
"""

import argparse
import collections
import contextlib
import copy
import hashlib
import json
import os
import random
import resource
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
from tsunax import Checkpoints
from tsunax.checkpoints import exchange
from tsunax.errors import CheckpointError

from campaigns import runs, training_run

VALUES = [
    None, True, -1, 0, 2**31, 2**40, 2**70, -(2**63), 1e308, "", "x" * 1000, "\0", "object", "float64", "O", "<U9", [],
    {}, [[[[]]]], {"$array": 99}, {"$dict": 3}, {"$key": "rbg"}, {"$tuple": [{"$array": 0}] * 50}, [0] * 1000,
    "__import__('os').system('true')", "cos\nsystem\n(S'true'\ntR.",
]  # fmt: skip
PATHS = [
    "..", "../..", "../../etc/passwd", "/etc/passwd", "/proc/self/mem", "/dev/zero", "%2e%2e%2f", "%252e%252e/x",
    "a\0b", "..\\..\\x", "C:\\x", "CON", "file:///etc/passwd", "gs://bucket/x", "s3://bucket/x", "http://localhost/x",
    "~/x", "\u202e/x", "․․/x", "x" * 4096, "\n", "state/../../../x", ".", "",
]  # fmt: skip
NUMBERS = [
    -1,
    2**31 - 1,
    2**31,
    2**32,
    2**47,
    2**48,
    2**53 + 1,
    2**63 - 1,
    2**63,
    2**64,
    10**40,
    10**4000,
    -(10**300),
    0.5,
]
WATCHED = (
    "pickle.find_class",
    "marshal.loads",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "subprocess.Popen",
    "os.fork",
)
WATCHED += (
    "socket.connect",
    "socket.getaddrinfo",
    "urllib.Request",
    "ctypes.dlopen",
    "exec",
    "compile",
    "code.__new__",
)
SECONDS, BYTES = 5.0, 300 << 20  # of one case; of all together


def places(x, at=()):
    """The path to every value of some JSON."""
    yield at
    if isinstance(x, (dict, list)):
        for key, y in x.items() if isinstance(x, dict) else enumerate(x):
            yield from places(y, (*at, key))


def put(x, at, value):
    if not at:
        return value
    out = copy.copy(x)
    out[at[0]] = put(x[at[0]], at[1:], value)
    return out


def of(x, at):
    for key in at:
        x = x[key]
    return x


def structure(rng, body):
    """One value exchanged, taken away, doubled, or given the name of another."""
    at = rng.choice(list(places(body))[1:])
    parent, key = of(body, at[:-1]), at[-1]
    how = rng.random()
    if how < 0.6:
        return put(body, at, rng.choice(VALUES))
    new = copy.copy(parent)
    if isinstance(parent, dict):
        value = new.pop(key)
        if how > 0.8:
            new[rng.choice([*parent, *PATHS, "__class__", "$array"])] = value
    elif how < 0.75:
        del new[key]
    else:
        new[key:key] = [new[key]] * rng.choice([1, 50, 5000])
    return put(body, at[:-1], new)


def types(rng, body):
    """A number as a text, a list as a dict, a text as a list: the same content in another type."""
    at = rng.choice(list(places(body)))
    x = of(body, at)
    others = {
        list: lambda x: dict(enumerate(map(str, x))) and {str(i): y for i, y in enumerate(x)},
        dict: lambda x: list(x.items()),
        str: lambda x: rng.choice([[x], list(x), x.encode().hex(), {"$dict": x}]),
        int: lambda x: rng.choice([str(x), float(max(-(10**300), min(x, 10**300))), [x], bool(x), x + 1, x - 1]),
    }
    return put(body, at, others.get(type(x), lambda x: [x])(x))


def numbers(rng, body):
    found = [at for at in places(body) if type(of(body, at)) in (int, float)]
    for at in rng.sample(found, min(len(found), rng.choice([1, 1, 1, 3, 20]))):
        body = put(body, at, rng.choice(NUMBERS))
    return body


def paths(rng, body):
    """Names that lead elsewhere, in the place of texts and of keys."""
    found = [at for at in places(body) if isinstance(of(body, at), str)]
    return put(body, rng.choice(found), rng.choice(PATHS)) if found else body


def nested(rng, body):
    """As text, since Python itself does not write it: a value some thousand levels deep, or a key that comes twice."""
    text = json.dumps(put(body, rng.choice(list(places(body))[1:]), "@@"))
    depth = rng.choice([70, 130, 900, 5000, 100_000])
    deep = rng.choice(['{"a":' * depth + "1" + "}" * depth, "[" * depth + "]" * depth, "[" * depth, "9" * depth])
    if rng.random() < 0.2:
        key = rng.choice(list(body))
        return text.replace('"@@"', "0").replace("{", f"{{{json.dumps(key)}: 1, ", 1).encode()
    return text.replace('"@@"', deep).encode()


def octets(rng, body):
    content = bytearray(json.dumps(body).encode())
    for _ in range(rng.choice([1, 1, 2, 8, 64])):
        if not content:
            break
        at, how = rng.randrange(len(content)), rng.randrange(5)
        if how < 2:
            content[at] ^= 1 << rng.randrange(8)
        elif how == 2:
            del content[at : at + rng.choice([1, 5, 200])]
        elif how == 3:
            content[at:at] = rng.choice(
                [b"\0", b"\xff\xfe", b'"', b"{", b"]", b"NaN", b"-", b"e999", rng.randbytes(20)]
            )
        else:
            content[at:at] = content[at : at + rng.choice([10, 1000])]
    return bytes(content)


MUTATIONS = [structure, structure, types, numbers, paths, nested, octets]


def mutated(rng, body) -> bytes:
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        body = rng.choice(MUTATIONS)(rng, body)
        if isinstance(body, bytes):
            return body
        if not isinstance(body, dict) or not body:
            break
    return json.dumps(body).encode()


def write_manifest(folder: Path, content: bytes) -> None:
    (folder / "manifest.json").write_bytes(content)
    (folder / "manifest.sha256").write_text(f"{hashlib.sha256(content).hexdigest()}  manifest.json\n")


def run(n: int, seed: int, counts) -> None:
    """Every tenth one is the header of the arrays, with a manifest that fits; every tenth that of an export."""
    rng, reached = random.Random(seed), []
    state, step = training_run.make()
    state, _ = step(state, (np.ones((4, 6), np.float32), np.ones((4, 2), np.float32)))
    like, _ = training_run.make()
    wanted = training_run.digest(state.params)
    with tempfile.TemporaryDirectory() as top:
        run_at, file = Path(top, "run"), Path(top, "a.safetensors")
        with Checkpoints(run_at) as checkpoints:
            checkpoints.save(state, data={"n": 1, "order": (1, [2])}, history={"loss": np.arange(9.0)})
        exchange.save(file, state)
        folder = run_at / "1"
        good = json.loads((folder / "manifest.json").read_bytes())
        content = file.read_bytes()
        length = int.from_bytes(content[:8], "little")
        header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
        stored = folder / "arrays" / "0.safetensors"
        whole = stored.read_bytes()
        rest = 8 + int.from_bytes(whole[:8], "little")
        reader = Checkpoints(run_at, read_only=True, timeout=SECONDS)
        manifests = lambda: reader.restore(like, step=1).state

        def of_arrays():
            new = mutated(rng, json.loads(whole[8:rest]))
            new = (len(new) if rng.random() < 0.9 else rng.choice(NUMBERS[:8]) % 2**64).to_bytes(8, "little") + new
            stored.write_bytes(new + whole[rest:])
            write_manifest(folder, json.dumps(good).encode())
            try:
                return manifests()
            finally:
                stored.write_bytes(whole)

        def of_header():
            about = header["__metadata__"]
            new = {"__metadata__": about, **{k: v for k, v in header.items() if k != "__metadata__"}}
            body = mutated(rng, new)
            file.write_bytes(len(body).to_bytes(8, "little") + body + data)
            return exchange.restore(file, like)

        def of_manifest():
            write_manifest(folder, mutated(rng, good))
            return manifests()

        def one(kind):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return kind()

        cases = [of_manifest] * 8 + [of_arrays, of_header]
        listed = lambda: [sorted(os.listdir(at)) for at in (top, run_at, os.getcwd())]
        before_all = listed()
        write_manifest(folder, json.dumps(good).encode())
        assert (
            training_run.digest(manifests().params) == wanted
            and training_run.digest(exchange.restore(file, like).params) == wanted
        )
        for kind in cases * 3:  # what error paths import, they have imported
            with contextlib.suppress(CheckpointError):
                one(kind)
        most, before, slowest, active = 0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0.0, [True]

        def hook(event, args):
            if active[0] and event in WATCHED:
                reached.append((event, str(args)[:200]))

        sys.addaudithook(hook)
        try:
            for i in range(n):
                kind, start = cases[i % len(cases)], time.monotonic()
                try:
                    found = one(kind)
                except CheckpointError as error:
                    counts["refused"] += 1
                    most = max(most, len(str(error)))
                except BaseException as error:
                    counts["other errors"] += 1
                    print(f"  {kind.__name__} {i}: {type(error).__name__} {str(error)[:300]}", flush=True)
                else:
                    same = training_run.digest(found.params) == wanted
                    counts["as saved" if same else "silently wrong"] += 1
                slowest = max(slowest, time.monotonic() - start)
        finally:
            active[0] = False
        counts["manifests"] += n
        counts["code run"] += len(reached)
        counts["slowest, s"] = round(slowest, 2)
        counts["memory grown, MB"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
        counts["longest error"] = most
        counts["files elsewhere"] = int(listed() != before_all)
        for event in reached[:5]:
            print(" ", event, flush=True)


def is_well(counts) -> bool:
    bad = ("other errors", "silently wrong", "code run", "files elsewhere")
    return (
        not any(counts[name] for name in bad)
        and counts["slowest, s"] < SECONDS
        and counts["memory grown, MB"] < BYTES >> 20
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000, help="mutated files (10,000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=runs.HERE / "results" / "counts.jsonl")
    args, counts = parser.parse_args(), collections.Counter()
    run(args.count, args.seed, counts)
    runs.record(args.results, {"what": "manifests", "seed": args.seed}, counts)
    sys.exit(not is_well(counts))


if __name__ == "__main__":
    main()
