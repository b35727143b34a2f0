"""Loggers, read back by other readers: Python's csv and json, TensorBoard, the format of wandb's offline files.

A run that is killed and resumed leaves the same rows as one that was not, whatever was written beyond the resumed step.
"""

import csv
import json
import math
import os
import random
import re
import struct
import subprocess
import sys

import numpy as np
import pytest
from tests.helpers import need
from tsunax.errors import CheckpointError, MissingLibraryError, SaveError
from tsunax.run import loggers

NAN, INF = math.nan, math.inf
ROWS = {
    10: {"loss": 1 / 3, "epoch": 0},
    20: {"loss": NAN, "epoch": 1},
    30: {"loss": -INF, "epoch": 1, 'val/"top, 5"': 0.25},
    40: {"epoch": 2},
    50: {"loss": 1e-300, "epoch": 2, "损失": 7},
}
SETTINGS = {"run": "a", "batch_size": 32, "learning_rate": 0.1, "precision": "bfloat16", "donate": True}


def write(logger, steps, rows=ROWS, **more):
    logger.start({**SETTINGS, **more})
    for step in steps:
        logger(rows[step], step=step)
    if hasattr(logger, "close"):
        logger.close()


def csv_rows(path):
    with open(path, encoding="utf-8", newline="") as file:
        header, *rows = list(csv.reader(file))
    assert all(len(row) == len(header) for row in rows)
    cells = [{n: x for n, x in zip(header, row, strict=True) if x and n != "run_id"} for row in rows]
    return {int(row.pop("step")): {n: float(x) for n, x in row.items()} for row in cells}, header


def jsonl_rows(path):
    with open(path, encoding="utf-8") as file:
        lines = [json.loads(line, parse_constant=pytest.fail) for line in file]  # NaN is no JSON
    return [(line.pop("step"), line) for line in lines if "settings" not in line], lines


def same(found, expected):
    assert found.keys() == expected.keys()
    for step, row in expected.items():
        assert found[step].keys() == row.keys()
        np.testing.assert_array_equal(list(found[step].values()), [row[name] for name in found[step]])


# ------------------------------------------------------------------------------------------------------ files: the rows


def test_csv_has_every_number_in_full_and_grows(tmp_path):
    path = tmp_path / "deep" / "run.csv"
    write(loggers.csv(path), ROWS)
    found, header = csv_rows(path)
    same(found, ROWS)
    assert header == ["step", "loss", "epoch", 'val/"top, 5"', "损失"]
    assert os.listdir(path.parent) == ["run.csv"]


def test_jsonl_is_valid_json_with_null_for_what_is_not_finite(tmp_path):
    path = tmp_path / "deep" / "run.jsonl"
    write(loggers.jsonl(str(path)), ROWS)
    found, lines = jsonl_rows(path)
    finite = {step: {n: x if math.isfinite(x) else None for n, x in row.items()} for step, row in ROWS.items()}
    assert found == list(finite.items())
    assert lines[0] == {"settings": SETTINGS}


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_a_row_is_in_the_file_at_once(tmp_path, kind):
    path = tmp_path / f"run.{kind}"
    logger = getattr(loggers, kind)(path)
    for n, step in enumerate(ROWS, start=1):
        logger(ROWS[step], step=step)
        assert path.read_text().count('"step"' if kind == "jsonl" else "\n") == n + (kind == "csv")
    logger.close()
    logger.close()


