"""A model that leaves: out of an engine, out of a checkpoint, and into others' loaders."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, load_model
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM
from typer.testing import CliRunner

from onefold.cli import app
from onefold.errors import CheckpointError, StateError
from onefold.state import export
from tests.harness import RankContext, pool_for
from tests.rig import STAGES, gathered, start
from tests.state.run import BF16, make, no_space, train
from tests.state.test_experts import Sparse

TINY = BertConfig(
    vocab_size=50,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=24,
    max_position_embeddings=12,
)


def bert(ctx: RankContext, folder: str, stage: int, config: dict[str, Any]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = BertForMaskedLM(TINY)
    engine = start(
        ctx, model, stage, optimizer=torch.optim.AdamW(model.parameters(), lr=0.01), config=config
    )
    tokens = torch.arange(10)[None] + ctx.rank
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
    path = engine.save_checkpoint(Path(folder) / "checkpoints")
    files = engine.save_16bit_model(Path(folder) / "whole")
    assert [file.name for file in files] == ["model.safetensors"]
    files = engine.save_16bit_model(Path(folder) / "cut", max_shard_bytes=4000)
    assert len(files) >= 3
    if ctx.rank == 0:
        for name in ("whole", "cut", "exported", "wide"):
            TINY.save_pretrained(Path(folder) / name)
    assert path.name == "global_step1"
    return engine.full_state_dict()


@pytest.mark.parametrize("config", [{}, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 3])
def test_from_pretrained_loads_it(tmp_path: Path, stage: int, config: dict[str, Any]) -> None:
    state = pool_for(2).run(bert, folder=str(tmp_path), stage=stage, config=config)[1]
    checkpoint = str(tmp_path / "checkpoints")
    for name, options in (("exported", ["--max-shard-size", "4KB"]), ("wide", [])):
        dtype = "float32" if name == "wide" else "model"
        command = ["export", checkpoint, str(tmp_path / name), "--dtype", dtype, *options]
        told = CliRunner().invoke(app, command)
        assert told.exit_code == 0, told.output
    for name in ("whole", "cut", "exported", "wide"):
        model, report = BertForMaskedLM.from_pretrained(
            tmp_path / name, output_loading_info=True, dtype="auto"
        )
        assert not any(report.values()), (name, report)
        assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
        for key, tensor in model.state_dict().items():
            wanted = state[key]
            if name in ("whole", "cut"):
                wanted = wanted.bfloat16()
            assert torch.equal(tensor.to(torch.float32).bfloat16(), wanted.bfloat16()), (name, key)
            if name in ("whole", "cut") or (name == "exported" and config):
                assert tensor.dtype == torch.bfloat16 or not tensor.is_floating_point()
            elif not config:
                assert torch.equal(tensor, wanted)
    index = json.loads((tmp_path / "cut" / "model.safetensors.index.json").read_text())
    tensors: dict[str, Tensor] = {}
    for path in sorted((tmp_path / "cut").glob("*.safetensors")):
        found = load_file(path)
        assert len(found) == 1 or sum(tensor.nbytes for tensor in found.values()) <= 4000
        assert all(index["weight_map"][key] == path.name for key in found)
        tensors |= found
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())


def test_masters_keep_what_bf16_has_no_room_for(tmp_path: Path) -> None:
    """The export in fp32 is the masters, not the bf16 weights made wide."""
    pool_for(2).run(bert, folder=str(tmp_path), stage=2, config=BF16)
    arguments = ["export", str(tmp_path / "checkpoints"), str(tmp_path / "wide")]
    assert CliRunner().invoke(app, [*arguments, "--dtype", "float32"]).exit_code == 0
    wide = load_file(tmp_path / "wide" / "model.safetensors")
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    assert all(torch.equal(wide[name].bfloat16(), whole[name]) for name in whole)
    assert any(not torch.equal(wide[name], whole[name].float()) for name in whole)


def one_model(ctx: RankContext, folder: str, stage: int) -> dict[str, Tensor]:
    engine = make(ctx, stage, bf16=BF16["bf16"])
    train(ctx, engine, 0, 2)
    engine.save_16bit_model(folder, max_shard_bytes=100)
    engine.save_16bit_model(folder)  # replaces all of it
    return engine.full_state_dict()


@pytest.mark.parametrize("stage", STAGES)
def test_state_dict_and_file_are_one(tmp_path: Path, stage: int) -> None:
    wanted, _ = pool_for(2).run(one_model, folder=str(tmp_path), stage=stage)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == wanted.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, wanted[name]), name
        assert tensor.dtype == wanted[name].dtype


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embed(tokens)).square().sum()


def tied(ctx: RankContext, folder: str) -> dict[str, Tensor]:
    engine = start(ctx, Tied(), 3)
    engine.save_16bit_model(folder)
    return engine.full_state_dict()


def test_tied_parameters_load_with_safetensors_own_loader(tmp_path: Path) -> None:
    state = pool_for(2).run(tied, folder=str(tmp_path))[0]
    assert state.keys() == {"embed.weight", "head.weight"}
    model = Tied().bfloat16()
    missing, surplus = load_model(model, tmp_path / "model.safetensors")
    assert not missing
    assert not surplus
    assert torch.equal(model.head.weight, state["head.weight"].bfloat16())


def with_experts(ctx: RankContext, folder: str) -> dict[str, Tensor]:
    engine = start(ctx, Sparse(2), 3, optimizer=lambda p: torch.optim.AdamW(p, lr=0.1))
    engine.backward(engine(ctx.data(8, 4, key=1)))
    engine.step()
    engine.save_16bit_model(folder)
    engine.save_checkpoint(folder)
    return engine.full_state_dict()


def test_experts_of_all_ranks_are_in_it(tmp_path: Path) -> None:
    state = pool_for(4).run(with_experts, folder=str(tmp_path))[3]
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name].bfloat16()) for name in found)
    assert CliRunner().invoke(app, ["export", str(tmp_path), str(tmp_path / "out")]).exit_code == 0
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert exported.keys() == state.keys()
    assert all(torch.equal(exported[name], state[name]) for name in state)


def most_at_once(ctx: RankContext, folder: str) -> tuple[int, int]:
    """The most elements that the writer was handed at once, and those of the model."""
    layers = [nn.Linear(30, 30) for _ in range(8)]
    engine = start(ctx, nn.Sequential(*layers), 3, zero={"reduce_bucket_size": 1000})
    sizes = []
    take = export._Stream.take

    def watched(self: export._Stream, name: str) -> Tensor:
        tensor = take(self, name)
        sizes.append(tensor.numel() + sum(left.numel() for left in self._here.values()))
        assert sum(unit.is_unsharded for unit in engine._units) == 0
        return tensor

    export._Stream.take = watched  # type: ignore[method-assign]
    try:
        engine.save_16bit_model(folder)
    finally:
        export._Stream.take = take  # type: ignore[method-assign]
    return max(sizes, default=0), sum(param.numel() for param in engine.module.parameters())


def test_no_rank_holds_all_of_it(tmp_path: Path) -> None:
    (writer, total), (other, _) = pool_for(2).run(most_at_once, folder=str(tmp_path))
    assert other == 0
    assert 0 < writer <= total / 8


def fails(ctx: RankContext, folder: str) -> None:
    engine = make(ctx, 3)
    engine.save_16bit_model(folder)
    before = (Path(folder) / "model.safetensors").read_bytes()
    with no_space(0, ctx), pytest.raises((OSError, CheckpointError), match="File too large"):
        engine.save_16bit_model(folder)
    with (
        pytest.raises(StateError, match="save_16bit_model"),
        engine.coalesce_grad_reduction(),
    ):
        engine.save_16bit_model(folder)
    gathered(None)
    assert [path.name for path in Path(folder).iterdir()] == ["model.safetensors"]
    assert (Path(folder) / "model.safetensors").read_bytes() == before
    train(ctx, engine, 0, 1)
    engine.save_16bit_model(folder)


def test_a_full_disk_leaves_the_model_that_was_there(tmp_path: Path) -> None:
    pool_for(2).run(fails, folder=str(tmp_path))


def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path) -> None:
    pool_for(2).run(bert, folder=str(tmp_path), stage=1, config={})
    damaged = next((tmp_path / "checkpoints" / "global_step1").glob("master-00001*"))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    command = ["export", str(tmp_path / "checkpoints"), str(tmp_path / "out")]
    told = CliRunner().invoke(app, command)
    assert told.exit_code == 1
    assert damaged.name in told.output
    assert not (tmp_path / "out").exists()
    assert CliRunner().invoke(app, [*command, "--max-shard-size", "much"]).exit_code == 2
