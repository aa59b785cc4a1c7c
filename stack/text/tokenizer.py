"""Byte-level BPE: the tokenizer of a Hugging Face folder, and the identity of its vocabulary.

Ids in order: ``<|endoftext|>`` (0), ``<|pad|>`` (1), the 256 bytes, the merges as they were learned, and reserved
tokens up to a multiple of 64, so that every row of the model's table has a text. Nothing is normalized and all bytes
are in the alphabet: ``decode(encode(text)) == text`` for every text. Text never becomes a control token.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tokenizers

from stack.core.errors import UserError
from stack.core.files import read_json, write_json
from stack.text.portions import PORTION, portions

END_OF_TEXT = "<|endoftext|>"
PAD = "<|pad|>"
RESERVED = "<|reserved_{}|>"
START_OF_TURN, END_OF_TURN = "<|im_start|>", "<|im_end|>"
MULTIPLE = 64  # of the table's rows, for the matrix units
FILES = ("tokenizer.json", "tokenizer_config.json")
# Where a folder names what ends a text, by text or id, one or a list of them. Each program reads another of these.
ENDS = {
    "tokenizer_config.json": "eos_token",
    "special_tokens_map.json": "eos_token",
    "config.json": "eos_token_id",
    "generation_config.json": "eos_token_id",
}
RESERVED_TEXT = re.compile(r"<\|reserved_(\d+)\|>")
# Bytes without which a vocabulary still holds every character that is written: those of no valid UTF-8, and …
NO_TEXT = frozenset({0xC0, 0xC1, *range(0xF5, 0x100)})
# … those of control characters and of planes without characters, which SmolLM2's vocabulary lacks. As regex ranges.
RARE = {byte: re.escape(chr(byte)) for byte in (*range(0x20), 0x7F) if chr(byte) not in "\t\n\r"}
RARE |= {0xF1: "\U00040000-\U0007ffff", 0xF2: "\U00080000-\U000bffff", 0xF4: "\U00100000-\U0010ffff"}
AT_A_TIME = 8 * PORTION  # characters that the library encodes together, in some 250 MB of memory


@dataclass(frozen=True)
class Tokenizer:
    """A vocabulary with its roles. Made by :func:`load` only."""

    folder: Path
    vocab_size: int  # the number of ids; of ours it is the number of the table's rows, a multiple of 64
    end_of_text: int  # before every document, and the end of generation
    pad: int
    reserved: tuple[int, ...]
    control: dict[str, int]  # every control token's text and id, the reserved ones too
    digest: str  # SHA-256 of the ordered token bytes and the roles, in hex
    _inner: tokenizers.Tokenizer = field(repr=False, compare=False)
    _files: dict[str, bytes] = field(
        repr=False, compare=False
    )  # as they were read: the folder may go while a run lasts
    unknown: re.Pattern[str] | None = None  # characters with a byte that has no token; never in one of ours
    ends: tuple[int, ...] = ()  # control tokens that the folder's files name as ends
    remarks: tuple[str, ...] = field(default=(), compare=False)  # what those files name as an end and cannot be one

    @property
    def unsampled(self) -> tuple[int, ...]:
        """Ids that generation never emits. Where other people's padding is also a stop or plain text, it stays."""
        padding = self.pad in self.control.values() and self.pad not in self.stops
        return (self.pad, *self.reserved) if padding else self.reserved

    @property
    def end_of_turn(self) -> int | None:
        """``<|im_end|>``, which ends a message and an answer; None where the vocabulary has no chat tokens."""
        return self.control.get(END_OF_TURN) if START_OF_TURN in self.control else None

    @property
    def stops(self) -> tuple[int, ...]:
        """Ids that end an answer: our own first, then those that the folder's files name."""
        own = (self.end_of_text,) if self.end_of_turn is None else (self.end_of_turn, self.end_of_text)
        return tuple(dict.fromkeys((*own, *self.ends)))

    def ending(self, ends: Iterable[int]) -> Tokenizer:
        """The same with other ``ends``. An end is never reserved: it is sampled, and growth does not rename it."""
        ends = tuple(ends)
        return replace(self, ends=ends, reserved=tuple(i for i in self.reserved if i not in ends))

    def encode(self, text: str) -> list[int]:
        """The ids of plain text; what spells a control token is characters like any other. No bos is added.

        A character of ``unknown`` is encoded as U+FFFD, where other programs drop it without a word. A stretch of more
        than :data:`~stack.text.portions.LONGEST` letters, digits, blanks or other characters of one kind is encoded in
        parts of that length; otherwise the ids are those of other programs. UserError where the library gives up.
        """
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        """:meth:`encode` of many texts, on all threads."""
        found: list[list[int]] = []
        for group in _groups(map(self._parts, texts)):
            encoded = self._encode([part for _, part in group])
            for (text, _), ids in zip(group, encoded, strict=True):
                if text == len(found):
                    found.append(ids)
                else:
                    found[text] += ids
        return found

    def _encode(self, parts: list[str]) -> list[list[int]]:
        try:
            return [found.ids for found in self._inner.encode_batch_fast(parts, add_special_tokens=False)]
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # the library's own, which no module has and Exception misses
                raise
            if len(parts) > 1:
                return [ids for part in parts for ids in self._encode([part])]
            raise UserError(
                f"{self.folder}: the tokenizer library gives up ({error}) at a text of {len(parts[0]):,} characters "
                f"that begins with {parts[0][:60]!r}; take it out, or take another tokenizer"
            ) from None

    def _parts(self, text: str) -> list[str]:
        """What is encoded of a text, in parts that the library can take."""
        known = text if self.unknown is None else self.unknown.sub("\ufffd", text)
        found = portions(known)
        if len(found) > 1 and self._inner.normalizer is not None:
            # A cut may not keep an accent from its letter; what is composed before stays as it is in every part.
            found = portions(unicodedata.normalize("NFC", known))
        return found

    def decode(self, ids: Iterable[int]) -> str:
        """The inverse of :meth:`encode`. Control tokens show as their text, broken UTF-8 as U+FFFD."""
        return self._inner.decode([int(i) for i in ids], skip_special_tokens=False)

    def token_to_id(self, token: str) -> int | None:
        """The id of a token as ``tokenizer.json`` writes it, control or not; None where there is none."""
        return self._inner.token_to_id(token)

    def id_to_token(self, index: int) -> str:
        """The inverse of :meth:`token_to_id`."""
        return self._inner.id_to_token(index)

    def bytes_of(self, index: int) -> bytes:
        """What a token stands for in a text: the UTF-8 of a control token's text, any bytes of a plain one."""
        token = self.id_to_token(index)
        if token in self.control:
            return token.encode()
        return bytes(_BYTE_OF[character] for character in token)

    def save_into(self, folder: Path, max_length: int | None = None) -> None:
        """Write the files that Hugging Face reads into a model's folder; ``max_length`` is the model's context.

        A model that continues texts needs their padding in front: batched generation goes on from the last position.
        """
        for name, content in self._files.items():
            (folder / name).write_bytes(content)
        if max_length is not None:
            of_model = {"model_max_length": max_length, "padding_side": "left"}
            settings = read_json(folder / "tokenizer_config.json") | of_model
            write_json(folder / "tokenizer_config.json", settings)


