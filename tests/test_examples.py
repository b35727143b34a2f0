"""The examples run and reach their numbers; the pages of docs/ do what they print; README's diff is the examples'."""

import ast
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from helpers import assert_trees_equal, need, run_python
from test_readme import broken_promises, promises

ROOT = Path(__file__).resolve().parents[1]
PAGES = [page for page in sorted((ROOT / "docs").glob("*.md")) if "```python" in page.read_text(encoding="utf-8")]


def example(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_example(*options: str, name: str = "digits"):
    return run_python("-W", "error", ROOT / "examples" / f"{name}.py", *options)


def accuracy_of(run: subprocess.CompletedProcess) -> float:
    *_, last = run.stdout.splitlines() or [""]
    match = re.fullmatch(r"test accuracy: (0\.\d{4}|1\.0000)", last)
    assert match, run.stdout + run.stderr
    return float(match[1])


def test_twins_agree_to_the_last_bit():
    with jax.numpy_rank_promotion("allow"):  # examples write `x @ w + b`
        (plain, params), (ours, same) = (example(name).train() for name in ("plain_optax", "with_tsunax"))
    assert len(plain) == 200 and plain[-1] < 0.2
    np.testing.assert_array_equal(np.array(ours), np.array(plain))
    assert_trees_equal(same, params)


@pytest.mark.slow  # the fast one is in short; README's main command is seed 0
@pytest.mark.parametrize("seed", range(5))
def test_digits(seed):
    run = run_example("--seed", str(seed))
    assert run.returncode == 0, run.stdout + run.stderr
    assert accuracy_of(run) >= 0.98


@pytest.mark.slow  # README's main command is the long one
def test_digits_in_short():
    run = run_example("--epochs", "5", "--target", "1.1")
    assert accuracy_of(run) >= 0.9
    assert run.returncode and "expected at least 1.1" in run.stderr
    table = [line for line in run.stdout.splitlines() if re.match(r" +\d+ +\d.*   \w", line)]
    phases = ["head alone", "features follow", "one schedule", "by hand"]
    assert [line.rpartition("   ")[2] for line in table] == phases
    assert [("frozen" in line) for line in table] == [True, False, False, False]


@pytest.mark.slow
def test_digits_by_hand():
    """The twin with a loop of its own says of every phase what the other one does, to a few digits."""
    run, twin = run_example(), run_example(name="digits_by_hand")
    assert accuracy_of(run) == pytest.approx(accuracy_of(twin), abs=0.006)


# --------------------------------------------------------------------------------------------------------- pages


@pytest.mark.slow
def test_data_parallel():
    run = run_example(name="data_parallel")
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.search(r"fully sharded +loss 0\.0\d+ .* 173\.2 KiB on a device", run.stdout), run.stdout


@pytest.mark.slow
def test_batch_size():
    run = run_example(name="batch_size")
    assert run.returncode == 0 and float(run.stdout.split()[-1]) >= 0.95, run.stdout + run.stderr


@pytest.mark.slow
def test_population():
    run = run_example("--members", "16", name="population")
    assert run.returncode == 0, run.stdout + run.stderr
    assert re.findall(r"(\d+) members", run.stdout) == ["16", "8", "4", "2"], run.stdout


@pytest.mark.slow
def test_tune(tmp_path):
    """The second time all trials are in the journal."""
    need("optuna")
    options = "--trials", "24", "--directory", tmp_path
    first, second = (run_example(*options, name="tune") for _ in range(2))
    assert first.returncode == second.returncode == 0, first.stdout + first.stderr + second.stderr
    assert "24 trials" in first.stdout and first.stdout.splitlines()[-1] == second.stdout.splitlines()[-1]


@pytest.mark.slow
def test_hypergradients():
    run = run_example("--outer", "15", name="hypergradients")
    assert run.returncode == 0 and re.search(r"held-out loss: 1\.\d+ before, 0\.[2-5]", run.stdout), (
        run.stdout + run.stderr
    )


def as_one_block(page: str) -> str:
    """The page with all of its ```python blocks as one, every line where it was.

    Comments alone on the lines after `print(...)` say what it prints, as one behind it does.
    """
    lines, inside = ["```python"], False  # in place of the title
    for line in page.splitlines()[1:]:
        if line.startswith("```"):
            inside, line = line.strip() == "```python", ""
        lines.append(line if inside else "")
    block = "\n".join(lines) + "\n```\n"
    return re.sub(r"^(print\(.*\))\n((?:# .*\n)+)", on_one_line, block, flags=re.MULTILINE)


def on_one_line(match: re.Match) -> str:
    """The lines that a call prints, in the comment behind it; as many lines as before."""
    printed = [line.removeprefix("# ") for line in match[2].splitlines()]
    return f"{match[1]}  # {' ⏎ '.join(printed)}\n" + "\n" * len(printed)


PAGES_OF_CI = ("data", "loop")  # the others take minutes together; scripts/docs has them all


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(p, id=p.stem, marks=pytest.mark.medium if p.stem in PAGES_OF_CI else pytest.mark.slow)
        for p in PAGES
    ],
)
def test_pages_do_what_they_print(page, tmp_path):
    copy = tmp_path / page.name
    copy.write_text(as_one_block(page.read_text(encoding="utf-8")), encoding="utf-8")
    problems = broken_promises(copy, tmp_path)
    if problems:
        pytest.fail("\n".join(problems), pytrace=False)


