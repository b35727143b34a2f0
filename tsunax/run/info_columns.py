"""The infos of the steps of a call, in one array; on the host their numbers become columns."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tsunax._core import Function, PyTree, Scalar, TreeDef, tables, trees
from tsunax.errors import RowError
from tsunax.rules.number_table import Numbers
from tsunax.run.history import OF_FIT
from tsunax.state import Clocked
from tsunax.states import States, check_local_members, numbers_of, training_states
from tsunax.step import StepInfo

# Columns of one name, for 1,000 classes or members. A matrix of more would fill the memory.
MOST_COLUMNS = 1000
ADJUSTED = "adjusted hyperparameters"  # the key of their names in the memory of callbacks


class StatesInfo(NamedTuple):
    """The info of a call of a step of `States`, with the clock of the run after it."""

    info: PyTree
    clock: jax.Array  # int32 (4,)
    rejected: dict[str, jax.Array]  # int32: rejected calls of each member


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Infos:
    """The infos of many steps: all 32-bit numbers in one array, for one transfer to the host."""

    # int32 (steps, numbers): the bits of all 32-bit types. As f32, -1 would be a NaN, 1 denormal.
    table: jax.Array | np.ndarray
    other_leaves: list[Any]  # stacked leaves that are no 32-bit number
    treedef: TreeDef = dataclasses.field(metadata={"static": True})
    # the dtype of each leaf; None if it is in `other_leaves`
    dtypes: tuple[Any, ...] = dataclasses.field(metadata={"static": True})
    # the scheduled hyperparameters, the last columns of the table
    named: tuple[str, ...] = dataclasses.field(metadata={"static": True})

    @classmethod
    def of_step(cls, info: PyTree) -> "Infos":
        """The infos of one step."""
        leaves, treedef = jax.tree.flatten(info)
        dtypes = tuple(x.dtype if x.shape == () and x.dtype.itemsize == 4 else None for x in leaves)
        bits = [_bits(x) for x, dtype in zip(leaves, dtypes, strict=True) if dtype is not None]
        table = jnp.stack(bits) if bits else jnp.zeros(0, jnp.int32)
        other_leaves = [x for x, dtype in zip(leaves, dtypes, strict=True) if dtype is None]
        return cls(table, other_leaves, treedef, dtypes, ())

    def unpacked(self, parts: "list[tuple[Infos, int]]") -> tuple[Any, dict[str, np.ndarray]]:
        """The first n infos of each part on the host, stacked, and hyperparameters by name."""
        columns = iter(np.concatenate([part.table[:n] for part, n in parts]).T)
        other_columns = zip(*([x[:n] for x in part.other_leaves] for part, n in parts), strict=True)
        as_dtype = np.ndarray.view  # the bits of an int32 as another type
        infos = self._unflattened(columns, map(np.concatenate, other_columns), as_dtype)
        return infos, {name: next(columns).view(np.float32) for name in self.named}

    def stacked(self, state: PyTree, rows: Any = ...) -> PyTree:
        """The infos of some rows, or of one, as a step would give them, with a state's numbers."""
        table, other_columns = self.table[rows], (x[rows] for x in self.other_leaves)
        columns = (table[..., i] for i in range(table.shape[-1]))
        infos = self._unflattened(columns, other_columns, jax.lax.bitcast_convert_type)
        infos = with_numbers(infos, numbers_of(state))
        return infos.info if isinstance(infos, StatesInfo) else infos

    def _unflattened(self, columns, other_columns, as_dtype) -> Any:
        leaves = [
            next(other_columns) if d is None else as_dtype(next(columns), d) for d in self.dtypes
        ]
        return self.treedef.unflatten(leaves)


def _bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.int32)


def with_numbers(info: PyTree, numbers: Mapping[str, Any]) -> PyTree:
    """An info with the numbers of its state. For `States`, the infos in a dict get them by name."""
    if isinstance(info, StatesInfo) and isinstance(info.info, Mapping):
        # An info within the dict is the info of a single state, with the prefix "".
        named = {prefix.removesuffix("/"): {"": x} for prefix, x in numbers.items()}
        parts = info.info.items()
        return info._replace(
            info={name: with_numbers(x, named[name]) if name in named else x for name, x in parts}
        )
    return info._replace(numbers=numbers.get("")) if isinstance(info, StepInfo) else info


