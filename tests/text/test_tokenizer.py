"""stack.text.tokenizer: text survives, is never control, and Hugging Face reads the same ids."""

import dataclasses
import hashlib
import json
import os
import random
import subprocess
import sys
import time
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stack.config import schema as config
from stack.core.errors import UserError
from stack.data import sampling
from stack.data.sampling import train_tokenizer
from stack.data.sources import held_out, snapshot
from stack.text import portions, tokenizer
from stack.text.bpe import PATTERN, fit
from stack.text.tokenizer import END_OF_TEXT, PAD, Tokenizer, byte_characters, load

WORDS = (
    "the",
    "sea",
    "was",
    "calm",
    "and",
    "the",
    "old",
    "man",
    "went",
    "down",
    "to",
    "his",
    "little",
    "boat",
    "again",
)
HUB = config.HubFlags(path=None, name=None, split="train", revision=None, streaming=True)


def settings_of(vocab_size: int, **changes) -> config.Tokenizer:
    base = config.Tokenizer(name="t", vocab_size=vocab_size, sample_mb=1.0, seed=0, folder=None)
    return dataclasses.replace(base, **changes)


def data_of(sources: dict[str, config.Source], **changes) -> config.Data:
    base = config.Data(
        name="d",
        sources=sources,
        files=(),
        hub=HUB,
        text="text",
        on_bad_row="error",
        validation=0.1,
        seed=0,
        workers=1,
        shard_mb=1.0,
        packed=None,
    )
    return dataclasses.replace(base, **changes)


def write(path: Path, texts: list[str], **changes) -> config.Source:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return config.Source(files=(str(path),), **changes)


def sentences(seed: int, count: int) -> list[str]:
    """ASCII sentences of few words and many numbers."""
    draw = random.Random(seed)
    return [" ".join([*draw.choices(WORDS, k=20), str(draw.randrange(10**6)), "\n"]) for _ in range(count)]


def noise(count: int) -> list[str]:
    """Words of random letters, with more merges than any test asks for, and many ties."""
    draw = random.Random(0)
    return ["".join(draw.choices("abcdefgh ", k=200)) for _ in range(count)]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Tokenizer:
    """Trained on ASCII only, so that every other byte is in the alphabet by law and not by luck."""
    folder = tmp_path_factory.mktemp("made")
    data = data_of({"one": write(folder / "one.jsonl", sentences(0, 400))})
    return train_tokenizer(settings_of(384), data, folder, lambda line: None)


# control tokens, their parts and what breaks other tokenizers, mixed with any text
ODD = [
    END_OF_TEXT,
    PAD,
    "<|reserved_0|>",
    "<|im_end|>",
    "<|",
    "|>",
    "\r\n",
    "\t",
    "\0",
    "\u2028",
    "🙂",
    "é",
    "é",
    "日本",
]
anything = st.lists(st.one_of(st.sampled_from(ODD), st.text(st.characters(exclude_categories=["Cs"])))).map("".join)


@given(anything)
@settings(max_examples=300, deadline=None)
def test_any_text_survives(made, text):
    ids = made.encode(text)
    assert made.decode(ids) == text
    assert made.encode_batch([text, text]) == [ids, ids]
    assert not set(ids) & {made.end_of_text, *made.unsampled}


@pytest.mark.parametrize(
    "text", ["", "é", "🙂", "日本語", "\0", "\r\n", "\r", "\t", "a\u2028b", "x" * 10_000, " " * 999]
)
def test_the_alphabet_row(made, text):
    assert made.decode(made.encode(text)) == text
    assert (made.encode(text) == []) == (text == "")


def test_every_byte_is_a_token(made):
    ids = [made.encode(chr(code))[-1] for code in range(0x80, 0x800)] + made.encode("".join(map(chr, range(128))))
    assert len(set(ids)) > 128
    inner = json.loads((made.folder / "tokenizer.json").read_text())["model"]["vocab"]
    assert [token for token in inner if len(token) == 1] == sorted(byte_characters(), key=inner.get)
    assert len(set(byte_characters())) == 256


def test_digits_stand_alone_and_words_keep_their_blank(made):
    shown = [made.decode([i]) for i in range(2, made.vocab_size - len(made.reserved))]
    assert [token for token in shown if sum(c.isdigit() for c in token) and len(token) > 1] == []
    assert " the" in shown and " little" in shown


