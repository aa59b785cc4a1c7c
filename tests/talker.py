"""Small chat models on disk whose greedy answers are letters and depend on every token before them."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
import torch
from talk import CONTROL

from stack import chat, checkpoint
from stack.config import schema as config
from stack.evaluation.generate import generate
from stack.model.decoder import Decoder
from stack.text import tokenizer
from stack.text.bpe import fit
from stack.text.template import TEMPLATE
from stack.text.tokenizer import Tokenizer
from stack.vocabulary.tokens import grow_tokenizer


def vocabulary(root: Path, *, chat: bool) -> Tokenizer:
    """The 256 bytes, a few merges, and the chat tokens."""
    folder = root / "tokenizer"
    folder.mkdir(parents=True)
    fit(["the cat sat. assistant user system " * 9], 320).save(str(folder / "tokenizer.json"))
    roles = {"bos_token": tokenizer.END_OF_TEXT, "eos_token": tokenizer.END_OF_TEXT, "pad_token": tokenizer.PAD}
    (folder / "tokenizer_config.json").write_text(json.dumps(roles))
    words = tokenizer.load(folder)
    return grow_tokenizer(words, words.vocab_size, CONTROL, TEMPLATE, root)[0] if chat else words


def save(root: Path, *, chat: bool = True, context: int = 256, stops: bool = True) -> Path:
    """A run's folder with one checkpoint.

    Only letters, the blank and, with ``stops``, the end of a turn have a row that can win; the others' are small.
    """
    words = vocabulary(root, chat=chat)
    shape = config.Model(2, 32, 2, 1, 16, 48, context, 10000.0, 1e-6, True, 0.5, False, None, False)
    model = Decoder(shape, words.vocab_size, seed=3)
    wins = {i for letter in "abcdefghijklmnopqrstuvwxyz " for i in words.encode(letter)}
    wins |= {words.end_of_turn} if stops and chat else set()
    with torch.no_grad():
        model.table.weight[[i for i in range(words.vocab_size) if i not in wins]] *= 0.02
    run = root / "run"
    checkpoint.save(
        run / "checkpoints", 1, model_config=shape, tokenizer=words, weights=model.state_dict(), moments={}, state={},
        identity={}, metric=None,
    )  # fmt: skip
    return run


def expected(model: Decoder, words: Tokenizer, prompt: list[int], tokens: int) -> str:
    """The likeliest answer to the ids of a prompt, without the stop."""
    (ids,) = generate(model, [prompt], tokens=tokens, stops=words.stops, banned=words.unsampled)
    return words.decode(ids[:-1] if ids[-1] in words.stops else ids)


TOKENS = 24


def one_shot(*arguments: str, stdin: bytes = b"") -> tuple[int, str, str]:
    """Exit code, standard output and standard error of the command, in this process."""
    given = ["stack.chat", f"tokens={TOKENS}", "device=cpu", "precision=float32", *arguments]
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="backslashreplace") for _ in range(2))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(sys, "argv", given)
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        chat.main()
    for stream in (out, err):
        stream.flush()
    return stop.value.code, out.buffer.getvalue().decode(), err.buffer.getvalue().decode()
