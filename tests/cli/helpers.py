"""What the tests of ``onefold demo`` share: pairs in a file, and the environment of a process."""

import json
import os
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"
WORDS = [f"word{number}" for number in range(60)]
GOOD_LINE = b'{"anchor": "a", "positive": "p", "more": 1}\n'


def write_lines(path: Path, num_pairs: int) -> Path:
    """Texts of the tiny vocabulary; the positive repeats the anchor's first words."""
    rows = []
    for number in range(num_pairs):
        words = [WORDS[(number * step) % len(WORDS)] for step in range(1, 9)]
        rows.append({"anchor": " ".join(words[:4]), "positive": " ".join(words)})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(SOURCE), "COLUMNS": "200", **more}
