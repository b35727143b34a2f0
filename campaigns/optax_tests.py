"""optax's own tests with the rules of tsunax in the place of its optimizers: `python -m campaigns.optax_tests`.

    python -m campaigns.optax_tests [FILES] [-k PATTERN]
    python -m campaigns.optax_tests --plain    # with optax's optimizers: what fails without us

The tests come with optax's wheel; if they do not, its sdist is fetched. Prints how many passed, failed, and failed as
expected, with the reasons of the latter, and ends with 1 if there were others.
"""

from __future__ import annotations

import argparse
import collections
import importlib.metadata
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import optax
import optax.contrib
import pytest
from tsunax import rules
from tsunax.rules.optimizers import CONTRIB, OPTAX

# {pattern of a test's name: why it fails}; what optax's tests ask of its own classes, and no user of a rule
EXPECTED = {
    "Float64Test::test_mixed_dtype_input_outputs": "compares two states by ==, which a live state has not",
    "ReduceLROnPlateauTest": "gives update a state that it made by hand, which has no numbers",
    r"StateUtilsTest::test_(adam|map_non_params_to_none|map_params_to_none)$": "compares with a state that it made by "
    "hand, which has no numbers",
    # adafactor, adafactor without a rate, noisy_sgd and sophia of optax 0.2.8
    r"AliasTest::test_optimizers_can_be_wrapped_in_inject_hyperparams(3|4|18)$|"
    r"ContribTest::test_optimizers_can_be_wrapped_in_inject_hyperparams16$": "inject_hyperparams makes arrays of ints and "
    "dtypes, which are no numbers of a live rule but part of its program",
    "test_bad_structure_raises|test_selective_bad_structure": "asks for another jax's message, with --plain too",
}


def find(folder: Path) -> list[Path]:
    """The test files of the installed optax, or of its sdist; none if neither has them."""
    if found := sorted(Path(optax.__file__).parent.rglob("*_test.py")):
        return found
    wanted = f"optax=={importlib.metadata.version('optax')}"
    fetch = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", "optax", "-d", folder, wanted]
    subprocess.run(fetch, check=False, timeout=300)
    for archive in folder.glob("*.tar.gz"):
        with tarfile.open(archive) as file:
            file.extractall(folder, filter="data")
    return sorted(folder.rglob("*_test.py"))


def replace_optimizers() -> list[str]:
    """Put our rule wherever a module of optax holds the optimizer of that name."""
    ours = {}
    for module, names in ((optax, OPTAX), (optax.contrib, CONTRIB)):
        ours |= {id(getattr(module, name)): getattr(rules, name) for name in names if hasattr(module, name)}
    for title, module in list(sys.modules.items()):
        if title.split(".")[0] == "optax":
            for name, x in list(vars(module).items()):
                if id(x) in ours:
                    setattr(module, name, ours[id(x)])
    return sorted(rule.__name__ for rule in ours.values())


class Tally:
    """A plugin of pytest that counts, and marks what is known."""

    def __init__(self):
        self.counts, self.reasons, self.failed = collections.Counter(), collections.Counter(), []

    def pytest_runtest_logreport(self, report):
        if report.when != "call" and report.passed:
            return
        outcome = report.outcome
        if outcome == "failed":
            reason = next((why for pattern, why in EXPECTED.items() if re.search(pattern, report.nodeid)), None)
            outcome = "failed as expected" if reason else outcome
            self.reasons[reason] += 1 if reason else 0
            self.failed += [] if reason else [report.nodeid]
            print(f"\n{outcome}: {report.nodeid.rpartition('optax/')[2]}\n  {str(report.longrepr)[-300:]}")
        self.counts[outcome] += 1


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("files", nargs="*", help="parts of the names of files; by default all that make an optimizer")
    parser.add_argument("-k", default="", help="of pytest: which tests")
    parser.add_argument("--plain", action="store_true", help="with optax's own optimizers")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        files = find(Path(folder))
        if not files:
            print("skipped: neither optax's wheel nor its sdist has tests, or the sdist could not be fetched")
            return 0
        names = [] if given.plain else replace_optimizers()
        asks = re.compile(r"\b(alias|contrib|optax|_[a-z]\w*)\.(" + "|".join([*OPTAX, *CONTRIB]) + r")\b|opt_name")
        files = [file for file in files if asks.search(file.read_text(encoding="utf-8"))]
        files = [file for file in files if not given.files or any(part in str(file) for part in given.files)]
        tally = Tally()
        options = [
            "-q",
            "--no-header",
            "-p",
            "no:cacheprovider",
            "--import-mode=importlib",
            "--tb=line",
            "-W",
            "ignore",
        ]
        pytest.main(
            [*options, "--rootdir", folder, "-c", "/dev/null", "-k", given.k, *map(str, files)], plugins=[tally]
        )
    print(f"\noptax {optax.__version__}, {len(names)} optimizers replaced, {len(files)} files: {dict(tally.counts)}")
    for reason, n in tally.reasons.items():
        if reason:
            print(f"  {n:4} {reason}")
    for name in tally.failed:
        print(f"  FAILED {name.rpartition('optax/')[2]}")
    return 1 if tally.failed else 0


if __name__ == "__main__":
    sys.exit(main())
