"""The training state: everything the next step needs, as one value.

    params, rule --setup--> TrainState --step--> TrainState --step--> ...

Arrays are its leaves; functions are its static part (`Plan`). This file uses no losses, batches or
loops.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownLambdaType=false, reportPrivateUsage=false
from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax  # pyright: ignore[reportMissingTypeStubs]
from jax.typing import ArrayLike

from tsunax._core import Device, Function, Maybe, PyTree, Where, checks, trees
from tsunax._core.trees import own
from tsunax._state import COUNTS, Plan, averages_of, field, state_class
from tsunax.errors import StateError, WrongTypeError, message
from tsunax.rules.number_table import Numbers

if TYPE_CHECKING:
    from tsunax.averages import Average
    from tsunax.precision import LossScale, Policy


class Clocked:
    """A base class of states with a clock: `TrainState`, and `States`, which share one clock."""

    clock: jax.Array  # int32 (4,)

    @property
    def step(self) -> jax.Array:
        """int32: updates applied. The clock of schedules, averages and logs."""
        return count_in(self.clock, 0)

    @property
    def calls(self) -> jax.Array:
        """int32: every call, rejected ones too. Never rolls back; keys come from it."""
        return count_in(self.clock, 1)

    @property
    def rejected(self) -> jax.Array:
        """int32: calls in which the verdict rejected the step."""
        return count_in(self.clock, 2)

    @property
    def rejected_in_a_row(self) -> jax.Array:
        """int32: rejected calls since the last call that was not rejected."""
        return count_in(self.clock, 3)


@state_class
class TrainState(Clocked):
    """The state of training: `state, info = step(state, batch)`.

    `setup` makes a state; `adjust`, `freeze` and `replace(**fields)` return an edited one. Its
    counts, `step`, `calls`, `rejected` and `rejected_in_a_row`, are int32 scalars; a population has
    a leading axis of members in each array. Raises StateError for a state that a step has consumed.
    """

    # int32 (4,): the counts of `Clocked` in one array, because each array of a result costs time
    clock: jax.Array = field(moves="record")  # every call changes it, rejected or not
    # The full tree, as given to `setup`
    params: PyTree = field(moves="step", like="params", shows="params")
    # The state of the rule for the trained leaves
    opt_state: PyTree = field(moves="step", like="rule", shows="optimizer")
    # Arrays that the model updates without a gradient (batch statistics)
    model_state: PyTree = field(moves="step", like="free")
    # PRNG key, never advanced: a step folds `calls` into it
    key: jax.Array | None = field()
    # The live hyperparameters; None if the rule has none
    numbers: Numbers | None = field()
    # uint32 words, one bit per trained leaf; None until the first freeze
    frozen: jax.Array | None = field()
    # float32 copies of the trained leaves, if `params` are stored rounded
    masters: PyTree = field(moves="step", like="trained")
    # An average of the trained leaves, under `setup(ema=...)`
    average: Average | None = field(moves="step", like="average")
    loss_scale: LossScale | None = field(moves="record")
    # Static: the rule without its numbers, which leaves are trained, in which precision
    plan: Plan = field()

    _fields: ClassVar[tuple[dataclasses.Field[Any], ...]]  # all but the plan, as declared
    _moving: ClassVar[tuple[str, ...]]  # the fields that a step changes, params first
    _parts: ClassVar[tuple[str, ...]]  # the names of the values that `assemble` joins
    _get_moving: ClassVar[Function]  # the dict of fields -> the values of `_moving`, as a tuple
    _get_fixed: ClassVar[Function]  # the dict of fields -> the values that a step only reads

    @classmethod
    def of(cls, state: TrainState, **own_fields: Any) -> TrainState:
        """A state of this class with the fields of another state, and copies of `own_fields`.

        An average is given as in `setup(ema=)`, and begins with the trained leaves. Raises
        StateError for other names, and for a field like the trained leaves that has other leaves.
        """
        from tsunax._state import state_setup

        where = f"{cls.__name__}.of()"
        roles = {f.name: f.metadata["like"] for f in cls._fields if not hasattr(state, f.name)}
        if roles.keys() != own_fields.keys():
            raise StateError("fields", where, ", ".join(own_fields), ", ".join(roles) or "none")
        own_fields = state_setup.first_values(own_fields, roles, master_params(state), where)
        copies = {name: jax.tree.map(own, x) for name, x in own_fields.items()}
        return cls(**state.__dict__, **copies)

    def replace(self, **fields: Any) -> TrainState:
        """The state with some fields replaced, by copies: `state.replace(params=params, step=0)`.

        Raises StateError for unknown fields, for another structure, shape or dtype (except in
        `model_state`), and for a state that was donated.
        """
        from tsunax._core import placement
        from tsunax._state import state_setup

        for name, value in fields.items():
            state_setup.check_field(self, name, value)
        check_state(self, "replace()")
        if "key" in fields:
            fields["key"] = state_setup.new_keys(self, fields["key"], "replace()")
        clock = self.clock
        if self.masters is not None and "masters" in fields:
            rounded = trees.cast_like(fields["masters"], trained_part(self))
            fields.setdefault("params", params_with_trained(self, rounded))
        elif self.masters is not None and "params" in fields:
            trained = _selected_part(fields["params"], self.plan.selected)
            fields["masters"] = state_setup.masters_of(trained, self.masters)
        for index, name in enumerate(COUNTS):
            if name in fields:
                # no scatter: a mesh with explicit axes would need the sharding of its value
                value = jnp.asarray(fields.pop(name), jnp.int32)[..., None]
                clock = jnp.where(np.arange(len(COUNTS)) == index, value, clock)
        fields = {k: state_setup.copied_like(x, getattr(self, k)) for k, x in fields.items()}
        if "params" in fields:  # a step reads from the clock on which devices a state is
            trained = _selected_part(fields["params"], self.plan.selected)
            clock = placement.put_on_devices_of(trained, clock)
        return dataclasses.replace(self, clock=clock, **fields)

    def __repr__(self) -> str:
        from tsunax._state.state_text import state_text

        return state_text(self)

    def _repr_html_(self) -> str:
        from tsunax._core import tables

        return tables.folded(self)


def count_in(clock: Any, i: int) -> Any:
    """Count number i of a clock, or its shape if the clock is a shape."""
    if isinstance(clock, jax.ShapeDtypeStruct):
        return jax.eval_shape(lambda counts: counts[..., i], clock)
    if trees.is_gone(clock):
        raise StateError(donated("TrainState." + COUNTS[i]))
    return clock[..., i]


def trainable(state: TrainState) -> PyTree:
    """The trained leaves of `state.params`, with `None` in place of untrained leaves.

    Gradients have this structure. Raises StateError for a state that a step has consumed.

    >>> import tsunax as ts
    >>> params = {"encoder": jnp.ones(2), "head": jnp.ones(1)}
    >>> state = ts.setup(ts.rules.sgd(0.1), params, trainable="head")
    >>> ts.trainable(state)
    {'encoder': None, 'head': Array([1.], dtype=float32)}
    """
    check_state(state, "trainable()")
    return trained_part(state)


def trained_part(state: TrainState) -> PyTree:
    """`trainable` without its check of the state, for use in every step."""
    return _selected_part(state.params, state.plan.selected)


def params_with_trained(state: TrainState, trained: PyTree, overwritten: PyTree = None) -> PyTree:
    """The params with these `trained` leaves, and `overwritten` ones if gradients replace some."""
    params = with_part(trained, state.params, state.plan.selected)
    return params if overwritten is None else with_part(overwritten, params, state.plan.overwritten)


def _selected_part(params: PyTree, flags: trees.Flags | None) -> PyTree:
    return params if flags is None else trees.partition(params, flags)[0]


def with_part(part: PyTree, params: PyTree, flags: trees.Flags | None) -> PyTree:
    """`params` with the leaves of `part` that have a true flag; without flags all of `part`."""
    return part if flags is None else trees.merge(part, trees.partition(params, flags)[1])


def overwritten_part(state: TrainState) -> PyTree:
    """The leaves of params that their gradients replace: model state that flax keeps in params."""
    flags = state.plan.overwritten
    return None if flags is None else _selected_part(state.params, flags)


def split(state: TrainState) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The arrays that a step changes, donates and returns, and the arrays that it only reads."""
    cls = type(state)
    fields = vars(state)  # at each step; attributes would take twice as long
    moving = cls._get_moving(fields)
    fixed = cls._get_fixed(fields)
    flags = fields["plan"].moving
    if flags is None:
        return moving, (None, *fixed)
    params, unmoved = trees.partition(moving[0], flags)
    return (params, *moving[1:]), (unmoved, *fixed)


