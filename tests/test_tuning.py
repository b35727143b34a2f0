"""Sweeps: what is drawn, what is recorded, how one goes on; bad spaces, directories and objectives."""
# ruff: noqa: E501, RUF043, a row is a line

import contextlib
import functools
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import types
import zlib
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import tsunax as ts
from tests.helpers import need
from tsunax import tuning
from tsunax.errors import (
    CheckpointError,
    HyperparameterError,
    MissingLibraryError,
    SaveError,
    TrialError,
    TsunaxError,
    WrongTypeError,
)
from tsunax.tuning import _journal, _optuna, spaces

ROOT = Path(__file__).resolve().parents[1]
SPACE = {
    "rate": spaces.log_uniform(1e-4, 1.0),
    "rule": spaces.choice(["adam", "sgd"]),
    "momentum": spaces.when("rule", "sgd", spaces.uniform(0.5, 0.9)),
    "width": 8,
}


def bowl(rate, rule, width, momentum=0.0):
    return math.log10(rate / 1e-2) ** 2 + momentum + width


def tune(objective=bowl, space=SPACE, trials=12, **options):
    return tuning.tune(objective, space, trials=trials, progress=False, **options)


def told(result):
    """All of a result but how long it took."""
    return [(t.index, t.values, t.status, repr(t.value), t.metrics, t.cause, t.reports) for t in result.trials]


# --------------------------------------------------------------------------------------------------- what is drawn


def test_what_is_drawn_is_spread_as_it_says():
    """Of many draws the quantiles are those of the distribution: exact inverses of evenly spread numbers."""
    entries = {
        "u": (spaces.uniform(-2, 6), lambda q: -2 + 8 * q),
        "l": (spaces.log_uniform(1e-3, 10), lambda q: 10 ** (-3 + 4 * q)),
    }
    drawn = [spaces.sample({name: entry for name, (entry, _) in entries.items()}, 0, i) for i in range(2000)]
    for name, (entry, quantile) in entries.items():
        found = np.array([x[name] for x in drawn])
        assert found.min() >= entry.low and found.max() <= entry.high
        for q in (0.1, 0.5, 0.9):
            assert np.mean(found < quantile(q)) == pytest.approx(q, abs=0.03)
    numbers = [spaces.sample({"n": spaces.integer(3, 6)}, 1, i)["n"] for i in range(2000)]
    assert {type(n) for n in numbers} == {int}
    np.testing.assert_allclose(np.bincount(numbers)[3:] / 2000, 0.25, atol=0.03)
    powers = np.array([spaces.sample({"n": spaces.integer(1, 1023, log=True)}, 1, i)["n"] for i in range(2000)])
    assert powers.min() == 1 and powers.max() <= 1023 and np.mean(powers < 32) == pytest.approx(0.5, abs=0.03)
    ones = np.mean([spaces.sample({"n": spaces.integer(1, 2, log=True)}, 1, i)["n"] == 1 for i in range(2000)])
    assert ones == pytest.approx(math.log(2) / math.log(3), abs=0.03)
    for entry in (spaces.uniform(0.1, 0.3), spaces.log_uniform(0.1, 0.3), spaces.integer(1, 3, log=True)):
        for u in (0.0, 1 - 2**-53):  # the ends, whatever is rounded
            assert entry.low <= entry.at(u) <= entry.high


def test_a_trial_is_a_function_of_the_seed_and_its_number():
    first, more = tune(trials=6), tune(trials=9)
    assert [t.values for t in first.trials] == [t.values for t in more.trials[:6]]
    other = spaces.sample({"new": spaces.uniform(0, 1), **SPACE}, 0, 3)
    assert {name: other[name] for name in first.trials[3].values} == first.trials[3].values
    assert tune(trials=6, seed=1)["rate"].tolist() != first["rate"].tolist()
    assert len({t.values["rate"] for t in more.trials}) == 9
    # written down once: what a journal of today says must be drawn again tomorrow. Change it with `version` there.
    assert spaces.sample({"x": spaces.uniform(0, 1)}, 5, 7) == {"x": 0.7142467514218371}


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_bounds_are_pythons_own(tmp_path, kind):
    """So that their values go into a file, and that a directory does not know the difference."""
    entries = spaces.uniform(kind(0.5), kind(2)), spaces.log_uniform(kind(0.5), kind(2))
    space = {"a": entries[0], "b": entries[1], "c": spaces.integer(np.int32(1), np.int64(5))}
    result = tune(lambda a, b, c: a, space, trials=3, directory=tmp_path)
    assert all([type(x) for x in t.values.values()] == [float, float, int] for t in result.trials)
    space = {"a": spaces.uniform(0.5, 2.0), "b": spaces.log_uniform(0.5, 2.0), "c": spaces.integer(1, 5)}
    assert told(tune(lambda a, b, c: a, space, trials=3, directory=tmp_path)) == told(result)


def test_conditions():
    space = {
        "a": spaces.choice(["x", "y", "z"]),
        "b": spaces.when("a", ["x", "y"], spaces.choice([1, 2])),
        "c": spaces.when("b", 2, spaces.when("a", "x", 7)),
    }
    seen = [spaces.sample(spaces.checked(space, "", "random"), 0, i) for i in range(60)]
    assert {(v["a"], v.get("b"), v.get("c")) for v in seen} == {
        *(("x", 1, None), ("x", 2, 7), ("y", 1, None), ("y", 2, None), ("z", None, None))
    }


def test_a_grid_is_every_combination():
    space = {
        "a": spaces.grid([1, 2]),
        "b": spaces.when("a", 2, spaces.grid(["u", "v"])),
        "c": spaces.grid(np.array([0.5, 1.5])),
        "d": 3,
    }
    result = tuning.tune(lambda a, c, d, b="": a + c + d, space, backend="grid", progress=False)
    assert [(t.values["a"], t.values.get("b"), t.values["c"]) for t in result.trials] == [
        *[(1, None, 0.5), (1, None, 1.5), (2, "u", 0.5), (2, "u", 1.5), (2, "v", 0.5), (2, "v", 1.5)]
    ]
    assert all(type(t.values["c"]) is float for t in result.trials)
    with pytest.raises(HyperparameterError, match=r"trials at tune\(\): got 7, expected at most 6, the whole grid"):
        tuning.tune(lambda a, c, d, b="": a, space, backend="grid", trials=7, progress=False)
    space = {"a": spaces.grid([1, 2]), "x": spaces.uniform(0, 1)}
    result = tuning.tune(lambda a, x: a, space, backend="grid", trials=6, progress=False)
    assert result["a"].tolist() == [1, 2] * 3 and len(set(result["x"])) == 6


