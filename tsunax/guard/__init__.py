"""The guard of a step: one verdict on its numbers, and one choice between two states.

`norms` takes the norm of a tree, `verdict` judges and chooses, `windows` counts the calls, also
calls that only gather a gradient.
"""

from tsunax.guard.norms import (
    SMALL,
    excess,
    global_norm,
    groups_of_leaves,
    is_over_mesh,
    joined,
    square_sums,
    tracing,
)
from tsunax.guard.verdict import (
    GOT,
    POLICIES,
    Report,
    RuleReport,
    choose,
    decide,
    early_or_late,
    explain,
    in_batch,
    is_of_loss,
    judge,
    locate,
    overflowed,
    reports,
    select,
    unless,
)
from tsunax.guard.windows import LIMIT, WindowState, count, emitted, with_gathered

__all__ = [
    "GOT",
    "LIMIT",
    "POLICIES",
    "SMALL",
    "Report",
    "RuleReport",
    "WindowState",
    "choose",
    "count",
    "decide",
    "early_or_late",
    "emitted",
    "excess",
    "explain",
    "global_norm",
    "groups_of_leaves",
    "in_batch",
    "is_of_loss",
    "is_over_mesh",
    "joined",
    "judge",
    "locate",
    "overflowed",
    "reports",
    "select",
    "square_sums",
    "tracing",
    "unless",
    "with_gathered",
]
