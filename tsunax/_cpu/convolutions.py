"""Convolutions that run inside a compiled loop on CPU as fast as outside of it.

XLA's fast CPU kernel takes one layout, batch x spatial x features. XLA brings a convolution into it
in the entry computation of a program, but not in the body of a `scan`, `while_loop` or `fori_loop`
(jax#12868). There another layout, such as every gradient has, runs in scalar loops, up to 50 times
slower. `fast` writes the transposes that XLA leaves out. It replaces equations of the jaxpr by
equations of the same type, so that it reaches the convolutions of the gradient in any model.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from tsunax._cpu.rewriting import Equation, Jaxpr, rewritten

# The name of the inner functions that replace a convolution: they are not rewritten again.
NAME = "convolution_in_loop"
# Other dtypes have no fast kernel.
_DTYPES = frozenset(map(jnp.dtype, (jnp.float32, jnp.float16, jnp.bfloat16)))
_PARAMETERS = frozenset(
    "batch_group_count dimension_numbers feature_group_count lhs_dilation out_sharding padding "
    "precision preferred_element_type rhs_dilation window_strides".split()
)
# Groups that read so few features are up to 15 times faster in scalar loops than in the kernel
_NARROW = 4


def fast(fn: Callable) -> Callable:
    """`fn` with convolutions that stay fast inside a compiled loop on CPU.

    Wrap the differentiated function, `fast(jax.value_and_grad(loss_fn))`: the gradient's
    convolutions are the slow ones. Arguments are trees of arrays, static ones are closed over.

    Bits are as of the same convolution outside of a loop, with two exceptions, within 1e-6 of
    the largest value. Grouped convolutions that read 4 features or fewer per group stay as they
    are, which is faster. The gradient of a grouped kernel is computed as a convolution of feature
    groups: XLA's own form of it, also outside of loops, costs up to 200 times as much. Left alone
    are float64, complex and integer convolutions, any with more than three spatial axes or with an
    explicit sharding, and what is inside `shard_map` or Pallas.

    >>> f = fast(jax.grad(lambda w, x: jnp.sum(jax.lax.conv(x, w, (1,), "SAME") ** 2)))
    >>> f(jnp.ones((1, 1, 3)), jnp.arange(4.0).reshape(1, 1, 4))
    Array([[[32., 60., 50.]]], dtype=float32)
    """
    return rewritten(fn, equations, closed=NAME)


def equations(jaxpr: Jaxpr) -> list[Equation]:
    """The equations of a program, with a call of a fast convolution for each slow one."""
    is_convolution = lambda eqn: eqn.primitive.name == "conv_general_dilated"
    return [_convolution(eqn) if is_convolution(eqn) else eqn for eqn in jaxpr.eqns]


def _convolution(eqn: Equation) -> Equation:
    """One equation that calls the fast form on CPU and the old one elsewhere."""
    x, w, out = (v.aval for v in (*eqn.invars, *eqn.outvars))
    if eqn.params.keys() != _PARAMETERS:
        return eqn
    if any(map(_is_cut, (x.sharding, w.sharding, out.sharding, eqn.params["out_sharding"]))):
        return eqn
    has_kernel = x.dtype == w.dtype and {x.dtype, out.dtype} <= _DTYPES and 3 <= x.ndim <= 5
    params = {name: value for name, value in eqn.params.items() if name != "out_sharding"}
    if not has_kernel or 0 in x.shape + w.shape or not _is_slow(x.shape, w.shape, params):
        return eqn
    call = _convolution_call(x, w, tuple(params.items()))
    if call is None or call.outvars[0].aval != out:
        return eqn
    return call.replace(invars=eqn.invars, outvars=eqn.outvars, source_info=eqn.source_info)


def _is_cut(sharding) -> bool:
    """Whether the type says that an axis is spread over a mesh (XLA may spread other axes)."""
    return sharding is not None and any(axis is not None for axis in sharding.spec)


@functools.lru_cache(maxsize=1024)
def _convolution_call(x, w, params: tuple) -> Equation | None:
    """The equation for these types, traced once: equal layers of a model share it."""
    options = dict(params)

    fast = functools.partial(_in_kernel_layout, **options)
    plain = functools.partial(jax.lax.conv_general_dilated, **options)

    def convolution_in_loop(x, w):
        return jax.lax.platform_dependent(x, w, cpu=fast, default=plain)

    program = jax.make_jaxpr(jax.jit(convolution_in_loop))(x, w)
    return program.eqns[0] if len(program.eqns) == 1 and not program.consts else None


# One convolution


def _kernel_layout(ndim: int) -> jax.lax.ConvDimensionNumbers:
    """NHWC x HWIO -> NHWC, for any number of spatial axes."""
    x = (0, ndim - 1, *range(1, ndim - 1))
    return jax.lax.ConvDimensionNumbers(x, (ndim - 1, ndim - 2, *range(ndim - 2)), x)


def _is_slow(x_shape, w_shape, params) -> bool:
    """Whether XLA would run it in scalar loops, and the kernel is faster."""
    dims = params["dimension_numbers"]
    if params["feature_group_count"] > 1 and w_shape[dims.rhs_spec[1]] <= _NARROW:
        return False
    return dims != _kernel_layout(len(x_shape))


def _in_kernel_layout(x, w, *, dimension_numbers, feature_group_count, batch_group_count, **params):
    (n, c, *x_space), (o, i, *w_space), (out_n, out_c, *out_space) = dimension_numbers
    x = jnp.transpose(x, (n, *x_space, c))
    w = jnp.transpose(w, (*w_space, i, o))
    # XLA computes a convolution of feature groups so: one kernel per group, the same additions
    if batch_group_count not in (1, w.shape[-1]):
        x = _as_features(x, batch_group_count)
        feature_group_count, batch_group_count = batch_group_count, 1
    out = jax.lax.conv_general_dilated(
        x,
        w,
        dimension_numbers=_kernel_layout(x.ndim),
        feature_group_count=feature_group_count,
        batch_group_count=batch_group_count,
        **params,
    )
    where = (out_n, *out_space, out_c)
    return jnp.transpose(out, [where.index(axis) for axis in range(x.ndim)])


def _as_features(x, groups: int):
    """Move groups of the batch of an NHWC array into its features, in the order of the kernels."""
    n, *space, c = x.shape
    x = jnp.moveaxis(x.reshape(groups, n // groups, *space, c), 0, -2)
    return x.reshape(n // groups, *space, groups * c)
