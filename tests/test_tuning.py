"""Sweeps: what is drawn, what is recorded, how one goes on; bad spaces, directories and objectives."""
# ruff: noqa: RUF043, a pattern is written as it is read

import functools
import itertools
import json
import logging
import math
import os
import re
import signal
import subprocess
import sys
import time
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
from tsunax.tuning import spaces

ROOT = Path(__file__).resolve().parents[1]
SPACE = {
    "rate": spaces.log_uniform(1e-4, 1.0),
    "rule": spaces.choice(["adam", "sgd"]),
    "momentum": spaces.uniform(0.5, 0.9),
    "width": 8,
}


def bowl(rate, rule, width, momentum=0.0):
    return math.log10(rate / 1e-2) ** 2 + momentum + width


def tune(objective=bowl, space=SPACE, trials=12, **options):
    return tuning.tune(objective, space, trials=trials, progress=False, **options)


def told(result):
    """All of a result but how long it took."""
    return [(t.index, t.values, t.status, repr(t.value), t.metrics, t.cause, t.reports) for t in result.trials]


@pytest.fixture
def optuna():
    found = need("optuna")
    found.logging.set_verbosity(found.logging.WARNING)
    yield found
    found.logging.set_verbosity(found.logging.INFO)


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
    # written down once: what a journal of today says must be drawn again tomorrow.
    assert spaces.sample({"x": spaces.uniform(0, 1)}, 5, 7) == {"x": 0.7142467514218371}


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_bounds_are_pythons_own(optuna, tmp_path, kind):
    """So that their values go into a file, and that a directory does not know the difference."""
    entries = spaces.uniform(kind(0.5), kind(2)), spaces.log_uniform(kind(0.5), kind(2))
    space = {"a": entries[0], "b": entries[1], "c": spaces.integer(np.int32(1), np.int64(5))}
    result = tune(lambda a, b, c: a, space, trials=3, directory=tmp_path)
    assert all([type(x) for x in t.values.values()] == [float, float, int] for t in result.trials)
    space = {"a": spaces.uniform(0.5, 2.0), "b": spaces.log_uniform(0.5, 2.0), "c": spaces.integer(1, 5)}
    assert told(tune(lambda a, b, c: a, space, trials=3, directory=tmp_path)) == told(result)


def test_a_grid_is_every_combination():
    space = {"a": spaces.grid([1, 2]), "c": spaces.grid(np.array([0.5, 1.5])), "d": 3}
    result = tuning.tune(lambda a, c, d: a + c + d, space, backend="grid", progress=False)
    assert [(t.values["a"], t.values["c"]) for t in result.trials] == [(1, 0.5), (1, 1.5), (2, 0.5), (2, 1.5)]
    assert all(type(t.values["c"]) is float for t in result.trials)
    space = {"a": spaces.grid([1, 2]), "x": spaces.uniform(0, 1)}
    result = tuning.tune(lambda a, x: a, space, backend="grid", trials=6, progress=False)
    assert result["a"].tolist() == [1, 2] * 3 and len(set(result["x"])) == 6


# ------------------------------------------------------------------------------------------------------- the result


def test_a_column_has_the_values_as_they_are():
    """Tuples of several lengths, and numbers beside strings."""
    options = [(1, 2), (3,), 4, "auto"]
    result = tuning.tune(lambda a: 1.0, {"a": spaces.grid(options)}, backend="grid", progress=False)
    assert result["a"].tolist() == options and result["value"].dtype == np.float64
    assert result["status"].dtype.kind == "U"  # which `np.save` writes without pickle


