"""The shape of the package: who may import whom, what is public, and what an import must not do.

Every check takes a package's directory and returns a list of sentences, empty if all is well. So it
runs on tsunax, and on the small wrong packages below that show that it can fail.
"""

import ast
import importlib
import importlib.machinery
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "tsunax"

# The rooms of the first level, from the ground up: a file or a folder imports its own tier and those below it. A new
# one is entered here before it is written.
TIERS = {
    0: "errors _core _cpu",
    1: "metrics losses loss regularize guard precision averages reproduce rules schedules",
    2: "_state state states microbatches _step step program hyper between_steps watching",
    3: "distributed data devices",
    4: "checkpoints models run loop",
    5: "populations migration insight testing tuning timelines",
    6: "__init__ __main__",
}
TIER = {room: tier for tier, rooms in TIERS.items() for room in rooms.split()}

# What costs seconds to import, or is an extra. Loaded by the function that needs it.
LAZY = (
    "IPython flax pandas rich orbax grain matplotlib tensorboardX optuna ray torch safetensors sklearn obstore"
).split()


# --- (a) imports go down, never in a circle ---------------------------------------------------


def module_files(package: Path) -> dict[str, Path]:
    """Each file by its dotted name below the package; a folder's `__init__` by the folder's."""
    names = {path: path.relative_to(package).with_suffix("").parts for path in sorted(package.rglob("*.py"))}
    return {".".join(parts[:-1] if parts[-1] == "__init__" and parts[1:] else parts): p for p, parts in names.items()}


def room_of(module: str) -> str:
    return module.partition(".")[0]


def imported_modules(path: Path, package: Path, modules) -> list[tuple[int, str]]:
    """(line, module of this package) for every import in a file.

    Imports inside functions and for type checkers count: what a file names, it knows about.
    """
    here = path.relative_to(package.parent).parent.parts  # ("tsunax",) or ("tsunax", "models")
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            targets = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = list(here[: len(here) - node.level + 1]) if node.level else []
            base += node.module.split(".") if node.module else []
            # `from tsunax import step` is the module, `from tsunax import setup` is `__init__`'s.
            targets = [[*base, alias.name] for alias in node.names]
        else:
            continue
        for root, *rest in targets:
            if root == package.name:
                longest = (".".join(rest[:n]) for n in range(len(rest), 0, -1))
                target = next((name for name in longest if name in modules), "__init__")
                found.append((node.lineno, target))
    return found


def a_cycle(graph: dict[str, set[str]]) -> list[str]:
    """The modules of some cycle, the first one repeated at the end; empty if there is none."""
    done: set[str] = set()

    def visit(module, trail):
        if module in trail:
            return [*trail[trail.index(module) :], module]
        if module in done:
            return []
        for target in sorted(graph.get(module, ())):
            if cycle := visit(target, [*trail, module]):
                return cycle
        done.add(module)
        return []

    return next((cycle for module in sorted(graph) if (cycle := visit(module, []))), [])


def import_problems(package: Path) -> list[str]:
    files = module_files(package)
    rooms = sorted(set(map(room_of, files)))
    problems = [
        f"{room}: not in the table of tiers. Enter it in TIERS of tests/test_architecture.py."
        for room in rooms
        if room not in TIER
    ]
    graph: dict[str, set[str]] = {}
    for module, path in files.items():
        room = room_of(module)
        for line, target in imported_modules(path, package, files):
            there = f"{path.relative_to(package.parent)}:{line}: {module}"
            other = room_of(target)
            if target == module:
                continue
            graph.setdefault(module, set()).add(target)
            if TIER.get(other, 0) > TIER.get(room, 9):
                problems.append(
                    f"{there} (tier {TIER[room]}) imports {target} (tier {TIER[other]}), expected "
                    f"tier {TIER[room]} or lower. Move what it needs down."
                )
            if other != room and any(part.startswith("_") for part in target.split(".")[1:]):
                problems.append(f"{there} imports {target}, which is private to {other}/.")
    if cycle := a_cycle(graph):
        problems.append(f"import cycle: {' -> '.join(cycle)}")
    return problems


# The files that one call needs (`scripts/size`), and the most that they may be. A file more needs a reason.
NEEDED = {"program": 17, "run.evaluation": 28, "loop": 40, "checkpoints.saving": 24}


