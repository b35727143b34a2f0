# /// script
# dependencies = ["keras==3.15.1", "jax==0.10.2"]
# ///
"""Keras on JAX: `fit` over arrays, silent; 50 steps an execution, or 1."""

import os

os.environ["KERAS_BACKEND"] = "jax"

import keras
from _protocol import BATCHES, ROWS, data, serve


def fitting(steps_per_execution):
    x, y = data()
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-3), loss, steps_per_execution=steps_per_execution)

    def burst(n):
        epochs, rows = max(1, n // BATCHES), min(n, BATCHES) * ROWS
        model.fit(x[:rows], y[:rows], batch_size=ROWS, epochs=epochs, shuffle=False, verbose=0)

    return burst


serve({"fused": lambda: fitting(50), "plain": lambda: fitting(1)})
