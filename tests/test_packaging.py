"""What is installed as tsunax is what the checkout says; scripts/package tries the wheel and the sdist themselves."""

import importlib.metadata
import importlib.util
import types
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest

import tsunax as ts

ROOT = Path(__file__).resolve().parents[1]


def script(name: str):
    """A script without a suffix, as a module."""
    loader = SourceFileLoader(name, str(ROOT / "scripts" / name))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


licences = script("licences")


def test_one_version():
    """An editable installation keeps the number that it was made with: install again where this fails."""
    assert importlib.metadata.version("tsunax") == ts.__version__


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
