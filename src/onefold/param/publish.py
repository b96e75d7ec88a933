"""Station 6, publish. From: ``optim/step``. To: what the next forward reads.

Where the master is another memory than this rank's model shard it is copied there first (and
rounded to the model's dtype); where parameters are Replicate and the optimizer is Shard one
all-gather per unit completes ``param_full``; elsewhere nothing is sent.
"""

from collections.abc import Sequence

from onefold.unit import Unit


def publish(units: Sequence[Unit]) -> None:
    """Make stepped masters visible to every rank's forward.

    Args:
        units: trainable units, in the order in which forward uses them.
    Communication: one all-gather per unit that is Replicate over a shard axis;
        (W-1)/W * N * itemsize bytes out and in.
    """
    gathers = [unit.start_publish() for unit in units]
    for gather in gathers:
        if gather is not None:
            gather.wait()
    for unit in units:
        unit.publish_version()
