"""A loss function, the options of its gradient, and its call; the result is a `Loss`.

This file says which keywords there are, and in which dtypes the function gets params and batch. It
computes no gradient: that is for a *strategy*, which is chosen when the step is made. One batch is
in `gradients.py`, micro-batches in `microbatches.py`, single rows in `per_example.py`, and a loss
of the whole batch in `whole_batch.py`.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownLambdaType=false
import dataclasses
import functools
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from tsunax import guard
from tsunax._core import AxisName, Extra, Function, PyTree, trees
from tsunax.errors import KeywordError, LossError, TsunaxError, remedy, unknown
from tsunax.loss import Loss, as_loss, loss_of, rows_of, uneven
from tsunax.state import TrainState, averaged_params, with_part

# A loss function with one of these as the first argument after params takes no batch.
_INSTEAD_OF_BATCH = frozenset({"key", "model_state", "step", "ema"})
# Names of arguments that the step passes to loss_fn or to the rule. Users cannot pass them.
_STEP_NAMES = frozenset(
    "model_state train step state params batch at grads loss on_nonfinite norms weight value grad "
    "value_fn obj_fn grad_fn updates outside flush grad_norm device_mesh".split()
)


# The Loss of (rows, keywords), and the gradients of its mean.
Gradient = Callable[[Any, Extra], tuple[Loss, Any]]


def hash_of_fields(x: Any) -> int:
    """The hash of the fields of a frozen dataclass, or its identity if a field has none.

    A loss function that is a plain dataclass, or has arrays as fields, cannot be hashed.
    """
    try:
        return hash(tuple(getattr(x, field.name) for field in dataclasses.fields(x)))
    except TypeError:
        return object.__hash__(x)


@dataclass(frozen=True)
class MadeOfLossFn:
    """The base of a step and of an evaluation, which are made of a loss function."""

    loss_fn: Function


@dataclass(frozen=True)
class GradientOptions(MadeOfLossFn):
    """The options of a gradient, which `train_step` explains."""

    accumulate: int = 1
    remat: bool | str | Function | None = None
    on_nonfinite: str = "skip"
    axis_name: AxisName = None
    per_example: bool | Function = False
    noise_scale: bool = False
    check_rows: bool = True

    def __hash__(self) -> int:
        return hash_of_fields(self)

    @property
    def reaction(self) -> guard.Reaction:
        """What happens to a step that is not finite."""
        return guard.POLICIES[self.on_nonfinite]

    @property
    def is_cut(self) -> bool:
        """Whether a batch is cut, into micro-batches or rows."""
        return self.accumulate > 1 or self.per_example is not False


@dataclass(frozen=True)
class Problem:
    """One gradient to compute: of which function, and over which rows."""

    gradient: Gradient
    batch: PyTree
    keywords: Extra
    state: TrainState
    overwritten: PyTree  # leaves that get their gradient as the next value (fp8 scales)
    axes: tuple[str, ...]  # the named axes of devices, which have different rows
    finish: Function  # scaled gradients of JAX -> the gradient of the loss, conjugated
    square: Callable[[PyTree], jax.Array] | None  # the squared norm of a gradient, for noise_scale


Strategy = Callable[[Problem], tuple[Loss, PyTree]]


class CutsItsBatch:
    """The base of `WholeBatch`, a loss function that computes itself in micro-batches."""

    in_micro_batches: Callable[[int], Function]
    keywords_of_parts: Callable[[], "LossFn"]


@dataclass(frozen=True)
class LossFn:
    """A loss function and the keywords of its signature, the only keywords that it gets."""

    fn: Function
    names: tuple[str, ...]
    optional: frozenset[str]
    takes_any: bool
    takes_batch: bool = True  # False: `loss_fn(params, key)` draws its data
    # the words of its errors
    title: str = "loss_fn"
    caller: str = "the step"
    call: str = "step(state, batch, {}=...)"

    @classmethod
    def of(cls, fn: Function) -> "LossFn":
        if isinstance(fn, CutsItsBatch):
            return fn.keywords_of_parts()
        try:
            parameters = list(inspect.signature(fn).parameters.values())
        except ValueError:  # builtins without a signature
            return cls(fn, (), frozenset(), False)
        of_kind = lambda *kinds: [p for p in parameters if p.kind.name in kinds]
        positional = of_kind("POSITIONAL_ONLY", "POSITIONAL_OR_KEYWORD")
        if [p.name for p in positional[:2]] == ["batch", "params"]:  # swapped, they may train
            raise LossError("signature", "", trees.describe_call(fn), "loss_fn(params, batch, ...)")
        starred = of_kind("VAR_POSITIONAL")
        later = positional[1:] + of_kind("KEYWORD_ONLY")
        takes_batch = bool(starred) or not later or later[0].name not in _INSTEAD_OF_BATCH
        has_batch_parameter = takes_batch and len(positional) > 1  # it may be in *args instead
        keywords = later[1:] if has_batch_parameter else later
        optional = frozenset(p.name for p in keywords if p.default is not p.empty)
        names = tuple(p.name for p in keywords)
        return cls(fn, names, optional, bool(of_kind("VAR_KEYWORD")), takes_batch)

    def keywords(self, state: TrainState, extra: Extra, *, train: bool) -> Extra:
        """The keywords that this function names, from the state and `extra`."""
        for name in extra:
            if name in _STEP_NAMES or (name == "key" and train and state.key is not None):
                expected = "another name, because the step gives this one itself"
                raise LossError("keyword", self.caller, repr(name), expected)
        if extra.get("mask") is not None:
            extra = extra | {"mask": jnp.asarray(extra["mask"])}
        # Without a mask all rows count, for each cut of the batch.
        offered = {"mask": None, "train": train, "step": state.step, **extra}
        if train and state.key is not None:
            offered["key"] = jax.random.fold_in(state.key, state.calls)
        if state.model_state is not None:
            offered["model_state"] = state.model_state
        if state.average is not None and "ema" in self.names:
            offered["ema"] = in_precision(state, averaged_params(state, "loss_fn"), train=train)
        out = dict(extra) if self.takes_any else {}
        for name in self.names:
            if name in offered:
                out[name] = offered[name]
            elif name not in self.optional:
                fix = (
                    f"Give it to the state, setup(..., {name}=...), or to {self.caller}, "
                    f"{self.call.format(name)}. In an evaluation there is no key: write key=None."
                )
                raise LossError(unknown("keyword", self.title, name, offered, fix))
        for name in extra:
            if name not in out:
                fix = f"{self.title} does not name it: add it to its signature, or leave it out."
                text = unknown("keyword", self.caller, name, self.names, fix)
                raise KeywordError(text, name)
        return out

    def __call__(
        self, params: PyTree, batch: PyTree, keywords: Extra, *, merges: bool = False
    ) -> Loss:
        """The `Loss` of one batch; a scalar is weighed by the number of rows, or of unmasked ones.

        If leaves differ in rows, the weight is 1. If the Loss `merges` with the Loss of other
        batches, raises LossError instead.
        """
        mask, rows = keywords.get("mask"), rows_of(batch)
        # New containers: flax NNX refuses to merge modules with containers of an outer trace.
        keywords = jax.tree.map(lambda x: x, keywords)
        if mask is None and "mask" in self.names:
            keywords["mask"] = jnp.ones(rows, np.float32)
        if not self.takes_batch and jax.tree.leaves(batch):
            raise LossError("batch", trees.describe_call(self.fn), got="a batch", expected="none")
        inputs = (params, batch) if self.takes_batch else (params,)
        call = lambda keywords: self.fn(*inputs, **keywords)
        try:
            out = call(keywords)
        except Exception as error:
            if not isinstance(error, TsunaxError):
                error.add_note(_note(self.fn, batch, error))
            raise
        if isinstance(mask, Tracer):
            _check_reads_mask(lambda mask: loss_of(call({**keywords, "mask": mask})), mask)
        out = loss_of(out)
        if out.weight is None and mask is not None and np.shape(mask) == (rows,):
            out = dataclasses.replace(out, weight=jnp.sum(mask, dtype=jnp.float32))
        # The number of rows matters if it is the weight, and if a mask has to fit it.
        if (mask is not None or out.weight is None) and (fault := uneven(batch)):
            if merges or mask is not None:
                raise LossError(f"{fault} Return ts.Loss.mean(values) or ts.Loss(total, weight).")
            rows = 1
        return as_loss(out, rows)


def _note(fn: Function, batch: PyTree, error: Exception) -> str:
    """The note on an exception of the user's code: the function, and the shapes of its batch."""
    leaf_texts = [f"{path} {trees.describe(x)}".strip() for path, x in trees.leaves_at("", batch)]
    shapes = trees.listed(leaf_texts, 4) or "None"
    fix = ""
    if remedy(error):  # an error of JAX about a traced value
        fix = ". It is compiled: return values as metrics, print with jax.debug.print"
        fix = f"{fix}, branch with jnp.where"
    return f"raised by the loss function {trees.describe_call(fn)}; its batch: {shapes}{fix}"


