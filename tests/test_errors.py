"""The battery of bad inputs: each is refused before its step is compiled, in one line with what, where and a way out.

A row is an input: its number in the list of bad inputs that this package was designed against (0: found later), what it
is, how to make it, and what is raised. All messages are in `tests/golden/messages.txt`, which
`TSUNAX_WRITE_MESSAGES=1 scripts/test tests/test_errors.py -k golden` writes anew: the difference shows what a change
does to them.
"""

import functools
import os
import platform
import re
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tsunax as ts
from flax import linen, nnx
from flax.training import train_state as flax_train_state
from tests import toys
from tests.helpers import medium_if
from tsunax.errors import (
    DataError,
    DeviceError,
    HyperparameterError,
    KeywordError,
    LossError,
    ParamsError,
    PatternError,
    RowError,
    RuleError,
    StateError,
    TsunaxError,
    WrongTypeError,
    told,
)

from helpers import assert_trees_equal, count_compiles

# ------------------------------------------------------------------------------------------------------ the material

X = np.ones((8, 4), np.float32)
rules, live = ts.rules, ts.rules.live
NAN, INF = float("nan"), float("inf")


def make_params() -> dict[str, Any]:
    return {
        "encoder": {"kernel": jnp.ones((4, 3)), "bias": jnp.zeros(3)},
        "head": {"kernel": jnp.ones((3, 2)), "bias": jnp.zeros(2)},
    }


def tree(encoder_bias, rest=True):
    """A tree like the params, with one leaf of its own."""
    return {"encoder": {"kernel": rest, "bias": encoder_bias}, "head": {"kernel": rest, "bias": rest}}


def other_model():
    return {"encoder": {"kernel": jnp.ones((4, 3))}, "head": {"kernel": jnp.ones((3, 2)), "bias": jnp.zeros(2)}}


def wider():
    return make_params() | {"head": {"kernel": jnp.ones((3, 5)), "bias": jnp.zeros(2)}}


def cast(dtype):
    return jax.tree.map(lambda x: x.astype(dtype), make_params())


def apply(params, x):
    hidden = x @ params["encoder"]["kernel"] + params["encoder"]["bias"][None]
    return hidden @ params["head"]["kernel"] + params["head"]["bias"][None]


def loss_fn(params, batch):
    return jnp.mean(apply(params, batch) ** 2)


PARAMS, GRADS = make_params(), make_params()
adam, sgd = rules.adam(1e-3), rules.sgd(0.1)


def setup(params=PARAMS, rule=adam, **arguments):
    return ts.setup(rule, params, **arguments)


@functools.cache
def good() -> ts.TrainState:
    """A state that nobody may donate: every use of it is refused."""
    return setup()


@functools.cache
def donated() -> ts.TrainState:
    state = setup(rule=rules.adam(optax.constant_schedule(1e-3)))
    ts.train_step(loss_fn)(state, X)
    return state


def step(loss=loss_fn, state=None, /, batch=X, **extra):
    return ts.train_step(loss)(good() if state is None else state, batch, **extra)


def returns(value: Callable, where=ts.train_step):
    """A step whose loss function returns this function of the values that it should have averaged."""
    return where(lambda params, batch: value(apply(params, batch) ** 2))(good(), X)


def raising(params, batch):
    return jnp.mean(batch @ params["encoder"]["kernl"])


def branching(params, batch):
    if jnp.mean(batch) > 0:
        return loss_fn(params, batch)


def wrong_shapes(params, batch):
    return jnp.mean(batch @ params["head"]["kernel"])


def three() -> ts.TrainState:
    """A population of three."""
    return jax.vmap(lambda rate: setup(rule=rules.adam(rate)))(jnp.ones(3))


def tied(where="params"):
    w = jnp.ones(3)
    if where == "params":
        return ts.setup(adam, {"embed": {"table": w}, "out": {"table": w}}, copy=False)
    return ts.setup(adam, {"embed": w}, model_state={"ema": w}, copy=False)


@functools.cache
def sibling() -> ts.TrainState:
    """A state that shares its arrays with one that was donated."""
    state = setup()
    other = state.replace(calls=3)
    ts.train_step(loss_fn)(state, X)
    return other


# ----------------------------------------------------------------------------------------------------------- the rows


@dataclass(frozen=True)
class Row:
    number: int
    title: str
    call: Callable[[], Any]
    error: type[TsunaxError]
    cause: type[Exception] | None = None  # what the error comes from, where that is somebody else's exception
    compiles: bool = False  # only running the program shows it

    def __str__(self):
        return f"{self.number}-{self.title}".replace(" ", "-")


row = Row


LOSS = [
    row(2, "loss per row", lambda: returns(lambda v: v), LossError),
    row(2, "loss per row, eval", lambda: returns(lambda v: v, ts.eval_step), LossError),
    row(2, "loss per row, value_and_grad", lambda: returns(lambda v: v, ts.value_and_grad), LossError),
    row(2, "loss of shape (1,)", lambda: returns(lambda v: v.mean().reshape(1)), LossError),
    row(2, "total per row", lambda: returns(lambda v: ts.Loss(v, 3)), LossError),
    row(3, "loss is int32", lambda: returns(lambda v: (v > 0).sum()), LossError),
    row(3, "loss is an int", lambda: returns(lambda v: 3), LossError),
    row(3, "loss is a bool", lambda: returns(lambda v: True), LossError),
    row(3, "loss is complex", lambda: returns(lambda v: v.mean() * 1j), LossError),
    row(4, "loss is None", lambda: returns(lambda v: None), LossError),
    row(4, "loss is a str", lambda: returns(lambda v: "low"), LossError),
    row(4, "loss is a dict", lambda: returns(lambda v: {"loss": v.mean()}), LossError),
    row(4, "loss is a list", lambda: returns(lambda v: [v.mean()]), LossError),
    row(4, "loss is a class", lambda: returns(lambda v: ts.Loss), LossError),
    row(5, "aux", lambda: returns(lambda v: (v.mean(), {"acc": 1.0})), LossError),
    row(5, "aux, eval", lambda: returns(lambda v: (v.mean(), {}), ts.eval_step), LossError),
    row(5, "value_and_grad as loss", lambda: step(jax.value_and_grad(loss_fn)), LossError),
    row(5, "grad as loss", lambda: step(jax.grad(loss_fn)), LossError),
    row(6, "x and y", lambda: step(lambda params, x, y: 0.0), LossError),
    row(6, "rng", lambda: step(lambda params, batch, rng: 0.0), LossError),
    row(0, "key without one", lambda: step(lambda p, b, key: 0.0), LossError),
    row(0, "key, eval", lambda: ts.eval_step(lambda p, b, key: 0.0)(setup(key=0), X), LossError),
    row(0, "model_state without one", lambda: step(lambda p, b, model_state: 0.0), LossError),
    row(0, "keyword misspelled", lambda: step(lambda p, b, trian: 0.0), LossError),
    row(0, "extra unread", lambda: step(teacher=3.0), KeywordError),
    row(0, "extra misspelled", lambda: step(lambda p, b, teacher=None: 0.0, techer=1.0), KeywordError),
    *(
        row(0, f"extra {name}", lambda name=name: step(lambda p, b, **any: 0.0, **{name: 1.0}), LossError)
        for name in "step train model_state value grad loss at norms on_nonfinite outside updates params flush grad_norm "
        "device_mesh".split()
    ),
    row(0, "extra step, eval", lambda: ts.eval_step(lambda p, b, step: 0.0)(good(), X, step=1), LossError),
    row(0, "extra step, value_and_grad", lambda: ts.value_and_grad(lambda p, b, **any: 0.0)(good(), X, step=1), LossError),
    row(0, "extra key", lambda: step(lambda p, b, key: 0.0, setup(key=0), key=1), LossError),
    row(0, "mean of ints", lambda: ts.Loss.mean(jnp.arange(3)), LossError),
    row(0, "mean of nothing", lambda: ts.Loss.mean(jnp.ones((0, 2))), LossError),
    row(0, "mask of other shape", lambda: ts.Loss.mean(X, np.ones(3)), LossError),
    row(0, "a total alone", lambda: returns(lambda v: ts.Loss(v.mean())), LossError),
    row(0, "a total alone in a sum", lambda: returns(lambda v: ts.Loss(v.mean()) + 1.0), LossError),
    row(0, "a total alone in a sum of losses", lambda: ts.Loss.mean(X) + ts.Loss(jnp.float32(1.0)), LossError),
    row(0, "a total alone as a number", lambda: float(ts.Loss(jnp.float32(1.0))), LossError),
    row(0, "merge of a mean without a weight", lambda: ts.Loss.mean(X).merge(ts.Loss.mean(jnp.float32(1.0))), LossError),
    row(0, "weight per row", lambda: returns(lambda v: ts.Loss(v.sum(), v)), LossError),
    row(0, "weight is text", lambda: returns(lambda v: ts.Loss(v.sum(), "8")), LossError),
    row(0, "weight 0", lambda: returns(lambda v: ts.Loss(v.sum(), 0)), LossError),
    row(0, "weight -1", lambda: returns(lambda v: ts.Loss(v.sum(), -1.0)), LossError),
    row(0, "metric per class", lambda: returns(lambda v: ts.Loss.mean(v, metrics={"f1": v[0]})), LossError),
    row(0, "metric is text", lambda: returns(lambda v: ts.Loss.mean(v, metrics={"f1": "x"})), LossError),
    row(0, "metric is None", lambda: returns(lambda v: ts.Loss.mean(v, metrics={"f1": None})), LossError),
    row(0, "metrics by number", lambda: returns(lambda v: ts.Loss.mean(v, metrics={1: 1.0})), LossError),
    row(
        0, "merge of other metrics", lambda: ts.Loss.mean(X, metrics={"a": X}).merge(ts.Loss.mean(X)), LossError,
    ),
]  # fmt: skip

