"""Mixed precision: the dtypes of a training run, and the loss scale of float16 gradients.

Parameters, optimizer state, norms, losses and averages stay float32. In training, the policy of
the state casts params and the inputs of the model to `compute`; targets and weights stay as they
are. Evaluations compute in float32.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from tsunax._core import Function, PyTree, Scalar, Where, checks, patterns, trees
from tsunax.errors import StateError, WrongTypeError, unknown

DTYPES = ("bfloat16", "float16", "float32", "float64")


@dataclass(frozen=True)
class Policy:
    """Dtypes of a training run: `setup(..., precision=Policy(compute="bfloat16"))`.

    `precision="bfloat16"` is short for that. `param`, `compute`, `evaluate` and `output` are names
    of dtypes: of stored params, of the computation of loss_fn in training and in an evaluation
    (`evaluate=None`: `compute`, but float32 at least), and of `to_output`. `rounding="stochastic"`
    stores bfloat16 params without float32 master copies. `moments="bfloat16"` stores the arrays of
    the rule that have the shape of their parameter (both moments of Adam) in bfloat16, rounded
    stochastically; the rule computes with them in float32. Copies of params and the sums of
    `rules.accumulate` stay float32. It takes a key: `setup(..., key=0)`.

    Inputs are the float leaves of the batch that meet params in a matrix product or convolution of
    loss_fn. If other operations read them (`x * params["scale"]`), name them with the pattern
    `batch`. A leaf that is input and target at once, as in an autoencoder, is an input: give it
    twice to keep the target exact. Raises WrongTypeError for an unknown dtype, and for stochastic
    rounding of other params than bfloat16.

    >>> Policy(compute="bfloat16").to_compute({"w": jnp.ones(2), "n": 3})["w"].dtype
    dtype(bfloat16)
    """

    param: str = "float32"  # shorter dtypes have a float32 master copy of each param
    compute: str = "float32"
    evaluate: str | None = None
    output: str = "float32"  # for the last line of a model: `policy.to_output(y)`
    batch: Where = None  # pattern of the inputs; None: they are found by tracing loss_fn
    rounding: str = "nearest"
    moments: str = "float32"

    def __post_init__(self) -> None:
        for name in ("param", "compute", "evaluate", "output"):
            value = getattr(self, name)
            if name == "evaluate" and value is None:
                value = self.compute if jnp.dtype(self.compute).itemsize >= 4 else "float32"
            dtype = jnp.dtype(value).name  # NumPy reads None as float64
            if value is None or dtype not in DTYPES:
                raise WrongTypeError(name, "Policy()", trees.describe(value), " or ".join(DTYPES))
            object.__setattr__(self, name, dtype)
        checks.check_choice(self.rounding, "Policy()", "rounding", ("nearest", "stochastic"))
        checks.check_choice(self.moments, "Policy()", "moments", ("float32", "bfloat16"))
        if self.stochastic and self.param != "bfloat16":
            raise WrongTypeError("param", "Policy()", self.param, "'bfloat16', to round to it")
        if isinstance(self.batch, list):  # policies are compared and hashed
            object.__setattr__(self, "batch", tuple(self.batch))
        if self.batch is not None:
            patterns.compile_where(self.batch, "Policy(batch=)")

    def to_param(self, tree: PyTree) -> PyTree:
        """`tree` with its real float leaves in the dtype `param`; other leaves are unchanged."""
        return cast(tree, self.param)

    def to_compute(self, tree: PyTree) -> PyTree:
        """`tree` with its real float leaves in the dtype `compute`; other leaves are unchanged."""
        return cast(tree, self.compute)

    def to_output(self, tree: PyTree) -> PyTree:
        """`tree` with its real float leaves in the dtype `output`; other leaves are unchanged."""
        return cast(tree, self.output)

    def loss_dtype(self, train: bool) -> str:
        """The dtype of params and inputs in loss_fn: `compute if train else evaluate`."""
        return self.compute if train else self.evaluate  # type: ignore[return-value]

    def batch_to_compute(self, batch: PyTree, train: bool, inputs: Function) -> PyTree:
        """The tree `batch` with its inputs in the dtype `loss_dtype(train)`; other leaves stay.

        Without the pattern `self.batch`, inputs are the leaves for which `inputs(batch)` is true.
        `inputs` gets the batch with all float leaves cast, and is only called if a cast changed it.
        Raises PatternError if `self.batch` matches no leaf.
        """
        cast_batch = cast(batch, self.loss_dtype(train))
        pairs = list(zip(jax.tree.leaves(batch), jax.tree.leaves(cast_batch), strict=True))
        if all(trees.dtype_of(x) == trees.dtype_of(y) for x, y in pairs):
            return batch
        by_pattern = lambda: patterns.select(self.batch, batch, "Policy(batch=)")
        flags = inputs(cast_batch) if self.batch is None else by_pattern()
        leaves = [y if is_input else x for (x, y), is_input in zip(pairs, flags, strict=True)]
        return jax.tree.unflatten(jax.tree.structure(batch), leaves)

    def wide(self, trained: PyTree) -> PyTree:
        """The tree `trained` as the rule gets it: in float32 if `stochastic`, else unchanged."""
        return cast(trained, "float32") if self.stochastic else trained

    def rounded(self, tree: PyTree, key: Any, calls: jax.Array) -> PyTree:
        """`tree` rounded stochastically to bfloat16, with random bits of `key` folded with `calls`.

        `calls` is the count of the state after this call (int32); see `round_stochastically`.
        """
        key = jax.random.fold_in(jax.random.fold_in(key, calls - 1), _ROUNDING_STREAM)
        return round_stochastically(tree, key)

    def in_words(self, inner: Callable[[Any], str]) -> str:
        """The outline of this policy in checkpoints of format 1, which name no default moments."""
        fields = [x for x in vars(self).items() if x != ("moments", "float32")]
        return f"Policy({', '.join(f'{name}={inner(x)}' for name, x in fields)})"

    def wide_moments(self, opt_state: PyTree) -> PyTree:
        """The `opt_state` as the rule gets it: leaves that are stored in bfloat16 as float32."""
        widened = lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x
        return opt_state if self.moments == "float32" else jax.tree.map(widened, opt_state)

    def rounded_moments(self, new: PyTree, old: PyTree, key: Any, calls: jax.Array) -> PyTree:
        """The `new` state of a rule as it is stored: stochastically rounded to the dtypes of `old`.

        The random bits come from `key` folded with `calls`.
        """
        if self.moments == "float32":
            return new
        key = jax.random.fold_in(jax.random.fold_in(key, calls), _MOMENTS_STREAM)
        rounded = round_stochastically(new, key)
        return jax.tree.map(lambda r, n, o: r if o.dtype != n.dtype else n, rounded, new, old)

    @property
    def masters(self) -> bool:
        """Whether params are stored rounded, together with master copies in float32."""
        return jnp.dtype(self.param).itemsize < 4 and not self.stochastic

    @property
    def stochastic(self) -> bool:
        """Whether params are bfloat16, rounded stochastically, without master copies."""
        return self.rounding == "stochastic"


# Numbers that are folded into the key of a step, "rnd" and "mom" in ASCII. The step also folds in
# the index of a micro-batch: these are larger than any index, so that no bits are drawn twice.
_ROUNDING_STREAM, _MOMENTS_STREAM = 0x726E64, 0x6D6F6D


def as_policy(precision: str | Policy | None, where: str) -> Policy | None:
    """The policy for `setup(precision=...)`: None, a dtype's name, or a `Policy`."""
    if precision is None or isinstance(precision, Policy):
        return precision
    if isinstance(precision, str) and precision in DTYPES:
        return Policy(compute=precision)
    raise WrongTypeError(unknown("precision", where, str(precision), DTYPES, "Or give a Policy."))


