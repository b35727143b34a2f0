"""Which checkpoint is taken, and how it is read: the newest good one, on all processes alike."""

import dataclasses
import itertools
import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tsunax._core import Function, PyTree, checks, durable_files, trees
from tsunax._step.finite_state import warn_if_not_finite
from tsunax.checkpoints import (
    _background,
    _blocks,
    _matching,
    _writing,
    checksums,
    leaves,
    merging,
    state_facts,
)
from tsunax.checkpoints import manifest as _manifest
from tsunax.checkpoints.manifest import Restored
from tsunax.errors import CheckpointError, StateError, warn
from tsunax.state import Clocked


def newest(
    saver: Any,
    like: PyTree,
    step: int | str | None,
    resume: str,
    options: Mapping,
    read: Callable[[int], Restored],
) -> Restored:
    """`read(step)` for the newest good checkpoint of a saver, for its best, or for a given step."""
    checks.check_choice(resume, "restore()", "resume", ("auto", "must", "never"))
    saver.everyone.compare("restore()", lambda: {"resume": resume, **options}, saver.timeout + 10)

    def look():
        saver.wait()
        _writing.check_members(leaves.tree_of(like), "restore()")
        strangers = saver.home.strangers()  # first: a writer may make the first step meanwhile
        steps = _by_metric(saver) if step == "best" else saver.home.steps()
        return None, json.dumps([steps, [] if steps else strangers])

    steps, strangers = json.loads(saver.together("restore()", look)[1][0])
    if resume == "never" and steps:
        raise CheckpointError(
            "steps",
            str(saver.path),
            got=_listed(steps),
            expected="none: resume='never'",
            fix="Give another path, or delete them yourself.",
        )
    if resume == "never":
        return Restored(like)
    candidates = _candidates(saver, step, steps)
    restored, problems = first_good(saver, candidates, read, may_be_replaced=step is None)
    if restored is not None:
        return restored
    if saver.read_only and candidates and not problems:  # the writer deleted all that were listed
        return newest(saver, like, step, resume, options, read)
    if problems:
        raise CheckpointError(
            "checkpoints",
            str(saver.path),
            got=trees.listed(problems, 10, "; "),
            expected="a good one",
            fix="Give an earlier step, or another path.",
        )
    if strangers or resume == "must":
        raise CheckpointError(
            "checkpoints",
            str(saver.path),
            got=trees.listed([*map(repr, strangers)], 10) or "nothing",
            expected="at least one step",
            fix="Give the directory that has the steps in it; to start afresh, once "
            "resume='never'.",
        )
    return Restored(like)


def _candidates(saver, step: int | str | None, steps: list[int]) -> list[int]:
    """The steps that `restore(step=)` may take, the first choice last."""
    if step is None or (step == "best" and steps):
        return steps
    if step == "best":
        raise CheckpointError(
            "step",
            "restore()",
            got="'best'",
            expected="Checkpoints(keep_best=Best(metric)), and steps saved with that metric",
        )
    if isinstance(step, str) or step not in steps:
        raise CheckpointError(
            "checkpoint", str(saver.path), got=f"step {step}", expected=f"one of {_listed(steps)}"
        )
    return [int(step)]


def first_good(
    saver: Any, candidates: list[int], read: Callable[[int], Restored], may_be_replaced: bool
) -> tuple[Restored | None, list[str]]:
    """The last candidate that is good, and the problems of those after it, which it warns of."""
    problems: list[str] = []
    for checkpoint_step in reversed(candidates):
        try:
            restored = read(checkpoint_step)
        except leaves.Damaged as error:
            look = lambda step=checkpoint_step: (
                None,
                str(saver.home.directory_of(step) is not None),
            )
            if may_be_replaced and saver.together("restore()", look)[1][0] != "True":
                continue  # a writer replaced it meanwhile
            saver.home.bad[checkpoint_step] = str(error)
            problems.append(f"step {checkpoint_step}: {error}")
            continue
        for problem in problems:
            warn(f"checkpoint skipped in {saver.path}, {problem}.")
        return restored, problems
    return None, problems


