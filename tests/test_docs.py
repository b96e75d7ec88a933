"""What the README and the recipes show runs as it stands."""

import contextlib
import io
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.harness import RankContext, pool_for

ROOT = Path(__file__).parent.parent


def blocks_of(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def run_script(folder: Path, code: str, ranks: int) -> str:
    """What a script prints, on so many ranks; one without torchrun."""
    script = folder / "train.py"
    script.write_text(code)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    result = subprocess.run(
        [sys.executable, *(launch if ranks > 1 else []), str(script)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_readme_example_runs(tmp_path: Path, ranks: int) -> None:
    (code,) = blocks_of("README.md")
    printed = run_script(tmp_path, code, ranks)
    sent = "2 all_gather, 2 reduce_scatter" if ranks == 2 else "no collectives"
    # Both ranks write to one terminal, so lines may run together.
    assert printed.count(f"window flushed: 8 backward(s), {sent}") == ranks, printed


RECIPES = {
    "fp16": "0\n",  # no step was skipped
    "MoE": "'moe.experts.experts.3.weight'",
    "across": "4 backward(s), 16 all_gather, 2 all_reduce, 8 reduce_scatter",
    "max_bytes": "4 backward(s), 12 all_gather, 42 reduce_scatter",
    "PipelineStage": "backward(s), 2 reduce_scatter",
    "explain()": "without a window: n x",
    "peft": "window flushed: 4 backward(s)",
    "async_save": "24 [",
    "GradCache": "window flushed: 16 backward(s)",
}


@pytest.mark.parametrize("name", list(RECIPES))
def test_recipes_run(tmp_path: Path, name: str) -> None:
    """In the harness's workers: under torchrun each would import torch anew on every rank."""
    (code,) = [code for code in blocks_of("docs/recipes.md") if name in code]
    ranks = int(code.splitlines()[0].removeprefix("# ").split()[0])
    for printed in pool_for(ranks).run_within(200, run_recipe, code=code, folder=str(tmp_path)):
        assert RECIPES[name] in printed, printed


def test_the_recipe_of_resuming_resumes(tmp_path: Path) -> None:
    (code,) = [code for code in blocks_of("docs/recipes.md") if "async_save" in code]
    for ranks in (2, 3):
        pool_for(ranks).run_within(200, run_recipe, code=code, folder=str(tmp_path))
        assert (tmp_path / "checkpoints" / "latest").read_text() == "global_step20"
        shutil.rmtree(tmp_path / "model")
    counted = code.replace("engine.step()", "engine.step(); print('a step')")
    for printed in pool_for(2).run_within(200, run_recipe, code=counted, folder=str(tmp_path)):
        assert printed.count("a step") == 4  # of 24


def run_recipe(ctx: RankContext, code: str, folder: str) -> str:
    namespace: dict[str, Any] = {"__name__": "recipe"}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.chdir(folder):
        exec(compile(code, "recipe.py", "exec"), namespace)
    namespace["engine"].destroy()
    mesh: Any = namespace.get("mesh")
    for axis in range(0 if mesh is None else mesh.ndim):
        dist.destroy_process_group(mesh.get_group(axis))
    return printed.getvalue()


def test_every_linked_page_exists() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"
