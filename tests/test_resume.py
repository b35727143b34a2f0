"""What a run that goes on takes: from its checkpoint, from the state in hand, and from the script."""

import contextlib
import csv
import dataclasses
import enum
import errno
import functools
import io
import json
import multiprocessing
import os
import pty
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tsunax as ts
from tests.helpers import assert_trees_equal, medium_if, need
from tsunax import averages
from tsunax._core.durable_files import Lock
from tsunax._core.processes import Alone
from tsunax._core.stable_text import code_of, values_of
from tsunax.checkpoints import _home, reading
from tsunax.checkpoints.saving import Best, Checkpoints
from tsunax.checkpoints.script_settings import code_text
from tsunax.errors import CheckpointError, DataError, RowError, StateError
from tsunax.precision import LossScale
from tsunax.run import callbacks, loggers

X = np.arange(64, dtype=np.float32).reshape(16, 4) / 64
STEP = ts.train_step(lambda params, x: jnp.mean((x @ params["w"] - 1.0) ** 2))


def make(rate: Any = 0.1, w=0.0, **given):
    return ts.setup(ts.rules.sgd(rate), {"w": jnp.full(4, w)}, **given)


def fit(path, state, steps, step=STEP, data=None, **given):
    data = ts.batches(X, 4, shuffle=True) if data is None else data
    given = {"progress": False, "log_every": 1, **given}
    return ts.fit(step, state, data, steps=steps, checkpoint=path, **given)


@pytest.mark.parametrize("in_hand", [False, True])
def test_a_log_has_the_rows_of_an_uninterrupted_run(tmp_path, in_hand):
    """Also at the step of an end, which has a row for that alone; one with other numbers stays."""

    def steps_of(name, stops, **given):
        state, data = make(), ts.batches(X, 4, shuffle=True)
        for stop in stops:
            logs = [loggers.csv(tmp_path / f"{name}.csv"), loggers.jsonl(tmp_path / f"{name}.jsonl")]
            new = state if in_hand else make()
            more = {"data": data if in_hand else None, "log_every": 5, "logger": logs, **given}
            state, history = fit(tmp_path / name, new, stop, **more)
        rows = (tmp_path / f"{name}.csv").read_text().splitlines()[1:]
        lines = map(json.loads, (tmp_path / f"{name}.jsonl").read_text().splitlines())
        found = [int(row.partition(",")[0]) for row in rows]
        assert found == [line["step"] for line in lines if "step" in line] == history["step"].tolist()
        return found

    whole = steps_of("whole", [23])
    assert whole == [1, 5, 10, 15, 20, 23]
    assert steps_of("cut", [8, 10, 12, 23]) == whole
    told = [1, 5, 8, 10, 15, 16, 20, 24]
    assert steps_of("told", [8, 24], evaluate=lambda _: {"val/loss": 0.5}, evaluate_every=8) == told


def logs_in(folder):
    return [loggers.csv(folder / "log.csv"), loggers.jsonl(folder / "log.jsonl")]


def rows_of_runs(folder):
    """The steps of each run, in the order of the file: the same in both files."""
    with open(folder / "log.csv", newline="") as file:
        rows = [(row.get("run_id") or "", int(row["step"])) for row in csv.DictReader(file)]
    lines = map(json.loads, (folder / "log.jsonl").read_text().splitlines())
    assert rows == [(line.get("run_id", ""), line["step"]) for line in lines if "step" in line]
    return [[step for run, step in rows if run == name] for name in dict.fromkeys(run for run, _ in rows)]


def ends_at(step):
    """A process that ends at this step, without a checkpoint of it."""

    def end(run):
        raise KeyError(f"step {run.step}")

    return callbacks.every(step, end)


def failed(folder, path, steps, at, **given):
    with pytest.raises(KeyError, match=f"step {at}"):
        fit(path, make(), steps, callbacks=ends_at(at), logger=logs_in(folder), **given)


def test_a_run_that_ends_before_its_first_checkpoint_leaves_no_rows(tmp_path):
    """Whether the process begins anew or goes on with what it has in hand."""
    failed(tmp_path, tmp_path / "a", 9, at=4)
    fit(tmp_path / "a", make(), 6, logger=logs_in(tmp_path))
    assert rows_of_runs(tmp_path) == [[1, 2, 3, 4, 5, 6]]
    data = ts.batches(X, 4, shuffle=True)
    with pytest.raises(KeyError) as ended:
        fit(tmp_path / "b", make(), 9, data=data, callbacks=ends_at(3), logger=logs_in(tmp_path))
    fit(tmp_path / "b", ended.value.state, 5, data=data, logger=logs_in(tmp_path))
    assert rows_of_runs(tmp_path) == [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5]]


def test_runs_in_one_log_keep_their_rows_when_others_resume(tmp_path):
    a, b = (Checkpoints(tmp_path / name, every=3) for name in "ab")
    with a, b:
        ts.fit(STEP, make(), ts.batches(X, 4), steps=2, progress=False, log_every=1, logger=logs_in(tmp_path))
        failed(tmp_path, a, 12, at=8)
        fit(b, make(), 12, logger=logs_in(tmp_path))
        fit(a, make(), 12, logger=logs_in(tmp_path))  # from 6: rows 7 and 8 are written anew
        fit(b, make(), 14, logger=logs_in(tmp_path))
    assert rows_of_runs(tmp_path) == [[1, 2], [*range(1, 13)], [*range(1, 15)]]
    shutil.rmtree(tmp_path / "a")  # another run then, whose rows are no continuation
    fit(tmp_path / "a", make(), 3, logger=logs_in(tmp_path))
    assert rows_of_runs(tmp_path) == [[1, 2], [*range(1, 13)], [*range(1, 15)], [1, 2, 3]]


def test_a_copied_directory_is_a_run_of_its_own(tmp_path):
    """In a log that both write; in a log that was copied with it, the rows of the first are its own."""

    def stopped(name, steps, at):
        ends, folder = {} if at is None else {"callbacks": ends_at(at)}, tmp_path / name
        with Checkpoints(folder / "run", every=3) as saver, contextlib.suppress(KeyError):
            fit(saver, make(), steps, logger=logs_in(tmp_path) + logs_in(folder), **ends)

    stopped("a", 12, 8)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    stopped("b", 8, None)  # from 6, beside the rows 7 and 8 of the other
    assert rows_of_runs(tmp_path) == [[*range(1, 9)], [7, 8]]
    assert rows_of_runs(tmp_path / "b") == [[*range(1, 7)], [7, 8]]
    stopped("a", 12, None)
    assert sorted(rows_of_runs(tmp_path)) == [[*range(1, 13)], [7, 8]]
    assert rows_of_runs(tmp_path / "a") == [[*range(1, 13)]]
    os.rename(tmp_path / "a", tmp_path / "c")  # the same run elsewhere
    stopped("c", 14, None)
    assert sorted(rows_of_runs(tmp_path)) == [[*range(1, 15)], [7, 8]]
    assert rows_of_runs(tmp_path / "c") == [[*range(1, 15)]]
    shutil.copytree(tmp_path / "c", tmp_path / "d")
    shutil.rmtree(tmp_path / "c")  # moved to another disk
    os.symlink("d", tmp_path / "latest")  # the same directory again, no original of it
    stopped("d", 16, None)
    assert sorted(rows_of_runs(tmp_path)) == [[*range(1, 17)], [7, 8]]


def test_a_row_that_was_saved_before_loggers_had_it_is_logged(tmp_path):
    """The last row of a run waits for its end, whose evaluation may be killed."""
    fails = lambda state: 1 / 0
    with pytest.raises(ZeroDivisionError), Checkpoints(tmp_path / "run", every=3) as checkpoints:
        fit(checkpoints, make(), 6, evaluate=fails, logger=logs_in(tmp_path))
    for path in (tmp_path / "log.csv", tmp_path / "log.jsonl"):  # as a killed process leaves it
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    _, history = fit(tmp_path / "run", make(), 6, evaluate=lambda state: {"val/loss": 0.5}, logger=logs_in(tmp_path))
    assert rows_of_runs(tmp_path) == [[1, 2, 3, 4, 5, 6]]
    last = json.loads((tmp_path / "log.jsonl").read_text().splitlines()[-1])
    assert last["loss"] == history.last("loss") and last["val/loss"] == 0.5


def test_what_a_callback_logs_when_a_run_is_resumed_makes_no_second_row(tmp_path):
    log_norm = lambda run: run.log(norm=float(jnp.sum(run.state.params["w"])))
    for stop in (8, 16):
        _, history = fit(tmp_path / "run", make(), stop, callbacks=log_norm, log_every=4, logger=logs_in(tmp_path))
    assert rows_of_runs(tmp_path) == [history["step"].tolist()] == [[0, 1, 4, 8, 12, 16]]
    lines = map(json.loads, (tmp_path / "log.jsonl").read_text().splitlines())
    assert all(line.keys() >= {"loss", "norm"} for line in lines if line.get("step", 0) > 1)


def test_every_row_that_a_checkpoint_counts_on_is_on_the_disk(tmp_path, monkeypatch):
    synced, sizes, fsync, save = {}, [], os.fsync, Checkpoints._save

    def note(fd):
        about = os.fstat(fd)
        synced[about.st_ino] = about.st_size
        fsync(fd)

    def look(*args, step, **values):
        for name in ("log.csv", "log.jsonl"):
            about = os.stat(tmp_path / name)
            sizes.append((step, synced.get(about.st_ino), about.st_size))
        assert os.stat(tmp_path).st_ino in synced  # the entries of the files
        save(*args, step=step, **values)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(Checkpoints, "_save", look)
    with Checkpoints(tmp_path / "run", every=3) as checkpoints:
        fit(checkpoints, make(), 8, logger=logs_in(tmp_path))
    assert {step for step, _, _ in sizes} == {3, 6, 8} and all(part == size for _, part, size in sizes)


def adjusting(run):
    """The weight decay changes at 5 and is what it was from 12 on; a part gets a rate of its own at 7."""
    if run.step in (5, 12):
        return ts.adjust(run.state, weight_decay=2e-3 if run.step == 5 else 1e-4)
    return ts.adjust(run.state, "v", learning_rate=0.01) if run.step == 7 else None


