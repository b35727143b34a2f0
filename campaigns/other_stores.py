"""Other ways to save, with the face of `Checkpoints`: what the drivers find out about them."""

from pathlib import Path

import jax
import numpy as np
from tsunax.checkpoints.saving import Restored


class Orbax:
    """orbax's `CheckpointManager` as its pages show it: asynchronous, the last two kept, the latest restored."""

    def __init__(self, folder, every: int = 2, **_):
        import orbax.checkpoint as ocp

        self.args, self.every = ocp.args, every
        options = ocp.CheckpointManagerOptions(max_to_keep=2)
        self.manager = ocp.CheckpointManager(Path(folder).absolute(), options=options)

    def due(self, step: int) -> bool:
        return step % self.every == 0

    @staticmethod
    def tree(state, data, losses) -> dict:
        numbers = np.full(64, np.nan, np.float32)
        numbers[: len(losses)] = losses
        return {"state": jax.tree.leaves(state), "data": dict(data or {"n": 0}), "losses": numbers}

    def save(self, state, step=None, data=None, history=None) -> None:
        step = int(state.step) if step is None else step
        losses = np.asarray((history or {"loss": []})["loss"], np.float32)
        self.manager.save(step, args=self.args.StandardSave(self.tree(state, data, losses)))

    def restore(self, like, data=None) -> Restored:
        step = self.manager.latest_step()
        if step is None:
            return Restored(like)
        template = self.tree(like, data or {"epoch": 0, "position": 0}, [])
        found = self.manager.restore(step, args=self.args.StandardRestore(template))
        state = jax.tree.unflatten(jax.tree.structure(like), found["state"])
        losses = found["losses"][np.isfinite(found["losses"])]
        data = {name: int(x) for name, x in found["data"].items()}
        return Restored(state, data, {"loss": losses}, step=step)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.manager.wait_until_finished()
        self.manager.close()
