"""Processes that meet, agree, and end together: as threads over a service of JAX, and with real processes."""

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import pytest
import tsunax as ts
from campaigns import lost_processes
from campaigns.lost_processes import free_port
from jax._src import xla_bridge
from jax._src.lib import _jax
from tests.helpers import absent, need
from tests.processes import ROOT, found, ready, until
from tests.programs import processes
from tsunax import distributed
from tsunax._core import processes as everyone
from tsunax.distributed import _peers, joining
from tsunax.distributed.agreement import Agreement
from tsunax.errors import DataError, ProcessError

# --- what processes say to each other, in threads over one service of JAX ---------------------


def together(n, f):
    """`f(i)` in n threads: what each returned or raised."""
    found = [None] * n

    def run(i):
        try:
            found[i] = f(i)
        except Exception as error:
            found[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(n)]
    [thread.start() for thread in threads]
    [thread.join(20) for thread in threads]
    assert not any(thread.is_alive() for thread in threads)
    return found


@pytest.fixture
def left(monkeypatch):
    """Who would have ended, and why."""
    found = {}
    monkeypatch.setattr(_peers, "leave", lambda text, index: found.setdefault(index, text))
    return found


@pytest.fixture
def service():
    """A function that gives n clients of one service."""
    made = []

    def make(n):
        address = f"127.0.0.1:{free_port()}"
        limits = {"heartbeat_timeout": 100, "shutdown_timeout": 10}
        recovers = {"recoverable": True}  # an argument of the service; on jax 0.7 of its clients
        of_service = recovers if "recoverable" in _jax.get_distributed_runtime_service.__doc__ else {}
        of_client = {} if of_service else recovers
        server = _jax.get_distributed_runtime_service(address, n, **limits, **of_service)
        client = _jax.get_distributed_runtime_client
        clients = [client(address, i, init_timeout=20, **limits, **of_client) for i in range(n)]
        made.append((server, clients))
        together(n, lambda i: clients[i].connect())
        return clients

    yield make
    for server, clients in made:
        together(len(clients), lambda i: clients[i].shutdown())  # noqa: B023
        server.shutdown()


@pytest.fixture
def group(left, service, monkeypatch):
    """A function that makes n peers, which part in the end."""
    made = []

    def make(n, patience=0.0, timeout=5.0, watched=True, hello=lambda i: {"jax": "1"}):
        peers = [_peers.Peers(client, i, n, timeout=timeout) for i, client in enumerate(service(n))]
        monkeypatch.setattr(_peers.socket, "gethostname", lambda: "h")
        monkeypatch.setattr(_peers.os, "getpid", lambda: 100)
        made.extend(peers)
        for error in together(n, lambda i: peers[i].meet(**hello(i))):
            if error is not None:
                raise error
        for one in peers:
            if watched:
                one.watch(timeout, patience)
        return peers

    yield make
    monkeypatch.setattr(_peers, "PATIENCE", 0.5)
    together(len(made), lambda i: made[i].part(None if i == 0 else made[i]._store._client.shutdown))


def test_all_hear_all(group):
    peers = group(3)
    found = together(3, lambda i: [peers[i].gather("a", str(i)), peers[i].gather("b", f"{i}!")])
    assert found == [[["0", "1", "2"], ["0!", "1!", "2!"]]] * 3
    assert len(peers[0]._store.below("say//1")) == 0  # what all have read is deleted
    long = together(3, lambda i: peers[i].gather("long", str(i) * 1_000_000))
    assert [len(text) for text in long[1]] == [1_000_000] * 3


def test_processes_have_the_index_of_jax(group):
    """On a TPU the launcher's number may be another one: words and names go by that of JAX."""
    peers = group(3)
    found = together(3, lambda i: peers[i].gather("a", f"node {i}", index=(i + 1) % 3))
    assert found == [["node 2", "node 0", "node 1"]] * 3
    peers[0]._hellos[2]["pid"] = 7
    assert peers[0].name_of(0) == "process 0 (host h, pid 7)"


def test_a_process_that_has_left_is_not_lost(group, left, monkeypatch):
    """Of processes that stop together one is late: those that have left meanwhile are not missed."""
    monkeypatch.setattr(_peers, "PATIENCE", 0.5)
    peers = group(3, patience=2.0)
    together(2, lambda i: peers[0].part(lambda: None) if i else peers[1].part(peers[1]._store._client.shutdown))
    rounds = peers[2]._rounds
    until(lambda: peers[2]._rounds > rounds + 2 or left)
    assert left == {}


