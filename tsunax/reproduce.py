"""Same seed, same bits: seeding, deterministic kernels, and a check that a step repeats.

    key = ts.reproduce.reproducible(0)                    # the first line of the script
    print(ts.reproduce.fingerprint(state))                # the same on every run
    ts.reproduce.check_reproducible(step, state, batches)

JAX draws from keys only. Other sources of randomness are the global generators of Python and NumPy,
which data pipelines use, and GPU kernels that add in any order. See docs/reproducibility.md.
"""

import contextlib
import hashlib
import operator
import os
import random
import re
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np
from jax._src import compilation_cache, xla_bridge

from tsunax._core import Function, PyTree, StrPath, checks, libraries, stable_text, trees
from tsunax.errors import DataError, DeviceError, StateError

__all__ = [
    "check_reproducible", "compile_cache", "fingerprint", "isolated_rng", "reproducible",
    "worker_seed",
]  # fmt: skip

_DETERMINISTIC_FLAGS = (
    "--xla_gpu_deterministic_ops=true",
    "--xla_gpu_exclude_nondeterministic_ops=true",
)


def reproducible(seed: int = 0) -> jax.Array:
    """A key, after seeding Python and NumPy and requesting deterministic GPU kernels.

    Call it before JAX starts its backend, which reads the flags then (XLA_FLAGS:
    `xla_gpu_deterministic_ops`, `xla_gpu_exclude_nondeterministic_ops`; scatters and some
    convolutions become slower). The same flags fix the kernels that autotuning picks by timing.

    The seed is an int from 0 up to 2**63. Raises DeviceError if a GPU has started without these
    flags.

    >>> jax.random.key_data(reproducible(7)).tolist()
    [0, 7]
    """
    seed = operator.index(seed)
    user_flags = os.environ.get("XLA_FLAGS", "")
    missing_flags = [
        flag for flag in _DETERMINISTIC_FLAGS if flag.partition("=")[0] not in user_flags
    ]
    if nondeterministic := re.search(r"deterministic_ops=(false|0)\b", user_flags, re.IGNORECASE):
        raise DeviceError("XLA_FLAGS", "reproducible()", nondeterministic[0], "true, or none")
    if not xla_bridge.backends_are_initialized():
        os.environ["XLA_FLAGS"] = " ".join([user_flags, *missing_flags]).strip()
    elif missing_flags and jax.default_backend() == "gpu":
        raise DeviceError(
            "reproducible()",
            "",
            got="a GPU that has started without its flags",
            expected="an earlier call, before the first array",
        )
    _seed_all(seed)
    return key_of(seed)


def key_of(seed: int) -> jax.Array:
    """`jax.random.key(seed)`, with the bits above 32 folded in, which JAX would drop."""
    key = jax.random.key(seed & 0xFFFFFFFF)
    return key if seed >> 32 in (0, -1) else jax.random.fold_in(key, seed >> 32 & 0xFFFFFFFF)


