"""Decoding with a cache against decoding without one, and against ``transformers``."""

import pytest
import torch
from hugging_face import same_shape

from stack import config
from stack.config import UserError
from stack.generate import Sampling, generate
from stack.model.transformer import Decoder

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
