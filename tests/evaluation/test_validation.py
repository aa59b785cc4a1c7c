"""Validation is a mean over tokens, in nats and in bits per byte, however it is cut into batches."""

import itertools
import math
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from stack.config import schema as config
from stack.core.ranks import Ranks
from stack.data.batches import in_order
from stack.data.packed import Split
from stack.evaluation.validation import Validation, validate
from stack.model.decoder import Decoder
from stack.vocabulary.classes import CLASSES

ROWS = 64
PAD = 1
ALONE = Ranks()


def split_of(*lengths):
    """Documents of these numbers of tokens, each after its separator 0."""
    rng = np.random.default_rng(0)
    stream = [0]
    starts = []
    for length in lengths:
        starts.append(len(stream) - 1)
        stream += [*rng.integers(2, ROWS, length), 0]
    inputs = np.array(lengths) + 1
    return Split("validation", inputs, np.array(starts), 0, (np.array(stream, dtype=np.uint16),), np.array([0]))


def validation_of(model, windows, micro_batch=2, ranks=ALONE, num_bytes=None, classes=None):
    settings = {"micro_batch": micro_batch, "chunk_tokens": 7, "ranks": ranks, "device": "cpu", "classes": classes}
    return validate(model, windows, num_bytes, **settings)


@pytest.fixture(scope="module")
def model():
    return Decoder(config.Model(2, 32, 4, 2, 8, 48, 64, 10000.0, 1e-6, True, 0.2, False, None, False), ROWS, seed=1)


class Fixed:
    """In the place of a decoder: sums 3 and 5 for batches of 1 and 4 targets."""

    uncompiled = nullcontext

    def token_losses(self, ids, positions, segments, targets, chunk_tokens):
        learnt = targets != -100
        return learnt * {1: 3.0, 4: 1.25}[int(learnt.sum())]


def test_batches_of_unequal_size_are_not_averaged_as_equals():
    """(3 + 5) / (1 + 4) = 1.6, where a mean of means would be (3 + 1.25) / 2."""
    found = validation_of(Fixed(), in_order(split_of(3, 0), 4, PAD), micro_batch=1)
    assert (found.nats, found.num_targets, found.loss) == ({"text": 8.0}, {"text": 5}, 1.6)


def test_bits_per_byte():
    """A model that gives each of 50 tokens 3 bits spends 150 bits on the 60 bytes, whatever a token is."""
    found = Validation({"a": 20 * 3 * math.log(2), "b": 30 * 3 * math.log(2)}, {"a": 20, "b": 30}, {"a": 40, "b": 20})
    assert found.bits_per_byte == pytest.approx(2.5)
    assert found.loss == pytest.approx(3 * math.log(2))
    figures = found.figures()
    assert set(figures) == {"loss", "bits_per_byte", "loss_a", "loss_b", "bits_per_byte_a", "bits_per_byte_b"}
    assert (figures["bits_per_byte_a"], figures["bits_per_byte_b"]) == pytest.approx((1.5, 4.5))
    assert "bits_per_byte" not in Validation({"a": 1.0}, {"a": 1}, None).figures()


def test_sources_are_summed_apart(model):
    """Every source has the loss that its documents have alone, though they share windows."""
    split = split_of(11, 3, 0, 15, 7, 1)
    stream, of = split.ids(0, int(split.lengths.sum()) + 1), np.array([0, 1, 0, 1, 1, 0])
    mixed = replace(split, sources=("a", "b"))
    vars(mixed)["source_of"] = of  # one shard here; a packed folder has one for every source
    found = validation_of(model, in_order(mixed, 16, PAD), micro_batch=3)
    for number, name in enumerate(mixed.sources):
        nats = count = 0.0
        for start, length in zip(split.starts[of == number], split.lengths[of == number], strict=True):
            document = torch.from_numpy(stream[start : start + length + 1].astype(np.int64))
            with torch.no_grad():
                logits = model.logits(document[None, :-1])[0]
            nats += F.cross_entropy(logits, document[1:], reduction="sum").item()
            count += int(length)
        assert found.num_targets[name] == count
        assert found.nats[name] == pytest.approx(nats, rel=1e-6)
        assert found.figures()[f"loss_{name}"] == pytest.approx(nats / count, rel=1e-6)


def test_equals_every_document_scored_alone(model):
    """Plain cross-entropy of each document's tokens and its closing separator, one document at a time."""
    split = split_of(11, 3, 0, 15, 7, 1)
    stream = split.ids(0, int(split.lengths.sum()) + 1)
    nats = 0.0
    with torch.no_grad():
        for start, length in zip(split.starts, split.lengths, strict=True):
            document = torch.from_numpy(stream[start : start + length + 1].astype(np.int64))
            nats += F.cross_entropy(model.logits(document[None, :-1])[0], document[1:], reduction="sum").item()
    found = validation_of(model, in_order(split, 16, PAD))
    assert found.num_targets == {"text": len(stream) - 1}
    assert found.nats["text"] == pytest.approx(nats, rel=1e-6)