LEAVES = {"w": jnp.ones(2)}


def with_leaf(leaf, name="bad", **arguments):
    return ts.setup(adam, {**LEAVES, "deep": {name: leaf}}, **arguments)


PARAMETERS = [
    row(8, "no params", lambda: setup({}), ParamsError),
    row(8, "params None", lambda: setup(None), ParamsError),
    row(8, "params of None", lambda: setup({"a": None, "b": []}), ParamsError),
    row(9, "int leaf", lambda: with_leaf(jnp.arange(3)), ParamsError),
    row(9, "Python int", lambda: with_leaf(3), ParamsError),
    row(9, "int4", lambda: with_leaf(jnp.ones(2, jnp.int4)), ParamsError),
    row(9, "int leaf under jit", lambda: jax.jit(with_leaf)(jnp.arange(3)), ParamsError),
    row(9, "raw key", lambda: with_leaf(jax.random.PRNGKey(0)), ParamsError),
    row(9, "typed key", lambda: with_leaf(jax.random.key(0)), ParamsError),
    row(10, "bool leaf", lambda: with_leaf(np.ones(3, bool)), ParamsError),
    row(11, "text", lambda: with_leaf("relu"), ParamsError),
    row(11, "text that is not selected", lambda: with_leaf("relu", trainable="w"), ParamsError),
    row(11, "an odd name", lambda: with_leaf("relu", "it's\nodd"), ParamsError),
    row(11, "object", lambda: with_leaf(object()), ParamsError),
    row(11, "function", lambda: with_leaf(jnp.tanh), ParamsError),
    row(11, "object array", lambda: with_leaf(np.array([None, 1])), ParamsError),
    row(11, "text array", lambda: with_leaf(np.array(["a"])), ParamsError),
    row(11, "dates", lambda: with_leaf(np.array(["2020-01-01"], "M8[D]")), ParamsError),
    row(11, "the model itself", lambda: setup(linen.Dense(3)), ParamsError),
    row(11, "a function", lambda: setup(loss_fn), ParamsError),
    row(11, "shapes only", lambda: setup(jax.eval_shape(make_params)), ParamsError),
    row(12, "zero size", lambda: with_leaf(jnp.ones((0, 3))), ParamsError),
    row(13, "NaN and inf", lambda: with_leaf(jnp.array([1, NAN, INF])), ParamsError),
    row(13, "NaN in NumPy", lambda: with_leaf(np.float32([NAN, 1])), ParamsError),
    row(13, "Python inf", lambda: with_leaf(INF), ParamsError),
    row(14, "float64", lambda: with_leaf(np.ones(2)), ParamsError),
    row(14, "complex128", lambda: with_leaf(np.ones(2, complex)), ParamsError),
    row(14, "longdouble", lambda: with_leaf(np.ones(2, np.longdouble)), ParamsError),
    row(15, "a.b", lambda: setup({"a.b": 1.0, "a": {"b": 1.0}}), ParamsError),
    row(15, "a/b", lambda: setup({"a/b": 1.0, "a": {"b": 1.0}}), ParamsError),
    row(17, "tied", tied, ParamsError),
    row(17, "tied to model_state", lambda: tied("both"), ParamsError),
    row(
        18, "complex", lambda: ts.setup(rules.rprop(0.1), {"a": 1.0, "c": jnp.ones(2, jnp.complex64)}), RuleError, cause=Exception,
    ),
    row(0, "model_state has code", lambda: setup(model_state={"f": jnp.tanh}), WrongTypeError),
    row(0, "model_state has text", lambda: setup(model_state={"f": "x"}), WrongTypeError),
    row(0, "model_state has shapes", lambda: setup(model_state=jax.eval_shape(make_params)), WrongTypeError),
    row(0, "key is text", lambda: setup(key="0"), WrongTypeError),
    row(0, "key is a float", lambda: setup(key=0.5), WrongTypeError),
    row(0, "key is a bool", lambda: setup(key=True), WrongTypeError),
    row(0, "key is floats", lambda: setup(key=jnp.ones(2)), WrongTypeError),
    row(0, "words that are no key", lambda: setup(key=jnp.zeros(3, jnp.uint32)), WrongTypeError),
    row(0, "three keys", lambda: setup(key=jax.random.split(jax.random.key(0), 3)), WrongTypeError),
    row(0, "seed of 70 bits", lambda: setup(key=2**70), StateError),
    row(0, "device by another name", lambda: setup(device="CPU"), DeviceError),
    row(0, "all devices", lambda: setup(device=jax.devices()), WrongTypeError),
    row(0, "copy is text", lambda: setup(copy="no"), WrongTypeError),
    row(0, "freezable is text", lambda: setup(freezable="no"), WrongTypeError),
]  # fmt: skip

