"""Station 6, publish. From: ``optim/step``. To: what the next forward reads.

The master is the same memory as this rank's model shard, so where parameters are Replicate and the
optimizer is Shard one all-gather per unit completes ``param_full``; elsewhere nothing is sent.
"""

from collections.abc import Sequence

from onefold.unit import Unit
from onefold.wire.collectives import Collectives


def publish(units: Sequence[Unit], collectives: Collectives) -> None:
    """Make stepped masters visible to every rank's forward.

    Args:
        units: trainable units, in the order in which forward uses them.
        collectives: the engine's wire.
    Communication: one all-gather per unit that is Replicate over a shard axis;
        (W-1)/W * N * itemsize bytes out and in.
    """
    gathers = [
        collectives.start_all_gather(unit.param_shard, unit.param_full, unit.index, unit.name)
        for unit in units
        if not unit.frees_parameters
    ]
    for gather in gathers:
        gather.wait()
    for unit in units:
        unit.publish_version()
