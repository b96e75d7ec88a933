"""The layer in one process, against a loop over tokens."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from onefold.errors import StateError
from onefold.experts import expert_parallel_modules
from onefold.moe import MoE, MoEOutput
from tests.moe.naive import (
    WIDTH,
    Expert,
    assert_close,
    assert_equal,
    build,
    gradients,
    loss_of,
    one_by_one,
)

ALL: dict[str, Any] = {"drop_tokens": False}
TIGHT: dict[str, Any] = {"capacity_factor": 0.5, "min_capacity": 1}
ROOMY: dict[str, Any] = {"capacity_factor": 1.5}


def data(*shape: int, seed: int = 7, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, WIDTH, generator=generator, dtype=torch.float64).to(dtype)


def run(layer: MoE, hidden: Tensor, **how: Any) -> tuple[MoEOutput, Tensor]:
    """Forward and backward; the output and the gradient of the input."""
    hidden = hidden.detach().requires_grad_()
    found = MoEOutput(*checkpoint(layer, hidden, **how)) if how else layer(hidden)
    loss_of(found, data(*hidden.shape[:-1], seed=8, dtype=hidden.dtype)).backward()
    assert hidden.grad is not None
    return found, hidden.grad


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("limit", [ALL, TIGHT, ROOMY], ids=["all", "tight", "roomy"])
@pytest.mark.parametrize("shape", [(2, 9), (13,), (1,)])
def test_as_one_token_after_another(k: int, limit: dict[str, Any], shape: tuple[int, ...]) -> None:
    layer = build(k=k, **limit)
    reference = copy.deepcopy(layer)
    hidden = data(*shape)
    found, input_gradient = run(layer, hidden)
    hidden = hidden.requires_grad_()
    wanted = one_by_one(reference, hidden)
    loss_of(wanted, data(*shape, seed=8)).backward()
    assert_close(found.output, wanted.output, "output")
    assert_close(found.load_balancing_loss, wanted.load_balancing_loss, "loss")
    assert torch.equal(found.expert_counts, wanted.expert_counts)
    assert hidden.grad is not None
    assert_close(input_gradient, hidden.grad, "gradient of the input")
    for name, gradient in gradients(layer).items():
        known = reference.get_parameter(name).grad
        if known is None:  # an expert without tokens: not in the loop's graph
            known = torch.zeros_like(gradient)
            assert torch.equal(gradient, known), name
        assert_close(gradient, known, name)


@pytest.mark.parametrize("k", [1, 2])
def test_finite_differences(k: int) -> None:
    layer = build(3, k=k, capacity_factor=0.75, min_capacity=1)
    names = [name for name, _ in layer.named_parameters()]
    hidden = data(4).requires_grad_()

    def outputs(hidden: Tensor, *params: Tensor) -> tuple[Tensor, Tensor]:
        named = dict(zip(names, params, strict=True))
        output, loss, _ = torch.func.functional_call(layer, named, (hidden,))
        return output, loss

    params = [param.detach().requires_grad_() for param in layer.parameters()]
    assert torch.autograd.gradcheck(outputs, (hidden, *params), fast_mode=True)
    assert torch.autograd.gradgradcheck(outputs, (hidden, *params), fast_mode=True)


def test_dropped_tokens_give_exact_zeros() -> None:
    """Everything goes to expert 0, which takes ceil(8 / 4) = 2; the rest have no output."""
    layer = build(min_capacity=0)
    with torch.no_grad():
        layer.gate.weight.zero_()
    found, gradient = run(layer, data(8))
    assert found.expert_counts.tolist() == [8, 0, 0, 0]
    assert (found.output[:2] != 0).all()
    assert torch.equal(found.output[2:], torch.zeros(6, WIDTH, dtype=torch.float64))
    assert torch.equal(gradient[2:], torch.zeros(6, WIDTH, dtype=torch.float64))
    assert (gradient[:2] != 0).all()
    named = gradients(layer)
    for name, gradient in named.items():
        if name.startswith("experts."):
            assert gradient.any() == name.startswith("experts.experts.0."), name


def test_eval_has_a_capacity_of_its_own() -> None:
    layer = build(min_capacity=0, capacity_factor=0.5, eval_capacity_factor=2.0)
    with torch.no_grad():
        layer.gate.weight.zero_()
    for training, kept in ((True, 1), (False, 4)):
        layer.train(training)
        output = layer(data(8)).output
        assert int((output != 0).any(dim=-1).sum()) == kept


def test_no_tokens() -> None:
    layer = build(k=2)
    found, gradient = run(layer, data(3, 0))
    assert found.output.shape == gradient.shape == (3, 0, WIDTH)
    assert found.load_balancing_loss == 0
    assert found.expert_counts.tolist() == [0, 0, 0, 0]
    assert all(not gradient.any() for gradient in gradients(layer).values())


@pytest.mark.parametrize("policy", ["RSample", "Jitter"])
def test_noise_while_training_alone(policy: str) -> None:
    noisy, plain = build(noisy_gate_policy=policy, **ALL), build(**ALL)
    hidden = data(64)
    scale = {"RSample": 1.0, "Jitter": 0.0}[policy]
    noisy.eval()
    assert torch.equal(noisy(hidden).output, plain(hidden).output)
    noisy.train()
    first, second = noisy(hidden), noisy(hidden)
    assert not torch.equal(first.output, second.output)
    moved = (first.expert_counts != second.expert_counts).any()
    assert moved or not scale, "Gumbel noise of size 1 sends some of 64 tokens elsewhere"


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("policy", [None, "RSample", "Jitter"])
def test_recompute_gives_the_same_bits(use_reentrant: bool, policy: str | None) -> None:
    layers = [build(k=2, noisy_gate_policy=policy, **TIGHT) for _ in range(2)]
    hows: list[dict[str, Any]] = [{}, {"use_reentrant": use_reentrant}]
    results = []
    for layer, how in zip(layers, hows, strict=True):
        torch.manual_seed(3)
        for seed in range(3):
            result = run(layer, data(12, seed=seed), **how)
        results.append(result)
    (plain, plain_gradient), (found, gradient) = results
    assert torch.equal(found.output, plain.output)
    assert torch.equal(gradient, plain_gradient)
    assert_equal(gradients(layers[1]), gradients(layers[0]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_dtypes(dtype: torch.dtype) -> None:
    """Against fp64 with the same values; an expert rounds four times, the sum once."""
    layer = build(k=2, dtype=dtype, **TIGHT)
    wide = copy.deepcopy(layer).double()
    hidden = data(12, dtype=dtype)
    found, gradient = run(layer, hidden)
    wanted, wide_gradient = run(wide, hidden.double())
    assert found.output.dtype == gradient.dtype == dtype
    assert found.load_balancing_loss.dtype == torch.float32
    assert torch.equal(found.expert_counts, wanted.expert_counts)
    rounding = 8 * torch.finfo(dtype).eps
    assert_close(found.output.double(), wanted.output, "output", rounding)
    assert_close(gradient.double(), wide_gradient, "gradient of the input", rounding)
    for name, tensor in gradients(layer).items():
        assert tensor.dtype == dtype
        known = wide.get_parameter(name).grad
        assert known is not None
        assert_close(tensor.double(), known, name, 2 * rounding)


def test_under_autocast() -> None:
    layer = build(k=2, dtype=torch.float32, **ALL)
    hidden = data(12, dtype=torch.float32)
    wanted = layer(hidden)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = layer(hidden)
    assert found.output.dtype == torch.float32
    assert not torch.equal(found.output, wanted.output), "the experts did not run in bf16"
    assert torch.equal(found.expert_counts, wanted.expert_counts)
    assert torch.equal(found.load_balancing_loss, wanted.load_balancing_loss)
    assert_close(found.output, wanted.output, "output", 8 * torch.finfo(torch.bfloat16).eps)


def test_rows_beside_a_token_do_not_matter() -> None:
    """Poison in one token's row reaches no other token, dropped ones neither."""
    layer = build(min_capacity=0)
    with torch.no_grad():
        layer.gate.weight.zero_()
    hidden = data(8)
    clean = layer(hidden).output
    with torch.no_grad():
        layer.experts.experts["3"].down.bias.fill_(float("nan"))  # type: ignore[index]
    found, gradient = run(layer, hidden)  # no token goes there
    assert torch.equal(found.output, clean)
    assert gradient.isfinite().all()