# Runs the first block of each page in a separate process, forked before any device is touched.
ALONE = r"""
import json, os, sys, tempfile, traceback
import flax.linen, flax.nnx, jax, numpy, optax, tsunax.rules, tsunax.loop

for name, source in json.load(sys.stdin).items():
    if not (child := os.fork()):
        os.chdir(tempfile.mkdtemp(dir=sys.argv[1]))
        os.dup2(2, 1)
        try:
            exec(compile(source, name, "exec"), {"__name__": "__main__"})
            status = 0
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stderr.flush()
        os._exit(status)
    if os.waitpid(child, 0)[1]:
        print(name)
"""
NEEDS = {"gpu": "jax_cuda13_plugin", "recipes": "tyro"}  # libraries of first blocks that the tests do not have


@pytest.mark.medium
def test_the_first_block_of_each_page_runs_when_it_is_pasted_alone(tmp_path):
    """With one device, as a reader has."""
    blocks = {}
    for page in sorted((ROOT / "docs").glob("*.md")):
        match = re.search(r"^```(?:python|py)\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
        library = NEEDS.get(page.stem, "jax")
        if match and importlib.util.find_spec(library) is not None:
            blocks[page.name] = match[1]
    env = {k: v for k, v in os.environ.items() if k not in ("NPROC", "XLA_FLAGS")} | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        [sys.executable, "-c", ALONE, tmp_path],
        input=json.dumps(blocks),
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert len(blocks) > 25 and run.returncode == 0 and run.stdout == "", run.stdout + run.stderr


def test_pages_are_read_block_by_block(tmp_path):
    page = "# Title\n```bash\nfalse\n```\n```python\nx = 1\n```\ntext\n```python\nprint(x)\n# 2\nprint(x)  # 1\n```\n"
    copy = tmp_path / "page.md"
    copy.write_text(as_one_block(page))
    assert broken_promises(copy, tmp_path) == ["page.md:10: printed ['1'], expected ['2']"]


def test_a_call_may_print_several_lines(tmp_path):
    page = "# Title\n```python\nprint('a\\nb')\n# a\n# b\nprint('c\\nd')\n# c\n# e\nprint(1)  # 2\n```\n"
    copy = tmp_path / "page.md"
    copy.write_text(as_one_block(page))
    assert broken_promises(copy, tmp_path) == [
        "page.md:6: printed ['c ⏎ d'], expected ['c ⏎ e']",
        "page.md:9: printed ['1'], expected ['2']",
    ]


# ----------------------------------------------------------------------------------------------------- notebooks

NOTEBOOKS = {"quickstart": 1, "finetune_lora": 1, "population": 3, "timeline": 3}  # pictures


def notebook(name: str) -> list[dict]:
    return json.loads((ROOT / "examples" / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]


def unkept(cells: list[dict]) -> list[str]:
    """What the cells promise, `print(...)  # text`, and none of their lines says, in this order."""
    problems = []
    for cell in cells:
        if cell["cell_type"] == "code":
            outputs = (output["text"] for output in cell["outputs"] if output.get("name") == "stdout")
            lines = iter("".join(outputs).splitlines())
            problems += [text for text in promises("".join(cell["source"])).values() if text not in lines]
    return problems


@pytest.mark.slow  # a kernel each, and figures
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs_and_shows(name, tmp_path):
    nbclient, nbformat = need("nbclient"), need("nbformat")
    need("ipykernel"), need("matplotlib")
    cells = nbformat.read(ROOT / "examples" / f"{name}.ipynb", as_version=4)
    env = {k: v for k, v in os.environ.items() if k not in ("NPROC", "XLA_FLAGS")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        [patch.delenv(name, raising=False) for name in set(os.environ) - set(env)]
        nbclient.NotebookClient(cells, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    kinds = [set(output.get("data", {})) for cell in cells.cells for output in cell.get("outputs", ())]
    assert sum("image/png" in kind for kind in kinds) >= NOTEBOOKS[name]
    assert unkept(cells.cells) == []


def test_promises_of_a_notebook_are_looked_at():
    cell = {"cell_type": "code", "source": ["print(1)  # 1\n", "print(2)  # 3"]}
    says = lambda text: [cell | {"outputs": [{"name": "stdout", "text": text}]}]
    assert unkept(says("1\n2\n")) == ["3"] and unkept(says("1\nmore\n3\n")) == [] and unkept(says("")) == ["1", "3"]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_starts_with_the_line_for_colab_and_ends_in_a_number(name):
    first, *_, last = (cell for cell in notebook(name) if cell["cell_type"] == "code")
    # the clone, which is on no index, from the folder of the notebook; and no jax, which Colab has
    assert "".join(first["source"]) == '# %pip install --quiet "..[examples]"'
    assert re.search(r"^assert \w+ > 0\.\d+$", "".join(last["source"]), re.MULTILINE)
    assert not any(cell.get("outputs") for cell in notebook(name))


SCRIPTS = sorted(path.name for path in (ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_example_answers_help_before_it_trains(name):
    """In this process, for its imports are there: an option that nobody read would train for a minute."""
    source = (ROOT / "examples" / name).read_text(encoding="utf-8")
    lines = source.splitlines()
    first = ast.get_docstring(ast.parse(source)).splitlines()[0]
    parsed = next(i for i, line in enumerate(lines) if ".parse_args()" in line)
    assert "description=" in "".join(lines[parsed - 12 : parsed + 1]), "its first line is its description"
    work = re.compile(r"\w.*(load_digits\(|ts\.simulate|distributed\.start|print\()")
    trains = [i for i, line in enumerate(lines) if work.match(line)]
    assert all(parsed < i for i in trains) and first.endswith(".")


def test_the_index_has_every_example():
    index = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    rows = [line for line in index.splitlines() if line.startswith("| [")]
    files = {path.name for path in (ROOT / "examples").glob("*") if path.suffix in (".py", ".ipynb")}
    assert sorted(re.findall(r"^\| \[(\S+)\]\((\S+)\)", "\n".join(rows), re.M)) == sorted((f, f) for f in files)
    assert {path.stem for path in (ROOT / "examples").glob("*.ipynb")} == set(NOTEBOOKS)
    assert [row for row in rows if not re.fullmatch(r"\|.+\|.+\| \w+ \| (about )?\d+ \| `.*\d.*` \|", row)] == []


def test_the_readme_shows_the_twins():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    match = re.search(r"^```diff\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    assert match, "README.md has no ```diff block"
    twins = {name: (ROOT / "examples" / f"{name}.py").read_text() for name in ("plain_optax", "with_tsunax")}
    sides = {"plain_optax": " -", "with_tsunax": " +"}
    for name, marks in sides.items():
        shown = [line[1:].rstrip() for line in match[1].splitlines() if line[:1] in marks or not line]
        assert "\n".join(shown) in twins[name], f"examples/{name}.py does not have these lines in this order"
