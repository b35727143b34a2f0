"""Checkpoints of a run: it starts from the newest, and makes new ones.

`fit` loads this file only if it has a checkpoint.
"""

import contextlib
import dataclasses
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from tsunax._core import PyTree, Step, StrPath, processes, trees
from tsunax._core.cadence import When
from tsunax.checkpoints import reading, script_settings
from tsunax.checkpoints.edits import (
    Edit,
    bounded,
    dump_edits,
    edit_of,
    parse_edits,
    plain_place,
)  # fmt: skip
from tsunax.checkpoints.saving import Checkpoints, Restored
from tsunax.errors import CheckpointError, told, warn
from tsunax.run.feed import Feed, check_is_lasting
from tsunax.run.history import History
from tsunax.run.info_columns import most_calls
from tsunax.run.options import Options
from tsunax.run.part import EachBoundary, Part
from tsunax.run.run import INTERRUPTED, Beginning, Run
from tsunax.state import Clocked, TrainState, own


def opened(checkpoint: StrPath | Checkpoints) -> contextlib.AbstractContextManager[Checkpoints]:
    """A context with the user's `Checkpoints`, or with new ones for a path, which it closes."""
    is_of_user = isinstance(checkpoint, Checkpoints)
    return contextlib.nullcontext(checkpoint) if is_of_user else Checkpoints(checkpoint)


@dataclass(frozen=True)
class Restart:
    """The newest checkpoint of a run, if there is one, and the script that continues with it."""

    saver: Checkpoints
    restored: Restored
    # whether the run starts from the state given to `fit`, which is as far as the checkpoint or
    # further
    is_in_hand: bool
    script: dict[str, Any]  # see `checkpoints.script_settings.script_of`
    like: PyTree  # the state of the script

    @classmethod
    def load(
        cls,
        saver: Checkpoints,
        step: Step,
        state: PyTree,
        data: Iterable[PyTree] | None,
        options: Options,
    ) -> "Restart":
        with options.clock("checkpoint"):
            restored = reading.resumed(saver, state, options.resume)
        is_in_hand = restored.step is not None and restored.state is state
        script = script_settings.script_of(step, state, data, options.extra)
        if is_in_hand and options.history is not None:
            restored = dataclasses.replace(restored, history=None)
        return cls(saver, restored, is_in_hand=is_in_hand, script=script, like=state)

    @property
    def step(self) -> int | None:
        """The step of the checkpoint; None if there is none."""
        return self.restored.step

    @property
    def saved_script(self) -> Mapping[str, Any]:
        """Facts about the script that made the checkpoint, and about the end of its run."""
        return self.restored.script if isinstance(self.restored.script, dict) else {}

    @property
    def is_used(self) -> bool:
        """Whether the run continues from the checkpoint, and not from the user's state."""
        return self.step is not None and not self.is_in_hand

    def foreign_edit(self) -> tuple[str, int] | None:
        """`(source, calls)` of a change of the state since the checkpoint that no callback made."""
        if self.is_in_hand:
            clocks = reading.contents(self.saver, self.step or 0).state
            saved_calls = max(int(np.max(clock[..., 1])) for clock in clocks)
            return "the state given to fit", saved_calls + 1
        if self.restored.is_edited and isinstance(self.restored.state, Clocked):
            return "numbers that the script has edited", most_calls(self.restored.state)
        return None

    def parts_of_fit(self) -> tuple[History | None, dict[str, Any]]:
        """The history and the memory of callbacks. CheckpointError if your own loop saved them."""
        restored = self.restored
        try:
            data_place = restored.data
            if data_place is not None:  # raises if `fit` did not save it
                _ = operator.index(data_place["epoch"]), operator.index(data_place["position"])
            callbacks = {} if restored.callbacks is None else restored.callbacks
            memory = {key: {**x} for key, x in callbacks.items()}
            history = None if restored.history is None else History.of(restored.history)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            place = str(self.saver.path / str(restored.step))
            fix = "Restore the state with Checkpoints.restore, and give fit another path."
            parts = "checkpoint of your own loop", place, told(error), "what fit saves", fix
            raise CheckpointError(*parts) from error
        return history, memory

    def beginning(self, memory: dict[str, Any], start: int, options: Options) -> Beginning:
        """The position and the values that the run starts from."""
        is_of_fit = self.is_used and self.step == start and self.restored.script is not None
        script: Mapping[str, Any] = self.saved_script if is_of_fit else {"has_ended": True}
        # `_script_of` saved the goal and the callbacks of the call of `fit`, and why it stopped.
        *call, reason = script.get("stop", (None, None, ""))
        # a script with another goal or other callbacks trains on
        is_same_call = call == [str(options.goal), options.names]
        return Beginning(
            memory,
            is_resumed=self.step == start,
            is_of_checkpoint=self.is_used,
            has_ended=bool(script.get("has_ended", False)),
            has_open_row=bool(script.get("has_open_row", False)),
            stopped=reason if is_same_call else "",
        )

    def warn_of_edits(self, start: int) -> None:
        """Warn of settings that the script has changed since the checkpoint."""
        if self.is_used:
            saved_settings = self.saved_script.get("settings")
            for note in script_settings.edits(saved_settings, self.script["settings"]):
                warn(f"fit(): resumed from step {start} in {self.saver.path}, but {note}")


