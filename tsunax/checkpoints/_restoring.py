"""Where saved leaves go: comparing a checkpoint with what a script expects, and filling that in.

It reads manifests and verified host arrays, and knows no file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tsunax._core import patterns
from tsunax.checkpoints import manifest as _manifest
from tsunax.checkpoints.manifest import Manifest
from tsunax.errors import CheckpointError, warn
from tsunax.state import TrainState, base

__all__ = []

# --------------------------------------------------------------------------------------- to a state


@dataclass(frozen=True)
class How:
    """What a caller wants of a checkpoint."""

    like: Any
    partial: Any
    cast: bool
    params_only: bool

    @property
    def only_params(self) -> bool:
        return self.params_only or self.partial is not None

    def plan(self, manifest: Manifest, folder: Path) -> Plan:
        """Compare. Raises CheckpointError with up to ten differences, both sides of each."""
        plan = self.compared(manifest)
        fix = (
            "Restore with the setup that saved it; params alone: params_only=True or "
            "partial='pattern'."
        )
        refuse(f"checkpoint of another state at {folder}", plan.differences, fix)
        return plan

    def compared(self, manifest: Manifest) -> Plan:
        mine = _manifest.tree_of(self.like)
        saved = {leaf.path: leaf for leaf in manifest.leaves}
        return (
            self._params(mine, manifest, saved)
            if self.only_params
            else self._whole(mine, manifest, saved)
        )

    def _whole(self, mine: _manifest.Tree, manifest: Manifest, saved: dict) -> Plan:
        like, columns, alone = self.like, {}, {}
        if mine.states:
            like = _map_states(
                self.like, mine, lambda path, s: _laid_out_like(path, s, manifest, saved)
            )
            mine = _manifest.tree_of(like)
        found: list[str] = []
        given = _manifest.given_in(manifest)
        for path, s in mine.states.items():
            facts = _manifest.state_facts(s)
            if path not in manifest.states:
                found.append(f"{_manifest.show('state', path)}: saved no TrainState, expected one")
                continue
            handed = given.get(path)
            columns[(*path, ".numbers", ".values")] = manifest.states[path], facts, handed
            then = lambda name, handed=handed: None if handed is None else handed[name]
            if s.average is not None and not s.average.uniform:
                alone[(*path, ".average", ".rate")] = "ema decay", then("rate")
            if s.loss_scale is not None and (handed is not None or not s.loss_scale.dynamic):
                alone[(*path, ".loss_scale", ".scale")] = "loss scale", then("scale")
            found += _manifest.fact_differences(manifest.states[path], facts, path)
        absent = {
            (*path, ".frozen") for path in mine.states if (*path, ".frozen") not in saved
        }  # none was frozen
        wanted = [(path, path, x) for path, x in mine.leaves if path not in absent]
        more, pairs = _manifest.differences(wanted, saved, self.cast, skip=columns.__contains__)
        found += more + _manifest.extra_leaves(wanted, saved)
        nodes = [
            {p: k for p, k in side.items() if p[-1:] != (".frozen",)}
            for side in (manifest.nodes, mine.nodes)
        ]
        shown = {line.partition(":")[0] for line in found}
        found += [d for d in _manifest.node_differences(*nodes) if d.partition(":")[0] not in shown]
        return Plan(like, mine, pairs, found, columns, alone, [])

    def _params(self, mine: _manifest.Tree, manifest: Manifest, saved: dict) -> Plan:
        """Params and model state of each TrainState; or a bare tree of params from the one that was
        saved.
        """
        fields = (".params",) if self.partial is not None else (".params", ".model_state")
        roots: dict = {(*path, field): (*path, field) for path in mine.states for field in fields}
        if not mine.states:
            roots = {
                (): (*next(iter(manifest.states)), ".params") if len(manifest.states) == 1 else ()
            }
        home = lambda path: next((root for root in roots if path[: len(root)] == root), None)
        wanted = [
            (p, roots[home(p)] + p[len(home(p)) :], x)
            for p, x in mine.leaves
            if home(p) is not None
        ]  # type: ignore[arg-type]
        if self.partial is not None:
            chosen = self._chosen(mine)
            wanted = [w for w in wanted if w[0] in chosen]
        found, pairs = _manifest.differences(wanted, saved, self.cast)
        if self.partial is None:
            tops = list(roots.values())
            found += _manifest.extra_leaves(
                wanted, saved, lambda path: any(path[: len(t)] == t for t in tops)
            )
        return Plan(self.like, mine, pairs, found, {}, {}, [])

    def _chosen(self, mine: _manifest.Tree) -> set:
        """Paths of the leaves that the pattern matches, in the params of each TrainState or in the
        bare tree.
        """
        trees = {(*path, ".params"): s.params for path, s in mine.states.items()} or {(): self.like}
        chosen = set()
        for root, tree in trees.items():
            inside = [path for path, _ in mine.leaves if path[: len(root)] == root]
            chosen |= {
                p for p, on in zip(inside, patterns.select(self.partial, tree), strict=True) if on
            }
        return chosen


@dataclass(frozen=True)
class Clocks:
    """The counts of the saved training states, and nothing else: where a checkpoint is."""

    like: Any = ()
    only_params = False

    def plan(self, manifest: Manifest, folder: Path) -> Plan:
        clocks = {(*path, ".clock") for path in manifest.states}
        saved = [leaf for leaf in manifest.leaves if leaf.path in clocks]
        like = [np.zeros(leaf.shape, _manifest.dtype_of(leaf.dtype)) for leaf in saved]
        mine = _manifest.tree_of(like)
        places = zip(mine.leaves, saved, strict=True)
        pairs = [_manifest.Wanted(at, x, leaf) for (at, x), leaf in places]
        return Plan(like, mine, pairs, [], {}, {}, [])


def refuse(head: str, differences: list[str], fix: str) -> None:
    """Raise CheckpointError with the first ten differences, if there are any."""
    if differences:
        shown = [x if len(x) <= 500 else f"{x[:450]} …" for x in differences[:10]]
        more = [f"and {len(differences) - 10} more"] if len(differences) > 10 else []
        raise CheckpointError("\n  ".join([head + ":", *shown, *more, fix]))


def warn_of_edits(edited: list[str]) -> None:
    """Say which numbers are the script's."""
    for note in edited:
        warn(f"edited in the script since the run was set up, {note}: the script's is used.")


