"""Progress in each of its views: what is said, when it is drawn, and that nobody's prints are broken."""

import copy
import os
import re
import subprocess
import sys
import types
from html.parser import HTMLParser

import jax
import jax.numpy as jnp
import pytest
import tsunax as ts
from rich.console import Console
from tsunax.insight.batch_size import SizeReport
from tsunax.run import progress
from tsunax.run.history import History
from tsunax.tuning import Result

ROW = {
    "loss": 0.75,
    "accuracy": 0.5,
    "learning_rate": 0.9,
    "grad_norm": 1.0,
    "epoch": 1,
    "rejected": 0,
    "steps_per_second": 300.0,  # of the last call; the rate that is shown is of all
    "examples_per_second": 1.5e6,
}


@pytest.fixture
def clock(clock, monkeypatch):
    """The clock of all tests, and memory that does not change."""
    monkeypatch.setattr(progress, "_memory", lambda: ["0.5 GiB"])
    return clock


class View:
    """Keeps the facts."""

    seconds = 1.0, 1.0

    def __init__(self):
        self.facts, self.notes, self.closed = [], [], 0

    def draw(self, facts):
        self.facts.append(copy.copy(facts))

    def note(self, text):
        self.notes.append(text)

    def close(self):
        self.closed += 1


# ------------------------------------------------------------------------------------------------- when, and how fast


def test_it_is_drawn_at_intervals_and_at_the_end(clock):
    view = View()
    bar = progress.Progress(view, total=100, start=20)
    for step in range(20, 61):  # ten a second
        bar.show(step, {})
        clock.now += 0.1
    assert [facts.step for facts in view.facts] == [30, 40, 50, 60]
    assert [facts.rate for facts in view.facts] == pytest.approx([10] * 4)
    bar.close("enough")
    assert (view.facts[-1].step, view.facts[-1].reason, view.closed) == (60, "enough", 1)
    assert view.facts[-1].elapsed == pytest.approx(4.1)


def test_a_total_that_nobody_reaches_has_a_time_left(clock, capsys):
    bar = progress.progress(True, total=10**18)
    for step in (0, 1, 2):
        bar.show(step, {})
        clock.now += 100
    assert re.search(r"\d+ days", capsys.readouterr().err)


def test_the_rate_leaves_compiling_out_and_what_comes_after_the_last_step(clock):
    view = View()
    bar = progress.Progress(view, total=None, start=0)
    clock.now += 100  # compiling
    for step in range(0, 1001, 10):
        bar.show(step, {})
        clock.now += 1
    assert view.facts[0].rate is None and view.facts[-1].rate == pytest.approx(10)
    clock.now += 60  # an evaluation and a checkpoint at the end
    bar.close()
    assert view.facts[-1].rate == pytest.approx(10) and view.facts[-1].elapsed == pytest.approx(261)


def test_nothing_is_estimated_before_something_was_timed(clock):
    view = View()
    bar = progress.Progress(view, total=20_000, start=0)
    clock.now += 8
    bar.show(1, {"loss": 1.0})
    assert view.facts[0].pace == "0.5 GiB"  # a rate of one step in 8 seconds would be that of the compiler
    clock.now += 2
    bar.show(201, {"loss": 1.0})
    assert view.facts[1].pace == "0:03:18 left  100 steps/s  0.5 GiB"


def test_many_members_are_shown_as_a_range():
    row = {f"loss/{i}": 0.5 + i / 100 for i in range(32)} | {f"val/acc/{i}": i / 31 for i in range(32)}
    row |= {f"grad_norm/{i}": 1.0 for i in range(32)} | {"epoch": 1}
    assert facts(numbers=row).results == "loss/0…31 0.5…0.81  val/acc/0…31 0…1"
    lost = {f"loss/{i}": float("nan") if i == 3 else 1.0 for i in range(4)}
    assert progress.summary(lost) == ["loss/0…3 1…nan"]


def test_a_call_that_draws_nothing_asks_for_nothing(clock, monkeypatch):
    monkeypatch.setattr(progress, "_memory", lambda: pytest.fail("asked"))
    bar = progress.Progress(progress._Lines(), total=None, start=0)
    for step in range(1000):
        bar.show(step, ROW)


def test_what_never_began_shows_nothing_but_its_reason(clock):
    view = View()
    progress.Progress(view, total=10, start=10).close()
    assert view.facts == view.notes == [] and view.closed == 1
    progress.Progress(view, total=10, start=3).close("ValueError")
    assert view.facts == [] and view.notes == ["ValueError"]


def test_numbers_are_kept_until_there_are_newer_ones(clock):
    view = View()
    bar = progress.Progress(view, total=None, start=0)
    rows = {1: ROW, 3: {**ROW, "loss": 0.5, "accuracy": 0.75, "val/loss": 0.625, "rejected": 2}}
    for step in range(1, 5):
        clock.now += 2
        bar.show(step, rows.get(step, {}))
    shown = [facts.results for facts in view.facts]
    assert shown[0] == shown[1] == "loss 0.75  accuracy 0.5"
    assert shown[2] == shown[3] == "loss 0.5  val/loss 0.625  accuracy 0.75  rejected 2"