@pytest.mark.parametrize("stops", [[16], [8, 16], [5, 16], [14, 16]])
def test_numbers_that_were_adjusted_have_columns_over_a_resume_and_no_others(tmp_path, stops):
    step = ts.train_step(lambda params, x: jnp.mean((x @ params["w"] - params["v"]) ** 2))
    for stop in stops:
        state = ts.setup(ts.rules.adamw(0.1, weight_decay=1e-4), {"w": jnp.zeros(4), "v": jnp.zeros(())})
        given = {"callbacks": callbacks.every(1, adjusting), "logger": loggers.jsonl(tmp_path / "log")}
        _, history = fit(tmp_path / "run", state, stop, step=step, **given)
    of_rule = {"weight_decay", "weight_decay@v", "learning_rate@v", "b1", "b1@v", "eps@v", "eps_root@v", "b2@v"}
    columns = {name: history.series(name)[0].tolist() for name in history.names if name in of_rule}
    assert columns == {
        "weight_decay": [*range(6, 17)], "weight_decay@v": [*range(8, 17)], "learning_rate@v": [*range(8, 17)],
    }  # fmt: skip
    assert history.last("weight_decay") == history.last("weight_decay@v") == 1e-4
    lines = map(json.loads, (tmp_path / "log").read_text().splitlines())
    rows = {line["step"]: line["weight_decay"] for line in lines if "weight_decay" in line}
    assert rows == dict.fromkeys(range(6, 13), 2e-3) | dict.fromkeys(range(13, 17), 1e-4)


# ------------------------------------------------------------------------------------------- the state in hand


def test_what_was_adjusted_in_hand_wins_over_the_checkpoint(tmp_path):
    data = ts.batches(X, 4, shuffle=True)
    state, _ = fit(tmp_path, make(), 3, data=data)
    text = r"the state given is at step 3, the checkpoint at step 3, .* differs from it: hyperparameters\. It goes on"
    with pytest.warns(UserWarning, match=text):
        state, history = fit(tmp_path, ts.adjust(state, learning_rate=0.001), 6, data=data)
    assert ts.hyperparams(state)["learning_rate"] == 0.001
    assert history["step"].tolist() == [1, 2, 3, 4, 5, 6]
    expected, _ = ts.fit(STEP, make(), anew := ts.batches(X, 4, shuffle=True), steps=3, progress=False)
    expected, _ = ts.fit(STEP, ts.adjust(expected, learning_rate=0.001), anew, steps=6, progress=False)
    assert_trees_equal(state, expected)
    state, _ = fit(tmp_path, make(), 7)  # the same script again: the rate that the run had, without a word
    assert ts.hyperparams(state)["learning_rate"] == 0.001


def test_a_state_as_it_was_saved_goes_on_without_a_word(tmp_path):
    data = ts.batches(X, 4, shuffle=True)
    state, _ = fit(tmp_path, make(), 3, data=data)
    state, history = fit(tmp_path, state, 6, data=data)
    expected, _ = fit(tmp_path / "other", make(), 6)
    assert_trees_equal(state, expected)
    assert history["step"].tolist() == [1, 2, 3, 4, 5, 6]


def test_a_finished_run_that_is_started_again_has_no_restart(tmp_path):
    state, before = fit(tmp_path, make(), 3)
    for given in (make(), state):
        with pytest.warns(UserWarning, match="nothing to do"):
            _, history = fit(tmp_path, given, 3)
        assert history.marks == before.marks
    _, history = fit(tmp_path, make(), 4)
    assert (3, "restart", "") in history.marks


def test_what_may_fail_on_one_process_is_read_by_all_together(tmp_path, monkeypatch):
    """A manifest that one process cannot read ends the call on all of them; alone, the others would wait."""
    state, _ = fit(tmp_path, make(), 3)
    together, manifest, inside, seen = Alone.together, _home.CheckpointHome.manifest, [], []

    def all_of_them(*args, **given):
        inside.append(1)
        try:
            return together(*args, **given)
        finally:
            inside.pop()

    monkeypatch.setattr(Alone, "together", all_of_them)
    read = lambda *args: seen.append(bool(inside)) or manifest(*args)
    monkeypatch.setattr(_home.CheckpointHome, "manifest", read)
    with Checkpoints(tmp_path) as checkpoints:
        new = state.replace(params={"w": jnp.full(4, 2.0)})
        with pytest.warns(UserWarning, match=r"differs from it: state\.params\['w'\]"):
            reading.resumed(checkpoints, new, "auto")
    assert len(seen) >= 2 and all(seen)


HANDED = {  # (a change between two calls of fit, the leaves that the warning names)
    "params": (lambda s: s.replace(params={"w": jnp.full(4, 2.0)}), r"state\.params\['w'\]"),
    "a number": (lambda s: ts.adjust(s, learning_rate=0.5), "hyperparameters"),
    "a number of a part": (lambda s: ts.adjust(s, "w", learning_rate=0.0), "hyperparameters"),
    "frozen": (lambda s: ts.freeze(s, "w"), r"state\.frozen"),
    "key": (lambda s: s.replace(key=jax.random.key(7)), r"state\.key"),
}


@pytest.mark.parametrize("name", HANDED)
@pytest.mark.parametrize("store", ["files", pytest.param("orbax", marks=pytest.mark.medium)])
def test_a_state_that_was_changed_between_two_fits_goes_on_with_a_warning(tmp_path, name, store):
    change, leaves = HANDED[name]
    with Checkpoints(tmp_path, store=store) as checkpoints:
        state, _ = fit(checkpoints, make(key=0), 2)
        state, _ = fit(checkpoints, state, 3)  # nothing was changed, and nothing is said
        state = change(state)
        numbers, is_frozen = ts.hyperparams(state), name == "frozen"
        before = np.array(state.params["w"])
        with pytest.warns(UserWarning, match=f"differs from it: {leaves}. It goes on") as told:
            state, _ = fit(checkpoints, state, 4)
        assert len(told) == 1 and ts.hyperparams(state) == numbers
        assert np.array_equal(state.params["w"], before) == (is_frozen or numbers["learning_rate"] == 0.0)
        assert name != "params" or float(state.params["w"].min()) > 1


NOTHING = {
    "adjust": lambda state: ts.adjust(state, learning_rate=0.1),
    "freeze and thaw": lambda state: ts.thaw(ts.freeze(state, "w")),
    "replace": lambda state: state.replace(params=state.params),
}


def test_a_schedule_is_held_beside_numbers_that_have_none():
    rule = ts.rules.adamw(optax.constant_schedule(0.1), weight_decay=0.1)
    for names in (["learning_rate", "weight_decay"], ["weight_decay", "learning_rate"]):
        state = ts.adjust(ts.setup(rule, {"w": jnp.ones(2)}), **dict.fromkeys(names, 0.5))
        found = ts.hyperparams(state)
        assert [found[name] for name in names] == [0.5, 0.5]


@pytest.mark.parametrize("name", NOTHING)
def test_an_edit_that_changes_nothing_goes_on_without_a_word(tmp_path, name):
    state, data = make(), ts.batches(X, 4, shuffle=True)
    state, _ = fit(tmp_path, state, 2, data=data)
    state, _ = fit(tmp_path, NOTHING[name](state), 4, data=data)
    assert int(state.step) == 4


def test_a_state_ahead_of_the_newest_checkpoint_goes_on(tmp_path):
    data = ts.batches(X, 4)
    state, _ = fit(tmp_path, make(), 3, data=data)
    for batch in list(ts.batches(X, 4))[:2]:
        state, _ = STEP(state, batch)
    text = r"state given is at step 5, .* at step 3, .*: the state given goes on"
    with pytest.warns(UserWarning, match=text), pytest.warns(UserWarning, match="nothing to do"):
        after, _ = fit(tmp_path, state, 4, data=data)
    assert int(after.step) == 5
    with pytest.warns(UserWarning, match="the state given goes on"):
        after, history = fit(tmp_path, after, 7, data=data)
    assert int(after.step) == 7 and history["step"].tolist() == [1, 2, 3, 6, 7]


def test_an_older_state_in_hand_is_replaced_with_a_warning(tmp_path):
    fit(tmp_path, make(), 5)
    behind, _ = ts.fit(STEP, make(), ts.batches(X, 4, shuffle=True), steps=2, progress=False)
    with pytest.warns(UserWarning, match="state given is at step 2, .* at step 5, .*: the checkpoint's goes on"):
        state, _ = fit(tmp_path, behind, 6)
    expected, _ = fit(tmp_path / "other", make(), 6)
    assert_trees_equal(state, expected)


def test_a_script_that_trains_before_fit_resumes_without_a_word(tmp_path):
    def script(steps):
        state, _ = ts.fit(STEP, make(), ts.batches(X, 4, shuffle=True), steps=2, progress=False)
        return fit(tmp_path, ts.adjust(state, learning_rate=0.01), steps)[0]

    assert int(script(4).step) == 4
    assert ts.hyperparams(script(6))["learning_rate"] == 0.01


def test_a_clock_that_was_set_back_is_refused(tmp_path):
    state, _ = fit(tmp_path, make(), 5)
    with pytest.raises(
        StateError, match=r"state at fit\(\): got step 0 after 5 calls, expected a fresh state, or step 5"
    ):
        fit(tmp_path, state.replace(step=0), 9)


def test_a_pair_in_hand(tmp_path):
    def step(states, batch):
        one, info = STEP.pure(states[0], batch, {})
        two, other = STEP.pure(states[1], batch, {})
        return (one, two), {"one": info.loss, "two": other.loss}

    pair, _ = fit(tmp_path, (make(), make()), 3, step)
    with pytest.warns(UserWarning, match=r"differs from it: hyperparameters"):
        pair, _ = fit(tmp_path, (pair[0], ts.adjust(pair[1], learning_rate=0.0)), 4, step)
    assert ts.hyperparams(pair[1])["learning_rate"] == 0.0
    pair, _ = step(pair, X[:4])
    with pytest.raises(StateError, match=r"got step \d+ after \d+ calls, expected a fresh state"):
        fit(tmp_path, pair, 9, step)


# ----------------------------------------------------------------------------------- what was edited in the script


def test_a_fresh_state_that_the_script_adjusts_resumes_as_it_was(tmp_path):
    """And a plateau's rate survives: only what the script hands over otherwise than before is an edit."""
    lower = callbacks.every(2, lambda run: ts.adjust(run.state, learning_rate=0.02))
    script = lambda steps, rate=0.05: fit(tmp_path, ts.adjust(make(), learning_rate=rate), steps, callbacks=[lower])
    script(3)
    assert ts.hyperparams(script(3 + 1)[0])["learning_rate"] == pytest.approx(0.02)
    with pytest.warns(UserWarning, match=r"learning_rate: 0\.05 then, 0\.01 now: the script's is used"):
        state, _ = script(5, 0.01)
    assert ts.hyperparams(state)["learning_rate"] == pytest.approx(0.01)


FREEZES = {  # the first script, the second, the leaf that moves after the resume, the warning
    "added": (None, "b", {"w"}, "frozen leaves: none then, b now"),
    "added, freezable": ("", "b", {"w"}, "frozen leaves: none then, b now"),
    "changed": ("b", "w", {"b"}, "frozen leaves: b then, w now"),
    "removed": ("b", "", {"w", "b"}, "frozen leaves: b then, none now"),
    "not repeated": ("b", None, {"w"}, None),
    "the same": ("b", "b", {"w"}, None),
}


