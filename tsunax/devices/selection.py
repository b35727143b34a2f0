"""Which devices there are, which one is meant, and which kind is preferred.

A device is JAX's own `jax.Device`, counted from 0 among those of this process. The variable
TSUNAX_DEVICE or the nearest file `.tsunax-device`, in the current directory or above it, may name
the kind that `"auto"` tries first. Only `_find`, `_started` and `topology` ask JAX.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax._src import xla_bridge
from jax.sharding import Mesh

from tsunax._core import Device, trees
from tsunax._core.libraries import library
from tsunax.devices.gpu_topologies import CARDS, gpu_topology
from tsunax.errors import ConfigError, DeviceError, WrongTypeError, told, unknown, warn

__all__ = [
    "DeviceInfo", "device", "device_info", "devices", "is_available", "prefer", "preferred",
    "simulate", "supported_devices", "topology",
]  # fmt: skip

_PLATFORMS = {  # JAX's names; mps is Apple's
    "tpu": ("tpu",), "gpu": ("cuda", "rocm", "oneapi", "mps"), "cpu": ("cpu",),
    "cuda": ("cuda",), "rocm": ("rocm",), "metal": ("mps",),
}  # fmt: skip
_KINDS = ("auto", *_PLATFORMS)
_FILE = ".tsunax-device"
# JAX's exceptions for no device; the latter if JAX_PLATFORMS names no available platform
_NONE = (RuntimeError, AssertionError)
_ORDER = ("tpu", "gpu", "cpu")


def _find(platform: str | None) -> list[Device]:
    """This process's devices of a platform, or of JAX's default one; raises one of `_NONE`."""
    return jax.local_devices(backend=platform)


# JAX has no public way to ask without starting it
_started = xla_bridge.backends_are_initialized


def devices_of_kind(kind: str) -> tuple[list[Device], str]:
    """The devices of a kind, or why there are none."""
    for platform in _PLATFORMS[kind]:
        try:
            if found := _find(platform):
                return found, ""
        except _NONE as error:
            if "nitialize" in str(error):
                return [], told(error)
    listed = jax.config.jax_platforms  # type: ignore[attr-defined]
    if listed and not {kind, *_PLATFORMS[kind]} & set(listed.split(",")):
        return [], f"JAX_PLATFORMS={listed} leaves it out"
    return [], "JAX finds none; its plugin may not be installed"


def _nearest_file() -> Path | None:
    here = Path.cwd()
    paths = (folder / _FILE for folder in (here, *here.parents))
    return next((path for path in paths if path.is_file()), None)


def _preference() -> tuple[str | None, str]:
    """The preferred kind and its source. Raises ConfigError for an unknown kind."""
    kind, source = os.environ.get("TSUNAX_DEVICE", "").strip(), "TSUNAX_DEVICE"
    if not kind:
        if (path := _nearest_file()) is None:
            return None, ""
        kind, source = path.read_text("utf-8", "replace").strip(), str(path)
    if kind not in _KINDS:
        raise ConfigError(unknown("device", source, kind, _KINDS))
    return kind, source


def _automatic() -> tuple[list[Device], str]:
    """The devices of the preferred kind, or else of the first available one; and why."""
    wanted, source = _preference()
    if wanted and wanted != "auto":
        found, why = devices_of_kind(wanted)
        if found:
            return found, f"{wanted} is preferred by {source}"
        warn(f"{wanted}, preferred by {source}, is not here: {why}. Another device is used.")
    for kind in _ORDER:
        if found := devices_of_kind(kind)[0]:
            return found, f"{kind} is the first of {', '.join(_ORDER)} that is here"
    try:
        return _find(None), "what JAX takes by default"
    except _NONE as error:
        raise DeviceError("devices", "", told(error), "a backend that starts") from error


def _check_kind(kind: Any, where: str, known: Iterable[str]) -> None:
    if not isinstance(kind, str):
        raise WrongTypeError("kind", where, trees.describe(kind), f"one of {', '.join(known)}")
    if kind not in known:
        raise DeviceError(unknown("kind", where, kind, known))


def _resolve(kind: Any, where: str) -> tuple[list[Device], str]:
    _check_kind(kind, where, _KINDS)
    if kind == "auto":
        return _automatic()
    found, why = devices_of_kind(kind)
    if not found:
        there = [f"{other} ({n})" for other in _ORDER if (n := len(devices_of_kind(other)[0]))]
        expected = f"one that is here: {', '.join(there) or 'none is'}"
        raise DeviceError("device", where, f"no {kind}", expected, f"{why}.")
    return found, f"{kind} was asked for"


def _number_in(found: Sequence[Device], index: Any, where: str) -> Device:
    if not isinstance(index, (int, np.integer)) or isinstance(index, bool):
        raise WrongTypeError("index", where, trees.describe(index), "an int")
    if not 0 <= index < len(found):
        fix = f"There are {len(found)}, {found[0].platform}, counted from 0."
        raise DeviceError("index", where, index, f"0 to {len(found) - 1}", fix)
    return found[int(index)]


def device_given(where: str | Device, call: str) -> Device:
    if isinstance(where, str):
        return _resolve(where, f"{call[:-1]}{where!r})")[0][0]
    if not isinstance(where, jax.Device):
        fix = "prefetch(data, mesh) spreads batches over a mesh." if isinstance(where, Mesh) else ""
        raise WrongTypeError("device", call, trees.describe(where), "a kind or a jax.Device", fix)
    return where


def supported_devices() -> tuple[str, ...]:
    """The kinds of devices that have a name here, available or not, as a tuple of strings.

    >>> supported_devices()
    ('tpu', 'gpu', 'cpu', 'cuda', 'rocm', 'metal')
    """
    return tuple(_PLATFORMS)


def is_available(kind: str) -> bool:
    """Whether this process has a device of a kind. Starts JAX's backend.

    Raises DeviceError for an unknown kind.

    >>> is_available("cpu")
    True
    """
    _check_kind(kind, "is_available()", _PLATFORMS)
    return bool(devices_of_kind(kind)[0])


def devices(kind: str | Sequence[int | Device] = "auto") -> list[Device]:
    """The devices of a kind, or those of a list of devices or of indices into `devices()`.

        devices("gpu") == jax.local_devices(backend="gpu")
        devices([0, 2]) == [devices()[0], devices()[2]]

    Raises DeviceError for a kind that is not here, an index out of range, and a list that is empty
    or has a device twice. A number is no list: `[2]` is device 2, `devices()[:2]` two devices.

    >>> devices([0]) == devices()[:1]
    True
    """
    where = f"devices({kind!r})"
    if isinstance(kind, str):
        return _resolve(kind, where)[0]
    if not isinstance(kind, Sequence):
        fix = "[2] is device number 2, devices()[:2] are two of them."
        raise WrongTypeError("devices", where, trees.describe(kind), "a kind or a list", fix)
    is_device = lambda item: isinstance(item, jax.Device)
    here = [] if all(map(is_device, kind)) else _resolve("auto", where)[0]
    chosen = [item if is_device(item) else _number_in(here, item, where) for item in kind]
    if not chosen or len(set(chosen)) < len(chosen):
        raise DeviceError("devices", where, f"{len(chosen)} devices", "at least one, each once")
    return chosen


def device(kind: str = "auto", index: int = 0, *, verbose: bool = False) -> Device:
    """One device: number `index`, from 0, of a kind.

    "auto" is the first available kind: the preferred one (see `prefer`), TPU, GPU, CPU. `verbose`
    prints why it was chosen. Raises DeviceError for an unknown or absent kind, and an index out of
    range.

    >>> device("cpu", 0, verbose=True).id
    device cpu:0 (cpu): cpu was asked for
    0
    """
    where = f"device({kind!r}, {index!r})"
    found, reason = _resolve(kind, where)
    chosen = _number_in(found, index, where)
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
    one = device_given(device, "device_info()")
    stats: Any = None
    with contextlib.suppress(RuntimeError):  # of a backend that cannot say
        stats = one.memory_stats()
    total, used = ((stats or {}).get(name) for name in ("bytes_limit", "bytes_in_use"))
    return DeviceInfo(one.platform, one.device_kind, total, used, one.client.platform_version)


def simulate(n: int) -> None:
    """Make this process see `n` CPU devices, and no others. Call it before anything else.

    Simulated devices share one pool of threads. In a pool of `n` threads a collective can wait for
    a participant that never runs, and XLA ends the process after 40 s: this sets NPROC for a larger
    pool. Raises DeviceError if the backend has started.

    >>> x = jax.numpy.ones(2)
    >>> simulate(8)
    Traceback (most recent call last):
    tsunax.errors.DeviceError: simulate: got a backend that has started, expected to be called ...
    """
    if not isinstance(n, (int, np.integer)) or isinstance(n, bool) or n < 1:
        raise DeviceError("n", "simulate()", repr(n), "an int of 1 or more")
    if _started():
        fix = "Call it before anything makes an array; in a notebook restart the kernel first."
        got = "a backend that has started"
        raise DeviceError("simulate", "", got, "to be called before that", fix)
    given = os.environ.get("NPROC", "")
    most = max(16, 2 * n, os.cpu_count() or 1, int(given) if given.isdigit() else 0)
    os.environ["NPROC"] = str(most)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", int(n))


# libtpu looks for the host's metadata server for minutes, and warns if it finds no TPU. The name of
# the accelerator decides nothing here.
_QUIET = {
    "TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost", "TPU_MIN_LOG_LEVEL": "3", "TPU_STDERR_LOG_LEVEL": "3",
}  # fmt: skip


def topology(name: str) -> list[Device]:
    """The devices of a machine that is not here: TPUs ("v5e:2x4", "v5p:2x2x1") or GPUs ("h100:8").

        make = lambda: ts.setup(rule, init(jax.random.key(0)), key=0)
        state = ts.shard(make, ts.mesh(data=1, fsdp=-1, devices=ts.devices.topology("v5e:8x8")))
        print(ts.describe(step, state, batch))

    Give them to `mesh`. A state on that mesh consists of shapes (`jax.ShapeDtypeStruct`), and
    `describe`, `find_batch_size` and `step.lower` compile for it: memory, donation and collectives
    are what the compiler plans for the real machine.

    GPUs are "h100", "h200", "a100" (of 80 GB, SXM) and "l4": "h100" is one, "h100:8" eight of one
    host, "h100:2x8" those of two hosts. Their programs are not tuned, as that takes the card:
    products are Triton kernels where cuBLAS might be faster, cuDNN's attention does not compile,
    and `shard(host=)` leaves everything on the devices.

    This takes seconds and needs the compiler in the version of this jax: the extra `tpu` (libtpu)
    or `gpu-compile` (the CUDA plugin). Set JAX_PLATFORMS=cpu on a machine without the device, or
    JAX looks for one. Raises MissingLibraryError without the compiler, DeviceError for a name that
    it does not have.
    """
    if not isinstance(name, str):
        raise WrongTypeError("name", "topology()", trees.describe(name), 'a str such as "v5e:2x4"')
    if devices := gpu_topology(name):
        return devices
    library("libtpu", "topology()", extra="tpu")
    from unittest import mock

    from jax.experimental import topologies

    try:
        with mock.patch.dict(os.environ, {**_QUIET, **os.environ}):
            return list(topologies.get_topology_desc(platform="tpu", topology_name=name).devices)
    except Exception as error:  # of libtpu, whatever it is
        expected = f'one of libtpu, such as "v5e:2x4", or of {", ".join(CARDS)}'
        raise DeviceError("topology", repr(name), told(error), expected) from error


def preferred() -> str | None:
    """The kind that "auto" tries first: TSUNAX_DEVICE, then the nearest file `.tsunax-device`.

    None if neither names one. Raises ConfigError for an unknown kind.

    >>> preferred() in (None, *supported_devices())
    True
    """
    kind = _preference()[0]
    return None if kind == "auto" else kind


def prefer(kind: str | None) -> None:
    """Write the kind that "auto" tries first into `.tsunax-device`; None deletes the file.

    The file counts in its directory and all below it. The nearest one is written, else a new one in
    the current directory. Warns if the backend has started. DeviceError for an unknown kind.
    """
    if kind is not None:
        _check_kind(kind, "prefer()", _KINDS)
    path = _nearest_file() or Path.cwd() / _FILE
    if kind is None:
        path.unlink(missing_ok=True)
    else:
        path.write_text(f"{kind}\n", encoding="utf-8")
    if said := os.environ.get("TSUNAX_DEVICE", "").strip():
        warn(f"TSUNAX_DEVICE={said} goes before {path}.")
    if _started():
        what = "The backend has started, and what lies on a device stays there"
        warn(f"{what}. Restart the process, and all of it follows.")