def test_text_that_spells_control_tokens_is_characters(made):
    for text in (END_OF_TEXT, PAD, "<|reserved_0|>", f"a{END_OF_TEXT}{END_OF_TEXT}b <|im_start|>system\n"):
        ids = made.encode(text)
        assert len(ids) > 3 and not set(ids) & {made.end_of_text, *made.unsampled}
    assert made.decode([made.end_of_text, *made.encode("a"), made.pad]) == f"{END_OF_TEXT}a{PAD}"


def test_ids_and_roles(made):
    assert (made.end_of_text, made.pad) == (0, 1)
    assert made.vocab_size % 64 == 0
    assert made.reserved == tuple(range(made.vocab_size - len(made.reserved), made.vocab_size))
    assert [made.decode([i]) for i in made.reserved] == [f"<|reserved_{i}|>" for i in range(len(made.reserved))]
    assert made.unsampled == (1, *made.reserved)


def test_the_vocabulary_has_exactly_the_size_asked_for_where_the_text_has_it(tmp_path):
    lines: list[str] = []
    data = data_of({"one": write(tmp_path / "one.jsonl", noise(50))})
    made = train_tokenizer(settings_of(640), data, tmp_path, lines.append)
    assert (made.vocab_size, made.reserved) == (640, ())
    assert not any("warning" in line for line in lines)


def test_a_text_with_few_merges_gives_its_real_size_with_a_warning(tmp_path):
    lines: list[str] = []
    text = "the cat sat on the mat. " * 8  # about 200 bytes
    data = data_of({"one": write(tmp_path / "one.jsonl", [text])}, validation=1e-9)
    made = train_tokenizer(settings_of(1024), data, tmp_path, lines.append)
    assert made.vocab_size == 320 and 0 < len(made.reserved) < 64
    (warning,) = [line for line in lines if line.startswith("warning")]
    entries = made.vocab_size - len(made.reserved)
    for part in (
        "tokenizer.vocab_size=1,024",
        f"{entries} entries",
        f"{len(made.reserved)} reserved",
        "320 everywhere",
    ):
        assert part in warning
    assert len(json.loads((made.folder / "manifest.json").read_text())["vocabulary_digest"]) == 64
    assert load(made.folder) == made


def test_no_text_is_an_error(tmp_path):
    data = data_of({"one": write(tmp_path / "one.jsonl", ["", ""])})
    with pytest.raises(UserError, match="no text"):
        train_tokenizer(settings_of(320), data, tmp_path, print)


QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 32,
}


