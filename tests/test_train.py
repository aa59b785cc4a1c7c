"""python -m stack.train: stages are reused, mistakes cost one message and no finished work."""

from __future__ import annotations

import importlib
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import tiny

from stack import checkpoint
from stack.data import encoding
from stack.text import tokenizer
from stack.training.prepare import prepare_data

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One corpus and one finished run of 6 steps with two checkpoints."""
    root = tmp_path_factory.mktemp("train")
    assert tiny.train(root, "checkpoint.every=3").wait() == 0
    return root


def error_of(job: tiny.Job) -> str:
    """The one message of a job that a person's mistake ended."""
    assert job.wait() == 2, job.output()
    assert "Traceback" not in job.output()
    (message,) = re.findall(r"^error: (.*)", job.output(), re.MULTILINE | re.DOTALL)
    return message


def test_a_finished_stage_is_reused_and_a_changed_one_made_anew(root: Path) -> None:
    job = tiny.train(root, "name=again", "seed=1", "train.steps=1", log="again")
    assert job.wait() == 0
    assert "already trained" in job.output() and "packing" not in job.output()
    assert len(list((root / "data/packed").glob("own-*"))) == len(list((root / "data/tokenizers").iterdir())) == 1
    job = tiny.train(root, "name=anew", "data.seed=1", "train.steps=1", log="anew")
    assert job.wait() == 0
    assert len(list((root / "data/packed").glob("own-*"))) == 2


def test_a_text_is_trained_on_without_validation(root: Path) -> None:
    """No figure of it anywhere; the training loss stands for the run, no checkpoint is the best, a page is written."""
    text = root / "own.txt"
    text.write_text("the cat sang of the red house and the dog ran to the water " * 30)
    more = ("name=own", f"data.files=[{text}]", "data.validation=0", "track.report=true", "evaluate.every=2")
    job = tiny.train(root, *more, "checkpoint.every=3", log="own")
    assert job.wait() == 0, job.output()
    rows = tiny.rows(root / "runs/own")
    assert not any(key.startswith("eval/") for row in rows for key in row) and "samples/texts" in rows[-1]
    mean = sum(row["train/loss"] for row in rows if "train/loss" in row) / 6
    assert re.search(rf"train loss +{mean:.4f}\n", job.output()) and "validation 0" not in job.output()
    assert "page: " in job.output() and "no page" not in job.output()
    assert checkpoint.read_manifest(root / "runs/own/checkpoints/step-00000006").metric is None
    again = tiny.train(
        root, *more, "checkpoint.every=3", f"resume={root}/runs/own/checkpoints/step-00000003", log="back"
    )
    assert again.wait() == 0 and tiny.rows(root / "runs/own") == rows, again.output()


@pytest.mark.parametrize("module", ["stack.train", "stack.sft"])
def test_a_process_that_encodes_loads_what_it_needs(root: Path, monkeypatch: pytest.MonkeyPatch, module: str) -> None:
    """Started as ``python -m MODULE`` starts it: multiprocessing would import the command's module in each."""
    pools = []

    class Pool(ProcessPoolExecutor):
        def __init__(self, *settings: object) -> None:
            super().__init__(*settings)
            pools.append(self)

    monkeypatch.setattr(encoding, "ProcessPoolExecutor", Pool)
    monkeypatch.setitem(sys.modules, "__main__", importlib.import_module(module))
    with encoding.encoder(tokenizer.load(root / "runs/tiny/checkpoints/step-00000006"), 2) as encode:
        assert [len(encoded.ids) > 0 for _, encoded in encode(enumerate(["the cat", "the dog"]))] == [True, True]
        loaded = pools[0].submit(eval, "list(__import__('sys').modules)").result()
    assert sys.modules["__main__"].__name__ == module
    assert "tokenizers" in loaded
    assert not {"torch", "datasets", "pyarrow", "wandb", module}.intersection(loaded)


def test_two_runs_of_one_command_are_equal(root: Path) -> None:
    assert tiny.train(root, "checkpoint.every=3", "name=twin").wait() == 0
    twins = [checkpoint.load(root / f"runs/{name}/checkpoints/step-00000006") for name in ("tiny", "twin")]
    assert len({checkpoint.digest_tensors(twin.weights) for twin in twins}) == 1
    assert len({checkpoint.digest_tensors(twin.moments) for twin in twins}) == 1
    assert tiny.rows(root / "runs/tiny") == tiny.rows(root / "runs/twin")


def test_a_missing_file_is_named(root: Path) -> None:
    message = error_of(tiny.train(root, "name=missing", f"data.files=[{root}/none.jsonl]", log="missing"))
    assert f"{root}/none.jsonl: there is no such file" in message and "data.files" in message


def test_a_tokenizer_that_did_not_pack_the_data_is_refused_with_both(root: Path, tmp_path: Path) -> None:
    tiny.corpus(tmp_path / "corpus.jsonl", seed=5)
    words, packed = prepare_data(tiny.configure(*tiny.settings(tmp_path)), tiny.Ranks(), print)
    ours = checkpoint.verify(root / "runs/tiny/checkpoints/step-00000006").vocabulary_digest
    job = tiny.train(root, "name=foreign", f"data.packed={packed.folder}", log="foreign")
    message = error_of(job)
    for part in (
        str(packed.folder),
        words.digest,
        ours,
        "320 rows",
        "has 320",
        "data.packed=null",
        "tokenizer.folder=",
    ):
        assert part in message
    job = tiny.train(root, "name=fits", f"data.packed={packed.folder}", f"tokenizer.folder={words.folder}", log="fits")
    assert job.wait() == 0, job.output()


