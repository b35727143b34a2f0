"""What one of several processes fits in a test; prints what it found as JSON.

python -m tests.programs.fitting WORK
"""

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
import types
import warnings

import numpy as np
import tsunax as ts
from tsunax import distributed
from tsunax._core import cadence
from tsunax.run import opening


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
        for per_call in ("auto", 1):
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


def misused() -> dict:
    """What runs that differ from process to process are told, and what still has one answer."""
    import jax

    i = distributed.process_index()
    arrays, (masked, blind), make = problem(32)
    step, state, found = ts.train_step(blind), make(), {}
    one = lambda at, rows=4: {name: x[at : at + rows] for name, x in arrays.items()}
    other = {name: x + i for name, x in arrays.items()}
    eight = lambda: ts.batches(arrays, 8)
    local = ts.setup(ts.rules.adam(0.05), state_of(make), key=0)

    def fit(data, state=None, step=step, **options):
        state = make() if state is None else state
        return ts.fit(step, state, data, **{"epochs": 2, "progress": False, **options})

    def evaluate(data, loss=masked, state=state):
        return ts.evaluate(ts.eval_step(loss), state, data)

    plateau = ts.callbacks.plateau("val/loss", patience=1 + i)
    own_rate = ts.callbacks.every(8, lambda run: ts.adjust(run.state, learning_rate=0.1 / (1 + i)))
    scaled = lambda params, batch: blind(params, batch) * (1.0 + i)
    shifted = lambda params, batch: blind(params, batch) + np.full(3, i, np.float32).mean()
    quiet = lambda run: run.memory.update(process=0 * i)  # it refers to its process
    rules = ts.rules.adam(0.05, nesterov=bool(i))
    weights = state_of(make)
    ruled = lambda: ts.shard(lambda: ts.setup(rules, weights, key=0), ts.mesh())
    cases = {
        "seed": lambda: fit(ts.batches(arrays, 8, shuffle=True, seed=i)),
        "arrays": lambda: fit(ts.batches(other, 8)),
        "resident": lambda: fit(ts.batches(other, 8, device=ts.mesh())),
        "goal": lambda: fit(eight(), epochs=2 + i),
        "callbacks": lambda: fit(eight(), callbacks=[ts.callbacks.every(3, print)] * i),
        "local": lambda: fit(eight(), local),
        "part": lambda: fit(ts.batches(arrays, 8, process=(1 - i, 2))),
        "own rows": lambda: fit(
            ts.batches(one(0, 16 + i), 4, shuffle=True, seed=i, drop_remainder=True, process=(0, 1))
        ),
        "own batches": lambda: fit(ts.batches(one(0, 16 + 4 * i), 4, process=(0, 1))),
        "iterate": lambda: [*ts.loop.iterate(step, make(), ts.batches(arrays, 8, seed=i, shuffle=True), epochs=1)],
        "run_epoch": lambda: ts.loop.run_epoch(step, make(), [one(0)] * (3 + i)),
        "parts": lambda: fit(ts.batches(arrays, 8, process=(0, 4))),
        "init": lambda: ts.shard({"w": np.full(3, i)}, ts.mesh()),
        "key": lambda: ts.shard(lambda: ts.setup(ts.rules.sgd(0.1), {"w": np.ones(3, np.float32)}, key=i), ts.mesh()),
        "adjusted": lambda: fit(eight(), ts.adjust(make(), learning_rate=0.1 * (1 + i))),
        "rows": lambda: fit([one(0, 4 + i)] * 3),
        "batches": lambda: fit([one(0)] * (3 + i)),
        "a loader": lambda: fit(broken(one(0), 3 if i else 30)),
        "evaluated rows": lambda: evaluate([one(0, 4 + i)]),
        "evaluated batches": lambda: evaluate([one(0)] * (1 + i)),
        "evaluated alone": lambda: distributed.barrier("elsewhere") if i else evaluate(eight()),
        "evaluated arrays": lambda: evaluate(ts.batches(other, 8)),
        "evaluated local": lambda: evaluate(eight(), state=local),
        "names": lambda: fit(eight(), evaluate=lambda state: {f"val/{i}": 1.0}),
        "a state": lambda: fit(eight(), callbacks=[own_rate], epochs=4, evaluate=lambda state: {"val/loss": 1.0}),
        "a callback": lambda: fit(eight(), callbacks=[plateau], evaluate=lambda state: {"val/loss": 1.0}),
        "loss": lambda: fit(eight(), step=ts.train_step(masked if i else blind)),
        "loss of any step": lambda: fit(eight(), step=lambda s, b: ts.train_step(scaled)(s, b)),
        "a number in the loss": lambda: fit(eight(), step=ts.train_step(scaled)),
        "an array in the loss": lambda: fit(eight(), step=ts.train_step(shifted), steps_per_call=1),
        "accumulate": lambda: fit(eight(), step=ts.train_step(blind, accumulate=1 + i)),
        "on_nonfinite": lambda: fit(eight(), step=ts.train_step(blind, on_nonfinite=("skip", "ignore")[i])),
        "rule": lambda: fit(eight(), ruled()),
        "a loss without a loop": lambda: fit(eight(), step=ts.train_step(scaled), steps_per_call=None),
        "extra": lambda: fit(eight(), extra={"scale": 1.0 + i}),
        "evaluation": lambda: fit(eight(), evaluate=(lambda state: {"val/loss": 1.0}) if i else (lambda state: {})),
        "iterated loss": lambda: [*ts.loop.iterate(ts.train_step(scaled), make(), eight(), epochs=1)],
        "loss of an epoch": lambda: ts.loop.run_epoch(ts.train_step(scaled), make(), eight()),
        "evaluated loss": lambda: evaluate(eight(), loss=masked if i else blind),
        "evaluated number": lambda: evaluate(eight(), loss=scaled),
        "own words": lambda: fit(eight(), callbacks=[quiet], evaluate=lambda state: {"val/loss": float(i)}),
        "population": lambda: fit(eight(), ts.shard(ts.population(lambda key: local, 2, key=0), ts.mesh())),
        "spread": lambda: ts.reproduce.fingerprint(ts.shard({"w": np.ones((64, 64))}, ts.mesh(1, -1))),
    }
    for name, f in cases.items():
        try:
            f()
            found[name] = ""
        except ts.errors.TsunaxError as error:
            found[name] = f"{type(error).__name__} {error}"
    state, history = fit(eight(), epochs=3, evaluate=lambda state: {"val/loss": 1.0 + i})
    found["numbers"] = history["val/loss"][-1]
    alone = ts.shard(local, ts.mesh(devices=jax.local_devices()))  # each process by itself, and not as often
    for _ in range(1 + i):
        mine = ts.batches(arrays, 8, process=(0, 1))
        own, _ = fit(mine, jax.tree.map(lambda x: x.copy(), alone), callbacks=[ts.callbacks.every(2, lambda run: None)])
    found["alone"] = [int(own.step), ts.evaluate(ts.eval_step(masked), own, mine)["loss"]]
    found["fingerprint"] = ts.reproduce.fingerprint(state)
    return found