def test_threads_gather_beside_each_other(group):
    peers = group(2)
    found = together(4, lambda i: peers[i % 2].gather("a", str(i % 2), thread="saves/1" if i > 1 else ""))
    assert found == [["0", "1"]] * 4


def test_another_call_is_another_place(group):
    peers = group(2)
    found = together(2, lambda i: peers[i].gather(f"call {i}"))
    for error in found:
        assert isinstance(error, ProcessError)
        assert "call: got call 1 on process 1 (host h, pid 100), expected call 0, as on process 0" in str(error)
        assert "All processes call the same, in the same order." in str(error)


def test_a_wait_ends_and_names_who_is_missing(group):
    peers = group(3)
    found = together(2, lambda i: peers[i].gather("all", timeout=0.3))
    text = "all: got no word of process 2 (host h, pid 100), expected all processes."
    assert [str(error) for error in found] == [text] * 2
    # the one that comes late is told too, and the next call works
    late = together(3, lambda i: peers[2].gather("all", timeout=0.2) if i == 2 else None)[2]
    assert isinstance(late, ProcessError) and str(late) == text
    assert together(3, lambda i: peers[i].gather("again", str(i))) == [["0", "1", "2"]] * 3


def test_a_wait_is_as_long_as_its_timeout(group, monkeypatch):
    """A save gives the processes nine tenths of its time, so that it can name who is late."""
    monkeypatch.setattr(_peers, "SLICE", 0.9)
    peers = group(2, watched=False)
    start = time.monotonic()
    assert "no word of process 1" in str(together(1, lambda i: peers[0].gather("all", timeout=1.0))[0])
    assert 1.0 <= time.monotonic() - start < 1.6


@pytest.mark.parametrize("limits", [(5.0, 0.3), (0.3, 5.0)])
def test_all_get_the_verdict_of_the_first_that_gives_up(group, limits):
    peers = group(3)
    found = together(2, lambda i: peers[i].gather("all", timeout=limits[i]))
    assert all("no word of process 2" in str(error) for error in found)


def test_versions_that_differ(group):
    with pytest.raises(ProcessError, match=r"jax at process 1 \(host h, pid 100\): got 1, expected 0, as on process 0"):
        group(2, hello=lambda i: {"jax": i})


@pytest.mark.parametrize("askers", [(0,), (2,), (0, 1, 2)])
def test_all_agree_at_the_same_call(group, askers):
    peers = group(3)
    pace = np.random.default_rng(len(askers)).uniform(0, 2e-3, 3)

    def run(i):
        found = []
        for round in range(2):
            for call in range(100_000):
                if value := peers[i].agree(10 + i if i in askers and call == 20 + 30 * i else 0):
                    found.append((call, value))
                    break
                time.sleep(pace[i])
            peers[i].gather(f"round {round}")
        return found

    found = together(3, run)
    assert found[0] == found[1] == found[2] and len(found[0]) == 2
    assert all(value - 10 in askers for _, value in found[0])


def test_who_asks_again_at_once_is_heard_after_all_have_agreed(group):
    """Also while others have not come to the first call on which all agreed."""
    peers = group(2)

    def run(i):
        found = []
        for call in range(100_000):
            if value := peers[i].agree(15 + len(found) if i == 0 else 0):
                found.append((call, value))
                if len(found) == 3:
                    return found
            time.sleep(2e-3 if i else 5e-4)

    first, second = together(2, run)
    assert first == second and [value for _, value in first] == [15, 16, 17]


@pytest.mark.medium
@pytest.mark.parametrize("how", ["ended", "service gone", "silent"])
def test_agreeing_ends_when_a_process_is_lost_that_was_to_be_counted(group, monkeypatch, how):
    """Also in a run that was not begun by start(), in which nobody watches."""
    peers = group(2, watched=False, timeout=0.5 if how == "silent" else 20.0)
    monkeypatch.setattr(peers[1], "_count_calls", lambda request: None)
    assert peers[0].agree(15) == 0
    until(lambda: peers[0]._is_counting)

    def run(i):
        if i == 0:
            peers[0].agree(0)
        elif how == "ended":
            peers[1].fail("it broke", stay=True)
        elif how == "service gone":
            monkeypatch.setattr(peers[0]._store, "below", gone)

    error, _ = together(2, run)
    assert isinstance(error, ProcessError)
    assert {"ended": "it broke", "service gone": "cannot hear the others"}.get(how, "no word of process 1") in str(
        error
    )
    if how != "silent":
        with pytest.raises(ProcessError):
            peers[0].agree(0)


