"""The directory of a run: its config, and whether it may be resumed."""

import dataclasses
import json
import math
import shutil
from pathlib import Path
from typing import Any

from experiments.errors import UsageError

# These change where a run writes and how it is watched, not its results.
_NOT_COMPARED = {
    *("out", "resume", "checkpoint_every", "log_every"),
    *("mesh", "virtual_devices", "processes", "process_id", "coordinator"),
}
_OURS = ("config.json", "metrics.jsonl", "summary.json", "sample.txt", "checkpoints", "plots")


class RunDirectory:
    """`DIR/` with config.json, metrics.jsonl, summary.json, sample.txt, checkpoints/ and plots/."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.json"
        self.metrics = path / "metrics.jsonl"
        self.summary = path / "summary.json"
        self.sample = path / "sample.txt"
        self.checkpoints = path / "checkpoints"
        self.plots = path / "plots"

    def open(self, config: dict[str, Any], resume: str) -> None:
        """Makes the directory, or checks that it holds the run that is asked for.

        Args:
          config: options of the run, from name to plain value.
          resume: `auto`, `must` or `never`.

        Raises:
          UsageError: if it holds another run, or `resume` asks for one and there is none.
        """
        if self.path.exists() and not self.path.is_dir():
            raise UsageError(f"--out '{self.path}' is a file; give a directory")
        if resume == "never":
            self._clear()
        if resume == "must" and not self.config.exists():
            raise UsageError(
                f"--resume must: '{self.path}' holds no run; check --out, or start one with --resume auto"
            )
        if self.config.exists():
            self._check_same(config)
            return
        try:
            self.plots.mkdir(parents=True, exist_ok=True)
            write_json(self.config, config)
        except OSError as e:
            raise UsageError(
                f"--out '{self.path}' cannot be written to ({e.strerror}); give another directory"
            ) from None

    def _check_same(self, config: dict[str, Any]) -> None:
        try:
            saved = json.loads(self.config.read_text())
        except ValueError as e:
            raise UsageError(
                f"'{self.config}' is not valid JSON ({e}); choose another --out, or --resume never "
                "to replace the run"
            ) from None
        differing = [
            f"{name} was {json.dumps(saved.get(name))}, is {json.dumps(config.get(name))}"
            for name in sorted(saved.keys() | config.keys())
            if name not in _NOT_COMPARED and saved.get(name) != config.get(name)
        ]
        if differing:
            raise UsageError(
                f"'{self.path}' holds a run with other options: {'; '.join(differing)}. Choose "
                "another --out, give the same options to go on, or --resume never to replace it"
            )

    def _clear(self) -> None:
        for name in _OURS:
            path = self.path / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def to_plain(options: Any) -> dict[str, Any]:
    """Options as a flat dict that JSON can hold; nested ones get dotted names."""
    plain: dict[str, Any] = {}
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if dataclasses.is_dataclass(value):
            plain |= {f"{field.name}.{k}": v for k, v in to_plain(value).items()}
        elif isinstance(value, Path):
            plain[field.name] = str(value.resolve())
        else:
            plain[field.name] = list(value) if isinstance(value, tuple) else value
    return plain


def write_json(path: Path, content: Any) -> None:
    """Writes a JSON file so that a reader sees the old content or the new, never a part."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(_finite(content), indent=2, allow_nan=False) + "\n")
    temporary.replace(path)


def _finite(content: Any) -> Any:
    """JSON has no inf or NaN; they become null."""
    if isinstance(content, dict):
        return {k: _finite(v) for k, v in content.items()}
    if isinstance(content, (list, tuple)):
        return [_finite(v) for v in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content
