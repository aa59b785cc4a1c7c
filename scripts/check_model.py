"""Hold a finished run against two others: Hugging Face's transformers on the same folder, and xz on the same text.

    python scripts/check_model.py runs/laptop

reads the newest checkpoint of the run with ``AutoModelForCausalLM``, compares its logits at every position of a few
texts and 64 greedy tokens with this program's, computes the validation bits per byte from transformers' own
logits, one document piece at a time, and compares it with the run's own figure. ``xz -9``
compresses the held-out text, which says what a compressor that learned no English needs. The result is kept in
``runs/NAME/check.json``; a second call for the same checkpoint prints it.
"""

from __future__ import annotations

import json
import lzma
import math
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from stack import checkpoint
from stack.config.schema import Model
from stack.core.errors import UserError
from stack.data.batches import IGNORED, Windows, in_order
from stack.data.packed import Split, open_packed
from stack.evaluation.generate import generate
from stack.model.decoder import Decoder
from stack.text import tokenizer
from stack.text.tokenizer import Tokenizer
from stack.training.run_folder import read_config

TOLERANCE = 1e-4  # of bits per byte, and of a logit


def main(run: Path) -> int:
    """Prints the table; returns 0 if both figures agree, 1 if not, 2 if there is nothing to check."""
    folder = checkpoint.newest(run / "checkpoints", print, owner=False)
    saved = read_config(run)
    if folder is None or saved is None:
        raise UserError(f"{run}: there is no finished checkpoint to check; train first: python -m stack.train")
    manifest = json.loads((folder / "manifest.json").read_bytes())
    key = manifest["files"]["model.safetensors"]["sha256"]
    kept = run / "check.json"
    if kept.exists() and (result := json.loads(kept.read_bytes()))["model"] == key:
        return report(run, folder, manifest, result)
    packed = open_packed(Path(manifest["identity"]["packed_folder"]))
    split = packed.split("validation")
    if not split.num_documents:
        print("nothing is held out: no bits per byte to compare; logits and answers on text of training", flush=True)
    words = tokenizer.load(folder)
    windows = in_order(split, saved["train"]["window"], words.pad)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    print(f"checking {folder} with transformers: {split.num_targets:,} targets", flush=True)
    text = texts(split, words)
    own = Decoder(Model(**saved["model"]), words.vocab_size)
    checkpoint.load_weights_into(own, checkpoint.load(folder).weights)
    prompts = saved["sample"]["prompts"]
    shown = text[:3] or texts(packed.split("train"), words, 3)
    difference, equal = compare(own, model, words, shown, prompts)
    print(against(difference, equal, len(prompts)), flush=True)
    result = {
        "model": key,
        "logits": difference,
        "greedy": equal,
        "prompts": len(prompts),
        "bytes": split.num_bytes,
    }
    if text:
        result |= {
            "ours": json.loads((folder / "training/state.json").read_bytes())["last"]["bits_per_byte"],
            "transformers": total_nats(model, windows) / (math.log(2) * split.num_bytes),
            "xz": 8 * len(lzma.compress("".join(text).encode(), preset=9)) / split.num_bytes,
        }
    kept.write_text(json.dumps(result, indent=1) + "\n")
    return report(run, folder, manifest, result)


def texts(split: Split, words: Tokenizer, count: int | None = None) -> list[str]:
    """The first ``count`` documents of a split, or all."""
    places = zip(split.starts[:count], split.lengths[:count], strict=True)
    return [words.decode(split.ids(start + 1, length - 1)) for start, length in places]


@torch.no_grad()
def compare(
    own: Decoder, theirs: torch.nn.Module, words: Tokenizer, texts: list[str], prompts: list[str]
) -> tuple[float, int]:
    """The largest difference of a logit over all positions of the texts, and how many greedy answers are equal."""
    differences = []
    for text in texts:
        ids = torch.tensor([[words.end_of_text, *words.encode(text)][: own.config.context]])
        differences.append((own.logits(ids) - theirs(ids).logits).abs().max().item())
    equal = 0
    for prompt in prompts:
        ids = [words.end_of_text, *words.encode(prompt)]
        answer = generate(own, [ids], tokens=64, stops=[words.end_of_text], banned=words.unsampled)[0]
        reference = theirs.generate(torch.tensor([ids]), max_new_tokens=64, do_sample=False)[0, len(ids) :]
        equal += answer == reference.tolist()
    return max(differences), equal


@torch.no_grad()
def total_nats(model: torch.nn.Module, windows: Windows) -> float:
    """Sum of the losses of all targets, every segment of every window as a sequence of its own."""
    pieces = []
    for number in range(windows.num_windows):
        batch = windows.batch([number])
        used = sum(batch.lengths[0])
        ids, targets = (x[0, :used].split(batch.lengths[0]) for x in (batch.ids, batch.targets))
        pieces += zip(ids, targets, strict=True)
    pieces.sort(key=lambda piece: len(piece[0]))
    nats, shown = 0.0, time.monotonic()
    for start in range(0, len(pieces), 16):
        if time.monotonic() - shown > 10:
            shown = time.monotonic()
            print(f"  validation by transformers: piece {start:,} of {len(pieces):,}", flush=True)
        some = pieces[start : start + 16]
        # Padding stands on the right, where a causal model does not look back from.
        ids = torch.nn.utils.rnn.pad_sequence([i for i, _ in some], batch_first=True)
        targets = torch.nn.utils.rnn.pad_sequence([t for _, t in some], batch_first=True, padding_value=IGNORED)
        logits = model(ids).logits.flatten(0, 1)
        nats += torch.nn.functional.cross_entropy(logits, targets.flatten(), reduction="sum").item()
    return nats


def against(difference: float, equal: int, prompts: int) -> str:
    """What the comparison with transformers found."""
    return (
        f"against transformers: logits differ by at most {difference:.1e}, "
        f"{equal} of {prompts} greedy answers of 64 tokens are equal"
    )


def report(run: Path, folder: Path, manifest: dict, result: dict) -> int:
    """The table, and where everything lies."""
    same = True
    close = result["logits"] <= TOLERANCE and result["greedy"] == result["prompts"]
    if "ours" in result:
        same = abs(result["ours"] - result["transformers"]) <= TOLERANCE
        print(f"\nvalidation, bits per byte of {result['bytes'] / 1e6:.2f} MB held-out text")
        print(f"  this run              {result['ours']:.4f}")
        verdict = "equal" if same else "DIFFERENT"
        print(f"  by transformers       {result['transformers']:.4f}  ({verdict} to {TOLERANCE})")
        print(f"  xz -9, for comparison {result['xz']:.4f}")
    print(against(result["logits"], result["greedy"], result["prompts"]))
    print("\nwhere everything lies")
    print(f"  model     {folder}  (any Hugging Face tool opens it)")
    print(f"  metrics   {run}/metrics.jsonl, settings {run}/config.yaml")
    print(f"  data      {manifest['identity']['packed_folder']}, corpus data/corpus")
    return 0 if same and close else 1


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python scripts/check_model.py runs/NAME")
    try:
        sys.exit(main(Path(sys.argv[1])))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