# ------------------------------------------------------------------------------------------------------- the result


def test_the_best_and_the_table():
    result = tune(trials=30)
    values = [math.log10(t.values["rate"] / 1e-2) ** 2 + t.values.get("momentum", 0) + 8 for t in result.trials]
    assert result.best.index == np.argmin(values) and result.best.value == min(values)
    assert tune(trials=30, mode="max").best.index == np.argmax(values)
    assert result["value"].tolist() == values and result["momentum"].dtype == object
    lines = repr(result).splitlines()
    assert lines[0] == "30 trials: 30 done" and lines[-1] == "... 10 more" and len(lines) == 23
    assert lines[1].split() == ["trial", "rate", "rule", "momentum", "width", "value", "status", "seconds"]
    assert lines[2].split()[0] == str(result.best.index)
    with pytest.raises(TrialError, match="column at Result: got 'rates', expected .* Did you mean 'rate'"):
        result["rates"]


def test_dicts_of_numbers():
    objective = lambda **values: {"loss": jnp.float32(bowl(**values)), "accuracy": np.ones(1)}
    result = tune(objective, metric="loss")
    assert result.best.metrics == {"loss": pytest.approx(result.best.value), "accuracy": 1.0}
    assert result["accuracy"].tolist() == [1.0] * 12
    assert tune(lambda **values: {"only": 1}).best.metrics == {"only": 1.0}


def test_the_picture():
    need("matplotlib")
    figure = tune(trials=20).plot()
    panels = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_xlabel() for axes in panels] == ["rate", "rule", "momentum"]
    assert [axes.get_xscale() for axes in panels] == ["log", "linear", "linear"]
    assert [t.get_text() for t in panels[1].get_xticklabels()] in (["adam", "sgd"], ["sgd", "adam"])
    assert len(panels[0].lines[0].get_xdata()) == 20 and panels[0].lines[-1].get_marker() == "*"


# ------------------------------------------------------------------------------------------------ trials that fail


def fails(trial):
    if trial == 1:
        return {}["loss"]
    if trial == 4:
        sys.exit(3)
    if trial == 7:
        np.linalg.cholesky(-np.eye(2))  # inside a library: the line is still ours
    bad = {2: math.nan, 3: None, 5: "0.5", 6: np.ones(2), 8: -math.inf, 9: True, 10: {"a": 1, "b": 2}, 11: {"a": "x"}}
    return bad.get(trial, 1.0)


def test_a_trial_that_fails_fails_alone():
    trials = tune(lambda trial, rate: fails(trial), {"rate": SPACE["rate"]}, mode="max").trials
    assert [t.index for t in trials if t.status == "done"] == [0]
    causes = {t.index: t.cause for t in trials if t.cause}
    assert causes[1][:2] == ("KeyError", "'loss'") and causes[1].where.endswith('return {}["loss"]')
    assert causes[1].where.startswith("test_tuning.py:")
    assert causes[4][0] == "SystemExit" and "cholesky(-np.eye(2))" in causes[7].where
    kinds = {2: "NonFiniteError", 8: "NonFiniteError", 10: "HyperparameterError"}
    expected = {
        2: "result at objective: got nan, expected a finite number.",
        3: "result at objective: got None, expected a number, or a dict of numbers.",
        5: "got a string|got '0.5'",
        6: r"float64\[2\]",
        8: "got -inf",
        9: "got True",
        10: r"got 2 numbers \(a, b\), expected one. Say which: tune\(..., metric=...\)",
        11: "result at objective, 'a': got 'x'",
    }
    for i, text in expected.items():
        assert causes[i].type == kinds.get(i, "WrongTypeError")
        assert re.search(text, causes[i].message), causes[i]
    assert math.isnan(trials[2].value) and trials[2].status == "failed"


def test_what_no_objective_should_do():
    """It fails, or is pruned, and the next one comes."""

    class Mute(Exception):
        def __str__(self):
            raise ValueError("no words")

    def objective(trial):
        if trial == 0:
            raise tuning.Pruned("by itself, without a report")
        if trial == 1:
            raise Mute
        return {2: 10**400, 3: -(10**400), 4: 1.0}[trial]

    found = tune(lambda x, trial: objective(trial), {"x": 1}, trials=5)
    assert [t.status for t in found.trials] == ["pruned", "failed", "failed", "failed", "done"]
    assert [t.value for t in found.trials] == [None, None, math.inf, -math.inf, 1.0]
    assert found.trials[1].cause.type == "Mute"

    def together(x, trial):
        if 0 in trial:
            raise tuning.Pruned("all of them")
        return [10**400] * len(trial)

    found = tune(together, {"x": spaces.uniform(0, 1)}, trials=4, vectorized="x", members=2)
    assert [t.status for t in found.trials] == ["pruned", "pruned", "failed", "failed"]


def test_a_result_that_is_still_computed_is_waited_for():
    """What fails on the device fails in its trial, and counts in its seconds."""

    class Late(float):  # as an array on its way from a device
        def block_until_ready(self):
            time.sleep(0.2)
            if self > 1:
                raise FloatingPointError("on the device")
            return self

    result = tune(lambda x: Late(x), {"x": spaces.grid([0.5, 2.0])}, backend="grid", trials=2)
    assert [str(x) for x in result["status"]] == ["done", "failed"] and min(result["seconds"]) >= 0.2


def test_a_column_has_one_meaning():
    result = tune(lambda x: {"x": 5.0, "seconds": 7.0, "loss": 1.0}, {"x": 3}, trials=1, metric="loss")
    assert (result["x"][0], result["metrics/x"][0], result["loss"][0]) == (3, 5.0, 1.0)
    assert result["metrics/seconds"][0] == 7.0 > result["seconds"][0] > 0


def test_no_trial_that_is_done():
    with pytest.warns(RuntimeWarning, match=r"all 2 trials failed, the first with ZeroDivisionError: division by zero"):
        result = tune(lambda rate: 1 / 0, {"rate": SPACE["rate"]}, trials=2)
    with pytest.raises(
        TrialError, match=r"best at Result: got 2 trials, none of them done; the first failed with Zero"
    ):
        _ = result.best


# ------------------------------------------------------------------------------------------------------- the journal


