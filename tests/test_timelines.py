"""A run as a line of exact states: visited, explained, audited, compared."""

import contextlib
import dataclasses
import itertools
import json
import os
import re
import shutil
import threading
import time
from hashlib import sha256

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tsunax as ts
from tests import toys
from tests.helpers import count_compiles, need
from tsunax._core import durable_files
from tsunax._core.tables import short
from tsunax.checkpoints import edits, script_settings
from tsunax.checkpoints._home import sum_of
from tsunax.checkpoints.leaves import Damaged
from tsunax.checkpoints.manifest import Manifest
from tsunax.errors import CheckpointError, DataError, HyperparameterError, StateError, WrongTypeError
from tsunax.reproduce import fingerprint
from tsunax.run import control, feed, mailboxes
from tsunax.timelines import command_line, timeline
from tsunax.timelines.command_line import ask

STEPS = 24


def recorded(prints):
    """A callback that notes the fingerprint of each step when it is first made."""

    def note(run):
        prints.setdefault(run.step, fingerprint(run.state))

    return ts.callbacks.every(1, note)


def a_run(folder, step, make, data, *, every=8, steps=STEPS, **options):
    """The fingerprints of all steps of a run, and its history."""
    prints = {}
    checkpoints = ts.Checkpoints(folder, every=every, keep_last=None)
    callbacks = [recorded(prints), *options.pop("callbacks", [])]
    with checkpoints:
        _, history = ts.fit(
            step, make(), data, steps=steps, checkpoint=checkpoints, callbacks=callbacks, progress=False, **options
        )
    return prints, history


def population():
    rates = jnp.array([0.05, 0.1, 0.2])
    return ts.population(lambda key, rate: ts.setup(ts.rules.sgd(rate), {"w": jnp.ones(8)}), 3, rate=rates)


def a_mesh_state():
    return ts.shard(toys.state(key=jax.random.key(1)), ts.mesh())


CASES = {
    "plain": {},
    "keys and an average": {"loss_fn": toys.noisy, "make": lambda: toys.state(key=jax.random.key(1), ema=0.9)},
    "rejected steps": {"x": toys.with_a_bad_row()},
    "accumulation over calls": {
        "make": lambda: ts.setup(ts.rules.accumulate(ts.rules.adam(0.1), 3), {"w": jnp.ones(8)})
    },
    "micro-batches": {"step": {"accumulate": 4}},
    "a population": {"make": population},
    "several states": {"make": toys.two_states, "step": toys.step_of_two},
    "a mesh": {"make": a_mesh_state, "loss_fn": toys.noisy},
    "a step a call": {"fit": {"steps_per_call": None}},
    "rows on the device": {"data": {"device": True}},
    "a list": {"list": True},
    "no data": {"loss_fn": toys.drawn, "make": lambda: toys.state(key=jax.random.key(2)), "no_data": True},
}


@pytest.mark.filterwarnings("ignore:step:RuntimeWarning")
@pytest.mark.parametrize("name", CASES)
def test_every_step_has_the_bits_of_the_run(tmp_path, name):
    case = CASES[name]
    options, make, x = case.get("step", {}), case.get("make", toys.state), case.get("x", toys.X)
    loss_fn = case.get("loss_fn", toys.loss_fn)
    step = options if callable(options) else ts.train_step(loss_fn, **options)

    def data():
        if "no_data" in case:
            return None
        batches = ts.batches(x, 8, shuffle=True, seed=3, **case.get("data", {}))
        return list(batches) if "list" in case else batches

    prints, _ = a_run(tmp_path / "a", step, make, data(), max_bad=100, **case.get("fit", {}))
    given = data()
    line = timeline(tmp_path / "a", step, make, given)
    assert line.steps == [8, 16, 24]
    assert {k: fingerprint(line.at(k)) for k in range(1, STEPS + 1)} == prints
    if hasattr(given, "get_state"):
        assert given.get_state() == {"epoch": 0, "position": 0}  # data keep their position


def test_calls_reach_states_that_no_step_has(tmp_path):
    step, x = ts.train_step(toys.loss_fn), toys.with_a_bad_row()
    with pytest.warns(RuntimeWarning, match="rejected"):
        a_run(tmp_path / "a", step, toys.state, ts.batches(x, 8), max_bad=100)
    line = timeline(tmp_path / "a", step, toys.state, ts.batches(x, 8))
    states = [line.at(calls=c) for c in range(8)]
    assert [int(s.calls) for s in states] == list(range(8))
    assert [int(s.step) for s in states] == [0, 1, 2, 2, 3, 4, 5, 6]  # row 21 is in batch 2
    assert "loss" in line.explain(calls=3).verdict
    marks_of_branch = {}
    for k in (2, 3):
        line.branch(k, tmp_path / str(k))
        marks_of_branch[k] = [x for x in timeline(tmp_path / str(k)).saved.history().marks if x[1] == "rejected"]
    assert marks_of_branch == {2: [], 3: [(2, "rejected", "")]}  # call 3 was rejected after step 2


@pytest.mark.parametrize("name", ["one state", "several states"])
def test_a_step_that_was_saved_after_a_rejected_call_is_the_step_before_it(tmp_path, name):
    """The last batch of each epoch is rejected, so the checkpoints of epochs have one call more than their step."""
    x = toys.X.copy()
    x[60] = np.nan

    def step_of_named_infos(run, x):
        new, info = toys.step_of_two(run, x)
        return new, {"first": info}

    make, step = (
        (toys.state, ts.train_step(toys.loss_fn)) if name == "one state" else (toys.two_states, step_of_named_infos)
    )
    with pytest.warns(RuntimeWarning, match="rejected"):
        prints, _ = a_run(
            tmp_path / "a", step, make, ts.batches(x, 8), every="epoch", steps=None, epochs=2, max_bad=100
        )
    line = timeline(tmp_path / "a", step, make, ts.batches(x, 8))
    assert line.steps == [7, 14]
    assert [fingerprint(line.at(k)) for k in (6, 7, 8)] == [prints[k] for k in (6, 7, 8)]


def test_a_batch_has_the_numbers_of_its_rows(tmp_path):
    step, data = ts.train_step(toys.loss_fn), ts.batches(toys.X, 8, shuffle=True, seed=3)
    a_run(tmp_path / "a", step, toys.state, data)
    line = timeline(tmp_path / "a", step, toys.state, ts.prefetch(ts.batches(toys.X, 8, shuffle=True, seed=3)))
    for k in (1, 8, 9, 20):
        batch, rows = line.batch(k)
        np.testing.assert_array_equal(batch, toys.X[rows])
    np.testing.assert_array_equal(line.batch(9).rows, data.order(1)[:8])


def test_bisect_finds_the_first_step(tmp_path):
    step, data = ts.train_step(toys.loss_fn), ts.batches(toys.X, 8)
    a_run(tmp_path / "a", step, toys.state, data)
    line = timeline(tmp_path / "a", step, toys.state, ts.batches(toys.X, 8))
    for k in (1, 8, 13, STEPS):
        assert line.bisect(lambda state, k=k: state.step >= k) == k
    with pytest.raises(StateError, match=re.escape("test at bisect(): got True at step 0, expected False there.")):
        line.bisect(lambda state: True)
    with pytest.raises(StateError, match=re.escape("test at bisect(): got False at step 24, expected True there.")):
        line.bisect(lambda state: False)


def test_bisect_compiles_nothing_and_makes_the_first_state_once(tmp_path):
    """To make it may take longer than the replays."""
    step, made = ts.train_step(toys.loss_fn), []
    a_run(tmp_path / "a", step, toys.state, ts.batches(toys.X, 8), every=100)
    make = lambda: made.append(1) or toys.state()
    line = timeline(tmp_path / "a", step, make, ts.batches(toys.X, 8))
    line.at(2)
    made.clear()
    with count_compiles() as compiles:
        assert line.bisect(lambda state: int(state.step) >= 13) == 13
    assert compiles.compiled.count("train_steps") == 0  # replays of all lengths are one program
    assert len(made) == 2  # for step 0, and to restore step 24


@pytest.mark.parametrize("seed", range(4))
def test_explain_names_a_planted_row(tmp_path, seed):
    rng = np.random.default_rng(seed)
    x, row = toys.X.copy(), int(rng.integers(64))
    x[row] *= 1e3
    make = lambda: ts.setup(ts.rules.adam(1e-3), {"w": jnp.ones(8)})
    step, data = ts.train_step(toys.loss_fn), ts.batches(x, 8, shuffle=True, seed=seed)
    _, history = a_run(tmp_path / "a", step, make, data, log_every=1)
    steps, losses = history.series("loss")
    worst = int(steps[np.argmax(losses)])
    line = timeline(tmp_path / "a", step, make, ts.batches(x, 8, shuffle=True, seed=seed))
    explanation = line.explain(worst)
    assert explanation.rows[0] == row and explanation.losses[0] == max(explanation.losses)
    np.testing.assert_allclose(explanation.loss, losses.max(), rtol=1e-6)
    np.testing.assert_allclose(explanation.losses.mean(), explanation.loss, rtol=1e-5)
    assert explanation.norm_steps[-1] == worst and len(explanation.norms["params['w']"]) == len(explanation.norm_steps)
    assert f" {row} " in f" {explanation!r} "


