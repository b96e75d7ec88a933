"""Under torchrun: a job whose ranks are killed comes to the bits of one that was left alone."""

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from onefold.state.folder import latest_of
from tests.harness import RankContext, pool_for
from tests.state.restarted import STEPS, Plan, main

ROOT = Path(__file__).parents[2]


def torchrun(plan: Plan, path: Path, num_ranks: int, restarts: int) -> list[Any] | None:
    """What every rank has come to; None if the job failed."""
    path.write_text(json.dumps(plan._asdict()))
    command = [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes", "1", "--nproc-per-node", str(num_ranks)),
        *("--max-restarts", str(restarts), "--monitor-interval", "0.1"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"),
        *("-m", "tests.state.restarted", str(path)),
    ]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # see docs/design/checkpoints.md
    }
    ended = subprocess.run(
        command, cwd=ROOT, env=environment, timeout=240, check=False, capture_output=True, text=True
    )
    if ended.returncode:
        assert "Signal 9 (SIGKILL)" in ended.stderr, ended.stderr[-4000:]
        return None
    return [json.loads(path.with_suffix(f".{rank}").read_text()) for rank in range(num_ranks)]


def left_alone(ctx: RankContext, folder: str, stage: int) -> dict[str, Any]:
    found = json.loads(json.dumps(main(Plan(folder, stage, []), 0, ctx.rank)))
    assert isinstance(found, dict)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_a_killed_rank_changes_no_bit(tmp_path: Path, stage: int) -> None:
    """4 ranks, killed twice; 12 samples an epoch and rank, which are 3 steps."""
    numbers = random.Random(stage)
    first, second = sorted(numbers.sample(range(1, STEPS - 1), 2))
    kills = [(numbers.randrange(4), step, numbers.randrange(4)) for step in (first, second)]
    plan = Plan(str(tmp_path / "killed"), stage, kills)
    wanted = pool_for(4).run(left_alone, folder=str(tmp_path / "alone"), stage=stage)
    assert torchrun(plan, tmp_path / "plan.json", 4, restarts=2) == wanted, kills
    assert wanted[0]["steps"] == STEPS


@pytest.mark.slow
def test_restarted_with_fewer_ranks(tmp_path: Path) -> None:
    """Killed with 4 ranks and started again with 3: as loaded with 3 ranks on purpose."""
    numbers = random.Random(0)
    kill = (numbers.randrange(4), numbers.randrange(2, STEPS - 1), numbers.randrange(4))
    plan = Plan(str(tmp_path / "killed"), 3, [kill])
    assert torchrun(plan, tmp_path / "plan.json", 4, restarts=0) is None
    assert latest_of(tmp_path / "killed") in (f"global_step{kill[1]}", f"global_step{kill[1] + 1}")
    shutil.copytree(tmp_path / "killed", tmp_path / "copy")
    wanted = pool_for(3).run(left_alone, folder=str(tmp_path / "copy"), stage=3)
    again = plan._replace(kills=[])
    assert torchrun(again, tmp_path / "again.json", 3, restarts=0) == wanted
    assert wanted[0]["steps"] == STEPS
