"""Save and restore beside plain orbax: what a save blocks, with the step after it; whole saves; restores."""

# ruff: noqa: B023, the lambdas are called where they are made

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


def main(megabytes: int = 480, rounds: int = 4) -> None:
    from orbax.checkpoint import v1 as ocp

    rows = megabytes * 1_000_000 // 12 // 4 // 1024
    make = jax.jit(lambda key: {str(i): jax.random.normal(jax.random.fold_in(key, i), (rows, 1024)) for i in range(12)})
    step = jax.jit(lambda tree: jax.tree.map(lambda x: x * 1.0001, tree), donate_argnums=0)
    names = ("host copy", *(f"{what}: {who}" for what in ("blocks", "save", "restore") for who in ("tsunax", "orbax")))
    times: dict[str, list[float]] = {name: [] for name in names}
    folder = Path(tempfile.mkdtemp(prefix="tsunax-bench-"))
    tree = jax.block_until_ready(step(make(jax.random.key(0))))

    def clock(name, f):
        start = time.perf_counter()
        out = f()
        times[name].append(time.perf_counter() - start)
        return out

    for i in range(rounds):
        for which in ("tsunax", "orbax")[:: 1 if i % 2 else -1]:
            start = time.perf_counter()
            tree = jax.block_until_ready(step(tree))
            alone = time.perf_counter() - start
            clock("host copy", lambda: host_copy(tree)) if which == "tsunax" else None
            path, start = folder / f"{which}{i}", time.perf_counter()
            if which == "tsunax":
                checkpoints = Checkpoints(path)
                start = time.perf_counter()
                checkpoints.save(tree, step=i)
                finish = checkpoints.wait
            else:
                finish = ocp.save_async(path, tree).result
            tree = jax.block_until_ready(step(tree))  # waits for the copy, if that is still to come
            times[f"blocks: {which}"].append(max(0.0, time.perf_counter() - start - alone))
            finish()
            times[f"save: {which}"].append(time.perf_counter() - start)
            if which == "tsunax":
                found = clock("restore: tsunax", lambda c=checkpoints: jax.block_until_ready(c.restore(tree).state))
                checkpoints.close()
            else:
                like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)
                found = clock("restore: orbax", lambda p=path, t=like: jax.block_until_ready(ocp.load(p, t)))
            del found
            shutil.rmtree(path)
    shutil.rmtree(folder)
    rate = lambda a, b: statistics.median(x / y for x, y in zip(times[a], times[b], strict=True))
    against = {f"blocks: {which}": "host copy" for which in ("tsunax", "orbax")}
    against |= {f"{what}: tsunax": f"{what}: orbax" for what in ("save", "restore")}
    ratios = {name: rate(name, against[name]) if name in against else 1.0 for name in names}
    shown = {name: (statistics.median(times[name]), ratios[name]) for name in names}
    table(f"checkpoint of {megabytes} MB", [(n, s, r) for n, (s, r) in shown.items()], ("what", "seconds", "x"))
    resume()
    save("checkpoint")
