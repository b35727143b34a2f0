"""Facts of a training state in a manifest, and the choice between saved and given numbers: names in
the table of live numbers, the groups that `adjust` cut, the schedules.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tsunax._core import PyTree, placement, stable_text, trees
from tsunax._state.state_fields import averages_of
from tsunax.checkpoints import _user_values, leaves
from tsunax.checkpoints.leaves import Damaged, Keys
from tsunax.checkpoints.manifest import Manifest, Size, check
from tsunax.rules.subtree_numbers import Cut
from tsunax.rules.subtree_numbers import recut as recut_numbers
from tsunax.state import TrainState, trained_part

__all__ = []


def _short(text: str) -> str:
    return text if len(text) <= 600 else f"{text[:560]}… {stable_text.hash_of(text.encode())}"


def _schedule_text(schedule) -> str:
    name = lambda leaf: getattr(leaf, "__qualname__", type(leaf).__name__)
    kinds = [name(leaf) for leaf in schedule.leaves if leaf is not None]
    return _short(re.sub(r" at 0x[0-9a-fA-F]+", "", f"{schedule.treedef} {kinds}"))


def facts_of(state: TrainState) -> dict[str, Any]:
    """The facts of a training state in a manifest, apart from its leaves."""
    plan, numbers = state.plan, state.numbers
    kind_of_average = lambda average: "uniform" if average.uniform else "exponential"
    averages = [f"{name} ({kind_of_average(x)})" for name, x in averages_of(state).items()]
    trained = None
    if plan.selected is not None:
        leaf_names = ["/".join(name) for name, _, _ in trees.leaves_with_names(state.params)]
        trained = [
            name for name, is_trained in zip(leaf_names, plan.selected, strict=True) if is_trained
        ]
    outline = lambda x: stable_text.words_of(x, code=False, numbers=False)
    columns, schedules, cuts = [], {}, []
    if numbers is not None:
        columns = [list(column) for column in numbers.column_names()]
        for live_index, s, group, _ in numbers.columns():
            pairs = zip(numbers.layout.names[live_index][group], s.live.schedules, strict=True)
            schedules |= {name: _schedule_text(x) for name, x in pairs if x}
        lives = enumerate(s for _, s in numbers.layout.lives)
        cuts = [
            [live_index, list(s.cut.of), list(s.cut.labels)] for live_index, s in lives if s.cut
        ]
    precision = None if plan.precision is None else outline(plan.precision)
    facts = {"rule": _short(outline(plan.update)), "trained": trained, "precision": precision}
    facts |= {"averages": ", ".join(averages) or None, "columns": columns}
    return facts | {"schedules": schedules, "cuts": cuts}


def laid_out(state: TrainState, facts: Mapping[str, Any], frozen: bool) -> TrainState:
    """`state`, from `setup`, with the structure of the saved one: cuts, room for frozen flags."""
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(state)):
        return jax.eval_shape(lambda s: laid_out(s, facts, frozen), state)
    trained, opt_state, numbers = trained_part(state), state.opt_state, state.numbers
    if numbers is not None:
        lives, cuts = numbers.layout.lives, {}
        for live_index, group_of_leaf, labels in facts["cuts"]:
            s = lives[live_index][1] if live_index < len(lives) else None
            if s is None or s.cut is not None or len(group_of_leaf) != len(s.paths):
                # Another rule, or a script that cuts before it restores: reported when leaves are
                # compared.
                continue
            cuts[live_index] = Cut(tuple(group_of_leaf), tuple(labels)), (0,) * len(labels)
        if cuts:
            opt_state, numbers = recut_numbers(opt_state, numbers, trained, cuts)
            old_values = state.numbers.values  # type: ignore[union-attr]
            # cuts are computed on the host
            if isinstance(old_values, jax.Array) and not trees.is_traced(old_values):
                values = np.asarray(numbers.values)  # type: ignore[union-attr]
                values = placement.replicate(
                    values, old_values.sharding if old_values.committed else None
                )
                numbers = dataclasses.replace(numbers, values=values)  # type: ignore[type-var]
    words = state.frozen
    if frozen and words is None:
        members, n = jnp.shape(state.clock)[:-1], len(jax.tree.leaves(trained))
        words = jnp.zeros((*members, -(-n // 32)), jnp.uint32)
        if not trees.is_traced(state.clock) and state.clock.committed:
            words = placement.replicate(words, state.clock.sharding)
    return dataclasses.replace(state, opt_state=opt_state, numbers=numbers, frozen=words)


def total_calls(tree: PyTree) -> int:
    """The calls of all training states in a tree; 0 if this process cannot read them."""
    clocks = [s.clock for s in leaves.tree_of(tree).states.values()]
    are_readable = all(
        getattr(x, "is_fully_replicated", True) or x.is_fully_addressable for x in clocks
    )
    return int(sum(np.sum(np.asarray(x)[..., 1]) for x in clocks)) if are_readable else 0


def given_of(state: TrainState) -> dict[str, Any]:
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
        "injected": {leaves.show("", path): as_list(x) for path, x in injected_numbers(state)},
    }


def injected_numbers(state: TrainState) -> Iterator[tuple[Keys, Any]]:
    """The numbers that `optax.inject_hyperparams` keeps among the arrays of the optimizer."""
    for path, x in leaves.tree_of(state.opt_state).leaves:
        if ".hyperparams" in path[-2:-1]:
            yield (".opt_state", *path), x


def given_in(manifest: Manifest) -> dict[Keys, dict[str, Any]]:
    """What `given_of` returned for each state at the start of the saved run; empty if unknown."""
    try:
        script_facts: Any = _user_values.decode(manifest.parts[0].values["script"], [])
        given_by_state = {}
        for path, x in zip(manifest.states, script_facts["states"], strict=True):
            check(columns := x["columns"], [(str, Size)])
            values = np.asarray(x["values"], np.float32)
            if columns and values.shape[-1] != len(columns):
                raise ValueError("numbers that are no table of their names")
            as_float32 = lambda y: None if y is None else np.asarray(y, np.float32)
            rates = {name: as_float32(rate) for name, rate in x["rates"].items()}
            scale = as_float32(x["scale"])
            injected = {name: np.asarray(y) for name, y in x.get("injected", {}).items()}
            given_by_state[path] = {
                "columns": columns,
                "values": values,
                "rates": rates,
                "scale": scale,
            }
            given_by_state[path]["injected"] = injected
        return given_by_state
    except (IndexError, KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return {}


def merged_numbers(
    saved: np.ndarray,
    saved_facts: Mapping[str, Any],
    my_values: np.ndarray,
    my_facts: Mapping[str, Any],
    given_numbers: Mapping[str, Any] | None = None,
) -> tuple[np.ndarray, list[str]]:
    """The live numbers of a restored state, (..., 4, n), and the edits of the script in words.

    A number keeps its saved live value if the script gives the same number as before, at `setup`
    and, if that is known, to `fit`. For an edited number the script's value is used.
    """
    if (
        saved.shape != (*my_values.shape[:-1], len(saved_facts["columns"]))
        or saved.dtype != my_values.dtype
    ):
        raise Damaged("manifest: live numbers that are no table of its names")
    saved_columns, my_columns = _by_name(saved_facts["columns"]), _by_name(my_facts["columns"])
    merged, edited = np.array(my_values), []
    for name, my_places in my_columns.items():
        saved_places = saved_columns.get(name, [])
        schedules = saved_facts["schedules"].get(name, ""), my_facts["schedules"].get(name, "")
        if schedules[0] != schedules[1] or len(saved_places) != len(my_places):
            word_for = lambda text: "a schedule" if text else "a number"
            edited.append(f"{name}: {word_for(schedules[0])} then, {word_for(schedules[1])} now")
            continue
        pairs = [(saved[..., 3, saved_places], my_values[..., 3, my_places])]
        if given_numbers is not None and given_numbers["values"].shape[:-1] == my_values.shape[:-1]:
            given_places = _by_name(given_numbers["columns"]).get(name, [])
            table = given_numbers["values"][..., given_places]
            pairs += [
                (table[..., i, :], my_values[..., i, my_places]) for i in range(3) if given_places
            ]
        if (edit := next((pair for pair in pairs if not np.array_equal(*pair)), None)) is None:
            merged[..., my_places] = saved[..., saved_places]
        else:
            is_different = np.any(edit[0] != edit[1], axis=tuple(range(my_values.ndim - 2)))
            # Numbers of a schedule follow the number that may be held against it.
            titles = ["", *re.findall(r"'(\w+)': \*", schedules[1])]
            titles_of_edits = ", ".join(
                x for x, d in zip(titles, is_different, strict=False) if x and d
            )
            titles_of_edits = (
                f" ({titles_of_edits})" if titles_of_edits and len(titles) == len(my_places) else ""
            )
            edited.append(f"{name}{titles_of_edits}: {then_and_now(*edit)}")
    return merged, edited


def _by_name(columns) -> dict[str, list[int]]:
    indices: dict[str, list[int]] = {}
    for i, (name, _) in enumerate(columns):
        indices.setdefault(name, []).append(i)
    return indices


def then_and_now(old_values: Any, new_values: Any) -> str:
    old_values, new_values = np.ravel(old_values), np.ravel(new_values)
    is_different = old_values != new_values if old_values.shape == new_values.shape else slice(None)
    old_text, new_text = (
        ", ".join(f"{v:.6g}" for v in x[is_different][:3]) for x in (old_values, new_values)
    )
    return f"{old_text} then, {new_text} now"
