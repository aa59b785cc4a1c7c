"""Optimizers against ``torch.optim`` and a float64 Muon written down from its papers; state by name; schedules."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stack.config import schema as config
from stack.core.errors import UserError
from stack.model.decoder import Decoder
from stack.training.muon import Muon, orthogonalize
from stack.training.optim import Optimizers, lr_factor

MUON = config.Optim("muon", 3e-3, 5e-3, 0.9, 0.95, 1e-10, 0.1, 0.0, 0.95, 0.85, 4, 5)
ADAMW = replace(MUON, kind="adamw", lr=2e-3)
SHAPE = config.Model(2, 32, 4, 2, 8, 48, 64, 10000.0, 1e-6, True, 0.1, False, None, False)


def model():
    return Decoder(SHAPE, 64, seed=1)


def give_gradients(model, step):
    """The same gradients for the same step, some rows of the table without any."""
    generator = torch.Generator().manual_seed(step)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)
    model.table.weight.grad[10:20] = 0


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_every_parameter_is_in_one_group_with_its_decay(kind):
    m = model()
    optimizers = Optimizers(m, replace(MUON, kind=kind))
    owners = {name: [] for name, _ in m.named_parameters()}
    names = {p: name for name, p in m.named_parameters()}
    for group in optimizers.groups():
        for p in group["params"]:
            owners[names[p]].append((group["name"], group["weight_decay"]))
    for name, found in owners.items():
        hidden_matrix = name.endswith("_proj.weight")
        assert found == [("matrices", 0.1) if hidden_matrix else ("table", 0.0)], name
    muon = [p for o in optimizers.all if isinstance(o, Muon) for g in o.param_groups for p in g["params"]]
    assert {names[p] for p in muon} == ({n for n in owners if n.endswith("_proj.weight")} if kind == "muon" else set())


def test_adamw_equals_torch():
    ours, theirs = model(), model()
    optimizers = Optimizers(ours, ADAMW)
    decayed = [p for n, p in theirs.named_parameters() if "_proj" in n]
    rest = [p for n, p in theirs.named_parameters() if "_proj" not in n]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.95), eps=1e-10, foreach=False, fused=False)
    for step, factor in enumerate((0.5, 1.0, 1.0, 0.25)):
        for m in (ours, theirs):
            give_gradients(m, step)
        for group in reference.param_groups:
            group["lr"] = 2e-3 * factor
        optimizers.step(step, factor)
        reference.step()
        for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7, msg=name)


def momentum_at(step):
    return 0.85 + min(1.0, step / 4) * (0.95 - 0.85)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 2e-2), (torch.bfloat16, 1e-2)])
def test_muon_equals_torch(dtype, tolerance):
    """Up to bfloat16, in which PyTorch iterates always; the tables beside it equal AdamW's."""
    ours, theirs = model(), model()
    optimizers = Optimizers(ours, MUON, ns_dtype=dtype)
    matrices = {n: p for n, p in theirs.named_parameters() if "_proj" in n}
    reference = torch.optim.Muon(matrices.values(), lr=5e-3, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for step in range(6):
        for m in (ours, theirs):
            give_gradients(m, step)
        reference.param_groups[0]["momentum"] = momentum_at(step)
        optimizers.step(step, 1.0)
        before = {n: p.detach().clone() for n, p in matrices.items()}
        reference.step()
        live = dict(ours.named_parameters())
        for name, p in matrices.items():
            assert (live[name] - p).norm() < tolerance * (p - before[name]).norm(), (step, name)
            p.data.copy_(live[name].data)  # so that only one step's rounding is measured at a time


def newton_schulz(x, steps=5):
    """Jordan et al. (2024), one matrix in float64."""
    if x.shape[0] > x.shape[1]:
        return newton_schulz(x.T, steps).T
    x = x / x.norm()
    for _ in range(steps):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


def test_muon_equals_its_definition_in_float64():
    m = model()
    optimizers = Optimizers(m, MUON)
    exact = {n: p.detach().double() for n, p in m.named_parameters() if "_proj" in n}
    buffers = {n: torch.zeros_like(p) for n, p in exact.items()}
    for step, factor in enumerate((0.5, 1.0, 1.0, 1.0, 1.0, 0.25)):
        give_gradients(m, step)
        lr, mu = 5e-3 * factor, momentum_at(step)
        for name, p in m.named_parameters():
            if name in exact:
                grad = p.grad.double()
                buffers[name] = mu * buffers[name] + (1 - mu) * grad
                update = newton_schulz((1 - mu) * grad + mu * buffers[name])
                exact[name] = exact[name] * (1 - lr * 0.1) - lr * 0.2 * math.sqrt(max(p.shape)) * update
        optimizers.step(step, factor)
        for name, expected in exact.items():
            assert (m.get_parameter(name).double() - expected).abs().max() < 1e-5, (step, name)


@given(st.integers(1, 12), st.integers(1, 12), st.integers(0, 2**16), st.floats(1e-6, 1e6))
@settings(max_examples=40, deadline=None)
def test_an_update_is_near_orthogonal_and_ignores_scale(rows, columns, seed, scale):
    x = torch.randn(1, rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    out = orthogonalize(x, 5)
    torch.testing.assert_close(out[0], newton_schulz(x[0]), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(orthogonalize(x * scale, 5), out, rtol=1e-6, atol=1e-6)
    assert torch.linalg.svdvals(out).max() < 1.3


def test_a_zero_gradient_is_no_update():
    """Output projections start at zero, so what lies before them has no gradient in the first step."""
    assert not orthogonalize(torch.zeros(2, 4, 6), 5).any()


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_rows_without_gradient_keep_their_value(kind):
    """Decay 0 on the table and the norms: what no batch touches does not move; matrices do decay."""
    m = model()
    before = weights(m)
    optimizers = Optimizers(m, replace(MUON, kind=kind))
    for p in m.parameters():
        p.grad = torch.zeros_like(p)
    optimizers.step(0, 1.0)
    for name, p in m.named_parameters():
        lr = MUON.matrix_lr if kind == "muon" else MUON.lr
        expected = before[name] * (1 - lr * 0.1) if "_proj" in name else before[name]
        assert torch.equal(p, expected) if "_proj" not in name else torch.allclose(p, expected, rtol=1e-6), name


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_moments_travel_by_name(kind):
    """Bit-equal, into a new optimizer whose next step is the same; the copies share no memory."""
    c = replace(MUON, kind=kind)
    m = model()
    optimizers = Optimizers(m, c)
    assert optimizers.moments() == {}
    for step in range(3):
        give_gradients(m, step)
        optimizers.step(step, 1.0)
    kept = {key: value.clone() for key, value in optimizers.moments().items()}
    for name, p in m.named_parameters():
        kinds = {key.split("/")[0] for key in kept if key.split("/", 1)[1] == name}
        hidden_matrix = kind == "muon" and "_proj" in name
        assert kinds == ({"momentum_buffer"} if hidden_matrix else {"step", "exp_avg", "exp_avg_sq"}), name
        assert all(kept[f"{k}/{name}"].shape == p.shape for k in kinds - {"step"})

    other = model()
    other.load_state_dict(m.state_dict())
    restored = Optimizers(other, c)
    restored.load_moments(kept)
    for run, opt in ((m, optimizers), (other, restored)):
        give_gradients(run, 3)
        opt.step(3, 0.5)
    after, again = optimizers.moments(), restored.moments()
    assert after.keys() == again.keys() == kept.keys()
    assert all(torch.equal(after[key], again[key]) for key in kept)
    assert all(torch.equal(a, b) for a, b in zip(m.parameters(), other.parameters(), strict=True))
    optimizers.load_moments(kept)  # the later steps wrote into nothing that was handed in
    assert all(torch.equal(optimizers.moments()[key], kept[key]) for key in kept)
    optimizers.load_moments({})
    assert optimizers.moments() == {}


def stepped(kind="muon"):
    m = model()
    optimizers = Optimizers(m, replace(MUON, kind=kind))
    give_gradients(m, 0)
    optimizers.step(0, 1.0)
    return optimizers


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    "change, told",
    [
        (lambda s: s.update({"exp_avg/model.extra": torch.zeros(3)}), "Unexpected: exp_avg/model.extra"),
        (lambda s: s.update({"momentum/" + NORM: torch.zeros(32)}), "Unexpected: momentum/" + NORM),
        (lambda s: s.update({NORM: torch.zeros(32)}), "Unexpected: " + NORM),
        (lambda s: s.pop("exp_avg/" + NORM), "Missing: exp_avg/" + NORM),
        (lambda s: s.update({"exp_avg/" + NORM: torch.zeros(31)}), "[31]; [32]"),
        (lambda s: s.update({"exp_avg/" + NORM: torch.zeros(())}), "[]; [32]"),
    ],
)
def test_state_that_does_not_fit_is_refused_and_nothing_is_lost(change, told):
    optimizers = stepped()
    kept = optimizers.moments()
    broken = dict(kept)
    change(broken)
    with pytest.raises(UserError) as error:
        optimizers.load_moments(broken)
    assert told in str(error.value)
    assert optimizers.moments().keys() == kept.keys()


def test_another_optimizers_state_is_refused():
    with pytest.raises(UserError, match=r"does not fit optim\.kind=adamw"):
        stepped("adamw").load_moments(stepped("muon").moments())


# Schedules.

WSD = config.Schedule("wsd", 10, 0.2, "linear", 0.0)


def factors(schedule, steps):
    return [lr_factor(schedule, step, steps) for step in range(steps)]


def test_warm_up_is_linear_and_never_zero():
    for kind in ("wsd", "cosine", "constant"):
        found = factors(replace(WSD, kind=kind), 100)
        assert found[:11] == pytest.approx([(step + 1) / 11 for step in range(11)])
    assert factors(replace(WSD, warmup=0), 100)[0] == 1.0


@pytest.mark.parametrize("shape", ["linear", "sqrt"])
def test_wsd_is_stable_then_decays(shape):
    found = factors(replace(WSD, shape=shape, final=0.1), 100)
    assert found[10:81] == [1.0] * 71
    for step in range(80, 100):
        x = (step - 80) / 20
        assert found[step] == pytest.approx(0.1 + 0.9 * (1 - (x if shape == "linear" else math.sqrt(x))))


def test_cosine_falls_from_the_end_of_the_warm_up():
    found = factors(replace(WSD, kind="cosine", final=0.1), 110)
    assert found[10] == 1.0 and found[60] == pytest.approx(0.55)
    assert found[85] == pytest.approx(0.1 + 0.45 * (1 + math.cos(0.75 * math.pi)))
    assert found[10:] == sorted(found[10:], reverse=True)


def test_constant_stays():
    assert factors(replace(WSD, kind="constant"), 100)[10:] == [1.0] * 90


@given(
    kind=st.sampled_from(["wsd", "cosine", "constant"]),
    shape=st.sampled_from(["linear", "sqrt"]),
    warmup=st.integers(0, 40),
    decay=st.floats(0, 1),
    final=st.floats(0, 1),
    steps=st.integers(1, 60),
)
@settings(max_examples=150, deadline=None)
def test_every_step_moves_and_none_exceeds_the_peak(kind, shape, warmup, decay, final, steps):
    """Also where the run is shorter than its warm-up; the last step still has a rate above 0."""
    found = factors(config.Schedule(kind, warmup, decay, shape, final), steps)
    assert all(0 < factor <= 1 for factor in found)


def test_rates_and_momentum_are_functions_of_the_step():
    optimizers = stepped()
    for step, factor in ((7, 0.5), (2, 1.0)):
        optimizers.step(step, factor)
        lrs = {group["name"]: group["lr"] for group in optimizers.groups()}
        assert lrs == {"table": 3e-3 * factor, "matrices": 5e-3 * factor}
        assert optimizers.groups()[0]["momentum"] == pytest.approx(momentum_at(step))
