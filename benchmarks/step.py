"""A step of tsunax over the hand-written, jitted, donated optax loop: small, deep and memory-bound models.

`same info` also computes the norm of the gradient, the finite check and a select of each array, as most people write
it; `one cond` computes the same in the fastest way that `benchmarks verdict` knows, the one that the default step of
tsunax takes; `bare` computes none of them. `tsunax, bare` is the step with norms and guard off.
Each ratio is over the hand-written loop above it. Memory-bound models and MLPs of several depths are in CPU time, with
the temporary memory of the compiled programs. `NPROC=1 python -m benchmarks step` measures these with one XLA thread.
"""

import functools
import os
import time

import jax
import jax.numpy as jnp
import optax
import tsunax as ts

from benchmarks import verdict
from benchmarks._common import batch_of, copied, interleave, mlp, mlp_loss, ratio, save, table

CASES = {  # sizes, rows of a batch, steps of a burst, rounds
    "tiny MLP 64-64-10": ([64, 64, 10], 32, 300, 80),
    "200 leaves": ([32] * 100 + [10], 8, 15, 40),
}
TX = optax.adam(1e-3)
ONE_THREAD = os.environ.get("NPROC") == "1"


def unguarded(loss_fn):
    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = TX.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return step


def guarded(loss_and_grads):
    """The hand-written step around `f(params, batch) -> (loss, grads)`: norms, finite check, update, select."""

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, opt_state, batch):
        loss, grads = loss_and_grads(params, batch)
        grad_norm = optax.tree.norm(grads)
        updates, new_opt_state = TX.update(grads, opt_state, params)
        applied = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        new = optax.apply_updates(params, updates), new_opt_state
        params, opt_state = jax.tree.map(lambda a, b: jnp.where(applied, a, b), new, (params, opt_state))
        info = {"loss": loss, "grad_norm": grad_norm, "applied": applied}
        return params, opt_state, info

    return step


bare = unguarded(mlp_loss)
same_info = guarded(jax.value_and_grad(mlp_loss))
ONE_COND = "before, cond, one vector"  # of benchmarks/verdict.py
one_cond = verdict.jitted(ONE_COND)
CLOCK = jnp.zeros(4, jnp.int32)


def by_hand(step, params, batch):
    state = [copied(params)]
    state.append(TX.init(state[0]))

    def burst(n):
        params, opt_state = state
        for _ in range(n):
            params, opt_state, _ = step(params, opt_state, batch)
        jax.block_until_ready(params)
        state[:] = params, opt_state

    return burst


def by_tsunax(step, state, batch):
    held = [state]

    def burst(n):
        state = held[0]
        for _ in range(n):
            state, _ = step(state, batch)
        jax.block_until_ready(state.params)
        held[0] = state

    return burst


def table_loss(params, batch):
    users, items, score = batch
    return jnp.mean((jnp.sum(params["users"][users] * params["items"][items], -1) - score) ** 2)


def cpu_cases():
    """`{name: (params, batch, loss_fn, tx, rule, steps of a burst, rounds)}`."""
    keys = jax.random.split(jax.random.key(0), 4)
    tables = {name: jax.random.normal(key, (120_000, 16)) for name, key in zip(("users", "items"), keys, strict=False)}
    rows = [jax.random.randint(key, (256,), 0, 120_000) for key in keys[2:]]
    adam = TX, ts.rules.adam(1e-3)
    found = {
        "tables 2 x 120,000 x 16, Adagrad": (
            *(tables, (*rows, jnp.ones(256)), table_loss, optax.adagrad(1e-2), ts.rules.adagrad(1e-2), 10, 20),
        ),
        "six dense 1024 x 1024, batch 4, Adam": (mlp([1024] * 7), batch_of(4, 1024), mlp_loss, *adam, 3, 12),
    }
    for n in range(1, 6):
        found[f"MLP of {n} layers, 64 wide"] = mlp([64] * n + [10]), batch_of(32, 64), mlp_loss, *adam, 200, 20
    return found


