"""What one of several processes does in a test: `python -m tests.programs.processes WORK [OUT]`, started by a launcher.

Prints or writes what it found as JSON; the tests compare.
"""

import argparse
import contextlib
import itertools
import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import tsunax as ts
from tsunax import distributed
from tsunax.errors import ProcessError


def told(f, *args, **kwargs) -> str:
    try:
        f(*args, **kwargs)
    except ProcessError as error:
        return str(error)
    return ""


def catches(number: int) -> bool:
    """Whether anybody in this process catches a signal, also where Python does not know."""
    status = Path("/proc/self/status").read_text()
    lines = dict(line.split(":\t", 1) for line in status.splitlines())
    return bool(int(lines["SigCgt"], 16) >> (number - 1) & 1)


def answers() -> dict:
    """What the primitives say."""
    import jax
    import jax.numpy as jnp

    i, n = distributed.process_index(), distributed.process_count()
    found = {"who": [i, n, jax.process_index(), jax.process_count(), distributed.is_main()]}
    found["sigterm"] = catches(signal.SIGTERM)
    distributed.start()  # again: nothing
    distributed.barrier()
    if i == n - 1:  # a forked child that ends as those of multiprocessing do ends nobody else
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            child = os.fork()
        if not child:
            os._exit(0)
        found["child"] = os.waitpid(child, 0)[1]
    same = {"w": np.ones(3), "b": [None, "relu"], "f": np.mean, "key": jax.random.key(1)}
    found["same"] = told(distributed.check_in_sync, seed=3, tree=same)
    found["seed"] = told(distributed.check_in_sync, seed=i, tree=same)
    last = {"a": np.full(3, i == n - 1), "b": jnp.zeros(2), **({"c": 1} if i == n - 1 else {})}
    found["tree"] = told(distributed.check_in_sync, tree=last)
    key = jax.random.key(i)
    tree = {"run": f"run {i}", "x": -0.0 * np.ones((2, 1)), "k": key, "j": jnp.arange(3) + i, "f": 0.1 * i}
    got = distributed.broadcast(tree, root=n - 1)
    found["broadcast"] = [got["run"], got["f"], str(got["x"].tolist()), np.asarray(got["j"]).tolist()]
    found["broadcast"] += [jax.random.key_data(got["k"]).tolist(), type(got["x"]).__name__, type(got["j"]).__name__]
    scalars = [jnp.bfloat16(i), jnp.float32(i), np.int64(i), np.zeros((0, 2), bool)]
    scalars = distributed.broadcast(scalars, root=n - 1)
    found["scalars"] = [[str(x.dtype), list(x.shape), str(x)] for x in scalars]
    found["committed"] = scalars[0].committed
    found["settings"] = told(distributed.check_in_sync, settings=argparse.Namespace(rate=i))
    found["shapes"] = told(distributed.broadcast, np.zeros(i + 1))
    found["root"] = told(distributed.broadcast, np.zeros(2), min(i, 1))
    found["place"] = told(distributed.barrier, "a" if i else "b")
    found["late"] = told(distributed.barrier, "late", 0.3) if i else ""
    if not i:
        time.sleep(0.6)
        told(distributed.barrier, "late", 0.1)
    found["agreed"] = []
    for asker, value in ((0, 15), (n - 1, 2)):  # a second time too
        for call in range(3000):
            if value_of := distributed.agree(value if i == asker and call == 40 * (1 + i) else 0):
                found["agreed"].append([call, value_of])
                break
            time.sleep(1e-4 * (1 + i))
        distributed.barrier("agreed")
    return found


