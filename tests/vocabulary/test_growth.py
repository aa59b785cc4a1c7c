"""Growth: law 6. Old rows stay, new rows start at the mean, the step goes on, and KL keeps its bound."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from talk import words_of
from torch import Tensor
from transformers import AutoTokenizer

from stack import checkpoint
from stack.config import schema as config
from stack.core.errors import UserError
from stack.model.attention import Segments
from stack.model.decoder import Decoder, Loss
from stack.model.embedding import INPUT
from stack.text import tokenizer
from stack.text.tokenizer import END_OF_TEXT, END_OF_TURN, START_OF_TURN, Tokenizer
from stack.training.optim import Optimizers
from stack.vocabulary.change import Growth
from stack.vocabulary.measure import measure
from stack.vocabulary.migrate import migrate
from stack.vocabulary.tokens import grow_tokenizer

CHAT = (START_OF_TURN, END_OF_TURN, "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
TEMPLATE = "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
SHAPE = config.Model(
    layers=1, d=16, heads=2, kv_heads=1, head_dim=8, ffn=24, context=40, rope_theta=100.0, norm_eps=1e-5,
    qk_norm=True, init_std=0.5, zero_init=False, softcap=None, scale_input=False,
)  # fmt: skip
OPTIM = config.Optim(
    kind="muon", lr=0.01, matrix_lr=0.01, beta1=0.9, beta2=0.95, eps=1e-10, weight_decay=0.1, table_decay=0.01,
    momentum=0.9, momentum_start=0.8, momentum_warmup=3, ns_steps=5,
)  # fmt: skip


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    """Vocabularies by what they have to spare."""
    root = tmp_path_factory.mktemp("bases")
    return {
        "none": words_of(root / "none", 320),
        "20": words_of(root / "20", 300),
        "4": words_of(root / "4", 316),
        "foreign": words_of(root / "foreign", 300, padded=False),
    }


def grow(words: Tokenizer, root: Path, tokens: tuple[str, ...] = CHAT, *, rows: int | None = None):
    return grow_tokenizer(words, rows or words.vocab_size, tokens, TEMPLATE, root)


def texts_of(words: Tokenizer) -> dict[int, str]:
    """Every id and its text, as the file has them."""
    content = json.loads((words.folder / "tokenizer.json").read_text())
    found = {index: text for text, index in content["model"]["vocab"].items()}
    return found | {token["id"]: token["content"] for token in content["added_tokens"]}


def table_of(rows: int, seed: int = 0, d: int = 16) -> Tensor:
    return torch.randn(rows, d, generator=torch.Generator().manual_seed(seed))


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int32)


# Tokens


@pytest.mark.parametrize("padded", [True, False])
def test_the_padded_table_row(tmp_path: Path, bases: dict[str, Tokenizer], padded: bool) -> None:
    """300 tokens and 20 reserved in 320 rows, 4 new tokens; the reserved ones may have no text yet."""
    words = bases["20" if padded else "foreign"]
    assert words.vocab_size == (320 if padded else 300)
    new = ("<a>", "<b>", "<c>", "<d>")
    made, growth = grow(words, tmp_path, new, rows=320)
    assert growth.initialized == (300, 301, 302, 303) and growth.live == tuple(range(300))
    assert (growth.old_rows, growth.new_rows, made.vocab_size) == (320, 320, 320)
    assert [texts_of(made)[i] for i in range(300, 304)] == list(new) and len(made.reserved) == 16
    table, moments = table_of(320), {f"exp_avg/{INPUT}": table_of(320, 1), f"exp_avg_sq/{INPUT}": table_of(320, 2)}
    weights, moved = migrate(growth, {INPUT: table}, moments)
    mean = table[:300].double().sum(0) / 300
    for row in range(320):
        fresh = 300 <= row < 304
        if fresh:
            torch.testing.assert_close(weights[INPUT][row].double(), mean, rtol=0, atol=1e-7)
        else:
            assert torch.equal(bits(weights[INPUT][row]), bits(table[row]))
        for name, old in moments.items():
            assert torch.equal(bits(moved[name][row]), bits(torch.zeros(16) if fresh else old[row]))


def test_reserved_tokens_are_taken_before_new_ids(tmp_path: Path, bases: dict[str, Tokenizer]) -> None:
    words = bases["4"]
    made, growth = grow(words, tmp_path)
    assert growth.renamed == tuple((316 + i, f"<|reserved_{i}|>", text) for i, text in enumerate(CHAT[:4]))
    assert growth.added[:2] == ((320, CHAT[4]), (321, CHAT[5])) and growth.new_rows == 384
    assert growth.added[2:] == tuple((322 + i, f"<|reserved_{4 + i}|>") for i in range(62))
    assert growth.initialized == tuple(range(316, 384)) and growth.live == tuple(range(316))
    assert [made.control[text] for text in CHAT] == list(range(316, 322))
    assert (made.end_of_turn, made.stops) == (317, (317, made.end_of_text))


@given(
    kind=st.sampled_from(["none", "20", "4", "foreign"]),
    beyond=st.integers(0, 150),
    count=st.integers(0, 100),
    known=st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_rows_and_texts_of_any_growth(tmp_path_factory, bases, kind: str, beyond: int, count: int, known: bool) -> None:
    words = bases[kind]
    rows = words.vocab_size + beyond
    tokens = ((END_OF_TEXT,) if known else ()) + tuple(f"<t{i}>" for i in range(count))
    made, growth = grow(words, tmp_path_factory.mktemp("grown"), tokens, rows=rows)
    before, after = texts_of(words), texts_of(made)
    assert growth.new_rows == len(after) == made.vocab_size >= rows
    assert growth.new_rows % 64 == 0 and growth.new_rows < max(rows, words.vocab_size + count) + 64
    assert set(after) == set(range(len(after))) and len(set(after.values())) == len(after)
    assert set(tokens) <= set(made.control)
    reserved = {i for i, text in before.items() if text.startswith("<|reserved_")}
    for index, text in before.items():
        assert after[index] == text or (index in reserved and after[index] in tokens)
    # Rows whose token is another one, that a token takes, or that were not there: nothing else is initialized.
    fresh = {i for i, t in after.items() if i >= rows or (before.get(i, t) != t) or (i not in before and t in tokens)}
    assert growth.initialized == tuple(sorted(fresh))
    assert growth.live == tuple(sorted(before.keys() - reserved))
    assert growth.unchanged == (before == after)
    # No new id while an old one is free.
    assert (
        not any(index >= rows for text, index in made.control.items() if text in tokens)
        or not made.reserved
        or (min(made.reserved) > max(made.control[text] for text in tokens))
    )


def test_a_base_that_has_the_tokens_is_left_alone(tmp_path: Path, bases: dict[str, Tokenizer]) -> None:
    first, _ = grow(bases["none"], tmp_path)
    made, growth = grow(first, tmp_path / "again")
    assert growth.unchanged and "left as they are" in growth.summary()
    assert made.digest == first.digest == growth.new_vocabulary == growth.old_vocabulary
    assert growth.initialized == () and growth.bound == 0
    table = table_of(first.vocab_size)
    assert torch.equal(bits(migrate(growth, {INPUT: table}, {})[0][INPUT]), bits(table))
    assert json.loads((made.folder / "tokenizer_config.json").read_text())["chat_template"] == TEMPLATE


def test_growing_twice(tmp_path: Path, bases: dict[str, Tokenizer]) -> None:
    words = bases["none"]
    once, first = grow(words, tmp_path)
    twice, second = grow(once, tmp_path, (*CHAT, "<think>", "</think>"))
    assert (first.new_rows, second.new_rows, twice.vocab_size) == (384, 384, 384)
    assert (
        [index for index, _, _ in second.renamed] == [326, 327] == [twice.control["<think>"], twice.control["</think>"]]
    )
    assert second.live == tuple(range(326)) and not second.added
    table, moments = table_of(320), {f"exp_avg/{INPUT}": table_of(320, 1)}
    middle, moved = migrate(first, {INPUT: table}, moments)
    middle[INPUT][320:326] += 1  # as training would
    weights, again = migrate(second, middle, moved)
    kept = [row for row in range(384) if row not in (326, 327)]
    assert torch.equal(bits(weights[INPUT][kept]), bits(middle[INPUT][kept]))
    torch.testing.assert_close(
        weights[INPUT][326:328].double(), middle[INPUT][:326].double().mean(0).expand(2, -1), rtol=0, atol=1e-7
    )
    assert torch.equal(bits(again[f"exp_avg/{INPUT}"][:320]), bits(moments[f"exp_avg/{INPUT}"]))
    assert {text: twice.control[text] for text in CHAT} == {text: once.control[text] for text in CHAT}


def test_a_folder_is_reused_and_everything_that_makes_it_makes_another(tmp_path, bases) -> None:
    words = bases["20"]
    first, growth = grow(words, tmp_path)
    stamps = {path: path.stat().st_mtime_ns for path in first.folder.rglob("*")}
    assert grow(words, tmp_path) == (first, growth)
    assert stamps == {path: path.stat().st_mtime_ns for path in first.folder.rglob("*")}
    other = tmp_path / "pattern"  # the same vocabulary, which cuts text in another way
    shutil.copytree(words.folder, other)
    content = json.loads((other / "tokenizer.json").read_text())
    content["pre_tokenizer"] = content["pre_tokenizer"]["pretokenizers"][1] | {"use_regex": True}
    (other / "tokenizer.json").write_text(json.dumps(content))
    assert tokenizer.load(other).digest == words.digest
    others = [
        grow(tokenizer.load(other), tmp_path)[0],
        grow(words, tmp_path, CHAT[:2])[0],
        grow(words, tmp_path, rows=384)[0],
        grow(bases["4"], tmp_path)[0],
        grow_tokenizer(words, 320, CHAT, TEMPLATE + " ", tmp_path)[0],
    ]
    assert len({first.folder, *(made.folder for made in others)}) == 6
    (first.folder / "manifest.json").unlink()  # what a kill left
    (first.folder / "tokenizer.json").write_text("{")
    assert grow(words, tmp_path) == (first, growth)
    assert not [path for path in first.folder.parent.iterdir() if path.name.startswith(".")]
    manifest = json.loads((first.folder / "manifest.json").read_text())
    assert manifest["growth"] == growth.facts() and manifest["vocabulary_digest"] == first.digest


@pytest.mark.parametrize(
    ("token", "says"),
    [
        ("", "is empty"),
        (" <a>", "white space"),
        ("<a>\n", "white space"),
        ("<|reserved_9|>", "never sampled"),
        ("he", "plain token"),
        ("<b>", "named twice"),
    ],
)
def test_what_cannot_be_a_control_token_is_refused(tmp_path, bases, token: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        grow(bases["20"], tmp_path, ("<b>", token))


anything = st.lists(
    st.one_of(st.sampled_from([*CHAT, END_OF_TEXT, "<|reserved_3|>", "\0", "é", "🙂", "\n"]), st.text())
)


@pytest.fixture(scope="module", params=["none", "foreign"])
def grown(bases, request, tmp_path_factory) -> tuple:
    """A vocabulary, what it grows into, and what AutoTokenizer makes of that."""
    words = bases[request.param]
    made = grow(words, tmp_path_factory.mktemp("chat"), rows=320)[0]
    return words, made, AutoTokenizer.from_pretrained(made.folder)


@given(parts=anything)
@settings(max_examples=60, deadline=None)
def test_ids_are_the_same_before_and_after_and_in_hugging_face(grown, parts: list[str]) -> None:
    words, made, theirs = grown
    text = "".join(parts).encode("utf-8", "ignore").decode()
    ids = made.encode(text)
    assert ids == words.encode(text) and not set(ids) & set(made.control.values())
    assert made.decode(ids) == text
    assert theirs(text, split_special_tokens=True).input_ids == ids
    if not any(control in text for control in made.control):
        assert theirs(text).input_ids == ids


def test_hugging_face_knows_the_roles_and_the_template(grown) -> None:
    _, made, theirs = grown
    assert len(theirs) == made.vocab_size
    assert (theirs.bos_token, theirs.eos_token) == (END_OF_TEXT, END_OF_TURN)
    assert theirs.pad_token_id == made.pad
    assert [theirs.convert_tokens_to_ids(text) for text in CHAT] == [made.control[text] for text in CHAT]
    ids = theirs.apply_chat_template([{"role": "user", "content": "abc"}]).input_ids
    start, end = made.control[START_OF_TURN], made.control[END_OF_TURN]
    assert ids == [made.end_of_text, start, *made.encode("user\nabc"), end, *made.encode("\n")]


# Rows


def test_the_table_is_found_by_name_and_the_rest_is_passed_on(tmp_path, bases) -> None:
    """A matrix with as many rows as the table, and a buffer of Muon's, are not the table's."""
    _, growth = grow(bases["4"], tmp_path)
    table = table_of(320)
    other = {"model.layers.0.mlp.down_proj.weight": table_of(320, 3), "model.norm.weight": torch.ones(320)}
    moments = {
        f"exp_avg/{INPUT}": table_of(320, 4),
        f"exp_avg_sq/{INPUT}": table_of(320, 5).square(),
        f"step/{INPUT}": torch.tensor(41.0),
        "momentum_buffer/model.layers.0.mlp.down_proj.weight": table_of(320, 6),
        "exp_avg/model.norm.weight": torch.ones(320),
    }
    weights, moved = migrate(growth, other | {INPUT: table}, moments)
    assert {name: weights[name] is tensor for name, tensor in other.items()} == dict.fromkeys(other, True)
    assert moved[f"step/{INPUT}"] is moments[f"step/{INPUT}"] and moved[f"step/{INPUT}"] == 41
    for name in moments:
        if INPUT not in name:
            assert moved[name] is moments[name]
        elif "step" not in name:
            assert moved[name].shape == (384, 16)
            assert torch.equal(bits(moved[name][:316]), bits(moments[name][:316])) and not moved[name][316:].any()
    assert (weights.keys(), moved.keys()) == ((other | {INPUT: table}).keys(), moments.keys())
    assert table.shape == (320, 16)
    with pytest.raises(AssertionError):
        migrate(growth, {INPUT: table_of(384)}, {})


def test_the_mean_is_of_live_rows_and_computed_in_float64(tmp_path, bases) -> None:
    """Reserved rows are far away, and a sum in float32 would lose the small value beside the large ones."""
    _, growth = grow(bases["20"], tmp_path)
    table = torch.ones(320, 1)
    table[0], table[1], table[300:] = 1e9, -1e9, 1e6
    weights, _ = migrate(growth, {INPUT: table}, {})
    assert torch.equal(weights[INPUT][300:306], torch.full((6, 1), 298 / 300))


def trained(steps: int, rows: int, kind: str) -> tuple[Decoder, Optimizers]:
    """A model after some steps on random windows."""
    model = Decoder(SHAPE, rows, seed=1)
    optimizers = Optimizers(model, dataclasses.replace(OPTIM, kind=kind))
    for step in range(steps):
        learn(model, optimizers, step, torch.randint(0, 300, (2, 12), generator=torch.Generator().manual_seed(step)))
    return model, optimizers


def learn(model: Decoder, optimizers: Optimizers, step: int, ids: Tensor) -> Tensor:
    """One step; returns the table's gradient."""
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    segments = Segments(((ids.shape[1],),) * len(ids), ids.shape[1], ids.device)
    (model(ids, positions, segments, ids.roll(-1, 1), Loss()) / ids.numel()).backward()
    gradient = model.table.weight.grad.clone()
    optimizers.step(step, 0.5)
    optimizers.zero_grad()
    return gradient


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_an_optimizer_built_before_growth(tmp_path, bases, kind: str) -> None:
    """The row of the cases: new rows move, each live parameter is held once, and the step is AdamW's by hand."""
    words = bases["4"]
    model, optimizers = trained(3, words.vocab_size, kind)
    made, growth = grow(words, tmp_path)
    weights, moments = migrate(growth, model.state_dict(), optimizers.moments())
    after = Decoder(SHAPE, growth.new_rows)
    checkpoint.load_weights_into(after, weights)
    again = Optimizers(after, dataclasses.replace(OPTIM, kind=kind))
    again.load_moments(moments)
    held = [id(p) for group in again.groups() for p in group["params"]]
    assert sorted(held) == sorted(map(id, after.parameters()))
    ids = torch.tensor([[0, made.control[START_OF_TURN], 5, 6, made.control[END_OF_TURN], 7]])
    gradient = learn(after, again, 3, ids).double()

    before = weights[INPUT].double()
    m = OPTIM.beta1 * moments[f"exp_avg/{INPUT}"].double() + (1 - OPTIM.beta1) * gradient
    v = OPTIM.beta2 * moments[f"exp_avg_sq/{INPUT}"].double() + (1 - OPTIM.beta2) * gradient.square()
    lr, t = 0.5 * OPTIM.lr, 4  # three steps before growth, and this one
    update = (m / (1 - OPTIM.beta1**t)) / ((v / (1 - OPTIM.beta2**t)).sqrt() + OPTIM.eps)
    expected = before * (1 - lr * OPTIM.table_decay) - lr * update
    torch.testing.assert_close(after.table.weight.double(), expected, rtol=1e-5, atol=1e-7)
    fresh = list(growth.initialized)
    assert (after.table.weight[fresh] != weights[INPUT][fresh]).any(1).all()
    state = again.moments()
    torch.testing.assert_close(state[f"exp_avg/{INPUT}"].double(), m, rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(state[f"exp_avg_sq/{INPUT}"].double(), v, rtol=1e-5, atol=1e-12)
    assert state[f"step/{INPUT}"] == t
    assert after.table.weight.shape == (384, 16) and "lm_head.weight" not in after.state_dict()


# Answers


def pair(growth: Growth, shape: config.Model, seed: int, std: float) -> tuple[Decoder, Decoder]:
    """A base with a table of that scale, and what it grows into."""
    old, new = Decoder(shape, growth.old_rows, seed=seed), Decoder(shape, growth.new_rows)
    with torch.no_grad():
        old.table.weight.copy_(table_of(growth.old_rows, seed) * std + table_of(1, seed + 1))
    checkpoint.load_weights_into(new, migrate(growth, old.state_dict(), {})[0])
    return old, new


def texts(seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[0, *(draw.randrange(300) for _ in range(length))] for length in (3, 0, 90, 30)]


@torch.no_grad()
def reference(growth: Growth, old: Decoder, new: Decoder, seed: int) -> tuple[float, float, int]:
    """Kullback and Leibler's sum as it is written, one position at a time in float64."""
    kl, mass, count = 0.0, 0.0, 0
    for ids in texts(seed):
        row = torch.tensor([ids[: SHAPE.context]])
        for a, b in zip(old.logits(row)[0].double(), new.logits(row)[0].double(), strict=True):
            p = {i: math.exp(a[i]) for i in growth.live}
            q = {i: math.exp(b[i]) for i in (*growth.live, *growth.initialized)}
            z, y = sum(p.values()), sum(q.values())
            kl += sum(p[i] / z * math.log((p[i] / z) / (q[i] / y)) for i in p)
            mass += sum(q[i] / y for i in growth.initialized)
            count += 1
    return kl / count, mass / count, count


@given(
    kind=st.sampled_from(["none", "20", "4", "foreign"]),
    count=st.integers(1, 100),
    std=st.sampled_from([0.0, 0.01, 0.3, 1.0, 3.0]),
    seed=st.integers(0, 10**6),
    scale=st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_kl_keeps_its_bound(tmp_path_factory, bases, kind, count, std, seed, scale) -> None:
    words = bases[kind]
    root = tmp_path_factory.mktemp("kl")
    _, growth = grow(words, root, tuple(f"<t{i}>" for i in range(count)), rows=words.vocab_size + seed % 40)
    found = measure(growth, *pair(growth, dataclasses.replace(SHAPE, scale_input=scale), seed, std), texts(seed))
    assert math.isclose(found["bound"], math.log(1 + len(growth.initialized) / len(growth.live)))
    assert 0 < found["kl"] <= found["bound"] + 1e-6
    assert found["positions"] == 4 + 1 + SHAPE.context + 31
    assert 0 < found["mass"] <= 1 - math.exp(-found["bound"]) + 1e-6  # M of V + M, at most
    if std == 0.0:  # equal rows: a uniform distribution, where the bound is reached
        assert math.isclose(found["kl"], found["bound"], rel_tol=1e-6)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_kl_is_the_sum_as_it_is_written(tmp_path, bases, softcap: float | None) -> None:
    """With a softcap, too, where the bound is no law: both models run, so what is logged is true."""
    _, growth = grow(bases["20"], tmp_path, tuple(f"<t{i}>" for i in range(40)))
    old, new = pair(growth, dataclasses.replace(SHAPE, softcap=softcap), 3, 0.5)
    kl, mass, count = reference(growth, old, new, 3)
    found = measure(growth, old, new, texts(3))
    assert found["positions"] == count
    assert math.isclose(found["kl"], kl, rel_tol=1e-6) and math.isclose(found["mass"], mass, rel_tol=1e-6)


def test_no_text_to_measure_on(tmp_path, bases) -> None:
    _, growth = grow(bases["20"], tmp_path)
    with pytest.raises(UserError, match="no text"):
        measure(growth, *pair(growth, SHAPE, 0, 1.0), [[]])


def test_facts_are_json_and_exact(tmp_path, bases) -> None:
    _, growth = grow(bases["4"], tmp_path, rows=330)
    facts = json.loads(json.dumps(growth.facts()))
    assert facts["kept"] == [{"old": [0, 315], "new": [0, 315]}, {"old": [322, 329], "new": [322, 329]}]
    assert [part["rows"] for part in facts["initialized"]] == [[316, 321], [330, 383]]
    assert {part["initializer"] for part in facts["initialized"]} == {"mean of the live old rows"}
    assert facts["live"] == [[0, 315]]
    assert facts["counts"] == {"kept": 324, "initialized": 60, "live": 316}
    assert (facts["old_rows"], facts["new_rows"]) == (330, 384)
    assert facts["renamed"][0] == [316, "<|reserved_0|>", START_OF_TURN]
    assert facts["added"][:3] == [[320, CHAT[4]], [321, CHAT[5]], [322, "<|reserved_4|>"]]
    assert facts["old_vocabulary"] == bases["4"].digest != facts["new_vocabulary"]
    assert "330 → 384 rows" in growth.summary() and "6 tokens, 4 of them in reserved rows" in growth.summary()
