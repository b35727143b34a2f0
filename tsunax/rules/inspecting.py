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
from tsunax.rules.live_rules import LiveUpdate, is_known


def check_rule(rule: object, where: str, fix: str = "") -> None:
    """Raise unless this is an optax rule that can be hashed. `fix` is for other objects."""
    if not isinstance(rule, optax.GradientTransformation):
        expected, got = "an optax.GradientTransformation", trees.describe(rule)
        raise WrongTypeError("rule", where, got, expected, fix or _meant(rule))
    if not (callable(rule.init) and callable(rule.update)):
        got = f"one with init {trees.describe(rule.init)}, update {trees.describe(rule.update)}"
        raise WrongTypeError("rule", where, got, "two functions")
    try:
        hash(rule)
    except TypeError as error:
        expected = "one that can be hashed, as functions can: jit looks it up"
        raise RuleError("rule", where, told(error), expected) from None


def check_update(rule: optax.GradientTransformationExtraArgs, params: PyTree) -> None:
    """Raise RuleError if a rule's update fails or returns other shapes or dtypes.

    It is traced for shapes, once for rules that differ in numbers, unless the rule is known to work
    on these params. A missing extra argument is no fault yet: `ts.update` may be given it.
    """
    leaves, treedef = jax.tree.flatten(params)
    if any(map(trees.is_traced, leaves)):
        return _check_update(rule, params)
    over_mesh = lambda x: x.sharding if len(x.sharding.device_set) > 1 else None
    shapes = (jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=over_mesh(x)) for x in leaves)
    _check_update_of(blank(rule.init), rule.update, treedef, tuple(shapes))


@functools.lru_cache(maxsize=32)  # few: a rule may hold arrays; an error is raised each time
def _check_update_of(init: Function, update: Function, treedef: Any, shapes: Any) -> None:
    rule = optax.GradientTransformationExtraArgs(init, update)
    _check_update(rule, treedef.unflatten(shapes))


def _check_update(rule: optax.GradientTransformationExtraArgs, params: PyTree) -> None:
    named = trees.leaves_at("params", params)
    complex_ = [(at, x) for at, x in named if trees.is_a(x, np.complexfloating)]
    if not complex_ and _is_ours(rule.update):
        return
    cause, name = None, name_of_update(rule.update)
    try:
        before, updates, after = _traced(rule, params)
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError):
        return  # it may still work outside of jit
    except RuleError:
        raise
    except Exception as error:
        outside = isinstance(error, NameError) and "unbound axis name" in str(error)  # of shard_map
        if outside or (not complex_ and missing(error)):
            return
        cause, name, got = error, _raised_by(error, rule), f"{told(error)} from its update"
    else:
        got = _unlike(updates, params, "updates")
        got = got and f"other updates ({got})"
        if not got and (difference := _unlike(after, before, "opt_state")):
            said = f"optimizer state {difference}. The rule {name} changes it from call to call."
            raise RuleError(said)
        pairs = zip(jax.tree.leaves(updates), jax.tree.leaves(params), strict=not got)
        if not got and all(u.dtype == p.dtype for u, p in pairs if complex_):
            return
    if takes_rows(lambda grads: _traced(rule, params, grads), params):
        return
    if complex_ and not isinstance(cause, TsunaxError):
        where, leaf = complex_[0]
        fix = "Wrap the rule: optax.contrib.split_real_and_imaginary(rule)."
        expected = "real numbers for this rule"
        raise RuleError("leaf", where, f"dtype {leaf.dtype}", expected, fix) from cause
    way, what = "", "rule" if "<" in name else f"rule {name}"
    if "unexpected keyword argument" in got and not hasattr(rule.update, "around"):
        way = "optax's wrappers give extra arguments to all rules inside, also to those that take "
        way += "others: join them with ts.rules.chain or ts.rules.partition."
    raise RuleError(what, "setup()", got, "updates like the params", way) from cause


