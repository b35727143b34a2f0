"""Checkpoints: a training state on the disk, whole or not at all, and read back to the last bit.

    save:     host copies -> (written | sha256 of each) -> all processes are there -> manifest -> fsync -> rename
    restore:  newest manifest -> compare with the script's state -> read -> sha256 -> all processes
    are there -> place

Each of several processes writes the shards that are its own, and reads those that it needs; the
first one alone decides what is there and gives a step its name. What makes a directory a checkpoint
is the manifest in it, written last (`_folder`). This module knows threads, locks and processes;
what a tree is and whether two agree is told by `_manifest`, where arrays are kept by `_store`.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import math
import os
import secrets
import shutil
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tsunax._core import checks, durable_files, trees
from tsunax.checkpoints import _arrays, _folder, _orbax, _restoring
from tsunax.checkpoints import manifest as _manifest
from tsunax.checkpoints import resume as _resume
from tsunax.checkpoints._folder import ARRAYS, Folder
from tsunax.checkpoints.manifest import Damaged, Manifest, NotFinite, Parts, TooNew
from tsunax.distributed import processes
from tsunax.errors import (
    CheckpointError,
    HyperparameterError,
    ProcessError,
    RowError,
    SaveError,
    StateError,
    WrongTypeError,
    message,
    suggests_names,
    told,
    unknown,
    warn,
)
from tsunax.state import TrainState

__all__ = ["Best", "Checkpoints", "Restored"]


@dataclass(frozen=True)
class Best:
    """Keep the `k` checkpoints with the lowest ("min") or highest ("max") `metric` of
    `save(metrics=...)`.

    >>> Best("accuracy", mode="max", k=3)
    Best(metric='accuracy', mode='max', k=3)
    """

    metric: str
    _: KW_ONLY
    mode: str | None = None  # "min" or "max": which one is better, no name tells
    k: int = 1

    def __post_init__(self):
        if not isinstance(self.metric, str) or not self.metric:
            raise WrongTypeError(
                message("metric", "Best()", trees.describe(self.metric), "the name of a metric")
            )
        checks.check_count(self.k, "Best()", "k")
        if not checks.is_one_of(self.mode, ("min", "max")):
            got, fix = trees.describe(self.mode), "It says which values are the best."
            raise WrongTypeError(message("mode", "Best()", got, "'min' or 'max'", fix))

    def of(self, metrics: Mapping[int, Mapping[str, float]]) -> list[int]:
        """The best steps; a NaN is never one of them, and of equals the later is."""
        sign = -1 if self.mode == "max" else 1
        known = {
            s: sign * m[self.metric]
            for s, m in metrics.items()
            if not math.isnan(m.get(self.metric, math.nan))
        }
        return sorted(known, key=lambda s: (known[s], -s))[: self.k]


@dataclass(frozen=True)
class Restored:
    """What `Checkpoints.restore` found.

    `step` is None where there was nothing, and `state` is what was given.
    """

    state: Any
    data: Any = None
    history: Any = None
    callbacks: Any = None
    step: int | None = None
    script: Any = None


class Checkpoints:
    """The checkpoints of one run, in one directory.

        with ts.Checkpoints("runs/a") as checkpoints:
            state = checkpoints.restore(state).state
            for batch in data:
                state, info = step(state, batch)
                if checkpoints.due(int(state.step)):
                    checkpoints.save(state)

    `save` copies the state to the host, returns, and writes in the background. A checkpoint appears
    under its step's name when all of it is on the disk, or never. `restore` takes the newest whose
    every byte is what was saved.

    Args:
      path: the directory; made if it is not there. Relative ones are made absolute once.
      every: what `due` goes by, in steps.
      keep_last: how many of the newest to keep; None: all.
      keep_best: `Best("val/accuracy", mode="max")`: those are kept beside the newest.
      keep_every: keep every step that this divides.
      fingerprint: plain values that tell this run and its data from others (seed, rows, batch
        size). They are saved, and a checkpoint with others is refused.
      read_only: only restore. Needs no write access and takes no lock, also while a run writes.
      timeout: seconds after which a save or a restore that has not ended counts as failed.

    Over several processes (`distributed`) all of them make one, of the same directory on a disk
    that they share, and call `save` and `restore` alike. What goes wrong on one is raised by all,
    and names it.

    Raises CheckpointError where the path cannot be used: a file, not writable, in use by another
    run, not shared.

    >>> import jax.numpy as jnp, tempfile, tsunax as ts
    >>> state = ts.setup(ts.rules.sgd(0.1), {"w": jnp.ones(2)})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with Checkpoints(folder) as checkpoints:
    ...         checkpoints.save(state, data={"epoch": 3})
    ...         checkpoints.wait()
    ...         found = checkpoints.restore(state)
    >>> found.step, found.data, found.state.params
    (0, {'epoch': 3}, {'w': Array([1., 1.], dtype=float32)})
    """

    @suggests_names
    def __init__(
        self,
        path: str | os.PathLike,
        *,
        every: int | None = None,
        keep_last: int | None = 2,
        keep_best: Best | None = None,
        keep_every: int | None = None,
        fingerprint: Mapping[str, Any] | None = None,
        read_only: bool = False,
        timeout: float = 600.0,
    ):
        for name, value in {
            "every": every,
            "keep_last": keep_last,
            "keep_every": keep_every,
        }.items():
            if value is not None:
                checks.check_count(value, "Checkpoints()", name)
        if (
            isinstance(timeout, bool)
            or not isinstance(timeout, (int, float))
            or not 0 < timeout < 1e6
        ):
            expected = "seconds > 0, < 1e6"
            raise HyperparameterError(
                message("timeout", "Checkpoints()", trees.describe(timeout), expected)
            )
        if not isinstance(fingerprint, Mapping | None):
            got, expected = trees.describe(fingerprint), "a dict of plain values"
            raise WrongTypeError(message("fingerprint", "Checkpoints()", got, expected))
        checks.check_flags("Checkpoints()", read_only=read_only)
        if not isinstance(keep_best, Best | None):
            name = keep_best if isinstance(keep_best, str) else "val/loss"
            fix = f"Say which is better: Best({name!r}, mode='min') or mode='max'."
            got = trees.describe(keep_best)
            raise WrongTypeError(
                message("keep_best", "Checkpoints()", got, "a tsunax.checkpoint.Best", fix)
            )
        self.path = durable_files.folder_of(path, "path", "Checkpoints()")
        self.every, self.keep_last, self.keep_best, self.keep_every = (
            every,
            keep_last,
            keep_best,
            keep_every,
        )
        self.read_only, self.timeout = read_only, timeout
        self._process, self._count = processes.process_index(), processes.process_count()
        self._fingerprint: dict[str, Any] = _manifest.encode(
            dict(fingerprint or {}), _no_arrays, "fingerprint"
        )
        self._job: _Job | None = None
        self._folder = Folder(self.path)
        self._lock: durable_files.Lock | None = None
        if not read_only:
            self._open()

    def _open(self) -> None:
        """The first process takes the directory for all; the others look whether they see the same
        one.
        """

        def take():
            if self._process:
                return None, ""
            _open(self)
            self._folder.tidy()
            return None, json.dumps(
                [self._lock.text if self._lock is not None else "", secrets.token_hex(4)]
            )

        def join():
            if not self._process:
                return None, ""
            seen = ""
            with contextlib.suppress(OSError, ValueError):
                seen = durable_files.read(self.path / durable_files.LOCK, 200).decode()
            if seen != text:
                fix = "All processes of a run save into one directory, on a disk that they share."
                raise CheckpointError(
                    message("path", str(self.path), "another directory", "that of process 0", fix)
                )
            return _open(self), ""

        settings = ("every", "keep_last", "keep_best", "keep_every", "timeout")
        alike = {
            "fingerprint": self._fingerprint,
            **{name: getattr(self, name) for name in settings},
        }
        processes.compare("Checkpoints()", alike, self.timeout + 10)
        _, words = self._together("Checkpoints()", take)
        text, self._name = json.loads(
            words[0]
        )  # its threads speak under a name of their own: there may be others
        if self._count > 1:
            self._together("Checkpoints()", join)

    def _together(
        self, name: str, f: Callable[[], tuple[Any, str]], **how
    ) -> tuple[Any, list[str]]:
        limit, kinds = self.timeout + 10, (Damaged, CheckpointError, SaveError)
        return processes.together(name, f, **{"timeout": limit, "kinds": kinds, **how})

    # --------------------------------------------------------------------------------------- saving

    def due(self, step: int) -> bool:
        """Whether `every` divides this step; never without one, and not at step 0."""
        return self.every is not None and step > 0 and step % self.every == 0

    def save(
        self,
        state,
        *,
        step: int | None = None,
        data: Any = None,
        history: Any = None,
        callbacks: Any = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Copy `state` to the host and write it in the background. Later changes and donations do
        not matter.

        The step is the state's own, of the first TrainState in a tree of several; a tree without
        one needs `step=`. A step that is there already is replaced. `data`, `history`, `callbacks`:
        None, numbers, strings, arrays, and lists, tuples and dicts of them. Waits for the save
        before it, if that is not done.

        Raises SaveError if that one failed (its step, path, cause; what was to be saved now is
        not), CheckpointError for a step before the newest one, WrongTypeError for leaves that
        cannot be saved, RowError for metrics without the one of `keep_best`.
        """
        self._save(state, step, data, history, callbacks, metrics)

    def lacks(self, names: Iterable[str], where: str) -> str:
        """The message for names without the metric of `keep_best`, with the nearest one; "" if it
        is there.
        """
        if self.keep_best is None or self.keep_best.metric in (names := dict.fromkeys(names)):
            return ""
        return unknown("metric of keep_best", where, self.keep_best.metric, names)

    def _save(self, state, step, data, history, callbacks, metrics, script=None) -> None:
        """`save`, also for `fit`, which adds what it knows of the `script`."""
        given = {"data": data, "history": history, "callbacks": callbacks, "script": script}
        copy = lambda: self._copied(state, step, given, metrics)
        (tree, manifest, copies), words = self._together("save()", copy)
        first, mine = json.loads(words[0]), json.loads(words[self._process])
        if self._count > 1:
            alike = {"step": manifest.step, "setup": list(manifest.states.values())}
            for (path, x), leaf in zip(tree.leaves, manifest.leaves, strict=True):
                alike[_manifest.show("state", path)] = x if _arrays.is_local(x) else str(leaf)
            processes.compare("save()", alike, self.timeout + 10)
        if (
            self._process
        ):  # of data and callbacks what differs from the first process's; the history is that one's
            own = {
                name: given[name]
                for name, digest in mine["digests"].items()
                if digest != first["digests"][name]
            }
            manifest = dataclasses.replace(
                manifest, parts=[_arrays.encoded(own, copies, self._process)]
            )
        watched = _arrays.watched(tree, manifest.leaves)
        self._job = _Job(
            self, manifest, copies, self.path / first["folder"], first["drop"], watched
        )
        self._job.start()

    def _copied(self, state, step: int | None, given: Mapping[str, Any], metrics):
        """The state on the host: (its tree, its manifest, the copies), and a word of it for the
        other processes.
        """
        self._check_writer("save()")
        self.wait()
        numbers = _numbers(metrics)
        if numbers and given["script"] is None and not self._process:  # `fit` looks by itself
            before = self._folder.known().values()
            if text := self.lacks(
                [*numbers, *(name for known in before for name in known)], "save()"
            ):
                raise RowError(text)
        tree = _manifest.tree_of(state)
        _arrays.check_saveable(tree)
        _arrays.check_members(tree, "save()")
        at = _arrays.step_of(tree, step)
        copies: list[np.ndarray] = []
        manifest = Manifest(
            step=at,
            leaves=_arrays.copied(tree, copies, self._process),
            nodes=tree.nodes,
            states={path: _manifest.state_facts(s) for path, s in tree.states.items()},
            parts=[] if self._process else [_arrays.encoded(given, copies, 0)],
            metrics=numbers,
            fingerprint=self._fingerprint,
            versions=_arrays.versions() | {"devices": _arrays.home_of(tree)},
            files={},
        )
        word: dict[str, Any] = {"digests": _digests(given) if self._count > 1 else {}}
        if not self._process:
            known = self._folder.known()
            if known and at < max(known):
                fix = (
                    "To go on from an earlier step, give another path: "
                    "Checkpoints(other).save(...)."
                )
                raise CheckpointError(
                    message("step", "save()", at, f"≥ {max(known)}, the newest in {self.path}", fix)
                )
            word |= {
                "folder": durable_files.aside(self.path, "tmp", at).name,
                "drop": self._dropped(at, numbers),
            }
        return (tree, manifest, copies), json.dumps(word)

    def poll(self) -> None:
        """Raise SaveError if a save that has ended failed. Does not wait for one that has not."""
        if self._job is not None and self._job.done.is_set():
            self.wait()

    def wait(self, timeout: float | None = None) -> None:
        """Block until what was saved is on the disk.

        Raises SaveError if it is not, within `timeout` seconds.
        """
        job = self._job
        if job is not None:
            limit = self.timeout if timeout is None else timeout
            if not job.done.wait(max(0.0, limit)):
                job.given_up = True
                got = f"nothing after {limit:g} s"
                raise SaveError(
                    message(f"save of step {job.step}", str(self.path), got, "a finished save")
                )
            self._job = None
            job.told = True
            if job.error is not None:
                fix = "Earlier checkpoints are as they were."
                got = (
                    str(job.error).rstrip(".")
                    if isinstance(job.error, (Damaged, ProcessError))
                    else told(job.error)
                )
                text = message(
                    f"save of step {job.step}",
                    str(self.path / str(job.step)),
                    got,
                    "a finished save",
                    fix,
                )
                raise SaveError(text) from job.error
        notes, self._folder.notes = self._folder.notes, []
        for note in notes:
            warn(note)

    def close(self) -> None:
        """Wait, and let other processes write here. Raises SaveError if the last save failed."""
        try:
            self.wait()
        finally:
            _release(self)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind, error, trace) -> None:
        try:
            self.close()
        except SaveError as failed:
            if error is None:
                raise
            error.add_note(f"Beside this: {failed}")

    # ------------------------------------------------------------------------------------ restoring

    def restore(
        self,
        like,
        *,
        step: int | str | None = None,
        partial: Any = None,
        cast: bool = False,
        resume: str = "auto",
        params_only: bool = False,
    ) -> Restored:
        """The newest good checkpoint, as a state with the structure, dtypes and devices of `like`.

        `like` is what the same script's `setup` returns, or any tree of arrays or
        `jax.ShapeDtypeStruct`. Cuts and frozen flags of the saved state are built anew. A
        hyperparameter that was edited in the script since the run was set up is the script's, with
        a warning; all others go on with their live values. Damaged checkpoints are skipped with a
        warning that says why. Nothing is deleted.

        Args:
          step: this one and no other; or "best", by `keep_best` among those that are there.
          partial: a pattern over the params: restore only these; everything else stays as in
            `like`.
          cast: let floats be restored in another float dtype.
          resume: "auto" starts afresh (`step` None, `like` itself) where there is nothing at all;
            "must" raises there; "never" raises where there is something.
          params_only: restore params and model state; the optimizer starts anew. `like` may be a
            tree of params.

        Raises CheckpointError: nothing good among what is there (all of it listed), the step is not
          there, it is of
        another tree, shape, dtype or rule (up to ten differences, both sides), of another run or of
        a newer format.
        """
        checks.check_flags("restore()", cast=cast, params_only=params_only)
        alike = {"step": step, "partial": partial, "cast": cast, "params_only": params_only}
        how = _restoring.How(like, partial, cast, params_only)
        return self._newest(
            like, step, resume, alike, lambda at: self._read(at, how, step is not None)
        )

    def resumed(self, state, resume: str) -> Restored:
        """Where `fit` goes on: at the newest good checkpoint, or at a `state` that is further.

        A state that was never called, or as often as the one that the run began with, takes the
        checkpoint. Of any other the calls decide; of equal ones the state in hand goes on.
        """
        calls = _resume.calls_of(state)
        if not calls:
            return self.restore(state, resume=resume)
        return self._newest(state, None, resume, {}, lambda at: self._later(at, state, calls))

    def _later(self, at: int, state, calls: int) -> Restored:
        """The checkpoint of step `at`, or the state in hand with the checkpoint's other parts."""
        there = self._read(at, _restoring.Clocks())
        saved = int(sum(np.sum(clock[..., 1]) for clock in there.state))
        began = there.script.get("calls") if isinstance(there.script, dict) else 0
        steps = _arrays.step_of(_manifest.tree_of(state), None)
        here = f"fit(): the state given is at step {steps}"
        newest = f"the newest checkpoint in {self.path}"
        if calls < saved or calls == began != saved:
            if calls != began:
                text = f"{here}, {newest} at step {at}: the checkpoint's goes on"
                warn(f"{text}. For the state given, give another path.")
            return self._read(at, _restoring.How(state, None, False, False))
        got = f"step {steps} after {calls} calls"
        if steps < at:
            fix = "Give another path; or a fresh state, which takes the checkpoint."
            expected = f"step {at} or later, as {newest}"
            raise StateError(message("state", "fit()", got, expected, fix))
        if calls > saved:
            if not isinstance(state, TrainState):
                fix = "A tree of others has no clock of its own: give another path."
                expected = "a TrainState, or a fresh tree"
                raise StateError(message("state", "fit()", got, expected, fix))
            text = f"{here}, {newest} at step {at}: the state given goes on"
            warn(f"{text}, from where the data is now.")
            return dataclasses.replace(there, state=state, data=None)
        if differ := self._differences(at, state):
            text = f"{here}, as {newest}, and differs from it: {trees.listed(differ, 4)}"
            warn(f"{text}. The state given goes on.")
        return dataclasses.replace(there, state=state)

    def _differences(self, step: int, state) -> list[str]:
        """The leaves of a state whose bytes are not those that were saved."""
        tree, copies = _manifest.tree_of(state), []
        leaves = _arrays.copied(tree, copies, self._process)
        mine = Manifest(step, leaves, {}, {}, [], {}, {}, {}, {})
        mine = _arrays.with_hashes(mine, _arrays.digests(copies)())
        saved_at = lambda: (_folder.manifest_in(self.path / str(step), step), "")
        manifest, _ = self._together(f"restore of step {step}: leaves", saved_at)
        saved = {leaf.path: leaf for leaf in manifest.leaves}
        found = []
        for leaf in mine.leaves:
            theirs = saved.get(leaf.path)
            known = {s.bounds: s.sha256 for s in theirs.shards} if theirs is not None else {}
            if theirs is None or (leaf.kind, leaf.shape, leaf.dtype, leaf.value) != (
                theirs.kind, theirs.shape, theirs.dtype, theirs.value,
            ) or any(known.get(s.bounds, s.sha256) != s.sha256 for s in leaf.shards):  # fmt: skip
                is_number = leaf.path[-2:] == (".numbers", ".values")
                found.append("hyperparameters" if is_number else _manifest.show("state", leaf.path))
        return found

    def _newest(
        self, like, step: int | str | None, resume: str, alike: Mapping, read: Callable
    ) -> Restored:
        """What `read(step)` makes of the newest good checkpoint, of the best one, or of that of a
        step.
        """
        if not checks.is_one_of(resume, ("auto", "must", "never")):
            raise WrongTypeError(
                message("resume", "restore()", trees.describe(resume), "'auto', 'must' or 'never'")
            )
        processes.compare("restore()", {"resume": resume, **alike}, self.timeout + 10)

        def look():
            self.wait()
            _arrays.check_members(_manifest.tree_of(like), "restore()")
            if self._process:
                return None, ""
            return None, json.dumps(self._by_metric() if step == "best" else self._folder.steps())

        found = json.loads(self._together("restore()", look)[1][0])
        if resume == "never":
            if found:
                got, fix = f"steps {_brief(found)}", "Give another path, or delete them yourself."
                raise CheckpointError(
                    message("checkpoints", str(self.path), got, "none: resume='never'", fix)
                )
            return Restored(like)
        if isinstance(step, str):
            expected = "a step, or 'best' where metrics were saved"
            if step != "best" or not found:
                fix = f"{self.keep_best} is in none of them." if step == "best" else ""
                raise CheckpointError(message("step", "restore()", repr(step), expected, fix))
        elif step is not None:
            checks.check_count(step, "restore()", "step", 0)
            if step not in found:
                raise CheckpointError(
                    message("checkpoint", str(self.path), f"step {step}", f"one of {_brief(found)}")
                )
            found = [int(step)]
        problems: list[str] = []
        for at in reversed(found):
            try:
                restored = read(at)
            except Damaged as error:
                there = lambda at=at: (
                    None,
                    str(durable_files.is_real_directory(self.path / str(at))),
                )
                if step is None and self._together("restore()", there)[1][0] != "True":
                    continue  # a writer replaced it meanwhile
                if not isinstance(error, NotFinite):
                    self._folder.bad[at] = str(error)
                problems.append(f"step {at}: {error}")
                continue
            for problem in problems:
                warn(f"checkpoint skipped in {self.path}, {problem}.")
            return restored
        if self.read_only and step is None and found and not problems:
            return self._newest(like, step, resume, alike, read)
        if problems:
            fix = (
                "To start afresh, give another path."
                if step is None
                else "restore() without step= takes an older one."
            )
            got = "; ".join(problems[:10]) + (
                f"; and {len(problems) - 10} more" if problems[10:] else ""
            )
            raise CheckpointError(message("checkpoints", str(self.path), got, "a good one", fix))
        self._together("restore()", lambda: (self._folder.check_not_foreign(), ""))
        if resume == "must":
            raise CheckpointError(
                message("checkpoints", str(self.path), "none", "at least one: resume='must'")
            )
        return Restored(like)

    def steps(self) -> list[int]:
        """The steps whose checkpoint is complete and finite, in order.

        Their arrays are verified when they are restored.
        """
        return list(self.metrics())

    def metrics(self) -> dict[int, dict[str, float]]:
        """What was saved as `metrics` with each of `steps()`."""
        found = {
            step: manifest for step, manifest in self._folder.manifests() if not manifest.not_finite
        }
        return {
            step: manifest.metrics
            for step, manifest in found.items()
            if step not in self._folder.bad
        }

    def _by_metric(self) -> list[int]:
        """Steps that have the metric of `keep_best`, the best one last."""
        if self.keep_best is None:
            fix = "Say what is best: Checkpoints(path, keep_best=Best('val/loss', mode='min'))."
            raise CheckpointError(
                message("step", "restore()", "'best' without keep_best=", "a step", fix)
            )
        known = self.metrics()
        return dataclasses.replace(self.keep_best, k=len(known) or 1).of(known)[::-1]

    def __repr__(self) -> str:
        steps = trees.listed(
            [f"{step:,}" for step in sorted(self._folder.steps(warn=False), reverse=True)], 8
        )
        return f"Checkpoints({str(self.path)!r}, steps {steps or 'none'})"

    def latest(self) -> int | None:
        """The newest of `steps()`, or None."""
        return max(self.steps(), default=None)

    def _read(
        self, step: int, how: _restoring.How | _restoring.Clocks, is_named: bool = False
    ) -> Restored:
        folder = self.path / str(step)

        def describe():
            try:
                manifest = _folder.manifest_in(folder, step)
            except TooNew as error:
                got, expected = f"{error}", f"format {_manifest.FORMAT} or earlier"
                raise CheckpointError(
                    message("checkpoint", str(folder), got, expected, "Update tsunax.")
                ) from None
            self._check_fingerprint(manifest, folder)
            return manifest, durable_files.sha256(manifest.dump()) if self._count > 1 else ""

        def read():
            plan = how.plan(manifest, folder)
            parts = [] if how.only_params else self._parts(manifest, folder)
            arrays = [x for part in parts for x in part.arrays]
            leaves, needed = (
                [pair.saved for pair in plan.pairs],
                [plan.needed(pair) for pair in plan.pairs],
            )
            found = _orbax.bounded(
                lambda: _arrays.read(
                    folder / ARRAYS,
                    manifest.files,
                    [*leaves, *arrays],
                    [*needed, *[None] * len(arrays)],
                ),
                self.timeout,
                f"restore of step {step}",
            )
            return (plan, parts, found[: len(leaves)], found[len(leaves) :]), ""

        # what follows each of these may run programs over all devices, for which every process has
        # to be there
        manifest, sums = self._together(f"restore of step {step}: manifest", describe)
        if len(set(sums)) > 1:
            raise Damaged("manifest: processes read different ones; is it one directory?")
        if manifest.not_finite and not is_named:
            raise NotFinite(f"{manifest.not_finite} is not finite")
        (plan, parts, found, arrays), _ = self._together(f"restore of step {step}: arrays", read)
        state = plan.filled(found)
        _restoring.warn_of_edits(plan.edited)
        there, here = manifest.versions.get("devices", ""), _arrays.home_of(plan.mine)
        if manifest.states and not how.only_params and there and here and there != here:
            text = (
                f"saved on {there}, restored on {here}: the same values, but what follows may "
                "differ in the last bits."
            )
            warn(text)
        values: dict[str, Any] = {}
        for part in parts:
            values |= {
                name: _manifest.decode(x, arrays[: len(part.arrays)])
                for name, x in part.values.items()
            }
            arrays = arrays[len(part.arrays) :]
        parts = {name: values.get(name) for name in ("data", "history", "callbacks", "script")}
        return Restored(state, step=step, **parts)

    def _parts(self, manifest: Manifest, folder: Path) -> list[Parts]:
        """Data, history and callbacks for this process: the first one's, and what it had of its
        own.
        """
        first, others = manifest.parts[:1], manifest.parts[1:]
        if len(manifest.parts) == self._count:
            return (
                first + manifest.parts[self._process : self._process + 1]
                if self._process
                else first
            )
        if any("data" in part.values for part in others):
            got, expected = (
                f"those of {len(manifest.parts)} processes, each at its own",
                f"{self._count}",
            )
            fix = (
                "Go on with as many; or take the state, restore(like, params_only=True), and "
                "start the data anew."
            )
            raise CheckpointError(message("places of the data", str(folder), got, expected, fix))
        return first

    def _check_fingerprint(self, manifest: Manifest, folder: Path) -> None:
        theirs, mine = manifest.fingerprint, self._fingerprint
        keys = [
            key
            for key in [*mine, *(k for k in theirs if k not in mine)]
            if theirs.get(key) != mine.get(key)
        ]
        if not mine or not keys:  # who names nothing, accepts anything
            return
        a, b = (", ".join(f"{key}={x.get(key)!r:.60}" for key in keys[:10]) for x in (theirs, mine))
        fix = "It is of another run, or of other data: give another path."
        raise CheckpointError(message("checkpoint of another run", str(folder), a, b, fix))

    # ---------------------------------------------------------------------------- in the background

    def _write(self, job: _Job, manifest: Manifest, copies: list[np.ndarray]) -> None:
        """The whole of one save: every process its part, then the first one all of it."""
        end = (
            time.monotonic() + 0.9 * self.timeout
        )  # so that who is missing is named before `wait` gives up
        together = lambda name, f: self._together(
            f"{name} of step {job.step}",
            f,
            thread=self._name,
            timeout=max(1.0, end - time.monotonic()),
            kinds=(Damaged,),
        )[0]
        try:
            manifest = together("part", lambda: (self._write_part(job, manifest, copies), ""))
            old = together(
                "manifest", lambda: (None if self._process else self._complete(job, manifest), "")
            )
        except BaseException:
            if not self._process:
                shutil.rmtree(job.folder, ignore_errors=True)
            raise
        if not self._process:
            if old is not None:
                durable_files.remove(old, _folder.KNOWN)
            if job.drop is not None:
                odd = self._folder.not_finite - {job.step}  # the newest is enough, to look at
                self._folder.drop(sorted(odd.union(job.drop)))

    def _write_part(self, job: _Job, manifest: Manifest, copies: list[np.ndarray]) -> Manifest:
        """The shards of this process, on the disk.

        Read back, where older ones are to be deleted for them.
        """
        arrays = job.folder / ARRAYS
        for folder in (
            job.folder,
            arrays,
        ):  # not the run's own: that was moved or deleted, if it is not there
            folder.mkdir(exist_ok=True)
        file = _arrays.file_of(arrays, self._process)
        hashes = _arrays.digests(copies)
        if copies:
            _arrays.write(file, copies)
        manifest = _arrays.with_hashes(manifest, hashes())
        manifest = dataclasses.replace(manifest, not_finite=_arrays.not_finite(copies, job.watched))
        copies.clear()
        if manifest.of_arrays():
            if job.drop:
                _arrays.verified(
                    arrays,
                    {s.name: (s, leaf) for leaf in manifest.of_arrays() for s in leaf.shards},
                )
            manifest = dataclasses.replace(manifest, files={file.name: durable_files.facts(file)})
        durable_files.sync(arrays)
        if self._process:
            durable_files.write(job.folder / _part(self._process), manifest.dump())
        return manifest

    def _complete(self, job: _Job, manifest: Manifest) -> Path | None:
        """The parts of all processes as one checkpoint."""
        manifests = [manifest]
        for i in range(1, self._count):
            path = job.folder / _part(i)
            try:
                manifests.append(
                    Manifest.parse(durable_files.read(path, _manifest.LIMIT), whole=False)
                )
            except (OSError, ValueError) as error:
                raise Damaged(f"part of {processes.name_of(i)}: {told(error)}") from None
            os.unlink(path)
        lock = self._lock
        if lock is None:
            raise Damaged("closed before it was written")
        lock.renew(self.path)
        whole = _manifest.merged(manifests)
        if whole.not_finite:  # nothing goes for it that is good
            is_there = job.step in self._folder.known()
            job.drop = None if is_there else []
            text = (
                f"the checkpoint of step {job.step} in {self.path} is not finite "
                f"({whole.not_finite})"
            )
            self._folder.notes.append(f"{text}: restore() takes an earlier one.")
            if is_there:
                shutil.rmtree(job.folder, ignore_errors=True)
                return None
        return self._folder.complete(job.folder, whole)

    def _dropped(self, newest: int, metrics: dict[str, float]) -> list[int]:
        """What no policy keeps, once the newest is there."""
        known = {**self._folder.known(), newest: metrics}
        if self.keep_last is None:
            return []
        kept = {*sorted(known)[-self.keep_last :], newest}
        if self.keep_best is not None:
            kept.update(self.keep_best.of(known))
        if self.keep_every is not None:
            kept.update(step for step in known if step % self.keep_every == 0)
        return [step for step in sorted(known) if step not in kept]

    def _check_writer(self, where: str) -> None:
        if self.read_only:
            raise CheckpointError(
                message("checkpoints", where, "read_only=True", "ones that write")
            )
        if self._lock is not None and self._lock.pid != os.getpid():
            raise CheckpointError(
                message("checkpoints", where, "those of the process that forked", "own ones")
            )
        if self._lock is None:
            fix = "One Checkpoints a directory and process writes: the one made last."
            raise CheckpointError(message("checkpoints", where, "closed ones", "open ones", fix))