def test_a_sweep_goes_on(tmp_path):
    calls = []

    def objective(trial, rate, report):
        calls.append(trial)
        if trial == 5 and calls.count(5) == 1:
            raise KeyboardInterrupt
        return fails(trial) if trial < 4 else rate

    space = {"rate": SPACE["rate"]}
    with pytest.raises(KeyboardInterrupt, match="after 6 trials") as caught:
        tune(objective, space, directory=tmp_path)
    assert [t.status for t in caught.value.result.trials][-2:] == ["done", "interrupted"]
    assert len(tuning.read(tmp_path)) == 5
    result = tune(objective, space, directory=tmp_path)
    assert calls == [0, 1, 2, 3, 4, 5, *range(5, 12)]
    assert told(result) == told(tune(objective, space)) == told(tuning.read(tmp_path))
    calls.clear()
    assert len(tune(objective, space, trials=14, directory=tmp_path)) == 14 and calls == [12, 13]
    assert len(tune(objective, space, trials=3, directory=tmp_path)) == 14
    assert all(json.loads(line)["crc"] for line in (tmp_path / "trials.jsonl").read_text().splitlines())
    assert b"NaN" not in (tmp_path / "trials.jsonl").read_bytes()


def test_a_torn_line_is_repaired_and_damage_is_found(tmp_path):
    whole = tune(directory=tmp_path / "a")
    content = (tmp_path / "a" / "trials.jsonl").read_bytes()
    ends = list(itertools.accumulate(len(line) + 1 for line in content.split(b"\n")[:-1]))
    rng = np.random.default_rng(0)
    for at in (1, ends[0] - 1, ends[3] + 5, len(content) - 1, *rng.integers(0, len(content), 12)):
        folder = tmp_path / f"cut {at}"
        folder.mkdir()
        (folder / "trials.jsonl").write_bytes(content[:at])
        if at in (0, *ends):
            found = tune(directory=folder)
        else:
            with pytest.warns(UserWarning, match="a line that was cut short is dropped"):
                found = tune(directory=folder)
        assert told(found) == told(whole)
    path = tmp_path / "a" / "trials.jsonl"
    for at in rng.integers(0, len(content) - 1, 60):
        damaged = bytearray(content)
        damaged[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"journal at .*trials.jsonl, line \d+"):
            tuning.read(tmp_path / "a")


def test_a_trial_that_kills_its_process_has_failed(tmp_path):
    about = None
    tune(trials=2, directory=tmp_path)
    for _ in range(3):  # a process that died in trial 2, three times
        lines = (tmp_path / "trials.jsonl").read_text().splitlines()
        about = json.loads(lines[0])["sweep"]
        with contextlib.closing(_journal.opened(tmp_path, about)) as journal:
            journal.start([2])
    result = tune(trials=4, directory=tmp_path)
    assert [t.status for t in result.trials] == ["done", "done", "failed", "done"]
    assert str(result.trials[2].cause) == "Killed: the process ended 3 times during this trial"


def test_one_of_a_group_kills_its_process(tmp_path):
    """After three deaths together each goes alone, and only the one that did it has failed."""
    options = dict(space={"x": spaces.uniform(0, 1)}, vectorized="x", members=4, directory=tmp_path)
    tune(lambda x: x, trials=1, **options)
    about = json.loads((tmp_path / "trials.jsonl").read_text().splitlines()[0])["sweep"]
    calls = []
    another = pytest.warns(UserWarning, match=r"of another objective, '.*<lambda>', and are kept")

    def objective(x, trial):
        calls.append(trial.tolist())
        return x

    for started in ([1, 2, 3, 4], [2]):  # processes that died then
        with contextlib.closing(_journal.opened(tmp_path, about)) as journal:
            for _ in range(2):
                journal.start(started)
    with another:
        tune(objective, trials=2, **options)
    assert calls == [[1]]
    with contextlib.closing(_journal.opened(tmp_path, about)) as journal:
        journal.start([2, 3, 4])
        journal.start([2])
    with another:
        tune(objective, trials=6, **options)
    assert calls == [[1], [3], [4], [5]]
    result = tuning.read(tmp_path)
    assert [t.status for t in result.trials] == ["done", "done", "failed", "done", "done", "done"]
    assert str(result.trials[2].cause) == "Killed: the process ended 3 times during this trial"


def test_as_many_as_there_is_time_for():
    """Neither the trials to come nor the groups of them are laid out before."""

    def until(n):
        def objective(x, trial):
            if np.max(trial) >= n:
                raise KeyboardInterrupt
            return x

        return objective

    for options in ({}, {"vectorized": "x", "members": 2}):
        with pytest.raises(KeyboardInterrupt) as caught:
            tune(until(4), {"x": spaces.uniform(0, 1)}, trials=10**15, **options)
        assert [t.status for t in caught.value.result.trials][:4] == ["done"] * 4


def test_an_interrupted_trial_has_not_died(tmp_path):
    left = [4]

    def objective(trial, rate):
        left[0] -= trial == 1
        if trial == 1 and left[0]:
            raise KeyboardInterrupt
        return rate

    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            tune(objective, {"rate": SPACE["rate"]}, trials=2, directory=tmp_path)
    assert [t.status for t in tune(objective, {"rate": SPACE["rate"]}, trials=2, directory=tmp_path).trials] == [
        "done"
    ] * 2


def test_a_full_disk_leaves_the_journal_as_it_was(tmp_path, monkeypatch):
    result = tune(trials=2, directory=tmp_path)
    before = (tmp_path / "trials.jsonl").read_bytes()
    write = os.write

    def full(fd, line):
        monkeypatch.setattr(os, "write", no_room)
        return write(fd, bytes(line)[:7])

    def no_room(fd, line):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(SaveError, match="journal at .*No space left"):
        tune(trials=3, directory=tmp_path)
    assert (tmp_path / "trials.jsonl").read_bytes() == before
    monkeypatch.undo()
    assert told(tune(trials=3, directory=tmp_path))[:2] == told(result)


SWEEP = """
import sys, time
from tsunax.tuning import spaces
from tsunax import tuning
def objective(x, trial):
    open(sys.argv[1] + "/ran", "a").write(f"{trial} ")
    time.sleep(0.05 if trial < 3 else 30 if sys.argv[2] == "slow" else 0)
    return x
tuning.tune(objective, {"x": spaces.uniform(0, 1)}, trials=6, directory=sys.argv[1] + "/sweep", progress=False)
"""


