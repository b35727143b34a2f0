"""Insight: the cost of a step, the origin of its NaN, and which settings and rates fit.

No other module of the package imports it.
"""

from tsunax.insight.batch_size import SizeReport, SizeTrial, find_accumulation, find_batch_size
from tsunax.insight.description import Description, describe, measured_peak
from tsunax.insight.learning_rate import RangeTest, find_learning_rate
from tsunax.insight.planning import Peaks, Plan, PlanRow, plan
from tsunax.insight.replaying import ReplayReport, replay
from tsunax.insight.usage import Usage, usage

__all__ = [
    "Description", "Peaks", "Plan", "PlanRow", "RangeTest", "ReplayReport", "SizeReport",
    "SizeTrial", "Usage", "describe", "find_accumulation", "find_batch_size", "find_learning_rate",
    "measured_peak", "plan", "replay", "usage",
]  # fmt: skip
