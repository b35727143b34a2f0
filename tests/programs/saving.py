"""What one of several processes saves in a test; prints what it found as JSON.

python -m tests.programs.saving WORK FOLDER
"""

import contextlib
import dataclasses
import errno
import json
import os
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import tsunax as ts
from tsunax import distributed
from tsunax.checkpoints import exchange
from tsunax.errors import TsunaxError

SHAPES = {"w": (8, 6), "deep": {"v": (4, 1024), "b": (6,)}}


def trained(scale=1.0):
    """A state some steps into a run, the same on all processes: each computes it by itself."""
    import jax
    import jax.numpy as jnp

    draw = np.random.default_rng(5)
    params = jax.tree.map(
        lambda shape: draw.normal(size=shape).astype(np.float32), SHAPES, is_leaf=lambda x: isinstance(x, tuple)
    )
    state = ts.setup(ts.rules.adam(0.1), params, key=3, ema=0.5, model_state={"seen": jnp.zeros(())})
    for i in range(2):
        grads = jax.tree.map(lambda x, i=i: jnp.asarray(draw.normal(size=x.shape) * scale + i, jnp.float32), params)
        state, _ = ts.update(state, grads)
    return ts.freeze(ts.adjust(state, "w", learning_rate=0.5), "deep/b")


def blank():
    """What a script's setup returns."""
    import jax
    import jax.numpy as jnp

    params = jax.tree.map(lambda shape: np.zeros(shape, np.float32), SHAPES, is_leaf=lambda x: isinstance(x, tuple))
    return ts.setup(ts.rules.adam(0.1), params, key=0, ema=0.5, model_state={"seen": jnp.zeros(())})


def meshes() -> dict:
    n = distributed.process_count()
    return {"replicated": ts.mesh(), "spread": ts.mesh(data=1, fsdp=-1)} | (
        {"mixed": ts.mesh(data=2, fsdp=-1)} if n > 2 else {}
    )


def same(found, expected) -> bool:
    """Whether what this process has of a state are the bits that are expected."""
    import jax

    wrong = []
    for (path, x), y in zip(jax.tree_util.tree_flatten_with_path(found)[0], jax.tree.leaves(expected), strict=True):
        if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        y = np.asarray(y)
        pieces = [(s.data, y[s.index]) for s in x.addressable_shards]
        if not pieces or any(np.asarray(a).tobytes() != b.tobytes() for a, b in pieces) or x.shape != y.shape:
            wrong.append(jax.tree_util.keystr(path))
    return not wrong


def moves_orbax(folder: Path) -> dict:
    return moves(folder, "orbax")


def moves_bucket(folder: Path) -> dict:
    return moves(folder, "files", "gs://bucket")


def moves(folder: Path, store: str = "files", bucket: str = "") -> dict:
    """Restore whatever others saved, onto every mesh that there is here; save from each mesh."""
    import jax

    expected, found = trained(), {}
    for path in sorted(folder.iterdir()) if folder.exists() else []:
        for name, mesh in meshes().items():
            place = f"{bucket}/{path.name}" if bucket else path
            restored = ts.Checkpoints(place, read_only=True).restore(ts.shard(blank(), mesh))
            home = jax.tree.leaves(ts.shard(expected, mesh))
            placed = all(
                x.sharding.is_equivalent_to(y.sharding, x.ndim)
                for x, y in zip(jax.tree.leaves(restored.state), home, strict=True)
            )
            found[f"{path.name} to {name}"] = [restored.step, same(restored.state, expected), placed, restored.data]
    distributed.barrier("read")
    for name, mesh in meshes().items():
        path = folder / f"{distributed.process_count()} {name}"
        if bucket:
            path.mkdir(exist_ok=True)  # for the list of what is there
        with ts.Checkpoints(f"{bucket}/{path.name}" if bucket else path, store=store) as checkpoints:
            checkpoints.save(ts.shard(expected, mesh), data={"position": 7}, history={"loss": np.arange(3.0)})
    return found


