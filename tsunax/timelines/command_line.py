"""Talk to a run: `python -m tsunax VERB [NAME=NUMBER ...] RUN`, verb first.

python -m tsunax log runs             the runs below a directory, from files
python -m tsunax status runs/a        the newest numbers of a run under way
python -m tsunax adjust learning_rate=1e-4 --where "head/**" runs/a
python -m tsunax save | stop | evaluate | freeze | thaw runs/a
"""

import argparse
import json
import math
import secrets
import time
from pathlib import Path
from typing import Any

from tsunax._core import durable_files, tables
from tsunax.checkpoints.saving import Checkpoints
from tsunax.errors import CheckpointError, TsunaxError
from tsunax.run.control import LOOK_SECONDS, MOST_BYTES, VERBS
from tsunax.timelines.comparing import SavedRun

NO_ANSWER = "no answer"


def main(arguments: list[str]) -> int:
    """Send one command, or print the log. The exit status is 1 if it was not obeyed."""
    parser = argparse.ArgumentParser(prog="python -m tsunax", description="Talk to a run of fit.")
    parser.add_argument("verb", choices=[*VERBS, "log"])
    parser.add_argument("values", nargs="*", metavar="NAME=NUMBER", help="numbers, for adjust")
    parser.add_argument("run", type=Path, help="the directory of a run")
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
    run: Path, verb: str, values: dict[str, float], where: str | None = None, wait: float = 60.0
) -> str:
    """The answer of the run under way in a directory. CheckpointError if there is none."""
    command: dict[str, Any] = {"verb": verb, "values": values, "lock": _live_lock(run)}
    content = json.dumps(command | ({} if where is None else {"where": where})).encode()
    if len(content) > MOST_BYTES:
        raise CheckpointError("command", verb, f"{len(content)} bytes", f"at most {MOST_BYTES}")
    name = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{secrets.token_hex(4)}.json"
    path = run / durable_files.CONTROL / name
    answer = path.with_suffix(".answer")
    durable_files.write_whole(path, content)
    end = time.monotonic() + wait
    while time.monotonic() < end:
        if answer.exists():
            text = durable_files.read(answer, 1 << 16).decode()
            answer.unlink()
            return text
        time.sleep(0.05)
    how_often = f"a run looks every {LOOK_SECONDS:g} s, and after its call"
    return f"{NO_ANSWER} in {wait:g} s: {how_often}. The command stays, and may be obeyed later."


def _live_lock(run: Path) -> str:
    """The text of the lock of the run that writes into a directory now. CheckpointError without."""
    expected, fix = "a run under way", "Files alone: python -m tsunax log."
    try:
        text = durable_files.read(run / durable_files.LOCK, 400).decode()
        with durable_files.opened(run / durable_files.LOCK) as file:
            is_live = durable_files.is_locked(file)
    except (OSError, ValueError):
        raise CheckpointError("run", str(run), "no run", expected, fix) from None
    if not is_live or "pid" not in json.loads(text):
        raise CheckpointError("run", str(run), "a run that has ended", expected, fix)
    return text


def log(folder: Path) -> str:
    """The runs in a directory and below as a tree: parents, edits, newest and best numbers.

    Raises CheckpointError if there is no run.
    """
    runs = {path.parent.resolve(): SavedRun(Checkpoints(path.parent, read_only=True))
            for path in sorted(folder.rglob(durable_files.LOCK))}  # fmt: skip
    if not runs:
        raise CheckpointError("path", str(folder), "no run", "a directory of runs of fit")
    newest = {path: run.newest for path, run in runs.items()}
    scripts = {path: runs[path].script(step) for path, step in newest.items() if step is not None}
    parents = {path: script.get("parent") or {} for path, script in scripts.items()}
    rows = [["run", "step", "edits", "newest numbers", "lowest losses"]]

    def add(path: Path, depth: int) -> None:
        run, history = runs[path], runs[path].history()
        parent = parents[path]
        numbers = {name: history.last(name) for name in history.names
                   if name == "loss" or "/" in name}  # fmt: skip
        lowest = {name: min(filter(math.isfinite, history.series(name)[1]), default=math.nan)
                  for name in numbers if "loss" in name}  # fmt: skip
        origin = f" from step {parent['step']}" if parent else ""
        edits = ", ".join(parent.get("edits", [])) or str(len(run.edits()) or "")
        title = "  " * depth + str(path.relative_to(folder.resolve())) + origin
        texts = [", ".join(tables.summary(row)) for row in (numbers, lowest)]
        rows.append([title, str(newest[path]), edits, *texts])
        for child in scripts:
            if parents[child] and Path(parents[child]["path"]) == path:
                add(child, depth + 1)

    for path in scripts:
        if Path(parents[path].get("path", "")) not in scripts:
            add(path, 0)
    return "\n".join(tables.aligned(rows, right=(1,)))