def facts(**changes):
    bar = progress.Progress(progress._Silent(), 10_000, 0)
    bar.__dict__.update({"step": 1200, "rate": 100.0, "elapsed": 3661.0, "numbers": ROW, **changes})
    return bar


def test_pace(clock):
    assert facts().pace == "0:01:28 left  100 steps/s  500,000 examples/s  0.5 GiB"
    assert facts(total=None).pace == "100 steps/s  500,000 examples/s  0.5 GiB"
    assert facts(reason="").pace.startswith("1:01:01 in all")
    assert facts(total=None).count == "1,200 steps" and facts().count == "1,200/10,000 steps"


def test_the_wait_for_data_is_told_from_a_fifth_of_the_time_on(clock):
    spent = lambda **seconds: {"seconds": dict.fromkeys(progress.CAUSES, 0.0) | seconds}
    told = facts(**spent(data=3.0, device=5.0)).pace
    assert told == "0:01:28 left  100 steps/s  500,000 examples/s  38% waiting for data  0.5 GiB"
    for seconds in ({"data": 1.9, "device": 8.1}, {"data": 0.0, "idle": 9.0}):
        assert "data" not in facts(**spent(**seconds)).pace


def test_the_rate_leaves_later_compilations_out(clock):
    view = View()
    bar = progress.Progress(view, total=None, start=0)
    for step in range(0, 101, 10):
        bar.show(step, {})
        clock.now += 1
        if step == 50:  # another shape
            clock.now += 100
            bar.seconds["compile"] += 100
    assert view.facts[-1].rate == pytest.approx(10)
    bar.close()
    assert view.facts[-1].rate == pytest.approx(10)


def test_memory_is_that_of_the_fullest_device(monkeypatch):
    def device(*stats):
        return types.SimpleNamespace(
            memory_stats=lambda: dict(zip(["bytes_in_use", "bytes_limit"], stats, strict=False))
        )

    def refuse():
        raise RuntimeError("not here")

    devices = [device(2**30, 80 * 2**30), device(40 * 2**30, 80 * 2**30), types.SimpleNamespace(memory_stats=refuse)]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    assert progress._memory() == ["40.0/80 GiB"]
    monkeypatch.setattr(jax, "local_devices", lambda: [types.SimpleNamespace(memory_stats=lambda: None)])
    assert progress._memory() == []


# --------------------------------------------------------------------------------------------------------------- views


def test_lines(clock, capsys):
    bar = progress.Progress(progress._Lines(), total=1000, start=0)
    for step in range(0, 1001, 10):  # 20 steps a second: a line every 5 s
        bar.show(step, ROW)
        clock.now += 0.5
    bar.note("step 1000: val/loss 0.5")
    bar.close("enough")
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert len(lines) == 12 and out == ""  # stdout is for the results of the script
    assert lines[0].startswith("100/1,000 steps  10%  loss 0.75  accuracy 0.5  0:00:45 left  20 steps/s  100,000 ex")
    assert lines[-2] == "step 1000: val/loss 0.5"
    assert lines[-1].startswith("1,000/1,000 steps  100%") and lines[-1].endswith("enough")


def test_lines_of_a_long_run_become_rare():
    bar, waits = progress.Progress(progress._Lines(), total=None, start=0), []
    for bar.elapsed in (0, 60, 600, 3600, 1e6):
        waits.append(bar.wait)
    assert waits == [5, 5, 10, 60, 60]


SCRIPT = """
import sys, time, warnings
from tsunax.run import progress as display
bar = display.progress(True, 40, 0, "step")
for step in range(1, 41):
    time.sleep(0.02)
    bar.show(step, {"loss": 1 / step})
    if step == 10: print("the user [prints] a line", flush=True)
    if step == 20: sys.stderr.write("half a line ")
    if step == 25: sys.stderr.write("and the rest\\n")
    if step == 30: bar.note("a note with [brackets] and a :smile:")
    if step == 39: print("no newline", end="")
bar.close("enough")
print("after")
"""


def run_in_a_terminal(script, columns=100, **streams):
    """What a script writes to a pseudo-terminal of so many columns."""
    pty = pytest.importorskip("pty", reason="a pseudo-terminal needs POSIX")
    main, side = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": str(columns), "LINES": "30"}
    streams = {"stdin": side, "stdout": side, "stderr": side, **streams}
    process = subprocess.Popen([sys.executable, "-c", script], env=env, **streams)
    os.close(side)
    text = b""
    try:
        while part := os.read(main, 65536):
            text += part
    except OSError:  # how Linux ends a pseudo-terminal
        pass
    os.close(main)
    assert process.wait() == 0
    return text.decode().replace("\r\n", "\n")


