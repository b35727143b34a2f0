"""Whether a loss mixes the rows of its batch, so that `accumulate=n` trains on another loss.

Micro-batches add up exactly if the loss is a (weighted) mean of values, one for each row. CLIP's
loss is not: it compares each row with all others, and a micro-batch has only its own. No number
shows that, so the jaxpr of the loss function is searched for it, once for each trace.

Each value in the program gets a `Fact`: which of its axes are **rows** (at the start axis 0 of
each leaf of the batch; params have none), whether sums over all rows took part in it
(**pooled**), if it **moves** with params, and the first **mixing** on the way to it. Evidence is

- pairs: two operands whose rows lie on different axes (`x @ y.T`, `x[:, None] - x[None]`);
- statistics: rows with a pooled part (`x - x.mean(0)`) meet a function that is not linear;
- means: the same without rows (`sqrt(mean)`, the square of a covariance, a Dice coefficient);
- sums: the loss is a sum over rows, not divided, of values that were not multiplied by weights.

Only what the loss is made of counts, not metrics or model state. A false warning is worse than a
missing one: what is divided by a weight, an unknown number, or a constant near the number of rows
is taken for a mean, and rows that were taken by an index (mixup) for others. A primitive that is not
listed here is taken for one that works row by row, or drops the rows. Statistics do not count if
the loss returns a `model_state`: batch norm is documented to see micro-batches, as in PyTorch.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence, Set
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tsunax._core.dataflow import Analysis, source_line
from tsunax.errors import message, warn
from tsunax.loss import rows_of


class Mixing(NamedTuple):
    kind: str  # a key of _KINDS
    primitive: str
    source: Any  # `source_info` of the equation


class Sum(NamedTuple):
    factor: float  # by which constants it was multiplied since
    mixing: Mixing


class Fact(NamedTuple):
    rows: frozenset[int] = frozenset()  # axes along which each index belongs to one row
    pooled: bool = False  # sums over all rows took part
    moves: bool = False  # differentiable in params
    mixing: Mixing | None = None
    weighed: bool = False  # rows times weights that may have their number in them
    sum: Sum | None = None  # of a value without rows: the sum over rows that it is linear in


_KINDS = {
    "pairs": "compares the rows of the batch with each other",
    "statistics": "uses statistics of the whole batch in each of its rows",
    "means": "is a function of means over rows, not itself a mean",
    "sums": "is a sum over the rows of the batch, not a mean",
}
_FIX = (
    "Each of the {n} micro-batches has only its own rows, so this trains on another loss than the "
    "whole batch does. Use accumulate=1, with remat= if memory is short, or give the loss the other "
    "rows as an extra argument."
)
_FIX_OF_SUMS = (
    "The sums of the {n} micro-batches are averaged, so this trains on the loss of the whole batch "
    "divided by {n}. Return the mean, or ts.Loss(total, weight) with the weight of these rows."
)
_CURVED = frozenset(  # not linear
    "acos acosh asin asinh atan atan2 atanh cbrt cos cosh digamma erf erf_inv erfc exp exp2 expm1 "
    "integer_pow lgamma log log1p logistic pow rsqrt sin sinh sqrt square tan tanh".split()
)
# linear in pieces: a bound on a mean is no evidence
_BENT = frozenset("abs clamp max min rem".split())
_FLAT = frozenset("ceil floor round sign stop_gradient".split())
_SAME = frozenset(  # an axis of the results is that axis of the operands
    "add add_any and concatenate convert_element_type copy copy_p cumlogsumexp cummax cummin cumprod "
    "cumsum div dynamic_slice dynamic_update_slice eq ge gt imag is_finite le lt mul name ne neg "
    "nextafter not or pad pvary real reduce_precision rev select_n sharding_constraint slice sort "
    "split sub top_k xor".split()
).union(_CURVED, _BENT, _FLAT)
_LINEAR = frozenset(
    "add add_any broadcast_in_dim concatenate convert_element_type copy copy_p name neg pvary "
    "reduce_precision reduce_sum reshape select_n sharding_constraint squeeze sub transpose".split()
)
_SUMS = frozenset(("reduce_sum", "reduce_prod", "dot_general"))
_OTHER = "argmax argmin reduce_and reduce_max reduce_min reduce_or".split()
_REDUCTIONS = frozenset((*_OTHER, "reduce_sum", "reduce_prod"))


def warn_of_mixed_rows(objective: Callable, params, batch, keywords, n: int, name: str) -> None:
    """Warn if the loss in `objective(params, batch, keywords) -> (scalar, Loss)` mixes rows."""
    try:
        found = mixing(objective, params, batch, keywords)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):  # of a jax to come
        found = None
    if found is not None:
        line, text = source_line((found.source,))
        got = f"a loss that {_KINDS[found.kind]} (`{text or found.primitive}`)"
        fix = (_FIX_OF_SUMS if found.kind == "sums" else _FIX).format(n=n)
        where = f"{name}, {line}" if line else name
        expected = f"a mean over rows under accumulate={n}"
        warn(message("loss", where, got, expected, fix))


def mixing(objective: Callable, params: Any, batch: Any, keywords: dict) -> Mixing | None:
    """The first evidence on the way to the scalar of `objective(params, batch, keywords)`."""
    mask = {"mask": keywords["mask"]} if isinstance(keywords.get("mask"), jax.Array) else {}

    def of(params, batch, mask):
        loss = objective(params, batch, keywords | mask)[1]  # its scalar has the loss scale in it
        return loss.compute(), loss.model_state

    program, shapes = jax.make_jaxpr(of, return_shape=True)(params, batch, mask)
    leaves = jax.tree.leaves((batch, mask))
    given = [Fact(moves=True)] * len(jax.tree.leaves(params))
    given += [Fact(frozenset({0} if jnp.ndim(x) else ())) for x in leaves]
    statistics = ("statistics", "means") if jax.tree.leaves(shapes[1]) else ()
    known = set(_KINDS).difference(statistics)
    rule = functools.partial(_through, known=known, n=rows_of(batch))
    fact = Analysis(Fact(), _either, rule, _one_of, _all_of).run(program.jaxpr, given)[0]
    return fact.mixing or (fact.sum and fact.sum.mixing)


def _either(a: Fact, b: Fact) -> Fact:
    either: list[Any] = [x or y for x, y in zip(a, b, strict=True)]
    return Fact(*either)._replace(rows=a.rows | b.rows)


def _one_of(fact: Fact) -> Fact:
    """What one trip of a scan reads: a value without rows if the scan goes from row to row."""
    return fact._replace(rows=frozenset(axis - 1 for axis in fact.rows if axis))


def _all_of(fact: Fact, over: Sequence[Fact]) -> Fact:
    first = {0} if any(0 in x.rows for x in over) else set()
    return fact._replace(rows=frozenset(first | {axis + 1 for axis in fact.rows}))


def _through(eqn: Any, facts: Sequence[Fact], *, known: Set[str], n: int) -> list[Fact]:
    """The facts of what a primitive gives."""
    name, any_rows = eqn.primitive.name, any(fact.rows for fact in facts)
    mixed = next((fact.mixing for fact in facts if fact.mixing), None)
    if mixed is None and (kind := _evidence(eqn, facts)) in known:
        mixed = Mixing(kind, name, eqn.source_info)
    scales = name in ("mul", "div", "dot_general", "gather") and any_rows
    # what scales rows and does not move is taken for one over a sum of weights
    pooled = any(fact.pooled and (fact.moves or fact.rows or not scales) for fact in facts)
    moves = any(fact.moves for fact in facts) and name not in _FLAT
    found = []
    for v in eqn.outvars:
        rows = _rows(eqn, v.aval.shape, [fact.rows for fact in facts], n)
        is_sum = name in _SUMS and any_rows and not rows
        is_float = jnp.issubdtype(v.aval.dtype, np.inexact)
        moving = is_float and moves
        weighed, sum = (False, None) if not moving else _summed(eqn, facts, rows, n)
        found.append(Fact(rows, is_float and (pooled or is_sum), moving, mixed, weighed, sum))
    return found


def _summed(
    eqn: Any, facts: Sequence[Fact], rows: frozenset[int], n: int
) -> tuple[bool, Sum | None]:
    """Whether rows were weighed, and the sum over them that a result is linear in."""
    name, moving = eqn.primitive.name, [fact for fact in facts if fact.moves]
    weighed = any(fact.weighed for fact in moving)
    known = next((fact.sum for fact in moving if fact.sum), None)
    if name in ("mul", "div"):
        constant = next((v.val for v in eqn.invars if hasattr(v, "val")), None)
        if constant is None or np.ndim(constant):  # by a weight, an unknown number, or a variable
            return weighed or len(moving) == 1, known if len(
                moving
            ) == 2 and name == "mul" else None
        factor = abs(float(constant)) or 1.0
        factor = 1 / factor if name == "div" else factor
        if rows:
            return weighed or factor * n < 1.5, None
        known = known and known._replace(factor=known.factor * factor)
        return weighed, known if known and known.factor * n > 1.5 else None
    if name in ("reduce_sum", "dot_general") and not rows and any(fact.rows for fact in facts):
        mixing = Mixing("sums", name, eqn.source_info)
        return False, None if weighed or len(moving) < len(facts) else Sum(1.0, mixing)
    if name in _CURVED or name not in _LINEAR:
        return weighed and bool(rows), None
    return weighed, known


def _evidence(eqn: Any, facts: Sequence[Fact]) -> str:
    name = eqn.primitive.name
    if _pairs(eqn, facts):
        return "pairs"
    kind = "statistics" if any(fact.rows for fact in facts) else "means"
    if any(fact.pooled and fact.moves for fact in facts):
        curved = name in _CURVED or (name in _BENT and kind == "statistics")
        if curved or (name == "div" and facts[1].pooled and facts[1].moves):
            return kind
    if name in ("mul", "div", "dot_general"):
        for a, b in (facts[:2], facts[1::-1]):
            # a product of two that depend on the batch, one by a mean that is no sum of weights
            if a.pooled and (a.moves or a.rows) and b.moves and (b.rows or b.pooled):
                return kind
    return ""


def _pairs(eqn: Any, facts: Sequence[Fact]) -> bool:
    if eqn.primitive.name == "dot_general":
        free = [_free(eqn, i, fact.rows) for i, fact in enumerate(facts)]
        batched = zip(eqn.params["dimension_numbers"][1], facts, strict=True)
        return all(free) and not any(fact.rows.intersection(axes) for axes, fact in batched)
    if eqn.primitive.name not in _SAME - {"concatenate", "dynamic_update_slice"}:
        return False
    rows = [fact.rows for fact in facts if fact.rows]
    return any(not a <= b and not b <= a for a, b in itertools.combinations(rows, 2))


def _rows(eqn: Any, shape: tuple, given: Sequence[frozenset[int]], n: int) -> frozenset[int]:
    """The axes of a result that are rows, from those of the operands."""
    name, p = eqn.primitive.name, eqn.params
    if name in _SAME:
        return frozenset().union(*given)
    if name in _REDUCTIONS:
        return _without(given[0], p["axes"])
    if name == "squeeze":
        return _without(given[0], p["dimensions"])
    if name == "transpose":
        return frozenset(p["permutation"].index(axis) for axis in given[0])
    if name == "broadcast_in_dim":
        return frozenset(p["broadcast_dimensions"][axis] for axis in given[0])
    if name == "reshape":
        return _reshaped(given[0], eqn.invars[0].aval.shape, shape, n)
    if name == "dot_general":
        return _of_product(eqn, given)
    if name == "gather":
        return _gathered(eqn, given)
    # convolutions, pooling, factorizations, kernels: rows come first, and each is for itself
    first = [v.aval.shape[0] for v, rows in zip(eqn.invars, given, strict=True) if rows == {0}]
    by_row = first and len(first) == sum(map(bool, given)) and set(first) == set(shape[:1])
    return frozenset({0} if by_row else ())


def _without(rows: frozenset[int], axes: Sequence[int]) -> frozenset[int]:
    return frozenset(axis - sum(gone < axis for gone in axes) for axis in rows if axis not in axes)


def _reshaped(rows: frozenset[int], old: tuple, new: tuple, n: int) -> frozenset[int]:
    """The axes that a row axis goes into: the first of length n, or all."""
    found = set()
    for axis in rows:
        first, last = math.prod(old[:axis]), math.prod(old[: axis + 1])
        ends = [math.prod(new[:k]) for k in range(len(new) + 1)]
        there = [k for k in range(len(new)) if ends[k] < last and ends[k + 1] > first]
        found |= set([k for k in there if new[k] == n][:1] or there)
    return frozenset(found)


def _free(eqn: Any, side: int, rows: frozenset[int]) -> list[int]:
    """Which of the axes of one operand that are neither contracted nor batched are rows."""
    used = [axis for axes in eqn.params["dimension_numbers"] for axis in axes[side]]
    free = [axis for axis in range(len(eqn.invars[side].aval.shape)) if axis not in used]
    return [i for i, axis in enumerate(free) if axis in rows]


def _of_product(eqn: Any, given: Sequence[frozenset[int]]) -> frozenset[int]:
    contracted, batched = eqn.params["dimension_numbers"]
    n = len(batched[0])
    rows = {i for i in range(n) if batched[0][i] in given[0] or batched[1][i] in given[1]}
    left = len(eqn.invars[0].aval.shape) - len(contracted[0]) - n
    rows |= {n + i for i in _free(eqn, 0, given[0])}
    return frozenset(rows | {n + left + i for i in _free(eqn, 1, given[1])})


def _gathered(eqn: Any, given: Sequence[frozenset[int]]) -> frozenset[int]:
    """Rows of the indices stay, and those of the operand if all of them are taken."""
    d, shape = eqn.params["dimension_numbers"], eqn.invars[0].aval.shape
    ndim = len(eqn.outvars[0].aval.shape)
    free = [axis for axis in range(ndim) if axis not in d.offset_dims]
    rows = {free[axis] for axis in given[1] if axis < len(free)}
    gone = (*d.collapsed_slice_dims, *d.operand_batching_dims)
    kept = [axis for axis in range(len(shape)) if axis not in gone]
    whole = [a for a in kept if a in given[0] and eqn.params["slice_sizes"][a] == shape[a]]
    return frozenset(rows | {d.offset_dims[kept.index(axis)] for axis in whole})
