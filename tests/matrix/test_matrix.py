"""A sample of the matrix that covers it, and the page that the whole of it was written into.

``make matrix`` runs every field. Here every feature meets every stage and every mode, and every
pair of features occurs once, in fields of up to three features.
"""

from itertools import product
from pathlib import Path

import pytest
import torch

from tests.matrix.cell import MODES, Result, deviation, reference
from tests.matrix.features import FEATURES, Clash, merge, rows, setup_of
from tests.matrix.grid import (
    ALONE,
    STAGES,
    Names,
    Verdict,
    has_fields,
    judge,
    left_out,
    pairs_of,
    run_fields,
    sample,
    worst,
)
from tests.matrix.model import Options
from tests.matrix.table import COLUMNS, number, parse, render, row_name

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
MODELS = [
    Options(adapters=a, tied=t, experts=e).plain()
    for a in (False, True)
    for t in (False, True)
    for e in (0, 1)
]
LONGEST = [(4, 1), (2, 2)]
"""Ranks and micro-steps that give most backwards in a step, at most ``max(ALONE)`` each."""


def field_name(field: tuple[Names, int, str]) -> str:
    names, stage, mode = field
    return f"{row_name(names)}-{stage}-{mode}".replace(" ", "_")


@pytest.mark.parametrize("field", sample(), ids=field_name)
def test_field(field: tuple[Names, int, str]) -> None:
    names, stage, mode = field
    verdict = run_fields(names, stage, [mode], all_numbers=False)[mode]
    assert verdict.kind in ("ran", "refused"), verdict.text


def test_the_sample_covers_the_grid() -> None:
    found = sample()
    covered = {pair for names, _, _ in found for pair in pairs_of(names)}
    pairs = {frozenset(names) for names in rows() if len(names) == 2 and has_fields(names)}
    assert pairs <= covered
    for name in FEATURES:
        setup = setup_of((name,))
        fields = [(stage, mode) for names, stage, mode in found if name in names]
        assert {stage for stage, _ in fields} == set(STAGES), name
        assert {mode for _, mode in fields} == set(MODES), name
        assert all(not left_out(setup, stage, mode) for stage, mode in fields)


def test_the_page_has_the_rows_and_columns_of_the_grid() -> None:
    columns, names = parse(PAGE.read_text(encoding="utf-8"))
    assert columns == COLUMNS
    assert names == [row_name(row) for row in rows()], "run `make matrix`"


def test_the_page_is_free_of_failures() -> None:
    assert "FAIL" not in PAGE.read_text(encoding="utf-8")


# -- the oracle itself -------------------------------------------------------------------------


@pytest.mark.parametrize("options", MODELS, ids=repr)
@pytest.mark.parametrize(("ranks", "micro_steps"), LONGEST)
def test_sums_stay_among_the_integers_of_bf16(
    options: Options, ranks: int, micro_steps: int
) -> None:
    """So that any order of adding them up, in any of the dtypes, is exact."""
    total: dict[str, torch.Tensor] = {}
    for rank, micro, k in product(range(ranks), range(micro_steps), range(max(ALONE))):
        ks: list[tuple[int, ...]] = [() for _ in range(ranks)]
        ks[rank] = (100 * micro + k,)
        for name, gradient in reference(options, tuple(ks), 1)[0].items():
            total[name] = total.get(name, 0) + gradient.abs()
    for name, largest in total.items():
        assert torch.equal(largest, largest.round()), name
        assert 8 <= largest.max() <= 256, name


@pytest.mark.parametrize("options", MODELS, ids=repr)
def test_every_backward_has_gradients_of_its_own(options: Options) -> None:
    """So that a swap of two, or one that came twice in place of another, is seen."""
    ks = [100 * micro + k for micro in range(2) for k in range(ALONE[0])] + [*range(3, max(ALONE))]
    seen: set[tuple[float, ...]] = set()
    for rank, k in product(range(2), ks):
        found = reference(options, ((k,), ()) if rank == 0 else ((), (k,)), 1)[0]
        seen.add(tuple(torch.cat([one.flatten() for one in found.values()]).tolist()))
    assert len(seen) == 2 * len(ks)


