"""Tables of text: cells in columns, and their look in a notebook."""

import html
from collections.abc import Container, Sequence


def aligned(rows: Sequence[Sequence[str]], right: Container[int] = ()) -> list[str]:
    """The lines of a table; columns whose index is in `right` end at their right edge."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    place = lambda i, cell: cell.rjust(widths[i]) if i in right else cell.ljust(widths[i])
    return ["  ".join(place(i, cell) for i, cell in enumerate(row)).rstrip() for row in rows]


def folded(shown: object) -> str:
    """The `repr` of an object as HTML whose first line folds the others away: `_repr_html_`."""
    head, _, rest = html.escape(repr(shown)).partition("\n")
    rest = f'<pre style="white-space: pre; overflow-x: auto; margin: 0">{rest}</pre>'
    return f"<details open><summary><code>{head}</code></summary>{rest}</details>"
