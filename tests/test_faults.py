"""`replay`: faults where they were put, in the loss, its gradient, the rule and what was given."""

import contextlib
import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tsunax as ts
from tests import toys
from tests.helpers import medium_if
from tsunax.errors import NonFiniteError, StateError, WrongTypeError
from tsunax.insight.replaying import replay
from tsunax.run import fitting
from tsunax.run.run import Rejected

X = np.ones((8, 4), np.float32)
NEVER = {"never": np.float32(np.inf)}


def state_of(params, rule=None, **options):
    return ts.setup(ts.rules.adam(1e-3) if rule is None else rule, params, **options)


def product(params, x):
    return jnp.mean((x @ params["w"]) * params["p"])


STEP = ts.train_step(product)


def two(rule=None, **options):
    """A state with a matrix and a number."""
    return state_of({"w": np.eye(4, dtype=np.float32), "p": np.float32(1)}, rule, **options)


# name: what is computed of t (1 in all rows but one), where it is not finite, the primitive, whether in the gradient.
# `p` is a parameter, `h` the hidden layer; every function stands on a line of its own, which the report must name.
FAULTS = {
    "log of 0": (lambda t, p, h: jnp.log(t) * p, 0.0, "log", False),
    "0 / 0": (lambda t, p, h: p * t / t, 0.0, "div", False),
    "x / 0": (lambda t, p, h: p / t, 0.0, "div", False),
    "sqrt at 0": (lambda t, p, h: jnp.sqrt(t * p), 0.0, "div", True),
    "where and sqrt": (lambda t, p, h: jnp.where(t > 0, jnp.sqrt(t * p), p), 0.0, "div", True),
    "sqrt below 0": (lambda t, p, h: p * jnp.sqrt(t), -1.0, "sqrt", False),
    "exp": (lambda t, p, h: p * jnp.exp(t), 1000.0, "exp", False),
    "exp in a softmax": (lambda t, p, h: p * jnp.exp(t) / (1 + jnp.exp(t)), 1000.0, "exp", False),
    "inf - inf": (lambda t, p, h: p * (jnp.where(t > 5, jnp.inf, t) - jnp.where(t > 5, jnp.inf, 0)), 9.0, "sub", False),
    "0 * inf": (lambda t, p, h: p * (jnp.where(t > 5, jnp.inf, t) * jnp.where(t > 5, 0, t)), 9.0, "mul", False),
    "norm at 0": (lambda t, p, h: jnp.linalg.norm(t[:, None] * p * h, axis=-1), 0.0, "div", True),
    "power of 0": (lambda t, p, h: p * t**-1.5, 0.0, "pow", False),
    "power below 0": (lambda t, p, h: p * t**0.5001, -2.0, "pow", False),
    "label": (
        lambda t, p, h: p * jnp.take_along_axis(h, t.astype(int)[:, None], 1, mode="fill")[:, 0],
        7.0,
        "gather",
        False,
    ),
    "mask": (lambda t, p, h: p * jax.nn.softmax(jnp.where(t[:, None] < 5, h, -jnp.inf), -1)[:, 0], 9.0, "sub", False),
    "log1p": (lambda t, p, h: p * jnp.log1p(-(t - 1)), 2.0, "log1p", False),
    "overflow": (lambda t, p, h: p * (t * 3e38), 10.0, "mul", False),
}
VARIANTS = {
    "plain": ({}, {}, False),
    "cut": ({"accumulate": 4}, {}, False),
    "scan": ({}, {}, True),
    "scan, cut, remat": ({"accumulate": 4, "remat": True}, {}, True),
    "bfloat16": ({}, {"precision": "bfloat16"}, False),
    "dropping, cut": ({"accumulate": 4, "on_nonfinite": "drop"}, {}, False),
}


