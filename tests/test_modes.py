"""Dropout and batch-norm in both modes, with NNX and Linen: what a step draws, moves and leaves alone.

What is expected comes from NumPy: the mask from the outputs themselves, the statistics from the batch.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tsunax as ts
from flax import linen, nnx
from tests import toys
from tests.helpers import assert_trees_close, assert_trees_equal, count_compiles, need
from tsunax.errors import LossError

ROWS, FEATURES, MOMENTUM, EPS = 64, 3, 0.9, 1e-5
KEY = jax.random.key(7)


def make_batch(seed=0):
    return np.random.default_rng(seed).normal(size=(ROWS, FEATURES)).astype(np.float32) * 2 + 3


# A model of each library: dropout of the input, then batch-norm. The metrics carry what each of them gave.


@dataclasses.dataclass(frozen=True)
class Model:
    params: Any
    model_state: Any
    apply: Callable  # (params, model_state, x, key, train) -> (dropped, normalised, model_state)
    stats: Callable  # model_state -> (mean, var)


class LinenNet(linen.Module):
    rate: float

    @linen.compact
    def __call__(self, x, train):
        dropped = linen.Dropout(self.rate, deterministic=not train)(x)
        return dropped, linen.BatchNorm(use_running_average=not train, momentum=MOMENTUM, epsilon=EPS)(dropped)


def of_linen(rate):
    net = LinenNet(rate)
    variables = net.init(jax.random.key(0), jnp.ones((1, FEATURES)), train=False)

    def apply(params, stats, x, key, train):
        rngs = {} if key is None else {"dropout": key}
        out, new = net.apply({"params": params, "batch_stats": stats}, x, train, rngs=rngs, mutable=["batch_stats"])
        return *out, new["batch_stats"]

    stats_of = lambda stats: (stats["BatchNorm_0"]["mean"], stats["BatchNorm_0"]["var"])
    return Model(variables["params"], variables["batch_stats"], apply, stats_of)


class NNXNet(nnx.Module):
    def __init__(self, rate):
        self.dropout = nnx.Dropout(rate)
        self.norm = nnx.BatchNorm(FEATURES, momentum=MOMENTUM, epsilon=EPS, rngs=nnx.Rngs(0))

    def __call__(self, x, key):
        dropped = self.dropout(x, rngs=None if key is None else nnx.Rngs(key))
        return dropped, self.norm(dropped)


def of_nnx(rate):
    graphdef, params, stats = nnx.split(NNXNet(rate), nnx.Param, nnx.BatchStat)

    def apply(params, stats, x, key, train):
        net = nnx.merge(graphdef, params, stats)
        net.train() if train else net.eval()
        out = net(x, key)
        return *out, nnx.state(net, nnx.BatchStat)

    stats_of = lambda stats: tuple(jax.tree.leaves(stats))  # by name: mean, var
    return Model(params, stats, apply, stats_of)


MODELS = {"linen": of_linen, "nnx": of_nnx}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Seen:
    """The last value, as a metric."""

    value: Any

    def merge(self, other):
        return other

    def compute(self):
        return self.value


@functools.cache
def trained(library, rate=0.5):
    """A model with its steps, compiled once for many tests."""
    model = MODELS[library](rate)

    def loss_fn(params, batch, *, model_state, train, key=None):
        dropped, out, new = model.apply(params, model_state, batch, key, train or key is not None)
        seen = {"dropped": Seen(dropped), "out": Seen(out)}
        return ts.Loss.mean((out - 1) ** 2, metrics=seen, model_state=new)

    return model, ts.train_step(loss_fn, donate=False), ts.eval_step(loss_fn)


def start(model):
    return ts.setup(ts.rules.sgd(0.1), model.params, key=KEY, model_state=model.model_state)


@pytest.fixture(params=MODELS)
def library(request):
    return request.param


def moved(before, batch):
    """Statistics after one batch, from NumPy."""
    mean, var = (np.asarray(x, np.float64) for x in before)
    x = np.asarray(batch, np.float64)
    return MOMENTUM * mean + (1 - MOMENTUM) * x.mean(0), MOMENTUM * var + (1 - MOMENTUM) * x.var(0)


# ---------------------------------------------------------------------------------------------------- train mode


def test_train_mode_drops_and_moves_the_statistics(library):
    model, step, _ = trained(library)
    state, info = step(start(model), make_batch())
    dropped = np.asarray(info.metrics["dropped"])
    kept = dropped != 0
    assert 0.3 < kept.mean() < 0.7
    assert_trees_close(dropped, np.where(kept, make_batch() / 0.5, 0), rtol=1e-6, atol=0)
    assert_trees_close(
        model.stats(state.model_state), moved(model.stats(model.model_state), dropped), rtol=1e-4, atol=1e-5
    )
    x = dropped.astype(np.float64)  # normalised by the batch, not by the statistics
    assert_trees_close(info.metrics["out"], (x - x.mean(0)) / np.sqrt(x.var(0) + EPS), rtol=1e-3, atol=1e-4)


def test_every_call_drops_others_and_the_same_again_from_the_same_state(library):
    model, step, _ = trained(library)
    first, info_1 = step(start(model), make_batch())
    _, info_2 = step(first, make_batch())
    _, again = step(start(model), make_batch())
    assert ((info_1.metrics["dropped"] == 0) != (info_2.metrics["dropped"] == 0)).any()
    assert_trees_equal(again.metrics, info_1.metrics)


def test_a_rejected_step_keeps_the_statistics_and_its_key_is_not_used_again(library):
    model, step, _ = trained(library)
    state = start(model)
    bad = make_batch()
    bad[0] = np.nan
    rejected, info = step(state, bad)
    assert not bool(info.applied)
    assert_trees_equal((rejected.model_state, rejected.params), (state.model_state, state.params))
    _, after = step(rejected, make_batch())
    _, at_once = step(state, make_batch())
    assert bool(after.applied)
    assert ((after.metrics["dropped"] == 0) != (at_once.metrics["dropped"] == 0)).any()


@pytest.mark.medium
@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_nothing_and_everything_dropped(library, rate):
    model, step, _ = trained(library, rate)
    state, info = step(start(model), make_batch())
    expected = make_batch() if rate == 0 else np.zeros_like(make_batch())
    assert_trees_equal(info.metrics["dropped"], expected)
    assert bool(info.applied) and np.isfinite(info.loss) and np.isfinite(info.grad_norm)
    assert_trees_close(
        model.stats(state.model_state), moved(model.stats(model.model_state), expected), rtol=1e-4, atol=1e-5
    )


# ----------------------------------------------------------------------------------------------------- eval mode


def test_eval_mode_drops_nothing_and_leaves_the_state_as_it_is(library):
    model, step, evaluate = trained(library)
    state, _ = step(start(model), make_batch())
    before = jax.tree.map(np.asarray, state.model_state)
    a, b = (evaluate(state, make_batch(1)) for _ in range(2))
    assert_trees_equal(a, b)
    assert a.model_state is None
    assert_trees_equal(state.model_state, before)
    assert_trees_equal(a.metrics["dropped"].compute(), make_batch(1))
    mean, var = (np.asarray(x, np.float64) for x in model.stats(state.model_state))
    x = (make_batch(1) - mean) / np.sqrt(var + EPS)  # normalised by the statistics, not by the batch
    scale, bias = named(state.params, "scale"), named(state.params, "bias")
    assert_trees_close(a.metrics["out"].compute(), x * scale + bias, rtol=1e-4, atol=1e-4)


def named(params, name):
    return next(
        np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(params) if name in jax.tree_util.keystr(path)
    )


def test_both_modes_are_compiled_once_and_do_not_disturb_each_other(library):
    model, step, evaluate = trained(library)
    state = start(model)
    state, _ = step(state, make_batch())
    evaluate(state, make_batch())
    with count_compiles() as c:
        for i in range(3):
            state, _ = step(state, make_batch())
            evaluate(state, make_batch(i))
    assert c.compiles == 0


def test_a_key_given_to_an_evaluation_is_monte_carlo_dropout(library):
    model, _, evaluate = trained(library)
    state = start(model)
    one, other = (evaluate(state, make_batch(), key=jax.random.key(i)).metrics["dropped"].compute() for i in range(2))
    assert ((one == 0) != (other == 0)).any()


# ------------------------------------------------------------------------------------ frozen is not eval mode


@pytest.mark.medium
def test_frozen_parameters_do_not_stop_the_statistics(library):
    model, step, _ = trained(library)
    state = ts.freeze(start(model), "**")
    after, info = step(state, make_batch())
    assert_trees_equal(after.params, state.params)
    dropped = info.metrics["dropped"]
    assert (dropped == 0).any()
    assert_trees_close(
        model.stats(after.model_state), moved(model.stats(state.model_state), dropped), rtol=1e-4, atol=1e-5
    )


def test_a_single_layer_in_eval_mode():
    """NNX, whose modes can be set layer by layer."""
    graphdef, params, stats = nnx.split(NNXNet(0.5), nnx.Param, nnx.BatchStat)

    def loss_fn(params, batch, model_state, key):
        net = nnx.merge(graphdef, params, model_state)
        net.train()
        net.norm.eval()
        dropped, out = net(batch, key)
        return ts.Loss.mean(out**2, metrics={"dropped": Seen(dropped)}, model_state=nnx.state(net, nnx.BatchStat))

    state = ts.setup(ts.rules.sgd(0.1), params, key=KEY, model_state=stats)
    after, info = ts.train_step(loss_fn, donate=False)(state, make_batch())
    assert (info.metrics["dropped"] == 0).any()
    assert_trees_equal(after.model_state, stats)


@pytest.mark.medium
def test_how_to_stop_the_statistics(library):
    """Two ways: normalise by the batch and hand the old statistics back; or eval mode, which normalises by them."""
    model, *_ = trained(library)

    def keeping(params, batch, model_state, key):
        _, out, _ = model.apply(params, model_state, batch, key, True)
        return ts.Loss.mean((out - 1) ** 2)

    def in_eval_mode(params, batch, model_state):
        _, out, _ = model.apply(params, model_state, batch, None, False)
        return ts.Loss.mean((out - 1) ** 2, metrics={"out": Seen(out)})

    for loss_fn in (keeping, in_eval_mode):
        state = start(model)
        after, info = ts.train_step(loss_fn, donate=False)(state, make_batch())
        assert_trees_equal(after.model_state, state.model_state)
        assert float(info.grad_norm) > 0
    # fresh statistics are 0 and 1
    assert_trees_close(info.metrics["out"], make_batch() / np.sqrt(1 + EPS), rtol=1e-5, atol=1e-5)


@pytest.mark.medium
@pytest.mark.parametrize("kind", ["nnx", "linen", "raw"])
def test_a_key_without_train_is_an_error(kind):
    """Dropout would be off in training: the mode is False unless it is handed on."""
    x = jnp.ones((4, FEATURES))
    if kind == "linen":
        net = LinenNet(0.5)
        model = ts.models.linen(net, net.init(jax.random.key(0), x, train=False))
    elif kind == "nnx":
        layers = nnx.Linear(FEATURES, 2, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1))
        model = ts.models.nnx(nnx.Sequential(*layers))
    else:
        model = ts.models.raw(lambda params, x, key, train: x @ params, jnp.ones(FEATURES))
    apply = functools.partial(model.apply, model.params, x, model_state=model.model_state)
    with pytest.raises(LossError, match=r"train at Model.apply\(\): got none .* with a key.*Name `train` in loss_fn"):
        apply(key=KEY)
    for given in (dict(key=KEY, train=True), dict(key=KEY, train=False), dict(train=False), {}):
        apply(**given)


@pytest.mark.medium
@pytest.mark.parametrize("kind", ["nnx", "linen", "raw", "equinox"])
def test_a_training_step_names_the_mode_of_its_models(kind):
    """Forgotten, dropout would be off in training, and batch statistics would stay."""
    x = jnp.ones((4, FEATURES))
    if kind == "linen":
        net = LinenNet(0.5)
        model = ts.models.linen(net, net.init(jax.random.key(0), x, train=False))
    elif kind == "nnx":
        model = ts.models.nnx(nnx.BatchNorm(FEATURES, rngs=nnx.Rngs(0)))
    elif kind == "equinox":
        eqx = need("equinox")
        layers = eqx.nn.Linear(FEATURES, 2, key=KEY), eqx.nn.Dropout(0.5)
        model = ts.models.equinox(eqx.nn.Sequential(layers), vmap=True)
    else:
        apply = lambda params, x, train: x @ params["a"] * (2 if train else 1)
        model = ts.models.raw(apply, {"a": jnp.ones(FEATURES)})
    params = {"a": jnp.ones(FEATURES), "model": model.params}

    def loss_fn(params, batch, mode):
        out, _ = model.apply(params["model"], batch, model_state=model.model_state, **mode)
        return jnp.mean(jnp.asarray(jax.tree.leaves(out)[0]) ** 2) + sum(map(jnp.sum, jax.tree.leaves(params)))

    for train_step in (ts.train_step, functools.partial(ts.train_step, accumulate=2)):
        step = train_step(lambda params, batch: loss_fn(params, batch, {}), donate=False)
        with pytest.raises(LossError, match=r"train at Model.apply\(\): got none in a training step, .*dropout is off"):
            step(ts.setup(ts.rules.sgd(0.1), params), x)
    ts.eval_step(lambda params, batch: loss_fn(params, batch, {}))(ts.setup(ts.rules.sgd(0.1), params), x)
    step = ts.train_step(lambda params, batch: loss_fn(params, batch, {"train": False}), donate=False)
    step(ts.setup(ts.rules.sgd(0.1), params), x)  # a model that is not trained, for example


def test_attention_without_dropout_has_one_mode():
    class Net(nnx.Module):
        def __init__(self):
            self.attention = nnx.MultiHeadAttention(2, 4, decode=False, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.attention(x)

    model = ts.models.nnx(Net())
    loss_fn = lambda params, x: jnp.mean(model.apply(params, x)[0] ** 2)
    ts.train_step(loss_fn)(ts.setup(ts.rules.sgd(0.1), model.params), jnp.ones((2, 3, 4)))


@pytest.mark.medium
@pytest.mark.parametrize("accumulate", [1, 2])
def test_new_batch_statistics_must_be_returned(accumulate):
    model = ts.models.nnx(nnx.BatchNorm(FEATURES, rngs=nnx.Rngs(0)))

    def loss_fn(params, batch, model_state, train, returned):
        apply = lambda params, model_state: model.apply(params, batch, model_state=model_state, train=train)
        transform = {"jit": jax.jit, "checkpoint": jax.checkpoint}.get(returned, lambda f: f)
        out, new = transform(apply)(params, model_state)
        states = {"new": new, "old": model_state}
        return ts.Loss.mean(out**2, model_state=states.get(returned))

    def after(returned):
        fn = lambda params, batch, model_state, train: loss_fn(params, batch, model_state, train, returned)
        state = ts.setup(ts.rules.sgd(0.1), model.params, model_state=model.model_state)
        step = ts.train_step(fn, accumulate=accumulate, donate=False)
        ts.eval_step(fn)(state, make_batch())  # which moves nothing
        return step(state, make_batch())[0].model_state

    assert_trees_equal(after("old"), model.model_state)
    assert not np.array_equal(after("new")["mean"], model.model_state["mean"])
    for returned in ("none", "jit", "checkpoint"):
        with pytest.raises(LossError, match=r"model_state at the result of loss_fn: got none, .*model_state=new\)"):
            after(returned)


def test_a_key_alone_is_enough_for_a_function_without_modes():
    model = ts.models.raw(lambda params, x, key: x * params + jax.random.normal(key, x.shape), jnp.ones(FEATURES))
    model.apply(model.params, jnp.ones(FEATURES), key=KEY)


def dropping(params, x, key=None):
    return toys.loss_fn(params, x if key is None else x * jax.random.bernoulli(key, 0.5, x.shape))


def test_a_key_that_a_loss_function_would_take_and_the_state_lacks_is_warned_of():
    with pytest.warns(
        UserWarning, match=r"dropping\(params, x, key\) names key, but the state has none.* setup\(\.\.\., key=0\)"
    ):
        ts.train_step(dropping)(toys.state(), toys.X)
    with pytest.warns(UserWarning) as told:
        ts.train_step(dropping)(toys.state(), toys.X[:8])
    assert len(told) == 1
    ts.train_step(functools.partial(dropping, key=None))(toys.state(), toys.X)  # meant so
    ts.train_step(dropping)(toys.state(key=0), toys.X)
    ts.eval_step(dropping)(toys.state(), toys.X)
    ts.value_and_grad(dropping)(toys.state(), toys.X, key=jax.random.key(0))