def state_of(make):
    """The parameters, on the host."""
    import jax

    return jax.tree.map(lambda x: np.asarray(x.addressable_data(0)), make().params)


def broken(batch, n: int):
    for _ in range(n):
        yield batch
    raise OSError("disk")


def uneven() -> list:
    """One process takes its time in its callbacks."""
    arrays, losses, make = problem(64)
    wait = ts.callbacks.every(2, lambda run: time.sleep(0.05 * distributed.process_index()))
    given = {"steps": 20, "callbacks": wait, "progress": False}
    history = ts.fit(ts.train_step(losses[0]), make(), ts.batches(arrays, 8, shuffle=True), **given)[1]
    return [mark for mark in history.marks if mark[1] == "slowest"]


def too_late() -> list:
    """A signal when the last call is under way, or through: one answer for all of them, and the next run is whole."""
    arrays, losses, make = problem(64)
    data, index = ts.batches(arrays, 8), distributed.process_index()

    def late(when):
        def callback(run):
            if run.event == "step" and run.step == when and index == 1:
                os.kill(os.getpid(), signal.SIGTERM)

        return ts.callbacks.every(1, callback)

    found: list = []

    def evaluate(state):
        if when == "in the last evaluation" and int(state.step) == 8 and index == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return {"val/loss": ts.evaluate(ts.eval_step(losses[0]), state, data)["loss"]}

    for when in (7, 8, "in the last evaluation", 9):
        try:
            state, _ = ts.fit(
                ts.train_step(losses[0]), make(), data, steps=8, evaluate=evaluate, evaluate_every=5,
                callbacks=[late(when)], progress=False,
            )  # fmt: skip
            found.append([int(state.step), 0])
        except SystemExit as error:
            found.append([int(error.state.step), error.code])
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


def dues() -> list:
    """Whether a save is due by the clock of process 0 alone, and of process 1 alone."""
    folder, index = distributed.broadcast(tempfile.mkdtemp()), distributed.process_index()
    answers = []
    with ts.Checkpoints(folder, every="1 h") as checkpoints:
        for late_process in (0, 1):
            checkpoints._timer.start = time.monotonic() - 3601 * (index == late_process)
            answers.append([checkpoints.due(step) for step in (0, 1)])
    return answers


def stops_again() -> list:
    """A run that one process stopped, started again: it is over for all; with another goal it trains on."""
    arrays, losses, make = problem(64)
    index = distributed.process_index()
    folder = distributed.broadcast(tempfile.mkdtemp())

    def enough(run):
        if index == 1 and run.step == 20:
            run.stop("time is up")

    found = []
    for steps in (100, 100, 30):
        data, callback = ts.batches(arrays, 8, shuffle=True), ts.callbacks.every(5, enough)
        given = {"steps": steps, "callbacks": callback, "checkpoint": folder, "progress": False}
        with warnings.catch_warnings(record=True) as told:
            state, history = ts.fit(ts.train_step(losses[0]), make(), data, **given)
        found.append([int(state.step), [text for _, name, text in history.marks if name == "stop"], len(told)])
    return found


