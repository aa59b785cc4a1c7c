"""stack.core.ranks and parallel=ddp: laws 1, 2 and 5 under two ranks (gloo, two processes), and one folder a job."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import old_runs
import pytest
import tiny
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from steps import Spy, assert_close, norm_of, reference, rows, snapshot
from tiny import together

from stack.core.errors import EchoError, UserError
from stack.core.ranks import Ranks, ranks
from stack.parallel import wrap as parallel
from stack.training.trainer import Trainer

DDP = ("parallel=ddp", "train.clip=0")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One corpus, packed."""
    return tiny.packed(tmp_path_factory.mktemp("ranks"))


# What each rank holds: 5 and 1 supervised tokens; one rank empty; a rank with two micro-batches of which one is
# masked; all masked.
CASES: dict[str, list[list[int]]] = {
    "5 and 1": [[5], [1]],
    "one rank empty": [[5], []],
    "first rank empty": [[], [3]],
    "two each, one masked": [[5, 0], [1, 2]],
    "all masked": [[0], [0]],
}

prove_resume = tiny.script("prove_resume")
ODD = "model.layers=3"  # matrices of one shape that two ranks cannot share evenly


def _steps(root: str, out: str) -> None:
    """On a rank: one step of every case; loss, norm and gradient into a file, and the digests of all ranks."""
    torch.set_num_threads(1)
    c = tiny.configure(*tiny.settings(Path(root), *DDP, ODD))
    with ranks("ddp", "cpu") as here:
        trainer = tiny.trainer(c, here)
        trainer.dry_step()
        optimizers, found = trainer.optimizers, {}
        for name, shares in CASES.items():
            mine = rows(*[count for share in shares for count in share])
            first = len(shares[0])
            mine = mine[:first] if here.main else mine[first:]
            longest = max(len(share) for share in shares)
            mine += [trainer.train.padding()] * (longest - len(mine))
            spy = Spy(trainer)
            result = trainer.step(0, mine, 1.0)
            trainer.take.optimizers = optimizers
            found[name] = (result.loss, result.norm, result.tokens, result.taken, spy.gradients)
        for step in range(3):  # real updates: both ranks stay the same model
            trainer.step(step, trainer.micro_batches(step), 1.0)
        validation = trainer.validation()
        torch.save((found, snapshot(trainer), validation), f"{out}/{here.rank}.pt")


def test_two_ranks_take_the_step_of_one_process(root: Path, tmp_path: Path) -> None:
    jobs = together(2, _steps, str(root), str(tmp_path), folder=tmp_path)
    assert [job.poll() for job in jobs] == [0, 0], jobs[0].output() + jobs[1].output()
    found, digest, validation = torch.load(tmp_path / "0.pt", weights_only=False)
    other, other_digest, other_validation = torch.load(tmp_path / "1.pt", weights_only=False)
    alone = tiny.trainer(tiny.configure(*tiny.settings(root, "train.clip=0", ODD)))
    for name, shares in CASES.items():
        counts = [count for share in shares for count in share]
        loss, norm, tokens, taken, gradients = found[name]
        assert (loss, norm, tokens, taken) == other[name][:4]
        assert (tokens, taken) == (sum(counts), sum(counts) > 0)
        if taken:
            wanted, gradient = reference(alone, rows(*counts))
            assert loss == pytest.approx(wanted, rel=1e-6)
            assert norm == pytest.approx(norm_of(gradient), rel=1e-6)
            assert_close(gradients, gradient)
            assert all(torch.equal(gradients[key], other[name][4][key]) for key in gradients)
        else:
            assert loss == norm == 0 and gradients == {}
    assert digest == other_digest and validation == other_validation
    for step in range(3):
        alone.step(step, alone.micro_batches(step), 1.0)
    assert validation.num_targets == alone.validation().num_targets
    assert validation.nats == pytest.approx(alone.validation().nats, rel=1e-5)  # by source


LONG = ("parallel=ddp", "train.global_batch=5", "train.steps=12", "checkpoint.every=3", "evaluate.every=4")


