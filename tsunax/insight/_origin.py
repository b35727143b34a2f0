"""Find the equation that made the first value that is not finite, by walking back.

    bad result -> its equation -> its bad operands -> ... -> an equation with finite operands

Values without an effect on the bad result do not count: an infinity that a mask puts in and `where`
takes out again, or log(0) in a branch that is not taken. A constant that is infinite by intent
(-inf in a mask) is not blamed itself, but an operation that makes NaN of it is. The walk enters
inner programs (jit, scan, cond, checkpoint, custom derivatives), a scan at the first trip that went
wrong. A `while` loop, which has no gradient, is blamed as a whole.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tsunax._core.dataflow import inner_program, scanned


@dataclass(frozen=True)
class Origin:
    """The first bad value on the way to a bad result."""

    argument: int | None  # the argument of the program; None if the program made the value
    primitive: str = ""
    sources: tuple[Any, ...] = ()  # `source_info` of its equation, then of the enclosing calls
    # (equation, trip) of the enclosing loops, outermost first
    trips: tuple[tuple[Any, int], ...] = ()
    value: Any = None  # the bad array
    constant: bool = False  # it is, or comes from, a constant of the program: bad by intent


def nonfinite_elements(x: Any) -> Any:
    """A mask of the elements that are not finite; None if all are finite."""
    dtype = getattr(x, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, np.inexact):
        return None
    is_nonfinite = ~np.isfinite(np.asarray(x))
    return is_nonfinite if is_nonfinite.any() else None


def find_origin(program: Any, arguments: Sequence[Any], place: int, where: Any) -> Origin:
    """The origin of the bad elements in one result of a closed jaxpr (`where` marks them)."""
    at_argument = lambda i, places: Origin(i, value=np.asarray(arguments[i]))
    run = _Run(program.jaxpr, program.consts, arguments, at_argument)
    return run.origin_of(program.jaxpr.outvars[place], where)


class _Run:
    """One run of a program, with every value that it computed."""

    def __init__(self, jaxpr, consts, arguments, outer_origin: Callable, trips=(), sources=()):
        self.jaxpr = jaxpr
        self.outer_origin = outer_origin
        self.trips = trips
        self.sources = sources
        self.argument_of = {v: i for i, v in enumerate(jaxpr.invars)}
        self.constants = set(jaxpr.constvars)
        self.equation_of = {v: i for i, eqn in enumerate(jaxpr.eqns) for v in eqn.outvars}
        self.origins: dict[tuple[Any, bytes], Origin] = {}
        results = [v for eqn in jaxpr.eqns for v in eqn.outvars if type(v).__name__ != "DropVar"]
        values = *arguments, *consts, *_compiled(jaxpr, tuple(results))(consts, arguments)
        variables = *jaxpr.invars, *jaxpr.constvars, *results
        self.values = dict(zip(variables, values, strict=True))

    def value(self, v: Any) -> Any:
        return v.val if hasattr(v, "val") else self.values[v]

    def origin_of(self, v: Any, where: Any) -> Origin:
        """The origin of a variable's bad elements, marked by `where`."""
        if hasattr(v, "val") or v in self.constants:
            return Origin(None, "constant", constant=True)
        if v in self.argument_of:
            return self.outer_origin(self.argument_of[v], where)
        key = v, where.tobytes()
        if key not in self.origins:
            eqn = self.jaxpr.eqns[self.equation_of[v]]
            self.origins[key] = self.origin_inside(eqn, v, where) or self.origin_through(
                eqn, v, where
            )
        return self.origins[key]

    def origin_through(self, eqn: Any, v: Any, where: Any) -> Origin:
        """The origin behind a primitive: its bad operands, or the primitive itself."""
        out = np.asarray(self.value(v))
        bad_elements = lambda i: self.bad_operand_elements(eqn, i, where)
        wrong = [
            (x, places) for i, x in enumerate(eqn.invars) if (places := bad_elements(i)) is not None
        ]
        made_nan = bool(np.isnan(out[where]).any())
        nans = [
            (x, places & np.isnan(np.asarray(self.value(x)))) for x, places in wrong if made_nan
        ]
        nans = [(x, places) for x, places in nans if places.any()]
        by_equation = lambda pair: (
            self.equation_of.get(pair[0], -1) if not hasattr(pair[0], "val") else -2
        )
        origin = None
        for x, places in sorted(nans or wrong, key=by_equation):
            origin = self.origin_of(x, places)
            if not origin.constant:
                return origin
        if origin is None or (made_nan and not nans) or self.is_new(eqn, out, where):
            return self.blame(eqn, out)
        # The value is infinite by intent up to here. The caller may blame a later equation.
        return origin if origin.sources else self.blame(eqn, out, constant=True)

    def blame(self, eqn: Any, out: Any, constant: bool = False) -> Origin:
        sources = (eqn.source_info, *self.sources)
        return Origin(None, eqn.primitive.name, sources, self.trips, out, constant)

    def bad_operand_elements(self, eqn: Any, i: int, where: Any) -> Any:
        """The bad elements of operand i that affect the result at `where`; None without any."""
        bad_elements = nonfinite_elements(self.value(eqn.invars[i]))
        if bad_elements is None:
            return None
        primitive = eqn.primitive.name
        if primitive == "select_n":
            bad_elements = (
                bad_elements & where & (np.asarray(self.value(eqn.invars[0])).astype(int) == i - 1)
            )
        elif primitive in ("reshape", "squeeze", "expand_dims"):
            bad_elements = bad_elements & where.reshape(bad_elements.shape)
        elif primitive == "transpose":
            bad_elements = bad_elements & where.transpose(np.argsort(eqn.params["permutation"]))
        elif bad_elements.shape == where.shape and primitive in _ELEMENTWISE:
            bad_elements = bad_elements & where
        return bad_elements if bad_elements.any() else None

    def is_new(self, eqn: Any, out: Any, where: Any) -> bool:
        """Whether an elementwise primitive made a bad value from finite operands."""
        if eqn.primitive.name not in _ELEMENTWISE:
            return False
        is_made_here = where & ~np.isfinite(out)
        for x in eqn.invars:
            if (bad_elements := nonfinite_elements(self.value(x))) is not None:
                is_made_here &= ~bad_elements
        return bool(is_made_here.any())

    def origin_inside(self, eqn: Any, v: Any, where: Any) -> Origin | None:
        """The origin within the inner program of an equation; None if it has no inner program."""
        name, output = eqn.primitive.name, eqn.outvars.index(v)
        operands = [self.value(x) for x in eqn.invars]
        if name == "scan":
            return self.origin_in_scan(eqn, operands, output, where)
        first_operand, program = 0, inner_program(eqn)
        if name == "cond":
            branch = eqn.params["branches"][int(np.asarray(operands[0]))]
            first_operand, program = 1, (branch.jaxpr, branch.consts)
        if program is None:
            return None
        outer_origin = lambda i, places: self.origin_of(eqn.invars[first_operand + i], places)
        run = _Run(
            *program,
            operands[first_operand:],
            outer_origin,
            self.trips,
            (eqn.source_info, *self.sources),
        )
        return run.origin_of(program[0].outvars[output], where)

    def origin_in_scan(self, eqn: Any, operands: list, output: int, where: Any) -> Origin:
        body, length = eqn.params["jaxpr"], eqn.params["length"]
        n_consts, n_carried = scanned(eqn)
        consts, carry = operands[:n_consts], operands[n_consts : n_consts + n_carried]
        rows, order = operands[n_consts + n_carried :], range(length)
        order = order[::-1] if eqn.params["reverse"] else order
        run = _compiled(body.jaxpr, None)
        trip_arguments: list[list] = []

        def outer_origin(i, places, trip):
            if n_consts <= i < n_consts + n_carried and trip > 0:
                return walk(trip - 1, i - n_consts, places)
            if i < n_consts + n_carried:
                return self.origin_of(eqn.invars[i], places)
            mask = np.zeros(np.shape(operands[i]), bool)
            mask[order[trip]] = places
            return self.origin_of(eqn.invars[i], mask)

        def walk(trip: int, output: int, where: Any) -> Origin:
            trips, sources = (*self.trips, (eqn, order[trip])), (eqn.source_info, *self.sources)
            outer_of_trip = lambda i, places: outer_origin(i, places, trip)
            inner = _Run(
                body.jaxpr, body.consts, trip_arguments[trip], outer_of_trip, trips, sources
            )
            v = body.jaxpr.outvars[output]
            wrong = nonfinite_elements(inner.value(v))
            shared = where if wrong is None else wrong & where
            return inner.origin_of(v, shared if wrong is None or shared.any() else wrong)

        for trip, i in enumerate(order):
            trip_arguments.append([*consts, *carry, *(x[i] for x in rows)])
            out = run(body.consts, trip_arguments[-1])
            carry = out[:n_carried]
            wrong = nonfinite_elements(out[output])
            if wrong is not None and output >= n_carried:
                wrong &= where[i]
            if wrong is not None and wrong.any():
                return walk(trip, output, wrong)
        return self.blame(eqn, np.asarray(self.value(eqn.outvars[output])))


