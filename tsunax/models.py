"""Models of other libraries as parameters, model state, and a pure function.

    library's model --nnx, linen, equinox, raw--> Model --setup, train_step--> state
    --build--> its model again

Inside a step there are plain pytrees only; the library's own module exists while JAX traces. An
adapter imports its library when it is called. It reads only `params` and `model_state` of a state.

Names that `apply` and `build` close over are part of the text by which a resumed run compares its
loss function (`_core/stable_text.py`): another name would warn of an edited loss function.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tsunax._core import Function, PyTree, checks, trees
from tsunax._core.libraries import library
from tsunax._step.loss_fn import current_call
from tsunax.errors import LossError, StateError, WrongTypeError
from tsunax.state import TrainState, check_state, own

__all__ = ["Model", "equinox", "linen", "nnx", "raw"]


@dataclass(frozen=True, eq=False, repr=False)
class Model:
    """A model in parts; made by `nnx`, `linen`, `equinox` and `raw`.

    `apply(params, *x, model_state=None, key=None, train=False, **named)` returns
    `(out, model_state)`; the model gets `named`. It is pure: in train mode dropout draws from `key`
    and batch statistics move; in eval mode neither. If the model has two modes, a call without
    `train` is an error with a `key`, and in the loss function of a training step. `build(state)`
    returns the library's own model in eval mode, with copies of the state's parameters.
    """

    params: PyTree
    model_state: PyTree  # state without a gradient; {} if the model has none
    apply: Function
    build: Function

    def __repr__(self) -> str:
        leaves = map(jax.tree.leaves, (self.params, self.model_state))
        params, model_state = (sum(int(np.size(x)) for x in part) for part in leaves)
        return f"Model(params {params:,}, model_state {model_state:,})"


def _model(
    params, model_state, call: Callable, assemble: Callable, *, has_modes: bool = True
) -> Model:
    """A model from `call(params, model_state, key, train, x, named)` and `assemble(*parts)`."""
    if not jax.tree.leaves(params):
        raise trees.no_parameters("params", params)
    nothing = None if jax.tree.leaves(model_state) else model_state

    def carried(model_state, where):
        model_state = nothing if model_state is None else model_state
        if model_state is None:
            raise StateError(
                "model_state",
                where,
                got="None",
                expected="the state that the model carries",
                fix="Give setup(model_state=model.model_state) "
                "and loss_fn a model_state parameter.",
            )
        return jax.tree.map(lambda x: x, model_state)  # new containers: equinox invalidates them

    def apply(params, *x, model_state=None, key=None, train=None, **named):
        training_step = current_call.get()
        is_mode_unnamed = (
            train is None and has_modes and named.keys().isdisjoint(_TRAIN_FLAGS + _EVAL_FLAGS)
        )
        if is_mode_unnamed and (training_step or key is not None):
            raise LossError(
                "train",
                "Model.apply()",
                got="none in a training step, or with a key",
                expected="a bool",
                fix="Name `train` in loss_fn and hand it on: else dropout is off.",
            )
        out, new_model_state = call(
            params, carried(model_state, "Model.apply()"), key, bool(train), x, named
        )
        if training_step and train:
            training_step.note(model_state, new_model_state)
        return out, new_model_state if nothing is None else model_state

    def build(state: TrainState):
        check_state(state, "Model.build()")
        parts = state.params, carried(state.model_state, "Model.build()")
        return assemble(*jax.tree.map(own, parts))

    return Model(params, model_state, apply, build)


# Names that modules use for the flag of their mode: True in train mode, and True in eval mode.
_TRAIN_FLAGS = ("train", "training", "is_training")
_EVAL_FLAGS = ("deterministic", "use_running_average", "inference")


def _check_model(x: Any, kind: type, adapter: str) -> None:
    if not isinstance(x, kind) or not callable(x):
        raise WrongTypeError(
            "model",
            f"models.{adapter}()",
            got=trees.describe(x),
            expected=f"an instance of {adapter}.Module that can be called",
        )


def _modes(fn: Callable) -> Callable[[bool], dict]:
    """The keywords of `fn` for a mode: its parameters among the usual names."""
    flags = [
        name for name in inspect.signature(fn).parameters if name in (*_TRAIN_FLAGS, *_EVAL_FLAGS)
    ]
    return lambda train: {name: train != (name in _EVAL_FLAGS) for name in flags}


def nnx(module: Any, *, wrt: Any = None) -> Model:
    """The parts of a flax NNX module. They are merged again while a step is traced.

    `params` is a nested dict of its `nnx.Param` variables (LoRA's included: choose with
    `setup(trainable=...)`), or of the variables that the filter `wrt` selects. Each random stream
    draws from its part of `key`; without a key, an evaluation draws the same every time. All other
    variables (batch statistics) are `model_state`. `train` sets the module's mode, `module.train()`
    or `module.eval()`; its call gets `rngs` and flags such as `train` if it names them (without a
    key: None for `rngs`, or its default). Sown values are dropped.

    Raises ParamsError for a module without parameters, and, when called, StateError for a module
    that draws in train mode without a key.

    >>> import tsunax as ts
    >>> from flax import nnx
    >>> model = ts.models.nnx(nnx.Linear(3, 2, rngs=nnx.Rngs(0)))
    >>> jax.tree.map(jnp.shape, model.params)
    {'bias': (2,), 'kernel': (3, 2)}
    """
    lib = library("flax.nnx", "models.nnx()")
    _check_model(module, lib.Module, "nnx")
    wrt = lib.Param if wrt is None else wrt
    modes, signature = _modes(module.__call__), inspect.signature(module.__call__)
    takes_rngs = "rngs" in signature.parameters
    needs_rngs = takes_rngs and signature.parameters["rngs"].default is inspect.Parameter.empty
    module = lib.clone(module)  # the user's module keeps its mode and sown values
    lib.pop(module, lib.Intermediate)
    graphdef, *parts = lib.split(module, wrt, lib.RngState, ...)
    params, streams, other_variables = map(lib.to_pure_dict, parts)
    trained, evaluated = lib.clone(module), lib.clone(module)
    trained.train()
    evaluated.eval()
    # Attention without dropout has a flag for its mode, but the flag changes nothing.
    may_change = takes_rngs or bool(jax.tree.leaves((streams, other_variables)))
    has_modes = bool(modes(True)) or (
        may_change and lib.graphdef(trained) != lib.graphdef(evaluated)
    )

    def seeded(key):
        """New random streams: a key for each, and counts from 0."""
        leaves, treedef = jax.tree.flatten(streams)
        root = jax.random.key(0) if key is None else key
        keys_of = lambda i, x: jax.random.split(jax.random.fold_in(root, i), x.shape)
        new_streams = [
            keys_of(i, x) if trees.is_key(x) else jnp.zeros_like(x) for i, x in enumerate(leaves)
        ]
        return treedef.unflatten(new_streams)

    def call(params, model_state, key, train, x, named):
        rngs = seeded(key)
        net = lib.merge(graphdef, params, rngs, model_state)
        net.train() if train else net.eval()
        arguments = {"rngs": lib.Rngs(key)} if takes_rngs and key is not None else {}
        if needs_rngs and key is None and "rngs" not in signature.bind_partial(*x).arguments:
            arguments = {"rngs": None}
        out = net(*x, **arguments | modes(train) | named)
        _, _, streams_after, _, other_variables = lib.split(
            net, wrt, lib.RngState, lib.Intermediate, ...
        )
        stream_pairs = zip(
            *map(jax.tree.leaves, (lib.to_pure_dict(streams_after), rngs)), strict=True
        )
        if train and key is None and any(a is not b for a, b in stream_pairs):
            raise StateError(
                "key",
                "Model.apply()",
                got="None",
                expected="one for its random streams",
                fix="Add a key parameter to loss_fn for model.apply(..., key=key): "
                "setup(..., key=0).",
            )
        return out, lib.to_pure_dict(other_variables)

    def assemble(params, model_state):
        net = lib.merge(graphdef, params, jax.tree.map(own, streams), model_state)
        net.eval()
        return net

    return _model(params, other_variables, call, assemble, has_modes=has_modes)


@functools.partial(checks.naming_arguments, fix="First variables = module.init(key, x).")
def linen(module: Any, variables: PyTree, *, rngs: Sequence[str] = ("dropout",)) -> Model:
    """The parts of a flax Linen module with the variables that its `init` returned.

    `params` is the collection "params" (with `_overwrite_with_gradient` of fp8 layers: both); the
    other collections are `model_state`, which a call may change. The streams named in `rngs` draw
    from `key`: a single stream gets the key itself, several get parts of it. The mode is passed to
    the module by the flags that its call names: `train`, `training`, `is_training`,
    `deterministic`, `use_running_average`. `build(state)` returns the bound module. Raises
    WrongTypeError for a class in place of a module.

    >>> import tsunax as ts
    >>> from flax import linen
    >>> net = linen.Dense(2)
    >>> model = ts.models.linen(net, net.init(jax.random.key(0), jnp.ones((1, 3))))
    >>> jax.tree.map(jnp.shape, model.params)
    {'bias': (2,), 'kernel': (3, 2)}
    """
    where = "models.linen()"
    _check_model(module, library("flax.linen", where).Module, "linen")
    modes = _modes(module.__call__)
    rngs = (rngs,) if isinstance(rngs, str) else tuple(rngs)
    # Plain dicts, because calls return plain dicts.
    other_collections = library("flax.core", where).unfreeze(variables)
    fp8, params = "_overwrite_with_gradient", other_collections.pop("params")
    if fp8 in other_collections:
        params = {"params": params, fp8: other_collections.pop(fp8)}
    variables_of = lambda params, model_state: (
        (params if fp8 in params else {"params": params}) | model_state
    )

    def call(params, model_state, key, train, x, named):
        keys = [] if key is None else [key] if len(rngs) == 1 else jax.random.split(key, len(rngs))
        arguments = {"rngs": dict(zip(rngs, keys, strict=False)), "mutable": list(model_state)}
        return module.apply(
            variables_of(params, model_state), *x, **arguments, **modes(train) | named
        )

    bind = lambda params, model_state: module.bind(variables_of(params, model_state))
    return _model(params, other_collections, call, bind, has_modes=bool(modes(True)))


def equinox(
    module: Any, state: Any = None, *, vmap: bool = False, axis_name: str = "batch"
) -> Model:
    """The parts of an equinox module, with its `eqx.nn.State` if it has one.

    `params` is `eqx.partition(module, eqx.is_inexact_array)[0]`; `model_state` is the state. With
    `vmap` the module takes one row and is mapped over axis 0 of all arguments, under `axis_name`
    (for batch norm), with a key for each row. `key` is passed if its call names it; eval mode is
    `eqx.nn.inference_mode`. `build(state)` returns the module in that mode, or `(module, state)`.

    Raises MissingLibraryError without equinox.
    """
    eqx = library("equinox", "models.equinox()")
    _check_model(module, eqx.Module, "equinox")
    stateful = state is not None
    params = eqx.filter(module, eqx.is_inexact_array)
    net_by_mode = {train: eqx.nn.inference_mode(module, value=not train) for train in (True, False)}
    static = {
        train: eqx.filter(net, eqx.is_inexact_array, inverse=True)
        for train, net in net_by_mode.items()
    }
    takes_key = "key" in inspect.signature(module.__call__).parameters

    def call(params, model_state, key, train, x, named):
        net = eqx.combine(params, static[train])
        extra_input = (model_state,) if stateful else ()

        def call_on(x, key, named):
            out = net(*x, *extra_input, **({"key": key} if takes_key else {}), **named)
            return out if stateful else (out, None)

        if not vmap:
            return call_on(x, key, named)
        keys = None if key is None else jax.random.split(key, jnp.shape(jax.tree.leaves(x)[0])[0])
        return jax.vmap(call_on, out_axes=(0, None), axis_name=axis_name)(x, keys, named)

    def assemble(params, model_state):
        net = eqx.combine(params, static[False])
        return (net, model_state) if stateful else net

    return _model(
        params,
        state if stateful else {},
        call,
        assemble,
        has_modes=not eqx.tree_equal(static[True], static[False]),
    )


def raw(fn: Function, params: PyTree, model_state: PyTree = None) -> Model:
    """The parts of a function `fn(params, *x)` that may name `model_state`, `key` and `train`.

    A function that names `model_state` returns `(out, model_state)`, any other returns `out`.
    `build(state)` returns a function of the inputs.

    >>> import tsunax as ts
    >>> model = ts.models.raw(lambda params, x: x @ params["w"], {"w": jnp.ones((3, 2))})
    >>> model.apply(model.params, jnp.ones(3))
    (Array([3., 3.], dtype=float32), None)
    """
    names = inspect.signature(fn).parameters

    def call(params, model_state, key, train, x, named):
        offered = {"model_state": model_state, "key": key, "train": train}
        accepted = {name: value for name, value in offered.items() if name in names}
        out = fn(params, *x, **accepted, **named)
        return out if "model_state" in names else (out, None)

    def predict(params, model_state, *x, **named):
        return call(params, model_state, None, False, x, named)[0]

    bind_params = lambda params, model_state: functools.partial(predict, params, model_state)
    carried_state = {} if model_state is None else model_state
    return _model(params, carried_state, call, bind_params, has_modes="train" in names)
