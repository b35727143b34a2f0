"""One verdict per step, and one choice: was everything finite, and which of two states goes on.

A verdict is one int32 computed inside the step: 0 if the step is applied, -1 if it only gathered
its gradient, else twice the place of the first value that is not finite, plus one if it is NaN.
The places are the loss, the norm of the gradient, the clock, what rules report, and the norm of
the update. The verdict is part of the info, so that no step waits for the device; `explain` turns
it into words on the host. It does not say which leaf of the gradient was bad, because a map of
200 leaves would cost every step what only a bad one needs: `locate` looks at the gradients again.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownLambdaType=false
import contextlib
import contextvars
import functools
import operator
from collections import defaultdict
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from tsunax._core import Maybe, PyTree, Scalar, trees

POLICIES = ("skip", "raise", "ignore", "drop")
LIMIT = np.iinfo(np.int32).max
GOT = "got {}"


# Norms
#
# A kernel costs a CPU some microseconds to start, whatever it adds up, so that the norm of six
# small leaves would cost a small step as much as its gradient. Leaves of up to `SMALL` elements are
# therefore summed as one vector: a copy of at most 64 KiB each, for one reduction instead of one
# per leaf. Larger leaves are summed where they lie. So are all leaves of a program over a mesh: to
# join shards that lie on different devices, the devices would have to talk.

SMALL = 1 << 14  # elements


_over_mesh: contextvars.ContextVar[bool] = contextvars.ContextVar("_over_mesh", default=False)


@contextlib.contextmanager
def tracing(over_mesh: bool) -> Generator[None, None, None]:
    """A context that says whether the program traced in it is one over a mesh."""
    before = _over_mesh.set(over_mesh)
    try:
        yield
    finally:
        _over_mesh.reset(before)


def is_over_mesh(x: ArrayLike) -> bool:
    """Whether an array belongs to a program over a mesh: its type says so, or the context."""
    return _over_mesh.get() or bool(jax.typeof(x).sharding.mesh.axis_names)


def _square_sum(x: ArrayLike) -> jax.Array:
    x = jnp.asarray(x)
    if x.dtype not in (jnp.float32, jnp.float64, jnp.complex64, jnp.complex128):
        x = x.astype(jnp.float32)
    squares = jnp.square(x.real)
    return jnp.sum(squares + jnp.square(x.imag) if jnp.iscomplexobj(x) else squares)


def square_sums(tree: PyTree) -> list[jax.Array]:
    """sum(|x|²) of each leaf, in float32 whatever its dtype (float64 for float64)."""
    return [_square_sum(leaf) for leaf in jax.tree.leaves(tree)]


def global_norm(tree: PyTree) -> jax.Array:
    """sqrt(sum over leaves of sum(|x|²)), as `optax.tree.norm`.

    Float32 whatever the dtypes of the leaves, float64 if any is.
    """
    large, small = [], defaultdict(list)
    for x in map(jnp.asarray, jax.tree.leaves(tree)):
        if x.size > SMALL or is_over_mesh(x):
            large.append(x)
        else:
            small[x.dtype].append(x.ravel())
    joined = [jnp.concatenate(xs) if len(xs) > 1 else xs[0] for xs in small.values()]
    sums = square_sums(large + joined) or [jnp.zeros((), jnp.float32)]
    dtype = np.result_type(*(s.dtype for s in sums))
    return jnp.sqrt(sum(s.astype(dtype) for s in sums))


# The verdict


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RuleReport:
    """Numbers that a rule leaves in its state: if one is not finite, the step is rejected."""

    values: jax.Array  # f32 of shape (n,)
    # a text for each, with path and shape; "{}" stands for "nan" or "inf"
    whats: tuple[str, ...] = field(metadata={"static": True})


def _is_report(x: object) -> bool:
    return isinstance(x, RuleReport) or hasattr(type(x), "whats")  # a state of a rule that reports


def reports(opt_state: PyTree) -> list[Any]:
    return [x for x in jax.tree.leaves(opt_state, is_leaf=_is_report) if _is_report(x)]


_LOSS, _GRADIENT, _CLOCK, _REPORTS = 1, 2, 3, 4  # places; the update has the one after the reports


def judge(
    loss: Maybe, grad_norm: Maybe, calls: jax.Array, opt_state: PyTree, update_norm: Maybe = None
) -> jax.Array:
    """The verdict: 0 if all is finite, else 2 · the first place that is not, + 1 for a NaN.

    The order of the places is: loss, gradient, clock, reports, update.
    """
    verdict, place = jnp.where(calls < LIMIT, LIMIT, 2 * _CLOCK), _REPORTS
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
    """LIMIT if the value at this place is finite, else the verdict that it leads to."""
    code = jnp.where(jnp.isfinite(value), LIMIT, np.int32(2) * place + jnp.isnan(value))
    return code.astype(jnp.int32)


def overflowed(verdict: Scalar) -> Scalar:
    """Whether the loss or the gradient was not finite, rather than a value reported by a rule."""
    return (verdict > 0) & (verdict < 2 * _CLOCK)


def is_of_loss(verdict: Scalar) -> Scalar:
    """Whether the loss was not finite."""
    return (verdict > 0) & (verdict < 2 * _GRADIENT)


def with_gathered(verdict: jax.Array | None, emitted: jax.Array | None) -> jax.Array | None:
    """The verdict, or -1 if the step was taken but only gathered its gradient."""
    if emitted is None:
        return verdict
    taken = jnp.int32(0) if verdict is None else verdict
    return jnp.where((taken == 0) & ~emitted, -1, taken)


_APPLIED, _GATHERED, _REJECTED = np.array([[1, 1, 0, 0], [0, 1, 0, 0], [0, 1, 1, 1]], np.int32)


def count(clock: jax.Array, emitted: Maybe, verdict: Maybe = None) -> jax.Array:
    """The clock after this call: applied updates, calls, rejected ones, rejected ones in a row.

    Of constants, not stacked from scalars: XLA:CPU would run a kernel of its own for each.
    """
    now = jnp.minimum(clock, LIMIT - 1)
    more = _APPLIED if emitted is None else jnp.where(emitted, _APPLIED, _GATHERED)
    taken = now * np.array([1, 1, 1, 0], np.int32) + more
    return taken if verdict is None else jnp.where(verdict == 0, taken, now + _REJECTED)


def explain(verdict: int, opt_state: PyTree, grads: PyTree = None) -> str:
    """A verdict in words; given the gradients, with the leaf that was not finite."""
    if verdict <= 0:
        return "applied" if verdict == 0 else "gathered"
    place, is_nan = divmod(int(verdict), 2)
    norm = "gradient norm" if grads is None else locate(grads)
    places = [f"loss: {GOT}", f"{norm}: {GOT}", f"clock, at its limit of {LIMIT} calls"]
    places += [what for report in reports(opt_state) for what in report.whats]
    places += [f"update that the rule made of finite gradients: {GOT}"]
    return places[place - 1].replace(GOT, f"got {'nan' if is_nan else 'inf'}")


def locate(grads: PyTree) -> str:
    """The first gradient leaf that is not finite, or overflows when squared."""
    squares = square_sums(grads)
    for (at, leaf), square in zip(trees.leaves_at("params", grads), squares, strict=True):
        if not bool(jnp.isfinite(square)):
            what = "norm of the gradient" if bool(jnp.all(jnp.isfinite(leaf))) else "gradient"
            return f"{what} of {at}, shape {jnp.shape(leaf)}"
    return "gradient norm"


def in_batch(batch: PyTree) -> str:
    """The first leaf of a batch that is not finite, in words; "" if all are finite."""
    for at, leaf in trees.leaves_at("batch", batch):
        bad = ~jnp.isfinite(leaf) if trees.is_inexact(leaf) else np.zeros(1, bool)
        if count := int(jnp.sum(bad)):
            first = [int(i) for i in np.unravel_index(int(jnp.argmax(bad)), np.shape(leaf))]
            found = f"{at} has {count} of {np.size(leaf)} not finite"
            return f"{found}, the first at {first}" if first else found
    return ""


def emitted(opt_state: PyTree) -> jax.Array | None:
    """Whether the call that left this state moved params; None if some rule runs on every call.

    A chain waits for its last rule, a wrapper for the rule whose state is its `inner`, a partition
    for any of its rules if all of them have a window.
    """
    if getattr(type(opt_state), "waits", False):  # the window of `rules.accumulate`
        return opt_state.emitted
    if type(opt_state) is tuple:
        return emitted(opt_state[-1]) if opt_state else None
    parts = getattr(opt_state, "inner", None)
    if parts is not None and not isinstance(parts, dict):
        return emitted(parts)
    found = [emitted(part) for part in (parts or {}).values()]
    all_wait = found and all(x is not None for x in found)
    return functools.reduce(operator.or_, found) if all_wait else None


# The choice between two states
#
# A verdict needs the norm of what the rule would add to params, so that it is known only after the
# rule ran. The choice between the two states then costs a select for each array: little where steps
# are long, and on other devices than a CPU, where XLA makes a few kernels of all of them. A CPU
# pays for each kernel's start, and for a small model three times as much as for the step itself
# (tiny MLP, Adam: 32 us without a verdict, 98 with selects, 37 with the cond below).
#
# So states of small leaves are chosen by a `lax.cond` on a CPU. Its taken branch computes rule and
# application once more. XLA drops from the first run all but what the verdict reads: the norm of
# the updates, which is one kernel, and the reports of rules. That pays as long as the arithmetic of
# a rule costs less than the starts of its kernels: up to 16 KiB a leaf on average, and only for
# rules that work element by element. All others keep the selects: the second run of a norm, a
# product, a loop or a callback costs more than it saves, and a collective must not stand behind a
# condition. Under `vmap` the cond is a select by itself. Programs over a mesh, and devices inside
# `shard_map` that may decide differently, keep the selects too.
#
# Both ways compute the same. Their bits are the same if a gradient ends in a product or a sum over
# rows, as the gradient of a weight does. If it ends element by element (a penalty, scaled or tanh
# weights), XLA fuses that end into the update and rounds once less, as in a plain optax step. A
# cond keeps the two apart (`docs/live-rules.md`).

BYTES = 1 << 14  # of a trained leaf, on average

_CHEAP = frozenset(
    "add sub mul div neg abs sign sqrt rsqrt cbrt square pow integer_pow exp exp2 expm1 log "
    "log1p tanh logistic erf sin cos max min clamp select_n eq ne lt le gt ge and or not xor "
    "is_finite floor ceil round rem add_any copy copy_p real imag conj complex "
    "convert_element_type bitcast_convert_type stop_gradient broadcast_in_dim reshape squeeze "
    "expand_dims transpose slice concatenate iota jit pjit closed_call custom_jvp_call "
    "custom_vjp_call cond platform_index".split()
)


def choose(take: jax.Array | list[Any], new: PyTree, old: PyTree) -> PyTree:
    """Leaf by leaf `new` if `take` is true, else `old`, in the dtypes of `new` as in plain optax.

    `take` is one scalar bool, or a list with one for each leaf. Selects, never multiplies: 0 · NaN
    is NaN.
    """
    new, treedef = jax.tree.flatten(new)
    old = treedef.flatten_up_to(old)
    take = take if isinstance(take, list) else [take] * len(new)

    def one(flag: Any, n: Any, o: Any):
        if n is o or flag is True:
            return n
        host, (n, o) = n, trees.on_device((n, o))
        o = o if o.dtype == n.dtype else o.astype(n.dtype)
        return trees.offloaded_like(jnp.where(flag, n, o), host)

    return treedef.unflatten([one(f, n, o) for f, n, o in zip(take, new, old, strict=True)])


def candidate(
    applied: Callable[[], tuple[Any, ...]], trained: list[Any], state: PyTree, *, once: bool = False
) -> tuple[tuple[Any, ...], Callable[[], tuple[Any, ...]] | None]:
    """The result of `applied()`, and a function that computes it again.

    The function is None under `once`, and if these trained leaves are too large for a second run.
    Leaves of `state` in the result stay the same objects.
    """
    large = sum(x.size * x.dtype.itemsize for x in trained) > BYTES * len(trained)
    if large or once or any(map(is_over_mesh, trained)) or not trees.is_tracing():
        return applied(), None
    from jax.extend.core import jaxpr_as_fun  # costs 20 ms to import

    old, found = {id(x) for x in jax.tree.leaves(state)}, []

    def computed() -> list[Any]:
        leaves, treedef = jax.tree.flatten(applied())
        found[:] = treedef, [x if id(x) in old else None for x in leaves]
        return [x for x in leaves if id(x) not in old]

    # traced once for both runs, and one equation in each
    program = jax.make_jaxpr(jax.jit(computed))()
    treedef, same = found

    def run() -> tuple[Any, ...]:
        new = iter(jaxpr_as_fun(program)())
        return treedef.unflatten([next(new) if x is None else x for x in same])

    return run(), run if _is_cheap(getattr(program, "jaxpr", program)) else None


def between(take: jax.Array, new: PyTree, old: PyTree, again: Callable[[], Any] | None) -> PyTree:
    """The tree `new` if `take` is true, else `old`; `again` computes `new` once more."""
    if again is None:
        return choose(take, new, old)
    if trees.manual_axes():
        from tsunax._core import axes

        if axes.varying(take):  # devices inside `shard_map` may decide differently
            return choose(take, new, old)

    def cond() -> PyTree:
        as_new = lambda n, o: o if o.dtype == n.dtype else o.astype(n.dtype)
        return jax.lax.cond(take, again, lambda: jax.tree.map(as_new, new, old))

    return jax.lax.platform_dependent(cpu=cond, default=lambda: choose(take, new, old))


def _is_cheap(jaxpr: Any) -> bool:
    """Whether a program consists of cheap primitives only, which work element by element."""
    if jaxpr.effects or any(eqn.primitive.name not in _CHEAP for eqn in jaxpr.eqns):
        return False
    return all(_is_cheap(part) for eqn in jaxpr.eqns for part in trees.programs_in(eqn))
