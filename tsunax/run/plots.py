"""Pictures of a history, by matplotlib: the loss, a panel for each metric, the learning rate.

Columns of training and evaluation with the same name ("accuracy", "val/accuracy") share a panel. No
state of pyplot is read or written, and nothing is shown.
"""

import io
import itertools
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tsunax._core import Figure, libraries, tables
from tsunax.errors import HyperparameterError, RowError

_RANKS = {"loss": 0, "learning_rate": 2}  # metrics come between
_MOST_NAMES = 12  # names in a legend
_LEGEND: Any = {"fontsize": 8, "title_fontsize": 8, "edgecolor": "none"}


def _panel_of(name: str) -> str:
    """The panel of a name: `val/accuracy/3` → accuracy, `1.learning_rate@head` → learning_rate."""
    head, _, tail = name.partition("@")[0].rpartition("/")
    column = head if head and tail.isdigit() else name.partition("@")[0]
    return column.rpartition("/")[2].rpartition(".")[2]


def _panels(history, names: Sequence[str] | None) -> dict[str, dict[str, Any]]:
    """{panel: {name: series}} of `names`, or of the loss, metrics, the learning rate."""
    has_panel = lambda name: not (name.endswith("_per_second") or _panel_of(name) in tables.ASIDE)
    chosen = [names] if isinstance(names, str) else names or list(filter(has_panel, history.names))
    panels: dict[str, dict[str, Any]] = {}
    for name in chosen or history.names:
        panels.setdefault(_panel_of(name), {})[name] = history.series(name)
    rank = lambda panel: 0 if names else _RANKS.get(panel, 1)
    return {panel: panels[panel] for panel in sorted(panels, key=rank)}


def exponential_average(ages: np.ndarray, values: np.ndarray, smooth: float) -> np.ndarray:
    """The bias-corrected exponential average of the finite values, with the weight smooth^age.

    Ages are in rows of the history: an evaluation, once in many rows, hardly looks back.
    """
    average, weight, last_age, averages = 0.0, 0.0, 0.0, np.full(len(values), np.nan)
    for i, (age, value) in enumerate(zip(ages, values, strict=True)):
        if np.isfinite(value):
            decay, last_age = smooth ** (age - last_age), age
            average, weight = decay * average + value, decay * weight + 1
        if weight:
            averages[i] = average / weight
    return averages


