"""Decoding with a cache against decoding without one, and against ``transformers``; text piece by piece."""

from __future__ import annotations

import json

import pytest
import torch
from hugging_face import same_shape
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from stack.config import schema as config
from stack.core.errors import UserError
from stack.evaluation.generate import Sampling, candidates, generate, pieces, stream
from stack.model.decoder import Decoder
from stack.text import tokenizer as words
from stack.text.bpe import fit

ROWS = 96
CONTEXT = 96
PROMPTS = ([5], [7, 8, 9, 10, 11, 12, 13], [90] * 20)


@pytest.fixture(scope="module")
def model():
    """Random, with logits far enough apart that the likeliest id is no matter of rounding."""
    return Decoder(
        config.Model(2, 32, 4, 2, 8, 48, CONTEXT, 10000.0, 1e-6, True, 0.5, False, None, False), ROWS, seed=1
    )


def decode(model, prompts=PROMPTS, **options):
    return generate(model, prompts, **{"tokens": 12, "stops": (), "banned": (), **options})


@torch.no_grad()
def uncached(model, prompt, tokens, stops=(), banned=()):
    """Greedy decoding that computes everything again for every id."""
    ids = list(prompt)
    while len(ids) < min(len(prompt) + tokens, CONTEXT):
        logits = model.logits(torch.tensor([ids]))[0, -1]
        logits[list(banned)] = -torch.inf
        ids.append(int(logits.argmax()))
        if ids[-1] in stops:
            break
    return ids[len(prompt) :]


def test_cached_logits_equal_uncached_ones(model, monkeypatch):
    """At every step, for prompts of different lengths in one batch."""
    seen = []
    logits_of = model.table.logits
    monkeypatch.setattr(model.table, "logits", lambda hidden: seen.append(logits_of(hidden)) or seen[-1].clone())
    answers = decode(model, sampling=Sampling(1.0))
    monkeypatch.undo()
    assert len(seen) == 12
    for row, (prompt, answer) in enumerate(zip(PROMPTS, answers, strict=True)):
        with torch.no_grad():
            whole = model.logits(torch.tensor([[*prompt, *answer]]))[0, len(prompt) - 1 : -1]
        cached = torch.stack([logits[row] for logits in seen])
        assert (cached - whole).abs().max() < 1e-5, row


def test_greedy_equals_transformers_for_64_ids(model):
    other = same_shape(model.config, ROWS, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    other.load_state_dict(model.state_dict(), strict=False)
    other.tie_weights()
    answers = decode(model, tokens=64)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        theirs = other.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=64, do_sample=False
        )
        assert answer == theirs[0, len(prompt) :].tolist()
    assert len({i for answer in answers for i in answer}) > 10, "loops of a few ids would prove little"


def test_a_batch_gives_what_each_prompt_gives_alone(model):
    together = decode(model)
    assert together == [decode(model, [prompt])[0] for prompt in PROMPTS] == [uncached(model, p, 12) for p in PROMPTS]


@pytest.mark.parametrize("temperature", [0.0, 50.0])
def test_banned_ids_never_appear(model, temperature):
    free = {i for answer in decode(model, sampling=Sampling(temperature)) for i in answer}
    banned = sorted(free)[::2]
    answers = decode(model, banned=banned, sampling=Sampling(temperature))
    assert not set(banned) & {i for answer in answers for i in answer}
    if temperature == 0:
        assert answers == [uncached(model, p, 12, banned=banned) for p in PROMPTS]


def test_a_stop_ends_its_own_answer_and_is_part_of_it(model):
    free = decode(model)
    stops = (free[0][4], free[1][9])
    answers = decode(model, stops=stops)
    assert answers == [uncached(model, p, 12, stops=stops) for p in PROMPTS]
    assert len(answers[0]) <= 5 and answers[0][-1] in stops
    for answer in answers:
        assert not set(answer[:-1]) & set(stops)