def what_stays(text):
    """Its lines, without those of the bar that were overwritten."""
    return [line.rsplit("\x1b[2K", 1)[-1] for line in text.split("\n")]


@pytest.mark.medium
def test_a_terminal_keeps_what_the_user_prints():
    text = run_in_a_terminal(SCRIPT)
    lines, cleared = text.split("\n"), what_stays(text)
    at = []
    for printed in (
        "the user [prints] a line",
        "half a line and the rest",
        "a note with [brackets] and a :smile:",
        "no newline",
        "after",
    ):
        at += [i for i, line in enumerate(cleared) if line.endswith(printed)]
    assert len(at) == 5 and at == sorted(at), (at, cleared)
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor is there again
    assert at[3] < max(i for i, line in enumerate(lines) if "40/40" in line) and "enough" in lines[at[4] - 1]


@pytest.mark.medium
def test_stdout_in_a_file_has_only_what_the_user_prints(tmp_path):
    with open(tmp_path / "results.txt", "w") as file:
        text = run_in_a_terminal(SCRIPT, stdout=file)
    printed = (tmp_path / "results.txt").read_text()
    assert printed == "the user [prints] a line\nno newlineafter\n"
    assert "40/40 steps" in text and "a note with" in text and "the user" not in text


@pytest.mark.medium
def test_notes_wrap_between_words():
    script = """
from tsunax.run import progress as display
bar = display.progress(True, 40, 0, "step")
bar.show(1, {"loss": 1.0})
bar.note("step 1: " + ", ".join(f"validation/metric_{i} 0.123456" for i in range(4)))
bar.close()
"""
    lines = [line.split("\x1b")[0].strip() for line in what_stays(run_in_a_terminal(script, 60))]
    words = " ".join(lines).split()
    assert words.count("0.123456,") == 3 and {f"validation/metric_{i}" for i in range(4)} <= set(words)


def test_a_notebook_redraws_one_output(clock, monkeypatch):
    outputs = []

    class Handle:
        def update(self, shown, raw):
            outputs[-1].append(shown["text/plain"])

    def show(shown, raw, display_id):
        outputs.append([shown["text/plain"]])
        return Handle()

    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace())
    monkeypatch.setitem(sys.modules, "IPython.display", types.SimpleNamespace(display=show))
    bar = progress.Progress(progress._Notebook(), total=100, start=0)
    for step in range(1, 4):
        clock.now += 1
        bar.show(step, ROW)
    bar.close()
    ((first, *later),) = outputs
    assert len(later) == 3 and "1/100 steps" in first and "3/100 steps" in later[-1]


class Markup(HTMLParser):
    """The tags of an HTML text, and its text as a reader sees it."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text = [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)

    def handle_data(self, data):
        self.text += "\n" * (self.tags[-1] == "pre") + data


def test_notebooks_get_the_text_of_states_histories_and_reports():
    history = History()
    history.add({"<script>alert(1)</script> & 'more'": 1.5, "loss": 0.5}, 1)
    state = ts.setup(ts.rules.sgd(0.1), {"<b>": jnp.ones(2)})
    shown = [history, History(), state, ts.States(a=state), ts.devices.describe_sharding({"w": jnp.ones(2)})]
    shown += [ts.migrate(state, ts.rules.sgd(0.1))[1], Result((), ("learning_rate",))]
    shown += [SizeReport("batch size", 8, (), 1 << 30, "given")]
    shown += [ts.describe(ts.train_step(lambda params, x: jnp.mean(params["<b>"] * x)), state, jnp.ones(2))]
    for one in shown:
        markup = Markup(one._repr_html_())
        assert markup.tags == ["details", "summary", "code", "pre"], one
        assert markup.text.strip() == repr(one).strip()


def test_the_view_follows_where_the_output_goes(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert isinstance(progress.progress(True, 10, 0, "step").view, progress._Lines)
    monkeypatch.setattr(sys, "stderr", types.SimpleNamespace(isatty=lambda: True, write=len, flush=lambda: None))
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(progress.progress(True, 10, 0, "step").view, progress._Terminal)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(progress.progress(True, 10, 0, "step").view, progress._Lines)
    monkeypatch.setattr(Console, "is_jupyter", True, raising=False)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert isinstance(progress.progress(True, 10, 0, "step").view, progress._Notebook)


def test_silence(capsys):
    bar = progress.progress(False, 10, 0, "step")
    bar.show(5, ROW)
    bar.note("x")
    bar.close("y")
    assert capsys.readouterr() == ("", "")


def test_a_run_outlives_the_terminal_that_shows_it(monkeypatch):
    def broken(*given, **options):
        raise OSError(5, "Input/output error")

    bar = progress.Progress(progress._Lines(), total=10, start=0)
    monkeypatch.setattr(sys, "stderr", types.SimpleNamespace(write=broken, flush=broken))
    bar._next_draw_time = 0.0
    bar.show(5, ROW)
    bar.note("x")
    bar.close("y")
    assert isinstance(bar.view, progress._Silent)