@pytest.mark.parametrize("torn", ["", '{"ste', "6", '60,"un', "\0"])
@pytest.mark.parametrize("resumed_at", [10, 20, 30, 50, 60])
@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_a_resumed_run_leaves_the_file_of_an_uninterrupted_one(tmp_path, kind, resumed_at, torn):
    path, whole = tmp_path / f"run.{kind}", tmp_path / f"whole.{kind}"
    rows = {**ROWS, 60: {"loss": 0.5, "new": 1.0}, 70: {"loss": 0.25}}
    lost = {step: {**row, "loss": 99.0} for step, row in rows.items() if step <= 50}
    make = getattr(loggers, kind)
    write(make(whole), rows, rows, run_id="a")
    killed = make(path)
    killed.start({**SETTINGS, "run_id": "a"})
    for step in lost:
        killed((rows if step < resumed_at else lost)[step], step=step)
    killed._file.close()
    with open(path, "a") as file:
        file.write(torn)
    write(make(path), [step for step in rows if step >= resumed_at], rows, run_id="a", rows_from=resumed_at)
    if kind == "csv":
        same(csv_rows(path)[0], rows)
    else:
        assert jsonl_rows(path)[0] == jsonl_rows(whole)[0]
        assert sum("settings" in line for line in jsonl_rows(path)[1]) == 2
    assert not list(tmp_path.glob("*.new"))


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_a_folder_that_cannot_be_opened_is_no_error(tmp_path, monkeypatch, kind):
    """As on Windows, where folders have no locks."""
    open_file = os.open

    def refuse_folders(path, flags, *more, **options):
        if os.path.isdir(path):
            raise PermissionError(path)
        return open_file(path, flags, *more, **options)

    monkeypatch.setattr(os, "open", refuse_folders)
    write(getattr(loggers, kind)(tmp_path / f"run.{kind}"), [10, 20])
    assert "50" not in (tmp_path / f"run.{kind}").read_text()


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_a_logger_can_be_used_again(tmp_path, kind):
    path = tmp_path / f"run.{kind}"
    logger = getattr(loggers, kind)(path)
    write(logger, [10, 20, 30])
    write(logger, [40, 50])
    found = csv_rows(path)[0] if kind == "csv" else dict(jsonl_rows(path)[0])
    assert list(found) == [10, 20, 30, 40, 50]


def test_a_name_that_comes_late_never_leaves_half_a_file(tmp_path, monkeypatch):
    path = tmp_path / "run.csv"
    logger = loggers.csv(path)
    logger(ROWS[10], step=10)
    before = path.read_text()
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("the disk is full")))
    with pytest.raises(OSError, match="the disk is full"):
        logger(ROWS[30], step=30)
    assert path.read_text() == before
    logger.close()


# ---------------------------------------------------------------------------------- files: several runs, kills, resumes


class Lines:
    """The rows in a file of `csv` or `jsonl`: read by Python's own modules, in the order of the file."""

    def __init__(self, kind, folder):
        self.kind, self.path = kind, folder / f"run.{kind}"
        self.make = lambda: getattr(loggers, kind)(self.path)

    def rows(self):
        if self.kind == "jsonl":
            lines = map(json.loads, self.path.read_text().splitlines())
            return [(line.pop("run_id", ""), line.pop("step"), line) for line in lines if "settings" not in line]
        with open(self.path, newline="") as file:
            header, *rows = list(csv.reader(file)) or [[]]
        assert all(len(row) == len(header) for row in rows)
        lines = [{name: cell for name, cell in zip(header, row, strict=True) if cell} for row in rows]
        numbers = lambda line: {name: float(cell) for name, cell in line.items()}
        return [(line.pop("run_id", ""), int(line.pop("step")), numbers(line)) for line in lines]

    def tear(self, content):
        with open(self.path, "ab") as file:
            file.write(content)


class Events:
    """The scalars in a directory of `tensorboard`: read by TensorBoard's own loader, file by file."""

    def __init__(self, folder):
        self.path = folder / "events"
        self.make = lambda: loggers.tensorboard(self.path)

    def rows(self):
        loader = need("tensorboard.backend.event_processing.event_file_loader").LegacyEventFileLoader
        found = []
        for file in sorted(self.path.iterdir(), key=lambda file: file.name.split(".")[-3]):
            run = file.name.split(".")[-2]
            for event in loader(str(file)).Load():
                row = {x.tag: x.simple_value for x in event.summary.value if x.HasField("simple_value")}
                found += [(run, event.step, row)] if row else []
        return found

    def tear(self, content):
        newest = max(self.path.iterdir(), key=lambda file: file.stat().st_mtime_ns)
        with open(newest, "ab") as file:
            file.write(content)


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
@pytest.mark.parametrize(("first", "steps"), [(4, [1, 2, 3]), (3, [1, 2])])
def test_a_row_whose_end_an_editor_took_stays_if_a_checkpoint_counts_on_it(tmp_path, kind, first, steps):
    log = Lines(kind, tmp_path)
    logger = log.make()
    logger.start({"run_id": "a"})
    for step in (1, 2, 3):
        logger({"loss": 0.5}, step=step)
    logger.close()
    log.path.write_bytes(log.path.read_bytes().removesuffix(b"\n"))
    logger = log.make()
    logger.start({"run_id": "a", "rows_from": first})
    logger({"loss": 0.25, "accuracy": 1.0}, step=first)
    logger.close()
    assert [step for _, step, _ in log.rows()] == [*steps, first]


