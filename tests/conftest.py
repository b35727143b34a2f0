"""The surroundings of every test: eight simulated CPU devices, and no silent change of rank.

The environment is set before jax is imported; the subprocesses that tests start inherit it.
"""

import os
import sys
from pathlib import Path

import pytest

if "jax" in sys.modules:
    raise pytest.UsageError(
        "jax was imported before tests/conftest.py could set its environment. Find the plugin that "
        "imports it (python -X importtime -m pytest) and disable it with -p no:<plugin>."
    )

# XLA sizes its CPU thread pool by this. With fewer threads than simulated devices, a collective can
# wait for ever for a participant that never gets a thread.
os.environ["NPROC"] = "16"
os.environ["JAX_PLATFORMS"] = "cpu"
_COUNT = "--xla_force_host_platform_device_count"
if _COUNT not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_COUNT}=8".strip()
# A developer's own preference must not decide where the tests run.
os.environ.pop("TSUNAX_DEVICE", None)

import hypothesis
import jax
from tests.helpers import need

# The first example of a property compiles, the others do not: time per example says nothing.
hypothesis.settings.register_profile("tsunax", deadline=None)
hypothesis.settings.load_profile("tsunax")


# Strict dtype promotion cannot be had: under it optax's own adam fails (float ** int32 in its bias
# correction), and so do nine more of its optimizers.
#
# A fixture and not a global setting: it then covers the tests, but not the docstring examples of
# tsunax/, which may write `x @ w + b` as a user would. Per module, so that it is there before any
# module-scoped fixture traces something: a function traced outside is traced again inside.
@pytest.fixture(scope="module", autouse=True)
def _strict_ranks():
    with jax.numpy_rank_promotion("raise"):
        yield


# The tests that take longest, by name: of --durations=0 those from 0.7 s on two cores, but of every test function that
# has one below 2 s the shortest stays. Without them the suite is the fast one; .ci/run has a step for them.
_LONG = frozenset(Path(__file__).with_name("long.txt").read_text(encoding="utf-8").splitlines())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if item.nodeid in _LONG:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def ray():
    """A local Ray, one for the process: a second `ray.init` ends it."""
    ray = need("ray")
    os.environ["RAY_TRAIN_V2_ENABLED"] = "1"
    root = str(Path(__file__).resolve().parents[1])
    env = {"PYTHONPATH": root, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "JAX_NUM_CPU_DEVICES": "1"}
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": env})
    yield ray
    ray.shutdown()