def takes_rows(update: Function, params: PyTree) -> bool:
    """Whether `update(grads)` makes updates like params of the gradients of rows.

    It returns the state before, updates, and the state after.
    `optax.contrib.differentially_private_aggregate` does so.
    """
    rows = jax.tree.map(lambda p: jax.ShapeDtypeStruct((3, *p.shape), p.dtype), params)
    try:
        before, updates, after = jax.eval_shape(update, rows)
        return not (_unlike(updates, params, "updates") or _unlike(after, before, "opt_state"))
    except Exception:
        return False


def _traced(rule, params: PyTree, grads: PyTree = None) -> tuple[Any, Any, Any]:
    """The shapes of the state before an update, of the updates, and of the state after it."""
    wide = lambda x: x.astype(trees.wide_dtype(x))
    loss = lambda p, *_, **__: sum(jnp.sum(wide(jnp.abs(x))) for x in jax.tree.leaves(p))
    extra = {"value_fn": loss, "obj_fn": loss, "grad_fn": lambda p, *_: jax.grad(loss)(p)}
    extra = {name: accepting(f, ("step", "weight", *SEARCHES)) for name, f in extra.items()}
    given = lambda p, step, x: dict(step=step, weight=x, value=x, grad=p, **extra)
    run = lambda g, s, p, step, x: rule.update(g, s, p, **given(p, step, x))
    numbers = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((), jnp.float32)
    before = jax.eval_shape(rule.init, params)
    grads = params if grads is None else grads
    return before, *jax.eval_shape(run, grads, before, params, *numbers)


def _unlike(new: PyTree, old: PyTree, root: str) -> str:
    """How a tree differs from another one in structure or shape; "" if it does not."""
    if difference := trees.first_difference(new, old, root):
        return difference
    for (where, x), y in zip(trees.leaves_at(root, new), jax.tree.leaves(old), strict=True):
        if x.shape != jnp.shape(y):
            return f"at {where}: got {trees.describe(x)}, expected {trees.describe(y)}"
    return ""


# optax's that work on some shapes only, or not with the defaults of their arguments
_UNSURE = ("sm3", "scale_by_muon", "scale_by_distance_over_gradients")


def _is_ours(update: Any) -> bool:
    """Whether an update is made of rules that are known to work."""
    if isinstance(update, LiveUpdate):
        return is_known(update.live.factory) and update.live.title not in _UNSURE
    if not type(update).__module__.startswith("tsunax.") or hasattr(update, "around"):
        return False
    return all(map(_is_ours, getattr(update, "updates", None) or [getattr(update, "update", None)]))


def missing(error: Exception) -> list[str]:
    """The names of the missing arguments because of which a call failed."""
    if isinstance(error, ValueError):  # of optax's own, for those with a default
        return re.findall(r"^`?(\w+)`? must be provided", str(error))
    found = re.search(r"missing \d+ required \S+ arguments?: (.*)", str(error))
    return re.findall(r"'(\w+)'", found[1]) if isinstance(error, TypeError) and found else []


def _raised_by(error: BaseException, rule) -> str:
    """The factory of the innermost update in the traceback of an exception."""
    names = [name_of_update(rule.update)]
    for frame, _ in traceback.walk_tb(error.__traceback__):
        outer, _, inner = frame.f_code.co_qualname.partition(".<locals>.")
        names += [outer] if inner in ("update", "update_fn") else []
    return names[-1]


def _meant(rule) -> str:
    if hasattr(rule, "gradient_transformation"):  # of `optax.MultiSteps`
        return "Call rule.gradient_transformation(), or use ts.rules.accumulate(rule, every=n)."
    if isinstance(rule, LiveFactory) or inspect.isfunction(rule):
        first = next(iter(inspect.signature(rule).parameters), "")
        return f"Call it: {rule.__name__}({first and first + '=...'})."
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
