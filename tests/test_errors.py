"""The battery of bad inputs: each is refused before its step is compiled, in one line with what, where and a way out.

A row is an input: its number in the list of bad inputs that this package was designed against (0: found later), what it
is, how to make it, what is raised, and what the message must say. `python tests/test_errors.py` prints all messages.
"""

import functools
import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tsunax as ts
from flax import linen, nnx
from flax.training import train_state as flax_train_state
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
    says: tuple[str, ...]
    cause: type[Exception] | None = None  # what the error comes from, where that is somebody else's exception
    compiles: bool = False  # only running the program shows it

    def __str__(self):
        return f"{self.number}-{self.title}".replace(" ", "-")


def row(number, title, call, error, *says, **more):
    return Row(number, title, call, error, says, **more)


LOSS = [
    row(2, "loss per row", lambda: returns(lambda v: v), LossError, "result at loss_fn", "float32[8,2]", "values.mean()"),
    row(2, "loss per row, eval", lambda: returns(lambda v: v, ts.eval_step), LossError, "float32[8,2]", "values.mean()"),
    row(2, "loss per row, value_and_grad", lambda: returns(lambda v: v, ts.value_and_grad), LossError, "float32[8,2]"),
    row(2, "loss of shape (1,)", lambda: returns(lambda v: v.mean().reshape(1)), LossError, "float32[1]", "a real float"),
    row(2, "total per row", lambda: returns(lambda v: ts.Loss(v, 3)), LossError, "total at loss_fn", "float32[8,2]"),
    row(3, "loss is int32", lambda: returns(lambda v: (v > 0).sum()), LossError, "got int32[]", "a real float"),
    row(3, "loss is an int", lambda: returns(lambda v: 3), LossError, "got 3 (int)", "a real float"),
    row(3, "loss is a bool", lambda: returns(lambda v: True), LossError, "got True (bool)"),
    row(3, "loss is complex", lambda: returns(lambda v: v.mean() * 1j), LossError, "got complex64[]", "a real float"),
    row(4, "loss is None", lambda: returns(lambda v: None), LossError, "got None", "Return values.mean()"),
    row(4, "loss is a str", lambda: returns(lambda v: "low"), LossError, "got 'low' (str)", "a real float, or a ts.Loss"),
    row(4, "loss is a dict", lambda: returns(lambda v: {"loss": v.mean()}), LossError, "got dict with loss"),
    row(4, "loss is a list", lambda: returns(lambda v: [v.mean()]), LossError, "got list of 1"),
    row(4, "loss is a class", lambda: returns(lambda v: ts.Loss), LossError, "got the class Loss"),
    row(5, "aux", lambda: returns(lambda v: (v.mean(), {"acc": 1.0})), LossError, "got tuple of 2", "no has_aux", "metrics={...}"),
    row(5, "aux, eval", lambda: returns(lambda v: (v.mean(), {}), ts.eval_step), LossError, "got tuple of 2", "no has_aux"),
    row(5, "value_and_grad as loss", lambda: step(jax.value_and_grad(loss_fn)), LossError, "got tuple of 2"),
    row(5, "grad as loss", lambda: step(jax.grad(loss_fn)), LossError, "dict with encoder, head"),
    row(6, "x and y", lambda: step(lambda params, x, y: 0.0), LossError, "got 'y'", "step(state, batch, y=...)"),
    row(6, "rng", lambda: step(lambda params, batch, rng: 0.0), LossError, "got 'rng'", "Give a seed to ts.setup(..., key=0)"),
    row(0, "key without one", lambda: step(lambda p, b, key: 0.0), LossError, "'key'", "setup(..., key=...)"),
    row(0, "key, eval", lambda: ts.eval_step(lambda p, b, key: 0.0)(setup(key=0), X), LossError, "'key'", "key=None"),
    row(0, "model_state without one", lambda: step(lambda p, b, model_state: 0.0), LossError, "setup(..., model_state=...)"),
    row(0, "keyword misspelled", lambda: step(lambda p, b, trian: 0.0), LossError, "'trian'", "Did you mean 'train'?"),
    row(0, "extra unread", lambda: step(teacher=3.0), KeywordError, "'teacher'", "expected none", "does not name it"),
    row(0, "extra misspelled", lambda: step(lambda p, b, teacher=None: 0.0, techer=1.0), KeywordError, "'techer'", "mean 'teacher'?"),
    *(
        row(0, f"extra {name}", lambda name=name: step(lambda p, b, **any: 0.0, **{name: 1.0}), LossError, repr(name), "itself")
        for name in "step train model_state value grad loss at norms on_nonfinite outside updates params flush".split()
    ),
    row(0, "extra step, eval", lambda: ts.eval_step(lambda p, b, step: 0.0)(good(), X, step=1), LossError, "'step'", "itself"),
    row(0, "extra step, value_and_grad", lambda: ts.value_and_grad(lambda p, b, **any: 0.0)(good(), X, step=1), LossError, "'step'"),
    row(0, "extra key", lambda: step(lambda p, b, key: 0.0, setup(key=0), key=1), LossError, "'key'", "itself"),
    row(0, "mean of ints", lambda: ts.Loss.mean(jnp.arange(3)), LossError, "values at Loss.mean()", "int32", "real floats"),
    row(0, "mean of nothing", lambda: ts.Loss.mean(jnp.ones((0, 2))), LossError, "shape (0, 2)", "an element at least"),
    row(0, "mask of other shape", lambda: ts.Loss.mean(X, np.ones(3)), LossError, "where: got float32[3]", "(8, 4)"),
    row(0, "a total alone", lambda: returns(lambda v: ts.Loss(v.mean())), LossError, "weight at loss_fn: got a total alone", "Loss.mean"),
    row(0, "weight per row", lambda: returns(lambda v: ts.Loss(v.sum(), v)), LossError, "weight", "float32[8,2]", "one finite number"),
    row(0, "weight is text", lambda: returns(lambda v: ts.Loss(v.sum(), "8")), LossError, "weight", "'8' (str)"),
    row(0, "weight 0", lambda: returns(lambda v: ts.Loss(v.sum(), 0)), LossError, "weight", "got 0", "> 0"),
    row(0, "weight -1", lambda: returns(lambda v: ts.Loss(v.sum(), -1.0)), LossError, "weight", "got -1.0"),
    row(0, "metric per class", lambda: returns(lambda v: ts.Loss.mean(v, metrics={"f1": v[0]})), LossError, "'f1'", "float32[2]"),
    row(0, "metric is text", lambda: returns(lambda v: ts.Loss.mean(v, metrics={"f1": "x"})), LossError, "'f1'", "'x' (str)"),
    row(0, "metric is None", lambda: returns(lambda v: ts.Loss.mean(v, metrics={"f1": None})), LossError, "'f1'", "got None"),
    row(0, "metrics by number", lambda: returns(lambda v: ts.Loss.mean(v, metrics={1: 1.0})), LossError, "dict with 1", "str names"),
    row(
        0, "merge of other metrics", lambda: ts.Loss.mean(X, metrics={"a": X}).merge(ts.Loss.mean(X)), LossError,
        "other at Loss.merge()", "metrics []", "metrics ['a']",
    ),
]  # fmt: skip

