"""What a script gives to `fit`, in plain values: saved with each checkpoint, and compared when the
script is started again. It knows states, rules and data, and no file.
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
_MOST_VALUES = 200  # that are saved by name, so that a warning can say which one was edited
_CODE = "loss_fn", "objective", "the schedule of ", "a function of the rule"  # names of code texts


def script_of(
    step: Any, state: PyTree, data: Iterable[PyTree] | None, extra: Mapping[str, Any]
) -> dict[str, Any]:
    """Calls and numbers of a script's states, and the rest of what it gives as texts."""
    states = list(leaves.tree_of(state).states.values())
    loss_fn = getattr(step, "loss_fn", step)
    values = list(stable_text.values_of(loss_fn).items())[:_MOST_VALUES]
    found = {f"`{name}`{_OF_LOSS}": x for name, x in values} | {"loss_fn": code_text(loss_fn)}
    if hasattr(step, "accumulate"):
        found["accumulate"] = str(step.accumulate)
    for i, s in enumerate(states):
        of = f" of state {i}" if len(states) > 1 else ""
        found |= {name + of: text for name, text in _settings_of(s)}
    for at, x in jax.tree_util.tree_leaves_with_path(dict(extra)):
        found[f"extra{jax.tree_util.keystr(at)}"] = stable_text.value_text(x)
    if (rows := _some_rows(data)) is not None:
        found["data"] = rows
    given = [state_facts.given_of(s) for s in states]
    return {"calls": state_facts.total_calls(state), "states": given, "settings": found}


def _settings_of(state: TrainState) -> Iterator[tuple[str, str]]:
    """(name, text) of what is not saved of a state: its key, static numbers and functions."""
    yield "rule", stable_text.words_of(state.plan.update, code=False)
    fields: dict[str, Any] = dict.fromkeys(averages_of(state), ("start", "every", "warmup"))
    for name, f in ((name, x.schedule) for name, x in averages_of(state).items()):
        is_value = isinstance(f, Schedule)
        yield f"decay of the {name}", repr(f) if is_value else "a function" if f else "a number"
        if f is not None and not is_value:
            yield f"the schedule of the {name}", code_text(f)
    if state.loss_scale is not None:
        fields["loss_scale"] = "dynamic", "interval", "factor", "floor", "ceiling"
    for name, field in ((name, field) for name, of in fields.items() for field in of):
        yield f"{field} of the {name}", str(getattr(getattr(state, name), field))
    if (numbers := state.numbers) is not None:
        for at, s, group, _ in numbers.columns():
            for name, x in zip(numbers.layout.names[at][group], s.live.schedules, strict=True):
                # plain functions, optax's for example, whose numbers no table holds
                if x and (functions := [f for f in x.leaves if f is not None]):
                    yield f"the schedule of {name}", ", ".join(map(code_text, functions))
    yield "a function of the rule", code_text(state.plan.update)
    if state.key is not None:
        yield "key", hashlib.sha256(trees.on_host(state.key).tobytes()).hexdigest()[:16]


def _some_rows(data) -> str | None:
    """A hash of a few rows of `batches(arrays)`; None of other data."""
    while isinstance(data, Prefetched):
        data = data.data
    if not isinstance(data, Batches) or not data.is_of_arrays:
        return None
    found = hashlib.sha256()
    for x in data.sample():
        x = trees.on_host(x)
        found.update(f"{x.dtype} {x.shape}".encode() + x.tobytes())
    return found.hexdigest()[:16]


def code_text(f: object) -> str:
    """The Python that compiled a function, and a hash of its code and of what it refers to."""
    return f"{sys.version_info[0]}.{sys.version_info[1]} {stable_text.code_of(f)}"


def edits(then: Any, now: Mapping[str, str]) -> Iterator[str]:
    """A note for each setting that is another one than in the script that saved the checkpoint."""
    then, changed = then if isinstance(then, Mapping) else {}, list[str]()
    for name, mine in now.items():
        theirs = then.get(name)
        if not isinstance(theirs, str) or theirs == mine:
            continue
        is_known = any(x.startswith(("rule", "the schedule of ")) for x in changed)
        is_known &= name.startswith("a function of the rule")
        if is_known or (name == "loss_fn" and any(x.endswith(_OF_LOSS) for x in changed)):
            continue  # it has been said what has changed in them
        changed.append(name)
        is_code = name.startswith(_CODE)
        if is_code and theirs.split()[0] != mine.split()[0]:  # other Pythons compile to other codes
            continue
        is_long = is_code or max(len(theirs), len(mine)) > 80 or name.startswith(("data", "key"))
        code = " (code, or a value that it reads; what was compiled before keeps the old one)"
        change = code * is_code if is_long else f" from {theirs} to {mine}"
        whose = "checkpoint" if name.startswith("key") else "script"
        yield f"{name} has changed{change}. The {whose}'s is used."
