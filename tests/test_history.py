"""Rows and history against plain lists: what comes out is what went in, whatever is missing; bad rows are refused."""

import itertools
import json
import time

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from tsunax.errors import RowError
from tsunax.run import history as history_module
from tsunax.run.history import History, check_names, check_row

NAN = float("nan")


def filled() -> History:
    history = History()
    history.add({"loss": 3.0, "rate": 1}, step=1)
    history.add({"loss": 2.0}, step=5)
    history.add({"val/loss": NAN}, step=5)
    history.add({"val/loss": 4.0, "loss": -0.0}, step=9)
    history.mark("evaluate", 5)
    history.mark("thaw", 9, "body/**")
    return history


# ----------------------------------------------------------------------------------------------------------------- rows


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1.5, 1.5),
        (3, 3),
        (True, 1),
        (np.float32(0.1), float(np.float32(0.1))),
        (np.int8(-3), -3),
        (np.bool_(False), 0),
        (np.array(2.5), 2.5),
        (ml_dtypes.bfloat16(1.5), 1.5),
        (jnp.float32(0.25), 0.25),
        (jnp.int32(7), 7),
        (float("inf"), float("inf")),
    ],
)
def test_a_number_becomes_a_python_one(value, expected):
    (found,) = check_row({"x": value}).values()
    assert found == expected and type(found) is type(expected)


def test_nan_is_a_number():
    assert np.isnan(check_row({"loss": NAN})["loss"])


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"m": np.ones((2, 2))}, "'m' at evaluate: got float64[2,2], expected one real number"),
        ({"m": jnp.ones(1)}, "float32[1], expected one real number"),
        ({"m": "0.5"}, "got '0.5' (str), expected one real number"),
        ({"m": None}, "got None, expected one real number"),
        ({"m": 1j}, "expected one real number"),
        ({"m": np.array("x")}, "expected one real number"),
        ({3: 1.0}, "name of a number at evaluate: got 3, expected a printable name"),
        ({"": 1.0}, "got '', expected a printable name like 'loss' or 'val/loss'"),
        ({"a\0b": 1.0}, r"got 'a\x00b', expected a printable name"),
        ({"a\nb": 1.0}, r"got 'a\nb'"),
        ({"\ud800": 1.0}, r"got '\ud800'"),
        ({"step": 1.0}, "got 'step', expected a printable name"),
    ],
)
def test_bad_rows_are_refused(row, text):
    with pytest.raises(RowError) as caught:
        check_row(row, "evaluate")
    assert text in str(caught.value)
    assert "\n" not in str(caught.value) and "\0" not in str(caught.value)


@pytest.mark.parametrize(("sign", "digits"), [(1, 400), (-1, 400), (1, 5000)])
def test_an_int_that_no_column_can_hold_is_refused(sign, digits):
    with pytest.raises(RowError, match=r"'x' at row: got an int of [\d,]+ bits, expected one real number"):
        check_row({"x": sign * 10**digits})


def test_names_that_people_use_are_fine():
    check_names(["loss", "val/top-5 accuracy", "learning_rate@encoder/**", "1.max", "损失", "val/a.b", "..."])


# -------------------------------------------------------------------------------------------------------------- history


def test_columns_have_what_was_added():
    history = filled()
    assert len(history) == 3 and history.names == list(history) == ["loss", "rate", "val/loss"]
    np.testing.assert_array_equal(history["step"], [1, 5, 9])
    np.testing.assert_array_equal(history["loss"], [3.0, 2.0, -0.0])
    np.testing.assert_array_equal(history["rate"], [1, NAN, NAN])
    np.testing.assert_array_equal(history["val/loss"], [NAN, NAN, 4.0])
    assert history["step"].dtype == np.int64 and history["rate"].dtype == np.float64
    assert [x.tolist() for x in history.series("step")] == [[1, 5, 9]] * 2 and history.last("step") == 9
    assert history.newest("step") == (9, 9) and History().newest("step") is None
    steps, values = history.series("val/loss")  # the NaN that was measured is there, the missing ones are not
    np.testing.assert_array_equal(steps, [5, 9])
    np.testing.assert_array_equal(values, [NAN, 4.0])
    assert history.last("rate") == 1 and history.last("loss") == 0
    assert history.newest("rate") == (1, 1) and history.newest("accuracy") is None
    assert "loss" in history and "step" in history and "accuracy" not in history
    assert history.marks == [(5, "evaluate", ""), (9, "thaw", "body/**")]


