"""stack.checkpoint.open: what Hugging Face computes is computed here, and everything else is refused by name."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hugging_face import same_shape
from safetensors.torch import load_file, save_file
from talk import words_of
from transformers import AutoConfig, AutoModelForCausalLM

from stack import checkpoint
from stack.checkpoint.open import build, load_base
from stack.config import schema as config
from stack.core.errors import UserError
from stack.model.decoder import Decoder
from stack.model.embedding import INPUT, OUTPUT
from stack.model.huggingface import WEIGHTS, model_of
from stack.text.tokenizer import Tokenizer

SHAPE = config.Model(
    layers=2, d=32, heads=4, kv_heads=2, head_dim=16, ffn=48, context=64, rope_theta=500.0, norm_eps=1e-5,
    qk_norm=True, init_std=0.02, zero_init=False, softcap=None, scale_input=False,
)  # fmt: skip
NUM_ROWS = 320
Edit = Callable[[dict[str, Any]], object]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """300 tokens without reserved ones: fewer than the table's rows."""
    return words_of(tmp_path_factory.mktemp("words") / "foreign", 300, padded=False)


def foreign(
    folder: Path, words: Tokenizer, *, qk_norm: bool = True, dtype: torch.dtype = torch.float32, **how: Any
) -> Path:
    """What transformers saves of a random model."""
    model = same_shape(dataclasses.replace(SHAPE, qk_norm=qk_norm), NUM_ROWS)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    model.to(dtype).save_pretrained(folder, **how)
    words.save_into(folder)
    return folder