class Both:
    """Two ranks of one job, as one process to :func:`prove_resume.die_and_go_on`."""

    def __init__(self, root: Path, *more: str, late: float = 0.0):
        self.jobs = []
        for i, environment in enumerate(tiny.ranks_of(2)):
            time.sleep(late * i)
            self.jobs.append(tiny.train(root, *LONG, *more, env=environment, log=f"{more[-1][5:]}-rank{i}.log"))
        self.pid = self.jobs[0].pid

    def poll(self) -> int | None:
        return self.jobs[0].poll()

    def send_signal(self, number: int) -> None:
        """A machine that is switched off takes both at once; a signal may reach one rank alone."""
        for job in self.jobs if number == signal.SIGKILL else self.jobs[1:]:
            job.send_signal(number)

    def wait(self) -> int:
        codes = [job.wait() for job in self.jobs]
        assert codes[0] == codes[1], self.jobs[0].output() + self.jobs[1].output()
        return codes[0]


def test_two_ranks_have_one_folder_one_log_and_resume_exactly(root: Path) -> None:
    alone = Both(root, "name=two", late=1.5)
    assert alone.wait() == 0
    run = root / "runs/two"
    assert alone.jobs[1].output() == "" and "12 steps" in alone.jobs[0].output()
    assert sorted(path.name for path in (root / "runs").iterdir()) == ["two"]
    steps = [row["step"] for row in tiny.rows(run) if "train/loss" in row]
    assert steps == list(range(1, 13))

    kills = [prove_resume.Kill(2, signal.SIGTERM), prove_resume.Kill(5), prove_resume.Kill(7, inside_save=True)]
    deaths = prove_resume.die_and_go_on(lambda: Both(root, "name=two-killed"), root / "runs/two-killed", kills)
    assert [death.code for death in deaths] == [143, -9, -9, 0] and deaths[2].saving
    assert prove_resume.digests(root / "runs/two-killed") == prove_resume.digests(run)
    assert tiny.rows(root / "runs/two-killed") == tiny.rows(run)

    # One process takes the same steps, but for the order in which sums are rounded.
    job = tiny.train(root, *LONG, "parallel=none", "name=one")
    assert job.wait() == 0
    for one, two in zip(tiny.rows(root / "runs/one"), tiny.rows(run), strict=True):
        assert one["tokens"] == two["tokens"]
        assert one.get("train/loss", 0) == pytest.approx(two.get("train/loss", 0), rel=1e-4)


def test_two_ranks_print_one_error(root: Path) -> None:
    jobs = [
        tiny.train(root, "parallel=ddp", "name=bad", "resume=nowhere", env=environment, log=f"bad{i}.log")
        for i, environment in enumerate(tiny.ranks_of(2))
    ]
    assert [job.wait() for job in jobs] == [2, 2]
    assert "error: resume=nowhere is not a checkpoint of this run" in jobs[0].output()
    assert jobs[1].output() == ""


def _on_main(out: str) -> None:
    """On a rank: what rank 0 finds reaches all, its errors too."""
    with ranks("ddp", "cpu") as here:
        value = here.on_main(lambda: {"a": [1, "ü" * 1000], "rank": here.rank})
        nothing = here.on_main(lambda: None)
        total = here.sum(here.rank + 1, 2.0**52)

        def fail() -> None:
            raise UserError("rank 0 says no")

        try:
            here.on_main(fail)
        except UserError as error:
            failed = [type(error).__name__, str(error)]
        Path(out, f"{here.rank}.json").write_text(json.dumps([value, nothing, total, failed]))


def test_what_rank_0_does_reaches_all(tmp_path: Path) -> None:
    jobs = together(2, _on_main, str(tmp_path), folder=tmp_path)
    assert [job.poll() for job in jobs] == [0, 0], jobs[0].output() + jobs[1].output()
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    for rank, (value, nothing, total, failed) in enumerate(found):
        assert (value, nothing, total) == ({"a": [1, "ü" * 1000], "rank": 0}, None, [3.0, 2.0**53])
        assert failed == [(UserError, EchoError)[rank].__name__, "rank 0 says no"]


def _dies(out: str) -> None:
    """On a rank: rank 0 has a fault of ours while the other waits for it."""
    with ranks("ddp", "cpu") as here:
        here.on_main(lambda: 1 / 0)


