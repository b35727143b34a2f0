"""Checkpoints: a training state on the disk, whole or not at all, and read back to the last bit.

    save:     copy to the host -> (write | hash) -> all processes done -> manifest -> sync -> name
              (`_home.py` has the renames)
    restore:  newest manifest -> compare with the script's state -> read -> verify -> put on devices

Each of several processes writes a part, and reads the parts that it needs. The first process alone
lists the steps and commits.
"""

import json
import math
import os
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from tsunax._core import PyTree, StrPath, checks, durable_files, processes, trees
from tsunax._core.cadence import Cadence, Timer, When, cadence_of
from tsunax.checkpoints import _background, _writing
from tsunax.checkpoints._home import BUCKETS, CheckpointHome, store_of
from tsunax.checkpoints._writing import Best
from tsunax.checkpoints.leaves import Damaged
from tsunax.checkpoints.manifest import Restored
from tsunax.errors import (
    CheckpointError,
    HyperparameterError,
    ProcessError,
    SaveError,
    WrongTypeError,
    told,
    warn,
)

__all__ = ["Best", "Checkpoints", "Restored"]


class Checkpoints:
    """The checkpoints of one run, in one directory.

        with ts.Checkpoints("runs/a") as checkpoints:
            state = checkpoints.restore(state).state
            for batch in data:
                state, info = step(state, batch)
                if checkpoints.due(int(state.step)):
                    checkpoints.save(state)

    `save` copies the state to the host, returns, and writes in the background. A checkpoint appears
    under its step's name when all of it is on the disk, or never. `restore` takes the newest that
    has the saved bytes.

    Args:
      path: the directory; made if it is not there. Relative ones are made absolute once. Or
        "s3://bucket/run", "gs://bucket/run", with the extra `s3` or `gcs`.
      every: how often `fit` saves, and `due` is True: a number of steps, "2 epochs" (in `fit`), a
        duration as "30 s", "10 minutes", "2 h" or a `timedelta`, or a tuple of these for whichever
        comes first. By default `fit` saves after every epoch and every ten minutes, and `due` is
        False. In any case `fit` saves at the end.
      keep_last: how many of the newest to keep; None: all.
      keep_best: `Best("val/accuracy", mode="max")`: the best are kept, too.
      keep_every: keep every step that this divides.
      read_only: only restore. Needs no write access and takes no lock, also while a run writes.
      store: "files", safetensors; or "orbax", orbax's own layout, which its tools load, on a disk.
        By default files, or as what is there was saved.
      timeout: seconds after which a save or a restore that has not ended counts as failed.

    With several processes (`distributed`), each makes a `Checkpoints` of the same directory on a
    shared disk, and calls `save` and `restore` as the other processes do. All processes raise the
    error of one, and name the process.

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

    @checks.naming_arguments
    def __init__(
        self,
        path: StrPath,
        *,
        every: When | None = None,
        keep_last: int | None = 2,
        keep_best: Best | None = None,
        keep_every: int | None = None,
        read_only: bool = False,
        store: str | None = None,
        timeout: float = 600.0,
    ) -> None:
        counts = {"keep_last": keep_last, "keep_every": keep_every}
        for name, value in counts.items():
            if value is not None:
                checks.check_count(value, "Checkpoints()", name)
        self.cadence: Cadence = cadence_of(() if every is None else every, "Checkpoints()", "every")
        checks.check_flags("Checkpoints()", read_only=read_only)
        if not 0 < timeout < 1e6:
            raise HyperparameterError("timeout", "Checkpoints()", timeout, "seconds > 0, < 1e6")
        if not isinstance(keep_best, Best | None):
            raise WrongTypeError(
                "keep_best",
                "Checkpoints()",
                got=trees.describe(keep_best),
                expected="Best(metric, mode='min')",
            )
        self.home: CheckpointHome = _home_of(path, store, timeout)
        self.path: Any = self.home.path  # a Path, or the address of a bucket with `/`
        self.every: When | None = every
        self._timer: Timer = Timer(self.cadence.seconds)
        self.keep_last: int | None = keep_last
        self.keep_every: int | None = keep_every
        self.keep_best: Best | None = keep_best
        self.read_only: bool = read_only
        self.timeout: float = timeout
        self.everyone: processes.Alone = processes.current()
        self.process: int = self.everyone.index
        self._job: _background.Job | None = None
        self._lock: durable_files.Lock | None = None
        self.thread: str = ""  # the name of its threads: a process may have several savers
        if not read_only:
            self._open(
                {**counts, "every": every, "keep_best": keep_best}
                | {"timeout": timeout, "store": store}
            )

    def _open(self, settings: Mapping[str, Any]) -> None:
        """Take the directory in the first process; the other processes have to see it."""

        def take():
            if not self.process:
                self._lock = _background.take_lock(self, is_first=True)
                self.home.tidy()
            return None, json.dumps([self._lock_text, secrets.token_hex(4)])

        self.everyone.compare("Checkpoints()", lambda: settings, self.timeout + 10)
        _, answers = self.together("Checkpoints()", take)
        lock_text, self.thread = json.loads(answers[0])

        def join():
            if self.process:
                if self.home.lock_text() != lock_text:
                    raise CheckpointError(
                        "path",
                        str(self.path),
                        got="another directory",
                        expected="that of process 0, on a disk that all processes share",
                    )
                self._lock = _background.take_lock(self, is_first=False)
            return None, ""

        self.together("Checkpoints()", join)

    def together(
        self, name: str, f: Callable[[], tuple[Any, str]], **how: Any
    ) -> tuple[Any, list[str]]:
        """`together` of all processes, with the run's timeout and kinds of errors."""
        kinds = (Damaged, CheckpointError, SaveError)
        options = {"timeout": self.timeout + 10, "kinds": kinds} | how
        return self.everyone.together(name, f, **options)

    @property
    def run_id(self) -> str:
        """A name of the run, the same whenever it is resumed; "" if it may not write."""
        return self._lock.run_id if self._lock is not None else ""

    @property
    def _lock_text(self) -> str:
        """The text of its lock, which names this start of the run; "" if it may not write."""
        return self._lock.text if self._lock is not None else ""

    def copied_run(self, log: Any) -> dict[str, str]:
        """`{"copied_run": its name}` if this directory and log were copied from another run."""
        run_id, folder = ("", "") if self._lock is None else self._lock.origin
        if not run_id or not os.path.exists(log):
            return {}
        twin = os.path.normpath(os.path.join(folder, os.path.relpath(log, self.path)))
        is_copied = os.path.exists(twin) and not os.path.samefile(twin, log)
        return {"copied_run": run_id} if is_copied else {}

    # --------------------------------------------------------------------------------------- saving

    def due(self, step: int) -> bool:
        """Whether your own loop is to save now; never without `every`, and not at step 0.

        True at the multiples of the steps of `every`, and if its duration has passed since the last
        save, or since these `Checkpoints` were made. Then the clock of process 0 counts for all
        processes, which wait for its answer. HyperparameterError if `every` has epochs alone.
        """
        has_clock = self.cadence.seconds < math.inf
        if self.cadence.epochs and not (has_clock or self.cadence.steps):
            raise HyperparameterError(
                "every", "due()", repr(self.every), "steps or a duration: only fit counts epochs"
            )
        own_answer = lambda: (None, "late" if self._timer.is_late() else "")
        answers = self.together("due()", own_answer)[1] if has_clock else [""]
        return step > 0 and (bool(answers[0]) or self.cadence.is_at_step(step))

    def save(
        self,
        state: PyTree,
        *,
        step: int | None = None,
        data: Any = None,
        history: Any = None,
        callbacks: Any = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Copy `state` to the host and write it in the background.

        Later changes and donations of `state` do not change what is saved. The step is the state's
        own, of the first TrainState in a tree of several; a tree without one needs `step=`. A step
        that is there already is replaced. `data`, `history`, `callbacks`: None, numbers, strings,
        bytes, arrays, torch's tensors on the CPU, and lists, tuples and dicts with these. Waits for
        the previous save, if that has not ended.

        Raises SaveError if the previous save failed (its step, path, cause; this state is not
        saved), CheckpointError for a step before the newest, WrongTypeError for leaves that cannot
        be saved, RowError for metrics without the metric of `keep_best`.
        """
        values: Any = {"data": data, "history": history, "callbacks": callbacks}
        self._save(state, step=step, metrics=metrics, **values)

    def _save(self, state, *, step, data, history, callbacks, metrics, script=None, calls=None):
        values = {"data": data, "history": history, "callbacks": callbacks, "script": script}
        self._job = _writing.start_save(self, state, step, values, metrics, calls)
        self._timer.restart()

    def _try_save(self, state, **values: Any) -> None:
        self.together("fit()", lambda: (_writing.try_save(self, state, values), ""))

    def poll(self) -> None:
        """Raise SaveError if a save that has ended failed. Does not wait for one that has not."""
        if self._job is not None and self._job.completion.is_set():
            self.wait()

    def wait(self, timeout: float | None = None) -> None:
        """Block until the save is on the disk; SaveError if it is not in `timeout` seconds."""
        if (job := self._job) is None:
            return
        limit = self.timeout if timeout is None else timeout
        title = f"save of step {job.step}"
        if not job.completion.wait(max(0.0, limit)):
            job.given_up = True
            raise SaveError(title, str(self.path), f"nothing after {limit:g} s", "a finished save")
        self._job, job.is_reported = None, True
        while self.home.deletion_warnings:
            warn(self.home.deletion_warnings.pop())
        if job.error is not None:
            is_our_error = isinstance(job.error, (Damaged, ProcessError))
            raise SaveError(
                title,
                str(self.path / str(job.step)),
                got=str(job.error).rstrip(".") if is_our_error else told(job.error),
                expected="a finished save",
                fix="Earlier checkpoints are as they were.",
            ) from job.error

    def close(self) -> None:
        """Wait, and let other processes write here. Raises SaveError if the last save failed."""
        try:
            self.wait()
        finally:
            _background.release(self)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except SaveError as failed:
            if error is None:
                raise
            error.add_note(f"Beside this: {failed}")

    def check_writer(self) -> None:
        """Raise CheckpointError if it is read-only or closed, or was made before a fork."""
        if self.read_only or self._lock is None or self._lock.pid != os.getpid():
            raise CheckpointError(
                "checkpoints",
                "save()",
                got="read_only=True" if self.read_only else "closed ones, or of another process",
                expected="the newest Checkpoints of the directory in this process",
            )

    # ------------------------------------------------------------------------------------ restoring

    @checks.naming_arguments
    def restore(
        self,
        like: PyTree,
        *,
        step: int | str | None = None,
        partial: Any = None,
        cast: bool = False,
        resume: str = "auto",
        params_only: bool = False,
    ) -> Restored:
        """The newest good checkpoint, as a state with the structure, dtypes and devices of `like`.

        `like` is the result of the same script's `setup`, or any tree of arrays or
        `jax.ShapeDtypeStruct`. Cuts and frozen flags of the saved state are built anew. A
        hyperparameter that was edited in the script since the run was set up is the script's, with
        a warning; all other hyperparameters keep their live values. Damaged checkpoints are skipped
        with a warning that says why. Nothing is deleted.

        Args:
          step: only this step; or "best", the best saved step by `keep_best`.
          partial: a pattern over the params: restore only these; everything else stays as in
            `like`.
          cast: let floats be restored in another float dtype, and integers that fit in another.
          resume: "auto" starts afresh (`step` None, `like` itself) if there is nothing at all;
            "must", and "auto" with `params_only`, raises then; "never" raises if there is a
            checkpoint.
          params_only: restore params and model state; `like`, a new state, keeps its optimizer. A
            rule's copies of params follow, as with `partial`. `like` may be a tree of params.

        Raises CheckpointError: nothing good among what is there (all of it listed), the step is not
        there, it is of another tree, shape, dtype or rule (up to ten differences, both sides), of
        another run or of a newer format.
        """
        from tsunax.checkpoints import _matching, reading

        checks.check_flags("restore()", cast=cast, params_only=params_only)
        options = {"step": step, "partial": partial, "cast": cast, "params_only": params_only}
        resume = "must" if resume == "auto" and params_only else resume
        request = _matching.RestoreRequest(like, partial, cast, params_only)
        read = lambda checkpoint_step: reading.read(
            self, checkpoint_step, request.plan, request.skips_optimizer
        )
        return reading.newest(self, like, step, resume, options, read)

    def steps(self) -> list[int]:
        """The steps with a complete checkpoint, in order; arrays are verified by `restore`."""
        return list(self.metrics())

    def metrics(self) -> dict[int, dict[str, float]]:
        """The `metrics` that were saved with each of `steps()`."""
        return {
            step: x.metrics
            for step, x in self.home.manifests().items()
            if step not in self.home.bad
        }

    def latest(self) -> int | None:
        """The newest of `steps()`, or None."""
        return max(self.steps(), default=None)

    def __repr__(self) -> str:
        steps = trees.listed([f"{step:,}" for step in reversed(self.home.steps())], 8)
        return f"Checkpoints({str(self.path)!r}, steps {steps or 'none'})"


def _home_of(path, store: str | None, timeout: float) -> CheckpointHome:
    where = "Checkpoints()"
    if store is not None:
        checks.check_choice(store, where, "store", ("files", "orbax"))
    if isinstance(path, str | os.PathLike) and str(path).startswith(BUCKETS):
        if store == "orbax":
            raise CheckpointError("store", where, "'orbax' in a bucket", "'files', or none")
        from tsunax.checkpoints._bucket_home import BucketHome, BucketPath

        return BucketHome(BucketPath.of(str(path), timeout), timeout)
    folder = durable_files.folder_of(path, "path", where)
    existing_store = store_of(folder)
    if None not in (store, existing_store) and store != existing_store:
        raise CheckpointError(
            "store",
            where,
            got=f"{store!r} in {folder}",
            expected=f"{existing_store!r}, as what is there",
            fix="Or give another path.",
        )
    if "orbax" not in (store, existing_store):
        return CheckpointHome(folder, timeout)
    from tsunax.checkpoints._orbax_home import OrbaxHome

    return OrbaxHome(folder, timeout)