@pytest.fixture(scope="module")
def qwen3(words: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that tests copy and harm."""
    return foreign(tmp_path_factory.mktemp("qwen3"), words)


def copy(folder: Path, to: Path, edit: Edit | None = None) -> Path:
    """A copy whose ``config.json`` is edited."""
    shutil.copytree(folder, to, dirs_exist_ok=True)
    if edit is not None:
        settings = json.loads((to / "config.json").read_text())
        edit(settings)
        (to / "config.json").write_text(json.dumps(settings))
    return to


def refusal(where: Path | str, runs: Path | str = "runs") -> str:
    with pytest.raises(UserError) as caught:
        load_base(str(where), str(runs))
    return str(caught.value)


# Other people's


@pytest.mark.parametrize("how", ["float32", "bf16", "float16", "sharded", "head stored"])
@pytest.mark.parametrize("qk_norm", [True, False])
def test_the_logits_of_hugging_face(tmp_path: Path, words: Tokenizer, qk_norm: bool, how: str) -> None:
    dtype = {"bf16": torch.bfloat16, "float16": torch.float16}.get(how, torch.float32)
    foreign(tmp_path, words, qk_norm=qk_norm, dtype=dtype, **({"max_shard_size": "20KB"} if how == "sharded" else {}))
    assert (len(list(tmp_path.glob("*.safetensors"))) > 2) == (how == "sharded")
    if how == "head stored":
        weights = load_file(tmp_path / WEIGHTS)
        save_file(weights | {OUTPUT: weights[INPUT].clone()}, tmp_path / WEIGHTS, {"format": "pt"})
    base = load_base(str(tmp_path), "runs")
    assert base.manifest is None and base.moments == {} and base.num_rows == NUM_ROWS > base.tokenizer.vocab_size
    assert {weight.dtype for weight in base.weights.values()} == {torch.float32} and OUTPUT not in base.weights
    assert base.model == dataclasses.replace(SHAPE, qk_norm=qk_norm)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = torch.randint(0, NUM_ROWS, (2, 50), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(build(base).logits(ids), theirs(ids).logits, rtol=1e-5, atol=2e-5)


def drop(*keys: str) -> Edit:
    return lambda settings: [settings.pop(key, None) for key in keys]


def put(**values: Any) -> Edit:
    return lambda settings: settings.update(values)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize(
    "edit",
    [
        drop(),
        drop("num_key_value_heads"),
        put(num_key_value_heads=None),
        drop("head_dim"),
        drop("rope_parameters"),
        lambda settings: settings.update(rope_theta=settings.pop("rope_parameters")["rope_theta"]),
        lambda settings: settings.update(rope_theta=7e4, rope_scaling=None, rope_parameters=None),
        drop("hidden_act", "attention_bias", "mlp_bias", "initializer_range"),
    ],
)
def test_defaults_are_those_of_transformers(tmp_path: Path, words: Tokenizer, kind: str, edit: Edit) -> None:
    shape = dataclasses.replace(SHAPE, qk_norm=kind == "qwen3", heads=32, kv_heads=32, d=64)
    same_shape(shape, NUM_ROWS).config.save_pretrained(tmp_path / "a")
    folder = copy(tmp_path / "a", tmp_path / "b", edit)
    theirs = AutoConfig.from_pretrained(folder)
    found = model_of(json.loads((folder / "config.json").read_text()), folder)
    assert (found.heads, found.kv_heads) == (theirs.num_attention_heads, theirs.num_key_value_heads)
    assert (found.d, found.head_dim, found.ffn) == (theirs.hidden_size, theirs.head_dim, theirs.intermediate_size)
    assert found.rope_theta == theirs.rope_parameters["rope_theta"]
    assert (found.norm_eps, found.context, found.layers) == (
        theirs.rms_norm_eps,
        theirs.max_position_embeddings,
        theirs.num_hidden_layers,
    )
    assert theirs.hidden_act == "silu" and found.init_std == theirs.initializer_range


YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 500.0}


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (put(model_type="gemma3_text"), "model_type='gemma3_text'"),
        (put(model_type=["llama"]), r"model_type=\['llama'\]"),
        (drop("model_type"), "model_type=None"),
        (put(architectures=["Qwen3ForSequenceClassification"]), "Qwen3ForSequenceClassification"),
        (put(rope_parameters=YARN), "rope_parameters={'rope_type': 'yarn'"),
        (put(rope_scaling={"type": "linear", "factor": 2.0}), "rope_scaling={'type': 'linear'"),
        (put(rope_scaling="dynamic"), "rope_scaling={'type': 'dynamic'"),
        (put(rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}), "0.5"),
        (put(rope_theta=1e6), "rope_theta is 1000000.0 and 500.0"),
        (put(attention_bias=True), "attention_bias=True"),
        (put(mlp_bias=True), "mlp_bias=True"),
        (put(hidden_act="gelu"), "hidden_act='gelu'"),
        (put(use_sliding_window=True, sliding_window=16), "use_sliding_window=True"),
        (put(layer_types=["full_attention", "sliding_attention"]), "sliding_attention"),
        (put(quantization_config={"quant_method": "gptq"}), "quant_method"),
        (put(auto_map={"AutoModel": "theirs.Model"}), "auto_map"),
        (drop("hidden_size"), "hidden_size is missing"),
        (drop("rms_norm_eps", "max_position_embeddings"), "max_position_embeddings is missing"),
        (put(num_attention_heads="4"), "num_attention_heads='4'"),
        (put(num_hidden_layers=0), "num_hidden_layers=0"),
        (put(head_dim=15), "head_dim=15"),
        (put(num_key_value_heads=3), "num_key_value_heads=3"),
        (put(tie_word_embeddings=False), "tie_word_embeddings=false, but"),
        (put(vocab_size=384), "vocab_size=384, but model.embed_tokens.weight has 320 rows"),
        (put(num_hidden_layers=3), "missing in the checkpoint: model.layers.2."),
        (put(num_hidden_layers=1), "unexpected in it: model.layers.1."),
        (put(intermediate_size=64), r"is \[48, 32\] in the checkpoint and \[64, 32\] in the model"),
        (put(model_type="llama", architectures=["LlamaForCausalLM"]), "unexpected in it: .*self_attn.k_norm"),
    ],
)  # fmt: skip
def test_what_is_not_computed_is_refused_by_name(tmp_path: Path, qwen3: Path, edit: Edit, says: str) -> None:
    folder = copy(qwen3, tmp_path / "copy", edit)
    with pytest.raises(UserError, match=says) as caught:
        load_base(str(folder), "runs")
    assert str(folder) in str(caught.value)


def reweigh(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(folder / WEIGHTS)
    edit(weights)
    save_file(weights, folder / WEIGHTS, {"format": "pt"})


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda w: w.update({OUTPUT: w[INPUT] * 2}), "tie_word_embeddings=true, but"),
        (lambda w: w.update({NORM: w[NORM].to(torch.int8)}), "torch.int8, so the weights are quantized"),
        (lambda w: w.update({NORM: w[NORM].to(torch.float8_e4m3fn)}), "float8_e4m3fn, so the weights are quantized"),
        (lambda w: w.update({"model.layers.0.self_attn.q_proj.bias": w[NORM].clone()}), "unexpected in it"),
        (lambda w: w.pop(INPUT), "has no model.embed_tokens.weight"),
        (lambda w: w.pop(NORM), f"1 missing in the checkpoint: {NORM}"),
        (lambda w: w.update({INPUT: w[INPUT][:299].clone()}), "has 299 rows"),
    ],
)
def test_weights_that_contradict_are_refused(tmp_path: Path, qwen3: Path, edit: Callable, says: str) -> None:
    folder = copy(qwen3, tmp_path / "copy")
    reweigh(folder, edit)
    assert says in refusal(folder) and str(folder) in refusal(folder)


def test_fewer_rows_than_tokens(tmp_path: Path, qwen3: Path, words: Tokenizer) -> None:
    folder = copy(qwen3, tmp_path / "copy", put(vocab_size=299))
    reweigh(folder, lambda w: w.update({INPUT: w[INPUT][:299].clone()}))
    assert "299 rows" in refusal(folder) and "300 tokens" in refusal(folder)
    folder = copy(qwen3, tmp_path / "equal", put(vocab_size=300))
    reweigh(folder, lambda w: w.update({INPUT: w[INPUT][:300].clone()}))
    assert load_base(str(folder), "runs").num_rows == words.vocab_size == 300


def test_old_llama_files_with_stored_angles(tmp_path: Path, qwen3: Path) -> None:
    folder = copy(qwen3, tmp_path / "copy")
    reweigh(folder, lambda w: w.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    assert load_base(str(folder), "runs").weights.keys() == load_base(str(qwen3), "runs").weights.keys()


@pytest.mark.parametrize(
    ("name", "says"),
    [("pytorch_model.bin", "pickle"), ("model.gguf", "model.gguf"), ("adapter_model.safetensors", WEIGHTS)],
)
def test_other_kinds_of_weights_are_not_opened(tmp_path: Path, qwen3: Path, name: str, says: str) -> None:
    folder = copy(qwen3, tmp_path / "copy")
    (folder / WEIGHTS).rename(folder / name)
    assert says in refusal(folder) and name in refusal(folder)


@pytest.mark.parametrize("harm", ["shard", "cut", "index", "outside", "twice"])
def test_shards_that_are_not_whole(tmp_path: Path, words: Tokenizer, harm: str) -> None:
    foreign(tmp_path, words, max_shard_size="20KB")
    index, shards = tmp_path / f"{WEIGHTS}.index.json", sorted(tmp_path.glob("model-*.safetensors"))
    named = index.name if harm in ("index", "outside") else shards[1].name
    if harm == "shard":
        shards[1].unlink()
    elif harm == "cut":
        shards[1].write_bytes(shards[1].read_bytes()[:-10])
    elif harm == "twice":
        save_file(load_file(shards[1]) | load_file(shards[0]), shards[1])
    else:
        content = {"weight_map": {INPUT: "../model.safetensors"} if harm == "outside" else {}}
        index.write_text(json.dumps(content))
    assert named in refusal(tmp_path)


def test_characters_without_a_token_are_told(tmp_path: Path, qwen3: Path) -> None:
    folder = copy(qwen3, tmp_path / "copy")
    content = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["zz"] = vocabulary.pop("Ą")  # the byte 0x04
    (folder / "tokenizer.json").write_text(json.dumps(content))
    lines: list[str] = []
    load_base(str(folder), "runs", lines.append)
    assert len(lines) == 1 and "x04" in lines[0] and "U+FFFD" in lines[0]


# Ours


def saved(runs: Path, name: str, words: Tokenizer, step: int, shape: config.Model = SHAPE) -> Path:
    """A checkpoint of a run."""
    weights = Decoder(shape, words.vocab_size, seed=step).state_dict()
    return checkpoint.save(
        runs / name / "checkpoints", step, model_config=shape, tokenizer=words, weights=weights,
        moments={f"exp_avg/{INPUT}": weights[INPUT] / 3}, state={"step": step}, identity={"run": name}, metric=None,
    )  # fmt: skip


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One of ours: each row has a token."""
    return words_of(tmp_path_factory.mktemp("words") / "ours", 300)


@pytest.mark.parametrize("softcap", [None, 15.0])
def test_a_run_by_name_by_folder_and_a_checkpoint(tmp_path: Path, padded: Tokenizer, softcap: float | None) -> None:
    shape = dataclasses.replace(SHAPE, softcap=softcap, scale_input=softcap is not None)
    old, new = saved(tmp_path, "laptop", padded, 5, shape), saved(tmp_path, "laptop", padded, 12, shape)
    for where in ("laptop", str(tmp_path / "laptop"), str(new)):
        base = load_base(where, str(tmp_path))
        assert (base.folder, base.model, base.tokenizer.digest) == (new, shape, padded.digest)
        assert base.manifest is not None and base.manifest.step == 12
        loaded = checkpoint.load(new)
        assert checkpoint.digest_tensors(base.weights) == checkpoint.digest_tensors(loaded.weights)
        assert checkpoint.digest_tensors(base.moments) == checkpoint.digest_tensors(loaded.moments)
        ids = torch.randint(0, NUM_ROWS, (1, 20))
        with torch.no_grad():
            assert torch.equal(build(base).logits(ids), Decoder(shape, NUM_ROWS, seed=12).logits(ids))
    assert load_base(str(old), str(tmp_path)).manifest.step == 5


def test_a_damaged_checkpoint(tmp_path: Path, padded: Tokenizer) -> None:
    old, new = saved(tmp_path, "laptop", padded, 5), saved(tmp_path, "laptop", padded, 12)
    data = (new / WEIGHTS).read_bytes()
    (new / WEIGHTS).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    lines: list[str] = []
    assert load_base("laptop", str(tmp_path), lines.append).folder == old
    assert len(lines) == 1 and new.name in lines[0]
    assert "SHA-256" in refusal(new)
    (old / "manifest.json").unlink()
    assert "not whole" in refusal(old)
    assert "no good checkpoint" in refusal("laptop", tmp_path)


def test_what_is_not_there(tmp_path: Path, padded: Tokenizer) -> None:
    saved(tmp_path, "laptop", padded, 5)
    message = refusal("labtop", tmp_path)
    assert "labtop" in message and "laptop" in message
    (tmp_path / "empty").mkdir()
    assert "holds neither config.json nor checkpoints/" in refusal(tmp_path / "empty")