def test_a_stop_may_be_chosen_where_it_is_banned_as_padding(model):
    free = decode(model)
    stop = free[0][4]
    assert decode(model, stops=[stop], banned=[stop]) == decode(model, stops=[stop])


def test_finished_rows_leave_the_batch_and_change_no_other_one(model, monkeypatch):
    """Forty answers of different lengths; the last steps compute few rows."""
    prompts = [[5 + i % 60, 3 + i] for i in range(40)]
    free = decode(model, prompts, tokens=60)
    stops = sorted({i for answer in free for i in answer})[::8]
    sizes = []
    extend = Decoder.extend
    monkeypatch.setattr(Decoder, "extend", lambda self, ids, *more: sizes.append(len(ids)) or extend(self, ids, *more))
    answers = decode(model, prompts, tokens=60, stops=stops)
    ends = [next((i + 1 for i, token in enumerate(ids) if token in stops), len(ids)) for ids in free]
    assert answers == [ids[:end] for ids, end in zip(free, ends, strict=True)]
    assert len(set(ends)) > 5
    alive = [sum(end > step for end in ends) for step in range(len(sizes))]
    assert all(size == 40 or size * 3 / 4 < count or count == size for size, count in zip(sizes, alive, strict=True))
    assert len(sizes) == max(ends) and sizes[-1] < 20, "no step is computed for nobody"


def test_an_answer_does_not_depend_on_what_else_is_in_the_batch(model):
    """Sampled: the same text beside other prompts, beside fewer, with more steps, and after rows have left."""
    drawing = Sampling(1.0, top_k=50, top_p=0.95, seed=5)
    together = decode(model, sampling=drawing, tokens=40)
    assert decode(model, [[11] * 30, [8], PROMPTS[2]], sampling=drawing, tokens=40)[2] == together[2]
    assert decode(model, PROMPTS[:2], sampling=drawing, tokens=40) == together[:2]
    assert decode(model, sampling=drawing, tokens=7) == [ids[:7] for ids in together]
    stop = next(i for i in together[0][5:] if i not in together[1] + together[2])
    ended = decode(model, sampling=drawing, tokens=40, stops=[stop])
    assert len(ended[0]) < 40 and ended[1:] == together[1:]
    same = decode(model, [PROMPTS[0]] * 3, sampling=drawing)
    assert same[0] != same[1] != same[2] != same[0], "each prompt draws numbers of its own"


