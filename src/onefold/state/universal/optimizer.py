"""Universal optimizer: what ``zero/optimizer_state.pt`` says beside the moments."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.optim import Adam, AdamW, Optimizer

from onefold.errors import CheckpointError
from onefold.optim.scaler import LossScaler
from onefold.state.plain import encode
from onefold.state.universal.torch_files import Attributes, load_data


class OptimizerState:
    """Param group settings, steps and the loss scale; all of it unknown if the file is not data.

    DeepSpeed's optimizer steps flat buffers, which are numbered: one per param group, or several
    where parameters are sharded. A group's "params" are such numbers.

    Args:
        path: of the file.

    Attributes:
        groups: of parameters, with their settings; empty if they are unknown.
        reason: why they are; else empty.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._state: Mapping[str, Any] = {}
        self.groups: list[Mapping[str, Any]] = []
        self.reason = ""
        try:
            state = load_data(path)
        except CheckpointError as error:
            self.reason = str(error)
            return
        groups = state.get("param_groups") if isinstance(state, Mapping) else None
        if groups and all(isinstance(group, Mapping) for group in groups):
            self._state, self.groups = state, groups
        else:
            self.reason = f"{path}: expected param_groups, got none."

    def group_of(self, number: int) -> int | None:
        """The param group of a flat buffer; None if it is unknown."""
        for position, group in enumerate(self.groups):
            if number in group.get("params", ()):
                return position
        return None

    def step_of(self, number: int) -> Any:
        """How often a flat buffer was stepped; None if it is not said here."""
        kept = self._state.get("optimizer_state_dict", {})
        step = kept.get("state", {}).get(number, {}).get("step")
        group = self.group_of(number)
        return self.groups[group].get("step") if step is None and group is not None else step

    def class_name(self, optimizer: Optimizer) -> tuple[str, bool]:
        """The class as torch calls it, and whether the file says so.

        Both of Adam's classes have the same states. Where their groups do not say which of them it
        was, as those of DeepSpeed's own Adam do not, it is that of ``optimizer``.
        """
        said = {group.get("decoupled_weight_decay") for group in self.groups}
        if said in ({True}, {False}):
            return ("AdamW" if True in said else "Adam"), True
        own = type(optimizer)
        return (own.__name__ if own in (Adam, AdamW) else "AdamW"), False

    def settings(self, optimizer: Optimizer) -> tuple[list[dict[str, Any]], list[str]]:
        """Every group's settings in JSON's terms, and the names of those unknown to ``optimizer``.

        Raises:
            CheckpointError: a setting is no plain data.
        """
        known = {key for group in optimizer.param_groups for key in group} | {"params", "step"}
        unknown = sorted({key for group in self.groups for key in group} - known)
        try:
            kept = [
                {
                    key: encode(value, f"param group {position}: {key}")
                    for key, value in group.items()
                    if key in known - {"params", "step"}
                }
                for position, group in enumerate(self.groups)
            ]
        except TypeError as error:
            raise CheckpointError(f"{self._path}: {error}") from error
        return kept, unknown

    def loss_scaler(self) -> dict[str, float]:
        """What ``LossScaler.load_state_dict`` takes; empty if there is no scale.

        DeepSpeed counts steps from the start and notes the last that overflowed.

        Raises:
            CheckpointError: there is a scaler, of impossible numbers.
        """
        saved = self._state.get("loss_scaler")
        if not isinstance(saved, Attributes):
            return {}
        said = vars(saved)
        state = {
            "is_dynamic": bool(said.get("dynamic")),
            "scale": said.get("cur_scale", 0),
            "hysteresis": said.get("cur_hysteresis", 1),
            "clean_steps": said.get("cur_iter", 0) - said.get("last_overflow_iter", -1) - 1,
            "floor_skips": 0,
        }
        try:
            LossScaler(None).load_state_dict(state)
        except ValueError as error:
            raise CheckpointError(f"{self._path}: {error}") from error
        return state