def test_micro_batches_change_nothing(model):
    windows = in_order(split_of(11, 3, 0, 15, 7, 1, 9, 9), 16, PAD)
    found = [validation_of(model, windows, size, num_bytes={"text": 100}) for size in (1, 2, 3, 100)]
    assert len({v.num_targets["text"] for v in found}) == 1
    assert all(v.nats["text"] == pytest.approx(found[0].nats["text"], rel=1e-6) for v in found)
    assert found[0].bits_per_byte == pytest.approx(found[0].nats["text"] / (100 * math.log(2)))


def test_ranks_share_the_windows_without_overlap(model):
    """What three ranks add up to is what one finds; a rank with no window adds nothing."""

    class Alone(Ranks):
        def sum(self, *values):
            return list(values)

    windows = in_order(split_of(11, 3, 0, 15, 7, 1, 9, 9), 16, PAD)
    whole = validation_of(model, windows)
    for world in (3, 50):
        parts = [validation_of(model, windows, 1, Alone(rank, world)) for rank in range(world)]
        assert sum(v.num_targets["text"] for v in parts) == whole.num_targets["text"]
        assert sum(v.nats["text"] for v in parts) == pytest.approx(whole.nats["text"], rel=1e-6)


def test_no_gradient_and_no_change(model):
    before = {n: t.clone() for n, t in model.state_dict().items()}
    state = torch.get_rng_state()
    validation_of(model, in_order(split_of(5, 6), 16, PAD))
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters()) and torch.equal(state, torch.get_rng_state())


def test_every_parting_is_complete_and_sums_what_it_names(model):
    """Each bucket against documents scored alone, piece by piece; and all buckets of a kind are the whole."""
    lengths = (11, 3, 0, 15, 70, 1, 9, 300, 62, 63, 64)
    split, window = split_of(*lengths), 20
    classes = np.random.default_rng(1).integers(0, len(CLASSES) - 1, ROWS)  # of the last one there is none
    stream = split.ids(0, int(split.lengths.sum()) + 1).astype(np.int64)
    wanted = {"at": Counter(), "length": Counter(), "class": Counter()}
    numbers = {kind: Counter() for kind in wanted}
    for start, length in zip(split.starts, split.lengths, strict=True):
        for begin in range(0, int(length), window):
            piece = torch.from_numpy(stream[start + begin : start + min(begin + window, length) + 1])
            with torch.no_grad():
                losses = F.cross_entropy(model.logits(piece[None, :-1])[0], piece[1:], reduction="none").tolist()
            for position, (target, nats) in enumerate(zip(piece[1:].tolist(), losses, strict=True)):
                at = next(i for i in reversed(range(8)) if position >= i * window // 8)
                end = (at + 1) * window // 8 - 1
                size = next(s for s in ("0000_0063", "0064_0255", "0256_1023") if length <= int(s[5:]))
                labels = {
                    "at": f"{at * window // 8:04}_{end:04}", "length": size, "class": CLASSES[classes[target]]
                }  # fmt: skip
                for kind, label in labels.items():
                    wanted[kind][label] += nats
                    numbers[kind][label] += 1
    found = validation_of(model, in_order(split, window, PAD), micro_batch=3, classes=classes)
    assert found.parts.keys() == wanted.keys()
    for kind, buckets in found.parts.items():
        assert sum(n for _, n in buckets.values()) == found.num_targets["text"] == len(stream) - 1
        assert sum(nats for nats, _ in buckets.values()) == pytest.approx(found.nats["text"], rel=1e-12)
        assert {label: n for label, (_, n) in buckets.items() if n} == numbers[kind]
        for label, nats in wanted[kind].items():
            assert buckets[label][0] == pytest.approx(nats, rel=1e-5)
            mean = found.figures()[f"loss_{kind}_{label}"]
            assert mean == buckets[label][0] / numbers[kind][label]
    assert len(found.parts["at"]) == 8 and len(numbers["length"]) == 3 and len(numbers["class"]) == 5
    assert len(found.figures()) == 1 + 8 + 3 + 5  # nothing of a bucket without a target


@pytest.mark.parametrize("window", [2, 3, 7, 8, 9, 256, 2048])
def test_positions_are_named_once_in_any_window(model, window):
    found = validation_of(model, in_order(split_of(3), window, PAD)).parts["at"]
    edges = [(int(label[:4]), int(label[5:])) for label in found]
    assert edges[0][0] == 0 and edges[-1][1] == window - 1 and len(edges) == min(window, 8)
    assert all(end + 1 == begin for (_, end), (begin, _) in itertools.pairwise(edges))
