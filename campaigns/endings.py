"""End runs in every phase, by every signal, in every home, as one process and as two: nothing is lost or done twice.

    python -m campaigns.endings                                    # 420 runs
    python -m campaigns.endings --count 20 --homes files --processes 1
    python -m campaigns.endings --only TERM/save/orbax/2/stop/3/1  # a line that a bad run printed

A run sends the signal to itself (`campaigns.ending_run`): while its loss function is traced, while a call is under way,
in `evaluate`, in a callback, before, within and after a save, and at its end. The same command again must end with the
bits of params, moments and keys, the rows of history, csv and jsonl, and the memory of an undisturbed run; a third time
it must change nothing. Rows of another run are in the same files. SIGKILL may cost the steps since the last save, the
other signals none. USR1 and USR2 only ask for a save: it must leave a mark, and USR1 the result of an undisturbed run.
After USR2 the run is killed as soon as the save is on the disk: the next one begins there.
"""

import argparse
import collections
import contextlib
import csv
import dataclasses
import io
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tsunax as ts

from campaigns.fleets import ROOT, free_port
from campaigns.runs import HERE, record

SIGNALS = ("INT", "TERM", "HUP", "XCPU", "USR1", "USR2", "KILL")
PHASES = ("compile", "step", "evaluation", "callback", "save", "end", "exit")  # exit: only killed there
HOMES = ("files", "orbax", "bucket")
CADENCES = {"goal": 5, "epochs": 6, "stop": 4, "patience": 3, "early_stopping": 4}  # and their steps between two saves
FIRST_STEPS = 3  # the phase "step" is hurt at one of the first reads: a later signal may come after the run
OTHER_RUN = "another-run"


@dataclasses.dataclass(frozen=True)
class Case:
    """One run, and how it is ended; its text is what `--only` takes."""

    signal: str
    phase: str
    home: str
    processes: int
    cadence: str
    nth: int  # the place of the phase, of those that an undisturbed run has
    victim: int

    def __str__(self) -> str:
        return "/".join(map(str, dataclasses.astuple(self)))

    @classmethod
    def of(cls, text: str) -> "Case":
        signal_name, phase, home, processes, cadence, nth, victim = text.split("/")
        return cls(signal_name, phase, home, int(processes), cadence, int(nth), int(victim))

    @property
    def number(self) -> int:
        return getattr(signal, f"SIG{self.signal}")

    def is_right(self, codes: list, log: list[dict], has_ended: bool) -> bool:
        """Whether these are the exit codes of the run; `has_ended`: it had nothing left to do."""
        dying = 0 if self.signal == "USR2" else self.victim  # of USR2 the process that commits the save
        if self.signal == "USR1" or (self.signal == "USR2" and is_late(log) and codes[dying] == 0):
            return codes == [0] * self.processes
        if self.signal in ("USR2", "KILL"):  # the others are killed, or have ended by themselves
            return codes[dying] == -signal.SIGKILL
        own = {128 + self.number} | ({-signal.SIGINT} if self.signal == "INT" else set())  # a shell says 130
        late = {0, -self.number} if has_ended and self.processes > 1 else set()  # the others had left `fit`
        return set(codes) <= own | late


class Runs:
    """A process that forks runs, and the folder of a case."""

    def __init__(self, top: Path, bucket: "Bucket | None"):
        self.top, self.bucket, self.number = top, bucket, 0
        command = [sys.executable, "-m", "campaigns.ending_run"]
        environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)

    @contextlib.contextmanager
    def scratch(self):
        self.number += 1
        folder = self.top / str(self.number)
        folder.mkdir()
        for logger, rows in self.other_logs(folder):
            for step in rows[:2]:
                logger({"loss": step / 7}, step)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def other_logs(self, folder: Path):
        """The loggers of another run in the same files, and the steps of its rows."""
        for kind in (ts.loggers.csv, ts.loggers.jsonl):
            logger = kind(folder / f"rows.{kind.__name__}")
            logger.start({"run_id": OTHER_RUN})
            yield logger, [1, 2, 3, 4]
            logger.close()

    def start(self, folder: Path, case: Case, **strike) -> tuple[list, list[list[dict]]]:
        """The exit codes of a run, and the log of each of its processes."""
        has_bucket = case.home == "bucket" and self.bucket is not None
        job = {
            "folder": str(folder), "home": case.home, "processes": case.processes, "cadence": case.cadence,
            "bucket": f"{self.bucket.url}/{folder.name}" if has_bucket else "", "cache": str(self.top / "cache"),
            "environment": self.bucket.environment if has_bucket else {}, "address": f"localhost:{free_port()}",
        }  # fmt: skip
        self.process.stdin.write(json.dumps(job | strike) + "\n")
        self.process.stdin.flush()
        codes, logs = json.loads(self.process.stdout.readline()), []
        for path in (folder / f"log{i}" for i in range(case.processes)):
            logs.append([json.loads(line) for line in path.read_text().splitlines()] if path.exists() else [])
            path.unlink(missing_ok=True)
        return codes, logs

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def lines(log: list[dict], word: str) -> list[dict]:
    return [line for line in log if line["word"] == word]


