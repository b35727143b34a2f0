"""Who calls the step, from a whole run to the bare compiled loop.

    state, history = fit(step, state, data, steps=1000)         until a goal (`run/fitting.py`)
    for state, info in iterate(step, state, data, steps=1000):  the same as a generator
    state, infos = run_epoch(step, state, data)               an epoch in a few compiled loops
    state, infos = run_steps(step, state, batches)            k steps in one (`run/fused_loop.py`)

The four functions give the same numbers.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownLambdaType=false

import contextlib
import functools
import os
import signal
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from tsunax._core import Extra, Function, PyTree, Step, StrPath, checks, placement, processes, trees
from tsunax._core.cadence import When
from tsunax._core.interrupts import SIGNALS, in_notebook
from tsunax._core.trees import own
from tsunax.data.checks import owned
from tsunax.data.positions import innermost
from tsunax.errors import StateError, warn
from tsunax.program import TrainStep
from tsunax.run import chunks, fused_loop, opening
from tsunax.run.chunks import RESIDENT, Limits
from tsunax.run.feed import Caller, Feed
from tsunax.run.fitting import Fit
from tsunax.run.history import History
from tsunax.run.info_columns import Infos, logged_step
from tsunax.run.options import Goal, Options, check_step
from tsunax.run.part import Part
from tsunax.run.run import with_state

if TYPE_CHECKING:
    from tsunax.checkpoints.saving import Checkpoints

_State = TypeVar("_State")


@checks.naming_arguments
def run_steps(step: Step, state: _State, batches: PyTree, **extra: Any) -> tuple[_State, Any]:
    """k steps in one compiled loop: `(state, infos)`, the infos stacked.

    As `for batch in batches: state, info = step(state, batch)`, without going back to Python in
    between; `batches` has a first axis of k. `step` is any function
    `(state, batch, **extra) -> (state, info)` that can be traced. The state given to a `TrainStep`
    is donated. StateError for arrays without one first axis, and for a consumed state.

    >>> import jax.numpy as jnp
    >>> import tsunax as ts
    >>> step = ts.train_step(lambda params, x: jnp.mean((x @ params["w"]) ** 2))
    >>> state = ts.setup(ts.rules.sgd(0.1), {"w": jnp.array([1.0, 2.0])})
    >>> state, infos = run_steps(step, state, jnp.stack([jnp.eye(2)] * 3))
    >>> [f"{loss:.4f}" for loss in infos.loss]
    ['2.5000', '2.0250', '1.6402']
    """
    check_step("run_steps()", step, state)
    k = _length_of(batches)
    checks.check_arrays(batches, "batches", "Leave it out, or turn it into numbers.")
    batches = owned(batches, "batches")  # the caller may refill them while the program runs
    # XLA unrolls a loop over one batch, which changes bits. So the buffer has room for two batches.
    batches = jax.tree.map(lambda x: chunks.with_room(x, max(k, 2)), batches)
    home = placement.state_sharding(state)
    feed = chunks.put_on_devices(fused_loop.Stacked(batches), home, step)
    extra = placement.place_extra(extra, state)
    donates = isinstance(step, TrainStep) and step.donate
    state, infos = fused_loop.fused(step, donates)(state, feed, chunks.count_of(k), extra)
    _raise_if_rejected(step, state, infos, feed, k, extra)
    return state, infos.stacked(state, slice(k))


def _raise_if_rejected(
    step: Step, state: PyTree, infos: Infos, feed: Any, steps: int, extra: Extra
) -> None:
    """Raise NonFiniteError under "raise" for a rejected step of a call. The state is after it."""
    is_strict = isinstance(step, TrainStep) and step.reaction.raises
    if not is_strict or trees.is_traced(infos.table):
        return
    verdicts = infos.stacked(state, slice(steps)).verdict
    for i in np.flatnonzero(np.asarray(verdicts > 0).reshape(steps, -1).any(1)):
        from tsunax._step import step_errors

        info, batch = infos.stacked(state, int(i)), feed.batch_at(int(i))
        place = f"step {i + 1} of the {steps} of a call" if steps > 1 else ""
        step_errors.RejectedCall(step, state, info, batch, extra).raise_error(place)


def _length_of(batches: PyTree) -> int:
    """The length of the first axis that all arrays of a tree share. Raises StateError."""
    shapes = {np.shape(x)[:1] for x in jax.tree.leaves(batches)}
    if len(shapes) != 1 or shapes == {()} or shapes == {(0,)}:
        raise StateError(
            "batches",
            "run_steps()",
            got=", ".join(trees.describe(x) for x in jax.tree.leaves(batches)[:4]) or "no arrays",
            expected="arrays with one first axis, of steps",
        )
    return next(iter(shapes))[0]


@checks.naming_arguments
def run_epoch(
    step: Step, state: _State, data: Iterable[PyTree], **extra: Any
) -> tuple[_State, Any]:
    """One epoch of `data` in few compiled loops. Returns `(state, infos)`, as `run_steps`.

    Every `step` must return numbers of the same shapes. Reads the batches that `for batch in data`
    reads: after a `break` a new epoch, after `set_state` the rest of one. Data on the device
    (`batches(..., device=True)`) take one loop, and one more for a short last batch. Raises
    WrongTypeError for data that are no iterable of batches, DataError if they give none.

    >>> import jax.numpy as jnp
    >>> import tsunax as ts
    >>> step = ts.train_step(lambda params, x: jnp.mean((x - params["w"]) ** 2))
    >>> state = ts.setup(ts.rules.sgd(0.1), {"w": jnp.zeros(2)})
    >>> data = ts.batches(jnp.ones((9, 2)), 4, device=True)
    >>> state, infos = run_epoch(step, state, data)
    >>> [f"{loss:.4f}" for loss in infos.loss]
    ['1.0000', '0.8100', '0.6561']
    """
    check_step("run_epoch()", step, state)
    feed, parts, steps_done = Feed(step, data, state, Limits()), [], 0
    caller = _caller("run_epoch()", step, state, feed, extra)
    with feed.given_back_at_errors():
        while (chunk := caller.take(RESIDENT, state, steps_done)) is not None:
            state, infos = caller.call(state, chunk, steps_done)
            steps_done += chunk.steps
            _raise_if_rejected(step, state, infos, chunk.feed, chunk.steps, caller.extra)
            parts.append(jax.tree.map(lambda x, n=chunk.steps: x[:n], infos))
    infos = jax.tree.map(lambda *x: jnp.concatenate(x), *parts)
    return state, infos.stacked(state)


def _caller(
    where: str, step: Step, state: PyTree, feed: Feed, extra: Extra, **settings: Any
) -> Caller:
    """A caller of the step with the batches of the feed, once all processes agree on them."""
    agreement = processes.current().agreement(where, state, innermost(feed.source.data))
    agreement.start({"step": step}, {}, **settings, place=feed.source.state())
    return Caller(step, feed, agreement, state, extra)


def iterate(
    step: Step,
    state: _State,
    data: Iterable[PyTree] | None = None,
    *,
    steps: int | None = None,
    epochs: int | None = None,
    steps_per_call: int = 1,
    **extra: Any,
) -> Generator[tuple[_State, Any], _State | None, None]:
    """The loop as a generator: `for state, info in iterate(step, state, data, steps=1000)`.

    Yields after every `steps_per_call` steps and after the last batch of an epoch, with the info of
    the last step. The next step consumes the state that was yielded: copy the arrays that you keep.
    If you send a state, the loop continues with it. `epochs`, in place of `steps`, counts epochs
    of the data; `extra` goes to every step.

    Raises WrongTypeError unless one of `steps` and `epochs` is given, DataError for data without a
    batch and for an iterator that ends before the goal.
    """
    goal = Goal("iterate()", steps, epochs, has_data=data is not None)
    check_step("iterate()", step, state)
    steps_per_call = checks.check_count(steps_per_call, "iterate()", "steps_per_call")
    feed = Feed(
        step, data, state, Limits(steps_per_call, steps=goal.steps_left(0)), continues_data=True
    )
    settings = {"goal": str(goal), "steps_per_call": steps_per_call}
    caller = _caller("iterate()", step, state, feed, extra, **settings)
    steps_done, yielded_at, info = 0, 0, None
    with feed.given_back_at_errors():
        while not goal.reached(steps_done, feed.epoch):
            most_steps = min(yielded_at + steps_per_call - steps_done, goal.steps_left(steps_done))
            chunk = caller.take(int(most_steps), state, steps_done)
            if chunk is not None:
                state, infos = caller.call(state, chunk, steps_done)
                steps_done += chunk.steps
                _raise_if_rejected(step, state, infos, chunk.feed, chunk.steps, caller.extra)
                info = infos.stacked(state, chunk.steps - 1)
            is_end = goal.reached(steps_done, feed.epoch)
            is_due = is_end or steps_done - yielded_at == steps_per_call
            if steps_done > yielded_at and (is_due or chunk is None):  # None: the end of an epoch
                sent_state = yield state, info
                yielded_at = steps_done
                if sent_state is not None:
                    check_step("iterate()", step, sent_state)
                    state = sent_state  # perhaps on other devices
                    feed.sync()
                    caller.place_extra(extra, state)


@functools.partial(checks.naming_arguments, fix="Give the goal by name: steps=1000, or epochs=10.")
def fit(
    step: Step,
    state: _State,
    data: Iterable[PyTree] | None = None,
    *,
    steps: int | None = None,
    epochs: int | None = None,
    evaluate: Function | None = None,
    evaluate_every: When = "epoch",
    callbacks: Function | Part | Sequence[Function | Part] = (),
    logger: Function | Sequence[Function] | None = (),
    checkpoint: "StrPath | Checkpoints | None" = None,
    resume: str = "auto",
    fast_forward: bool = False,
    progress: bool = True,
    log_every: int = 10,
    steps_per_call: int | str | None = "auto",
    max_bad: int = 10,
    signals: Sequence[str] = SIGNALS,
    dry_run: bool = False,
    history: History | None = None,
    extra: Mapping[str, Any] | None = None,
) -> tuple[_State, History]:
    """Train until a goal is reached: `(state, history)`.

    This loop, with many steps in one compiled call, a history, and a clean end at Ctrl-C:

        for batch in data:
            state, info = step(state, batch)

    The given state is consumed. Of the other arguments, only `history` and the position of `data`
    change.

    Args:
      step: a `train_step`, or any function `(state, batch, **extra) -> (state, info)` that JAX can
        trace; its state may be any pytree, for example `States`, several states as one run.
      data: `batches(...)`, or any iterable of batches; None for a step that makes its data from the
        state: it is called as `step(state)`, or with None for a batch, and there are no epochs. A
        new state (`state.calls == 0`) begins at the first batch, a trained state at the position
        of the data.
      steps: the total of applied steps, counted by `state.step`; or
      epochs: the total of epochs of the data.
      evaluate: `f(state) -> {name: number}`, called every `evaluate_every`, at the end, and once
        before the first step if a callback or `keep_best` waits for a name with a slash, unless
        another callback may log that name.
      evaluate_every: "epoch", "5 epochs", a number of steps, a duration as "30 s", "10 minutes" or
        "2 h", or a tuple of these for whichever comes first.
      callbacks: functions `f(run) -> None | state`, see `callbacks`, or `callbacks.Part`s.
        `every(n, f)` is called at multiples of n steps; a plain function at the start, at multiples
        of `log_every`, after evaluations and epochs, and at the end. Functions are called before
        parts. `watchdog` replaces the watchdog of every run.
      logger: `f(row, step=)`, or several, as `wandb.log`. Called on the first process only.
      checkpoint: a path or `Checkpoints`: where to save state, place of the data, history and
        callbacks' memory, at its `every`, else after every epoch and every ten minutes, and at the
        end; and from where to resume. A state that is further than the newest checkpoint is kept
        instead, with a warning. A run that reached its goal, or that a callback stopped, is over
        for the same call.
      resume: "auto" resumes from the newest good checkpoint if there is one; "must" raises if there
        is none; "never" raises if there is one.
      fast_forward: whether data without a position, such as a generator, may be read up to it.
      progress: whether to show it on stderr: a bar on a terminal, a line in notebooks, else lines.
      log_every: steps from one row of the history to the next; the first and the last step have a
        row, too.
      steps_per_call: steps in one call of the compiled loop; "auto" follows the time that a step
        takes. Does not change the result. None calls `step` itself, which need not be traceable.
      max_bad: rejected steps in a row that end the run with a NonFiniteError; fewer give a warning.
      signals: names of the signals that the run handles; `()` for none. With a checkpoint INT,
        TERM, HUP and XCPU save and end the run, USR1 and USR2 only save it. Without one a state of
        several processes ends at the same signals, and any other run at INT alone.
      dry_run: try everything and keep nothing: two steps on a copy of the state, one evaluation,
        every callback and part once; no logger, no checkpoint.
      history: a `History` to add rows to.
      extra: arguments for `step` by name: `step(state, batch, **extra)`. A callback may replace
        them, `extra["scale"] = 0.5`; changes within an array have no effect.

    At a boundary, in this order: evaluation, callbacks, loggers, progress, checkpoint. Ctrl-C ends
    the run after the call under way, and saves: in a notebook `fit` returns; in a script it raises
    KeyboardInterrupt. A second Ctrl-C stops at once. With a checkpoint or a state of several
    processes SIGTERM, SIGHUP and SIGXCPU do the same, with SystemExit(143), 129 and 152. A signal
    that was ignored stays ignored, and your own Python handler of a signal runs, too. Exceptions
    have `error.state` (None if the failed call had consumed it), `error.history` and
    `error.rejected` (for `ts.replay`).

    If the state is on devices of several processes, they compare settings, functions, the program
    of the step, data and changes by callbacks: all raise ProcessError if one differs. All use the
    numbers of `evaluate` of process 0.

    Raises WrongTypeError for unsuitable arguments, before anything is compiled; DataError for
    data that gives no batch or ends before the goal; NonFiniteError.

    >>> import jax.numpy as jnp
    >>> import numpy as np
    >>> import tsunax as ts
    >>> state = ts.setup(ts.rules.sgd(0.1), {"w": jnp.zeros(2)})
    >>> step = ts.train_step(lambda params, x: jnp.mean((x - params["w"]) ** 2))
    >>> data = ts.batches(np.full((8, 2), 3.0, np.float32), 4)
    >>> state, history = fit(step, state, data, steps=20, progress=False)
    >>> history["loss"]
    array([9.        , 1.350..., 0.164...])
    """
    goal = Goal("fit()", steps, epochs, has_data=data is not None)
    check_step("fit()", step, state)
    checks.check_flags("fit()", dry_run=dry_run, progress=progress, fast_forward=fast_forward)
    if dry_run:
        state, goal = jax.tree.map(own, state), Goal("fit()", logged_step(state, 0) + 2, None)
        logger, checkpoint, resume, progress, history = (), None, "auto", False, None
    options = Options(
        goal=goal,
        evaluate=evaluate,
        evaluate_every=evaluate_every,
        callbacks=callbacks,
        loggers=logger,
        log_every=log_every,
        steps_per_call=steps_per_call,
        max_bad=max_bad,
        signals=signals,
        extra={} if extra is None else extra,
        dry_run=dry_run,
        progress=progress,
        history=history,
        resume=resume,
        fast_forward=fast_forward,
        checkpoint=checkpoint,
    )
    with contextlib.ExitStack() as stack:
        stack.callback(options.clock.lap, "idle")
        saver = None
        if checkpoint is not None:
            from tsunax.run.saving import opened

            with options.clock("checkpoint"):
                saver = stack.enter_context(opened(checkpoint))
        fitting = opening.begin(step, state, data, options, saver)
        run = fitting.run
        try:
            with contextlib.closing(fitting.feed), fitting.interrupt:
                if fitting.has_nothing_to_do():
                    warn(opening.nothing_to_do(fitting, saver))
                    return run.state, run.history
                _train(fitting)
                while fitting.run.restart is not None:  # after a rewind
                    fitting = opening.begin(step, state, data, options, saver, fitting)
                    run = fitting.run
                    _train(fitting)
                if not fitting.signal:  # It may come while the end is evaluated and saved.
                    fitting.poll(fitting.agreement.agree_at_end)
                if dry_run:
                    fitting.feed.return_data()
        except BaseException as error:  # also of the wait for the data to close
            with_state(error, run)
            raise
    _raise_for_signal(fitting)
    return run.state, run.history


def _raise_for_signal(fitting: Fit) -> None:
    """Raise the exception of the signal that ended the run, if there was one."""
    run, interrupt, signal_number = fitting.run, fitting.interrupt, fitting.signal
    # The signal came too late for the other processes. Send it again, as if it came after `fit`.
    if interrupt.asked and not signal_number and fitting.agreement.spans:
        os.kill(os.getpid(), interrupt.asked)
    signal_number = signal_number or interrupt.asked
    if interrupt.error is not None:
        raise with_state(interrupt.error, run)
    if signal_number not in (0, signal.SIGINT):
        raise with_state(SystemExit(128 + signal_number), run)
    if signal_number and not in_notebook():
        is_saved = fitting.options.checkpoint is not None
        remedy = "the same command continues there" if is_saved else "`error.state` is the state"
        text = f"at step {run.step}; {remedy}"
        error = with_state(KeyboardInterrupt(text), run)
        # Other processes see that this process has not failed. A subclass has the exit code 1.
        error.signal = signal_number
        raise error


def _train(fitting: Fit) -> None:
    """The parts of the run, and the loop between their beginning and their end."""
    run, goal = fitting.run, fitting.options.goal
    is_finished = bool(run.stopped) or goal.reached(run.step, fitting.feed.epoch)
    run.rows.reopen(run.step, is_finished or fitting.beginning.has_open_row)
    with fitting.parts_begun():
        _loop(fitting)


def _loop(fitting: Fit) -> None:
    """The loop: calls of many steps up to the next boundary, and what happens there."""
    fitting.hold_first_boundary()
    # A boundary that is due is held and saved before the run ends, and a resumed run does not
    # repeat it.
    while not fitting.is_finished():
        if fitting.call():  # The device runs it. At the end of an epoch there is no call.
            fitting.read_earlier_calls()  # meanwhile
        if fitting.take_epoch_end():
            fitting.hold_epoch_boundary()
        # Signals and timers make requests. After a rewind the run begins again, without its end.
        is_boundary = fitting.steps_to_boundary() == 0 or fitting.requests
        if is_boundary and fitting.run.restart is None:
            fitting.hold_boundary()  # commands, evaluate, callbacks, loggers, checkpoint, answers
    if fitting.run.restart is None:
        fitting.hold_last_boundary()


__all__ = ["History", "fit", "iterate", "run_epoch", "run_steps"]
