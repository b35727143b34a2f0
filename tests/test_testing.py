"""Checks for a user's own step: each holds for a good one, and names the leaf of a planted mistake."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tsunax as ts
from tests.helpers import medium_if
from tsunax import testing
from tsunax.errors import CheckError, DataError, HyperparameterError, LossError, StateError, WrongTypeError
from tsunax.testing import _comparing

# many of these checks have states without a key, which this loss function could take
pytestmark = pytest.mark.filterwarnings("ignore:.* names key, but the state has none:UserWarning")
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


def flat(params, x):
    """At zero only its first part, a mean over rows, has a value and a gradient."""
    return jnp.mean((x @ params["w"] - 1) ** 2) + jnp.mean(x @ params["w"]) ** 4


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


class Own:
    """Data of one's own that know their place, which moves while they are read."""

    def __init__(self):
        self.place = {"epoch": 0, "i": 0}

    def __iter__(self):
        if self.place["i"] == 4:
            self.place.update(epoch=self.place["epoch"] + 1, i=0)
        while self.place["i"] < 4:
            rows = np.random.default_rng(self.place["epoch"]).permutation(16)
            batch = X[rows[4 * self.place["i"] :][:4]]
            self.place["i"] += 1
            yield batch

    def get_state(self):
        return self.place

    def set_state(self, place):
        self.place = place


class Loader(Own):
    """With the other pair of names."""

    state_dict, load_state_dict = Own.get_state, Own.set_state
    get_state = set_state = property()


class Cursor(Own):
    """An iterator that can be put back."""

    def __next__(self):
        self.place["i"] += 1
        return X[self.place["i"] % 8 :][:4]

    def __iter__(self):
        return self


@dataclasses.dataclass(frozen=True)
class Restless(ts.program.TrainStep):
    """Moves what is frozen."""

    part: str = "params"

    def __call__(self, state, batch, **extra):
        state, info = super().__call__(state, batch, **extra)
        move = lambda tree: jax.tree.map(lambda x: x + 1e-7 if x.dtype == jnp.float32 else x, tree)
        return dataclasses.replace(state, **{self.part: move(getattr(state, self.part))}), info


@dataclasses.dataclass(frozen=True)
class Idle(ts.program.TrainStep):
    """Moves nothing."""

    def __call__(self, state, batch, **extra):
        return state, None


