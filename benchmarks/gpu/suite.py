"""The repository's own tests on one accelerator. JAX is not imported here: the workers share the device's memory."""

import importlib.util
import os
import subprocess
import sys

from benchmarks.gpu.results import Results, read

SUITE = "guard step rules accumulation averages precision overwrite losses modes loop hyper checkpoint resume offload"


def run(results: Results, tiny: bool) -> None:
    """The repository's own tests on this device: `TSUNAX_TEST_PLATFORM` makes tests/conftest.py take it."""
    absent = [name for name in ("pytest", "xdist", "hypothesis") if not importlib.util.find_spec(name)]
    if absent:
        return results.note("left out", f"no {', '.join(absent)} here")
    files = [f"tests/test_{name}.py" for name in (["guard"] if tiny else SUITE.split())]
    is_cpu = read(results.path)["about"]["device"].lower() == "cpu"
    environment = os.environ | {"TSUNAX_TEST_PLATFORM": "cpu" if is_cpu else "cuda,cpu"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:benchmark",
        "-n",
        "2" if tiny else "12",
    ]
    command += ["-q", "--no-header", "--tb=line", "-rf", *files]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    lines: list[str] = []
    for line in process.stdout or ():  # one by one: the part may be ended
        lines.append(line.rstrip()[:300])
        print(line, end="", flush=True)
        if len(lines) % 5 == 0 or "passed" in line:
            results.note("lines", lines[-60:])
    results.note("exit status", process.wait())