def plain(row: dict) -> dict:
    """A row without the numbers of the clock on the wall, and without the name of its run."""
    return {k: x for k, x in row.items() if x != "" and k != "run_id" and not k.endswith("_per_second")}


def logged(folder: Path) -> dict:
    """The rows of this run and of the other one in both files, and the columns of the table."""
    text = (folder / "rows.csv").read_text()
    table = list(csv.DictReader(io.StringIO(text)))
    objects = [row for row in map(json.loads, (folder / "rows.jsonl").read_text().splitlines()) if "step" in row]
    rows = {}
    for name, kind in (("csv", table), ("jsonl", objects)):
        for owner in ("its", "other"):
            rows[f"{owner} {name}"] = [plain(x) for x in kind if (x["run_id"] == OTHER_RUN) == (owner == "other")]
    names = [name for name in text.split("\n", 1)[0].split(",") if not name.endswith("_per_second")]
    return rows | {"columns": names}


def difference(what: str, got, expected) -> list[str]:
    """Nothing if the two are equal in every bit that JSON keeps, else a line that shows where."""
    if json.dumps(got) == json.dumps(expected):
        return []
    if isinstance(got, list) and isinstance(expected, list) and len(got) == len(expected):
        got, expected = ({str(i): x for i, x in enumerate(values)} for values in (got, expected))
    if isinstance(got, dict) and isinstance(expected, dict):
        names = [k for k in {**expected, **got} if json.dumps(got.get(k)) != json.dumps(expected.get(k))]
        return [x for k in names for x in difference(f"{what}: {k}", got.get(k), expected.get(k))][:5]
    return [f"{what}: got {got}, expected {expected}"[:700]]


@dataclasses.dataclass
class Reference:
    """What an undisturbed run of a cadence ends with, on each process, and the places that it passes."""

    ended: list[dict]
    rows: dict
    places: list[dict]


def whole(log: list[dict], reference: Reference, process: int) -> list[str]:
    """Faults of a run that is over: in what it returned, what it saved, and what the same command does again."""
    if len(ended := lines(log, "ENDED")) != 1:
        return [f"process {process} did not return"]
    ended, expected = ended[0], reference.ended[process]
    faults = [x for k in ("returned", "memory") for x in difference(k, ended[k], expected[k])]
    faults += difference("the last checkpoint", ended["saved"], ended["returned"])
    faults += difference("restore('best')", ended["best"]["saved"], ended["best"]["of all rows"])
    return faults


def again(log: list[dict]) -> list[str]:
    """Faults of the same command once more: it returns the same, and trains nothing."""
    end = next(i for i, line in enumerate(log) if line["word"] == "ENDED")
    faults = [f"again: {line['word']}" for line in log[end:] if line["word"] in ("BEGAN", "STEP", "SAVE")]
    ended, *repeated = log[end], *lines(log, "AGAIN")
    return faults + difference("again", [{**x, "word": ""} for x in repeated], [{**ended, "word": ""}])


