"""Processes that tests start, each with its output in a file: what they print, and when they have ended."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from campaigns.lost_processes import free_port

ROOT = Path(__file__).resolve().parents[1]


def until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


class Started:
    """One process of several."""

    def __init__(self, folder, index, command, variables, start):
        self.index, self.path = index, folder / f"out{index}"
        flags = os.environ.get("XLA_FLAGS", "").replace("device_count=8", "device_count=1")
        env = {**os.environ, "XLA_FLAGS": flags, "TSUNAX_TEST_START": json.dumps(start), **variables}
        with open(self.path, "wb") as out:
            self.process = subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT)

    @property
    def text(self) -> str:
        return self.path.read_text(errors="replace")

    def wait(self, seconds=90) -> int:
        return self.process.wait(seconds)


def start(folder, program, n, *work, variables=lambda i: {}, is_told=True, **given) -> list[Started]:
    """n processes of a program of tests/programs, which are told of each other, or have to find out."""
    address, given = f"localhost:{free_port()}", {"timeout": 60, **given}
    command, started = [sys.executable, "-u", "-m", f"tests.programs.{program}", *map(str, work)], []
    for i in range(n):
        who = {"coordinator_address": address, "num_processes": n, "process_id": i} if is_told else {}
        started.append(Started(folder, i, command, variables(i), {**who, **given}))
        started[-1].address = address
    return started


def found(text: str) -> dict:
    """What the processes printed that they found, by index."""
    decode = json.JSONDecoder().raw_decode
    return dict(decode(part)[0] for part in text.split("FOUND ")[1:])


def ready(started) -> None:
    until(lambda: all("READY" in one.text or one.process.poll() for one in started), 60)
    assert all("READY" in one.text for one in started), [one.text for one in started]


def answers(started, code=0) -> list:
    """What each process found, when all have ended with this exit code; None for any."""
    codes = [one.wait(240) for one in started]
    assert code is None or codes == [code] * len(started), [one.text[-2000:] for one in started]
    return [found(one.text)[one.index] for one in started]
