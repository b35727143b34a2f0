"""Progress: the display of a run while it runs.

`Progress` decides when to draw, its view how: two lines that redraw themselves on a terminal, one
such line in a notebook, plain lines anywhere else. All of it goes to stderr. There is no thread:
the loop calls `show`, which nearly always only looks at the clock.
"""

import contextlib
import math
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import jax

from tsunax._core.tables import ASIDE, short, summary
from tsunax.run.history import CAUSES
from tsunax.run.part import EachBoundary


def _memory() -> list[str]:
    """Memory in use on the fullest device; nothing if devices do not report it."""
    stats_of_devices = []
    for device in jax.local_devices():
        with contextlib.suppress(RuntimeError, KeyError):
            stats = device.memory_stats() or {}
            stats_of_devices.append((stats["bytes_in_use"], stats.get("bytes_limit", 0)))
    return [
        f"{used / 2**30:.1f}/{limit / 2**30:.0f} GiB"
        for used, limit in sorted(stats_of_devices)[-1:]
    ]


class _Silent:
    """The view of `progress=False`: nothing is shown."""

    seconds: tuple[float, float] = math.inf, math.inf  # the least and the most between two drawings

    def draw(self, bar: "Progress") -> None: ...

    def note(self, text: str) -> None: ...

    def close(self) -> None: ...


class _Lines(_Silent):
    """A plain line every 5 seconds; in a run of hours, a line a minute."""

    seconds = 5.0, 60.0

    def draw(self, bar: "Progress") -> None:
        percent = f"{bar.step / bar.total:.0%}" if bar.total else ""
        parts = bar.count, percent, bar.results, bar.pace, bar.reason
        self.note("  ".join(filter(None, parts)))

    def note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)


class _Notebook(_Lines):
    """One line, redrawn in place; notes are printed."""

    seconds = 0.2, 0.2
    handle: Any = None

    def draw(self, bar: "Progress") -> None:
        from IPython.display import display

        parts = bar.count, bar.results, bar.pace, bar.reason
        bundle = {"text/plain": "  ".join(filter(None, parts))}
        if self.handle is None:
            self.handle = display(bundle, raw=True, display_id=True)
        else:
            self.handle.update(bundle, raw=True)

    def note(self, text: str) -> None:
        print(text, flush=True)  # notebooks show stderr as if it were an error


class _Terminal(_Lines):
    """Two lines at the bottom of a terminal; output of the user scrolls above."""

    seconds = 0.1, 0.1

    def __init__(self, console) -> None:
        from rich.live import Live

        # a stdout that is a file must not be redirected to the terminal
        is_shared = sys.stdout is not None and sys.stdout.isatty()
        self.live = Live(console=console, auto_refresh=False, redirect_stdout=is_shared)

    def draw(self, bar: "Progress") -> None:
        from rich import console, progress_bar, table, text

        bars = [progress_bar.ProgressBar(bar.total, bar.step, width=30)] if bar.total else []
        grid = table.Table.grid(padding=(0, 2, 0, 0))
        grid.add_row(text.Text(bar.count, style="bold"), *bars, text.Text(bar.pace, style="dim"))
        results = text.Text(bar.results, no_wrap=True, overflow="ellipsis")
        reasons = [text.Text(bar.reason, style="yellow")] if bar.reason else []
        self.live.start()
        self.live.update(console.Group(grid, results, *reasons), refresh=True)

    def note(self, text: str) -> None:
        self.live.console.print(text, markup=False, highlight=False, emoji=False)

    def close(self) -> None:
        self.live.stop()


