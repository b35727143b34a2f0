"""Live rules: optax factories with numbers that are arrays in the state, not program constants.

A live rule has the *untouched* optax state and a small table of its numbers. At every update the
factory is called again, inside the trace, with `Number` objects read from that table: a new value
is a new array and never a new program. Tables are described in `number_table.py`, groups of values
for parts of the params in `subtree_numbers.py`.

This file uses optax and trees. It must not import `TrainState`.
"""

import contextvars
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from tsunax._core import Function, Maybe, PyTree, Scalar, TreeDef, trees
from tsunax.errors import RuleError
from tsunax.rules.number_table import Number, as_scalar
from tsunax.rules.update_bounds import MadeOfRules


@dataclass(frozen=True)
class ScheduleShape:
    """A schedule without its numbers: `leaves` has `None` in place of a number of the table."""

    treedef: TreeDef
    leaves: tuple[Any, ...]

    def value_at(self, step: Maybe, numbers: Iterable[Scalar]) -> Scalar:
        numbers = iter(numbers)
        leaves = [next(numbers) if leaf is None else leaf for leaf in self.leaves]
        return jax.tree.unflatten(self.treedef, leaves)(step)


@dataclass(frozen=True, eq=False)
class Live:
    """A factory with its static arguments, names and schedules, but without numbers.

    It compares by value, so that rules that differ only in numbers share one compiled program.
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
    def schedule_columns(self) -> dict[str, range]:
        """The columns with the numbers of each schedule, after the numbers of all names."""
        shapes = [schedule.leaves if schedule else () for schedule in self.schedules]
        sizes = (sum(leaf is None for leaf in leaves) for leaves in shapes)
        bounds = itertools.pairwise(itertools.accumulate(sizes, initial=len(self.names)))
        return {name: range(*pair) for name, pair in zip(self.names, bounds, strict=True)}

    @property
    def columns(self) -> int:
        return len(self.names) + sum(map(len, self.schedule_columns.values()))

    def __eq__(self, rule: object) -> bool:
        if self is rule:
            return True
        # `type(self)`, not `Live`, because global names are gone when the interpreter exits.
        if type(rule) is not type(self) or self.statics.keys() != rule.statics.keys():
            return False
        compared_fields = lambda x: (x.factory, x.names, x.schedules)
        equal_statics = (self._is_equal(v, rule.statics[k]) for k, v in self.statics.items())
        return compared_fields(self) == compared_fields(rule) and all(equal_statics)

    def __hash__(self) -> int:
        return hash((self.factory, self.names))

    @staticmethod
    def _is_equal(a, b) -> bool:
        (a, treedef_a), (b, treedef_b) = jax.tree.flatten(a), jax.tree.flatten(b)
        is_equal = lambda x, y: x is y or (type(x) is type(y) and bool(x == y))
        try:  # compare leaf by leaf with types, because `(1,) == (True,)`
            return treedef_a == treedef_b and all(map(is_equal, a, b))
        except (ValueError, TypeError):  # arrays in a mask are equal only if they are one object
            return False

    def read(self, table: jax.Array, step: ArrayLike) -> dict[str, Number]:
        """The numbers in force at `step`, from one group's `table` of shape (4, columns)."""
        numbers = {}
        for i, (name, schedule) in enumerate(zip(self.names, self.schedules, strict=True)):
            value, complement, held_flag = table[0, i], table[1, i], table[2, i]
            if schedule:
                columns = self.schedule_columns[name]
                schedule_numbers = table[0, columns.start : columns.stop]
                scheduled = jnp.asarray(schedule.value_at(step, schedule_numbers), table.dtype)
                value = jnp.where(held_flag > 0, value, scheduled)
                complement = jnp.where(held_flag > 0, complement, 1 - scheduled)
            numbers[name] = Number(value, complement)
        return numbers

    def build(self, numbers: Mapping[str, Any]) -> optax.GradientTransformationExtraArgs:
        """The optax rule for these numbers."""
        token = building.set(True)
        try:
            tx = self.factory(**self.statics, **numbers)
        except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError) as error:
            raise RuleError(_BRANCHES_IN_PYTHON.format(self.title)) from error
        finally:
            building.reset(token)
        return optax.with_extra_args_support(tx)


# True inside a live factory: there rules are plain, because the factory's own numbers are live.
building: contextvars.ContextVar[bool] = contextvars.ContextVar("building", default=False)

_BRANCHES_IN_PYTHON = (
    "number at {0}(): got a Python decision on its value, expected none on a live number. "
    "Keep that parameter fixed: live({0}, static=('name',))."
)


def factory_name(factory: object) -> str:
    return (getattr(factory, "__name__", None) or type(factory).__name__).strip("_")


def is_library_factory(factory: object) -> bool:
    """Whether a factory is of optax or tsunax. These work with any live number."""
    return (getattr(factory, "__module__", None) or "").partition(".")[0] in ("optax", "tsunax")


@dataclass(frozen=True)
class Scope:
    """The leaves that a live rule sees, and the clock of its schedules. All scopes compare equal.

    The reason is that optax maps over two states of a rule that were made from different trees:
    from placeholders (`tree_map_params`) and from the current params (`lookahead`, `sam`).
    """

    paths: tuple[Any, ...] = field(compare=False)  # key path of each leaf that the rule sees
    own_clock: bool = field(default=False, compare=False)  # True if the rule gets no `step=`