def _groups(parts_of_texts: Iterable[list[str]]) -> Iterator[list[tuple[int, str]]]:
    """The parts of many texts, each with the number of its text, about ``AT_A_TIME`` characters a group."""
    group: list[tuple[int, str]] = []
    size = 0
    for number, parts in enumerate(parts_of_texts):
        for part in parts:
            if size >= AT_A_TIME:
                yield group
                group, size = [], 0
            group.append((number, part))
            size += len(part)
    yield group


def load(folder: Path | str) -> Tokenizer:
    """The tokenizer of a folder: one of ours, or any byte-level BPE that Hugging Face opens.

    UserError where files are missing, contradict each other, or hold what cannot keep the laws: a text that is changed
    before it is encoded, a byte without a token, a control token that text can spell.
    """
    folder = Path(folder)
    for name in FILES:
        if not (folder / name).is_file():
            raise UserError(f"{folder} is no tokenizer: {name} is missing; give tokenizer.folder or train one")
    settings, content = read_json(folder / "tokenizer_config.json"), read_json(folder / "tokenizer.json")
    inner = _inner(folder, content)
    vocabulary = inner.get_vocab(with_added_tokens=True)
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    if [vocabulary[token] for token in tokens] != list(range(len(tokens))):
        raise UserError(
            f"{folder}: {len(tokens)} tokens with ids up to {max(vocabulary.values(), default=-1)}; ids must be "
            "0, 1, 2 …: restore tokenizer.json, or take another tokenizer"
        )
    control = {index: token.content for index, token in inner.get_added_tokens_decoder().items()}
    unknown = _unknown(folder, {token for i, token in enumerate(tokens) if i not in control})
    roles = _roles(folder, settings, vocabulary, control)
    digest = _digest(tokens, control, roles)
    _check_manifest(folder, digest)
    named = {text: index for index, text in control.items()}
    reserved = tuple(sorted(index for index, text in control.items() if RESERVED_TEXT.fullmatch(text)))
    end, pad = roles["end_of_text"], roles["pad"]
    files = {name: (folder / name).read_bytes() for name in FILES}
    found = Tokenizer(folder, len(tokens), end, pad, reserved, named, digest, inner, files, unknown)
    _check_text(found)
    ends, remarks = _ends(found)
    return replace(found.ending(ends), remarks=tuple(remarks))