def transposed(path: Path) -> list:
    """What this process reads of a transposed leaf that is spread over all, and of a stack; whether both are right."""
    import jax
    from tsunax.checkpoints import _safetensors

    x = np.arange(64 * 32, dtype=np.float32).reshape(64, 32)
    exchange.save(path, {"w": x, "0": x, "1": x + 1})
    expected = {"w": x.T, "stack": np.stack([x, x + 1]).transpose(0, 2, 1)}
    like = {name: jax.ShapeDtypeStruct(y.shape, y.dtype, sharding=spread(y).sharding) for name, y in expected.items()}
    read, read_here = _safetensors.read, []
    _safetensors.read = lambda *args: read_here.append(read(*args)) or read_here[-1]
    how = {"rename": lambda name: name.replace("stack", "{}"), "transform": {"**": exchange.torch_kernel}}
    found = exchange.restore(path, like, **how)
    _safetensors.read = read
    return [sum(y.nbytes for y in read_here), 3 * x.nbytes, same(found, expected)]


def shares(folder: Path) -> dict:
    """What is each process's own, what must be the same, and what one of them does wrong."""
    import jax
    from tsunax.checkpoints import _blocks, _safetensors

    me, found = distributed.process_index(), {}
    state = ts.shard(trained(), ts.mesh(data=1, fsdp=-1))
    like = ts.shard(blank(), ts.mesh(data=1, fsdp=-1))
    path = folder / "run"

    def of(checkpoints, tree=state, step=None, **about):
        checkpoints.save(tree, step=step, **about)
        checkpoints.wait()

    with ts.Checkpoints(path, keep_last=None, timeout=60) as checkpoints:
        own = {"data": {"file": f"part {me}"}, "callbacks": {"same": np.arange(3)}, "history": {"rate": [float(me)]}}
        of(checkpoints, **own)
        read, read_here = _safetensors.read, []
        _safetensors.read = lambda *args: read_here.append(read(*args)) or read_here[-1]
        back = checkpoints.restore(like)
        _safetensors.read = read
        whole = sum(x.nbytes for x in jax.tree.leaves(like) if x.size >= 4096)  # what the mesh spreads
        large = [x.nbytes for x in read_here if x.nbytes >= 4096]
        found["bytes read of the large leaves"] = [sum(large), whole]
        found["written by"] = sorted(p.name for p in (path / "2" / "arrays").iterdir())
        found["own"] = [back.data, back.callbacks["same"].tolist(), back.history, same(back.state, trained())]
        local = {"w": np.full(3, float(me)), "x": np.ones(2), "n": 3}
        found["bad history"] = told(of, checkpoints, history=None if me else {"loss": object()})
        found["local"] = told(of, checkpoints, local, 3)
        found["steps"] = told(of, checkpoints, state, 3 + me)
        found["older"] = told(of, checkpoints, state, 1)
        found["tree"] = told(of, checkpoints, {"a": np.ones(2)} if me else {"b": np.ones(2)}, 3)

        write = _blocks.write_arrays
        if me:
            _blocks.write_arrays = full_disk
        found["full"] = told(of, checkpoints, state, 3)
        found["left"] = sorted(os.listdir(path))
        _blocks.write_arrays = write
        of(checkpoints, state.replace(step=3), data=None if me else {"n": 3})
        found["data of the first alone"] = checkpoints.restore(like).data
        found["steps there"] = checkpoints.steps()
        other = ts.shard(other_rule(), ts.mesh(data=1, fsdp=-1))
        found["another rule"] = told(checkpoints.restore, other if me else like)
        found["another resume"] = told(checkpoints.restore, like, resume="never" if me else "auto")
        found["another part"] = told(checkpoints.restore, like, partial="w" if me else "deep/**")
        members = dataclasses.replace(state, clock=spread(np.zeros((2, 4), np.int32)))
        found["members"] = [told(of, checkpoints, members), told(checkpoints.restore, members)]
        whole = ts.shard(trained().params, ts.mesh())
        exchange.save(folder / f"{me}.safetensors", whole)
        found["given away"] = same(exchange.restore(folder / f"{me}.safetensors", whole), trained().params)
        found["a transposed part"] = transposed(folder / f"other {me}.safetensors")
        distributed.barrier("before the damage")
        if me:
            flip(path / "3" / "arrays" / "1.safetensors")
        distributed.barrier("damaged")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            back = checkpoints.restore(like)
        found["damaged"] = [back.step, same(back.state, trained()), [str(w.message) for w in caught]]
        distributed.barrier("seen")

    def slowly(file, arrays):
        time.sleep(0.6 * (("a" in file.parts) == bool(me)))
        write(file, arrays)

    _blocks.write_arrays = slowly
    two = [ts.Checkpoints(folder / name) for name in "ab"]
    found["two at once"] = [told(one.save, state) for one in two] + [told(one.wait) for one in two]
    found["two at once"] += [one.steps() for one in two]
    _blocks.write_arrays = write
    found["other settings"] = told(ts.Checkpoints, folder / "run", every=2 + me, keep_last=3)
    if not me:
        (folder / "elsewhere").mkdir()
    found["elsewhere"] = told(ts.Checkpoints, folder / ("elsewhere" if me else "run"))
    slow = ts.Checkpoints(folder / "slow", timeout=3.0)
    if me:
        _blocks.write_arrays = lambda *_: time.sleep(8)
    start = time.monotonic()
    found["hangs"] = told(of, slow, state, 3)
    found["after"] = time.monotonic() - start
    return found