def assemble(kind: tuple[type[TrainState], Plan], moving: Any, fixed: Any) -> TrainState:
    """The inverse of `split`; `kind` is the class of the state and its plan."""
    cls, plan = kind
    state = object.__new__(cls)  # at each step; `__init__` would take half as long again
    # Each part has params; the moving part comes later and wins.
    vars(state).update(zip(cls._parts, (*fixed, *moving, plan)))  # noqa: B905, `strict=` takes time
    if fixed[0] is not None:
        vars(state)["params"] = trees.merge(moving[0], fixed[0])
    return state


def master_params(state: TrainState) -> PyTree:
    """The trained params as the rule sees them: in float32 if they are stored rounded."""
    trained, policy = trained_part(state), state.plan.precision
    if state.masters is not None:
        return state.masters
    return trained if policy is None else policy.wide(trained)


def averaged(state: TrainState, average: str = "average") -> TrainState:
    """The state with the averaged params in place of the trained ones, for evaluation.

    `average` is the name of a field, for state classes with several averages. Raises StateError for
    a state without that average.

    >>> import tsunax as ts
    >>> state = ts.setup(ts.rules.sgd(1.0), {"w": jnp.zeros(2)}, ema=0.75)
    >>> state, _ = ts.update(state, {"w": -jnp.ones(2)})
    >>> ts.averaged(state).params["w"]
    Array([0.25, 0.25], dtype=float32)
    """
    check_state(state, "averaged()")
    mean = _average_of(state, "averaged()", average)
    params = jax.tree.map(own, trees.rounded_like(mean, trained_part(state)))  # copies
    masters = state.masters
    if masters is not None:
        masters = trees.offloaded_like(jax.tree.map(own, mean), masters)
    return dataclasses.replace(state, params=params_with_trained(state, params), masters=masters)


