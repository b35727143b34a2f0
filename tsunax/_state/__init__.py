"""The fields of a state: how they are declared, and the static part that all states of a run share.

`state_setup.py` makes them from the arguments of `setup`, `state_text.py` prints them.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false
# pyright: reportUnknownVariableType=false, reportUnknownLambdaType=false
from __future__ import annotations

import dataclasses
import functools
import operator
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np

from tsunax.errors import StateError

if TYPE_CHECKING:
    from tsunax.averages import Average
    from tsunax.precision import Policy

T = TypeVar("T")

COUNTS = ("step", "calls", "rejected", "rejected_in_a_row")  # the elements of a clock, in order

_PLANS: weakref.WeakValueDictionary[Any, Plan] = weakref.WeakValueDictionary()
_LOCK = threading.RLock()  # a user's `__eq__`, in a comparison of plans, may set up a state


@dataclass(frozen=True, eq=False, repr=False, init=False)
class Plan:
    """The static part of a state. Equal plans are one object: jit finds its program by identity."""

    init: Any  # the rule's init without its numbers, only traced for shapes; None in an evaluation
    update: Any  # the rule's update; None in an evaluation
    selected: tuple[bool, ...] | None  # whether each leaf of params is trained; None: all are
    precision: Policy | None
    overwritten: tuple[bool, ...] | None  # whether its gradient replaces each leaf; None: no leaf
    # hashes of all values that the code of the rule and its schedules refers to in this process
    references: str = dataclasses.field(default="", repr=False)

    def __new__(cls, *fields: Any) -> Plan:
        with _LOCK:
            plan = _PLANS.get(fields)
            if plan is None:
                plan = object.__new__(cls)
                names = (f.name for f in dataclasses.fields(cls))
                plan.__dict__.update(zip(names, fields, strict=False))
                _PLANS[fields] = plan
            return plan

    def __reduce__(self) -> tuple[type[Plan], tuple[Any, ...]]:
        return Plan, tuple(getattr(self, field.name) for field in dataclasses.fields(self))

    @functools.cached_property
    def moving(self) -> tuple[bool, ...] | None:
        """One flag per leaf of params, true if a step may change it; None: all leaves."""
        if self.overwritten is None or self.selected is None:
            return self.selected
        return tuple(a or b for a, b in zip(self.selected, self.overwritten, strict=True))

    def __deepcopy__(self, _: object) -> Plan:
        return self


# Fields
#
# A step treats a field as it is declared here. Donation, assembly, the choice of the verdict,
# sharding, printing and `replace` are derived from the declaration. No other code lists the fields.


def field(*, moves: str = "", like: str = "", shows: str = "") -> Any:
    """Declare a field of a state.

    Args:
      moves: "step" if only an applied step changes it; "record" if every step does; "" if a step
        only reads it. Fields that move are donated.
      like: the tree that its leaves are like: "params"; "trained", the trained leaves (they come
        first; freezing and shardings go leaf by leaf); "average", the same, in an
        `averages.Average` or None, which each applied step moves; "rule", the state of the rule;
        "free", any structure, for example model state; or "", arrays that are whole on each device.
      shows: the word for its bytes in `repr`; "" for none.
    """
    if moves not in _MOVES or like not in _LIKE:
        raise StateError("role", "field()", (moves, like), f"one of {_MOVES}, one of {_LIKE}")
    return dataclasses.field(metadata={"moves": moves, "like": like, "shows": shows})


_MOVES, _LIKE = ("", "step", "record"), ("", "params", "trained", "average", "rule", "free")


@dataclass_transform(
    frozen_default=True, eq_default=False, kw_only_default=True, field_specifiers=(field,)
)
def state_class(cls: type[T]) -> type[T]:
    """Register a class of states: `TrainState`, or a subclass that adds fields to it.

    @state_class
    class Lagged(TrainState):
        lag: Any = field(moves="step", like="trained", shows="lag")

    state = Lagged.of(state, lag=ts.trainable(state))
    """
    new_class: Any = dataclass(frozen=True, eq=False, kw_only=True, repr=False)(cls)
    new_class._fields = tuple(f for f in dataclasses.fields(new_class) if f.name != "plan")
    names = [f.name for f in new_class._fields]
    moving = [f.name for f in new_class._fields if f.metadata["moves"] and f.name != "params"]
    fixed = [f.name for f in new_class._fields if not f.metadata["moves"]]
    new_class._moving = ("params", *moving)
    # `assemble` sets them in this order: first the params that stay (None: none), then the params
    # that move, which win.
    new_class._parts = ("params", *fixed, "params", *moving, "plan")
    new_class._get_moving = operator.itemgetter(*new_class._moving)
    new_class._get_fixed = operator.itemgetter(*fixed)
    return jax.tree_util.register_dataclass(new_class, names, ["plan"])


def averages_of(state: Any) -> dict[str, Average]:
    """The averages of a state by the names of their fields."""
    names = [f.name for f in state._fields if f.metadata["like"] == "average"]
    return {name: average for name in names if (average := getattr(state, name)) is not None}


# Frozen bits


def trained_count(state: Any) -> int:
    """How many leaves of the params are trained."""
    selected = state.plan.selected
    return len(jax.tree.leaves(state.params)) if selected is None else sum(selected)


def thawed_flags(state: Any) -> list[jax.Array] | None:
    """One scalar bool for each trained leaf, false if it is frozen; None if no leaf can be."""
    return None if state.frozen is None else _flags_in(state.frozen, trained_count(state))


@functools.partial(jax.jit, static_argnums=1)  # a call outside of a program compiles nothing new
def _flags_in(frozen: jax.Array, n: int) -> list[jax.Array]:
    all_thawed = lambda words: [words[0] == 0] * n
    read_words = lambda words: [(words[k // 32] >> np.uint32(k % 32)) & 1 == 0 for k in range(n)]
    # A CPU reads the flags behind a cond, so that the flag of a leaf is an operand of its kernels.
    # If XLA fused the flag into them, its index would be a constant, and no two leaves could share
    # a kernel. A GPU runs a cond within its CUDA graph, but shares no kernels.
    read_if_any = lambda words: jax.lax.cond(jnp.any(words != 0), read_words, all_thawed, words)
    return jax.lax.platform_dependent(frozen, cpu=read_if_any, default=read_words)


def frozen_flags(state: Any) -> np.ndarray:
    """One bool per trained leaf, true if it is frozen. A population has a row for each member."""
    n = trained_count(state)
    if state.frozen is None:
        return np.zeros(n, bool)
    words = np.asarray(state.frozen)
    return (words[..., np.arange(n) // 32] >> np.arange(n) % 32 & 1).astype(bool)


def frozen_words(flags: Sequence[bool] | np.ndarray) -> np.ndarray:
    """The inverse of `frozen_flags`: uint32 words, one bit per trained leaf."""
    bits = np.pad(np.asarray(flags, bool), (0, -len(flags) % 32))
    return np.packbits(bits, bitorder="little").view(np.uint32)
