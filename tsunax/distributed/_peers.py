"""Messages between the processes of a run, in the key-value store of JAX's coordination service.

    say/<thread>/<number>/<i>         the message of process i at a gathering
    say/<thread>/<number>/verdict     the answer: all messages, or what was wrong
    event/<n>                         an exception, a lost process, a question; read in order by all
    beat/<i>                          a number that grows while process i is alive

`jax.distributed` runs the service in process 0, at the one port that the user named. The first
writer of a key wins, so that all processes read the same verdict and the same events. Every wait
ends. `jax._src.distributed` is not public; orbax and others use it, too. It starts no backend.
"""

import collections
import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Container
from typing import Any

from jax._src import distributed as _jax_distributed
from jax._src import xla_bridge

from tsunax.errors import ProcessError, message, told

# seconds in which the others read what ends them, before process 0 and its service go
PATIENCE = 5.0
SLICE = 0.5  # seconds after which a wait looks again; Python handles Ctrl-C between two of them
# seconds of one wait for an event: the service keeps a few bytes for each wait that ran out
LONG = 600.0
_GONE = "is gone: it was killed, or crashed"


class Store:
    """JAX's key-value store, below `tsunax/<run>/`. RuntimeError when process 0 is gone."""

    def __init__(self, client: Any, run: int):
        self._client, self._root = client, f"tsunax/{run}"

    def put(self, key: str, text: str) -> bool:
        """Write a key once. Returns False if it was written before."""
        try:
            self._client.key_value_set(f"{self._root}/{key}", text)
        except RuntimeError as error:
            if "ALREADY_EXISTS" not in str(error):
                raise
            return False
        return True

    def replace(self, key: str, text: str) -> None:
        self._client.key_value_set(f"{self._root}/{key}", text, allow_overwrite=True)

    def get(self, key: str, seconds: float) -> str | None:
        """The text of a key once it is written; None if not within these seconds."""
        milliseconds = max(1, round(1000 * seconds))
        try:
            return self._client.blocking_key_value_get(f"{self._root}/{key}", milliseconds)
        except RuntimeError as error:
            if "GetKeyValue() timed out" not in str(error):
                raise
            return None

    def under(self, key: str) -> dict[str, str]:
        """The texts of `key/0`, `key/verdict` and so on, as far as they are written."""
        found = self._client.key_value_dir_get(f"{self._root}/{key}/")
        return {name.rpartition("/")[2]: text for name, text in found}

    def delete(self, key: str) -> None:
        self._client.key_value_delete(f"{self._root}/{key}/")


def initialized() -> tuple[Any, int, int] | None:
    """(client, the launcher's number, count) of `jax.distributed`; None before it starts."""
    state = _jax_distributed.global_state
    return None if state.client is None else (state.client, state.process_id, state.num_processes)


def forget() -> None:
    """Let `jax.distributed` be started again: after a failed start, and in a forked child."""
    state = _jax_distributed.global_state
    ours = state.client, state.service, state.preemption_sync_manager
    for leaked in (*ours, *xla_bridge._backends.values()):  # destructors would wait for ever
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(leaked))
    state.client = state.service = state.preemption_sync_manager = None


