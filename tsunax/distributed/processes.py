"""Many processes that train as one: who I am, who else is there, and what all of them agree on.

    ts.distributed.start()              # the first line of the script; alone, it does nothing
    ts.distributed.check_in_sync(seed=seed, params=params, settings=settings)

`mpirun`, SLURM, Kubernetes and the like start the processes; `start` finds out from them who is
who, brings all together, and starts `jax.distributed`. From then on `jax.devices()` are those of
all processes, and arrays and programs span them. What is here is the rest: waits that end, errors
that name a process, one answer for all. It works on the host, over the key-value store of JAX's
coordination service (`_peers.py`), and knows nothing of meshes, states and steps. A run that
`jax.distributed.initialize` started is served too.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import math
import os
import signal
import socket
import sys
import threading
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax._src import xla_bridge
from jax._src.clusters import ClusterEnv

from tsunax._core import stable_text, trees
from tsunax.distributed import _peers
from tsunax.errors import ProcessError, TsunaxError, WrongTypeError, message, told

__all__ = [
    "agree",
    "barrier",
    "broadcast",
    "check_in_sync",
    "compare",
    "give_up",
    "is_main",
    "name_of",
    "process_count",
    "process_index",
    "spans_all",
    "start",
    "stop",
    "together",
    "words",
]

# seconds after `peer_timeout` in which JAX, too, would end the process: should this module ever
# fail
SPARE = 10
SHOWN = 10  # differences in a message
# seconds that processes wait for one that works by itself: a callback of `fit`, figures at the end
LAST = 1800.0

NEVER = 10 * 365 * 86400  # seconds

_peers_of_run: _peers.Peers | None = None
_is_alone = False  # because start() said so
_is_watching = False  # from start() on
_is_ours = False  # `jax.distributed`, which start() has initialized
_has_given_up = False
_met = 0  # how often the processes have met


# Who is who


class _Launch(NamedTuple):
    address: Any  # of process 0, host:port; None where nobody says so, as the next two
    count: Any
    index: Any
    local_device_ids: Any
    is_one_host: bool


def _number(name: str) -> int | None:
    """A variable of the environment as a number; None without.

    Raises ProcessError for one that is no number.
    """
    text = os.environ.get(name, "").strip()
    if text and not text.isdigit():
        raise ProcessError(message(name, "the environment", repr(text), "a number"))
    return int(text) if text else None


def _launched() -> int:
    """How many processes the variables of a launcher speak of; 1 without."""
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "JAX_NUM_PROCESSES"):
        if (n := _number(name)) is not None:
            return n
    slurm = _number("SLURM_STEP_NUM_TASKS") or _number("SLURM_NTASKS") or 1
    return slurm if "SLURM_STEP_NODELIST" in os.environ else 1


def _launch(address, count, index, local_device_ids: Any, timeout: float) -> _Launch:
    """From arguments, then JAX_* variables, then what JAX knows of launchers."""
    address = address or os.environ.get("JAX_COORDINATOR_ADDRESS")
    count = _number("JAX_NUM_PROCESSES") if count is None else count
    index = _number("JAX_PROCESS_ID") if index is None else index
    if index is None and address is not None and count is not None:
        index = _number("JOB_COMPLETION_INDEX")  # of an indexed job of Kubernetes
    method, is_one_host = None, False
    if (n := _number("OMPI_COMM_WORLD_SIZE")) is not None:
        is_one_host = _number("OMPI_COMM_WORLD_LOCAL_SIZE") == n
        if "OMPI_MCA_orte_hnp_uri" not in os.environ:  # Open MPI 5 does not say where process 0 is
            method = "mpi4py"
            if is_one_host and (count, address) == (None, None):
                job = os.environ.get("PMIX_NAMESPACE", str(os.getppid()))
                port = (
                    os.environ.get("JAX_COORDINATOR_PORT")
                    or 61440 + zlib.crc32(job.encode()) % 4096
                )
                address, count, index = f"127.0.0.1:{port}", n, _number("OMPI_COMM_WORLD_RANK")
                local_device_ids = local_device_ids or [_number("OMPI_COMM_WORLD_LOCAL_RANK")]
    elif "SLURM_STEP_NODELIST" in os.environ:
        is_one_host = _number("SLURM_STEP_NUM_NODES") == 1
        if count is None:  # of this step; in an interactive shell that is 1, whatever the job has
            count = _number("SLURM_STEP_NUM_TASKS")
    elif (_number("PMI_SIZE") or 1) > 1:  # MPICH, Intel MPI
        method = "mpi4py"
    if count != 1 and None in (address, count, index):
        if method == "mpi4py" and importlib.util.find_spec("mpi4py") is None:
            fix = "pip install mpi4py, or say coordinator_address=, num_processes= and process_id=."
            raise ProcessError(
                message(
                    "launcher", "start()", "an MPI that JAX knows by mpi4py only", "mpi4py", fix
                )
            )
        try:
            address, count, index, local_device_ids = (
                ClusterEnv.auto_detect_unset_distributed_params(
                    address, count, index, local_device_ids, method, math.ceil(timeout)
                )
            )
        except Exception as error:
            fix = (
                "Say coordinator_address=, num_processes= and process_id=; "
                "start(num_processes=1) for a process alone."
            )
            got = f"{told(error)}, when JAX asked it"
            raise ProcessError(message("launcher", "start()", got, "who is who", fix)) from error
    if (address, count, index) == (None, None, None):
        count, index = 1, 0
    return _Launch(address, count, index, local_device_ids, is_one_host)


def _checked(launch: _Launch, given: dict[str, Any]) -> tuple[str, int]:
    """The host and port of process 0. Raises ProcessError for what does not make sense."""
    for name, value in given.items():
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 0
        ):
            raise ProcessError(message(name, "start()", repr(value), "an int of 0 or more"))
    known = {
        "coordinator_address": launch.address,
        "num_processes": launch.count,
        "process_id": launch.index,
    }
    if missing := [name for name, value in known.items() if value is None]:
        fix = "No launcher was found that tells."
        raise ProcessError(
            message("start()", "", f"no {' and no '.join(missing)}", ", ".join(known), fix)
        )
    if launch.count < 1:
        raise ProcessError(message("num_processes", "start()", launch.count, "1 or more"))
    if launch.index >= launch.count:
        fix = "They count from 0."
        got = f"{launch.index} of num_processes {launch.count}"
        raise ProcessError(
            message("process_id", "start()", got, f"at most {launch.count - 1}", fix)
        )
    host, _, port = str(launch.address).rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ProcessError(
            message(
                "coordinator_address", "start()", repr(launch.address), "'host:port' of process 0"
            )
        )
    return host.strip("[]"), int(port)


def _check_seconds(where: str, **given: Any) -> None:
    for name, seconds in given.items():
        if (
            isinstance(seconds, bool)
            or not isinstance(seconds, (int, float))
            or not 0 < seconds < 1e6
        ):
            raise ProcessError(message(name, where, repr(seconds), "seconds, more than 0"))


def start(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    local_device_ids: Sequence[int] | None = None,
    timeout: float = 120.0,
    peer_timeout: float = 30.0,
) -> None:
    """Make this process one of many, before anything else asks JAX for a device; nothing to do for
    a process alone.

        jax.distributed.initialize(...)    # with all processes there, and watched from then on

    Without arguments it finds out by itself under SLURM (`srun`), Open MPI, MPICH and Intel MPI
    (with mpi4py), in an indexed job of Kubernetes, on Cloud TPU, or from JAX_COORDINATOR_ADDRESS,
    JAX_NUM_PROCESSES and JAX_PROCESS_ID. It may be called again, and does nothing then.

    Args:
      coordinator_address: `host:port` of process 0, the same on all. Processes on one host say
        `localhost:port`: then nobody else can connect.
      num_processes: how many there are; 1 is a process alone, whatever a launcher says.
      process_id: which one this is, from 0.
      local_device_ids: the devices of this host that this process has. Under MPI and SLURM one GPU
        each, by the rank on the host; else all.
      timeout: seconds that any wait for processes which are alive may take, here, and in `barrier`
        and its like.
      peer_timeout: seconds without a sign of life after which a process counts as dead, killed or
        stopped.

    When a process dies, is stopped, or ends with an exception, all others end with exit code 1 and
    a line that names it: a collective that has lost a member never returns. So does a process whose
    Python stands still for so long, inside a C extension that keeps the interpreter's lock. At the
    end processes wait for each other, see `stop`. SIGTERM keeps the handler that it had; JAX would
    replace it.

    If `jax.distributed.initialize` was called before, this only begins to watch the other
    processes. Without it the rest of this module works in such a run, too; a lost process is then
    left to JAX.

    Raises ProcessError if not all processes come, or if their versions or counts differ; for
    arguments that do not fit; if a device was used before; if the port of process 0 is taken. When
    two processes have one number, JAX aborts.

    >>> start()
    >>> process_index(), process_count()
    (0, 1)
    """
    global _is_alone, _is_ours
    if _is_watching:
        return
    _check_seconds("start()", timeout=timeout, peer_timeout=peer_timeout)
    if _has_given_up:
        raise ProcessError(message("start()", "", "a process that has given up", "a new process"))
    if (found := _peers.initialized()) is None:
        launch = _launch(coordinator_address, num_processes, process_id, local_device_ids, timeout)
        address = ("", 0)
        if launch.count != 1 or process_id:
            address = _checked(launch, {"num_processes": num_processes, "process_id": process_id})
        if launch.count == 1:
            _is_alone = num_processes == 1
            return
        if xla_bridge.backends_are_initialized():
            fix = (
                "Make it the first line: jax.devices(), jnp.ones() and jax.random.key() start "
                "the backend."
            )
            raise ProcessError(
                message(
                    "start()", "", "a backend that has started", "to be called before that", fix
                )
            )
        _initialize(launch, *address, timeout, peer_timeout)
        _is_ours = True
    else:
        _check_same(found, num_processes, process_id)
        if found[2] == 1:
            return
    _watch(timeout, peer_timeout)


def _check_same(found: tuple, num_processes: int | None, process_id: int | None) -> None:
    for name, given, known in (
        ("num_processes", num_processes, found[2]),
        ("process_id", process_id, found[1]),
    ):
        if given is not None and given != known:
            fix = "jax.distributed was initialized before: leave the arguments out."
            raise ProcessError(
                message(name, "start()", given, f"{known}, as jax.distributed has it", fix)
            )


def _initialize(launch: _Launch, host: str, port: int, timeout: float, peer_timeout: float) -> None:
    """`jax.distributed.initialize`, with an error for what JAX would abort the process for."""
    alone = launch.is_one_host or host in ("localhost", "127.0.0.1", "::1")
    if alone:
        host = "::1" if host == "::1" else "127.0.0.1"
    if launch.index == 0:  # gRPC would share a port that another run has, and mix the two
        _check_port(host, port, alone)
    there = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    failed: list[BaseException] = []

    def connect() -> None:
        try:
            jax.distributed.initialize(
                there,
                launch.count,
                launch.index,
                launch.local_device_ids,
                cluster_detection_method="deactivate",
                initialization_timeout=NEVER,  # when it is over, JAX aborts
                heartbeat_timeout_seconds=math.ceil(peer_timeout) + SPARE,
                coordinator_bind_address=there if alone else None,
            )
        except BaseException as error:
            failed.append(error)

    with _same_sigterm():
        thread = threading.Thread(target=connect, name="tsunax-start", daemon=True)
        thread.start()
        thread.join(timeout)
    if thread.is_alive():
        _peers.forget()
        got = (
            f"not all {launch.count} of them within {timeout:g} s at {there}, seen from process "
            f"{launch.index}"
        )
        fix = (
            f"Were all started, with this address, num_processes={launch.count} and a process_id of their own? Is "
            "process 0 running there, and the port open between the hosts?"
        )
        raise ProcessError(message("processes", "start()", got, "all of them", fix))
    if failed:
        _peers.forget()
        raise ProcessError(
            message("jax.distributed", "start()", told(failed[0]), "one that starts")
        ) from failed[0]


def _check_port(host: str, port: int, alone: bool) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server(
            (host if alone else "", port), family=family if alone else socket.AF_INET
        ).close()
    except OSError as error:
        fix = (
            "Another program or run has it: give another port, coordinator_address= or "
            "JAX_COORDINATOR_PORT."
        )
        got = os.strerror(error.errno or 0)
        raise ProcessError(message("port", f"{host}:{port}", got, "a free one", fix)) from error


def _peers_here() -> _peers.Peers | None:
    """The others: after `start`, or of a `jax.distributed` that somebody else has initialized; None
    alone.
    """
    global _peers_of_run
    if (
        _peers_of_run is None
        and not _has_given_up
        and (found := _peers.initialized()) is not None
        and found[2] > 1
    ):
        _peers_of_run = _meet(found, "without ts.distributed.start()", 120.0)
        atexit.register(_at_exit)
    return _peers_of_run


def _meet(found: tuple, how: str, timeout: float) -> _peers.Peers:
    global _met
    client, node, count = found
    peers = _peers.Peers(client, node, count, _met, timeout)
    _met += 1
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    peers.meet(jax=jax.__version__, python=python, begins=how)
    peers.listen()
    return peers


def _watch(timeout: float, peer_timeout: float) -> None:
    """Watch the other processes from now on, and tell them of the end of this one."""
    global _peers_of_run, _is_watching
    if _peers_of_run is None:
        found = _peers.initialized()
        assert found is not None
        _peers_of_run = _meet(found, "ts.distributed.start()", timeout)
    else:
        atexit.unregister(_at_exit)
        _peers_of_run.gather("start()")
    _peers_of_run.watch(peer_timeout, timeout)
    _is_watching = True
    _peers.name_process_0()
    atexit.register(_at_exit)


@contextlib.contextmanager
def _same_sigterm():
    """JAX's preemption service takes SIGTERM for itself, and a loop that does not ask it never
    ends.
    """
    before = signal.getsignal(signal.SIGTERM)
    yield
    if before is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)


def stop() -> None:
    """Part from the other processes: waits until all are here. Called at the exit of the process,
    if not before.

    Raises ProcessError if one that is alive does not come within half an hour.
    """
    global _is_ours
    if _peers_of_run is None:
        return
    if _is_watching:
        _peers_of_run.gather("stop()", timeout=LAST)
    if (peers := _let_go()) is not None:
        peers.close()
    if _is_ours:
        _is_ours = False
        jax.distributed.shutdown()


def give_up(reason: object) -> None:
    """End all other processes, which say that this one ended, and why; this one goes on, alone.

    A script that ends with an exception does so by itself. This is for what catches exceptions: a
    notebook, a framework that runs your function, `sys.exit(1)`.
    """
    global _has_given_up
    peers = _let_go()
    if peers is not None:
        _has_given_up = True
        peers.fail(told(reason) if isinstance(reason, BaseException) else str(reason), stay=True)


def _let_go() -> _peers.Peers | None:
    global _peers_of_run, _is_watching
    peers, _peers_of_run, _is_watching = _peers_of_run, None, False
    atexit.unregister(_at_exit)
    return peers


def _in_child() -> None:
    """A forked child is none of the processes: it must not speak, or end, for its parent."""
    if _peers_of_run is not None:
        _let_go()
        _peers.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


def _at_exit() -> None:
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if error is None or not _is_watching:
        try:
            return stop()
        except ProcessError as found:
            error = found
    sys.stdout.flush()
    assert _peers_of_run is not None
    _peers_of_run.fail(told(error))
    os._exit(1)


# Who am I


def _here() -> tuple[int, int]:
    if _peers.initialized() is not None or xla_bridge.backends_are_initialized():
        index, count = jax.process_index(), jax.process_count()
    else:
        index, count = 0, 1
    if count == 1 and not _is_alone and (n := _launched()) > 1:
        fix = (
            "Call ts.distributed.start() first; start(num_processes=1) where each is to train "
            "by itself."
        )
        raise ProcessError(
            message("process", "", f"one of {n}, and not started", "ts.distributed.start()", fix)
        )
    return index, count


def process_index() -> int:
    """Which process this is, from 0.

    Raises ProcessError where a launcher made several, and `start` was not called.
    """
    return _here()[0]


def process_count() -> int:
    """How many processes there are. Raises ProcessError as `process_index`."""
    return _here()[1]


def is_main() -> bool:
    """Whether this is process 0: the one that prints, logs and downloads."""
    return process_index() == 0


# What all agree on


def _gather(name: str, text: str = "", timeout: float | None = None, thread: str = "") -> list[str]:
    """What all processes say at this place, by index; a thread beside the main one has places of
    its own.
    """
    index, count = _here()
    if count == 1:
        return [text]
    if (peers := _peers_here()) is None:
        raise ProcessError(
            message(name, "", "a process that has given up", "one of those that train")
        )
    return peers.gather(name, text, timeout, thread, index)


def barrier(name: str = "barrier", timeout: float | None = None) -> None:
    """Wait until all processes are here. Raises ProcessError that names who did not come, or is at
    another place.

    On the host, and bounded by `timeout` seconds (that of `start` if None). It does not wait for
    the devices.
    """
    if timeout is not None:
        _check_seconds("barrier()", timeout=timeout)
    _gather(f"barrier {name!r}", "", timeout)


def agree(asked: int = 0) -> int:
    """0, until any process asks for something; then what it asked for, on all of them in the same
    call.

        if signal := ts.distributed.agree(interrupt.asked):  # at every call of the compiled loop
            break

    Every process calls it equally often. It waits for nobody: the processes settle on the next call
    that none of them has reached. A process alone gets back what it asks. Where two ask at once,
    one of them is heard. Raises ProcessError when another process has ended the run, or is lost.

    >>> agree(), agree(15)
    (0, 15)
    """
    peers = _peers_here()
    return asked if peers is None else peers.agree(asked)


def spans_all(devices: Iterable[Any]) -> bool:
    """Whether these devices are of several processes, and of all that there are."""
    return len({one.process_index for one in devices}) == process_count() > 1


def words(name: str, text: str) -> list[str]:
    """What each process says at this place, by index.

    It waits for all of them, half an hour at most.
    """
    return _gather(name, text, LAST)


def together(
    name: str,
    f: Callable[[], tuple[Any, str]],
    *,
    timeout: float | None = None,
    thread: str = "",
    kinds: Sequence[type[Exception]] = (),
) -> tuple[Any, list[str]]:
    """`f()` on all processes, or an error on all of them: (its value, the words of all), where `f`
    gives (value, word).

    Of several errors all raise one: the process whose error it is that one, the others a
    ProcessError that names it, or one of these kinds, which are listed from the mildest on; any
    other is graver.
    """
    if process_count() == 1:
        value, word = f()
        return value, [word]
    value, word, mine, said = None, "", None, [len(kinds), "", ""]
    try:
        value, word = f()
        said = [-1, "", word]
    except Exception as error:
        mine, known = error, isinstance(error, (TsunaxError, *kinds))
        grade = next((i for i, kind in enumerate(kinds) if isinstance(error, kind)), len(kinds))
        said = [grade, str(error) if known else told(error), ""]
    everyone = [json.loads(text) for text in _gather(name, json.dumps(said), timeout, thread)]
    grade, problem, _ = worst = max(everyone, key=lambda said: said[0])
    if grade < 0:
        return value, [word for _, _, word in everyone]
    who = everyone.index(worst)
    if who == process_index() and mine is not None:
        raise mine
    raise [*kinds, ProcessError][grade](f"{name_of(who)}: {problem}")


def name_of(index: int) -> str:
    """How messages call a process."""
    return f"process {index}" if _peers_of_run is None else _peers_of_run.name_of(index)


def check_in_sync(**things: Any) -> None:
    """Raise ProcessError on all processes unless each thing is the same on all: seeds, settings,
    trees, states.

    The message names up to 10 leaves that differ, with both sides. Containers and static fields
    count as leaves do. Arrays are compared by shape, dtype and a hash of their bytes; of an array
    that is spread over processes, shape and dtype only. Objects are compared by their fields,
    functions by name, code, defaults and what they close over.

    >>> check_in_sync(seed=0, params={"w": np.ones(3)})
    """
    compare("check_in_sync()", things)


def compare(where: str, things: Mapping[str, Any], timeout: float | None = None) -> None:
    """`check_in_sync` at a place, whose name the message has where others are at another one."""
    if process_count() == 1:
        return
    parts = {
        place: text
        for name, thing in things.items()
        for place, text in stable_text.parts_of(name, thing).items()
    }
    if len(set(_gather(where, stable_text.hash_of(json.dumps(parts).encode()), timeout))) == 1:
        return
    everyone = [json.loads(text) for text in _gather(f"{where} in detail", json.dumps(parts))]
    differ = []
    for place in dict.fromkeys(k for said in everyone for k in said):
        first = everyone[0].get(place, "nothing")
        for i, said in enumerate(everyone):
            if (other := said.get(place, "nothing")) != first:
                cut = _where_they_part(other, first)
                differ.append(
                    f"{place}: got {_cut(other, cut)} on {name_of(i)}, {_cut(first, cut)} "
                    "on process 0"
                )
                break
    more = f"; and {len(differ) - SHOWN} more" if len(differ) > SHOWN else ""
    at = "" if where == "check_in_sync()" else f" at {where}"
    raise ProcessError(
        f"processes differ{at}: {'; '.join(differ[:SHOWN])}{more}. They must be the same on all."
    )


def _where_they_part(a: str, b: str) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def _cut(text: str, at: int) -> str:
    """What is around a place in a long text."""
    start = 0 if len(text) < 80 else max(0, at - 30)
    return f"{'…' * (start > 0)}{text[start : start + 80]}{'…' * (start + 80 < len(text))}"


def broadcast(tree: Any, root: int = 0) -> Any:
    """The tree of one process, on all of them: to the bit, arrays in one transfer.

    The trees have the same structure everywhere. Arrays (shape and dtype the same on all) travel
    over the devices, and arrive as NumPy arrays where they were, else where they lay; numbers and
    strings may differ, and need no device. Raises ProcessError for trees that do not fit, or a root
    that is not there, WrongTypeError for other leaves.

    >>> broadcast({"run": "2026-11-21", "seed": 3})
    {'run': '2026-11-21', 'seed': 3}
    """
    index, count = _here()
    if isinstance(root, bool) or not isinstance(root, int) or not 0 <= root < count:
        raise ProcessError(
            message("root", "broadcast()", repr(root), f"a process from 0 to {count - 1}")
        )
    keyed, treedef = jtu.tree_flatten_with_path(tree)
    known, values = {}, []
    for path, leaf in keyed:
        place = trees.access_str("tree", path)
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            got = f"{trees.describe(leaf)} of all processes"
            raise ProcessError(
                message("leaf", place, got, "an array of this process", "It is one array already.")
            )
        if not (
            trees.is_array(leaf) or isinstance(leaf, (bool, int, float, str))
        ) or _holds_objects(leaf):
            raise WrongTypeError(
                message("leaf", place, trees.describe(leaf), "an array, a number or a string")
            )
        known[place] = _kind_of(leaf)
        values.append(None if trees.is_array(leaf) else leaf)
    if count == 1:
        return tree
    compare("broadcast()", known)
    values = json.loads(_gather("broadcast()", json.dumps(values))[root])
    bits = [_bits(leaf) for _, leaf in keyed if trees.is_array(leaf)]
    if bits:
        from jax.experimental import multihost_utils

        packed = np.concatenate([x.reshape(-1).view(np.uint8) for x in bits])
        packed = np.asarray(multihost_utils.broadcast_one_to_all(packed, is_source=index == root))
        cuts = np.cumsum([x.nbytes for x in bits])[:-1]
        parts = [
            x.view(y.dtype).reshape(y.shape)
            for x, y in zip(np.split(packed, cuts), bits, strict=True)
        ]
        news = iter(parts)
        values = [
            _like(x, next(news)) if trees.is_array(x) else v
            for (_, x), v in zip(keyed, values, strict=True)
        ]
    return treedef.unflatten(values)


def _kind_of(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}" if trees.is_array(leaf) else "a number or a string"


def _holds_objects(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray) and leaf.dtype.hasobject


def _bits(leaf: Any) -> np.ndarray:
    bits = stable_text.bits_of(leaf)
    assert bits is not None
    return bits.reshape(-1).reshape(bits.shape)  # contiguous, and a scalar stays one


def _like(leaf: Any, new: np.ndarray) -> Any:
    """Bits as an array of the kind that another one is."""
    if trees.is_key(leaf):
        return jax.random.wrap_key_data(jnp.asarray(new), impl=jax.random.key_impl(leaf))
    if isinstance(leaf, jax.Array):
        return jax.device_put(new, leaf.sharding if leaf.committed else None)
    return new if isinstance(leaf, np.ndarray) else new[()]