def test_the_best_and_the_table():
    result = tune(trials=30)
    values = [math.log10(t.values["rate"] / 1e-2) ** 2 + t.values["momentum"] + 8 for t in result.trials]
    assert result.best.index == np.argmin(values) and result.best.value == min(values)
    assert tune(trials=30, mode="max").best.index == np.argmax(values)
    assert result["value"].tolist() == values
    lines = repr(result).splitlines()
    assert lines[0] == "30 trials" and lines[-1] == "... 10 more" and len(lines) == 23
    assert lines[1].split() == ["trial", "rate", "rule", "momentum", "width", "value", "status"]
    assert lines[2].split()[0] == str(result.best.index)
    with pytest.raises(TrialError, match="column at Result: got 'rates', expected .* Did you mean 'rate'"):
        result["rates"]


def test_dicts_of_numbers():
    objective = lambda **values: {"loss": jnp.float32(bowl(**values)), "accuracy": np.ones(1)}
    result = tune(objective, metric="loss")
    assert result.best.metrics == {"loss": pytest.approx(result.best.value), "accuracy": 1.0}
    assert result["metrics/accuracy"].tolist() == [1.0] * 12
    assert tune(lambda **values: {"only": 1}).best.metrics == {"only": 1.0}


# ------------------------------------------------------------------------------------------------ trials that fail


def fails(trial):
    if trial == 1:
        return {}["loss"]
    if trial == 7:
        np.linalg.cholesky(-np.eye(2))  # inside a library: the line is still ours
    bad = {
        2: math.nan,
        3: None,
        4: 10**400,
        5: "0.5",
        6: np.ones(2),
        8: -math.inf,
        9: True,
        10: {"a": 1, "b": 2},
        11: {"a": "x"},
    }
    return bad.get(trial, 1.0)


def test_a_trial_that_fails_fails_alone():
    trials = tune(lambda trial, rate: fails(trial), {"rate": SPACE["rate"]}, mode="max").trials
    assert [t.index for t in trials if t.status == "done"] == [0]
    causes = {t.index: t.cause for t in trials if t.cause}
    assert causes[1][:2] == ("KeyError", "'loss'") and causes[1].where.endswith('return {}["loss"]')
    assert causes[1].where.startswith("test_tuning.py:")
    assert causes[4][0] == "OverflowError" and "cholesky(-np.eye(2))" in causes[7].where
    kinds = {2: "NonFiniteError", 8: "NonFiniteError", 10: "HyperparameterError"}
    expected = {
        2: "result at objective: got nan, expected a finite number.",
        3: "result at objective: got None, expected a number, or a dict of numbers.",
        5: "got a string|got '0.5'",
        6: r"float64\[2\]",
        8: "got -inf",
        9: "got True",
        10: r"expected one of a, b. Say which number counts: tune\(..., metric=...\)",
        11: "result at objective, 'a': got 'x'",
    }
    for i, text in expected.items():
        assert causes[i].type == kinds.get(i, "WrongTypeError")
        assert re.search(text, causes[i].message), causes[i]
    assert math.isnan(trials[2].value) and trials[2].status == "failed"


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


def test_no_trial_that_is_done():
    with pytest.warns(UserWarning, match=r"tune\(\): no trial ended with a number. The first: ZeroDivisionError"):
        result = tune(lambda rate: 1 / 0, {"rate": SPACE["rate"]}, trials=2)
    with pytest.raises(TrialError, match=r"best at Result: got 2 trials, none of them done; the first failure: Zero"):
        _ = result.best


# ------------------------------------------------------------------------------------------------------- the journal


def test_a_sweep_goes_on(optuna, tmp_path):
    calls = []

    def objective(trial, rate, report):
        calls.append(trial)
        if trial == 5 and calls.count(5) == 1:
            raise KeyboardInterrupt
        return fails(trial) if trial < 4 else rate

    space = {"rate": SPACE["rate"]}
    with pytest.raises(KeyboardInterrupt) as caught:
        tune(objective, space, directory=tmp_path)
    assert caught.value.result.trials[-1].status == "done"
    assert len(tuning.read(tmp_path)) == 5
    result = tune(objective, space, directory=tmp_path)
    assert calls == [0, 1, 2, 3, 4, 5, *range(5, 12)]
    assert told(result) == told(tune(objective, space)) == told(tuning.read(tmp_path))
    calls.clear()
    assert len(tune(objective, space, trials=14, directory=tmp_path)) == 14 and calls == [12, 13]
    assert len(tune(objective, space, trials=3, directory=tmp_path)) == 14


