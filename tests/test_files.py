"""Paths and locks: what is expanded and refused wherever a path is given, and who may write into a directory."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import tsunax as ts
from tests.helpers import need
from tsunax._core import durable_files
from tsunax.checkpoints import exchange
from tsunax.errors import CheckpointError, MissingLibraryError
from tsunax.run import loggers

STEP = ts.train_step(lambda params, x: jnp.mean((x @ params["w"]) ** 2))
DATA = [np.ones((4, 2), np.float32)] * 4


def make():
    return ts.setup(ts.rules.sgd(0.1), {"w": jnp.zeros(2)})


def fit(steps=1, **given):
    return ts.fit(STEP, make(), DATA, steps=steps, progress=False, **given)


def tune(path):
    ts.tune(lambda x: x, {"x": ts.tuning.spaces.uniform(0, 1)}, trials=1, directory=path)


def exported(path):
    exchange.save(f"{path}.safetensors", {"w": np.ones(2)})


USES = {
    "Checkpoints": ts.Checkpoints,
    "fit(checkpoint=)": lambda path: fit(checkpoint=path),
    "save": exported,
    "restore": lambda path: exchange.restore(path, {"w": np.ones(2)}),
    "restore flax": lambda path: exchange.restore(path, format="flax"),
    "restore orbax": lambda path: exchange.restore(path, format="orbax"),
    "contents": exchange.contents,
    "csv": lambda path: fit(logger=loggers.csv(path)),
    "jsonl": lambda path: fit(logger=loggers.jsonl(path)),
    "tensorboard": lambda path: fit(logger=loggers.tensorboard(path)),
    "tune": tune,
    "tuning.read": ts.tuning.read,
}
WRITERS = [name for name in USES if name[:4] not in ("rest", "cont", "tuni")]


LIBRARIES = {
    "Checkpoints": "obstore",
    "fit(checkpoint=)": "obstore",
    "restore orbax": "gcsfs",
}  # of gs://, see test_homes.py


@pytest.mark.parametrize("name", USES)
def test_a_bucket_is_refused_and_never_becomes_a_local_folder(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    library = LIBRARIES.get(name)
    if library and importlib.util.find_spec(library) is None:
        with pytest.raises(MissingLibraryError, match=rf"expected {library}. pip install '?{library}"):
            USES[name]("gs://bucket/a")
    refused = ["file:///tmp/a", "az://bucket/a", Path("s3://bucket/a"), *([] if library else ["gs://bucket/a"])]
    for url in refused:
        with pytest.raises(CheckpointError, match=r"got '(gs|file|s3|az):/.*', expected a local path.* mount other"):
            USES[name](url)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("path", "got"),
    [(None, "None"), (b"x", "b'x' (bytes)"), (3, "3 (int)"), ("", "'' (str)"), ("a\0", "'a\\x00' (str)")],
)
def test_what_is_no_path_is_shown(path, got):
    with pytest.raises(CheckpointError) as raised:
        ts.Checkpoints(path)
    assert str(raised.value) == f"path at Checkpoints(): got {got}, expected a directory's path."


@pytest.mark.parametrize("name", WRITERS)
def test_the_home_directory_is_expanded(tmp_path, monkeypatch, name):
    for library in {"tensorboard": ["tensorboardX"], "tune": ["optuna"]}.get(name, []):
        need(library)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    found = USES[name]("~/there")
    if isinstance(found, ts.Checkpoints):
        found.close()
    assert os.listdir(tmp_path) == ["home"] and os.listdir(tmp_path / "home")[0].startswith("there")


@pytest.mark.parametrize("name", USES)
def test_the_home_of_an_unknown_user_is_no_local_folder(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    text = r"got '~nobody_/x.*', expected a local path"
    with pytest.raises(CheckpointError, match=text):
        USES[name]("~nobody_/x")
    assert os.listdir(tmp_path) == []


SECOND = """
import sys
from tsunax import Checkpoints
try:
    Checkpoints(sys.argv[1])
    print("let in")
except Exception as error:
    print(type(error).__name__, error)
"""


def second(path) -> str:
    """What another process is told that wants to write into a directory."""
    command = [sys.executable, "-c", SECOND, str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.medium
def test_the_lock_survives_that_its_own_process_reads_the_directory(tmp_path):
    with ts.Checkpoints(tmp_path / "run") as checkpoints:
        checkpoints.save(make())
        checkpoints.wait()
        shutil.copytree(tmp_path / "run", tmp_path / "backup")
        assert second(tmp_path / "run").startswith("CheckpointError directory in use")
        ts.Checkpoints(tmp_path / "run").close()  # the one made last in this process, as ever
    assert second(tmp_path / "run") == "let in"


def test_a_write_that_a_kill_ended_keeps_no_later_write_out(tmp_path):
    (tmp_path / ".picture.png.new").write_bytes(b"half")  # what the killed process left
    durable_files.write_whole(tmp_path / "picture.png", b"whole")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("picture.png", b"whole")]
