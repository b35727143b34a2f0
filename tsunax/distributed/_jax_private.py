"""The parts of JAX that `distributed` uses and that are not public: key-value store, launchers.

The store belongs to JAX's coordination service, which runs in process 0. Nothing here starts a
backend. No other file of the package uses these parts of JAX; tests run them on every JAX that is
supported.
"""

import ctypes
from dataclasses import dataclass
from typing import Any

from jax._src import distributed as _distributed
from jax._src import xla_bridge
from jax._src.clusters import ClusterEnv


class Store:
    """The store, below `tsunax/<run>/`. Raises RuntimeError when process 0 is gone."""

    def __init__(self, client: Any, run: int):
        self._client, self._root = client, f"tsunax/{run}"

    def write(self, key: str, text: str, replace: bool = False) -> bool:
        """Write a key. Returns False if it was written before, and is not to be replaced."""
        try:
            self._client.key_value_set(f"{self._root}/{key}", text, allow_overwrite=replace)
        except RuntimeError as error:
            if "ALREADY_EXISTS" not in str(error):
                raise
            return False
        return True

    def get(self, key: str, seconds: float) -> str | None:
        """The text of a key once it is written; None if not within these seconds."""
        milliseconds = max(1, round(1000 * seconds))
        try:
            return self._client.blocking_key_value_get(f"{self._root}/{key}", milliseconds)
        except RuntimeError as error:
            if "GetKeyValue() timed out" not in str(error):
                raise
            return None

    def texts_below(self, key: str) -> dict[str, str]:
        """The texts of `key/0`, `key/verdict` and so on, as far as they are written."""
        texts = self._client.key_value_dir_get(f"{self._root}/{key}/")
        return {name.rpartition("/")[2]: text for name, text in texts}

    def delete(self, key: str) -> None:
        self._client.key_value_delete(f"{self._root}/{key}")


@dataclass(frozen=True)
class Connection:
    """The client of `jax.distributed`, and the launcher's number of this process, of `count`."""

    client: Any
    index: int
    count: int


def initialized() -> Connection | None:
    """The connection of `jax.distributed`; None before it starts."""
    state = _distributed.global_state
    if state.client is None:
        return None
    return Connection(state.client, state.process_id, state.num_processes)


def abandon() -> None:
    """Forget a client that did not connect, after a start that failed."""
    _distributed.global_state.client = None


def forget_in_child() -> None:
    """Keep the exit of a forked child from speaking over its parent's connection, and from waiting.

    JAX shuts its client down at exit: the child's bytes would break the parent's stream. The
    destructors wait for threads that a child does not have, so these objects are never freed.
    """
    state = _distributed.global_state
    parts = state.client, state.service, state.preemption_sync_manager
    for part in (*parts, *xla_bridge._backends.values()):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(part))
    state.client = state.service = state.preemption_sync_manager = None


def detected(*settings: Any) -> tuple[Any, Any, Any, Any]:
    """(address, count, index, local_device_ids) as given, or else as JAX finds a launcher's."""
    return ClusterEnv.auto_detect_unset_distributed_params(*settings)
