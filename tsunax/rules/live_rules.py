"""Live rules: optax factories whose numbers are arrays in the state, no constants of the program.

A live rule has the *untouched* optax state beside a small table of its numbers. At every update the
factory is called again, inside the trace, with `Number` objects read from that table: a new value
is a new array and never a new program. Tables are described in `number_table.py`, groups of values
for parts of the params in `subtree_numbers.py`.

This file knows optax and trees. It must not know `TrainState`.
"""

from __future__ import annotations

import contextvars
import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from tsunax._core import Function, Maybe, PyTree, Scalar, trees
from tsunax.errors import RuleError, WrongTypeError
from tsunax.rules.number_table import Number, ScheduleShape, as_scalar, is_live

if TYPE_CHECKING:
    from tsunax.rules.subtree_numbers import Cut


@dataclass(frozen=True, eq=False)
class Live:
    """A factory with its static arguments, names and schedules, without the numbers.

    Compared by value: rules that differ in numbers only share one compiled program.
    """

    factory: Function
    statics: Mapping[str, Any]
    names: tuple[str, ...]
    schedules: tuple[ScheduleShape | None, ...]

    @property
    def title(self) -> str:
        return factory_name(self.factory)

    def in_words(self, inner: Callable[[Any], str]) -> str:
        """The rule without its numbers, for checkpoints."""
        flags = (f"{name}={inner(x)}" for name, x in sorted(self.statics.items()))
        return f"{self.title}({', '.join([*self.names, *flags])})"

    @functools.cached_property
    def columns(self) -> int:
        return len(self.names) + sum(s.size for s in self.schedules if s)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        # `type(self)`, not `Live`: a comparison at the interpreter's exit finds no global names
        if type(other) is not type(self) or self.statics.keys() != other.statics.keys():
            return False
        parts = lambda x: (x.factory, x.names, x.schedules)
        same = (self._same(v, other.statics[k]) for k, v in self.statics.items())
        return parts(self) == parts(other) and all(same)

    def __hash__(self) -> int:
        return hash((self.factory, self.names))

    @staticmethod
    def _same(a, b) -> bool:
        pairs = jax.tree.flatten(a), jax.tree.flatten(b)
        (a, of_a), (b, of_b) = pairs
        one = lambda x, y: x is y or (type(x) is type(y) and bool(x == y))
        try:  # by leaf: `(1,) == (True,)`
            return of_a == of_b and all(map(one, a, b))
        except (ValueError, TypeError):  # arrays in a mask: equal only if they are the same object
            return False

    def read(self, table: jax.Array, step: ArrayLike) -> dict[str, Number]:
        """The numbers in force at `step`, from one group's `table` of shape (4, columns)."""
        out, at = {}, len(self.names)
        for i, (name, schedule) in enumerate(zip(self.names, self.schedules, strict=True)):
            value, complement, held = table[0, i], table[1, i], table[2, i]
            if schedule:
                now = jnp.asarray(schedule.at(step, table[0, at : at + schedule.size]), table.dtype)
                value = jnp.where(held > 0, value, now)
                complement = jnp.where(held > 0, complement, 1 - now)
                at += schedule.size
            out[name] = Number(value, complement)
        return out

    def build(self, numbers: Mapping[str, Any]) -> optax.GradientTransformationExtraArgs:
        """The optax rule for these numbers."""
        outer = building.set(True)
        try:
            tx = self.factory(**self.statics, **numbers)
        except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError) as error:
            raise RuleError(_BRANCHES.format(self.title)) from error
        finally:
            building.reset(outer)
        if not isinstance(tx, optax.GradientTransformation):
            expected = "an optax.GradientTransformation"
            raise WrongTypeError("result", f"{self.title}()", trees.describe(tx), expected)
        return optax.with_extra_args_support(tx)


# True inside a live factory, where rules are plain: the factory's own numbers are the live ones
building: contextvars.ContextVar[bool] = contextvars.ContextVar("building", default=False)

_BRANCHES = (
    "number at {0}(): got a Python decision on its value, expected none on a live number. "
    "Keep that parameter fixed: live({0}, static=('name',))."
)


def factory_name(factory: object) -> str:
    return (getattr(factory, "__name__", None) or type(factory).__name__).strip("_")


def is_known(factory: object) -> bool:
    """Whether a factory is optax's or ours, and so known to work with any live number."""
    return (getattr(factory, "__module__", None) or "").partition(".")[0] in ("optax", "tsunax")


