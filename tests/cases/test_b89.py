"""B89: a checkpoint that was half written when its job died is picked up on resume.

Whatever a job can leave behind, under the temporary name or (copied, or renamed by somebody) under
a checkpoint's own, the one before it loads. ``tests/state/test_killed.py`` kills the jobs.
"""

import shutil
from pathlib import Path

import pytest

from tests import rig
from tests.harness import RankContext, pool_for


def save_two(ctx: RankContext, folder: str) -> None:
    engine = rig.start(ctx, rig.House(), 2)
    for _ in range(2):
        engine.backward(engine(1.0))
        engine.step()
        engine.save_checkpoint(folder)


def load(ctx: RankContext, folder: str) -> tuple[str, float]:
    engine = rig.start(ctx, rig.House(), 3)
    path, _ = engine.load_checkpoint(folder)
    assert path is not None
    return path.name, float(rig.weights(engine)["w"][0])


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    pool_for(2).run(save_two, folder=str(folder))
    return folder


@pytest.mark.parametrize("name", [".global_step2.saving", "global_step2", ".global_step2.replaced"])
@pytest.mark.parametrize("latest", ["global_step1", "global_step2"])
def test_what_is_half_written_does_not_load(
    two: Path, tmp_path: Path, name: str, latest: str
) -> None:
    files = sorted(path.name for path in (two / "global_step2").iterdir())
    assert len(files) == 6
    for count in range(len(files)):
        for half in ("absent", "cut"):
            folder = tmp_path / f"{count}{half}"
            shutil.copytree(two / "global_step1", folder / "global_step1")
            (folder / "latest").write_text(latest)
            (folder / name).mkdir()
            for file in files[:count]:
                shutil.copy(two / "global_step2" / file, folder / name)
            if half == "cut":
                raw = (two / "global_step2" / files[count]).read_bytes()
                (folder / name / files[count]).write_bytes(raw[: len(raw) // 2])
            assert pool_for(2).run(load, folder=str(folder)) == [("global_step1", -1.0)] * 2


def test_negative_control_all_of_it_loads(two: Path) -> None:
    assert pool_for(2).run(load, folder=str(two)) == [("global_step2", -2.0)] * 2
