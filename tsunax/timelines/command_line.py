"""Talk to a run: `python -m tsunax VERB [NAME=NUMBER ...] RUN`, verb first.

python -m tsunax log runs             the runs below a directory, from files
python -m tsunax status runs/a        the newest numbers of a run under way
python -m tsunax adjust learning_rate=1e-4 --where "head/**" runs/a
python -m tsunax save | stop | evaluate | freeze | thaw runs/a

A run may be the address of a bucket: `s3://bucket/runs/a`.
"""

import argparse
import json
import math
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tsunax._core import StrPath, durable_files, tables
from tsunax.checkpoints.leaves import Damaged
from tsunax.checkpoints.saving import Checkpoints
from tsunax.errors import CheckpointError, TsunaxError, told
from tsunax.run.control import VERBS
from tsunax.run.mailboxes import MOST_BYTES, mailbox_of
from tsunax.timelines.comparing import SavedRun

NO_ANSWER = "no answer"


def main(arguments: list[str]) -> int:
    """Send one command, or print the log. The exit status is 1 if it was not obeyed."""
    parser = argparse.ArgumentParser(prog="python -m tsunax", description="Talk to a run of fit.")
    parser.add_argument("verb", choices=[*VERBS, "log"])
    parser.add_argument("values", nargs="*", metavar="NAME=NUMBER", help="numbers, for adjust")
    parser.add_argument("run", help="the directory of a run, or its address in a bucket")
    parser.add_argument("--where", help="a pattern of params, for adjust, freeze and thaw")
    parser.add_argument("--wait", type=float, default=60.0, help="seconds to wait for the answer")
    options = parser.parse_intermixed_args(arguments)
    try:
        if options.verb == "log":
            print(log(options.run))
            return 0
        values = dict(map(_number, options.values))
        answer = ask(options.run, options.verb, values, options.where, options.wait)
    except (TsunaxError, ValueError, OSError) as error:
        answer = f"refused: {error}"
    print(answer)
    return int(answer.startswith(("refused", NO_ANSWER)))


def _number(text: str) -> tuple[str, float]:
    name, sign, value = text.partition("=")
    if not sign:
        raise ValueError(f"{text!r} is no NAME=NUMBER")
    return name, float(value)


def ask(
    run: StrPath, verb: str, values: dict[str, float], where: str | None = None, wait: float = 60.0
) -> str:
    """The answer of the run under way in a directory. CheckpointError if there is none."""
    end = time.monotonic() + wait
    directory = Checkpoints(run, read_only=True, timeout=max(wait, 1.0)).path  # for each request
    command: dict[str, Any] = {"verb": verb, "values": values, "lock": _live_lock(directory)}
    command["token"] = secrets.token_hex(4)  # no two commands are the same
    content = json.dumps(command | ({} if where is None else {"where": where})).encode()
    if len(content) > MOST_BYTES:
        raise CheckpointError("command", verb, f"{len(content)} bytes", f"at most {MOST_BYTES}")
    mailbox = mailbox_of(directory)
    name = mailbox.send(content)
    while time.monotonic() < end:
        if (answer := mailbox.take_answer(name)) is not None:
            return answer
        time.sleep(mailbox.seconds_between_questions)
    how_often = f"a run looks every {mailbox.look_seconds:g} s, and after its call"
    return f"{NO_ANSWER} in {wait:g} s: {how_often}. The command stays, and may be obeyed later."


def _live_lock(directory: Any) -> str:
    """The text of the lock of the run that writes into a directory now. CheckpointError without.

    The lock of a run in a bucket does not tell whether its process has died.
    """
    expected, fix = "a run under way", "Files alone: python -m tsunax log."
    path, is_live = directory / durable_files.LOCK, True
    try:
        is_local = isinstance(path, Path)
        text = (durable_files.read(path, 400) if is_local else path.read(400)[0]).decode()
        is_live = "pid" in json.loads(text)
        if is_live and is_local:
            with durable_files.opened(path) as file:
                is_live = durable_files.is_locked(file)
    except (OSError, ValueError):
        raise CheckpointError("run", str(directory), "no run", expected, fix) from None
    if not is_live:
        raise CheckpointError("run", str(directory), "a run that has ended", expected, fix)
    return text


def _runs_in(folder: StrPath) -> dict[str, str]:
    """The runs in a directory or bucket and below: `{address: title}`."""
    path = Checkpoints(folder, read_only=True).path
    if isinstance(path, Path):
        root = path.resolve()
        directories = [lock.parent.resolve() for lock in sorted(path.rglob(durable_files.LOCK))]
        return {str(directory): str(directory.relative_to(root)) for directory in directories}
    locks = [key for key in path.keys() if Path(key).name == durable_files.LOCK]  # noqa: SIM118
    return {str(path / str(Path(key).parent)): str(Path(key).parent) for key in locks}


@dataclass(frozen=True)
class _LoggedRun:
    """A run of the log, from its newest checkpoint."""

    step: int | None  # None without a checkpoint
    newest: dict[str, float]
    lowest: dict[str, float]
    edits: str
    parent: Mapping[str, Any]

    @classmethod
    def read(cls, address: str) -> "_LoggedRun":
        run = SavedRun(Checkpoints(address, read_only=True))
        step, history = run.newest, run.history()
        parent = {} if step is None else run.script(step).get("parent") or {}
        newest = {name: history.last(name) for name in history.names
                  if name == "loss" or "/" in name}  # fmt: skip
        lowest = {name: min(filter(math.isfinite, history.series(name)[1]), default=math.nan)
                  for name in newest if "loss" in name}  # fmt: skip
        edits = ", ".join(parent.get("edits", [])) or str(len(run.edits()) or "")
        return cls(step, newest, lowest, edits, parent)


def log(folder: StrPath) -> str:
    """The runs in a directory and below as a tree: parents, edits, newest and best numbers.

    Raises CheckpointError if there is no run.
    """
    titles = _runs_in(folder)
    if not titles:
        raise CheckpointError("path", str(folder), "no run", "a directory of runs of fit")
    rows = [["run", "step", "edits", "newest numbers", "lowest losses"]]
    runs: dict[str, _LoggedRun] = {}
    for address, title in titles.items():
        try:
            runs[address] = _LoggedRun.read(address)
        except (TsunaxError, Damaged, OSError) as error:  # the other runs are listed all the same
            rows.append([title, "", "", f"cannot be read: {told(error)}", ""])
    remaining = {address: run for address, run in runs.items() if run.step is not None}

    def add(address: str, depth: int) -> None:
        run = remaining.pop(address)
        origin = f" from step {run.parent['step']}" if run.parent else ""
        numbers = [", ".join(tables.summary(x)) for x in (run.newest, run.lowest)]
        rows.append(["  " * depth + titles[address] + origin, str(run.step), run.edits, *numbers])
        for child in [x for x, run in remaining.items() if run.parent.get("path") == address]:
            if child in remaining:  # not added meanwhile, in a circle of parents
                add(child, depth + 1)

    for address in [x for x, run in runs.items() if run.parent.get("path") not in runs]:
        if address in remaining:
            add(address, 0)
    while remaining:  # runs that are each other's parents
        add(next(iter(remaining)), 0)
    return "\n".join(tables.aligned(rows, right=(1,)))