def test_start_values_do_not_depend_on_the_number_of_ranks() -> None:
    one, two = build(), build(ep_size=2)
    assert_equal(dict(two.named_parameters()), dict(one.named_parameters()))
    shapes = {tuple(tensor.shape) for tensor in one.state_dict().values()}
    assert (4, WIDTH) in shapes
    values = [one.get_parameter(f"experts.experts.{e}.up.weight") for e in range(4)]
    assert all(not torch.equal(values[0], other) for other in values[1:]), "experts of their own"
    two.experts.keep_local(1)
    dropped = ("experts.experts.0", "experts.experts.1")
    assert list(two.state_dict()) == [n for n in one.state_dict() if not n.startswith(dropped)]


def test_several_ranks_need_an_engine() -> None:
    with pytest.raises(StateError, match=r"Call onefold\.initialize"):
        build(ep_size=2)(data(3))


def test_copies_and_pickles() -> None:
    layer = build(k=2)
    hidden = data(6)
    wanted, _ = run(layer, hidden)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        found, _ = run(other, hidden)
        assert torch.equal(found.output, wanted.output)
        ((name, _),) = expert_parallel_modules(other)
        assert name == "experts"
    fresh = build(seed=1, k=2)
    fresh.load_state_dict(layer.state_dict())
    assert torch.equal(fresh(hidden).output, wanted.output)


