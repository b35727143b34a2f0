"""`fit` and `evaluate` over several processes: the numbers of one, and one end for all."""

import dataclasses
import functools
import os
import re
import signal

import jax
import numpy as np
import pytest
import tsunax as ts
from tests.processes import answers, ready
from tsunax.distributed.agreement import outline


@pytest.fixture
def launch(start_processes):
    """A function that starts n processes of `tests.programs.fitting`."""
    return functools.partial(start_processes, "fitting")


@pytest.mark.parametrize(
    "n", [pytest.param(2, marks=pytest.mark.medium), *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 8))]
)
def test_the_numbers_of_one_process(launch, n):
    """27 rows in batches of 8, evaluated on 9: tails that do not divide, with a mask and without."""
    (alone,) = answers(launch(1, "fits"))
    first, *others = answers(launch(n, "fits"))
    assert all(other == first for other in others)
    for case, columns in first.items():
        for column, expected in zip(columns, alone[case], strict=True):
            np.testing.assert_allclose(column, expected, rtol=2e-5, err_msg=case)


SAYS = {
    "seed": "processes differ at fit(): data['seed']: got 1 on process 1 (",
    "arrays": "processes differ at fit(): data['some rows'][0]: got float32[8,5] ",
    "resident": "processes differ at fit(): data['some rows'][0]: got float32[8,5] ",
    "goal": "processes differ at fit(): options['goal']: got 'epochs=3' on process 1 (",
    "callbacks": "processes differ at fit(): options['cadences'][0]: got 'Cadence(steps=(3,), epochs=(), seconds=inf)' on process 1 (",
    "local": "StateError state at fit(): got on devices of this process alone, and of the data only its part,",
    "part": "DataError data at fit(): got batches(process=(",
    "own batches": "processes differ at fit(): data['batches']: got 5 on process 1 (",
    "iterate": "processes differ at iterate(): data['seed']: got 1 on process 1 (",
    "run_epoch": "processes differ at step 2 of run_epoch(): batches: got '3 of float32[",
    "parts": "DataError data at fit(): got batches(process=(",
    "init": "processes differ at shard(): state['w']: got int64[3] ",
    "key": "processes differ at shard(): state.key: got key<fry>[] ",
    "adjusted": "processes differ at fit(): state.numbers.values: got float32[4,5] ",
    "rows": "processes differ at step 1 of fit(): batches: got '1 of float32[64,10,5], float32[64,10]'",
    "batches": "processes differ at step 2 of fit(): batches: got '3 of float32[64,8,5], float32[64,8]' on process 1 (",
    "a loader": "batches: got 'DataError data at batch 3 of epoch 0: got OSError disk, expected a batch",
    "evaluated rows": "processes differ at the next batch of evaluate(): batches: got '1 of float32[5,5], float32[5]'",
    "evaluated batches": ", 'none, the data have ended' on process 0.",
    "evaluated alone": "All processes call the same, in the same order.",
    "evaluated arrays": "processes differ at evaluate(): data['some rows'][0]: got float32[8,5] ",
    "evaluated local": "StateError state at evaluate(): got on devices of this process alone",
    "names": "numbers at evaluate at step 4: got val/1 on process 1 (",
    "a state": "processes differ at the callbacks of step 8: hyperparams['learning_rate']: got 0.05",
    "a callback": "processes differ at fit(): callbacks[0]['patience']: got 2 on process 1 (",
    "loss": "processes differ at fit(): step['loss_fn']: got 'problem.<locals>.<lambda> ",
    "loss of any step": "processes differ at the first call of fit(): program of loss_fn and what it refers to: got ",
    "a number in the loss": "processes differ at the first call of fit(): program of loss_fn and what it refers to",
    "an array in the loss": "processes differ at the first call of fit(): ",
    "accumulate": "processes differ at fit(): step['accumulate']: got 2 on process 1 (",
    "on_nonfinite": "processes differ at fit(): step['on_nonfinite']: got 'ignore' on process 1 (",
    "rule": "processes differ at shard(): state itself: got ",
    "a loss without a loop": "processes differ at the first call of fit(): program of loss_fn and what it refers to",
    "extra": "processes differ at fit(): extra['scale']: got 2.0 on process 1 (",
    "evaluation": "processes differ at fit(): evaluate: got 'misused.<locals>.<lambda>",
    "iterated loss": "processes differ at the first call of iterate(): program of loss_fn and what it refers to",
    "loss of an epoch": "processes differ at the first call of run_epoch(): program of loss_fn and what it refers to",
    "evaluated loss": "processes differ at evaluate(): eval_step['loss_fn']: got 'problem.<locals>.<lambda> ",
    "evaluated number": "processes differ at the first call of evaluate(): program of loss_fn and what it refers to",
    "population": "StateError population at fit(): got members on devices of several processes, expected members of its own",
    "spread": "StateError leaf at w: got float32[64,64], of which other processes have a part, expected",
}


