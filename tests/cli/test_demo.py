"""``onefold demo``: whole runs on a tiny model: to the end, failing, and interrupted."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests.cli.helpers import WORDS, environment, write_lines

LAYERS = 2


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "onefold.cli", "demo", *arguments]


def run_command(arguments: Sequence[str], **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments),
        env=environment(**more),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random BERT of two layers, with a pooler that nobody uses and a vocabulary of words."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("model")
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {word: number for number, word in enumerate([*special, *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        model_max_length=32,
    )
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        intermediate_size=4096,  # above 2 MiB a layer, so that gradients lie on huge pages
        max_position_embeddings=32,
    )
    BertModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


SUMMARY_KEYS = [
    "model",
    "pairs_train",
    "pairs_eval",
    "world_size",
    "stage",
    "steps",
    "backwards_per_step",
    "mrr_before",
    "mrr_after",
    "loss_first",
    "loss_last",
    "gradient_collectives_per_step",
    "gradient_collectives_per_step_without_window",
    "gradient_bytes_per_step",
    "gradient_bytes_per_step_without_window",
    "parameter_gathers_per_step",
    "parameter_gathers_per_step_without_window",
    "step_seconds",
    "step_seconds_without_window",
    "seconds",
]


@pytest.mark.slow
def test_the_whole_demo(tmp_path: Path, tiny_model: Path) -> None:
    """Rank 0's step: columns of 8 texts in mini-batches of 4 are 4 backwards; units are the
    embeddings and the layers (the pooler gets no gradient and is frozen).
    """
    data = write_lines(tmp_path / "pairs.jsonl", 60)
    out = tmp_path / "out"
    options = "--steps 4 --bare-steps 1 --batch-size 8 --mini-batch-size 4 --tokens 16 --lr 1e-3"
    paths = ["--model", str(tiny_model), "--data", str(data), "--output", str(out)]
    done = run_command([*options.split(), *paths])
    assert done.returncode == 0, done.stderr + done.stdout
    assert done.stderr == ""
    summary = json.loads((out / "summary.json").read_text())
    assert sorted(summary) == sorted(SUMMARY_KEYS)
    expected = {
        "model": str(tiny_model),
        "pairs_train": 54,
        "pairs_eval": 6,
        "world_size": 2,
        "stage": 3,
        "steps": 4,
        "backwards_per_step": 4,
        "gradient_collectives_per_step": LAYERS + 1,
        "gradient_collectives_per_step_without_window": 4 * (LAYERS + 1),
        "parameter_gathers_per_step": LAYERS + 2,  # the frozen pooler's, too
    }
    assert {key: summary[key] for key in expected} == expected
    sent, sent_bare = (
        summary[f"gradient_bytes_per_step{suffix}"] for suffix in ("", "_without_window")
    )
    assert sent_bare == 4 * sent > 0
    # Two embeddings without gradient, two replayed forwards and two backwards, per column and unit.
    bare_gathers = summary["parameter_gathers_per_step_without_window"]
    assert bare_gathers >= 12 * (LAYERS + 1)
    assert 0 < summary["mrr_before"] <= 1
    assert 0 < summary["mrr_after"] <= 1
    for line in ("MRR@10", "backwards", "gradient collectives", "samples/s"):
        assert line in done.stdout
    assert (out / "traffic.png").read_bytes().startswith(b"\x89PNG")
    check_trained(out / "model", tiny_model)


def check_trained(trained: Path, original: Path) -> None:
    """It loads, and what was trained, and only that, differs from the original."""
    from sentence_transformers import SentenceTransformer

    before = SentenceTransformer(str(original), device="cpu").state_dict()
    model = SentenceTransformer(str(trained), device="cpu")
    after = model.state_dict()
    assert before.keys() == after.keys()
    same = {name for name, tensor in after.items() if torch.equal(tensor, before[name])}
    floating = {name for name, tensor in after.items() if tensor.is_floating_point()}
    assert {name for name in floating if "pooler" in name} == same & floating
    assert torch.isfinite(model.encode("word1 word2", convert_to_tensor=True)).all()


@pytest.mark.slow
def test_a_failing_rank_is_one_line(tmp_path: Path) -> None:
    """The folder looks like a model, but there are no weights in it: only a rank finds out."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "bert", "architectures": ["BertModel"]}')
    data = write_lines(tmp_path / "pairs.jsonl", 60)
    out = tmp_path / "out"
    paths = ["--model", str(model), "--data", str(data), "--output", str(out)]
    done = run_command([*paths, "--batch-size", "4"])
    assert done.returncode == 1
    assert done.stderr.startswith("onefold demo: rank ")
    assert done.stderr.count("\n") == 1
    assert f"Details: {out / 'demo.log'}" in done.stderr
    assert "Traceback" not in done.stdout
    assert "Traceback" in (out / "demo.log").read_text()
    assert not (out / "summary.json").exists()


@pytest.mark.slow
def test_interrupted(tmp_path: Path, tiny_model: Path) -> None:
    data = write_lines(tmp_path / "pairs.jsonl", 60)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    paths = ["--model", str(tiny_model), "--data", str(data), "--output", str(tmp_path / "out")]
    process = subprocess.Popen(
        command(*paths, "--batch-size", "4", "--steps", "100000"),
        env=environment(TMPDIR=str(scratch)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 120
        while not list(scratch.glob("onefold-demo-*/events.jsonl")):  # a rank is at work
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, stdout + stderr
    assert stderr == "onefold demo: interrupted; the ranks have been stopped.\n"
    assert list(scratch.glob("onefold-demo-*")) == []
    running = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not [line for line in running if str(scratch).encode() in line]
