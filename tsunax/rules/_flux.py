"""Rules of Optimisers.jl (Flux) that optax's namesakes do not reproduce under any arguments.

Plain optax factories with optax's names for numbers; `tsunax.rules` makes them live.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from tsunax._core import Scalar

__all__ = [
    "flux_adagrad", "flux_adamw", "flux_amsgrad", "flux_momentum", "flux_oadam", "flux_rprop",
]  # fmt: skip


def flux_momentum(learning_rate: optax.ScalarOrSchedule, momentum=0.9, nesterov=False):
    """`Momentum` and `Nesterov` of Optimisers.jl, with the rate inside the velocity.

    v ← momentum·v + learning_rate·g, params ← params − v; with `nesterov`,
    params ← params − (momentum·v + learning_rate·g). A new rate applies to new gradients
    only, in `sgd` to the whole history. The "classical momentum" of Sutskever et al. 2013. Raises
    HyperparameterError for a number that is out of range or not finite.

    >>> rule = flux_momentum(0.1)
    >>> updates, state = rule.update(jnp.ones(1), rule.init(jnp.ones(1)))
    >>> rule.update(jnp.ones(1), state)[0]
    Array([-0.19], dtype=float32)
    """
    rate = optax.scale_by_learning_rate(learning_rate)
    return optax.chain(rate, optax.trace(momentum, nesterov=nesterov))


def flux_rprop(
    learning_rate: Scalar, eta_minus=0.5, eta_plus=1.2, min_step_size=1e-6, max_step_size=50.0
):
    """`Rprop` of Optimisers.jl and PyTorch: a step size per number, and signs of gradients only.

    params ← params − size·sign(g). If the sign is equal to the previous sign, the size grows by
    `eta_plus`. If it is the opposite sign, the size shrinks by `eta_minus`, and the number does not
    move in this step. Next to a sign of 0 the size stays. The sizes start at `learning_rate`; a
    later change of it has no effect. (`optax.rprop` does all of this a step later.) Sizes stay
    within [min_step_size, max_step_size]. iRprop⁻ of Igel and Hüsken 2000.
    Raises HyperparameterError for a float that is out of range or not finite.

    >>> rule = flux_rprop(0.1)
    >>> updates, state = rule.update(jnp.ones(1), rule.init(jnp.ones(1)))
    >>> updates, rule.update(jnp.ones(1), state)[0]
    (Array([-0.1], dtype=float32), Array([-0.12], dtype=float32))
    """

    def init(params):
        sizes = optax.tree.full_like(params, learning_rate)
        return optax.ScaleByRpropState(sizes, optax.tree.zeros_like(params))

    def update(updates, state: Any, params=None):
        del params
        signs = jax.tree.map(jnp.sign, updates)
        # The product of signs, because the product of two small gradients underflows.
        turns = jax.tree.map(jnp.multiply, signs, state.prev_updates)

        def resize(turn, size):
            grown = jnp.minimum(size * eta_plus, max_step_size)
            shrunk = jnp.maximum(size * eta_minus, min_step_size)
            return jnp.where(turn > 0, grown, jnp.where(turn < 0, shrunk, size))

        sizes = jax.tree.map(resize, turns, state.step_sizes)
        without_turned = lambda turn, sign: jnp.where(turn < 0, jnp.zeros_like(sign), sign)
        signs = jax.tree.map(without_turned, turns, signs)
        updates = jax.tree.map(lambda size, sign: -size * sign, sizes, signs)
        return updates, optax.ScaleByRpropState(sizes, signs)

    return optax.GradientTransformation(init, update)


def flux_adagrad(learning_rate: optax.ScalarOrSchedule, eps=1e-8):
    """`AdaGrad` of Optimisers.jl: params ← params − learning_rate·g / (√s + eps), s = eps + Σg².

    `adagrad` has eps inside the root, and starts s at 0.1 by default. Duchi et al. 2011.
    Raises HyperparameterError for a float that is out of range or not finite.

    >>> rule = flux_adagrad(1.0)
    >>> rule.update(jnp.array([1e-4]), rule.init(jnp.ones(1)))[0]  # g² = eps: 1/√2
    Array([-0.7070...], dtype=float32)
    """
    inner = optax.scale_by_rss(eps)

    def update(updates, state, params=None):
        new: Any = inner.update(updates, state, params)[1]
        return jax.tree.map(lambda g, s: g / (jnp.sqrt(s) + eps), updates, new.sum_of_squares), new

    scaled = optax.GradientTransformation(inner.init, update)
    return optax.chain(scaled, optax.scale_by_learning_rate(learning_rate))


def flux_amsgrad(learning_rate: optax.ScalarOrSchedule, b1=0.9, b2=0.999, eps=1e-8):
    """`AMSGrad` of Optimisers.jl: no bias correction; moments and their maximum start at `eps`.

    m ← b1·m + (1 − b1)·g, v ← b2·v + (1 − b2)·g², v̂ ← max(v̂, v), params ← params −
    learning_rate·m / (√v̂ + eps).
    `amsgrad(..., bias_correction_mu=False, bias_correction_nu=False)` starts at 0 (as do Reddi et
    al. 2018), which differs where |g| is below √(eps / (1 − b2)). Raises HyperparameterError for a
    float that is out of range or not finite.

    >>> rule = flux_amsgrad(1.0)
    >>> rule.update(jnp.array([1e-4]), rule.init(jnp.ones(1)))[0]
    Array([-0.10...], dtype=float32)
    """
    inner = optax.scale_by_amsgrad(b1, b2, eps, bias_correction_mu=False, bias_correction_nu=False)

    def init(params):
        start = [optax.tree.full_like(params, eps) for _ in range(3)]
        return optax.ScaleByAmsgradState(jnp.zeros([], jnp.int32), *start)

    scaled = optax.GradientTransformation(init, inner.update)
    return optax.chain(scaled, optax.scale_by_learning_rate(learning_rate))


def flux_adamw(
    learning_rate: optax.ScalarOrSchedule, b1=0.9, b2=0.999, eps=1e-8, weight_decay=0.0, couple=True
):
    """`AdamW` of Optimisers.jl; its decay can be independent of the learning rate.

    params ← params − learning_rate·(u + weight_decay·params) with u of Adam (`b1`, `b2`, `eps`), as
    in `adamw`; with `couple=False`, params ← params − learning_rate·u − weight_decay·params
    (Loshchilov and Hutter 2019, without their schedule). Raises HyperparameterError for a float
    that is out of range or not finite.

    >>> rule = flux_adamw(0.1, weight_decay=0.5, couple=False)
    >>> rule.update(jnp.zeros(1), rule.init(jnp.ones(1)), jnp.ones(1))[0]
    Array([-0.5], dtype=float32)
    """
    rate = optax.scale_by_learning_rate(learning_rate)
    decay = optax.add_decayed_weights(weight_decay if couple else -weight_decay)
    last_rules = (decay, rate) if couple else (rate, decay)
    return optax.chain(optax.scale_by_adam(b1, b2, eps), *last_rules)


def flux_oadam(learning_rate: Scalar, b1=0.5, b2=0.9, eps=1e-8):
    """`OAdam` of Optimisers.jl: params ← params − 2uₜ + uₜ₋₁, with u₀ = 0.

    Here uₜ = learning_rate·(the update of Adam with `b1`, `b2` and `eps`, three floats).
    `optimistic_adam_v2` starts from u₀ = u₁, uses Nesterov's momentum by default, and multiplies
    by the rate last, so that a new rate applies to uₜ₋₁ too. Daskalakis et al. 2018. Raises
    HyperparameterError for a number that is out of range.

    >>> rule = flux_oadam(0.1)
    >>> rule.update(jnp.ones(1), rule.init(jnp.ones(1)))[0]
    Array([-0.2...], dtype=float32)
    """

    adam = optax.scale_by_adam(b1, b2, eps)

    def init(params):
        return adam.init(params), optax.tree.zeros_like(params)

    def update(updates, state, params=None):
        moments: Any = adam.update(updates, state[0], params)[1]
        m = optax.tree.bias_correction(moments.mu, b1, moments.count)
        v = optax.tree.bias_correction(moments.nu, b2, moments.count)
        # Divide last: XLA then stores only the quotient. For a product it also stores the factors
        # (+12 % of memory).
        adam_updates = jax.tree.map(lambda m, v: -learning_rate * m / (jnp.sqrt(v) + eps), m, v)
        updates = jax.tree.map(lambda u, previous: 2 * u - previous, adam_updates, state[1])
        return updates, (moments, adam_updates)

    return optax.GradientTransformation(init, update)
