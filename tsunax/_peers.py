"""The line between the processes of one run: who is there, who is gone, and what all of them said.

    process i  --hello, beats, words-->  hub (a thread of process 0)  --what all said, or who is gone-->  every process

JAX notices a dead process after its heartbeat, names it by a number or not at all, and aborts; it cannot tell who did
not come. So the processes first meet here, over plain sockets, and the sockets stay: the kernel closes those of a
process that dies, and one that stands still sends no beat. Whoever is left then ends with a line that names it. All
waits end. Nothing here knows of JAX.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from tsunax.errors import ProcessError, message, told

PATIENCE = 5.0  # seconds for a few bytes to go, or for what has connected to say who it is


class Line:
    """One end of a connection: JSON values, one a line. Any thread may send, one reads."""

    def __init__(self, connection: socket.socket):
        self.socket, self._rest, self._sending = connection, b"", threading.Lock()
        connection.settimeout(PATIENCE)  # of a send to who does not read; what is read has come already
        with contextlib.suppress(OSError):  # no TCP within a process
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, value: Any) -> None:
        """Raises OSError where the other end is gone."""
        with self._sending:
            self.socket.sendall(json.dumps(value).encode() + b"\n")

    def read(self) -> list[Any] | None:
        """The values that have come; waits for some bytes; None at the end. Raises OSError, ValueError for no JSON."""
        data = self.socket.recv(1 << 16)
        if not data:
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def read_one(self, deadline: float) -> Any:
        """The next value. Raises OSError (TimeoutError after the deadline) or ValueError."""
        values: list[Any] | None = []
        try:
            while not values:
                self.socket.settimeout(max(deadline - time.monotonic(), 1e-3))
                values = self.read()
                if values is None:
                    raise ConnectionResetError("closed by the other end")
        finally:
            self.socket.settimeout(PATIENCE)
        return values[0]

    def close(self) -> None:
        self.socket.close()


def meet(address: tuple[str, int], me: dict[str, Any], alone: bool, timeout: float, extra: Callable[[], Any]):
    """All processes come together: `(line to the hub, every process's hello by index, extra of process 0, hub)`.

    `me` has the index, the count, host, pid, and `versions`, which must be the same. `alone`: all are on this host, and
    nobody else can connect. The hub is None but for process 0. Raises ProcessError for who did not come in time, came
    twice, or is another count's or version's.
    """
    deadline = time.monotonic() + timeout
    if me["index"] == 0:
        lines, hellos = _host(address, me, alone, deadline, timeout)
        given = extra()
        for line in lines.values():
            line.send({"met": hellos, "extra": given})
        here, there = socket.socketpair()
        lines[0] = Line(there)
        return Line(here), hellos, given, lines
    line = _visit(address, me, deadline, timeout)
    try:
        answer = line.read_one(deadline + PATIENCE)  # process 0 has its own deadline, and says who is missing
    except (OSError, ValueError) as error:
        line.close()
        raise ProcessError(_no_answer(address, timeout, error)) from error
    if "end" in answer:
        line.close()
        raise ProcessError(answer["end"])
    return line, answer["met"], answer["extra"], None


def _host(address, me, alone, deadline, timeout) -> tuple[dict[int, Line], list[dict]]:
    """Process 0: the lines to all others, and all hellos."""
    host, port = address
    try:
        if alone:
            server = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        elif socket.has_dualstack_ipv6():
            server = socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        else:
            server = socket.create_server(("", port))
    except OSError as error:
        fix = "Another program or run has it: give another port, coordinator_address= or JAX_COORDINATOR_PORT."
        raise ProcessError(
            message("port", f"{host}:{port}", os.strerror(error.errno or 0), "a free one", fix)
        ) from error
    lines: dict[int, Line] = {}
    hellos: dict[int, dict] = {0: me}
    with server:
        while len(hellos) < me["count"]:
            server.settimeout(max(deadline - time.monotonic(), 1e-3))
            try:
                line = Line(server.accept()[0])
            except TimeoutError:
                missing = [str(i) for i in range(me["count"]) if i not in hellos]
                got = f"{len(hellos)} of {me['count']} after {timeout:g} s, without {', '.join(missing)}"
                fix = f"Were all started, with this address ({host}:{port}) and num_processes={me['count']}?"
                raise _refused(lines.values(), message("processes", "start()", got, "all of them", fix)) from None
            hello = _hello(line)
            if hello is None:
                line.close()
                continue
            if problem := _problem(hello, hellos, me):
                raise _refused([*lines.values(), line], problem)
            lines[hello["index"]], hellos[hello["index"]] = line, hello
    return lines, [hellos[i] for i in range(me["count"])]


def _refused(lines, text: str) -> ProcessError:
    """The error of process 0, which all that have come get too."""
    for line in lines:
        with contextlib.suppress(OSError):
            line.send({"end": text})
        line.close()
    return ProcessError(text)


def _hello(line: Line) -> dict | None:
    """Who has connected; None for what is none of us."""
    try:
        hello = line.read_one(time.monotonic() + PATIENCE)
        return hello if {"index", "count", "host", "pid", "versions"} <= dict(hello).keys() else None
    except (OSError, ValueError, TypeError):
        return None


def _problem(hello, hellos, me) -> str:
    """Why a process cannot join, in words."""
    who, index = name_of(hello), hello["index"]
    if not isinstance(index, int) or index < 0:
        return message("process_id", who, repr(index), "an int of 0 or more")
    if hello["count"] != me["count"]:
        return message("num_processes", who, hello["count"], f"{me['count']}, as on {name_of(me)}")
    if index in hellos:
        fix = "Every process has its own, from 0 to num_processes - 1."
        return message("process_id", who, f"{index}, which {name_of(hellos[index])} has too", "another one", fix)
    if index >= me["count"]:
        return message("process_id", who, index, f"at most {me['count'] - 1}", "They count from 0.")
    for library, version in me["versions"].items():
        if hello["versions"].get(library) != version:
            return message(library, who, hello["versions"].get(library), f"{version}, as on {name_of(me)}")
    return ""


def _visit(address, me, deadline, timeout) -> Line:
    """Another process: the line to process 0, which may not be up yet."""
    pause = 0.02
    while True:
        try:
            line = Line(socket.create_connection(address, max(deadline - time.monotonic(), 1e-3)))
            if line.socket.getsockname() == line.socket.getpeername():  # it got this port by chance, and hears itself
                line.socket.setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                )  # gives it back now
                line.close()
                raise ConnectionRefusedError("nobody listens")
            line.send(me)
            return line
        except OSError as error:
            if time.monotonic() + pause > deadline:
                raise ProcessError(_no_answer(address, timeout, error)) from error
        time.sleep(pause)
        pause = min(2 * pause, 0.5)


def _no_answer(address, timeout: float, error: Exception) -> str:
    got = f"no answer in {timeout:g} s ({error})"
    fix = "Is process 0 running there, and the port open between the hosts?"
    return message("coordinator", "{}:{}".format(*address), got, "process 0", fix)


def free_port() -> int:
    """A port that nobody has right now."""
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def name_of(hello) -> str:
    """How messages call a process."""
    return f"process {hello['index']} (host {hello['host']}, pid {hello['pid']})"


class Hub(threading.Thread):
    """The thread of process 0 that hears all processes and tells all of them."""

    def __init__(self, lines: dict[int, Line], hellos: list[dict], patience: float):
        super().__init__(name="tsunax-hub", daemon=True)
        self.lines, self.names, self.patience = lines, [name_of(hello) for hello in hellos], patience
        self.leaving: set[int] = set()
        self.said: dict[int, dict[int, tuple[str, str]]] = {}  # by number of the gathering, by process
        self.until: dict[int, float] = {}  # when a gathering gives up
        self.round, self.asked, self.counts = 0, 0, {}

    def run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # else the others would call process 0 silent
            self.end(f"{self.names[0]} cannot hear the others: {told(error)}")

    def _serve(self) -> None:
        heard = dict.fromkeys(self.lines, time.monotonic())
        with selectors.DefaultSelector() as selector:
            for i, line in self.lines.items():
                selector.register(line.socket, selectors.EVENT_READ, i)
            ticked = time.monotonic()
            while len(self.leaving) < len(self.lines):
                due = [until - time.monotonic() for until in self.until.values()]
                ready = selector.select(max(0.0, min([self.patience / 20, *due])))
                now = time.monotonic()
                if now - ticked > self.patience / 4:  # this process itself stood still: it knows nothing of the others
                    heard = dict.fromkeys(heard, now)
                for key, _ in ready:
                    heard[key.data] = now
                    try:
                        values = self.lines[key.data].read()
                    except (OSError, ValueError):
                        values = None
                    if values is None:
                        selector.unregister(key.fileobj)
                        if key.data not in self.leaving:
                            return self.end(f"{self.names[key.data]} is gone: it was killed, or crashed")
                    for value in values or ():
                        if "failed" in value:
                            return self.end(f"{self.names[key.data]} ended: {value['failed']}")
                        self.hear(key.data, value)
                for i, when in heard.items():
                    if i not in self.leaving and now - when > self.patience:
                        why = "it is stopped, or its host or network is down"
                        return self.end(f"{self.names[i]} has been silent for {now - when:.0f} s: {why}")
                for number in [number for number, until in self.until.items() if now >= until]:
                    self.give_up(number)
                if now - ticked > self.patience / 20:
                    ticked = now
                    self.tell({"beat": 0})
        return None

    def hear(self, i: int, value: dict[str, Any]) -> None:
        if "leaving" in value:
            self.leaving.add(i)
        elif "say" in value:
            number, name, text, timeout = value["say"]
            said = self.said.setdefault(number, {})
            self.until.setdefault(number, time.monotonic() + timeout)
            said[i] = name, text
            first = next(iter(said))
            if name != said[first][0]:
                fix = "All processes call the same, in the same order."
                got = f"{name} on {self.names[i]}"
                return self.answer(
                    number, {"wrong": message("call", "", got, f"{said[first][0]}, as on {self.names[first]}", fix)}
                )
            if len(said) == len(self.lines):
                self.answer(number, {"all": [said[j][1] for j in range(len(said))]})
        elif "ask" in value and value["ask"][0] == self.round and not self.asked:
            self.asked = value["ask"][1]
            self.tell({"count": self.round})
        elif "counted" in value:
            self.counts[i] = value["counted"]
            if len(self.counts) == len(self.lines):
                gatherings, calls = max(self.counts.values())
                self.tell({"goal": [gatherings, calls + 1], "value": self.asked})
                self.round, self.asked, self.counts = self.round + 1, 0, {}
        return None

    def answer(self, number: int, found: dict[str, Any]) -> None:
        for record in (self.said, self.until):
            record.pop(number, None)
        self.tell({"number": number, **found})

    def give_up(self, number: int) -> None:
        said = self.said[number]
        missing = [self.names[i] for i in range(len(self.lines)) if i not in said]
        name = next(iter(said.values()))[0]
        self.answer(number, {"wrong": message(name, "", f"no word of {', '.join(missing)}", "all processes")})

    def tell(self, value: dict[str, Any]) -> None:
        for line in self.lines.values():
            with contextlib.suppress(OSError):  # it is gone, and its end will be read
                line.send(value)

    def end(self, text: str) -> None:
        """Tell all; this process, whose own line is the last, hears it too."""
        self.tell({"end": text})


class Peers:
    """A process's view of the others: a thread that beats, listens, and ends the process when one of them is gone."""

    def __init__(
        self, line: Line, hellos: list[dict], index: int, hub: dict[int, Line] | None, patience: float, timeout: float
    ):
        self.index, self.count, self.timeout, self.patience = index, len(hellos), timeout, patience
        self.names = [name_of(hello) for hello in hellos]
        self._line, self._changed = line, threading.Condition()
        self._numbers, self._found = {}, {}
        self._round = self._asked = self._value = 0
        self._calls, self._goal = [0, 0], []  # gatherings, and calls of `agree` since the last of them
        self._relay: Relay | None = None
        self._is_counting = self._is_closing = self._is_failing = False
        self._hub = None if hub is None else Hub(hub, hellos, patience)
        self._thread = threading.Thread(target=self._listen, name="tsunax-peers", daemon=True)
        if self._hub is not None:
            self._hub.start()
        self._thread.start()

    # ------------------------------------------------------------------------------------------------- for callers

    def gather(self, name: str, text: str = "", timeout: float | None = None, thread: str = "") -> list[str]:
        """What all processes said here, by index. Raises ProcessError where one did not come, or was elsewhere.

        A thread beside the main one gives its name: its gatherings have an order of their own.
        """
        timeout = self.timeout if timeout is None else timeout
        with self._changed:
            self._numbers[thread] = self._numbers.get(thread, 0) + 1
            number = f"{thread} {self._numbers[thread]}"
            if not thread:
                self._calls = [self._numbers[thread], 0]  # all are here: who called less often before is even again
        self._send({"say": [number, name, text, timeout]})
        with self._changed:
            # the hub keeps the time; where the hub is gone, the process ends
            if not self._changed.wait_for(lambda: number in self._found, min(timeout, self.timeout) + 1):
                if timeout > self.timeout:
                    note = f"process {self.index} has waited for the others for {self.timeout:g} s at {name}"
                    os.write(2, f"tsunax: {note}\n".encode())
                self._changed.wait_for(
                    lambda: number in self._found, max(timeout - self.timeout, 0.0) + 2 * self.patience
                )
            found = self._found.pop(number, {"wrong": message(name, "", "no answer", "one of process 0")})
        if "wrong" in found:
            raise ProcessError(found["wrong"])
        return found["all"]

    def agree(self, asked: int) -> int:
        """0, until a process asked: then what it asked, on all of them at the same call. No wait but right then."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_counting)
            self._calls[1] += 1
            if asked and not self._asked and not self._goal:
                self._asked = asked
                self._send({"ask": [self._round, asked]})
            if not self._goal or self._calls < self._goal:
                return 0
            value, self._goal, self._asked = self._value, [], 0
            self._round += 1
            return value

    def fail(self, text: str, stay: bool = False) -> None:
        """End all other processes, which say why; and this one, unless it stays."""
        self._is_failing, self._is_closing = True, stay
        self._send({"failed": text})
        if self._hub is not None:
            self._hub.join(PATIENCE)  # process 0 must not go before all have heard
        if not stay:
            self._thread.join(PATIENCE)

    def relay(self, address: tuple[str, int]) -> int:
        """The port of a relay to JAX's service at an address, which ends with this."""
        self._relay = Relay(address, time.monotonic() + self.timeout)
        return self._relay.port

    def close(self) -> None:
        """Part in peace, once all others are here too."""
        self._is_closing = True
        self._send({"leaving": True})
        if self._hub is not None:
            self._hub.join(PATIENCE)
        self._line.close()
        if self._relay is not None:
            self._relay.close()

    def _send(self, value: Any) -> None:
        with contextlib.suppress(OSError):  # gone: the thread will read so, and end this process
            self._line.send(value)

    # --------------------------------------------------------------------------------------------------- the thread

    def _listen(self) -> None:
        pause, heard, beaten = self.patience / 10, time.monotonic(), 0.0
        lost = f"{self.names[0]} is gone: it was killed, or crashed"
        with selectors.DefaultSelector() as selector:
            selector.register(self._line.socket, selectors.EVENT_READ)
            while not self._is_closing:
                before = time.monotonic()
                ready = selector.select(pause)
                now = time.monotonic()
                if now - before > pause + self.patience / 4:  # this process itself stood still
                    heard = now
                if ready:
                    try:
                        values = self._line.read()
                    except (OSError, ValueError):
                        values = None
                    if values is None:
                        return None if self._is_closing else leave(lost, self.index)
                    heard = now
                    for value in values:
                        if "end" in value:
                            if not self._is_closing:
                                leave("" if self._is_failing else value["end"], self.index)
                            return None
                        self._hear(value)
                if now - heard > self.patience:
                    why = "it is stopped, or its host or network is down"
                    return leave(f"{self.names[0]} has been silent for {now - heard:.0f} s: {why}", self.index)
                if now - beaten > pause / 2:
                    beaten = now
                    self._send({"beat": 0})
        return None

    def _hear(self, value: dict[str, Any]) -> None:
        with self._changed:
            if "number" in value:
                self._found[value["number"]] = value
            elif "count" in value:
                self._is_counting = True
                self._send({"counted": list(self._calls)})
            elif "goal" in value:
                self._goal, self._value, self._is_counting = value["goal"], value["value"], False
            self._changed.notify_all()


