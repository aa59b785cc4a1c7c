"""A small tokenizer with chat tokens for tests."""

from __future__ import annotations

import json
import random
from pathlib import Path

from stack.core.files import write_json
from stack.text import tokenizer
from stack.text.bpe import fit, hugging_face_settings
from stack.text.template import TEMPLATE
from stack.text.tokenizer import Tokenizer

CONTROL = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


def tokenizer_in(folder: Path) -> Tokenizer:
    """Made in a folder as a checkpoint has it; the chat tokens stand in the place of reserved ones."""
    text = "user\nassistant\nsystem\ntool\nthe sea and the answer is the sea; \n\n yes, no. "
    content = json.loads(fit([text] * 9, 300).to_str())
    for number, name in enumerate(CONTROL):
        next(t for t in content["added_tokens"] if t["content"] == f"<|reserved_{number}|>")["content"] = name
    content["post_processor"] = None  # as growth leaves it: the template writes the bos
    (folder / "tokenizer.json").write_text(json.dumps(content))
    named = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "pad_token": "<|pad|>"}
    settings = named | {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return tokenizer.load(folder)


def noise(count: int = 40) -> list[str]:
    """Words of random letters, with more merges than any test asks for."""
    draw = random.Random(0)
    return ["".join(draw.choices("abcdefgh ", k=200)) for _ in range(count)]


def words_of(folder: Path, entries: int, *, padded: bool = True) -> Tokenizer:
    """A tokenizer of so many entries, with reserved tokens up to a multiple of 64 or without."""
    folder.mkdir()
    inner = fit(noise(), entries)
    content = json.loads(inner.to_str())
    if not padded:
        content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < entries]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    write_json(folder / "tokenizer_config.json", hugging_face_settings())
    return tokenizer.load(folder)
