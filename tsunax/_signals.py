"""Ctrl-C during a run: the first ends it after the step under way, the second at once."""

from __future__ import annotations

import signal
import sys
import threading


class Interrupt:
    """A context in which the first SIGINT is noted in `asked` instead of raised. Only the main thread can do that."""

    def __init__(self):
        self.asked = False
        self._previous = None

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._note)
        return self

    def _note(self, number, frame) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def __exit__(self, *_) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            self._previous = None


def in_notebook() -> bool:
    """Whether a person sits in front of a kernel that lives on after an interrupt."""
    shell = sys.modules.get("IPython")
    found = shell.get_ipython() if shell is not None else None
    return found is not None and hasattr(found, "kernel")


__all__ = ["Interrupt", "in_notebook"]
