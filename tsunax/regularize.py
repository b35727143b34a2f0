"""Penalties on parameters, to add to a loss: L1, L2, and both.

Each is a plain function of the params, over the leaves that a pattern selects, without its factor:
`loss + 1e-4 * l2(params)`. The rules `ts.rules.add_decayed_weights` and `ts.rules.sign_decay`,
first in a chain, add the same gradient (also of complex leaves), without a penalty to compute and
with a live factor.
"""

# pyright: reportUnknownMemberType=false

from typing import Any

import jax
import jax.numpy as jnp

from tsunax._core import PyTree, Scalar, Where, patterns, trees
from tsunax.errors import PatternError
from tsunax.guard import square_sums

__all__ = ["elastic", "l1", "l2"]


def _selected(params: PyTree, where: Where, place: str) -> list[Any]:
    """The float leaves that `where` selects, an array at two paths once."""
    selected = trees.take(params, patterns.select(where, params, place))
    leaves = [leaf for leaf in selected if trees.is_inexact(leaf)]
    if not leaves:
        raise PatternError(
            "where",
            place,
            got=f"{patterns.where_text(where)}, which selects no floats",
            expected="at least one",
        )
    # Only arrays are compared by identity: equal Python floats may be one object.
    return list({id(x) if trees.is_array(x) else -i: x for i, x in enumerate(leaves, 1)}.values())


def _magnitudes(x: jax.Array) -> jax.Array:
    x = jnp.asarray(x)
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    # This is |x| with the gradient 0 at 0. jnp.abs has the gradient 1 there.
    return jnp.sum(jnp.real(x * jnp.conj(jax.lax.stop_gradient(jnp.sign(x)))))


def l1(params: PyTree, where: Where = "**") -> jax.Array:
    """`Σ |w|` over the selected leaves: an f32 scalar, with the gradient `sign(w)`, 0 at 0.

    `where` is a pattern, a list with `!`, a predicate or a bool tree. Leaves that are not float are
    skipped. One array object at two paths counts once, for example a tie in the loss function
    (`{**p, "head": p["embed"]}`). The params of a state and the arguments of `jit` and `grad` are
    separate arrays for each path.

    In the loss, `factor * l1(params, where)` has the gradient of `sign_decay(factor, where)` first
    in the chain. Raises PatternError for a pattern that matches nothing, or no float.

    >>> params = {"w": jnp.array([3.0, -4.0]), "bias": jnp.array([100.0])}
    >>> l1(params, "w")
    Array(7., dtype=float32)
    """
    return sum(map(_magnitudes, _selected(params, where, "l1()")), start=jnp.float32(0))


def l2(params: PyTree, where: Where = "**") -> jax.Array:
    """`½ Σ w²` over the selected leaves: an f32 scalar, with the gradient `w`; otherwise as `l1`.

    In the loss, `factor * l2(params, where)` has the gradient of
    `add_decayed_weights(factor, where)` first in the chain. Raises PatternError as `l1`.

    >>> params = {"w": jnp.array([3.0, -4.0]), "bias": jnp.array([100.0])}
    >>> l2(params, ["**", "!**/bias"]), jax.grad(l2)(params)["w"]
    (Array(12.5, dtype=float32), Array([ 3., -4.], dtype=float32))
    """
    return 0.5 * sum(square_sums(_selected(params, where, "l2()")), start=jnp.float32(0))


def elastic(params: PyTree, where: Where = "**", *, l1_ratio: Scalar = 0.5) -> jax.Array:
    """`r · Σ |w| + (1 - r) · ½ Σ w²`: the elastic net's penalty; otherwise as `l1`.

    The sums are over the leaves of `params` that `where` selects; PatternError if there are none.
    (Zou and Hastie, 2005.) In the loss, `factor * elastic(params, l1_ratio=r)` has the gradient of
    `chain(add_decayed_weights((1 - r) * factor), sign_decay(r * factor), ...)`. `r` is `l1_ratio`
    and may be traced.

    >>> elastic({"w": jnp.array([3.0, -4.0])}, l1_ratio=0.1)
    Array(11.95, dtype=float32)
    """
    return l1_ratio * l1(params, where) + (1 - l1_ratio) * l2(params, where)
