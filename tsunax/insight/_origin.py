"""Find the equation that made the first value that is not finite, by walking back.

    bad result -> its equation -> its bad operands -> ... -> the first one of finite operands

Only what leads to the bad result counts: not an infinity that a mask puts in and `where` takes out
again, nor log(0) in a branch that is not taken. A constant that is infinite by intent (-inf in a
mask) is blamed only for what is made of it. The walk goes into inner programs (jit, scan, cond,
checkpoint, custom derivatives), into a scan at the first trip that went wrong. A `while` loop,
which no gradient goes through, is blamed as a whole.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tsunax._core.dataflow import called as called_by
from tsunax._core.dataflow import scanned


@dataclass(frozen=True)
class Origin:
    """The first bad value on the way to a bad result."""

    argument: int | None  # which argument of the program it is; None where the program made it
    primitive: str = ""
    sources: tuple[Any, ...] = ()  # `source_info` of its equation, then of the calls around that
    # the loops around it, outermost first: their equation, which trip
    trips: tuple[tuple[Any, int], ...] = ()
    value: Any = None  # what it gave
    constant: bool = False  # whether it is, or comes from, a constant of the program: bad by intent


def bad(x: Any) -> Any:
    """Where an array is not finite; None where it is nowhere."""
    dtype = getattr(x, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, np.inexact):
        return None
    found = ~np.isfinite(np.asarray(x))
    return found if found.any() else None


def origin(program: Any, arguments: Sequence[Any], place: int, where: Any) -> Origin:
    """The origin of the bad elements in one result of a closed jaxpr (`where` marks them)."""
    own = lambda i, places: Origin(i, value=np.asarray(arguments[i]))
    run = _Run(program.jaxpr, program.consts, arguments, own)
    return run.of(program.jaxpr.outvars[place], where)


class _Run:
    """One run of a program, with every value that it computed."""

    def __init__(self, jaxpr, consts, arguments, outer: Callable, trips=(), sources=()):
        self.jaxpr, self.outer, self.trips, self.sources = jaxpr, outer, trips, sources
        self.argument_of = {v: i for i, v in enumerate(jaxpr.invars)}
        self.constants = set(jaxpr.constvars)
        self.maker = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
        self.known: dict[tuple[Any, bytes], Origin] = {}
        self.values = dict(zip(jaxpr.invars, arguments, strict=True))
        self.values |= zip(jaxpr.constvars, consts, strict=True)
        made = [v for eqn in jaxpr.eqns for v in eqn.outvars if type(v).__name__ != "DropVar"]
        self.values |= zip(made, _compiled(jaxpr, tuple(made))(consts, arguments), strict=True)

    def value(self, v: Any) -> Any:
        return v.val if hasattr(v, "val") else self.values[v]

    def of(self, v: Any, where: Any) -> Origin:
        """The origin of what is bad in a variable, at these places."""
        if hasattr(v, "val") or v in self.constants:
            return Origin(None, "constant", constant=True)
        if v in self.argument_of:
            return self.outer(self.argument_of[v], where)
        key = v, where.tobytes()
        if key not in self.known:
            eqn = self.jaxpr.eqns[self.maker[v]]
            self.known[key] = self.inside(eqn, v, where) or self.through(eqn, v, where)
        return self.known[key]

    def through(self, eqn: Any, v: Any, where: Any) -> Origin:
        """The origin behind a primitive: its bad operands, or the primitive itself."""
        out = np.asarray(self.value(v))
        operands = [(x, self.at(eqn, i, x, where)) for i, x in enumerate(eqn.invars)]
        wrong = [(x, places) for x, places in operands if places is not None]
        made_nan = bool(np.isnan(out[where]).any())
        nans = [(x, p & np.isnan(np.asarray(self.value(x)))) for x, p in wrong if made_nan]
        nans = [(x, places) for x, places in nans if places.any()]
        order = lambda pair: self.maker.get(pair[0], -1) if not hasattr(pair[0], "val") else -2
        constant = None
        for x, places in sorted(nans or wrong, key=order):
            constant = self.of(x, places)
            if not constant.constant:
                return constant
        if constant is None or (made_nan and not nans) or self.is_new(eqn, out, where):
            return self.blame(eqn, out)
        # infinite by intent so far: whoever asks may blame an equation further on
        return constant if constant.sources else self.blame(eqn, out, constant=True)

    def blame(self, eqn: Any, out: Any, constant: bool = False) -> Origin:
        sources = (eqn.source_info, *self.sources)
        return Origin(None, eqn.primitive.name, sources, self.trips, out, constant)

    def at(self, eqn: Any, i: int, x: Any, where: Any) -> Any:
        """The bad elements of an operand that affect the result at `where`; None without any."""
        found = bad(self.value(x))
        if found is None:
            return None
        name = eqn.primitive.name
        if name == "select_n":
            found = found & where & (np.asarray(self.value(eqn.invars[0])).astype(int) == i - 1)
        elif name in ("reshape", "squeeze", "expand_dims"):
            found = found & where.reshape(found.shape)
        elif name == "transpose":
            found = found & where.transpose(np.argsort(eqn.params["permutation"]))
        elif found.shape == where.shape and name in _ELEMENTWISE:
            found = found & where
        return found if found.any() else None

    def is_new(self, eqn: Any, out: Any, where: Any) -> bool:
        """Whether an elementwise primitive made a bad value from finite operands."""
        if eqn.primitive.name not in _ELEMENTWISE:
            return False
        new = where & ~np.isfinite(out)
        for x in eqn.invars:
            if (found := bad(self.value(x))) is not None:
                new &= ~found
        return bool(new.any())

    def inside(self, eqn: Any, v: Any, where: Any) -> Origin | None:
        """The origin within the program of an equation; None where there is none to look into."""
        name, place = eqn.primitive.name, eqn.outvars.index(v)
        given = [self.value(x) for x in eqn.invars]
        if name == "scan":
            return self.in_scan(eqn, given, place, where)
        first, called = 0, called_by(eqn)
        if name == "cond":
            branch = eqn.params["branches"][int(np.asarray(given[0]))]
            first, called = 1, (branch.jaxpr, branch.consts)
        if called is None:
            return None
        outer = lambda i, places: self.of(eqn.invars[first + i], places)
        run = _Run(*called, given[first:], outer, self.trips, (eqn.source_info, *self.sources))
        return run.of(called[0].outvars[place], where)

    def in_scan(self, eqn: Any, given: list, place: int, where: Any) -> Origin:
        body, length = eqn.params["jaxpr"], eqn.params["length"]
        fixed, carried = scanned(eqn)
        consts, carry = given[:fixed], given[fixed : fixed + carried]
        rows, order = given[fixed + carried :], range(length)
        order = order[::-1] if eqn.params["reverse"] else order
        run = _compiled(body.jaxpr, None)
        before: list[list] = []  # what each trip was given

        def outer(i, places, trip):
            if fixed <= i < fixed + carried and trip > 0:
                return walk(trip - 1, i - fixed, places)
            if i < fixed + carried:
                return self.of(eqn.invars[i], places)
            whole = np.zeros(np.shape(given[i]), bool)
            whole[order[trip]] = places
            return self.of(eqn.invars[i], whole)

        def walk(trip: int, place: int, where: Any) -> Origin:
            trips, sources = (*self.trips, (eqn, order[trip])), (eqn.source_info, *self.sources)
            ask = lambda i, places: outer(i, places, trip)
            inner = _Run(body.jaxpr, body.consts, before[trip], ask, trips, sources)
            v = body.jaxpr.outvars[place]
            wrong = bad(inner.value(v))
            shared = where if wrong is None else wrong & where
            return inner.of(v, shared if wrong is None or shared.any() else wrong)

        for trip, i in enumerate(order):
            before.append([*consts, *carry, *(x[i] for x in rows)])
            out = run(body.consts, before[-1])
            carry = out[:carried]
            wrong = bad(out[place])
            if wrong is not None and place >= carried:
                wrong &= where[i]
            if wrong is not None and wrong.any():
                return walk(trip, place, wrong)
        return self.blame(eqn, np.asarray(self.value(eqn.outvars[place])))


_ELEMENTWISE = frozenset(
    "abs acos acosh add add_any asin asinh atan atan2 atanh cbrt ceil clamp convert_element_type "
    "copy cos cosh digamma div erf erf_inv erfc exp exp2 expm1 floor integer_pow lgamma log log1p "
    "logistic max min mul neg nextafter pow real reduce_precision rem round rsqrt select_n sign "
    "sin sinh sqrt square stop_gradient sub tan tanh".split()
)


@functools.lru_cache(maxsize=64)  # the body of a loop is walked trip by trip
def _compiled(jaxpr: Any, made: tuple | None) -> Callable:
    """`(consts, arguments) -> results` of a program, or the values of these variables."""
    from jax.extend import core

    if made is not None:
        info = jaxpr.debug_info  # it names the results
        if hasattr(info, "_replace") and hasattr(info, "result_paths"):
            info = info._replace(result_paths=None)
        jaxpr = jaxpr.replace(outvars=list(made), debug_info=info)

    @jax.jit
    def run(consts, arguments):
        closed: Any = getattr(core, "ClosedJaxpr", core.Jaxpr)  # one class since jax 0.12
        return core.jaxpr_as_fun(closed(jaxpr, list(consts)))(*arguments)

    return lambda consts, arguments: run(tuple(consts), tuple(arguments))
