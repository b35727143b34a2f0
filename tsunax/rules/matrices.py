"""Muon over a mesh: the matrices are distributed over devices, and no product is computed twice.

Otherwise XLA would cut each product of the Newton-Schulz iteration if the params are cut, and
gather its factors; for whole params, every device would compute all matrices.
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
    """`[jax.vmap(f)(x) for x in stacks]`, distributed over the devices of a mesh.

    `f` is a function of a single matrix, such as a decomposition, and stacks have the shape (k,
    rows, columns). Stacks of equal shape are joined: of k matrices each of n devices computes
    ceil(k / n). A matrix moves twice, to its device and back, however many products `f` needs.
    """
    over_all_devices, indices_by_kind = P(mesh.axis_names), defaultdict[Any, list[int]](list)
    specs: Any = {"mesh": mesh, "in_specs": over_all_devices, "out_specs": over_all_devices}
    specs["check_vma"] = False
    for i, x in enumerate(stacks):
        indices_by_kind[x.shape[1:], x.dtype].append(i)
    results, free = list(stacks), P.UNCONSTRAINED
    with_spec = lambda x, *spec: jax.lax.with_sharding_constraint(
        x, NamedSharding(mesh, P(None, *spec))
    )
    for (shape, _), indices in indices_by_kind.items():
        split_points = np.cumsum([len(results[i]) for i in indices])
        # Padding gives each device the same number of matrices.
        padding = jnp.broadcast_to(results[indices[0]][:1], (-split_points[-1] % mesh.size, *shape))
        # While matrices are joined and split, their rows and columns may stay cut (`free`), or XLA
        # would gather all matrices.
        stack = with_spec(jnp.concatenate([*(results[i] for i in indices), padding]), free, free)
        # Results are cut along the longer axis that the devices divide, if there is one.
        cut_length = max((n for n in shape if n % mesh.size == 0), default=0)
        cut = (mesh.axis_names, None) if cut_length == shape[0] else (None, mesh.axis_names)
        stack = jax.shard_map(jax.vmap(f), **specs)(stack)
        stack = with_spec(stack, *(cut if cut_length else (free, free)))
        # The last part of the split is the padding, which no index takes.
        for i, y in zip(indices, jnp.split(stack, split_points), strict=False):
            results[i] = y
    return results


def update_muon(
    arguments: Extra, updates: PyTree, state: Any, params: PyTree, extra: Extra
) -> tuple[PyTree, Any]:
    """The update of `optax.contrib.muon(**arguments)`, by `map_matrices`.

    The rule of optax computes the momentum before the iteration, and the steps after it.
    """
    # With these arguments muon leaves a matrix as it is.
    no_iteration = {"ns_steps": 0, "preconditioning": "aol", "adaptive": False}
    old_momentum, no_coefficients = state.inner_states["muon"].inner_state[0], jnp.zeros(3)
    leaves, treedef = jax.tree.flatten(updates)
    masked = (isinstance(x, optax.MaskedNode) for x in treedef.flatten_up_to(old_momentum.mu))
    indices = [i for i, is_masked in enumerate(masked) if not is_masked]
    dims = _dimensions(arguments["muon_weight_dimension_numbers"], updates)
    in_muon = lambda orthogonalized: jax.tree.structure(old_momentum.mu).unflatten(
        [orthogonalized[i] for i in indices]
    )
    momentum: Any = scale_by_muon(
        **{name: arguments[name] for name in ("beta", "mu_dtype", "nesterov")},
        **no_iteration,
        weight_dimension_numbers=in_muon(dims),
    )
    means, new_momentum = momentum.update(
        in_muon(leaves), old_momentum._replace(ns_coeffs=no_coefficients)
    )

    def orthogonal(x: jax.Array) -> jax.Array:
        rule = scale_by_muon(
            beta=0.0,
            nesterov=False,
            weight_dimension_numbers=MuonDimensionNumbers(),
            **{name: arguments[name] for name in ("ns_steps", "preconditioning", "eps")},
        )
        fresh: Any = MuonState(jnp.int32(0), jnp.zeros_like(x), old_momentum.ns_coeffs)
        result: Any = rule.update(x, fresh)
        return result[0]

    means = jax.tree.leaves(means)
    pairs = [_as_matrices(x, dims[i]) for i, x in zip(indices, means, strict=True)]
    orthogonalized = map_matrices(orthogonal, [x for x, _ in pairs], extra["device_mesh"])
    for i, mean, (_, to_array), y in zip(indices, means, pairs, orthogonalized, strict=True):
        leaves[i] = (
            to_array(y) * jnp.sum(mean.conj() * to_array(y))
            if arguments["adaptive"]
            else to_array(y)
        )
    # Without momentum and iteration, the rule does the rest: scaling, decay and learning rate.
    rest_of_muon = optax.contrib.muon(**{**arguments, **no_iteration, "beta": 0.0})
    state = optax.tree.set(state, ns_coeffs=no_coefficients)
    updates, state = rest_of_muon.update(treedef.unflatten(leaves), state, params, **extra)
    return updates, optax.tree.set(
        state, MuonState=new_momentum._replace(ns_coeffs=old_momentum.ns_coeffs)
    )


def _dimensions(dimension_numbers: Any, updates: PyTree) -> list[Any]:
    """The `MuonDimensionNumbers` of each leaf, from optax's argument; None for leaves of Adam."""
    dimension_numbers = (
        dimension_numbers(updates) if callable(dimension_numbers) else dimension_numbers
    )
    dimension_numbers = MuonDimensionNumbers() if dimension_numbers is None else dimension_numbers
    is_leaf = lambda x: x is None or isinstance(x, MuonDimensionNumbers)
    return jax.tree.leaves(jax.tree.broadcast(dimension_numbers, updates, is_leaf), is_leaf=is_leaf)


def _as_matrices(x: jax.Array, dims: MuonDimensionNumbers) -> tuple[jax.Array, Function]:
    """An array as (matrices, rows, columns), and the inverse function."""
    axes = [
        np.atleast_1d(axes_of_part) % x.ndim for axes_of_part in ((0, 1) if x.ndim == 2 else dims)
    ]
    batch = np.setdiff1d(range(x.ndim), np.concatenate(axes))
    order = np.concatenate([batch, *axes])
    shape = [math.prod(x.shape[i] for i in axes_of_part) for axes_of_part in (batch, *axes)]
    moved = x.transpose(order)
    return moved.reshape(shape), lambda y: y.reshape(moved.shape).transpose(np.argsort(order))
