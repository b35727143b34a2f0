"""Checkpoints: a run on the disk, whole or not there, verified; and files of other libraries
(`exchange`).

It knows states and the place in data. It must not know loops.
"""

from tsunax.checkpoints.saving import Best, Checkpoints, Restored

__all__ = ["Best", "Checkpoints", "Restored"]
