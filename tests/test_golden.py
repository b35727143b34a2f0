"""Checkpoints of every format that there was come back with the bits that were saved."""

import csv
import json
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import tsunax as ts
from tests.golden import make
from tests.helpers import assert_trees_close, need
from tests.programs import saving
from tsunax.checkpoints import exchange

ARCHIVES = sorted(path for path in make.HERE.glob("format-*") if path.is_dir())
CASES = [(path, name, path / name) for path in ARCHIVES for name in make.setups()]
CASES += [(path, name, path / "orbax" / name) for path in ARCHIVES for name in make.ORBAX]


def test_there_is_one_for_each_format():
    from tsunax.checkpoints import manifest

    assert [path.name for path in ARCHIVES] == [f"format-{i}" for i in range(1, manifest.FORMAT + 1)]


@pytest.mark.parametrize(
    ("archive", "name", "folder"), CASES, ids=[str(path.relative_to(make.HERE)) for *_, path in CASES]
)
def test_old_checkpoints_come_back(archive, name, folder):
    known = json.loads((archive / "digests.json").read_text())
    like = make.setups()[name]
    reader = ts.Checkpoints(folder, read_only=True)
    found = reader.restore(like)
    assert found.step == known[name]["step"]
    assert make.digest(found.state) == known[name]["state"]
    parts = {"data": found.data, "history": found.history, "callbacks": found.callbacks}
    assert make.digest(parts) == known["parts"] and found.data["order"] == (1, [2.5, None])
    assert type(found.state) is type(like) and str(found.state)
    if isinstance(like, ts.States):
        params = make.params_of(reader.restore(make.setups()[name], params_only=True).state)
    else:
        params = reader.restore(make.setups()[name].params, params_only=True).state
    assert make.digest(params) == known[name]["params"]


def test_what_two_processes_saved_comes_back_in_one():
    archive = make.HERE / "format-1"
    found = ts.Checkpoints(archive / "processes", read_only=True).restore(saving.blank())
    assert len(list((archive / "processes").rglob("*.safetensors"))) == 2
    assert make.digest(found.state) == json.loads((archive / "digests.json").read_text())["processes"]
    assert found.data == {"position": 7} and found.history["loss"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("name", ["mlp", "population", "states"])
@pytest.mark.parametrize("archive", ARCHIVES, ids=lambda path: path.name)
def test_an_old_run_goes_on(archive, name, tmp_path):
    """With the call after its last one, as a run that was never saved."""
    shutil.copytree(archive / name, tmp_path / "run")
    with ts.Checkpoints(tmp_path / "run") as checkpoints:
        (first_step,) = checkpoints.steps()
        state = make.stepped(name, checkpoints.restore(make.setups()[name]).state, 6)
        checkpoints.save(state)
    uninterrupted = make.stepped(name, make.trained(name, make.setups()[name]), 6)
    assert checkpoints.steps() == [first_step, first_step + 1]
    assert_trees_close(state, uninterrupted, rtol=1e-6, atol=1e-7)  # of the same machine, but maybe another jax


@pytest.mark.parametrize("archive", ARCHIVES, ids=lambda path: path.name)
def test_members_of_an_old_population_have_their_own_steps_and_rates(archive):
    like = make.setups()["population"]
    found = ts.Checkpoints(archive / "population", read_only=True).restore(like).state
    assert found.step.tolist() == [6, 5, 6] and found.calls.tolist() == [6, 6, 6]
    np.testing.assert_array_equal(ts.hyperparams(found)["learning_rate"], np.array([1e-3, 1e-2, 1e-1], np.float32))
    alone = ts.populations.member(found, 1)
    assert int(alone.step) == 5 and alone.params["w"].shape == (5, 2)


@pytest.mark.parametrize("archive", ARCHIVES, ids=lambda path: path.name)
def test_old_states_have_their_members_clocks_and_what_they_carry(archive):
    like = make.setups()["states"]
    found = ts.Checkpoints(archive / "states", read_only=True).restore(like).state
    assert (int(found.step), int(found.calls), int(found.rejected)) == (5, 6, 1)
    assert (int(found.actor.step), int(found.critic.step)) == (6, 5)
    assert found.carry["replay"][:, 0].tolist() == [4, 5, 2, 3] and int(found.carry["position"]) == 6


@pytest.mark.parametrize("archive", ARCHIVES, ids=lambda path: path.name)
def test_old_exports_come_back(archive):
    known = json.loads((archive / "digests.json").read_text())
    found = exchange.restore(archive / "mlp.safetensors", make.setups()["mlp"])
    assert make.digest(found) == known["mlp"]["state"]


@pytest.mark.parametrize("archive", ARCHIVES, ids=lambda path: path.name)
def test_an_old_run_of_fit_goes_on(archive, tmp_path):
    """With what was recorded besides its checkpoints: edits, commands, a rewind, links, and the rows of its logs."""
    shutil.copytree(archive / "run", tmp_path / "run")
    for name in ("run.csv", "run.jsonl"):
        shutil.copy(archive / name, tmp_path)
    known = json.loads((archive / "digests.json").read_text())["run"]
    assert make.facts_of_run(tmp_path) == known
    assert known["changed links"] == [] and known["left"] and len(known["edits"]) == 3
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the versions and devices of the archive
        state, history = make.fitted(tmp_path, steps=20)
    assert int(state.step) == 20 and {"rewind", "command", "adjust"} <= {name for _, name, _ in history.marks}
    rows = list(csv.DictReader((tmp_path / "run.csv").read_text().splitlines()))
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    for found in (rows, [line for line in lines if "loss" in line]):
        assert [int(float(row["step"])) for row in found] == list(range(1, 21))
        assert len({row["run_id"] for row in found}) == 1


@pytest.mark.parametrize("archive", ARCHIVES, ids=lambda path: path.name)
def test_an_old_search_goes_on(archive, tmp_path):
    need("optuna")
    shutil.copytree(archive / "search", tmp_path / "search")
    known = json.loads((archive / "digests.json").read_text())["search"]
    assert make.facts_of_search(ts.tuning.read(tmp_path / "search")) == known
    assert make.facts_of_search(make.searched(tmp_path / "search", trials=8))[:6] == known


def test_archives_are_small():
    sizes = [p.stat().st_size for path in ARCHIVES for p in Path(path).rglob("*") if p.is_file()]
    assert sum(sizes) < len(ARCHIVES) * 400_000