_ELEMENTWISE = frozenset(
    "abs acos acosh add add_any asin asinh atan atan2 atanh cbrt ceil clamp convert_element_type "
    "copy cos cosh digamma div erf erf_inv erfc exp exp2 expm1 floor integer_pow lgamma log log1p "
    "logistic max min mul neg nextafter pow real reduce_precision rem round rsqrt select_n sign "
    "sin sinh sqrt square stop_gradient sub tan tanh".split()
)


@functools.lru_cache(maxsize=64)  # every trip of a loop has the same body
def _compiled(jaxpr: Any, variables: tuple | None) -> Callable:
    """`(consts, arguments) -> results` of a program; with `variables`, it returns their values."""
    from jax.extend import core

    if variables is not None:
        info = jaxpr.debug_info  # it names the results
        if hasattr(info, "_replace") and hasattr(info, "result_paths"):
            info = info._replace(result_paths=None)
        jaxpr = jaxpr.replace(outvars=list(variables), debug_info=info)

    @jax.jit
    def run(consts, arguments):
        closed: Any = getattr(core, "ClosedJaxpr", core.Jaxpr)  # one class since jax 0.12
        return core.jaxpr_as_fun(closed(jaxpr, list(consts)))(*arguments)

    return lambda consts, arguments: run(tuple(consts), tuple(arguments))
