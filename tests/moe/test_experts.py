"""The mark on the module tree: which experts a rank keeps, and what a copy of the tree keeps."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from onefold.errors import StateError
from onefold.experts import ExpertParallel, NumberedExperts, expert_parallel_modules
from onefold.wire.all_to_all import AllToAll
from tests.harness import RankContext, distributed

WIDTH = 3


def numbered(total: int = 4, size: int = 2) -> ExpertParallel:
    """Expert e multiplies by e + 1."""
    experts = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(total)]
    for number, expert in enumerate(experts):
        expert.weight.data = torch.eye(WIDTH) * (number + 1)
    return ExpertParallel(NumberedExperts(experts), size=size)


@pytest.mark.parametrize(("total", "size"), [(4, 1), (4, 2), (6, 3), (4, 4)])
def test_the_union_over_ranks_is_the_whole(total: int, size: int) -> None:
    whole = numbered(total, size).state_dict()
    union: dict[str, torch.Tensor] = {}
    for rank in range(size):
        experts = numbered(total, size)
        foreign = experts.foreign(rank)
        before = dict(experts.named_parameters())
        experts.keep_local(rank)
        own = experts.state_dict()
        assert not union.keys() & own.keys()
        assert len(own) == total // size
        kept = {id(param) for param in experts.parameters()}
        dropped = [id(param) for param in before.values() if id(param) not in kept]
        assert [id(param) for param in foreign] == dropped
        assert not experts.foreign(rank)
        union.update(own)
    assert sorted(union) == sorted(whole)
    assert all(torch.equal(union[name], whole[name]) for name in whole)


def test_neighbours_are_kept_in_order() -> None:
    experts = numbered(6, 3)
    experts.keep_local(1)
    assert list(experts.state_dict()) == ["experts.2.weight", "experts.3.weight"]
    rows = torch.ones(2, 5, WIDTH)
    wanted = torch.tensor([3.0, 4.0]).view(2, 1, 1).expand(2, 5, WIDTH)
    assert torch.equal(experts(rows), wanted)
    experts.keep_local(1)  # once more changes nothing
    with pytest.raises(StateError, match=r"place 0 of 3 holds experts \['0', '1'\]"):
        experts.keep_local(0)
    assert list(experts.state_dict()) == ["experts.2.weight", "experts.3.weight"]


def test_a_module_of_ones_own_is_kept_whole() -> None:
    own = ExpertParallel(nn.Linear(WIDTH, 2), size=2, axis="mine")
    assert own.foreign(1) == []
    own.keep_local(1)
    assert len(list(own.parameters())) == 2
    assert own(torch.ones(1, WIDTH)).shape == (1, 2)
    assert "size=2, axis='mine'" in repr(own)


def test_on_the_meta_device() -> None:
    with torch.device("meta"):
        experts = numbered()
    experts.keep_local(0)
    assert len(list(experts.parameters())) == 2
    assert all(param.is_meta for param in experts.parameters())


@distributed(world_size=2)
def test_copies_and_pickles_keep_the_mark_and_not_the_connection(ctx: RankContext) -> None:
    first = numbered()
    experts = nn.Sequential(first)
    axis = AllToAll(ctx.rank, 2, ctx.new_group())
    first.connect(axis)
    assert first.all_to_all is axis
    stream = io.BytesIO()
    torch.save(experts, stream)
    stream.seek(0)
    for other in (
        copy.deepcopy(experts),
        pickle.loads(pickle.dumps(experts)),
        torch.load(stream, weights_only=False),
    ):
        ((name, marked),) = expert_parallel_modules(other)
        assert (name, marked.size, marked.axis) == ("0", 2, "expert")
        assert list(other.state_dict()) == list(experts.state_dict())
        with pytest.raises(StateError, match=r"Call onefold\.initialize"):
            _ = marked.all_to_all
        marked.connect(axis)  # the copy still knows whose experts it holds
    assert first.all_to_all is axis
    first.disconnect()
    with pytest.raises(StateError, match="2 ranks of the axis 'expert'"):
        _ = first.all_to_all


def test_one_rank_is_connected_to_itself() -> None:
    experts = numbered(size=1)
    tensor = torch.ones(3)
    assert experts.all_to_all.exchange(tensor) is tensor
    with pytest.raises(StateError, match=r"Call onefold\.initialize"):
        _ = numbered(size=2).all_to_all
    with pytest.raises(ValueError, match="expected an exchange of 2 ranks, got 1"):
        numbered(size=2).connect(AllToAll(0, 1))


def test_found_by_name() -> None:
    first, second = numbered(), ExpertParallel(nn.Linear(WIDTH, 1), size=1)
    model = nn.ModuleDict({"a": nn.Sequential(nn.Linear(WIDTH, 1), first), "b": second, "c": first})
    assert expert_parallel_modules(model) == [("a.1", first), ("b", second)]
    assert expert_parallel_modules(first) == [("", first)]
    assert expert_parallel_modules(nn.Linear(1, 1)) == []


def test_nested_is_refused() -> None:
    inner = numbered()
    model = nn.ModuleDict({"outer": ExpertParallel(nn.Sequential(nn.Tanh(), inner), size=2)})
    with pytest.raises(ValueError, match=r"outer is an ExpertParallel that contains another, exp"):
        expert_parallel_modules(model)
    with pytest.raises(ValueError, match=r"the model is an ExpertParallel"):
        expert_parallel_modules(model["outer"])


@pytest.mark.parametrize("order", [["experts", "dense"], ["dense", "experts"]])
@pytest.mark.parametrize("shares", ["parameter", "module"])
def test_tied_to_the_outside_is_refused(order: list[str], shares: str) -> None:
    inside = nn.Linear(WIDTH, WIDTH)
    dense = inside
    if shares == "parameter":
        dense = nn.Linear(WIDTH, WIDTH)
        dense.weight = inside.weight
    experts = ExpertParallel(NumberedExperts([nn.Linear(WIDTH, WIDTH), inside]), size=2)
    parts: dict[str, nn.Module] = {"experts": experts, "dense": dense}
    model = nn.ModuleDict({name: parts[name] for name in order})
    with pytest.raises(ValueError, match=r"ExpertParallel experts is shared with dense\.weight"):
        expert_parallel_modules(model)


def test_tied_between_axes() -> None:
    shared = nn.Linear(WIDTH, WIDTH)
    for axis, size in (("other", 2), ("expert", 4)):
        model = nn.ModuleDict(
            {
                "a": ExpertParallel(nn.Sequential(shared), size=2),
                "b": ExpertParallel(nn.Sequential(shared), size=size, axis=axis),
            }
        )
        with pytest.raises(ValueError, match=r"ExpertParallel a is shared with b"):
            expert_parallel_modules(model)
    model["b"] = ExpertParallel(nn.Sequential(shared), size=2)  # the same ranks: fine
    assert len(expert_parallel_modules(model)) == 2
    alone = ExpertParallel(shared, size=1)  # an axis of one rank: a parameter like any other
    assert len(expert_parallel_modules(nn.ModuleList([alone, shared]))) == 1


def test_refused_when_built() -> None:
    with pytest.raises(ValueError, match="at least 1 rank, got 0"):
        ExpertParallel(nn.Linear(1, 1), size=0)
    with pytest.raises(ValueError, match="expected a divisor of the 4 experts"):
        numbered(4, 3)
    with pytest.raises(ValueError, match="at least one expert"):
        NumberedExperts([])
    shared = nn.Linear(1, 1)
    with pytest.raises(ValueError, match="experts 0 and 1 share a parameter"):
        NumberedExperts([shared, nn.Sequential(shared)])


def test_refused_when_called() -> None:
    with pytest.raises(ValueError, match=r"rows for the 4 experts .*got shape \(2, 5, 3\)"):
        numbered()(torch.ones(2, 5, WIDTH))
    experts = ExpertParallel(NumberedExperts([nn.Linear(WIDTH, 2)]), size=1)
    with pytest.raises(ValueError, match=r"expert 0 \(Linear\).* \(5, 3\), got \(5, 2\)"):
        experts(torch.ones(1, 5, WIDTH))