class Peers:
    """A process's view of the others. `node` is the launcher's number of it, of `count`.

    They met `run` times before (no key is used twice). Before `watch`, the end of another process
    is an error of the next gathering; after it, the end of this one.
    """

    def __init__(self, client: Any, node: int, count: int, run: int = 0, timeout: float = 120.0):
        self.node: int = node
        self.count: int = count
        self.patience: float = 30.0
        self.timeout: float = timeout
        self._store, self._ends = Store(client, run), False
        self._hellos: list[dict] = [{} for _ in range(count)]
        self._indices = list(range(count))  # the index of each node
        self._changed = threading.Condition()
        self._numbers: dict[str, int] = {}  # of gatherings, by thread
        self._old: dict[str, list[str]] = {}
        self._next = 0  # the event that this process reads next
        self._round = self._value = 0
        self._is_counting = self._has_asked = self._is_failing = False
        self._closing = threading.Event()
        self._calls: list[int] = [0, 0]  # gatherings, and calls of `agree` since the last of them
        self._goals: collections.deque[tuple[list[int], int]] = collections.deque()
        self._ended, self._answered = "", time.monotonic()
        self._threads: list[threading.Thread] = []

    def meet(self, **hello: Any) -> None:
        """The first gathering: who is who. Raises ProcessError if processes differ in something."""
        me = {"host": socket.gethostname(), "pid": os.getpid(), "num_processes": self.count}
        texts = self.gather("start()", json.dumps({**me, **hello}))
        self._hellos = [json.loads(text) for text in texts]
        first = self._hellos[0]
        for name in ("num_processes", *hello):
            for i, other in enumerate(self._hellos):
                if other.get(name) != first.get(name):
                    expected = f"{first.get(name)}, as on {self._name(0)}"
                    raise ProcessError(name, self._name(i), other.get(name), expected)

    def watch(self, patience: float, timeout: float) -> None:
        """From now on this process ends when another one has not beaten for `patience` seconds."""
        self.patience, self.timeout = patience, timeout
        self._ends, self._answered = True, time.monotonic()
        self._run(self._beat)
        self._run(self._watch)

    def listen(self) -> None:
        self._run(self._listen)

    def _run(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name=f"tsunax{work.__name__}", daemon=True)
        self._threads.append(thread)
        thread.start()

    # ---------------------------------------------------------------------------------- for callers

    def name_of(self, index: int) -> str:
        is_known = index in self._indices
        return self._name(self._indices.index(index)) if is_known else f"process {index}"

    def _name(self, node: int) -> str:
        hello = self._hellos[node]
        where = f" (host {hello['host']}, pid {hello['pid']})" if hello else ""
        return f"process {self._indices[node]}{where}"

    def gather(
        self,
        name: str,
        text: str = "",
        timeout: float | None = None,
        thread: str = "",
        index: int | None = None,
    ) -> list[str]:
        """What all processes said here, by index; a `thread` has gatherings of its own."""
        timeout = self.timeout if timeout is None else timeout
        with self._changed:
            number = self._numbers[thread] = self._numbers.get(thread, 0) + 1
            if not thread:  # all are here: who called `agree` less often before is even again
                self._calls = [number, 0]
        place = f"say/{thread.replace('/', ' ')}/{number}"
        said = json.dumps([self.node if index is None else index, name, text])
        try:
            self._store.put(f"{place}/{self.node}", said)
            verdict = self._verdict(place, name, timeout)
            if "all" in verdict and self.node == 0:  # nobody reads the older ones any more
                for old in self._old.pop(thread, []):
                    self._store.delete(old)
            self._old.setdefault(thread, []).append(place)
        except ProcessError:
            raise
        except RuntimeError as error:
            raise ProcessError(self._ended or self._lost(error)) from error
        if "wrong" in verdict:
            raise ProcessError(verdict["wrong"])
        self._indices = [each[0] for each in verdict["all"]]
        return [each[1] for each in sorted(verdict["all"])]

    def _verdict(self, place: str, name: str, timeout: float) -> dict[str, Any]:
        """The answer; it is written by process 0, or by the first that has waited long enough."""
        start, has_said = time.monotonic(), timeout <= self.timeout
        while True:
            if self._ended and not self._ends:
                raise ProcessError(self._ended)
            left, awaited = start + timeout - time.monotonic(), "verdict"
            if self.node == 0 or left <= 0:
                found = self._store.under(place)
                if "verdict" in found:
                    return json.loads(found["verdict"])
                said = {int(i): json.loads(text) for i, text in found.items()}
                if verdict := self._judged(said, name, left <= 0):
                    if self._store.put(f"{place}/verdict", json.dumps(verdict)):
                        return verdict
                    continue
                awaited = str(next(i for i in range(self.count) if i not in said))
            text = self._store.get(f"{place}/{awaited}", min(SLICE, left))
            if text is not None and awaited == "verdict":
                return json.loads(text)
            if not has_said and time.monotonic() - start > self.timeout:
                has_said, me = True, f"tsunax: process {self._indices[self.node]}"
                text = f"{me} has waited for the others for {self.timeout:g} s at {name}\n"
                os.write(2, text.encode())

    def _judged(self, said: dict[int, list], name: str, is_late: bool) -> dict[str, Any]:
        """The answer to what some processes said; nothing before it can be given."""
        first = min(said)
        for i, (_, call, _) in sorted(said.items()):
            if call != said[first][1]:
                expected = f"{said[first][1]}, as on {self._name(first)}"
                fix = "All processes call the same, in the same order."
                return {"wrong": message("call", "", f"{call} on {self._name(i)}", expected, fix)}
        if len(said) == self.count:
            return {"all": [[index, text] for _, (index, _, text) in sorted(said.items())]}
        return {"wrong": self._no_word(name, said)} if is_late else {}

    def _no_word(self, name: str, said: Container[int]) -> str:
        missing = ", ".join(self._name(i) for i in range(self.count) if i not in said)
        return message(name, "", f"no word of {missing}", "all processes")

    def agree(self, asked: int) -> int:
        """See `collectives.agree`. Waits only while the processes report how often they called."""
        with self._changed:
            free = lambda: self._ended or not self._is_counting
            if not self._changed.wait_for(free, self.timeout):
                counts = self._store.under(f"count/{self._round}")
                raise ProcessError(self._no_word("agree()", list(map(int, counts))))
            if self._ended:
                raise ProcessError(self._ended)
            self._calls[1] += 1
            if asked and not self._has_asked and not self._goals:
                self._has_asked = True
                with contextlib.suppress(RuntimeError):  # process 0 is gone: the thread says so
                    self._post({"ask": [self._round, asked]})
            if not self._goals or self._calls < self._goals[0][0]:
                return 0
            return self._goals.popleft()[1]

    def fail(self, text: str, stay: bool = False) -> None:
        """End all other processes, which say why; and this one, unless it stays."""
        self._is_failing = True
        if stay:
            self._closing.set()
        with contextlib.suppress(RuntimeError):
            if not stay:
                self._wait_for_signs()
            self._post({"end": f"{self._name(self.node)} ended: {text}", "of": self.node})
            self._wait_until_heard(self.node)
        if not stay:
            for thread in self._threads[:1]:
                thread.join(PATIENCE)

    def _wait_for_signs(self) -> None:
        """Return once all other processes have answered, which living ones do within milliseconds.

        While this waits, the dead one is named for its silence, in place of the one that noticed.
        """
        until = time.monotonic() + (self.patience + PATIENCE if self._ends else 0)
        self._post({"ping": self.node})
        while not self._ended and time.monotonic() < until:
            if len(self._store.under(f"pong/{self.node}")) == self.count:
                return
            time.sleep(SLICE / 50)

    def close(self) -> None:
        """Part in peace. JAX would abort while the thread that listens waits in C++: wake it."""
        self._closing.set()
        with contextlib.suppress(RuntimeError):
            if not self._ends or self.node == 0:
                self._post({"close": -1 if self._ends else self.node})
        for thread in self._threads:
            thread.join(PATIENCE)

    # ---------------------------------------------------------------------------------- the threads

    def _post(self, event: dict[str, Any]) -> None:
        """Say something to all processes; the events of all of them have one order."""
        n = self._next
        while not self._store.put(f"event/{n}", json.dumps(event)):
            n += 1

    def _listen(self) -> None:
        try:
            while not self._ended:
                is_collecting = self._is_counting and self.node == 0
                text = self._store.get(f"event/{self._next}", SLICE / 25 if is_collecting else LONG)
                if is_collecting and self._is_counting:
                    self._collect()
                if text is not None:
                    self._next += 1
                    event = json.loads(text)
                    if event.get("close") in (-1, self.node):
                        return
                    self._hear(event)
        except Exception as error:
            self._end(self._lost(error))

    def _hear(self, event: dict[str, Any]) -> None:
        if "end" in event:
            is_mine = self._is_failing and not event.get("lost")
            self._end("" if is_mine else event["end"], event["of"])
        elif "ping" in event:
            self._store.put(f"pong/{event['ping']}/{self.node}", "")
        with self._changed:
            if "ask" in event and event["ask"][0] == self._round and not self._is_counting:
                self._is_counting, self._value = True, event["ask"][1]
                self._store.put(f"count/{self._round}/{self.node}", json.dumps(self._calls))
            elif "goal" in event and event["goal"][0] == self._round:
                self._goals.append((event["goal"][1], self._value))
                self._is_counting = self._has_asked = False
                self._round += 1
            self._changed.notify_all()

    def _collect(self) -> None:
        counts = self._store.under(f"count/{self._round}")
        if len(counts) == self.count:
            gatherings, calls = max(json.loads(text) for text in counts.values())
            self._post({"goal": [self._round, [gatherings, calls + 1]]})

    def _beat(self) -> None:
        pause, beats, seen = min(1.0, self.patience / 10), 0, {}
        ticked = time.monotonic()
        try:
            while not self._closing.wait(pause):
                beats += 1
                self._store.replace(f"beat/{self.node}", str(beats))
                now = self._answered = time.monotonic()
                if self.node == 0:
                    stood_still = now - ticked > pause + self.patience / 4  # as the others may
                    ticked, found = now, self._store.under("beat")
                    for i in range(1, self.count):
                        if stood_still or i not in seen or seen[i][0] != found.get(str(i)):
                            seen[i] = found.get(str(i)), now
                        elif (silent := now - seen[i][1]) > self.patience:
                            why = "it was killed or stopped, or its host or network is down"
                            text = f"{self._name(i)} has been silent for {silent:.0f} s: {why}"
                            return self._post({"end": text, "of": i, "lost": True})
        except Exception as error:
            self._end(self._lost(error))

    def _watch(self) -> None:
        """End when the service does not answer: if process 0 is stopped, every call to it waits.

        During an abort the thread of JAX that brings answers sleeps, so this asks the port itself.
        """
        pause = min(1.0, self.patience / 10)
        before = time.monotonic()
        while not self._closing.wait(pause) and not self._ended:
            now = time.monotonic()
            if now - before > pause + self.patience / 4:
                self._answered = now
            before, silent = now, now - self._answered
            if silent > 2 * pause and _is_refused():
                self._end(f"{self._name(0)} {_GONE}")
            if silent > self.patience:
                why = "it was stopped, or its host or network is down"
                why = why if self.node else "JAX's service does not answer"
                self._end(f"{self._name(0)} has been silent for {silent:.0f} s: {why}")

    def _lost(self, error: Exception) -> str:
        if self.node == 0 or "UNAVAILABLE" not in str(error):
            return f"{self._name(self.node)} cannot hear the others: {told(error).splitlines()[0]}"
        return f"{self._name(0)} {_GONE}"

    def _wait_until_heard(self, of: int) -> None:
        """Process 0 carries the service: it stays until the others have read who ended."""
        others = {str(i) for i in range(1, self.count) if i != of}
        until = time.monotonic() + (PATIENCE if self.node == 0 else 0)
        while time.monotonic() < until and others - set(self._store.under("heard")):
            time.sleep(SLICE / 50)

    def _end(self, text: str, of: int | None = None) -> None:
        """This process is to end: because of the event of a process, or as it hears no other."""
        with self._changed:
            self._ended = self._ended or text or "this process has ended the run"
            self._changed.notify_all()
        if of is not None:
            with contextlib.suppress(RuntimeError):
                self._store.put(f"heard/{self.node}", "")
                self._wait_until_heard(of)
        if self._ends and not self._closing.is_set():
            leave(text, self._indices[self.node])