@pytest.mark.medium
@pytest.mark.parametrize(("kind", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, -2)])
def test_signals_end_a_sweep(tmp_path, kind, status):
    def start(how):
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        return subprocess.Popen(
            [sys.executable, "-c", SWEEP, tmp_path, how], env=env, stderr=subprocess.PIPE, text=True
        )

    process = start("slow")
    until = time.monotonic() + 60
    while "3" not in (tmp_path / "ran").read_text() if (tmp_path / "ran").exists() else True:
        assert time.monotonic() < until
        time.sleep(0.01)
    began = time.monotonic()
    process.send_signal(kind)
    _, said = process.communicate(timeout=30)
    assert process.returncode in (status, 128 + kind), said
    assert time.monotonic() - began < 15
    assert json.loads((tmp_path / "sweep" / "trials.jsonl").read_text().splitlines()[-1])["interrupted"] == [3]
    with start("fast") as process:
        assert process.wait(60) == 0, process.stderr.read()
    assert (tmp_path / "ran").read_text().split() == ["0", "1", "2", "3", "3", "4", "5"]
    assert len(tuning.read(tmp_path / "sweep")) == 6


def test_a_run_that_is_interrupted_inside_a_trial(tmp_path, monkeypatch):
    """`fit` hears Ctrl-C itself, and in a notebook returns: what it returns is no result."""
    monkeypatch.setattr("tsunax.loop.in_notebook", lambda: True)
    monkeypatch.setattr("tsunax.tuning.tuner.in_notebook", lambda: True)
    step = ts.train_step(lambda params, x: jnp.mean((x @ params["w"]) ** 2))
    data = ts.batches(np.ones((8, 2), np.float32), 4)

    sent = []  # a second one would stop at once

    def objective(rate, trial):
        def ctrl_c(run):
            if trial == 1 and not sent:
                sent.append(os.kill(os.getpid(), signal.SIGINT))

        state = ts.setup(ts.rules.sgd(rate), {"w": jnp.ones(2)})
        state, history = ts.fit(step, state, data, steps=8, log_every=2, callbacks=ctrl_c, progress=False)
        return history["loss"][-1]

    result = tune(objective, {"rate": spaces.uniform(0.1, 0.2)}, trials=4, directory=tmp_path)
    assert [t.status for t in result.trials] == ["done", "interrupted"]
    assert len(tuning.read(tmp_path)) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "drill", [["--kills", "12"], ["--kills", "8", "--backend", "optuna"], ["--writers", "2"]], ids=lambda x: x[-1]
)
def test_sweeps_that_are_killed(drill, tmp_path):
    if "optuna" in drill:
        need("optuna")
    command = [sys.executable, "-m", "campaigns.sweeps", *drill, "--results", tmp_path / "counts"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = json.loads((tmp_path / "counts").read_text())["counts"]
    assert counts["trials"] >= 60 and not counts["lost"] and not counts["doubled"], counts


@pytest.mark.slow
def test_the_drill_sees_a_journal_that_is_late(tmp_path):
    command = [sys.executable, "-m", "campaigns.sweeps", "--kills", "4", "--leave-out", "sync"]
    done = subprocess.run([*command, "--results", tmp_path / "counts"], cwd=ROOT, capture_output=True, timeout=300)
    assert done.returncode == 1 and json.loads((tmp_path / "counts").read_text())["counts"]["lost"]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (dict(space={**SPACE, "rate": spaces.log_uniform(1e-5, 1.0)}), r"space\['rate'\] at tune\(\): got log_uniform\(low=1e-05.*expected log_uniform\(low=0.0001, high=1.0\), as in"),
        (dict(space={k: v for k, v in SPACE.items() if k != "momentum"}), r"space\['momentum'\] at tune\(\): got nothing"),
        (dict(space={**SPACE, "width": 9}), r"space\['width'\] at tune\(\): got 9, expected 8"),
        (dict(seed=1), r"seed at tune\(\): got 1, expected 0, as in .*Give another directory"),
        (dict(mode="max"), r"mode at tune\(\): got max, expected min"),
        (dict(metric="loss"), r"metric at tune\(\): got loss, expected None"),
    ],
)  # fmt: skip
def test_a_directory_of_another_sweep(tmp_path, change, text):
    tune(trials=1, directory=tmp_path)
    with pytest.raises(CheckpointError, match=text):
        tune(trials=2, directory=tmp_path, **change)


@pytest.mark.medium
def test_one_writer_and_readers_of_nothing(tmp_path):
    holder = "import sys, time; from pathlib import Path; from tsunax._core import durable_files as _files"
    holder += "; lock = _files.Lock(Path(sys.argv[1])); print(1, flush=True); time.sleep(60)"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", holder, tmp_path], env=env, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"1\n"
        fix = r"or read with ts\.tuning\.read\(directory\)\.$"
        with pytest.raises(CheckpointError, match=f"directory in use at .*got process {process.pid}.* {fix}"):
            tune(directory=tmp_path)
        process.kill()
    with pytest.raises(CheckpointError, match="journal at .*No such file"):
        tuning.read(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="directory at .*file"):
        tune(directory=tmp_path / "file")
    for path in (5, "", b"sweep", "a\0b"):
        for call in (lambda: tune(directory=path), lambda: tuning.read(path)):  # noqa: B023, called at once
            with pytest.raises(CheckpointError, match=r"directory at (tune|read)\(\): .*expected a directory's path"):
                call()


@pytest.mark.parametrize("content", [b"mine", b'{"loss": 1.0}\n{"loss": 0.5}', b'{"sweep"]', b'{"loss": 1'])
def test_a_file_of_somebody_else_is_not_touched(tmp_path, content):
    (tmp_path / "trials.jsonl").write_bytes(content)
    with pytest.raises(CheckpointError, match="journal at .*trials.jsonl"):
        tune(directory=tmp_path)
    assert (tmp_path / "trials.jsonl").read_bytes() == content


def test_records_that_are_not_ours(tmp_path):
    """With a checksum that is right."""
    path = tmp_path / "trials.jsonl"
    for text, said in (
        ('{"sweep": {"version": 2}', "version 2, expected version 1. Another tsunax wrote it"),
        ('{"sweep": {"x": ' + "[" * 100_000, "line 1"),
    ):
        path.write_text(f'{text}, "crc": "{zlib.crc32(text.encode()):08x}"}}\n')
        with pytest.raises(CheckpointError, match=said):
            tuning.read(tmp_path)
        with pytest.raises(CheckpointError, match=said):
            tune(directory=tmp_path)