def test_calls_count_from_the_last_gathering(group):
    """Of runs that ended with an error, each process may have called another number of times."""
    peers = group(3)

    def run(i):
        for _ in range(10 * i):
            assert peers[i].agree(0) == 0
        peers[i].gather("the next run")
        for call in range(100_000):
            if value := peers[i].agree(15 if i == 1 and call == 20 else 0):
                return call, value
            time.sleep(1e-3)

    found = together(3, run)
    assert found[0] == found[1] == found[2] and found[0][1] == 15


def without(monkeypatch, peers, lost: int) -> None:
    """Let a process have no heartbeat any more for all others."""
    for i, one in enumerate(peers):
        nodes = one._store.live_nodes
        seen_by_others = lambda n, nodes=nodes: {i: start for i, start in nodes(n).items() if i != lost}
        if i != lost:
            monkeypatch.setattr(one._store, "live_nodes", seen_by_others)


@pytest.mark.medium
def test_who_is_silent_is_named(group, left, monkeypatch):
    peers = group(3, patience=1.5)
    until(lambda: all(one._rounds for one in peers))
    without(monkeypatch, peers, 2)
    until(lambda: len(left) == 2)
    why = "it was killed or stopped, or its host or network is down"
    assert left == dict.fromkeys((0, 1), f"process 2 (host h, pid 100) has been silent for 1.5 s: {why}")


@pytest.mark.medium
def test_who_was_started_again_meanwhile_is_lost(group, left, monkeypatch):
    peers = group(2, patience=1.5)
    until(lambda: all(one._rounds for one in peers))
    nodes = peers[0]._store.live_nodes
    monkeypatch.setattr(peers[0]._store, "live_nodes", lambda n: {**nodes(n), 1: -1})
    until(lambda: 0 in left)
    assert left[0].startswith("process 1 (host h, pid 100) has been silent")


def test_who_was_started_again_joins_no_run(group):
    peers = group(2)
    again = _peers.Peers(peers[1]._store._client, 1, 2)
    with pytest.raises(ProcessError, match=r"process at start\(\): got one that was started again, expected a new run"):
        again.meet(jax="1")


@pytest.mark.medium
def test_a_silent_process_0_is_named(group, left, monkeypatch):
    """It is stopped together with the store: no look for news returns."""
    peers, is_over = group(2, patience=1.5), threading.Event()
    monkeypatch.setattr(peers[1]._store, "below", lambda key: is_over.wait() and {})
    start = time.monotonic()
    until(lambda: 1 in left)
    is_over.set()
    assert time.monotonic() - start < 4
    assert left[1].startswith("process 0 (host h, pid 100) has been silent for 1.2 s: it was killed or stopped")


@pytest.mark.medium
def test_a_process_that_was_stopped_itself_ends_nobody(group, left, monkeypatch):
    """A laptop that slept: a look took long, and the next one has an answer."""
    peers = group(2, patience=0.5)
    wait, looks = peers[1]._has_answer.wait, []
    monkeypatch.setattr(
        peers[1]._has_answer, "wait", lambda seconds: looks.append(wait(seconds)) or len(looks) % 9 == 0
    )
    until(lambda: len(looks) > 20)
    assert not left


def gone(*_):
    raise RuntimeError("UNAVAILABLE: Socket closed")


def test_a_process_0_that_is_gone_is_named(group, left, monkeypatch):
    peers = group(2)
    monkeypatch.setattr(peers[1]._store, "below", gone)
    until(lambda: 1 in left)
    assert left[1] == "process 0 (host h, pid 100) is gone: it was killed, or crashed"


def test_who_fails_says_why(group, left):
    peers = group(3)
    start = time.monotonic()
    peers[1].fail("ValueError bad luck")
    until(lambda: len(left) == 3)
    assert time.monotonic() - start < 2  # at once: all others are alive, and say so
    why = "process 1 (host h, pid 100) ended: ValueError bad luck"
    assert left == {0: why, 1: "", 2: why}  # it has said so itself


