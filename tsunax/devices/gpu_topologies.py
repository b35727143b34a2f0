"""GPUs that are not here, as XLA's compiler describes them: `devices.topology("h100:8")`.

The numbers come from NVIDIA's data sheets and from the device descriptions in XLA's repository
(`xla/backends/gpu/target_config/specs`, read 2026-11-27). CUDA reports the memory of the L4.
"""

import importlib.util
import re
from typing import Any, Final

from tsunax._core.libraries import library
from tsunax.errors import DeviceError, told

# The facts that the compiler reads about a card: its CUDA compute capability, its streaming
# multiprocessors; for each of these its float32 units, its limit of threads and its bytes of
# shared memory (also the limit for a block); the bytes of L2, bytes a second, bytes of memory,
# and GHz.
H100: Final[dict[str, Any]] = {
    "description": "NVIDIA H100 80GB HBM3", "capability": (9, 0), "processors": 132, "units": 128,
    "threads": 2048, "shared": 233_472, "shared_per_block": 232_448, "cache": 52_428_800,
    "bandwidth": 3_352_320_000_000, "memory": 84_942_979_072, "clock": 1.98,
}  # fmt: skip
CARDS: Final[dict[str, dict[str, Any]]] = {
    "h100": H100,
    "h200": {
        **H100, "description": "NVIDIA H200", "bandwidth": 4_800_000_000_000,
        "memory": 151_397_597_184,
    },
    "a100": {
        "description": "NVIDIA A100-SXM4-80GB", "capability": (8, 0), "processors": 108,
        "units": 64, "threads": 2048, "shared": 167_936, "shared_per_block": 166_912,
        "cache": 41_943_040, "bandwidth": 2_039_040_000_000, "memory": 85_100_068_864,
        "clock": 1.41,
    },
    "l4": {
        "description": "NVIDIA L4", "capability": (8, 9), "processors": 58, "units": 128,
        "threads": 1536, "shared": 102_400, "shared_per_block": 101_376, "cache": 50_331_648,
        "bandwidth": 300_096_000_000, "memory": 23_805_000_000, "clock": 2.04,
    },
}  # fmt: skip

LIMITS_TEXT = (
    "compiled without the card: products are not tuned and take no cuBLAS, cuDNN's attention does "
    "not compile, arrays in host memory are counted on the device"
)

# Without the version of the driver, XLA leaves loops and conditionals out of its CUDA graphs.
TARGET = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {shared} shared_memory_per_block_optin: {shared_per_block}
  threads_per_core_limit: {threads} core_count: {processors} fpus_per_core: {units}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth} l2_cache_size: {cache} clock_rate_ghz: {clock}
  device_memory_size: {memory} registers_per_core_limit: 65536 registers_per_block_limit: 65536
  cuda_compute_capability {{ major: {capability[0]} minor: {capability[1]} }}
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 13 }}
device_description_str: "{description}"
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
    options = {"target_config": TARGET.format(**card), "topology": f"1x{hosts}x{count}"}
    try:
        return list(topologies.get_topology_desc(platform="cuda", **options).devices)
    except Exception as error:  # the plugin may raise any class
        raise DeviceError(
            "topology",
            repr(name),
            got=told(error),
            expected="a topology that the CUDA plugin of JAX can compile for",
        ) from error
