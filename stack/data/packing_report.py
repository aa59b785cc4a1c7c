"""What packing tells a person: its progress, an example, what was left out, and why there is nothing."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from stack.config import schema as config
from stack.core.errors import UserError
from stack.data import formats
from stack.data.packed import Packed
from stack.data.placement import plan_windows
from stack.data.sources import Document, expected_bytes
from stack.text import conversation
from stack.text.messages import REASONING
from stack.text.tokenizer import Tokenizer

MB = 1_000_000
_SHOW_SECONDS = 3.0
_ESTIMATE_AFTER = 2 * MB  # bytes of text read; before, the speed is that of starting the workers


def example(document: Document, name: str, tokenizer: Tokenizer, room: int = 600) -> str:
    """A conversation as it is packed, in about ``room`` characters: how it begins and how it ends."""
    ids, supervised = conversation.encode(tokenizer, document.content)
    text = conversation.coloured(tokenizer, ids, supervised, marks=True).plain.rstrip("\n")
    text = text if len(text) <= room else f"{text[: room // 2]} … {text[-room // 2 :]}"
    unused = f" {not_used(document.passed_over)}." if document.passed_over else ""
    return f"source {name}: its first conversation, with ⟦what is learnt⟧ and ‹control tokens›.{unused}\n{text}"


def not_used(passed_over: Mapping[str, int]) -> str:
    """Which fields of conversations are not used, and how to use those that can be."""
    counts = ", ".join(f"{key} ({count:,})" for key, count in sorted(passed_over.items()))
    keep = "; chat.reasoning=keep learns reasoning" if passed_over.keys() & set(REASONING) else ""
    return f"not used are {counts}{keep}"


def every_row_is_bad(name: str, source: config.Source, bad: dict[str, int], first: dict[str, str]) -> str:
    """What is wrong with a source that has no good row, and how others look."""
    reason = max(bad, key=bad.__getitem__)
    text = f"source {name}: all {sum(bad.values()):,} rows are bad, {bad[reason]:,} of them for: {reason}"
    text += f"; the first of these is {first[reason]}"
    if not isinstance(source, config.ConversationSource):
        return f"{text}; data.text=FIELD names the field that holds the text"
    if reason == formats.PREFERRED:
        return f"{text}; chat.text=chosen learns the chosen answers, where they are lists of messages"
    known = f"; known are {formats.KNOWN}; chat.text=FIELD names the field of another list of messages"
    return text + (known if " field" in reason else "")


def refuse_no_text(totals: dict[str, Any], skipped: dict[str, Any], data: config.Data, unread: list[str]) -> None:
    """UserError where there is nothing to learn from."""
    if totals["train"]["documents"]:
        return
    if unread:
        raise UserError("\n".join(unread))
    group = "chat" if isinstance(data, config.Conversations) else "data"
    too_long = any(counts.get("too_long") for counts in skipped.values())
    wider = "; a larger train.window takes in what is too long" if too_long else ""
    sources = "; ".join(
        f"{name} ({', '.join(source.files) if source.hub is None else source.hub.path}), "
        f"not packed: {json.dumps(skipped.get(name, 'weight 0'))}"
        for name, source in data.resolved_sources().items()
    )
    raise UserError(
        f"the train split has 0 documents, at least 1 is needed (train has {totals['train']['documents']}, "
        f"validation {totals['validation']['documents']}); sources: {sources}; "
        f"lower {group}.validation={data.validation} or give more text{wider}"
    )


class Meter:
    """Counts what was read of a source, and shows it now and then."""

    def __init__(self, name: str, source: config.Source, read: int, show: Callable[[str], None]):
        self.read = read  # bytes of text
        self._name, self._show, self._tokens = name, show, 0
        self._total = expected_bytes(source)
        self._begin, self._before = time.monotonic(), read
        self._next = self._begin + _SHOW_SECONDS

    def add(self, num_bytes: int, tokens: int) -> None:
        """Count one document."""
        self.read += num_bytes
        self._tokens += tokens
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _SHOW_SECONDS
            self.line()

    def line(self, *, done: bool = False) -> None:
        """Show where the source stands."""
        read = self.read - self._before
        speed = read / max(time.monotonic() - self._begin, 1e-9)
        left = ""
        if not done and self._total and self.read < self._total and read >= _ESTIMATE_AFTER:
            left = f", {self.read / self._total:.0%}, about {(self._total - self.read) / speed / 60:.1f} min left"
        tokens = f"{self._tokens / 1e6:.1f}M tokens"
        self._show(f"packing {self._name}: {self.read / MB:.1f} MB, {speed / MB:.1f} MB/s, {tokens}{left}")


def summary(packed: Packed, window: int | None) -> str:
    """What is in a packed folder, in a few words; of conversations also what did not get in."""
    parts = []
    for split, total in packed.manifest["splits"].items():
        talk = f", {total['supervised'] / 1e6:.2f}M of them learnt" if window else ""
        tokens = f"{total['tokens'] / 1e6:.2f}M tokens{talk}"
        what = "conversations" if window else "documents"
        parts.append(f"{split}: {total['documents']} {what}, {tokens}, {total['bytes'] / MB:.1f} MB")
    if window:
        share = plan_windows(packed.split("train").lengths, window, seed=0).padding_share(window)
        skipped = [source["skipped"] for source in packed.manifest["sources"].values()]
        cut, too_long = (sum(counts[key] for counts in skipped) for key in ("cut", "too_long"))
        bad = sum(sum(counts["bad_rows"].values()) for counts in skipped)
        parts.append(f"{share:.1%} padding at window {window}; {cut} cut, {too_long} too long, {bad} bad rows")
        reasons = sum((Counter(counts["bad_rows"]) for counts in skipped), Counter())
        passed_over = sum((Counter(counts.get("passed_over", {})) for counts in skipped), Counter())
        parts += [not_used(passed_over)] if passed_over else []
        parts += [", ".join(f"{count} × {reason}" for reason, count in reasons.most_common())] if bad else []
    return "; ".join(parts)