@pytest.mark.parametrize("store", ["files", pytest.param("orbax", marks=pytest.mark.medium)])
@pytest.mark.parametrize("name", FREEZES)
def test_an_edited_freeze_is_the_scripts_with_a_warning(tmp_path, name, store):
    """A plain `setup` is no edit: leaves that were frozen stay frozen."""
    first, second, moved, text = FREEZES[name]
    step = ts.train_step(lambda params, x: jnp.mean((x @ params["w"] + params["b"] - 1.0) ** 2))

    def script(where):
        params = {"w": jnp.zeros(4), "b": jnp.zeros(())}
        state = ts.setup(ts.rules.sgd(0.1), params, freezable=where == "")
        return ts.freeze(state, where) if where else state

    with Checkpoints(tmp_path, store=store) as checkpoints:
        state, _ = fit(checkpoints, script(first), 4, step)
        before = jax.device_get(state.params)
        context = contextlib.nullcontext() if text is None else pytest.warns(UserWarning, match=text)
        with context:
            state, _ = fit(checkpoints, script(second), 8, step)
        assert {name for name in before if np.any(before[name] != np.asarray(state.params[name]))} == moved
        # an edit is told once: the next checkpoint was made by this script
        state, _ = fit(checkpoints, script(second), 12, step)


def test_an_edited_freeze_leaves_what_callbacks_froze(tmp_path):
    step = ts.train_step(lambda params, x: jnp.mean((x @ params["w"] + params["b"] + params["c"] - 1.0) ** 2))
    start = lambda: ts.setup(ts.rules.sgd(0.1), {"w": jnp.zeros(4), "b": jnp.zeros(()), "c": jnp.zeros(())})
    fit(tmp_path, start(), 4, step, callbacks=callbacks.freeze_at(2, "b"))
    with pytest.warns(UserWarning, match="frozen leaves: none then, w now"):
        state, _ = fit(tmp_path, ts.freeze(start(), "w"), 8, step, callbacks=callbacks.freeze_at(2, "b"))
    np.testing.assert_array_equal(state.frozen, [0b101])  # b and w


def test_the_decay_of_an_average_is_the_scripts(tmp_path):
    with ts.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(make(ema=0.9))
        checkpoints.wait()
        with pytest.warns(UserWarning, match=r"ema decay: 0\.9 then, 0\.99 now: the script's is used"):
            found = checkpoints.restore(make(ema=0.99)).state
        assert float(found.average.rate) == pytest.approx(0.01)
        checkpoints.restore(make(ema=0.9))


INJECTED = {
    "alone": lambda tx: tx,
    "in a chain": lambda tx: optax.chain(optax.clip(1.0), tx),
    "of some leaves": lambda tx: ts.rules.partition({"w": tx}),
}


@pytest.mark.parametrize("store", ["files", "orbax"])
@pytest.mark.parametrize("name", INJECTED)
def test_an_injected_number_is_the_scripts_if_it_was_edited_and_else_goes_on(tmp_path, name, store):
    """As live numbers do: one that a callback changed goes on where the script did not."""

    def rates(state):
        pairs = jax.tree_util.tree_leaves_with_path(state.opt_state)
        return [float(x) for path, x in pairs if "'learning_rate'" in jax.tree_util.keystr(path)]

    def run(steps, rate, **given):
        tx = INJECTED[name](optax.inject_hyperparams(optax.adam)(learning_rate=rate))
        with Checkpoints(tmp_path / "run", store=store) as saver:
            return fit(saver, ts.setup(tx, {"w": jnp.zeros(4)}), steps, **given)[0]

    def halve(run):
        set_to = lambda path, x: x / 2 if "'learning_rate'" in jax.tree_util.keystr(path) else x
        if run.event == "step":
            opt_state = jax.tree_util.tree_map_with_path(set_to, run.state.opt_state)
            return run.state.replace(opt_state=opt_state)

    assert rates(run(2, 0.5, callbacks=callbacks.every(2, halve))) == [0.25]
    assert rates(run(3, 0.5)) == [0.25]
    with pytest.warns(UserWarning, match=r"hyperparams\['learning_rate'\]: 0.5 then, 0.125 now: the script's"):
        assert rates(run(4, 0.125)) == [0.125]
    assert rates(run(5, 0.125)) == [0.125]


def test_a_fixed_loss_scale_is_the_scripts_and_a_dynamic_one_goes_on(tmp_path):
    fit(tmp_path, make(loss_scale=8.0), 2)
    with pytest.warns(UserWarning, match=r"loss scale: 8 then, 16 now: the script's is used"):
        state, _ = fit(tmp_path, make(loss_scale=16.0), 3)
    assert float(state.loss_scale.scale) == 16.0
    other = tmp_path / "other"
    grows = lambda start: make(loss_scale=LossScale(start, interval=1))
    fit(other, grows(8.0), 2)
    assert float(fit(other, grows(8.0), 3)[0].loss_scale.scale) == 64.0
    with pytest.warns(UserWarning, match=r"loss scale: 8 then, 4 now: the script's is used"):
        assert float(fit(other, grows(4.0), 4)[0].loss_scale.scale) == 8.0


def other_loss(params, x):
    return jnp.mean(jnp.abs(x @ params["w"] - 1.0))


def weighted(weight):
    return ts.train_step(lambda params, x: weight * jnp.mean(x @ params["w"]))


references_of = functools.partial(code_of, is_exact=True)
LOSS = r"fit\(\): resumed from step 3 in .*, but loss_fn has changed.*The script's is used\."
EDITS = {
    "accumulate": ({"step": ts.train_step(STEP.loss_fn, accumulate=2)}, r"accumulate has changed from 1 to 2\."),
    "loss": ({"step": ts.train_step(other_loss)}, LOSS),
    "number of a loss": (
        {"step": weighted(2.0)},
        r"but `weight` of loss_fn has changed from 1.0 to 2.0\. The script's",
    ),
    "data": ({"data": X + 1}, "data has changed"),
    "scalar of JAX": (
        {"step": weighted(jnp.float32(2))},
        r"but `weight` of loss_fn has changed from 1.0 to 2\.0?\. The",
    ),
}
PAIRS = {
    "optax": (
        lambda: ts.setup(optax.adam(0.01), {"w": jnp.zeros(4)}),
        lambda: ts.setup(optax.adam(0.01, b1=0.8), {"w": jnp.zeros(4)}),
        r"rule has changed\.",
    ),
    "key": (
        lambda: make(key=0),
        lambda: make(key=1),
        r"fit\(\): resumed from step 2 .* key has changed\. The checkpoint's",
    ),
    "average": (
        lambda: make(ema=averages.ema(0.9)),
        lambda: make(ema=averages.ema(0.9, start=4)),
        r"start of the average has changed from 0 to 4\.",
    ),
    "schedule of an average": (
        lambda: make(ema=ts.schedules.linear_schedule(0.9, 1.0, 10)),
        lambda: make(ema=ts.schedules.linear_schedule(0.5, 1.0, 10)),
        r"decay of the average has changed from linear_schedule\(init_value=0\.9.* to linear_schedule\(init_value=0\.5",
    ),
    "average with a schedule": (
        lambda: make(ema=0.9),
        lambda: make(ema=ts.schedules.linear_schedule(0.5, 1.0, 10)),
        r"decay of the average has changed from a number to linear_schedule",
    ),
    "average without its schedule": (
        lambda: make(ema=ts.schedules.linear_schedule(0.5, 1.0, 10)),
        lambda: make(ema=0.9),
        r"decay of the average has changed from linear_schedule\(.*\) to a number",
    ),
    "plain schedule of an average": (
        lambda: make(ema=lambda step: 0.9),
        lambda: make(ema=lambda step: 0.8),
        r"the schedule of the average has changed \(code",
    ),
    "numbers of a schedule": (
        lambda: make(ts.schedules.warmup_cosine_decay_schedule(0.0, 0.1, 2, 10)),
        lambda: make(ts.schedules.warmup_cosine_decay_schedule(0.0, 0.2, 3, 10)),
        r"learning_rate \(peak_value, warmup_steps\): 0\.1, 2 then, 0\.2, 3 now",
    ),
    "loss scale": (
        lambda: make(loss_scale=LossScale(8.0)),
        lambda: make(loss_scale=LossScale(8.0, interval=7)),
        r"interval of the loss_scale has changed from 2000 to 7\.",
    ),
    "window": (
        lambda: ts.setup(ts.rules.accumulate(ts.rules.sgd(0.1), 1), {"w": jnp.zeros(4)}),
        lambda: ts.setup(ts.rules.accumulate(ts.rules.sgd(0.1), 2), {"w": jnp.zeros(4)}),
        r"rule has changed",
    ),
}


@pytest.mark.medium
@pytest.mark.parametrize("name", EDITS)
def test_an_edit_of_the_script_is_told_once(tmp_path, name):
    edit, text = EDITS[name]
    first = {"step": weighted(1.0)} if "number" in name or "scalar" in name else {}

    def script(steps, step=STEP, data=X):
        fit(tmp_path, make(), steps, step, ts.batches(data, 4, shuffle=True))

    script(2, **first)
    script(3, **first)  # nothing was edited, and nothing is said
    with pytest.warns(UserWarning, match=text) as told:
        script(4, **edit)
    assert len(told) == 1
    script(5, **edit)  # it is the script's by now


@pytest.mark.medium
@pytest.mark.parametrize("name", PAIRS)
def test_an_edit_of_the_state_is_told(tmp_path, name):
    one, two, text = PAIRS[name]
    fit(tmp_path, one(), 2)
    with pytest.warns(UserWarning, match=text) as told:
        fit(tmp_path, two(), 3)
    assert len(told) == 1


class Config:
    scale = 1.0


class Scaled:
    def __init__(self, scale, started=0.0):
        self.scale, self.started = scale, started

    def __call__(self, params, x):
        return self.scale * x

    loss = __call__

    @property
    def doubled(self):
        return 2 * self.scale

    @staticmethod
    def by_config(x):
        return Config.scale * x


@dataclasses.dataclass
class Settings:
    scale: float = 1.0
    steps: int = 100


class Slots:
    __slots__ = ("scale",)


class Mode(enum.Enum):
    ONE = 1.0
    TWO = 2.0


class Net(flax.linen.Module):
    rate: float = 0.1

    @flax.linen.compact
    def __call__(self, x):
        return flax.linen.Dropout(self.rate * Config.scale, deterministic=True)(x)


@jax.jit
def compiled(x):
    return Config.scale * x


@jax.custom_vjp
def scaled_back(x):
    return x


