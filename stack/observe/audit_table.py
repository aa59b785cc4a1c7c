"""An audit of rows as a table for people."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stack.observe import undertrained
from stack.text.display import quoted

TOKEN = 20  # columns of a terminal for a token
TITLES = {
    undertrained.NORM: "L2 norm of the input embedding",
    undertrained.DISTANCE: "cosine distance to the mean of known unused rows of the head",
}


def show(found: dict[str, Any]) -> None:
    """The table and its summary, for a terminal of any width, a pipe or a file."""
    console = Console(highlight=False)
    name = found["indicator"]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for title in dict.fromkeys(("id", "occurs", undertrained.NORM, name)):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("kind", no_wrap=True)
    table.add_column("token", no_wrap=True, overflow="ellipsis", max_width=TOKEN)
    table.add_column("nearest")  # the only one that may shrink, so the first that does
    for row in found["listed"]:
        near = ", ".join(f"{other['cosine']:.2f} {quoted(other['text'])}" for other in row["nearest"])
        times = "?" if row["occurrences"] is None else f"{row['occurrences']:,}"
        numbers = [f"{row[key]:.{digits}f}" for key, digits in {undertrained.NORM: 3, name: 4}.items()]
        kind = row["category"] + "*" * row["known_unused"]
        cells = map(Text, (str(row["id"]), times, *numbers, kind, quoted(row["text"])))
        table.add_row(*cells, Text(near, no_wrap=True, overflow="ellipsis"))
    console.print(table)
    for line in _summary(found):
        console.print(line, markup=False, soft_wrap=True)


def _summary(found: dict[str, Any]) -> list[str]:
    seen, tied = found["occurrences"], "tied" if found["tied"] else "untied"
    lines = [
        f"{found['checkpoint']}: {found['rows']:,} rows of {found['width']}, {tied}",
        f"ranked by {found['indicator']}: {TITLES[found['indicator']]}",
        f"* known unused: {', '.join(f'{len(ids):,} {kind}' for kind, ids in found['unused'].items()) or 'none'}",
    ]
    if seen is None:
        return [*lines, "occurrences: not known; counts=FOLDER gives them"]
    what = {"none": "no occurrence", "met_less_than_once": "met less than once so far, on average"}
    judged = [(what[key], seen[key]) for key in what if seen[key] is not None]
    lines.append(f"occurrences: {seen['ids']:,} ids in {', '.join(seen['folders'])}")
    return lines + [
        f"{text}: {value['rows']:,} rows; of the first {value['rows']:,} listed so, {value['of_the_first']:,}"
        for text, value in judged
    ]
