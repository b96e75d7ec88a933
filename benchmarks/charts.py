"""Charts: time against N, memory against traffic, and the timeline of one step."""

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.cell import EngineName
from benchmarks.results import CellResult, EngineResult, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MEGA: Final = 1_000_000
_COLOURS: Final = {
    "floor": "#555555",
    "bare": "#e6a08e",
    "window": "#c2452d",
    "armed": "#7d1f0e",
    "ddp": "#8fb6d8",
    "ddp_no_sync": "#2d6fa8",
    "fsdp2": "#a5cf9f",
    "fsdp2_deferred": "#3d8f35",
    "deepspeed": "#c9b3e0",
    "deepspeed_coalesced": "#7446a6",
}
TIME, MEMORY, TIMELINE = "time_by_backwards.png", "memory_by_traffic.png", "timeline.png"


def draw(run: Run, folder: Path) -> list[str]:
    """Write the charts that the run has data for; their names."""
    folder.mkdir(parents=True, exist_ok=True)
    charts = {TIME: _time, MEMORY: _memory}
    drawn = [name for name, plot in charts.items() if _draw_one(run, folder / name, plot)]
    if _timeline(run, folder / TIMELINE):
        drawn.append(TIMELINE)
    return drawn


def _draw_one(run: Run, path: Path, plot: "Callable[[Run, Axes], bool]") -> bool:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#dddddd", lw=0.6)
    axes.set_axisbelow(True)
    if not plot(run, axes):
        return False
    figure.savefig(path, dpi=100)
    return True


def _time(run: Run, axes: "Axes") -> bool:
    """Milliseconds per backward: flat is what the compute costs."""
    lines: dict[EngineName, dict[int, float]] = {}
    for cell in run.cells:
        for num_backwards in (1, 4, 8, 16):
            if cell in run.find("25m", num_backwards):
                for text, own in cell.engines.items():
                    name = EngineName.parse(text)
                    if own.seconds and name.name in _COLOURS and name.stage in (None, 3):
                        value = 1e3 * statistics.median(own.seconds) / num_backwards
                        lines.setdefault(name, {}).setdefault(num_backwards, value)
    for name, points in lines.items():
        if len(points) > 1:
            places = sorted(points)
            style = "--" if name.name == "floor" else "-"
            values = [points[place] for place in places]
            axes.plot(
                places, values, style, marker="o", color=_COLOURS[name.name], label=name.label
            )
    axes.set_xscale("log", base=2)
    axes.set_xticks([1, 4, 8, 16], ["1", "4", "8", "16"])
    axes.set_yscale("log")
    axes.set_xlabel("backwards in one step")
    axes.set_ylabel("milliseconds per backward, log scale")
    axes.set_title("25m, 2 ranks: step time / number of backwards", loc="left")
    if axes.lines:
        axes.legend(frameon=False, fontsize=9)
    return bool(axes.lines)


def _memory(run: Run, axes: "Axes") -> bool:
    """One point per engine of the cells of 25m with 8 backwards."""
    seen: set[EngineName] = set()
    for cell in run.find("25m", 8):
        for name, own in _probed(cell):
            if name.name in _COLOURS and name not in seen:
                seen.add(name)
                _point(axes, name, own)
    axes.set_xlabel("MB sent by a rank in one step of 8 backwards")
    axes.set_ylabel("MB of memory in one rank: open between steps, filled at the peak")
    axes.set_title("25m, 2 ranks: memory against traffic", loc="left")
    return bool(seen)


def _probed(cell: CellResult) -> list[tuple[EngineName, EngineResult]]:
    pairs = [(EngineName.parse(text), own) for text, own in cell.engines.items()]
    return [(name, own) for name, own in pairs if own.probe is not None]


def _point(axes: "Axes", name: EngineName, own: EngineResult) -> None:
    assert own.probe is not None
    sent = own.probe.told_bytes
    if sent is None:
        return
    colour, x = _COLOURS[name.name], sent / MEGA
    held, peak = own.probe.held_bytes / MEGA, own.probe.peak_bytes / MEGA
    axes.plot([x, x], [held, peak], color=colour, lw=1)
    axes.plot([x], [held], "o", color=colour, mfc="white")
    axes.plot([x], [peak], "o", color=colour)
    axes.annotate(
        str(name).replace("_", " "),
        (x, peak),
        xytext=(4, 4),
        textcoords="offset points",
        fontsize=8,
        color=colour,
    )


def _timeline(run: Run, path: Path) -> bool:
    """The demo's picture, of stage 3 with and without the window."""
    from onefold.cli.record import StepRecord
    from onefold.cli.timeline import draw as draw_timeline

    for cell in run.cells:
        records = [
            own.probe.record
            for text in ("window@3", "bare@3")
            if (own := cell.engines.get(text)) is not None and own.probe is not None
        ]
        if len(records) == 2 and all(records):
            window, bare = (StepRecord.from_json(dict(record or {})) for record in records)
            draw_timeline(path, window=window, bare=bare, setting=f"{cell.cell.title}, stage 3")
            return True
    return False
