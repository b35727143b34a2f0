"""`import tsunax` over `import jax, optax`, each in a fresh interpreter, in turn."""

import os
import statistics
import subprocess
import sys

from benchmarks._common import save, table

CODE = "import time; t = time.perf_counter(); import {}; print(time.perf_counter() - t)"


def seconds(what: str) -> float:
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}  # bytecode is cached, as installed
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(what)], capture_output=True, text=True, check=True, env=env
    )
    return float(done.stdout)


def main(rounds: int = 11) -> None:
    floor, ours = "jax, optax", "tsunax"
    seconds(floor), seconds(ours)
    pairs = [(seconds(floor), seconds(ours)) for _ in range(rounds)]
    ratios = [b / a for a, b in pairs]
    rows = [
        (f"import {floor}", statistics.median(a for a, _ in pairs), 1.0),
        (f"import {ours}", statistics.median(b for _, b in pairs), statistics.median(ratios)),
    ]
    table("import", rows, ("what", "seconds", "x"))
    save("importing")
