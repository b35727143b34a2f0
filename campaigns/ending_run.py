"""The run that `campaigns.endings` ends: it sends a signal to itself in one phase, and writes what it has at its end.

The module is a process that imports tsunax once, and forks a run for each line that it reads, a job as JSON; it
answers with the exit codes. A run is a script of its own: it ends as a Python script does, with all that happens there.

Its log has a JSON object a line: BEGAN (of a run with steps to do), STEP, SAVE (one begins), SAVED, STRUCK (now comes
the signal), LEFT (what the exception of the signal had), ENDED, and AGAIN, of the same command once more.
"""

import collections
import functools
import hashlib
import json
import os
import random
import signal
import sys
import threading
import time
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tsunax as ts
from orbax.checkpoint import v1 as _imported  # noqa: F401, once for all runs

ROWS, SIZE = 22, 4  # the last batch of an epoch is short: it is compiled in the middle of a run
BEST = ts.checkpoints.Best("val/loss", mode="min")
# How a run ends, and how often it logs, evaluates and saves.
CADENCES = {
    "goal": {"steps": 13, "log_every": 3, "evaluate_every": 4, "every": 5},
    "epochs": {"epochs": 3, "log_every": 2, "evaluate_every": "epoch", "every": None},
    "stop": {"steps": 30, "log_every": 4, "evaluate_every": 3, "every": 4, "steps_per_call": 1},
    "patience": {"steps": 30, "log_every": 1, "evaluate_every": 5, "every": 3},
    "early_stopping": {"steps": 30, "log_every": 5, "evaluate_every": 3, "every": 4, "steps_per_call": None},
}
DELAY = 2e-3  # seconds; a step takes about one
PATIENCE = 300.0  # seconds until a run counts as one that hangs, also on a busy machine


def enough(run):
    if run.step == 12:
        run.stop("enough")


def is_late(run):
    return run.step >= 8


ENDS = {
    "stop": lambda: [ts.callbacks.every(6, enough)],
    "patience": lambda: [ts.callbacks.patience(is_late, 3)],
    "early_stopping": lambda: [ts.callbacks.early_stopping("val/loss", patience=2)],
}


class Strike:
    """Sends the signal of a job at the nth place of its phase, and counts the places of each phase."""

    def __init__(self, job: dict, process: int, say):
        is_hurt = job.get("phase") is not None and process == job["victim"]
        self.phase, self.nth = (job["phase"], job["nth"]) if is_hurt else ("", -1)
        self.number, self.seed, self.say = job.get("signal", 0), job.get("seed", 0), say
        self.places: collections.Counter = collections.Counter()

    def __call__(self, phase: str) -> None:
        self.places[phase] += 1
        if phase != self.phase or self.places[phase] != self.nth + 1:
            return
        self.say("STRUCK", phase=phase, nth=self.nth)
        send = functools.partial(os.kill, os.getpid(), self.number)
        if phase == "step":  # the next call is under way
            threading.Timer(random.Random(self.seed).uniform(0, DELAY), send).start()
        else:
            send()


class Steps(ts.callbacks.Part):
    """Notes the steps that a run has read, while the next call is under way."""

    def __init__(self, strike: Strike, say):
        self.strike, self.say = strike, say

    def read(self, run, has_row):
        self.say("STEP", step=run.step)
        self.strike("step")


class Closed:
    """A logger that is closed at the end of a run."""

    def __init__(self, strike: Strike):
        self.strike = strike

    def __call__(self, row, step):
        pass

    def close(self):
        self.strike("end")


def digest(tree) -> str:
    """The bits of a tree, of which each process sees a part."""
    out = hashlib.sha256()
    for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]:
        x = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else jnp.asarray(x)
        out.update(f"{jax.tree_util.keystr(path)} {x.dtype} {x.shape}".encode())
        for shard in x.addressable_shards:
            out.update(np.ascontiguousarray(shard.data).tobytes())
    return out.hexdigest()


