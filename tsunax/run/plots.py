"""Pictures of a history, by matplotlib: the loss, a panel for each metric, the learning rate.

What training and evaluation call by the same name ("accuracy", "val/accuracy") shares a panel. No
state of pyplot is read or written, and nothing is shown.
"""

import io
import itertools
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tsunax._core import Figure
from tsunax._core.libraries import library
from tsunax._core.tables import ASIDE, families
from tsunax.errors import RowError

_RANKS = {"loss": 0, "learning_rate": 2}  # metrics lie between
_MOST = 12  # names in a legend
_LEGEND: Any = {"fontsize": 8, "title_fontsize": 8, "edgecolor": "none"}


def _base(name: str) -> str:
    """The panel of a name: `val/accuracy/3` → accuracy, `1.learning_rate@head` → learning_rate."""
    head, _, tail = name.partition("@")[0].rpartition("/")
    column = head if head and tail.isdigit() else name.partition("@")[0]
    return column.rpartition("/")[2].rpartition(".")[2]


def _panels(history, names: Sequence[str] | None) -> dict[str, dict[str, Any]]:
    """Series by name, by panel: the given names, else the loss, metrics, the learning rate."""
    if not history.names:
        raise RowError("history", "plot()", "no rows", "at least one", "Nothing was logged yet.")
    is_shown = lambda name: not name.endswith("_per_second") and _base(name) not in ASIDE
    chosen = [names] if isinstance(names, str) else names or list(filter(is_shown, history.names))
    panels: dict[str, dict[str, Any]] = {}
    for name in chosen or history.names:
        panels.setdefault(_base(name), {})[name] = history.series(name)
    rank = lambda base: 0 if names else _RANKS.get(base, 1)
    return {base: panels[base] for base in sorted(panels, key=rank)}


def plot(history: Any, names: Sequence[str] | None, x: str) -> Figure:
    panels, every = _panels(history, names), _panels(history, None)
    moves = lambda columns: any(len(np.unique(values)) > 1 for _, values in columns.values())
    still = {base: part for base, part in every.items() if not moves(part)}
    moving = {
        base: part for base, part in panels.items() if names or base == "loss" or base not in still
    }
    panels, lines, along = moving or panels, {}, _along(history, x)
    figure = new_figure(6.4, 0.6 + (1.8 if len(panels) < 5 else 1.3) * len(panels))
    rows = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
    for axes, (base, series) in zip(rows, panels.items(), strict=True):
        lines |= draw(axes, base, {name: (along(at), y) for name, (at, y) in series.items()})
    figure.align_ylabels(rows)
    _whole_ticks(rows[-1].xaxis, history["step"] if x == "step" else history.series(x)[1])
    rows[-1].set_xlabel(x.replace("_", " "), fontsize=9)
    title, shown = _members(lines, still)
    told = [y for base in still if base not in title and not names for y in still[base].items()]
    text = ", ".join(f"{name} {values[-1]:.4g}" for name, (_, values) in told)
    text = textwrap.shorten(text, 90, placeholder=" …")
    rows[0].set_title(text, loc="left", fontsize=8, color="0.4")
    shown |= _mark(rows, history.marks, along)
    if shown:
        ncols = max(100 // (max(map(len, shown)) + 8), 1)
        title = ", ".join(title).replace("_", " ")
        how = {"loc": "outside upper center", "ncols": ncols, "title": title}
        figure.legend(shown.values(), shown, **how, **_LEGEND)
        figure.set_figheight(figure.get_figheight() + 0.2 * len(shown) / ncols)
    return figure


def _along(history: Any, x: str) -> Callable[[Any], np.ndarray]:
    """Where steps lie on the axis of a column.

    A count that many rows share, as "epoch", goes on evenly between the steps at which it changes.
    """
    if x == "step":
        return lambda steps: np.asarray(steps, float)
    steps, values = history.series(x)
    changes = np.flatnonzero(np.diff(values))
    is_count = np.array_equal(values, np.round(values)) and np.all(np.diff(values) >= 0)
    if not is_count or len(changes) == len(values) - 1:
        return lambda at: np.interp(at, steps, values)
    start = 0 if values[0] == 0 else steps[0] - 1
    ends = [start, *(steps[changes] + steps[changes + 1] - 1) / 2]
    # the last epoch is as long as the one before, if it is not longer by now
    last = max(steps[-1], ends[-1] + (ends[-1] - ends[-2] if len(ends) > 1 else 0))
    counts = [values[0], *values[changes + 1], values[-1] + 1]
    return lambda at: np.interp(at, [*ends, last], counts)


def _members(lines: dict[str, Any], still: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """For a legend: names of constants that members differ in, and lines of members by number and
    their constants.
    """
    kinds = families(lines, 2)
    names = max(kinds.values(), key=len)
    if len(names) == 1:
        return [], {}
    numbers_of = lambda names: [name.rpartition("/")[2] for name in names]
    numbers = numbers_of(names)
    own = {base: part for base, part in reversed(still.items()) if numbers_of(part) == numbers}
    ends = zip(*([f"{y[-1]:.3g}" for _, y in part.values()] for part in own.values()), strict=True)
    texts = ["  " + ", ".join(end) for end in ends] or [""] * len(names)
    some = sorted({*np.linspace(0, len(names) - 1, 16).round().astype(int)})
    found = {f"/{numbers[i]}{texts[i]}": lines[names[i]] for i in some}
    firsts = {kind: lines[first] for kind, (first, *others) in kinds.items() if others}
    return list(own), found | {kind: line for kind, line in firsts.items() if "/" in kind}


def _mark(rows: Sequence[Any], marks: Sequence[tuple[int, str, str]], along) -> dict[str, Any]:
    """Red ticks for rejected steps, dashes for other events: side by side at one step."""
    shown: dict[str, Any] = {name: None for _, name, _ in marks if name != "evaluate"}
    at: dict[int, dict[str, str]] = {}
    for step, name, _ in marks:
        if name in shown:
            at.setdefault(step, {})[name] = f"C{4 + list(shown).index(name) % 6}"
    for step, colors in at.items():
        for i, (name, color) in enumerate(colors.items()):
            dashes = 4 * i, (4, 4 * max(len(colors) - 1, 1))
            style: Any = {"color": color, "linestyle": dashes, "linewidth": 0.9}
            if name == "rejected":
                style = {"color": "#C00000", "ymax": 0.04}
            for axes in rows:
                shown[name] = axes.axvline(along(step), **style)
    return shown


def new_figure(width: float, height: float) -> Any:
    matplotlib = library("matplotlib.figure", "plot()", "plot")
    figure = matplotlib.Figure(figsize=(width, height), dpi=150, layout="constrained")

    def png() -> bytes:
        figure.savefig(file := io.BytesIO(), format="png")
        return file.getvalue()

    figure._repr_png_ = png  # IPython asks for it
    return figure


def _whole_ticks(axis: Any, values: np.ndarray) -> None:
    """Ticks at whole numbers, if the values are."""
    if np.array_equal(values, np.round(values), equal_nan=True):
        ticker = library("matplotlib.ticker", "plot()", "plot")
        locator = ticker.MaxNLocator(6, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1)
        axis.set_major_locator(locator)
        axis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))


