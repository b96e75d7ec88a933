"""The matrix as a page of markdown: one table, a legend, footnotes."""

from collections.abc import Mapping, Sequence

from tests.matrix.cell import MODES
from tests.matrix.features import FEATURES
from tests.matrix.grid import STAGES, Names, Verdict

Results = Mapping[tuple[Names, int, str], Verdict]

_SHORT = {"bare": "b", "window": "w", "armed": "a", "no_sync": "s", "nested": "n"}
_MODES = {
    "bare": "no scope",
    "window": "`with engine.coalesce_grad_reduction():`",
    "armed": "the same with `backwards=n`",
    "no_sync": "`with engine.no_sync():`",
    "nested": "a window in a window",
}
COLUMNS = [f"{stage}{_SHORT[mode]}" for stage in STAGES for mode in MODES]


def row_name(names: Names) -> str:
    """How a row is called."""
    return " + ".join(names)


def render(rows: Sequence[Names], results: Results) -> str:
    """The whole page."""
    notes: dict[tuple[str, str], str] = {}
    lines = [_line([row_name(names), *_fields(names, results, notes)]) for names in rows]
    head = [_line(["", *COLUMNS]), _line(["---", *[":-:"] * len(COLUMNS)])]
    return "\n".join(
        [*_legend(results), "", *head, *lines, "", *_footnotes(notes), *_failures(results), ""]
    )


def _line(fields: Sequence[str]) -> str:
    return "| " + " | ".join(fields) + " |"


def _fields(names: Names, results: Results, notes: dict[tuple[str, str], str]) -> list[str]:
    found = [results.get((names, stage, mode)) for stage in STAGES for mode in MODES]
    return ["" if one is None else _symbol(one, notes) for one in found]


def _symbol(verdict: Verdict, notes: dict[tuple[str, str], str]) -> str:
    if verdict.kind == "FAIL":
        return "FAIL"
    if verdict.kind == "ran":
        return number(verdict.ulps)
    letter = "R" if verdict.kind == "refused" else "N"
    count = sum(name.startswith(letter) for name in notes.values())
    return notes.setdefault((verdict.kind, verdict.text), f"{letter}{count + 1}")


def number(ulps: float) -> str:
    """``=`` for nothing at all; two digits, and never rounded down to nothing."""
    if ulps == 0:
        return "="
    return f"{ulps:.2g}" if ulps >= 0.01 else "<.01"


def _legend(results: Results) -> list[str]:
    kinds = [verdict.kind for verdict in results.values()]
    exact = sum(one.kind == "ran" and one.ulps == 0 for one in results.values())
    counts = (
        f"{len(kinds)} fields: {exact} exact, {kinds.count('ran') - exact} within their bound, "
        f"{kinds.count('refused')} refused, {kinds.count('left out')} left out, "
        f"{kinds.count('FAIL')} failed."
    )
    modes = "; ".join(f"**{_SHORT[mode]}** {text}" for mode, text in _MODES.items())
    features = [f"- **{feature.name}**: {feature.text}" for feature in FEATURES.values()]
    return [
        "# What goes with what",
        "",
        "Written by `make matrix` from what ran; not by hand. Every feature alone and every pair,",
        "at ZeRO stages 0 to 3, in five ways to run the backwards of a step.",
        "",
        "A field is one training step (alone: three, of 3, 5 and 7 backwards; pairs: 3) on 2 ranks",
        "(mesh: 4) of a small model, with other data on every rank and backward. Every averaged",
        "gradient is compared, before the optimizer, with fp64 sums of one process; then the norm;",
        "then the weights, bit for bit, with those of a torch optimizer fed with the same",
        "gradients; then the ranks with one another, bit for bit. Inside scopes the collectives",
        "are counted.",
        "",
        "Weights and data are integers that 16 bits hold, so every sum is exact in any order and",
        "the only right deviation is none. Under autocast they are real numbers; the deviation is",
        "then in ulps of bf16, of the sum of a gradient's terms' sizes, and bounded by the number",
        "of roundings on the longest way through the layers.",
        "",
        f"`=` exact; a number: the worst deviation in ulps; `R`: refused, `N`: left out, see below "
        f"the table. {counts}",
        "",
        f"Columns: the stage, and {modes}.",
        "",
        *features,
    ]


def _footnotes(notes: Mapping[tuple[str, str], str]) -> list[str]:
    return [f"- **{name}** {_inline(text)}" for (_, text), name in notes.items()]


def _inline(text: str) -> str:
    """A message on one line."""
    return " ".join(text.split()).replace("|", "\\|")


def _failures(results: Results) -> list[str]:
    failed = [(field, one) for field, one in results.items() if one.kind == "FAIL"]
    if not failed:
        return []
    told = [
        f"- {row_name(names)}, stage {stage}, {mode}: {_inline(one.text)[-600:]}"
        for (names, stage, mode), one in failed
    ]
    return ["", "Failed:", "", *told]


def parse(page: str) -> tuple[list[str], list[str]]:
    """The columns and the rows' names of a rendered page."""
    table = [line for line in page.splitlines() if line.startswith("|")]
    split = [[field.strip() for field in line.strip("|").split("|")] for line in table]
    return split[0][1:], [fields[0] for fields in split[2:]]
