"""Functions with other equations in their jaxpr, at any depth."""

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import numpy as np

# Types of jax.extend.core, which costs 20 ms to import.
Jaxpr: TypeAlias = Any
Equation: TypeAlias = Any
# Their inner programs are rewritten, too. Programs in shard_map, pallas_call ... have own layouts.
_OPEN = frozenset(
    "jit pjit scan while cond remat2 checkpoint call closed_call custom_jvp_call "
    "custom_vjp_call".split()
)


def rewritten(fn: Callable, change: Callable, closed: str = "") -> Callable:
    """`fn`, of trees of arrays, with the equations that `change` gives for each jaxpr in it.

    Equations that stay are the same objects. Calls named `closed` are not rewritten. Results that
    are constants are NumPy arrays.
    """
    from jax.extend import core  # costs 20 ms to import, and only some steps need it

    if not all(hasattr(core, name) for name in ("ClosedJaxpr", "Jaxpr", "jaxpr_as_fun")):
        return fn  # a later version of jax

    @functools.wraps(fn)
    def wrapped(*args, **kwargs):
        # One equation around it all, so that the rewritten program is not traced again; of a
        # function that is new each time, because jit remembers the values of an old closure.
        trace = jax.make_jaxpr(jax.jit(functools.partial(fn)), return_shape=True)
        program, shapes = trace(*args, **kwargs)
        program = of_program(program, change, closed, {})
        out = core.jaxpr_as_fun(program)(*jax.tree.leaves((args, kwargs)))
        constants = _constants(getattr(program, "jaxpr", program))
        out = [constants.get(i, x) for i, x in enumerate(out)]
        return jax.tree.unflatten(jax.tree.structure(shapes), out)

    return wrapped


def _constants(outer: Jaxpr) -> dict[int, np.ndarray]:
    """The results that are numbers of the program, by position."""
    from jax.extend import core

    constants: dict[int, Any] = {}
    for eqn in outer.eqns:
        inner = eqn.params["jaxpr"]
        for out, x in zip(eqn.outvars, getattr(inner, "jaxpr", inner).outvars, strict=True):
            if isinstance(x, core.Literal):
                constants[id(out)] = np.asarray(x.val, getattr(x.aval, "dtype", None))
    return {i: constants[id(x)] for i, x in enumerate(outer.outvars) if id(x) in constants}


def of_program(program: Any, change: Callable, closed: str, rewritten_programs: dict) -> Any:
    """The program with other equations; the same object if none changes."""
    from jax.extend import core

    if not isinstance(program, core.Jaxpr):  # a ClosedJaxpr, which is the same class since jax 0.12
        inner = of_program(program.jaxpr, change, closed, rewritten_programs)
        return _with_parts(program, jaxpr=inner)
    # an object is rewritten once: lowering and compiling are cached by it
    if id(program) not in rewritten_programs:
        inner = [_of_equation(eqn, change, closed, rewritten_programs) for eqn in program.eqns]
        new = _with_parts(program, eqns=inner)
        rewritten_programs[id(program)] = program, _with_parts(new, eqns=change(new))
    return rewritten_programs[id(program)][1]


def _of_equation(
    eqn: Equation, change: Callable, closed: str, rewritten_programs: dict
) -> Equation:
    from jax.extend import core

    if eqn.primitive.name not in _OPEN or (closed and eqn.params.get("name") == closed):
        return eqn
    programs = getattr(core, "ClosedJaxpr", core.Jaxpr), core.Jaxpr
    rewrite = lambda x: (
        of_program(x, change, closed, rewritten_programs) if isinstance(x, programs) else x
    )
    return _with_parts(eqn, params=jax.tree.map(rewrite, eqn.params))


def _with_parts(node: Any, **parts: Any) -> Any:
    """A program or an equation with these parts; the same object if its parts are the same."""
    old_parts = {name: getattr(node, name) for name in parts}
    old_ids, new_ids = ([*map(id, jax.tree.leaves(x))] for x in (old_parts, parts))
    return node if old_ids == new_ids else node.replace(**parts)
