"""Ids come in the order of their texts, whoever made them; a worker that dies is told, not waited for."""

import multiprocessing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stack.core.errors import UserError
from stack.data import encoding
from stack.text import tokenizer as tokenizers
from stack.text.bpe import fit


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> tokenizers.Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    fit(["the sea and the land, the old and the new"] * 4, 320).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<|endoftext|>", "pad_token": "<|pad|>"}')
    return tokenizers.load(folder)


@given(st.lists(st.none() | st.text(max_size=30), max_size=30), st.integers(1, 40), st.integers(1, 5))
def test_order_and_portions(tokenizer, texts, characters, count):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoding, "TASK_CHARACTERS", characters)
        patch.setattr(encoding, "TASK_TEXTS", count)
        with encoding.encoder(tokenizer, 1) as encode:
            found = list(encode(enumerate(texts)))
    assert [item for item, _ in found] == list(range(len(texts)))
    assert [encoded.ids.tolist() for _, encoded in found] == [
        [] if text is None else tokenizer.encode(text) for text in texts
    ]
    assert all(encoded.ids.dtype == np.uint16 for _, encoded in found)


def test_memory_is_bounded_and_a_dead_worker_is_told(tokenizer, monkeypatch):
    """The reader is at most a few calls a worker ahead; a worker killed from outside (no memory) ends it all."""
    monkeypatch.setattr(encoding, "TASK_TEXTS", 10)
    read = 0

    def pairs():
        nonlocal read
        for read in range(1, 2_000):
            if read == 1_000:
                for child in multiprocessing.active_children():
                    child.kill()
            yield read, "the sea"

    with pytest.raises(UserError, match=r"lower data\.workers=2"), encoding.encoder(tokenizer, 2) as encode:
        for item, encoded in encode(pairs()):
            assert encoded.ids.tolist() == tokenizer.encode("the sea")
            assert read - item < encoding.AHEAD * 2 * 10
    assert read >= 1_000