@pytest.mark.medium
def test_who_fails_because_another_one_died_does_not_take_the_blame(group, left, monkeypatch):
    """A collective fails on the living when a process dies; that one is named, on all."""
    peers = group(3, patience=1.5)
    without(monkeypatch, peers, 2)
    together(1, lambda _: peers[1].fail("ValueError Gloo all-reduce failed: connection closed"))
    until(lambda: {0, 1} <= left.keys())
    assert all("process 2 (host h, pid 100) has been silent" in left[i] for i in (0, 1))


def test_process_0_reads_what_others_wait_for(group):
    peers = group(3)
    assert peers[2].reports("has waited 1.0 s for data") == {}
    assert peers[2].reports("waits") == {}  # the newest report counts
    name = "process {} (host h, pid 100)".format
    assert peers[0].reports("waits") == {name(1): "", name(2): "waits"}


def test_who_gives_up_stays(group, left):
    peers = group(3)
    peers[0].fail("caught", stay=True)  # and has the service: all have been told, it may exit now
    assert peers[0]._store.below("heard").keys() >= {"1", "2"}
    until(lambda: len(left) == 2)
    assert left == dict.fromkeys((1, 2), "process 0 (host h, pid 100) ended: caught")


def test_unwatched_processes_are_told_at_the_next_gathering(group, left):
    peers = group(2, watched=False)
    peers[1].fail("ValueError bad luck", stay=True)
    with pytest.raises(ProcessError, match=r"process 1 \(host h, pid 100\) ended: ValueError bad luck"):
        peers[0].gather("fit()")
    assert not left


# --- who is who -------------------------------------------------------------------------------

SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_NODELIST": "node[007-010],other",
    "SLURM_NTASKS": "8",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_NODES": "5",
}
OMPI = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}
OMPI_5 = {name: x for name, x in OMPI.items() if "MCA" not in name} | {"PMIX_NAMESPACE": "prterun-vm-77@1"}
JAX = {"JAX_COORDINATOR_ADDRESS": "job-0.pods:1234", "JAX_NUM_PROCESSES": "2"}
LAUNCHERS = {
    "nothing": ({}, (None, 1, 0, None, False)),
    "slurm": (SLURM, (f"node007:{61440 + 4711 % 4096}", 8, 5, [1], False)),
    "slurm on one node": (
        SLURM | {"SLURM_STEP_NODELIST": "a", "SLURM_STEP_NUM_NODES": "1"},
        (f"a:{61440 + 615}", 8, 5, [1], True),
    ),
    "slurm, an interactive shell": (SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, (None, 1, None, None, False)),
    "open mpi": (OMPI, (f"10.96.0.1:{61440 + 1531576320 // 4096 % 4096}", 4, 3, [1], False)),
    "open mpi within slurm": (SLURM | OMPI, (f"10.96.0.1:{61440 + 1531576320 // 4096 % 4096}", 4, 3, [1], False)),
    "kubernetes": (JAX | {"JOB_COMPLETION_INDEX": "1"}, ("job-0.pods:1234", 2, 1, None, False)),
    "variables": (JAX | {"JAX_PROCESS_ID": "0"}, ("job-0.pods:1234", 2, 0, None, False)),
}


@pytest.fixture
def environment(monkeypatch):
    """A function that sets variables, and takes away those of all launchers."""

    monkeypatch.setattr(everyone, "_is_alone_on_purpose", False)

    def change(variables):
        for name in list(os.environ):
            if name.startswith(("SLURM_", "OMPI_", "PMI_", "PMIX_", "JAX_COORD", "JAX_NUM_P", "JOB_COMP", "KUBER")):
                monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return change


@pytest.mark.parametrize("name", LAUNCHERS)
def test_launchers(environment, name):
    variables, expected = LAUNCHERS[name]
    environment(variables)
    found = joining._launch(None, None, None, None, 5.0)
    address = found.address.rpartition(":")[0] if expected[0] == "127.0.0.1" else found.address
    assert (address, *found[1:]) == expected


def test_arguments_win(environment):
    environment(SLURM)
    found = joining._launch("here:1", 2, 1, None, 5.0)
    assert found[:3] == ("here:1", 2, 1)
    distributed.start(num_processes=1)


