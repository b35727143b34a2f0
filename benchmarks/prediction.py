"""`predict` beside a jitted loop by hand: the same outputs of the same batches, in NumPy, on one device.

By hand a batch is dispatched before the outputs of the batch before it are copied to the host.
`tests/test_prediction.py` counts the FLOPs on eight devices: an eighth on each.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
import tsunax as ts
from examples.gpt import GPT, SIZES
from flax import nnx

from benchmarks._common import interleave, mlp, ratio, save, table

ROWS = 16_384


def perceptron(params, x):
    for w, b in params[:-1]:
        x = jax.nn.relu(x @ w + b)
    w, b = params[-1]
    return x @ w + b


def models():
    """(name, model, params, rows, rows of a batch)."""
    rng = np.random.default_rng(0)
    wide = [256, 512, 512, 10]
    yield "MLP 64-64-10", perceptron, mlp([64, 64, 10]), rng.normal(size=(ROWS, 64)).astype(np.float32), 256
    yield "MLP 256-512-512-10", perceptron, mlp(wide), rng.normal(size=(ROWS, 256)).astype(np.float32), 256
    width, depth, context, size = (SIZES["small"][name] for name in ("width", "depth", "context", "batch"))
    graphdef, params = nnx.split(GPT(width, depth, nnx.Rngs(0)), nnx.Param)
    tokens = rng.integers(256, size=(4 * size, context)).astype(np.uint8)
    last_logits = lambda params, rows: nnx.merge(graphdef, params)(rows.astype(jnp.int32))[:, -1]
    yield "GPT, last logits", last_logits, params, tokens, size


def by_hand(f, params, batches):
    outputs, last = [], None
    for batch in batches:
        new = f(params, batch)
        if last is not None:
            outputs.append(np.asarray(last))
        last = new
    return np.concatenate([*outputs, np.asarray(last)])


def main():
    for clock, what in ((time.perf_counter, "time"), (time.process_time, "CPU time")):
        rows = []
        for name, model, params, x, size in models():
            jitted, state = jax.jit(model), ts.setup(ts.rules.sgd(0.1), params)
            batches = list(ts.batches(x, size))
            hand = lambda _, f=jitted, batches=batches, state=state: by_hand(f, state.params, batches)
            ours = lambda _, f=model, batches=batches, state=state: ts.predict(f, state, batches)
            np.testing.assert_allclose(ours(1), hand(1), rtol=1e-5, atol=1e-5)
            times = interleave({"by hand": hand, "predict": ours}, rounds=15, steps=1, clock=clock)
            rows.append((name, len(batches), min(times["by hand"]) / 1e3, *ratio(times, "predict", "by hand")))
        table(f"predict over by hand: {what}", rows, ("model", "batches", "ms by hand", "x low", "x median", "x high"))
    save("prediction")


if __name__ == "__main__":
    main()