def test_the_newest_number_of_a_step_wins():
    history = History()
    history.add({"loss": 1.0}, 3)
    history.add({"loss": 2.0, "x": 5}, 3)
    assert history["loss"].tolist() == [2.0] and len(history) == 1
    assert history.series("loss")[1].tolist() == [2.0]


def test_a_column_is_a_copy():
    history = filled()
    history["loss"][:] = 7
    history["step"][:] = 7
    history.add({"loss": 1.0}, 10)
    assert history["loss"].tolist() == [3.0, 2.0, 0.0, 1.0] and history["step"][-1] == 10


@pytest.mark.parametrize("bad", [4, -1])
def test_steps_never_go_back(bad):
    with pytest.raises(RowError, match=f"got step {bad}, expected step 9 or later"):
        filled().add({"loss": 1.0}, bad)


@pytest.mark.parametrize("read", [History.__getitem__, History.series, History.last])
def test_unknown_names_list_the_known_ones(read):
    with pytest.raises(
        RowError, match=r"'val_loss', expected one of step, loss, rate, val/loss\. Did you mean 'val/loss'"
    ):
        read(filled(), "val_loss")


@pytest.mark.parametrize("through", [lambda x: x, lambda x: json.loads(json.dumps(x, default=np.ndarray.tolist))])
@pytest.mark.parametrize("make", [filled, History])
def test_plain_and_back(through, make):
    history = make()
    again = History.of(through(history.plain()))
    assert repr(again) == repr(history) and again.marks == history.marks and again.names == history.names
    for h in (again, history):  # also in what comes after
        h.add({"loss": 1.0, "new": 2.0}, 9)
        h.add({"rate": 0.5}, 11)
    for name in ["step", *history.names]:
        np.testing.assert_array_equal(again[name], history[name])
        assert again[name].dtype == history[name].dtype
    assert again.series("loss")[1].tobytes() == history.series("loss")[1].tobytes()


def test_repr_of_a_population_has_a_line_for_all_members():
    history = History()
    for step in (1, 2):
        history.add({f"{name}/{i}": i / step for name in ("loss", "val/loss") for i in range(16)}, step)
    lines = repr(history).splitlines()
    assert len(lines) == 4 and lines[2].split() == ["loss/0…15", "4", "0", "15", "2"]  # the middle member's newest


def test_the_row_of_an_end_is_taken_back():
    history = History()
    history.add({"loss": 2.0}, 10)
    expected = History.of(history.plain())
    history.close({"loss": 1.0, "new": 3.0}, 13)
    assert history.newest("loss") == (13, 1.0)
    history = History.of(json.loads(json.dumps(history.plain(), default=np.ndarray.tolist)))
    history.reopen()
    assert repr(history) == repr(expected) and history.names == ["loss"] and len(history) == 1
    history.reopen()
    assert len(history) == 1
    history.close({"loss": 1.0}, 13)
    history.add({"val/loss": 5.0}, 13)
    assert history.reopen() == (13, {"loss": 1.0})
    assert history["step"].tolist() == [10, 13] and history.last("loss") == 2.0 and history.last("val/loss") == 5.0


def test_repr_shows_every_name_once():
    lines = repr(filled()).splitlines()
    assert lines[0] == "History(3 rows, steps 1 to 9, 2 marks)"
    assert lines[2].split() == ["loss", "-0", "-0", "3", "3"]
    assert lines[4].split() == ["val/loss", "4", "4", "4", "2"]
    assert repr(History()) == "History(0 rows)"


def test_rows_cost_the_same_however_many_there_are():
    """The second half of 50,000 rows may take no longer than the first: twice is for noise, quadratic would be 3."""

    def seconds(history, steps):
        start = time.thread_time()
        for step in steps:
            history.add({"loss": 0.5, "accuracy": 0.25}, step)
        return time.thread_time() - start

    history, half = History(), 25_000
    first, second = seconds(history, range(half)), seconds(history, range(half, 2 * half))
    assert second < 2 * first + 0.05
    assert history["loss"].sum() == half and len(history) == 2 * half


