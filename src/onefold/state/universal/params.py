"""Universal params: the parameters of a universal checkpoint, and where their tensors are."""

from collections.abc import Collection
from math import prod
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from onefold.errors import CheckpointError
from onefold.state.index import ParamEntry, Part, file_of
from onefold.state.plain import encode
from onefold.state.snapshot import dtype_text
from onefold.state.universal.optimizer import OptimizerState
from onefold.state.universal.survey import Stored, Survey
from onefold.state.universal.torch_files import Place

_MOMENTS: Final = {"exp_avg", "exp_avg_sq"}
NO_STATES: Final = "load_optimizer_states=False loads the rest."


class Params:
    """Puts together an entry per parameter.

    Args:
        path: of the model's file.
        model: what it has.
        found: what the others have.
        kept: what ``optimizer_state.pt`` has; None leaves optimizer states out.

    Attributes:
        places: where the tensors of the entries are, by file and name.
        bare: trainable parameters of which there are no optimizer states.
    """

    def __init__(
        self, path: Path, model: dict[str, Any], found: Survey, kept: OptimizerState | None
    ) -> None:
        self._path, self._model, self._found, self._kept = path, model, found, kept
        self._zero = path.with_name("zero")
        self.places: dict[tuple[str, str], Place] = {}
        self.bare: list[str] = []

    def entries(self, tied: Collection[str]) -> dict[str, ParamEntry]:
        """All but those of the names ``tied``, which are others' further ones.

        Raises:
            CheckpointError: something is missing, or of another shape; names the file.
        """
        model, fragments = self._model, self._found.fragments
        params: dict[str, ParamEntry] = {}
        for number, shapes in enumerate(model["param_shapes"]):
            for name, shape in shapes.items():
                params[name] = self._trained(name, tuple(shape), number)
        if fragments:
            for name, shape in (model.get("frozen_param_shapes") or {}).items():
                params[name] = self._from_fragments(name, tuple(shape))
        else:
            # The folder has all of the model's state dict, buffers and further names too.
            others = {*params, *model["buffer_names"], *tied}
            for name in sorted(self._found.tensors.keys() - others):
                params[name] = self._whole(name, None)
        return params

    def _trained(self, name: str, shape: tuple[int, ...], number: int) -> ParamEntry:
        entry = self._whole(name, shape).model_copy(update={"is_trainable": True})
        states = {key: one for key, one in self._found.tensors[name].items() if key != "fp32"}
        if self._kept is None:
            return entry
        group = self._group_of(self._kept, number)
        if not states:
            self.bare.append(name)
            return entry.model_copy(update={"group": group})
        if states.keys() != _MOMENTS:
            raise CheckpointError(
                f"{self._zero / name}: expected the optimizer states of Adam, {sorted(_MOMENTS)}, "
                f"got {sorted(states)}. {NO_STATES}"
            )
        for key, stored in states.items():
            _check_shape(stored, shape, self._path)
            self.places[file_of("optimizer", 0), f"{name}/{key}"] = stored.place
        return entry.model_copy(
            update={
                "group": group,
                "state": {key: stored.dtype for key, stored in states.items()},
                "scalars": {"step": encode(self._step(self._kept, name, number), "step")},
            }
        )

    def _whole(self, name: str, shape: tuple[int, ...] | None) -> ParamEntry:
        """A parameter in one file; without ``shape`` it has that of the file's tensor."""
        stored = self._found.tensors.get(name, {}).get("fp32")
        if stored is None:
            raise CheckpointError(
                f"{self._zero / name / 'fp32.pt'}: expected this file, because {self._path} names "
                "the parameter; it is not there. Convert the checkpoint again."
            )
        shape = stored.shape if shape is None else shape
        _check_shape(stored, shape, self._path)
        self.places[file_of("master", 0), name] = stored.place
        return self._entry(name, shape, stored.dtype, [(0, 0, prod(shape))])

    def _from_fragments(self, name: str, shape: tuple[int, ...]) -> ParamEntry:
        """A frozen parameter of which every rank has as many elements; the last have padding."""
        numel, num_ranks = prod(shape), self._model["dp_world_size"]
        length, dtype = -(-numel // num_ranks), "float32"
        parts: list[Part] = []
        for rank in range(num_ranks):
            begin = rank * length
            if begin >= numel:
                break
            stored = self._found.fragments.get(rank, {}).get(name)
            if stored is None or stored.shape != (length,):
                raise CheckpointError(
                    f"{self._path.with_name(f'zero_pp_rank_{rank}_mp_rank_00_model_states.pt')}: "
                    f"expected {length} elements of the frozen parameter {name}, got "
                    f"{'none' if stored is None else stored.shape}."
                )
            dtype = stored.dtype
            parts.append((rank, begin, min(length, numel - begin)))
            self.places[file_of("master", rank), name] = stored.place
        return self._entry(name, shape, dtype, parts)

    def _entry(
        self, name: str, shape: tuple[int, ...], dtype: str, parts: list[Part]
    ) -> ParamEntry:
        own = self._model["module"].get(name)
        return ParamEntry(
            shape=shape,
            stride=torch.empty(shape, device="meta").stride(),
            dtype=dtype,
            model_dtype=dtype_text(own.dtype) if isinstance(own, Tensor) else dtype,
            is_trainable=False,
            group=None,
            parts=tuple(parts),
            state={},
            scalars={},
        )

    def _step(self, kept: OptimizerState, name: str, number: int) -> Tensor:
        step = self._found.steps.get(name)
        step = kept.step_of(number) if step is None else step
        if step is None and self._model["global_steps"] == self._model["skipped_steps"]:
            step = 0
        if step is None:
            raise CheckpointError(
                f"{self._zero / name}: there are optimizer states, and no step.pt says how often "
                f"they were stepped, nor does optimizer_state.pt. {kept.reason} {NO_STATES}"
            )
        return torch.tensor(float(step))

    def _group_of(self, kept: OptimizerState, number: int) -> int:
        if (group := kept.group_of(number)) is not None:
            return group
        if not kept.groups and not self._found.fragments:
            return number  # of parameters that are not sharded, each group is one flat buffer
        raise CheckpointError(
            f"{self._zero / 'optimizer_state.pt'}: expected the param group of flat buffer "
            f"{number}, got none. {kept.reason} {NO_STATES}"
        )


def _check_shape(stored: Stored, shape: tuple[int, ...], source: Path) -> None:
    """Whole or flat; of sharded parameters the files have them flat."""
    if stored.shape not in (shape, (prod(shape),)):
        raise CheckpointError(
            f"{stored.place.path}: expected shape {shape}, as {source.name} says, got "
            f"{stored.shape}. Convert the checkpoint again."
        )
