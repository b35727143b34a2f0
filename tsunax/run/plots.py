"""Pictures of a history, by matplotlib: the loss, a panel for each metric, the learning rate.

What training and evaluation call by the same name ("accuracy", "val/accuracy") shares a panel. No
state of pyplot is read or written, and nothing is shown.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from tsunax._core import Figure
from tsunax.errors import MissingLibraryError, RowError

_RANKS = {"loss": 0, "learning_rate": 2}  # metrics lie between
_LEFT_OUT = {"epoch", "rejected", "grad_norm", "update_norm", "loss_scale", "dropped"}
_MOST = 12  # names in a legend


def _base(name: str) -> str:
    """The panel of a name: `val/accuracy/3` → accuracy, `1.learning_rate@head` → learning_rate."""
    head, _, tail = name.partition("@")[0].rpartition("/")
    column = head if head and tail.isdigit() else name.partition("@")[0]
    return column.rpartition("/")[2].rpartition(".")[2]


def _panels(history, names: Sequence[str] | None) -> dict[str, list[str]]:
    """Column names by panel: the given ones, else the loss, metrics, the learning rate."""
    if not history.names:
        raise RowError("history", "plot()", "no rows", "at least one", "Nothing was logged yet.")
    panels: dict[str, list[str]] = {}
    if names is not None:
        for name in [names] if isinstance(names, str) else names:
            panels.setdefault(_base(name), []).append(name)
        return panels
    for name in history.names:
        base = _base(name)
        if name.endswith("_per_second") or base in _LEFT_OUT:
            continue
        # a hyperparameter may stand still
        if "/" in name or base in _RANKS or np.unique(history.series(name)[1]).size > 1:
            panels.setdefault(base, []).append(name)
    ordered = sorted(panels, key=lambda base: _RANKS.get(base, 1))
    return {base: panels[base] for base in ordered} or {name: [name] for name in history.names}


def plot(history: Any, names: Sequence[str] | None, x: str) -> Figure:
    """`History.plot`."""
    panels = _panels(history, names)
    along = lambda steps: np.asarray(steps, float)
    if x != "step":
        known = history.series(x)
        along = lambda steps: np.interp(steps, *known)
    lines = {base: {one: history.series(one) for one in found} for base, found in panels.items()}
    figure = new_figure(6.4, 0.6 + 1.8 * len(panels))
    rows = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
    for axes, (base, series) in zip(rows, lines.items(), strict=True):
        draw(axes, base, {name: (along(at), y) for name, (at, y) in series.items()})
        if list(series) != [base] and len(series) <= _MOST:
            axes.legend(fontsize=8, frameon=False)
        for step, name, _ in history.marks:
            if name == "rejected":
                axes.axvline(along(step), ymax=0.04, color="#C00000")
            elif name != "evaluate":
                axes.axvline(along(step), color="0.45", linewidth=0.8, linestyle="--")
    rows[-1].set_xlabel(x, fontsize=9)
    return figure


def new_figure(width: float, height: float) -> Any:
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


def draw(axes: Any, base: str, columns: dict[str, tuple[np.ndarray, np.ndarray]]) -> None:
    """Lines by name, on a logarithmic axis if it is a loss or a rate of a wide range."""
    for name, (x, values) in columns.items():
        marker = "o" if len(values) <= 40 else None
        axes.plot(x, values, label=name, linewidth=1.3, marker=marker, markersize=3)
    values = np.concatenate([values[np.isfinite(values)] for _, values in columns.values()])
    if base in _RANKS and _is_wide(values):
        axes.set_yscale("log")
    axes.set_ylabel(base.replace("_", " "), fontsize=9)
    _quiet(axes)


def _is_wide(values: np.ndarray) -> bool:
    """Whether a logarithmic axis shows more."""
    return bool(values.size and values.min() > 0 and values.max() > 20 * values.min())


def _quiet(axes) -> None:
    axes.tick_params(which="both", labelsize=8)
    axes.grid(color="0.92", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def scatter(
    columns: dict[str, list[Any]], values: Sequence[float | None], groups: Sequence[str], best: int
) -> Figure:
    """A matplotlib Figure with a panel per column: `values` over the column, colored by group.

    What is no number lies side by side; None and what is not finite is left out.
    """
    figure = new_figure(0.6 + 2.6 * len(columns), 2.7)
    panels = figure.subplots(1, len(columns), sharey=True, squeeze=False)[0]
    y = np.array([np.nan if x is None else x for x in values], float)
    for axes, (name, column) in zip(panels, columns.items(), strict=True):
        is_number = all(isinstance(x, int | float | None) for x in column)
        x = np.array([np.nan if v is None else v if is_number else str(v) for v in column])
        if is_number and _is_wide(x[np.isfinite(x)]):
            axes.set_xscale("log")
        axes.tick_params(axis="x", rotation=0 if is_number else 20)
        for group in dict.fromkeys(groups):
            mine = np.array(groups) == group
            axes.plot(x[mine], y[mine], "o", markersize=4, label=group)
        axes.plot(x[best : best + 1], y[best : best + 1], "*", markersize=11, label="best")
        axes.set_xlabel(name.replace("_", " "), fontsize=9)
        _quiet(axes)
    if _is_wide(y[np.isfinite(y)]):
        panels[0].set_yscale("log")
    panels[0].set_ylabel("value", fontsize=9)
    panels[-1].legend(fontsize=8, frameon=False)
    return figure
