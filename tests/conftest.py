"""The surroundings of every test: eight simulated CPU devices, and no silent change of rank.

The environment is set before jax is imported; the subprocesses that tests start inherit it.

`TSUNAX_TEST_PLATFORM=cuda,cpu` runs the tests on one accelerator instead, with the CPU behind it for tests that ask for
it by name. Tests that need several devices are skipped there.
"""

import atexit
import gc
import os
import shutil
import signal
import sys
import tempfile
import time
import types
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.version import Version

if "jax" in sys.modules:
    raise pytest.UsageError(
        "jax was imported before tests/conftest.py could set its environment. Find the plugin that "
        "imports it (python -X importtime -m pytest) and disable it with -p no:<plugin>."
    )

# XLA sizes its CPU thread pool by this. With fewer threads than simulated devices, a collective can
# wait for ever for a participant that never gets a thread.
os.environ["NPROC"] = "16"
_PLATFORM = os.environ.get("TSUNAX_TEST_PLATFORM")
os.environ["JAX_PLATFORMS"] = _PLATFORM or "cpu"
_COUNT = "--xla_force_host_platform_device_count"
if _PLATFORM is not None:
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # workers of pytest share the memory of the device
    os.environ["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"  # the tolerances are of float32, not of TF32
elif _COUNT not in os.environ.get("XLA_FLAGS", ""):
    # Two thirds of the time of the tests is XLA's. Before jaxlib 0.11 it takes half of that with older emitters of
    # fusions and less effort of LLVM; products and sums are contracted as ever, so bits are as hard to keep.
    # TSUNAX_TEST_COMPILER=default compiles as users' programs are compiled: .ci/run does so with a fifth of the
    # tests, .ci/weekly with all.
    flags, jaxlib = [os.environ.get("XLA_FLAGS", ""), f"{_COUNT}=8"], Version(version("jaxlib"))
    is_default = os.environ.get("TSUNAX_TEST_COMPILER") == "default"
    # libtpu has an XLA of its own, which ends the process at a flag that it does not know
    if jaxlib < Version("0.11") and not is_default and find_spec("libtpu") is None:
        flags.append("--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1")
        if jaxlib >= Version("0.8"):  # with 0.7 a batch that is gathered in the step has other contractions
            flags.append("--xla_backend_optimization_level=1")
    os.environ["XLA_FLAGS"] = " ".join(flags).strip()
# `nohup` and `&` in a script ignore signals for all that they start, and a run of `fit` keeps to that: here signals are
# as in a terminal, also for the subprocesses of tests.
for _name, _handler in (("SIGINT", signal.default_int_handler), ("SIGHUP", signal.SIG_DFL)):
    if (_number := getattr(signal, _name, None)) and signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)
# A developer's own preference must not decide where the tests run.
os.environ.pop("TSUNAX_DEVICE", None)

# Every file of a checkpoint is synced, and tests wait for that: in memory it costs nothing. The folders of tests that
# passed are removed (tmp_path_retention_policy). A container may have only 64 MB there.
if os.path.isdir("/dev/shm") and shutil.disk_usage("/dev/shm").free > 4 << 30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/dev/shm")

# Equal programs are compiled once in a session, by whichever worker is first: a folder that the workers share, and that
# goes with the process that made it. Not an environment variable of jax: the programs that tests start compile anew.
# `count_compiles` counts what jax asks the compiler for, also when the folder has the answer; a doctest there holds it.
_CACHE = "TSUNAX_TEST_COMPILED"
if _CACHE not in os.environ:
    os.environ[_CACHE] = tempfile.mkdtemp(prefix="tsunax-compiled-")
    atexit.register(shutil.rmtree, os.environ[_CACHE], ignore_errors=True)

import hypothesis
import jax
from tests.helpers import need

jax.config.update("jax_compilation_cache_dir", os.environ[_CACHE])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

collect_ignore = ["programs"]  # what tests start: without tests, and with libraries of their own

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


