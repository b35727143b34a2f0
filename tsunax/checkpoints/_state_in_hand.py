"""Which one goes on: the newest checkpoint, or the state that `fit` was given.

A state that was never called, or as often as the one that the run began with, takes the checkpoint.
Of any other the calls decide; of equal ones the state in hand goes on.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from tsunax.checkpoints import _host_copies, _matching, _reading, leaves
from tsunax.errors import StateError, warn
from tsunax.states import COUNTED

__all__ = []


def total_calls(tree) -> int:
    """The calls of all training states in a tree; 0 if this process cannot read them."""
    clocks = [s.clock for s in leaves.tree_of(tree).states.values()]
    known = all(getattr(x, "is_fully_replicated", True) or x.is_fully_addressable for x in clocks)
    return int(sum(np.sum(np.asarray(x)[..., 1]) for x in clocks)) if known else 0


def later(run, at: int, state, calls: int) -> _reading.Restored:
    """The checkpoint of step `at`, or the state in hand with the checkpoint's other parts."""
    there = _reading.read(run, at, _matching.Clocks())
    saved = int(sum(np.sum(clock[..., 1]) for clock in there.state))
    began = there.script.get("calls") if isinstance(there.script, dict) else 0
    steps = _host_copies.step_to_save(leaves.tree_of(state), None)
    here = f"fit(): the state given is at step {steps}"
    newest = f"the newest checkpoint in {run.path}"
    if calls < saved or calls == began != saved:
        if calls != began:
            text = f"{here}, {newest} at step {at}: the checkpoint's goes on"
            warn(f"{text}. For the state given, give another path.")
        return _reading.read(run, at, _matching.RestoreRequest(state, None, False, False))
    got = f"step {steps} after {calls} calls"
    if steps < at:
        fix = "Give another path; or a fresh state, which takes the checkpoint."
        expected = f"step {at} or later, as {newest}"
        raise StateError("state", "fit()", got, expected, fix)
    if calls > saved:
        if not isinstance(state, COUNTED):
            fix = "A tree of others has no clock of its own: give another path."
            raise StateError("state", "fit()", got, "a TrainState, or a fresh tree", fix)
        text = f"{here}, {newest} at step {at}: the state given goes on"
        warn(f"{text}, from where the data is now.")
        return dataclasses.replace(there, state=state, data=None)
    return dataclasses.replace(there, state=state)