def size_module():
    loader = importlib.machinery.SourceFileLoader("size", str(ROOT / "scripts" / "size"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("size", loader))
    loader.exec_module(module)
    return module


MOST_LINES, MOST_LINES_OF_FUNCTION = 420, 60


def too_long(package: Path) -> list[str]:
    found = []
    for path in sorted(package.rglob("*.py")):
        text, place = path.read_text(), path.relative_to(package)
        if (lines := text.count("\n")) > MOST_LINES:
            found.append(f"{place} has {lines} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                lines = body[-1].end_lineno - body[0].lineno + 1 if body else 0
                if lines > MOST_LINES_OF_FUNCTION:
                    found.append(f"{place}: {node.name} has {lines} lines without its docstring")
    return found


def too_many_files(package: Path, needed: dict[str, int]) -> list[str]:
    """Who asks for what, if one call needs more files than it may."""
    size, known = size_module(), size_module().modules(package)
    graph = {name: size.imports(name, path, package, known) for name, path in known.items()}
    problems = []
    for start, most in needed.items():
        files = size.closure(start, graph)
        if len(files) > most:
            asks = [f"  {name} for {', '.join(sorted(n for n in files if name in graph[n]))}" for name in sorted(files)]
            problems.append("\n".join([f"{start} needs {len(files)} files, {most} at most:", *asks]))
    return problems


def unknown_rooms(package: Path) -> list[str]:
    """What the table names and the package has not."""
    rooms = set(map(room_of, module_files(package)))
    return [f"{room}: in the table of tiers, and not in {package.name}/." for room in TIER if room not in rooms]


# --- how many processes there are, only `distributed` knows ------------------------------------

# Who may ask: the cut of the rows of a batch, and the check that each process has its own part.
ASKS_FOR_PROCESSES = {"data.batching"}


def questions_for_processes(path: Path) -> list[str]:
    """Where a file asks how many processes there are, or imports the code of several."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        if any(re.match(r"tsunax\.distributed\b", name) for name in names):
            found.append(f"{node.lineno}: imports tsunax.distributed")
        elif any(name.endswith((".process_count", ".process_index")) for name in names):
            found.append(f"{node.lineno}: imports {names[0]}")
        elif isinstance(node, ast.Attribute):
            whose = ast.unparse(node.value)
            is_everyone = re.search(r"\beveryone$|\bcurrent\(\)$", whose)
            if node.attr == "process_count" or (node.attr == "process_index" and whose == "jax"):
                found.append(f"{node.lineno}: asks {whose}.{node.attr}")
            elif node.attr == "count" and is_everyone:
                found.append(f"{node.lineno}: asks {whose}.count")
    return found


def askers(package: Path) -> dict[str, list[str]]:
    inside = ("distributed", "_core.processes")
    files = {name: path for name, path in module_files(package).items() if not name.startswith(inside)}
    return {name: found for name, path in files.items() if (found := questions_for_processes(path))}


# --- whether a state is a population, few files ask --------------------------------------------

# Who may ask. Others say what they need to `states.py`: `refuse_population`, `row_axes`, `over_members`, ... The
# list only gets shorter.
ASKS_FOR_MEMBERS = set(
    "_state.state_setup _state.state_text _step.finite_state checkpoints._writing checkpoints.merging program "
    "run.evaluation run.rejections".split()
)


def questions_for_members(path: Path) -> list[str]:
    """The lines in which a file asks for the members of a state, by `members_of` or by the shape of its clock."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        is_shape = isinstance(node, ast.Attribute) and node.attr in ("shape", "ndim")
        asked = ast.unparse(node.value) if is_shape else ""
        if isinstance(node, ast.Call) and node.args and re.search(r"\b(shape|ndim)$", ast.unparse(node.func)):
            asked = ast.unparse(node.args[0])
        if isinstance(node, ast.ImportFrom) and any(alias.name == "members_of" for alias in node.names):
            found.append(f"{node.lineno}: imports members_of")
        elif re.search(r"\bclock$", asked):
            found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


def askers_for_members(package: Path) -> dict[str, list[str]]:
    files = {name: path for name, path in module_files(package).items() if name not in ("populations", "states")}
    return {name: found for name, path in files.items() if (found := questions_for_members(path))}


# --- (b), (c), (d) what the package looks like from outside -----------------------------------

# Runs in a fresh interpreter. jax and optax come first: what they do at import is not ours. The
# answer goes to a file, so that everything on stdout and stderr was printed by the package.
PROBE = r"""
import json, logging, os, signal, sys, types
import jax, optax
from jax._src import xla_bridge

def surroundings():
    return {
        "environment": dict(os.environ),
        "signal handlers": {s: signal.getsignal(s) for s in signal.valid_signals()},
        "root log handlers": list(logging.root.handlers),
        "root log level": logging.root.level,
    }

before, loaded = surroundings(), set(sys.modules)
import tsunax
after = surroundings()
answer = {
    "file": tsunax.__file__,
    "changed": [name for name in before if before[name] != after[name]],
    "loaded": sorted({m.partition(".")[0] for m in set(sys.modules) - loaded}),
    "backends": sorted(xla_bridge._backends),
    "all": [n for n in tsunax.__all__ if n != "__version__"],
    "dir": [n for n in dir(tsunax) if not n.startswith("_")],
    "names": {},
}

def kind(value):
    if isinstance(value, types.ModuleType):
        ours = value.__name__.startswith("tsunax.")
        return "submodule" if ours else "foreign module"
    return "callable" if callable(value) else "constant"

def documented(name, value):
    text = value.__doc__ or ""
    if isinstance(value, type):
        # What dataclass writes when nobody did: "Name(field: int, ...)".
        return bool(text) and not text.startswith(name + "(")
    # An instance shows its class's text; that says nothing about this instance.
    return bool(text) and text != type(value).__doc__

# First read, in a fresh interpreter: a lazily loaded function that shares a module's name is still
# the function here, and turns into the module on the second.
for name in dict.fromkeys([*answer["all"], *answer["dir"]]):
    try:
        value = getattr(tsunax, name)
    except AttributeError:
        answer["names"][name] = {"kind": "missing"}
    else:
        answer["names"][name] = {"kind": kind(value), "documented": documented(name, value)}

with open(sys.argv[1], "w") as file:
    json.dump(answer, file)
"""


def probe(package: Path, folder: Path) -> dict:
    path = folder / "probe.json"
    env = {**os.environ, "PYTHONPATH": str(package.parent)}
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROBE, str(path)],
        env=env,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    if run.returncode:
        raise AssertionError(f"import tsunax failed in a fresh interpreter:\n{run.stderr}")
    seen = json.loads(path.read_text())
    assert Path(seen["file"]).parent == package, f"another tsunax was imported: {seen['file']}"
    seen["modules"] = sorted(set(map(room_of, module_files(package))) - {"__init__"})
    seen["printed"] = run.stdout + run.stderr
    return seen


def import_effects(seen: dict) -> list[str]:
    problems = [
        f"import tsunax loads {name}. Import it in the function that needs it; "
        f"`python -X importtime -c 'import tsunax'` shows who does."
        for name in LAZY
        if name in seen["loaded"]
    ]
    if seen["backends"]:
        problems.append(
            f"import tsunax starts a backend ({', '.join(seen['backends'])}): it makes an array "
            f"or asks for devices. jax.distributed can no longer be started then."
        )
    problems += [f"import tsunax changes the {what}" for what in seen["changed"]]
    if seen["printed"]:
        problems.append(f"import tsunax prints {seen['printed']!r}")
    return problems


def public_problems(seen: dict) -> list[str]:
    names = seen["names"]
    # A submodule is an attribute as soon as somebody imports it, so it may be listed or not.
    modules = {name for name in names if names[name]["kind"] == "submodule"}
    listed, visible = set(seen["all"]) - modules, set(seen["dir"]) - modules
    private = {name for name in listed if name.startswith("_")}
    missing = {name for name in listed if names[name]["kind"] == "missing"}
    problems = [f"__all__ lists {name} twice" for name in names if seen["all"].count(name) > 1]
    problems += [f"__all__ lists {name}, which is private" for name in sorted(private)]
    problems += [f"__all__ lists {name}, which tsunax does not have" for name in sorted(missing)]
    problems += [
        f"dir(tsunax) does not show {name} of __all__. A lazy __getattr__ needs a __dir__."
        for name in sorted(listed - visible - missing - private)
    ]
    problems += [
        f"tsunax.{name} is public, but not in __all__. List it, or `import ... as _{name}`."
        for name in sorted(visible - listed)
    ]
    problems += [
        f"tsunax.{name} has no docstring"
        for name in sorted(listed - missing)
        if names[name]["kind"] == "callable" and not names[name]["documented"]
    ]
    return problems


def unmentioned(seen: dict, root: Path) -> list[str]:
    """Public names that no page shows as code: in backticks, as ts.name, or in a list of names."""
    pages = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    pages += sorted((root / "docs").rglob("*.rst"))
    # docs/decisions.md is a record, and the build's copies are no pages.
    pages = [p for p in pages if p.is_file() and p.name != "decisions.md" and "_build" not in p.parts]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    return [
        f"tsunax.{name} is mentioned neither in README.md nor in docs/. Write `{name}` there."
        for name in sorted(set(seen["all"]))
        if not re.search(rf"(`|\bts\.|\btsunax\.){name}\b|^\s*{name}\s*$", text, re.MULTILINE)
    ]


def shadowing_problems(seen: dict) -> list[str]:
    return [
        f"tsunax.{name} is not the module tsunax.{name}: importing that module replaces it. Rename one of them."
        for name in sorted(set(seen["all"]) & set(seen["modules"]))
        if seen["names"][name]["kind"] != "submodule"
    ]


# --- tsunax ------------------------------------------------------------------------------------


def check(problems: list[str]) -> None:
    if problems:
        pytest.fail("\n".join(problems), pytrace=False)


@pytest.fixture(scope="module")
def tsunax_seen(tmp_path_factory):
    return probe(PACKAGE, tmp_path_factory.mktemp("probe"))


def test_imports_go_down_and_through_doors():
    check(import_problems(PACKAGE))


def test_few_files_ask_how_many_processes_there_are():
    """One process is a null object, `_core/processes.py`, with the methods of several."""
    found = askers(PACKAGE)
    assert set(found) == ASKS_FOR_PROCESSES, found


def test_few_files_ask_for_the_members_of_a_population():
    found = askers_for_members(PACKAGE)
    assert set(found) == ASKS_FOR_MEMBERS, found


def test_a_call_needs_few_files():
    check(too_many_files(PACKAGE, NEEDED))


def test_a_file_too_many_is_named_with_who_asks_for_it(tmp_path):
    package = write(
        tmp_path, {"loop.py": "from tsunax import step", "step.py": "from tsunax import state", "state.py": ""}
    )
    assert too_many_files(package, {"loop": 3}) == []
    (problem,) = too_many_files(package, {"loop": 2})
    assert problem.splitlines() == [
        "loop needs 3 files, 2 at most:",
        "  loop for ",
        "  state for step",
        "  step for loop",
    ]


def test_files_and_functions_are_short():
    check(too_long(PACKAGE))


def test_a_file_and_a_function_that_are_too_long_are_found(tmp_path):
    long = "def f():\n" + "    x = 1\n" * (MOST_LINES_OF_FUNCTION + 1) + "\n" * MOST_LINES
    assert too_long(write(tmp_path, {"short.py": "x = 1\n", "long.py": long})) == [
        f"long.py has {long.count(chr(10))} lines",
        f"long.py: f has {MOST_LINES_OF_FUNCTION + 1} lines without its docstring",
    ]


def test_private_parts_of_jax_are_in_one_file_of_distributed():
    files = [name for name, path in module_files(PACKAGE).items() if name.startswith("distributed")]
    users = [name for name in files if "jax._src" in module_files(PACKAGE)[name].read_text()]
    assert users == ["distributed._peers"]


def test_the_table_of_tiers_is_the_package():
    check(unknown_rooms(PACKAGE))


@pytest.mark.medium
def test_import_has_no_effects(tsunax_seen):
    check(import_effects(tsunax_seen))


def test_public_names(tsunax_seen):
    check(public_problems(tsunax_seen))


def test_public_names_are_documented(tsunax_seen):
    check(unmentioned(tsunax_seen, ROOT))


def test_no_public_name_is_a_modules(tsunax_seen):
    check(shadowing_problems(tsunax_seen))


# --- the checks can fail -----------------------------------------------------------------------


def write(folder: Path, files: dict[str, str]) -> Path:
    package = folder / "tsunax"
    for name, text in {"__init__.py": "__all__ = []\n", **files}.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return package


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"step.py": "from . import _core", "_core/__init__.py": ""}, []),
        ({"step.py": "import jax.tree", "loop.py": "from .step import f"}, []),
        ({"data/ray.py": "import ray", "data/__init__.py": ""}, []),  # the library, not this module
        ({"data/__init__.py": "from .rows import f", "data/rows.py": ""}, []),
        ({"utils.py": ""}, ["utils: not in the table"]),
        ({"step.py": "from .loop import fit", "loop.py": ""}, ["(tier 2) imports loop (tier 4)"]),
        ({"step.py": "from . import loop", "loop.py": ""}, ["imports loop (tier 4)"]),
        ({"step.py": "import tsunax.loop as x", "loop.py": ""}, ["imports loop (tier 4)"]),
        ({"step.py": "from tsunax import loop", "loop.py": ""}, ["imports loop (tier 4)"]),
        ({"step.py": "def f():\n    from .loop import fit", "loop.py": ""}, ["step.py:2: step"]),
        ({"step.py": "from tsunax import setup"}, ["imports __init__ (tier 6)"]),
        ({"data/__init__.py": "", "data/rows.py": "from .. import loop", "loop.py": ""},
         ["data/rows.py:1: data.rows (tier 3) imports loop"]),
        ({"loop.py": "from tsunax.data import _rows", "data/__init__.py": "", "data/_rows.py": ""},
         ["loop.py:1: loop imports data._rows, which is private to data/"]),
        ({"data/__init__.py": "from tsunax.data._rows import f", "data/_rows.py": ""}, []),
        ({"averages.py": "def f():\n    from tsunax import _step", "_step.py": "import tsunax.averages"},
         ["averages (tier 1) imports _step", "cycle: _step -> averages -> _step"]),
        ({"averages.py": "from tsunax import program", "program.py": ""}, ["averages (tier 1) imports program"]),
        ({"state.py": "from .step import f", "step.py": "from .hyper import g",
          "hyper.py": "from .state import h"}, ["cycle: hyper -> state -> step -> hyper"]),
    ],
)  # fmt: skip
def test_wrong_imports_are_found(tmp_path, files, expected):
    problems = import_problems(write(tmp_path, files))
    assert len(problems) == len(expected), problems
    for text, problem in zip(expected, problems, strict=True):
        assert text in problem