def _inner(folder: Path, content: dict[str, Any]) -> tokenizers.Tokenizer:
    """The encoder of a ``tokenizer.json``, with every added token as control; UserError for another kind of model."""
    model, normalizer = content.get("model") or {}, content.get("normalizer")
    # Canonical composition (Qwen's) changes how a character is stored and not what it is; all else loses text.
    if normalizer is not None and normalizer.get("type") != "NFC":
        raise UserError(f"{folder}: the normalizer {json.dumps(normalizer)} changes text; take a base without one")
    if model.get("type", "BPE") != "BPE" or model.get("byte_fallback") or model.get("dropout"):
        kind = {key: model.get(key) for key in ("type", "byte_fallback", "dropout")}
        raise UserError(f"{folder}: the tokenizer's model is {kind}; byte-level BPE without dropout is needed")
    # Tokens that are added but not special (Qwen's <tool_call>) would be matched in text; here all are control.
    added = [token | {"special": True} for token in content.get("added_tokens", ())]
    content = content | {"added_tokens": added, "truncation": None, "padding": None}
    try:
        inner = tokenizers.Tokenizer.from_str(json.dumps(content))
    except Exception as error:  # the library raises nothing narrower
        raise UserError(f"{folder / 'tokenizer.json'} cannot be understood ({error}); restore it") from error
    inner.encode_special_tokens = True  # text is never control: special tokens are encoded as the characters they spell
    return inner


def _unknown(folder: Path, tokens: set[str]) -> re.Pattern[str] | None:
    """The characters that plain tokens cannot write; UserError unless tokens are bytes and the characters are rare."""
    characters = byte_characters()
    foreign = set().union(*tokens) - set(characters)
    if foreign:
        raise UserError(f"{folder}: tokens hold {min(foreign)!r}, so this is no byte-level BPE; train one")
    missing = {byte for byte, character in enumerate(characters) if character not in tokens} - NO_TEXT
    if missing - RARE.keys():
        raise UserError(
            f"{folder}: no token for the bytes {', '.join(map(hex, sorted(missing - RARE.keys())))}, so text would be "
            "lost; take a base whose alphabet has them"
        )
    return re.compile(f"[{''.join(RARE[byte] for byte in sorted(missing))}]") if missing else None