@dataclass(frozen=True)
class Scope:
    """The leaves of a live state and the clock of its schedules. All compare equal.

    optax maps over two states of one rule that were made from different trees: from placeholders
    (`tree_map_params`), and from the params of the moment (`lookahead`, `sam`).
    """

    paths: tuple[Any, ...] = field(compare=False)  # key path of each leaf that the rule sees
    own_clock: bool = field(default=False, compare=False)  # because the rule is given no `step=`


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class LiveState:
    """State of a live rule."""

    # (4, groups, columns): value, complement, held, given. None where a TrainState keeps it
    table: jax.Array | None
    inner: PyTree  # the optax state, with group 0's counters
    # the counters of the groups 1, 2, ...: the inner leaves that belong to no parameter
    extra: tuple[Any, ...] = ()
    # int32: updates of this rule, the clock of its schedules if no `step=` is given; else None
    count: Scalar = None
    live: Live = field(kw_only=True, metadata={"static": True})
    cut: Cut | None = field(default=None, kw_only=True, metadata={"static": True})
    scope: Scope = field(default=Scope(()), kw_only=True, metadata={"static": True})

    is_live: ClassVar[bool] = True

    def __getattr__(self, name: str) -> Any:
        """The fields of the optax state, for code written for that: `state.plateau_count`."""
        if name.startswith("_") or name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __getitem__(self, i: Any) -> Any:
        return self.inner[i]

    @property
    def paths(self) -> tuple[Any, ...]:
        return self.scope.paths

    @property
    def own_clock(self) -> bool:
        return self.scope.own_clock

    @property
    def groups(self) -> int:
        return len(self.cut.labels) if self.cut else 1


@dataclass(frozen=True)
class LiveUpdate:
    """The update half of a live rule, which reads the numbers from the state."""

    live: Live

    def in_words(self, inner: Callable[[Any], str]) -> str:
        return self.live.in_words(inner)

    def __call__(
        self,
        updates: PyTree,
        state: LiveState,
        params: PyTree = None,
        *,
        step: Maybe = None,
        **extra: Any,
    ) -> tuple[PyTree, LiveState]:
        table: Any = state.table if is_live(state) else None
        if table is None:
            where, fix = f"{self.live.title}()", "For the state of a TrainState use ts.update."
            raise RuleError("state", where, trees.describe(state), "the one of its init", fix)
        given = state.count if step is None else step, updates, params, {**extra, "step": step}
        run = lambda i, inner: _run_factory(self.live, table[:, i], inner, *given)
        if state.groups == 1:
            (updates, inner), counters = run(0, state.inner), ()
        else:
            from tsunax.rules import subtree_numbers

            parts = subtree_numbers.inners(self.live, state, updates)
            runs = [run(i, inner) for i, inner in enumerate(parts)]
            updates, inner, counters = subtree_numbers.merge_groups(self.live, state, updates, runs)
        count = None if state.count is None else optax.safe_increment(state.count)
        return updates, dataclasses.replace(state, inner=inner, extra=counters, count=count)

    def bounded(self, seen: Any, state: LiveState, bounds: list[Any]) -> list[Any]:
        table: Any = state.table
        groups = (self.live.read(table[:, i], state.count) for i in range(state.groups))
        rules = map(self.live.build, groups)
        return [x for tx in rules for x in seen.walk(tx.update, state.inner, bounds, tx.init)]


_MESHES = (jax.sharding.Mesh, jax.sharding.AbstractMesh)


def _run_factory(live: Live, table, inner, clock, updates, params, extra):
    """Run the plain rule once, with exact complements if its factory accepts them."""
    extra = {k: v for k, v in extra.items() if v is not None}
    mesh: Any = extra.get("device_mesh")
    if mesh is not None and not isinstance(mesh, _MESHES):
        got, expected = trees.describe(mesh), "a Mesh, or None"
        raise WrongTypeError("device_mesh", f"rules.{live.title}", got, expected)
    # shard_map works in programs: outside of one JAX computes array by array
    is_shared = mesh is not None and jax.sharding.AxisType.Explicit not in mesh.axis_types
    is_shared = is_shared and trees.is_tracing()

    def run(convert, updates, inner, params):
        numbers = {name: convert(x) for name, x in live.read(table, clock).items()}
        if is_shared and live.factory is optax.contrib.muon:
            from tsunax.rules.matrices import update_muon

            return update_muon({**live.statics, **numbers}, updates, inner, params, extra)
        return live.build(numbers).update(updates, inner, params, **extra)

    def avals(convert):
        out = jax.eval_shape(lambda *args: run(convert, *args), updates, inner, params)
        return jax.tree.map(lambda x: (x.shape, x.dtype), out)

    exact = lambda x: x
    full = all(trees.dtype_of(x) == table.dtype for x in jax.tree.leaves(updates))
    if full and is_known(live.factory):
        return run(exact, updates, inner, params)
    # some rules turn an exact complement into a strong float32 and would promote bfloat16 state
    try:
        if full or avals(exact) == avals(as_scalar):
            return run(exact, updates, inner, params)
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError) as error:
        raise RuleError(_BRANCHES.format(live.title)) from error
    except (TypeError, AttributeError):  # a function that takes arrays, and no objects like them
        pass
    return run(as_scalar, updates, inner, params)