def planted(fault, row, options, setup, in_scan):
    """A step, a state and a batch with a fault in one row."""
    f, value, _, _ = FAULTS[fault]

    def loss_fn(params, batch):
        h, t, p = jnp.tanh(batch["x"] @ params["w"]), batch["t"], params["p"]
        if not in_scan:
            return jnp.mean(h[:, 0] + f(t, p, h))

        def layer(carry, i):
            return carry + f(jnp.where(i == 1, t, jnp.ones_like(t)), p, h), None

        return jnp.mean(jax.lax.scan(layer, h[:, 0], jnp.arange(3))[0])

    x = np.random.default_rng(row).normal(size=(8, 4)).astype(np.float32)
    batch = {"x": x, "t": np.where(np.arange(8) == row, np.float32(value), np.float32(1))}
    state = state_of({"w": np.eye(4, dtype=np.float32), "p": np.float32(0.5)}, key=0, **setup)
    return ts.train_step(loss_fn, **options), state, batch


def check(fault, row, variant):
    options, setup, in_scan = VARIANTS[variant]
    step, state, batch = planted(fault, row, options, setup, in_scan)
    f, _, primitive, in_gradient = FAULTS[fault]
    report = replay(step, state, batch)
    said = fault, variant, row, repr(report)
    assert report.primitive == primitive and report.argument == "", said
    assert report.in_gradient == in_gradient, said
    # the first leaf in order that the fault reaches: p, but where the gradient of h is wrong too and w comes first
    assert report.result == ("gradient of params['p']" if in_gradient else "loss"), said
    assert report.micro_batch == (row % 4 if "accumulate" in options else None), said
    assert report.trips == ((1,) if in_scan else ()), said
    line = f.__code__.co_firstlineno
    assert report.line.startswith(f"{__file__}:{line} "), said
    assert "lambda t, p, h:" in report.code, said
    assert not state.params["w"].is_deleted() and int(state.calls) == 0


@pytest.mark.medium
@pytest.mark.parametrize("fault", medium_if(lambda name: name != "log of 0", ["log of 0", "sqrt at 0", "mask"]))
def test_planted_faults(fault):
    check(fault, 5, "scan, cut, remat")


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_planted_faults_everywhere(variant):
    for row, fault in enumerate(FAULTS):
        check(fault, row % 8, variant)


def log_of_zero(grads, state, params=None):
    return jax.tree.map(lambda g: jnp.log(g - g), grads), state  # the rule's line


@pytest.mark.medium
@pytest.mark.parametrize("accumulate", [1, 3])
def test_faults_of_the_rule(accumulate):
    """Loss and gradients are finite: what the rule makes of them is not, and the step is rejected for that."""
    step = ts.train_step(product, accumulate=accumulate, norms="update")
    x = np.ones((6, 4), np.float32)
    state = two(optax.GradientTransformation(lambda params: (), log_of_zero))
    after, info = step(jax.tree.map(jnp.copy, state), x)
    assert not bool(info.applied) and np.isinf(info.update_norm) and np.isfinite(after.params["p"])
    report = replay(step, state, x)
    assert (report.result, report.primitive, report.argument) == ("new params['p']", "log", "")
    assert "# the rule's line" in report.code and report.micro_batch is None and not report.in_gradient
    sick = two(ts.rules.adam(1e-3))
    moments = jax.tree.map(lambda x: x * jnp.nan if x.dtype == jnp.float32 else x, sick.opt_state)
    report = replay(step, dataclasses.replace(sick, opt_state=moments), x)
    assert report.result == "new params['p']" and report.argument == "state.opt_state[0].mu['p']"
    assert replay(step, two(ts.rules.adam(1e-3)), x).result == ""


@pytest.mark.medium
def test_a_fault_within_a_library_has_its_line():
    """Not that of the call to replay."""
    bounded = optax.chain(optax.scale(1e30), optax.scale(1e30))
    report = replay(STEP, two(bounded), X)
    assert report.result.startswith("new params") and report.primitive == "mul"
    assert "optax" in report.line and __file__ not in report.line


