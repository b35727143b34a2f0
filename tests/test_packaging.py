"""What is installed as tsunax is what the checkout says; scripts/package tries the wheel and the sdist themselves."""

import ast
import importlib.metadata
import importlib.util
import itertools
import os
import shutil
import subprocess
import sys
import types
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest
import tsunax as ts
from benchmarks import __main__ as benchmarks

ROOT = Path(__file__).resolve().parents[1]


def script(name: str, root: Path = ROOT):
    """A script without a suffix, as a module."""
    loader = SourceFileLoader(name, str(root / "scripts" / name))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


licences = script("licences")


PROGRAMS = sorted(path for folder in ("scripts", ".ci") for path in (ROOT / folder).glob("*") if path.is_file())


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: f"{path.parent.name}/{path.name}")
@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_is_the_header_and_nothing_else_happens(tmp_path, path, option):
    copy = tmp_path / path.parent.name / path.name  # beside nothing that could be run
    copy.parent.mkdir()
    shutil.copy(path, copy)
    done = subprocess.run([copy, option], cwd=tmp_path, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (0, "")
    text = path.read_text()
    if text.startswith("#!/usr/bin/env bash"):
        header = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines()[1:])
        expected = "\n".join(line.removeprefix("#").removeprefix(" ") for line in header)
    else:
        expected = ast.get_docstring(ast.parse(text), clean=False)
    assert done.stdout.strip() == expected.strip() and list(tmp_path.iterdir()) == [copy.parent]


@pytest.mark.parametrize("name", ["bench", "check", "test"])
def test_scripts_before_the_installation_say_so(tmp_path, name):
    (tmp_path / "scripts").mkdir()
    copy = shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts")
    fake = tmp_path / "python"
    fake.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')  # without site-packages
    fake.chmod(0o755)
    done = subprocess.run([copy], env={**os.environ, "PYTHON": str(fake)}, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1 and done.stderr.startswith(f"scripts/{name}: ")
    assert done.stderr.rstrip().endswith("Run scripts/install first.")


def test_an_environment_of_an_old_python_is_refused(tmp_path):
    (tmp_path / "scripts").mkdir()
    copy = shutil.copy(ROOT / "scripts" / "install", tmp_path / "scripts")
    old = tmp_path / ".venv" / "bin" / "python"
    old.parent.mkdir(parents=True)
    old.write_text('#!/bin/sh\ncase "$2" in *version_info*) exit 1;; *python_version*) echo 3.9.18;; esac\n')
    old.chmod(0o755)
    done = subprocess.run([copy], capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert ".venv has Python 3.9.18, tsunax needs 3.11 or newer. Remove .venv" in done.stderr


def test_benchmarks_list_their_names(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--help"])
    monkeypatch.setattr(subprocess, "run", None)
    with pytest.raises(SystemExit) as ended:
        benchmarks.main()
    assert not ended.value.code and "step, " in capsys.readouterr().out


def test_one_version():
    """An editable installation keeps the number that it was made with: install again where this fails."""
    assert importlib.metadata.version("tsunax") == ts.__version__
    cited = (ROOT / "CITATION.cff").read_text().partition("\nversion: ")[2].splitlines()[0]
    assert ts.__version__.partition(".dev")[0] == cited, "CITATION.cff names the release that is next, or this one"


@pytest.mark.parametrize(
    ("requirement", "name"),
    [("jax>=0.7.2", "jax"), ("ray[train,tune]>=2.49.2", "ray"), ("scikit-learn >= 1.5", "scikit-learn")],
)
def test_names_of_requirements(requirement, name):
    assert licences.name_of(requirement) == name


def test_every_direct_dependency_has_its_licence():
    page = (ROOT / "docs" / "licences.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("|")]
    needed = {name: ", ".join(groups) for name, groups in licences.dependencies().items()}
    assert {name: by for name, by, _ in rows[2:]} == needed, "print it anew: scripts/licences"
    assert [name for name, _, licence in rows[2:] if licence in ("", "-", "not installed")] == []


def test_licences_are_read_from_the_metadata(monkeypatch):
    assert licences.licence("jax").startswith("Apache") and licences.licence("no-such-library") == "not installed"
    about = {"license": "MIT\nwith all of its text", "classifier": ["License :: OSI Approved"]}
    monkeypatch.setattr(importlib.metadata, "metadata", lambda name: types.SimpleNamespace(json=about))
    assert licences.licence("any") == "MIT"
    about["classifier"].append("License :: OSI Approved :: MIT License")
    assert licences.licence("any") == "MIT License"
    about["license_expression"] = "MIT-0"
    assert licences.licence("any") == "MIT-0"
