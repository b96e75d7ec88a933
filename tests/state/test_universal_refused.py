"""What of a universal checkpoint is refused, by name and before anything is loaded; key by key."""

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import onefold
from tests.harness import RankContext, pool_for
from tests.rig import start
from tests.state.test_universal import LOAD, Net, engine_of, masters_of, warnings_of, write
from tests.state.universal_folder import MODEL_FILES, TAG, deepspeeds_classes, instance, save

KEY = '"checkpoint": {"load_universal": true}'
MODEL = MODEL_FILES[False]


def attempt(
    ctx: RankContext, folder: str, config: dict[str, Any], arguments: dict[str, Any]
) -> str:
    """The refusal, after which the engine is as it was."""
    engine = engine_of(ctx, 3, **config)
    before = masters_of(engine)
    try:
        engine.load_checkpoint(folder, **arguments)
    except onefold.CheckpointError as error:
        after = masters_of(engine)
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert not engine.module.get_buffer("shift").any()
        assert not engine.optimizer.state
        assert engine.global_steps == 0
        return str(error)
    return ""


def refusal(folder: Path, config: dict[str, Any] | None = None, **arguments: Any) -> str:
    """What rank 0 says; all ranks refuse, for the same reason."""
    texts = pool_for(2).run(attempt, folder=str(folder), config=config or {}, arguments=arguments)
    for text in texts:
        assert text
        assert text in texts[0] or texts[0] in text or "failed: CheckpointError" in text
    return min(texts, key=len)


OFF: dict[str, Any] = {"checkpoint": {"load_universal": False}}