def step_infos(info: PyTree, state: PyTree) -> dict[str, StepInfo]:
    """The infos of the training states of a call by name; for `States`, from a dict of infos."""
    info = info.info if isinstance(info, StatesInfo) else info
    infos = info if isinstance(state, States) and isinstance(info, Mapping) else {"": info}
    named_infos = {prefix: infos.get(prefix.removesuffix("/")) for prefix in training_states(state)}
    return {prefix: x for prefix, x in named_infos.items() if isinstance(x, StepInfo)}


def scheduled(info: PyTree, state: PyTree, mapped: Function) -> dict[str, Any]:
    """Columns of the scheduled hyperparameters in stacked infos, computed by `mapped(f, steps)`."""
    numbers_by_state, columns = numbers_of(state), {}
    for prefix, part in step_infos(info, state).items():
        if (numbers := numbers_by_state[prefix]) is None or part.step is None:
            continue
        if np.ndim(part.step) == 1 + np.ndim(state.step):  # one step of each member in a call
            moved = mapped(functools.partial(_moved_by_schedules, numbers), part.step)
            for name, x in moved.items():  # a population has a column for each member
                if x.ndim > 1:
                    columns |= {f"{prefix}{name}/{i}": x[:, i] for i in range(x.shape[1])}
                else:
                    columns[prefix + name] = x
    return columns


def _moved_by_schedules(numbers: Numbers, step: Scalar) -> dict[str, Any]:
    fixed_numbers = numbers.named(None)
    return {name: x for name, x in numbers.named(step).items() if name not in fixed_numbers}


def with_scheduled(infos: Infos, state: PyTree) -> Infos:
    """The infos with the scheduled hyperparameters of every step as further columns."""
    columns = scheduled(infos.stacked(state), state, lambda f, steps: jax.vmap(f)(steps))
    if not columns:
        return infos
    bits = (_bits(x.astype(jnp.float32)) for x in columns.values())
    table = jnp.column_stack([infos.table, *bits])
    return dataclasses.replace(infos, table=table, named=tuple(columns))


def form_of(infos: PyTree) -> tuple[Any, ...]:
    """The structure and shapes of infos: calls with equal forms become rows together."""
    if isinstance(infos, Infos):  # without flattening it
        return infos.treedef, infos.dtypes, infos.named, *[x.shape[1:] for x in infos.other_leaves]
    leaves, treedef = jax.tree.flatten(infos)
    return treedef, *map(np.shape, leaves)


def is_ready(infos: PyTree) -> bool:
    """Whether a call is done: on a CPU it often is when it returns."""
    if isinstance(infos, Infos):  # checked for every call; one program makes its arrays
        return infos.table.is_ready()  # type: ignore[union-attr]
    return all(x.is_ready() for x in jax.tree.leaves(infos) if hasattr(x, "is_ready"))


def hosted(infos: PyTree) -> PyTree:
    """Infos as NumPy arrays. Waits. `jax.device_get` costs ten times as much for small arrays."""
    with jax.transfer_guard_device_to_host("allow"):
        if isinstance(infos, Infos):  # in place, because this runs for every call
            other_leaves = [np.asarray(x) for x in infos.other_leaves]
            infos.__dict__.update(table=np.asarray(infos.table), other_leaves=other_leaves)
            return infos
        infos = infos._replace(numbers=None) if isinstance(infos, StepInfo) else infos
        return jax.tree.map(np.asarray, infos)


def unpacked(infos: list[Any], counts: list[int]) -> tuple[Any, dict[str, np.ndarray]]:
    """Infos on the host, stacked by steps, and the scheduled hyperparameters in them."""
    if isinstance(infos[0], Infos):
        return infos[0].unpacked(list(zip(infos, counts, strict=True)))
    return jax.tree.map(lambda *x: np.stack(x), *infos), {}


