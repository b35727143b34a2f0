"""Writing a checkpoint: copy and agreement in `save`; files, hashes, commit in the background.

The saved part of a state is checked, copied to the host, and searched for numbers that are not
finite.
"""

import collections
import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

import jax
import numpy as np

from tsunax._core import checks, durable_files, trees
from tsunax._state import averages_of
from tsunax.checkpoints import checksums, leaves, state_facts
from tsunax.checkpoints import manifest as _manifest
from tsunax.checkpoints._background import Job
from tsunax.checkpoints._blocks import (
    Blocks,
    block_name,
    bounds_of,
    holders_of,
    is_local,
    parse_name,
    whole,
)
from tsunax.checkpoints.checksums import Bounds
from tsunax.checkpoints.leaves import Damaged, Leaf, Tree
from tsunax.errors import CheckpointError, RowError, StateError, WrongTypeError, told, unknown
from tsunax.state import donated, overwritten_part, trained_part


@dataclass(frozen=True)
class Best:
    """Keep the `k` checkpoints with the best `metric` of `save(metrics=...)`.

    The best are the lowest ("min") or the highest ("max"). Raises HyperparameterError for another
    mode or none, and if the number `k` is below 1.

    >>> Best("accuracy", mode="max", k=3)
    Best(metric='accuracy', mode='max', k=3)
    """

    metric: str
    _: KW_ONLY
    mode: str | None = None  # "min" or "max": which is better does not follow from a name
    k: int = 1

    def __post_init__(self) -> None:
        checks.check_count(self.k, "Best()", "k")
        checks.check_choice(self.mode, "Best()", "mode", ("min", "max"))

    def of(self, metrics: Mapping[int, Mapping[str, float]]) -> list[int]:
        """The best steps of `metrics`. NaN is never best; of equal values the later step is.

        >>> Best("loss", mode="min").of({10: {"loss": 0.5}, 20: {"loss": 0.4}})
        [20]
        """
        sign = -1 if self.mode == "max" else 1
        comparable_values = {step: sign * values[self.metric] for step, values in metrics.items()
                 if not math.isnan(values.get(self.metric, math.nan))}  # fmt: skip
        return sorted(comparable_values, key=lambda step: (comparable_values[step], -step))[
            : self.k
        ]


def start_save(
    saver, state, step, values: Mapping[str, Any], metrics, left_calls: int | None = None
) -> Job:
    """`save` of a `Checkpoints`: copy, agree with all processes, write in the background.

    Each process sends its plan to all: hashes of data and callbacks. The plan of the first process
    has the name of the checkpoint, too, and the steps that it replaces. For a rewind after
    `left_calls` calls, the checkpoints from its step on are set aside.
    """
    (tree, manifest, blocks), plans = saver.together(
        "save()", lambda: _copied(saver, state, step, values, metrics, left_calls is not None)
    )
    first_plan, own_plan = json.loads(plans[0]), json.loads(plans[saver.process])

    def facts_to_compare():
        facts = {"step": manifest.step, "setup": list(manifest.states.values())}
        for (path, x), leaf in zip(tree.leaves, manifest.leaves, strict=True):
            facts[leaves.show("state", path)] = x if is_local(x) else str(leaf)
        return facts

    saver.everyone.compare("save()", facts_to_compare, saver.timeout + 10)
    if saver.process:  # store only data and callbacks that differ from the first process's
        different_values = {name: values[name] for name, digest in own_plan["digests"].items()
               if digest != first_plan["digests"][name]}  # fmt: skip
        parts = [encoded(different_values, blocks, saver.process)]
        manifest = dataclasses.replace(manifest, parts=parts)
    watched = watched_leaves(tree, manifest.leaves)
    name, drop = first_plan["name"], first_plan["drop"]
    with _discarding(saver, name):
        saver.together(
            "save(): start",
            lambda: (saver.home.start_arrays(name, tree, manifest.leaves, blocks), ""),
        )
    return Job(
        lambda: _write(saver, name, drop, manifest, blocks, watched, left_calls),
        saver.path,
        manifest.step,
        saver.timeout,
    )


