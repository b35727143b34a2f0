"""The step as one compiled program: what is donated, and what is put back outside.

    train_step(loss_fn)(state, batch)  =  jit(update ∘ value_and_grad)(state, batch)

The formula is in `step.py`. A step has a program for each placement of its state (`Programs`).
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownLambdaType=false
# pyright: reportUnnecessaryIsInstance=false
from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tsunax._core import AxisName, Extra, Function, PyTree, checks, trees
from tsunax._step.gradients import gradient_of, search_functions
from tsunax._step.loss_fn import CutsItsBatch, GradientOptions, LossFn, hash_of_fields
from tsunax.errors import StateError, WrongTypeError
from tsunax.guard import tracing
from tsunax.loss import StaticWeight
from tsunax.state import TrainState, assemble, check_state, donated, split
from tsunax.step import StepInfo, check_norms, update_unchecked

if TYPE_CHECKING:
    from tsunax._step.finite_state import FirstLook
    from tsunax.watching import Watch


def place_state(moving: PyTree, fixed: PyTree = ()) -> tuple[Any, PyTree, PyTree]:
    """The `MeshShardings` of a state (None: on one device), and its two parts moved to them."""
    arrays = (x for x in jax.tree.leaves((moving, fixed)) if not trees.is_traced(x))
    shardings = filter(None, (getattr(x, "sharding", None) for x in arrays))
    if not any(len(sharding.device_set) > 1 for sharding in shardings):
        return None, moving, fixed
    from tsunax._core.placement import mesh_shardings, resharded

    first, second = mesh_shardings(moving, fixed), mesh_shardings(fixed, moving)
    if first is None or second is None:
        return None, moving, fixed
    return first, resharded(moving, first.of_leaves), resharded(fixed, second.of_leaves)


def check_byte_order(batch: PyTree, extra: Extra) -> None:
    """Raise DataError for a NumPy array with another byte order than the machine's.

    jit raises for such an array when it compiles, but a program that is compiled already reads its
    bytes in the wrong order.
    """
    for x in jax.tree.leaves((batch, extra)):  # at each step: a loop takes half of `any`'s time
        if isinstance(x, np.ndarray) and not x.dtype.isnative:
            leaves = (*trees.leaves_at("batch", batch), *trees.leaves_at("extra", extra))
            checks.check_dtype(x.dtype, next(path for path, leaf in leaves if leaf is x))


class Traced(NamedTuple):
    """The arguments of one trace of a step: shapes and types, no values."""

    kind: str  # "step", or "loop" for a trace in a fused loop
    shardings: PyTree  # on a mesh the sharding of each array that the step changes
    state: PyTree  # with a `jax.typeof` for each array
    arguments: dict[str, Any]  # {name: tree}, with a `jax.typeof` for each array

    @classmethod
    def from_arguments(
        cls, kind: str, shardings: Any, state: TrainState, arguments: Extra
    ) -> Traced:
        of_leaves = None if shardings is None else shardings.of_leaves
        return cls(kind, of_leaves, *jax.tree.map(jax.typeof, (state, arguments)))


class Programs(dict[Any, Any]):
    """The compiled functions of a step by the placement of its arguments, built at first use."""

    def __init__(self, build: Function) -> None:
        super().__init__()
        self._build = build
        self.traced: int = 0  # how often a loop was traced
        self._sharding: Any = None  # the sharding of the last clock, if it was on one device

    def __missing__(self, shardings: Hashable) -> Function:
        self[shardings] = self._build(shardings)
        return self[shardings]

    def place_state(self, state: TrainState, moving: PyTree, fixed: PyTree) -> tuple[Any, Any, Any]:
        """`place_state`, without a look at every leaf if the state is placed like the last one.

        Then its clock has the same sharding object: all arrays that a program returns share one.
        Raises StateError for a state that was donated.
        """
        clock = state.clock
        if self._sharding is not None and getattr(clock, "sharding", None) is self._sharding:
            if clock.is_deleted():
                raise StateError(donated("step()"))
            return None, moving, fixed
        if any(map(trees.is_gone, jax.tree.leaves((moving, fixed)))):
            raise StateError(donated("step()"))
        if not all(map(trees.is_placed, jax.tree.leaves((moving, fixed)))):
            checks.check_arrays(state, "state")
        shardings, moving, fixed = place_state(moving, fixed)
        is_on_one_device = (
            shardings is None and trees.is_placed(clock) and len(clock.devices()) == 1
        )
        self._sharding = clock.sharding if is_on_one_device else None
        return shardings, moving, fixed


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

    def __hash__(self) -> int:
        return hash_of_fields(self)

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

        # a state that was not finite before is not looked for, or shows in the judged update
        needs_no_look = not self.reaction.judges or self.norms == "update"
        return FirstLook(self, looks_at_state=not needs_no_look)

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
        if jnp.ndim(state.clock) == 1:
            return self._step_member(state, batch, extra, mesh)
        from tsunax.states import over_members

        in_step = functools.partial(self._step_member, mesh=None)  # devices share members, not work
        return over_members(in_step, state, batch, extra, group_size=self.at_once)

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
        return self.call(state, batch, extra, raises=self.reaction.raises)

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

            step_errors.RejectedCall(self, state, info, batch, extra).raise_error()
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


__all__ = ["TrainStep", "train_step"]