@pytest.mark.parametrize("backend", ["random", "grid", "optuna"])
def test_a_torn_line_is_dropped_and_others_are_errors(tmp_path, optuna, backend, clock):
    """Each cut of the journal is of a process that died there: the sweep ends as if it had not."""
    space = {**SPACE, "rule": spaces.grid(["adam", "sgd"])}
    whole = tune(space=space, trials=6, backend=backend, directory=tmp_path / "a")
    content = (tmp_path / "a" / "optuna.journal").read_bytes()
    for at in (0, 1, 30, *np.random.default_rng(0).integers(0, len(content), 8), len(content)):
        folder = tmp_path / f"cut {at}"
        folder.mkdir()
        (folder / "optuna.journal").write_bytes(content[:at])
        (folder / "optuna.journal.lock").symlink_to("optuna.journal")
        assert told(tune(space=space, trials=6, backend=backend, directory=folder)) == told(whole)
    for odd in (b"mine", b"[]\n{}\n", content[:40] + b"\n" + content[40:]):
        (tmp_path / "a" / "optuna.journal").write_bytes(odd)
        with pytest.raises(CheckpointError, match="journal at .*a: got"):
            tune(space=space, trials=6, backend=backend, directory=tmp_path / "a")
        assert (tmp_path / "a" / "optuna.journal").read_bytes().startswith(odd)


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
        assert [t.status for t in caught.value.result.trials] == ["done"] * 4


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
@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_a_sweep(optuna, tmp_path, kind):
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
    assert process.returncode in (-kind, 128 + kind), said
    assert time.monotonic() - began < 15
    with start("fast") as process:
        assert process.wait(60) == 0, process.stderr.read()
    assert (tmp_path / "ran").read_text().split() == ["0", "1", "2", "3", "3", "4", "5"]
    assert len(tuning.read(tmp_path / "sweep")) == 6


def test_a_run_that_is_interrupted_inside_a_trial(optuna, tmp_path, notebook):
    """`fit` hears Ctrl-C itself, and in a notebook returns: what it returns is no result."""
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
    assert [t.status for t in result.trials] == ["done"]
    assert len(tuning.read(tmp_path)) == 1


def test_a_signal_to_a_run_inside_a_trial_ends_the_sweep(tmp_path):
    step = ts.train_step(lambda params, x: jnp.mean((x @ params["w"]) ** 2))
    data = ts.batches(np.ones((8, 2), np.float32), 4)

    def objective(rate, trial):
        limit_cpu = lambda run: signal.raise_signal(signal.SIGXCPU) if trial else None
        state = ts.setup(ts.rules.sgd(rate), {"w": jnp.ones(2)})
        options = {
            "callbacks": ts.callbacks.every(2, limit_cpu),
            "checkpoint": tmp_path / str(trial),
            "progress": False,
        }
        return ts.fit(step, state, data, steps=8, log_every=2, **options)[1]["loss"][-1]

    with pytest.raises(SystemExit) as caught:
        tune(objective, {"rate": spaces.uniform(0.1, 0.2)}, trials=4)
    assert caught.value.code == 152 and [t.status for t in caught.value.result.trials] == ["done"]
    assert ts.Checkpoints(tmp_path / "1", read_only=True).latest() == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "drill", [["--kills", "12"], ["--kills", "8", "--backend", "optuna"], ["--writers", "2"]], ids=lambda x: x[-1]
)
def test_sweeps_that_are_killed(drill, tmp_path):
    need("optuna")
    command = [sys.executable, "-m", "campaigns.sweeps", *drill, "--results", tmp_path / "counts"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = json.loads((tmp_path / "counts").read_text())["counts"]
    assert counts["trials"] >= 60 and not counts["lost"] and not counts["doubled"], counts


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (dict(space={**SPACE, "rate": spaces.log_uniform(1e-5, 1.0)}), r"rate at tune\(\): got log_uniform\(low=1e-05.*expected log_uniform\(low=0.0001, high=1.0\), as in"),
        (dict(space={k: v for k, v in SPACE.items() if k != "momentum"}), r"momentum at tune\(\): got None"),
        (dict(space={**SPACE, "width": 9}), r"width at tune\(\): got 9, expected 8"),
        (dict(seed=1), r"seed at tune\(\): got 1, expected 0, as in .*Give another directory"),
        (dict(mode="max"), r"mode at tune\(\): got max, expected min"),
        (dict(metric="loss"), r"metric at tune\(\): got loss, expected None"),
    ],
)  # fmt: skip
def test_a_directory_of_another_sweep(optuna, tmp_path, change, text):
    tune(trials=1, directory=tmp_path)
    with pytest.raises(CheckpointError, match=text):
        tune(trials=2, directory=tmp_path, **change)


