"""Pictures of a history: what is drawn is what was measured, from one point to 100,000, and pyplot stays out of it."""

import subprocess
import sys
import warnings

import numpy as np
import pytest
from tests.helpers import need
from tsunax.errors import MissingLibraryError, RowError
from tsunax.run.history import History


def made(n=50, every=10) -> History:
    history = History()
    for step in range(n):
        row = {"loss": 3.0 - step / n, "b1": 0.9, "grad_norm": float(step), "epoch": step // 10, "learning_rate": 0.1}
        row |= {"accuracy": step / n, "steps_per_second": float(step)}
        if step % every == every - 1:
            row |= {"val/loss": 2.0 - step / n, "best/val/loss": 1.0 / (1 + step)}
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
    figure = made().plot(names=["grad_norm", "loss", "best/val/loss", "b1"])
    assert labels(figure) == ["grad norm", "loss", "b1"]
    assert list(lines(figure.axes[1])) == ["loss", "best/val/loss"]
    assert labels(made().plot(names="b1")) == ["b1"]


def test_x_may_be_a_column():
    figure = made().plot(names=["val/loss"], x="epoch")
    np.testing.assert_array_equal(lines(figure.axes[0])["val/loss"][0], [0, 1, 2, 3, 4])
    assert figure.axes[-1].get_xlabel() == "epoch"


def test_marks():
    history = made()
    for step in (7, 8):
        history.mark("rejected", step)
    history.mark("thaw", 20, "body/**")
    history.mark("stop", 49, "enough")
    first, *_, last = history.plot().axes
    ticks = {line.get_label(): list(line.get_xdata()) for line in first.lines if line.get_marker() == "|"}
    assert ticks.pop("rejected (2)") == [7, 8] and list(ticks.values()) == [[9, 19, 29, 39, 49]]
    for axes in (first, last):
        assert [line.get_xdata() for line in axes.lines if line.get_linestyle() == "--"] == [[20, 20], [49, 49]]
    assert [text.get_text() for text in first.texts] == ["thaw body/**", "stop"] and not last.texts
    for step in range(20):
        history.mark("plateau", step)
    assert not history.plot().axes[0].texts  # too many to read


@pytest.mark.medium
@pytest.mark.parametrize("n", [1, 2, 3, 40, 500, 501, 100_000])
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
    assert len(line.get_xdata()) == (n if n <= 500 else 250)
    assert (line.get_marker() == "o") == (n <= 40)
    if n == 100_000:  # bins of 400: their median lies near 5, and 80 % of the values in the band
        assert np.all(abs(line.get_ydata() - 5) < 0.35)
        band = axes.collections[0].get_datalim(axes.transData)
        assert 3.4 < band.y0 < 3.8 and 6.2 < band.y1 < 6.6


def test_values_that_are_not_finite_are_marked_where_they_are():
    history = made()
    history.add({"loss": float("nan")}, 60)
    history.add({"loss": float("inf")}, 61)
    found = lines(history.plot().axes[0])
    assert found["loss not finite"][0].tolist() == [60, 61]
    assert np.isfinite(found["loss"][1]).all()


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


@pytest.mark.medium
def test_pyplot_is_not_touched(tmp_path):
    code = """
import sys
from tsunax.run.history import History
assert "matplotlib" not in sys.modules and "rich" not in sys.modules
history = History()
history.add({"loss": 1.0}, 1)
history.plot().savefig(sys.argv[1])
assert "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "run.png")], check=True)
    assert (tmp_path / "run.png").read_bytes()[:4] == b"\x89PNG"


# -------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("history", "arguments", "error", "text"),
    [
        (History(), {}, RowError, "got no rows, expected at least one"),
        (made(), dict(names=["acuracy"]), RowError, "Did you mean 'accuracy'?"),
    ],
    ids=["empty", "a name"],
)
def test_wrong_arguments(history, arguments, error, text):
    with pytest.raises(error) as caught:
        history.plot(**arguments)
    assert text in str(caught.value)


def test_wrong_axes():
    with pytest.raises(RowError, match="Did you mean 'epoch'"):
        made().plot(x="epochs")


def test_without_matplotlib_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingLibraryError, match=r"pip install 'tsunax\[plot\]'"):
        made().plot()


def test_a_population_is_one_panel_for_each_number():
    need("matplotlib")
    history = History()
    for step in range(3):
        row = {f"{name}/{i}": 1.0 + i + step for i in range(20) for name in ("loss", "val/loss", "accuracy")}
        history.add(row, step)
    loss, accuracy = history.plot().axes
    assert [loss.get_ylabel(), accuracy.get_ylabel()] == ["loss", "accuracy"]
    assert len(loss.lines) == 40 and len(accuracy.lines) == 20
    labels = [text.get_text() for text in loss.get_legend().get_texts()]
    assert labels == ["loss/0 to loss/19", "val/loss/0 to val/loss/19"]
    assert loss.lines[0].get_color() is not None and not np.array_equal(
        *(accuracy.lines[i].get_color() for i in (0, 19))
    )


def population(n):
    history = History()
    for step in range(10):
        row = {f"{name}/{i}": (1.0 + i) / (1 + step) for i in range(n) for name in ("loss", "val/loss")}
        history.add(row | {f"accuracy/{i}": 0.01 + 0.1 * step for i in range(n)}, step)
    return history


@pytest.mark.parametrize("n", [4, 16])
def test_a_member_has_one_color_and_validation_is_dashed(n):
    loss, accuracy = population(n).plot().axes
    color = lambda line: np.asarray(matplotlib.colors.to_rgb(line.get_color()))
    matplotlib = need("matplotlib")
    training, validation = loss.lines[::2], loss.lines[1::2]
    if n == 16:
        assert {line.get_label() for line in loss.lines if line.get_label()[0] != "_"} == {
            "loss/0 to loss/15",
            "val/loss/0 to val/loss/15",
        }
    for i in range(n):
        np.testing.assert_array_equal(color(training[i]), color(validation[i]))
        np.testing.assert_array_equal(color(training[i]), color(accuracy.lines[i]))
    assert len({tuple(color(line)) for line in training}) == n
    assert {line.get_linestyle() for line in training} == {"-"} != {line.get_linestyle() for line in validation}


def test_an_accuracy_is_not_logarithmic():
    loss, accuracy = population(4).plot().axes
    assert (loss.get_yscale(), accuracy.get_yscale()) == ("log", "linear")
    history = History()
    for step in range(20):
        history.add({"accuracy": 0.01 + 0.05 * step, "error": 1 - 0.052 * step}, step)
    assert [axes.get_yscale() for axes in history.plot().axes] == ["linear", "log"]


def test_no_two_members_share_a_color():
    need("matplotlib")
    for n in (6, 7):
        lines = population(n).plot().axes[1].lines
        assert len({tuple(np.atleast_1d(line.get_color()).tolist()) for line in lines}) == n
