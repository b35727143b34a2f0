"""Dataflow of a traced function: facts about its arguments, carried through its jaxpr.

An analysis is a value for "nothing is known", a `join` of two facts, and a rule for primitives:
`(equation, facts of its operands) -> facts of its results`. This file carries facts through inner
programs (jit, checkpoint, custom derivatives, cond, scan, while), and through loops until nothing
changes any more.
"""

import functools
import itertools
import linecache
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from tsunax.errors import LIBRARIES, OUR_FOLDER


@dataclass(frozen=True)
class Analysis:
    """Facts are compared with `==`; joining must end, so they may only grow."""

    nothing: Any  # the fact of constants and of values made from constants alone
    join: Callable[[Any, Any], Any]
    rule: Callable[[Any, Sequence[Any]], Sequence[Any]]

    def run(self, jaxpr: Any, argument_facts: Sequence[Any]) -> list[Any]:
        """The facts of the results of an open jaxpr, from the facts of its arguments."""
        facts = dict(zip(jaxpr.invars, argument_facts, strict=True))
        fact_of = lambda v: self.nothing if hasattr(v, "val") else facts.get(v, self.nothing)
        for eqn in jaxpr.eqns:
            result_facts = self._through(eqn, [fact_of(v) for v in eqn.invars])
            facts.update(zip(eqn.outvars, result_facts, strict=True))
        return [fact_of(v) for v in jaxpr.outvars]

    def _through(self, eqn: Any, facts: list[Any]) -> Sequence[Any]:
        name, params = eqn.primitive.name, eqn.params
        if name == "scan":
            n_consts, n_carried = scanned(eqn)
            consts, row_facts = facts[:n_consts], facts[n_consts + n_carried :]
            body = lambda carry: self.run(params["jaxpr"].jaxpr, [*consts, *carry, *row_facts])
            carry, out = self._settled(body, facts[n_consts : n_consts + n_carried])
            return [*carry, *out[n_carried:]]
        if name == "while":
            n_consts, n_carried = params["cond_nconsts"], params["body_nconsts"]
            body = lambda carry: self.run(
                params["body_jaxpr"].jaxpr, [*facts[n_consts : n_consts + n_carried], *carry]
            )
            return self._settled(body, facts[n_consts + n_carried :])[0]
        if name == "cond":
            facts_by_branch = [self.run(branch.jaxpr, facts[1:]) for branch in params["branches"]]
            join_all = lambda facts: functools.reduce(self.join, facts, self.nothing)
            return list(map(join_all, zip(*facts_by_branch, strict=True)))
        program = inner_program(eqn, parts=True)
        return self.rule(eqn, facts) if program is None else self.run(program[0], facts)

    def _settled(self, body: Callable, carry: list[Any]) -> tuple[list[Any], list[Any]]:
        while True:
            out = body(carry)
            new = [self.join(a, b) for a, b in zip(carry, out[: len(carry)], strict=True)]
            if new == carry:
                return carry, out
            carry = new


def multiplied(fn: Callable, params: Any, batch: Any) -> list[bool]:
    """Which leaves of the batch reach a product or convolution with params in `fn(params, batch)`.

    These are the inputs of the model. Targets, weights and masks meet its output only.
    """
    inputs = 0
    union = lambda bits: functools.reduce(int.__or__, bits, 0)

    def rule(eqn, facts):
        nonlocal inputs
        if eqn.primitive.name in _PRODUCTS:
            for x, w in (facts[:2], facts[1::-1]):
                # Only params count: a product with a value made of params and batch may be a
                # weighted mean. A convolution is no mean, and its operands must share a dtype.
                if w == 1 or (w & 1 and eqn.primitive.name == "conv_general_dilated"):
                    inputs |= x & ~1
        return [union(facts)] * len(eqn.outvars)

    program = jax.make_jaxpr(fn)(params, batch)
    size, n = len(jax.tree.leaves(params)), len(jax.tree.leaves(batch))
    bits = [1] * size + [2 << i for i in range(n)]  # 1 is params, 2 << i leaf i of the batch
    Analysis(0, int.__or__, rule).run(program.jaxpr, bits)
    return [bool(inputs & (2 << i)) for i in range(n)]


def dependent_results(fn: Callable, x: Any) -> list[bool]:
    """For each array of `fn(x)` whether it depends on the tree x. Traces `fn`."""
    program = jax.make_jaxpr(fn)(x).jaxpr
    union = Analysis(False, bool.__or__, lambda eqn, facts: [any(facts)] * len(eqn.outvars))
    return union.run(program, [True] * len(program.invars))


_PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general")


# The parts of an equation


def programs_in(eqn: Any) -> list[Any]:
    """The programs in the parameters of an equation, open."""
    values = (x if isinstance(x, tuple | list) else (x,) for x in eqn.params.values())
    programs = (getattr(x, "jaxpr", x) for x in itertools.chain.from_iterable(values))
    return [x for x in programs if hasattr(x, "eqns") and hasattr(x, "outvars")]


def inner_program(eqn: Any, parts: bool = False) -> tuple[Any, Sequence[Any]] | None:
    """The inner program of an equation, and its constants. With `parts` also inside `shard_map`."""
    programs = programs_in(eqn)
    if len(programs) != 1:
        return None
    program = programs[0]
    closed = next(x for x in eqn.params.values() if getattr(x, "jaxpr", x) is program)
    shapes_of = lambda variables: [len(v.aval.shape) if parts else v.aval.shape for v in variables]
    program_variables, operands = (program.invars, program.outvars), (eqn.invars, eqn.outvars)
    is_same_interface = list(map(shapes_of, program_variables)) == list(map(shapes_of, operands))
    return (program, getattr(closed, "consts", ())) if is_same_interface else None


def scanned(eqn: Any) -> tuple[int, int]:
    """How many operands of a scan are the same in every trip, and how many it carries."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    parts = eqn.params["ft_in"].update(range(len(eqn.invars))).unpack()  # jax 0.12
    consts, carry, *_ = map(list, parts)
    return len(consts), len(carry)


def source_line(sources: tuple, above: str = "") -> tuple[str, str]:
    """The innermost line of the user's code (or else a library's) of an equation, and its text.

    `sources` belong to the equation and to the calls around it. Frames below `above` are ignored.
    """
    from jax.extend import source_info_util

    library_frame = None
    for source in sources:
        lines = reversed(source_info_util.summarize(source, num_frames=100).splitlines())
        frames = [match for line in lines if (match := _FRAME.match(line))]
        frames_above = itertools.takewhile(lambda frame: frame[1] != above, frames)
        foreign_frames = [frame for frame in frames_above if not frame[1].startswith(OUR_FOLDER)]
        is_users = lambda f: "site-packages" not in f[1] and not f[1].startswith(LIBRARIES)
        if user_frame := next(filter(is_users, foreign_frames), None):
            return _as_text(user_frame)
        library_frame = library_frame or next(iter(foreign_frames), None)
    return ("", "") if library_frame is None else _as_text(library_frame)


def _as_text(frame: re.Match) -> tuple[str, str]:
    return f"{frame[1]}:{frame[2]} ({frame[3]})", linecache.getline(frame[1], int(frame[2])).strip()


_FRAME = re.compile(r"(.*?):(\d+)(?::\d+)? \((.*)\)$")