scaled_back.defvjp(lambda x: (x, None), lambda _, g: (Config.scale * g,))
NUMBERS, OBJECT, SETTINGS = {"scale": 1.0}, Scaled(1.0), Settings()
SPACE, MODULE = types.SimpleNamespace(scale=1.0, steps=100), types.ModuleType("a_module_of_the_script")
MODULE.scale, MODULE.space, SPACE.mode, SLOTS = 1.0, SPACE, Mode.ONE, Slots()
NET = flax.nnx.Dropout(0.1)
multiply = lambda scale, x: scale * x


def nested(params, x):
    inner = lambda x: NUMBERS["scale"] * x
    return [inner(y) for y in x]


def imports(params, x):
    import a_module_of_the_script as settings
    from a_module_of_the_script import scale

    return scale * settings.space.scale * x


write = lambda holder, name="scale": lambda value: setattr(holder, name, value)
REFERENCES: dict[str, tuple] = {  # (a function, how to set the number that it reads)
    "global": (lambda p, x: NUMBERS["scale"] * x, lambda v: NUMBERS.update(scale=v)),
    "nested function": (nested, lambda v: NUMBERS.update(scale=v)),
    "function": (lambda p, x: compiled.__wrapped__(x), write(Config)),
    "function in jit": (lambda p, x: compiled(x), write(Config)),
    "function in checkpoint": (jax.checkpoint(lambda p, x: Config.scale * x), write(Config)),
    "custom derivative": (lambda p, x: scaled_back(x), write(Config)),
    "class attribute": (lambda p, x: Config.scale * x, write(Config)),
    "object": (OBJECT, write(OBJECT)),
    "method": (OBJECT.loss, write(OBJECT)),
    "method of a global": (lambda p, x: OBJECT.loss(p, x), write(OBJECT)),
    "property": (lambda p, x: OBJECT.doubled * x, write(OBJECT)),
    "static method": (lambda p, x: OBJECT.by_config(x), write(Config)),
    "dataclass": (lambda p, x: SETTINGS.scale * x, write(SETTINGS)),
    "getattr": (lambda p, x: getattr(SETTINGS, "scale") * x, write(SETTINGS)),  # noqa: B009
    "asdict": (lambda p, x: optax.l2_loss(**dataclasses.asdict(SETTINGS)), write(SETTINGS)),
    "slots": (lambda p, x: SLOTS.scale * x, write(SLOTS)),
    "enum": (lambda p, x: SPACE.mode.value * x, lambda v: setattr(SPACE, "mode", Mode(v))),
    "namespace": (lambda p, x: SPACE.scale * x, write(SPACE)),
    "module": (lambda p, x: MODULE.scale * x, write(MODULE)),
    "attribute of a module": (lambda p, x: MODULE.space.scale * x, write(SPACE)),
    "import in the function": (imports, write(MODULE)),
    "field of a flax module": (lambda p, x: NET(x), write(NET, "rate")),
    "flax module's own global": (Net().apply, write(Config)),
    "default": (default := lambda p, x, scale=1.0: scale * x, lambda v: setattr(default, "__defaults__", (v,))),
    "partial": (functools.partial(multiply, OBJECT), write(OBJECT)),
}


@pytest.mark.parametrize("name", REFERENCES)
def test_a_number_is_noticed_however_the_code_refers_to_it(name, monkeypatch):
    """In the text for files, which has no values of arrays, and in the comparison within a process, which has."""
    monkeypatch.setitem(sys.modules, MODULE.__name__, MODULE)
    f, write = REFERENCES[name]
    write(1.0)
    before = code_text(f), references_of(f)
    try:
        assert (code_text(f), references_of(f)) == before
        write(2.0)
        after = code_text(f), references_of(f)
        assert before[0] != after[0] and before[1] != after[1]
    finally:
        write(1.0)
    assert (code_text(f), references_of(f)) == before


def test_numbers_that_no_code_reads_make_no_other_text():
    """A script that is resumed often has another number of steps, and another doc string."""
    for holder, f in ((SETTINGS, REFERENCES["dataclass"][0]), (SPACE, REFERENCES["namespace"][0])):
        before = code_text(f)
        holder.steps, steps = 200, holder.steps
        assert code_text(f) == before
        holder.steps = steps
    assert code_text(Scaled(1.0, 5.0)) == code_text(Scaled(1.0, 6.0))
    sources = (f"def loss(params, x):\n    '{doc}'\n    return x + {n}" for doc, n in (("a", 1), ("b", 1), ("b", 2)))
    texts = []
    for source in sources:
        exec(source, space := {"__name__": __name__})
        texts.append(code_text(space["loss"]))
    assert texts[0] == texts[1] != texts[2]


CACHE, CALLS, BOX = {}, 0, types.SimpleNamespace(seen=[])


def test_what_code_fills_while_it_runs_makes_no_other_text(monkeypatch):
    """Caches, lists and counts of calls; the values in another container, which it only reads, count."""
    calls, count = [], 0

    def loss(params, x):
        global CALLS
        nonlocal count
        CALLS, count = CALLS + 1, count + 1
        calls.append(x)
        BOX.seen.append(x)
        CACHE[x * 2, "key"] = CACHE.get(x, 0)
        metrics = {}
        metrics["scale"] = NUMBERS["scale"] * x
        return metrics

    before = code_of(loss), references_of(loss)
    loss(None, 1.0)
    assert code_of(loss) == before[0] and references_of(loss) != before[1]
    monkeypatch.setitem(NUMBERS, "scale", 2.0)
    assert code_of(loss) != before[0]


@pytest.mark.parametrize(
    ("then", "now", "texts"),
    [
        (jnp.float32(0.5), jnp.float32(0.25), ("0.5", "0.25")),
        (np.float32(0.3), np.float32(0.4), ("0.3", "0.4")),
        (jnp.array([1, 2, 0.5]), jnp.array([1, 2, 0.7]), ("[1. 2. 0.5]", "[1. 2. 0.7]")),
        ((1.0, 2, "sum"), (1.0, 3, "sum"), ("(1.0, 2, 'sum')", "(1.0, 3, 'sum')")),
        ([1.0], [2.0], ("[1.0]", "[2.0]")),
        (jnp.bfloat16(1), jnp.bfloat16(2), ("1", "2")),
    ],
)
def test_small_arrays_and_tuples_count_with_their_values_and_are_named(then, now, texts):
    loss = lambda weight: lambda params, x: x * weight
    before, after = loss(then), loss(now)
    assert code_of(before) == code_of(loss(then)) != code_of(after)
    assert (values_of(before)["weight"], values_of(after)["weight"]) == texts


def test_an_array_that_code_counts_in_or_gets_while_it_is_traced_makes_no_other_text():
    counts = np.zeros(3)

    def loss(params, x):
        counts[0] += 1
        return x

    before = code_of(loss)
    loss(None, 1.0)
    assert code_of(loss) == before
    texts = []
    jax.make_jaxpr(lambda y: texts.append(code_of(lambda params, x: x * y)) or y)(1.0)
    assert texts[0] != "unknown"


def test_large_arrays_that_code_refers_to_are_compared_by_shape_in_files_and_by_value_in_a_process():
    large = jnp.zeros(20_000)
    for value, other in ((np.ones(101), np.zeros(101)), (jnp.ones(101), jnp.zeros(101)), (large, large + 1)):
        f, same, g = ((lambda p, x, y=y: x * y) for y in (value, value + 0 if value.size == 101 else value, other))
        assert code_text(f) == code_text(g) and references_of(f) == references_of(same) != references_of(g)
    long = list(range(1000))
    f, g = (lambda p, x, y=y: x * y[3] for y in (long, long[::-1]))
    assert code_text(f) == code_text(g) and references_of(f) != references_of(g)


@pytest.mark.medium
def test_an_edit_of_a_schedule_that_is_a_function_is_told(tmp_path):
    text = "the schedule of learning_rate has changed"
    for name, one, other in (
        ("optax", optax.linear_schedule(0.1, 0.0, 10), optax.linear_schedule(0.9, 0.5, 10)),
        ("lambda", lambda step: 0.1, lambda step: 0.2),
        ("inside optax", optax.sgd(lambda step: 0.1), optax.sgd(lambda step: 0.2)),
    ):
        text = "a function of the rule has changed" if name == "inside optax" else text
        state = lambda x: make(x) if callable(x) else ts.setup(x, {"w": jnp.zeros(4)})
        fit(tmp_path / name, state(one), 2)
        fit(tmp_path / name, state(one), 3)
        with pytest.warns(UserWarning, match=text) as told:
            fit(tmp_path / name, state(other), 4)
        assert len(told) == 1


@pytest.mark.medium
def test_an_edit_of_extra_is_told(tmp_path):
    step = ts.train_step(lambda params, x, scale: scale * jnp.mean((x @ params["w"] - 1.0) ** 2))
    extra = lambda x: {"scale": jnp.asarray(x)}
    fit(tmp_path, make(), 2, step, extra=extra(1.0))
    fit(tmp_path, make(), 3, step, extra=extra(1.0))
    with pytest.warns(UserWarning, match=r"extra\['scale'\] has changed from 1.0 to 2.0"):
        fit(tmp_path, make(), 4, step, extra=extra(2.0))


@pytest.mark.medium
def test_the_text_of_a_function_is_the_same_in_every_process():
    """No address, no order of a set, and no end of a search: what a loss closes over may be anything."""
    program = (
        "import jax, numpy as np\n"
        "from tsunax.checkpoints.script_settings import code_text\n"
        "class Odd:\n    pass\n"
        "big = {'x': [np.ones(3)] * 1000, 'odd': Odd()}\n"
        "big['self'] = big\n"
        "def loss(params, batch, *, names=frozenset(['a', 'b', 'c'])):\n"
        "    return sum(params[k] for k in {'a', 'b', 'c', 'd'}) + big['x'][0] if big else jax.nn.relu(batch)\n"
        "print(code_text(loss))\n"
    )
    texts = set()
    for seed in "012":
        run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True,
                             env={"PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu", "PATH": ""})  # fmt: skip
        texts.add(run.stdout)
    assert len(texts) == 1 and "unknown" not in texts.pop()


def test_a_function_that_cannot_be_looked_at_ends_no_run():
    class Odd:
        __module__ = "io"  # an object of a library, of which no attribute is known

        def __repr__(self):
            raise OSError("closed")

    odd, deep = Odd(), []
    for _ in range(10_000):
        deep = [deep]
    assert code_text(lambda params, batch: odd).endswith("unknown")
    assert code_text(lambda params, batch: deep) == code_text(lambda params, batch: deep) != "unknown"


def test_resident_data_and_streams_are_served(tmp_path):
    resident = lambda x: ts.batches(x, 4, device=True)
    fit(tmp_path / "a", make(), 2, data=resident(X))
    with pytest.warns(UserWarning, match="data has changed"):
        fit(tmp_path / "a", make(), 3, data=resident(X * 2))
    rows = [X[:4], X[4:8]]
    fit(tmp_path / "b", make(), 2, data=rows)
    fit(tmp_path / "b", make(), 4, data=rows)


