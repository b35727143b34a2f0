"""Files that survive a crash: hidden names, synced writes, bounded reads, one writer a directory.

Writes never follow links, and only names that this file gave are deleted. This file has no code
for arrays or states: `checkpoints/_home.py` commits a checkpoint.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import time
import weakref
from io import BufferedReader
from pathlib import Path
from typing import Any

from tsunax._core import trees
from tsunax.errors import CheckpointError, warn

LOCK = "tsunax.lock"
CONTROL = "control"  # the folder of commands, in the directory of a run
_URL = re.compile(r"[A-Za-z][\w+.-]+:/")  # `C:/` is a drive; a Path drops a second slash
_HIDDEN_NAME = re.compile(r"\.tsunax-(tmp|old|rewind)-(\d{1,19})-[0-9a-f]{8}")


def local(path: Any, name: str, where: str, expected: str = "a directory's path") -> str:
    """The local path that an argument names, with `~` expanded, or CheckpointError."""
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else ""
    if not isinstance(text, str) or not text or "\0" in text:
        raise CheckpointError(name, where, trees.describe(path), expected)
    expanded = os.path.expanduser(text)
    if _URL.match(text) or (text.startswith("~") and expanded == text):
        raise CheckpointError(
            name,
            where,
            got=f"{text!r:.80}",
            expected="a local path",
            fix="Checkpoints and fit(checkpoint=) save to s3:// and gs://; mount other buckets.",
        )
    return expanded


def folder_of(path: Any, name: str, where: str) -> Path:
    """The directory that an argument names, as an absolute path, or CheckpointError."""
    return Path(os.path.realpath(local(path, name, where)))


def step_in_name(name: str) -> int | None:
    """The step in a directory's name, which is digits without leading zeros; else None."""
    return int(name) if re.fullmatch(r"0|[1-9][0-9]{0,18}", name, re.ASCII) else None


def hidden_path(folder: Path, kind: str, step: int) -> Path:
    """A new hidden name in `folder`: "tmp" while writing, "old" while replacing or deleting."""
    return folder / f".tsunax-{kind}-{step}-{secrets.token_hex(4)}"


def rewind_path(folder: Path, step: int, calls: int) -> Path:
    """The hidden name of a rewind to `step` after `calls` calls, which `rewind_calls` reads."""
    return folder / f".tsunax-rewind-{step}-{calls:08x}"


def rewind_calls(name: str) -> int:
    """The calls in a name that `rewind_path` made."""
    return int(name.rpartition("-")[2], 16)


def ours(name: str) -> tuple[str, int] | None:
    """(kind, step) of a name that `hidden_path` or `rewind_path` made; None for other names."""
    match = _HIDDEN_NAME.fullmatch(name)
    return (match[1], int(match[2])) if match else None


def is_real_directory(path: Path) -> bool:
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)  # one look: another process may write here
    except OSError:
        return False


def _flags(*names: str) -> int:
    """The flags of `os.open` with these names, without flags that the system lacks."""
    return sum(getattr(os, f"O_{name}", 0) for name in names)


def read(path: Path, limit: int, follow: bool = False) -> bytes:
    """Read a regular file of at most `limit` bytes; ValueError or OSError for anything else."""
    with opened(path, *([] if follow else ["NOFOLLOW"])) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"more than {limit} bytes")
    return content


def opened(path: Path, *flags: str) -> BufferedReader:
    """A regular file, open for reading; OSError for anything else."""
    mode = _flags("RDONLY", "NONBLOCK", "CLOEXEC", *flags)  # a pipe would block
    file = open(os.open(path, mode), "rb")  # noqa: SIM115, the caller closes it
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError("not a regular file")
    return file


def write(path: Path, content: bytes) -> None:
    """A new file, on the disk when this returns; its directory is not synced."""
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that readers see with all of its content, or not at all."""
    hidden = path.with_name(f".{path.name}.new")
    hidden.unlink(missing_ok=True)  # from a process that was killed here, or a full disk
    write(hidden, content)
    os.replace(hidden, path)


def sync(path: Path) -> None:
    fd = os.open(path, _flags("RDONLY", "NOFOLLOW"))
    try:
        os.fsync(fd)
    except OSError as error:
        # some systems cannot sync a directory
        if error.errno not in (errno.EINVAL, errno.EBADF) or not os.path.isdir(path):
            raise
    finally:
        os.close(fd)


def sync_tree(top: Path) -> None:
    """Wait until a directory and all that is in it are on the disk."""
    for folder, _, files in os.walk(top, topdown=False):
        for name in (*files, ""):
            sync(Path(folder, name))


def check_inside(path: Path, top: Path) -> None:
    """Raise OSError for a link that leads out of the directory `top`.

    Hugging Face's cache is made of links from "snapshots/<revision>/" into "blobs/" next to
    "snapshots/".
    """
    if path.is_symlink():
        real = Path(os.path.realpath(top))
        blobs = [above.parent / "blobs" for above in real.parents if above.name == "snapshots"]
        target = Path(os.path.realpath(path))
        if not any(map(target.is_relative_to, [real, *blobs])):
            raise OSError(f"{path.name} is a link that leads out of {top}")


def check_regular(top: Path) -> int:
    """Bytes of all files below `top`.

    Raises OSError for a link that leads out, and for a file that is not regular, such as a pipe.
    """
    os.listdir(top)
    total = 0
    for folder, folders, files in os.walk(top):
        for name in (*folders, *files):
            check_inside(Path(folder, name), top)
        for name in files:
            about = os.stat(os.path.join(folder, name))
            if not stat.S_ISREG(about.st_mode):
                raise OSError(f"{name} is no regular file")
            total += about.st_size
    return total


def remove(folder: Path, names: tuple[str, ...]) -> None:
    """Delete these entries of a `hidden_path`, in order, then the directory if it is empty."""
    assert ours(folder.name), folder
    for name in names:
        inner = folder / name
        if is_real_directory(inner):
            shutil.rmtree(inner, ignore_errors=True)
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(inner)
    with contextlib.suppress(OSError):
        os.rmdir(folder)


def sha256(content) -> str:
    return hashlib.sha256(content).hexdigest()


_LOCKS: "weakref.WeakSet[Lock]" = weakref.WeakSet()


def _close_all() -> None:
    """Close the locks in a forked child, which would hold them as long as it lives."""
    for lock in _LOCKS:
        lock.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_all)


def is_locked(file: BufferedReader) -> bool:
    """Whether a living process holds the lock of an open lock file."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(file, fcntl.LOCK_UN)
        return False
    except ImportError:
        return True
    except OSError as error:
        return error.errno in (errno.EACCES, errno.EAGAIN)