def _laid_out_like(path, state: TrainState, manifest: Manifest, saved: Mapping) -> TrainState:
    facts = manifest.states.get(path)
    if facts is None:
        return state
    return _manifest.laid_out(state, facts, (*path, ".frozen") in saved)


def _map_states(tree, known: _manifest.Tree, f: Callable[[tuple, TrainState], Any]):
    """`f(path, state)` on every TrainState of a tree, in the order of `tree_of`."""
    is_state = lambda x: isinstance(x, TrainState)
    paths = iter(known.states)
    return jax.tree.map(lambda x: f(next(paths), x) if is_state(x) else x, tree, is_leaf=is_state)


@dataclass(frozen=True)
class Plan:
    """Which saved leaf goes where, what does not fit, and the numbers that are merged rather than
    taken.
    """

    like: Any
    mine: _manifest.Tree
    pairs: list[_manifest.Wanted]
    differences: list[str]
    columns: dict
    alone: dict  # other numbers, by path: (name, what the script gave at the start, if known)
    edited: list[str]

    def needed(self, pair: _manifest.Wanted) -> tuple | None:
        """What this process needs of a saved leaf, as bounds of its axes; None for all of it."""
        sharding = getattr(pair.leaf, "sharding", None)
        is_merged = pair.path in self.columns or pair.path in self.alone
        if (
            sharding is None
            or sharding.is_fully_addressable
            or pair.saved.kind != "array"
            or is_merged
        ):
            return None
        shape = pair.saved.shape
        indices = sharding.addressable_devices_indices_map(shape).values()
        cut = lambda index: tuple(part.indices(n)[:2] for part, n in zip(index, shape, strict=True))
        return tuple(dict.fromkeys(map(cut, indices)))

    def filled(self, values: list):
        """The target with these values, verified before, in the place of its own."""
        new = {
            pair.path: self._placed(pair, value)
            for pair, value in zip(self.pairs, values, strict=True)
        }
        leaves, treedef = jax.tree.flatten(self.like)
        paths = [path for path, _ in self.mine.leaves]
        out = treedef.unflatten([new.get(path, x) for path, x in zip(paths, leaves, strict=True)])
        if self.columns or not self.mine.states:
            return out
        fresh = iter(_manifest.tree_of(out).states.values())
        parts = ({"params": s.params, "model_state": s.model_state} for s in fresh)
        return _map_states(self.like, self.mine, lambda _, old: restarted(old, **next(parts)))

    def _placed(self, pair: _manifest.Wanted, value):
        is_concrete = isinstance(pair.leaf, (jax.Array, np.ndarray))
        if pair.path in self.columns:
            theirs, mine, given = self.columns[pair.path]
            value = np.asarray(value)
            if is_concrete:
                here = np.asarray(pair.leaf)
                value, edited = _manifest.merged_numbers(value, theirs, here, mine, given)
                self.edited.extend(edited)
        elif pair.path in self.alone and is_concrete:
            name, then = self.alone[pair.path]
            then, mine = value if then is None else then, np.asarray(pair.leaf)
            if not np.array_equal(then, mine):
                turn = (lambda x: 1 - np.float64(x)) if name == "ema decay" else np.asarray
                self.edited.append(f"{name}: {_manifest.then_and_now(turn(then), turn(mine))}")
                value = mine
        return placed(value, pair.leaf, pair.saved.kind)


def restarted(state: TrainState, **parts) -> TrainState:
    """A state whose optimizer starts at restored params."""
    state = state.replace(**parts)
    return (
        state
        if state.average is None
        else dataclasses.replace(state, average=state.average.of(base(state)))
    )


def placed(value, like, kind: str):
    """A verified host value as what stands in its place in `like`: same dtype, same devices.

    Of an array over several processes the value may be what this process needs of it, see
    `Plan.needed`.
    """
    if not hasattr(like, "dtype"):
        return value
    if isinstance(like, np.generic):
        return value.astype(like.dtype)[()]
    if isinstance(like, np.ndarray):
        return value.astype(like.dtype, copy=False)
    sharding, of_key = like.sharding, kind.removeprefix("key:") if kind.startswith("key:") else ""
    value = value if of_key else value.astype(like.dtype, copy=False)
    if (
        sharding is not None and not sharding.is_fully_addressable
    ):  # each process makes its part, and nobody waits
        made = jax.make_array_from_callback(value.shape, sharding, value.__getitem__)
        return _manifest.wrap_key(made, of_key) if of_key else made
    value = _manifest.wrap_key(value, of_key) if of_key else value
    if sharding is None or (isinstance(like, jax.Array) and not like.committed):
        return jax.device_put(value)
    return jax.device_put(value, sharding)
