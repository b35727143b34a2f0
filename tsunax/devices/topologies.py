"""TPUs that are not here: steps compile for them on any machine, and nothing runs."""

from __future__ import annotations

import os

from tsunax._core import Device, trees
from tsunax._core.libraries import library
from tsunax.errors import DeviceError, WrongTypeError, told

__all__ = ["topology"]

# libtpu looks for the host's metadata server for minutes, and warns if it finds no TPU. The name of
# the accelerator decides nothing here.
_QUIET = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
}


def topology(name: str) -> list[Device]:
    """The devices of a TPU topology, such as "v5e:2x4", "v5e:8x8", "v6e:2x4" or "v5p:2x2x1".

        make = lambda: ts.setup(rule, init(jax.random.key(0)), key=0)
        state = ts.shard(make, ts.mesh(data=1, fsdp=-1, devices=ts.devices.topology("v5e:8x8")))
        print(ts.describe(step, state, batch))

    Give them to `mesh`. A state on that mesh consists of shapes (`jax.ShapeDtypeStruct`), and
    `describe`, `find_batch_size` and `step.lower` compile for it: memory, donation and collectives
    are what the compiler plans for the real machine.

    This takes seconds and needs libtpu in the version of this jax, from the extra `tpu`. Set
    JAX_PLATFORMS=cpu on a machine without a TPU, or JAX looks for one. Raises MissingLibraryError
    without libtpu, DeviceError for a name that libtpu does not have.
    """
    if not isinstance(name, str):
        raise WrongTypeError("name", "topology()", trees.describe(name), 'a str such as "v5e:2x4"')
    library("libtpu", "topology()", extra="tpu")
    from unittest import mock

    from jax.experimental import topologies

    try:
        with mock.patch.dict(os.environ, {**_QUIET, **os.environ}):
            return list(topologies.get_topology_desc(platform="tpu", topology_name=name).devices)
    except Exception as error:  # of libtpu, whatever it is
        expected = 'one that libtpu knows, such as "v5e:2x4"'
        raise DeviceError("topology", repr(name), told(error), expected) from error