def lost_steps(case: Case, first: list[dict], second: list[dict]) -> list[str]:
    """Faults in where the second run begins: where the first ended, to the bit; if killed, at one of its saves."""
    began = (lines(second, "BEGAN") or [x["returned"] for x in lines(second, "ENDED")] or [{"step": -1, "state": ""}])[
        0
    ]
    if case.signal == "USR2":
        asked = lines(first, "SAVED")[-1]["step"]
        return difference("killed after a save that was asked for", began["step"], asked)
    if case.signal == "KILL":
        reached = max((line["step"] for line in lines(first, "STEP")), default=0)
        # a save may be under way, and the one before is on the disk when it begins
        is_saved = reached - began["step"] <= 2 * CADENCES[case.cadence]
        return [] if is_saved else [f"killed at step {reached}, and continued from {began['step']}"]
    place = lambda line: [line["step"], line["state"]]
    return [x for left in lines(first, "LEFT") for x in difference("begun", place(began), place(left))]


def is_late(log: list[dict]) -> bool:
    """Whether the signal came after the last step: the save of the end comes anyway, or is under way."""
    words = [line["word"] for line in log if line["word"] in ("STEP", "STRUCK")]
    return words[-1:] == ["STRUCK"]


def saved_on_request(case: Case, log: list[dict]) -> list[str]:
    """Faults of a run that was asked to save: it has a mark, at a step that it saved."""
    marks = [step for step, name, text in lines(log, "ENDED")[-1]["marks"] if name == "save" and case.signal in text]
    saves = [line["step"] for line in lines(log, "SAVE")]
    is_saved = len(marks) == 1 and marks[0] in saves
    return [] if is_saved or (is_late(log) and not marks) else [f"marks of saves at {marks}, saves at {saves}"]


def tried(case: Case, runs: Runs, reference: Reference) -> list[str]:
    """End a run as the case says, start it again, and list the faults."""
    strike = {"phase": case.phase, "nth": case.nth, "victim": case.victim, "signal": case.number, "seed": case.nth}
    strike |= {"dies": case.signal == "USR2"}
    with runs.scratch() as folder:
        codes, first = runs.start(folder, case, **strike)
        if not lines(first[case.victim], "STRUCK"):
            return [f"the phase was not reached: {codes}{errors(folder)}"]
        for logger, rows in runs.other_logs(folder):
            for step in rows[2:]:
                logger({"loss": step / 7}, step)
        second_codes, second = runs.start(folder, case)
        if second_codes != [0] * case.processes:
            return [f"started again: exit codes {second_codes}{errors(folder)}"]
        has_ended = not lines(second[0], "BEGAN")
        faults = [] if case.is_right(codes, first[case.victim], has_ended) else [f"exit codes {codes}{errors(folder)}"]
        for process in range(case.processes):
            # process 0 commits a save that was asked for, and dies
            faults += lost_steps(case, first[0 if case.signal == "USR2" else process], second[process])
            if case.signal == "USR1" and codes[process] == 0:
                faults += whole(first[process], reference, process)
                faults += saved_on_request(case, first[process]) if process == case.victim else []
            faults += whole(second[process], reference, process) or again(second[process])
        faults += difference("rows", logged(folder), reference.rows)
        hidden = [p.name for p in (folder / "run").glob(".tsunax-*")] if case.home == "files" else []
        return faults + [f"left over: {hidden}"] * bool([x for x in hidden if "tmp" in x])


def errors(folder: Path) -> str:
    return "".join(f"\n    {path.name}: {path.read_text()[-1200:]}" for path in sorted(folder.glob("err*")))


def undisturbed(case: Case, runs: Runs) -> Reference:
    with runs.scratch() as folder:
        codes, logs = runs.start(folder, case)
        for logger, rows in runs.other_logs(folder):
            for step in rows[2:]:
                logger({"loss": step / 7}, step)
        if codes != [0] * case.processes:
            sys.exit(f"the undisturbed run ended with {codes}{errors(folder)}")
        ended = [lines(log, "ENDED")[0] for log in logs]
        reference = Reference(ended, logged(folder), [lines(log, "PLACES")[0]["places"] for log in logs])
        if faults := [x for i, log in enumerate(logs) for x in whole(log, reference, i) + again(log)]:
            sys.exit(f"the undisturbed run of {case.cadence}: " + "\n  ".join(faults))
    return reference


