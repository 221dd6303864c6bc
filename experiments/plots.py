"""Pictures of one run."""

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

from experiments.loop import Record

matplotlib.use("Agg")
from matplotlib import pyplot as plt

BLUE, ORANGE, RED, GREY = "#2f6fb2", "#e07b00", "#c8102e", "#777777"
STYLE: dict[Any, Any] = {
    "figure.dpi": 110,
    "figure.figsize": (8, 4.5),
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "grid.alpha": 0.25,
    "legend.frameon": False,
}


def plot_run(records: list[Record], directory: Path) -> None:
    """Writes loss.png and loss_scale.png.

    Args:
      records: of `metrics.jsonl`.
      directory: where to; it is made if need be.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with plt.rc_context(STYLE):
        _plot_loss(records, directory / "loss.png")
        _plot_loss_scale(records, directory / "loss_scale.png")


def _plot_loss(records: list[Record], path: Path) -> None:
    steps = np.array([r["step"] for r in records])
    loss = np.array([r["loss"] for r in records])
    validated = [r for r in records if "val_loss" in r]
    figure, axes = plt.subplots(layout="constrained")
    axes.plot(steps, loss, color=BLUE, alpha=0.25, lw=0.8)
    window = max(1, len(loss) // 50)
    label = f"training, mean of {window} steps" if window > 1 else "training"
    axes.plot(steps, _smooth(loss, window), color=BLUE, label=label)
    if validated:
        axes.plot(
            [r["step"] for r in validated],
            [r["val_loss"] for r in validated],
            color=ORANGE,
            marker="o",
            ms=4,
            label="validation",
        )
        last = validated[-1]["val_loss"]
        axes.set_title(f"Loss falls to {last:.3f} nats on held-out data")
    else:
        axes.set_title("Training loss")
    axes.set(xlabel="training step", ylabel="cross entropy (nats)")
    finite = loss[np.isfinite(loss)]
    if finite.size and finite.min() > 0 and finite.max() / finite.min() > 20:
        axes.set_yscale("log")
    axes.legend()
    figure.savefig(path)
    plt.close(figure)


def _plot_loss_scale(records: list[Record], path: Path) -> None:
    steps = np.array([r["step"] for r in records])
    scale = np.array([r["loss_scale"] for r in records])
    skipped = np.array([not r["finite"] for r in records], bool)
    figure, axes = plt.subplots(layout="constrained")
    axes.step(steps, scale, where="mid", color=BLUE, label="loss scale")
    axes.plot(
        steps[skipped],
        scale[skipped],
        ls="",
        marker="x",
        ms=8,
        mew=2,
        color=RED,
        label=f"skipped step ({skipped.sum()})",
    )
    axes.set_yscale("log", base=2)
    axes.set(xlabel="training step", ylabel="loss scale (factor on the loss)")
    if skipped.any():
        axes.set_title("Each step that overflows is skipped, and the scale backs off")
    elif scale.size and scale.min() != scale.max():
        axes.set_title("The loss scale grows while no step overflows")
    else:
        axes.set_title("The loss scale stays where it is, and no step is skipped")
    axes.margins(y=0.2)
    axes.legend()
    figure.savefig(path)
    plt.close(figure)


def _smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Mean over the last `window` values, or over as many as there are."""
    total = np.cumsum(np.insert(values, 0, 0.0))
    end = np.arange(1, len(values) + 1)
    start = np.maximum(0, end - window)
    return (total[end] - total[start]) / (end - start)
