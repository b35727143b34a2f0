"""Populations: many runs of one model as one state, with different seeds and hyperparameters.

    make = lambda key, learning_rate: ts.setup(ts.rules.adam(learning_rate), init(key), key=key)
    runs = ts.population(make, 32, key=0, learning_rate=np.logspace(-4, -1, 32))
    runs, history = ts.fit(step, runs, data, steps=1000)      # one program, 32 runs
    best = ts.populations.member(runs, np.argmin(losses))

Every array of the state has a leading axis of members: `train_step`, `eval_step`, `fit` and
`evaluate` read it off the clock and map over it (`program.py`). All members get the same batch, or
with `each` one of their own.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from tsunax._core import Function, PyTree, checks, trees
from tsunax._step.members import each, members_of
from tsunax._step.starting import as_key
from tsunax.errors import HyperparameterError, StateError, WrongTypeError, remedy
from tsunax.hyper import adjust, hyperparams
from tsunax.program import TrainStep
from tsunax.state import TrainState
from tsunax.step import StepInfo

__all__ = [
    "Stoppable", "each", "member", "plateau", "population", "select", "stoppable", "stopping",
]  # fmt: skip


def population(
    make: Callable[..., TrainState], n: int, *, key: ArrayLike = 0, **values: Any
) -> TrainState:
    """A state of n members: `make(key, **values)` for each, with its key and its entry of `values`.

    Args:
      make: returns a state from `setup`; it is traced once, under vmap, so that numbers reach it as
        tracers. Members may differ in numbers, not in shapes or functions.
      n: the number of members.
      key: an int or a key, split into one for each member.
      values: arrays whose first axis is n (learning rates, decays, noise), passed to `make` by name.

    A member equals its single run up to rounding: a batch of matrix products rounds differently,
    and a number that is a tracer in `make` has its complement (1 - b1) rounded in float32. Raises
    StateError for an array of another length, or if `make` returns no state.

    >>> import tsunax as ts
    >>> make = lambda key, rate: ts.setup(ts.rules.sgd(rate), {"w": jax.random.normal(key, (2,))})
    >>> runs = population(make, 3, key=0, rate=np.array([0.1, 0.2, 0.3]))
    >>> runs.params["w"].shape, ts.hyperparams(runs)["learning_rate"].tolist()
    ((3, 2), [0.1..., 0.2..., 0.3...])
    """
    where = "population()"
    if not callable(make):
        raise WrongTypeError("make", where, trees.describe(make), "a function make(key, **values)")
    checks.check_count(n, where, "n")
    _check_takes(make, values)
    for name, x in values.items():
        for leaf in jax.tree.leaves(x):
            if np.shape(leaf)[:1] != (n,):
                got, expected = f"shape {np.shape(leaf)}", f"an array with a first axis of {n}"
                fix = "One entry for each member; bind shared values to make."
                if isinstance(x, list | tuple):  # a pytree
                    got, fix = trees.describe(x), f"Give np.array({name})."
                raise StateError(repr(name), where, got, expected, fix)
        checks.check_arrays(x, name, "Bind values that are no numbers to make.")
    one: Any = as_key(key, where)
    if one is None:
        raise WrongTypeError("key", where, "None", "an int seed or a key, as jax.random.key(0)")
    keys = jax.random.split(one, n)
    runs = jax.jit(jax.vmap(functools.partial(_made, make)))(keys, values)
    if not isinstance(runs, TrainState):
        fix = "make returns ts.setup(rule, params, ...)."
        raise StateError("result", "make", trees.describe(runs), "a TrainState", fix)
    if not trees.is_traced(runs.clock) and (numbers := hyperparams(runs)):
        adjust(runs, **numbers)  # raises for one that `make` saw as a tracer only
    return runs


def _made(make: Function, key: jax.Array, values: dict[str, Any]) -> TrainState:
    try:
        return make(key, **values)
    except Exception as error:
        if fix := remedy(error):
            how = f"raised by {trees.describe_call(make)}, one program for all members"
            error.add_note(f"{how} of population(). {fix}")
        raise


def _check_takes(make: Function, values: dict[str, Any]) -> None:
    """Raise WrongTypeError if `make` does not take the arguments `make(key, **values)`."""
    try:
        inspect.signature(make).bind(None, **values)
    except TypeError:
        got, expected = trees.describe_call(make), f"make({', '.join(['key', *values])})"
        fix = "Its arguments are the key and the named values of population()."
        raise WrongTypeError("make", "population()", got, expected, fix) from None
    except ValueError:  # a callable that does not say what it takes
        pass


def member(runs: TrainState, i: int) -> TrainState:
    """One member as an ordinary state, with copied arrays. Raises StateError for a bad index."""
    return _taken(runs, i, 0, "member", "an index")


def select(runs: TrainState, indices: ArrayLike) -> TrainState:
    """The population of the members at these indices, in this order; an index may repeat.

    For successive halving, `select(runs, np.argsort(losses)[:8])`, and for populations whose worst
    members are replaced by copies of the best. Raises StateError for an index out of range.
    """
    return _taken(runs, indices, 1, "indices", "a list of ints")


def _taken(runs: TrainState, indices: Any, ndim: int, what: str, kind: str) -> TrainState:
    where = "member()" if what == "member" else "select()"
    n = _members(runs, where)
    try:
        at = np.asarray(indices)
    except ValueError:  # lists of several lengths
        at = np.empty(0)
    fits = at.ndim == ndim and at.size and np.issubdtype(at.dtype, np.integer)
    if not fits or at.min() < -n or at.max() >= n:
        got = f"{at.min()} ... {at.max()}" if fits and ndim else trees.describe(indices)
        raise StateError(what, where, got, f"{kind} below {n}")
    return _gathered(runs, (at % n).astype(np.int32))


@jax.jit
def _gathered(runs: TrainState, at: Any) -> TrainState:
    return jax.tree.map(lambda x: jnp.asarray(x)[at], runs)


# ------------------------------------------------------------------------------ members that stop


@dataclass(frozen=True)
class plateau:
    """A rule that stops a member whose smoothed loss has not improved for `patience` calls.

    An improvement is larger than `min_delta`. The loss is smoothed with `decay`, as m ← decay m +
    (1 - decay) loss over 1 - decay^calls. A loss that is not finite is left out, and is no
    improvement.
    """

    patience: int
    min_delta: float = 0.0
    decay: float = 0.9

    def __post_init__(self) -> None:
        checks.check_count(self.patience, "plateau()", "patience")
        for name, most in (("min_delta", np.inf), ("decay", 1)):
            x = getattr(self, name)
            if not (checks.is_real(x) and 0 <= x < most):
                expected = "a number ≥ 0" if name == "min_delta" else "a number ≥ 0 and < 1"
                raise HyperparameterError(name, "plateau()", trees.describe(x), expected)

    def init(self) -> dict[str, Any]:
        zero = np.float32(0)
        return {"mean": zero, "weight": zero, "best": np.float32(np.inf), "since": np.int32(0)}

    def __call__(
        self, memory: dict[str, Any], state: TrainState, info: StepInfo
    ) -> tuple[dict[str, Any], Any]:
        is_finite = jnp.isfinite(info.loss)
        moved = lambda m, x: jnp.where(is_finite, self.decay * m + (1 - self.decay) * x, m)
        mean, weight = moved(memory["mean"], info.loss), moved(memory["weight"], 1.0)
        smooth = jnp.where(weight > 0, mean / jnp.where(weight > 0, weight, 1), jnp.inf)
        improves = is_finite & (smooth < memory["best"] - self.min_delta)
        since = jnp.where(improves, 0, memory["since"] + 1)
        best = jnp.where(improves, smooth, memory["best"])
        memory = {"mean": mean, "weight": weight, "best": best, "since": since}
        return memory, since >= self.patience


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("runs", "stopped", "memory"),
    meta_fields=("rule",),
)
@dataclass(frozen=True)
class Stoppable:
    """A population whose members may have stopped: `runs`, and a bool for each member."""

    runs: TrainState
    stopped: jax.Array  # bool (n,)
    memory: PyTree  # of the rule, for each member
    rule: Function | None = None

    def stop(self, where: ArrayLike) -> Stoppable:
        """The same population, with the members stopped at which `where` is true."""
        n = _members(self.runs, "stop()")
        if np.shape(where) != (n,) or trees.dtype_of(jax.tree.leaves(where)[0]) != np.bool_:
            expected = f"bools, a bool for each of {n} members"
            raise StateError("where", "stop()", trees.describe(where), expected)
        return dataclasses.replace(self, stopped=self.stopped | jnp.asarray(where, bool))


def stoppable(runs: TrainState, rule: Function | None = None) -> Stoppable:
    """A population whose members stop by a rule, for a step made by `stopping`.

    Args:
      rule: `plateau(patience)`, or any `rule(memory, state, info) -> (memory, stop)` of one member,
        with `rule.init()` for its first memory (without `init`: None). Without a rule, members stop
        when you call `runs.stop(where)`.

    Raises StateError for a state that is no population, WrongTypeError for another kind of rule.
    """
    n = _members(runs, "stoppable()")
    if rule is not None and (isinstance(rule, type) or not callable(rule)):
        expected = "a function (memory, state, info) -> (memory, stop)"
        raise WrongTypeError("rule", "stoppable()", trees.describe(rule), expected)
    first = rule.init() if hasattr(rule, "init") else None  # type: ignore[union-attr]
    memory = jax.tree.map(lambda x: jnp.broadcast_to(x, (n, *np.shape(x))), first)
    return Stoppable(runs, jnp.zeros(n, bool), memory, rule)


def stopping(step: TrainStep) -> Function:
    """A step of a `Stoppable`: members that have stopped keep every bit, the others move.

        new, info = step(runs, batch)
        runs = where(stopped, runs, new)

    The call in which a member stops is its last one that counts. `info.metrics` has "running", 1 or
    0 for each member; the rest of info is computed as if no member had stopped. Stopped members
    still cost time: `select` those that run, if that is worth a compilation.
    """
    if not isinstance(step, TrainStep):
        raise WrongTypeError("step", "stopping()", trees.describe(step), "a train_step")

    @jax.jit
    def stopping_step(state: Stoppable, batch: PyTree, **extra: Any) -> tuple[Stoppable, StepInfo]:
        n = _members(getattr(state, "runs", state), "the step")
        if not isinstance(state, Stoppable):
            expected = "ts.populations.stoppable(runs)"
            raise WrongTypeError("state", "the step", "a population", expected)
        new, info = step.pure(state.runs, batch, extra)
        still = lambda a, b: _where(state.stopped, a, b)
        runs = jax.tree.map(still, state.runs, new)
        memory, stopped = state.memory, state.stopped
        if state.rule is not None:
            each_info = jax.tree.map(lambda x: x if np.ndim(x) else jnp.broadcast_to(x, n), info)
            memory, found = jax.vmap(state.rule)(memory, runs, each_info)
            memory = jax.tree.map(still, state.memory, memory)
            stopped = stopped | found
        running = jnp.where(state.stopped, 0.0, 1.0).astype(jnp.float32)
        info = info._replace(metrics={**(info.metrics or {}), "running": running})
        if info.verdict is not None:  # a stopped member rejects nothing, so that `fit` counts calls
            info = info._replace(verdict=jnp.where(state.stopped, 0, info.verdict))
        return Stoppable(runs, stopped, memory, state.rule), info

    return stopping_step


def _where(stopped: jax.Array, old: PyTree, new: PyTree) -> PyTree:
    """`old` for members that have stopped, else `new`; keys, too."""
    flags = jnp.reshape(stopped, (len(stopped),) + (1,) * (jnp.ndim(new) - 1))
    return jnp.where(flags, old, new)


def _members(runs: Any, where: str) -> int:
    n = members_of(runs)
    if n is None:
        fix = "Make one: ts.population(...)."
        raise StateError("runs", where, trees.describe(runs), "a population", fix)
    if trees.is_gone(runs.clock):
        raise StateError("runs", where, "a population that a step took", "what the step returned")
    return n
