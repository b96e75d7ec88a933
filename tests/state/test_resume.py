"""A run that is saved and loaded goes on with the same bits, at any W and stage."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from tests.harness import RankContext, pool_for
from tests.harness.pool import WorkerPool
from tests.rig import STAGES
from tests.state.run import BF16, FP16, Net, k_and_m, m, make, whole_states


@pytest.mark.parametrize("config", [{}, BF16, FP16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_resume_is_exact(
    tmp_path: Path, stage: int, world_size: int, config: dict[str, Any]
) -> None:
    arguments = {"stage": stage, "folder": str(tmp_path), "config": config}
    undisturbed = pool_for(world_size).run(k_and_m, **arguments)
    fresh = WorkerPool(world_size)  # processes that have run nothing
    assert fresh.run(m, **arguments) == undisturbed
    fresh.kill()


def weights_of(ctx: RankContext, stage: int, folder: str) -> dict[str, Any]:
    engine = make(ctx, stage, seed=3)
    engine.load_checkpoint(folder)
    found = {name: tensor.tolist() for name, tensor in engine.full_state_dict().items()}
    moments = {key: value.tolist() for key, value in whole_states(engine).items()}
    return {"weights": found, "moments": moments}


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
