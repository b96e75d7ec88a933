"""Timeline: a picture of what one step sends, with and without the window."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from onefold.cli.record import GRADIENTS, PARAMETERS, StepRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LANES: Final = (
    (GRADIENTS, "gradient\ncollectives", "#c2452d"),
    (PARAMETERS, "parameter\ngathers", "#2d6fa8"),
)
_MEGA: Final = 1_000_000


def draw(path: Path, *, window: StepRecord, bare: StepRecord, setting: str) -> None:
    """Write the PNG.

    Args:
        path: where to.
        window: a step with the window.
        bare: a step without it.
        setting: model, ranks and stage, for the title.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5.6), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"What one rank sends in one step: {setting}", fontsize=13)
    upper, lower = figure.subplots(2, 1, sharex=True)
    end = max(window.seconds, bare.seconds) * 1.02
    for axes, record, name in (
        (upper, bare, "without the window"),
        (lower, window, "with coalesce_grad_reduction()"),
    ):
        _draw_step(axes, record, name, end)
    lower.set_xlabel(
        "seconds since the step began (line: a collective starts; shade: until its result is used; "
        "dotted: the step's end)"
    )
    figure.savefig(path, dpi=130)


def _draw_step(axes: "Axes", record: StepRecord, name: str, end: float) -> None:
    total = sum(record.bytes_sent.values()) / _MEGA
    axes.set_title(
        f"{name}: {record.backwards} backwards, {total:,.0f} MB, {record.seconds:.2f} s",
        loc="left",
        fontsize=11,
    )
    heights = range(len(_LANES), 0, -1)
    for height, (lane, _, colour) in zip(heights, _LANES, strict=True):
        bars = _bars(record, lane)
        axes.broken_barh(bars, (height - 0.36, 0.72), color=colour, alpha=0.22, lw=0)
        starts = [start for start, _ in bars]
        axes.vlines(starts, height - 0.36, height + 0.36, color=colour, lw=1.1)
        count, sent = record.collectives[lane], record.bytes_sent[lane] / _MEGA
        axes.annotate(
            f"{count}\n{sent:,.0f} MB",
            (1.01, height),
            xycoords=("axes fraction", "data"),
            va="center",
            fontsize=10,
            color=colour,
            annotation_clip=False,
        )
    axes.axvline(record.seconds, color="#555555", lw=1, ls=":")
    axes.set_xlim(0, end)
    axes.set_ylim(0.5, len(_LANES) + 0.5)
    axes.set_yticks(list(heights), [label for _, label, _ in _LANES])
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.grid(axis="x", color="#dddddd", lw=0.6)
    axes.set_axisbelow(True)


def _bars(record: StepRecord, lane: str) -> Sequence[tuple[float, float]]:
    """(start, length) of each transfer; where they overlap the shade is darker."""
    return [
        (transfer.started_s, transfer.finished_s - transfer.started_s)
        for transfer in record.transfers
        if transfer.lane == lane
    ]
