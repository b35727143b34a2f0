"""Sums of weight times array, in float32 at least, divided once by the sum of weights."""

import jax
import jax.numpy as jnp

from tsunax._core import PyTree, trees


def zeros(like: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jnp.zeros_like(x, trees.wide_dtype(x)), like)


def add(sums: PyTree, tree: PyTree, weight: jax.Array, take: jax.Array) -> PyTree:
    """The sums with weight times the tree added, if `take` is true."""

    def add_leaf(sum, x):
        return jnp.where(take, sum + weight.astype(sum.dtype) * x.astype(sum.dtype), sum)

    return jax.tree.map(add_leaf, sums, tree)


def divided(sums: PyTree, weight: jax.Array, like: PyTree) -> PyTree:
    """The sums over their weight, in the dtypes of `like`."""
    divide_leaf = lambda sum, x: (sum / weight.astype(sum.dtype)).astype(x.dtype)
    return jax.tree.map(divide_leaf, sums, like)
