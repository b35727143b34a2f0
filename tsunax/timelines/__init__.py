"""Timelines: a run as a line of exact states, which one can visit, explain, compare and branch.

No other module of the package imports it.
"""

from tsunax.timelines.comparing import Comparison
from tsunax.timelines.explaining import Explanation
from tsunax.timelines.line import StepBatch, Timeline, timeline

__all__ = ["Comparison", "Explanation", "StepBatch", "Timeline", "timeline"]
