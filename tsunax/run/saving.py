"""Checkpoints of a run: the one that it starts from, and those that it makes.

`fit` loads this file only if it has a checkpoint.
"""

import contextlib
import dataclasses
import operator
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tsunax._core import PyTree, Step, StrPath, processes, trees
from tsunax.checkpoints import script_settings
from tsunax.checkpoints.saving import Checkpoints, Restored
from tsunax.errors import CheckpointError, WrongTypeError, warn
from tsunax.run.fitting import Beginning
from tsunax.run.history import History
from tsunax.run.options import Options
from tsunax.run.part import Part
from tsunax.run.run import INTERRUPTED, Run


def opened(checkpoint: StrPath | Checkpoints) -> contextlib.AbstractContextManager[Checkpoints]:
    """A context with the `Checkpoints` that a user gave, or those of a path, which end with it."""
    if isinstance(checkpoint, Checkpoints):
        return contextlib.nullcontext(checkpoint)
    if isinstance(checkpoint, str | os.PathLike):
        return Checkpoints(checkpoint)
    got, expected = trees.describe(checkpoint), "a path or ts.Checkpoints(path)"
    raise WrongTypeError("checkpoint", "fit()", got, expected)


@dataclass(frozen=True)
class Restart:
    """The newest checkpoint of a run, if there is one, and the script that goes on with it."""

    saver: Checkpoints
    restored: Restored
    is_in_hand: bool  # whether the state given is further than the checkpoint
    script: dict[str, Any]  # see `checkpoints.script_settings.script_of`

    @classmethod
    def of(
        cls,
        saver: Checkpoints,
        step: Step,
        state: PyTree,
        data: Iterable[PyTree] | None,
        options: Options,
    ) -> "Restart":
        with options.clock("checkpoint"):
            restored = saver.resumed(state, options.resume)
        is_in_hand = restored.step is not None and restored.state is state
        script = script_settings.script_of(step, state, data, options.extra)
        if is_in_hand and options.history is not None:
            restored = dataclasses.replace(restored, history=None)
        return cls(saver, restored, is_in_hand, script)

    @property
    def step(self) -> int | None:
        """The step of the checkpoint; None if there is none."""
        return self.restored.step

    @property
    def before(self) -> Mapping[str, Any]:
        """What the checkpoint says of the script that made it, and of the end of its run."""
        return self.restored.script if isinstance(self.restored.script, dict) else {}

    @property
    def is_whole(self) -> bool:
        """Whether the run goes on from the checkpoint, and `fit` made it."""
        return not self.is_in_hand and self.restored.script is not None

    def parts_of_fit(self) -> tuple[History | None, dict[str, Any]]:
        """The history, the memory of callbacks; CheckpointError for values of one's own loop."""
        restored, data, name = self.restored, self.restored.data, "data"
        try:
            if data is not None:
                _ = operator.index(data["epoch"]), operator.index(data["position"])
            name = "callbacks"
            callbacks = {} if restored.callbacks is None else restored.callbacks
            memory = {key: {**x} for key, x in callbacks.items()}
            name, saved = "history", restored.history
            return None if saved is None else History.of(saved), memory
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            place = self.saver.path / str(restored.step)
            got = trees.describe(getattr(restored, name))
            fix = "Restore the state with Checkpoints.restore, and give fit another path."
            parts = f"{name} of a checkpoint", str(place), f"{got:.200}", "what fit saves", fix
            raise CheckpointError(*parts) from error

    def beginning(
        self, history: History, memory: dict[str, Any], start: int, options: Options
    ) -> Beginning:
        """What the run starts from."""
        is_resumed = self.step == start
        is_of_checkpoint = self.step is not None and not self.is_in_hand
        if not (is_resumed and self.is_whole):
            return Beginning(history, memory, is_resumed, is_of_checkpoint)
        script = self.before
        return Beginning(
            history,
            memory,
            is_resumed,
            is_of_checkpoint,
            has_ended=bool(script.get("has_ended", False)),
            has_open_row=bool(script.get("has_open_row", False)),
            stopped=self._stop_reason(options),
        )

    def _stop_reason(self, options: Options) -> str:
        """Why the run stopped, if the same call is made again: same goal, same callbacks."""
        match self.before.get("stop"):
            case [goal, names, reason] if [goal, names] == [str(options.goal), options.names]:
                return reason
            case _:  # the run did not stop; or the script has another goal or other callbacks
                return ""

    def warn_of_edits(self, start: int) -> None:
        """Warn of settings that the script has changed since the checkpoint."""
        if self.step is not None and not self.is_in_hand:
            for note in script_settings.edits(self.before.get("settings"), self.script["settings"]):
                warn(f"fit(): resumed from step {start} in {self.saver.path}, but {note}")