def test_a_row_with_a_negative_loss_may_be_the_bad_row(tmp_path):
    x, row = toys.X.copy(), 38
    x[row] = -1e3
    make = lambda: ts.setup(ts.rules.sgd(1e-9), {"w": jnp.ones(8)})
    step, data = ts.train_step(lambda params, x: jnp.mean(x @ params["w"])), lambda: ts.batches(x, 8)
    a_run(tmp_path / "a", step, make, data(), steps=8)
    explanation = timeline(tmp_path / "a", step, make, data()).explain(5)
    assert explanation.rows[0] == row and explanation.losses[0] == min(explanation.losses)


def dropped(params, x, key):
    """A loss with dropout: a row alone has other noise than in its batch."""
    mask = jax.random.bernoulli(key, 0.5, x.shape)
    return jnp.mean(((x * mask) @ params["w"] - jnp.sin(x.sum(1))) ** 2)


def normalized(params, x):
    """A loss with the statistics of its batch: a row alone has no deviation."""
    hidden = x @ params["w"]
    return jnp.mean((hidden - hidden.mean()) ** 2)


@pytest.mark.parametrize("loss_fn", [dropped, normalized])
def test_rows_of_a_loss_that_mixes_them_are_ranked_by_the_loss_without_each(tmp_path, loss_fn):
    x, row = toys.X.copy(), 38
    x[row] *= 100
    make = lambda: ts.setup(ts.rules.sgd(1e-9), {"w": jnp.ones(8)}, key=jax.random.key(1))
    step, data = ts.train_step(loss_fn), lambda: ts.batches(x, 8)
    a_run(tmp_path / "a", step, make, data(), steps=8)
    line = timeline(tmp_path / "a", step, make, data())
    explanation = line.explain(5)
    assert explanation.rows[0] == row and not len(explanation.losses)
    state, without = line.at(4), x[[32, 33, 34, 35, 36, 37, 39, 39]]
    extra = {"key": jax.random.fold_in(state.key, state.calls)} if loss_fn is dropped else {}
    fall = explanation.loss - float(loss_fn(state.params, without, **extra))
    np.testing.assert_allclose(explanation.falls[0], fall, rtol=1e-4)
    assert "the mean of its rows alone" in explanation.note and "next row takes its place" in repr(explanation)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_rows_of_micro_batches_are_ranked_with_the_keys_of_the_call(tmp_path, accumulate):
    x, bad_row = toys.X.copy(), 38
    x[bad_row] *= 100
    step = ts.train_step(dropped, accumulate=accumulate, check_rows=False)
    make = lambda: ts.setup(ts.rules.sgd(1e-9), {"w": jnp.ones(8)}, key=jax.random.key(1))
    data = lambda: ts.batches(x, 8)
    a_run(tmp_path / "a", step, make, data(), steps=8)
    line = timeline(tmp_path / "a", step, make, data())
    explanation, (batch, rows), state = line.explain(5), line.batch(5), line.at(4)
    by_hand = dataclasses.replace(step, donate=False)
    for row, fall in list(zip(explanation.rows, explanation.falls, strict=True))[:3]:
        i, changed = int(np.flatnonzero(rows == row)[0]), np.array(batch)
        changed[i] = changed[(i + 1) % 8]
        expected = explanation.loss - float(by_hand(state, changed)[1].loss)
        np.testing.assert_allclose(fall, expected, rtol=1e-3, atol=1e-4 * abs(explanation.loss))
    assert explanation.rows[0] == bad_row


def test_steps_beyond_the_newest_checkpoint_are_told(tmp_path):
    step, make, data = ts.train_step(toys.loss_fn), toys.state, lambda: ts.batches(toys.X, 8)
    a_run(tmp_path / "a", step, make, data(), steps=8)
    line = timeline(tmp_path / "a", step, make, data())
    for method in (line.at, line.batch, line.explain):
        with pytest.raises(StateError, match=r"step at timeline: got 9, expected at most 8"):
            method(9)


@pytest.mark.parametrize("makes_info", [lambda info: info, lambda info: {"loss": info.loss}, lambda info: {"a": info}])
def test_a_call_of_several_states_is_explained_as_far_as_it_is_known(tmp_path, makes_info):
    def step(run, x):
        new, info = toys.step_of_two(run, x)
        return new, makes_info(info)

    _, history = a_run(tmp_path / "a", step, toys.two_states, ts.batches(toys.X, 8), steps=8, log_every=1)
    explanation = timeline(tmp_path / "a", step, toys.two_states, ts.batches(toys.X, 8)).explain(5)
    loss = history["loss"][4] if "loss" in history else np.nan
    np.testing.assert_allclose(explanation.loss, loss, rtol=1e-6)
    text, names = (
        repr(explanation),
        [name for name in history.names if name.rpartition("/")[2] in ("loss", "grad_norm")],
    )
    assert text.endswith("rows and layers are known for a train_step of one state alone") and "nan" not in text
    assert names and all(f"{name} {short(history[name][4])}" in text for name in names)
    for name in names:
        np.testing.assert_allclose(explanation.numbers[name], history[name][4], rtol=1e-6)
    need("matplotlib")
    explanation.plot()


@pytest.mark.parametrize("wrap", [lambda data: data, ts.prefetch])
@pytest.mark.parametrize("place", [{"epoch": 0, "position": 0}, {"epoch": 1, "position": 2}])
def test_a_line_begins_where_the_data_of_its_run_began(tmp_path, place, wrap):
    """Wherever the data of the timeline are, and also on a branch."""
    step = ts.train_step(toys.loss_fn)

    def data(epoch, position):
        batches = wrap(ts.batches(toys.X, 8, shuffle=True, seed=1))
        batches.set_state({"epoch": epoch, "position": position})
        return batches

    prints, _ = a_run(tmp_path / "a", step, toys.state, data(**place))
    rows = ts.batches(toys.X, 8, shuffle=True, seed=1).order(place["epoch"])[8 * place["position"] :][:8]
    for i, position in enumerate(
        ({"epoch": 0, "position": 0}, {"epoch": 1, "position": 2}, {"epoch": 2, "position": 1})
    ):
        given = data(**position)
        line = timeline(tmp_path / "a", step, toys.state, given)
        assert {k: fingerprint(line.at(k)) for k in (1, 5, 8, 9, 20)} == {k: prints[k] for k in (1, 5, 8, 9, 20)}
        np.testing.assert_array_equal(line.batch(1).rows, rows)
        line.branch(6, tmp_path / f"b{i}")
        assert given.get_state() == position
        a_run(tmp_path / f"b{i}", step, toys.state, wrap(ts.batches(toys.X, 8, shuffle=True, seed=1)))
        branch = timeline(tmp_path / f"b{i}", step, toys.state, given)
        assert fingerprint(branch.at(3)) == prints[3] and fingerprint(branch.at(20)) == prints[20]


@pytest.mark.parametrize("steps_per_call", ["auto", None])
def test_a_call_of_a_population_is_explained_with_the_losses_of_its_members(tmp_path, steps_per_call):
    step, data = ts.train_step(toys.loss_fn), lambda: ts.batches(toys.X, 8)
    options = {"steps": 8, "log_every": 1, "steps_per_call": steps_per_call}
    _, history = a_run(tmp_path / "a", step, population, data(), **options)
    explanation = timeline(tmp_path / "a", step, population, data()).explain(5)
    for name in (f"{kind}/{i}" for kind in ("loss", "grad_norm") for i in range(3)):
        np.testing.assert_allclose(explanation.numbers[name], history[name][4], rtol=1e-6)
        assert f"{name} {short(history[name][4])}" in repr(explanation)
    assert "nan" not in repr(explanation)


@pytest.mark.parametrize("name", ["params", "moments", "nothing"])
def test_an_audit_names_the_leaves_that_differ(tmp_path, name):
    make = lambda: ts.setup(ts.rules.adam(0.1), {"w": jnp.ones(8)})

    def flipped(run):
        """A fault of a machine, which no callback returned: a bit of one number at step 12."""
        field = "params" if name == "params" else "opt_state"
        leaves, treedef = jax.tree.flatten(getattr(run.state, field))
        i = next(i for i, x in enumerate(leaves) if jnp.shape(x) == (8,))
        bits = np.asarray(leaves[i]).view(np.uint32).copy()
        bits[3] ^= 1 << 12  # the last bit of a moment may be rounded away in the next step
        leaves[i] = jnp.asarray(bits.view(np.float32))
        return run.state.replace(**{field: treedef.unflatten(leaves)})

    class Fault(ts.callbacks.Part):
        def read(self, run, has_row):
            if run.step == 12 and name != "nothing":
                run.state = flipped(run)

    step, data = ts.train_step(toys.loss_fn), ts.batches(toys.X, 8)
    a_run(tmp_path / "a", step, make, data, callbacks=[Fault()])
    line = timeline(tmp_path / "a", step, make, ts.batches(toys.X, 8))
    assert line.audit(16, 24) == []
    differ = line.audit(8, 16)
    assert bool(differ) is (name != "nothing")
    assert all("params" in x or "opt_state" in x for x in differ)


def rewrite_manifest(folder, step, change):
    """Change the JSON of a manifest, with a valid sum, as somebody could."""
    path = folder / str(step)
    body = json.loads((path / "manifest.json").read_bytes())
    change(body)
    content = json.dumps(body).encode()
    (path / "manifest.json").write_bytes(content)
    (path / "manifest.sha256").write_bytes(sum_of(content))


