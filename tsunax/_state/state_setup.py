"""The arguments of `setup` and `TrainState.replace`: checked, copied, and made into fields.

A step does not run this file. The methods of `TrainState` call it, so it does not import the class.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tsunax import guard, reproduce
from tsunax._core import Extra, checks, patterns, placement, trees
from tsunax._state import COUNTS, trained_count
from tsunax.averages import as_average
from tsunax.errors import (
    ParamsError,
    RuleError,
    StateError,
    TsunaxError,
    WrongTypeError,
    told,
    unknown,
)
from tsunax.precision import Policy, as_loss_scale, cast
from tsunax.rules.leaf_owners import owners_of


def check_setup(params, model_state, trainable, copy, freezable) -> tuple[bool, ...]:
    """Raise for bad arguments of `setup`; returns which leaves of params are selected."""
    checks.check_flags("setup()", freezable=freezable, copy=copy)
    checks.check_arrays(model_state, "model_state")
    flags = patterns.select(trainable, params, "setup(trainable=)")
    checks.check_params(params, flags)
    if not copy:
        checks.check_aliases(params, flags, model_state=model_state)
    return flags


def without_overwritten(params, flags, trainable) -> tuple[Any, tuple[bool, ...] | None]:
    """Flags of the leaves that the rule trains, and of selected leaves that gradients replace."""
    pairs = zip(trees.paths(params), flags, strict=True)
    replaced_flags = tuple(flag and trees.is_overwritten(path) for path, flag in pairs)
    if not any(replaced_flags):
        return flags, None
    flags = tuple(
        flag and not replaced for flag, replaced in zip(flags, replaced_flags, strict=True)
    )
    if not any(flags):
        got = f"{patterns.where_text(trainable)}, which selects only what gradients overwrite"
        raise ParamsError("trainable", "setup()", got, "at least one leaf to train")
    return flags, replaced_flags


def check_rounding(policy: Policy | None, key: Any, where: str) -> None:
    """Raise StateError for a policy that rounds stochastically, if there is no key."""
    if key is None and policy and (policy.stochastic or policy.moments != "float32"):
        fix = "Rounding draws random numbers: setup(..., key=0)."
        raise StateError("key", where, "None", "a key", fix)


def as_stored(trained, policy: Policy | None, key) -> tuple[Any, Any]:
    """The trained part as a state stores it, and its master copies."""
    if policy is None:
        return trained, None
    check_rounding(policy, key, "setup(precision=...)")
    masters = jax.tree.map(trees.own, cast(trained, "float32")) if policy.masters else None
    return policy.to_param(trained), masters


def opt_state_of(rule: Any, trained: Any, state_arrays: Any) -> Any:
    """`rule.init(trained)`. No leaf shares a buffer with `state_arrays` or with another leaf."""
    # A buffer that is donated twice is an error.
    buffer_ids = {id(x) for x in jax.tree.leaves(state_arrays)}

    def fresh(x):
        if trees.is_traced(x):
            return x
        if id(x) in buffer_ids or trees.is_key(x) or trees.dtype_of(x) == np.uint32:
            x = trees.own(x)
        buffer_ids.add(id(x))
        return trees.strong(x)

    return jax.tree.map(fresh, _first_state(rule, trained))


def _first_state(rule: Any, trained: Any) -> Any:
    """`rule.init(trained)`. An error of a user's or of optax's function gets the rule's name."""
    try:
        return rule.init(trained)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        if isinstance(error, TsunaxError | jax.errors.JAXTypeError):
            raise
        from tsunax.rules.inspecting import name_of_update

        got, expected = f"{told(error)} from its init", "a state for these params"
        fix = "Leaves that it does not train are None: freeze them." if "NoneType" in got else ""
        title = f"rule {name_of_update(rule.update)}"
        raise RuleError(title, "setup()", got, expected, fix) from error


def with_low_moments(opt_state: Any, plan: Any, params: Any) -> Any:
    """The state of a rule, as `init` returned it, with its moments in the dtype of the policy.

    A moment has the shape of its parameter, and is no copy of it: Prodigy and schedule-free rules
    need their copies exactly. Sums of a window are no moments: they stay float32.
    """
    from tsunax._core.dataflow import dependent_results
    from tsunax.rules import accumulation

    leaves, treedef = jax.tree.flatten(opt_state)
    owners, shapes = owners_of(plan.init, opt_state, None, params), jax.tree.leaves(params)
    copies = dependent_results(plan.init, params)
    not_moments = copies, accumulation.windows_of_sums(opt_state), _exact(opt_state)
    no_moment = map(any, zip(*not_moments, strict=True))
    low, out = plan.precision.moments, []
    for x, owner, is_excluded in zip(leaves, owners, no_moment, strict=True):
        is_moment = not is_excluded and x.dtype == np.float32
        is_moment = is_moment and owner is not None and x.shape == shapes[owner].shape
        out.append(x.astype(low) if is_moment else x)
    return treedef.unflatten(out)


