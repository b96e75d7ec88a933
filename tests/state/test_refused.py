"""What is not saved, and what is loaded only when asked for."""

import math
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from onefold.errors import CheckpointError, StateError
from tests.harness import RankContext, pool_for
from tests.rig import gathered, start
from tests.state.run import Net, k_and_m, make


def refused(ctx: RankContext, folder: str) -> None:
    engine = make(ctx, 3)
    with (
        pytest.raises(StateError, match=r"save_checkpoint\(\) inside coalesce"),
        engine.coalesce_grad_reduction(),
    ):
        engine.save_checkpoint(folder)
    engine.backward(engine(ctx.data(6, 5, key=1)))
    with pytest.raises(StateError, match="gradients since the last step"):
        engine.save_checkpoint(folder)
    engine.step()
    for value, message in (({"x": torch.ones(1)}, r"client_state=\)\['x'\]"), ({"k": {1: 2}}, "k")):
        with pytest.raises(TypeError, match=message):
            engine.save_checkpoint(folder, client_state=value)
    with pytest.raises(ValueError, match="keep_last=0"):
        engine.save_checkpoint(folder, keep_last=0)
    for tag in ("", "a/b", ".a", "latest"):
        with pytest.raises(ValueError, match="tag="):
            engine.save_checkpoint(folder, tag)
    if ctx.world_size > 1:
        with pytest.raises((ValueError, CheckpointError), match="keep_last or client_state"):
            engine.save_checkpoint(folder, client_state={"rank": ctx.rank})
    gathered(None)  # rank 0 tidies up
    assert [path.name for path in Path(folder).iterdir()] == [".lock"]
    assert engine.load_checkpoint(folder) == (None, {})
    engine.save_checkpoint(folder)
    other = make(ctx, 2)
    with pytest.raises(CheckpointError, match=r"another job or engine|rank 0 failed"):
        other.save_checkpoint(folder)


def test_what_is_refused(tmp_path: Path) -> None:
    pool_for(2).run(refused, folder=str(tmp_path))


class Wide(Net):
    """Another head, one parameter more."""

    def __init__(self) -> None:
        super().__init__(4)
        self.head = nn.Linear(7, 6, bias=False)
        self.extra = nn.Linear(1, 1)


def partial_load(ctx: RankContext, folder: str) -> None:
    net = Wide()
    engine = start(ctx, net, 3, optimizer=torch.optim.AdamW(net.parameters()))
    before = engine.full_state_dict()
    with pytest.raises(CheckpointError) as caught:
        engine.load_checkpoint(folder, load_module_only=True)
    for text in ("extra.weight", "in the model and not in the checkpoint", "head.weight: shape"):
        assert text in str(caught.value)
    after = engine.full_state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    engine.load_checkpoint(folder, load_module_only=True, exclude=["head.*", "extra.*"])
    after = engine.full_state_dict()
    assert torch.equal(before["head.weight"], after["head.weight"])
    assert not torch.equal(before["embed.weight"], after["embed.weight"])
    assert engine.global_steps == 0


def test_a_part_is_loaded_only_when_asked_for(tmp_path: Path) -> None:
    pool_for(2).run(k_and_m, stage=2, folder=str(tmp_path), config={})
    pool_for(2).run(partial_load, folder=str(tmp_path))


def forked(ctx: RankContext, folder: str) -> None:
    """A child that outlives the job, as a data loader's worker may, does not hold the folder."""
    engine = make(ctx, 0)
    engine.save_checkpoint(folder)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(read, 1)
        os._exit(0)
    try:
        engine.destroy()
        other = make(ctx, 0)
        other.save_checkpoint(folder, "other")
    finally:
        os.write(write, b"x")
        os.waitpid(pid, 0)
        os.close(read)
        os.close(write)


def test_a_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    pool_for(1).run(forked, folder=str(tmp_path))


def numbers(ctx: RankContext, folder: str) -> None:
    engine = make(ctx, 1)
    state = {"best": math.inf, "worst": -math.inf, "none": math.nan, "list": [1, None, "x", 0.1]}
    engine.save_checkpoint(folder, client_state=state)
    _, found = engine.load_checkpoint(folder)
    assert repr(found) == repr(state)


def test_infinite_numbers_come_back(tmp_path: Path) -> None:
    pool_for(2).run(numbers, folder=str(tmp_path))
