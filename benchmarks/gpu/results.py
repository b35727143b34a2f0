"""One file of results: `{"about": ..., "parts": {part: {name: value}}}`, whole at any moment.

A part and the programme that started it write in turns. Each write replaces the file by a renamed copy.
"""

import json
import os
import sys
from pathlib import Path


class Results:
    """The numbers of one part. `results.note(name, value)` prints a number, and writes the file with it."""

    def __init__(self, path: Path, part: str) -> None:
        self.path, self.part = path, part

    def note(self, name: str, value: object) -> None:
        print(f"  {name}: {value}", flush=True)
        everything = read(self.path)
        everything["parts"].setdefault(self.part, {})[name] = value
        write(self.path, everything)


def read(path: Path) -> dict:
    return json.loads(path.read_text()) if path.exists() else {"about": {}, "parts": {}}


def write(path: Path, everything: dict) -> None:
    """Replaces the file; the tables that `RESULTS.md` shows are made of the parts."""
    everything["shown"] = [
        {"title": part, "head": ("figure", "value"), "rows": rows_of(values)}
        for part, values in everything["parts"].items()
    ]
    copy = path.with_suffix(f".{os.getpid()}.writing")
    copy.write_text(json.dumps(everything, indent=1, default=str) + "\n")
    copy.replace(path)


def rows_of(values: dict, above: str = "") -> list[tuple[str, object]]:
    """`{"fit": {"ms": 2.0}}` as `[("fit: ms", 2.0)]`; lists, such as lines of output, are left to the file."""
    rows: list[tuple[str, object]] = []
    for name, value in values.items():
        place = f"{above}: {name}" if above else name
        if not isinstance(value, list):
            rows += rows_of(value, place) if isinstance(value, dict) else [(place, value)]
    return rows


def about() -> dict[str, str]:
    """What was measured on which machine, as `benchmarks._common.save` says it, and more of a GPU."""
    import platform
    import subprocess
    import time

    import jax
    import optax

    query = ["nvidia-smi", "--query-gpu=driver_version,memory.total,power.limit", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        driver = "no nvidia-smi"
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    return {
        "jax": jax.__version__,
        "optax": optax.__version__,
        "python": platform.python_version(),
        "device": jax.devices()[0].device_kind,
        "machine": platform.machine(),
        "date": time.strftime("%Y-%m-%d"),
        "driver": driver,
        "commit": commit,
        "command": " ".join(sys.argv[1:]),
    }
