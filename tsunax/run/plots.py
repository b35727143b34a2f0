"""Pictures of a history, by matplotlib.

The panels are the loss, a panel for each metric, the learning rate; what training and evaluation
call by the same name ("accuracy", "val/accuracy") shares one. No state of pyplot is read or
written, and nothing is shown.
"""

from __future__ import annotations

import collections
import functools
import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from tsunax._core import Figure
from tsunax.errors import MissingLibraryError, RowError

_BINS = 250  # of a panel's width: more points are drawn as their median and a band
# Okabe and Ito: for every eye, and in print
_COLOURS = "#0072B2 #D55E00 #009E73 #CC79A7 #E69F00 #56B4E9".split()
_RANKS = {"loss": 0, "learning_rate": 2}  # metrics lie between
_LEFT_OUT = {"epoch", "rejected", "grad_norm", "update_norm", "loss_scale", "dropped"}

# What is in a panel


def _base(name: str) -> str:
    """The panel of a name: `val/accuracy` → accuracy, `1.learning_rate@head` → learning_rate."""
    return _column(name.partition("@")[0]).rpartition("/")[2].rpartition(".")[2]


def _column(name: str) -> str:
    """A name without the number of a member or a class."""
    head, _, tail = name.rpartition("/")
    return head if head and tail.isdigit() else name


def _panels(history, names: Sequence[str] | None, where: str) -> dict[str, list[str]]:
    """Column names by panel: the given ones, else the loss, changing metrics, learning rate."""
    if not history.names:
        raise RowError("history", where, "no rows", "at least one", "Nothing was logged yet.")
    panels: dict[str, list[str]] = {}
    if names is not None:
        for name in [names] if isinstance(names, str) else names:
            history.series(name)  # an unknown one raises
            panels.setdefault(_base(name), []).append(name)
        return panels
    for name in history.names:
        base, is_aside = _base(name), name.startswith(("best/", "best_step/"))
        if is_aside or name.endswith("_per_second") or base in _LEFT_OUT:
            continue
        # a hyperparameter may stand still
        if "/" in name or base in _RANKS or np.unique(history.series(name)[1]).size > 1:
            panels.setdefault(base, []).append(name)
    ordered = sorted(panels, key=lambda base: _RANKS.get(base, 1))
    return {base: panels[base] for base in ordered} or {name: [name] for name in history.names}


def _along(history, steps, x: str) -> np.ndarray:
    return np.asarray(steps, np.float64) if x == "step" else np.interp(steps, *history.series(x))


def _is_wide(values: np.ndarray) -> bool:
    """Whether a logarithmic axis shows more."""
    return bool(values.size and values.min() > 0 and values.max() > 20 * values.min())


def _is_logarithmic(base: str, columns: Sequence[np.ndarray]) -> bool:
    """Whether a panel has a logarithmic axis: losses, rates, and metrics that fall; no accuracy."""
    rises = [known[-1] > known[0] for known in map(_finite, columns) if known.size]
    return _is_wide(_finite(*columns)) and (base in _RANKS or 2 * int(sum(rises)) < len(rises))


def _finite(*columns: np.ndarray) -> np.ndarray:
    values = np.concatenate([np.empty(0), *columns])
    return values[np.isfinite(values)]


# Matplotlib


def plot(history: Any, names: Sequence[str] | None, x: str) -> Figure:
    """`History.plot`."""
    panels = _panels(history, names, "plot()")
    if x != "step":
        history.series(x)
    figure = _figure(6.4, 0.6 + 1.8 * len(panels))
    rows = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
    for axes, (base, found) in zip(rows, panels.items(), strict=True):
        series = {name: history.series(name) for name in found}
        columns = {name: (_along(history, at, x), y) for name, (at, y) in series.items()}
        _draw(axes, base, columns)
        _draw_marks(axes, history, x, labelled=axes is rows[0])
        handles, labels = axes.get_legend_handles_labels()
        if labels not in ([base], []):
            axes.legend(handles, labels, fontsize=8, frameon=False, loc="best", handlelength=1.4)
    rows[-1].set_xlabel(x, fontsize=9)
    rows[-1].xaxis.set_major_formatter("{x:,.6g}")
    figure.align_ylabels()
    return figure


