"""Starting many processes that train as one: who is who, who else is there, and parting.

    ts.distributed.start()              # the first line of the script; alone, it does nothing

`mpirun`, SLURM, Kubernetes and the like start the processes; `start` finds out from them who is
who, brings all together, and starts `jax.distributed`. From then on `jax.devices()` are the
devices of all processes. A run that `jax.distributed.initialize` started is served, too.
"""

import atexit
import math
import os
import signal
import socket
import sys
import threading
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from tsunax._core import processes
from tsunax._core.processes import LAST, number, stay_alone
from tsunax.distributed import _peers
from tsunax.errors import ProcessError, told

__all__ = ["give_up", "peers", "process_count", "process_index", "start", "stop"]

_peers_of_run: _peers.Peers | None = None
_has_initialized = False  # `jax.distributed`, which start() has initialized
_has_ended = False  # this process is none of several any more


class _Launch(NamedTuple):
    address: Any  # host:port of process 0; None if unknown, as the next two
    count: Any
    index: Any
    local_device_ids: Any
    is_one_host: bool


def _launch(address, count, index, local_device_ids: Any, timeout: float) -> _Launch:
    """From arguments, then JAX_* variables, then JAX's list of launchers, and more MPIs."""
    address = address or os.environ.get("JAX_COORDINATOR_ADDRESS")
    count = number("JAX_NUM_PROCESSES") if count is None else count
    index = number("JAX_PROCESS_ID") if index is None else index
    if index is None and address is not None and count is not None:
        index = number("JOB_COMPLETION_INDEX")  # an indexed job of Kubernetes sets it
    method, is_one_host = None, False
    if (n := number("OMPI_COMM_WORLD_SIZE")) is not None:
        is_one_host = number("OMPI_COMM_WORLD_LOCAL_SIZE") == n
        if "OMPI_MCA_orte_hnp_uri" not in os.environ:  # Open MPI 5 does not say where process 0 is
            method = "mpi4py"
            if is_one_host and (count, address) == (None, None):
                job = os.environ.get("PMIX_NAMESPACE", str(os.getppid()))
                port = number("JAX_COORDINATOR_PORT") or 61440 + zlib.crc32(job.encode()) % 4096
                address, count, index = f"127.0.0.1:{port}", n, number("OMPI_COMM_WORLD_RANK")
                local_device_ids = local_device_ids or [number("OMPI_COMM_WORLD_LOCAL_RANK")]
    elif "SLURM_STEP_NODELIST" in os.environ:
        is_one_host = number("SLURM_STEP_NUM_NODES") == 1
        if count is None:  # the count of this step, which is 1 in an interactive shell
            count = number("SLURM_STEP_NUM_TASKS")
    elif (number("PMI_SIZE") or 1) > 1:  # MPICH, Intel MPI
        method = "mpi4py"
    if count != 1 and None in (address, count, index):
        try:
            arguments = address, count, index, local_device_ids, method, math.ceil(timeout)
            address, count, index, local_device_ids = _peers.detected(*arguments)
        except Exception as error:
            raise ProcessError(
                "launcher",
                "start()",
                got=told(error),
                expected="who is who",
                fix="Give coordinator_address=, num_processes= and process_id=; or "
                "num_processes=1.",
            ) from error
    if (address, count, index) == (None, None, None):
        count, index = 1, 0
    return _Launch(address, count, index, local_device_ids, is_one_host)


def _place(launch: _Launch) -> tuple[str, int]:
    """The host and port of process 0. Raises ProcessError for a launch that says too little."""
    host, _, port = str(launch.address).rpartition(":")
    if None in launch[:3] or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ProcessError(
            "coordinator_address",
            "start()",
            got=f"{launch.address!r}, num_processes={launch.count}, process_id={launch.index}",
            expected="'host:port', and numbers",
            fix="No launcher was detected that sets them.",
        )
    return host.strip("[]"), int(port)


