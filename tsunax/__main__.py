"""`python -m tsunax`: versions, devices, extras and a self-check, for bug reports."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import sys
import textwrap
import time
from collections.abc import Callable, Iterator

import jax
import numpy as np

import tsunax as ts

LIBRARIES = ("jax", "jaxlib", "optax", "flax", "orbax-checkpoint", "numpy", "ml-dtypes")
EXTRAS = (
    "grain",
    "tensorboardX",
    "optuna",
    "ray",
    "mpi4py",
    "matplotlib",
    "safetensors",
    "equinox",
    "dm-haiku",
    "torch",
)
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
    state, twin = (
        ts.setup(ts.rules.adam(0.1), {"w": np.zeros((4, 2), np.float32)}) for _ in range(2)
    )
    losses = []
    for _ in range(20):
        state, info = step(state, x)
        losses.append(float(info.loss))
    twin, _ = ts.fit(step, twin, [x], steps=20, steps_per_call=4, progress=False)
    same = np.allclose(state.params["w"], twin.params["w"], rtol=1e-5, atol=1e-6)
    verdict = "ok" if same and losses[-1] < losses[0] / 2 and int(state.step) == 20 else "FAILED"
    return (
        f"{verdict}: loss {losses[0]:.4f} to {losses[-1]:.4f} in 20 steps, "
        f"{time.perf_counter() - start:.1f} s"
    )


def devices() -> str:
    """A line for each device, with its kind, memory and driver."""
    lines = []
    for device in jax.devices():
        info = ts.devices.device_info(device)
        memory = [] if info.memory_total is None else [f"{info.memory_total / 2**30:.1f} GiB"]
        parts = dict.fromkeys(
            [device.device_kind, info.kind, *memory, *info.version.splitlines()[:1]]
        )
        lines.append(f"device {device}: {', '.join(parts)}")
    return "\n".join(lines)


def tried(what: str, f: Callable[[], str]) -> str:
    """A part of the report, or why it failed: what is broken is what the report is for."""
    try:
        return f()
    except Exception as error:
        reason = " ".join(str(error).split())
        return f"{what} FAILED: {type(error).__name__}{': ' * bool(reason)}{reason}"


def report() -> Iterator[str]:
    """The lines, each as soon as it is known: what comes next may hang."""
    yield (
        f"tsunax {ts.__version__}, Python {platform.python_version()}, {platform.system()} "
        f"{platform.machine()}"
    )
    found = {name: version_of(name) for name in (*LIBRARIES, *EXTRAS)}
    yield ", ".join(f"{name} {found[name]}" for name in LIBRARIES)
    yield "extras: " + (
        ", ".join(f"{name} {found[name]}" for name in EXTRAS if found[name] != "-") or "none"
    )
    if settings := [f"{name}={os.environ[name]}" for name in SETTINGS if os.environ.get(name)]:
        yield "settings: " + ", ".join(settings)
    yield tried("preference", lambda: f"preferred device: {ts.devices.preferred() or 'none'}")
    yield from tried("devices", devices).splitlines()
    yield tried("self-check", lambda: f"self-check {self_check()}")


def main(arguments: list[str] | None = None) -> int:
    """Print the report. The exit status is 1 where a part of it fails."""
    about = "Print versions, devices, extras and a self-check of a second, for a report of a bug."
    argparse.ArgumentParser(prog="python -m tsunax", description=about).parse_args(arguments)
    failed = False
    for line in report():
        failed |= "FAILED" in line
        text = textwrap.fill(
            line, 80, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
        )
        print(text, flush=True)
    return int(failed)


if __name__ == "__main__":
    try:
        status: int = main()
    except BrokenPipeError:  # `python -m tsunax | head`
        # nothing to flush to at the exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    sys.exit(status)

__all__ = ["devices", "main", "report", "self_check", "version_of"]
