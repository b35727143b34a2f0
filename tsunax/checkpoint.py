"""Checkpoints: a training state on the disk, whole or not at all, and read back to the last bit.

    save:     host copies -> (orbax writes them | sha256 of each) -> manifest -> fsync -> rename
    restore:  newest manifest -> compare with the script's state -> read -> sha256 -> place

orbax holds the arrays; what makes a directory a checkpoint is the manifest in it, written last. This module knows
files, threads and orbax; what a tree is and whether two agree is told by `_manifest`.
"""

from __future__ import annotations

import atexit
import concurrent.futures.thread
import contextlib
import dataclasses
import math
import os
import shutil
import sys
import threading
import warnings
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tsunax import _checks, _files, _manifest, _store, _target, _tree
from tsunax._manifest import Damaged, Leaf, Manifest, TooNew
from tsunax.errors import CheckpointError, HyperparameterError, SaveError, WrongTypeError, message, told

__all__ = ["Best", "Checkpoints", "Restored"]

_MANIFEST, _SUM, _ARRAYS = "manifest.json", "manifest.sha256", "arrays"
_KNOWN = (_MANIFEST, _SUM, _ARRAYS)
_FOREIGN = ("_CHECKPOINT_METADATA", "_METADATA", "checkpoint", "commit_success.txt")
_FOREIGN_ENDS = (".msgpack", ".pkl", ".pickle", ".pt", ".pth", ".ckpt", ".safetensors", ".npz", ".h5", ".keras")
_NO_CODE = "Nothing in it was opened."


@dataclass(frozen=True)
class Best:
    """Keep the `k` checkpoints whose `metric`, as given to `save(metrics=...)`, is best: lowest, or highest.

    >>> Best("accuracy", k=3, mode="max")
    Best(metric='accuracy', k=3, mode='max')
    """

    metric: str
    k: int = 1
    mode: str = "min"

    def __post_init__(self):
        if not isinstance(self.metric, str) or not self.metric:
            raise WrongTypeError(message("metric", "Best()", _tree.describe(self.metric), "the name of a metric"))
        _checks.check_count(self.k, "Best()", "k")
        if self.mode not in ("min", "max"):
            raise WrongTypeError(message("mode", "Best()", _tree.describe(self.mode), "'min' or 'max'"))

    def of(self, metrics: Mapping[int, Mapping[str, float]]) -> list[int]:
        """The best steps; a NaN is never one of them, and of equals the later is."""
        sign = -1 if self.mode == "max" else 1
        known = {s: sign * m[self.metric] for s, m in metrics.items() if not math.isnan(m.get(self.metric, math.nan))}
        return sorted(known, key=lambda s: (known[s], -s))[: self.k]


@dataclass(frozen=True)
class Restored:
    """What `Checkpoints.restore` found. `step` is None where there was nothing, and `state` is what was given."""

    state: Any
    data: Any = None
    history: Any = None
    callbacks: Any = None
    step: int | None = None


