"""torch's elementwise optimizers have the same bits on flat pieces as on whole parameters, and
every other optimizer is refused, or goes by the caller's word."""

import inspect
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import onefold
from onefold.optim.elementwise import KNOWN, NOT_ELEMENTWISE, check_elementwise
from tests import rig
from tests.harness import RankContext, distributed

# What each class does beside its plain rule: momentum, decay of both kinds, averages, extra state.
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "SGD": [{}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}],
    "Adam": [{"weight_decay": 0.1}, {"amsgrad": True, "maximize": True}],
    "AdamW": [{"weight_decay": 0.1}, {"amsgrad": True}],
    "NAdam": [{"weight_decay": 0.1}, {"weight_decay": 0.1, "decoupled_weight_decay": True}],
    "RAdam": [{"weight_decay": 0.1}, {"weight_decay": 0.1, "decoupled_weight_decay": True}],
    "Adamax": [{"weight_decay": 0.1}],
    "Adagrad": [{"lr_decay": 0.1, "initial_accumulator_value": 0.5, "weight_decay": 0.1}],
    "Adadelta": [{"weight_decay": 0.1}],
    "RMSprop": [{"weight_decay": 0.1}, {"centered": True, "momentum": 0.9}],
    "ASGD": [{"t0": 3.0, "lambd": 0.25, "weight_decay": 0.1}],
    "Rprop": [{}],
}
NAMES = [cls.__name__ for cls in KNOWN]
# RAdam's rule changes at its sixth update, ASGD's averages begin after t0.
NUM_STEPS = 8


SHAPES = {"wide": (37, 5), "tall": (11, 9), "tiny": (3,), "turned": (13, 6)}
"""Larger and smaller than a 64-byte line; ``turned`` is not contiguous."""
SMALL = {"reduce_bucket_size": 100}
"""Every parameter but ``tiny`` begins a unit, so two ranks share it between them."""


class Shapes(nn.Module):
    """One parameter of each of ``SHAPES``."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        for name, shape in SHAPES.items():
            memory = shape[::-1] if name == "turned" else shape
            value = torch.randn(memory, generator=generator)
            setattr(self, name, nn.Parameter(value.t() if name == "turned" else value))


class Variants(nn.Module):
    """The same shapes once for each group of the optimizer."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Shapes() for _ in range(count))

    def forward(self, gradients: dict[str, Tensor]) -> Tensor:
        """A loss whose gradients are ``gradients``; parameters that are not there are unused."""
        terms = [
            (param * gradients[name]).sum()
            for part in self.parts
            for name, param in part.named_parameters()
            if name in gradients
        ]
        return torch.stack(terms).sum()


def gradients_of(rank: int, step: int, k: int) -> dict[str, Tensor]:
    """Whole numbers, so that sums are exact; ``tall`` is unused in every third step."""
    generator = torch.Generator().manual_seed(rank + 10 * k + 100 * step)
    return {
        name: torch.randint(-9, 10, shape, generator=generator).float()
        for name, shape in SHAPES.items()
        if name != "tall" or step % 3 != 1
    }


def variants(cls: type[Optimizer]) -> list[dict[str, Any]]:
    """Every setting of a class in each of its implementations."""
    hows: list[dict[str, Any]] = [{"foreach": False}, {"foreach": True}]
    if "fused" in inspect.signature(cls).parameters:
        hows.append({"fused": True})
    return [{**settings, **how} for settings in SETTINGS[cls.__name__] for how in hows]


def grouped(cls: Any, module: Variants) -> Any:
    """The optimizer with one group for each variant."""
    groups = zip(module.parts, variants(cls), strict=True)
    return cls([{"params": part.parameters(), **one} for part, one in groups], lr=0.125)


def flat(tensor: Tensor) -> Tensor:
    """The elements in the order of the memory, as a piece has them."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.parametrize("name", NAMES)
@distributed(world_size=2)
def test_pieces_are_updated_as_the_whole(ctx: RankContext, name: str, stage: int) -> None:
    """Pieces and whole parameters, trained side by side, have the same bits; so have states."""
    cls: Any = getattr(torch.optim, name)
    num_backwards, num_variants = 3, len(variants(cls))
    whole, pieces = Variants(num_variants), Variants(num_variants)
    optimizer = grouped(cls, whole)
    engine = rig.start(ctx, pieces, stage, zero=SMALL, optimizer=grouped(cls, pieces))
    check_elementwise(engine.optimizer, elementwise=False)
    for step in range(NUM_STEPS):
        with engine.coalesce_grad_reduction():
            for k in range(num_backwards):
                engine.backward(engine(gradients_of(ctx.rank, step, k)))
        engine.step()
        optimizer.zero_grad()
        for rank, k in itertools.product(range(ctx.world_size), range(num_backwards)):
            whole(gradients_of(rank, step, k)).backward()
        for param in whole.parameters():
            if param.grad is not None:
                param.grad /= ctx.world_size
        optimizer.step()
    found = rig.weights(engine)
    start = Variants(num_variants).state_dict()
    for key, param in whole.named_parameters():
        group = variants(cls)[int(key.split(".")[1])]
        assert torch.equal(found[key], param), f"{key}, {group}"
        assert not torch.equal(found[key], start[key]), f"{key} never moved"
    cut = [compare_states(engine, optimizer, stage, index) for index in range(num_variants)]
    assert cut == [3 if stage else 0] * num_variants, f"{cut} parameters lie on both ranks"


def compare_states(engine: onefold.Engine, optimizer: Optimizer, stage: int, group: int) -> int:
    """The pieces' states, put together in the order of ranks, are the whole parameters'.

    Returns:
        Number of parameters of which both ranks have elements of their own.
    """
    pieces = engine.optimizer.param_groups[group]["params"]
    params = optimizer.param_groups[group]["params"]
    num_cut = 0
    for piece, param in zip(pieces, params, strict=True):
        states = rig.gathered(dict(engine.optimizer.state.get(piece, {})))
        numels = rig.gathered(piece.numel())
        num_cut += all(numels) and stage > 0
        for key, value in optimizer.state[param].items():
            theirs = [one[key] for one, numel in zip(states, numels, strict=True) if numel]
            if not isinstance(value, Tensor) or value.shape != param.shape or value.dim() == 0:
                assert all(one == value for one in theirs), key
            elif stage == 0:
                assert all(torch.equal(one, flat(value)) for one in theirs), key
            else:
                assert torch.equal(torch.cat(theirs), flat(value)), key
    return num_cut


class Mine(torch.optim.AdamW):
    """A subclass of torch's, whose step may do anything."""


