"""The tokenizer of a grown vocabulary: a Hugging Face folder, named by what it was made from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tokenizers

from stack.core.files import create_folder, read_json, sha256, short_digest, write_json
from stack.text.bpe import hugging_face_settings
from stack.text.tokenizer import END_OF_TURN, MULTIPLE, RESERVED_TEXT, START_OF_TURN, Tokenizer, load
from stack.vocabulary.change import Growth, plan_growth

FORMAT = 1  # raise it when the same base and tokens are to give another vocabulary


def grow_tokenizer(
    tokenizer: Tokenizer, num_rows: int, tokens: Sequence[str], template: str, root: Path
) -> tuple[Tokenizer, Growth]:
    """The tokenizer with ``tokens`` and a chat template, and what its growth means for the table.

    What ended an answer of the base still does.
    It stands in ``root/tokenizers/chat-<8 hex>``, whole or not at all, and is reused where base, rows, tokens and
    template are the same. As many tokens as rows: a multiple of 64, and never fewer than ``num_rows``.

    Args:
        tokenizer: of the base.
        num_rows: of the base's table; those beyond its tokens are taken as reserved ones are.
        tokens: control tokens that are to be there, in order.
        template: Jinja, saved as ``chat_template``.
        root: the folder of made data.

    Raises:
        UserError: a token cannot be a control token.
    """
    growth = plan_growth(tokenizer, num_rows, tokens)
    inputs = {
        "format": FORMAT,
        "vocabulary_digest": tokenizer.digest,
        "tokenizer_json": sha256(
            tokenizer.folder / "tokenizer.json"
        ),  # merges and pattern, which the digest does not know
        "num_rows": num_rows,
        "tokens": list(tokens),
        "template": template,
    }
    kept = [
        index for text, index in tokenizer.control.items() if RESERVED_TEXT.fullmatch(text) and index in tokenizer.stops
    ]
    inputs |= {"kept": kept} if kept else {}  # ends with the text of a reserved token, which the plan passes over
    folder = root / "tokenizers" / f"chat-{short_digest(inputs)}"
    if not (folder / "manifest.json").is_file():
        create_folder(folder, lambda beside: _make(beside, tokenizer, growth, inputs))
    grown = load(folder).ending(tokenizer.stops)
    assert grown.vocab_size == growth.new_rows and grown.vocab_size % MULTIPLE == 0 and growth.new_rows >= num_rows
    return grown, replace(growth, new_vocabulary=grown.digest)


def _make(folder: Path, tokenizer: Tokenizer, growth: Growth, inputs: dict[str, Any]) -> None:
    """Write the Hugging Face folder of a grown vocabulary."""
    folder.mkdir()
    content = read_json(tokenizer.folder / "tokenizer.json")
    texts = {index: new for index, _, new in growth.renamed} | dict(growth.added)
    old = {index: text for index, text, _ in growth.renamed}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    entries = [entry for entry in content["added_tokens"] if entry["id"] not in old]
    entries += [{"id": index, "content": text, **plain} for index, text in texts.items()]
    content["added_tokens"] = sorted(entries, key=lambda entry: entry["id"])
    vocabulary = content["model"]["vocab"]  # some programs list added tokens here as well
    content["model"]["vocab"] = {texts[i] if i in old else token: i for token, i in vocabulary.items()}
    # The template writes the bos. A post-processor that adds it as well would put a second one in front of every
    # rendered text that is encoded by default, and there is none that looks at the text first.
    content["truncation"] = content["padding"] = content["post_processor"] = None
    names = {index: text for text, index in tokenizer.control.items()} | texts
    bos = names[tokenizer.end_of_text]
    tokenizers.Tokenizer.from_str(json.dumps(content)).save(str(folder / "tokenizer.json"))
    chat = {START_OF_TURN, END_OF_TURN} <= set(names.values())
    settings = {
        "bos_token": bos,
        "eos_token": END_OF_TURN if chat else bos,
        "pad_token": names.get(tokenizer.pad) or tokenizer.id_to_token(tokenizer.pad),
        "chat_template": inputs["template"],
    }
    write_json(folder / "tokenizer_config.json", hugging_face_settings() | settings)
    digest = load(folder).digest
    facts = replace(growth, new_vocabulary=digest).facts()
    write_json(folder / "manifest.json", {"inputs": inputs, "vocabulary_digest": digest, "growth": facts})
