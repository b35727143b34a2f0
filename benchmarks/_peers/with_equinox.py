# /// script
# dependencies = ["equinox==0.13.8", "jax==0.10.2", "optax==0.2.8"]
# ///
"""Equinox: the loop by hand around `filter_jit`, donated."""

import itertools

import equinox as eqx
import jax
import optax
from _protocol import ready_batches, serve


def looping():
    optimizer = optax.adam(1e-3)

    def loss_fn(model, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(x), y).mean()

    @eqx.filter_jit(donate="all-except-first")
    def step(batch, model, opt_state):
        loss, grads = eqx.filter_value_and_grad(loss_fn)(model, *batch)
        updates, opt_state = optimizer.update(grads, opt_state, model)
        return eqx.apply_updates(model, updates), opt_state, loss

    model = eqx.nn.MLP(64, 10, 64, 1, key=jax.random.key(0))
    held = [model, optimizer.init(eqx.filter(model, eqx.is_array))]
    batches = itertools.cycle(jax.device_put(ready_batches()))

    def burst(n):
        model, opt_state = held
        for batch in itertools.islice(batches, n):
            model, opt_state, loss = step(batch, model, opt_state)
        held[:] = model, opt_state
        jax.block_until_ready(loss)

    return burst


serve({"filter_jit": looping})
