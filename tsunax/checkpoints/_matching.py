"""Where saved leaves go: comparing a checkpoint with the tree of a script, and filling the tree.

It gets manifests and host arrays, and opens no file.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tsunax._core import dataflow, patterns, placement, processes, trees
from tsunax._state import averages_of
from tsunax.checkpoints import _blocks, checksums, leaves, merging, state_facts
from tsunax.checkpoints.leaves import Damaged, Keys, Leaf, Tree, show
from tsunax.checkpoints.manifest import Manifest
from tsunax.errors import CheckpointError, StateError
from tsunax.rules import number_table
from tsunax.state import TrainState, master_params
from tsunax.states import over_members

SavedLeaves = Mapping[Keys, Leaf]
Targets = list[tuple[Keys, Keys, Any]]  # (path, path of the saved leaf, leaf to fill)


@dataclasses.dataclass(frozen=True)
class RestoreRequest:
    like: Any
    partial: Any = None
    cast: bool = False
    params_only: bool = False

    @property
    def skips_optimizer(self) -> bool:
        return self.params_only or self.partial is not None

    def plan(self, manifest: Manifest, folder: Path) -> "RestorePlan":
        """The plan for a manifest. Raises CheckpointError with ten differences, both sides."""
        saved = {leaf.path: leaf for leaf in manifest.leaves}
        make_plan = self._plan_of_params if self.skips_optimizer else self._plan_of_all
        plan = make_plan(leaves.tree_of(self.like), manifest, saved)
        refuse(
            f"checkpoint of another state at {folder}",
            plan.differences,
            fix="Restore with the setup that saved it, or give another run another path; params "
            "alone: params_only=True or partial='pattern'; other dtypes: cast=True.",
        )
        return plan

    def _plan_of_all(self, tree: Tree, manifest: Manifest, saved: SavedLeaves) -> "RestorePlan":
        def layout(path, s: TrainState) -> TrainState:
            facts, is_frozen = manifest.states.get(path), (*path, ".frozen") in saved
            return s if facts is None else merging.laid_out(s, facts, is_frozen)

        like, script_states = map_states(self.like, tree, layout), tree.states
        tree = leaves.tree_of(like)
        merges: dict[Keys, merging.Merge] = {}
        differences: list[str] = []
        numbers_at_start = merging.script_numbers_in(manifest)
        edits_without_flags: list[str] = []
        for path, s in tree.states.items():
            if (saved_facts := manifest.states.get(path)) is None:
                differences.append(f"{show('state', path)}: saved no TrainState, expected one")
                continue
            at_start = numbers_at_start.get(path)
            merges |= merging.merges_of(s, path, saved_facts, at_start)
            differences += _fact_differences(saved_facts, state_facts.facts_of(s), path)
            if edit := merging.edit_of_frozen(script_states[path], at_start):
                merges[(*path, ".frozen")] = functools.partial(merging.merged_flags, *edit)
                if (*path, ".frozen") not in saved:
                    note, _ = edit
                    edits_without_flags.append(note)
        # nothing was frozen where the flags were not saved
        absent = {(*path, ".frozen") for path in tree.states} - saved.keys()
        targets = [(path, path, x) for path, x in tree.leaves if path not in absent]
        tables = {merging.table_path(path) for path in tree.states}
        leaf_differences, pairs = _compared(targets, saved, self.cast, tables)
        differences += leaf_differences + _extra_leaves(targets, saved)
        return RestorePlan(like, tree, pairs, differences, merges, edited=edits_without_flags)

    def _plan_of_params(self, tree: Tree, manifest: Manifest, saved: SavedLeaves) -> "RestorePlan":
        """Params and model state of each TrainState; a bare tree takes params of a saved state."""
        fields = (".params",) if self.partial is not None else (".params", ".model_state")
        roots: dict = {(*path, field): (*path, field) for path in tree.states for field in fields}
        if not tree.states:
            roots = {(): ()}
            if len(manifest.states) == 1:
                (state_path,) = manifest.states
                roots = {(): (*state_path, ".params")}
        targets = [
            (path, saved_root + path[len(root) :], x)
            for path, x in tree.leaves
            for root, saved_root in roots.items()
            if path[: len(root)] == root
        ]
        extra = []
        if self.partial is None:
            is_under_root = lambda path: any(path[: len(top)] == top for top in roots.values())
            extra = _extra_leaves(targets, saved, is_under_root)
        else:
            params = [s.params for s in tree.states.values()] or [self.like]
            call = "restore(partial=)"
            flags = [flag for tree in params for flag in patterns.select(self.partial, tree, call)]
            targets = [target for target, flag in zip(targets, flags, strict=True) if flag]
        # the master copies of restored params, which hold more digits
        leaf_at = {path: x for path, x in tree.leaves if path in saved}
        is_param = lambda top, path: path[: len(top) + 1] == (*top, ".params")
        masters = [(*top, ".masters", *path[len(top) + 1 :]) for top in tree.states
                   for path, _, _ in targets if is_param(top, path)]  # fmt: skip
        targets += [(path, path, leaf_at[path]) for path in masters if path in leaf_at]
        differences, pairs = _compared(targets, saved, self.cast)
        restarts = bool(tree.states)
        return RestorePlan(self.like, tree, pairs, differences + extra, restarts=restarts)


def plan_of_clocks(manifest: Manifest, folder: Path) -> "RestorePlan":
    """The plan to restore nothing but the counts of the saved training states."""
    clocks = {(*path, ".clock") for path in manifest.states}
    saved = [leaf for leaf in manifest.leaves if leaf.path in clocks]
    like = [np.zeros(leaf.shape, leaves.dtype_of(leaf.dtype)) for leaf in saved]
    tree = leaves.tree_of(like)
    pairs = [Pair(path, x, leaf) for (path, x), leaf in zip(tree.leaves, saved, strict=True)]
    return RestorePlan(like, tree, pairs, [])


def refuse(head: str, differences: list[str], fix: str) -> None:
    if differences:
        lines = trees.listed([f"{x:.500}" for x in differences], 10, "\n  ")
        raise CheckpointError(f"{head}:\n  {lines}\n  {fix}")


def map_states(like, tree: Tree, f: Callable[[tuple, TrainState], Any]):
    """`f(path, state)` on every TrainState of `like`, which `tree` describes."""
    is_state = lambda x: isinstance(x, TrainState)
    paths = iter(tree.states)
    return jax.tree.map(lambda x: f(next(paths), x) if is_state(x) else x, like, is_leaf=is_state)


@dataclasses.dataclass(frozen=True)
class Pair:
    """A leaf to fill, and the saved leaf that fills it."""

    path: Keys
    leaf: Any
    saved: Leaf


@dataclasses.dataclass(frozen=True)
class RestorePlan:
    """The leaves to fill, differences that forbid it, and the numbers that are merged."""

    like: Any
    tree: Tree
    pairs: list[Pair]
    differences: list[str]
    merges: Mapping[Keys, merging.Merge] = dataclasses.field(default_factory=dict)
    restarts: bool = False  # whether optimizers start anew, at the restored params
    edited: list[str] = dataclasses.field(default_factory=list)

    def parts(self, pair: Pair) -> dict[int, tuple[checksums.Bounds, ...]] | None:
        """The parts of a saved leaf that each process needs; None if each reads all of it."""
        sharding = getattr(pair.leaf, "sharding", None)
        is_local = sharding is None or sharding.is_fully_addressable
        if is_local or pair.path in self.merges or pair.saved.kind != "array":
            return None
        holders = _blocks.holders_of(sharding, pair.saved.shape)
        parts: dict[int, tuple[checksums.Bounds, ...]] = {}
        for bounds, indices in holders.items():
            for i in indices:
                parts[i] = (*parts.get(i, ()), bounds)
        # Sums of hashes need processes that read the same parts, or none in common. If no part is
        # in two of these sets, they have as many parts as the leaf.
        distinct = set(parts.values())
        are_disjoint = len(distinct) > 1 and sum(map(len, distinct)) == len(holders)
        return parts if are_disjoint else None

    def needed(self, pair: Pair) -> tuple[checksums.Bounds, ...] | None:
        """The parts of a saved leaf that this process needs; None for all of it."""
        return (self.parts(pair) or {}).get(processes.current().index)

    def word(self, sums: Mapping[str, int]) -> str:
        """The hashes of the parts that this process read, 16 digits each, for other processes."""
        names = [pair.saved.name for pair in self.pairs if self.parts(pair)]
        return "".join(f"{sums.get(name, 0):016x}" for name in names)

    def check(self, words: list[str]) -> None:
        """Verify the leaves that no process has read whole, by the `word` of each; or Damaged."""
        spread_pairs = [(pair, parts) for pair in self.pairs if (parts := self.parts(pair))]
        for k, (pair, parts) in enumerate(spread_pairs):
            hash_of = {i: int(words[i][16 * k : 16 * k + 16], 16) for i in parts}
            hash_of_parts = {parts[i]: x for i, x in hash_of.items()}
            replicas_agree = all(hash_of_parts[parts[i]] == x for i, x in hash_of.items())
            total = sum(hash_of_parts.values()) % checksums.MODULUS
            if not replicas_agree or total != pair.saved.hash:
                raise Damaged(_blocks.other_bytes(pair.saved))

    def filled(self, values: list):
        """The target with these verified values."""
        pairs = zip(self.pairs, values, strict=True)
        new_leaves = {pair.path: self._placed(pair, value) for pair, value in pairs}
        treedef = jax.tree.structure(self.like)
        restored = treedef.unflatten([new_leaves.get(path, x) for path, x in self.tree.leaves])
        if not self.restarts:
            return restored
        states = leaves.tree_of(restored).states
        fields = "params", "model_state", "masters"
        parts = {path: {name: getattr(s, name) for name in fields} for path, s in states.items()}
        return map_states(self.like, self.tree, lambda path, s: restarted(s, **parts[path]))

    def placing(self) -> Callable[[int, Any], Any]:
        """A function for threads that begins the copy of value `i` to its device.

        Numbers that may be edited, and arrays that other processes share, wait for `filled`.
        """
        device = jax.config.jax_default_device  # type: ignore[attr-defined]

        def place(i: int, value: Any) -> Any:
            pair = self.pairs[i] if i < len(self.pairs) else None
            if pair is None or pair.path in self.merges:
                return value
            like, is_array = pair.leaf, pair.saved.kind == "array"
            is_early = is_array and isinstance(like, jax.Array) and like.is_fully_addressable
            if not is_early:
                return value
            # A thread is not in the user's context of 64 bits (jax.enable_x64), so it could not
            # make such an array. The user's device is passed on.
            needs_x64 = jax.dtypes.canonicalize_dtype(like.dtype) != like.dtype
            if needs_x64:
                return value
            with jax.default_device(device):
                return placed(value, like, pair.saved.kind)

        return place

    def _placed(self, pair: Pair, value):
        if (merge := self.merges.get(pair.path)) is not None:
            value = np.asarray(value)
            if isinstance(pair.leaf, (jax.Array, np.ndarray)):
                value, notes = merge(value, np.asarray(pair.leaf))
                self.edited.extend(notes.values())
        return placed(value, pair.leaf, pair.saved.kind)


def restarted(state: TrainState, *, masters=None, **parts) -> TrainState:
    """The state at restored params, where its averages begin. Raises StateError for shapes."""
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(state)):
        raise StateError(
            "like",
            "restore()",
            got="a state of shapes, for params alone",
            expected="arrays",
            fix="Restore into state.params, then ts.shard(lambda: ts.setup(rule, params), mesh).",
        )
    masters = state.masters if masters is None else masters
    old, state = state, dataclasses.replace(state, masters=masters).replace(**parts)
    state = _with_new_copies(old, state)
    new_averages = {
        name: jax.tree.map(placement.moved_to, x.starting_at(master_params(state)), x)
        for name, x in averages_of(state).items()
    }
    return dataclasses.replace(state, **new_averages)


def _copies_of_params(state: TrainState) -> Any:
    """A new state of the rule, with None for leaves that do not depend on the params."""
    init, params = state.plan.init, trees.on_device(master_params(state))
    leaves, treedef = jax.tree.flatten(init(params))
    flags = dataflow.dependent_results(init, params)
    return treedef.unflatten(x if flag else None for x, flag in zip(leaves, flags, strict=True))


def _with_new_copies(old: TrainState, new: TrainState) -> TrainState:
    """`new` with its params where its rule still has copies of the old ones.

    From the copies of schedule-free rules, the next step would make the old params again.
    """
    copies_in = jax.jit(functools.partial(over_members, _copies_of_params))  # makes no moments
    try:
        old_copies, new_copies = copies_in(old), copies_in(new)
    except jax.errors.JAXTypeError:  # the init of a user's rule may need concrete params
        return new
    if not jax.tree.leaves(new_copies):
        return new

    def updated(x, old_copy, new_copy):
        if number_table.is_live(x):
            inner = map_copies(x.inner, old_copy.inner, new_copy.inner)
            return dataclasses.replace(x, inner=inner)
        if new_copy is None:
            return x
        on_device = trees.on_device(x)  # by `zero1` spread over more devices than its parameter
        stays, new_copy = (
            placement.moved_to(y, on_device) for y in (old_copy == new_copy, new_copy)
        )
        return placement.moved_to(jnp.where(stays, on_device, new_copy).astype(x.dtype), x)

    map_copies = functools.partial(jax.tree.map, updated, is_leaf=number_table.is_live)
    with_numbers = number_table.join_numbers(new.opt_state, new.numbers)
    opt_state = map_copies(with_numbers, old_copies, new_copies)
    return dataclasses.replace(new, opt_state=number_table.without_numbers(opt_state))


def placed(value, like, kind: str):
    """A verified host value, or the `Pieces` that are needed of it, at its place in `like`."""
    if not hasattr(like, "dtype") or isinstance(value, jax.Array):
        return value
    generator = leaves.generator_of(kind)
    value = value if generator else leaves.in_dtype(value, like.dtype, "restore()")
    if isinstance(like, (np.ndarray, np.generic)):
        return value[()] if isinstance(like, np.generic) else value
    sharding = like.sharding
    as_key = lambda x: leaves.wrap_key(x, generator) if generator else x
    if sharding is not None and not sharding.is_fully_addressable:
        # each process makes its part, without a wait
        return as_key(jax.make_array_from_callback(value.shape, sharding, value.__getitem__))
    is_uncommitted = isinstance(like, jax.Array) and not like.committed
    return jax.device_put(as_key(value), None if is_uncommitted else sharding)


def _compared(
    targets: Targets, saved: SavedLeaves, cast: bool, tables: Collection[Keys] = ()
) -> tuple[list[str], list[Pair]]:
    """(both sides of each difference, pairs) of the leaves to fill and the saved leaves.

    The tables of live numbers at the paths `tables` may have any shape: their names are compared.
    """
    differences, pairs = [], []
    for path, saved_path, x in targets:
        leaf, saved_leaf = leaves.leaf_of(path, x), saved.get(saved_path)
        if saved_leaf is None:
            differences.append(f"{show('state', path)}: nothing saved, expected {leaf}")
        elif path in tables or fits(leaf, saved_leaf, cast):
            pairs.append(Pair(path, x, saved_leaf))
        else:
            differences.append(f"{show('state', path)}: saved {saved_leaf}, expected {leaf}")
    return differences, pairs


def fits(leaf: Leaf, saved: Leaf, cast: bool) -> bool:
    """Whether a saved leaf can be restored into a leaf, in the sharding of the latter."""
    if (leaf.kind, leaf.shape) != (saved.kind, saved.shape):
        return False
    dtypes = leaf.dtype, saved.dtype
    have_kind = lambda kind: all(name and jnp.issubdtype(np.dtype(name), kind) for name in dtypes)
    return leaf.dtype == saved.dtype or (cast and (have_kind(np.floating) or have_kind(np.integer)))


def _extra_leaves(targets: Targets, saved: SavedLeaves, is_under_root=lambda _: True) -> list[str]:
    paths = {saved_path for _, saved_path, _ in targets}
    return [f"{show('state', path)}: saved {leaf}, expected nothing" for path, leaf in saved.items()
            if path not in paths and is_under_root(path)]  # fmt: skip


def _fact_differences(saved: Mapping, facts: Mapping, path: Keys) -> Iterator[str]:
    brief = lambda x: trees.listed(x if isinstance(x, list) else [str(x)], 6)
    for name in ("rule", "trained", "precision", "averages"):
        if saved[name] != facts[name]:
            sides = f"saved {brief(saved[name]):.200}, expected {brief(facts[name]):.200}"
            yield f"{name} of {show('state', path)}: {sides}"
