"""What `callbacks.verify` costs a run of `fit`: CPU time over the same run without it, in turns.

A step that is verified runs twice. Beside the second step it costs a copy of the state before it, a second copy for the
second step, the comparison of the two states, and a boundary, where a call of one step takes the place of many. These
cost the same for any batch, so they count less the longer a step takes.
"""

import statistics
import time

import jax
import numpy as np
import tsunax as ts
from tsunax.run.verifying import different_leaves
from tsunax.state import own

from benchmarks._common import interleave, mlp, mlp_loss, note, ratio, save, table

SIZES = [256, 512, 512, 10]
EVERY = 10, 100


def new_state():
    return ts.setup(ts.rules.adam(1e-3), mlp(SIZES))


def contenders(rows: int):
    """A burst of `fit` without `verify`, and one for each cadence."""
    step, rng = ts.train_step(mlp_loss), np.random.default_rng(0)
    x = rng.normal(size=(10 * rows, SIZES[0])).astype(np.float32)
    arrays = x, rng.integers(SIZES[-1], size=len(x)).astype(np.int32)

    def burst_of(*callbacks):
        def burst(steps):
            options = {"steps": steps, "callbacks": callbacks, "log_every": 100, "progress": False}
            ts.fit(step, new_state(), ts.batches(arrays, rows), **options)

        return burst

    return {"without": burst_of()} | {f"every={n}": burst_of(ts.callbacks.verify(every=n)) for n in EVERY}


def main():
    table_rows, state = [], new_state()
    for rows, steps in ((128, 400), (1024, 200)):
        bursts = contenders(rows)
        for burst in bursts.values():
            burst(steps)  # compiles the calls of many steps and the comparison
        times = interleave(bursts, rounds=10, steps=steps, clock=time.process_time)
        step_time = statistics.median(times["without"])
        pairs = zip(times["every=10"], times["without"], strict=True)
        more = statistics.median(10 * (with_verify - without) for with_verify, without in pairs)
        table_rows += [(f"step of {step_time / 1e3:.1f} ms, every={n}", 1 + 1 / n, *ratio(times, f"every={n}", "without"))
                       for n in EVERY]  # fmt: skip
        note(f"a step takes {step_time / 1e3:.2f} ms of CPU time, a verified step {more / 1e3:.2f} ms more")
    head = ("verify", "1 + 1/every", "x low", "x median", "x high")
    table("CPU time of fit over fit without verify", table_rows, head)
    parts = {
        "two copies": lambda n: [jax.block_until_ready(jax.tree.map(own, state)) for _ in range(2 * n)],
        "the comparison": lambda n: [different_leaves(state, state) for _ in range(n)],
    }
    times = interleave(parts, rounds=10, steps=50, clock=time.process_time)
    listed = ", ".join(f"{name} {statistics.median(us) / 1e3:.2f} ms" for name, us in times.items())
    note(f"of which: {listed}; the rest are the second step, the boundary and the call of one step")
    save("verify")


if __name__ == "__main__":
    main()