@pytest.mark.slow
def test_processes_that_differ_are_told(launch):
    first, second = answers(launch(2, "misused"))
    apart = {"part": "", "parts": ""}  # each names its own part
    assert first | apart == second | apart  # errors too: all raise, and go on together
    wrong = {name: first[name] for name, text in SAYS.items() if text not in first[name]}
    assert set(SAYS) < set(first)
    assert not wrong and not first["own rows"] and not first["own words"], wrong
    assert first["numbers"] == 1.0  # that of process 0


def test_what_processes_compare_of_a_function():
    """Its code and the settings of ours; not what it closes over, nor the fields of the user's own."""

    def make(rank, n=3):
        return lambda run: run.log(rank=rank)

    @dataclasses.dataclass
    class Printer:
        path: str

        def __call__(self, run):
            print(self.path)

    step = lambda loss, **given: outline(ts.train_step(loss, **given))
    first, second = (lambda params, x: x @ params["w"]), (lambda params, x: x @ params["w"] * 2)
    assert outline(make(0)) == outline(make(1)) == outline(functools.partial(make(2)))
    assert outline(jax.jit(first)) == outline(first) != outline(second)
    assert outline(Printer("a")) == outline(Printer("b"))
    assert step(first) != step(second) and step(first) != step(first, accumulate=2)
    assert step(first) != step(first, on_nonfinite="ignore")
    plateau, every = ts.callbacks.plateau, ts.callbacks.every
    assert outline(plateau(patience=1)) == outline(plateau(patience=1)) != outline(plateau(patience=2))
    assert outline(every(3, make(0))) == outline(every(3, make(1))) != outline(every(3, plateau()))


@pytest.mark.slow
def test_a_signal_that_comes_late_has_one_answer(launch):
    assert answers(launch(2, "too_late")) == [[[8, 143]] * 3 + [[8, 0]]] * 2


@pytest.mark.medium
def test_ctrl_c_to_one_is_the_exit_code_of_all(launch):
    """No process calls another one failed."""
    started = launch(2, "endless")
    ready(started)
    os.kill(started[1].process.pid, signal.SIGINT)
    assert [one.wait(120) for one in started] == [-signal.SIGINT] * 2, [one.text[-2000:] for one in started]
    assert "ends too" not in started[0].text + started[1].text


@pytest.mark.slow
def test_the_clock_of_the_first_process_decides_for_all(launch):
    first, second = answers(launch(2, "timed"))
    assert first == second
    (step, last_step), evaluated, called = first
    assert evaluated == called == [step] and 20 <= step < 40 and last_step == 40


@pytest.mark.medium
def test_a_save_is_due_by_the_clock_of_the_first_process(launch):
    assert answers(launch(2, "dues")) == [[[False, True], [False, False]]] * 2


@pytest.mark.slow
def test_one_that_has_had_enough_ends_all(launch):
    (step, texts), other = answers(launch(2, "stops"))
    assert [step, texts] == other == [20, ["time is up"]]


@pytest.mark.medium
def test_a_run_that_one_process_stopped_is_over_for_all(launch):
    text = ["time is up"]
    assert answers(launch(2, "stops_again")) == [[[20, text, 0], [20, text, 1], [30, text, 0]]] * 2


@pytest.mark.medium
def test_the_slowest_process_is_named(launch):
    """Ten times 50 ms more than the other one: on both, in the words of `history.marks`."""
    first, second = answers(launch(2, "uneven"))
    assert first == second
    ((step, name, text),) = first
    assert (step, name) == (20, "slowest")
    assert re.fullmatch(r"process 1 \(.*\) by 0\.[56] s", text), text


@pytest.mark.slow
def test_a_signal_to_one_saves_the_run_of_all(launch):
    first, second = answers(launch(2, "saved"))
    assert first == second
    (step, marks, steps), (last_step, last_marks, last_steps), has_same_bits = first
    # Signals at 5, at 12 to both, and at 20: each is served once, a call or more after it came.
    assert step == 32 and len(marks) in (3, 4) and steps == [*marks, 32]
    assert last_step == 48 and last_marks[: len(marks)] == marks and {*last_marks[len(marks) :]} == {48}
    assert last_steps == [*steps, 48] and has_same_bits


@pytest.mark.slow
def test_a_timer_of_process_0_makes_a_boundary_of_all(launch):
    first, second = answers(launch(2, "clocked"))
    assert first == second
    steps, which = zip(*first, strict=True)
    # Two looks a step: at 9, at 30, and at 59 in the last step. All see it a call or more later, or at the end.
    assert list(which) == [[True, False, False]] * 2 + [[False, False, True]]
    assert 5 <= steps[0] < steps[1] <= 20 and steps[2] == 30


@pytest.mark.slow
@pytest.mark.parametrize(("number", "raised"), [(signal.SIGINT, "KeyboardInterrupt"), (signal.SIGTERM, "SystemExit")])
def test_a_signal_to_one_ends_all_at_one_step(launch, number, raised):
    started = launch(2, "interrupted")
    ready(started)
    os.kill(started[1].process.pid, number)
    first, second = answers(started)
    assert first == second and first[0] >= 8 and first[1] == raised
