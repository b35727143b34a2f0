"""The training state: everything the next step needs, as one value.

    params, rule --setup--> TrainState --step--> TrainState --step--> ...

Arrays are its leaves; functions are its static part (`Plan`). It knows nothing of losses, batches
or loops.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import sys
import threading
import weakref
from dataclasses import dataclass
from typing import Any, ClassVar, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from tsunax import guard, reproduce
from tsunax._core import checks, patterns, trees
from tsunax.averages import as_average
from tsunax.errors import (
    ParamsError,
    RuleError,
    StateError,
    TsunaxError,
    WrongTypeError,
    message,
    told,
)
from tsunax.precision import Policy, as_loss_scale, as_policy, cast, cast_like
from tsunax.rules import live_rules, number_table

_PLANS: weakref.WeakValueDictionary = weakref.WeakValueDictionary()
_LOCK = threading.Lock()


class Plan:
    """The static part of a state: the rule without its numbers, which leaves it trains, in which
    precision.

    Interned: equal plans are one object, so that jit compares identities when it looks for its
    program.
    """

    init: Any  # the rule's init, its numbers left out: only ever traced for shapes
    update: Any
    selected: (
        tuple[bool, ...] | None
    )  # one flag per leaf of params, true if the rule trains it; None: all of them
    precision: Policy | None
    overwritten: (
        tuple[bool, ...] | None
    )  # one flag per leaf, true if its gradient replaces it; None: none of them

    def __new__(cls, init, update, selected, precision=None, overwritten=None):
        key = init, update, selected, precision, overwritten
        with _LOCK:
            plan = _PLANS.get(key)
            if plan is None:
                plan = object.__new__(cls)
                plan.init, plan.update, plan.selected, plan.precision, plan.overwritten = key
                _PLANS[key] = plan
        return plan

    def __reduce__(self):
        return Plan, (self.init, self.update, self.selected, self.precision, self.overwritten)

    @functools.cached_property
    def moving(self) -> tuple[bool, ...] | None:
        """One flag per leaf of params, true if a step may change it; None: all of them."""
        if self.overwritten is None or self.selected is None:
            return self.selected
        return tuple(a or b for a, b in zip(self.selected, self.overwritten, strict=True))

    def __copy__(self):
        return self

    def __deepcopy__(self, _):
        return self


# ------------------------------------------------------------------------------------------- fields
#
# A field says once, where it is declared, what a step does with it. Donation, assembly, the
# verdict's choice, sharding, printing and `replace` are derived from that; nothing else lists the
# fields of a state.


def field(*, moves: str = "", like: str = "", shows: str = "") -> Any:
    """Declare a field of a state.

    Args:
      moves: "step" for what a step changes if its verdict applies it; "record" for what it changes
        in any case, the guard's own record; "" for what is only read. Both that move are donated.
      like: what its leaves follow: "params", "trained" (its first leaves are like those that the
        rule trains: cuts, freezing and shardings go by leaf), "rule" (the state of the rule, of
          which each leaf has its owner), "free"
        (any structure, as of model state), or "" (whole on each device).
      shows: the word for its bytes in `repr`; "" for none.
    """
    for name, given, known in (("moves", moves, _MOVES), ("like", like, _LIKE)):
        if given not in known:
            raise StateError(
                patterns.unknown(name, "field()", str(given), [repr(one) for one in known])
            )
    return dataclasses.field(metadata={"moves": moves, "like": like, "shows": shows})


_MOVES, _LIKE = ("", "step", "record"), ("", "params", "trained", "rule", "free")


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(field,))
def state_class(cls):
    """Register a class of states: `TrainState`, or one that adds fields of its own to it.

    @state_class
    class Lagged(TrainState):
        lag: Any = field(moves="step", like="trained", shows="lag")

    state = Lagged.of(ts.setup(rule, params), lag=params)
    """
    cls = dataclass(frozen=True, eq=False, init=False, repr=False)(cls)
    cls._fields = tuple(f for f in dataclasses.fields(cls) if f.name != "plan")
    names = [f.name for f in cls._fields]
    cls._moving = tuple(f.name for f in cls._fields if f.metadata["moves"] and f.name != "params")
    cls._still = tuple(f.name for f in cls._fields if not f.metadata["moves"])
    cls._take = operator.attrgetter(*cls._moving), operator.attrgetter(*cls._still)
    return jax.tree_util.register_dataclass(cls, names, ["plan"])


@state_class
class TrainState:
    """What a step carries to the next one. Made by `setup`; edited by `adjust`, `freeze`,
    `replace`.
    """

    clock: Any = field(
        moves="record"
    )  # int32 (4,): the counts below. One array: a step pays for each that it returns
    params: Any = field(
        moves="step", like="params", shows="params"
    )  # the full tree, as given to setup
    opt_state: Any = field(
        moves="step", like="rule", shows="optimizer"
    )  # the rule's own, of the trained leaves
    model_state: Any = field(
        moves="step", like="free"
    )  # what the model carries without a gradient (batch statistics)
    key: Any = field()  # PRNG key, never advanced: fold in `calls`
    numbers: Any = field()  # the live hyperparameters (`_hoist.Numbers`); None if the rule has none
    frozen: Any = field()  # uint32 words, one bit per trained leaf; None until the first freeze
    masters: Any = field(
        moves="step", like="trained"
    )  # f32, if `params` are stored rounded; else None
    average: Any = field(
        moves="step", like="trained"
    )  # `averages.Average` of the trained leaves, or None
    loss_scale: Any = field(moves="record")  # `precision.LossScale`, or None
    plan: Plan = field()

    _fields: ClassVar[tuple[dataclasses.Field, ...]]  # all but the plan, as declared
    _moving: ClassVar[tuple[str, ...]]  # their names, but for params, of which a part moves
    _still: ClassVar[tuple[str, ...]]
    _take: ClassVar[tuple[operator.attrgetter, operator.attrgetter]]  # both, off a state

    def __init__(self, **fields):
        self.__dict__.update(
            fields
        )  # a frozen dataclass's own __init__ takes three times as long, at every step

    @classmethod
    def of(cls, state: TrainState, **more) -> TrainState:
        """A state of this class with the fields of another one, and copies of more.

        StateError for other names.
        """
        own_names = [f.name for f in cls._fields if not hasattr(state, f.name)]
        for name in [*own_names, *more]:
            if name not in more or name not in own_names:
                got = f"none for {name!r}" if name in own_names else repr(name)
                raise StateError(
                    message("field", f"{cls.__name__}.of()", got, ", ".join(own_names) or "no more")
                )
        kept = {f.name: getattr(state, f.name) for f in dataclasses.fields(state)}
        return cls(**kept, **{name: jax.tree.map(own, value) for name, value in more.items()})

    def only(self, *names: str) -> TrainState:
        """The state with None in all other fields."""
        return type(self)(
            **{f.name: getattr(self, f.name) if f.name in names else None for f in self._fields},
            plan=self.plan,
        )

    @property
    def step(self) -> Any:
        """int32: updates applied. The clock of schedules, averages and logs."""
        return _tick(self.clock, 0)

    @property
    def calls(self) -> Any:
        """int32: every call, rejected ones too. Never rolls back; keys come from it."""
        return _tick(self.clock, 1)

    @property
    def rejected(self) -> Any:
        """int32: calls whose step was rejected by its verdict."""
        return _tick(self.clock, 2)

    @property
    def rejected_in_a_row(self) -> Any:
        """int32: how many of them since the last call that was not."""
        return _tick(self.clock, 3)

    def replace(self, **fields) -> TrainState:
        """The state with some fields exchanged. Arrays given are copied, so that yours survive
        donation.

        Raises StateError for unknown fields, for another structure, shape or dtype (but of
        `model_state`), and for a state that was donated.
        """
        known = [*COUNTS, *(f.name for f in self._fields if f.name != "clock")]
        for name, value in fields.items():
            if name not in known:
                raise StateError(patterns.unknown("field", "replace()", name, known))
            _check_field(self, name, value)
        check_state(self, "replace()")
        if "key" in fields:
            fields["key"] = as_key(fields["key"], "replace()")
        clock = self.clock
        if self.masters is not None and "masters" in fields:
            fields.setdefault(
                "params", with_rest(self, cast_like(fields["masters"], trained_part(self)))
            )
        elif self.masters is not None and "params" in fields:
            fields["masters"] = cast_like(_part(fields["params"], self.plan.selected), self.masters)
        for at, name in enumerate(COUNTS):
            if name in fields:
                # no scatter: on a mesh with explicit axes that wants the sharding of the value
                # spelled out
                clock = jnp.where(
                    np.arange(len(COUNTS)) == at,
                    jnp.asarray(fields.pop(name), jnp.int32)[..., None],
                    clock,
                )
        fields = {name: _like(value, getattr(self, name)) for name, value in fields.items()}
        if "params" in fields:  # a step asks the clock where a state lies
            clock = beside(trained_part(dataclasses.replace(self, params=fields["params"])), clock)
        return dataclasses.replace(self, clock=clock, **fields)

    def __repr__(self) -> str:
        return describe(self)


COUNTS = ("step", "calls", "rejected", "rejected_in_a_row")


def _like(new, old):
    """Copies of arrays, on the mesh where the old ones lie."""
    new = jax.tree.map(own, new)
    if jax.tree.structure(new) != jax.tree.structure(old):
        return new

    def one(x, y):
        moves = isinstance(x, jax.Array) and not trees.is_traced(x) and not x.committed
        spread = (
            isinstance(y, jax.Array) and not trees.is_traced(y) and len(y.sharding.device_set) > 1
        )
        return jax.device_put(x, y.sharding) if moves and spread and x.ndim == y.ndim else x

    return jax.tree.map(one, new, old)


def _tick(clock, i):
    if isinstance(clock, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(clock.shape[:-1], clock.dtype)
    if trees.is_gone(clock):
        raise StateError(donated("TrainState." + COUNTS[i]))
    return clock[..., i]


def trainable(state: TrainState):
    """The part of `state.params` that is trained: the same containers, `None` where a leaf is not
    selected.

    Gradients have this structure.

    >>> import tsunax as ts
    >>> params = {"encoder": jnp.ones(2), "head": jnp.ones(1)}
    >>> state = ts.setup(ts.rules.sgd(0.1), params, trainable="head")
    >>> ts.trainable(state)
    {'encoder': None, 'head': Array([1.], dtype=float32)}
    """
    check_state(state, "trainable()")
    return trained_part(state)


def trained_part(state: TrainState):
    """`trainable` without a look at the state: every step asks for it."""
    return _part(state.params, state.plan.selected)


def with_rest(state: TrainState, trained):
    """The inverse: the full tree of params with these leaves in the place of the trained ones."""
    return joined(trained, state.params, state.plan.selected)


def _part(params, flags):
    return params if flags is None else trees.partition(params, flags)[0]


def joined(part, params, flags):
    """`params` with other leaves where flags are true; None: everywhere."""
    return part if flags is None else trees.merge(part, trees.partition(params, flags)[1])


def overwritten_part(state: TrainState):
    """The leaves of params that their gradient replaces: model state, in all but the place where
    flax keeps it.
    """
    return None if state.plan.overwritten is None else _part(state.params, state.plan.overwritten)


def with_overwritten(state: TrainState, params, new):
    """The full tree with new values of the leaves that their gradient replaces; None: as it is."""
    return params if new is None else joined(new, params, state.plan.overwritten)


def split(state: TrainState) -> tuple[tuple, tuple]:
    """What a step changes (donated, and returned by its program), and what it only reads."""
    params, rest = state.params, None
    if state.plan.moving is not None:
        params, rest = trees.partition(state.params, state.plan.moving)
    moving, still = state._take
    return (params, *moving(state)), (rest, *still(state))


def assemble(kind: tuple, moving: tuple, still: tuple) -> TrainState:
    """The inverse of `split`; `kind` is the class of the state and its plan."""
    cls, plan = kind
    fields = dict(zip(cls._moving, moving[1:], strict=True))
    fields.update(zip(cls._still, still[1:], strict=True))
    rest = still[0]
    return cls(
        params=moving[0] if rest is None else trees.merge(moving[0], rest), **fields, plan=plan
    )


def base(state: TrainState):
    """The trained part in the precision in which the rule sees it: float32 where params are stored
    rounded.
    """
    return _seen(trained_part(state), state.masters, state.plan.precision)


def _seen(trained, masters, policy):
    if masters is not None:
        return masters
    return cast(trained, "float32") if policy is not None and policy.stochastic else trained


def averaged(state: TrainState) -> TrainState:
    """The state with the averaged parameters in the place of the trained ones: what evaluates may
    take it.

    Raises StateError for a state without an average.

    >>> import tsunax as ts
    >>> state = ts.setup(ts.rules.sgd(1.0), {"w": jnp.zeros(2)}, ema=0.75)
    >>> state, _ = ts.update(state, {"w": -jnp.ones(2)})
    >>> ts.averaged(state).params["w"]
    Array([0.25, 0.25], dtype=float32)
    """
    check_state(state, "averaged()")
    mine = jax.tree.map(own, _average_of(state, "averaged()"))  # the average lives on beside them
    masters = None if state.masters is None else jax.tree.map(own, state.average.params)
    return dataclasses.replace(state, params=with_rest(state, mine), masters=masters)


def averaged_params(state: TrainState, where: str):
    """The full tree with the average in it, in the dtypes of the params."""
    return with_rest(state, _average_of(state, where))


def _average_of(state: TrainState, where: str):
    if state.average is None:
        raise StateError(
            message("average", where, "a state without one", "one", "Give setup(..., ema=0.999).")
        )
    return cast_like(state.average.params, trained_part(state))


def in_precision(state: TrainState, params, *, train: bool = True):
    """What the loss function sees of params."""
    policy, plan = state.plan.precision, state.plan
    if policy is None:
        return params
    low = cast(params, policy.seen(train))
    return (
        low
        if plan.overwritten is None
        else joined(_part(params, plan.overwritten), low, plan.overwritten)
    )


@patterns.suggests_names
def setup(
    rule: optax.GradientTransformation,
    params,
    *,
    key=None,
    model_state=None,
    trainable="**",
    freezable: bool = False,
    ema=None,
    precision=None,
    loss_scale=None,
    device=None,
    copy: bool = True,
) -> TrainState:
    """Make the training state of `params` under `rule`.

    In plain JAX: `opt_state = rule.init(params)`, a step counter, and a tuple around them. Pure: it
    also runs under jit, vmap, scan and eval_shape.

    Args:
      rule: any optax transformation. Those of `tsunax.rules` have live numbers.
      params: any pytree of arrays. What `trainable` selects must be float or complex.
      key: typed PRNG key or int seed, for loss functions that name `key`.
      model_state: any pytree that the model updates without a gradient (batch statistics).
      trainable: which leaves to train: a glob over paths (`"head/**"`), a list with `!` exclusions,
        a predicate `f(path, leaf)`, or a tree of bools. What it leaves out has no gradient, moment,
        copy or donation.
      freezable: make room for run-time freezing now, so that not even the first `freeze` compiles.
      ema: an average of the trained leaves that every applied step moves, for `averaged(state)`: a
        decay, or one of `averages.ema`, `polyak`, `swa`.
      precision: what the loss function computes in while training: "bfloat16", "float16", "float32"
        or a `precision.Policy`. Targets stay as they are, and evaluations compute in float32.
      loss_scale: "dynamic", a number or a `precision.LossScale`; float16 has a dynamic one if none
        is given.
      device: a `jax.Device` or `Sharding` to put the state on; by default it stays where params
        are.
      copy: False hands the arrays over: the first step donates them, and your own references die.

    Raises:
      ParamsError: no parameters, or a selected leaf that cannot be trained (its path, and why).
      RuleError, WrongTypeError: not a rule, or a rule that cannot work on these leaves.
      PatternError: `trainable` matches nothing.

    >>> import tsunax as ts
    >>> state = ts.setup(ts.rules.adam(1e-3), {"w": jnp.zeros((2, 3)), "b": jnp.zeros(3)})
    >>> int(state.step), ts.hyperparams(state)["learning_rate"]
    (0, 0.001)
    """
    swapped = isinstance(params, optax.GradientTransformation)
    live_rules.check_rule(rule, "setup()", "The order is setup(rule, params)." if swapped else "")
    rule = live_rules.with_extra(rule)
    _check_setup(params, device, freezable=freezable, copy=copy)
    _tell_flax()
    key = as_key(key, "setup()")
    checks.check_arrays(model_state, "model_state")
    flags = _select(trainable, params)
    checks.check_params(params, flags)
    _check_concrete(params, flags)
    if not copy:
        checks.check_aliases(params, flags, model_state=model_state)
    if device is not None:
        params, model_state = jax.device_put((params, model_state), device)

    policy = as_policy(precision, "setup()")
    average = as_average(ema, "setup()")
    scale = as_loss_scale(loss_scale, policy, "setup()")

    leaves, treedef = jax.tree.flatten(params)
    take = own if copy else strong
    # what is not trained is no copy, but a NumPy array would be moved to the device by every step
    params = treedef.unflatten(
        [take(x) if flag else strong(x) for x, flag in zip(leaves, flags, strict=True)]
    )
    overwritten = _overwritten(params, flags)
    if overwritten is not None:  # no rule ever sees them
        flags = tuple(on and not replaced for on, replaced in zip(flags, overwritten, strict=True))
        if not any(flags):
            raise _selects_nothing(
                f"{patterns.show(trainable)}, which selects only what gradients overwrite"
            )
    plan = Plan(
        live_rules.blank(rule.init), rule.update, None if all(flags) else flags, policy, overwritten
    )
    trained, masters = _stored(_part(params, plan.selected), policy, key)
    params = joined(trained, params, plan.selected)
    seen = _seen(trained, masters, policy)

    opt_state = _unalias(_start(rule, seen), (trained, masters))
    live_rules.check_update(rule, seen)
    opt_state, numbers = number_table.hoist(opt_state)
    place = functools.partial(beside, trained)
    words = np.zeros(-(-sum(flags) // 32), np.uint32) if freezable else None
    return TrainState(
        clock=place(np.zeros(len(COUNTS), np.int32)),
        params=params,
        opt_state=place(opt_state) if device is None else jax.device_put(opt_state, device),
        model_state=place(jax.tree.map(take, model_state)),
        key=place(key),
        numbers=place(numbers),
        frozen=place(words),
        masters=masters,
        average=None if average is None else average.of(seen),
        loss_scale=place(scale),
        plan=plan,
    )


def _overwritten(params, flags) -> tuple[bool, ...] | None:
    """Which of the selected leaves are replaced by their gradient: flax's fp8 scales and amax
    histories.
    """
    named = jax.tree_util.tree_flatten_with_path(params)[0]
    found = [
        on and "_overwrite_with_gradient" in trees.names(path)
        for (path, _), on in zip(named, flags, strict=True)
    ]
    return tuple(found) if any(found) else None


def _stored(trained, policy: Policy | None, key) -> tuple[Any, Any]:
    """The trained part as a state stores it, and its master copies."""
    if policy is None:
        return trained, None
    if policy.stochastic and key is None:
        fix = "Rounding draws random numbers: setup(..., key=0)."
        raise StateError(message("key", "setup(precision=...)", "None", "a key", fix))
    masters = jax.tree.map(own, cast(trained, "float32")) if policy.masters else None
    return policy.to_param(trained), masters


def own(x):
    """A copy of an array that nobody else holds, strongly typed; what is no number stays as it
    is.
    """
    return strong(jnp.array(x, copy=True)) if _is_number(x) else x


def strong(x):
    """An array without a weak type: a weakly typed leaf would come back strong and compile the step
    twice.
    """
    if not _is_number(x):
        return x
    x = jnp.asarray(x)
    return jax.lax.convert_element_type(x, x.dtype) if getattr(x, "weak_type", False) else x


def _is_number(x) -> bool:
    return trees.is_array(x) or isinstance(x, (bool, int, float, complex))


def donated(where: str) -> str:
    fix = "Go on with what that step returned, or keep it with train_step(..., donate=False)."
    return message(
        "state",
        where,
        "one that was donated to an earlier step",
        "one whose buffers are there",
        fix,
    )


def check_state(state, where: str, second=None) -> None:
    """Raise unless `state` is a TrainState that was not donated; `second` is what was given after
    it.
    """
    if isinstance(state, TrainState):
        if trees.is_gone(state.clock):
            raise StateError(donated(where))
        return
    fix = "Make one: ts.setup(rule, params)."
    if isinstance(second, TrainState):
        fix = "The state comes first."
    elif isinstance(state, tuple) and state and isinstance(state[0], TrainState):
        fix = "A step returns two things: state, info = step(state, batch)."
    raise WrongTypeError(message("state", where, trees.describe(state), "a TrainState", fix))


def as_key(key, where: str):
    """The PRNG key that a user gave, as it is, or from an int seed."""
    expected = "an int seed or a key, as jax.random.key(0)"
    if key is None or trees.is_traced(key) or isinstance(key, jax.ShapeDtypeStruct):
        return key
    if isinstance(key, (int, np.integer)) and not isinstance(key, bool):
        if not -(2**63) <= key < 2**64:
            raise StateError(message("key", where, key, "a seed of at most 64 bits"))
        return reproduce.key_of(int(key))
    if isinstance(key, jax.Array):
        if key.is_deleted():
            raise StateError(message("key", where, "a deleted array", expected))
        typed = trees.is_key(key)
        if typed and key.ndim == 0:
            return key
        if key.dtype == np.uint32 and key.ndim == 1:
            if key.shape != (words := jax.eval_shape(lambda: jax.random.PRNGKey(0)).shape):
                raise StateError(
                    message(
                        "key", where, trees.describe(key), f"uint32{list(words)}, or a typed key"
                    )
                )
            return key
        if typed or key.dtype == np.uint32:
            raise StateError(
                message("key", where, trees.describe(key), "one key", "Pick one of them: keys[0].")
            )
    raise WrongTypeError(message("key", where, trees.describe(key), expected))


def _check_field(state: TrainState, name: str, value) -> None:
    """Raise for a value that `replace` cannot put into this field."""
    if name in COUNTS:
        is_int = isinstance(value, int) or (
            trees.is_array(value) and jnp.issubdtype(value.dtype, np.integer)
        )
        fits = (
            is_int
            and not isinstance(value, bool)
            and np.shape(value) in ((), np.shape(state.clock)[:-1])
        )
        if not fits or (
            not trees.is_traced(value) and not np.all((value >= 0) & (value <= guard.LIMIT))
        ):
            raise StateError(
                message(name, "replace()", trees.describe(value), f"an int in [0, {guard.LIMIT}]")
            )
    elif name == "frozen":
        if value is not None:
            words = np.empty(-(-len(jax.tree.leaves(trained_part(state))) // 32), np.uint32)
            like = words if state.frozen is None else state.frozen
            checks.check_like(name, value, like, "Use ts.freeze and ts.thaw.")
    elif name != "key":
        like = next(f.metadata["like"] for f in state._fields if f.name == name)
        if like != "free":
            checks.check_like(name, value, getattr(state, name))
        checks.check_arrays(value, name)
        if name == "loss_scale":
            as_loss_scale(value, None, "replace()")


def _check_setup(params, device, **flags) -> None:
    checks.check_flags("setup()", **flags)
    if isinstance(params, TrainState):
        raise WrongTypeError(
            message("params", "setup()", "a TrainState", "a pytree of arrays", "Give state.params.")
        )
    checks.check_keys(params)
    if device is not None and not isinstance(device, (jax.Device, jax.sharding.Sharding)):
        fix = "For example jax.devices()[0]."
        raise WrongTypeError(
            message("device", "setup()", trees.describe(device), "a jax.Device or Sharding", fix)
        )


def _tell_flax() -> None:
    """Let `flax.serialization.to_bytes(state)`, if flax is loaded, say what saves a state."""
    if (flax := sys.modules.get("flax.serialization")) is not None:
        flax.register_serialization_state(TrainState, _no_flax_bytes, _no_flax_bytes, override=True)


def _no_flax_bytes(state, *_):
    fix = (
        "Save a state with ts.Checkpoints(path), and state.params with flax or "
        "ts.exchange.save(path, params)."
    )
    raise WrongTypeError(
        message("tree", "flax.serialization", "a TrainState", "a tree of arrays", fix)
    )


def _check_concrete(params, flags) -> None:
    for (path, leaf), flag in zip(
        jax.tree_util.tree_flatten_with_path(params)[0], flags, strict=True
    ):
        if flag and isinstance(leaf, jax.ShapeDtypeStruct):
            got = f"a ShapeDtypeStruct, {trees.describe(leaf)}"
            fix = "For shapes alone: jax.eval_shape(lambda p: ts.setup(rule, p), params)."
            raise ParamsError(
                message("leaf", trees.access_str("params", path), got, "an array", fix)
            )


def _select(where, params) -> tuple[bool, ...]:
    if not jax.tree.leaves(params):
        raise trees.no_parameters("params", params)
    flags = patterns.select(where, params, allow_empty=True)
    if not any(flags):
        raise _selects_nothing(f"{patterns.show(where)}, which selects nothing")
    return flags


def _selects_nothing(got: str) -> ParamsError:
    return ParamsError(message("trainable", "setup()", got, "at least one leaf to train"))


def _start(rule, trained):
    """`rule.init(trained)`; what it raises becomes a RuleError, with the cause."""
    try:
        return rule.init(trained)
    except TsunaxError:
        raise
    except Exception as error:
        raise RuleError(
            message("rule", "setup()", told(error), "one that can start from these params")
        ) from error


def _unalias(opt_state, params):
    """Copy the leaves of a new optimizer state that share a buffer with the params or with each
    other.

    Averaging rules start from the params themselves; donating one buffer twice is an error.
    """
    seen = {id(x) for x in jax.tree.leaves(params)}

    def fresh(x):
        if trees.is_traced(x):
            return x
        if id(x) in seen:
            x = own(x)
        seen.add(id(x))
        return strong(x)

    return jax.tree.map(fresh, opt_state)


def beside(params, tree):
    """Put arrays that are not there yet on the devices where the params live, whole on each of
    them.
    """
    placed = (
        p for p in jax.tree.leaves(params) if isinstance(p, jax.Array) and not trees.is_traced(p)
    )
    first = next(placed, None)
    sharding, committed = (None, False) if first is None else (first.sharding, first.committed)
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec())

    def put(x):
        x = x if trees.is_traced(x) else jnp.asarray(x)
        if sharding is None or trees.is_traced(x):
            return x
        # an uncommitted array comes back from the first step committed, and would compile the
        # second one anew
        here = sharding.device_set == x.sharding.device_set and x.committed >= committed
        return x if here else jax.device_put(x, sharding)

    return jax.tree.map(put, tree)


# ------------------------------------------------------------------------------------ what one sees


def frozen_flags(state: TrainState) -> np.ndarray:
    """One bool per trained leaf, on the host; of a population for each of its members."""
    n = len(jax.tree.leaves(trained_part(state)))
    if state.frozen is None:
        return np.zeros(n, bool)
    words = np.asarray(state.frozen)
    return (words[..., np.arange(n) // 32] >> np.arange(n) % 32 & 1).astype(bool)


def frozen_words(flags) -> np.ndarray:
    """The inverse: uint32 words, one bit per trained leaf."""
    words = np.zeros(-(-len(flags) // 32), np.uint32)
    for k, on in enumerate(flags):
        words[k // 32] |= np.uint32(int(on) << (k % 32))
    return words


def describe(state: TrainState) -> str:
    """The text of `repr(state)`: tree, counts, hyperparameters, frozen parts, bytes, placement."""
    leaves, kind = jax.tree.leaves(state), type(state).__name__
    if any(map(trees.is_traced, leaves)):
        return f"{kind}(traced, {len(leaves)} arrays)"
    if any(isinstance(x, jax.Array) and x.is_deleted() for x in leaves):
        return f"{kind}(donated, {len(leaves)} arrays)"
    concrete = all(map(trees.is_array, leaves)) and jnp.ndim(state.clock) == 1
    head = f"step={int(state.step)}, calls={int(state.calls)}" if concrete else "abstract"
    if jnp.ndim(state.clock) > 1:
        head = f"stacked {jnp.shape(state.clock)[:-1]}"
    lines = [f"{kind}({head})", *_tree_rows(state, concrete)]
    if concrete and state.numbers is not None:
        lines.append(
            "  " + ", ".join(f"{k}={v:.6g}" for k, v in state.numbers.named(state.step).items())
        )
    place = f", on {_devices(leaves)}" if all(map(trees.is_array, leaves)) else ""
    sizes = [
        f"{f.metadata['shows']} {_bytes(getattr(state, f.name))}"
        for f in state._fields
        if f.metadata["shows"]
    ]
    return "\n".join([*lines, f"  {', '.join(sizes)}{place}"])


def _tree_rows(state: TrainState, concrete: bool) -> list[str]:
    """A line per leaf of params: path, type, whether it is trained."""
    named = trees.leaves_with_names(state.params)
    n = len(named)
    selected, replaced = state.plan.selected or (True,) * n, state.plan.overwritten or (False,) * n
    frozen = iter(frozen_flags(state) if concrete else [False] * n)
    rows = []
    for (name, _, leaf), on, new in zip(named, selected, replaced, strict=True):
        note = (
            ("overwritten" if new else "not trained")
            if not on
            else "frozen"
            if next(frozen)
            else ""
        )
        rows.append(
            ("/".join(name) or "<root>", f"{trees.dtype_of(leaf)}{list(jnp.shape(leaf))}", note)
        )
    if len(rows) > 24:
        rows = [*rows[:12], (f"... {len(rows) - 20} more", "", ""), *rows[-8:]]
    a, b = (max(len(row[i]) for row in rows) for i in (0, 1))
    return [f"  {name:<{a}}  {kind:<{b}}  {note}".rstrip() for name, kind, note in rows]


def _bytes(tree) -> str:
    arrays = [x for x in jax.tree.leaves(tree) if trees.dtype_of(x) is not None]
    return trees.bytes_str(
        float(sum(np.prod(jnp.shape(x)) * trees.dtype_of(x).itemsize for x in arrays))
    )


def _devices(leaves) -> str:
    devices = sorted(
        {d for x in leaves if isinstance(x, jax.Array) for d in x.devices()}, key=lambda d: d.id
    )
    if not devices:
        return "the host"
    return str(devices[0]) if len(devices) == 1 else f"{len(devices)} devices ({devices[0]} ...)"
