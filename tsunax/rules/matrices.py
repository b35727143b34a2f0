"""Muon over a mesh: each device computes matrices of its own, and no product is computed twice.

Without this, XLA cuts each product of the Newton-Schulz iteration if the params are cut, and
gathers its factors; if they are whole, every device computes all of it.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax.contrib
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers, MuonState, scale_by_muon

from tsunax._core import Extra, Function, PyTree


def map_matrices(f: Function, stacks: Sequence[jax.Array], mesh: Mesh) -> list[jax.Array]:
    """`[jax.vmap(f)(x) for x in stacks]`, for which each device of a mesh computes its share.

    `f` is a function of one matrix, such as a decomposition, and stacks have the shape (k, rows,
    columns). Those of equal shape are joined: of k matrices each of n devices computes ceil(k / n).
    A matrix moves twice, to its device and back, however many products `f` needs.
    """
    owners, kinds = P(mesh.axis_names), defaultdict[Any, list[int]](list)
    specs = {"mesh": mesh, "in_specs": owners, "out_specs": owners, "check_vma": False}
    for i, x in enumerate(stacks):
        kinds[x.shape[1:], x.dtype].append(i)
    found, free = list(stacks), P.UNCONSTRAINED
    at = lambda x, *spec: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(None, *spec)))
    for (shape, _), places in kinds.items():
        ends = np.cumsum([len(found[i]) for i in places])
        fill = jnp.broadcast_to(found[places[0]][:1], (-ends[-1] % mesh.size, *shape))  # equal work
        # joined and split while the matrices themselves are cut: XLA would gather all of them
        stack = at(jnp.concatenate([*(found[i] for i in places), fill]), free, free)
        longest = max((n for n in shape if n % mesh.size == 0), default=0)
        cut = (mesh.axis_names, None) if longest == shape[0] else (None, mesh.axis_names)
        stack = at(jax.shard_map(jax.vmap(f), **specs)(stack), *(cut if longest else (free, free)))
        for i, y in zip(places, jnp.split(stack, ends), strict=False):
            found[i] = y
    return found


def update_muon(
    given: Extra, updates: PyTree, state: Any, params: PyTree, extra: Extra
) -> tuple[PyTree, Any]:
    """The update of `optax.contrib.muon(**given)`, by `map_matrices`.

    Without its iteration, optax's own rule computes the momentum before it and the rest behind it.
    """
    off = {"ns_steps": 0, "preconditioning": "aol", "adaptive": False}  # a matrix stays as it is
    old, none = state.inner_states["muon"].inner_state[0], jnp.zeros(3)
    leaves, treedef = jax.tree.flatten(updates)
    masked = (isinstance(x, optax.MaskedNode) for x in treedef.flatten_up_to(old.mu))
    places = [i for i, is_masked in enumerate(masked) if not is_masked]
    dims = _dimensions(given["muon_weight_dimension_numbers"], updates)
    own = lambda found: jax.tree.structure(old.mu).unflatten([found[i] for i in places])
    same = {name: given[name] for name in ("beta", "mu_dtype", "nesterov")}
    momentum: Any = scale_by_muon(**same, **off, weight_dimension_numbers=own(dims))
    means, new = momentum.update(own(leaves), old._replace(ns_coeffs=none))

    def orthogonal(x: jax.Array) -> jax.Array:
        how = {name: given[name] for name in ("ns_steps", "preconditioning", "eps")}
        plain = MuonDimensionNumbers()
        rule = scale_by_muon(beta=0.0, nesterov=False, weight_dimension_numbers=plain, **how)
        fresh: Any = MuonState(jnp.int32(0), jnp.zeros_like(x), old.ns_coeffs)
        found: Any = rule.update(x, fresh)
        return found[0]

    means = jax.tree.leaves(means)
    pairs = [_as_matrices(x, dims[i]) for i, x in zip(places, means, strict=True)]
    found = map_matrices(orthogonal, [x for x, _ in pairs], extra["device_mesh"])
    for i, mean, (_, back), y in zip(places, means, pairs, found, strict=True):
        leaves[i] = back(y) * jnp.sum(mean.conj() * back(y)) if given["adaptive"] else back(y)
    behind = optax.contrib.muon(**{**given, **off, "beta": 0.0})
    state = optax.tree.set(state, ns_coeffs=none)
    updates, state = behind.update(treedef.unflatten(leaves), state, params, **extra)
    return updates, optax.tree.set(state, MuonState=new._replace(ns_coeffs=old.ns_coeffs))


def _dimensions(given: Any, updates: PyTree) -> list[Any]:
    """The `MuonDimensionNumbers` of each leaf, None for Adam's, from optax's argument."""
    given = given(updates) if callable(given) else given
    given = MuonDimensionNumbers() if given is None else given
    is_leaf = lambda x: x is None or isinstance(x, MuonDimensionNumbers)
    return jax.tree.leaves(jax.tree.broadcast(given, updates, is_leaf), is_leaf=is_leaf)


def _as_matrices(x: jax.Array, dims: MuonDimensionNumbers) -> tuple[jax.Array, Function]:
    """An array as (matrices, rows, columns), and the way back."""
    axes = [np.atleast_1d(own) % x.ndim for own in ((0, 1) if x.ndim == 2 else dims)]
    batch = np.setdiff1d(range(x.ndim), np.concatenate(axes))
    order = np.concatenate([batch, *axes])
    shape = [math.prod(x.shape[i] for i in own) for own in (batch, *axes)]
    moved = x.transpose(order)
    return moved.reshape(shape), lambda y: y.reshape(moved.shape).transpose(np.argsort(order))