@pytest.mark.medium
def test_faults_of_the_model_state():
    def loss_fn(params, x, model_state):
        return ts.Loss.mean(x @ params["w"], model_state={"seen": jnp.sqrt(model_state["seen"] - 2)})  # here

    state = two(ts.rules.sgd(0.1), model_state={"seen": np.float32(1), "never": np.float32(np.inf)})
    loss = lambda *given: dataclasses.replace(loss_fn(*given), model_state={**loss_fn(*given).model_state, **NEVER})
    report = replay(ts.train_step(lambda params, x, model_state: loss(params, x, model_state)), state, X)
    assert (report.result, report.primitive) == ("new model_state['seen']", "sqrt") and "# here" in report.code
    report = replay(STEP, state, X)
    assert report.result == "", report  # what was infinite before is nobody's fault


@pytest.mark.medium
def test_faults_of_what_was_given():
    step, state, batch = planted("exp", 3, {"accumulate": 4}, {}, False)
    batch = {"x": batch["x"], "t": np.ones(8, np.float32)}
    report = replay(step, state, batch)
    assert report.result == "" and "finite" in repr(report)
    x = batch["x"].copy()
    x[6, 1] = np.nan
    report = replay(step, state, {**batch, "x": x})
    assert (report.argument, report.micro_batch, report.primitive) == ("batch['x']", 2, "")
    assert "nan at [6, 1], 1 of 32" in repr(report)
    sick = state.replace(params={**state.params, "w": state.params["w"].at[0, 1].set(jnp.nan)})
    report = replay(step, sick, batch)
    assert (report.argument, report.micro_batch) == ("state.params['w']", None)
    named = ts.train_step(lambda params, x, model_state, teacher: ts.Loss.mean(x @ params + model_state * teacher))
    state = ts.setup(ts.rules.sgd(0.1), np.ones((4, 1), np.float32), model_state=np.float32(np.inf))
    assert replay(named, state, x[:5], teacher=np.float32(1)).argument == "state.model_state"
    state = state.replace(model_state=np.float32(1))
    assert replay(named, state, x[:5], teacher=np.float32(np.nan)).argument == "extra['teacher']"


@pytest.mark.medium
def test_float16_that_overflows_under_a_loss_scale():
    def loss_fn(params, x):
        return jnp.mean(x @ params["w"])  # the line

    state = ts.setup(ts.rules.sgd(0.1), {"w": np.ones((4, 2), np.float32)}, precision="float16", loss_scale="dynamic")
    state = state.replace(loss_scale=dataclasses.replace(state.loss_scale, scale=jnp.float32(1024)))
    step, x = ts.train_step(loss_fn), np.full((8, 4), 200, np.float32)  # 8 rows of 200 times 1024 / 16: 102400
    after, info = step(jax.tree.map(jnp.copy, state), x)
    assert not bool(info.applied)
    report = replay(step, state, x)
    assert report.in_gradient and report.result == "gradient of params['w']" and "# the line" in report.code
    assert report.primitive == "dot_general"
    gone = replay(step, after.replace(loss_scale=dataclasses.replace(after.loss_scale, scale=jnp.float32(1))), x)
    assert gone.result == ""


@pytest.mark.medium
def test_it_draws_as_that_call_did():
    def loss_fn(params, x, key, mask):
        draw = jax.random.uniform(key, x.shape[:1])
        return ts.Loss.mean(jnp.log(jnp.where(draw > 0.9, 0.0, 1.0)) + x @ params, where=mask)

    step = ts.train_step(loss_fn)
    state = ts.setup(ts.rules.sgd(0.1), np.ones(3, np.float32), key=1)
    x, found = np.ones((4, 3), np.float32), []
    for _ in range(12):
        before = jax.tree.map(jnp.copy, state)
        state, info = step(state, x)
        again = replay(step, before, x)
        assert (again.result == "loss") == (not bool(info.applied)), (int(before.calls), repr(again))
        assert again.primitive in ("", "log")
        found.append(bool(info.applied))
    assert 0 < sum(found) < 12


