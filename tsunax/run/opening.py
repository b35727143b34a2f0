"""How a run of `fit` starts: checks, the newest checkpoint, and the settings that loggers get."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import os
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from tsunax._core import PyTree, Step, StrPath, checks, trees
from tsunax.checkpoints import script_settings
from tsunax.checkpoints.saving import Checkpoints, Restored
from tsunax.data import Batches
from tsunax.errors import CheckpointError, WrongTypeError, warn
from tsunax.hyper import hyperparams
from tsunax.microbatches import indivisible
from tsunax.program import TrainStep
from tsunax.rules.accumulation import any_emitted
from tsunax.run import progress
from tsunax.run.feed import innermost
from tsunax.run.fitting import Fit
from tsunax.run.history import History
from tsunax.run.info_columns import logged_step
from tsunax.run.options import Options
from tsunax.state import TrainState, check_values, own
from tsunax.states import training_states


def opened(checkpoint: StrPath | Checkpoints) -> contextlib.AbstractContextManager[Checkpoints]:
    """A context with the `Checkpoints` that a user gave, or those of a path, which end with it."""
    if isinstance(checkpoint, Checkpoints):
        return contextlib.nullcontext(checkpoint)
    if isinstance(checkpoint, str | os.PathLike):
        return Checkpoints(checkpoint)
    got, expected = trees.describe(checkpoint), "a path or ts.Checkpoints(path)"
    raise WrongTypeError("checkpoint", "fit()", got, expected)


def begin(step: Step, state: PyTree, data: Iterable[PyTree] | None, options: Options) -> Fit:
    """The run, where its newest checkpoint is if there is one."""
    checks.check_not_tracing("fit()", "There call the step: jax.lax.scan(step, state, batches).")
    saver, history = options.saver, options.history
    with options.clock("checkpoint"):
        restored = Restored(state) if saver is None else saver.resumed(state, options.resume)
    is_in_hand = restored.step is not None and restored.state is state
    before = restored.script if isinstance(restored.script, dict) else {}
    script = {} if saver is None else script_settings.script_of(step, state, data, options.extra)
    state = restored.state
    for member in training_states(state).values():
        check_values(member, "fit()")
    if not isinstance(state, TrainState):
        state = jax.tree.map(own, state)  # the loop consumes it: a promise of a TrainState alone
    start = logged_step(state, restored.step or 0)
    if is_in_hand and history is not None:
        restored = dataclasses.replace(restored, history=None)
    saved_history, memory = _parts_of_fit(restored, saver)
    history = next((x for x in (saved_history, history) if x is not None), History())
    options.clock.go_on(history.time)
    fitting = Fit(step, state, data, options, history, memory, start)
    fitting.boundaries.script, fitting.is_resumed = script, restored.step == start
    if fitting.is_resumed and not is_in_hand and restored.script is not None:
        fitting.has_ended = bool(before.get("has_ended", False))
        fitting.has_open_row = bool(before.get("has_open_row", False))
        match before.get("stop"):
            case [goal, names, reason] if [goal, names] == [str(options.goal), options.names]:
                fitting.run.stop(reason)
            case _:  # the run did not stop; or the script has another goal or other callbacks
                pass
    if restored.step is not None:
        with options.clock("data"):
            fitting.feed.go_to(restored.data, options.fast_forward)
    _check_last_batch(fitting, innermost(data))
    fitting.compare()
    is_over = fitting.has_nothing_to_do()
    if restored.step is not None and not is_over:
        history.mark("restart", start)
    # the run began with another state, which the script gives when it is started again
    if is_in_hand:
        began = {name: before[name] for name in ("calls", "states") if name in before}
        fitting.boundaries.script = {**script, **began}
    elif saver is not None and restored.step is not None:
        fitting.boundaries.saved = start, fitting.feed.place()
        if not is_over:
            for note in script_settings.edits(before.get("settings"), script["settings"]):
                warn(f"fit(): resumed from step {start} in {saver.path}, but {note}")
    total = options.goal.steps or fitting.feed.steps_to(options.goal.epochs or 0, start)
    if options.goal.epochs and any_emitted(state) is not None:
        total = None  # a step is several calls, and it is not known which of them are left out
    everyone = fitting.alike.everyone
    bar = progress.progress(everyone.is_first and options.progress, total, start)
    bar.seconds = options.clock.seconds
    fitting.boundaries.bar, fitting.run.note = bar, bar.note
    if saver is not None and restored.step is not None:
        bar.note(f"resumed from {saver.path}, step {start}")
    return fitting


def _parts_of_fit(restored: Restored, saver: Any) -> tuple[History | None, dict[str, Any]]:
    """The history and the memory of callbacks; CheckpointError for values of one's own loop."""
    data, name = restored.data, "data"
    try:
        if data is not None:
            _ = operator.index(data["epoch"]), operator.index(data["position"])
        name = "callbacks"
        callbacks = {} if restored.callbacks is None else restored.callbacks
        memory = {key: {**x} for key, x in callbacks.items()}
        name, saved = "history", restored.history
        return None if saved is None else History.of(saved), memory
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        place, got = saver.path / str(restored.step), trees.describe(getattr(restored, name))
        fix = "Restore the state with Checkpoints.restore, and give fit another path."
        parts = f"{name} of a checkpoint", str(place), f"{got:.200}", "what fit saves", fix
        raise CheckpointError(*parts) from error


