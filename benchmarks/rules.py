"""One compiled update of each rule over its optax namesake's, on a million parameters: at most 1.05.

What optax has is compared with itself, live over plain, at its default numbers; what only Optimisers.jl has, with the
optax rule that bears its name. Both are used as optax rules are: state and params donated, no TrainState. Beside the
time stand the bytes that XLA counts, which no neighbour on the machine can change.

By bytes some are slower at their defaults, because a live number may change and a constant may not: `lars`, `adadelta`,
`cocob`, `lamb`, `madgrad` and `schedule_free_adamw` read params for a decay of 0, which optax leaves out, and
`polyak_sgd` writes the scaled gradient, where XLA moves a constant `scaling` out of the sum of squares.
"""

import time
import warnings

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from tsunax import rules
from tsunax.rules import optimizers

from benchmarks._common import copied, interleave, ratio, save, table

ROUNDS, BURST = 40, 0.02  # seconds of a burst
SHAPES = [(512, 1024), (1024,), (1024, 256), (256,), (256, 1024), (1024,)]  # 1.05 million
NEEDS = {"noisy_sgd": {"learning_rate": 1e-3, "key": 0}, "polyak_sgd": {}, "reduce_on_plateau": {}}
NO_UPDATE_ALONE = ("lbfgs", "sophia", "galore")  # a line search, a Hessian and an SVD: not the cost of the rule
PARITY = {  # ours: what optax has under that name
    "flux_adagrad": lambda: optax.adagrad(1e-3),
    "flux_adamw": lambda: optax.adamw(1e-3),
    "flux_amsgrad": lambda: optax.amsgrad(1e-3),
    "flux_momentum": lambda: optax.sgd(1e-3, momentum=0.9),
    "flux_oadam": lambda: optax.optimistic_adam_v2(1e-3, nesterov=False),
    "flux_rprop": lambda: optax.rprop(1e-3),
}


def pairs():
    """name -> (ours, optax's)."""
    for name in (*optimizers.OPTAX, *optimizers.CONTRIB):
        plain = getattr(optax, name, None) or getattr(optax.contrib, name, None)
        if plain and name not in NO_UPDATE_ALONE:
            arguments = NEEDS.get(name, {"learning_rate": 1e-3})
            yield name, getattr(rules, name)(**arguments), plain(**arguments)
    for name, plain in PARITY.items():
        yield name, getattr(rules, name)(1e-3), plain()
    sgd = optax.sgd(1e-3)
    yield "clip", rules.chain(rules.clip(1.0), sgd), optax.chain(optax.clip(1.0), sgd)
    yield (
        "clip_by_global_norm",
        rules.chain(rules.clip_by_global_norm(1.0), sgd),
        optax.chain(optax.clip_by_global_norm(1.0), sgd),
    )
    yield (
        "weight_decay",
        rules.chain(rules.add_decayed_weights(1e-4), sgd),
        optax.chain(optax.add_decayed_weights(1e-4), sgd),
    )


def compiled(rule, params, grads):
    """One update as a program, and what it starts from."""
    rule = optax.with_extra_args_support(rule)

    def update(params, opt_state, grads):
        updates, opt_state = rule.update(grads, opt_state, params, value=jnp.float32(1.0), grad=grads)
        return optax.apply_updates(params, updates), opt_state

    start = copied(params), copied(rule.init(params))
    return jax.jit(update, donate_argnums=(0, 1)).lower(*start, grads).compile(), start


def burst_of(program, start, grads):
    held = list(start)

    def burst(n):
        for _ in range(n):
            held[:] = program(*held, grads)
        jax.block_until_ready(held[0])

    return burst


def seconds(burst) -> float:
    burst(2)
    start = time.perf_counter()
    burst(1)
    return time.perf_counter() - start


def main(rounds: int = ROUNDS) -> None:
    warnings.filterwarnings("ignore", ".optimistic_adam. is deprecated", DeprecationWarning)
    params = [0.1 * jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(SHAPES)]
    grads = [jax.random.normal(jax.random.key(10 + i), shape) for i, shape in enumerate(SHAPES)]
    found = {}
    for name, *both in pairs():
        programs = [compiled(rule, params, grads) for rule in both]
        ours, plain = (program.cost_analysis()["bytes accessed"] for program, _ in programs)
        bursts = [burst_of(*program, grads) for program in programs]
        steps = 1 + int(BURST / seconds(bursts[1]))
        times = interleave(dict(zip(("ours", "optax"), bursts, strict=True)), rounds=rounds, steps=steps)
        found[name] = (sorted(times["ours"])[rounds // 2], ours / plain, *ratio(times, "ours", "optax"))
    rows = sorted(((k, *v) for k, v in found.items()), key=lambda row: -row[4])
    head = ("rule", "us/update", "x bytes", "x low", "x median", "x high")
    table("update over optax's, 1.05 M parameters", rows, head)
    save("rules")