# ------------------------------------------------------------------------------------------ loaders of other libraries


class Ahead:
    """Reads batches ahead: `fetch` stands for its thread. Its state is that of a batch until it fetches the next."""

    def __init__(self):
        self.place = 0

    def __iter__(self):
        while True:
            self.fetch()
            yield X[4 * (self.place % 4) :][:4] + self.place

    def fetch(self):
        self.place += 1

    def get_state(self):
        return {"place": self.place}

    def set_state(self, state):
        self.place = state["place"]


def test_the_position_that_is_saved_is_that_of_the_last_batch_trained(tmp_path):
    """Though the loader reads on while the run evaluates."""
    loader = Ahead()

    def evaluate(state):
        loader.fetch()
        return {"val/x": 0.0}

    fit(tmp_path, make(), 4, data=loader, evaluate=evaluate, evaluate_every=4)
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        assert checkpoints.restore(make()).data == {"epoch": 0, "position": 4, "data": {"place": 4}}


class Generator:
    """As a pipeline of webdataset: an iterable with a position of its own, of arrays and nested containers."""

    def __init__(self, wrap=lambda place: place):
        self.wrap, self.rng, self.order, self.sets = wrap, np.random.default_rng(0), [], 0

    def __iter__(self):
        if not self.order:
            self.order = [int(i) for i in self.rng.permutation(4)]
        while self.order:
            yield X[4 * self.order.pop() :][:4]

    def state_dict(self):
        state = self.rng.bit_generator.state
        return self.wrap({"shards": (np.array(self.order, np.int64), {1: b"open"}), "rng": state})

    def load_state_dict(self, place):
        order, files = place["shards"]
        assert type(order) is np.ndarray and files == {1: b"open"} and type(place["shards"]) is tuple
        self.order, self.rng.bit_generator.state = order.tolist(), place["rng"]
        self.sets += 1


def grain_loader():
    grain = need("grain")
    sampler = grain.samplers.IndexSampler(4, grain.sharding.NoSharding(), shuffle=True, num_epochs=5, seed=1)
    return grain.DataLoader(data_source=X.reshape(4, 4, 4), sampler=sampler, worker_count=0)


def torch_loader(workers=0):
    torch, loaders = need("torch"), need("torchdata.stateful_dataloader")
    options = {"generator": torch.Generator().manual_seed(3), "num_workers": workers}
    if workers:  # a fork of this process, which has threads, could hang
        options["multiprocessing_context"] = context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch"])
    return loaders.StatefulDataLoader(torch.from_numpy(X.copy()), 4, shuffle=True, **options)


def rows_of(shards):
    for i in shards:
        yield from ({"x": x} for x in X[8 * i :][:8])


def hugging_face():
    datasets = need("datasets")
    rows = datasets.IterableDataset.from_generator(rows_of, gen_kwargs={"shards": [0, 1]})
    return rows.shuffle(seed=0, buffer_size=1).with_format("numpy").batch(4)


LOADERS = {
    "grain.DataLoader": grain_loader,
    "torchdata": torch_loader,
    "torchdata with workers": functools.partial(torch_loader, 2),
    "datasets": hugging_face,
    "a generator with a position": Generator,
    "a generator, read ahead": lambda: ts.prefetch(Generator(), size=2),
}
BY_ROWS = ts.train_step(lambda params, x: jnp.mean(((x["x"] if isinstance(x, dict) else x) @ params["w"] - 1.0) ** 2))


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # of torch, by torchdata
@pytest.mark.parametrize("name", medium_if(lambda name: name.startswith(("torch", "data")), LOADERS))
def test_a_loader_of_another_library_resumes_with_the_same_bits(tmp_path, name):
    """Within an epoch of four batches, at its end, and in a later one."""
    # Without workers, torchdata itself draws other orders for the epochs after the one that it resumes.
    steps, stops = {"torchdata": (4, [2]), "torchdata with workers": (6, [3])}.get(name, (11, [2, 4, 7]))
    run = lambda path, steps: fit(path, make(), steps, step=BY_ROWS, data=LOADERS[name]())[0]
    whole = run(None, steps)
    for stop in stops:
        run(tmp_path / str(stop), stop)
        assert_trees_equal(run(tmp_path / str(stop), steps), whole)


class Counter:
    """A loader whose position after the last batch of an epoch means the next epoch: a number of batches."""

    def __init__(self):
        self.read = 0

    def __iter__(self):
        for i in range(self.read % 4, 4):
            self.read += 1
            yield X[4 * i :][:4]

    get_state = lambda self: {"read": self.read}
    set_state = lambda self, place: setattr(self, "read", place["read"])


@pytest.mark.parametrize("wrap", [lambda data: data, ts.prefetch])
@pytest.mark.parametrize("steps_per_call", [1, "auto", None])
def test_the_end_of_an_epoch_is_due_with_the_step_that_ends_it(tmp_path, wrap, steps_per_call):
    """A loader without a length tells of it after that step, but a save of that step knows of it."""

    def run(folder, killed=0):
        def halve(run):
            if run.step == killed:
                raise OSError("killed")
            events.append(run.step)
            return ts.adjust(run.state, learning_rate=ts.hyperparams(run.state)["learning_rate"] / 2)

        events, log = [], ts.loggers.csv(tmp_path / folder / "rows.csv")
        with Checkpoints(tmp_path / folder, every=2) as saver:
            options = {"callbacks": callbacks.every("epoch", halve), "logger": log, "log_every": 2}
            options |= {"evaluate": lambda state: {"w": float(state.params["w"][0])}, "steps_per_call": steps_per_call}
            state, _ = ts.fit(STEP, make(), wrap(Counter()), steps=14, checkpoint=saver, progress=False, **options)
        rows = [line.split(",")[:5] for line in (tmp_path / folder / "rows.csv").read_text().splitlines()]
        return state, events, rows

    state, events, rows = run("whole")
    assert events == [4, 8, 12] and [row[0] for row in rows[1:]] == ["1", "2", "4", "6", "8", "10", "12", "14"]
    for step in (4, 8, 12):
        with pytest.raises(OSError, match="killed"):
            run(str(step), step)
        resumed, later_events, logged = run(str(step))
        assert_trees_equal(resumed, state)
        assert later_events == [x for x in events if x >= step] and logged == rows


def test_an_evaluation_after_calls_without_a_step_is_logged_by_the_resumed_run(tmp_path):
    """The run is saved at step 1, a further call gathers, the epoch ends, and the run dies in its evaluation."""

    def run(folder, fails=False):
        def evaluate(state):
            if fails:
                raise OSError("killed")
            return {"val/loss": float(state.calls)}

        state = ts.setup(ts.rules.accumulate(ts.rules.sgd(0.1), every=2), {"w": jnp.zeros(4)})
        log, options = loggers.csv(tmp_path / f"{folder}.csv"), {"progress": False, "log_every": 1, "epochs": 4}
        with Checkpoints(tmp_path / folder, every=1) as saver:
            data = ts.batches(X[:12], 4)
            _, history = ts.fit(STEP, state, data, checkpoint=saver, logger=log, evaluate=evaluate, **options)
        rows = csv.DictReader((tmp_path / f"{folder}.csv").read_text().splitlines())
        return [(row["step"], row["loss"], row["val/loss"]) for row in rows], history["val/loss"]

    rows, evaluations = run("whole")
    with pytest.raises(OSError, match="killed"):
        run("killed", fails=True)
    logged, resumed_evaluations = run("killed")
    assert logged == rows and ("1", "", "3.0") in rows
    np.testing.assert_array_equal(resumed_evaluations, evaluations)


class Endless(Counter):
    """An iterator of batches, with a position. `asked` counts the batches that it gave."""

    asked = 0

    def __next__(self):
        self.read, self.asked = self.read + 1, self.asked + 1
        if self.read == 9:
            raise OSError("the disk is gone")
        return X[self.read % 16 :][:1]

    __iter__ = lambda self: self


class Continuing:
    """A loader with a position, which makes iterators that go on where it is."""

    def __init__(self, data):
        self.get_state, self.set_state, self.data = data.get_state, data.set_state, data

    def __iter__(self):
        return (batch for batch in self.data)


def plain(data):
    while True:
        yield next(data)


@pytest.mark.parametrize("wrap", [lambda data: data, ts.prefetch, plain, Continuing])
def test_a_batch_that_was_read_to_know_the_end_of_an_epoch_is_not_lost(wrap):
    """If a callback stops the run there, the next call begins with it."""
    stop = callbacks.every(2, lambda run: run.stop("enough") if run.step < 6 else None)
    run = lambda state, data: ts.fit(STEP, state, data, steps=6, callbacks=stop, progress=False)[0]
    expected, _ = ts.fit(STEP, make(), [X[i : i + 1] for i in range(1, 7)], steps=6, progress=False)
    state, data = make(), wrap(endless := Endless())
    for steps in (2, 4, 6):
        state = run(state, data)
        assert int(state.step) == steps and (wrap is not plain or endless.asked == steps)
    assert_trees_equal(state, expected)


def test_the_error_of_the_next_batch_comes_after_the_boundary():
    events = []
    with pytest.raises(DataError, match="the disk is gone"):
        part = callbacks.every(8, lambda run: events.append(run.step))
        ts.fit(STEP, make(), Endless(), steps=12, callbacks=part, progress=False)
    assert events == [8]


def test_an_elastic_iterator_resumes_with_another_number_of_hosts(tmp_path):
    """Two hosts train on two rows each, one host goes on with the four rows of both."""
    grain = need("grain")

    def run(path, steps, index, count):
        elastic = need("grain.experimental").ElasticIterator
        rows = grain.MapDataset.source(X).repeat()
        return fit(path, make(), steps, data=elastic(rows, 4, grain.sharding.ShardOptions(index, count)))[0]

    run(tmp_path, 2, 1, 2)
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        state, place = (lambda found: (found.state, found.data))(checkpoints.restore(make()))
    assert place["data"] == {"global_next_index": 8}
    expected = state
    for batch in (X[8:12], X[12:16]):
        expected, _ = STEP(expected, batch)
    assert_trees_equal(run(tmp_path, 4, 0, 1).params, expected.params)


def test_an_error_of_a_loader_that_resumes_names_it(tmp_path):
    fit(tmp_path, make(), 2, step=BY_ROWS, data=Generator())
    text = r"position of the data at Broken\.load_state_dict\(\): got RuntimeError the workers are not ready"
    with pytest.raises(DataError, match=text):
        fit(tmp_path, make(), 4, step=BY_ROWS, data=Broken("load_state_dict"))


