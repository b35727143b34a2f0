"""Commands to a run under way, which wait in its mailbox: `tsunax.run.mailboxes`.

A command is data: a verb, a pattern and numbers, never code. It names the start of the run for
which it was made, by the text of the run's lock, so that no later run obeys it.
"""

import json
from typing import Any

from tsunax._core import Function, processes
from tsunax._core.cadence import Timer
from tsunax.errors import TsunaxError, told
from tsunax.hyper import adjust, freeze, thaw
from tsunax.run.mailboxes import Mailbox
from tsunax.run.part import EVALUATE, Part
from tsunax.run.run import Run

CHANGES: dict[str, Function] = {
    "adjust": adjust,
    "freeze": freeze,
    "thaw": thaw,
}  # the verbs that change the state
VERBS = ("status", "save", "stop", "evaluate", *CHANGES)


class Inbox(Timer):
    """The commands of a mailbox, as a timer of the run: it is late once there are commands."""

    def __init__(self, mailbox: Mailbox) -> None:
        super().__init__(mailbox.look_seconds)
        self.mailbox: Mailbox = mailbox

    def is_late(self) -> bool:
        """Whether there are commands; looks every `look_seconds`."""
        if not super().is_late():
            return False
        has_commands = self.mailbox.has_commands()
        if has_commands is None:
            return False
        self.restart()
        return has_commands

    def read(self, name: str, lock_text: str) -> dict[str, Any]:
        """A command, or its refusal: `{"refused": reason}`."""
        try:
            command = json.loads(self.mailbox.load(name))
            if command["lock"] != lock_text:
                return {"refused": "the run has ended that it was made for"}
            if command["verb"] not in VERBS or not isinstance(command.get("values", {}), dict):
                return {"refused": "no such command"}
            return command
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            return {"refused": f"no command: {told(error)}"}


class Control(Part):
    """Obeys commands: the first part of a boundary, so that all other parts act on them."""

    def __init__(
        self, mailbox: Mailbox, lock_text: str, agreement: processes.Unanimous, evaluates: bool
    ) -> None:
        self.inbox: Inbox = Inbox(mailbox)
        self.evaluates: bool = evaluates  # whether the run has an `evaluate=`
        self.lock_text: str = lock_text
        self.agreement: processes.Unanimous = agreement
        self.timers = (self.inbox,)
        self.answers: dict[str, str] = {}  # {command that this boundary obeys: its answer}

    def begin(self, run: Run) -> None:
        if processes.current().is_first:
            self.inbox.mailbox.prepare()
            for name in self.inbox.mailbox.names():
                command = self.inbox.read(name, self.lock_text)
                if "refused" in command:
                    self.inbox.mailbox.answer(name, f"refused: {command['refused']}")

    def due(self, run: Run, events: Any) -> bool:
        return self.inbox.is_due

    def at(self, run: Run, events: list[str]) -> None:
        everyone, commands = processes.current(), {}
        if everyone.is_first:
            commands = {x: self.inbox.read(x, self.lock_text) for x in self.inbox.mailbox.names()}
        if self.agreement.spans:
            texts = everyone.gather(f"commands at step {run.step}", json.dumps(commands))
            commands = json.loads(texts[0])
        for name, command in commands.items():
            self.answers[name] = self._obey(run, command, events)

    def _obey(self, run: Run, command: dict[str, Any], events: list[str]) -> str:
        if "refused" in command:
            return f"refused: {command['refused']}"
        verb, where, values = command["verb"], command.get("where"), command.get("values", {})
        pattern_texts = [] if where is None else [str(where)]
        number_texts = [f"{name}={x}" for name, x in values.items()]
        text = " ".join([verb, *pattern_texts, *number_texts])
        if values and verb != "adjust":
            return f"refused: {verb} takes no NAME=NUMBER"
        if where is not None and verb not in CHANGES:
            return f"refused: {verb} takes no --where"
        if verb == "freeze" and where is None:
            return "refused: freeze needs --where"
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
            # The epoch is the number of ended epochs, in place of the epoch of the newest row.
            numbers = {"step": run.step, **run.metrics, "epoch": run.epoch}
            return json.dumps({k: x for k, x in numbers.items() if not k.startswith("watch/")})
        if verb == "stop":
            run.stop("command stop")
        elif verb in ("save", "evaluate"):
            events.append({"save": "save", "evaluate": EVALUATE}[verb])
        run.history.mark("command", run.step, text)
        return f"done at step {run.step}"

    def end(self, run: Run, error: BaseException | None) -> None:
        """Answer the commands that came too late. After a rewind the run obeys them."""
        if processes.current().is_first and run.restart is None:
            self.inbox.mailbox.look()
            for name in self.inbox.mailbox.names():
                self.inbox.mailbox.answer(name, "refused: the run has ended")
            self.inbox.mailbox.wait()


class Answers(Part):
    """Answers commands: the last part of a boundary. It waits until their save is on the disk."""

    def __init__(self, control: Control) -> None:
        self.control: Control = control

    def due(self, run: Run, events: Any) -> bool:
        return bool(self.control.answers)

    def at(self, run: Run, events: list[str]) -> None:
        answers, self.control.answers = self.control.answers, {}
        if run.restart is not None:  # the rewind undoes the changes; then the run obeys again
            return
        if any(text.startswith("done") for text in answers.values()):
            with run.rows.options.clock("checkpoint"):
                run.saver.wait()
        for name, text in answers.items() if processes.current().is_first else ():
            self.control.inbox.mailbox.answer(name, text)
