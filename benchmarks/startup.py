"""From `python` to the first step, and to 98 % on the digits: cold, and with the programs of a run before.

    python -m benchmarks startup               # makes .peers/ the first time: 3 GB and some minutes
    python -m benchmarks startup --no-peers    # what is installed here alone

Each contender is a process of its own, started anew for every number: the interpreter, the imports, the first
compilation and the training. Cold: the folder of compiled programs is empty; warm: the same command again. Torch runs
eagerly and keeps nothing. Files of the libraries were read before, so they are in memory, as on a machine in use.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

from benchmarks._common import note, save, table
from benchmarks.loop import PEERS, ROOT, environment, requirements, script_of

SCRIPT = ROOT / "benchmarks" / "_peers" / "digits.py"
WAYS = {  # name: what it needs, its environment where that is not installed here, what `digits.py` calls it
    "tsunax": ("tsunax", "", "tsunax"),
    "JAX and optax by hand": ("optax", "", "jax"),
    "Flax NNX, nnx.jit": ("flax", "", "nnx"),
    "Keras on JAX": ("keras", "keras", "keras"),
    "torch": ("torch", "torch", "torch"),
    "Lightning": ("lightning", "lightning", "lightning"),
}
COLD, WARM = 4.0, 1.5  # seconds to 98 %, of tsunax


def python_of(module: str, where: str, peers: bool) -> str:
    """The interpreter that has a library. Raises RuntimeError."""
    if importlib.util.find_spec(module) is not None:
        return sys.executable
    if not peers:
        raise RuntimeError(f"no {module} here, and no peers")
    PEERS.mkdir(exist_ok=True)
    (PEERS / ".gitignore").write_text("*\n")
    return str(environment(where))


def run(python: str, way: str, data: Path, cache: str) -> tuple[float, float, int]:
    """Seconds to the first step and to the goal, and the epochs, of one process."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "PYTHONDONTWRITE"))}
    env["PYTHONPATH"] = str(ROOT)
    command = [python, str(SCRIPT), way, str(data), cache, str(time.time())]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1])
    first, goal, epochs = json.loads(done.stdout)
    return first, float("nan") if goal is None else goal, epochs


def main(rounds: int = 5) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks startup", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--no-peers", action="store_true", help="leave out what is not installed here")
    options, _ = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="tsunax-startup-") as folder:
        data, digits = Path(folder) / "digits.npz", load_digits()
        order = np.random.default_rng(0).permutation(len(digits.target))
        np.savez(data, x=(digits.data[order] / 16).astype(np.float32), y=digits.target[order].astype(np.int32))
        found: dict[str, list] = {}
        there: dict[str, tuple[str, str]] = {}
        for name, (module, where, way) in WAYS.items():
            try:
                python = python_of(module, where, not options.no_peers)
                run(python, way, data, f"{folder}/{way}-first")  # bytecode, and files into memory
                there[name] = python, way
            except (RuntimeError, OSError, subprocess.CalledProcessError) as error:
                note(f"{name} is not measured: {error}")
        for i in range(rounds):
            for name in list(there)[:: 1 if i % 2 else -1]:
                cache = tempfile.mkdtemp(dir=folder)
                try:
                    found.setdefault(name, []).append([run(*there[name], data, cache) for _ in ("cold", "warm")])
                except RuntimeError as error:
                    note(f"{name}, round {i + 1}: {error}")
    rows = []
    for name in (name for name in there if found[name]):
        middle = np.median(np.array(found[name]), 0)  # (cold, warm) of (first, goal, epochs)
        rows.append((name, *map(float, middle[:, :2].T.ravel()), int(middle[1, 2])))
    head = ("contender", "first step, cold", "warm", "98 %, cold", "warm", "epochs")
    table("seconds from the start of python, 64-256-128-10 MLP on digits, median", rows, head)
    if "tsunax" in found:
        for at, most, what in ((0, COLD, "cold"), (1, WARM, "warm")):
            seconds = statistics.median(pair[at][1] for pair in found["tsunax"])
            said = "reached" if seconds <= most else "MISSED"
            note(f"tsunax to 98 %, {what}: {seconds:.2f} s, target <= {most:g} s: {said}")
    note(f"{rounds} rounds; load of the machine after: {os.getloadavg()[0]:.1f}")
    for name in ("keras", "torch", "lightning"):
        if any(where == name for what, (_, where, _) in WAYS.items() if what in there):
            note(f"{name}: {', '.join(x for x in requirements(script_of(name)) if '==' in x)}")
    save("startup")


if __name__ == "__main__":
    main()