LEAVES = {"w": jnp.ones(2)}


def with_leaf(leaf, name="bad", **arguments):
    return ts.setup(adam, {**LEAVES, "deep": {name: leaf}}, **arguments)


PARAMETERS = [
    row(8, "no params", lambda: setup({}), ParamsError, "no parameters at params", "dict without leaves"),
    row(8, "params None", lambda: setup(None), ParamsError, "no parameters at params", "NoneType", "at least one array"),
    row(8, "params of None", lambda: setup({"a": None, "b": []}), ParamsError, "dict without leaves"),
    row(9, "int leaf", lambda: with_leaf(jnp.arange(3)), ParamsError, "params['deep']['bad']", "dtype int32", "'!deep/bad'"),
    row(9, "Python int", lambda: with_leaf(3), ParamsError, "params['deep']['bad']", "dtype int32", "model_state"),
    row(9, "int4", lambda: with_leaf(jnp.ones(2, jnp.int4)), ParamsError, "dtype int4"),
    row(9, "int leaf under jit", lambda: jax.jit(with_leaf)(jnp.arange(3)), ParamsError, "params['deep']['bad']", "dtype int32"),
    row(9, "raw key", lambda: with_leaf(jax.random.PRNGKey(0)), ParamsError, "params['deep']['bad']", "dtype uint32"),
    row(9, "typed key", lambda: with_leaf(jax.random.key(0)), ParamsError, "params['deep']['bad']", "dtype key<fry>"),
    row(10, "bool leaf", lambda: with_leaf(np.ones(3, bool)), ParamsError, "params['deep']['bad']", "dtype bool", "trainable="),
    row(11, "text", lambda: with_leaf("relu"), ParamsError, "params['deep']['bad']", "'relu' (str)", "Give the arrays alone"),
    row(11, "text that is not selected", lambda: with_leaf("relu", trainable="w"), ParamsError, "params['deep']['bad']", "'relu'"),
    row(11, "an odd name", lambda: with_leaf("relu", "it's\nodd"), ParamsError, "params['deep']", "odd"),
    row(11, "object", lambda: with_leaf(object()), ParamsError, "params['deep']['bad']", "got object"),
    row(11, "function", lambda: with_leaf(jnp.tanh), ParamsError, "params['deep']['bad']", "the function tanh"),
    row(11, "object array", lambda: with_leaf(np.array([None, 1])), ParamsError, "params['deep']['bad']", "dtype object"),
    row(11, "text array", lambda: with_leaf(np.array(["a"])), ParamsError, "params['deep']['bad']", "dtype <U1"),
    row(11, "dates", lambda: with_leaf(np.array(["2020-01-01"], "M8[D]")), ParamsError, "dtype datetime64[D]"),
    row(11, "the model itself", lambda: setup(linen.Dense(3)), ParamsError, "at params: got Dense", "ts.models.nnx(module) or linen"),
    row(11, "a function", lambda: setup(loss_fn), ParamsError, "at params: got the function loss_fn"),
    row(11, "shapes only", lambda: setup(jax.eval_shape(make_params)), ParamsError, "params['encoder']['bias']", "jax.eval_shape"),
    row(12, "zero size", lambda: with_leaf(jnp.ones((0, 3))), ParamsError, "params['deep']['bad']", "shape (0, 3)", "no 0"),
    row(13, "NaN and inf", lambda: with_leaf(jnp.array([1, NAN, INF])), ParamsError, "params['deep']['bad']", "2 of 3 not finite"),
    row(13, "NaN in NumPy", lambda: with_leaf(np.float32([NAN, 1])), ParamsError, "params['deep']['bad']", "1 of 2 not finite"),
    row(13, "Python inf", lambda: with_leaf(INF), ParamsError, "params['deep']['bad']", "1 of 1 not finite"),
    row(14, "float64", lambda: with_leaf(np.ones(2)), ParamsError, "params['deep']['bad']", "float64", "cut to float32", "x64"),
    row(14, "complex128", lambda: with_leaf(np.ones(2, complex)), ParamsError, "complex128", "cut to complex64"),
    row(14, "longdouble", lambda: with_leaf(np.ones(2, np.longdouble)), ParamsError, "cut to float32"),
    row(15, "a.b", lambda: setup({"a.b": 1.0, "a": {"b": 1.0}}), ParamsError, "params['a']['b'] and params['a.b']"),
    row(15, "a/b", lambda: setup({"a/b": 1.0, "a": {"b": 1.0}}), ParamsError, "params['a']['b'] and params['a/b']"),
    row(17, "tied", tied, ParamsError, "params['embed']['table'] and params['out']['table']", "one array", "copy=True"),
    row(17, "tied to model_state", lambda: tied("both"), ParamsError, "params['embed'] and model_state['ema']", "one array"),
    row(
        18, "complex", lambda: ts.setup(rules.rprop(0.1), {"a": 1.0, "c": jnp.ones(2, jnp.complex64)}), RuleError,
        "complex numbers in params['c']", "split_real_and_imaginary", cause=Exception,
    ),
    row(0, "model_state has code", lambda: setup(model_state={"f": jnp.tanh}), WrongTypeError, "model_state['f']", "function tanh"),
    row(0, "model_state has text", lambda: setup(model_state={"f": "x"}), WrongTypeError, "model_state['f']", "'x' (str)"),
    row(0, "model_state has shapes", lambda: setup(model_state=jax.eval_shape(make_params)), WrongTypeError, "ShapeDtypeStruct"),
    row(0, "key is text", lambda: setup(key="0"), WrongTypeError, "key at setup()", "'0' (str)", "jax.random.key(0)"),
    row(0, "key is a float", lambda: setup(key=0.5), WrongTypeError, "key at setup()", "0.5 (float)"),
    row(0, "key is a bool", lambda: setup(key=True), WrongTypeError, "key at setup()", "True (bool)"),
    row(0, "key is floats", lambda: setup(key=jnp.ones(2)), WrongTypeError, "key at setup()", "float32[2]"),
    row(0, "words that are no key", lambda: setup(key=jnp.zeros(3, jnp.uint32)), WrongTypeError, "uint32[3]", "an int seed or one key"),
    row(0, "three keys", lambda: setup(key=jax.random.split(jax.random.key(0), 3)), WrongTypeError, "[3]", "one key"),
    row(0, "seed of 70 bits", lambda: setup(key=2**70), StateError, "key at setup()", str(2**70), "64 bits"),
    row(0, "device by another name", lambda: setup(device="CPU"), DeviceError, "kind at setup('CPU')", "Did you mean 'cpu'"),
    row(0, "all devices", lambda: setup(device=jax.devices()), WrongTypeError, "list of 8", "a kind or a jax.Device"),
    row(0, "copy is text", lambda: setup(copy="no"), WrongTypeError, "copy at setup()", "'no' (str)", "True or False"),
    row(0, "freezable is text", lambda: setup(freezable="no"), WrongTypeError, "freezable at setup()", "True or False"),
]  # fmt: skip

