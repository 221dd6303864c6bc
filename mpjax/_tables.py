"""Tables for a terminal, whose cells are broken or shortened where it is narrow, and for a notebook."""

import html as htmllib
import shutil
from collections.abc import Collection, Iterable, Mapping

Row = tuple[str, ...]

_GAP = "  "
# The names in the first column have at least so much room; those that need more spill over empty cells, or get a line
# of their own.
_NAMES = 8
# Cells are not shortened below this.
_SHORTEST = 8


def table(
    header: Row,
    body: Collection[Row],
    last: Collection[Row] = (),
    *,
    right: Collection[str] = (),
    breaks: Mapping[str, str],
    shorten: Collection[str] = (),
) -> tuple[str, str]:
    r"""The header, and the table below it, that fit the terminal.

    Names in the first column are never broken.

    >>> header, below = table(("module", "FLOPs"), [("head", "4 kFLOP")], right={"FLOPs"}, breaks={})
    >>> print(header, below, sep="\n")
    module    FLOPs
    ───────────────
    head    4 kFLOP

    Args:
      header: the names of the columns, which may be broken between words.
      body: a row for each name.
      last: rows below a rule of their own.
      right: the columns that are aligned to the right.
      breaks: from columns whose cells may be broken to the text after which they may, such as ", ".
      shorten: the columns whose cells may lose their beginning, as paths do whose end tells more: `…/attn/query`.
    """
    separators = [breaks.get(name) for name in header]
    widths = _fitted(header, [*body, *last], separators, [name in shorten for name in header])
    sides = [name in right for name in header]
    rule = "─" * (sum(widths) + len(_GAP) * (len(widths) - 1))

    def lines(row: Row) -> list[str]:
        name, *cells = (
            _shortened(cell, width) if column in shorten else cell
            for column, cell, width in zip(header, row, widths, strict=True)
        )
        spills = len(name) > widths[0]
        cells = ["" if spills else name, *cells]
        broken = [_broken(c, w, by) for c, w, by in zip(cells, widths, separators, strict=True)]
        first, *others = _joined(broken, widths, sides)
        if not spills:
            return [first, *others]
        if first[: len(name) + len(_GAP)].strip():
            return [name, first, *others]
        return [name + first[len(name) :], *others]

    title = _joined(
        [_broken(cell, width, " ") for cell, width in zip(header, widths, strict=True)],
        widths,
        sides,
        low=True,
    )
    below = [rule, *(line for row in body for line in lines(row))]
    if last:
        below += [rule, *(line for row in last for line in lines(row))]
    return "\n".join(title), "\n".join(below)


def html(header: Row, rows: Iterable[Row]) -> str:
    """The table as a notebook shows it."""

    def line(cells: Row, tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{htmllib.escape(c)}</{tag}>" for c in cells) + "</tr>"

    body = "".join(line(cells, "td") for cells in rows)
    return f"<table><thead>{line(header, 'th')}</thead><tbody>{body}</tbody></table>"


def _shortened(cell: str, width: int) -> str:
    return cell if len(cell) <= width else "…" + cell[len(cell) - width + 1 :]


def _fitted(header: Row, rows: list[Row], separators: list[str | None], shorten: list[bool]) -> list[int]:
    """The widths of the columns: lists give way first, then headers, what may be shortened, the room for names."""
    columns = list(zip(*rows, strict=True)) or [()] * len(header)
    natural = [max(map(len, (name, *column))) for name, column in zip(header, columns, strict=True)]
    least = [
        max(
            len(part)
            for cells, by in (((name,), " "), (column, by))
            for cell in cells
            for part in _parts(cell, by)
        )
        for name, column, by in zip(header, columns, separators, strict=True)
    ]
    widths = list(natural)
    room = shutil.get_terminal_size((120, 24)).columns - len(_GAP) * (len(widths) - 1)
    lists = [i for i, by in enumerate(separators) if by is not None and i]
    others = [i for i, by in enumerate(separators) if by is None and i]
    shortened = [i for i, may in enumerate(shorten) if may]
    shortest = [_SHORTEST if may else least[i] for i, may in enumerate(shorten)]
    for group, limits in ((lists, least), (others, least), (shortened, shortest)):
        while sum(widths) > room and (wide := [i for i in group if widths[i] > limits[i]]):
            widths[max(wide, key=lambda i: widths[i])] -= 1
    if sum(widths) > room and not shorten[0]:
        limit = max(_NAMES, widths[0] - (sum(widths) - room))
        widths[0] = max((len(cell) for cell in (header[0], *columns[0]) if len(cell) <= limit), default=limit)
        while sum(widths) < room and (short := [i for i in lists if widths[i] < natural[i]]):
            widths[min(short, key=lambda i: widths[i])] += 1
    return widths


def _parts(cell: str, separator: str | None) -> list[str]:
    """The parts that a cell may be broken into, without the spaces at which it is."""
    if separator is None:
        return [cell]
    parts = cell.split(separator)
    return [*(part + separator.rstrip() for part in parts[:-1]), parts[-1]]


def _broken(cell: str, width: int, separator: str | None) -> list[str]:
    """The lines of a cell."""
    if len(cell) <= width:
        return [cell]
    lines: list[str] = []
    for part in _parts(cell, separator):
        if lines and len(lines[-1]) + 1 + len(part) <= width:
            lines[-1] += f" {part}"
        else:
            lines.append(part)
    return lines


def _joined(cells: list[list[str]], widths: list[int], right: list[bool], low: bool = False) -> list[str]:
    """The lines of a row, whose cells stand at the top, or `low`."""
    height = max(map(len, cells))
    filled = [[""] * (height - len(c)) + c if low else c + [""] * (height - len(c)) for c in cells]
    return [
        _GAP.join(
            text.rjust(width) if at_right else text.ljust(width)
            for text, width, at_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in zip(*filled, strict=True)
    ]