@pytest.mark.parametrize(
    "name", ["JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"]
)
def test_a_variable_that_is_no_number(environment, name):
    environment({**SLURM, "JAX_NUM_PROCESSES": "", name: "two"})
    with pytest.raises(ProcessError, match=f"{name} at the environment: got 'two', expected a number"):
        distributed.start()


def test_a_launcher_that_does_not_answer(environment, monkeypatch):
    def fails(*_):
        raise RuntimeError("Kubernetes API Error: 403")

    environment({})
    monkeypatch.setattr(_peers, "detected", fails)
    with pytest.raises(
        ProcessError, match=r"launcher at start\(\): got RuntimeError Kubernetes API Error: 403, expected who is who"
    ):
        distributed.start()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"process_id": 2}, "got ValueError process_id and num_processes must be nonnegative, with process_id <"),
        ({"process_id": -1}, "process_id=-1"),
        ({"process_id": "1"}, "got TypeError process_id must be a nonnegative int."),
        ({"num_processes": 2.0}, "num_processes must be a positive int. Got num_processes=2.0"),
        ({"num_processes": 0}, "num_processes=0"),
        ({"peer_timeout": 0}, "peer_timeout at start(): got 0, expected seconds, more than 0."),
        (
            {"coordinator_address": "host"},
            "coordinator_address at start(): got 'host', num_processes=2, process_id=0, expected 'host:port'",
        ),
        ({"coordinator_address": "host:99999"}, "expected 'host:port'"),
    ],
)
def test_arguments_that_make_no_sense(environment, monkeypatch, arguments, text):
    environment({})
    # other tests of this process have started a backend, of which JAX speaks first
    monkeypatch.setattr(xla_bridge, "backends_are_initialized", lambda: False)
    given = {"coordinator_address": "localhost:1234", "num_processes": 2, "process_id": 0} | arguments
    with pytest.raises(ProcessError) as caught:
        distributed.start(**given)
    assert text in str(caught.value)


@pytest.mark.parametrize("missing", ["coordinator_address", "num_processes", "process_id"])
def test_arguments_that_are_missing(environment, missing):
    environment({})
    given = {"coordinator_address": "localhost:1234", "num_processes": 2, "process_id": 0}
    del given[missing]
    text = "got None, num_p" if missing == "coordinator_address" else f"{missing}=None"
    with pytest.raises(ProcessError, match=rf"coordinator_address at start\(\): .*{text}.* No launcher was detected"):
        distributed.start(**given)


def test_after_the_backend(environment):
    environment({})
    jax.devices()
    with pytest.raises(ProcessError, match=r"got RuntimeError jax.distributed.initialize\(\) must be called before"):
        distributed.start("localhost:1234", 2, 0)


def test_a_launcher_whose_processes_were_not_started(environment):
    environment(OMPI)
    with pytest.raises(
        ProcessError, match=r"process: got one of 4, and not started, expected a call of ts.distributed.start\(\)"
    ):
        distributed.process_count()
    distributed.start(num_processes=1)
    assert distributed.process_count() == 1


def test_a_process_alone(environment):
    environment({})
    distributed.start()
    distributed.barrier()
    distributed.check_in_sync(seed=1, tree={"x": np.ones(2)})
    distributed.stop()
    tree = {"x": np.ones(2), "name": "a"}
    assert distributed.broadcast(tree) is tree and distributed.is_main()
    assert [distributed.agree(x) for x in (0, 15)] == [0, 15]
    with pytest.raises(ProcessError, match=r"root at broadcast\(\): got 1, expected a process from 0 to 0"):
        distributed.broadcast(tree, root=1)


# --- real processes ---------------------------------------------------------------------------


@pytest.fixture
def launch(start_processes):
    """A function that starts n processes of `tests.programs.processes`."""
    return functools.partial(start_processes, "processes", peer_timeout=20.0)


def strangers(port: int, over: threading.Event) -> None:
    """What comes to an open port: probes that say nothing, a browser, garbage."""
    silent = []
    while not over.wait(0.05):
        for data in (b"", b"GET / HTTP/1.1\r\n\r\n", b"[" * 100_000, b'{"index": 1, "count": 2, "versions": []}\n'):
            with contextlib.suppress(OSError):
                silent.append(socket.create_connection(("127.0.0.1", port), 1.0))
                silent[-1].sendall(data)
                if data:
                    silent.pop().close()
    [one.close() for one in silent]


