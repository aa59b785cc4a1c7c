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


TRAINER, BATCHES, LOSS = "tests/training/test_trainer.py", "tests/data/test_batches.py", "tests/model/test_loss.py"
DECODER, ATTENTION = "tests/model/test_decoder.py", "tests/model/test_attention.py"
TOKENIZER, RUN = "tests/text/test_tokenizer.py", "tests/training/test_run_folder.py"
CHECKPOINT, EVALUATE = "tests/checkpoint/test_checkpoint.py", "tests/evaluation/test_validation.py"
VOCABULARY, CONVERSATION = "tests/vocabulary/test_growth.py", "tests/text/test_conversation.py"
ROWS = "tests/observe/test_table.py"

MUTANTS = [
    Mutant(
        "1", "divide per micro-batch", "stack/training/trainer.py",
        "(total * (self.ranks.world / count)).backward()",
        "(total / max(1, batch.num_targets) / len(micro_batches)).backward()",
        (TRAINER,),
    ),
    Mutant(
        "1", "log the mean of micro-batch losses", "stack/training/trainer.py",
        "losses.append(total.detach())",
        "losses.append(total.detach() / max(1, batch.num_targets) * count / len(micro_batches))",
        (TRAINER,),
    ),
    Mutant(
        "1", "forget that DDP averages", "stack/training/trainer.py",
        "(total * (self.ranks.world / count)).backward()",
        "(total / count).backward()",
        ("tests/parallel/test_distributed.py",),
    ),
    Mutant(
        "1", "shift a label", "stack/data/batches.py",
        "targets[row, begin:end] = stream[1:]",
        "targets[row, begin:end] = stream[:-1]",
        (BATCHES,),
    ),
    Mutant(
        "1", "validation as a mean of means", "stack/evaluation/validation.py",
        "sums[kind][1] += np.bincount(of[supervised], minlength=size)",
        "n = np.bincount(of[supervised], minlength=size); sums[kind][0] /= np.maximum(n, 1); sums[kind][1] += n > 0",
        (EVALUATE,),
    ),
    Mutant(
        "2", "step with nothing to learn", "stack/training/trainer.py",
        "if count == 0:",
        "count = max(1, count)\n        if count == 0:",
        (TRAINER,),
    ),
    Mutant(
        "2", "take a step that is not finite", "stack/training/trainer.py",
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
        "4", "the input path of one rank alone", "stack/observe/table.py",
        "into = self.ranks.add(self._input)",
        "into = self._input * self.ranks.world",
        (ROWS,),
    ),
    Mutant(
        "4", "the input path of the last micro-batch alone", "stack/observe/table.py",
        "self._input.index_add_(0, ids",
        "self._input.zero_().index_add_(0, ids",
        (ROWS,),
    ),
    Mutant(
        "4", "a look that leaves a trace", "stack/observe/table.py",
        "return into, self.weight.grad - into",
        "return into, self.weight.grad.sub_(into)",
        (ROWS,),
    ),
    Mutant(
        "1", "a part by the row that is read", "stack/evaluation/validation.py",
        "classes[batch.targets.numpy().clip(0)]",
        "classes[batch.ids.numpy()]",
        (EVALUATE,),
    ),
    Mutant(
        "5", "forget the moments", "stack/training/restore.py",
        "step.optimizers.load_moments(loaded.moments)",
        "pass",
        (RUN,),
    ),
    Mutant(
        "5", "restore the step late", "stack/training/state.py",
        "values.pop(entry.name) for entry",
        "values.pop(entry.name) - (entry.name == 'step') for entry",
        (RUN,),
    ),
    Mutant(
        "5", "one order for every epoch", "stack/data/batches.py",
        "permutation(self.num_windows, self._seed, 1, epoch)",
        "permutation(self.num_windows, self._seed, 1, 0)",
        (BATCHES,),
    ),
    Mutant(
        "5", "a dry step that leaves a trace", "stack/training/length.py",
        "step.optimizers.load_moments(moments)",
        "pass",
        (TRAINER,),
    ),
    Mutant(
        "5", "rows beyond the checkpoint stay", "stack/tracking/metrics.py",
        "file.truncate(offset)",
        "pass",
        (RUN,),
    ),
    Mutant(
        "8", "an alphabet of the text alone", "stack/text/bpe.py",
        "initial_alphabet=byte_characters(),",
        "initial_alphabet=[],",
        (TOKENIZER,),
    ),
    Mutant(
        "7", "text becomes control", "stack/text/tokenizer.py",
        "inner.encode_special_tokens = True",
        "inner.encode_special_tokens = False",
        (TOKENIZER,),
    ),
    Mutant(
        "10", "cast the angles", "stack/model/decoder.py",
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
        "x = product if dtype == wide else wide_room[: len(some)].copy_(product)",
        "x = product.clone()",
        (LOSS,),
    ),
    Mutant(
        "6", "reset the step", "stack/vocabulary/migrate.py",
        "    return grown, moved",
        "    return grown, moved | {k: v * 0 for k, v in moments.items() if k.startswith('step')}",
        (VOCABULARY,),
    ),
    Mutant(
        "6", "re-initialize an old row", "stack/vocabulary/migrate.py",
        "new[list(growth.initialized)] = value",
        "new[[*growth.initialized, 7]] = value",
        (VOCABULARY,),
    ),
    Mutant(
        "6", "average reserved rows too", "stack/vocabulary/change.py",
        "if index not in dead)",
        "if True)",
        (VOCABULARY,),
    ),
    Mutant(
        "6", "moments of new rows at the mean", "stack/vocabulary/migrate.py",
        "zero = torch.zeros((), dtype=rows.tensor.dtype)",
        "zero = mean",
        (VOCABULARY,),
    ),
    Mutant(
        "6", "fewer rows than the base", "stack/vocabulary/change.py",
        "-(-max(num_rows, tokenizer.vocab_size + len(added))",
        "-(-max(0, tokenizer.vocab_size + len(added))",
        (VOCABULARY,),
    ),
    Mutant(
        "7", "encode content with specials on", "stack/text/conversation.py",
        "            ids += own\n",
        "            own = [tokenizer.control[piece.text]] if piece.text in tokenizer.control else own\n"
        "            ids += own\n",
        (CONVERSATION,),
    ),
    Mutant(
        "7", "a control token that text can spell", "stack/text/tokenizer.py",
        'token | {"special": True}',
        "token",
        (TOKENIZER,),
    ),
    Mutant(
        "9", "shift the mask by one", "stack/data/batches.py",
        "split.supervised(start + 1, length)",
        "split.supervised(start, length)",
        (BATCHES,),
    ),
    Mutant(
        "9", "drop end-of-turn", "stack/text/conversation.py",
        "Segment(END_OF_TURN, True, supervised)",
        "Segment(END_OF_TURN, True, False)",
        (CONVERSATION,),
    ),
    Mutant(
        "9", "merge a border", "stack/text/conversation.py",
        "texts = iter(tokenizer.encode_batch([piece.text for some in pieces for piece in some if not piece.control]))",
        'texts = iter([tokenizer.encode("\\n" + p.text)[1:] for some in pieces for p in some if not p.control])',
        (CONVERSATION,),
    ),
    Mutant(
        "9", "learn a turn of weight 0", "stack/text/messages.py",
        ' and message.get("weight", 1) == 1',
        "",
        (CONVERSATION,),
    ),
    Mutant(
        "-", "the first stop alone", "stack/model/huggingface.py",
        "return stops if len(stops) > 1 else stops[0]",
        "return stops[0]",
        (CHECKPOINT,),
    ),
    Mutant(
        "-", "believe a damaged checkpoint", "stack/checkpoint/format.py",
        "if actual != file.sha256:",
        "if False:",
        (CHECKPOINT,),
    ),
    Mutant(
        "-", "believe what was written", "stack/checkpoint/format.py",
        "if not same or file.read(1):",
        "if file.read(1):",
        (CHECKPOINT,),
    ),
    Mutant(
        "-", "believe a file that was just written", "stack/checkpoint/format.py",
        "if max(state[-2:]) + SETTLED_NS < now:",
        "if True:",
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
    # An error is one of a fixture, in which the program refuses what it made; one of collection would exit with 2.
    noticed = [
        line.split(" - ")[0].split(" ", 1) for line in done.stdout.splitlines() if line[:6] in ("FAILED", "ERROR ")
    ]
    failed = [test for _, test in noticed]
    print(f"\n| {mutant.law} | {mutant.what} | {mutant.file} | killed by {', '.join(failed) or 'NOTHING'} |")
    assert done.returncode == 1 and failed, (
        f"{mutant.what} was not noticed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    )
