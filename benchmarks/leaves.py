"""What the number of leaves costs, beside plain JAX: an MLP of 10, 200 and 1,000 arrays.

`same info` computes the norm of the gradient, the finite check and a select of each array, `one cond` the same in
the fastest way known (benchmarks/step.py), which tsunax takes, too; `bare` computes none of them.
`--leaves 10 3000` measures other numbers; one compilation of 3,000 takes minutes. Times are the
best of three, but of one trace and compilation from 1,000 leaves on; a step is the median of bursts
that take turns. All but `adjust again` and the step are cold: the caches of JAX are empty.
"""

import argparse
import functools
import time

import jax
import tsunax as ts

from benchmarks import verdict
from benchmarks._common import batch_of, interleave, mlp, mlp_loss, note, save, table
from benchmarks.step import CLOCK, ONE_COND, TX, bare, by_hand, by_tsunax, one_cond, same_info

ADAM = ts.rules.adam(1e-3)
UNGUARDED = functools.partial(ts.train_step, mlp_loss, norms=False, on_nonfinite="ignore")
STEPS = {10: 300, 200: 30}  # of a burst; 3 where there are more


def seconds(f, tries: int = 3) -> float:
    """Of the fastest call; the caches of JAX are empty before each."""
    best = float("inf")
    for _ in range(tries):
        jax.clear_caches()
        start = time.perf_counter()
        jax.block_until_ready(f())
        best = min(best, time.perf_counter() - start)
    return best


def warm(f) -> float:
    """Of the fastest of three calls after the first."""
    f()
    times = []
    for _ in range(3):
        start = time.perf_counter()
        jax.block_until_ready(f())
        times.append(time.perf_counter() - start)
    return min(times)


def traced_and_compiled(trace, tries: int) -> tuple[float, float]:
    """Seconds to trace, and to lower and compile."""
    best = float("inf"), float("inf")
    for _ in range(tries):
        jax.clear_caches()
        start = time.perf_counter()
        traced = trace()
        middle = time.perf_counter()
        traced.lower().compile()
        best = min(best, (middle - start, time.perf_counter() - middle), key=sum)
    return best


def measure(leaves: int) -> None:
    tries = 3 if leaves < 1000 else 1
    params, batch = mlp([32] * (leaves // 2) + [10]), batch_of(8, 32)
    fresh = functools.partial(ts.setup, ADAM, params)
    state = fresh()
    shapes = lambda f: seconds(lambda: jax.eval_shape(f, params))
    slower = lambda: ts.adjust(state, learning_rate=1e-4)
    alone = [
        ("setup", seconds(fresh), seconds(lambda: TX.init(params))),
        ("eval_shape of setup", shapes(functools.partial(ts.setup, ADAM)), shapes(TX.init)),
        ("adjust(learning_rate=)", seconds(slower), None),
        ("adjust again", warm(slower), None),
    ]
    shown = [(what, *(1e3 * value if value else "" for value in times)) for what, *times in alone]
    table(f"{leaves} leaves, milliseconds", shown, ("what", "tsunax", "optax's init"))

    opt_state = TX.init(params)
    programs = {
        "by hand, bare": lambda: bare.trace(params, opt_state, batch),
        "by hand, same info": lambda: same_info.trace(params, opt_state, batch),
        "by hand, one cond": lambda: one_cond.trace(params, opt_state, CLOCK, batch),
        "tsunax, bare": lambda: UNGUARDED().trace(state, batch),
        "tsunax": lambda: ts.train_step(mlp_loss).trace(state, batch),
    }
    found = {name: traced_and_compiled(trace, tries) for name, trace in programs.items()}
    bursts = {
        "by hand, bare": by_hand(bare, params, batch),
        "by hand, same info": by_hand(same_info, params, batch),
        "by hand, one cond": verdict.single(ONE_COND, params, batch)[0],
        "tsunax, bare": by_tsunax(UNGUARDED(), fresh(), batch),
        "tsunax": by_tsunax(ts.train_step(mlp_loss), fresh(), batch),
    }
    times = interleave(bursts, rounds=20 if leaves <= 200 else 8, steps=STEPS.get(leaves, 3))
    middle = {name: sorted(values)[len(values) // 2] for name, values in times.items()}
    rows = []
    for name, (trace, compile) in found.items():
        floor = "by hand, bare" if "bare" in name else "by hand, same info"
        both = (trace + compile) / sum(found[floor])
        rows.append((name, trace, compile, both, middle[name], middle[name] / middle[floor]))
    head = ("contender", "s to trace", "s to compile", "x both", "us/step", "x step")
    table(f"{leaves} leaves: trace, compile, step; `x` over by hand, of the same kind", rows, head)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.leaves", description=__doc__)
    parser.add_argument("--leaves", type=int, nargs="+", default=[10, 200, 1000])
    for leaves in parser.parse_args().leaves:
        began = time.perf_counter()
        measure(leaves)
        note(f"{leaves} leaves: {time.perf_counter() - began:.0f} s in all")
    save("leaves")


if __name__ == "__main__":
    main()