@pytest.mark.filterwarnings("default")  # tensorboard's own
@pytest.mark.parametrize("kind", ["csv", "jsonl", "tensorboard"])
def test_a_run_that_was_copied_with_its_log_goes_on_in_it(tmp_path, kind):
    if kind == "tensorboard":
        need("tensorboardX"), need("tensorboard")
    log = Events(tmp_path) if kind == "tensorboard" else Lines(kind, tmp_path)
    for settings, steps in (
        ({"run_id": "a"}, (1, 2, 3)),
        ({"run_id": "other"}, (1, 2, 3)),
        ({"run_id": "b", "copied_run": "a", "rows_from": 3}, (3, 4)),
        ({"run_id": "b", "copied_run": "a", "rows_from": 4}, (4,)),
    ):
        logger = log.make()
        logger.start(settings)
        for step in steps:
            logger({"loss": 0.5}, step=step)
        logger.close()
    rows = [(run, step) for run, step, _ in log.rows()]
    assert sorted(rows) == [("a", 1), ("a", 2), ("b", 3), ("b", 4), *(("other", step) for step in (1, 2, 3))]


class Model:
    """What a log has to hold: for each run the rows up to its newest checkpoint, and those since; in memory."""

    def __init__(self, log, rng):
        self.log, self.rng = log, rng
        self.rows: dict[str, list] = {}
        self.saved: dict[str, int] = {}  # the step of the newest checkpoint
        self.open: dict[str, object] = {}

    def start(self, run):
        """A run begins, or goes on from its checkpoint; an anonymous one always begins."""
        step = self.saved.get(run, 0) if run else 0
        logger = self.open[run] = self.log.make()
        logger.start({"run_id": run, "rows_from": step + (step > 0)} if run else {})
        kept = [row for row in self.rows.get(run, []) if not run or row[0] <= step]
        self.rows[run] = kept
        self.step = {**getattr(self, "step", {}), run: step}

    def write(self, run):
        self.step[run] += self.rng.choice([1, 1, 1, 5])
        names = self.rng.sample(["loss", "val/loss", "a, b", 'c"'], self.rng.randint(1, 3))
        if isinstance(self.log, Events):
            names = [name.replace(",", "_").replace('"', "_").replace(" ", "_") for name in names]
        row = {name: self.rng.randint(-8, 8) / 4 for name in names}
        self.open[run](row, step=self.step[run])
        self.rows[run].append((self.step[run], row))

    def save(self, run):
        self.open[run].sync()
        if run:
            self.saved[run] = self.step[run]

    def end(self, run):
        self.open.pop(run).close()

    def kill(self, run):
        """The process is gone, in the middle of a row or not."""
        torn = [
            b"",
            b"",
            b"\0\0\0",
            *([] if self.log.rows() == [] else [b"7", b'{"step": 7, "lo', b'7,0.5,"', b"7,\xe6\x8d"]),
        ]
        self.log.tear(self.rng.choice(torn))
        self.open.pop(run)._file.close()  # as the system does it

    def check(self):
        found: dict[str, list] = {run: [] for run in self.rows}
        for run, step, row in self.log.rows():
            found[run].append((step, row))
        assert found == self.rows


@pytest.mark.filterwarnings("default")  # tensorboard's own
@pytest.mark.parametrize("kind", ["csv", "jsonl", "tensorboard"])
def test_each_row_of_each_run_is_there_once_over_kills_resumes_and_other_runs(tmp_path, monkeypatch, kind):
    """Three runs write into one log, also at the same time; two have checkpoints."""
    if kind == "tensorboard":
        need("tensorboardX"), need("tensorboard")  # before a file is open
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    for seed in range(40 if kind != "tensorboard" else 8):
        folder, rng = tmp_path / str(seed), random.Random(seed)
        model = Model(Events(folder) if kind == "tensorboard" else Lines(kind, folder), rng)
        for _ in range(40):
            run = rng.choice(["a", "b", ""] if kind != "tensorboard" else ["a", "b"])
            if run not in model.open:
                model.start(run)
            else:
                act = rng.choice([model.write] * 6 + [model.save] * 2 + [model.kill, model.end])
                act(run)
                if act == model.kill:  # what it left half written is there until the next row or start
                    for other in list(model.open) or [run]:
                        (model.write if other in model.open else model.start)(other)
            model.check()
        for run in list(model.open):
            model.end(run)


