"""`python -m tsunax`: versions, devices, extras and a self-check of a second, for a report of a bug."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
import time

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


def version_of(library: str) -> str:
    """The version that is installed, or "-"."""
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return "-"


def self_check() -> str:
    """A line of text: twenty steps in a loop of Python and in a compiled one learn, and agree."""
    start = time.perf_counter()
    x = np.linspace(-1, 1, 64, dtype=np.float32).reshape(16, 4)
    step = ts.train_step(lambda params, x: ((x @ params["w"] - x[:, :2]) ** 2).mean())
    state, twin = (ts.setup(ts.rules.adam(0.1), {"w": np.zeros((4, 2), np.float32)}) for _ in range(2))
    losses = []
    for _ in range(20):
        state, info = step(state, x)
        losses.append(float(info.loss))
    twin, _ = ts.fit(step, twin, [x], steps=20, steps_per_call=4, progress=False)
    same = np.allclose(state.params["w"], twin.params["w"], rtol=1e-5, atol=1e-6)
    verdict = "ok" if same and losses[-1] < losses[0] / 2 and int(state.step) == 20 else "FAILED"
    return f"{verdict}: loss {losses[0]:.4f} to {losses[-1]:.4f} in 20 steps, {time.perf_counter() - start:.1f} s"


def main() -> int:
    """Print the report. The exit status is 1 where the self-check fails."""
    found = {name: version_of(name) for name in (*LIBRARIES, *EXTRAS)}
    print(f"tsunax {ts.__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}")
    print(", ".join(f"{name} {found[name]}" for name in LIBRARIES))
    print("extras: " + (", ".join(f"{name} {found[name]}" for name in EXTRAS if found[name] != "-") or "none"))
    for device in jax.devices():
        info = ts.device_info(device)
        memory = "" if info.memory_total is None else f", {info.memory_total / 2**30:.1f} GiB"
        print(f"device {device}: {info.kind}{memory}, {info.version.splitlines()[0]}")
    try:
        line = self_check()
    except Exception as error:
        line = f"FAILED: {type(error).__name__}: {error}"
    print(f"self-check {line}")
    return int("FAILED" in line)


if __name__ == "__main__":
    sys.exit(main())

__all__ = ["main", "self_check", "version_of"]
