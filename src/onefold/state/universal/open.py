"""Universal index: what a universal checkpoint holds, as an index and a reader for the loader."""

import copy
import logging
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from onefold.errors import CheckpointError
from onefold.optim.entries import CurveLR
from onefold.parts import Parts
from onefold.state.agree import on_all_ranks
from onefold.state.index import BufferEntry, Index, Progress, World, file_of
from onefold.state.plain import encode
from onefold.state.restore import Wanted
from onefold.state.snapshot import dtype_text
from onefold.state.universal.optimizer import OptimizerState
from onefold.state.universal.params import NO_STATES, Params
from onefold.state.universal.survey import Survey, survey
from onefold.state.universal.torch_files import Place, TorchReader, load_data

log = logging.getLogger(__name__)

_NEEDED: Final[dict[str, type]] = {
    "module": dict,
    "buffer_names": list,
    "param_shapes": list,
    "global_steps": int,
    "skipped_steps": int,
    "dp_world_size": int,
}
_OWN: Final = frozenset(_NEEDED) | {
    *("optimizer", "frozen_param_shapes", "frozen_param_fragments", "shared_params"),
    *("lr_scheduler", "data_sampler", "random_ltd", "global_samples", "mp_world_size"),
    *("checkpoint_parallel_dimensions", "ds_config", "ds_version", "num_experts"),
    *("ds_autoep_layers", "autoep_layers", "universal_checkpoint_info", "folding"),
}
"""What DeepSpeed writes beside the client state."""


def open_universal(
    folder: Path, parts: Parts, lr_scheduler: LRScheduler | None, wanted: Wanted
) -> tuple[Index, TorchReader]:
    """Verify a universal checkpoint and say what is in it; a warning names what is not.

    Args:
        folder: the checkpoint.
        parts: of the engine that is to load it.
        lr_scheduler: the engine's.
        wanted: what is to be loaded; the rest may be missing.

    Raises:
        CheckpointError: damaged, no data, or nothing that onefold could load; names the file.
    Communication: four exchanges.
    Memory: a few MB.
    """
    found = survey(folder, parts.world.control)

    def build() -> tuple[Index, TorchReader, list[str]]:
        builder = _Builder(folder, found, parts.optimizer, wanted)
        index = builder.index(lr_scheduler)
        return index, TorchReader(builder.params.places), builder.left_out

    index, reader, left_out = on_all_ranks(parts.world.control, "load_checkpoint()", build)
    if left_out and parts.world.rank == 0:
        log.warning(
            "load_checkpoint(): %s is DeepSpeed's; not restored: %s", folder, "; ".join(left_out)
        )
    return index, reader