def _by_metric(saver) -> list[int]:
    """The steps by the metric of `keep_best`, the best last."""
    if saver.keep_best is None:
        return []
    metrics = saver.metrics()
    return dataclasses.replace(saver.keep_best, k=len(metrics) or 1).of(metrics)[::-1]


def _listed(steps: list[int]) -> str:
    return trees.listed([*map(str, steps)], 10) or "none"


def read(saver: Any, step: int, plan_of: Function, skips_optimizer: bool = False) -> Restored:
    """One checkpoint: compared, then read, then verified. Raises Damaged, CheckpointError.

    `plan_of(manifest, folder)` is the `RestorePlan`. Without the optimizer, values of the user
    stay in the checkpoint, too.
    """
    folder, name = saver.path / str(step), f"restore of step {step}"

    def describe():
        try:
            manifest = saver.home.manifest(step)
        except leaves.TooNew as error:
            raise CheckpointError(
                "checkpoint",
                str(folder),
                got=error,
                expected=f"format {_manifest.FORMAT} or earlier: update tsunax",
            ) from None
        return manifest, durable_files.sha256(manifest.dump())

    def read_arrays():
        plan = plan_of(manifest, folder)
        parts = [] if skips_optimizer else _parts(saver, manifest, len(digests))
        arrays = [x for part in parts for x in part.arrays]
        saved_leaves = [*(pair.saved for pair in plan.pairs), *arrays]
        needed = [*map(plan.needed, plan.pairs), *[None] * len(arrays)]
        place = plan.placing()  # here, because a thread has another default device
        values, sums = _background.bounded(
            lambda: saver.home.read(step, manifest, saved_leaves, needed, place),
            saver.timeout,
            name,
        )
        return (plan, parts, iter(values)), plan.word(sums)

    # The code after each of these may run programs over all devices: every process has to be there.
    manifest, digests = saver.together(f"{name}: manifest", describe)
    if len(set(digests)) > 1:
        raise leaves.Damaged("manifest: processes read different ones; is it one directory?")
    (plan, parts, values), words = saver.together(f"{name}: arrays", read_arrays)
    plan.check(words)
    state = plan.filled(list(itertools.islice(values, len(plan.pairs))))
    for x in leaves.tree_of(state).states.values():
        warn_if_not_finite(x, name)
    for note in plan.edited:
        warn(f"edited in the script since the run was set up, {note}: the script's is used.")
    user_values: dict[str, Any] = {}
    for part in parts:
        arrays = dict(enumerate(itertools.islice(values, len(part.arrays))))
        user_values |= {key: _manifest.decode(x, arrays) for key, x in part.values.items()}
    names = ("data", "history", "callbacks", "script")
    values_by_name = {key: user_values.get(key) for key in names}
    return Restored(state, step=step, is_edited=bool(plan.edited), **values_by_name)


def contents(saver: Any, step: int) -> Restored:
    """Data, history, callbacks and script of a checkpoint; its `state` has only the clocks."""
    return read(saver, step, _matching.plan_of_clocks)


def as_saved(saver: Any, step: int, like: PyTree) -> Restored:
    """A checkpoint with all of its numbers and frozen flags, also if the script has edited them."""
    without_flags = lambda _, s: merging.without_flags(s)
    like = _matching.map_states(like, leaves.tree_of(like), without_flags)
    plan = _matching.RestoreRequest(like).plan
    plan_of = lambda manifest, folder: dataclasses.replace(
        plan(manifest, folder), merges={}, edited=[]
    )
    return read(saver, step, plan_of)


def resumed(saver: Any, state: PyTree, resume: str) -> Restored:
    """Where `fit` continues: the newest good checkpoint, or `state` if it is further."""
    read_newer = lambda step: newer_of_checkpoint_and_state(saver, step, state)
    return newest(saver, state, None, resume, {}, read_newer)