def losses(rows: int = 27, resident: int = 0) -> list[float]:
    """Training and evaluation over all processes; the same numbers as with one, also where rows do not divide."""
    import jax
    import jax.numpy as jnp

    draw = np.random.default_rng(0)
    x = draw.normal(size=(rows, 5)).astype(np.float32)
    arrays = {"x": x, "y": np.tanh(x @ np.arange(5, dtype=np.float32))}
    mesh = ts.mesh(devices=jax.devices() if distributed.process_count() > 1 else jax.devices()[:1])
    data = ts.batches(arrays, 8, shuffle=True, seed=3, device=mesh if resident else None)
    params = {"w": jax.random.normal(jax.random.key(0), (5, 6)) * 0.3, "v": jnp.zeros(6)}
    state = ts.setup(ts.rules.adam(0.05), params, key=jax.random.key(1))
    state = ts.shard(state, mesh)

    def loss_fn(params, batch):
        return jnp.mean((jnp.tanh(batch["x"] @ params["w"]) @ params["v"] - batch["y"]) ** 2)

    step, found = ts.train_step(loss_fn), []
    for _ in range(4):
        for batch in data:
            state, info = step(state, batch)
            found.append(float(info.loss))
    for masked in (lambda params, batch, mask: ts.Loss.mean(batch["y"] - params["v"][0], mask), loss_fn):
        nine = ts.batches({name: x[:9] for name, x in arrays.items()}, 8)
        found.append(ts.evaluate(ts.eval_step(masked), state, nine)["loss"])
    predicted = ts.predict(lambda params, batch: batch["x"] @ params["w"], state, nine)  # the last batch is one row
    by_hand = x[nine.order(0)] @ np.asarray(state.params["w"].addressable_data(0))
    found.append(float(predicted.shape == by_hand.shape and np.allclose(predicted, by_hand, atol=1e-5)))
    distributed.check_in_sync(state=state, losses=found)
    return found


def sizes() -> list:
    """What the searches say, of which process 0 has less memory; the state afterwards."""
    import jax
    import jax.numpy as jnp

    step = ts.train_step(lambda params, x: jnp.mean(jnp.tanh(x @ params["w"]) ** 2))
    mesh = ts.mesh(devices=jax.devices() if distributed.process_count() > 1 else jax.devices()[:1])
    state = ts.shard(ts.setup(ts.rules.adam(1e-3), {"w": jnp.ones((256, 256))}, key=0), mesh)
    before, row = ts.reproduce.fingerprint(state), jax.ShapeDtypeStruct((1, 256), jnp.float32)
    memory = (96 if distributed.process_index() else 72) << 20
    size, report = ts.find_batch_size(step, state, row, memory=memory)
    n, _ = ts.insight.find_accumulation(step, state, row, 1 << 15, memory=memory)
    return [size, report.limit, [trial.size for trial in report.trials], n, ts.reproduce.fingerprint(state) == before]