def test_deviation_is_in_ulps_of_the_size() -> None:
    wanted = {"w": torch.tensor([1.0, 0.0], dtype=torch.float64)}
    sizes = {"w": torch.tensor([4.0, 4.0], dtype=torch.float64)}
    found: dict[str, torch.Tensor | None] = {"w": torch.tensor([1.0, 2.0**-4])}
    assert deviation(found, wanted, sizes, torch.bfloat16) == (2.0, "")
    assert deviation({"w": wanted["w"]}, wanted, sizes, torch.float32) == (0.0, "")
    nans = torch.full((2,), torch.nan)
    broken: list[dict[str, torch.Tensor | None]] = [{"w": None}, {}, {"w": nans}]
    for wrong in broken:
        ulps, text = deviation(wrong, wanted, sizes, torch.float32)
        assert ulps > 0
        assert text


@pytest.mark.parametrize(
    ("ranks", "kind"),
    [
        ([Result(digest="a"), Result(digest="a")], "ran"),
        ([Result(digest="a"), Result(digest="b")], "FAIL"),
        ([Result(refusal="no"), Result(refusal="no")], "refused"),
        ([Result(refusal="no"), Result(refusal="never")], "FAIL"),
        ([Result(refusal="no"), Result()], "FAIL"),
        ([Result(), Result(problem="the norm")], "FAIL"),
        ([Result(), Result(ulps=0.001)], "FAIL"),
        ([Result(), Result(ulps=float("nan"))], "FAIL"),
    ],
)
def test_judging(ranks: list[Result], kind: str) -> None:
    assert judge(setup_of(("fp32",)), ranks).kind == kind


def test_a_real_deviation_has_a_bound() -> None:
    setup = setup_of(("autocast", "bf16 wire"))
    assert setup.bound == 2 * 4 + 2
    assert judge(setup, [Result(ulps=10.0)] * 2) == Verdict("ran", 10.0)
    assert judge(setup, [Result(ulps=10.1)] * 2).kind == "FAIL"


def test_the_worst_run_stands_in_the_field() -> None:
    failed, far, near = Verdict("FAIL", text="x"), Verdict("ran", 2.0), Verdict("ran", 1.0)
    assert worst([near, far]) is far
    assert worst([near, failed, far]) is failed
    assert worst([near, Verdict("refused", text="no")]).kind == "FAIL"


def test_features_that_contradict_cannot_be_merged() -> None:
    assert merge({"a": {"b": 1}}, {"a": {"c": 2}}) == {"a": {"b": 1, "c": 2}}
    with pytest.raises(Clash, match="b"):
        merge({"a": {"b": 1}}, {"a": {"b": 2}})


def test_page() -> None:
    names: list[Names] = [("fp32",), ("fp32", "tied")]
    results = {
        (names[0], 0, "bare"): Verdict("ran"),
        (names[0], 0, "window"): Verdict("ran", 0.0001),
        (names[0], 1, "bare"): Verdict("refused", text="no\nnever"),
        (names[0], 2, "bare"): Verdict("refused", text="no\nnever"),
        (names[1], 2, "bare"): Verdict("left out", text="why"),
        (names[1], 3, "nested"): Verdict("FAIL", text="bad"),
    }
    page = render(names, results)
    columns, found = parse(page)
    assert columns == COLUMNS
    assert found == ["fp32", "fp32 + tied"]
    assert "| fp32 | = | <.01 |" in page
    assert page.count("R1") == 3
    assert "- **R1** no never\n- **N1** why\n" in page
    assert "- fp32 + tied, stage 3, nested: bad" in page
    assert [number(value) for value in (0.0, 1.234, 12.0)] == ["=", "1.2", "12"]
