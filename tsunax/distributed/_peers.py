"""The name of a process that is lost or late, and signals that all processes obey.

    say/<thread>/<number>/<i>, all    the message of process i at a gathering; the messages of all
    news/end, news/request <number>   why the run ends; a request on which all processes agree
    count/<number>/<i>                how often process i has called `agree`
    heard/<i>, report/<i>             process i has read the end; the wait of process i
    parted/<i>                        process i has parted: nobody misses it

These are keys of JAX's coordination service, which process 0 carries. The first writer of a key
wins, so all processes read the same. JAX starts processes and sends their heartbeats. No other file
uses private parts of JAX, and tests run them on every JAX that is supported.
"""

import collections
import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from jax._src import distributed
from jax._src.clusters import ClusterEnv

from tsunax.errors import ProcessError, told

PATIENCE = 5.0  # seconds in which all read the reason of an end, before process 0 and its store go
SLICE = 0.5  # seconds between two looks of a wait; Python handles Ctrl-C between them
NEWS = 0.1  # seconds between two looks for an end or a request
TICKS = 10  # looks without an answer of process 0 after which it counts as lost
EARLY = 0.8  # the part of `patience` for all TICKS: after the whole, JAX aborts without a name

connection: Any = distributed.global_state  # its `client` is None before JAX starts
detected = (
    ClusterEnv.auto_detect_unset_distributed_params
)  # the settings of a launcher, if JAX finds one


class Store:
    """The keys below `tsunax/`. Its methods raise RuntimeError when process 0 is gone."""

    def __init__(self, client: Any):
        self._client = client

    def write(self, key: str, value: Any, replace: bool = False) -> bool:
        """Write a key. Returns False if it was written before, and is not to be replaced."""
        try:
            self._client.key_value_set(f"tsunax/{key}", json.dumps(value), allow_overwrite=replace)
        except RuntimeError as error:
            if "ALREADY_EXISTS" not in str(error):
                raise
            return False
        return True

    def get(self, key: str, seconds: float = 0.0) -> Any:
        """The value of a key once it is written; None if not within these seconds."""
        milliseconds = max(1, round(1000 * seconds))
        try:
            return json.loads(self._client.blocking_key_value_get(f"tsunax/{key}", milliseconds))
        except RuntimeError as error:
            if "GetKeyValue() timed out" not in str(error):
                raise
            return None

    def below(self, key: str) -> dict[str, Any]:
        """The values of `key/0`, `key/all` and so on, as far as they are written."""
        texts = self._client.key_value_dir_get(f"tsunax/{key}/")
        return {name.rpartition("/")[2]: json.loads(text) for name, text in texts}

    def delete(self, key: str) -> None:
        self._client.key_value_delete(f"tsunax/{key}")

    def live_nodes(self, count: int) -> dict[int, int]:
        """The processes with heartbeats, once all of these call it; and the start of each."""
        live = self._client.get_live_nodes([*range(count)])
        return live if isinstance(live, dict) else dict.fromkeys(live, 0)  # a list on jax 0.7


