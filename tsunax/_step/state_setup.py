"""The arguments of `setup` and `TrainState.replace`: checked, copied, and made into fields.

A step does not run this file. It does not know `TrainState`, whose methods it helps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from tsunax import guard, reproduce
from tsunax._core import checks, patterns, trees
from tsunax._step.state_fields import COUNTS, trained_count
from tsunax.averages import as_average
from tsunax.errors import ParamsError, RuleError, StateError, TsunaxError, WrongTypeError, told
from tsunax.precision import Policy, as_loss_scale, cast


def check_setup(
    params: Any, device: Any, model_state: Any, trainable: Any, copy: bool, freezable: bool
) -> tuple[bool, ...]:
    """Raise for bad arguments of `setup`; returns which leaves of params are selected."""
    checks.check_flags("setup()", freezable=freezable, copy=copy)
    checks.check_keys(params)
    if device is not None and not isinstance(device, (jax.Device, jax.sharding.Sharding)):
        got, fix = trees.describe(device), "For example jax.devices()[0]."
        raise WrongTypeError("device", "setup()", got, "a jax.Device or Sharding", fix)
    checks.check_arrays(model_state, "model_state")
    if not jax.tree.leaves(params):
        raise trees.no_parameters("params", params)
    flags = patterns.select(trainable, params, allow_empty=True)
    if not any(flags):
        raise _selects_nothing(f"{patterns.where_text(trainable)}, which selects nothing")
    checks.check_params(params, flags)
    _check_no_shapes(params, flags)
    if not copy:
        checks.check_aliases(params, flags, model_state=model_state)
    return flags


def stored_params(params: Any, flags: tuple[bool, ...], take: Callable[[Any], Any]) -> Any:
    """The params as a state stores them, all as JAX arrays, the trained ones copied by `take`."""
    leaves, treedef = jax.tree.flatten(params)
    kept = zip(leaves, flags, strict=True)
    return treedef.unflatten([take(x) if flag else trees.strong(x) for x, flag in kept])


def without_overwritten(
    params: Any, flags: tuple[bool, ...], trainable: Any
) -> tuple[tuple[bool, ...], tuple[bool, ...] | None]:
    """Which leaves the rule trains, and which of the selected ones their gradients replace.

    Gradients replace flax's fp8 scales and amax histories: no rule is given those.
    """
    pairs = zip(trees.paths(params), flags, strict=True)
    found = tuple(on and trees.is_overwritten(path) for path, on in pairs)
    if not any(found):
        return flags, None
    flags = tuple(on and not replaced for on, replaced in zip(flags, found, strict=True))
    if not any(flags):
        got = f"{patterns.where_text(trainable)}, which selects only what gradients overwrite"
        raise _selects_nothing(got)
    return flags, found


def _selects_nothing(got: str) -> ParamsError:
    return ParamsError("trainable", "setup()", got, "at least one leaf to train")


def _check_no_shapes(params: Any, flags: tuple[bool, ...]) -> None:
    for (where, leaf), flag in zip(trees.leaves_at("params", params), flags, strict=True):
        if flag and isinstance(leaf, jax.ShapeDtypeStruct):
            got = f"a ShapeDtypeStruct, {trees.describe(leaf)}"
            fix = "For shapes alone: jax.eval_shape(lambda p: ts.setup(rule, p), params)."
            raise ParamsError("leaf", where, got, "an array", fix)


def rounded_and_masters(trained, policy: Policy | None, key) -> tuple[Any, Any]:
    """The trained part as a state stores it, and its master copies."""
    if policy is None:
        return trained, None
    if policy.stochastic and key is None:
        fix = "Rounding draws random numbers: setup(..., key=0)."
        raise StateError("key", "setup(precision=...)", "None", "a key", fix)
    masters = jax.tree.map(trees.own, cast(trained, "float32")) if policy.masters else None
    return policy.to_param(trained), masters


def opt_state_of(rule: Any, trained: Any, held: Any) -> Any:
    """`rule.init(trained)`, in which no leaf shares a buffer with `held` or another leaf.

    A buffer that is donated twice is an error: averaging rules start from the params themselves,
    and a rule may hold its key for another setup.
    """
    try:
        opt_state = rule.init(trained)
    except TsunaxError:
        raise
    except Exception as error:
        expected = "one that can start from these params"
        raise RuleError("rule", "setup()", told(error), expected) from error
    seen = {id(x) for x in jax.tree.leaves(held)}

    def fresh(x):
        if trees.is_traced(x):
            return x
        if id(x) in seen or trees.is_key(x) or trees.dtype_of(x) == np.uint32:
            x = trees.own(x)
        seen.add(id(x))
        return trees.strong(x)

    return jax.tree.map(fresh, opt_state)


def as_key(key: Any, where: str) -> Any:
    """The PRNG key that a user gave, as it is, or from an int seed."""
    expected = "an int seed or a key, as jax.random.key(0)"
    if key is None or trees.is_traced(key) or isinstance(key, jax.ShapeDtypeStruct):
        return key
    if isinstance(key, (int, np.integer)) and not isinstance(key, bool):
        if not -(2**63) <= key < 2**64:
            raise StateError("key", where, key, "a seed of at most 64 bits")
        return reproduce.key_of(int(key))
    words = isinstance(key, jax.Array) and key.dtype == np.uint32
    shape = jax.eval_shape(lambda: jax.random.PRNGKey(0)).shape if words else ()
    if isinstance(key, jax.Array) and (words or trees.is_key(key)) and key.shape == shape:
        checks.check_alive(key, where)
        return key
    fix = "Pick one of them: keys[0]." if trees.is_key(key) else ""
    raise WrongTypeError("key", where, trees.describe(key), expected, fix)


def first_values(
    fields: dict[str, Any], roles: dict[str, str], trained: Any, where: str
) -> dict[str, Any]:
    """The first values of fields like the trained leaves, or StateError for other leaves."""
    out = dict(fields)
    for name, value in fields.items():
        if roles[name] == "average" and (average := as_average(value, where, name)) is not None:
            out[name] = average.of(trained) if average.params is None else average
            check_leaves(name, out[name].params, trained)
        elif roles[name] == "trained" and value is not None:
            check_leaves(name, value, trained)
    return out


def check_leaves(name: str, value: Any, trained: Any) -> None:
    """Raise StateError unless the first leaves of a field have the shapes of the trained ones."""
    shapes, expected = (list(map(np.shape, jax.tree.leaves(x))) for x in (value, trained))
    if shapes[: len(expected)] != expected:
        checks.check_like(name, value, trained, "Give ts.trainable(state).", "field")


def check_field(state: Any, name: str, value) -> None:
    """Raise for a value that `replace` cannot put into this field."""
    if name in COUNTS:
        shapes = (), np.shape(state.clock)[:-1]
        fits = trees.is_a(value, np.integer) and np.shape(value) in shapes
        if fits and not trees.is_traced(value):
            fits = np.all((value >= 0) & (value <= guard.LIMIT))
        if not fits:
            expected = f"an int in [0, {guard.LIMIT}]"
            raise StateError(name, "replace()", trees.describe(value), expected)
    elif name == "frozen":
        if value is not None:
            words = np.empty(-(-trained_count(state) // 32), np.uint32)
            like = words if state.frozen is None else state.frozen
            checks.check_like(name, value, like, "Use ts.freeze and ts.thaw.")
    elif name != "key":
        follows = next(f.metadata["like"] for f in state._fields if f.name == name)
        if follows != "free":
            checks.check_like(name, value, getattr(state, name))
        checks.check_arrays(value, name)
        if name == "loss_scale":
            as_loss_scale(value, None, "replace()")


def copied_like(new, old):
    """Copies of arrays, on the mesh of the old ones."""
    new = jax.tree.map(trees.own, new)
    if jax.tree.structure(new) != jax.tree.structure(old):
        return new

    def one(x, y):
        moves = trees.is_placed(x) and not x.committed
        spread = trees.is_placed(y) and len(y.sharding.device_set) > 1
        return jax.device_put(x, y.sharding) if moves and spread and x.ndim == y.ndim else x

    return jax.tree.map(one, new, old)