def _flush() -> None:
    with contextlib.suppress(Exception):
        sys.stdout.flush()


class Relay:
    """Carries JAX's own connection to process 0, from a port of this host, and keeps its end open when that one dies.

    JAX aborts within a millisecond of such a death, before anybody could name it. Behind a relay it waits for its
    heartbeat to time out, and `Peers` has the word.
    """

    def __init__(self, address: tuple[str, int], deadline: float):
        self._address, self._deadline = address, deadline
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self._start(self._accept)

    def _start(self, work: Callable, *args) -> None:
        threading.Thread(target=work, args=args, name="tsunax-relay", daemon=True).start()

    def close(self) -> None:
        """Take no more connections; those that are there end with either end."""
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # wakes `accept`
        self._server.close()

    def _accept(self) -> None:
        while True:
            try:
                near = self._server.accept()[0]
            except OSError:
                return
            far = None
            while far is None and time.monotonic() < self._deadline:
                with contextlib.suppress(OSError):  # JAX's service may not be up yet
                    far = socket.create_connection(self._address, PATIENCE)
                if far is None:
                    time.sleep(0.05)
            if far is None:
                near.close()
                continue
            far.settimeout(None)
            for one in (near, far):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._start(_carry, near, far, True)
            self._start(_carry, far, near, False)


def _carry(source: socket.socket, target: socket.socket, ends: bool) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    if ends:
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)


def leave(text: str, index: int) -> None:
    """Say why, if there is something to say, and end this process: its main thread may be in a collective for ever."""
    if text:
        os.write(2, f"\ntsunax.errors.ProcessError: {text}. This process ({index}) ends too.\n".encode())
    flush = threading.Thread(target=_flush, daemon=True)  # whoever holds the stream may be stuck
    with contextlib.suppress(RuntimeError):  # at the exit of the interpreter none can start, and all is flushed
        flush.start()
        flush.join(1.0)
    if index == 0:
        time.sleep(1.0)  # what it told the others is under way
    os._exit(1)


__all__ = ["Hub", "Line", "Peers", "Relay", "free_port", "leave", "meet", "name_of"]
