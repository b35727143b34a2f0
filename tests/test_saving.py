"""Checkpoints of several processes: what each writes and reads, what they agree on, and what ends them."""

import json
import re
import sys

import jax
import numpy as np
import pytest
import tsunax as ts
from campaigns import fleets
from tests.processes import answers, ready
from tests.programs import saving
from tsunax.errors import CheckpointError


@pytest.fixture
def launch(start_processes, tmp_path):
    """A function that starts n processes of `tests.programs.saving` on a folder."""

    def run(n, work, folder="saved"):
        (tmp_path / folder).mkdir(exist_ok=True)
        return start_processes("saving", n, work, tmp_path / folder)

    return run


@pytest.mark.medium
@pytest.mark.parametrize("counts", [(1, 2, 1), pytest.param((4, 2, 4, 1), marks=pytest.mark.slow)])
@pytest.mark.parametrize("store", ["", pytest.param("_orbax", marks=pytest.mark.medium)])
def test_a_state_moves_between_processes(launch, tmp_path, counts, store):
    """Whole on each, spread, mixed; every piece on the disk once; the same bits in their new places."""
    seen = []
    for n in counts:  # a single process may be this one
        here = n == 1 and not store
        for answer in [saving.moves(tmp_path / "saved")] if here else answers(launch(n, "moves" + store)):
            assert set(answer) == {f"{a} to {b}" for a in seen for b in kinds(n)}
            for case, got in answer.items():
                assert got == [2, True, True, {"position": 7}], case
        seen += [f"{n} {kind}" for kind in kinds(n) if f"{n} {kind}" not in seen]


def kinds(n):
    return ["replicated", "spread", *(["mixed"] if n > 2 else [])]


@pytest.mark.medium
def test_what_is_each_ones_own_and_what_one_does_wrong(launch, tmp_path, monkeypatch):
    started = launch(2, "shares")
    zero, one = answers(started, None)
    who = [rf"process {i} \(host \S+, pid {each.process.pid}\)" for i, each in enumerate(started)]
    for i, own in enumerate([zero["own"], one["own"]]):  # a history is that of the first one
        assert own == [{"file": f"part {i}"}, [0, 1, 2], {"rate": [0.0]}, True]
    for each in zero, one:  # half of what is spread over two processes, and both wrote some of it
        read, whole = each["bytes read of the large leaves"]
        assert 2 * read == whole > 0
        assert each["written by"] == ["0.safetensors", "1.safetensors"]
    assert zero["bad history"].startswith("WrongTypeError: value at history['loss']: got object")
    assert re.match(rf"ProcessError: {who[0]}: value at history", one["bad history"])
    assert [zero["data of the first alone"], one["data of the first alone"]] == [{"n": 3}, None]
    assert zero["local"] == one["local"]  # as are all errors that the processes find together
    assert re.search(
        rf"differ at save\(\): state\['w'\]: got float64\[3\] \S+ on {who[1]}, .*must be the same on all", one["local"]
    )
    assert zero["steps"] == one["steps"] and re.search(
        rf"differ at save\(\): step: got 4 on {who[1]}, 3 on process 0", one["steps"]
    )
    assert zero["tree"] == one["tree"] and "state['a']" in one["tree"] and "state['b']" in one["tree"]
    assert zero["older"].startswith("CheckpointError: step at save(): got 1, expected ≥ 2, the newest in ")
    assert re.match(rf"CheckpointError: {who[0]}: step at save\(\): got 1", one["older"])

    assert re.search(rf"got {who[1]}: OSError \[Errno 28\] No space left on device, expected a finished", zero["full"])
    assert "SaveError: save of step 3 at" in one["full"] and "got OSError [Errno 28] No space" in one["full"]
    assert zero["left"] == ["2", "tsunax.lock"] and zero["steps there"] == one["steps there"] == [2, 3]
    assert re.match(rf"CheckpointError: {who[1]}: checkpoint of another state at", zero["another rule"])

    for case, what in {
        "another resume": r"restore\(\): resume: got 'never' on {}, 'auto' on process 0",
        "another part": r"restore\(\): partial: got 'w' on {}, 'deep/\*\*' on process 0",
        "other settings": r"Checkpoints\(\): every: got 3 on {0}, 2",
    }.items():
        assert zero[case] == one[case] and re.search(what.format(who[1]), one[case]), zero[case]
    for i, call in enumerate(["save", "restore"]):
        text = (
            f"StateError: population at {call}(): got members of several processes, expected of one. "
            "Let each process have members of its own, and save them with tsunax.exchange."
        )
        assert zero["members"][i] == text and one["members"][i].endswith(text.removeprefix("StateError"))
    assert zero["given away"] and one["given away"]
    for each in zero, one:
        read, whole, right = each["a transposed part"]
        assert 2 * read == whole and right

    assert zero["damaged"][:2] == one["damaged"][:2] == [2, True]  # both go back, though one alone read the damage
    for each in zero, one:  # neither read all of that leaf, and both know
        assert re.search(r"step 3: state\.\S+\['v'\]: other bytes than were saved \(hash\)", each["damaged"][2][0])

    assert zero["two at once"] == one["two at once"] == ["", "", "", "", [2], [2]]
    assert re.match(rf"CheckpointError: {who[1]}: path at .*: got another directory, expected that", zero["elsewhere"])
    assert re.search(rf"step 3 at .*: got part of step 3: got no word of {who[1]}, expected all", zero["hangs"])
    alone = ts.Checkpoints(tmp_path / "saved" / "run", read_only=True)
    with pytest.raises(CheckpointError) as refused:
        alone.restore(saving.blank(), step=2)
    assert str(refused.value) == (
        f"positions of the data at {alone.path}: got one of each of 2 processes, expected 1. Go on with "
        "as many; or restore(like, params_only=True), and start the data anew."
    )
    assert alone.restore(saving.blank().params, step=2, params_only=True).step == 2
    assert "got nothing after 3 s" in one["hangs"] and zero["after"] < 10 > one["after"]


