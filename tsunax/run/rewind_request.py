"""The request of a callback to go back to an earlier checkpoint: `run.rewind`."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import Any

from tsunax._core import checks, trees
from tsunax.checkpoints import rewinds
from tsunax.errors import HyperparameterError, StateError
from tsunax.hyper import adjust, hyperparams
from tsunax.states import COUNTED


@dataclass(frozen=True)
class Rewind:
    """A request to go back."""

    back: int
    factor: float
    data: str

    def __post_init__(self) -> None:
        checks.check_count(self.back, "run.rewind()", "back")
        if not (isinstance(self.factor, int | float) and 0 < self.factor < math.inf):
            raise HyperparameterError("factor", "run.rewind()", self.factor, "a number > 0")
        checks.check_choice(self.data, "run.rewind()", "data", ("skip", "repeat"))

    def check(self, run: Any) -> None:
        """Raise unless this run can go back now. See `Run.rewind`."""
        if not isinstance(run.state, COUNTED):
            raise StateError(
                "state",
                "run.rewind()",
                got=trees.describe(run.state),
                expected="a TrainState or States",
            )
        rewinds.check_can_rewind(run.saver, run.step)
        slowed(run.state, self.factor)

    def dump(self) -> str:
        """The request as a text for other processes; `parse` reads it."""
        return json.dumps(dataclasses.astuple(self))

    @classmethod
    def parse(cls, text: str) -> Rewind:
        return cls(*json.loads(text))


def slowed(state: Any, factor: float) -> Any:
    """The state with `factor` times its learning rates. HyperparameterError if it has none."""
    if factor == 1:
        return state
    numbers = hyperparams(state)
    names = [name for name in numbers if name.partition("@")[0].endswith("learning_rate")]
    if not names:
        raise HyperparameterError(
            "rule",
            "run.rewind()",
            got=f"{', '.join(numbers) or 'no live numbers'}",
            expected="a live learning rate",
            fix="Or give factor=1.",
        )
    return adjust(state, **{name: numbers[name] * factor for name in names})