class Lion(Optimizer):
    """Elementwise, and of no class of torch's."""

    def __init__(self, params: Any, **defaults: Any) -> None:
        super().__init__(params, defaults)


class LambdaSGD(Lion):
    """No LAMB."""


class FusedLamb(Lion):
    """Of a third party."""


class MyLBFGS(torch.optim.LBFGS):
    """Under another name than torch's."""


class QuasiNewton(MyLBFGS):
    """Its name says nothing, its base does."""


class OneBitLamb(Lion):
    """Two names in one; the longer counts."""


def a_parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape))


@pytest.mark.parametrize("cls", KNOWN)
@pytest.mark.parametrize("elementwise", [False, True])
def test_the_classes_of_torch_pass(cls: Any, elementwise: bool) -> None:
    check_elementwise(cls([a_parameter(2, 2)], lr=0.1), elementwise=elementwise)


def test_every_optimizer_of_torch_is_known_or_refused() -> None:
    """A new one of torch's must be put on one side by hand."""
    for name, cls in vars(torch.optim).items():
        if inspect.isclass(cls) and issubclass(cls, Optimizer) and cls is not Optimizer:
            assert (cls in KNOWN) != (name.lower() in NOT_ELEMENTWISE), name


@pytest.mark.parametrize("cls", [Mine, Lion, LambdaSGD])
def test_another_class_goes_by_the_callers_word(cls: Any) -> None:
    optimizer = cls([a_parameter(2, 2)], lr=0.1)
    check_elementwise(optimizer, elementwise=True)
    with pytest.raises(ValueError, match=rf"got .*test_elementwise\.{cls.__name__}\.") as caught:
        check_elementwise(optimizer, elementwise=False)
    text = str(caught.value)
    assert "flat pieces" in text
    assert "nothing but that element's gradient and state" in text
    assert "pass initialize(elementwise=True)" in text


@pytest.mark.parametrize("elementwise", [False, True])
@pytest.mark.parametrize(
    ("cls", "named", "reason"),
    [
        (torch.optim.Adafactor, "Adafactor", "whole matrices"),
        (torch.optim.Muon, "Muon", "whole matrices"),
        (torch.optim.LBFGS, "LBFGS", "along a line"),
        (torch.optim.SparseAdam, "SparseAdam", "sparse gradients"),
        (FusedLamb, "FusedLamb", "norms of whole parameters"),
        (OneBitLamb, "OneBitLamb", "reduces gradients by itself"),
        (MyLBFGS, "MyLBFGS", "along a line"),
        (QuasiNewton, "MyLBFGS", "along a line"),
        (type("LARS", (Lion,), {}), "LARS", "norms of whole parameters"),
        (type("NVLAMB", (Lion,), {}), "NVLAMB", "norms of whole parameters"),
        (type("MuonWithAuxAdam", (Lion,), {}), "MuonWithAuxAdam", "whole matrices"),
        (type("DistributedShampoo", (Lion,), {}), "DistributedShampoo", "whole matrices"),
    ],
)
def test_what_cannot_work_on_pieces_is_refused_whatever_the_caller_says(
    cls: Any, named: str, reason: str, elementwise: bool
) -> None:
    optimizer = cls([a_parameter(2, 2)], lr=0.1)
    with pytest.raises(ValueError, match=f"got {named}: .*{reason}"):
        check_elementwise(optimizer, elementwise=elementwise)


@pytest.mark.parametrize("cls", KNOWN)
def test_a_differentiable_step_is_refused(cls: Any) -> None:
    groups = [{"params": [a_parameter(2)]}, {"params": [a_parameter(3)], "differentiable": True}]
    with pytest.raises(ValueError, match="got True in param group 1"):
        check_elementwise(cls(groups, lr=0.1), elementwise=True)
