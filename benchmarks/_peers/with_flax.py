# /// script
# dependencies = ["flax==0.12.8", "jax==0.10.2", "optax==0.2.8"]
# ///
"""Flax NNX: the loop by hand, around `nnx.jit`, and around `jax.jit` with split and merge inside, donated."""

import functools
import itertools

import jax
import optax
from _protocol import ready_batches, serve
from flax import nnx


class MLP(nnx.Module):
    def __init__(self, rngs):
        self.hidden, self.out = nnx.Linear(64, 64, rngs=rngs), nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.hidden(x)))


def update(model, optimizer, batch):
    x, y = batch
    loss_fn = lambda model: optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()
    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return loss


def made():
    model = MLP(nnx.Rngs(0))
    return (
        model,
        nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param),
        itertools.cycle(jax.device_put(ready_batches())),
    )


def by_nnx_jit():
    model, optimizer, batches = made()
    step = nnx.jit(update)

    def burst(n):
        for batch in itertools.islice(batches, n):
            loss = step(model, optimizer, batch)
        jax.block_until_ready(loss)

    return burst


def by_jax_jit():
    model, optimizer, batches = made()
    graphdef, state = nnx.split((model, optimizer))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, batch):
        both = nnx.merge(graphdef, state)
        loss = update(*both, batch)
        return nnx.state(both), loss

    held = [state]

    def burst(n):
        state = held[0]
        for batch in itertools.islice(batches, n):
            state, loss = step(state, batch)
        held[0] = state
        jax.block_until_ready(loss)

    return burst


serve({"nnx.jit": by_nnx_jit, "split and merge": by_jax_jit})