def _figure(width: float, height: float) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        fix = "pip install 'tsunax[plot]'"
        raise MissingLibraryError("library", "plot()", "no matplotlib", "matplotlib", fix) from None
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    figure._repr_png_ = functools.partial(_png, figure)  # type: ignore[attr-defined]  # IPython asks for it
    return figure


def _png(figure) -> bytes:
    figure.savefig(file := io.BytesIO(), format="png")
    return file.getvalue()


def _draw(axes, base: str, columns: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
    members = {name.rpartition("/")[2] for name in columns if _column(name) != name}
    is_many = len(members) > len(_COLOURS)  # of a population: no two may share a color
    styles = _styles(list(columns), is_many)
    for (name, (x, values)), (colour, dashes, label) in zip(columns.items(), styles, strict=True):
        known = np.isfinite(values)
        lost, x, values = x[~known], x[known], values[known]
        if len(values) > 2 * _BINS:
            parts = [np.array_split(column, _BINS) for column in (x, values)]
            x = np.array([part.mean() for part in parts[0]])
            low, values, high = np.array([np.percentile(part, (10, 50, 90)) for part in parts[1]]).T
            axes.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)
        marker = "o" if len(values) <= 40 and not is_many else None
        width = 0.8 if is_many else 1.3
        style = dict(color=colour, linestyle=dashes, linewidth=width, marker=marker, markersize=3)
        axes.plot(x, values, label=label, **style)
        if len(lost):
            edge = dict(transform=axes.get_xaxis_transform(), color=colour, markersize=4)
            said = None if is_many else f"{name} not finite"
            axes.plot(lost, np.full(len(lost), 0.03), "x", **edge, label=said)
    if _is_logarithmic(base, [values for _, values in columns.values()]):
        axes.set_yscale("log")
    else:
        axes.ticklabel_format(axis="y", scilimits=(-2, 4))
    axes.set_ylabel(base.replace("_", " "), fontsize=9)
    _quiet(axes)
    axes.margins(x=0.02)


