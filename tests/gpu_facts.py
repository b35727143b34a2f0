"""What a GPU computes otherwise than a CPU, for the tests that see it. On a CPU nothing of this applies.

Three mechanisms of XLA stand behind it. Within a kernel, a product and the sum after it are one instruction, which
rounds once: two programs whose operations are divided into kernels in another way differ in the last bit. A rounding
to 16 bits between two operations of a program may be left out (`xla_allow_excess_precision`). And the kernels of
products are picked by timing, for each program anew. `docs/gpu.md` tells users about them.
"""

import os

import jax.numpy as jnp
import numpy as np
import pytest
from tests import helpers

IS_GPU = any(name in os.environ.get("TSUNAX_TEST_PLATFORM", "") for name in ("cuda", "rocm", "gpu"))

# (relative, absolute) differences of two programs with the same formula
TOLERANCES = {
    # The step by hand applies the updates in the kernel that computes them, ours beside their norm.
    "step by hand": (1e-5, 1e-6),
    # The average is evaluated as it is, and rounded to bfloat16, only if it comes from host memory. And where
    # params are rounded, one bit of a master copy may become 1 / 256.
    "bfloat16 in host memory": (1e-2, 1e-4),
}

# A product of float16 is added up in float32 and not rounded before it is unscaled: it overflows one halving later.
OVERFLOWS_LATER = int(IS_GPU)

moments_come_at_once = pytest.mark.skipif(
    IS_GPU, reason="XLA moves all moments to a GPU at once, so that less memory is not enough for a step"
)


def assert_equal_bits(a, b, on_gpu: str) -> None:
    """`helpers.assert_trees_equal`; on a GPU within the tolerance of this name, where NaN is close to NaN."""
    if not IS_GPU:
        return helpers.assert_trees_equal(a, b)
    rtol, atol = TOLERANCES[on_gpu]

    def close(path, x, y):
        if not all(jnp.issubdtype(z.dtype, jnp.inexact) for z in (x, y)):
            return x == y
        return np.isclose(x.astype(np.float64), y.astype(np.float64), rtol=rtol, atol=atol, equal_nan=True)

    helpers._compare(a, b, close)