def averaged_params(state: TrainState, where: str) -> PyTree:
    """The full tree with the average in it, in the dtypes of the params."""
    average = trees.rounded_like(_average_of(state, where), trained_part(state))
    return params_with_trained(state, average)


def in_float32(state: TrainState) -> TrainState:
    """The state without its precision: a step on it computes in the dtypes of its params."""
    plan = state.plan
    plan = Plan(plan.init, plan.update, plan.selected, None, plan.overwritten)
    params = params_with_trained(state, master_params(state))
    return dataclasses.replace(state, plan=plan, params=params, masters=None, loss_scale=None)


def _average_of(state: TrainState, where: str, name: str = "average") -> PyTree:
    averages = averages_of(state)
    if name not in averages:
        expected = " or ".join(map(repr, averages)) or "setup(..., ema=0.999)"
        raise StateError("average", where, repr(name), expected)
    return trees.on_device(averages[name].params)


@checks.naming_arguments
def setup(
    rule: optax.GradientTransformation,
    params: PyTree,
    *,
    key: Maybe = None,
    model_state: PyTree = None,
    trainable: Where = "**",
    freezable: bool = False,
    ema: ArrayLike | Average | Function | None = None,
    precision: str | Policy | None = None,
    loss_scale: ArrayLike | LossScale | str | None = None,
    device: Device = None,
    copy: bool = True,
) -> TrainState:
    """Make the training state of `params` under `rule`.

    In plain JAX: `opt_state = rule.init(params)`, a step counter, and a tuple around them. Pure: it
    also runs under jit, vmap, scan and eval_shape.

    Args:
      rule: any optax transformation. Rules of `tsunax.rules` have live numbers.
      params: any pytree of arrays. Leaves that `trainable` selects must be float or complex.
      key: typed PRNG key or int seed, for loss functions that name `key`.
      model_state: any pytree that the model updates without a gradient (batch statistics).
      trainable: which leaves to train: a glob over paths (`"head/**"`), a list with `!` exclusions,
        a predicate `f(path, leaf)`, or a tree of bools. Other leaves have no gradient, moment, copy
        or donation.
      freezable: make room for freezing now, so that not even the first `freeze` compiles a step.
      ema: an average of the trained leaves that every applied step moves, for `averaged(state)`: a
        decay, a schedule of it, or one of `averages.ema`, `polyak`, `swa`.
      precision: the dtype of training computations: "bfloat16", "float16", "float32" or a
        `precision.Policy`. Targets stay as they are, and evaluations compute in float32.
      loss_scale: "dynamic", a number or a `precision.LossScale`; "dynamic" by default for float16.
      device: where to put the state, by default where the params are: a `jax.Device`, a kind such
        as "gpu", `("gpu", 1)` for number 1 of a kind, or a `Sharding`.
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
    from tsunax._core import device_kinds, placement, stable_text
    from tsunax._state import state_setup
    from tsunax.averages import as_average
    from tsunax.precision import as_loss_scale, as_policy
    from tsunax.rules import extra_arguments, inspecting, number_table

    inspecting.check_rule(rule, "setup()")
    rule = extra_arguments.with_extra(rule)
    key = state_setup.as_key(key, "setup()")
    flags = state_setup.check_setup(params, model_state, trainable, copy, freezable)
    if device is not None:
        device = device_kinds.as_sharding(device, "setup()")
        params, model_state = placement.put((params, model_state), device)
    policy, average = as_policy(precision, "setup()"), as_average(ema, "setup()")
    scale = as_loss_scale(loss_scale, policy, "setup()")

    take = own if copy else trees.strong
    trained, untrained = trees.partition(params, flags)
    params = trees.merge(jax.tree.map(take, trained), jax.tree.map(trees.strong, untrained))
    flags, overwritten = state_setup.without_overwritten(params, flags, trainable)
    selected = None if all(flags) else flags
    functions = rule.update, policy, average and average.schedule
    references = " ".join(stable_text.code_of(f, is_exact=True) for f in functions)
    blank = extra_arguments.blank(rule.init)
    plan = Plan(blank, rule.update, selected, policy, overwritten, references)
    trained, masters = state_setup.as_stored(_selected_part(params, selected), policy, key)
    place = functools.partial(placement.put_on_devices_of, trained)
    state = TrainState(
        clock=place(np.zeros(len(COUNTS), np.int32)),
        params=with_part(trained, params, selected),
        opt_state=None,
        model_state=place(jax.tree.map(take, model_state)),
        key=place(key),
        numbers=None,
        frozen=place(np.zeros(-(-sum(flags) // 32), np.uint32) if freezable else None),
        masters=masters,
        average=None,
        loss_scale=place(scale),
        plan=plan,
    )
    params_of_rule = master_params(state)
    opt_state = state_setup.opt_state_of(rule, params_of_rule, (trained, masters))
    inspecting.check_update(rule, params_of_rule)
    if policy is not None and policy.moments != "float32":
        opt_state = state_setup.with_low_moments(opt_state, plan, params_of_rule)
    opt_state, numbers = number_table.split_numbers(opt_state)
    return dataclasses.replace(
        state,
        opt_state=place(opt_state) if device is None else jax.device_put(opt_state, device),
        numbers=place(numbers),
        average=None if average is None else average.starting_at(params_of_rule),
    )


def donated(where: str) -> str:
    got, expected = "one that was donated to an earlier step", "one whose buffers are there"
    fix = "Go on with what that step returned, or keep it with train_step(..., donate=False)."
    return message("state", where, got, expected, fix)


def check_values(state: object, where: str, second: object = None) -> None:
    """`check_state`, and WrongTypeError for a state of shapes (`jax.eval_shape`)."""
    check_state(state, where, second)
    if isinstance(state, TrainState) and isinstance(state.clock, jax.ShapeDtypeStruct):
        checks.check_arrays(state.clock, "state.clock")


def check_state(state: object, where: str, second: object = None) -> None:
    """Raise unless `state` is a TrainState and not donated; `second` came after it."""
    if isinstance(state, TrainState):
        if trees.is_gone(state.clock):
            raise StateError(donated(where))
        return
    is_first = isinstance(second, TrainState)
    fix = "The state comes first." if is_first else "Make one: ts.setup(rule, params)."
    raise WrongTypeError("state", where, trees.describe(state), "a TrainState of tsunax", fix)