def cases(seed: int, homes: list[str], processes: list[int], signals: list[str], phases: list[str]):
    """All combinations in a random order, again and again, with other cadences, places and victims; nth still open."""
    rng = random.Random(seed)
    combinations = [x for x in itertools.product(signals, phases, homes, processes) if x[1] != "exit" or x[0] == "KILL"]
    cadences = itertools.cycle(CADENCES)
    while True:
        rng.shuffle(combinations)
        for combination in combinations:
            yield Case(*combination, next(cadences), rng.randrange(1 << 20), rng.randrange(combination[-1]))


def placed(case: Case, reference: Reference) -> Case:
    """The case at one of the places that its phase has."""
    count = reference.places[case.victim].get(case.phase, 0)
    return dataclasses.replace(case, nth=case.nth % max(1, min(count, FIRST_STEPS) if case.phase == "step" else count))


@dataclasses.dataclass
class Bucket:
    """A bucket on the loopback: its address, and what clients need to find it."""

    url: str
    environment: dict[str, str]


@contextlib.contextmanager
def bucket(homes: list[str]):
    """An emulator of a bucket, if one of the homes is there; it needs moto and obstore."""
    if "bucket" not in homes:
        yield None
        return
    from tests.programs import s3_bucket as emulator

    command = [sys.executable, "-m", "tests.programs.s3_bucket"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            yield Bucket("s3://bucket", emulator.address(int(server.stdout.readline())))  # type: ignore[union-attr]
        finally:
            server.kill()


def table(counts: dict[tuple[str, str], collections.Counter]) -> str:
    """A table of good cases of all, by signal and phase."""
    rows = ["| signal | " + " | ".join(PHASES) + " |", "| --- |" + " --- |" * len(PHASES)]
    cell = lambda count: f"{count['good']} of {count['good'] + count['bad']}" if count else ""
    for name in SIGNALS:
        rows.append(f"| {name} | " + " | ".join(cell(counts.get((name, phase))) for phase in PHASES) + " |")
    return "\n".join(rows)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=420)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--skip", type=int, default=0, help="leave out the first cases of this seed")
    parser.add_argument("--only", nargs="+", default=[], help="cases, as bad runs printed them")
    for name, choices in (("homes", HOMES), ("signals", SIGNALS), ("phases", PHASES), ("processes", (1, 2))):
        kind = type(choices[0])
        parser.add_argument(f"--{name}", nargs="+", type=kind, choices=choices, default=list(choices))
    parser.add_argument("--results", type=Path, default=HERE / "results" / "counts.jsonl")
    return parser.parse_args()


def main() -> int:
    args = parsed()
    chosen = cases(args.seed, args.homes, args.processes, args.signals, args.phases)
    todo = itertools.islice(chosen, args.skip, args.skip + args.count)
    todo = [Case.of(text) for text in args.only] or list(todo)
    by_phase: dict = collections.defaultdict(collections.Counter)
    counts: collections.Counter = collections.Counter()
    references: dict[tuple[str, int], Reference] = {}
    start = time.monotonic()
    with contextlib.ExitStack() as stack:
        top = stack.enter_context(tempfile.TemporaryDirectory(prefix="tsunax-endings-"))
        address = stack.enter_context(bucket([x.home for x in todo]))
        runs = Runs(Path(top), address)
        stack.callback(runs.close)
        stack.enter_context(contextlib.suppress(KeyboardInterrupt))  # the cases until then count
        for case in todo:
            key = case.cadence, case.processes
            if key not in references:
                references[key] = undisturbed(dataclasses.replace(case, home="files"), runs)
            case = placed(case, references[key])
            faults = tried(case, runs, references[key])
            result = "bad" if faults else "good"
            counts["cases"] += 1
            counts[result] += 1
            counts[f"{result} in {case.home}, {case.processes} processes"] += 1
            by_phase[case.signal, case.phase][result] += 1
            print(f"  {case}: {result}", *faults, sep="\n    ", flush=True)
    print(table(by_phase))
    counts["seconds a case"] = round((time.monotonic() - start) / max(1, counts["cases"]), 1)
    if not args.only:
        record(args.results, {"what": "endings", "seed": args.seed, "skip": args.skip}, counts)
        with (args.results.parent / "endings.md").open("a") as file:
            file.write(f"{dict(counts)}, seed {args.seed}\n\n{table(by_phase)}\n\n")
    return counts["bad"]


if __name__ == "__main__":
    sys.exit(min(1, main()))