def cast(tree: PyTree, dtype: DTypeLike) -> PyTree:
    """The tree with its real float leaves in another dtype; other leaves are unchanged."""
    is_castable = lambda x: trees.is_a(x, np.floating) and not isinstance(x, jax.ShapeDtypeStruct)
    return jax.tree.map(lambda x: jnp.asarray(x, dtype) if is_castable(x) else x, tree)


def round_stochastically(tree: PyTree, key: jax.Array) -> PyTree:
    """Round real float leaves to bfloat16, up or down at random so that the mean is kept.

    Other leaves stay as they are. Random bits are added below the last bit that is kept, and cut
    off (Zamirai et al. 2020, arXiv:2010.06192).
    """
    leaves, treedef = jax.tree.flatten(tree)

    def round_leaf(x: Any, key: jax.Array):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
        noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
        rounded = jax.lax.bitcast_convert_type((bits + noise) & jnp.uint32(0xFFFF0000), jnp.float32)
        return jnp.where(jnp.isfinite(x), rounded, x).astype(jnp.bfloat16)

    return treedef.unflatten(
        [round_leaf(x, jax.random.fold_in(key, i)) for i, x in enumerate(leaves)]
    )


# The loss scale


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("scale", "good"),
    meta_fields=("dynamic", "interval", "factor", "floor", "ceiling"),
)
@dataclass(frozen=True)
class LossScale:
    """A factor on the loss that keeps small float16 gradients from becoming zero.

    `scale`, a float32 scalar, grows by `factor` after `interval` applied steps in a row (`good`
    counts them) and shrinks by `factor` after a step that overflowed, within [floor, ceiling].
    `dynamic=False` never changes it. `setup` raises StateError for a scale outside of that range.
    From Micikevicius et al. 2018, arXiv:1710.03740.

        state = ts.setup(rule, params, precision="float16", loss_scale=LossScale(interval=500))
    """

    scale: Scalar = 2.0**16  # f32
    good: Scalar = 0  # int32: applied steps since the scale last changed
    dynamic: bool = True
    interval: int = 2000
    factor: float = 2.0
    floor: float = 1.0
    ceiling: float = 2.0**24

    def grown(self, applied: jax.Array, overflowed: jax.Array) -> "LossScale":
        """The scale after a step; the bool scalars say if it was `applied` or `overflowed`.

        Both are false for a step that was rejected for another reason: then nothing changes.
        `scale / factor` after an overflow, `scale * factor` after `interval` good steps.
        """
        if not self.dynamic:
            return self
        is_due = applied & (self.good + 1 >= self.interval)
        larger = jnp.minimum(self.scale * self.factor, self.ceiling)
        smaller = jnp.maximum(self.scale / self.factor, self.floor)
        return dataclasses.replace(
            self,
            scale=jnp.where(overflowed, smaller, jnp.where(is_due, larger, self.scale)),
            good=jnp.where(overflowed | is_due, 0, self.good + applied.astype(jnp.int32)),
        )


