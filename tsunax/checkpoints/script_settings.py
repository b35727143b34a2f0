"""The settings of a script that calls `fit`, as plain values: saved with each checkpoint, and
compared when the script is started again. This file uses states, rules and data, but no files.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax

from tsunax._core import PyTree, stable_text, trees
from tsunax._state.state_fields import averages_of
from tsunax.checkpoints import leaves, state_facts
from tsunax.data.batching import Batches
from tsunax.data.prefetching import Prefetched
from tsunax.schedules import Schedule
from tsunax.state import TrainState

__all__ = []


_OF_LOSS = " of loss_fn"
_MAX_VALUES = 200  # values that are saved by name, so that a warning can name the edited value
_CODE = "loss_fn", "objective", "the schedule of ", "a function of the rule"  # names of code texts


def script_of(
    step: Any, state: PyTree, data: Iterable[PyTree] | None, extra: Mapping[str, Any]
) -> dict[str, Any]:
    """Calls and numbers of a script's states, and its other settings as texts."""
    states = list(leaves.tree_of(state).states.values())
    loss_fn = getattr(step, "loss_fn", step)
    values = list(stable_text.values_of(loss_fn).items())[:_MAX_VALUES]
    settings = {f"`{name}`{_OF_LOSS}": x for name, x in values} | {"loss_fn": code_text(loss_fn)}
    if hasattr(step, "accumulate"):
        settings["accumulate"] = str(step.accumulate)
    for i, s in enumerate(states):
        suffix = f" of state {i}" if len(states) > 1 else ""
        settings |= {name + suffix: text for name, text in _settings_of(s)}
    for path, x in jax.tree_util.tree_leaves_with_path(dict(extra)):
        settings[f"extra{jax.tree_util.keystr(path)}"] = stable_text.value_text(x)
    if (rows := _some_rows(data)) is not None:
        settings["data"] = rows
    numbers_of_states = [state_facts.given_of(s) for s in states]
    return {
        "calls": state_facts.total_calls(state),
        "states": numbers_of_states,
        "settings": settings,
    }


def _settings_of(state: TrainState) -> Iterator[tuple[str, str]]:
    """(name, text) of the parts of a state that are not saved: key, static numbers, functions."""
    yield "rule", stable_text.words_of(state.plan.update, code=False)
    fields: dict[str, Any] = dict.fromkeys(averages_of(state), ("start", "every", "warmup"))
    for name, f in ((name, x.schedule) for name, x in averages_of(state).items()):
        is_value = isinstance(f, Schedule)
        yield f"decay of the {name}", repr(f) if is_value else "a function" if f else "a number"
        if f is not None and not is_value:
            yield f"the schedule of the {name}", code_text(f)
    if state.loss_scale is not None:
        fields["loss_scale"] = "dynamic", "interval", "factor", "floor", "ceiling"
    for name, field in ((name, field) for name, names in fields.items() for field in names):
        yield f"{field} of the {name}", str(getattr(getattr(state, name), field))
    if (numbers := state.numbers) is not None:
        for live_index, s, group, _ in numbers.columns():
            for name, x in zip(
                numbers.layout.names[live_index][group], s.live.schedules, strict=True
            ):
                # Plain functions, for example optax's: their numbers are in no table.
                if x and (functions := [f for f in x.leaves if f is not None]):
                    yield f"the schedule of {name}", ", ".join(map(code_text, functions))
    yield "a function of the rule", code_text(state.plan.update)
    if state.key is not None:
        yield "key", hashlib.sha256(trees.on_host(state.key).tobytes()).hexdigest()[:16]


def _some_rows(data) -> str | None:
    """A hash of a few rows of `batches(arrays)`; None for other data."""
    while isinstance(data, Prefetched):
        data = data.data
    if not isinstance(data, Batches) or not data.is_of_arrays:
        return None
    digest = hashlib.sha256()
    for x in data.sample():
        x = trees.on_host(x)
        digest.update(f"{x.dtype} {x.shape}".encode() + x.tobytes())
    return digest.hexdigest()[:16]


def code_text(f: object) -> str:
    """The Python version, and a hash of a function's code and of the values that it refers to."""
    return f"{sys.version_info[0]}.{sys.version_info[1]} {stable_text.code_of(f)}"


def edits(old_settings: Any, new_settings: Mapping[str, str]) -> Iterator[str]:
    """A note for each setting that differs from the script that saved the checkpoint."""
    old_settings, changed = old_settings if isinstance(old_settings, Mapping) else {}, list[str]()
    for name, new_text in new_settings.items():
        old_text = old_settings.get(name)
        if not isinstance(old_text, str) or old_text == new_text:
            continue
        is_known = any(x.startswith(("rule", "the schedule of ")) for x in changed)
        is_known &= name.startswith("a function of the rule")
        if is_known or (name == "loss_fn" and any(x.endswith(_OF_LOSS) for x in changed)):
            continue  # an earlier note has named the change
        changed.append(name)
        is_code = name.startswith(_CODE)
        # versions of Python differ in their byte code
        if is_code and old_text.split()[0] != new_text.split()[0]:
            continue
        is_long = (
            is_code or max(len(old_text), len(new_text)) > 80 or name.startswith(("data", "key"))
        )
        code = " (code, or a value that it reads; what was compiled before keeps the old one)"
        change = code * is_code if is_long else f" from {old_text} to {new_text}"
        owner = "checkpoint" if name.startswith("key") else "script"
        yield f"{name} has changed{change}. The {owner}'s is used."
