"""SOAP: Adam in the eigenbasis of Shampoo's preconditioner, as a plain optax factory."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from tsunax._core import PyTree, Scalar, checks


class ScaleBySoapState(NamedTuple):
    """The state of `soap`. It has a `MaskedNode` for a side of a matrix without a basis."""

    calls: Scalar  # int32; the first call sets the bases and moves nothing
    mu: PyTree  # f32, means of the gradients
    nu: PyTree  # f32, means of the squared gradients in the bases
    rows: PyTree  # f32, means of g gᵀ
    columns: PyTree  # f32, means of gᵀ g
    row_basis: PyTree  # eigenvectors of `rows`, as columns
    column_basis: PyTree  # eigenvectors of `columns`, as columns


def _in_bases(x: jax.Array, bases: Any, back: bool = False) -> jax.Array:
    """`x` in the bases of its rows and columns; with `back`, from these bases to the original."""
    rows, columns = bases
    if isinstance(rows, jax.Array):
        x = (rows if back else rows.mT) @ x
    if isinstance(columns, jax.Array):
        x = x @ (columns.mT if back else columns)
    return x


def _new_bases(stage: jax.Array, factors: Any, bases: Any, mesh: Mesh | None) -> Any:
    """By `stage`: the old bases (0), after an orthogonal iteration (1), or eigenvectors (2)."""
    factors, treedef = jax.tree.flatten(factors)

    def map_stacks(f, stacks):
        from tsunax.rules.matrices import map_matrices

        matrices = [x.reshape(-1, *x.shape[-2:]) for x in stacks]
        results = map_matrices(f, matrices, mesh) if mesh else map(jax.vmap(f), matrices)
        return [y.reshape(x.shape) for x, y in zip(factors, results, strict=True)]

    def iterate_bases(bases):
        # `map_matrices` takes a function of one matrix, so a factor and its basis are stacked.
        stacked_pairs = [jnp.concatenate(pair, -2) for pair in zip(factors, bases, strict=True)]
        product = lambda x: jnp.matmul(*jnp.split(x, 2))
        return map_stacks(lambda x: jnp.linalg.qr(product(x))[0], stacked_pairs)

    eigenvectors = lambda x: jnp.linalg.eigh(x)[1][:, ::-1]
    keep_bases, fresh_bases = list, lambda _: map_stacks(eigenvectors, factors)
    choices = [keep_bases, iterate_bases, fresh_bases]
    return treedef.unflatten(jax.lax.switch(stage, choices, jax.tree.leaves(bases)))


def _side(p: Any, axis: int, start: Any, max_size: int) -> Any:
    """The matrices `start(n)` of an axis of length n; none for a long axis or a vector."""
    if p.ndim < 2 or p.shape[axis] > max_size:
        return optax.MaskedNode()
    n = p.shape[axis]
    return jnp.broadcast_to(start(n), (*p.shape[:-2], n, n))


def soap(
    learning_rate: optax.ScalarOrSchedule,
    b1=0.95,
    b2=0.95,
    eps=1e-8,
    weight_decay=0.01,
    mask: Any = None,
    precondition_frequency: int = 10,
    max_size: int = 10_000,
):
    """SOAP: Adam in the slowly changing eigenbasis of Shampoo's preconditioner.

    For a matrix with gradient g, L ← b2·L + (1 − b2)·g gᵀ and R ← b2·R + (1 − b2)·gᵀ g. Adam (`b1`,
    `b2`, `eps`) runs on Qᵀ g P, and its update u is turned back to Q u Pᵀ. At every
    `precondition_frequency`-th update Q ← qr(L Q) and P ← qr(R P), the eigenvectors in the limit;
    the devices of a mesh share these, as in `muon`. The first call sets the bases, and only
    `weight_decay` moves the parameters. The decay is as in `adamw`, where `mask` is true.

    The last two axes of an array are a matrix, earlier axes count matrices. A side longer than
    `max_size` has no basis; Adam updates arrays with fewer than two axes. The state has 2·rows² +
    2·columns² numbers for each matrix in addition to Adam's, all float32. Raises
    HyperparameterError for a number that is out of range or not finite. Vyas et al. 2024,
    arXiv:2409.11321.

    >>> rule, params = soap(0.1, eps=1e-3, weight_decay=0.0), jnp.ones((2, 2))
    >>> state = rule.init(params)
    >>> g = jnp.array([[2.0, 1.0], [1.0, 2.0]])
    >>> for _ in range(2):
    ...     updates, state = rule.update(g, state, params)
    >>> f"{jnp.trace(updates):.2f}"  # -0.1 times the identity
    '-0.20'
    """

    checks.check_count(precondition_frequency, "soap()", "precondition_frequency")

    def init(params):
        zeros = [optax.tree.zeros_like(params, dtype=jnp.float32) for _ in range(2)]
        # `sides` are the factors of rows and of columns, then the bases of both.
        starts = [lambda n: jnp.zeros((n, n)), jnp.eye]
        sides = [
            jax.tree.map(lambda p: _side(p, axis, start, max_size), params)  # noqa: B023
            for start in starts
            for axis in (-2, -1)
        ]
        return ScaleBySoapState(jnp.zeros([], jnp.int32), *zeros, *sides)

    def update(updates, state, params=None, *, device_mesh: Mesh | None = None, **extra):
        del params, extra
        leaves, treedef = jax.tree.flatten(updates)
        mu, nu, *sides = map(treedef.flatten_up_to, state[1:])
        bases = list(zip(*sides[2:], strict=True))  # for each leaf (rows, columns)
        is_first, t = state.calls == 0, jnp.maximum(state.calls, 1)
        with jax.default_matmul_precision("float32"):
            g = [x.astype(jnp.float32) for x in leaves]
            new_mu = optax.tree.update_moment(g, mu, b1, 1)
            new_nu = optax.tree.update_moment(list(map(_in_bases, g, bases)), nu, b2, 2)
            means = optax.tree.bias_correction(new_mu, b1, t)
            squares = optax.tree.bias_correction(new_nu, b2, t)
            directions = [
                _in_bases(_in_bases(m, q) / (jnp.sqrt(v) + eps), q, back=True)
                for m, v, q in zip(means, squares, bases, strict=True)
            ]
            # Means of g gᵀ for rows, of gᵀ g for columns; a side without a basis has no mean.
            outer_products = [lambda x: x @ x.mT, lambda x: x.mT @ x]
            factors = [
                [
                    optax.tree.update_moment(f(x), old, b2, 1)
                    if isinstance(old, jax.Array)
                    else old
                    for x, old in zip(g, old_factors, strict=True)
                ]
                for f, old_factors in zip(outer_products, sides[:2], strict=True)
            ]
            stage = jnp.where(is_first, 2, jnp.where(t % precondition_frequency == 0, 1, 0))
            bases = _new_bases(stage, factors, sides[2:], device_mesh)
        moments = jax.tree.map(
            lambda new, old: jnp.where(is_first, old, new), [new_mu, new_nu], [mu, nu]
        )
        updates = [
            jnp.where(is_first, 0, u).astype(x.dtype)
            for u, x in zip(directions, leaves, strict=True)
        ]
        fields = map(treedef.unflatten, (*moments, *factors, *bases))
        return treedef.unflatten(updates), ScaleBySoapState(
            optax.safe_increment(state.calls), *fields
        )

    return optax.chain(
        optax.GradientTransformationExtraArgs(init, update),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )
