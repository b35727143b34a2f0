"""One training step, in the order of its formula.

    step(state, batch)  =  update(state, grads, loss=loss)   where  loss, grads = value_and_grad(loss_fn)(state, batch)

    loss_fn -> loss, grads -> frozen leaves cut out -> verdict -> rule -> params' -> (state', info)

All of it is one compiled program. Every capability is one named call in `value_and_grad` or `update`; deleting
that line removes the capability. What is carried is in `state.py`; who calls it is up to you.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from tsunax import _checks, _hoist, _tree, guard
from tsunax._loss_fn import LossFn, check_extra
from tsunax.errors import LossError, NonFiniteError, StateError, TsunaxError, WrongTypeError, message
from tsunax.metrics import Loss, as_loss, check_scalar
from tsunax.state import TrainState, check_flags, check_like, check_state, donated, is_gone, trained_part

# ---------------------------------------------------------------------------------------------- the two halves


def value_and_grad(loss_fn: Callable, *, remat: Callable | bool | None = None) -> Callable:
    """The first half of a step: `f(state, batch, *, at=None, **extra) -> (Loss, grads)`.

    In plain JAX: `jax.value_and_grad(loss_fn)(state.params, batch)`, restricted to the leaves that are trained.
    `grads` has the structure of `trainable(state)`. `at=` evaluates at other trained parameters (SAM, line
    searches). `remat` is `True` or a policy of `jax.checkpoint_policies`: recompute instead of store.

    Raises LossError, before anything is compiled, for a loss_fn that cannot be used; see `train_step`.

    >>> import tsunax as ts
    >>> state = ts.setup(ts.rules.sgd(0.1), {"w": jnp.array([1.0, 2.0])})
    >>> loss, grads = value_and_grad(lambda params, x: jnp.sum(params["w"] * x))(state, jnp.array([3.0, 4.0]))
    >>> float(loss.compute()), grads["w"]
    (11.0, Array([3., 4.], dtype=float32))
    """
    fn = LossFn.of(loss_fn, "value_and_grad()")
    _check_remat(remat, "value_and_grad()")

    def f(state: TrainState, batch, *, at=None, **extra):
        check_state(state, "value_and_grad()", batch)
        trained = trained_part(state) if at is None else at
        if at is not None:
            check_like("(at=)", at, trained_part(state), "It has the structure of ts.trainable(state).")
        objective = _objective(fn, state, batch, extra)
        if remat:
            objective = jax.checkpoint(objective, policy=None if remat is True else remat)
        (_, loss), grads = jax.value_and_grad(objective, has_aux=True)(trained)
        # jax.checkpoint hands constants out in a class of its own (jax 0.7)
        loss = jax.tree.map(lambda x: x if _tree.is_array(x) else np.asarray(x), loss)
        return loss, grads

    return f


def _objective(fn: LossFn, state: TrainState, batch, extra) -> Callable:
    """`trained params -> (mean loss, Loss)`; what is not trained is an argument that nobody differentiates."""
    keywords = fn.keywords(state, batch, extra, train=True)

    def objective(trained):
        loss = fn(_with_rest(state, trained), batch, keywords)
        return loss.compute(), loss

    return objective


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Rows:
    """The weight of a loss where it is known from the shapes.

    No array: a constant that a program returns costs XLA:CPU a copy on another thread, 15 us a step.
    """

    weight: float | None


class StepInfo(NamedTuple):
    """What an observer may want to know of one step. Reading a value waits for the device; having it does not."""

    loss: Any  # f32, the mean
    counted: Any  # f32: the weight behind it, where the program has to count it
    grad_norm: Any  # f32, L2 over what is trained and not frozen, before the rule. None without norms
    update_norm: Any  # f32, L2 of what the rule would add to params. None without norms
    verdict: Any  # int32: 0 applied, else the place of the first value that was not finite. None under "ignore"
    metrics: Any  # {name: f32, or what the metric's compute() gives}
    step: Any  # int32: the clock that the schedules saw, where the rule has any
    rows: _Rows  # the weight, where nobody has to count
    numbers: Any  # the live hyperparameters that it used

    @property
    def weight(self):
        """Rows or tokens behind the loss."""
        return self.counted if self.rows.weight is None else np.full(np.shape(self.loss), self.rows.weight, np.float32)

    @property
    def applied(self):
        """Whether the state took the step."""
        return np.ones(np.shape(self.loss), bool) if self.verdict is None else self.verdict == 0

    @property
    def hyperparams(self) -> dict[str, Any]:
        """The live hyperparameters that the step used, by flat name."""
        return {} if self.numbers is None else self.numbers.named(self.step)


def update(
    state: TrainState,
    grads,
    *,
    loss=None,
    model_state=None,
    on_nonfinite: str = "skip",
    norms: bool = True,
    **extra,
) -> tuple[TrainState, StepInfo]:
    """The second half of a step: verdict, rule, frozen leaves, clock.

    In plain JAX: `updates, opt_state = rule.update(grads, opt_state, params)` and
    `params = optax.apply_updates(params, updates)`. Pure: call it inside your own jit.

    Args:
      grads: of the structure of `trainable(state)`, or of the full tree.
      loss: the `Loss` or scalar that they are the gradient of: part of the verdict, and `value` for the rules
        that ask for it.
      model_state: what replaces `state.model_state` if the step is applied; by default the one in `loss`.
      on_nonfinite: what to do where the loss, a gradient or a rule's report is not finite. "skip" rejects the
        step: every array of the state but `calls` stays bit-identical. "raise" rejects too, and a compiled step
        then waits and raises. "ignore" applies it.
      norms: whether info has `grad_norm` and `update_norm`.
      extra: goes to the rule, if it takes extra arguments.

    Raises StateError if grads do not fit the state, naming the first path.

    >>> import tsunax as ts
    >>> state = ts.setup(ts.rules.sgd(0.1), {"w": jnp.array([1.0, 2.0])})
    >>> state, info = update(state, {"w": jnp.array([3.0, 4.0])})
    >>> state.params["w"], float(info.grad_norm), bool(info.applied)
    (Array([0.7, 1.6], dtype=float32), 5.0, True)
    """
    check_state(state, "update()", grads)
    _check_policy(on_nonfinite, "update()")
    check_flags("update()", norms=norms)
    params = trained_part(state)
    grads = _fitting(state, grads, params)
    loss = _finished(loss)
    model_state = _first(model_state, loss.model_state)
    if model_state is not None:
        fix = "Give setup(..., model_state=...)." if state.model_state is None else "A step keeps its structure."
        check_like("model_state", model_state, state.model_state, fix)
    value = None if loss.total is None else loss.compute()

    thawed = _thawed(state, params)
    grads = _without_frozen(grads, thawed)
    grad_norm = _tree.global_norm(grads) if norms or on_nonfinite != "ignore" else None
    given = {"grad": grads, "step": state.step, **extra} | ({} if value is None else {"value": value})
    opt_state = _hoist.lower(state.opt_state, state.numbers, state.step)
    updates, opt_state = state.plan.update(grads, opt_state, params, **given)
    opt_state = _hoist.hoist_like(opt_state, state.numbers)
    verdict = None if on_nonfinite == "ignore" else guard.judge(value, grad_norm, opt_state)
    new = TrainState(
        clock=optax.safe_increment(state.clock),
        params=optax.apply_updates(params, updates),
        opt_state=opt_state,
        model_state=_first(model_state, state.model_state),
        key=state.key,
        numbers=state.numbers,
        frozen=state.frozen,
        plan=state.plan,
    )
    new = _transact(state, new, params, thawed, verdict)
    fixed = isinstance(loss.weight, np.ndarray | np.generic)
    info = StepInfo(
        loss=None if value is None else jnp.asarray(value, jnp.float32),
        counted=None if fixed else loss.weight,
        grad_norm=grad_norm if norms else None,
        update_norm=_tree.global_norm(updates) if norms else None,
        verdict=verdict,
        metrics={name: m.compute() for name, m in loss.metrics.items()},
        step=state.step if state.numbers is not None and state.numbers.scheduled else None,
        rows=_Rows(float(loss.weight) if fixed else None),
        numbers=state.numbers,
    )
    return new, info


def _fitting(state: TrainState, grads, params):
    """Gradients as a tree like `params`, whether they came so or for the full tree. Raises StateError."""
    if jax.tree.structure(grads) == jax.tree.structure(params):
        pass
    elif state.plan.selected and jax.tree.structure(grads) == jax.tree.structure(state.params):
        grads = _tree.partition(grads, state.plan.selected)[0]
    else:
        fix = "Gradients have the structure of ts.trainable(state)."
        if isinstance(grads, tuple) and any(isinstance(part, Loss) for part in grads):
            fix = "Take it apart: loss, grads = ts.value_and_grad(loss_fn)(state, batch)."
        raise StateError(f"gradient {_tree.first_difference(grads, params, 'grads')}. {fix}")
    for (path, g), p in zip(jax.tree_util.tree_flatten_with_path(grads)[0], jax.tree.leaves(params), strict=True):
        got, expected = _tree.dtype_of(g), _tree.dtype_of(p)
        faults = (
            (not _tree.is_inexact(g), _tree.describe(g), "floats"),
            (np.shape(g) != np.shape(p), f"shape {np.shape(g)}", f"{np.shape(p)}, as in params"),
            (_is_complex(got) and not _is_complex(expected), f"dtype {got}", f"{expected}, as in params"),
            (is_gone(g), "a deleted array", "a live one"),
        )
        for fault, got, expected in faults:
            if fault:
                raise StateError(message("gradient", _tree.access_str("grads", path), got, expected))
    return grads


def _is_complex(dtype) -> bool:
    return dtype is not None and jnp.issubdtype(dtype, np.complexfloating)


def _finished(loss) -> Loss:
    """The loss that a user gave to `update`, as `value_and_grad` would give it."""
    if not isinstance(loss, Loss):
        if loss is not None:
            check_scalar("loss", "update()", loss)
        return Loss(loss, mean_value=loss)
    if loss.weight is None and loss.mean_value is None:
        raise LossError(
            message("loss", "update()", "a Loss without a weight", "one with", "Give ts.Loss(total, weight).")
        )
    if all(hasattr(m, "compute") for m in loss.metrics.values()) and (
        loss.weight is None or _tree.is_array(loss.weight)
    ):
        return loss
    return dataclasses.replace(as_loss(loss, 1), **({"weight": None} if loss.weight is None else {}))


def _thawed(state: TrainState, params) -> list | None:
    """One scalar bool per trained leaf, false where it is frozen; None where nothing can be."""
    if state.frozen is None:
        return None
    n = len(jax.tree.leaves(params))
    return [(state.frozen[k // 32] >> (k % 32)) & 1 == 0 for k in range(n)]


def _without_frozen(grads, thawed):
    """Zero gradients where frozen, so that norms and clipping are over what is trained."""
    if thawed is None:
        return grads
    leaves, treedef = jax.tree.flatten(grads)
    return treedef.unflatten([jnp.where(on, g, jnp.zeros_like(g)) for on, g in zip(thawed, leaves, strict=True)])


def _transact(old: TrainState, new: TrainState, params, thawed, verdict) -> TrainState:
    """`new` where the step is applied and the leaf is not frozen, else `old`: one select per leaf."""
    if verdict is not None or thawed is not None:
        applied = jnp.bool_(True) if verdict is None else verdict == 0
        leaves = [applied & on for on in thawed or [True] * len(jax.tree.leaves(params))]
        owners = [None] * len(jax.tree.leaves(new.opt_state))
        if thawed is not None:
            owners = _hoist.owners_of(old.plan.init, old.opt_state, old.numbers, params)
        new = dataclasses.replace(
            new,
            clock=jnp.where(jnp.stack([applied, True]), new.clock, old.clock) if verdict is not None else new.clock,
            params=guard.choose(leaves, new.params, params),
            opt_state=guard.choose([applied if o is None else leaves[o] for o in owners], new.opt_state, old.opt_state),
            model_state=guard.choose(applied, new.model_state, old.model_state),
        )
    return dataclasses.replace(new, params=_with_rest(old, new.params))


def _with_rest(state: TrainState, trained):
    """The full tree again: what is trained, and what is not from the state."""
    if state.plan.selected is None:
        return trained
    return _tree.merge(trained, _tree.partition(state.params, state.plan.selected)[1])


def _first(*options):
    return next((x for x in options if x is not None), None)


def _check_policy(on_nonfinite, where: str) -> None:
    if on_nonfinite not in guard.POLICIES:
        expected = " or ".join(map(repr, guard.POLICIES))
        raise WrongTypeError(message("on_nonfinite", where, _tree.describe(on_nonfinite), expected))


def _check_remat(remat, where: str) -> None:
    if remat is not None and not isinstance(remat, bool) and not callable(remat):
        expected = "True, or a policy of jax.checkpoint_policies"
        raise WrongTypeError(message("remat", where, _tree.describe(remat), expected))


# ------------------------------------------------------------------------------------------------ the whole step


def _fault(error: Exception, state: TrainState, batch, extra) -> TsunaxError | None:
    """After a program did not take its arguments: what is wrong with them, where that can be seen."""
    if isinstance(error, TsunaxError):
        error.__dict__.pop("__notes__", None)  # JAX's, on the frames that it has hidden
        return None
    try:
        _check_arguments(state, batch, extra)
    except TsunaxError as found:
        return found
    return None


def _check_arguments(state: TrainState, batch, extra) -> None:
    is_data = isinstance(batch, Iterator) or (hasattr(batch, "__iter__") and jax.tree_util.all_leaves([batch]))
    if is_data and not _tree.is_array(batch):
        fix = "A step takes one batch: for batch in data."
        raise WrongTypeError(message("batch", "step()", _tree.describe(batch), "a tree of arrays", fix))
    _checks.check_arrays(batch, "batch", "Leave it out, or turn it into numbers.")
    for name, tree in extra.items():
        _checks.check_arrays(tree, name, f"Bind it to loss_fn instead: functools.partial(loss_fn, {name}=...).")
    _checks.check_arrays(state, "state")


def _any_traced(tree) -> bool:
    return any(isinstance(x, Tracer) for x in jax.tree.leaves(tree))


def _moving(state: TrainState) -> tuple:
    """What a step changes: donated, and returned by the program."""
    return state.clock, trained_part(state), state.opt_state, state.model_state


def _still(state: TrainState) -> tuple:
    """What a step only reads: neither donated nor returned, put back outside."""
    selected = state.plan.selected
    rest = None if selected is None else _tree.partition(state.params, selected)[1]
    return state.numbers, state.frozen, state.key, rest


def _assemble(plan, moving: tuple, still: tuple) -> TrainState:
    clock, params, opt_state, model_state = moving
    numbers, frozen, key, rest = still
    if rest is not None:
        params = _tree.merge(params, rest)
    return TrainState(clock, params, opt_state, model_state, key, numbers, frozen, plan)


def _value_fn(loss_fn, state: TrainState, batch, extra) -> Callable:
    """The loss at other trained parameters, for rules that search along a line.

    optax hands every extra argument that its line search does not know to this function, by the names of its
    signature, and fails on the others: so it names them all and reads none.
    """
    objective = _objective(LossFn.of(loss_fn), state, batch, extra)

    def value_fn(params, **_):
        return objective(params)[0]

    names = ["step", *extra]
    keyword = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
    first = inspect.Parameter("params", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    value_fn.__signature__ = inspect.Signature([first, *keyword])  # type: ignore[attr-defined]
    return value_fn


@dataclass(frozen=True)
class TrainStep:
    """What `train_step` returns: a function `(state, batch, **extra) -> (state, info)` that is also a value.

    `step.lower(state, batch)` is its program, `step.pure(state, batch, extra)` the function behind it, and
    `dataclasses.replace(step, donate=False)` the same step otherwise.
    """

    loss_fn: Callable
    on_nonfinite: str = "skip"
    donate: bool = True
    remat: Any = None
    norms: bool = True

    def __post_init__(self):
        LossFn.of(self.loss_fn)  # its errors belong here, not into the first call
        _check_policy(self.on_nonfinite, "train_step()")
        _check_remat(self.remat, "train_step()")
        check_flags("train_step()", donate=self.donate, norms=self.norms)

    def pure(self, state: TrainState, batch, extra) -> tuple[TrainState, StepInfo]:
        """The step without compilation and donation."""
        check_extra(state, extra, train=True)
        loss, grads = value_and_grad(self.loss_fn, remat=self.remat)(state, batch, **extra)
        search = {"value_fn": _value_fn(self.loss_fn, state, batch, extra)}
        return update(state, grads, loss=loss, on_nonfinite=self.on_nonfinite, norms=self.norms, **search, **extra)

    @functools.cached_property
    def _traced(self) -> Any:
        return jax.jit(self.pure)

    @functools.cached_property
    def _compiled(self) -> Any:
        def train_step(plan, moving, still, batch, extra):
            state, info = self.pure(_assemble(plan, moving, still), batch, extra)
            return _moving(state), tuple(info)[:-1]  # numbers are put back outside, and info made there: faster

        return jax.jit(train_step, static_argnums=0, donate_argnums=(1,) if self.donate else ())

    def __call__(self, state: TrainState, batch, **extra) -> tuple[TrainState, StepInfo]:
        if not isinstance(state, TrainState):
            check_state(state, "step()", batch)
        try:
            if state.__dict__.get("concrete"):
                gone = state.clock.is_deleted()
            # eager grad and vmap trace some arrays only, and would donate the others under the user's feet
            elif _any_traced((state, batch, extra)):
                return self._traced(state, batch, extra)
            else:
                gone = any(map(is_gone, jax.tree.leaves(state)))
                if isinstance(state.clock, jax.ShapeDtypeStruct):
                    _checks.check_arrays(state, "state")
            if gone:
                raise StateError(donated("step()"))
            plan, still = state.plan, _still(state)
            moving, seen = self._compiled(plan, _moving(state), still, batch, extra)
        except Exception as error:
            if fault := _fault(error, state, batch, extra):
                raise fault from None
            raise
        state = _assemble(plan, moving, still)
        state.__dict__["concrete"] = True  # no field: a state that was edited is looked at again
        info = tuple.__new__(StepInfo, (*seen, still[0]))
        if self.on_nonfinite == "raise":
            self._raise_if_rejected(state, info, batch, extra)
        return state, info

    def _raise_if_rejected(self, state: TrainState, info: StepInfo, batch, extra) -> None:
        verdict, calls = int(info.verdict), int(state.calls)
        if verdict == 0:
            return
        # the state is as it was: the gradients that were rejected can be had again
        _, grads = value_and_grad(self.loss_fn)(state.replace(calls=calls - 1), batch, **extra)
        what = guard.explain(verdict, state.opt_state, grads)
        raise NonFiniteError(
            f"step {int(state.step)} (call {calls - 1}) was rejected: {what}. `error.state` is the state before it.",
            state,
            info,
        )

    def lower(self, state: TrainState, batch, **extra) -> jax.stages.Lowered:
        """The program for these arguments (arrays or `ShapeDtypeStruct`s), before it is compiled."""
        check_state(state, "lower()", batch)
        return self._compiled.lower(state.plan, _moving(state), _still(state), batch, extra)


def train_step(
    loss_fn: Callable,
    *,
    on_nonfinite: str = "skip",
    donate: bool = True,
    remat: Any = None,
    norms: bool = True,
) -> TrainStep:
    """The compiled step of a loss function: `step(state, batch, **extra) -> (state, info)`.

    In plain JAX, jitted with the state donated:

        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = rule.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)

    Args:
      loss_fn: `loss_fn(params, batch, ...)` returns a scalar (a mean over its rows) or a `Loss`. It may name, as
        further parameters, `key` (new at every call), `model_state`, `train` (True), `mask` (f32 of shape
        (rows,), 1 for real rows), `step`, and the names given to the step as `extra`; it gets what it names.
      on_nonfinite: "skip", "raise" or "ignore" a step with a loss or gradient that is not finite; see `update`.
      donate: whether the state given is consumed. Where the state is traced (inside jit, scan, vmap, grad)
        nothing is.
      remat: `True` or a policy of `jax.checkpoint_policies`: recompute activations instead of storing them.
      norms: whether info has `grad_norm` and `update_norm`.

    `extra` (another network, a teacher) is neither differentiated nor donated. Batches may be host arrays.

    Raises, before anything is compiled: WrongTypeError, LossError (what loss_fn returned, raised or asks for).
    When called: StateError for a donated state, NonFiniteError under "raise".

    >>> import tsunax as ts
    >>> step = train_step(lambda params, x: jnp.mean((x @ params["w"]) ** 2))
    >>> state = ts.setup(ts.rules.sgd(0.1), {"w": jnp.array([1.0, 2.0])})
    >>> for _ in range(3):
    ...     state, info = step(state, jnp.eye(2))
    ...     print(f"{info.loss:.4f}")
    2.5000
    2.0250
    1.6402
    """
    return TrainStep(loss_fn, on_nonfinite, donate, remat, norms)


def eval_step(loss_fn: Callable) -> Callable:
    """The compiled evaluation of the same loss function: `f(state, batch, **extra) -> Loss`.

    `train` is False, there is no `key`, and `model_state` is read only. Results of several batches merge:
    `a.merge(b).compute()` is the mean over all rows of both.

    >>> import tsunax as ts
    >>> state = ts.setup(ts.rules.sgd(0.1), {"w": jnp.array([1.0, 2.0])})
    >>> f = eval_step(lambda params, x: jnp.mean(x @ params["w"]))
    >>> float(f(state, jnp.eye(2)).merge(f(state, jnp.ones((1, 2)))).compute())
    2.0
    """
    fn = LossFn.of(loss_fn, "eval_step()")

    @jax.jit
    def evaluate(state, batch, extra) -> Loss:
        loss = fn(state.params, batch, fn.keywords(state, batch, extra, train=False))
        return dataclasses.replace(loss, model_state=None)

    def call(state: TrainState, batch, **extra) -> Loss:
        check_state(state, "eval_step()", batch)
        try:
            return evaluate(state, batch, extra)
        except Exception as error:
            if fault := _fault(error, state, batch, extra):
                raise fault from None
            raise

    return call