@settings(deadline=None)
@given(
    seed=st.integers(0, 2**31),
    temperature=st.sampled_from([0.05, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 2, 17, ROWS, ROWS + 9]),
    top_p=st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999, 1.0]),
)
def test_what_may_be_drawn_is_what_transformers_would_draw_from(seed, temperature, top_k, top_p):
    """The same ids, with the same chances; -inf stands for a banned id."""
    logits = torch.randn(4, ROWS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2
    logits[:, 3] = -torch.inf
    theirs = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    theirs += [TopKLogitsWarper(top_k)] if top_k else []
    theirs += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    expected = torch.softmax(theirs(None, logits.clone()), -1)
    chances, ids = candidates(logits, Sampling(temperature, top_k, top_p))
    found = torch.zeros_like(logits).scatter(-1, ids, chances / chances.sum(-1, keepdim=True))
    assert torch.equal(found > 0, expected > 0)
    assert (found - expected).abs().max() < 1e-12


def test_top_p_is_the_smallest_set_that_reaches_the_mass():
    """By hand: 0.5, 0.3 and 0.2; the first always stays, and a mass that is reached exactly is reached."""
    logits = torch.tensor([[0.2, 0.5, 0.3]], dtype=torch.float64).log()
    for top_p, kept in ((1e-12, {1}), (0.45, {1}), (0.55, {1, 2}), (0.75, {1, 2}), (0.85, {0, 1, 2}), (1.0, {0, 1, 2})):
        chances, ids = candidates(logits, Sampling(1.0, top_p=top_p))
        assert set(ids[chances > 0].tolist()) == kept, top_p


def test_drawn_ids_follow_the_chances_of_top_k_and_top_p(model):
    """4,000 first ids of one prompt: none outside of the set, and shares within five standard errors."""
    drawing = Sampling(1.5, top_k=12, top_p=0.9, seed=1)
    with torch.no_grad():
        chances, ids = candidates(model.logits(torch.tensor([[7, 8, 9]]))[:, -1].double(), drawing)
    expected = torch.zeros(ROWS, dtype=torch.float64).scatter(0, ids[0], chances[0] / chances.sum())
    assert 3 < (expected > 0).sum() < 12
    drawn = torch.tensor(decode(model, [[7, 8, 9]] * 4000, tokens=1, sampling=drawing))[:, 0]
    shares = torch.bincount(drawn, minlength=ROWS) / 4000
    assert ((shares > 0) <= (expected > 0)).all()
    assert ((shares - expected).abs() < 5 * (expected * (1 - expected) / 4000).sqrt() + 1e-3).all()


@pytest.mark.parametrize("temperature", [5e-324, 1e-30, 1e-4])
def test_a_small_temperature_is_the_likeliest_id(model, temperature):
    assert decode(model, sampling=Sampling(temperature)) == decode(model)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0), Sampling(1.0, 3, 0.5)])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_told(model, sampling, wrong):
    broken = Decoder(model.config, ROWS, seed=1)
    with torch.no_grad():
        broken.model.norm.weight[3] = wrong
    with pytest.raises(UserError, match="logits are not finite"):
        decode(broken, sampling=sampling)


def test_a_seed_repeats(model):
    state = torch.get_rng_state()
    first = decode(model, sampling=Sampling(1.0, seed=3))
    assert decode(model, sampling=Sampling(1.0, seed=3)) == first
    assert decode(model, sampling=Sampling(1.0, seed=4)) != first
    assert torch.equal(state, torch.get_rng_state()), "sampling must not move the generator of the training"


def test_sampling_follows_the_softmax(model):
    """3,000 first ids of one prompt against the distribution; five standard errors."""
    with torch.no_grad():
        chances = torch.softmax(model.logits(torch.tensor([[7, 8, 9]]))[0, -1] / 0.7, -1)
    drawn = torch.tensor(decode(model, [[7, 8, 9]] * 3000, tokens=1, sampling=Sampling(0.7)))[:, 0]
    shares = torch.bincount(drawn, minlength=ROWS) / 3000
    assert ((shares - chances).abs() < 5 * (chances * (1 - chances) / 3000).sqrt() + 1e-3).all()


def test_a_full_context_ends_an_answer(model):
    """Prompt and answer together fill the context and no more, each row by its own length."""
    prompts = [[3] * (CONTEXT - 1), [4] * (CONTEXT - 6), [5, 6]]
    answers = decode(model, prompts, tokens=10)
    assert [len(a) for a in answers] == [1, 6, 10]
    assert answers == [uncached(model, p, 10) for p in prompts]


@pytest.mark.parametrize("length", [0, CONTEXT, CONTEXT + 5])
def test_a_prompt_without_room_is_refused(model, length):
    with pytest.raises(UserError, match=rf"prompt 1 has {length} tokens.*{CONTEXT - 1}"):
        decode(model, [[1], [1] * length])


def test_nothing_asked_nothing_given(model):
    assert decode(model, []) == []
    assert decode(model, tokens=0) == [[], [], []]


def test_bf16_caches_in_bf16(model):
    """Under autocast the same code runs, and ids stay in range."""
    with torch.autocast("cpu", torch.bfloat16):
        answers = decode(model, tokens=5)
    assert all(len(a) == 5 and max(a) < ROWS for a in answers)


