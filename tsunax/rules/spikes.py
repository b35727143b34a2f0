"""`reject_spikes`: a rule that rejects steps whose gradient norm or loss is far above its band."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

import jax
import jax.numpy as jnp
import numpy as np

from tsunax.guard import square_sums
from tsunax.rules.extra_arguments import as_rule
from tsunax.rules.live_factory import live
from tsunax.rules.number_table import as_scalar


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class SpikeState:
    """State of `reject_spikes`: running statistics of the steps that were applied, and its report.

    One array, because on a small step each further one costs as much as all of the arithmetic.
    Columns: the log of the gradient norm, the loss. Rows: the centre, the mean distance from it,
    the number of steps, inf for a spike.
    """

    band: jax.Array  # f32[4, 2]
    whats: ClassVar[tuple[str, ...]] = (
        "gradient norm: a spike, above its running band",
        "loss: a spike, above its running band",
    )

    @property
    def values(self) -> jax.Array:
        return self.band[3]


def _reject_spikes(factor: float = 6.0, decay: float = 0.98, warmup: int = 50):
    """Reject a step whose gradient norm or loss is far above those of the last steps.

    Put it first in a chain. The band of about `1 / (1 - decay)` last steps reaches `factor` mean
    distances above their mean (6: 4.8 standard deviations of a Gaussian, one step in a million) and
    at least to twice the mean, so that a ripple in a quiet run is no spike. Norms are compared on a
    log scale. Norms vary widely at the start: nothing is rejected in the first `warmup` steps.
    Rejected steps change no statistics. A level that has risen for good is rejected for good: watch
    `state.rejected_in_a_row`. Raises HyperparameterError for a `decay` outside of [0, 1).
    """
    reach, rate = as_scalar(factor), 1 - decay

    def init(params):
        return SpikeState(jnp.zeros((4, 2), jnp.float32))

    def update(updates, state, params=None, *, value=0.0, outside=0.0, **_):
        norm = jnp.sqrt(sum(square_sums(updates)) + outside)
        now = jnp.stack([jnp.log(jnp.maximum(norm, 1e-30)), value]).astype(jnp.float32)
        centre, spread, seen, _ = state.band
        distance = now - centre
        # the double of either
        room = jnp.where(np.array([True, False]), np.float32(np.log(2)), jnp.abs(centre))
        spike = (distance > jnp.maximum(reach * spread, room)) & (seen >= warmup)
        step = jnp.where(seen == 0, 1, jnp.float32(rate))
        spread = spread + step * jnp.where(seen == 0, 0, jnp.abs(distance) - spread)
        report = jnp.where(spike, np.float32(np.inf), 0)
        return updates, SpikeState(jnp.stack([centre + step * distance, spread, seen + 1, report]))

    return as_rule(init, update)


reject_spikes: Final = live(_reject_spikes, static=("warmup",))