def test_questions_for_processes_are_found(tmp_path):
    lines = """import tsunax.distributed
from tsunax.distributed import agree
from tsunax import distributed
from jax import process_count
x = jax.process_count() == 1
y = jax.process_index()
z = everyone.count > 1
w = processes.current().count
from tsunax.distributed.ray import library
places = {device.process_index for device in mesh.devices.flat}
n = text.count("a") + everyone.index"""
    package = write(tmp_path, {"loop.py": lines, "distributed/__init__.py": lines})
    assert sorted(int(text.partition(":")[0]) for text in askers(package)["loop"]) == [*range(1, 10)]
    assert len(askers(package)) == 1


def test_questions_for_members_are_found(tmp_path):
    lines = """from tsunax.states import members_of
from tsunax.states import over_members
n = state.clock.shape[:-1]
n = jnp.ndim(state.clock)
n = np.shape(self.clock)[0]
step = state.clock[0]"""
    package = write(tmp_path, {"loop.py": lines, "populations.py": lines})
    asks = askers_for_members(package)
    assert sorted(int(text.partition(":")[0]) for text in asks["loop"]) == [1, 3, 4, 5]
    assert len(asks) == 1


def test_a_room_that_is_gone_is_found(tmp_path):
    package = write(tmp_path, {f"{room}.py": "" for room in TIER if room not in ("loop", "__init__")})
    assert unknown_rooms(package) == ["loop: in the table of tiers, and not in tsunax/."]


