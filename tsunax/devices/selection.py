"""Which devices there are, facts about them, and which kind is preferred.

The words for devices are in `_core/device_kinds.py`, because everything takes them.
"""

import contextlib
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax._src import xla_bridge

from tsunax._core import Device, device_kinds
from tsunax._core.libraries import library
from tsunax.devices.gpu_topologies import CARDS, gpu_topology
from tsunax.errors import DeviceError, told, warn

# JAX has no public function for this that does not start the backend.
_started = xla_bridge.backends_are_initialized


def supported_devices() -> tuple[str, ...]:
    """The kinds of devices that have a name here, available or not, as a tuple of strings.

    >>> supported_devices()
    ('tpu', 'gpu', 'cpu', 'cuda', 'rocm', 'metal')
    """
    return tuple(device_kinds.PLATFORMS)


def is_available(kind: str | tuple[str, int]) -> bool:
    """Whether this process has a device of a kind, or number 1 of it: "gpu:1", ("gpu", 1).

    Starts JAX's backend. Raises DeviceError for an unknown kind.

    >>> is_available("cpu"), is_available("cpu:1000")
    (True, False)
    """
    name, index = device_kinds.kind_and_index(kind)
    device_kinds.check_kind(name, "is_available()", device_kinds.PLATFORMS)
    return index in range(len(device_kinds.devices_of_kind(name)[0]))


def devices(kind: str | Sequence[int | Device] = "auto") -> list[Device]:
    """The devices of a kind, or of a list of devices or of indices into `devices()`.

        devices("gpu") == jax.local_devices(backend="gpu")
        devices([0, 2]) == [devices()[0], devices()[2]]
        devices("gpu:1") == devices(("gpu", 1)) == devices(["gpu:1"]) == [devices("gpu")[1]]

    Raises DeviceError for a kind that is not here, an index out of range, and a list that is empty
    or has a device twice. A number is no list: `[2]` is device 2, `devices()[:2]` two devices.

    >>> devices([0]) == devices()[:1]
    True
    """
    where = f"devices({kind!r})"
    is_device = device_kinds.is_one_device
    if is_device(kind):
        return [device_kinds.as_device(kind, "devices()")]
    if isinstance(kind, str):
        return device_kinds.devices_named(kind, where)[0]
    listed = [] if all(map(is_device, kind)) else device_kinds.devices_named("auto", where)[0]
    numbered = lambda index: device_kinds.device_number(listed, index, where)
    named = lambda device: device_kinds.as_device(device, "devices()")
    chosen = [named(item) if is_device(item) else numbered(item) for item in kind]
    if not chosen or len(set(chosen)) < len(chosen):
        raise DeviceError("devices", where, f"{len(chosen)} devices", "at least one, each once")
    return chosen


def device(kind: str | Device = "auto", index: int = 0, *, verbose: bool = False) -> Device:
    """One device: number `index`, from 0, of a kind; "gpu:1" and ("gpu", 1) are number 1.

    "auto" is the first available kind: the preferred one (see `prefer`), TPU, GPU, CPU. `verbose`
    prints why it was chosen. Raises DeviceError for an unknown or absent kind, and an index out of
    range.

    >>> device("cpu", 0, verbose=True).id
    device cpu:0 (cpu): cpu was asked for
    0
    """
    where = f"device({kind!r}, {index!r})"
    if index == 0 and device_kinds.is_one_device(kind):
        chosen, reason = device_kinds.as_device(kind, "device()"), "it was asked for"
        index = chosen.id
    else:
        devices, reason = device_kinds.devices_named(kind, where)
        chosen = device_kinds.device_number(devices, index, where)
    if verbose:
        print(f"device {chosen.platform}:{index} ({chosen.device_kind}): {reason}")
    return chosen


@dataclasses.dataclass(frozen=True)
class DeviceInfo:
    """Facts about a device, as `device_info("gpu")` returns them.

    `platform`, `kind` (of hardware) and `version` (of the platform) are strings. `memory_total` are
    the bytes that this process may have, by default three quarters of a GPU's, `memory_in_use` the
    bytes that it has; both are None on a CPU.
    """

    platform: str
    kind: str
    memory_total: int | None
    memory_in_use: int | None
    version: str


def device_info(device: str | Device = "auto") -> DeviceInfo:
    """Platform, kind of hardware, memory in bytes, and version of the platform, of `device`.

    It is a kind or a `jax.Device`. Raises DeviceError for a kind that is unknown or not here.

    >>> device_info("cpu")
    DeviceInfo(platform='cpu', kind='cpu', memory_total=None, memory_in_use=None, version='cpu')
    """
    chosen = device_kinds.as_device(device, "device_info()")
    stats: Any = None
    with contextlib.suppress(RuntimeError):  # some backends have no such facts
        stats = chosen.memory_stats()
    total, used = ((stats or {}).get(name) for name in ("bytes_limit", "bytes_in_use"))
    version = chosen.client.platform_version
    return DeviceInfo(chosen.platform, chosen.device_kind, total, used, version)