def verdicts(infos: PyTree, n: int) -> np.ndarray:
    """int32 (n, members): > 0 where the call of a member was rejected.

    It is the verdict of the guard, and for `States` the count of rejected calls in a row.
    A single column for no population, and for parts with different numbers of members.
    """
    if isinstance(infos, StatesInfo):  # its clock counts rejected calls in a row
        return np.reshape(infos.clock[..., 3], (n, -1))
    is_info = lambda x: isinstance(x, StepInfo)
    parts = filter(is_info, jax.tree.leaves(infos, is_leaf=is_info))
    part_verdicts = [np.reshape(x.verdict, (n, -1)) for x in parts if x.verdict is not None]
    numbers_of_members = {x.shape[1] for x in part_verdicts} - {1}
    if len(numbers_of_members) > 1:
        part_verdicts = [np.min(x, 1, keepdims=True) for x in part_verdicts]
    return (
        functools.reduce(np.maximum, part_verdicts) if part_verdicts else np.zeros((n, 1), np.int32)
    )


def user_names(infos: PyTree) -> list[str]:
    """The user's names: metrics of a `StepInfo`, or names in a dict that `fit` reserves."""
    if isinstance(infos, StepInfo):
        return list(infos.metrics or {})
    infos = infos.info if isinstance(infos, StatesInfo) else infos
    names = infos if isinstance(infos, Mapping) else ()
    return [name for name in names if name in (*OF_FIT, "step")]