def _quiet(axes) -> None:
    axes.yaxis.get_offset_text().set_fontsize(8)
    axes.tick_params(which="both", labelsize=8)  # short logarithmic axes have minor labels
    axes.grid(color="0.92", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _styles(names: list[str], is_many: bool) -> list[tuple[Any, Any, str | None]]:
    """A color, dashes and a label for each line.

    The lines of one member of a population, `loss/3` and `val/loss/3`, have one color; all but the
    first kind are dashed. Of very many lines the colors are shades from the first member to the
    last, with one label for all.
    """
    columns = list(dict.fromkeys(map(_column, names)))
    color = lambda i: _COLOURS[i % len(_COLOURS)]
    if columns == names:  # no population
        return [(color(i), "-", name) for i, name in enumerate(names)]
    member = lambda name: name.rpartition("/")[2]
    members = list(dict.fromkeys(map(member, names)))
    colors: Any = map(color, range(len(members)))
    if is_many:
        import matplotlib

        colors = matplotlib.colormaps["viridis"](np.linspace(0, 0.92, len(members)))
    color_of, dashes = dict(zip(members, colors, strict=True)), ["-", (0, (4, 2)), (0, (1, 1.5))]
    counts = collections.Counter(map(_column, names))
    firsts = {column: f"{column}/0 to {column}/{n - 1}" for column, n in counts.items()}
    return [
        (
            color_of[member(name)],
            dashes[columns.index(_column(name)) % len(dashes)],
            firsts.pop(_column(name), None) if is_many else name,
        )
        for name in names
    ]


def _draw_marks(axes, history, x: str, labelled: bool) -> None:
    edge = axes.get_xaxis_transform()
    flags = dict(transform=edge, clip_on=False, in_layout=False, zorder=3)
    for kind, color, size in (("evaluate", "0.6", 3), ("rejected", "#C00000", 8)):
        if steps := [step for step, name, _ in history.marks if name == kind]:
            label = f"rejected ({len(steps):,})" if labelled and kind == "rejected" else None
            at, style = _along(history, steps, x), dict(color=color, markersize=size, label=label)
            axes.plot(at, [0.0] * len(steps), "|", **flags, **style)
    others = [mark for mark in history.marks if mark[1] not in ("evaluate", "rejected")]
    places = _along(history, [step for step, *_ in others], x)
    for at, (_, name, text) in zip(places, others, strict=True):
        axes.axvline(at, color="0.45", linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
        if labelled and len(others) <= 12:
            tells = name in ("thaw", "freeze", "adjust") and len(text) <= 24
            style = dict(rotation=30, fontsize=7, color="0.35", ha="left", va="bottom")
            axes.text(at, 1.02, f"{name} {text * tells}".strip(), transform=edge, **style)


def scatter(
    columns: dict[str, list[Any]],
    values: Sequence[float | None],
    groups: Sequence[str],
    best: int,
    label: str = "value",
) -> Figure:
    """A matplotlib Figure with a panel per column: `values` over the column, colored by group.

    What is no number lies side by side. None and what is not finite are crosses at the upper edge.
    """
    across = 2 if len(columns) == 4 else min(len(columns), 3)
    down = -(-len(columns) // across)
    figure = _figure(0.6 + 2.6 * across, 0.5 + 2.2 * down)
    panels = figure.subplots(down, across, sharey=True, squeeze=False)
    y = np.array([np.nan if x is None else x for x in values], float)
    for axes, (name, column) in zip(panels.flat, columns.items(), strict=False):
        _draw_column(axes, name, column, y, np.array(groups), best)
    if _is_wide(_finite(y)):
        panels[0, 0].set_yscale("log")
    for axes in panels.flat[len(columns) :]:
        axes.set_visible(False)
    for axes in panels[:, 0]:
        axes.set_ylabel(label, fontsize=9)
    handles, labels = panels[0, 0].get_legend_handles_labels()
    where = dict(loc="outside upper right", ncols=len(labels))
    figure.legend(handles, labels, fontsize=8, frameon=False, **where)
    return figure


_GROUP_COLOURS = {"done": "#0072B2", "pruned": "0.6", "failed": "#C00000", "interrupted": "0.6"}


def _draw_column(
    axes, name: str, column: list, y: np.ndarray, groups: np.ndarray, best: int
) -> None:
    there = np.array([x is not None for x in column])
    known = [x for x in column if x is not None]
    if all(isinstance(x, int | float) and not isinstance(x, bool) for x in known):
        x = np.array([np.nan if value is None else value for value in column], float)
        if _is_wide(_finite(x)):
            axes.set_xscale("log")
    else:
        labels = list(dict.fromkeys(map(str, known)))
        at = [np.nan if value is None else labels.index(str(value)) for value in column]
        # side by side, and the same in every picture
        x = np.array(at) + 0.25 * np.cos(2.4 * np.arange(len(column)))
        is_long = sum(map(len, labels)) > 24  # they would run into each other
        style = dict(rotation=20, ha="right") if is_long else {}
        axes.set_xticks(range(len(labels)), labels, **style)
        axes.set_xlim(-0.6, len(labels) - 0.4)
    edge = axes.get_xaxis_transform()
    for group, color in _GROUP_COLOURS.items():
        mine = there & (groups == group)
        shown = mine & np.isfinite(y) & (group != "failed")
        style = dict(linestyle="", color=color, markersize=4, label=group)
        if shown.any():
            axes.plot(x[shown], y[shown], "o", alpha=0.8, markeredgewidth=0, **style)
        if (lost := mine & ~shown).any():
            axes.plot(x[lost], np.full(lost.sum(), 0.97), "x", transform=edge, **style)
    style = dict(color="#D55E00", markersize=11, linestyle="", label="best", zorder=3)
    axes.plot(x[best], y[best], "*", **style)
    axes.set_xlabel(name.replace("_", " "), fontsize=9)
    _quiet(axes)
