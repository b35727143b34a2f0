"""Which one goes on: the newest checkpoint, or the state that `fit` was given.

A state that was never called, or as often as the one that the run began with, takes the checkpoint.
Of any other the calls decide; of equal ones the state in hand goes on.
"""

from __future__ import annotations

import dataclasses
import json

import numpy as np

from tsunax._core import trees
from tsunax.checkpoints import _host_copies, _reading, _restoring, checksums, leaves
from tsunax.errors import StateError, warn
from tsunax.state import TrainState

__all__ = []

_SHOWN = 4


def calls_of(tree) -> int:
    """The calls of all training states in a tree; 0 if this process cannot read them."""
    clocks = [s.clock for s in leaves.tree_of(tree).states.values()]
    known = all(getattr(x, "is_fully_replicated", True) or x.is_fully_addressable for x in clocks)
    return int(sum(np.sum(np.asarray(x)[..., 1]) for x in clocks)) if known else 0


def later(run, at: int, state, calls: int) -> _reading.Restored:
    """The checkpoint of step `at`, or the state in hand with the checkpoint's other parts."""
    there = _reading.read(run, at, _restoring.Clocks())
    saved = int(sum(np.sum(clock[..., 1]) for clock in there.state))
    began = there.script.get("calls") if isinstance(there.script, dict) else 0
    steps = _host_copies.step_of(leaves.tree_of(state), None)
    here = f"fit(): the state given is at step {steps}"
    newest = f"the newest checkpoint in {run.path}"
    if calls < saved or calls == began != saved:
        if calls != began:
            text = f"{here}, {newest} at step {at}: the checkpoint's goes on"
            warn(f"{text}. For the state given, give another path.")
        return _reading.read(run, at, _restoring.How(state, None, False, False))
    got = f"step {steps} after {calls} calls"
    if steps < at:
        fix = "Give another path; or a fresh state, which takes the checkpoint."
        expected = f"step {at} or later, as {newest}"
        raise StateError("state", "fit()", got, expected, fix)
    if calls > saved:
        if not isinstance(state, TrainState):
            fix = "A tree of others has no clock of its own: give another path."
            raise StateError("state", "fit()", got, "a TrainState, or a fresh tree", fix)
        text = f"{here}, {newest} at step {at}: the state given goes on"
        warn(f"{text}, from where the data is now.")
        return dataclasses.replace(there, state=state, data=None)
    if differ := _differences(run, at, state):
        text = f"{here}, as {newest}, and differs from it: {trees.listed(differ, _SHOWN)}"
        warn(f"{text}. The state given goes on.")
    return dataclasses.replace(there, state=state)


def _differences(run, step: int, state) -> list[str]:
    """The leaves of a state whose bits differ from the saved ones, by their hashes.

    No array is copied whole, or read from the disk.
    """
    tree = leaves.tree_of(state)
    mine = [leaves.leaf_of(path, x, name)
            for (path, x), name in zip(tree.leaves, tree.names, strict=True)]  # fmt: skip

    def look():
        hashes: dict[str, int] = {}
        for _, block, bounds, leaf in _host_copies.blocks_of(tree, mine, run.process, copy=False):
            hashes[leaf.name] = hashes.get(leaf.name, 0) + checksums.of(block, bounds, leaf.shape)
        return run.store.manifest(step), json.dumps(hashes)

    manifest, words = run.together(f"restore of step {step}: leaves", look)
    saved, found = {leaf.path: leaf for leaf in manifest.leaves}, []
    everyone = list(map(json.loads, words))
    for leaf in mine:
        total = sum(hashes.get(leaf.name, 0) for hashes in everyone) % checksums.MODULUS
        if saved.get(leaf.path) != dataclasses.replace(leaf, hash=total):
            is_number = leaf.path[-2:] == (".numbers", ".values")
            found.append("hyperparameters" if is_number else leaves.show("state", leaf.path))
    return found
