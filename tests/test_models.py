"""Models of every library: the same training gives the same numbers, whatever the model was written in.

What is expected comes from a loop written by hand in plain JAX and optax, from NumPy, and for the matrix from the raw
function's run.
"""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tsunax as ts
from flax import linen, nnx
from flax.core import freeze
from tests.helpers import assert_trees_close, assert_trees_equal, count_compiles, medium_if, need
from tsunax import errors, models, testing
from tsunax.errors import ParamsError, StateError, TsunaxError, WrongTypeError

RNG = np.random.default_rng(0)
WEIGHTS = [RNG.normal(size=shape).astype(np.float32) for shape in ((3, 8), (8,), (8, 2), (2,))]
BATCH = {"x": RNG.normal(size=(16, 3)).astype(np.float32), "y": RNG.normal(size=(16, 2)).astype(np.float32)}
STEPS = 4

# ----------------------------------------------------------------------------------- one network in every library


def dense(params, x):
    return jax.lax.dot(x, params["kernel"]) + params["bias"][None]


def of_raw():
    def forward(params, x):
        return dense(params["last"], jnp.tanh(dense(params["first"], x)))

    w1, b1, w2, b2 = WEIGHTS
    return models.raw(forward, {"first": {"kernel": w1, "bias": b1}, "last": {"kernel": w2, "bias": b2}})


class NNXNet(nnx.Module):
    def __init__(self, rngs):
        self.first, self.last = nnx.Linear(3, 8, rngs=rngs), nnx.Linear(8, 2, rngs=rngs)

    def __call__(self, x):
        return self.last(jnp.tanh(self.first(x)))


def of_nnx():
    net = NNXNet(nnx.Rngs(0))
    for layer, (w, b) in ((net.first, WEIGHTS[:2]), (net.last, WEIGHTS[2:])):
        layer.kernel, layer.bias = nnx.Param(jnp.asarray(w)), nnx.Param(jnp.asarray(b))
    return models.nnx(net)


class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(2, name="last")(jnp.tanh(linen.Dense(8, name="first")(x)))


def of_linen():
    return models.linen(LinenNet(), {"params": of_raw().params})


@functools.cache
def equinox_net():
    eqx = need("equinox")

    class Net(eqx.Module):
        first: eqx.nn.Linear
        last: eqx.nn.Linear

        def __call__(self, x):
            return self.last(jnp.tanh(self.first(x)))

    def linear(w, b):
        layer = eqx.nn.Linear(*w.shape, key=jax.random.key(0))
        return eqx.tree_at(lambda m: (m.weight, m.bias), layer, (jnp.asarray(w.T), jnp.asarray(b)))

    return Net(linear(*WEIGHTS[:2]), linear(*WEIGHTS[2:]))


def of_equinox():
    return models.equinox(equinox_net(), vmap=True)


MODELS = {"raw": of_raw, "nnx": of_nnx, "linen": of_linen, "equinox": of_equinox}


def as_weights(params):
    """The four arrays of such params, in the order and layout of `WEIGHTS`."""
    named = {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(params)}
    first, last = ([x for name, x in named.items() if layer in name] for layer in ("first", "last"))
    pick = lambda layer, ndim: next(x for x in layer if x.ndim == ndim)
    w1, w2 = (pick(layer, 2) for layer in (first, last))
    if w1.shape != (3, 8):  # equinox: (out, in)
        w1, w2 = w1.T, w2.T
    return [w1, pick(first, 1), w2, pick(last, 1)]


def predicted(weights, x):
    w1, b1, w2, b2 = (np.asarray(w, np.float64) for w in weights)
    return np.tanh(x @ w1 + b1) @ w2 + b2


def loss_of(model):
    def loss_fn(params, batch, model_state, train, key=None):
        out, model_state = model.apply(params, batch["x"], model_state=model_state, key=key, train=train)
        return ts.Loss.mean((out - batch["y"]) ** 2, model_state=model_state)

    return loss_fn


def rule():
    return ts.rules.sgd(0.05, momentum=0.9)


# what setup gets, what train_step gets, and what is done to the state before
VARIANTS = {
    "plain": ({}, {}, None),
    "accumulate": ({}, {"accumulate": 2}, None),
    "bfloat16": ({"precision": "bfloat16"}, {}, None),
    "freeze": ({}, {}, "first/**"),
    "ema": ({"ema": 0.5}, {}, None),
}


@functools.cache
def run(library, variant):
    """(model, state, losses) after some steps."""
    model = MODELS[library]()
    of_setup, of_step, frozen = VARIANTS[variant]
    state = ts.setup(rule(), model.params, model_state=model.model_state, key=0, **of_setup)
    if frozen:
        state = ts.freeze(state, frozen)
    step, losses = ts.train_step(loss_of(model), donate=False, **of_step), []
    for _ in range(STEPS):
        state, info = step(state, BATCH)
        losses.append(np.float32(info.loss))
    return model, state, np.stack(losses)


