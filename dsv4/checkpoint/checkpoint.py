"""A checkpoint's tensors under DeepSeek's names, each read and dequantised when it is asked for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import attrs
import torch

from dsv4 import configfile
from dsv4.checkpoint.contents import Place, places
from dsv4.checkpoint.errors import CheckpointError
from dsv4.checkpoint.folder import WHOLE, Folder
from dsv4.checkpoint.names import canonical
from dsv4.checkpoint.quantised import from_fp4, from_fp8
from dsv4.config import ModelConfig, reduced
from dsv4.model.parameters import TOKEN_TABLE

OTHER_DRAFTER = "mtp.0.main_proj.weight"
"""In the -0731 checkpoints ``mtp.*`` is another drafter than the MTP block (``dspark_*`` in their config.json)."""


class Checkpoint(Mapping[str, torch.Tensor]):
    """The tensors of a folder in the format of transformers or of DeepSeek, told apart by their names.

    Everything is checked at once, from the files' headers, and token tables by what they hold; other tensors are read
    one by one, and one with a NaN or an infinity, its scales applied, is a `CheckpointError` then. Quantised matrices
    come as float32, others in the dtype they are stored in; `dsv4.model.weights.Assembly` converts and shares them
    out.

    Parameters
    ----------
    path
        A folder with ``config.json`` in either spelling, and one ``.safetensors`` file or several with their index.
    layers, experts
        Take the first ones only; see `dsv4.config.reduced`. With fewer experts than the file has, token tables name
        them modulo `experts`. Files that hold nothing of these may be absent.
    device
        Where tensors are dequantised, and left.

    Attributes
    ----------
    config
        Of what is here: without MTP blocks when the folder has none.

    Raises
    ------
    ModelConfigError
        The config is another model's, or not sound.
    CheckpointError
        The files do not hold the model of the config, or are damaged; lists everything.
    """

    def __init__(
        self,
        path: str | Path,
        layers: int | None = None,
        experts: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.path, self.device = Path(path), torch.device(device)
        if not self.path.is_dir():
            raise CheckpointError(f"{self.path} is no folder", "pass the folder with config.json and the weights")
        whole = configfile.load(self.path)
        self._folder = Folder(self.path)
        whole = self._with_drafter(whole)
        self.config = reduced(whole, layers, experts)
        self._fewer_experts = self.config.n_routed_experts < whole.n_routed_experts
        self._places = places(self._folder, whole, self.config)

    def __getitem__(self, name: str) -> torch.Tensor:
        place = self._places[name]
        found = self._dequantised(place, place.scale) if place.scale else self._read(place)
        experts = self.config.n_routed_experts
        if name.endswith(TOKEN_TABLE):
            return found.long() % experts if self._fewer_experts else found.long()
        if ".ffn.gate." in name:
            found = found[:experts]
        _check_finite(place.stored, found)
        return found

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def _with_drafter(self, config: ModelConfig) -> ModelConfig:
        """The config as far as the folder holds its MTP blocks."""
        blocks = {name for name in self._folder.shard_of if canonical(name).startswith("mtp.")}
        if any(canonical(name) == OTHER_DRAFTER for name in blocks):
            self._folder.leave_out(blocks)
            blocks = set()
        return config if blocks else attrs.evolve(config, num_nextn_predict_layers=0)

    def _read(self, place: Place) -> torch.Tensor:
        part = () if place.expert is None else (place.expert, place.rows)
        return self._folder.read(place.stored, *part).to(self.device)

    def _dequantised(self, place: Place, scales: str) -> torch.Tensor:
        weight, scale = self._read(place), self._folder.read(scales).to(self.device)
        return from_fp8(weight, scale) if weight.dtype is torch.float8_e4m3fn else from_fp4(weight, scale)


def _check_finite(stored: str, tensor: torch.Tensor) -> None:
    """Raise `CheckpointError` where a value is not finite: one pass, without a copy."""
    least, most = (float(bound) for bound in tensor.aminmax())  # both are NaN where a value is
    if not (math.isfinite(least) and math.isfinite(most)):
        raise CheckpointError(f"{stored} has values that are not finite: they range from {least} to {most}", WHOLE)