def test_a_manifest_that_was_edited_or_exchanged_shows(tmp_path):
    step, data = ts.train_step(toys.loss_fn), lambda: ts.batches(toys.X, 8)
    for name in ("a", "b"):
        with ts.Checkpoints(tmp_path / name, every=4, keep_every=8) as checkpoints:
            ts.fit(step, toys.state(), data(), steps=STEPS, checkpoint=checkpoints, progress=False)
    link_of = lambda name: re.search("link .* at step 24", repr(timeline(tmp_path / name)))[0]
    line = timeline(tmp_path / "a")
    assert line.steps == [8, 16, 20, 24] and line.audit() == []
    assert link_of("a") == link_of("b") and len(link_of("a").split()[1]) == 32  # the same script

    def edit(body):
        body["parts"][0][0]["script"]["settings"]["accumulate"] = "2"

    def edit_with_its_link(body):
        edit(body)
        body["links"][-1][1] = Manifest.parse(json.dumps(body).encode()).link()

    manifest = (tmp_path / "a" / "16" / "manifest.json").read_bytes()
    for change in (edit, edit_with_its_link):
        rewrite_manifest(tmp_path / "a", 16, change)
        (fault,) = timeline(tmp_path / "a").audit()
        assert "checkpoint 16: its contents have link" in fault
        rewrite_manifest(tmp_path / "a", 16, lambda body: body.update(json.loads(manifest)))
    assert timeline(tmp_path / "a").audit() == []
    rewrite_manifest(tmp_path / "a", 20, lambda body: body.pop("links"))
    assert timeline(tmp_path / "a").audit() != []
    for k in (8, 16, 20, 24):  # as an earlier version saved them: no links, no promise
        rewrite_manifest(tmp_path / "b", k, lambda body: body.pop("links", None))
    assert timeline(tmp_path / "b").audit() == []
    ts.fit(step, toys.state(), data(), steps=STEPS + 4, checkpoint=tmp_path / "b", progress=False)
    assert timeline(tmp_path / "b").audit() == []


def test_another_platform_is_one_warning(tmp_path, monkeypatch):
    step, data = ts.train_step(toys.loss_fn), lambda: ts.batches(toys.X, 8)
    a_run(tmp_path / "a", step, toys.state, data())
    settings = timeline(tmp_path / "a").saved.script(24)["settings"]
    assert settings["version of jax"] == jax.__version__ and settings["devices"] == "1 cpu (cpu)"
    assert {f"version of {x}" for x in ("python", "jaxlib", "flax", "optax", "tsunax", "numpy")} < {*settings}
    meshed = script_settings.script_of(step, a_mesh_state(), None, {})["settings"]
    assert (meshed["devices"], meshed["mesh"]) == ("8 cpu (cpu)", "data=8, fsdp=1, tensor=1")
    later = script_settings._versions() | {"version of jax": "9.0", "version of numpy": "8.0"}
    monkeypatch.setattr(script_settings, "_versions", lambda: later)
    text = r"on another platform \(version of jax: .* then, 9.0 now; version of numpy: .* now\). The same bits are not"
    with pytest.warns(UserWarning, match=rf"timeline\(\): {text}") as caught:
        timeline(tmp_path / "a", step, toys.state, data()).at(12)
    with pytest.warns(UserWarning, match=rf"resumed from step 24 in .*, but {text}") as resumed:
        a_run(tmp_path / "a", step, toys.state, data(), steps=32)
    assert len(caught) == len(resumed) == 1
    old = {name: x for name, x in settings.items() if "version" not in name and name not in ("devices", "mesh")}
    facts = script_settings.script_of(step, toys.state(), data(), {})["settings"]
    assert [*script_settings.edits(old, facts)] == []  # saved by an earlier version


def test_two_runs_are_compared_from_their_files_and_by_replay(tmp_path):
    step = ts.train_step(toys.loss_fn)
    a_run(tmp_path / "a", step, toys.state, ts.batches(toys.X, 8))
    x = toys.X.copy()
    x[5 * 8 + 1] += 1  # batch 5 of each epoch: step 6
    a_run(tmp_path / "b", step, toys.state, ts.batches(x, 8), every=4)
    from_files = timeline(tmp_path / "a").compare(tmp_path / "b")
    assert (from_files.differs_at, from_files.is_exact) == (8, False)
    assert from_files.leaves == ["state.params['w']"]
    assert "data" in from_files.settings or from_files.settings == {}
    lines = [timeline(tmp_path / n, step, toys.state, ts.batches(y, 8)) for n, y in (("a", toys.X), ("b", x))]
    exact = lines[0].compare(lines[1])
    assert (exact.differs_at, exact.is_exact, exact.leaves) == (6, True, ["state.params['w']"])
    a_run(tmp_path / "c", step, toys.state, ts.batches(x, 8), every=5, steps=20)  # no common checkpoint
    third = timeline(tmp_path / "c", step, toys.state, ts.batches(x, 8))
    assert (lines[0].compare(third).differs_at, lines[1].compare(third).differs_at) == (6, None)
    same = timeline(tmp_path / "a").compare(tmp_path / "a")
    assert same.differs_at is None and "the same bits at all 3" in repr(same)


def test_what_a_line_cannot_do_is_said(tmp_path):
    step, data = ts.train_step(toys.loss_fn), ts.batches(toys.X, 8)
    a_run(tmp_path / "a", step, toys.state, data)
    line = timeline(tmp_path / "a", step, toys.state, ts.batches(toys.X, 8), max_replay=4)
    with pytest.raises(
        StateError, match=re.escape("replay at timeline: got 7 calls from call 0 on, expected at most 4.")
    ):
        line.at(7)
    assert int(line.at(20).step) == 20
    with pytest.raises(WrongTypeError, match=re.escape("state at timeline(): got None")):
        timeline(tmp_path / "a").at(3)
    assert int(timeline(tmp_path / "a", step, toys.state).at(16).step) == 16
    with pytest.raises(WrongTypeError, match=r"got a generator, expected .* Saved steps need no data"):
        timeline(tmp_path / "a", step, toys.state, (x for x in ()))
    with pytest.raises(WrongTypeError, match=re.escape("moment at timeline: got step=1, calls=1")):
        line.at(1, calls=1)
    with pytest.raises(WrongTypeError, match=re.escape("moment at timeline: got step=None, calls=None")):
        line.explain()
    with pytest.raises(HyperparameterError, match=re.escape("calls at timeline: got 0, expected an int ≥ 1")):
        line.batch(calls=0)
    with pytest.raises(CheckpointError, match=re.escape("steps at compare(): got none")):
        line.compare(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=re.escape("steps at bisect(): got none")):
        timeline(tmp_path / "empty", step, toys.state, data).bisect(bool)


class Shuffling:
    """A loader without a position, which has another order in each epoch."""

    def __init__(self):
        self.rng = np.random.default_rng(0)

    def __iter__(self):
        for i in self.rng.permutation(8):
            yield toys.X[8 * i : 8 * i + 8]


@pytest.mark.filterwarnings("ignore:.*the position of these data cannot be saved")
def test_a_replay_of_data_without_a_position_is_refused(tmp_path):
    step = ts.train_step(toys.loss_fn)
    prints, _ = a_run(tmp_path / "a", step, toys.state, Shuffling())
    line = timeline(tmp_path / "a", step, toys.state, Shuffling())
    assert fingerprint(line.at(8)) == prints[8]
    for k, span in ((3, "1 to 3"), (12, "9 to 12"), (20, "17 to 20")):
        with pytest.raises(StateError, match=f"without a position, for a replay of calls {span}, expected data"):
            line.at(k)


def test_a_consumed_first_state_is_refused_at_a_checkpoint_too(tmp_path):
    step, data = ts.train_step(toys.loss_fn), ts.batches(toys.X, 8)
    ts.fit(step, used := toys.state(ema=0.9), data, steps=24, checkpoint=tmp_path / "a", progress=False)
    with pytest.raises(StateError, match="got a state that a step has consumed, expected the first state"):
        timeline(tmp_path / "a", step, used, data).at(24)


def test_another_script_is_noticed_before_the_first_checkpoint(tmp_path):
    step, data = ts.train_step(toys.loss_fn), lambda size=8: ts.batches(toys.X, size)
    state, _ = ts.fit(step, used := toys.state(), data(), steps=24, checkpoint=tmp_path / "a", progress=False)
    line_of = lambda first_state, data, step=step: timeline(tmp_path / "a", step, first_state, data)
    with pytest.raises(StateError, match=re.escape("got a state that a step has consumed, expected the first state")):
        line_of(used, data()).at(3)
    with pytest.raises(StateError, match=re.escape("got a state after 24 calls, expected the first state")):
        line_of(state, data()).at(3)
    with pytest.raises(WrongTypeError, match=re.escape("data at timeline(): got None")):
        line_of(toys.state, None).at(3)
    with pytest.raises(DataError, match=re.escape("got batch_size 16, expected batch_size 8")):
        line_of(toys.state, data(16)).at(3)
    with pytest.warns(UserWarning, match=re.escape("timeline(): loss_fn has changed")):
        line_of(toys.state, data(), ts.train_step(lambda params, x: 2 * toys.loss_fn(params, x))).at(3)


def test_a_first_state_may_need_values(tmp_path):
    def make():
        weights = jnp.ones(8)
        return ts.setup(ts.rules.sgd(0.1), {"w": jnp.asarray(np.asarray(weights) * float(weights.max()))})

    step, data = ts.train_step(toys.loss_fn), lambda: ts.batches(toys.X, 8)
    prints, _ = a_run(tmp_path / "a", step, make, data())
    assert fingerprint(timeline(tmp_path / "a", step, make, data()).at(3)) == prints[3]


