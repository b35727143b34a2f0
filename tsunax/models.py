"""Models of other libraries as what a training state wants: parameters, what is carried, and a pure
function.

    library's model --nnx, linen, equinox, haiku, raw--> Model --setup, train_step--> state
    --build--> its model again

Inside a step there are plain pytrees only; the library's own module exists while JAX traces. An
adapter imports its library when it is called. It knows of states what `build` reads: `params` and
`model_state`.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tsunax._core import trees
from tsunax.errors import (
    LossError,
    MissingLibraryError,
    ParamsError,
    StateError,
    WrongTypeError,
    message,
    unknown,
)
from tsunax.state import TrainState, check_state, own

__all__ = ["Model", "equinox", "haiku", "linen", "nnx", "raw"]


@dataclass(frozen=True, eq=False, repr=False)
class Model:
    """A model in parts; made by `nnx`, `linen`, `equinox`, `haiku` and `raw`.

    `apply(params, *x, model_state=None, key=None, train=False, **named)` gives `(out,
    model_state)`. It is pure: in train mode dropout draws from `key` and batch statistics move; in
    eval mode neither. A `key` without `train` is an error if the model has two modes: dropout would
    be off without a word. `named` goes to the model as it is. `build(state)` gives the library's
    own model in eval mode, with copies of the state's parameters.
    """

    params: Any
    model_state: Any  # what is carried without a gradient; {} for a model that carries nothing
    apply: Callable
    build: Callable

    def __repr__(self) -> str:
        parts = {"params": self.params, "model_state": self.model_state}
        counts = [
            f"{name} {_amount(tree)}" for name, tree in parts.items() if jax.tree.leaves(tree)
        ]
        rows = [
            (
                f"{name}/{trees.path_str(path)}" if name != "params" else trees.show(path),
                trees.describe(x),
            )
            for name, tree in parts.items()
            for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]
        ]
        if len(rows) > 24:
            rows = [*rows[:12], (f"... {len(rows) - 20} more", ""), *rows[-8:]]
        width = max(len(name) for name, _ in rows)
        table = [f"  {name:<{width}}  {kind}".rstrip() for name, kind in rows]
        return "\n".join([f"Model({', '.join(counts)})", *table])


def _amount(tree) -> str:
    arrays = jax.tree.leaves(tree)
    n = sum(int(np.prod(np.shape(x))) for x in arrays)
    return f"{n:,} in {len(arrays)} array{'s' * (len(arrays) != 1)}"


def _model(
    params, model_state, call: Callable, assemble: Callable, *, has_modes: bool = True
) -> Model:
    """From `call(params, model_state, key, train, x, named)` and `assemble(params,
    model_state)`.
    """
    if not jax.tree.leaves(params):
        raise trees.no_parameters("params", params)
    structure = jax.tree.map(lambda x: 0, params)
    nothing = None if jax.tree.leaves(model_state) else model_state

    def carried(model_state, where):
        model_state = nothing if model_state is None else model_state
        if model_state is None:
            fix = (
                "Give setup(..., model_state=model.model_state), and add a model_state "
                "parameter to loss_fn."
            )
            raise StateError(message("model_state", where, "None", "what the model carries", fix))
        return jax.tree.map(
            lambda x: x, model_state
        )  # containers of its own: equinox invalidates what it is given

    def apply(params, *x, model_state=None, key=None, train=None, **named):
        if key is not None and train is None and has_modes and named.keys().isdisjoint(_ON + _OFF):
            fix = "Name `train` in loss_fn and hand it on: dropout is off without it."
            raise LossError(
                message("train", "Model.apply()", "a key without it", "True or False", fix)
            )
        out, new = call(params, carried(model_state, "Model.apply()"), key, bool(train), x, named)
        return out, new if nothing is None else model_state

    def build(state: TrainState):
        check_state(state, "Model.build()")
        if difference := trees.first_difference(
            state.params, structure, "state.params", leaf="an array"
        ):
            raise StateError(
                f"params of another model {difference}. Give a state of this model's params."
            )
        return assemble(
            *jax.tree.map(own, (state.params, carried(state.model_state, "Model.build()")))
        )

    return Model(params, model_state, apply, build)


# ----------------------------------------------------------------------------------- what was given

_HOMES = {"flax.nnx": "nnx", "flax.linen": "linen", "equinox": "equinox", "haiku": "haiku"}
_BASES = ("Module", "Transformed", "TransformedWithState")
_ON, _OFF = (
    ("train", "training", "is_training"),
    ("deterministic", "use_running_average", "inference"),
)


def _home(x) -> str:
    """The adapter that a model belongs to, by the names of its classes; "" if to none."""
    kinds = (x if isinstance(x, type) else type(x)).__mro__
    names = [kind.__module__ for kind in kinds if kind.__name__ in _BASES]
    return next(
        (home for name in names for start, home in _HOMES.items() if name.startswith(start)), ""
    )


def _check_model(x, home: str, expected: str) -> None:
    if isinstance(x, type) or _home(x) != home:
        other = _home(x)
        fix = f"ts.models.{other}() takes it." if other not in ("", home) else ""
        if isinstance(x, type) and other == home:
            fix = f"Make one: {x.__name__}(...)."
        got = (
            trees.describe(x)
            if isinstance(x, type) or not other
            else f"a {type(x).__name__} of {other}"
        )
        raise WrongTypeError(message("model", f"models.{home}()", got, expected, fix))
    if home != "haiku" and not callable(x):
        got, fix = (
            f"a {type(x).__name__} without __call__",
            "Give it one, or write a function for ts.models.raw().",
        )
        raise WrongTypeError(
            message("model", f"models.{home}()", got, "one that can be called", fix)
        )


def _library(name: str, where: str):
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        fix = f"pip install {name}"
        raise MissingLibraryError(
            message(name, where, "no such package", "it installed", fix)
        ) from None


def _names(fn) -> list[str]:
    return list(inspect.signature(fn).parameters)


def _modes(fn: Callable, flag: str | None, where: str) -> Callable[[bool], dict]:
    """The keywords that tell `fn` the mode: `flag`, or those with a name that everybody uses."""
    names = _names(fn)
    if flag is not None and flag not in names:
        raise WrongTypeError(unknown("flag", where, flag, names))
    found = [flag] if flag else [name for name in names if name in (*_ON, *_OFF)]
    return lambda train: {name: train != (name in _OFF) for name in found}


# ------------------------------------------------------------------------------------- the adapters


def nnx(module, *, wrt=None) -> Model:
    """A flax NNX module, split once and merged while a step is traced, so that no `nnx.jit` is paid
    for.

    `params` is a nested dict of the arrays in its `nnx.Param` variables, also those of LoRA: choose
    among them with `setup(trainable=...)`; `wrt` is another filter than `nnx.Param`. Random streams
    are taken out: in each call each draws from a key of its own, made of `key` (without one, an
    evaluation draws the same every time). All other variables (batch statistics) are `model_state`.
    `train` sets the module's mode, `module.train()` or `module.eval()`; if its call names `rngs` or
    a flag such as `train`, it gets them. What was sown is dropped.

    Raises WrongTypeError for what is no instance of `nnx.Module`, ParamsError for one without
    parameters, and, when called, StateError for a model that draws in train mode without a key.

    >>> import tsunax as ts
    >>> from flax import nnx
    >>> model = ts.models.nnx(nnx.Linear(3, 2, rngs=nnx.Rngs(0)))
    >>> jax.tree.map(jnp.shape, model.params)
    {'bias': (2,), 'kernel': (3, 2)}
    """
    lib = _library("flax.nnx", "models.nnx()")
    _check_model(module, "nnx", "an instance of nnx.Module")
    wrt = lib.Param if wrt is None else wrt
    modes, takes_rngs = (
        _modes(module.__call__, None, "models.nnx()"),
        "rngs" in _names(module.__call__),
    )
    module = lib.clone(module)  # the modes and the sown values of the user's own stay as they are
    lib.pop(module, lib.Intermediate)
    graphdef, *parts = lib.split(module, wrt, lib.RngState, ...)
    params, streams, rest = map(lib.to_pure_dict, parts)

    def seeded(key):
        """The random streams anew: a key for each, and counts from 0."""
        leaves, treedef = jax.tree.flatten(streams)
        root = jax.random.key(0) if key is None else key

        def one(i, x):
            if not trees.is_key(x):
                return jnp.zeros(x.shape, x.dtype)
            return jax.random.split(
                jax.random.fold_in(root, i), x.shape
            )  # x may be an array of keys

        return treedef.unflatten([one(i, x) for i, x in enumerate(leaves)])

    def call(params, model_state, key, train, x, named):
        rngs = seeded(key)
        net = lib.merge(graphdef, params, rngs, model_state)
        net.train() if train else net.eval()
        given = {"rngs": lib.Rngs(key)} if takes_rngs and key is not None else {}
        out = net(*x, **given | modes(train) | named)
        _, _, after, _, rest = lib.split(net, wrt, lib.RngState, lib.Intermediate, ...)
        drawn = any(
            a is not b
            for a, b in zip(*map(jax.tree.leaves, (lib.to_pure_dict(after), rngs)), strict=True)
        )
        if train and key is None and drawn:
            fix = (
                "Add a key parameter to loss_fn, call model.apply(..., key=key), and give "
                "setup(..., key=0)."
            )
            raise StateError(
                message("key", "Model.apply()", "None", "a key for the model's random streams", fix)
            )
        return out, lib.to_pure_dict(rest)

    def assemble(params, model_state):
        net = lib.merge(graphdef, params, jax.tree.map(own, streams), model_state)
        net.eval()
        return net

    return _model(params, rest, call, assemble)


def linen(module, variables, *, rngs=("dropout",), flag: str | None = None) -> Model:
    """A flax Linen module with the variables that its `init` gave.

    `params` is that collection (with `_overwrite_with_gradient`, of fp8 layers, both); the other
    ones are `model_state`, and what a call may change. The streams named in
    `rngs` draw from `key`: one gets it as it is, several get parts of it. The mode goes to the
    module as `flag`, or as whichever of `train`, `training`, `is_training`, `deterministic`,
    `use_running_average` its call names. `build(state)` gives the bound module.

    Raises WrongTypeError for what is no instance of `linen.Module`, ParamsError for variables
    without parameters.

    >>> import tsunax as ts
    >>> from flax import linen
    >>> net = linen.Dense(2)
    >>> model = ts.models.linen(net, net.init(jax.random.key(0), jnp.ones((1, 3))))
    >>> jax.tree.map(jnp.shape, model.params)
    {'bias': (2,), 'kernel': (3, 2)}
    """
    _check_model(module, "linen", "an instance of linen.Module")
    if not isinstance(variables, Mapping) or "params" not in variables:
        kind = ParamsError if isinstance(variables, Mapping) else WrongTypeError
        fix = "Give all of net.init(key, x)."
        raise kind(
            message(
                "variables",
                "models.linen()",
                trees.describe(variables),
                "a dict with 'params'",
                fix,
            )
        )
    modes = _modes(module.__call__, flag, "models.linen()")
    rngs = (rngs,) if isinstance(rngs, str) else tuple(rngs)
    others = _library("flax.core", "models.linen()").unfreeze(variables)  # calls return plain dicts
    fp8 = "_overwrite_with_gradient"
    params = (
        {name: others.pop(name) for name in ("params", fp8)}
        if fp8 in others
        else others.pop("params")
    )
    all_of = lambda params, model_state: (
        (params if fp8 in params else {"params": params}) | model_state
    )

    def call(params, model_state, key, train, x, named):
        keys = [] if key is None else [key] if len(rngs) == 1 else jax.random.split(key, len(rngs))
        given = {"rngs": dict(zip(rngs, keys, strict=False)), "mutable": list(model_state)}
        return module.apply(all_of(params, model_state), *x, **given, **modes(train) | named)

    bound = lambda params, model_state: module.bind(all_of(params, model_state))
    return _model(params, others, call, bound, has_modes=bool(modes(True)))


def equinox(module, state=None, *, vmap: bool = False, axis_name: str = "batch") -> Model:
    """An equinox module, with the `eqx.nn.State` that `eqx.nn.make_with_state` gave if it has one.

    `params` is `eqx.partition(module, eqx.is_inexact_array)[0]`; `model_state` is the state. With
    `vmap` the module takes one row and is mapped over axis 0 of all that it is given, under
    `axis_name` (which batch-norm asks for), with a key for each row. It gets `key` if its call
    names it; eval mode is `eqx.nn.inference_mode`. `build(state)` gives the module in that mode, or
    `(module, state)`.

    Raises MissingLibraryError without equinox, WrongTypeError for what is no instance of
    `equinox.Module` or `equinox.nn.State`, ParamsError for a module without parameters.
    """
    eqx = _library("equinox", "models.equinox()")
    _check_model(module, "equinox", "an instance of equinox.Module")
    stateful = state is not None
    if stateful and not isinstance(state, eqx.nn.State):
        fix = "module, state = eqx.nn.make_with_state(Net)(...)"
        raise WrongTypeError(
            message("state", "models.equinox()", trees.describe(state), "an equinox.nn.State", fix)
        )
    params = eqx.filter(module, eqx.is_inexact_array)
    static = {
        train: eqx.filter(
            eqx.nn.inference_mode(module, value=not train), eqx.is_inexact_array, inverse=True
        )
        for train in (True, False)
    }
    takes_key = "key" in _names(module.__call__)

    def call(params, model_state, key, train, x, named):
        net = eqx.combine(params, static[train])
        carried = (model_state,) if stateful else ()

        def one(x, key, named):
            out = net(*x, *carried, **({"key": key} if takes_key else {}), **named)
            return out if stateful else (out, None)

        if not vmap:
            return one(x, key, named)
        keys = None if key is None else jax.random.split(key, jnp.shape(jax.tree.leaves(x)[0])[0])
        return jax.vmap(one, out_axes=(0, None), axis_name=axis_name)(x, keys, named)

    def assemble(params, model_state):
        net = eqx.combine(params, static[False])
        return (net, model_state) if stateful else net

    return _model(params, state if stateful else {}, call, assemble)


def haiku(transformed, params, state=None, *, flag: str | None = None) -> Model:
    """A function under `hk.transform_with_state` or `hk.transform`, with the params and state that
    its `init` gave.

    `key` goes to it as `rng`, the mode as `flag`, or as whichever of `train`, `training`,
    `is_training` and so on it names. `build(state)` gives a function of the inputs.

    Raises WrongTypeError for what was not transformed, ParamsError for empty params.
    """
    _check_model(transformed, "haiku", "hk.transform_with_state(f) or hk.transform(f)")
    modes, names = _modes(transformed.apply, flag, "models.haiku()"), _names(transformed.apply)
    stateful, takes_rng = names[1:2] == ["state"], "rng" in names[:3]

    def call(params, model_state, key, train, x, named):
        given = ((model_state,) if stateful else ()) + ((key,) if takes_rng else ())
        out = transformed.apply(params, *given, *x, **modes(train) | named)
        return out if stateful else (out, None)

    carried = state if state is not None else {}
    return _model(params, carried, call, _closed(call), has_modes=bool(modes(True)))


def raw(fn, params, model_state=None) -> Model:
    """A function `fn(params, *x)` that may also name `model_state`, `key` and `train`, as keywords.

    One that names `model_state` returns `(out, model_state)`, any other `out`. `build(state)` gives
    a function of the inputs.

    Raises WrongTypeError for what is no function, ParamsError for params without leaves.

    >>> import tsunax as ts
    >>> model = ts.models.raw(lambda params, x: x @ params["w"], {"w": jnp.ones((3, 2))})
    >>> model.apply(model.params, jnp.ones(3))
    (Array([3., 3.], dtype=float32), None)
    """
    if not callable(fn) or isinstance(fn, type) or _home(fn):
        fix = (
            f"ts.models.{_home(fn)}() takes models of this kind."
            if _home(fn)
            else "The order is raw(fn, params)."
        )
        got = trees.describe(fn)
        raise WrongTypeError(
            message("fn", "models.raw()", got, "a function fn(params, *x, ...)", fix)
        )
    names = _names(fn)

    def call(params, model_state, key, train, x, named):
        offered = {"model_state": model_state, "key": key, "train": train}
        out = fn(
            params, *x, **{name: value for name, value in offered.items() if name in names}, **named
        )
        return out if "model_state" in names else (out, None)

    carried = {} if model_state is None else model_state
    return _model(params, carried, call, _closed(call), has_modes="train" in names)


def _closed(call: Callable) -> Callable:
    """What `build` gives where the library has functions only: eval mode, the output alone."""

    def predict(params, model_state, *x, **named):
        return call(params, model_state, None, False, x, named)[0]

    return lambda params, model_state: functools.partial(predict, params, model_state)
