"""The larger examples run, in short by default; and to their numbers, with their benchmarks, where asked for."""

import re
import subprocess
from pathlib import Path

import pytest
from tests.helpers import run_python

ROOT = Path(__file__).resolve().parents[1]


def run(name: str, *options: str):
    return run_python("-W", "error", ROOT / "examples" / f"{name}.py", *options, timeout=1800)


def last_number(run: subprocess.CompletedProcess, pattern: str) -> float:
    *_, last = run.stdout.splitlines() or [""]
    match = re.fullmatch(pattern, last)
    assert match, run.stdout + run.stderr
    return float(match[1])


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_gpt(precision):
    done = run("gpt", "--precision", precision)
    assert done.returncode == 0, done.stdout + done.stderr
    assert last_number(done, r"bits per held-out byte: (\d\.\d{3})") <= 2.05


@pytest.mark.slow
def test_gpt_in_short():
    done = run("gpt", "--steps", "4", "--target", "0.1")
    assert 2 < last_number(done, r"bits per held-out byte: (\d\.\d{3})") < 8
    assert done.returncode and "expected at most 0.1" in done.stderr
    losses = [float(line.split()[3]) for line in done.stdout.splitlines() if line.startswith("step ")]
    assert len(losses) == 4 and losses[-1] < losses[0] - 2


@pytest.mark.slow
def test_mixed_precision():
    done = run("mixed_precision")
    assert done.returncode == 0, done.stdout + done.stderr
    assert last_number(done, r"largest distance from float32: (\d\.\d\d) points") <= 0.5


@pytest.mark.slow
def test_mixed_precision_in_short():
    done = run("mixed_precision", "--seeds", "1", "--epochs", "2", "--within", "-1")
    assert last_number(done, r"largest distance from float32: (\d+\.\d\d) points") < 5
    assert done.returncode and "expected at most -1" in done.stderr
    rejected = {line[:32].strip(): float(line.split()[-2]) for line in done.stdout.splitlines()[1:7]}
    assert rejected.pop("float16, scale from 2^24") >= 3 and not any(rejected.values())