@functools.cache
def by_hand():
    """The losses and weights of the same training, in plain JAX."""
    tx, params = optax.sgd(0.05, momentum=0.9), [jnp.asarray(w) for w in WEIGHTS]

    def loss_fn(params):
        w1, b1, w2, b2 = params
        hidden = jnp.tanh(jnp.dot(BATCH["x"], w1) + b1[None])
        return jnp.mean((jnp.dot(hidden, w2) + b2[None] - BATCH["y"]) ** 2)

    @jax.jit
    def step(params, opt_state):
        loss, grads = jax.value_and_grad(loss_fn)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    opt_state, losses = tx.init(params), []
    for _ in range(STEPS):
        params, opt_state, loss = step(params, opt_state)
        losses.append(np.float32(loss))
    return params, np.stack(losses)


@pytest.fixture(params=MODELS)
def library(request):
    return request.param


def test_the_numbers_of_a_loop_written_by_hand(library):
    _, state, losses = run(library, "plain")
    params, expected = by_hand()
    assert expected[-1] < 0.7 * expected[0]
    assert_trees_close(losses, expected, rtol=5e-7, atol=0)
    assert_trees_close(as_weights(state.params), params, rtol=2e-6, atol=1e-7)


@pytest.mark.medium
@pytest.mark.parametrize(
    "variant", medium_if(lambda name: name != "accumulate", [name for name in VARIANTS if name != "plain"])
)
@pytest.mark.parametrize("name", [name for name in MODELS if name != "raw"])
def test_every_trick_gives_every_library_the_numbers_of_the_raw_function(name, variant):
    _, state, losses = run(name, variant)
    _, reference, expected = run("raw", variant)
    rtol = 1e-2 if variant == "bfloat16" else 5e-7
    assert_trees_close(losses, expected, rtol=rtol, atol=0)
    params = [as_weights(s.params) for s in (state, reference)]
    assert_trees_close(*params, rtol=rtol, atol=1e-2 if variant == "bfloat16" else 2e-7)
    if variant == "ema":
        averages = [as_weights(ts.averaged(s).params) for s in (state, reference)]
        assert_trees_close(*averages, rtol=2e-6, atol=2e-7)
        assert np.abs(averages[0][0] - params[0][0]).max() > 1e-3
    frozen = variant == "freeze"
    assert [np.array_equal(a, b) for a, b in zip(params[0], WEIGHTS, strict=True)] == [frozen, frozen, False, False]


@pytest.mark.medium
def test_every_library_passes_the_checks_for_ones_own_step(library):
    model, batches = MODELS[library](), [BATCH] * 6
    fresh = lambda key=0, **more: ts.setup(rule(), model.params, model_state=model.model_state, key=key, **more)
    step = ts.train_step(loss_of(model))
    testing.check_purity(step, fresh(), BATCH)
    testing.check_accumulation(step, fresh(), BATCH)
    testing.check_precision(step, fresh(precision="bfloat16"), BATCH)
    testing.check_frozen(step, fresh(), BATCH, "first/**")
    testing.check_population(step, fresh, BATCH)
    testing.check_fused(step, fresh(), batches)
    testing.check_resume(step, fresh(), batches, fast_forward=True)
    testing.check_donation(step, fresh(), BATCH)
    testing.check_recompiles(step, fresh(), batches)


@pytest.mark.medium
def test_the_model_built_from_a_state_predicts_what_apply_does(library):
    model, state, _ = run(library, "ema")
    for s in (state, ts.averaged(state)):
        net = model.build(s)
        out = jax.vmap(net)(BATCH["x"]) if library == "equinox" else net(BATCH["x"])
        applied, _ = model.apply(s.params, BATCH["x"], model_state=s.model_state)
        assert_trees_close(out, applied, rtol=1e-6, atol=1e-6)
        assert_trees_close(out, predicted(as_weights(s.params), BATCH["x"]), rtol=1e-4, atol=1e-5)


@pytest.mark.medium
def test_a_built_model_is_of_its_library_and_outlives_the_state(library):
    model, state, _ = run(library, "plain")
    state = jax.tree.map(jnp.copy, state)  # other tests have the one of `run`
    net = model.build(state)
    kind = {"nnx": nnx.Module, "linen": linen.Module, "equinox": need("equinox").Module if library == "equinox" else ()}
    assert isinstance(net, kind[library]) if library in kind else callable(net)
    x = BATCH["x"][0] if library == "equinox" else BATCH["x"]
    before = np.asarray(net(x))
    for leaf in jax.tree.leaves(state.params):
        leaf.delete()
    assert_trees_equal(net(x), before)


