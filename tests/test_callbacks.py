"""Callbacks, driven by a small run of lists: when they act, once, also when every step is a resume.

What is expected is counted by hand or by a few lines of plain Python; the state's part is plain `ts.adjust`, `ts.thaw`.
"""

import dataclasses
import json
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import tsunax as ts
from tests.helpers import assert_trees_equal
from tsunax.errors import HyperparameterError, PatternError, RowError, WrongTypeError
from tsunax.run import callbacks
from tsunax.run.callbacks import (
    adjust_at,
    early_stopping,
    every,
    freeze_at,
    patience,
    plateau,
    thaw_at,
    throttle,
    time_limit,
)
from tsunax.run.history import History

NAN, INF = math.nan, math.inf

# ------------------------------------------------------------------------------------------------------------- the run


@dataclasses.dataclass
class Run:
    """What the loop gives a callback, and what the callback asked for."""

    event: str = "start"
    step: int = 0
    epoch: int = 0
    state: Any = None
    info: Any = None
    metrics: dict = dataclasses.field(default_factory=dict)
    history: History = dataclasses.field(default_factory=History)
    memory: dict = dataclasses.field(default_factory=dict)
    stops: list = dataclasses.field(default_factory=list)
    logged: list = dataclasses.field(default_factory=list)

    def log(self, **numbers):
        self.logged.append(numbers)

    def stop(self, reason):
        self.stops.append((self.step, reason))

    def visit(self, callback, *events, row=None):
        """A boundary: the row is made, then the callback sees each of its events."""
        if row:
            self.metrics = {**self.metrics, **row}
            self.history.add(row, self.step)
        for event in events:
            self.event = event
            new = callback(self)
            self.state = self.state if new is None else new

    def resumed(self):
        """The same run in a new process: what was saved went through JSON."""
        through = lambda x: json.loads(json.dumps(x, default=np.ndarray.tolist))
        history = History.of(through(self.history.plain()))
        return dataclasses.replace(self, memory=through(self.memory), history=history, metrics={})


def drive(callback, values, *, resuming=False, name="val/loss", run=None):
    """Logs at odd steps, evaluations at even ones. The run, ended where it was stopped."""
    run = run or Run()
    run.visit(callback, "start")
    for i, value in enumerate(values):
        if resuming:
            run = run.resumed()
            run.visit(callback, "start")
        run.step = 2 * i + 1
        run.visit(callback, "log", row={"loss": 1.0})
        run.step += 1
        run.visit(callback, "log", "evaluate", "epoch", row={name: value})
        if run.stops:
            break
    run.visit(callback, "end")
    return run


both_ways = pytest.mark.parametrize("resuming", [False, True])

# ------------------------------------------------------------------------------------------------------ early stopping


@both_ways
@pytest.mark.parametrize(
    ("arguments", "values", "tries", "reason"),
    [
        (dict(patience=2), [3, 2, 1, 0, -1], None, ""),
        (dict(patience=2), [3, 3, 3, 3], 3, "val/loss is no better than 3 at step 2 for 2 values"),  # a constant
        (dict(patience=3), [3, 1, 2, 2, 0.5, 1, 1, 1], 8, "0.5 at step 10 for 3"),  # it starts again
        (dict(patience=2, min_delta=0.5), [3, 2.6, 2.4, 2.2, 2.0], 5, "2.4 at step 6"),  # 2.6 does not shift the bar
        (dict(patience=2, min_delta=0.5), [3, 2.8, 2.6], 3, "3 at step 2"),  # a creep
        (dict(patience=2, min_delta=0.5), [3, 2.5, 2.5], 3, "3 at step 2"),  # by more than, not by
        (dict(patience=2, mode="max"), [1, 2, 3, 2, 2.5], 5, "3 at step 6"),
        (dict(patience=2, mode="max", min_delta=1), [-3, -2.5, -1.5, -1, -0.6], 5, "-1.5 at step 6"),
        (dict(patience=9), [3, NAN], 2, "val/loss is nan at step 4"),
        (dict(patience=9), [3, -INF], 2, "val/loss is -inf at step 4"),
    ],
)
def test_early_stopping(resuming, arguments, values, tries, reason):
    run = drive(early_stopping(**arguments), values, resuming=resuming)
    if tries is None:
        assert run.stops == []
    else:
        (step, said), *_ = run.stops
        assert step == 2 * tries and reason in said


