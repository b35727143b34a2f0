"""The same training function on a Ray cluster, with Ray Train's reports and restarts.

    result = ts.ray.trainer(train, 4, config={"seed": 0}).fit()

Each process is one of many (`ts.distributed`) before the function begins: it may call
`ts.distributed.start()`, and so be the script that runs under `mpirun`. Needs the extra `ray`.
"""

import inspect
import socket
from collections.abc import Mapping
from typing import Any

from tsunax._core import Function, libraries
from tsunax.distributed import joining

__all__ = ["trainer"]


def library(part: str = "", where: str = "tsunax.ray") -> Any:
    """Ray, or a part of it; `import ray` would be this file to a type checker."""
    return libraries.library(f"ray{part}", where, extra="ray")


def _free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def trainer(
    f: Function,
    workers: int = 1,
    *,
    config: Mapping[str, Any] | None = None,
    start: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Ray Train's JaxTrainer for `f()` or `f(config)`, in which all workers train as one.

    Inside, `ray.train.report` and `get_checkpoint` work as ever. Processes are brought together by
    `ts.distributed` and not by Ray: with bounded waits, and on CPUs too. Raises MissingLibraryError
    if the extra `ray` is not installed.

    Args:
      workers: how many; or give a `scaling_config` of Ray's.
      start: options of `ts.distributed.start`.
      options: of JaxTrainer: `scaling_config`, `run_config`, `datasets`, ...
    """
    train, jax_train = library(".train"), library(".train.v2.jax")
    takes_config = bool(inspect.signature(f).parameters)
    start_options = dict(start or {})

    def loop(config):
        context = library(".train").get_context()
        index, count = context.get_world_rank(), context.get_world_size()
        address_of_first = (
            f"{library('.util').get_node_ip_address()}:{_free_port()}" if index == 0 else ""
        )
        address = library(".train.collective").broadcast_from_rank_zero(address_of_first)
        joining.start(address, count, index, **start_options)
        try:
            result = f(config) if takes_config else f()
        except BaseException as error:  # Ray keeps it, and the other processes end
            joining.give_up(error)
            raise
        joining.stop()
        return result

    options = {"scaling_config": train.ScalingConfig(num_workers=workers)} | options
    options |= {"train_loop_config": dict(config or {}), "jax_config": jax_train.JaxConfig()}
    return jax_train.JaxTrainer(loop, **options)
