"""Progress: what a person sees of a run while it runs.

`Progress` decides when to draw, its view how: two lines that redraw themselves on a terminal, one
that does in a notebook, lines anywhere else. All of it goes to stderr. There is no thread: the loop
calls `show`, which nearly always only looks at the clock.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from tsunax._core import trees
from tsunax.errors import WrongTypeError
from tsunax.run.loggers import short
from tsunax.run.rows import families

_ASIDE = {"epoch", "grad_norm", "update_norm", "loss_scale", "dropped", "rejected"}


@dataclass(frozen=True)
class Facts:
    """What there is to say at one moment."""

    step: int
    total: int | None
    unit: str
    rate: float | None  # units per second; None before any were timed: the first compile
    elapsed: float  # seconds
    numbers: Mapping[str, float]
    reason: str | None = None  # why it ended; None while it runs, "" if the goal was reached

    @property
    def count(self) -> str:
        of = f"/{self.total:,}" if self.total is not None else ""
        return f"{self.step:,}{of} {self.unit}s"

    @property
    def pace(self) -> str:
        """The time left (at the end the time that it took), rates, memory."""
        found = []
        if self.reason is not None:
            found = [f"{_duration(self.elapsed)} in all"]
        elif self.rate and self.total is not None:
            found = [f"{_duration((self.total - self.step) / self.rate)} left"]
        if self.rate:
            found.append(f"{_si(self.rate)} {self.unit}s/s")
        if examples := self.numbers.get("examples_per_second"):
            found.append(f"{_si(examples)} examples/s")
        return "  ".join([*found, *_memory()])

    @property
    def results(self) -> str:
        """The loss, what evaluation gave, then other metrics."""
        is_aside = lambda name: name.endswith("_per_second") or "learning_rate" in name
        names = [x for x in self.numbers if x.split("/")[0] not in _ASIDE and not is_aside(x)]
        names.sort(key=lambda name: (name.split("/")[0] != "loss", "/" not in name))
        found = summary({name: self.numbers[name] for name in names})
        if rejected := self.numbers.get("rejected"):
            found.append(f"rejected {rejected:,.0f}")
        return "  ".join(found)


def summary(row: Mapping[str, float], digits: Callable[[float], str] = short) -> list[str]:
    """Each number with its name; those of many members or classes as one range.

    >>> summary({"val/loss": 0.5, "val/recall/0": 0.25, "val/recall/1": 0.75, "val/recall/2": 0.5, "val/recall/3": 1.0})
    ['val/loss 0.5', 'val/recall/0…3 0.25…1']
    """
    found = []
    for name, members in families(row).items():
        values = [row[one] for one in members]
        if len(values) == 1:
            found.append(f"{name} {digits(values[0])}")
            continue
        high = next((x for x in values if not math.isfinite(x)), max(values))
        low = min(filter(math.isfinite, values), default=high)
        found.append(f"{name}/0…{len(values) - 1} {digits(low)}…{digits(high)}")
    return found


def _duration(seconds: float) -> str:
    """Of seconds: 0:09, 12:05, 51:04:05."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}:{m:02}:{s:02}" if hours else f"{m}:{s:02}"


def _si(rate: float) -> str:
    """Three digits and a letter: 12.3k, 1.54M.

    >>> [_si(x) for x in (3.4567, 999.4, 123456.0, 5e6)]
    ['3.46', '999', '123k', '5M']
    """
    size, letter = next((pair for pair in ((1e6, "M"), (1e3, "k")) if rate >= pair[0]), (1, ""))
    return f"{rate / size:.3g}{letter}"


def _memory() -> list[str]:
    """Memory in use on the fullest device; nothing if devices do not report it."""
    found = []
    for device in jax.local_devices():
        with contextlib.suppress(RuntimeError):
            stats = device.memory_stats() or {}
            if "bytes_in_use" in stats:
                found.append((stats["bytes_in_use"], stats.get("bytes_limit", 0)))
    if not found:
        return []
    used, limit = max(found)
    return [f"{used / 2**30:.1f}/{limit / 2**30:.0f} GiB"]


# Views


class _Lines:
    """A plain line every 5 seconds; of a run of hours, one a minute."""

    def interval(self, elapsed: float) -> float:
        return min(max(5.0, elapsed / 60), 60.0)

    def draw(self, facts: Facts) -> None:
        percent = f"{facts.step / facts.total:.0%}" if facts.total else ""
        parts = facts.count, percent, facts.results, facts.pace, facts.reason
        self.note("  ".join(filter(None, parts)))

    def note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        pass