@pytest.mark.medium
def test_two_processes(launch):
    over = threading.Event()
    started = launch(2, "answers")
    visits = threading.Thread(target=strangers, args=(int(started[0].address.rpartition(":")[2]), over))
    visits.start()
    codes = [one.wait() for one in started]
    over.set()
    visits.join()
    assert codes == [0, 0], [one.text for one in started]
    zero, one = (found(each.text)[i] for i, each in enumerate(started))
    assert one.pop("child") == 0
    assert zero.pop("who") == [0, 2, 0, 2, True] and one.pop("who") == [1, 2, 1, 2, False]
    late = one.pop("late")
    assert "barrier 'late': got no word of process 0 (host" in late and zero.pop("late") == ""
    assert zero == one  # errors too: all processes raise the same
    assert not zero["sigterm"] and zero["same"] == ""
    pid = started[1].process.pid
    who = f"process 1 (host {socket.gethostname()}, pid {pid})"
    assert zero["seed"] == f"processes differ: seed: got 1 on {who}, 0 on process 0. They must be the same on all."
    assert (
        "tree['a']: got bool[3] " in zero["tree"] and f"tree['c']: got 1 on {who}, nothing on process 0" in zero["tree"]
    )
    assert "tree['b']" not in zero["tree"]
    key = jax.random.key_data(jax.random.key(1)).tolist()
    assert zero["broadcast"] == ["run 1", 0.1, "[[-0.0], [-0.0]]", [1, 2, 3], key, "ndarray", "ArrayImpl"]
    assert zero["scalars"] == [
        ["bfloat16", [], "1"],
        ["float32", [], "1.0"],
        ["int64", [], "1"],
        ["bool", [0, 2], "[]"],
    ]
    assert zero["committed"] is False
    assert zero["settings"].startswith(
        f"processes differ: settings: got Namespace(rate=1) on {who}, Namespace(rate=0) on"
    )
    assert "got 'float64[2]' on process 1" in zero["shapes"]
    assert f"broadcast(): root: got 1 on {who}, 0 on process 0" in zero["root"]
    assert "All processes call the same" in zero["place"]
    assert [value for _, value in zero["agreed"]] == [15, 2]


@pytest.mark.medium
def test_a_run_that_jax_started(launch, tmp_path):
    started = launch(2, "foreign", variables=lambda i: {"TSUNAX_TEST_FOLDER": str(tmp_path / "run")})
    assert [one.wait() for one in started] == [0, 0], [one.text for one in started]
    zero, one = (found(each.text)[i] for i, each in enumerate(started))
    assert zero == one and zero[0].startswith("processes differ: seed: got 1 on process 1 (host ")
    assert [steps for steps, _ in zero[1:]] == [8, 16]


@pytest.mark.medium
def test_loaders_of_other_libraries_are_compared_by_their_batches(launch, tmp_path):
    """Each process resumes at the position of its own part, and other batches are told before they are trained."""
    started = launch(2, "loaders", variables=lambda i: {"TSUNAX_TEST_FOLDER": str(tmp_path / "run")})
    assert [one.wait() for one in started] == [0, 0], [one.text for one in started]
    zero, one = (found(each.text)[i] for i, each in enumerate(started))
    assert zero == one and [steps for steps, *_ in zero[:3]] == [3, 6, 6] and zero[1] == zero[2]
    shorter, wider, ended = zero[3:]
    assert re.search(r"differ at step \d of fit\(\): batches: got '2 of .*' on process 1", shorter), shorter
    assert re.search(r"differ at step 1 of fit\(\): batches: got '.*,6,3\]' on process 1", wider), wider
    expected = "differ at the next batch after step 3 of fit(): batches: got 'none, the data have ended' on process 1"
    assert expected in ended and "'another one' on process 0" in ended, ended


@pytest.mark.slow
def test_an_exception_ends_all(launch):
    started = launch(2, "fails")
    assert [one.wait() for one in started] == [1, 1]
    assert "ValueError: bad luck" in started[1].text
    assert f"pid {started[1].process.pid}) ended: ValueError bad luck. This process (0) ends too." in started[0].text


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_is_hurt_ends_the_others(tmp_path, number):
    found = lost_processes.hurt(tmp_path, 2, 1, number, peer_timeout=3.0)
    assert not found["wrong"] and found["seconds"] < 10