class Saving(Part):
    """Saves a run: every so many steps or every epoch, where a metric is best, and at the end."""

    def __init__(self, options: Options, restart: Restart, memory: dict[str, Any]) -> None:
        self.options: Options = options
        self.saver: Checkpoints = restart.saver
        self.memory: dict[str, Any] = memory
        self.every: float = self.saver.every or float("inf")
        self.epochs: bool = not self.saver.every  # where nobody said when
        script, before = restart.script, restart.before
        if restart.is_in_hand:
            # the run began with another state, which the script gives when it is started again
            script = script | {k: before[k] for k in ("calls", "states") if k in before}
        self.script: dict[str, Any] = script
        self.is_resumed: bool = restart.step is not None and not restart.is_in_hand
        self.saved: Any = None  # the step and the place of the data when it was saved last

    def begin(self, run: Run) -> None:
        if self.is_resumed:
            self.saved = run.step, run.place()

    def due(self, run: Run, events: Any) -> bool:
        return True

    def at(self, run: Run, events: list[str]) -> None:
        saver, is_end = self.saver, "end" in events
        saver.poll()
        due = saver.due(run.step) or ("epoch" in events and self.epochs)
        # the end adds its evaluation, and what callbacks do there, to what this step has
        is_new = self.saved != (run.step, run.place())
        if is_end or (is_new and (due or self._is_best(run))):
            with self.options.clock("checkpoint"):
                place = run.place()
                self.saved = run.step, place
                run.rows.sync()
                end = self._ending(run, is_end) | {"has_open_row": run.rows.is_open}
                saver._save(
                    run.state,
                    run.step,
                    place,
                    run.history.plain(),
                    self.memory,
                    run.rows.numbers_at(run.step),
                    self.script | end,
                )

    def read(self, run: Run, has_row: bool) -> None:
        self.saver.poll()

    def end(self, run: Run, error: BaseException | None) -> None:
        if error is None:
            # a second SIGTERM would end the process with the last save half written
            with self.options.clock("checkpoint"):
                self.saver.wait()

    def _ending(self, run: Run, is_end: bool) -> dict[str, Any]:
        """What a checkpoint says of the end of its run, for the same call of `fit` after it."""
        if run.stopped == INTERRUPTED:
            return {}
        stop = [str(self.options.goal), self.options.names, run.stopped]
        return {"has_ended": is_end} | ({"stop": stop} if run.stopped else {})

    def _is_best(self, run: Run) -> bool:
        """Whether `keep_best` got one of its best values at this step, which no later save has."""
        best = self.saver.keep_best
        if best is None or best.metric in run.row_names:
            return False
        # what callbacks log may differ between processes, and all of them save together
        is_alike = processes.current().sees_everything or best.metric in run.evaluated_names
        if not is_alike or (run.history.newest(best.metric) or (-1, 0.0))[0] != run.step:
            return False
        known = zip(*run.history.series(best.metric), strict=True)
        return run.step in best.of({int(at): {best.metric: x} for at, x in known if np.isfinite(x)})