RULE = [
    row(19, "None", lambda: ts.setup(None, PARAMS), WrongTypeError),
    row(19, "class", lambda: ts.setup(optax.GradientTransformation, PARAMS), WrongTypeError),
    row(19, "name", lambda: ts.setup("adam", PARAMS), WrongTypeError),
    row(19, "number", lambda: ts.setup(1e-3, PARAMS), WrongTypeError),
    row(19, "not called", lambda: ts.setup(rules.adam, PARAMS), WrongTypeError),
    row(19, "optax's, not called", lambda: ts.setup(optax.adam, PARAMS), WrongTypeError),
    row(19, "params first", lambda: ts.setup(PARAMS, adam), WrongTypeError),
    row(19, "list", lambda: ts.setup([sgd, adam], PARAMS), WrongTypeError),
    row(19, "dict", lambda: ts.setup({"**": adam}, PARAMS), WrongTypeError),
    row(19, "bare halves", lambda: ts.setup((adam.init, adam.update), PARAMS), WrongTypeError),
    row(19, "in a chain", lambda: rules.chain([sgd, adam]), WrongTypeError),
    row(19, "in a chain, not called", lambda: rules.chain(rules.clip, adam), WrongTypeError),
    row(19, "in groups", lambda: rules.partition({"**": rules.sgd}), WrongTypeError),
    row(19, "groups by number", lambda: rules.partition({1: adam}), WrongTypeError),
    row(19, "live of *args", lambda: live(optax.chain), WrongTypeError),
    row(19, "static unknown", lambda: live(optax.adam, static=("esp",)), HyperparameterError),
    row(19, "static is a str", lambda: live(optax.adam, static="eps"), HyperparameterError),
    *(
        made
        for rule, name in [(rules.adam, "adam"), (rules.sgd, "sgd")]
        for made in [
            row(20, f"{name} -1", lambda rule=rule: rule(-1), HyperparameterError),
            row(21, f"{name} NaN", lambda rule=rule: rule(NAN), HyperparameterError),
            row(21, f"{name} inf", lambda rule=rule: rule(np.inf), HyperparameterError),
            row(21, f"{name} NaN in jax", lambda rule=rule: rule(jnp.float32(NAN)), HyperparameterError),
            row(22, f"{name} str", lambda rule=rule: rule("1e-3"), WrongTypeError),
            row(22, f"{name} None", lambda rule=rule: rule(None), WrongTypeError),
            row(22, f"{name} bool", lambda rule=rule: rule(True), WrongTypeError),
            row(22, f"{name} dict", lambda rule=rule: rule({"lr": 1}), WrongTypeError),
            row(22, f"{name} list", lambda rule=rule: rule([1e-3]), WrongTypeError),
            row(22, f"{name} tuple", lambda rule=rule: rule((1e-3, 1e-4)), WrongTypeError),
            row(22, f"{name} complex", lambda rule=rule: rule(1j), WrongTypeError),
            row(22, f"{name} array", lambda rule=rule: rule(jnp.ones(2)), WrongTypeError),
            row(22, f"{name} text array", lambda rule=rule: rule(np.array("x")), WrongTypeError),
            row(22, f"{name} missing", lambda rule=rule: rule(), WrongTypeError),
            row(22, f"{name} twice", lambda rule=rule: rule(1.0, learning_rate=1.0), WrongTypeError),
            row(22, f"{name} too many", lambda rule=rule: rule(*range(1, 30)), WrongTypeError),
            row(22, f"{name} misspelled", lambda rule=rule: rule(learnin_rate=1), WrongTypeError),
            row(22, f"{name} lr", lambda rule=rule: rule(lr=1), WrongTypeError),
        ]
    ),
    row(21, "too big for float32", lambda: rules.adam(1e39), HyperparameterError),
    row(22, "adafactor str", lambda: rules.adafactor("1e-3"), WrongTypeError),
    row(22, "lbfgs str", lambda: rules.lbfgs("1e-3"), WrongTypeError),
    row(22, "polyak_sgd str", lambda: rules.polyak_sgd("1"), WrongTypeError),
    row(22, "momentum str", lambda: rules.sgd(0.1, momentum="0.9"), WrongTypeError),
    row(22, "momentum bool", lambda: rules.sgd(0.1, momentum=True), WrongTypeError),
    row(22, "b1 None", lambda: rules.adam(1e-3, b1=None), WrongTypeError),
    row(0, "momentum 1.5", lambda: rules.sgd(0.1, momentum=1.5), HyperparameterError),
    row(0, "b1 = 1", lambda: rules.adam(1e-3, b1=1.0), HyperparameterError),
    row(0, "b2 = 1.1", lambda: rules.adam(1e-3, b2=1.1), HyperparameterError),
    row(0, "b1 = -0.1", lambda: rules.lion(1e-3, b1=-0.1), HyperparameterError),
    row(0, "eps = -1", lambda: rules.adam(1e-3, eps=-1.0), HyperparameterError),
    row(0, "decay = 1", lambda: rules.rmsprop(1e-3, decay=1.0), HyperparameterError),
    row(0, "negative weight decay", lambda: rules.adamw(1e-3, weight_decay=-1), HyperparameterError),
    row(0, "weight_decay -1", lambda: rules.add_decayed_weights(-1.0), HyperparameterError),
    row(0, "weight_decay str", lambda: rules.add_decayed_weights("0.1"), WrongTypeError),
    row(0, "sign_decay -1", lambda: rules.sign_decay(-1.0), HyperparameterError),
    row(0, "betas of torch", lambda: rules.adam(1e-3, betas=(0.9, 0.99)), WrongTypeError),
    row(0, "nesterov is text", lambda: rules.sgd(0.1, nesterov="no"), WrongTypeError),
    row(0, "mask matches nothing", lambda: setup(rule=rules.adamw(1e-3, mask="**/kernal")), PatternError),
    row(0, "mask malformed", lambda: rules.adamw(1e-3, mask="a//b"), PatternError),
    row(23, "array", lambda: rules.adam(lambda s: jnp.ones(2) * s), WrongTypeError),
    row(23, "NaN", lambda: rules.adam(lambda s: NAN), HyperparameterError),
    row(23, "negative", lambda: rules.adam(optax.cosine_decay_schedule(-1.0, 10)), HyperparameterError),
    row(23, "ends in NaN", lambda: rules.adam(optax.linear_schedule(1.0, NAN, 10)), HyperparameterError),
    row(23, "None", lambda: rules.adam(lambda s: None), WrongTypeError),
    row(23, "text", lambda: rules.adam(lambda s: "1"), WrongTypeError),
    row(23, "b1 of 1", lambda: rules.adam(1e-3, b1=lambda s: 1.0), HyperparameterError),
    *(
        row(30, f"{name} {bad}", lambda name=name, bad=bad: getattr(rules, name)(bad), HyperparameterError)
        for name in ("clip_by_global_norm", "clip_by_norm", "clip")
        for bad in (0, -1.0, NAN)
    ),
    row(30, "inf", lambda: rules.clip(INF), HyperparameterError),
    row(30, "None", lambda: rules.clip_by_global_norm(None), WrongTypeError),
    row(30, "p is text", lambda: rules.clip_by_norm(1.0, p="2"), WrongTypeError),
    row(30, "p is NaN", lambda: rules.clip_by_norm(1.0, p=NAN), WrongTypeError),
    row(30, "p is complex", lambda: rules.clip_by_norm(1.0, p=1j), WrongTypeError),
    row(30, "throw is text", lambda: rules.clip_by_norm(1.0, throw="no"), WrongTypeError),
    row(
        31, "norm and value", lambda: rules.clip_by_global_norm(1.0, value=0.5), WrongTypeError,
    ),
    row(
        31, "value and norm", lambda: rules.clip(5.0, norm=1.0), WrongTypeError,
    ),
    row(31, "another name", lambda: rules.clip_by_global_norm(max=1.0), WrongTypeError),
    row(31, "two numbers", lambda: rules.clip_by_global_norm(1.0, 2.0), WrongTypeError),
]  # fmt: skip

NEAREST = "Nearest: 'encoder/bias', 'encoder/kernel', 'head/bias'."
SELECTION = [
    row(33, "freeze", lambda: ts.freeze(good(), "encodr/**"), PatternError),
    row(33, "thaw", lambda: ts.thaw(good(), "encodr/**"), PatternError),
    row(33, "adjust", lambda: ts.adjust(good(), "encodr/**", b1=0.5), PatternError),
    row(33, "trainable", lambda: setup(trainable="encodr/**"), PatternError),
    row(33, "groups", lambda: setup(rule=rules.partition({"encodr/**": sgd, "**": adam})), PatternError),
    row(33, "weight_decay", lambda: setup(rule=rules.add_decayed_weights(0.1, "encodr/**")), PatternError),
    row(33, "in a list", lambda: ts.freeze(good(), ["encoder/**", "!haed/**"]), PatternError),
    row(33, "dots", lambda: ts.freeze(good(), "encoder.kernel"), PatternError),
    row(33, "case", lambda: ts.freeze(good(), "Encoder/**"), PatternError),
    row(33, "a regex", lambda: ts.freeze(good(), "encoder/(kernel|bias)"), PatternError),
    row(33, "a subtree", lambda: ts.freeze(good(), "encoder"), PatternError),
    row(33, "under jit", lambda: jax.jit(lambda s: ts.freeze(s, "encodr"))(good()), PatternError),
    row(33, "predicate", lambda: ts.freeze(good(), lambda path, leaf: False), PatternError),
    row(33, "empty list", lambda: ts.freeze(good(), []), PatternError),
    row(33, "unselected", lambda: ts.freeze(setup(trainable="head/**"), "encoder/**"), PatternError),
    row(
        33, "thaw unselected", lambda: ts.thaw(setup(trainable="head/**"), "encoder/**"), PatternError,
    ),
    row(
        33, "adjust unselected", lambda: ts.adjust(setup(trainable="head/**"), "encoder/**", b1=0.5), PatternError,
    ),
    row(34, "open bracket", lambda: setup(trainable="enc[/kernel"), PatternError),
    row(34, "empty component", lambda: ts.freeze(good(), "encoder//kernel"), PatternError),
    row(34, "slash at the end", lambda: ts.freeze(good(), "encoder/"), PatternError),
    row(34, "slash in front", lambda: ts.freeze(good(), "/encoder"), PatternError),
    row(34, "empty", lambda: ts.freeze(good(), ""), PatternError),
    row(34, "** inside", lambda: ts.adjust(good(), "enc**/kernel", b1=0.5), PatternError),
    row(34, "only exclusions", lambda: setup(trainable=["!**/bias"]), PatternError),
    row(34, "groups", lambda: rules.partition({"a//b": adam, "**": sgd}), PatternError),
    row(34, "weight_decay", lambda: rules.add_decayed_weights(0.1, where="a//b"), PatternError),
    row(34, "None", lambda: ts.freeze(good(), None), WrongTypeError),
    row(34, "a number", lambda: setup(trainable=3), WrongTypeError),
    row(34, "a compiled regex", lambda: setup(trainable=re.compile("x")), WrongTypeError),
    row(34, "mixed list", lambda: setup(trainable=["**", 3]), WrongTypeError),
    row(35, "all taken away", lambda: setup(trainable=["**", "!**"]), PatternError),
    row(35, "predicate", lambda: setup(trainable=lambda path, leaf: False), PatternError),
    row(35, "bool tree", lambda: setup(trainable=tree(False, False)), PatternError),
    row(35, "empty list", lambda: setup(trainable=[]), PatternError),
    row(36, "one missing", lambda: setup(trainable=other_model()), PatternError),
    row(36, "one too many", lambda: setup(trainable=tree(True) | {"x": True}), PatternError),
    row(36, "a prefix", lambda: ts.freeze(good(), {"encoder": True, "head": True}), PatternError),
    row(36, "a bool", lambda: setup(trainable=True), PatternError),
    row(36, "weight_decay", lambda: setup(rule=rules.add_decayed_weights(0.1, {"encoder": True})), PatternError),
    row(37, "int", lambda: setup(trainable=tree(1)), PatternError),
    row(37, "text", lambda: ts.freeze(good(), tree("yes")), PatternError),
    row(37, "None", lambda: setup(trainable=tree(None)), PatternError),
    row(37, "array", lambda: setup(trainable=tree(jnp.ones(3, bool))), PatternError),
    row(37, "predicate", lambda: setup(trainable=lambda path, leaf: path), PatternError),
    row(0, "leaf without group", lambda: setup(rule=rules.partition({"encoder/**": adam})), PatternError),
    row(0, "group in the shade", lambda: setup(rule=rules.partition({"**": adam, "head/**": sgd})), PatternError),
]  # fmt: skip

