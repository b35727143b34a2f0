"""Why a step was traced again: what each trace of it was given, and where two of them first differ.

A trace costs seconds, so that a record of it costs nothing beside it; a step that is traced already
never comes here.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import jax

from tsunax._core import trees as _trees
from tsunax.program import Traced
from tsunax.state import Plan, TrainState


@dataclass(frozen=True, eq=False)
class Trace:
    """What one trace of a step was given: shapes and dtypes, no values."""

    kind: str  # "step", or "loop" for those that run fused
    plan: Plan | None
    layout: Any  # on a mesh the sharding of each array that the step changes; None on one device
    moving: tuple[str, ...]  # the fields of the state that the step changes
    # the axes that the state is on and of which type, also where one device is all of the mesh
    mesh: str
    trees: dict[str, Any]  # {what it is called: tree of `jax.ShapeDtypeStruct`}

    @classmethod
    def of(cls, traced: Traced) -> Trace:
        """The trace of the record that a step stores."""
        state, trees = traced.state, traced.given
        plan = state.plan if isinstance(state, TrainState) else None
        fields = {"state": state}
        if plan is not None:
            fields = {f"state.{f.name}": getattr(state, f.name) for f in state._fields}
        shapes = {name: jax.tree.map(_shape, tree) for name, tree in (fields | trees).items()}
        first = next(iter(jax.tree.leaves(state)), None)
        axes: Any = ()
        if first is not None:
            on = first.sharding.mesh
            axes = zip(on.axis_names, on.axis_types, strict=True)
        mesh = ", ".join(f"{name}: {kind.name.lower()}" for name, kind in axes)
        moving = ("params", *state._moving) if plan is not None else ()
        return cls(traced.kind, plan, traced.layout, moving, mesh, shapes)

    @property
    def members(self) -> tuple[int, ...]:
        """(number of members,) of a population; () of a single state."""
        clock = self.trees.get("state.clock")
        return () if clock is None else clock.shape[:-1]

    def distance(self, other: Trace) -> tuple[bool, bool, int]:
        """How much is different; static parts weigh more than trees, and those more than leaves."""
        is_other = jax.tree.structure(self.trees) != jax.tree.structure(other.trees)
        return self.plan is not other.plan, is_other, len(self.reasons(other))

    def reasons(self, other: Trace) -> list[str]:
        """What is different here from what it was in an earlier trace, in words."""
        found = []
        if self.plan is not other.plan and self.plan is not None and other.plan is not None:
            found += _plans(self, other)
        follows = set()
        if found:  # parts of the state that follow from the plan
            follows = {"state.masters"}
            if not found[0].startswith("precision"):
                follows |= {"state.opt_state", "state.numbers"}
                follows |= {
                    f"state.{f.name}" for f in TrainState._fields if f.metadata["like"] == "average"
                }
        if self.members != other.members:
            found.append(f"the state is {_members(self)}, was {_members(other)}")
            follows = {name for name in self.trees if name.startswith("state.")}
        if "state.numbers" in self.trees and "state.numbers" not in follows:
            cut = _difference(
                "state.numbers", self.trees["state.numbers"], other.trees["state.numbers"]
            )
            found, follows = (
                found + cut,
                follows | {"state.numbers"} | ({"state.opt_state"} if cut else set()),
            )
        for name in other.trees | self.trees:
            if name in follows:
                continue
            if name not in self.trees or name not in other.trees:
                gone = name not in self.trees
                found.append(f"argument {name!r} {'is not given any more' if gone else 'is new'}")
            else:
                found += _difference(name, self.trees[name], other.trees[name])
        if (self.layout is None) != (other.layout is None):
            found.append(
                f"the state lies on {'one device' if self.layout is None else 'a mesh'}, "
                "not as before"
            )
        elif self.layout is None and self.mesh != other.mesh:
            found.append(f"the state lies on {_mesh(self)}, was on {_mesh(other)}")
        elif not found and self.layout != other.layout:
            found += _placement(self, other)
        return found


def _members(trace: Trace) -> str:
    return f"a population of {trace.members[0]}" if trace.members else "one run"


def _mesh(trace: Trace) -> str:
    return f"a mesh of one device ({trace.mesh})" if trace.mesh else "no mesh"


def _shape(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def _plans(new: Trace, old: Trace) -> list[str]:
    found = []
    a, b = new.plan, old.plan
    assert a is not None and b is not None
    if a.update != b.update or a.init != b.init:
        found.append("the rule is another one, in more than its numbers")
    if a.selected != b.selected:
        paths = [
            path for path, _ in jax.tree_util.tree_flatten_with_path(new.trees["state.params"])[0]
        ]
        everything = (True,) * len(paths)
        pairs = zip(paths, a.selected or everything, b.selected or everything, strict=False)
        what = next(((path, now) for path, now, before in pairs if now != before), None)
        where = ""
        if what is not None:
            now = "trained" if what[1] else "not trained"
            where = f": {_trees.access_str('params', what[0])} is {now}"
        found.append(f"trainable= selects other leaves{where}")
    if a.precision != b.precision:
        says = lambda plan: "none" if plan.precision is None else plan.precision.compute
        found.append(f"precision is {says(a)}, was {says(b)}")
    return found


def _difference(name: str, new: Any, old: Any) -> list[str]:
    if jax.tree.structure(new) != jax.tree.structure(old):
        if name == "state.frozen":
            return [
                "the state has frozen flags, which it had not"
                if old is None
                else "the state lost its frozen flags"
            ]
        if name == "state.numbers" and new is not None and old is not None:
            return ["the hyperparameters are cut into other groups (adjust)"]
        return [f"tree {_trees.first_difference(new, old, name)}"]
    pairs = zip(jax.tree_util.tree_flatten_with_path(new)[0], jax.tree.leaves(old), strict=True)
    changed = [(path, x, y) for (path, x), y in pairs if _kind(x) != _kind(y)]
    found = [
        f"{_trees.access_str(name, path)} has {what}"
        for path, x, y in changed[:3]
        for what in _leaf(x, y)
    ]
    return [*found, f"and {len(changed) - 3} more leaves of {name}"] if len(changed) > 3 else found


def _kind(x: Any) -> tuple:
    return x.shape, x.dtype, x.weak_type


def _leaf(new: Any, old: Any) -> list[str]:
    weak = lambda x: "a weak type (it was a Python number)" if x.weak_type else "a strong type"
    pairs = {
        "shape ": (new.shape, old.shape),
        "dtype ": (new.dtype, old.dtype),
        "": (weak(new), weak(old)),
    }
    return [f"{what}{x}, had {y}" for what, (x, y) in pairs.items() if x != y]


def _placement(new: Trace, old: Trace) -> list[str]:
    found = jax.tree_util.tree_flatten_with_path(new.layout)[0]
    if len(found) != len(jax.tree.leaves(old.layout)):
        return ["the state lies elsewhere"]
    names = [
        _trees.access_str(f"state.{field}", path)
        for field in new.moving
        for path, _ in jax.tree_util.tree_flatten_with_path(new.trees.get(f"state.{field}"))[0]
    ]
    if len(names) != len(found):
        names = [_trees.access_str("state", path) for path, _ in found]
    for where, (_, a), b in zip(names, found, jax.tree.leaves(old.layout), strict=True):
        if a != b:
            what = "another mesh" if a.mesh != b.mesh else f"{a.spec}, was {b.spec}"
            return [f"{where} is spread over the mesh as {what}"]
    return []


def why(records: list[Traced], places: list[tuple[str, Any]]) -> list[str]:
    """Why there was more than one trace: what was new in each, against the most similar one.

    A line for each trace but the first of its kind, which is compared with those before it. Then a
    line for each further device, for which XLA compiles the traced program again.
    """
    lines, seen = [], dict[str, list[Trace]]()
    for trace in map(Trace.of, records):
        earlier = seen.setdefault(trace.kind, [])
        if earlier:
            found = trace.reasons(min(reversed(earlier), key=trace.distance))
            same = (
                "the same arguments as before: jax.clear_caches(), another jax.config, or a "
                "context of it"
            )
            lines.append(f"{trace.kind}: {'; '.join(found) or same}")
        earlier.append(trace)
    for kind in seen:
        devices = [device for of, device in places if of == kind]
        lines += [
            f"{kind}: the state is on {b}, was on {a}" for a, b in itertools.pairwise(devices)
        ]
    return lines


__all__ = ["Trace", "why"]