def _check_reads_mask(loss: Callable[[jax.Array], Loss], mask: jax.Array) -> None:
    """Raise LossError if a total does not depend on the mask: rows of padding would count."""
    from tsunax._core.dataflow import dependent_results

    def totals(mask: jax.Array) -> list[Any]:
        out = loss(mask)
        return [term.total for term in out.terms] or [out.total]

    if not all(dependent_results(totals, mask)):
        got, expected = "a loss that does not use it", "one in which masked rows do not count"
        raise LossError("mask", "loss_fn", got, expected, "Return ts.Loss.mean(values, mask).")


# The call that a training step differentiates, as the models in it see it


@dataclass
class TrainingCall:
    """A call of a loss function, with the leaves of its model state."""

    model_state: list[Any]
    moved: bool = False  # whether a model in train mode returned other leaves

    def note(self, old_state: PyTree, new_state: PyTree) -> None:
        """Note that a model returned `new_state` for its state `old_state`."""
        old_leaves, new_leaves = jax.tree.leaves(old_state), jax.tree.leaves(new_state)
        # Compare shapes, because jax.jit and jax.checkpoint inside a loss function make tracers.
        shapes_of = lambda leaves: [(jnp.shape(x), jnp.result_type(x)) for x in leaves]
        if old_leaves and shapes_of(old_leaves) == shapes_of(self.model_state):
            self.moved |= list(map(id, old_leaves)) != list(map(id, new_leaves))