STATE = [
    row(89, "step", lambda: step(loss_fn, donated()), StateError),
    *(
        row(89, name, lambda use=use: use(donated()), StateError)
        for name, use in {
            "eval_step()": lambda s: ts.eval_step(loss_fn)(s, X),
            "value_and_grad()": lambda s: ts.value_and_grad(loss_fn)(s, X),
            "update()": lambda s: ts.update(s, GRADS),
            "lower()": lambda s: ts.train_step(loss_fn).lower(s, X),
            "trace()": lambda s: ts.train_step(loss_fn).trace(s, X),
            "adjust()": lambda s: ts.adjust(s, b1=0.5),
            "freeze()": lambda s: ts.freeze(s, "head/**"),
            "thaw()": lambda s: ts.thaw(s),
            "hyperparams()": lambda s: ts.hyperparams(s),
            "trainable()": lambda s: ts.trainable(s),
            "replace()": lambda s: s.replace(key=0),
            "TrainState.step": lambda s: s.step,
            "TrainState.calls": lambda s: s.calls,
        }.items()
    ),
    row(89, "params of it", lambda: setup(donated().params), ParamsError),
    row(89, "model state of it", lambda: setup(model_state=donated().params), StateError),
    row(89, "sibling", lambda: step(loss_fn, sibling()), StateError),
    row(90, "other grads", lambda: ts.update(good(), other_model()), StateError),
    row(90, "more grads", lambda: ts.update(setup(other_model()), GRADS), StateError),
    row(90, "grads under jit", lambda: jax.jit(ts.update)(good(), other_model()), StateError),
    row(90, "grads of other shape", lambda: ts.update(good(), wider()), StateError),
    row(90, "grads None", lambda: ts.update(good(), None), StateError),
    row(90, "grads and loss", lambda: ts.update(good(), (ts.Loss(1.0, 1.0), GRADS)), StateError),
    row(90, "grads int", lambda: ts.update(good(), cast(int)), StateError),
    row(90, "grads bool", lambda: ts.update(good(), cast(bool)), StateError),
    row(90, "grads complex", lambda: ts.update(good(), cast(jnp.complex64)), StateError),
    row(90, "grads big-endian", lambda: ts.update(good(), tree(np.ones(3, ">f4"), 1.0)), StateError),
    row(90, "grads longdouble", lambda: ts.update(good(), tree(np.ones(3, np.longdouble), 1.0)), StateError),
    row(90, "grads text", lambda: ts.update(good(), tree("x", 1.0)), StateError),
    row(90, "at of other model", lambda: ts.value_and_grad(loss_fn)(good(), X, at=other_model()), StateError),
    row(90, "at of other shape", lambda: ts.value_and_grad(loss_fn)(good(), X, at=wider()), StateError),
    row(90, "params of other model", lambda: good().replace(params=other_model()), StateError),
    row(90, "params of other shape", lambda: good().replace(params=wider()), StateError),
    row(90, "params of other dtype", lambda: good().replace(params=cast(jnp.bfloat16)), StateError),
    row(90, "opt_state of other rule", lambda: good().replace(opt_state=setup(rule=sgd).opt_state), StateError),
    row(90, "opt_state of other model", lambda: good().replace(opt_state=setup(other_model()).opt_state), StateError),
    row(90, "numbers of other rule", lambda: good().replace(numbers=setup(rule=sgd).numbers), StateError),
    row(90, "numbers None", lambda: good().replace(numbers=None), StateError),
    row(90, "frozen True", lambda: good().replace(frozen=True), StateError),
    row(90, "field unknown", lambda: good().replace(parms=PARAMS), StateError),
    row(90, "step is text", lambda: good().replace(step="3"), StateError),
    row(90, "step beyond 32 bits", lambda: good().replace(step=2**40), StateError),
    row(90, "rejected is a float", lambda: good().replace(rejected=2.5), StateError),
    row(90, "rejected is a list", lambda: good().replace(rejected=[1, 2]), StateError),
    row(90, "in a row below 0", lambda: good().replace(rejected_in_a_row=-1), StateError),
    row(90, "step is a float", lambda: good().replace(step=3.5), StateError),
    row(90, "step is negative", lambda: good().replace(calls=-3), StateError),
    row(90, "key is text", lambda: good().replace(key="x"), WrongTypeError),
    row(90, "model_state unknown", lambda: ts.update(good(), GRADS, model_state={"m": X}), StateError),
    row(
        90, "model_state of loss", lambda: step(
            lambda p, b, model_state: ts.Loss.mean(apply(p, b), model_state={"n": jnp.ones(2)}), setup(model_state={"m": jnp.ones(2)})
        ), StateError,
    ),
    row(
        90, "model_state of other dtype", lambda: step(
            lambda p, b, model_state: ts.Loss.mean(apply(p, b), model_state={"m": jnp.ones(2, jnp.bfloat16)}),
            setup(model_state={"m": jnp.ones(2)}),
        ), StateError,
    ),
    row(0, "batch first", lambda: ts.train_step(lambda batch, params: 0.0), LossError),
    row(0, "loss_scale True", lambda: setup(precision="float16", loss_scale=True), StateError),
    row(0, "per_example None", lambda: ts.train_step(loss_fn, per_example=None), WrongTypeError),
    row(0, "noise_scale 0.1", lambda: ts.train_step(loss_fn, accumulate=2, noise_scale=0.1), WrongTypeError),
    row(0, "carry of text", lambda: ts.eval_step(loss_fn, carry="no"), WrongTypeError),
    row(0, "progress of text", lambda: ts.fit(ts.train_step(loss_fn), good(), [X], steps=1, progress="no"), WrongTypeError),
    row(0, "batch_size True", lambda: ts.batches(X, True), DataError),
    row(0, "column of text", lambda: ts.batches(np.array(["a", "b"]), 2), DataError),
    row(0, "epoch below 0", lambda: ts.batches(X, 2).set_state({"epoch": -1, "position": 0}), DataError),
    row(0, "complex targets", lambda: ts.losses.absolute_error(X, 1j * X), LossError),
    row(0, "metrics of two shapes", lambda: ts.metrics.Mean.of(jnp.ones(3)).merge(ts.metrics.Mean(jnp.ones(2), jnp.ones(2))), LossError),
    row(0, "no model state", lambda: ts.update_batch_stats(loss_fn)(good(), X), StateError),
    row(0, "pack a text", lambda: ts.data.pack(["abc"], 8), DataError),
    row(0, "unit axes", lambda: ts.exchange.rearrange("() a -> a ()"), HyperparameterError),
    row(0, "a number for an axis", lambda: ts.exchange.rearrange("1 a -> a 1"), HyperparameterError),
    row(0, "no batch to size", lambda: ts.find_batch_size(ts.train_step(toys.drawn), toys.state(key=0), None), WrongTypeError),
    row(0, "no batch to cut", lambda: ts.insight.find_accumulation(ts.train_step(toys.drawn), toys.state(key=0), None, 64), WrongTypeError),
    row(0, "a key for an evaluation", lambda: ts.evaluate(ts.eval_step(toys.noisy), toys.state(), [toys.X]), LossError),
    row(0, "loss per row to update", lambda: ts.update(good(), GRADS, loss=jnp.ones(3)), LossError),
    row(0, "loss text to update", lambda: ts.update(good(), GRADS, loss="x"), LossError),
    row(0, "loss without weight", lambda: ts.update(good(), GRADS, loss=ts.Loss(1.0)), LossError),
    row(0, "rule on a TrainState", lambda: adam.update(GRADS, good().opt_state, PARAMS), RuleError),
    row(91, "params to step", lambda: step(loss_fn, PARAMS), WrongTypeError),
    row(91, "batch first", lambda: step(loss_fn, X, batch=good()), WrongTypeError),
    row(91, "what step returned", lambda: step(loss_fn, (good(), None)), WrongTypeError),
    *(
        row(91, f"params to {name}", lambda use=use: use(PARAMS), WrongTypeError)
        for name, use in {
            "eval_step": lambda s: ts.eval_step(loss_fn)(s, X),
            "value_and_grad": lambda s: ts.value_and_grad(loss_fn)(s, X),
            "update": lambda s: ts.update(s, GRADS),
            "lower": lambda s: ts.train_step(loss_fn).lower(s, X),
            "adjust": lambda s: ts.adjust(s, b1=0.5),
            "freeze": lambda s: ts.freeze(s, "head/**"),
            "thaw": lambda s: ts.thaw(s),
            "hyperparams": lambda s: ts.hyperparams(s),
            "trainable": lambda s: ts.trainable(s),
        }.items()
    ),
    row(91, "pattern first", lambda: ts.freeze("head/**", good()), WrongTypeError),
    row(91, "grads first", lambda: ts.update(GRADS, good()), WrongTypeError),
    row(91, "a rule", lambda: ts.hyperparams(adam), WrongTypeError),
    row(91, "an abstract state", lambda: step(loss_fn, jax.eval_shape(setup)), WrongTypeError),
    row(0, "policy unknown", lambda: ts.train_step(loss_fn, on_nonfinite="Skip"), HyperparameterError),
    row(0, "policy None", lambda: ts.update(good(), GRADS, on_nonfinite=None), HyperparameterError),
    row(0, "donate is text", lambda: ts.train_step(loss_fn, donate="no"), WrongTypeError),
    row(0, "norms is text", lambda: ts.train_step(loss_fn, norms="no"), WrongTypeError),
    row(0, "adjust misspelled", lambda: ts.adjust(good(), learning_rat=1.0), HyperparameterError),
    row(0, "adjust lr", lambda: ts.adjust(good(), lr=1.0), HyperparameterError),
    row(0, "adjust lr under jit", lambda: jax.jit(lambda s: ts.adjust(s, lr=1.0))(good()), HyperparameterError),
    row(0, "adjust dict", lambda: ts.adjust(good(), **{"learning_rat": 1.0}), HyperparameterError),
    row(0, "adjust -1", lambda: ts.adjust(good(), learning_rate=-1.0), HyperparameterError),
    row(0, "adjust NaN", lambda: ts.adjust(good(), learning_rate=NAN), HyperparameterError),
    row(0, "adjust b1 = 1", lambda: ts.adjust(good(), b1=1), HyperparameterError),
    row(0, "adjust text", lambda: ts.adjust(good(), learning_rate="1"), WrongTypeError),
    row(0, "adjust text in dict", lambda: ts.adjust(good(), **{"b1": "1"}), WrongTypeError),
    row(0, "adjust bool", lambda: ts.adjust(good(), learning_rate=True), WrongTypeError),
    row(0, "adjust array", lambda: ts.adjust(good(), learning_rate=X[0]), WrongTypeError),
    row(0, "adjust beyond float32", lambda: ts.adjust(good(), learning_rate=1e39), HyperparameterError),
    row(0, "adjust two of three", lambda: ts.adjust(three(), b1=X[0, :2]), HyperparameterError),
    row(0, "adjust one of three to NaN", lambda: ts.adjust(three(), b1=np.array([0, NAN, 0])), HyperparameterError),
    row(0, "adjust schedule", lambda: ts.adjust(good(), b1=lambda s: 0.5), WrongTypeError),
    row(0, "adjust None", lambda: ts.adjust(good(), b1=None), WrongTypeError),
    row(0, "adjust_at nothing", lambda: ts.callbacks.adjust_at(3), HyperparameterError),
    row(0, "watchdog after '5 m'", lambda: ts.callbacks.watchdog("5 m"), HyperparameterError),
    row(0, "watchdog after 0", lambda: ts.callbacks.watchdog(0), HyperparameterError),
    row(0, "adjust_at nothing of a part", lambda: ts.callbacks.adjust_at(3, "head"), HyperparameterError),
    row(0, "adjust a number", lambda: ts.adjust(good(), 1e-3), WrongTypeError),
    row(0, "adjust optax's", lambda: ts.adjust(setup(rule=optax.adam(1e-3)), b1=0.5), HyperparameterError),
    row(
        0, "adjust of others", lambda: ts.adjust(
            setup(rule=rules.partition({"head/**": rules.sgd(1.0, momentum=0.9), "**": adam})), "encoder/**", momentum=0.5
        ), HyperparameterError,
    ),
    row(
        0, "adjust of two", lambda: ts.adjust(setup(rule=rules.chain(rules.add_decayed_weights(0.1), rules.adamw(1.0))), weight_decay=0.5),
        HyperparameterError,
    ),
    row(0, "no rows", lambda: step(batch=X[:0]), LossError),
    row(0, "no rows, eval", lambda: ts.eval_step(loss_fn)(good(), X[:0]), LossError),
    row(0, "no rows, mean", lambda: step(lambda p, b: ts.Loss.mean(apply(p, b)), batch=X[:0]), LossError),
]  # fmt: skip


