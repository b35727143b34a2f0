"""Numbers of every layer, computed inside the program of a step at the calls where they are due.

    step = ts.train_step(loss_fn, watch=ts.Watch("**", of=("grads",), every=100))

`Watch` says what to measure, `Watched` is the result, `info.watch`. A condition of the compiled
program skips the work of all other calls.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownLambdaType=false
from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tsunax._core import Function, PyTree, Where, checks, patterns, placement, trees
from tsunax.errors import HyperparameterError
from tsunax.rules.leaf_owners import owners_of
from tsunax.state import TrainState, master_params

__all__ = ["Watch"]

KINDS = ("grads", "params", "updates", "moments")
NUMBERS = ("norm", "rms", "zeros", "max")
COLUMNS = "watch/"  # the beginning of the names in rows
HISTOGRAM = "histogram"


@dataclass(frozen=True)
class Watch:
    """The numbers of each layer that `train_step(loss_fn, watch=...)` measures.

    The numbers are in `info.watch`, `info.watch.named()` by name, such as
    `"encoder/kernel/grads_norm"`; in rows of `fit`, "watch/encoder/kernel/grads_norm". They are
    computed at the first call of a state and at each multiple of `every`, as `state.calls` counts
    them. At other calls `info.watch.due` is 0, and the row has no such columns. A rejected step
    reports its gradients with their NaN; its updates are NaN if the rule did not run.

    Args:
      where: the trained leaves, by the patterns of `freeze`.
      of: of "grads" (before the rule), "params" (after the step), "updates" (of the rule) and
        "moments" (the arrays of the optimizer state that belong to a leaf, after the step).
      every: calls from one measurement to the next.
      numbers: of "norm" (L2), "rms", "zeros" (the share of elements that are 0) and "max" (the
        largest absolute value).
      unit: "leaf", or "layer" for one number of all leaves with the same parent.
      stacked: patterns of the leaves with a first axis of layers, as `nn.scan` and
        `nnx.scan` make them: they get numbers of each layer, `"blocks/kernel/grads_norm"` of shape
        (layers,).
      histogram: the number of bins of a histogram of each leaf or layer, 0 for none.

    Raises HyperparameterError or WrongTypeError for other values; the first call raises
    PatternError for patterns without a leaf, and HyperparameterError if only "moments" are watched
    and the rule has none of these leaves.

    >>> import tsunax as ts
    >>> watch = Watch("**", every=10, numbers=("norm", "max"))
    >>> step = ts.train_step(lambda params, x: jnp.sum(params["w"] * x), watch=watch)
    >>> state = ts.setup(ts.rules.sgd(0.1), {"w": jnp.array([1.0, 2.0])})
    >>> state, info = step(state, jnp.array([3.0, -4.0]))
    >>> {name: float(x) for name, x in info.watch.named().items()}
    {'w/grads_norm': 5.0, 'w/grads_max': 4.0}
    """

    where: Where = "**"
    of: Sequence[str] = ("grads",)
    every: int = 100
    _: KW_ONLY
    numbers: Sequence[str] = ("norm",)
    unit: str = "leaf"
    stacked: Where | None = None
    histogram: int = 0

    def __post_init__(self) -> None:
        calls = checks.check_count(self.every, "Watch()", "every")
        object.__setattr__(self, "every", calls)  # an array has no hash
        checks.check_count(self.histogram, "Watch()", "histogram", 0)
        checks.check_choice(self.unit, "Watch()", "unit", ("leaf", "layer"))
        for name, choices in (("of", KINDS), ("numbers", NUMBERS)):
            value = getattr(self, name)
            value = (value,) if isinstance(value, str) else tuple(value)
            if not value:
                raise HyperparameterError(name, "Watch()", value, f"some of {', '.join(choices)}")
            for choice in value:
                checks.check_choice(choice, "Watch()", name, choices)
            object.__setattr__(self, name, value)
        for name in ("where", "stacked"):  # a step is hashed
            if isinstance(value := getattr(self, name), list):
                object.__setattr__(self, name, tuple(value))

    def numbers_of_updates(self, state: TrainState, updates: PyTree) -> jax.Array | None:
        """The numbers of the updates of a rule, f32 (numbers,); None if they are not watched."""
        if "updates" not in self.of:
            return None
        return self._measured(state, self._groups(state, "updates", updates))

    def report(
        self, state: TrainState, new: TrainState, grads: PyTree, update_numbers: jax.Array | None
    ) -> Watched:
        """The report of a step from `state` to `new`, with the result of `numbers_of_updates`."""
        read = {"grads": lambda: grads, "params": lambda: master_params(new)}
        read["moments"] = lambda: new.opt_state
        # only for the layout: updates have the paths and shapes of the gradients
        updates = self._groups(state, "updates", grads) if "updates" in self.of else []
        groups = [
            group
            for kind in self.of
            if kind != "updates"
            for group in self._groups(state, kind, read[kind]())
        ]
        if not (groups or updates):
            expected = "another kind, because the rule has no moments of these leaves"
            raise HyperparameterError("of", "Watch()", self.of, expected)
        values = [self._measured(state, groups)] if groups else []
        layout = tuple(
            Block(group.path, group.kind, group.layers, self.numbers, self.histogram)
            for group in (*groups, *updates)
        )
        values += [] if update_numbers is None else [update_numbers]
        return Watched(jnp.concatenate(values), self._due(state).astype(jnp.int32), layout)

    def _due(self, state: TrainState) -> jax.Array:
        return (state.calls == 0) | ((state.calls + 1) % self.every == 0)

    def _measured(self, state: TrainState, groups: Sequence[Group]) -> jax.Array:
        """The numbers of the groups if the call is due, else zeros, without their computation."""
        of_arrays = functools.partial(_numbers_of_arrays, self.numbers, self.histogram)
        measures = [of_arrays if group.layers is None else jax.vmap(of_arrays) for group in groups]

        def measure(groups_of_arrays: Sequence[Sequence[jax.Array]]) -> jax.Array:
            pairs = zip(measures, groups_of_arrays, strict=True)
            return jnp.concatenate([f(arrays).ravel() for f, arrays in pairs])

        # The numbers are no part of the result that a gradient through a step follows.
        arrays = jax.lax.stop_gradient([group.arrays for group in groups])
        return _if_any_due(measure)(self._due(state), arrays)

    def _groups(self, state: TrainState, kind: str, tree: PyTree) -> list[Group]:
        """The arrays of a tree that are measured together: one leaf, or the leaves of a layer."""
        params = master_params(state)
        paths = [trees.path_str(name) for name, _, _ in trees.leaves_with_names(params)]
        is_watched = patterns.select(self.where, params, "Watch()")
        is_stacked = [False] * len(paths)
        if self.stacked is not None:
            is_stacked = patterns.select(self.stacked, params, "Watch()")
        flags = dict(zip(paths, zip(is_watched, is_stacked, strict=True), strict=True))
        named = _moments(state, tree) if kind == "moments" else _leaves(kind, tree)
        groups: dict[Any, Group] = {}
        for path, name, array in named:
            watched, stacked = flags[path]
            if not watched:
                continue
            layers = np.shape(array)[0] if stacked and np.ndim(array) else None
            place = path.rpartition("/")[0] if self.unit == "layer" else path
            key = place, name, layers
            groups.setdefault(key, Group(place, name, layers, [])).arrays.append(array)
        return list(groups.values())


class Group(NamedTuple):
    """Arrays with common numbers."""

    path: str
    kind: str  # "grads", or the name of a moment: "mu"
    layers: int | None  # the length of their first axis, if it numbers layers
    arrays: list[Any]


class Block(NamedTuple):
    """The place of the numbers of a group in `Watched.values`."""

    path: str
    kind: str
    layers: int | None
    numbers: Sequence[str]
    bins: int

    @property
    def width(self) -> int:
        """The numbers of one layer. A histogram has its two ends before its counts."""
        return len(self.numbers) + (2 + self.bins if self.bins else 0)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Watched:
    """The numbers of a `Watch` at one call, `info.watch`; stacked like other infos in a loop."""

    values: jax.Array  # f32 (numbers,): zeros if it is not due
    due: jax.Array  # int32: 1 at the calls that are measured, else 0
    layout: tuple[Block, ...] = field(metadata={"static": True})

    def named(self) -> dict[str, Any]:
        """The numbers by name, f32 of shape (), or (layers,) for stacked layers; no histograms."""
        numbers: dict[str, Any] = {}
        for name, block, values in self._blocks():
            for i, number in enumerate(block.numbers):
                numbers[f"{name}_{number}"] = values[..., i]
        return numbers

    def histograms(self) -> dict[str, tuple[Any, Any]]:
        """{name: (counts, edges)} of shapes (bins,) and (bins + 1,), after the axis of layers.

        The edges divide the range of the finite elements evenly; other elements do not count.
        """
        histograms: dict[str, tuple[Any, Any]] = {}
        for name, block, values in self._blocks():
            if block.bins:
                low, high, counts = jnp.split(values[..., len(block.numbers) :], [1, 2], -1)
                shares = np.linspace(0, 1, block.bins + 1, dtype=np.float32)
                edges = low + (high - low) * shares.reshape(*[1] * (low.ndim - 1), -1)
                histograms[f"{name}_{HISTOGRAM}"] = counts, edges
        return histograms

    def columns(self) -> dict[str, np.ma.MaskedArray]:
        """`named()` of stacked infos on the host as columns of rows, masked where not due."""

        def masked(x: np.ndarray) -> np.ma.MaskedArray:
            is_absent = np.reshape(
                self.due == 0, (*self.due.shape, *[1] * (x.ndim - self.due.ndim))
            )
            return np.ma.masked_array(x, np.broadcast_to(is_absent, x.shape))

        return {f"{COLUMNS}{name}": masked(x) for name, x in self.named().items()}

    def _blocks(self) -> Iterator[tuple[str, Block, Any]]:
        start = 0
        for block in self.layout:
            end = start + (block.layers or 1) * block.width
            values, start = self.values[..., start:end], end
            if block.layers is not None:
                values = values.reshape(*values.shape[:-1], block.layers, block.width)
            yield f"{block.path}/{block.kind}".removeprefix("/"), block, values


def _leaves(kind: str, tree: PyTree) -> list[tuple[str, str, Any]]:
    """`(path, kind, array)` of each leaf."""
    return [(trees.path_str(name), kind, x) for name, _, x in trees.leaves_with_names(tree)]


def _moments(state: TrainState, opt_state: PyTree) -> list[tuple[str, str, Any]]:
    """`(path of the param, name of the moment, array)` of the arrays that belong to a leaf.

    The name is the field of the optimizer state, "mu" in the path "0/mu/encoder/kernel", or "0.mu"
    if several moments of the leaf are called so.
    """
    params = master_params(state)
    names_of_params = [names for names, _, _ in trees.leaves_with_names(params)]
    owners = owners_of(state.plan.init, opt_state, state.numbers, params)
    moments: list[tuple[str, str, Any]] = []
    for (names, _, x), owner in zip(trees.leaves_with_names(opt_state), owners, strict=True):
        if owner is not None and trees.is_inexact(x):
            names_of_owner = names_of_params[owner]
            depth = len(names) - len(names_of_owner)
            prefix = names[:depth] if names[depth:] == names_of_owner else names
            moments.append((trees.path_str(names_of_owner), trees.path_str(prefix), x))
    short = lambda prefix: prefix.rpartition("/")[2]
    counts = Counter((path, short(prefix)) for path, prefix, _ in moments)
    name_of = lambda path, prefix: (
        short(prefix) if counts[path, short(prefix)] == 1 else prefix.replace("/", ".")
    )
    return [(path, name_of(path, prefix), x) for path, prefix, x in moments]


def _numbers_of_arrays(names: Sequence[str], bins: int, arrays: Sequence[jax.Array]) -> jax.Array:
    """The numbers by these names over all elements of some arrays, then their histogram: f32."""
    arrays = [x.astype(jnp.promote_types(x.dtype, jnp.float32)) for x in arrays]
    size = max(sum(x.size for x in arrays), 1)
    total = lambda f: sum((jnp.sum(f(x)) for x in arrays), jnp.float32(0))
    square = lambda x: jnp.square(x.real) + (jnp.square(x.imag) if jnp.iscomplexobj(x) else 0)
    # A maximum on a CPU ignores NaN in large arrays (docs/upstream.md).
    largest = lambda: jnp.max(jnp.stack([jnp.max(jnp.abs(x), initial=0) for x in arrays]))
    number_of = {
        "norm": lambda: jnp.sqrt(total(square)),
        "rms": lambda: jnp.sqrt(total(square) / size),
        "zeros": lambda: total(lambda x: x == 0) / size,
        "max": lambda: jnp.where(total(lambda x: x != x) > 0, jnp.nan, largest()),
    }
    numbers = [jnp.stack([number_of[name]().astype(jnp.float32) for name in names])]
    return jnp.concatenate([*numbers, *([_histogram(arrays, bins)] if bins else [])])


def _histogram(arrays: Sequence[jax.Array], bins: int) -> jax.Array:
    """The lowest and the highest finite element, then the counts between them: f32 (2 + bins,)."""
    reals = [jnp.abs(x) if jnp.iscomplexobj(x) else x for x in arrays]
    of_finite = lambda x, default: jnp.where(jnp.isfinite(x), x, default)
    low = functools.reduce(jnp.minimum, [jnp.min(of_finite(x, jnp.inf)) for x in reals])
    high = functools.reduce(jnp.maximum, [jnp.max(of_finite(x, -jnp.inf)) for x in reals])
    scale = bins / jnp.where(high > low, high - low, 1)
    counts = jnp.zeros(bins, jnp.float32)
    for x in reals:
        number = jnp.clip(jnp.floor((of_finite(x, low) - low) * scale), 0, bins - 1)
        number = jnp.where(jnp.isfinite(x), number, -1)
        # A comparison with each bin fuses into one reduction, also over the shards of a mesh.
        bin_numbers = jnp.arange(bins, dtype=number.dtype).reshape(*[1] * x.ndim, bins)
        is_in_bin = number[..., None] == bin_numbers
        counts += jnp.sum(is_in_bin, range(x.ndim))
    return jnp.concatenate([jnp.stack([low, high]).astype(jnp.float32), counts])


def _if_any_due(measure: Function) -> Function:
    """`f(due, arrays)`: `measure(arrays)` if due, else zeros, by a cond that `vmap` keeps.

    `vmap` turns a condition with an axis into a select, which computes both sides in every call.
    Members of a population are due together, so their condition is whether a member is due.
    """

    def f(due: jax.Array, arrays: Any) -> jax.Array:
        shape = jax.eval_shape(measure, arrays)
        # zeros that are computed from a value of the state, and so are on its mesh
        zeros = lambda: jnp.broadcast_to(due.astype(shape.dtype), shape.shape)
        skip = lambda arrays: placement.spread_like(zeros(), shape)
        return jax.lax.cond(due, measure, skip, arrays)

    measured = jax.custom_batching.custom_vmap(f)

    @measured.def_vmap
    def _(axis_size: int, in_batched: Any, due: jax.Array, arrays: Any) -> Any:
        axes = jax.tree.map(lambda is_batched: 0 if is_batched else None, in_batched[1])
        of_members = jax.vmap(measure, in_axes=(axes,), axis_size=axis_size)
        return _if_any_due(of_members)(jnp.any(due), arrays), True

    return measured
