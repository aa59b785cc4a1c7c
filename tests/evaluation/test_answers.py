"""Answers: what is asked was held out, every turn is asked once, and only what ended by itself can be right."""

from __future__ import annotations

import json

import pytest
import talk

from stack.config import schema as config
from stack.config.schema import Conversations, ConversationSource, HubFlags
from stack.core.ranks import Ranks
from stack.data.sources import held_out
from stack.evaluation import answers
from stack.evaluation.answers import Answer, Question, in_form, judge, questions, shard
from stack.model.decoder import Decoder
from stack.text.tokenizer import Tokenizer

NO_HUB = HubFlags(path=None, name=None, split="train", revision=None, streaming=True)
KEYS = [f"{number:064x}" for number in range(60)]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return talk.tokenizer_in(tmp_path_factory.mktemp("words"))


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Conversations:
    """Sixty conversations of two turns each, the second through a tool; half of them held out."""
    path = tmp_path_factory.mktemp("chat") / "a.jsonl"
    with path.open("w") as file:
        for number, key in enumerate(KEYS):
            call = {"name": "f", "arguments": {"x": number}}
            messages = [
                {"role": "user", "content": f"the sea {number}"},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "content": "yes"},
                {"role": "assistant", "content": f"yes {number}"},
            ]
            file.write(json.dumps({"messages": messages, "document": key}) + "\n")
    source = ConversationSource(files=(str(path),), check="exact", validation=0.5)
    return Conversations("c", {"a": source}, (), NO_HUB, "messages", "skip", 0.1, 0, 1, 1.0, None, "cut")


def test_what_is_asked_is_held_out_and_every_turn_is_asked(chat: Conversations, words: Tokenizer) -> None:
    out = [number for number, key in enumerate(KEYS) if held_out(bytes.fromhex(key), 0.5, 0)]
    asked = questions(chat, words, 1000, 256)
    assert 15 < len(out) < 45 and len(asked) == 2 * len(out)
    for place, number in enumerate(out):
        call, last = asked[2 * place : 2 * place + 2]
        assert call.conversation == last.conversation == place
        assert (call.text, last.text) == (f"the sea {number}", "yes")
        assert call.reference == f'<tool_call>\n{{"name": "f", "arguments": {{"x": {number}}}}}\n</tool_call>'
        assert last.reference == f"yes {number}"
        spelled = words.decode(last.prompt)
        assert spelled.startswith("<|endoftext|><|im_start|>user\n") and spelled.endswith("<|im_start|>assistant\n")
        assert call.reference in spelled and spelled.count("<|im_start|>") == 4
    assert len(questions(chat, words, 3, 256)) == 6
    assert questions(chat, words, 1000, 20) == []  # none fits


def test_ranks_ask_every_conversation_once_and_whole(chat: Conversations, words: Tokenizer) -> None:
    asked = questions(chat, words, 11, 256)
    parts = [shard(asked, Ranks(rank, 3)) for rank in range(3)]
    assert sorted(map(hash, (q for part in parts for q in part))) == sorted(map(hash, asked))
    numbers = [{q.conversation for q in part} for part in parts]
    assert sum(map(len, numbers)) == len(set.union(*numbers)) == 11


def test_a_conversation_is_right_when_every_turn_is_and_ended() -> None:
    def made(conversation: int, text: str, reference: str, stopped: bool = True) -> Answer:
        return Answer(Question("a", conversation, (0,), "?", reference), text, stopped)

    sources = {
        "a": ConversationSource(files=("a",), check="exact", headings=("A:", "B:")),
        "b": ConversationSource(files=("b",)),
    }
    found = judge(
        [
            made(0, "A:\nB:", "A:\nB:"),
            made(1, "A:\nB:", "A:\nB:"),
            made(1, "x", "y"),  # one wrong turn
            made(2, "A:\nB:", "A:\nB:", stopped=False),
            made(3, "B:\nA:", "B:\nA:"),  # right, and out of order
        ],
        sources,
    )
    assert found == {"a": {"stopped": 3 / 4, "exact": 2 / 4, "form": 1 / 4}}
    assert any(line.split()[0] == "a" for line in answers.lines(found))


def test_form_is_headings_in_order_each_on_a_line_of_its_own() -> None:
    headings = ("Ingredients:", "Steps:")
    assert in_form("Tea\n\nIngredients:\n1. tea\n\nSteps:\n1. Boil.", headings)
    assert not in_form("Steps:\nIngredients:", headings)
    assert not in_form("The Ingredients: and Steps:", headings)
    assert not in_form("Ingredients:", headings)
    assert in_form("anything", ())


def test_answers_come_in_the_order_of_the_questions_and_say_what_ended_them(words: Tokenizer) -> None:
    """A batch sorts questions by length; each must still get the answer that it gets alone."""
    shape = config.Model(1, 16, 2, 1, 8, 32, 64, 1e4, 1e-6, True, 0.5, False, None, False)
    model = Decoder(shape, words.vocab_size, seed=3)
    texts = ["the sea", "a", "the answer is the sea and the sea", "no", "yes yes"]
    prompts = [(words.end_of_text, *words.encode(text)) for text in texts]
    asked = [Question("a", i, prompt, "", "") for i, prompt in enumerate(prompts)]
    together = answers.answer(model, words, asked, 8)
    assert [a.question for a in together] == asked
    assert together == [answers.answer(model, words, [q], 8)[0] for q in asked]
    assert len({a.text for a in together}) > 1
    forced = Decoder(shape, words.vocab_size, seed=3)
    forced.table.weight.data[words.stops[0]] *= 1000  # one of the two signs makes it likeliest or never
    stops = {a.stopped for m in (model, forced) for a in answers.answer(m, words, asked, 8)}
    assert stops == {True, False}