class _Notebook(_Lines):
    """One line, redrawn in place; notes are printed."""

    def __init__(self) -> None:
        self.handle: Any = None

    def interval(self, elapsed: float) -> float:
        return 0.2

    def draw(self, facts: Facts) -> None:
        from IPython.display import display

        parts = facts.count, facts.results, facts.pace, facts.reason
        shown = {"text/plain": "  ".join(filter(None, parts))}
        if self.handle is None:
            self.handle = display(shown, raw=True, display_id=True)
        else:
            self.handle.update(shown, raw=True)

    def note(self, text: str) -> None:
        print(text, flush=True)  # notebooks show stderr as if it were an error


class _Terminal(_Lines):
    """Two lines at the bottom of a terminal; what the user prints scrolls by above them."""

    def __init__(self, console) -> None:
        from rich.live import Live

        # else it is a file, and stays one
        is_shared = sys.stdout is not None and sys.stdout.isatty()
        self.live = Live(console=console, auto_refresh=False, redirect_stdout=is_shared)

    def interval(self, elapsed: float) -> float:
        return 0.1

    def draw(self, facts: Facts) -> None:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        bar = [ProgressBar(facts.total, facts.step, width=30)] if facts.total else []
        first = Table.grid(padding=(0, 2, 0, 0))
        first.add_row(Text(facts.count, style="bold"), *bar, Text(facts.pace, style="dim"))
        results = Text(facts.results, no_wrap=True, overflow="ellipsis")
        ended = [Text(facts.reason, style="yellow")] if facts.reason else []
        self.live.start()
        self.live.update(Group(first, results, *ended), refresh=True)

    def note(self, text: str) -> None:
        self.live.console.print(text, markup=False, highlight=False, emoji=False)

    def close(self) -> None:
        self.live.stop()


# Progress


class Progress:
    """A run as its view shows it.

    `show` after every call of the step, `note` for a line above, `close` at the end.
    """

    def __init__(self, view: Any, total: int | None, start: int, unit: str = "step") -> None:
        self.view: Any = view
        self.total: int | None = total
        self.start: int = start
        self.unit: str = unit
        self._step = start
        self._row: Mapping[str, float] = {}
        # the clock and the step when the first steps ended: the time until there was that of compiling
        self._timed: tuple[float, int] | None = None
        self._newest = 0.0
        self._began = time.perf_counter()
        self._next = self._began + view.interval(0.0)

    def show(self, step: int, row: Mapping[str, float]) -> None:
        now = time.perf_counter()
        self._row = row or self._row
        if step > self._step:
            self._step, self._newest = step, now
            self._timed = self._timed or (now, step)
        if now >= self._next:
            self._draw(now, None)

    def note(self, text: str) -> None:
        self.view.note(text)

    def close(self, reason: str = "") -> None:
        if self._step > self.start:
            self._draw(time.perf_counter(), reason)
        elif reason:
            self.view.note(reason)
        self.view.close()

    def _draw(self, now: float, reason: str | None) -> None:
        since, before = self._timed or (now, self._step)
        until = now if reason is None else self._newest  # not what comes after the last step
        rate = (self._step - before) / (until - since) if until > since else None
        at = self._step, self.total, self.unit
        self.view.draw(Facts(*at, rate or None, now - self._began, self._row, reason))
        self._next = time.perf_counter() + self.view.interval(now - self._began)


class _Silent:
    """What `progress=False` shows."""

    def show(self, step: int, row: Mapping[str, float]) -> None: ...

    def note(self, text: str) -> None: ...

    def close(self, reason: str = "") -> None: ...


def progress(
    progress: bool = True, total: int | None = None, start: int = 0, unit: str = "step"
) -> Progress | _Silent:
    """The progress display of a run of `total` steps (None: unknown) from step `start`.

    True draws on a terminal and in notebooks and writes lines elsewhere, False is silent. Raises
    WrongTypeError for anything else.

    >>> bar = progress(False, total=100)
    >>> bar.show(10, {"loss": 0.5}), bar.close()
    (None, None)
    """
    if not isinstance(progress, bool):
        raise WrongTypeError("progress", "fit()", trees.describe(progress), "True or False")
    return Progress(_view(), total, start, unit) if progress else _Silent()


def _view() -> _Lines:
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_jupyter:
        return _Notebook()
    # not rich's is_terminal: FORCE_COLOR, which CI sets, makes a terminal of any file for it
    is_terminal = sys.stderr is not None and sys.stderr.isatty() and not console.is_dumb_terminal
    return _Terminal(console) if is_terminal else _Lines()
