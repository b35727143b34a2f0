"""The parts in their order, each in a process of its own, within the time that there is."""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import NamedTuple

from benchmarks.gpu.results import Results, read, write

KEPT = Path(__file__).parents[1] / "results"


class Part(NamedTuple):
    """A part of the programme: with less time left it does not begin, and after the limit it is ended."""

    least: float  # seconds
    limit: float  # seconds
    run: str  # "module:function", called with the results and `tiny`


PARTS = {  # the most valuable first
    "checks": Part(40, 100, "checks:run"),
    "gpt": Part(60, 180, "training:gpt"),
    "gpt_torch": Part(25, 75, "torch_models:gpt"),
    "launch": Part(20, 60, "training:launch"),
    "launch_torch": Part(15, 45, "torch_models:launch"),
    "host": Part(15, 45, "memory:host"),
    "suite": Part(40, 110, "suite:run"),
    "saves": Part(15, 45, "memory:saves"),
    "cnn": Part(40, 80, "training:cnn"),
    "cnn_torch": Part(20, 60, "torch_models:cnn"),
    "members": Part(15, 40, "training:members"),
    "sizes": Part(30, 80, "memory:sizes"),
    "gpt_small": Part(60, 110, "training:gpt_small"),
    "gpt_small_torch": Part(20, 60, "torch_models:gpt_small"),
}
TINY_FACTOR = 8.0  # of the limits, on a CPU that others use too
TAIL = 1500  # characters of a part's output that are shown, and kept if it has failed


def run_part(name: str, path: Path, tiny: bool) -> None:
    """One part, in this process."""
    import importlib

    results, start = Results(path, name), time.perf_counter()
    module, function = PARTS[name].run.split(":")
    try:
        getattr(importlib.import_module(f"benchmarks.gpu.{module}"), function)(results, tiny)
    except ModuleNotFoundError as error:
        results.note("left out" if error.name == "torch" else "error", str(error))
    except BaseException as error:
        results.note("error", f"{type(error).__name__}: {error}"[:1000])
        traceback.print_exc()
    results.note("seconds", round(time.perf_counter() - start, 1))


def start_part(name: str, path: Path, options: argparse.Namespace, limit: float) -> None:
    """One part in a process of its own, which is ended after `limit` seconds with all that it has started."""
    arguments = ["--part", name, "--file", str(path), *(["--tiny"] if options.tiny else [])]
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu", *arguments],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            pass
        finally:  # also of an interrupted programme
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        text = output.read()
    print(text[-TAIL:], flush=True)
    everything = read(path)
    part = everything["parts"].setdefault(name, {})
    if process.returncode or "error" in part:
        ended = f"ended after its limit of {limit:.0f} s" if process.returncode == -signal.SIGKILL else "failed"
        part["ended"], part["output"] = ended, text[-TAIL:]
    write(path, everything)


def file_of(folder: Path, device: str, jax_version: str) -> Path:
    """A new file of results of a kind of device: no run replaces the parts of another one."""
    kind = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    names = (f"gpu-{kind}-jax{jax_version}{number}.json" for number in ("", *(f"-{n}" for n in range(2, 1000))))
    return next(path for name in names if not (path := folder / name).exists())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument(
        "--out", type=Path, help="the folder of the results; benchmarks/results, or a new one for --tiny"
    )
    parser.add_argument("--tiny", action="store_true", help="small shapes, on any device")
    parser.add_argument("--seconds", type=float, default=530, help="for all parts together")
    parser.add_argument("--only", default="", help=f"some of {','.join(PARTS)}")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a part that runs is ended, too
    if options.part:
        return run_part(options.part, options.file, options.tiny)
    names = options.only.split(",") if options.only else list(PARTS)
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"--only: got {', '.join(unknown)}, expected some of {', '.join(PARTS)}")
    began = time.perf_counter()
    # in a process of its own: this one must hold no memory of the device
    ask = "import json; from benchmarks.gpu.results import about; print(json.dumps(about()))"
    answer = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    machine = json.loads(answer.stdout.splitlines()[-1]) | {"command": " ".join(sys.argv[1:])}
    if machine["device"].lower() == "cpu" and not options.tiny:
        return print("  gpu: left out, there is no accelerator; --tiny runs all of it on a CPU")
    folder = options.out or (Path(tempfile.mkdtemp(prefix="tsunax-gpu-")) if options.tiny else KEPT)
    folder.mkdir(parents=True, exist_ok=True)
    path = file_of(folder, machine["device"], machine["jax"])
    write(path, {"about": machine, "parts": {}})
    # Compiled programs are kept from one part to the next, in a new folder, so that the seconds of the first are cold.
    with tempfile.TemporaryDirectory() as cache:
        os.environ |= {"JAX_COMPILATION_CACHE_DIR": f"{cache}/jax", "TORCHINDUCTOR_CACHE_DIR": f"{cache}/torch"}
        os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", ".85")
        for name in names:
            part, seconds = PARTS[name], options.seconds - (time.perf_counter() - began)
            print(f"== {name}", flush=True)
            if seconds < part.least:
                Results(path, name).note("left out", f"{seconds:.0f} s were left, it needs {part.least:.0f}")
                continue
            start_part(name, path, options, min(part.limit * (TINY_FACTOR if options.tiny else 1), seconds))
    parts = read(path)["parts"]
    for name, values in parts.items():
        print(f"{name:16} {values.get('error') or values.get('left out') or values.get('ended') or values['seconds']}")
    print(f"-> {path}", flush=True)
    if options.tiny and any("error" in values or "ended" in values for values in parts.values()):
        sys.exit("gpu: a part has failed")