END = {"index": 0, "values": {"x": 1}, "status": "done", "value": 1.0, "metrics": {}, "cause": None, "seconds": 0.1}
ODD = [
    {"end": 5},
    {"end": [5]},
    {"end": [{}]},
    {"end": {"index": 0}},
    {"end": [END]},  # without reports
    {"end": [END | {"reports": 5}]},
    {"end": [END | {"reports": [[0]]}]},
    {"end": [END | {"reports": [], "index": "0"}]},
    {"end": [END | {"reports": [], "value": "low"}]},
    {"end": [END | {"reports": [], "metrics": {"a": None}}]},
    {"end": [END | {"reports": [], "values": 5}]},
    {"end": [END | {"reports": [], "cause": "none"}]},
    {"end": [END | {"reports": [], "more": 1}]},
    {"start": {"float": "abc"}},
    {"start": 5},
    {"end": [END | {"reports": [], "index": -1}]},
    {"start": [-1]},
    {"start": [10**30]},
    {"interrupted": [-1]},
    {"start": ["a"]},
    {"start": [[1]]},
    {"interrupted": {"a": 1}},
    {"start": [1], "end": []},
    {"else": [1]},
    {},
    5,
    {"sweep": {}},
]


def line_of(record) -> str:
    text = json.dumps(record)[:-1] if isinstance(record, dict) and record else "{"
    return f'{text}, "crc": "{zlib.crc32(text.encode()):08x}"}}\n'


@pytest.mark.parametrize("record", ODD, ids=lambda record: json.dumps(record)[:60])
def test_odd_records_are_errors_of_the_journal(tmp_path, record):
    """With a checksum that is right, behind the first line of a sweep."""
    tune(trials=1, directory=tmp_path)
    path = tmp_path / "trials.jsonl"
    path.write_text(path.read_text().splitlines(keepends=True)[0] + line_of(record))
    for call in (tuning.read, lambda folder: tune(directory=folder)):
        with pytest.raises(CheckpointError, match="journal at ") as caught:
            repr(call(tmp_path))
        assert "checksum" not in str(caught.value)


@pytest.mark.parametrize("about", [5, {}, {"space": 5}, {"space": {"x": 1}, "mode": "min"}, {"space": {}, "mode": []}])
def test_odd_sweeps_are_errors_of_the_journal(tmp_path, about):
    about = {"version": 1, **about} if isinstance(about, dict) else about
    (tmp_path / "trials.jsonl").write_text(line_of({"sweep": about}))
    for call in (tuning.read, lambda folder: tune(directory=folder)):
        with pytest.raises(CheckpointError, match="journal at "):
            call(tmp_path)


def test_another_objective_is_noticed(tmp_path, recwarn):
    space, kept = {"x": spaces.uniform(0, 1)}, []

    def objective(shift):
        return lambda x: kept.append(x) or x + shift  # closes over what changes

    tune(objective(0), space, trials=2, directory=tmp_path)
    tune(objective(1), space, trials=3, directory=tmp_path)
    tune(functools.partial(objective(1)), space, trials=3, directory=tmp_path)
    assert len(kept) == 3 and not recwarn.list
    name = "test_another_objective_is_noticed.<locals>.objective.<locals>.<lambda>"
    with pytest.warns(UserWarning, match=f"of another objective, '{name}', and are kept as they are. Give another"):
        tune(abs_of := lambda x: abs(x), space, trials=3, directory=tmp_path)
    tune(abs_of, space, trials=1, directory=tmp_path / "b")
    changed = types.FunctionType((lambda x: abs(x - 1)).__code__, globals())
    changed.__qualname__ = abs_of.__qualname__
    with pytest.warns(UserWarning, match=r"are of other code of '.*<lambda>'"):
        tune(changed, space, trials=1, directory=tmp_path / "b")


@pytest.mark.parametrize("entry", [[1e-3, 1e-2], [], spaces.when("rule", "sgd", [1, 2])], ids=repr)
def test_a_list_is_no_entry(entry):
    space = {"rule": spaces.choice(["adam", "sgd"]), "lr": entry}
    fix = r"ts\.tuning\.spaces\.choice\(\[" if entry else "A constant that is a sequence is a tuple"
    with pytest.raises(WrongTypeError, match=rf"entry at space\['lr'\]: got a list, \[.*{fix}"):
        tune(lambda rule, lr=0: 0.0, space)
    assert tune(lambda rule, lr: lr[1], {"rule": "adam", "lr": (1, 2)}, trials=1).best.value == 2


# ------------------------------------------------------------------------------------------------- many at once

RNG = np.random.default_rng(0)
X = RNG.normal(size=(64, 4)).astype(np.float32)
Y = np.tanh(X[:, :2])


def loss_fn(params, batch):
    x, y = batch
    return ts.Loss.mean(jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2, -1))


def make(key, rate, decay, width, trial):
    draws = np.random.default_rng(0).normal(size=(6, width)).astype(np.float32)  # a normal of jax's is slow to compile
    draws = 0.5 * jnp.roll(draws, trial, 1)
    params = {"w": draws[:4], "v": draws[4:].T}
    return ts.setup(ts.rules.adamw(rate, weight_decay=decay), params)


STEP = ts.train_step(loss_fn)
LIVE = {"rate": spaces.log_uniform(1e-3, 1e-1), "decay": spaces.uniform(0.0, 0.1), "width": spaces.choice([4, 8])}


def trained(state):
    for _ in range(10):
        for batch in ts.batches((X, Y), 16):
            state, info = STEP(state, batch)
    return {"loss": info.loss}


def single(rate, decay, width, trial):
    return trained(make(None, rate, decay, width, trial))


def together(rate, decay, width, trial):
    members = functools.partial(make, width=width)
    return trained(ts.population(members, len(rate), rate=rate, decay=decay, trial=trial))