def _named_parts(infos: PyTree, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each `StepInfo` and each other number of infos, and the names above it: "critic/"."""
    infos = infos.info if isinstance(infos, StatesInfo) else infos
    is_sequence = isinstance(infos, list | tuple) and not isinstance(infos, StepInfo)
    if is_sequence and any(isinstance(part, StepInfo | Mapping) for part in infos):
        infos = dict(enumerate(infos))
    if not isinstance(infos, Mapping):
        yield prefix, infos
        return
    for name, part in infos.items():
        yield from _named_parts(part, f"{prefix}{name}/")


def columns(infos: PyTree) -> dict[str, Any]:
    """The numbers of stacked infos by name: of a `StepInfo`, a mapping of infos, or a single loss.

    A number with more than `MOST_COLUMNS` elements a step is a single array of two axes. Numbers of
    a `Watch` are masked at the calls that it did not measure.
    """
    numbers: dict[str, Any] = {}
    for prefix, part in _named_parts(infos):
        if isinstance(part, StepInfo):
            numbers |= {prefix + name: x for name, x in _numbers_of(part).items()}
        else:
            numbers[prefix.removesuffix("/") or "loss"] = part  # a step may return a loss alone
    rejected = infos.rejected if isinstance(infos, StatesInfo) else {}
    rejected = {f"{name}/rejected": x for name, x in rejected.items()}
    if taken_names := [name for name in rejected if name in numbers]:
        raise RowError(
            repr(taken_names[0]), "step", got="a name that fit reserves", expected="another name"
        )
    by_name: dict[str, Any] = {}
    for name, x in (numbers | rejected).items():
        by_name |= by_element(name, x)
    return by_name


def _numbers_of(info: StepInfo) -> dict[str, Any]:
    names = "loss grad_norm update_norm loss_scale dropped weight".split()
    numbers = {name: getattr(info, name) for name in names} | (info.metrics or {})
    noise = {} if info.noise_scale is None else info.noise_scale._asdict()
    numbers |= {f"noise_scale/{name}": x for name, x in noise.items()}
    return numbers | ({} if info.watch is None else info.watch.columns())


def by_element(name: str, x: Any) -> dict[str, Any]:
    """A column for each element of a metric by class, or by member; one array if too many.

    The numbers in a dict, a list or a tuple have both names, as in `evaluate`. Raises RowError for
    other objects.
    """
    if isinstance(x, Mapping | list | tuple):
        parts = x.items() if isinstance(x, Mapping) else enumerate(x)
        parts_by_name = (by_element(f"{name}/{key}", part) for key, part in parts)
        return {name: column for columns in parts_by_name for name, column in columns.items()}
    if x is None:
        return {}
    if not trees.is_array(x):
        raise RowError(repr(name), "step", trees.describe(x), "numbers, or a dict of numbers")
    flat = np.reshape(x, (len(x), -1))
    if np.ndim(x) == 1 or flat.shape[1] > MOST_COLUMNS:
        return {name: x if np.ndim(x) == 1 else flat}
    return {f"{name}/{i}": column for i, column in enumerate(flat.T)}


def take_examples(columns: dict[str, Any], infos: PyTree, is_population: bool) -> float | None:
    """The examples of a step, of all members; removes the weights of steps from the columns."""
    is_weight = lambda name: name == "weight" or (is_population and name.startswith("weight/"))
    names = list(filter(is_weight, columns)) if isinstance(infos, StepInfo) else []
    return float(sum(np.mean(columns.pop(name)) for name in names)) if names else None


def measured_calls(columns: Mapping[str, Any], n: int) -> np.ndarray:
    """bool (n,): the calls at which a `Watch` was due. Each has a row."""
    masked = [x for x in columns.values() if isinstance(x, np.ma.MaskedArray)]
    return functools.reduce(
        np.logical_or, [~np.ma.getmaskarray(x) for x in masked], np.zeros(n, bool)
    )


def at_rows(columns: Mapping[str, Any], calls: np.ndarray) -> dict[str, Any]:
    """The numbers of these calls, without the columns that have none."""
    numbers = {name: x[calls] for name, x in columns.items()}
    return {name: x for name, x in numbers.items() if not np.all(np.ma.getmaskarray(x))}


def in_rows(calls: np.ndarray, is_alone: np.ndarray) -> list[np.ndarray]:
    """These calls in groups of rows with the same columns: some calls form a group alone."""
    flags = is_alone[calls]
    starts = np.flatnonzero(flags[1:] | flags[:-1]) + 1
    return np.split(calls, starts) if len(calls) else []


def histograms(infos: PyTree, i: int) -> dict[str, Any]:
    """The histograms that call i of stacked infos measured, by name."""
    by_name: dict[str, Any] = {}
    for prefix, part in _named_parts(infos):
        watch = part.watch if isinstance(part, StepInfo) else None
        if watch is None or not np.any(watch.due[i]):
            continue
        from tsunax.run.media import Histogram

        for name, arrays in watch.histograms().items():
            counts, edges = (np.reshape(x[i], (-1, x.shape[-1])) for x in arrays)
            for k in range(len(counts)):  # members and layers have a number
                number = f"/{k}" if len(counts) > 1 else ""
                by_name[f"{prefix}watch/{name}{number}"] = Histogram(counts[k], edges=edges[k])
    return by_name


def counts_of(state: PyTree) -> np.ndarray:
    """The clock of a state on the host: int (4,), or (members, 4); zeros without a clock.

    The elements are `_state.COUNTS`: steps, calls, rejected calls, rejected calls in a row.
    """
    if not isinstance(state, Clocked):
        return np.zeros(4, int)
    if isinstance(state.clock, jax.Array):
        check_local_members(state, "fit()")
    with jax.transfer_guard_device_to_host("allow"):
        return np.asarray(state.clock)


def logged_step(state: PyTree, default: int) -> int:
    """The step of a state's clock; for a population the calls, because steps of members differ."""
    if not isinstance(state, Clocked):
        return default
    counts = counts_of(state)
    return int(counts[0] if counts.ndim == 1 else np.max(counts[..., 1]))


def most_calls(state: PyTree) -> int:
    return int(np.max(counts_of(state)[..., 1]))


class HeldNumbers:
    """The unscheduled hyperparameters in a row: learning rates, and any that was ever adjusted.

    `memory` is saved with the run, so that a resumed run has the same columns.
    """

    def __init__(self, memory: dict[str, Any]) -> None:
        self._memory = memory
        self._numbers: dict[str, Any] = {}  # the numbers that the columns were read from
        self._columns: dict[str, float] = {}

    def columns_of(self, state: PyTree) -> dict[str, float]:
        numbers = {prefix: x for prefix, x in numbers_of(state).items() if x is not None}
        if any(x is not self._numbers.get(prefix) for prefix, x in numbers.items()):
            adjusted = {
                prefix + name for prefix, x in numbers.items() for name in x.adjusted_names()
            }
            adjusted |= {*self._memory.get(ADJUSTED, {}).get("names", ())}
            values = {
                prefix + name: number
                for prefix, x in numbers.items()
                for name, number in x.named(None).items()
            }
            names = [name for name in values if "learning_rate" in name or name in adjusted]
            if adjusted:
                self._memory[ADJUSTED] = {"names": sorted(adjusted)}
            self._numbers = numbers
            self._columns = tables.flat({name: values[name] for name in names})
        return self._columns