def endless() -> None:
    """Collectives for ever; the test hurts one of the processes."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = ts.mesh()
    rows = NamedSharding(mesh, PartitionSpec("data"))
    x = jax.make_array_from_process_local_data(rows, np.ones((4, 3), np.float32))
    f = jax.jit(lambda x: x - jnp.mean(x, 0) + 1)
    steps = 0
    while True:
        x = f(x)
        x.block_until_ready()
        steps += 1
        if steps == 5:
            sys.stdout.write(f"READY {distributed.process_index()} {os.getpid()}\n")


def fails() -> None:
    distributed.barrier()
    if distributed.process_index() == 1:
        raise ValueError("bad luck")
    distributed.barrier("never")


def fails_to_start() -> list:
    """JAX itself fails on process 0."""
    import jax

    def fails(*_, **__):
        raise RuntimeError("bad weather")

    start = json.loads(os.environ["TSUNAX_TEST_START"])
    if start["process_id"] == 0:
        jax.distributed.initialize = fails
    return [told(distributed.start, **start), distributed.process_count()]


def terminated() -> list[int]:
    """A loop that ends where all agree; SIGTERM goes to any process."""
    asked = []
    signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    sys.stdout.write(f"READY {distributed.process_index()} {os.getpid()}\n")
    sys.stdout.flush()
    for step in range(10**6):
        if number := distributed.agree(asked[0] if asked else 0):
            return [step, number]
        time.sleep(1e-3 * (1 + distributed.process_index()))
    return []


def foreign() -> list:
    """A run that JAX itself started: data, agreement, comparison, saving and resuming work as after `start`."""
    import jax

    start = json.loads(os.environ["TSUNAX_TEST_START"])
    place = start["coordinator_address"], start["num_processes"], start["process_id"]
    jax.distributed.initialize(*place, cluster_detection_method="deactivate")
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    i, folder = jax.process_index(), Path(os.environ["TSUNAX_TEST_FOLDER"])
    x = np.arange(48, dtype=np.float32).reshape(16, 3) / 48
    step = ts.train_step(lambda params, rows: ((rows @ params["w"] - 1) ** 2).mean())
    found = [told(distributed.check_in_sync, seed=i)]
    for epochs in (2, 4):
        state = ts.shard(ts.setup(ts.rules.sgd(0.1), {"w": np.zeros(3, np.float32)}), ts.mesh())
        data = ts.batches(x, 4, shuffle=True, seed=1)
        state, _ = ts.fit(step, state, data, epochs=epochs, checkpoint=folder, progress=False)
        found.append([int(state.step), np.asarray(state.params["w"]).tolist()])
    distributed.agree()
    return found


class Part:
    """A loader of another library: the batches of one process, with a position that names its part."""

    def __init__(self, batches: int = 4, rows: int = 2):
        self.part, self.batches, self.rows, self.place = distributed.process_index(), batches, rows, 0

    def __iter__(self):
        while self.place < self.batches:
            self.place += 1
            yield np.full((self.rows, 3), self.place + self.part, np.float32) / 8
        self.place = 0

    def state_dict(self) -> dict:
        return {"part": self.part, "place": self.place}

    def load_state_dict(self, state: dict) -> None:
        assert state["part"] == self.part, state
        self.place = state["place"]


def loaders() -> list:
    """Loaders of the processes' own parts: a run, its resume, and batches that differ on process 1."""
    i, folder, found = distributed.process_index(), os.environ["TSUNAX_TEST_FOLDER"], []
    step = ts.train_step(lambda params, rows: ((rows @ params["w"] - 1) ** 2).mean())

    def fit(steps: int, data: Part, path: str | None = folder, callbacks: tuple = ()) -> None:
        state = ts.shard(ts.setup(ts.rules.sgd(0.1), {"w": np.zeros(3, np.float32)}), ts.mesh())
        state, _ = ts.fit(step, state, data, steps=steps, checkpoint=path, progress=False, callbacks=callbacks)
        found.append([int(state.step), data.place, np.asarray(state.params["w"]).tolist()])

    for steps, path in ((3, folder), (6, folder), (6, None)):
        fit(steps, Part(), path)
    for data in (Part(batches=4 - i), Part(rows=2 + i)):
        found.append(told(fit, 6, data, None))
    # Whether the epoch ends there is asked before a boundary.
    found.append(told(fit, 6, Part(batches=4 - i), None, (ts.callbacks.every(3, lambda run: None),)))
    return found


def rewinds(killed: int) -> list:
    """A run that goes back after seven calls. Process 0 is killed before durable step `killed` of that.

    With -1 none is killed, with -2 process 1 as it asks for the rewind.
    """
    import jax
    import jax.numpy as jnp

    rename, count, index = os.rename, itertools.count(), distributed.process_index()

    def rename_or_die(source: str, target: str) -> None:
        is_of_rewind = "rewind" in f"{source} {target}" or "/left/" in str(target)
        if is_of_rewind and next(count) == killed:
            os.kill(os.getpid(), signal.SIGKILL)
        rename(source, target)

    def is_due(run) -> bool:
        is_seventh = int(run.state.calls) == 7
        if is_seventh and killed == -2 and index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return is_seventh

    def loss_fn(params, rows, key):
        return jnp.mean((rows @ params["w"] - jax.random.normal(key)) ** 2)

    os.rename = rename_or_die
    state = ts.setup(ts.rules.adam(0.1), {"w": np.zeros(3, np.float32)}, key=0)
    data = ts.batches(np.arange(48, dtype=np.float32).reshape(16, 3) / 48, 4, shuffle=True)
    back = ts.callbacks.rewind(is_due, back=3, data="repeat")
    with ts.Checkpoints(os.environ["TSUNAX_TEST_FOLDER"], every=2, keep_last=None) as saver:
        options = {"checkpoint": saver, "callbacks": back, "log_every": 1, "progress": False, "steps_per_call": 1}
        state, history = ts.fit(ts.train_step(loss_fn), ts.shard(state, ts.mesh()), data, steps=10, **options)
    marks = [mark for mark in history.marks if mark[1] == "rewind"]
    return [int(state.calls), np.asarray(state.params["w"]).tolist(), history["loss"].tolist(), marks]


