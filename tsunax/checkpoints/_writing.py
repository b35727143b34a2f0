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


def start(run, state, step, values: Mapping[str, Any], metrics) -> Job:
    """`save` of a `Checkpoints`: copy, agree with all processes, write in the background."""
    copy = lambda: _copied(run, state, step, values, metrics)
    (tree, manifest, blocks), words = run.together("save()", copy)
    first_words, own_words = json.loads(words[0]), json.loads(words[run.process])

    def things():
        facts = {"step": manifest.step, "setup": list(manifest.states.values())}
        for (path, x), leaf in zip(tree.leaves, manifest.leaves, strict=True):
            facts[leaves.show("state", path)] = x if _host_copies.is_local(x) else str(leaf)
        return facts

    run.everyone.compare("save()", things, run.timeout + 10)
    if run.process:  # store only data and callbacks that differ from the first process's
        different_values = {name: values[name] for name, digest in own_words["digests"].items()
               if digest != first_words["digests"][name]}  # fmt: skip
        parts = [_host_copies.encoded(different_values, blocks, run.process)]
        manifest = dataclasses.replace(manifest, parts=parts)
    watched = _host_copies.watched(tree, manifest.leaves)
    name, drop = first_words["name"], first_words["drop"]
    start_save = lambda: (run.home.start(name, tree, manifest.leaves, blocks), "")
    with _discarding(run, name):
        run.together("save(): start", start_save)
    write_save = lambda: _write(run, name, drop, manifest, blocks, watched)
    return Job(write_save, run.path, manifest.step, run.timeout)


@contextlib.contextmanager
def _discarding(run, name: str):
    """A context in which an error makes the first process delete the files of this save."""
    try:
        yield
    except BaseException:
        if not run.process:
            run.home.discard(name)
        raise


def _copied(run, state, step: int | None, values: Mapping[str, Any], metrics):
    """(tree, manifest, blocks) of the state on the host, and a text for the other processes."""
    run.check_writer()
    run.wait()
    numbers = _numbers(metrics)
    if numbers and values["script"] is None and not run.process:  # `fit` checks this itself
        names = dict.fromkeys(
            x
            for saved_metrics in (numbers, *run.home.metrics_by_step().values())
            for x in saved_metrics
        )
        if run.keep_best is not None and run.keep_best.metric not in names:
            raise RowError(unknown("metric of keep_best", "save()", run.keep_best.metric, names))
    tree = leaves.tree_of(state)
    _host_copies.check_saveable(tree)
    _host_copies.check_members(tree, "save()")
    checkpoint_step = _host_copies.step_to_save(tree, step)
    saved_leaves, blocks = _host_copies.copied(tree, run.process)
    states = {path: state_facts.facts_of(s) for path, s in tree.states.items()}
    parts = [] if run.process else [_host_copies.encoded(values, blocks, 0)]
    manifest = _manifest.Manifest(checkpoint_step, saved_leaves, states, parts, numbers)
    digests = {name: _digest(values[name], name) for name in ("data", "callbacks")}
    words: dict[str, Any] = {"digests": digests}
    if not run.process:
        saved_metrics = run.home.metrics_by_step()
        if saved_metrics and checkpoint_step < max(saved_metrics):
            expected = f"≥ {max(saved_metrics)}, the newest in {run.path}"
            call = "Checkpoints(other).save(...)"
            fix = f"To go on from an earlier step, give another path: {call}."
            raise CheckpointError("step", "save()", checkpoint_step, expected, fix)
        words["drop"] = _dropped(run, {**saved_metrics, checkpoint_step: numbers})
        words["name"] = run.home.begin(checkpoint_step)
    return (tree, manifest, blocks), json.dumps(words)


def _dropped(run, metrics_by_step: dict[int, dict[str, float]]) -> list[int]:
    """The steps that no policy keeps, once the newest step is written."""
    if run.keep_last is None:
        return []
    kept_steps = set(sorted(metrics_by_step)[-run.keep_last :])
    if run.keep_best is not None:
        kept_steps.update(run.keep_best.of(metrics_by_step))
    if run.keep_every is not None:
        kept_steps.update(step for step in metrics_by_step if step % run.keep_every == 0)
    return [step for step in sorted(metrics_by_step) if step not in kept_steps]


def _write(run, name: str, drop: list[int], manifest, blocks, watched) -> None:
    """A save in the background: each process writes its part, then the first process commits."""
    step = manifest.step
    # missing processes are named before `wait` ends
    deadline = time.monotonic() + 0.9 * run.timeout

    def gather_results(title, f):
        options = {"thread": run.thread, "kinds": (Damaged,)}
        seconds_left = max(1.0, deadline - time.monotonic())
        return run.together(f"{title} of step {step}", f, timeout=seconds_left, **options)

    def write():
        try:
            if bad_leaf := _host_copies.not_finite(blocks, watched):
                raise Damaged(f"{bad_leaf}, which is not finite")
            return run.home.write(name, run.process, manifest, blocks, prove=bool(drop)), ""
        finally:
            blocks.clear()

    with _discarding(run, name):
        own_manifest, words = gather_results("part", write)
        gather_results("manifest", lambda: (_commit(run, name, own_manifest, len(words)), ""))
    if not run.process:
        run.home.drop(drop)


def _commit(run, name: str, first: _manifest.Manifest, count: int) -> None:
    if run.process:
        return run.home.commit(name, None)
    whole = run.home.merged_manifest(name, first, count)
    if run._lock is None:
        raise Damaged("closed before it was written")
    run._lock.renew(run.path)
    run.home.commit(name, whole)


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
