"""The run that is hurt: a small network, Adam with a schedule, an average, shuffled data, a key in the loss.

`main` trains to its last step whatever is in the directory already, and writes what it saw, a line at a time:
RESUMED <step>, STEP <step> <ids of the batch>, DIGEST <sha256 of all that it ends with>. No part of tsunax is patched.
"""

import hashlib
import json
import os

ROWS, SIZE = 24, 4
LEAVE_OUT = ("", "key", "step", "data", "history", "sync", "hash", "lock")  # to see that the drivers notice


def order(epoch: int):
    import numpy as np

    return np.random.default_rng([7, epoch]).permutation(ROWS)


def digest(*trees) -> str:
    import jax
    import numpy as np

    out = hashlib.sha256()
    for path, x in jax.tree_util.tree_flatten_with_path(trees)[0]:
        if isinstance(x, jax.Array) and jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        out.update(f"{jax.tree_util.keystr(path)} {np.asarray(x).dtype} {np.shape(x)}".encode())
        out.update(np.ascontiguousarray(np.asarray(x)).tobytes())
    return out.hexdigest()


def make(width: int = 32):
    import jax
    import jax.numpy as jnp
    import tsunax as ts

    k = jax.random.split(jax.random.key(0), 2)
    params = {
        "a": jax.random.normal(k[0], (6, width)),
        "b": {"w": jax.random.normal(k[1], (width, 2)), "c": jnp.zeros(2)},
    }
    rate = ts.schedules.cosine_decay_schedule(1e-2, 40)
    rule = ts.rules.chain(ts.rules.clip_by_global_norm(1.0), ts.rules.adamw(rate, weight_decay=1e-3))
    state = ts.setup(rule, params, key=5, ema=0.9, model_state={"seen": jnp.zeros(())})

    def loss_fn(params, batch, *, key, model_state):
        x, y = batch
        h = jnp.tanh(x @ params["a"]) * jax.random.bernoulli(key, 0.8, (width,))
        out = h @ params["b"]["w"] + params["b"]["c"]
        return ts.Loss.mean((out - y) ** 2, model_state={"seen": model_state["seen"] + x.shape[0]})

    return state, ts.train_step(loss_fn)


def leave_out(what: str) -> None:
    """Take a precaution out of tsunax, in this process."""
    from tsunax._core import durable_files
    from tsunax.checkpoints import checksums

    if what == "sync":
        os.fsync = lambda fd: None
    if what == "hash":
        replace(durable_files, "sha256", lambda content: "0" * 64)
        replace(checksums, "block_hash", lambda *_: 0)
    if what == "lock":
        replace(durable_files.Lock, "_take", lambda self, *_: None)


def replace(owner, name: str, by) -> None:
    """Replace what is there: a precaution under another name would stay."""
    assert hasattr(owner, name), f"{owner} has no {name}"
    setattr(owner, name, by)


def fitted(folder: str, log: str, steps: int, every: int, watched: bool, store=None) -> None:
    """The same run by `fit`; `watched`: every step is a boundary, else only some are.

    Beside the rest it writes WALL <step> <seconds> at each boundary, the wall clock of the `fit`s that led there, and
    TIME <seconds of history.time> <seconds of the wall clock> at the end.
    """
    import time

    import numpy as np
    import tsunax as ts

    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    say = lambda *words: os.write(out, (" ".join(map(str, words)) + "\n").encode())
    rows = np.random.default_rng(3).standard_normal((ROWS, 8)).astype(np.float32)
    state, step = make()
    with open(log) as file:
        walls = {words[1]: float(words[2]) for words in map(str.split, file) if words[0] == "WALL"}
    before, noted = None, set()

    def note(run):
        nonlocal before
        if run.event == "start":
            before = walls.get(str(run.step), 0.0)
        say("RESUMED" if run.event == "start" else "STEP", run.step, "[]")
        time.sleep(0.002)
        if run.event != "start" and run.step not in noted:  # a save comes next, if any; at the end not again
            noted.add(run.step)
            say("WALL", run.step, before + time.perf_counter() - began)

    def evaluate(state):
        time.sleep(0.02)
        return {"val/norm": float(np.sum(np.square(state.params["a"])))}

    note.events = ("start", "end")
    data = ts.batches((rows[:, :6], rows[:, 6:]), SIZE, shuffle=True, seed=7)
    with (store or ts.Checkpoints)(folder, every=every) as checkpoints:
        callbacks = [note, ts.callbacks.every(1 if watched else 7, lambda run: note(run))]
        fit, began = ts.fit, time.perf_counter()  # it is imported when it is named
        state, history = fit(
            step, state, data, steps=steps, checkpoint=checkpoints, progress=False, log_every=1,
            callbacks=callbacks, evaluate=evaluate, evaluate_every=50,
        )  # fmt: skip
        if before is not None:  # else there was nothing left to do
            say("TIME", sum(history.time.values()), before + time.perf_counter() - began)
    say("DIGEST", digest(state, history["loss"], history["val/norm"]))


def main(folder: str, log: str, steps: int, every: int = 2, forgotten: str = "", store=None) -> None:
    import numpy as np
    from tsunax.checkpoints.saving import Checkpoints

    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    say = lambda *words: os.write(out, (" ".join(map(str, words)) + "\n").encode())
    rows = np.random.default_rng(3).standard_normal((ROWS, 8)).astype(np.float32)
    state, step = make()
    leave_out(forgotten)
    data, losses = {"epoch": 0, "position": 0}, []
    with (store or Checkpoints)(folder, every=every) as checkpoints:
        found = checkpoints.restore(state)
        done = 0
        if found.step is not None:
            fresh, state, done = state, found.state, found.step
            data = found.data if forgotten != "data" else data
            losses = [*found.history["loss"]] if forgotten != "history" else []
            state = state.replace(key=11) if forgotten == "key" else state
            state = state.replace(step=fresh.step) if forgotten == "step" else state
        say("RESUMED", done)
        for i in range(done + 1, steps + 1):
            if data["position"] + SIZE > ROWS:
                data = {"epoch": data["epoch"] + 1, "position": 0}
            ids = order(data["epoch"])[data["position"] : data["position"] + SIZE]
            data = {**data, "position": data["position"] + SIZE}
            state, info = step(state, (rows[ids, :6], rows[ids, 6:]))
            losses.append(np.float32(info.loss))
            say("STEP", i, json.dumps(ids.tolist()))
            if checkpoints.due(i) or i == steps:
                checkpoints.save(state, step=i, data=data, history={"loss": np.array(losses, np.float32)})
    say("DIGEST", digest(state, data, np.array(losses, np.float32)))