def cpu_times() -> None:
    """The default step in CPU time, over bare and over by hand with the same verdict, and its temporary memory."""
    rows = []
    for name, (params, batch, loss_fn, tx, rule, steps, rounds) in cpu_cases().items():
        problem, step = {"loss_fn": loss_fn, "tx": tx}, ts.train_step(loss_fn)
        bursts, memory = {}, {}
        for kind in ("bare", ONE_COND):
            bursts[kind], memory[kind] = verdict.single(kind, params, batch, **problem)
        for contender, own in (("tsunax, live", rule), ("tsunax, optax", tx)):
            state = ts.setup(own, params)
            memory[contender] = step.lower(state, batch).compile().memory_analysis().temp_size_in_bytes / 1e6
            bursts[contender] = by_tsunax(step, state, batch)
        times = interleave(bursts, rounds=rounds, steps=steps, clock=time.process_time)
        for contender, values in times.items():
            over = [ratio(times, contender, floor)[1] for floor in ("bare", ONE_COND)]
            middle = sorted(values)[len(values) // 2]
            rows.append((f"{name}: {contender}", middle, *over, memory[contender], memory[contender] / memory["bare"]))
    head = ("contender", "CPU us/step", "x bare", "x one cond", "temporary MB", "x bare's")
    table(f"CPU time and temporary memory{', one thread of XLA' if ONE_THREAD else ''}", rows, head)


def compile_seconds(lowered: dict, rounds=5) -> dict[str, list[float]]:
    """Of each contender, once a round; the caches of JAX are empty before each."""
    times = {name: [] for name in lowered}
    for _ in range(rounds):
        for name, lower in lowered.items():
            jax.clear_caches()
            start = time.perf_counter()
            lower().compile()
            times[name].append(time.perf_counter() - start)
    return times


def main() -> None:
    cpu_times()
    if ONE_THREAD:
        return save("step-one-thread")
    step = ts.train_step(mlp_loss)
    plain_step = ts.train_step(mlp_loss, norms=False, on_nonfinite="ignore")
    for name, (sizes, rows, steps, rounds) in CASES.items():
        params, batch = mlp(sizes), batch_of(rows, sizes[0])
        tsunax = lambda step, rule, params=params, batch=batch: by_tsunax(step, ts.setup(rule, params), batch)
        frozen = ts.freeze(ts.setup(ts.rules.adam(1e-3), params), "0/1")
        floors = {
            "by hand, bare": {
                "by hand, bare": by_hand(bare, params, batch),
                "tsunax, bare, live adam": tsunax(plain_step, ts.rules.adam(1e-3)),
                "tsunax, bare, optax.adam": tsunax(plain_step, TX),
                "tsunax, default step over bare": tsunax(step, ts.rules.adam(1e-3)),
            },
            "by hand, same info": {
                "by hand, same info": by_hand(same_info, params, batch),
                "tsunax, live adam": tsunax(step, ts.rules.adam(1e-3)),
                "tsunax, optax.adam": tsunax(step, TX),
                "tsunax, live, one leaf frozen": by_tsunax(step, frozen, batch),
            },
            "by hand, one cond": {
                "by hand, one cond": verdict.single(ONE_COND, params, batch)[0],
                "tsunax, default step over one cond": tsunax(step, ts.rules.adam(1e-3)),
            },
        }
        found = {}
        for floor, contenders in floors.items():
            times = interleave(contenders, rounds=rounds, steps=steps)
            for contender, values in times.items():
                found[contender] = (sorted(values)[len(values) // 2], *ratio(times, contender, floor))
        table(name, [(k, *v) for k, v in found.items()], ("contender", "us/step", "x low", "x median", "x high"))

    params, batch = mlp(CASES["200 leaves"][0]), batch_of(8, 32)
    live, opt_state = ts.rules.adam(1e-3), TX.init(params)

    def trace(rule, step=step, **given):
        state = ts.setup(rule, params, **given)
        return lambda: step.lower(state, batch)

    times = compile_seconds({
        "by hand, bare": lambda: bare.lower(params, opt_state, batch),
        "tsunax, bare, live adam": trace(live, plain_step),
        "tsunax, bare, optax.adam": trace(TX, plain_step),
        "by hand, same info": lambda: same_info.lower(params, opt_state, batch),
        "by hand, one cond": lambda: one_cond.lower(params, opt_state, CLOCK, batch),
        "tsunax, live adam": trace(live),
        "tsunax, optax.adam": trace(TX),
        "tsunax, live, freezable": trace(live, freezable=True),
    })  # fmt: skip
    floor = lambda name: "by hand, bare" if "bare" in name else "by hand, same info"
    rows = [(name, min(values), *ratio(times, name, floor(name))) for name, values in times.items()]
    table("trace and compile, 200 leaves", rows, ("contender", "s, best", "x low", "x median", "x high"))
    save("step")


if __name__ == "__main__":
    main()