def test_a_universal_checkpoint_wants_the_key(tmp_path: Path) -> None:
    write(tmp_path, is_sharded=False)
    for tag in (None, TAG):
        text = refusal(tmp_path, OFF, tag=tag)
        assert KEY in text
        assert "universal" in text
    # DeepSpeed's own layout, as it lies beside, with its ``latest``.
    save({}, tmp_path / "step5" / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    (tmp_path / "latest").write_text("step5")
    text = refusal(tmp_path, OFF)
    assert KEY in text
    assert "ds_to_universal.py" in text
    assert "step5" in text


def save_own(ctx: RankContext, folder: str) -> None:
    engine = engine_of(ctx, 1, Net())
    engine.save_checkpoint(folder, "own")


def test_the_key_wants_a_universal_checkpoint(tmp_path: Path) -> None:
    pool_for(1).run(save_own, folder=str(tmp_path))
    for tag in (None, "own"):
        text = refusal(tmp_path, tag=tag)
        assert KEY in text
        assert "own" in text
        assert "Remove that key" in text
    write(tmp_path, is_sharded=False)
    assert "onefold's own as well" in refusal(tmp_path)
    (tmp_path / "empty").mkdir()
    assert "with a folder zero" in refusal(tmp_path, tag="empty")
    (tmp_path / TAG).rename(tmp_path / "elsewhere")
    for name in ("latest", "own/index.json"):
        (tmp_path / name).unlink()
    assert f"{TAG}: expected a universal checkpoint" in refusal(tmp_path)
    (tmp_path / "latest_universal").unlink()
    assert "expected a file latest_universal" in refusal(tmp_path)


class Wide(Net):
    """Another head, one parameter more, one less."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 2, dtype=torch.float64)
        self.extra = nn.Linear(1, 1, dtype=torch.float64)
        del self.frozen
        self.shift = torch.zeros(7)


def differs(ctx: RankContext, folder: str, is_sharded: bool) -> None:
    engine = engine_of(ctx, 2, Wide())
    before = masters_of(engine)
    with pytest.raises(onefold.CheckpointError) as caught:
        engine.load_checkpoint(folder, load_optimizer_states=False)
    for text in (
        "in the model and not in the checkpoint: extra.bias, extra.weight",
        "in the checkpoint and not in the model: frozen.bias, frozen.weight",
        "head.weight: shape (2, 6) in the model, (1, 6) in the checkpoint",
        "shift: shape (7,) in the model, (6,) in the checkpoint",
    ):
        assert text in str(caught.value)
    after = masters_of(engine)
    assert all(torch.equal(before[name], after[name]) for name in before)
    net = Net()
    other = start(ctx, net, 1, optimizer=torch.optim.SGD(net.parameters(), lr=1.0), config=LOAD)
    with pytest.raises(onefold.CheckpointError, match="the optimizer is SGD, and was AdamW"):
        other.load_checkpoint(folder)
    one = start(ctx, Net(), 1, optimizer=partial(torch.optim.AdamW, lr=0.1), config=LOAD)
    with pytest.raises(onefold.CheckpointError, match="1 param groups, and there were 2"):
        one.load_checkpoint(folder)


@pytest.mark.parametrize("is_sharded", [False, True], ids=["whole", "sharded"])
def test_another_model_or_optimizer(tmp_path: Path, is_sharded: bool) -> None:
    write(tmp_path, is_sharded=is_sharded)
    pool_for(2).run(differs, folder=str(tmp_path), is_sharded=is_sharded)


def test_a_pickled_class_is_named(tmp_path: Path) -> None:
    write(tmp_path, is_sharded=False)
    for name in (MODEL, "zero/embed.weight/exp_avg.pt"):
        path = tmp_path / TAG / name
        before = torch.load(path)
        with deepspeeds_classes() as classes:
            save(before | {"args": instance(classes["Unknown"], x=1)}, path)
        text = refusal(tmp_path, load_module_only=True)
        for wanted in (f"{path}: ", "deepspeed.runtime.fp16.loss_scaler.Unknown", "client_state"):
            assert wanted in text
        save(before, path)
    pool_for(2).run(loads, folder=str(tmp_path))


def without_settings(ctx: RankContext, folder: str) -> None:
    engine = engine_of(ctx, 3)
    with warnings_of("onefold.state.universal.open") as warned:
        engine.load_checkpoint(folder)
    if ctx.rank == 0:
        (text,) = warned
        for wanted in ("settings of the param groups", "the loss scale", "Unknown", "Adam or"):
            assert wanted in text
    assert [group["lr"] for group in engine.optimizer.param_groups] == [0.3, 0.3]
    assert {float(state["step"]) for state in engine.optimizer.state.values()} == {3.0}


def test_unreadable_settings_are_said_and_unknown_steps_refused(tmp_path: Path) -> None:
    for is_sharded in (False, True):
        folder = tmp_path / str(is_sharded)
        write(folder, is_sharded=is_sharded)
        path = folder / TAG / "zero" / "optimizer_state.pt"
        with deepspeeds_classes() as classes:
            save({"loss_scaler": instance(classes["Unknown"])}, path)
        if not is_sharded:
            pool_for(2).run(without_settings, folder=str(folder))
            (folder / TAG / "zero" / "head.weight" / "step.pt").unlink()
            text = refusal(folder)
            assert "head.weight: there are optimizer states, and no step.pt" in text
        else:
            text = refusal(folder)
        for wanted in ("optimizer_state.pt", "loss_scaler.Unknown", "load_optimizer_states=False"):
            assert wanted in text


def truncate(path: Path, at: float) -> None:
    raw = path.read_bytes()
    path.write_bytes(raw[: int(len(raw) * at)])


DAMAGES: dict[str, Callable[[Path, float], object]] = {
    "truncated": truncate,
    "emptied": lambda path, _: path.write_bytes(b""),
    "removed": lambda path, _: path.unlink(),
}


@pytest.mark.parametrize("is_sharded", [False, True], ids=["whole", "sharded"])
@pytest.mark.parametrize("kind", DAMAGES)
def test_damaged_files_are_named(tmp_path: Path, kind: str, is_sharded: bool) -> None:
    numbers = random.Random(kind)
    names = [MODEL_FILES[is_sharded], "zero/head.weight/fp32.pt", "zero/head.weight/exp_avg.pt"]
    names += ["zero_pp_rank_1_mp_rank_00_model_states.pt"] if is_sharded else []
    names += [] if kind == "removed" else ["zero/optimizer_state.pt"]
    for name in names:
        folder = tmp_path / name.replace("/", "-")
        write(folder, is_sharded=is_sharded)
        DAMAGES[kind](folder / TAG / name, numbers.random())
        text = refusal(folder)
        wanted = "zero/head.weight" if name.endswith("exp_avg.pt") and kind == "removed" else name
        assert wanted in text, text


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    values = write(tmp_path, is_sharded=False)
    path = tmp_path / TAG / "zero" / "layers.1.weight" / "exp_avg_sq.pt"
    raw = bytearray(path.read_bytes())
    number = values.params["layers.1.weight"]["exp_avg_sq"][2, 3]
    at = raw.index(number.numpy().tobytes())
    raw[at] ^= 1
    path.write_bytes(raw)
    text = refusal(tmp_path)
    assert str(path) in text
    assert "CRC-32" in text


def loads(ctx: RankContext, folder: str) -> None:
    engine_of(ctx, 2).load_checkpoint(folder)


def test_without_checksums_it_loads(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        write(tmp_path, is_sharded=True)
    finally:
        torch.serialization.set_crc32_options(True)
    pool_for(2).run(loads, folder=str(tmp_path))


def vocabulary(folder: Path) -> None:
    save({"param": torch.zeros(11, 6), "vocab_tensor": True}, folder / "zero/embed.weight/fp32.pt")


def amsgrad(folder: Path) -> None:
    path = folder / "zero" / "optimizer_state.pt"
    groups = [{"amsgrad": True, "params": [number]} for number in range(2)]
    save({"param_groups": groups}, path)


def other_shape(folder: Path) -> None:
    save({"param": torch.zeros(6, 11)}, folder / "zero" / "embed.weight" / "exp_avg.pt")


def other_state(folder: Path) -> None:
    save({"param": torch.zeros(11, 6)}, folder / "zero" / "embed.weight" / "momentum_buffer.pt")


def odd_key(folder: Path) -> None:
    save(torch.load(folder / MODEL) | {1: 2}, folder / MODEL)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda folder: save({}, folder / "mp_rank_01_model_states.pt"), "mp_rank_01"),
        (lambda folder: save({}, folder / "layer_0_expert_1_model_states.pt"), "layer_0_expert_1"),
        (lambda folder: save({}, folder / MODEL_FILES[True]), "got both"),
        (vocabulary, "embed.weight/fp32.pt: has vocab_tensor"),
        (amsgrad, "amsgrad is on"),
        (other_shape, "exp_avg.pt: expected shape (11, 6)"),
        (lambda folder: save("x", folder / "zero/head.bias/step.pt"), "expected a number"),
        (other_state, "got ['exp_avg', 'exp_avg_sq', 'momentum_buffer']"),
        (lambda folder: save([1], folder / "zero/head.bias/fp32.pt"), "expected a tensor"),
        (lambda folder: save({"module": {}}, folder / MODEL), "expected 'buffer_names'"),
        (lambda folder: save([], folder / MODEL), "expected 'module'"),
        (odd_key, "string keys in client_state"),
    ],
)  # fmt: skip
def test_what_onefold_cannot_load_is_named(
    tmp_path: Path, change: Callable[[Path], None], text: str
) -> None:
    write(tmp_path, is_sharded=False)
    change(tmp_path / TAG)
    assert text in refusal(tmp_path)


def test_tensor_parallel_runs_are_named(tmp_path: Path) -> None:
    write(tmp_path, is_sharded=True, more={"mp_world_size": 2})
    assert "mp_world_size 1" in refusal(tmp_path)


def never_stepped(ctx: RankContext, folder: str) -> None:
    engine = engine_of(ctx, 1)
    with warnings_of("onefold.state.universal.open") as warned:
        engine.load_checkpoint(folder)
    assert ctx.rank or "optimizer states of head.bias" in warned[0]
    named = {id(piece): name for name, piece in pieces_of(engine).items()}
    assert "head.bias" not in {named[id(piece)] for piece in engine.optimizer.state}


def pieces_of(engine: onefold.Engine) -> dict[str, torch.Tensor]:
    pieces = engine._stepper.masters.pieces
    return {
        slot.name: piece
        for unit in engine._units
        if unit.index in pieces
        for slot, piece in zip(unit.slots, pieces[unit.index], strict=True)
    }


def test_a_parameter_that_was_never_stepped_starts_afresh(tmp_path: Path) -> None:
    write(tmp_path, is_sharded=False)
    for key in ("exp_avg", "exp_avg_sq", "step"):
        (tmp_path / TAG / "zero" / "head.bias" / f"{key}.pt").unlink()
    pool_for(2).run(never_stepped, folder=str(tmp_path))