@pytest.mark.medium
def test_one_writer_and_readers_of_nothing(optuna, tmp_path):
    holder = "import sys, time; from pathlib import Path; from tsunax._core import durable_files as _files"
    holder += "; lock = _files.Lock(Path(sys.argv[1])); print(1, flush=True); time.sleep(60)"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([sys.executable, "-c", holder, tmp_path], env=env, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"1\n"
        fix = r"or read with ts\.tuning\.read\(directory\)\.$"
        with pytest.raises(CheckpointError, match=f"directory in use at .*got process {process.pid}.* {fix}"):
            tune(directory=tmp_path)
        process.kill()
    with pytest.raises(CheckpointError, match="journal at .*no optuna.journal"):
        tuning.read(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="journal at .*file"):
        tune(directory=tmp_path / "file")
    for path in (5, "", b"sweep", "a\0b"):
        for call in (lambda: tune(directory=path), lambda: tuning.read(path)):  # noqa: B023, called at once
            with pytest.raises(CheckpointError, match=r"directory at (tune|read)\(\): .*expected a directory's path"):
                call()


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


@pytest.mark.medium
def test_trials_of_one_population_are_single_runs():
    """Up to 1e-4: what a member may differ by from a run of its own, after 40 steps."""
    alone = tune(single, LIVE, trials=7)
    runs = tune(together, LIVE, trials=7, vectorized=["rate", "decay"], members=3)
    assert [t.values for t in runs.trials] == [t.values for t in alone.trials]
    np.testing.assert_allclose(runs["value"], alone["value"], rtol=1e-4)
    assert runs.best.index == alone.best.index


def test_a_sweep_of_groups_goes_on(optuna, tmp_path):
    space, calls = {"x": spaces.uniform(0, 1), "n": spaces.choice([1, 2])}, []
    objective = lambda x, n, trial: calls.append(trial.tolist()) or x * n
    options = dict(space=space, vectorized="x", members=3, directory=tmp_path)
    tune(objective, trials=4, **options)
    result = tune(objective, trials=9, **options)
    assert sorted(itertools.chain(*calls)) == list(range(9)) and max(map(len, calls)) <= 3
    assert (
        told(result) == told(tuning.read(tmp_path)) and result["value"].tolist() == (result["x"] * result["n"]).tolist()
    )


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
    assert "got list of 3, expected an array of 1 numbers" in wrong[3].cause.message


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
    found = tune(objective, directory=tmp_path, **options)
    assert told(found) == told(whole) == told(tuning.read(tmp_path))
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
    found = tune(curve, {"rate": SPACE["rate"]}, trials=20, backend="optuna",
                 pruner=optuna.pruners.SuccessiveHalvingPruner(reduction_factor=3))  # fmt: skip
    assert found.best.value == 1 and sum(t.status == "pruned" for t in found.trials) > 8


@pytest.mark.parametrize("name", ["SuccessiveHalvingPruner", "HyperbandPruner"])
def test_a_pruner_that_keeps_notes_prunes_the_same_trials_again(optuna, tmp_path, name):
    """Rungs are notes in the trials, and the brackets of Hyperband depend on the name of the study."""
    make = {
        "SuccessiveHalvingPruner": lambda pruner: pruner(reduction_factor=2),
        "HyperbandPruner": lambda pruner: pruner(max_resource=9),
    }[name]
    options = dict(backend="optuna", space={"rate": SPACE["rate"]})
    pruner = lambda: make(getattr(optuna.pruners, name))
    objective = lambda rate, report: [report(step, rate + rate * 100 % 1 / step) for step in range(1, 10)] and rate
    whole = tune(objective, trials=16, pruner=pruner(), **options)
    assert {t.status for t in whole.trials} == {"done", "pruned"}
    assert told(tune(objective, trials=16, pruner=pruner(), **options)) == told(whole)
    for trials in (7, 16):
        resumed = tune(objective, trials=trials, pruner=pruner(), directory=tmp_path, **options)
    assert told(resumed) == told(whole)


def test_what_is_not_finite_is_pruned_and_never_the_best(optuna):
    def objective(trial, rate, report):
        report(1, math.nan if trial == 1 else 1.0)
        return float(trial)

    options = dict(backend="optuna", pruner=optuna.pruners.MedianPruner(n_startup_trials=1), mode="max")
    result = tune(objective, {"rate": SPACE["rate"]}, trials=3, **options)
    assert [t.status for t in result.trials] == ["done", "pruned", "done"] and result.best.index == 2


def test_workers_of_optunas_own(optuna, tmp_path):
    """Several threads on one study; a search in a directory ignores what they add to its study."""

    def objective(rate, rule, width, report, momentum=0.0):
        report(1, rate)
        return {"loss": bowl(rate, rule, width, momentum), "rate": rate}

    options = dict(backend="optuna", metric="loss", directory=tmp_path)
    first = tune(objective, trials=1, **options)
    study = study_in(optuna, tmp_path)
    study.optimize(tuning.as_optuna(objective, SPACE, "loss"), n_trials=6, n_jobs=2)
    assert all(t.user_attrs["rate"] == t.params["rate"] for t in study.trials[1:])
    assert told(tuning.read(tmp_path)) == told(first)
    expected = tune(objective, trials=4, backend="optuna", metric="loss")
    assert told(tune(objective, trials=4, **options)) == told(expected)
    worker = tuning.as_optuna(lambda x, trial: x + trial, {"x": spaces.uniform(0, 1)})
    assert worker(optuna.trial.FixedTrial({"x": 0.5}, number=2)) == 2.5


def test_journals_of_other_programs(optuna, tmp_path):
    """They are refused, and stay as they are."""

    def made(name, **how):
        path = tmp_path / name
        path.mkdir()
        file = optuna.storages.journal.JournalFileBackend(str(path / "optuna.journal"))
        return path, optuna.create_study(storage=optuna.storages.JournalStorage(file), **how)

    one, _ = made("another name", study_name="mine")
    two, _ = made("two directions", study_name="tsunax", directions=["minimize", "maximize"])
    three, study = made("no space of ours", study_name="tsunax")
    study.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=1)
    for path in (one, two, three):
        content = (path / "optuna.journal").read_bytes()
        for call in (lambda: tune(directory=path), lambda: tuning.read(path)):  # noqa: B023, called at once
            with pytest.raises(CheckpointError, match="journal at .*a study '(mine|tsunax)' of another program"):
                call()
        assert (path / "optuna.journal").read_bytes() == content


