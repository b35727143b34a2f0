"""Agreement of all processes: waits that end, errors that name a process, one answer for all.

    ts.distributed.check_in_sync(seed=seed, params=params, settings=settings)

It works on the host, over the key-value store of JAX's coordination service (`_peers.py`). The rest
of the package sees `Several` through `_core/processes.py`.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tsunax._core import PyTree, processes, stable_text, trees
from tsunax.distributed import joining
from tsunax.errors import ProcessError, TsunaxError, told

__all__ = ["agree", "barrier", "broadcast", "check_in_sync"]


def barrier(name: str = "barrier", timeout: float | None = None) -> None:
    """Wait until all processes call it by this `name`, `timeout` seconds at most (None: `start`'s).

    Raises ProcessError that names who did not come, or is at another place. It does not wait for
    the devices.
    """
    processes.current().gather(f"barrier {name!r}", "", timeout)


def agree(asked: int = 0) -> int:
    """0, until any process gives another number; then this number, on all in the same call.

        if signal := ts.distributed.agree(interrupt.asked):  # at every call of the compiled loop
            break

    Every process calls it equally often. It does not wait: the processes settle on the next call
    that no process has reached. If two numbers are given at once, one is returned. `asked` is an
    int, such as a signal. Raises ProcessError when another process has ended the run, or is lost.

    >>> agree(), agree(15)
    (0, 15)
    """
    return processes.current().agree(asked)


def check_in_sync(**things: Any) -> None:
    """Raise ProcessError on all processes unless `things` (seed, tree, state) are the same on all.

    The message names up to 10 leaves that differ, with both sides. Containers and static fields
    count, too. Arrays are compared by shape, dtype and a hash of their bytes (an array that is
    spread over processes without the hash), objects by their fields, functions by name, code,
    defaults and closure.

    >>> check_in_sync(seed=0, params={"w": [1.0, 2.0]})
    """
    processes.current().compare("check_in_sync()", lambda: things)


def _excerpt(text: str, position: int) -> str:
    start = 0 if len(text) < 80 else max(0, position - 30)
    return f"{'…' * (start > 0)}{text[start : start + 80]}{'…' * (start + 80 < len(text))}"


def broadcast(tree: PyTree, root: int = 0) -> PyTree:
    """The tree of one process, on all processes: to the bit, arrays in one program.

    The trees have the same structure, shapes and dtypes everywhere. JAX arrays keep their place,
    NumPy arrays stay NumPy's. Numbers and strings may differ, and need no device. Raises
    ProcessError for trees that do not fit, a root that is not there or that differs, TypeError for
    other leaves.

    >>> broadcast({"run": "2026-11-21", "seed": 3})
    {'run': '2026-11-21', 'seed': 3}
    """
    everyone = processes.current()
    index, count = everyone.index, everyone.count
    if not 0 <= root < count:
        raise ProcessError("root", "broadcast()", root, f"a process from 0 to {count - 1}")
    if count == 1:
        return tree
    describe = lambda x: (
        f"{x.dtype}{list(x.shape)}" if trees.is_array(x) else "a number or a string"
    )
    descriptions = {place: describe(x) for place, x in trees.leaves_at("tree", tree)}
    everyone.compare("broadcast()", lambda: {"root": root, **descriptions})
    leaves, treedef = jax.tree.flatten(tree)
    plain = json.dumps([None if trees.is_array(x) else x for x in leaves])
    values = json.loads(everyone.gather("broadcast()", plain)[root])
    raw = [trees.on_host(x).reshape(-1).view(np.uint8) for x in leaves if trees.is_array(x)]
    if raw:
        from jax.experimental import multihost_utils

        parts = iter(multihost_utils.broadcast_one_to_all(raw, is_source=index == root))
        pairs = zip(leaves, values, strict=True)
        values = [_like(x, next(parts)) if trees.is_array(x) else value for x, value in pairs]
    return treedef.unflatten(values)


def _like(leaf: Any, part: np.ndarray) -> Any:
    bits = trees.on_host(leaf)
    new = np.asarray(part).view(bits.dtype).reshape(bits.shape)
    if trees.is_key(leaf):
        return jax.random.wrap_key_data(jnp.asarray(new), impl=jax.random.key_impl(leaf))
    if isinstance(leaf, jax.Array):
        return jax.device_put(new, leaf.sharding if leaf.committed else None)
    return new if isinstance(leaf, np.ndarray) else new[()]


class Several(processes.Alone):
    """The processes of `jax.distributed`, in place of `processes.Alone`."""

    @property
    def index(self) -> int:
        return jax.process_index()

    @property
    def count(self) -> int:
        return jax.process_count()

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def sees_everything(self) -> bool:
        return self.count == 1

    def check_alone(self, where: str) -> None:
        if self.count > 1:
            raise ProcessError(where, "", f"{self.count} processes", "one")

    def spans_all(self, devices: Iterable[Any]) -> bool:
        return len({device.process_index for device in devices}) == self.count > 1

    def row_parts(self, count: int) -> int:
        # If the processes train as one program, each device has a part.
        return jax.device_count() if count == self.count else count

    def agreement(self, where: str, state: Any, data: Any) -> processes.Unanimous:
        from tsunax.distributed.agreement import Agreement

        return Agreement(where, state, data)

    def name_of(self, index: int) -> str:
        peers = joining._peers_of_run
        return f"process {index}" if peers is None else peers.name_of(index)

    def agree(self, asked: Any = 0) -> Any:
        peers = joining.peers()
        return asked if peers is None else peers.agree(asked)

    def reports(self, text: str) -> dict[str, str]:
        peers = joining._peers_of_run
        return {} if peers is None else peers.reports(text)

    def gather(
        self, name: str, text: str = "", timeout: float | None = None, thread: str = ""
    ) -> list[str]:
        if self.count == 1:
            return [text]
        if (peers := joining.peers()) is None:
            raise ProcessError(name, "", "a process that has given up", "one that trains")
        return peers.gather(name, text, timeout, thread, self.index)

    def together(
        self,
        name: str,
        f: Callable[[], tuple[Any, str]],
        *,
        timeout: float | None = None,
        thread: str = "",
        kinds: Sequence[type[Exception]] = (),
    ) -> tuple[Any, list[str]]:
        """`f()` on all processes. The process that failed raises its own error.

        All other processes raise an error that names it: of its kind among `kinds` (from the
        mildest on), or else a ProcessError.
        """
        value, own_error, said = None, None, [len(kinds), "", ""]
        try:
            value, word = f()
            said = [-1, "", word]
        except Exception as error:
            own_error, is_reportable = error, isinstance(error, (TsunaxError, *kinds))
            grade = next((i for i, kind in enumerate(kinds) if isinstance(error, kind)), len(kinds))
            said = [grade, str(error) if is_reportable else told(error), ""]
        texts = self.gather(name, json.dumps(said), timeout, thread)
        everyone = [json.loads(text) for text in texts]
        grade, problem, _ = worst = max(everyone, key=lambda said: said[0])
        if grade < 0:
            return value, [word for _, _, word in everyone]
        who = everyone.index(worst)
        if who == self.index and own_error is not None:
            raise own_error
        raise [*kinds, ProcessError][grade](f"{self.name_of(who)}: {problem}")

    def compare(
        self, where: str, things: Callable[[], Mapping[str, Any]], timeout: float | None = None
    ) -> None:
        parts: dict[str, str] = {}
        for name, value in things().items():
            parts |= stable_text.parts_of(name, value)
        own_hash = stable_text.hash_of(json.dumps(parts).encode())
        if len(set(self.gather(where, own_hash, timeout))) == 1:
            return
        texts = self.gather(f"{where} in detail", json.dumps(parts))
        everyone, differ = [json.loads(text) for text in texts], []
        for place in dict.fromkeys(place for parts in everyone for place in parts):
            texts = [parts.get(place, "nothing") for parts in everyone]
            different_text = next((text for text in texts if text != texts[0]), None)
            if different_text is not None:
                position = len(os.path.commonprefix([different_text, texts[0]]))  # noqa: RUF071, characters
                got, first = _excerpt(different_text, position), _excerpt(texts[0], position)
                who = self.name_of(texts.index(different_text))
                differ.append(f"{place}: got {got} on {who}, {first} on process 0")
        where = "" if where == "check_in_sync()" else f" at {where}"
        text = f"processes differ{where}: {trees.listed(differ, 10, '; ')}"
        raise ProcessError(f"{text}. They must be the same on all.")


SEVERAL = Several()