@pytest.mark.medium
def test_wrong_effects_are_found(tmp_path):
    wrong = write(
        tmp_path,
        {
            "__init__.py": """
import logging, os, signal, sys
import rich
from tsunax import ray
import jax.numpy as jnp
_ONE = jnp.ones(1)
os.environ["TSUNAX_WAS_HERE"] = "1"
signal.signal(signal.SIGTERM, lambda *_: None)
logging.basicConfig(level=logging.INFO)
print("hello")
print("warning", file=sys.stderr)
__all__ = []
""",
            "ray.py": "",
        },
    )
    # tsunax.ray is not ray.
    assert [re.sub(r"[.:(].*", "", p).strip() for p in import_effects(probe(wrong, tmp_path))] == [
        "import tsunax loads rich",
        "import tsunax starts a backend",
        "import tsunax changes the environment",
        "import tsunax changes the signal handlers",
        "import tsunax changes the root log handlers",
        "import tsunax changes the root log level",
        r"import tsunax prints 'hello\nwarning\n'",
    ]


@pytest.mark.medium
def test_wrong_public_names_are_found(tmp_path):
    wrong = write(
        tmp_path,
        {
            "__init__.py": '''
import dataclasses as _dataclasses, functools, importlib as _importlib
from .losses import mse
from .metrics import metrics
from . import rules

@_dataclasses.dataclass
class Bare:
    x: int

def setup():
    """Documented."""

def __getattr__(name):
    if name in ("search", "Lazy"):
        return getattr(_importlib.import_module("tsunax.search"), name)
    raise AttributeError(name)

LIMIT = 3
_hidden = 1
__all__ = ["mse", "metrics", "rules", "Bare", "setup", "search", "Lazy", "LIMIT", "gone", "_hidden",
           "setup"]
''',
            "losses.py": "def mse(): pass",
            "metrics.py": "def metrics(): 'Doc.'",
            "rules.py": "",
            "search.py": "def search(): 'Doc.'\nclass Lazy: 'Doc.'",
            "step.py": "",
        },
    )
    seen = probe(wrong, tmp_path)
    assert [problem.partition(". ")[0] for problem in public_problems(seen)] == [
        "__all__ lists setup twice",
        "__all__ lists _hidden, which is private",
        "__all__ lists gone, which tsunax does not have",
        "dir(tsunax) does not show Lazy of __all__",
        "dir(tsunax) does not show search of __all__",
        "tsunax.functools is public, but not in __all__",
        "tsunax.Bare has no docstring",
        "tsunax.mse has no docstring",
    ]
    assert [problem.split()[0] for problem in shadowing_problems(seen)] == ["tsunax.metrics", "tsunax.search"]
    docs = tmp_path / "docs"
    docs.mkdir()
    (tmp_path / "README.md").write_text("`setup(x)`, `mse`; the metrics and rules; ts.LIMIT\n")
    (docs / "api.md").write_text("```\n   Bare\n   search\n```\ntsunax.Lazy\n")
    (docs / "decisions.md").write_text("`gone`\n")
    assert [problem.split()[0] for problem in unmentioned(seen, tmp_path)] == [
        "tsunax._hidden",
        "tsunax.gone",
        "tsunax.metrics",
        "tsunax.rules",
    ]


