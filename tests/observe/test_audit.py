"""stack.audit: what training never met comes first, of tied models and others, and is shown as it is."""

from __future__ import annotations

import io
import json
import random
import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from stack import checkpoint
from stack.audit import main
from stack.checkpoint.open import load_tables
from stack.core.errors import UserError
from stack.core.files import write_json
from stack.data.packed import open_packed
from stack.model.embedding import INPUT, OUTPUT
from stack.model.huggingface import WEIGHTS
from stack.observe import audit
from stack.text import tokenizer
from stack.text.bpe import fit, hugging_face_settings
from stack.text.display import readable
from stack.text.tokenizer import Tokenizer, byte_characters

SYLLABLES = [a + b for a in "bdfgklmnprst" for b in ("a", "e", "i", "o", "u", "an", "er", "is")]
PLANTED = [f"qx{a}w{b}zj" for a in "aeiou" for b in "bdgm"]  # 20 words of the vocabulary and of no text
ROWS = 1024


def texts(seed: int, count: int) -> list[str]:
    """Words of a language, most of them common; new ones of the same syllables; and characters of many scripts."""
    draw = random.Random(seed)
    fixed = random.Random(0)
    lexicon = ["".join(fixed.choices(SYLLABLES, k=fixed.randint(2, 3))) for _ in range(400)]
    weights = [1 / (rank + 10) for rank in range(len(lexicon))]

    def word() -> str:
        kind = draw.random()
        if kind < 0.7:
            return draw.choices(lexicon, weights)[0]
        if kind < 0.85:
            return "".join(draw.choices(SYLLABLES, k=draw.randint(1, 4)))
        return "".join(chr(draw.choice((0x21, 0xA1, 0x400, 0x4E00, 0x1F300)) + draw.randrange(0x50)) for _ in range(3))

    return [" ".join(word() for _ in range(draw.randint(5, 60))) for _ in range(count)]


def first_rows(found: dict[str, Any], counts: np.ndarray, words: Tokenizer) -> float:
    """The share of the first K rows that have no occurrence, K as many as there are; all 20 planted are among them."""
    none = np.flatnonzero(counts == 0)
    first = [row["id"] for row in found["listed"]][: len(none)]
    planted = {words.token_to_id(f"Ġ{word}") for word in PLANTED}
    assert None not in planted and planted <= set(none.tolist()) and len(none) < ROWS / 4
    assert planted <= set(first)
    return float((counts[first] == 0).mean())


# Models that are really trained


@dataclass(frozen=True)
class World:
    """A vocabulary with 20 planted tokens, text without them, and a tied run of it."""

    root: Path
    words: Tokenizer
    packed: Path
    counts: np.ndarray  # of the packed ids, counted here
    run: Path


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    root = tmp_path_factory.mktemp("world")
    (root / "words").mkdir()
    inner = fit([*texts(0, 600), *[f" {word}" * 200 for word in PLANTED]], ROWS - 20)
    inner.save(str(root / "words/tokenizer.json"))
    write_json(root / "words/tokenizer_config.json", hugging_face_settings())
    words = tokenizer.load(root / "words")
    (root / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts(0, 600)))
    shape = ("model.layers=1", "model.d=64", "model.heads=2", "model.head_dim=32", "model.ffn=96", "train.window=64")
    length = (
        "train.steps=160",
        "train.global_batch=8",
        "train.micro_batch=8",
        "data.validation=0.01",
        "optim=adamw",
        "optim.lr=1e-2",
    )
    c = tiny.configure(*tiny.settings(root, *shape, *length, f"tokenizer.folder={root}/words", "track.progress=false"))
    assert tiny.run(c) == 0
    (packed,) = (root / "data/packed").glob("*-*[0-9a-f]")
    ids = np.fromfile(packed / "train-00000.bin", dtype=np.uint16)
    return World(root, words, packed, np.bincount(ids, minlength=ROWS), root / "runs/tiny")