@pytest.fixture(scope="module", params=["alone", "qwen3"])
def theirs(made, request, tmp_path_factory):
    """What AutoTokenizer makes of a bare folder, and of a model's folder."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp(request.param)
    made.save_into(folder, max_length=2048)
    if request.param == "qwen3":
        (folder / "config.json").write_text(json.dumps(QWEN3 | {"vocab_size": made.vocab_size}))
    return AutoTokenizer.from_pretrained(folder)


@given(anything)
@settings(max_examples=100, deadline=None)
def test_hugging_face_gives_the_same_ids(made, theirs, text):
    ids = made.encode(text)
    assert theirs(text, split_special_tokens=True)["input_ids"] == [made.end_of_text, *ids]
    assert theirs.decode(ids) == text
    if not any(token in text for token in theirs.all_special_tokens) and "<|reserved_" not in text:
        assert theirs(text)["input_ids"] == [made.end_of_text, *ids]
        assert theirs(text, add_special_tokens=False)["input_ids"] == ids


def test_hugging_face_knows_the_roles(made, theirs):
    assert len(theirs) == made.vocab_size
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (
        made.end_of_text,
        made.end_of_text,
        made.pad,
    )
    assert theirs.model_max_length == 2048
    assert theirs.init_kwargs["model_input_names"] == theirs.model_input_names == ["input_ids", "attention_mask"]
    assert not theirs.clean_up_tokenization_spaces
    batch = theirs(["the sea", "the"], padding=True)
    width = len(batch["input_ids"][0])
    assert batch["attention_mask"][1] == [0] * (width - 2) + [1] * 2  # where a model's answer goes on


def test_hugging_face_saves_what_we_load(made, theirs, tmp_path):
    theirs.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert (again.digest, again.vocab_size, again.reserved) == (made.digest, made.vocab_size, made.reserved)
    assert again.encode("the sea <|pad|>") == made.encode("the sea <|pad|>")


def test_equal_inputs_reuse_the_folder_and_a_change_makes_another(tmp_path):
    data = data_of({"one": write(tmp_path / "one.jsonl", sentences(0, 50))})
    first = train_tokenizer(settings_of(320), data, tmp_path, lambda line: None)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    lines: list[str] = []
    assert train_tokenizer(settings_of(320), data, tmp_path, lines.append) == first
    assert "already trained" in lines[0]
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    others = [
        train_tokenizer(settings_of(384), data, tmp_path, lines.append),
        train_tokenizer(settings_of(320, seed=1), data, tmp_path, lines.append),
        train_tokenizer(settings_of(320), dataclasses.replace(data, validation=0.2), tmp_path, lines.append),
        train_tokenizer(settings_of(320, name="u"), data, tmp_path, lines.append),
    ]
    write(tmp_path / "one.jsonl", sentences(1, 50))
    others.append(train_tokenizer(settings_of(320), data, tmp_path, lines.append))
    assert len({first.folder, *(other.folder for other in others)}) == 6
    assert train_tokenizer(settings_of(320, folder=str(first.folder)), data, tmp_path, lines.append) == first


def test_what_a_killed_training_left_is_replaced(tmp_path):
    data = data_of({"one": write(tmp_path / "one.jsonl", sentences(0, 50))})
    folder = train_tokenizer(settings_of(320), data, tmp_path, lambda line: None).folder
    (folder / "manifest.json").unlink()
    (folder / "tokenizer.json").write_text("{")
    assert train_tokenizer(settings_of(320), data, tmp_path, lambda line: None).folder == folder
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


ONE_THREAD = """
import json, sys
from stack.text.bpe import fit
sys.stdout.write(fit(json.load(open(sys.argv[1])), 640).to_str())
"""


def test_training_gives_equal_bytes_on_any_number_of_threads_and_in_any_order(tmp_path):
    texts = noise(300)
    (tmp_path / "texts.json").write_text(json.dumps(texts))
    environment = {**os.environ, "RAYON_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", ONE_THREAD, str(tmp_path / "texts.json")]
    alone = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert fit(texts, 640).to_str() == alone
    assert fit(reversed(texts), 640).to_str() == alone


def test_the_sample_is_capped_spread_by_weight_and_free_of_what_is_held_out(tmp_path):
    texts = {name: [f"{name} {i:06d} " + "x" * 90 for i in range(2000)] for name in ("a", "b", "c")}
    sources = {
        name: write(tmp_path / f"{name}.jsonl", texts[name], weight=weight)
        for name, weight in {"a": 1.0, "b": 3.0, "c": 0.0}.items()
    }
    data = data_of(sources)
    known = {name: snapshot(source) for name, source in sources.items()}
    sample, measured = sampling._sample(settings_of(320, sample_mb=0.08), data, known, print)
    assert 0.079e6 < sum(map(len, sample)) <= 0.08e6
    counts = {name: sum(text.startswith(name) for text in sample) for name in texts}
    assert counts["c"] == 0 and 2.4 < counts["b"] / counts["a"] < 3.7
    held = {text for group in texts.values() for text in group if held_out(_key(text), data.validation, data.seed)}
    assert held.isdisjoint(sample) and held.issuperset(text for group in measured.values() for text in group)
    assert sampling._sample(settings_of(320, sample_mb=0.08), data, known, print)[0] == sample
    assert sampling._sample(settings_of(320, sample_mb=0.08, seed=1), data, known, print)[0] != sample


def _key(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def test_bytes_per_token_are_reported_by_source(tmp_path):
    lines: list[str] = []
    data = data_of({name: write(tmp_path / f"{name}.jsonl", sentences(seed, 60)) for seed, name in enumerate("ab")})
    made = train_tokenizer(settings_of(320), data, tmp_path, lines.append)
    manifest = json.loads((made.folder / "manifest.json").read_text())
    for seed, name in enumerate("ab"):
        held = [t for t in sentences(seed, 60) if held_out(_key(t), data.validation, data.seed)]
        expected = sum(map(len, held)) / sum(len(made.encode(t)) for t in held)
        assert manifest["bytes_per_token"][name] == expected > 1
        assert any(name in line and f"{expected:.2f} bytes per token" in line for line in lines)
    assert manifest["seconds"] >= 0


@pytest.mark.parametrize("harm", ["no file", "cut", "not an object", "bos", "pad", "merge", "gap", "count", "foreign"])
def test_missing_or_contradicting_files_are_user_errors(made, tmp_path, harm):
    for path in made.folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    inner, outer = tmp_path / "tokenizer.json", tmp_path / "tokenizer_config.json"
    content, setting = json.loads(inner.read_text()), json.loads(outer.read_text())
    vocabulary = content["model"]["vocab"]
    if harm == "no file":
        outer.unlink()
    elif harm == "cut":
        inner.write_bytes(inner.read_bytes()[:-100])
    elif harm == "not an object":
        outer.write_text("[]")
    elif harm in ("bos", "pad"):
        outer.write_text(json.dumps(setting | {f"{harm}_token": "<|gone|>"}))
    else:
        if harm == "merge":  # two entries change places: equal size, another vocabulary
            a, b = "Ġt", "he"
            vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
        elif harm in ("gap", "foreign"):
            last = content["model"]["merges"].pop()
            index = vocabulary.pop("".join(last))
            if harm == "foreign":
                vocabulary["▁the"] = index
        else:
            content["added_tokens"].append(content["added_tokens"][-1] | {"id": made.vocab_size, "content": "<|more|>"})
        inner.write_text(json.dumps(content))
    with pytest.raises(UserError, match=str(tmp_path)):
        load(tmp_path)


def test_the_digest_knows_order_bytes_and_roles():
    tokens, control = ["<|e|>", "<|p|>", "a", "Ġ"], {0: "<|e|>", 1: "<|p|>"}
    base = tokenizer._digest(tokens, control, {"end_of_text": 0, "pad": 1})
    others = [
        tokenizer._digest(["<|e|>", "<|p|>", "Ġ", "a"], control, {"end_of_text": 0, "pad": 1}),
        tokenizer._digest(["<|e|>", "<|p|>", "aĠ", "Ġ"], control, {"end_of_text": 0, "pad": 1}),
        tokenizer._digest(tokens, control, {"end_of_text": 1, "pad": 0}),
        tokenizer._digest(tokens, {0: "<|e|>"}, {"end_of_text": 0, "pad": 1}),
    ]
    assert len({base, *others}) == 5
    independent = b'1 5 <|e|>1 5 <|p|>0 1 a0 1  {"end_of_text": 0, "pad": 1}'
    assert base == hashlib.sha256(independent).hexdigest()


# Other people's


GPT2 = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
PLAIN = GPT2 | {"use_regex": False}
SMOLLM = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, GPT2]}


def foreign(folder: Path, made: Tokenizer, inner: dict | None = None, outer: dict | None = None) -> Path:
    """A folder of another hand: fewer tokens than a multiple of 64, and what is given in its two files."""
    content = json.loads((made.folder / "tokenizer.json").read_text())
    kept = made.vocab_size - len(made.reserved)
    content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < kept]
    content |= {"post_processor": None, "pre_tokenizer": GPT2} | (inner or {})
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": None, "eos_token": END_OF_TEXT} | (outer or {})
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    return folder


def added(content: str, index: int, **changes) -> dict:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": index, "content": content, **plain, **changes}


def model_of(made: Tokenizer, **changes) -> dict:
    return {"model": json.loads((made.folder / "tokenizer.json").read_text())["model"] | changes}


@pytest.fixture(scope="module", params=["gpt2", "smollm", "qwen", "llama3"])
def other(made, request, tmp_path_factory) -> tuple[Tokenizer, object]:
    """Ours and Hugging Face's reading of byte-level folders of four families."""
    from transformers import AutoTokenizer

    size = made.vocab_size - len(made.reserved)
    tokens = [added(END_OF_TEXT, 0), added(PAD, 1), added("<tool_call>", size, special=False)]
    llama3 = {"type": "Sequence", "pretokenizers": [{"type": "Split", "pattern": {"Regex": PATTERN},
              "behavior": "Isolated", "invert": False}, PLAIN]}  # fmt: skip
    inner = {
        "gpt2": {},
        "smollm": {"pre_tokenizer": SMOLLM},
        "qwen": {"normalizer": {"type": "NFC"}, "pre_tokenizer": llama3, "added_tokens": tokens},
        "llama3": {"pre_tokenizer": llama3, "truncation": {"max_length": 3, "strategy": "LongestFirst", "stride": 0,
                   "direction": "Right"}, **model_of(made, ignore_merges=True)},
    }[request.param]  # fmt: skip
    folder = foreign(tmp_path_factory.mktemp(request.param), made, inner)
    return load(folder), AutoTokenizer.from_pretrained(folder)


