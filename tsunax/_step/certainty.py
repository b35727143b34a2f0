"""Whether loss and gradient are enough for the verdict on a step, or its update is needed, too."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownLambdaType=false
from typing import Any

import jax
import jax.numpy as jnp

from tsunax import guard
from tsunax._core import PyTree, Scalar, trees
from tsunax.rules import number_table, update_bounds
from tsunax.state import TrainState, master_params, trained_part

# {dtype: a real dtype with the same range}
RANGES = {
    **{name: name for name in ("float32", "float64")},
    **{"bfloat16": "float32", "complex64": "float32", "complex128": "float64"},
}


def certainty(state: TrainState, grads: PyTree, weight: Scalar) -> tuple[Any, str]:
    """Whether a finite gradient makes a finite update, or `(None, reason)` if that is not known.

    True, or a traced bool if it depends on live numbers.
    """
    inputs = jax.tree.leaves((trained_part(state), master_params(state), grads, state.opt_state))
    kinds = {RANGES.get(str(x.dtype), "") for x in inputs if trees.is_inexact(x)}
    if len(kinds) > 1 or "" in kinds:
        return None, "float16, or dtypes of several ranges"
    opt_state = number_table.join_numbers(state.opt_state, state.numbers, state.step)
    is_complex = any(map(jnp.iscomplexobj, inputs))
    norm, (kind,) = lambda: guard.global_norm(master_params(state)), kinds
    try:
        is_certain = update_bounds.certain(
            state.plan.update, opt_state, kind, is_complex, weight, norm
        )
    except update_bounds.Undeclared as error:
        return None, f"{error} may make an infinite update of a finite gradient"
    if not isinstance(is_certain, bool):
        is_spread = any(map(guard.is_over_mesh, inputs))
        return (None, "live numbers, over a mesh") if is_spread else (is_certain, "")
    return (True, "") if is_certain else (None, "its numbers, such as an eps of 0")