@pytest.mark.parametrize("wrap", [list, ts.prefetch])
def test_a_list_of_another_length_is_warned_of(tmp_path, wrap):
    batches = [{"x": x} for x in X.reshape(4, 4, 4)]
    run = lambda batches, steps: fit(tmp_path, make(), steps, step=BY_ROWS, data=wrap(batches))
    run(batches, 6)
    run(batches, 7)
    with pytest.warns(UserWarning, match="the list has 3 batches, and had 4 in the checkpoint: the epochs of this"):
        run(batches[:3], 9)


class Point(NamedTuple):
    at: int


def _late(place):
    """A position that cannot be saved, but only after the first batch."""
    return place if len(place["shards"][0]) in (0, 4) else {**place, "lock": threading.Lock()}


WRONG = {
    "an object in the position": (Generator(_late), {}, r"value at fit\(\): data\['data'\]\['lock'\]: got lock, exp"),
    "a type that would change": (
        Generator(lambda place: Point(1)), {}, r"value at fit\(\): data\['data'\]: got Point, which comes back as tuple",
    ),
    "a broken first batch": ((1 // n for n in [0]), {}, "batch 0 of epoch 0: got ZeroDivisionError"),
}  # fmt: skip


class Broken(Generator):
    """Its position cannot be read, or set."""

    def __init__(self, name):
        super().__init__()
        setattr(self, name, self.fail)

    def fail(self, *args):
        raise RuntimeError("the workers are not ready")


WRONG |= {
    "the address of an object": (
        Generator(lambda place: {**place, "of": f"Sampler({object()})".encode()}), {},
        r"position of the data at fit\(\): got <object object at 0x\w+>, expected a text .* Give its class a __repr__",
    ),
    "a position that cannot be read": (
        Broken("state_dict"), {},
        r"position of the data at Broken\.state_dict\(\): got RuntimeError the workers are not ready, exp",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_saved_is_told_before_the_first_step(tmp_path, name):
    data, options, text = WRONG[name]
    calls, evaluate = [], lambda state: calls.append(state) or {"val/x": 1.0}
    stop = ts.callbacks.early_stopping("val/x", mode="min", patience=3)
    with pytest.raises(ts.errors.TsunaxError, match=text):
        fit(tmp_path, make(), 20, data=data, evaluate=evaluate, callbacks=[stop, calls.append], **options)
    assert not calls and getattr(data, "sets", 0) == 0
    assert os.listdir(tmp_path) == ["tsunax.lock"]
    Lock(tmp_path).close()  # it was released


@pytest.mark.parametrize("store", ["files", pytest.param("orbax", marks=pytest.mark.medium)])
@pytest.mark.parametrize("fault", ["write_file", "load", "bytes"])
def test_a_directory_that_cannot_be_used_is_told_before_the_first_step(tmp_path, monkeypatch, fault, store):
    def fail(path, *args):
        if ".tsunax-probe" not in path.name:
            return works(path, *args)
        if fault == "bytes":
            return b"other"
        raise OSError(errno.ENOSPC, "no space left")

    with Checkpoints(tmp_path, store=store) as checkpoints:
        works = getattr(checkpoints.home, "load" if fault == "bytes" else fault)
        monkeypatch.setattr(checkpoints.home, "load" if fault == "bytes" else fault, fail)
        got = (
            "OSError a small file came back with other bytes" if fault == "bytes" else r"OSError \[Errno 28\] no space"
        )
        text = rf"path at {tmp_path}: got {got}.*, expected a directory that can be written"
        with pytest.raises(CheckpointError, match=text):
            fit(checkpoints, make(), 20, callbacks=lambda run: pytest.fail("it trains"))
        monkeypatch.undo()
        assert fit(checkpoints, make(), 2)[0].step == 2  # over what the first try left
    assert not [name for name in os.listdir(tmp_path) if "probe" in name]


class Shuffled:
    """A loader without a position, which draws the order of each epoch from its own generator."""

    def __init__(self):
        self.generator = np.random.default_rng(0)

    def __iter__(self):
        return iter(X.reshape(4, 4, 4)[self.generator.permutation(4)])


@pytest.mark.parametrize("wrap", [lambda data: data, ts.prefetch])
@pytest.mark.parametrize("goal", [{"steps": 3}, {"epochs": 1}, {"epochs": 2}, {"steps": 10}])
def test_a_loader_whose_order_depends_on_its_epochs_resumes_at_any_step(tmp_path, wrap, goal):
    """`fast_forward` reads earlier epochs again at the end of an epoch, as in the middle."""
    whole, _ = fit(tmp_path / "whole", make(), 12, data=wrap(Shuffled()), fast_forward=True)
    fit(tmp_path / "cut", make(), **{"steps": None, **goal}, data=wrap(Shuffled()), fast_forward=True)
    cut, _ = fit(tmp_path / "cut", make(), 12, data=wrap(Shuffled()), fast_forward=True)
    assert_trees_equal(whole.params, cut.params)


@pytest.mark.parametrize("forward", [False, True])
def test_a_loader_in_hand_at_the_end_of_an_epoch_is_not_read_again(tmp_path, forward):
    whole, _ = fit(tmp_path / "whole", make(), 12, data=Shuffled(), fast_forward=True)
    loader = Shuffled()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for epochs in (1, 2, 3):
            cut, _ = fit(tmp_path / "cut", make(), None, epochs=epochs, data=loader, fast_forward=forward)
    assert_trees_equal(whole.params, cut.params)
    assert not any("began anew" in str(warning.message) for warning in seen)


def test_a_resume_without_fast_forward_at_the_end_of_an_epoch_is_warned_of(tmp_path):
    text = "epoch 1 began anew, without the epochs before it: its batches are others if the order depends on these"
    with pytest.warns(UserWarning, match="cannot be saved") as first:
        fit(tmp_path / "plain", make(), None, epochs=1, data=Shuffled())
    assert text not in str(first[0].message)
    with pytest.warns(UserWarning, match=text) as seen:
        fit(tmp_path / "plain", make(), None, epochs=2, data=Shuffled())
    assert len(seen) == 1
    with pytest.raises(DataError, match="without a state, at epoch 2, position 1"):
        with pytest.warns(UserWarning, match=text.replace("1", "2")):
            fit(tmp_path / "plain", make(), 9, data=Shuffled())
        fit(tmp_path / "plain", make(), 10, data=Shuffled())
    for name, data in (("list", list(Shuffled())), ("prefetch", ts.prefetch(list(Shuffled())))):
        for epochs in (1, 2):
            fit(tmp_path / name, make(), None, epochs=epochs, data=data)
    fit(tmp_path / "fast", make(), None, epochs=1, data=Shuffled(), fast_forward=True)
    fit(tmp_path / "fast", make(), None, epochs=2, data=Shuffled(), fast_forward=True)


def test_a_run_without_a_position_of_its_data_says_what_a_resume_needs(tmp_path):
    class Plain:
        def __iter__(self):
            return iter([X[:4], X[4:8]])

    class OfIterator(Plain):
        """Its iterator has the position, as that of a grain dataset."""

        def __iter__(self):
            return HasPlace()

    class WithoutState(Plain):
        """Its methods are there, but there is no position yet."""

        def get_state(self):
            return None

        set_state = get_state

    class SetterOnly(Plain):
        def set_state(self, state):
            pytest.fail("it never gave a state")

    class NoMethods(Plain):
        get_state = set_state = None

    text = r"fit\(\): the position of these data cannot be saved\. To resume, this run needs fast_forward=True"
    without = [Plain(), (x for x in [X[:4]] * 9), WithoutState(), SetterOnly(), NoMethods()]
    for i, data in enumerate([*without, *map(ts.prefetch, [Plain(), WithoutState(), SetterOnly()])]):
        with pytest.warns(UserWarning, match=text) as seen:
            fit(tmp_path / f"{i}", make(), 2, data=data)
        assert len(seen) == 1 and seen[0].filename == __file__
    for i, data in enumerate([[X[:4]], ({"x": X[:4]},), OfIterator(), ts.prefetch([X[:4]]), ts.prefetch(OfIterator())]):
        fit(tmp_path / f"silent {i}", make(), 2, step=BY_ROWS, data=data)
    fit(tmp_path / "fast", make(), 2, data=Plain(), fast_forward=True)
    fit(None, make(), 2, data=Plain())
    fit(tmp_path / "dry", make(), 2, data=Plain(), dry_run=True)
    assert not (tmp_path / "dry").exists()
    own = ts.train_step(lambda params, key: jnp.sum(params["w"] ** 2))
    ts.fit(own, make(key=0), steps=2, checkpoint=tmp_path / "none", progress=False)


class HasPlace:
    def __init__(self):
        self.place = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.place += 1
        if self.place > 4:
            raise StopIteration
        return X[4 * self.place - 4 :][:4]

    def get_state(self):
        return self.place

    def set_state(self, place):
        self.place = place


def test_a_list_resumes_at_its_batch(tmp_path):
    rows = [{"x": X[i : i + 4]} for i in range(0, 16, 4)]
    run = lambda path, steps, data: fit(path, make(), steps, step=BY_ROWS, data=data)[0]
    whole = run(None, 11, rows)
    for stop in (2, 4, 7):
        run(tmp_path / str(stop), stop, tuple(rows))
        assert_trees_equal(run(tmp_path / str(stop), 11, rows), whole)
    run(tmp_path / "short", 3, rows)
    with pytest.raises(DataError, match=r"fewer batches than before, expected epoch 0, position 3"):
        run(tmp_path / "short", 11, rows[:2])


def test_data_of_another_kind_than_the_checkpoints_is_named(tmp_path):
    fit(tmp_path / "a", make(), 2)
    text = r"data at fit\(\): got a list, expected ts\.batches\(\.\.\.\), with which the checkpoint was"
    with pytest.raises(DataError, match=text):
        fit(tmp_path / "a", make(), 3, data=[X[:4], X[4:8]])
    fit(tmp_path / "b", make(), 2, data=[X[:4], X[4:8]])
    text = r"data at fit\(\): got ts\.batches\(\.\.\.\), expected data of another kind, with which the"
    with pytest.raises(DataError, match=text):
        fit(tmp_path / "b", make(), 3, data=ts.batches(X, 4))


OWN_VALUES = {
    "data": [3, 0, {}, "x", [1], {"position": 2}, {"epoch": None, "position": 2}, {"epoch": 0, "position": 1.5}],
    "callbacks": [3, 0, "", [1], "x", {"plateau": 3}, {"plateau": [1]}],
    "history": [
        {"loss": [1.0]}, [1.0], 3, {}, np.ones(3), "x", {"rows": 3}, {"rows": {"step": ["x"], "columns": []}, "marks": [], "closing": []},
        {"rows": {"step": [1 << 70], "columns": []}}, {"rows": {"step": [1], "columns": [["loss"]]}},
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", OWN_VALUES)
def test_values_of_ones_own_loop_are_one_clear_error(tmp_path, name):
    for i, value in enumerate(OWN_VALUES[name]):
        path = tmp_path / str(i) / "run"
        with Checkpoints(path) as checkpoints:
            checkpoints.save(make().replace(step=2, calls=2), **{name: value})
        place = path / "2"
        text = rf"^checkpoint of your own loop at {place}: got .*, expected what fit saves\. Restore the state with"
        with pytest.raises(CheckpointError, match=text):
            fit(path, make(), 4)


def test_a_population_resumes(tmp_path):
    members = lambda rates: ts.population(lambda key, rate: make(rate), 2, key=0, rate=jnp.array(rates))
    fit(tmp_path, members([0.1, 0.2]), 2)
    with pytest.warns(UserWarning, match=r"learning_rate: 0\.2 then, 0\.3 now"):
        state, _ = fit(tmp_path, members([0.1, 0.3]), 3)
    assert jax.device_get(state.step).tolist() == [3, 3]


# ---------------------------------------------------------------------------------------------------------- the best


def rising(folder, steps=38, **given):
    """The loss of the first step but one is the lowest, and then it only rises."""
    step = ts.train_step(lambda params, x: jnp.mean((params["w"] - x) ** 2))
    rows = [np.full(4, i * 10, np.float32) for i in range(40)]
    state = ts.setup(ts.rules.sgd(0.1), {"w": jnp.zeros(())})
    given = {"evaluate_every": 4, **given} if "evaluate" in given else given
    return ts.fit(step, state, rows, steps=steps, checkpoint=folder, progress=False, **given)


@pytest.mark.parametrize("log_every", [1, 7, 10])
def test_every_checkpoint_has_the_loss_of_its_step(tmp_path, log_every):
    saver = ts.Checkpoints(tmp_path, keep_best=Best("loss", mode="min"), keep_last=1, every=4)
    with saver:
        _, history = rising(saver, log_every=log_every)
        assert saver.steps() == [4, 38]
        assert saver.metrics()[4]["loss"] == pytest.approx(24.4**2, rel=1e-6)  # (30 - 5.6)²
    logged = sorted({1, 38, *range(log_every, 39, log_every)})
    assert history["step"].tolist() == logged  # a save adds no rows


def test_an_evaluation_that_is_the_best_is_saved_whatever_every_is(tmp_path):
    accuracy = {4: 0.9, 12: 0.6}
    evaluate = lambda state: {"val/acc": accuracy.get(int(state.step), 0.1)}
    best = Best("val/acc", mode="max")
    with ts.Checkpoints(tmp_path / "a", every=3, keep_best=best, keep_last=1) as saver:
        rising(saver, 14, evaluate=evaluate)
        assert saver.steps() == [4, 14]
        assert saver.metrics()[4]["val/acc"] == 0.9
    late = callbacks.every(4, lambda run: run.log(mine=-accuracy.get(run.step, 0.1)))
    best = Best("mine", mode="min")
    with ts.Checkpoints(tmp_path / "b", every=3, keep_best=best, keep_last=1) as saver:
        rising(saver, 14, callbacks=[late])
        assert saver.steps() == [4, 14]


def test_fit_tells_of_a_best_that_nobody_gives(tmp_path):
    best = lambda name: Best(name, mode="min")
    given = {"evaluate": lambda state: {"val/loss": 1.0}, "evaluate_every": 4}
    with ts.Checkpoints(tmp_path / "a", every=2, keep_best=best("val/los")) as saver:
        with pytest.raises(RowError, match=r"metric at keep_best: got 'val/los'.*Did you mean 'val/loss'"):
            fit(saver, make(), 8, **given)
        bare = callbacks.every(4, lambda run: None)  # which might log it
        with pytest.raises(RowError, match=r"metric at keep_best: got 'val/los'.*Did you mean 'val/loss'"):
            fit(saver, make(), 8, callbacks=[bare], **given)
        saver.wait()
        assert saver.steps() == [2]  # at step 4, with the first evaluation, it was known
    saver = ts.Checkpoints(tmp_path / "b", every=2, keep_best=best("los"))
    with saver, pytest.raises(RowError, match="Did you mean 'loss'"):
        fit(saver, make(), 8)
    late = callbacks.every(4, lambda run: run.log(mine=1.0))
    with ts.Checkpoints(tmp_path / "c", every=2, keep_best=best("mine")) as saver:
        fit(saver, make(), 8, callbacks=[late])
    with ts.Checkpoints(tmp_path / "d", every=2, keep_best=best("other")) as saver:
        with pytest.warns(UserWarning, match="metric at keep_best"):
            fit(saver, make(), 8, callbacks=[late])
        assert saver.latest() == 8


# ------------------------------------------------------------------------------------------- the end of a run


def test_what_the_end_adds_is_saved_at_a_step_that_was_saved_already(tmp_path):
    """The last evaluation is the best one; a callback counts, and changes the state, at the end only."""

    def count(run):
        if run.event == "end":
            run.memory["ends"] = run.memory.get("ends", 0) + 1
            return ts.adjust(run.state, learning_rate=0.05)

    best = Best("val/loss", mode="min")
    given = {"evaluate": lambda state: {"val/loss": 1.0 / (1 + int(state.step))}, "callbacks": [count]}
    with ts.Checkpoints(tmp_path, every=2, keep_best=best) as saver:
        state, history = fit(saver, make(), 6, **given)
        found = saver.restore(make(), step="best")
    assert found.step == 6 and list(found.callbacks.values()) == [{"ends": 1}]
    assert_trees_equal(found.state, state)
    with pytest.warns(UserWarning, match="nothing to do"):
        state, again = fit(tmp_path, make(), 6, **given)
    assert float(ts.hyperparams(state)["learning_rate"]) == pytest.approx(0.05)
    assert repr(again) == repr(history) and again.last("val/loss") == pytest.approx(1 / 7)


def test_a_run_that_died_between_its_last_step_and_its_end_gets_its_end(tmp_path):
    def evaluate(state):
        if fails:
            raise ValueError("out of memory")
        return {"val/loss": 0.5}

    events = []
    record = lambda run: events.append((run.step, run.event))
    given = {"evaluate": evaluate, "evaluate_every": 100, "callbacks": record}
    fails = True
    with ts.Checkpoints(tmp_path / "a", every=3) as saver, pytest.raises(ValueError, match="out of memory"):
        fit(saver, make(), 6, **given)
    assert (6, "end") not in events
    fails = False
    state, history = fit(tmp_path / "a", make(), 6, **given)
    assert events[-1] == (6, "end") and int(state.step) == 6
    whole, expected = fit(tmp_path / "b", make(), 6, **given)
    assert_trees_equal(state, whole)
    assert list(history) == list(expected) and history.last("val/loss") == 0.5


class Once:
    """Stops a run at a step, unless it has been there before."""

    def __call__(self, run):
        if run.step >= 5 and not run.memory.get("done"):
            run.memory["done"] = True
            run.stop("enough")


STOPS = {
    "a function": lambda: Once(),
    "patience": lambda: callbacks.patience(lambda run: run.step >= 3, 2),
    "early stopping": lambda: callbacks.early_stopping("val/loss", patience=2),
}


@pytest.mark.parametrize("name", STOPS)
def test_a_run_that_a_callback_stopped_is_over_for_the_same_call(tmp_path, name):
    """State, rows and files are as they were; another goal, where no callback objects, trains on."""

    def run(steps=12, callback=STOPS[name]):
        log = loggers.csv(tmp_path / "rows.csv")
        given = {"evaluate": lambda _: {"val/loss": 0.5}, "evaluate_every": 2, "callbacks": callback()}
        return fit(tmp_path / "run", make(), steps, logger=log, **given)

    state, history = run()
    assert 0 < int(state.step) < 12 and history.marks[-1][1] == "stop"
    content = lambda: {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    files = content()
    with pytest.warns(UserWarning, match=r"stopped at step \d+, .*; to train on"):
        again, rows = run()
    assert_trees_equal(again, state)
    assert repr(rows) == repr(history) and content() == files
    objects = name != "a function"
    with (
        pytest.warns(UserWarning, match="again at step .* give it more patience")
        if objects
        else contextlib.nullcontext()
    ):
        longer = run(14)[0]
    assert int(longer.step) == (14 if name == "a function" else int(state.step))
    assert int(run(16, callback=lambda: ())[0].step) == 16


def test_a_stop_that_was_saved_before_its_end_ends_there(tmp_path):
    def evaluate(state):
        if fails:
            raise ValueError("out of memory")
        return {"val/loss": 0.5}

    stop = callbacks.every(4, lambda run: run.stop("enough"))
    given = {"evaluate": evaluate, "evaluate_every": 100, "callbacks": stop}
    fails = True
    with ts.Checkpoints(tmp_path / "a", every=4) as saver, pytest.raises(ValueError, match="out of memory"):
        fit(saver, make(), 12, **given)
    fails = False
    state, history = fit(tmp_path / "a", make(), 12, **given)
    assert int(state.step) == 4 and history.last("val/loss") == 0.5 and history.marks[-1] == (4, "stop", "enough")


def bad(state):
    """An evaluation that gets worse and better."""
    return {"val/loss": 1.0 + (int(state.step) * 7 % 5) / 10}


COUNTING = {
    "plateau": lambda: callbacks.plateau("val/loss", patience=2, factor=0.5),
    "plateau of the loss": lambda: callbacks.plateau("loss", patience=1, factor=0.5, min_delta=0.5),
    "early stopping": lambda: callbacks.early_stopping("val/loss", patience=4, min_delta=0.05),
    "patience": lambda: callbacks.patience(lambda run: run.metrics.get("val/loss", 0.0) >= 1.1, 5),
    "one's own": lambda: count_evaluations,
}


def count_evaluations(run):
    if run.event == "evaluate":
        run.memory["seen"] = run.memory.get("seen", 0) + 1
        run.log(**{"count/evaluations": run.memory["seen"]})
        return ts.adjust(run.state, learning_rate=0.1 / run.memory["seen"])


def cells(text):
    """Step, loss and which other numbers each row of a csv has, but those of the clock on the wall."""
    rows = [{k: x for k, x in row.items() if x} for row in csv.DictReader(io.StringIO(text))]
    return [(row["step"], row.get("loss"), {k for k in row if not k.endswith("_per_second")}) for row in rows]


@pytest.mark.filterwarnings("ignore:.*a callback stopped the run again")
@pytest.mark.parametrize("in_hand", [False, True])
@pytest.mark.parametrize("name", COUNTING)
def test_a_goal_on_the_way_changes_no_bit_and_no_row(tmp_path, name, in_hand):
    """Goals inside an epoch and between rows: evaluations, rows and counts of an end are taken back."""

    def train(folder, goals):
        state, data = make(), ts.batches(X, 4, shuffle=True)
        for goal in goals:
            log = loggers.csv(tmp_path / f"{folder}.csv")
            more = {"evaluate": bad, "evaluate_every": 4, "log_every": 3, "callbacks": COUNTING[name](), "logger": log}
            given = {"data": data} if in_hand else {}
            state, history = fit(tmp_path / folder, state if in_hand else make(), goal, **more, **given)
        return state, history, (tmp_path / f"{folder}.csv").read_text()

    state, history, rows = train("whole", [26])
    cut, found, cut_rows = train("cut", [3, 6, 7, 13, 15, 26])
    assert_trees_equal(cut, state)
    for column in [*history, "step"]:
        if not column.endswith("per_second"):
            np.testing.assert_array_equal(found[column], history[column], err_msg=column)
    assert cells(cut_rows) == cells(rows)
    evaluations = lambda history: [mark for mark in history.marks if mark[1] == "evaluate"]
    assert evaluations(found) == evaluations(history) != []


def test_a_signal_on_the_way_changes_no_bit(tmp_path):
    """Its end is an event for callbacks, and none that is counted."""

    def interrupt(run):
        if run.step in signals:
            signals.remove(run.step)
            os.kill(os.getpid(), signal.SIGINT)

    def train(folder):
        watch = callbacks.patience(lambda run: run.metrics.get("val/loss", 0.0) >= 1.1, 5)
        given = {"callbacks": [watch, callbacks.plateau("loss", patience=1), callbacks.every(1, interrupt)]}
        return fit(tmp_path / folder, make(), 26, log_every=3, evaluate=bad, evaluate_every=4, **given)

    signals = []
    state, history = train("whole")
    signals = [5, 8]
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            train("cut")
    cut, found = train("cut")
    assert_trees_equal(cut, state)
    assert found["step"].tolist() == history["step"].tolist()
    np.testing.assert_array_equal(found["val/loss"], history["val/loss"])


def test_a_signal_where_a_callback_stops_the_run_leaves_its_end_to_the_next_run(tmp_path):
    """The end has its evaluation, its callbacks and one row, with the numbers of one run written alike."""

    def end(run):
        if run.event == "evaluate":
            run.log(**{"count/evaluations": 1})  # an int, which the history has as a float
        if run.event == "end" and not run.interrupted:
            return ts.adjust(run.state, learning_rate=0.05)

    def train(folder, is_hurt=False):
        def stop(run):
            run.stop("enough")
            if is_hurt:
                os.kill(os.getpid(), signal.SIGINT)

        log = loggers.csv(tmp_path / f"{folder}.csv")
        given = {"evaluate": lambda state: {"val/loss": 1.0 / int(state.step)}, "logger": log, "log_every": 3}
        each = {"callbacks": [callbacks.every(6, stop), end], "evaluate_every": every}
        return fit(tmp_path / folder, make(), 12, **given, **each)

    def rows(folder):
        columns = csv.DictReader((tmp_path / f"{folder}.csv").read_text().splitlines())
        return [{k: x for k, x in row.items() if x and not k.endswith(("_id", "_per_second"))} for row in columns]

    for every in (4, 6):
        with pytest.raises(KeyboardInterrupt):
            train(f"cut {every}", is_hurt=True)
        cut, found = train(f"cut {every}")
        state, history = train(f"whole {every}")
        assert_trees_equal(cut, state)
        np.testing.assert_array_equal(found["val/loss"], history["val/loss"])
        assert rows(f"cut {every}") == rows(f"whole {every}")
        with pytest.warns(UserWarning, match="enough; to train on"):
            again, _ = train(f"cut {every}")
        assert_trees_equal(again, state)


# ------------------------------------------------------------------------------------------------------------ signals

SIGNALLED = """
import signal, sys, time
import jax.numpy as jnp, numpy as np
import tsunax as ts
from tsunax.checkpoints import _blocks as _store

for number in (signal.SIGTERM, signal.SIGINT):  # what comes between two runs
    signal.signal(number, lambda *_: None)
write = _store.write_arrays
_store.write_arrays = lambda *args: (time.sleep(0.1), write(*args))
step = ts.train_step(lambda params, x: jnp.mean((x @ params["w"]) ** 2))
data = ts.batches(np.ones((8, 2), np.float32), 4)
for i in range(6):
    sys.stdin.readline()
    ready = lambda run: print("READY", flush=True) if run.step == 4 else time.sleep(0.002)
    path = f"{sys.argv[1]}/{i}"
    try:
        state = ts.setup(ts.rules.sgd(0.1), {"w": jnp.ones(2)})
        checkpoints = ts.Checkpoints(path, every=10**6)
        ts.fit(step, state, data, steps=10**6, checkpoint=checkpoints, progress=False,
               callbacks=ts.callbacks.every(4, ready))
    except BaseException as error:
        name, at = type(error).__name__, int(error.state.step)
        print(name, at, ts.Checkpoints(path, read_only=True).latest(), flush=True)
sys.stdin.readline()
"""


@pytest.mark.medium
def test_signals_that_come_together_save(tmp_path):
    """SIGTERM and SIGINT within milliseconds, in either order and often, as a scheduler sends them."""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", SIGNALLED, str(tmp_path)]
    term, ctrl_c = signal.SIGTERM, signal.SIGINT
    storms = [[term, ctrl_c], [ctrl_c, term], [term, ctrl_c] * 4]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env) as run:
        for i, wait in enumerate((0.0, 0.005, 0.02, 0.0, 0.02, 0.05)):
            run.stdin.write("\n")
            run.stdin.flush()
            assert run.stdout.readline() == "READY\n"
            for number in storms[i % 3]:
                run.send_signal(number)
                time.sleep(wait)
            _, at, saved = run.stdout.readline().split()
            assert at == saved and int(at) >= 4
        run.communicate("\n", timeout=60)
    assert run.returncode == 0


ENDED = """
import os, signal, sys, time
import jax.numpy as jnp, numpy as np
import tsunax as ts

def slowly(run):
    time.sleep(0.01)
    if run.step == 4:
        print("READY", flush=True)
    elif run.step % 20 == 0:
        print(run.step, run.history.marks, flush=True)

step = ts.train_step(lambda params, x: jnp.mean((x @ params["w"]) ** 2))
state = ts.setup(ts.rules.sgd(0.1), {"w": jnp.ones(2)})
data = ts.batches(np.ones((8, 2), np.float32), 4)
saver = ts.Checkpoints(sys.argv[1], every=10**6, keep_last=None)
try:
    ts.fit(step, state, data, steps=10**6, checkpoint=saver, callbacks=ts.callbacks.every(2, slowly))
except BaseException as error:
    open(sys.argv[1] + "/step", "w").write(f"{int(error.state.step)}")
    raise
"""


@pytest.mark.medium
@pytest.mark.parametrize("name", ["HUP", "XCPU", "USR1", "nohup"])
def test_signals_of_a_scheduler(tmp_path, name):
    """USR1 twice, and a HUP that is ignored, let the run go on, until it gets TERM."""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = ["nohup"] * (name == "nohup") + [sys.executable, "-c", ENDED, str(tmp_path / "run")]
    number = signal.SIGHUP if name == "nohup" else getattr(signal, f"SIG{name}")
    lasts = name in ("USR1", "nohup")
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=env) as run:
        assert run.stdout.readline() == "READY\n"
        for _ in range(2 if lasts else 1):
            run.send_signal(number)
            if lasts:
                run.stdout.readline(), run.stdout.readline()
        if lasts:
            run.send_signal(signal.SIGTERM)
        _, errors = run.communicate(timeout=60)
    assert run.returncode == 128 + (signal.SIGTERM if lasts else number), errors
    with Checkpoints(tmp_path / "run", read_only=True) as checkpoints:
        assert len(checkpoints.steps()) == (3 if name == "USR1" else 1)
        assert checkpoints.latest() == int((tmp_path / "run" / "step").read_text()) >= 4


@pytest.mark.medium
def test_a_terminal_that_is_closed(tmp_path):
    """It sends HUP, and then what the run prints, the progress too, would raise."""
    terminal, end_of_run = pty.openpty()
    take_terminal = "import os\nos.open(os.ttyname(0), os.O_RDWR)\n"
    command = [sys.executable, "-c", take_terminal + ENDED, str(tmp_path / "run")]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), end_of_run)
    run = subprocess.Popen(command, env=env, start_new_session=True, **streams)
    os.close(end_of_run)
    text = b""
    while b"READY" not in text:
        text += os.read(terminal, 1000)
    os.close(terminal)
    assert run.wait(60) == 129
    with Checkpoints(tmp_path / "run", read_only=True) as checkpoints:
        assert checkpoints.latest() == int((tmp_path / "run" / "step").read_text()) >= 4


KILLED_AT_THE_END = """
import os, sys
import jax.numpy as jnp, numpy as np, tsunax as ts

goal, log_every, dies = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "dies"
saver = ts.Checkpoints("run", every=5)

def evaluate(state):
    if dies:
        saver.wait()
        os._exit(9)
    return {"val": 1.0}

step = ts.train_step(lambda params, x: jnp.mean((x @ params["w"]) ** 2))
_, history = ts.fit(step, ts.setup(ts.rules.sgd(0.1), {"w": jnp.ones(2)}), ts.batches(np.ones((80, 2), np.float32), 2),
                    steps=goal, evaluate=evaluate, evaluate_every=1000, log_every=log_every, progress=False,
                    checkpoint=saver, logger=ts.loggers.csv("rows.csv"))
print([*zip(*history.series("grad_norm")), *zip(*history.series("val"))])
"""


@pytest.mark.medium
@pytest.mark.parametrize(("goal", "log_every"), [("20", "5"), ("10", "4"), ("20", "4")])
def test_a_run_killed_in_its_last_evaluation_has_each_row(tmp_path, goal, log_every):
    """A goal is saved before the end adds its row: the row is there after the same goal, and gone after a later one."""
    root, found = str(Path(__file__).resolve().parents[1]), []
    runs = [("a", "10", "dies", 9), ("a", goal, "lives", 0), ("whole", goal, "lives", 0)]
    for folder, end, how, status in runs:
        (tmp_path / folder).mkdir(exist_ok=True)
        command = [sys.executable, "-W", "ignore", "-c", KILLED_AT_THE_END, end, log_every, how]
        env = os.environ | {"PYTHONPATH": root}
        ended = subprocess.run(command, cwd=tmp_path / folder, env=env, capture_output=True, text=True)
        assert ended.returncode == status, ended.stderr
        rows = csv.DictReader((tmp_path / folder / "rows.csv").read_text().splitlines())
        found.append(([(row["step"], row["loss"], row["val"]) for row in rows if how == "lives"], ended.stdout))
    assert found[1] == found[2] and found[2][0][-1][0] == goal
