"""The README's first block of Python runs as it stands and prints what its comments say."""

import ast
import io
import os
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# Runs the block with `print` replaced by one that also notes the line it was called from: the first
# line of the call, as `ast` counts it. What the library prints by itself is nobody's promise.
RUNNER = r"""
import builtins, io, json, sys
source, filename, answer = sys.argv[1:]
printed, plain = [], print

def noting(*values, **options):
    caller, text = sys._getframe(1), io.StringIO()
    plain(*values, **{**options, "file": text, "flush": False})
    if caller.f_code.co_filename == filename:
        printed.append((caller.f_lineno, text.getvalue().removesuffix("\n")))
    plain(*values, **options)

builtins.print = noting
exec(compile(open(source).read(), filename, "exec"), {"__name__": "__main__"})
json.dump(printed, open(answer, "w"))
"""


def first_block(readme: str) -> str:
    """The first ```python block, behind as many empty lines as precede it.

    So its lines carry the README's numbers, and a traceback shows the README's text.
    """
    match = re.search(r"^```python[ \t]*\n(.*?)^```[ \t]*$", readme, re.MULTILINE | re.DOTALL)
    if not match:
        pytest.fail("README.md has no ```python block", pytrace=False)
    return "\n" * readme.count("\n", 0, match.start(1)) + match[1]


def promises(source: str) -> dict[int, str]:
    """Line of each `print(...)  # text` -> text. A longer call is known by its first line."""
    comments = {
        token.start[0]: token.string.removeprefix("#").strip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    return {
        node.lineno: comments[node.end_lineno]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
        and node.end_lineno in comments
    }


def broken_promises(readme: Path, folder: Path) -> list[str]:
    source = first_block(readme.read_text(encoding="utf-8"))
    promised = promises(source)
    if not promised:
        return [f"{readme.name}: no line `print(...)  # text` in the first block: nothing to check"]
    block, answer = folder / "block.py", folder / "printed.json"
    block.write_text(source)
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", RUNNER, block, readme, answer],
        # This checkout, whatever is installed; the rest is conftest's: CPU, eight devices.
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    if run.returncode:
        return [f"{readme.name}: the first block fails\n{run.stdout}{run.stderr}"]
    printed: dict[int, list[str]] = {}
    for line, text in ast.literal_eval(answer.read_text()):
        printed.setdefault(line, []).append(text.replace("\n", " ⏎ "))
    return [
        f"{readme.name}:{line}: printed {printed.get(line, [])}, expected {[text]}"
        for line, text in promised.items()
        if printed.get(line, []) != [text]
    ]


@pytest.mark.medium
def test_first_block(tmp_path):
    readme = ROOT / "README.md"
    assert readme.is_file(), "README.md does not exist"
    problems = broken_promises(readme, tmp_path)
    if problems:
        pytest.fail("\n".join(problems), pytrace=False)


@pytest.mark.parametrize(
    ("block", "problem"),
    [
        ("print(1 + 1)  # 2\n", None),
        ("print(  # the sum\n    1 + 1,\n)  # 2\n", None),
        ("for i in (1,):\n    print(f'{i} # {i}')  # 1 # 1\n", None),
        ("exec('\\n' * 5 + 'print(7)')\nprint(1)  # 1\n", None),  # line 6 of something else
        ("print(1 + 1)  # 3\n", "README.md:5: printed ['2'], expected ['3']"),
        ("print(1 + 1)  # 2.\n", "README.md:5: printed ['2'], expected ['2.']"),
        ("for i in (1, 1):\n    print(i)  # 1\n", "README.md:6: printed ['1', '1'], expected ['1']"),
        ("if 0:\n    print(1)  # 1\n", "README.md:6: printed [], expected ['1']"),
        ("print(1)\n", "nothing to check"),
        ("1 / 0\nprint(1)  # 1\n", 'README.md", line 5'),
        ("import warnings; warnings.warn('old')\nprint(1)  # 1\n", "UserWarning: old"),
    ],
)
def test_wrong_blocks_are_found(tmp_path, block, problem):
    readme = tmp_path / "README.md"
    readme.write_text(f"# Title\n\nText.\n```python\n{block}```\n\n```python\nprint(2)  # 3\n```\n")
    problems = broken_promises(readme, tmp_path)
    if problem is None:
        assert not problems
    else:
        assert len(problems) == 1 and problem in problems[0]


def test_a_readme_without_python_is_found(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("```bash\nls\n```\n")
    with pytest.raises(pytest.fail.Exception, match="no ```python block"):
        broken_promises(readme, tmp_path)


def test_the_ratios_in_short_are_those_of_the_results():
    """docs/cost.md shows this table: a row that was renamed, or measured again, is not left behind."""
    from benchmarks import _report

    short = _report.short()
    assert "not measured" not in short
    assert short in (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page, least", [("README.md", 6), ("docs/benchmarks.md", 20)])
def test_ratios_are_of_kept_results_only(page, least):
    text = (ROOT / page).read_text(encoding="utf-8").partition("<!-- numbers -->")[2]
    text = text.partition("\n## All")[0].partition("\n## Status")[0]
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    known = {round(float(text), digits) for text in re.findall(r"\d+\.\d+", results) for digits in (1, 2)}
    ratios = [cell for line in text.splitlines() for cell in re.findall(r"\| ([\d.; ]+) \|$", line)]
    numbers = [float(text) for cell in ratios for text in cell.split(";")]
    assert len(numbers) >= least and [x for x in numbers if x not in known] == []


def test_the_readme_is_short_and_its_tables_too():
    """150 lines; five benefits, the timeline among them; six rows of speed, each with what it is compared with."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) <= 150
    benefits = re.findall(r"^- \*\*", readme.partition("```python")[0], re.MULTILINE)
    assert len(benefits) == 5 and "`ts.timeline`" in readme.partition("```python")[0]
    speed = readme.partition("## Speed")[2].partition("\n## ")[0]
    rows = [line for line in speed.splitlines() if line.startswith("|")][2:]
    assert len(rows) <= 6 and all(len(row.strip("|").split(" | ")) == 3 for row in rows)


def test_the_changelog_says_in_one_screen_what_the_release_has():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    screen = text.partition("\n## ")[2].partition("\n### ")[0].splitlines()
    assert screen[0].startswith("0.1.0") and len(screen) <= 30 and sum(line.startswith("|") for line in screen) >= 10