def _is_refused() -> bool:
    """Whether nobody listens any more at the port of the coordination service."""
    host, _, port = (_jax_distributed.global_state.coordinator_address or "").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), SLICE).close()
    except (OSError, ValueError) as error:  # another one is no evidence
        return isinstance(error, ConnectionRefusedError)
    return False


def name_process_0() -> None:
    """Let Python name process 0 before JAX aborts this process because of its death.

    JAX's client aborts within milliseconds, without a name. Here the thread that aborts sleeps for
    six seconds first: C's `sleep` itself is the handler of SIGABRT, whose number is 6. By then a
    thread of `Peers` has ended this process. Any other abort comes six seconds later, too, without
    faulthandler's print. JAX 0.7 exits without an abort.
    """
    if sys.platform != "win32" and signal.SIGABRT == 6:
        libc = ctypes.CDLL(None)
        libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
        libc.signal(int(signal.SIGABRT), ctypes.cast(libc.sleep, ctypes.c_void_p))


def leave(text: str, index: int) -> None:
    """Say why, and end this process: its main thread may be in a collective for ever."""
    if text:
        text = f"\ntsunax.errors.ProcessError: {text}. This process ({index}) ends too.\n"
        os.write(2, text.encode())

    def flush() -> None:
        with contextlib.suppress(Exception):
            sys.stdout.flush()

    # in a thread: whoever holds the stream may be stuck. None starts at the exit of the interpreter
    with contextlib.suppress(RuntimeError):
        thread = threading.Thread(target=flush, daemon=True)
        thread.start()
        thread.join(1.0)
    os._exit(1)
