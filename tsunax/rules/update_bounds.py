"""Which rules make finite updates of finite gradients, by bounds on their updates.

A step with such a rule is judged before the rule runs: by its loss and by the norm of its gradient.
A finite norm in float32 bounds every element of the gradient by 2^64, and so every average of
gradients. Each function below computes how a rule changes such a bound. It reads the numbers of the
rule in the closure of its update: floats of a plain optax rule, live numbers of a live rule. A rule
that is not here has no bound, and its steps are judged by their update.

A bound is a pair `(b, c)`: each update is `c · p` plus at most `b`, where p is its parameter and
`c` the decay, if there is any. Params stay finite if `c` is between -1 and 0 and `b` is below half
of the distance between the two largest numbers of their dtype: an update of half of it can round
the largest number to infinity. Leaves can have different bounds, as under a mask, so `bounds` is a
list.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tsunax._core import Function, PyTree, Scalar, trees
from tsunax.rules.number_table import as_scalar

# For each dtype of a computation: the largest element of a tree with a finite norm, and the
# smallest update that can make a finite parameter infinite.
LARGEST = {"float32": (2.0**64, 2.0**103), "float64": (2.0**512, 2.0**970)}
BELOW_ONE = 1 - 2.0**-20  # Averages with a larger decay are judged by their update.
LONGEST = 2.0**20  # the number of gradients that add up in a trace with the decay `BELOW_ONE`
TINY = 2.0**-126  # smaller numbers may be flushed to zero


class Undeclared(Exception):
    """Its text is the name of a rule without a bound on its updates."""


class MadeOfRules:
    """A base class of updates that call other updates: `bounded` combines their bounds.

    This method is for an update around a single rule, `update`, with the same state.
    """

    update: Function

    def bounded(self, survey: Survey, state: Any, bounds: list[Any]) -> list[Any]:
        return survey.walk(self.update, state, bounds)


@dataclass
class Survey:
    """A walk through a rule and its state, and the conditions on numbers that it collects."""

    largest: float  # element of a gradient with a finite norm
    limit: float  # updates are below it
    is_complex: bool  # whether some leaf is
    weight: Scalar  # the weight of the loss of this call
    params_norm: Function  # () -> the norm of the params
    conditions: list[Any] = field(default_factory=list)
    by_element: bool = True  # whether no rule reads names or shapes of leaves

    def need(self, *conditions: Any) -> None:
        self.conditions += conditions

    def joint_bound(self, b: Scalar, c: Scalar) -> Scalar:
        """One bound on updates and their decay, for a rule that does not separate the two."""
        if _is_static(c, 0):
            return b
        self.need(self.params_norm() <= self.largest)
        return b + abs(c) * self.largest

    def walk(self, update: Any, state: Any, bounds: list[Any], init: Any = None) -> list[Any]:
        """The bounds on the updates of a rule, from `bounds` on the updates that it gets."""
        if isinstance(update, MadeOfRules):
            return update.bounded(self, state, bounds)
        numbers, name = _closure(update), _factory(update)
        if name == "with_extra_args_support":
            return self.walk(numbers["tx"].update, state, bounds, numbers["tx"].init)
        if name == "chain":
            for inner, inner_state in zip(numbers["update_fns"], state, strict=True):
                bounds = self.walk(inner, inner_state, bounds)
            return bounds
        if name == "masked" and "inner" in numbers:
            self.by_element, inner = False, numbers["inner"]
            return bounds + self.walk(inner.update, state.inner_state, bounds, inner.init)
        if name in ("_stateless", "_decay"):  # helpers of clipping.py; `f` has the numbers
            self.by_element &= numbers.get("where", "**") == "**"
            name, numbers = _factory(numbers["f"]), _closure(numbers["f"])
        if name not in _BOUNDS:
            raise Undeclared(name or trees.describe_call(update))
        numbers = _closure(init) | numbers  # some factories use a number in `init` alone
        bounds = [_BOUNDS[name](numbers, self, b, c, state) for b, c in bounds]
        self.need(*(b < self.limit for b, _ in bounds), *(abs(c) <= 1 for _, c in bounds))
        return bounds


def certain(
    update: Any,
    opt_state: PyTree,
    dtype: str,
    is_complex: bool,
    weight: Scalar,
    params_norm: Function,
) -> tuple[Any, bool]:
    """Whether updates are finite if the gradient is: a bool, or a traced one if numbers are live.

    The second result is whether the rule computes each element of its update from the same element
    of gradient, state and params, and from global norms. Raises Undeclared, with the name of the
    rule, if there is no bound.
    """
    survey = Survey(*LARGEST[dtype], is_complex, weight, params_norm)
    try:
        with np.errstate(all="ignore"):  # NumPy warns of infinite numbers, JAX does not
            bounds = survey.walk(update, opt_state, [(survey.largest, 0.0)])
            survey.need(*((c >= -1) & (c <= 0) for _, c in bounds))
            is_certain: Any = functools.reduce(operator.and_, survey.conditions)
    # The closure or the state is not as in the versions of optax that this file was written for.
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise Undeclared(trees.describe_call(update)) from error
    if np.ndim(is_certain):  # optax also takes arrays as numbers: a rate for each element, say
        is_certain = is_certain.all()
    is_certain = bool(is_certain) if isinstance(is_certain, np.bool_) else is_certain
    return is_certain, survey.by_element


def _is_static(x: Any, value: float) -> bool:
    return isinstance(x, (int, float)) and x == value


def _factory(update: Any) -> str:
    """The factory of a function of optax or tsunax; "" for other functions.

    It is read from the code, because `functools.wraps` copies the name of a function to a wrapper.
    """
    module = getattr(update, "__globals__", {})
    if not module.get("__name__", "").startswith(("optax._src", "optax.transforms", "tsunax.")):
        return ""
    return update.__code__.co_qualname.partition(".<locals>")[0]


def _closure(f: Any) -> dict[str, Any]:
    """The variables in the closure of a function by name, live numbers as arrays."""
    code, cells = getattr(f, "__code__", None), getattr(f, "__closure__", None) or ()
    names = code.co_freevars if code is not None else ()
    return {name: as_scalar(x.cell_contents) for name, x in zip(names, cells, strict=True)}


def _quotient(b: Scalar, divisor: Scalar) -> Scalar:
    return np.inf if _is_static(divisor, 0) else b / divisor


def _is_decay(x: Scalar, of_squares: bool = False) -> Any:
    # If an earlier rule scales gradients, their squares may be infinite, and 0 · inf is NaN.
    return (x >= (TINY if of_squares else 0)) & (x <= BELOW_ONE)


def _averaged(n: dict[str, Any], survey: Survey, b: Scalar, c: Scalar, state: Any) -> Any:
    """Adam and its kin: an average of gradients over a root of squares, plus eps."""
    eps, under_root = n["eps"], n.get("eps_root", 0.0)
    are_decays = _is_decay(n["b1"]), _is_decay(n["b2"], of_squares=True)
    survey.need(*are_decays, eps >= 0, under_root >= 0)
    kept_under_root = abs(under_root) * (under_root >= TINY)  # smaller ones may be flushed to zero
    smallest_divisor = eps + kept_under_root**0.5
    survey.need(smallest_divisor >= TINY)
    # The bias correction divides an average by at least 1 - b1; nesterov adds a second average.
    largest_average = _quotient(2 * survey.joint_bound(b, c), 1 - n["b1"])
    return _quotient(largest_average, smallest_divisor), 0.0


def _over_rms(n: dict[str, Any], survey: Survey, b: Scalar, c: Scalar, state: Any) -> Any:
    """RMSprop divides by the root of an average of squares, Adagrad by the root of their sum."""
    if "decay" in n:
        survey.need(_is_decay(n["decay"], of_squares=True), n["initial_scale"] >= 0)
    survey.need(n["eps"] >= TINY)
    smallest_divisor = n["eps"] ** 0.5 if n.get("eps_in_sqrt", True) else n["eps"]
    return _quotient(survey.joint_bound(b, c), smallest_divisor), 0.0


def _trace(n: dict[str, Any], survey: Survey, b: Scalar, c: Scalar, state: Any) -> Any:
    survey.need(_is_decay(n["decay"]))
    # nesterov adds a gradient to the trace
    return 2 * LONGEST * survey.joint_bound(b, c), 0.0


def _ema(n: dict[str, Any], survey: Survey, b: Scalar, c: Scalar, state: Any) -> Any:
    survey.need(_is_decay(n["decay"]))
    return _quotient(survey.joint_bound(b, c), 1 - n["decay"]), 0.0


def _signs(n: dict[str, Any], survey: Survey, b: Scalar, c: Scalar, state: Any) -> Any:
    sharpness = n.get("smooth_beta", 1.0)
    if survey.is_complex and n.get("mode") == "smooth":  # tanh has poles off the real axis
        raise Undeclared("scale_by_lion(mode='smooth') of complex numbers")
    survey.need(
        survey.joint_bound(b, c) * abs(sharpness) <= survey.limit,
        *(_is_decay(n[k]) for k in ("b1", "b2") if k in n),
    )
    return 1.0, 0.0


def _decayed(rate: Scalar, survey: Survey, b: Scalar, c: Scalar) -> Any:
    if _is_static(rate, 0):
        return b, c
    if not _is_static(c, 0):
        raise Undeclared("decay after decay")
    survey.need(rate >= 0)
    return b, rate


def _scaled(factor: Scalar, b: Scalar, c: Scalar) -> Any:
    return abs(factor) * b, factor * c


def _clipped(n: dict[str, Any], survey: Survey, b: Scalar, c: Scalar, state: Any) -> Any:
    (bound,) = (n[name] for name in ("bound", "max_norm", "max_delta") if name in n)
    survey.need(bound > 0)
    return survey.joint_bound(b, c) + bound, 0.0


def _current_rate(schedule: Any, state: Any) -> Any:
    return schedule(state.count) if callable(schedule) else schedule


# {name of a factory: `(numbers, survey, b, c, state) -> (b, c)`}
_BOUNDS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("scale_by_adam", "scale_by_amsgrad", "scale_by_adamax"), _averaged),
    "scale_by_belief": _averaged,
    **dict.fromkeys(("scale_by_rms", "scale_by_rss"), _over_rms),
    "trace": _trace,
    "ema": _ema,
    **dict.fromkeys(("scale_by_sign", "scale_by_lion"), _signs),
    "scale": lambda n, survey, b, c, state: _scaled(n["step_size"], b, c),
    "scale_by_schedule": lambda n, survey, b, c, s: _scaled(n["step_size_fn"](s.count), b, c),
    "add_decayed_weights": lambda n, survey, b, c, s: _decayed(
        _current_rate(n["weight_decay"], s), survey, b, c
    ),
    "_add_decayed_weights": lambda n, survey, b, c, state: _decayed(n["rate"], survey, b, c),
    "_sign_decay": lambda n, survey, b, c, state: (b + abs(n["rate"]), c),
    **dict.fromkeys(("clip", "_clip", "clip_by_global_norm", "_clip_by_global_norm"), _clipped),
    "identity": lambda n, survey, b, c, state: (b, c),
    "set_to_zero": lambda n, survey, b, c, state: (0.0, 0.0),
    "_reject_spikes": lambda n, survey, b, c, state: (b, c),
}