def test_a_cut_checkpoint_is_an_error_where_it_is_asked_for(root: Path) -> None:
    run = root / "runs/cut"
    shutil.copytree(root / "runs/tiny", run)
    moments = run / "checkpoints/step-00000006/training/optimizer.safetensors"
    size = moments.stat().st_size
    os.truncate(moments, size // 2)
    job = tiny.train(root, "name=cut", "checkpoint.every=3", f"resume={moments.parents[1]}", log="cut")
    assert f"{moments}: has {size // 2:,} bytes, expected {size:,}" in error_of(job)


def test_changed_settings_are_an_error_before_any_work(root: Path) -> None:
    more = ("checkpoint.every=3", "model.layers=3", "train.steps=9", f"data.files=[{root}/none.jsonl]")
    message = error_of(tiny.train(root, *more, log="changed"))
    assert "  model.layers: the run has 2, now asked for 3" in message and "branch=" in message


def test_a_full_disk_in_the_second_save_leaves_the_first(root: Path) -> None:
    run = root / "runs/full"
    more = ("name=full", "checkpoint.every=10", "checkpoint.keep=1", "train.steps=30")
    job = tiny.train(root, *more, log="full")
    # From the first checkpoint on this process can write no file of more than 50 kB; a full disk ends a write the same
    # way, but would need a disk of its own.
    tiny.until(lambda: (run / "checkpoints/step-00000010").exists())
    resource.prlimit(job.pid, resource.RLIMIT_FSIZE, (50_000, 50_000))
    message = error_of(job)
    first = run / "checkpoints/step-00000010"
    assert "step-00000020: the checkpoint could not be saved: " in message
    assert f"The last good checkpoint is {first}" in message
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000010"]
    assert checkpoint.load(first).state["step"] == 10
    job = tiny.train(root, *more, log="full-again")
    assert job.wait() == 0 and f"going on from {first}: step 10 of 30" in job.output()


def test_an_interrupt_while_packing_goes_on_from_what_is_finished(tmp_path: Path) -> None:
    tiny.corpus(tmp_path / "corpus.jsonl", documents=8_000)
    more = ("train.steps=1", "sample.prompts=[]")
    job = tiny.train(tmp_path, *more)
    tiny.until(lambda: (tmp_path / "data/packed").exists())  # the tokenizer is finished
    job.send_signal(signal.SIGINT)
    assert job.wait() == 130
    assert job.output().endswith("interrupted; the same command goes on from what is finished\n")
    assert "Traceback" not in job.output()
    job = tiny.train(tmp_path, *more, "evaluate.micro_batch=64", log="again")
    assert job.wait() == 0 and "already trained" in job.output()


def test_a_second_signal_ends_at_once(root: Path) -> None:
    job = tiny.train(root, "name=twice", "train.global_batch=10000", log="twice")  # a step of many seconds
    tiny.until(lambda: (root / "runs/twice/metrics.jsonl").exists())
    job.send_signal(signal.SIGTERM)
    time.sleep(1.2)
    assert job.poll() is None
    job.send_signal(signal.SIGINT)
    assert job.wait(timeout=5) == 130
    assert not (root / "runs/twice/checkpoints").exists() and "saved" not in job.output()


def test_a_signal_that_comes_twice_at_once_is_one(root: Path) -> None:
    job = tiny.train(root, "name=once", "train.steps=1000000", log="once")
    tiny.until(lambda: (root / "runs/once/metrics.jsonl").exists())
    for number in (signal.SIGSTOP, signal.SIGTERM, signal.SIGINT, signal.SIGCONT):  # both wait when it goes on
        job.send_signal(number)
    assert job.wait() in (130, 143)
    assert len(list((root / "runs/once/checkpoints").iterdir())) == 1 and "saved" in job.output()


def test_no_room_for_the_record_is_one_message(root: Path) -> None:
    job = tiny.train(root, "name=room", "train.steps=1000000", log="room")
    tiny.until(lambda: (root / "runs/room/metrics.jsonl").exists())
    resource.prlimit(job.pid, resource.RLIMIT_FSIZE, (2000, 2000))  # metrics.jsonl itself cannot grow
    message = error_of(job)
    assert "File too large" in message and "make room" in message


def _into_a_closed_pipe(arguments: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    os.dup2(write, 1)
    tiny.command(arguments)


def test_a_reader_that_goes_away_gives_no_traceback(root: Path) -> None:
    """And the run goes on; see test_terminal.py."""
    job = tiny.Job(_into_a_closed_pipe, tiny.settings(root, "name=head"), log=root / "head")
    assert job.wait() == 0
    assert job.output() == ""


def test_the_command_itself_from_another_folder_with_relative_paths(root: Path, tmp_path: Path) -> None:
    shutil.copy(root / "corpus.jsonl", tmp_path)
    arguments = [*tiny.SETTINGS, "data.files=[corpus.jsonl]", "train.steps=2", "name=there"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "stack.train", *arguments]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.jsonl", "data", "runs"]  # none of Hydra's
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["there"]
    assert (tmp_path / "runs/there/checkpoints/step-00000002/model.safetensors").exists()
    loads = "import sys, stack.train; print([m for m in ('datasets', 'pandas', 'pyarrow') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", loads], env=environment, capture_output=True, text=True)
    assert found.stdout == "[]\n"  # they take seconds, and a run whose stages are finished does not need them
