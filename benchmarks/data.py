"""Batches per second over NumPy's own permutation and fancy indexing; the hand-over to a step; what prefetch hides.

Every contender runs whole epochs, its permutation included. Targets: in memory at most 1.0 x NumPy, resident at most
1.0 x a jitted gather by hand, two million examples a second into an unfused step, 90 % of a host pipeline hidden,
the first batch of 1e8 shuffled rows in 1 s and 100 MB.
"""

import itertools
import time
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import tsunax as ts
from tsunax import batches, prefetch
from tsunax.data.on_devices import gather

from benchmarks._common import interleave, ratio, save, table


def forever(make):
    """A burst that goes on through the epochs of an iterable that `make` gives anew for each."""
    stream = itertools.chain.from_iterable(make() for _ in itertools.count())

    def burst(steps):
        batch = None
        for _ in range(steps):
            batch = next(stream)
        jax.block_until_ready(batch)

    return burst


def by_numpy(arrays, size):
    rng, n = np.random.default_rng(0), len(next(iter(arrays.values())))

    def epoch():
        order = rng.permutation(n)
        for i in range(0, n - size + 1, size):
            yield {name: x[order[i : i + size]] for name, x in arrays.items()}

    return epoch


def by_jit(arrays, size):
    rng, n = np.random.default_rng(0), len(next(iter(arrays.values())))
    arrays, take = jax.device_put(arrays), jax.jit(lambda x, rows: jax.tree.map(lambda x: x[rows], x))

    def epoch():
        order = rng.permutation(n).astype(np.int32)
        for i in range(0, n - size + 1, size):
            yield take(arrays, order[i : i + size])

    return epoch


def stacked(arrays, size, k):
    """`take(k)`, counted by the batch."""
    data = batches(arrays, size, shuffle=True, drop_remainder=True)

    def epoch():
        chunks = iter(data)
        while (chunk := chunks.take(k)) is not None:
            yield from itertools.repeat(chunk, len(chunk["x"]))

    return epoch


