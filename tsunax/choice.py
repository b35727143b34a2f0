"""One choice per step: the state in which everything moved, or the one before.

A verdict needs the norm of what the rule would add to params, so that it is known only after the rule ran. The choice
between the two states then costs a select for each array: little where steps are long, and on other devices than a
CPU, where XLA makes a few kernels of all of them. A CPU pays for each kernel's start, and for a small model three
times as much as for the step itself (tiny MLP, Adam: 32 us without a verdict, 98 with selects, 37 with the cond below).

So small states are chosen by a `lax.cond` on a CPU. Its taken branch computes rule and application once more. XLA drops
from the first run all but what the verdict reads: the norm of the updates, which is one kernel, and the reports of
rules. That pays as long as a rule costs less than its kernels' starts. It does not for large arrays (the work is done
twice) and not for rules that multiply matrices, loop or draw random numbers: those keep the selects. Both ways give the
same bits. Under `vmap` the cond is a select by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from tsunax import _axes, guard
from tsunax.state import TrainState, assemble, split, trained_part

SMALL = 1 << 20  # bytes of trained leaves: up to there a second run of an elementwise rule costs less than the selects

_DEAR = frozenset(
    "while scan dot_general conv_general_dilated sort fft eigh svd qr cholesky lu householder_product "
    "triangular_solve reduce_precision random_bits threefry2x32 custom_call ffi_call".split()
)


def candidate(applied: Callable[[], tuple], state: TrainState) -> tuple[tuple, Callable[[], tuple] | None]:
    """What `applied()` gives, and a function that computes it once more, or None if that would not pay."""
    nbytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(trained_part(state)))
    if nbytes > SMALL or not _axes.is_tracing():
        return applied(), None
    from jax.extend.core import jaxpr_as_fun  # costs 20 ms to import

    program, shapes = jax.make_jaxpr(applied, return_shape=True)()  # traced once, for both runs
    run = lambda: jax.tree.unflatten(jax.tree.structure(shapes), jaxpr_as_fun(program)())
    return run(), None if program.effects or _is_dear(program.jaxpr) else run


def _is_dear(jaxpr: Any) -> bool:
    """Whether it does more than element by element, sums and conds."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in _DEAR:
            return True
        for value in eqn.params.values():
            for part in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(part, "jaxpr", part)
                if hasattr(inner, "eqns") and _is_dear(inner):
                    return True
    return False


def between(take, new: TrainState, old: TrainState, again: Callable[[], tuple] | None) -> TrainState:
    """`new` if `take` is true, else `old`: every leaf that moves in a step. `again` computes `new` once more."""
    kind, still = (type(new), new.plan), split(new)[1]
    moving = lambda state: split(state)[0]

    def select():
        return guard.choose(take, moving(new), moving(old))

    if again is None:
        return assemble(kind, select(), still)

    def cond():
        kept = lambda: jax.tree.map(lambda n, o: o.astype(n.dtype), moving(new), moving(old))
        return jax.lax.cond(take, lambda: moving(again()[0]), kept)

    return assemble(kind, jax.lax.platform_dependent(cpu=cond, default=select), still)


__all__ = ["between", "candidate"]
