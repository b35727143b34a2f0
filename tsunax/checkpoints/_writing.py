"""Writing a checkpoint: copy and agreement in `save`; files, hashes, commit in the background."""

import contextlib
import dataclasses
import json
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from tsunax._core import durable_files, trees
from tsunax.checkpoints import _host_copies, _user_values, checksums, leaves, state_facts
from tsunax.checkpoints import manifest as _manifest
from tsunax.checkpoints._background import Job
from tsunax.checkpoints.leaves import Damaged
from tsunax.errors import CheckpointError, RowError, WrongTypeError, unknown


def start(saver, state, step, values: Mapping[str, Any], metrics) -> Job:
    """`save` of a `Checkpoints`: copy, agree with all processes, write in the background.

    Each process sends its plan to all: hashes of data and callbacks. The plan of the first process
    has the name of the checkpoint, too, and the steps that it replaces.
    """
    copy = lambda: _copied(saver, state, step, values, metrics)
    (tree, manifest, blocks), plans = saver.together("save()", copy)
    first_plan, own_plan = json.loads(plans[0]), json.loads(plans[saver.process])

    def facts_to_compare():
        facts = {"step": manifest.step, "setup": list(manifest.states.values())}
        for (path, x), leaf in zip(tree.leaves, manifest.leaves, strict=True):
            facts[leaves.show("state", path)] = x if _host_copies.is_local(x) else str(leaf)
        return facts

    saver.everyone.compare("save()", facts_to_compare, saver.timeout + 10)
    if saver.process:  # store only data and callbacks that differ from the first process's
        different_values = {name: values[name] for name, digest in own_plan["digests"].items()
               if digest != first_plan["digests"][name]}  # fmt: skip
        parts = [_host_copies.encoded(different_values, blocks, saver.process)]
        manifest = dataclasses.replace(manifest, parts=parts)
    watched = _host_copies.watched(tree, manifest.leaves)
    name, drop = first_plan["name"], first_plan["drop"]
    start_save = lambda: (saver.home.start(name, tree, manifest.leaves, blocks), "")
    with _discarding(saver, name):
        saver.together("save(): start", start_save)
    write_save = lambda: _write(saver, name, drop, manifest, blocks, watched)
    return Job(write_save, saver.path, manifest.step, saver.timeout)


@contextlib.contextmanager
def _discarding(saver, name: str):
    """A context in which an error makes the first process delete the files of this save."""
    try:
        yield
    except BaseException:
        if not saver.process:
            saver.home.discard(name)
        raise


def _copied(saver, state, step: int | None, values: Mapping[str, Any], metrics):
    """(tree, manifest, blocks) of the state on the host, and a text for the other processes."""
    saver.check_writer()
    saver.wait()
    numbers = _numbers(metrics)
    if numbers and values["script"] is None and not saver.process:  # `fit` checks this itself
        names = dict.fromkeys(
            x
            for saved_metrics in (numbers, *saver.home.metrics_by_step().values())
            for x in saved_metrics
        )
        if saver.keep_best is not None and saver.keep_best.metric not in names:
            raise RowError(unknown("metric of keep_best", "save()", saver.keep_best.metric, names))
    tree = leaves.tree_of(state)
    _host_copies.check_saveable(tree)
    _host_copies.check_members(tree, "save()")
    checkpoint_step = _host_copies.step_to_save(tree, step)
    saved_leaves, blocks = _host_copies.copied(tree, saver.process)
    states = {path: state_facts.facts_of(s) for path, s in tree.states.items()}
    parts = [] if saver.process else [_host_copies.encoded(values, blocks, 0)]
    manifest = _manifest.Manifest(checkpoint_step, saved_leaves, states, parts, numbers)
    digests = {name: _digest(values[name], name) for name in ("data", "callbacks")}
    plan: dict[str, Any] = {"digests": digests}
    if not saver.process:
        saved_metrics = saver.home.metrics_by_step()
        if saved_metrics and checkpoint_step < max(saved_metrics):
            expected = f"≥ {max(saved_metrics)}, the newest in {saver.path}"
            call = "Checkpoints(other).save(...)"
            fix = f"To go on from an earlier step, give another path: {call}."
            raise CheckpointError("step", "save()", checkpoint_step, expected, fix)
        plan["drop"] = _dropped(saver, {**saved_metrics, checkpoint_step: numbers})
        plan["name"] = saver.home.begin(checkpoint_step)
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


def _write(saver, name: str, drop: list[int], manifest, blocks, watched) -> None:
    """A save in the background: each process writes its part, then the first process commits."""
    step = manifest.step
    # missing processes are named before `wait` ends
    deadline = time.monotonic() + 0.9 * saver.timeout

    def gather_results(title, f):
        options = {"thread": saver.thread, "kinds": (Damaged,)}
        seconds_left = max(1.0, deadline - time.monotonic())
        return saver.together(f"{title} of step {step}", f, timeout=seconds_left, **options)

    def write():
        try:
            if bad_leaf := _host_copies.not_finite(blocks, watched):
                raise Damaged(f"{bad_leaf}, which is not finite")
            return saver.home.write(name, saver.process, manifest, blocks, prove=bool(drop)), ""
        finally:
            blocks.clear()

    with _discarding(saver, name):
        own_manifest, answers = gather_results("part", write)
        gather_results("manifest", lambda: (_commit(saver, name, own_manifest, len(answers)), ""))
    if not saver.process:
        saver.home.drop(drop)


def _commit(saver, name: str, first: _manifest.Manifest, count: int) -> None:
    if saver.process:
        return saver.home.commit(name, None)
    whole = saver.home.merged_manifest(name, first, count)
    if saver._lock is None:
        raise Damaged("closed before it was written")
    saver._lock.renew(saver.path)
    saver.home.commit(name, whole)


def _numbers(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    if not isinstance(metrics, Mapping | None):
        raise WrongTypeError("metrics", "save()", trees.describe(metrics), "a dict of numbers")
    numbers = {}
    for name, value in (metrics or {}).items():
        try:
            if not isinstance(name, str) or np.ndim(value) or trees.dtype_of(value) is None:
                raise TypeError
            numbers[name] = float(value)
        except (TypeError, OverflowError):
            title, got = f"metric {name!r:.60}", trees.describe(value)
            raise WrongTypeError(title, "save()", got, "one number") from None
    return numbers


def _digest(x: Any, name: str) -> str:
    content = lambda _, x: f"{x.dtype} {x.shape} {checksums.block_hash(x)}"
    coded = _user_values.encode(x, content, name)
    return durable_files.sha256(json.dumps(coded, sort_keys=True).encode())