def gone(shape=(8, 4)) -> jax.Array:
    x = jnp.ones(shape)
    x.delete()
    return x


def fit(batch=X, **arguments):
    return ts.fit(ts.train_step(loss_fn), good(), [batch], progress=False, **{"steps": 1, **arguments})


def search(**arguments):
    return ts.find_learning_rate(ts.train_step(loss_fn), good(), [X], **arguments)


NAMES = np.array(["skip", "raise"])  # where one name is wanted
OBJECTS = np.array([None, 1], object)

CALLS = [
    row(0, "run_steps on deleted", lambda: ts.loop.run_steps(ts.train_step(loss_fn), good(), gone((2, 8, 4))), StateError),
    row(0, "run_steps on objects", lambda: ts.loop.run_steps(ts.train_step(loss_fn), good(), OBJECTS), WrongTypeError),
    row(0, "shard zero1 no", lambda: ts.shard(good(), ts.mesh(), zero1="no"), WrongTypeError),
    row(0, "policy an array", lambda: ts.train_step(loss_fn, on_nonfinite=NAMES), HyperparameterError),
    row(0, "step and state swapped", lambda: ts.fit(good(), ts.train_step(loss_fn), X, steps=1), WrongTypeError),
    row(0, "resume an array", lambda: fit(resume=NAMES), HyperparameterError),
    row(0, "signal that cannot be handled", lambda: fit(signals=("KILL",)), HyperparameterError),
    row(0, "Best mode an array", lambda: ts.checkpoints.Best("loss", mode=NAMES), HyperparameterError),
    row(0, "rounding an array", lambda: ts.precision.Policy(rounding=NAMES), HyperparameterError),
    row(0, "drop_remainder an array", lambda: ts.batches(X, 2, drop_remainder=NAMES), WrongTypeError),
    row(0, "backend an array", lambda: ts.tune(len, {"x": ts.tuning.spaces.uniform(0, 1)}, backend=NAMES), HyperparameterError),
    row(0, "complex weight", lambda: ts.Loss.mean(X, 1j), LossError),
    *(
        row(0, f"fit {name}", lambda name=name: fit(**{name: 1}), WrongTypeError)
        for name, text in {
            "max_grad_norm": "The rule clips: ts.rules.chain(ts.rules.clip_by_global_norm(1.0), rule).",
            "steps_per_epoch": "An epoch is one pass over the data: give steps=.",
            "lr": "The rule has it: ts.rules.adam(1e-3)",
            "device": 'ts.setup(..., device="gpu").',
            "temp": "history, extra.",
        }.items()
    ),
    row(0, "fit steps an array", lambda: fit(steps=good().step[None] + 3), WrongTypeError),
    row(0, "a short word that is no typing error", lambda: step(lambda p, b, step: 0.0, temp=1.0), KeywordError),
    row(0, "complex Loss weight", lambda: returns(lambda v: ts.Loss(v.sum(), 1j)), LossError),
]  # fmt: skip


