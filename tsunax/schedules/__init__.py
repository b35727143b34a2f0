"""Schedules: one number for each step, as values without a clock.

Every function here returns a `Schedule`, a frozen value that is a function of the step; `@schedule`
makes such a function from a formula. The clock is `TrainState.step`; nothing here knows states.
"""

from tsunax.schedules import catalog, combinators
from tsunax.schedules.catalog import *  # noqa: F403
from tsunax.schedules.combinators import *  # noqa: F403
from tsunax.schedules.schedule_type import Schedule, schedule

__all__ = ["Schedule", "schedule"]
__all__ += catalog.__all__
__all__ += combinators.__all__


def __dir__() -> list[str]:
    return sorted(__all__)
