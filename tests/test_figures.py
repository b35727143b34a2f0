"""Pictures of a history: what is drawn is what was measured, from one point to 100,000, and pyplot stays out of it."""

import itertools
import subprocess
import sys
import warnings

import numpy as np
import pytest
from tests.helpers import need
from tsunax.errors import HyperparameterError, MissingLibraryError, RowError
from tsunax.run.history import History
from tsunax.timelines.comparing import Comparison


def made(n=50, every=10) -> History:
    history = History()
    for step in range(n):
        row = {"loss": 3.0 - step / n, "b1": 0.9, "grad_norm": float(step), "epoch": step // 10}
        row["learning_rate"] = 0.1 - step / 1000
        row |= {"accuracy": step / n, "steps_per_second": float(step)}
        if step % every == every - 1:
            row |= {"val/loss": 2.0 - step / n}
            history.mark("evaluate", step)
        history.add(row, step)
    return history


def lines(axes):
    """{label: (x, y)} of what has a name."""
    return {line.get_label(): line.get_data() for line in axes.lines if line.get_label()[0] != "_"}


def labels(figure):
    return [axes.get_ylabel() for axes in figure.axes]


@pytest.fixture(autouse=True)
def _matplotlib(request):
    if "text" not in request.node.name:
        need("matplotlib")


# --------------------------------------------------------------------------------------------------------- matplotlib


@pytest.mark.medium
def test_the_panels_are_loss_metrics_and_rate():
    figure = made().plot()
    assert labels(figure) == ["loss", "accuracy", "learning rate"]
    loss, accuracy, rate = map(lines, figure.axes)
    assert list(loss) == ["loss", "val/loss"] and list(accuracy) == ["accuracy"] and list(rate) == ["learning_rate"]
    np.testing.assert_array_equal(loss["loss"], [np.arange(50), 3 - np.arange(50) / 50])
    np.testing.assert_array_equal(loss["val/loss"][0], [9, 19, 29, 39, 49])
    assert [axes.get_legend() is not None for axes in figure.axes] == [True, False, False]


def test_names_choose_and_share_panels():
    figure = made().plot(names=["grad_norm", "loss", "val/loss", "b1"])
    assert labels(figure) == ["grad norm", "loss", "b1"]
    assert list(lines(figure.axes[1])) == ["loss", "val/loss"]
    assert labels(made().plot(names="b1")) == ["b1"]


def test_x_may_be_a_column():
    figure = made().plot(names=["val/loss"], x="epoch")
    np.testing.assert_array_equal(lines(figure.axes[0])["val/loss"][0], [1, 2, 3, 4, 5])  # at the ends of epochs
    assert figure.axes[-1].get_xlabel() == "epoch"


@pytest.mark.parametrize("every", [1, 10, 100])
def test_the_rows_and_events_of_an_epoch_lie_between_its_ends(every):
    history = History()
    for step in range(every, 1001, every):
        history.add({"loss": 1 / step, "epoch": (step - 1) // 250}, step)
    for step in (125, 375, 1000):
        history.mark("adjust", step)
    (axes,) = history.plot(x="epoch").axes
    np.testing.assert_allclose(lines(axes)["loss"][0], np.arange(every, 1001, every) / 250, atol=every / 250)
    assert np.all(np.diff(lines(axes)["loss"][0]) > 0)  # no vertical lines
    marks = [line.get_xdata()[0] for line in axes.lines if line.get_linestyle() == "--"]
    np.testing.assert_allclose(marks, [0.5, 1.5, 4], atol=every / 250)


def test_lines_are_averages_over_pale_rows():
    """As TensorBoard's smoothing, debiased; of rates and of numbers that jump there is no average."""
    history, rng = History(), np.random.default_rng(0)
    values = rng.normal(size=40)
    values[[0, 7]] = np.nan, np.inf
    for step, value in enumerate(values):
        evaluation = {"val/loss": float(step)} if step % 10 == 9 else {}
        row = {"loss": value, "flag": float(step > 20), "learning_rate": 0.1 / (step + 1)}
        history.add(row | evaluation, step)
    loss, flag, rate = history.plot(names=["loss", "flag", "learning_rate"], smooth=0.8).axes
    finite = np.isfinite(values)
    weights = np.array([[0.8 ** (i - j) * (j <= i) for j in range(40)] for i in range(40)])
    means = weights[1:, finite] @ values[finite] / weights[1:, finite].sum(1)
    averages, rows = loss.lines
    np.testing.assert_allclose(averages.get_ydata()[1:], means)
    assert np.isnan(averages.get_ydata()[0]) and averages.get_color() == rows.get_color() and rows.get_alpha() == 0.3
    np.testing.assert_array_equal(rows.get_ydata(), values)
    assert set(flag.lines[0].get_ydata()) == {0, 1}
    evaluation, _ = history.plot(names=["val/loss"], smooth=0.8).axes[0].lines
    expected = (19 + 9 * 0.8**10) / (1 + 0.8**10)
    np.testing.assert_allclose(evaluation.get_ydata()[:2], [9, expected])
    np.testing.assert_array_equal(rate.lines[0].get_ydata(), history["learning_rate"])
    with pytest.raises(HyperparameterError, match=r"smooth at plot\(\): got 1"):
        history.plot(smooth=1)


@pytest.mark.parametrize("smooth", [0.0, 0.9])
def test_a_history_without_rows_has_no_plot(smooth):
    with pytest.raises(RowError, match=r"history at plot\(\): got no rows, expected at least one"):
        History().plot(smooth=smooth)


def test_a_number_that_jumps_is_no_ramp():
    """At the row before the jump, where a callback adjusts it; a warm-up and a noisy number stay as they are."""
    history, noise = History(), np.random.default_rng(0).normal(size=20)
    for i, step in enumerate(range(100, 2001, 100)):
        row = {"learning_rate": 0.1 if step <= 500 else 0.01, "warm/learning_rate": min(step, 400) / 400}
        history.add(row | {"loss": noise[i], "once": float(step > 500)} | ({"cut": 0.5} if step > 700 else {}), step)
    rate, warm, loss, once, cut = (
        history.plot(names=[name]).axes[0].lines[0]
        for name in ("learning_rate", "warm/learning_rate", "loss", "once", "cut")
    )
    steps = [*range(100, 501, 100), *range(500, 2001, 100)]
    for line, before, after in ((rate, 0.1, 0.01), (once, 0, 1)):
        np.testing.assert_array_equal(line.get_data(), [steps, [before] * 5 + [after] * 16])
        marked = [steps[i] for i in line.get_markevery()]
        assert marked == history["step"].tolist() and steps[5] == 500 and 5 not in line.get_markevery()
    for line, name in ((warm, "warm/learning_rate"), (loss, "loss"), (cut, "cut")):
        np.testing.assert_array_equal(line.get_data(), history.series(name))


def test_marks():
    history = made()
    history.mark("rejected", 7)
    history.mark("thaw", 20, "body/**")
    history.mark("stop", 49, "enough")
    for axes in history.plot().axes:
        assert [line.get_xdata() for line in axes.lines if line.get_linestyle() == "--"] == [[20, 20], [49, 49]]
        assert [line.get_xdata() for line in axes.lines if line.get_color() == "#C00000"] == [[7, 7]]


@pytest.mark.medium
@pytest.mark.parametrize("n", [1, 2, 40, 41, 10_000])
def test_from_one_point_to_many(n):
    history, rng = History(), np.random.default_rng(0)
    noise = rng.normal(size=n)
    for step in range(n):
        history.add({"loss": 5 + noise[step], "accuracy": 0.5}, 10 * step)
    figure = history.plot()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a layout that did not fit
        assert figure._repr_png_()[:4] == b"\x89PNG"
    (axes,) = figure.axes
    (line,) = axes.lines
    assert len(line.get_xdata()) == n
    assert (line.get_marker() == "o") == (n <= 40)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("values", "scale"), [([1.0, 30.0], "log"), ([1.0, 2.0], "linear"), ([0.0, 30.0], "linear"), ([np.nan], "linear")]
)
def test_a_wide_range_is_logarithmic(values, scale):
    history = History()
    for step, value in enumerate(values):
        history.add({"loss": value}, step)
    figure = history.plot()
    assert figure.axes[0].get_yscale() == scale and figure._repr_png_()


@pytest.mark.parametrize(
    ("values", "numbers"),
    [
        ([9.0, 0.3], ["0.5", "1", "2", "5"]),
        ([2.0, 0.05], ["0.05", "0.1", "0.2", "0.5", "1", "2"]),
        ([100.0, 1e-5], ["0.001"]),
    ],
)
def test_a_logarithmic_axis_has_labels_between_powers_of_ten(values, numbers):
    history = History()
    for step, value in enumerate(values):
        history.add({"loss": value}, step)
    (axes,) = history.plot().axes
    format = axes.yaxis.get_major_formatter()
    assert set(numbers) <= {format(tick) for tick in shown_ticks(axes.yaxis)}


@pytest.mark.medium
def test_no_legend_hides_a_point():
    figure = made().plot(names=["loss", "val/loss", "accuracy", "learning_rate", "b1", "grad_norm"])
    figure.draw_without_rendering()
    legends = [(axes, axes.get_legend()) for axes in figure.axes if axes.get_legend()]
    assert len(legends) == 1
    for axes, legend in legends:
        assert not legend.get_window_extent().overlaps(axes.get_window_extent())


@pytest.mark.medium
def test_pyplot_is_not_touched(tmp_path):
    code = """
import sys
from tsunax.run.history import History
from tsunax.timelines.comparing import Comparison
assert "matplotlib" not in sys.modules and "rich" not in sys.modules
history = History()
history.add({"loss": 1.0}, 1)
history.plot().savefig(sys.argv[1])
assert "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "run.png")], check=True)
    assert (tmp_path / "run.png").read_bytes()[:4] == b"\x89PNG"


def columns(n=60, **functions) -> History:
    """A history of `n` steps, with a column for each function of the step."""
    history = History()
    for step in range(1, n + 1):
        history.add({name: float(function(step)) for name, function in functions.items()}, step)
    return history


def population(members=5, n=60) -> History:
    """Members that differ in a constant learning rate, with evaluations of each."""
    history = History()
    for step in range(1, n + 1):
        row = {f"loss/{i}": 2.0 / (1 + step * (i + 1)) for i in range(members)}
        row |= {f"val/loss/{i}": 2.5 / (1 + step * (i + 1)) for i in range(members)}
        history.add(row | {f"learning_rate/{i}": 10.0 ** (i - members) for i in range(members)}, step)
    return history


def overlapping_labels(figure) -> list[tuple[str, str]]:
    """Pairs of texts whose boxes overlap in the picture, and texts that reach beyond its edge."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    renderer, drawn = FigureCanvasAgg(figure).get_renderer(), []
    with pytest.MonkeyPatch.context() as patch:  # those of ticks outside of the view exist, and are not drawn
        patch.setattr(Text, "draw", lambda text, renderer: drawn.append(text))
        figure.draw(renderer)
    drawn = [text for text in drawn if text.get_visible() and text.get_text().strip()]
    boxes = [(text.get_text(), text.get_window_extent(renderer).padded(-1)) for text in drawn]
    outside = [(text, "edge") for text, box in boxes if not figure.bbox.x0 <= box.x0 <= box.x1 <= figure.bbox.x1]
    outside += [(text, "edge") for text, box in boxes if not figure.bbox.y0 <= box.y0 <= box.y1 <= figure.bbox.y1]
    assert len(boxes) > 4
    return outside + [(one, other) for (one, a), (other, b) in itertools.combinations(boxes, 2) if a.overlaps(b)]


def shown_ticks(axis) -> list[float]:
    """The major ticks in the limits of an axis."""
    low, high = sorted(axis.get_view_interval())
    return [tick for tick in axis.get_majorticklocs() if low <= tick <= high]


@pytest.mark.medium
def test_a_constant_has_no_panel_and_is_written_above():
    history = columns(loss=lambda t: 2 / t, learning_rate=lambda t: 1e-3, accuracy=lambda t: t / 60)
    history.add({"val/f1": 0.875}, 60)  # one evaluation so far
    figure = history.plot()
    assert labels(figure) == ["loss", "accuracy"]
    assert figure.axes[0].get_title(loc="left") == "val/f1 0.875, learning_rate 0.001"
    assert labels(history.plot(names=["learning_rate"])) == ["learning rate"]  # who asks for it sees it
    assert labels(columns(learning_rate=lambda t: 0.1).plot()) == ["learning rate"]  # there is nothing else
    assert labels(columns(loss=lambda t: 0.6931).plot()) == ["loss"]


@pytest.mark.medium
def test_a_schedule_is_linear_however_wide_it_is():
    history = columns(loss=lambda t: 1 / t, learning_rate=lambda t: 10.0**-t, kl_loss=lambda t: 1 / t**2)
    assert [axes.get_yscale() for axes in history.plot().axes] == ["log", "log", "linear"]


@pytest.mark.medium
def test_steps_epochs_and_counts_have_ticks_at_whole_numbers():
    one = columns(n=1, loss=lambda t: 2.3).plot().axes[0]
    assert shown_ticks(one.xaxis) == [1]
    few = columns(n=3, loss=lambda t: 2.3 / t, evaluations=lambda t: t).plot()
    assert shown_ticks(few.axes[1].xaxis) == [1, 2, 3] and shown_ticks(few.axes[1].yaxis) == [1, 2, 3]
    by_epoch = columns(loss=lambda t: 2.3 / t, epoch=lambda t: t // 25).plot(x="epoch").axes[0]
    assert shown_ticks(by_epoch.xaxis) == [0, 1, 2]
    long = columns(loss=lambda t: 2.3 / t)
    long.add({"loss": 0.5}, 1_000_000)
    axes = long.plot().axes[0]
    format = axes.xaxis.get_major_formatter()
    assert "400,000" in [format(tick) for tick in shown_ticks(axes.xaxis)]
    hours = columns(loss=lambda t: 2.3 / t, hours=lambda t: t / 60).plot(x="hours").axes[0]
    np.testing.assert_allclose(shown_ticks(hours.xaxis), [0, 0.2, 0.4, 0.6, 0.8, 1])


@pytest.mark.medium
def test_marks_are_named_once_and_those_of_one_step_do_not_cover_each_other():
    history = made()
    for name, step in [("thaw", 20), ("adjust", 20), ("rejected", 7), ("thaw", 30), ("evaluate", 49)]:
        history.mark(name, step)
    figure = history.plot()
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["thaw", "adjust", "rejected"]
    at_20 = [line for line in figure.axes[0].lines if list(line.get_xdata()) == [20, 20]]
    (first, (on, off)), (second, other) = (line._unscaled_dash_pattern for line in at_20)
    assert on == off == second - first and other == (on, off)  # one draws in the gaps of the other
    assert len({line.get_color() for line in at_20}) == 2


@pytest.mark.medium
def test_members_are_named_with_their_constant():
    figure = population().plot()
    (axes,) = figure.axes  # constant learning rates have no panel
    (legend,) = figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names == ["/0  1e-05", "/1  0.0001", "/2  0.001", "/3  0.01", "/4  0.1", "val/loss"]
    assert legend.get_title().get_text() == "learning rate"
    of = {line.get_label(): line for line in axes.lines}
    assert of["loss/3"].get_color() == of["val/loss/3"].get_color() != of["loss/2"].get_color()
    assert (of["loss/3"].get_linestyle(), of["val/loss/3"].get_linestyle()) == ("-", "--")
    shown = [handle.get_color() for handle in legend.legend_handles[:5]]
    assert shown == [of[f"loss/{i}"].get_color() for i in range(5)]


@pytest.mark.medium
def test_members_are_named_with_all_of_their_constants_whatever_is_drawn():
    history = population()
    decay = {f"weight_decay/{i}": 0.1 * (i % 2) for i in range(5)}
    history.add(decay, 61)
    figure = history.plot(names=[f"loss/{i}" for i in range(5)])
    (legend,) = figure.legends
    names = [text.get_text() for text in legend.get_texts()]
    assert names == ["/0  1e-05, 0", "/1  0.0001, 0.1", "/2  0.001, 0", "/3  0.01, 0.1", "/4  0.1, 0"]
    assert legend.get_title().get_text() == "learning rate, weight decay"
    assert figure.axes[0].get_title(loc="left") == ""


@pytest.mark.medium
def test_constants_of_others_are_not_those_of_members():
    names = ["critic/learning_rate", "actor/learning_rate"]  # two, as there are members, and not theirs
    rates = {name: lambda t: 0.1 for name in names}
    figure = columns(**{"loss/0": lambda t: 1 / t, "loss/1": lambda t: 2 / t}, **rates).plot()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["/0", "/1"]
    assert figure.axes[0].get_title(loc="left") == "critic/learning_rate 0.1, actor/learning_rate 0.1"


@pytest.mark.medium
def test_members_of_two_states_differ_in_their_dashes():
    names = [f"{state}/loss/{i}" for state in ("actor", "critic") for i in range(3)]
    figure = columns(**{name: lambda t: 1 / t for name in names}).plot()
    assert [line.get_linestyle() for line in figure.axes[0].lines] == ["-"] * 3 + ["--"] * 3
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert texts == ["/0", "/1", "/2", "actor/loss", "critic/loss"]


@pytest.mark.medium
def test_of_many_members_some_are_named():
    (legend,) = population(40).plot().legends
    names = [text.get_text().split()[0] for text in legend.get_texts()]
    assert names[0] == "/0" and names[-2:] == ["/39", "val/loss"] and len(names) == 17


def crowded() -> History:
    """Long names, a dozen metrics, marks close to each other."""
    names = [f"metric_{i}_of_a_user_with_a_long_name" for i in range(11)]
    history = columns(loss=lambda t: 1 / t, **{name: lambda t: t**0.5 for name in names}, _hidden=lambda t: t)
    for i in range(30):
        history.mark(f"event_{i % 7}_of_a_user_with_a_name", 20 + i // 3)
    return history


@pytest.mark.parametrize("spike, scale", [(100.0, "log"), (3.0, "linear")])
def test_the_legend_of_a_comparison_covers_no_curve(spike, scale):
    """A jump makes the axis logarithmic, as in the plot of a history."""
    histories = made(), columns(loss=lambda t: spike if t == 20 else 1.0)
    figure = Comparison(("a", "b"), (None, None), {}, ([], []), histories, [40], 40, ["state.params"]).plot()
    (axes,), (legend,) = figure.axes, figure.legends
    figure.draw_without_rendering()
    assert axes.get_legend() is None and not legend.get_window_extent().overlaps(axes.get_window_extent())
    words = [text.get_text() for text in legend.get_texts()]
    assert words == ["a", "b", "first common checkpoint with other bits"]
    assert axes.get_yscale() == scale


CROWDED = {"usual": made, "crowded": crowded, "population": population, "40 members": lambda: population(40)}


def test_a_name_with_a_leading_underscore_is_in_the_legend():
    axes = columns(_x=lambda t: t, **{"val/_x": lambda t: 2 * t}).plot().axes[0]  # matplotlib leaves "_x" out
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["x", "val/_x"]


@pytest.mark.medium
@pytest.mark.parametrize("name", CROWDED)
def test_no_labels_overlap(name):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert overlapping_labels(CROWDED[name]().plot()) == []


# -------------------------------------------------------------------------------------------------------------- errors


def test_wrong_names():
    with pytest.raises(RowError, match="Did you mean 'accuracy'"):
        made().plot(names=["acuracy"])
    with pytest.raises(RowError, match="Did you mean 'epoch'"):
        made().plot(x="epochs")


def test_without_matplotlib_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingLibraryError, match=r"pip install 'matplotlib>=3.9' .the extra 'plot'"):
        made().plot()


def test_a_population_is_one_panel_for_each_number():
    history = History()
    for step in range(3):
        history.add(
            {f"{name}/{i}": 1.0 + i + step for i in range(20) for name in ("loss", "val/loss", "accuracy")}, step
        )
    loss, accuracy = history.plot().axes
    assert [loss.get_ylabel(), accuracy.get_ylabel()] == ["loss", "accuracy"]
    assert len(loss.lines) == 40 and len(accuracy.lines) == 20 and loss.get_legend() is None


@pytest.mark.parametrize("smooth", [0, 0.9])
def test_infinite_numbers_are_drawn_without_a_warning_and_are_no_constant(smooth):
    """Warnings are errors here. A line that ends in infinity is a curve up to there, without jumps."""
    history, finite = History(), [1.0, 1.5, 1.75]
    for step, value in enumerate([*finite, *[np.inf] * 9]):
        others = {"loss/1": 2.0, "loss/2": -np.inf, "scale": value}
        history.add({"loss/0": value, **others}, step)
    loss, _ = history.plot(smooth=smooth).axes
    drawn = {line.get_label(): line for line in loss.lines if not line.get_alpha()}
    x, y = drawn["loss/0"].get_data()
    assert len(x) == 12 and drawn["loss/0"].get_markevery().tolist() == list(range(12))
    if not smooth:
        np.testing.assert_array_equal(y, [*finite, *[np.inf] * 9])
    history.plot(names=["loss/1"], x="scale", smooth=smooth)