@pytest.mark.medium
def test_a_package_that_cannot_be_imported_is_reported(tmp_path):
    wrong = write(tmp_path, {"__init__.py": "import warnings; warnings.warn('old')\n"})
    with pytest.raises(AssertionError, match="UserWarning: old"):
        probe(wrong, tmp_path)


def test_the_contributors_page_has_the_tiers():
    page = (ROOT / "docs" / "contributors.md").read_text().partition("## Folders\n\n```\n")[2].partition("```")[0]
    rooms = set(re.findall(r"[\w.]+", " ".join(line[35:] for line in page.splitlines()).replace("__init__.pyi", "")))
    assert rooms == set(TIER) - {"__init__", "__main__"}


def test_signposts_lead_somewhere():
    """Every `file`: `function` of the contributors' page is there."""
    page = (
        (ROOT / "docs" / "contributors.md").read_text().partition("## Where to find the code")[2].partition("\n## ")[0]
    )
    rows = [cell for line in page.splitlines()[4:] if line.startswith("|") for cell in line.split("|")[2].split(";")]
    assert len(rows) > 10
    for cell in rows:
        file, *names = re.findall("`([^`]+)`", cell)
        text = (ROOT / "tsunax" / file).read_text()
        for name in names:
            assert re.search(rf"^\s*(def|class) {name}\b", text, re.M) or "=" in name, (file, name)


def test_a_deprecated_name_works_warns_and_is_not_listed(tmp_path, monkeypatch):
    (tmp_path / "old_names").mkdir()
    (tmp_path / "old_names" / "__init__.py").write_text(
        "from tsunax._core import lazy\n\n__all__, __getattr__, __dir__ = lazy(globals())\n"
    )
    (tmp_path / "old_names" / "__init__.pyi").write_text(
        "from math import sqrt as sqrt\nfrom math import sqrt as square_root  # deprecated: sqrt\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    package = importlib.import_module("old_names")
    with pytest.warns(DeprecationWarning, match=r"old_names\.square_root is deprecated: use sqrt\.") as seen:
        assert package.square_root(9) == 3
    assert seen[0].filename == __file__ and package.__all__ == ["sqrt"] == dir(package)
    assert package.sqrt(4) == 2