def continues(folder: Path, mesh=None) -> list:
    """Five steps more than there are, and all losses so far."""
    import jax

    mesh = ts.mesh(data=1, fsdp=-1) if mesh is None else mesh
    draw = np.random.default_rng(0)
    x = draw.normal(size=(26, 8)).astype(np.float32)
    batches = ts.batches({"x": x, "y": np.tanh(x @ np.arange(8, dtype=np.float32))}, 8, shuffle=True, seed=3)

    def loss_fn(params, batch, mask):
        return ts.Loss.mean((jax.numpy.tanh(batch["x"] @ params["w"]) @ params["v"] - batch["y"]) ** 2, mask)

    params = {"w": draw.normal(size=(8, 256)).astype(np.float32) / 8, "v": np.zeros(256, np.float32)}
    state = ts.shard(lambda: ts.setup(ts.rules.adam(0.01), params), mesh)
    there = ts.Checkpoints(folder, read_only=True).latest() or 0
    distributed.barrier("all have looked")
    _, history = ts.fit(
        ts.train_step(loss_fn), state, batches, steps=there + 5, checkpoint=folder, log_every=1, progress=False
    )
    return history["loss"].tolist()


def holds(folder: Path) -> str:
    """The directory, until a file says that it is enough; or who else has it."""
    path = folder / "run"
    try:
        checkpoints = ts.Checkpoints(path)
    except TsunaxError as error:
        return f"{type(error).__name__}: {error}"
    print(f"READY {distributed.process_index()} {os.getpid()}", flush=True)
    until = time.monotonic() + 200
    while not (folder / "enough").exists() and time.monotonic() < until:
        time.sleep(0.05)
    checkpoints.close()
    return ""


def spread(x):
    """An array with a row on each process."""
    import jax

    rows = jax.sharding.NamedSharding(ts.mesh(), jax.sharding.PartitionSpec("data"))
    return jax.make_array_from_callback(x.shape, rows, x.__getitem__)


def told(f, *args, **kwargs) -> str:
    try:
        f(*args, **kwargs)
    except TsunaxError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def fails_late(folder: Path) -> list:
    """Save a step again with orbax, which fails on process 1 after process 0 has committed; and what is restored."""
    from tsunax.checkpoints._orbax_home import Damaged, OrbaxHome

    def failing_commit(*arguments):
        commit(*arguments)
        time.sleep(0.5)
        raise Damaged("other bytes than were saved")

    spread, commit = ts.mesh(data=1, fsdp=-1), OrbaxHome.commit
    state = ts.shard(trained(), spread)
    with ts.Checkpoints(folder / "run", store="orbax") as checkpoints:
        checkpoints.save(state)
        checkpoints.wait()
        OrbaxHome.commit = failing_commit if distributed.process_index() else commit
        text = told(lambda: (checkpoints.save(state), checkpoints.wait()))
        OrbaxHome.commit = commit
        steps = checkpoints.steps()
    restored = ts.Checkpoints(folder / "run", read_only=True).restore(ts.shard(blank(), spread))
    return [text, steps, restored.step, same(restored.state, trained())]


def full_disk(*_):
    raise OSError(errno.ENOSPC, "No space left on device")


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1  # in the largest array
    path.write_bytes(content)


def other_rule():
    return ts.setup(ts.rules.sgd(0.1), blank().params, key=0, ema=0.5, model_state=blank().model_state)


def main(work: str, folder: str) -> None:
    distributed.start(**json.loads(os.environ.get("TSUNAX_TEST_START", "{}")))
    found = {f.__name__: f for f in (continues, fails_late, holds, moves, moves_bucket, moves_orbax, shares)}[work](
        Path(folder)
    )
    with contextlib.suppress(BrokenPipeError):
        print("FOUND", json.dumps([distributed.process_index(), found]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