MISSING_NAMES = {  # what is asked for, and what to write instead
    (ts, "Trainer"): r"Write state, history = ts.fit\(step, state, data, epochs=10\).",
    (ts, "save"): r"Write ts.Checkpoints\(path\).save\(state\)",
    (ts, "load"): r"Write ts.Checkpoints\(path\).restore\(state\)",
    (ts, "Optimizer"): r"ts.setup\(rule, params\)",
    (ts, "DataLoader"): "Did you mean 'batches'?",
}


@pytest.mark.parametrize(("owner", "name"), MISSING_NAMES, ids=lambda x: x if isinstance(x, str) else "")
def test_a_name_of_another_library_is_missing(owner, name):
    with pytest.raises(AttributeError, match=MISSING_NAMES[owner, name].replace("?", "[?]")):
        getattr(owner, name)
    with pytest.raises(AttributeError, match="has no attribute '__wrapped__'"):
        owner.__wrapped__  # noqa: B018


FOREIGN_ARGUMENTS = {  # of fit
    "early_stopping": r'Give callbacks=ts.callbacks.early_stopping\("val/loss", patience=5\)',
    "accumulate": r"Give ts.train_step\(loss_fn, accumulate=4\)",
    "accumulate_grad_batches": r"Give ts.train_step\(loss_fn, accumulate=4\)",
    "resume_from_checkpoint": "Did you mean 'checkpoint'",
    "ckpt_path": "Did you mean 'checkpoint'",
}


@pytest.mark.parametrize("name", FOREIGN_ARGUMENTS)
def test_an_argument_of_another_library_is_explained(name):
    with pytest.raises(WrongTypeError, match=FOREIGN_ARGUMENTS[name]):
        ts.fit(ts.train_step(loss_fn), good(), [X], **{name: 3})


def unnamed(p, x):
    """A loss function whose first parameter is not called params."""
    return loss_fn(p, x)


def drops():
    """A module of NNX with a stream of random numbers."""
    return nnx.Sequential(nnx.Linear(4, 2, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(1)))


def used_up():
    found = (x for x in [X])
    list(found)
    return found


class Placed:
    """A loader whose position is `place`."""

    def __init__(self, place):
        self.get_state, self.set_state = lambda: place, lambda place: None

    def __iter__(self):
        return iter([X])


def saved(place):
    with tempfile.TemporaryDirectory() as folder:
        return ts.fit(ts.train_step(loss_fn), good(), Placed(place), steps=1, progress=False, checkpoint=folder)


def fits(what=None, **options):
    return ts.fit(what or ts.train_step(loss_fn), good(), [X], steps=1, progress=False, **options)


@functools.cache
def history():
    found = ts.loop.History()
    found.add({"loss": 1.0}, 1)
    return found


@functools.cache
def result():
    return ts.tune(lambda x: x, {"x": ts.tuning.spaces.uniform(0, 1)}, trials=1, progress=False)


def flax_state():
    return flax_train_state.TrainState.create(apply_fn=apply, params=make_params(), tx=optax.sgd(0.1))


SHAPES = {"image": X, "label": X}
USES = [
    row(0, "fit of a loss", lambda: fits(loss_fn), WrongTypeError),
    row(0, "fit of an unnamed loss", lambda: fits(unnamed), WrongTypeError),
    row(0, "fit of a loss, no loop", lambda: fits(unnamed, steps_per_call=None), WrongTypeError),
    row(0, "iterate a loss", lambda: next(ts.loop.iterate(unnamed, good(), [X], steps=1)), WrongTypeError),
    row(0, "evaluate to a scalar", lambda: ts.evaluate(lambda s, x: 1.0, good(), [X]), WrongTypeError),
    row(0, "evaluate a batch", lambda: ts.evaluate(ts.eval_step(loss_fn), good(), SHAPES), WrongTypeError),
    row(0, "no evaluation to stop by", lambda: ts.fit(ts.train_step(loss_fn), setup(), [X], steps=1, progress=False, callbacks=ts.callbacks.early_stopping()), RowError, compiles=True),
    row(0, "a position that cannot be saved", lambda: saved({"files": [open]}), WrongTypeError),
    row(0, "a position of another type", lambda: saved({"files": os.terminal_size((1, 2))}), WrongTypeError),
    row(0, "mask not used", lambda: ts.train_step(lambda params, batch, mask: loss_fn(params, batch), accumulate=3)(good(), X), LossError),
    row(0, "callback uncalled", lambda: fits(callbacks=ts.callbacks.early_stopping), WrongTypeError),
    row(0, "logger uncalled", lambda: fits(logger=ts.loggers.csv), WrongTypeError),
    row(0, "own factory uncalled", lambda: fits(callbacks=lambda x: lambda run: None), WrongTypeError),
    row(0, "batches of x, y, n", lambda: ts.batches(X, X, 4), WrongTypeError),
    row(0, "batches of x, y", lambda: ts.batches(X, X), DataError),
    row(0, "evaluate by an eval step", lambda: fits(evaluate=ts.eval_step(loss_fn)), WrongTypeError),
    row(0, "evaluate by words", lambda: fits(evaluate=dict, evaluate_every="every epoch"), HyperparameterError),
    row(0, "a batch of no rows for a plan", lambda: ts.plan(ts.train_step(loss_fn), good(), X[:1], -1), HyperparameterError),
    row(0, "a peak below 0", lambda: ts.insight.usage(ts.train_step(loss_fn), good(), X, peak=-1.0), HyperparameterError),
    row(0, "a callback that is called never", lambda: ts.callbacks.every((), print), HyperparameterError),
    row(0, "evaluate every 10 m", lambda: fits(evaluate=dict, evaluate_every="10 m"), HyperparameterError),
    row(0, "log by the clock", lambda: fits(log_every="30 s"), WrongTypeError),
    row(0, "step of a Restored", lambda: step(loss_fn, ts.checkpoints.Restored(good())), WrongTypeError),
    row(0, "step of flax's state", lambda: step(loss_fn, flax_state()), WrongTypeError),
    row(0, "evaluate a state", lambda: ts.evaluate(good(), ts.eval_step(loss_fn), [X]), WrongTypeError),
    row(0, "evaluate a train step", lambda: ts.evaluate(ts.train_step(loss_fn), good(), [X]), WrongTypeError),
    row(0, "fit of text", lambda: fit({"x": X, "name": "a"}), DataError),
    row(0, "fit of text, no loop", lambda: fit({"x": X, "name": "a"}, steps_per_call=None), DataError),
    row(0, "shard swapped", lambda: ts.shard(ts.mesh(), good()), WrongTypeError),
    row(0, "adjust to a schedule", lambda: ts.adjust(setup(), learning_rate=ts.schedules.cosine_decay_schedule(0.1, 9)), WrongTypeError),
    row(0, "evaluate a used generator", lambda: ts.evaluate(ts.eval_step(loss_fn), good(), used_up()), DataError),
    row(0, "adjust by position", lambda: ts.adjust(good(), 1e-3), WrongTypeError),
    row(0, "setup of a Model", lambda: setup(ts.models.nnx(drops())), ParamsError),
    row(0, "setup of a module with statistics", lambda: setup(nnx.BatchNorm(4, rngs=nnx.Rngs(0))), ParamsError),
    row(0, "setup of a module's whole state", lambda: setup(nnx.split(nnx.BatchNorm(4, rngs=nnx.Rngs(0)))[1]), ParamsError),
    row(0, "setup of linen's variables", lambda: setup({"params": good().params, "batch_stats": {"mean": X}}), ParamsError),
    row(0, "setup of a module", lambda: setup(drops()), ParamsError),
    row(0, "setup of a Linen module", lambda: setup(linen.Dense(3)), ParamsError),
]  # fmt: skip

ROWS = [*LOSS, *PARAMETERS, *RULE, *SELECTION, *STATE, *CALLS, *USES]


# ---------------------------------------------------------------------------------------------------------- the tests


@pytest.fixture(scope="module", autouse=True)
def _warm():
    donated(), good(), sibling()


def error_of(row: Row) -> tuple[BaseException | None, list[str]]:
    """What a row raises, and the steps that it compiled."""
    with count_compiles() as counts:
        try:
            row.call()
        except Exception as error:
            found = error
        else:
            found = None
    return found, [name for name in counts.compiled if name in ("train_step", "pure", "evaluate")]


