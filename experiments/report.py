"""The table and the picture of a comparison."""

import math
from pathlib import Path
from typing import Any

import matplotlib
from rich import box
from rich.table import Table

from experiments.logging import format_count
from experiments.plots import BLUE, GREY, ORANGE, RED, STYLE

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

FOOTNOTE = (
    "grads zeroed: share of the gradient entries, not zero in float32, that are zero here. "
    "updates lost: share of the weights whose update is not zero in float32 and whose stored "
    "value stays the same. Both are means over the validations in training. "
    "Loss in nats; MB of parameters, optimizer state, and activations saved for the backward pass."
)
_COLOURS = (GREY, BLUE, BLUE, RED, ORANGE, ORANGE)
_BYTES = ("param_bytes", "optimizer_bytes", "activation_bytes")


def table(content: dict[str, Any], roomy: bool = True) -> Table:
    """The comparison as a table.

    Args:
      content: as `comparison` writes it to results.json.
      roomy: whether there are 100 columns to fill, rather than 80.
    """
    seeds = content["options"]["seeds"]
    title = f"{content['model']} after {content['options']['steps']} steps, "
    title += f"mean ± spread of {seeds} seeds" if seeds > 1 else "one seed"
    result = Table(
        title=f"{title}, on {content['backend']}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, int(roomy)),
    )
    result.add_column("precision", min_width=14)
    headings: tuple[str, ...] = ("val.\nloss", "accu-\nracy", f"{content['unit']}\n/s", "skip-\nped")
    headings += ("params\nMB", "opt.\nMB", "activ.\nMB", "grads\nzeroed", "updates\nlost")
    for heading in headings:
        result.add_column(heading, justify="right", no_wrap=True)
    for name, r in content["results"].items():
        result.add_row(
            name,
            _with_spread(r["val_loss"], "{:.3f}", seeds),
            _with_spread(r["val_accuracy"], "{:.1%}", seeds),
            _with_spread(r["rate"], "count", seeds),
            _with_spread(r["skipped"], "{:.3g}", 1),
            *(f"{r[key] / 1e6:.2f}" for key in _BYTES),
            _share(r["zeroed"]["mean"]),
            _share(r["lost"]["mean"]),
        )
    return result


def _with_spread(value: dict[str, Any], pattern: str, seeds: int) -> str:
    def shown(x: float) -> str:
        return format_count(x) if pattern == "count" else pattern.format(x)

    if seeds == 1:
        return shown(value["mean"])
    return f"{shown(value['mean'])}\n±{shown(value['spread'])}"


def _share(x: float) -> str:
    """A share in percent, with small ones told from none."""
    if x == 0:
        return "0 %"
    return "< 0.01 %" if x < 1e-4 else f"{100 * x:.3g} %"


def plot(content: dict[str, Any], path: Path) -> None:
    """Draws the comparison: one row per precision, one panel per measure.

    Args:
      content: as `comparison` writes it to results.json.
      path: of the picture.
    """
    results = content["results"]
    style = STYLE | {"figure.figsize": (14, 4.4), "figure.dpi": 130, "axes.titleweight": "normal"}
    with plt.rc_context(style):
        figure, panels = plt.subplots(1, 4, sharey=True, layout="constrained")
        _plot_loss(panels[0], results)
        title = "gradient entries that become zero"
        _plot_shares(panels[1], results, "zeroed", title, "% of those not zero in float32")
        title = "weight updates that are lost"
        _plot_shares(panels[2], results, "lost", title, "% of those not zero in float32")
        _plot_bytes(panels[3], results)
        panels[0].set_yticks(range(len(results)), _wrapped(results))
        panels[0].invert_yaxis()
        for panel in panels:
            panel.grid(axis="y", visible=False)
            panel.tick_params(axis="y", length=0)
        figure.suptitle(_headline(content), x=0.01, ha="left", fontweight="bold", fontsize=12)
        figure.savefig(path)
        plt.close(figure)


def _plot_loss(axes: Axes, results: dict[str, Any]) -> None:
    """Points rather than bars, as what matters are differences far from zero."""
    for i, r in enumerate(results.values()):
        loss = r["val_loss"]
        if not math.isfinite(loss["mean"]):
            axes.annotate("diverged", (0.5, i), xycoords=axes.get_yaxis_transform(), color=RED, va="center")
            continue
        axes.errorbar(loss["mean"], i, xerr=loss["spread"], fmt="o", ms=8, capsize=4, color=_COLOURS[i])
        axes.plot(loss["values"], [i] * len(loss["values"]), "|", color=_COLOURS[i], alpha=0.6)
        axes.annotate(
            f"{loss['mean']:.3f}", (loss["mean"], i), xytext=(0, 9), textcoords="offset points", ha="center"
        )
    reference = next(iter(results.values()))["val_loss"]["mean"]
    axes.axvline(reference, color=GREY, lw=1, ls="--", zorder=0)
    axes.margins(x=0.2, y=0.12)
    axes.set(title="validation loss", xlabel="cross entropy (nats), mean ± spread of seeds")


def _plot_shares(axes: Axes, results: dict[str, Any], key: str, title: str, label: str) -> None:
    shares = [100 * r[key]["mean"] for r in results.values()]
    axes.barh(range(len(shares)), shares, color=_COLOURS[: len(shares)], height=0.6)
    for i, share in enumerate(shares):
        axes.annotate(_share(share / 100), (share, i), xytext=(4, 0), textcoords="offset points", va="center")
    axes.set(title=title, xlabel=label, xlim=(0, 1.3 * max(*shares, 1.0)))


def _plot_bytes(axes: Axes, results: dict[str, Any]) -> None:
    left = [0.0] * len(results)
    labels, colours = ("parameters", "optimizer", "activations"), ("#1d4e80", "#6fa3d0", "#c4daee")
    for key, label, colour in zip(_BYTES, labels, colours, strict=True):
        widths = [r[key] / 1e6 for r in results.values()]
        axes.barh(range(len(widths)), widths, left=left, label=label, color=colour, height=0.6)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for i, total in enumerate(left):
        axes.annotate(f"{total:.3g}", (total, i), xytext=(4, 0), textcoords="offset points", va="center")
    axes.set(title="memory of a training step", xlabel="MB", xlim=(0, 1.2 * max(left)))
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=3, columnspacing=1, handlelength=1)


def _wrapped(results: dict[str, Any]) -> list[str]:
    return [name.replace(", ", ",\n") for name in results]


def _headline(content: dict[str, Any]) -> str:
    """What the picture shows, in numbers."""
    results = content["results"]
    (_, float32), (name, mixed), *_ = results.items()
    total, reference = (sum(r[key] for key in _BYTES) for r in (mixed, float32))
    change = mixed["val_loss"]["mean"] / float32["val_loss"]["mean"] - 1
    zeroed = max(results, key=lambda name: results[name]["zeroed"]["mean"])
    lost = max(results, key=lambda name: results[name]["lost"]["mean"])
    return (
        f"{content['model']}: {name} takes {1 - total / reference:.0%} less memory than float32, with "
        f"{change:+.1%} of loss. What it avoids:\n"
        f"{_share(results[zeroed]['zeroed']['mean'])} of gradient entries become zero ({zeroed}), and "
        f"{_share(results[lost]['lost']['mean'])} of weight updates are lost ({lost})."
    )
