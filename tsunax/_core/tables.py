"""Tables of text: cells in columns."""

from __future__ import annotations

from collections.abc import Container, Sequence


def aligned(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> list[str]:
    """The lines of a table; columns whose index is in `right` end at their right edge.

    >>> aligned([["size", "fits"], ["8", "yes"]], right=[0])
    ['size  fits', '   8  yes']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    place = lambda i, cell: cell.rjust(widths[i]) if i in right else cell.ljust(widths[i])
    return ["  ".join(place(i, cell) for i, cell in enumerate(row)).rstrip() for row in rows]
