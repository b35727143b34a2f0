"""Descriptions of checkpoints as somebody else might write them: mutated manifests, metadata of orbax, headers.

Each one is given to the loader with its checksums made to fit, under an audit hook. What must come of it: a
CheckpointError, or the params that were saved. Then whole files and directories of others, mutated and made by a
grammar, in every format and both homes: a CheckpointError or arrays, none from elsewhere, within bounds of memory and
time.

    python -m campaigns.manifests --count 10000 --files 5000
"""

import argparse
import collections
import contextlib
import copy
import ctypes
import gc
import hashlib
import json
import os
import random
import re
import resource
import shutil
import sys
import tempfile
import time
import warnings
from pathlib import Path

import jax
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
SECRET = 12345.0  # in files outside of what is read


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


# ------------------------------------------------------------------------------------------------ files of others


def memory(f):
    """(what `f()` returns or raises, bytes by which the process had grown at most); 0 where Linux does not say."""
    known = lambda name: int(re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())[1]) << 10
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)  # else memory that is free already would hide new memory
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here on
        before = known("VmHWM")
    except (OSError, TypeError):
        before = None
    try:
        out = f()
    except Exception as error:
        out = error
    return out, 0 if before is None else known("VmHWM") - before


def packed(rng, depth=0):
    """Some msgpack as flax might write it, or not."""
    import msgpack

    how = rng.random()
    if how < 0.35 and depth < 5:
        keys = [
            "w",
            "b",
            "a/b",
            "",
            "..",
            "x" * 300,
            "__msgpack_chunked_array__",
            "shape",
            "chunks",
            "0",
            "1",
            "\u202e",
        ]
        return {rng.choice(keys): packed(rng, depth + 1) for _ in range(rng.randrange(4))}
    if how < 0.75:
        shape = rng.choice([(), (3,), (2, 2), (0,), (2**40,), (2**47, 2**47, 0), (-1,), (1,) * 70, 5, [[1]]])
        dtype = rng.choice(
            ["float32", "bfloat16", "int64", "O", "f4," * 3000, "U1", "i4,O", "V0", 5, "(99,99)f4", "S0"]
        )
        content = rng.choice([b"", bytes(4), bytes(12), bytes(16), rng.randbytes(24)])
        body = msgpack.packb(rng.choice([(shape, dtype, content), (shape, dtype), content, [shape] * 3]))
        return msgpack.ExtType(rng.choice([1, 1, 1, 2, 3, 9]), body)
    if how < 0.85 and depth < 5:
        return [packed(rng, depth + 1) for _ in range(rng.randrange(4))]
    return rng.choice([None, True, 3, -1, 2**63, 1.5, "text", b"bytes", [], {}])


