"""What `fit` pays for the batches of other loaders, which are copied, and for a batch that never changes.

Microseconds of CPU time a batch (all threads), the least of several rounds: robust on a loaded machine.
"""

import gc
import time

import jax
import jax.numpy as jnp
import numpy as np
import tsunax as ts

from benchmarks._common import save, table

SHAPES = {"32 x 64": (32, 64), "128 x 784": (128, 784), "1 MB": (256, 1024), "10 MB": (256, 10240)}
FIRST = ts.train_step(lambda params, x: jnp.mean(x[0, :2]) * params["w"], norms=False)  # all cost is the batch's
WHOLE = ts.train_step(lambda params, x: jnp.mean((x @ params["w"]) ** 2))


class Loader:
    """Batches in buffers of its own."""

    def __init__(self, shape, n):
        self.buffers = [np.random.default_rng(i).random(shape, np.float32) for i in range(4)]
        self.n = n

    def __iter__(self):
        return (self.buffers[i % 4] for i in range(self.n))


def least(cases: dict, n: int, rounds: int) -> dict[str, float]:
    best = dict.fromkeys(cases, float("inf"))
    for _ in range(rounds):
        for name, run in cases.items():
            gc.collect()
            start = time.process_time()
            run()
            best[name] = min(best[name], (time.process_time() - start) / n * 1e6)
    return best


def fitted(step, state, data, n, per="auto"):
    state, _ = ts.fit(step, state, data, steps=n, progress=False, steps_per_call=per, log_every=100)
    jax.block_until_ready(state.params)


def of_loaders(shape) -> dict[str, float]:
    n = int(max(40, min(1000, 2e8 / (np.prod(shape) * 4))))
    loader, new = Loader(shape, n), lambda: ts.setup(ts.rules.sgd(1.0), {"w": jnp.zeros(())})
    rows = np.concatenate([loader.buffers[i % 4] for i in range(8)])
    own = lambda: ts.batches(rows, shape[0], shuffle=True)

    def prefetched(device):
        for batch in ts.prefetch(loader, device):
            last = batch
        jax.block_until_ready(last)

    cases = {
        "fit": lambda: fitted(FIRST, new(), loader, n),
        "fit, 1 step a call": lambda: fitted(FIRST, new(), loader, n, 1),
        "fit, no loop": lambda: fitted(FIRST, new(), loader, n, None),
        "prefetch": lambda: prefetched(None),
        "prefetch to the device": lambda: prefetched(jax.devices()[0]),
        "fit, ts.batches": lambda: fitted(FIRST, new(), own(), n),
    }
    return least(cases, n, 6)


def of_one_batch(rows, n=2000) -> dict[str, float]:
    x = np.random.default_rng(0).normal(size=(rows, 8)).astype(np.float32)
    new = lambda: ts.setup(ts.rules.sgd(0.1), {"w": jnp.ones((8, 4))})

    def loop(x):
        state = new()
        for _ in range(n):
            state, _ = WHOLE(state, x)
        jax.block_until_ready(state.params)

    cases = {
        "loop, NumPy": lambda: loop(x),
        "loop, JAX": lambda: loop(jnp.asarray(x)),
        "fit([x]), NumPy": lambda: fitted(WHOLE, new(), [x], n),
        "fit([x]), JAX": lambda: fitted(WHOLE, new(), [jnp.asarray(x)], n),
        "fit(ts.batches)": lambda: fitted(WHOLE, new(), ts.batches(x, rows), n),
    }
    return least(cases, n, 5)


def main() -> None:
    found = {name: of_loaders(shape) for name, shape in SHAPES.items()}
    rows = [(name, *(found[shape][name] for shape in SHAPES)) for name in found["1 MB"]]
    table("us of CPU a batch, loaders of others", rows, ("how", *SHAPES))
    one = of_one_batch(32)
    table("us of CPU a step, one batch of 32 x 8 for all", list(one.items()), ("how", "us"))
    save("loaders")


if __name__ == "__main__":
    main()