def endless() -> None:
    """A run that prints when it is under way, and goes on until a signal ends it."""
    arrays, losses, make = problem(64)
    data = ts.batches(arrays, 8, shuffle=True)

    def slowly(run):
        time.sleep(0.01 * (1 + distributed.process_index()))
        if run.step == 8:
            print(f"READY {distributed.process_index()} {os.getpid()}", flush=True)

    callback = ts.callbacks.every(4, slowly)
    ts.fit(ts.train_step(losses[0]), make(), data, steps=10**6, callbacks=[callback], progress=False)


def interrupted() -> list:
    """A signal to one of them: all end after the same step."""
    try:
        endless()
    except (KeyboardInterrupt, SystemExit) as error:
        return [int(error.state.step), type(error).__name__]
    return []


def saved() -> list:
    """A signal to one of them saves the run of all at one step, as often as it comes, also at the end of a run."""
    arrays, losses, make = problem(64)
    data, index = ts.batches(arrays, 8, shuffle=True), distributed.process_index()
    folder = distributed.broadcast(tempfile.mkdtemp())
    found = []
    for steps, pressed in ((32, {0: (5, 12), 1: (12, 20)}), (48, {1: (47, 48)})):

        def press(run, pressed=pressed):
            if run.step in pressed.get(index, ()):
                os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.05)  # the processes settle meanwhile on the call

        with ts.Checkpoints(folder, every=10**6, keep_last=None) as saver:
            state, history = ts.fit(
                ts.train_step(losses[0]), make(), data, steps=steps, checkpoint=saver, steps_per_call=1,
                callbacks=[ts.callbacks.every(1, press)], progress=False,
            )  # fmt: skip
        marks = [step for step, name, _ in history.marks if name == "save"]
        found.append([int(state.step), marks, saver.steps()])
    data = ts.batches(arrays, 8, shuffle=True)
    expected, _ = ts.fit(ts.train_step(losses[0]), make(), data, steps=48, progress=False)
    local = lambda x: np.asarray(x.addressable_data(0))
    return [*found, all(np.array_equal(local(x), local(expected.params[k])) for k, x in state.params.items())]


def timed() -> list:
    """Hours pass on process 1 at step 4, on process 0 at step 20: where all of them save, evaluate and call back."""
    arrays, losses, make = problem(64)
    folder, index = distributed.broadcast(tempfile.mkdtemp()), distributed.process_index()
    clock = types.SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    cadence.time = clock
    calls = []

    def jump(run):
        clock.now += 3600 * (run.step == (20, 4)[index])
        time.sleep(0.02)  # the processes settle meanwhile on the call

    with ts.Checkpoints(folder, every="1 h", keep_last=None) as saver:
        _, history = ts.fit(
            ts.train_step(losses[0]), make(), ts.batches(arrays, 8), steps=40, checkpoint=saver, steps_per_call=1,
            callbacks=[ts.callbacks.every(1, jump), ts.callbacks.every("1 h", lambda run: calls.append(run.step))],
            evaluate=lambda state: {"val/x": 1.0}, evaluate_every="1 h", progress=False,
        )  # fmt: skip
        marks = [step for step, name, _ in history.marks if name == "evaluate"]
        return [saver.steps(), marks, calls]


class Timer:
    """A timer that is late on one process only, at each look from some on until it is restarted."""

    is_due = False

    def __init__(self, process: int, *late: int) -> None:
        self.is_here, self.late, self.looks = distributed.process_index() == process, [*late], 0

    def is_late(self) -> bool:
        self.looks += 1
        return self.is_here and bool(self.late) and self.looks >= self.late[0]

    def restart(self) -> None:
        self.late = self.late[1:]


def clocked() -> list:
    """Timers: that of process 0 counts, and all hold a boundary after the same step."""
    arrays, losses, make = problem(64)
    data, real, due = ts.batches(arrays, 8, shuffle=True), opening._parts, []

    class Clocked(ts.callbacks.Part):
        timers = Timer(0, 9, 30), Timer(1, 20), Timer(0, 59)

        def due(self, run, events):
            return "clock" in events

        def at(self, run, events):
            due.append([run.step, [timer.is_due for timer in self.timers]])

    opening._parts = lambda *given: ([*real(*given)[0], Clocked()], [])
    options = {"steps_per_call": 1, "progress": False, "callbacks": ts.callbacks.every(1, lambda run: time.sleep(0.05))}
    ts.fit(ts.train_step(losses[0]), make(), data, steps=30, **options)
    return due


WORK = (
    fits, misused, stops, stops_again, dues, uneven, too_late, endless, interrupted, saved, timed, clocked,
)  # fmt: skip


def main(work: str) -> None:
    distributed.start(**json.loads(os.environ.get("TSUNAX_TEST_START", "{}")))
    found = {f.__name__: f for f in WORK}[work]()
    with contextlib.suppress(BrokenPipeError):
        print("FOUND", json.dumps([distributed.process_index(), found]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
