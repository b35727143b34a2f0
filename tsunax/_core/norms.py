"""Norms over trees.

A kernel costs a CPU some microseconds to start, whatever it adds up, so that the norm of six small
leaves would cost a small step as much as its gradient. Leaves of up to `SMALL` elements are
therefore summed as one vector: a copy of at most 64 KiB each, for one reduction instead of one per
leaf. Larger leaves are summed where they lie. So are all leaves of a program over a mesh: to join
shards that lie on different devices, the devices would have to talk.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tsunax._core import trees

SMALL = 1 << 14  # elements

_apart: contextvars.ContextVar[bool] = contextvars.ContextVar("_apart", default=False)


@contextlib.contextmanager
def leaves_apart(apart: bool) -> Iterator[None]:
    """Inside it, each leaf is summed by itself: for programs over a mesh."""
    before = _apart.set(apart)
    try:
        yield
    finally:
        _apart.reset(before)


def is_apart(x: Any) -> bool:
    """Whether an array's computations are part of a program over a mesh, as far as JAX tells."""
    return _apart.get() or bool(jax.typeof(x).sharding.mesh.axis_names)


def global_norm(tree: Any) -> jax.Array:
    """sqrt(sum over leaves of sum(|x|²)) in float32 (float64 if any leaf is): `optax.tree.norm`."""
    large, small = [], defaultdict(list)
    for x in map(jnp.asarray, jax.tree.leaves(tree)):
        if x.size > SMALL or is_apart(x):
            large.append(x)
        else:
            small[x.dtype].append(x.ravel())
    joined = [jnp.concatenate(xs) if len(xs) > 1 else xs[0] for xs in small.values()]
    sums = trees.square_sums(large + joined) or [jnp.zeros((), jnp.float32)]
    dtype = np.result_type(*(s.dtype for s in sums))
    return jnp.sqrt(sum(s.astype(dtype) for s in sums))