class _Builder:
    """Puts the index together.

    Attributes:
        params: the parameters, and where tensors are.
        left_out: what is wanted and will not be restored.
    """

    def __init__(self, folder: Path, found: Survey, optimizer: Optimizer, wanted: Wanted) -> None:
        self._optimizer, self._wanted = optimizer, wanted
        self._path, self._model = _model_states(folder, found)
        self._kept_path = folder / "zero" / "optimizer_state.pt"
        self._kept = OptimizerState(self._kept_path)
        kept = self._kept if wanted.optimizer else None
        self.params = Params(self._path, self._model, found, kept)
        self.left_out: list[str] = []

    def index(self, lr_scheduler: LRScheduler | None) -> Index:
        """Everything, checked."""
        try:
            return self._index(lr_scheduler)
        except ValidationError as error:
            raise CheckpointError(
                f"{self._path}: expected what DeepSpeed's save_checkpoint writes, and string keys "
                f"in client_state, got something else: {error}"
            ) from error

    def _index(self, lr_scheduler: LRScheduler | None) -> Index:
        model, wanted = self._model, self._wanted
        size, config = model["dp_world_size"], model.get("ds_config")
        tied: dict[str, str] = dict(model.get("shared_params") or {})
        params = self.params.entries(tied)
        if bare := [name for name in self.params.bare if wanted.has(name)]:
            self.left_out.append(f"optimizer states of {', '.join(bare)} (not in the folder)")
        groups = self._groups() if wanted.optimizer else []
        name, is_said = self._kept.class_name(self._optimizer)
        if wanted.optimizer and not is_said:
            self.left_out.append(f"whether it was Adam or AdamW; goes on as {name}")
        if wanted.progress:
            self._note_progress()
        return Index(
            onefold=f"DeepSpeed {model.get('ds_version')}",
            torch="",
            config=config if isinstance(config, dict) else {},
            world=World(size=size, axes=("data",), sizes=(size,)),
            # DeepSpeed counts a skipped step as a step, too.
            progress=Progress(
                global_steps=model["global_steps"] - model["skipped_steps"],
                skipped_steps=model["skipped_steps"],
                micro_steps=0,
            ),
            optimizer=name,
            groups=groups,
            scheduler=self._scheduler(lr_scheduler, groups) if wanted.scheduler else None,
            loss_scaler=self._kept.loss_scaler() if wanted.progress else {},
            params=params,
            tied=tied,
            buffers=self._buffers(),
            rng=[],
            dataloader=[],
            client_state=copy.deepcopy({k: v for k, v in model.items() if k not in _OWN}),
            files={},
        )

    def _groups(self) -> list[dict[str, Any]]:
        """The settings that are known."""
        if not self._kept.groups:
            self.left_out.append(f"settings of the param groups ({self._kept.reason})")
            return [{} for _ in self._model["param_shapes"]]
        if any(group.get("amsgrad") for group in self._kept.groups):
            raise CheckpointError(
                f"{self._kept_path}: amsgrad is on, and universal checkpoints "
                f"have no max_exp_avg_sq. {NO_STATES}"
            )
        groups, unknown = self._kept.settings(self._optimizer)
        if unknown:
            self.left_out.append(f"settings that the optimizer does not have: {unknown}")
        return groups

    def _scheduler(self, lr_scheduler: LRScheduler | None, groups: list[dict[str, Any]]) -> Any:
        """The state as the engine's scheduler takes it; None if there is none."""
        saved = self._model.get("lr_scheduler")
        if saved is None or lr_scheduler is None:
            return saved
        is_curve = isinstance(lr_scheduler, CurveLR)
        if isinstance(saved, dict) and is_curve and saved.keys() == {"last_batch_iteration"}:
            # DeepSpeed's own schedulers count from -1; see [Note: step index].
            last = saved["last_batch_iteration"] + 1
            rates = {"_last_lr": [group["lr"] for group in groups]} if all(groups) else {}
            return {"last_epoch": last, "_step_count": last + 1, **rates}
        own = {key for key in lr_scheduler.state_dict() if not key.startswith("_")}
        if is_curve or not isinstance(saved, dict) or not own <= saved.keys():
            got = sorted(saved) if isinstance(saved, dict) else type(saved).__name__
            raise CheckpointError(
                f"{self._path}: expected the state of a {type(lr_scheduler).__name__}, as the "
                f"engine has it, got {got}. load_lr_scheduler_states=False loads the rest."
            )
        return encode(saved, f"{self._path}: lr_scheduler")

    def _buffers(self) -> dict[str, BufferEntry]:
        found = {}
        for name in self._model["buffer_names"]:
            buffer = self._model["module"].get(name)
            if isinstance(buffer, Tensor):
                self.params.places[file_of("master", 0), f"buffer/{name}"] = Place(
                    self._path, ("module", name)
                )
                found[name] = BufferEntry(
                    shape=tuple(buffer.shape), dtype=dtype_text(buffer.dtype), ranks=(0,)
                )
        return found

    def _note_progress(self) -> None:
        self.left_out.append(
            "random number generators, the data loader's place, micro_steps (not in the folder)"
        )
        self.left_out += [key for key in ("data_sampler", "random_ltd") if self._model.get(key)]
        if self._kept.reason:
            self.left_out.append(f"the loss scale ({self._kept.reason})")


def _model_states(folder: Path, found: Survey) -> tuple[Path, dict[str, Any]]:
    """Rank 0's file beside the folder ``zero``, and what it has."""
    path = found.model_files.get(0)
    if path is None:
        raise CheckpointError(
            f"{folder}: expected mp_rank_00_model_states.pt, or one of every rank that begins with "
            "zero_pp_rank, got neither. Copy them from the checkpoint that was converted."
        )
    model = load_data(path)
    for key, kind in _NEEDED.items():
        value = model.get(key) if isinstance(model, dict) else None
        if not isinstance(value, kind):
            raise CheckpointError(
                f"{path}: expected {key!r} as DeepSpeed's save_checkpoint writes it with ZeRO, a "
                f"{kind.__name__}, got a {type(value).__name__}."
            )
    if not all(isinstance(shapes, dict) for shapes in model["param_shapes"]):
        raise CheckpointError(f"{path}: expected 'param_shapes' as a list of dicts by name.")
    if model.get("mp_world_size", 1) != 1:
        raise CheckpointError(
            f"{path}: expected mp_world_size 1, of a run with data parallelism alone, as onefold "
            f"has it, got {model['mp_world_size']}."
        )
    return path, model