RULE = [
    row(19, "None", lambda: ts.setup(None, PARAMS), WrongTypeError, "rule at setup()", "None", "optax.GradientTransformation"),
    row(19, "class", lambda: ts.setup(optax.GradientTransformation, PARAMS), WrongTypeError, "class GradientTransformation"),
    row(19, "name", lambda: ts.setup("adam", PARAMS), WrongTypeError, "'adam' (str)", "ts.rules.adam(1e-3)"),
    row(19, "number", lambda: ts.setup(1e-3, PARAMS), WrongTypeError, "0.001 (float)"),
    row(19, "not called", lambda: ts.setup(rules.adam, PARAMS), WrongTypeError, "function adam", "as ts.rules.adam(1e-3)"),
    row(19, "optax's, not called", lambda: ts.setup(optax.adam, PARAMS), WrongTypeError, "as ts.rules.adam(1e-3)"),
    row(19, "params first", lambda: ts.setup(PARAMS, adam), WrongTypeError, "dict with encoder, head"),
    row(19, "list", lambda: ts.setup([sgd, adam], PARAMS), WrongTypeError, "got list of 2"),
    row(19, "dict", lambda: ts.setup({"**": adam}, PARAMS), WrongTypeError, "got dict with **"),
    row(19, "bare halves", lambda: ts.setup((adam.init, adam.update), PARAMS), WrongTypeError, "tuple of 2"),
    row(19, "in a chain", lambda: rules.chain([sgd, adam]), WrongTypeError, "rule at chain()", "got list of 2"),
    row(19, "in a chain, not called", lambda: rules.chain(rules.clip, adam), WrongTypeError, "rule at chain()", "the function clip"),
    row(19, "in groups", lambda: rules.partition({"**": rules.sgd}), WrongTypeError, "partition({'**': ...})", "the function sgd"),
    row(19, "groups by number", lambda: rules.partition({1: adam}), WrongTypeError, "where at partition()", "1 (int)"),
    row(19, "live of *args", lambda: live(optax.chain), WrongTypeError, "chain(..., *args, ...)", "named parameters"),
    row(19, "static unknown", lambda: live(optax.adam, static=("esp",)), HyperparameterError, "'esp'", "Did you mean 'eps'?"),
    row(19, "static is a str", lambda: live(optax.adam, static="eps"), HyperparameterError, "static at live()"),
    *(
        made
        for rule, name in [(rules.adam, "adam"), (rules.sgd, "sgd")]
        for made in [
            row(20, f"{name} -1", lambda rule=rule: rule(-1), HyperparameterError, f"learning_rate at {name}()", "got -1,", "≥ 0"),
            row(21, f"{name} NaN", lambda rule=rule: rule(NAN), HyperparameterError, f"{name}()", "got nan", "a finite float32"),
            row(21, f"{name} inf", lambda rule=rule: rule(np.inf), HyperparameterError, f"{name}()", "got inf", "a finite float32"),
            row(21, f"{name} NaN in jax", lambda rule=rule: rule(jnp.float32(NAN)), HyperparameterError, "got nan"),
            row(22, f"{name} str", lambda rule=rule: rule("1e-3"), WrongTypeError, f"learning_rate at {name}()", "'1e-3' (str)"),
            row(22, f"{name} None", lambda rule=rule: rule(None), WrongTypeError, "got None", "a number or a schedule"),
            row(22, f"{name} bool", lambda rule=rule: rule(True), WrongTypeError, "got True (bool)"),
            row(22, f"{name} dict", lambda rule=rule: rule({"lr": 1}), WrongTypeError, "got dict with lr"),
            row(22, f"{name} list", lambda rule=rule: rule([1e-3]), WrongTypeError, "got list of 1"),
            row(22, f"{name} tuple", lambda rule=rule: rule((1e-3, 1e-4)), WrongTypeError, "got tuple of 2"),
            row(22, f"{name} complex", lambda rule=rule: rule(1j), WrongTypeError, "got 1j (complex)"),
            row(22, f"{name} array", lambda rule=rule: rule(jnp.ones(2)), WrongTypeError, "float32[2]", "a number"),
            row(22, f"{name} text array", lambda rule=rule: rule(np.array("x")), WrongTypeError, "got <U1[]"),
            row(22, f"{name} missing", lambda rule=rule: rule(), WrongTypeError, f"arguments at {name}()", "'learning_rate'"),
            row(22, f"{name} twice", lambda rule=rule: rule(1.0, learning_rate=1.0), WrongTypeError, "multiple values"),
            row(22, f"{name} too many", lambda rule=rule: rule(*range(1, 30)), WrongTypeError, f"arguments at {name}()", "too many"),
            row(22, f"{name} misspelled", lambda rule=rule: rule(learnin_rate=1), WrongTypeError, "mean 'learning_rate'?"),
            row(22, f"{name} lr", lambda rule=rule: rule(lr=1), WrongTypeError, "'lr'", "Did you mean 'learning_rate'?"),
        ]
    ),
    row(21, "too big for float32", lambda: rules.adam(1e39), HyperparameterError, "got 1e+39", "a finite float32"),
    row(22, "adafactor str", lambda: rules.adafactor("1e-3"), WrongTypeError, "learning_rate at adafactor()", "'1e-3' (str)"),
    row(22, "lbfgs str", lambda: rules.lbfgs("1e-3"), WrongTypeError, "learning_rate at lbfgs()", "'1e-3' (str)"),
    row(22, "polyak_sgd str", lambda: rules.polyak_sgd("1"), WrongTypeError, "max_learning_rate at polyak_sgd()", "'1' (str)"),
    row(22, "momentum str", lambda: rules.sgd(0.1, momentum="0.9"), WrongTypeError, "momentum at sgd()", "'0.9' (str)"),
    row(22, "momentum bool", lambda: rules.sgd(0.1, momentum=True), WrongTypeError, "momentum at sgd()", "True (bool)"),
    row(22, "b1 None", lambda: rules.adam(1e-3, b1=None), WrongTypeError, "b1 at adam()", "got None"),
    row(0, "momentum 1.5", lambda: rules.sgd(0.1, momentum=1.5), HyperparameterError, "momentum at sgd()", "1.5", "< 1"),
    row(0, "b1 = 1", lambda: rules.adam(1e-3, b1=1.0), HyperparameterError, "b1 at adam()", "got 1.0", "≥ 0 and < 1"),
    row(0, "b2 = 1.1", lambda: rules.adam(1e-3, b2=1.1), HyperparameterError, "b2 at adam()", "got 1.1"),
    row(0, "b1 = -0.1", lambda: rules.lion(1e-3, b1=-0.1), HyperparameterError, "b1 at lion()", "got -0.1"),
    row(0, "eps = -1", lambda: rules.adam(1e-3, eps=-1.0), HyperparameterError, "eps at adam()", "got -1.0"),
    row(0, "decay = 1", lambda: rules.rmsprop(1e-3, decay=1.0), HyperparameterError, "decay at rmsprop()", "< 1"),
    row(0, "negative weight decay", lambda: rules.adamw(1e-3, weight_decay=-1), HyperparameterError, "weight_decay at adamw()", "-1"),
    row(0, "weight_decay -1", lambda: rules.add_decayed_weights(-1.0), HyperparameterError, "add_decayed_weights()", "got -1.0", "≥ 0"),
    row(0, "weight_decay str", lambda: rules.add_decayed_weights("0.1"), WrongTypeError, "add_decayed_weights()", "'0.1' (str)"),
    row(0, "sign_decay -1", lambda: rules.sign_decay(-1.0), HyperparameterError, "sign_decay()", "got -1.0", "≥ 0"),
    row(0, "betas of torch", lambda: rules.adam(1e-3, betas=(0.9, 0.99)), WrongTypeError, "'betas'", "b1, b2"),
    row(0, "nesterov is text", lambda: rules.sgd(0.1, nesterov="no"), WrongTypeError, "nesterov at sgd()", "True or False"),
    row(0, "mask matches nothing", lambda: setup(rule=rules.adamw(1e-3, mask="**/kernal")), PatternError, "'**/kernal' at adamw(mask=)", "Nearest"),
    row(0, "mask malformed", lambda: rules.adamw(1e-3, mask="a//b"), PatternError, "'a//b'", "the component ''"),
    row(23, "array", lambda: rules.adam(lambda s: jnp.ones(2) * s), WrongTypeError, "step 0 of its schedule", "float32[2]"),
    row(23, "NaN", lambda: rules.adam(lambda s: NAN), HyperparameterError, "learning_rate at adam()", "step 0", "got nan"),
    row(23, "negative", lambda: rules.adam(optax.cosine_decay_schedule(-1.0, 10)), HyperparameterError, "step 0", "got -1.0", "≥ 0"),
    row(23, "ends in NaN", lambda: rules.adam(optax.linear_schedule(1.0, NAN, 10)), HyperparameterError, "got nan"),
    row(23, "None", lambda: rules.adam(lambda s: None), WrongTypeError, "step 0", "got None", "expected a number."),
    row(23, "text", lambda: rules.adam(lambda s: "1"), WrongTypeError, "step 0", "got '1' (str)"),
    row(23, "b1 of 1", lambda: rules.adam(1e-3, b1=lambda s: 1.0), HyperparameterError, "b1 at adam()", "step 0", "< 1"),
    *(
        row(30, f"{name} {bad}", lambda name=name, bad=bad: getattr(rules, name)(bad), HyperparameterError, f"max_{'delta' if name == 'clip' else 'norm'} at {name}()", says)
        for name in ("clip_by_global_norm", "clip_by_norm", "clip")
        for bad, says in [(0, "got 0, expected a finite float32 > 0"), (-1.0, "got -1.0"), (NAN, "got nan")]
    ),
    row(30, "inf", lambda: rules.clip(INF), HyperparameterError, "max_delta at clip()", "inf"),
    row(30, "None", lambda: rules.clip_by_global_norm(None), WrongTypeError, "max_norm at clip_by_global_norm()", "got None"),
    row(30, "p is text", lambda: rules.clip_by_norm(1.0, p="2"), WrongTypeError, "p at clip_by_norm()", "'2' (str)"),
    row(30, "p is NaN", lambda: rules.clip_by_norm(1.0, p=NAN), WrongTypeError, "p at clip_by_norm()", "nan (float)"),
    row(30, "p is complex", lambda: rules.clip_by_norm(1.0, p=1j), WrongTypeError, "p at clip_by_norm()", "1j (complex)"),
    row(30, "throw is text", lambda: rules.clip_by_norm(1.0, throw="no"), WrongTypeError, "throw", "True or False"),
    row(
        31, "norm and value", lambda: rules.clip_by_global_norm(1.0, value=0.5), WrongTypeError,
        "'value'", "expected max_norm",
    ),
    row(
        31, "value and norm", lambda: rules.clip(5.0, norm=1.0), WrongTypeError,
        "'norm'", "expected max_delta",
    ),
    row(31, "another name", lambda: rules.clip_by_global_norm(max=1.0), WrongTypeError, "'max'", "expected max_norm"),
    row(31, "two numbers", lambda: rules.clip_by_global_norm(1.0, 2.0), WrongTypeError, "too many", "max_norm"),
]  # fmt: skip