@pytest.mark.medium
def test_what_is_harmless_is_not_blamed():
    """Infinities that a mask puts in, that cancel, or that are in a branch that is not taken."""

    def loss_fn(params, batch):
        scores = jnp.where(batch["seen"], batch["x"] @ params["w"], -jnp.inf)
        weights = jax.nn.softmax(scores, -1)
        harmless = jnp.where(batch["t"] > 0, 1.0, jnp.exp(1000 * jnp.abs(params["p"]) * jnp.ones(4)))
        return jnp.mean(jnp.log(batch["t"]) * params["p"] + weights[:, 0] + harmless)  # blamed

    seen = np.ones((4, 4), bool)
    seen[:, 2] = False
    batch = {"x": np.ones((4, 4), np.float32), "seen": seen, "t": np.array([1, 2, 3, 4], np.float32)}
    step, state = ts.train_step(loss_fn), state_of({"w": np.eye(4, dtype=np.float32), "p": np.float32(1)})
    assert replay(step, state_of({"w": np.eye(4, dtype=np.float32), "p": np.float32(0)}), batch).result == ""
    batch["t"] = np.array([1, 2, 3, 0], np.float32)
    report = replay(step, state, batch)
    assert report.primitive in ("log", "exp") and report.result == "loss"


@pytest.mark.parametrize("frozen", ["a", "b"])
def test_the_gradient_of_a_frozen_leaf_is_not_blamed(frozen):
    """A step ignores it: the leaf that trains has rejected the call."""
    loss_fn = lambda params, x: jnp.mean(jnp.sqrt(x * params["a"]) + jnp.log1p(jnp.sqrt(x * params["b"])))
    state = ts.freeze(state_of({"a": np.float32(1), "b": np.float32(1)}), frozen)
    report = replay(ts.train_step(loss_fn), state, np.zeros(4, np.float32))
    blamed = f"gradient of params[{'b' if frozen == 'a' else 'a'!r}]"
    assert report.result == blamed
    strict = ts.train_step(loss_fn, on_nonfinite="raise", donate=False)
    with pytest.raises(NonFiniteError, match=re.escape(blamed)):
        strict(state, np.zeros(4, np.float32))
    state = ts.freeze(state, "*")
    assert "are finite" in replay(ts.train_step(loss_fn), state, np.zeros(4, np.float32)).text


@pytest.mark.medium
def test_loops_and_branches():
    def loss_fn(params, x):
        x = jax.lax.fori_loop(0, 6, lambda i, x: x + jnp.log(5.0 - i - (i == 3) * 2), x)  # while or scan
        return jnp.mean(x @ params)

    state = ts.setup(ts.rules.sgd(0.1), np.ones(3, np.float32))
    report = replay(ts.train_step(loss_fn), state, np.ones((2, 3), np.float32))
    assert (report.primitive, report.trips) == ("log", (3,)) and "while or scan" in report.code

    def branching(params, x):
        y = jax.lax.cond(x[0, 0] > 0, lambda x: x / (x - 1), lambda x: x, x)
        return (
            jnp.mean(jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 2), (0, y))[1]) * params.sum()
        )

    report = replay(ts.train_step(branching), state, np.ones((2, 3), np.float32))
    assert (report.primitive, report.trips) == ("div", ()) and "lax.cond" in report.code


REJECTED = Rejected(step=0, calls=0, epoch=0, batch=None, loss_scale=None)


@pytest.mark.parametrize(
    ("wrong", "kind", "text"),
    [
        (lambda: replay(product, two(), X), WrongTypeError, "step at replay"),
        (lambda: replay(STEP, X, two()), WrongTypeError, "The state comes first"),
        (
            lambda: replay(STEP, ts.population(lambda key: two(key=key), 2, key=0), X),
            StateError,
            "one state. Give ts.populations.member",
        ),
        (lambda: REJECTED.of(None), WrongTypeError, r"state at Rejected\.of\(\): got None, expected a TrainState"),
        (lambda: REJECTED.of((two(), None)), WrongTypeError, r"state at Rejected\.of\(\): got tuple of 2"),
    ],
)
def test_wrong_arguments_of_replay(wrong, kind, text):
    with pytest.raises(kind, match=text):
        wrong()


# ------------------------------------------------------------------------------------------------- what fit rejected


def risky(params, batch, key):
    return jnp.mean(jnp.log(batch["t"]) * params["w"] + 0 * jax.random.normal(key, batch["t"].shape))


