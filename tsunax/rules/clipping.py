"""Clipping, decay and spikes: rules that change or reject gradients before they are used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tsunax._core import checks, trees
from tsunax._core import patterns as _patterns
from tsunax.errors import RuleError, WrongTypeError
from tsunax.guard import GOT, Report, RuleReport, square_sums
from tsunax.rules.extra_arguments import as_rule
from tsunax.rules.live_factory import live
from tsunax.rules.number_table import as_scalar


def _stateless(f: Callable) -> optax.GradientTransformationExtraArgs:
    """A rule without state from `f(updates, **extra) -> updates`."""

    def update(updates, state, params=None, **extra):
        return f(updates, **extra), state

    return as_rule(lambda params: optax.EmptyState(), update)


def _norm_of(updates, *, outside=0.0, grad_norm=None, **_):
    """The norm of all gradients: from the verdict, or with the squares `outside` of this group."""
    return jnp.sqrt(sum(square_sums(updates)) + outside) if grad_norm is None else grad_norm


def _clip(max_delta: optax.ScalarOrSchedule):
    """Clamp each element of the gradient, `g ← min(max(g, -max_delta), max_delta)`; NaN stays NaN.

    The direction changes. `max_delta` is a number or a schedule; HyperparameterError unless it is
    finite and above 0.

    >>> rule = clip(1.0)
    >>> rule.update(jnp.array([0.5, -3.0]), rule.init(jnp.ones(2)))[0]
    Array([ 0.5, -1. ], dtype=float32)
    """
    bound = as_scalar(max_delta)
    return _stateless(
        lambda updates, **_: jax.tree.map(lambda g: jnp.clip(g, -bound, bound), updates)
    )


def _clip_by_global_norm(max_norm: optax.ScalarOrSchedule):
    """Scale the whole gradient to an L2 norm of at most `max_norm`.

    It is one f32 norm over all leaves that are trained and not frozen. In a group of `partition` it
    covers all groups if the rule is the first of its chain, else this group; in an `accumulate` of
    a group, this group. (In `optax.chain` every rule counts as the first.) A step with a norm that
    is not finite is rejected; plain optax code does the same as `optax.clip_by_global_norm`.
    HyperparameterError unless `max_norm` is above 0. `g ← g · min(1, max_norm / norm)`.

    >>> rule = clip_by_global_norm(1.0)
    >>> rule.update(jnp.array([3.0, 4.0]), rule.init(jnp.ones(2)))[0]
    Array([0.6, 0.8], dtype=float32)
    """
    bound = as_scalar(max_norm)

    def clip(updates, **extra):
        norm = _norm_of(updates, **extra)
        is_within = (norm < bound) | (norm == 0)  # a schedule may bring the bound to 0
        scaled = lambda g: jnp.where(is_within, g, (g / norm.astype(g.dtype)) * bound)
        return jax.tree.map(scaled, updates)

    return _stateless(clip)


def _clip_by_norm(max_norm: optax.ScalarOrSchedule, p: float = 2, throw: bool = True):
    """Scale each array by itself to a p-norm of at most `max_norm` (Optimisers.jl's `ClipNorm`).

    `p` is any real number, ±inf, or 0 (the count of nonzeros). Norms are taken in f32. With
    `throw`, a norm that is not finite rejects the step, and the error names p, the norm, the path
    and the shape; without, the updates have NaN in them. HyperparameterError unless `max_norm` is
    above 0, WrongTypeError for another `p`.
    """
    if np.ndim(p) or not checks.is_real(p) or p != p:  # NaN
        raise WrongTypeError("p", "clip_by_norm()", trees.describe(p), "a real number, ±inf or 0")
    bound = as_scalar(max_norm)

    def report(params, values):
        described = lambda path, x: f"clip_by_norm, p={p}, of {path}, shape {x.shape}: {GOT}"
        return RuleReport(
            values, tuple(described(*leaf) for leaf in trees.leaves_at("grads", params))
        )

    def init(params):
        n = len(jax.tree.leaves(params))
        return report(params, jnp.zeros(n, jnp.float32)) if throw else optax.EmptyState()

    def update(updates, state, params=None, **_):
        leaves, treedef = jax.tree.flatten(updates)
        norms = [array_norm(g, p) for g in leaves]
        pairs = zip(leaves, norms, strict=True)
        factor = lambda n: jnp.where(n == 0, 1, jnp.minimum(bound / n, 1))
        scaled = [g * factor(n).astype(g.dtype) for g, n in pairs]
        if throw:
            state = report(updates, jnp.stack(norms).astype(jnp.float32))
        return treedef.unflatten(scaled), state

    return as_rule(init, update)


def array_norm(x: jax.Array, p: float) -> jax.Array:
    """The norm (Σ|x|ᵖ)^(1/p) of an array in float32: `jnp.linalg.norm`, but NaN for any NaN."""
    x = jnp.abs(x)
    x = x.astype(trees.wide_dtype(x)).ravel()
    norm = jnp.linalg.norm(x, p)
    # A count ignores NaN, and a maximum on a CPU in large arrays (docs/upstream.md).
    return norm if 0 < abs(p) < np.inf else jnp.where(jnp.any(jnp.isnan(x)), jnp.nan, norm)


def _add_decayed_weights(weight_decay: optax.ScalarOrSchedule, where: Any = "**"):
    """Add `weight_decay · params` to the gradients of the leaves that the pattern `where` matches.

    First in a chain it is the gradient of `weight_decay / 2 · Σ params²` added to the loss; between
    an adaptive scaling and the learning rate, decoupled decay (see `chain`). Raises
    HyperparameterError for a negative number, PatternError at setup if no leaf matches.

    >>> rule = add_decayed_weights(0.1, ["**", "!**/bias"])
    >>> params = {"bias": jnp.ones(1), "w": jnp.ones(1)}
    >>> rule.update({"bias": jnp.zeros(1), "w": jnp.zeros(1)}, rule.init(params), params)[0]
    {'bias': Array([0.], dtype=float32), 'w': Array([0.1], dtype=float32)}
    """
    rate = as_scalar(weight_decay)
    return _decay("add_decayed_weights()", where, lambda g, p: g + rate * p)


def _sign_decay(sign_decay: optax.ScalarOrSchedule = 1e-3, where: Any = "**"):
    """Add `sign_decay · sign(params)` to the gradients of the leaves that `where` matches.

    As the first rule of a chain, that is an L1 penalty `sign_decay · Σ|params|` in the loss. The
    number `sign_decay` is 0 or more, or a schedule. Raises errors like `add_decayed_weights`:
    HyperparameterError, PatternError.
    """
    rate = as_scalar(sign_decay)
    return _decay("sign_decay()", where, lambda g, p: g + rate * jnp.sign(p))


def _decay(place, where, f):
    _patterns.compile_where(where, place)  # raises if a pattern is malformed

    def init(params):
        _patterns.select_in_group(where, params, place)  # raises if nothing matches
        return optax.EmptyState()

    def update(updates, state, params=None, **_):
        if params is None:
            raise RuleError("params", "update()", "None", "the params, to decay them")
        flags = _patterns.select_in_group(where, params, place)
        leaves, treedef = jax.tree.flatten(updates)
        params = jax.tree.leaves(params)
        new = [f(g, p) if flag else g for g, p, flag in zip(leaves, params, flags, strict=True)]
        return treedef.unflatten(new), state

    return as_rule(init, update)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class SpikeState(Report):
    """State of `reject_spikes`: running statistics of the steps that were applied, and its report.

    It is one array, because each array of a small step costs as much as all of the arithmetic.
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
    """Reject a step if its gradient norm or loss is far above the recent values.

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

    def update(updates, state, params=None, *, value=0.0, **extra):
        norm = _norm_of(updates, **extra)
        observed = jnp.stack([jnp.log(jnp.maximum(norm, 1e-30)), value]).astype(jnp.float32)
        centre, spread, n_steps, _ = state.band
        distance = observed - centre
        # At least twice the centre: log(2) above it on the log scale of the norm (first column),
        # |centre| above it for the loss (second column).
        least_reach = jnp.where(np.array([True, False]), np.float32(np.log(2)), jnp.abs(centre))
        is_spike = (distance > jnp.maximum(reach * spread, least_reach)) & (n_steps >= warmup)
        step_size = jnp.where(n_steps == 0, 1, jnp.float32(rate))
        spread = spread + step_size * jnp.where(n_steps == 0, 0, jnp.abs(distance) - spread)
        report = jnp.where(is_spike, np.float32(np.inf), 0)
        return updates, SpikeState(
            jnp.stack([centre + step_size * distance, spread, n_steps + 1, report])
        )

    return as_rule(init, update)


# If such a rule is the first of a chain, it gets the norm that the verdict computed.
RULES_OF_THE_NORM = _clip_by_global_norm, _reject_spikes
clip: Final = live(_clip)
clip_by_global_norm: Final = live(_clip_by_global_norm)
clip_by_norm: Final = live(_clip_by_norm, static=("p", "throw"))
add_decayed_weights: Final = live(_add_decayed_weights)
sign_decay: Final = live(_sign_decay)
reject_spikes: Final = live(_reject_spikes, static=("warmup",))