def test_a_column_of_another_length_than_its_steps_is_refused():
    history = History()
    for values in (np.arange(4.0), np.ones(1), 1.0):
        with pytest.raises(RowError, match="loss"):
            history.extend({"loss": values}, np.arange(5))
    assert len(history) == 0 and history.names == []


# ------------------------------------------------------------------------------------------------------ long histories


def long_one(monkeypatch, pieces, steps=1000, most=64):
    """Rows of a run: every 5 steps, an evaluation every 100, given in pieces of any size."""
    monkeypatch.setattr(history_module, "MOST_ROWS", most)
    history, all_steps = History(), np.array([1, *range(5, steps, 5)])
    cuts = [0, *sorted(pieces), len(all_steps)]
    for a, b in itertools.pairwise(cuts):
        part = all_steps[a:b]
        for some in np.split(part, np.flatnonzero(part % 100 == 0) + 1):  # an evaluation ends a call
            history.extend({"loss": some * 0.5, "rate": some * 0.0}, some)
            if len(some) and some[-1] % 100 == 0:
                history.add({"val/loss": float(some[-1])}, int(some[-1]))
                history.mark("evaluate", int(some[-1]))
        history = History.of(history.plain())
    return history


def test_a_long_history_is_thinned_whenever_its_rows_came(monkeypatch):
    whole = long_one(monkeypatch, [])
    assert len(whole) <= 65 and whole["step"][-1] == 995 and whole.last("loss") == 497.5
    assert whole.series("val/loss")[0].tolist() == list(range(100, 1000, 100))
    gaps = np.diff([step for step in whole["step"] if step % 100])
    assert gaps.max() <= 40 and whole["step"][0] == 1
    rng = np.random.default_rng(0)
    for n in (1, 5, 40, 199):
        cut = long_one(monkeypatch, rng.choice(np.arange(1, 200), n, replace=False).tolist())
        assert repr(cut) == repr(whole)
        for name in ("step", *whole.names):
            np.testing.assert_array_equal(cut[name], whole[name])


@pytest.mark.parametrize("most", [10, pytest.param(100, marks=pytest.mark.medium)])
def test_a_long_history_is_thinned_alike_wherever_a_run_ended(monkeypatch, most):
    """The row of an end, and what is taken back with it, changes nothing of what stays."""
    monkeypatch.setattr(history_module, "MOST_ROWS", most)

    def rows(history, steps):
        for step in steps:
            history.add({"loss": step * 0.5}, step)
            if step % 35 == 0:
                history.add({"val/loss": step * 2.0}, step)

    whole, last = History(), 600 if most == 100 else 150
    rows(whole, range(1, last))
    for end in range(1, last):
        history = History()
        rows(history, range(1, end))
        history.close({"loss": 7.0}, end)
        history = History.of(json.loads(json.dumps(history.plain(), default=np.ndarray.tolist)))
        history.reopen()
        history = History.of(history.plain())
        rows(history, range(end, last))
        assert history["step"].tolist() == whole["step"].tolist(), end
        assert history.names == whole.names
        for name in whole.names:
            np.testing.assert_array_equal(history[name], whole[name])


def test_a_history_of_months_stays_small():
    history = History()
    for start in range(0, 3_000_000, 50_000):
        steps = 10 * np.arange(start, start + 50_000)
        history.extend({name: steps * 0.5 for name in "abcdefgh"}, steps)
        history.mark("evaluate", int(steps[-1]))
    assert 20_000 < len(history) <= 50_001
    assert sum(x.nbytes for column in history.plain()["rows"]["columns"] for x in column[1:]) < 8e6
    for i in range(30_000):
        history.mark("evaluate", i)
    assert len(history.marks) <= 10_000


def test_names_that_all_rows_have_by_turns_are_thinned_too(monkeypatch):
    monkeypatch.setattr(history_module, "MOST_ROWS", 64)
    history = History()
    for step in range(2000):
        history.add({f"{'abcdefghijklmnop'[step % 16]}": 1.0}, step)
    assert len(history) <= 65 and history["step"][-1] == 1999