PROCESS = """
import random, sys
from tsunax.run import loggers
kind, path, run = sys.argv[1:]
print("ready", flush=True), input()
log, rng = getattr(loggers, kind)(path), random.Random(run)
for step in range(1, 201):
    if step == 1 or rng.random() < 0.05:  # a resume, and a process that was killed before
        log.start({"run_id": run, "rows_from": step})
    log({f"loss {rng.randint(0, 9)}": step}, step=step)
log.close()
"""


@pytest.mark.medium
@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_processes_may_write_into_one_file_at_the_same_time(tmp_path, kind):
    log = Lines(kind, tmp_path)
    run = [sys.executable, "-c", PROCESS, kind, str(log.path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([*run, name], **pipes) for name in "abc"]
    assert [process.stdout.readline() for process in processes] == ["ready\n"] * 3
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    assert [process.communicate()[0] for process in processes] == [""] * 3
    found: dict[str, list] = {name: [] for name in "abc"}
    for name, step, row in log.rows():
        found[name].append(step)
        assert list(row.values()) == [step]  # under its own name
    assert found == {name: [*range(1, 201)] for name in "abc"}


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_a_cut_line_is_not_joined_with_the_next_row(tmp_path, kind):
    path = tmp_path / f"run.{kind}"
    whole, cut = {"csv": ("step,loss\n1,0.5\n", "2,0.2"), "jsonl": ('{"step": 1, "loss": 0.5}\n', '{"step": 2, "los')}[
        kind
    ]
    path.write_text(whole + cut)
    log = getattr(loggers, kind)(path)
    log.start({})
    log({"loss": 0.25}, step=3)
    assert path.read_text() == whole + {"csv": "3,0.25\n", "jsonl": '{"step": 3, "loss": 0.25}\n'}[kind]
    with open(path, "a") as file:  # another run is killed while this one goes on
        file.write(cut)
    log({"loss": 0.125}, step=4)
    log.close()
    assert [int(re.findall(r"\d+", line)[0]) for line in path.read_text().splitlines()[kind == "csv" :]] == [1, 3, 4]


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_rows_without_a_run_id_are_never_deleted(tmp_path, kind):
    log = Lines(kind, tmp_path)
    for steps, more in (([2, 4], {}), ([2, 4, 6], {}), ([6, 8], {"rows_from": 6})):
        write(log.make(), steps, {step: {"loss": 0.5} for step in steps}, **more)
    assert [step for _, step, _ in log.rows()] == [2, 4, 2, 4, 6, 6, 8]


@pytest.mark.filterwarnings("default")  # tensorboard's own
@pytest.mark.parametrize("size", [1, 5, 11, 13, 30])
def test_a_cut_event_is_deleted_at_the_next_start(tmp_path, size):
    need("tensorboardX"), need("tensorboard")
    log = Events(tmp_path)
    write(log.make(), [1, 2], {1: {"loss": 0.5}, 2: {"loss": 0.25}}, run_id="a", rows_from=1)
    (path,) = log.path.iterdir()
    content = path.read_bytes()
    path.write_bytes(content + content[:size])  # a process was killed while it wrote
    write(log.make(), [3], {3: {"loss": 0.125}}, run_id="a", rows_from=3)
    assert path.read_bytes() == content
    assert [step for _, step, _ in log.rows()] == [1, 2, 3]


FOREIGN = {
    "Lightning's csv": b"epoch,step,train_loss\n0,9,0.5\n",
    "semicolons": b"step;loss\n1;0.5\n",
    "another word": b"stepwise,loss\n1,0.5\n",
    "without an end": b"stepwise",
    "quotes": b'"step","loss"\n1,0.5\n',
    "a JSON document": b'{"learning_rate": 0.1}',
    "an object a line": b'{"loss": 0.5, "epoch": 1}\n{"loss": 0.25',
    "an array": b"[1, 2]\n",
    "text": b"# notes\n",
    "Latin-1": "step,größe\n1,2\n".encode("latin-1"),
    "UTF-16": "step,loss\n1,2\n".encode("utf-16"),
    "binary": bytes(range(256)),
}


@pytest.mark.parametrize("content", FOREIGN.values(), ids=FOREIGN)
@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_a_file_of_another_tool_is_refused_and_left_as_it_is(tmp_path, kind, content):
    path = tmp_path / "log"
    path.write_bytes(content)
    for settings in ({}, {"rows_from": 1}, {"run_id": "a", "rows_from": 0}):
        log = getattr(loggers, kind)(path)
        with pytest.raises(SaveError, match=rf"{kind}\(\): got "):
            log.start(settings)
        with pytest.raises(SaveError, match=rf"{kind}\(\): got "):
            log({"loss": 0.5}, step=1)
        log.close()
    assert path.read_bytes() == content and os.listdir(tmp_path) == ["log"]


def test_what_another_program_did_to_a_file_of_ours_stays(tmp_path):
    """Ends of lines, comments and rows of other forms, whatever is deleted and added."""
    path = tmp_path / "run.csv"
    path.write_bytes(b"step,loss,run_id\r\n1,0.50,b\r\n# a note\r\n2.5,1e-1,a\n\n9,0.25,a\n7,0.1,b\n")
    log = loggers.csv(path)
    log.start({"run_id": "a", "rows_from": 3})
    assert path.read_bytes() == b"step,loss,run_id\r\n1,0.50,b\r\n# a note\r\n2.5,1e-1,a\n\n7,0.1,b\n"
    log({"accuracy": 0.5}, step=3)
    log.close()
    assert path.read_text().splitlines() == [
        "step,loss,run_id,accuracy", "1,0.50,b,", "# a note,", "2.5,1e-1,a,", "", "7,0.1,b,", "3,,a,0.5",
    ]  # fmt: skip


def test_a_log_that_was_deleted_or_replaced_goes_on_at_its_path(tmp_path):
    log = Lines("csv", tmp_path)
    logger = log.make()
    logger({"loss": 0.5}, step=1)
    log.path.unlink()
    logger({"loss": 0.25}, step=2)
    assert log.rows() == [("", 2, {"loss": 0.25})]
    os.replace(log.path, tmp_path / "moved")
    logger.sync()
    logger({"loss": 0.125}, step=3)
    logger.close()
    assert log.rows() == [("", 3, {"loss": 0.125})]


def test_a_full_disk_leaves_no_half_row(tmp_path):
    log = Lines("jsonl", tmp_path)
    logger = log.make()
    logger({"loss": 0.5}, step=1)
    file = logger._file

    class Full:
        def __init__(self):
            self.left = 10

        def __getattr__(self, name):
            return getattr(file, name)

        def write(self, content):
            if not self.left:
                raise OSError(28, "No space left on device")
            self.left = 0
            return file.write(content[:10])

    logger._file = Full()
    with pytest.raises(OSError, match="No space left"):
        logger({"loss": 0.25}, step=2)
    logger({"loss": 0.125}, step=3)
    logger.close()
    assert [step for _, step, _ in log.rows()] == [1, 3]


@pytest.mark.parametrize("kind", ["csv", "jsonl", "tensorboard"])
def test_a_path_does_not_change_with_the_working_directory(tmp_path, monkeypatch, kind):
    if kind == "tensorboard":
        need("tensorboardX")
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "first")
    log = getattr(loggers, kind)("log")
    monkeypatch.chdir(tmp_path / "second")
    log({"loss": 0.5}, step=1)
    log.close()
    assert os.listdir(tmp_path / "first") == ["log"] and os.listdir(tmp_path / "second") == []


