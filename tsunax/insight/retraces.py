"""Why a step was traced again: the first differences between the arguments of two traces."""

from typing import Any

import jax

from tsunax._core import trees
from tsunax.program import Traced
from tsunax.state import TrainState


def _static_parts(traced: Traced) -> dict[str, Any]:
    """The parts of a state that determine its leaves, by name."""
    state = traced.state
    if not isinstance(state, TrainState):
        return {}
    plan, numbers = state.plan, state.numbers
    shardings = jax.tree.leaves(traced.shardings) or [state.clock.sharding]
    return {
        "the rule, apart from its numbers,": (plan.init, plan.update),
        "the choice of trainable=": plan.selected,
        "precision": plan.precision,
        "the cut of the hyperparameters (adjust)": None if numbers is None else numbers.layout,
        "the mesh": shardings[0].mesh,
    }


def _leaf_types(traced: Traced) -> dict[str, str]:
    """The shape, dtype and sharding of each leaf, by its path."""
    types = {}
    for name, tree in {"state": traced.state, **traced.arguments}.items():
        for place, x in trees.leaves_at(name, tree):
            type_text = f"{x.dtype}[{','.join(map(str, x.shape))}]"
            type_text += " in host memory" if x.memory_space is jax.memory.Space.Host else ""
            types[place] = type_text + (" (a Python number)" if x.weak_type else "")
    on_mesh = trees.leaves_at("state", traced.shardings)
    return types | {f"the sharding of {place}": str(x.spec) for place, x in on_mesh}


def _reasons(new: Traced, old: Traced) -> tuple[int, list[str]]:
    """The number of static parts that differ between two traces, and the differences in words."""
    a, b = _static_parts(new), _static_parts(old)
    parts = [name for name in a if name in b and a[name] != b[name]]
    texts = [f"{part} is another one" for part in parts[:1]]
    a, b = _leaf_types(new), _leaf_types(old)
    for place in b | a:
        is_of_state = place.removeprefix("the sharding of ").startswith(("state.", "state["))
        if a.get(place) == b.get(place) or (parts and is_of_state):
            continue  # leaves of the state follow from the static part
        is_new = place not in b
        texts.append(
            f"{place} is new" if is_new else f"{place} is {a.get(place, 'gone')}, was {b[place]}"
        )
    return len(parts), texts


def retrace_reasons(records: list[Traced]) -> list[str]:
    """A line for each trace but the first of its kind: its differences from the nearest trace."""
    lines: list[str] = []
    no_difference = (
        "the same shapes: other static fields, jax.clear_caches(), or another jax.config"
    )
    for i, trace in enumerate(records):
        earlier = [record for record in records[:i] if record.kind == trace.kind]
        if reasons := [_reasons(trace, record) for record in reversed(earlier)]:
            _, texts = min(reasons, key=lambda x: (x[0], len(x[1])))
            lines.append(f"{trace.kind}: {trees.listed(texts, 4, '; ') or no_difference}")
    return lines
