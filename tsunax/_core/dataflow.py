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

from tsunax._core.source_lines import LIBRARIES, OURS
from tsunax._core.trees import programs_in


@dataclass(frozen=True)
class Analysis:
    """Facts are compared with `==`; joining must end, so they may only grow."""

    nothing: Any  # of constants, and of what is made from them alone
    join: Callable[[Any, Any], Any]
    rule: Callable[[Any, Sequence[Any]], Sequence[Any]]

    def run(self, jaxpr: Any, given: Sequence[Any]) -> list[Any]:
        """The facts of the results of an open jaxpr, from those of its arguments."""
        known = dict(zip(jaxpr.invars, given, strict=True))
        of = lambda v: self.nothing if hasattr(v, "val") else known.get(v, self.nothing)
        for eqn in jaxpr.eqns:
            found = self._through(eqn, [of(v) for v in eqn.invars])
            known.update(zip(eqn.outvars, found, strict=True))
        return [of(v) for v in jaxpr.outvars]

    def _through(self, eqn: Any, given: list[Any]) -> Sequence[Any]:
        name, p = eqn.primitive.name, eqn.params
        if name == "scan":
            n, m = scanned(eqn)
            consts, over = given[:n], given[n + m :]
            once = lambda carry: self.run(p["jaxpr"].jaxpr, [*consts, *carry, *over])
            carry, out = self._settled(once, given[n : n + m])
            return [*carry, *out[m:]]
        if name == "while":
            n, m = p["cond_nconsts"], p["body_nconsts"]
            once = lambda carry: self.run(p["body_jaxpr"].jaxpr, [*given[n : n + m], *carry])
            return self._settled(once, given[n + m :])[0]
        if name == "cond":
            each = [self.run(branch.jaxpr, given[1:]) for branch in p["branches"]]
            joined = lambda facts: functools.reduce(self.join, facts, self.nothing)
            return list(map(joined, zip(*each, strict=True)))
        program = called(eqn, parts=True)
        return self.rule(eqn, given) if program is None else self.run(program[0], given)

    def _settled(self, once: Callable, carry: list[Any]) -> tuple[list[Any], list[Any]]:
        while True:
            out = once(carry)
            new = [self.join(a, b) for a, b in zip(carry, out[: len(carry)], strict=True)]
            if new == carry:
                return carry, out
            carry = new


def multiplied(fn: Callable, params: Any, batch: Any) -> list[bool]:
    """Which leaves of the batch reach a product or convolution with params in `fn(params, batch)`.

    A model reads those. Targets, weights and masks meet its output only.
    """
    found = 0
    union = lambda bits: functools.reduce(int.__or__, bits, 0)

    def rule(eqn, given):
        nonlocal found
        if eqn.primitive.name in _PRODUCTS:
            for x, w in (given[:2], given[1::-1]):
                # params alone: a product with a value made of params and batch may be a weighted
                # mean. A convolution is none, and takes one dtype only
                if w == 1 or (w & 1 and eqn.primitive.name == "conv_general_dilated"):
                    found |= x & ~1
        return [union(given)] * len(eqn.outvars)

    program = jax.make_jaxpr(fn)(params, batch)
    size, n = len(jax.tree.leaves(params)), len(jax.tree.leaves(batch))
    bits = [1] * size + [2 << i for i in range(n)]  # 1 is params, 2 << i leaf i of the batch
    Analysis(0, int.__or__, rule).run(program.jaxpr, bits)
    return [bool(found & (2 << i)) for i in range(n)]


def depends(fn: Callable, x: Any) -> bool:
    """Whether each array of `fn(x)` depends on x. Traces `fn`."""
    program = jax.make_jaxpr(fn)(x).jaxpr
    union = Analysis(False, bool.__or__, lambda eqn, given: [any(given)] * len(eqn.outvars))
    return all(union.run(program, [True]))


_PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general")


# The parts of an equation


def called(eqn: Any, parts: bool = False) -> tuple[Any, Sequence[Any]] | None:
    """The inner program of an equation and its constants; with `parts` also of `shard_map`."""
    programs = programs_in(eqn)
    if len(programs) != 1:
        return None
    program = programs[0]
    closed = next(x for x in eqn.params.values() if getattr(x, "jaxpr", x) is program)
    of = lambda variables: [len(v.aval.shape) if parts else v.aval.shape for v in variables]
    inner, outer = (program.invars, program.outvars), (eqn.invars, eqn.outvars)
    same = list(map(of, inner)) == list(map(of, outer))
    return (program, getattr(closed, "consts", ())) if same else None


def scanned(eqn: Any) -> tuple[int, int]:
    """How many operands of a scan are the same in every trip, and how many it carries."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    parts = eqn.params["ft_in"].update(range(len(eqn.invars))).unpack()  # jax 0.12
    consts, carry, *_ = map(list, parts)
    return len(consts), len(carry)


def source_line(sources: tuple, above: str = "") -> tuple[str, str]:
    """The innermost line of the user's code (or else a library's) of an equation, and its text.

    `sources` are those of the equation and of the calls around it, without frames below `above`.
    """
    from jax.extend import source_info_util

    theirs = None
    for source in sources:
        lines = reversed(source_info_util.summarize(source, num_frames=100).splitlines())
        frames = [match for line in lines if (match := _FRAME.match(line))]
        within = itertools.takewhile(lambda frame: frame[1] != above, frames)
        others = [frame for frame in within if not frame[1].startswith(OURS)]
        is_own = lambda f: "site-packages" not in f[1] and not f[1].startswith(LIBRARIES)
        if own := next(filter(is_own, others), None):
            return _as_text(own)
        theirs = theirs or next(iter(others), None)
    return ("", "") if theirs is None else _as_text(theirs)


def _as_text(frame: re.Match) -> tuple[str, str]:
    return f"{frame[1]}:{frame[2]} ({frame[3]})", linecache.getline(frame[1], int(frame[2])).strip()


_FRAME = re.compile(r"(.*?):(\d+)(?::\d+)? \((.*)\)$")
