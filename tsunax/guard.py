"""The guard of a step: one verdict on its numbers, and one choice between two states.

    norms    of trees, in float32 for leaves of any dtype
    verdict  whether all numbers of a call are finite, and its text
    choice   between the state that a step makes and the state before
    clock    counts the calls by their verdict, also calls that only gather (`rules.accumulate`)

A verdict is one int32 computed inside the step: 0 if the step is applied, -1 if it only gathered
its gradient, else twice the place of the first value that is not finite, plus one if it is NaN.
The places are the loss, the norm of the gradient, the clock, the reports of rules, and the norm of
the update, or `excess` in place of it. The verdict is part of the info, so that no step waits for
the device; `explain` turns it into words on the host. It does not say which leaf of the gradient
was bad: a flag for each of 200 leaves would cost time at every step, but only rejected steps need
it. `locate` computes it from the gradients later.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownLambdaType=false
import contextlib
import contextvars
import functools
import operator
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from tsunax._core import Maybe, PyTree, Scalar, trees

# Norms
#
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
    """sqrt(sum over leaves of sum(|x|²)), as `optax.tree.norm`.

    With `by_leaf` it is summed leaf by leaf, and has the bits of optax.

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


# Verdict

LIMIT = np.iinfo(np.int32).max  # the last call that the clock counts


class Reaction(NamedTuple):
    """What happens to a step that is not finite."""

    judges: bool = True  # `update` rejects the step
    drops: bool = False  # `value_and_grad` leaves out the micro-batches that are not finite
    raises: bool = False  # the reader of the info raises, if the step was rejected


POLICIES = {
    "skip": Reaction(),
    "raise": Reaction(raises=True),
    "ignore": Reaction(judges=False),
    "drop": Reaction(drops=True),
}
GOT = "got {}"


