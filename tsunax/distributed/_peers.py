"""Messages between the processes of a run, in the key-value store of JAX's coordination service.

    say/<thread>/<number>/<i>         the message of process i at a gathering
    say/<thread>/<number>/verdict     the answer: all messages, or the fault
    event/<n>                         an end, a question, a tick; read in order by all
    answer/<i>                        the newest tick that process i has read
    report/<i>                        the wait of process i, if it has waited long

JAX starts the processes, and if one is lost, its heartbeats end the rest. This file adds the name
of the process that is lost or late, and one call at which all obey a signal. The first writer of a
key wins, so all processes read the same. Every wait ends.
"""

import collections
import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Container
from typing import Any

from tsunax.distributed._jax_private import Store
from tsunax.errors import ProcessError, message, told

PATIENCE = 5.0  # seconds in which all read the reason of an end, before process 0 and its store go
SLICE = 0.5  # seconds after which a wait looks again; Python handles Ctrl-C between two waits
LONG = 600.0  # seconds of one wait for an event: the store keeps a few bytes for each that ran out
TICKS = 10  # ticks in the time after which a process that answers none counts as lost


class Peers:
    """A process's view of all processes. `node` is the launcher's number of it, of `count`.

    They met `run` times before (no key is used twice). If another process ends, the next gathering
    raises; after `watch`, this process ends, too.
    """

    def __init__(self, client: Any, node: int, count: int, run: int = 0, timeout: float = 120.0):
        self.node: int = node
        self.count: int = count
        self.patience: float = LONG * TICKS
        self.timeout: float = timeout
        self.is_watched: bool = False
        self._store, self._is_failing = Store(client, run), False
        self._hellos: list[dict] = [{} for _ in range(count)]
        self._indices = list(range(count))  # the index of each node
        self._changed, self._closing = threading.Condition(), threading.Event()
        self._numbers = collections.Counter[str]()  # the number of gatherings, by thread
        self._next = 0  # the event that this process reads next
        self._round, self._value = 0, None  # the value of this round
        self._is_counting = self._has_sent_request = False
        self._calls = [0, 0]  # gatherings, and calls of `agree` since the last gathering
        self._goals: collections.deque[tuple[list[int], Any]] = collections.deque()
        self._ended = ""
        self._threads: list[threading.Thread] = []

    def meet(self, **facts: Any) -> None:
        """The first gathering: who is who. Raises ProcessError if processes differ in something."""
        me = {"host": socket.gethostname(), "pid": os.getpid(), "num_processes": self.count}
        self._hellos = [*map(json.loads, self.gather("start()", json.dumps({**me, **facts})))]
        first = self._hellos[0]
        for name in ("num_processes", *facts):
            for i, hello in enumerate(self._hellos):
                if hello.get(name) != first.get(name):
                    expected = f"{first.get(name)}, as on {self._name(0)}"
                    raise ProcessError(name, self._name(i), hello.get(name), expected)

    def watch(self, patience: float, timeout: float) -> None:
        """From now on this process ends if another answers no tick for `patience` seconds."""
        self.patience, self.timeout, self.is_watched = patience, timeout, True
        if self.node == 0:
            self._run(self._tick)

    def listen(self) -> None:
        self._run(self._listen)

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

    # ------------------------------------------------------------------------------------ gathering

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
            self._numbers[thread] += 1
            number = self._numbers[thread]
            if not thread:  # all are here: their calls of `agree` count anew
                self._calls = [number, 0]
        places = f"say/{thread.replace('/', ' ')}"
        said = json.dumps([self.node if index is None else index, name, text])
        try:
            self._store.write(f"{places}/{number}/{self.node}", said)
            timeout = self.timeout if timeout is None else timeout
            verdict = self._verdict(f"{places}/{number}", name, timeout)
            if "all" in verdict and self.node == 0:  # and all have read the previous messages
                self._store.delete(f"{places}/{number - 1}/")
        except ProcessError:
            raise
        except RuntimeError as error:
            raise ProcessError(self._ended or self._loss_reason(error)) from error
        if "wrong" in verdict:
            raise ProcessError(verdict["wrong"])
        self._indices = [index for index, _ in verdict["all"]]
        return [text for _, text in sorted(verdict["all"])]

    def _verdict(self, place: str, name: str, timeout: float) -> dict[str, Any]:
        """The answer; it is written by process 0, or by the first that has waited long enough."""
        start, has_reported = time.monotonic(), self.node > 0 or timeout <= self.timeout
        while self.is_watched or not self._ended:
            seconds_left, awaited = start + timeout - time.monotonic(), "verdict"
            if self.node == 0 or seconds_left <= 0:
                texts = self._store.texts_below(place)
                if "verdict" in texts:
                    return json.loads(texts["verdict"])
                said = {int(i): json.loads(text) for i, text in texts.items()}
                if verdict := self._judged(said, name, seconds_left <= 0):
                    self._store.write(f"{place}/verdict", json.dumps(verdict))
                    continue
                awaited = str(next(i for i in range(self.count) if i not in said))
                if not has_reported and time.monotonic() - start > self.timeout:
                    has_reported, text = True, self._no_word(name, said)
                    os.write(2, f"tsunax: after {self.timeout:g} s, {text}\n".encode())
            text = self._store.get(f"{place}/{awaited}", min(SLICE, seconds_left))
            if text is not None and awaited == "verdict":
                return json.loads(text)
        raise ProcessError(self._ended)

    def _judged(self, said: dict[int, list], name: str, is_late: bool) -> dict[str, Any]:
        """The answer to the messages of some processes; empty if more messages are needed."""
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

    def agree(self, request: Any) -> Any:
        """See `collectives.agree`. Waits only while the processes report how often they called."""
        with self._changed:
            is_free = lambda: self._ended or not self._is_counting
            if not self._changed.wait_for(is_free, self.timeout):
                counts = self._store.texts_below(f"count/{self._round}")
                raise ProcessError(self._no_word("agree()", [*map(int, counts)]))
            if self._ended:
                raise ProcessError(self._ended)
            self._calls[1] += 1
            if request and not self._has_sent_request and not self._goals:
                self._has_sent_request = True
                with contextlib.suppress(RuntimeError):  # process 0 is gone: the thread reports it
                    self._post({"ask": [self._round, request]})
            if not self._goals or self._calls < self._goals[0][0]:
                return 0
            return self._goals.popleft()[1]

    def reports(self, text: str) -> dict[str, str]:
        with contextlib.suppress(RuntimeError):  # process 0 and its store are gone
            self._store.write(f"report/{self.node}", text, replace=True)
            if self._indices[self.node] == 0:
                texts, nodes = self._store.texts_below("report"), {*range(self.count)}
                return {self._name(i): texts.get(str(i), "") for i in nodes - {self.node}}
        return {}

    # --------------------------------------------------------------------------------------- ending

    def fail(self, text: str, stay: bool = False) -> None:
        """End all other processes, which print the reason. Without `stay`, this process exits."""
        self._is_failing = True
        if stay:
            self._closing.set()
        with contextlib.suppress(RuntimeError):
            if self.is_watched and not stay:  # name the process that was lost
                tick, end = self._post({"tick": 0}), time.monotonic() + self.patience + PATIENCE
                answers = lambda: [*map(int, self._store.texts_below("answer").values())]
                while sum(n >= tick for n in answers()) < self.count and time.monotonic() < end:
                    time.sleep(SLICE / 50)
            self._post({"end": f"{self._name(self.node)} ended: {text}", "of": self.node})
            self._wait_until_heard(self.node)

    def close(self) -> None:
        """Part in peace. JAX would abort while the thread that listens waits in C++: wake it."""
        self._closing.set()
        with contextlib.suppress(RuntimeError):
            if not self.is_watched or self.node == 0:
                self._post({"close": -1 if self.is_watched else self.node})
        for thread in self._threads:
            thread.join(PATIENCE)

    def _post(self, event: dict[str, Any]) -> int:
        """Send an event to all processes, which read all events in the same order."""
        n = self._next
        while not self._store.write(f"event/{n}", json.dumps(event)):
            n += 1
        return n

    def _listen(self) -> None:
        silent = 0  # waits in a row that ran out: a pause of this process counts as one
        try:
            while not self._ended:
                is_collecting = self._is_counting and self.node == 0
                wait = SLICE / 25 if is_collecting else min(LONG, self.patience / (TICKS + 2))
                text = self._store.get(f"event/{self._next}", wait)
                if is_collecting and self._is_counting:
                    self._collect()
                if text is not None:
                    silent, self._next = 0, self._next + 1
                    event = json.loads(text)
                    if event.get("close") in (-1, self.node):
                        return
                    self._hear(event)
                elif self.is_watched and self.node and (silent := silent + 1) > TICKS:
                    self._end(self._silence_reason(0))
        except Exception as error:
            self._end(self._loss_reason(error))

    def _hear(self, event: dict[str, Any]) -> None:
        if "end" in event:
            is_of_this_process = self._is_failing and not event.get("lost")
            self._end("" if is_of_this_process else event["end"], event["of"])
        elif "tick" in event:
            self._store.write(f"answer/{self.node}", str(self._next - 1), replace=True)
        with self._changed:
            if "ask" in event and event["ask"][0] == self._round and not self._is_counting:
                self._is_counting, self._value = True, event["ask"][1]
                self._store.write(f"count/{self._round}/{self.node}", json.dumps(self._calls))
            elif "goal" in event and event["goal"][0] == self._round:
                self._goals.append((event["goal"][1], self._value))
                self._is_counting = self._has_sent_request = False
                self._round += 1
            self._changed.notify_all()

    def _collect(self) -> None:
        counts = self._store.texts_below(f"count/{self._round}")
        if len(counts) == self.count:
            gatherings, calls = max(json.loads(text) for text in counts.values())
            self._post({"goal": [self._round, [gatherings, calls + 1]]})
            self._store.delete(f"count/{self._round}/")

    def _tick(self) -> None:
        """Process 0 names a process that answers no tick; its own pauses do not count."""
        missed, previous = collections.Counter[int](), -1
        with contextlib.suppress(RuntimeError):  # the thread that listens reports it
            while not self._closing.wait(self.patience / (TICKS + 2)):
                tick, answers = self._post({"tick": 0}), self._store.texts_below("answer")
                for i in range(1, self.count):
                    has_answered = int(answers.get(str(i), -1)) >= previous
                    missed[i] = 0 if has_answered else missed[i] + 1
                    if missed[i] >= TICKS:
                        self._post({"end": self._silence_reason(i), "of": i, "lost": True})
                        return
                previous = tick
                self._store.delete(f"event/{tick - 10 * TICKS}")  # all that live have read it

    def _silence_reason(self, node: int) -> str:
        why = "it was killed or stopped, or its host or network is down"
        return f"{self._name(node)} has been silent for {self.patience:g} s: {why}"

    def _loss_reason(self, error: Exception) -> str:
        if self.node == 0 or "UNAVAILABLE" not in str(error):
            return f"{self._name(self.node)} cannot hear the others: {told(error).splitlines()[0]}"
        return f"{self._name(0)} is gone: it was killed, or crashed"

    def _wait_until_heard(self, ending_node: int) -> None:
        """Process 0 carries the store: it stays until all have read which process ended."""
        listeners = {str(i) for i in range(1, self.count) if i != ending_node}
        end = time.monotonic() + (PATIENCE if self.node == 0 else 0)
        while time.monotonic() < end and listeners - set(self._store.texts_below("heard")):
            time.sleep(SLICE / 50)

    def _end(self, text: str, ending_node: int | None = None) -> None:
        """This process is to end: because of the event of a process, or as it hears no other."""
        with self._changed:
            self._ended = self._ended or text or "this process has ended the run"
            self._changed.notify_all()
        if ending_node is not None:
            with contextlib.suppress(RuntimeError):
                self._store.write(f"heard/{self.node}", "")
                self._wait_until_heard(ending_node)
        if self.is_watched and not self._closing.is_set():
            leave(text, self._indices[self.node])


def leave(text: str, index: int) -> None:
    """Say why, and end this process: its main thread may be in a collective for ever."""
    if text:
        text = f"\ntsunax.errors.ProcessError: {text}. This process ({index}) ends too.\n"
        os.write(2, text.encode())
    # In a thread, because another may hold the stream. No thread starts at the interpreter's exit.
    with contextlib.suppress(RuntimeError):
        thread = threading.Thread(target=sys.stdout.flush, daemon=True)
        thread.start()
        thread.join(1.0)
    os._exit(1)
