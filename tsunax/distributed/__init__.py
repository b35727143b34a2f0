"""Processes: their start, the index of this process, and comparisons between processes.

It needs no device. `tsunax.distributed.ray` starts processes under Ray.
"""

from tsunax.distributed.collectives import agree, barrier, broadcast, check_in_sync
from tsunax.distributed.joining import give_up, is_main, process_count, process_index, start, stop

__all__ = [
    "agree", "barrier", "broadcast", "check_in_sync", "give_up", "is_main", "process_count",
    "process_index", "start", "stop",
]  # fmt: skip