GOOD = {
    "accumulation": lambda: testing.check_accumulation(STEP, make(), X),
    "accumulation of a noise scale": lambda: testing.check_accumulation(
        dataclasses.replace(STEP, accumulate=2, noise_scale=True), make(), X
    ),
    "precision": lambda: testing.check_precision(STEP, state_in("bfloat16"), X),
    "half precision": lambda: testing.check_precision(STEP, state_in("float16"), X, 0.01),
    "sharding": lambda: testing.check_sharding(STEP, make(), X),
    "resume": lambda: testing.check_resume(STEP, make(0), data(), steps=7, at=5),
    "resume a population": lambda: testing.check_resume(STEP, ts.population(make, 2), data()),
    "resume a list": lambda: testing.check_resume(STEP, make(), [X[:4], X[4:8]]),
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
BAD = {
    "accumulation": (
        lambda: testing.check_accumulation(ts.train_step(centred), make(), X),
        r"leaf \w+.* at accumulate=4: got a difference of .* largest element, expected at most 1e-05",
    ),
    "accumulation beside these params": (
        lambda: testing.check_accumulation(ts.train_step(flat), ts.setup(ts.rules.sgd(0.1), {"w": jnp.zeros(4)}), X),
        r"loss at flat\(params, x\): got .* micro-batches at params near those of the state, expected a mean",
    ),
    "overflow": (
        lambda: testing.check_precision(
            ts.train_step(lambda p, x: jnp.mean(jnp.exp(12 + loss_fn(p, x)))), state_in("float16"), X
        ),
        r"leaf grads\['.* at precision float16: got (nan|inf|-inf)\S* for",
    ),
    "underflow": (
        lambda: testing.check_precision(ts.train_step(lambda p, x: loss_fn(p, x) * 1e-8), state_in("float16"), X),
        r"leaf grads\['.* at precision float16: got a difference of .* its largest element, expected at most 0.05",
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
        lambda: testing.check_resume(STEP, make(), Unordered(), fast_forward=True),
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
    "recompiles": (
        lambda: testing.check_recompiles(STEP, make(), [X, X, X[:4]]),
        r"traces at 3 batches: got 2, expected at most 1. step: batch is float32\[4,4\], was float32\[16,4\]",
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
    "rows": (lambda: testing.check_accumulation(STEP, make(), X[:15]), LossError, "got 15 rows, expected a mul"),
    "precision": (lambda: testing.check_precision(STEP, make(), X), StateError, "precision at check_precision.*None"),
    "at": (lambda: testing.check_resume(STEP, make(), data(), at=9), WrongTypeError, "at at check_resume.*got 9"),
    "iterator": (lambda: testing.check_fused(STEP, make(), iter([X])), WrongTypeError, "can be read again"),
}


@pytest.mark.medium
@pytest.mark.parametrize("name", medium_if(lambda name: name not in ("accumulation", "frozen", "resume"), GOOD))
def test_a_good_step_passes(name):
    found = GOOD[name]()
    assert found is None or found < 0.05


@pytest.mark.parametrize("name", medium_if(lambda name: name not in ("accumulation", "frozen params", "resume"), BAD))
def test_a_planted_mistake_is_found(name):
    call, text = BAD[name]
    np.random.seed(0)
    with pytest.raises(CheckError, match=text):
        call()


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_checked(name):
    call, kind, text = WRONG[name]
    with pytest.raises(kind, match=text):
        call()


@pytest.mark.medium
def test_the_state_stays_as_it_is():
    state = make(0)
    before = ts.reproduce.fingerprint(state)
    testing.check_accumulation(STEP, make(), X)
    testing.check_sharding(STEP, state, X)
    testing.check_resume(STEP, state, data())
    testing.check_frozen(STEP, state, X, "head")
    assert ts.reproduce.fingerprint(state) == before


def test_checks_that_ask_for_a_state_without_a_key_do_not_warn_of_it():
    with warnings.catch_warnings(action="error"):
        testing.check_accumulation(ts.train_step(loss_fn), make(), X)
        testing.check_sharding(ts.train_step(loss_fn), make(), X)


OWN = {"own": Own, "loader": Loader, "cursor": Cursor, "prefetched": lambda: ts.prefetch(Own())}


@pytest.mark.medium
@pytest.mark.parametrize("name", OWN)
def test_data_of_ones_own_are_read_again_from_where_they_were(name):
    given = OWN[name]()
    inner = getattr(given, "data", given)
    inner.place = {"epoch": 2, "i": 1}
    testing.check_resume(STEP, make(), given)
    testing.check_fused(STEP, make(), given)
    assert inner.place == {"epoch": 2, "i": 1}


def test_a_list_can_be_read_again():
    batches = [X[:4], X[4:8]]
    with pytest.raises(WrongTypeError, match=r"A list is, and fit saves its position\."):
        testing.check_resume(STEP, make(), iter(batches))
    testing.check_resume(STEP, make(), list(batches))
    with pytest.raises(WrongTypeError, match="A list is"):
        testing.check_fused(STEP, make(), iter(batches))


@pytest.mark.medium
def test_a_kept_tracer_is_found():
    kept = []
    step = ts.train_step(lambda p, x: (kept.append(p["head"]), loss_fn(p, x))[1])
    with pytest.raises(Exception, match=r"[Ll]eak"):
        testing.check_purity(step, make(), X)


HIDDEN = {
    "in the loss": (STEP.loss_fn, ts.rules.sgd(1e-2), lambda loss: loss + np.random.rand(), r"info\.?.*loss"),
    "in its size": (STEP.loss_fn, ts.rules.sign_sgd(1e-2), lambda loss: loss * np.random.rand(), r"info\.?.*loss"),
    "in a metric": (
        STEP.loss_fn,
        ts.rules.sgd(1e-2),
        lambda loss: ts.Loss(loss, 1.0, metrics={"noise": np.random.rand()}),
        r"info.*noise",
    ),
}


@pytest.mark.medium
@pytest.mark.parametrize("name", HIDDEN)
def test_an_impure_loss_is_found_where_the_state_hides_it(name):
    fn, rule, noisy, leaf = HIDDEN[name]
    step = ts.train_step(lambda params, x: noisy(fn(params, x)))
    with pytest.raises(CheckError, match=rf"leaf {leaf}.* at a second trace: .*It reads what is no argument"):
        testing.check_purity(step, ts.setup(rule, init()), X)


NAN = np.where(np.arange(16)[:, None] == 3, np.nan, X).astype(np.float32)
BARE = ts.train_step(loss_fn, on_nonfinite="ignore", norms=False)
REJECTED = {
    "accumulation": lambda: testing.check_accumulation(STEP, make(), NAN),
    "precision": lambda: testing.check_precision(STEP, state_in("bfloat16"), NAN),
    "sharding": lambda: testing.check_sharding(STEP, make(), NAN),
    "sharding, ignored": lambda: testing.check_sharding(BARE, make(), NAN),
    "population": lambda: testing.check_population(STEP, make, NAN),
    "purity": lambda: testing.check_purity(STEP, make(), NAN),
    "frozen": lambda: testing.check_frozen(STEP, make(), NAN, "**"),
    "resume, ignored": lambda: testing.check_resume(BARE, make(), [NAN], fast_forward=True),
    "fused, ignored": lambda: testing.check_fused(BARE, make(), [NAN]),
    "dropped": lambda: testing.check_purity(
        ts.train_step(loss_fn, accumulate=2, on_nonfinite="drop"), make(), np.full_like(X, np.nan)
    ),
}


@pytest.mark.parametrize("name", medium_if(lambda name: name != "accumulation", REJECTED))
def test_a_check_that_compared_nothing_says_so(name):
    with pytest.raises(DataError, match=r"batch at check_\w+\(\): got .* not finite.*Nothing was compared") as found:
        REJECTED[name]()
    assert name in ("resume, ignored", "fused, ignored", "dropped") or str(found.value).endswith(
        " batch has 4 of 64 not finite, the first at [3, 0]"
    )


@pytest.mark.medium
def test_some_rejected_steps_are_no_trouble():
    testing.check_purity(ts.train_step(loss_fn, accumulate=4, on_nonfinite="drop"), make(), NAN)
    with pytest.warns(RuntimeWarning, match="was rejected"):
        testing.check_resume(STEP, make(), [X, NAN], fast_forward=True)
    state = ts.setup(ts.rules.sgd(0.1), init(), precision="float16")  # whose scale is too large for the first steps
    testing.check_accumulation(STEP, state, X, tolerance=0.01)


MORE_WRONG = {
    "no step of many": (lambda: testing.check_population(loss_fn, make, X), WrongTypeError, "step at check_population")
}


@pytest.mark.parametrize("name", MORE_WRONG)
def test_what_cannot_be_checked_either(name):
    call, kind, text = MORE_WRONG[name]
    with pytest.raises(kind, match=text):
        call()


ALL = {
    "accumulation": lambda state, x: testing.check_accumulation(STEP, state, x),
    "precision": lambda state, x: testing.check_precision(STEP, state, x),
    "sharding": lambda state, x: testing.check_sharding(STEP, state, x),
    "resume": lambda state, x: testing.check_resume(STEP, state, [x], fast_forward=True),
    "fused": lambda state, x: testing.check_fused(STEP, state, [x]),
    "frozen": lambda state, x: testing.check_frozen(STEP, state, x, "head"),
    "population": lambda state, x: testing.check_population(STEP, lambda key: state, x),
    "purity": lambda state, x: testing.check_purity(STEP, state, x),
    "donation": lambda state, x: testing.check_donation(STEP, state, x),
    "recompiles": lambda state, x: testing.check_recompiles(STEP, state, [x]),
}


@pytest.mark.medium
@pytest.mark.parametrize("name", [name for name in ALL if name not in ("population", "resume", "fused")])
def test_no_check_of_a_donated_state(name):
    state = make()
    STEP(state, X)
    with pytest.raises(StateError, match=rf"state at check_{name}\(\): got one that was donated to an earlier step"):
        ALL[name](state, X)


def test_a_nan_in_both_is_no_difference():
    found, other = (np.array([np.nan, np.inf, x], np.float32) for x in (1.0, 2.0))
    assert _comparing.compared("here", [found], [other], 0.6, "x") == 0.5
    assert _comparing.compared("here", [np.float32("nan")], [-np.float32("nan")], 0.6, "x") == 0
    with pytest.raises(CheckError, match=r"leaf x\[0\] at here: got 1.0 for 2.0 at \[2\]"):
        _comparing.compared("here", [found], [other], 0.0, "x")


@pytest.mark.medium
def test_a_loss_scale_that_is_still_falling():
    """It rejects the first steps of a good run, which are not those that are looked at."""
    x, params = X[:, :4], {"w": np.ones((4, 2), np.float32), "b": np.zeros(2, np.float32)}
    state = lambda: ts.setup(ts.rules.sgd(0.01), params, precision="float16")
    step = ts.train_step(lambda p, x: 10 * jnp.mean((x @ p["w"] + p["b"][None]) ** 2))
    assert int(step(state(), x)[1].verdict) > 0
    testing.check_purity(step, state(), x)
    testing.check_frozen(step, state(), x, "b")
    assert testing.check_sharding(step, state(), x, tolerance=0.01) < 0.01
    assert testing.check_population(step, lambda key: state(), x, tolerance=0.01) < 0.01
    testing.check_resume(step, state(), [x], fast_forward=True)
    testing.check_fused(step, state(), [x])
    runs = ts.population(lambda key: state(), 2)
    testing.check_purity(step, runs, x)


def test_a_state_that_is_beyond_the_steps_is_told():
    state = STEP(make(), X)[0].replace(step=6)
    for check in (testing.check_fused, testing.check_resume):
        with pytest.raises(HyperparameterError, match=r"steps at check_\w+\(\): got 6, expected one beyond 6, where"):
            check(STEP, state, [X])