def run_of(bad_calls, n=24, max_bad=2, rows=4, **options):
    """A run of n batches of which some have a 0: its error, or None, and what callbacks saw."""
    t = np.ones((n, rows), np.float32)
    for call in bad_calls:
        t[call, call % rows] = 0
    seen = []
    state = ts.setup(ts.rules.sgd(0.1), {"w": np.float32(1)}, key=0)
    step = ts.train_step(risky)
    data = [{"t": x, "call": np.full(rows, i)} for i, x in enumerate(t)]
    keep = lambda run: seen.append(list(run.rejected))
    try:
        with pytest.warns(RuntimeWarning, match="rejected") if bad_calls else contextlib.nullcontext():
            options = {"callbacks": keep, "progress": False, "max_bad": max_bad, **options}
            state, _ = ts.fit(step, state, data, epochs=1, **options)
    except ts.errors.NonFiniteError as error:
        return step, error, seen
    return step, state, seen


@pytest.mark.filterwarnings("ignore:step 10 of epoch 0 was rejected")
def test_an_error_says_how_many_calls_came_after_the_last_rejected_one():
    """The loop of a population does not end by itself: members are rejected apart."""
    t = np.ones((24, 4), np.float32)
    t[[9, 10, 11]] = 0
    runs = ts.population(lambda key: ts.setup(ts.rules.sgd(0.1), {"w": np.float32(1)}, key=key), 2)
    data = [{"t": x, "call": np.full(4, i)} for i, x in enumerate(t)]
    with pytest.raises(ts.errors.NonFiniteError, match="is the state 12 calls after it"):
        ts.fit(ts.train_step(risky), runs, data, epochs=1, max_bad=3, steps_per_call=24, progress=False, log_every=24)


@pytest.mark.medium
@pytest.mark.parametrize("reads_late", [False, True])
@pytest.mark.parametrize(
    "per_call", [pytest.param("auto", marks=pytest.mark.medium), pytest.param(5, marks=pytest.mark.medium), None]
)
def test_fit_keeps_the_last_rejected_calls(per_call, reads_late, monkeypatch):
    """Also when the clock says that calls wait too long to be read: no step is applied after the last one."""
    monkeypatch.setattr(fitting, "CALL_SECONDS", 0 if reads_late else 0.05)
    step, error, _ = run_of([3, 9, 10, 11], max_bad=3, steps_per_call=per_call)
    assert isinstance(error, ts.errors.NonFiniteError)
    assert [(kept.step, kept.calls, kept.epoch) for kept in error.rejected] == [(8, 9, 0), (8, 10, 0), (8, 11, 0)]
    for kept in error.rejected:
        assert (kept.batch["call"] == kept.calls).all() and isinstance(kept.batch["t"], np.ndarray)
        state, batch = kept.of(error.state)
        assert int(state.calls) == kept.calls
        report = replay(step, state, batch)
        assert (report.primitive, report.result) == ("log", "loss")
        assert f"at [{kept.calls % 4}]" in repr(report)


def test_rejected_calls_of_a_run_that_went_on():
    _, state, seen = run_of([2, 20], max_bad=5)
    assert int(state.step) == 22 and [kept.calls for kept in seen[-1]] == [2, 20]
    with pytest.raises(StateError, match=r"state at Rejected\.of"):
        seen[-1][0].of(state)
    later, _ = seen[-1][0].of(state, exact=False)
    assert int(later.calls) == 2
    assert run_of([])[2][-1] == []


_ELSEWHERE = """
import sys
import numpy as np
sys.path.insert(0, sys.argv[2])
import test_faults as test
import tsunax as ts
from tsunax.insight.replaying import replay
state = ts.setup(ts.rules.sgd(0.1), {"w": np.float32(5)}, key=7)
like = {"state": state, "batch": {"t": np.ones(4, np.float32), "call": np.ones(4, np.int32)}}
found = ts.exchange.restore(sys.argv[1], like)
print(int(found["state"].calls), float(found["state"].params["w"]), replay(ts.train_step(test.risky), **found))
"""


