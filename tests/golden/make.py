"""Small checkpoints of today's format, kept for ever: what a later version must still restore.

    python -m tests.golden.make format-1                # refuses a name that is there
    python -m tests.golden.make format-1 population     # adds a setup that the archive lacks

Written once for each format of the manifest that was released, and never again: an archive that is made anew proves
nothing. `setups` makes what a script would give to `restore`; a change of tsunax that needs another setup here breaks
users' scripts too.
"""

import functools
import hashlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tsunax as ts
from tsunax._core import trees
from tsunax.checkpoints import exchange
from tsunax.run import control
from tsunax.timelines import command_line

HERE = Path(__file__).parent
MASTERS = ts.precision.Policy(param="bfloat16", compute="bfloat16")  # params rounded, a float32 copy beside them


def params():
    draw = np.random.default_rng(0).standard_normal
    make = lambda *shape: jnp.asarray(draw(shape), jnp.float32)
    return {"body": {"w": make(5, 4), "b": make(4)}, "head": [make(4, 2)]}


def adam(**more):
    return ts.rules.adam(ts.schedules.cosine_decay_schedule(1e-2, 40), **more)


@functools.cache
def setups() -> dict:
    clipped = ts.rules.chain(
        ts.rules.clip_by_global_norm(1.0), ts.rules.add_decayed_weights(1e-3, where="**/w"), adam()
    )
    return {
        "mlp": ts.setup(clipped, params(), key=5, ema=0.9, model_state={"seen": jnp.zeros(())}),
        "float16": ts.setup(ts.rules.adamw(1e-2), params(), precision="float16", loss_scale="dynamic"),
        "bfloat16": ts.setup(ts.rules.sgd(0.1, momentum=0.9), params(), precision=MASTERS, ema=0.5),
        "accumulating": ts.setup(ts.rules.accumulate(adam(), every=4), params()),
        "edited": ts.setup(ts.rules.adam(1e-2), params(), trainable=["**", "!head/**"]),
        "groups": ts.setup(ts.rules.partition({"head/**": ts.rules.sgd(0.1), "**": adam()}), params()),
        "population": ts.population(member, 3, key=2, rate=np.array([1e-3, 1e-2, 1e-1], np.float32)),
        "states": ts.States(
            actor=ts.setup(adam(), params(), key=3, ema=0.9),
            critic=ts.setup(ts.rules.sgd(0.1, momentum=0.9), {"w": jnp.arange(4.0)}),
            carry={"replay": jnp.zeros((4, 2)), "position": jnp.zeros((), jnp.int32)},
        ),
    }


def member(key, rate):
    """A member of a population: its own first params and learning rate."""
    return ts.setup(ts.rules.adam(rate), {"w": jax.random.normal(key, (5, 2)), "b": jnp.zeros(2)}, key=key)


@jax.jit
def _loss_grads(state, i):
    draw = lambda n, x: jax.random.normal(jax.random.fold_in(jax.random.key(n), i), x.shape).astype(x.dtype)
    leaves, treedef = jax.tree.flatten(ts.trainable(state))
    return treedef.unflatten([draw(n, x) for n, x in enumerate(leaves)])


def trained(name: str, state):
    """Some way into a run: six calls, one of them rejected; for "edited" cut and frozen on the way."""
    if name == "edited":
        state = ts.adjust(ts.freeze(state, "body/b"), "body/w", learning_rate=0.5)
    for i in range(6):
        state = stepped(name, state, i)
    return state


def stepped(name: str, state, i: int):
    """Call i of a setup. Call 2 is rejected: for a population of one member, for States of the critic."""
    if name == "states":
        carry = {"replay": state.carry["replay"].at[i % 4].set(i), "position": state.carry["position"] + 1}
        return state.advance(actor=updated(state.actor, i), critic=updated(state.critic, i, bad=i == 2), carry=carry)
    if name == "population":
        bad = jnp.array([False, i == 2, False])
        return jax.vmap(updated, (0, None, 0))(state, i, bad)
    return updated(state, i, bad=i == 2)


def updated(state, i, bad=False):
    grads = jax.tree.map(lambda x: jnp.where(bad, jnp.nan, x).astype(x.dtype), _loss_grads(state, i))
    return ts.update(state, grads)[0]


def params_of(state):
    return {name: x.params for name, x in state.members.items()} if isinstance(state, ts.States) else state.params


PARTS = {
    "data": {"epoch": 1, "position": 8, "order": (1, [2.5, None])},
    "history": {"step": np.arange(6), "loss": np.linspace(1, 0.5, 6, dtype=np.float32)},
    "callbacks": {"best": {"value": 0.5, "params": {"w": np.ones(3, np.float32)}}, "patience": [3, float("nan"), "x"]},
}


def digest(tree) -> str:
    """Of names, dtypes, shapes and bits; no version of any library has a part in it."""
    out = hashlib.sha256()
    for name, _, x in trees.leaves_with_names(tree):
        if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x = jax.random.key_data(x)
        array = np.asarray(x)
        out.update(f"{'/'.join(name)} {array.dtype} {array.shape}\n".encode())
        out.update(repr(x).encode() if array.dtype.kind == "U" else np.ascontiguousarray(array).tobytes())
    return out.hexdigest()


def of_two_processes(top: Path) -> str:
    """What `tests.programs.saving` saves from two processes, arrays spread over both; the digest of its state."""
    from tests.programs import saving

    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    given = {"coordinator_address": f"localhost:{port}", "num_processes": 2}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.programs.saving", "moves", folder]
        env = lambda i: {**os.environ, "XLA_FLAGS": "", "TSUNAX_TEST_START": json.dumps({**given, "process_id": i})}
        started = [subprocess.Popen(command, env=env(i)) for i in range(2)]
        assert [one.wait() for one in started] == [0, 0]
        (top / "processes").mkdir()
        (Path(folder) / "2 spread" / "2").rename(top / "processes" / "2")
    return digest(saving.trained())