class Peers:
    """A process's view of all processes. `node` is the launcher's number of it, of `count`.

    If another process ends, the next gathering raises; after `watch`, this process ends, too.
    """

    def __init__(self, client: Any, node: int, count: int, timeout: float = 120.0):
        self.node: int = node
        self.count: int = count
        self.timeout: float = timeout
        self.patience: float = 0.0  # seconds of JAX's heartbeats
        self.is_watched: bool = False
        self._store = Store(client)
        # host, pid and facts of each node, from `meet`
        self._hellos: list[dict[str, Any]] = [{} for _ in range(count)]
        self._indices = list(range(count))  # JAX's process index of each node
        self._changed, self._closing = threading.Condition(), threading.Event()
        self._gatherings = collections.Counter[str]()  # by thread
        self._rounds = 0  # in which all processes were alive
        self._has_answer = threading.Event()  # process 0 has answered since the last look
        self._requests = 0  # on which all have agreed
        self._is_counting = self._has_requested = False
        self._calls = [0, 0]  # gatherings, and calls of `agree` since the last gathering
        # (the value of `_calls` at which all processes obey, the request)
        self._goals: collections.deque[tuple[list[int], Any]] = collections.deque()
        self._reason = ""  # why the run ends
        self._threads: list[threading.Thread] = []

    def meet(self, **facts: Any) -> None:
        """The first gathering: who is who. Raises ProcessError if processes differ in a fact."""
        place = {"host": socket.gethostname(), "pid": os.getpid()}
        self._hellos = [*map(json.loads, self.gather("start()", json.dumps(place | facts)))]
        for name in facts:
            expected = self._hellos[0].get(name)
            for i, hello in enumerate(self._hellos):
                if hello.get(name) != expected:
                    raise ProcessError(
                        name,
                        self._name(i),
                        got=hello.get(name),
                        expected=f"{expected}, as on {self._name(0)}",
                    )
        self._run(self._listen)

    def watch(self, timeout: float, patience: float = 0.0) -> None:
        """End this process if another ends, or has no heartbeat for `patience` seconds."""
        self.timeout, self.patience, self.is_watched = timeout, patience, True
        if patience:
            self._run(self._count_rounds)
        if patience and self.node:
            self._run(self._expect_process_0)

    def _run(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name=f"tsunax{work.__name__}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def name_of(self, index: int) -> str:
        return self._name(self._indices.index(index))

    def _name(self, node: int) -> str:
        hello = self._hellos[node]
        place = f" (host {hello['host']}, pid {hello['pid']})" if hello else ""
        return f"process {self._indices[node]}{place}"

    def gather(
        self,
        name: str,
        text: str = "",
        timeout: float | None = None,
        thread: str = "",
        index: int | None = None,
    ) -> list[str]:
        """The messages of all processes, by index; each `thread` has its own gatherings."""
        with self._changed:
            self._gatherings[thread] += 1
            number = self._gatherings[thread]
            if not thread:  # all are here: their calls of `agree` count anew
                self._calls = [number, 0]
        places = f"say/{thread.replace('/', ' ')}"
        try:
            said = self.node if index is None else index, name, text
            said_by_all = self._exchanged(f"{places}/{number}", said, timeout or self.timeout)
            missing = [self._name(i) for i in range(self.count) if str(i) not in said_by_all]
            if not missing and self.node == 0:  # and all have read the previous messages
                self._store.delete(f"{places}/{number - 1}/")
        except ProcessError:
            raise
        except RuntimeError as error:
            raise ProcessError(self._reason or self._loss_reason(error)) from error
        calls = {int(i): call for i, (_, call, _) in sorted(said_by_all.items())}
        first = min(calls)
        for i, call in calls.items():
            if call != calls[first]:
                raise ProcessError(
                    "call",
                    "",
                    got=f"{call} on {self._name(i)}",
                    expected=f"{calls[first]}, as on {self._name(first)}",
                    fix="All processes call the same, in the same order.",
                )
        if missing:
            raise ProcessError(name, "", f"no word of {', '.join(missing)}", "all processes")
        self._indices = [said_by_all[str(i)][0] for i in range(self.count)]
        return [text for _, _, text in sorted(said_by_all.values())]

    def _exchanged(self, place: str, said: Any, timeout: float) -> dict[str, Any]:
        """The messages of all processes, as far as they came in time."""
        if not self._store.write(f"{place}/{self.node}", said):
            raise ProcessError("process", said[1], "one that was started again", "a new run of all")
        end, key = time.monotonic() + timeout, f"{place}/all"
        awaited = [f"{place}/{i}" for i in range(self.count)] if self.node == 0 else [key]
        while awaited and (seconds_left := end - time.monotonic()) > 0:
            if self._reason and not self.is_watched:
                raise ProcessError(self._reason)
            if self._store.get(awaited[0], min(SLICE, seconds_left)) is not None:
                del awaited[0]
            elif self._store.get(key) is not None:  # another process has given up
                break
        if self.node == 0 or awaited:
            self._store.write(key, self._store.below(place))
        return self._store.get(key, timeout)

    def reports(self, text: str) -> dict[str, str]:
        with contextlib.suppress(RuntimeError):  # process 0 and its store are gone
            self._store.write(f"report/{self.node}", text, replace=True)
            if self._indices[self.node] == 0:
                texts, nodes = self._store.below("report"), {*range(self.count)}
                return {self._name(i): texts.get(str(i), "") for i in nodes - {self.node}}
        return {}

    def agree(self, request: Any) -> Any:
        """See `collectives.agree`. Waits only while the processes report how often they called."""
        with self._changed:
            is_free = lambda: self._reason or not self._is_counting
            if not self._changed.wait_for(is_free, self.timeout):
                counts = self._store.below(f"count/{self._requests}")
                missing = (self._name(i) for i in range(self.count) if str(i) not in counts)
                raise ProcessError(
                    "agree()", "", got=f"no word of {', '.join(missing)}", expected="all processes"
                )
            if self._reason:
                raise ProcessError(self._reason)
            self._calls[1] += 1
            if request and not self._has_requested and not self._goals:
                self._has_requested = True
                with contextlib.suppress(RuntimeError):  # process 0 is gone: the thread reports it
                    self._store.write(f"news/request {self._requests}", request)
            if not self._goals or self._calls < self._goals[0][0]:
                return 0
            return self._goals.popleft()[1]

    def _count_calls(self, request: Any) -> None:
        """Report how often this process called `agree`.

        When all processes have reported, the request is due in the call after the largest count.
        """
        number = self._requests
        with self._changed:
            self._is_counting, calls = True, self._calls
            self._store.write(f"count/{number}/{self.node}", calls)
        calls_of_all = self._store.below(f"count/{number}")
        if len(calls_of_all) < self.count:
            return
        gatherings, calls_since = max(calls_of_all.values())
        if self.node == 0:  # all have read the keys of the previous request
            self._store.delete(f"news/request {number - 1}")
            self._store.delete(f"count/{number - 1}/")
        with self._changed:
            self._goals.append(([gatherings, calls_since + 1], request))
            self._is_counting = self._has_requested = False
            self._requests += 1
            self._changed.notify_all()

    def fail(self, text: str, stay: bool = False) -> None:
        """End all other processes, which print the reason. Without `stay`, the caller exits."""
        if stay:
            self._closing.set()
        # This failure may be a collective that has lost a process. In two more rounds, either that
        # process is named as the reason, or all processes are alive.
        rounds, end = self._rounds + 2, time.monotonic() + 2 * self.patience
        while not stay and self._rounds < rounds and time.monotonic() < end:
            time.sleep(SLICE / 50)
        with contextlib.suppress(RuntimeError):
            reason = f"{self._name(self.node)} ended: {text}"
            self._store.write("news/end", [self.node, reason])
            self._wait_until_heard(self.node)

    def part(self, shutdown: Callable[[], None] | None) -> None:
        """Leave the other processes, and end the threads: at exit Python aborts threads in JAX."""
        self._closing.set()
        with contextlib.suppress(RuntimeError):  # process 0 is gone
            self._store.write(f"parted/{self.node}", "")
        if shutdown is not None and self.node:
            shutdown()
        # The thread of process 0 that counts rounds ends when no other process lives.
        for thread in self._threads:
            thread.join(PATIENCE + (0 if self.node else 2 * self.patience))
        if shutdown is not None and not self.node:  # all clients are gone, and the service may stop
            shutdown()

    def _listen(self) -> None:
        try:
            while not self._closing.wait(NEWS / 5 if self._is_counting else NEWS):
                news = self._store.below("news")
                self._has_answer.set()
                if "end" in news:
                    node, reason = news["end"]
                    return self._end("" if node == self.node else reason, node)
                if request := news.get(f"request {self._requests}"):
                    self._count_calls(request)
        except RuntimeError as error:
            self._end(self._loss_reason(error))

    def _count_rounds(self) -> None:
        """Meet all that live, again and again: JAX leaves out who has no heartbeat."""
        first: dict[int, int] = {}
        with contextlib.suppress(RuntimeError):  # the thread that listens reports it
            while len(live := self._store.live_nodes(self.count)) > 1 or not self._closing.is_set():
                first = first or live
                absent = [i for i in range(self.count) if i not in live or live[i] != first[i]]
                parted_nodes = self._store.below("parted") if absent else {}
                for i in absent:
                    if str(i) not in parted_nodes and not self._closing.is_set():
                        return self._end(self._silence(i, self.patience), i)
                self._rounds += 1
                self._closing.wait(SLICE)

    def _expect_process_0(self) -> None:
        """JAX aborts without a name if process 0 is stopped: this thread is a bit earlier."""
        silent = 0  # looks in a row: a pause of this process counts as one
        while silent < TICKS and not self._closing.is_set():
            has_answer = self._has_answer.wait(EARLY * self.patience / TICKS)
            silent = 0 if has_answer else silent + 1
            self._has_answer.clear()
        if silent:
            self._end(self._silence(0, EARLY * self.patience))

    def _silence(self, node: int, seconds: float) -> str:
        why = "it was killed or stopped, or its host or network is down"
        return f"{self._name(node)} has been silent for {seconds:g} s: {why}"

    def _loss_reason(self, error: Exception) -> str:
        if self.node == 0 or "UNAVAILABLE" not in str(error):
            return f"{self._name(self.node)} cannot hear the others: {told(error).splitlines()[0]}"
        return f"{self._name(0)} is gone: it was killed, or crashed"

    def _wait_until_heard(self, ending_node: int) -> None:
        """Process 0 carries the store: it stays until all have read which process ended."""
        listeners = {str(i) for i in range(1, self.count) if i != ending_node}
        end = time.monotonic() + (PATIENCE if self.node == 0 else 0)
        while time.monotonic() < end and listeners - set(self._store.below("heard")):
            time.sleep(SLICE / 50)

    def _end(self, reason: str, ending_node: int | None = None) -> None:
        """Note why the run ends: a process has ended, or is gone. After `watch`, exit."""
        with self._changed:
            self._reason = self._reason or reason or "this process has ended the run"
            self._changed.notify_all()
        if ending_node is not None:
            with contextlib.suppress(RuntimeError):
                self._store.write(f"heard/{self.node}", "")
                self._wait_until_heard(ending_node)
        if self.is_watched and not self._closing.is_set():
            leave(reason, self._indices[self.node])


def leave(reason: str, index: int) -> None:
    """Say why, and end this process: its main thread may be in a collective for ever."""
    if reason:
        text = f"\ntsunax.errors.ProcessError: {reason}. This process ({index}) ends too.\n"
        os.write(2, text.encode())
    # In a thread, because another may hold the stream. No thread starts at the interpreter's exit.
    with contextlib.suppress(RuntimeError):
        thread = threading.Thread(target=sys.stdout.flush, daemon=True)
        thread.start()
        thread.join(1.0)
    os._exit(1)
