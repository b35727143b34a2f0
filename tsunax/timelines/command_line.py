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
from pathlib import Path
from typing import Any

from tsunax._core import StrPath, durable_files, tables
from tsunax.checkpoints.saving import Checkpoints
from tsunax.errors import CheckpointError, TsunaxError
from tsunax.run.control import VERBS
from tsunax.run.mailboxes import MOST_BYTES, mailbox_of
from tsunax.timelines.comparing import SavedRun

NO_ANSWER = "no answer"
_WAIT = "seconds to wait for the answer; one request to a bucket may take longer"


def main(arguments: list[str]) -> int:
    """Send one command, or print the log. The exit status is 1 if it was not obeyed."""
    parser = argparse.ArgumentParser(prog="python -m tsunax", description="Talk to a run of fit.")
    parser.add_argument("verb", choices=[*VERBS, "log"])
    parser.add_argument("values", nargs="*", metavar="NAME=NUMBER", help="numbers, for adjust")
    parser.add_argument("run", help="the directory of a run, or its address in a bucket")
    parser.add_argument("--where", help="a pattern of params, for adjust, freeze and thaw")
    parser.add_argument("--wait", type=float, default=60.0, help=_WAIT)
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
    directory = Checkpoints(run, read_only=True).path
    command: dict[str, Any] = {"verb": verb, "values": values, "lock": _live_lock(directory)}
    command["token"] = secrets.token_hex(4)  # no two commands are the same
    content = json.dumps(command | ({} if where is None else {"where": where})).encode()
    if len(content) > MOST_BYTES:
        raise CheckpointError("command", verb, f"{len(content)} bytes", f"at most {MOST_BYTES}")
    mailbox = mailbox_of(directory)
    name = mailbox.send(content)
    end = time.monotonic() + wait
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
        if isinstance(path, Path):
            text = durable_files.read(path, 400).decode()
            with durable_files.opened(path) as file:
                is_live = durable_files.is_locked(file)
        else:
            text = path.read(400)[0].decode()
        is_live = is_live and "pid" in json.loads(text)
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


def log(folder: StrPath) -> str:
    """The runs in a directory and below as a tree: parents, edits, newest and best numbers.

    Raises CheckpointError if there is no run.
    """
    titles = _runs_in(folder)
    if not titles:
        raise CheckpointError("path", str(folder), "no run", "a directory of runs of fit")
    runs = {address: SavedRun(Checkpoints(address, read_only=True)) for address in titles}
    newest = {address: run.newest for address, run in runs.items()}
    scripts = {x: runs[x].script(step) for x, step in newest.items() if step is not None}
    parents = {address: script.get("parent") or {} for address, script in scripts.items()}
    rows = [["run", "step", "edits", "newest numbers", "lowest losses"]]

    def add(address: str, depth: int) -> None:
        run, history = runs[address], runs[address].history()
        parent = parents[address]
        numbers = {name: history.last(name) for name in history.names
                   if name == "loss" or "/" in name}  # fmt: skip
        lowest = {name: min(filter(math.isfinite, history.series(name)[1]), default=math.nan)
                  for name in numbers if "loss" in name}  # fmt: skip
        origin = f" from step {parent['step']}" if parent else ""
        edits = ", ".join(parent.get("edits", [])) or str(len(run.edits()) or "")
        title = "  " * depth + titles[address] + origin
        texts = [", ".join(tables.summary(row)) for row in (numbers, lowest)]
        rows.append([title, str(newest[address]), edits, *texts])
        for child in scripts:
            if parents[child].get("path") == address:
                add(child, depth + 1)

    for address in scripts:
        if parents[address].get("path") not in scripts:
            add(address, 0)
    return "\n".join(tables.aligned(rows, right=(1,)))
