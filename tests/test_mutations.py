"""Breaks the program in one line at a time; the tests of the law that this breaks must notice.

    pytest -m mutation -s

prints the table of mutants. Each is a copy of the checkout with one replacement, in which the named tests run.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent


class Mutant(NamedTuple):
    """One line of the program, what becomes of it, and the tests that must fail."""

    law: str
    what: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]


TRAINER, BATCHES, LOSS = "tests/test_trainer.py", "tests/data/test_batches.py", "tests/model/test_loss.py"
DECODER, ATTENTION = "tests/model/test_transformer.py", "tests/model/test_attention.py"
TOKENIZER, RUN = "tests/test_tokenizer.py", "tests/test_run_folder.py"
CHECKPOINT, EVALUATE = "tests/test_checkpoint.py", "tests/test_evaluate.py"

MUTANTS = [
    Mutant(
        "1", "divide per micro-batch", "stack/trainer.py",
        "(total * (self.ranks.world / count)).backward()",
        "(total / max(1, batch.num_targets) / len(micro_batches)).backward()",
        (TRAINER,),
    ),
    Mutant(
        "1", "log the mean of micro-batch losses", "stack/trainer.py",
        "losses.append(total.detach())",
        "losses.append(total.detach() / max(1, batch.num_targets) * count / len(micro_batches))",
        (TRAINER,),
    ),
    Mutant(
        "1", "forget that DDP averages", "stack/trainer.py",
        "(total * (self.ranks.world / count)).backward()",
        "(total / count).backward()",
        ("tests/test_distributed.py",),
    ),
    Mutant(
        "1", "shift a label", "stack/data/batches.py",
        "targets[row, begin:end] = stream[1:]",
        "targets[row, begin:end] = stream[:-1]",
        (BATCHES,),
    ),
    Mutant(
        "1", "validation as a mean of means", "stack/evaluate.py",
        "count += batch.num_targets",
        "count += batch.num_targets; nats = nats / batch.num_targets; count = 1",
        (EVALUATE,),
    ),
    Mutant(
        "2", "step with nothing to learn", "stack/trainer.py",
        "if count == 0:",
        "count = max(1, count)\n        if count == 0:",
        (TRAINER,),
    ),
    Mutant(
        "2", "take a step that is not finite", "stack/trainer.py",
        "taken = math.isfinite(loss) and math.isfinite(norm)",
        "taken = True",
        (TRAINER,),
    ),
    Mutant(
        "2", "learn from ignored targets", "stack/model/loss.py",
        "return losses * supervised",
        "return losses",
        (LOSS,),
    ),
    Mutant(
        "3", "leak a segment", "stack/model/attention.py",
        "found += [(length, False) for length in lengths]",
        "found += [(sum(lengths), False)]",
        (ATTENTION,),
    ),
    Mutant(
        "3", "leak a segment under the mask", "stack/model/attention.py",
        "same = ids[:, None, :, None] == ids[:, None, None, :]",
        "same = ids[:, None, :, None] >= ids[:, None, None, :]",
        (ATTENTION,),
    ),
    Mutant(
        "3", "positions run on", "stack/data/batches.py",
        "positions[row, begin:end] = count[:length]",
        "positions[row, begin:end] = count[begin:end]",
        (BATCHES,),
    ),
    Mutant(
        "4", "drop the tie", "stack/model/embedding.py",
        "rows = F.embedding(ids, self.weight)",
        "rows = F.embedding(ids, self.weight.detach())",
        (DECODER,),
    ),
    Mutant(
        "5", "forget the moments", "stack/trainer.py",
        "self.optimizers.load_moments(loaded.moments)",
        "pass",
        (RUN,),
    ),
    Mutant(
        "5", "restore the step late", "stack/trainer.py",
        "self.state = State(**loaded.state)",
        "self.state = State(**loaded.state | {'step': loaded.state['step'] - 1})",
        (RUN,),
    ),
    Mutant(
        "5", "one order for every epoch", "stack/data/batches.py",
        "permutation(self.num_windows, self._seed, 1, epoch)",
        "permutation(self.num_windows, self._seed, 1, 0)",
        (BATCHES,),
    ),
    Mutant(
        "5", "a dry step that leaves a trace", "stack/trainer.py",
        "self.optimizers.load_moments(moments)",
        "pass",
        (TRAINER,),
    ),
    Mutant(
        "5", "rows beyond the checkpoint stay", "stack/tracking.py",
        "file.truncate(offset)",
        "pass",
        (RUN,),
    ),
    Mutant(
        "8", "an alphabet of the text alone", "stack/tokenizer.py",
        "initial_alphabet=_byte_characters(),",
        "initial_alphabet=[],",
        (TOKENIZER,),
    ),
    Mutant(
        "7", "text becomes control", "stack/tokenizer.py",
        "inner.encode_special_tokens = True",
        "inner.encode_special_tokens = False",
        (TOKENIZER,),
    ),
    Mutant(
        "10", "cast the angles", "stack/model/transformer.py",
        "angle = positions.float()[..., None, None] * frequency",
        "angle = (positions.float()[..., None, None] * frequency).bfloat16().float()",
        (DECODER,),
    ),
    Mutant(
        "10", "sum chunks in the GEMM's dtype", "stack/model/loss.py",
        "torch.zeros_like(w, dtype=wide)",
        "torch.zeros_like(w)",
        (LOSS,),
    ),
    Mutant(
        "10", "softmax in the GEMM's dtype", "stack/model/loss.py",
        "x = product.to(wide)",
        "x = product.clone()",
        (LOSS,),
    ),
    Mutant(
        "-", "believe a damaged checkpoint", "stack/checkpoint.py",
        "if actual != file.sha256:",
        "if False:",
        (CHECKPOINT,),
    ),
]  # fmt: skip


@pytest.mark.mutation
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.what.replace(" ", "-"))
def test_mutant_is_killed(mutant: Mutant, tmp_path: Path) -> None:
    for folder in ("stack", "conf", "tests", "scripts"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    path = tmp_path / mutant.file
    text = path.read_text(encoding="utf-8")
    assert text.count(mutant.before) == 1, f"{mutant.file} has {text.count(mutant.before)} places {mutant.before!r}"
    path.write_text(text.replace(mutant.before, mutant.after), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *mutant.tests],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        timeout=600,
    )
    failed = [line.split(" - ")[0].removeprefix("FAILED ") for line in done.stdout.splitlines() if "FAILED " in line]
    print(f"\n| {mutant.law} | {mutant.what} | {mutant.file} | killed by {', '.join(failed) or 'NOTHING'} |")
    assert done.returncode == 1 and failed, (
        f"{mutant.what} was not noticed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    )
