"""A profile of some steps of a run, by JAX's profiler, with the number of each step."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from tsunax._core import StrPath, checks
from tsunax._core.durable_files import local
from tsunax.errors import HyperparameterError
from tsunax.run.part import Part


@dataclass(eq=False)
class profile(Part):
    """Profile the steps after `steps[0]` up to `steps[1]`, once: `profile((100, 110), "profile")`.

    In plain JAX: `jax.profiler.start_trace(path)` at a boundary after step 100, and `stop_trace()`
    after step 110. xprof and TensorBoard's profile plugin read the directory `path`. Each call of
    the compiled loop is a step there, with the number of the first step that it makes; with
    `fit(steps_per_call=1)` each step is. A run that is resumed between these steps profiles the
    rest, and an exception ends the profile. Each process writes a file for its devices.

    Raises HyperparameterError unless 0 ≤ steps[0] < steps[1], and CheckpointError unless `path` is
    a str or Path; RuntimeError, from JAX, if another profile is running.

    >>> profile((100, 110), "runs/a/profile").steps
    (100, 110)
    """

    steps: tuple[int, int]
    path: StrPath

    def __post_init__(self) -> None:
        first, last = self.steps
        for step in (first, last):
            checks.check_count(step, "profile()", "steps", 0)
        if first >= last:
            raise HyperparameterError("steps", "profile()", self.steps, "(first, last)")
        self._path: Path = Path(local(self.path, "path", "profile()"))
        self._is_running: bool = False

    def next_step(self, step: int) -> float:
        """The next of the two steps beyond `step`."""
        return min((place for place in self.steps if place > step), default=float("inf"))

    def _is_profiled(self, run: Any) -> bool:
        return self.steps[0] <= run.step < self.steps[1]

    def due(self, run: Any, events: Any) -> bool:
        """Whether the profile begins or ends here."""
        return (self._is_profiled(run) and "end" not in events) != self._is_running

    def at(self, run: Any, events: list[str]) -> None:
        """Begin or end the profile."""
        if self._is_running:
            self._stop()
            run.history.mark("profile", run.step, str(self._path))
        elif self._is_profiled(run):
            jax.profiler.start_trace(self._path)
            self._is_running = True

    def end(self, run: Any, error: BaseException | None) -> None:
        """End a profile that an exception cuts short."""
        if self._is_running:
            self._stop()

    def _stop(self) -> None:
        self._is_running = False
        jax.profiler.stop_trace()
