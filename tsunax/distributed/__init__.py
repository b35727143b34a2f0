"""Processes: starting them together, who this one is, and comparing what they hold.

It needs no device. `tsunax.distributed.ray` starts processes under Ray.
"""

from tsunax.distributed.processes import (
    barrier,
    broadcast,
    check_in_sync,
    is_main,
    process_count,
    process_index,
    start,
    stop,
)

__all__ = [
    "barrier",
    "broadcast",
    "check_in_sync",
    "is_main",
    "process_count",
    "process_index",
    "start",
    "stop",
]