class Report:
    """A base class for parts of a rule's state: it has `values`, and `whats`, a text for each."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RuleReport(Report):
    """Numbers that a rule leaves in its state: if one is not finite, the step is rejected.

    A rule that returns its updates unchanged, and such a report, is a policy. The state of
    the rule may be a tuple of the report and other arrays. A rejected step changes no array of it,
    under "ignore" no report is read, and a report never lowers a loss scale. Put the rule at the
    head of a chain, before `accumulate`: within it, the sum of the window keeps the rejected
    gradient, so that all later calls are rejected.
    """

    values: jax.Array  # f32 of shape (n,)
    # A text for each value, without live numbers; "got {}" in it becomes "got nan" or "got inf".
    whats: tuple[str, ...] = field(metadata={"static": True})


def reports(opt_state: PyTree) -> list[Any]:
    is_report = lambda x: isinstance(x, Report)
    return [x for x in jax.tree.leaves(opt_state, is_leaf=is_report) if is_report(x)]


# The places of a verdict. Each report takes one from `_REPORTS` on; the update has the next place.
_LOSS, _GRADIENT, _CLOCK, _REPORTS = 1, 2, 3, 4


def judge(
    loss: Maybe, grad_norm: Maybe, calls: jax.Array, opt_state: PyTree, update_norm: Maybe = None
) -> jax.Array:
    """The verdict: 0 if all is finite, else 2 · the first place that is not finite, + 1 for a NaN.

    The order of the places is: loss, gradient, clock, reports, update.
    """
    # A choice between two constants would lose the mesh of a population (docs/upstream.md).
    verdict, place = jnp.where(calls < LIMIT, LIMIT, jnp.minimum(calls, 2 * _CLOCK)), _REPORTS
    for report in reports(opt_state):
        n = len(report.whats)
        codes = _code(report.values, np.arange(place, place + n))
        verdict = jnp.minimum(verdict, jnp.min(codes, initial=LIMIT))
        place += n
    for i, value in ((_LOSS, loss), (_GRADIENT, grad_norm), (place, update_norm)):
        if value is not None:
            verdict = jnp.minimum(verdict, _code(value, i))
    return jnp.where(verdict == LIMIT, 0, verdict)


def _code(value: ArrayLike, place: int | np.ndarray) -> jax.Array:
    """LIMIT if the value at this place is finite, else the verdict of a step with this value."""
    code = jnp.where(jnp.isfinite(value), LIMIT, np.int32(2) * place + jnp.isnan(value))
    return code.astype(jnp.int32)


def overflowed(verdict: Scalar) -> Scalar:
    """Whether the loss or the gradient was not finite, and not only the report of a rule."""
    return (verdict > 0) & (verdict < 2 * _CLOCK)


def is_of_loss(verdict: Scalar) -> Scalar:
    """Whether the loss was not finite."""
    return (verdict > 0) & (verdict < 2 * _GRADIENT)


def explain(verdict: int, opt_state: PyTree, grads: PyTree = None) -> str:
    """A verdict in words. With the gradients, the words name the leaf that was not finite."""
    if verdict <= 0:
        return "applied" if verdict == 0 else "gathered"
    place, is_nan = divmod(int(verdict), 2)
    norm = "gradient norm" if grads is None else locate(grads)
    places = [f"loss: {GOT}", f"{norm}: {GOT}", f"clock, at its limit of {LIMIT} calls"]
    places += [text for report in reports(opt_state) for text in report.whats]
    places += [f"update that the rule made of finite gradients, or decay of an average: {GOT}"]
    return places[place - 1].replace(GOT, f"got {'nan' if is_nan else 'inf'}")


def locate(grads: PyTree) -> str:
    """The first gradient leaf that is not finite, or overflows when squared."""
    squares = square_sums(grads)
    for (path, leaf), square in zip(trees.leaves_at("params", grads), squares, strict=True):
        if not bool(jnp.isfinite(square)):
            subject = "norm of the gradient" if bool(jnp.all(jnp.isfinite(leaf))) else "gradient"
            return f"{subject} of {path}, shape {jnp.shape(leaf)}"
    return "gradient norm"


def fault_in_batch(batch: PyTree) -> str:
    """The first leaf of a batch that is not finite, in words; "" if all are finite."""
    for path, leaf in trees.leaves_at("batch", batch):
        bad = ~jnp.isfinite(leaf) if trees.is_inexact(leaf) else np.zeros(1, bool)
        if count := int(jnp.sum(bad)):
            first = [int(i) for i in np.unravel_index(int(jnp.argmax(bad)), np.shape(leaf))]
            text = f"{path} has {count} of {np.size(leaf)} not finite"
            return f"{text}, the first at {first}" if first else text
    return ""


# The choice between two states


def choose(take: jax.Array | list[Any], new: PyTree, old: PyTree) -> PyTree:
    """Leaf by leaf `new` if `take` is true, else `old`, in the dtypes of `new` as in plain optax.

    `take` is one scalar bool, or a list with a bool for each leaf. Leaves are selected, not
    multiplied, because 0 · NaN is NaN.
    """
    new, treedef = jax.tree.flatten(new)
    old = treedef.flatten_up_to(old)
    take = take if isinstance(take, list) else [take] * len(new)

    def choose_leaf(flag: Any, n: Any, o: Any):
        if n is o or flag is True:
            return n
        host, (n, o) = n, trees.on_device((n, o))
        o = o if o.dtype == n.dtype else o.astype(n.dtype)
        return trees.offloaded_like(jnp.where(flag, n, o), host)

    return treedef.unflatten([choose_leaf(f, n, o) for f, n, o in zip(take, new, old, strict=True)])


def without_frozen(tree: PyTree, thawed: list[Any] | None) -> PyTree:
    """The tree with zeros for frozen leaves, which then count in no norm. Integers stay."""
    if thawed is None:
        return tree
    zero = lambda x: jnp.zeros_like(x) if trees.is_inexact(x) else x
    return choose(thawed, tree, jax.tree.map(zero, tree))


def decide(
    take: jax.Array, applied: Callable[[], PyTree], old: PyTree, *, may_branch: bool = True
) -> PyTree:
    """The result of `applied()` if `take` is true, else `old`, which has the same structure.

    On a CPU only the branch that is taken runs, if it `may_branch`: a `lax.cond`, with the memory
    and the time of a step without a verdict. Other devices select, because XLA fuses their selects
    into the update. So do devices of a mesh, because a collective must not be behind a condition,
    and devices inside `shard_map` that may decide differently. `vmap` turns the cond into a select.
    """
    selected = lambda: choose(take, applied(), old)
    if not may_branch or any(map(is_over_mesh, jax.tree.leaves((take, old)))):
        return selected()
    from tsunax._core import axes

    if axes.manual_axes() and axes.varying(take):
        return selected()
    as_new = lambda n, o: jnp.asarray(o, n.dtype)
    rejected = lambda: jax.tree.map(as_new, jax.eval_shape(applied), old)
    cond = lambda: jax.lax.cond(take, applied, rejected)
    return jax.lax.platform_dependent(cpu=cond, default=selected)


# A conditional costs an H200 6 us in its CUDA graph. The norm of updates with at most 8 leaves and
# 1 MiB costs less. Larger updates would need more kernels, or more memory traffic.
FEW_LEAVES, FEW_BYTES = 8, 1 << 20


def early_or_late(early: Callable[[], PyTree], late: Callable[[], PyTree], grads: PyTree) -> PyTree:
    """`early()`, which judges updates behind a condition, or `late()`, which judges each update.

    The condition costs more kernels and bytes on a TPU, and on a GPU if `grads` is small.
    """
    leaves = jax.tree.leaves(grads)
    if len(leaves) > FEW_LEAVES:
        return early()  # on each platform: a second branch would take time to trace
    is_small = sum(x.nbytes for x in leaves) <= FEW_BYTES
    return jax.lax.platform_dependent(cpu=early, tpu=late, default=late if is_small else early)


def unless(condition: jax.Array, excess: Callable[[], jax.Array]) -> jax.Array:
    """0 if the condition is true, else the result of `excess`, a reduction of updates.

    The barrier keeps XLA from computing both and selecting one; under `vmap` both are computed.
    """
    barred = lambda: jax.lax.optimization_barrier(excess())
    return jax.lax.cond(condition, lambda: jnp.zeros((), jnp.float32), barred)


# The clock of all calls


class WindowState:
    """A base class for states of rules that gather gradients: see `rules.accumulate`."""

    emitted: Any  # bool: whether the last call ended its window


def moves_params(opt_state: PyTree) -> jax.Array | None:
    """Whether the last call moved params, from its state; None if some rule runs on every call.

    A chain moves params with its last rule, a wrapper with its inner rule. A partition moves them
    with any of its rules, if all its rules have a window.
    """
    if isinstance(opt_state, WindowState):
        return opt_state.emitted
    if type(opt_state) is tuple:
        return moves_params(opt_state[-1]) if opt_state else None
    parts = getattr(opt_state, "inner", None)
    if parts is not None and not isinstance(parts, dict):
        return moves_params(parts)
    flags = [moves_params(part) for part in (parts or {}).values()]
    all_have_windows = flags and all(flag is not None for flag in flags)
    return functools.reduce(operator.or_, flags) if all_have_windows else None


def with_gathered(verdict: jax.Array | None, moves_params: jax.Array | None) -> jax.Array | None:
    """The verdict, or -1 if the step was not rejected but only gathered its gradient."""
    if moves_params is None:
        return verdict
    code = jnp.int32(0) if verdict is None else verdict
    return jnp.where((code == 0) & ~moves_params, -1, code)


_APPLIED, _GATHERED, _REJECTED = np.array([[1, 1, 0, 0], [0, 1, 0, 0], [0, 1, 1, 1]], np.int32)


def count(clock: jax.Array, moves_params: Maybe, verdict: Maybe = None) -> jax.Array:
    """The clock after this call: applied updates, calls, rejected calls, rejected calls in a row.

    The increments are constant vectors: XLA:CPU would run one more kernel for each stacked scalar.
    """
    old_clock = jnp.minimum(clock, LIMIT - 1)
    increments = _APPLIED if moves_params is None else jnp.where(moves_params, _APPLIED, _GATHERED)
    new_clock = old_clock * np.array([1, 1, 1, 0], np.int32) + increments
    return (
        new_clock if verdict is None else jnp.where(verdict == 0, new_clock, old_clock + _REJECTED)
    )
