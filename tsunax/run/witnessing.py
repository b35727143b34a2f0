"""Functions that see a single call of a run: its states, its batch, and how to make it again."""

from collections.abc import Callable
from dataclasses import dataclass

import jax

from tsunax._core import Extra, PyTree
from tsunax.run.chunks import Chunk
from tsunax.run.fused_loop import Fused
from tsunax.run.run import Run
from tsunax.state import own


@dataclass(frozen=True)
class WitnessedCall:
    """One call of a run, with the states before and after. `old_state` is a copy for witnesses."""

    old_state: PyTree
    new_state: PyTree
    batch: PyTree
    repeat: Callable[[], PyTree]  # makes the call once more, and returns its state


def call_witnesses(run: Run, loop: Fused, state: PyTree, chunk: Chunk, extra: Extra) -> None:
    """Call the witnesses of a call from `state`, after the info of the call was read."""

    def repeat() -> PyTree:
        copied_state = jax.tree.map(own, state)
        if chunk.n is None:
            return loop.call_step(copied_state, chunk.feed.batch, extra)[0]
        return loop(copied_state, chunk.feed, chunk.n, extra)[0]

    call = WitnessedCall(state, run.state, chunk.feed.batch_at(0), repeat)
    witnesses, run.witnesses = run.witnesses, []
    for witness in witnesses:
        witness(run, call)
