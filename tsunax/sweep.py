"""Populations: many runs of one model as one state, each with a seed and hyperparameters of its own.

    make = lambda key, learning_rate: ts.setup(ts.rules.adam(learning_rate), init(key), key=key)
    runs = ts.population(make, 32, key=0, learning_rate=np.logspace(-4, -1, 32))
    runs, history = ts.fit(step, runs, data, steps=1000)      # one program, 32 runs
    best = ts.member(runs, np.argmin(losses))

Every array of the state has a leading axis of members, and that is all: `train_step`, `eval_step` and with them `fit`
and `evaluate` see it in the clock and map over it (`program.py`). A batch is the same for all of them, or an `each` of
one for each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tsunax import _checks, _tree
from tsunax._members import members_of
from tsunax.errors import StateError, WrongTypeError, message
from tsunax.state import TrainState, as_key

__all__ = ["member", "population", "select"]


def population(make: Callable[..., TrainState], n: int, *, key: Any = 0, **values: Any) -> TrainState:
    """n members: `make(key, **values)` for each, with a key of its own and its entry of every array in `values`.

    Args:
      make: returns a state from `setup`; it is traced once, under vmap, so that numbers reach it as tracers. Members
        may differ in numbers, not in shapes or functions.
      n: the number of members.
      key: an int or a key, split into one for each member.
      values: arrays whose first axis is n (learning rates, decays, noise), given to `make` by name.

    A member is its single run up to rounding: a batch of matrix products rounds otherwise than one of them, and a
    number that reaches `make` as a tracer has its complement (1 - b1) rounded in float32. Raises StateError for an
    array of another length, or what `make` returns.

    >>> import tsunax as ts
    >>> make = lambda key, rate: ts.setup(ts.rules.sgd(rate), {"w": jax.random.normal(key, (2,))})
    >>> runs = population(make, 3, key=0, rate=np.array([0.1, 0.2, 0.3]))
    >>> runs.params["w"].shape, ts.hyperparams(runs)["learning_rate"].tolist()
    ((3, 2), [0.1..., 0.2..., 0.3...])
    """
    if not callable(make):
        raise WrongTypeError(message("make", "population()", _tree.describe(make), "a function make(key, **values)"))
    _checks.check_count(n, "population()", "n")
    for name, x in values.items():
        for leaf in jax.tree.leaves(x):
            if np.shape(leaf)[:1] != (n,):
                got, fix = f"shape {np.shape(leaf)}", "One entry for each member; bind what they share to make."
                raise StateError(message(repr(name), "population()", got, f"a first axis of {n}", fix))
    one: Any = as_key(key, "population()")
    keys = jax.random.split(one, n)
    runs = jax.jit(jax.vmap(lambda key, values: make(key, **values)))(keys, values)
    if not isinstance(runs, TrainState):
        fix = "make returns ts.setup(rule, params, ...)."
        raise StateError(message("result", "make", _tree.describe(runs), "a TrainState", fix))
    return runs


def member(runs: TrainState, i: int) -> TrainState:
    """One member as an ordinary state, with arrays of its own. Raises StateError where there is none."""
    n = _members(runs, "member()")
    if isinstance(i, bool) or np.ndim(i) or not -n <= int(i) < n:
        raise StateError(message("member", "member()", repr(i), f"an index below {n}"))
    return _taken(runs, np.int32(int(i) % n))


def select(runs: TrainState, indices: Any) -> TrainState:
    """The members at these indices, in their order and as often as they are named.

    For successive halving, `select(runs, np.argsort(losses)[:8])`, and for populations whose worst members go on from
    copies of the best. Raises StateError for an index that is not there.
    """
    n, at = _members(runs, "select()"), np.asarray(indices)
    is_list = at.ndim == 1 and at.size and np.issubdtype(at.dtype, np.integer)
    if not is_list or at.min() < -n or at.max() >= n:
        got = _tree.describe(indices) if not is_list else f"{at.min()} ... {at.max()}"
        raise StateError(message("indices", "select()", got, f"a list of ints below {n}"))
    return _taken(runs, (at % n).astype(np.int32))


@functools.partial(jax.jit)
def _taken(runs: TrainState, at) -> TrainState:
    return jax.tree.map(lambda x: jnp.asarray(x)[at], runs)


def _members(runs: Any, where: str) -> int:
    n = members_of(runs)
    if n is None:
        raise StateError(message("runs", where, _tree.describe(runs), "a population", "Make one: ts.population(...)."))
    return n
