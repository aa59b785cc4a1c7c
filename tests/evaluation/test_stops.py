"""What ends an answer of other people's models: whatever their folder names as an end, here as in transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from talk import CONTROL
from talker import one_shot
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from stack import checkpoint
from stack.checkpoint.open import build, load_base
from stack.core.files import read_json
from stack.evaluation import answers
from stack.evaluation.answers import Question
from stack.evaluation.generate import generate
from stack.text import template, tokenizer
from stack.vocabulary.migrate import migrate
from stack.vocabulary.tokens import grow_tokenizer

LLAMA = ("<s>", "</s>", "<|eot|>")
CHATML = ("<|endoftext|>", "</s>", "<|im_start|>", "<|im_end|>")


def save(folder: Path, emits: str, *, control: tuple[str, ...] = LLAMA, **settings: Any) -> Path:
    """What transformers saves of a Llama model that answers everything with one token for ever.

    ``settings`` go into ``config.json``, from where transformers takes those of ``generation_config.json``.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=list(control), initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(["the cat sat on the mat "] * 9, trainer=trainer)
    words = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token=control[0])
    words.save_pretrained(folder)
    settings = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": None} | settings
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "max_position_embeddings": 256}
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=len(words), num_attention_heads=2, tie_word_embeddings=True, **shape, **settings)
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.fill_("norm" in name)  # nothing but the table speaks
        table = model.model.embed_tokens.weight
        table[:, 0] = 1
        table[words.convert_tokens_to_ids(emits), 0] = 5
    model.save_pretrained(folder)
    return folder


def edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | values))


def named(folder: Path, where: str, value: Any) -> Path:
    """The folder with an end in one of its files."""
    edit(folder / where, **{tokenizer.ENDS[where]: value})
    return folder


def chats(folder: Path) -> tuple[int, str, str]:
    return one_shot(f"checkpoint={folder}", "prompt=the cat")


# ---------------------------------------------------------------- a base as it is


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("tokenizer_config.json", "</s>"),
        ("tokenizer_config.json", {"__type": "AddedToken", "content": "</s>"}),
        ("special_tokens_map.json", "</s>"),
        ("config.json", 1),
        ("config.json", [2, 1]),
        ("generation_config.json", 1),
        ("generation_config.json", [2, 1]),
    ],
)
def test_an_answer_ends_where_any_file_of_the_folder_says(tmp_path: Path, where: str, value: Any) -> None:
    folder = save(tmp_path, "</s>")
    assert chats(folder)[1] == "</s>" * 24 + "\n"  # so long as no file names it
    digest = load_base(str(folder), "runs").tokenizer.digest
    code, out, err = chats(named(folder, where, value))
    assert (code, out) == (0, "\n") and err.count("\n") == 1
    words = load_base(str(folder), "runs").tokenizer
    assert words.stops == ((0, 2, 1) if isinstance(value, list) else (0, 1)) and words.digest == digest
    if where in ("config.json", "generation_config.json"):
        (folder / "generation_config.json").unlink(missing_ok=where == "config.json")
        named(folder, "generation_config.json", value)
        theirs = AutoModelForCausalLM.from_pretrained(folder).generate(torch.tensor([[0, 20]]), max_new_tokens=9)
        assert theirs.tolist() == [[0, 20, 1]]


def test_files_that_name_different_ends_are_all_heard(tmp_path: Path) -> None:
    folder = named(save(tmp_path, "<|eot|>", eos_token_id=0), "tokenizer_config.json", "</s>")
    named(folder, "generation_config.json", [2])
    assert load_base(str(folder), "runs").tokenizer.stops == (0, 1, 2) and chats(folder)[1] == "\n"


def test_padding_that_is_the_end_is_not_banned(tmp_path: Path) -> None:
    folder = named(save(tmp_path, "</s>", eos_token_id=1, pad_token_id=1), "tokenizer_config.json", "</s>")
    edit(folder / "tokenizer_config.json", pad_token="</s>")
    base = load_base(str(folder), "runs")
    words = base.tokenizer
    assert (words.pad, words.stops, words.unsampled) == (1, (0, 1), ())
    assert generate(build(base), [[0, 20]], tokens=9, stops=words.stops, banned=words.unsampled) == [[1]]


@pytest.mark.parametrize("emits", ["<|im_end|>", "<|endoftext|>", "</s>"])
def test_a_base_with_chat_tokens_and_an_end_of_its_own(tmp_path: Path, emits: str) -> None:
    folder = save(tmp_path, emits, control=CHATML, eos_token_id=[1])
    words = load_base(str(folder), "runs").tokenizer
    assert words.stops == (3, 0, 1) and words.end_of_turn == 3
    assert chats(folder) == (0, "\n", "")


@pytest.mark.parametrize(
    ("where", "value", "says"),
    [
        ("config.json", 90, "eos_token_id=90"),  # a plain token: a Llama configuration names the id 2 by default
        ("config.json", [1, 5000], "eos_token_id=5000"),
        ("config.json", -1, "eos_token_id=-1"),
        ("generation_config.json", True, "eos_token_id=True"),
        ("generation_config.json", 1.0, "eos_token_id=1.0"),
        ("generation_config.json", [[1]], r"eos_token_id=[1]"),
        ("special_tokens_map.json", "<|nowhere|>", "eos_token='<|nowhere|>'"),
        ("tokenizer_config.json", "a", "eos_token='a'"),
    ],
)
def test_what_is_no_control_token_ends_nothing_and_is_told(tmp_path: Path, where: str, value: Any, says: str) -> None:
    folder = named(save(tmp_path, "t"), where, value)
    lines: list[str] = []
    words = load_base(str(folder), "runs", lines.append).tokenizer
    assert len(lines) == 1 and f"{folder / where}: {says} is no control token" in lines[0]
    assert words.stops == ((0, 1) if isinstance(value, list) and 5000 in value else (0,))
    assert chats(folder)[1] == "t" * 24 + "\n"