def one_off(at, change):
    """A callback that changes the state at some steps, in one process only: nothing repeats it."""
    left = set(at)

    def edit(run):
        if run.step not in left:
            return None
        left.discard(run.step)
        return change(run.state)

    return ts.callbacks.every(1, edit)


EDITS = {
    "a number": lambda s: ts.adjust(s, learning_rate=0.03),
    "a number of a part": lambda s: ts.adjust(s, "w", learning_rate=0.02),
    "a freeze": lambda s: ts.freeze(s, "w"),
}


@pytest.mark.parametrize("name", EDITS)
def test_edits_are_part_of_the_line(tmp_path, name):
    make = lambda: ts.setup(ts.rules.adamw(0.1), {"w": jnp.ones(8), "b": jnp.zeros(())}, ema=0.9)
    loss_fn = lambda params, x: toys.loss_fn(params, x) + params["b"] ** 2
    step, data = ts.train_step(loss_fn), ts.batches(toys.X, 8)
    prints, _ = a_run(tmp_path / "a", step, make, data, callbacks=[one_off((13,), EDITS[name])])
    line = timeline(tmp_path / "a", step, make, ts.batches(toys.X, 8))
    assert [edit.step for edit in line.edits] == [13]
    explanations = [line.explain(k) for k in (13, 14)]
    assert [len(x.edits) for x in explanations] == [0, 1] and repr(line.edits[0]) in repr(explanations[1])
    # The note of a step was taken before the edit at its boundary.
    same = [k for k in prints if fingerprint(line.at(k)) == prints[k]]
    assert sorted({*prints} - {*same}) == [edit.step for edit in line.edits]


def test_a_long_record_of_edits_begins_anew(tmp_path, monkeypatch):
    """Checkpoints repeat all edits: at some number the older ones are dropped, and no replay is wrong."""
    monkeypatch.setattr(edits, "MOST_EDITS", 10)
    step, data, prints = ts.train_step(toys.loss_fn), lambda: ts.batches(toys.X, 8), {}

    def adjusted(run):
        state = ts.adjust(run.state, learning_rate=0.1 / (1 + run.step))
        prints[run.step] = fingerprint(state)
        return state

    with pytest.warns(UserWarning, match="edited the state 10 times, and the record of edits begins anew"):
        a_run(tmp_path / "a", step, toys.state, data(), callbacks=[ts.callbacks.every(1, adjusted)])
    line = timeline(tmp_path / "a", step, toys.state, data())
    assert line.steps == [8, 10, 16, 19, 24] and len(line.edits) == 1 + 5
    unreachable = []
    for k in range(1, STEPS + 1):
        try:
            assert fingerprint(line.at(k)) == prints[k], k
        except StateError as error:
            assert "10 edits" in str(error)
            unreachable.append(k)
    assert unreachable == [*range(1, 19)] and line.audit(19, 24) == [] and line.audit() == []
    with pytest.raises(StateError, match="other edits"):
        line.audit(8, 16)


def test_a_callback_makes_its_edit_again_after_a_kill(tmp_path):
    """A kill between an edit and the next save: the line has the edit once, of the run that went on."""
    step, data = ts.train_step(toys.loss_fn), lambda: ts.batches(toys.X, 8)

    def killed(run):
        if run.step == 13:
            raise KeyboardInterrupt

    edit = lambda: ts.callbacks.adjust_at(11, learning_rate=0.03)
    expected, _ = a_run(tmp_path / "whole", step, toys.state, data(), callbacks=[edit()])
    folder = tmp_path / "a"
    with pytest.raises(KeyboardInterrupt):
        a_run(folder, step, toys.state, data(), callbacks=[edit(), ts.callbacks.every(1, killed)])
    prints, _ = a_run(folder, step, toys.state, data(), callbacks=[edit()])
    assert prints == {k: x for k, x in expected.items() if k > 8}
    line = timeline(folder, step, toys.state, data())
    assert [edit.step for edit in line.edits] == [11]
    assert {k: fingerprint(line.at(k)) for k in (10, 12, 20)} == {k: expected[k] for k in (10, 12, 20)}


def test_a_line_of_accumulated_steps_has_edits_at_their_calls(tmp_path):
    """Edits at the ends of epochs, which fall between the calls of a step; audits of such checkpoints."""
    make = lambda: ts.setup(ts.rules.accumulate(ts.rules.adam(0.1), 3), {"w": jnp.ones(8)})
    step, data, states = ts.train_step(toys.loss_fn), lambda: ts.batches(toys.X, 8), {}

    def adjusted(run):
        state = ts.adjust(run.state, learning_rate=0.1 / (1 + run.epoch))
        states[int(state.calls)] = fingerprint(state)
        return state

    with ts.Checkpoints(tmp_path / "a", every="epoch", keep_last=None) as checkpoints:
        callbacks = [ts.callbacks.every("epoch", adjusted)]
        ts.fit(step, make(), data(), epochs=6, checkpoint=checkpoints, callbacks=callbacks, progress=False)
    line = timeline(tmp_path / "a", step, make, data())
    assert {calls: fingerprint(line.at(calls=calls)) for calls in states} == states
    first, *rest = line.steps
    assert [line.audit(first, last) for last in rest] == [[] for _ in rest]


def test_a_run_that_goes_on_with_another_rate_has_a_line(tmp_path):
    make = lambda rate: lambda: ts.setup(ts.rules.sgd(rate), {"w": jnp.ones(8)})
    step, data = ts.train_step(toys.loss_fn), lambda: ts.batches(toys.X, 8)
    first, _ = a_run(tmp_path / "a", step, make(0.1), data(), steps=16)
    with pytest.warns(UserWarning, match="edited in the script"):
        second, _ = a_run(tmp_path / "a", step, make(0.02), data(), steps=32)
    line = timeline(tmp_path / "a", step, make(0.02), data())
    prints = first | second
    same = {k: fingerprint(line.at(k)) == prints[k] for k in (8, 15, 17, 24, 30)}
    assert all(same.values()), same
    with pytest.raises(StateError, match="numbers that the script has edited"):
        line.at(3)


def test_a_run_that_goes_on_with_a_frozen_leaf_has_a_line(tmp_path):
    """Before the freeze, a replay freezes nothing, and an edit finds the leaves of a state without flags."""
    step, data = ts.train_step(toys.loss_fn), lambda: ts.batches(toys.X, 8)
    freeze = lambda: ts.freeze(toys.state(), "w")
    change = lambda run: ts.adjust(run.state, learning_rate=0.02) if run.step == 10 else None
    options = {"callbacks": [ts.callbacks.every(10, change)], "every": 4}
    first, _ = a_run(tmp_path / "a", step, toys.state, data(), steps=16, **options)
    with pytest.warns(UserWarning, match="edited in the script"):
        second, _ = a_run(tmp_path / "a", step, freeze, data(), steps=24, **options)
    line = timeline(tmp_path / "a", step, freeze, data())
    prints = first | second
    same = {k: fingerprint(line.at(k)) == prints[k] for k in (8, 9, 12, 15, 17, 24)}
    assert all(same.values()), same
    assert line.audit(8, 12) == []


def test_the_calls_before_an_exception_are_part_of_the_line_or_refused(tmp_path):
    step, data, prints = ts.train_step(toys.loss_fn), ts.batches(toys.X, 8), {}

    def fails(run):
        if run.step == 13:
            raise ValueError("once")

    checkpoints = ts.Checkpoints(tmp_path / "a", every=8, keep_last=None)
    options = {"steps": STEPS, "checkpoint": checkpoints, "progress": False}
    callbacks = [one_off((11,), EDITS["a number"]), ts.callbacks.every(1, fails)]
    with pytest.raises(ValueError, match="once") as caught:
        ts.fit(step, toys.state(), data, callbacks=callbacks, **options)
    with checkpoints, pytest.warns(UserWarning, match="the state given goes on"):
        ts.fit(step, caught.value.state, data, callbacks=[recorded(prints)], **options)
    line = timeline(tmp_path / "a", step, toys.state, ts.batches(toys.X, 8))
    with pytest.raises(StateError, match="the state given to fit"):
        line.at(12)
    assert fingerprint(line.at(20)) == prints[20]


def test_arguments_that_a_callback_replaced_are_refused(tmp_path):
    loss_fn = lambda params, x, scale: scale * toys.loss_fn(params, x)
    step, data, extra = ts.train_step(loss_fn), lambda: ts.batches(toys.X, 8), {"scale": 1.0}

    def halved(run):
        if run.step == 11:
            extra["scale"] = 0.5

    callbacks = [ts.callbacks.every(1, halved)]
    prints, _ = a_run(tmp_path / "a", step, toys.state, data(), callbacks=callbacks, extra=extra)
    line = timeline(tmp_path / "a", step, toys.state, data(), extra={"scale": 1.0})
    assert fingerprint(line.at(10)) == prints[10] and fingerprint(line.at(16)) == prints[16]
    with pytest.raises(StateError, match="a callback replaced extra at step 11"):
        line.at(13)
    line.branch(16, tmp_path / "b")
    with pytest.raises(StateError, match="a callback replaced extra at step 11"):
        timeline(tmp_path / "b", step, toys.state, data(), extra={"scale": 1.0}).at(13)


