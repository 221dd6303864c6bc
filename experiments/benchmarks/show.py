"""The table, the picture and the JSON of a suite."""

import math
from pathlib import Path
from typing import Any

import matplotlib
from rich import box
from rich.table import Table

from experiments.benchmarks.timing import Row
from experiments.plots import BLUE, GREY, STYLE

matplotlib.use("Agg")
from matplotlib import pyplot as plt

_COUNTS = {
    "bytes over unscaled": ("accessed\nover bare", 1.0, "{:.3f}"),
    "tokens_per_second": ("tokens\n/s", 1.0, "{:.0f}"),
    "share_of_peak": ("share of\npeak", 1.0, "{:.0%}"),
    "temp_bytes": ("tempo-\nrary MB", 1e6, "{:.1f}"),
    "bytes_accessed": ("accessed\nMB", 1e6, "{:.0f}"),
    "saved_bytes": ("saved for\nbackward MB", 1e6, "{:.1f}"),
    "converts": ("con-\nverts", 1.0, "{:.0f}"),
    "collectives": ("collec-\ntives", 1.0, "{:.0f}"),
    "scalar_collectives": ("of\nscalars", 1.0, "{:.0f}"),
}


def ratio_names(rows: list[Row]) -> list[str]:
    """The columns that hold a ratio of times."""
    return list(dict.fromkeys(k for row in rows for k in row if k.startswith("over ")))


def tables(content: dict[str, Any]) -> list[Table]:
    """A suite as tables: the ratios and times first, then what was counted.

    Args:
      content: as `bench` writes it to SUITE.json.
    """
    rows, rounds = content["rows"], content["options"]["rounds"]
    ratios = {name: name.replace(" ", "\n", 1) for name in ratio_names(rows)}
    counts = {k: heading for k, (heading, _, _) in _COUNTS.items() if any(row.get(k) for row in rows)}
    cells = [
        {name: _ratio(row.get(name)) for name in ratios}
        | {"time": _seconds(row.get("seconds"))}
        | {k: _COUNTS[k][2].format(row[k] / _COUNTS[k][1]) if k in row else "" for k in counts}
        for row in rows
    ]
    title = f"{content['suite']}: median of {rounds} rounds [quartiles]"
    result = [_table(title, ratios | {"time": "time"}, rows, cells)]
    return [*result, _table("what was counted", counts, rows, cells)] if counts else result


def _table(title: str, columns: dict[str, str], rows: list[Row], cells: list[dict[str, str]]) -> Table:
    result = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 0, 0, 1)
    )
    result.add_column("", no_wrap=True)
    for heading in columns.values():
        result.add_column(heading, justify="right", no_wrap=True)
    group = None
    for row, cell in zip(rows, cells, strict=True):
        if not any(cell[key] for key in columns):
            continue
        if row["group"] != group:
            group = row["group"]
            result.add_row(f"[bold]{group}[/bold]")
        result.add_row(row["name"], *(cell[key] for key in columns))
    return result


def plot(content: dict[str, Any], path: Path) -> None:
    """Draws the first ratio of every row as a bar, with its quartiles.

    Args:
      content: as `bench` writes it to SUITE.json.
      path: of the picture.
    """
    (ratio, *_) = [*ratio_names(content["rows"]), "over"]
    rows = [row for row in content["rows"] if ratio in row]
    middles = [row[ratio]["median"] for row in rows]
    errors = [
        [row[ratio]["median"] - row[ratio]["low"] for row in rows],
        [row[ratio]["high"] - row[ratio]["median"] for row in rows],
    ]
    with plt.rc_context(STYLE | {"figure.figsize": (8, 1.2 + 0.32 * len(rows))}):
        figure, axes = plt.subplots(layout="constrained")
        heights = range(len(rows))[::-1]
        colours = [BLUE if row["name"].startswith("mpjax") else GREY for row in rows]
        axes.barh(heights, middles, xerr=errors, color=colours, height=0.7, error_kw={"lw": 1, "capsize": 2})
        for height, middle, high in zip(heights, middles, errors[1], strict=True):
            axes.text(middle + high, height, f"  {middle:.2f}", va="center", ha="left", fontsize=8)
        axes.set_ylim(-0.8, len(rows) - 0.2)
        axes.set_yticks(heights, [f"{row['group']}: {row['name']}" for row in rows], fontsize=8)
        axes.axvline(1.0, color="black", lw=0.8)
        axes.set(xlabel=f"time {ratio} (less is better)")
        axes.set_title(f"{content['suite']}: time of mpjax (blue) and of others, {ratio}")
        axes.grid(axis="y", visible=False)
        figure.savefig(path)
        plt.close(figure)


def to_json(x: Any) -> Any:
    """What JSON can hold: NaN becomes null, a path its text."""
    if isinstance(x, dict):
        return {k: to_json(v) for k, v in x.items()}
    if isinstance(x, (list, tuple)):
        return [to_json(v) for v in x]
    if isinstance(x, float):
        return x if math.isfinite(x) else None
    return str(x) if isinstance(x, Path) else x


def _ratio(value: dict[str, float] | None) -> str:
    return "" if value is None else f"{value['median']:.2f} [{value['low']:.2f}–{value['high']:.2f}]"


def _seconds(value: dict[str, float] | None) -> str:
    if value is None:
        return ""
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if abs(value["median"]) >= unit:
            return f"{value['median'] / unit:.3g} {name}"
    return f"{value['median'] * 1e6:.2f} µs"
