"""Facts of a training state in a manifest, and the numbers that a script gives: names in the table
of live numbers, the groups that `adjust` cut, the schedules. `merging` compares them.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from tsunax._core import PyTree, stable_text, trees
from tsunax._state import averages_of
from tsunax.checkpoints import leaves
from tsunax.state import TrainState


def _short(text: str) -> str:
    return text if len(text) <= 600 else f"{text[:560]}… {stable_text.hash_of(text.encode())}"


def _schedule_text(schedule) -> str:
    name = lambda leaf: getattr(leaf, "__qualname__", type(leaf).__name__)
    kinds = [name(leaf) for leaf in schedule.leaves if leaf is not None]
    return _short(stable_text.without_address(f"{schedule.treedef} {kinds}"))


def facts_of(state: TrainState) -> dict[str, Any]:
    """The facts of a training state in a manifest, apart from its leaves."""
    plan, numbers = state.plan, state.numbers
    kind_of_average = lambda average: "uniform" if average.uniform else "exponential"
    averages = [f"{name} ({kind_of_average(x)})" for name, x in averages_of(state).items()]
    names = ("/".join(name) for name, _, _ in trees.leaves_with_names(state.params))
    trained = None if plan.selected is None else list(itertools.compress(names, plan.selected))
    outline = lambda x: stable_text.words_of(x, code=False, numbers=False)
    columns, schedules, cuts = [], {}, []
    if numbers is not None:
        columns = [list(column) for column in numbers.column_names()]
        scheduled = [number for number in numbers.layout.numbers if number.schedule]
        schedules = {number.flat_name: _schedule_text(number.schedule) for number in scheduled}
        lives = enumerate(s for _, s in numbers.layout.lives)
        cuts = [
            [live_index, list(s.cut.group_of_leaf), list(s.cut.labels)]
            for live_index, s in lives
            if s.cut
        ]
    return {
        "rule": _short(outline(plan.update)),
        "trained": trained,
        "precision": None if plan.precision is None else outline(plan.precision),
        "averages": ", ".join(averages) or None,
        "columns": columns,
        "schedules": schedules,
        "cuts": cuts,
    }


def total_calls(tree: PyTree) -> int:
    """The calls of all training states in a tree; 0 if this process cannot read them."""
    clocks = [s.clock for s in leaves.tree_of(tree).states.values()]
    are_readable = all(
        getattr(x, "is_fully_replicated", True) or x.is_fully_addressable for x in clocks
    )
    return int(sum(np.sum(np.asarray(x)[..., 1]) for x in clocks)) if are_readable else 0


def script_numbers(state: TrainState) -> dict[str, Any]:
    """The numbers that a script gives: its rule's, the rates of its averages, its loss scale."""
    numbers, as_list = state.numbers, lambda x: np.asarray(x).tolist()
    if numbers is not None and np.size(numbers.values) > 20_000:  # a manifest is bounded
        numbers = None
    return {
        "columns": [] if numbers is None else [list(column) for column in numbers.column_names()],
        "values": [] if numbers is None else as_list(numbers.values),
        "rates": {
            name: as_list(average.rate) if average.schedule is None else None
            for name, average in averages_of(state).items()
        },
        "scale": None if state.loss_scale is None else as_list(state.loss_scale.scale),
        "frozen": None if state.frozen is None else as_list(state.frozen),
        "injected": {leaves.show("", path): as_list(x) for path, x in injected_numbers(state)},
    }


def injected_numbers(state: TrainState) -> Iterator[tuple[leaves.Keys, Any]]:
    """The numbers that `optax.inject_hyperparams` keeps among the arrays of the optimizer."""
    for path, x in leaves.tree_of(state.opt_state).leaves:
        is_injected = ".hyperparams" in path[-2:-1]  # the last key is the name of the number
        if is_injected:
            yield (".opt_state", *path), x
