"""Signals during a run: the first ends it after the current call, a second Ctrl-C at once.

A scheduler sends SIGTERM and SIGINT within milliseconds, and a terminal may repeat a key: a Ctrl-C
is the second one only if it comes a second after the first.
"""

import contextlib
import math
import signal
import sys
import threading
import time
from typing import Self

# Signals within this time count as one. A longer time would delay a real second Ctrl-C.
REPEAT_SECONDS = 1.0


class Interrupt:
    """A context in which the first of these signals is noted in `asked`; main thread only."""

    def __init__(self, *numbers: int) -> None:
        self.asked: int = 0
        self._pressed = math.inf  # the time of the first Ctrl-C
        self._numbers = numbers
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in self._numbers:
                self._previous[number] = signal.signal(number, self._note)
        return self

    def _note(self, number, frame) -> None:
        if number == signal.SIGINT:
            if time.monotonic() - self._pressed > REPEAT_SECONDS:
                raise KeyboardInterrupt
            self._pressed = min(self._pressed, time.monotonic())
        if not self.asked:
            self.asked = number
            outer = getattr(self._previous.get(number), "__self__", None)
            if isinstance(outer, Interrupt):  # a sweep, which ends with this run
                outer.asked = outer.asked or number
            if number == signal.SIGINT:
                text = "\nending after this call; Ctrl-C again stops at once"
                with contextlib.suppress(RuntimeError):  # in the middle of another print
                    print(text, file=sys.stderr, flush=True)

    def __exit__(self, *_: object) -> None:
        while self._previous:
            number, old = self._previous.popitem()
            signal.signal(number, signal.SIG_DFL if old is None else old)  # type: ignore[arg-type]


def in_notebook() -> bool:
    """Whether this is the kernel of a notebook, which lives on after an interrupt."""
    shell = sys.modules.get("IPython")
    running_shell = shell.get_ipython() if shell is not None else None
    return running_shell is not None and hasattr(running_shell, "kernel")
