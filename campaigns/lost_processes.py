"""Kill, stop and end one process of several, in the middle of collectives: all others end, and name it.

    python -m campaigns.lost_processes --count 50 --peer-timeout 30

Runs take turns over 2 and 4 processes, over who is hurt, and over SIGKILL, SIGSTOP and SIGTERM. Counts are appended to
`results/lost_processes.jsonl`.
"""

import argparse
import itertools
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax

ROOT = Path(__file__).resolve().parents[1]
BOUND = 45.0  # seconds


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def hurt(folder: Path, n: int, victim: int, number: int, peer_timeout: float) -> dict:
    """One run: seconds until the last of the others has ended, and what was wrong."""
    address, processes, outs = f"localhost:{free_port()}", [], [folder / f"out{i}" for i in range(n)]
    for i, out in enumerate(outs):
        start = {"coordinator_address": address, "num_processes": n, "process_id": i, "peer_timeout": peer_timeout}
        env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "TSUNAX_TEST_START": json.dumps(start)}
        command = [sys.executable, "-u", "-m", "tests.programs.processes", "endless"]
        with open(out, "wb") as file:
            processes.append(subprocess.Popen(command, env=env, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT))
    text = lambda i: outs[i].read_text(errors="replace")
    wrong, last = [], 0.0
    try:
        deadline = time.monotonic() + 120
        while not all("READY" in text(i) for i in range(n)):
            if time.monotonic() > deadline or any(one.poll() is not None for one in processes):
                return {"seconds": 0.0, "wrong": ["did not start: " + text(victim)[-300:]]}
            time.sleep(0.05)
        began = time.monotonic()
        processes[victim].send_signal(number)
        for i, one in enumerate(processes):
            if i == victim:
                continue
            try:
                code = one.wait(BOUND + 30)
            except subprocess.TimeoutExpired:
                wrong.append(f"{i} hangs")
                continue
            last = time.monotonic() - began
            if code == 0 or last > BOUND:
                wrong.append(f"{i} ended with {code} after {last:.0f} s")
            name = f"process {victim} (host {socket.gethostname()}, pid {processes[victim].pid})"
            if victim == 0 and number != signal.SIGSTOP and "the leader" in text(i):
                continue  # JAX ends the others at once, and calls process 0 the leader
            if name not in text(i):
                wrong.append(f"{i} does not name it: {text(i)[-300:]}")
    finally:
        for one in processes:
            one.kill()
            one.wait()
    return {"seconds": round(last, 1), "wrong": wrong}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=24)
    parser.add_argument("--peer-timeout", type=float, default=30.0)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results" / "lost_processes.jsonl")
    arguments = parser.parse_args()
    numbers = signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM
    cases = itertools.cycle((n, i, number) for n in (2, 4) for i in range(n) for number in numbers)
    bad, seconds = [], {number.name: [] for number in numbers}
    for n, victim, number in itertools.islice(cases, arguments.count):
        with tempfile.TemporaryDirectory() as folder:
            found = hurt(Path(folder), n, victim, number, arguments.peer_timeout)
        print(f"{number.name} to {victim} of {n}: {found['seconds']} s {found['wrong'] or 'ok'}", flush=True)
        seconds[number.name].append(found["seconds"])
        bad += [[n, victim, number.name, found["wrong"]]] if found["wrong"] else []
    row = {
        "runs": arguments.count,
        "peer_timeout": arguments.peer_timeout,
        "bad": bad,
        "seconds_most": {name: max(found, default=None) for name, found in seconds.items()},
        "jax": jax.__version__,
        "python": platform.python_version(),
    }
    with open(arguments.results, "a") as file:
        file.write(json.dumps(row) + "\n")
    print(json.dumps(row))
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
