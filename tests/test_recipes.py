"""The recipes of docs/recipes.md run, with those of their libraries that are here."""

import re
import sys
from pathlib import Path

import pytest
from tests.helpers import need

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "recipes.md").read_text(encoding="utf-8")
RECIPES = dict(re.findall(r"^## ([^\n]+)\n(?:(?!^## ).)*?^```py\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))


class Hub:
    """In the place of HfApi: it notes the file that would be sent."""

    sent = b""

    def upload_file(self, *, path_or_fileobj, path_in_repo, repo_id):
        Hub.sent = Path(path_or_fileobj).read_bytes()


@pytest.mark.medium
@pytest.mark.parametrize("title", RECIPES)
def test_a_recipe_runs(title, tmp_path, monkeypatch):
    block = RECIPES[title]
    for library in re.findall(r"^(?:import|from) (\w+)", block, re.MULTILINE):
        need(library)
    if "jax.export" in title:
        need("flatbuffers")
    if "huggingface_hub" in block:
        monkeypatch.setattr(sys.modules["huggingface_hub"], "HfApi", Hub)
    monkeypatch.setattr(sys, "argv", ["train.py", "--epochs", "2", "--learning-rate", "3e-3"])
    monkeypatch.chdir(tmp_path)
    exec(compile(block, title, "exec"), {"__name__": "__main__"})
    if "tyro" in title:
        assert (tmp_path / "runs" / "lr0.003-batch32").is_dir()
    if "huggingface_hub" in block:
        assert b'"dtype":"F32"' in Hub.sent


def test_there_is_a_recipe_of_each():
    words = ("tyro", "Hugging Face in memory", "einops", "jax.export", "hub")
    assert len(RECIPES) == len(words) and all(word in title for word, title in zip(words, RECIPES, strict=True))
