"""Tables of results, as text of a given width and as HTML: what patch() and trace() return prints as these."""

import html
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

WIDTH = 80
_GAP = "  "


def shortened(path: str, width: int) -> str:
    """The end of a path, from a dot on if possible: ``"…self_attn.q_proj"``."""
    if len(path) <= width:
        return path
    end = path[len(path) - width + 1 :]
    _, dot, rest = end.partition(".")
    return "…" + (rest if dot and rest else end)


@dataclass
class Table:
    """Rows of text cells under a heading. A string instead of a row is a remark, and fills a line.

    Attributes:
        title: heading of the table.
        heads: heads of the columns; empty ones are allowed.
        figures: indices of the columns that are right-aligned.
        elastic: least widths of the columns that are shortened from the left, in this order, if the lines are too long.
        folds: continue cells of these columns on the next line instead of shortening them.
        rows: the rows and remarks.
    """

    title: str
    heads: tuple[str, ...] = ()
    figures: frozenset[int] = frozenset()
    elastic: Mapping[int, int] = field(default_factory=dict)
    folds: bool = False
    rows: list[tuple[str, ...] | str] = field(default_factory=list)

    def lines(self, width: int) -> Iterator[str]:
        """The table as text."""
        yield self.title
        cells = [row for row in (self.heads, *self.rows) if row and not isinstance(row, str)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        excess = sum(widths) + len(_GAP) * len(widths) - width
        for index, least in self.elastic.items():
            cut = min(max(0, excess), max(0, widths[index] - least))
            widths[index], excess = widths[index] - cut, excess - cut
        if self.heads:
            yield from self._lines_of(self.heads, widths)
        for row in self.rows:
            if isinstance(row, str):
                yield from textwrap.wrap(
                    row, width, initial_indent=_GAP, subsequent_indent=2 * _GAP, break_on_hyphens=False
                )
            else:
                yield from self._lines_of(row, widths)

    def _lines_of(self, row: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
        line, rests = "", [""] * len(row)
        for index, (cell, width) in enumerate(zip(row, widths, strict=True)):
            text = cell
            if index in self.elastic and self.folds:
                text, rests[index] = cell[:width], cell[width:]
            elif index in self.elastic:
                text = shortened(cell, width)
            line += _GAP + (text.rjust(width) if index in self.figures else text.ljust(width))
        yield line.rstrip()
        if any(rests):
            yield from self._lines_of(rests, widths)

    def html(self) -> str:
        """The table as HTML."""
        parts = [f"<caption style='text-align:left'><b>{html.escape(self.title)}</b></caption>"]
        if self.heads:
            parts.append(self._html_row("th", self.heads))
        for row in self.rows:
            if isinstance(row, str):
                span = max(1, len(self.heads))
                parts.append(f"<tr><td colspan='{span}' style='text-align:left'>{html.escape(row)}</td></tr>")
            else:
                parts.append(self._html_row("td", row))
        return f"<table>{''.join(parts)}</table>"

    def _html_row(self, tag: str, row: Sequence[str]) -> str:
        cells = (
            f"<{tag} style='text-align:{'right' if index in self.figures else 'left'}'>{html.escape(cell)}</{tag}>"
            for index, cell in enumerate(row)
        )
        return f"<tr>{''.join(cells)}</tr>"


def as_text(summary: str, tables: Iterable[Table], width: int = WIDTH) -> str:
    """A sentence and the tables that have rows, with empty lines between them."""
    blocks = ["\n".join(textwrap.wrap(summary, width))]
    blocks += ["\n".join(table.lines(width)) for table in tables if table.rows]
    return "\n\n".join(blocks)


def as_html(summary: str, tables: Iterable[Table]) -> str:
    """The same as HTML, which a notebook shows."""
    return f"<p>{html.escape(summary)}</p>" + "".join(table.html() for table in tables if table.rows)


def plural(count: int, noun: str) -> str:
    """``"1 call"``, ``"2 calls"``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
