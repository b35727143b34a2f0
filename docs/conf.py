"""How the site is built (`scripts/docs`): the pages of this folder, executed, and the reference
from the docstrings.
"""

import hashlib
import re
import sys
from importlib.metadata import version as version_of
from pathlib import Path

import tsunax

ROOT = Path(__file__).resolve().parents[1]

project = "tsunax"
author = copyright = "The tsunax authors"
release = version = tsunax.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"tsunax {version}"
html_copy_source = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_preserve_defaults = True

# Each page runs in a process and a folder of its own, as in tests/test_examples.py; scripts/docs
# sets the environment. A cell that fails is a warning, which ends the build with an error when all
# pages have been tried.
nb_execution_show_tb = True
nb_execution_in_temp = True
nb_execution_timeout = 300
nb_merge_streams = True


def code_of() -> str:
    """A hash of what the outputs follow from besides the page: the package, jax, and what draws the
    pictures.
    """
    told = hashlib.sha256(
        f"{sys.version} {version_of('jax')} {version_of('matplotlib')}".encode()
    )
    for path in sorted((ROOT / "tsunax").rglob("*.py")):
        told.update(path.read_bytes())
    return told.hexdigest()[:16]


nb_execution_mode = "cache"
nb_execution_cache_path = str(ROOT / "build" / "docs-executed" / code_of())

NOTEBOOK = """\
---
file_format: mystnb
kernelspec:
  name: python3
---
"""


def as_notebook(app, docname: str, source: list[str]) -> None:
    """A page with Python to run: its ```python fences, which forges and tests read, become
    cells.
    """
    if (
        docname in ("benchmarks", "cost")
        and not (ROOT / "benchmarks" / "RESULTS.md").is_file()
    ):
        source[0] = (
            source[0].partition("```{include}")[0]
            + "Nothing has been measured in this copy.\n"
        )
    cells = re.sub(
        r"^```python$", "```{code-cell} python", source[0], flags=re.MULTILINE
    )
    if "```{code-cell}" in cells:
        source[0] = NOTEBOOK + cells


def literal(text: str) -> str:
    """A line of a docstring in reStructuredText: `x` is code, and no other character has a
    meaning.
    """
    parts = re.split(r"(`[^`]+`)", text)
    plain = [re.sub(r"([*|_])", r"\\\1", part) for part in parts[::2]]
    plain[1:] = [re.sub(r"^(?=\w)", r"\\ ", part) for part in plain[1:]]  # `x`s
    code = [f"`{part}`" for part in parts[1::2]]
    return "".join(x for pair in zip(plain, [*code, ""], strict=True) for x in pair)


def as_rst(app, what, name: str, obj, options, lines: list[str]) -> None:
    """Docstrings are plain text: indented blocks are code, and `x` is code.

    napoleon reads `Args:` and `Raises:`.
    """
    if getattr(getattr(obj, "factory", obj), "__module__", "").startswith("optax"):
        own = (
            literal(lines[0])
            if hasattr(obj, "factory")
            else f"This is ``optax.losses.{obj.__name__}``."
        )
        text = lines[1:] if hasattr(obj, "factory") else ["", *lines]
        if name.endswith(
            (".muon", ".sophia")
        ):  # their texts are no reStructuredText
            text = text[:3]
        lines[:] = [
            own,
            *(
                re.sub(r":doc:`[^`]*`", "the documentation of optax", line)
                for line in text
            ),
        ]
        return
    out, block, section = [], "", False  # block: "", "code" or "example"
    for line in lines:
        indented = line.startswith("    ")
        if line and not line.startswith(" "):
            section = bool(re.fullmatch(r"[A-Z]\w+:", line))
        if (block == "example" and not line) or (
            block == "code" and line and not indented
        ):
            block = ""
        if not block and line.lstrip().startswith(">>>"):
            block = "example"
        elif not block and indented and not section and out and not out[-1]:
            block, out = "code", [*out, "::", ""]
        out.append(line if block else literal(line))
    lines[:] = out


def setup(app):
    app.connect("source-read", as_notebook)
    app.connect(
        "autodoc-process-docstring", as_rst, priority=400
    )  # before napoleon
