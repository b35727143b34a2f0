"""Named device axes in `jax.shard_map` and `jax.pmap`: without a mean over them states drift."""

import jax
import jax.numpy as jnp
from jax._src import core

from tsunax._core import AxisName
from tsunax.errors import StateError

Axes = tuple[str, ...]


def manual_axes() -> tuple:
    """The axes of devices inside `shard_map` or `pmap`; before JAX 0.8 also named axes of vmap."""
    axes = tuple(getattr(jax.sharding.get_abstract_mesh(), "manual_axes", ()))
    if axes or jax.__version_info__ >= (0, 8):
        return axes
    # Before JAX 0.8, pmap is no shard_map, and looks like a vmap with a named axis.
    return tuple(core.get_axis_env().axis_sizes)


def checked_axes(axis_name: AxisName, where: str) -> Axes:
    """The axes over which to take means.

    Raises StateError for a forgotten axis, and JAX raises NameError for an absent one.
    """
    axes = (axis_name,) if isinstance(axis_name, str) else axis_name
    if axes is None and (enclosing_axes := manual_axes()):
        got = f"none inside of the axes {enclosing_axes}"
        fix = "Each device has rows of its own: name the axis for their mean, or give () for none."
        raise StateError("axis_name", where, got, "one", fix)
    for name in axes or ():
        jax.lax.axis_index(name)
    return tuple(axes or ())


def varying(x):
    """The axes inside `shard_map` along which the values of devices may differ."""
    kind = jax.typeof(x)
    return kind.vma if hasattr(kind, "vma") else kind.manual_axis_type.varying


def vary(tree, axes: Axes):
    """The tree marked as varying over devices, so that JAX does not sum its gradients itself.

    A named axis of vmap has no such mark.
    """
    axes = tuple(name for name in axes if name in manual_axes())

    def vary_leaf(x):
        if not (missing_axes := tuple(name for name in axes if name not in varying(x))):
            return x
        if hasattr(jax.lax, "pcast"):
            return jax.lax.pcast(x, missing_axes, to="varying")
        return getattr(jax.lax, "pvary")(x, missing_axes)  # noqa: B009, jax 0.7's name for it

    return jax.tree.map(vary_leaf, tree) if axes else tree


def gathered(tree, axes: Axes):
    """The values of all devices along a new first axis, by a sum: JAX types it as replicated."""
    n_devices, device_index = jax.lax.psum(1, axes), jax.lax.axis_index(axes)

    def gather_leaf(x):
        x = jnp.asarray(x)
        is_own_row = (jnp.arange(n_devices) == device_index).reshape(n_devices, *[1] * x.ndim)
        own_row = jnp.where(is_own_row, x[None], jnp.zeros_like(x[None]))
        sum_dtype = jnp.int32 if x.dtype == jnp.bool_ else x.dtype
        return jax.lax.psum(own_row.astype(sum_dtype), axes).astype(x.dtype)

    return jax.tree.map(gather_leaf, vary(tree, axes))


def mean(tree, axes: Axes):
    """The mean over devices of inexact arrays, the maximum of other arrays."""
    is_inexact = lambda x: jnp.issubdtype(x.dtype, jnp.inexact)
    mean_of_leaf = lambda x: (jax.lax.pmean if is_inexact(x) else jax.lax.pmax)(x, axes)
    return jax.tree.map(mean_of_leaf, vary(tree, axes))
