"""Checks of a user's step: does it train correctly with each capability?

    def test_my_step():
        ts.testing.check_accumulation(step, state, batch, n=4)
        ts.testing.check_resume(step, state, data)

Each check runs the step both ways from copies of the state. It returns the largest difference,
relative to the largest element of its leaf, or raises CheckError with the name of the leaf if the
difference is more than the tolerance. Gradients that are rounding noise (of a bias before a
normalization layer) are measured relative to the largest gradient of all; their params are skipped,
because Adam turns the sign of noise into full steps. DataError if every step was rejected.
"""

from tsunax.testing.run_checks import check_fused, check_resume
from tsunax.testing.step_checks import (
    check_accumulation,
    check_coordinates,
    check_donation,
    check_frozen,
    check_population,
    check_precision,
    check_purity,
    check_recompiles,
    check_sharding,
)  # fmt: skip

__all__ = [
    "check_accumulation", "check_coordinates", "check_donation", "check_frozen", "check_fused",
    "check_population", "check_precision", "check_purity", "check_recompiles", "check_resume",
    "check_sharding",
]  # fmt: skip