@given(anything)
@settings(max_examples=60, deadline=None)
def test_other_peoples_ids_are_those_of_hugging_face(other, text):
    found, theirs = other
    ids = found.encode(text)
    assert not set(ids) & set(found.control.values())
    normal = "qwen" in str(found.folder)
    assert found.decode(ids) == (unicodedata.normalize("NFC", text) if normal else text)
    if not any(token in text for token in found.control):
        assert theirs(text, add_special_tokens=False)["input_ids"] == ids == found.encode_batch([text])[0]


ONE_KIND = ("acgt" * 250, "7" * 1000, "\t" * 1000, " " * 1000, "\n" * 1000, "=" * 1000, "文" * 1000, "_" * 1000)


def test_ids_are_those_of_hugging_face_up_to_the_longest_stretch(made, theirs, other, monkeypatch):
    """The longest stretches that stay whole, and more text than is encoded at a time, cut between its words."""
    monkeypatch.setattr(portions, "PORTION", 2_000)
    monkeypatch.setattr(tokenizer, "AT_A_TIME", 5_000)
    text = "x".join(f"{stretch} 'tis the sea, and 3 old men's {stretch}" for stretch in ONE_KIND)
    assert len(portions.portions(text)) > 5
    for ours, reference in ((made, theirs), other):
        expected = reference(text, add_special_tokens=False)["input_ids"]
        assert ours.encode_batch(["the", text, "", text]) == [ours.encode("the"), expected, [], expected]


