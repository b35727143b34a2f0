"""Why a step was traced again: the first differences between the arguments of two traces."""

from typing import Any

import jax

from tsunax._core import trees
from tsunax.program import Traced
from tsunax.state import TrainState


def _static_parts(traced: Traced) -> dict[str, Any]:
    """The parts of a state that determine its leaves, by name; a str is shown in the reason."""
    state = traced.state
    if not isinstance(state, TrainState):
        return {}
    plan, numbers, members = state.plan, state.numbers, state.clock.shape[:-1]
    shardings = jax.tree.leaves(traced.shardings) or [state.clock.sharding]
    mesh = shardings[0].mesh
    axes = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    return {
        "the state": f"a population of {members[0]}" if members else "one run",
        "the rule, apart from its numbers,": (plan.init, plan.update),
        "the choice of trainable=": plan.selected,
        "precision": "none" if plan.precision is None else plan.precision.compute,
        "the cut of the hyperparameters (adjust)": None if numbers is None else numbers.layout,
        "the mesh": ", ".join(f"{name}={n} {kind.name.lower()}" for name, n, kind in axes)
        or "none",
    }


def _leaf_types(traced: Traced) -> dict[str, str]:
    """The shape, dtype and sharding of each leaf, by its path."""
    types = {}
    for name, tree in {"state": traced.state, **traced.arguments}.items():
        for place, x in trees.leaves_at(name, tree):
            shape = f"{x.dtype}[{','.join(map(str, x.shape))}]"
            shape += " in host memory" if x.memory_space is jax.memory.Space.Host else ""
            types[place] = shape + (" (a Python number)" if x.weak_type else "")
    on_mesh = trees.leaves_at("state", traced.shardings)
    return types | {f"the sharding of {place}": str(x.spec) for place, x in on_mesh}


def _reasons(new: Traced, old: Traced) -> tuple[int, list[str]]:
    """The number of static parts that differ between two traces, and the differences in words."""
    a, b = _static_parts(new), _static_parts(old)
    parts = [name for name in a if name in b and a[name] != b[name]]
    texts = [f"{part} is another one" for part in parts[:1]]
    if texts and isinstance(a[parts[0]], str):
        texts = [f"{parts[0]} is {a[parts[0]]}, was {b[parts[0]]}"]
    a, b = _leaf_types(new), _leaf_types(old)
    for place in b | a:
        if a.get(place) == b.get(place) or (parts and "state" in place):
            continue  # leaves of the state follow from the static part
        if place in a and place in b:
            texts.append(f"{place} is {a[place]}, was {b[place]}")
        else:
            texts.append(f"{place} is new" if place in a else f"{place} is not there any more")
    omission = f"and {len(texts) - 4} more"
    return len(parts), texts if len(texts) < 6 else [*texts[:4], omission]


def retrace_reasons(records: list[Traced]) -> list[str]:
    """A line for each trace but the first of its kind: its differences from the nearest trace."""
    lines, records_by_kind = [], dict[str, list[Traced]]()
    no_difference = (
        "the same shapes: other static fields, jax.clear_caches(), or another jax.config"
    )
    for trace in records:
        earlier = records_by_kind.setdefault(trace.kind, [])
        if earlier:
            reasons = [_reasons(trace, old) for old in reversed(earlier)]
            _, texts = min(reasons, key=lambda x: (x[0], len(x[1])))
            lines.append(f"{trace.kind}: {'; '.join(texts) or no_difference}")
        earlier.append(trace)
    return lines