def test_data_that_changed_in_place_are_refused_with_the_span(tmp_path):
    step = ts.train_step(toys.loss_fn)
    make_list = lambda x: [x[i : i + 8] for i in range(0, len(x), 8)]
    for name, make in (("arrays", lambda x: ts.batches(x, 8)), ("list", make_list)):
        x = np.array(toys.X)

        def scaled(run, x=x):
            if run.step == 11:
                x *= 2

        callbacks = [ts.callbacks.every(1, scaled)]
        prints, _ = a_run(tmp_path / name, step, toys.state, make(x), callbacks=callbacks)
        line = timeline(tmp_path / name, step, toys.state, make(np.array(toys.X)))
        for k in (7, 8, 16, 24):
            assert fingerprint(line.at(k)) == prints[k]
        for k in (10, 13, 20):
            text = f"steps {k // 8 * 8 + 1} to {k}, but arrays of the data changed in place between"
            with pytest.raises(StateError, match=f"{text} steps 8 and 16"):
                line.at(k)
        line.branch(16, tmp_path / f"{name} b")
        with pytest.raises(StateError, match="between steps 8 and 16"):
            timeline(tmp_path / f"{name} b", step, toys.state, make(np.array(toys.X))).at(13)


def test_a_branch_from_before_a_change_has_no_part_in_it(tmp_path):
    loss_fn = lambda params, x, scale: scale * toys.loss_fn(params, x)
    step, extra, x = ts.train_step(loss_fn), {"scale": 1.0}, np.array(toys.X)
    data = lambda: ts.batches(x, 8)

    def change(run):
        if run.step == 11:
            extra["scale"] = 0.5
        if run.step == 13:
            x[:] = 2 * toys.X

    a_run(tmp_path / "a", step, toys.state, data(), callbacks=[ts.callbacks.every(1, change)], extra=extra)
    x[:] = toys.X
    line = timeline(tmp_path / "a", step, toys.state, data(), extra={"scale": 1.0})
    line.branch(8, tmp_path / "b")
    expected, _ = a_run(tmp_path / "c", step, toys.state, data(), extra={"scale": 1.0})
    a_run(tmp_path / "b", step, toys.state, data(), extra={"scale": 1.0})
    branch = timeline(tmp_path / "b", step, toys.state, data(), extra={"scale": 1.0})
    assert all(fingerprint(branch.at(k)) == expected[k] for k in (5, 10, 13, 20)) and branch.audit(8, 24) == []


def test_a_replay_after_a_rewind_does_not_take_replaced_arguments(tmp_path):
    loss_fn = lambda params, x, scale: scale * toys.loss_fn(params, x)
    step, data, extra = ts.train_step(loss_fn), lambda: ts.batches(toys.X, 8), {"scale": 1.0}

    def goes_back(run):
        if run.step == 11 and extra["scale"] == 1:
            extra["scale"] = 0.5
            run.rewind(back=2)

    a_run(tmp_path, step, toys.state, data(), callbacks=[ts.callbacks.every(1, goes_back)], extra=extra)
    line = timeline(tmp_path, step, toys.state, data(), extra={"scale": 1.0})
    line.at(calls=9)
    with pytest.raises(StateError, match="a callback replaced extra at step 11"):
        line.at(10)


def test_a_line_of_an_own_loop_needs_the_position_of_the_data(tmp_path):
    step, states = ts.train_step(toys.loss_fn, donate=False), {}
    for name, has_place in (("a", True), ("b", False)):
        data, state = ts.batches(toys.X, 8), toys.state()
        with ts.Checkpoints(tmp_path / name, keep_last=None) as checkpoints:
            for batch in itertools.islice(data, 6):
                state, _ = step(state, batch)
                states[int(state.step)] = fingerprint(state)
                if state.step % 3 == 0:
                    checkpoints.save(state, **({"data": data.get_state()} if has_place else {}))
    line = timeline(tmp_path / "a", step, toys.state, ts.batches(toys.X, 8))
    for k in (2, 4, 5):
        assert fingerprint(line.at(k)) == states[k]
    line = timeline(tmp_path / "b", step, toys.state, ts.batches(toys.X, 8))
    with pytest.raises(StateError, match=r"checkpoints with \{\}, expected a position in each checkpoint"):
        line.at(4)


def test_a_state_that_the_script_cuts_has_exact_edits_or_saves(tmp_path):
    make = lambda: ts.adjust(
        ts.setup(ts.rules.adamw(0.1), {"w": jnp.ones(8), "b": jnp.zeros(())}), "w", learning_rate=0.05
    )
    loss_fn = lambda params, x: toys.loss_fn(params, x) + params["b"] ** 2
    step, data = ts.train_step(loss_fn), lambda: ts.batches(toys.X, 8)
    cut = one_off((11,), lambda s: ts.adjust(s, "b", weight_decay=0.3))
    prints, _ = a_run(tmp_path / "a", step, make, data(), callbacks=[cut])
    line = timeline(tmp_path / "a", step, make, data())
    for k in (5, 10, 12, 20):
        try:
            assert fingerprint(line.at(k)) == prints[k], k
        except ts.errors.TsunaxError as error:
            assert k > 10, error


def test_a_change_of_large_leaves_is_saved_and_not_replayed(tmp_path):
    make = lambda: ts.setup(ts.rules.sgd(0.1), {"w": jnp.ones((8, 1 << 12))})
    step = ts.train_step(lambda params, x: jnp.mean((x @ params["w"]) ** 2))
    halved = one_off((11,), lambda s: s.replace(params={"w": s.params["w"] / 2}))
    prints, _ = a_run(tmp_path / "a", step, make, ts.batches(toys.X, 8), callbacks=[halved])
    line = timeline(tmp_path / "a", step, make, ts.batches(toys.X, 8))
    assert line.steps == [8, 11, 16, 24]
    assert fingerprint(line.at(12)) == prints[12]
    (tmp_path / "a" / "11").rename(tmp_path / "gone")
    with pytest.raises(StateError, match="a change that has no record at step 11"):
        line.at(12)


@pytest.mark.parametrize("k", [8, 11])
def test_a_branch_with_nothing_changed_has_the_bits_of_its_parent(tmp_path, k):
    step, data = ts.train_step(toys.noisy), lambda: ts.batches(toys.X, 8, shuffle=True, seed=1)
    make = lambda: toys.state(key=jax.random.key(1), ema=0.9)
    expected, history = a_run(tmp_path / "a", step, make, data(), callbacks=[one_off((5,), EDITS["a number"])])
    timeline(tmp_path / "a", step, make, data()).branch(k, tmp_path / "b")
    prints, branch_history = a_run(tmp_path / "b", step, make, data())
    assert prints == {i: x for i, x in expected.items() if i > k}
    np.testing.assert_array_equal(branch_history["loss"], history["loss"])
    again = timeline(tmp_path / "b", step, make, data())
    assert {i: fingerprint(again.at(i)) for i in (3, 7, 9, 20)} == {i: expected[i] for i in (3, 7, 9, 20)}
    again.branch(20, tmp_path / "c", learning_rate=1e-3)
    other, _ = a_run(tmp_path / "c", step, make, data())
    assert fingerprint(again.at(20)) == expected[20] and other[STEPS] != expected[STEPS]
    compared = timeline(tmp_path / "b").compare(tmp_path / "c")
    assert compared.differs_at == 24 and "branched off" in repr(compared) and "learning_rate=0.001" in repr(compared)
    assert [[edit.source for edit in edits] for edits in compared.edits] == [[], ["branch()"]]
    assert f"{tmp_path / 'c'}: Edit(step=20" in repr(compared)
    with pytest.raises(CheckpointError, match="a directory without steps"):
        again.branch(20, tmp_path / "c")


@pytest.mark.filterwarnings("ignore:edited in the script")
def test_a_branch_from_before_an_edit_of_the_script_goes_on_with_the_script_of_its_step(tmp_path):
    """Also if a checkpoint near the step is damaged. The rate that a callback set is no edit of the script."""
    make = lambda rate: lambda: ts.setup(ts.rules.sgd(rate), {"w": jnp.ones(8)})
    step, data = ts.train_step(toys.loss_fn), lambda: ts.batches(toys.X, 8)
    change = lambda run: ts.adjust(run.state, learning_rate=0.01) if run.step == 3 else None
    options = {"callbacks": [ts.callbacks.every(3, change)], "every": 4}
    prints, _ = a_run(tmp_path / "a", step, make(0.1), data(), steps=12, **options)
    a_run(tmp_path / "a", step, make(0.02), data(), steps=16, **options)
    line = timeline(tmp_path / "a", step, make(0.1), data())
    line.branch(8, tmp_path / "b")
    (tmp_path / "a" / "8" / "manifest.json").write_bytes(b"")
    line.branch(9, tmp_path / "c")
    line.branch(9, tmp_path / "d", learning_rate=0.001)
    for name in "bc":
        branch_prints, _ = a_run(tmp_path / name, step, make(0.1), data(), steps=11, **options)
        assert branch_prints[11] == prints[11]
    state = ts.Checkpoints(tmp_path / "d", read_only=True).restore(make(0.1)()).state
    assert ts.hyperparams(state)["learning_rate"] == np.float32(0.001)


def test_a_branch_before_the_first_checkpoint_has_the_script_of_that_checkpoint(tmp_path):
    step, data = ts.train_step(toys.loss_fn), lambda: ts.batches(toys.X, 8)
    edited_step = ts.train_step(toys.loss_fn, accumulate=2)
    a_run(tmp_path / "a", step, toys.state, data(), steps=8, every=4)
    with pytest.warns(UserWarning, match="accumulate has changed from 1 to 2"):
        a_run(tmp_path / "a", edited_step, toys.state, data(), steps=16, every=8)
    timeline(tmp_path / "a", step, toys.state, data()).branch(2, tmp_path / "b")
    a_run(tmp_path / "b", step, toys.state, data(), steps=4)  # without a warning of an edit


