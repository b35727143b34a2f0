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
    np.testing.assert_array_equal(lines(figure.axes[0])["val/loss"][0], [0, 1, 2, 3, 4])
    assert figure.axes[-1].get_xlabel() == "epoch"


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
    history = History()
    for step in range(3):
        history.add(
            {f"{name}/{i}": 1.0 + i + step for i in range(20) for name in ("loss", "val/loss", "accuracy")}, step
        )
    loss, accuracy = history.plot().axes
    assert [loss.get_ylabel(), accuracy.get_ylabel()] == ["loss", "accuracy"]
    assert len(loss.lines) == 40 and len(accuracy.lines) == 20 and loss.get_legend() is None
