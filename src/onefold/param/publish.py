"""Station 6, publish. From: ``optim/master``. To: what the next forward reads.

Where the master is another memory than this rank's model shard it is copied there first (and
rounded to the model's dtype); where parameters are Replicate and the optimizer is Shard one
all-gather per unit completes ``param_full``; elsewhere nothing is sent.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from onefold.unit import Unit
from onefold.wire.collectives import Handle

MAX_WAVES: Final = 8
"""The optimizer walks over all of its parameters once per wave."""


def cut_waves(units: Sequence[Unit], *, is_elementwise: bool) -> list[Sequence[Unit]]:
    """Units that are stepped together, so that one wave is published behind the next one's update.

    Args:
        units: trainable units, in the order in which forward uses them.
        is_elementwise: the optimizer may update some parameters now and the others later.

    Returns:
        At least one wave; one for all units where publishing sends nothing.
    """
    sends = any(not unit.frees_parameters and unit.wire.mesh.shard.size > 1 for unit in units)
    num_waves = min(len(units), MAX_WAVES) if sends and is_elementwise else 1
    if num_waves <= 1:
        return [units]
    cuts = [len(units) * wave // num_waves for wave in range(num_waves + 1)]
    return [units[begin:end] for begin, end in pairwise(cuts)]


class Publisher:
    """Makes stepped masters visible to every rank's forward."""

    def __init__(self) -> None:
        self._started: list[tuple[Unit, Handle | None]] = []

    def start(self, units: Sequence[Unit]) -> None:
        """Publish stepped ``units``.

        Communication: one all-gather per unit that is Replicate over a shard axis;
            (W-1)/W * N * itemsize bytes out and in.
        """
        self._started += [(unit, unit.start_publish()) for unit in units]

    def finish(self) -> None:
        """Wait for all that was started."""
        started, self._started = self._started, []
        for unit, gather in started:
            if gather is not None:
                gather.wait()
            unit.publish_version()
