"""What tsunax does for XLA's CPU compiler alone changes no result: the equivalences of a step hold without it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
STEP = """
test_step.py::test_a_step_is_the_hand_written_one_to_the_last_bit[skip-True]
test_step.py::test_a_step_is_the_hand_written_one_to_the_last_bit[ignore-False]
test_accumulation.py::test_micro_batches_with_unequal_masks_are_the_whole_batch[3]
"""
CAPABILITIES = """
test_step.py::test_remat_changes_no_number[True]
test_guard.py::test_injected_nan_and_inf_never_reach_a_state[float32-1]
test_accumulation.py::test_the_rule_inside_sees_the_mean_of_its_window_and_nothing_in_between
test_hyper.py::test_frozen_params_and_moments_keep_their_bits_and_go_on_from_them[adamw]
test_equivalences.py::test_an_equivalence[plain-plain-batches-calls]
test_equivalences.py::test_an_equivalence[plain-dropped-batches-calls]
"""


@pytest.mark.parametrize(
    "names", [STEP, pytest.param(CAPABILITIES, marks=pytest.mark.medium)], ids=["step", "capabilities"]
)
def test_equivalences_hold_without_it(names):
    command = [sys.executable, "-m", "pytest", "-p", "tests.programs.without_cpu_rewrites", "-p", "no:cacheprovider"]
    chosen = "TSUNAX_TEST_PASSED", "TSUNAX_TEST_PART"  # see tests/conftest.py: these tests run in any case
    environment = {name: x for name, x in os.environ.items() if name not in chosen}
    process = subprocess.run(
        [*command, "-q", *(f"tests/{name}" for name in names.split())],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=environment | {"PYTHONPATH": str(ROOT)},
    )
    assert process.returncode == 0, process.stdout[-4000:]
    assert f"{len(names.split())} passed" in process.stdout


def test_each_part_of_the_folder_is_behind_one_call():
    """Those that tests/programs/without_cpu_rewrites.py replaces, under names that it can replace."""
    calls = set()
    for path in (ROOT / "tsunax").rglob("*.py"):
        if path.parent.name != "_cpu":
            text = path.read_text()
            names = re.findall(r"^ *from tsunax\._cpu import (.+)$", text, re.M)
            later = re.findall(r"^ +from tsunax\._cpu\.(\w+) import (.+)$", text, re.M)
            assert text.count("tsunax._cpu") == len(names) + len(later), f"{path}: another import of tsunax._cpu"
            calls |= {call for name in names for call in re.findall(rf"\b{name}\.\w+", text)}
            calls |= {f"{module}.{name}" for module, name in later}
    assert calls == {"convolutions.fast", "kept_sums.keep_sums"}