def test_settings_that_are_not_finite_are_valid_json(tmp_path):
    path = tmp_path / "run.jsonl"
    write(loggers.jsonl(path), [], rate=NAN, max_norm=INF, members=np.array([0.1, 0.2]))
    (line,) = jsonl_rows(path)[1]
    assert line["settings"] == {**SETTINGS, "rate": None, "max_norm": None, "members": "[0.1 0.2]"}


# -------------------------------------------------------------------------------------------------------------- console


def test_console_prints_a_line_a_row(capsys):
    log = loggers.console()
    write(log, ROWS)
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "run=a  batch_size=32  learning_rate=0.1  precision=bfloat16  donate=True"
    assert lines[0] == "step       10  loss 0.3333  epoch 0"
    assert lines[1] == "step       20  loss nan  epoch 1"
    assert len(lines) == 5


# ------------------------------------------------------------------------------------------------ TensorBoard and wandb


def scalars(directory):
    """What TensorBoard itself shows: {tag: [(step, value)]}, and the text of the settings."""
    module = need("tensorboard.backend.event_processing.event_accumulator")
    accumulator = module.EventAccumulator(str(directory), size_guidance={"scalars": 0, "tensors": 0})
    accumulator.Reload()
    tags = accumulator.Tags()
    found = {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in tags["scalars"]}
    texts = [e.tensor_proto.string_val[0].decode() for tag in tags["tensors"] for e in accumulator.Tensors(tag)]
    return found, texts