@pytest.mark.slow
@pytest.mark.parametrize("killed", [-2, 0, 1, 2, 3])
def test_a_rewind_of_two_processes_that_is_killed(launch, tmp_path, killed):
    """Each durable step of process 0, and process 1 before the rewind: the same bits, rows and marks."""

    def run(folder, killed):
        variables = lambda i: {"TSUNAX_TEST_FOLDER": str(tmp_path / folder)}
        started = launch(2, "rewinds", killed, variables=variables, peer_timeout=4.0)[-2:]
        codes = [one.wait() for one in started]
        return codes, "".join(one.text for one in started)

    codes, text = run("whole", -1)
    assert codes == [0, 0], text
    whole = found(text)
    assert whole[0] == whole[1] and whole[0][0] == 13 and len(whole[0][3]) == 1
    codes, text = run("killed", killed)
    victim = int(killed == -2)
    assert codes[victim] == -signal.SIGKILL and codes[1 - victim], (codes, text)
    codes, text = run("killed", -1)
    assert codes == [0, 0] and found(text) == whole, text


@pytest.mark.slow
def test_two_processes_obey_a_command_at_one_step(launch, tmp_path):
    """Process 0 looks for commands, both obey; both compare the steps that are verified."""
    started = launch(2, "commanded", variables=lambda i: {"TSUNAX_TEST_FOLDER": str(tmp_path / "a")})
    assert [one.wait() for one in started] == [0, 0], "".join(one.text for one in started)
    whole = found("".join(one.text for one in started))
    (step, rate, _, marks, answers) = whole[0]
    assert whole[1][:4] == whole[0][:4] and rate == pytest.approx(0.05)
    assert [text for _, _, text in marks] == ["adjust learning_rate=0.05", "stop"]
    assert answers[0] == f"done at step {marks[0][0]}" and "rate" in answers[1] and answers[2] == f"done at step {step}"


@pytest.mark.slow
def test_sigterm_to_one_ends_all_at_one_step(launch):
    started = launch(2, "terminated")
    ready(started)
    time.sleep(0.1)
    started[1].process.terminate()
    assert [one.wait() for one in started] == [0, 0]
    zero, one = (found(each.text)[i] for i, each in enumerate(started))
    assert zero == one and zero[1] == signal.SIGTERM and zero[0] > 10


