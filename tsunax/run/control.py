"""Commands to a run under way: files in the `control` folder of its directory, and their answers.

    control/20261128T101500-1a2b3c4d.json      a command, from `python -m tsunax stop runs/a`
    control/20261128T101500-1a2b3c4d.answer    its answer, of the run

A command is data: a verb, a pattern and numbers, never code. It names the start of the run for
which it was made, by the text of the run's lock, so that no later run obeys it. The folder belongs
to the run's user alone.
"""

import contextlib
import json
import os
import re
import stat
from pathlib import Path
from typing import Any

from tsunax._core import durable_files, processes
from tsunax._core.cadence import Timer
from tsunax.errors import TsunaxError, told
from tsunax.hyper import adjust, freeze, thaw
from tsunax.run.part import EVALUATE, Part
from tsunax.run.run import Run

MOST_BYTES = 4096  # the length of a command
# Seconds between two looks at the folder. A shorter time would cost a slow disk more, with a longer
# one people would send their command again.
LOOK_SECONDS = 10.0
NAME = re.compile(r"\d{8}T\d{6}-[0-9a-f]{8}\.json", re.ASCII)
CHANGES = {"adjust": adjust, "freeze": freeze, "thaw": thaw}  # the verbs that change the state
VERBS = ("status", "save", "stop", "evaluate", *CHANGES)


class Inbox(Timer):
    """The commands of a folder, as a timer of the run: it is late once there are commands."""

    def __init__(self, folder: Path) -> None:
        super().__init__(LOOK_SECONDS)
        self.folder: Path = folder

    def is_late(self) -> bool:
        """Whether there are commands; looks at the folder every `LOOK_SECONDS`."""
        if not super().is_late():
            return False
        self.restart()
        return bool(self.names())

    def names(self) -> list[str]:
        """The commands in the order of their times: regular files of this user, no links."""
        names = []
        if not durable_files.is_real_directory(self.folder):
            return names
        with contextlib.suppress(OSError), os.scandir(self.folder) as entries:
            for entry in entries:
                about = entry.stat(follow_symlinks=False)
                belongs_to_user = not hasattr(os, "getuid") or about.st_uid == os.getuid()
                if NAME.fullmatch(entry.name) and stat.S_ISREG(about.st_mode) and belongs_to_user:
                    names.append(entry.name)
        return sorted(names)

    def read(self, name: str, lock_text: str) -> dict[str, Any]:
        """A command, or its refusal: `{"refused": reason}`."""
        try:
            command = json.loads(durable_files.read(self.folder / name, MOST_BYTES))
            if command["lock"] != lock_text:
                return {"refused": "the run has ended that it was made for"}
            if command["verb"] not in VERBS or not isinstance(command.get("values", {}), dict):
                return {"refused": "no such command"}
            return command
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            return {"refused": f"no command: {told(error)}"}

    def answer(self, name: str, text: str) -> None:
        """Write the answer to a command, and delete the command."""
        with contextlib.suppress(OSError):
            path = (self.folder / name).with_suffix(".answer")
            durable_files.write_whole(path, text.encode())
            os.unlink(self.folder / name)


class Control(Part):
    """Obeys commands: the first part of a boundary, so that all other parts act on them."""

    def __init__(
        self, folder: Path, lock_text: str, agreement: processes.Unanimous, evaluates: bool
    ) -> None:
        self.inbox: Inbox = Inbox(folder)
        self.evaluates: bool = evaluates  # whether the run has an `evaluate=`
        self.lock_text: str = lock_text
        self.agreement: processes.Unanimous = agreement
        self.timers = (self.inbox,)
        self.answers: dict[str, str] = {}  # {command that this boundary obeys: its answer}

    def begin(self, run: Run) -> None:
        if processes.current().is_first:
            with contextlib.suppress(OSError):
                self.inbox.folder.mkdir(mode=0o700, exist_ok=True)
                if durable_files.is_real_directory(self.inbox.folder):  # a link may lead anywhere
                    os.chmod(self.inbox.folder, 0o700)
                for name in self.inbox.names():  # commands to an earlier start
                    self.inbox.answer(name, "refused: the run has ended that it was made for")

    def due(self, run: Run, events: Any) -> bool:
        return self.inbox.is_due

    def at(self, run: Run, events: list[str]) -> None:
        everyone, commands = processes.current(), {}
        if everyone.is_first:
            commands = {x: self.inbox.read(x, self.lock_text) for x in self.inbox.names()}
        if self.agreement.spans:
            texts = everyone.gather(f"commands at step {run.step}", json.dumps(commands))
            commands = json.loads(texts[0])
        for name, command in commands.items():
            self.answers[name] = self._obey(run, command, events)

    def _obey(self, run: Run, command: dict[str, Any], events: list[str]) -> str:
        if "refused" in command:
            return f"refused: {command['refused']}"
        verb, where, values = command["verb"], command.get("where"), command.get("values", {})
        texts = [str(where)] * (where is not None) + [f"{name}={x}" for name, x in values.items()]
        text = " ".join([verb, *texts])
        if values and verb != "adjust":
            return f"refused: {verb} takes no NAME=NUMBER"
        if where is not None and verb not in CHANGES:
            return f"refused: {verb} takes no --where"
        if verb == "evaluate" and not self.evaluates:
            return "refused: the run has no evaluate="
        try:
            if verb in CHANGES:
                pattern = [] if where is None else [where]
                if verb == "adjust" and not values:
                    return "refused: adjust needs NAME=NUMBER"
                run.replace_state(CHANGES[verb](run.state, *pattern, **values), f"command {text}")
                events.append("save")
        except (TsunaxError, TypeError, ValueError) as error:
            return f"refused: {told(error)}"
        if verb == "status":
            return status_of(run)
        if verb == "stop":
            run.stop("command stop")
        elif verb in ("save", "evaluate"):
            events.append({"save": "save", "evaluate": EVALUATE}[verb])
        run.history.mark("command", run.step, text)
        return f"done at step {run.step}"

    def end(self, run: Run, error: BaseException | None) -> None:
        """Answer the commands that came too late."""
        if processes.current().is_first:
            for name in self.inbox.names():
                self.inbox.answer(name, "refused: the run has ended")


class Answers(Part):
    """Answers commands: the last part of a boundary, when their changes are on the disk."""

    def __init__(self, control: Control) -> None:
        self.control: Control = control

    def due(self, run: Run, events: Any) -> bool:
        return bool(self.control.answers)

    def at(self, run: Run, events: list[str]) -> None:
        answers, self.control.answers = self.control.answers, {}
        for name, text in answers.items() if processes.current().is_first else ():
            self.control.inbox.answer(name, text)


def status_of(run: Run) -> str:
    """The place of a run and its newest numbers, for a command."""
    numbers = {name: x for name, x in run.metrics.items() if "/" not in name or "val" in name}
    return json.dumps({"step": run.step, "epoch": run.epoch, **numbers})
