"""The settings of a script that calls `fit`, as plain values: saved with each checkpoint, and
compared when the script is started again. This file uses states, rules and data, but no files.
"""

import contextlib
import enum
import functools
import hashlib
import importlib.metadata
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax

from tsunax._core import PyTree, stable_text, trees
from tsunax._state import averages_of
from tsunax.checkpoints import leaves, state_facts
from tsunax.data import batching, positions
from tsunax.schedules import Schedule
from tsunax.state import TrainState

# The versions of these libraries are saved, because results of two versions may round differently.
_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "numpy")
_MAX_VALUES = 200  # values that are saved by name, so that a warning can name the edited value


class Kind(enum.Enum):
    """The kind of a setting, which decides how its edit is noted, and which note may replace it."""

    NUMBER = enum.auto()  # also a word or a rule, as a text that a note shows if it is short
    VALUE_OF_LOSS = enum.auto()
    LOSS = enum.auto()  # this and the next three are `code_text`
    OBJECTIVE = enum.auto()
    SCHEDULE = enum.auto()
    FUNCTION_OF_RULE = enum.auto()
    RULE = enum.auto()
    DATA = enum.auto()  # this and the next are hashes
    KEY = enum.auto()
    PLATFORM = enum.auto()  # a version, or devices: all of their changes are one note


_CODE = {Kind.LOSS, Kind.OBJECTIVE, Kind.SCHEDULE, Kind.FUNCTION_OF_RULE}
_HASHES = {Kind.DATA, Kind.KEY}
# An edit of a kind on the right changes the code on the left, too, and needs no second note.
_NAMED_BY = {Kind.LOSS: {Kind.VALUE_OF_LOSS}, Kind.FUNCTION_OF_RULE: {Kind.RULE, Kind.SCHEDULE}}


class Setting(str):
    """A setting of a script as text, which is saved as a plain string, and its kind."""

    kind: Kind

    def __new__(cls, text: str, kind: Kind = Kind.NUMBER) -> "Setting":
        setting = super().__new__(cls, text)
        setting.kind = kind
        return setting


def script_of(
    step: Any, state: PyTree, data: Iterable[PyTree] | None, extra: Mapping[str, Any]
) -> dict[str, Any]:
    """Calls and numbers of a script's states, and its other settings as texts."""
    states = list(leaves.tree_of(state).states.values())
    loss_fn = getattr(step, "loss_fn", step)
    values = list(stable_text.values_of(loss_fn).items())[:_MAX_VALUES]
    settings = {f"`{name}` of loss_fn": Setting(x, Kind.VALUE_OF_LOSS) for name, x in values}
    settings["loss_fn"] = Setting(code_text(loss_fn), Kind.LOSS)
    if hasattr(step, "accumulate"):
        settings["accumulate"] = Setting(str(step.accumulate))
    for i, s in enumerate(states):
        suffix = f" of state {i}" if len(states) > 1 else ""
        settings |= {name + suffix: setting for name, setting in _settings_of(s)}
    for path, x in jax.tree_util.tree_leaves_with_path(dict(extra)):
        settings[f"extra{jax.tree_util.keystr(path)}"] = Setting(stable_text.value_text(x))
    if (rows := hash_of_rows(data, max_batches=1)) is not None:  # a list may get longer
        settings["data"] = Setting(rows, Kind.DATA)
    platform = _versions() | _devices_of(state)
    settings |= {name: Setting(text, Kind.PLATFORM) for name, text in platform.items()}
    return {
        "calls": state_facts.total_calls(state),
        "states": [state_facts.script_numbers(s) for s in states],
        "settings": settings,
    }


@functools.cache
def _versions() -> dict[str, str]:
    python = ".".join(map(str, sys.version_info[:3]))
    versions = {"python": python, "tsunax": sys.modules["tsunax"].__version__}
    for name in _LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {f"version of {name}": text for name, text in versions.items()}


def _devices_of(state: PyTree) -> dict[str, str]:
    """Number, kind and platform of the devices of a state, and the axes of its mesh, as texts."""
    shardings = [x.sharding for x in jax.tree.leaves(state) if isinstance(x, jax.Array)]
    devices = set().union(*(sharding.device_set for sharding in shardings))
    if not devices:
        return {}
    kinds = ", ".join(sorted({f"{x.device_kind} ({x.platform})" for x in devices}))
    on_mesh = [x.mesh for x in shardings if isinstance(x, jax.sharding.NamedSharding)]
    axes = ", ".join(f"{name}={size}" for name, size in on_mesh[0].shape.items()) if on_mesh else ""
    return {"devices": f"{len(devices)} {kinds}", "mesh": axes or "none"}