def test_a_branch_at_the_end_of_its_parent_has_the_bits_of_the_parent_that_goes_on(tmp_path):
    """The parent drops the evaluation and the row of its end, and so does the branch."""
    step, data = ts.train_step(toys.loss_fn), lambda: ts.batches(toys.X, 8, shuffle=True, seed=1)
    options = {
        "evaluate": lambda state: {"val/loss": float(state.params["w"].sum())},
        "evaluate_every": 4,
        "log_every": 3,
    }
    run = lambda folder, steps: a_run(
        folder, step, toys.state, data(), steps=steps, every=100, **options,
        callbacks=[ts.callbacks.plateau("val/loss", patience=2, min_delta=100.0)],
    )  # fmt: skip
    run(tmp_path / "a", 10)
    timeline(tmp_path / "a", step, toys.state, data()).branch(10, tmp_path / "b")
    (prints, history), (expected, expected_history) = run(tmp_path / "b", 20), run(tmp_path / "a", 20)
    assert prints == expected
    for name in ("val/loss", "loss"):
        np.testing.assert_array_equal(history.series(name), expected_history.series(name))
    marks = [[x for x in h.marks if x[1] not in ("branch", "restart")] for h in (history, expected_history)]
    assert marks[0] == marks[1] and "plateau" in [x[1] for x in marks[0]]


@pytest.mark.parametrize("k, skip, rate", [(10, 1, {}), (7, 3, {"learning_rate": 1e-3}), (0, 9, {})])
def test_a_branch_leaves_out_batches_and_its_replay_does(tmp_path, k, skip, rate):
    """As one `fit` after another, with a batch each, without these batches; the epochs have 8 of them.

    A step that is called is another program than the compiled loop of `fit`, and may have other bits.
    """
    step, data = ts.train_step(toys.noisy), lambda: ts.batches(toys.X, 8, shuffle=True, seed=1)
    make = lambda: toys.state(key=jax.random.key(1))
    a_run(tmp_path / "a", step, make, data())
    line = timeline(tmp_path / "a", step, make, data())
    line.branch(k, tmp_path / "b", skip=skip, **rate)
    batches = [batch for one in [data()] for _ in range(5) for batch in one]
    states = {k: line.at(k) if not rate else ts.adjust(line.at(k), **rate)}
    expected = jax.tree.map(jnp.copy, states[k])
    for i, batch in enumerate(batches[k + skip : k + skip + 20 - k], k + 1):
        expected, _ = ts.fit(step, expected, [batch], steps=i, progress=False)
        states[i] = jax.tree.map(jnp.copy, expected)
    with ts.Checkpoints(tmp_path / "b", keep_last=1) as checkpoints:
        final, history = ts.fit(step, make(), data(), steps=20, checkpoint=checkpoints, progress=False)
    assert fingerprint(final) == fingerprint(states[20])
    assert ("branch", k) in [(mark[1], mark[0]) for mark in history.marks]
    branch = timeline(tmp_path / "b", step, make, data())
    assert branch.steps == [20]
    assert all(fingerprint(branch.at(i)) == fingerprint(x) for i, x in states.items())
    if k:
        assert fingerprint(branch.at(k - 1)) == fingerprint(line.at(k - 1))
    np.testing.assert_array_equal(branch.batch(k + 1).batch, batches[k + skip])
    np.testing.assert_array_equal(branch.history["loss"], history["loss"])


class Loader:
    """Batches of `toys.X` without end, whose state has an array."""

    def __init__(self, batches=None):
        self.batches = batches or np.split(toys.X, 8)

    def __iter__(self):
        return LoaderIterator(self.batches)


class LoaderIterator:
    def __init__(self, batches):
        self.batches, self.next = batches, 0

    def __iter__(self):
        return self

    def __next__(self):
        self.next += 1
        return self.batches[(self.next - 1) % 8]

    def get_state(self):
        return {"next": np.array([self.next])}

    def set_state(self, state):
        self.next = int(state["next"][0])


def test_a_branch_leaves_out_a_batch_that_no_step_takes(tmp_path):
    """Its shape is another one. The position of the data is an array, which no edit records."""
    batches = [*np.split(toys.X, 8)]
    step = ts.train_step(toys.loss_fn)
    a_run(tmp_path / "a", step, toys.state, Loader(), steps=4, every=2)
    batches[4] = np.zeros((8, 5), np.float32)
    timeline(tmp_path / "a", step, toys.state, Loader(batches)).branch(4, tmp_path / "b", skip=1)
    with ts.Checkpoints(tmp_path / "b", keep_last=1) as checkpoints:
        state, _ = ts.fit(step, toys.state(), Loader(batches), steps=7, checkpoint=checkpoints, progress=False)
    expected, _ = ts.fit(step, toys.state(), [*batches[:4], *batches[5:]], steps=7, progress=False)
    assert fingerprint(state) == fingerprint(expected)
    line = timeline(tmp_path / "b", step, toys.state, Loader(batches))
    assert line.steps == [7] and "1 batches left out" in repr(line.edits[0]) and "saved" not in repr(line.edits[0])
    np.testing.assert_array_equal(line.batch(4).batch, batches[3])
    np.testing.assert_array_equal(line.batch(5).batch, batches[5])
    assert fingerprint(line.at(7)) == fingerprint(expected)


def test_what_cannot_be_left_out(tmp_path):
    step = ts.train_step(toys.drawn)
    make = lambda: toys.state(key=jax.random.key(0))
    ts.fit(step, make(), steps=6, checkpoint=str(tmp_path / "a"), progress=False)
    with pytest.raises(StateError, match=r"skip at branch.*of a run without data"):
        timeline(tmp_path / "a", step, make).branch(3, tmp_path / "b", skip=2)
    step = ts.train_step(toys.loss_fn)
    a_run(tmp_path / "c", step, toys.state, ts.batches(toys.X, 8))
    line = timeline(tmp_path / "c", step, toys.state, ts.batches(toys.X, 8), max_replay=30)
    with pytest.raises(StateError, match="at most 30"):
        line.branch(3, tmp_path / "b", skip=31)
    assert not (tmp_path / "b").exists()


def test_a_step_without_the_memory_of_callbacks_is_no_branch(tmp_path):
    step, data = ts.train_step(toys.loss_fn), ts.batches(toys.X, 8)
    evaluate = lambda state: {"val/loss": float(state.params["w"].sum())}
    patient = [ts.callbacks.early_stopping("val/loss", patience=50)]
    a_run(tmp_path / "a", step, toys.state, data, callbacks=patient, evaluate=evaluate, evaluate_every=4)
    line = timeline(tmp_path / "a", step, toys.state, ts.batches(toys.X, 8))
    with pytest.raises(StateError, match="no memory of callbacks is saved"):
        line.branch(9, tmp_path / "b")
    line.branch(8, tmp_path / "b")


class Fault:
    """A fault that does not repeat, in the first call that makes a step: one bit of a parameter, or a NaN before it."""

    def __init__(self, monkeypatch, step, kind):
        self.step, self.kind, self.call = step, kind, feed.Caller.call
        monkeypatch.setattr(feed.Caller, "call", lambda *arguments: self(*arguments))

    def __call__(self, caller, state, chunk, *arguments):
        is_hit = int(state.step) == self.step - 1 and chunk.steps == 1
        self.step = -1 if is_hit else self.step
        changed = lambda w: {"params": {"w": jnp.asarray(w)}}
        if is_hit and self.kind == "nan":
            state = state.replace(**changed(np.asarray(state.params["w"]) + np.float32([np.nan, *[0] * 7])))
        state, infos = self.call(caller, state, chunk, *arguments)
        if is_hit and self.kind == "bit":
            bits = np.asarray(state.params["w"]).view(np.uint32).copy()
            bits[3] ^= 1
            state = state.replace(**changed(bits.view(np.float32)))
        return state, infos


VERIFIED = [("raise", "bit"), ("raise", "nan"), ("redo", "bit"), ("redo", "nan"), ("warn", "bit")]


@pytest.mark.parametrize(("on_fault", "kind"), VERIFIED)
def test_a_step_that_is_verified_has_no_fault_unseen(tmp_path, monkeypatch, on_fault, kind):
    step, data = ts.train_step(toys.noisy), lambda: ts.batches(toys.X, 8)
    make, seen = lambda: toys.state(key=jax.random.key(1)), []
    expected, clean = ts.fit(step, make(), data(), steps=STEPS, progress=False)
    checked = ts.callbacks.verify(every=5, on_fault=on_fault)
    callbacks = [checked, ts.callbacks.every(1, lambda run: seen.append((run.step, int(run.state.step))))]
    fit = lambda: ts.fit(step, make(), data(), steps=STEPS, progress=False, callbacks=callbacks)
    assert fingerprint(fit()[0]) == fingerprint(expected)  # no false alarm, and no other bit
    Fault(monkeypatch, 11, kind)
    if on_fault == "raise":
        with pytest.raises(StateError, match=r"step 11 at verify.*other bits in state\."):
            fit()
        return
    with pytest.warns(UserWarning, match="step 11 has other bits"):
        state, history = fit()
    assert (fingerprint(state) == fingerprint(expected)) is (on_fault == "redo")
    assert [mark[:2] for mark in history.marks if mark[1] == "verify"] == [(11, "verify")]
    assert all(step == state_step for step, state_step in seen)
    if on_fault == "redo":  # also the rows are of the run without the fault
        np.testing.assert_array_equal(history["loss"], clean["loss"])
        assert history["step"].tolist() == clean["step"].tolist()


