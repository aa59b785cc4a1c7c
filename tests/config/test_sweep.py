"""Sweeps: with -m each job is a run of its own, as if it had been started alone."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path

import pytest
import tiny
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stack.config import sweep
from stack.config.entry import entry
from stack.config.schema import Config


def weights(run: Path) -> dict[str, bytes]:
    """Weights and moments of the newest checkpoint."""
    newest = max((run / "checkpoints").glob("step-*"))
    return {name: (newest / name).read_bytes() for name in ("model.safetensors", "training/optimizer.safetensors")}


def table(output: str) -> list[list[str]]:
    """The rows of the table at the end of a sweep."""
    lines = output.rpartition("\n\nrun ")[2].splitlines()[1:]
    return [re.split(r"  +", line) for line in lines if not line.startswith(("page: ", "the sweep "))]


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A sweep of which the second job cannot work, started in an empty folder; and what it printed."""
    root = tmp_path_factory.mktemp("swept")
    job = tiny.Job(
        _in, root, ["-m", *tiny.settings(root, "optim.lr=1e-3,-1,4e-3", "track.report=true")], log=root / "log"
    )
    assert job.wait() == 2, job.output()
    return root, job.output()


def _in(folder: Path, arguments: list[str]) -> None:
    os.chdir(folder)
    tiny.command(arguments)


def test_each_job_is_the_run_that_it_would_be_alone(swept: tuple[Path, str]) -> None:
    root, _ = swept
    for value in ("0.001", "0.004"):
        job = tiny.train(root, f"optim.lr={value}", f"name=alone-{value}", log=f"alone-{value}")
        assert job.wait() == 0, job.output()
        assert weights(root / f"runs/tiny-lr-{value}") == weights(root / f"runs/alone-{value}")
        assert tiny.rows(root / f"runs/tiny-lr-{value}") == tiny.rows(root / f"runs/alone-{value}")
    saved = (root / "runs/tiny-lr-0.004/config.yaml").read_text()
    assert "optim.lr=0.004 track.report=true name=tiny-lr-0.004" in " ".join(saved.split())  # the command of it alone


def test_all_jobs_are_attempted_and_compared_and_the_first_failure_is_the_exit_code(swept: tuple[Path, str]) -> None:
    root, output = swept
    rows = table(output)
    assert [(row[0], row[1], row[-1]) for row in rows] == [
        ("tiny-lr-0.001", "0.001", "0"), ("tiny-lr--1", "-1", "2"), ("tiny-lr-0.004", "0.004", "0"),
    ]  # fmt: skip
    for row in (rows[0], rows[2]):
        last = [entry for entry in tiny.rows(root / "runs" / row[0]) if "eval/loss" in entry][-1]
        assert row[2:5] == ["6/6", f"{last['eval/loss']:.4f}", f"{last['eval/bits_per_byte']:.4f}"]
    assert "optim.lr=-1.0: " in output or "optim.lr=-1: " in output
    assert output.splitlines()[-1] == f"page: {root}/runs/tiny-lr.html"
    page = (root / "runs/tiny-lr.html").read_text()
    assert "tiny-lr-0.001" in page and "tiny-lr-0.004" in page


def test_nothing_lies_about_and_the_same_command_reuses_what_is_finished(swept: tuple[Path, str]) -> None:
    root, _ = swept
    assert not [path.name for path in root.iterdir() if path.name in ("multirun", "multirun.yaml", "outputs", ".hydra")]
    before = {path: path.stat().st_mtime_ns for path in (root / "runs").glob("tiny-lr-*/checkpoints/*/manifest.json")}
    job = tiny.Job(_in, root, ["-m", *tiny.settings(root, "optim.lr=0.001,4e-3")], log=root / "again")
    assert job.wait() == 0, job.output()
    assert job.output().count("finished already") == 2
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_a_signal_ends_the_sweep_and_the_same_command_goes_on(tmp_path: Path) -> None:
    more = ("train.steps=40", "seed=1,2", "evaluate.every=0")
    job = tiny.Job(_in, tmp_path, ["-m", *tiny.settings(tmp_path, *more)], log=tmp_path / "log")
    tiny.until(lambda: job.poll() is not None or "step 1/40" in job.output())
    job.send_signal(signal.SIGTERM)
    assert job.wait() == 143, job.output()
    assert job.output().splitlines()[-1] == "the sweep is stopped by signal 15; the same command goes on from here"
    assert [row[0] for row in table(job.output())] == ["tiny-seed-1"]
    again = tiny.Job(_in, tmp_path, ["-m", *tiny.settings(tmp_path, *more)], log=tmp_path / "again")
    assert again.wait() == 0, again.output()
    assert "going on from" in again.output()
    assert [(row[0], row[2], row[-1]) for row in table(again.output())] == [
        ("tiny-seed-1", "40/40", "0"), ("tiny-seed-2", "40/40", "0"),
    ]  # fmt: skip


