"""What a checkpoint says of a training state beside its leaves, and which numbers win when it comes
back: the names in the table of live numbers, the groups that `adjust` cut, the schedules.
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
    """What a checkpoint says of a training state beside its leaves."""
    plan, numbers = state.plan, state.numbers
    kind = lambda average: "uniform" if average.uniform else "exponential"
    averages = [f"{name} ({kind(x)})" for name, x in averages_of(state).items()]
    trained = None
    if plan.selected is not None:
        named = ["/".join(name) for name, _, _ in trees.leaves_with_names(state.params)]
        trained = [name for name, on in zip(named, plan.selected, strict=True) if on]
    outline = lambda x: stable_text.words_of(x, code=False, numbers=False)
    columns, schedules, cuts = [], {}, []
    if numbers is not None:
        columns = [list(column) for column in numbers.column_names()]
        for at, s, group, _ in numbers.columns():
            pairs = zip(numbers.layout.names[at][group], s.live.schedules, strict=True)
            schedules |= {name: _schedule_text(x) for name, x in pairs if x}
        lives = enumerate(s for _, s in numbers.layout.lives)
        cuts = [[at, list(s.cut.of), list(s.cut.labels)] for at, s in lives if s.cut]
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
        for at, of, labels in facts["cuts"]:
            s = lives[at][1] if at < len(lives) else None
            if s is None or s.cut is not None or len(of) != len(s.paths):
                # another rule, or a script that cuts before it restores: the comparison tells
                continue
            cuts[at] = Cut(tuple(of), tuple(labels)), (0,) * len(labels)
        if cuts:
            opt_state, numbers = recut_numbers(opt_state, numbers, trained, cuts)
            old = state.numbers.values  # type: ignore[union-attr]
            if isinstance(old, jax.Array) and not trees.is_traced(old):  # a cut is made on the host
                values = np.asarray(numbers.values)  # type: ignore[union-attr]
                values = placement.replicate(values, old.sharding if old.committed else None)
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
    known = all(getattr(x, "is_fully_replicated", True) or x.is_fully_addressable for x in clocks)
    return int(sum(np.sum(np.asarray(x)[..., 1]) for x in clocks)) if known else 0


def given_of(state: TrainState) -> dict[str, Any]:
    """The numbers that a script gives: its rule's, the rates of its averages, its loss scale."""
    numbers, plain = state.numbers, lambda x: np.asarray(x).tolist()
    if numbers is not None and np.size(numbers.values) > 20_000:  # a manifest is bounded
        numbers = None
    return {
        "columns": [] if numbers is None else [list(column) for column in numbers.column_names()],
        "values": [] if numbers is None else plain(numbers.values),
        "rates": {
            name: plain(average.rate) if average.schedule is None else None
            for name, average in averages_of(state).items()
        },
        "scale": None if state.loss_scale is None else plain(state.loss_scale.scale),
        "injected": {leaves.show("", path): plain(x) for path, x in injected_numbers(state)},
    }


def injected_numbers(state: TrainState) -> Iterator[tuple[Keys, Any]]:
    """The numbers that `optax.inject_hyperparams` keeps among the arrays of the optimizer."""
    for path, x in leaves.tree_of(state.opt_state).leaves:
        if ".hyperparams" in path[-2:-1]:
            yield (".opt_state", *path), x


def given_in(manifest: Manifest) -> dict[Keys, dict[str, Any]]:
    """What `given_of` returned for each state at the start of the saved run; empty if unknown."""
    try:
        found: Any = _user_values.decode(manifest.parts[0].values["script"], [])
        out = {}
        for path, x in zip(manifest.states, found["states"], strict=True):
            check(columns := x["columns"], [(str, Size)])
            values = np.asarray(x["values"], np.float32)
            if columns and values.shape[-1] != len(columns):
                raise ValueError("numbers that are no table of their names")
            number = lambda y: None if y is None else np.asarray(y, np.float32)
            rates = {name: number(rate) for name, rate in x["rates"].items()}
            scale = number(x["scale"])
            injected = {name: np.asarray(y) for name, y in x.get("injected", {}).items()}
            out[path] = {"columns": columns, "values": values, "rates": rates, "scale": scale}
            out[path]["injected"] = injected
        return out
    except (IndexError, KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return {}


def merged_numbers(
    saved: np.ndarray,
    saved_facts: Mapping[str, Any],
    mine: np.ndarray,
    my_facts: Mapping[str, Any],
    given: Mapping[str, Any] | None = None,
) -> tuple[np.ndarray, list[str]]:
    """The live numbers of a restored state, (..., 4, n), and what was edited in the script since.

    A number goes on with its live value if the script gives it as it did, at `setup` and, if that
    is known, to `fit`. One that was edited is the script's.
    """
    if saved.shape != (*mine.shape[:-1], len(saved_facts["columns"])) or saved.dtype != mine.dtype:
        raise Damaged("manifest: live numbers that are no table of its names")
    places, own = _by_name(saved_facts["columns"]), _by_name(my_facts["columns"])
    out, edited = np.array(mine), []
    for name, here in own.items():
        there = places.get(name, [])
        schedules = saved_facts["schedules"].get(name, ""), my_facts["schedules"].get(name, "")
        if schedules[0] != schedules[1] or len(there) != len(here):
            say = lambda text: "a schedule" if text else "a number"
            edited.append(f"{name}: {say(schedules[0])} then, {say(schedules[1])} now")
            continue
        pairs = [(saved[..., 3, there], mine[..., 3, here])]
        if given is not None and given["values"].shape[:-1] == mine.shape[:-1]:
            at = _by_name(given["columns"]).get(name, [])
            table = given["values"][..., at]
            pairs += [(table[..., i, :], mine[..., i, here]) for i in range(3) if at]
        if (edit := next((pair for pair in pairs if not np.array_equal(*pair)), None)) is None:
            out[..., here] = saved[..., there]
        else:
            differ = np.any(edit[0] != edit[1], axis=tuple(range(mine.ndim - 2)))
            # numbers of a schedule come behind the one that may be held against it
            titles = ["", *re.findall(r"'(\w+)': \*", schedules[1])]
            which = ", ".join(x for x, d in zip(titles, differ, strict=False) if x and d)
            which = f" ({which})" if which and len(titles) == len(here) else ""
            edited.append(f"{name}{which}: {then_and_now(*edit)}")
    return out, edited


def _by_name(columns) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for i, (name, _) in enumerate(columns):
        found.setdefault(name, []).append(i)
    return found


def then_and_now(then: Any, now: Any) -> str:
    then, now = np.ravel(then), np.ravel(now)
    differ = then != now if then.shape == now.shape else slice(None)
    a, b = (", ".join(f"{v:.6g}" for v in x[differ][:3]) for x in (then, now))
    return f"{a} then, {b} now"
