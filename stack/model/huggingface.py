"""Hugging Face's side of a model: ``config.json`` and ``generation_config.json``, written and read.

Everything that the decoder of this program does not compute is refused by name. A folder that only looks right would
train well and be another model than the one its files describe.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from stack.config import schema as config
from stack.core.errors import UserError
from stack.model.embedding import INPUT, OUTPUT
from stack.text.tokenizer import Tokenizer

CONFIG, GENERATION, WEIGHTS = "config.json", "generation_config.json", "model.safetensors"
NATIVE = "stack_native"
KINDS = {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM", NATIVE: "StackDecoder"}
WAY_OUT = "take a base without it"
# The values that the decoder computes; an absent one is Hugging Face's default, which is among them.
WANTED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "partial_rotary_factor": (1.0,),
}


def model_settings(model: config.Model, tokenizer: Tokenizer) -> dict[str, Any]:
    """``config.json``; a model that no stock architecture computes names one that no Hugging Face tool knows."""
    kind = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "mlp_bias": False}
    if model.qk_norm:
        kind = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "use_sliding_window": False}
    if model.native_only:
        own = {"qk_norm": model.qk_norm, "softcap": model.softcap, "scale_input": model.scale_input}
        kind = {"architectures": ["StackDecoder"], "model_type": "stack_native", **own}
    return {
        **kind,
        "vocab_size": tokenizer.vocab_size,
        "hidden_size": model.d,
        "intermediate_size": model.ffn,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": model.context,
        "rope_theta": model.rope_theta,  # read by transformers 4; the next line by 5
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "rms_norm_eps": model.norm_eps,
        "initializer_range": model.init_std,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": "float32",
        "use_cache": True,
        "bos_token_id": tokenizer.end_of_text,
        "eos_token_id": _ends(tokenizer),
        "pad_token_id": tokenizer.pad,
    }


def generation_settings(tokenizer: Tokenizer) -> dict[str, Any]:
    """``generation_config.json``: greedy, every stop of ours, and never a token that has a row but no meaning."""
    return {
        "bos_token_id": tokenizer.end_of_text,
        "eos_token_id": _ends(tokenizer),
        "pad_token_id": tokenizer.pad,
        "suppress_tokens": list(tokenizer.unsampled),
        "do_sample": False,
    }


def _ends(tokenizer: Tokenizer) -> int | list[int]:
    """Hugging Face's ``eos_token_id``: one id, or the end of a turn and of the text."""
    stops = list(tokenizer.stops)
    return stops if len(stops) > 1 else stops[0]