ORBAX = ("mlp", "edited")  # also saved in the other home


def saved(state, folder: Path, store: str = "files") -> int:
    """Save a state, and keep its checkpoint in a folder, without the lock; the step."""
    with tempfile.TemporaryDirectory() as run:
        with ts.Checkpoints(run, store=store) as checkpoints:
            checkpoints.save(state, **PARTS, metrics={"loss": 0.5})
        (step,) = checkpoints.steps()
        folder.mkdir(parents=True)
        (Path(run) / str(step)).rename(folder / str(step))
    return step


RUN_ROWS = np.random.default_rng(1).normal(size=(48, 4)).astype(np.float32)
SPACE = {"rate": ts.tuning.spaces.log_uniform(1e-4, 1.0), "width": ts.tuning.spaces.choice([8, 16])}


def run_loss(params, x):
    return jnp.mean((x @ params["w"] - 1.0) ** 2)


def fitted(folder: Path, steps: int = 16, callbacks=()):
    """A run of `fit`, beside its logs: (state, history). A second call with more steps resumes it."""
    state = ts.setup(ts.rules.sgd(0.1, momentum=0.9), {"w": jnp.zeros(4)})
    data = ts.batches(RUN_ROWS, 8, shuffle=True, seed=3)
    callbacks = [ts.callbacks.adjust_at(2, learning_rate=0.05), *callbacks]
    logs = [ts.loggers.csv(folder / "run.csv"), ts.loggers.jsonl(folder / "run.jsonl")]
    options = {"callbacks": callbacks, "logger": logs, "log_every": 1, "progress": False}
    with ts.Checkpoints(folder / "run", every=4, keep_last=None) as checkpoints:
        return ts.fit(ts.train_step(run_loss), state, data, steps=steps, checkpoint=checkpoints, **options)


class Command(ts.callbacks.Part):
    """At step 6 a command from outside halves the rate."""

    every = 1

    def __init__(self, folder: Path):
        self.folder = folder

    def at(self, run, events):
        if run.step == 6 and run.state.calls == 6:
            thread = threading.Thread(target=command_line.ask, args=(self.folder, "adjust", {"learning_rate": 0.025}))
            thread.start()
            while not list((self.folder / "control").glob("*.json")):
                time.sleep(1e-3)


def of_a_run(top: Path) -> dict:
    """A run with an edit by a callback, one by a command, and a rewind from step 11 to step 8; what it has on disk."""
    control.LOOK_SECONDS = 0.0
    rewind = ts.callbacks.rewind(lambda run: int(run.state.calls) == 11, back=3, data="skip")
    fitted(top, callbacks=[rewind, Command(top / "run")])
    return facts_of_run(top)


def facts_of_run(top: Path) -> dict:
    """What a reader sees of a run: steps, edits, the line that it left, and hashes of its newest state and losses."""
    line, like = ts.timeline(top / "run"), ts.setup(ts.rules.sgd(0.1, momentum=0.9), {"w": jnp.zeros(4)})
    found = ts.Checkpoints(top / "run", read_only=True).restore(like)
    left = ts.Checkpoints(top / "run" / "left" / "11", read_only=True)
    return {
        "steps": line.steps,
        "left": left.steps(),
        "edits": [[edit.step, edit.calls, digest(list((edit.values or {}).values()))] for edit in line.edits],
        "changed links": line.audit(),
        "state": digest(found.state),
        "position": [found.data["epoch"], found.data["position"]],
        "loss": digest(ts.loop.History.of(found.history)["loss"]),
        "marks": [name for _, name, _ in ts.loop.History.of(found.history).marks],
    }


def bowl(rate, width):
    return abs(np.log10(rate) + 2) + width / 8


def searched(folder: Path, trials: int = 6, objective=bowl):
    return ts.tune(objective, SPACE, trials=trials, directory=folder, progress=False)


def facts_of_search(result) -> list:
    return [[t.index, repr(t.values), t.status, repr(t.value)] for t in result.trials]


def of_setup(top: Path, name: str) -> dict:
    """A setup some way into its run, saved below a folder; its step and digests."""
    state = trained(name, setups()[name])
    step = saved(state, top / name)
    return {"step": step, "state": digest(state), "params": digest(params_of(state))}


def add(archive: str, names: tuple[str, ...]) -> None:
    """Setups that an archive lacks; nothing that is there changes."""
    top = HERE / archive
    digests = json.loads((top / "digests.json").read_text())
    assert not digests.keys() & set(names), f"{names}: one is there"
    digests |= {name: of_setup(top, name) for name in names}
    (top / "digests.json").write_text(json.dumps(digests, indent=2) + "\n")


def main(archive: str, *names: str) -> None:
    assert archive.startswith("format-"), archive
    if names:
        return add(archive, names)
    top = HERE / archive
    top.mkdir()
    digests = {name: of_setup(top, name) for name in setups()}
    exchange.save(top / "mlp.safetensors", trained("mlp", setups()["mlp"]))
    digests["parts"] = digest(PARTS)
    digests["processes"] = of_two_processes(top)
    for name in ORBAX:
        saved(trained(name, setups()[name]), top / "orbax" / name, "orbax")
    digests["run"] = of_a_run(top)
    digests["search"] = facts_of_search(searched(top / "search"))
    (top / "digests.json").write_text(json.dumps(digests, indent=2) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
