"""Populations: many runs of one model as one state, each with a seed and hyperparameters of its
own.

    make = lambda key, learning_rate: ts.setup(ts.rules.adam(learning_rate), init(key), key=key)
    runs = ts.population(make, 32, key=0, learning_rate=np.logspace(-4, -1, 32))
    runs, history = ts.fit(step, runs, data, steps=1000)      # one program, 32 runs
    best = ts.populations.member(runs, np.argmin(losses))

Every array of the state has a leading axis of members, and that is all: `train_step`, `eval_step`
and with them `fit` and `evaluate` see it in the clock and map over it (`program.py`). A batch is
the same for all of them, or an `each` of one for each.
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

from tsunax._core import checks, trees
from tsunax._step.members import each, members_of
from tsunax._step.starting import as_key
from tsunax.errors import HyperparameterError, StateError, WrongTypeError, message, remedy
from tsunax.hyper import adjust, hyperparams
from tsunax.program import TrainStep
from tsunax.state import TrainState
from tsunax.step import StepInfo

__all__ = [
    "Stoppable",
    "each",
    "member",
    "plateau",
    "population",
    "select",
    "stoppable",
    "stopping",
]


def population(
    make: Callable[..., TrainState], n: int, *, key: Any = 0, **values: Any
) -> TrainState:
    """n members: `make(key, **values)` for each, with a key of its own and its entry of every array
    in `values`.

    Args:
      make: returns a state from `setup`; it is traced once, under vmap, so that numbers reach it as
        tracers. Members may differ in numbers, not in shapes or functions.
      n: the number of members.
      key: an int or a key, split into one for each member.
      values: arrays whose first axis is n (learning rates, decays, noise), given to `make` by name.

    A member is its single run up to rounding: a batch of matrix products rounds otherwise than one
    of them, and a number that reaches `make` as a tracer has its complement (1 - b1) rounded in
    float32. Raises StateError for an array of another length, or what `make` returns.

    >>> import tsunax as ts
    >>> make = lambda key, rate: ts.setup(ts.rules.sgd(rate), {"w": jax.random.normal(key, (2,))})
    >>> runs = population(make, 3, key=0, rate=np.array([0.1, 0.2, 0.3]))
    >>> runs.params["w"].shape, ts.hyperparams(runs)["learning_rate"].tolist()
    ((3, 2), [0.1..., 0.2..., 0.3...])
    """
    if not callable(make):
        raise WrongTypeError(
            message("make", "population()", trees.describe(make), "a function make(key, **values)")
        )
    checks.check_count(n, "population()", "n")
    _check_takes(make, values)
    for name, x in values.items():
        for leaf in jax.tree.leaves(x):
            if np.shape(leaf)[:1] != (n,):
                got, fix = (
                    f"shape {np.shape(leaf)}",
                    "One entry for each member; bind what they share to make.",
                )
                if isinstance(x, list | tuple):  # a pytree
                    got, fix = trees.describe(x), f"Give np.array({name})."
                raise StateError(
                    message(
                        repr(name), "population()", got, f"an array with a first axis of {n}", fix
                    )
                )
        checks.check_arrays(x, name, "Bind what is no number to make.")
    one: Any = as_key(key, "population()")
    if one is None:
        raise WrongTypeError(
            message("key", "population()", "None", "an int seed or a key, as jax.random.key(0)")
        )
    keys = jax.random.split(one, n)
    runs = jax.jit(jax.vmap(functools.partial(_made, make)))(keys, values)
    if not isinstance(runs, TrainState):
        fix = "make returns ts.setup(rule, params, ...)."
        raise StateError(message("result", "make", trees.describe(runs), "a TrainState", fix))
    if not trees.is_traced(runs.clock) and (numbers := hyperparams(runs)):
        adjust(runs, **numbers)  # raises for one that `make` saw as a tracer only
    return runs


def _made(make: Callable, key, values: dict[str, Any]):
    try:
        return make(key, **values)
    except Exception as error:
        if fix := remedy(error):
            how = (
                f"raised by {trees.describe_call(make)}, one program for all members of "
                "population()"
            )
            error.add_note(f"{how}. {fix}")
        raise


def _check_takes(make: Callable, values: dict[str, Any]) -> None:
    """Raise where `make(key, **values)` would not even be called."""
    try:
        inspect.signature(make).bind(None, **values)
    except TypeError:
        got, expected = trees.describe_call(make), f"make({', '.join(['key', *values])})"
        fix = "Its arguments are the key and what population() is given by name."
        raise WrongTypeError(message("make", "population()", got, expected, fix)) from None
    except ValueError:  # a callable that does not say what it takes
        pass


def member(runs: TrainState, i: int) -> TrainState:
    """One member as an ordinary state, with arrays of its own.

    Raises StateError where there is none.
    """
    n = _members(runs, "member()")
    is_index = np.ndim(i) == 0 and np.issubdtype(np.asarray(i).dtype, np.integer)
    if not is_index or not -n <= int(i) < n:
        raise StateError(message("member", "member()", trees.describe(i), f"an index below {n}"))
    return _taken(runs, np.int32(int(i) % n))


def select(runs: TrainState, indices: Any) -> TrainState:
    """The members at these indices, in their order and as often as they are named.

    For successive halving, `select(runs, np.argsort(losses)[:8])`, and for populations whose worst
    members go on from copies of the best. Raises StateError for an index that is not there.
    """
    n = _members(runs, "select()")
    try:
        at = np.asarray(indices)
    except ValueError:  # lists of several lengths
        at = np.empty(0)
    is_list = at.ndim == 1 and at.size and np.issubdtype(at.dtype, np.integer)
    if not is_list or at.min() < -n or at.max() >= n:
        got = trees.describe(indices) if not is_list else f"{at.min()} ... {at.max()}"
        raise StateError(message("indices", "select()", got, f"a list of ints below {n}"))
    return _taken(runs, (at % n).astype(np.int32))


# Members that stop


@dataclass(frozen=True)
class plateau:
    """Stop a member whose smoothed loss has not improved by more than `min_delta` for `patience`
    calls.

    Smoothed with `decay`, as m ← decay m + (1 - decay) loss over 1 - decay^calls. A loss that is
    not finite is left out of it, and is no improvement.
    """

    patience: int
    min_delta: float = 0.0
    decay: float = 0.9

    def __post_init__(self):
        checks.check_count(self.patience, "plateau()", "patience")
        if not (checks.is_real(self.min_delta) and 0 <= self.min_delta < np.inf):
            raise HyperparameterError(
                message("min_delta", "plateau()", trees.describe(self.min_delta), "a number ≥ 0")
            )
        if not (checks.is_real(self.decay) and 0 <= self.decay < 1):
            got = trees.describe(self.decay)
            raise HyperparameterError(
                message("decay", "plateau()", got, "a number from 0 to below 1")
            )

    def init(self) -> dict[str, Any]:
        zero = np.float32(0)
        return {"mean": zero, "weight": zero, "best": np.float32(np.inf), "since": np.int32(0)}

    def __call__(
        self, memory: dict[str, Any], state: TrainState, info: StepInfo
    ) -> tuple[dict[str, Any], Any]:
        is_finite = jnp.isfinite(info.loss)
        moved = lambda old, new: jnp.where(
            is_finite, self.decay * old + (1 - self.decay) * new, old
        )
        mean, weight = moved(memory["mean"], info.loss), moved(memory["weight"], 1.0)
        smooth = jnp.where(weight > 0, mean / jnp.where(weight > 0, weight, 1), jnp.inf)
        improves = is_finite & (smooth < memory["best"] - self.min_delta)
        since = jnp.where(improves, 0, memory["since"] + 1)
        best = jnp.where(improves, smooth, memory["best"])
        return {
            "mean": mean,
            "weight": weight,
            "best": best,
            "since": since,
        }, since >= self.patience


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("runs", "stopped", "memory"),
    meta_fields=("rule",),
)
@dataclass(frozen=True)
class Stoppable:
    """A population of which members may have stopped: `runs`, and one bool for each."""

    runs: TrainState
    stopped: Any  # bool (n,)
    memory: Any  # of the rule, for each member
    rule: Callable | None = None

    def stop(self, where: Any) -> Stoppable:
        """Stop the members where this is true, too."""
        n = _members(self.runs, "stop()")
        if np.shape(where) != (n,):
            raise StateError(
                message("where", "stop()", trees.describe(where), f"a bool for each of {n} members")
            )
        if not np.issubdtype(
            where.dtype if trees.is_array(where) else np.asarray(where).dtype, np.bool_
        ):
            raise StateError(
                message("where", "stop()", trees.describe(where), "bools", "Not indices.")
            )
        return dataclasses.replace(self, stopped=self.stopped | jnp.asarray(where, bool))


def stoppable(runs: TrainState, rule: Callable | None = None) -> Stoppable:
    """A population whose members stop by a rule, for a step made by `stopping`.

    Raises StateError for what is no population, WrongTypeError for a rule that is no function.

    Args:
      rule: `plateau(patience)`, or any `rule(memory, state, info) -> (memory, stop)` of one member,
        with `rule.init()` for its first memory; a function without `init` has None. By None they
        stop where you say, `runs.stop(where)`.
    """
    n = _members(runs, "stoppable()")
    if rule is not None and (isinstance(rule, type) or not callable(rule)):
        expected = "a function (memory, state, info) -> (memory, stop)"
        raise WrongTypeError(message("rule", "stoppable()", trees.describe(rule), expected))
    first = rule.init() if hasattr(rule, "init") else None  # type: ignore[union-attr]
    memory = jax.tree.map(lambda x: jnp.broadcast_to(x, (n, *np.shape(x))), first)
    return Stoppable(runs, jnp.zeros(n, bool), memory, rule)


def stopping(step: TrainStep) -> Callable:
    """A step of a `Stoppable`: members that have stopped stand still to the last bit, the others go
    on.

        new, info = step(runs, batch)
        runs = where(stopped, runs, new)

    The call in which a member stops is its last one that counts. `info.metrics` has "running", 1 or
    0 for each member, and info is otherwise what a step would give, were it taken. Stopped members
    are still computed: `select` those that run, where that is worth a compilation.
    """
    if not isinstance(step, TrainStep):
        raise WrongTypeError(message("step", "stopping()", trees.describe(step), "a train_step"))

    @jax.jit
    def stopping_step(state: Stoppable, batch, **extra) -> tuple[Stoppable, StepInfo]:
        n = _members(getattr(state, "runs", state), "the step")
        if not isinstance(state, Stoppable):
            raise WrongTypeError(
                message("state", "the step", "a population", "ts.populations.stoppable(runs)")
            )
        new, info = step.pure(state.runs, batch, extra)
        still = lambda a, b: _where(state.stopped, a, b)
        runs = jax.tree.map(still, state.runs, new)
        memory, stopped = state.memory, state.stopped
        if state.rule is not None:
            memory, found = jax.vmap(state.rule)(memory, runs, _per_member(info, n))
            memory = jax.tree.map(still, state.memory, memory)
            stopped = stopped | found
        running = jnp.where(state.stopped, 0.0, 1.0).astype(jnp.float32)
        info = info._replace(metrics={**(info.metrics or {}), "running": running})
        if (
            info.verdict is not None
        ):  # a member that stands still rejects nothing, and lets `fit` count its calls
            info = info._replace(verdict=jnp.where(state.stopped, 0, info.verdict))
        return Stoppable(runs, stopped, memory, state.rule), info

    return stopping_step


def _where(stopped, old, new):
    """`old` for members that have stopped, else `new`; keys, too."""
    flags = jnp.reshape(stopped, (len(stopped),) + (1,) * (jnp.ndim(new) - 1))
    return jnp.where(flags, old, new)


def _per_member(info: StepInfo, n: int) -> StepInfo:
    """Infos with a member axis on every leaf."""
    return jax.tree.map(lambda x: x if np.ndim(x) else jnp.broadcast_to(x, (n,)), info)


@functools.partial(jax.jit)
def _taken(runs: TrainState, at) -> TrainState:
    return jax.tree.map(lambda x: jnp.asarray(x)[at], runs)


def _members(runs: Any, where: str) -> int:
    n = members_of(runs)
    if n is None:
        raise StateError(
            message(
                "runs", where, trees.describe(runs), "a population", "Make one: ts.population(...)."
            )
        )
    if (
        isinstance(runs.clock, jax.Array)
        and not trees.is_traced(runs.clock)
        and runs.clock.is_deleted()
    ):
        raise StateError(
            message("runs", where, "a population that a step took", "what the step returned")
        )
    return n
