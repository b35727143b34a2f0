"""What one of several processes fits in a test: `python -m tests.fitting WORK`; prints what it found as JSON."""

import contextlib
import json
import os
import sys
import time

import numpy as np

import tsunax as ts
from tsunax import distributed


def problem(rows: int):
    """Data, a step and a state on the mesh of all processes; with a mask, and without."""
    import jax
    import jax.numpy as jnp

    draw = np.random.default_rng(0)
    x = draw.normal(size=(rows, 5)).astype(np.float32)
    arrays = {"x": x, "y": np.tanh(x @ np.arange(5, dtype=np.float32))}
    params = {"w": jax.random.normal(jax.random.key(0), (5, 6)) * 0.3, "v": jnp.zeros(6)}

    def errors(params, batch):
        return (jnp.tanh(batch["x"] @ params["w"]) @ params["v"] - batch["y"]) ** 2

    masked = lambda params, batch, mask: ts.Loss.mean(errors(params, batch), where=mask)
    blind = lambda params, batch: ts.Loss.mean(errors(params, batch))
    make = lambda: ts.shard(lambda: ts.setup(ts.rules.adam(0.05), params, key=0, ema=0.9), ts.mesh())
    return arrays, (masked, blind), make


def fits() -> dict:
    """Losses and evaluations with tails that do not divide, and whether all processes hold the same state."""
    arrays, losses, make = problem(27)
    found = {}
    for name, loss in zip(("masked", "blind"), losses, strict=True):
        for per_call in ("auto", None):
            data = ts.batches(arrays, 8, shuffle=True, seed=3)
            nine = ts.batches({key: x[:9] for key, x in arrays.items()}, 8)
            evaluate = lambda state, loss=loss, nine=nine: {
                "val/loss": ts.evaluate(ts.eval_step(loss), state, nine)["loss"]
            }
            state, history = ts.fit(
                ts.train_step(loss), make(), data, epochs=3, evaluate=evaluate, log_every=1, progress=False,
                steps_per_call=per_call,
            )  # fmt: skip
            distributed.check_in_sync(params=state.params)
            found[f"{name}, {per_call}"] = [history["loss"].tolist(), history["val/loss"].tolist()]
    return found


def stops() -> list:
    """One process has had enough: all of them end at the same step."""
    arrays, losses, make = problem(64)
    index = distributed.process_index()

    def enough(run):
        if index == 1 and run.step >= 20:
            run.stop("time is up")

    data = ts.batches(arrays, 8, shuffle=True)
    state, history = ts.fit(
        ts.train_step(losses[0]), make(), data, steps=10_000, callbacks=[ts.callbacks.every(5, enough)], progress=False
    )
    return [int(state.step), [text for _, name, text in history.marks if name == "stop"]]


def interrupted() -> list:
    """A signal to one of them: all end after the same step."""
    arrays, losses, make = problem(64)
    data = ts.batches(arrays, 8, shuffle=True)

    def slowly(run):
        time.sleep(0.01 * (1 + distributed.process_index()))
        if run.step == 8:
            print(f"READY {distributed.process_index()} {os.getpid()}", flush=True)

    try:
        ts.fit(
            ts.train_step(losses[0]),
            make(),
            data,
            steps=10**6,
            callbacks=[ts.callbacks.every(4, slowly)],
            progress=False,
        )
    except (KeyboardInterrupt, SystemExit) as error:
        return [int(error.state.step), type(error).__name__]
    return []


def main(work: str) -> None:
    distributed.start(**json.loads(os.environ.get("TSUNAX_TEST_START", "{}")))
    found = {f.__name__: f for f in (fits, stops, interrupted)}[work]()
    with contextlib.suppress(BrokenPipeError):
        print("FOUND", json.dumps([distributed.process_index(), found]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