class Checkpoints:
    """The checkpoints of one run, in one directory.

        with ts.Checkpoints("runs/a") as checkpoints:
            state = checkpoints.restore(state).state
            for batch in data:
                state, info = step(state, batch)
                if checkpoints.due(int(state.step)):
                    checkpoints.save(state)

    `save` copies the state to the host, returns, and writes in the background. A checkpoint appears under its step's
    name when all of it is on the disk, or never. `restore` takes the newest whose every byte is what was saved.

    Args:
      path: the directory; made if it is not there. Relative ones are made absolute once.
      every: what `due` goes by, in steps.
      keep_last: how many of the newest to keep; None: all.
      keep_best: a metric's name (its lowest value) or a `Best`: kept beside the newest.
      keep_every: keep every step that this divides.
      fingerprint: plain values that tell this run and its data from others (seed, rows, batch size). They are saved,
        and a checkpoint with others is refused.
      read_only: only restore. Needs no write access and takes no lock, also while a run writes.
      timeout: seconds after which a save or a restore that has not ended counts as failed.

    Raises CheckpointError where the path cannot be used: a file, not writable, in use by another process.

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

    def __init__(
        self,
        path: str | os.PathLike,
        *,
        every: int | None = None,
        keep_last: int | None = 2,
        keep_best: str | Best | None = None,
        keep_every: int | None = None,
        fingerprint: Mapping[str, Any] | None = None,
        read_only: bool = False,
        timeout: float = 600.0,
    ):
        for name, value in {"every": every, "keep_last": keep_last, "keep_every": keep_every}.items():
            if value is not None:
                _checks.check_count(value, "Checkpoints()", name)
        if not isinstance(timeout, (int, float)) or not timeout > 0:
            raise HyperparameterError(message("timeout", "Checkpoints()", _tree.describe(timeout), "seconds > 0"))
        if keep_best is not None and not isinstance(keep_best, Best):
            keep_best = Best(keep_best)
        if jax.process_count() > 1:
            got, expected = f"{jax.process_count()} processes", "one, until each writes its own part"
            raise CheckpointError(message("processes", "Checkpoints()", got, expected))
        self.path = _absolute(path)
        self.every, self.keep_last, self.keep_best, self.keep_every = every, keep_last, keep_best, keep_every
        self.read_only, self.timeout = read_only, timeout
        self._fingerprint: dict[str, Any] = _manifest.encode(dict(fingerprint or {}), _no_arrays, "fingerprint")
        self._job: _Job | None = None
        self._bad: dict[int, str] = {}  # steps that did not stand their verification, and why
        self._known: dict[int, dict[str, float]] | None = None  # good steps and their metrics
        self._notes: list[str] = []
        self._lock: _files.Lock | None = None
        if not read_only:
            _open(self)
            self._tidy()

    # ---------------------------------------------------------------------------------------------------- saving

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
        """Copy `state` to the host and write it in the background. Later changes and donations do not matter.

        The step is the state's own, of the first TrainState in a tree of several; a tree without one needs `step=`.
        A step that is there already is replaced. `data`, `history`, `callbacks`: None, numbers, strings, arrays, and
        lists, tuples and dicts of them. Waits for the save before it, if that is not done.

        Raises SaveError if that one failed (its step, path, cause; what was to be saved now is not), CheckpointError
        for a step before the newest one, WrongTypeError for leaves that cannot be saved.
        """
        self._check_writer("save()")
        self.wait()
        tree = _manifest.tree_of(state)
        _store.check_saveable(tree)
        step = _store.step_of(tree, step)
        known = self._scan()
        if known and step < max(known):
            fix = "To go on from an earlier step, give another path: Checkpoints(other).save(...)."
            raise CheckpointError(message("step", "save()", step, f"≥ {max(known)}, the newest in {self.path}", fix))
        copies: list[np.ndarray] = []
        leaves = _store.copied(tree, copies)
        arrays: list[Leaf] = []

        def keep(array: np.ndarray) -> int:
            arrays.append(
                _store.stored((str(len(arrays)),), "array", array.shape, array.dtype, [(None, array)], copies)
            )
            return len(arrays) - 1

        parts = {"data": data, "history": history, "callbacks": callbacks}
        manifest = Manifest(
            step=step,
            leaves=leaves,
            nodes=tree.nodes,
            states={path: _manifest.state_facts(s) for path, s in tree.states.items()},
            parts={name: _manifest.encode(value, keep, name) for name, value in parts.items() if value is not None},
            arrays=arrays,
            metrics=_numbers(metrics),
            fingerprint=self._fingerprint,
            versions=_store.versions(),
            files={},
        )
        self._job = _Job(self, manifest, copies)
        self._job.start()

    def poll(self) -> None:
        """Raise SaveError if a save that has ended failed. Does not wait for one that has not."""
        if self._job is not None and self._job.done.is_set():
            self.wait()

    def wait(self, timeout: float | None = None) -> None:
        """Block until what was saved is on the disk. Raises SaveError if it is not, within `timeout` seconds."""
        job = self._job
        if job is not None:
            limit = self.timeout if timeout is None else timeout
            if not job.done.wait(max(0.0, limit)):
                job.given_up = True
                got = f"nothing after {limit:g} s"
                raise SaveError(message(f"save of step {job.step}", str(self.path), got, "a finished save"))
            self._job = None
            job.told = True
            if job.error is not None:
                fix = "Earlier checkpoints are as they were."
                got = told(job.error) if not isinstance(job.error, Damaged) else str(job.error)
                text = message(f"save of step {job.step}", str(self.path / str(job.step)), got, "a finished save", fix)
                raise SaveError(text) from job.error
        notes, self._notes = self._notes, []
        for note in notes:
            warnings.warn(note, stacklevel=3)

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

    # ------------------------------------------------------------------------------------------------- restoring

    def restore(
        self,
        like,
        *,
        step: int | None = None,
        partial: Any = None,
        cast: bool = False,
        resume: str = "auto",
        params_only: bool = False,
    ) -> Restored:
        """The newest good checkpoint, as a state with the structure, dtypes and devices of `like`.

        `like` is what the same script's `setup` returns, or any tree of arrays or `jax.ShapeDtypeStruct`. Cuts and
        frozen flags of the saved state are built anew. A hyperparameter that was edited in the script since the run was
        set up is the script's, with a warning; all others go on with their live values. Damaged checkpoints are
        skipped with a warning that says why. Nothing is deleted.

        Args:
          step: this one and no other.
          partial: a pattern over the params: restore only these; everything else stays as in `like`.
          cast: let floats be restored in another float dtype.
          resume: "auto" starts afresh (`step` None, `like` itself) where there is nothing at all; "must" raises
            there; "never" raises where there is something.
          params_only: restore params and model state; the optimizer starts anew. `like` may be a tree of params.

        Raises CheckpointError: nothing good among what is there (all of it listed), the step is not there, it is of
        another tree, shape, dtype or rule (up to ten differences, both sides), of another run or of a newer format.
        """
        if resume not in ("auto", "must", "never"):
            raise WrongTypeError(message("resume", "restore()", _tree.describe(resume), "'auto', 'must' or 'never'"))
        self.wait()
        found = self._steps_there()
        if resume == "never":
            if found:
                got, fix = f"steps {_brief(found)}", "Give another path, or delete them yourself."
                raise CheckpointError(message("checkpoints", str(self.path), got, "none: resume='never'", fix))
            return Restored(like)
        if step is not None:
            _checks.check_count(step, "restore()", "step", 0)
            if step not in found:
                raise CheckpointError(message("checkpoint", str(self.path), f"step {step}", f"one of {_brief(found)}"))
            found = [int(step)]
        problems: list[str] = []
        how = _target.How(like, partial, cast, params_only)
        for at in reversed(found):
            try:
                restored = self._read(at, how)
            except Damaged as error:
                if step is None and not _files.is_real_directory(self.path / str(at)):
                    continue  # a writer replaced it meanwhile
                self._bad[at] = str(error)
                problems.append(f"step {at}: {error}")
                continue
            for problem in problems:
                warnings.warn(f"checkpoint skipped in {self.path}, {problem}.", stacklevel=2)
            return restored
        if self.read_only and step is None and found and not problems:
            return self.restore(like, partial=partial, cast=cast, resume=resume, params_only=params_only)
        if problems:
            fix = (
                "To start afresh, give another path." if step is None else "restore() without step= takes an older one."
            )
            got = "; ".join(problems[:10]) + (f"; and {len(problems) - 10} more" if problems[10:] else "")
            raise CheckpointError(message("checkpoints", str(self.path), got, "a good one", fix))
        self._check_not_foreign()
        if resume == "must":
            raise CheckpointError(message("checkpoints", str(self.path), "none", "at least one: resume='must'"))
        return Restored(like)

    def steps(self) -> list[int]:
        """The steps whose checkpoint is complete, in order. Their arrays are verified when they are restored."""
        found = []
        for step in self._steps_there(warn=False):
            with contextlib.suppress(Damaged, TooNew):
                _manifest_in(self.path / str(step), step)
                found.append(step)
        return [step for step in found if step not in self._bad]

    def latest(self) -> int | None:
        """The newest of `steps()`, or None."""
        return max(self.steps(), default=None)

    def _read(self, step: int, how: _target.How) -> Restored:
        folder = self.path / str(step)
        try:
            manifest = _manifest_in(folder, step)
        except TooNew as error:
            got, fix = f"{error}", "Update tsunax."
            raise CheckpointError(
                message("checkpoint", str(folder), got, f"format {_manifest.FORMAT} or earlier", fix)
            ) from None
        self._check_fingerprint(manifest, folder)
        plan = how.plan(manifest, folder)
        wanted = [pair.saved for pair in plan.pairs]
        parts = [] if how.only_params else manifest.arrays
        declared = sum(math.prod(x.shape) * _manifest.dtype_of(x.dtype).itemsize for x in parts)  # type: ignore[union-attr]
        if parts and declared > (64 << 20) + 256 * _files.sizes(folder):
            raise Damaged(f"history, data and callbacks declare {declared} bytes, far more than their files have")
        arrays = _store.bounded(
            lambda: _store.read(folder / _ARRAYS, manifest.files, [*wanted, *parts]),
            self.timeout,
            f"restore of step {step}",
        )
        state = plan.filled(arrays[: len(wanted)])
        _target.warn_of_edits(plan.edited, 2)
        if how.only_params:
            return Restored(state, step=step)
        values = {name: _manifest.decode(x, arrays[len(wanted) :]) for name, x in manifest.parts.items()}
        return Restored(state, values.get("data"), values.get("history"), values.get("callbacks"), step)

    def _check_fingerprint(self, manifest: Manifest, folder: Path) -> None:
        theirs, mine = manifest.fingerprint, self._fingerprint
        keys = [key for key in [*mine, *(k for k in theirs if k not in mine)] if theirs.get(key) != mine.get(key)]
        if not mine or not keys:  # who names nothing, accepts anything
            return
        a, b = (", ".join(f"{key}={x.get(key)!r:.60}" for key in keys[:10]) for x in (theirs, mine))
        fix = "It is of another run, or of other data: give another path."
        raise CheckpointError(message("checkpoint of another run", str(folder), a, b, fix))

    def _check_not_foreign(self) -> None:
        names = sorted(os.listdir(self.path)) if os.path.isdir(self.path) else []
        odd = [name for name in names if name in _FOREIGN or name.lower().endswith(_FOREIGN_ENDS)]
        if odd:
            got, expected = _tree.listed(odd, 4), "checkpoints of tsunax, or none"
            fix = f"{_NO_CODE} tsunax.exchange reads safetensors, flax's msgpack and orbax's directories."
            raise CheckpointError(message("checkpoints", str(self.path), got, expected, fix))

    # ----------------------------------------------------------------------------------------------- directories

    def _steps_there(self, warn: bool = True) -> list[int]:
        """Steps that a directory is named after, in order; says which odd names are ignored."""
        found = []
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            names = []
        for name in names:
            step = _files.step_of(name)
            real = _files.is_real_directory(self.path / name)
            if step is not None and real:
                found.append(step)
            elif warn and (step is not None or name.lstrip("-+").isdigit()):
                why = "a link" if os.path.islink(self.path / name) else "no step's name" if step is None else "a file"
                warnings.warn(f"{self.path / name} is ignored: {why}.", stacklevel=3)
        return sorted(found)

    def _scan(self) -> dict[int, dict[str, float]]:
        """The complete steps and their metrics; read once, because nobody else writes here."""
        if self._known is None:
            known = {}
            for step in self._steps_there(warn=False):
                with contextlib.suppress(Damaged, TooNew):
                    known[step] = _manifest_in(self.path / str(step), step).metrics
            self._known = known
        for step in [step for step in self._known if step in self._bad]:
            del self._known[step]
        return self._known

    def _tidy(self) -> None:
        """Finish what a killed run left half done: drop what it was writing, put back what it was replacing."""
        for name in sorted(os.listdir(self.path)):
            mine, folder = _files.ours(name), self.path / name
            if mine is None or not _files.is_real_directory(folder):
                continue
            kind, step = mine
            final = self.path / str(step)
            if kind == "tmp":
                shutil.rmtree(folder, ignore_errors=True)
            elif (folder / _MANIFEST).is_file() and not os.path.lexists(final):
                os.rename(folder, final)
            else:
                _files.remove(folder, _KNOWN)

    def _write(self, manifest: Manifest, copies: list[np.ndarray]) -> None:
        """The whole of one save; runs in the background."""
        step = manifest.step
        folder = _files.aside(self.path, "tmp", step)
        os.mkdir(folder)
        try:
            with concurrent.futures.ThreadPoolExecutor(max(1, min(4, os.cpu_count() or 1))) as pool:
                digests = [pool.submit(_store.digest, copy) for copy in copies]
                if copies:
                    _store.write(folder / _ARRAYS, {str(i): copy for i, copy in enumerate(copies)})
                hashes = [digest.result() for digest in digests]
            copies.clear()
            files = _files.listing(folder / _ARRAYS)
            manifest = dataclasses.replace(_store.with_hashes(manifest, hashes), files=files)
            body = manifest.dump()
            if len(body) > _manifest.LIMIT:
                raise ValueError(f"a manifest of {len(body)} bytes, more than {_manifest.LIMIT}")
            Manifest.parse(body)
            _files.write(folder / _MANIFEST, body)
            _files.write(folder / _SUM, _sum_of(body))
            _files.sync_tree(folder)
            old = self._make_room(step)
            os.rename(folder, self.path / str(step))
            _files.sync(self.path)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        known = self._scan()
        known[step] = manifest.metrics
        self._bad.pop(step, None)
        if old is not None:
            _files.remove(old, _KNOWN)
        self._prune(manifest)

    def _make_room(self, step: int) -> Path | None:
        """Move what has this step's name out of the way: to be deleted if it is a checkpoint, to stay if it is not."""
        final = self.path / str(step)
        if not os.path.lexists(final):
            return None
        if not _files.is_real_directory(final):
            raise FileExistsError(f"{final} is no directory of ours")
        try:
            if step in self._bad:
                raise Damaged(self._bad[step])
            _manifest_in(final, step)
            if set(os.listdir(final)) <= set(_KNOWN):
                old = _files.aside(self.path, "old", step)
                os.rename(final, old)
                return old
            why = "it holds files that are not tsunax's"
        except (Damaged, TooNew) as error:
            why = str(error)
        for n in range(1, 1000):
            other = self.path / f"{step}.damaged-{n}"
            if not os.path.lexists(other):
                os.rename(final, other)
                self._notes.append(f"{final} was moved to {other.name}: {why}.")
                return None
        raise FileExistsError(f"{final} cannot be moved aside")

    def _prune(self, newest: Manifest) -> None:
        """Delete what no policy keeps, once the newest was read back and is what was saved."""
        known = self._scan()
        if self.keep_last is None:
            return
        kept = {*sorted(known)[-self.keep_last :], newest.step}
        if self.keep_best is not None:
            kept.update(self.keep_best.of(known))
        if self.keep_every is not None:
            kept.update(step for step in known if step % self.keep_every == 0)
        dropped = [step for step in sorted(known) if step not in kept]
        if not dropped:
            return
        try:
            _store.read(self.path / str(newest.step) / _ARRAYS, newest.files, [*newest.leaves, *newest.arrays], False)
        except Damaged as error:
            self._bad[newest.step] = str(error)
            raise
        for step in dropped:
            folder = self.path / str(step)
            del known[step]
            if _files.is_real_directory(folder) and set(os.listdir(folder)) <= set(_KNOWN):
                old = _files.aside(self.path, "old", step)
                os.rename(folder, old)
                _files.remove(old, _KNOWN)

    def _check_writer(self, where: str) -> None:
        if self.read_only:
            raise CheckpointError(message("checkpoints", where, "read_only=True", "ones that write"))
        if self._lock is None:
            fix = "One Checkpoints a directory and process writes: the one made last."
            raise CheckpointError(message("checkpoints", where, "closed ones", "open ones", fix))