@pytest.mark.slow
def test_a_rejected_call_is_saved_and_replayed_elsewhere(tmp_path):
    _, error, _ = run_of([5, 6], max_bad=2)
    state, batch = error.rejected[-1].of(error.state)
    ts.exchange.save(tmp_path / "bad.safetensors", {"state": state, "batch": batch})
    command = [sys.executable, "-c", _ELSEWHERE, str(tmp_path / "bad.safetensors"), str(Path(__file__).parent)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.startswith(f"6 {float(state.params['w'])} The loss is ")
    assert "log gave -inf at [2]" in said and "jnp.log(batch" in said


@pytest.mark.medium
def test_a_loss_scale_is_put_back():
    def loss_fn(params, x):
        return jnp.mean(x @ params["w"])

    state = ts.setup(ts.rules.sgd(0.1), {"w": np.ones((4, 2), np.float32)}, precision="float16", loss_scale=1024.0)
    step, data = ts.train_step(loss_fn), [np.full((8, 4), 200, np.float32)] * 3
    with pytest.raises(ts.errors.NonFiniteError) as caught:
        ts.fit(step, state, data, epochs=1, progress=False, max_bad=1)
    before, batch = caught.value.rejected[-1].of(caught.value.state)
    assert float(before.loss_scale.scale) == 1024 and replay(step, before, batch).primitive == "dot_general"


@pytest.mark.medium
def test_the_first_warning_of_a_rejected_step_names_wrong_labels_and_data():
    def classes(params, batch):
        logits = batch[0] * params["w"][None]
        return ts.Loss.mean(ts.losses.softmax_cross_entropy_with_integer_labels(logits, batch[1]))

    labels, x = np.zeros(64, np.int32), toys.X.copy()
    labels[2] = 11
    texts = (
        r"got nan, 1 of 64 labels are none of the 8 classes, first label 11 at \[2\]\. 1 so",
        r"batch has 1 of 512 not",
    )
    x[5, 1] = np.nan
    for loss, batch, text in zip((classes, toys.loss_fn), ((toys.X, labels), x), texts, strict=True):
        with pytest.warns(RuntimeWarning, match=text), pytest.raises(NonFiniteError):
            ts.fit(ts.train_step(loss), toys.state(), [batch], steps=1, progress=False, max_bad=3)


@pytest.mark.medium
@pytest.mark.parametrize("fault", ["log", "gradient", "accumulate"])
def test_labels_are_not_blamed_for_what_they_did_not_do(fault):
    calls = []

    def masked(params, batch):
        jax.debug.callback(lambda: calls.append(0)) if fault == "gradient" else None
        logits = batch[0] * params["w"][None]
        logits = jnp.log(-logits) if fault == "log" else logits + jnp.sqrt(0 * params["w"][None])
        losses = ts.losses.softmax_cross_entropy_with_integer_labels(logits, batch[1])
        return ts.Loss.mean(losses, batch[1] >= 0)

    labels = np.full(64, -100, np.int32)
    labels[::2] = 1  # the others are padding
    step = ts.train_step(masked, accumulate=2 if fault == "accumulate" else 1)
    with pytest.warns(RuntimeWarning) as told, pytest.raises(NonFiniteError):
        ts.fit(step, toys.state(), [(toys.X, labels)], steps=1, progress=False, max_bad=2)
    assert all("labels" not in str(warning.message) for warning in told)
    if fault == "gradient":
        jax.effects_barrier()
        assert len(calls) == 3  # two rejected steps, and the search for the leaf: no run for the labels


@pytest.mark.medium
@pytest.mark.parametrize("bad", [8, 1])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_replay_names_wrong_labels(bad, accumulate):
    def classes(params, batch):
        logits = batch[0] * params["w"][None] + (jnp.nan if bad == 1 else 0)  # not by the labels
        return ts.Loss.mean(ts.losses.softmax_cross_entropy_with_integer_labels(logits, batch[1]))

    labels = np.zeros(64, np.int32)
    labels[3] = bad
    report = ts.replay(ts.train_step(classes, accumulate=accumulate), toys.state(), (toys.X, labels))
    assert report.result == "loss" and report.primitive
    wrong = "In this batch, 1 of 64 labels are none of the 8 classes, first label 8 at [3]."
    assert report.text.endswith(wrong) == (bad == 8)
