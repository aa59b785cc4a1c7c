"""stack.training.run_folder: one job a folder, law 5 over real deaths, resume=, branch=, and what must not change."""

from __future__ import annotations

import dataclasses
import json
import shutil
import signal
import socket
from pathlib import Path

import pytest
import tiny

from stack import checkpoint
from stack.core.errors import UserError
from stack.core.ranks import Ranks
from stack.training import run_folder

prove_resume = tiny.script("prove_resume")

# Accumulation 3, checkpoints every 4 steps, a validation and samples in between; about 13 windows an epoch.
LONG = ("train.steps=20", "checkpoint.every=4", "evaluate.every=5", "sample.every=10")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One corpus for the module, with the packed data and one run that nobody stops."""
    root = tmp_path_factory.mktemp("runs")
    tiny.corpus(root / "corpus.jsonl", documents=20)
    assert tiny.train(root, *LONG, "name=alone").wait() == 0
    return root


def whole(run: Path) -> tuple[tuple[str, str], list[dict]]:
    """Weights, moments and record of a run."""
    return prove_resume.digests(run), prove_resume.record(run)


def test_the_run_that_is_killed_spans_more_than_one_epoch(root: Path) -> None:
    trainer = tiny.trainer(tiny.configure(*tiny.settings(root, *LONG)))
    assert 1.5 * trainer.train.num_windows < 20 * 3
    assert len(trainer.micro_batches(0)) == 3
    rows = tiny.rows(root / "runs/alone")
    assert [row["step"] for row in rows if "train/loss" in row] == list(range(1, 21))  # no gap, no duplicate
    assert [row["step"] for row in rows if "eval/loss" in row] == [5, 10, 15, 20]


def test_killed_at_any_moment_a_run_ends_as_if_it_never_was(root: Path) -> None:
    run = root / "runs/killed"
    plan = prove_resume.kills(seed=0, count=5, inside=2, first=2, last=17)
    deaths = prove_resume.die_and_go_on(lambda: tiny.train(root, *LONG, "name=killed", log="killed.log"), run, plan)
    assert sum(death.code == -signal.SIGKILL for death in deaths) >= 3
    assert sum(bool(death.saving) for death in deaths) >= 1, deaths
    assert deaths[-1].code == 0
    assert whole(run) == whole(root / "runs/alone")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_stopped_by_a_signal_a_run_saves_and_says_how_to_go_on(root: Path, number: int, code: int) -> None:
    name = f"signal-{code}"
    run = root / "runs" / name
    plan = prove_resume.kills(seed=code, count=2, inside=0, first=2, last=17, number=number)
    deaths = prove_resume.die_and_go_on(lambda: tiny.train(root, *LONG, f"name={name}", log=f"{name}.log"), run, plan)
    assert [death.code for death in deaths] == [code, code, 0]
    output = (root / f"{name}.log").read_text()
    for death in deaths[:2]:
        assert (
            f"stopped by signal {int(number)} after step {death.step} of 20, saved; the same command goes on" in output
        )
        assert f"going on from {run}/checkpoints/step-{death.step:08d}: step {death.step} of 20" in output
    assert whole(run) == whole(root / "runs/alone")


def test_a_torn_last_line_and_rows_beyond_the_checkpoint_are_set_aside(root: Path) -> None:
    run = root / "runs/torn"
    shutil.copytree(root / "runs/alone", run)
    shutil.rmtree(run / "checkpoints/step-00000020")
    with open(run / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 21, "tok')
    assert tiny.train(root, *LONG, "name=torn").wait() == 0
    assert whole(run) == whole(root / "runs/alone")
    aside = (run / "metrics.discarded.jsonl").read_bytes().splitlines()
    assert [json.loads(line)["step"] for line in aside[:-1]] == [17, 18, 18, 19, 20, 20]  # a look at the rows at 18
    assert aside[-1] == b'{"step": 21, "tok'


def test_a_damaged_newest_checkpoint_is_named_and_passed_over(root: Path) -> None:
    run = root / "runs/damaged"
    shutil.copytree(root / "runs/alone", run)
    weights = run / "checkpoints/step-00000020/model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(UserError, match=r"model.safetensors: has 1,000 bytes, expected"):
        run_folder.start_of(run, tiny.configure(*tiny.settings(root, *LONG, f"resume={weights.parent}")), print)
    job = tiny.train(root, *LONG, "name=damaged", log="damaged.log")
    assert job.wait() == 0
    assert "the checkpoint step-00000020 is damaged and passed over" in job.output()
    assert whole(run) == whole(root / "runs/alone")


def test_a_finished_run_ends_at_once_and_a_later_end_goes_on(root: Path) -> None:
    run = root / "runs/longer"
    shutil.copytree(root / "runs/alone", run)
    config = tiny.configure(*tiny.settings(root, *LONG, "name=longer"))
    start = run_folder.start_of(run, config, print)
    assert start.finished and start.step == 20
    before = sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*") if path.name != ".lock")
    assert tiny.run(config) == 0
    assert before == sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*") if path.name != ".lock")
    assert tiny.run(tiny.configure(*tiny.settings(root, *LONG, "name=longer", "train.steps=22"))) == 0
    rows = [row["step"] for row in tiny.rows(run) if "train/loss" in row]
    assert rows == list(range(1, 23))
    with pytest.raises(UserError, match=r"stands at step 22, its end is now asked to be step 21; give a later end"):
        tiny.run(tiny.configure(*tiny.settings(root, *LONG, "name=longer", "train.steps=21")))


def test_settings_that_must_not_change_are_named_with_both_values(root: Path) -> None:
    changed = ("train.global_batch=4", "model.d=64", "optim.lr=0.5", "seed=1", "data.seed=2", "branch=x")
    config = tiny.configure(*tiny.settings(root, *LONG, "name=alone", *changed))
    with pytest.raises(UserError) as error:
        run_folder.start_of(root / "runs/alone", config, print)
    lines = str(error.value).splitlines()
    assert sorted(line.split(":")[0].strip() for line in lines[1:-1]) == sorted(c.split("=")[0] for c in changed)
    assert "  train.global_batch: the run has 3, now asked for 4" in lines
    assert "name=NEW branch=" in lines[-1]


@pytest.mark.parametrize(
    "free",
    [
        ("train.micro_batch=3", "train.max_bad_steps=2", "checkpoint.keep=1", "checkpoint.every=3"),
        ("evaluate.every=0", "sample.every=0", "track.every=5", "data.workers=2", "compile=auto", "device=auto"),
    ],
)
def test_settings_that_may_change_do_not_stop_a_run(root: Path, free: tuple[str, ...]) -> None:
    config = tiny.configure(*tiny.settings(root, *LONG, "name=alone", *free))
    assert run_folder.start_of(root / "runs/alone", config, print).step == 20


def test_resume_goes_back_and_keeps_what_it_goes_back_behind(root: Path) -> None:
    run = root / "runs/back"
    shutil.copytree(root / "runs/alone", run)
    back = f"resume={run}/checkpoints/step-00000016"
    for number in (1, 2):  # twice: what was set aside the first time stays
        assert tiny.run(tiny.configure(*tiny.settings(root, *LONG, "name=back", back))) == 0
        assert whole(run) == whole(root / "runs/alone")
        assert (run / f"checkpoints.discarded-{number}/step-00000020/manifest.json").exists()
    assert run_folder.start_of(run, tiny.configure(*tiny.settings(root, *LONG, "name=back")), print).finished


def test_resume_takes_only_checkpoints_of_the_run(root: Path) -> None:
    def start(flag: str) -> None:
        c = tiny.configure(*tiny.settings(root, *LONG, "name=new", flag))
        run_folder.start_of(root / "runs/new", c, print, c.branch)

    with pytest.raises(UserError, match=r"is not a checkpoint of this run .* use branch="):
        start(f"resume={root}/runs/alone/checkpoints/step-00000016")
    with pytest.raises(UserError, match="there is no such checkpoint folder; checkpoints in"):
        start(f"resume={root}/runs/new/checkpoints/step-00000016")
    with pytest.raises(UserError, match=r"no such checkpoint folder; checkpoints in .*step-00000016, step-00000020"):
        start(f"branch={root}/runs/alone/checkpoints/step-00000099")


def test_branches_go_on_from_weights_moments_and_step_more_than_once(root: Path) -> None:
    parent = root / "runs/alone/checkpoints/step-00000016"
    digest = checkpoint.digest_tensors(checkpoint.load(parent).weights)
    found = {}
    for name, more in {"a": ("schedule=constant",), "b": ("schedule.decay=0.5",), "c": ("optim.lr=1.0e-3",)}.items():
        arguments = tiny.settings(root, *LONG, *more, f"name=branch-{name}", f"branch={parent}", "train.steps=24")
        assert tiny.run(tiny.configure(*arguments)) == 0
        rows = tiny.rows(root / f"runs/branch-{name}")
        assert [row["step"] for row in rows if "train/loss" in row] == list(range(17, 25))
        found[name] = rows
    assert len({rows[0]["train/loss"] for rows in found.values()}) == 1  # the same weights, the same batch …
    assert len({rows[-1]["eval/loss"] for rows in found.values()}) == 3  # … and then each its own way
    assert checkpoint.digest_tensors(checkpoint.load(parent).weights) == digest
    # With nothing changed, a branch is what the run itself does.
    assert tiny.run(tiny.configure(*tiny.settings(root, *LONG, "name=branch-same", f"branch={parent}"))) == 0
    assert prove_resume.digests(root / "runs/branch-same") == prove_resume.digests(root / "runs/alone")


def test_a_branch_resumes_itself(root: Path) -> None:
    parent = root / "runs/alone/checkpoints/step-00000016"
    (root / "runs/parent").mkdir()
    mortal = shutil.copytree(parent, root / "runs/parent/step-00000016")
    more = (*LONG, "checkpoint.every=2", "train.steps=28", "schedule=constant", f"branch={mortal}")
    assert tiny.train(root, *more, "name=branch-alone").wait() == 0
    run = root / "runs/branch-killed"
    kills = [prove_resume.Kill(17), prove_resume.Kill(21)]  # before its own first checkpoint, and after
    deaths = prove_resume.die_and_go_on(lambda: tiny.train(root, *more, "name=branch-killed"), run, kills)
    assert [death.code for death in deaths] == [-9, -9, 0]
    assert whole(run) == whole(root / "runs/branch-alone")
    shutil.rmtree(mortal)  # it needs its parent no longer
    assert run_folder.start_of(run, tiny.configure(*tiny.settings(root, *more, "name=branch-killed")), print).finished


def test_a_second_job_is_refused_with_host_and_process(root: Path) -> None:
    run = root / "runs/locked"
    with run_folder.locked(run, Ranks()):
        job = tiny.train(root, *LONG, "name=locked", log="locked.log")
        assert job.wait() == 2
    holder = (run / ".lock").read_text().strip()
    assert socket.gethostname() in holder
    assert f"another job is at work in {run}: {holder}" in job.output() and "Traceback" not in job.output()
    with run_folder.locked(run, Ranks()):  # it is free again, though the file is still there
        pass


def test_a_lock_dies_with_its_holder(root: Path) -> None:
    run = root / "runs/dead"
    job = tiny.train(root, *LONG, "train.steps=100000", "name=dead")
    tiny.until(lambda: prove_resume.last_step(run) >= 1)
    with pytest.raises(UserError, match=f"process {job.pid}"), run_folder.locked(run, Ranks()):
        pass
    job.process.kill()
    job.wait()
    with run_folder.locked(run, Ranks()):
        pass


def test_a_damaged_config_is_an_error_with_its_path(root: Path) -> None:
    run = root / "runs/cut"
    run.mkdir()
    for text in ("", "a: [", "name: x\n", "resolved: 3\n"):
        (run / "config.yaml").write_text(text)
        with pytest.raises(UserError, match=r"cut/config.yaml is damaged"):
            run_folder.read_config(run)


def test_config_yaml_is_the_whole_configuration(root: Path) -> None:
    saved = run_folder.read_config(root / "runs/alone")
    assert saved is not None
    again = tiny.typed({key: value for key, value in saved.items() if key != "resolved"})
    assert again == tiny.configure(*tiny.settings(root, *LONG, "name=alone"))
    assert saved["resolved"]["steps"] == 20
    assert dataclasses.asdict(run_folder.start_of(root / "runs/alone", again, print))["step"] == 20