@pytest.mark.parametrize("steps_per_call", ["auto", 1, None])
def test_a_verified_step_loses_no_boundary(tmp_path, steps_per_call):
    """Step 7 is verified by `verify(6)`, and callbacks, an evaluation and a save are due there."""
    step, data = ts.train_step(toys.noisy), lambda: ts.batches(toys.X, 8)

    def a_fit(folder, *parts):
        seen = []
        callbacks = [
            *parts, ts.callbacks.adjust_at(7, learning_rate=0.02), ts.callbacks.freeze_at(13, "w"),
            ts.callbacks.every(1, lambda run: seen.append((run.step, int(run.state.step)))),
        ]  # fmt: skip
        with ts.Checkpoints(folder, every=7, keep_last=None) as checkpoints:
            state, history = ts.fit(
                step, toys.state(key=jax.random.key(1)), data(), steps=20, checkpoint=checkpoints, callbacks=callbacks,
                evaluate=lambda state: {"val/x": 1.0}, evaluate_every=7, steps_per_call=steps_per_call, progress=False,
            )  # fmt: skip
            return fingerprint(state), history.marks, checkpoints.steps(), seen

    verified = a_fit(tmp_path / "a", ts.callbacks.verify(every=6))
    assert verified == a_fit(tmp_path / "b") and verified[2] == [7, 14, 20]


def test_a_step_that_makes_its_own_data_is_explained_without_rows(tmp_path):
    step, make = ts.train_step(toys.drawn), lambda: toys.state(key=jax.random.key(1))
    ts.fit(step, make(), steps=9, checkpoint=tmp_path / "a", progress=False)
    explanation = timeline(tmp_path / "a", step, make).explain(5)
    assert "makes its own data" in explanation.note and explanation.norm_steps == [1, 2, 3, 4, 5]


class Sender(ts.callbacks.Part):
    """Sends commands to its own run from a thread, as a command line would, each at some step."""

    every = 1

    def __init__(self, folder, commands, wait=60.0):
        self.folder, self.commands, self.answers, self.threads = folder, dict(commands), [], []
        self.wait = wait

    def at(self, run, events):
        if run.step in self.commands:
            self.send(*self.commands.pop(run.step))

    def send(self, verb, values, where):
        waiting = lambda: len(list((self.folder / "control").glob("*.json")))
        count = waiting()
        thread = threading.Thread(target=lambda: self.answers.append(ask(self.folder, verb, values, where, self.wait)))
        thread.start()
        self.threads.append(thread)
        while thread.is_alive() and waiting() == count:
            time.sleep(1e-3)


def test_commands_are_obeyed_answered_and_part_of_the_line(tmp_path, monkeypatch):
    monkeypatch.setattr(mailboxes.FolderMailbox, "look_seconds", 0.0)
    folder, step = tmp_path / "a", ts.train_step(toys.loss_fn)
    data = lambda: ts.batches(toys.X, 8)
    commands = {
        4: ("adjust", {"learning_rate": 0.02}, None),
        6: ("adjust", {"rate": 0.02}, None),
        9: ("freeze", {}, "w"),
        11: ("save", {}, None),
        13: ("status", {}, None),
        15: ("thaw", {}, "**"),
        17: ("evaluate", {}, None),
        19: ("save", {"learning_rate": 1.0}, None),
        21: ("evaluate", {}, "w"),
        22: ("freeze", {}, None),
        23: ("stop", {}, None),
    }
    sender = Sender(folder, commands)
    evaluate = lambda state: {"val/loss": float(state.params["w"].sum())}
    prints, history = a_run(
        folder, step, toys.state, data(), callbacks=[sender], evaluate=evaluate, evaluate_every=100, steps=100, every=50
    )
    for thread in sender.threads:
        thread.join()
    assert 23 <= max(prints) <= 26 and len(sender.answers) == len(commands)
    refused = sorted(x for x in sender.answers if x.startswith("refused"))  # each from a thread of its own
    assert len(refused) == 4 and "rate" in refused[0]
    status = next(json.loads(x) for x in sender.answers if x.startswith("{"))
    assert 13 <= status["step"] <= 15 and status["epoch"] == 1 and "loss" in status  # 8 batches an epoch
    assert refused[1:] == [
        "refused: evaluate takes no --where",
        "refused: freeze needs --where",
        "refused: save takes no NAME=NUMBER",
    ]
    assert [x[1] for x in history.marks].count("command") == 6
    assert len(history.series("val/loss")[0]) == 2  # asked for, and at the end
    with ts.Checkpoints(folder, read_only=True) as checkpoints:
        assert any(11 <= k <= 13 for k in checkpoints.home.steps())
    line = timeline(folder, step, toys.state, data())
    assert len(line.edits) == 3 and all("command" in edit.source for edit in line.edits)
    last = max(prints)
    assert fingerprint(line.at(last)) == prints[last]
    with pytest.raises(CheckpointError, match="a run that has ended"):
        ask(folder, "stop", {})


def test_a_run_without_an_evaluation_refuses_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr(mailboxes.FolderMailbox, "look_seconds", 0.0)
    sender = Sender(tmp_path / "a", {4: ("evaluate", {}, None)})
    a_run(tmp_path / "a", ts.train_step(toys.loss_fn), toys.state, ts.batches(toys.X, 8), callbacks=[sender])
    for thread in sender.threads:
        thread.join()
    assert sender.answers == ["refused: the run has no evaluate="]


class AlmostFull:
    """A disk on which the first write of an answer fails, after it has made the file."""

    def __init__(self, monkeypatch):
        self.write, self.failures = durable_files.write, 0
        monkeypatch.setattr(durable_files, "write", self)

    def __call__(self, path, content):
        if path.name.endswith(".answer.new") and not self.failures:
            self.failures += 1
            path.touch()
            raise OSError(28, "No space left on device")
        self.write(path, content)


def test_a_command_is_obeyed_once_though_its_answer_does_not_fit_on_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(mailboxes.FolderMailbox, "look_seconds", 0.0)
    disk, command = AlmostFull(monkeypatch), ("adjust", {"learning_rate": 0.02}, None)
    sender = Sender(tmp_path / "a", {4: command, 9: ("status", {}, None)}, wait=1.0)
    _, history = a_run(
        tmp_path / "a", ts.train_step(toys.loss_fn), toys.state, ts.batches(toys.X, 8), callbacks=[sender]
    )
    for thread in sender.threads:
        thread.join()
    assert [x[1] for x in history.marks].count("command") == 1 == disk.failures
    assert sorted(x[:9] for x in sender.answers) == ["no answer", '{"step": ']


def test_commands_at_a_start_and_at_a_rewind_reach_the_run(tmp_path, monkeypatch):
    """One waits before the run begins, one is undone by a rewind, one comes just before the rewind."""
    monkeypatch.setattr(mailboxes.FolderMailbox, "look_seconds", 0.0)
    sender = Sender(tmp_path / "a", {11: ("adjust", {"learning_rate": 0.02}, None)})

    def goes_back(run):
        if run.step == 12 and "done" not in run.memory:
            run.memory["done"] = True
            run.rewind(back=3, factor=1)

    goes_back.outlives_rewinds = ("done",)
    with ts.Checkpoints(tmp_path / "a", every=8, keep_last=None) as checkpoints:
        (tmp_path / "a" / "control").mkdir()  # of an earlier start
        sender.send("freeze", {}, "w")
        state, history = ts.fit(
            ts.train_step(toys.loss_fn), toys.state(), ts.batches(toys.X, 8), steps=20, checkpoint=checkpoints,
            callbacks=[sender, ts.callbacks.every(1, goes_back)], progress=False,
        )  # fmt: skip
    for thread in sender.threads:
        thread.join()
    assert all(x.startswith("done at step") for x in sender.answers) and len(sender.answers) == 2
    assert float(ts.hyperparams(state)["learning_rate"]) == np.float32(0.02) and "frozen" in repr(state)
    assert [x[1] for x in history.marks].count("rewind") == 1


def test_a_rewind_refuses_no_command_that_waits(tmp_path):
    sender = Sender(tmp_path / "a", {11: ("stop", {}, None)})
    step = ts.train_step(toys.loss_fn)

    def goes_back(run):
        if run.step == 12 and "done" not in run.memory:
            run.memory["done"] = True
            run.rewind(back=3, factor=1)
            assert list((tmp_path / "a" / "control").glob("*.json"))
        elif run.step == 12:
            time.sleep(0.2)
            assert not sender.answers

    goes_back.outlives_rewinds = ("done",)
    a_run(tmp_path / "a", step, toys.state, ts.batches(toys.X, 8), callbacks=[sender, ts.callbacks.every(1, goes_back)])
    for thread in sender.threads:
        thread.join()
    assert sender.answers == ["refused: the run has ended"]