# Fields of states of rules that are no moments, though they may have the shape of a parameter:
# L-BFGS subtracts params and gradients of two steps, and the bases of SOAP are orthogonal.
_EXACT = {
    "ScaleByLBFGSState": optax.ScaleByLBFGSState._fields,
    "ScaleBySoapState": ("rows", "columns", "row_basis", "column_basis"),
}


def _exact(opt_state: Any) -> list[bool]:
    """For each leaf whether it belongs to a field of `_EXACT`."""
    has_exact_fields = lambda x: type(x).__name__ in _EXACT

    def flags(x):
        if not has_exact_fields(x):
            return False
        exact = lambda name: jax.tree.map(
            lambda _: name in _EXACT[type(x).__name__], getattr(x, name)
        )
        return x._replace(**{name: exact(name) for name in x._fields})

    return jax.tree.leaves(jax.tree.map(flags, opt_state, is_leaf=has_exact_fields))


def new_keys(state: Any, key: Any, where: str) -> Any:
    """`as_key`; for a population a key for each member, as given, or split from a single key."""
    check_rounding(state.plan.precision, key, where)
    members = np.shape(state.clock)[:-1]
    if not members or key is None:
        return as_key(key, where)
    is_key = isinstance(key, jax.Array) and (trees.is_key(key) or key.dtype == np.uint32)
    if is_key and key.shape[: len(members)] == members:
        checks.check_alive(key, where)
        return key
    return jax.random.split(as_key(key, where), members)


def as_key(key: Any, where: str) -> Any:
    """The PRNG key of a user, as it is, or made from an int seed."""
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
    expected = "an int seed or one key, as jax.random.key(0)"
    raise WrongTypeError("key", where, trees.describe(key), expected)


def first_values(fields: Extra, roles: dict[str, str], trained: Any, where: str) -> Extra:
    """The first values of fields like the trained leaves, or StateError for other leaves."""
    out, shapes = dict(fields), lambda tree: list(map(np.shape, jax.tree.leaves(tree)))
    expected = shapes(trained)
    for name, value in fields.items():
        if roles[name] == "average" and (average := as_average(value, where, name)) is not None:
            out[name] = average.starting_at(trained) if average.params is None else average
            value = out[name].params
        is_like = roles[name] in ("average", "trained") and value is not None
        if is_like and shapes(value)[: len(expected)] != expected:
            checks.check_like(name, value, trained, "Give ts.trainable(state).", "field")
    return out


def check_field(state: Any, name: str, value) -> None:
    """Raise for a value that `replace` cannot put into this field, or for an unknown field."""
    roles = {f.name: f.metadata["like"] for f in state._fields if f.name != "clock"}
    if name not in (*COUNTS, *roles):
        raise StateError(unknown("field", "replace()", name, [*COUNTS, *roles]))
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
        if roles[name] != "free":
            checks.check_like(name, value, getattr(state, name))
        checks.check_arrays(value, name)
        if name == "loss_scale":
            as_loss_scale(value, None, "replace()")


def copied_like(new, old):
    """Copies of the new arrays, on the mesh of the old arrays."""
    new = jax.tree.map(trees.own, new)
    if jax.tree.structure(new) != jax.tree.structure(old):
        return new

    def placed_like(x, y):
        moves = trees.is_placed(x) and not x.committed
        spread = trees.is_placed(y) and len(y.sharding.device_set) > 1
        moves = (moves and spread) or (trees.is_placed(y) and trees.is_offloaded(y))
        return jax.device_put(x, y.sharding) if moves and x.ndim == y.ndim else x

    return jax.tree.map(placed_like, new, old)


def masters_of(trained: Any, masters: Any) -> Any:
    """The masters of rounded leaves. A number that is the rounded old master keeps that master."""
    masters = jax.tree.map(_moved_beside, trees.on_device(masters), trained)
    trained = jax.tree.map(placement.moved_to, trained, masters)  # which `zero1` spreads further
    keep = lambda p, m, rounded: jnp.where(p == rounded, m, p.astype(m.dtype))
    return jax.tree.map(keep, trained, masters, trees.rounded_like(masters, trained))


def _moved_beside(master: Any, param: Any) -> Any:
    """The master on the devices of its parameter."""
    are_placed = trees.is_placed(master) and trees.is_placed(param)
    is_elsewhere = are_placed and master.devices() != param.devices()
    return jax.device_put(master, param.sharding) if is_elsewhere else master
