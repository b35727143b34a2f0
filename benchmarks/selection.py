"""6 of 8 layers left out at setup: FLOPs and optimizer bytes beside the hand-written two-layer problem."""

import jax
import jax.numpy as jnp
import optax
import tsunax as ts

from benchmarks._common import save, table


def loss_fn(params, x):
    for layer in params.values():
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return jnp.mean(x**2)


def main() -> None:
    keys = jax.random.split(jax.random.key(0), 8)
    params = {
        f"layer{i}": {"w": jax.random.normal(k, (256, 256)) / 16, "b": jnp.zeros(256)} for i, k in enumerate(keys)
    }
    x, tx = jnp.ones((64, 256)), optax.adam(1e-3)
    step = ts.train_step(loss_fn, norms=False, on_nonfinite="ignore")
    top = {k: params[k] for k in ("layer6", "layer7")}
    rest = {k: v for k, v in params.items() if k not in top}

    @jax.jit
    def two_layers(top, rest, opt_state, x):
        value, grads = jax.value_and_grad(lambda top: loss_fn({**rest, **top}, x))(top)
        updates, opt_state = tx.update(grads, opt_state, top)
        return optax.apply_updates(top, updates), opt_state, value

    flops = lambda lowered: lowered.compile().cost_analysis()["flops"] / 1e6
    size = lambda tree: sum(a.nbytes for a in jax.tree.leaves(tree)) / 1e6
    some = ts.setup(ts.rules.adam(1e-3), params, trainable=["layer6/**", "layer7/**"])
    every = ts.setup(ts.rules.adam(1e-3), params)
    rows = [
        ("two layers by hand", flops(two_layers.lower(top, rest, tx.init(top), x)), size(tx.init(top))),
        ("tsunax, trainable= two layers", flops(step.lower(some, x)), size(some.opt_state)),
        ("tsunax, all eight", flops(step.lower(every, x)), size(every.opt_state)),
    ]
    table("6 of 8 layers not trained", rows, ("contender", "MFLOP", "optimizer MB"))
    save("selection")