def compare(title, contenders, floor, *, rounds, steps, size):
    times = interleave(contenders, rounds=rounds, steps=steps)
    found = {}
    for name, us in times.items():
        median = sorted(us)[len(us) // 2]
        found[name] = (median, size / median, *ratio(times, name, floor))
    table(
        title, [(k, *v) for k, v in found.items()], ("contender", "us/batch", "M rows/s", "x low", "x median", "x high")
    )


def indexing(rows, features, size, *, rounds, steps):
    arrays = {"x": np.random.default_rng(0).random((rows, features), np.float32), "y": np.arange(rows, dtype=np.int32)}
    data = lambda **kinds: lambda: batches(arrays, size, shuffle=True, drop_remainder=True, **kinds)
    again = lambda data: lambda: data  # one value, an epoch each time
    contenders = {
        "NumPy by hand": forever(by_numpy(arrays, size)),
        "batches": forever(again(data()())),
        "batches, take(16)": forever(stacked(arrays, size, 16)),
        "jitted gather by hand": forever(by_jit(arrays, size)),
        "batches, resident": forever(again(data(device=True)())),
    }
    title = f"{rows:,} x {features} f32 and a label, batches of {size}"
    compare(title, contenders, "NumPy by hand", rounds=rounds, steps=steps, size=size)


def handover(rows, features, size, *, rounds, steps):
    """A step of almost no work takes the batches: as they are, resident, and a fused epoch."""
    arrays = {"x": np.random.default_rng(0).random((rows, features), np.float32), "y": np.arange(rows, dtype=np.int32)}
    step = jax.jit(lambda w, batch: w + batch["x"].sum(0) + batch["y"].sum(), donate_argnums=0)
    trained = ts.train_step(lambda p, batch: (batch["x"] @ p["w"]).mean(), norms=False, on_nonfinite="ignore")

    def loop(step, w, make):
        stream, held = itertools.chain.from_iterable(make() for _ in itertools.count()), [w]

        def burst(steps):
            for _ in range(steps):
                out = step(held[0], next(stream))
                held[0] = out[0] if isinstance(out, tuple) else out
            jax.block_until_ready(held[0])

        return burst

    def fused(data):
        k = 64

        @jax.jit
        def run(w, resident, order, first):
            one = lambda w, i: (step(w, gather(resident, order, (first + i) * size, (size,))), None)
            return jax.lax.scan(one, w, jnp.arange(k))[0]

        w, at = [jnp.zeros(features)], itertools.count(0, k)

        def burst(steps):
            for _ in range(steps // k):
                epoch, first = divmod(next(at), len(data) - k)
                w[0] = run(w[0], data.resident, data.device_order(epoch), first)
            jax.block_until_ready(w[0])

        return burst

    again = lambda data: lambda: data
    make = lambda **kinds: batches(arrays, size, shuffle=True, drop_remainder=True, **kinds)
    zeros = lambda: jnp.zeros(features)
    state = lambda: ts.setup(ts.rules.sgd(1e-3), {"w": jnp.zeros(features)})
    contenders = {
        "NumPy by hand, jitted step": loop(step, zeros(), by_numpy(arrays, size)),
        "batches, jitted step": loop(step, zeros(), again(make())),
        "batches, train_step": loop(trained, state(), again(make())),
        "resident, jitted step": loop(step, zeros(), again(make(device=True))),
        "resident, scan of 64 steps": fused(make(device=True)),
    }
    title = f"into a step: {rows:,} x {features} f32 and a label, batches of {size}"
    compare(title, contenders, "NumPy by hand, jitted step", rounds=rounds, steps=steps, size=size)


def hidden(rounds: int = 5, n: int = 40):
    """The share of a host pipeline that prefetch hides behind a step that takes as long."""
    source = np.random.default_rng(0).random((2000, 2000))

    def sleeping():
        for _ in range(n):
            time.sleep(0.01)
            yield np.ones((64, 64), np.float32)

    def sorting():
        for _ in range(n):
            yield np.sort(source, axis=0)[:64, :64].astype(np.float32)

    def waiting(seconds):  # as a step on another device: the host is free
        return lambda batch: time.sleep(seconds)

    results = {}
    for name, make in {"sleeping": sleeping, "NumPy sort": sorting}.items():
        start = time.perf_counter()
        for _ in make():
            pass
        host = (time.perf_counter() - start) / n
        step, shares = waiting(host), []
        for _ in range(rounds):
            times = []
            for data in (make(), prefetch(make(), jax.devices()[0])):
                start = time.perf_counter()
                for batch in data:
                    step(batch)
                times.append(time.perf_counter() - start)
            shares.append((times[0] - times[1]) / (host * n))
        results[name] = (host * 1e3, *np.quantile(shares, [0, 0.5, 1]).tolist())
    head = ("pipeline", "ms/batch", "hidden, least", "median", "most")
    table("prefetch", [(k, *v) for k, v in results.items()], head)


def first_batch(n: int = 100_000_000, size: int = 128):
    """What comes before the first batch of many shuffled rows, over NumPy's permutation of as many."""

    def ours():
        next(iter(batches(rows, size, shuffle=True)))

    rows, found = np.zeros(n, np.int8), {}
    for name, make in {"tsunax": ours, "NumPy's permutation": lambda: np.random.default_rng(0).permutation(n)}.items():
        tracemalloc.start()
        start = time.process_time()
        make()
        found[name] = time.process_time() - start, tracemalloc.get_traced_memory()[1] / 1e6
        tracemalloc.stop()
    head = ("contender", "CPU seconds", "MB at the peak")
    table(f"the first batch of {n:,} shuffled rows", [(k, *v) for k, v in found.items()], head)


def main(rounds: int = 20) -> None:
    indexing(20_000, 784, 256, rounds=rounds, steps=400)
    indexing(1_000_000, 8, 128, rounds=rounds, steps=8000)
    handover(1_000_000, 8, 128, rounds=rounds, steps=2048)
    hidden()
    first_batch()
    save("data")


if __name__ == "__main__":
    main()
