"""`python -m tsunax`: versions, devices, extras and a self-check, for bug reports."""

import argparse
import importlib.metadata
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator

import jax
import numpy as np

import tsunax as ts

LIBRARIES = (
    "jax", "jaxlib", "optax", "flax", "orbax-checkpoint", "numpy", "ml-dtypes", "grain",
    "tensorboardX", "optuna", "ray", "mpi4py", "matplotlib", "safetensors", "obstore", "equinox",
    "torch",
)  # fmt: skip
SETTINGS = ("TSUNAX_DEVICE", "JAX_PLATFORMS", "XLA_FLAGS")  # that decide which devices there are


def version_of(library: str) -> str:
    """The version that is installed, or "-"."""
    try:
        return importlib.metadata.version(library) or "unknown"
    except importlib.metadata.PackageNotFoundError:
        return "-"


def self_check() -> str:
    """A line of text: twenty steps in a loop of Python and in a compiled one learn, and agree."""
    start = time.perf_counter()
    x = np.linspace(-1, 1, 64, dtype=np.float32).reshape(16, 4)
    step = ts.train_step(lambda params, x: ((x @ params["w"] - x[:, :2]) ** 2).mean())
    make = lambda: ts.setup(ts.rules.adam(0.1), {"w": np.zeros((4, 2), np.float32)})
    state, losses = make(), []
    for _ in range(20):
        state, info = step(state, x)
        losses.append(float(info.loss))
    twin, _ = ts.fit(step, make(), [x], steps=20, progress=False)
    are_close = np.allclose(state.params["w"], twin.params["w"], rtol=1e-5, atol=1e-6)
    verdict = "ok" if are_close and losses[-1] < losses[0] / 2 else "FAILED"
    seconds = time.perf_counter() - start
    return f"{verdict}: loss {losses[0]:.4f} to {losses[-1]:.4f} in 20 steps, {seconds:.1f} s"


def devices() -> str:
    """A line for each device, with its kind, memory and driver."""
    infos = [(device, ts.devices.device_info(device)) for device in jax.local_devices()]
    return "\n".join(f"device {device}: {info}" for device, info in infos)


def attempt(title: str, f: Callable[[], str]) -> str:
    """A part of the report, or why it failed: users call the report because something is broken."""
    try:
        return f"{title} {f()}"
    except Exception as error:
        return f"{title} FAILED: {type(error).__name__}: {' '.join(str(error).split())}"


def report() -> Iterator[str]:
    """The lines of the report, each as soon as it is made, because the next part may hang."""
    python, system = platform.python_version(), f"{platform.system()} {platform.machine()}"
    yield f"tsunax {ts.__version__}, Python {python}, {system}"
    versions = ((name, version_of(name)) for name in LIBRARIES)
    yield ", ".join(f"{name} {version}" for name, version in versions if version != "-")
    if settings := [f"{name}={os.environ[name]}" for name in SETTINGS if os.environ.get(name)]:
        yield "settings: " + ", ".join(settings)
    yield attempt("preferred device:", lambda: ts.devices.preferred() or "none")
    yield from attempt("devices:\n", devices).splitlines()
    yield attempt("self-check", self_check)


def main(arguments: list[str] | None = None) -> int:
    """Print the report. The exit status is 1 if a part of it fails."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and not arguments[0].startswith("-"):
        from tsunax.timelines import command_line

        return command_line.main(arguments)
    about = "Print versions, devices, extras and a self-check of a second, for a report of a bug."
    runs = (
        "To talk to a run: python -m tsunax status RUN. All commands: python -m tsunax log --help."
    )
    parser = argparse.ArgumentParser(prog="python -m tsunax", description=about, epilog=runs)
    parser.parse_args(arguments)
    failed = False
    for line in report():
        failed |= "FAILED" in line
        print(line, flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

__all__ = ["devices", "main", "report", "self_check", "version_of"]
