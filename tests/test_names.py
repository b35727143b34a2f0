"""scripts/names and scripts/words: what they count in planted files, and that ceilings go down only."""

import re
import shutil

import pytest

from test_packaging import ROOT, script

names = script("names")
words = script("words")

VAGUE = [
    "def f(found): ...",
    "def _given(batch): ...",
    "class Told: ...",
    "LEFT = 1",
    "for at in (): pass",
    "seen_by = lambda x: x",
    "f = lambda own: 1",
    "def hold(batch): ...",
    "goes_on: bool = True",
    "self.before = 1",
    "import numpy as most",
    "try: pass\nexcept ValueError as it: pass",
    "isAsked = 1",
]
PLAIN = [
    "def f(found_paths): ...",
    "hold = 1",  # a noun, but no name for a function
    "base_rate = 1",
    "x.at[found].set(1)",  # read, not bound
    "def __eq__(self, __other): ...",
    "__all__ = []",
    "f(given=1)",
]


@pytest.mark.parametrize("source", VAGUE)
def test_vague_names_are_counted(tmp_path, source):
    (tmp_path / "a.py").write_text(source)
    assert names.count(tmp_path)["."]["name"] == 1


@pytest.mark.parametrize("source", PLAIN)
def test_names_with_a_noun_are_not(tmp_path, source):
    (tmp_path / "a.py").write_text(source)
    assert names.count(tmp_path)["."]["name"] == 0


HEADLESS = {
    '"what" as a noun': "Returns what the rule keeps.",
    '"that of", "those that"': "Its norm is that of the gradient.",
    '"the one", "one of them"': "The first state is the one.",
    '"others", "of ours"': "Frozen leaves stay, others move.",
    '"whose"': "Leaves whose norm is small.",
    '"nobody", "whoever"': "Nobody reads it.",
    '"so many", "so far"': "The sum so far.",
    '"beside"': "The manifest is beside the arrays.",
    '"where" for "if"': "Where it is None, all leaves move.",
    "things that lie, stand, go on": "The arrays lie in one file.",
    "things that know, want, tell": "The rule knows its clock.",
    names.FIRST_WORD: "of each leaf",
}


def test_each_construction_has_an_example():
    assert {*HEADLESS} == {*names.PATTERN}


@pytest.mark.parametrize("construction", HEADLESS)
def test_constructions_are_counted_in_comments_and_docstrings(tmp_path, construction):
    text = HEADLESS[construction]
    sources = [f"x = 1  # {text}", f"# {text}\nx = 1"]
    if construction != names.FIRST_WORD:
        # a line break is a space, examples are code, and so is what stands in backticks
        sources += [f'"""First line.\n\n    {text}\n    >>> {text}\n    `{text}`\n"""']
        sources += ["# Comment.\n# " + text.replace(" ", "\n# ")]
    for source in sources:
        (tmp_path / "a.py").write_text(source)
        assert names.count(tmp_path)["."] | {"names": 0, "words": 0} == {
            "names": 0, "words": 0, "sentence": 1, construction: 1,
        }, source  # fmt: skip


def test_only_the_first_word_of_a_comment_is_its_first(tmp_path):
    (tmp_path / "a.py").write_text("# The norm\n# of each leaf,\n# so small.\nx = 'of' # the\ny = 1 # so is this\n")
    assert names.count(tmp_path)["."]["sentence"] == 1


def test_plain_sentences_are_not_counted(tmp_path):
    sentences = "What is a rule? In what order? You know it. `the one`, one hot. The place where x is read."
    (tmp_path / "a.py").write_text(f'"""{sentences}"""')
    assert names.count(tmp_path)["."]["sentence"] == 0 and names.count(tmp_path)["."]["words"] > 10


def test_places_have_their_lines(tmp_path, capsys):
    (tmp_path / "a.py").write_text('"""One.\n\nThe arrays lie\nbeside it.\n"""\n# One.\n# Others.\nmine = 1\n')
    for name in ("test_a.py", "a_test.py", "a_pb2.py"):
        (tmp_path / name).write_text("mine = 1\n")
    names.main([str(tmp_path), "--where"])
    lines = capsys.readouterr().out.splitlines()
    assert [re.search(r"a\.py:(\d+): ", line)[1] for line in lines] == ["3", "4", "7", "8"]
    assert lines[3].endswith(": mine  (a pronoun makes the reader search for its noun)")


def test_a_folder_above_its_ceiling_fails_and_ceilings_go_down_only(tmp_path):
    (tmp_path / "rules").mkdir()
    (tmp_path / "rules" / "a.py").write_text("found, at = 1, 2\n# Others.\n")
    (tmp_path / "b.py").write_text("mine = 1\n")
    assert names.check(tmp_path, {"rules": (2, 1), ".": (1, 0)}) == []
    above = [": 1 vague names, expected 0 at most", "/rules: 2 vague names, expected 1 at most"]
    problems = sorted(names.check(tmp_path, {"rules": (1, 1)}))
    assert len(problems) == 2 and all(p.endswith(end) for p, end in zip(problems, above, strict=True))
    assert "1 constructions" in names.check(tmp_path, {"rules": (2, 0), ".": (1, 0)})[0]
    assert names.lower(tmp_path, {"rules": (7, 0), ".": (0, 3), "gone": (1, 1)}) == {".": (0, 0), "rules": (2, 0)}
    assert names.lower(tmp_path, {"rules": (7, 0)}) == {".": (1, 0), "rules": (2, 0)}


def test_lower_rewrites_the_table_of_the_script(tmp_path):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "tsunax" / "rules").mkdir(parents=True)
    (tmp_path / "tsunax" / "rules" / "a.py").write_text("found = 1\n")
    copy = shutil.copy(ROOT / "scripts" / "names", tmp_path / "scripts" / "names")
    script("names", tmp_path).main(["--lower"])
    lowered = script("names", tmp_path)
    assert lowered.CEILINGS == {"rules": (1, 0)}
    rows = re.compile(r'^    "[.\w]+": \(\d+, \d+\),\n', re.MULTILINE)
    assert rows.sub("", copy.read_text()) == rows.sub("", (ROOT / "scripts" / "names").read_text())
    assert lowered.main(["--check"]) is None
    (tmp_path / "tsunax" / "rules" / "a.py").write_text("found = mine = 1\n")
    with pytest.raises(SystemExit, match="rules: 2 vague names, expected 1 at most"):
        lowered.main(["--check"])


def test_words_of_pages_are_counted_and_shown(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("# Those that lie\n\nYou see it. Those that know `others`\ngo on.\n\n```python\nothers\n```\n")
    words.main([str(tmp_path)])
    rows = dict(line.rsplit(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert float(rows['"those that", "that of"']) == float(rows['"goes on"']) == float(rows['"you"']) == 111.11
    assert float(rows['"of ours", "others"']) == 0
    words.main([str(page), "--where"])
    assert [line.rpartition("(")[2] for line in capsys.readouterr().out.splitlines()] == [
        '"those that", "that of")', '"goes on")', "things that know, want, ask)",
    ]  # fmt: skip