def newer_of_checkpoint_and_state(saver: Any, checkpoint_step: int, state: PyTree) -> Restored:
    """The checkpoint of a step, or the given state with the other parts of the checkpoint.

    A fresh state, or the run's initial state, is replaced by the checkpoint. For any other state
    the calls decide; with as many calls as the checkpoint has, the run continues from the state.
    """
    plan_of, calls = _matching.RestoreRequest(state).plan, state_facts.total_calls(state)
    if not calls:
        return read(saver, checkpoint_step, plan_of)
    restored = contents(saver, checkpoint_step)
    saved_calls = int(sum(np.sum(clock[..., 1]) for clock in restored.state))
    script = restored.script
    calls_at_start = script.get("calls") if isinstance(script, dict) else 0
    step = _writing.step_to_save(leaves.tree_of(state), None)
    newest = f"step {checkpoint_step}, the newest in {saver.path}"
    text = f"fit(): the state given is at step {step}, the checkpoint at {newest}"
    is_initial = calls == calls_at_start
    # The initial state of the run is replaced in any case, without a warning.
    if calls < saved_calls or (is_initial and calls != saved_calls):
        if not is_initial:
            warn(f"{text}: the checkpoint's goes on. For the state given, give another path.")
        return read(saver, checkpoint_step, plan_of)
    # A tree of several states has no clock, so the position in its data is not known.
    if step < checkpoint_step or (calls > saved_calls and not isinstance(state, Clocked)):
        raise StateError(
            "state",
            "fit()",
            got=f"step {step} after {calls} calls",
            expected=f"a fresh state, or {newest}, or later",
            fix="For this state, give another path.",
        )
    if calls > saved_calls:
        warn(f"{text}: the state given goes on, from where the data is now.")
        return dataclasses.replace(restored, state=state, data=None)
    if different := changed_leaves(saver, checkpoint_step, state):
        warn(f"{text}, and differs from it: {trees.listed(different, 4)}. It goes on.")
    return dataclasses.replace(restored, state=state)


def changed_leaves(saver: Any, checkpoint_step: int, state: PyTree) -> list[str]:
    """The leaves of a state that differ from the saved ones, by their hashes: no array is read."""
    tree = leaves.tree_of(state)

    def look():
        described, blocks = _writing.copied(tree, saver.process)
        by_name = {leaf.name: leaf for leaf in described}
        hashes = _blocks.hashes_of(by_name, blocks, blocks.__getitem__)()
        sums = json.dumps(_blocks.leaf_sums(hashes))
        return (described, saver.home.manifest(checkpoint_step)), sums

    (described, manifest), words = saver.together(f"leaves of step {checkpoint_step}", look)
    sums_of_processes = [json.loads(word) for word in words]
    total = lambda leaf: (
        sum(sums.get(leaf.name, 0) for sums in sums_of_processes) % checksums.MODULUS
    )
    is_of_flags = lambda path: path[-1] == ".frozen"
    idle_flags = {
        path for path, x in tree.leaves if is_of_flags(path) and not np.any(np.asarray(x))
    }
    in_hand = {leaf.path: dataclasses.replace(leaf, hash=total(leaf)) for leaf in described}
    saved = {leaf.path: leaf for leaf in manifest.leaves}
    paths = [path for path in in_hand | saved if in_hand.get(path) != saved.get(path)]
    # After a freeze and a thaw, a state has flags without a frozen leaf: that is no difference.
    paths = [path for path in paths if path in saved or path not in idle_flags]
    names = [leaves.show("state", path) for path in paths if ".numbers" not in path]
    has_numbers = len(names) < len(paths)
    return ["hyperparameters", *names] if has_numbers else names


def _parts(saver, manifest: _manifest.Manifest, count: int) -> list[_manifest.Parts]:
    """Data, history and callbacks of the first of `count` processes, then of this process."""
    first = manifest.parts[:1]
    if len(manifest.parts) == count:
        return first + (manifest.parts[saver.process : saver.process + 1] if saver.process else [])
    if any("data" in part.values for part in manifest.parts[1:]):  # each has its own place
        raise CheckpointError(
            "positions of the data",
            str(saver.path),
            got=f"one of each of {len(manifest.parts)} processes",
            expected=f"{count}",
            fix="Go on with as many; or restore(like, params_only=True), and start the data anew.",
        )
    return first
