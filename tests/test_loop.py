"""`fit`, `iterate`, `run_steps`: the numbers of a plain loop, whatever happens between its steps."""

import contextlib
import dataclasses
import functools
import signal
import threading
import time
import warnings
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tsunax as ts
from tests import gpu_facts, toys
from tests.helpers import assert_trees_close, assert_trees_equal, count_compiles, medium_if
from tsunax import testing
from tsunax._core import stable_text
from tsunax._core.stable_text import words_of
from tsunax.checkpoints.saving import Best
from tsunax.errors import (
    DataError,
    DeviceError,
    HyperparameterError,
    LossError,
    NonFiniteError,
    RowError,
    StateError,
    WrongTypeError,
)
from tsunax.loop import fit as loud_fit
from tsunax.loop import iterate, run_epoch, run_steps
from tsunax.run import callbacks, chunks, fused_loop

fit = functools.partial(loud_fit, progress=False)
RNG = np.random.default_rng(0)
X = RNG.normal(size=(52, 6)).astype(np.float32)
Y = (X @ RNG.normal(size=(6, 3)) + 0.1 * RNG.normal(size=(52, 3))).astype(np.float32)


def init():
    rng = np.random.default_rng(0)
    kernel = lambda i, o: jnp.asarray(rng.normal(size=(i, o)) / i**0.5, jnp.float32)
    return {"hidden": {"kernel": kernel(6, 8)}, "out": {"kernel": kernel(8, 3), "bias": jnp.zeros(3)}}


def predict(params, x):
    x = jnp.tanh(x @ params["hidden"]["kernel"])
    return x @ params["out"]["kernel"] + params["out"]["bias"][None]


def loss_fn(params, batch):
    x, y = batch
    return jnp.mean((predict(params, x) - y) ** 2)


def noisy(params, batch, key=None, model_state=None, mask=None):
    """Everything that a loss function may name, and a metric."""
    x, y = batch
    if key is not None:
        x = x + 0.1 * jax.random.normal(key, x.shape, x.dtype)
    values = jnp.mean((predict(params, x) - y) ** 2, -1)
    seen = {"mean": 0.9 * model_state["mean"] + 0.1 * jnp.mean(x).astype(jnp.float32)}
    return ts.Loss.mean(values, mask, metrics={"worst": jnp.max(values)}, model_state=seen)


RULE = ts.rules.chain(
    ts.rules.clip_by_global_norm(1.0), ts.rules.adam(optax.warmup_cosine_decay_schedule(0.0, 0.05, 3, 40))
)
STEP = ts.train_step(loss_fn)


def fresh():
    return ts.setup(RULE, init())


def data(**kwargs):
    return ts.batches((X, Y), 8, **{"shuffle": True, "seed": 1, **kwargs})


def plainly(step, state, data, steps):
    """The loop that everyone writes."""
    infos = []
    while len(infos) < steps:
        for batch in data:
            state, info = step(state, batch)
            infos.append(jax.device_get(info))
            if len(infos) == steps:
                break
    return state, infos


# ------------------------------------------------------------------------------------------------------- the same bits


def even():
    return data(drop_remainder=True)


def poisoned():
    """Data with a batch in which one row is not a number."""
    x = X.copy()
    x[20] = np.nan
    return ts.batches((x, Y), 8, shuffle=True, seed=1, drop_remainder=True)


NOISY = {"key": 3, "model_state": {"mean": jnp.zeros(())}}


FEATURES = {  # (step, setup, data)
    "plain": (STEP, {}, even),
    "short batches": (STEP, {}, data),
    "everything named": (ts.train_step(noisy), NOISY, even),
    "micro-batches": (ts.train_step(noisy, accumulate=3), NOISY, even),
    "remat": (ts.train_step(loss_fn, remat=True), {}, even),
    "bfloat16": (STEP, {"precision": "bfloat16"}, even),
    "float16": (STEP, {"precision": "float16"}, even),
    "bfloat16 params": (STEP, {"precision": ts.precision.Policy("bfloat16", "bfloat16")}, even),
    "average": (STEP, {"ema": 0.9}, even),
    "rejected": (STEP, {}, poisoned),
    "dropped": (ts.train_step(noisy, accumulate=2, on_nonfinite="drop"), NOISY, poisoned),
    "part": (STEP, {"trainable": "out/**"}, even),
    "window": (STEP, {"rule": ts.rules.accumulate(RULE, every=3)}, even),
    "spikes": (STEP, {"rule": ts.rules.chain(ts.rules.reject_spikes(warmup=5), RULE)}, even),
    "frozen": (STEP, {"freezable": True}, even),
    "plain optax": (STEP, {"rule": optax.adam(0.01)}, even),
}


def prepared(name):
    step, given, make = FEATURES[name]
    given = {"rule": RULE, **given}
    state = ts.setup(given.pop("rule"), init(), **given)
    return step, ts.freeze(state, "hidden/kernel") if name == "frozen" else state, make()


QUICK = ("plain", "dropped", "float16", "window")  # with nearly all that the others have; the rest are slow tests


