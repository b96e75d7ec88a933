"""Checkpoints: a run that is saved and loaded goes on with the same bits, at any W and stage."""

import hashlib
import os
import random
import resource
import shutil
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from typer.testing import CliRunner

import onefold
from onefold.cli import app
from onefold.errors import CheckpointError, StateError
from onefold.moe import MoE
from onefold.state.snapshot import persistent_buffers
from tests.harness import RankContext, pool_for
from tests.rig import STAGES, gathered, start

BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 4}}


class Net(nn.Module):
    """Repeated blocks with dropout, transposed weights, a frozen part, buffers and odd sizes."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Linear(5, 7)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(7, 7), nn.BatchNorm1d(7), nn.Dropout(0.3)) for _ in range(3)
        )
        self.frozen = nn.Linear(7, 3)
        self.frozen.requires_grad_(False)
        self.conv = nn.Conv2d(2, 3, (1, 2))
        self.conv.weight = nn.Parameter(
            self.conv.weight.detach().to(memory_format=torch.channels_last)
        )
        self.head = nn.Linear(7, 5, bias=False)
        self.head.weight = nn.Parameter(self.embed.weight.detach().T.clone().T.contiguous().T)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        pooled = (
            self.frozen(hidden).sum()
            + self.conv(hidden[:, None, None, :4].reshape(-1, 2, 1, 2)).square().sum()
        )
        return self.head(hidden).square().mean() + 0.1 * pooled


def make(ctx: RankContext, stage: int, seed: int = 0, **config: Any) -> onefold.Engine:
    net = Net(seed)
    groups: list[dict[str, Any]] = [
        {"params": [p for n, p in net.named_parameters() if "frozen" not in n and p.dim() > 1]},
        {
            "params": [p for n, p in net.named_parameters() if "frozen" not in n and p.dim() < 2],
            "weight_decay": 0.0,
        },
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    zero = {"reduce_bucket_size": 40}
    return start(
        ctx, net, stage, optimizer=optimizer, config=config, zero=zero, lr_scheduler=scheduler
    )


def train(ctx: RankContext, engine: onefold.Engine, first: int, steps: int) -> None:
    for step in range(first, first + steps):
        with engine.coalesce_grad_reduction():
            for chunk in range(2):
                data = ctx.data(6, 5, key=10 * step + chunk)
                engine.backward(engine(data.to(engine.plan.model_dtype or torch.float32)))
        engine.step()


def told(engine: onefold.Engine) -> dict[str, Any]:
    """A digest of everything that a step depends on, but how it is cut."""
    weights = engine.full_state_dict()
    raw = repr([(name, weights[name].tolist()) for name in sorted(weights)]).encode()
    buffers = [buffer.tolist() for buffer in persistent_buffers(engine.module).values()]
    return {
        "weights": hashlib.sha256(raw).hexdigest(),
        "buffers": buffers,
        "steps": engine.global_steps,
        "lr": [group["lr"] for group in engine.optimizer.param_groups],
        "scale": engine.loss_scaler.scale,
    }


def k_and_m(ctx: RankContext, stage: int, folder: str, config: dict[str, Any]) -> dict[str, Any]:
    engine = make(ctx, stage, **config)
    torch.manual_seed(ctx.rank)  # of the dropout masks
    train(ctx, engine, 0, 3)
    engine.save_checkpoint(folder, client_state={"epoch": 7})
    at = told(engine)
    train(ctx, engine, 3, 3)
    return {"at": at, "end": told(engine)}


def m(ctx: RankContext, stage: int, folder: str, config: dict[str, Any]) -> dict[str, Any]:
    engine = make(ctx, stage, seed=5, **config)
    torch.manual_seed(99)
    path, client_state = engine.load_checkpoint(folder)
    assert path == Path(folder).absolute() / "global_step3"
    assert client_state == {"epoch": 7}
    at = told(engine)
    train(ctx, engine, 3, 3)
    return {"at": at, "end": told(engine)}


@pytest.mark.parametrize("config", [{}, BF16, FP16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_resume_is_exact(
    tmp_path: Path, stage: int, world_size: int, config: dict[str, Any]
) -> None:
    arguments = {"stage": stage, "folder": str(tmp_path), "config": config}
    undisturbed = pool_for(world_size).run(k_and_m, **arguments)
    assert pool_for(world_size).run(m, **arguments) == undisturbed


def weights_of(ctx: RankContext, stage: int, folder: str) -> dict[str, Any]:
    engine = make(ctx, stage, seed=3)
    engine.load_checkpoint(folder)
    found = {name: tensor.tolist() for name, tensor in engine.full_state_dict().items()}
    moments = {key: value.tolist() for key, value in whole_states(engine).items()}
    return {"weights": found, "moments": moments}


def whole_states(engine: onefold.Engine) -> dict[str, Tensor]:
    """Every elementwise optimizer state, whole."""
    found = {}
    pieces = engine._stepper.masters.pieces
    for unit in engine._units:
        for key in ("exp_avg", "exp_avg_sq"):
            if unit.index not in pieces:
                continue
            shard = torch.zeros_like(unit.master)
            for index, piece in enumerate(pieces[unit.index]):
                offset, _, numel = unit.piece(index)
                if piece in engine.optimizer.state:
                    shard[offset : offset + numel] = engine.optimizer.state[piece][key]
            flat = unit.gather(shard)
            for slot, view in zip(unit.slots, unit.views_of(flat), strict=True):
                found[f"{slot.name}/{key}"] = view.clone()
    return found


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [((w1, s1), (w2, s2)) for (w1, s1, w2, s2) in [
        (1, 0, 2, 3), (2, 3, 1, 0), (2, 3, 4, 1), (4, 2, 2, 3), (3, 3, 4, 3), (4, 0, 3, 2),
        (2, 1, 3, 3), (4, 3, 1, 1), (3, 1, 2, 0),
    ]],
)  # fmt: skip
def test_any_world_size_and_stage_loads(
    tmp_path: Path, saved: tuple[int, int], loaded: tuple[int, int]
) -> None:
    pool_for(saved[0]).run(k_and_m, stage=saved[1], folder=str(tmp_path), config={})
    wanted = pool_for(saved[0]).run(weights_of, stage=saved[1], folder=str(tmp_path))
    found = pool_for(loaded[0]).run(weights_of, stage=loaded[1], folder=str(tmp_path))
    for one in found:
        assert one["weights"].keys() == wanted[0]["weights"].keys()
        for name, values in one["weights"].items():
            if "running" not in name:  # buffers are those of a rank
                assert values == wanted[0]["weights"][name], name
        assert one["moments"] == wanted[0]["moments"]
    assert any(abs(v) for row in wanted[0]["moments"].values() for v in torch.tensor(row).flatten())


def test_the_files_are_safetensors_and_cover_every_element_once(tmp_path: Path) -> None:
    pool_for(4).run(k_and_m, stage=0, folder=str(tmp_path), config={})
    total = 0
    for path in sorted((tmp_path / "global_step3").glob("master-*")):
        with safe_open(path, framework="pt") as file:
            total += sum(
                file.get_tensor(key).numel() for key in list(file.keys()) if "buffer/" not in key
            )
    assert total == sum(param.numel() for param in Net().parameters())


# -- refused -----------------------------------------------------------------------------------


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
        with pytest.raises((ValueError, CheckpointError), match="another tag or client_state"):
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


# -- damage ------------------------------------------------------------------------------------


def save_two(ctx: RankContext, folder: str) -> None:
    engine = make(ctx, 2)
    for step in range(2):
        train(ctx, engine, step, 1)
        engine.save_checkpoint(folder)


def load_any(ctx: RankContext, folder: str, tag: str | None = None) -> str:
    engine = make(ctx, 3, seed=1)
    try:
        path, _ = engine.load_checkpoint(folder, tag)
    except CheckpointError as error:
        return f"refused: {error}"
    return "nothing" if path is None else path.name


def flip(path: Path, at: float) -> None:
    raw = bytearray(path.read_bytes())
    raw[int(at * (len(raw) - 1))] ^= 16
    path.write_bytes(raw)


DAMAGES = {
    "flipped": flip,
    "truncated": lambda path, at: path.write_bytes(path.read_bytes()[: int(at * 50)]),
    "removed": lambda path, _: path.unlink(),
}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    pool_for(2).run(save_two, folder=str(folder))
    return folder


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_is_found_and_the_one_before_is_taken(two: Path, tmp_path: Path, kind: str) -> None:
    numbers = random.Random(kind)
    names = sorted(path.name for path in (two / "global_step2").iterdir())
    assert len(names) == 6
    for name in names:
        folder = tmp_path / name
        shutil.copytree(two, folder)
        DAMAGES[kind](folder / "global_step2" / name, numbers.random())
        assert pool_for(2).run(load_any, folder=str(folder)) == ["global_step1"] * 2, name
        shutil.rmtree(folder / "global_step1")
        for text in pool_for(2).run(load_any, folder=str(folder), tag="global_step2"):
            assert text.startswith("refused"), text
            assert name.removesuffix(".sha256") in text or "index" in text


def test_inspect_says_what_is_there_and_what_is_damaged(two: Path, tmp_path: Path) -> None:
    told = CliRunner().invoke(app, ["inspect", str(two / "global_step2")])
    assert told.exit_code == 0, told.output
    for text in ("after 2 steps", "AdamW", "embed.weight", "7 x 5", "whole: 4 files"):
        assert text in told.output
    for name in ("optimizer-00001.safetensors", "index.json"):
        folder = tmp_path / name
        shutil.copytree(two / "global_step2", folder)
        flip(folder / name, 0.5)
        told = CliRunner().invoke(app, ["inspect", str(folder)])
        assert told.exit_code == 1
        assert name in told.output
        assert "whole" not in told.output


def test_undamaged_the_newest_is_taken(two: Path) -> None:
    assert pool_for(3).run(load_any, folder=str(two)) == ["global_step2"] * 3


@pytest.mark.parametrize("text", ["", "global_step7", "global_step1"])
def test_latest_points_nowhere_or_back(two: Path, tmp_path: Path, text: str) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(two, folder)
    (folder / "latest").write_text(text)
    wanted = text if text == "global_step1" else "global_step2"
    assert pool_for(1).run(load_any, folder=str(folder)) == [wanted]


def keep_two(ctx: RankContext, folder: str) -> None:
    engine = make(ctx, 1)
    for step in range(4):
        train(ctx, engine, step, 1)
        engine.save_checkpoint(folder, keep_last=2)
    engine.save_checkpoint(folder, "global_step4")
    gathered(None)


def test_old_ones_go_and_a_tag_can_be_written_again(tmp_path: Path) -> None:
    pool_for(2).run(keep_two, folder=str(tmp_path))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [".lock", "global_step3", "global_step4", "latest"]


# -- killed ------------------------------------------------------------------------------------


def killed(ctx: RankContext, folder: str) -> int:
    """Children that save as fast as they can are killed; what is left always loads whole."""
    engine = start(ctx, nn.Linear(300, 300), 3, optimizer=None)
    numbers, loaded = random.Random(0), set()
    newest = -1
    for _ in range(50):
        pid = os.fork()
        if pid == 0:
            try:
                for value in range(newest + 1, newest + 1000):
                    with engine.full_parameters(), torch.no_grad():
                        for param in engine.module.parameters():
                            param.fill_(value)
                    engine.save_checkpoint(folder, f"s{value}", {"value": value}, keep_last=2)
            finally:
                os._exit(1)
        time.sleep(numbers.uniform(0.0, 0.04))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        path, client_state = engine.load_checkpoint(folder)
        if path is not None:
            assert client_state["value"] >= newest, "an older one came back"
            newest = client_state["value"]
            for tensor in engine.full_state_dict().values():
                assert torch.equal(tensor, torch.full_like(tensor, newest))
        loaded.add(newest)
    return len(loaded)


def test_killed_at_any_moment_the_last_whole_one_loads(tmp_path: Path) -> None:
    assert pool_for(1).run(killed, folder=str(tmp_path))[0] > 5


def full_disk(ctx: RankContext, folder: str) -> None:
    engine = make(ctx, 3)
    train(ctx, engine, 0, 1)
    engine.save_checkpoint(folder)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        if ctx.rank == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (400, before[1]))
        with pytest.raises((OSError, CheckpointError), match="File too large"):
            engine.save_checkpoint(folder, "full")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    gathered(None)  # rank 0 tidies up
    assert sorted(path.name for path in Path(folder).iterdir()) == [
        ".lock", "global_step1", "latest"
    ]  # fmt: skip
    assert engine.load_checkpoint(folder)[0] == Path(folder) / "global_step1"
    engine.save_checkpoint(folder, "after")


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    pool_for(2).run(full_disk, folder=str(tmp_path))


# -- experts, offload --------------------------------------------------------------------------


class Sparse(nn.Module):
    """A dense layer and four experts."""

    def __init__(self, size: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.dense = nn.Linear(4, 4)
        self.moe = MoE(4, lambda: nn.Linear(4, 4), 4, ep_size=size)

    def forward(self, x: Tensor) -> Tensor:
        out, balance, _ = self.moe(self.dense(x))
        return out.square().mean() + balance


def experts(
    ctx: RankContext, folder: str, stage: int, size: int, trains: bool, config: dict[str, Any]
) -> dict[str, Any]:
    net = Sparse(size)
    zero = config if stage == 3 else {}
    engine = start(ctx, net, stage, optimizer=partial(torch.optim.AdamW, lr=0.1), zero=zero)
    if trains:
        for key in range(2):
            engine.backward(engine(ctx.data(8, 4, key=key)))
            engine.step()
        engine.save_checkpoint(folder)
    else:
        engine.load_checkpoint(folder)
    return {name: tensor.tolist() for name, tensor in engine.full_state_dict().items()}


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ((2, 2, 2), (2, 2, 2)),
        ((2, 2, 2), (1, 3, 1)),
        ((4, 3, 2), (4, 1, 4)),
        ((1, 0, 1), (4, 3, 2)),
    ],
)
def test_experts_and_offload(
    tmp_path: Path, saved: tuple[int, int, int], loaded: tuple[int, int, int]
) -> None:
    """(world size, stage, ranks that share the experts); offloaded at stage 3."""
    offload = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    results = [
        pool_for(world_size).run(
            experts, folder=str(tmp_path), stage=stage, size=size, trains=trains, config=offload
        )
        for (world_size, stage, size), trains in ((saved, True), (loaded, False))
    ]
    assert all(one == results[0][0] for one in results[1])
