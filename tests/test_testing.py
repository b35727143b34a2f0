"""Checks for a user's own step: each holds for a good one, and names the leaf of a planted mistake."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tsunax as ts
from tsunax import testing
from tsunax.errors import CheckError, StateError, WrongTypeError

X = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)


def init():
    return {"body": {"kernel": jnp.eye(4) / 2, "bias": jnp.full(4, 0.1)}, "head": jnp.ones((4, 2))}


def loss_fn(params, x, key=None):
    h = jnp.tanh(x @ params["body"]["kernel"] + params["body"]["bias"][None])
    if key is not None:
        h = h + 0.01 * jax.random.normal(key, h.shape)
    return jnp.mean((h @ params["head"] - x[:, :2]) ** 2)


def impure(params, x):
    """Draws its noise while it is traced: one number for ever, and another one in each program."""
    return loss_fn(params, x * (1 + np.random.random()))


def centred(params, x):
    """Looks at its batch as a whole, as batch statistics do."""
    return loss_fn(params, x - 2 * jnp.mean(x, 0, keepdims=True) + x[:1])


def shifted(params, x):
    """A shift of all logits has no gradient, but for what rounding leaves, and Adam makes steps of it."""
    logits = x @ params["kernel"] + params["shift"]
    return ts.losses.softmax_cross_entropy_with_integer_labels(logits, (x[:, 0] > 0).astype(int)).mean()


def shiftable(key=None, **options):
    params = {"kernel": jnp.linspace(-1, 1, 12).reshape(4, 3), "shift": jnp.full((1, 1), 0.1)}
    return ts.setup(ts.rules.adam(1e-2), params, key=key, **options)


SHIFTED = ts.train_step(shifted)
STEP = ts.train_step(loss_fn)


def make(key=None, rate=1e-2):
    return ts.setup(ts.rules.adam(rate), init(), key=key, ema=0.9)


def state_in(precision):
    return ts.setup(ts.rules.adam(1e-2), init(), precision=precision)


def data():
    return ts.batches(X, 4, shuffle=True, seed=3)


class Unordered:
    """Data in an order of its own, which nobody saves."""

    def __iter__(self):
        return iter([X[np.random.permutation(16)[:4]] for _ in range(4)])


@dataclasses.dataclass(frozen=True)
class Restless(ts.TrainStep):
    """Moves what is frozen."""

    part: str = "params"

    def __call__(self, state, batch, **extra):
        state, info = super().__call__(state, batch, **extra)
        move = lambda tree: jax.tree.map(lambda x: x + 1e-7 if x.dtype == jnp.float32 else x, tree)
        return dataclasses.replace(state, **{self.part: move(getattr(state, self.part))}), info


@dataclasses.dataclass(frozen=True)
class Idle(ts.TrainStep):
    """Moves nothing."""

    def __call__(self, state, batch, **extra):
        return state, None


GOOD = {
    "accumulation": lambda: testing.check_accumulation(STEP, make(), X),
    "precision": lambda: testing.check_precision(STEP, state_in("bfloat16"), X),
    "half precision": lambda: testing.check_precision(STEP, state_in("float16"), X, 0.01),
    "sharding": lambda: testing.check_sharding(STEP, make(), X),
    "resume": lambda: testing.check_resume(STEP, make(0), data(), steps=7, at=5),
    "resume a population": lambda: testing.check_resume(STEP, ts.population(make, 2), data()),
    "resume a list": lambda: testing.check_resume(STEP, make(), [X[:4], X[4:8]], replay=True),
    "fused": lambda: testing.check_fused(STEP, make(0), data()),
    "frozen": lambda: testing.check_frozen(STEP, make(), X, "body/**"),
    "population": lambda: testing.check_population(STEP, make, X, rate=np.array([0.1, 0.01, 0.001])),
    "purity": lambda: testing.check_purity(STEP, make(0), X),
    "donation": lambda: testing.check_donation(STEP, make(), X) * 0,
    "accumulation of rounding": lambda: testing.check_accumulation(SHIFTED, shiftable(), X),
    "precision of rounding": lambda: testing.check_precision(SHIFTED, shiftable(precision="bfloat16"), X),
    "sharding of rounding": lambda: testing.check_sharding(SHIFTED, shiftable(), X),
    "population of rounding": lambda: testing.check_population(SHIFTED, shiftable, X),
    "donation with keys": lambda: testing.check_donation(ts.train_step(loss_fn, accumulate=2), make(0), X) * 0,
    "recompiles": lambda: testing.check_recompiles(STEP, make(), [X, X, X[:4]], most=2) * 0,
}
low_init = lambda params: jax.tree.map(jnp.zeros_like, params)
low_update = lambda grads, state, params=None: (grads, jax.tree.map(lambda x: x.astype(jnp.bfloat16), grads))
KEPT: list = []
BAD = {
    "accumulation": (
        lambda: testing.check_accumulation(ts.train_step(centred), make(), X),
        r"leaf \w+.* at accumulate=4: got a difference of .* largest element, expected at most 1e-05",
    ),
    "overflow": (
        lambda: testing.check_precision(
            ts.train_step(lambda p, x: jnp.mean(jnp.exp(12 + loss_fn(p, x)))), state_in("float16"), X
        ),
        r"leaf grads\['.* at precision float16: got (nan|inf|-inf)\S* for",
    ),
    "underflow": (
        lambda: testing.check_precision(ts.train_step(lambda p, x: loss_fn(p, x) * 1e-8), state_in("float16"), X),
        r"leaf grads\['.* at precision float16: got a difference of .* its norm, expected at most 0.05",
    ),
    "sharding": (
        lambda: testing.check_sharding(ts.train_step(impure), make(), X),
        r"leaf loss.* at mesh \{'data': \d.*, step 1: got a difference",
    ),
    "a shift that counts": (
        lambda: testing.check_sharding(ts.train_step(lambda p, x: shifted(p, x * np.random.random())), shiftable(), X),
        r"leaf loss at mesh",
    ),
    "resume": (
        lambda: testing.check_resume(STEP, make(), Unordered(), replay=True),
        r"leaf state.* at a run resumed at step 3: got .*expected the same bits",
    ),
    "fused": (
        lambda: testing.check_fused(lambda s, x: ts.update(s, jax.grad(impure)(s.params, x)), make(), data()),
        r"leaf state.* at steps_per_call=4: got .*expected the same bits",
    ),
    "frozen params": (
        lambda: testing.check_frozen(Restless(loss_fn), make(), X, "body/bias"),
        r"leaf state\S*\['body'\]\['bias'\] at freeze\('body/bias'\): got other bits after 3 steps",
    ),
    "frozen moments": (
        lambda: testing.check_frozen(Restless(loss_fn, part="opt_state"), make(), X, "body/bias"),
        r"leaf opt_state\S*mu\['body'\]\['bias'\] at freeze",
    ),
    "nothing moves": (
        lambda: testing.check_frozen(Idle(loss_fn), make(), X, "body/**"),
        r"others at freeze\('body/\*\*'\): got none that moved",
    ),
    "population": (
        lambda: testing.check_population(STEP, lambda key: make(rate=np.random.random()), X),
        r"leaf params\['.* at member 0: got a difference",
    ),
    "purity": (
        lambda: testing.check_purity(ts.train_step(impure), make(), X),
        r"leaf state.* at a second trace: .*It reads what is no argument: np.random",
    ),
    "a kept tracer": (
        lambda: testing.check_purity(ts.train_step(lambda p, x: (KEPT.append(p["head"]), loss_fn(p, x))[1]), make(), X),
        r"loss_fn at check_purity\(\): got a tracer that outlives its trace",
    ),
    "recompiles": (
        lambda: testing.check_recompiles(STEP, make(), [X, X, X[:4]]),
        r"traces at 3 batches: got 2, expected at most 1. step: batch has shape \(4, 4\), had \(16, 4\)",
    ),
    "donation": (
        lambda: testing.check_donation(STEP, ts.setup(optax.GradientTransformation(low_init, low_update), init()), X),
        r"donation at the compiled step: got memory that no result takes: .*state.opt_state\['body'\]\['kernel'\]",
    ),
}
WRONG = {
    "step": (lambda: testing.check_purity(loss_fn, make(), X), WrongTypeError, r"step at check_purity\(\)"),
    "donates": (
        lambda: testing.check_donation(ts.train_step(loss_fn, donate=False), make(), X),
        WrongTypeError,
        "donate=False",
    ),
    "rows": (lambda: testing.check_accumulation(STEP, make(), X[:15]), WrongTypeError, "got 15 rows, expected a mul"),
    "precision": (lambda: testing.check_precision(STEP, make(), X), StateError, "precision at check_precision.*None"),
    "at": (lambda: testing.check_resume(STEP, make(), data(), at=9), WrongTypeError, "at at check_resume.*got 9"),
    "iterator": (lambda: testing.check_fused(STEP, make(), iter([X])), WrongTypeError, "can be read again"),
}


@pytest.mark.parametrize("name", GOOD)
def test_a_good_step_passes(name):
    found = GOOD[name]()
    assert found is None or found < 0.05


@pytest.mark.parametrize("name", BAD)
def test_a_planted_mistake_is_found(name):
    call, text = BAD[name]
    np.random.seed(0)
    with pytest.raises(CheckError, match=text):
        call()
    KEPT.clear()


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_checked(name):
    call, kind, text = WRONG[name]
    with pytest.raises(kind, match=text):
        call()


def test_the_state_stays_as_it_is():
    state = make(0)
    before = ts.fingerprint(state)
    testing.check_accumulation(STEP, make(), X)
    testing.check_sharding(STEP, state, X)
    testing.check_resume(STEP, state, data())
    testing.check_frozen(STEP, state, X, "head")
    assert ts.fingerprint(state) == before
