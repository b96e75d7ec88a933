"""What the README shows runs as it stands."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_readme_example_runs(tmp_path: Path, ranks: int) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    script = tmp_path / "train.py"
    script.write_text(code)
    launch = (
        []
        if ranks == 1
        else ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    )
    result = subprocess.run(
        [sys.executable, *launch, str(script)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
    )
    assert result.returncode == 0, result.stderr
    sent = "2 all_gather, 2 reduce_scatter" if ranks == 2 else "no collectives"
    # Both ranks write to one terminal, so lines may run together.
    assert result.stdout.count(f"window flushed: 8 backward(s), {sent}") == ranks, result.stdout


def test_every_linked_page_exists() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"