@pytest.mark.parametrize("stretch", [*ONE_KIND, "\u1100\u1161", "e\u0301", "\u0301"])
@pytest.mark.parametrize("before", ["", "a", " "])
def test_any_stretch_survives(made, other, stretch, before):
    """Far above the length that is cut, composed or not."""
    text = before + stretch * (3_777 // len(stretch)) + before
    assert made.decode(made.encode(text)) == text
    found, _ = other
    normal = "qwen" in str(found.folder)
    assert found.decode(found.encode(text)) == (unicodedata.normalize("NFC", text) if normal else text)


def test_millions_of_blanks_are_encoded(made):
    """More than the regex engine takes back while it searches."""
    text = "\t" * 11_000_000
    with pytest.raises(BaseException, match="retry-limit"):
        made._inner.encode(text)
    assert made.encode(text) == made.encode(text[:1_000]) * 11_000


def test_a_million_letters_without_a_blank_are_learnt_from():
    """Where each merge looked at all of a stretch, this took minutes."""
    text = "".join(random.Random(0).choices("ACGT", k=1_000_000))
    began = time.process_time()
    assert fit([text], 1024).get_vocab_size() == 1024
    assert time.process_time() - began < 20


def test_a_text_that_the_library_gives_up_on_is_named(made, tmp_path):
    backtracking = {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False}
    found = load(
        foreign(tmp_path, made, {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [backtracking, PLAIN]}})
    )
    with pytest.raises(UserError, match="of 40 characters that begins with 'xxx") as caught:
        found.encode_batch(["the sea", "x" * 40])
    assert str(tmp_path) in str(caught.value)


def test_a_token_that_is_added_but_not_special_is_control(made, tmp_path):
    size = made.vocab_size - len(made.reserved)
    tokens = [added(END_OF_TEXT, 0), added(PAD, 1), added("<tool_call>", size, special=False)]
    found = load(foreign(tmp_path, made, {"added_tokens": tokens}))
    assert found.control["<tool_call>"] == size and found.vocab_size == size + 1
    assert size not in found.encode("a <tool_call> b") and found.decode([size]) == "<tool_call>"


