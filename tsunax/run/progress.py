"""Progress: what a person sees of a run while it runs.

`Progress` decides when to draw and what, its view how: two lines that redraw themselves on a
terminal and in a notebook, lines anywhere else, or a tqdm. All of it goes to stderr, as tqdm's
does. There is no thread: the loop calls `show`, which nearly always only looks at the clock.
"""

from __future__ import annotations

import collections
import contextlib
import io
import math
import os
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

_ASIDE = {"epoch", "grad_norm", "update_norm", "loss_scale", "dropped", "rejected", "learning_rate"}


@dataclass(frozen=True)
class Facts:
    """What there is to say at one moment."""

    step: int
    total: int | None
    unit: str
    rate: float | None  # units per second, lately; None before any were timed: the first compile
    elapsed: float  # seconds
    numbers: Mapping[str, float]
    reason: str | None = None  # why it ended; None while it runs, "" if the goal was reached
    is_first: bool = False  # whether nothing has run yet

    @property
    def count(self) -> str:
        of = f"/{self.total:,}" if self.total is not None else ""
        return f"{self.step:,}{of} {self.unit}s"

    @property
    def pace(self) -> list[str]:
        """The time left (at the end the time that it took), rates of one stretch, memory."""
        times = ["compiling"] * self.is_first
        if self.reason is not None:
            times = [f"{_duration(self.elapsed)} in all"]
        elif self.rate and self.total is not None and not times:
            times = [f"{_duration((self.total - self.step) / self.rate)} left"]
        ends, unit = "_per_second", f"{self.unit}s"
        known = {n.removesuffix(ends): x for n, x in self.numbers.items() if n.endswith(ends)}
        own = known.pop(unit, None)
        rates = {unit: self.rate} if self.rate else {}
        # rows are of another stretch, but say how many examples a step has
        if self.rate or not own:
            scale = self.rate / own if own and self.rate else 1
            rates |= {what: x * scale for what, x in known.items()}
        told = [f"{_si(rate)} {what}/s" for what, rate in rates.items()]
        return [*times, *told, *filter(None, [_memory()])]

    def results(self, moved: set[str]) -> list[str]:
        """The loss, what evaluation gave, then whatever else has moved since the start."""
        groups = families(name for name in self.numbers if not name.endswith("_per_second"))

        def is_shown(name: str) -> bool:
            if name == "loss" or ("/" in name and "best" not in name):
                return True
            return name not in _ASIDE and not moved.isdisjoint(groups[name])

        order = sorted(filter(is_shown, groups), key=lambda name: (name != "loss", "/" not in name))
        found = summary({one: self.numbers[one] for name in order for one in groups[name]})
        if rejected := self.numbers.get("rejected"):
            found.append(f"rejected {rejected:,.0f}")
        return found


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
    """Of seconds: 0:09, 12:05, 3:04:05, and 2 d 3:04:05."""
    minutes, s = divmod(round(seconds), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    return f"{days} d " * bool(days) + (f"{h}:{m:02}:{s:02}" if hours else f"{m}:{s:02}")


def _si(rate: float) -> str:
    """Three digits and a letter: 12.3k, 1.54M.

    >>> [_si(x) for x in (3.4567, 999.4, 999.6, 123456.0, 5e6)]
    ['3.46', '999', '1k', '123k', '5M']
    """
    sizes = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
    size, letter = next((pair for pair in sizes if rate >= 0.9995 * pair[0]), (1, ""))
    return f"{rate / size:.3g}{letter}"


def _memory() -> str:
    """Memory in use on the fullest device; the resident set if devices do not report it."""
    found = []
    for device in jax.local_devices():
        with contextlib.suppress(RuntimeError):
            stats = device.memory_stats() or {}
            if "bytes_in_use" in stats:
                found.append((stats["bytes_in_use"], stats.get("bytes_limit", 0)))
    if found:
        used, limit = max(found)
        return f"{used / 2**30:.1f}" + (f"/{limit / 2**30:.0f}" if limit else "") + " GiB"
    try:
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            return f"{used / 2**30:.1f} GiB"
    except OSError:
        return ""


# Views


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


class _Lines:
    """A plain line every 5 seconds; of a run of hours, one a minute."""

    redraws = False
    note = staticmethod(_say)

    def interval(self, elapsed: float) -> float:
        return min(max(5.0, elapsed / 60), 60.0)

    def draw(self, facts: Facts, moved: set[str]) -> None:
        percent = [f"{facts.step / facts.total:.0%}"] if facts.total else []
        ended = [facts.reason] if facts.reason else []
        parts = [facts.count, *percent, *facts.results(moved), *facts.pace, *ended]
        _say("  ".join(parts))

    def close(self) -> None:
        pass


def _picture(facts: Facts, moved: set[str], width: int):
    """Two lines: where it is, and how it goes."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    color = {None: "cyan", "": "green"}.get(facts.reason, "yellow")
    cells: list[Any] = [Text(facts.count, style="bold")]
    pace, rest = facts.pace, []
    if facts.total:
        room = lambda: width - len(facts.count) - len("  ".join(pace)) - 12
        while len(pace) > 1 and room() < 12:
            rest.insert(0, pace.pop())
        if room() >= 12:
            style: Any = dict(complete_style=color, finished_style=color, width=min(40, room()))
            cells.append(ProgressBar(facts.total, facts.step, **style))
        cells.append(Text(f"{facts.step / facts.total:4.0%}", style=color))
    first = Table.grid(padding=(0, 2, 0, 0))
    for cell in [*cells, Text()]:
        least = len(cell) if isinstance(cell, Text) else None
        first.add_column(no_wrap=True, overflow="ellipsis", min_width=least)
    first.add_row(*cells, Text("  ".join(pace), style="dim"))
    second = Text(no_wrap=True, overflow="ellipsis")
    for result in facts.results(moved):
        name, _, value = result.rpartition(" ")
        second.append(f"{name} ", style="dim").append(value, style="bold").append("  ")
    second.append("  ".join(rest), style="dim")
    lines = [first, second, Text(facts.reason or "", style=color)]
    return Group(*(line for line in lines if line is first or line))


class _Terminal:
    """Two lines at the bottom of a terminal; what the user prints scrolls by above them."""

    redraws = True

    def __init__(self, console):
        from rich.live import Live

        # else it is a file, and stays one
        is_shared = sys.stdout is not None and sys.stdout.isatty()
        self.live = Live(console=console, auto_refresh=False, redirect_stdout=is_shared)

    def interval(self, elapsed: float) -> float:
        return 0.1

    def draw(self, facts: Facts, moved: set[str]) -> None:
        self.live.start()
        self.live.update(_picture(facts, moved, self.live.console.width), refresh=True)

    def note(self, text: str) -> None:
        self.live.console.print(text, markup=False, highlight=False, emoji=False)

    def close(self) -> None:
        self.live.stop()


class _Notebook:
    """The two lines as HTML, redrawn in place with or without ipywidgets."""

    redraws = True

    def __init__(self):
        self.handle = None

    def note(self, text: str) -> None:
        print(text, flush=True)  # notebooks show stderr as if it were an error

    def interval(self, elapsed: float) -> float:
        return 0.2

    def draw(self, facts: Facts, moved: set[str]) -> None:
        from IPython.display import HTML, display
        from rich.console import Console

        kind: Any = dict(force_terminal=True, force_jupyter=False, width=110)
        console = Console(record=True, file=io.StringIO(), **kind)
        console.print(_picture(facts, moved, 110))
        style = "white-space:pre;overflow-x:auto;line-height:1.4;margin:0;"
        pre = f'<pre style="{style}font-family:Menlo,Consolas,monospace">{{code}}</pre>'
        html = HTML(console.export_html(inline_styles=True, code_format=pre))
        if self.handle is None:
            self.handle = display(html, display_id=True)
        else:
            self.handle.update(html)

    def close(self) -> None:
        pass


class _Tqdm:
    """A bar of another library: `update(n)`, `set_postfix(dict)`, `close()`."""

    redraws = False

    def __init__(self, bar, start: int):
        self.bar, self.at = bar, start

    def interval(self, elapsed: float) -> float:
        return 0.1

    def draw(self, facts: Facts, moved: set[str]) -> None:
        results = (result.rpartition(" ") for result in facts.results(moved))
        self.bar.set_postfix({name: value for name, _, value in results})
        self.bar.update(facts.step - self.at)
        self.at = facts.step

    def note(self, text: str) -> None:
        getattr(self.bar, "write", _say)(text)

    def close(self) -> None:
        self.bar.close()


# Progress


class Progress:
    """A run as its view shows it.

    `show` after every call of the step, `note` for a line above, `close` at the end.
    """

    def __init__(self, view: Any, total: int | None, start: int, unit: str = "step"):
        self.view: Any = view
        self.total: int | None = total
        self.start: int = start
        self.unit: str = unit
        self._step, self._is_drawn = start, False
        self._row: Mapping[str, float] = {}
        self._first: dict[str, float] = {}
        self._moved: set[str] = set()
        self._recent: collections.deque = collections.deque(maxlen=30)
        self._timed: tuple[float, int] | None = None  # when the first steps ended
        self._newest = 0.0, 0
        self._began = time.perf_counter()
        self._next = self._began + view.interval(0.0)

    def show(self, step: int, row: Mapping[str, float]) -> None:
        self._step = step
        if row:
            self._row = row
        now = time.perf_counter()
        if step > self.start:
            self._newest = now, step
            if self._timed is None:  # the time until here was that of compiling
                self._timed = self._newest
                self._recent.append(self._newest)
        if now >= self._next or (self.view.redraws and not self._is_drawn):
            if step > self.start:
                self._recent.append((now, step))
            self._draw(now, None)

    def note(self, text: str) -> None:
        self.view.note(text)

    def close(self, reason: str = "") -> None:
        if self._timed is not None:
            self._recent = collections.deque([self._timed, self._newest])  # the rate of all of it
        if self._step > self.start or self._is_drawn:
            self._draw(time.perf_counter(), reason)
        elif reason:
            self.view.note(reason)
        self.view.close()

    def _draw(self, now: float, reason: str | None) -> None:
        first, row = self._first, self._row
        self._moved.update(name for name, x in row.items() if first.setdefault(name, x) != x)
        rate = None
        if self._recent:
            (since, before), (until, step) = self._recent[0], self._recent[-1]
            rate = (step - before) / (until - since) if step > before and until > since else None
        elapsed, is_first = now - self._began, self._step == self.start
        at = self._step, self.total, self.unit
        self.view.draw(Facts(*at, rate, elapsed, row, reason, is_first), self._moved)
        self._is_drawn = True
        self._next = time.perf_counter() + self.view.interval(elapsed)


class _Silent:
    """What `progress=False` shows."""

    def show(self, step: int, row: Mapping[str, float]) -> None: ...

    def note(self, text: str) -> None: ...

    def close(self, reason: str = "") -> None: ...


def progress(
    progress: Any = True, total: int | None = None, start: int = 0, unit: str = "step"
) -> Progress | _Silent:
    """The progress display of a run of `total` steps (None: unknown) from step `start`.

    True draws on a terminal and in notebooks and writes lines elsewhere, False is silent; a tqdm,
    or its class, is used as it is. Raises WrongTypeError for anything else.

    >>> bar = progress(False, total=100)
    >>> bar.show(10, {"loss": 0.5}), bar.close()
    (None, None)
    """
    if progress is False or progress is None:
        return _Silent()
    if progress is True:
        return Progress(_view(), total, start, unit)
    if isinstance(progress, type) and hasattr(progress, "update"):
        progress = progress(total=total, initial=start, unit=f" {unit}s")
    if all(callable(getattr(progress, name, None)) for name in ("update", "set_postfix", "close")):
        return Progress(_Tqdm(progress, start), total, start, unit)
    expected = "True, False, or a tqdm: update(n), set_postfix(dict), close()"
    raise WrongTypeError("progress", "fit()", trees.describe(progress), expected)


def _view():
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_jupyter:
        return _Notebook()
    # not rich's is_terminal: FORCE_COLOR, which CI sets, makes a terminal of any file for it
    is_terminal = sys.stderr is not None and sys.stderr.isatty() and not console.is_dumb_terminal
    return _Terminal(console) if is_terminal else _Lines()
