"""``onefold demo``: its pairs, their file, and the metrics of retrieval."""

import ast
from pathlib import Path

import pytest
import torch

from onefold.cli.failure import BadInput
from onefold.cli.pairs import Pair, read_pairs, split, standard_library, take, write_pairs
from onefold.cli.retrieval import evaluate
from tests.cli.helpers import GOOD_LINE

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
