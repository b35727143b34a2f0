"""Averages of the parameters over training: exponential, or uniform (Polyak, stochastic weight
averaging).

An average is a float32 tree like the parameters, moved once per applied step. Evaluate with
`averaged(state)`. This file uses no states.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownLambdaType=false

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from tsunax._core import Function, PyTree, Scalar, checks, trees
from tsunax.errors import WrongTypeError
from tsunax.rules import number_checks


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Average:
    """The average of a run; made by `ema`, `polyak` and `swa`, for `setup(..., ema=...)`."""

    params: PyTree  # f32, like the trained params. None before setup
    count: Scalar  # int32: how many params were averaged
    rate: Scalar  # f32: 1 - decay. Not read by a uniform average
    uniform: bool = field(metadata={"static": True})
    warmup: bool = field(metadata={"static": True})
    start: int = field(metadata={"static": True})
    every: int = field(metadata={"static": True})
    # The decay at each step, in place of the rate.
    schedule: Function | None = field(default=None, metadata={"static": True})

    def starting_at(self, params: PyTree) -> "Average":
        """The average at the start of a run with these params."""
        wide = jax.tree.map(lambda x: jnp.array(x, trees.wide_dtype(x), copy=True), params)
        rate = jnp.asarray(self.rate, jnp.float32)
        return dataclasses.replace(self, params=wide, count=jnp.int32(0), rate=rate)

    def scheduled_rate(self, step: jax.Array) -> Any:
        """1 - decay of the update that leads to `step`; NaN if the decay is not in [0, 1].

        The verdict rejects a step with such a rate. A millionth is left to rounding.
        """
        rate = self._rate_at(step)
        return jnp.where((jnp.abs(rate - 0.5) <= 0.5 + 1e-6) | (step <= self.start), rate, jnp.nan)

    def _rate_at(self, step: jax.Array) -> jax.Array:
        # The first update has step 0, as for the rates of a rule.
        decay = jnp.asarray(self.schedule(step - 1), jnp.float32)  # pyright: ignore[reportOptionalCall]
        return jnp.where(step > self.start, 1 - decay, 1)

    def moved(self, params: PyTree, step: jax.Array) -> "Average":
        """The average after `step` updates led to these params: `a + rate · (params - a)`."""
        rate = 1 / (self.count + 1).astype(jnp.float32) if self.uniform else self.rate
        # A rate out of its range is clipped, because a step without a verdict applies it.
        rate = rate if self.schedule is None else jnp.clip(self._rate_at(step), 0, 1)
        if self.warmup:
            # The decay is at most (1 + n) / (10 + n).
            rate = jnp.maximum(rate, 9 / (10 + self.count.astype(jnp.float32)))
        counted = (step > self.start) & ((step - self.start) % self.every == 0)
        rate = jnp.where(step > self.start, rate, 1)  # until it starts, an average is the params

        def move(a: Any, p: Any):
            new = jnp.where(rate == 1, p.astype(a.dtype), a + rate.astype(a.dtype) * (p - a))
            return jnp.where(counted | (step <= self.start), new, a)

        return dataclasses.replace(
            self,
            params=jax.tree.map(move, self.params, params),
            count=self.count + counted.astype(jnp.int32),
        )


def _average(
    where: str, start: int, interval: int, rate: Any = None, warmup: bool = False
) -> Average:
    """An average before its start; without a rate, a uniform one."""
    checks.check_count(start, where, "start", 0)
    checks.check_count(interval, where, "every")
    uniform = rate is None
    return Average(None, 0, 0.0 if uniform else rate, uniform, warmup, int(start), int(interval))


def ema(
    decay: Scalar | Function = 0.999, *, warmup: bool = False, start: int = 0, every: int = 1
) -> Average:
    """`a ← decay · a + (1 - decay) · params` after every `every`-th applied update beyond `start`.

    `decay` is a number in [0, 1), or a schedule, as for the momentum of BYOL and DINO, which may
    reach 1. `start` and `every` are counts of updates. With `warmup` the decay is at most
    (1 + n) / (10 + n) after n averaged params, so that the initial params soon lose their weight
    (as in TensorFlow's ExponentialMovingAverage). Raises HyperparameterError for a number out of
    its range.

    >>> import tsunax as ts
    >>> state = ts.setup(ts.rules.sgd(1.0), {"w": jnp.zeros(2)}, ema=0.9)
    >>> state, _ = ts.update(state, {"w": -jnp.ones(2)})
    >>> state.params["w"], ts.averaged(state).params["w"]
    (Array([1., 1.], dtype=float32), Array([0.1, 0.1], dtype=float32))
    """
    checks.check_flags("ema()", warmup=warmup)
    if callable(decay):
        number_checks.check_schedule("ema()", "decay", decay)
        return dataclasses.replace(_average("ema()", start, every, 1.0, warmup), schedule=decay)
    number_checks.check_number("ema()", "decay", decay)
    return _average("ema()", start, every, 1 - decay, warmup)


def polyak(*, start: int = 0, every: int = 1) -> Average:
    """The mean of the params after every `every`-th applied update beyond `start`: float32.

    `a ← a + (params - a) / n` for the n-th averaged params. `start` >= 0 and `every` >= 1 are
    counts of updates; other values raise HyperparameterError or WrongTypeError. (Polyak and
    Juditsky 1992.)

        state = ts.setup(ts.rules.sgd(0.1), params, ema=ts.averages.polyak(start=1000))
    """
    return _average("polyak()", start, every)


def swa(start: int, every: int) -> Average:
    """Stochastic weight averaging: the mean of the params after every cycle of `every` updates.

    The same as `polyak(start=start, every=every)`, HyperparameterError included: `start` updates
    come before the first cycle. Use a cyclic or constant learning rate (Izmailov et al. 2018,
    arXiv:1803.05407), and `ts.update_batch_stats` at the end if the model has batch statistics.
    """
    return _average("swa()", start, every)


def as_average(
    average: ArrayLike | Average | Function | None, where: str, name: str = "ema"
) -> Average | None:
    """The average that `setup(ema=...)` means: None, a decay, or an `Average`."""
    if average is None or isinstance(average, Average):
        return average
    if isinstance(average, bool) or (trees.dtype_of(average) is None and not callable(average)):
        raise WrongTypeError(
            name,
            where,
            got=trees.describe(average),
            expected="a decay in [0, 1), or ts.averages.ema(...)",
        )
    return ema(average)


__all__ = ["ema", "polyak", "swa"]