def test_a_fault_on_rank_0_hangs_nobody(tmp_path: Path) -> None:
    begin = time.monotonic()
    jobs = together(2, _dies, "", folder=tmp_path)
    assert all(job.poll() == 1 for job in jobs) and time.monotonic() - begin < 60
    assert "ZeroDivisionError" in jobs[0].output()


def _on_all(out: str) -> None:
    """On a rank: each has its own result; what one or all cannot do fails on all of them."""
    with ranks("ddp", "cpu") as here:
        found: list[object] = [here.on_all(lambda: [here.rank, "ü" * (1 + 999 * here.rank)])]

        def fail(who: tuple[int, ...], what: str) -> None:
            if here.rank in who:
                raise UserError(what)

        for who, what in (((1,), "rank 1 cannot"), ((0,), "rank 0 cannot"), ((0, 1), "no"), ((0, 1), f"{here.rank}")):
            try:
                here.on_all(lambda who=who, what=what: fail(who, what), " (hint)")
            except UserError as error:
                found.append([type(error).__name__, str(error)])
        Path(out, f"{here.rank}.json").write_text(json.dumps(found))


def test_what_one_rank_cannot_do_fails_on_all_with_its_cause(tmp_path: Path) -> None:
    jobs = together(2, _on_all, str(tmp_path), folder=tmp_path)
    assert [job.poll() for job in jobs] == [0, 0], jobs[0].output() + jobs[1].output()
    host = socket.gethostname()
    said = [f"rank 1 on {host}: rank 1 cannot (hint)", f"rank 0 on {host}: rank 0 cannot (hint)", "no"]
    said.append(f"rank 0 on {host}: 0 (hint)\n(and 1 more of 2 ranks)")
    for rank, kind in enumerate((UserError, EchoError)):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found == [[rank, "ü" * (1 + 999 * rank)], *([kind.__name__, text] for text in said)]


def _go_on_apart(project: str) -> None:
    """``stack.train`` on a rank in a folder of its own, as on machines that share none."""
    os.chdir(Path(project, os.environ["RANK"]))
    tiny.command([*old_runs.TINY, "parallel=ddp"])


@pytest.mark.parametrize("lost", ["runs", "data", "counts.npy"])
def test_ranks_without_a_shared_folder_tell_the_cause_once(lost: str, tmp_path: Path) -> None:
    for rank in (0, 1):
        old_runs.copy(old_runs.OLD, tmp_path / f"{rank}")
    folder = tmp_path / "1/data/packed/own-8151600f"
    if lost == "counts.npy":
        (folder / lost).write_bytes(bytes((folder / lost).stat().st_size))
    else:
        shutil.rmtree(tmp_path / "1" / lost)
    jobs = together(2, _go_on_apart, str(tmp_path), folder=tmp_path)
    first, second = (job.output() for job in jobs)
    if lost == "counts.npy":  # a fault of ours, on the rank that has it
        assert [job.poll() for job in jobs] == [1, 1]
        assert "Traceback" in second and "ValueError" in second
        assert f"rank 0: stopped: rank 1 on {socket.gethostname()} failed: ValueError" in first
    else:
        assert [job.poll() for job in jobs] == [2, 2] and second == ""
        (message,) = re.findall(r"^error: (.*)", first, re.MULTILINE | re.DOTALL)
        cause = {"runs": "there is no such checkpoint folder", "data": "is not a finished packed folder"}[lost]
        assert message.startswith(f"rank 1 on {socket.gethostname()}: {lost}/") and cause in message
        assert "put data_dir and runs_dir where all see them" in message
    assert "Traceback" not in first


def _fails_alone(project: str) -> None:
    """``stack.train`` whose rank 1 fails in the midst of a step, where nobody listens."""
    os.chdir(project)
    if os.environ["RANK"] == "1":
        own = Trainer.micro_batches
        Trainer.micro_batches = lambda self, step: own(self, step) if step < 4 else 1 / 0
    tiny.command([*old_runs.TINY, "parallel=ddp"])


def test_a_rank_that_fails_alone_hangs_nobody_and_tells_the_cause_alone(tmp_path: Path) -> None:
    begin = time.monotonic()
    old_runs.copy(old_runs.OLD, tmp_path / "project")
    jobs = together(2, _fails_alone, str(tmp_path / "project"), folder=tmp_path)
    assert [job.poll() for job in jobs] == [1, 1] and time.monotonic() - begin < 60
    assert "ZeroDivisionError" in jobs[1].output()
    assert "Traceback" not in jobs[0].output()
    assert "rank 0: stopped: another rank is gone; what it says is the cause" in jobs[0].output()