@pytest.fixture(scope="module")
def untied(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose head is a table of its own, trained by transformers on the same text."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=ROWS, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2,
            max_position_embeddings=64, tie_word_embeddings=False,
        )
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("untied")
    world.words.save_into(folder)
    model.save_pretrained(folder / "before")
    world.words.save_into(folder / "before")
    stream = np.fromfile(world.packed / "train-00000.bin", dtype=np.uint16)
    windows = torch.from_numpy(stream[: len(stream) // 64 * 64].astype(np.int64)).view(-1, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    for step in range(200):
        loss = model(windows.roll(-8 * step, 0)[:8], labels=windows.roll(-8 * step, 0)[:8]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    return folder


def test_tied(world: World) -> None:
    found = audit.audit(str(world.run), top=ROWS)
    assert found["tied"] and found["indicator"] == "distance" and len(found["listed"]) == found["rows"] == ROWS
    assert sorted(found["unused"]) == ["bytes of no text", "reserved tokens"]
    others = audit.audit(str(world.run), top=20, known=False)
    assert others["listed"] == [row for row in found["listed"] if not row["known_unused"]][:20]
    assert others | {"listed": None} == found | {"listed": None}
    share = first_rows(found, world.counts, world.words)
    print(f"tied: {(world.counts == 0).sum()} of {ROWS} rows have no occurrence; {share:.1%} of the first ones")
    assert share >= 0.9
    assert [row["occurrences"] for row in found["listed"]] == [world.counts[row["id"]] for row in found["listed"]]
    judged, none = found["occurrences"], int((world.counts == 0).sum())
    assert judged["none"] == {"rows": none, "of_the_first": round(share * none)}
    assert judged["ids"] == world.counts.sum() and judged["folders"] == [str(world.packed)]


def test_untied_by_the_indicator_alone(world: World, untied: Path) -> None:
    found, given_counts = (audit.audit(str(untied), counts, top=ROWS) for counts in (None, str(world.packed)))
    assert not found["tied"] and found["indicator"] == "norm" and found["occurrences"] is None
    assert [row["id"] for row in found["listed"]] == [row["id"] for row in given_counts["listed"]]
    assert {"distance", "distance_without_pc"} <= found["listed"][0].keys()
    share = first_rows(found, world.counts, world.words)
    print(f"untied: {share:.1%} of the first ones")
    assert share >= 0.9 and given_counts["occurrences"]["met_less_than_once"] is None
    assert given_counts["occurrences"]["none"]["of_the_first"] == round(share * (world.counts == 0).sum())
    by_head = sorted(found["listed"], key=lambda row: row["distance"])
    assert first_rows({"listed": by_head}, world.counts, world.words) >= 0.9


def test_before_training_nothing_is_found(world: World, untied: Path) -> None:
    found = audit.audit(str(untied / "before"), str(world.packed))["occurrences"]["none"]
    assert found["of_the_first"] < found["rows"] / 2


def test_what_is_shown_of_a_row(world: World, untied: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(untied)
    rows, words = model.get_input_embeddings().weight.detach().double(), world.words
    unit = rows / rows.norm(dim=1, keepdim=True)
    for row in audit.audit(str(untied), top=30)["listed"]:
        assert row["norm"] == pytest.approx(rows[row["id"]].norm().item(), rel=1e-12)
        cosines = unit @ unit[row["id"]]
        cosines[row["id"]] = -1
        assert [near["id"] for near in row["nearest"]] == cosines.topk(3).indices.tolist()
        assert [near["cosine"] for near in row["nearest"]] == pytest.approx(cosines.topk(3).values.tolist())
        token = words.id_to_token(row["id"])
        kind = "reserved" if row["id"] in words.reserved else "control" if token in words.control else None
        assert row["category"] == (kind or ("byte" if len(token) == 1 else "ordinary"))


# Where occurrences come from


def child(world: World, name: str, tokens: int, **identity: Any) -> Path:
    """A checkpoint of another run that began from the newest of ``world.run``."""
    parent = load_tables(str(world.run), "runs").folder
    loaded, packed = checkpoint.load(parent), open_packed(world.packed)
    shape = tiny.configure(*tiny.settings(world.root, "model.layers=1")).model
    weights = {INPUT: loaded.weights[INPUT]}
    return checkpoint.save(
        world.root / f"runs/{name}/checkpoints", 1, model_config=shape, tokenizer=tokenizer.load(parent),
        weights=weights, moments={}, state={"tokens": tokens}, metric=None,
        identity={"packed": packed.digest, "packed_folder": str(packed.folder), **identity},
    )  # fmt: skip


def met(folder: Path, **how: Any) -> np.ndarray | None:
    """Of every row, as the audit tells it."""
    found = audit.audit(str(folder), top=ROWS, **how)
    if found["occurrences"] is None:
        return None
    rows = sorted(found["listed"], key=lambda row: row["id"])
    assert found["occurrences"]["met_less_than_once"]["rows"] == sum(row["met"] < 1 for row in rows)
    return np.array([row["met"] for row in rows])


def test_how_often_training_has_met_a_row(world: World) -> None:
    parent = load_tables(str(world.run), "runs").folder
    learnt = json.loads((parent / "training/state.json").read_text())["tokens"]
    epochs = learnt / (world.counts.sum() - 1)  # one shard: each id but the first is a target
    np.testing.assert_allclose(met(world.run), world.counts * epochs, atol=0.01)
    vocabulary = {"base": str(parent), "base_vocabulary": world.words.digest}
    tuned, branch = child(world, "sft", 500, **vocabulary), child(world, "branch", learnt + 500, branch=str(parent))
    for folder in (tuned, branch):
        found = audit.audit(str(folder), top=1)["occurrences"]
        assert found["ids"] == world.counts.sum() and found["folders"] == [str(world.packed)]
        more = 500 / (world.counts.sum() - 1)
        np.testing.assert_allclose(met(folder), world.counts * (epochs + more), atol=0.01)


def test_a_history_with_a_gap_is_not_known(world: World, tmp_path: Path) -> None:
    foreign = {"base": str(world.root / "words"), "base_vocabulary": world.words.digest}
    other = {"base": str(load_tables(str(world.run), "runs").folder), "base_vocabulary": "other"}
    for number, identity in enumerate((foreign, other, {"packed": "other"}, {"packed_folder": "gone"})):
        lines: list[str] = []
        assert met(child(world, f"gap-{number}", 1, **identity), show=lines.append) is None
        assert len(lines) == 1 and "occurrences are not known" in lines[0]


def test_counts_of_another_vocabulary_are_refused(world: World, untied: Path, tmp_path: Path) -> None:
    tiny.corpus(tmp_path / "corpus.jsonl")
    tiny.trainer(tiny.configure(*tiny.settings(tmp_path)))
    (other,) = (tmp_path / "data/packed").glob("*-*[0-9a-f]")
    with pytest.raises(UserError, match="another vocabulary"):
        audit.audit(str(untied), str(other))


# Other people's folders


def test_shards_half_precision_and_scaled_angles_change_no_order(world: World, untied: Path, tmp_path: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(untied)
    expected = [row["id"] for row in audit.audit(str(untied), top=100)["listed"]]
    model.config.rope_parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    world.words.save_into(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert [row["id"] for row in audit.audit(str(tmp_path), top=100)["listed"]] == expected
    model.half().save_pretrained(tmp_path / "half")
    world.words.save_into(tmp_path / "half")
    assert load_tables(str(tmp_path / "half"), "runs").head.dtype == torch.float32
    assert {row["id"] for row in audit.audit(str(tmp_path / "half"), top=50)["listed"]} <= set(expected)


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (lambda weights, settings: settings.update(tie_word_embeddings=True), "tie_word_embeddings=true, but"),
        (lambda weights, settings: weights.pop(OUTPUT), "holds no lm_head.weight"),
        (lambda weights, settings: weights.update({OUTPUT: weights[OUTPUT][:, :32].clone()}), r"\[1024, 32\]"),
        (lambda weights, settings: weights.update({OUTPUT: weights[OUTPUT].to(torch.int8)}), "quantized"),
        (lambda weights, settings: weights[OUTPUT][7].fill_(torch.nan), "1 rows of the head .* row 7"),
        (lambda weights, settings: settings.update(vocab_size=1000), "vocab_size=1000"),
        (lambda weights, settings: settings.update(model_type="gpt2"), "model_type='gpt2'"),
    ],
)
def test_what_is_not_whole_is_refused_by_name(world: World, untied: Path, tmp_path: Path, harm: Any, says: str) -> None:
    for name in ("config.json", *tokenizer.FILES):
        shutil.copy(untied / name, tmp_path)
    settings, weights = json.loads((tmp_path / "config.json").read_text()), load_file(untied / WEIGHTS)
    harm(weights, settings)
    (tmp_path / "config.json").write_text(json.dumps(settings))
    save_file(weights, tmp_path / WEIGHTS, {"format": "pt"})
    with pytest.raises(UserError, match=says) as caught:
        audit.audit(str(tmp_path))
    assert str(tmp_path) in str(caught.value)


def vocabulary(folder: Path, control: list[str], *, drop_no_text: bool) -> Tokenizer:
    """The 256 bytes, or those that texts hold, and control tokens behind ``<|endoftext|>``."""
    folder.mkdir()
    inner = fit(["ab"], 320)
    content = json.loads(inner.to_str())
    characters = {byte_characters()[byte] for byte in tokenizer.NO_TEXT} if drop_no_text else set()
    plain = [token for token in content["model"]["vocab"] if token not in characters and "<|" not in token]
    texts = ["<|endoftext|>", *control]
    content["model"]["vocab"] = {token: i for i, token in enumerate([*texts, *plain])}
    content["model"]["merges"] = []
    entry = content["added_tokens"][0]
    content["added_tokens"] = [entry | {"id": i, "content": text} for i, text in enumerate(texts)]
    content["post_processor"] = None
    (folder / "tokenizer.json").write_text(json.dumps(content))
    settings = hugging_face_settings() | {"pad_token": "<|endoftext|>"}
    write_json(folder / "tokenizer_config.json", settings)
    return tokenizer.load(folder)


@pytest.mark.parametrize(
    ("control", "drop", "more", "expected"),
    [
        (["<|im_start|>", "<|im_end|>"], True, 0, {}),
        (["<|im_start|>", "<|im_end|>", "<file>"], True, 0, {"control tokens without a role": [3]}),
        (["<|reserved_special_token_7|>", "<file>"], True, 0, {"reserved tokens": [1]}),
        (["<unused3>", "<|reserved_0|>"], True, 2, {"reserved tokens": [1, 2, -2, -1]}),
        (["<file>"], False, 0, {"bytes of no text": 13}),
        (["<file>"], True, 3, {"reserved tokens": [-3, -2, -1]}),
    ],
)
def test_known_unused_rows(tmp_path: Path, control: list[str], drop: bool, more: int, expected: dict) -> None:
    words = vocabulary(tmp_path / "words", control, drop_no_text=drop)
    head = torch.ones(words.vocab_size + more, 4)
    found = audit.known_unused(words, head)
    if "bytes of no text" in expected:
        (ids,) = found.values()
        assert {words.bytes_of(i)[0] for i in ids} == tokenizer.NO_TEXT and len(ids) == 13
    else:
        assert found == {kind: [i % len(head) for i in ids] for kind, ids in expected.items()}
    assert audit.known_unused(words, torch.zeros_like(head)) == {}


def test_a_tied_model_without_a_known_token_asks_for_one(tmp_path: Path) -> None:
    words = vocabulary(tmp_path / "words", [], drop_no_text=True)
    settings = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=words.vocab_size, tie_word_embeddings=True, **settings))
    model.save_pretrained(tmp_path)
    words.save_into(tmp_path)
    with pytest.raises(UserError, match="unused="):
        audit.audit(str(tmp_path))
    found = audit.audit(str(tmp_path), unused=[5], top=1)
    assert found["unused"] == {"given": [5]} and found["listed"][0]["id"] == 5
    assert found["listed"][0]["distance"] == pytest.approx(0, abs=1e-12)
    with pytest.raises(UserError, match="no row 9999"):
        audit.audit(str(tmp_path), unused=[9999])


# What people see


SHOWN = re.compile(r"\\(?:x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8}|[nrt\\])|[^\\]", re.DOTALL)


def unshown(text: str) -> bytes:
    """The inverse of ``readable``, written from its description."""

    def one(part: str) -> bytes:
        if part.startswith("\\x"):
            return bytes([int(part[2:], 16)])
        if part.startswith(("\\u", "\\U")):
            return chr(int(part[2:], 16)).encode()
        return {"\\n": b"\n", "\\r": b"\r", "\\t": b"\t", "\\\\": b"\\"}.get(part) or part.encode()

    parts = SHOWN.findall(text)
    assert "".join(parts) == text
    return b"".join(map(one, parts))


@given(st.one_of(st.binary(max_size=8), st.text(max_size=8).map(str.encode)))
def test_a_token_is_shown_in_printable_characters_and_unambiguously(data: bytes) -> None:
    shown = readable(data)
    assert shown.isprintable() and unshown(shown) == data


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        (b" the", " the"),
        (b"\xe2\x82", r"\xe2\x82"),
        ("é\n".encode(), r"é\n"),
        (b"\\x41", r"\\x41"),
        (b"\xc2\x85", r"\u0085"),
    ],
)
def test_examples_of_shown_tokens(data: bytes, shown: str) -> None:
    assert readable(data) == shown