def _roles(
    folder: Path, settings: dict[str, Any], vocabulary: dict[str, int], control: dict[int, str]
) -> dict[str, int]:
    """The ids of the special roles; UserError where ``tokenizer_config.json`` names what is not there."""
    named = {}
    for role in ("bos", "eos", "pad", "unk"):
        value = settings.get(f"{role}_token")
        text = value.get("content") if isinstance(value, dict) else value
        if text is not None and text not in vocabulary:
            raise UserError(
                f"{folder}: {role}_token={text!r} of tokenizer_config.json is no token of tokenizer.json; "
                "the two files do not belong together: restore or train them"
            )
        named[role] = text
    end = END_OF_TEXT if END_OF_TEXT in control.values() else named["bos"] or named["eos"]
    if end is None or vocabulary[end] not in control:
        raise UserError(
            f"{folder}: {END_OF_TEXT} is no control token of tokenizer.json, and bos_token={named['bos']!r} and "
            f"eos_token={named['eos']!r} of tokenizer_config.json are none either; name one that stands before a text"
        )
    return {"end_of_text": vocabulary[end], "pad": vocabulary[named["pad"] or end]}


def _ends(found: Tokenizer) -> tuple[list[int], list[str]]:
    """The ids that the files of a folder name as ends, and a line for each name that is passed over.

    A plain token is no end: a Llama configuration that was made without a thought of it names the id 2, whatever
    that is, and answers would stop within a text.
    """
    ends, remarks = [], []
    for path, key in ((found.folder / name, key) for name, key in ENDS.items() if (found.folder / name).is_file()):
        settings = read_json(path)
        value = settings.get(key)
        for one in value if isinstance(value, list) else [value]:
            named = one.get("content") if isinstance(one, dict) else one
            index = found.control.get(named) if isinstance(named, str) else named
            if type(index) is int and index in found.control.values():
                ends.append(index)
            elif named is not None:
                remarks.append(f"{path}: {key}={named!r} is no control token of tokenizer.json and ends no answer")
        if settings.get("stop_strings"):
            remarks.append(f"{path}: stop_strings={settings['stop_strings']!r} end no answer; only a token does")
    return ends, remarks


def _check_text(found: Tokenizer) -> None:
    """UserError where a text does not come back, or where the text of a control token becomes one."""
    probe = "a" + "".join(map(chr, range(0x20, 0x250))) + "  a  \n\n b\r\n\t日本語 🙂\u2028 I'm 1234  "
    probe = "".join(found._parts(unicodedata.normalize("NFC", probe)))
    back = found.decode(found.encode(probe))
    if back != probe:
        at = next((i for i, (a, b) in enumerate(zip(probe, back, strict=False)) if a != b), len(back))
        raise UserError(
            f"{found.folder}: text does not come back from its tokens: {probe[at : at + 8]!r} became "
            f"{back[at : at + 8]!r}; take a base whose tokenizer keeps every character"
        )
    texts, control = list(found.control), set(found.control.values())
    for text, ids in zip(texts, found.encode_batch(texts), strict=True):
        if control.intersection(ids):
            raise UserError(
                f"{found.folder}: the text {text!r} is encoded as a control token, so a text could forge one; "
                "take a base whose merges do not make it"
            )


def _check_manifest(folder: Path, digest: str) -> None:
    """UserError where the folder's manifest names another vocabulary than its files hold."""
    path = folder / "manifest.json"
    named = read_json(path).get("vocabulary_digest", digest) if path.is_file() else digest
    if named != digest:
        raise UserError(
            f"{folder}: tokenizer.json holds the vocabulary {digest}, but manifest.json names {named}; "
            "one of them was changed: remove the folder, and it is made again"
        )


def _digest(tokens: list[str], control: dict[int, str], roles: dict[str, int]) -> str:
    """The identity of a vocabulary: SHA-256 over each token's bytes in order, which are control, and the roles."""
    hashed = hashlib.sha256()
    for index, token in enumerate(tokens):
        data = token.encode() if index in control else bytes(_BYTE_OF[character] for character in token)
        hashed.update(b"%d %d " % (index in control, len(data)) + data)
    hashed.update(json.dumps(roles, sort_keys=True).encode())
    return hashed.hexdigest()


def byte_characters() -> list[str]:
    """The printable character by which byte-level BPE writes each of the 256 bytes (GPT-2's table)."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = iter(range(256, 512))
    return [chr(byte) if byte in shown else chr(next(hidden)) for byte in range(256)]


_BYTE_OF = {character: byte for byte, character in enumerate(byte_characters())}
