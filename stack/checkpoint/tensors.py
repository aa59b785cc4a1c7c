"""Tensors by name: their digest, how they get into a model, and out of the files of any Hugging Face folder."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from stack.core.errors import UserError, some
from stack.core.files import read_json
from stack.model.embedding import ALIASES
from stack.model.huggingface import WEIGHTS
from stack.model.names import by_name

INDEX = f"{WEIGHTS}.index.json"
NO_TENSORS = ".rotary_emb.inv_freq"  # old Llama files store the angles, which follow from rope_theta
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def bytes_of(tensor: Tensor) -> np.ndarray:
    """The bytes of a tensor, uint8; a view where it is contiguous on the CPU."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def digest_tensors(tensors: dict[str, Tensor]) -> str:
    """Hex SHA-256 over names, dtypes, shapes and bytes, in the order of the names: equal means bit-equal."""
    digest = hashlib.sha256()
    for name, tensor in sorted(by_name(tensors).items()):
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode() + b"\n")
        digest.update(bytes_of(tensor))
    return digest.hexdigest()


@torch.no_grad()
def load_weights_into(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Copy every weight into the parameter of its name, in place, so that ties and optimizers hold.

    The model may be compiled or wrapped. Strict: all missing and unexpected names and all other shapes are listed in
    one :class:`UserError`, and then nothing is copied.
    """
    own = by_name(model.state_dict())
    for alias, name in ALIASES.items():
        if alias in own and own[alias].data_ptr() == own[name].data_ptr():
            own.pop(alias)
    check_fit({name: tensor.shape for name, tensor in own.items()}, weights)
    for name, tensor in own.items():
        tensor.copy_(weights[name])


def check_fit(shapes: dict[str, torch.Size], weights: dict[str, Tensor]) -> None:
    """One :class:`UserError` with all missing and unexpected names and other shapes of a model's parameters."""
    other = [
        f"{name} is {list(weights[name].shape)} in the checkpoint and {list(shapes[name])} in the model"
        for name in sorted(shapes.keys() & weights.keys())
        if shapes[name] != weights[name].shape
    ]
    listed = {
        "missing in the checkpoint": sorted(shapes.keys() - weights.keys()),
        "unexpected in it": sorted(weights.keys() - shapes.keys()),
        "of another shape": other,
    }
    if any(listed.values()):
        lines = [f"  {len(names)} {what}: {', '.join(names)}" for what, names in listed.items() if names]
        raise UserError(
            "the weights do not fit the model:\n" + "\n".join(lines) + "\n"
            "give the model.* settings and the tokenizer that the checkpoint was trained with (see its config.json)"
        )


# ---------------------------------------------------------------- any Hugging Face folder


def read_weights(folder: Path, only: tuple[str, ...] | None = None) -> dict[str, Tensor]:
    """The tensors of a folder as float32, all or those of a name in ``only``.

    They lie in ``model.safetensors``, or in the shards that its index names.
    """
    names = [WEIGHTS]
    if not (folder / WEIGHTS).is_file():
        if not (folder / INDEX).is_file():
            raise _no_weights(folder)
        names = _shards(folder)
    weights: dict[str, Tensor] = {}
    for name in names:
        try:
            found = _tensors(folder / name, only)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{folder / name} cannot be read ({error}); copy it again from where it came") from error
        twice = sorted(weights.keys() & found.keys())
        if twice:
            raise UserError(f"{folder / name} holds {some(twice)}, which another shard holds too; restore the files")
        weights |= {key: _float(folder / name, key, value) for key, value in found.items() if NO_TENSORS not in key}
    return weights


def _tensors(path: Path, only: tuple[str, ...] | None) -> dict[str, Tensor]:
    if only is None:
        return safetensors.torch.load_file(path)
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in only if name in file.keys()}  # noqa: SIM118  no mapping


def _shards(folder: Path) -> list[str]:
    """The files that the index names, all of them beside it."""
    named = read_json(folder / INDEX).get("weight_map")
    names = sorted(set(map(str, named.values()))) if isinstance(named, dict) else []
    strange = [name for name in names if Path(name).name != name or not name.endswith(".safetensors")]
    if strange or not names:
        raise UserError(f"{folder / INDEX}: weight_map names {some(strange)} as shards; restore it")
    return names


def _float(path: Path, name: str, tensor: Tensor) -> Tensor:
    if tensor.dtype not in FLOATS:
        raise UserError(
            f"{path}: {name} is stored as {tensor.dtype}, so the weights are quantized; take the folder with float16, "
            "bfloat16 or float32 weights"
        )
    return tensor.float()


def _no_weights(folder: Path) -> UserError:
    """What lies in the place of the weights, and what to do about it."""
    patterns = ("*.bin", "*.pt", "*.pth", "*.gguf", "*.safetensors")
    others = sorted(path.name for pattern in patterns for path in folder.glob(pattern))
    way_out = f"a base has {WEIGHTS} or {INDEX} with its shards"
    if any(name.endswith((".bin", ".pt", ".pth")) for name in others):
        way_out = "pickle files can run code and are never opened; convert it with transformers' save_pretrained()"
    return UserError(f"{folder}: no {WEIGHTS}, but {some(others)}; {way_out}")