def test_stop_strings_are_told(tmp_path: Path) -> None:
    edit(save(tmp_path, "t") / "generation_config.json", stop_strings=["\n\n"])
    assert "only a token does" in chats(tmp_path)[2]


@pytest.mark.parametrize("where", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_chat_template_that_is_not_used_is_told(tmp_path: Path, where: str) -> None:
    folder = save(tmp_path, "t")
    assert chats(folder)[2].endswith("continued, not answered\n")
    if where == "tokenizer_config.json":
        edit(folder / where, chat_template="{{ messages }}")
    else:
        (folder / where).write_text("{{ messages }}")
    err = chats(folder)[2]
    assert err.count("\n") == 1 and err.endswith("continued, not answered; its own chat template is not used\n")


# ---------------------------------------------------------------- after growth and fine-tuning


def grown(folder: Path, root: Path) -> Path:
    """The checkpoint of step 0 of a fine-tuning of the folder."""
    base = load_base(str(folder), "runs")
    words, growth = grow_tokenizer(base.tokenizer, base.num_rows, CONTROL, template.TEMPLATE, root)
    weights, moments = migrate(growth, base.weights, {})
    return checkpoint.save(
        root / "run/checkpoints", 0, model_config=base.model, tokenizer=words, weights=weights, moments=moments,
        state={}, identity={}, metric=None,
    )  # fmt: skip


@pytest.mark.parametrize("padded_by_its_end", [False, True])
def test_the_ends_of_a_base_stay_when_it_has_grown(tmp_path: Path, padded_by_its_end: bool) -> None:
    folder = save(tmp_path / "base", "<|eot|>", eos_token_id=[1, 2])
    if padded_by_its_end:
        edit(folder / "tokenizer_config.json", eos_token="<|eot|>", pad_token="<|eot|>")
    made = grown(folder, tmp_path)
    base = load_base(str(made), "runs")
    words = base.tokenizer
    end = words.control["<|im_end|>"]
    assert set(words.stops) == {end, 0, 1, 2} and words.stops[:2] == (end, 0)
    for name in ("config.json", "generation_config.json"):
        assert read_json(made / name)["eos_token_id"] == list(words.stops)
    generation = GenerationConfig.from_pretrained(made)
    assert not set(generation.suppress_tokens or ()) & set(words.stops)
    theirs = AutoTokenizer.from_pretrained(made)
    assert (theirs.eos_token, theirs.padding_side) == ("<|im_end|>", "left")
    ids = torch.tensor([[0, 20]])
    theirs = AutoModelForCausalLM.from_pretrained(made).generate(ids, attention_mask=ids * 0 + 1, max_new_tokens=9)
    assert theirs.tolist() == [[0, 20, 2]]
    assert chats(made) == (0, "\n", "")
    (answer,) = answers.answer(build(base), words, [Question("a", 0, (0, 20), "", "")], 9)
    assert (answer.text, answer.stopped) == ("", False)  # it ended, and not as a turn does
    # What was known in memory while it was fine-tuned is what its folder says, and a second growth keeps it.
    assert load_base(str(grown(made, tmp_path / "again")), "runs").tokenizer.stops == words.stops


def test_growth_does_not_take_a_reserved_token_that_is_an_end(tmp_path: Path) -> None:
    control = ("<s>", "<|reserved_0|>", "<|reserved_1|>")
    free, ending = (save(tmp_path / n, "t", control=control, eos_token_id=end) for n, end in (("a", None), ("b", 1)))
    words = load_base(str(ending), "runs").tokenizer
    assert (words.stops, words.reserved, words.unsampled) == ((0, 1), (2,), (2,))
    for folder, first, others in ((free, 1, (0,)), (ending, 2, (0, 1))):  # of one vocabulary, grown in one place
        made = load_base(str(grown(folder, tmp_path)), "runs").tokenizer
        assert made.control["<|im_start|>"] == first and made.stops == (made.end_of_turn, *others)


def test_samples_and_checkpoints_of_a_fine_tuning_keep_the_ends(tmp_path: Path) -> None:
    folder = named(save(tmp_path / "base", "</s>"), "tokenizer_config.json", "</s>")
    still = ("train.steps=1", "optim.lr=1e-9", "optim.matrix_lr=1e-9", "sft.answers=0", "checkpoint.every=0")
    job = tiny.sft(tmp_path, f"base={folder}", *still)
    assert job.wait() == 0, job.output()
    assert "sample: 'say the cat\\n'" in job.output() and "</s>" not in job.output()
    for step in (0, 1):
        made = tmp_path / f"runs/talk/checkpoints/step-{step:08d}"
        stops = read_json(made / "generation_config.json")["eos_token_id"]
        words = load_base(str(made), "runs").tokenizer
        assert tuple(stops) == words.stops == (words.end_of_turn, 0, 1)
