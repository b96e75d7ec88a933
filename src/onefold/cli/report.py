"""Report: the numbers of a finished run, as a table and as the summary's keys."""

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.table import Table

from onefold.cli.record import GRADIENTS, PARAMETERS, StepRecord, typical

MEGA = 1_000_000


class Comparison(NamedTuple):
    """A typical step each way, and the median duration of all of them; rank 0's view."""

    window: StepRecord
    bare: StepRecord
    window_seconds: float
    bare_seconds: float

    @classmethod
    def of(cls, records: Sequence[StepRecord]) -> "Comparison":
        """Compare the steps of one run; both kinds must be there."""
        window = [record for record in records if not record.is_bare]
        bare = [record for record in records if record.is_bare]
        return cls(
            typical(window),
            typical(bare),
            statistics.median(record.seconds for record in window),
            statistics.median(record.seconds for record in bare),
        )

    def summary(self) -> dict[str, Any]:
        """The part of ``summary.json`` that is about the wire."""
        window, bare = self.window, self.bare
        return {
            "backwards_per_step": window.backwards,
            "gradient_collectives_per_step": window.collectives[GRADIENTS],
            "gradient_collectives_per_step_without_window": bare.collectives[GRADIENTS],
            "gradient_bytes_per_step": window.bytes_sent[GRADIENTS],
            "gradient_bytes_per_step_without_window": bare.bytes_sent[GRADIENTS],
            "parameter_gathers_per_step": window.collectives[PARAMETERS],
            "parameter_gathers_per_step_without_window": bare.collectives[PARAMETERS],
            "step_seconds": self.window_seconds,
            "step_seconds_without_window": self.bare_seconds,
        }

    def table(self, title: str) -> Table:
        """One row per figure."""
        table = Table(title=title, title_justify="left")
        table.add_column("one step, one rank")
        for heading in ("with the window", "without it"):
            table.add_column(heading, justify="right")
        both = (self.window, self.bare)
        table.add_row("backwards", *(str(each.backwards) for each in both))
        for name, lane in (("gradient collectives", GRADIENTS), ("parameter gathers", PARAMETERS)):
            table.add_row(name, *(str(each.collectives[lane]) for each in both))
            table.add_row("  MB sent", *(f"{each.bytes_sent[lane] / MEGA:,.1f}" for each in both))
        totals = (sum(each.bytes_sent.values()) / MEGA for each in both)
        table.add_row("MB sent in all", *(f"{total:,.1f}" for total in totals))
        seconds = (self.window_seconds, self.bare_seconds)
        table.add_row("median seconds", *(f"{each:.2f}" for each in seconds))
        return table
