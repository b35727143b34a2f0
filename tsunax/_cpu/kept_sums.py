"""Sums of cotangents that stay in memory on CPU: residual networks train in two thirds of the time.

A value with two readers has a sum of two cotangents. Along a residual stream, the gradient of the
next norm and the next sum read each such sum. XLA:CPU computes the whole chain of sums again in
each reader: work and compile time grow with the square of the depth. `keep_sums` passes each sum
through a conditional that always takes the same branch: XLA fuses nothing through it. It rewrites
the jaxpr, so that it works for any model.

CPU seconds of a step over those without it (`python -m benchmarks kept_sums`): transformers of 2 to
12 blocks 0.66 to 0.89; MLP, LSTM, ResNet 0.98 to 1.02.
`optimization_barrier` does nothing for it: XLA:CPU drops it before it fuses.

Bits: XLA may multiply and add in one instruction, and other kernels choose other products for it.
Of eleven models nine had the same bits as before, two ViT differed by 1e-7.
"""

import collections
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tsunax._cpu.rewriting import Equation, Jaxpr, rewritten

# Bytes of a sum: smaller sums are computed again faster than they are kept.
MIN_BYTES = 1 << 16
# For each dtype the bits of a NaN that arithmetic never makes: no sum has them
_NEVER = {"float32": (jnp.uint32, 0x7FE12345), "bfloat16": (jnp.uint16, 0x7FE1),
          "float16": (jnp.uint16, 0x7FE1)}  # fmt: skip


def keep_sums(fn: Callable) -> Callable:
    """`fn`, which takes a gradient, with large sums of cotangents kept in memory on CPU.

    >>> f = keep_sums(jax.grad(lambda x: jnp.sum(x * x)))
    >>> f(jnp.arange(3.0)).tolist()
    [0.0, 2.0, 4.0]
    """
    return rewritten(fn, _equations)


def _equations(jaxpr: Jaxpr) -> list[Equation]:
    if not any(map(_is_large_sum, jaxpr.eqns)):
        return jaxpr.eqns
    readers = collections.Counter(map(id, jaxpr.outvars))
    for eqn in jaxpr.eqns:
        readers.update({id(x) for x in eqn.invars})
    equations = []
    for eqn in jaxpr.eqns:
        if not _is_large_sum(eqn) or readers[id(eqn.outvars[0])] < 2:
            equations.append(eqn)
            continue
        (out,) = eqn.outvars
        fused = type(out)(out.aval)
        call = _sum_call(out.aval).replace(
            invars=[fused], outvars=[out], source_info=eqn.source_info
        )
        equations += [eqn.replace(outvars=[fused]), call]
    return equations


def _is_large_sum(eqn: Equation) -> bool:
    if eqn.primitive.name != "add_any":
        return False
    aval = eqn.outvars[0].aval
    has_bytes = aval.dtype.name in _NEVER and isinstance(aval.size, int)  # no symbolic shape
    return has_bytes and aval.size * aval.dtype.itemsize >= MIN_BYTES


@functools.lru_cache(maxsize=1024)
def _sum_call(aval: Any) -> Equation:
    """The equation for sums of this type, traced once."""

    def kept_sum(x):
        return jax.lax.platform_dependent(x, cpu=_through_cond, default=lambda x: x)

    return jax.make_jaxpr(jax.jit(kept_sum))(aval).eqns[0]


def _through_cond(x):
    bits, never = _NEVER[x.dtype.name]
    first = jax.lax.bitcast_convert_type(jax.lax.slice_in_dim(x.reshape(-1), 0, 1)[0], bits)
    return jax.lax.cond(first != never, lambda x: x, lambda x: jnp.full_like(x, jnp.nan), x)
