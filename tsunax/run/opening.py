"""How a run of `fit` starts: checks, the newest checkpoint, and the settings that loggers get."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from tsunax._core import PyTree, Step, StrPath, checks, trees
from tsunax.checkpoints import script_settings
from tsunax.checkpoints.saving import Checkpoints, Restored
from tsunax.errors import WrongTypeError, warn
from tsunax.hyper import hyperparams
from tsunax.run import progress as _progress
from tsunax.run.fitting import Fit
from tsunax.run.history import History
from tsunax.run.info_columns import logged_step
from tsunax.run.options import Options, check_step
from tsunax.state import TrainState, own
from tsunax.states import training_states


def opened(checkpoint: StrPath | Checkpoints) -> contextlib.AbstractContextManager[Checkpoints]:
    """A context with the `Checkpoints` that a user gave, or those of a path, which end with it."""
    if isinstance(checkpoint, Checkpoints):
        return contextlib.nullcontext(checkpoint)
    if isinstance(checkpoint, str | os.PathLike):
        return Checkpoints(checkpoint)
    got, expected = trees.describe(checkpoint), "a path or ts.Checkpoints(path)"
    raise WrongTypeError("checkpoint", "fit()", got, expected)


def begin(
    step: Step,
    state: PyTree,
    data: Iterable[PyTree] | None,
    options: Options,
    progress: Any,
    history: History | None,
    resume: str,
    fast_forward: bool,
) -> Fit:
    """The run, where its newest checkpoint is if there is one."""
    restored = Restored(state) if options.saver is None else options.saver.resumed(state, resume)
    is_in_hand = restored.step is not None and restored.state is state
    before = restored.script if isinstance(restored.script, dict) else {}
    script = (
        {} if options.saver is None else script_settings.script_of(step, state, data, options.extra)
    )
    state = restored.state
    if not isinstance(state, TrainState):
        state = jax.tree.map(own, state)  # the loop consumes it: a promise of a TrainState alone
    start = logged_step(state, restored.step or 0)
    if restored.history is not None and not (is_in_hand and history is not None):
        history = History.of(restored.history)
    history = History() if history is None else history
    fitting = Fit(step, state, data, options, history, dict(restored.callbacks or {}), start)
    fitting.boundaries.script, fitting.is_resumed = script, restored.step == start
    if restored.step is not None:
        fitting.feed.go_to(restored.data, fast_forward)
        history.mark("restart", start)
    # the run began with another state, which the script gives when it is started again
    if is_in_hand:
        began = {name: before[name] for name in ("calls", "states") if name in before}
        fitting.boundaries.script = {**script, **began}
    elif options.saver is not None and restored.step is not None:
        fitting.boundaries.saved = start, fitting.feed.place()
        if not options.goal.reached(start, fitting.feed.epoch):
            for note in script_settings.edits(before.get("settings"), script["settings"]):
                warn(f"fit(): resumed from step {start} in {options.saver.path}, but {note}")
    total = options.goal.steps or fitting.feed.steps_to(options.goal.epochs or 0, start)
    shown = progress if jax.process_index() == 0 else False
    fitting.show_on(_progress.progress(shown, total, start))
    return fitting


def check_fit(
    step: Step,
    state: PyTree,
    dry_run: object,
    resume: object,
    checkpoint: StrPath | Checkpoints | None,
    history: object,
) -> None:
    where = "fit()"
    checks.check_flags(where, dry_run=dry_run)
    if not checks.is_one_of(resume, ("auto", "must", "never")):
        raise WrongTypeError("resume", where, trees.describe(resume), "'auto', 'must' or 'never'")
    if resume == "must" and checkpoint is None:
        got, expected = "'must' without checkpoint=", "a path to resume from"
        raise WrongTypeError("resume", where, got, expected)
    if history is not None and not isinstance(history, History):
        expected = "a ts.loop.History, to go on with"
        raise WrongTypeError("history", where, trees.describe(history), expected)
    check_step(where, step, state)


def settings(fitting: Fit, closed: int | None) -> dict[str, Any]:
    """What a logger is told at the start: the settings of the run, and the hyperparameters.

    `closed` is the step of a row that the history has no longer, see `History.reopen`.
    """
    step, state, start = fitting.step, fitting.run.state, fitting.run.step
    found = {"goal": str(fitting.options.goal), "start": start}
    found |= {"jax": jax.__version__, "devices": jax.device_count()}
    if fitting.is_resumed:  # a log's rows from there on are not those of an uninterrupted run
        found["rows_from"] = start + (closed != start)
    names = ("accumulate", "on_nonfinite")
    found |= {name: getattr(step, name) for name in names if hasattr(step, name)}
    for at, s in training_states(state).items():
        found |= {f"start/{at}{name}": x for name, x in hyperparams(s).items()}
        found[f"{at}parameters"] = sum(np.size(x) for x in jax.tree.leaves(s.params))
        if s.plan.precision is not None:
            found[f"{at}precision"] = s.plan.precision.compute
    return found


@contextlib.contextmanager
def told(fitting: Fit, closed: int | None) -> Iterator[None]:
    """Loggers told of the run, and closed whatever happens."""
    with contextlib.ExitStack() as stack:
        for logger in fitting.options.loggers:
            if hasattr(logger, "close"):
                stack.callback(logger.close)
            if hasattr(logger, "start"):
                logger.start(settings(fitting, closed))
        yield


def nothing_to_do(fitting: Fit) -> str:
    """What is said of a goal that a run has reached before its first step."""
    run, goal, saver = fitting.run, fitting.options.goal, fitting.options.saver
    why = "state.step counts on: ask for a later one, or give a new state"
    if goal.epochs:
        why = "the data count on, data.get_state(): ask for a later one, or set_state() them back"
    if saver is not None and fitting.boundaries.saved is not None:
        why = f"so says the checkpoint in {saver.path}: ask for a later one, or give another path"
    at = f"epoch {fitting.feed.epoch}" if goal.epochs else f"step {run.step}"
    where = f"{goal} is a place to reach, and the run is at {at} already"
    return f"fit(): {where}: nothing to do; {why}"