@pytest.mark.slow
def test_a_save_that_fails_late_on_one_process_deletes_no_older_one(launch):
    for text, *restored in answers(launch(2, "fails_late")):
        assert "other bytes than were saved" in text and restored == [[2], 2, True]


@pytest.mark.slow
@pytest.mark.parametrize("counts", [(2, 1, 2), (1, 4, 2)])
def test_a_run_goes_on_with_other_processes(launch, tmp_path, counts):
    """In the middle of an epoch of four batches, the last one short: no row is left out or read twice."""
    answered = [answers(launch(n, "continues")) for n in counts]
    assert all(one == all_[0] for all_ in answered for one in all_)
    for _ in counts:
        expected = saving.continues(tmp_path / "alone", ts.mesh(devices=jax.devices()[:1]))
    assert len(expected) == 15
    np.testing.assert_allclose(answered[-1][0], expected, rtol=2e-5)


@pytest.mark.slow
def test_one_run_a_directory(launch, tmp_path):
    """A second one is refused on all of its processes, and the first one does not notice."""
    first = launch(2, "holds")
    ready(first)
    refused = answers(launch(2, "holds"))
    pid = first[0].process.pid
    for text in refused:
        assert f"directory in use at {tmp_path / 'saved' / 'run'}: got process {pid}, since" in text
    (tmp_path / "saved" / "enough").touch()
    assert answers(first) == ["", ""]


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["--kills", "2", "--seeds", "0:2"], ["--signals", "--seeds", "0:3"]])
def test_hurt_runs_end_with_the_same_bits(tmp_path, monkeypatch, arguments):
    results = tmp_path / "counts.jsonl"
    monkeypatch.setattr(sys, "argv", ["fleets", *arguments, "--results", str(results)])
    assert fleets.main() == 0
    counts = json.loads(results.read_text())["counts"]
    assert counts["same bits"] == counts["runs"] and counts.get("kills", 0) + counts.get("signals", 0) > 0