def test_fine_tuning_is_swept_too(swept: tuple[Path, str]) -> None:
    root, _ = swept
    own = tiny.sft_settings(root, "base=tiny-lr-0.004", "optim=muon,adamw", "train.steps=4", "sft.optimizer=fresh")
    job = tiny.Job(tiny.command, ["-m", *own], "stack.sft", log=root / "sft")
    assert job.wait() == 0, job.output()
    assert [row[:2] for row in table(job.output())] == [["talk-optim-muon", "muon"], ["talk-optim-adamw", "adamw"]]


def test_ranks_go_through_the_jobs_together(swept: tuple[Path, str], tmp_path: Path) -> None:
    """Under torchrun one store outlives the jobs: see stack/core/ranks.py."""
    root, _ = swept
    words = ["-m", *tiny.settings(root, "optim.lr=1e-3,4e-3,-1,1", "parallel=ddp", "name=two")]
    jobs = [
        tiny.Job(_with_one_store, words, log=tmp_path / f"log{i}", env=env) for i, env in enumerate(tiny.ranks_of(2))
    ]
    assert [job.wait() for job in jobs] == [2, 2], jobs[0].output()
    ends = [(row[0], row[-1]) for row in table(jobs[0].output())]
    assert ends == [("two-lr-0.001", "0"), ("two-lr-0.004", "0"), ("two-lr--1", "2")]  # and no further
    assert "run " not in jobs[1].output()  # one table


def _with_one_store(words: list[str]) -> None:
    """A rank whose store is another process's, as torchrun's is: rank 0 holds it before and after every group."""
    import torch.distributed as dist

    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    held = dist.TCPStore(host, port, is_master=os.environ["RANK"] == "0", wait_for_workers=False)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    tiny.command(words)
    del held


def _doors(arguments: list[str]) -> None:
    def job(c: Config) -> int:
        os.environ["LEFT"] = os.environ.get("LEFT", "") + "x"
        print("AT", c.name, os.environ["LEFT"], os.environ["WANDB_RUN_GROUP"], flush=True)
        return 3 if c.seed == 3 else 0

    sys.argv = ["stack.train", *arguments]
    entry("train", Config, job, compare=lambda jobs: print("END", jobs[0].title, [j.code for j in jobs]))()


def test_a_job_leaves_no_environment_and_is_of_a_group(tmp_path: Path) -> None:
    job = tiny.Job(_doors, ["-m", "name=a,b", "seed=range(2,4)"], log=tmp_path / "log")
    assert job.wait() == 3, job.output()
    lines = [line for line in job.output().splitlines() if line.startswith(("AT", "END"))]
    names = [f"{name}-seed-{seed}" for name in "ab" for seed in (2, 3)]
    assert lines == [*(f"AT {name} x a-name-seed" for name in names), "END a-name-seed [0, 3, 0, 3]"]
    job = tiny.Job(_doors, ["-m", "name=x", "seed=1,2"], log=tmp_path / "log2", env={"WANDB_RUN_GROUP": "own"})
    assert job.wait() == 0, job.output()
    assert "AT x-seed-2 x own" in job.output()


VALUES = st.text(max_size=60)


@settings(deadline=None, max_examples=60)
@example(("x-b-y", "z"), ("x", "y-b-z"))
@example(("1e-05", "-1"), ("1", "-05-b--1"))
@given(first=st.tuples(VALUES, VALUES), second=st.tuples(VALUES, VALUES))
def test_names_are_safe_and_other_values_have_other_names(first: tuple[str, str], second: tuple[str, str]) -> None:
    one, other = (sweep.name_of("laptop", {"a": a, "b": b}) for a, b in (first, second))
    assert re.fullmatch(r"[\w.+-]+", one) and len(one) < 200
    assert (one == other) == (first == second)


def test_a_name_says_what_differs() -> None:
    def named(*overrides: str, swept: tuple[str, ...]) -> str:
        return sweep.name_of("laptop", sweep.differences(overrides, swept))

    assert named("++optim.lr=0.001", "++seed=2", "++a=1", swept=("optim.lr", "seed")) == "laptop-lr-0.001-seed-2"
    assert named("optim=muon", swept=("optim",)) == "laptop-optim-muon"
    assert named("++a.lr=1", "++b.lr=2", swept=("a.lr", "b.lr")) == "laptop-a.lr-1-b.lr-2"
    assert named("++name=x", swept=("name",)) == "laptop"
    assert re.fullmatch(r"laptop-files-runs_a_b-\w{6}", named('++data.files=["runs/a b"]', swept=("data.files",)))