def test_on_the_meta_device() -> None:
    with torch.device("meta"):
        layer = MoE(WIDTH, Expert, 4, ep_size=2)
    layer.experts.keep_local(1)
    assert [param.is_meta for param in layer.parameters()] == [True] * (1 + 2 * 4)
    own = [module for module in layer.modules() if list(module.parameters(recurse=False))]
    assert all(callable(getattr(module, "reset_parameters", None)) for module in own)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hidden_size": 0}, r"hidden_size=\): expected at least 1, got 0"),
        ({"num_experts": 0}, r"num_experts=\): expected at least 1, got 0"),
        ({"ep_size": 0}, r"ep_size=\): expected at least 1, got 0"),
        ({"ep_size": 3}, r"divisor of num_experts=4.*got 3"),
        ({"k": 0}, "1 to 4 experts per token, got 0"),
        ({"k": 5}, "1 to 4 experts per token, got 5"),
        ({"capacity_factor": 0.0}, r"MoE\(capacity_factor=.*above 0, got 0"),
        ({"eval_capacity_factor": float("inf")}, "eval_capacity_factor=.*got inf"),
        ({"min_capacity": -1}, "at least 0, got -1"),
        ({"noisy_gate_policy": "rsample"}, "RSample.*got 'rsample'"),
        ({"expert": nn.Linear(WIDTH, WIDTH)}, "makes a new expert, got the module Linear"),
    ],
)
def test_refused_when_built(arguments: dict[str, Any], message: str) -> None:
    arguments = {"hidden_size": WIDTH, "expert": Expert, "num_experts": 4, **arguments}
    with pytest.raises(ValueError, match=message):
        MoE(**arguments)


@pytest.mark.parametrize("shape", [(), (3, WIDTH + 1)])
def test_refused_when_called(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"expected hidden states \[\.\.\., 5\]"):
        build()(torch.zeros(shape, dtype=torch.float64))