@pytest.mark.slow
def test_slurm_by_its_variables(launch):
    port = free_port()
    variables = lambda i: {
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": str(i),
        "SLURM_LOCALID": str(i),
        "SLURM_STEP_NUM_NODES": "1",
        "JAX_COORDINATOR_PORT": str(port),
    }
    started = launch(2, "losses", 24, 1, variables=variables, is_told=False)  # with the data on the devices, too
    assert [one.wait() for one in started] == [0, 0], [one.text for one in started]
    for i, one in enumerate(started):
        np.testing.assert_allclose(found(one.text)[i], processes.losses(24), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("cause", ["data", "evaluation"])
def test_process_0_tells_which_process_is_late(launch, cause):
    started = launch(2, "late", int(cause == "evaluation"))
    assert [one.wait() for one in started] == [0, 0], [one.text for one in started]
    zero, one = (found(each.text)[i] for i, each in enumerate(started))
    assert one == []  # process 0 alone tells
    (text,) = zero
    name = rf"process 1 \(host \S+, pid {started[1].process.pid}\)"
    reason = rf"has waited \d\.\d s for {'data' if cause == 'data' else r'evaluation .<lambda>.'}, after step"
    assert re.search(rf"process 0 .* has waited \d\.\d s for {name}, which {reason}", text)
    assert re.search(rf"tsunax: {name} {reason}", started[1].text)


@pytest.mark.slow
def test_searches_agree(launch):
    """On sizes, by the smallest memory, and leave the state as it was."""
    started = launch(2, "sizes")
    assert [one.wait() for one in started] == [0, 0], [one.text for one in started]
    first, second = (found(one.text)[i] for i, one in enumerate(started))
    assert first == second
    size, limit, seen, n, is_same = first
    assert limit == int(72 * 2**20 * 0.95) and size in seen and n > 1 and is_same


def mpirun(n, *work) -> str:
    """What n processes under mpirun print."""
    if shutil.which("mpirun") is None:
        absent("mpi", "there is no mpirun: Debian's openmpi-bin has one")
    command = ["mpirun", "-np", str(n), "--oversubscribe", "--bind-to", "none"]
    command += ["--allow-run-as-root"] if os.geteuid() == 0 else []
    command += [sys.executable if word == "python" else word for word in work]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": "", "TSUNAX_TEST_START": json.dumps({"timeout": 60})}
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


LOSSES = "python -m tests.programs.processes losses".split()


@pytest.mark.parametrize("n", [pytest.param(2, marks=pytest.mark.medium), pytest.param(4, marks=pytest.mark.slow)])
def test_mpirun(n):
    losses = found(mpirun(n, *LOSSES))
    assert set(losses) == set(range(n))
    for i in range(n):
        np.testing.assert_allclose(losses[i], processes.losses(), rtol=1e-5, err_msg=str(i))


@pytest.mark.slow
def test_the_example():
    printed = mpirun(2, "python", "examples/multi_process.py")
    assert re.search(
        r"2 processes, 2 devices, loss 0.*\ntest accuracy: 0\.9.*\nlargest distance .*: \d\.\de-0[5-9]", printed
    )


@pytest.mark.slow
def test_the_example_alone_says_that_it_is_alone():
    command = [sys.executable, str(ROOT / "examples" / "multi_process.py")]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("That was one process, compared with itself")


@pytest.mark.slow
@pytest.mark.parametrize("mpi4py", [False, True])
def test_mpirun_of_open_mpi_5(mpi4py):
    """Its variables, made from those of 4: without mpi4py on one host, with it on several."""
    change = ["OMPI_COMM_WORLD_LOCAL_SIZE=1"] if mpi4py else [f"PMIX_NAMESPACE={free_port()}"]
    if mpi4py:
        need("mpi4py")
    losses = found(mpirun(2, "env", "-u", "OMPI_MCA_orte_hnp_uri", *change, *LOSSES))
    np.testing.assert_allclose(losses[1], processes.losses(), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("n, victim", [(n, i) for n in (2, 4) for i in range(n)])
def test_any_process_may_be_hurt(tmp_path, n, victim, number):
    found = lost_processes.hurt(tmp_path, n, victim, number, peer_timeout=5.0)
    assert not found["wrong"] and found["seconds"] < 15


@pytest.mark.slow
def test_a_start_that_failed_may_be_tried_again(launch):
    started = launch(2, "fails_to_start", timeout=10)
    assert [one.wait() for one in started] == [0, 0], [one.text for one in started]
    zero, one = (found(each.text)[0] for each in started)  # each is alone then
    assert zero == ["jax.distributed at start(): got RuntimeError bad weather, expected one that starts.", 1]
    expected = r"processes at start\(\): got not all 2 of them within 10 s at 127.*, seen from process 1, expected all"
    assert re.match(expected, one[0]) and one[1] == 1


@pytest.mark.medium
def test_who_waits_for_others_in_vain_says_so(environment):
    environment({})
    start = time.monotonic()
    code = f"""
import tsunax as ts
try:
    ts.distributed.start("localhost:{free_port()}", 3, 0, timeout=1)
except ts.errors.ProcessError as error:
    print(error)
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and time.monotonic() - start < 30, done.stderr
    expected = r"processes at start\(\): got not all 3 of them within 1 s at 127.0.0.1:\d+, seen from process 0, "
    expected += "expected all of them. Were all started, with this address, num_processes=3"
    assert re.match(expected, done.stdout)


def test_a_port_that_is_taken(environment):
    environment({})
    taken = pytest.raises(ProcessError, match=r"port at 127.*: got Address already in use, expected a free one")
    with socket.create_server(("127.0.0.1", 0)) as server, taken:
        joining._check_port(*server.getsockname(), True)


def test_one_index_everywhere(monkeypatch):
    """On a TPU the launcher may number the processes in another order than JAX does: the index is JAX's."""
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert (distributed.process_index(), distributed.process_count(), distributed.is_main()) == (1, 2, False)
    assert ts.batches(np.zeros(8), 4).process == (1, 2)
    alike = Agreement("fit()", {}, [])
    alike.spans = True
    alike._check_part(1, 2)
    with pytest.raises(
        DataError, match=r"got batches\(process=\(0, 2\)\), expected process=\(1, 2\), the part of its own"
    ):
        alike._check_part(0, 2)