@contextlib.contextmanager
def _discarding(saver, name: str):
    """A context in which an error makes the first process delete the files of this save."""
    try:
        yield
    except BaseException:
        if not saver.process:
            saver.home.discard(name)
        raise


def _copied(saver, state, step: int | None, values: Mapping[str, Any], metrics, is_rewind: bool):
    """(tree, manifest, blocks) of the state on the host, and a text for the other processes."""
    saver.check_writer()
    saver.wait()
    numbers = _numbers(metrics)
    is_first_process = not saver.process
    if numbers and values["script"] is None and is_first_process and saver.keep_best is not None:
        rows = (numbers, *saver.home.metrics_by_step().values())  # `fit` checks them itself
        names = dict.fromkeys(name for row in rows for name in row)
        if saver.keep_best.metric not in names:
            raise RowError(unknown("metric of keep_best", "save()", saver.keep_best.metric, names))
    tree = leaves.tree_of(state)
    check_saveable(tree)
    check_members(tree, "save()")
    checkpoint_step = step_to_save(tree, step)
    saved_leaves, blocks = copied(tree, saver.process)
    states = {path: state_facts.facts_of(s) for path, s in tree.states.items()}
    parts = [] if saver.process else [encoded(values, blocks, 0)]
    manifest = _manifest.Manifest(checkpoint_step, saved_leaves, states, parts, numbers)
    digests = {name: _digest(values[name], name) for name in ("data", "callbacks")}
    plan: dict[str, Any] = {"digests": digests}
    if not saver.process:
        saved_metrics = saver.home.metrics_by_step()
        if is_rewind:
            saved_metrics = {k: x for k, x in saved_metrics.items() if k < checkpoint_step}
        if saved_metrics and checkpoint_step < max(saved_metrics):
            raise CheckpointError(
                "step",
                "save()",
                got=checkpoint_step,
                expected=f"≥ {max(saved_metrics)}, the newest in {saver.path}",
                fix="To go on from an earlier step, give another path: "
                "Checkpoints(other).save(...).",
            )
        plan["drop"] = _dropped(saver, {**saved_metrics, checkpoint_step: numbers})
        plan["name"] = saver.home.reserve_name(checkpoint_step)
    return (tree, manifest, blocks), json.dumps(plan)


def _dropped(saver, metrics_by_step: dict[int, dict[str, float]]) -> list[int]:
    """The steps that no policy keeps, once the newest step is written."""
    if saver.keep_last is None:
        return []
    kept_steps = set(sorted(metrics_by_step)[-saver.keep_last :])
    if saver.keep_best is not None:
        kept_steps.update(saver.keep_best.of(metrics_by_step))
    if saver.keep_every is not None:
        kept_steps.update(step for step in metrics_by_step if step % saver.keep_every == 0)
    return [step for step in sorted(metrics_by_step) if step not in kept_steps]


def _write(saver, name: str, drop: list[int], manifest, blocks, watched, left_calls) -> None:
    """A save in the background: each process writes its part, then the first process commits."""
    step = manifest.step
    # This ends before `wait`, so that its error names the missing processes.
    deadline = time.monotonic() + 0.9 * saver.timeout

    def gather_results(title, f):
        options = {"thread": saver.thread, "kinds": (Damaged,)}
        seconds_left = max(1.0, deadline - time.monotonic())
        return saver.together(f"{title} of step {step}", f, timeout=seconds_left, **options)

    def write():
        try:
            if bad_leaf := not_finite(blocks, watched):
                raise Damaged(f"{bad_leaf}, which is not finite")
            # read back before an older checkpoint is deleted
            return saver.home.write(name, saver.process, manifest, blocks, prove=bool(drop)), ""
        finally:
            blocks.clear()

    with _discarding(saver, name):
        own_manifest, answers = gather_results("part", write)
        whole, _ = gather_results(
            "manifest", lambda: (_commit(saver, name, own_manifest, len(answers), left_calls), "")
        )
    if whole is not None:
        home = saver.home
        home.finish(name, step)
        home.metrics_by_step()[step] = whole.metrics
        home.bad.pop(step, None)
        home.links[step] = whole.links[step]
        home.drop(drop)


