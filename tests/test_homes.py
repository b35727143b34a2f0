"""Checkpoints in all homes: safetensors files on a disk and in buckets (emulators on the loopback), orbax on a disk."""

import concurrent.futures
import contextlib
import importlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tsunax as ts
from jax.sharding import NamedSharding, PartitionSpec
from tests import toys
from tests.helpers import assert_trees_equal, error_of, need
from tests.test_checkpoint import LEAVES, make, updated
from tests.test_saving import answers, kinds, launch  # noqa: F401, a fixture
from tsunax._core import trees
from tsunax.checkpoints import _background, _bucket, _bucket_home, _orbax, _orbax_home, _safetensors, leaves
from tsunax.checkpoints.manifest import Manifest
from tsunax.checkpoints.saving import Checkpoints
from tsunax.checkpoints.state_facts import facts_of
from tsunax.errors import CheckpointError, HyperparameterError, MissingLibraryError, SaveError
from tsunax.run import control, mailboxes
from tsunax.timelines import command_line
from tsunax.timelines.command_line import ask

ORBAX, S3, GS = (pytest.param(name, marks=pytest.mark.medium) for name in ("orbax", "s3", "gs"))
HOMES, ON_A_DISK, BUCKETS = ["files", ORBAX, S3, GS], ["files", ORBAX], ("s3", "gs")


