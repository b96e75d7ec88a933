"""Suite: which cells the two forms of the command run, in order of importance."""

from collections import defaultdict
from typing import Final

from benchmarks.cell import STAGES_OF, Cell, EngineName, HostCell
from benchmarks.cover import Pair, Row, cover, pairs_of

FULL_S: Final = 59.7 * 60.0
QUICK_S: Final = 7.5 * 60.0
"""No cell begins that is expected to end after so many seconds."""

HEADLINE_ROUNDS: Final = 15
WORKLOADS: Final = ("25m", "77m", "minilm", "800")
NUM_BACKWARDS: Final = (1, 4, 8, 16)
WORLD_SIZES: Final = (2, 4)
NESTED: Final = ("armed", "ddp_no_sync", "fsdp2_deferred")
"""Engines that are told which backward is the last; nested backwards leave them nothing to do."""

_BACKWARD_S: Final = {"25m": 0.12, "77m": 0.27, "minilm": 0.6, "800": 0.045, "tiny": 0.005}
_START_S: Final = {"25m": 1.0, "77m": 2.0, "minilm": 1.5, "800": 0.6, "tiny": 0.3}
_TIMES_FLOOR: Final = {
    "floor": 1.0,
    "wire_floor": 0.3,
    "bare": 2.2,
    "window": 1.15,
    "armed": 1.15,
    "ddp": 2.0,
    "ddp_no_sync": 1.35,
    "fsdp2": 4.5,
    "fsdp2_deferred": 3.0,
    "deepspeed": 5.0,
    "deepspeed_coalesced": 4.2,
}
_PROCESSES_S: Final = 8.0


def estimate_s(cell: Cell | HostCell) -> float:
    """About how long a cell takes on a quiet machine of 2 cores."""
    crowd = max(1.0, cell.world_size / 2)
    if isinstance(cell, HostCell):
        return _PROCESSES_S + 2 * cell.pairs * _BACKWARD_S[cell.workload] * crowd
    total = 2 * _PROCESSES_S if any(n.family == "deepspeed" for n in cell.names) else _PROCESSES_S
    backward_s, start_s = _BACKWARD_S[cell.workload] * crowd, _START_S[cell.workload] * crowd
    total += cell.world_size * cell.num_backwards * backward_s  # the reference
    for name in cell.names:
        per_backward = backward_s * _TIMES_FLOOR[name.name]
        total += 2 * cell.num_backwards * per_backward + 2 * start_s
        timed = cell.steps * cell.num_backwards + min(2, cell.num_backwards)
        total += cell.rounds * (timed * per_backward + start_s)
    return total


def quick() -> list[Cell | HostCell]:
    """8 backwards, stages 2 and 3, 2 ranks."""
    own = ("floor", "ddp_no_sync", "window@2", "window@3", "armed@3")
    peers = ("deepspeed_coalesced@3", "fsdp2_deferred@2", "fsdp2_deferred@3")
    return [
        Cell(workload="25m", engines=(*own, *peers), rounds=3),
        Cell(workload="77m", engines=own[:4], rounds=2),
        HostCell(workload="800", pairs=100),
        HostCell(workload="25m", pairs=20),
        Cell(workload="minilm", engines=("floor", "window@3"), rounds=2),
    ]


def full() -> list[Cell | HostCell]:
    """The targets first, then what covers the grid, then more points for the charts."""
    fixed = [*_targets(), *_bytes()]
    return [*fixed, *covering(fixed), *_charts()]


