"""Devices: selecting them, moving trees to them, meshes, and states over a mesh."""

from tsunax.devices.meshes import Placement, describe_sharding, mesh, shard
from tsunax.devices.selection import (
    DeviceInfo,
    device,
    device_info,
    devices,
    is_available,
    prefer,
    preferred,
    simulate,
    supported_devices,
    topology,
)
from tsunax.devices.transfer import device_of, to_device, to_host

__all__ = [
    "DeviceInfo", "Placement", "describe_sharding", "device", "device_info", "device_of", "devices",
    "is_available", "mesh", "prefer", "preferred", "shard", "simulate", "supported_devices",
    "to_device", "to_host", "topology",
]  # fmt: skip