def lint(text: str) -> list[str]:
    """What is wrong with the form of a message."""
    names = re.findall(r"\bts\.(rules\.)?(\w+)", text)
    known = lambda in_rules, name: hasattr(rules if in_rules else ts, name) or name == "migrate"
    return [
        fault
        for fault, is_bad in {
            "more than one line": "\n" in text,
            "too long": len(text) > 330,
            "no `: got ..., expected ...`": not re.search(r": got .+, expected .", text),
            "no sentence": not re.match(r"[a-z_]", text) or not text.endswith((".", "?")),
            "internals": re.search(r"Tracer|<function|<class|\b0x|object at|ArrayImpl|PjitFunction|\.\.\.\.", text),
            "spaces": "  " in text,
            "a name that tsunax has not": not all(known(*name) for name in names),
        }.items()
        if is_bad
    ]


GOLDEN = Path(__file__).with_name("golden") / "messages.txt"
VERSIONS = f"Python {platform.python_version().rpartition('.')[0]}, jax {jax.__version__}"


def message_of(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {error}"


@functools.cache
def golden_messages() -> dict[str, str]:
    """The message of each row, by its name."""
    _, *lines = GOLDEN.read_text().splitlines()
    return dict(zip(lines[::2], (line.strip() for line in lines[1::2]), strict=True))


def golden_versions() -> str:
    return GOLDEN.read_text().partition("\n")[0]


LATE = ("adjust two of three",)  # they compile


@pytest.mark.parametrize("row", medium_if(lambda row: row.title in LATE, ROWS), ids=str)
def test_what_is_said_of_a_bad_input(row):
    error, compiled = error_of(row)
    assert error is not None, "accepted"
    assert type(error) is row.error, repr(error)
    assert isinstance(error, (ValueError, TypeError))
    assert not compiled or row.compiles
    assert lint(str(error)) == [], error
    if golden_versions() == VERSIONS:  # errors of arguments are in the words of Python
        assert message_of(error) == golden_messages().get(str(row))
    if row.cause:
        assert isinstance(error.__cause__, row.cause)
    else:  # nothing of JAX or optax above our error in the traceback
        assert error.__cause__ is None and (error.__context__ is None or error.__suppress_context__)


def test_is_every_promised_input_there():
    promised = {*range(2, 7), *range(8, 16), *range(17, 24), 30, 31, *range(33, 38), 89, 90, 91}
    assert {row.number for row in ROWS} - {0} == promised
    titles = [str(row) for row in ROWS]
    assert len(set(titles)) == len(titles)


def test_the_golden_messages_are_those_of_the_rows():
    if "TSUNAX_WRITE_MESSAGES" in os.environ:
        messages = [f"{row}\n    {message_of(error_of(row)[0])}\n" for row in ROWS]
        GOLDEN.write_text("".join([f"{VERSIONS}\n", *messages]))
        golden_messages.cache_clear()
    assert list(golden_messages()) == [str(row) for row in ROWS]


def test_is_the_form_of_a_message_checked():
    bad = {
        "more than one line": "leaf at a: got 1,\n expected 2.",
        "too long": f"leaf at a: got {'1' * 400}, expected 2.",
        "no `: got ..., expected ...`": "leaf at a is not 2.",
        "no sentence": "Leaf at a: got 1, expected 2",
        "internals": "leaf at a: got <function f at 0x7f>, expected 2.",
        "spaces": "leaf at a: got 1, expected one of  for these.",
        "a name that tsunax has not": "leaf at a: got 1, expected 2. Use ts.fitt or ts.rules.accumulate.",
    }
    for fault, text in bad.items():
        assert fault in lint(text)
    assert lint("leaf at a: got 1, expected 2. Use ts.rules.adam, later ts.migrate.") == []


FAULTS = {  # of the user's own code: how to meet it, what is raised, and what its note says
    "KeyError": (lambda: step(raising), KeyError),
    "in an evaluation": (lambda: ts.eval_step(raising)(good(), X), KeyError),
    "in micro-batches": (lambda: ts.train_step(raising, accumulate=2)(good(), X), KeyError),
    "shapes": (lambda: step(wrong_shapes), TypeError),
    "shapes in fit": (lambda: ts.fit(ts.train_step(wrong_shapes), setup(), [X], steps=1, progress=False), TypeError),
    "no batch": (lambda: step(batch=None), TypeError),
    "if on an array": (lambda: step(branching), jax.errors.TracerBoolConversionError),
    "a Loss without total": (lambda: returns(lambda v: ts.Loss()), TypeError),
    "in a library": (lambda: step(library), ValueError),
    "labels as floats": (lambda: step(labeled, batch=(X, X)), TypeError),
    "labels with an axis": (lambda: step(labeled, batch=(X, np.zeros((8, 1), int))), ValueError),
    "a list in the batch": (
        lambda: step(lambda p, batch: loss_fn(p, batch[0] @ PARAMS["head"]["bias"]), batch=[[1.0]]),
        TypeError,
    ),
}


def labeled(params, batch):
    x, labels = batch
    return ts.losses.softmax_cross_entropy_with_integer_labels(apply(params, x), labels).mean()


def library(params, batch):
    return optax.losses.softmax_cross_entropy(apply(params, batch), jnp.ones(3))


@pytest.mark.parametrize("name", FAULTS)
def test_an_error_of_the_users_code_is_raised_as_it_is(name):
    call, kind = FAULTS[name]
    with pytest.raises(kind) as caught:
        call()
    error = caught.value
    assert type(error) is kind and error.__cause__ is None
    note = error.__notes__[0]
    assert re.match(r"raised by the loss function .+?; its batch: ", note), note
    assert ("print with jax.debug.print" in note) == (name == "if on an array")
    assert lint(f"x at y: got 1, expected 2. {note}.") == []
    own = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if "/tsunax/" in frame.f_code.co_filename]
    assert len(own) <= 1  # the entry that the user called


# Calls as other libraries write them, and what is said of them.
BATCHES = [np.ones((4, 2), np.float32)]
OTHER_WORDS = {
    "fit, validation data": (lambda s, st: ts.fit(s, st, BATCHES, validation_data=1), "argument at fit(): got 'validation_data'", "mean 'evaluate'?"),
    "fit, callback": (lambda s, st: ts.fit(s, st, BATCHES, callback=print), "'callback', expected one of step", "mean 'callbacks'?"),
    "fit, every": (lambda s, st: ts.fit(s, st, BATCHES, every=5), "'every'", "mean 'log_every'?"),
    "fit, by place": (lambda s, st: ts.fit(s, st, BATCHES, 10), "arguments at fit(): got fit() takes", "steps=1000"),
    "fit, without a state": (lambda s, st: ts.fit(s), "arguments at fit(): got", "'state'"),
    "setup, rng": (lambda s, st: ts.setup(ts.rules.sgd(0.1), {"w": X}, rng=0), "argument at setup(): got 'rng'", "mean 'key'?"),
    "precision": (lambda s, st: ts.setup(ts.rules.sgd(0.1), {"w": X}, precision="bf16-mixed"), "'bf16-mixed'", "mean 'bfloat16'?"),
    "precision, a number": (lambda s, st: ts.setup(ts.rules.sgd(0.1), {"w": X}, precision=16), "got '16'", "mean 'float16'?"),
    "adjust, eta": (lambda s, st: ts.adjust(st, eta=0.1), "'eta'", "mean 'learning_rate'?"),
    "adjust, beta": (lambda s, st: ts.adjust(ts.setup(ts.rules.adam(0.1), {"w": X}), beta=0.1), "'beta'", "mean 'b1'?"),
    "rule": (lambda s, st: ts.rules.adam(0.1, betas=(0.9, 0.99)), "'betas'", "mean 'b1'?"),
    "batches": (lambda s, st: ts.batches(X, batchsize=4), "argument at batches(): got 'batchsize'", "mean 'batch_size'?"),
    "prefetch": (lambda s, st: ts.prefetch(BATCHES, buffer_size=4), "'buffer_size'", "mean 'size'?"),
    "train_step": (lambda s, st: ts.train_step(len, accumulate_grad_batches=2), "at train_step()", "mean 'accumulate'?"),
    "checkpoints": (lambda s, st: ts.Checkpoints("x", save_top_k=3), "argument at Checkpoints(): got 'save_top_k', expected one of path", "mean 'keep_best'?"),
    "checkpoints, by place": (lambda s, st: ts.Checkpoints("x", 3), "arguments at Checkpoints(): got", "expected path"),
    "tune": (lambda s, st: ts.tune(len, {}, n_trials=3), "at tune()", "mean 'trials'?"),
    "mesh": (lambda s, st: ts.mesh(dp=2), "at mesh()", "mean 'data'?"),
    "schedule": (lambda s, st: ts.schedules.cosine_decay_schedule(lr=0.1), "argument at cosine_decay_schedule(): got 'lr'", "mean 'init_value'?"),
    "schedule, less": (lambda s, st: ts.schedules.cosine_decay_schedule(0.1), "at cosine_decay_schedule(): got missing", "'decay_steps'"),
    "name": (lambda s, st: ts.trainstep, "name at tsunax: got 'trainstep'", "mean 'train_step'?"),
    "loss": (lambda s, st: ts.Loss.mean(X, weights=X), "argument at Loss.mean(): got 'weights', expected one of values", "mean 'where'?"),
    "linen": (lambda s, st: ts.models.linen(None, jax.random.key(0), X), "arguments at linen(): got linen() takes", "First variables = module.init(key, x)."),
}  # fmt: skip


