"""Learning rates of a narrow model that fit a wide one: maximal update parametrization (µP)."""

from __future__ import annotations

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

    `narrow` is the params of the narrow model, or their shapes. A leaf whose fan-in (its axes but
    the last) is k times as large takes 1/k of its update: matrices inside and at the end. Biases,
    norms, embeddings and first layers, whose fan-in is the same, take all of it. Put it after Adam
    or another rule whose updates have one size whatever that of the gradients:
    `chain(adamw(rate), scale_by_width(narrow))`. Every number of the rule stays live.

    The rest is the model's: weights of variance 1/fan-in, for the last layer 1/fan-in squared (or
    zeros), and attention divided by the width of a head, not its root. `testing.check_coordinates`
    tells whether it is all there.

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
    # path, number of axes and fan-in of each leaf
    fan = lambda path, x: (trees.shown_path(path), np.ndim(x), math.prod(x.shape[:-1]))
    fans = tuple(fan(path, x) for path, x in leaves)
    return optax.GradientTransformation(Init(_check_narrow, (fans,)), _WidthUpdate(fans))


def _check_narrow(fans, params):
    known = {path: axes for path, axes, _ in fans}
    for path, x in jax.tree_util.tree_flatten_with_path(params)[0]:
        if known.get(name := trees.shown_path(path)) != np.ndim(x):
            has = f"{known[name]} axes" if name in known else "nothing"
            expected = f"{np.ndim(x)} axes, as in the wide model"
            raise RuleError(f"leaf {name}", "scale_by_width()", f"{has} in narrow", expected)
    return optax.EmptyState()


@dataclass(frozen=True)
class _WidthUpdate:
    fans: tuple[tuple[str, int, int], ...]

    def __call__(self, updates, state, params=None):
        known = {path: fan for path, _, fan in self.fans}
        scaled = lambda path, u: u * (known[trees.shown_path(path)] / math.prod(u.shape[:-1]))
        return jax.tree_util.tree_map_with_path(scaled, updates), state