def test_parallel_and_torchrun_belong_together(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        pytest.raises(UserError, match=r"parallel=ddp needs .* torchrun --local-addr=127.0.0.1 --nproc-per-node=N"),
        ranks("ddp", "cpu"),
    ):
        pass
    with ranks("none", "cpu") as here:
        assert here == Ranks() and here.main and here.sum(1, 2.5) == [1, 2.5]
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(UserError, match=r"torchrun started 2 processes, but parallel=none .* add parallel=ddp"):
        ranks("none", "cpu").__enter__()
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(EchoError):
        ranks("none", "cpu").__enter__()


@settings(deadline=None)
@given(windows=st.integers(0, 40), micro=st.integers(1, 9), world=st.integers(1, 6))
def test_ranks_share_the_windows_of_a_step(windows: int, micro: int, world: int) -> None:
    shares = [parallel.shard(np.arange(windows), micro, Ranks(rank, world)) for rank in range(world)]
    assert len({len(share) for share in shares}) == 1  # every rank takes part in the same collectives
    assert np.concatenate([np.zeros(0), *(part for share in shares for part in share)]).tolist() == list(range(windows))
    assert all(len(part) <= micro for share in shares for part in share)
    sizes = [sum(map(len, share)) for share in shares]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.slow
def test_torchrun_starts_it_and_an_interrupt_of_the_terminal_is_saved(root: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "stack.train"]
    more = ("parallel=ddp", "name=torchrun", "train.steps=100000")
    run = root / "runs/torchrun"
    with (root / "torchrun.log").open("wb") as log:
        job = subprocess.Popen([*command, *tiny.settings(root, *more)], stdout=log, stderr=log, start_new_session=True)
        tiny.until(lambda: prove_resume.last_step(run) >= 2, timeout=200)
        os.killpg(job.pid, signal.SIGINT)  # as a terminal does: to torchrun and to both ranks
        job.wait(timeout=60)
    output = (root / "torchrun.log").read_text()
    assert output.count("saved; the same command goes on from here") == 1, output
    (saved,) = (run / "checkpoints").iterdir()
    done = subprocess.run(
        [*command, *tiny.settings(root, *more, f"train.steps={int(saved.name[5:]) + 2}")],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0 and f"going on from {saved}" in done.stdout, done.stdout + done.stderr


def test_ranks_of_one_machine_meet_at_its_own_address(tmp_path: Path) -> None:
    """What goes on with a run says so, and the quickstart does: a host whose name nobody knows waits for minutes."""
    env = {"TORCHELASTIC_RUN_ID": "none"}
    jobs = [tiny.train(tmp_path, "parallel=ddp", "train.steps=1", env=env | rank) for rank in tiny.ranks_of(2)]
    assert [job.wait() for job in jobs] == [0, 0], jobs[0].output()
    saved = yaml.safe_load((tmp_path / "runs/tiny/config.yaml").read_text())["resolved"]["command"]
    assert "torchrun --local-addr=127.0.0.1 --nproc-per-node=2 -m stack.train" in saved
    started = (Path(__file__).parents[2] / "scripts/quickstart.sh").read_text()
    assert re.findall(r"bin/torchrun \S+", started) == ["bin/torchrun --local-addr=127.0.0.1"]


@pytest.mark.slow
def test_a_host_whose_name_is_nowhere_known(tmp_path: Path) -> None:
    """torchrun for real, in a name space of its own for the name of the host."""
    torchrun = [str(Path(sys.executable).with_name("torchrun")), "--local-addr=127.0.0.1", "--nproc-per-node=2"]
    command = [*torchrun, "-m", "stack.train", *tiny.settings(tmp_path, "parallel=ddp", "train.steps=2")]
    named = ["unshare", "--uts", "sh", "-c", 'hostname no-such-host.invalid && exec "$@"', "sh", *command]
    assert subprocess.run(named, timeout=120).returncode == 0
    assert (tmp_path / "runs/tiny/checkpoints/step-00000002").is_dir()
