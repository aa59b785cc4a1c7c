"""stack.training.trainer: laws 1 and 2 on one step, the dry step, lengths, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from steps import Spy, assert_close, grouped, norm_of, reference, rows, snapshot

from stack import checkpoint, job
from stack.core.errors import UserError
from stack.training import run_folder
from stack.training.hooks import BadSteps
from stack.training.length import DryStep, num_steps
from stack.training.optim import lr_factor

SUPERVISED = (1, 2, 3, 10)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One corpus and its packed data for the whole module."""
    return tmp_path_factory.mktemp("trainer")


@pytest.mark.parametrize("impl", ["full", "checkpoint", "fused"])
def test_accumulation_changes_neither_loss_nor_gradient_nor_norm(root: Path, impl: str) -> None:
    c = tiny.configure(*tiny.settings(root, "train.clip=0", f"train.loss={impl}", "train.chunk_tokens=7"))
    trainer = tiny.trainer(c)
    loss, gradient = reference(trainer, rows(*SUPERVISED))
    spy = Spy(trainer)
    for size in (1, 2, 4):
        result = trainer.step(0, grouped(rows(*SUPERVISED), size), 1.0)
        assert result.taken and result.tokens == sum(SUPERVISED)
        assert result.loss == pytest.approx(loss, rel=1e-6)
        assert result.norm == pytest.approx(norm_of(gradient), rel=1e-6)
        assert_close(spy.gradients, gradient)


def test_clipping_scales_the_gradient_of_the_whole_batch(root: Path) -> None:
    trainer = tiny.trainer(tiny.configure(*tiny.settings(root, "train.clip=0.01")))
    _, gradient = reference(trainer, rows(*SUPERVISED))
    spy = Spy(trainer)
    result = trainer.step(0, rows(*SUPERVISED), 1.0)
    assert result.norm == pytest.approx(norm_of(gradient), rel=1e-6)  # before clipping
    assert norm_of(spy.gradients) == pytest.approx(0.01, rel=1e-4)


def test_a_masked_micro_batch_adds_exactly_nothing(root: Path) -> None:
    trainer = tiny.trainer(tiny.configure(*tiny.settings(root)))
    spy = Spy(trainer)
    alone = trainer.step(0, rows(3), 1.0)
    gradients = spy.gradients
    (masked,) = rows(0)
    for batches in ([*rows(3), masked], [masked, *rows(3)], [*rows(3), trainer.train.padding()]):
        assert trainer.step(0, batches, 1.0) == alone
        assert all(torch.equal(spy.gradients[name], gradients[name]) for name in gradients)


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_a_step_with_nothing_to_learn_is_skipped(root: Path, kind: str) -> None:
    c = tiny.configure(*tiny.settings(root, f"optim={kind}", "optim.table_decay=0.1"))
    trainer = tiny.trainer(c)
    trainer.step(0, rows(3), 1.0)
    before = snapshot(trainer)
    result = trainer.step(1, rows(0, 0), 1.0)
    trainer.moment(result)
    assert not result.taken and snapshot(trainer) == before
    assert (trainer.state.skipped_steps, trainer.state.bad_in_a_row, trainer.state.step) == (1, 0, 1)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_changes_nothing_and_too_many_end_the_run(root: Path, value: float) -> None:
    trainer = tiny.trainer(tiny.configure(*tiny.settings(root, "train.max_bad_steps=3")))
    trainer.step(0, rows(3), 1.0)
    hook = trainer.model.model.norm.register_forward_hook(lambda module, inputs, output: output * value)
    before = snapshot(trainer)
    alerts: list[str] = []
    limit = BadSteps(3, lambda title, text: alerts.append(text), lambda: None)
    for bad in (1, 2):
        limit.after_step(trainer.moment(trainer.step(bad, rows(3), 1.0)))
        assert snapshot(trainer) == before
        assert (trainer.state.skipped_steps, trainer.state.bad_in_a_row, trainer.state.tokens) == (bad, bad, 0)
    with pytest.raises(UserError, match=r"3 steps in a row .* last good checkpoint is none"):
        limit.after_step(trainer.moment(trainer.step(3, rows(3), 1.0)))
    assert len(alerts) == 1 and "3 steps in a row are not finite" in alerts[0]
    hook.remove()
    limit.after_step(trainer.moment(trainer.step(4, rows(3), 1.0)))
    assert (trainer.state.skipped_steps, trainer.state.bad_in_a_row, trainer.state.tokens) == (3, 0, 3)
    assert snapshot(trainer) != before