def model_of(settings: dict[str, Any], folder: Path) -> config.Model:
    """The shape that a ``config.json`` describes; UserError names every value that this program does not compute.

    Defaults are those of ``transformers`` for the type; what has a natural one alone may be absent.
    """
    kind = check_kind(settings, folder)
    refused = _refused(settings, kind)
    if refused:
        lines = "\n".join(f"  {line}" for line in refused)
        raise UserError(f"{folder / CONFIG} describes a model that this program does not compute:\n{lines}")
    heads, d = settings["num_attention_heads"], settings["hidden_size"]
    values = {
        "layers": settings["num_hidden_layers"],
        "d": d,
        "heads": heads,
        "kv_heads": settings.get("num_key_value_heads", 32 if kind == "qwen3" else None) or heads,
        "head_dim": settings.get("head_dim") or (128 if kind == "qwen3" else d // heads),
        "ffn": settings["intermediate_size"],
        "context": settings["max_position_embeddings"],
        "rope_theta": _theta(settings)[0],
        "norm_eps": settings["rms_norm_eps"],
        "qk_norm": settings["qk_norm"] if kind == NATIVE else kind == "qwen3",
        "init_std": settings.get("initializer_range", 0.02),
        "zero_init": False,  # of a training that is over
        "softcap": settings.get("softcap") if kind == NATIVE else None,
        "scale_input": settings.get("scale_input", False) if kind == NATIVE else False,
    }
    try:
        model = TypeAdapter(config.Model).validate_python(values)
    except ValidationError as error:
        found = "; ".join(f"{problem['loc'][-1]}={problem['input']!r}: {problem['msg']}" for problem in error.errors())
        raise UserError(f"{folder / CONFIG} describes no model: {found}; restore it") from error
    if model.heads % model.kv_heads:
        raise UserError(
            f"{folder / CONFIG}: num_attention_heads={model.heads} is no multiple of "
            f"num_key_value_heads={model.kv_heads}; restore it"
        )
    return model


def check_kind(settings: dict[str, Any], folder: Path) -> str:
    """``model_type``; UserError where this program does not compute it."""
    kind = settings.get("model_type")
    if kind not in list(KINDS):
        known = " and ".join(list(KINDS)[:2])
        raise UserError(f"{folder / CONFIG}: model_type={kind!r}; this program computes {known} only")
    return kind


def _refused(settings: dict[str, Any], kind: str) -> list[str]:
    """One line for each value that the decoder does not compute: the name, the value, the way out."""
    needed = ["hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"]
    needed += ["max_position_embeddings", "rms_norm_eps"] + ["qk_norm"] * (kind == NATIVE)
    lines = [f"{key} is missing; restore {CONFIG}" for key in needed if settings.get(key) is None]
    numbers = [key for key in needed if key != "qk_norm" and settings.get(key) is not None]
    lines += [f"{key}={settings[key]!r} is no positive number" for key in numbers if not _positive(settings[key])]
    for key, wanted in WANTED.items():
        value = settings.get(key)
        if value not in (None, *wanted):
            lines.append(f"{key}={value!r}, only {' or '.join(map(repr, wanted))}; {WAY_OUT}")
    architectures = settings.get("architectures") or [KINDS[kind]]
    if architectures != [KINDS[kind]]:
        lines.append(f"architectures={architectures!r}, only {[KINDS[kind]]!r}; {WAY_OUT}")
    for key in ("quantization_config", "auto_map"):
        if settings.get(key):
            lines.append(f"{key}={settings[key]!r}: stored weights or code that only its maker reads; {WAY_OUT}")
    layers = sorted(set(settings.get("layer_types") or []) - {"full_attention"})
    if layers:
        lines.append(f"layer_types holds {layers}, only 'full_attention'; {WAY_OUT}")
    for key in ("rope_parameters", "rope_scaling"):
        value = _rope(settings, key)
        scaled = {name: part for name, part in value.items() if name not in ("rope_type", "type", "rope_theta")}
        scaled = {name: part for name, part in scaled.items() if (name, part) != ("partial_rotary_factor", 1.0)}
        kinds = {value.get("rope_type", "default"), value.get("type", "default")}
        if scaled or kinds != {"default"}:
            lines.append(f"{key}={value!r}, only the type 'default' without more; {WAY_OUT}")
    if len(_theta(settings)) > 1:
        lines.append(f"rope_theta is {' and '.join(map(str, _theta(settings)))} in different places; restore {CONFIG}")
    return lines


def _theta(settings: dict[str, Any]) -> list[Any]:
    """The different values of ``rope_theta``: transformers 4 has it at the top, 5 among ``rope_parameters``."""
    places = [settings, _rope(settings, "rope_parameters"), _rope(settings, "rope_scaling")]
    return list(dict.fromkeys(place["rope_theta"] for place in places if place.get("rope_theta") is not None)) or [1e4]


def _rope(settings: dict[str, Any], key: str) -> dict[str, Any]:
    value = settings.get(key) or {}
    return value if isinstance(value, dict) else {"type": value}


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def untie(settings: dict[str, Any], weights: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """The weights with the table once, if what ``config.json`` says of the head and what is stored agree."""
    if tables_of(settings, weights, folder)[1] is not None:
        raise UserError(
            f"{folder}: the head ({OUTPUT}) is a table of its own, and this program has models with one table only; "
            "take a checkpoint with tie_word_embeddings=true"
        )
    return {name: tensor for name, tensor in weights.items() if name != OUTPUT}


def tables_of(settings: dict[str, Any], weights: dict[str, Tensor], folder: Path) -> tuple[Tensor, Tensor | None]:
    """The embedding, and the head where it is another table; None where it is the same.

    UserError where what ``config.json`` says of it and what is stored contradict each other.
    """
    tied = settings.get("tie_word_embeddings", False)  # absent: the default of Qwen3 and Llama
    head, table = weights.get(OUTPUT), weights.get(INPUT)
    if table is None:
        raise UserError(f"{folder / WEIGHTS}: has no {INPUT}; this is no checkpoint of a decoder, take another one")
    same = head is not None and torch.equal(head, table)
    if tied and head is not None and not same:
        raise UserError(
            f"{folder}: {CONFIG} says tie_word_embeddings=true, but {WEIGHTS} holds a {OUTPUT} that differs from "
            f"{INPUT}; remove the tensor if the table is right, or take a checkpoint whose head is its table"
        )
    if not tied and head is None:
        raise UserError(
            f"{folder}: {CONFIG} says tie_word_embeddings=false, but {WEIGHTS} holds no {OUTPUT}; "
            "set it to true if the head is the table, or take a checkpoint that is whole"
        )
    return table, None if tied or same else head


def check_rows(settings: dict[str, Any], table: Tensor, head: Tensor | None, folder: Path) -> None:
    """UserError unless the tables have the shape that ``config.json`` and each other say."""
    mend = "the files do not belong together: restore them"
    if len(table) != settings.get("vocab_size"):
        rows = settings.get("vocab_size")
        raise UserError(f"{folder}: {CONFIG} says vocab_size={rows}, but {INPUT} has {len(table)} rows; {mend}")
    if head is not None and head.shape != table.shape:
        raise UserError(f"{folder}: {OUTPUT} is {list(head.shape)} and {INPUT} {list(table.shape)}; {mend}")