@both_ways
def test_early_stopping_stops_where_plain_counting_does(resuming):
    rng = np.random.default_rng(0)
    for _ in range(30):
        values = np.round(rng.normal(size=30), 1)
        wait, delta = int(rng.integers(1, 6)), float(rng.choice([0.0, 0.3]))
        expected, bar, since = None, INF, 0
        for i, value in enumerate(values):
            since, bar = (0, value) if value < bar - delta else (since + 1, bar)
            if since == wait:
                expected = 2 * (i + 1)
                break
        run = drive(early_stopping(patience=wait, min_delta=delta), values.tolist(), resuming=resuming)
        assert [step for step, _ in run.stops[:1]] == ([] if expected is None else [expected])


def test_a_run_that_was_stopped_stops_again_at_its_start():
    run = drive(early_stopping(patience=2), [1, 1, 1]).resumed()
    run.stops.clear()
    run.visit(early_stopping(patience=2), "start")
    assert run.stops
    run.stops.clear()
    run.visit(early_stopping(patience=3), "start")  # more patience goes on
    assert run.stops == []


@pytest.mark.parametrize("wait", [early_stopping, plateau])
def test_a_wrong_metric_is_found_at_the_first_evaluation(wait):
    given = {"evaluate": lambda state: {"val/loss": 1.0}, "evaluate_every": 4}
    with pytest.raises(RowError, match=r"got 'val/los', expected one of .*Did you mean 'val/loss'\?") as caught:
        fit_with([wait("val/los", mode="min"), every(9, lambda run: None)], **given)  # which might log it
    assert int(caught.value.state.step) == 4


def test_a_metric_that_never_came_is_warned_of():
    with pytest.warns(UserWarning, match=r"metric at early_stopping\(\): got 'val/loss', expected one of loss"):
        fit_with([early_stopping(), every(9, lambda run: None)])


# --------------------------------------------------------------------------------------------------------------- rates


def make_state(**arguments):
    params = {"body": jnp.ones(2), "head": jnp.ones(2)}
    return ts.setup(ts.rules.adam(0.1), params, **arguments)


@both_ways
def test_plateau_lowers_the_rate_each_time_and_stops_at_the_floor(resuming):
    callback = plateau(patience=2, factor=0.5, min_learning_rate=0.03)
    run = drive(callback, [1, 1, 1, 0.5, NAN, 2, 2, 2, 2, 2], resuming=resuming, run=Run(state=make_state()))
    assert [(step, text) for step, _, text in run.history.marks] == [
        (6, "learning_rate 0.1 → 0.05"),
        (12, "learning_rate 0.05 → 0.03"),
        (16, "learning_rate 0.03 → 0.03"),
        (20, "learning_rate 0.03 → 0.03"),
    ]
    assert_trees_equal(run.state, ts.adjust(make_state(), learning_rate=0.03))


def test_plateau_never_raises_a_rate():
    run = Run(state=ts.adjust(make_state(), learning_rate=0.001))
    run = drive(plateau(patience=1, min_learning_rate=0.01), [1, 1], run=run)
    assert ts.hyperparams(run.state)["learning_rate"] == 0.001


def test_plateau_gives_each_group_its_factor():
    groups = ts.adjust(make_state(), "head", learning_rate=0.02)
    run = drive(plateau(patience=1, factor=0.5), [1, 1], run=Run(state=groups))
    rates = {k: v for k, v in ts.hyperparams(run.state).items() if "rate" in k}
    assert rates == {"learning_rate": 0.05, "learning_rate@head": 0.01}
    run = drive(plateau(patience=1, factor=0.5, where="head"), [1, 1], run=Run(state=groups))
    rates = {k: v for k, v in ts.hyperparams(run.state).items() if "rate" in k}
    assert rates == {"learning_rate": 0.1, "learning_rate@head": 0.01}
    run = drive(plateau(patience=1, factor=0.5, where="body"), [1, 1], run=Run(state=make_state()))
    rates = {k: v for k, v in ts.hyperparams(run.state).items() if "rate" in k}
    assert sorted(rates.values()) == [0.05, 0.1]


