"""Where saved leaves go: comparing a checkpoint with what a script expects, and filling that in.

It gets manifests and host arrays, and opens no file.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tsunax._core import patterns, processes, trees
from tsunax._state.state_fields import averages_of
from tsunax.checkpoints import leaves, state_facts
from tsunax.checkpoints._blocks import other_bytes
from tsunax.checkpoints._host_copies import holders_of
from tsunax.checkpoints.checksums import MODULUS, Bounds
from tsunax.checkpoints.leaves import Damaged, Keys, Leaf, Tree, show
from tsunax.checkpoints.manifest import Manifest
from tsunax.checkpoints.state_facts import Kept, NumberTable
from tsunax.errors import CheckpointError, StateError
from tsunax.state import TrainState, base


@dataclass(frozen=True)
class RestoreRequest:
    like: Any
    partial: Any = None
    cast: bool = False
    params_only: bool = False
    is_fit: bool = False  # which has none of these options

    @property
    def skips_optimizer(self) -> bool:
        return self.params_only or self.partial is not None

    def plan(self, manifest: Manifest, folder: Path) -> "RestorePlan":
        """The plan for a manifest. Raises CheckpointError with ten differences, both sides."""
        saved = {leaf.path: leaf for leaf in manifest.leaves}
        of = self._params if self.skips_optimizer else self._whole
        plan = of(leaves.tree_of(self.like), manifest, saved)
        fix = "params alone: params_only=True or partial='pattern'; other dtypes: cast=True."
        if self.is_fit:
            fix = "another model or rule is another run: give it another path."
        elif self.skips_optimizer:
            fix = "only params that fit: partial='pattern'; other dtypes: cast=True."
        fix = f"{'Go on' if self.is_fit else 'Restore'} with the setup that saved it; {fix}"
        refuse(f"checkpoint of another state at {folder}", plan.differences, fix)
        return plan

    def _whole(self, mine: Tree, manifest: Manifest, saved: dict) -> "RestorePlan":
        def layout(path, s: TrainState) -> TrainState:
            facts, is_frozen = manifest.states.get(path), (*path, ".frozen") in saved
            return s if facts is None else state_facts.laid_out(s, facts, is_frozen)

        like = _map_states(self.like, mine, layout)
        mine = leaves.tree_of(like)
        merges: dict[Keys, NumberTable | Kept] = {}
        differences: list[str] = []
        numbers_at_start = state_facts.given_in(manifest)
        for path, s in mine.states.items():
            if (saved_facts := manifest.states.get(path)) is None:
                differences.append(f"{show('state', path)}: saved no TrainState, expected one")
                continue
            facts, at_start = state_facts.facts_of(s), numbers_at_start.get(path)
            merges[(*path, ".numbers", ".values")] = NumberTable(saved_facts, facts, at_start)
            merges |= state_facts.kept_numbers(s, path, at_start)
            differences += _fact_differences(saved_facts, facts, path)
        # nothing was frozen where the flags were not saved
        absent = {(*path, ".frozen") for path in mine.states} - saved.keys()
        wanted = [(path, path, x) for path, x in mine.leaves if path not in absent]
        leaf_differences, pairs = _differences(wanted, saved, self.cast, merges)
        differences += leaf_differences + _extra_leaves(wanted, saved)
        return RestorePlan(like, mine, pairs, differences, merges)

    def _params(self, mine: Tree, manifest: Manifest, saved: dict) -> "RestorePlan":
        """Params and model state of each TrainState; a bare tree, from those of a saved one."""
        fields = (".params",) if self.partial is not None else (".params", ".model_state")
        roots: dict = {(*path, field): (*path, field) for path in mine.states for field in fields}
        if not mine.states:
            one = len(manifest.states) == 1
            roots = {(): (*next(iter(manifest.states)), ".params") if one else ()}
        wanted = []
        for path, x in mine.leaves:
            root = next((root for root in roots if path[: len(root)] == root), None)
            if root is not None:
                wanted.append((path, roots[root] + path[len(root) :], x))
        if self.partial is None:
            under = lambda path: any(path[: len(top)] == top for top in roots.values())
            extra = _extra_leaves(wanted, saved, under)
        else:
            params = [s.params for s in mine.states.values()] or [self.like]
            call = "restore(partial=)"
            flags = [on for tree in params for on in patterns.select(self.partial, tree, call)]
            wanted, extra = [w for w, on in zip(wanted, flags, strict=True) if on], []
        # the master copies of restored params, which hold more digits
        known = dict(mine.leaves)
        within = lambda top, path: path[: len(top) + 1] == (*top, ".params")
        masters = ((*top, ".masters", *path[len(top) + 1 :])
                   for top in mine.states for path, *_ in wanted if within(top, path))  # fmt: skip
        wanted += [(path, path, known[path]) for path in masters if path in known.keys() & saved]
        found, pairs = _differences(wanted, saved, self.cast, {})
        return RestorePlan(self.like, mine, pairs, found + extra, restarts=bool(mine.states))


@dataclass(frozen=True)
class Clocks:
    """A restore of nothing but the counts of the saved training states."""

    like: Any = ()
    skips_optimizer = False

    def plan(self, manifest: Manifest, folder: Path) -> "RestorePlan":
        clocks = {(*path, ".clock") for path in manifest.states}
        saved = [leaf for leaf in manifest.leaves if leaf.path in clocks]
        like = [np.zeros(leaf.shape, leaves.dtype_of(leaf.dtype)) for leaf in saved]
        mine = leaves.tree_of(like)
        pairs = [Pair(at, x, leaf) for (at, x), leaf in zip(mine.leaves, saved, strict=True)]
        return RestorePlan(like, mine, pairs, [])


def refuse(head: str, differences: list[str], fix: str) -> None:
    if differences:
        shown = [x if len(x) <= 500 else f"{x[:450]} …" for x in differences]
        raise CheckpointError("\n  ".join([head + ":", trees.listed(shown, 10, "\n  "), fix]))


def _map_states(tree, known: Tree, f: Callable[[tuple, TrainState], Any]):
    """`f(path, state)` on every TrainState of a tree, in the order of `tree_of`."""
    is_state = lambda x: isinstance(x, TrainState)
    paths = iter(known.states)
    return jax.tree.map(lambda x: f(next(paths), x) if is_state(x) else x, tree, is_leaf=is_state)


@dataclass(frozen=True)
class Pair:
    """A leaf of the target, and the saved one that goes there."""

    path: Keys
    leaf: Any
    saved: Leaf


@dataclass(frozen=True)
class RestorePlan:
    """What a restore does: which leaf goes where, what does not fit, which numbers are merged."""

    like: Any
    mine: Tree
    pairs: list[Pair]
    differences: list[str]
    merges: Mapping[Keys, NumberTable | Kept] = dataclasses.field(default_factory=dict)
    restarts: bool = False  # whether optimizers start anew, at the restored params
    edited: list[str] = dataclasses.field(default_factory=list)

    def parts(self, pair: Pair) -> dict[int, tuple[Bounds, ...]] | None:
        """The parts of a saved leaf that each process needs; None if each reads all of it."""
        sharding = getattr(pair.leaf, "sharding", None)
        is_local = sharding is None or sharding.is_fully_addressable
        if is_local or pair.path in self.merges or pair.saved.kind != "array":
            return None
        holders = holders_of(sharding, pair.saved.shape)
        found: dict[int, tuple[Bounds, ...]] = {}
        for bounds, indices in holders.items():
            for i in indices:
                found[i] = (*found.get(i, ()), bounds)
        distinct = set(found.values())  # else two processes share some of their parts but not all
        are_apart = len(distinct) > 1 and sum(map(len, distinct)) == len(holders)
        return found if are_apart else None

    def needed(self, pair: Pair) -> tuple[Bounds, ...] | None:
        """What this process needs of a saved leaf; None for all of it."""
        return (self.parts(pair) or {}).get(processes.current().index)

    def word(self, sums: Mapping[str, int]) -> str:
        """The hashes of what this process read in parts, 16 digits each, for the other ones."""
        read = [pair.saved.name for pair in self.pairs if self.parts(pair)]
        return "".join(f"{sums.get(name, 0):016x}" for name in read)

    def check(self, words: list[str]) -> None:
        """Verify the leaves that no process has read whole, by the `word` of each; or Damaged."""
        at = 0
        for pair in self.pairs:
            if parts := self.parts(pair):
                said = {i: int(words[i][at : at + 16], 16) for i in parts}
                found = {parts[i]: x for i, x in said.items()}
                same = all(found[parts[i]] == x for i, x in said.items())  # replicas agree
                if not same or sum(found.values()) % MODULUS != pair.saved.hash:
                    raise Damaged(other_bytes(pair.saved))
                at += 16

    def filled(self, values: list):
        """The target with these verified values in place of its own."""
        both = zip(self.pairs, values, strict=True)
        new = {pair.path: self._placed(pair, value) for pair, value in both}
        treedef = jax.tree.structure(self.like)
        out = treedef.unflatten([new.get(path, x) for path, x in self.mine.leaves])
        if not self.restarts:
            return out
        fresh = iter(leaves.tree_of(out).states.values())
        names = "params", "model_state", "masters"
        parts = ({name: getattr(s, name) for name in names} for s in fresh)
        return _map_states(self.like, self.mine, lambda _, old: restarted(old, **next(parts)))

    def placing(self) -> Callable[[int, Any], Any]:
        """A function of threads: it begins the copy of value `i` to its device, if nobody edits it.

        Others, and arrays of which other processes have a part, wait for `filled`.
        """
        device = jax.config.jax_default_device  # type: ignore[attr-defined]

        def place(i: int, value: Any) -> Any:
            pair = self.pairs[i] if i < len(self.pairs) else None
            if pair is None or pair.path in self.merges:
                return value
            like, is_array = pair.leaf, pair.saved.kind == "array"
            is_early = is_array and isinstance(like, jax.Array) and like.is_fully_addressable
            # a thread has the user's device from here, but not a context of 64 bits
            if not is_early or jax.dtypes.canonicalize_dtype(like.dtype) != like.dtype:
                return value
            with jax.default_device(device):
                return placed(value, like, pair.saved.kind)

        return place

    def _placed(self, pair: Pair, value):
        if (merge := self.merges.get(pair.path)) is not None:
            value = np.asarray(value)
            if isinstance(pair.leaf, (jax.Array, np.ndarray)):
                value, notes = merge.merged(value, np.asarray(pair.leaf))
                self.edited.extend(notes.values())
        return placed(value, pair.leaf, pair.saved.kind)


def restarted(state: TrainState, *, masters=None, **parts) -> TrainState:
    """A state whose optimizer starts at restored params. Raises StateError for shapes."""
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(state)):
        fix = "Restore into state.params, then ts.shard(lambda: ts.setup(rule, params), mesh)."
        raise StateError("like", "restore()", "a state of shapes, for params alone", "arrays", fix)
    masters = state.masters if masters is None else masters
    state = dataclasses.replace(state, masters=masters).replace(**parts)
    old = averages_of(state)
    anew = {name: trees.offloaded_like(x.of(base(state)), x) for name, x in old.items()}
    return dataclasses.replace(state, **anew)


def placed(value, like, kind: str):
    """A verified host value, or the `Pieces` that are needed of it, at its place in `like`."""
    if not hasattr(like, "dtype") or isinstance(value, jax.Array):
        return value
    if isinstance(like, np.generic):
        return leaves.in_dtype(value, like.dtype, "restore()")[()]
    if isinstance(like, np.ndarray):
        return leaves.in_dtype(value, like.dtype, "restore()")
    sharding, of_key = like.sharding, kind.removeprefix("key:") if kind.startswith("key:") else ""
    value = value if of_key else leaves.in_dtype(value, like.dtype, "restore()")
    if sharding is not None and not sharding.is_fully_addressable:
        # each process makes its part, and nobody waits
        made = jax.make_array_from_callback(value.shape, sharding, value.__getitem__)
        return leaves.wrap_key(made, of_key) if of_key else made
    value = leaves.wrap_key(value, of_key) if of_key else value
    if sharding is None or (isinstance(like, jax.Array) and not like.committed):
        return jax.device_put(value)
    return jax.device_put(value, sharding)


Wanted = list[tuple[Keys, Keys, Any]]  # path here, path there, leaf


def _differences(
    wanted: Wanted, saved: Mapping, cast: bool, merges: Mapping[Keys, NumberTable | Kept]
) -> tuple[list[str], list]:
    """Compare what is wanted with what is there: (both sides of each difference, pairs)."""
    found, pairs = [], []
    for here, there, x in wanted:
        mine, theirs = leaves.leaf_of(here, x), saved.get(there)
        if theirs is None:
            found.append(f"{show('state', here)}: nothing saved, expected {mine}")
        elif not isinstance(merges.get(here), NumberTable) and not fits(mine, theirs, cast):
            found.append(f"{show('state', here)}: saved {theirs}, expected {mine}")
        else:
            pairs.append(Pair(here, x, theirs))
    return found, pairs


def fits(mine: Leaf, theirs: Leaf, cast: bool) -> bool:
    """Whether a saved leaf can be restored into this one: `placed` follows our sharding."""
    if (mine.kind, mine.shape) != (theirs.kind, theirs.shape):
        return False
    both = mine.dtype, theirs.dtype
    is_both = lambda kind: all(name and jnp.issubdtype(np.dtype(name), kind) for name in both)
    return both[0] == both[1] or (cast and (is_both(np.floating) or is_both(np.integer)))


def _extra_leaves(wanted: Wanted, saved: Mapping, under=lambda _: True) -> list[str]:
    known = {there for _, there, _ in wanted}
    return [f"{show('state', path)}: saved {leaf}, expected nothing" for path, leaf in saved.items()
            if path not in known and under(path)]  # fmt: skip


def _fact_differences(saved: Mapping, mine: Mapping, path: Keys) -> Iterator[str]:
    for name in ("rule", "trained", "precision", "averages"):
        if saved[name] != mine[name]:
            absent = "everything" if name == "trained" else "none"
            a, b = (_brief(x[name], absent) for x in (saved, mine))
            yield f"{name} of {show('state', path)}: saved {a}, expected {b}"


def _brief(x, absent: str) -> str:
    if isinstance(x, list):
        return trees.listed([str(name) for name in x], 6)
    return absent if x is None else str(x) if len(str(x)) <= 200 else f"{str(x)[:180]}…"
