"""How often a run does a task: by steps, by epochs, or by the clock.

    500                      at the multiples of 500 steps
    "epoch", "2 epochs"      after every epoch, after every second epoch
    "30 s", "10 minutes"     when this time has passed since the task was done last
    (500, "10 minutes")      whichever comes first

A `Cadence` is such a value, parsed. A `Timer` measures its duration.
"""

import datetime
import math
import re
import time
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from tsunax._core import checks, trees
from tsunax.errors import HyperparameterError, WrongTypeError

When: TypeAlias = int | str | datetime.timedelta | tuple[Any, ...]

_EPOCHS = re.compile(r"(?:([1-9]\d*) )?epochs?")
_DURATION = re.compile(r"(\d+(?:\.\d+)?) ?(s|sec|seconds?|min|minutes?|h|hours?|d|days?|weeks?)")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}  # by the first letter of a unit
_FORMS = "steps (an int), '2 epochs', '30 s', '10 minutes', '2 h', '1 day', or a tuple of these"


@dataclass(frozen=True)
class Cadence:
    """The multiples of steps and of epochs, and a number of seconds after the last time."""

    steps: tuple[int, ...] = ()
    epochs: tuple[int, ...] = ()
    seconds: float = math.inf

    def next_step(self, step: int) -> float:
        """The first step beyond `step`; inf for none."""
        return min([(step // n + 1) * n for n in self.steps], default=math.inf)

    def is_at_step(self, step: int) -> bool:
        return step > 0 and any(step % n == 0 for n in self.steps)

    def is_at_epoch(self, epoch: int) -> bool:
        return any(epoch % n == 0 for n in self.epochs)


@dataclass(eq=False)
class Timer:
    """Measures whether a duration has passed since a task was done last, or since it was made."""

    seconds: float
    #: Whether the task is due at this boundary: the same on all processes, unlike their clocks.
    is_due: bool = False
    start: float = field(default_factory=lambda: time.monotonic())

    def is_late(self) -> bool:
        return time.monotonic() - self.start >= self.seconds

    def restart(self) -> None:
        self.start = time.monotonic()


def seconds_in(duration: str | datetime.timedelta) -> float:
    """The seconds of a duration; 0 for another text."""
    if isinstance(duration, datetime.timedelta):
        return duration.total_seconds()
    match = _DURATION.fullmatch(duration)
    return float(match[1]) * _SECONDS[match[2][0]] if match else 0.0


def cadence_of(when: When, where: str, name: str) -> Cadence:
    """Parse an argument; () is never. Raises WrongTypeError or HyperparameterError."""
    if isinstance(when, tuple):
        cadences = [cadence_of(x, where, name) for x in when]
        return Cadence(
            steps=tuple(n for cadence in cadences for n in cadence.steps),
            epochs=tuple(n for cadence in cadences for n in cadence.epochs),
            seconds=min([cadence.seconds for cadence in cadences], default=math.inf),
        )
    if hasattr(when, "__index__") and not isinstance(when, bool | np.timedelta64):
        return Cadence(steps=(checks.check_count(when, where, name),))
    if not isinstance(when, str | datetime.timedelta):
        raise WrongTypeError(name, where, trees.describe(when), _FORMS)
    if isinstance(when, str) and (match := _EPOCHS.fullmatch(when)):
        return Cadence(epochs=(int(match[1] or 1),))
    if (seconds := seconds_in(when)) <= 0:
        fix = "'m' may be minutes or months: write 'min'." if repr(when).endswith("m'") else ""
        raise HyperparameterError(name, where, repr(when), _FORMS, fix)
    return Cadence(seconds=seconds)