class Progress(EachBoundary):
    """A run as its view shows it: `show` after a call, `note` for a line above, `close`."""

    def __init__(
        self,
        view: Any,
        total: int | None,
        start: int,
        unit: str = "step",
        seconds: Mapping[str, float] | None = None,
    ) -> None:
        self.view: Any = view
        self.total: int | None = total
        self.start: int = start
        self.unit: str = unit
        self.step: int = start
        self.numbers: Mapping[str, float] = {}
        self.rate: float | None = None  # units per second; None while the first steps compile
        self.elapsed: float = 0.0  # seconds
        self.reason: str | None = None  # why it ended; None while it runs, "" at the goal
        # the clock and the step when the first steps ended, because before that they compiled
        self._first_timing: tuple[float, int] | None = None
        self._newest_time = 0.0
        # the seconds of the run by cause, which its clock counts on
        self.seconds: Mapping[str, float] = seconds or dict.fromkeys(CAUSES, 0.0)
        self._start_time = time.perf_counter()
        self._next_draw_time = self._start_time + self.wait

    @property
    def wait(self) -> float:
        least_seconds, most_seconds = self.view.seconds
        return min(max(least_seconds, self.elapsed / 60), most_seconds)

    @property
    def count(self) -> str:
        total = f"/{self.total:,}" if self.total is not None else ""
        return f"{self.step:,}{total} {self.unit}s"

    @property
    def pace(self) -> str:
        """The time left (at the end the time that it took), rates, wait for data, memory."""
        texts = []
        if self.reason is not None:
            texts = [f"{timedelta(seconds=round(self.elapsed))} in all"]
        elif self.rate and self.total is not None:
            steps_left = self.total - self.step
            seconds_left = min(steps_left / self.rate, 1e12)  # a timedelta has a limit
            texts = [f"{timedelta(seconds=round(seconds_left))} left"]
        if self.rate:
            texts.append(f"{short(self.rate)} {self.unit}s/s")
            if examples := self.numbers.get("examples_per_second"):
                examples_per_step = examples / self.numbers["steps_per_second"]
                texts.append(f"{short(self.rate * examples_per_step)} examples/s")
        data, device = self.seconds["data"], self.seconds["device"]
        if 4 * data > device:
            texts.append(f"{data / (data + device):.0%} waiting for data")
        return "  ".join([*texts, *_memory()])

    @property
    def results(self) -> str:
        """The loss, the numbers of evaluation, then other metrics."""
        is_rate = lambda name: name.endswith("_per_second") or "learning_rate" in name
        names = [x for x in self.numbers if x.split("/")[0] not in ASIDE and not is_rate(x)]
        names.sort(key=lambda name: (name.split("/")[0] != "loss", "/" not in name))
        texts = summary({name: self.numbers[name] for name in names})
        counts = (x for name, x in self.numbers.items() if name.split("/")[0] == "rejected")
        if rejected := sum(counts):
            texts.append(f"rejected {rejected:,.0f}")
        return "  ".join(texts)

    def at(self, run: Any, events: list[str]) -> None:
        self.show(run.step, run.metrics)

    def read(self, run: Any, has_row: bool) -> None:
        self.show(run.step, run.metrics)

    def end(self, run: Any, error: BaseException | None) -> None:
        self.close(run.stopped if error is None else type(error).__name__)

    def show(self, step: int, row: Mapping[str, float]) -> None:
        clock_time = time.perf_counter()
        self.numbers = row or self.numbers
        if self.total is not None and step > self.total:  # the length of the data was wrong
            self.total = None
        if step > self.step:
            self.step, self._newest_time = step, clock_time - self.seconds["compile"]
            self._first_timing = self._first_timing or (self._newest_time, step)
        if clock_time >= self._next_draw_time:
            self._draw(clock_time)

    def note(self, text: str) -> None:
        self.view.note(text)

    def close(self, reason: str = "") -> None:
        if self.step > self.start:
            self.reason = reason
            self._draw(time.perf_counter())
        elif reason:
            self.view.note(reason)
        self.view.close()

    def _draw(self, clock_time: float) -> None:
        clock = clock_time - self.seconds["compile"]
        start, steps_before = self._first_timing or (clock, self.step)
        # The rate of a run that has ended does not count the time after its last step.
        end_time = clock if self.reason is None else self._newest_time
        self.rate = (self.step - steps_before) / (end_time - start) if end_time > start else None
        self.elapsed = clock_time - self._start_time
        try:
            self.view.draw(self)
        except OSError:  # stderr was closed, for example with its terminal: the run continues
            self.view = _Silent()
        self._next_draw_time = time.perf_counter() + self.wait


def progress(
    progress: bool = True,
    total: int | None = None,
    start: int = 0,
    unit: str = "step",
    seconds: Mapping[str, float] | None = None,
) -> Progress:
    """The progress display of a run of `total` steps (None: unknown) from step `start`."""
    return Progress(_view() if progress else _Silent(), total, start, unit, seconds)


def _view() -> _Silent:
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_jupyter:
        return _Notebook()
    # not rich's is_terminal: under FORCE_COLOR, which CI sets, it is true for any file
    is_terminal = sys.stderr is not None and sys.stderr.isatty() and not console.is_dumb_terminal
    return _Terminal(console) if is_terminal else _Lines()
