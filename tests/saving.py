"""What one of several processes saves in a test: `python -m tests.saving WORK FOLDER`; prints what it found as JSON."""

import contextlib
import json
import os
import sys
from pathlib import Path

import numpy as np

import tsunax as ts
from tsunax import distributed

SHAPES = {"w": (8, 6), "deep": {"v": (4, 1024), "b": (6,)}}


def trained(scale=1.0):
    """A state some steps into a run, the same on all processes: each computes it by itself."""
    import jax
    import jax.numpy as jnp

    draw = np.random.default_rng(5)
    params = jax.tree.map(
        lambda shape: draw.normal(size=shape).astype(np.float32), SHAPES, is_leaf=lambda x: isinstance(x, tuple)
    )
    state = ts.setup(ts.rules.adam(0.1), params, key=3, ema=0.5, model_state={"seen": jnp.zeros(())})
    for i in range(2):
        grads = jax.tree.map(lambda x, i=i: jnp.asarray(draw.normal(size=x.shape) * scale + i, jnp.float32), params)
        state, _ = ts.update(state, grads)
    return state


def blank():
    """What a script's setup returns."""
    import jax
    import jax.numpy as jnp

    params = jax.tree.map(lambda shape: np.zeros(shape, np.float32), SHAPES, is_leaf=lambda x: isinstance(x, tuple))
    return ts.setup(ts.rules.adam(0.1), params, key=0, ema=0.5, model_state={"seen": jnp.zeros(())})


def meshes() -> dict:
    n = distributed.process_count()
    return {"replicated": ts.mesh(), "spread": ts.mesh(data=1, fsdp=-1)} | (
        {"mixed": ts.mesh(data=2, fsdp=-1)} if n > 2 else {}
    )


def same(found, expected) -> bool:
    """Whether what this process has of a state are the bits that are expected."""
    import jax

    wrong = []
    for (path, x), y in zip(jax.tree_util.tree_flatten_with_path(found)[0], jax.tree.leaves(expected), strict=True):
        if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        y = np.asarray(y)
        pieces = [(s.data, y[s.index]) for s in x.addressable_shards]
        if not pieces or any(np.asarray(a).tobytes() != b.tobytes() for a, b in pieces) or x.shape != y.shape:
            wrong.append(jax.tree_util.keystr(path))
    return not wrong


def moves(folder: Path) -> dict:
    """Restore whatever others saved, onto every mesh that there is here; save from each mesh."""
    expected, found = trained(), {}
    for path in sorted(folder.iterdir()) if folder.exists() else []:
        for name, mesh in meshes().items():
            like = ts.shard(blank(), mesh)
            restored = ts.Checkpoints(path, read_only=True).restore(like)
            placed = all(a.sharding == b.sharding for a, b in zip(_leaves(restored.state), _leaves(like), strict=True))
            found[f"{path.name} to {name}"] = [restored.step, same(restored.state, expected), placed, restored.data]
    distributed.barrier("read")
    for name, mesh in meshes().items():
        with ts.Checkpoints(folder / f"{distributed.process_count()} {name}") as checkpoints:
            checkpoints.save(ts.shard(expected, mesh), data={"position": 7}, history={"loss": np.arange(3.0)})
    return found


def _leaves(tree):
    import jax

    return jax.tree.leaves(tree)


def main(work: str, folder: str) -> None:
    distributed.start(**json.loads(os.environ.get("TSUNAX_TEST_START", "{}")))
    found = {f.__name__: f for f in (moves,)}[work](Path(folder))
    with contextlib.suppress(BrokenPipeError):
        print("FOUND", json.dumps([distributed.process_index(), found]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
