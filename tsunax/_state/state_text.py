"""The text of a state: its tree, counts, hyperparameters, frozen leaves, bytes and devices."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tsunax._core import tables, trees
from tsunax._state import frozen_flags, trained_count


def state_text(state: Any) -> str:
    """The text of `repr(state)`: tree, counts, hyperparameters, frozen parts, bytes, placement."""
    leaves, kind = jax.tree.leaves(state), type(state).__name__
    if any(map(trees.is_traced, leaves)):
        return f"{kind}(traced, {len(leaves)} arrays)"
    if any(isinstance(x, jax.Array) and x.is_deleted() for x in leaves):
        return f"{kind}(donated, {len(leaves)} arrays)"
    concrete = all(map(trees.is_array, leaves)) and jnp.ndim(state.clock) == 1
    head = f"step={int(state.step)}, calls={int(state.calls)}" if concrete else "abstract"
    if jnp.ndim(state.clock) > 1:
        head = f"stacked {jnp.shape(state.clock)[:-1]}"
    lines = [f"{kind}({head})", *_tree_rows(state)]
    if concrete and state.numbers is not None:
        numbers = state.numbers.named(state.step).items()
        lines.append("  " + ", ".join(f"{name}={value:.6g}" for name, value in numbers))
    place = f", on {_devices(leaves)}" if all(map(trees.is_array, leaves)) else ""
    fields_by_word = {f.metadata["shows"]: getattr(state, f.name) for f in state._fields}
    sizes = [f"{name} {_size_text(tree)}" for name, tree in fields_by_word.items() if name]
    return "\n".join([*lines, f"  {', '.join(sizes)}{place}"])


def _tree_rows(state: Any) -> list[str]:
    """A line per leaf of params: path, type, status."""
    kind = lambda leaf: f"{trees.dtype_of(leaf)}{list(jnp.shape(leaf))}"
    rows = [(path, kind(leaf), status) for path, leaf, status in leaf_rows(state)]
    if len(rows) > 24:
        rows = [*rows[:12], (f"... {len(rows) - 20} more", "", ""), *rows[-8:]]
    return [f"  {line}" for line in tables.aligned(rows)]


def leaf_rows(state: Any) -> list[tuple[str, Any, str]]:
    """Path, leaf and status of each leaf of params: "", "2 of 8 frozen", "overwritten", ..."""
    named = trees.leaves_with_names(state.params)
    n = len(named)
    selected, replaced = state.plan.selected or (True,) * n, state.plan.overwritten or (False,) * n
    frozen, rows = iter(_frozen_words(state)), []
    for (name, _, leaf), is_trained, is_overwritten in zip(named, selected, replaced, strict=True):
        status = next(frozen) if is_trained else "overwritten" if is_overwritten else "not trained"
        rows.append((trees.shown_path(name), leaf, status))
    return rows


def _frozen_words(state: Any) -> list[str]:
    """For each trained leaf "frozen", or in how many members, or "" (also for mere shapes)."""
    if not all(map(trees.is_array, jax.tree.leaves(state.frozen))):
        return [""] * trained_count(state)
    flags = np.atleast_2d(frozen_flags(state))
    counts = [f"{row.sum()} of {len(row)} frozen" if row.any() else "" for row in flags.T]
    return ["frozen" if row.all() else text for row, text in zip(flags.T, counts, strict=True)]


def _size_text(tree) -> str:
    arrays = [x for x in jax.tree.leaves(tree) if trees.dtype_of(x) is not None]
    sizes = (np.prod(jnp.shape(x)) * trees.dtype_of(x).itemsize for x in arrays)
    return trees.bytes_str(float(sum(sizes)))


def _devices(leaves) -> str:
    devices_of_leaves = {d for x in leaves if isinstance(x, jax.Array) for d in x.devices()}
    devices = sorted(devices_of_leaves, key=lambda d: d.id)
    if not devices:
        return "the host"
    return str(devices[0]) if len(devices) == 1 else f"{len(devices)} devices ({devices[0]} ...)"
