"""The part of a run in which its processes agree, at each boundary."""

from typing import Any

from tsunax.run.part import Part


class Agreed(Part):
    """At each boundary all processes agree whether the run stops, and on the state."""

    def __init__(self, agreement: Any) -> None:
        self.agreement = agreement

    def due(self, run: Any, events: Any) -> bool:
        return True

    def at(self, run: Any, events: list[str]) -> None:
        report = run.stopped, run.state, run.is_changed
        run.stopped = self.agreement.boundary(f"step {run.step}", *report)
