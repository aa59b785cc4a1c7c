"""Training of byte-level BPE: merges from texts, and the settings by which Hugging Face opens the result."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, processors, trainers

from stack.text.portions import portions
from stack.text.tokenizer import END_OF_TEXT, MULTIPLE, PAD, RESERVED, byte_characters

# Qwen2's pattern: contractions, words with the one character before them, single digits, punctuation, white space.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def fit(texts: Iterable[str], vocab_size: int) -> tokenizers.Tokenizer:
    """Byte-level BPE with at most ``vocab_size`` entries learned from texts, and reserved ones up to a multiple of 64.

    The order of the texts and the number of threads change nothing: merges depend on counts, ties on ids.
    """
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_TEXT, PAD],
        initial_alphabet=byte_characters(),
        show_progress=False,
    )
    inner.train_from_iterator(_batches(texts), trainer=trainer)
    inner.add_special_tokens([RESERVED.format(i) for i in range(-inner.get_vocab_size() % MULTIPLE)])
    inner.post_processor = processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A", pair=f"{END_OF_TEXT} $A $B:1", special_tokens=[(END_OF_TEXT, 0)]
    )
    return inner


def _batches(texts: Iterable[str], count: int = 256) -> Iterator[list[str]]:
    """Lists of texts or parts of them: the library hands each to all of its threads."""
    batch = []
    for part in (part for text in texts for part in portions(text)):
        batch.append(part)
        if len(batch) == count:
            yield batch
            batch = []
    yield batch


def hugging_face_settings() -> dict[str, Any]:
    """``tokenizer_config.json``. The class is the one that takes tokenizer.json as it is, beside a Qwen3 config too."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],  # transformers 4 adds token_type_ids, which models refuse
        "model_max_length": int(1e30),  # Hugging Face's number for no limit; a model's folder names its context
    }
