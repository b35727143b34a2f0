"""Devices: which there are, moving values to them, meshes, and states over a mesh."""

from tsunax.devices.kinds import (
    DeviceInfo,
    device,
    device_info,
    device_of,
    devices,
    is_available,
    prefer,
    preferred,
    simulate,
    supported_devices,
    to_device,
    to_host,
)
from tsunax.devices.meshes import Placement, describe_sharding, mesh, shard

__all__ = [
    "DeviceInfo", "Placement", "describe_sharding", "device", "device_info", "device_of", "devices",
    "is_available", "mesh", "prefer", "preferred", "shard", "simulate", "supported_devices",
    "to_device", "to_host",
]  # fmt: skip