@pytest.mark.filterwarnings("ignore:step .* was rejected:RuntimeWarning")
@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in FEATURES])
def test_calls_and_events_change_no_bit(name):
    """However many steps go into a call, wherever it is cut; and the plain loop to a few ulp."""
    step, state, batches = prepared(name)
    calls = 19  # past the end of two epochs
    plain, infos = plainly(step, state, batches, calls)
    goal = int(plain.step)
    step, state, batches = prepared(name)
    one, history = fit(step, state, batches, steps=goal, steps_per_call=1, log_every=1)
    loose = 4e-3 if "16" in name else 2e-6  # a rounding to 8 bits may fall to the other side
    assert_trees_close(ts.trainable(one), ts.trainable(plain), rtol=loose, atol=loose)
    taken = [info for info in infos if np.all(info.applied)]
    np.testing.assert_allclose(history["loss"], [info.loss for info in taken], rtol=max(loose, 1e-5))
    if "learning_rate" in history and name != "plain optax":
        rates = [info.hyperparams["learning_rate"] for info in taken]
        np.testing.assert_allclose(history["learning_rate"], rates, rtol=1e-6)
    # in calls of five, with an event after every second step, in three runs that begin in the middle of an epoch
    step, state, batches = prepared(name)
    for until in (goal // 3, goal // 2, goal):
        options = {"steps_per_call": 5, "callbacks": callbacks.every(2, lambda run: None), "log_every": 1}
        state, rows = fit(step, state, batches, steps=until, **options)
    assert_trees_equal(state, one)
    np.testing.assert_array_equal(rows["loss"], history["loss"][-len(rows) :])


def test_the_buffer_and_the_clock_on_the_wall_change_no_bit():
    expected, history = fit(STEP, fresh(), data(), steps=19, steps_per_call=1, log_every=1)
    for per_call in (2, 64, "auto"):
        found, rows = fit(STEP, fresh(), data(), steps=19, steps_per_call=per_call, log_every=1)
        assert_trees_equal(found, expected)
        np.testing.assert_array_equal(rows["loss"], history["loss"])


@pytest.mark.medium
def test_a_step_that_cannot_be_traced_runs_as_it_is():
    def step(state, batch):
        assert isinstance(batch[0], np.ndarray)  # no tracer
        return STEP(state, batch)

    expected, _ = plainly(STEP, fresh(), data(), 15)
    state, history = fit(step, fresh(), data(), steps=15, steps_per_call=None, log_every=4)
    assert_trees_equal(state, expected)
    assert history["step"].tolist() == [1, 4, 8, 12, 15] and history["learning_rate"][-1] > 0


@pytest.mark.medium
def test_a_loop_compiles_once_for_each_shape():
    step = ts.train_step(lambda params, batch: loss_fn(params, batch))
    state = fresh()
    with count_compiles() as compiles:
        state, _ = fit(step, state, data(drop_remainder=True), steps=5, callbacks=callbacks.every(3, lambda run: None))
    assert compiles.compiled.count("train_steps") == 1
    with count_compiles() as compiles:
        fit(step, state, data(drop_remainder=True), steps=40, callbacks=callbacks.every(3, lambda run: None))
    assert compiles.compiles == 0


SETTINGS = {"beta": 1.0}


class Weighted:
    """A loss whose gradient is the number that it multiplies the parameter with."""

    beta = 1.0

    def loss(self, params, batch):
        return self.beta * params["w"] + 0.0 * jnp.sum(batch)


WEIGHTED = Weighted()


def scaled_by_a_global(params, batch):
    return SETTINGS["beta"] * params["w"] + 0.0 * jnp.sum(batch)


def scaled_by_an_object(params, batch):
    return WEIGHTED.loss(params, batch)


CALLS = {
    "fit": lambda step, state, x: fit(step, state, [x], steps=1)[0],
    "run_steps": lambda step, state, x: run_steps(step, state, x[None])[0],
    "run_epoch": lambda step, state, x: run_epoch(step, state, [x])[0],
    "iterate": lambda step, state, x: next(iterate(step, state, [x], steps=1))[0],
}
READERS = {
    "a global": (scaled_by_a_global, lambda beta: SETTINGS.update(beta=beta)),
    "an object": (scaled_by_an_object, lambda beta: setattr(WEIGHTED, "beta", beta)),
    "a method": (WEIGHTED.loss, lambda beta: setattr(WEIGHTED, "beta", beta)),
}


@pytest.mark.parametrize("call, reader", [("fit", name) for name in READERS] + [(c, "a global") for c in CALLS])
def test_a_new_step_reads_the_numbers_of_now_and_an_equal_one_compiles_nothing(call, reader):
    """The gradient is beta, so a step of SGD at rate 1 from 0 ends at -beta."""
    read, write = READERS[reader]
    x = np.ones(2, np.float32)
    try:
        for beta in (3.0, 5.0):
            write(beta)
            make = lambda: ts.setup(ts.rules.sgd(1.0), {"w": jnp.zeros(())})
            state = CALLS[call](ts.train_step(read), make(), x)
            assert float(state.params["w"]) == -beta
            state = make()
            with count_compiles() as compiles:
                CALLS[call](ts.train_step(read), state, x)
            assert compiles.compiled.count("train_steps") == 0
    finally:
        write(1.0)


class Trainer:
    """Its methods are the loss and the step; they read one of its attributes, and others change."""

    def __init__(self):
        self.scale, self.epoch, self.losses = 1.0, 0, []

    def loss(self, params, x):
        return self.scale * jnp.mean((x * params["w"]) ** 2)

    def step(self, state, x):
        return state + self.scale * jnp.sum(x), jnp.sum(x)


def test_what_a_method_does_not_read_may_change():
    trainer, x = Trainer(), np.ones(2, np.float32)
    ends = []
    for scale in (1.0, 1.0, 2.0, 2.0):
        trainer.scale, trainer.epoch = scale, trainer.epoch + 1
        trainer.losses.append(trainer.epoch)
        state = ts.setup(ts.rules.sgd(0.1), {"w": jnp.ones(())})
        with count_compiles() as compiles:
            state, _ = fit(ts.train_step(trainer.loss), state, [x], steps=1)
            total, _ = run_steps(trainer.step, jnp.zeros(()), x[None])
        ends.append((float(state.params["w"]), float(total), compiles.compiled.count("train_steps")))
    assert ends == [
        (pytest.approx(0.8), 2.0, 2), (pytest.approx(0.8), 2.0, 0),
        (pytest.approx(0.6), 4.0, 2), (pytest.approx(0.6), 4.0, 0),
    ]  # fmt: skip


class Config:
    def __init__(self, values):
        self.values = values

    def __getattr__(self, name):
        return self.__dict__["values"][name]  # KeyError where Python expects AttributeError


def test_an_object_that_cannot_be_looked_at_is_equal_to_no_other():
    config, x = Config({"beta": 1.0}), np.ones(2, np.float32)
    loss_fn = lambda params, x: config.beta * jnp.mean(x * params["w"])
    for beta in (1.0, 5.0):
        config.values["beta"] = beta
        state = ts.setup(ts.rules.sgd(1.0), {"w": jnp.zeros(())})
        assert float(fit(ts.train_step(loss_fn), state, [x], steps=1)[0].params["w"]) == -beta


def test_an_average_reads_the_numbers_of_now():
    x, averages = np.ones(2, np.float32), []
    decay = lambda step: SETTINGS["beta"] * jnp.ones(())
    loss_of = lambda params, x: jnp.mean(x * params["w"])
    try:
        for SETTINGS["beta"] in (0.5, 0.25):
            make = lambda: ts.setup(ts.rules.sgd(1.0), {"w": jnp.zeros(())}, ema=decay)
            state, _ = fit(ts.train_step(loss_of), make(), [x] * 2, steps=2)
            expected, step = make(), ts.train_step(loss_of)
            for _ in range(2):
                expected, _ = step(expected, x)
            averages += [float(ts.averaged(s).params["w"]) for s in (state, expected)]
    finally:
        SETTINGS["beta"] = 1.0
    assert averages[::2] == pytest.approx(averages[1::2], rel=1e-6) and averages[0] != averages[2]


def test_large_arrays_that_code_refers_to_are_not_read_whole(monkeypatch):
    rows, sizes, of_array = np.zeros(4_000_000, np.float32), [], stable_text._of_array
    monkeypatch.setattr(stable_text, "_of_array", lambda x: sizes.append(np.size(x)) or of_array(x))
    loss_fn = lambda params, x: jnp.mean(x * params["w"]) * rows[0]
    before = stable_text.code_of(loss_fn, is_exact=True)
    rows[:] = 1
    assert stable_text.code_of(loss_fn, is_exact=True) != before and max(sizes) < 20_000


def scaled_by_settings(step):
    return SETTINGS["beta"] * jnp.ones(())


def scaled_updates(grads, state, params=None):
    return jax.tree.map(lambda g: -SETTINGS["beta"] * g, grads), state


RULES = {
    "schedule": lambda: ts.rules.sgd(scaled_by_settings),
    "rule": lambda: optax.GradientTransformation(no_opt_state, scaled_updates),
}


def no_opt_state(params):
    return ()


@pytest.mark.parametrize("name", RULES)
def test_a_new_state_reads_the_numbers_of_now(name):
    """Also with the step of before: another number in the functions of a rule is another rule."""
    step = ts.train_step(Weighted().loss)
    x = np.ones(2, np.float32)
    try:
        for beta in (3.0, 5.0):
            SETTINGS["beta"] = beta
            make = lambda: ts.setup(RULES[name](), {"w": jnp.zeros(())})
            assert float(step(make(), x)[0].params["w"]) == -beta
            assert float(fit(step, make(), [x], steps=1)[0].params["w"]) == -beta
            assert make().plan is make().plan
            state = make()
            assert state.plan.references not in words_of(state.plan)  # other processes have other ids
    finally:
        SETTINGS["beta"] = 1.0


@pytest.mark.medium
def test_convolutions_in_the_loop():
    x = RNG.normal(size=(24, 8, 8, 2)).astype(np.float32)
    kernels = {"a": 0.3 * jax.random.normal(jax.random.key(1), (3, 3, 2, 4))}

    def conv_loss(params, x):
        out = jax.lax.conv_general_dilated(x, params["a"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jnp.mean(jnp.tanh(out) ** 2)

    step = ts.train_step(conv_loss)
    state, _ = fit(step, ts.setup(ts.rules.sgd(0.1), kernels), ts.batches(x, 8), steps=6)
    expected, _ = plainly(step, ts.setup(ts.rules.sgd(0.1), kernels), ts.batches(x, 8), 6)
    assert_trees_close(state.params, expected.params, rtol=1e-5, atol=1e-6)


def test_on_a_gpu_the_loop_is_one_cuda_graph(monkeypatch):
    """The compiler's options are checked here, what it makes of them in `test_topologies.py`."""
    data = [(X[:4], Y[:4])] * 3
    run = lambda: fit(ts.train_step(loss_fn, remat=True), fresh(), data, epochs=1)[0]
    expected, compiled, jit = run(), [], jax.jit

    def spied_jit(function, **options):
        compiled.append((getattr(function, "__name__", ""), options.get("compiler_options")))
        return jit(function, **options)

    fused_loop._shared.cache_clear()
    monkeypatch.setattr(fused_loop, "_platform_of", lambda state: "gpu")
    monkeypatch.setattr(jax, "jit", spied_jit)
    state = run()
    assert compiled.count(("train_steps", fused_loop.ONE_GRAPH)) == 1  # a CPU ignores them
    assert_trees_equal(state, expected)
    monkeypatch.undo()
    assert (fused_loop._platform_of(state) == "gpu") == gpu_facts.IS_GPU


def test_an_xla_without_the_options_of_one_graph_compiles_without_them(monkeypatch):
    fused_loop._options_of_loop.cache_clear()
    monkeypatch.setattr(fused_loop, "ONE_GRAPH", {"xla_gpu_no_such_option": "1"})
    assert fused_loop._options_of_loop() == {}
    fused_loop._options_of_loop.cache_clear()
    monkeypatch.undo()
    assert fused_loop._options_of_loop() is fused_loop.ONE_GRAPH


def test_options_of_the_compiler_are_for_programs_of_their_own(monkeypatch):
    """XLA takes them from the outermost `jit` only, and a state that is closed over has devices."""
    on_gpu = SimpleNamespace(sharding=SimpleNamespace(device_set=[SimpleNamespace(platform="gpu")]))
    monkeypatch.setattr(fused_loop.trees, "is_placed", lambda x: x is on_gpu)
    answers = [fused_loop._platform_of([on_gpu]), fused_loop._platform_of([np.ones(2)])]
    jax.jit(lambda x: answers.append(fused_loop._platform_of([on_gpu])) or x)(1.0)
    assert answers == ["gpu", jax.devices()[0].platform, ""]


@pytest.mark.medium
def test_any_state_and_any_step():
    """A pair of networks that train against each other, and a plain JAX function."""

    def step(states, batch):
        one, two = states
        one, info = STEP(one, batch)
        two, other = STEP(two, (batch[0], batch[1] - predict(one.params, batch[0])))
        return (one, two), {"one": info, "two": other, "gap": jnp.abs(info.loss - other.loss)}

    make = lambda: (fresh(), ts.setup(ts.rules.sgd(0.1), init()))
    states, history = fit(step, make(), even(), steps=9, log_every=3)
    expected, _ = plainly(jax.jit(step), make(), even(), 9)
    assert_trees_close(states[1].params, expected[1].params, rtol=1e-5, atol=1e-6)
    assert {"one/loss", "two/grad_norm", "gap"} <= set(history.names)

    def descend(params, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    params = init()
    found, history = fit(descend, params, data(shuffle=False), steps=5, log_every=1)
    expected = params
    for batch, _ in zip(data(shuffle=False), range(5), strict=False):
        expected, _ = jax.jit(descend)(expected, batch)
    assert_trees_close(found, expected, rtol=1e-6, atol=1e-7)
    assert history["loss"].shape == (5,)  # and the params that were given are still there: `expected` began with them


@pytest.mark.medium
@pytest.mark.parametrize("per_call", (1, 3))
@pytest.mark.parametrize("wrapped", ("pure", "compiled"))
def test_what_a_function_changes_that_a_step_only_reads(wrapped, per_call):
    """The live numbers and a leaf that is not trained: a policy of one's own, and a slow copy."""

    def step(state, batch):
        rate = ts.hyperparams(state)["learning_rate"]
        new, info = STEP.pure(state, batch, {}) if wrapped == "pure" else STEP(state, batch)
        new = ts.adjust(new, learning_rate=jnp.where(info.applied, rate / 2, rate))
        slow = 0.9 * state.params["slow"] + 0.1 * new.params["out"]["bias"]
        return dataclasses.replace(new, params={**new.params, "slow": slow}), info

    params = init() | {"slow": jnp.ones(3), "still": jnp.ones(2)}
    make = lambda: ts.setup(ts.rules.sgd(0.4), params, key=0, trainable=["hidden/**", "out/**"])
    start = make()
    state, _ = fit(step, start, even(), steps=6, log_every=3, steps_per_call=per_call)
    assert state.params["still"] is start.params["still"] and state.key is start.key
    expected, _ = plainly(jax.jit(step), make(), even(), 6)
    assert_trees_close(state.params, expected.params, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(state.numbers.values, expected.numbers.values)
    assert ts.hyperparams(state) == {"learning_rate": 0.4 / 2**6}


# ----------------------------------------------------------------------------------------------------------- bare loops


def test_run_steps():
    stacked = (X[:48].reshape(6, 8, 6), Y[:48].reshape(6, 8, 3))
    state, infos = run_steps(STEP, fresh(), stacked)
    expected, seen = plainly(STEP, fresh(), data(shuffle=False), 6)
    assert_trees_close(state.params, expected.params, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(infos.loss, [info.loss for info in seen], rtol=1e-5)
    np.testing.assert_allclose(
        infos.hyperparams["learning_rate"], [i.hyperparams["learning_rate"] for i in seen], rtol=1e-6
    )
    assert infos.applied.all() and infos.verdict.dtype == jnp.int32
    cut = fresh()
    for rows in (slice(0, 1), slice(1, 6)):
        cut, infos = run_steps(STEP, cut, jax.tree.map(lambda x, rows=rows: x[rows], stacked))
        assert infos.loss.shape == (rows.stop - rows.start,)
    assert_trees_equal(cut, state)
    with pytest.raises(StateError, match="donated"):
        run_steps(STEP, _used(), stacked)
    with pytest.raises(StateError, match=r"batches at run_steps\(\): got .*, expected arrays with one first axis"):
        run_steps(STEP, state, (np.ones((2, 3)), np.ones((3, 3))))


def _used():
    state = fresh()
    STEP(state, (X[:8], Y[:8]))
    return state


def test_run_epoch():
    expected, rows = fit(STEP, fresh(), data(), epochs=2, log_every=1)
    used, state, losses = data(), fresh(), []
    for _ in range(2):
        state, infos = run_epoch(STEP, state, used)
        losses.extend(np.asarray(infos.loss))
    assert_trees_equal(state, expected)
    np.testing.assert_array_equal(losses, rows["loss"].astype(np.float32))


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: [*x], ts.prefetch], ids=["batches", "list", "prefetch"])
def test_run_epoch_reads_as_a_for_does(wrap):
    x, state = np.arange(8.0, dtype=np.float32).reshape(4, 2), {"w": jnp.zeros(())}
    step = lambda state, batch: (state, {"first": batch[0]})

    def seen(read, look):
        used = wrap(ts.batches(x.ravel(), 2, shuffle=True, seed=1))
        look(used)
        return read(used), read(used)

    def put(used):
        if hasattr(used, "set_state"):
            used.set_state({"epoch": 2, "position": 3})

    plain = lambda data: [float(batch[0]) for batch in data]
    epoch = lambda data: run_epoch(step, state, data)[1]["first"].tolist()
    for look in (lambda used: None, lambda used: next(iter(used)), put):
        assert seen(epoch, look) == seen(plain, look)


@pytest.mark.parametrize(
    ("call", "text"),
    {
        "a loss": (lambda: fit(loss_fn, fresh(), data(), steps=1), r"step: got loss_fn\(params, batch\), a loss"),
        "steps of a loss": (lambda: run_steps(loss_fn, fresh(), (X[None], Y[None])), r"step: got loss_fn\(params"),
        "steps of params": (lambda: run_steps(STEP, init(), (X[None], Y[None])), r"state at run_steps\(\): got dict"),
        "epoch of none": (lambda: run_epoch(None, fresh(), data()), r"step at run_epoch\(\): got None"),
        "iterate by none": (lambda: next(_iterate(None)), r"steps_per_call at iterate\(\): got None"),
        "iterate by name": (lambda: next(_iterate("auto")), r"steps_per_call at iterate\(\): got 'auto'"),
        "iterate by 0": (lambda: next(_iterate(0)), r"steps_per_call at iterate\(\): got 0, expected an int ≥ 1"),
        "sent": (lambda: [run := _iterate(1), next(run), run.send(init())], r"state at iterate\(\): got dict with"),
    }.values(),
)
def test_wrong_arguments_of_the_smaller_loops(call, text):
    with pytest.raises((WrongTypeError, HyperparameterError), match=text):
        call()


def _iterate(per_call):
    return iterate(STEP, fresh(), data(), steps=4, steps_per_call=per_call)


@pytest.mark.medium
@pytest.mark.parametrize("per_call", ["auto", None])
def test_metrics_with_a_number_for_each_row(per_call):
    """The short batch at the end of an epoch has fewer of them."""

    def step(state, batch):
        new, info = STEP.pure(state, batch, {})
        return new, {"loss": info.loss, "row": errors(state.params, batch)}

    step = jax.jit(step) if per_call is None else step
    errors = lambda params, batch: jnp.mean((predict(params, batch[0]) - batch[1]) ** 2, -1)
    short = lambda: ts.batches((X[:12], Y[:12]), 8)
    _, rows = fit(step, fresh(), short(), epochs=2, log_every=1, steps_per_call=per_call)
    expected = errors(init(), (X[:8], Y[:8]))
    np.testing.assert_allclose([rows[f"row/{i}"][0] for i in range(8)], expected, rtol=1e-6)
    assert np.isfinite(rows["row/3"]).all() and np.isnan(rows["row/4"]).tolist() == [False, True, False, True]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Spread:
    """A metric that computes to a dict: of a number, an array, and a tuple."""

    total: jax.Array
    squares: jax.Array

    def merge(self, other):
        return Spread(self.total + other.total, self.squares + other.squares)

    def compute(self):
        return {"total": self.total, "both": jnp.stack([self.total, self.squares]), "pair": (self.total, self.squares)}


@pytest.mark.parametrize("per_call", [2, None])
def test_names_of_a_metric_with_several_numbers_are_those_of_an_evaluation(per_call):
    def loss_fn(params, batch):
        loss = jnp.mean((predict(params, batch[0]) - batch[1]) ** 2)
        return ts.Loss(loss * 8, 8.0, {"spread": Spread(loss, loss**2)})

    _, history = fit(ts.train_step(loss_fn), fresh(), data(), steps=1, steps_per_call=per_call)
    numbers = ts.evaluate(ts.eval_step(loss_fn), fresh(), [(X[:8], Y[:8])])
    names = [name for name in numbers if name != "loss"]
    assert names == [f"spread/{name}" for name in ("both/0", "both/1", "pair/0", "pair/1", "total")]
    assert {*names} < {*history.names}

    def step(state, batch, wrap):
        return state, wrap(jnp.mean(batch))

    for info, name in {tuple: "loss/1", lambda x: {"twice": list(x)}: "twice/1"}.items():
        several = functools.partial(step, wrap=lambda x, info=info: info((x, 2 * x)))
        rows = fit(several, X[0], [X[:8]] * 3, steps=3, log_every=1, steps_per_call=per_call)[1]
        np.testing.assert_allclose(rows[name], np.full(3, 2 * X[:8].mean()), rtol=1e-5)
    both = lambda state, batch: (state, (STEP.pure(fresh(), (X[:8], Y[:8]), {})[1], {"mean": jnp.mean(batch)}))
    _, history = fit(both, X[0], [X[:8]] * 3, steps=3, log_every=1, steps_per_call=per_call)
    assert {"0/loss", "0/grad_norm", "1/mean"} <= {*history.names} and "loss/0/0" not in history.names
    with pytest.raises(RowError, match="'loss' at step: got Spread with total, squares, expected numbers"):
        fit(functools.partial(step, wrap=lambda x: Spread(x, x)), X[0], [X[:8]], steps=1, steps_per_call=per_call)


SPARED = {  # a call with bad rows in its batch at step 3
    "iterate": lambda step, data: list(iterate(step, fresh(), data, steps=6)),
    "iterate, 4 a call": lambda step, data: list(iterate(step, fresh(), data, steps=6, steps_per_call=4)),
    "run_epoch": lambda step, data: run_epoch(step, fresh(), data),
    "run_steps": lambda step, data: run_steps(step, fresh(), jax.tree.map(lambda *x: np.stack(x), *data)),
    "fit": lambda step, data: fit(step, fresh(), data, steps=6),
    "fit, single calls": lambda step, data: fit(step, fresh(), data, steps=6, steps_per_call=None),
}


@pytest.mark.parametrize("name", SPARED)
def test_every_loop_raises_at_a_rejected_step_if_the_step_does(name):
    """Under "skip" all of them go on."""
    batches = [(X[i : i + 8], Y[i : i + 8]) for i in range(0, 48, 8)]
    batches[3] = (np.full_like(X[:8], np.nan), Y[:8])
    with pytest.raises(NonFiniteError, match=r"was rejected: .*batch.0. has 48 of 48 not finite") as caught:
        SPARED[name](ts.train_step(loss_fn, on_nonfinite="raise"), batches)
    assert int(caught.value.state.rejected) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        SPARED[name](STEP, batches)


@pytest.mark.parametrize("per_call", [None, 4])
@pytest.mark.parametrize("is_population", [False, True])
def test_what_a_run_that_raises_leaves_does_not_depend_on_its_calls(is_population, per_call):
    batches = [(X[i : i + 8], Y[i : i + 8]) for i in range(0, 48, 8)]
    batches[3] = (np.full_like(X[:8], np.nan), Y[:8])
    ends = []

    class Part(callbacks.Part):
        def end(self, run, error):
            ends.append((run.step, float(jnp.sum(run.state.params["out"]["bias"]))))

    step = ts.train_step(loss_fn, on_nonfinite="raise")
    state = ts.population(lambda key: fresh(), 2, key=0) if is_population else fresh()
    with pytest.raises(NonFiniteError, match=f"step {3 + is_population} of epoch 0 was rejected: loss") as caught:
        fit(step, state, batches, steps=6, steps_per_call=per_call, callbacks=Part(), log_every=1)
    error = caught.value
    assert not getattr(error, "__notes__", []) and error.state is not None
    assert [mark[0] for mark in error.history.marks if mark[1] == "rejected"] == [3 + is_population]
    assert error.history["step"].tolist() == [1, 2, 3]
    assert len(error.rejected) == (0 if is_population else 1)
    assert ends[0][0] == 3 + is_population and np.isfinite(ends[0][1])


@pytest.mark.parametrize("kind", ["data", "resident", "generator"])
def test_iterate_yields_every_few_steps_and_at_the_end_of_an_epoch(kind):
    kinds = {
        "data": lambda: data(drop_remainder=True),
        "resident": lambda: data(drop_remainder=True, device=True),
        "generator": lambda: ((X[:8], Y[:8]) for _ in range(18)),
    }
    steps = [int(state.step) for state, _ in iterate(STEP, fresh(), kinds[kind](), steps=18, steps_per_call=4)]
    assert steps == ([4, 8, 12, 16, 18] if kind == "generator" else [4, 6, 10, 12, 16, 18])


def test_counts_of_numpy_are_counts():
    steps = []
    every = callbacks.every(np.int64(3), lambda run: steps.append((run.event, run.step)))
    state, history = fit(
        STEP, fresh(), data(), steps=np.int64(7), log_every=np.int64(2), callbacks=every, max_bad=np.int32(3)
    )
    assert (int(state.step), steps) == (7, [("step", 3), ("step", 6)])
    assert history["step"].tolist() == [1, 2, 4, 6, 7]


def test_a_call_has_no_more_room_than_steps_up_to_a_boundary():
    limits = chunks.Limits(100, interval=4)
    assert chunks.buffer_size(1 << 20, limits) == 4
    assert chunks.buffer_size(1 << 20, chunks.Limits(100)) == 100


def test_an_error_of_a_logger_names_the_step_of_its_row():
    def log(row, step):
        if step == 4:
            raise OSError("full")

    with pytest.raises(OSError, match="full") as caught:
        fit(STEP, fresh(), data(), steps=9, log_every=2, logger=log)
    assert any("at step 4" in note for note in caught.value.__notes__)


@pytest.mark.medium
@pytest.mark.parametrize("kind", [list, tuple, lambda data: data])
def test_a_goal_in_steps_that_is_the_end_of_an_epoch(kind):
    seen = []
    fit(STEP, fresh(), kind(data()), steps=14, callbacks=[lambda run: seen.append((run.event, run.step))])
    assert ("epoch", 7) in seen and ("epoch", 14) in seen and seen[-1] == ("end", 14)


@pytest.mark.parametrize("per_call", [1, 4])
def test_iterate(per_call):
    expected, _ = fit(STEP, fresh(), data(), steps=9)
    seen = []
    for state, info in iterate(STEP, fresh(), data(), steps=9, steps_per_call=per_call):
        seen.append((int(state.step), float(info.loss)))
    assert_trees_equal(state, expected)
    # the epoch ends at 7
    assert [step for step, _ in seen] == ([*range(1, 10)] if per_call == 1 else [4, 7, 9])


def test_iterate_takes_a_state_back():
    loop = iterate(STEP, fresh(), data(), steps=4)
    next(loop)
    for _ in range(3):
        state, _ = loop.send(fresh())
    assert int(state.step) == 1


def test_an_iterate_that_is_deleted_moves_no_data():
    train_data = data()
    loop = iterate(STEP, fresh(), train_data, steps=100)
    next(loop)
    train_data.set_state({"epoch": 0, "position": 0})
    loop = iterate(STEP, fresh(), train_data, steps=100)  # the first one is deleted here
    next(loop)
    assert train_data.get_state() == {"epoch": 0, "position": 1}
    fit(STEP, fresh(), train_data, epochs=3)
    place = train_data.get_state()
    del loop
    assert train_data.get_state() == place


def test_a_callback_may_be_wrapped():
    def with_list(f):
        @functools.wraps(f)
        def call(run):
            return f(run, steps)

        return call

    @with_list
    def note(run, steps):
        steps.append(run.step)

    steps = []
    fit(STEP, fresh(), data(), steps=4, callbacks=[note, callbacks.every(2, note)])
    assert steps[-1] == 4 and 2 in steps


def follow_devices(train):
    """`train(step, state, data, move)` with an `extra`; the state moves to the second device at step 2."""
    step = ts.train_step(lambda params, batch, scale: scale * jnp.mean((params["w"][None] - batch) ** 2))
    state = ts.shard(ts.setup(ts.rules.sgd(0.1), {"w": jnp.zeros(2)}), ts.mesh(devices=jax.devices()[:2]))
    state = train(step, state, ts.batches(np.ones((16, 2), np.float32), 4), lambda s: ts.to_device(s, jax.devices()[1]))
    assert state.params["w"].devices() == {jax.devices()[1]}
    np.testing.assert_allclose(state.params["w"], 1 - 0.8**6, rtol=1e-6)  # by hand: w ← w + 0.2 (1 - w), six times


def test_extra_follows_a_state_that_a_callback_moves():
    def train(step, state, data, move):
        moving = callbacks.every(2, lambda run: move(run.state) if run.step == 2 else None)
        return fit(step, state, data, steps=6, extra={"scale": jnp.float32(2.0)}, callbacks=moving)[0]

    follow_devices(train)


def test_extra_and_batches_follow_a_state_that_is_sent_to_iterate():
    def train(step, state, data, move):
        loop = iterate(step, state, data, steps=6, steps_per_call=2, scale=jnp.float32(2.0))
        state, _ = loop.send(move(next(loop)[0]))
        return next(loop)[0]

    follow_devices(train)


class Counting:
    """A loader with a position: three batches of four rows, then batches of three."""

    def __init__(self):
        self.place = 0

    def __iter__(self):
        while self.place < 6:
            self.place += 1
            yield np.full((4 if self.place <= 3 else 3, 2), self.place, np.float32)

    def get_state(self):
        return {"place": self.place}

    def set_state(self, state):
        self.place = state["place"]


@pytest.mark.parametrize("train", ["iterate", "run_epoch"])
def test_a_loop_that_fails_gives_back_a_batch_that_it_had_read_ahead(train):
    is_third = lambda batch: jnp.where(batch[0, 0] == 3, jnp.nan, 1.0)
    step = ts.train_step(lambda params, batch: is_third(batch) * jnp.sum(params["w"] ** 2), on_nonfinite="raise")
    state, loader = ts.setup(ts.rules.sgd(0.1), {"w": jnp.zeros(2)}), Counting()
    with pytest.raises(NonFiniteError):
        if train == "iterate":
            next(iterate(step, state, loader, steps=6, steps_per_call=4))
        else:
            run_epoch(step, state, loader)
    assert loader.place == 3  # the batch of three rows, which ended the call, comes next


# ---------------------------------------------------------------------------------------------------------------- goals


def test_goals():
    state, history = fit(STEP, fresh(), data(), epochs=2)
    assert int(state.step) == 14 and history["epoch"].tolist() == [0, 1, 1]
    with pytest.warns(
        UserWarning, match=r"steps=14 counts from the beginning of training, and the run is at step 14 already"
    ):
        same, _ = fit(STEP, state, data(), steps=14)
    assert same is state
    used = data()
    state, _ = fit(STEP, state, used, epochs=1)
    with pytest.warns(UserWarning, match="at epoch 1 already"):
        fit(STEP, state, used, epochs=1)


def test_rejected_steps_do_not_count():
    with pytest.warns(
        RuntimeWarning, match=r"step \d+ of epoch 0 was rejected \(loss nan\): loss: got nan, batch\[0\] .*\. 1 so far"
    ):
        state, history = fit(STEP, fresh(), poisoned(), steps=14, log_every=1)
    assert int(state.step) == 14 and int(state.calls) == 16 and history["rejected"][-1] == 2
    assert [name for _, name, _ in history.marks] == ["rejected", "rejected"]
    assert history["step"].tolist() == list(range(1, 15)) and np.all(np.isfinite(history["loss"]))


@pytest.mark.filterwarnings("ignore:step .* was rejected:RuntimeWarning")
@pytest.mark.parametrize("per_call", medium_if(lambda n: n != 3, [1, 3, 64]))
def test_too_many_rejected_in_a_row(per_call):
    good, bad = [(X[:8], Y[:8])] * 3, [(X[:8] * np.nan, Y[:8])] * 9
    with pytest.raises(
        NonFiniteError, match=r"step 3 of epoch 0 was rejected: loss: got nan, batch\[0\] .*; the last of 4 in a row"
    ) as caught:
        fit(STEP, fresh(), good + bad, steps=20, max_bad=4, steps_per_call=per_call)
    expected, _ = fit(STEP, fresh(), good, steps=3)
    assert_trees_equal(caught.value.state.params, expected.params)
    assert caught.value.history.marks[0][1] == "rejected"
    with pytest.raises(NonFiniteError, match="on_nonfinite='raise'"):
        fit(ts.train_step(loss_fn, on_nonfinite="raise"), fresh(), good + bad, steps=20)
    # some between good ones are no row
    mixed = [batch for pair in zip(bad[:6], good * 2, strict=True) for batch in pair]
    fit(STEP, fresh(), mixed, steps=6, max_bad=2, steps_per_call=per_call)


def test_only_the_option_that_was_given_is_blamed():
    bad = [(X[:8] * np.nan, Y[:8])]
    for policy, said in (("skip", "max_bad=1"), ("raise", "on_nonfinite='raise'")):
        step = ts.train_step(loss_fn, on_nonfinite=policy)
        with pytest.raises(NonFiniteError, match=rf"the first at \[0, 0\]; {said}\. "):
            fit(step, fresh(), bad, steps=1, max_bad=1)


def test_a_call_has_no_room_for_more_than_is_left():
    batches = [(X[:8], Y[:8])] * 2
    state, _ = fit(STEP, fresh(), batches, steps_per_call=10**9, steps=2)
    expected, _ = fit(STEP, fresh(), batches, steps=2)
    assert_trees_equal(state.params, expected.params)
    *_, (state, _) = iterate(STEP, fresh(), batches, steps_per_call=10**9, steps=2)
    assert_trees_equal(state.params, expected.params)


@pytest.mark.medium
def test_the_leaf_is_named():
    def blows_up(params, batch):
        return loss_fn(params, batch) + jnp.sum(jnp.sqrt(params["out"]["bias"] * 0))  # its gradient is 0 · inf

    with (
        pytest.warns(RuntimeWarning, match="gradient norm: got nan"),
        pytest.raises(NonFiniteError, match=r"gradient of params\['out'\]\['bias'\], shape \(3,\): got nan"),
    ):
        fit(ts.train_step(blows_up), fresh(), data(), steps=20, max_bad=2)


@pytest.mark.medium
def test_a_loss_scale_may_look_for_its_value():
    """16 rejected calls in a row bring 2^24 down to where float16 holds the gradient: no reason to give up."""
    scale = ts.precision.LossScale(2.0**24)
    big = lambda params, batch: loss_fn(params, batch) * 64
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = ts.setup(RULE, init(), precision="float16", loss_scale=scale)
        state, history = fit(ts.train_step(big), state, data(), steps=5, max_bad=3)
    assert int(state.step) == 5 and int(state.rejected) > 3 and history["loss_scale"][-1] < 2.0**24


# ------------------------------------------------------------------------------------------------- events and callbacks


def test_the_order_of_events():
    seen = []
    note = lambda name: lambda *args, **kwargs: seen.append((name, kwargs.get("step", getattr(args[0], "step", None))))

    def evaluate(state):
        note("evaluate")(state)
        return {"val/loss": 1.0}

    def bare(run):
        seen.append((run.event, run.step))

    every = callbacks.every(4, lambda run: seen.append(("every 4", run.step)))
    options = {"evaluate": evaluate, "evaluate_every": 8, "callbacks": [every, bare], "logger": note("logger")}
    _, history = fit(STEP, fresh(), data(), steps=16, log_every=5, **options)
    flat = [(name, int(step)) for name, step in seen]
    assert flat[:4] == [("start", 0), ("logger", 1), ("every 4", 4), ("log", 5)]
    at = flat.index(("evaluate", 8))
    assert flat[at : at + 4] == [("evaluate", 8), ("every 4", 8), ("evaluate", 8), ("logger", 8)]
    assert [s for name, s in flat if name == "epoch"] == [7, 14]
    assert [s for name, s in flat if name == "logger"] == [1, 5, 8, 10, 15, 16]
    assert flat[-2:] == [("end", 16), ("logger", 16)]  # one row of the last step, whatever the end adds
    assert history.series("val/loss")[0].tolist() == [8, 16] and history["step"].tolist() == [1, 5, 8, 10, 15, 16]


def columns(history, leave=()):
    """Every column but the rates, which are times."""
    names = [name for name in ["step", *history.names] if not name.endswith("_per_second")]
    return {name: history[name].tolist() for name in names if name not in leave}


@pytest.mark.parametrize("per_call", [1, None, "auto"])
def test_the_last_step_has_its_row(per_call):
    make = lambda: fresh()
    seen, whole = [], fit(STEP, make(), data(), steps=23, log_every=1, steps_per_call=per_call)[1]
    logger = lambda row, step: seen.append((step, row["loss"]))
    _, history = fit(STEP, make(), data(), steps=23, steps_per_call=per_call, logger=logger)
    assert history["step"].tolist() == [1, 10, 20, 23] and history.last("loss") == whole.last("loss")
    assert seen == [*zip([1, 10, 20, 23], history["loss"].tolist(), strict=True)]
    given = {"log_every": 10, "steps_per_call": per_call}
    _, history = fit(STEP, make(), data(), epochs=2, **given)  # nobody knew where that is
    assert history["step"].tolist() == [1, 10, 14] and history.last("loss") == whole["loss"][13]
    stop = callbacks.every(12, lambda run: run.stop("enough"))
    evaluate = lambda state: {"val/loss": 1.0}
    seen.clear()
    logger = lambda row, step: seen.append((step, "loss" in row, "val/loss" in row))
    options = {"evaluate": evaluate, "evaluate_every": 6, "callbacks": [stop], "logger": logger, **given}
    _, history = fit(STEP, make(), data(), steps=30, **options)
    assert history.newest("loss") == (12, whole["loss"][11])
    assert seen == [(1, True, False), (6, False, True), (10, True, False), (12, True, True)]


@pytest.mark.parametrize("per_call", [1, None])
def test_the_last_row_has_the_hyperparameters_that_its_step_had(per_call):
    def stop(run):
        run.stop("enough")
        return ts.adjust(run.state, learning_rate=0.5)

    given = {"steps": 9, "steps_per_call": per_call, "callbacks": callbacks.every(7, stop)}
    rates = fit(STEP, fresh(), data(), **given)[1].series("learning_rate")
    whole = fit(STEP, fresh(), data(), steps=7, log_every=1)[1]
    assert rates[0].tolist() == [1, 7]
    np.testing.assert_allclose(rates[1], whole["learning_rate"][[0, 6]], rtol=1e-6)


def test_the_history_of_a_run_that_goes_on_is_that_of_an_uninterrupted_one(tmp_path):
    whole = fit(STEP, fresh(), data(), steps=23)[1]
    batches, state, history = data(), fresh(), None
    for steps in (4, 7, 10, 16, 23):
        state, history = fit(STEP, state, batches, steps=steps, history=history)
        assert history["step"][-1] == steps
    assert columns(history) == columns(whole)
    for steps in (4, 7, 10, 16, 23):
        _, history = fit(STEP, fresh(), data(), steps=steps, checkpoint=tmp_path)
    assert columns(history) == columns(whole)


@pytest.mark.medium
def test_rates_are_of_one_stretch_and_leave_compiling_out():
    def slow(state):
        time.sleep(0.3)
        return {"val/loss": 1.0}

    def slowly(params, batch):
        wait = lambda _: (time.sleep(0.005), np.float32(0))[1]
        zero = jax.pure_callback(wait, jax.ShapeDtypeStruct((), jnp.float32), jnp.sum(batch[0]))
        return zero + loss_fn(params, batch)

    step = ts.train_step(slowly)
    _, history = fit(step, fresh(), even(), steps=60, log_every=1, evaluate=slow, evaluate_every=20, steps_per_call=4)
    rates, examples = history["steps_per_second"], history["examples_per_second"]
    np.testing.assert_allclose(examples, 8 * rates, rtol=1e-6)  # NaN where a row has none
    assert np.isnan(rates[0]) and rates[-1] > 50  # five milliseconds a step and a little more
    assert np.nanmax(rates) <= 250, rates


def test_rates_count_steps_and_not_calls_that_only_gather():
    rule = ts.rules.accumulate(ts.rules.sgd(0.1), every=4)
    _, history = fit(ts.train_step(loss_fn), ts.setup(rule, init()), even(), steps=40, log_every=1, steps_per_call=8)
    rates, examples = history["steps_per_second"], history["examples_per_second"]
    np.testing.assert_allclose(examples[-1], 4 * 8 * rates[-1], rtol=1e-6)  # four batches of eight rows a step


@pytest.mark.medium
def test_a_compile_is_seen_by_a_step_that_shares_its_loop_with_an_equal_one():
    other = lambda params, batch: loss_fn(params, batch)
    for rows, is_new in ((8, True), (8, False), (4, True)):
        batches = [(X[:rows], Y[:rows])] * 4
        _, history = fit(ts.train_step(other), fresh(), batches, steps=4)
        assert (history.time["compile"] > 0) == is_new


@pytest.mark.medium
def test_warnings_name_the_line_that_called_fit():
    def lines(call):
        with pytest.warns((UserWarning, RuntimeWarning)) as told:
            call()
        return {(one.filename, one.lineno) for one in told}

    state = fit(STEP, fresh(), data(), steps=2)[0]
    calls = [
        lambda: loud_fit(STEP, state, data(), steps=2, progress=False),
        lambda: loud_fit(STEP, state, [(X[:n], Y[:n]) for n in (4, 5, 6)], steps=5, progress=False),
        lambda: loud_fit(STEP, fresh(), poisoned(), steps=7, progress=False),
    ]
    for i, call in enumerate(calls):
        assert lines(call) == {(__file__, call.__code__.co_firstlineno)}, i


def test_evaluation_by_epochs_and_at_the_end():
    seen = []

    def evaluate(state):
        seen.append(int(state.step))
        return {"val/loss": 0.5}

    fit(STEP, fresh(), data(), epochs=5, evaluate=evaluate, evaluate_every="2 epochs")
    assert seen == [14, 28, 35]
    seen.clear()
    fit(STEP, fresh(), data(), steps=16, evaluate=evaluate)
    assert seen == [7, 14, 16]


@pytest.mark.medium
def test_a_callback_edits_the_state():
    def lower(run):
        return ts.adjust(run.state, learning_rate=1e-3) if run.event == "step" else None

    seen = []

    def log(run):
        run.log(doubled=2 * run.step)
        run.memory["calls"] = run.memory.get("calls", 0) + 1
        seen.append((run.memory["calls"], run.info is None or float(run.info.loss) > 0))

    both = [callbacks.every(6, lower), callbacks.every(3, log)]
    state, history = fit(STEP, fresh(), data(), steps=10, log_every=1, callbacks=both)
    assert ts.hyperparams(state)["learning_rate"] == pytest.approx(1e-3)
    assert history["learning_rate"][-1] == pytest.approx(1e-3) and history["learning_rate"][5] > 1e-3
    assert history.series("doubled")[1].tolist() == [6, 12, 18] and seen == [(1, True), (2, True), (3, True)]


def test_early_stopping_ends_the_run():
    values = [0.0, 3.0, 2.0, 2.5, 2.6, 2.7, 2.8]  # by epoch; the first is where its names are looked at
    evaluate = lambda state: {"val/loss": values[int(state.step) // 7]}
    stop = callbacks.early_stopping("val/loss", patience=2)
    state, history = fit(STEP, fresh(), data(), epochs=50, evaluate=evaluate, callbacks=stop)
    assert int(state.step) == 4 * 7
    assert history.marks[-1][1] == "stop" and "val/loss is no better" in history.marks[-1][2]


@pytest.mark.medium
def test_thaw_and_adjust_at_a_step():
    state = ts.freeze(fresh(), "hidden/**")
    before = jax.device_get(state.params["hidden"]["kernel"])
    kept = []
    keep = callbacks.every(8, lambda run: kept.append(jax.device_get(run.state.params["hidden"]["kernel"])))
    state, _ = fit(STEP, state, data(), steps=12, callbacks=[callbacks.thaw_at(8, "hidden/**"), keep])
    np.testing.assert_array_equal(kept[0], before)
    assert np.any(jax.device_get(state.params["hidden"]["kernel"]) != before)


@pytest.mark.parametrize(
    ("callback", "error", "text"),
    [
        (lambda run: {"w": 1}, WrongTypeError, r"result at callback: got dict with w, expected a TrainState"),
        (
            lambda run: ts.setup(RULE, {"w": jnp.ones(2)}),
            StateError,
            r"leaf at params\['hidden'\].*keeps the structure",
        ),
        (lambda run: run.log(**{"a\nb": 1.0}), ts.errors.TsunaxError, r"a\\nb"),
        (lambda run: run.log(loss=[1, 2]), ts.errors.TsunaxError, "loss"),
        (lambda run: 1 / 0, ZeroDivisionError, "division by zero"),
    ],
)
def test_callbacks_that_fail_are_named(callback, error, text):
    call = lambda: fit(STEP, fresh(), data(), steps=6, callbacks=callbacks.every(4, callback))
    with pytest.raises(error, match=text) as caught:
        call()
    assert "callback" in "".join(caught.value.__notes__) and "step 4" in "".join(caught.value.__notes__)
    assert int(caught.value.state.step) == 4 and len(caught.value.history)


# --------------------------------------------------------------------------------------------------- errors and the end


def test_an_exception_hands_over_the_state():
    def broken():
        yield from [(X[:8], Y[:8])] * 3
        raise OSError("the disk is gone")

    with pytest.raises(DataError, match=r"data at batch 3 of epoch 0: got OSError the disk is gone") as caught:
        fit(STEP, fresh(), broken(), steps=9, steps_per_call=2)
    assert isinstance(caught.value.__cause__, OSError)
    assert int(caught.value.state.step) >= 2
    fit(STEP, caught.value.state, data(), steps=9)


def test_ctrl_c_ends_after_the_step_under_way(clock):
    before = signal.getsignal(signal.SIGINT)

    def press(run):
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt, match="at step 4") as caught:
        fit(STEP, fresh(), data(), steps=900, callbacks=callbacks.every(4, press))
    assert int(caught.value.state.step) == 4 and caught.value.history.marks[-1] == (4, "stop", "interrupted")
    assert signal.getsignal(signal.SIGINT) is before

    def press_twice(run):
        press(run), clock.sleep(seconds), press(run), ended.append(run.step)

    ended, seconds = [], 0.5
    with pytest.raises(KeyboardInterrupt):  # together they are one
        fit(STEP, fresh(), data(), steps=900, callbacks=callbacks.every(4, press_twice))
    assert ended == [4]
    seconds = 2.0
    with pytest.raises(KeyboardInterrupt) as caught:
        fit(STEP, fresh(), data(), steps=900, callbacks=callbacks.every(4, press_twice))
    assert int(caught.value.state.step) == 4 and ended == [4]
    assert signal.getsignal(signal.SIGINT) is before


def test_what_ends_a_call_hands_over_the_steps_done(monkeypatch):
    call, done = fused_loop.Fused.__call__, []

    def interrupted(*args):
        if len(done) > 100:
            raise KeyboardInterrupt
        done.append(call(*args))
        return done[-1]

    monkeypatch.setattr(fused_loop.Fused, "__call__", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        fit(STEP, fresh(), data(), steps=900, steps_per_call=1, log_every=1)
    state, history = caught.value.state, caught.value.history
    assert int(state.step) == len(done) == len(history["loss"])
    monkeypatch.undo()
    assert_trees_equal(state, fit(STEP, fresh(), data(), steps=len(done))[0])


def test_in_a_notebook_ctrl_c_returns(notebook):
    press = lambda run: signal.raise_signal(signal.SIGINT)
    state, history = fit(STEP, fresh(), data(), steps=900, callbacks=callbacks.every(4, press))
    assert int(state.step) == 4 and history.marks[-1][1] == "stop"


@pytest.mark.medium
def test_a_thread_may_run_it():
    found = []
    thread = threading.Thread(target=lambda: found.append(fit(STEP, fresh(), data(), steps=4)))
    thread.start()
    thread.join()
    assert int(found[0][0].step) == 4


def test_loggers_are_told_and_closed():
    class Log:
        def __init__(self):
            self.rows, self.settings, self.closed = [], None, 0

        def start(self, settings):
            self.settings = settings

        def __call__(self, row, step):
            self.rows.append((step, row))

        def close(self):
            self.closed += 1

    log = Log()
    fit(STEP, fresh(), data(), steps=20, logger=[log])
    assert [step for step, _ in log.rows] == [1, 10, 20] and log.closed == 1
    assert {"loss", "grad_norm", "learning_rate", "epoch", "rejected"} <= set(log.rows[0][1])
    assert "steps_per_second" not in log.rows[0][1]  # it would be the rate of compiling
    assert {"steps_per_second", "examples_per_second"} <= set(log.rows[-1][1])
    assert all(type(x) in (int, float) for _, row in log.rows for x in row.values())
    assert log.settings["goal"] == "steps=20" and log.settings["start/b1"] == pytest.approx(0.9)
    with pytest.raises(ZeroDivisionError):
        fit(STEP, fresh(), data(), steps=20, logger=log, callbacks=callbacks.every(3, lambda run: 1 / 0))
    assert log.closed == 2


def test_a_smoke_run_keeps_nothing():
    state, used, seen = fresh(), data(), []
    before = jax.device_get(state)
    options = {"evaluate": lambda s: {"val/loss": 1.0}, "callbacks": lambda run: seen.append(run.event)}
    log = lambda row, step: pytest.fail("a dry_run run logs nothing")
    after, history = fit(STEP, state, used, steps=10_000, dry_run=True, logger=log, **options)
    assert int(after.step) == 2 and history.last("val/loss") == 1.0
    assert_trees_equal(state, before)
    assert used.get_state() == {"epoch": 0, "position": 0}
    assert set(seen) == {"start", "evaluate", "end"}


FITS = {
    "steps": (dict(steps=0), r"steps at fit\(\): got 0, expected an int ≥ 1"),
    "steps float": (dict(steps=2.5), r"steps at fit\(\): got 2\.5"),
    "both": (dict(steps=2, epochs=3), r"goal at fit\(\): got steps=2 and epochs=3, expected one of them"),
    "neither": (dict(), r"goal at fit\(\): got steps=None and epochs=None, expected one of them"),
    "no evaluate": (dict(steps=2, evaluate_every=3), r"evaluate at fit\(\): got None, but evaluate_every=3"),
    "every": (dict(steps=2, evaluate=print, evaluate_every="3 months"), r"evaluate_every at fit\(\): got '3 months'"),
    "evaluate of two": (
        dict(steps=2, evaluate=lambda a, b: 1),
        r"evaluate at fit\(\): got <lambda>\(a, b\), expected f\(",
    ),
    "loggers of a file": (
        dict(steps=2, logger=[ts.loggers.csv("a.csv"), ts.loggers.csv("./a.csv")]),
        r"logger at fit\(\): got files .*a\.csv, .*a\.csv, expected a file for each",
    ),
    "logger of one": (dict(steps=2, logger=lambda row: 1), r"logger at fit\(\): .*, expected f\(row, step=...\)"),
    "logger of a path": (dict(steps=2, logger="a.csv"), r"logger at fit\(\): got 'a.csv' \(str\), expected f\("),
    "evaluate by a name": (dict(steps=2, evaluate="val"), r"evaluate at fit\(\): got 'val' \(str\), expected f\("),
    "callback None": (dict(steps=2, callbacks=[None]), r"callback at fit\(\): got None, expected f\(run\), or"),
    "callback of two": (
        dict(steps=2, callbacks=lambda run, info: 1),
        r"callback at fit\(\): got <lambda>\(run, info\), expected f\(run\), or a callbacks.Part",
    ),
    "no Part": (
        dict(steps=2, callbacks=SimpleNamespace(every=2, at=print)),
        r"callback at fit\(\): got SimpleNamespace.*, expected f\(run\), or a callbacks.Part",
    ),
    "log_every": (dict(steps=2, log_every=0), r"log_every at fit\(\): got 0"),
    "per call": (dict(steps=2, steps_per_call="many"), r"steps_per_call at fit\(\): got 'many'"),
    "max_bad": (dict(steps=2, max_bad=True), r"max_bad at fit\(\): got True"),
}


@pytest.mark.parametrize(("given", "text"), FITS.values(), ids=FITS)
def test_wrong_arguments(given, text):
    with pytest.raises((WrongTypeError, HyperparameterError), match=text):
        fit(STEP, fresh(), data(), **given)


def test_two_loggers_of_one_file_by_two_names_are_refused(tmp_path):
    (tmp_path / "a.csv").touch()
    (tmp_path / "b.csv").symlink_to(tmp_path / "a.csv")
    loggers = [ts.loggers.csv(tmp_path / "a.csv"), ts.loggers.csv(tmp_path / "b.csv")]
    with pytest.raises(WrongTypeError, match=r"got files .*a\.csv, .*a\.csv, expected a file for each"):
        fit(STEP, fresh(), data(), steps=2, logger=loggers)


def test_wrong_places():
    state = fresh()
    with pytest.raises(WrongTypeError, match=r"got TrainState, expected .*: fit\(step, state"):
        fit(state, STEP, data(), steps=2)
    with pytest.raises(WrongTypeError, match=r"expected a function \(state, batch\)"):
        fit(None, state, data(), steps=2)
    with pytest.raises(WrongTypeError, match="expected a TrainState"):
        fit(STEP, init(), data(), steps=2)
    with pytest.raises(WrongTypeError, match="data"):
        fit(STEP, state, (X, Y), steps=2)
    with pytest.raises(StateError, match=r"result at step: got .*expected two things"):
        fit(lambda state, batch: state, state, data(), steps=2)


BATCHES = {
    "empty": ([], DataError, "no batch at all"),
    "ended": (iter([(X[:8], Y[:8])] * 3), DataError, "no batch at all, 3 in earlier epochs"),
    "None": ([None], DataError, "got None"),
    "rows": ([(X[:8], Y[:7])], DataError, r"8 rows in batch\[0\], 7 rows in batch\[1\]"),
    "none": ([(X[:0], Y[:0])], DataError, "0 rows"),
    "structure": ([(X[:8], Y[:8]), {"x": X[:8]}], DataError, r"batch at step 1: .*one structure"),
    "scalar": ([(X[:8], np.float32(1))], DataError, r"leaf at batch\[1\]"),
}


@pytest.mark.parametrize(("batches", "error", "text"), BATCHES.values(), ids=BATCHES)
def test_wrong_batches(batches, error, text):
    with pytest.raises(error, match=text) as caught:
        fit(STEP, fresh(), batches, steps=9)
    assert caught.value.state is not None  # it was not consumed


@pytest.mark.medium
def test_shapes_that_change():
    grow = [(X[:n], Y[:n]) for n in (8, 8, 4, 12, 8)]
    with pytest.warns(UserWarning, match=r"batch at step 3: float32\[12,6\], float32\[12,3\] after float32\[8,6\]"):
        state, _ = fit(STEP, fresh(), grow, steps=5)
    expected = fresh()
    for batch in grow:
        expected, _ = STEP(expected, batch)
    assert_trees_close(state.params, expected.params, rtol=2e-6, atol=2e-6)
    with warnings.catch_warnings(record=True) as seen, pytest.raises(DataError, match=r"16 shapes .* ts\.batches"):
        warnings.simplefilter("always")
        cheap = lambda state, batch: (state + 1, {})
        fit(cheap, jnp.zeros(()), [np.ones(n) for n in range(1, 30)], steps=29)
    assert [str(warning.message).partition(":")[0] for warning in seen] == [f"batch at step {i}" for i in (2, 4, 8)]


def short():
    """Data whose epochs are shorter than a call."""
    return ts.batches((X[:16], Y[:16]), 8, shuffle=True, seed=1)


ONE = X[:8], Y[:8]


@pytest.mark.parametrize(
    "make", [lambda: [ONE], lambda: (jax.tree.map(jnp.asarray, ONE),), short], ids=["NumPy", "JAX", "short"]
)
def test_a_call_goes_beyond_the_end_of_an_epoch(make, monkeypatch):
    calls, call = [], fused_loop.Fused.__call__
    monkeypatch.setattr(fused_loop.Fused, "__call__", lambda *args: calls.append(1) or call(*args))
    used = make()
    per_epoch = len(used)

    def run(goals, **options):
        state, found, given = fresh(), [], make()
        for goal in goals:
            state, rows = fit(STEP, state, given, steps=goal, log_every=1, **options)
            found += [rows["epoch"], rows["loss"]]
        return state, [np.concatenate(found[i::2]) for i in range(2)]

    state, (epochs, losses) = run([100], steps_per_call=32)
    assert 0 < len(calls) <= 5
    assert epochs.tolist() == [i // per_epoch for i in range(100)]
    each, (listened, same) = run([100], callbacks=lambda run: None)  # who hears of each epoch
    assert_trees_equal(state, each)
    np.testing.assert_array_equal(losses, same)
    np.testing.assert_array_equal(epochs, listened)
    cut, (_, same) = run([33, 40, 100], steps_per_call=1)
    assert_trees_equal(state, cut)
    np.testing.assert_array_equal(losses, same)
    calls.clear()
    in_epochs, rows = fit(STEP, fresh(), make(), epochs=100 // per_epoch, steps_per_call=32, log_every=1)
    assert 0 < len(calls) <= 5
    assert_trees_equal(state, in_epochs)
    np.testing.assert_array_equal(rows["epoch"], epochs)
    if make is short:
        fit(STEP, fresh(), used, steps=33, steps_per_call=32)
        assert used.get_state() == {"epoch": 16, "position": 1}


def test_the_only_batch_is_read_again_after_a_boundary():
    x = np.zeros((4, 2), np.float32)

    def change(run):
        x[:] = run.step

    step = lambda state, x: (state + jnp.mean(x), {})
    state, _ = fit(step, jnp.zeros(()), [x], steps=12, callbacks=callbacks.every(5, change), steps_per_call=4)
    assert float(state) == 0 * 5 + 5 * 5 + 10 * 2


@pytest.mark.medium
@pytest.mark.filterwarnings("ignore:step .* was rejected:RuntimeWarning")
def test_a_rejected_call_beyond_an_epoch_knows_its_own():
    bad = np.full((8, 6), np.nan, np.float32), Y[:8]
    with pytest.raises(NonFiniteError, match="step 0 of epoch 2 was rejected") as caught:
        fit(STEP, fresh(), [bad], steps=40, steps_per_call=8, max_bad=3)
    assert [kept.epoch for kept in caught.value.rejected] == [0, 1, 2]


# ------------------------------------------------------------------------------ the place of the data


def used_up():
    """Data that a run, or a loop, has gone through."""
    used = data()
    fit(STEP, fresh(), used, epochs=2)
    return used


def looked_at():
    used = data()
    next(iter(used))
    return used


def read_by_hand():
    used = data()
    for _ in range(3):
        list(used)
    return used


KINDS = [lambda x: x, ts.prefetch, lambda x: ts.prefetch(ts.prefetch(x), size=5)]


@pytest.mark.parametrize("make", [used_up, looked_at, read_by_hand])
@pytest.mark.parametrize("kind", KINDS, ids=["batches", "prefetched", "twice"])
def test_a_new_state_begins_with_the_first_batch(make, kind):
    expected, rows = fit(STEP, fresh(), data(), epochs=3, log_every=1)
    used = kind(make())
    state, found = fit(STEP, fresh(), used, epochs=3, log_every=1)
    assert_trees_equal(state, expected)
    np.testing.assert_array_equal(found["epoch"], rows["epoch"])
    assert used.get_state() == {"epoch": 3, "position": 0}
    state, _ = fit(STEP, state, used, epochs=4)  # a trained one goes on
    assert_trees_equal(state, fit(STEP, fresh(), data(), epochs=4)[0])
    *_, (state, _) = ts.loop.iterate(STEP, fresh(), used, epochs=3, steps_per_call=2)
    assert_trees_equal(state, expected)


def test_a_new_state_begins_a_loader_that_is_read_ahead_anew():
    used = ts.prefetch([(X[i : i + 8], Y[i : i + 8]) for i in range(0, 40, 8)])
    expected, _ = fit(STEP, fresh(), used, epochs=2)
    next(iter(used))
    for _ in range(2):
        state, _ = fit(STEP, fresh(), used, epochs=2)
        assert_trees_equal(state, expected)
        assert used.get_state() == {"epoch": 2, "position": 0, "data": None}


@pytest.mark.medium
def test_a_new_state_begins_where_the_data_were_put():
    used, expected = data(), fit(STEP, fresh(), list(data())[3:], steps=4)[0]
    used.set_state({"epoch": 0, "position": 3})
    assert_trees_equal(fit(STEP, fresh(), used, epochs=1)[0], expected)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(STEP, expected, used, epochs=1)
    pair = {"a": fresh(), "b": fresh()}  # as of a GAN: its states have clocks
    both = lambda states, batch: ({k: STEP(x, batch)[0] for k, x in states.items()}, {})
    pair, _ = fit(both, pair, used, epochs=1)
    assert int(pair["a"].step) == len(used)


@pytest.mark.parametrize(
    "kind", [*KINDS, lambda x: data(device=True)], ids=["batches", "prefetched", "twice", "device"]
)
def test_a_loop_over_the_data_of_a_run_leaves_the_run_alone(kind):
    places, used = [], kind(data())

    def evaluate(state):
        places.append(used.get_state())
        for i, _ in enumerate(used):
            if i == 3 and len(places) % 2:
                break
        return {"val/x": 0.0}

    state, _ = fit(STEP, fresh(), used, epochs=3, evaluate=evaluate, evaluate_every=4)
    plain, seen = kind(data()), []
    expected, _ = fit(
        STEP, fresh(), plain, epochs=3, callbacks=callbacks.every(4, lambda run: seen.append(plain.get_state()))
    )
    assert_trees_equal(state, expected)
    assert places[: len(seen)] == seen and used.get_state() == {"epoch": 3, "position": 0}


@pytest.mark.parametrize("kind", KINDS, ids=["batches", "prefetched", "twice"])
def test_the_place_of_the_data_after_a_run(kind):
    used = kind(data())
    state, _ = fit(STEP, fresh(), used, steps=8)
    assert used.get_state() == {"epoch": 1, "position": 1}
    fit(STEP, state, kind(used), steps=9)  # also of data that are read ahead anew for each run
    assert used.get_state() == {"epoch": 1, "position": 2}
    assert len(list(used)) == 7 and used.get_state() == {"epoch": 3, "position": 0}  # a loop begins the next epoch
    used.set_state({"epoch": 0, "position": 4})
    fit(STEP, fresh(), used, steps=3, dry_run=True)
    assert used.get_state() == {"epoch": 0, "position": 4} and len(list(used)) == 3
    it = ts.loop.iterate(STEP, fresh(), used, steps=5)
    assert [used.get_state()["position"] for _ in it] == [1, 2, 3, 4, 5]


def test_a_goal_that_is_reached_says_why(tmp_path):
    used = data()
    state, _ = fit(STEP, fresh(), used, epochs=1, checkpoint=tmp_path)
    keep = jax.tree.map(jnp.copy, state)
    with pytest.warns(UserWarning, match=r"at epoch 1 already: nothing to do; .*data\.get_state\(\)"):
        fit(STEP, keep, used, epochs=1)
    with pytest.warns(UserWarning, match=r"at step 7 already: nothing to do; state.step and"):
        fit(STEP, keep, used, steps=7)
    with pytest.warns(UserWarning, match=r"nothing to do; so says the checkpoint in "):
        fit(STEP, fresh(), data(), epochs=1, checkpoint=tmp_path)


# ---------------------------------------------------------------------------------------------------------- checkpoints


def count_calls(run):
    run.memory["calls"] = run.memory.get("calls", 0) + 1
    run.log(calls=run.memory["calls"])


def test_a_run_goes_on_from_its_checkpoint(tmp_path):
    """In the middle of an epoch: state, data, history and what callbacks remember."""
    step, given = ts.train_step(noisy, accumulate=2), {**NOISY, "ema": 0.9}
    make = lambda: ts.setup(RULE, init(), **given)
    watch = callbacks.every(2, count_calls)
    whole, rows = fit(step, make(), data(), steps=17, callbacks=watch, log_every=1)
    saver = ts.Checkpoints(tmp_path / "run", every=5)
    with saver:
        fit(step, make(), data(), steps=11, callbacks=watch, log_every=1, checkpoint=saver)
        assert saver.steps() == [10, 11]
    # a new process: nothing is left but the directory
    state, history = fit(step, make(), data(), steps=17, callbacks=watch, log_every=1, checkpoint=tmp_path / "run")
    assert_trees_equal(state, whole)
    for name in ("loss", "grad_norm", "learning_rate", "worst", "calls"):
        np.testing.assert_array_equal(history[name], rows[name])
    assert (11, "restart", "") in history.marks
    with pytest.warns(UserWarning, match="at step 17 already"):
        same, _ = fit(step, make(), data(), steps=17, checkpoint=tmp_path / "run", resume="must")
    assert_trees_equal(same, whole)
    with pytest.raises(ts.errors.TsunaxError, match="resume='never'"):
        fit(step, make(), data(), steps=17, checkpoint=tmp_path / "run", resume="never")


def test_a_checkpoint_of_any_state_and_data_without_a_place(tmp_path):
    def descend(params, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), {"loss": loss}

    class Rows:
        def __iter__(self):
            return ((X[i : i + 8], Y[i : i + 8]) for i in range(0, 48, 8))

    rows = Rows()
    with pytest.warns(UserWarning, match="the position of these data cannot be saved"):
        fit(descend, init(), rows, steps=4, checkpoint=tmp_path)
    with pytest.raises(DataError, match="fast_forward=True"):
        fit(descend, init(), rows, steps=9, checkpoint=tmp_path)
    testing.check_resume(descend, init(), rows, steps=9, at=4, fast_forward=True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGXCPU])
def test_signals_save(tmp_path, number):
    press = callbacks.every(3, lambda run: signal.raise_signal(number) if run.step == 3 else None)
    with pytest.raises(SystemExit) as caught:
        fit(STEP, fresh(), data(), steps=900, callbacks=press, checkpoint=tmp_path)
    assert caught.value.code == 128 + number and signal.getsignal(number) is signal.SIG_DFL
    state, _ = fit(STEP, fresh(), data(), steps=8, callbacks=press, checkpoint=tmp_path, resume="must")
    expected, _ = fit(STEP, fresh(), data(), steps=8)
    assert_trees_equal(state, expected)


class Loader:
    """Five batches in an epoch, and the loop does not know how many; signals come with some batches."""

    def __init__(self, *pressed, dies=0):
        self.pressed, self.dies, self.count = pressed, dies, 0

    def __iter__(self):
        for i in range(0, 40, 8):
            self.count += 1
            if self.count in self.pressed:
                signal.raise_signal(signal.SIGUSR1)
            if self.count == self.dies:
                raise OSError("killed")
            yield X[i : i + 8], Y[i : i + 8]


def test_a_save_at_the_last_step_of_an_epoch_leaves_each_row_once(tmp_path):
    """The row is whole only when the loop sees the end of the epoch, after the save."""

    def run(folder, loader):
        evaluate = lambda state: {"val/bias": float(state.params["out"]["bias"][0])}
        options = {"log_every": 1, "fast_forward": True, "steps_per_call": 1, "evaluate": evaluate}
        log = ts.loggers.csv(tmp_path / folder / "rows.csv")
        with ts.Checkpoints(tmp_path / folder, every=900, keep_last=None) as saver:
            state, history = fit(STEP, fresh(), loader, steps=12, logger=log, checkpoint=saver, **options)
        rows = [line.split(",")[:5] for line in (tmp_path / folder / "rows.csv").read_text().splitlines()]
        return state, history["val/bias"], rows, saver.steps()

    expected, evaluations, rows, _ = run("whole", Loader())
    with pytest.raises(DataError, match="killed"):
        run("killed", Loader(5, dies=7))
    for folder, loader, saved in (("saved", Loader(5, 9), [5, 9, 12]), ("killed", Loader(), [5, 12])):
        state, found, logged, steps = run(folder, loader)
        assert_trees_equal(state, expected)
        np.testing.assert_array_equal(found, evaluations)
        assert logged == rows and len(rows) == 13 and steps == saved


@pytest.mark.parametrize("steps_per_call", [1, "auto"])
def test_a_signal_that_saves_a_run_which_goes_on(tmp_path, steps_per_call):
    """Also if it dies before the next save."""

    def run(folder, *pressed, dies=0):
        def press(run):
            if run.event == "step" and run.step in pressed:
                signal.raise_signal(signal.SIGUSR1), signal.raise_signal(signal.SIGUSR1)
                signal.raise_signal(signal.SIGUSR2)
            if run.step == dies:
                raise OSError("killed")

        evaluate = lambda state: {"val/bias": float(state.params["out"]["bias"][0])}
        bare = lambda run: events.append(run.event)
        saver = ts.Checkpoints(tmp_path / folder, every=900, keep_last=None)
        with saver:
            state, history = fit(
                STEP, fresh(), Loader(), steps=12, evaluate=evaluate, log_every=1, checkpoint=saver,
                callbacks=[callbacks.every(1, press), bare], logger=ts.loggers.csv(tmp_path / folder / "rows.csv"),
                fast_forward=True, steps_per_call=steps_per_call,
            )  # fmt: skip
        return state, history, saver.steps()

    events = []
    expected, wanted, _ = run("whole")
    rows = (tmp_path / "whole" / "rows.csv").read_text()
    pressed, events = events, []
    state, history, steps = run("saved", 4, 8)
    assert steps == [5, 9, 12] and events == pressed
    marks = [(step, text) for step, name, text in history.marks if name == "save"]
    assert marks == [(5, "SIGUSR1"), (5, "SIGUSR2"), (9, "SIGUSR1"), (9, "SIGUSR2")]
    with pytest.raises(OSError, match="killed"):
        run("killed", 4, dies=7)
    for folder, (resumed, found, _) in {"saved": (state, history, steps), "killed": run("killed")}.items():
        assert_trees_equal(resumed, expected)
        for name in ("step", "loss", "val/bias"):
            np.testing.assert_array_equal(found[name], wanted[name], err_msg=folder)
        cells = lambda text: [line.split(",")[:3] for line in text.splitlines()]
        assert cells((tmp_path / folder / "rows.csv").read_text()) == cells(rows)


def test_handlers_of_the_user(tmp_path):
    """They run, and are back afterwards; an exception of one ends the run, which saves first."""
    heard = []

    def raises(number, frame):
        heard.append(number)
        raise TimeoutError("the time is up")

    handlers = {
        signal.SIGUSR1: lambda number, frame: heard.append(number),
        signal.SIGUSR2: raises,
        signal.SIGHUP: signal.SIG_IGN,
    }
    previous = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    press = lambda run: signal.raise_signal(
        {4: signal.SIGUSR1, 8: signal.SIGHUP, 12: signal.SIGUSR2}.get(run.step, signal.SIGHUP)
    )
    try:
        saver = ts.Checkpoints(tmp_path, every=900, keep_last=None)
        with saver, pytest.raises(TimeoutError) as caught:
            fit(STEP, fresh(), data(), steps=900, callbacks=callbacks.every(4, press), checkpoint=saver)
        assert {number: signal.getsignal(number) for number in handlers} == handlers
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    assert heard == [signal.SIGUSR1, signal.SIGUSR2]
    assert saver.steps()[-1] == int(caught.value.state.step) == 12 and len(saver.steps()) == 2


@pytest.mark.parametrize("saves", [True, False])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_a_run_within_a_callback(tmp_path, number, saves):
    """The inner run saves and goes on, because the outer run needs its result; the outer run ends later."""
    setup = lambda: fresh()

    def run(name, *pressed):
        def probe(run):
            press = lambda inner: signal.raise_signal(number) if (run.step, inner.step) in pressed else None
            state, history = fit(
                STEP, setup(), data(), steps=4, callbacks=callbacks.every(1, press),
                checkpoint=tmp_path / f"{name} {run.step}" if saves else None,
            )  # fmt: skip
            run.log(probe=float(state.params["out"]["bias"][0]))
            marks.extend((name, text) for step, name, text in history.marks if name == "save" and step < 4)

        state, history = fit(
            STEP, setup(), data(), steps=8, callbacks=callbacks.every(3, probe), checkpoint=tmp_path / name
        )
        return state, history["probe"]

    marks = []
    with pytest.raises((SystemExit, KeyboardInterrupt)) as caught:
        run("ended", (3, 2))
    assert int(caught.value.state.step) == 3 and getattr(caught.value, "code", 143) == 143
    assert marks == [("save", signal.Signals(number).name)] * saves
    state, probes = run("ended")
    expected, expected_probes = run("whole")
    assert_trees_equal(state, expected)
    np.testing.assert_array_equal(probes, expected_probes)


def test_signals_that_are_left_out(tmp_path):
    handlers = []
    names = ("SIGINT", "SIGTERM", "SIGHUP", "SIGXCPU", "SIGUSR1", "SIGUSR2")
    note = lambda run: handlers.append([signal.getsignal(getattr(signal, name)) for name in names])
    untouched = [signal.getsignal(getattr(signal, name)) for name in names]
    for signals, count in (((), 0), (("INT", "USR1"), 2), (names, None)):
        options = {"steps": 1, "callbacks": callbacks.every(1, note), "checkpoint": tmp_path / str(count)}
        if count is None:
            with pytest.raises(HyperparameterError, match="signals at fit"):
                fit(STEP, fresh(), data(), signals=signals, **options)
        else:
            fit(STEP, fresh(), data(), signals=signals, **options)
            taken = [now is not before for now, before in zip(handlers[-1], untouched, strict=True)]
            assert sum(taken) == count and taken[0] == taken[4] == bool(signals)


def test_a_late_timer_makes_a_boundary(clock):
    """At a planned boundary both happen at once."""

    class Timed(callbacks.Part):
        every = 3, "1 h"

        def at(self, run, events):
            heard.append((run.step, [*events]))

    def slow():
        for i in range(12):  # the batches of the steps 3 and 8 take an hour
            clock.sleep(3600 * (i in (2, 7)))
            yield X[:8], Y[:8]

    heard = []
    fit(STEP, fresh(), slow(), steps=12, steps_per_call=1, callbacks=Timed())
    assert heard == [(3, ["step", "clock"]), (6, ["step"]), (8, ["clock"]), (9, ["step"]), (12, ["step"])]


def test_a_save_has_the_rows_before_its_step_in_the_logs(tmp_path):
    class Log:
        steps, synced = (), ()

        def __call__(self, row, step):
            self.steps += (step,)

        def sync(self):
            self.synced += (self.steps,)

    log = Log()
    options = {"steps": 12, "log_every": 3, "steps_per_call": 1, "fast_forward": True}
    with ts.Checkpoints(tmp_path, every=900) as saver:
        fit(STEP, fresh(), Loader(5), logger=log, checkpoint=saver, **options)
    assert log.synced == ((1, 3), (1, 3, 6, 9, 12))


class Pressing(list):
    """Batches; a signal comes while the batch of this number is fetched."""

    at = 0

    def __iter__(self):
        for batch in super().__iter__():
            self.at -= 1
            if self.at == 0:
                signal.raise_signal(signal.SIGTERM)
            yield batch


@pytest.mark.medium
@pytest.mark.parametrize("steps_per_call", [None, 1, "auto"])
def test_what_a_step_calls_for_happens_before_a_signal_ends_the_run(tmp_path, steps_per_call):
    def run(at=0, folder=None):
        state = ts.setup(ts.rules.adam(0.05), init())
        batches = Pressing((X[i : i + 8], Y[i : i + 8]) for i in range(0, 48, 8))
        batches.at = at
        slow_down = callbacks.every(2, lambda run: ts.adjust(run.state, learning_rate=0.05 / run.step))
        evaluate = lambda state: {"val/bias": float(state.params["out"]["bias"][0])}
        options = {"callbacks": slow_down, "evaluate": evaluate, "evaluate_every": 2, "steps_per_call": steps_per_call}
        return fit(STEP, state, batches, steps=8, checkpoint=folder, fast_forward=True, **options)

    expected, wanted = run()
    for at in range(1, 6):
        with pytest.raises(SystemExit):
            run(at, tmp_path / f"{at}")
        state, history = run(0, tmp_path / f"{at}")
        assert_trees_equal(state, expected)
        np.testing.assert_array_equal(history["val/bias"], wanted["val/bias"])


@pytest.mark.parametrize("goal", [{"steps": 12}, {"epochs": 2}])
def test_the_last_step_calls_for_as_much_as_the_others(goal):
    seen = []
    see = callbacks.every(3, lambda run: seen.append(run.step))
    fit(STEP, fresh(), data(drop_remainder=True), callbacks=see, **goal)
    assert seen == [3, 6, 9, 12]


def test_resident_data_is_the_same_data():
    for kwargs in ({}, {"shuffle": False}, {"drop_remainder": True}):
        expected, rows = fit(STEP, fresh(), data(**kwargs), steps=19, log_every=1)
        state, found = fit(STEP, fresh(), data(device=True, **kwargs), steps=19, log_every=1)
        assert_trees_close(state.params, expected.params, rtol=2e-6, atol=2e-6)
        np.testing.assert_allclose(found["loss"], rows["loss"], rtol=1e-5)
        state, used = fresh(), data(device=True, **kwargs)
        for goal in (5, 11, 19):
            state, cut = fit(STEP, state, used, steps=goal, log_every=1, steps_per_call=3)
        np.testing.assert_array_equal(cut["loss"], found["loss"][11:])


@pytest.mark.medium
def test_a_profiler_trace_around_fit_shows_its_calls(tmp_path):
    state, _ = fit(STEP, fresh(), data(), steps=2)
    with jax.profiler.trace(tmp_path):
        fit(STEP, state, data(), steps=6)
    assert [b"train_steps" in path.read_bytes() for path in tmp_path.rglob("*.xplane.pb")] == [True]


@pytest.mark.parametrize("goal", [dict(steps=7), dict(epochs=2), dict(steps=20)], ids=str)
def test_loggers_get_one_row_of_each_step(goal):
    told, stop = [], callbacks.every(2, lambda run: run.stop("enough") if run.step == 8 else None)
    log = lambda row, step: told.append((step, row))
    noted = callbacks.every(3, lambda run: run.log(noted=run.step))
    options = dict(evaluate=lambda state: {"val/loss": 1.0}, evaluate_every=4, callbacks=[stop, noted])
    fit(STEP, fresh(), even(), **goal, log_every=5, logger=log, **options)
    steps = [step for step, _ in told]
    assert steps == sorted(set(steps))
    assert {"loss", "val/loss"} <= told[-1][1].keys()


# ------------------------------------------------------------------------------------------- what goes wrong elsewhere


@pytest.mark.parametrize(
    "make", medium_if(lambda make: make is not data, [data, lambda: ts.prefetch(even()), lambda: data(device=True)])
)
def test_an_evaluation_may_read_the_training_data(make):
    expected, _ = fit(STEP, fresh(), make(), epochs=3)
    used, eval_step, values = make(), ts.eval_step(loss_fn), []

    def evaluate(state):
        values.append(ts.evaluate(eval_step, state, {"train": used})["train/loss"])
        return {"train/loss": values[-1]}

    given = {"evaluate": evaluate, "evaluate_every": 3, "callbacks": lambda run: evaluate(run.state) and None}
    state, _ = fit(STEP, fresh(), used, epochs=3, **given)
    assert_trees_equal(state, expected)
    if make is data:  # all of the rows, whatever the place of the data
        assert values[-1] == pytest.approx(float(loss_fn(state.params, (X, Y))), rel=1e-5)


def test_another_order_of_the_data_is_refused(tmp_path):
    fit(STEP, fresh(), data(), steps=4, checkpoint=tmp_path)
    for other in (data(seed=2), ts.batches((X, Y), 4, shuffle=True, seed=1), data(drop_remainder=True)):
        text = r"data at resume: got (seed 2|batch_size 4|drop_remainder True), expected .* in the checkpoint"
        with pytest.raises(DataError, match=text):
            fit(STEP, fresh(), other, steps=9, checkpoint=tmp_path)


@pytest.mark.medium
def test_the_best_checkpoint_is_that_of_its_own_step(tmp_path):
    values = [0.0, 1.0, 3.0, 2.0]
    with ts.Checkpoints(tmp_path, every=5, keep_last=1, keep_best=Best("val/loss", mode="min")) as saver:
        given = {"evaluate": lambda state: {"val/loss": values[int(state.step) // 10]}, "evaluate_every": 10}
        fit(STEP, fresh(), data(), steps=30, checkpoint=saver, **given)
        saver.wait()
        assert saver.steps() == [10, 30]


@pytest.mark.parametrize("every", [3, 10])
def test_an_evaluation_has_names_of_its_own(every):
    with pytest.raises(ts.errors.RowError, match=r"'loss' at evaluate: got a name of the training rows.*'val': data"):
        fit(STEP, fresh(), data(), steps=20, evaluate=lambda state: {"loss": 1.0}, evaluate_every=every)


@pytest.mark.medium
def test_names_of_rows_are_taken():
    log = callbacks.every(3, lambda run: run.log(grad_norm=1.0))
    with pytest.raises(ts.errors.RowError, match=r"'grad_norm' at run\.log\(\)"):
        fit(STEP, fresh(), data(), steps=20, callbacks=log)
    for name, rule in (("epoch", RULE), ("learning_rate", RULE), ("learning_rate", ts.rules.sgd(0.1))):
        odd = ts.train_step(lambda params, batch, name=name: ts.Loss(loss_fn(params, batch), 1.0, metrics={name: 3.0}))
        with pytest.raises(ts.errors.RowError, match=rf"metric '{name}' at loss_fn: got a name that fit reserves"):
            fit(odd, ts.setup(rule, init()), data(), steps=4)


@pytest.mark.medium
def test_a_pair_of_states_stops_on_nan():
    def step(states, batch):
        (one, info), (two, other) = STEP(states[0], batch), STEP(states[1], batch)
        return (one, two), {"one": info, "two": other}

    bad = ts.batches((X * np.nan, Y), 8)
    with pytest.warns(RuntimeWarning, match="was rejected"), pytest.raises(NonFiniteError, match="last of 4 in a row"):
        fit(step, (fresh(), fresh()), bad, steps=30, max_bad=4)


def test_a_number_for_each_class_has_columns():
    both = lambda params, batch: jnp.stack([loss_fn(params, batch), 2 * loss_fn(params, batch)])
    step = lambda params, batch: (params, {"parts": both(params, batch)})
    _, history = fit(step, init(), even(), steps=3, log_every=1)
    np.testing.assert_allclose(history["parts/1"], 2 * history["parts/0"])


@pytest.mark.parametrize("classes", [101, 1000, 1001])
def test_many_classes_have_columns_and_too_many_a_warning(classes):
    def step(params, batch):
        return params, {"loss": loss_fn(params, batch), "f1": jnp.arange(classes, dtype=jnp.float32)}

    with contextlib.ExitStack() as stack:
        if classes > 1000:
            text = r"'f1' gets no column: it has 1,001 elements, more than 1,000. Reduce it in the metric"
            caught = stack.enter_context(pytest.warns(UserWarning, match=text))
        _, history = fit(step, init(), even(), steps=9, log_every=1, steps_per_call=2)
    assert len(history["loss"]) == 9
    if classes > 1000:
        assert len(caught) == 1 and not any(name.startswith("f1") for name in history.names)
    else:
        assert [history.last(f"f1/{i}") for i in range(classes)] == [*range(classes)]


def test_memory_follows_its_callback(tmp_path):
    count = callbacks.every(2, count_calls)
    fit(STEP, fresh(), data(), steps=4, callbacks=count, checkpoint=tmp_path)
    both = [callbacks.time_limit(1e6), count]
    _, history = fit(STEP, fresh(), data(), steps=8, callbacks=both, checkpoint=tmp_path, log_every=1)
    assert history.series("calls")[1].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda f: callbacks.every(2, f),
        lambda f: callbacks.throttle(f, 0.0),
        lambda f: callbacks.every((2, "epoch"), callbacks.throttle(f, 0.0)),
    ],
)
def test_memory_follows_the_function_in_a_wrapper(tmp_path, wrap):
    def odd(run):
        run.memory["odd"] = run.memory.get("odd", 1) + 2

    def even(run):
        run.memory["even"] = run.memory.get("even", 0) + 2
        assert "odd" not in run.memory

    for steps, functions in ((4, (odd, even)), (8, (even, odd))):
        fit(STEP, fresh(), data(), steps=steps, callbacks=[*map(wrap, functions)], checkpoint=tmp_path)


def test_applied_steps_are_in_the_history_of_an_error():
    rows, seen = [(X[:8], Y[:8])] * 25, []
    log = lambda row, step: seen.append(step)
    with pytest.raises(DataError) as caught:
        fit(STEP, fresh(), iter(rows), steps=40, log_every=1, logger=log)
    assert int(caught.value.state.step) == 25 == caught.value.history["step"][-1] == seen[-1]


ON_A_MESH = pytest.param("mesh", marks=pytest.mark.several_devices)


@pytest.mark.parametrize("how", ["auto", 1, 3, None, "iterate", "run_epoch", "run_steps", "prefetch", ON_A_MESH])
def test_a_loader_may_refill_its_buffer(how):
    def refilled():
        for i in range(8):
            big[:] = i
            yield big

    @jax.jit
    def step(state, x):  # that reads x once more long after it was dispatched
        last = jax.lax.fori_loop(0, 0 if how == "auto" else 40, lambda i, c: jnp.tanh(c @ c.T) * 0 + x, x)
        return state * 2 + jnp.mean(last), {}

    big, state = np.empty((256, 256), np.float32), jnp.zeros(())
    if how == "iterate":
        *_, (state, _) = ts.loop.iterate(step, state, refilled(), steps=8, steps_per_call=2)
    elif how == "run_epoch":
        state, _ = ts.loop.run_epoch(step, state, refilled())
    elif how == "run_steps":
        two = np.empty((2, 256, 256), np.float32)
        for i in range(0, 8, 2):
            two[:] = np.array([i, i + 1])[:, None, None]
            state, _ = ts.loop.run_steps(step, state, two)
    elif how == "mesh":
        mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        state = jax.device_put(state, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
        state, _ = fit(step, state, refilled(), steps=8)
    else:
        given = ts.prefetch(refilled(), jax.devices()[0]) if how == "prefetch" else refilled()
        state, _ = fit(step, state, given, steps=8, **{} if how == "prefetch" else {"steps_per_call": how})
    assert float(state) == sum(i * 2 ** (7 - i) for i in range(8))


@pytest.mark.parametrize("how", ["iterate", "run_epoch", "run_steps", "fit", "evaluate"])
def test_an_argument_of_a_step_may_be_refilled_after_the_call(how):
    @jax.jit
    def step(state, x, scale):  # that reads scale once more long after it was dispatched
        last = jax.lax.fori_loop(0, 40, lambda i, c: jnp.tanh(c @ c.T) * 0 + scale, scale)
        return state + x[0] * jnp.mean(last), {}

    scale, state, batch = np.ones((256, 256), np.float32), jnp.zeros(()), np.ones(1, np.float32)
    if how == "iterate":
        for after, _ in ts.loop.iterate(step, state, [batch], steps=3, scale=scale):
            state, scale[:] = after, 7
    elif how == "run_epoch":
        state, _ = ts.loop.run_epoch(step, state, [batch] * 3, scale=scale)
    elif how == "run_steps":
        state, _ = ts.loop.run_steps(step, state, np.stack([batch] * 3), scale=scale)
    elif how == "fit":
        state, _ = fit(step, state, [batch], steps=3, extra={"scale": scale})
    else:
        score = ts.eval_step(lambda params, x, scale: step(params, x, scale)[0])
        state = ts.evaluate(score, ts.setup(RULE, state), [batch * 3], scale=scale)["loss"]
    scale[:] = 7
    assert float(state) == 3


@pytest.mark.medium
def test_batches_of_a_list_may_shrink():
    rows = [(X[:8], Y[:8])] + [(X[:4], Y[:4])] * 40
    state, _ = fit(STEP, fresh(), rows, steps=41)
    expected, _ = plainly(STEP, fresh(), rows, 41)
    assert_trees_close(state.params, expected.params, rtol=1e-5, atol=1e-6)


@pytest.mark.several_devices
def test_batches_of_another_device():
    """They are refused, as a step refuses them: a copy of each batch would be a cost that is not seen."""
    batches = [jax.device_put((X[:8], Y[:8]), jax.devices()[1])] * 3
    state = ts.to_device(fresh(), jax.devices()[2])
    with pytest.raises(DeviceError, match=r"batch\[0\]"):
        fit(STEP, state, batches, steps=3)
    assert ts.devices.device_of(state) == jax.devices()[2]


@pytest.mark.medium
@pytest.mark.several_devices
def test_a_callback_spreads_the_state_while_data_are_on_one_device():
    """The program cannot gather rows there any more: batches are copied instead, with the same numbers."""

    def spread(run):
        if run.step == 8:
            run.state = ts.shard(run.state, ts.mesh())

    options = {"steps": 16, "steps_per_call": 4, "log_every": 1}
    expected, rows = fit(STEP, fresh(), even(), **options)
    state = jax.device_put(fresh(), jax.devices()[0])
    resident = data(drop_remainder=True, device=jax.devices()[0])
    state, same = fit(STEP, state, resident, callbacks=callbacks.every(8, spread), **options)
    assert state.params["out"]["bias"].sharding.device_set == set(jax.devices())
    assert_trees_close(state.params, expected.params, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(same["loss"], rows["loss"], rtol=1e-5)


def count_programs(batches, **options):
    """How many programs of its loop a run traces."""
    step = ts.train_step(lambda params, x: jnp.mean((jnp.mean(x) - params["w"]) ** 2))
    fit(step, ts.setup(ts.rules.sgd(0.1), {"w": jnp.zeros(3)}), batches, log_every=10**6, **options)
    return fused_loop.fused(step, True).programs.traced


@pytest.mark.parametrize("first", ["short", "long"])
@pytest.mark.filterwarnings("ignore:batch at step 1")
def test_a_shape_has_one_program_however_long_its_runs_are(first):
    """Two lengths in runs of other lengths each: a call of a length has the same room every time."""
    short, long = np.ones((64, 128), np.float32), np.ones((64, 1024), np.float32)
    batches = [short, long] if first == "short" else [long, short]
    for n in range(1, 40):
        batches += [long] * (n % 9 + 1) + [short] * (n % 7 + 1)
    assert count_programs(iter(batches), epochs=1) == 2


@pytest.mark.several_devices
def test_a_callback_at_a_boundary_compiles_no_program_again():
    """Data on one device commit the state there at the first call, which moves it nowhere."""
    resident = ts.batches(X[:10], 4, device=jax.devices()[0])
    assert count_programs(resident, epochs=6, callbacks=callbacks.every(2, lambda run: None)) == 2


@pytest.mark.several_devices
def test_a_state_that_moves_keeps_the_shapes_that_are_known():
    def move(run):
        return ts.to_device(run.state, jax.devices()[run.step % 2])

    step = ts.train_step(lambda params, x: jnp.mean(jax.tree.leaves(x)[0]) * params["w"][0])
    batches = [X[:4]] * 3 + [{"x": X[:4]}] * 3
    with pytest.raises(DataError, match="batch at step 3: at batch: got dict with x, expected float32"):
        state = ts.setup(ts.rules.sgd(0.1), {"w": jnp.zeros(3)})
        fit(step, state, batches, epochs=1, callbacks=callbacks.every(3, move))


def test_resident_data_in_a_step_of_its_own():
    state, _ = fit(STEP, fresh(), data(device=True), steps=9, steps_per_call=None)
    expected, _ = fit(STEP, fresh(), data(), steps=9, steps_per_call=None)
    assert_trees_close(state.params, expected.params, rtol=1e-5, atol=1e-6)


@pytest.mark.several_devices
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_a_state_on_a_mesh(kind):
    """Rows are spread over its data axis, from the host and from the device, and the numbers are the same."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(getattr(jax.sharding.AxisType, kind),))
    home = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    _, rows = fit(STEP, fresh(), even(), steps=13, log_every=1)
    for used in (even(),) if kind == "Explicit" else (even(), data(drop_remainder=True, device=mesh)):
        _, found = fit(STEP, ts.setup(RULE, init(), device=home), used, steps=13, log_every=1)
        np.testing.assert_allclose(found["loss"], rows["loss"], rtol=1e-5)


@pytest.mark.several_devices
def test_rows_that_do_not_divide_by_the_devices():
    home = jax.sharding.NamedSharding(jax.make_mesh((4,), ("data",)), jax.sharding.PartitionSpec())
    odd = ts.batches((X[:46], Y[:46]), 8)  # 46 rows: the last batch has 6
    with pytest.raises(DataError, match=r"batch at mesh \{'data': 4\}: got 6 rows, expected a multiple of 4"):
        fit(STEP, ts.setup(RULE, init(), device=home), odd, epochs=1)
    state = ts.setup(RULE, init(), device=home)
    found = ts.evaluate(ts.eval_step(loss_fn), state, odd)["loss"]
    assert found == pytest.approx(float(loss_fn(init(), (X[:46], Y[:46]))), rel=1e-5)


def test_progress_knows_the_end_of_the_last_epoch(capsys):
    used = even()
    n = len(used)
    state, _ = fit(STEP, fresh(), used, epochs=2, progress=True)
    assert f"{2 * n}/{2 * n} steps  100%" in capsys.readouterr().err
    fit(STEP, state, (batch for batch in used), epochs=1, progress=True)
    assert f"{3 * n} steps" in capsys.readouterr().err


@pytest.mark.medium
def test_under_x64():
    with jax.experimental.enable_x64() if not hasattr(jax, "enable_x64") else jax.enable_x64(True):
        state = ts.setup(ts.rules.sgd(0.1), {"w": np.zeros(6, np.float64)})
        step = ts.train_step(lambda params, batch: jnp.mean((batch @ params["w"] - 1) ** 2))
        state, history = fit(step, state, ts.batches(X.astype(np.float64), 8), steps=9, log_every=1)
    assert state.params["w"].dtype == np.float64 and history["loss"][-1] < history["loss"][0]


def test_progress_says_from_where_a_run_goes_on(tmp_path, capsys):
    for steps in (4, 8):
        ts.fit(STEP, fresh(), data(), steps=steps, checkpoint=tmp_path)
        assert (f"resumed from {tmp_path}, step 4" in capsys.readouterr().err) == (steps == 8)


@pytest.mark.medium
def test_progress_shows_no_total_if_a_step_is_several_calls(capsys):
    state, _ = ts.fit(STEP, ts.setup(ts.rules.accumulate(RULE, every=2), init()), data(), epochs=2)
    said = capsys.readouterr().err
    assert f"{int(state.step)} steps" in said and "/14" not in said


class Sized:
    """A loader of six batches whose length is what is given, or raises it."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        if isinstance(self.length, Exception):
            raise self.length
        return self.length

    def __iter__(self):
        return iter([(X[i : i + 4], Y[i : i + 4]) for i in range(0, 24, 4)])


LENGTHS = [NotImplementedError("a stream"), ValueError("none"), AttributeError("x"), StopIteration(), -1, 0, 2, 2.5, 9]


@pytest.mark.parametrize("length", LENGTHS, ids=repr)
def test_only_the_progress_needs_the_length_of_a_loader(capsys, length):
    """Read ahead, too, every batch of each epoch is trained on."""
    whole, _ = fit(STEP, fresh(), list(Sized(6)), epochs=2)
    for data in (Sized(length), ts.prefetch(Sized(length))):
        state, history = loud_fit(STEP, fresh(), data, epochs=2, log_every=1)
        assert_trees_equal(state, whole)
        assert history["epoch"].tolist() == [0] * 6 + [1] * 6
        *_, last = capsys.readouterr().err.splitlines()
        assert last.startswith("12/18 steps  67%  loss" if length == 9 else "12 steps  loss")


def test_an_interrupt_while_the_data_are_closed_has_the_state():
    def interrupted():
        raise KeyboardInterrupt

    used = ts.prefetch([toys.X])
    late = callbacks.every(3, lambda run: setattr(used, "close", interrupted))
    with pytest.raises(KeyboardInterrupt) as caught:
        fit(ts.train_step(toys.loss_fn), toys.state(), used, steps=3, callbacks=late)
    assert int(caught.value.state.step) == 3 and len(caught.value.history["loss"]) >= 1


@pytest.mark.medium
def test_a_last_batch_that_cannot_be_cut_is_refused_before_the_first_step(tmp_path):
    step, calls = ts.train_step(toys.loss_fn, accumulate=3), []
    by_row = ts.train_step(toys.loss_fn, accumulate=3, per_example=lambda grads: grads)
    text = (
        r"got 4 rows, the last batch of an epoch of 6, expected a multiple of accumulate=3\. Choose such a batch_size"
    )
    twelve = functools.partial(ts.batches, toys.X, 12)
    fit(step, toys.state(), twelve(), steps=5)  # it never gets there
    fit(step, toys.state(), twelve(), steps=3, checkpoint=tmp_path)
    for refused, batches, goal in (
        (step, twelve(), {"epochs": 1}),
        (step, twelve(), {"steps": 6}),
        (step, twelve(), {"steps": 6, "checkpoint": tmp_path}),  # resumed in the middle of the epoch
        (by_row, ts.prefetch(twelve()), {"epochs": 1}),
    ):
        with pytest.raises(LossError, match=text):
            fit(refused, toys.state(), batches, callbacks=calls.append, **goal)
    assert not calls
    fit(step, toys.state(), twelve(drop_remainder=True), epochs=2)
    means = optax.stateless(lambda grads, _: jax.tree.map(lambda g: -0.1 * g.mean(0), grads))
    apart = ts.train_step(toys.loss_fn, accumulate=3, per_example=True)
    fit(apart, ts.setup(means, {"w": jnp.ones(8)}), twelve(), epochs=1)
    with pytest.raises(LossError, match=r"got 10 rows, expected"):  # no last one, but all
        fit(step, toys.state(), ts.batches(toys.X[:43], 10), epochs=1)
    padding = lambda params, x, mask: ts.Loss.mean((x @ params["w"]) ** 2, mask)
    fit(ts.train_step(padding, accumulate=3), toys.state(), twelve(), epochs=1)


def test_a_finished_run_says_that_nothing_is_to_do_whatever_would_not_divide(tmp_path):
    again = lambda step, **options: fit(step, toys.state(), ts.batches(toys.X, 12), epochs=1, **options)
    again(ts.train_step(toys.loss_fn), checkpoint=tmp_path)
    with pytest.warns(UserWarning, match="nothing to do"):
        again(ts.train_step(toys.loss_fn, accumulate=3), checkpoint=tmp_path)


def test_jax_debug_nans_and_the_guard_do_not_fight():
    """A run that rejects steps and accumulates over calls is the same run: no integer looks like a NaN to JAX."""
    rows = np.random.default_rng(0).normal(size=(32, 3)).astype(np.float32)
    rows[9] = np.nan
    data = [{"x": rows[i : i + 4], "y": rows[i : i + 4, 0]} for i in range(0, 32, 4)]
    step = ts.train_step(lambda params, batch: jnp.mean((batch["x"] @ params - batch["y"]) ** 2))
    rule = ts.rules.accumulate(ts.rules.adam(optax.linear_schedule(0.1, 0.01, 8)), 2)
    found = []
    for debugs in (False, True):
        with jax.debug_nans(debugs), pytest.warns(RuntimeWarning, match="step 1 .* was rejected"):
            found.append(fit(step, ts.setup(rule, jnp.zeros(3)), data, steps=3, log_every=1))
    assert_trees_equal(found[0][0], found[1][0])
    for name in ("loss", "grad_norm", "rejected", "learning_rate"):
        assert_trees_equal(found[0][1][name], found[1][1][name])


def test_a_forgotten_return_a_consumed_state_and_a_wrong_history_are_named():
    step, data = ts.train_step(toys.loss_fn), ts.batches(toys.X, 8)
    fit = lambda **options: ts.fit(step, toys.state(), data, steps=4, progress=False, **options)
    with pytest.raises(WrongTypeError, match="result at evaluate: got None, expected a dict of numbers"):
        fit(evaluate=lambda state: None)
    with pytest.raises(WrongTypeError, match=r"history at fit\(\): got 3"):
        fit(history=3)
    states = []

    def an_older_state(run):
        states.append(run.state)
        return states[0] if run.step == 2 else None

    with pytest.raises(StateError, match="state at the callback's state: got one that was donated"):
        fit(callbacks=ts.callbacks.every(1, an_older_state))


def test_examples_a_second_are_those_of_all_batches_of_an_epoch():
    """7 batches of 50 rows, the last with 2: a row at every seventh step is no row of 2 examples a step."""
    x, step = np.ones((50, 8), np.float32), ts.train_step(toys.loss_fn)
    callbacks = ts.callbacks.every(1, lambda run: None)
    _, history = ts.fit(
        step, toys.state(), ts.batches(x, 8), steps=35, log_every=7, callbacks=callbacks, progress=False
    )
    ratios = history["examples_per_second"] / history["steps_per_second"]
    np.testing.assert_allclose(ratios[2:], 50 / 7, rtol=0.15)


@pytest.mark.parametrize("factor", [2.0, np.array([2.0, 2.0], np.float32)], ids=["plain", "array"])
def test_a_loss_function_without_a_hash(factor):
    @dataclasses.dataclass  # compared by its fields: a step with it has the hash of its identity
    class Loss:
        factor: object

        def __call__(self, params, batch):
            return jnp.mean((batch @ (self.factor * params["w"]) - 1) ** 2)

    step, data = ts.train_step(Loss(factor)), ts.batches(np.full((8, 2), 3.0, np.float32), 4)
    state, _ = ts.fit(step, ts.setup(optax.adam(0.1), {"w": jnp.zeros(2)}), data, epochs=2, progress=False)
    again = ts.setup(optax.adam(0.1), {"w": jnp.zeros(2)})
    for _ in range(2):
        for batch in data:
            again, _ = step(again, batch)
    assert_trees_equal(state, again)
    assert "FLOP" in str(ts.describe(step, state, batch))
    assert ts.evaluate(ts.eval_step(Loss(factor)), state, data)["loss"] < 1


def test_an_evaluator_may_have_a_loss_function():
    class Evaluator:
        def __init__(self, loss_fn):
            self.loss_fn = loss_fn

        def __call__(self, state):
            return {"val/loss": float(self.loss_fn(state.params, toys.X))}

    step, options = ts.train_step(toys.loss_fn), {"epochs": 1, "progress": False}
    _, history = ts.fit(step, toys.state(), [toys.X], evaluate=Evaluator(toys.loss_fn), **options)
    assert history.last("val/loss") > 0
    for one in (step, ts.eval_step(toys.loss_fn)):
        with pytest.raises(WrongTypeError, match=r"evaluate at fit.*lambda state: ts\.evaluate"):
            ts.fit(step, toys.state(), [toys.X], evaluate=one, **options)
