"""Memory that a compiled step needs on a device, and how much is available. No step executes.

    need = state + batch + temporary + results outside of the state's memory (bytes on one device)

XLA lays out all memory of a program before it runs, and reports its size.
"""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from tsunax._core import checks, placement, trees
from tsunax.devices.gpu_topologies import CARDS
from tsunax.devices.selection import device_info
from tsunax.errors import DeviceError
from tsunax.states import row_axes

# Scratch memory of XLA's threads, which its memory analysis leaves out: 34 to 66 MB measured on
# three models with two threads, about 100 MB with eight and 130 MB with sixteen. Each device has
# its own. If it is too small, a batch that does not fit is called fitting; larger wastes memory.
CPU_SCRATCH = 40 << 20
# GiB of a device by its kind, from https://cloud.google.com/tpu/docs/system-architecture-tpu-vm
TPU_GIB = {"TPU v5 lite": 16, "TPU v5": 95, "TPU v6 lite": 32}
# Compiler options by platform that skip work without an effect on the memory layout. On a CPU they
# skip LLVM's optimization, half of the time; on a GPU autotuning, which runs kernels and so takes
# memory of the device.
FAST_COMPILER_OPTIONS: dict[str, dict[str, Any]] = {
    "cpu": {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True},
    "gpu": {"xla_gpu_autotune_level": 0},
}


@dataclass(frozen=True)
class Need:
    """Bytes on one device while a step runs."""

    state: int  # the state and all other arguments but the batch
    batch: int
    temporary: int
    results: int  # results outside of the state's memory: all results without donation
    runtime: int  # code, and on a CPU the scratch of its threads
    host: int = 0  # offloaded state in the host's memory for this device: not in the total

    @property
    def total(self) -> int:
        return self.state + self.batch + self.temporary + self.results + self.runtime


def mesh_of(state: Any) -> Any:
    """The mesh on which a state is placed, or None."""
    places = (getattr(x, "sharding", None) for x in jax.tree.leaves(state))
    return next((s.mesh for s in places if isinstance(s, NamedSharding)), None)


def need_of(step: Any, state: Any, batch: Any, extra: dict[str, Any]) -> Need:
    """Compile a step for a batch of arrays or shapes, and return the memory that it needs."""
    batch, extra = as_shapes(state, batch, extra)
    return need_in(compiled_quickly(step.lower(state, batch, **extra), state), state, batch)


def compiled_quickly(lowered: jax.stages.Lowered, state: Any) -> jax.stages.Compiled:
    """The compiled program, without work that has no effect on its memory."""
    try:
        return lowered.compile(
            compiler_options=FAST_COMPILER_OPTIONS.get(device_of_state(state).platform)
        )
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):  # versions of XLA differ in their options
            raise
        return lowered.compile()


