"""Why a step was traced again: the first differences between the arguments of two traces."""

from __future__ import annotations

import itertools
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
    found = {}
    for name, tree in {"state": traced.state, **traced.given}.items():
        for place, x in trees.leaves_at(name, tree):
            shape = f"{x.dtype}[{','.join(map(str, x.shape))}]"
            found[place] = shape + (" (a Python number)" if x.weak_type else "")
    on_mesh = trees.leaves_at("state", traced.shardings)
    return found | {f"the sharding of {place}": str(x.spec) for place, x in on_mesh}


def _unlikeness(new: Traced, old: Traced) -> tuple[int, int]:
    parts = _static_parts(old)
    differ = sum(name in parts and x != parts[name] for name, x in _static_parts(new).items())
    return differ, len(_reasons(new, old))


def _reasons(new: Traced, old: Traced) -> list[str]:
    """The differences from an earlier trace, in words."""
    a, b = _static_parts(new), _static_parts(old)
    part = next((name for name in a if name in b and a[name] != b[name]), None)
    found = []
    if part is not None:
        shown = isinstance(a[part], str)
        found.append(f"{part} is {a[part]}, was {b[part]}" if shown else f"{part} is another one")
    a, b = _leaf_types(new), _leaf_types(old)
    for place in b | a:
        if a.get(place) == b.get(place) or (part is not None and "state" in place):
            continue  # leaves of the state follow from that part
        if place in a and place in b:
            found.append(f"{place} is {a[place]}, was {b[place]}")
        else:
            found.append(f"{place} is new" if place in a else f"{place} is not there any more")
    more = f"and {len(found) - 4} more"
    return found if len(found) < 6 else [*found[:4], more]


def retrace_reasons(records: list[Traced], places: list[tuple[str, Any]]) -> list[str]:
    """A line for each trace but the first of its kind: what was new, against the most similar one.

    Then a line for each further device, for which XLA compiles the traced program again.
    """
    lines, seen = [], dict[str, list[Traced]]()
    same = "the same shapes: other static fields, jax.clear_caches(), or another jax.config"
    for trace in records:
        earlier = seen.setdefault(trace.kind, [])
        if earlier:
            found = _reasons(trace, min(reversed(earlier), key=lambda old: _unlikeness(trace, old)))
            lines.append(f"{trace.kind}: {'; '.join(found) or same}")
        earlier.append(trace)
    for kind in seen:
        devices = [device for of, device in places if of == kind]
        lines += [
            f"{kind}: the state is on {b}, was on {a}" for a, b in itertools.pairwise(devices)
        ]
    return lines


__all__ = ["retrace_reasons"]