def test_an_explanation_of_a_call_that_a_rewind_left_has_the_calls_before_it(tmp_path):
    def edited(run):
        if run.step == 10 and "done" not in run.memory:
            run.memory["done"] = True
            return ts.adjust(run.state, learning_rate=0.02)
        if run.step == 15 and "back" not in run.memory:
            run.memory["back"] = True
            run.rewind(back=5)
        return run.stop("enough") if run.step == 11 and run.state.calls > 15 else None

    edited.outlives_rewinds = ("done", "back")
    step, data = ts.train_step(toys.loss_fn), lambda: ts.batches(toys.X, 8)
    a_run(tmp_path / "a", step, toys.state, data(), callbacks=[ts.callbacks.every(1, edited)])
    line = timeline(tmp_path / "a", step, toys.state, data())
    left = line.explain(calls=15)
    assert left.norm_steps == [*range(5, 16)] and [edit.step for edit in left.edits] == [10]
    again = line.explain(calls=18)
    assert again.norm_steps == [8, 9, 10, 11] and again.step == 11
    assert line.explain(calls=5).norm_steps == [*range(1, 6)]


def test_an_audit_over_replaced_arguments_is_refused(tmp_path):
    loss_fn = lambda params, x, scale: scale * toys.loss_fn(params, x)
    step, data, extra = ts.train_step(loss_fn), lambda: ts.batches(toys.X, 8), {"scale": 1.0}

    def halved(run):
        if run.step == 11:
            extra["scale"] = 0.5

    a_run(tmp_path / "a", step, toys.state, data(), callbacks=[ts.callbacks.every(1, halved)], extra=extra)
    with pytest.raises(StateError, match="a callback replaced extra at step 11"):
        timeline(tmp_path / "a", step, toys.state, data(), extra={"scale": 1.0}).audit(8, 16)


def test_a_refused_branch_leaves_the_directory_to_its_user(tmp_path):
    step, data = ts.train_step(toys.loss_fn), lambda: ts.batches(toys.X, 8)
    a_run(tmp_path / "a", step, toys.state, data())
    with ts.Checkpoints(tmp_path / "b") as checkpoints:
        checkpoints.save(toys.state())
        checkpoints.wait()
        with pytest.raises(CheckpointError, match="a directory without steps"):
            timeline(tmp_path / "a", step, toys.state, data()).branch(8, tmp_path / "b")
        checkpoints.save(toys.state())


def test_a_run_that_cannot_be_read_hides_no_other_from_the_log(tmp_path):
    step, data = ts.train_step(toys.loss_fn), lambda: ts.batches(toys.X, 8)
    for name in "abc":
        a_run(tmp_path / name, step, toys.state, data(), steps=8)
    manifest = tmp_path / "c" / "8" / "manifest.json"
    manifest.write_text(text := manifest.read_text().replace('"format":1', '"format":9'))
    manifest.with_suffix(".sha256").write_text(f"{sha256(text.encode()).hexdigest()}  manifest.json\n")
    line = timeline(tmp_path / "a", step, toys.state, data())
    line.branch(8, tmp_path / "d")
    for folder in (tmp_path / "a").glob("8"):
        shutil.rmtree(folder)
    timeline(tmp_path / "d", step, toys.state, data()).branch(8, tmp_path / "a")  # parents of each other
    with ts.Checkpoints(tmp_path / "own") as checkpoints:
        checkpoints.save(toys.state(), history=[1, 2])
    text = command_line.log(tmp_path)
    assert all(re.search(rf"^ *{name}\b", text, re.MULTILINE) for name in ("a", "b", "c", "d", "own"))
    assert re.search(r"^c .*cannot be read: .*format 9", text, re.MULTILINE)


def test_bisect_needs_a_first_step_before_the_last(tmp_path):
    step, data = ts.train_step(toys.loss_fn), lambda: ts.batches(toys.X, 8)
    a_run(tmp_path / "a", step, toys.state, data(), steps=8)
    with pytest.raises(StateError, match="got 6 and high=2, expected a step below high"):
        timeline(tmp_path / "a", step, toys.state, data()).bisect(lambda state: state.step > 1, 6, 2)


def test_the_log_of_no_run_is_an_error(tmp_path, capsys):
    assert command_line.main(["log", str(tmp_path / "nowhere")]) == 1
    assert capsys.readouterr().out.endswith("got no run, expected a directory of runs of fit.\n")


def test_a_command_for_another_start_is_refused(tmp_path):
    folder = tmp_path / "control"
    folder.mkdir()
    inbox = control.Inbox(mailboxes.FolderMailbox(tmp_path))
    name = "20260101T000000-00000000.json"
    (folder / name).write_text('{"lock": "other", "verb": "stop"}')
    assert inbox.mailbox.names() == [name]
    assert "has ended" in inbox.read(name, "this")["refused"]
    for text in ('{"lock": "this", "verb": "eval(1)"}', "[]", "{", '{"verb": "stop"}', "1" * 5000):
        (folder / name).write_text(text)
        assert "refused" in inbox.read(name, "this")
    (folder / name).unlink()
    (folder / name).symlink_to(tmp_path)
    assert inbox.mailbox.names() == []


def test_a_command_that_is_withdrawn_during_a_look_hides_no_other(tmp_path, monkeypatch):
    folder = tmp_path / "control"
    folder.mkdir()
    names = [f"20260101T000000-0000000{i}.json" for i in range(3)]
    for name in names:
        (folder / name).write_text("{}")
    with os.scandir(folder) as entries:
        listed = list(entries)  # before a sender gives up
    (folder / listed[0].name).unlink()
    monkeypatch.setattr(os, "scandir", lambda path: contextlib.nullcontext(listed))
    assert mailboxes.FolderMailbox(tmp_path).names() == sorted({*names} - {listed[0].name})


def test_commands_of_one_second_keep_their_order(tmp_path):
    mailbox = mailboxes.FolderMailbox(tmp_path)
    mailbox.prepare()
    names = [mailbox.send(b"{}") for _ in range(12)]
    assert mailbox.names() == names


def test_a_folder_of_commands_that_is_a_link_is_not_used(tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o755)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "control").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "20260101T000000-00000000.json").write_text("{}")
    a_run(tmp_path / "a", ts.train_step(toys.loss_fn), toys.state, ts.batches(toys.X, 8))
    assert (tmp_path / "elsewhere").stat().st_mode & 0o777 == 0o755
    assert mailboxes.FolderMailbox(tmp_path / "a").names() == []
    assert [path.name for path in (tmp_path / "elsewhere").iterdir()] == ["20260101T000000-00000000.json"]


@pytest.mark.parametrize("has_folder", [True, False])
def test_a_command_without_an_answer_has_an_exit_status(tmp_path, capsys, has_folder):
    """A run that does not look, and a run whose folder of commands cannot be written."""
    with ts.Checkpoints(tmp_path / "a"):
        if has_folder:
            (tmp_path / "a" / "control").mkdir()
        assert command_line.main(["stop", "--wait", "0.1", str(tmp_path / "a")]) == 1
    text = capsys.readouterr().out
    assert ("The command stays" in text) is has_folder and ("refused" in text) is not has_folder


@pytest.mark.parametrize("arguments", ["adjust a=1 --where w", "--where w adjust a=1", "adjust --where w a=1"])
def test_the_options_of_a_command_have_any_place(tmp_path, capsys, arguments):
    assert command_line.main([*arguments.split(), str(tmp_path)]) == 1
    assert "a run under way" in capsys.readouterr().out


def test_the_log_shows_branches_below_their_parents(tmp_path, capsys):
    step, data = ts.train_step(toys.loss_fn), lambda: ts.batches(toys.X, 8)
    _, history = a_run(tmp_path / "a", step, toys.state, data(), log_every=1)
    timeline(tmp_path / "a", step, toys.state, data()).branch(8, tmp_path / "b", learning_rate=1e-3)
    assert command_line.main(["log", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["run", "a", "b"]
    assert "from step 8" in lines[2] and "learning_rate=0.001" in lines[2]
    numbers = [short(x) for x in (history.last("loss"), min(history["loss"]))]
    assert lines[1].split()[-3::2] == numbers and numbers[0] != numbers[1]
    assert command_line.main(["stop", str(tmp_path / "a")]) == 1


def test_edits_that_are_too_long_are_damage(monkeypatch):
    text = edits.dump_edits([edits.Edit(k, k, "x", None, {}) for k in range(9)])
    assert len(edits.parse_edits(text)) == 9
    lines = [edit.dump() for edit in edits.parse_edits(text)]
    monkeypatch.setattr(edits, "MOST_TEXT", len("\n".join(lines[:4])))  # cut between two edits
    with pytest.raises(Damaged, match="more than"):
        edits.parse_edits(text)


def test_a_command_is_answered_when_its_change_is_on_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(mailboxes.FolderMailbox, "look_seconds", 0.0)
    folder, step, saved = tmp_path / "a", ts.train_step(toys.loss_fn), []
    sync = durable_files.sync

    def slow_sync(path):
        time.sleep(
            0.3 if path.parent == folder and path.name.startswith(".tsunax-tmp") else 0
        )  # the last before the name
        sync(path)

    monkeypatch.setattr(durable_files, "sync", slow_sync)
    sender = Sender(folder, {5: ("adjust", {"learning_rate": 0.02}, None)})

    def look(run):
        if sender.answers and not saved:
            saved.append(sorted(int(x.name) for x in folder.iterdir() if x.name.isdigit()))
        time.sleep(0.02)

    a_run(folder, step, toys.state, ts.batches(toys.X, 8), callbacks=[sender, ts.callbacks.every(1, look)], every=1000)
    sender.threads[0].join()
    assert sender.answers == [f"done at step {saved[0][0]}"]