def log_ticks(axis: Any, values: np.ndarray) -> None:
    """Labels of a logarithmic axis: also between powers of ten if there are few of those."""
    ticker = library("matplotlib.ticker", "plot()", "plot")
    subs = (1.0, 2.0, 5.0) if max(values) < 1000 * min(values) else (1.0,)
    axis.set_major_locator(ticker.LogLocator(subs=subs))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(ticker.NullFormatter())


def _with_jumps(x: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A line for a number that is mostly held: one that changes between two rows and not around
    them has jumped, and what lies between was never its value. Returns the places of the rows, too.
    """
    same = np.diff(values) == 0
    around = np.concatenate([[True], same, [True]])
    jumps = np.flatnonzero(~same & around[:-2] & around[2:]) + 1
    if 2 * np.sum(same) < len(same):
        jumps = jumps[:0]
    points = np.arange(len(values)) + np.searchsorted(jumps, np.arange(len(values)), "right")
    return np.insert(x, jumps, x[jumps - 1]), np.insert(values, jumps, values[jumps]), points


def draw(axes: Any, base: str, columns: dict[str, Any]) -> dict[str, Any]:
    """Lines by name, on a logarithmic axis if it is a loss of a wide range."""
    viridis, lines = library("matplotlib", "plot()", "plot").colormaps["viridis"], {}
    kinds, dashes = families(columns, 2), itertools.cycle(("-", "--", ":", "-."))
    for names in kinds.values():
        is_one = len(names) == 1
        dash = "-" if is_one else next(dashes)
        for name, share in zip(names, np.linspace(0, 0.9, len(names)), strict=True):
            x, values, points = _with_jumps(*columns[name])
            style: Any = {"linestyle": dash, "color": None if is_one else viridis(share)}
            few = 40 if len(names) <= _MOST else 1
            marker = "o" if len(points) <= few else None
            style |= {"marker": marker, "markersize": 3, "markevery": points}
            (lines[name],) = axes.plot(x, values, label=name.lstrip("_"), linewidth=1.3, **style)
    single = [line for name, line in lines.items() if name in kinds]
    if list(columns) != [base] and 0 < len(single) <= _MOST:
        # beside the panel, where it hides no point
        axes.legend(handles=single, loc="upper left", bbox_to_anchor=(1, 1), **_LEGEND)
    every = np.concatenate([values for _, values in columns.values()])
    known = every[np.isfinite(every)]
    if base.endswith("loss") and known.size and 0 < 20 * known.min() < known.max():
        axes.set_yscale("log")
        log_ticks(axes.yaxis, known)
    else:
        axes.ticklabel_format(axis="y", useOffset=False)
        _whole_ticks(axes.yaxis, every)
    axes.set_ylabel(textwrap.fill(base.replace("_", " "), 16), fontsize=9)
    axes.tick_params(which="both", labelsize=8)
    axes.grid(color="0.92", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return lines