def test_trials_of_one_population_are_single_runs(tmp_path):
    """Up to 1e-4: what a member may differ by from a run of its own, after 40 steps."""
    alone = tune(single, LIVE, trials=7)
    runs = tune(together, LIVE, trials=7, vectorized=["rate", "decay"], members=3, directory=tmp_path)
    assert [t.values for t in runs.trials] == [t.values for t in alone.trials]
    np.testing.assert_allclose(runs["value"], alone["value"], rtol=1e-4)
    assert runs.best.index == alone.best.index
    lines = [json.loads(line) for line in (tmp_path / "trials.jsonl").read_text().splitlines()]
    ends = [[end["index"] for end in line["end"]] for line in lines if "end" in line]
    width = lambda i: alone.trials[i].values["width"]
    assert max(map(len, ends)) <= 3 and len(ends) == sum(-(-sum(width(i) == w for i in range(7)) // 3) for w in (4, 8))
    assert all(len({width(i) for i in group}) == 1 for group in ends)


def test_a_group_that_raises_goes_one_by_one():
    calls = []

    def objective(x, trial, report):
        calls.append(trial.tolist())
        if 2 in trial:
            raise ValueError("the third")
        report(1, x)
        return np.where(trial == 1, np.nan, x)

    result = tune(objective, {"x": spaces.uniform(0, 1)}, trials=5, vectorized="x", members=4)
    assert calls == [[0, 1, 2, 3], [0], [1], [2], [3], [4]]
    assert [t.status for t in result.trials] == ["done", "failed", "failed", "done", "done"]
    assert [str(t.cause)[:16] for t in result.trials[1:3]] == ["NonFiniteError: ", "ValueError: the "]
    assert result.trials[4].reports == {1: result.trials[4].values["x"]}
    wrong = tune(lambda x: [1.0] * 3, {"x": spaces.uniform(0, 1)}, trials=4, vectorized="x", members=3).trials
    assert [t.status for t in wrong] == ["done"] * 3 + ["failed"]
    assert "got float64[3], expected an array of 1 numbers" in wrong[3].cause.message


@pytest.mark.medium
def test_a_batch_size_compiles_once_a_size():
    traced = []

    def loss(params, batch):
        traced.append(batch.shape[0])
        return jnp.mean((batch @ params["w"]) ** 2)

    step = ts.train_step(loss)

    def objective(size, rate):
        state = ts.setup(ts.rules.sgd(rate), {"w": jnp.ones(4)})
        for batch in itertools.islice(ts.batches(X, size), 3):
            state, info = step(state, batch)
        return info.loss

    space = {"size": spaces.choice([4, 8, 16]), "rate": spaces.log_uniform(1e-3, 1e-1)}
    result = tune(objective, space, trials=12)
    assert all(t.status == "done" for t in result.trials)
    assert sorted(traced) == sorted({t.values["size"] for t in result.trials}) == [4, 8, 16]


# ------------------------------------------------------------------------------------------------ other backends


@pytest.fixture
def optuna():
    found = need("optuna")
    found.logging.set_verbosity(found.logging.WARNING)
    yield found
    found.logging.set_verbosity(found.logging.INFO)


@pytest.mark.medium
def test_optuna_finds_more_than_chance_and_goes_on(optuna, tmp_path):
    stops = iter([3, 11, 12])
    stop = [None]

    def objective(rate, rule, width, trial, report, momentum=0.0):
        if trial == stop[0]:
            stop[0] = next(stops, None)
            raise KeyboardInterrupt
        value = bowl(rate, rule, width, momentum)
        report(1, value + 1)
        if trial == 5:
            raise ValueError("bad luck")
        return value

    whole = tune(objective, trials=40, backend="optuna", pruner=optuna.pruners.MedianPruner(n_startup_trials=8))
    counts = {t.status for t in whole.trials}
    assert counts == {"done", "pruned", "failed"} and whole.best.value < tune(trials=40).best.value + 0.05
    stop[0] = next(stops)
    options = dict(trials=40, backend="optuna", pruner=optuna.pruners.MedianPruner(n_startup_trials=8))
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            tune(objective, directory=tmp_path, **options)
    with open(tmp_path / "optuna.journal", "a") as file:
        file.write('{"op_code": 5, "wor')
    with pytest.warns(UserWarning, match="optuna.journal: a line that was cut short"):
        found = tune(objective, directory=tmp_path, **options)
    assert told(found) == told(whole) == told(tuning.read(tmp_path))
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".lock"] == ["optuna.journal"]
    study = study_in(optuna, tmp_path)
    assert len(study.trials) == 40 and study.best_trial.number == whole.best.index
    states = {"done": "COMPLETE", "pruned": "PRUNED", "failed": "FAIL"}
    assert [t.state.name for t in study.trials] == [states[t.status] for t in whole.trials]
    for change in (dict(seed=1), dict(mode="max")):
        with pytest.raises(CheckpointError, match=f"{next(iter(change))} at tune.*Give another directory"):
            tune(objective, directory=tmp_path, **options, **change)


def study_in(optuna, folder):
    """What any program of Optuna's finds in a directory: its dashboard, another worker."""
    file = optuna.storages.journal.JournalFileBackend(str(folder / "optuna.journal"))
    storage = optuna.storages.JournalStorage(file)
    return optuna.load_study(study_name="tsunax", storage=storage, pruner=optuna.pruners.NopPruner())


def test_optunas_own_samplers(optuna):
    drawn = tune(backend="optuna", trials=6, sampler=optuna.samplers.RandomSampler(seed=1))
    again = tune(backend="optuna", trials=6, sampler=lambda seed: optuna.samplers.RandomSampler(seed=1))
    assert drawn["rate"][0] == again["rate"][0] and len(set(drawn["rate"])) == 6 > len(set(again["rate"]))
    with pytest.raises(WrongTypeError, match="sampler at tune"):
        tune(backend="optuna", sampler=3)


def curve(trial, rate, report):
    """Ends at 1 + trial % 4, falling from 10 above."""
    for step in range(1, 10):
        report(step, 1 + trial % 4 + 10 / step)
    return 1.0 + trial % 4


@pytest.mark.parametrize("mode", ["min", "max"])
def test_optunas_pruners(optuna, mode):
    sign = 1 if mode == "min" else -1
    objective = lambda trial, rate, report: sign * curve(trial, rate, lambda step, x: report(step, sign * x))
    options = dict(space={"rate": SPACE["rate"]}, trials=12, mode=mode, backend="optuna")
    pruner = optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=3)
    result = tune(objective, pruner=pruner, **options)
    # of 4 startup trials the median at step 3 is that of 1 2 3 4, plus 10 / 3: what ends above it stops there
    pruned = [t for t in result.trials if t.status == "pruned"]
    assert [t.index for t in pruned] == [6, 7, 10, 11]
    assert all(list(t.reports) == [1, 2, 3] and t.value == sign * (1 + t.index % 4 + 10 / 3) for t in pruned)
    assert abs(result.best.value) == 1 and {t.status for t in tune(objective, **options).trials} == {"done"}
    with pytest.raises(WrongTypeError, match=r"pruner at tune\(\): got 'median' .*optuna.pruners.MedianPruner\(\)"):
        tune(objective, pruner="median", **options)
    found = tune(curve, {"rate": SPACE["rate"]}, trials=20, backend="optuna",
                 pruner=optuna.pruners.SuccessiveHalvingPruner(reduction_factor=3))  # fmt: skip
    assert found.best.value == 1 and sum(t.status == "pruned" for t in found.trials) > 8