def commanded() -> list:
    """A run whose steps are verified, and which gets a command after its first step."""
    import threading

    import jax.numpy as jnp
    from tsunax.run import control
    from tsunax.timelines.command_line import ask

    folder, answers, is_first = Path(os.environ["TSUNAX_TEST_FOLDER"]), [], distributed.process_index() == 0
    control.LOOK_SECONDS = 0.1

    def send() -> None:
        answers.append(ask(folder, "adjust", {"learning_rate": 0.05}))
        answers.append(ask(folder, "adjust", {"rate": 0.05}))
        answers.append(ask(folder, "stop", {}))

    thread = threading.Thread(target=send)

    def begin(run) -> None:
        if is_first and run.step == 2:
            thread.start()
        time.sleep(0.01)

    state = ts.setup(ts.rules.adam(0.1), {"w": np.zeros(3, np.float32)}, key=0)
    data = ts.batches(np.arange(48, dtype=np.float32).reshape(16, 3) / 48, 4, shuffle=True)
    loss_fn = lambda params, rows: jnp.mean((rows @ params["w"] - 1) ** 2)
    callbacks = [ts.callbacks.every(2, begin), ts.callbacks.verify(every=3)]
    with ts.Checkpoints(folder, every=1000) as saver:
        options = {"checkpoint": saver, "callbacks": callbacks, "progress": False, "steps_per_call": 1}
        state, history = ts.fit(ts.train_step(loss_fn), ts.shard(state, ts.mesh()), data, steps=100_000, **options)
    if is_first:
        thread.join()
    rate = ts.hyperparams(state)["learning_rate"]
    commands = [mark for mark in history.marks if mark[1] in ("command", "verify")]
    return [int(state.step), rate, np.asarray(state.params["w"]).tolist(), commands, answers]


def late(in_evaluation: int) -> list[str]:
    """What the watchdog of this process tells of a run in which the data of process 1 stand still."""

    class Data:
        def __init__(self, seconds):
            self.seconds = seconds

        def __iter__(self):
            for i in range(12):
                time.sleep(self.seconds * (i == 8 and distributed.process_index() == 1))
                yield np.ones((4, 3), np.float32)

    def loss_fn(params, rows):
        return ((rows @ params["w"] - 1) ** 2).mean()

    stalls = []
    tell = lambda event, text, row: stalls.append(text) if event == "stall" else None
    step, eval_step = ts.train_step(loss_fn), ts.eval_step(loss_fn)
    evaluate = lambda state: ts.evaluate(eval_step, state, {"val": Data(2.5 * in_evaluation)})
    for _ in range(2):  # the first run compiles
        state = ts.shard(ts.setup(ts.rules.sgd(0.1), {"w": np.zeros(3, np.float32)}), ts.mesh())
        stalls.clear()
        options = {"progress": False, "callbacks": ts.callbacks.watchdog(1.0, tell)}
        ts.fit(step, state, Data(2.5 * (not in_evaluation)), steps=12, evaluate=evaluate, evaluate_every=12, **options)
    return stalls


def main(work: str, *arguments: str) -> None:
    start = json.loads(os.environ.get("TSUNAX_TEST_START", "{}"))
    if work not in ("fails_to_start", "foreign") and (text := told(distributed.start, **start)):
        print(json.dumps(text))
        sys.exit(1)
    works = (
        answers,
        losses,
        sizes,
        endless,
        fails,
        fails_to_start,
        terminated,
        foreign,
        late,
        loaders,
        rewinds,
        commanded,
    )
    found = {f.__name__: f for f in works}[work](*map(int, arguments))
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.write(f"FOUND {json.dumps([distributed.process_index(), found])}\n")  # in one piece: launchers mix
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
