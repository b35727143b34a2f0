"""Hurt runs of several processes that save together: kill -9, or SIGTERM, to any of them at any time.

    python -m campaigns.fleets --kills 4 --seeds 0:5      # runs killed up to 4 times each, often while they save
    python -m campaigns.fleets --signals --seeds 0:20     # SIGTERM to one: all end with 143, at one step, saved

A killed process ends the others, with its name and within the peer timeout (if it was process 0, JAX may abort the
others before they name it); the same command again goes on, and ends with the bits of an undisturbed run, on each
process. Counts are appended to `results/counts.jsonl`.
"""

import argparse
import collections
import json
import os
import platform
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STEPS, EVERY, PEER_TIMEOUT, PATIENCE = 60, 4, 5.0, 90.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def target(folder: Path) -> None:
    """One process: a state spread over all of them, saved at every fourth step and at the end."""
    import hashlib

    import jax
    import jax.numpy as jnp
    import numpy as np
    import tsunax as ts

    ts.distributed.start(**json.loads(os.environ["TSUNAX_TEST_START"]))
    me = ts.distributed.process_index()
    out = os.open(folder / f"log{me}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    say = lambda *words: os.write(out, (" ".join(map(str, words)) + "\n").encode())
    draw = np.random.default_rng(0)
    rows = {"x": draw.normal(size=(22, 8)).astype(np.float32), "y": draw.normal(size=22).astype(np.float32)}
    params = {"w": draw.normal(size=(8, 512)).astype(np.float32) / 8, "v": np.zeros(512, np.float32)}

    def loss_fn(params, batch, mask, key):
        h = jnp.tanh(batch["x"] @ params["w"]) * jax.random.bernoulli(key, 0.8, (512,))
        return ts.Loss.mean((h @ params["v"] - batch["y"]) ** 2, mask)

    make = lambda: ts.setup(ts.rules.adam(1e-2), params, key=5, ema=0.9)
    state = ts.shard(make, ts.mesh(data=1, fsdp=-1))
    data = ts.batches(rows, 4, shuffle=True, seed=1)

    def note(run):
        say("RESUMED" if run.event == "start" else "STEP", run.step)
        time.sleep(0.01)

    note.events = ("start", "end")
    with ts.Checkpoints(folder / "run", every=EVERY) as checkpoints:
        state, history = ts.fit(
            ts.train_step(loss_fn), state, data, steps=STEPS, checkpoint=checkpoints, progress=False, log_every=1,
            callbacks=[note, ts.callbacks.every(1, lambda run: note(run))],
        )  # fmt: skip
    found = hashlib.sha256(np.ascontiguousarray(history["loss"]).tobytes())
    for x in jax.tree.leaves(state):
        x = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        for shard in x.addressable_shards:
            found.update(np.ascontiguousarray(shard.data).tobytes())
    say("DIGEST", found.hexdigest())


class Fleet:
    """The processes of one run in one directory."""

    def __init__(self, folder: Path, count: int, cache: Path):
        self.folder, self.count, self.cache, self.processes = folder, count, cache, []

    def start(self) -> None:
        address = f"localhost:{free_port()}"
        for i in range(self.count):
            start = {"coordinator_address": address, "num_processes": self.count, "process_id": i}
            more = {"timeout": 30, "peer_timeout": PEER_TIMEOUT}
            env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "JAX_COMPILATION_CACHE_DIR": str(self.cache)}
            env |= {
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            }
            env["TSUNAX_TEST_START"] = json.dumps(start | more)
            command = [sys.executable, "-u", "-m", "campaigns.fleets", "--target", str(self.folder)]
            with open(self.folder / f"out{i}", "wb") as out:
                new = subprocess.Popen(command, env=env, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
            self.processes[i : i + 1] = [new]

    def lines(self, word: str, i: int = 0) -> list[str]:
        path = self.folder / f"log{i}"
        text = path.read_text() if path.exists() else ""
        return [line.split(" ", 1)[1] for line in text.splitlines() if line.startswith(word + " ")]

    def digests(self) -> list[str]:
        return [digest for i in range(self.count) for digest in self.lines("DIGEST", i)[-1:]]

    def said(self, i: int) -> str:
        return (self.folder / f"out{i}").read_text(errors="replace")

    def are_alive(self) -> bool:
        return all(one.poll() is None for one in self.processes)

    def wait_for(self, condition, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until and self.are_alive() and not condition():
            time.sleep(0.002)

    def end(self, limit: float = PATIENCE) -> list:
        """Exit statuses; "hung" for those that had to be killed."""
        until, codes = time.monotonic() + limit, []
        for one in self.processes:
            try:
                codes.append(one.wait(max(0.01, until - time.monotonic())))
            except subprocess.TimeoutExpired:
                one.kill()
                one.wait()
                codes.append("hung")
        return codes

    def repeated(self) -> int:
        most = reached = 0
        path = self.folder / "log0"
        for line in path.read_text().splitlines() if path.exists() else []:
            word, _, number = line.partition(" ")
            if word == "RESUMED":
                most = max(most, reached - int(number))
            elif word == "STEP":
                reached = max(reached, int(number))
        return most


def begun(fleet: Fleet, before: list[int]) -> bool:
    return all(len(fleet.lines("RESUMED", i)) > n for i, n in enumerate(before))


def moment(fleet: Fleet, rng: random.Random, seconds: float) -> None:
    """Wait for a random time of a run: in its first seconds, while it trains, or while it saves."""
    before = [len(fleet.lines("RESUMED", i)) for i in range(fleet.count)]
    how = rng.random()
    if how < 0.1:
        return time.sleep(rng.uniform(0, 3))
    fleet.wait_for(lambda: begun(fleet, before), 60)
    if how < 0.5:
        return time.sleep(rng.uniform(0, 0.8 * seconds))
    is_saving = lambda: any(p.name.startswith(".tsunax-tmp") for p in (fleet.folder / "run").glob(".tsunax-tmp*"))
    time.sleep(rng.uniform(0, 0.6 * seconds))
    fleet.wait_for(is_saving, 10)
    return time.sleep(rng.uniform(0, 0.02))


def killed(fleet: Fleet, victim: int, counts) -> None:
    if not fleet.are_alive():
        fleet.end()
        return
    fleet.processes[victim].kill()
    start, pid = time.monotonic(), fleet.processes[victim].pid
    codes = fleet.end(60)
    counts["kills"] += 1
    counts["slowest end, s"] = max(counts["slowest end, s"], round(time.monotonic() - start, 1))
    for i, code in enumerate(codes):
        if i == victim:
            continue
        text = fleet.said(i)
        counts["hung"] += code == "hung"
        counts["false success"] += code == 0 and not fleet.lines("DIGEST", i)
        if f"process {victim} (host {socket.gethostname()}, pid {pid})" in text:
            counts["others ended, naming it"] += 1
        # JAX's coordination service aborts a process that has lost process 0.
        elif victim == 0 and code == -signal.SIGABRT and "CoordinationService" in text:
            counts["others aborted by JAX without process 0"] += 1
        elif "expected all of them" in text or "no answer" in text:
            counts["others waited for it in vain, and said so"] += 1
        elif fleet.lines("DIGEST", i):
            counts["others had ended"] += 1
        else:
            counts["others ended without a name"] += 1
            print(f"  victim {victim}: {i} ended with {code}: {text[-1500:]}", flush=True)


def terminated(fleet: Fleet, victim: int, counts) -> None:
    if not fleet.are_alive():
        fleet.end()
        return
    has_begun = begun(fleet, [0] * fleet.count)
    fleet.processes[victim].terminate()
    if counts["signals"] % 2:  # and again, while it saves: to all
        time.sleep(0.02)
        for one in fleet.processes:
            one.terminate()
    start, codes = time.monotonic(), fleet.end(60)
    counts["signals"] += 1
    counts["hung"] += "hung" in codes
    counts["slowest end, s"] = max(counts["slowest end, s"], round(time.monotonic() - start, 1))
    if codes == [143] * fleet.count:
        last = [(fleet.lines("STEP", i) or fleet.lines("RESUMED", i))[-1] for i in range(fleet.count)]
        there = [p.name for p in (fleet.folder / "run").iterdir() if p.name.isdigit()]
        is_whole = len(set(last)) == 1 and last[0] in (*there, "0")
        counts["all saved at one step, with 143" if is_whole else "elsewhere"] += 1
        if not is_whole:
            print(f"  last steps {last}, saved {there}", flush=True)
    elif fleet.digests():
        counts["had ended"] += 1
    elif not has_begun:
        counts["had not begun"] += 1
    else:
        counts[f"statuses {codes}"] += 1
        print(f"  victim {victim}: {codes}: {[fleet.said(i)[-800:] for i in range(fleet.count)]}", flush=True)


def finished(fleet: Fleet, wanted: list[str], counts) -> None:
    """Once more, undisturbed; and what came of it."""
    if len(fleet.digests()) < fleet.count:
        fleet.start()
        codes = fleet.end()
        if codes != [0] * fleet.count:
            counts["no end"] += 1
            print(f"  {codes}: {[fleet.said(i)[-1500:] for i in range(fleet.count)]}", flush=True)
    counts["runs"] += 1
    counts["same bits" if fleet.digests() == wanted else "other bits"] += 1
    counts["most steps repeated"] = max(counts["most steps repeated"], fleet.repeated())
    left = [p.name for p in (fleet.folder / "run").iterdir() if p.name.startswith(".")]
    counts["left over"] += len(left)


def is_well(counts) -> bool:
    bad = "no end", "other bits", "hung", "false success", "others ended without a name", "elsewhere", "left over"
    return not any(counts.get(name) for name in bad) and not any("statuses" in name for name in counts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=0, help="kills per run")
    parser.add_argument("--signals", action="store_true")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seeds", default="0:5")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results" / "counts.jsonl")
    parser.add_argument("--target", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.target:
        target(args.target)
        return 0
    import jax

    counts: collections.Counter = collections.Counter()
    with tempfile.TemporaryDirectory() as top:
        new = lambda name: (Path(top, name).mkdir(), Fleet(Path(top, name), args.processes, Path(top, "cache")))[1]
        for name in ("first", "undisturbed"):  # the first one compiles
            fleet, start = new(name), time.monotonic()
            fleet.start()
            fleet.wait_for(lambda fleet=fleet: begun(fleet, [0] * args.processes), 120)
            start = time.monotonic()
            assert fleet.end() == [0] * args.processes, [fleet.said(i)[-2000:] for i in range(args.processes)]
            seconds = time.monotonic() - start
        wanted = fleet.digests()
        print(f"  undisturbed: {seconds:.1f} s", flush=True)
        for seed in range(*map(int, args.seeds.split(":"))):
            rng, fleet = random.Random(seed), new(str(seed))
            for _ in range(1 if args.signals else args.kills):
                fleet.start()
                moment(fleet, rng, seconds)
                (terminated if args.signals else killed)(fleet, rng.randrange(args.processes), counts)
                if len(fleet.digests()) == args.processes:
                    break
            finished(fleet, wanted, counts)
            print(f"  {seed}: {dict(counts)}", flush=True)
    what = {
        "what": "fleet SIGTERM" if args.signals else "fleet kills",
        "processes": args.processes,
        "seeds": args.seeds,
    }
    what |= {} if args.signals else {"each": args.kills}
    about = {"jax": jax.__version__, "python": platform.python_version(), "date": time.strftime("%Y-%m-%d")}
    line = json.dumps({**what, **about, "counts": dict(counts)})
    print(line, flush=True)
    with args.results.open("a") as file:
        file.write(line + "\n")
    return not is_well(counts)


if __name__ == "__main__":
    sys.exit(main())
