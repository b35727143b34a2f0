"""Rejected steps of a run: counts, warnings, calls kept for `ts.replay`, and the last error."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tsunax import guard
from tsunax._core import PyTree, Step, processes, trees
from tsunax.errors import NonFiniteError, warn
from tsunax.program import TrainStep
from tsunax.run.chunks import NO_LIMIT, Chunk, epochs_of
from tsunax.run.info_columns import counts_of, most_calls, step_infos
from tsunax.run.run import MOST_REJECTED, Rejected, Run
from tsunax.state import TrainState
from tsunax.states import States, members_of, training_states
from tsunax.step import StepInfo


class Rejections:
    """The rejected calls of a run, and the limits for them."""

    def __init__(self, step: Step, state: PyTree, run: Run, max_bad: int) -> None:
        self.step: Step = step
        self.run: Run = run
        self.raises: bool = isinstance(step, TrainStep) and step.reaction.raises  # at any rejection
        self.max_bad: int = 1 if self.raises else max_bad
        self.has_ended_run: bool = False
        counts = np.atleast_2d(counts_of(state))
        self.by_member: np.ndarray = counts[:, 2]  # rejected calls of each member
        self.count: int = int(np.max(self.by_member))  # calls that any member rejected
        self.in_a_row: int = 0
        self.calls: int = most_calls(state)  # `calls` of the state without unread calls
        self.is_population: bool = members_of(state) is not None
        has_scale = any(s.loss_scale is not None for s in training_states(state).values())
        # Rejected steps in a row that end a call; the state may begin with some. Under a loss scale
        # not all of the rejected steps count.
        most_rejected = self.max_bad + int(np.min(counts[:, 3]))
        self.limit: int = NO_LIMIT if has_scale or self.is_population else most_rejected

    def _has_batch(self, info: Any) -> bool:
        """Whether this process has the whole batch of a call with one verdict and one state."""
        is_one_state = isinstance(self.run.state, TrainState) and not self.is_population
        is_alone = processes.current().sees_everything
        return is_alone and is_one_state and isinstance(info, StepInfo)

    def _rejected_parts(self, info: PyTree) -> list[tuple[str, TrainState, StepInfo]]:
        """The rejected parts of a call, (name, state, info), if the infos name their states."""
        if self.is_population:
            return []
        states, infos = training_states(self.run.state), step_infos(info, self.run.state)
        is_rejected = lambda x: not np.ndim(x.verdict) and (x.verdict or 0) > 0
        return [
            (name.removesuffix("/"), states[name], x) for name, x in infos.items() if is_rejected(x)
        ]

    def note(
        self,
        verdicts: np.ndarray,
        steps: np.ndarray,
        chunks: Sequence[Chunk],
        infos: PyTree,
        extra: Mapping[str, Any],
    ) -> int | None:
        """Mark rejected calls, warn of the first, the tenth, ...; return the call beyond limits."""
        run = self.run
        if not np.any(verdicts > 0):
            self.in_a_row = 0
            return None
        from tsunax._step import step_errors  # messages, which only rejected steps need

        for i, by_member in enumerate(verdicts > 0):
            all_rejected = bool(np.all(by_member))
            if not all_rejected:
                self.in_a_row = 0
            if not np.any(by_member):
                continue
            names = trees.listed([str(member) for member in np.flatnonzero(by_member)], 8)
            members = "" if all_rejected else f" for members {names}"
            info = jax.tree.map(lambda x, i=i: x[i], infos)
            parts = self._rejected_parts(info)
            self.count += 1
            run.history.mark("rejected", int(steps[i]), members.removeprefix(" for "))
            searches: Any = [step_errors.is_searching(s, x, x.verdict) for _, s, x in parts]
            if self.is_population and isinstance(info, StepInfo):
                # Members that applied the step do not count here.
                searches = step_errors.is_searching(run.state, info, info.verdict) | ~by_member
            if len(searches) and all(searches):
                continue  # rejected to find a loss scale
            self.in_a_row += self.raises or all_rejected
            raises = self.max_bad == 1 and (self.raises or all_rejected)
            if self.count in (1, 10, 100, 1000, 10_000, 100_000) and not raises:
                reason, loss = _reason(parts) or "a loss, gradient or update is not finite", ""
                if len(parts) == 1 and (x := parts[0][2].loss) is not None:
                    loss = f" (loss {float(x):.6g})"
                place = f"step {int(steps[i])} of epoch {epochs_of(chunks)[i]}"
                text = f"{place} was rejected{loss}{members}: {reason}"
                if isinstance(self.step, TrainStep) and self._has_batch(infos):
                    _, state, info_of_state = parts[0]
                    batch, _ = _batch_of(i, chunks)
                    call = step_errors.RejectedCall(self.step, state, info_of_state, batch, extra)
                    text += call.about_batch()
                is_whole = isinstance(run.state, TrainState) and all_rejected
                unchanged = "the state" if is_whole else "what was rejected"
                run.tell("rejected", text)
                warn(f"{text}. {self.count} so far; {unchanged} is as it was.", RuntimeWarning)
            if self.in_a_row >= self.max_bad:
                return i
        return None

    def keep(
        self, verdicts: np.ndarray, steps: np.ndarray, chunks: Sequence[Chunk], infos: PyTree
    ) -> None:
        """Keep the last rejected calls, for `replay`: each costs a transfer of its batch."""
        state, calls_before = self.run.state, self.calls
        self.calls += len(verdicts)
        if not self._has_batch(infos) or not np.any(verdicts > 0):
            return
        from tsunax._step import step_errors

        for i in map(int, np.flatnonzero(verdicts > 0)[-MOST_REJECTED:]):
            info = jax.tree.map(lambda x, i=i: x[i], infos)
            if not step_errors.is_searching(state, info, verdicts[i]):
                batch, epoch = _batch_of(i, chunks)
                rejected_call = Rejected(
                    int(steps[i]), calls_before + i, epoch, batch, info.loss_scale
                )
                self.run.rejected.append(rejected_call)

    def give_up(self, i: int, chunks: Sequence[Chunk], extra: Mapping[str, Any]) -> None:
        """Raise NonFiniteError for call i, one rejected call too many, with the reason."""
        run, self.has_ended_run = self.run, True
        assert run.info is not None
        last = f"the last of {self.max_bad} in a row, " if self.max_bad > 1 else ""
        limit = "on_nonfinite='raise'" if self.raises else f"{last}max_bad={self.max_bad}"
        reason, hint = _reason(self._rejected_parts(run.info)) or "not finite", ""
        if self.is_population and isinstance(run.info, StepInfo):
            members = np.flatnonzero(run.info.verdict > 0)
            reason = guard.explain(int(run.info.verdict[members[0]]), run.state.opt_state)
            reason += f", members {trees.listed(list(map(str, members)), 8)}"
        later_calls = most_calls(run.state) - self.calls  # a call of the loop has many steps
        if isinstance(self.step, TrainStep) and self._has_batch(run.info):
            from tsunax._step import step_errors

            batch, _ = _batch_of(i, chunks)
            call = step_errors.RejectedCall(self.step, run.state, run.info, batch, extra)
            reason = call.reason()
            state = "error.state, exact=False" if later_calls else "error.state"
            hint = f" Next: ts.replay(step, *error.rejected[-1].of({state}))."
        summary = f"step {run.step} of epoch {epochs_of(chunks)[i]} was rejected: {reason}; {limit}"
        # another member may have applied its update
        when = "after" if isinstance(run.state, States) or self.is_population else "before"
        when = f"{later_calls} calls after" if later_calls else when
        text = f"{summary}. `error.state` is the state {when} it.{hint}"
        raise NonFiniteError(text, run.state, run.info)


def _reason(parts: list[tuple[str, TrainState, StepInfo]]) -> str:
    reasons = (
        f"{name}{name and ': '}{guard.explain(int(x.verdict), s.opt_state)}" for name, s, x in parts
    )
    return "; ".join(reasons)


def _batch_of(i: int, chunks) -> tuple[Any, int]:
    """The batch of call i of these chunks, on the host, and its epoch."""
    stops = np.cumsum([chunk.steps for chunk in chunks])  # the call behind each chunk
    place = int(np.searchsorted(stops, i, side="right"))
    chunk = chunks[place]
    i -= int(stops[place]) - chunk.steps  # from here on within the chunk
    with jax.transfer_guard("allow"), jax.debug_nans(False):  # once for a rejected call
        batch, mask = jax.device_get((chunk.feed.batch_at(i), getattr(chunk.feed, "mask", None)))
    if mask is not None and (rows := int(np.sum(mask))):
        batch = jax.tree.map(lambda x: x[:rows] if np.ndim(x) else x, batch)
    return batch, int(np.broadcast_to(chunk.epochs, chunk.steps)[i])
