"""Facts about any optax rule before it runs: whether its update works, and its name."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tsunax._core import Function, PyTree, trees
from tsunax._core.checks import SEARCHES, accepting
from tsunax.errors import RuleError, WrongTypeError, told
from tsunax.rules.extra_arguments import blank
from tsunax.rules.live_rules import LiveUpdate, is_library_factory


def check_rule(rule: object, where: str) -> None:
    """Raise WrongTypeError unless this is an optax rule."""
    if not isinstance(rule, optax.GradientTransformation):
        raise WrongTypeError(
            "rule",
            where,
            got=trees.describe(rule),
            expected="an optax.GradientTransformation, as ts.rules.adam(1e-3)",
        )


def check_update(rule: optax.GradientTransformationExtraArgs, params: PyTree) -> None:
    """Raise RuleError if a rule's update fails or returns other shapes or dtypes.

    The update is traced for shapes, once for rules that differ only in numbers. Rules that always
    work on these params are not traced. A missing extra argument is accepted here: `ts.update` may
    get it later.
    """
    leaves, treedef = jax.tree.flatten(params)
    if any(map(trees.is_traced, leaves)):
        return _check_update(rule, params)
    sharding_on_mesh = lambda x: x.sharding if len(x.sharding.device_set) > 1 else None
    shapes = (jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding_on_mesh(x)) for x in leaves)
    _check_update_of(blank(rule.init), rule.update, treedef, tuple(shapes))


# The cache is small because a rule may hold arrays. Errors are not cached.
@functools.lru_cache(maxsize=32)
def _check_update_of(init: Function, update: Function, treedef: Any, shapes: Any) -> None:
    _check_update(optax.GradientTransformationExtraArgs(init, update), treedef.unflatten(shapes))


def _check_update(rule: optax.GradientTransformationExtraArgs, params: PyTree) -> None:
    leaves = trees.leaves_at("params", params)
    complex_paths = [path for path, x in leaves if trees.is_a(x, np.complexfloating)]
    if not complex_paths and _is_sure_to_work(rule.update):
        return
    cause = None
    try:
        got = _fault_of_update(rule, params, params)
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError):
        return  # the rule may still work outside of jit
    except RuleError:
        raise
    except Exception as error:
        # An update may use the axes of a shard_map, which exist in steps only.
        is_unbound_axis = isinstance(error, NameError) and "unbound axis name" in str(error)
        if is_unbound_axis or (not complex_paths and _lacks_argument(error)):
            return
        cause, got = error, f"{told(error)} from its update"
    if not got or _takes_rows(rule, params):
        return
    title, expected, fix = f"rule {name_of_update(rule.update)}", "updates like the params", ""
    if complex_paths:
        got = f"complex numbers in {complex_paths[0]}"
        fix = "Wrap the rule: optax.contrib.split_real_and_imaginary(rule)."
    elif "unexpected keyword argument" in got:  # optax gives extra arguments to all rules inside
        fix = "Join rules that take different arguments with ts.rules.chain or partition."
    raise RuleError(title, "setup()", got, expected, fix) from cause


def _takes_rows(rule: optax.GradientTransformationExtraArgs, params: PyTree) -> bool:
    """Whether a rule turns the gradients of rows into updates like params.

    `optax.contrib.differentially_private_aggregate` is such a rule.
    """
    rows = jax.tree.map(lambda p: jax.ShapeDtypeStruct((3, *p.shape), p.dtype), params)
    try:
        return not _fault_of_update(rule, params, rows)
    except Exception:
        return False


def _fault_of_update(rule, params: PyTree, grads: PyTree) -> str:
    """What is wrong with the shapes that an update returns; "" if nothing is."""
    old_state, updates, new_state = _update_shapes(rule, params, grads)
    if difference := _difference(updates, params, "updates"):
        return f"other updates ({difference})"
    if difference := _difference(new_state, old_state, "opt_state"):
        return f"a state that changes from call to call ({difference})"
    pairs = zip(jax.tree.leaves(updates), jax.tree.leaves(params), strict=True)
    # Updates of real params may have another float dtype, and are cast when they are added.
    is_unfit = lambda u, p: trees.is_a(p, np.complexfloating) and u.dtype != p.dtype
    return "other dtypes" if any(is_unfit(*pair) for pair in pairs) else ""


def _update_shapes(rule, params: PyTree, grads: PyTree) -> tuple[Any, Any, Any]:
    """The shapes of the state before an update, of the updates, and of the state after it."""
    # Any loss of params serves the rules that search along a line.
    widened = lambda x: x.astype(trees.wide_dtype(x))
    loss_fn = lambda p, *_, **__: sum(jnp.sum(widened(jnp.abs(x))) for x in jax.tree.leaves(p))
    extra = {"value_fn": loss_fn, "obj_fn": loss_fn, "grad_fn": lambda p, *_: jax.grad(loss_fn)(p)}
    extra = {name: accepting(f, ("step", "weight", *SEARCHES)) for name, f in extra.items()}
    arguments = lambda p, step, x: dict(step=step, weight=x, value=x, grad=p, **extra)
    run_update = lambda g, s, p, step, x: rule.update(g, s, p, **arguments(p, step, x))
    step_and_float = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((), jnp.float32)
    old_state = jax.eval_shape(rule.init, params)
    return old_state, *jax.eval_shape(run_update, grads, old_state, params, *step_and_float)


def _difference(new: PyTree, old: PyTree, root: str) -> str:
    """The first difference of two trees in structure or shape, in words; "" if there is none."""
    if difference := trees.first_difference(new, old, root):
        return difference
    for (where, x), y in zip(trees.leaves_at(root, new), jax.tree.leaves(old), strict=True):
        if x.shape != jnp.shape(y):
            return f"at {where}: got {trees.describe(x)}, expected {trees.describe(y)}"
    return ""


# Factories of optax that work only on some shapes, or not with the defaults of their arguments.
# Their updates are traced at setup. A rule that is missing here fails later, at the first step.
_NEED_A_TRACE = ("sm3", "scale_by_muon", "scale_by_distance_over_gradients")


def _is_sure_to_work(update: Any) -> bool:
    """Whether an update is made only of rules that always work."""
    if isinstance(update, LiveUpdate):
        return is_library_factory(update.live.factory) and update.live.title not in _NEED_A_TRACE
    has_user_function = hasattr(update, "around")  # the update of `rules.wrap`
    is_ours = type(update).__module__.startswith("tsunax.") and not has_user_function
    if not is_ours:
        return False
    inner_updates = getattr(update, "updates", None) or [getattr(update, "update", None)]
    return all(map(_is_sure_to_work, inner_updates))


def _lacks_argument(error: Exception) -> bool:
    """Whether a missing extra argument made an update fail."""
    if isinstance(error, ValueError):  # optax raises it for arguments with the default None
        return bool(re.match(r"`?\w+`? must be provided", str(error)))
    return isinstance(error, TypeError) and "missing " in str(error)


def name_of_update(update: Any) -> str:
    """The factory of a rule, or the rule inside a wrapper."""
    while type(update).__module__.startswith("tsunax.") and hasattr(update, "update"):
        update = getattr(update, "around", update.update)
    if isinstance(update, LiveUpdate):
        return update.live.title
    kind = type(update).__name__.strip("_").removesuffix("Update").lower()
    name = getattr(update, "__qualname__", kind)
    return name.partition(".<locals>")[0].removesuffix(".update")