# ---------------------------------------------------------------- text as it comes


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory) -> words.Tokenizer:
    """Bytes, a few merges that cut characters, and reserved tokens."""
    folder = tmp_path_factory.mktemp("vocabulary")
    fit(["naïve 🙂🙃 ÄÖÜ 東京 the the " * 9], 320).save(str(folder / "tokenizer.json"))
    roles = {"bos_token": words.END_OF_TEXT, "eos_token": words.END_OF_TEXT, "pad_token": words.PAD}
    (folder / "tokenizer_config.json").write_text(json.dumps(roles))
    return words.load(folder)


@settings(deadline=None, max_examples=150)
@given(st.lists(st.integers(0, 319), max_size=30), st.text(max_size=12), st.integers(0, 4))
@example([], "🙂", 0)
@example([], "\ufffd", 0)
@example([257], "é", 1)  # a byte that is no character, in front of one that is
def test_pieces_together_are_the_text_and_none_ends_in_half_a_character(vocabulary, ids, text, cut):
    """Random ids, among them broken bytes and control tokens, and the ids of any text, cut at its end."""
    for some in (ids, vocabulary.encode(text), ids + vocabulary.encode(text)[:-cut] if cut else ids):
        found = list(pieces(vocabulary, iter(some)))
        assert "".join(found) == vocabulary.decode(some)
        assert all(found), "an empty piece"
        shown = ""
        for piece in found:
            shown += piece
            assert vocabulary.decode(some).startswith(shown), "what was shown has changed"


def test_a_character_is_shown_with_its_last_byte_and_a_broken_one_at_once(vocabulary):
    """Byte ids begin at 2 in the order of their printable characters."""
    alphabet = {byte: 2 + place for place, byte in enumerate(words_bytes())}
    ids = [alphabet[byte] for byte in b"a" + "🙂".encode() + b"\xff\xffb" + "é".encode()[:1]]
    read: list[int] = []
    seen = []
    for piece in pieces(vocabulary, (read.append(i) or i for i in ids)):
        seen.append((len(read), piece))
    assert seen == [(1, "a"), (5, "🙂"), (7, "\ufffd"), (8, "\ufffdb"), (9, "\ufffd")]


def words_bytes() -> list[int]:
    """The bytes in the order of the initial alphabet: by the code point of the character that stands for each."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return shown + [byte for byte in range(256) if byte not in shown]


def test_a_stream_is_the_answer_of_generate_without_its_stop(model, vocabulary):
    """Also from a table with more rows than the vocabulary has tokens, and never a reserved id."""
    wide = Decoder(model.config, 384, seed=2)
    prompt = [vocabulary.end_of_text, *vocabulary.encode("the")]
    banned = [*vocabulary.unsampled, *range(320, 384)]
    lengths = set()
    for seed in range(5):
        drawing = Sampling(8.0, seed=seed)
        (ids,) = generate(wide, [prompt], tokens=60, stops=vocabulary.stops, banned=banned, sampling=drawing)
        found = "".join(stream(wide, vocabulary, prompt, tokens=60, sampling=drawing))
        assert found == vocabulary.decode(ids[:-1] if ids[-1] in vocabulary.stops else ids)
        assert not set(ids) & set(banned)
        lengths.add(len(ids))
    assert min(lengths) < 60, "none was stopped"


def test_a_stream_computes_no_more_than_what_is_read(model, vocabulary, monkeypatch):
    """It yields while it goes: after one piece only the prompt has been through the model."""
    calls = []
    extend = Decoder.extend
    monkeypatch.setattr(Decoder, "extend", lambda self, *given: calls.append(1) or extend(self, *given))
    wide = Decoder(model.config, 320, seed=2)
    answer = stream(wide, vocabulary, [vocabulary.end_of_text], tokens=40, sampling=Sampling(1.0, seed=1))
    assert calls == []
    next(answer)
    assert 1 <= len(calls) < 10
    list(answer)
    assert len(calls) > 20
