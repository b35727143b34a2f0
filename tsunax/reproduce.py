"""Same seed, same bits: seeding, deterministic kernels, and a check that a step repeats.

    key = ts.reproduce.reproducible(0)                    # the first line of the script
    print(ts.reproduce.fingerprint(state))                # the same on every run
    ts.reproduce.check_reproducible(step, state, batches)

JAX draws from keys only. What remains are the global generators of Python and NumPy, which data
pipelines use, and GPU kernels that add in any order. See docs/reproducibility.md.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import re
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np
from jax._src import xla_bridge

from tsunax._core import Function, PyTree, checks, stable_text, trees
from tsunax.errors import DataError, DeviceError, StateError, WrongTypeError

__all__ = ["check_reproducible", "fingerprint", "isolated_rng", "reproducible", "worker_seed"]

_FLAGS = ("--xla_gpu_deterministic_ops=true", "--xla_gpu_exclude_nondeterministic_ops=true")
_MOST = 2**63


def reproducible(seed: int = 0) -> jax.Array:
    """A key, after seeding Python and NumPy and requesting deterministic GPU kernels.

    Call it before JAX starts its backend, which reads the flags then (XLA_FLAGS:
    `xla_gpu_deterministic_ops`, `xla_gpu_exclude_nondeterministic_ops`; scatters and some
    convolutions become slower). The same flags fix the kernels that autotuning picks by timing.

    Raises DeviceError if a GPU has started without these flags, WrongTypeError unless the seed is
    an int from 0 up to 2**63.

    >>> jax.random.key_data(reproducible(7)).tolist()
    [0, 7]
    """
    seed = _checked(seed, "reproducible()")
    given = os.environ.get("XLA_FLAGS", "")
    missing = [flag for flag in _FLAGS if flag.partition("=")[0] not in given]
    if found := re.search(r"deterministic_ops=(false|0)\b", given, re.IGNORECASE):
        raise DeviceError("XLA_FLAGS", "reproducible()", found[0], "true, or none")
    if not xla_bridge.backends_are_initialized():
        os.environ["XLA_FLAGS"] = " ".join([given, *missing]).strip()
    elif missing and jax.default_backend() == "gpu":
        fix = "Call it first, before anything makes an array; in a notebook restart the kernel."
        got = "a GPU that has started without its flags"
        raise DeviceError("reproducible()", "", got, "an earlier call", fix)
    random.seed(seed)
    np.random.seed(_legacy(seed))
    return key_of(seed)


def key_of(seed: int) -> jax.Array:
    """`jax.random.key(seed)`, with the bits above 32 folded in, which JAX would drop."""
    key = jax.random.key(seed & 0xFFFFFFFF)
    return key if seed >> 32 in (0, -1) else jax.random.fold_in(key, seed >> 32 & 0xFFFFFFFF)


@contextlib.contextmanager
def isolated_rng(seed: int | None = None) -> Iterator[None]:
    """A block after which Python's and NumPy's global generators are as before.

    With a `seed`, they are seeded at its start.

    >>> random.seed(1)
    >>> with isolated_rng(2):
    ...     inside = random.random()
    >>> after = random.random()
    >>> random.seed(1)
    >>> after == random.random() != inside
    True
    """
    seed = None if seed is None else _checked(seed, "isolated_rng()")
    before = random.getstate(), np.random.get_state()
    if seed is not None:
        random.seed(seed)
        np.random.seed(_legacy(seed))
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


def worker_seed(seed: int, *path: int) -> int:
    """A seed for a worker of a data loader: `worker_seed(seed, epoch, process, worker)`.

    Seeds of different paths are unrelated (NumPy's SeedSequence, O'Neill's design); `seed + worker`
    would repeat the augmentations of one epoch in the next.

    >>> worker_seed(0, 1, 2) == worker_seed(0, 1, 2) != worker_seed(0, 2, 1)
    True
    """
    parts = [_checked(x, "worker_seed()") for x in (seed, *path)]
    low, high = np.random.SeedSequence(parts[0], spawn_key=parts[1:]).generate_state(2)
    return int(low) | (int(high) & 0x7FFFFFFF) << 32


def fingerprint(tree: PyTree) -> str:
    """16 hex digits of the sha256 of every leaf's path, shape, dtype and bytes. Waits.

    Each of several processes has its own; they are equal if each process has all of each array.
    Raises StateError for traced arrays, deleted arrays, and arrays spread over processes.

    >>> import jax.numpy as jnp
    >>> fingerprint({"w": jnp.zeros(2)}) == fingerprint({"w": np.zeros(2, np.float32)})
    True
    """
    total = hashlib.sha256()
    for path, leaf in jtu.tree_flatten_with_path(tree)[0]:
        _check_concrete(leaf, trees.access_str("tree", path))
        total.update(_of_leaf(path, leaf))
    return total.hexdigest()[:16]


def _of_leaf(path, leaf) -> bytes:
    part = hashlib.sha256(trees.path_str(path).encode())
    bits = None if trees.dtype_of(leaf) is None else stable_text.bits_of(leaf)
    if bits is not None and not bits.dtype.hasobject:
        part.update(f"{bits.dtype}{bits.shape}".encode())
        part.update(bits.tobytes())
    elif trees.dtype_of(leaf) is None or bits is not None:
        part.update(stable_text.words_of(leaf).encode())
    else:
        place, got = trees.access_str("tree", path), "of which other processes have a part"
        got, fix = f"{trees.describe(leaf)}, {got}", "Of each process's own: x.addressable_shards."
        raise StateError("leaf", place, got, "a whole array", fix)
    return part.digest()


def _check_concrete(leaf, place: str, fix: str = "") -> None:
    if trees.is_traced(leaf):
        raise StateError("leaf", place, "a traced array", "a concrete one", fix)
    checks.check_alive(leaf, place)


def check_reproducible(
    step: Function, state: PyTree, batches: Iterable[Any], *, times: int = 2
) -> str:
    """The fingerprint of the last state of several equal runs of `step` over the batches.

    `step(state, batch) -> (state, info)` runs on copies of the state. Raises StateError that names
    the first batch after which two runs differ, and the first leaf; DataError for no batch.

    >>> import jax.numpy as jnp
    >>> import tsunax as ts
    >>> step = ts.train_step(lambda params, x: jnp.mean((x @ params["w"]) ** 2))
    >>> state = ts.setup(ts.rules.sgd(0.1), {"w": jnp.ones(2)})
    >>> len(check_reproducible(step, state, [jnp.eye(2)] * 3))
    16
    """
    where = "check_reproducible()"
    checks.check_count(times, where, "times", least=2)
    for path, leaf in jtu.tree_flatten_with_path(state)[0]:
        _check_concrete(leaf, trees.access_str("state", path), "Call it outside of jit.")
    if not (batches := list(batches)):
        raise DataError("batches", where, "no batch at all", "at least one", "Give a list.")
    copied = lambda tree: jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array) else x, tree)
    runs = [copied(state) for _ in range(times)]
    for at, batch in enumerate(batches):
        runs = [step(run, batch)[0] for run in runs]
        for other in runs[1:]:
            if fingerprint(runs[0]) != fingerprint(other):
                keyed = jtu.tree_flatten_with_path(runs[0])[0]
                pairs = zip(keyed, jax.tree.leaves(other), strict=True)
                path = next(p for (p, x), y in pairs if _of_leaf(p, x) != _of_leaf(p, y))
                got = f"other bits in {trees.access_str('state', path)}"
                fix = "Same inputs, same bits: see reproducible()."
                raise StateError("step", f"batch {at}", got, "the same in every run", fix)
    return fingerprint(runs[0])


def _checked(seed: Any, where: str) -> int:
    expected = "an int from 0 to 2**63 - 1"
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
        raise WrongTypeError("seed", where, trees.describe(seed), expected)
    if not 0 <= seed < _MOST:
        raise WrongTypeError("seed", where, seed, expected)
    return int(seed)


def _legacy(seed: int) -> list[int]:
    """A seed of NumPy's old generator, in words of 32 bits."""
    return [seed & 0xFFFFFFFF, seed >> 32]
