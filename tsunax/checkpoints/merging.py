"""The choice between the numbers of a checkpoint and of the script that restores it: live numbers,
decays of averages, the loss scale, frozen flags; and the structure of a saved state.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tsunax._core import Function, placement, trees
from tsunax._state import averages_of, frozen_flags
from tsunax.checkpoints import leaves
from tsunax.checkpoints.manifest import Manifest, Size, check, decode
from tsunax.checkpoints.state_facts import facts_of, injected_numbers
from tsunax.rules.live_rules import Cut
from tsunax.rules.subtree_numbers import recut as recut_numbers
from tsunax.state import TrainState, trained_part

# A function of a saved array and the script's array. It returns the array of the restored state,
# and notes of the script's edits by title.
Merge = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, dict[str, str]]]


def laid_out(state: TrainState, facts: Mapping[str, Any], frozen: bool) -> TrainState:
    """`state`, from `setup`, with the structure of the saved one: cuts, room for frozen flags."""
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(state)):
        return jax.eval_shape(lambda s: laid_out(s, facts, frozen), state)
    opt_state, numbers, words = state.opt_state, state.numbers, state.frozen
    is_placed = trees.is_placed(state.clock)
    sharding = state.clock.sharding if is_placed and state.clock.committed else None
    # `put_on_devices_of` would wait for the other processes at each transfer.
    place = lambda tree: placement.replicate(tree, sharding) if is_placed else tree
    lives = [] if numbers is None else numbers.layout.lives
    cuts: dict[int, Any] = {}
    for live_index, group_of_leaf, labels in facts["cuts"]:
        s = lives[live_index][1] if live_index < len(lives) else None
        # Another rule, or a script that cuts before it restores, is reported when leaves are
        # compared.
        if s is not None and s.cut is None and len(group_of_leaf) == len(s.scope.paths):
            parents = (0,) * len(labels)  # each group begins with the script's values
            cuts[live_index] = Cut(tuple(group_of_leaf), tuple(labels)), parents
    if numbers is not None and cuts:
        opt_state, numbers = recut_numbers(opt_state, numbers, trained_part(state), cuts)
        numbers = place(numbers)
    if frozen and words is None:
        members, n = jnp.shape(state.clock)[:-1], len(jax.tree.leaves(trained_part(state)))
        words = place(jnp.zeros((*members, -(-n // 32)), jnp.uint32))
    return dataclasses.replace(state, opt_state=opt_state, numbers=numbers, frozen=words)


def without_flags(state: TrainState) -> TrainState:
    """`state` without the script's frozen flags: a checkpoint before a freeze has none."""
    return dataclasses.replace(state, frozen=None)


def _frozen_names(state: TrainState) -> str:
    """The frozen leaves of a state, of a population with a count of members."""
    counts = np.atleast_2d(frozen_flags(state)).sum(0)
    names = ("/".join(name) for name, _, _ in trees.leaves_with_names(trained_part(state)))
    frozen = [(name, n) for name, n in zip(names, counts, strict=True) if n]
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
    return (saved & ~is_edited) | (script_flags & is_edited), {"frozen leaves": note}


def script_numbers_in(manifest: Manifest) -> dict[leaves.Keys, dict[str, Any]]:
    """The `script_numbers` of each state at the start of the saved run; empty if unknown."""
    try:
        script_facts: Any = decode(manifest.parts[0].values["script"], {})
        numbers_by_state = {}
        for path, x in zip(manifest.states, script_facts["states"], strict=True):
            columns = x["columns"]
            check(columns, [(str, Size)])
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


def merges_of(
    state: TrainState,
    path: leaves.Keys,
    saved_facts: Mapping[str, Any],
    at_start: Mapping[str, Any] | None,
) -> dict[leaves.Keys, Merge]:
    """For the numbers that a script may edit, by path; `at_start` is of `script_numbers_in`."""
    decay_of_rate = lambda rate: 1 - np.float64(rate)  # an average stores the complement
    table = functools.partial(merged_table, saved_facts, facts_of(state), at_start)
    merges: dict[leaves.Keys, Merge] = {table_path(path): table}
    start = at_start or {"rates": {}, "scale": None, "injected": {}}
    for name, average in averages_of(state).items():
        if not average.uniform and average.schedule is None:
            rate = start["rates"].get(name)
            title = "ema decay" + (f" of {name}" if name != "average" else "")
            # A decay that was a schedule has no rate. The settings of `fit` report that edit.
            had_schedule = at_start is not None and rate is None
            merges[(*path, f".{name}", ".rate")] = functools.partial(
                _merged_number, None if had_schedule else title, rate, user_number=decay_of_rate
            )
    scale = state.loss_scale
    if scale is not None and (at_start is not None or not scale.dynamic):
        merges[(*path, ".loss_scale", ".scale")] = functools.partial(
            _merged_number, "loss scale", start["scale"]
        )
    for keys, _ in injected_numbers(state):
        # Without the numbers of the script's start, an edit looks like a change by the rule.
        if (name := leaves.show("", keys)) in start["injected"]:
            title = leaves.show("", (*path, *keys)).lstrip(".")
            merges[(*path, *keys)] = functools.partial(
                _merged_number, title, start["injected"][name]
            )
    return merges


def table_path(path: leaves.Keys) -> leaves.Keys:
    """The path of the live numbers of the training state at a path."""
    return (*path, ".numbers", ".values")


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
        # Row 3 has the values at `setup`; rows 0 to 2 are compared as `fit` got them at the start.
        pairs = [(saved[..., 3, places], script_values[..., 3, columns])]
        if at_start is not None and (start_columns := _by_name(at_start["columns"]).get(name)):
            table = at_start["values"][..., start_columns]
            pairs += [(table[..., i, :], script_values[..., i, columns]) for i in range(3)]
        if (edit := next((pair for pair in pairs if not np.array_equal(*pair)), None)) is None:
            merged[..., columns] = saved[..., places]
            continue
        # The first column is the number that may be held against the schedule. Then the numbers of
        # the schedule follow, with the names of arguments in its text.
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