def test_plateau_of_a_population_is_refused_at_the_start():
    """Its members have rates of their own, and a metric is of one member."""
    members = ts.population(lambda key: make_state(), 2)
    with pytest.raises(HyperparameterError, match=r"plateau\(\): got arrays, as of a population, expected numbers"):
        Run(state=members).visit(plateau("loss/0"), "start")


def test_plateau_without_a_live_rate_is_refused_at_the_start():
    import optax

    run = Run(state=ts.setup(optax.sgd(0.1), {"w": jnp.ones(2)}))
    with pytest.raises(HyperparameterError, match="a live rule"):
        run.visit(plateau(), "start")


# ------------------------------------------------------------------------------------------------------ once at a step


CHANGES = [
    (thaw_at(5, "body"), lambda s: ts.thaw(s, "body"), "body"),
    (freeze_at(5, "head"), lambda s: ts.freeze(s, "head"), "head"),
    (adjust_at(5, learning_rate=0.5, b1=0.8), lambda s: ts.adjust(s, learning_rate=0.5, b1=0.8), "**"),
    (adjust_at(5, "head", learning_rate=0.5), lambda s: ts.adjust(s, "head", learning_rate=0.5), "head"),
]


@both_ways
@pytest.mark.parametrize(("callback", "change", "where"), CHANGES, ids=["thaw", "freeze", "adjust", "adjust a part"])
def test_a_change_is_made_once_at_its_step(resuming, callback, change, where):
    start = ts.adjust(ts.freeze(make_state(freezable=True), "body"), "head", learning_rate=0.01)
    run = Run(state=start)
    assert callback.at == (5,)
    for step in range(0, 10):
        if resuming:
            run = run.resumed()
            run.visit(callback, "start")
        run.step = step
        before = run.state
        run.visit(callback, "log", "step", "evaluate")
        assert (run.state is before) == (step != 5)
    assert_trees_equal(run.state, change(start))
    (mark,) = run.history.marks
    assert mark[:2] == (5, callback.change.__name__) and mark[2].startswith(where)


def test_a_change_that_was_missed_is_made_at_the_next_start():
    run = Run(state=make_state(freezable=True), step=40)
    run.visit(adjust_at(7, learning_rate=0.5), "start", "log")
    assert ts.hyperparams(run.state)["learning_rate"] == 0.5
    run.state = ts.adjust(run.state, learning_rate=0.25)  # the user's later word holds
    run.visit(adjust_at(7, learning_rate=0.5), "log", "end")
    assert ts.hyperparams(run.state)["learning_rate"] == 0.25


@pytest.mark.parametrize(
    ("callback", "error"),
    [
        (thaw_at(500, "boddy"), PatternError),
        (freeze_at(500, "boddy"), PatternError),
        (adjust_at(500, learning_rat=1.0), HyperparameterError),
        (adjust_at(500, learning_rate=-1.0), HyperparameterError),
    ],
)
def test_a_change_that_cannot_be_made_is_found_at_the_start(callback, error):
    with pytest.raises(error):
        Run(state=make_state()).visit(callback, "start")


# ------------------------------------------------------------------------------------------------------------ the rest


def test_every_says_where_it_wants_a_boundary():
    seen = []
    callback = every(10, lambda run: seen.append(run.step) or "state")
    assert callback.every == 10 and callback(Run(step=20)) == "state" and seen == [20]


