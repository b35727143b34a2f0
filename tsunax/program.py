"""The step as one compiled program: what is donated, and what is put back outside.

    train_step(loss_fn)(state, batch)  =  jit(update ∘ value_and_grad)(state, batch)

The formula is in `step.py`.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownLambdaType=false
# pyright: reportUnnecessaryIsInstance=false
from __future__ import annotations

import dataclasses
import functools
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from tsunax._core import AxisName, Extra, Function, PyTree, checks, trees
from tsunax._step.gradients import axes_around, gradient_of, search_functions
from tsunax._step.loss_fn import CutsItsBatch, GradientOptions, LossFn, inputs_of_loss_fn
from tsunax._step.programs import Programs, Traced, call_on_mesh, check_byte_order, place_state
from tsunax.errors import WrongTypeError
from tsunax.guard import tracing
from tsunax.loss import Loss, StaticWeight
from tsunax.state import Plan, TrainState, assemble, check_state, split
from tsunax.step import StepInfo, check_norms, update_unchecked

if TYPE_CHECKING:
    from tsunax._step.finite_state import FirstLook
    from tsunax.watching import Watch


def _over_members(
    f: Function, state: TrainState, *arguments: Any, group_size: int | None = None
) -> Any:
    """`f(state, *arguments)`; for a population, `f` of each member."""
    if jnp.ndim(state.clock) == 1:
        return f(state, *arguments)
    from tsunax.states import over_members

    return over_members(f, state, *arguments, group_size=group_size)


@dataclass(frozen=True)
class TrainStep(GradientOptions):
    """The result of `train_step`: a function `(state, batch, **extra) -> (state, info)`.

    Steps compare by value. `step.lower(state, batch)` is the program of a step,
    `step.pure(state, batch, extra)` the function behind it, and
    `dataclasses.replace(step, accumulate=4)` the same step with another argument. Raises as
    `train_step`. Its fields are the arguments of `train_step`.
    """

    donate: bool = True
    norms: bool | str = True
    at_once: int | None = None
    watch: Watch | None = None

    def __post_init__(self) -> None:
        checks.check_flags("train_step()", donate=self.donate, check_rows=self.check_rows)
        check_norms(self.norms, "train_step()")
        if self.at_once is not None:
            checks.check_count(self.at_once, "train_step()", "at_once")
        _ = self.gradient  # raises its errors here, not in the first call

    @functools.cached_property
    def gradient(self) -> Function:
        return gradient_of(self, "train_step()")

    @functools.cached_property
    def fn(self) -> LossFn:
        """The loss function with the keywords of its signature."""
        return LossFn.of(self.loss_fn)

    @functools.cached_property
    def first_look(self) -> FirstLook:
        """The checks before the first call: of the state, and whether the loss mixes rows."""
        from tsunax._step.finite_state import FirstLook

        judges_updates = self.on_nonfinite == "ignore" or self.norms == "update"
        return FirstLook(self, looks_at_state=not judges_updates)

    @property
    def masks(self) -> bool:
        """Whether loss_fn takes `mask`, so that rows of padding do not count."""
        return "mask" in self.fn.names

    @property
    def cuts_evenly(self) -> bool:
        """Whether rows that `accumulate` does not divide are an error, instead of padded."""
        pads = self.masks or isinstance(self.loss_fn, CutsItsBatch)
        return self.accumulate > 1 and self.per_example is not True and not pads

    def pure(
        self, state: TrainState, batch: PyTree, extra: Extra, mesh: Any = None
    ) -> tuple[TrainState, StepInfo]:
        """The step without compilation and donation; for a population, the step of each member.

        For your program: `jax.jit(step.pure)(state, batch, {})`. `extra` is a dict; rules
        may divide their work over the devices of `mesh`.
        """
        mesh = mesh if jnp.ndim(state.clock) == 1 else None  # devices share members, not their work
        return _over_members(self._step_member, state, batch, extra, mesh, group_size=self.at_once)

    def _step_member(
        self, state: TrainState, batch: PyTree, extra: Extra, mesh: Any
    ) -> tuple[TrainState, StepInfo]:
        # This comes first, because it checks the names in extra.
        search = search_functions(self.fn, state, batch, extra, self.axis_name)
        loss, grads = self.gradient(state, batch, **extra)
        extra = {"device_mesh": mesh, **search, **extra}
        options = self.on_nonfinite, self.norms, extra, self.watch
        return update_unchecked(state, grads, loss, None, *options)

    @functools.cached_property
    def traces(self) -> list[Traced]:
        """The arguments of each trace of this step: `ts.describe` explains each trace."""
        return []

    @functools.cached_property
    def references(self) -> str:
        """A hash of the step's functions: equal steps with equal hashes share a compiled loop."""
        from tsunax._core import stable_text

        return stable_text.code_of(self, is_exact=True)

    @functools.cached_property
    def _traced(self) -> Any:
        return jax.jit(self.pure)

    @functools.cached_property
    def programs(self) -> Programs:
        return Programs(self._compiled_on)

    def _compiled_on(self, shardings: Any) -> Any:
        mesh = shardings and shardings.replicated.mesh

        def train_step(kind: Any, moving: Any, fixed: Any, batch: PyTree, extra: Extra):
            state = assemble(kind, moving, fixed)
            trace = Traced.from_arguments("step", shardings, state, {"batch": batch, **extra})
            with tracing(shardings is not None):
                state, (loss, weight, *other_fields, _) = self.pure(state, batch, extra, mesh)
            self.traces.append(trace)  # after the step: a trace that raises does not count
            # The caller puts numbers back and makes the info, which is faster outside of jit.
            weight = StaticWeight.unless_array(weight) or weight
            return split(state)[0], (loss, weight, *other_fields)

        out = None if shardings is None else (shardings.of_leaves, shardings.replicated)
        return jax.jit(
            train_step,
            static_argnums=0,
            donate_argnums=(1,) if self.donate else (),
            out_shardings=out,
        )

    def _place_batch(self, state: TrainState, shardings: Any, batch: PyTree, extra: Extra) -> Any:
        from tsunax._step import on_mesh

        return on_mesh.place_batch(self, state, shardings, batch, extra)

    def __call__(
        self, state: TrainState, batch: PyTree = None, **extra: Any
    ) -> tuple[TrainState, StepInfo]:
        return self.call(state, batch, extra, raises=self.on_nonfinite == "raise")

    def call(
        self, state: TrainState, batch: PyTree, extra: Extra, *, raises: bool = False
    ) -> tuple[TrainState, StepInfo]:
        """A step. Unless it `raises`, it skips rejected calls: the caller reads the verdict."""
        if not isinstance(state, TrainState):
            check_state(state, "step()", batch)
        try:
            check_byte_order(batch, extra)
            # Eager grad and vmap trace only some arrays. A call would donate the other arrays.
            if trees.is_tracing():
                if self.first_look.pending:
                    self.first_look(state, batch, extra)
                new, info = self._traced(state, batch, extra)
                # The arrays that the step only reads stay the same, so that a loop carries none.
                return assemble((type(new), new.plan), split(new)[0], split(state)[1]), info
            if extra and self.donate and not self.traces:
                from tsunax._step import step_errors

                step_errors.check_not_donated(state, extra)  # XLA would write to stderr before
            kind, (moving, fixed) = (type(state), state.plan), split(state)
            shardings, moving, fixed = self.programs.place_state(state, moving, fixed)
            if shardings is not None:
                batch, extra = self._place_batch(state, shardings, batch, extra)
            if self.first_look.pending:  # all processes at once: a mesh has rows of each
                self.first_look(state, batch, extra)
            program = self.programs[shardings]
            moving, (loss, weight, *other_fields) = program(kind, moving, fixed, batch, extra)
        except Exception as error:
            from tsunax._step import step_errors

            step_errors.explain(error, self, state, batch, extra)
            raise
        state = assemble(kind, moving, fixed)
        weight = weight.value if type(weight) is StaticWeight else weight
        info = StepInfo._make((loss, weight, *other_fields, state.numbers))
        if raises:
            from tsunax._step import step_errors

            step_errors.raise_if_rejected(self, state, info, batch, extra)
        return state, info

    def lower(self, state: TrainState, batch: PyTree = None, **extra: Any) -> jax.stages.Lowered:
        """The program for these arguments (arrays or `ShapeDtypeStruct`s), not yet compiled.

        `step.lower(state, batch).compile().cost_analysis()["flops"]`. Raises WrongTypeError unless
        `state` is a TrainState, StateError for one that a step has consumed.
        """
        check_state(state, "lower()", batch)
        return self.trace(state, batch, **extra).lower()

    def trace(self, state: TrainState, batch: PyTree = None, **extra: Any) -> jax.stages.Traced:
        """The traced program of `state` and `batch`: `step.trace(state, batch).jaxpr`.

        It takes arrays or `ShapeDtypeStruct`s, and raises errors, like `lower`.
        """
        check_state(state, "trace()", batch)
        shardings, moving, fixed = place_state(*split(state))
        if shardings is not None:
            batch, extra = self._place_batch(state, shardings, batch, extra)
        kind = type(state), state.plan
        return self.programs[shardings].trace(kind, moving, fixed, batch, extra)

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


