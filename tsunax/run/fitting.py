"""A run of `fit` under way: where it is, what of it is still on the device, and what a callback
sees of it.

    batches -> one compiled loop of k steps -> (the next call is under way) -> rows -> history,
    loggers, progress at a boundary: evaluate -> callbacks -> loggers -> progress

A boundary is a step at which somebody needs the state: an evaluation, a callback, the end of an
epoch. Between them the host only hands out batches, and reads the numbers of a call when the next
one is under way. How many steps go into a call may follow the clock on the wall: it never changes a
bit (`run/fused_loop.py`).
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from tsunax import guard
from tsunax._core import checks, placement, trees
from tsunax._core.interrupts import Interrupt
from tsunax._step import failures
from tsunax._step.failures import is_searching
from tsunax._step.members import members_of
from tsunax.distributed import processes
from tsunax.errors import (
    NonFiniteError,
    RowError,
    StateError,
    WrongTypeError,
    message,
    unknown,
    warn,
)
from tsunax.program import TrainStep
from tsunax.run import agreement, callbacks, evaluation, feed, fused_loop, progress
from tsunax.run.history import History
from tsunax.run.options import Options, is_bare, wants
from tsunax.run.profiling import Profile
from tsunax.run.rows import check_row, join
from tsunax.state import TrainState, check_state, donated
from tsunax.step import StepInfo

MOST_OF_A_METRIC = 100  # numbers of an array that become columns
WAITING_BYTES = 64 << 20  # of batches of calls that were not read yet
MOST_REJECTED = 3  # calls that are kept, each with its batch on the host
CALL_SECONDS = (
    0.05  # of a call under "auto": nobody sees it, and its fixed cost of 0.3 ms is nothing
)
STRETCH = 16  # reads over which rates are measured


# names that rows have of themselves; no metric may be called so
OF_ROWS = ("loss", "grad_norm", "update_norm", "loss_scale", "dropped", "weight", "step")
OF_FIT = ("epoch", "rejected", "steps_per_second", "examples_per_second")


@dataclass(frozen=True)
class Rejected:
    """A call whose step was rejected: what it takes, beside the state, to have it again."""

    step: int  # of the clock
    calls: int  # of the state when it was called: its keys come from that
    epoch: int
    batch: Any  # on the host, without rows of padding
    loss_scale: Any  # the one that it used, where the state has one

    def of(self, state: TrainState, *, exact: bool = True) -> tuple[TrainState, Any]:
        """`(state, batch)` of that call, for `ts.replay(step, *rejected.of(state))`.

        From the state that the run ended in, as `error.state`. A rejected step leaves a state as it
        was; where others were applied since, StateError, or with `exact=False` the batch and the
        keys of that call with later params.
        """
        check_state(state, "Rejected.of()")
        if exact and int(state.step) != self.step:
            fix = "Take of(state, exact=False), or end the run at the first one: max_bad=1."
            got = f"step {int(state.step)}"
            raise StateError(
                message(
                    "state", "Rejected.of()", got, f"that of step {self.step}, where it was", fix
                )
            )
        fields: dict[str, Any] = {"calls": self.calls}
        if self.loss_scale is not None and state.loss_scale is not None:
            scale = np.float32(self.loss_scale)
            fields["loss_scale"] = dataclasses.replace(state.loss_scale, scale=scale)
        return state.replace(**fields), self.batch


class Run:
    """What a callback sees of a run; it may change `memory`, and call `log` and `stop`.

    To assign an attribute is an error in a callback: nobody would read it.
    """

    is_lent = False  # to a callback

    def __setattr__(self, name: str, value: Any) -> None:
        is_of_loop = name in self.__dict__.get("known", ()) or name == "extra"
        if name in _METHODS or (self.is_lent and is_of_loop):
            fixes = {
                "state": "Return the new state.",
                "memory": "Change it in place: run.memory.update(...).",
                "extra": "Change the dict that you gave to fit: extra['scale'] = ...",
            }
            fix = (
                f"Call it: run.{name}(...)."
                if name in _METHODS
                else fixes.get(name, "It is the loop's.")
            )
            raise WrongTypeError(message(f"run.{name}", "a callback", "an assignment", "none", fix))
        self.__dict__[name] = value

    def __init__(self, state, step: int, epoch: int, history: History):
        self.event = "start"
        self.step, self.epoch = step, epoch
        self.state = state
        self.info: Any = None  # of the last step, its numbers on the host; None before the first
        known = {name: history.last(name) for name in history.names}
        self.metrics: dict[str, float] = {
            name: x for name, x in known.items() if x is not None
        }  # the newest of each
        self.history = history
        self.memory: dict[str, Any] = {}  # the callback's own; saved and given back
        self.stopped = ""
        self.taken: set[str] = set(OF_ROWS + OF_FIT)  # names of training rows
        self.row: dict[str, float] = {}
        self.note: Callable[[str], None] = print  # a line above the progress
        self.rejected: collections.deque[Rejected] = collections.deque(
            maxlen=MOST_REJECTED
        )  # the last ones
        self.known = frozenset(
            self.__dict__
        )  # of the loop; a callback may put names of its own beside them

    def log(self, **numbers) -> None:
        """Let numbers join the row of this step."""
        self.check_own(numbers, "run.log()")
        row = join(self.row, numbers, "run.log()")
        self.__dict__["row"] = row
        self.metrics.update({name: row[name] for name in numbers})

    def check_own(self, numbers, where: str) -> None:
        """Raise RowError for a name that the rows of training have, so that no column mixes two
        things.
        """
        if taken := [name for name in numbers if name in self.taken]:
            fix = "Name it: 'val/loss', or ts.evaluate(eval_step, state, {'val': data})."
            raise RowError(
                message(
                    repr(taken[0]), where, "a name of the training rows", "a name of its own", fix
                )
            )

    def stop(self, reason: str) -> None:
        """End the run after this boundary."""
        self.__dict__["stopped"] = self.stopped or str(reason)


_METHODS = {name for name in vars(Run) if callable(getattr(Run, name))}


class Fit:
    """A run of `fit` under way: where it is, and what of it is still on the device."""

    def __init__(
        self, step, state, data, options: Options, history: History, memory: dict, start: int
    ):
        self.step, self.options, self.memory = step, options, memory
        interval = min(options.intervals, default=float("inf"))
        left = options.goal.left(start)
        crosses = not options.listens_to_epochs and jax.process_count() == 1
        given = options.steps_per_call, interval, left
        self.feed = feed.Feed(step, data, state, *given, goes_on=True, crosses=crosses)
        self.loop = fused_loop.fused(step, not isinstance(step, TrainStep) or step.donate)
        self.run = Run(state, start, self.feed.epoch, history)
        self.alike = agreement.Alike("fit()", state, data)
        self.signal = 0  # that ended the run: the same on all processes
        self.has_changed = False  # whether a callback of this boundary returned a state
        self.given: Any = None  # what `extra` was placed from
        self.place_extra()
        self.pending: list[tuple[feed.Chunk, Any]] = []  # calls whose infos were not read
        self.ahead = 0  # steps in them
        self.seconds = (
            0.0  # per step over the last reads, without compiling and boundaries; 0: unknown
        )
        self.read_at = 0.0  # when calls were read last; 0 before the first call
        self.idle, self.idle_steps = 0.0, 0  # seconds that do not count, and the steps done in them
        self.steps_read = 0
        self.stretch: collections.deque[tuple[float, int]]  # (clock, steps done) at the last reads
        self.stretch = collections.deque(maxlen=STRETCH)
        self.rejected, self.in_a_row = _rejected_of(state)[0], 0
        self.is_population = members_of(state) is not None
        self.calls = _calls_of(state)  # of the state before the calls that were not read
        self.max_bad = 1 if getattr(step, "on_nonfinite", None) == "raise" else options.max_bad
        has_scale = (
            isinstance(state, TrainState) and state.loss_scale is not None
        )  # then some rejections do not count
        self.limit = (
            feed.NO_LIMIT
            if has_scale or self.is_population
            else self.max_bad + _rejected_of(state)[1]
        )
        self.profile = Profile(None)
        self.row_step = -1
        self.told_step = -1  # of the row that the loggers were given last
        self.last: tuple[Callable, int] | None = (
            None  # what makes the newest step's row, if it has none
        )
        self.saved: Any = None  # when it was, last
        self.is_resumed = False  # at the step of a checkpoint
        self.script: Any = None  # what the script gave, see `_resume.script_of`
        self.evaluated = -1  # the step at which it was, last
        self.agreed: frozenset[str] = frozenset()  # names of its numbers, which all processes share
        self.numbers: Any = (
            None,
            None,
            None,
        )  # as they are, what of them a row tells, as they were at the start

    def place_extra(self) -> None:
        """The arguments of the step where the state lives: once, and again where a callback put in
        others.
        """
        given = dict(self.options.extra)
        if (
            self.given is None
            or given.keys() != self.given.keys()
            or any(x is not self.given[k] for k, x in given.items())
        ):
            checks.check_arrays(
                given, "extra", "Bind it to the step instead, with functools.partial."
            )
            self.given, self.extra = (
                given,
                placement.whole(given, placement.home_of(self.run.state)),
            )

    def show_on(self, bar) -> None:
        self.bar, self.run.note = bar, bar.note

    # ---------------------------------------------------------------------------------------- steps

    def go(self, interrupt: Interrupt) -> None:
        """Run until the goal is reached, somebody stops, or Ctrl-C is pressed."""
        run, options = self.run, self.options
        self.alike.start(
            options=options.deciding(),
            place=self.feed.source.state(),
            state=agreement.small(run.state),
        )
        self.look_for_names()
        self.boundary(["start"])
        boundary, since = 0.0, -1
        while not (
            options.goal.reached(run.step, self.feed.epoch) or run.stopped or self.asked(interrupt)
        ):
            if run.step != since:
                boundary, since = options.next_boundary(run.step), run.step
            ahead = run.step + self.ahead  # the most that the clock can be at by now
            if ahead == boundary:
                self.settle()  # calls that were rejected leave the clock behind
                if run.step == boundary:
                    self.boundary(options.events(run.step))
                continue
            self.profile.call()
            with self.profile.phase("batches"):
                left = boundary - ahead
                chunk = self.feed.take(
                    int(min(self.per_call(), left)), run.state, ahead, self.limit, until=left
                )
                self.alike.chunk(ahead + 1, chunk, self.feed.source)
            if chunk is not None:
                with self.profile.phase("dispatch"):
                    self.call(chunk)
            if self.feed.ended() and options.listens_to_epochs:
                self.settle()
                events = options.events(run.step) if run.step == boundary else []
                self.boundary([*dict.fromkeys([*events, *self.epoch_events()])])
        self.settle()
        self.signal = self.signal or self.alike.signal(interrupt.asked)
        if self.signal:
            run.stop("interrupted")
        due = options.evaluate is not None and self.evaluated != run.step and not self.signal
        self.boundary(
            [*(["evaluate"] if due else []), *(["step"] if options.dry_run else []), "end"]
        )

    def look_for_names(self) -> None:
        """Raise RowError before step 1 for a name that somebody waits for and `evaluate` does not
        return.

        That takes a call of it, of one batch if it calls `ts.evaluate`, and none if a callback of
        the user's might log the name.
        """
        options, known = self.options, self.run.history.names
        best = options.saver and options.saver.keep_best
        waits = {
            f.metric: f"{type(f).__name__}()" for f in options.callbacks if callbacks.is_watching(f)
        }
        waits |= {best.metric: "keep_best"} if best else {}
        waits = {name: where for name, where in waits.items() if "/" in name and name not in known}
        if (
            not waits
            or options.evaluate is None
            or options.dry_run
            or any(map(callbacks.may_log, options.callbacks))
        ):
            return
        with evaluation.one_batch(), _blame("evaluate", options.evaluate, self.run):
            found = check_row(options.evaluate(self.run.state), "evaluate")
        for name, where in waits.items():
            if name not in found:
                raise RowError(unknown("metric", where, name, found))

    def asked(self, interrupt: Interrupt) -> bool:
        """Whether somebody wants the run to end: a signal, to this process or to another one."""
        self.signal = processes.agree(interrupt.asked) if self.alike.spans else interrupt.asked
        return bool(self.signal)

    def per_call(self) -> int:
        given = self.options.steps_per_call
        if given != "auto":
            return given or 1
        if self.alike.spans:  # no clock on the wall: all processes run the same programs
            return self.feed.size
        return int(max(1, min(CALL_SECONDS / self.seconds, self.feed.size))) if self.seconds else 1

    def epoch_events(self) -> list[str]:
        n = self.options.evaluate_epochs
        return ["evaluate", "epoch"] if n and self.feed.epoch % n == 0 else ["epoch"]

    def call(self, chunk: feed.Chunk) -> None:
        """Dispatch one call; read those before it, if they have waited long enough."""
        run, before, traces = self.run, time.perf_counter(), self.traces()
        if self.options.steps_per_call is None:
            run.state, infos = self.loop.once(run.state, chunk.feed.one(), self.extra)
        else:
            run.state, infos = self.loop(run.state, chunk.feed, chunk.n, self.extra)
        now = time.perf_counter()
        self.pending.append((chunk, infos))
        self.ahead += chunk.steps
        self.read_at = self.read_at or now
        if self.traces() != traces:  # it compiled: no measure of anything
            self.idle += now - before
            self.idle_steps += chunk.steps if _is_ready(infos) else 0
        late = (
            self.alike.spans
            or now - self.read_at > CALL_SECONDS
            or len(self.pending) * chunk.bytes > WAITING_BYTES
        )
        if len(self.pending) > 1 and (late or not self.seconds):
            self.read(1)

    def traces(self) -> int:
        """How often the step was traced, which is when it compiles; 0 for a step that does not
        count.
        """
        step = self.loop.step  # an equal one, if it was there before
        return len(step.traces) if isinstance(step, TrainStep) else 0

    def settle(self) -> None:
        """Read all that is under way: from here on `run` is exact."""
        self.read(0)

    def rescue(self, error: BaseException) -> None:
        """After an exception: the numbers of steps that were applied, as far as they can be had."""
        with contextlib.suppress(Exception):
            if not isinstance(error, NonFiniteError):
                self.settle()
            self.flush()

    def read(self, leave: int) -> None:
        """Wait for all calls but the last `leave`, and make rows of their numbers."""
        cut = len(self.pending) - leave
        pending, self.pending = self.pending[:cut], self.pending[cut:]
        for _, part in itertools.groupby(pending, lambda call: form_of(call[1])):
            chunks, infos = zip(*part, strict=True)
            with self.profile.phase("read"):  # the one wait
                infos = [_hosted(x) for x in infos]
            infos, named = _unpacked(infos, [chunk.steps for chunk in chunks])
            count = sum(chunk.steps for chunk in chunks)
            self.ahead, self.steps_read = self.ahead - count, self.steps_read + count
            self.measure()
            self.rows(chunks, infos, named)
        if self.options.saver is not None:
            self.options.saver.poll()

    def measure(self) -> None:
        """The seconds per step over the last reads, from the steps that are done by now."""
        self.read_at = time.perf_counter()
        done = self.steps_read + sum(
            chunk.steps for chunk, infos in self.pending if _is_ready(infos)
        )
        clock, done = self.read_at - self.idle, done - self.idle_steps
        if self.stretch and done > self.stretch[0][1]:  # not before the first read: it compiles
            since, before = self.stretch[0]
            self.seconds = max(clock - since, 1e-9) / (done - before)
        self.stretch.append((clock, done))

    # ----------------------------------------------------------------------------------------- rows

    def rows(self, chunks, infos, named: dict[str, np.ndarray]) -> None:
        """History, loggers and progress get the numbers of these steps, one row for every
        `log_every` of them.
        """
        run, every = self.run, self.options.log_every
        epochs = np.concatenate([chunk.epochs for chunk in chunks])
        verdicts = _verdicts(infos, len(epochs))
        is_one = (
            isinstance(infos, StepInfo) and not self.is_population
        )  # then its clock counts, else every call does
        steps = run.step + np.cumsum(verdicts == 0 if is_one else np.ones(len(epochs), int))
        rejected = self.rejected + np.cumsum(verdicts > 0)
        fatal = self.note_rejected(verdicts, steps, epochs, infos)
        n = len(epochs) if fatal is None else fatal + 1  # the loop went no further
        self.keep_rejected(verdicts[:n], steps, chunks, infos)
        columns = {**dict(_columns(infos)), **named, "epoch": epochs, "rejected": rejected}
        still = self.still()
        if taken := [
            name for name in _own_names(infos) if name in {*OF_ROWS, *OF_FIT, *named, *still}
        ]:
            got, fix = "a name that fit reserves", "Rename the metric."
            raise RowError(message(f"metric {taken[0]!r}", "loss_fn", got, "another name", fix))
        run.taken.update(columns, still)
        is_weight = lambda name: (
            name == "weight" or (self.is_population and name.startswith("weight/"))
        )
        rates = {"steps_per_second": 1 / self.seconds} if self.seconds else {}
        if isinstance(infos, StepInfo) and (names := list(filter(is_weight, columns))):
            examples = float(sum(np.mean(columns.pop(name)) for name in names))
            rates |= {"examples_per_second": examples / self.seconds} if self.seconds else {}
        applied = np.flatnonzero(verdicts[:n] == 0)
        numbers = (
            run.state.numbers if isinstance(run.state, TrainState) else None
        )  # a callback may change them

        def rows_of(at: np.ndarray) -> dict[str, np.ndarray]:
            found = {name: x[at] for name, x in columns.items()}
            if self.options.steps_per_call is None:
                found |= _scheduled(numbers, steps[at] - 1)
            return found | {name: np.full(len(at), x) for name, x in (rates | still).items()}

        is_due = (steps[applied] % every == 0) | (steps[applied] == 1)
        if len(due := applied[is_due]):
            self.emit(rows_of(due), steps[due])
        if len(applied):
            last = applied[-1:]
            self.last = (
                None if is_due[-1] else (functools.partial(rows_of, last), int(steps[last[0]]))
            )
        run.step, run.info = int(steps[n - 1]), jax.tree.map(lambda x: x[n - 1], infos)
        self.rejected = int(rejected[n - 1])
        self.bar.show(run.step, run.metrics)
        if fatal is not None:
            self.give_up(fatal, chunks)

    def note_rejected(self, verdicts, steps, epochs, infos) -> int | None:
        """Mark rejected calls, warn of the first, the tenth, the hundredth.

        Which one was one too many, if any.
        """
        run, count = self.run, self.rejected
        if not np.any(verdicts > 0):
            self.in_a_row = 0
            return None
        for i, verdict in enumerate(verdicts):
            if verdict <= 0:
                self.in_a_row = 0
                continue
            info = jax.tree.map(lambda x, i=i: x[i], infos)
            count += 1
            run.history.mark("rejected", int(steps[i]))
            known = (
                isinstance(info, StepInfo)
                and isinstance(run.state, TrainState)
                and not self.is_population
            )
            if known and is_searching(run.state, info, verdict):
                continue  # for its loss scale
            self.in_a_row += 1
            if count in (1, 10, 100, 1000, 10_000, 100_000) and self.max_bad > 1:
                why = (
                    guard.explain(verdict, run.state.opt_state)
                    if known
                    else "a loss or gradient is not finite"
                )
                loss = f" (loss {float(info.loss):.6g})" if known and info.loss is not None else ""
                what = f"step {int(steps[i])} of epoch {epochs[i]} was rejected{loss}: {why}"
                warn(f"{what}. {count} so far; the state is as it was.", RuntimeWarning)
            if self.in_a_row >= self.max_bad:
                return i
        return None

    def keep_rejected(self, verdicts, steps, chunks, infos) -> None:
        """Keep the last rejected calls, for `replay`: a transfer of one batch for each of them."""
        state, before = self.run.state, self.calls
        self.calls += len(verdicts)
        known = (
            isinstance(infos, StepInfo) and isinstance(state, TrainState) and not self.is_population
        )
        if (
            not known or not np.any(verdicts > 0) or jax.process_count() > 1
        ):  # no process has the whole batch
            return
        for i in map(int, np.flatnonzero(verdicts > 0)[-MOST_REJECTED:]):
            info = jax.tree.map(lambda x, i=i: x[i], infos)
            if not is_searching(state, info, verdicts[i]):
                batch, epoch = self.batch_of(i, chunks)
                kept = Rejected(int(steps[i]), before + i, epoch, batch, info.loss_scale)
                self.run.rejected.append(kept)

    def batch_of(self, i: int, chunks) -> tuple[Any, int]:
        """The batch of the i-th of the calls that these chunks hold, on the host, and its epoch."""
        chunk = next(chunk for chunk in chunks if (i := i - chunk.steps) < 0)
        batch, mask = jax.device_get(
            (chunk.feed.at(i + chunk.steps), getattr(chunk.feed, "mask", None))
        )
        rows, epoch = None if mask is None else int(np.sum(mask)), int(chunk.epochs[i])
        batch = jax.tree.map(lambda x: x[:rows] if np.ndim(x) else x, batch) if rows else batch
        return batch, epoch

    def give_up(self, i: int, chunks) -> None:
        """Raise for a call that was one rejected too many, and say what was wrong with it."""
        run = self.run
        assert run.info is not None
        limit = f"max_bad={self.max_bad}"
        if getattr(self.step, "on_nonfinite", None) == "raise":
            limit = "on_nonfinite='raise'"
        elif self.max_bad > 1:
            limit = f"the last of {self.max_bad} in a row, {limit}"
        known = isinstance(run.info, StepInfo) and not self.is_population
        why = guard.explain(run.info.verdict, None) if known else "not finite"
        if (
            known and isinstance(self.step, TrainStep) and jax.process_count() == 1
        ):  # else nobody has the batch
            why = failures.why(
                self.step, run.state, run.info, self.batch_of(i, chunks)[0], self.extra
            )
        epochs = np.concatenate([chunk.epochs for chunk in chunks])
        what = f"step {run.step} of epoch {epochs[i]} was rejected: {why}; {limit}"
        raise NonFiniteError(f"{what}. `error.state` is the state before it.", run.state, run.info)

    def still(self) -> dict[str, float]:
        """The hyperparameters that no schedule moves: learning rates, and those that were adjusted
        since the start.
        """
        if (
            self.numbers[0] is not getattr(self.run.state, "numbers", None)
            or self.numbers[1] is None
        ):
            now = _still(self.run.state)
            start = self.numbers[2] if self.numbers[1] is not None else now
            kept = {k: x for k, x in now.items() if "learning_rate" in k or x != start.get(k)}
            self.numbers = getattr(self.run.state, "numbers", None), kept, start
        return self.numbers[1]

    def emit(self, columns: dict[str, np.ndarray], steps: np.ndarray) -> None:
        """Rows for the history, and for the loggers but the last one: it may not be whole yet."""
        self.flush()
        self.run.history.extend(columns, steps)
        rows = range(len(steps)) if self.options.loggers else [len(steps) - 1]
        for i in rows:
            self.flush()
            self.row_step, self.run.row = (
                int(steps[i]),
                {name: float(x[i]) for name, x in columns.items()},
            )
        self.run.metrics |= self.run.row

    def add(self, row: Mapping[str, float], step: int) -> None:
        """A row of numbers, or more numbers for the row of this step.

        Loggers get it when it is whole.
        """
        run = self.run
        if step != self.row_step:
            self.flush()
            self.row_step, run.row = step, {}
        run.row |= row
        run.metrics |= row
        run.history.add(row, step)

    def close_rows(self) -> None:
        """Add the row of the last step, whatever `log_every` is. Loggers get one row of a step."""
        if self.last is None:
            return
        (rows_of, step), self.last = self.last, None
        row = {name: float(x[0]) for name, x in rows_of().items()}
        self.run.history.close(row, step)
        if step == self.told_step:
            self.run.metrics |= row
        else:
            self.add(row, step)

    def flush(self) -> None:
        """Give the newest row to the loggers."""
        row, self.run.row = self.run.row, {}
        self.told_step = self.row_step if row else self.told_step
        for logger in self.options.loggers if row else ():
            with _blame("logger", logger, self.run):
                logger(dict(row), step=self.row_step)

    # ----------------------------------------------------------------------------------- boundaries

    def boundary(self, events: list[str]) -> None:
        """What happens where the state is needed: evaluation, callbacks, loggers, progress, in this
        order.
        """
        before = time.perf_counter()
        with self.profile.phase("boundary"):
            self._boundary(events)
        self.idle += time.perf_counter() - before

    def _boundary(self, events: list[str]) -> None:
        run = self.run
        self.feed.sync()
        run.epoch = self.feed.epoch
        if "end" in events or self.options.goal.reached(run.step, run.epoch):
            self.close_rows()
        if "evaluate" in events:
            self.evaluate()
        for event in events:
            run.event = event
            for name, callback in zip(self.options.names, self.options.callbacks, strict=True):
                if wants(callback, event, run.step) or (
                    event == "step" and self.options.dry_run and not is_bare(callback)
                ):
                    self.call_back(name, callback)
        if "end" not in events:
            self.look_for_watched()
        run.stopped = self.alike.boundary(
            f"step {run.step}", run.stopped, run.state, self.has_changed
        )
        self.has_changed = False
        self.place_extra()
        if "end" in events and run.stopped:
            run.history.mark("stop", run.step, run.stopped)
        if run.stopped:
            self.close_rows()
        self.flush()
        self.bar.show(run.step, run.metrics)
        saver = self.options.saver
        if saver is None:
            return
        saver.poll()
        self.look_for_best("end" in events)
        due = (
            "end" in events
            or saver.due(run.step)
            or ("epoch" in events and self.options.saves_epochs)
        )
        if (due or self.is_best()) and self.saved != (run.step, self.feed.place()):
            self.save()

    def save(self) -> None:
        """All that it takes to go on: state, place of the data, history, what callbacks
        remember.
        """
        run = self.run
        self.saved = run.step, self.feed.place()
        history = run.history.plain()
        newest = {name: run.history.newest(name) or (-1, 0.0) for name in run.history.names}
        numbers = {name: x for name, (step, x) in newest.items() if step == run.step}
        if self.last is not None and self.last[1] == run.step:  # its row is no row of the history
            numbers |= {name: float(x[0]) for name, x in self.last[0]().items()}
        numbers = {name: x for name, x in numbers.items() if np.isfinite(x)}
        parts = self.feed.place(), history, self.memory, numbers, self.script
        self.options.saver._save(run.state, run.step, *parts)

    def is_best(self) -> bool:
        """Whether an evaluation or a callback gave `keep_best` one of its best values at this step.

        Every save has the metrics of training; those of an evaluation would be lost between two
        saves.
        """
        best, run = self.options.saver.keep_best, self.run
        if best is None or best.metric in run.taken:
            return False
        if (run.history.newest(best.metric) or (-1, 0.0))[0] != run.step:
            return False
        if jax.process_count() > 1 and best.metric not in self.agreed:
            # what callbacks log may differ between processes, and all of them save together
            return False
        known = zip(*run.history.series(best.metric), strict=True)
        return run.step in best.of({int(at): {best.metric: x} for at, x in known if np.isfinite(x)})

    def look_for_watched(self) -> None:
        """Raise RowError for a metric that a callback waits for, when there are rows and none has
        it.
        """
        options, names = self.options, self.run.history.names
        is_early = not names or (options.evaluate is not None and self.evaluated < 0)
        if is_early or any(map(callbacks.may_log, options.callbacks)):
            return
        for f in filter(callbacks.is_watching, options.callbacks):
            if f.metric not in names:
                raise RowError(unknown("metric", f"{type(f).__name__}()", f.metric, names))

    def look_for_best(self, is_last: bool) -> None:
        """Raise RowError for a metric of `keep_best` that nobody gives; a warning is enough at the
        end.
        """
        saver, options = self.options.saver, self.options
        text = saver.lacks(self.run.history.names, "fit()")
        if (
            not text
            or (options.evaluate is not None and self.evaluated < 0)
            or not self.run.history.names
        ):
            return
        may_come = options.callbacks and (
            options.evaluate is None or "/" not in saver.keep_best.metric
        )
        if is_last:
            warn(text)
        elif not may_come:
            raise RowError(text)

    def evaluate(self) -> None:
        run = self.run
        assert self.options.evaluate is not None
        with _blame("evaluate", self.options.evaluate, run):
            found = check_row(self.options.evaluate(run.state), "evaluate")
            run.check_own(found, "evaluate")
            found = self.alike.numbers(f"evaluate at step {run.step}", found)
        self.evaluated, self.agreed = run.step, frozenset(found)
        row = join(run.row if self.row_step == run.step else {}, found, "evaluate")
        self.add({name: row[name] for name in found}, run.step)
        run.history.mark("evaluate", run.step)
        self.bar.note(f"step {run.step}: " + ", ".join(progress.summary(found, "{:.6g}".format)))

    def call_back(self, name: str, callback) -> None:
        run = self.run
        run.memory = self.memory.setdefault(name, {})
        before = dict(run.row) if self.row_step == run.step else {}
        if self.row_step != run.step:
            self.flush()
            self.row_step = run.step
        with _blame("callback", callback, run):
            run.is_lent = True
            try:
                state = callback(run)
            finally:
                run.is_lent = False
            if state is not None:
                _check_returned(state, run)
                run.state, self.has_changed = state, True
                self.calls = _calls_of(state)
        if logged := {k: x for k, x in run.row.items() if k not in before}:
            run.history.add(logged, run.step)


@contextlib.contextmanager
def _blame(what: str, fn, run: Run):
    """Say of an exception which function raised it, and when."""
    try:
        yield
    except Exception as error:
        error.add_note(
            f"raised by the {what} {trees.describe_call(fn)} at step {run.step} (epoch {run.epoch})"
        )
        raise


def _check_returned(new, run: Run) -> None:
    """Raise unless a callback returned a state like the one that it got; rules, numbers and freezes
    may differ.
    """
    old = run.state
    if any(map(trees.is_gone, jax.tree.leaves(new))):
        raise StateError(donated("the callback's result"))
    if isinstance(old, TrainState) and isinstance(new, TrainState):
        parts = (new.params, new.model_state), (old.params, old.model_state)
        for name, (mine, yours) in zip(
            ("params", "model_state"), zip(*parts, strict=True), strict=True
        ):
            checks.check_like(name, mine, yours, "A callback keeps the structure of the state.")
        if step_of(new, run.step) != run.step:
            fix = "The history goes forward: state.replace(step=run.step)."
            raise StateError(message("step", "the callback's state", int(new.step), run.step, fix))
        return
    if type(new) is not type(old):
        fix = "Is it a factory? Call it." if callable(new) else "Return a state, or nothing."
        expected = "a TrainState" if isinstance(old, TrainState) else trees.describe(old)
        raise WrongTypeError(message("result", "callback", trees.describe(new), expected, fix))
    checks.check_like("state", new, old, "A callback keeps the structure of the state.")


# --------------------------------------------------------------------------------------------- rows


def form_of(infos) -> tuple:
    """What the infos of two calls have to share to become rows together: structure, and shapes but
    for the steps.
    """
    if isinstance(infos, fused_loop.Infos):
        return jax.tree.structure(infos), *[x.shape[1:] for x in infos.others]
    leaves, treedef = jax.tree.flatten(infos)
    return treedef, *map(np.shape, leaves)


def _is_ready(infos) -> bool:
    """Whether a call is done: on a CPU it often is when it returns."""
    return all(x.is_ready() for x in jax.tree.leaves(infos) if hasattr(x, "is_ready"))


def _hosted(infos):
    """Infos as NumPy arrays."""
    if isinstance(
        infos, fused_loop.Infos
    ):  # as device_get, without its walk over trees: this is done for every call
        return dataclasses.replace(
            infos, table=np.asarray(infos.table), others=[np.asarray(x) for x in infos.others]
        )
    if isinstance(infos, StepInfo):
        infos = infos._replace(numbers=None)
    leaves, treedef = jax.tree.flatten(
        infos
    )  # device_get costs ten times as much for so small ones
    return treedef.unflatten(map(np.asarray, leaves))


def _unpacked(infos: list[Any], counts: list[int]) -> tuple[Any, dict[str, np.ndarray]]:
    """Infos on the host, stacked by steps, and the scheduled hyperparameters of those that came out
    of a loop.
    """
    if isinstance(infos[0], fused_loop.Infos):
        return infos[0].unpacked(list(zip(infos, counts, strict=True)))
    return jax.tree.map(lambda *x: np.stack(x), *infos), {}


def _verdicts(infos, n: int) -> np.ndarray:
    """int32 (n,): what the guards of all steps in these infos said; above 0 where one rejected."""
    parts = jax.tree.leaves(infos, is_leaf=lambda x: isinstance(x, StepInfo))
    found = [
        np.asarray(x.verdict) for x in parts if isinstance(x, StepInfo) and x.verdict is not None
    ]
    if not found:
        return np.zeros(n, np.int32)
    # of a population a call is rejected where all members reject it
    return functools.reduce(
        np.maximum, [x if x.ndim == 1 else np.min(x.reshape(len(x), -1), 1) for x in found]
    )


def _own_names(infos) -> list[str]:
    """The names that the user gave: of metrics, or of a dict's own numbers."""
    if isinstance(infos, StepInfo):
        return list(infos.metrics or {})
    return (
        [name for name in infos if name in (*OF_FIT, "step")] if isinstance(infos, Mapping) else []
    )


