"""Reuse learning rates of a narrow model for a wide model: maximal update parametrization (µP)."""

import math
from dataclasses import dataclass

import jax
import numpy as np
import optax

from tsunax._core import PyTree, trees
from tsunax.errors import RuleError
from tsunax.rules.extra_arguments import Init


def scale_by_width(narrow: PyTree) -> optax.GradientTransformation:
    """Scale the updates of a wide model so that the learning rates of a narrow one fit it (µP).

    `narrow` is the params of the narrow model, or their shapes. A leaf with k times the fan-in (the
    product of its axes but the last) takes 1/k of its update: inner and last matrices. Biases,
    norms, embeddings and first layers have the same fan-in and take all of it. Put it after Adam
    or another rule that makes updates of the same size for small and large gradients:
    `chain(adamw(rate), scale_by_width(narrow))`. Every number of the rule stays live.

    The model must do its part: weights of variance 1/fan-in, for the last layer 1/fan-in squared
    (or zeros), and attention divided by the width of a head, not its root.
    `testing.check_coordinates` checks whether all of this is done.

    From Yang et al. 2022, "Tensor Programs V" (arXiv:2203.03466), table 3. Raises RuleError at
    `setup` if a leaf has no counterpart.

    >>> import jax.numpy as jnp
    >>> import tsunax as ts
    >>> model = lambda n: {"first": jnp.ones((2, n)), "bias": jnp.ones(n), "last": jnp.ones((n, 1))}
    >>> rule = ts.rules.chain(ts.rules.sign_sgd(0.5), scale_by_width(model(2)))
    >>> state = ts.setup(rule, model(4))
    >>> state, _ = ts.update(state, model(4))
    >>> [float(x.max()) for x in state.params.values()]
    [0.5, 0.5, 0.75]
    """
    leaves = jax.tree_util.tree_flatten_with_path(narrow)[0]
    # The path, number of axes and fan-in of each leaf.
    fans = tuple((trees.shown_path(k), np.ndim(x), math.prod(x.shape[:-1])) for k, x in leaves)
    return optax.GradientTransformation(Init(_check_narrow, (fans,)), _WidthUpdate(fans))


def _check_narrow(fans, params):
    axes_by_path = {path: axes for path, axes, _ in fans}
    for path, x in jax.tree_util.tree_flatten_with_path(params)[0]:
        if axes_by_path.get(name := trees.shown_path(path)) != np.ndim(x):
            raise RuleError(
                f"leaf {name}",
                "scale_by_width()",
                got=f"{axes_by_path.get(name, 'no')} axes in narrow",
                expected=f"{np.ndim(x)} axes",
            )
    return optax.EmptyState()


@dataclass(frozen=True)
class _WidthUpdate:
    fans: tuple[tuple[str, int, int], ...]

    def __call__(self, updates, state, params=None):
        fan_by_path = {path: fan for path, _, fan in self.fans}
        scaled = lambda path, u: u * (fan_by_path[trees.shown_path(path)] / math.prod(u.shape[:-1]))
        return jax.tree_util.tree_map_with_path(scaled, updates), state
