"""DeepSpeed's universal checkpoints load, at any world size and stage."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import onefold
from tests.harness import RankContext, pool_for
from tests.rig import Tower, start
from tests.state.run import whole_states
from tests.state.universal_folder import (
    SKIPPED,
    STEPS,
    TAG,
    Values,
    save,
    settings_of,
    write_universal,
)

LOAD: dict[str, Any] = {"checkpoint": {"load_universal": True}}


class Net(Tower):
    """In fp64, with a frozen part, buffers, a tied weight and one of other strides."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.frozen = nn.Linear(6, 5, dtype=torch.float64).requires_grad_(False)
        self.first = nn.Linear(6, 6, bias=False, dtype=torch.float64)
        self.first.weight = nn.Parameter(torch.randn(6, 6, dtype=torch.float64).T)
        self.second = nn.Linear(6, 6, bias=False, dtype=torch.float64)
        self.second.weight = self.first.weight
        self.register_buffer("shift", torch.zeros(6, dtype=torch.float64))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.second(torch.tanh(self.first(self.embed(tokens).mean(dim=1) + self.shift)))
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return (self.head(self.norm(hidden)).squeeze(-1) + self.frozen(hidden).sum(dim=1)).mean()


def groups_of(net: nn.Module) -> list[list[str]]:
    trained = [(name, p.dim()) for name, p in net.named_parameters() if p.requires_grad]
    return [[n for n, dim in trained if dim > 1], [n for n, dim in trained if dim <= 1]]


def adamw(net: nn.Module, **settings: Any) -> torch.optim.AdamW:
    params = dict(net.named_parameters())
    groups = [{"params": [params[name] for name in names]} for names in groups_of(net)]
    return torch.optim.AdamW(groups, lr=0.3, **settings)


def engine_of(
    ctx: RankContext, stage: int, net: nn.Module | None = None, **config: Any
) -> onefold.Engine:
    net = Net(5) if net is None else net
    return start(ctx, net, stage, optimizer=adamw(net), config=LOAD | config)


def write(folder: Path, *, is_sharded: bool, **more: Any) -> Values:
    net = Net()
    return write_universal(folder, net, groups_of(net), is_sharded=is_sharded, **more)


def masters_of(engine: onefold.Engine) -> dict[str, Tensor]:
    found = {}
    for unit in engine._units:
        flat = unit.gather(unit.master)
        for slot, view in zip(unit.slots, unit.views_of(flat), strict=True):
            found[slot.name] = view.clone()
    return found


def tokens(rank: int) -> Tensor:
    return torch.randint(11, (6, 3), generator=torch.Generator().manual_seed(40 + rank))


def one_step(values: Values, world_size: int) -> dict[str, Tensor]:
    """What torch's AdamW makes of the values in one process, with every rank's tokens."""
    net = Net(1)
    own = dict(net.named_parameters())
    optimizer = adamw(net)
    for number, group in enumerate(optimizer.param_groups):
        group |= settings_of(number)
    with torch.no_grad():
        for name, tensors in values.params.items():
            own[name].copy_(tensors["fp32"])
            if len(tensors) > 1:
                optimizer.state[own[name]] = {
                    "step": torch.tensor(float(STEPS - SKIPPED)),
                    "exp_avg": tensors["exp_avg"].double(),
                    "exp_avg_sq": tensors["exp_avg_sq"].double(),
                }
        net.get_buffer("shift").copy_(values.buffers["shift"])
    net(torch.cat([tokens(rank) for rank in range(world_size)])).backward()
    optimizer.step()
    return {name: param.detach() for name, param in own.items()}


@contextmanager
def warnings_of(name: str) -> Iterator[list[str]]:
    """What a logger warns of."""
    found: list[str] = []
    logger, handler = logging.getLogger(name), logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield found
    finally:
        logger.removeHandler(handler)