@pytest.mark.parametrize(
    ("outer", "end", "pad"),
    [
        ({}, END_OF_TEXT, END_OF_TEXT),
        ({"bos_token": "<s>", "eos_token": "</s>"}, END_OF_TEXT, END_OF_TEXT),
        ({"bos_token": {"content": "<s>", "lstrip": False}, "pad_token": {"content": PAD}}, END_OF_TEXT, PAD),
        ({"pad_token": "</s>"}, END_OF_TEXT, "</s>"),
        ({"gone": True, "bos_token": "<s>", "eos_token": "</s>"}, "<s>", "<s>"),
        ({"gone": True, "eos_token": "</s>", "pad_token": PAD}, "</s>", PAD),
    ],
)
def test_roles_of_other_people(made, tmp_path, outer, end, pad):
    size = made.vocab_size - len(made.reserved)
    gone = outer.pop("gone", False)
    tokens = [
        added("<|start|>" if gone else END_OF_TEXT, 0),
        added(PAD, 1),
        added("<s>", size),
        added("</s>", size + 1),
    ]
    vocabulary = dict(model_of(made)["model"]["vocab"])
    vocabulary["<|start|>" if gone else END_OF_TEXT] = vocabulary.pop(END_OF_TEXT)
    found = load(foreign(tmp_path, made, {"added_tokens": tokens} | model_of(made, vocab=vocabulary), outer))
    assert found.decode([found.end_of_text]) == end and found.decode([found.pad]) == pad
    assert found.unsampled == (() if pad == end else (found.pad,))  # padding that is a stop must be sampled
    assert set(found.stops).isdisjoint(found.unsampled)


def test_the_end_of_turn_as_padding_is_sampled(made, tmp_path):
    size = made.vocab_size - len(made.reserved)
    tokens = [added(END_OF_TEXT, 0), added(PAD, 1), added("<|im_start|>", size), added("<|im_end|>", size + 1)]
    found = load(foreign(tmp_path, made, {"added_tokens": tokens}, {"pad_token": "<|im_end|>"}))
    assert found.stops == (size + 1, 0) and found.unsampled == ()


def test_a_character_without_a_token_is_replaced_and_not_dropped(made, tmp_path):
    """As SmolLM2's vocabulary, which has no 0x04 and no 0xF1."""
    model = model_of(made)["model"]
    vocabulary = dict(model["vocab"])
    for number, character in enumerate((byte_characters()[0x04], byte_characters()[0xF1])):
        vocabulary["zq" * (number + 1)] = vocabulary.pop(character)
    found = load(foreign(tmp_path, made, model_of(made, vocab=vocabulary, unk_token=END_OF_TEXT)))
    text = "a\x04b\U00040000c\U0007ffff"
    assert found.decode(found.encode(text)) == "a\ufffdb\ufffdc\ufffd"
    assert found.encode_batch([text, "sea"]) == [found.encode(text), made.encode("sea")]
    with pytest.raises(UserError, match="no token for"):
        train_tokenizer(settings_of(320, folder=str(tmp_path)), data_of({}), tmp_path, print)


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        ({"normalizer": {"type": "Lowercase"}}, "Lowercase"),
        ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}]}}, "normalizer"),
        ({"pre_tokenizer": GPT2 | {"add_prefix_space": True}}, "does not come back"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "does not come back"),
        ({"decoder": None}, "does not come back"),
        ({"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}, "byte-level BPE"),
        ({"byte_fallback": True}, "byte-level BPE"),
        ({"dropout": 0.1}, "dropout"),
        ({"model": {"type": "BPE", "vocab": 3}}, "cannot be understood"),
        ({"a": "é"}, "0x61"),  # no token for the letter a
        ({"forge": True}, "could forge"),
    ],
)
def test_a_tokenizer_that_loses_or_forges_is_refused(made, tmp_path, harm, says):
    harm = dict(harm)
    if "a" in harm:
        vocabulary = dict(model_of(made)["model"]["vocab"])
        vocabulary["zq"] = vocabulary.pop("a")
        harm = model_of(made, vocab=vocabulary, merges=[])
    elif "forge" in harm:  # a word that is looked up whole, before merges
        harm = {"pre_tokenizer": PLAIN} | model_of(made, ignore_merges=True)
    elif harm.keys() & {"byte_fallback", "dropout"}:
        harm = model_of(made, **harm)
    with pytest.raises(UserError, match=says) as caught:
        load(foreign(tmp_path, made, harm))
    assert str(tmp_path) in str(caught.value)


def test_a_tokenizer_of_another_table_is_not_trained_on(made, tmp_path):
    found = load(foreign(tmp_path, made))
    assert found.vocab_size % 64
    with pytest.raises(UserError, match=f"{found.vocab_size} tokens, which is no multiple of 64"):
        train_tokenizer(settings_of(320, folder=str(tmp_path)), data_of({}), tmp_path, print)