@checks.naming_arguments
def train_step(
    loss_fn: Function,
    *,
    accumulate: int = 1,
    on_nonfinite: str = "skip",
    donate: bool = True,
    remat: bool | str | Function | None = None,
    norms: bool | str = True,
    axis_name: AxisName = None,
    at_once: int | None = None,
    per_example: bool | Function = False,
    noise_scale: bool = False,
    check_rows: bool = True,
    watch: Watch | None = None,
) -> TrainStep:
    """The compiled step of a loss function: `step(state, batch, **extra) -> (state, info)`.

    In plain JAX, jitted with the state donated:

        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = rule.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)

    Args:
      loss_fn: `loss_fn(params, batch, ...)` returns a scalar (a mean over its rows) or a `Loss`. It
        may name, as further parameters, `key` (new at every call), `model_state`, `train` (True),
        `mask` (f32 of shape (rows,), 1 for real rows), `step`, and the names given to the step as
        `extra`; it gets these arguments. `loss_fn(params, key)` and other functions with the second
        argument `key`, `step`, `model_state` or `ema` take no batch: `step(state)`.
      accumulate: cut the batch into this many micro-batches, one after another, for the memory of
        one. Loss and gradients are the same, with any masks, if the loss is a mean over rows. A
        loss that compares rows, uses batch statistics, or is a sum over rows changes, with a
        warning: give it in two parts, `ts.whole_batch`. A batch that does not divide is padded
        if loss_fn names `mask`.
      on_nonfinite: "skip", "raise" or "ignore" a step with a loss or gradient that is not finite,
        see `update`; or "drop" such micro-batches, and skip the step if none is left.
      donate: whether the step consumes the given state. A traced state is never consumed.
      remat: recompute activations: `True`, or a policy of `jax.checkpoint_policies`, or its name.
      norms: whether info has `grad_norm`; "update" for `update_norm` too, at a pass over updates.
      axis_name: inside `jax.shard_map` or `jax.pmap`, the axis, or axes, of devices with their own
        rows and keys: losses, metrics and gradients are combined over it (once, by weight), and
        model states averaged. () for none: combine them yourself. Sharded arrays take none.
      at_once: how many members of a population are computed together: memory grows with them.
      per_example: True for a rule that takes the gradient of each row, along a new first axis, such
        as `optax.contrib.differentially_private_aggregate`. Or a function: it gets the gradient of
        one row, a tree like `trainable(state)`, and returns a tree like it (clipped, for example).
        The rule gets the mean of these trees over rows, in the memory of one micro-batch.
      noise_scale: whether info has a `noise_scale` (`microbatches.NoiseScale`), the scatter of
        gradients between micro-batches. It takes an `accumulate` of at least 2.
      check_rows: whether the first call under `accumulate` or `per_example` compares the loss of a
        few rows with the loss of their micro-batches, and warns if they differ.
      watch: a `ts.Watch`, for numbers of each layer in `info.watch`.

    `extra` (another network) is neither differentiated nor donated. Batches may be on the host.

    Raises, before anything is compiled: WrongTypeError, and LossError for a loss_fn that cannot be
    used or that no trained leaf moves. When called: StateError for a donated state, NonFiniteError
    under "raise" (but a traced state is skipped, because nothing can wait there: give `fit` of a
    function that calls the step `max_bad=1`; and a dynamic loss scale may come down).

    >>> import jax.numpy as jnp
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
    return TrainStep(
        loss_fn,
        accumulate=accumulate,
        on_nonfinite=on_nonfinite,
        donate=donate,
        remat=remat,
        norms=norms,
        axis_name=axis_name,
        at_once=at_once,
        per_example=per_example,
        noise_scale=noise_scale,
        check_rows=check_rows,
        watch=watch,
    )


def check_is_train_step(step: Any, where: str) -> None:
    if not isinstance(step, TrainStep):
        raise WrongTypeError("step", where, trees.describe(step), "a ts.train_step(loss_fn)")


@dataclass(frozen=True)
class EvalStep:
    """The result of `eval_step(loss_fn, ...)`: `f(state, batch, **extra) -> Loss`."""

    loss_fn: Function
    axis_name: AxisName = None
    carry: bool = False

    def __post_init__(self) -> None:
        checks.check_flags("eval_step()", carry=self.carry)
        _ = self._fn  # raises its errors here, not in the first call

    @functools.cached_property
    def _fn(self) -> LossFn:
        return LossFn.of(self.loss_fn)

    def pure(self, state: TrainState, batch: PyTree, extra: Extra) -> Loss:
        """The evaluation without compilation; for a population, the evaluation of each member.

        For your program: `jax.jit(f.pure)(state, batch, {})`; `extra` is a dict.
        """
        return _over_members(self._evaluate_member, state, batch, extra)

    def _evaluate_member(self, state: TrainState, batch: PyTree, extra: Extra) -> Loss:
        keywords = self._fn.keywords(state, extra, train=False)
        inputs = inputs_of_loss_fn(self._fn, state, state.params, batch, keywords, train=False)
        loss = self._fn(*inputs, keywords, merges=True)
        if axes := axes_around(self.axis_name, "eval_step()"):
            from tsunax.microbatches import loss_over_devices

            loss = loss_over_devices(loss, axes)
        if self.carry or loss.model_state is None:
            return loss
        old, new = map(jax.tree.leaves, (state.model_state, loss.model_state))
        self.changes.append(len(old) != len(new) or any(map(operator.is_not, old, new)))
        return dataclasses.replace(loss, model_state=None)

    @functools.cached_property
    def changes(self) -> list[bool]:
        """For each trace whether it dropped a model state that the loss function had changed."""
        return []

    @functools.cached_property
    def carrying(self) -> EvalStep:
        """The same evaluation with `carry=True`."""
        return dataclasses.replace(self, carry=True)

    @functools.cached_property
    def _compiled(self) -> Any:
        return jax.jit(self.pure)

    def part_read(self, state: TrainState) -> TrainState:
        """The part of a state that an evaluation reads: a new rule or freeze compiles nothing."""
        average = "average" if "ema" in self._fn.names else ""
        selected = state.plan.selected if average else None
        plan = Plan(None, None, selected, state.plan.precision, state.plan.overwritten)
        read = "clock", "params", "model_state", average
        none = dict.fromkeys(f.name for f in dataclasses.fields(state) if f.name not in read)
        return dataclasses.replace(state, **{**none, "plan": plan})

    def __call__(self, state: TrainState, batch: PyTree = None, **extra: Any) -> Loss:
        run = lambda state, *args: self._compiled(self.part_read(state), *args)
        return call_on_mesh(run, state, batch, extra, "eval_step()", whole=True)

    def call_placed(self, state: TrainState, batch: PyTree, **extra: Any) -> Loss:
        """A call that checks and moves nothing; `state` is the result of `part_read`."""
        return self._compiled(state, batch, extra)

    def trace(self, state: TrainState, batch: PyTree, extra: Extra) -> jax.stages.Traced:
        """The traced program of such a call; `extra` is a dict."""
        run = lambda state, *args: self._compiled.trace(self.part_read(state), *args)
        return call_on_mesh(run, state, batch, extra, "eval_step()", whole=True)

    def __getstate__(self) -> dict[str, Any]:
        return {"loss_fn": self.loss_fn, "axis_name": self.axis_name, "carry": self.carry}


def eval_step(loss_fn: Function, *, axis_name: AxisName = None, carry: bool = False) -> EvalStep:
    """The compiled evaluation of a step's `loss_fn`: `f(state, batch, **extra) -> Loss`.

    `train` is False, there is a `key` only if you pass one, and `model_state` is read only; the
    precision comes from the state. Results of several batches merge: `a.merge(b).compute()` is the
    mean over all rows of both. With `carry=True` the Loss has the `model_state` that `loss_fn`
    returns, and `evaluate` gives it to the next batch: hidden states, for example. `axis_name` and
    errors are as in `train_step`.

    >>> import jax.numpy as jnp
    >>> import tsunax as ts
    >>> state = ts.setup(ts.rules.sgd(0.1), {"w": jnp.array([1.0, 2.0])})
    >>> f = eval_step(lambda params, x: jnp.mean(x @ params["w"]))
    >>> float(f(state, jnp.eye(2)).merge(f(state, jnp.ones((1, 2)))).compute())
    2.0
    """
    return EvalStep(loss_fn, axis_name, carry)


__all__ = ["EvalStep", "TrainStep", "eval_step", "train_step"]