def _commit(
    saver, name: str, first: _manifest.Manifest, count: int, left_calls: int | None
) -> _manifest.Manifest | None:
    """The manifest of the checkpoint, on the first process."""
    home, links = saver.home, saver.home.links
    if saver.process:
        home.commit(name, None)
        return None
    merged = home.merged_manifest(name, first, count)
    if saver._lock is None:
        raise Damaged("closed before it was written")
    saver._lock.renew(saver.path)
    steps = home.metrics_by_step()
    merged = merged.linked({step: link for step, link in links.items() if step in steps})
    if left_calls is None:
        home.commit(name, merged)
    else:
        home.commit_rewind(name, merged, left_calls)
    return merged


def _numbers(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    for name, value in (metrics or {}).items():
        if not isinstance(name, str) or np.ndim(value) or trees.dtype_of(value) is None:
            raise WrongTypeError(
                f"metric {name!r:.60}",
                "save()",
                got=trees.describe(value),
                expected="a name and a number",
            )
    return {name: float(value) for name, value in (metrics or {}).items()}


def _digest(x: Any, name: str) -> str:
    content = lambda _, x: f"{x.dtype} {x.shape} {checksums.block_hash(x)}"
    coded = _manifest.encode(x, content, name)
    return durable_files.sha256(json.dumps(coded, sort_keys=True).encode())


def try_save(saver, state, values: Mapping[str, Any]) -> None:
    """Raise the errors of a `save`, without one: leaves, values, and a small file in the place."""
    saver.check_writer()
    tree = leaves.tree_of(state)
    check_saveable(tree)
    check_members(tree, "fit()")
    for path, x in tree.leaves:
        leaves.leaf_of(path, x)
    blocks: Blocks = {}
    parts = encoded({f"fit(): {name}": x for name, x in values.items()}, blocks, saver.process)
    arrays = [blocks.get(leaf.name, np.zeros(leaf.shape, leaf.dtype)) for leaf in parts.arrays]
    place = _manifest.decode(parts.values["fit(): data"], dict(enumerate(arrays)))
    _manifest.check_types(values["data"], place, "fit(): data")
    try:
        saver.home.probe(saver.process)
    except Exception as error:  # OSError, or an exception of a library for buckets
        raise CheckpointError(
            "path", str(saver.path), got=told(error), expected="a directory that can be written"
        ) from error


# ---------------------------------------------------------------------- copies on the host


def check_saveable(tree: Tree) -> None:
    if not tree.leaves:
        raise WrongTypeError("state", "save()", "a tree without leaves", "at least one array")
    for path, x in tree.leaves:
        if trees.is_traced(x) or isinstance(x, jax.ShapeDtypeStruct):
            raise WrongTypeError(
                "leaf",
                leaves.show("state", path),
                got=type(x).__name__,
                expected="an array with numbers",
                fix="Save outside of jit, vmap and scan.",
            )
        if trees.is_gone(x):
            raise StateError(donated("save()"))


def check_members(tree: Tree, where: str) -> None:
    for state in tree.states.values():
        if not (is_local(state.clock) or state.clock.is_fully_replicated):
            raise StateError(
                "population",
                where,
                got="members of several processes",
                expected="of one",
                fix="Let each process have members of its own, and save them with tsunax.exchange.",
            )


def step_to_save(tree: Tree, step) -> int:
    if step is None and not tree.states:
        raise WrongTypeError("state", "save()", "a tree without a TrainState", "one, or step=")
    if step is None:
        step = int(np.max(np.asarray(tree.clocks[0])[..., 0]))
    checks.check_count(step, "save()", "step", 0)
    return int(step)


def copied(tree: Tree, process: int) -> tuple[list[Leaf], Blocks]:
    """Every leaf, and the blocks that this process saves, copied to the host.

    A block that several processes hold is written by the process with the fewest bytes to write.
    All processes choose the same writer, because each has all shardings.
    """
    described = [leaves.leaf_of(path, x, name)
             for (path, x), name in zip(tree.leaves, tree.names, strict=True)]  # fmt: skip
    source_of_block, bytes_to_write = {}, collections.Counter()
    for leaf, (_, x) in zip(described, tree.leaves, strict=True):
        if not leaf.dtype:
            continue
        data = jax.random.key_data(x) if trees.is_key(x) else x
        holders = {whole(leaf.shape): [0]} if is_local(x) else holders_of(data.sharding, leaf.shape)
        size = np.dtype(leaf.dtype).itemsize
        for bounds, processes in holders.items():
            writer = min(processes, key=lambda i: (bytes_to_write[i], i))
            bytes_to_write[writer] += math.prod(stop - start for start, stop in bounds) * size
            if writer == process and math.prod(leaf.shape):
                name = block_name(leaf.name, bounds, leaf.shape)
                source_of_block[name] = data, _shards_of(data, bounds, is_local(x))
    for _, shards in source_of_block.values():
        for shard in shards:
            if not _is_host_memory(shard):
                shard.data.copy_to_host_async()  # all transfers run at once
    return described, {name: _on_host(*source) for name, source in source_of_block.items()}


def _shards_of(data, bounds: Bounds, is_whole: bool) -> list:
    if not isinstance(data, jax.Array):
        return []
    shards = data.addressable_shards
    if is_whole:
        return [s for s in shards if s.replica_id == 0]
    return [s for s in shards if bounds_of(s.index, data.shape) == bounds][:1]


def _is_host_memory(shard) -> bool:
    """Whether NumPy reads a shard without a copy: such a view prevents donation of the state.

    On a GPU the next step would fail: "Donation requested for buffer with external reference".
    """
    return shard.device.platform == "cpu" or trees.is_offloaded(shard.data)


def _on_host(data, shards: list) -> np.ndarray:
    if not shards:
        return np.array(data)
    if len(shards) == 1:  # copy=None copies only if needed: a transfer has made a copy already
        return np.array(shards[0].data, copy=_is_host_memory(shards[0]) or None)
    out = np.empty(data.shape, data.dtype)
    for s in shards:
        out[s.index] = np.asarray(s.data)
    return out


def encoded(values: Mapping[str, Any], blocks: Blocks, process: int) -> _manifest.Parts:
    """Encode data, history and callbacks; their arrays are added to the blocks."""
    arrays: list[Leaf] = []

    def keep(path: tuple, x: np.ndarray) -> int:
        name = f"@{process}/{leaves.joined(tuple(map(str, path)))}"
        arrays.append(Leaf(tuple(map(str, path)), "array", x.shape, x.dtype.name, name=name))
        if x.size:
            blocks[name] = x
        return len(arrays) - 1

    return _manifest.Parts(
        {name: _manifest.encode(x, keep, name) for name, x in values.items()}, arrays
    )


def watched_leaves(tree: Tree, described: list[Leaf]) -> dict[str, str]:
    """The leaves that have to be finite: {name: name in messages}.

    A mask of -inf among params that are not trained, and NaN in the model state, may belong there.
    Members of a population may diverge alone.
    """
    paths = set()
    for path, s in tree.states.items():
        if np.ndim(s.clock) > 1:
            continue
        parts: list = [([".params"], trained_part(s)), ([".params"], overwritten_part(s))]
        parts += [([f".{name}", ".params"], x.params) for name, x in averages_of(s).items()]
        for name, part in [*parts, ([".masters"], s.masters)]:
            paths |= {
                (*path, *name, *path_in_part) for path_in_part, _ in leaves.tree_of(part).leaves
            }
    return {x.name: leaves.show("state", x.path) for x in described if x.path in paths and x.dtype}


def not_finite(blocks: Blocks, names: Mapping[str, str]) -> str:
    """The first leaf in `names` that is not finite; "" if all are finite."""
    chunk = 1 << 18  # elements: 7 ms for 100 MB; hashing takes 150 ms
    for name, block in blocks.items():
        if (title := names.get(parse_name(name)[0])) is not None:
            flat = block.reshape(-1)
            if not all(np.isfinite(flat[i : i + chunk]).all() for i in range(0, flat.size, chunk)):
                return title
    return ""
