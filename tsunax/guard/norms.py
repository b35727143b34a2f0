"""L2 norms of trees, in float32 for leaves of any dtype."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownLambdaType=false
import contextlib
import contextvars
import functools
from collections.abc import Generator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from tsunax._core import PyTree

# A kernel costs a CPU some microseconds to start, also if it adds few numbers, so that the norm of
# six small leaves would cost a small step as much as its gradient. Leaves of up to `SMALL` elements
# are therefore copied into one vector, at most 64 KiB each, and summed by one reduction. Larger
# leaves are summed without a copy. So are all leaves of a program over a mesh: to join shards on
# different devices, the devices would have to communicate.

SMALL = 1 << 14  # elements


_over_mesh: contextvars.ContextVar[bool] = contextvars.ContextVar("_over_mesh", default=False)


@contextlib.contextmanager
def tracing(over_mesh: bool) -> Generator[None, None, None]:
    """A context that declares whether the program traced in it runs over a mesh."""
    token = _over_mesh.set(over_mesh)
    try:
        yield
    finally:
        _over_mesh.reset(token)


def is_over_mesh(x: ArrayLike) -> bool:
    """Whether an array belongs to a program over a mesh, by its type or by the context."""
    return _over_mesh.get() or jax.typeof(x).sharding.mesh.size > 1


def _square_sum(x: ArrayLike) -> jax.Array:
    x = jnp.asarray(x)
    if x.dtype not in (jnp.float32, jnp.float64, jnp.complex64, jnp.complex128):
        x = x.astype(jnp.float32)
    squares = jnp.square(x.real)
    return jnp.sum(squares + jnp.square(x.imag) if jnp.iscomplexobj(x) else squares)


def square_sums(tree: PyTree) -> list[jax.Array]:
    """sum(|x|²) of each leaf: float64 for float64 and complex128, float32 for other dtypes."""
    return [_square_sum(leaf) for leaf in jax.tree.leaves(tree)]


def groups_of_leaves(leaves: list[Any]) -> list[list[int]]:
    """The places of leaves to join: all small leaves of a dtype together, each large leaf alone."""
    groups: dict[Any, list[int]] = {}
    for i, x in enumerate(leaves):
        is_small = x.size <= SMALL and not is_over_mesh(x)
        groups.setdefault(x.dtype if is_small else i, []).append(i)
    return list(groups.values())


def joined(leaves: list[Any], groups: list[list[int]]) -> list[jax.Array]:
    """One vector for each group of leaves; a leaf that is alone is returned."""
    join = lambda xs: jnp.concatenate([x.ravel() for x in xs]) if len(xs) > 1 else xs[0]
    return [join([leaves[i] for i in group]) for group in groups]


def _joined(tree: PyTree) -> list[jax.Array]:
    leaves = [jnp.asarray(x) for x in jax.tree.leaves(tree)]
    return joined(leaves, groups_of_leaves(leaves))


def global_norm(tree: PyTree, *, by_leaf: bool = False) -> jax.Array:
    """sqrt(sum over leaves of sum(|x|²)), as `optax.tree.norm`; with `by_leaf` also its last bit.

    The result is float64 if any leaf is, else float32.
    """
    sums = square_sums(tree if by_leaf else _joined(tree)) or [jnp.zeros((), jnp.float32)]
    dtype = np.result_type(*(s.dtype for s in sums))
    return jnp.sqrt(sum(s.astype(dtype) for s in sums))


def excess(tree: PyTree) -> jax.Array:
    """0 if every element has a finite square in its dtype, else NaN if one is NaN, or infinity.

    One reduction has two results, because XLA:CPU stores the operand of a reduction with one.
    """
    merge_flags = lambda a, b: (a[0] | b[0], a[1] | b[1])
    flags = []
    for x in _joined(tree):
        operands = ~(jnp.abs(x) < float(jnp.finfo(x.dtype).max) ** 0.5), x != x
        flags.append(jax.lax.reduce(operands, (False, False), merge_flags, range(x.ndim)))
    is_large, is_nan = functools.reduce(merge_flags, flags)
    return jnp.where(is_large, jnp.where(is_nan, jnp.nan, jnp.inf), 0.0).astype(jnp.float32)
