"""What a person sees while a model trains, and the file that records every step."""

import json
import math
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from experiments.loop import Record

SECONDS_BETWEEN_LINES = 10.0


class MetricsFile:
    """`metrics.jsonl`: one line per step, each step once."""

    def __init__(self, path: Path, after: int = 0) -> None:
        """Opens the file and drops the lines after a step.

        Args:
          path: the file.
          after: step that was restored. A run that was killed has written steps beyond its last
            checkpoint, which are going to be taken again, and perhaps half a line.
        """
        whole = [record for record in read_metrics(path) if record["step"] <= after]
        path.write_text("".join(_to_line(record) for record in whole))
        self._file = path.open("a")

    def write(self, records: list[Record]) -> None:
        """Appends records and flushes them."""
        self._file.write("".join(_to_line(record) for record in records))
        self._file.flush()

    def __enter__(self) -> "MetricsFile":
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[Record]:
    """The records of a `metrics.jsonl`, up to the first line that is not whole."""
    records = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except ValueError:
            break
        records.append({k: math.nan if v is None else v for k, v in record.items()})
    return records


def _to_line(record: Record) -> str:
    """A record as a line of JSON, which has no inf or NaN: a skipped step's become null."""
    plain = {k: v if math.isfinite(v) else None for k, v in record.items()}
    return json.dumps(plain, allow_nan=False) + "\n"


class Display:
    """A live line in a terminal, plain lines elsewhere."""

    def __init__(self, console: Console, steps: int, unit: str, start: int = 0) -> None:
        """Starts with nothing on the screen.

        Args:
          console: where to print.
          steps: number of the last step.
          unit: what the rate counts.
          start: step that the run goes on from.
        """
        self.console, self.steps, self.unit = console, steps, unit
        self._printed = time.monotonic()
        self._progress = Progress(
            BarColumn(bar_width=None),
            TextColumn("{task.description}"),
            console=console,
            expand=True,
            disable=not console.is_terminal,
            transient=True,
        )
        self._task: TaskID = self._progress.add_task("compiling …", total=steps, completed=start)

    def __enter__(self) -> "Display":
        self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        """Prints a line above the live one."""
        self._progress.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def update(self, record: Record, rate: float, seconds_left: float) -> None:
        """Shows the newest step; a validation gets a line of its own, which stays."""
        fields = [
            f"{record['step']:>{len(str(self.steps))}}/{self.steps}",
            f"loss {record['loss']:.3f}",
            f"{format_count(rate)} {self.unit}/s",
            f"scale {format_scale(record['loss_scale'])}",
            f"skipped {record['skipped']}",
            f"{format_seconds(seconds_left)} left",
        ]
        self._progress.update(self._task, completed=record["step"], description="  ".join(fields))
        due = time.monotonic() - self._printed > SECONDS_BETWEEN_LINES
        if self.console.is_terminal:
            fields.pop()  # the live line below shows the time left
        if "val_loss" in record:
            fields.insert(2, f"val {record['val_loss']:.3f}")
        elif self.console.is_terminal or not due:
            return
        self._printed = time.monotonic()
        self.say("  ".join(fields))


def summary_table(summary: dict[str, Any]) -> Table:
    """The table at the end of a run.

    Args:
      summary: as `train` writes it to summary.json.
    """
    table = Table(title=f"{summary['model']} after {summary['steps']} steps", title_justify="left")
    table.add_column("", style="bold")
    table.add_column("", justify="right")
    policy = summary["policy"]
    shown = policy if isinstance(policy, str) else "\n".join(f"{k}: {v}" for k, v in policy.items())
    rows = {
        "policy": shown,
        "loss scale": f"{summary['loss_scale']}",
        "validation loss": f"{summary['val_loss']:.4f} nats",
        "validation accuracy": f"{summary['val_accuracy']:.2%}",
        "rate": f"{format_count(summary['rate'])} {summary['unit']}/s",
        "skipped steps": f"{summary['skipped']} of {summary['steps']}",
        f"parameters ({format_count(summary['parameters'])})": format_bytes(summary["param_bytes"]),
        "optimizer state": format_bytes(summary["optimizer_bytes"]),
        "activations saved for backward": format_bytes(summary["activation_bytes"]),
        "time of the steps": format_seconds(summary["seconds"]),
    }
    if fallback := summary.get("fallback"):
        rows["fallback"] = f"{fallback['policy']} from step {fallback['from_step']}: {fallback['reason']}"
    for name, value in rows.items():
        table.add_row(name, Text(value))  # a pattern may hold what rich takes for markup
    return table


def format_count(x: float) -> str:
    """`12345` as `12.3k`."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if x >= size:
            return f"{x / size:.3g}{letter}"
    return f"{x:.3g}"


def format_bytes(n: float) -> str:
    """`3361792` as `3.36 MB`; a megabyte has a million bytes."""
    return f"{n / 1e9:.2f} GB" if n >= 1e9 else f"{n / 1e6:.2f} MB"


def format_scale(scale: float) -> str:
    """A loss scale, as a power of two where it is a large one."""
    exponent = max(0, int(scale).bit_length() - 1) if scale < float("inf") else 0
    return f"2^{exponent}" if exponent > 3 and scale == 2.0**exponent else f"{scale:g}"


def format_seconds(seconds: float) -> str:
    """`75` as `1:15`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