current_call: ContextVar[TrainingCall | None] = ContextVar("training_call", default=None)


# The params and the batch that a loss function gets


def in_precision(state: TrainState, params: PyTree, *, train: bool = True) -> PyTree:
    """The params in the dtypes in which loss_fn gets them."""
    policy, plan = state.plan.precision, state.plan
    if policy is None:
        return params
    from tsunax.precision import cast

    low = cast(params, policy.loss_dtype(train))
    if plan.overwritten is None:
        return low
    # Overwritten leaves (fp8 scales) keep their dtype.
    overwritten = trees.partition(params, plan.overwritten)[0]
    return with_part(overwritten, low, plan.overwritten)


def scaled_loss(
    fn: LossFn,
    state: TrainState,
    params: PyTree,
    batch: PyTree,
    keywords: Extra,
    whole: Loss | None = None,
) -> tuple[jax.Array, Loss]:
    """The mean times the loss scale, and the Loss. With a `whole`, the batch is a part of it."""
    call = TrainingCall(jax.tree.leaves(keywords.get("model_state")))
    token = current_call.set(call)
    try:
        loss = fn(*inputs_of_loss_fn(fn, state, params, batch, keywords), keywords)
    finally:
        current_call.reset(token)
    if call.moved and loss.model_state is None:
        got = "none, though a model in train mode made a new one"
        fix = "Write ts.Loss.mean(values, model_state=new), or =model_state to keep the old."
        raise LossError("model_state", "the result of loss_fn", got, "the new one", fix)
    mean = loss.compute() if whole is None else loss.mean_in(whole)
    if state.loss_scale is not None:
        mean = mean.astype(jnp.float32) * state.loss_scale.scale
    return mean, loss


def inputs_of_loss_fn(
    fn: LossFn,
    state: TrainState,
    params: PyTree,
    batch: PyTree,
    keywords: Extra,
    train: bool = True,
) -> tuple[Any, Any]:
    """The params and the batch as loss_fn gets them, in the precision of the state."""
    policy = state.plan.precision
    params = in_precision(state, params, train=train)
    if any(isinstance(x, Tracer) and guard.is_over_mesh(x) for x in jax.tree.leaves(params)):
        from tsunax._core import placement

        # If the axes of the mesh are explicit, no compiler gathers params that are cut (FSDP).
        params = placement.gather_params(params)
    if policy is None:
        return params, batch
    from tsunax._core.dataflow import multiplied

    model = lambda params, batch: fn(params, batch, keywords)
    is_input = functools.partial(multiplied, model, params)
    return params, policy.batch_to_compute(batch, train, is_input)
