"""900 leaves over 256 simulated devices, saved and restored; prints seconds.

python -m tests.programs.shards FOLDER STORE
"""

import os
import sys
import time

os.environ |= {"XLA_FLAGS": "--xla_force_host_platform_device_count=256", "NPROC": "16"}

import jax
import jax.numpy as jnp
import numpy as np
import tsunax as ts
from jax.sharding import NamedSharding, PartitionSpec


def main(folder: str, store) -> None:
    mesh = jax.make_mesh((256,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, whole = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    spread = lambda x: jax.device_put(x, rows if np.ndim(x) == 2 and x.shape[0] == 256 else whole)
    draw = np.random.default_rng(0)
    params = {f"layer{i}": draw.normal(size=(256, 16)).astype(np.float32) for i in range(300)}
    state = jax.tree.map(spread, ts.setup(ts.rules.adam(1e-3), params))
    assert len(jax.tree.leaves(state.opt_state)) > 600
    start = time.perf_counter()
    with ts.Checkpoints(folder, store=store, timeout=600) as checkpoints:
        checkpoints.save(state)
    saved = time.perf_counter()
    blank = ts.setup(ts.rules.adam(1e-3), jax.tree.map(jnp.zeros_like, params))
    found = ts.Checkpoints(folder, read_only=True).restore(jax.tree.map(spread, blank)).state
    restored = time.perf_counter()
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True):
        assert np.array_equal(x, y)
        assert x.sharding == y.sharding
    print(f"{store}: save {saved - start:.2f} s, restore {restored - saved:.2f} s")


if __name__ == "__main__":
    main(*sys.argv[1:])
