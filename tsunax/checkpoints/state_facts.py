"""Facts of a training state in a manifest, and the choice between saved and given numbers: names in
the table of live numbers, the groups that `adjust` cut, the schedules.
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tsunax._core import Function, PyTree, placement, stable_text, trees
from tsunax._state.state_fields import averages_of, frozen_flags
from tsunax.checkpoints import leaves
from tsunax.checkpoints.manifest import Manifest, Size, check, decode
from tsunax.rules.live_rules import Cut
from tsunax.rules.subtree_numbers import recut as recut_numbers
from tsunax.state import TrainState, trained_part

# A function of a saved array and the script's array. It returns the array of the restored state,
# and notes of the script's edits by title.
Merge = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, dict[str, str]]]


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


def laid_out(state: TrainState, facts: Mapping[str, Any], frozen: bool) -> TrainState:
    """`state`, from `setup`, with the structure of the saved one: cuts, room for frozen flags."""
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(state)):
        return jax.eval_shape(lambda s: laid_out(s, facts, frozen), state)
    trained, opt_state, numbers = trained_part(state), state.opt_state, state.numbers
    if numbers is not None:
        lives, cuts = numbers.layout.lives, {}
        for live_index, group_of_leaf, labels in facts["cuts"]:
            s = lives[live_index][1] if live_index < len(lives) else None
            if s is None or s.cut is not None or len(group_of_leaf) != len(s.scope.paths):
                # Another rule, or a script that cuts before it restores: reported when leaves are
                # compared.
                continue
            cuts[live_index] = Cut(tuple(group_of_leaf), tuple(labels)), (0,) * len(labels)
        if cuts:
            opt_state, numbers = recut_numbers(opt_state, numbers, trained, cuts)
            old_values: Any = state.numbers.values  # type: ignore[union-attr]
            # cuts are computed on the host
            if trees.is_placed(old_values):
                sharding = old_values.sharding if old_values.committed else None
                values = placement.replicate(np.asarray(numbers.values), sharding)  # type: ignore[union-attr]
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


def _frozen_names(state: TrainState) -> str:
    """The frozen leaves of a state, of a population with a count of members."""
    counts = np.atleast_2d(frozen_flags(state)).sum(0)
    names = ["/".join(name) for name, _, _ in trees.leaves_with_names(state.params)]
    trained_names = itertools.compress(names, state.plan.selected or [True] * len(names))
    frozen = [(name, n) for name, n in zip(trained_names, counts, strict=True) if n]
    is_single = np.ndim(state.step) == 0
    return trees.listed([name if is_single else f"{name} ({n})" for name, n in frozen], 6) or "none"


def edit_of_frozen(
    state: TrainState, at_start: Mapping[str, Any] | None
) -> tuple[str, np.ndarray] | None:
    """A note if a script freezes other leaves now, and the flags at the run's start.

    A plain `setup` is no edit. The flags are uint32 words, with a bit for each leaf.
    """
    if state.frozen is None or at_start is None:
        return None
    words = np.asarray(state.frozen)
    has_flags = np.shape(at_start["frozen"]) == words.shape
    start: Any = at_start["frozen"] if has_flags else np.zeros_like(words)
    names = [_frozen_names(dataclasses.replace(state, frozen=x)) for x in (start, words)]
    note = f"frozen leaves: {names[0]} then, {names[1]} now"
    return None if np.array_equal(start, words) else (note, start)


def merged_flags(
    note: str, at_start: np.ndarray, saved: np.ndarray, script_flags: np.ndarray
) -> tuple[np.ndarray, dict[str, str]]:
    """A `Merge`: the flags of the script for leaves that it has edited, else the saved flags."""
    is_edited = at_start ^ script_flags
    return saved ^ ((saved ^ script_flags) & is_edited), {"frozen leaves": note}


def injected_numbers(state: TrainState) -> Iterator[tuple[leaves.Keys, Any]]:
    """The numbers that `optax.inject_hyperparams` keeps among the arrays of the optimizer."""
    for path, x in leaves.tree_of(state.opt_state).leaves:
        if ".hyperparams" in path[-2:-1]:
            yield (".opt_state", *path), x


def script_numbers_in(manifest: Manifest) -> dict[leaves.Keys, dict[str, Any]]:
    """The `script_numbers` of each state at the start of the saved run; empty if unknown."""
    try:
        script_facts: Any = decode(manifest.parts[0].values["script"], {})
        numbers_by_state = {}
        for path, x in zip(manifest.states, script_facts["states"], strict=True):
            check(columns := x["columns"], [(str, Size)])
            values = np.asarray(x["values"], np.float32)
            if columns and values.shape[-1] != len(columns):
                raise ValueError("numbers that are no table of their names")
            as_float32 = lambda y: None if y is None else np.asarray(y, np.float32)
            injected = x.get("injected", {}).items()  # earlier versions did not save it
            numbers_by_state[path] = {
                "columns": columns,
                "values": values,
                "rates": {name: as_float32(rate) for name, rate in x["rates"].items()},
                "scale": as_float32(x["scale"]),
                "frozen": np.asarray(x.get("frozen") or [], np.uint32),
                "injected": {name: np.asarray(y) for name, y in injected},
            }
        return numbers_by_state
    except (IndexError, KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return {}


def _merged_number(
    title: str | None,
    at_start: Any,
    saved: np.ndarray,
    script_value: np.ndarray,
    user_number: Function = np.asarray,
) -> tuple[np.ndarray, dict[str, str]]:
    """A `Merge`: the saved number, unless the script has changed it since the run's start.

    `title` is None if the settings of `fit` report the edit, `at_start` is None if the script gave
    the saved number at the start. `user_number` returns the user's number for the stored number.
    """
    at_start = saved if at_start is None else at_start
    if np.array_equal(at_start, script_value):
        return saved, {}
    change = then_and_now(user_number(at_start), user_number(script_value))
    return script_value, {} if title is None else {title: f"{title}: {change}"}


def merges_of_numbers(
    state: TrainState, path: leaves.Keys, at_start: Mapping[str, Any] | None
) -> dict[leaves.Keys, Merge]:
    """For the numbers that a script may edit outside of the table of live numbers, by path."""
    decay_of_rate = lambda rate: 1 - np.float64(rate)  # an average stores the complement
    merges: dict[leaves.Keys, Merge] = {}
    for name, average in averages_of(state).items():
        if not average.uniform and average.schedule is None:
            rate = None if at_start is None else at_start["rates"].get(name)
            title = "ema decay" + (f" of {name}" if name != "average" else "")
            if at_start is not None and rate is None:  # the average had a schedule
                title = None
            merges[(*path, f".{name}", ".rate")] = functools.partial(
                _merged_number, title, rate, user_number=decay_of_rate
            )
    scale = state.loss_scale
    if scale is not None and (at_start is not None or not scale.dynamic):
        scale_at_start = None if at_start is None else at_start["scale"]
        merges[(*path, ".loss_scale", ".scale")] = functools.partial(
            _merged_number, "loss scale", scale_at_start
        )
    # Without the numbers of the script's start, an edit looks like a change by the rule.
    injected = {} if at_start is None else at_start["injected"]
    for keys, _ in injected_numbers(state) if injected else ():
        if (name := leaves.show("", keys)) in injected:
            title = leaves.show("", (*path, *keys)).lstrip(".")
            merges[(*path, *keys)] = functools.partial(_merged_number, title, injected[name])
    return merges


def merged_table(
    saved_facts: Mapping[str, Any],
    facts: Mapping[str, Any],
    at_start: Mapping[str, Any] | None,
    saved: np.ndarray,
    script_values: np.ndarray,
) -> tuple[np.ndarray, dict[str, str]]:
    """A `Merge` of the live numbers of a state, (..., 4, n), with notes by the number's name.

    A number keeps its saved live value if the script gives the same number as before, at
    `setup` and, if `at_start` (see `script_numbers`) is known, to `fit`. An edited number is the
    script's.
    """
    saved_columns = _by_name(saved_facts["columns"])
    width = len(saved_facts["columns"])
    if saved.shape != (*script_values.shape[:-1], width) or saved.dtype != script_values.dtype:
        raise leaves.Damaged("manifest: live numbers that are no table of its names")
    if at_start is not None and at_start["values"].shape[:-1] != script_values.shape[:-1]:
        at_start = None
    merged, edits = np.array(script_values), {}
    for name, columns in _by_name(facts["columns"]).items():
        places = saved_columns.get(name, [])
        saved_schedule = saved_facts["schedules"].get(name, "")
        schedule = facts["schedules"].get(name, "")
        if saved_schedule != schedule or len(places) != len(columns):
            word_for = lambda text: "a schedule" if text else "a number"
            edits[name] = f"{name}: {word_for(saved_schedule)} then, {word_for(schedule)} now"
            continue
        pairs = [(saved[..., 3, places], script_values[..., 3, columns])]
        if at_start is not None and (start_columns := _by_name(at_start["columns"]).get(name)):
            table = at_start["values"][..., start_columns]
            pairs += [(table[..., i, :], script_values[..., i, columns]) for i in range(3)]
        if (edit := next((pair for pair in pairs if not np.array_equal(*pair)), None)) is None:
            merged[..., columns] = saved[..., places]
            continue
        # Numbers of a schedule follow the number that may be held against it.
        titles = ["", *re.findall(r"'(\w+)': \*", schedule)]
        is_different = np.any(edit[0] != edit[1], axis=tuple(range(script_values.ndim - 2)))
        changed = [x for x, is_new in zip(titles, is_different, strict=False) if x and is_new]
        detail = f" ({', '.join(changed)})" if changed and len(titles) == len(columns) else ""
        edits[name] = f"{name}{detail}: {then_and_now(*edit)}"
    return merged, edits


def _by_name(columns) -> dict[str, list[int]]:
    indices: dict[str, list[int]] = {}
    for i, (name, _) in enumerate(columns):
        indices.setdefault(name, []).append(i)
    return indices


def then_and_now(old_values: Any, new_values: Any) -> str:
    old_values, new_values = np.ravel(old_values), np.ravel(new_values)
    is_different = old_values != new_values if old_values.shape == new_values.shape else slice(None)
    text = lambda values: ", ".join(f"{x:.6g}" for x in values[is_different][:3])
    return f"{text(old_values)} then, {text(new_values)} now"
