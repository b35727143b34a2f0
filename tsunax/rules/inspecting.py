"""Facts about any optax rule before it runs: whether its update works, and its name."""

import functools
import inspect
import re
import traceback
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tsunax._core import Function, PyTree, trees
from tsunax._core.checks import SEARCHES, accepting
from tsunax.errors import RuleError, TsunaxError, WrongTypeError, told
from tsunax.rules.extra_arguments import blank
from tsunax.rules.live_factory import LiveFactory
from tsunax.rules.live_rules import LiveUpdate, is_library_factory


def check_rule(rule: object, where: str, fix: str = "") -> None:
    """Raise unless this is an optax rule that can be hashed. `fix` is for other objects."""
    if not isinstance(rule, optax.GradientTransformation):
        raise WrongTypeError(
            "rule",
            where,
            got=trees.describe(rule),
            expected="an optax.GradientTransformation",
            fix=fix or _hint_for(rule),
        )
    if not (callable(rule.init) and callable(rule.update)):
        raise WrongTypeError(
            "rule",
            where,
            got=f"one with init {trees.describe(rule.init)}, update {trees.describe(rule.update)}",
            expected="two functions",
        )
    try:
        hash(rule)
    except TypeError as error:
        raise RuleError(
            "rule",
            where,
            got=told(error),
            expected="one that can be hashed, as functions can: jit looks it up",
        ) from None


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
    rule = optax.GradientTransformationExtraArgs(init, update)
    _check_update(rule, treedef.unflatten(shapes))


def _check_update(rule: optax.GradientTransformationExtraArgs, params: PyTree) -> None:
    leaves = trees.leaves_at("params", params)
    complex_leaves = [(path, x) for path, x in leaves if trees.is_a(x, np.complexfloating)]
    if not complex_leaves and _is_sure_to_work(rule.update):
        return
    cause, name = None, name_of_update(rule.update)
    try:
        old_state, updates, new_state = _update_shapes(rule, params)
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError):
        return  # the rule may still work outside of jit
    except RuleError:
        raise
    except Exception as error:
        # the axes of a shard_map
        is_unbound_axis = isinstance(error, NameError) and "unbound axis name" in str(error)
        if is_unbound_axis or (not complex_leaves and missing(error)):
            return
        cause, name, got = error, _raised_by(error, rule), f"{told(error)} from its update"
    else:
        got = _difference(updates, params, "updates")
        got = got and f"other updates ({got})"
        if not got and (difference := _difference(new_state, old_state, "opt_state")):
            raise RuleError(
                f"optimizer state {difference}. The rule {name} changes it from call to call."
            )
        pairs = zip(jax.tree.leaves(updates), jax.tree.leaves(params), strict=not got)
        if not got and all(u.dtype == p.dtype for u, p in pairs if complex_leaves):
            return
    if takes_rows(lambda grads: _update_shapes(rule, params, grads), params):
        return
    if complex_leaves and not isinstance(cause, TsunaxError):
        where, leaf = complex_leaves[0]
        raise RuleError(
            "leaf",
            where,
            got=f"dtype {leaf.dtype}",
            expected="real numbers for this rule",
            fix="Wrap the rule: optax.contrib.split_real_and_imaginary(rule).",
        ) from cause
    is_foreign_argument = "unexpected keyword argument" in got
    is_foreign_argument &= not hasattr(rule.update, "around")
    raise RuleError(
        "rule" if "<" in name else f"rule {name}",
        "setup()",
        got=got,
        expected="updates like the params",
        fix=(
            "optax's wrappers give extra arguments to all rules inside, also to those that take "
            "others: join them with ts.rules.chain or ts.rules.partition."
            if is_foreign_argument
            else ""
        ),
    ) from cause


def takes_rows(update: Function, params: PyTree) -> bool:
    """Whether `update(grads)` turns the gradients of rows into updates like params.

    `update` returns (old state, updates, new state).
    `optax.contrib.differentially_private_aggregate` is such a rule.
    """
    rows = jax.tree.map(lambda p: jax.ShapeDtypeStruct((3, *p.shape), p.dtype), params)
    try:
        old_state, updates, new_state = jax.eval_shape(update, rows)
        return not (
            _difference(updates, params, "updates")
            or _difference(new_state, old_state, "opt_state")
        )
    except Exception:
        return False


def _update_shapes(rule, params: PyTree, grads: PyTree = None) -> tuple[Any, Any, Any]:
    """The shapes of the state before an update, of the updates, and of the state after it."""
    widened = lambda x: x.astype(trees.wide_dtype(x))
    loss_fn = lambda p, *_, **__: sum(jnp.sum(widened(jnp.abs(x))) for x in jax.tree.leaves(p))
    extra = {"value_fn": loss_fn, "obj_fn": loss_fn, "grad_fn": lambda p, *_: jax.grad(loss_fn)(p)}
    extra = {name: accepting(f, ("step", "weight", *SEARCHES)) for name, f in extra.items()}
    arguments = lambda p, step, x: dict(step=step, weight=x, value=x, grad=p, **extra)
    run_update = lambda g, s, p, step, x: rule.update(g, s, p, **arguments(p, step, x))
    step_and_float = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((), jnp.float32)
    old_state = jax.eval_shape(rule.init, params)
    grads = params if grads is None else grads
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
    if not type(update).__module__.startswith("tsunax.") or hasattr(update, "around"):
        return False
    return all(
        map(_is_sure_to_work, getattr(update, "updates", None) or [getattr(update, "update", None)])
    )


def missing(error: Exception) -> list[str]:
    """The names of the missing arguments that made a call fail."""
    if isinstance(error, ValueError):  # optax raises it for arguments with the default None
        return re.findall(r"^`?(\w+)`? must be provided", str(error))
    match = re.search(r"missing \d+ required \S+ arguments?: (.*)", str(error))
    return re.findall(r"'(\w+)'", match[1]) if isinstance(error, TypeError) and match else []


def _raised_by(error: BaseException, rule) -> str:
    """The factory of the innermost update in the traceback of an exception."""
    names = [name_of_update(rule.update)]
    for frame, _ in traceback.walk_tb(error.__traceback__):
        factory, _, function = frame.f_code.co_qualname.partition(".<locals>.")
        names += [factory] if function in ("update", "update_fn") else []
    return names[-1]


def _hint_for(rule) -> str:
    if hasattr(rule, "gradient_transformation"):  # an `optax.MultiSteps`
        return "Call rule.gradient_transformation(), or use ts.rules.accumulate(rule, every=n)."
    if isinstance(rule, LiveFactory) or inspect.isfunction(rule):
        first_parameter = next(iter(inspect.signature(rule).parameters), "")
        return f"Call it: {rule.__name__}({first_parameter and first_parameter + '=...'})."
    return "For example ts.rules.adam(1e-3)."


def name_of_update(update: Any) -> str:
    """The factory of a rule, or the rule inside a wrapper."""
    while type(update).__module__.startswith("tsunax.") and hasattr(update, "update"):
        update = getattr(update, "around", update.update)
    if isinstance(update, LiveUpdate):
        return update.live.title
    kind = type(update).__name__.strip("_").removesuffix("Update").lower()
    name = getattr(update, "__qualname__", kind)
    return name.partition(".<locals>")[0].removesuffix(".update")
