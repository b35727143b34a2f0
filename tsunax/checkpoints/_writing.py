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


def start(run, state, step, given: Mapping[str, Any], metrics) -> Job:
    """`save` of a `Checkpoints`: copy, agree with all processes, write in the background."""
    copy = lambda: _copied(run, state, step, given, metrics)
    (tree, manifest, blocks), words = run.together("save()", copy)
    first, mine = json.loads(words[0]), json.loads(words[run.process])

    def things():
        alike = {"step": manifest.step, "setup": list(manifest.states.values())}
        for (path, x), leaf in zip(tree.leaves, manifest.leaves, strict=True):
            alike[leaves.show("state", path)] = x if _host_copies.is_local(x) else str(leaf)
        return alike

    run.everyone.compare("save()", things, run.timeout + 10)
    if run.process:  # of data and callbacks what differs from the first process's
        own = {name: given[name] for name, digest in mine["digests"].items()
               if digest != first["digests"][name]}  # fmt: skip
        parts = [_host_copies.encoded(own, blocks, run.process)]
        manifest = dataclasses.replace(manifest, parts=parts)
    watched = _host_copies.watched(tree, manifest.leaves)
    name, drop = first["name"], first["drop"]
    begin = lambda: (run.home.start(name, tree, manifest.leaves, blocks), "")
    with _discarding(run, name):
        run.together("save(): start", begin)
    work = lambda: _write(run, name, drop, manifest, blocks, watched)
    return Job(work, run.path, manifest.step, run.timeout)


@contextlib.contextmanager
def _discarding(run, name: str):
    """A context whose error, on any process, ends with what was written deleted by the first."""
    try:
        yield
    except BaseException:
        if not run.process:
            run.home.discard(name)
        raise


def _copied(run, state, step: int | None, given: Mapping[str, Any], metrics):
    """(tree, manifest, blocks) of the state on the host, and a text for the other processes."""
    run.check_writer()
    run.wait()
    numbers = _numbers(metrics)
    if numbers and given["script"] is None and not run.process:  # `fit` looks by itself
        names = dict.fromkeys(x for known in (numbers, *run.home.known().values()) for x in known)
        if run.keep_best is not None and run.keep_best.metric not in names:
            raise RowError(unknown("metric of keep_best", "save()", run.keep_best.metric, names))
    tree = leaves.tree_of(state)
    _host_copies.check_saveable(tree)
    _host_copies.check_members(tree, "save()")
    at = _host_copies.step_to_save(tree, step)
    found, blocks = _host_copies.copied(tree, run.process)
    states = {path: state_facts.facts_of(s) for path, s in tree.states.items()}
    parts = [] if run.process else [_host_copies.encoded(given, blocks, 0)]
    manifest = _manifest.Manifest(at, found, states, parts, numbers)
    digests = {name: _digest(given[name], name) for name in ("data", "callbacks")}
    word: dict[str, Any] = {"digests": digests}
    if not run.process:
        known = run.home.known()
        if known and at < max(known):
            expected = f"≥ {max(known)}, the newest in {run.path}"
            other = "Checkpoints(other).save(...)"
            fix = f"To go on from an earlier step, give another path: {other}."
            raise CheckpointError("step", "save()", at, expected, fix)
        word["drop"] = _dropped(run, {**known, at: numbers})
        word["name"] = run.home.begin(at)
    return (tree, manifest, blocks), json.dumps(word)


def _dropped(run, known: dict[int, dict[str, float]]) -> list[int]:
    """The steps that no policy keeps, after the newest of them was written."""
    if run.keep_last is None:
        return []
    kept = set(sorted(known)[-run.keep_last :])
    if run.keep_best is not None:
        kept.update(run.keep_best.of(known))
    if run.keep_every is not None:
        kept.update(step for step in known if step % run.keep_every == 0)
    return [step for step in sorted(known) if step not in kept]


def _write(run, name: str, drop: list[int], manifest, blocks, watched) -> None:
    """One save, in the background: each process writes its part, then the first one commits."""
    step = manifest.step
    end = time.monotonic() + 0.9 * run.timeout  # who is missing is named before `wait` gives up

    def together(what, f):
        how = {"thread": run.thread, "kinds": (Damaged,)}
        left = max(1.0, end - time.monotonic())
        return run.together(f"{what} of step {step}", f, timeout=left, **how)

    def write():
        try:
            if odd := _host_copies.not_finite(blocks, watched):
                raise Damaged(f"{odd}, which is not finite")
            return run.home.write(name, run.process, manifest, blocks, prove=bool(drop)), ""
        finally:
            blocks.clear()

    with _discarding(run, name):
        first, words = together("part", write)
        together("manifest", lambda: (_commit(run, name, first, len(words)), ""))
    if not run.process:
        run.home.drop(drop)


def _commit(run, name: str, first: _manifest.Manifest, count: int) -> None:
    if run.process:
        return run.home.commit(name, None)
    whole = run.home.together(name, first, count)
    if run._lock is None:
        raise Damaged("closed before it was written")
    run._lock.renew(run.path)
    run.home.commit(name, whole)


def _numbers(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    if not isinstance(metrics, Mapping | None):
        raise WrongTypeError("metrics", "save()", trees.describe(metrics), "a dict of numbers")
    out = {}
    for name, value in (metrics or {}).items():
        try:
            if not isinstance(name, str) or np.ndim(value) or trees.dtype_of(value) is None:
                raise TypeError
            out[name] = float(value)
        except (TypeError, OverflowError):
            what, got = f"metric {name!r:.60}", trees.describe(value)
            raise WrongTypeError(what, "save()", got, "one number") from None
    return out


def _digest(x: Any, name: str) -> str:
    content = lambda _, x: f"{x.dtype} {x.shape} {checksums.block_hash(x)}"
    coded = _user_values.encode(x, content, name)
    return durable_files.sha256(json.dumps(coded, sort_keys=True).encode())