def plot(history: Any, names: Sequence[str] | None, x: str, smooth: float) -> Figure:
    if not 0 <= smooth < 1:
        raise HyperparameterError("smooth", "plot()", smooth, "0 <= smooth < 1")
    if not history.names:
        raise RowError("history", "plot()", "no rows", "at least one")
    panels, all_panels = _panels(history, names), _panels(history, None)
    is_moving = lambda columns: any(len(np.unique(values)) > 1 for _, values in columns.values())
    still_panels = {panel: series for panel, series in all_panels.items() if not is_moving(series)}
    moving_panels = {
        panel: series
        for panel, series in panels.items()
        if names or panel == "loss" or panel not in still_panels
    }
    panels = moving_panels or panels
    lines: dict[str, Any] = {}
    place_of = _place_on_axis(history, x)
    row_steps = np.median(np.diff(history["step"])) if len(history["step"]) > 1 else 1
    least_height = 1.8 if len(panels) < 5 else 1.3
    heights = [max(least_height, 0.3 + 0.17 * _legend_rows(series)) for series in panels.values()]
    figure = new_figure(6.4, 0.6 + sum(heights))
    grid = {"sharex": True, "squeeze": False, "height_ratios": heights}
    panel_axes = figure.subplots(len(panels), **grid)[:, 0]
    for axes, (panel, series) in zip(panel_axes, panels.items(), strict=True):
        columns = {name: (place_of(steps), y) for name, (steps, y) in series.items()}
        if not smooth or panel == "learning_rate":
            lines |= draw(axes, panel, columns)
            continue
        # A number that is mostly constant jumps: its average would have values that it never had.
        averages = {
            name: (places, y)
            if _is_mostly_constant(y)
            else (places, exponential_average(series[name][0] / row_steps, y, smooth))
            for name, (places, y) in columns.items()
        }
        lines |= (averaged_lines := draw(axes, panel, averages))
        for name, line in averaged_lines.items():
            axes.plot(*columns[name], color=line.get_color(), alpha=0.3, linewidth=0.8, zorder=1)
    figure.align_ylabels(panel_axes)
    _whole_ticks(panel_axes[-1].xaxis, history["step"] if x == "step" else history.series(x)[1])
    panel_axes[-1].set_xlabel(x.replace("_", " "), fontsize=9)
    title, handles = _member_legend(lines, still_panels)
    # Constants have no panel: their values are in the line above, or in the legend of members.
    constants = [
        named_series
        for panel in still_panels
        if panel not in title and not names
        for named_series in still_panels[panel].items()
    ]
    text = ", ".join(f"{name} {values[-1]:.4g}" for name, (_, values) in constants)
    text = textwrap.shorten(text, 90, placeholder=" …")
    panel_axes[0].set_title(text, loc="left", fontsize=8, color="0.4")
    handles |= _draw_marks(panel_axes, history.marks, place_of)
    if handles:
        # About 100 characters fit into the width; the line of an entry takes the space of 8.
        ncols = max(100 // (max(map(len, handles)) + 8), 1)
        title = ", ".join(title).replace("_", " ")
        legend_options = {"loc": "outside upper center", "ncols": ncols, "title": title}
        figure.legend(handles.values(), handles, **legend_options, **_LEGEND)
        figure.set_figheight(figure.get_figheight() + 0.2 * len(handles) / ncols)
    return figure


def _place_on_axis(history: Any, x: str) -> Callable[[Any], np.ndarray]:
    """A function from steps to places on the axis of the column `x`.

    A count that many rows share, such as "epoch", grows evenly between the steps of its changes.
    """
    if x == "step":
        return lambda steps: np.asarray(steps, float)
    steps, values = history.series(x)
    changes = np.flatnonzero(~_are_repeated(values))
    is_count = np.array_equal(values, np.round(values)) and np.all(values[1:] >= values[:-1])
    is_count = is_count and np.isfinite(values[-1])
    if not is_count or len(changes) == len(values) - 1:
        return lambda step: np.interp(step, steps, values)
    start = 0 if values[0] == 0 else steps[0] - 1
    change_steps = [start, *(steps[changes] + steps[changes + 1] - 1) / 2]
    # Assume that the last epoch is as long as the previous one, unless it is longer already.
    last_step = max(
        steps[-1],
        change_steps[-1] + (change_steps[-1] - change_steps[-2] if len(change_steps) > 1 else 0),
    )
    counts = [values[0], *values[changes + 1], values[-1] + 1]
    return lambda step: np.interp(step, [*change_steps, last_step], counts)


def _member_legend(
    lines: dict[str, Any], still_panels: dict[str, Any]
) -> tuple[list[str], dict[str, Any]]:
    """For a legend: the constants in which members differ, and {number and constants: line}."""
    kinds = tables.families(lines, 2)
    names = max(kinds.values(), key=len)
    if len(names) == 1:
        return [], {}
    numbers_of = lambda names: [name.rpartition("/")[2] for name in names]
    numbers = numbers_of(names)
    member_constants = {
        panel: series
        for panel, series in reversed(still_panels.items())
        if numbers_of(series) == numbers
    }
    last_values = zip(
        *([f"{y[-1]:.3g}" for _, y in series.values()] for series in member_constants.values()),
        strict=True,
    )
    texts = ["  " + ", ".join(values) for values in last_values] or [""] * len(names)
    labelled = sorted({*np.linspace(0, len(names) - 1, 16).round().astype(int)})
    handles = {f"/{numbers[i]}{texts[i]}": lines[names[i]] for i in labelled}
    # The legend also shows the dashes of each family with several members, by its first line.
    first_lines = {kind: lines[first] for kind, (first, *more_names) in kinds.items() if more_names}
    return list(member_constants), handles | {
        kind: line for kind, line in first_lines.items() if "/" in kind
    }


def _draw_marks(
    panel_axes: Sequence[Any], marks: Sequence[tuple[int, str, str]], place_of
) -> dict[str, Any]:
    """Red ticks for rejected steps, dashes for other events, which alternate at one step."""
    events = dict.fromkeys((name, step) for step, name, _ in marks if name != "evaluate")
    names = [*dict.fromkeys(name for name, _ in events)]
    handles: dict[str, Any] = {}
    for name, step in events:
        i = names.index(name)
        style = {"color": f"C{4 + i % 6}", "linestyle": (4 * i, (4, 4)), "linewidth": 0.9}
        if name == "rejected":
            style = {"color": "#C00000", "ymax": 0.04}
        for axes in panel_axes:
            handles[name] = axes.axvline(place_of(step), **style)
    return handles


def new_figure(width: float, height: float) -> Any:
    matplotlib = libraries.library("matplotlib.figure", "plot()", "plot")
    figure = matplotlib.Figure(figsize=(width, height), dpi=150, layout="constrained")

    def png() -> bytes:
        figure.savefig(file := io.BytesIO(), format="png")
        return file.getvalue()

    figure._repr_png_ = png  # IPython calls it
    return figure


def _whole_ticks(axis: Any, values: np.ndarray) -> None:
    """Put ticks at whole numbers, if the values are whole numbers."""
    if np.array_equal(values, np.round(values), equal_nan=True):
        locator: Any = axis.get_major_locator()
        locator.set_params(nbins=6, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1)
        axis.set_major_formatter("{x:,.0f}")


def log_ticks(axis: Any, values: np.ndarray) -> None:
    """Label a logarithmic axis: also between powers of ten if it has only a few powers."""
    subs = (1.0, 2.0, 5.0) if max(values) < 1000 * min(values) else (1.0,)
    axis.get_major_locator().set_params(subs=subs)
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter("")


def _last_finite_value(line: Any) -> float:
    """The height of a line at its end, also if it ends in NaN."""
    values = np.asarray(line.get_ydata(), float)
    finite_values = values[np.isfinite(values)]
    return finite_values[-1] if finite_values.size else -np.inf


def _legend_rows(columns: dict[str, Any]) -> int:
    """The most rows that the legend of a panel has."""
    singles = [names for names in tables.families(columns, 2).values() if len(names) == 1]
    return min(len(singles), _MOST_NAMES) if len(columns) > 1 else 0


def _dashes(columns: dict[str, Any]) -> dict[str, Any]:
    """The dashes of lines that coincide: each is seen in a part of its length."""
    names_by_values: dict[bytes, list[str]] = {}
    for name, (places, values) in columns.items():
        content = np.asarray(places, float).tobytes() + np.asarray(values, float).tobytes()
        names_by_values.setdefault(content, []).append(name)
    groups = [names for names in names_by_values.values() if len(names) > 1]
    return {
        name: (4 * i, (4, 4 * (len(names) - 1))) for names in groups for i, name in enumerate(names)
    }


def _are_repeated(values: np.ndarray) -> np.ndarray:
    """Whether each value after the first is finite and equal to the previous value."""
    return (values[1:] == values[:-1]) & np.isfinite(values[1:])


def _is_mostly_constant(values: np.ndarray) -> bool:
    return 2 * np.sum(_are_repeated(values)) >= len(values) - 1


def _with_jumps(x: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Points of a line that jumps if the number is mostly constant, and the indices of the rows.

    A number that changes between two rows, but not before and after these rows, has jumped: it
    never had the values between, so the line gets a step there.
    """
    is_flat = _are_repeated(values)
    # whether the line is flat before and after each change, also at its ends
    is_flat_around = np.concatenate([[True], is_flat, [True]])
    jumps = np.flatnonzero(~is_flat & is_flat_around[:-2] & is_flat_around[2:]) + 1
    if not _is_mostly_constant(values):
        jumps = jumps[:0]
    # Each jump adds a point before its row.
    points = np.arange(len(values)) + np.searchsorted(jumps, np.arange(len(values)), "right")
    return np.insert(x, jumps, x[jumps - 1]), np.insert(values, jumps, values[jumps]), points


def _draw_zeros(axes: Any, lines: dict[str, Any], lowest_value: float) -> None:
    """Draw the zeros of a logarithmic axis below the values, on a line with the label 0."""
    place = lowest_value / 3
    for line in lines.values():
        line.set_ydata(np.where(np.asarray(line.get_ydata()) == 0, place, line.get_ydata()))
    axes.axhline(place, color="0.8", linewidth=0.7, zorder=0)
    axes.text(0, place, "0 ", transform=axes.get_yaxis_transform(), ha="right", va="center", size=8)
    axes.set_ylim(bottom=place / 1.5)


def draw(axes: Any, panel: str, columns: dict[str, Any]) -> dict[str, Any]:
    """Draw lines and return them by name. A loss with a wide range gets a logarithmic axis."""
    viridis, lines = libraries.library("matplotlib", "plot()", "plot").colormaps["viridis"], {}
    kinds, dashes = tables.families(columns, 2), itertools.cycle(("-", "--", ":", "-."))
    single_names = [names[0] for names in kinds.values() if len(names) == 1]
    many_colors = libraries.library("matplotlib", "plot()", "plot").colormaps["turbo"]
    colors = many_colors(np.linspace(0.05, 0.95, len(single_names)))
    color_of = dict(zip(single_names, colors, strict=True)) if len(colors) > 10 else {}
    dashes_of, end = _dashes(columns), f"/{panel.replace(' ', '_')}"
    for names in kinds.values():
        is_single = len(names) == 1
        dash = "-" if is_single else next(dashes)
        for name, color_share in zip(names, np.linspace(0, 0.9, len(names)), strict=True):
            x, values, points = _with_jumps(*columns[name])
            max_markers = 40 if len(names) <= _MOST_NAMES and name not in dashes_of else 1
            style: Any = {
                "linestyle": dashes_of.get(name, dash) if is_single else dash,
                "color": color_of.get(name) if is_single else viridis(color_share),
                "marker": "o" if len(points) <= max_markers else None, "markersize": 3,
                "markevery": points,
            }  # fmt: skip
            label = name.lstrip("_")
            if label.startswith("watch/"):
                label = label.removeprefix("watch/").removesuffix(end)
            (lines[name],) = axes.plot(x, values, label=label, linewidth=1.3, **style)
    single_lines = [line for name, line in lines.items() if name in kinds]
    if len(single_lines) > _MOST_NAMES and panel.endswith("norm"):
        # Of many layers the legend names the lowest and the highest.
        by_height = sorted(single_lines, key=_last_finite_value)
        half = _MOST_NAMES // 2
        single_lines = [*reversed(by_height[-half:]), *reversed(by_height[:half])]
    if list(columns) != [panel] and 0 < len(single_lines) <= _MOST_NAMES:
        # To the right of the panel, because inside it could hide points.
        place: Any = {"loc": "upper left", "bbox_to_anchor": (1, 1)}
        legend = axes.legend(handles=single_lines, **place, **_LEGEND)
        for handle in legend.legend_handles:
            handle.set_linestyle("-")
    all_values = np.concatenate([values for _, values in columns.values()])
    finite_values = all_values[np.isfinite(all_values)]
    if panel.endswith("norm"):
        finite_values = finite_values[finite_values > 0]
    if (
        panel.endswith(("loss", "norm"))
        and finite_values.size
        and 0 < 20 * finite_values.min() < finite_values.max()
    ):
        axes.set_yscale("log", nonpositive="clip")
        log_ticks(axes.yaxis, finite_values)
        if finite_values.size and np.any(all_values == 0):
            _draw_zeros(axes, lines, finite_values.min())
    else:
        axes.ticklabel_format(axis="y", useOffset=False)
        _whole_ticks(axes.yaxis, all_values)
    axes.set_ylabel(textwrap.fill(panel.replace("_", " "), 16), fontsize=9)
    axes.tick_params(which="both", labelsize=8)
    axes.grid(color="0.92", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return lines