def bomb(rng) -> tuple[str, bytes]:
    """(name, content) of a file that is small for what it says."""
    n = rng.choice([1000, 300_000, 2_000_000])
    many = lambda piece: b",".join([piece] * n)
    numbered = lambda piece: b",".join(piece % i for i in range(min(n, 400_000)))
    header = lambda text: len(text).to_bytes(8, "little") + text
    piece = rng.choice([b"{}", b"[]", b'{"":1}', b"[1]", b'"ab"', b"1.5", b"1000", b'"\xf0\x9f\x98\x80"'])
    empty = b'"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}'
    array = b"\xc7\x0c\x01\x93\x91\x00\xa7float32\xc4\x00"
    listed = lambda value, count: b"\x81\xa1a\xdd" + count.to_bytes(4, "big") + value * count
    return rng.choice(
        [
            ("model.safetensors.index.json", b'{"weight_map":{"a":[' + many(piece) + b"]}}"),
            ("model.safetensors.index.json", b'{"weight_map":{' + numbered(b'"%d":"a.safetensors"') + b"}}"),
            ("a.safetensors", header(b"{" + numbered(empty) + b"}")),
            ("a.safetensors", header(b'{"__metadata__":{' + numbered(b'"%d":""') + b"}}")),
            ("a.safetensors", header(b'{"a":{"dtype":"F32","shape":[' + many(b"0") + b'],"data_offsets":[0,0]}}')),
            ("a.safetensors", header(many(piece))),
            ("a.msgpack", listed(rng.choice([b"\x80", b"\x90", b"\x01", b"\x81\x01\x81\x01\x01", array]), n)),
            ("a.msgpack", rng.choice([b"\x81\xa1a", b"\x91", b"\x81\xa0", b"\xdd\0\x10\0\0"]) * n),
            ("a.msgpack", rng.choice([b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9"]) + rng.randbytes(4)),
        ]
    )


def foreign_files(top: Path, value: float) -> dict[str, tuple[Path, str]]:
    """Real files of every format below `top`: {name: (what to mutate, what to read)}."""
    import flax.serialization
    import orbax.checkpoint as v0
    from orbax.checkpoint import v1

    tree = {"a": {"w": np.full((2, 3), value, np.float32), "b": np.ones(3, np.float16)}, "n": np.arange(4)}
    single, parts, flax_file = top / "single", top / "parts", top / "flax" / "a.msgpack"
    exchange.save(single / "model.safetensors", tree)
    for i, name in enumerate(tree):
        exchange.save(parts / f"{i}.safetensors", {name: tree[name]})
    names = {name: "0.safetensors" for name in exchange.contents(parts / "0.safetensors")} | {"n": "1.safetensors"}
    (parts / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    flax_file.parent.mkdir()
    flax_file.write_bytes(flax.serialization.to_bytes(tree))
    with v0.StandardCheckpointer() as checkpointer:
        checkpointer.save(top / "standard", tree)
    v0.PyTreeCheckpointer(use_ocdbt=False).save(top / "plain", tree)
    v1.save(top / "v1", tree)
    for store in ("files", "orbax"):
        with Checkpoints(top / store, store=store) as checkpoints:
            checkpoints.save(tree, step=1, history={"loss": np.arange(9.0)})
    found = {name: (top / name, top / name) for name in ("single", "parts", "standard", "plain", "v1")}
    return found | {"flax": (top / "flax", flax_file), **{x: (top / x / "1", top / x) for x in ("files", "orbax")}}


def read_foreign(name: str, path: Path, has_like: bool):
    like = {"a": {"w": np.zeros((2, 3), np.float32), "b": np.zeros(3, np.float16)}, "n": np.zeros(4, int)}
    if name in ("files", "orbax"):
        return Checkpoints(path, read_only=True, timeout=SECONDS).restore(like).state
    formats = {"single": "safetensors", "parts": "safetensors", "flax": "flax"}
    return exchange.restore(path, like if has_like else None, format=formats.get(name, "orbax"))


def spoil(rng, folder: Path, outside: Path) -> str:
    """One file or directory below `folder` damaged, replaced, or led elsewhere; the name of what was done."""
    paths = sorted(folder.rglob("*"))
    files = [path for path in paths if path.is_file()]
    hows = ["octets", "text", "text", "many", "link", "kind", "other", "pipe", "key"]
    path, how = rng.choice(files), rng.choice(hows)
    content = path.read_bytes()
    start = content.find(b"{") if how in ("text", "many") else -1
    paths = [path for path in paths if path.suffix != ".msgpack"]  # a link whose path is given is followed
    if how == "link" and paths:
        path = rng.choice(paths)
        decoy = rng.choice([x for x in outside.rglob("*") if x.is_dir() == path.is_dir()])
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        path.symlink_to(decoy)
    elif how == "pipe":
        path.unlink()
        rng.choice([os.mkfifo, os.mkdir, lambda x: None])(path)
    elif how == "other":
        path.write_bytes(rng.choice(files).read_bytes())
    elif how == "kind":
        kinds = [b"PK\3\4" + bytes(99), b"<html>", b"version https://git-lfs.github.com/spec/v1\n", b"\x80\4N.", b""]
        path.write_bytes(rng.choice(kinds))
    elif how == "key":
        path = rng.choice([path for path in files if path.name == "_METADATA"] or files)
        elsewhere = rng.choice([*[str(outside / "plain" / "a")] * 3, "../../outside/plain/a", "/"])
        path.write_bytes(re.sub(rb'(?<="key": )"a"', json.dumps(elsewhere).encode(), path.read_bytes()))
    elif start >= 0 and (body := parsed(content[start:])) is not None:
        end = start + len(json.dumps(body))
        new = mutated(rng, body) if how == "text" else repeated(rng, body)
        if path.suffix == ".safetensors":
            end, start = 8 + int.from_bytes(content[:8], "little"), 0
            new = len(new).to_bytes(8, "little") + new
        path.write_bytes(content[:start] + new + (content[end:] if path.suffix == ".safetensors" else b""))
    else:
        path.write_bytes(octets(rng, {"": content.hex()}) if not content else scrambled(rng, content))
    return f"{how} {path.name}"


def parsed(text: bytes):
    try:
        body = json.JSONDecoder().raw_decode(text.decode("utf-8", "ignore"))[0]
    except ValueError:
        return None
    return body if isinstance(body, dict) and body else None


def repeated(rng, body) -> bytes:
    """A value in a JSON body again and again, up to 200,000 times."""
    at = rng.choice(list(places(body))[1:])
    value, n = json.dumps(of(body, at)), rng.choice([1000, 20_000, 200_000])
    text = json.dumps(put(body, at, "@@"))
    if isinstance(of(body, at[:-1]), dict):
        key = json.dumps(at[-1])
        return text.replace(f'{key}: "@@"', ", ".join(f'{key[:-1]}{i}": {value}' for i in range(n))).encode()
    return text.replace('"@@"', ", ".join([value] * n)).encode()


def scrambled(rng, content: bytes) -> bytes:
    out = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 8, 64])):
        at, how = rng.randrange(len(out) or 1), rng.randrange(4)
        if how == 0 and out:
            out[at] ^= 1 << rng.randrange(8)
        elif how == 1:
            del out[at : at + rng.choice([1, 5, 200])]
        elif how == 2:
            out[at:at] = rng.choice([bytes(9), rng.randbytes(20), b"\xdd\x7f\xff\xff\xff", b"\xff" * 8, content[:50]])
        else:
            out[at : at + 8] = rng.choice([2**63 - 1, 2**32, 0, 2**64 - 1]).to_bytes(8, rng.choice(["little", "big"]))
    return bytes(out)


def read_files(n: int, seed: int, counts) -> None:
    """Each format in turn, a mutated copy of a real file; every fifth one by a grammar, every twentieth a bomb."""
    import msgpack

    rng, touched, active = random.Random(seed), [], [False]
    top = Path(tempfile.mkdtemp())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            good, outside = foreign_files(top / "good", 1.5), top / "outside"
            foreign_files(outside, SECRET)
        listing = lambda: [(str(p), p.lstat().st_mtime_ns) for p in sorted(outside.rglob("*"))]
        before = listing()

        def hook(event, args):
            if active[0] and event == "open" and isinstance(args[0], (str, bytes, os.PathLike)):
                active[0] = False  # of what this opens itself
                is_refused = isinstance(args[2], int) and args[2] & os.O_NOFOLLOW and os.path.islink(args[0])
                if not is_refused and os.path.realpath(os.fsdecode(args[0])).startswith(str(outside)):
                    touched.append(args[0])
                active[0] = True

        sys.addaudithook(hook)
        for i in range(n + len(good)):
            name = list(good)[i % len(good)]
            what = f"{name} {i}: as it was"
            folder, path = (top / "case" / x.relative_to(top / "good") for x in good[name])
            shutil.rmtree(top / "case", ignore_errors=True)
            shutil.copytree(
                good[name][1] if good[name][1].is_dir() else good[name][0], path if path.suffix == "" else folder
            )
            if i >= len(good) and i % 20 == 0:
                file, content = bomb(rng)
                name = "flax" if file.endswith("msgpack") else "single"
                path = top / "case" / file
                path.write_bytes(content)
                what = f"bomb {i} {file} {content[:60]} {len(content)}"
            elif i >= len(good) and i % 5 == 0:
                name, path = "flax", top / "case" / "a.msgpack"
                path.write_bytes(msgpack.packb({"a": packed(rng), "b": packed(rng)}))
                what = f"grammar {i}"
            elif i >= len(good):
                what = f"{name} {i} {spoil(rng, folder, outside)}"
            size = sum(p.lstat().st_size for p in (path.rglob("*") if path.is_dir() else [path]) if p.is_file())
            start = time.monotonic()
            active[0] = i >= len(good)  # what the first ones import, they import
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found, grown = memory(lambda name=name, path=path, i=i: read_foreign(name, path, i % 3 == 0))
            active[0] = False
            seconds = time.monotonic() - start
            if isinstance(found, CheckpointError):
                counts["files refused"] += 1
                counts["longest error"] = max(counts["longest error"], len(str(found)))
            elif isinstance(found, BaseException):
                counts["other errors"] += 1
                print(f"  {what}: {type(found).__name__} {str(found)[:300]}", flush=True)
            else:
                counts["files read"] += 1
                values = [np.asarray(x) for x in jax.tree.leaves(found)]
                if any(x.dtype.kind == "f" and (x == SECRET).any() for x in values):
                    counts["files elsewhere"] += 1
                    print(f"  {what}: read from elsewhere", flush=True)
            if i >= len(good):
                counts["slowest, s"] = max(counts["slowest, s"], round(seconds, 2))
                if grown > 4 * size + (64 << 20):
                    counts["too much memory"] += 1
                    print(f"  {what}: {grown >> 20} MiB for {size} bytes", flush=True)
            else:
                assert not isinstance(found, BaseException), found
        counts["files"] += n
        counts["files elsewhere"] += len(touched) + int(listing() != before)
        for path in touched[:5]:
            print("  opened", path, flush=True)
    finally:
        gc.collect()  # futures of TensorStore that nobody waits for say so when they end
        time.sleep(0.2)
        shutil.rmtree(top, ignore_errors=True)


def is_well(counts) -> bool:
    bad = ("other errors", "silently wrong", "code run", "files elsewhere", "too much memory")
    return (
        not any(counts[name] for name in bad)
        and counts["slowest, s"] < SECONDS
        and counts["memory grown, MB"] < BYTES >> 20
        and counts["longest error"] < 8000
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000, help="mutated files (10,000)")
    parser.add_argument("--files", type=int, default=5000, help="files of others (5,000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=runs.HERE / "results" / "counts.jsonl")
    args, counts = parser.parse_args(), collections.Counter()
    if args.count:
        run(args.count, args.seed, counts)
    read_files(args.files, args.seed, counts)
    runs.record(args.results, {"what": "manifests", "seed": args.seed}, counts)
    sys.exit(not is_well(counts))


if __name__ == "__main__":
    main()