def load_and_step(ctx: RankContext, stage: int, folder: str, values: Values) -> None:
    engine = engine_of(ctx, stage)
    with warnings_of("onefold.state.universal.open") as warned:
        path, client_state = engine.load_checkpoint(folder)
    if ctx.rank:
        assert not warned
    else:
        (text,) = warned
        assert "random number generators, the data loader's place" in text
    assert path == Path(folder).absolute() / TAG
    assert client_state == {"epoch": 7}
    assert (engine.global_steps, engine.skipped_steps) == (STEPS - SKIPPED, SKIPPED)
    masters, states = masters_of(engine), whole_states(engine)
    assert masters.keys() == values.params.keys()
    for name, tensors in values.params.items():
        for key, wanted in tensors.items():
            got = masters[name] if key == "fp32" else states[f"{name}/{key}"]
            assert torch.equal(got, wanted.double()), f"{name} {key}"  # fp64 holds every fp32
    assert torch.equal(engine.module.get_buffer("shift"), values.buffers["shift"].double())
    for number, group in enumerate(engine.optimizer.param_groups):
        wanted_settings = settings_of(number)
        assert {key: group[key] for key in wanted_settings} == wanted_settings
    engine.backward(engine(tokens(ctx.rank)))
    engine.step()
    reference = one_step(values, ctx.world_size)
    for name, weight in engine.full_state_dict().items():
        if name in reference:
            # Both are fp64; they add up the ranks' gradients in another order, and no more.
            torch.testing.assert_close(weight, reference[name], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("is_sharded", [False, True], ids=["whole", "sharded"])
@pytest.mark.parametrize(("world_size", "stage"), [(1, 0), (2, 1), (2, 3), (4, 2)])
def test_what_was_written_is_loaded(
    tmp_path: Path, world_size: int, stage: int, is_sharded: bool
) -> None:
    values = write(tmp_path, is_sharded=is_sharded)
    pool_for(world_size).run(load_and_step, stage=stage, folder=str(tmp_path), values=values)


def module_only(ctx: RankContext, folder: str, values: Values) -> None:
    engine = engine_of(ctx, 3)
    lrs = [group["lr"] for group in engine.optimizer.param_groups]
    with warnings_of("onefold.state.universal.open") as warned:
        engine.load_checkpoint(folder, load_module_only=True, exclude=["head.*"])
    assert not warned
    assert engine.global_steps == 0
    assert not engine.optimizer.state
    assert [group["lr"] for group in engine.optimizer.param_groups] == lrs
    masters, fresh = masters_of(engine), dict(Net(5).named_parameters())
    for name, tensors in values.params.items():
        wanted = fresh[name].detach() if name.startswith("head.") else tensors["fp32"].double()
        assert torch.equal(masters[name], wanted), name
    assert torch.equal(engine.module.get_buffer("shift"), values.buffers["shift"].double())


@pytest.mark.parametrize("is_sharded", [False, True], ids=["whole", "sharded"])
def test_the_model_alone(tmp_path: Path, is_sharded: bool) -> None:
    values = write(tmp_path, is_sharded=is_sharded)
    (tmp_path / TAG / "zero" / "optimizer_state.pt").unlink()  # nobody needs it
    pool_for(2).run(module_only, folder=str(tmp_path), values=values)


def scheduled(ctx: RankContext, folder: str) -> None:
    warmup = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 10}}
    engine = engine_of(ctx, 1, scheduler=warmup)
    engine.load_checkpoint(folder)
    fresh = engine_of(ctx, 1, scheduler=warmup)
    for _ in range(STEPS - SKIPPED):
        fresh.backward(fresh(tokens(ctx.rank)))
        fresh.step()
    for each in (engine, fresh):
        each.backward(each(tokens(ctx.rank)))
        each.step()
    rates = [[group["lr"] for group in each.optimizer.param_groups] for each in (engine, fresh)]
    assert rates[0] == rates[1]
    net = Net()
    optimizer = adamw(net)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    other = start(ctx, net, 1, optimizer=optimizer, config=LOAD, lr_scheduler=cosine)
    with pytest.raises(onefold.CheckpointError, match=r"CosineAnnealingLR.*last_batch_iteration"):
        other.load_checkpoint(folder)
    other.load_checkpoint(folder, load_lr_scheduler_states=False)
    with pytest.raises(onefold.CheckpointError, match="the engine has a scheduler: False"):
        engine_of(ctx, 1).load_checkpoint(folder)


