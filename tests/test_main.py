"""`python -m tsunax`, the first thing that a report of a bug has."""

import importlib.metadata
import re

import jax
import pytest
import tsunax as ts
from tsunax import __main__ as command


@pytest.mark.medium
def test_the_report(capsys):
    assert command.main([]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"tsunax {ts.__version__}, Python 3.")
    assert re.search(r"^jax \d+\.\d+.*, jaxlib \d.*, optax \d.*, flax \d", text, re.M)
    assert re.search(r"^device \S*cpu\S*: DeviceInfo\(platform='cpu'", text, re.M | re.I)
    assert re.search(r"^self-check ok: loss 0\.\d+ to 0\.\d+ in 20 steps", text, re.M)


@pytest.mark.parametrize("broken", ["raises", pytest.param("does not learn", marks=pytest.mark.medium)])
def test_what_is_broken_is_said(broken, monkeypatch, capsys):
    def fails(*_, **__):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(
        ts, "train_step", fails if broken == "raises" else lambda _: lambda s, x: ts.update(s, s.params)
    )
    assert command.main([]) == 1
    assert "self-check FAILED" in capsys.readouterr().out


def test_without_a_device_the_rest_is_said(monkeypatch, capsys):
    """A driver that does not start is what such a report is about."""

    def fails():
        raise RuntimeError("Unable to initialize backend 'cuda'")

    monkeypatch.setattr(jax, "local_devices", fails)
    monkeypatch.setattr(command, "self_check", fails)
    monkeypatch.setenv("TSUNAX_DEVICE", "abacus")
    assert command.main([]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "devices: FAILED: RuntimeError: Unable to initialize backend 'cuda'" in text
    assert "settings: TSUNAX_DEVICE=abacus" in text
    assert "preferred device: FAILED: ConfigError: device at TSUNAX_DEVICE" in text and text.startswith("tsunax ")


def test_versions(monkeypatch):
    assert re.fullmatch(r"\d+\..*", command.version_of("jax")) and command.version_of("no-such-library") == "-"
    monkeypatch.setattr(importlib.metadata, "version", lambda name: None)  # of an installation cut short
    assert command.version_of("jax") == "unknown"


@pytest.mark.parametrize(
    ("given", "status", "says"), [("--help", 0, "talk to a run: python -m tsunax status RUN"), ("plot", 2, "plot")]
)
def test_arguments(given, status, says, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main([given])
    assert ended.value.code == status
    assert says in "".join(capsys.readouterr())