def start(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    local_device_ids: Sequence[int] | None = None,
    timeout: float = 120.0,
    peer_timeout: float = 30.0,
) -> None:
    """Make this process one of many, before anything else uses a device. Alone: nothing.

        jax.distributed.initialize(...)    # with all processes there, and watched from then on

    Without arguments it finds out by itself under SLURM (`srun`), Open MPI, MPICH and Intel MPI
    (with mpi4py), in an indexed job of Kubernetes, on Cloud TPU, or from JAX_COORDINATOR_ADDRESS,
    JAX_NUM_PROCESSES and JAX_PROCESS_ID. A second call does nothing. After your
    `jax.distributed.initialize` it only lets an exception in one process end all.

    Args:
      coordinator_address: `host:port` of process 0, the same on all. Processes on one host say
        `localhost:port`: then no other host can connect.
      num_processes: how many there are; 1 is a process alone, also under a launcher.
      process_id: which one this is, from 0.
      local_device_ids: the devices of this host that this process has. Under MPI and SLURM one GPU
        each, by the rank on the host; else all.
      timeout: seconds that any wait for living processes may take, here, in `barrier` and its like.
      peer_timeout: seconds without a heartbeat of JAX after which a process counts as dead.

    When a process dies, is stopped, or ends with an exception, the rest end with exit code 1 and
    a line that names it: a collective that has lost a member never returns. If process 0 is killed,
    JAX aborts the rest at once (SIGABRT); it calls process 0 the leader. At the end processes
    wait for each other, see `stop`. SIGTERM keeps its handler.

    Raises ProcessError if not all processes come, or if their versions or counts differ; for wrong
    arguments; if a device was used before; if the port of process 0 is taken. If two processes have
    one number, JAX aborts.

    >>> start()
    >>> process_index(), process_count()
    (0, 1)
    """
    global _has_initialized
    if _peers_of_run is not None and _peers_of_run.is_watched:
        return
    for name, seconds in (("timeout", timeout), ("peer_timeout", peer_timeout)):
        if not 0 < seconds < 1e6:
            raise ProcessError(name, "start()", seconds, "seconds, more than 0")
    if _has_ended:
        raise ProcessError("start()", "", "a process that has given up", "a new process")
    if not jax.distributed.is_initialized():
        launch = _launch(coordinator_address, num_processes, process_id, local_device_ids, timeout)
        if launch.count == 1:
            stay_alone(num_processes == 1)
            return
        _initialize(launch, *_place(launch), timeout, peer_timeout)
        _has_initialized = True
    if (run_peers := peers("ts.distributed.start()", timeout)) is not None:
        run_peers.gather("start()")
        run_peers.watch(timeout, peer_timeout if _has_initialized else 0.0)


def _initialize(launch: _Launch, host: str, port: int, timeout: float, peer_timeout: float) -> None:
    """`jax.distributed.initialize`, with an error if JAX would abort the process."""
    alone = launch.is_one_host or host in ("localhost", "127.0.0.1", "::1")
    if alone:
        host = "::1" if host == "::1" else "127.0.0.1"
    if launch.index == 0:  # gRPC would share a port that another run has, and mix the two
        _check_port(host, port, alone)
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    failed: list[BaseException] = []

    def connect() -> None:
        try:
            jax.distributed.initialize(
                address,
                launch.count,
                launch.index,
                launch.local_device_ids,
                cluster_detection_method="deactivate",
                initialization_timeout=10 * 365 * 86400,  # when it is over, JAX aborts
                heartbeat_timeout_seconds=math.ceil(peer_timeout),
                coordinator_bind_address=address if alone else None,
            )
        except BaseException as error:
            failed.append(error)

    # Otherwise JAX aborts all processes before this package can name the lost one.
    jax.config.update("jax_enable_recoverability", True)
    # JAX's preemption service takes SIGTERM: a loop that does not ask that service never ends
    sigterm_handler = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=connect, name="tsunax-start", daemon=True)
    thread.start()
    thread.join(timeout)
    if sigterm_handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, sigterm_handler)
    if failed or thread.is_alive():
        _peers.connection.client = None  # JAX would shut it down at exit
    if failed:
        error = failed[0]
        raise ProcessError("jax.distributed", "start()", told(error), "one that starts") from error
    if thread.is_alive():
        raise ProcessError(
            "processes",
            "start()",
            got=f"not all {launch.count} of them within {timeout:g} s at {address}, seen from "
            f"process {launch.index}",
            expected="all of them",
            fix=f"Were all started, with this address, num_processes={launch.count} and a "
            "process_id of their own? Is process 0 running there, and the port open between the "
            "hosts?",
        )