def test_the_scheduler_goes_on(tmp_path: Path) -> None:
    more = {"lr_scheduler": {"last_batch_iteration": STEPS - SKIPPED - 1}}
    write(tmp_path, is_sharded=False, more=more)
    pool_for(2).run(scheduled, folder=str(tmp_path))


def torchs_scheduler(ctx: RankContext, folder: str) -> None:
    net = Net()
    optimizer = adamw(net)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    engine = start(ctx, net, 2, optimizer=optimizer, config=LOAD, lr_scheduler=cosine)
    engine.load_checkpoint(folder)
    assert cosine.last_epoch == 3
    assert cosine.T_max == 20


def test_a_scheduler_of_torch_goes_on(tmp_path: Path) -> None:
    net = Net()
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(adamw(net), T_max=20)
    state = cosine.state_dict() | {"last_epoch": 3}
    write(tmp_path, is_sharded=True, more={"lr_scheduler": state})
    pool_for(2).run(torchs_scheduler, folder=str(tmp_path))


def scaled(ctx: RankContext, folder: str) -> dict[str, float]:
    fp16 = {"enabled": True, "initial_scale_power": 4, "hysteresis": 3}
    net = Net(5).to(torch.float32)
    engine = engine_of(ctx, 2, net, fp16=fp16)
    engine.load_checkpoint(folder)
    return engine.loss_scaler.state_dict()


@pytest.mark.parametrize("is_sharded", [False, True], ids=["whole", "sharded"])
def test_the_loss_scale_goes_on(tmp_path: Path, is_sharded: bool) -> None:
    # Seven steps, of which number 3, counted from 0, overflowed: three clean ones since.
    scaler = {"cur_scale": 1024, "cur_iter": 7, "last_overflow_iter": 3, "cur_hysteresis": 2}
    write(tmp_path, is_sharded=is_sharded, loss_scaler=scaler)
    wanted = {
        "is_dynamic": True,
        "scale": 1024.0,
        "hysteresis": 2,
        "clean_steps": 3,
        "floor_skips": 0,
    }
    assert pool_for(2).run(scaled, folder=str(tmp_path)) == [wanted] * 2


def own_adam(ctx: RankContext, folder: str) -> None:
    engine = engine_of(ctx, 3)
    with warnings_of("onefold.state.universal.open") as warned:
        engine.load_checkpoint(folder)
    for text in ("whether it was Adam or AdamW; goes on as AdamW", "have: ['bias_correction']"):
        assert ctx.rank or text in warned[0]
    assert [group["lr"] for group in engine.optimizer.param_groups] == [0.05, 0.01]
    assert {float(state["step"]) for state in engine.optimizer.state.values()} == {3.0}
    assert all("step" not in group for group in engine.optimizer.param_groups)


@pytest.mark.parametrize("is_in_group", [False, True])
def test_deepspeeds_own_adam(tmp_path: Path, is_in_group: bool) -> None:
    """It counts steps as an int, in the group on a GPU; its groups do not say which Adam it is."""
    write(tmp_path, is_sharded=False)
    steps = sorted((tmp_path / TAG / "zero").glob("*/step.pt"))
    assert len(steps) == sum(len(names) for names in groups_of(Net()))
    for path in steps:
        path.unlink()
        if not is_in_group:
            save(STEPS - SKIPPED, path)
    keys = ("lr", "betas", "eps", "weight_decay")
    own = {"step": STEPS - SKIPPED} if is_in_group else {}
    groups = [
        {key: settings_of(number)[key] for key in keys}
        | {"bias_correction": True, "params": [number], **own}
        for number in range(2)
    ]
    save({"param_groups": groups}, tmp_path / TAG / "zero" / "optimizer_state.pt")
    pool_for(2).run(own_adam, folder=str(tmp_path))
