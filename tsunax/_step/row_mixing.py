"""Whether a loss mixes the rows of its batch, so that `accumulate=n` trains on another loss.

Micro-batches add up exactly if the loss is a (weighted) mean of values, one for each row. CLIP's
loss is not: it compares each row with all others, and a micro-batch has only its own rows. No
number shows that, so each trace searches the jaxpr of the loss function.

Each value in the program gets a `Fact`: which of its axes are **rows** (at the start axis 0 of
each leaf of the batch; params have none), whether sums over all rows took part in it
(**pooled**), if it **moves** with params, and the first **mixing** on the way to it. Evidence is

- pairs: two operands whose rows lie on different axes (`x @ y.T`, `x[:, None] - x[None]`), or one
  of which is the other rolled or reversed along its rows (`x - jnp.roll(x, 1, 0)`);
- order: a value that moves is sorted, accumulated or ranked along the rows (`sort`, `cumsum`);
- statistics: rows with a pooled part (`x - x.mean(0)`) meet a function that is not linear;
- means: the same without rows (`sqrt(mean)`, the square of a covariance, a Dice coefficient);
- sums: the loss is a sum over rows that was not divided by anything that may be their number;
- extremes: a maximum or minimum over rows is a term of the loss;
- beside: `jnp.mean(values) + Loss.mean(values, mask)`: one number cannot weigh both.

Only values that the loss is made of count, not metrics or model state. Means, weighted means with
a mask, and sums of such losses are linear, and no evidence. A false warning is worse than a missing
one. So these are no evidence either: a maximum that meets rows again (a stable softmax); a sum
divided by a weight, an unknown number, or a constant as large as the number of rows; rows, and
pairs of rows, taken by an index (mixup). A primitive that is not listed here counts as one that
works row by row, or drops the rows. Statistics do not count if the loss returns a `model_state`:
batch norm is documented to see micro-batches, as in PyTorch.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tsunax._core.dataflow import Analysis, source_line
from tsunax.errors import message, warn
from tsunax.loss import BESIDE, rows_of


class Mixing(NamedTuple):
    kind: str  # a key of _KINDS
    primitive: str
    source: Any  # `source_info` of the equation


class Fact(NamedTuple):
    rows: frozenset[int] = frozenset()  # axes along which each index belongs to one row
    pooled: bool = False  # sums over all rows took part
    moves: bool = False  # differentiable in params
    mixing: Mixing | None = None
    added: int = 0  # rows that were added up, undivided; -1: divided by what may be their number
    last: Mixing | None = None  # of a value without rows: the sum or extreme that it is linear in
    part: tuple[int, int] | None = None  # of a slice along the rows: the variable and the start
    turn: int = 0  # rolled by so many rows; -1: reversed


_KINDS = {
    "pairs": "compares the rows of the batch with each other",
    "order": "sorts or accumulates along the rows of the batch",
    "statistics": "uses statistics of the whole batch in each of its rows",
    "means": "is a function of means over rows, not itself a mean",
    "sums": "is a sum over the rows of the batch, not a mean",
    "extremes": "takes the maximum or minimum over the rows of the batch",
    "beside": "adds a mean over all rows to a mean under a mask",
}
_FIXES = {
    "": "Each of the {n} micro-batches has only its own rows, so this trains on another loss than "
    "the whole batch does. Give it in two parts, ts.losses.whole_batch(embed, loss), or give the "
    "loss the other rows as an extra argument.",
    "alone": "Each row is alone in its gradient, "
    "so that this is another loss than that of the batch.",
    "embed": "Each of the {n} micro-batches has only its own rows: "
    "do it in loss(embeddings, batch).",
    "sums": "The sums of the {n} micro-batches are averaged, so this trains on the loss of the "
    "whole batch divided by {n}. "
    "Return the mean, or ts.Loss(total, weight) with the weight of these rows.",
    "beside": "Micro-batches are weighed by their mask, so the mean beside it becomes another one. "
    "Give both the same mask: ts.Loss.mean(a + b, mask).",
}
_CURVED = frozenset(  # not linear
    "acos acosh asin asinh atan atan2 atanh cbrt cos cosh digamma erf erf_inv erfc exp exp2 expm1 "
    "integer_pow lgamma log log1p logistic pow rsqrt sin sinh sqrt square tan tanh".split()
)
# linear in pieces: a bound on a mean is no evidence
_BENT = frozenset("abs clamp max min rem".split())
_ALONG = frozenset("cumlogsumexp cummax cummin cumprod cumsum sort top_k".split())
_FLAT = frozenset("ceil floor round sign stop_gradient".split())
_SAME = frozenset(  # an axis of the results is that axis of the operands
    "add add_any and concatenate convert_element_type copy copy_p div dynamic_slice "
    "dynamic_update_slice eq ge gt imag is_finite le lt mul name ne neg nextafter not or pad pvary "
    "real reduce_precision rev select_n sharding_constraint slice split sub xor".split()
).union(_CURVED, _BENT, _ALONG, _FLAT)
_SUMS = frozenset(("reduce_sum", "reduce_prod", "dot_general"))
_OTHER = "argmax argmin reduce_and reduce_max reduce_min reduce_or".split()
_REDUCTIONS = frozenset((*_OTHER, "reduce_sum", "reduce_prod"))


def warn_of_mixed_rows(objective, params, batch, keywords, name: str, n=0, in_embed=False) -> None:
    """Warn if the loss in `objective(params, batch, keywords) -> (scalar, Loss)` mixes rows.

    `n`: micro-batches, 0 for row by row; `in_embed`: the loss is the first part of a whole_batch.
    """
    try:
        found = mixing(objective, params, batch, keywords)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):  # of a jax to come
        found = None
    kind = "embed" if in_embed else "" if n else "alone"
    if found is None or (kind and found.kind in ("sums", "beside")):
        return
    line, text = source_line((found.source,))
    what, form = ("embed", "rows that are apart") if in_embed else ("loss", "a mean over rows")
    kind_of_loss = "one" if in_embed else "a loss"
    got = f"{kind_of_loss} that {_KINDS[found.kind]} (`{text or found.primitive}`)"
    fix = (_FIXES[kind] if kind else _FIXES.get(found.kind, _FIXES[""])).format(n=n)
    where = f"{name}, {line}" if line else name
    expected = f"{form} under {f'accumulate={n}' if n else 'per_example'}"
    warn(message(what, where, got, expected, fix))


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
    known = [kind for kind in _KINDS if kind not in statistics]
    rule = functools.partial(_result_facts, known=known, n=rows_of(batch))
    fact = Analysis(Fact(), _either, rule, _one_of, _all_of).run(program.jaxpr, given)[0]
    return fact.mixing or fact.last


def _either(a: Fact, b: Fact) -> Fact:
    either: list[Any] = [x or y for x, y in zip(a, b, strict=True)]
    return Fact(*either)._replace(rows=a.rows | b.rows, added=max(a.added, b.added))


def _one_of(fact: Fact) -> Fact:
    """The fact in one trip of a scan: without rows if the scan goes from row to row."""
    return fact._replace(rows=frozenset(axis - 1 for axis in fact.rows if axis))


def _all_of(fact: Fact, over: Sequence[Fact]) -> Fact:
    first = {0} if any(0 in x.rows for x in over) else set()
    return fact._replace(rows=frozenset(first | {axis + 1 for axis in fact.rows}))


def _result_facts(eqn: Any, facts: Sequence[Fact], *, known: Sequence[str], n: int) -> list[Fact]:
    """The facts of the results of a primitive."""
    name, any_rows = eqn.primitive.name, any(fact.rows for fact in facts)
    mixed = next((fact.mixing for fact in facts if fact.mixing), None)
    if mixed is None and (kind := _evidence(eqn, facts)) in known:
        mixed = Mixing(kind, name, eqn.source_info)
    scales = name in ("mul", "div", "dot_general", "gather") and any_rows
    # a factor of rows that does not move counts as one over a sum of weights
    pooled = any(fact.pooled and (fact.moves or fact.rows or not scales) for fact in facts)
    moves = any(fact.moves for fact in facts) and name not in _FLAT
    found = []
    for v in eqn.outvars:
        rows = _row_axes(eqn, v.aval.shape, [fact.rows for fact in facts], n)
        is_sum = name in _SUMS and any_rows and not rows
        is_float = jnp.issubdtype(v.aval.dtype, np.inexact)
        fact = Fact(rows, is_float and (pooled or is_sum), is_float and moves, mixed)
        added = 0 if v.aval.dtype == np.bool_ else _added(eqn, facts, fact, n)
        fact = fact._replace(added=added, last=_last(eqn, facts, fact, added))
        found.append(fact._replace(**_order(eqn, facts, fact)))
    return found


def _last(eqn: Any, facts: Sequence[Fact], out: Fact, added: int) -> Mixing | None:
    """The sum or extreme over rows that a value without rows is linear in, if it moves."""
    if out.rows or not out.moves:
        return None
    over_rows = any(fact.rows for fact in facts)
    if over_rows and eqn.primitive.name in ("reduce_max", "reduce_min"):
        return Mixing("extremes", eqn.primitive.name, eqn.source_info)
    if over_rows and added > 0:
        return Mixing("sums", eqn.primitive.name, eqn.source_info)
    kinds = ("sums", "extremes") if added > 0 else ("extremes",)
    return next((x.last for x in facts if x.last and x.last.kind in kinds), None)


def _added(eqn: Any, facts: Sequence[Fact], out: Fact, n: int) -> int:
    """How many rows were added up in a result; -1: it was divided by what may be their number."""
    name = eqn.primitive.name
    if name in ("gather", "dynamic_slice"):  # indices are none of it
        facts = facts[:1]
    all_of = [fact.added for fact in facts]
    if name in ("reduce_sum", "dot_general"):
        p, size = eqn.params, 0
        axes = p["dimension_numbers"][0] if name == "dot_general" else [p["axes"]]
        for v, fact, over in zip(eqn.invars, facts, axes, strict=True):
            if gone := fact.rows.intersection(over):
                size = max(size, math.prod(v.aval.shape[axis] for axis in gone))
        if size:
            return -1 if min(all_of) < 0 else max(*all_of, size)
    if name in _CURVED:
        return 0 if out.rows else max(all_of)
    if name in ("mul", "div"):
        return _scaled(eqn, facts, out, n)
    if name == "sign":
        return 0
    if min(all_of, default=0) < 0:
        return -1
    known = _SAME | _REDUCTIONS | {"squeeze", "transpose", "broadcast_in_dim", "reshape", "gather"}
    if name not in known and not out.rows and any(fact.rows for fact in facts):
        return -1
    if name == "broadcast_in_dim" and _may_count(eqn.invars[0], facts[0]):
        return -1
    moving = [fact.added for fact in facts if fact.moves]
    return max(moving or all_of, default=0)


def _may_count(v: Any, fact: Fact) -> bool:
    """Whether a number that is no constant may be a number of rows, or a sum of weights."""
    return not (hasattr(v, "val") or v.aval.shape or fact.rows or fact.moves or fact.added > 0)


def _scaled(eqn: Any, facts: Sequence[Fact], out: Fact, n: int) -> int:
    """`_added` of a product or quotient."""
    (x, y), (a, b), divides = eqn.invars, facts, eqn.primitive.name == "div"
    if hasattr(x, "val") and not divides:
        (x, y), (a, b) = (y, x), (b, a)
    if hasattr(y, "val"):
        c = abs(float(y.val)) if np.ndim(y.val) == 0 else 0.0
        c = c if divides else (1 / c if c else 0.0)
        rows = a.added or (n if out.rows else 0)
        times = c / rows if rows > 0 else 0.0
        is_multiple = times > 0.99 and abs(times - round(times)) < 1e-3
        if out.rows and a.added == 0:
            return -is_multiple
        return 0 if is_multiple or (divides and times > 0.99) else a.added
    by_count = b.added != 0 if divides else min(a.added, b.added) < 0
    if by_count or _may_count(y, b) or (_may_count(x, a) and not divides):
        return -1
    return max(a.added, b.added)


def _order(eqn: Any, facts: Sequence[Fact], out: Fact) -> dict[str, Any]:
    """The order of rows in a result: a part of them, or all of them in another order."""
    name, p = eqn.primitive.name, eqn.params
    turned = [fact for fact in facts if fact.turn]
    turn = max(turned, key=lambda fact: fact.moves).turn if turned else 0
    if name == "slice":
        shape = eqn.invars[0].aval.shape
        size = lambda i: p["limit_indices"][i] - p["start_indices"][i]
        over = [i for i in facts[0].rows if size(i) < shape[i]]
        if len(over) == 1 and set(p["strides"] or (1,)) == {1}:
            return {"part": (id(eqn.invars[0]), p["start_indices"][over[0]]), "turn": turn}
    if name == "rev" and out.rows.intersection(p["dimensions"]):
        turn = -1
    if name == "concatenate" and p["dimension"] in out.rows and len(facts) == 2:
        (a, b), size = (fact.part for fact in facts), eqn.outvars[0].aval.shape[p["dimension"]]
        # the second half before the first one: micro-batches have the same pairs
        if a and b and a[0] == b[0] and b[1] == 0 and a[1] not in (0, size / 2):
            turn = a[1]
    return {"turn": turn if out.rows else 0}


def _evidence(eqn: Any, facts: Sequence[Fact]) -> str:
    name = eqn.primitive.name
    if name in _ALONG:
        p, last = eqn.params, len(eqn.invars[0].aval.shape) - 1
        axis = p.get("axis", p.get("dimension", last))
        keys = facts[: eqn.params.get("num_keys", 1)]
        return "order" if any(axis in fact.rows and fact.moves for fact in keys) else ""
    if _pairs(eqn, facts):
        return "pairs"
    if name == "name" and eqn.params["name"] == BESIDE:  # -1: under a mask of its own, or unknown
        fact = facts[0]
        return "beside" if fact.pooled and fact.moves and fact.added >= 0 else ""
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
    turns = {fact.turn for fact in facts if fact.rows and fact.moves}
    if len(turns) > 1:
        return True
    rows = [fact.rows for fact in facts if fact.rows]
    return any(not a <= b and not b <= a for a, b in itertools.combinations(rows, 2))


def _row_axes(eqn: Any, shape: tuple, given: Sequence[frozenset[int]], n: int) -> frozenset[int]:
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
        return _gather_rows(eqn, given)
    # convolutions, pooling, factorizations, kernels: rows come first, and each is for itself
    first = [v.aval.shape[0] for v, rows in zip(eqn.invars, given, strict=True) if rows == {0}]
    by_row = first and len(first) == sum(map(bool, given)) and set(first) == set(shape[:1])
    return frozenset({0} if by_row else ())


def _without(rows: frozenset[int], axes: Sequence[int]) -> frozenset[int]:
    return frozenset(axis - sum(gone < axis for gone in axes) for axis in rows if axis not in axes)


def _reshaped(rows: frozenset[int], old: tuple, new: tuple, n: int) -> frozenset[int]:
    """For each group of axes with one product that has rows: its first axis of length n, or all."""
    if not rows or 0 in old:
        return frozenset()
    found, i, j = set(), 0, 0
    while i < len(old) or j < len(new):
        ends = i + 1, j + 1
        while math.prod(old[i : ends[0]]) != math.prod(new[j : ends[1]]):
            short = math.prod(old[i : ends[0]]) < math.prod(new[j : ends[1]])
            ends = (ends[0] + 1, ends[1]) if short else (ends[0], ends[1] + 1)
        if rows.intersection(range(i, ends[0])):
            there = range(j, min(ends[1], len(new)))
            found |= set([k for k in there if new[k] == n][:1] or [k for k in there if new[k] > 1])
        i, j = ends
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


def _gather_rows(eqn: Any, given: Sequence[frozenset[int]]) -> frozenset[int]:
    """Rows of the indices stay, and those of the operand if all of them are taken."""
    d, shape = eqn.params["dimension_numbers"], eqn.invars[0].aval.shape
    ndim = len(eqn.outvars[0].aval.shape)
    free = [axis for axis in range(ndim) if axis not in d.offset_dims]
    rows = {free[axis] for axis in given[1] if axis < len(free)}
    gone = (*d.collapsed_slice_dims, *d.operand_batching_dims)
    kept = [axis for axis in range(len(shape)) if axis not in gone]
    whole = [a for a in kept if a in given[0] and eqn.params["slice_sizes"][a] == shape[a]]
    rows |= {d.offset_dims[kept.index(axis)] for axis in whole}
    pairs = zip(d.operand_batching_dims, d.start_indices_batching_dims, strict=True)
    return frozenset(rows | {free[j] for i, j in pairs if i in given[0]})