class Lock:
    """This process alone writes into `folder`, until `release` or its death.

    The kernel drops the lock if the process dies for any reason. The lock is on the open file:
    reading the lock file, for a copy of the directory, does not drop it. A forked child, which may
    outlive its parent, closes its file descriptor.
    """

    def __init__(self, folder: Path, is_first: bool = True, reader: str = "read_only=True"):
        self.pid: int = os.getpid()
        # The content of the file, because opening and closing it again would drop the lock.
        self.text: str = ""
        self.run_id: str = ""  # the run of this directory, since the first process wrote here
        # If this directory is a copy: the run and the directory of the original.
        self.origin: tuple[str, str] = "", ""
        self._fd: int | None = None
        if not is_first:  # among several processes only the first locks the directory
            return
        self._fd = os.open(folder / LOCK, _flags("RDWR", "CREAT", "NOFOLLOW", "CLOEXEC"), 0o666)
        try:
            self._take(folder, reader)
            start_time = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            stored_facts, new_run_id = self._about(), f"{start_time[:10]}-{secrets.token_hex(4)}"
            self.run_id = str(stored_facts.get("run_id", new_run_id))[:40]
            self._inode = os.fstat(self._fd).st_ino
            if original := self._original(folder, stored_facts):
                self.origin, self.run_id = (self.run_id, original), new_run_id
            self._write_facts(pid=self.pid, since=start_time)
        except BaseException:
            self.close()
            raise
        _LOCKS.add(self)

    def _take(self, folder: Path, reader: str) -> None:
        try:
            import fcntl

            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # type: ignore[arg-type]
        except (ImportError, OSError) as error:
            if getattr(error, "errno", None) in (errno.EACCES, errno.EAGAIN):
                raise CheckpointError(
                    "directory in use",
                    str(folder),
                    got=self._owner(),
                    expected="no other writer",
                    fix=f"Wait for it to end, give another path, or read with {reader}.",
                ) from None
            warn(f"{folder} cannot be locked ({error}): nothing keeps a second run out of it.")

    def renew(self, folder: Path) -> None:
        """Touch the lock file; OSError if another run has replaced the file or the folder."""
        if self._fd is None:
            return
        own_stat, file_stat = os.fstat(self._fd), os.lstat(folder / LOCK)
        if (own_stat.st_dev, own_stat.st_ino) != (file_stat.st_dev, file_stat.st_ino):
            difference = f"another directory than at the start, or its {LOCK} another file"
            raise FileExistsError(f"{folder} is {difference}")
        os.utime(folder / LOCK)  # cleaning jobs delete old files

    def _about(self) -> dict[str, Any]:
        """The content of the file; an empty dict if it is empty or damaged."""
        with contextlib.suppress(OSError, ValueError, TypeError):
            return dict(json.loads(os.pread(self._fd, 400, 0)))  # type: ignore[arg-type]
        return {}

    def _original(self, folder: Path, about: dict[str, Any]) -> str:
        """The directory of which this is a copy, if it still exists next to the copy; else "".

        A copy is a new run: its rows in a log must not replace the rows of the original. A
        directory that was moved is the same run.
        """
        if about.get("file", self._inode) == self._inode:
            return ""
        above = folder.parent.parent.glob(f"*/{folder.name}/{LOCK}")
        for lock in (*folder.parent.glob(f"*/{LOCK}"), *above):
            with contextlib.suppress(OSError, ValueError, TypeError, LookupError):
                run_id = json.loads(read(lock, 400))["run_id"]
                is_this_file = lock.stat().st_ino == self._inode  # a link to this directory
                if not is_this_file and run_id == about["run_id"]:
                    return str(lock.parent)
        return ""

    def _write_facts(self, **about: Any) -> None:
        assert self._fd is not None
        self.text = json.dumps({**about, "run_id": self.run_id, "file": self._inode})
        os.ftruncate(self._fd, os.pwrite(self._fd, self.text.encode(), 0))
        os.fsync(self._fd)  # other hosts may read it

    def _owner(self) -> str:
        try:
            about = self._about()
            return f"process {int(about['pid'])}, since {str(about['since'])[:20]}"
        except (ValueError, KeyError, TypeError):
            return "another process"

    def close(self) -> None:
        """Close the file once: its number may then be another file, even if closing failed."""
        fd, self._fd = self._fd, None
        if fd is not None:
            with contextlib.suppress(OSError):
                os.close(fd)

    def release(self) -> None:
        if self._fd is not None and os.getpid() == self.pid:
            with contextlib.suppress(OSError):
                self._write_facts()
        self.close()