NEAREST = "Nearest: 'encoder/bias', 'encoder/kernel', 'head/bias'."
SELECTION = [
    row(33, "freeze", lambda: ts.freeze(good(), "encodr/**"), PatternError, "'encodr/**' at freeze()", "no match among 4 leaves", NEAREST),
    row(33, "thaw", lambda: ts.thaw(good(), "encodr/**"), PatternError, "'encodr/**'", NEAREST),
    row(33, "adjust", lambda: ts.adjust(good(), "encodr/**", b1=0.5), PatternError, "'encodr/**' at adjust()", NEAREST),
    row(33, "trainable", lambda: setup(trainable="encodr/**"), PatternError, "'encodr/**' at setup(trainable=)", NEAREST),
    row(33, "groups", lambda: setup(rule=rules.partition({"encodr/**": sgd, "**": adam})), PatternError, "'encodr/**' at partition()", NEAREST),
    row(33, "weight_decay", lambda: setup(rule=rules.add_decayed_weights(0.1, "encodr/**")), PatternError, "'encodr/**' at add_decayed_weights()", NEAREST),
    row(33, "in a list", lambda: ts.freeze(good(), ["encoder/**", "!haed/**"]), PatternError, "'!haed/**'", "'head/bias'"),
    row(33, "dots", lambda: ts.freeze(good(), "encoder.kernel"), PatternError, "Nearest: 'encoder/kernel'"),
    row(33, "case", lambda: ts.freeze(good(), "Encoder/**"), PatternError, "Nearest: 'encoder/bias'"),
    row(33, "a regex", lambda: ts.freeze(good(), "encoder/(kernel|bias)"), PatternError, "Nearest: 'encoder/kernel'"),
    row(33, "a subtree", lambda: ts.freeze(good(), "encoder"), PatternError, "'encoder'", "Nearest: 'encoder/"),
    row(33, "under jit", lambda: jax.jit(lambda s: ts.freeze(s, "encodr"))(good()), PatternError, "'encodr'", "Nearest"),
    row(33, "predicate", lambda: ts.freeze(good(), lambda path, leaf: False), PatternError, "the function <lambda>, which selects nothing"),
    row(33, "empty list", lambda: ts.freeze(good(), []), PatternError, "[], which selects nothing"),
    row(33, "unselected", lambda: ts.freeze(setup(trainable="head/**"), "encoder/**"), PatternError, "params['encoder']['bias']"),
    row(
        33, "thaw unselected", lambda: ts.thaw(setup(trainable="head/**"), "encoder/**"), PatternError,
        "params['encoder']['bias']", "setup(trainable=...) left out", "ts.migrate",
    ),
    row(
        33, "adjust unselected", lambda: ts.adjust(setup(trainable="head/**"), "encoder/**", b1=0.5), PatternError,
        "params['encoder']['bias']", "setup(trainable=...) left out", "ts.migrate",
    ),
    row(34, "open bracket", lambda: setup(trainable="enc[/kernel"), PatternError, "'enc[/kernel'", "the component 'enc['"),
    row(34, "empty component", lambda: ts.freeze(good(), "encoder//kernel"), PatternError, "the component ''"),
    row(34, "slash at the end", lambda: ts.freeze(good(), "encoder/"), PatternError, "the component ''"),
    row(34, "slash in front", lambda: ts.freeze(good(), "/encoder"), PatternError, "the component ''"),
    row(34, "empty", lambda: ts.freeze(good(), ""), PatternError, "pattern '': got the component"),
    row(34, "** inside", lambda: ts.adjust(good(), "enc**/kernel", b1=0.5), PatternError, "the component 'enc**'"),
    row(34, "only exclusions", lambda: setup(trainable=["!**/bias"]), PatternError, "only exclusions ['!**/bias']", "'**'"),
    row(34, "groups", lambda: rules.partition({"a//b": adam, "**": sgd}), PatternError, "'a//b'"),
    row(34, "weight_decay", lambda: rules.add_decayed_weights(0.1, where="a//b"), PatternError, "'a//b'"),
    row(34, "None", lambda: ts.freeze(good(), None), WrongTypeError, "None", "a pattern ('encoder/**')", "a bool tree"),
    row(34, "a number", lambda: setup(trainable=3), WrongTypeError, "3 (int)", "a pattern ('encoder/**')"),
    row(34, "a compiled regex", lambda: setup(trainable=re.compile("x")), WrongTypeError, "re.compile('x') (Pattern)"),
    row(34, "mixed list", lambda: setup(trainable=["**", 3]), WrongTypeError, "['**', 3] (list)"),
    row(35, "all taken away", lambda: setup(trainable=["**", "!**"]), PatternError, "['**', '!**']", "at least one leaf"),
    row(35, "predicate", lambda: setup(trainable=lambda path, leaf: False), PatternError, "<lambda>, which selects nothing"),
    row(35, "bool tree", lambda: setup(trainable=tree(False, False)), PatternError, "which selects nothing"),
    row(35, "empty list", lambda: setup(trainable=[]), PatternError, "[], which selects nothing"),
    row(36, "one missing", lambda: setup(trainable=other_model()), PatternError, "params['encoder']['bias']", "got nothing"),
    row(36, "one too many", lambda: setup(trainable=tree(True) | {"x": True}), PatternError, "params['x']", "expected nothing"),
    row(36, "a prefix", lambda: ts.freeze(good(), {"encoder": True, "head": True}), PatternError, "params['encoder']: got True (bool)"),
    row(36, "a bool", lambda: setup(trainable=True), PatternError, "bool tree at params: got True (bool)", "jax.tree.map"),
    row(36, "weight_decay", lambda: setup(rule=rules.add_decayed_weights(0.1, {"encoder": True})), PatternError, "params['encoder']"),
    row(37, "int", lambda: setup(trainable=tree(1)), PatternError, "params['encoder']['bias']", "1 (int)", "True or False"),
    row(37, "text", lambda: ts.freeze(good(), tree("yes")), PatternError, "params['encoder']['bias']", "'yes' (str)"),
    row(37, "None", lambda: setup(trainable=tree(None)), PatternError, "params['encoder']['bias']", "got None"),
    row(37, "array", lambda: setup(trainable=tree(jnp.ones(3, bool))), PatternError, "params['encoder']['bias']", "bool[3]"),
    row(37, "predicate", lambda: setup(trainable=lambda path, leaf: path), PatternError, "'encoder/bias' (str)", "True or False"),
    row(0, "leaf without group", lambda: setup(rule=rules.partition({"encoder/**": adam})), PatternError, "params['head']['bias']", "'**'"),
    row(0, "group in the shade", lambda: setup(rule=rules.partition({"**": adam, "head/**": sgd})), PatternError, "'head/**'", "an earlier pattern"),
]  # fmt: skip

