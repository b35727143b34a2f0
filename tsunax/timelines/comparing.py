"""Two runs side by side, from the manifests of their checkpoints: no array is read.

A manifest has a hash of each leaf, so two checkpoints of a step are compared without their arrays.
"""

import contextlib
import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tsunax._core import Figure, Function, PyTree, tables, trees
from tsunax.checkpoints import leaves, reading
from tsunax.checkpoints.edits import Edit, edits_of_line, parse_edits
from tsunax.checkpoints.manifest import Manifest
from tsunax.checkpoints.saving import Checkpoints, Restored
from tsunax.run.history import History


class SavedRun:
    """The checkpoints of a run, read from their manifests."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self.checkpoints: Checkpoints = checkpoints
        self._values: dict[int, Restored] = {}

    @property
    def steps(self) -> list[int]:
        return self.checkpoints.home.steps()

    def manifest(self, step: int) -> Manifest:
        return self.checkpoints.home.manifest(step)

    def values(self, step: int) -> Restored:
        """Data, history, callbacks and script of a checkpoint; of its state only the counts."""
        if step not in self._values:
            self._values[step] = reading.contents(self.checkpoints, step)
        return self._values[step]

    def script(self, step: int) -> Mapping[str, Any]:
        """The facts that `fit` saved about its script; none if another loop made the checkpoint."""
        script = self.values(step).script
        return script if isinstance(script, dict) else {}

    @property
    def newest(self) -> int | None:
        """The step of the newest checkpoint that can be read; None for none."""
        return self.first_readable(reversed(self.steps))

    def first_readable(self, steps: Iterable[int]) -> int | None:
        """The first of these checkpoints that can be read; None for none."""
        for step in steps:
            with contextlib.suppress(leaves.Damaged):
                self.values(step)
                return step
        return None

    def edits(self, step: int | None = None) -> list[Edit]:
        """The edits of the line up to a checkpoint: the newest one, or the checkpoint of a step."""
        return edits_of_line(self.all_edits(self.newest if step is None else step))

    def all_edits(self, step: int | None) -> list[Edit]:
        """The edits that a checkpoint has, also of calls that a rewind left, in their order."""
        return [] if step is None else parse_edits(self.script(step).get("edits"))

    def calls(self, step: int) -> int:
        """The calls of the state in a checkpoint."""
        return max((int(np.max(clock[..., 1])) for clock in self.values(step).state), default=0)

    def broken_links(self) -> list[str]:
        """The checkpoints with other contents than later checkpoints have links to."""
        faults, links = [], dict[int, set[str]]()
        for step in reversed(self.steps):
            try:
                manifest = self.manifest(step)
            except leaves.Damaged as error:
                faults.append(f"checkpoint {step}: {error}")
                continue
            for linked_step, link in manifest.links.items():
                links.setdefault(linked_step, set()).add(link)
            # checkpoints of an earlier version have no link
            if step in links and links[step] != {manifest.link()}:
                saved_links = ", ".join(sorted(links[step]))
                text = f"its contents have link {manifest.link()}, but saved was {saved_links}"
                faults.append(f"checkpoint {step}: {text}")
        return faults

    def forget(self) -> None:
        """Read manifests again, because a run may save meanwhile."""
        self._values.clear()

    def history(self) -> History:
        newest = self.newest
        saved = None if newest is None else self.values(newest).history
        if isinstance(saved, Mapping) and "rows" in saved:  # not of an own loop
            return History.of(saved)
        return History()

    def is_looped(self) -> bool:
        """Whether the steps ran in a compiled loop; not with `steps_per_call=None`."""
        if (newest := self.newest) is None:
            return True
        script = self.script(newest)
        is_of_fit = bool(script)  # else the user's loop called the step
        return bool(script.get("is_looped", is_of_fit))

    def compared(self, second: "SavedRun") -> "Comparison":
        """A comparison of this run with a second run."""
        common = sorted({*self.steps} & {*second.steps})
        different = {step: changed_leaves(self.manifest(step), second.manifest(step))
                     for step in common}  # fmt: skip
        first = next((step for step in common if different[step]), None)
        steps = [(run, run.newest) for run in (self, second)]
        newest = [{} if step is None else run.script(step) for run, step in steps]
        settings = [script.get("settings", {}) for script in newest]
        names = dict.fromkeys(itertools.chain(*settings))
        text_of = lambda i, name: str(settings[i].get(name, ""))
        pairs = {name: (text_of(0, name), text_of(1, name)) for name in names}
        edits = [{edit.dump(): edit for edit in run.edits()} for run in (self, second)]
        only_of = lambda i: [edits[i][text] for text in edits[i] if text not in edits[1 - i]]
        return Comparison(
            names=(str(self.checkpoints.path), str(second.checkpoints.path)),
            parents=(newest[0].get("parent"), newest[1].get("parent")),
            settings={name: pair for name, pair in pairs.items() if pair[0] != pair[1]},
            edits=(only_of(0), only_of(1)),
            histories=(self.history(), second.history()),
            common_steps=common,
            differs_at=first,
            leaves=[] if first is None else different[first],
        )


def changed_leaves(first: Manifest, second: Manifest) -> list[str]:
    """The names of leaves with different bits in two checkpoints, or missing in one."""
    by_path = [{leaf.path: leaf for leaf in manifest.leaves} for manifest in (first, second)]
    paths = dict.fromkeys(itertools.chain(*by_path))
    different = [path for path in paths if by_path[0].get(path) != by_path[1].get(path)]
    return [leaves.show("state", path) for path in different]


@dataclass(frozen=True)
class Comparison:
    """Two runs side by side, from `timeline(...).compare(...)`. It prints, and has `plot()`."""

    names: tuple[str, str]  # the directories
    parents: tuple[Any, Any]  # path, step and edits of a branch; else None
    settings: dict[str, tuple[str, str]]  # different settings of the scripts
    edits: tuple[list[Edit], list[Edit]]  # the edits that only one of the runs has
    histories: tuple[History, History]
    common_steps: list[int]  # steps of checkpoints in both directories
    # the first common checkpoint with other bits, or the exact step; None if all have the same
    differs_at: int | None
    leaves: list[str]  # the leaves with other bits there
    is_exact: bool = False  # whether `differs_at` is the first step with other bits

    @property
    def _kind(self) -> str:
        return "step" if self.is_exact else "common checkpoint"

    def __repr__(self) -> str:
        lines = [f"{self.names[0]}  |  {self.names[1]}"]
        if self.differs_at is None and not self.common_steps:
            lines.append("no common checkpoint")
        elif self.differs_at is None:
            lines.append(f"the same bits at all {len(self.common_steps)} common checkpoints")
        else:
            names = ", ".join(self.leaves[:6]) + (", …" if len(self.leaves) > 6 else "")
            lines.append(f"first {self._kind} with other bits: {self.differs_at} ({names})")
        for name, parent in zip(self.names, self.parents, strict=True):
            if parent:
                edits = ", ".join(parent["edits"])
                origin = f"{parent['path']} at step {parent['step']}"
                lines.append(f"{name} branched off {origin} {edits}".rstrip())
        lines += [f"  {name}: {a} | {b}" for name, (a, b) in self.settings.items()]
        for name, edits in zip(self.names, self.edits, strict=True):
            lines += [f"{name}: {trees.listed([*map(repr, edits)], 4)}"] if edits else []
        columns = [name for name in self.histories[0].names if name in self.histories[1]]
        rows = [["newest", *self.names]] if columns else []
        for name in columns:
            rows.append([name, *(tables.short(history.last(name)) for history in self.histories)])
        return "\n".join([*lines, *tables.aligned(rows, right=(1, 2))])

    _repr_html_ = tables.folded

    def plot(self, name: str = "loss") -> Figure:
        """A matplotlib Figure with a column of both histories. RowError for an unknown name."""
        from tsunax.run import plots

        figure = plots.new_figure(7, 4)
        axes = figure.add_subplot()
        series = [history.series(name) for history in self.histories]
        labels = [os.path.basename(path) for path in self.names]
        labels = labels if labels[0] != labels[1] else self.names
        for label, (steps, values) in zip(labels, series, strict=True):
            axes.plot(steps, values, label=label)
        finite = np.concatenate([values[np.isfinite(values)] for _, values in series])
        # A history is plotted by the same rule.
        if len(finite) and 0 < 20 * finite.min() < finite.max():
            axes.set_yscale("log")
        if self.differs_at is not None:
            style = {"color": "tab:red", "linestyle": "--", "linewidth": 1}
            axes.axvline(self.differs_at, label=f"first {self._kind} with other bits", **style)
        axes.set_xlabel("step")
        axes.set_ylabel(name)
        figure.legend(loc="outside upper center", ncols=3, frameon=False)
        return figure


def different_leaves(first: PyTree, second: PyTree) -> list[str]:
    """The leaves with different bits in two states, or missing in one."""
    from tsunax.reproduce import fingerprint

    prints = [{name: fingerprint(x) for name, x in trees.leaves_at("state", state)}
              for state in (first, second)]  # fmt: skip
    names = dict.fromkeys([*prints[0], *prints[1]])
    return [name for name in names if prints[0].get(name) != prints[1].get(name)]


def first_difference(
    lines: Sequence[Function], low: int, high: int, names: list[str]
) -> tuple[int, list[str]]:
    """The first step in (low, high] at which two lines differ, and the leaves that differ there.

    A line is a function `(step, earlier moment or None) -> moment`. At `high` the leaves `names`
    differ, at `low` none.
    """
    starts = [line(low, None) for line in lines]
    while high - low > 1:
        middle = (low + high) // 2
        moments = [line(middle, start) for line, start in zip(lines, starts, strict=True)]
        if middle_names := different_leaves(*(moment.state for moment in moments)):
            high, names = middle, middle_names
        else:
            low, starts = middle, moments
    return high, names
