"""The shortest time in which a device can run a compiled program: a roofline, and its peaks.

    seconds = max(FLOPs / peak, bytes / bandwidth) + bytes between devices and to the host / links

On a CPU the first two add up, and temporary values that fit into its cache cost no bandwidth. It
is an estimate, for comparisons: no program reaches its peaks, and transfers overlap with work.
"""

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from tsunax._core import checks
from tsunax.errors import HyperparameterError
from tsunax.insight import _cost, _memory


@dataclass(frozen=True)
class Peaks:
    """The peak rates of one device, in a second; `source` says where the figures are from.

    `flops` are operations of products, `memory`, `wire` and `host` are bytes between the device and
    its memory, the other devices (sent), and the memory of the host. `cache` is the size in bytes
    of a CPU's last cache, 0 for other devices.
    """

    flops: float
    memory: float
    wire: float
    host: float
    source: str = "as given"
    cache: float = 0.0

    def __post_init__(self) -> None:
        for name in ("flops", "memory", "wire", "host"):
            rate = getattr(self, name)
            if not (checks.is_real(rate) and 0 < rate < math.inf):
                raise HyperparameterError(name, "Peaks", rate, "a rate above 0, in a second")
        if not (checks.is_real(self.cache) and 0 <= self.cache < math.inf):
            raise HyperparameterError("cache", "Peaks", self.cache, "a number of bytes, 0 for none")


_SHEET = "its data sheet"
# From the data sheets of NVIDIA (dense products in 16 bits; NVLink in one direction, PCIe for the
# L4) and https://cloud.google.com/tpu/docs/system-architecture-tpu-vm (all links of a chip). Links
# to the host: PCIe. Products of float32 (TF32) take twice as long on a GPU.
DATA_SHEETS = {
    "NVIDIA H100 80GB HBM3": Peaks(989e12, 3.35e12, 450e9, 64e9, _SHEET),
    "NVIDIA H200": Peaks(989e12, 4.8e12, 450e9, 64e9, _SHEET),
    "NVIDIA A100-SXM4-80GB": Peaks(312e12, 2.04e12, 300e9, 32e9, _SHEET),
    "NVIDIA L4": Peaks(121e12, 300e9, 32e9, 32e9, _SHEET),
    "TPU v5 lite": Peaks(197e12, 819e9, 200e9, 32e9, _SHEET),
    "TPU v5": Peaks(459e12, 2.765e12, 600e9, 32e9, _SHEET),
    "TPU v6 lite": Peaks(918e12, 1.64e12, 448e9, 32e9, _SHEET),
}


def peaks_of(device: Any, n: int) -> Peaks:
    """The peaks of one of n devices from its data sheet, else nominal figures for a CPU."""
    if device.device_kind in DATA_SHEETS:
        return DATA_SHEETS[device.device_kind]
    is_cpu = device.platform == "cpu"
    share, cache = (os.cpu_count() or 1) / (n if is_cpu else 1), _cache_of_cpu() / n
    source = "nominal figures of a CPU: give peaks="
    return Peaks(50e9 * share, 10e9 * share, 10e9, 10e9, source, cache if is_cpu else 0.0)


def _cache_of_cpu() -> int:
    """Bytes of the last cache of the first core; 32 MiB if the system does not tell."""
    files = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
    try:
        return int(files[-1].read_text().strip().removesuffix("K")) << 10
    except (IndexError, OSError, ValueError):
        return 32 << 20


@dataclass(frozen=True)
class Work:
    """The work of one call of a compiled step on each device; `flops` are for all devices."""

    flops: float
    moved: float  # bytes from and to the memory of the device, an estimate
    wire: float  # bytes sent to other devices
    host: float  # bytes from and to the memory of the host
    devices: int
    update: float = 0.0  # bytes of `moved` that the update of the state moves
    temporary: float = math.inf  # bytes of temporary values

    def seconds(self, peaks: Peaks) -> float:
        """The least time that it takes: products and memory at once, then transfers.

        On a CPU (a device with a `cache`) products and memory take turns.
        """
        is_cached = self.temporary <= peaks.cache
        moving = (self.update if is_cached else self.moved) / peaks.memory
        computing = self.flops / self.devices / peaks.flops
        busy = computing + moving if peaks.cache else max(computing, moving)
        return busy + self.wire / peaks.wire + self.host / peaks.host


def work_of(flops: float, compiled: jax.stages.Compiled, need: _memory.Need, devices: int) -> Work:
    """The work of a compiled step with products of `flops`, for all devices together."""
    analysis: Any = compiled.cost_analysis() or {}
    bytes_counted, flops_counted = analysis.get("bytes accessed", 0.0), analysis.get("flops", 0.0)
    # XLA counts the body of a loop once. The update is outside of the loops: it reads and writes
    # the state. All other bytes are multiplied as the FLOPs are.
    update_bytes = min(bytes_counted, 2.0 * need.state)
    trips = max(1.0, flops / devices / flops_counted) if flops_counted > 0 else 1.0
    factors = {
        "all-reduce": 2 * (devices - 1) / devices,
        "all-gather": (devices - 1) / devices,
        "reduce-scatter": devices - 1,
    }
    collectives = _cost.collectives_in(compiled.as_text() or "")
    return Work(
        flops=flops,
        moved=update_bytes + trips * (bytes_counted - update_bytes),
        wire=sum(c.bytes * factors.get(c.kind, 1.0) for c in collectives),
        host=2.0 * need.host,
        devices=devices,
        update=update_bytes,
        temporary=need.temporary,
    )