def loss_of_w(params, x):
    return jnp.mean((x @ params["w"]) ** 2)


@pytest.mark.parametrize("name", OTHER_WORDS)
def test_words_of_other_libraries(name):
    call, *parts = OTHER_WORDS[name]
    step, state = ts.train_step(loss_of_w), ts.setup(ts.rules.sgd(0.1), {"w": np.ones(2, np.float32)})
    with count_compiles() as count, pytest.raises((TypeError, ValueError, AttributeError)) as caught:
        call(step, state)
    text = str(caught.value)
    assert all(part in text for part in parts), text
    assert caught.value.__cause__ is None and lint(text) == []
    assert not [name for name in count.compiled if "step" in name]


def test_errors_within_a_call_are_not_of_its_arguments():
    def loss_fn(params, x):
        return loss_of_w(params, x, 3)

    with pytest.raises(TypeError, match=r"^loss_of_w\(\) takes 2 positional arguments but 3 were given"):
        ts.fit(ts.train_step(loss_fn), ts.setup(ts.rules.sgd(0.1), {"w": np.ones(2, np.float32)}), BATCHES, steps=1)


def test_an_error_of_a_model_is_as_short_as_in_plain_jax():
    def lines(call):
        with pytest.raises(TypeError) as caught:
            call()
        return len("".join(traceback.format_exception(caught.value)).splitlines())

    plain = lines(lambda: jax.jit(jax.grad(wrong_shapes))(PARAMS, X))
    fit = lambda: ts.fit(ts.train_step(wrong_shapes), setup(), [X], steps=1, progress=False)
    evaluate = lambda: ts.evaluate(ts.eval_step(wrong_shapes), good(), [X])
    assert max(map(lines, (lambda: step(wrong_shapes), fit, evaluate))) <= plain + 8


def test_is_a_state_usable_after_its_step_was_refused():
    state = setup()
    for bad in ("x", {"x": X, "t": ["a"]}, X[:, :3], X[:0]):
        with pytest.raises((TsunaxError, TypeError)):  # a shape that does not fit is an error of JAX
            step(loss_fn, state, batch=bad)
    new, info = step(loss_fn, state)
    assert int(new.step) == 1 and bool(info.applied)


def test_is_an_interrupt_of_loss_fn_left_alone():
    def loss(params, batch):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        step(loss)


# ------------------------------------------------------------------------------------- what only looks like a mistake


def decayed(mask):
    """The weight decay that each leaf gets."""
    state = setup(rule=rules.adamw(1.0, weight_decay=0.5, mask=mask))
    new, _ = ts.update(state, jax.tree.map(jnp.zeros_like, PARAMS))
    return new.params


def with_x64(f):
    # jax.experimental.enable_x64 is gone from new releases, jax.enable_x64 not yet in 0.7.2
    with (jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64)(True):
        return f()


ACCEPTED = {
    "tied arrays, copied": lambda: ts.setup(adam, {"embed": X, "out": X}),
    "tied arrays of different trees": lambda: setup(model_state=PARAMS, copy=True),
    "None is no leaf": lambda: with_leaf(None),
    "an int that is not selected": lambda: with_leaf(3, trainable="w"),
    "NaN that is not selected": lambda: with_leaf(jnp.full(2, NAN), trainable="w"),
    "names that collide, not selected": lambda: setup({"a/b": 1.0, "a": {"b": 1.0}, "c": 1.0}, trainable="c"),
    "int keys": lambda: with_leaf({1: 1.0, 2: 1.0}),
    "a model of NNX": lambda: setup(nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.Param)),
    "complex leaves": lambda: [
        ts.setup(rule, {"c": jnp.ones(2, jnp.complex64)}) for rule in (adam, sgd, rules.lbfgs())
    ],
    "shapes under eval_shape": lambda: jax.eval_shape(setup, jax.eval_shape(make_params)),
    "a repr of shapes": lambda: repr(jax.eval_shape(setup)),
    "a repr of a donated state": lambda: repr(donated()),
    "float64 under x64": lambda: with_x64(lambda: with_leaf(np.ones(2))),
    "seeds and keys": lambda: [
        setup(key=key) for key in (None, 0, -1, np.int64(3), jax.random.key(0), jax.random.PRNGKey(0))
    ],
    "a rate of 0": lambda: rules.adam(0),
    "a rate as an int, a NumPy and a jax scalar": lambda: [rules.sgd(x) for x in (1, np.float32(1), jnp.float32(1))],
    "no momentum": lambda: rules.sgd(0.1, momentum=None),
    "lbfgs without a rate": lambda: [rules.lbfgs(), rules.lbfgs(None)],
    "a decay above 1": lambda: rules.adamw(1e-3, weight_decay=2.0),
    "a schedule that is a class of its own": lambda: setup(rule=rules.adam(optax.linear_schedule(0.1, 0.0, 9))),
    "a factory with keywords bound": lambda: setup(rule=live(functools.partial(optax.adam, b1=0.5))(0.1)),
    "p of 0, -inf, 1.5": lambda: [rules.clip_by_norm(1.0, p) for p in (0, -INF, 1.5, np.float32(2))],
    "a chain of none": lambda: setup(rule=rules.chain()),
    "everything frozen": lambda: ts.freeze(setup(), "**"),
    "thaw of what was never frozen": lambda: ts.thaw(good()),
    "adjust of nothing": lambda: ts.adjust(good()),
    "grads in bfloat16": lambda: ts.update(setup(), cast(jnp.bfloat16)),
    "grads of the full tree": lambda: ts.update(setup(trainable="head/**"), GRADS),
    "a loss with raw metrics": lambda: ts.update(setup(), GRADS, loss=ts.Loss(3.0, 2, {"acc": 0.5})),
    "a loss that is a float": lambda: ts.update(setup(), GRADS, loss=1.0),
    "no batch": lambda: ts.value_and_grad(lambda p, b: jnp.sum(p["head"]["bias"]))(good(), None),
    "a default for a name that nobody gives": lambda: ts.value_and_grad(lambda p, b, scale=2.0: loss_fn(p, b))(good(), X),
    "a batch with an empty part": lambda: ts.value_and_grad(lambda p, b: loss_fn(p, b["x"]))(
        good(), {"x": X, "z": X[:0]}
    ),
    "a state on the host": lambda: step(loss_fn, jax.device_get(setup())),
    "a new model_state": lambda: setup(model_state={"m": X}).replace(model_state={"n": X}),
}  # fmt: skip


MEDIUM = ("a default for a name that nobody gives", "a loss with raw metrics", "a model of NNX", "a state on the host")
MEDIUM += (
    "a batch with an empty part",
    "a loss that is a float",
    "complex leaves",
    "grads in bfloat16",
    "grads of the full tree",
)


@pytest.mark.parametrize("name", medium_if(lambda name: name in MEDIUM, ACCEPTED))
def test_is_what_only_looks_wrong_accepted(name):
    ACCEPTED[name]()


def test_do_tied_arrays_that_were_copied_train():
    w = jnp.ones((4, 3))
    state = ts.setup(sgd, {"embed": w, "out": w})
    state, info = step(lambda p, b: jnp.mean(b @ p["embed"]) + jnp.sum(p["out"]), state)
    assert bool(info.applied) and not w.is_deleted()


@pytest.mark.medium
def test_is_a_pattern_a_mask_of_optax():
    mask = {"encoder": {"kernel": True, "bias": False}, "head": {"kernel": True, "bias": False}}
    assert_trees_equal(decayed("**/kernel"), decayed(mask))
    assert_trees_equal(decayed(["**", "!**/bias"]), decayed(mask))
    assert float(decayed(mask)["head"]["kernel"][0, 0]) == 0.5 == float(decayed(None)["head"]["kernel"][0, 0])


def test_a_long_cause_keeps_both_ends():
    """orbax and TensorStore say what happened in their last words."""
    error = OSError(f"RESOURCE_EXHAUSTED: failed to write {'/a/long/path ' * 30} : No space left on device")
    found = told(error)
    assert found.startswith("OSError RESOURCE_EXHAUSTED: failed") and found.endswith("No space left on device")
    assert len(found) < 175 and len(told(OSError("x" * 1000))) < 175