@contextlib.contextmanager
def served(program: str):
    """The environment of the clients of an emulator, as long as it serves."""
    command = [sys.executable, "-m", f"tests.programs.{program}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        with pytest.MonkeyPatch.context() as patch:
            module = importlib.import_module(f"tests.programs.{program}")
            for name, value in module.address(int(server.stdout.readline())).items():
                patch.setenv(name, value)
            yield
        server.kill()


@pytest.fixture(scope="module")
def s3():
    """The address of an empty bucket."""
    need("obstore")
    need("moto.server")
    with served("s3_bucket"):
        yield "s3://bucket"


@pytest.fixture(scope="module")
def gs():
    need("obstore")
    with served("gs_bucket"):
        yield "gs://bucket"


@pytest.fixture
def place(request, tmp_path):
    """A function: the arguments of `Checkpoints` for a directory of this name, in a home."""

    def of(home, name="run"):
        if home in BUCKETS:
            folder = re.sub(r"\W", "-", request.node.name)
            return {"path": f"{request.getfixturevalue(home)}/{folder}/{name}", "timeout": 60.0}
        return {"path": tmp_path / name, "store": home, "timeout": 60.0}

    return of


def run_of(given, states, **about) -> None:
    with Checkpoints(**given, **about) as checkpoints:
        for n, state in enumerate(states):
            checkpoints.save(state, data={"epoch": n}, history={"loss": np.arange(n + 1.0)}, metrics={"loss": n})


def three():
    states = [make()]
    for _ in range(2):
        states.append(updated(states[-1]))
    return states


def everything_in(given) -> list[str]:
    """The names of a run's directory."""
    path = Checkpoints(**given, read_only=True).path
    if isinstance(path, Path):
        return sorted(os.listdir(path))
    return sorted({key.partition("/")[0] for key in path.keys()})  # noqa: SIM118


@pytest.mark.parametrize("home", ["files", "orbax", S3, GS])
def test_every_kind_of_leaf_comes_back_with_its_bits_and_type(place, home):
    given = place(home)
    odd = {"u4": jnp.array([[1, 7]], jnp.uint4), "minus zeros": np.full((3, 2), -0.0), "zeros": np.zeros((2, 2))}
    leaves = LEAVES | odd | {"deep": {"a.b": {"c": np.ones(3)}, "a": {"b.c": np.zeros(2)}}}
    values = {"data": {"epoch": 3, "order": np.arange(5)}, "history": {"loss": np.array([1.5, np.nan])}}
    with Checkpoints(**given) as checkpoints:
        checkpoints.save(leaves, step=3, **values)
        found = checkpoints.restore(leaves)
    assert found.step == 3
    assert_trees_equal(found.state, leaves)
    assert_trees_equal({"data": found.data, "history": found.history}, values)


@pytest.mark.parametrize("home", ["files", "orbax"])
def test_a_whole_training_state_goes_on_to_the_last_bit(place, home):
    state = updated(make(params=None, ema=0.9, key=3))
    run_of(place(home), [state])
    found = Checkpoints(**place(home), read_only=True).restore(make(ema=0.9, key=0)).state
    assert_trees_equal(found, state)
    assert_trees_equal(updated(found), updated(state))


@pytest.mark.parametrize("there", [1, 4, 8])
@pytest.mark.parametrize("here", [1, 8])
def test_orbax_moves_between_topologies(place, here, there):
    """Sharded arrays are stored whole; the same bits come back under another sharding."""
    tree = {"w": jnp.arange(64.0).reshape(8, 8), "b": jnp.arange(8.0)}

    def spread(n):
        sharding = NamedSharding(jax.make_mesh((n,), ("x",), devices=jax.devices()[:n]), PartitionSpec("x"))
        return jax.tree.map(lambda x: jax.device_put(x, sharding), tree)

    with Checkpoints(**place("orbax")) as checkpoints:
        checkpoints.save(spread(here), step=1)
        found = checkpoints.restore(spread(there)).state
    assert_trees_equal(found, spread(there))
    assert found["w"].sharding == spread(there)["w"].sharding


def test_orbax_itself_loads_a_checkpoint(place):
    ocp = need("orbax.checkpoint").v1
    state, given = three()[-1], place("orbax")
    run_of(given, [state])
    found = ocp.load(f"{given['path']}/2")
    assert_trees_equal(found["params"], jax.tree.map(np.asarray, state.params))
    one = ocp.load_checkpointables(f"{given['path']}/2", {"state": None})
    assert_trees_equal(one["state"], found)
    named = {"/".join(name): x for name, _, x in trees.leaves_with_names(found)}
    assert_trees_equal(ts.exchange.restore(f"{given['path']}/2", format="orbax"), named)


@pytest.mark.medium
def test_exchange_reads_what_orbax_has_in_a_bucket():
    need("gcp_storage_emulator")
    with served("bucket"):
        need("gcsfs")  # reads the environment when it is imported
        params = {"a": {"w": np.arange(6.0).reshape(2, 3)}}
        need("orbax.checkpoint").v1.save("gs://bucket/2", params)
        found = ts.exchange.restore("gs://bucket/2", format="orbax")
    assert_trees_equal(found, {"a/w": params["a"]["w"]})


@pytest.mark.parametrize("home", HOMES)
def test_a_damaged_newest_is_skipped_and_written_again(place, home):
    states, given = three(), place(home)
    run_of(given, states, keep_last=None)
    path = Checkpoints(**given, read_only=True).path
    if home in BUCKETS:
        files = [path / key for key in path.keys("2/") if "arrays" in key]
    else:
        files = (path / "2" / ("arrays" if home == "files" else "state/d")).iterdir()
    for file in files:
        content = bytearray(file.read(10**6)[0] if home in BUCKETS else file.read_bytes())
        content[-5] ^= 1
        (file.write if home in BUCKETS else file.write_bytes)(bytes(content))
    with Checkpoints(**given, keep_last=None) as checkpoints:
        with pytest.warns(UserWarning, match="step 2"):
            found = checkpoints.restore(make())
        assert (found.step, found.data) == (1, {"epoch": 1})
        assert_trees_equal(found.state, states[1])
        checkpoints.save(updated(found.state), data={"epoch": 5})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of files: the damaged one was moved
            checkpoints.wait()
    found = Checkpoints(**given, read_only=True).restore(make())
    assert (found.step, found.data) == (2, {"epoch": 5})
    assert_trees_equal(found.state, states[2])


@pytest.mark.parametrize("home", HOMES)
def test_what_is_kept_and_that_a_step_can_be_replaced(place, home):
    states, given = three(), place(home)
    with Checkpoints(**given, keep_last=2) as checkpoints:
        for state in states:
            checkpoints.save(state)
        checkpoints.save(states[-1], data={"again": 1})
        checkpoints.wait()
        assert checkpoints.steps() == [1, 2]
        assert checkpoints.restore(make()).data == {"again": 1}
        assert error_of(lambda: checkpoints.save(states[0])).startswith("step at save(): got 0, expected ≥ 2")
    assert everything_in(given) == ["1", "2.1" if home == "orbax" else "2", "tsunax.lock"]


@pytest.mark.parametrize("home", HOMES)
def test_another_state_is_refused_before_an_array_is_read(place, home, monkeypatch):
    given = place(home)
    run_of(given, three()[:1])
    checkpoints = Checkpoints(**given, read_only=True)
    monkeypatch.setattr(type(checkpoints.home), "read", None)
    text = error_of(lambda: checkpoints.restore(make(rule=ts.rules.sgd(0.1))))
    assert text.startswith(f"checkpoint of another state at {checkpoints.path}")


def test_logs_of_others_are_heard_beside_orbax(caplog):
    from absl import logging

    with _orbax.quiet(), caplog.at_level("INFO", "absl"):
        logging.info("my step 3")
    assert [record.getMessage() for record in caplog.records] == ["my step 3"]


def test_what_is_not_ours_is_never_deleted(place):
    """orbax's own checkpoints under the same steps, and a directory that is somebody's."""
    ocp, given = need("orbax.checkpoint").v1, place("orbax")
    given["path"].mkdir()
    for step in (1, 2):
        ocp.save_checkpointables(given["path"] / str(step), {"state": {"a": np.arange(3.0)}})
    (given["path"] / "3").mkdir()
    with Checkpoints(**given, keep_last=1) as checkpoints:
        for step in (1, 2, 3, 4):
            checkpoints.save(make(), step=step)
        checkpoints.wait()
        assert checkpoints.steps() == [4]
    assert sorted(os.listdir(given["path"])) == ["1", "2", "3", "4", "tsunax.lock"]
    assert ocp.load_checkpointables(given["path"] / "2")["state"]["a"].shape == (3,)


@pytest.mark.medium
def test_what_a_killed_run_left_is_no_checkpoint_and_goes(place):
    states, given = three(), place("orbax")
    run_of(given, states[:2])
    path = Checkpoints(**given, read_only=True).path
    (path / "1.unfinished").write_bytes(b"")  # killed before it went, or while 1 was deleted
    (path / "7.unfinished").write_bytes(b"")  # killed before orbax made the directory
    with Checkpoints(**given, read_only=True) as reader:
        assert reader.steps() == [0] and reader.restore(make()).step == 0
    with Checkpoints(**given) as checkpoints:
        assert checkpoints.restore(make()).step == 0
        assert {entry.name for entry in path.iterdir()} == {"0", "tsunax.lock"}
        checkpoints.save(states[1])
    assert Checkpoints(**given, read_only=True).steps() == [0, 1]


@pytest.mark.parametrize("home", HOMES[1:])
def test_nothing_appears_when_a_part_fails(place, home, monkeypatch):
    states, given = three(), place(home)
    kind = _bucket_home.BucketHome if home in BUCKETS else _orbax_home.OrbaxHome
    run_of(given, states[:1])
    checkpoints = Checkpoints(**given)

    def fails(*_):
        raise OSError(28, "No space left on device")

    for name in ("put_manifest", "write_blocks", "commit"):
        with monkeypatch.context() as patch:
            patch.setattr(kind, name, fails)
            checkpoints.save(states[1])
            text = error_of(checkpoints.wait, SaveError)
            assert text.startswith(f"save of step 1 at {checkpoints.path}/1: got OSError [Errno 28] No space left")
        assert checkpoints.steps() == [0]
    checkpoints.save(states[1], data={"n": 1})
    checkpoints.close()
    assert Checkpoints(**given, read_only=True).restore(make()).data == {"n": 1}


@pytest.mark.medium
def test_an_old_one_goes_only_when_the_newer_reads_back(place, monkeypatch):
    states, given = three(), place("orbax")
    prove = _orbax_home.OrbaxHome._prove

    def damaged(self, folder, save):
        save.hashes = {name: value ^ 1 for name, value in save.hashes.items()}
        prove(self, folder, save)

    checkpoints = Checkpoints(**given, keep_last=1)
    checkpoints.save(states[0])
    checkpoints.wait()
    with monkeypatch.context() as patch:
        patch.setattr(_orbax_home.OrbaxHome, "_prove", damaged)
        checkpoints.save(states[1])
        assert "other bytes than were saved" in error_of(checkpoints.wait, SaveError)
    assert checkpoints.steps() == [0] and checkpoints.restore(make()).step == 0
    checkpoints.close()


def program(path, store) -> str:
    return f"""
import sys, time, numpy as np, tsunax as ts
from tests.test_checkpoint import make, updated
state = make()
checkpoints = ts.Checkpoints({str(path)!r}, store={store!r})
found = checkpoints.restore(state)
state = found.state
for _ in range(200):
    print(int(state.step), flush=True)
    checkpoints.save(state, data={{"step": int(state.step)}})
    state = updated(state)
"""


@pytest.mark.parametrize("home", HOMES[1:])
def test_a_run_that_is_killed_while_it_saves_goes_on(place, home):
    given, at = place(home), -1
    states = [make()]
    for kill in range(4):
        command = [sys.executable, "-c", program(given["path"], "orbax" if home == "orbax" else "files")]
        environment = {**os.environ, "PYTHONPATH": os.getcwd(), "PYTHONWARNINGS": "ignore"}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as run:
            steps = [int(run.stdout.readline()) for _ in range(3 + kill)]
            run.kill()
        assert steps[0] >= at
        at = max(steps[0], steps[-1] - 2)  # one may be under way, and the one before it waits
        with Checkpoints(**given, read_only=True) as reader:
            found = reader.restore(make())
        while len(states) <= found.step:
            states.append(updated(states[-1]))
        assert found.step >= at and found.data == {"step": found.step}
        assert_trees_equal(found.state, states[found.step])


def strange(name):
    """A directory of a run that lost its only checkpoint in some way, and what the error names."""

    def change(path, step):
        if name == "link":
            os.rename(step, path.parent / "elsewhere")
            step.symlink_to(path.parent / "elsewhere")
        elif name == "too high":
            (path / "inner").mkdir()
            os.rename(step, path / "inner" / step.name)
            return path, "inner"
        elif name in ("model.pt", "4"):
            shutil.rmtree(step)
            (path / name).write_text("x")
        elif name == "empty":
            shutil.rmtree(step)
            (path / "step_2").mkdir()
            return path, "step_2"
        else:
            os.rename(step, path / name)
        return path, step.name if name == "link" else name

    return change


@pytest.mark.parametrize("store", ON_A_DISK)
@pytest.mark.parametrize("name", ["link", "too high", "model.pt", "4", "empty", "step_2", "002", "2.bak"])
def test_a_directory_without_a_good_checkpoint_is_no_fresh_start(tmp_path, store, name):
    path = tmp_path / "run"
    with Checkpoints(path, store=store) as checkpoints:
        checkpoints.save(make().replace(step=2))
    path, shown = strange(name)(path, path / "2")
    for given in ({}, {"read_only": True}):
        with Checkpoints(path, **given) as checkpoints, pytest.raises(CheckpointError, match=re.escape(shown)):
            checkpoints.restore(make())
        with Checkpoints(path, **given) as checkpoints:
            assert checkpoints.restore(make(), resume="never").step is None


@pytest.mark.parametrize("store", ON_A_DISK)
def test_the_path_of_one_checkpoint_is_refused_and_stays_as_it_is(tmp_path, store):
    with Checkpoints(tmp_path, store=store) as checkpoints:
        checkpoints.save(make().replace(step=2))
    before = sorted(tmp_path.rglob("*"))
    for path in (tmp_path / "2", *(x for x in (tmp_path / "2").iterdir() if x.is_dir())):
        with pytest.raises(
            CheckpointError, match=r"got a part of one checkpoint, expected the directory that has the steps"
        ):
            Checkpoints(path)
        with pytest.raises(CheckpointError, match="Give the directory that has the steps in it"):
            Checkpoints(path, read_only=True).restore(make())
    assert sorted(tmp_path.rglob("*")) == before  # a lock file in it would keep it for ever


@pytest.mark.parametrize("store", ON_A_DISK)
def test_what_a_run_leaves_before_its_first_checkpoint_lets_it_start_again(tmp_path, store):
    for name in (
        ".hidden",
        "log.csv",
        "log.jsonl",
        "log.csv.new",
        "train.log",
        "events.out.tfevents.1.host",
        "tsunax.lock",
    ):
        (tmp_path / name).write_text("x")
    for name in (".tsunax-tmp-3-0123abcd", "3"):
        (tmp_path / name).mkdir()
    (tmp_path / "3.unfinished").write_text("x")
    for name in ("config.json", "README.md", "tb/events.out.tfevents.1.host", "logs/rows.csv", "wandb/latest"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    if store == "files":
        os.rmdir(tmp_path / "3")
    for given in ({"read_only": True}, {}):
        with Checkpoints(tmp_path, store=store, **given) as checkpoints:
            assert checkpoints.restore(make()).step is None


def refusing(folder, refused, delete=shutil.rmtree):
    """A `shutil.rmtree` that deletes nothing in the folder."""

    def refuse(path, *more, **given):
        if folder not in Path(path).parents:
            return delete(path, *more, **given)
        refused.append(path)
        raise PermissionError(13, "not allowed")

    return refuse


@pytest.mark.parametrize("replaces", [False, True])
@pytest.mark.parametrize("store", ON_A_DISK)
def test_a_step_that_cannot_be_deleted_is_no_failed_save(tmp_path, monkeypatch, store, replaces):
    """A warning, and later saves try again, also those of the next run."""
    state, refused = make(), []
    with Checkpoints(tmp_path, store=store, keep_last=1) as checkpoints:
        save = lambda step: checkpoints.save(state.replace(step=step))
        save(1)
        checkpoints.wait()
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "rmtree", refusing(tmp_path, refused))
            save(step := 1 if replaces else 2)
            with pytest.warns(UserWarning, match=r"step 1 in .* could not be deleted: PermissionError"):
                checkpoints.wait()
        assert refused and checkpoints.restore(state).step == step
        save(3)
        checkpoints.wait()
        assert checkpoints.steps() == [3]
    with Checkpoints(tmp_path, keep_last=1) as checkpoints:
        save(4)
    assert sorted(os.listdir(tmp_path)) == ["4", "tsunax.lock"]


@pytest.mark.parametrize("store", ON_A_DISK)
def test_what_cannot_be_tidied_up_keeps_no_run_from_starting(tmp_path, monkeypatch, store):
    with Checkpoints(tmp_path, store=store) as checkpoints:
        checkpoints.save(make().replace(step=2))
    if store == "files":
        shutil.copytree(tmp_path / "2", tmp_path / ".tsunax-old-2-0123abcd")
    else:
        (tmp_path / "3").mkdir()
        (tmp_path / "3.unfinished").write_text("x")

    monkeypatch.setattr(shutil, "rmtree", refusing(tmp_path, []))
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.restore(make()).step == 2
        checkpoints.save(make().replace(step=4))
        with pytest.warns(UserWarning, match=r"could not be deleted: PermissionError"):
            checkpoints.wait()


def test_the_home_that_is_there_is_found_and_another_refused(tmp_path):
    run_of({"path": tmp_path / "orbax", "store": "orbax"}, [make()])
    run_of({"path": tmp_path / "files"}, [make()])
    assert Checkpoints(tmp_path / "orbax", read_only=True).restore(make()).step == 0
    for one, other in ("orbax", "files"), ("files", "orbax"):
        assert error_of(lambda one=one, other=other: Checkpoints(tmp_path / one, store=other)) == (
            f"store at Checkpoints(): got '{other}' in {tmp_path / one}, expected '{one}', "
            "as what is there. Or give another path."
        )
    assert "got 'zarr' (str), expected 'files' or 'orbax'" in error_of(
        lambda: Checkpoints(tmp_path, store="zarr"), HyperparameterError
    )


def test_addresses_that_are_no_directory(tmp_path, monkeypatch):
    """No local folder is made that is called "gs:"."""
    monkeypatch.chdir(tmp_path)
    works = "Checkpoints and fit(checkpoint=) save to s3:// and gs://; mount other buckets"
    asked = [
        lambda: Checkpoints("az://bucket/run"),
        lambda: Checkpoints("https://host/run"),
        lambda: Checkpoints(Path("gs://bucket/run")),  # a Path loses a slash
        lambda: ts.exchange.save("gs://bucket/a.safetensors", {"w": np.ones(2)}),
        lambda: ts.loggers.csv("gs://bucket/a.csv"),
        lambda: ts.tune(lambda x: 0.0, {"x": ts.tuning.spaces.uniform(0, 1)}, trials=1, directory="gs://bucket/sweep"),
    ]
    for f in asked:
        assert works in error_of(f, CheckpointError)
    assert "got 'orbax' in a bucket, expected 'files', or none" in error_of(
        lambda: Checkpoints("gs://bucket/run", store="orbax")
    )
    for name in ("obstore", "obstore.store"):
        monkeypatch.setitem(sys.modules, name, None)
    for address, extra in ("gs://bucket/run", "gcs"), ("s3://bucket/run", "s3"):
        error = error_of(lambda address=address: Checkpoints(address), MissingLibraryError)
        assert re.search(rf"expected obstore. pip install .+ \(the extra '{extra}' of tsunax\)$", error)
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("home", [S3, GS])
def test_fit_goes_on_in_a_bucket(place, home):
    data = [{"x": np.full((4, 3), i, np.float32)} for i in range(6)]
    step = ts.train_step(lambda params, batch: jnp.mean((batch["x"] @ params["w"] - 1) ** 2))
    state = lambda: ts.setup(ts.rules.adam(0.1), {"w": jnp.zeros((3, 2))})
    path = place(home)["path"]
    whole, _ = ts.fit(step, state(), data, epochs=2, progress=False)
    ts.fit(step, state(), data, epochs=1, checkpoint=path, progress=False)
    found, _ = ts.fit(step, state(), data, epochs=2, checkpoint=path, progress=False)
    assert_trees_equal(found, whole)


def test_shutil_copies_are_checkpoints_too(tmp_path):
    run_of({"path": tmp_path / "run", "store": "orbax"}, three())
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    assert Checkpoints(tmp_path / "copy", read_only=True).restore(make()).step == 2


# ------------------------------------------------------------------------------------------------------------ buckets


class Network:
    """The requests to a bucket, in order. Some fail; all from some number on, as those of a process that was killed."""

    def __init__(self, store):
        self.store, self.requests, self.failing = store, [], range(0)

    def __getattr__(self, name):
        def request(*given, **options):
            self.requests.append((name, given, options))
            if len(self.requests) in self.failing:
                raise ConnectionError("no route")
            return getattr(self.store, name)(*given, **options)

        return request

    def fails_after(self, count: int, requests: int = 10**9) -> None:
        start = len(self.requests) + count + 1
        self.failing = range(start, start + requests)


@pytest.fixture
def memory(monkeypatch):
    """A bucket in this process, at all addresses."""
    network = Network(need("obstore.store").MemoryStore())
    of = lambda address, timeout: _bucket.BucketPath(address, network)
    monkeypatch.setattr(_bucket.BucketPath, "of", staticmethod(of))
    yield network
    network.fails_after(0, 0)
    _background._LOCKED_DIRECTORIES.clear()


IN_MEMORY = {"path": "s3://bucket/run", "timeout": 60.0}


class StopsAtMissing(dict):
    """A store whose request for many keys ends at the first that is missing, as obstore's for Google does at times."""

    def delete(self, keys):
        for key in [keys] if isinstance(keys, str) else keys:
            if key not in self:
                raise FileNotFoundError(key)
            del self[key]


def test_a_missing_object_keeps_no_other_from_being_deleted():
    store = StopsAtMissing({"4/a": b"", "4/c": b"", "5/a": b""})
    (_bucket.BucketPath("gs://bucket/run", store) / "4").unlink("missing", "a", "b", "c")
    assert store.keys() == {"5/a"}
    (_bucket.BucketPath("gs://bucket/run", store) / "6").unlink()


def test_a_save_lists_nothing_and_the_path_is_the_address(memory):
    with Checkpoints(**IN_MEMORY, keep_last=1) as checkpoints:
        assert [str(checkpoints.path), str(checkpoints.path / "4")] == ["s3://bucket/run", "s3://bucket/run/4"]
        del memory.requests[:]
        for state in three():
            checkpoints.save(state)
        checkpoints.save(state, data="again")
        checkpoints.wait()
        assert "list" not in {name for name, _, _ in memory.requests}
        assert len(memory.requests) <= 4 * 10
        assert len(checkpoints.path.keys()) == 4
    assert everything_in(IN_MEMORY) == ["2", "tsunax.lock"]


@pytest.mark.parametrize("replaces", [False, True])
def test_a_step_in_a_bucket_is_whole_or_absent_after_every_request(memory, replaces):
    old, new = three()[:2]
    new = old if replaces else new
    outcomes = set()
    for count in range(100):
        memory.store.delete([x["path"] for page in memory.store.list() for x in page])
        run_of(IN_MEMORY, [old])
        checkpoints = Checkpoints(**IN_MEMORY, keep_last=1)
        memory.fails_after(count)
        with warnings.catch_warnings(), contextlib.suppress(SaveError):
            warnings.simplefilter("ignore")  # of what could not be deleted
            checkpoints.save(new, data={"epoch": "new"})
            checkpoints.close()
        is_dead = len(memory.requests) >= memory.failing.start - 1
        memory.fails_after(0, 0)
        for given in ({"read_only": True}, {}):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore" if is_dead and not given else "error")  # of the lock
                with Checkpoints(**IN_MEMORY, **given) as reader:
                    found = reader.restore(make())
            assert_trees_equal(found.state, new if found.data == {"epoch": "new"} else old)
            outcomes.add(found.data["epoch"])
        if not is_dead:
            break
    assert outcomes == {0, "new"} and 6 < count < 20
    assert everything_in(IN_MEMORY) == [str(found.step), "tsunax.lock"]


def test_a_run_that_died_in_its_first_save_to_a_bucket_starts_again(memory):
    checkpoints = Checkpoints(**IN_MEMORY)
    memory.fails_after(2)
    checkpoints.save(make())
    assert "ConnectionError no route" in error_of(checkpoints.close, SaveError)
    memory.fails_after(0, 0)
    assert everything_in(IN_MEMORY) == ["0", "tsunax.lock"]
    assert Checkpoints(**IN_MEMORY, read_only=True).restore(make()).step is None
    with pytest.warns(UserWarning, match='was in use, by {"pid":'), Checkpoints(**IN_MEMORY) as checkpoints:
        assert checkpoints.restore(make()).step is None
        assert everything_in(IN_MEMORY) == ["tsunax.lock"]
    memory.store.put("logs/rows.csv", b"x")
    assert Checkpoints(**IN_MEMORY, read_only=True).restore(make()).step is None
    memory.store.put("4/state/x", b"x")
    with pytest.raises(CheckpointError, match="got '4', expected at least one step"):
        Checkpoints(**IN_MEMORY, read_only=True).restore(make())


def test_a_manifest_whose_answer_was_lost_does_not_replace_the_next_save(memory, monkeypatch):
    """The failed save cannot be deleted either, and its random name would be the later one."""
    falling = itertools.count(0xFFFFFFFF, -1)
    monkeypatch.setattr(_bucket_home.secrets, "token_hex", lambda n: f"{next(falling):08x}"[: 2 * n])
    write = _bucket.BucketPath.write

    def lose_answer(path, *given):
        write(path, *given)
        if path.key.endswith("manifest.json"):
            memory.fails_after(0)
            raise ConnectionError("no answer")

    with Checkpoints(**IN_MEMORY) as checkpoints:
        monkeypatch.setattr(checkpoints.home, "write_file", lose_answer)
        checkpoints.save(make(), data="lost")
        assert "no answer" in error_of(checkpoints.wait, SaveError)
        memory.fails_after(0, 0)
        monkeypatch.setattr(checkpoints.home, "write_file", write)
        checkpoints.save(make(), data="saved")
        checkpoints.wait()
        assert checkpoints.restore(make()).data == "saved"
        names = {x["path"].split("/")[1] for page in memory.store.list("0/") for x in page}
        assert len(names) == 1  # no arrays of the failed save stay
    with Checkpoints(**IN_MEMORY) as checkpoints:
        assert checkpoints.restore(make()).data == "saved"
    assert everything_in(IN_MEMORY) == ["0", "tsunax.lock"]


def test_a_network_that_fails_is_no_damage(memory):
    run_of(IN_MEMORY, three()[:2])
    for count in range(100):
        reader = Checkpoints(**IN_MEMORY, read_only=True)
        memory.fails_after(count, requests=1)
        try:
            assert reader.restore(make()).step == 1
            break
        except ConnectionError as error:
            assert "no route" in str(error)
    assert 3 < count < 20


@pytest.mark.parametrize("part", ["0.safetensors", "manifest.json", "manifest.sha256"])
@pytest.mark.parametrize("damage", ["bit", "half", "empty", "other", "absent"])
def test_a_damaged_object_costs_one_checkpoint(memory, part, damage):
    states = three()[:2]
    run_of(IN_MEMORY, states)
    (path,) = [x["path"] for page in memory.store.list("1/") for x in page if x["path"].endswith(part)]
    content = memory.store.get(path).bytes().to_bytes()
    middle = len(content) // 2
    changed = {"bit": content[:-5] + bytes([content[-5] ^ 1]) + content[-4:], "half": content[:middle]}
    memory.store.put(path, {**changed, "empty": b"", "other": b"x" * len(content), "absent": b""}[damage])
    if damage == "absent":
        memory.store.delete(path)
    with warnings.catch_warnings(record=True) as heard, Checkpoints(**IN_MEMORY, read_only=True) as reader:
        warnings.simplefilter("always")
        found = reader.restore(make())
    assert_trees_equal(found.state, states[0])
    is_unfinished = (part, damage) == ("manifest.json", "absent")
    assert ["checkpoint skipped" in str(x.message) for x in heard] == [True] * (not is_unfinished)


@pytest.mark.parametrize("home", [S3, GS])
def test_a_run_in_a_bucket_obeys_commands(place, home, monkeypatch, capsys):
    """Each is sent once the one before has its answer; the run ends by the last."""
    monkeypatch.setattr(mailboxes.BucketMailbox, "look_seconds", 0.0)
    monkeypatch.setattr(mailboxes.BucketMailbox, "seconds_between_questions", 0.01)
    address, step = place(home)["path"], ts.train_step(toys.loss_fn)
    folder = address.rpartition("/")[0]
    commands = [("adjust", {"learning_rate": 0.02}), ("adjust", {"rate": 0.02}), ("status", {}), ("stop", {})]
    answers, senders = [], []

    def send():
        answers.extend(ask(address, verb, values) for verb, values in commands)

    def wait(run):
        if not senders:
            senders.append(threading.Thread(target=send))
            senders[0].start()
        time.sleep(0.005)

    state, history = ts.fit(
        step, toys.state(), ts.batches(toys.X, 8), steps=5_000, checkpoint=address, progress=False,
        callbacks=[ts.callbacks.every(1, wait)],
    )  # fmt: skip
    senders[0].join()
    assert re.fullmatch(r"done at step \d+", answers[0]) and answers[3] == f"done at step {state.step}"
    assert "refused" in answers[1] and json.loads(answers[2])["step"] < state.step < 5_000
    assert [mark[1] for mark in history.marks].count("command") == 2
    assert float(ts.hyperparams(state)["learning_rate"]) == np.float32(0.02)
    bucket = Checkpoints(address, read_only=True).path
    assert bucket.keys("control/") == ["control/answer.json"]
    assert command_line.main(["stop", address]) == 1 and "a run that has ended" in capsys.readouterr().out
    make = lambda: toys.state()
    ts.timeline(address, step, make, ts.batches(toys.X, 8)).branch(state.step, f"{folder}/b", learning_rate=0.1)
    assert command_line.main(["log", folder]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("run ") and lines[2].startswith(f"  b from step {state.step}")


def test_a_command_in_a_bucket_waits_for_one_run(memory):
    """A command to an earlier start is refused, and not twice if its deletion fails."""
    path = Checkpoints(**IN_MEMORY, read_only=True).path
    sender, inbox = mailboxes.mailbox_of(path), control.Inbox(mailboxes.mailbox_of(path))
    name = sender.send(b'{"verb": "stop", "lock": "an earlier start"}')
    assert "another command that waits" in error_of(lambda: sender.send(b"{}"), CheckpointError)
    inbox.mailbox.prepare()
    assert "has ended" in inbox.read(name, "this start")["refused"]
    memory.fails_after(0, 1)  # the deletion
    refuse_all(inbox.mailbox)
    memory.fails_after(0, 1)
    assert sender.take_answer(name) is None  # a network that fails is no answer
    assert sender.take_answer(name) == "refused: the run has ended"
    for garbage in (b"garbage", b"[1]", b"{}", b"x" * (1 << 17)):
        memory.store.put("control/answer.json", garbage)
        assert sender.take_answer(name) is None
    inbox.mailbox.prepare()
    assert inbox.mailbox.names() == [] and path.keys("control/") == ["control/answer.json"]
    assert sender.send(b"repeated") == sender.send(b"repeated")  # as if the first answer was lost
    inbox.mailbox.look()
    refuse_all(inbox.mailbox)
    other = sender.send(b"x" * 5000)
    inbox.mailbox.prepare()
    assert "refused" in inbox.read(inbox.mailbox.names()[0], "this start") and sender.take_answer(other) is None
    memory.fails_after(0, 10)
    inbox.mailbox.prepare()  # a network that fails: no command
    assert inbox.mailbox.names() == []


def refuse_all(mailbox):
    for name in mailbox.names():
        mailbox.answer(name, "refused: the run has ended")
    mailbox.wait()


def test_a_bucket_that_does_not_reply_keeps_no_run_from_its_end(memory, monkeypatch):
    monkeypatch.setattr(mailboxes, "MOST_SECONDS", 0.2)

    def read(limit):
        replied.wait(60)
        raise OSError("the network failed")

    replied, mailbox = threading.Event(), mailboxes.mailbox_of(Checkpoints(**IN_MEMORY, read_only=True).path)
    mailbox.command = SimpleNamespace(read=read)
    start = time.monotonic()
    control.Control(mailbox, "this start", None, False).end(SimpleNamespace(restart=None), None)
    assert 0.2 <= time.monotonic() - start < 5
    replied.set()


@pytest.mark.parametrize("lost", ["deleted", "taken"])
def test_the_earlier_of_two_runs_in_a_bucket_is_refused_at_its_next_save(memory, lost):
    states = three()
    first = Checkpoints(**IN_MEMORY)
    first.save(states[0])
    first.wait()
    _background._LOCKED_DIRECTORIES.clear()  # as in another process
    if lost == "deleted":
        memory.store.delete("tsunax.lock")
        second = Checkpoints(**IN_MEMORY)
    else:
        with pytest.warns(UserWarning, match=r"was in use, by .*\"pid\".*refused at its next save"):
            second = Checkpoints(**IN_MEMORY)
        assert second.run_id == first.run_id
    run_id = second.run_id
    first.save(states[1])
    assert re.search(f"another run has s3://bucket/run now: .*{run_id}", error_of(first.wait, SaveError))
    first.close()
    assert second.steps() == [0]
    second.save(states[1])
    second.close()
    assert everything_in(IN_MEMORY) == ["0", "1", "tsunax.lock"]
    assert json.loads(memory.store.get("tsunax.lock").bytes().to_bytes()) == {"run_id": run_id}


@pytest.mark.parametrize("home", [S3, GS])
def test_of_runs_that_start_at_the_same_moment_one_has_the_bucket(place, home):
    path = Checkpoints(**place(home), read_only=True).path

    def start(_):
        with contextlib.suppress(CheckpointError, FileExistsError):
            return _bucket_home.BucketLock(path, is_first=True)

    def create(_):
        with contextlib.suppress(FileExistsError):
            return (path / "object").write(b"x", "create") is None

    with concurrent.futures.ThreadPoolExecutor(64) as pool, warnings.catch_warnings():  # the filters are all threads'
        warnings.simplefilter("ignore")
        assert sum(filter(None, pool.map(create, range(64)))) == 1
        locks = list(filter(None, pool.map(start, range(64))))
    assert [lock.text for lock in locks].count((path / "tsunax.lock").read(400)[0].decode()) == 1


@pytest.mark.medium
def test_a_state_moves_between_processes_through_a_bucket(launch, gs):  # noqa: F811
    """As on a disk: `test_saving::test_a_state_moves_between_processes`."""
    seen = []
    for n in (1, 2, 1):
        for answer in answers(launch(n, "moves_bucket")):
            assert set(answer) == {f"{a} to {b}" for a in seen for b in kinds(n)}
            for case, got in answer.items():
                assert got == [2, True, True, {"position": 7}], case
        seen += [f"{n} {kind}" for kind in kinds(n) if f"{n} {kind}" not in seen]


@pytest.mark.medium
def test_a_bucket_that_is_not_there(s3):
    text = error_of(lambda: Checkpoints("s3://elsewhere/run"))
    assert text == (
        "path at s3://elsewhere/run: got FileNotFoundError The specified bucket does not exist, "
        "expected a directory that can be written."
    )


def test_an_object_of_arrays_is_safetensors_and_is_read_in_parts(memory, monkeypatch):
    rng = np.random.default_rng(0)
    tree = {f"small{i}": np.full((2,), i, np.int16) for i in range(2000)} | {"w": rng.normal(size=(4000, 1000))}
    with Checkpoints(**IN_MEMORY) as checkpoints:
        checkpoints.save(tree, step=1)  # 32 MB: sent in parts
    (name,) = [x["path"] for page in memory.store.list("1/") for x in page if "arrays" in x["path"]]
    loaded = safetensors.numpy.load(memory.store.get(name).bytes().to_bytes())
    assert_trees_equal({name: loaded[name] for name in tree}, tree)
    monkeypatch.setattr(_bucket, "_HEADS", 1)  # the header is longer than the first request
    del memory.requests[:]
    stored = _bucket.stored_in([_bucket.BucketPath("s3://bucket/run", memory, name)])
    ((_, entry),) = stored["w"]
    np.testing.assert_array_equal(_safetensors.read(entry, ((7, 9), (10, 20))), tree["w"][7:9, 10:20])
    ranges = [options for name, _, options in memory.requests if name == "get_range"]
    assert len(memory.requests) == 3 and sum(x["end"] - x["start"] for x in ranges) < 300_000


@pytest.fixture
def mount(tmp_path):
    """A folder that is a file system of its own, in which no directory can be renamed, as a mounted bucket."""
    need("fuse")
    for name in ("mount", "behind"):
        (tmp_path / name).mkdir()
    command = [sys.executable, "-m", "tests.programs.mount", str(tmp_path / "behind"), str(tmp_path / "mount")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        for _ in range(200):
            if os.path.ismount(tmp_path / "mount") or server.poll() is not None:
                break
            time.sleep(0.05)
        if not os.path.ismount(tmp_path / "mount"):
            server.kill()
            pytest.skip(f"nothing can be mounted here: {server.stderr.read()[-200:]}")
        yield tmp_path / "mount"
        subprocess.run(["fusermount", "-u", "-z", str(tmp_path / "mount")])
        server.kill()


def test_a_mounted_bucket(mount):
    files = Checkpoints(mount / "files")
    files.save(make())
    assert "a directory could not be renamed: store='orbax' renames none" in error_of(files.wait, SaveError)
    with Checkpoints(mount / "orbax", store="orbax", keep_last=1) as checkpoints:
        for state in three():
            checkpoints.save(state)
        checkpoints.save(state, data="again")
    found = Checkpoints(mount / "orbax", read_only=True).restore(make())
    assert (found.step, found.data) == (2, "again")


@pytest.mark.parametrize("store", ["files", "orbax"])
def test_orbax_renames_no_directory(tmp_path, monkeypatch, store):
    """As on a bucket that is mounted by gcsfuse."""

    def of(rename):
        def checked(source, target, **how):
            if os.path.isdir(source):
                raise OSError(5, "Input/output error")
            return rename(source, target, **how)

        return checked

    for name in ("rename", "replace", "renames"):
        monkeypatch.setattr(os, name, of(getattr(os, name)))
    checkpoints = Checkpoints(tmp_path, store=store, keep_last=1)
    for state in three():
        checkpoints.save(state)
        if store == "files":
            assert "Input/output error" in error_of(checkpoints.wait, SaveError)
            return
    checkpoints.save(state, data="again")
    checkpoints.close()
    found = Checkpoints(tmp_path, read_only=True).restore(make())
    assert (found.step, found.data) == (2, "again")


@pytest.mark.slow
@pytest.mark.parametrize("store", ["files", "orbax"])
def test_900_leaves_over_256_devices(tmp_path, store):
    command = [sys.executable, "-m", "tests.programs.shards", str(tmp_path / "run"), store]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    print(ended.stdout)


def test_the_manifest_of_seven_billion_parameters_takes_no_second():
    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    layer = {f"matrix{i}": array(4096, 4096) for i in range(4)}
    layer |= {f"wide{i}": array(4096, 11008) for i in range(3)} | {"norm0": array(4096), "norm1": array(4096)}
    params = {"embed": array(32000, 4096), "layers": [layer] * 32, "head": array(4096, 32000)}
    state = jax.eval_shape(lambda params: ts.setup(ts.rules.adamw(1e-4), params), params)
    assert sum(x.size for x in jax.tree.leaves(state.params)) > 6.5e9
    start = time.thread_time()
    tree = leaves.tree_of(state)
    found = [leaves.leaf_of(path, x, name) for (path, x), name in zip(tree.leaves, tree.names, strict=True)]
    written = Manifest(0, found, {path: facts_of(x) for path, x in tree.states.items()}).dump()
    assert Manifest.parse(written).leaves == found
    assert time.thread_time() - start < 1


@pytest.mark.medium
@pytest.mark.parametrize("home", ["files", "orbax"])
def test_links_out_of_a_checkpoint_are_refused(place, tmp_path, home):
    given, (first, second, _) = place(home), three()
    run_of(given, [first, second])
    reader = lambda: Checkpoints(**given, read_only=True).restore(make())
    assert_trees_equal(reader().state, second)
    folder = Path(given["path"], "1")
    inside = sorted(folder.rglob("*"))  # files and directories, and each of them as a link
    assert len(inside) > 3
    for path in [folder, *inside]:
        shutil.move(path, tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = reader()
        assert found.step == 0, path
        assert_trees_equal(found.state, first)
        assert path == folder or "step 1" in str(said[0].message), path
        path.unlink()
        shutil.move(tmp_path / "elsewhere", path)
    assert_trees_equal(reader().state, second)


def test_numbers_that_do_not_fit_are_no_damage(tmp_path):
    """Arrays are placed while others are read: an error there skips no checkpoint."""
    with Checkpoints(tmp_path, store="orbax") as checkpoints:
        checkpoints.save({"x": jnp.array([1, 2], jnp.int32)}, step=1)
        checkpoints.save({"x": jnp.array([1000, 2], jnp.int32)}, step=2)
    reader = Checkpoints(tmp_path, store="orbax", read_only=True)
    with pytest.raises(CheckpointError, match="1 of 2 numbers that int8 cannot hold"):
        reader.restore({"x": jnp.zeros(2, jnp.int8)}, cast=True)
