"""Chunks: every row once, in order, and none larger than was said."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onefold.contrastive.chunks import cut, num_rows, take_rows

KINDS = {
    "tensor": lambda lengths: torch.zeros(len(lengths), 7),
    "mapping": lambda lengths: {
        "tokens": torch.zeros(len(lengths), 9),
        "attention_mask": (torch.arange(9) < torch.tensor(lengths)[:, None]).long(),
        "task": "passed on whole",
    },
    "list": lambda lengths: [[0] * length for length in lengths],
}


@given(
    st.sampled_from(list(KINDS)),
    st.lists(st.integers(1, 9), max_size=12),
    st.integers(1, 30),
    st.booleans(),
)
def test_every_row_once(kind: str, lengths: list[int], limit: int, by_tokens: bool) -> None:
    if kind == "mapping" and not lengths:
        return  # torch.tensor([])[:, None] has no rows to compare
    column = KINDS[kind](lengths)
    assert num_rows(column) == len(lengths)
    chunks = cut(
        [column], None if by_tokens else limit, limit if by_tokens else None, "attention_mask"
    )
    rows = [row for chunk in chunks for row in range(chunk.begin, chunk.end)]
    assert rows == list(range(len(lengths)))
    for chunk in chunks:
        count = chunk.end - chunk.begin
        assert count > 0
        assert num_rows(take_rows(column, chunk)) == count
        longest = 7 if kind == "tensor" else max(lengths[chunk.begin : chunk.end])
        assert count == 1 or (longest * count if by_tokens else count) <= limit
    if by_tokens and kind != "tensor":  # and none smaller than need be
        for chunk in chunks[:-1]:
            longer = lengths[chunk.begin : chunk.end + 1]
            assert max(longer) * len(longer) > limit


def test_what_is_refused() -> None:
    with pytest.raises(TypeError, match="got int"):
        num_rows(3)
    with pytest.raises(ValueError, match="equally many rows"):
        num_rows({"a": torch.zeros(2), "b": torch.zeros(3)})
    with pytest.raises(ValueError, match="expected 'mask' in the inputs, got tokens"):
        cut([{"tokens": torch.zeros(2, 3)}], None, 4, "mask")
