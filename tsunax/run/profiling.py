"""A trace of some calls of a run, with its phases by name, for Perfetto or XProf."""

from __future__ import annotations

import contextlib

import jax

from tsunax._core import durable_files
from tsunax.errors import warn

FIRST, CALLS = 2, 10  # the first call compiles; ten show a rhythm, and more is megabytes


class Profile:
    """Starts with the second call and ends ten calls later; `phase(name)` is a context that the
    trace shows.
    """

    def __init__(self, directory):
        self.directory = (
            None if directory is None else durable_files.local(directory, "profile", "fit()")
        )
        self.calls, self.running = 0, False

    def call(self) -> None:
        """One more call is about to be made."""
        if self.directory is None:
            return
        self.calls += 1
        if self.calls == FIRST:
            jax.profiler.start_trace(self.directory)
            self.running = True
        elif self.calls == FIRST + CALLS:
            self.close()

    def phase(self, name: str):
        return jax.profiler.TraceAnnotation(name) if self.running else _NOTHING

    def close(self) -> None:
        if self.running:
            jax.profiler.stop_trace()
            self.running, self.directory = False, None
        elif self.directory is not None and self.calls:
            warn(f"profile: {self.calls} calls, and the first compiles: nothing was traced")


_NOTHING = contextlib.nullcontext()

__all__ = ["Profile"]