def _check_last_batch(fitting: Fit, data: Any) -> None:
    """Raise now for the short last batch of an epoch that the step cannot cut, not when it comes.

    LossError if the run comes so far, as the step itself would raise.
    """
    step, goal, feed, start = fitting.step, fitting.options.goal, fitting.feed, fitting.run.step
    sees_all = fitting.alike.everyone.sees_everything
    if not (isinstance(step, TrainStep) and type(data) is Batches and sees_all):
        return
    ends: Any = feed.steps_to(feed.epoch + 1, start)
    comes = not goal.reached(start, feed.epoch) and ends <= (goal.steps or ends)
    is_the_one = data.tail_rows % step.accumulate and not data.share % step.accumulate
    if step.cuts_evenly and comes and is_the_one:
        which = f", the last batch of an epoch of {len(data)}"
        raise indivisible(data.tail_rows, step.accumulate, which)


def settings(fitting: Fit, has_closing_row: bool, log: Any) -> dict[str, Any]:
    """What a logger is told at the start; for `has_closing_row` see `RowLog.reopen`."""
    step, state, start = fitting.step, fitting.run.state, fitting.run.step
    found = {"goal": str(fitting.options.goal), "start": start}
    found |= {"jax": jax.__version__, "devices": jax.device_count()}
    saver = fitting.options.saver
    if saver is not None and saver.run_id:
        # rows from there on are of a process that ended before it saved them; and the row that only
        # an end has. A row of step 0 is made again by a run that begins
        found |= {"run_id": saver.run_id, "rows_from": start + (start > 0 and not has_closing_row)}
        found |= saver.copied_run(log)
    names = ("accumulate", "on_nonfinite")
    found |= {name: getattr(step, name) for name in names if hasattr(step, name)}
    for at, s in training_states(state).items():
        found |= {f"start/{at}{name}": x for name, x in hyperparams(s).items()}
        found[f"{at}parameters"] = sum(np.size(x) for x in jax.tree.leaves(s.params))
        if s.plan.precision is not None:
            found[f"{at}precision"] = s.plan.precision.compute
    return found


@contextlib.contextmanager
def told(fitting: Fit, has_closing_row: bool) -> Iterator[None]:
    """Loggers told of the run; after an error they get its last rows, and are closed."""
    with contextlib.ExitStack() as stack:
        for logger in fitting.options.loggers:
            if hasattr(logger, "close"):
                stack.callback(logger.close)
            if hasattr(logger, "start"):
                logger.start(settings(fitting, has_closing_row, getattr(logger, "path", "")))
        try:
            yield
        except BaseException as error:
            fitting.rescue(error)
            raise


def nothing_to_do(fitting: Fit) -> str:
    """What is said of a goal that a run has reached before its first step."""
    run, goal, saver = fitting.run, fitting.options.goal, fitting.options.saver
    if saver is not None and run.stopped:
        fix = "to train on, change the callbacks: some remember why they stopped a run"
        return f"fit(): the run in {saver.path} stopped at step {run.step}, {run.stopped}; {fix}"
    at = f"epoch {fitting.feed.epoch}" if goal.epochs else f"step {run.step}"
    why = "state.step and data.get_state() count on"
    if saver is not None and fitting.boundaries.saved is not None:
        why = f"so says the checkpoint in {saver.path}"
    reached = f"{goal} counts from the beginning of training, and the run is at {at} already"
    return f"fit(): {reached}: nothing to do; {why}"