def _check_port(host: str, port: int, alone: bool) -> None:
    family = socket.AF_INET6 if alone and ":" in host else socket.AF_INET
    try:
        socket.create_server((host if alone else "", port), family=family).close()
    except OSError as error:
        raise ProcessError(
            "port",
            f"{host}:{port}",
            got=os.strerror(error.errno or 0),
            expected="a free one",
            fix="Give another port, or set JAX_COORDINATOR_PORT.",
        ) from error


def peers(
    how: str = "without ts.distributed.start()", timeout: float = 120.0
) -> _peers.Peers | None:
    """The processes after `start`, or after `jax.distributed.initialize`; None for one alone.

    They meet at the first call.
    """
    global _peers_of_run
    connection = _peers.connection
    if (
        _peers_of_run is None
        and not _has_ended
        and connection.client is not None
        and connection.num_processes > 1
    ):
        run_peers = _peers.Peers(
            connection.client, connection.process_id, connection.num_processes, timeout
        )
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        count = connection.num_processes
        run_peers.meet(num_processes=count, jax=jax.__version__, python=python, begins=how)
        _peers_of_run = run_peers
        atexit.register(_at_exit)
    return _peers_of_run


def stop() -> None:
    """Part from the other processes, once all are here. The exit of the process calls it, too.

    Raises ProcessError if one that is alive does not come within half an hour.
    """
    if _peers_of_run is None:
        return
    if _peers_of_run.is_watched:
        _peers_of_run.gather("stop()", timeout=LAST)
    if (run_peers := _let_go()) is not None:
        run_peers.part(jax.distributed.shutdown if _has_initialized else None)


def give_up(reason: object) -> None:
    """End all other processes, which print this process and the reason; it continues alone.

    An exception that ends a script does so by itself: this is for a notebook, a framework that
    catches exceptions, `sys.exit(1)`. `reason` is an exception or a string.
    """
    if (run_peers := _let_go()) is not None:
        text = told(reason) if isinstance(reason, BaseException) else str(reason)
        run_peers.fail(text, stay=True)


def _let_go() -> _peers.Peers | None:
    global _peers_of_run, _has_ended
    run_peers, _peers_of_run, _has_ended = _peers_of_run, None, True
    atexit.unregister(_at_exit)
    return run_peers


def _at_exit() -> None:
    assert _peers_of_run is not None
    error: Any = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    # A Ctrl-C to one process ends the run on all processes, and none has failed.
    is_no_failure = error is None or getattr(error, "signal", 0)
    if is_no_failure or not _peers_of_run.is_watched:
        try:
            return stop()
        except ProcessError as stop_error:
            error = stop_error
    sys.stdout.flush()
    _peers_of_run.fail(told(error))  # type: ignore[arg-type]
    os._exit(1)


def process_index() -> int:
    """Which process this is, an int from 0.

    Raises ProcessError if a launcher made several, and `start` was not called.
    """
    return processes.current().index


def process_count() -> int:
    """The number of processes. Raises ProcessError as `process_index`."""
    return processes.current().count


def is_main() -> bool:
    """Whether this is process 0, which prints, logs and downloads.

    Raises ProcessError as `process_index`.
    """
    return process_index() == 0
