"""How much of its devices a run of `fit` uses, as columns of its history."""

import math
import weakref
from dataclasses import dataclass, field
from typing import Any

import jax

from tsunax._core import PyTree, checks, trees
from tsunax.errors import HyperparameterError
from tsunax.insight import _cost, _memory, _roofline
from tsunax.program import TrainStep, check_is_train_step
from tsunax.run.info_columns import most_calls
from tsunax.state import TrainState


@dataclass(frozen=True)
class Usage:
    """A callback of `fit`: see `usage`."""

    flops: float  # products of a call, on all devices
    peak: float | None  # FLOP/s of all devices; None if it is unknown
    # a weak reference to the run, which keeps no state alive; step and calls of the last row
    last_row: list[Any] = field(default_factory=list, repr=False, compare=False)

    def __call__(self, run: Any) -> None:
        stats = [device.memory_stats() or {} for device in jax.local_devices()]
        peaks = [x["peak_bytes_in_use"] for x in stats if "peak_bytes_in_use" in x]
        if peaks:
            run.log(peak_bytes=max(peaks))
        rate = run.metrics.get("steps_per_second")
        if rate and self.peak:
            run.log(mfu=rate * self._calls_per_step(run) * self.flops / self.peak)

    def _calls_per_step(self, run: Any) -> float:
        """Above 1 with `rules.accumulate`, and if calls were rejected since the last row."""
        step, calls = run.step, most_calls(run.state)
        old_run, old_step, old_calls = self.last_row or (lambda: None, 0, 0)
        self.last_row[:] = weakref.ref(run), step, calls
        if old_run() is not run or old_step >= step:
            old_step = old_calls = 0
        return (calls - old_calls) / max(step - old_step, 1)


@checks.naming_arguments
def usage(
    step: TrainStep,
    state: TrainState,
    batch: PyTree = None,
    *,
    peak: float | None = None,
    **extra: Any,
) -> Usage:
    """A callback of `fit` that logs `mfu` and `peak_bytes` with the rows, if they are known.

        callbacks=ts.callbacks.every(10, ts.insight.usage(step, state, batch))

    `mfu` is the fraction, 0 to 1, of the peak of all devices that the products and convolutions of
    the step reach, counted in its traced program, with the recomputations of `remat`; nothing is
    compiled or run. `peak_bytes` is the largest peak of memory of a device of this process until
    now; a CPU does not report it. Tokens a second are `examples_per_second` of a loss that is a
    mean over tokens.

    Args:
      step, state, batch, extra: as for the step; arrays, or shapes.
      peak: FLOP/s of one device. By default from its data sheet (products in 16 bits); without a
        data sheet there is no `mfu`.

    Raises WrongTypeError for another step, HyperparameterError for another `peak`.

    >>> import jax.numpy as jnp, tsunax as ts
    >>> step = ts.train_step(lambda params, x: jnp.mean((x @ params["w"]) ** 2))
    >>> state = ts.setup(ts.rules.sgd(0.1), {"w": jnp.ones((64, 32))})
    >>> usage(step, state, jnp.ones((8, 64)), peak=1e12).flops == 2 * 2 * 8 * 64 * 32
    True
    """
    check_is_train_step(step, "usage()")
    if peak is not None and not (checks.is_real(peak) and 0 < peak < math.inf):
        raise HyperparameterError("peak", "usage()", trees.describe(peak), "FLOP/s, above 0")
    mesh, device = _memory.mesh_of(state), _memory.device_of_state(state)
    sheet = _roofline.DATA_SHEETS.get(device.device_kind)
    peak = peak or (None if sheet is None else sheet.flops)
    shapes, extra_shapes = _memory.as_shapes(state, batch, extra)
    flops = _cost.flops_of(step.trace(state, shapes, **extra_shapes).jaxpr)
    return Usage(flops, peak and peak * (1 if mesh is None else mesh.size))