def _with_own_numbers(like: PyTree) -> PyTree:
    """The script's state as a template, for a rewind after the run has consumed that state.

    Restoring a checkpoint takes the shapes of its arrays, which consumed arrays keep, and the
    values of its scalars, live numbers and frozen flags, which are copied here.
    """
    is_state = lambda x: isinstance(x, TrainState)
    own_scalar = lambda x: own(x) if trees.is_array(x) and not x.ndim else x

    def copied(s: TrainState) -> TrainState:
        numbers, frozen = jax.tree.map(own, (s.numbers, s.frozen))
        return dataclasses.replace(jax.tree.map(own_scalar, s), numbers=numbers, frozen=frozen)

    return jax.tree.map(lambda x: copied(x) if is_state(x) else x, like, is_leaf=is_state)


def _calls_of(run: Run) -> int:
    return most_calls(run.state) if isinstance(run.state, Clocked) else run.step


def _key_of(run: Run, place: Mapping[str, Any]) -> tuple[int, int, int]:
    """The step, the epoch and the position of a save."""
    return run.step, place["epoch"], place["position"]


class Saving(EachBoundary):
    """Saves a run: as `every` says, at the best values of a metric, and at the end."""

    def __init__(self, options: Options, restart: Restart, memory: dict[str, Any]) -> None:
        self.options: Options = options
        self.saver: Checkpoints = restart.saver
        self.memory: dict[str, Any] = memory
        # By default a run without epochs, or with long ones, loses ten minutes.
        every = self.saver.every
        self.every: When = ("epoch", "10 minutes") if every is None else every
        script, saved_script = restart.script, restart.saved_script
        if restart.is_in_hand:
            # Keep facts of the state that the run began with: the script makes it at each start.
            script = script | {k: saved_script[k] for k in ("calls", "states") if k in saved_script}
        # the branch that the run is, see `timelines`, and the place of the data at its beginning
        kept_names = [name for name in ("parent", "first_place") if name in saved_script]
        self.script: dict[str, Any] = script | {name: saved_script[name] for name in kept_names}
        self.is_new: bool = restart.step is None
        self.is_resumed: bool = restart.is_used
        # whether the last call before this run made the step of the state, so was not rejected;
        # False, because unknown, for a state in hand
        was_fresh = bool(saved_script.get("is_fresh", restart.step is None))
        self.was_fresh: bool = was_fresh and not restart.is_in_hand
        self.saved: Any = None  # see `_key_of`
        self.like: PyTree = _with_own_numbers(restart.like)
        self.edits: list[Edit] = parse_edits(saved_script.get("edits"))
        # `(source, calls)` of a change of the state before this run that no callback made
        self.foreign_edit: tuple[str, int] | None = restart.foreign_edit()
        is_edited = restart.restored.is_edited or bool(saved_script.get("is_script_edited"))
        self.script |= {"is_script_edited": is_edited}
        self.extra: dict[str, Any] = dict(options.extra)
        # Changes that no record repeats, of "extra" or "data": the step and the calls before, and
        # the step at which the change was found.
        self.untold_changes: dict[str, list[int]] = dict(saved_script.get("untold_changes", {}))
        self.last_look: tuple[int, int] = 0, 0  # step and calls when the data were looked at
        self.rows: str | None = None  # the hash of a few rows then

    def _prepare(self, run: Run, feed: Feed) -> None:
        """Raise the errors of the first save now; warn of data that cannot be set to a place."""
        with self.options.clock("data"):
            place, is_resumable = feed.try_place()
        with self.options.clock("checkpoint"):
            self.saver._try_save(
                run.state,
                data=place,
                history=run.history.plain(),
                callbacks=self.memory,
                script=self.script,
            )
        check_is_lasting(place)
        if not (is_resumable or self.options.fast_forward):
            text = (
                "fit(): the position of these data cannot be saved. To resume, this run needs "
                "fast_forward=True, which reads all earlier batches again, or a loader with "
                "get_state/set_state or state_dict/load_state_dict."
            )
            if feed.source.skips_epochs:
                text += (
                    f" Now epoch {feed.epoch} began anew, without the epochs before it: its "
                    "batches are others if the order depends on these."
                )
            warn(text)

    def begin(self, run: Run) -> None:
        self._look_at_data(run, is_first=True)
        place = run.feed.place()
        if self.is_resumed:
            self.saved = _key_of(run, place)
        if self.is_new:
            self.script |= {"first_place": plain_place(place)}

    def at(self, run: Run, events: list[str]) -> None:
        """Save at the end, for a change that no resume repeats, and if a new step is due or best.

        A rewind saves another checkpoint, from which the run begins again.
        """
        self.saver.poll()
        is_end, must_save = "end" in events, self._record_edits(run, events)
        if run.rewinding is not None and not run.stopped:
            if not is_end:
                self._go_back(run)
                return
            warn(f"run.rewind(): too late at the end of the run, step {run.step}.")
        is_requested = "save" in events or Part.due(self, run, events)
        # A run that begins at one of the steps of `every` saves there, too.
        is_due = is_requested or self.cadence.is_at_step(run.step)
        place = run.feed.place()
        is_new = self.saved != _key_of(run, place)
        # the end is saved again, because evaluation and callbacks add to the save at this step
        if is_end or must_save or (is_new and (is_due or self._is_best(run))):
            self._save(run, place, is_end)

    def _go_back(self, run: Run) -> None:
        """Save the checkpoint of a rewind, from which the run begins again."""
        from tsunax.run.rewinding import go_back

        with self.options.clock("checkpoint"):
            self._look_at_data(run)
            checkpoint = go_back(self, run)
        run.restart = Restart(
            self.saver, checkpoint, is_in_hand=False, script=self.script, like=self.like
        )

    def _save(self, run: Run, place: dict[str, Any], is_end: bool) -> None:
        """Save the state, the place of the data, rows, memory of callbacks and facts of the run."""
        self.saved = _key_of(run, place)
        with self.options.clock("checkpoint"):
            self._look_at_data(run)
            run.rows.sync()
            self.saver._save(
                run.state,
                step=run.step,
                data=place,
                history=run.rows.saved_history(),
                callbacks=self.memory,
                metrics=run.rows.numbers_at(run.step),
                script=self._script_of(run, is_end),
            )
        for timer in self.timers:
            timer.restart()

    def read(self, run: Run, has_row: bool) -> None:
        self.saver.poll()

    def end(self, run: Run, error: BaseException | None) -> None:
        if error is None:
            # Wait here, where `fit` handles signals: later, a second SIGTERM would cut the save.
            with self.options.clock("checkpoint"):
                self.saver.wait()

    def _record_edits(self, run: Run, events: list[str]) -> bool:
        """Record the changes of callbacks. Returns whether the state has to be saved for one."""
        if any(x is not self.extra.get(name) for name, x in self.options.extra.items()):
            self.untold_changes.setdefault("extra", [run.step, _calls_of(run), run.step])
        if not isinstance(run.state, Clocked):
            return False
        calls, must_save = most_calls(run.state), False
        if self.foreign_edit is not None and "start" in events:
            source, first_call = self.foreign_edit
            self.edits.append(Edit(run.step, min(first_call, calls), source, None, {}))
            must_save = True
        if not run.changed_by:
            return must_save
        source, old_state = ", ".join(run.changed_by), run.unchanged_state
        edit = edit_of(old_state, run.state, run.step, calls, source)
        if edit is None:
            return must_save
        if edit.values is not None and not edit.is_exact(old_state, run.state, self.like):
            edit = dataclasses.replace(edit, values=None)
        self.edits = bounded([*self.edits, edit])
        # No run repeats a command, so its edit is saved at once. `Answers` waits for the save.
        return must_save or self.edits[-1].values is None or "save" in events

    def _look_at_data(self, run: Run, is_first: bool = False) -> None:
        """Note a change of the data in place, because a replay reads the arrays of today."""
        old_rows, self.rows = self.rows, script_settings.hash_of_rows(run.feed.source.data)
        if self.rows != old_rows and not is_first:
            self.untold_changes.setdefault("data", [*self.last_look, run.step])
        self.last_look = run.step, _calls_of(run)

    def _script_of(self, run: Run, is_end: bool) -> dict[str, Any]:
        """Facts about the script and the run, for the call of `fit` that continues the run."""
        script = self.script | {
            # The end of an interrupted run has no evaluation, also if a callback had stopped it.
            "has_ended": is_end and not run.interrupted,
            "has_open_row": run.rows.is_held_back,
            "is_fresh": self.was_fresh if run.has_made_step is None else run.has_made_step,
            "is_looped": self.options.steps_per_call is not None,
            "edits": dump_edits(self.edits),
            "untold_changes": self.untold_changes,
        }
        if run.stopped not in ("", INTERRUPTED):
            script["stop"] = [str(self.options.goal), self.options.names, run.stopped]
        return script

    def _is_best(self, run: Run) -> bool:
        """Whether the value of `keep_best` at this step is among the best. It is saved now only."""
        best = self.saver.keep_best
        if best is None or best.metric in run.row_names:
            return False
        # callbacks of each process may log other numbers, and all processes save together
        is_shared = processes.current().sees_everything or best.metric in run.evaluated_names
        newest_step, _ = run.history.newest(best.metric) or (-1, 0.0)
        if not is_shared or newest_step != run.step:
            return False
        pairs = zip(*run.history.series(best.metric), strict=True)
        return run.step in best.of({int(i): {best.metric: x} for i, x in pairs if np.isfinite(x)})