def _brief(steps: list[int]) -> str:
    if not steps:
        return "none"
    return (
        ", ".join(map(str, steps))
        if len(steps) <= 10
        else f"{steps[0]} … {steps[-1]} ({len(steps)} steps)"
    )


def _no_arrays(array):
    raise WrongTypeError(
        message("fingerprint", "Checkpoints()", "an array", "plain numbers and strings")
    )


def _numbers(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    if not isinstance(metrics, Mapping | None):
        raise WrongTypeError(
            message("metrics", "save()", trees.describe(metrics), "a dict of numbers")
        )
    out = {}
    for name, value in (metrics or {}).items():
        try:
            if not isinstance(name, str) or np.ndim(value) or trees.dtype_of(value) is None:
                raise TypeError
            out[name] = float(value)
        except (TypeError, OverflowError):
            where = f"metric {name!r:.60}"
            raise WrongTypeError(
                message(where, "save()", trees.describe(value), "one number")
            ) from None
    return out


def _digests(given: Mapping[str, Any]) -> dict[str, str]:
    """Of what each process has of its own: whether it differs from that of another one."""
    content = lambda x: f"{x.dtype} {x.shape} {_arrays.digest(x)}"
    coded = {name: _manifest.encode(given[name], content, name) for name in ("data", "callbacks")}
    return {
        name: durable_files.sha256(json.dumps(x, sort_keys=True).encode())
        for name, x in coded.items()
    }


def _part(process: int) -> str:
    return f"part-{process}.json"


# -------------------------------------------------------------------------- threads, locks, the end


class _Job:
    """One save in the background. A daemon: a hung disk must not keep the process; `_finish` waits
    for the others.
    """

    def __init__(
        self,
        owner: Checkpoints,
        manifest: Manifest,
        copies: list[np.ndarray],
        folder: Path,
        drop: list[int],
        watched: dict[int, str],
    ):
        self.owner, self.step, self.path = owner, manifest.step, owner.path
        self.folder = folder  # where it is written
        self.drop: list[int] | None = (
            drop  # the steps to be deleted once it is there; None: it is not kept
        )
        self.watched = watched  # copies that have to be finite
        self.error: BaseException | None = None
        self.done, self.told, self.given_up = threading.Event(), False, False
        self._work = manifest, copies

    def start(self) -> None:
        with _LOCK:
            _JOBS[:] = [job for job in _JOBS if not job.told]
            _JOBS.append(self)
            if not _HOOKED:
                _HOOKED.append(True)
                # before concurrent.futures refuses new work, and before any `atexit`, where
                # processes part
                getattr(threading, "_register_atexit", atexit.register)(_finish)
        threading.Thread(target=self._run, name=f"tsunax-save-{self.step}", daemon=True).start()

    def _run(self) -> None:
        manifest, copies = self._work
        del self._work
        try:
            self.owner._write(self, manifest, copies)
        except BaseException as error:
            self.error = error
        finally:
            copies.clear()
            self.done.set()


_LOCK = threading.RLock()
_JOBS: list[_Job] = []
_HOOKED: list[bool] = []
_HELD: dict[tuple[int, int], tuple[durable_files.Lock, weakref.ref]] = {}


def _finish() -> None:
    """At the interpreter's end: wait for saves; one that failed unseen, or hangs, makes the exit
    status 1.
    """
    failed = False
    for job in [job for job in _JOBS if os.getpid() == _pid(job)]:
        if job.told:
            continue
        limit = 0.0 if job.given_up else job.owner.timeout
        if not job.done.wait(limit) or job.error is not None:
            why = f"nothing after {job.owner.timeout:g} s" if job.error is None else told(job.error)
            where = str(job.path / str(job.step))
            fix = "Call close() in time, or write `with Checkpoints(...)`."
            print(
                (
                    "tsunax: "
                    f"{message(f'save of step {job.step}', where, why, 'a finished save', fix)}"
                ),
                file=sys.stderr,
            )
            failed = True
    hung = any(not job.done.is_set() for job in _JOBS if os.getpid() == _pid(job))
    if failed or hung:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(1)


def _pid(job: _Job) -> int | None:
    return job.owner._lock.pid if job.owner._lock is not None else os.getpid()


def _open(owner: Checkpoints) -> None:
    """Make the directory and take its lock; from an earlier owner in this process, once that has
    nothing to write.
    """
    where, fix = str(owner.path), "Give the path of a directory that can be written."
    if os.path.exists(owner.path) and not os.path.isdir(owner.path):
        got = "a file"
        fix = f"{_folder.NO_CODE} {fix}"
        raise CheckpointError(message("path", where, got, "a directory of checkpoints", fix))
    try:
        owner.path.mkdir(parents=True, exist_ok=True)
        if not os.access(owner.path, os.W_OK | os.X_OK):
            raise PermissionError("not writable")
        about = os.stat(owner.path)
        key = about.st_dev, about.st_ino
        with _LOCK:
            lock, previous = _HELD.get(key, (None, lambda: None))
            if lock is not None and lock.pid == os.getpid():
                if (other := previous()) is not None and other._lock is lock:
                    other.wait()
                    other._lock = None
            else:
                lock = durable_files.Lock(owner.path, is_mine=not owner._process)
            _HELD[key] = lock, weakref.ref(owner)
            owner._lock = lock
    except OSError as error:
        if isinstance(error, SaveError):
            raise
        raise CheckpointError(
            message("path", where, told(error), "a directory that can be written", fix)
        ) from error


def _release(owner: Checkpoints) -> None:
    with _LOCK:
        lock, owner._lock = owner._lock, None
        for key, (held, _) in list(_HELD.items()):
            if held is lock:
                del _HELD[key]
                held.release()