def simulate(n: int) -> None:
    """Make this process see `n` CPU devices only. Call it before anything else.

    Simulated devices share one pool of threads. In a pool of `n` threads a collective can wait for
    a participant that never runs, and XLA ends the process after 40 s: this sets NPROC for a larger
    pool. Raises DeviceError if the backend has started.

    >>> x = jax.numpy.ones(2)
    >>> simulate(8)
    Traceback (most recent call last):
    tsunax.errors.DeviceError: simulate: got a backend that has started, expected to be called ...
    """
    if n < 1:
        raise DeviceError("n", "simulate()", n, "1 or more")
    if _started():
        raise DeviceError(
            "simulate",
            "",
            got="a backend that has started",
            expected="to be called before that",
            fix="Call it first; in a notebook restart the kernel.",
        )
    requested = os.environ.get("NPROC", "")
    threads = max(16, 2 * n, os.cpu_count() or 1, int(requested) if requested.isdigit() else 0)
    os.environ["NPROC"] = str(threads)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", int(n))


# libtpu looks for the host's metadata server for minutes, and warns if it finds no TPU. The name of
# the accelerator decides nothing here. A TPU belongs to one process, so libtpu refuses a second
# process; processes that only compile may run side by side.
_COMPILER_ENVIRONMENT = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8", "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_MIN_LOG_LEVEL": "3", "TPU_STDERR_LOG_LEVEL": "3",
}  # fmt: skip


def topology(name: str) -> list[Device]:
    """The devices of a machine that is not here: TPUs ("v5e:2x4", "v5p:2x2x1") or GPUs ("h100:8").

        make = lambda: ts.setup(rule, init(jax.random.key(0)), key=0)
        state = ts.shard(make, ts.mesh(data=1, fsdp=-1, devices=ts.devices.topology("v5e:8x8")))
        print(ts.describe(step, state, batch))

    Give them to `mesh`. A state on that mesh consists of shapes (`jax.ShapeDtypeStruct`), and
    `describe`, `find_batch_size` and `step.lower` compile for it: they report memory, donation and
    collectives as the compiler plans them for the real machine.

    GPUs are "h100", "h200", "a100" (of 80 GB, SXM) and "l4": "h100" is one, "h100:8" eight of one
    host, "h100:2x8" eight of each of two. Their programs are not tuned, because that needs the
    card: products are Triton kernels even if cuBLAS is faster, cuDNN's attention does not compile,
    and `shard(host=)` leaves everything on the devices.

    This takes seconds and needs the compiler in the version of this jax: the extra `tpu` (libtpu)
    or `gpu-compile` (the CUDA plugin). Set JAX_PLATFORMS=cpu on a machine without the device, or
    JAX looks for one. Raises MissingLibraryError without the compiler, DeviceError for a name that
    the compiler does not have.
    """
    if devices := gpu_topology(name):
        return devices
    library("libtpu", "topology()", extra="tpu")
    from unittest import mock

    from jax.experimental import topologies

    try:
        with mock.patch.dict(os.environ, {**_COMPILER_ENVIRONMENT, **os.environ}):
            return list(topologies.get_topology_desc(platform="tpu", topology_name=name).devices)
    except Exception as error:  # libtpu may raise any class
        raise DeviceError(
            "topology",
            repr(name),
            got=told(error),
            expected=f'one of libtpu, such as "v5e:2x4", or of {", ".join(CARDS)}',
        ) from error


def preferred() -> str | None:
    """The kind that "auto" tries first: TSUNAX_DEVICE, then the nearest file `.tsunax-device`.

    None if neither names one. Raises ConfigError for an unknown kind.

    >>> preferred() in (None, *supported_devices())
    True
    """
    kind = device_kinds.preference()[0]
    return None if kind == "auto" else kind


def prefer(kind: str | None) -> None:
    """Write the kind that "auto" tries first into `.tsunax-device`; None deletes the file.

    The file counts in its directory and all directories below. The nearest file is written; without
    any, a new file in the current directory. Warns if the backend has started. Raises DeviceError
    for an unknown kind.
    """
    if kind is not None:
        device_kinds.check_kind(kind, "prefer()", device_kinds.KINDS)
    path = device_kinds.nearest_file() or Path.cwd() / device_kinds.PREFERENCE_FILE
    if kind is None:
        path.unlink(missing_ok=True)
    else:
        path.write_text(f"{kind}\n", encoding="utf-8")
    if variable := os.environ.get("TSUNAX_DEVICE", "").strip():
        warn(f"TSUNAX_DEVICE={variable} goes before {path}.")
    if _started():
        warn(f"{path} was changed. It takes effect in new processes: this backend has started.")
