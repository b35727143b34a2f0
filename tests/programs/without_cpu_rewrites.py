"""A plugin of pytest: tsunax without what it does for XLA's CPU compiler, `-p tests.programs.without_cpu_rewrites`.

The two calls of `tsunax/_cpu` return the functions that they get, and `jax.lax.platform_dependent` takes the branch of
all other devices, so that steps choose and freeze as they do on a GPU.
"""

import pytest


def pytest_sessionstart():  # after tests/conftest.py, which sets the environment of JAX
    import jax
    from tsunax._cpu import convolutions, kept_sums

    def branch_of_other_devices(*operands, default, **branches):
        return default(*operands)

    patch = pytest.MonkeyPatch()
    patch.setattr(convolutions, "fast", lambda fn: fn)
    patch.setattr(kept_sums, "keep_sums", lambda fn: fn)
    patch.setattr(jax.lax, "platform_dependent", branch_of_other_devices)