def compile_cache(path: StrPath, *, max_bytes: int | None = None) -> None:
    """Keep compiled programs in the directory `path`, from which the next process reads them.

    It sets JAX's compilation cache to keep programs of any size and compile time. Call it first:
    programs that are compiled earlier are not kept. The files are code that runs in your process:
    other users must not be able to write there. With `max_bytes` (needs `filelock`) the least
    recently used files are deleted.

    Raises DeviceError if JAX keeps programs in another directory already, OSError if `path` cannot
    be written to, MissingLibraryError.
    """
    where, config = "compile_cache()", jax.config
    if max_bytes is not None:
        checks.check_count(max_bytes, where, "max_bytes")
        libraries.library("filelock", f"{where} with max_bytes")
    folder = os.path.expanduser(path)
    if "://" not in folder:  # JAX reads and writes buckets itself
        os.makedirs(folder, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()  # JAX would only warn, at each program
        folder = os.path.abspath(folder)
    current_folder = config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    if compilation_cache._cache is not None and current_folder not in (None, folder):
        raise DeviceError(
            "path",
            where,
            got=folder,
            expected=f"{current_folder}, which is in use already",
            fix="Call it first, and without JAX_COMPILATION_CACHE_DIR.",
        )
    config.update("jax_compilation_cache_dir", folder)
    config.update("jax_compilation_cache_max_size", -1 if max_bytes is None else int(max_bytes))
    config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    compilation_cache.reset_cache()  # JAX reads directory and size once


@contextlib.contextmanager
def isolated_rng(seed: int | None = None) -> Iterator[None]:
    """A context that restores the global generators of Python and NumPy at its end.

    With a `seed`, an int as in `reproducible`, they are seeded at its start.

    >>> random.seed(1)
    >>> with isolated_rng(2):
    ...     inside = random.random()
    >>> after = random.random()
    >>> random.seed(1)
    >>> after == random.random() != inside
    True
    """
    old_generators = random.getstate(), np.random.get_state()
    if seed is not None:
        _seed_all(operator.index(seed))
    try:
        yield
    finally:
        random.setstate(old_generators[0])
        np.random.set_state(old_generators[1])


def worker_seed(seed: int, *path: int) -> int:
    """A seed for a worker of a data loader: `worker_seed(seed, epoch, process, worker)`.

    Seeds of different paths are unrelated (NumPy's SeedSequence, O'Neill's design); `seed + worker`
    would repeat the augmentations of an epoch in the next. The seed, the numbers of the `path` and
    the result are ints from 0 up to 2**63.

    >>> worker_seed(0, 1, 2) == worker_seed(0, 1, 2) != worker_seed(0, 2, 1)
    True
    """
    low, high = np.random.SeedSequence(operator.index(seed), spawn_key=path).generate_state(2)
    return int(low) | (int(high) & 0x7FFFFFFF) << 32


def fingerprint(tree: PyTree) -> str:
    """16 hex digits of the sha256 of the paths, shapes, dtypes and bytes in `tree`. Waits.

    Each process computes a fingerprint. They are equal if each process has all of each array.
    Raises StateError for arrays that are spread over processes.

    >>> import jax.numpy as jnp
    >>> fingerprint({"w": jnp.zeros(2)}) == fingerprint({"w": np.zeros(2, np.float32)})
    True
    """
    digest = hashlib.sha256()
    for path, leaf in jtu.tree_flatten_with_path(tree)[0]:
        digest.update(_hash_of_leaf(trees.path_str(path), leaf))
    return digest.hexdigest()[:16]


def _hash_of_leaf(path: str, leaf) -> bytes:
    digest = hashlib.sha256(path.encode())
    is_no_array = trees.dtype_of(leaf) is None
    bits = None if is_no_array else stable_text.bits_of(leaf)
    if bits is not None and not bits.dtype.hasobject:
        digest.update(f"{bits.dtype}{bits.shape}".encode() + bits.tobytes())
    elif is_no_array or bits is not None:
        digest.update(stable_text.words_of(leaf).encode())
    else:
        raise StateError(
            "leaf",
            path or "tree",
            got=f"{trees.describe(leaf)}, of which other processes have a part",
            expected="a whole array, or x.addressable_shards",
        )
    return digest.digest()


def check_reproducible(step: Function, state: PyTree, batches: Iterable[Any]) -> str:
    """The fingerprint of the last state of two equal runs of `step` over the batches.

    `step(state, batch) -> (state, info)` runs on copies of the state. Raises StateError that names
    the first batch after which they differ, and the first leaf; DataError for no batch.

    >>> import jax.numpy as jnp
    >>> import tsunax as ts
    >>> step = ts.train_step(lambda params, x: jnp.mean((x @ params["w"]) ** 2))
    >>> state = ts.setup(ts.rules.sgd(0.1), {"w": jnp.ones(2)})
    >>> len(check_reproducible(step, state, [jnp.eye(2)] * 3))
    16
    """
    if not (batches := list(batches)):
        raise DataError("batches", "check_reproducible()", "no batch at all", "at least one")
    copy_of = lambda tree: jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array) else x, tree)
    first_state, second_state = copy_of(state), copy_of(state)
    for i, batch in enumerate(batches):
        first_state, second_state = step(first_state, batch)[0], step(second_state, batch)[0]
        leaves = zip(
            trees.leaves_at("state", first_state), jax.tree.leaves(second_state), strict=True
        )
        for (place, x), y in leaves:
            if _hash_of_leaf(place, x) != _hash_of_leaf(place, y):
                raise StateError("step", f"batch {i}", f"other bits in {place}", "the same twice")
    return fingerprint(first_state)


def _seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32])  # words of 32 bits
