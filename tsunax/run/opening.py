"""How a run of `fit` starts: checks, the newest checkpoint, and the parts that it has."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from tsunax import guard
from tsunax._core import PyTree, Step, checks, processes
from tsunax._core.cadence import Cadence
from tsunax._core.interrupts import SAVING, Interrupt
from tsunax.data.positions import innermost
from tsunax.errors import warn
from tsunax.program import TrainStep
from tsunax.run.chunks import NO_LIMIT, Limits
from tsunax.run.feed import Feed
from tsunax.run.fitting import Fit
from tsunax.run.history import History
from tsunax.run.info_columns import logged_step
from tsunax.run.options import Options
from tsunax.run.part import Part
from tsunax.run.run import Beginning, Run
from tsunax.state import TrainState, check_values, own
from tsunax.states import training_states


def begin(
    step: Step,
    state: PyTree,
    data: Iterable[PyTree] | None,
    options: Options,
    saver: Any,
    rewound: Fit | None = None,
) -> Fit:
    """The run, at its newest checkpoint if there is one; `saver` is `Checkpoints` or None.

    `rewound` is the run before a rewind, which begins again at the checkpoint of the rewind.
    """
    checks.check_not_tracing("fit()", "There call the step: jax.lax.scan(step, state, batches).")
    restart = (
        _restart(step, state, data, options, saver) if rewound is None else rewound.run.restart
    )
    if restart is not None:
        state = restart.restored.state
    for member in training_states(state).values():
        check_values(member, "fit()")
    if not isinstance(state, TrainState):
        state = jax.tree.map(own, state)  # the loop donates it, which only a TrainState allows
    saved_step = None if restart is None else restart.step
    start = logged_step(state, saved_step or 0)
    history, memory = _history_of(options, restart, rewound is not None)
    beginning = Beginning(memory)
    if restart is not None:
        beginning = restart.beginning(memory, start, options)
    agreement = processes.current().agreement("fit()", state, innermost(data))
    parts, saving = _parts(options, restart, memory, agreement)
    if data is None:
        _warn_of_epochs(options, restart)
    new_feed = lambda: _feed(step, state, data, options, start, [*parts, *saving])
    feed = new_feed() if rewound is None else rewound.feed
    if restart is not None and restart.restored.data is not None:
        with options.clock("data"):
            feed.restore(restart.restored.data, options.fast_forward)
    progress = _progress(state, options, feed, start)
    run = Run(
        state,
        start,
        feed,
        history,
        options=options,
        settings=functools.partial(_settings, step, state, start, options, saver),
        note=progress.note,
        stopped=beginning.stopped,
        saver=saver,
    )
    _check_last_batch(step, options, feed, start)
    fit = Fit(
        step,
        options,
        feed,
        run,
        # The order of a boundary: commands, evaluation, functions and parts of users, rows,
        # progress, the save, and the answers to commands.
        parts=(*parts, run.rows, progress, *saving),
        # The watch ends last: it sees the wait for the last save, and the error of any other part.
        begin_order=(*_watch(options, agreement), progress, run.rows, *parts, *saving),
        agreement=agreement,
        beginning=beginning,
        interrupt=_interrupt(options, saver, agreement, rewound),
    )
    _compare(fit)
    if rewound is None and restart is not None and restart.step is not None:
        _note_restart(fit, restart)
    return fit


def _note_restart(fit: Fit, restart: Any) -> None:
    """Tell that the run continues, if it does, with a mark and a warning of edits."""
    run = fit.run
    if not fit.has_nothing_to_do():
        run.history.mark("restart", run.step)
        restart.warn_of_edits(run.step)
    run.note(f"resumed from {restart.saver.path}, step {run.step}")


def _restart(step: Step, state: PyTree, data: Any, options: Options, saver: Any) -> Any:
    """The `Restart` of a run with checkpoints; None without them."""
    if saver is None:
        return None
    from tsunax.run.saving import Restart

    return Restart.load(saver, step, state, data, options)


def _compare(fit: Fit) -> None:
    """Compare the processes of the run."""
    options = fit.options
    cadences = [[type(part).__name__, str(part.cadence)] for part in fit.parts]
    fit.agreement.start(
        {"step": fit.step, "evaluate": options.evaluate, "callbacks": [*options.callbacks]},
        {"state": fit.run.state, "extra": dict(options.extra)},
        options=options.deciding_settings(),
        # parts with a cadence: the same on all processes
        parts=[x for x in cadences if x[1] != str(Cadence())],
        place=fit.feed.source.state(),
    )


def _history_of(options: Options, restart: Any, is_rewound: bool) -> tuple[History, dict[str, Any]]:
    """The history that the run continues, and the memory of its callbacks."""
    history, memory = (None, {}) if restart is None else restart.parts_of_fit()
    history = options.history if history is None else history
    history = History() if history is None else history
    if is_rewound:  # the history includes the seconds of this clock
        options.clock.total = history.time
    else:
        options.clock.continue_from(history.time)
    return history, memory


def _warn_of_epochs(options: Options, restart: Any) -> None:
    """Warn of tasks that wait for the end of an epoch in a run that has no epochs."""
    cadences = dict(zip(options.names, options.cadences, strict=False))
    if restart is not None and restart.saver.every is not None:
        cadences["Checkpoints(every=)"] = restart.saver.cadence
    for name, cadence in cadences.items():
        if cadence.epochs and not (cadence.steps or cadence.seconds < math.inf):
            warn(f"fit(): {name} counts epochs, and a run without data has none.")


def _interrupt(
    options: Options, saver: Any, agreement: processes.Unanimous, rewound: Fit | None
) -> Interrupt:
    """The signals of the run. Ctrl-C apart, they need a checkpoint, or several processes."""
    if rewound is not None:
        if rewound.signal:  # It came before the rewind, and ends the run after the rewind.
            rewound.interrupt.requests.add(("end", rewound.signal))
        return rewound.interrupt
    takes = lambda name: name == "INT" or saver or (agreement.spans and name not in SAVING)
    return Interrupt(*filter(takes, options.signals), can_save=saver is not None)


def _parts(
    options: Options, restart: Any, memory: dict[str, Any], agreement: processes.Unanimous
) -> tuple[list[Part], list[Part]]:
    """The parts before rows and progress, and the parts after, in the order of a boundary."""
    parts: list[Part] = []
    best = None if restart is None else restart.saver.keep_best
    watched = options.watched | ({} if best is None else {best.metric: "keep_best"})
    has_functions = options.evaluate is not None or options.callbacks or options.parts
    if has_functions or watched or agreement.spans:
        from tsunax.run.user_calls import calls_of_user

        parts = calls_of_user(options, watched, memory, agreement)
    if restart is None:
        return parts, []
    from tsunax.run.control import Answers, Control
    from tsunax.run.mailboxes import mailbox_of
    from tsunax.run.saving import Saving

    saving: list[Part] = [Saving(options, restart, memory)]
    mailbox = mailbox_of(restart.saver.path)
    control = Control(mailbox, restart.saver._lock_text, agreement, options.evaluate is not None)
    return [control, *parts], [*saving, Answers(control)]


def _watch(options: Options, agreement: processes.Unanimous) -> list[Part]:
    """The watch of a run, but of no dry run."""
    from tsunax.run.watchdog import Watch

    everyone = processes.current() if agreement.spans else processes.ALONE
    name = everyone.name_of(everyone.index) if agreement.spans else "the run"
    watch = Watch(options.watchdog, options.clock, everyone, name)
    return [] if options.dry_run else [watch]


def _feed(
    step: Step, state: PyTree, data: Any, options: Options, start: int, parts: list[Part]
) -> Feed:
    crosses_epochs = (
        not any(part.cadence.epochs for part in parts) and processes.current().sees_everything
    )
    limits = Limits(
        options.steps_per_call,
        interval=min((n for part in parts for n in part.cadence.steps), default=float("inf")),
        steps=options.goal.steps_left(start),
        last_epoch=(options.goal.epochs or NO_LIMIT) if crosses_epochs else 0,
    )
    return Feed(step, data, state, limits, continues_data=True)


def _progress(state: PyTree, options: Options, feed: Feed, start: int) -> Any:
    from tsunax.run.progress import progress

    total = options.goal.steps or feed.steps_to(options.goal.epochs or 0, start)
    states = training_states(state).values()
    have_windows = (guard.moves_params(s.opt_state) is not None for s in states)
    if options.goal.epochs and any(have_windows):
        total = None  # a step is several calls, and the number of calls without a step is unknown
    has_display = options.progress and processes.current().is_first
    return progress(has_display, total, start, seconds=options.clock.seconds)


def _check_last_batch(step: Step, options: Options, feed: Feed, start: int) -> None:
    """Raise now for the short last batch of an epoch that the step cannot cut, not when it comes.

    Raises the LossError of the step if the run reaches this batch.
    """
    data = innermost(feed.source.data)
    if not (isinstance(step, TrainStep) and getattr(data, "gathers", False)):
        return
    last_step: Any = feed.steps_to(feed.epoch + 1, start)
    goal = options.goal
    # A goal in epochs has no `goal.steps`.
    is_reached = not goal.reached(start, feed.epoch) and last_step <= (goal.steps or last_step)
    # Only the last batch: a step that cannot cut a full batch raises at its first call.
    is_indivisible = data.tail_rows % step.accumulate and not data.share % step.accumulate
    if step.cuts_evenly and is_reached and is_indivisible and processes.current().sees_everything:
        from tsunax.microbatches import indivisible

        description = f", the last batch of an epoch of {len(data)}"
        raise indivisible(data.tail_rows, step.accumulate, description)


def _settings(
    step: Step,
    state: PyTree,
    start: int,
    options: Options,
    saver: Any,
    log: Any,
    logs_row_again: bool,
) -> dict[str, Any]:
    """The settings that a logger with the file `log` gets; for `logs_row_again` see `Rows`."""
    from tsunax.hyper import hyperparams

    settings = {"goal": str(options.goal), "start": start}
    settings |= {"jax": jax.__version__, "devices": jax.device_count()}
    if saver is not None and saver.run_id:
        # Loggers delete rows from this step on: a process may have written rows after `start`, and
        # ended before it saved them. If `logs_row_again`, or in a new run, loggers get the row
        # of `start`, too.
        rows_from = start if logs_row_again or start == 0 else start + 1
        settings |= {"run_id": saver.run_id, "rows_from": rows_from}
        settings |= saver.copied_run(log)
    names = ("accumulate", "on_nonfinite")
    settings |= {name: getattr(step, name) for name in names if hasattr(step, name)}
    for prefix, s in training_states(state).items():
        settings |= {f"start/{prefix}{name}": x for name, x in hyperparams(s).items()}
        settings[f"{prefix}parameters"] = sum(np.size(x) for x in jax.tree.leaves(s.params))
        if s.plan.precision is not None:
            settings[f"{prefix}precision"] = s.plan.precision.compute
    return settings


def nothing_to_do(fitting: Fit, saver: Any) -> str:
    """The warning for a goal that a run has reached before its first step."""
    run, goal = fitting.run, fitting.options.goal
    if saver is not None and run.stopped:
        fix = "to train on, pass another goal or other callbacks: some stop a run again"
        return f"fit(): the run in {saver.path} stopped at step {run.step}, {run.stopped}; {fix}"
    place = f"epoch {fitting.feed.epoch}" if goal.epochs else f"step {run.step}"
    reason = "state.step and data.get_state() count on"
    if saver is not None and fitting.beginning.is_of_checkpoint:
        reason = f"so says the checkpoint in {saver.path}"
    reached = f"{goal} counts from the beginning of training, and the run is at {place} already"
    return f"fit(): {reached}: nothing to do; {reason}"