def test_what_is_not_finite_is_pruned_and_never_the_best(optuna):
    def objective(trial, rate, report):
        report(1, math.nan if trial == 1 else 1.0)
        return float(trial)

    options = dict(backend="optuna", pruner=optuna.pruners.MedianPruner(n_startup_trials=1), mode="max")
    result = tune(objective, {"rate": SPACE["rate"]}, trials=3, **options)
    assert [t.status for t in result.trials] == ["done", "pruned", "done"] and result.best.index == 2


def test_a_trial_of_optunas_that_kills_its_process_has_failed(optuna, tmp_path):
    """Each trial is taken up again as it was proposed, three times."""
    options = dict(backend="optuna", directory=tmp_path)
    tune(trials=2, **options)
    for _ in range(3):
        study = _optuna.Study(SPACE, study_in(optuna, tmp_path).user_attrs["tsunax"], None, tmp_path)
        proposed = study.values(2)
        study.start([2])
        study.close()
    result = tune(trials=4, **options)
    assert [t.status for t in result.trials] == ["done", "done", "failed", "done"]
    assert str(result.trials[2].cause) == "Killed: the process ended 3 times during this trial"
    assert result.trials[2].values == proposed
    (tmp_path / "optuna.journal").write_text("[]\n{}\n")
    for call in (tuning.read, lambda folder: tune(directory=folder, backend="optuna")):
        with pytest.raises(CheckpointError, match="journal at .*optuna.journal: got"):
            call(tmp_path)


def test_workers_of_optunas_own(optuna, tmp_path):
    """Several threads on one study; `tune` goes on with what they did."""

    def objective(rate, rule, width, report, momentum=0.0):
        report(1, rate)
        return {"loss": bowl(rate, rule, width, momentum), "rate": rate}

    tune(objective, trials=1, backend="optuna", metric="loss", directory=tmp_path)
    study = study_in(optuna, tmp_path)
    study.optimize(tuning.as_optuna(objective, SPACE, "loss"), n_trials=6, n_jobs=2)
    assert all(t.user_attrs["rate"] == t.params["rate"] for t in study.trials[1:])
    study.enqueue_trial({"rate": 0.01, "rule": "adam"})
    result = tune(objective, trials=9, backend="optuna", metric="loss", directory=tmp_path)
    assert [t.status for t in result.trials] == ["done"] * 9 and result.trials[7].value == 8.0
    assert [t.value for t in result.trials] == [t.value for t in study_in(optuna, tmp_path).trials]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_ray(ray, tmp_path):
    """The trials of "random", elsewhere: one that raises and one that dies; and it goes on."""

    def objective(x, trial, report):
        if trial == 3:
            raise ValueError("bad luck")
        if trial == 4:
            os._exit(1)
        for step in range(1, 10):
            report(step, trial + 1 / step)
            time.sleep(0.01)
        return {"loss": x, "other": 1.0}

    space = {"x": spaces.uniform(0, 1)}
    options = dict(backend="ray", metric="loss", directory=tmp_path, resources={"cpu": 1}, concurrent=2)
    result = tune(objective, space, trials=6, **options)
    assert [t.values for t in result.trials] == [t.values for t in tune(lambda x: x, space, trials=6).trials]
    assert [t.index for t in result.trials if t.status == "failed"] == [3, 4]
    assert str(result.trials[3].cause).startswith("ValueError: bad luck (test_tuning.py:")
    assert result.trials[4].cause.type == "RayError"
    done = [t for t in result.trials if t.status == "done"]
    assert len(done) == 4 and all(t.value == t.values["x"] == t.metrics["loss"] for t in done)
    assert all(list(t.reports) == [*range(1, 10)] for t in done)
    again = tune(objective, space, trials=7, **options)
    assert told(again)[:6] == told(result) == told(tuning.read(tmp_path))[:6] and again.trials[6].status == "done"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_as_a_trainable_of_ray(ray, tmp_path):
    from ray import tune as tuner_of

    def objective(x, report):
        for step in range(1, 4):
            report(step, x / step)
        return x * 2

    asha = tuner_of.schedulers.ASHAScheduler(time_attr="step", max_t=20, grace_period=2, reduction_factor=2)
    tuner = tuner_of.Tuner(
        tuning.as_trainable(objective),
        param_space={"x": tuner_of.grid_search([1.0, 2.0])},
        tune_config=tuner_of.TuneConfig(metric="value", mode="max", scheduler=asha),
        run_config=tuner_of.RunConfig(storage_path=str(tmp_path), verbose=0),
    )
    best = tuner.fit().get_best_result()
    assert best.config == {"x": 2.0} and best.metrics["value"] == 4.0
    assert best.metrics_dataframe["value"].tolist() == [2.0, 1.0, 2 / 3, 4.0]


@pytest.mark.parametrize(("backend", "extra"), [("optuna", "tune"), ("ray", "ray")])
def test_without_the_library(monkeypatch, backend, extra, tmp_path):
    for name in (backend, f"{backend}.tune"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingLibraryError, match=rf"{backend} at tune.*pip install 'tsunax\[{extra}\]'"):
        tune(backend=backend, directory=tmp_path / "a")
    assert not (tmp_path / "a").exists()


# ------------------------------------------------------------------------------------------------- what cannot be