def test_damage_that_optuna_does_not_expect(optuna, tmp_path):
    """Assertions of Optuna's, and nesting without end."""
    tune(trials=2, directory=tmp_path)
    path = tmp_path / "optuna.journal"
    content = path.read_bytes()
    damages = {
        "nesting": content + b'{"op_code":' + b"[" * 100_000 + b"\n",
        "the last line": content[:-2] + b"#\n",
        "an operation without its parts": content + b'{"op_code":4}\n',
        "a direction of none": content.replace(b'"directions":[1]', b'"directions":[9]'),
        "what it searched": content.replace(b'"user_attr":{"tsunax":{', b'"user_attr":{"tsunax":5,"x":{'),
        "its space": content.replace(b'"space":', b'"spice":'),
        "an index": content.replace(b'"index":0', b'"index":[]'),
    }
    for name, damaged in damages.items():
        assert damaged != content
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError):
            tune(directory=tmp_path)
        if name != "the last line":  # to a reader it looks as if it were being written
            with pytest.raises(CheckpointError):
                tuning.read(tmp_path)


@pytest.mark.parametrize("place", ["symlink", "rename"])
def test_a_disk_that_fails_at_the_lock(optuna, tmp_path, monkeypatch, place):
    """Optuna's lock is a link: what the disk says of it is told, and the sweep goes on later."""

    def objective(rate, rule, width, trial, momentum=0.0):
        if trial == 2:
            monkeypatch.setattr(os, place, failing)
        return rate

    def failing(*args, **kwargs):
        raise OSError(5, "Input/output error")

    with pytest.raises(SaveError, match=r"journal at .*optuna\.journal: got .*The same command goes on with trial 2"):
        tune(objective, trials=4, directory=tmp_path)
    with pytest.raises(CheckpointError, match=r"journal at .*: got (OSError|RuntimeError)"):
        tune(objective, trials=4, directory=tmp_path)
    monkeypatch.undo()
    with pytest.warns(UserWarning, match="objective has changed"):
        assert len(tune(bowl, trials=4, directory=tmp_path)) == 4