def _columns(infos) -> Iterator[tuple[str, Any]]:
    """The numbers of stacked infos, by name: those of a `StepInfo`, of a mapping of them, or one
    alone.
    """
    if isinstance(infos, StepInfo):
        found = {"loss": infos.loss, "grad_norm": infos.grad_norm, "update_norm": infos.update_norm}
        found |= {
            "loss_scale": infos.loss_scale,
            "dropped": infos.dropped,
            "weight": infos.weight,
        } | (infos.metrics or {})
    elif isinstance(infos, Mapping):
        found = {}
        for name, part in infos.items():
            is_more = isinstance(part, StepInfo | Mapping)
            found |= (
                {f"{name}/{inner}": x for inner, x in _columns(part)} if is_more else {name: part}
            )
    else:
        found = {"loss": infos}
    for name, x in found.items():
        if x is None:
            continue
        flat = np.reshape(x, (len(x), -1))
        if np.ndim(x) == 1:
            yield name, x
        elif (
            flat.shape[1] <= MOST_OF_A_METRIC
        ):  # a metric for each class; of more, `evaluate` tells
            yield from ((f"{name}/{i}", column) for i, column in enumerate(flat.T))


def _still(state) -> dict[str, float]:
    """The live hyperparameters that no schedule moves, by flat name."""
    if not isinstance(state, TrainState) or state.numbers is None:
        return {}
    named = state.numbers.named(None)
    return {
        f"{k}/{i}" if np.ndim(x) else k: float(v)
        for k, x in named.items()
        for i, v in enumerate(np.ravel(x))
    }


def _scheduled(numbers, steps) -> dict[str, np.ndarray]:
    """Those that one moves, for a few steps."""
    if numbers is None or not numbers.scheduled:
        return {}
    held, rows = numbers.named(None), [numbers.named(int(step)) for step in steps]
    moved = {
        name: np.array([row[name] for row in rows])
        for name in (rows[0] if rows else {})
        if name not in held
    }
    return dict(column for name, x in moved.items() for column in fused_loop.by_member(name, x))


def step_of(state, default: int) -> int:
    """The clock of a state; of a population, whose members have their own, the calls."""
    if not isinstance(state, TrainState):
        return default
    return int(state.step) if members_of(state) is None else int(np.max(state.calls))


def _calls_of(state) -> int:
    return int(np.max(state.calls)) if isinstance(state, TrainState) else 0


def _rejected_of(state) -> tuple[int, int]:
    if not isinstance(state, TrainState):
        return 0, 0
    return int(np.min(state.rejected)), int(np.min(state.rejected_in_a_row))


__all__ = ["Fit", "Rejected", "Run", "form_of", "step_of"]
