"""Which checkpoint is taken, and how it is read: the newest good one, on all processes alike."""

import dataclasses
import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tsunax._core import checks, durable_files, trees
from tsunax._step.finite_state import warn_if_not_finite
from tsunax.checkpoints import (
    _blocks,
    _host_copies,
    _matching,
    _user_values,
    checksums,
    leaves,
    state_facts,
)
from tsunax.checkpoints import manifest as _manifest
from tsunax.checkpoints._background import bounded
from tsunax.checkpoints.leaves import Damaged, TooNew
from tsunax.checkpoints.manifest import Manifest, Parts
from tsunax.errors import CheckpointError, StateError, WrongTypeError, warn
from tsunax.states import COUNTED

__all__ = ["Restored"]


@dataclass(frozen=True)
class Restored:
    """What `Checkpoints.restore` found: `checkpoints.restore(like).state`.

    `step` is None if there was nothing, and `state` is what was given. `data`, `history` and
    `callbacks` are those of `save`, or None; `script` is a dict of the settings of `fit`, or None.
    """

    state: Any
    data: Any = None
    history: Any = None
    callbacks: Any = None
    step: int | None = None
    script: Any = None


def newest(
    run, like, step: int | str | None, resume: str, alike: Mapping, read: Callable[[int], Restored]
) -> Restored:
    """`read(step)` of a `Checkpoints`: the newest good one, the best, or that of a given step."""
    if not checks.is_one_of(resume, ("auto", "must", "never")):
        got, expected = trees.describe(resume), "'auto', 'must' or 'never'"
        raise WrongTypeError("resume", "restore()", got, expected)
    settings = {"resume": resume, **alike}
    run.everyone.compare("restore()", lambda: settings, run.timeout + 10)
    where = str(run.path)

    def look():
        run.wait()
        _host_copies.check_members(leaves.tree_of(like), "restore()")
        strangers = run.home.strangers()  # first: a writer may make the first step meanwhile
        steps = _by_metric(run) if step == "best" else run.home.steps()
        return None, json.dumps([steps, [] if steps else strangers])

    found, strangers = json.loads(run.together("restore()", look)[1][0])
    if resume == "never":
        if found:
            got, fix = f"steps {_brief(found)}", "Give another path, or delete them yourself."
            raise CheckpointError("checkpoints", where, got, "none: resume='never'", fix)
        return Restored(like)
    if isinstance(step, str):
        if step != "best" or not found:
            expected = "a step, or 'best' where metrics were saved"
            fix = f"{run.keep_best} is in none of them." if step == "best" else ""
            raise CheckpointError("step", "restore()", repr(step), expected, fix)
    elif step is not None:
        checks.check_count(step, "restore()", "step", 0)
        if step not in found:
            raise CheckpointError("checkpoint", where, f"step {step}", f"one of {_brief(found)}")
        found = [int(step)]
    problems: list[str] = []
    for at in reversed(found):
        try:
            restored = read(at)
        except Damaged as error:
            there = lambda at=at: (None, str(run.home.directory_of(at) is not None))
            if step is None and run.together("restore()", there)[1][0] != "True":
                continue  # a writer replaced it meanwhile
            run.home.bad[at] = str(error)
            problems.append(f"step {at}: {error}")
            continue
        for problem in problems:
            warn(f"checkpoint skipped in {where}, {problem}.")
        return restored
    if run.read_only and step is None and found and not problems:
        return newest(run, like, step, resume, alike, read)
    if problems:
        fix = "restore() without step= takes an older one."
        fix = "To start afresh, give another path." if step is None else fix
        got = trees.listed(problems, 10, "; ")
        raise CheckpointError("checkpoints", where, got, "a good one", fix)
    if strangers or resume == "must":
        names = trees.listed([*map(repr, strangers)], 10)
        got = f"none among {names}" if strangers else "none"
        expected = "at least one" + ": resume='must'" * (resume == "must")
        fix = "Give the directory that has the steps in it; to start afresh, an empty one, "
        fix += "or once resume='never'."
        raise CheckpointError("checkpoints", where, got, expected, fix * bool(strangers))
    return Restored(like)


def _by_metric(run) -> list[int]:
    if run.keep_best is None:
        fix = "Say what is best: Checkpoints(path, keep_best=Best('val/loss', mode='min'))."
        raise CheckpointError("step", "restore()", "'best' without keep_best=", "a step", fix)
    known = run.metrics()
    return dataclasses.replace(run.keep_best, k=len(known) or 1).of(known)[::-1]


def _brief(steps: list[int]) -> str:
    if len(steps) > 10:
        return f"{steps[0]} … {steps[-1]} ({len(steps)} steps)"
    return ", ".join(map(str, steps)) or "none"