def test_another_objective_in_a_directory_is_told(optuna, tmp_path):
    """Each time; one that counts its calls, or keeps what it has computed, is the same one."""
    calls, known, options = [], {}, {"space": {"x": spaces.uniform(0, 1)}, "directory": tmp_path}

    def objective(x, scale=1.0):
        calls.append(x)
        known[x] = known.get(x, x * scale)
        return known[x]

    tune(objective, trials=2, **options)
    tune(objective, trials=3, **options)
    for scale in (2.0, 3.0):
        objective.__defaults__ = (scale,)
        with pytest.warns(
            UserWarning, match=r"tune\(\): objective has changed .* Earlier trials in .* of the other one"
        ):
            tune(objective, trials=4, **options)
    assert len(calls) == 4


def test_a_worker_that_holds_the_lock_is_waited_for(optuna, tmp_path, monkeypatch):
    tune(trials=1, directory=tmp_path)
    path = tmp_path / "optuna.journal"
    lock = optuna.storages.journal.JournalFileSymlinkLock(str(path))
    lock.acquire()
    content = path.read_bytes()
    half = content.splitlines(keepends=True)[-1]

    def sleep(seconds):  # it writes the rest of its line meanwhile
        monkeypatch.undo()
        path.write_bytes(content + half)
        lock.release()

    path.write_bytes(content + half[:20])
    monkeypatch.setattr(time, "sleep", sleep)
    tune(trials=2, directory=tmp_path)
    assert path.read_bytes().startswith(content + half)


def test_optuna_says_nothing_of_its_own(optuna, tmp_path):
    optuna.logging.set_verbosity(optuna.logging.INFO)
    records, handler = [], logging.Handler()
    handler.emit = records.append
    logging.getLogger("optuna").addHandler(handler)
    try:
        for trials in (2, 3):
            tune(trials=trials, backend="optuna", directory=tmp_path)
    finally:
        logging.getLogger("optuna").removeHandler(handler)
    assert not records and optuna.logging.get_verbosity() == optuna.logging.INFO


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


