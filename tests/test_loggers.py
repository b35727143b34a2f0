"""Loggers, read back by other readers: Python's csv and json, TensorBoard, the format of wandb's offline files.

A run that is killed and resumed leaves the same rows as one that was not, whatever was written beyond the resumed step.
"""

import csv
import json
import math
import os
import re
import struct
import sys

import numpy as np
import pytest
from tests.helpers import need
from tsunax.errors import MissingLibraryError, SaveError, WrongTypeError
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
    return {int(row[0]): {n: float(x) for n, x in zip(header[1:], row[1:], strict=True) if x} for row in rows}, header


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
    write(make(whole), rows, rows)
    killed = make(path)
    killed.start(SETTINGS)
    for step in lost:
        killed((rows if step < resumed_at else lost)[step], step=step)
    killed._file.close()
    with open(path, "a") as file:
        file.write(torn)
    write(make(path), [step for step in rows if step >= resumed_at], rows, rows_from=resumed_at)
    if kind == "csv":
        same(csv_rows(path)[0], rows)
    else:
        assert jsonl_rows(path)[0] == jsonl_rows(whole)[0]
        assert sum("settings" in line for line in jsonl_rows(path)[1]) == 2
    assert not list(tmp_path.glob("*.new"))


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
    killed.start(SETTINGS)
    for step in (10, 20, 30):
        killed(rows[step] if step < 20 else {"loss": 99.0}, step=step)
    killed._writer.flush()
    write(loggers.tensorboard(tmp_path / "run"), [20, 30, 40], rows, rows_from=20)
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
    ("make", "error", "text"),
    [
        (lambda: loggers.csv(None), WrongTypeError, "path at csv(): got None, expected a str or Path"),
        (lambda: loggers.csv(""), WrongTypeError, "path at csv(): got '' (str)"),
        (lambda: loggers.jsonl(3), WrongTypeError, "path at jsonl(): got 3 (int)"),
        (lambda: loggers.tensorboard(None), WrongTypeError, "path at tensorboard(): got None"),
    ],
)
def test_wrong_arguments(make, error, text):
    with pytest.raises(error) as caught:
        make()
    assert text in str(caught.value)


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_a_path_that_cannot_be_written_is_known_before_the_first_row(tmp_path, kind):
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "log"):
        named = re.escape(str(path.parent if path != tmp_path else path))
        with pytest.raises(
            SaveError, match=rf"path at {kind}\(\): got .*{named}', expected a path that can be written"
        ):
            getattr(loggers, kind)(path).start(SETTINGS)
