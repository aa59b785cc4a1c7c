"""stack.observe.table: the gradient by path against the formula in float64, and a look that leaves no trace."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from steps import grouped, rows, snapshot
from tiny import together

from stack import checkpoint
from stack.core.ranks import Ranks, ranks
from stack.data.batches import IGNORED, Batch
from stack.model.embedding import INPUT
from stack.observe.table import BINS, histogram
from stack.text import tokenizer
from stack.vocabulary.classes import CLASSES, classify

SUPERVISED = (1, 2, 3, 10, 7, 16)
STEP = ("train.clip=0.1", "diagnostics.rows_every=1", "train.z_loss=0.01", "train.chunk_tokens=7")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One corpus and its packed data for the whole module."""
    return tiny.packed(tmp_path_factory.mktemp("rows"))


def watched(root: Path, *more: str, here: Ranks | None = None) -> tiny.Bench:
    """A trainer whose first steps are looked at, and whose table and norms are not those of the initialization."""
    trainer = tiny.trainer(tiny.configure(*tiny.settings(root, *STEP, *more)), here)
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in trainer.model.parameters():
            p.add_(torch.randn(p.shape, generator=draw) * 0.1)
    trainer.rows.steps = 100
    return trainer


def split_of(trainer: tiny.Bench, batches: list[Batch]) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of the table by path, as one step finds it."""
    inner, found = trainer.rows.gradient_paths, []

    def keep() -> tuple[torch.Tensor, torch.Tensor]:
        both = inner()
        found.append(tuple(x.double().clone() for x in both))
        return both

    trainer.rows.gradient_paths = keep  # type: ignore[method-assign]
    assert trainer.step(0, batches, 1.0).taken
    trainer.rows.gradient_paths = inner  # type: ignore[method-assign]
    return found[0]


def formula(trainer: tiny.Bench, batches: list[Batch]) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of an untied copy of the model, written out in float64: embedding and head apart."""
    m, z = trainer.model.config, trainer.config.train.z_loss
    w = {name: p.detach().double() for name, p in trainer.model.named_parameters()}
    embedding, head = (w[INPUT].clone().requires_grad_() for _ in range(2))

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + m.norm_eps).sqrt() * w[f"{name}.weight"]

    def turn(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angle = positions.double()[:, None] / m.rope_theta ** (torch.arange(m.head_dim // 2).double() / m.head_dim * 2)
        a, b = x.chunk(2, -1)  # [heads, T, head_dim / 2]
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)

    total = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        for ids, targets in zip(batch.ids, batch.targets, strict=True):
            place = torch.arange(len(ids))
            x = embedding[ids] * (math.sqrt(m.d) if m.scale_input else 1.0)
            for layer in range(m.layers):
                of = f"model.layers.{layer}."
                h = norm(x, of + "input_layernorm")
                q, k, v = (
                    (h @ w[f"{of}self_attn.{p}_proj.weight"].T).unflatten(-1, (-1, m.head_dim)).transpose(0, 1)
                    for p in "qkv"
                )
                q, k = (turn(norm(y, f"{of}self_attn.{p}_norm"), place) for y, p in ((q, "q"), (k, "k")))
                k, v = (y.repeat_interleave(m.heads // m.kv_heads, 0) for y in (k, v))
                scores = (q @ k.mT / math.sqrt(m.head_dim)).masked_fill(place[:, None] < place, -math.inf)
                x = x + (scores.softmax(-1) @ v).transpose(0, 1).flatten(1) @ w[f"{of}self_attn.o_proj.weight"].T
                h = norm(x, of + "post_attention_layernorm")
                gate, up = (h @ w[f"{of}mlp.{p}_proj.weight"].T for p in ("gate", "up"))
                x = x + (F.silu(gate) * up) @ w[f"{of}mlp.down_proj.weight"].T
            logits = norm(x, "model.norm") @ head.T
            if m.softcap is not None:
                logits = m.softcap * torch.tanh(logits / m.softcap)
            total = total + F.cross_entropy(logits, targets, reduction="sum")
            total = total + z * logits[targets != IGNORED].logsumexp(-1).square().sum()
    return torch.autograd.grad(total / sum(batch.num_targets for batch in batches), (embedding, head))


def assert_close(found: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> None:
    """Each path to 1e-6 of its own norm."""
    for a, b in zip(found, wanted, strict=True):
        assert b.norm() > 0 and (a - b).norm() <= 1e-6 * b.norm(), f"{((a - b).norm() / b.norm()).item():.2e}"


@pytest.mark.parametrize(
    ("impl", "model"),
    [
        ("full", ()),
        ("checkpoint", ("model.scale_input=true",)),
        ("fused", ("model.softcap=3.0",)),
        ("fused", ("model.scale_input=true", "model.softcap=3.0")),
    ],
)
def test_the_split_is_the_formula_of_two_paths(root: Path, impl: str, model: tuple[str, ...]) -> None:
    """In one batch, and under accumulation 3 and 6; before clipping, which would scale both."""
    trainer = watched(root, f"train.loss={impl}", *model)
    batches, start = rows(*SUPERVISED), {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    wanted = formula(trainer, batches)
    assert_close(split_of(trainer, batches), wanted)
    for size in (2, 6):
        checkpoint.load_weights_into(trainer.model, start)
        assert_close(split_of(trainer, grouped(batches, size)), wanted)


def _split(root: str, out: str) -> None:
    """On a rank: the split and the look at a step of which one rank has more than the other."""
    torch.set_num_threads(1)
    with ranks("ddp", "cpu") as here:
        trainer = watched(Path(root), "parallel=ddp", here=here)
        batches = rows(*SUPERVISED)
        mine = grouped(batches[:2], 1) if here.main else [*grouped(batches[2:], 4), trainer.train.padding()]
        both = split_of(trainer, mine)
        torch.save((both, trainer.look(trainer.result, mine)), f"{out}/{here.rank}.pt")


def test_two_ranks_find_what_one_process_finds(root: Path, tmp_path: Path) -> None:
    jobs = together(2, _split, str(root), str(tmp_path), folder=tmp_path)
    assert [job.poll() for job in jobs] == [0, 0], jobs[0].output() + jobs[1].output()
    (found, look), (other, nothing) = (torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in (0, 1))
    trainer, batches = watched(root), rows(*SUPERVISED)
    assert_close(found, formula(trainer, batches))
    assert all(torch.equal(a, b) for a, b in zip(found, other, strict=True)) and nothing == {}
    alone = trainer.look(trainer.step(0, grouped(batches, 3), 1.0), batches)
    assert alone.keys() == look.keys()
    plain = [key for key, value in alone.items() if not isinstance(value, dict)]
    assert [look[key] for key in plain] == pytest.approx([alone[key] for key in plain], rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_a_look_changes_no_bit_of_weights_and_moments(root: Path, kind: str) -> None:
    found = []
    for every in (0, 1, 2):
        trainer = tiny.trainer(
            tiny.configure(*tiny.settings(root, f"optim={kind}", "train.clip=0.1", f"diagnostics.rows_every={every}"))
        )
        trainer.rows.steps, looks = 100, 0
        for step in range(4):
            result = trainer.step(step, trainer.micro_batches(step), 1.0)
            looks += bool(trainer.look(result, []))
        assert looks == (4 // every if every else 0)
        found.append((snapshot(trainer), result))
    assert found[0] == found[1] == found[2]


def test_the_figures_are_those_of_their_definitions(root: Path) -> None:
    """Every statistic once more, by numpy from the tables before and after, full logits and the float64 formula."""
    trainer = watched(root)
    model, of = trainer.model, trainer.made.classes
    assert of is not None and len(set(of)) >= 3
    for step, batches in enumerate(steps := (rows(1, 2, 3, 10), rows(*SUPERVISED))):  # the second finds moments
        before = model.table.weight.detach().double().numpy().copy()
        gradients = dict(zip(("grad_input", "grad_output"), formula(trainer, batches), strict=True))
        mass = np.zeros(len(before))
        for batch in batches:
            hidden = model.hidden(batch.ids, batch.positions, tiny.segments(batch)).detach()
            chosen = hidden[batch.targets != IGNORED].double().numpy() @ before.T
            mass += (np.exp(chosen) / np.exp(chosen).sum(1, keepdims=True)).sum(0)
        mass /= sum(batch.num_targets for batch in batches)
        look = trainer.look(trainer.step(step, batches, 1.0), batches)
    after = model.table.weight.detach().double().numpy()
    moments = trainer.optimizers.moments()
    mean = after.mean(0)
    per_row = {
        "norm": np.linalg.norm(after, axis=1),
        "distance": np.linalg.norm(after - mean, axis=1),
        **{path: g.norm(dim=1).numpy() for path, g in gradients.items()},
        "second_moment": moments[f"exp_avg_sq/{INPUT}"].double().mean(1).numpy(),
        "update_ratio": np.linalg.norm(after - before, axis=1) / np.linalg.norm(before, axis=1),
    }
    statistics = {"mean": np.mean, "p50": np.median, "max": np.max, "min": np.min}
    statistics |= {f"p{q:02}": lambda x, q=q: np.sort(x)[round(q / 100 * (len(x) - 1))] for q in (5, 25, 75, 95)}
    groups = {"": np.ones(len(of), bool)} | {f"_{name}": of == i for i, name in enumerate(CLASSES) if (of == i).any()}
    wanted: dict[str, Any] = {}
    for what, values in per_row.items():
        names = ("min", "p50", "max") if what == "norm" else ("mean", "p50", "max")
        wanted |= {f"{what}_{s}{suffix}": statistics[s](values[m]) for s in names for suffix, m in groups.items()}
    wanted |= {f"mass{suffix}": mass[m].sum() for suffix, m in groups.items() if suffix}
    wanted |= {f"count{suffix}": m.sum() for suffix, m in groups.items() if suffix}
    wanted |= {f"{path}_norm": g.norm().item() for path, g in gradients.items()}
    wanted["mean_norm"] = np.linalg.norm(mean)
    for key, x in (("anisotropy", after), ("anisotropy_centred", after - mean)):
        squares = np.linalg.svd(x, compute_uv=False) ** 2
        wanted[key] = squares[0] / squares.sum()
    seen = {i for batches in steps for batch in batches for i in batch.ids.flatten().tolist()}
    wanted |= {"never_updated": 0, "never_input": len(of) - len(seen)}
    quartiles = [f"norm_p{q:02}{suffix}" for q in (5, 25, 75, 95) for suffix in groups]
    assert look.keys() == {f"rows/{key}" for key in (*wanted, *quartiles, "norm_histogram", "grad_output_histogram")}
    for key, value in wanted.items():
        assert look[f"rows/{key}"] == pytest.approx(value, rel=2e-5, abs=1e-9), key
    for suffix, m in groups.items():  # percentiles between the two values that they lie between
        values = np.sort(per_row["norm"][m])
        for q in (5, 25, 75, 95):
            place = q / 100 * (len(values) - 1)
            low, high = values[math.floor(place)], values[math.ceil(place)]
            assert low * (1 - 1e-5) <= look[f"rows/norm_p{q:02}{suffix}"] <= high * (1 + 1e-5)
    assert sum(value for key, value in look.items() if key.startswith("rows/mass_")) == pytest.approx(1, abs=1e-5)
    assert sum(look["rows/norm_histogram"]["counts"]) == len(of)
    edges = 10 ** np.array(look["rows/grad_output_histogram"]["edges"])
    assert (edges[0], edges[-1]) == pytest.approx(
        (per_row["grad_output"].min(), per_row["grad_output"].max()), rel=1e-4
    )


def test_what_was_an_input_is_counted_exactly_and_survives(root: Path) -> None:
    """Against the ids of the windows themselves, without padding; a resumed run goes on from the same rows."""
    more = ("train.steps=4", "checkpoint.every=2", "diagnostics.rows_every=1")
    c = tiny.configure(*tiny.settings(root, "name=inputs", *more))
    assert tiny.run(c) == 0
    train = tiny.trainer(c).train
    seen: set[int] = set()
    wanted = []
    for step in range(4):
        for window in train.windows_of(step):
            (lengths,), ids = train.batch([window]).lengths, train.batch([window]).ids[0].tolist()
            seen |= set(ids[: sum(lengths)])
        wanted.append(320 - len(seen))
    before = tiny.rows(root / "runs/inputs")
    assert [row["rows/never_input"] for row in before if "rows/never_input" in row] == wanted
    assert wanted[0] > wanted[-1] and train.pad_id not in seen
    assert tiny.run(replace(c, resume=str(root / "runs/inputs/checkpoints/step-00000002"))) == 0
    assert (root / "runs/inputs/metrics.discarded.jsonl").exists() and tiny.rows(root / "runs/inputs") == before


def test_a_window_that_teaches_nothing_is_no_input(root: Path) -> None:
    trainer = watched(root)
    masked, learnt = rows(0), rows(0, 3)[1:]
    trainer.rows.saw([*masked, trainer.train.padding(), *learnt])
    state = trainer.rows.state()
    other = watched(root)
    other.rows.load({})
    assert set(other.rows.state()["seen"]) == {"0"}
    other.rows.load(dict(state))
    bits = np.unpackbits(np.frombuffer(bytes.fromhex(other.rows.state()["seen"]), dtype=np.uint8))
    assert other.rows.state() == state and set(np.flatnonzero(bits)) == set(learnt[0].ids.flatten().tolist())


def test_a_row_without_moments_was_never_updated(root: Path) -> None:
    trainer = watched(root)
    assert trainer.look(trainer.step(0, rows(3), 1.0), [])["rows/never_updated"] == 0
    moments = trainer.optimizers.moments()
    slots = [moments[f"{kind}/{INPUT}"] for kind in ("exp_avg", "exp_avg_sq")]
    slots[0][[4, 5, 6]] = 0
    slots[1][[5, 6, 7]] = 0
    trainer.rows.before_step(1)
    trainer.rows.table.weight.grad = torch.zeros_like(trainer.rows.table.weight)
    trainer.rows.after_backward()
    assert trainer.rows.figures()["rows/never_updated"] == 2


def test_classes_of_rows(root: Path) -> None:
    """Of a vocabulary with all kinds of tokens, one row each; a reserved one stays so though growth made it."""
    (folder,) = (root / "data/tokenizers").glob("bpe-*")
    words = tokenizer.load(folder)
    control = [index for index in words.control.values() if index not in words.reserved]
    assert words.reserved and control
    plain = [index for index in range(words.vocab_size) if index not in words.control.values()]
    counts = np.full(words.vocab_size, 100)
    counts[plain[:3]], counts[control], counts[list(words.reserved)] = (0, 1, 99), 5, 0
    found = classify(counts, words, added=(plain[7], words.reserved[0]))
    names = [CLASSES[number] for number in found]
    assert [names[i] for i in plain[:8]] == ["never", "rare", "rare", *["frequent"] * 4, "added"]
    assert {names[i] for i in words.reserved} == {"reserved"} and {names[i] for i in control} == {"control"}
    assert set(names) == set(CLASSES)


@given(st.lists(st.one_of(st.floats(width=32), st.just(1.5))))
def test_a_histogram_of_anything(values: list[float]) -> None:
    """NaN, infinities, nothing, one value over and over: every value is in a bin or counted as not finite."""
    x = np.array(values, dtype=np.float64)
    found = json.loads(json.dumps(histogram(x), allow_nan=False))
    finite = x[np.isfinite(x)]
    assert sum(found["counts"]) == len(finite) and found["nonfinite"] == len(x) - len(finite)
    if len(finite):
        assert len(found["edges"]) == len(found["counts"]) + 1 == BINS + 1
        assert found["edges"][0] <= finite.min() and finite.max() <= found["edges"][-1]
        places = np.clip(np.searchsorted(found["edges"], finite, side="right") - 1, 0, BINS - 1)
        assert np.bincount(places, minlength=BINS).tolist() == found["counts"]
    else:
        assert found["edges"] == found["counts"] == []


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_is_looked_at_and_training_goes_on(root: Path, value: float) -> None:
    """The rows whose gradient is not finite are counted; what is finite is still shown, and the record is JSON."""
    name = f"name=bad-{value}"
    c = tiny.configure(*tiny.settings(root, name, "diagnostics.rows_every=1", "train.steps=2", "train.max_bad_steps=5"))
    with tiny.spoiled(lambda output: output * value if torch.is_grad_enabled() else output, steps=(0,)):
        assert tiny.run(c) == 0
    bad, good = (row for row in tiny.rows(root / f"runs/bad-{value}") if "rows/norm_p50" in row)
    assert bad["rows/grad_output_nonfinite"] == 320 == bad["rows/grad_output_histogram"]["nonfinite"]
    assert "rows/update_ratio_p50" not in bad and "rows/grad_output_p50" not in bad and bad["rows/norm_p50"] > 0
    assert good["rows/update_ratio_p50"] > 0 and "rows/grad_output_nonfinite" not in good
    assert tiny.rows(root / f"runs/bad-{value}")[-1]["step"] == 2
    assert [row["train/skipped_steps"] for row in tiny.rows(root / f"runs/bad-{value}") if "train/loss" in row][-1] == 1
