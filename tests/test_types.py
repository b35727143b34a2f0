"""What a type checker sees of tsunax: the mistakes in a user's script, and few places without a type."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

pytestmark = [
    pytest.mark.slow,  # half a minute; .ci/run runs it where pyright is
    pytest.mark.skipif(
        importlib.util.find_spec("pyright") is None, reason="pyright is not installed: scripts/install brings it"
    ),
]

SCRIPT = """
import numpy as np
import tsunax as ts

x = np.ones((8, 4), np.float32)


def loss_fn(params, batch):
    return ts.Loss.mean((batch @ params["w"]) ** 2)


rule = ts.rules.chain(ts.rules.clip_by_global_norm(1.0), ts.rules.adam(1e-3, b1=0.8))
state = ts.setup(rule, {"w": np.ones(4, np.float32)}, key=0, ema=0.99)
step = ts.train_step(loss_fn, accumulate=2)
state, info = step(state, x)
state = ts.adjust(ts.freeze(state, "w"), learning_rate=0.1)
state, history = ts.fit(step, state, ts.batches(x, 4), epochs=2, progress=False, evaluate=lambda state: {"val": 0.0})
print(ts.hyperparams(state), info.loss, info.applied, state.step, history["loss"])
"""

# What a user writes by mistake, and the rule of pyright that names it.
MISTAKES = {
    "a missing argument": ("ts.setup(ts.rules.adam(1e-3))", "reportCallIssue"),
    "a missing number of a rule": ("ts.rules.clip_by_global_norm()", "reportCallIssue"),
    "a wrong keyword of fit": ("ts.fit(step, state, [x], epoch=3)", "reportCallIssue"),
    "a wrong keyword of setup": ("ts.setup(rule, {'w': x}, seed=3)", "reportCallIssue"),
    "a wrong keyword of train_step": ("ts.train_step(loss_fn, accumulation=3)", "reportCallIssue"),
    "another library's keyword": ("ts.rules.adam(lr=1e-3)", "reportCallIssue"),
    "a wrong keyword of a schedule": ("ts.schedules.cosine_decay_schedule(1e-3, steps=9)", "reportCallIssue"),
    "a text for a number": ("ts.fit(step, state, [x], epochs='three')", "reportArgumentType"),
    "a number for a function": ("ts.train_step(3)", "reportArgumentType"),
    "a field that the state has not": ("state.parameters", "reportAttributeAccessIssue"),
    "a field that the info has not": ("step(state, x)[1].gradient", "reportAttributeAccessIssue"),
    "a name that is not at the top": ("ts.train_steps", "reportAttributeAccessIssue"),
    "a rule that is not there": ("ts.rules.adamm(1e-3)", "reportAttributeAccessIssue"),
    "a number for a checkpoint": ("ts.fit(step, state, [x], epochs=3, checkpoint=7)", "reportArgumentType"),
    "an array for a precision": ("ts.setup(rule, {'w': x}, precision=x)", "reportArgumentType"),
    "a number for data": ("ts.fit(step, state, 3, epochs=3)", "reportArgumentType"),
    "a wrong keyword of batches": ("ts.batches(x, 4, drop_last=True)", "reportCallIssue"),
    "a field that the history has not": (
        "ts.fit(step, state, [x], epochs=3)[1].loss_curve()",
        "reportAttributeAccessIssue",
    ),
    "the state in the place of the info": ("ts.update(state, x)[0].grad_norm", "reportAttributeAccessIssue"),
    "a comparison of a Loss": ("ts.Loss.mean(x) < 3", "reportOperatorIssue"),
}

# Of the public symbols those with a full type, in percent: 100 when this was last raised, and what an environment with
# other libraries may take from it.
KNOWN = 99.9


def pyright(*arguments, folder):
    # --verifytypes takes the libraries of the first Python in PATH, whatever --pythonpath says
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path}
    command = [sys.executable, "-m", "pyright", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300).stdout


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[int, set[str]]:
    """The rules that pyright names, by line of the script with a mistake on each line after it."""
    folder = tmp_path_factory.mktemp("script")
    (folder / "script.py").write_text(SCRIPT + "\n".join(text for text, _ in MISTAKES.values()))
    (folder / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(ROOT)], "reportUnusedExpression": False}))
    report = json.loads(pyright("--outputjson", "--pythonpath", sys.executable, "script.py", folder=folder))
    lines: dict[int, set[str]] = {}
    for one in report["generalDiagnostics"]:
        if one["severity"] == "error":
            lines.setdefault(one["range"]["start"]["line"], set()).add(one.get("rule", one["message"]))
    return lines


def test_a_good_script_has_no_errors(found):
    assert not {line: found[line] for line in found if line < SCRIPT.count("\n")}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found(name, found):
    assert MISTAKES[name][1] in found.get(SCRIPT.count("\n") + list(MISTAKES).index(name), set())


def test_public_names_have_types(capsys):
    said = pyright("--verifytypes", "tsunax", "--ignoreexternal", folder=ROOT)
    score = float(re.search(r"completeness score: ([\d.]+)%", said)[1])
    with capsys.disabled():
        print(f"\npublic symbols with a full type: {score} %")
    assert score >= KNOWN, said[-3000:]