def as_shapes(state: Any, batch: Any, extra: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The batch and the extra arguments of a step as shapes, with the shardings it would use."""
    mesh = mesh_of(state)
    batch, extra = jax.eval_shape(lambda x: x, (batch, extra))  # in the dtypes that JAX gives
    if mesh is None or mesh.size == 1:
        return batch, extra

    def spread(x, axes=()):
        return jax.ShapeDtypeStruct(
            x.shape,
            x.dtype,
            sharding=NamedSharding(
                mesh, PartitionSpec(axes) if axes and x.ndim else PartitionSpec()
            ),
        )

    axes = row_axes(state, mesh)
    return jax.tree.map(lambda x: spread(x, axes), batch), jax.tree.map(spread, extra)


def need_in(compiled: jax.stages.Compiled, state: Any, batch: Any) -> Need:
    """The memory that a compiled step needs for a batch of these shapes."""
    analysis = compiled.memory_analysis()
    if analysis is None:
        raise DeviceError("memory analysis", "the compiled step", "none of this backend", "one")
    batch_bytes = sum(map(bytes_per_device, jax.tree.leaves(batch)))
    offloaded_bytes = sum(map(bytes_per_device, filter(trees.is_offloaded, jax.tree.leaves(state))))
    # a CPU reports 0 and counts them as arguments
    host_argument_bytes = getattr(analysis, "host_argument_size_in_bytes", 0)
    scratch = CPU_SCRATCH if device_of_state(state).platform == "cpu" else 0
    return Need(
        state=max(
            0, analysis.argument_size_in_bytes + host_argument_bytes - batch_bytes - offloaded_bytes
        ),
        batch=batch_bytes,
        temporary=analysis.temp_size_in_bytes,
        results=max(0, analysis.output_size_in_bytes - analysis.alias_size_in_bytes),
        runtime=analysis.generated_code_size_in_bytes + scratch,
        host=offloaded_bytes,
    )


def bytes_per_device(x: Any) -> int:
    """Bytes of an array or a shape on each of its devices."""
    sharding, shape = getattr(x, "sharding", None), np.shape(x)
    local_shape = shape if sharding is None else sharding.shard_shape(shape)
    return math.prod(local_shape) * x.dtype.itemsize


def device_of_state(state: Any) -> Any:
    """A device of the state, of this process if there is any; for shapes the default device."""
    for x in jax.tree.leaves(state):
        if (sharding := getattr(x, "sharding", None)) is not None:
            return min(
                sharding.addressable_devices or sharding.device_set, key=lambda device: device.id
            )
    return jnp.zeros(()).devices().pop()


def free_on_host() -> int | None:
    """Bytes that this machine can still give to this process; None if it does not report them."""
    limits = []
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        limits += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")]
        group = Path("/sys/fs/cgroup")  # a container's own limit
        group_limit = (group / "memory.max").read_text().strip()
        if group_limit != "max":
            lines = (group / "memory.stat").read_text().splitlines()
            cache = sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
            limits.append(int(group_limit) - int((group / "memory.current").read_text()) + cache)
    except (OSError, ValueError):
        pass
    return max(0, min(limits)) if limits else None


def _unknown_memory(where: str, device: Any) -> DeviceError:
    got = f"{device}, a {device.device_kind} of unknown size"
    return DeviceError("memory", where, got, "a number", "Give memory=16 << 30.")


def limit_of(memory: Any, state: Any, where: str) -> tuple[int, str]:
    """Bytes that state, batch and step may use on one device, and the source of that number."""
    if memory is not None:
        if isinstance(memory, str) and (
            size := re.fullmatch(r"(\d+\.?\d*) ?(?=[KMGTB])([KMGT]?)(i?)B?", memory)
        ):
            unit = (1024 if size[3] else 1000) ** " KMGT".index(size[2] or " ")
            memory = round(float(size[1]) * unit)
        if isinstance(memory, float) and memory.is_integer():  # 16e9
            memory = int(memory)
        return checks.check_count(memory, where, "memory"), "as given"
    device, arrays = device_of_state(state), jax.tree.leaves(state)
    if (mesh := mesh_of(state)) is not None and placement.is_absent(mesh):
        memory_by_kind = {card["description"]: card["memory"] for card in CARDS.values()}
        memory_by_kind |= {kind: gib << 30 for kind, gib in TPU_GIB.items()}
        if device.device_kind in memory_by_kind:
            return memory_by_kind[device.device_kind], f"the memory of a {device.device_kind}"
        raise _unknown_memory(where, device)
    is_on_device = lambda x: isinstance(x, jax.Array) and not trees.is_offloaded(x)
    state_bytes = sum(map(bytes_per_device, filter(is_on_device, arrays)))
    info = device_info(device)
    if info.memory_total is not None:
        bytes_of_others = max(0, (info.memory_in_use or 0) - state_bytes)
        source = f"the limit of {device}, less {trees.bytes_str(bytes_of_others)} of others"
        return info.memory_total - bytes_of_others, source
    free = free_on_host() if device.platform == "cpu" else None
    if free is None:
        raise _unknown_memory(where, device)
    n = 1 if mesh is None else max(1, len(mesh.local_devices))  # they share the host
    return free // n + state_bytes, "free on this machine" + (
        f", over {n} devices" if n > 1 else ""
    )