def _targets() -> list[Cell | HostCell]:
    windows = ("window@1", "window@2", "window@3", "armed@3")
    peers = ("deepspeed_coalesced@3", "fsdp2_deferred@2", "fsdp2_deferred@3")
    headline = ("wire_floor", "floor", "ddp_no_sync", *windows)
    bare = [
        each
        for stage in (0, 1, 2, 3)
        for each in (
            f"bare@{stage}",
            f"deepspeed@{stage}",
            f"fsdp2@{stage}" if stage > 1 else "ddp",
        )
        if stage != 1 or each != "ddp"
    ]
    deferred = ("ddp_no_sync", "window@3", "deepspeed_coalesced@3", "fsdp2_deferred@3")
    return [
        Cell(workload="25m", engines=(*headline, *peers), rounds=HEADLINE_ROUNDS),
        # Fully sharded, FSDP2 takes 15 s a step here: it has a cell of its own.
        Cell(workload="77m", engines=(*headline[:-1], *peers[:2]), rounds=HEADLINE_ROUNDS),
        Cell(workload="77m", engines=("floor", "window@3", peers[2]), rounds=5),
        Cell(workload="minilm", engines=("floor", "window@3"), rounds=7),
        HostCell(workload="800", stage=3, pairs=200),
        HostCell(workload="800", stage=2, pairs=200),
        HostCell(workload="25m", stage=3, pairs=40),
        HostCell(workload="800", stage=3, pairs=100, dtype="bfloat16"),
        Cell(workload="25m", num_backwards=1, engines=("floor", *bare, "window@3"), rounds=5),
        Cell(
            workload="25m",
            num_backwards=4,
            engines=("floor", *bare, *deferred),
            rounds=3,
            keeps_timeline=True,
        ),
    ]


def _bytes() -> list[Cell | HostCell]:
    """Untimed: bytes of the direct transport against the loopback interface, and bf16."""
    own = tuple(f"{mode}@{stage}" for mode in ("bare", "window") for stage in range(4))
    cells: list[Cell | HostCell] = [
        Cell(
            workload="800",
            world_size=world_size,
            num_backwards=4,
            engines=own,
            rounds=0,
            transport="direct",
        )
        for world_size in WORLD_SIZES
    ]
    return [
        *cells,
        Cell(workload="800", num_backwards=4, engines=own, rounds=0, dtype="bfloat16"),
    ]


def _charts() -> list[Cell | HostCell]:
    deferred = ("ddp_no_sync", "window@3", "deepspeed_coalesced@3", "fsdp2_deferred@3")
    bare = ("bare@3", "bare@2", "deepspeed@3", "deepspeed@2", "fsdp2@3", "fsdp2@2")
    return [
        Cell(workload="25m", engines=("floor", *bare), rounds=0),
        Cell(workload="25m", num_backwards=16, engines=("floor", *deferred), rounds=1),
    ]


# -- the cover ------------------------------------------------------------------------------------


def covering(fixed: list[Cell | HostCell]) -> list[Cell | HostCell]:
    """Cells in which every pair of values meets that does not meet in ``fixed``."""
    covered: set[Pair] = set()
    for cell in fixed:
        if isinstance(cell, Cell) and cell.dtype == "float32" and cell.rounds:
            for name in cell.names:
                covered |= pairs_of(_row(cell, name))
    engines = [name for name in STAGES_OF if "floor" not in name]
    factors = {
        "workload": WORKLOADS,
        "num_backwards": NUM_BACKWARDS,
        "world_size": WORLD_SIZES,
        "engine": engines,
        "stage": (0, 1, 2, 3, None),
    }
    chosen = cover(factors, is_valid=_is_valid, cost=_cost, covered=covered)
    grouped: dict[tuple[str, int, int], list[str]] = defaultdict(list)
    for row in chosen:
        key = (row["workload"], row["num_backwards"], row["world_size"])
        grouped[key].append(str(EngineName(row["engine"], row["stage"])))
    cells: list[Cell | HostCell] = [
        Cell(
            workload=workload,
            num_backwards=num_backwards,
            world_size=world_size,
            engines=("floor", *engines),
            rounds=1,
        )
        for (workload, num_backwards, world_size), engines in grouped.items()
    ]
    return sorted(cells, key=estimate_s)


def _row(cell: Cell, name: EngineName) -> Row:
    return {
        "workload": cell.workload,
        "num_backwards": cell.num_backwards,
        "world_size": cell.world_size,
        "engine": name.name,
        "stage": name.stage,
    }


def _is_valid(row: Row) -> bool:
    stages = STAGES_OF[row["engine"]] or (None,)
    is_left_out = row["engine"] in NESTED or row["num_backwards"] == 1
    if row["workload"] == "minilm" and is_left_out:
        return False
    return row["stage"] in stages


def _cost(row: Row) -> float:
    crowd = row["world_size"] / 2
    workload: str = row["workload"]
    step_s = _BACKWARD_S[workload] * row["num_backwards"] * _TIMES_FLOOR[row["engine"]]
    return float((4 * step_s + 3 * _START_S[workload]) * crowd + 2.0)
