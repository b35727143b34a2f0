"""Where commands wait for a run, and answers for their senders: a folder, or two objects.

    control/20261128T101500-1a2b3c4d.json      a command, from `python -m tsunax stop runs/a`
    control/20261128T101500-1a2b3c4d.answer    its answer, of the run

A bucket would have to be listed for that, so it has one key for commands, and one for answers. A
command is written only if none waits there. Its name is the hash of its content, and the answer
repeats the name.

    control/command.json
    control/answer.json
"""

import contextlib
import json
import os
import re
import secrets
import stat
import threading
import time
from pathlib import Path
from typing import Any, TypeAlias

from tsunax._core import durable_files
from tsunax.errors import CheckpointError

MOST_BYTES = 4096  # the length of a command
MOST_BYTES_OF_ANSWER = 1 << 16  # the numbers of `status` are the longest answer
# The most time for a look, and for an answer, at the end of a run: a bucket may never reply.
MOST_SECONDS = 15.0
_NAME = re.compile(r"\d{8}T\d{6}-[0-9a-f]{8}\.json", re.ASCII)


class FolderMailbox:
    """Files in the `control` folder of a run's directory; the folder belongs to the run's user.

    A run calls `prepare`, `has_commands`, `names`, `load` and `answer`, and at its end `look` and
    `wait`. A sender calls `send`, and then `take_answer` until it is there.
    """

    # Seconds between two looks of a run. A shorter time would cost a slow disk, or requests, more,
    # with a longer one people would send their command again.
    look_seconds: float = 10.0
    seconds_between_questions: float = 0.05  # A sender looks for its answer so often.

    def __init__(self, directory: Path) -> None:
        self.folder: Path = directory / durable_files.CONTROL
        # The commands that were obeyed. On a full disk the file of a command may stay, unanswered.
        self.answered: set[str] = set()

    def prepare(self) -> None:
        with contextlib.suppress(OSError):
            self.folder.mkdir(mode=0o700, exist_ok=True)
            if durable_files.is_real_directory(self.folder):  # a link may lead anywhere
                os.chmod(self.folder, 0o700)

    def has_commands(self) -> bool | None:
        """Whether commands wait; None until a look has ended."""
        return bool(self.names())

    def look(self) -> None:
        """Nothing to do: `names` reads the folder each time."""

    def wait(self) -> None:
        """Nothing to do: `answer` writes at once."""

    def names(self) -> list[str]:
        """The commands in the order of their times: regular files of this user, no links."""
        names: list[str] = []
        if not durable_files.is_real_directory(self.folder):
            return names
        with contextlib.suppress(OSError), os.scandir(self.folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # a sender has withdrawn the command
                    about = entry.stat(follow_symlinks=False)
                    is_of_user = not hasattr(os, "getuid") or about.st_uid == os.getuid()
                    if _NAME.fullmatch(entry.name) and stat.S_ISREG(about.st_mode) and is_of_user:
                        names.append(entry.name)
        return sorted({*names} - self.answered)

    def load(self, name: str) -> bytes:
        return durable_files.read(self.folder / name, MOST_BYTES)

    def answer(self, name: str, text: str) -> None:
        """Write the answer to a command, and delete the command."""
        path = self._answer_path(name)
        self.answered.add(name)
        with contextlib.suppress(OSError):
            if not path.exists():  # a run that was killed here before has answered
                durable_files.write_whole(path, text.encode())
            os.unlink(self.folder / name)

    def _answer_path(self, name: str) -> Path:
        return (self.folder / name).with_suffix(".answer")

    def send(self, content: bytes) -> str:
        """Write a command; its name. CheckpointError if an earlier command keeps it out."""
        if not durable_files.is_real_directory(self.folder):
            path, got = str(self.folder.parent), "a run that takes no commands yet"
            raise CheckpointError("run", path, got, "a run of fit that has begun")
        seconds, nanoseconds = divmod(time.time_ns(), 10**9)
        start = time.strftime("%Y%m%dT%H%M%S", time.gmtime(seconds))
        # Microseconds, because a run obeys commands of one second in the order of their names.
        name = f"{start}-{nanoseconds // 1000:05x}{secrets.token_hex(2)[1:]}.json"
        durable_files.write_whole(self.folder / name, content)
        return name

    def take_answer(self, name: str) -> str | None:
        path = self._answer_path(name)
        if not path.exists():
            return None
        text = durable_files.read(path, MOST_BYTES_OF_ANSWER).decode()
        path.unlink()
        return text


class BucketMailbox:
    """Two objects in a bucket: a user who may write there may send commands."""

    look_seconds: float = 30.0
    seconds_between_questions: float = 1.0

    def __init__(self, directory: Any) -> None:
        self.command: Any = directory / durable_files.CONTROL / "command.json"
        self.answer_object: Any = directory / durable_files.CONTROL / "answer.json"
        self.contents: dict[str, bytes] = {}  # {name: the command that the last look found}
        # the newest command with an answer, which stays if its deletion fails
        self.answered: str = ""
        self._looking: threading.Thread | None = None
        self._reply: threading.Thread | None = None

    def prepare(self) -> None:
        self.look()

    def look(self) -> None:
        """Look in a thread, because a request may take until its limit of time."""
        self._begin_look().join(MOST_SECONDS)
        self._looking = None

    def _begin_look(self) -> threading.Thread:
        self._looking = threading.Thread(target=self._read, daemon=True)
        self._looking.start()
        return self._looking

    def _read(self) -> None:
        self.contents = {}
        if self._reply is not None and self._reply.is_alive():
            return  # the reply deletes the command that this look would read
        with contextlib.suppress(OSError):  # if the network fails, the next look tries again
            try:
                content, _ = self.command.read(MOST_BYTES)
            except ValueError:  # a longer object is no command
                content = b""
            name = durable_files.sha256(content)
            if name == self.answered:
                self.command.unlink()
            else:
                self.contents[name] = content

    def has_commands(self) -> bool | None:
        looking = self._looking or self._begin_look()
        if looking.is_alive():
            return None
        self._looking = None
        return bool(self.contents)

    def names(self) -> list[str]:
        return list(self.contents)

    def load(self, name: str) -> bytes:
        return self.contents[name]

    def answer(self, name: str, text: str) -> None:
        """Answer in a thread, because a bucket may be slow; `wait` waits for it."""
        self.contents = {}
        self.answered = name
        answer = json.dumps({"command": name, "text": text}).encode()

        def reply() -> None:
            # Delete the command first, because its sender may read the answer and send the next.
            with contextlib.suppress(OSError):
                self.command.unlink()
            with contextlib.suppress(OSError):
                self.answer_object.write(answer)

        self.wait()
        self._reply = threading.Thread(target=reply, daemon=True)
        self._reply.start()

    def wait(self) -> None:
        if self._reply is not None:
            self._reply.join(MOST_SECONDS)

    def send(self, content: bytes) -> str:
        try:
            self.command.write(content, "create")
        except FileExistsError:
            # a request that was repeated, because its answer was lost, meets its own object
            with contextlib.suppress(OSError, ValueError):
                if self.command.read(MOST_BYTES)[0] == content:
                    return durable_files.sha256(content)
            raise CheckpointError(
                "command",
                str(self.command),
                got="another command that waits",
                expected="none",
                fix="The run answers it at its next look, or at its next start.",
            ) from None
        return durable_files.sha256(content)

    def take_answer(self, name: str) -> str | None:
        # A network that fails, or a foreign object, is no answer yet.
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            answer = json.loads(self.answer_object.read(MOST_BYTES_OF_ANSWER)[0])
            if answer["command"] == name:
                return str(answer["text"])
        return None


Mailbox: TypeAlias = FolderMailbox | BucketMailbox


def mailbox_of(directory: Any) -> Mailbox:
    """The mailbox of a run's directory: a local path, or the address of a bucket."""
    is_local = isinstance(directory, Path)
    return FolderMailbox(directory) if is_local else BucketMailbox(directory)
