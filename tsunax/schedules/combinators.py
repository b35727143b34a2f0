"""Schedules made of schedules: in sequence, repeated, shifted, mirrored, or as parameters."""

# Without `from __future__ import annotations`: the annotations of a formula are its checks.

import itertools
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import jax.numpy as jnp
import numpy as np

from tsunax._core import Function, trees
from tsunax.errors import WrongTypeError
from tsunax.schedules import schedule_type as t
from tsunax.schedules.catalog import warmup_cosine_decay_schedule
from tsunax.schedules.schedule_type import Piece, Schedule, schedule, value_at, whole_steps


def _check_pieces(where, name, value):
    """((piece, its length), ...); the last piece has no end, and needs no length."""
    forms = "a list of (schedule, length); the last one may be a schedule alone"
    if not isinstance(value, (list, tuple)) or not value:
        raise WrongTypeError(name, where, trees.describe(value), forms)
    is_pair = lambda item: isinstance(item, (list, tuple)) and len(item) == 2
    pairs = [item if is_pair(item) else (item, None) for item in value]
    if None in [length for _, length in pairs[:-1]]:
        raise WrongTypeError(name, where, "a piece without a length", forms)
    check_length = lambda x: None if x is None else t.check_steps(where, f"length in {name}", x)
    return tuple((t.check_piece(where, name, piece), check_length(n)) for piece, n in pairs)


Pieces = Annotated[Any, _check_pieces]


@schedule
def sequence(step, pieces: Pieces):
    """Pieces in a row, `[(schedule, length), ...]`, each counting from 0; the last has no end.

    `pieces` is a list. A piece is a schedule, another function of the step, or a number.

    >>> from tsunax.schedules import *
    >>> sequence([(linear_schedule(0.0, 1.0, 2), 2), (1.0, 2), lambda step: 0.5**step]).values(7)
    array([0.  , 0.5 , 1.  , 1.  , 1.  , 0.5 , 0.25], dtype=float32)
    """
    value = value_at(pieces[0][0], step)
    begin = 0
    for (_, length), (piece, _) in itertools.pairwise(pieces):
        begin = begin + whole_steps(length)
        value = jnp.where(step >= begin, value_at(piece, step - begin), value)
    return value


@schedule
def loop(step, schedule: Piece, period: t.Period):
    """The first `period` steps of a schedule, repeated: `schedule(step % period)`."""
    return value_at(schedule, step % jnp.maximum(whole_steps(period), 1))


@schedule
def interpolate(step, schedule: Piece, rate: t.Period):
    """`schedule(step // rate)`: a schedule of epochs that have `rate` steps each."""
    return value_at(schedule, step // jnp.maximum(whole_steps(rate), 1))


@schedule
def shift(step, schedule: Piece, offset: t.Offset):
    """`schedule(step + offset)`; a negative offset repeats `schedule(0)` for its first steps."""
    return value_at(schedule, step + whole_steps(offset))


@schedule
def reverse(step, schedule: Piece, period: t.Period):
    """`schedule(period - step)`: from its value at `period` back to its value at 0, which stays."""
    return value_at(schedule, whole_steps(period) - step)


@schedule
def symmetric(step, schedule: Piece, period: t.Period):
    """`schedule(min(step, period - step))`: up to the middle of `period` steps, and back.

    >>> from tsunax.schedules import *
    >>> up = linear_schedule(0.0, 1.0, 2)
    >>> (loop(symmetric(up, 4), 4).values(9) == triangle(0.0, 1.0, 4).values(9)).all()
    np.True_
    """
    return value_at(schedule, jnp.minimum(step, whole_steps(period) - step))


def compose(schedule: Schedule, /, **parameters: Any) -> Schedule:
    """A `schedule` with some `parameters` replaced by numbers, or by schedules of the same step.

    Raises TypeError for a parameter that the schedule does not have.

    >>> from tsunax.schedules import *
    >>> high = exponential_decay(1.0, 4, 0.5, staircase=True)
    >>> compose(triangle(0.0, 1.0, 4), high=high).values(7)
    array([0.  , 0.5 , 1.  , 0.5 , 0.  , 0.25, 0.5 ], dtype=float32)
    """
    return schedule.factory(**{**schedule.arguments, **dict(schedule.static), **parameters})


def join_schedules(
    schedules: Sequence[Function], boundaries: Sequence[int] | np.ndarray
) -> Schedule:
    """`sequence` of a list of schedules, with ints for the steps at which all but the first begin.

    `join_schedules([a, b], [100])` is `sequence([(a, 100), b])`. Raises HyperparameterError for
    `boundaries` that are negative or not sorted, ValueError unless `schedules` has one more item.
    """
    lengths = [*(end - begin for begin, end in itertools.pairwise([0, *boundaries])), None]
    return sequence(list(zip(schedules, lengths, strict=True)))


def sgdr_schedule(cosine_kwargs: Sequence[Mapping[str, Any]]) -> Schedule:
    """`sequence` of a `warmup_cosine_decay_schedule(**kwargs)` per item, `decay_steps` long.

    `cosine_kwargs` is a list of dicts. Raises WrongTypeError for an empty one. (Loshchilov and
    Hutter, SGDR, arXiv:1608.03983.)
    """
    return sequence([(warmup_cosine_decay_schedule(**x), x["decay_steps"]) for x in cosine_kwargs])


__all__ = [
    "compose", "interpolate", "join_schedules", "loop", "reverse", "sequence", "sgdr_schedule",
    "shift", "symmetric",
]  # fmt: skip
