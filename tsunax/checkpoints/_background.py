"""Saves in the background: threads, the wait for them at the end of the interpreter, and the lock
of each directory in this process.
"""

import atexit
import concurrent.futures.thread  # noqa: F401, its exit function is registered before `_finish`
import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tsunax._core import durable_files
from tsunax.errors import CheckpointError, SaveError, message, told

_LOCK = threading.RLock()
_JOBS: "list[Job]" = []
_LOCKED_DIRECTORIES: dict[Any, tuple[durable_files.Lock, weakref.ref]] = {}


class Task:
    """`f()` in a daemon thread, because a hung disk must not keep the process alive."""

    def __init__(self, f: Callable[[], Any], name: str):
        self.value: Any = None
        self.error: BaseException | None = None
        self.completion = threading.Event()
        threading.Thread(target=self._run, args=(f,), name=f"tsunax-{name}", daemon=True).start()

    def _run(self, f) -> None:
        try:
            self.value = f()
        except BaseException as error:
            self.error = error
        finally:
            self.completion.set()


class Job(Task):
    """A save, which begins at once. `_finish` waits for it."""

    def __init__(self, work: Callable[[], None], path: Path, step: int, timeout: float):
        self.path, self.step, self.timeout, self.pid = path, step, timeout, os.getpid()
        self.is_reported, self.given_up = False, False
        super().__init__(work, f"save-{step}")
        with _LOCK:
            _JOBS[:] = [job for job in _JOBS if not job.is_reported]
            _JOBS.append(self)


def _finish() -> None:
    """Wait for saves at the exit. The status is 1 if a save hangs, or failed without a report."""
    is_failed, own_jobs = False, [job for job in _JOBS if job.pid == os.getpid()]
    for job in own_jobs:
        if job.is_reported:
            continue
        has_ended = job.completion.wait(0.0 if job.given_up else job.timeout)
        if has_ended and not job.error:
            continue
        text = message(
            f"save of step {job.step}",
            str(job.path / str(job.step)),
            got=f"nothing after {job.timeout:g} s" if job.error is None else told(job.error),
            expected="a finished save",
            fix="Call close() in time, or write `with Checkpoints(...)`.",
        )
        print(f"tsunax: {text}", file=sys.stderr)
        is_failed = True
    if is_failed or not all(job.completion.is_set() for job in own_jobs):
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(1)


# It runs before concurrent.futures, imported above, refuses new work, and before all `atexit`
# functions, in which processes end their connections.
getattr(threading, "_register_atexit", atexit.register)(_finish)


def bounded(f: Callable[[], Any], limit: float, title: str):
    """`f()` in a thread that is given up after `limit` seconds."""
    task = Task(f, "restore")
    if not task.completion.wait(limit):
        raise CheckpointError(title, "restore()", f"nothing after {limit:g} s", "an answer")
    if task.error is not None:
        raise task.error
    return task.value


def take_lock(saver, is_first: bool) -> durable_files.Lock:
    """Make and lock the directory of `saver.home`.

    If an earlier saver of this process has the lock, its save is waited for, and it is closed.
    """
    try:
        saver.home.check_is_no_checkpoint()
        key = saver.home.prepare()
        with _LOCK:
            lock, saver_reference = _LOCKED_DIRECTORIES.get(key, (None, lambda: None))
            if lock is not None and lock.pid == os.getpid():
                previous_saver = saver_reference()
                if previous_saver is not None and previous_saver._lock is lock:
                    previous_saver.wait()
                    previous_saver._lock = None
            else:
                lock = saver.home.lock(saver.path, is_first)
            _LOCKED_DIRECTORIES[key] = lock, weakref.ref(saver)
            return lock
    except SaveError:
        raise
    except OSError as error:
        raise CheckpointError(
            "path", str(saver.path), got=told(error), expected="a directory that can be written"
        ) from error


def release(saver) -> None:
    with _LOCK:
        lock, saver._lock = saver._lock, None
        for key, (directory_lock, _) in list(_LOCKED_DIRECTORIES.items()):
            if directory_lock is lock:
                del _LOCKED_DIRECTORIES[key]
                directory_lock.release()
