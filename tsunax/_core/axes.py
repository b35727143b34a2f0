"""Named device axes in `jax.shard_map` and `jax.pmap`: without a mean over them states drift."""

from typing import Any

import jax
import jax.numpy as jnp

from tsunax._core import checks
from tsunax._core.trees import manual_axes
from tsunax.errors import StateError

Axes = tuple[str, ...]


def around(axis_name: Any, where: str) -> Axes:
    """The axes over which to take means. Raises StateError for a forgotten or an absent one."""
    given = checks.as_axes(axis_name, where)
    if given is None:
        if found := manual_axes():
            unnamed = not all(isinstance(name, str) and not name.startswith("_") for name in found)
            names = "i" if unnamed else found[0] if len(found) == 1 else found
            inside = "jax.pmap, whose axis has no name either" if unnamed else f"axis {names!r}"
            how = f"{where[:-1]}..., axis_name={names!r}) for the mean, () for none."
            fix = f"Each device has rows of its own: {how}"
            raise StateError("axis_name", where, f"none inside of {inside}", "one", fix)
        return ()
    for name in given:
        try:
            jax.lax.axis_index(name)
        except NameError:
            expected, fix = "an axis that is around it", "on sharded arrays leave it out."
            fix = f"Call it inside jax.shard_map or jax.pmap over that axis; {fix}"
            raise StateError("axis_name", where, repr(name), expected, fix) from None
    return given


def varying(x):
    """The axes inside `shard_map` along which devices may have different values, if JAX tells."""
    kind = jax.typeof(x)
    return kind.vma if hasattr(kind, "vma") else kind.manual_axis_type.varying


def vary(tree, axes: Axes):
    """The tree marked as varying over devices, so that JAX does not sum its gradients itself."""

    def one(x):
        if not (new := tuple(name for name in axes if name not in varying(x))):
            return x
        if hasattr(jax.lax, "pcast"):
            return jax.lax.pcast(x, new, to="varying")
        return getattr(jax.lax, "pvary")(x, new)  # noqa: B009, jax 0.7's name for it

    return jax.tree.map(one, tree) if axes else tree


def gathered(tree, axes: Axes):
    """The values of all devices along a new first axis, by a sum: JAX types it as replicated."""
    n, here = jax.lax.psum(1, axes), jax.lax.axis_index(axes)

    def one(x):
        x = jnp.asarray(x)
        at = (jnp.arange(n) == here).reshape(n, *[1] * x.ndim)
        mine = jnp.where(at, x[None], jnp.zeros_like(x[None]))
        summed = jnp.int32 if x.dtype == jnp.bool_ else x.dtype
        return jax.lax.psum(mine.astype(summed), axes).astype(x.dtype)

    return jax.tree.map(one, vary(tree, axes))


def mean(tree, axes: Axes):
    """The mean over devices of inexact arrays, the maximum of others."""
    is_inexact = lambda x: jnp.issubdtype(x.dtype, jnp.inexact)
    one = lambda x: (jax.lax.pmean if is_inexact(x) else jax.lax.pmax)(x, axes)
    return jax.tree.map(one, vary(tree, axes))
