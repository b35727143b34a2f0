"""What all processes agree on: waits that end, errors that name a process, one answer for all.

    ts.distributed.check_in_sync(seed=seed, params=params, settings=settings)

It works on the host, over the key-value store of JAX's coordination service (`_peers.py`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tsunax._core import stable_text
from tsunax.distributed import joining
from tsunax.distributed.joining import LAST, process_count, process_index
from tsunax.errors import ProcessError, TsunaxError, told

__all__ = [
    "LAST", "agree", "barrier", "check_in_sync", "compare", "gather", "name_of", "process_count",
    "process_index", "spans_all", "together", "words",
]  # fmt: skip

SHOWN = 10  # differences in a message


def gather(name: str, text: str = "", timeout: float | None = None, thread: str = "") -> list[str]:
    """What all processes say at this place, by index; a `thread` has places of its own."""
    index, count = joining.here()
    if count == 1:
        return [text]
    if (peers := joining.peers()) is None:
        got, expected = "a process that has given up", "one of those that train"
        raise ProcessError(name, "", got, expected)
    return peers.gather(name, text, timeout, thread, index)


def barrier(name: str = "barrier", timeout: float | None = None) -> None:
    """Wait until all processes are here, `timeout` seconds at most (None: that of `start`).

    Raises ProcessError that names who did not come, or is at another place. It does not wait for
    the devices.
    """
    if timeout is not None:
        joining.check_seconds("barrier()", timeout=timeout)
    gather(f"barrier {name!r}", "", timeout)


def agree(asked: int = 0) -> int:
    """0, until any process asks for something; then what it asked for, on all in the same call.

        if signal := ts.distributed.agree(interrupt.asked):  # at every call of the compiled loop
            break

    Every process calls it equally often. It waits for nobody: the processes settle on the next call
    that none of them has reached. If two ask at once, one of them is heard. Raises ProcessError
    when another process has ended the run, or is lost.

    >>> agree(), agree(15)
    (0, 15)
    """
    peers = joining.peers()
    return asked if peers is None else peers.agree(asked)


def spans_all(devices: Iterable[Any]) -> bool:
    """Whether these devices are of several processes, and of all that there are."""
    return len({one.process_index for one in devices}) == process_count() > 1


def words(name: str, text: str) -> list[str]:
    """What each process says at this place, by index; waits half an hour at most."""
    return gather(name, text, LAST)


def together(
    name: str,
    f: Callable[[], tuple[Any, str]],
    *,
    timeout: float | None = None,
    thread: str = "",
    kinds: Sequence[type[Exception]] = (),
) -> tuple[Any, list[str]]:
    """`f()`, which returns (value, word), on all processes: its value and the words of all.

    An error on one is an error on all. The process itself raises it; the others raise an error that
    names the process: of its kind among `kinds` (from the mildest on), or else a ProcessError.
    """
    if process_count() == 1:
        value, word = f()
        return value, [word]
    value, word, mine, said = None, "", None, [len(kinds), "", ""]
    try:
        value, word = f()
        said = [-1, "", word]
    except Exception as error:
        mine, known = error, isinstance(error, (TsunaxError, *kinds))
        grade = next((i for i, kind in enumerate(kinds) if isinstance(error, kind)), len(kinds))
        said = [grade, str(error) if known else told(error), ""]
    everyone = [json.loads(text) for text in gather(name, json.dumps(said), timeout, thread)]
    grade, problem, _ = worst = max(everyone, key=lambda said: said[0])
    if grade < 0:
        return value, [word for _, _, word in everyone]
    who = everyone.index(worst)
    if who == process_index() and mine is not None:
        raise mine
    raise [*kinds, ProcessError][grade](f"{name_of(who)}: {problem}")


def name_of(index: int) -> str:
    """How messages call a process."""
    peers = joining._peers_of_run
    return f"process {index}" if peers is None else peers.name_of(index)


def check_in_sync(**things: Any) -> None:
    """Raise ProcessError on all processes unless each thing (seed, tree, state) is the same on all.

    The message names up to 10 leaves that differ, with both sides. Containers and static fields
    count, too. Arrays are compared by shape, dtype and a hash of their bytes (an array that is
    spread over processes without the hash), objects by their fields, functions by name, code,
    defaults and closure.

    >>> check_in_sync(seed=0, params={"w": [1.0, 2.0]})
    """
    compare("check_in_sync()", things)


def compare(where: str, things: Mapping[str, Any], timeout: float | None = None) -> None:
    """`check_in_sync` at a place, whose name the message has where others are at another one."""
    if process_count() == 1:
        return
    parts: dict[str, str] = {}
    for name, thing in things.items():
        parts |= stable_text.parts_of(name, thing)
    if len(set(gather(where, stable_text.hash_of(json.dumps(parts).encode()), timeout))) == 1:
        return
    everyone = [json.loads(text) for text in gather(f"{where} in detail", json.dumps(parts))]
    differ = []
    for place in dict.fromkeys(place for said in everyone for place in said):
        texts = [said.get(place, "nothing") for said in everyone]
        if (other := next((text for text in texts if text != texts[0]), None)) is not None:
            at = len(os.path.commonprefix([other, texts[0]]))  # noqa: RUF071, characters
            got, first, who = _around(other, at), _around(texts[0], at), texts.index(other)
            differ.append(f"{place}: got {got} on {name_of(who)}, {first} on process 0")
    more = f"; and {len(differ) - SHOWN} more" if len(differ) > SHOWN else ""
    where = "" if where == "check_in_sync()" else f" at {where}"
    text = f"processes differ{where}: {'; '.join(differ[:SHOWN])}{more}"
    raise ProcessError(f"{text}. They must be the same on all.")


def _around(text: str, at: int) -> str:
    """What is around a place in a long text."""
    start = 0 if len(text) < 80 else max(0, at - 30)
    return f"{'…' * (start > 0)}{text[start : start + 80]}{'…' * (start + 80 < len(text))}"