def test_a_gradient_that_is_not_finite_skips_the_step_though_the_loss_is(root: Path) -> None:
    trainer = tiny.trainer(tiny.configure(*tiny.settings(root)))
    trainer.step(0, rows(3), 1.0)
    before = snapshot(trainer)
    handle = trainer.model.model.norm.weight.register_hook(lambda gradient: gradient * float("nan"))
    result = trainer.step(1, rows(3), 1.0)
    handle.remove()
    assert not result.taken and result.loss == result.loss and snapshot(trainer) == before


def test_a_ragged_last_step_is_normalized_by_its_own_tokens(root: Path) -> None:
    probe = tiny.trainer(tiny.configure(*tiny.settings(root)))
    epochs = 10 / probe.train.num_windows
    more = ("name=ragged", "train.steps=null", f"train.epochs={epochs}", "train.global_batch=4", "track.every=1")
    c = tiny.configure(*tiny.settings(root, *more))
    assert tiny.run(c) == 0
    found = tiny.rows(root / "runs/ragged")
    steps = [row for row in found if "train/loss" in row]
    assert [row["step"] for row in steps] == [1, 2, 3]
    factors = [lr_factor(c.schedule, s, 3) for s in range(3)]
    assert [row["optim/lr_table"] for row in steps] == [c.optim.lr * factor for factor in factors]

    # The same three steps by hand: the last one has two windows, and their mean is over their own tokens.
    trainer = tiny.trainer(c)
    windows = [trainer.train.windows_of(step) for step in range(3)]
    assert [len(w) for w in windows] == [4, 4, 2]
    assert len({int(w) for step in windows for w in step}) == 10  # 10 of one epoch
    for step in (0, 1):
        trainer.step(step, trainer.micro_batches(step), factors[step])
    batches = [trainer.train.batch([number]) for number in windows[2]]
    nats = sum(trainer.model(b.ids, b.positions, tiny.segments(b), b.targets, trainer.loss).item() for b in batches)
    tokens = sum(b.num_targets for b in batches)
    assert steps[-1]["train/loss"] == pytest.approx(nats / tokens, rel=1e-6)
    assert [row["tokens"] for row in steps][-1] - [row["tokens"] for row in steps][-2] == tokens


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_the_dry_step_leaves_no_trace(root: Path, kind: str) -> None:
    trainer = tiny.trainer(tiny.configure(*tiny.settings(root, f"optim={kind}")))
    torch.manual_seed(3)
    for begun in (False, True):  # before the first step, and with moments
        if begun:
            trainer.step(0, trainer.micro_batches(0), 1.0)
        before, random_state = snapshot(trainer), torch.get_rng_state()
        assert trainer.dry_step().seconds > 0
        assert snapshot(trainer) == before and torch.equal(torch.get_rng_state(), random_state)
        assert all(p.grad is None for p in trainer.model.parameters())


def test_the_step_after_a_dry_step_is_the_step_without_one(root: Path) -> None:
    found = []
    for dry in (False, True):
        trainer = tiny.trainer(tiny.configure(*tiny.settings(root)))
        if dry:
            trainer.dry_step()
        for step in range(2):
            result = trainer.step(step, trainer.micro_batches(step), 1.0)
        found.append((snapshot(trainer), result))
    assert found[0] == found[1]


def test_tokens_and_minutes_become_steps(root: Path) -> None:
    trainer = tiny.trainer(tiny.configure(*tiny.settings(root, "train.steps=null", "train.tokens=1000")))
    t, train = trainer.config.train, trainer.train
    steps = num_steps(t, train, 1.0, print)
    per_step = train.split.num_targets / train.num_windows * 3
    assert (steps - 1) * per_step < 1000 <= steps * per_step
    t = replace(t, tokens=None, minutes=2.0)
    assert num_steps(t, train, 1.5, print) == 80
    assert num_steps(t, train, 1e9, print) == 1


