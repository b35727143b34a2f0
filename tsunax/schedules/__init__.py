"""Schedules: one number for each step, as values without a clock.

Every function here returns a `Schedule`, a frozen value that is a function of the step; `@schedule`
makes such a function from a formula. The clock is `TrainState.step`. The folder does not
depend on states.
"""

import inspect as _inspect

from tsunax.schedules import catalog, combinators
from tsunax.schedules.catalog import *  # noqa: F403
from tsunax.schedules.combinators import *  # noqa: F403
from tsunax.schedules.schedule_type import Schedule, schedule

__all__ = ["Schedule", "schedule"]
__all__ += catalog.__all__
__all__ += combinators.__all__

_RAISED_ERRORS = (
    "Raises HyperparameterError for a number that is not finite or out of range,\n"
    "and WrongTypeError for another type. A number may itself be a schedule."
)
for _factory in (globals()[_name] for _name in __all__ if hasattr(globals()[_name], "__wrapped__")):
    _factory.__doc__ = f"{_inspect.getdoc(_factory)}\n\n{_RAISED_ERRORS}\n"


def __dir__() -> list[str]:
    return sorted(__all__)