def test_without_the_library(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "optuna", None)
    for options in (dict(backend="optuna"), dict(directory=tmp_path / "a")):
        with pytest.raises(MissingLibraryError, match=r"optuna at tune.*pip install 'optuna>=4.6'"):
            tune(**options)
    assert not (tmp_path / "a").exists() and len(tune()) == 12


# ------------------------------------------------------------------------------------------------- what cannot be

U = spaces.uniform(0, 1)


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        # the space
        (lambda: spaces.choice([]), HyperparameterError, r"options at choice\(\): got \[\]"),
        (lambda: spaces.grid([]), HyperparameterError, r"options at grid\(\): got \[\]"),
        (lambda: spaces.choice("adam"), HyperparameterError, r"options at choice\(\): got .*expected a list of one value"),
        (lambda: spaces.choice([1, 2, 1]), HyperparameterError, r"options at choice\(\): .*each once"),
        (lambda: spaces.choice([jnp.tanh]), WrongTypeError, r"value at choice\(\): .*Bind"),
        (lambda: spaces.choice([math.nan]), HyperparameterError, r"value at choice\(\): got nan"),
        *[(functools.partial(spaces.uniform, *x), HyperparameterError, r"bounds at uniform\(\): got low=.*expected low < high, both finite")
          for x in ((1, 0), (1, 1), (0, math.inf), (math.nan, 1))],
        (lambda: spaces.log_uniform(0, 1), HyperparameterError, r"bounds at log_uniform\(\): got low=0, .*expected 0 < low"),
        (lambda: spaces.log_uniform(-1, 1), HyperparameterError, r"bounds at log_uniform\(\): got low=-1"),
        (lambda: spaces.integer(0, 5, log=True), HyperparameterError, r"bounds at integer\(\): got low=0"),
        (lambda: spaces.integer(5, 2), HyperparameterError, r"bounds at integer\(\): got low=5, high=2"),
        (lambda: tune(space={**SPACE, "rate": spaces.uniform}), WrongTypeError, r"value at space\['rate'\]"),
        (lambda: tune(space={**SPACE, "rate": [1e-3, 1e-2]}), WrongTypeError, r"value at space\['rate'\]: .*choice\(\["),
        (lambda: tune(space={"f": len}), WrongTypeError, r"value at space\['f'\]: .*Bind"),
        # backends
        (lambda: tune(backend="grid"), HyperparameterError, r"space at tune\(\): got no grid"),
        (lambda: tune(backend="bayes"), HyperparameterError, r"backend at tune\(\): got 'bayes'"),
        (lambda: tune(sampler=1), HyperparameterError, r"backend at tune\(\): got random, expected 'optuna'"),
        (lambda: tune(pruner="median"), HyperparameterError, r"backend at tune\(\)"),
        (lambda: tune(vectorized="rate", backend="optuna"), HyperparameterError, r"backend at tune\(\)"),
        (lambda: tune(vectorized="rates"), HyperparameterError, r"vectorized at tune\(\): got 'rates'.*mean 'rate'"),
        # the call
        (lambda: tune(trials=0), HyperparameterError, r"trials at tune\(\): got 0, expected an int ≥ 1"),
        (lambda: tune(trials=2.5), WrongTypeError, r"trials at tune\(\): got 2.5"),
        (lambda: tune(trials=None), WrongTypeError, r"trials at tune\(\): got None"),
        (lambda: tune(seed=-1), HyperparameterError, r"seed at tune\(\): got -1"),
        (lambda: tune(mode="best"), HyperparameterError, r"mode at tune\(\): got 'best' .*, expected 'min' or 'max'"),
        (lambda: tune(vectorized="rate", members=0), HyperparameterError, r"members at tune\(\): got 0"),
    ],
)  # fmt: skip
def test_what_cannot_be(call, kind, text):
    with pytest.raises(kind, match=text) as caught:
        call()
    assert isinstance(caught.value, TsunaxError) and len(str(caught.value)) < 400
