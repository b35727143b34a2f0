"""Rewinds: a run goes back to an earlier checkpoint, and trains from there.

run.rewind(back=100)         a request, as `run.stop`; `callbacks.rewind` makes it
Saving, at the boundary      go_back: the checkpoint of the rewind, on the disk before the next
                             call (`checkpoints/rewinds.py` has its durable steps)
the loop ends                the run begins again at that checkpoint, as after a kill
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import jax
import numpy as np

from tsunax._core import PyTree, checks, trees
from tsunax.checkpoints import leaves, rewinds
from tsunax.checkpoints.edits import (
    Departure,
    dump_edits,
    edit_of,
    edits_of_line,
    parse_edits,
    placed,
    plain_place,
)  # fmt: skip
from tsunax.checkpoints.saving import Restored
from tsunax.errors import HyperparameterError, RowError, StateError, WrongTypeError, warn
from tsunax.hyper import adjust, hyperparams
from tsunax.run.history import History
from tsunax.run.info_columns import counts_of, most_calls
from tsunax.state import Clocked
from tsunax.states import refuse_population, training_states

# The rows that a loss is compared with. With more, a loss that falls fast hides its spikes; with
# fewer, noise makes some.
WINDOW = 20
LEAST_ROWS = 5
# A spike is this many median deviations above the median: 8 are 5 standard deviations of a normal
# distribution, once in millions of rows.
SPIKE_DEVIATIONS = 8.0


@dataclass(frozen=True)
class Rewind:
    """A request to go back."""

    back: int
    factor: float
    data: str

    def __post_init__(self) -> None:
        checks.check_count(self.back, "run.rewind()", "back")
        if not (checks.is_real(self.factor) and 0 < self.factor < math.inf):
            raise HyperparameterError("factor", "run.rewind()", self.factor, "a number > 0")
        checks.check_choice(self.data, "run.rewind()", "data", ("skip", "repeat"))

    def check_run(self, run: Any) -> None:
        """Raise unless this run can go back once it has an earlier checkpoint. See `Run.rewind`."""
        check_has_steps(run.state, "run.rewind()")
        rewinds.check_can_rewind(run.saver)
        slowed(run.state, self.factor)

    def check(self, run: Any) -> None:
        """Raise unless this run can go back now."""
        self.check_run(run)
        rewinds.check_has_earlier_step(run.saver, run.step)


def check_has_steps(state: Any, where: str) -> None:
    """Raise StateError for a state without a clock, and for a population, which counts calls."""
    if not isinstance(state, Clocked):
        raise StateError("state", where, trees.describe(state), "a TrainState or States")
    refuse_population(state, where, "Its steps are its calls.")


def slowed(state: Any, factor: float) -> Any:
    """The state with `factor` times its learning rates. HyperparameterError if it has none."""
    if factor == 1:
        return state
    numbers = hyperparams(state)
    names = [name for name in numbers if name.partition("@")[0].endswith("learning_rate")]
    if not names:
        raise HyperparameterError(
            "rule",
            "run.rewind()",
            got=f"{', '.join(numbers) or 'no live numbers'}",
            expected="a live learning rate",
            fix="Or give factor=1.",
        )
    return adjust(state, **{name: numbers[name] * factor for name in names})


def with_calls_of(state: PyTree, counted_state: PyTree) -> PyTree:
    """`state`, with the counts of calls of `counted_state` in its clocks."""
    clocks = {}
    for old, counted in zip(
        leaves.tree_of(state).clocks, leaves.tree_of(counted_state).clocks, strict=True
    ):
        counts = np.array(old)
        counts[..., 1] = np.asarray(counted)[..., 1]  # the element of calls
        clocks[id(old)] = placed(counts, old)
    # Clocks are leaves of the state, and the same objects.
    return jax.tree.map(lambda x: clocks.get(id(x), x), state)


def go_back(saving: Any, run: Any) -> Restored:
    """Save the checkpoint of a rewind, wait until it is on the disk, and return it.

    `saving` is the part that saves the run.
    """
    request, saver, calls = run.rewinding, saving.saver, most_calls(run.state)
    restored = rewinds.newest_before(saver, run.step, request.back, saving.like)
    step: Any = restored.step
    saved_script = restored.script if isinstance(restored.script, dict) else {}
    state = slowed(with_calls_of(restored.state, run.state), request.factor)
    place = run.feed.place()
    if request.data == "repeat":
        place = restored.data
        run.feed.restore(place, saving.options.fast_forward)
    rate = "" if request.factor == 1 else f", learning rate × {request.factor:g}"
    text = f"from step {run.step}{rate}, data {request.data}"
    edit = edit_of(restored.state, state, step, most_calls(restored.state), f"rewind {text}")
    assert edit is not None  # the counts of calls differ
    recorded_place = plain_place(place)
    edit_count = len(edits_of_line(parse_edits(saved_script.get("edits"))))
    edit = dataclasses.replace(
        edit, departure=Departure(run.step, calls, edit_count, recorded_place)
    )
    # Numbers that the script has edited since that checkpoint are in `restored.state` already.
    is_exact = not restored.is_edited and edit.is_exact(restored.state, state, saving.like)
    if recorded_place is None or not is_exact:
        edit = dataclasses.replace(edit, values=None)
    history = History() if restored.history is None else History.of(restored.history)
    history.mark("rewind", step, text)
    history.time = dict(run.history.time)
    # Facts for a checkpoint that saved none; then facts of the checkpoint; then of this run.
    script = {"is_fresh": False, "is_looped": True, "has_open_row": False, **saved_script}
    script |= saving.script | {
        "has_ended": False,
        "edits": dump_edits([*saving.edits, edit]),
        "untold_changes": saving.untold_changes,
        "is_script_edited": saving.script["is_script_edited"] or restored.is_edited,
    }
    script.pop("stop", None)
    memory = memory_after(saving, restored)
    plain_history, metrics = history.plain(), saver.metrics().get(step, {})
    saver._save(
        state,
        step=step,
        data=place,
        history=plain_history,
        callbacks=memory,
        metrics=metrics,
        script=script,
        calls=calls,
    )
    saver.wait()
    run.note(f"rewind to step {step}, {text}")
    new = {"state": state, "data": None, "history": plain_history, "callbacks": memory}
    return dataclasses.replace(restored, **new, script=script, is_edited=False)


def memory_after(saving: Any, restored: Restored) -> dict[str, Any]:
    """The memory of callbacks in the checkpoint, with the current values that outlive rewinds.

    A `rewind` waits for a call that is rejected after this checkpoint.
    """
    memory = {name: {**x} for name, x in (restored.callbacks or {}).items()}
    options, rejected = saving.options, int(counts_of(restored.state)[2])
    for name, callback in zip(options.names, (*options.callbacks, *options.parts), strict=True):
        current = saving.memory.get(name, {})
        for key in _lasting_keys(callback):
            if key in current:
                memory.setdefault(name, {})[key] = current[key]
        if any(isinstance(f, rewind) for f in _wrapped(callback)):
            memory.setdefault(name, {})["rejected"] = rejected
    return memory


def _lasting_keys(callback: Any) -> Iterable[str]:
    """The keys of its memory that a rewind does not restore, also of a function that it wraps."""
    keys: list[str] = []
    for f in _wrapped(callback):
        keys += getattr(f, "outlives_rewinds", ())
    return keys


def _wrapped(callback: Any) -> list[Any]:
    """The callback, its `fn` if it is a wrapper, and so on down to a function without an `fn`."""
    functions = []
    while callback is not None and not any(callback is f for f in functions):
        functions.append(callback)
        callback = getattr(callback, "fn", None)
    return functions


@dataclass(frozen=True)
class rewind:
    """Go back to an earlier checkpoint when something goes wrong, at most `at_most` times.

    `when` is "spike": a loss in a row that is not finite, or far above the last twenty rows (eight
    median absolute deviations above their median), of `States` the loss of any member;
    "rejected": a call was rejected since the last check; or a function `f(run)`. The condition is
    checked at multiples of `log_every`, after evaluations, and at the end of epochs. For `back`,
    `factor` and `data` see `run.rewind`. The count of rewinds is saved with the run, and no resume
    and no rewind resets it. After `at_most` rewinds there is a warning instead.

    Give `Checkpoints` a number of steps for `every`, and a `keep_last` that reaches back: with
    durations a run that is killed before the rewind may go back to another step.

    Raises as `run.rewind`, at the start except for a missing checkpoint. HyperparameterError for
    another `when`, and for "rejected" with a loss scale, which rejects calls to find the scale.
    RowError for "spike" if the rows have no loss.

    >>> rewind(when="spike", back=500)
    rewind(when='spike', back=500, factor=0.5, data='skip', at_most=3)
    """

    when: str | Callable[[Any], Any] = "spike"
    _: KW_ONLY
    back: int = 100
    factor: float = 0.5
    data: str = "skip"
    at_most: int = 3
    #: It logs no numbers.
    may_log = False
    #: The keys of its memory that a rewind does not restore.
    outlives_rewinds: ClassVar[tuple[str, ...]] = ("rewinds",)

    def __post_init__(self) -> None:
        Rewind(self.back, self.factor, self.data)
        checks.check_count(self.at_most, "rewind()", "at_most")
        if isinstance(self.when, str):
            checks.check_choice(self.when, "rewind()", "when", ("spike", "rejected"))
        elif not callable(self.when):
            raise WrongTypeError(
                "when",
                "rewind()",
                got=trees.describe(self.when),
                expected="'spike', 'rejected' or f(run)",
            )

    def __call__(self, run: Any) -> None:
        check_has_steps(run.state, "rewind()")
        if run.event == "start" and not run.rows.options.dry_run:  # which has no checkpoints
            Rewind(self.back, self.factor, self.data).check_run(run)
        scales = [s.loss_scale for s in training_states(run.state).values()]
        if run.event == "start" and self.when == "rejected" and scales.count(None) < len(scales):
            raise HyperparameterError(
                "when", "rewind()", got="'rejected' with a loss scale", expected="'spike' or f(run)"
            )
        if run.event == "start" and self.when == "rejected":
            run.memory.setdefault("rejected", int(counts_of(run.state)[2]))
        # Several events of a step, such as a row and an epoch, count as one rewind.
        if run.event in ("start", "end") or run.rewinding is not None or not self._is_due(run):
            return
        count = run.memory.get("rewinds", 0) + 1
        run.memory["rewinds"] = count
        if count <= self.at_most:
            run.rewind(self.back, self.factor, self.data)
        elif count == self.at_most + 1:
            warn(f"rewind(): after {self.at_most} rewinds the run goes on from step {run.step}.")

    def _is_due(self, run: Any) -> bool:
        if not isinstance(self.when, str):
            return bool(self.when(run))
        if self.when == "rejected":
            count = int(counts_of(run.state)[2])
            old_count = run.memory.get("rejected")
            if old_count is None:
                # Inside `every` there was no "start": the count before the calls that have marks.
                marks = [name for _, name, _ in run.history.marks].count("rejected")
                old_count = max(count - marks, 0)  # an older history may have more marks
            run.memory["rejected"] = count
            return count > old_count
        newest = run.history.newest("epoch")  # each row of training has it
        if newest is None or newest[0] != run.step or run.memory.get("seen") == run.step:
            return False
        run.memory["seen"] = run.step
        loss_names = dict.fromkeys(f"{prefix}loss" for prefix in ("", *training_states(run.state)))
        series = [run.history.series(name) for name in loss_names if name in run.history]
        if not series:
            expected = " or ".join(map(repr, loss_names))
            raise RowError("row", "rewind()", trees.listed(run.history.names, 8), expected)
        return any(is_spike(losses) for steps, losses in series if steps[-1] == run.step)


def is_spike(losses: np.ndarray) -> bool:
    """Whether the last of these losses is not finite, or far above the losses before."""
    earlier, loss = losses[-WINDOW - 1 : -1], losses[-1]
    earlier = earlier[np.isfinite(earlier)]
    if not np.isfinite(loss):
        return True
    if len(earlier) < LEAST_ROWS:
        return False
    median = np.median(earlier)
    deviation = np.median(np.abs(earlier - median))
    return bool(loss > median + SPIKE_DEVIATIONS * max(deviation, 0.01 * abs(median)))
