"""Signals during a run: they end it, or save it, after the current call; a second Ctrl-C at once.

A scheduler sends SIGTERM and SIGINT within milliseconds, and a terminal may repeat a key: a Ctrl-C
is the second one only if it comes a second after the first.
"""

import contextlib
import math
import os
import signal
import sys
import threading
import time
from typing import Any, ClassVar, Self

SIGNALS = ("INT", "TERM", "HUP", "XCPU", "USR1", "USR2")
SAVING = ("USR1", "USR2")  # a run saves after these signals, and ends after the rest
# Signals within this time count as one. A longer time would delay a real second Ctrl-C.
REPEAT_SECONDS = 1.0


class Interrupt:
    """A context in which signals of these names are noted; main thread only.

    A signal that was ignored stays ignored, as under `nohup`. A handler of the user runs, too. A
    run in a callback of another run does not end, because the other run needs its result: it saves
    if it `can_save`, and the other run ends after the callback.
    """

    ends_runs_within: ClassVar[bool] = False

    def __init__(self, *names: str, can_save: bool = True) -> None:
        self.can_save: bool = can_save
        self.asked: int = 0  # the first signal that ends the run
        # ("end", signal) and ("save", signal) until all processes have agreed on it
        self.requests: set[tuple[str, int]] = set()
        self.error: BaseException | None = None  # the exception of a user's handler
        self._pressed = math.inf  # the time of the first Ctrl-C
        # Windows does not have all signals.
        self._numbers = [getattr(signal, f"SIG{x}") for x in names if hasattr(signal, f"SIG{x}")]
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in self._numbers:
                if (previous := signal.getsignal(number)) not in (signal.SIG_IGN, None):
                    self._previous[number] = previous
                    signal.signal(number, self._handle)
        return self

    def note(self, number: int, frame: Any) -> None:
        """Note a signal, after the handler that it had: the user's handler, or an enclosing run's.

        An exception of the user's handler ends the run, which raises it after its save.
        """
        previous = self._previous.get(number)
        is_save = signal.Signals(number).name[3:] in SAVING
        if isinstance(enclosing := getattr(previous, "__self__", None), Interrupt):
            enclosing.note(number, frame)
            is_save = is_save or not enclosing.ends_runs_within
        elif callable(previous) and previous is not signal.default_int_handler:
            try:
                previous(number, frame)
            except BaseException as error:
                self.error = self.error or error
        if is_save and self.error is None:
            self.requests.update([("save", number)] * self.can_save)
        elif not self.asked:
            self.asked = number
            self.requests.add(("end", number))

    def _handle(self, number: int, frame: Any) -> None:
        for stream in (1, 2):
            try:
                os.write(stream, b"")
            except OSError:  # The terminal was closed, and a print before the save would raise.
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
        self.note(number, frame)
        if number == signal.SIGINT:
            if time.monotonic() - self._pressed > REPEAT_SECONDS:
                raise KeyboardInterrupt
            if self._pressed == math.inf:
                with contextlib.suppress(RuntimeError):  # in the middle of another print
                    print(
                        "\nending after this call; Ctrl-C again stops at once",
                        file=sys.stderr,
                        flush=True,
                    )
            self._pressed = min(self._pressed, time.monotonic())

    def __exit__(self, *_: object) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)


def in_notebook() -> bool:
    """Whether this is the kernel of a notebook, which lives on after an interrupt."""
    shell = sys.modules.get("IPython")
    running_shell = shell.get_ipython() if shell is not None else None
    return running_shell is not None and hasattr(running_shell, "kernel")
