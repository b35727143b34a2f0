"""The infos of steps on the host: which of their numbers become columns of the history."""

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from tsunax._core import PyTree, trees
from tsunax._core.tables import flat
from tsunax._step.members import check_local_members
from tsunax.errors import RowError, StateError
from tsunax.run import fused_loop
from tsunax.run.run import OF_FIT
from tsunax.state import donated
from tsunax.states import COUNTED, numbers_of
from tsunax.step import StepInfo

# Columns of one name, for 1,000 classes or members. A matrix of more would fill the memory.
MOST_COLUMNS = 1000
ADJUSTED = "adjusted hyperparameters"  # the key of their names in the memory of callbacks


def form_of(infos: PyTree) -> tuple[Any, ...]:
    """What the infos of two calls must share to become rows together: structure and shapes."""
    if isinstance(infos, fused_loop.Infos):  # without a walk
        return infos.treedef, infos.dtypes, infos.named, *[x.shape[1:] for x in infos.others]
    leaves, treedef = jax.tree.flatten(infos)
    return treedef, *map(np.shape, leaves)


def is_ready(infos: PyTree) -> bool:
    """Whether a call is done: on a CPU it often is when it returns."""
    if isinstance(infos, fused_loop.Infos):  # asked for every call; its arrays are done together
        return infos.table.is_ready()  # type: ignore[union-attr]
    return all(x.is_ready() for x in jax.tree.leaves(infos) if hasattr(x, "is_ready"))


def hosted(infos: PyTree) -> PyTree:
    """Infos as NumPy arrays. Waits. `jax.device_get` costs ten times as much for so small ones."""
    with jax.transfer_guard_device_to_host("allow"):
        return _read(infos)


def _read(infos: PyTree) -> PyTree:
    if isinstance(infos, fused_loop.Infos):  # done for every call
        others = [np.asarray(x) for x in infos.others]
        infos.__dict__.update(table=np.asarray(infos.table), others=others)
        return infos
    if isinstance(infos, StepInfo):
        infos = infos._replace(numbers=None)
    return jax.tree.map(np.asarray, infos)


def unpacked(infos: list[Any], counts: list[int]) -> tuple[Any, dict[str, np.ndarray]]:
    """Infos on the host, stacked by steps, and scheduled hyperparameters that a loop gave."""
    if isinstance(infos[0], fused_loop.Infos):
        return infos[0].unpacked(list(zip(infos, counts, strict=True)))
    return jax.tree.map(lambda *x: np.stack(x), *infos), {}


def verdicts(infos: PyTree, n: int) -> np.ndarray:
    """int32 (n, members): what the guards of n steps said of each; above 0 if one rejected it.

    One column for what is no population, and for parts with other numbers of members.
    """
    if isinstance(infos, fused_loop.Told):  # the clock of the run says it
        return np.reshape(infos.clock[..., 3], (n, -1))
    is_info = lambda x: isinstance(x, StepInfo)
    parts = filter(is_info, jax.tree.leaves(infos, is_leaf=is_info))
    found = [np.reshape(x.verdict, (n, -1)) for x in parts if x.verdict is not None]
    if len({x.shape[1] for x in found} - {1}) > 1:
        found = [np.min(x, 1, keepdims=True) for x in found]
    return functools.reduce(np.maximum, found) if found else np.zeros((n, 1), np.int32)


def own_names(infos: PyTree) -> list[str]:
    """The names that the user gave: of metrics, or of a dict's own numbers."""
    if isinstance(infos, StepInfo):
        return list(infos.metrics or {})
    infos = infos.info if isinstance(infos, fused_loop.Told) else infos
    names = infos if isinstance(infos, Mapping) else ()
    return [name for name in names if name in (*OF_FIT, "step")]


def columns(infos: PyTree) -> Iterator[tuple[str, Any]]:
    """The numbers of stacked infos by name: of a `StepInfo`, of a mapping of them, or one alone.

    One that has more than `MOST_COLUMNS` elements a step is a single array of two axes.
    """
    if isinstance(infos, fused_loop.Told):
        found = dict(columns(infos.info))
        for name, x in infos.rejected.items():
            if (name := f"{name}/rejected") in found:
                got, fix = "a name that fit reserves", "Rename the metric."
                raise RowError(repr(name), "step", got, "another name", fix)
            found |= by_element(name, x)
        yield from found.items()
        return
    if isinstance(infos, StepInfo):
        names = "loss grad_norm update_norm loss_scale dropped weight".split()
        found = {name: getattr(infos, name) for name in names} | (infos.metrics or {})
        noise = {} if infos.noise_scale is None else infos.noise_scale._asdict()
        found |= {f"noise_scale/{name}": x for name, x in noise.items()}
    elif isinstance(infos, Mapping):
        found = {}
        for name, part in infos.items():
            if isinstance(part, StepInfo | Mapping):
                found |= {f"{name}/{inner}": x for inner, x in columns(part)}
            else:
                found[name] = part
    else:
        found = {"loss": infos}
    for name, x in found.items():
        if x is not None:
            yield from by_element(name, x).items()


def by_element(name: str, x: Any) -> dict[str, Any]:
    """A column for each element of a metric by class, or by member; too many stay one array."""
    flat = np.reshape(x, (len(x), -1))
    if np.ndim(x) == 1 or flat.shape[1] > MOST_COLUMNS:
        return {name: x if np.ndim(x) == 1 else flat}
    return {f"{name}/{i}": column for i, column in enumerate(flat.T)}


def counts_of(state: PyTree) -> np.ndarray:
    """What the clock of a state holds, read once: int (4,), or (members, 4); 0 without a clock."""
    if not isinstance(state, COUNTED):
        return np.zeros(4, int)
    if trees.is_gone(state.clock):
        raise StateError(donated("fit()"))
    if isinstance(state.clock, jax.Array):
        check_local_members(state, "fit()")
    with jax.transfer_guard_device_to_host("allow"):
        return np.asarray(state.clock)


def logged_step(state: PyTree, default: int) -> int:
    """The clock of a state; of a population, whose members have their own, the calls."""
    if not isinstance(state, COUNTED):
        return default
    counts = counts_of(state)
    return int(counts[0] if counts.ndim == 1 else np.max(counts[..., 1]))


def most_calls(state: PyTree) -> int:
    return int(np.max(counts_of(state)[..., 1]))


class HeldNumbers:
    """The unscheduled hyperparameters in a row: learning rates, and those that were ever adjusted.

    `memory` is saved with the run, so that a resumed run has the same columns.
    """

    def __init__(self, memory: dict[str, Any]) -> None:
        self._memory = memory
        self._numbers: dict[str, Any] = {}  # that the columns were read from
        self._columns: dict[str, float] = {}

    def of(self, state: PyTree) -> dict[str, float]:
        numbers = {at: x for at, x in numbers_of(state).items() if x is not None}
        if any(x is not self._numbers.get(at) for at, x in numbers.items()):
            named = {at: x.named(None) for at, x in numbers.items()}
            adjusted = {at + name for at, x in numbers.items() for name in x.adjusted_names()}
            adjusted |= {*self._memory.get(ADJUSTED, {}).get("names", ())}
            values = {at + name: x for at, part in named.items() for name, x in part.items()}
            names = [name for name in values if "learning_rate" in name or name in adjusted]
            if adjusted:
                self._memory[ADJUSTED] = {"names": sorted(adjusted)}
            self._numbers, self._columns = numbers, flat({name: values[name] for name in names})
        return self._columns
