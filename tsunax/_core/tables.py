"""Tables of text: cells in columns and their look in a notebook, and numbers in short."""

import html
import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

# Columns of a history that pictures and the progress leave out.
ASIDE = {"epoch", "rejected", "grad_norm", "update_norm", "loss_scale", "dropped", "watch"}


def aligned(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> list[str]:
    """The lines of a table; columns with an index in `right` are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    place = lambda i, cell: cell.rjust(widths[i]) if i in right else cell.ljust(widths[i])
    return ["  ".join(place(i, cell) for i, cell in enumerate(row)).rstrip() for row in rows]


def folded(value: object) -> str:
    """The `repr` of an object as HTML; its first line folds the other lines: `_repr_html_`."""
    first_line, _, other_lines = html.escape(repr(value)).partition("\n")
    other_lines = f'<pre style="white-space: pre; overflow-x: auto; margin: 0">{other_lines}</pre>'
    return f"<details open><summary><code>{first_line}</code></summary>{other_lines}</details>"


def short(value: float) -> str:
    """A number for people, in at most nine characters: 4 digits, and thousands apart.

    >>> [short(x) for x in (0.693147, 3, 12345678, 1234.56, 1.5e-7, float("nan"))]
    ['0.6931', '3', '12,345,678', '1,235', '1.5e-07', 'nan']
    """
    is_large = math.isfinite(value) and (isinstance(value, int) or 1000 <= abs(value) < 1e9)
    return f"{value:,.0f}" if is_large else f"{value:.4g}"


def families(names: Iterable[str], min_members: int = 4) -> dict[str, list[str]]:
    """Names by kind: `loss/0`, `loss/1`, ... are one kind if there are `min_members` or more.

    >>> families(["loss/0", "loss/1", "loss/2", "loss/3", "epoch", "top/1"])
    {'loss': ['loss/0', 'loss/1', 'loss/2', 'loss/3'], 'epoch': ['epoch'], 'top/1': ['top/1']}
    """
    names = list(names)
    kinds: dict[str, list[str]] = {}
    for name in names:
        head, _, number = name.rpartition("/")
        kinds.setdefault(head if number.isdecimal() else name, []).append(name)
    members_by_kind: dict[str, list[str]] = {}
    for kind, members in kinds.items():
        is_family = len(members) >= min_members and kind not in names
        members_by_kind |= {kind: members} if is_family else {name: [name] for name in members}
    return members_by_kind


def summary(row: Mapping[str, float], digits: Callable[[float], str] = short) -> list[str]:
    """Each number with its name; numbers of many members or classes as a range.

    >>> summary({"val/loss": 0.5, "hits/0": 0.25, "hits/1": 0.75, "hits/2": 0.5, "hits/3": 1.0})
    ['val/loss 0.5', 'hits/0…3 0.25…1']
    """
    texts = []
    for name, members in families(row).items():
        values = [row[member] for member in members]
        if len(values) == 1:
            texts.append(f"{name} {digits(values[0])}")
            continue
        high = next((x for x in values if not math.isfinite(x)), max(values))
        low = min(filter(math.isfinite, values), default=high)
        texts.append(f"{name}/0…{len(values) - 1} {digits(low)}…{digits(high)}")
    return texts


def flat(values: Mapping[Any, Any], root: str = "") -> dict[str, float]:
    """Numbers by name: in a mapping by both names, in an array by its elements, `name/0`, ..."""
    numbers: dict[str, float] = {}
    for name, value in values.items():
        value = dict(enumerate(value)) if isinstance(value, list | tuple) else value
        if isinstance(value, Mapping):
            numbers |= flat(value, f"{root}{name}/")
        elif np.ndim(value):
            numbers |= {f"{root}{name}/{i}": float(x) for i, x in enumerate(np.ravel(value))}
        elif value is not None:
            numbers[f"{root}{name}"] = float(value)
    return numbers
