"""The script for a GPU runs on the CPU, and all its checks pass; a wrong sum fails it."""

import json
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from benchmarks import gpu
from benchmarks.gpu import Bench, check_native, main
from onefold.wire.transports import native
from tests.harness import RankContext, distributed


@pytest.mark.slow
def test_the_script_passes_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "gpu.json"
    assert main(["--device", "cpu", "--out", str(out)]) == 0, capsys.readouterr().out
    rows: list[dict[str, Any]] = json.loads(out.read_text())["rows"]
    for ranks in (1, 2):
        checks = [row["check"] for row in rows if row["ranks"] == ranks]
        assert {kind: checks.count(kind) for kind in set(checks)} == {
            "native": 6,
            "exact": len(gpu.STAGES) * len(gpu.MODES),
            "overlap": 2 * len(gpu.STAGES) + 1,
            "time": 2 * len(gpu.STAGES) + 2,
        }


@distributed(world_size=2)
def test_a_wrong_sum_is_found(ctx: RankContext) -> None:
    """The control: terms of other ranks left out of narrow sums."""

    def own_term(terms: Tensor, out: Tensor) -> None:
        out.copy_(terms[ctx.rank])

    right, native.sum_of_terms = native.sum_of_terms, own_term
    try:
        bench = Bench(ctx.rank, ctx.world_size, ctx.device)
        check_native(bench)
    finally:
        native.sum_of_terms = right
    wrong = {row["subject"] for row in bench.rows if not row["passed"]}
    assert wrong == {"reduce_scatter torch.bfloat16", "all_reduce torch.bfloat16"}
