"""`python -m tsunax`, the first thing that a report of a bug has."""

import re

import pytest

import tsunax as ts
from tsunax import __main__ as command


def test_the_report(capsys):
    assert command.main() == 0
    text = capsys.readouterr().out
    assert text.startswith(f"tsunax {ts.__version__}, Python 3.")
    assert re.search(r"^jax \d+\.\d+.*, jaxlib \d.*, optax \d.*, flax \d", text, re.M)
    assert re.search(r"^device \S*cpu\S*: cpu", text, re.M | re.I)
    assert re.search(r"^self-check ok: loss 0\.\d+ to 0\.\d+ in 20 steps", text, re.M)


@pytest.mark.parametrize("broken", ["raises", "does not learn"])
def test_what_is_broken_is_said(broken, monkeypatch, capsys):
    def fails(*_, **__):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(
        ts, "train_step", fails if broken == "raises" else lambda _: lambda s, x: ts.update(s, s.params)
    )
    assert command.main() == 1
    assert "self-check FAILED" in capsys.readouterr().out


def test_versions():
    assert re.fullmatch(r"\d+\..*", command.version_of("jax")) and command.version_of("no-such-library") == "-"