@both_ways
def test_patience_counts_each_step_once(resuming):
    truths = dict(enumerate([1, 1, 0, 1, 1, 1, 1]))

    def is_low(run):
        return truths.get(run.step, 0)

    run = Run()
    for step in truths:
        run.step = step
        if resuming:
            run = run.resumed()
        run.visit(patience(is_low, 3), "start", "log", "evaluate", "epoch")
        if run.stops:
            break
    assert run.stops[0] == (5, "is_low was true 3 times in a row")


# Boundaries at these seconds; Flux's own would call at the same ones, with a timer instead of the next boundary.
TICKS = [0, 1, 2, 3, 5, 11, 12, 30, 31, 45]


@both_ways
@pytest.mark.parametrize(
    ("arguments", "calls"),
    [
        (dict(), [0, 11, 30, 45]),
        (dict(trailing=True), [0, 11, 30, 45]),
        (dict(leading=False), [11, 45]),
        (dict(leading=False, trailing=True), [11, 30, 45]),
    ],
)
def test_throttle(clock, resuming, arguments, calls):
    seen, run = [], Run()
    for second in TICKS:
        clock.now = 1000.0 + second
        run = run.resumed() if resuming else run
        run.visit(throttle(lambda run: seen.append(clock.now - 1000), 10, **arguments), "log")
    assert seen == calls


def test_throttle_makes_up_at_the_end(clock):
    seen, run = [], Run()
    callback = throttle(lambda run: seen.append(run.event), 10, trailing=True)
    run.visit(callback, "log", "end")
    assert seen == ["log"]  # the end itself is a boundary that came too early, and there is no later one
    run.visit(callback, "log")
    run.visit(callback, "end")
    assert seen == ["log", "end"]
    clock.now -= 500  # a clock that is set back must not silence it
    run.visit(callback, "log")
    assert seen == ["log", "end", "log"]


def test_time_limit_counts_over_resumes_but_not_the_time_between(clock):
    run, callback = Run(), time_limit(10)
    for _ in range(3):  # 4 s each
        run.visit(callback, "start")
        for _ in range(4):
            clock.now += 1
            run.step += 1
            run.visit(callback, "log")
            if run.stops:
                break
        run = run.resumed()
        clock.now += 1e6 if run.step == 4 else -2e3  # the next machine's clock is another one
    assert run.stops == [(10, "the time limit of 10 s is reached")]
    run.visit(callback, "start")
    assert len(run.stops) == 2


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: every(0, print), "interval at every(): got 0, expected an int ≥ 1"),
        (lambda: every(2.0, print), "interval at every(): got 2.0 (float), expected steps (an int), '2 epochs'"),
        (lambda: every(True, print), "interval at every(): got True (bool)"),
        (lambda: every(2, lambda: None), "fn at every(): got <lambda>(), expected f(run)"),
        (lambda: early_stopping(patience=0), "patience at early_stopping(): got 0, expected an int ≥ 1"),
        (
            lambda: early_stopping(mode="less"),
            "mode for 'val/loss' at early_stopping(): got 'less' (str), expected 'min' or",
        ),
        (
            lambda: early_stopping("val/accuracy"),
            "mode for 'val/accuracy' at early_stopping(): got None, expected 'min' or 'max'",
        ),
        (lambda: early_stopping(min_delta=-1), "min_delta at early_stopping(): got -1, expected ≥ 0"),
        (lambda: early_stopping(min_delta=NAN), "min_delta at early_stopping(): got nan, expected ≥ 0"),
        (lambda: plateau(factor=1.0), "factor at plateau(): got 1.0, expected ≥ 0 and < 1"),
        (lambda: plateau(min_learning_rate=-0.1), "min_learning_rate at plateau(): got -0.1, expected ≥ 0"),
        (lambda: plateau(patience=1.5), "patience at plateau(): got 1.5 (float)"),
        (lambda: throttle(print, -1), "seconds at throttle(): got -1, expected ≥ 0"),
        (lambda: thaw_at(-1), "step at thaw_at(): got -1, expected an int ≥ 0"),
        (lambda: adjust_at("10", learning_rate=1.0), "step at adjust_at(): got '10' (str), expected an int ≥ 0"),
    ],
)
def test_a_wrong_argument_is_refused_when_the_callback_is_made(make, text):
    with pytest.raises((HyperparameterError, WrongTypeError)) as caught:
        make()
    assert text in str(caught.value)


