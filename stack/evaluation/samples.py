"""Texts that a model goes on with, to look at."""

from __future__ import annotations

from stack.config import schema as config
from stack.evaluation.generate import Sampling, generate
from stack.model.decoder import Decoder
from stack.text import conversation
from stack.text.tokenizer import Tokenizer


def continuations(model: Decoder, tokenizer: Tokenizer, settings: config.Sample, seed: int) -> list[str]:
    """The model's continuation of each of the prompts, with the prompt in front."""
    made = generate(
        model,
        [_prompt(tokenizer, text) for text in settings.prompts],
        tokens=settings.tokens,
        stops=tokenizer.stops,
        banned=tokenizer.unsampled,
        sampling=Sampling(settings.temperature, seed=seed),
    )
    ends = [ids[:-1] if ids[-1:] and ids[-1] in tokenizer.stops else ids for ids in made]
    between = "" if tokenizer.end_of_turn is None else "\n"
    return [prompt + between + tokenizer.decode(ids) for prompt, ids in zip(settings.prompts, ends, strict=True)]


def _prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """A text to be continued; for a chat model a question to be answered."""
    if tokenizer.end_of_turn is None:
        return [tokenizer.end_of_text, *tokenizer.encode(text)]
    return conversation.encode(tokenizer, [{"role": "user", "content": text}], generation_prompt=True)[0]