def _settings_of(state: TrainState) -> Iterator[tuple[str, Setting]]:
    """The parts of a state by name that are not saved: key, static numbers, functions."""
    yield "rule", Setting(stable_text.words_of(state.plan.update, code=False), Kind.RULE)
    fields: dict[str, Any] = dict.fromkeys(averages_of(state), ("start", "every", "warmup"))
    for name, average in averages_of(state).items():
        f = average.schedule
        is_value = isinstance(f, Schedule)
        description = repr(f) if is_value else "a function" if f else "a number"
        yield f"decay of the {name}", Setting(description)
        if f is not None and not is_value:
            yield f"the schedule of the {name}", Setting(code_text(f), Kind.SCHEDULE)
    if state.loss_scale is not None:
        fields["loss_scale"] = "dynamic", "interval", "factor", "floor", "ceiling"
    for name, names_of_fields in fields.items():
        for field in names_of_fields:
            yield f"{field} of the {name}", Setting(str(getattr(getattr(state, name), field)))
    if (numbers := state.numbers) is not None:
        for number in numbers.layout.numbers:
            # Plain functions, for example optax's: their numbers are in no table.
            schedule_leaves = number.schedule.leaves if number.schedule else ()
            if functions := [f for f in schedule_leaves if f is not None]:
                code = ", ".join(map(code_text, functions))
                yield f"the schedule of {number.flat_name}", Setting(code, Kind.SCHEDULE)
    code = code_text(state.plan.update)
    yield "a function of the rule", Setting(code, Kind.FUNCTION_OF_RULE)
    if state.key is not None:
        digest = hashlib.sha256(trees.on_host(state.key).tobytes()).hexdigest()
        yield "key", Setting(digest[:16], Kind.KEY)


def hash_of_rows(data: Any, max_batches: int = 8) -> str | None:
    """A hash of a few rows of `batches(arrays)`, or of a list of batches; None for other data."""
    data = positions.innermost(data)
    if isinstance(data, list | tuple):
        arrays = jax.tree.leaves([data[i] for i in batching.spread(len(data), max_batches)])
        is_whole = lambda x: trees.is_array(x) and getattr(x, "is_fully_addressable", True)
        rows = [x[batching.spread(len(x), 8)] if x.ndim else x for x in filter(is_whole, arrays)]
    elif isinstance(data, batching.Batches) and data.is_of_arrays:
        rows = data.sample()
    else:
        return None
    digest = hashlib.sha256()
    for x in map(trees.on_host, rows):
        digest.update(f"{x.dtype} {x.shape}".encode() + x.tobytes())
    return digest.hexdigest()[:16]


def code_text(f: object) -> str:
    """The Python version, and a hash of a function's code and of the values that it refers to."""
    return f"{sys.version_info[0]}.{sys.version_info[1]} {stable_text.code_of(f)}"


def edits(old_settings: Any, new_settings: Mapping[str, Setting]) -> Iterator[str]:
    """A note for each setting that differs from the script that saved the checkpoint."""
    old_settings = old_settings if isinstance(old_settings, Mapping) else {}
    changed_kinds, platform = set[Kind](), list[str]()
    for name, setting in new_settings.items():
        old_text, kind = old_settings.get(name), setting.kind
        is_edited = isinstance(old_text, str) and old_text != setting
        if not is_edited or changed_kinds & _NAMED_BY.get(kind, set()):
            continue
        if kind is Kind.PLATFORM:
            platform.append(f"{name}: {old_text} then, {setting} now")
            continue
        changed_kinds.add(kind)
        is_code = kind in _CODE
        # versions of Python differ in their byte code
        if is_code and old_text.split()[0] != setting.split()[0]:
            continue
        change = f" from {old_text} to {setting}"
        if is_code:
            change = " (code, or a value that it reads; what was compiled before keeps the old one)"
        elif kind in _HASHES or max(len(old_text), len(setting)) > 80:
            change = ""
        owner = "checkpoint" if kind is Kind.KEY else "script"
        yield f"{name} has changed{change}. The {owner}'s is used."
    if platform:
        yield f"on another platform ({'; '.join(platform)}). The same bits are not promised."