def command(*arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of ``python -m stack.audit``, in a pipe."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="backslashreplace") for _ in range(2))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(sys, "argv", ["stack.audit", *arguments])
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        patch.delenv("COLUMNS", raising=False)
        main()
    for stream in (out, err):
        stream.flush()
    return stop.value.code, out.buffer.getvalue().decode(), err.buffer.getvalue().decode()


def test_the_command(world: World, tmp_path: Path) -> None:
    code, out, err = command(f"checkpoint={world.run}", "top=40", f"json={tmp_path}/a.json")
    assert (code, err) == (0, "")
    written = json.loads((tmp_path / "a.json").read_text())
    assert written == audit.audit(str(world.run), top=40)
    lines = out.splitlines()
    start = next(number for number, line in enumerate(lines) if "──" in line)
    rows = [line for line in lines[start + 1 :] if re.match(r" *\d+ ", line)][:40]
    assert [int(line.split()[0]) for line in rows] == [row["id"] for row in written["listed"]]
    assert all(cell_len(line) <= 80 for line in lines[: start + 41])
    for line, row in zip(rows, written["listed"], strict=True):
        assert f"{row['norm']:.3f}" in line and f"{row['distance']:.4f}" in line and row["category"] in line
        assert readable(world.words.bytes_of(row["id"]))[:12] in line
    none = written["occurrences"]["none"]
    assert f"no occurrence: {none['rows']} rows; of the first {none['rows']} listed so, {none['of_the_first']}" in out
    assert "\x1b" not in out
    code, out, err = command(f"checkpoint={world.run}", "top=40", "json=-")
    assert (code, err) == (0, "") and json.loads(out) == written


def test_mistakes_are_one_message(world: World, tmp_path: Path) -> None:
    for arguments, says in (
        ([f"checkpoint={tmp_path}/none"], "there is no folder"),
        ([f"checkpoint={world.run}", f"json={tmp_path}/none/a.json"], "cannot be written"),
        ([f"checkpoint={world.run}", f"counts={tmp_path}"], "is not a finished packed folder"),
        ([f"checkpoint={world.run}", "top=0"], "top=0"),
        ([f"checkpoint={world.run}", "tops=3"], "did you mean top?"),
    ):
        code, out, err = command(*arguments)
        assert (code, out) == (2, "") and says in err and "Traceback" not in err
