"""Validation: nats per token and bits per byte of the whole held-out split, and of its parts.

The targets of the split are parted four times: by source, by position, by length of document and by class of row. Each
parting is complete, so its sums add up to those of the whole. Figures, beside ``loss`` and ``bits_per_byte``:

``loss_SOURCE``, ``bits_per_byte_SOURCE``  where there is more than one source; bits where all of its text is measured
``loss_at_0032_0063``                      of targets behind so many tokens of their own segment: the 33rd to 64th; a
                                           segment starts anew at 0, wherever in the window it stands; 8 buckets
``loss_length_0064_0255``                  of targets of documents of so many tokens, the ``<|endoftext|>`` counted
``loss_class_rare``                        of targets whose row is of this class of :mod:`stack.vocabulary.classes`
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from stack.core.ranks import Ranks
from stack.data.batches import IGNORED, Batch, Windows
from stack.model.decoder import Decoder
from stack.training.trainer import to_device
from stack.vocabulary.classes import CLASSES

POSITIONS = 8  # buckets of the window, as equal as they can be
LENGTHS = (0, 64, 256, 1024, 4096)  # where the buckets of lengths begin; the last has no end


@dataclass(frozen=True)
class Validation:
    """What one pass over the split found, by source and by other partings."""

    nats: dict[str, float]  # sums over all targets
    num_targets: dict[str, int]
    num_bytes: Mapping[str, int] | None  # of the UTF-8 text by source, where every token of the split is a target
    parts: dict[str, dict[str, tuple[float, int]]] = field(default_factory=dict)  # nats and targets: at, length, class

    @property
    def loss(self) -> float:
        """Nats per token: a mean over tokens, never a mean of means."""
        return sum(self.nats.values()) / max(1, sum(self.num_targets.values()))

    @property
    def bits_per_byte(self) -> float | None:
        """Independent of the vocabulary, so it compares tokenizers, too."""
        if self.num_bytes is None:
            return None
        return sum(self.nats.values()) / (math.log(2) * sum(self.num_bytes.values()))

    def figures(self) -> dict[str, float]:
        """By the names that the module gives; a part without a target has no figure."""
        found = {"loss": self.loss}
        if self.bits_per_byte is not None:
            found["bits_per_byte"] = self.bits_per_byte
        if len(self.nats) > 1:
            found |= {f"loss_{name}": self.nats[name] / n for name, n in self.num_targets.items() if n}
            sizes = {name: n for name, n in (self.num_bytes or {}).items() if n}
            found |= {f"bits_per_byte_{name}": self.nats[name] / (math.log(2) * n) for name, n in sizes.items()}
        for kind, buckets in self.parts.items():
            found |= {f"loss_{kind}_{label}": nats / n for label, (nats, n) in buckets.items() if n}
        return found


@torch.no_grad()
def validate(
    model: Decoder,
    windows: Windows,
    num_bytes: Mapping[str, int] | None,
    *,
    micro_batch: int,
    chunk_tokens: int,
    ranks: Ranks,
    device: str,
    classes: np.ndarray | None = None,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Validation:
    """One pass over every window, shared among ranks; the loss is cross-entropy alone, without the z-loss.

    Args:
        model: the decoder, not wrapped for ranks.
        windows: the validation split's.
        num_bytes: UTF-8 bytes of the split's text by source, for bits per byte.
        micro_batch: windows in one forward pass.
        chunk_tokens: tokens whose logits exist at one time.
        ranks: each takes every ``world``-th micro-batch; sums are added over them.
        device: where the model is.
        classes: of every row, int64 [V], as :func:`stack.vocabulary.classes.classify` gives them.
        progress: hears after each micro-batch how many windows are done, of how many.
    """
    labels = {"source": windows.split.sources, "at": _positions(windows.window), "length": _lengths()}
    labels |= {} if classes is None else {"class": CLASSES}
    sums = {kind: np.zeros((2, len(names))) for kind, names in labels.items()}  # nats and targets
    for number, start in enumerate(range(0, windows.num_windows, micro_batch)):
        if number % ranks.world != ranks.rank:
            continue
        batch = windows.batch(range(start, min(start + micro_batch, windows.num_windows)))
        ids, positions, segments, targets = to_device(batch, device)
        with model.uncompiled():
            losses = model.token_losses(ids, positions, segments, targets, chunk_tokens).double().cpu().numpy()
        supervised = batch.targets.numpy() != IGNORED
        for kind, of in parting(windows, batch, classes).items():
            size = len(labels[kind])
            sums[kind][0] += np.bincount(of[supervised], losses[supervised], minlength=size)
            sums[kind][1] += np.bincount(of[supervised], minlength=size)
        progress(start + len(batch.ids), windows.num_windows)
    whole = iter(ranks.sum(*(value for both in sums.values() for value in both.flat)))
    found = {}
    for kind, names in labels.items():
        nats, counts = ([next(whole) for _ in names] for _ in range(2))
        found[kind] = {name: (a, int(n)) for name, a, n in zip(names, nats, counts, strict=True)}
    source = found.pop("source")
    return Validation({k: a for k, (a, _) in source.items()}, {k: n for k, (_, n) in source.items()}, num_bytes, found)


def parting(windows: Windows, batch: Batch, classes: np.ndarray | None = None) -> dict[str, np.ndarray]:
    """The number of the bucket that every target is in, int64 ``[B, T]`` by kind; any where nothing is supervised."""
    split = windows.split
    document = np.zeros(batch.ids.shape, dtype=np.int64)
    for row, (documents, lengths) in enumerate(zip(batch.documents, batch.lengths, strict=True)):
        document[row, : sum(lengths)] = np.repeat(documents, lengths)
    found = {
        "source": split.source_of[document],
        "at": np.searchsorted(_edges(windows.window), batch.positions.numpy(), side="right") - 1,
        "length": np.searchsorted(LENGTHS, split.lengths[document], side="right") - 1,
    }
    return found if classes is None else found | {"class": classes[batch.targets.numpy().clip(0)]}


def _edges(window: int) -> list[int]:
    """Where the buckets of positions begin, without those that are empty in a short window."""
    return sorted({i * window // POSITIONS for i in range(POSITIONS)})


def _positions(window: int) -> list[str]:
    edges = [*_edges(window), window]
    return [f"{begin:04}_{end - 1:04}" for begin, end in itertools.pairwise(edges)]


def _lengths() -> list[str]:
    ends = [f"{end - 1:04}" for end in LENGTHS[1:]] + ["up"]
    return [f"{begin:04}_{end}" for begin, end in zip(LENGTHS, ends, strict=True)]
