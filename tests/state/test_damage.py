"""Damaged files are found; of several checkpoints the newest whole one is taken."""

import random
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from onefold.cli import app
from onefold.errors import CheckpointError
from tests.harness import RankContext, pool_for
from tests.rig import gathered
from tests.state.run import make, train


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
