"""One choice per step: the state in which everything moved, or the one before.

A verdict needs the norm of what the rule would add to params, so that it is known only after the
rule ran. The choice between the two states then costs a select for each array: little where steps
are long, and on other devices than a CPU, where XLA makes a few kernels of all of them. A CPU pays
for each kernel's start, and for a small model three times as much as for the step itself (tiny MLP,
Adam: 32 us without a verdict, 98 with selects, 37 with the cond below).

So states of small leaves are chosen by a `lax.cond` on a CPU. Its taken branch computes rule and
application once more. XLA drops from the first run all but what the verdict reads: the norm of the
updates, which is one kernel, and the reports of rules. That pays as long as the arithmetic of a
rule costs less than the starts of its kernels: up to 16 KiB a leaf on average, and only for rules
that work element by element. All others keep the selects: the second run of a norm, a product, a
loop or a callback costs more than it saves, and a collective must not stand behind a condition.
Under `vmap` the cond is a select by itself. Programs over a mesh, and devices inside `shard_map`
that may decide differently, keep the selects too.

Both ways compute the same. Their bits are the same if a gradient ends in a product or a sum over
rows, as that of a weight does. If it ends element by element (a penalty, scaled or tanh weights),
XLA fuses that end into the update where both are in one computation, as in a plain optax step with
selects, and rounds once less; a cond stands between them (`docs/live-rules.md`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tsunax import guard
from tsunax._core import axes
from tsunax._core.dataflow import inner
from tsunax._core.norms import is_apart
from tsunax.state import TrainState, assemble, split, trained_part

SMALL = 1 << 14  # bytes of a trained leaf, on average

_CHEAP = frozenset(
    "add sub mul div neg abs sign sqrt rsqrt cbrt square pow integer_pow exp exp2 expm1 log "
    "log1p tanh logistic erf sin cos max min clamp select_n eq ne lt le gt ge and or not xor "
    "is_finite floor ceil round rem add_any copy copy_p real imag conj complex "
    "convert_element_type bitcast_convert_type stop_gradient broadcast_in_dim reshape squeeze "
    "expand_dims transpose slice concatenate iota jit pjit closed_call custom_jvp_call "
    "custom_vjp_call cond platform_index".split()
)


def candidate(
    applied: Callable[[], tuple], state: TrainState
) -> tuple[tuple, Callable[[], tuple] | None]:
    """What `applied()` gives, and a function that computes it once more, or None if that would not
    pay.
    """
    leaves = jax.tree.leaves(trained_part(state))
    large = sum(x.size * x.dtype.itemsize for x in leaves) > SMALL * len(leaves)
    if large or state.plan.overwritten or any(map(is_apart, leaves)) or not axes.is_tracing():
        return applied(), None
    from jax.extend.core import jaxpr_as_fun  # costs 20 ms to import

    program, shapes = jax.make_jaxpr(applied, return_shape=True)()  # traced once, for both runs
    shapes, treedef = jax.tree.flatten(shapes)
    as_array = lambda x, s: (
        x if hasattr(x, "dtype") else jnp.asarray(x, s.dtype)
    )  # constants come back as numbers
    run = lambda: treedef.unflatten(map(as_array, jaxpr_as_fun(program)(), shapes))
    return run(), run if _is_cheap(getattr(program, "jaxpr", program)) else None


def _is_cheap(jaxpr: Any) -> bool:
    """Whether it works element by element."""
    if jaxpr.effects or any(eqn.primitive.name not in _CHEAP for eqn in jaxpr.eqns):
        return False
    return all(_is_cheap(part) for eqn in jaxpr.eqns for part in inner(eqn))


def between(
    take, new: TrainState, old: TrainState, again: Callable[[], tuple] | None
) -> TrainState:
    """`new` if `take` is true, else `old`: every leaf that moves in a step.

    `again` computes `new` once more.
    """
    kind, still = (type(new), new.plan), split(new)[1]
    moving = lambda state: split(state)[0]

    def select():
        return guard.choose(take, moving(new), moving(old))

    if again is None or axes.varies(take):
        return assemble(kind, select(), still)

    def cond():
        as_new = lambda n, o: o if o.dtype == n.dtype else o.astype(n.dtype)
        kept = lambda: jax.tree.map(as_new, moving(new), moving(old))
        return jax.lax.cond(take, lambda: moving(again()[0]), kept)

    return assemble(kind, jax.lax.platform_dependent(cpu=cond, default=select), still)


__all__ = ["between", "candidate"]
