"""GPUs that are not here, as XLA's compiler describes them: `devices.topology("h100:8")`.

The numbers come from NVIDIA's data sheets and from the device descriptions in XLA's repository
(`xla/backends/gpu/target_config/specs`, read 2026-11-27). CUDA reports the memory of the L4.
"""

import importlib.util
import re
from typing import Any, NamedTuple

from tsunax._core.libraries import library
from tsunax.errors import DeviceError, told


class Card(NamedTuple):
    """Facts about a GPU that the compiler reads."""

    description: str
    capability: tuple[int, int]  # CUDA's compute capability
    processors: int  # streaming multiprocessors
    units: int  # float32 units of each processor
    threads: int  # the limit for each processor
    shared: int  # bytes of shared memory of each processor
    shared_per_block: int  # the limit in bytes
    cache: int  # bytes of L2
    bandwidth: int  # bytes a second
    memory: int  # bytes
    clock: float  # GHz


CARDS = {
    "h100": Card("NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 2048, 233_472, 232_448,
                 52_428_800, 3_352_320_000_000, 84_942_979_072, 1.98),
    "h200": Card("NVIDIA H200", (9, 0), 132, 128, 2048, 233_472, 232_448,
                 52_428_800, 4_800_000_000_000, 151_397_597_184, 1.98),
    "a100": Card("NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 2048, 167_936, 166_912,
                 41_943_040, 2_039_040_000_000, 85_100_068_864, 1.41),
    "l4": Card("NVIDIA L4", (8, 9), 58, 128, 1536, 102_400, 101_376,
               50_331_648, 300_096_000_000, 23_805_000_000, 2.04),
}  # fmt: skip

LIMITS = (
    "compiled without the card: products are not tuned and take no cuBLAS, cuDNN's attention does "
    "not compile, arrays in host memory are counted on the device"
)

# Without the version of the driver, XLA leaves loops and conditionals out of its CUDA graphs.
TARGET = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {card.shared} shared_memory_per_block_optin: {card.shared_per_block}
  threads_per_core_limit: {card.threads} core_count: {card.processors} fpus_per_core: {card.units}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {card.bandwidth} l2_cache_size: {card.cache} clock_rate_ghz: {card.clock}
  device_memory_size: {card.memory} registers_per_core_limit: 65536 registers_per_block_limit: 65536
  cuda_compute_capability {{ major: {card.capability[0]} minor: {card.capability[1]} }}
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 13 }}
device_description_str: "{card.description}"
"""


def gpu_topology(name: str) -> list[Any] | None:
    """The devices of "h100", "h100:8" (one host) or "h100:2x8" (two); None for other names."""
    match = re.fullmatch(r"(\w+?)(?::(?:(\d+)x)?(\d+))?", name.lower())
    if match is None or (card := CARDS.get(match[1])) is None:
        return None
    if not any(map(importlib.util.find_spec, ("jax_cuda12_plugin", "jax_cuda13_plugin"))):
        library("jax_cuda13_plugin", "topology()", extra="gpu-compile")
    from jax.experimental import topologies

    hosts, count = (int(text or 1) for text in match.groups()[1:])
    options = {"target_config": TARGET.format(card=card), "topology": f"1x{hosts}x{count}"}
    try:
        return list(topologies.get_topology_desc(platform="cuda", **options).devices)
    except Exception as error:  # the plugin may raise any class
        raise DeviceError(
            "topology",
            repr(name),
            got=told(error),
            expected="a topology that the CUDA plugin of JAX can compile for",
        ) from error