STATE = [
    row(89, "step", lambda: step(loss_fn, donated()), StateError, "state at step()", "was donated", "what that step returned", "donate=False"),
    *(
        row(89, name, lambda use=use: use(donated()), StateError, f"state at {name}", "was donated", "donate=False")
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
    row(89, "params of it", lambda: setup(donated().params), ParamsError, "params['encoder']['bias']", "a deleted array"),
    row(89, "model state of it", lambda: setup(model_state=donated().params), StateError, "model_state['encoder']['bias']", "deleted"),
    row(89, "sibling", lambda: step(loss_fn, sibling()), StateError, "state at step()", "was donated", "donate=False"),
    row(90, "other grads", lambda: ts.update(good(), other_model()), StateError, "grads['encoder']['bias']", "nothing", "float32[3]"),
    row(90, "more grads", lambda: ts.update(setup(other_model()), GRADS), StateError, "grads['encoder']['bias']", "expected nothing"),
    row(90, "grads under jit", lambda: jax.jit(ts.update)(good(), other_model()), StateError, "grads['encoder']['bias']", "trainable"),
    row(90, "grads of other shape", lambda: ts.update(good(), wider()), StateError, "grads['head']['kernel']", "float32[3,5]", "expected float32[3,2]"),
    row(90, "grads None", lambda: ts.update(good(), None), StateError, "gradient at grads", "None", "dict with encoder, head"),
    row(90, "grads and loss", lambda: ts.update(good(), (ts.Loss(1.0, 1.0), GRADS)), StateError, "tuple of 2"),
    row(90, "grads int", lambda: ts.update(good(), cast(int)), StateError, "grads['encoder']['bias']", "int32[3]", "float32[3]"),
    row(90, "grads bool", lambda: ts.update(good(), cast(bool)), StateError, "grads['encoder']['bias']", "bool[3]", "float32[3]"),
    row(90, "grads complex", lambda: ts.update(good(), cast(jnp.complex64)), StateError, "grads['encoder']['bias']", "complex64"),
    row(90, "grads big-endian", lambda: ts.update(good(), tree(np.ones(3, ">f4"), 1.0)), StateError, "grads['encoder']['bias']", ">f4[3]"),
    row(90, "grads longdouble", lambda: ts.update(good(), tree(np.ones(3, np.longdouble), 1.0)), StateError, "grads['encoder']['bias']"),
    row(90, "grads text", lambda: ts.update(good(), tree("x", 1.0)), StateError, "grads['encoder']['bias']", "'x' (str)"),
    row(90, "at of other model", lambda: ts.value_and_grad(loss_fn)(good(), X, at=other_model()), StateError, "['encoder']['bias']"),
    row(90, "at of other shape", lambda: ts.value_and_grad(loss_fn)(good(), X, at=wider()), StateError, "float32[3,5]", "trainable"),
    row(90, "params of other model", lambda: good().replace(params=other_model()), StateError, "params['encoder']['bias']", "nothing"),
    row(90, "params of other shape", lambda: good().replace(params=wider()), StateError, "params['head']['kernel']", "float32[3,5]"),
    row(90, "params of other dtype", lambda: good().replace(params=cast(jnp.bfloat16)), StateError, "bfloat16[3]", "float32[3]"),
    row(90, "opt_state of other rule", lambda: good().replace(opt_state=setup(rule=sgd).opt_state), StateError, "opt_state", "mu, nu"),
    row(90, "opt_state of other model", lambda: good().replace(opt_state=setup(other_model()).opt_state), StateError, "['bias']"),
    row(90, "numbers of other rule", lambda: good().replace(numbers=setup(rule=sgd).numbers), StateError, "numbers"),
    row(90, "numbers None", lambda: good().replace(numbers=None), StateError, "numbers", "got None"),
    row(90, "frozen True", lambda: good().replace(frozen=True), StateError, "frozen", "True (bool)", "ts.freeze and ts.thaw"),
    row(90, "field unknown", lambda: good().replace(parms=PARAMS), StateError, "'parms'", "Did you mean 'params'?"),
    row(90, "step is text", lambda: good().replace(step="3"), StateError, "step at replace()", "'3' (str)", "an int in [0, 2147483647]"),
    row(90, "step beyond 32 bits", lambda: good().replace(step=2**40), StateError, "step at replace()", "1099511627776 (int)"),
    row(90, "rejected is a float", lambda: good().replace(rejected=2.5), StateError, "rejected at replace()", "2.5 (float)"),
    row(90, "rejected is a list", lambda: good().replace(rejected=[1, 2]), StateError, "rejected at replace()", "list of 2"),
    row(90, "in a row below 0", lambda: good().replace(rejected_in_a_row=-1), StateError, "rejected_in_a_row at replace()", "-1 (int)"),
    row(90, "step is a float", lambda: good().replace(step=3.5), StateError, "step at replace()", "3.5 (float)"),
    row(90, "step is negative", lambda: good().replace(calls=-3), StateError, "calls at replace()", "-3 (int)"),
    row(90, "key is text", lambda: good().replace(key="x"), WrongTypeError, "key at replace()", "'x' (str)"),
    row(90, "model_state unknown", lambda: ts.update(good(), GRADS, model_state={"m": X}), StateError, "model_state", "setup(..."),
    row(
        90, "model_state of loss", lambda: step(
            lambda p, b, model_state: ts.Loss.mean(apply(p, b), model_state={"n": jnp.ones(2)}), setup(model_state={"m": jnp.ones(2)})
        ), StateError, "model_state['m']", "got nothing", "float32[2]",
    ),
    row(
        90, "model_state of other dtype", lambda: step(
            lambda p, b, model_state: ts.Loss.mean(apply(p, b), model_state={"m": jnp.ones(2, jnp.bfloat16)}),
            setup(model_state={"m": jnp.ones(2)}),
        ), StateError, "model_state['m']", "bfloat16[2]", "float32[2]",
    ),
    row(0, "batch first", lambda: ts.train_step(lambda batch, params: 0.0), LossError, "signature", "loss_fn(params, batch"),
    row(0, "loss_scale True", lambda: setup(precision="float16", loss_scale=True), StateError, "loss_scale", "True"),
    row(0, "per_example None", lambda: ts.train_step(loss_fn, per_example=None), WrongTypeError, "per_example", "None"),
    row(0, "noise_scale 0.1", lambda: ts.train_step(loss_fn, accumulate=2, noise_scale=0.1), WrongTypeError, "noise_scale", "0.1"),
    row(0, "carry of text", lambda: ts.eval_step(loss_fn, carry="no"), WrongTypeError, "carry", "'no'"),
    row(0, "progress of text", lambda: ts.fit(ts.train_step(loss_fn), good(), [X], steps=1, progress="no"), WrongTypeError, "progress", "'no'"),
    row(0, "batch_size True", lambda: ts.batches(X, True), DataError, "batch_size", "True"),
    row(0, "column of text", lambda: ts.batches(np.array(["a", "b"]), 2), DataError, "arrays", "numbers"),
    row(0, "epoch below 0", lambda: ts.batches(X, 2).set_state({"epoch": -1, "position": 0}), DataError, "set_state()", "-1"),
    row(0, "complex targets", lambda: ts.losses.absolute_error(X, 1j * X), LossError, "complex numbers"),
    row(0, "metrics of two shapes", lambda: ts.metrics.Mean.of(jnp.ones(3)).merge(ts.metrics.Mean(jnp.ones(2), jnp.ones(2))), LossError, "other at Mean.merge()"),
    row(0, "no model state", lambda: ts.update_batch_stats(loss_fn)(good(), X), StateError, "model_state at loss_fn"),
    row(0, "loss per row to update", lambda: ts.update(good(), GRADS, loss=jnp.ones(3)), LossError, "loss at update()", "float32[3]"),
    row(0, "loss text to update", lambda: ts.update(good(), GRADS, loss="x"), LossError, "loss at update()", "'x' (str)"),
    row(0, "loss without weight", lambda: ts.update(good(), GRADS, loss=ts.Loss(1.0)), LossError, "got a total alone", "(total, weight)"),
    row(0, "rule on a TrainState", lambda: adam.update(GRADS, good().opt_state, PARAMS), RuleError, "adam()", "use ts.update"),
    row(91, "params to step", lambda: step(loss_fn, PARAMS), WrongTypeError, "dict with encoder, head", "a TrainState", "ts.setup("),
    row(91, "batch first", lambda: step(loss_fn, X, batch=good()), WrongTypeError, "float32[8,4]", "The state comes first."),
    row(91, "what step returned", lambda: step(loss_fn, (good(), None)), WrongTypeError, "tuple of 2", "a TrainState"),
    *(
        row(91, f"params to {name}", lambda use=use: use(PARAMS), WrongTypeError, f"state at {name}()", "dict with encoder, head")
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
    row(91, "pattern first", lambda: ts.freeze("head/**", good()), WrongTypeError, "'head/**' (str)", "The state comes first."),
    row(91, "grads first", lambda: ts.update(GRADS, good()), WrongTypeError, "state at update()", "The state comes first."),
    row(91, "a rule", lambda: ts.hyperparams(adam), WrongTypeError, "got GradientTransformationExtraArgs with init, update", "a TrainState"),
    row(91, "an abstract state", lambda: step(loss_fn, jax.eval_shape(setup)), WrongTypeError, "state.clock", "a ShapeDtypeStruct"),
    row(0, "policy unknown", lambda: ts.train_step(loss_fn, on_nonfinite="Skip"), HyperparameterError, "train_step()", "'Skip'", "'skip'"),
    row(0, "policy None", lambda: ts.update(good(), GRADS, on_nonfinite=None), HyperparameterError, "update()", "None", "'raise'"),
    row(0, "donate is text", lambda: ts.train_step(loss_fn, donate="no"), WrongTypeError, "donate", "'no' (str)", "True or False"),
    row(0, "norms is text", lambda: ts.train_step(loss_fn, norms="no"), WrongTypeError, "norms at train_step()", "'no' (str)"),
    row(0, "adjust misspelled", lambda: ts.adjust(good(), learning_rat=1.0), HyperparameterError, "mean 'learning_rate'?"),
    row(0, "adjust lr", lambda: ts.adjust(good(), lr=1.0), HyperparameterError, "'lr'", "Did you mean 'learning_rate'?"),
    row(0, "adjust lr under jit", lambda: jax.jit(lambda s: ts.adjust(s, lr=1.0))(good()), HyperparameterError, "'learning_rate'?"),
    row(0, "adjust dict", lambda: ts.adjust(good(), **{"learning_rat": 1.0}), HyperparameterError, "mean 'learning_rate'?"),
    row(0, "adjust -1", lambda: ts.adjust(good(), learning_rate=-1.0), HyperparameterError, "learning_rate at adam()", "-1.0", "≥ 0"),
    row(0, "adjust NaN", lambda: ts.adjust(good(), learning_rate=NAN), HyperparameterError, "got nan", "a finite float32"),
    row(0, "adjust b1 = 1", lambda: ts.adjust(good(), b1=1), HyperparameterError, "b1 at adam()", "got 1,", "< 1"),
    row(0, "adjust text", lambda: ts.adjust(good(), learning_rate="1"), WrongTypeError, "'1' (str)", "expected a number."),
    row(0, "adjust text in dict", lambda: ts.adjust(good(), **{"b1": "1"}), WrongTypeError, "b1 at adam()", "'1' (str)"),
    row(0, "adjust bool", lambda: ts.adjust(good(), learning_rate=True), WrongTypeError, "True (bool)"),
    row(0, "adjust array", lambda: ts.adjust(good(), learning_rate=X[0]), WrongTypeError, "float32[4]", "a number"),
    row(0, "adjust beyond float32", lambda: ts.adjust(good(), learning_rate=1e39), HyperparameterError, "got 1e+39"),
    row(0, "adjust two of three", lambda: ts.adjust(three(), b1=X[0, :2]), HyperparameterError, "shape (2,)", "shape (3,)"),
    row(0, "adjust one of three to NaN", lambda: ts.adjust(three(), b1=np.array([0, NAN, 0])), HyperparameterError, "got nan"),
    row(0, "adjust schedule", lambda: ts.adjust(good(), b1=lambda s: 0.5), WrongTypeError, "b1 at adam()", "the function <lambda>"),
    row(0, "adjust None", lambda: ts.adjust(good(), b1=None), WrongTypeError, "b1 at adam()", "None", "a number"),
    row(0, "adjust_at nothing", lambda: ts.callbacks.adjust_at(3), HyperparameterError, "values at adjust_at()", "adjust_at(9, lea"),
    row(0, "adjust_at nothing of a part", lambda: ts.callbacks.adjust_at(3, "head"), HyperparameterError, "values at adjust_at()"),
    row(0, "adjust a number", lambda: ts.adjust(good(), 1e-3), WrongTypeError, "0.001 (float)", "a pattern"),
    row(0, "adjust optax's", lambda: ts.adjust(setup(rule=optax.adam(1e-3)), b1=0.5), HyperparameterError, "live", "ts.rules.live("),
    row(
        0, "adjust of others", lambda: ts.adjust(
            setup(rule=rules.partition({"head/**": rules.sgd(1.0, momentum=0.9), "**": adam})), "encoder/**", momentum=0.5
        ), HyperparameterError, "'momentum'", "b1, b2, eps, eps_root, learning_rate",
    ),
    row(
        0, "adjust of two", lambda: ts.adjust(setup(rule=rules.chain(rules.add_decayed_weights(0.1), rules.adamw(1.0))), weight_decay=0.5),
        HyperparameterError, "'weight_decay'", "'0.weight_decay' or '1.weight_decay'",
    ),
    row(0, "no rows", lambda: step(batch=X[:0]), LossError, "batch at loss_fn", "0 rows", "at least one", "NaN"),
    row(0, "no rows, eval", lambda: ts.eval_step(loss_fn)(good(), X[:0]), LossError, "batch at loss_fn", "0 rows"),
    row(0, "no rows, mean", lambda: step(lambda p, b: ts.Loss.mean(apply(p, b)), batch=X[:0]), LossError, "shape (0, 2)"),
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
    row(0, "run_steps on deleted", lambda: ts.loop.run_steps(ts.train_step(loss_fn), good(), gone((2, 8, 4))), StateError, "leaf at batches", "a deleted array"),
    row(0, "run_steps on objects", lambda: ts.loop.run_steps(ts.train_step(loss_fn), good(), OBJECTS), WrongTypeError, "leaf at batches", "object[2]", "numbers"),
    row(0, "shard zero1 no", lambda: ts.shard(good(), ts.mesh(), zero1="no"), WrongTypeError, "zero1 at shard()", "'no' (str)", "True or False"),
    row(0, "policy an array", lambda: ts.train_step(loss_fn, on_nonfinite=NAMES), HyperparameterError, "on_nonfinite at train_step()", "<U5[2]", "'skip'"),
    row(0, "step and state swapped", lambda: ts.fit(good(), ts.train_step(loss_fn), X, steps=1), WrongTypeError, "step at fit(): got TrainState, expected"),
    row(0, "resume an array", lambda: fit(resume=NAMES), HyperparameterError, "resume at fit()", "<U5[2]", "'must'"),
    row(0, "Best mode an array", lambda: ts.checkpoints.Best("loss", mode=NAMES), HyperparameterError, "mode at Best()", "<U5[2]", "'min' or 'max'"),
    row(0, "rounding an array", lambda: ts.precision.Policy(rounding=NAMES), HyperparameterError, "rounding at Policy()", "<U5[2]", "'stochastic'"),
    row(0, "drop_remainder an array", lambda: ts.batches(X, 2, drop_remainder=NAMES), WrongTypeError, "drop_remainder at batches()", "<U5[2]", "True or False"),
    row(0, "backend an array", lambda: ts.tune(len, {"x": ts.tuning.spaces.uniform(0, 1)}, backend=NAMES), HyperparameterError, "backend at tune()", "<U5[2]", "'optuna'"),
    row(0, "complex weight", lambda: ts.Loss.mean(X, 1j), LossError, "where: got complex", "a mask or real weights"),
    *(
        row(0, f"fit {name}", lambda name=name: fit(**{name: 1}), WrongTypeError, f"argument at fit(): got '{name}'", text)
        for name, text in {
            "max_grad_norm": "The rule clips: ts.rules.chain(ts.rules.clip_by_global_norm(1.0), rule).",
            "steps_per_epoch": "An epoch is one pass over the data: give steps=.",
            "lr": "The rule has it: ts.rules.adam(1e-3)",
            "device": 'ts.setup(..., device="gpu").',
            "temp": "history, extra.",
        }.items()
    ),
    row(0, "fit steps an array", lambda: fit(steps=good().step + 3), WrongTypeError, "steps at fit(): got int32[]"),
    row(0, "a short word that is no typing error", lambda: step(lambda p, b, step: 0.0, temp=1.0), KeywordError, "'temp'", "expected step. loss_fn does"),
    row(0, "complex Loss weight", lambda: returns(lambda v: ts.Loss(v.sum(), 1j)), LossError, "weight at loss_fn", "1j (complex)", "one finite number"),
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
    row(0, "fit of a loss", lambda: fits(loss_fn), WrongTypeError, "got loss_fn(params, batch), a loss function", "(state, batch) -> (state, info)", "Give ts.eval_step(loss_fn) or ts.train_step(loss_fn)."),
    row(0, "fit of an unnamed loss", lambda: fits(unnamed), WrongTypeError, "got unnamed(p, x), a loss function", "(state, batch) -> (state, info)", "ts.train_step(loss_fn)."),
    row(0, "fit of a loss, no loop", lambda: fits(unnamed, steps_per_call=None), WrongTypeError, "a loss function", "ts.train_step(loss_fn)."),
    row(0, "iterate a loss", lambda: next(ts.loop.iterate(unnamed, good(), [X], steps=1)), WrongTypeError, "a loss function"),
    row(0, "evaluate to a scalar", lambda: ts.evaluate(lambda s, x: 1.0, good(), [X]), WrongTypeError, "result at eval_step: got 1.0 (float)", "ts.eval_step(loss_fn)"),
    row(0, "evaluate a batch", lambda: ts.evaluate(ts.eval_step(loss_fn), good(), SHAPES), WrongTypeError, "data: got float32[", "One batch: [batch]."),
    row(0, "no evaluation to stop by", lambda: ts.fit(ts.train_step(loss_fn), setup(), [X], steps=1, progress=False, callbacks=ts.callbacks.early_stopping()), RowError, "metric at early_stopping(): got 'val/loss'", "Give fit(evaluate=lambda state: ts.evaluate(eval_step, state, {'val': data})).", compiles=True),
    row(0, "mask not used", lambda: ts.train_step(lambda params, batch, mask: loss_fn(params, batch), accumulate=3)(good(), X), LossError, "mask at loss_fn: got a loss that does not use it", "Return ts.Loss.mean(values, mask)."),
    row(0, "callback uncalled", lambda: fits(callbacks=ts.callbacks.early_stopping), WrongTypeError, "callback at fit(): got the class early_stopping", "Call it: early_stopping(...)."),
    row(0, "logger uncalled", lambda: fits(logger=ts.loggers.csv), WrongTypeError, "logger at fit(): got csv(path), expected f(row, step=...)"),
    row(0, "own factory uncalled", lambda: fits(callbacks=lambda x: lambda run: None), WrongTypeError, "result at callback: got the function <lambda>", "a TrainState, or nothing."),
    row(0, "batches of x, y, n", lambda: ts.batches(X, X, 4), WrongTypeError, "arguments at batches()", "ts.batches((x, y), 32)."),
    row(0, "batches of x, y", lambda: ts.batches(X, X), DataError, "batch_size at batches(): got float32[", "ts.batches((x, y), 32)."),
    row(0, "evaluate by an eval step", lambda: fits(evaluate=ts.eval_step(loss_fn)), WrongTypeError, "expected f(state), as lambda state: ts.evaluate("),
    row(0, "evaluate by words", lambda: fits(evaluate=dict, evaluate_every="every epoch"), WrongTypeError, "evaluate_every at fit(): got 'every epoch', expected 'n epochs', or steps."),
    row(0, "step of a Restored", lambda: step(loss_fn, ts.checkpoints.Restored(good())), WrongTypeError, "got Restored, expected a TrainState"),
    row(0, "step of flax's state", lambda: step(loss_fn, flax_state()), WrongTypeError, "expected a TrainState of tsunax. Make one: ts.setup(rule, params)."),
    row(0, "evaluate a state", lambda: ts.evaluate(good(), ts.eval_step(loss_fn), [X]), WrongTypeError, "eval_step at evaluate(): got TrainState", "evaluate(ts.eval_step(loss_fn), state, data)."),
    row(0, "evaluate a train step", lambda: ts.evaluate(ts.train_step(loss_fn), good(), [X]), WrongTypeError, "eval_step at evaluate(): got TrainStep", "ts.eval_step(loss_fn)"),
    row(0, "fit of text", lambda: fit({"x": X, "name": "a"}), DataError, "leaf at batch['name'], step 0: got 'a' (str)", "rows"),
    row(0, "fit of text, no loop", lambda: fit({"x": X, "name": "a"}, steps_per_call=None), DataError, "leaf at batch['name'], step 0"),
    row(0, "shard swapped", lambda: ts.shard(ts.mesh(), good()), WrongTypeError, "mesh at shard(): got TrainState", "The order is shard(state, ts.mesh());"),
    row(0, "adjust to a schedule", lambda: ts.adjust(setup(), learning_rate=ts.schedules.cosine_decay_schedule(0.1, 9)), WrongTypeError, "learning_rate at adam(", "expected a number"),
    row(0, "evaluate a used generator", lambda: ts.evaluate(ts.eval_step(loss_fn), good(), used_up()), DataError, "data at epoch 0: got no batch at all", "A generator can be read once: give a list"),
    row(0, "adjust by position", lambda: ts.adjust(good(), 1e-3), WrongTypeError, "where at adjust(): got 0.001 (float)", "a pattern"),
    row(0, "setup of a Model", lambda: setup(ts.models.nnx(drops())), ParamsError, "setup(rule, model.params, model_state=model.model_state)"),
    row(0, "setup of a module with statistics", lambda: setup(nnx.BatchNorm(4, rngs=nnx.Rngs(0))), ParamsError, "params at setup(): got BatchNorm", "Give the arrays alone"),
    row(0, "setup of a module's whole state", lambda: setup(nnx.split(nnx.BatchNorm(4, rngs=nnx.Rngs(0)))[1]), ParamsError, "params at setup(): got State", "batch statistics are not trained", "Give the arrays alone"),
    row(0, "setup of linen's variables", lambda: setup({"params": good().params, "batch_stats": {"mean": X}}), ParamsError, "params at setup(): got dict with params, batch_stats", "or linen"),
    row(0, "setup of a module", lambda: setup(drops()), ParamsError, "at params"),
    row(0, "setup of a Linen module", lambda: setup(linen.Dense(3)), ParamsError, "or linen", "model.params"),
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


LATE = ("adjust two of three",)  # they compile


@pytest.mark.parametrize("row", medium_if(lambda row: row.title in LATE, ROWS), ids=str)
def test_what_is_said_of_a_bad_input(row):
    error, compiled = error_of(row)
    assert error is not None, "accepted"
    assert type(error) is row.error, repr(error)
    assert isinstance(error, (ValueError, TypeError))
    assert not compiled or row.compiles
    text = str(error)
    assert [part for part in row.says if part not in text] == [], text
    assert lint(text) == [], text
    if row.cause:
        assert isinstance(error.__cause__, row.cause)
    else:  # nothing of JAX or optax above our error in the traceback
        assert error.__cause__ is None and (error.__context__ is None or error.__suppress_context__)


def test_is_every_promised_input_there():
    promised = {*range(2, 7), *range(8, 16), *range(17, 24), 30, 31, *range(33, 38), 89, 90, 91}
    assert {row.number for row in ROWS} - {0} == promised
    titles = [str(row) for row in ROWS]
    assert len(set(titles)) == len(titles)


def test_does_every_row_ask_for_something():
    assert all(row.says for row in ROWS)


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


def print_messages() -> None:
    _ = donated(), good()
    for row in ROWS:
        error, _ = error_of(row)
        print(f"{row.number or '-':>3}  {row.title}\n     {type(error).__name__}: {error}")


def test_a_long_cause_keeps_both_ends():
    """orbax and TensorStore say what happened in their last words."""
    error = OSError(f"RESOURCE_EXHAUSTED: failed to write {'/a/long/path ' * 30} : No space left on device")
    found = told(error)
    assert found.startswith("OSError RESOURCE_EXHAUSTED: failed") and found.endswith("No space left on device")
    assert len(found) < 175 and len(told(OSError("x" * 1000))) < 175


if __name__ == "__main__":
    print_messages()