U = spaces.uniform(0, 1)


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        # the space
        (lambda: tune(space={}), HyperparameterError, r"space at tune\(\): got an empty one"),
        (lambda: tune(space=[U]), WrongTypeError, r"space at tune\(\): .*A dict"),
        (lambda: tune(space={1: U}), WrongTypeError, "name at space of tune"),
        (lambda: spaces.choice([]), HyperparameterError, r"options at choice\(\): got an empty list"),
        (lambda: spaces.grid([]), HyperparameterError, r"options at grid\(\): got an empty list"),
        (lambda: spaces.choice("adam"), WrongTypeError, r"options at choice\(\): got .*expected a list of values"),
        (lambda: spaces.choice([1, 2, 1]), HyperparameterError, r"options at choice\(\): got 1 twice"),
        (lambda: spaces.choice([jnp.tanh]), WrongTypeError, r"value at choice\(\), option 0: .*Give its name"),
        (lambda: spaces.choice([math.nan]), HyperparameterError, r"value at choice\(\), option 0: got nan"),
        (lambda: tune(space={**SPACE, "rates": U}), HyperparameterError, r"name at space of tune\(\): got 'rates', expected one of .* Did you mean 'rate'\? The objective does not take it"),
        (lambda: tune(space={k: v for k, v in SPACE.items() if k != "rate"}), HyperparameterError, r"objective at tune\(\): got a parameter 'rate', expected names of the space. Put it"),
        (lambda: tune(lambda momentum, **_: 0), HyperparameterError, r"objective at tune\(\): got 'momentum' without a default"),
        (lambda: tune(lambda trial: 0, {"trial": U}), HyperparameterError, "got 'trial', expected another name"),
        (lambda: spaces.uniform(1, 0), HyperparameterError, r"bounds at uniform\(\): got low=1, high=0, expected low < high"),
        (lambda: spaces.uniform(1, 1), HyperparameterError, "A value that does not change is given as it is"),
        (lambda: spaces.uniform(0, math.inf), HyperparameterError, r"high at uniform\(\): got inf"),
        (lambda: spaces.uniform(-1.7e308, 1.7e308), HyperparameterError, r"bounds at uniform\(\)"),
        (lambda: spaces.uniform("0", 1), WrongTypeError, r"low at uniform\(\)"),
        (lambda: spaces.log_uniform(0, 1), HyperparameterError, r"low at log_uniform\(\): got 0, expected a number > 0"),
        (lambda: spaces.log_uniform(-1, 1), HyperparameterError, r"low at log_uniform\(\): got -1"),
        (lambda: spaces.integer(0, 5, log=True), HyperparameterError, r"low at integer\(\): got 0, expected a number > 0"),
        (lambda: spaces.integer(0.5, 5), WrongTypeError, r"low at integer\(\): got 0.5"),
        (lambda: spaces.integer(5, 2), HyperparameterError, r"bounds at integer\(\): got low=5, high=2"),
        (lambda: tune(space={**SPACE, "rate": spaces.uniform}), WrongTypeError, r"entry at space\['rate'\]: got uniform itself"),
        (lambda: tune(space={"a": spaces.when("b", 1, U)}), HyperparameterError, r"when at space\['a'\]: got 'b'"),
        (lambda: tune(space={"a": spaces.when("b", 1, U), "b": 1}), HyperparameterError, r"when at space\['a'\]: got 'b', which comes after it"),
        (lambda: tune(space={**SPACE, "width": spaces.when("rule", "sdg", 1)}), HyperparameterError, r"value of 'rule' at space\['width'\]: got 'sdg', expected one of 'adam', 'sgd'"),
        (lambda: spaces.uniform(0, 10**400), HyperparameterError, r"high at uniform\(\): got 1000000.*\.\.\..*, expected a finite number"),
        (lambda: spaces.integer(-(10**400), 0), HyperparameterError, r"low at integer\(\): got -10000.*expected a finite number"),
        (lambda: spaces.log_uniform(1e-320, 1e300), HyperparameterError, r"bounds at log_uniform\(\)"),
        (lambda: tune(space={"a": U, "b": spaces.when("a", 0.5, 1)}), HyperparameterError, r"when 'a' at space\['b'\]: got uniform.*A single number of these is never drawn"),
        (lambda: tune(space={"a": spaces.integer(0, 3), "b": spaces.when("a", 4, 1)}), HyperparameterError, r"value of 'a' at space\['b'\]: got 4, expected integer\(low=0, high=3"),
        (lambda: tune(space={"a": spaces.integer(0, 3), "b": spaces.when("a", True, 1)}), HyperparameterError, r"value of 'a' at space\['b'\]: got True"),
        (lambda: tune(space={"a": spaces.choice([1, 2]), "b": spaces.when("a", [], 1)}), HyperparameterError, r"when at space\['b'\]: got no value of 'a'"),
        *[(functools.partial(tune, lambda **_: 0, {name: U}), HyperparameterError, f"got '{name}', expected another name") for name in ("value", "status", "seconds", "cause")],
        (lambda: tune(space={"f": len}), WrongTypeError, r"value at space\['f'\]: .*bind it"),
        # backends
        (lambda: tune(backend="grid"), HyperparameterError, r"space at tune\(\), backend 'grid': got no grid"),
        (lambda: tune(backend="grid", space={"rule": SPACE["rule"], "a": spaces.when("rule", "sgd", spaces.grid([1]))}), HyperparameterError, r"grid at space\['a'\]: got one under 'rule', which is drawn"),
        (lambda: tune(backend="grid", space={n: spaces.grid(range(1000)) for n in ("rate", "rule", "width")}), HyperparameterError, r"grid at tune\(\): got over 100,000 combinations"),
        (lambda: tune(backend="bayes"), HyperparameterError, r"backend at tune\(\): got 'bayes'"),
        (lambda: tune(sampler=1), WrongTypeError, r"option at tune\(backend='random'\): got 'sampler'"),
        # the call
        (lambda: tune(trials=0), HyperparameterError, r"trials at tune\(\): got 0, expected an int ≥ 1"),
        (lambda: tune(trials=-3), HyperparameterError, r"trials at tune\(\): got -3"),
        (lambda: tune(trials=2.5), WrongTypeError, r"trials at tune\(\): got 2.5"),
        (lambda: tune(trials=None), HyperparameterError, r"trials at tune\(\): got None"),
        (lambda: tune(None), WrongTypeError, r"objective at tune\(\): got None"),
        (lambda: tune(SPACE, bowl), WrongTypeError, r"objective at tune\(\): .*tune\(objective, space, ...\)"),
        (lambda: tune(seed=-1), HyperparameterError, r"seed at tune\(\): got -1"),
        (lambda: tune(mode="best"), HyperparameterError, r"mode at tune\(\): got 'best' .*, expected 'min' or 'max'"),
        (lambda: tune(metric=3), WrongTypeError, r"metric at tune\(\)"),
        (lambda: tune(vectorized=3), WrongTypeError, r"vectorized at tune\(\): got 3"),
        (lambda: tune(vectorized="rates"), HyperparameterError, r"vectorized at tune\(\): got 'rates'.*Did you mean 'rate'"),
        (lambda: tune(vectorized="rule"), HyperparameterError, r"vectorized 'rule' at tune\(\): .*Only numbers"),
        (lambda: tune(vectorized="rate", pruner=object()), HyperparameterError, r"pruner at tune\(\)"),
        (lambda: tune(vectorized="rate", backend="optuna"), HyperparameterError, r"vectorized at tune\(\): got backend"),
        (lambda: tune(pruner="median"), HyperparameterError, r"pruner at tune\(\): got one beside backend='random', expected None. Give backend='optuna' too"),
        (lambda: tune(vectorized="rate", members=0), HyperparameterError, r"members at tune\(\): got 0"),
    ],
)  # fmt: skip
def test_what_cannot_be(call, kind, text):
    with pytest.raises(kind, match=text) as caught:
        call()
    assert isinstance(caught.value, TsunaxError) and len(str(caught.value)) < 400
