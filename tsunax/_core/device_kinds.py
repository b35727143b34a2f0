"""Which device a word means: a kind such as "gpu", "gpu:1" for number 1 of a kind, or "auto".

A device is a `jax.Device`; its number counts the devices of this process from 0. The variable
TSUNAX_DEVICE or the nearest file `.tsunax-device`, in the current directory or above it, may name
the kind that `"auto"` tries first. Every function that takes a device takes it by `as_device` or
`as_sharding`.
"""

import operator
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Sharding, SingleDeviceSharding

from tsunax._core import Device, trees
from tsunax.errors import ConfigError, DeviceError, WrongTypeError, told, unknown, warn

PLATFORMS = {  # JAX's names; mps is Apple's
    "tpu": ("tpu",), "gpu": ("cuda", "rocm", "oneapi", "mps"), "cpu": ("cpu",),
    "cuda": ("cuda",), "rocm": ("rocm",), "metal": ("mps",),
}  # fmt: skip
KINDS = ("auto", *PLATFORMS)
PREFERENCE_FILE = ".tsunax-device"
# JAX's exceptions for no device; the latter if JAX_PLATFORMS names no available platform
_NO_DEVICE = (RuntimeError, AssertionError)
_ORDER = ("tpu", "gpu", "cpu")


def find(platform: str | None) -> list[Device]:
    """This process's devices of a platform, or of JAX's default one; raises one of `_NO_DEVICE`."""
    return jax.local_devices(backend=platform)


def devices_of_kind(kind: str) -> tuple[list[Device], str]:
    """The devices of a kind, or why there are none."""
    for platform in PLATFORMS[kind]:
        try:
            if devices := find(platform):
                return devices, ""
        except _NO_DEVICE as error:
            if "nitialize" in str(error):
                return [], told(error)
    listed = jax.config.jax_platforms  # type: ignore[attr-defined]
    if listed and not {kind, *PLATFORMS[kind]} & set(listed.split(",")):
        return [], f"JAX_PLATFORMS={listed} leaves it out"
    return [], "JAX finds none; its plugin may not be installed"


def nearest_file() -> Path | None:
    current_folder = Path.cwd()
    paths = (folder / PREFERENCE_FILE for folder in (current_folder, *current_folder.parents))
    return next((path for path in paths if path.is_file()), None)


def preference() -> tuple[str | None, str]:
    """The preferred kind and its source. Raises ConfigError for an unknown kind."""
    kind, source = os.environ.get("TSUNAX_DEVICE", "").strip(), "TSUNAX_DEVICE"
    if not kind:
        if (path := nearest_file()) is None:
            return None, ""
        kind, source = path.read_text("utf-8", "replace").strip(), str(path)
    if kind not in KINDS:
        raise ConfigError(unknown("device", source, kind, KINDS))
    return kind, source


def _automatic() -> tuple[list[Device], str]:
    """The devices of the preferred kind, or else of the first available one; and why."""
    preferred, source = preference()
    if preferred and preferred != "auto":
        devices, why = devices_of_kind(preferred)
        if devices:
            return devices, f"{preferred} is preferred by {source}"
        warn(f"{preferred}, preferred by {source}, is not here: {why}. Another device is used.")
    for kind in _ORDER:
        if devices := devices_of_kind(kind)[0]:
            return devices, f"{kind} is the first of {', '.join(_ORDER)} that is here"
    try:
        return find(None), "what JAX takes by default"
    except _NO_DEVICE as error:
        raise DeviceError("devices", "", told(error), "a backend that starts") from error


def check_kind(kind: Any, where: str, kinds: Iterable[str]) -> None:
    if kind not in kinds:
        raise DeviceError(unknown("kind", where, str(kind), kinds))


def kind_and_index(device: Any) -> tuple[Any, Any]:
    """`("gpu", 1)` for `("gpu", 1)` and "gpu:1"; `("gpu", 0)` for "gpu"."""
    if isinstance(device, tuple) and len(device) == 2:
        return device
    name, _, number = device.partition(":") if isinstance(device, str) else (device, "", "")
    return (name, int(number)) if number.isdecimal() else (device, 0)


def devices_named(kind: Any, where: str) -> tuple[list[Device], str]:
    check_kind(kind, where, KINDS)
    if kind == "auto":
        return _automatic()
    devices, why = devices_of_kind(kind)
    if not devices:
        counts = {other_kind: len(devices_of_kind(other_kind)[0]) for other_kind in _ORDER}
        available_kinds = [f"{other_kind} ({n})" for other_kind, n in counts.items() if n]
        expected = f"one that is here: {', '.join(available_kinds) or 'none is'}"
        raise DeviceError("device", where, f"no {kind}", expected, f"{why}.")
    return devices, f"{kind} was asked for"


def device_number(devices: Sequence[Device], index: Any, where: str) -> Device:
    if not 0 <= operator.index(index) < len(devices):
        raise DeviceError("index", where, index, f"0 to {len(devices) - 1}")
    return devices[operator.index(index)]


def is_one_device(device: Any) -> bool:
    """Whether `as_device` accepts `device`, and it is not only the name of a kind."""
    is_pair = isinstance(device, tuple) and isinstance(next(iter(device), None), str)
    is_numbered = isinstance(device, str) and ":" in device
    return is_pair or is_numbered or isinstance(device, jax.Device | SingleDeviceSharding)


def as_device(device: Any, call: str) -> Device:
    """The device of a kind, of `(kind, number)` or "kind:number", or of a sharding on one device.

    A device stays as it is. `call` is "setup()". Raises DeviceError for an unknown or absent
    device, WrongTypeError for other things.
    """
    if isinstance(device, jax.Device):
        return device
    if isinstance(device, SingleDeviceSharding):
        return next(iter(device.device_set))
    kind, index = kind_and_index(device)
    if isinstance(kind, str):
        where = f"{call[:-1]}{device!r})"
        return device_number(devices_named(kind, where)[0], index, where)
    expected = "a kind or a jax.Device, or (kind, number); for a mesh use shard or prefetch"
    raise WrongTypeError("device", call, trees.describe(device), expected)


def as_sharding(device: Any, call: str) -> Sharding:
    """The sharding on `as_device`; shardings as they are."""
    if isinstance(device, Sharding):
        return device
    return SingleDeviceSharding(as_device(device, call))
