"""Calls of the compiled loop of a step: takes, compares, dispatches batches. Reads no infos.

`fit`, `iterate` and `run_epoch` are loops over the calls that a `Caller` makes.
"""

import collections
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from tsunax._core import PyTree, placement, processes
from tsunax.program import TrainStep
from tsunax.run import fused_loop
from tsunax.run.chunks import Chunk
from tsunax.run.feed import Feed

RECENT_READS = 16  # the pace is measured over this many reads


class Call(NamedTuple):
    """A call that was dispatched: its batches, and its infos, which may not be computed yet."""

    chunk: Chunk
    infos: Any


@dataclass
class Trainee:
    """An object with a state that each call replaces, as a `Run` has it."""

    state: PyTree
    step: int = 0  # steps with infos that were read


class Pace:
    """The seconds per step over the last reads. Compiling and boundaries are left out."""

    def __init__(self) -> None:
        self.step_seconds: float = math.inf  # inf: unknown
        self.read_time: float = 0.0  # when calls were read last; 0 before the first call
        self.steps_read: int = 0
        self.gathered_calls: float = 0.0  # calls that only gathered a gradient (`rules.accumulate`)
        self._excluded_seconds: float = 0.0
        self._excluded_steps: int = 0
        # (clock without excluded seconds, steps done) at the last reads
        self._timings: collections.deque[tuple[float, int]] = collections.deque(maxlen=RECENT_READS)

    @property
    def is_known(self) -> bool:
        return self.step_seconds < math.inf

    def exclude(self, seconds: float, steps: int = 0) -> None:
        """Leave out these seconds, and the steps that were done in them."""
        self._excluded_seconds += seconds
        self._excluded_steps += steps

    def measure(self, steps: int, unread_steps: int) -> None:
        """Count a read of `steps`, when `unread_steps` more are done."""
        self.read_time = time.perf_counter()
        self.steps_read += steps
        steps_done = self.steps_read + unread_steps - self._excluded_steps
        clock = self.read_time - self._excluded_seconds
        # not at the first read, because the first call compiles
        if self._timings and steps_done > self._timings[0][1]:
            clock_before, steps_before = self._timings[0]
            self.step_seconds = max(clock - clock_before, 1e-9) / (steps_done - steps_before)
        self._timings.append((clock, steps_done))

    def rates(self, examples: float | None) -> dict[str, float]:
        """Applied steps and examples per second, of `examples` in a step; {} if unknown."""
        if not self.is_known:
            return {}
        counts = {"steps": 1 - self.gathered_calls / self.steps_read}
        if examples is not None:
            counts["examples"] = examples
        return {f"{name}_per_second": n / self.step_seconds for name, n in counts.items()}


class Caller:
    """Calls a step with the batches of a feed, for the state of a trainee."""

    def __init__(
        self,
        loop: fused_loop.Fused,
        feed: Feed,
        agreement: processes.Unanimous,
        trainee: Any,
        extra: Mapping[str, Any],
    ) -> None:
        self.loop: fused_loop.Fused = loop
        self.feed: Feed = feed
        self.agreement: processes.Unanimous = agreement
        self.trainee: Any = trainee
        self.unread: list[Call] = []  # calls with infos that were not read yet
        self._user_extra: dict[str, Any] | None = None  # `extra` before it was placed
        self.extra: dict[str, Any] = {}
        self.place_extra(extra)

    def place_extra(self, extra: Mapping[str, Any]) -> None:
        """Put the step's arguments on the state's devices, again if a callback changed them."""
        new, old = dict(extra), self._user_extra
        if old is None or new.keys() != old.keys() or any(new[k] is not old[k] for k in new):
            placed = placement.place_extra(new, self.trainee.state)
            self._user_extra, self.extra = new, placed

    def take(self, n: int, steps_done: int) -> list[Chunk]:
        """The batches of a call after `steps_done` steps, n at most; [] at the end of an epoch."""
        chunk = self.feed.take(n, self.trainee.state, steps_done)
        self.agreement.chunk(steps_done + 1, chunk, self.feed.source)
        return [] if chunk is None else [chunk]

    def calls(self, next_chunks: Callable[[], list[Chunk] | None]) -> Iterator[list[Call]]:
        """Dispatch calls with `next_chunks()` until that is None. A call returns at once.

        Yields the calls of one turn, mostly a single call; [] at the end of an epoch.
        """
        while (chunks := next_chunks()) is not None:
            count = len(self.unread)
            if chunks:
                self._dispatch(chunks)
            yield self.unread[count:]

    def _dispatch(self, chunks: list[Chunk]) -> None:
        first, state, extra = chunks[0], self.trainee.state, self.extra
        # A profile numbers each call by its first step.
        step = self.trainee.step + self.ahead + 1
        annotation = functools.partial(jax.profiler.StepTraceAnnotation, "train")
        if first.n is None:  # the step is called as it is
            if isinstance(train_step := self.loop.step, TrainStep):
                trace = functools.partial(train_step.trace, **extra)
                self.agreement.program(trace, state, first.feed.batch)
            with annotation(step_num=step):
                self.trainee.state, infos = self.loop.call_step(state, first.feed.batch, extra)
            self.unread.append(Call(first, infos))
            return
        self.agreement.program(self.loop.trace, state, first.feed, first.n, extra)
        calls = fused_loop.Calls(self.loop, state, extra)
        try:
            for chunk in chunks:
                with annotation(step_num=step):
                    self.unread.append(Call(chunk, calls(chunk.feed, chunk.n)))
                step += chunk.steps
        finally:  # earlier calls count, also if a later one raises
            self.trainee.state = calls.state

    def read(self, leave: int = 0) -> list[Call]:
        """All unread calls but the last `leave`, to be read now."""
        count = len(self.unread) - leave
        calls, self.unread = self.unread[:count], self.unread[count:]
        return calls

    @property
    def ahead(self) -> int:
        """Steps of the unread calls."""
        return sum(call.chunk.steps for call in self.unread)
