"""A new run that begins at a step of another: the same state, place, history and memory."""

from typing import Any

import numpy as np

from tsunax._core import StrPath, Where
from tsunax.checkpoints import leaves
from tsunax.checkpoints.edits import (
    SKIP,
    Departure,
    Edit,
    dump_edits,
    edit_of,
    edits_of_line,
    layout_of,
)
from tsunax.checkpoints.saving import Checkpoints
from tsunax.errors import CheckpointError, StateError
from tsunax.hyper import adjust
from tsunax.run.history import History
from tsunax.run.info_columns import ADJUSTED
from tsunax.timelines.comparing import SavedRun
from tsunax.timelines.replaying import Moment

# Facts of a script that hold for branches, because their replays begin at the same first state.
KEPT_FACTS = ("calls", "states", "first_place", "settings", "is_looped", "is_script_edited")


def branched(
    saved: SavedRun,
    moment: Moment,
    skip: int,
    place: Any,
    into: StrPath,
    where: Where,
    numbers: dict[str, Any],
) -> None:
    """Save the moment of a run as the first checkpoint of the run `into`.

    Its data begin at `place`, which is `skip` batches behind the place of the moment.
    """
    step = moment.step
    memory = _memory(saved, step)
    state = adjust(moment.state, where, **numbers) if numbers else moment.state
    edits = _edits_until(saved, moment)
    if (edit := edit_of(moment.state, state, step, moment.calls, "branch()")) is not None:
        edits.append(edit)
    changes = [f"{name}={x}" for name, x in numbers.items()]
    if skip:
        changes.append(f"{skip} batches left out")
        departure = Departure(step, moment.calls, len(edits_of_line(edits)), {SKIP: skip})
        source, layout = f"branch(), {changes[-1]}", layout_of(leaves.tree_of(state))
        edits.append(Edit(step, moment.calls, source, {}, layout, departure))
    newest_script = {} if saved.newest is None else saved.script(saved.newest)
    changes_before = {
        name: change
        for name, change in newest_script.get("untold_changes", {}).items()
        if change[1] < moment.calls
    }
    # The script may have been edited after the moment, so its facts are of the nearest checkpoint.
    script_step = next((s for s in _neighbors(saved, step) if s is not None), None)
    script = {} if script_step is None else saved.script(script_step)
    facts = {name: script[name] for name in KEPT_FACTS if name in script}
    parent = {"path": str(saved.checkpoints.path), "step": step, "edits": changes}
    facts |= {"parent": parent, "untold_changes": changes_before, "edits": dump_edits(edits)}
    facts |= {"is_fresh": True, "has_ended": False}
    if steps := Checkpoints(into, read_only=True).home.steps():  # without its lock
        raise CheckpointError("into", "branch()", f"steps {steps}", "a directory without steps")
    with Checkpoints(into, keep_last=None) as new:
        history = history_until(saved.history(), step)
        history.mark("branch", step, ", ".join([f"of {saved.checkpoints.path}", *changes]))
        new._save(
            state,
            step=step,
            data=place,
            history=history.plain(),
            callbacks=memory,
            metrics={},
            script=facts,
        )


def _edits_until(saved: SavedRun, moment: Moment) -> list[Edit]:
    """The record of edits of a run up to a moment of its line.

    It keeps the edits of calls that rewinds left, because `line.at(calls=)` reaches these calls.
    """
    record = saved.all_edits(saved.newest)
    line = edits_of_line(record)[: moment.edit_count]
    last_number = (i for i, edit in enumerate(record, 1) if line and edit is line[-1])
    return record[: next(last_number, 0)]


def _neighbors(saved: SavedRun, step: int) -> tuple[int | None, int | None]:
    """The newest readable checkpoint up to a step, and the first readable checkpoint after it."""
    steps = saved.steps
    earlier_step = saved.first_readable(s for s in reversed(steps) if s <= step)
    return earlier_step, saved.first_readable(s for s in steps if s > step)


def _memory(saved: SavedRun, step: int) -> dict[str, Any]:
    """The memory of callbacks at a step. StateError if they have some, and it is not saved."""
    neighbors = _neighbors(saved, step)
    memories = {s: saved.values(s).callbacks or {} for s in neighbors if s is not None}
    if step in memories:
        return memories[step]
    has_memory = lambda memory: any(x for name, x in memory.items() if name != ADJUSTED)
    if any(map(has_memory, memories.values())):
        got, expected = f"step {step}, of which no memory of callbacks is saved", "a saved step"
        fix = f"Saved are {', '.join(map(str, saved.steps))}."
        raise StateError("step", "branch()", got, expected, fix)
    earlier = [memory for s, memory in memories.items() if s < step]
    return earlier[0] if earlier else {}


def history_until(history: History, step: int) -> History:
    """The rows and marks of a history up to a step, without calls that were rejected after it.

    If the run has ended there, `fit` drops the numbers of the end, as for a run that continues.
    """
    plain = history.plain()
    count = int(np.searchsorted(plain["rows"]["step"], step, side="right"))
    columns = [
        [name, rows[rows < count], values[rows < count]]
        for name, rows, values in plain["rows"]["columns"]
        if np.any(rows < count)
    ]
    rows = {"step": plain["rows"]["step"][:count], "columns": columns}
    # A rejected call does not advance the step, so calls rejected after it have the mark of `step`.
    is_in_branch = lambda name, at_step: at_step < step if name == "rejected" else at_step <= step
    marks = [mark for mark in plain["marks"] if is_in_branch(mark[1], mark[0])]
    return History.of({**plain, "rows": rows, "marks": marks})
