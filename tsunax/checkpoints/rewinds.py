"""The checkpoint to which a run goes back, and the checkpoints that it leaves.

A rewind to step 4 after 9 calls has the durable steps below. If the process is killed after the
second, `CheckpointHome.tidy` does the rest when the run is opened again. If it is killed before,
there was no rewind, and the run makes its calls again:

    1. the new state of step 4 is written under a hidden name, with the edit and the place of data
    2. it is renamed to `.tsunax-rewind-4-00000009`: from now on the rewind has happened
    3. the checkpoints from step 4 on are renamed to `left/9/STEP`, the newest first
    4. the state gets the name of its step, `4`
"""

import json
from typing import Any

from tsunax._core import PyTree
from tsunax.checkpoints import _matching, reading
from tsunax.checkpoints._home import LEFT_FOLDER
from tsunax.checkpoints.saving import Checkpoints, Restored
from tsunax.errors import CheckpointError, warn


def check_can_rewind(saver: Any) -> None:
    """Raise CheckpointError unless a run has checkpoints that can be set aside."""
    if saver is None or not saver.home.can_rewind:
        raise CheckpointError(
            "checkpoints",
            "run.rewind()",
            got="none" if saver is None else f"those in {saver.path}",
            expected="fit(checkpoint=) with files on a disk, which can be set aside",
        )


def check_has_earlier_step(saver: Checkpoints, step: int) -> None:
    """Raise CheckpointError unless there is a checkpoint before a step."""
    saver.wait()
    if not any(x < step for x in saver.home.steps()):
        raise CheckpointError(
            "checkpoints",
            "run.rewind()",
            got=f"none before step {step} in {saver.path}",
            expected="an earlier one",
            fix="Checkpoints(every=) saves earlier.",
        )


def newest_before(saver: Checkpoints, step: int, back: int, like: PyTree) -> Restored:
    """The newest good checkpoint `back` steps before `step` or earlier, shaped as `like`.

    If there is none, the oldest that is kept, with a warning. CheckpointError if none is good.
    """

    def look() -> tuple[None, str]:
        saver.wait()
        earlier_steps = [x for x in saver.home.steps() if x < step]
        far_steps = [x for x in earlier_steps if x <= step - back]
        if earlier_steps and not far_steps:
            warn(
                f"run.rewind(): no checkpoint in {saver.path} is {back} steps before step {step}; "
                f"the run goes back to step {earlier_steps[0]}, the oldest. Checkpoints(keep_last=)"
                " keeps more."
            )
        return None, json.dumps(far_steps or earlier_steps[:1])

    steps = json.loads(saver.together("run.rewind()", look)[1][0])
    plan_of = _matching.RestoreRequest(like).plan
    read = lambda checkpoint_step: reading.read(saver, checkpoint_step, plan_of)
    restored, problems = reading.first_good(saver, steps, read, may_be_replaced=False)
    if restored is None:
        raise CheckpointError(
            "checkpoints",
            str(saver.path),
            got="; ".join(problems) or f"none before step {step}",
            expected="a good one",
        )
    return restored


def left_run(saver: Checkpoints, calls: int) -> Checkpoints | None:
    """The checkpoints that a rewind left after `calls` calls; None if they were deleted."""
    folder = saver.path / LEFT_FOLDER / str(calls)
    has_folder = saver.home.can_rewind and folder.is_dir()
    return Checkpoints(folder, read_only=True) if has_folder else None
