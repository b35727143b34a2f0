"""The checks of `benchmarks/gpu`, which an accelerator runs too: `TSUNAX_TEST_PLATFORM=cuda,cpu pytest -m gpu`."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from benchmarks.gpu import checks, programme
from benchmarks.gpu.results import Results, read

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.gpu
@pytest.mark.medium
@pytest.mark.parametrize("check", checks.CHECKS, ids=lambda check: check.__name__)
def test_on_an_accelerator_too(check):
    check()


def test_a_file_of_results_is_whole_after_every_number(tmp_path):
    path = programme.file_of(tmp_path, "NVIDIA H200", "0.11.2")
    assert path.name == "gpu-nvidia-h200-jax0.11.2.json"
    Results(path, "gpt").note("steps", {"tsunax": {"ms": 25.0}})
    Results(path, "launch").note("us", 31.5)
    assert read(path)["parts"] == {"gpt": {"steps": {"tsunax": {"ms": 25.0}}}, "launch": {"us": 31.5}}
    tables = {table["title"]: table["rows"] for table in read(path)["shown"]}
    assert tables == {"gpt": [["steps: tsunax: ms", 25.0]], "launch": [["us", 31.5]]}
    assert list(tmp_path.iterdir()) == [path]
    assert programme.file_of(tmp_path, "NVIDIA H200", "0.11.2").name == "gpu-nvidia-h200-jax0.11.2-2.json"


@pytest.mark.medium
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_programme_that_is_killed_keeps_its_numbers(tmp_path, number):
    command = [sys.executable, "-m", "benchmarks.gpu", "--tiny", "--only", "checks", "--out", str(tmp_path)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, start_new_session=True)
    deadline, numbers = time.monotonic() + 200, {}
    while len(numbers) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
        for path in tmp_path.glob("gpu-*.json"):
            numbers = json.loads(path.read_text())["parts"].get("checks", {})
    process.send_signal(number)
    process.wait()
    (path,) = tmp_path.glob("gpu-*.json")
    everything = json.loads(path.read_text())
    assert everything["about"]["device"] == "cpu" and len(everything["parts"]["checks"]) >= 2
    if number == signal.SIGTERM:
        assert process.returncode == 143
    for line in subprocess.run(["pgrep", "-f", str(path)], capture_output=True, text=True).stdout.split():
        os.kill(int(line), signal.SIGKILL)  # the part of a programme that could not end it


def test_unknown_parts_are_named():
    command = [sys.executable, "-m", "benchmarks.gpu", "--only", "gtp"]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 2 and "got gtp, expected some of checks, gpt" in process.stderr