def test_a_model_that_carries_nothing_needs_no_model_state(library):
    model = MODELS[library]()
    assert not jax.tree.leaves(model.model_state)

    def loss_fn(params, batch):
        out, nothing = model.apply(params, batch["x"])
        assert nothing is None
        return ts.Loss.mean((out - batch["y"]) ** 2, model_state=nothing)

    state = ts.setup(rule(), model.params)
    expected = np.mean((predicted(WEIGHTS, BATCH["x"]) - BATCH["y"]) ** 2)
    assert_trees_close(ts.eval_step(loss_fn)(state, BATCH).compute(), expected, rtol=1e-5, atol=0)


def test_inside_a_step_there_are_plain_dicts_only():
    """A Python object in the state is what every call would pay for."""
    for model in (of_nnx(), drops_nnx()):
        nodes = [model.params, model.model_state]
        for node in nodes:
            nodes += [child for child in node.values() if not isinstance(child, jax.Array)]
        assert {type(node) for node in nodes} == {dict}


def test_nnx_paths_are_readable():
    class Stack(nnx.Module):
        def __init__(self, rngs):
            layers = [nnx.Linear(2, 2, rngs=rngs) for _ in range(2)]
            self.layers = nnx.List(layers) if hasattr(nnx, "List") else layers

        def __call__(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    model = models.nnx(Stack(nnx.Rngs(0)))
    state = ts.setup(rule(), model.params, trainable="layers/1/kernel")
    assert [x is not None for x in jax.tree.leaves(ts.trainable(state), is_leaf=lambda x: x is None)] == [
        *[False, False],
        *[False, True],
    ]
    assert model.apply(state.params, jnp.ones((1, 2)))[0].shape == (1, 2)


@pytest.mark.medium
def test_importing_tsunax_loads_no_model_library():
    code = (
        "import sys; from tsunax import models; m = models.raw(lambda p, x: p * x, 2.0); "
        "assert m.apply(2.0, 3.0)[0] == 6;"
        "print([m for m in ('flax', 'equinox') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert out.stdout.strip() == "[]"


# --------------------------------------------------------------------------- dropout and batch statistics, both modes

ROWS, FEATURES, MOMENTUM, EPS = 64, 3, 0.9, 1e-5


class NNXDrops(nnx.Module):
    def __init__(self, rngs):
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.second = nnx.Dropout(0.5, rngs=rngs)
        self.norm = nnx.BatchNorm(FEATURES, momentum=MOMENTUM, epsilon=EPS, rngs=rngs)

    def __call__(self, x):
        dropped = self.dropout(x)
        return dropped, self.second(x), self.norm(dropped)


class LinenDrops(linen.Module):
    @linen.compact
    def __call__(self, x, train):
        dropped, second = (linen.Dropout(0.5, deterministic=not train)(x) for _ in range(2))
        return dropped, second, linen.BatchNorm(not train, momentum=MOMENTUM, epsilon=EPS)(dropped)


def drops_nnx():
    return models.nnx(NNXDrops(nnx.Rngs(0)))


def drops_linen():
    return models.linen(LinenDrops(), LinenDrops().init(jax.random.key(0), jnp.ones((1, FEATURES)), train=False))


def drops_equinox():
    eqx = need("equinox")

    class Drops(eqx.Module):
        dropout: eqx.nn.Dropout
        norm: eqx.nn.BatchNorm

        def __init__(self):
            self.dropout = eqx.nn.Dropout(0.5)
            self.norm = eqx.nn.BatchNorm(FEATURES, "rows", momentum=MOMENTUM, eps=EPS, mode="ema")

        def __call__(self, x, state, *, key):
            keys = (None, None) if key is None else jax.random.split(key)
            dropped, second = (self.dropout(x, key=k) for k in keys)
            out, state = self.norm(dropped, state)
            return (dropped, second, out), state

    return models.equinox(*eqx.nn.make_with_state(Drops)(), vmap=True, axis_name="rows")


DROPS = {"nnx": drops_nnx, "linen": drops_linen, "equinox": drops_equinox}


def statistics(library, dropped):
    """What evaluation normalises by after one training batch: running from (0, 1), or without a bias to the start."""
    mean, var = dropped.astype(np.float64).mean(0), dropped.astype(np.float64).var(0)
    if library == "equinox":
        return mean, var
    return (1 - MOMENTUM) * mean, MOMENTUM + (1 - MOMENTUM) * var


@pytest.mark.medium
@pytest.mark.parametrize("name", DROPS)
def test_both_modes(name):
    model = DROPS[name]()
    x, key = RNG.normal(size=(ROWS, FEATURES)).astype(np.float32) * 2 + 3, jax.random.key(1)
    apply = jax.jit(model.apply, static_argnames="train")
    (dropped, second, out), carried = apply(model.params, x, model_state=model.model_state, key=key, train=True)
    dropped, second = np.asarray(dropped), np.asarray(second)
    for some in (dropped, second):
        assert 0.3 < np.mean(some == 0) < 0.7
        assert_trees_close(some, np.where(some == 0, 0, x / 0.5), rtol=1e-6, atol=0)
    assert ((dropped == 0) != (second == 0)).any() and len(np.unique(dropped == 0, axis=0)) > 1
    wide = dropped.astype(np.float64)
    assert_trees_close(out, (wide - wide.mean(0)) / np.sqrt(wide.var(0) + EPS), rtol=1e-3, atol=1e-4)

    again, _ = apply(model.params, x, model_state=model.model_state, key=key, train=True)
    assert_trees_equal(again[0], dropped)
    other, _ = apply(model.params, x, model_state=model.model_state, key=jax.random.key(2), train=True)
    assert ((np.asarray(other[0]) == 0) != (dropped == 0)).any()

    (kept, _, out), same = apply(model.params, x, model_state=carried)
    assert_trees_equal(kept, x)
    assert_trees_equal(same, carried)
    mean, var = statistics(name, dropped)
    assert_trees_close(out, (x - mean) / np.sqrt(var + EPS), rtol=1e-4, atol=1e-4)


@pytest.mark.medium
@pytest.mark.parametrize("name", DROPS)
def test_steps_and_evaluations_of_a_model_with_modes(name):
    model = DROPS[name]()

    def loss_fn(params, batch, model_state, train, key=None):
        (*_, out), model_state = model.apply(params, batch, model_state=model_state, key=key, train=train)
        return ts.Loss.mean((out - 1) ** 2, model_state=model_state)

    # equinox's own running statistics refuse bfloat16 (its mode "ema")
    # the batch meets no product of the model: its scales alone, so that it has to be named as an input
    precision = None if name == "equinox" else ts.precision.Policy(compute="bfloat16", batch="**")
    state = ts.setup(rule(), model.params, model_state=model.model_state, key=0, precision=precision)
    step, evaluate = ts.train_step(loss_fn, accumulate=2), ts.eval_step(loss_fn)
    x = RNG.normal(size=(ROWS, FEATURES)).astype(np.float32)
    state, first = step(state, x)
    evaluate(state, x).compute()
    with count_compiles() as c:
        state, info = step(state, x)
        losses = [float(evaluate(state, x).compute()) for _ in range(2)]
    assert c.compiles == 0 and bool(info.applied)
    assert losses[0] == losses[1]
    assert float(info.loss) != float(first.loss)
    assert_trees_equal(jax.tree.map(jnp.shape, state.model_state), jax.tree.map(jnp.shape, model.model_state))
    assert any(
        (a != b).any() for a, b in zip(*map(jax.tree.leaves, (state.model_state, model.model_state)), strict=True)
    )

    net = model.build(state)
    (*_, expected), _ = model.apply(state.params, x, model_state=state.model_state)
    if name == "equinox":
        out = jax.vmap(lambda row: net[0](row, net[1], key=None)[0][-1], axis_name="rows")(x)
    else:
        out = net(x, train=False)[-1] if name == "linen" else net(x)[-1]
    assert_trees_close(out, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", DROPS)
def test_nothing_is_drawn_without_a_key_and_nothing_moved_without_a_model_state(name):
    model, x = DROPS[name](), np.ones((4, FEATURES), np.float32)
    with pytest.raises(Exception, match=r"(?i)key|rng"):  # equinox's and Linen's own, and ours for NNX
        model.apply(model.params, x, model_state=model.model_state, train=True)
    with pytest.raises(StateError, match=r"model_state at Model.apply\(\): got None.*model_state=model.model_state"):
        model.apply(model.params, x)


# ------------------------------------------------------------------------------------- what is special in a library


def test_nnx_takes_random_counters_out_and_leaves_the_module_alone():
    net = NNXDrops(nnx.Rngs(0))
    net.eval()
    before = jax.tree.map(np.asarray, nnx.state(net, nnx.BatchStat))
    model = models.nnx(net)
    assert list(model.model_state) == ["norm"] and sorted(model.model_state["norm"]) == ["mean", "var"]
    model.apply(model.params, BATCH["x"], model_state=model.model_state, key=jax.random.key(0), train=True)
    assert net.dropout.deterministic and net.norm.use_running_average
    assert_trees_equal(nnx.state(net, nnx.BatchStat), before)

    built = model.build(ts.setup(rule(), model.params, model_state=model.model_state))
    built.train()  # its random streams are those of the module that was given
    net.train()
    assert_trees_equal(built(BATCH["x"]), net(BATCH["x"]))


def test_nnx_without_a_key_raises_where_the_model_draws():
    model = drops_nnx()
    with pytest.raises(StateError, match=r"key at Model.apply\(\): got None.*random streams.*setup\(\.\.\., key=0\)"):
        model.apply(model.params, BATCH["x"], model_state=model.model_state, train=True)


def test_nnx_streams_given_to_the_call_and_forked_ones():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.scale = nnx.Param(jnp.ones(()))
            self.noise = nnx.RngKey(jax.random.split(rngs(), 3), tag="noise")  # an array of keys

        def __call__(self, x, rngs=None):
            assert self.noise.shape == (3,)
            return x * self.scale[...] if rngs is None else jax.random.normal(rngs.dropout(), (2,))

    model = models.nnx(Net(nnx.Rngs(0)))
    key = jax.random.key(3)
    out, _ = model.apply(model.params, jnp.ones(2), key=key, train=True)
    assert_trees_equal(out, jax.random.normal(nnx.Rngs(key).dropout(), (2,)))
    assert_trees_equal(model.apply(model.params, jnp.ones(2))[0], jnp.ones(2))


def test_nnx_calls_that_need_rngs_get_none_without_a_key():
    class Net(nnx.Module):
        def __init__(self):
            self.scale, self.dropout = nnx.Param(jnp.ones(())), nnx.Dropout(0.5)

        def __call__(self, x, rngs):
            return self.dropout(x * self.scale[...], rngs=rngs)

    model, x, key = models.nnx(Net()), jnp.ones((4, 8)), jax.random.key(3)
    assert_trees_equal(model.apply(model.params, x)[0], x)
    state = ts.setup(rule(), model.params, model_state=model.model_state)
    assert ts.eval_step(loss_of(model))(state, {"x": x, "y": x}).compute() == 0
    out, _ = model.apply(model.params, x, key=key, train=True)
    assert_trees_equal(out, nnx.Dropout(0.5)(x, rngs=nnx.Rngs(key)))
    assert set(np.unique(out)) == {0, 2}
    assert_trees_equal(model.apply(model.params, x, nnx.Rngs(key), train=True)[0], out)


def test_nnx_variables_of_another_kind_can_be_the_parameters():
    class Gain(nnx.Variable):
        pass

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.linear, self.gain = nnx.Linear(2, 2, rngs=rngs), Gain(jnp.full((), 3.0))

        def __call__(self, x):
            return self.linear(x) * self.gain[...]

    model = models.nnx(Net(nnx.Rngs(0)), wrt=Gain)
    assert_trees_equal(model.params, {"gain": jnp.full((), 3.0)})
    assert list(model.model_state) == ["linear"]


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
def test_what_nnx_modules_sow_is_dropped():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.BatchNorm(3, rngs=rngs)

        def __call__(self, x):
            out = self.norm(x)
            self.sow(nnx.Intermediate, "out", out)
            return out

    net = Net(nnx.Rngs(0))
    net(BATCH["x"])
    model = models.nnx(net)
    assert list(model.model_state) == ["norm"] and hasattr(net, "out")
    _, carried = model.apply(model.params, BATCH["x"], model_state=model.model_state)
    assert_trees_equal(carried, model.model_state)


class Modes(linen.Module):
    """Shows the mode that it was told, and two random numbers."""

    @linen.compact
    def __call__(self, x, deterministic=None, evaluating=None):
        seen = [self.make_rng(name) for name in ("a", "b") if self.has_rng(name)]
        self.param("w", linen.initializers.ones, ())
        return (deterministic, evaluating, x), seen


def test_linen_flags_streams_and_further_inputs():
    params = {"params": {"w": jnp.ones(())}}
    key = jax.random.key(0)
    model = models.linen(Modes(), params)
    for train in (True, False):
        assert model.apply(params["params"], 1.0, train=train)[0] == ((not train, None, 1.0), [])
    named = models.linen(Modes(), params, rngs=("a", "b"))
    (seen, keys), _ = named.apply(params["params"], 1.0, train=True, key=key, deterministic="given", evaluating=True)
    assert seen == ("given", True, 1.0)
    assert len(keys) == 2 and (jax.random.key_data(keys[0]) != jax.random.key_data(keys[1])).any()
    (_, one), _ = models.linen(Modes(), params, rngs="a").apply(params["params"], 1.0, key=key, train=False)
    _, by_hand = Modes().apply(params, 1.0, rngs={"a": key})
    assert_trees_equal(one, by_hand)


def test_frozen_dicts_of_linen_become_plain_ones():
    variables = LinenDrops().init(jax.random.key(0), jnp.ones((1, FEATURES)), train=False)
    model = models.linen(LinenDrops(), freeze(variables))
    _, carried = model.apply(model.params, BATCH["x"], model_state=model.model_state, key=jax.random.key(0), train=True)
    assert jax.tree.structure((model.params, carried)) == jax.tree.structure(
        (variables["params"], {"batch_stats": variables["batch_stats"]})
    )


def test_equinox_without_vmap_and_functions_and_integers_among_its_leaves():
    eqx = need("equinox")
    net = eqx.nn.MLP(3, 2, 4, 1, activation=jnp.tanh, key=jax.random.key(0))
    model = models.equinox(net)
    state = ts.setup(rule(), model.params, trainable="layers/0/weight")
    assert_trees_close(model.apply(state.params, jnp.ones(3))[0], net(jnp.ones(3)), rtol=1e-6, atol=1e-6)
    assert model.build(state).activation is net.activation


@pytest.mark.medium
def test_an_equinox_state_can_be_given_again():
    """equinox invalidates a State whose successor was made."""
    model = drops_equinox()
    for _ in range(2):
        model.apply(model.params, BATCH["x"], model_state=model.model_state, key=jax.random.key(0), train=True)


def test_raw_functions_get_what_they_name():
    def f(params, x, scale, *, train, key, model_state):
        return (params * x * scale, train, key), model_state + 1

    model = models.raw(f, 2.0, model_state=5)
    assert model.apply(2.0, 3.0, model_state=6, key="k", train=True, scale=10) == ((60.0, True, "k"), 7)
    state = ts.setup(rule(), 2.0, model_state=5)
    assert model.build(state)(3.0, scale=1)[0] == 6.0


# --------------------------------------------------------------------------------------------------------------- LoRA


class LoRANet(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.LoRALinear(3, 8, lora_rank=2, rngs=rngs)
        self.last = nnx.LoRALinear(8, 2, lora_rank=2, rngs=rngs)

    def __call__(self, x):
        return self.last(jnp.tanh(self.first(x)))


@pytest.mark.medium
def test_lora_trains_and_saves_the_adapters_only():
    model = models.nnx(LoRANet(nnx.Rngs(0)))
    state = ts.setup(ts.rules.adam(0.05), model.params, trainable="**/lora/*")
    adapters = {"first": {"lora_a": (3, 2), "lora_b": (2, 8)}, "last": {"lora_a": (8, 2), "lora_b": (2, 2)}}
    shapes = {
        name: {"bias": None, "kernel": None, "lora": {k: jnp.zeros(shape) for k, shape in lora.items()}}
        for name, lora in adapters.items()
    }
    _, grads = ts.value_and_grad(lambda p, b: jnp.mean(model.apply(p, b["x"])[0] ** 2))(state, BATCH)
    for tree in (ts.trainable(state), grads):
        assert jax.tree.map(jnp.shape, tree) == jax.tree.map(jnp.shape, shapes)
    size = sum(int(np.prod(shape)) for lora in adapters.values() for shape in lora.values())
    moments = [x.size for x in jax.tree.leaves(state.opt_state) if x.ndim == 2]
    assert sum(moments) == 2 * size

    def loss_fn(params, batch):
        return ts.Loss.mean((model.apply(params, batch["x"])[0] - batch["y"]) ** 2)

    step = ts.train_step(loss_fn)
    for _ in range(3):
        state, _ = step(state, BATCH)
    for name in adapters:
        assert_trees_equal(state.params[name]["kernel"], model.params[name]["kernel"])
        for part in adapters[name]:
            assert (state.params[name]["lora"][part] != model.params[name]["lora"][part]).any()

    saved = ts.trainable(state)
    fresh = models.nnx(LoRANet(nnx.Rngs(0)))
    params = jax.tree.map(
        lambda new, old: old if new is None else new, saved, fresh.params, is_leaf=lambda x: x is None
    )
    again = fresh.build(ts.setup(rule(), params))
    assert_trees_equal(again(BATCH["x"]), model.build(state)(BATCH["x"]))


# ------------------------------------------------------------------- models of bonsai (github.com/jax-ml/bonsai), tiny


def bonsai_vit_config(vit):
    sizes = dict(image_size=(12, 12), patch_size=(4, 4), num_channels=3, hidden_dim=32, num_heads=4, mlp_dim=64)
    return vit.ModelConfig(**sizes, num_layers=2, num_labels=5, eps=1e-12, attn_dropout_prob=0.1, dropout_prob=0.1)


def bonsai_vit():
    """Dropout, of `rngs` that the call needs."""
    vit = need("bonsai.models.vit.modeling")
    images = RNG.normal(size=(16, 12, 12, 3)).astype(np.float32)
    net = vit.ViTClassificationModel(bonsai_vit_config(vit), rngs=nnx.Rngs(0))
    return net, images, np.arange(16) % 5, dict


def bonsai_qwen3():
    """Tokens, and a cache that the loss function makes."""
    qwen3 = need("bonsai.models.qwen3.modeling")
    sizes = dict(num_layers=2, vocab_size=48, emb_dim=32, mlp_dim=64, num_heads=4, head_dim=8, num_kv_heads=2)
    rope = dict(rope_theta=1_000_000, rope_scaling_factor=8.0, local_rope_theta=1e4)
    config = qwen3.ModelConfig(**sizes, **rope, norm_eps=1e-6, tie_word_embeddings=False)
    tokens = RNG.integers(1, 48, (4, 17))

    def more():
        return {"cache": qwen3.init_cache(config, 4, 16, 0, jnp.float32), "segment_ids": jnp.ones((4, 16), jnp.int32)}

    return qwen3.Qwen3(config, rngs=nnx.Rngs(0)), tokens[:, :-1], tokens[:, 1:], more


def bonsai_densenet():
    """Batch norms whose constructor got `use_running_average=True`."""
    densenet = need("bonsai.models.densenet121.modeling")
    config = densenet.ModelConfig(num_classes=5, dense_block_layers=[1, 1, 1, 1], growth_rate=4)
    images = RNG.normal(size=(8, 32, 32, 3)).astype(np.float32)
    return densenet.DenseNet(config, rngs=nnx.Rngs(0)), images, np.arange(8) % 5, dict


def cross_entropies(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def bonsai_by_hand(net, x, y, more, takes_rngs, steps):
    """The losses, parameters and batch statistics of NNX and optax alone."""
    tx, (graphdef, params, statistics, rest) = optax.adam(1e-2, eps=1e-3), nnx.split(net, nnx.Param, nnx.BatchStat, ...)

    def loss_fn(params, statistics, key):
        net = nnx.merge(graphdef, params, statistics, rest)
        net.train()
        given = {"rngs": nnx.Rngs(key)} if takes_rngs else {}
        loss = cross_entropies(net(x, **given, **more()), y).mean()
        return loss, nnx.to_pure_dict(nnx.state(net, nnx.BatchStat))

    @jax.jit
    def step(params, statistics, opt_state, key):
        (loss, statistics), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, statistics, key)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), statistics, opt_state, loss

    statistics, opt_state, losses = nnx.to_pure_dict(statistics), tx.init(params), []
    for i in range(steps):
        key = jax.random.fold_in(jax.random.key(0), i)
        params, statistics, opt_state, loss = step(params, statistics, opt_state, key)
        losses.append(np.float32(loss))
    return np.stack(losses), nnx.to_pure_dict(params), statistics


BONSAI = {"vit": bonsai_vit, "qwen3": bonsai_qwen3, "densenet": bonsai_densenet}
of_bonsai = pytest.mark.filterwarnings("ignore:'Data' is deprecated:DeprecationWarning")  # flax's, of its VAE


@pytest.mark.slow
@of_bonsai
@pytest.mark.parametrize("name", BONSAI)
def test_models_of_bonsai_train_as_with_nnx_and_optax_alone(name, tmp_path):
    net, x, y, more = BONSAI[name]()
    model = models.nnx(net)

    def loss_fn(params, batch, model_state, train, key=None):
        x, y = batch
        logits, model_state = model.apply(params, x, model_state=model_state, key=key, train=train, **more())
        return ts.Loss.mean(cross_entropies(logits, y), model_state=model_state)

    # eps: the gradient of a bias of attention's keys is zero but for rounding
    adam = ts.rules.adam(1e-2, eps=1e-3)
    new = lambda: ts.setup(adam, model.params, model_state=model.model_state, key=0)
    with jax.numpy_rank_promotion("allow"):
        state, step, evaluate = new(), ts.train_step(loss_fn), ts.eval_step(loss_fn)
        before, losses = float(evaluate(state, (x, y)).compute()), []
        for _ in range(3):
            state, info = step(state, (x, y))
            losses.append(np.float32(info.loss))
        expected, params, statistics = bonsai_by_hand(net, x, y, more, name == "vit", 3)
        assert_trees_close(np.stack(losses), expected, rtol=1e-6, atol=0)
        assert_trees_close(state.params, params, rtol=1e-5, atol=1e-6)
        assert bool(statistics) == bool(state.model_state) == (name == "densenet")
        assert_trees_close(state.model_state, statistics, rtol=1e-6, atol=1e-6)

        with ts.Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(state)
        found = ts.Checkpoints(tmp_path, read_only=True).restore(new()).state
        assert_trees_equal(found, state)
        for _ in range(20):
            found, _ = step(found, (x, y))
            state, info = step(state, (x, y))
        assert_trees_equal(found, state)
        assert float(info.loss) < 0.5 * losses[0]
        if name != "densenet":  # its averages of 23 steps are those of the random weights
            assert evaluate(state, (x, y)).compute() < 0.5 * before

        built, _ = model.build(state), more()
        given = {"rngs": None} if name == "vit" else {}
        out, _ = model.apply(state.params, x, model_state=state.model_state, **more())
        assert_trees_close(built(x, **given, **more()), out, rtol=1e-6, atol=1e-6)


# the paths of bonsai's ViT in the files of transformers
VIT_NAMES = {
    "pos_embeddings.pos_embeddings": "vit.embeddings.position_embeddings",
    "pos_embeddings.cls_token": "vit.embeddings.cls_token",
    "pos_embeddings.projection": "vit.embeddings.patch_embeddings.projection",
    "layers.": "vit.encoder.layer.",
    "attention.out": "attention.output.dense",
    "attention.query": "attention.attention.query",
    "attention.key": "attention.attention.key",
    "attention.value": "attention.attention.value",
    "linear1": "intermediate.dense",
    "linear2": "output.dense",
    "ln.": "vit.layernorm.",
}


@pytest.mark.slow
@of_bonsai
def test_bonsai_reads_the_weights_that_were_trained_here_and_the_way_back(tmp_path):
    """Files with the names and shapes of transformers, between `exchange` and the reader of bonsai."""
    their = need("bonsai.models.vit.params")
    net, x, *_ = bonsai_vit()
    model = models.nnx(net)

    def rename(name):
        name = ts.exchange.torch_name(name)
        for old, new in VIT_NAMES.items():
            name = name.replace(old, new)
        return name

    split = ts.exchange.rearrange("(h d) i -> i h d", h=4), ts.exchange.rearrange("(h d) -> h d", h=4)
    transform = {
        f"layers/*/attention/{name}/{leaf}": how
        for name in ("query", "key", "value")
        for leaf, how in zip(("kernel", "bias"), split, strict=True)
    }
    transform["layers/*/attention/out/kernel"] = ts.exchange.rearrange("o (h d) -> h d o", h=4)
    transform["**/kernel"] = ts.exchange.torch_kernel
    how = {"rename": rename, "transform": transform}

    ts.exchange.save(tmp_path / "model.safetensors", model.params, **how)
    config = bonsai_vit_config(need("bonsai.models.vit.modeling"))
    read = models.nnx(their.create_vit_from_pretrained(str(tmp_path), config))
    assert_trees_equal(read.params, model.params)
    assert_trees_equal(ts.exchange.restore(tmp_path, jax.eval_shape(lambda: model.params), **how), model.params)
    with jax.numpy_rank_promotion("allow"):
        assert_trees_equal(read.apply(read.params, x)[0], model.apply(model.params, x)[0])


# -------------------------------------------------------------------------------------------------------------- errors


class Silent(nnx.Module):
    """A module that cannot be called."""


WRONG = {
    "nnx gets a class": (lambda: models.nnx(NNXNet), WrongTypeError,
                         r"model at models.nnx\(\): got the class NNXNet, expected an instance of nnx.Module that can "
                         r"be called"),
    "nnx gets linen": (lambda: models.nnx(LinenNet()), WrongTypeError, r"LinenNet.*, expected an instance of nnx"),
    "nnx gets a number": (lambda: models.nnx(3.0), WrongTypeError, r"got 3.0 \(float\), expected an instance of nnx"),
    "nnx without params": (lambda: models.nnx(nnx.Dropout(0.5, rngs=nnx.Rngs(0))), ParamsError, "no parameters"),
    "nnx gets one without a call": (lambda: models.nnx(Silent()), WrongTypeError,
                                    "Silent.*, expected an instance of nnx.Module that can be called"),
    "linen gets a class": (lambda: models.linen(LinenNet, {"params": {}}), WrongTypeError, "got the class LinenNet"),
    "linen gets nnx": (lambda: models.linen(NNXNet(nnx.Rngs(0)), {}), WrongTypeError, r"expected an instance of linen"),
    "linen with empty params": (lambda: models.linen(LinenNet(), {"params": {}}), ParamsError, "no parameters"),
    "equinox gets nnx": (lambda: models.equinox(NNXNet(nnx.Rngs(0))), WrongTypeError,
                         r"expected an instance of equinox.Module"),
    "equinox gets a class": (lambda: models.equinox(type(equinox_net())), WrongTypeError, "got the class Net"),
    "equinox is absent": (lambda: models.equinox(NNXNet(nnx.Rngs(0))), errors.MissingLibraryError,
                          r"equinox at models.equinox\(\): got no such package.*pip install equinox"),
    "raw without params": (lambda: models.raw(lambda p, x: x, {}), ParamsError, "no parameters"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_wrong_models_are_named(what, monkeypatch):
    call, kind, pattern = WRONG[what]
    if what.startswith("equinox gets"):
        need("equinox")
    if what == "equinox is absent":
        monkeypatch.setitem(sys.modules, "equinox", None)
    with pytest.raises(kind, match=pattern) as caught:
        call()
    assert isinstance(caught.value, TsunaxError)


def test_an_absent_library_is_an_import_error():
    assert issubclass(errors.MissingLibraryError, ImportError)


def test_build_refuses_what_is_no_state():
    model = of_nnx()
    with pytest.raises(TsunaxError, match="TrainState"):
        model.build(model.params)


def test_a_model_prints_its_numbers():
    model = models.raw(lambda params, x: x, {"deep": {"w": jnp.ones((3, 2))}, "b": jnp.ones(())}, {"mean": jnp.ones(2)})
    assert repr(model) == "Model(params 7, model_state 2)"


def test_the_loss_function_says_where_the_key_is_missing():
    model = drops_nnx()

    def loss_fn(params, batch, model_state, train):
        (*_, out), model_state = model.apply(params, batch, model_state=model_state, train=train)
        return ts.Loss.mean(out, model_state=model_state)

    state = ts.setup(rule(), model.params, model_state=model.model_state)
    with pytest.raises(StateError, match=r"^key at Model.apply\(\): got None.*Add a key parameter.*key=key"):
        ts.train_step(loss_fn)(state, BATCH["x"])
