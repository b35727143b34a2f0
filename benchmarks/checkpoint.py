"""Save and restore beside plain orbax: what a save blocks, with the step after it; whole saves; restores."""

# ruff: noqa: B023, the lambdas are called where they are made

import collections
import gc
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
import tsunax as ts
from tsunax.checkpoints.saving import Checkpoints

from benchmarks._common import note, save, table


def host_copy(tree) -> None:
    jax.tree.map(lambda x: np.array(x, copy=True), tree)


def resume(megabytes: int = 100, rounds: int = 7) -> None:
    """A training state of Adam's read back to where it was, beside what orbax takes for the same arrays."""
    from orbax.checkpoint import v1 as ocp

    rows = megabytes * 1_000_000 // 3 // 12 // 4 // 1024
    make = jax.jit(lambda key: {str(i): jax.random.normal(jax.random.fold_in(key, i), (rows, 1024)) for i in range(12)})
    state = ts.setup(ts.rules.adam(1e-3), make(jax.random.key(0)))
    arrays = {str(i): x for i, x in enumerate(jax.tree.leaves(state))}
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), arrays)
    times: dict[str, list[float]] = {"tsunax": [], "orbax": []}
    with tempfile.TemporaryDirectory(prefix="tsunax-bench-") as folder:
        with Checkpoints(f"{folder}/tsunax") as checkpoints:
            checkpoints.save(state)
        ocp.save(f"{folder}/orbax", arrays)
        restore = {
            "tsunax": lambda: Checkpoints(f"{folder}/tsunax", read_only=True).restore(state).state,
            "orbax": lambda: ocp.load(f"{folder}/orbax", like),
        }
        for i in range(rounds):
            for who in list(restore)[:: 1 if i % 2 else -1]:
                start = time.perf_counter()
                jax.block_until_ready(restore[who]())
                times[who].append(time.perf_counter() - start)
    more = statistics.median(a - b for a, b in zip(times["tsunax"], times["orbax"], strict=True))
    medians = [(who, statistics.median(seconds)) for who, seconds in times.items()]
    table(f"resume of {megabytes} MB", medians, ("restore", "seconds"))
    note(f"tsunax takes {more:+.3f} s more than orbax, every byte verified")


HOMES = ("files", "orbax", "plain orbax")  # of `Checkpoints` two; and orbax without it


def kept_per_save(saves: int = 40) -> None:
    """Bytes that a process keeps of each save of 130 KB, once the first ten are done."""
    from orbax.checkpoint import v1 as ocp

    tree, rows = {"w": jax.numpy.ones((128, 256))}, []
    for who in HOMES:
        with tempfile.TemporaryDirectory(prefix="tsunax-bench-") as folder:
            checkpoints = None if who == "plain orbax" else Checkpoints(f"{folder}/run", store=who)
            start = before = 0.0
            for i in range(saves + 10):
                if i == 10:
                    gc.collect()
                    before, start = resident(), time.perf_counter()
                if checkpoints is None:
                    ocp.save(f"{folder}/{i}", tree)
                else:
                    checkpoints.save(tree, step=i)
                    checkpoints.wait()
            seconds = time.perf_counter() - start
            gc.collect()
            rows.append((who, (resident() - before) / saves / 1e3, 1e3 * seconds / saves))
            if checkpoints is not None:
                checkpoints.close()
    table("each of many saves of 130 KB", rows, ("saved by", "KB kept", "ms"))


def resident() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def compare(megabytes: int, leaves: int, rounds: int) -> None:
    """What a save blocks, a whole save, and a restore, of arrays of so many bytes together."""
    from orbax.checkpoint import v1 as ocp

    draw = np.random.default_rng(0)
    size = megabytes * 1_000_000 // leaves // 4
    arrays = {str(i): draw.standard_normal(size, np.float32) for i in range(leaves)}
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x * 1.0001, tree), donate_argnums=0)
    times: dict[str, list[float]] = collections.defaultdict(list)
    folder = Path(tempfile.mkdtemp(prefix="tsunax-bench-"))
    tree = jax.block_until_ready(step(arrays))

    def clock(name, f):
        start = time.perf_counter()
        out = f()
        times[name].append(time.perf_counter() - start)
        return out

    for i in range(rounds):
        for who in HOMES[:: 1 if i % 2 else -1]:
            start = time.perf_counter()
            tree = jax.block_until_ready(step(tree))
            alone = time.perf_counter() - start
            clock("host copy", lambda: host_copy(tree))
            path, checkpoints = folder / f"{who}{i}", None
            if who != "plain orbax":
                checkpoints = Checkpoints(path, store=who)
            start = time.perf_counter()
            if checkpoints is None:
                finish = ocp.save_async(path, tree).result
            else:
                checkpoints.save(tree, step=i)
                finish = checkpoints.wait
            tree = jax.block_until_ready(step(tree))  # waits for the copy, if that is still to come
            times[f"blocks: {who}"].append(max(0.0, time.perf_counter() - start - alone))
            finish()
            times[f"save: {who}"].append(time.perf_counter() - start)
            if checkpoints is None:
                like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)
                found = clock(f"restore: {who}", lambda p=path, t=like: jax.block_until_ready(ocp.load(p, t)))
            else:
                read = lambda c=checkpoints: jax.block_until_ready(c.restore(tree).state)
                found = clock(f"restore: {who}", read)
                checkpoints.close()
            del found
            shutil.rmtree(path)
    shutil.rmtree(folder)
    rows = [("host copy", statistics.median(times["host copy"]), 1.0)]
    for what in ("blocks", "save", "restore"):
        for who in HOMES:
            name = f"{what}: {who}"
            against = "host copy" if what == "blocks" else f"{what}: plain orbax"
            seconds, floor = (statistics.median(times[x]) for x in (name, against))
            rows.append((name, seconds, seconds / floor))
    table(f"checkpoint of {megabytes} MB in {leaves} leaves", rows, ("what", "seconds", "x"))


def main(rounds: int = 5) -> None:
    compare(10, 10, rounds)
    kept_per_save()  # before large saves: their memory would be given back in the middle of it
    for megabytes, leaves in ((10, 1000), (100, 100), (480, 12), (1000, 12)):
        compare(megabytes, leaves, rounds)
    resume()
    save("checkpoint")