def read(run, step: int, how: _matching.RestoreRequest | _matching.Clocks) -> Restored:
    """One checkpoint: compared, then read, then verified. Raises Damaged, CheckpointError."""
    folder, name = run.path / str(step), f"restore of step {step}"

    def describe():
        try:
            manifest = run.home.manifest(step)
        except TooNew as error:
            expected = f"format {_manifest.FORMAT} or earlier"
            parts = "checkpoint", str(folder), error, expected, "Update tsunax."
            raise CheckpointError(*parts) from None
        return manifest, durable_files.sha256(manifest.dump())

    def read_arrays():
        plan = how.plan(manifest, folder)
        parts = [] if how.skips_optimizer else _parts(run, manifest, len(digests))
        arrays = [x for part in parts for x in part.arrays]
        wanted = [*(pair.saved for pair in plan.pairs), *arrays]
        needed = [*map(plan.needed, plan.pairs), *[None] * len(arrays)]
        place = plan.placing()  # not in the thread: it has another default device
        load = lambda: run.home.read(step, manifest, wanted, needed, place)
        found, sums = bounded(load, run.timeout, name)
        return (plan, parts, found), plan.word(sums)

    # what follows each of these may run programs over all devices: every process has to be there
    manifest, digests = run.together(f"{name}: manifest", describe)
    if len(set(digests)) > 1:
        raise Damaged("manifest: processes read different ones; is it one directory?")
    (plan, parts, found), words = run.together(f"{name}: arrays", read_arrays)
    plan.check(words)
    found = iter(found)
    state = plan.filled(list(itertools.islice(found, len(plan.pairs))))
    for x in leaves.tree_of(state).states.values():
        warn_if_not_finite(x, name)
    for note in plan.edited:
        warn(f"edited in the script since the run was set up, {note}: the script's is used.")
    values: dict[str, Any] = {}
    for part in parts:
        own = list(itertools.islice(found, len(part.arrays)))
        values |= {key: _user_values.decode(x, own) for key, x in part.values.items()}
    names = ("data", "history", "callbacks", "script")
    return Restored(state, step=step, **{key: values.get(key) for key in names})


def later(run, at: int, state) -> Restored:
    """The checkpoint of step `at`, or the state in hand with the checkpoint's other parts.

    A state that was never called, or as often as the one that the run began with, takes the
    checkpoint. Of any other the calls decide; of equal ones the state in hand goes on.
    """
    whole, calls = _matching.RestoreRequest(state, is_fit=True), state_facts.total_calls(state)
    if not calls:
        return read(run, at, whole)
    there = read(run, at, _matching.Clocks())
    saved = int(sum(np.sum(clock[..., 1]) for clock in there.state))
    began = there.script.get("calls") if isinstance(there.script, dict) else 0
    steps = _host_copies.step_to_save(leaves.tree_of(state), None)
    here = f"fit(): the state given is at step {steps}"
    newest = f"the newest checkpoint in {run.path}"
    if calls < saved or calls == began != saved:
        if calls != began:
            text = f"{here}, {newest} at step {at}: the checkpoint's goes on"
            warn(f"{text}. For the state given, give another path.")
        return read(run, at, whole)
    got = f"step {steps} after {calls} calls"
    if steps < at:
        fix = "Give another path; or a fresh state, which takes the checkpoint."
        raise StateError("state", "fit()", got, f"step {at} or later, as {newest}", fix)
    if calls > saved:
        if not isinstance(state, COUNTED):
            fix = "A tree of others has no clock of its own: give another path."
            raise StateError("state", "fit()", got, "a TrainState, or a fresh tree", fix)
        text = f"{here}, {newest} at step {at}: the state given goes on"
        warn(f"{text}, from where the data is now.")
        return dataclasses.replace(there, state=state, data=None)
    if changed_leaves := _changed_leaves(run, at, state):
        text = f"{here}, as {newest}, and differs from it: {trees.listed(changed_leaves, 4)}"
        warn(f"{text}. The state given goes on.")
    return dataclasses.replace(there, state=state)


def _changed_leaves(run, at: int, state) -> list[str]:
    """The leaves of a state that differ from the saved ones, by their hashes: no array is read."""
    tree, name = leaves.tree_of(state), f"restore of step {at}: leaves"
    is_saved = lambda: (None, str(run.has_saved(state)))
    if {*run.together(f"{name}, by identity", is_saved)[1]} == {"True"}:
        return []

    def look():
        described, blocks = _host_copies.copied(tree, run.process)
        by_name = {leaf.name: leaf for leaf in described}
        hashes = _blocks.hashes_of(by_name, blocks, lambda block, _: blocks[block])()
        return (described, run.home.manifest(at)), json.dumps(_blocks.leaf_sums(hashes))

    (described, manifest), words = run.together(name, look)
    sums = [json.loads(word) for word in words]
    total = lambda leaf: sum(of.get(leaf.name, 0) for of in sums) % checksums.MODULUS
    flags = {path for path, x in tree.leaves if path[-1] == ".frozen" and not np.any(np.asarray(x))}
    in_hand = {leaf.path: dataclasses.replace(leaf, hash=total(leaf)) for leaf in described}
    saved = {leaf.path: leaf for leaf in manifest.leaves}
    paths = [path for path in in_hand | saved if in_hand.get(path) != saved.get(path)]
    # room for frozen leaves that nothing fills: a freeze that was taken back
    paths = [path for path in paths if path in saved or path not in flags]
    numbers = ["hyperparameters"] * any(".numbers" in path for path in paths)
    return numbers + [leaves.show("state", path) for path in paths if ".numbers" not in path]


def _parts(run, manifest: Manifest, count: int) -> list[Parts]:
    """Data, history and callbacks of the first process, then those of this one of `count`."""
    first = manifest.parts[:1]
    if len(manifest.parts) == count:
        return first + manifest.parts[run.process : run.process + 1] * bool(run.process)
    if any("data" in part.values for part in manifest.parts[1:]):  # each at a place of its own
        got = f"those of {len(manifest.parts)} processes, each at its own"
        where = str(run.path / str(manifest.step))
        fix = "Go on with as many; or take the state, restore(like, params_only=True), "
        fix += "and start the data anew."
        raise CheckpointError("places of the data", where, got, f"{count}", fix)
    return first