def as_loss_scale(
    loss_scale: ArrayLike | LossScale | str | None, precision: Policy | None, where: str
) -> LossScale | None:
    """The loss scale for `setup(loss_scale=...)`: None, "dynamic", a number, or a `LossScale`.

    float16 gets a dynamic scale by default, because small float16 gradients become zero silently.
    """
    if loss_scale is None and (precision is None or precision.compute != "float16"):
        return None
    if loss_scale is None or (isinstance(loss_scale, str) and loss_scale == "dynamic"):
        loss_scale = LossScale()
    if not isinstance(loss_scale, LossScale):
        loss_scale = LossScale(loss_scale, dynamic=False)
    scale = loss_scale.scale
    smallest, largest = float(jnp.finfo("float32").tiny), float(jnp.finfo("float32").max)
    low, high = smallest, largest
    if loss_scale.dynamic:
        low, high = loss_scale.floor, loss_scale.ceiling
    # A scalar, or an array with a scale per member of a population. True would be a scale of 1.
    is_in_range = checks.is_real(scale) and (
        trees.is_traced(scale) or np.all((low <= scale) & (scale <= high))
    )
    is_growing = loss_scale.factor > 1 and loss_scale.interval >= 1
    if not (is_in_range and is_growing and smallest <= low <= high <= largest):
        bounds = f"{smallest:.3g} ≤ floor ≤ scale ≤ ceiling ≤ {largest:.3g}"
        raise StateError("loss_scale", where, loss_scale, f"{bounds}, factor > 1, interval ≥ 1")
    return dataclasses.replace(
        loss_scale,
        scale=jnp.asarray(loss_scale.scale, jnp.float32),
        good=jnp.asarray(loss_scale.good, jnp.int32),
    )


__all__ = ["LossScale", "Policy"]