def test_train_minutes_is_fixed_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = tiny.settings(root, "name=minutes", "train.steps=null", "train.minutes=0.01")
    c = tiny.configure(*settings)
    steps = tiny.trainer(c).begin().steps
    saved = run_folder.read_config(root / "runs/minutes")
    assert saved is not None and saved["resolved"]["steps"] == steps >= 1
    assert run_folder.start_of(root / "runs/minutes", c, print).steps == steps
    faster = lambda *_: DryStep(1e-9, {})  # noqa: E731  a machine that is so much faster
    monkeypatch.setattr(job, "dry_step", faster)
    assert tiny.trainer(c).begin(run_folder.start_of(root / "runs/minutes", c, print)).steps == steps
    longer = tiny.configure(*settings, "train.minutes=0.02")
    assert run_folder.start_of(root / "runs/minutes", longer, print).steps is None


def test_a_checkpoint_of_another_vocabulary_or_other_data_is_refused(root: Path, tmp_path: Path) -> None:
    assert tiny.run(tiny.configure(*tiny.settings(root, "name=first", "train.steps=1"))) == 0
    saved = str(root / "runs/first/checkpoints/step-00000001")
    own = checkpoint.verify(Path(saved))
    start = run_folder.ResumePoint(saved, False, 1, own.num_rows, own.vocabulary_digest, own.identity["packed"])
    tiny.corpus(tmp_path / "corpus.jsonl", seed=9)
    words = next((root / "data/tokenizers").glob("bpe-*"))
    other = tiny.trainer(tiny.configure(*tiny.settings(tmp_path, f"tokenizer.folder={words}")))
    with pytest.raises(UserError, match=r"other packed data: digest .* now .* name=NEW branch="):
        other.begin(start)
    saved = other.begin(replace(start, branched=True)).saved  # a branch may learn from other data …
    assert saved["step"] == 1 and saved["metrics_offset"] == 0 and saved["last"] == {}
    other = tiny.trainer(tiny.configure(*tiny.settings(tmp_path)))
    with pytest.raises(UserError, match=r"320 rows, digest .* has 320, digest .* give tokenizer.folder="):
        other.begin(replace(start, branched=True))  # … but with the same vocabulary


def test_metrics_have_every_step_and_the_validation(root: Path) -> None:
    more = ("name=metrics", "train.steps=5", "evaluate.every=2", "sample.every=4", "track.every=2")
    assert tiny.run(tiny.configure(*tiny.settings(root, *more))) == 0
    lines = [json.loads(line) for line in (root / "runs/metrics/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in lines if "train/loss" in row] == [2, 4, 5]
    assert [row["step"] for row in lines if "eval/bits_per_byte" in row] == [2, 4, 5]
    assert [row["step"] for row in lines if "samples/texts" in row] == [4, 5]
    assert all(text.startswith("the cat") for row in lines for text in row.get("samples/texts", []))
    keys = {"throughput/tokens_per_s", "throughput/waiting_share", "memory/peak_gb", "time/step_s"}
    assert all(keys <= row.keys() for row in lines if "train/loss" in row)
    loaded = checkpoint.load(root / "runs/metrics/checkpoints/step-00000005")
    assert loaded.manifest.metric == lines[-1]["eval/bits_per_byte"]


def test_a_validation_that_is_not_finite_is_recorded_and_saved(root: Path) -> None:
    more = ("name=nan", "evaluate.every=1", "checkpoint.every=1", "train.steps=2", "sample.prompts=[]")
    c = tiny.configure(*tiny.settings(root, *more))
    with tiny.spoiled(lambda output: output if torch.is_grad_enabled() else output * float("nan"), steps=(0, 1)):
        assert tiny.run(c) == 0
    rows = tiny.rows(root / "runs/nan")
    assert [row["eval/loss"] for row in rows if "eval/loss" in row] == ["nan", "nan"]
    loaded = checkpoint.load(root / "runs/nan/checkpoints/step-00000002")
    assert loaded.manifest.metric is None and loaded.state["last"] == {}