@dataclass(frozen=True)
class Cut:
    """The groups of values of a live rule."""

    group_of_leaf: tuple[int, ...]  # the group of each leaf that the rule sees
    labels: tuple[str, ...]  # the name of each group


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class LiveState:
    """State of a live rule."""

    # (4, groups, columns): value, complement, whether it overrides its schedule, value at setup.
    # None inside a TrainState, which keeps all tables in `numbers`.
    table: jax.Array | None
    inner: PyTree  # the optax state, with group 0's counters
    # The counters of the groups 1, 2, ...: inner leaves that belong to no parameter.
    extra: tuple[Any, ...] = ()
    # int32: the clock of its schedules: updates of this rule, or the `step=` of the last update.
    # None without a schedule
    count: Scalar = None
    live: Live = field(kw_only=True, metadata={"static": True})
    cut: Cut | None = field(default=None, kw_only=True, metadata={"static": True})
    scope: Scope = field(default=Scope(()), kw_only=True, metadata={"static": True})

    is_live: ClassVar[bool] = True

    def __getattr__(self, name: str) -> Any:
        """The fields of the optax state, for code that reads them: `state.plateau_count`."""
        if name.startswith("_") or name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    def __getitem__(self, i: Any) -> Any:
        return self.inner[i]

    @property
    def group_labels(self) -> tuple[str, ...]:
        return self.cut.labels if self.cut else ("",)

    @property
    def groups(self) -> int:
        return len(self.group_labels)

    @property
    def group_of_path(self) -> dict[Any, int]:
        """The group of each leaf that the rule sees."""
        groups = self.cut.group_of_leaf if self.cut else (0,) * len(self.scope.paths)
        return dict(zip(self.scope.paths, groups, strict=True))


@dataclass(frozen=True)
class LiveUpdate(MadeOfRules):
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
        if not isinstance(state, LiveState):
            raise RuleError(
                "state",
                f"{self.live.title}()",
                got=trees.describe(state),
                expected="the state of its init",
                fix="For the state of a TrainState use ts.update.",
            )
        table: Any = state.table
        call_arguments = (
            state.count if step is None else step,
            updates,
            params,
            {**extra, "step": step},
        )
        run_group = lambda i, inner: _run_factory(self.live, table[:, i], inner, *call_arguments)
        if state.groups == 1:
            (updates, inner), counters = run_group(0, state.inner), ()
        else:
            from tsunax.rules import subtree_numbers

            group_states = subtree_numbers.states_by_group(self.live, state, updates)
            runs = [run_group(i, inner) for i, inner in enumerate(group_states)]
            updates, inner, counters = subtree_numbers.merge_groups(self.live, state, updates, runs)
        count = None if state.count is None else optax.safe_increment(state.count)
        return updates, dataclasses.replace(state, inner=inner, extra=counters, count=count)

    def bounded(self, survey: Any, state: LiveState, bounds: list[Any]) -> list[Any]:
        table: Any = state.table
        # the numbers of each group, and its rule
        numbers = (self.live.read(table[:, i], state.count) for i in range(state.groups))
        rules = map(self.live.build, numbers)
        survey.by_element &= state.groups == 1
        return [x for tx in rules for x in survey.walk(tx.update, state.inner, bounds, tx.init)]


def _run_factory(live: Live, table, inner, clock, updates, params, extra):
    """Run the plain rule once, with exact complements if its factory accepts them."""
    extra = {k: v for k, v in extra.items() if v is not None}
    mesh: Any = extra.get("device_mesh")
    # shard_map is used inside programs only: outside of jit, JAX computes array by array.
    is_cut_over_mesh = (
        mesh is not None
        and jax.sharding.AxisType.Explicit not in mesh.axis_types
        and trees.is_tracing()
    )

    def run(convert, updates, inner, params):
        numbers = {name: convert(x) for name, x in live.read(table, clock).items()}
        if is_cut_over_mesh and live.factory is optax.contrib.muon:
            from tsunax.rules.matrices import update_muon

            return update_muon({**live.statics, **numbers}, updates, inner, params, extra)
        return live.build(numbers).update(updates, inner, params, **extra)

    def result_types(convert):
        out = jax.eval_shape(lambda *args: run(convert, *args), updates, inner, params)
        return jax.tree.map(lambda x: (x.shape, x.dtype), out)

    as_number = lambda x: x
    is_full_precision = all(trees.dtype_of(x) == table.dtype for x in jax.tree.leaves(updates))
    if is_full_precision and is_library_factory(live.factory):
        return run(as_number, updates, inner, params)
    # Some rules turn an exact complement into a strong float32, which would promote bfloat16 state.
    try:
        if is_full_precision or result_types(as_number) == result_types(as_scalar):
            return run(as_number, updates, inner, params)
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError) as error:
        raise RuleError(_BRANCHES_IN_PYTHON.format(live.title)) from error
    except (TypeError, AttributeError):  # the rule calls a function that accepts only arrays
        pass
    return run(as_scalar, updates, inner, params)