@pytest.mark.filterwarnings("default")  # tensorboard's own
def test_tensorboard_reads_what_was_written_over_a_resume(tmp_path):
    need("tensorboardX")
    rows = {s: {"loss": 1 / s, "val/top-5": s + 0.5, "rate@a/**": 3} for s in (10, 20, 30, 40)}
    killed = loggers.tensorboard(tmp_path / "run")
    killed.start({**SETTINGS, "run_id": "a"})
    for step in (10, 20, 30):
        killed(rows[step] if step < 20 else {"loss": 99.0}, step=step)
    write(loggers.tensorboard(tmp_path / "run"), [20, 30, 40], rows, run_id="a", rows_from=20)
    killed.close()
    found, texts = scalars(tmp_path / "run")
    assert found["loss"] == [(s, float(np.float32(1 / s))) for s in rows]
    assert found["val/top-5"] == [(s, s + 0.5) for s in rows]
    assert found["rate_a/__"] == [(s, 3.0) for s in rows]
    assert "| learning_rate | 0.1 |" in texts[-1]


@pytest.mark.filterwarnings("default")
def test_tensorboard_shows_nan(tmp_path):
    need("tensorboardX")
    log = loggers.tensorboard(tmp_path)
    log({"loss": NAN}, step=1)
    log.close()
    ((step, value),) = scalars(tmp_path)[0]["loss"]
    assert step == 1 and math.isnan(value)


def test_without_tensorboardx_the_error_names_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(
        MissingLibraryError,
        match=r"tensorboardX at tensorboard\(\): .*pip install 'tensorboardx>=2.6.4' .the extra 'loggers'",
    ):
        loggers.tensorboard(tmp_path)


def wandb_rows(path):
    """The history in a .wandb file: protobuf records in LevelDB's log format, blocks of 32 kB."""
    records = need("wandb.proto.wandb_internal_pb2")
    data, at, part, rows = path.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        part, at = part + data[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):  # whole, or the last part
            record = records.Record.FromString(part)
            part = b""
            if record.WhichOneof("record_type") == "history":
                items = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
                rows.append({name: json.loads(x) for name, x in items.items()})
    return rows


@pytest.mark.medium
@pytest.mark.filterwarnings("default")  # wandb's own
def test_wandb_log_is_a_logger(tmp_path, monkeypatch):
    wandb = need("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    wandb.init(mode="offline", dir=tmp_path, config=SETTINGS)
    for step, row in ROWS.items():
        wandb.log(row, step=step)
    wandb.finish()
    wandb.teardown()  # finish() returns before the file is whole
    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    found = {row["_step"]: {n: float(x) for n, x in row.items() if n[0] != "_"} for row in wandb_rows(path)}
    same(found, ROWS)


# --------------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: loggers.csv(None), "path at csv(): got None, expected a path"),
        (lambda: loggers.csv(""), "path at csv(): got '' (str)"),
        (lambda: loggers.jsonl(3), "path at jsonl(): got 3 (int)"),
        (lambda: loggers.tensorboard(None), "path at tensorboard(): got None"),
    ],
)
def test_wrong_arguments(make, text):
    with pytest.raises(CheckpointError) as caught:
        make()
    assert text in str(caught.value)


@pytest.mark.parametrize("kind", ["csv", "jsonl", "tensorboard"])
def test_a_path_that_cannot_be_written_is_known_before_the_first_row(tmp_path, kind):
    if kind == "tensorboard":
        need("tensorboardX")
    (tmp_path / "file").write_text("")
    wrong = tmp_path / "file" if kind == "tensorboard" else tmp_path  # a file in place of a directory, or the reverse
    for path in (wrong, tmp_path / "file" / "log"):
        named = re.escape(str(path.parent if path != wrong and kind != "tensorboard" else path))
        with pytest.raises(OSError, match=named):
            getattr(loggers, kind)(path).start(SETTINGS)