def make():
    """A state whose matrices and moments are spread over the processes, if there are several."""
    draw = np.random.default_rng(0)
    params = {"w": draw.normal(size=(8, 512)).astype(np.float32) / 8, "v": np.zeros(512, np.float32)}
    setup = lambda: ts.setup(ts.rules.adam(1e-2), params, key=5, ema=0.9)
    is_alone = ts.distributed.process_count() == 1
    return setup() if is_alone else ts.shard(setup, ts.mesh(data=1, fsdp=-1))


@jax.jit
def norm(params):
    return sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(params))


def rows_of(history) -> dict:
    """The rows and evaluations of a history, without the numbers of the clock on the wall."""
    columns = {name: history[name].tolist() for name in ("step", *history) if not name.endswith("_per_second")}
    evaluations = [step for step, name, _ in history.marks if name == "evaluate"]
    return {**dict(sorted(columns.items())), "evaluations": evaluations}


class EndingRun:
    """One process of a run in a folder: what a script has that calls `fit` and then looks at its checkpoints."""

    def __init__(self, job: dict, process: int):
        self.job, self.process, self.folder = job, process, Path(job["folder"])
        self.log = os.open(self.folder / f"log{process}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        self.strike = Strike(job, process, self.say)
        self.path = job["bucket"] or self.folder / "run"
        self.step_of_save = 0
        self.was_asked = False  # whether a signal had asked for the save under way, or an earlier one

    def say(self, word: str, **about) -> None:
        os.write(self.log, (json.dumps({"word": word, **about}) + "\n").encode())

    def checkpoints(self, **options) -> ts.Checkpoints:
        store = {"store": "orbax"} if self.job["home"] == "orbax" else {}
        return ts.Checkpoints(self.path, keep_best=BEST, timeout=60, **store, **options)

    def watch(self, checkpoints: ts.Checkpoints) -> None:
        """Hook the places of a save: its copy, its files, its commit, each before and after."""
        home, save, strike = checkpoints.home, checkpoints._save, self.strike

        def between(method, word=""):
            def hooked(*args, **kwargs):
                strike("save")
                result = method(*args, **kwargs)
                if word:
                    self.say(word, step=self.step_of_save)
                    if self.was_asked and self.job.get("dies") and not self.process:  # process 0 commits
                        os.kill(os.getpid(), signal.SIGKILL)
                strike("save")
                return result

            return hooked

        def hooked_save(state, *, step, history, **values):
            self.say("SAVE", step=step)
            checkpoints.wait()  # as `save` does: an earlier save is over
            self.step_of_save = step
            self.was_asked = any(name == "save" for _, name, _ in history["marks"])
            strike("save")
            return save(state, step=step, history=history, **values)

        checkpoints._save = hooked_save  # type: ignore[method-assign]
        home.write_blocks = between(home.write_blocks)  # type: ignore[method-assign]
        home.commit = between(home.commit, "SAVED")  # type: ignore[method-assign]

    def fit(self):
        """The command: the same whenever the run is started."""
        strike, cadence = self.strike, dict(CADENCES[self.job["cadence"]])
        checkpoints = self.checkpoints(every=cadence.pop("every"))
        self.watch(checkpoints)
        draw = np.random.default_rng(0)
        rows = {"x": draw.normal(size=(ROWS, 8)).astype(np.float32), "y": draw.normal(size=ROWS).astype(np.float32)}

        def loss_fn(params, batch, key):
            strike("compile")
            h = jnp.tanh(batch["x"] @ params["w"]) * jax.random.bernoulli(key, 0.8, (512,))
            return ts.Loss.mean((h @ params["v"] - batch["y"]) ** 2)

        def evaluate(state):
            strike("evaluation")
            step = int(state.step)
            return {"val/loss": 1.0 + step * 7 % 5 / 10, "val/norm": float(norm(state.params))}

        def note(run):
            if run.event == "start":
                self.say("BEGAN", step=run.step, state=digest(run.state))
            strike("end" if run.event == "end" else "callback")

        def count(run):
            if run.event == "evaluate":
                run.memory["evaluations"] = run.memory.get("evaluations", 0) + 1
                run.log(**{"count/evaluations": run.memory["evaluations"]})
            if run.event == "end" and not run.interrupted:
                run.memory["end"] = run.step
                return ts.adjust(run.state, learning_rate=5e-3)

        loggers = [ts.loggers.csv(self.folder / "rows.csv"), ts.loggers.jsonl(self.folder / "rows.jsonl")]
        callbacks = [note, count, ts.callbacks.adjust_at(5, learning_rate=2e-2), *ENDS.get(self.job["cadence"], list)()]
        with checkpoints:
            return ts.fit(
                ts.train_step(loss_fn), make(), ts.batches(rows, SIZE, shuffle=True, seed=1), **cadence,
                evaluate=evaluate, callbacks=[*callbacks, Steps(strike, self.say)], checkpoint=checkpoints,
                logger=[*loggers, Closed(strike)], progress=False,
            )  # fmt: skip

    def report(self, word: str, state, history) -> None:
        """What `fit` returned, and what its checkpoints have."""
        with self.checkpoints(read_only=True) as checkpoints:
            newest, best = checkpoints.restore(make()), checkpoints.restore(make(), step="best")
            steps = checkpoints.steps()
        saved_rows = rows_of(ts.loop.History.of(newest.history))
        steps_of_values = zip(*history.series(BEST.metric), strict=True)
        best_of_rows = min(steps_of_values, key=lambda row: (row[1], -row[0]))[0]
        returned = {"step": int(state.step), "state": digest(state), "rows": rows_of(history)}
        saved = {"step": newest.step, "state": digest(newest.state), "rows": saved_rows}
        memory = {name: values for name, values in newest.callbacks.items() if values}
        marks = [[step, *words] for step, *words in history.marks if words[0] != "evaluate"]
        best_steps = {"saved": best.step, "of all rows": int(best_of_rows)}
        self.say(word, returned=returned, saved=saved, memory=memory, marks=marks, best=best_steps, steps=steps)

    def main(self) -> None:
        count, peer_timeout = self.job["processes"], 10.0
        if count > 1:
            place = {"coordinator_address": self.job["address"], "num_processes": count, "process_id": self.process}
            ts.distributed.start(**place, timeout=60, peer_timeout=peer_timeout)
        try:
            state, history = self.fit()
        except (KeyboardInterrupt, SystemExit) as error:
            if getattr(error, "state", None) is not None:
                self.say("LEFT", step=int(error.state.step), state=digest(error.state))
            raise
        self.strike("exit")
        self.report("ENDED", state, history)
        self.say("PLACES", places=self.strike.places)
        if self.job.get("phase") is None:
            self.report("AGAIN", *self.fit())


def run(job: dict, process: int) -> None:
    """A forked process from here on."""
    err = os.open(Path(job["folder"]) / f"err{process}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(err, 1), os.dup2(err, 2)
    os.environ.update(job["environment"])
    jax.config.update("jax_compilation_cache_dir", job["cache"])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in the background, nohup HUP
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    EndingRun(job, process).main()


def launched(job: dict) -> list[int | str] | None:
    """The exit codes of a run; None in its processes. If one is killed, the others are, as a scheduler does it."""
    codes: dict[int, int | str] = {}
    pids: list[int] = []
    for process in range(job["processes"]):
        if not (pid := os.fork()):
            job["process"] = process
            return None
        pids.append(pid)
    deadline, is_hung = time.monotonic() + PATIENCE, False
    while len(codes) < len(pids):
        for pid in set(pids) - codes.keys():
            ended_pid, status = os.waitpid(pid, os.WNOHANG)
            if ended_pid:
                codes[pid] = "hung" if is_hung else os.waitstatus_to_exitcode(status)
        is_hung = is_hung or time.monotonic() > deadline
        if is_hung or -signal.SIGKILL in codes.values():
            for pid in set(pids) - codes.keys():
                os.kill(pid, signal.SIGKILL)
        time.sleep(2e-3)
    return [codes[pid] for pid in pids]


def main() -> None:
    for line in sys.stdin:
        job = json.loads(line)
        codes = launched(job)
        if codes is None:
            return run(job, job["process"])
        print(json.dumps(codes), flush=True)


if __name__ == "__main__":
    main()
