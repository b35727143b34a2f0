"""`fit` and `evaluate` over several processes: the numbers of one, and one end for all."""

import os
import signal
import sys

import numpy as np
import pytest

from tests.test_distributed import Started, found, free_port, ready


@pytest.fixture
def launch(tmp_path):
    """A function that starts n processes of `tests.fitting`, all of which are ended afterwards."""
    started = []

    def run(n, work):
        address, folder = f"localhost:{free_port()}", tmp_path / str(n)
        folder.mkdir()
        given = {"coordinator_address": address, "num_processes": n, "timeout": 60}
        command = [sys.executable, "-u", "-m", "tests.fitting", work]
        new = [Started(folder, i, command, {}, {**given, "process_id": i}) for i in range(n)]
        started.extend(new)
        return new

    yield run
    for one in started:
        one.process.kill()
        one.process.wait()


def answers(started) -> list:
    codes = [one.wait(240) for one in started]
    assert codes == [0] * len(started), [one.text[-2000:] for one in started]
    return [found(one.text)[one.index] for one in started]


@pytest.mark.parametrize("n", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 8))])
def test_the_numbers_of_one_process(launch, n):
    """27 rows in batches of 8, evaluated on 9: tails that do not divide, with a mask and without."""
    (alone,) = answers(launch(1, "fits"))
    first, *others = answers(launch(n, "fits"))
    assert all(other == first for other in others)
    for case, columns in first.items():
        for column, expected in zip(columns, alone[case], strict=True):
            np.testing.assert_allclose(column, expected, rtol=2e-5, err_msg=case)


@pytest.mark.slow
def test_one_that_has_had_enough_ends_all(launch):
    (step, texts), other = answers(launch(2, "stops"))
    assert [step, texts] == other == [20, ["time is up"]]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "raised"), [(signal.SIGINT, "KeyboardInterrupt"), (signal.SIGTERM, "SystemExit")])
def test_a_signal_to_one_ends_all_at_one_step(launch, number, raised):
    started = launch(2, "interrupted")
    ready(started)
    os.kill(started[1].process.pid, number)
    first, second = answers(started)
    assert first == second and first[0] >= 8 and first[1] == raised
