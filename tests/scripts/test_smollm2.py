"""A real model of other people: SmolLM2-135M-Instruct, converted from its GGUF file. Downloads 98 MB."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from stack import checkpoint
from stack.checkpoint.open import Base, build, load_base
from stack.evaluation.generate import generate
from stack.model.decoder import Decoder
from stack.model.embedding import INPUT
from stack.vocabulary.measure import measure
from stack.vocabulary.migrate import migrate
from stack.vocabulary.tokens import grow_tokenizer

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
CHAT = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
# Half of a schoolbook, which the model knows by heart, and half of a story, which it cannot know.
PLAIN = """\
Water is one of the most important substances on Earth. It covers about 70 percent of the surface of the planet, \
and all living things need it to survive. The human body is made up of about 60 percent water. Water is used for \
drinking, cooking, cleaning, farming and many other purposes.

The water cycle describes how water moves between the land, the oceans and the atmosphere. When the sun heats the \
surface of the ocean, some of the water evaporates and rises into the air as water vapor. As the vapor rises, it \
cools and condenses into tiny droplets, which form clouds. When the droplets become too heavy, they fall back to \
the ground as rain or snow. Some of this water flows into rivers and lakes, and some of it soaks into the soil, \
where it is taken up by the roots of plants.

Plants use water, carbon dioxide and the energy of sunlight to make their own food. This process is called \
photosynthesis. It takes place in the leaves, which contain a green pigment called chlorophyll. During \
photosynthesis, plants release oxygen into the air, which animals and people need to breathe. Without plants, there \
would be no life on Earth as we know it.

The harbour lies on the north side of the island, where a long wall of stone keeps out the worst of the weather. In \
summer the ferries come twice a day, and the narrow street behind the market fills with visitors who want to see \
the lighthouse. In winter there is one boat a week, and when the wind is high there is none at all. The people who \
live here have learned to keep a full cupboard, a dry stack of wood and a good book for the dark evenings.

Most of the families have fished these waters for as long as anyone can remember. My neighbour, who is nearly \
ninety, still walks down to the quay every morning to look at the sky. He says that he can tell from the colour of \
the clouds whether the herring will come close to the shore. I have never known him to be wrong by more than a day. \
His grandson has a computer on his boat that draws a map of the sea floor, but he calls the old man on the \
telephone before he sets out, and he writes down what he is told.
"""


@pytest.fixture(scope="module")
def folder() -> Path:
    """``data/smollm2``, fetched where it is not there yet."""
    script = [sys.executable, str(ROOT / "scripts/fetch_smollm2.py")]
    subprocess.run([*script, "--out", str(ROOT / "data/smollm2"), "--cache", str(ROOT / "data/cache")], check=True)
    return ROOT / "data/smollm2"


@pytest.fixture(scope="module")
def base(folder: Path) -> Base:
    return load_base(str(folder), "runs", print)


@pytest.fixture(scope="module")
def model(base: Base) -> Decoder:
    return build(base)


def test_shape_and_roles(base: Base) -> None:
    shape, words = base.model, base.tokenizer
    assert (shape.layers, shape.d, shape.heads, shape.kv_heads, shape.head_dim, shape.ffn) == (30, 576, 9, 3, 64, 1536)
    assert (shape.rope_theta, shape.norm_eps, shape.qk_norm, shape.context) == (1e5, 1e-5, False, 8192)
    assert base.num_rows == words.vocab_size == 49152 and sum(w.numel() for w in base.weights.values()) == 134_515_008
    assert (words.end_of_text, words.end_of_turn, words.pad, words.stops, words.unsampled) == (0, 2, 2, (2, 0), ())
    assert words.encode("In 1984, don't\n") == [788, 216, 33, 41, 40, 36, 28, 1326, 982, 198]
    assert words.decode(words.encode("\x04a")) == "\ufffda"


@torch.no_grad()
def test_logits_ids_and_nats(folder: Path, base: Base, model: Decoder) -> None:
    text = PLAIN
    theirs, other = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = base.tokenizer.encode(text)
    assert theirs(text).input_ids == ids and base.tokenizer.decode(ids) == text
    row = torch.tensor([ids])
    found, expected = model.logits(row), other(row).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    nats = torch.nn.functional.cross_entropy(found[0, :-1].double(), row[0, 1:]).item()
    print(f"{nats:.3f} nats per token on {len(ids)} tokens; logits differ by {(found - expected).abs().max():.1e}")
    # The text decides within this range (schoolbook 1.5, story 2.9); rows of q and k left in GGUF's order give 4.8.
    assert 1.4 < nats < 3.0


def prompt(base: Base, question: str) -> list[int]:
    """ChatML, made segment by segment."""
    encode, control = base.tokenizer.encode, base.tokenizer.control
    start, end = control["<|im_start|>"], control["<|im_end|>"]
    return [start, *encode(f"user\n{question}"), end, *encode("\n"), start, *encode("assistant\n")]


def test_the_capital_of_france(folder: Path, base: Base, model: Decoder) -> None:
    ids = prompt(base, "What is the capital of France?")
    template = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    assert "<|im_start|>" in template
    words = base.tokenizer
    (answer,) = generate(model, [ids], tokens=30, stops=words.stops, banned=words.unsampled)
    print(words.decode(answer))
    assert "Paris" in words.decode(answer) and answer[-1] == words.end_of_turn


def test_growth(base: Base, model: Decoder, tmp_path: Path) -> None:
    words, growth = grow_tokenizer(base.tokenizer, base.num_rows, CHAT, "{{ bos_token }}", tmp_path)
    assert [text for _, text in growth.added[:4]] == list(CHAT[2:]) and not growth.renamed
    assert (growth.old_rows, growth.new_rows, len(growth.initialized), len(growth.live)) == (49152, 49216, 64, 49152)
    weights, moments = migrate(growth, base.weights, base.moments)
    assert torch.equal(weights[INPUT][:49152], base.weights[INPUT]) and moments == {}
    grown = Decoder(base.model, growth.new_rows)
    checkpoint.load_weights_into(grown, weights)
    found = measure(growth, model, grown, [[words.end_of_text, *words.encode(PLAIN)], prompt(base, "How are you?")])
    print(growth.summary(), found)
    assert 0 < found["kl"] <= found["bound"] == math.log1p(64 / 49152)
    theirs = AutoTokenizer.from_pretrained(words.folder)
    assert theirs(PLAIN).input_ids == base.tokenizer.encode(PLAIN)
    assert len(theirs) == 49216 and theirs.eos_token_id == 2
    (answer,) = generate(grown, [prompt(base, "What is the capital of France?")], tokens=30, stops=words.stops,
                         banned=words.unsampled)  # fmt: skip
    assert "Paris" in words.decode(answer)