def _absolute(path) -> Path:
    try:
        text = os.fspath(path)
        if not text or not isinstance(text, str):
            raise ValueError("an empty path" if text == "" else f"a path of {type(text).__name__}")
        return Path(os.path.realpath(text))
    except (TypeError, ValueError, OSError) as error:
        raise CheckpointError(message("path", "Checkpoints()", told(error), "a directory's path")) from None


def _brief(steps: list[int]) -> str:
    if not steps:
        return "none"
    return ", ".join(map(str, steps)) if len(steps) <= 10 else f"{steps[0]} … {steps[-1]} ({len(steps)} steps)"


def _no_arrays(array):
    raise WrongTypeError(message("fingerprint", "Checkpoints()", "an array", "plain numbers and strings"))


def _numbers(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    out = {}
    for name, value in (metrics or {}).items():
        if not isinstance(name, str) or np.ndim(value) or _tree.dtype_of(value) is None:
            raise WrongTypeError(message(f"metric {name!r:.60}", "save()", _tree.describe(value), "one number"))
        out[name] = float(value)
    return out


def _sum_of(body: bytes) -> bytes:
    return f"{_files.sha256(body)}  {_MANIFEST}\n".encode()


def _manifest_in(folder: Path, step: int) -> Manifest:
    """The manifest of a checkpoint's directory. Raises Damaged, or TooNew."""
    if not _files.is_real_directory(folder):
        raise Damaged("not a directory")
    try:
        expected = _files.read(folder / _SUM, 200)
        body = _files.read(folder / _MANIFEST, _manifest.LIMIT)
    except FileNotFoundError:
        plain = any(os.path.lexists(folder / name) for name in _FOREIGN)
        raise Damaged("no manifest" + (": orbax's own, not tsunax's" if plain else "")) from None
    except (OSError, ValueError) as error:
        raise Damaged(f"manifest: {told(error)}") from None
    if expected != _sum_of(body):
        raise Damaged("manifest: other bytes than were saved (sha256)")
    manifest = Manifest.parse(body)
    if manifest.step != step:
        raise Damaged(f"manifest: of step {manifest.step}")
    return manifest


# ------------------------------------------------------------------------------------ threads, locks, the end


class _Job:
    """One save in the background. A daemon: a hung disk must not keep the process; `_finish` waits for the others."""

    def __init__(self, owner: Checkpoints, manifest: Manifest, copies: list[np.ndarray]):
        self.owner, self.step, self.path = owner, manifest.step, owner.path
        self.error: BaseException | None = None
        self.done, self.told, self.given_up = threading.Event(), False, False
        self._work = manifest, copies

    def start(self) -> None:
        with _LOCK:
            _JOBS[:] = [job for job in _JOBS if not job.told]
            _JOBS.append(self)
            if not _HOOKED:
                _HOOKED.append(True)
                # before concurrent.futures refuses new work, which is before any `atexit`; hooks run last in, first out
                getattr(threading, "_register_atexit", atexit.register)(_finish)
        threading.Thread(target=self._run, name=f"tsunax-save-{self.step}", daemon=True).start()

    def _run(self) -> None:
        manifest, copies = self._work
        del self._work
        try:
            self.owner._write(manifest, copies)
        except BaseException as error:
            self.error = error
        finally:
            copies.clear()
            self.done.set()


_LOCK = threading.RLock()
_JOBS: list[_Job] = []
_HOOKED: list[bool] = []
_HELD: dict[tuple[int, int], tuple[_files.Lock, weakref.ref]] = {}


def _finish() -> None:
    """At the interpreter's end: wait for saves; one that failed unseen, or hangs, makes the exit status 1.

    Python 3.12 (not 3.11, not 3.13) allows no new thread by then, so that a save that is still to be written fails.
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
            print(f"tsunax: {message(f'save of step {job.step}', where, why, 'a finished save', fix)}", file=sys.stderr)
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
    """Make the directory and take its lock; from an earlier owner in this process, once that has nothing to write."""
    where, fix = str(owner.path), "Give the path of a directory that can be written."
    if os.path.exists(owner.path) and not os.path.isdir(owner.path):
        got = "a file"
        fix = f"{_NO_CODE} {fix}"
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
                lock = _files.Lock(owner.path)
            _HELD[key] = lock, weakref.ref(owner)
            owner._lock = lock
    except OSError as error:
        if isinstance(error, SaveError):
            raise
        raise CheckpointError(message("path", where, told(error), "a directory that can be written", fix)) from error


def _release(owner: Checkpoints) -> None:
    with _LOCK:
        lock, owner._lock = owner._lock, None
        for key, (held, _) in list(_HELD.items()):
            if held is lock:
                del _HELD[key]
                held.release()