def test_only_callbacks_complete():
    assert dir(callbacks) == sorted(callbacks.__all__)


# ----------------------------------------------------------------------------------- what a callback may do with a run


def fit_with(callback, steps=6, **given):
    step = ts.train_step(lambda params, x, scale=1.0: scale * jnp.mean(x @ params["w"]))
    state = ts.setup(ts.rules.sgd(1.0), {"w": jnp.zeros(1)})
    data = ts.batches(np.ones((8, 1), np.float32), 4)
    return ts.fit(step, state, data, steps=steps, callbacks=callback, progress=False, **given)


def test_a_name_of_its_own_may_stand_on_a_run():
    seen = []

    def count(run):
        run.mine = getattr(run, "mine", 0) + 1
        run.log(mine=run.mine)
        seen.append(run.mine)
        if run.mine == 2:
            run.stop("two")

    _, history = fit_with(callbacks.every(2, count))
    assert seen == [1, 2] and history.last("mine") == 2 and history["step"][-1] == 4


@pytest.mark.parametrize("steps_per_call", ["auto", None])
def test_a_callback_may_change_extra(steps_per_call):
    extra = {"scale": 1.0}
    change = callbacks.every(2, lambda run: extra.update(scale=extra["scale"] * 10))
    state, _ = fit_with(change, extra=extra, steps_per_call=steps_per_call)
    assert float(state.params["w"][0]) == -(1 + 1 + 10 + 10 + 100 + 100)
    with pytest.raises(WrongTypeError, match="extra"):
        fit_with(callbacks.every(2, lambda run: extra.update(scale="heavy")), extra=extra)


@pytest.mark.medium
@pytest.mark.parametrize("wait", [early_stopping, plateau])
def test_a_metric_that_no_row_has_ends_the_run_at_the_first_rows(wait):
    text = rf"metric at {wait.__name__}\(\): got 'los', expected .*Did you mean 'loss'\?"
    with pytest.raises(RowError, match=text) as caught:
        fit_with(wait("los", mode="min"), steps=30, log_every=5)
    assert int(caught.value.state.step) == 2  # the end of the first epoch
    with pytest.warns(UserWarning, match="metric at"):  # a callback of yours might have logged it
        fit_with([wait("los", mode="min"), lambda run: None], steps=30, log_every=5)


@pytest.mark.medium
@pytest.mark.parametrize("wait", [early_stopping, plateau])
def test_a_name_that_evaluate_does_not_return_is_known_before_step_1(wait):
    seen = []

    def evaluate(state):
        seen.append(int(state.step))
        return {"val/loss": 1.0}

    with pytest.raises(RowError, match=rf"metric at {wait.__name__}\(\): got 'val/los'.*Did you mean 'val/loss'"):
        fit_with(wait("val/los", mode="min"), evaluate=evaluate, evaluate_every=4)
    assert seen == [0]
    fit_with(wait("val/loss"), steps=8, evaluate=evaluate, evaluate_every=4)
    assert seen == [0, 0, 4, 8]
    fit_with(wait("loss"), steps=8, evaluate=evaluate, evaluate_every=4)  # nobody waits for its names
    assert seen == [0, 0, 4, 8, 4, 8]


def test_the_look_at_its_names_takes_one_batch():
    rows = []

    def counted():
        for i in range(5):
            rows.append(i)
            yield np.ones((4, 1), np.float32)

    f = ts.eval_step(lambda params, x: jnp.mean(x @ params["w"]))
    evaluate = lambda state: ts.evaluate(f, state, {"val": counted()})
    _, history = fit_with(early_stopping("val/loss"), steps=2, evaluate=evaluate)
    assert rows == [0, 0, 1, 2, 3, 4] and history["step"].tolist() == [1, 2]