# `TSUNAX_TEST_PART=0/5`, `1/5`, ... leaves out all but that fifth of the tests, the same ones in every run.
_PART = "TSUNAX_TEST_PART"

# In a chain of runs with more and more libraries, a test has to pass once. This names a file, which is made if it is
# missing: a run adds the tests that pass, and leaves out the ones in it.
_PASSED = "TSUNAX_TEST_PASSED"


def pytest_runtest_logreport(report):
    is_worker = "PYTEST_XDIST_WORKER" in os.environ  # whose reports the first process sees as well
    if _PASSED in os.environ and not is_worker and report.when == "call" and report.passed:
        _passed.append(report.nodeid)


def pytest_sessionfinish():
    if _passed:
        with open(os.environ[_PASSED], "a") as file:
            file.writelines(f"{node}\n" for node in _passed)


_passed: list[str] = []


# The examples of the package's docstrings state no equivalence, and each compiles.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    for item in items:
        if isinstance(item, pytest.DoctestItem) and item.name.startswith("tsunax."):
            item.add_marker(pytest.mark.medium)
    if _PART in os.environ:
        part, parts = map(int, os.environ[_PART].split("/"))
        kept = set(items[part::parts])  # by place, so that no part of a few tests is empty
        _keep(config, items, kept.__contains__)
    if _PASSED in os.environ and Path(os.environ[_PASSED]).exists():
        already = set(Path(os.environ[_PASSED]).read_text().splitlines())
        _keep(config, items, lambda item: item.nodeid not in already)


def _keep(config, items, is_wanted):
    config.hook.pytest_deselected(items=[item for item in items if not is_wanted(item)])
    items[:] = [item for item in items if is_wanted(item)]


def pytest_runtest_setup(item):
    if item.get_closest_marker("several_devices") and jax.device_count() < 8:
        pytest.skip(f"needs eight devices, JAX has {jax.device_count()}")


# What was imported and collected stays: no collection of garbage needs to look at it again. Tracing makes objects by
# the hundred thousand, and few of them are garbage in cycles: at Python's threshold of 700, looking for them took 8 %
# of the tests' time, at this one 2 %.
def pytest_collection_finish():
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20)


# Half of the tests, in their order, for each of two workers: what a module compiles once, one worker compiles. Whoever
# has ended first takes half of what the other one has left.
@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.getvalue("dist") == "load" else None


@pytest.fixture
def clock(monkeypatch):
    """The clocks of `time` in this process stand still: `clock.now` and `time.sleep` put them forward."""
    clock = types.SimpleNamespace(now=1000.0)
    clock.sleep = lambda seconds: setattr(clock, "now", clock.now + seconds)
    for name in ("time", "monotonic", "perf_counter"):
        monkeypatch.setattr(time, name, lambda: clock.now)
    monkeypatch.setattr(time, "sleep", clock.sleep)
    return clock


@pytest.fixture
def notebook(monkeypatch):
    """This process looks like the kernel of a notebook."""
    shell = types.SimpleNamespace(kernel="ipykernel")
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))


@pytest.fixture
def at_sync(monkeypatch):
    """A disk that does something else: `at_sync(f)` calls `f(path)` before a file of arrays is synced."""
    fsync = os.fsync

    def replace(f):
        def before_sync(fd):
            path = Path(os.readlink(f"/proc/self/fd/{fd}"))
            if ".safetensors" in path.name:
                f(path)
            fsync(fd)

        monkeypatch.setattr(os, "fsync", before_sync)

    return replace


@pytest.fixture
def start_processes(tmp_path):
    """`processes.start` in folders of their own; whatever it started is ended afterwards."""
    from tests import processes

    started = []

    def start(*what, **given):
        folder = tmp_path / f"out {len(started)}"
        folder.mkdir()
        new = processes.start(folder, *what, **given)
        started.extend(new)
        return new

    yield start
    for one in started:
        one.process.kill()
        one.process.wait()


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
