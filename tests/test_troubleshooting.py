"""The page of troubleshooting quotes what is really said: each message on it is made here again."""

import re
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tsunax as ts
from flax import nnx

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
QUOTES = re.findall(r"^```text\n(.*?)\n```$", PAGE, re.MULTILINE | re.DOTALL)

X = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
Y = (X.sum(1) > 0).astype("int32")
PARAMS = {"w": jnp.zeros((4, 2)), "b": jnp.zeros(2)}


def losses(params, batch):
    x, y = batch
    return ts.losses.softmax_cross_entropy_with_integer_labels(x @ params["w"] + params["b"][None], y)


def loss_fn(params, batch):
    return losses(params, batch).mean()


def logarithm(params, batch):
    return jnp.log(params["w"]).sum()


def with_key(params, batch, key):
    return loss_fn(params, batch) + jax.random.normal(key)


def centered(params, batch):
    h = batch[0] @ params["w"]
    h = h - h.mean(0, keepdims=True)
    return (h**2).mean()


def setup(rule=None, params=PARAMS):
    return ts.setup(ts.rules.adam(1e-2) if rule is None else rule, params)


def batches(labels=Y):
    return ts.batches((X, labels), 32)


def fit(step=loss_fn, data=None, **options):
    ts.fit(ts.train_step(step), setup(), data or batches(), progress=False, **options)


def step(loss_fn, x=X, y=Y, **options):
    return ts.train_step(loss_fn, **options)(setup(), (x, y))


def donated():
    state, step = setup(), ts.train_step(loss_fn)
    step(state, (X, Y))
    step(state, (X, Y))


def restored(tmp_path):
    with ts.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(setup())
        checkpoints.restore(setup(params={"w": jnp.zeros((4, 3)), "b": jnp.zeros(3)}))


MADE = {
    "PatternError: pattern 'encoder/**'": lambda _: ts.freeze(setup(), "encoder/**"),
    "ParamsError: leaf that cannot be trained": lambda _: setup(params={"w": jnp.zeros(3), "steps": jnp.arange(3)}),
    "ParamsError: leaf that is no number": lambda _: setup(params=ts.models.nnx(nnx.Linear(4, 2, rngs=nnx.Rngs(0)))),
    "HyperparameterError: rule at adjust": lambda _: ts.adjust(setup(optax.adam(1e-3)), learning_rate=1e-4),
    "HyperparameterError: hyperparameter": lambda _: ts.adjust(setup(), lr=1e-4),
    "WrongTypeError: rule at setup": lambda _: setup(optax.MultiSteps(optax.adam(1e-3), 4)),
    "LossError: result at loss_fn: got float32": lambda _: step(losses),
    "LossError: result at loss_fn: got tuple": lambda _: step(lambda p, b: (loss_fn(p, b), {"accuracy": 1.0})),
    "LossError: keyword at loss_fn": lambda _: step(with_key),
    "UserWarning: loss at loss_fn": lambda _: step(centered, accumulate=4),
    "LossError: batch at train_step": lambda _: step(loss_fn, accumulate=3),
    "DataError: batch at mesh": lambda _: ts.train_step(loss_fn)(ts.shard(setup(), ts.mesh(data=8)), (X[:20], Y[:20])),
    "DataError: data at epoch 1": lambda _: fit(data=((X, Y) for _ in range(3)), epochs=2),
    "DataError: arrays": lambda _: ts.batches((X, Y[:10]), 32),
    "RuntimeWarning: step 0 of epoch 0": lambda _: fit(data=batches(Y + 5), epochs=1),
    "NonFiniteError: step 0 of epoch 4": lambda _: fit(logarithm, steps=20),
    "StateError: state at step()": lambda _: donated(),
    "WrongTypeError: goal at fit()": lambda _: fit(),
    "RowError: metric at early_stopping()": lambda _: fit(epochs=1, callbacks=ts.callbacks.early_stopping("val/loss")),
    "CheckpointError: checkpoint of another state": restored,
    "CheckpointError: path at Checkpoints()": lambda _: ts.Checkpoints("az://bucket/run"),
    "DeviceError: device at device": lambda _: ts.device("gpu"),
    "DeviceError: mesh": lambda _: ts.mesh(data=16),
    "MissingLibraryError: tensorboardX at tensorboard()": lambda _: ts.loggers.tensorboard("runs"),
}


def said(cause, tmp_path) -> str:
    """The error, or the first warning, in the words of the page."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            cause(tmp_path)
            found = seen[0].message
        except ts.errors.TsunaxError as error:
            found = error
    return f"{type(found).__name__}: {found}"


def test_every_message_of_the_page_is_made_here():
    assert [[name for name in MADE if quote.startswith(name)] for quote in QUOTES] == [[name] for name in MADE]


@pytest.mark.medium
@pytest.mark.parametrize("name", MADE)
def test_a_message_of_the_page_is_the_real_one(name, tmp_path, monkeypatch):
    if name.startswith("MissingLibrary"):
        monkeypatch.setitem(__import__("sys").modules, "tensorboardX", None)
    (quote,) = (quote for quote in QUOTES if quote.startswith(name))
    # Lines, paths, and the platform that these tests ask JAX for differ from what a user sees.
    pattern = re.escape(quote).replace(r"\.\.\.:", ".*:").replace(r"loss_fn\(params", r"centered\(params")
    found = said(MADE[name], tmp_path)
    found = found.replace("JAX_PLATFORMS=cpu leaves it out.", "JAX finds none; its plugin may not be installed.")
    assert re.fullmatch(pattern, found), found
