"""Whether a state is finite, so that its steps may judge loss and gradient alone (`updating.py`).

Such a step makes a finite state from a finite state. Numbers that enter a state in other ways are
checked here: in `restore` and `migrate`, and before the first call of a step.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownLambdaType=false
import functools
import re

import jax
import numpy as np

from tsunax._core import Extra, PyTree, checks, trees
from tsunax._state import averages_of
from tsunax._step.loss_fn import GradientOptions
from tsunax.errors import StateError, warn
from tsunax.state import TrainState, master_params, trained_part

# Limits of moments, by dtype; 2^100 by default. Gradients below 1e30 make no larger moment, and
# updates of smaller moments are finite if eps is at least 1e-8: 2^100 / 2^-27 = 2^127.
LARGEST = {"float64": 2.0**900, "complex128": 2.0**900}
# Sums of squares have no limit: they divide an update, so that large sums make it small. Gradients
# of 1e15 have squares above 2^100.
DIVISOR = re.compile(r"\.(nu|sum_of_squares)\b")
FIX = (
    "Steps do not look at updates that are made of them: take an older checkpoint, or start the "
    "optimizer anew, restore(ts.setup(...), params_only=True). train_step(on_nonfinite='ignore') "
    "goes on."
)


def _judges_gradient_alone(state: TrainState) -> bool:
    """Whether a step of this state applies updates without judging them."""
    from tsunax._step.updating import certainty_of

    answers: list[bool] = []
    is_single = np.ndim(state.clock) == 1  # the clock of a population has an axis of members
    look = lambda s: answers.append(certainty_of(s, trained_part(s), None).is_certain is not None)
    jax.eval_shape(look if is_single else jax.vmap(look), state)
    return answers[0]


def _fault(state: TrainState) -> StateError | None:
    """The error for the first leaf with which finite gradients make NaN."""
    averages = {name: average.params for name, average in averages_of(state).items()}
    inputs_of_rule = {"params": master_params(state), "opt_state": state.opt_state}
    # This traces the rule, so it is called only if there is a fault.
    steps_overlook_fault = functools.cache(lambda: _judges_gradient_alone(state))
    for name, tree in (averages | inputs_of_rule).items():
        for place, x in trees.leaves_at(f"state.{name}", tree):
            if not trees.is_inexact(x) or isinstance(x, jax.ShapeDtypeStruct):
                continue
            is_moment = name == "opt_state" and not DIVISOR.search(place)
            limit = LARGEST.get(str(x.dtype), 2.0**100) if is_moment else np.inf
            count = int(checks.count_beyond(x, limit))
            # No step judges averages. Moments and params count if no step judges the update.
            if count and (name in averages or steps_overlook_fault()):
                got = f"{count} of {np.size(x)} numbers NaN or not below {limit:.0e}"
                return StateError("leaf", place, got, "finite numbers", FIX)
    return None


def warn_if_not_finite(state: TrainState, where: str) -> None:
    """Warn of the first leaf with numbers that make an applied step write NaN."""
    if not trees.is_tracing() and (fault := _fault(state)):
        warn(f"{where}: {fault}")


class FirstLook:
    """Before the first call of a step: the state has to be finite, and the loss a mean over rows.

    Raises StateError for a state that is not finite, and warns of a loss that mixes rows. Some
    members of a population may have failed, so a population gets a warning, too. Later calls only
    read `pending`.
    """

    def __init__(self, options: GradientOptions, *, looks_at_state: bool) -> None:
        self._options, self._looks_at_state, self.pending = options, looks_at_state, True

    def __call__(self, state: TrainState, batch: PyTree, extra: Extra) -> None:
        if self._looks_at_state and np.ndim(state.clock) == 2:  # a population
            warn_if_not_finite(state, "step()")
        elif self._looks_at_state and not trees.is_tracing() and (fault := _fault(state)):
            raise fault
        self.pending = False
        if self._options.is_cut and self._options.check_rows:
            from tsunax._step.row_probe import warn_of_mixed_rows

            warn_of_mixed_rows(self._options, state, batch, extra)
