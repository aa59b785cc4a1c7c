"""What a run needs to go on, where it is found, and what ``resume=`` and paths mean."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import old_runs
import pytest
import tiny

from stack import checkpoint
from stack.core.errors import UserError
from stack.training import resuming, run_folder

prove_resume = tiny.script("prove_resume")


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with a pretraining run and a fine-tuning run, both of 6 steps with the checkpoint of step 3."""
    project = old_runs.copy(old_runs.OLD, tmp_path_factory.mktemp("resuming") / "project")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(project)
        assert old_runs.go_on("tiny") == old_runs.go_on("talk") == 0
    return project


@pytest.fixture
def project(done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy, in which we are."""
    copy = Path(shutil.copytree(done, tmp_path / "project"))
    monkeypatch.chdir(copy)
    return copy


def whole(run: Path) -> tuple[tuple[str, str], list[dict]]:
    """Weights, moments and record of a run."""
    return prove_resume.digests(run), prove_resume.record(run)


def back_to_step_3(run: str) -> None:
    shutil.rmtree(f"runs/{run}/checkpoints/step-00000006")


@pytest.mark.parametrize("run", ["tiny", "talk"])
def test_a_run_goes_on_with_its_folder_and_its_packed_data_alone(
    run: str, project: Path, done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert old_runs.go_on(run, "train.steps=9") == 0
    expected = whole(Path("runs") / run)
    elsewhere = tmp_path / "another/machine"
    shutil.copytree(done / "runs" / run, elsewhere / "runs" / run)
    shutil.copytree(done / "data/packed", elsewhere / "moved/packed")
    monkeypatch.chdir(elsewhere)
    assert old_runs.go_on(run, "train.steps=9", "data_dir=moved") == 0
    assert whole(Path("runs") / run) == expected
    assert not (elsewhere / "data").exists() and not (elsewhere / "moved/tokenizers").exists()
    newest = checkpoint.read_manifest(elsewhere / "runs" / run / "checkpoints/step-00000009")
    assert newest.identity["packed_folder"].startswith("moved/packed/")


def test_text_that_changed_is_not_looked_at(project: Path, done: Path, capsys: pytest.CaptureFixture[str]) -> None:
    back_to_step_3("tiny")
    Path("corpus.jsonl").write_text('{"text": "another text"}\n')
    assert old_runs.go_on("tiny") == 0
    assert "which runs/tiny/checkpoints/step-00000003 was trained on; the text is not read" in capsys.readouterr().out
    assert whole(Path("runs/tiny")) == whole(done / "runs/tiny")
    with pytest.raises(UserError, match=r"data.seed: the run has 0, now asked for 1"):
        old_runs.go_on("tiny", "data.seed=1", "train.steps=9")


def test_packed_data_that_are_gone_are_made_again_from_the_same_text(
    project: Path, done: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    back_to_step_3("tiny")
    shutil.rmtree("data")
    assert old_runs.go_on("tiny") == 0
    assert "are gone (data/packed/own-8151600f); they are made again" in capsys.readouterr().out
    assert whole(Path("runs/tiny")) == whole(done / "runs/tiny")
    back_to_step_3("tiny")
    with open("corpus.jsonl", "a") as text:
        text.write('{"text": "one more"}\n')
    shutil.rmtree("data")
    with pytest.raises(UserError, match=r"was trained on other packed data: digest 2bfcb.*, now .* restore the data"):
        old_runs.go_on("tiny")
    shutil.rmtree("data")
    os.remove("corpus.jsonl")
    with pytest.raises(UserError, match=r"own-8151600f \(digest 2bfcb.* cannot be made again: corpus.jsonl: there is"):
        old_runs.go_on("tiny", "train.steps=9")


def test_other_packed_data_than_those_of_the_checkpoint_are_not_taken(project: Path) -> None:
    manifest = checkpoint.read_manifest(Path("runs/tiny/checkpoints/step-00000006"))
    named, digest = manifest.identity["packed_folder"], manifest.identity["packed"]
    here, root = Path("runs/tiny/checkpoints/step-00000006"), Path("data")
    assert resuming.find_packed(named, digest, here, root) == Path(named)
    os.rename(named, "data/packed/renamed")
    assert resuming.find_packed(named, digest, here, root) == Path("data/packed/renamed")
    assert resuming.find_packed(named, digest, here, Path("elsewhere")) is None
    Path("data/packed/renamed/manifest.json").write_text("{}")
    assert resuming.find_packed(named, digest, here, root) is None


def test_a_branch_learns_from_what_its_parent_did_where_the_text_is_gone(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parent = "branch=runs/tiny/checkpoints/step-00000003"
    assert old_runs.go_on("tiny", "name=with", parent) == 0
    assert "already trained" in capsys.readouterr().out  # the text is there, so it is asked
    os.remove("corpus.jsonl")
    shutil.rmtree("data/tokenizers")
    assert old_runs.go_on("tiny", "name=without", parent) == 0
    assert "the branch learns from data/packed/own-8151600f, as runs/tiny" in capsys.readouterr().out
    assert whole(Path("runs/with")) == whole(Path("runs/without"))
    with pytest.raises(UserError, match=r"corpus.jsonl: there is no such file"):  # it asks for something else
        old_runs.go_on("tiny", "name=other", parent, "data.seed=1")
    assert old_runs.go_on("tiny", "name=without", parent, "train.steps=7") == 0  # and goes on by itself


def test_finished_is_said_without_anything_else(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree("data")
    for run in ("tiny", "talk"):
        assert old_runs.go_on(run) == 0
        assert "finished already: step 6 of 6" in capsys.readouterr().out


def test_replayed_text_that_is_gone_is_named(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree("data/packed/own-8151600f")
    with pytest.raises(UserError, match=r"replays the packed text data/packed/own-8151600f .* bring it back"):
        old_runs.go_on("talk", "train.steps=9")
    monkeypatch.chdir(old_runs.copy(old_runs.OLD, tmp_path / "old"))
    shutil.rmtree("runs/tiny")  # an older version's checkpoint names no replayed text, but its base does
    with pytest.raises(UserError, match=r"was saved by an older version, .* runs/tiny.* bring the base back"):
        old_runs.go_on("talk")


# ---------------------------------------------------------------------------------------------------- resume=, links


def test_resume_by_a_link_goes_back_to_what_it_leads_to(project: Path, done: Path) -> None:
    own = Path("runs/tiny/checkpoints")
    (own / "newest").symlink_to("step-00000003")
    Path("best").symlink_to(own / "newest")
    for aside, link in enumerate((own / "newest", "best", f"{own}/../checkpoints/./newest/", own.absolute()), 1):
        link = link / "step-00000003" if link == own.absolute() else link
        config = old_runs.configure("tiny", f"resume={link}")
        start = run_folder.start_of(Path("runs/tiny"), config, print)
        assert (start.checkpoint, start.step) == (f"{own}/step-00000003", 3)
        run_folder.begin(Path("runs/tiny"), config, start, {"steps": 6}, print)
        # Killed here, nothing is lost.
        assert sorted(path.name for path in own.glob("step-*")) == ["step-00000003"]
        assert run_folder.start_of(Path("runs/tiny"), old_runs.configure("tiny"), print).step == 3
        assert run_folder.start_of(Path("runs/tiny"), config, print).step == 3
        os.rename(f"runs/tiny/checkpoints.discarded-{aside}/step-00000006", own / "step-00000006")
    assert old_runs.go_on("tiny", "resume=best") == 0
    assert whole(Path("runs/tiny")) == whole(done / "runs/tiny")


def test_steps_are_numbers(project: Path) -> None:
    own = Path("runs/tiny/checkpoints")
    os.rename(own / "step-00000006", own / "step-100000006")  # a name that sorts before step-00000003
    config = old_runs.configure("tiny", f"resume={own}/step-00000003")
    start = run_folder.start_of(Path("runs/tiny"), config, print)
    run_folder.begin(Path("runs/tiny"), config, start, {"steps": 6}, print)
    assert [path.name for path in own.iterdir()] == ["step-00000003"]


def test_a_branch_from_a_link_names_what_the_link_led_to(project: Path) -> None:
    own = Path("runs/tiny/checkpoints").resolve()
    (own / "newest").symlink_to("step-00000003")
    assert old_runs.go_on("tiny", "name=other", f"branch={own}/newest") == 0
    manifest = checkpoint.read_manifest(Path("runs/other/checkpoints/step-00000006"))
    assert manifest.identity["branch"] == str(own / "step-00000003")


def test_a_run_without_a_good_checkpoint_does_not_begin_at_step_0_in_silence(project: Path) -> None:
    run, own = Path("runs/tiny"), Path("runs/tiny/checkpoints")

    def start(*more: str) -> tuple[int, list[str]]:
        told: list[str] = []
        return run_folder.start_of(run, old_runs.configure("tiny", *more), told.append).step, told

    (run / "checkpoints.discarded-1").mkdir()
    for path in list(own.iterdir()):
        path.rename(run / "checkpoints.discarded-1" / path.name)
    with pytest.raises(
        UserError, match=r"no good checkpoint to go on from; set aside by resume=: .*step-00000006; move"
    ):
        start()
    os.rename(run / "checkpoints.discarded-1/step-00000003", own / "step-00000003")
    assert start() == (3, [])
    (own / "step-00000003/config.json").write_text("{}")
    shutil.rmtree(run / "checkpoints.discarded-1")
    with pytest.raises(UserError, match=r"no good checkpoint to go on from; damaged: step-00000003; restore one, or"):
        start()
    shutil.rmtree(own)  # as where it was killed before its first one
    step, (line,) = start()
    assert step == 0 and "runs/tiny has steps behind it, but no checkpoint was saved" in line
    os.remove(run / "metrics.jsonl")
    assert start() == (0, [])


# ------------------------------------------------------------------------------------------------------------- paths


def same(folder: str, *more: str) -> bool:
    """Whether a command is the one of the run in a folder."""
    try:
        return run_folder.start_of(Path(folder), old_runs.configure("tiny", *more), print).step == 6
    except UserError as error:
        assert "was started with other settings" in str(error)
        return False


def test_paths_that_lead_to_one_place_are_one_setting(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(project.parent))
    (project / "link").symlink_to(project)
    for path in ("./corpus.jsonl", f"{project}/corpus.jsonl", "link/corpus.jsonl", "../project//corpus.jsonl"):
        assert same("runs/tiny", f"data.files=[{path}]")
    assert same("runs/tiny", "data.files=['~/project/corpus.jsonl']")
    for path in ("talk.jsonl", "../corpus.jsonl", "corpus.jsonl,corpus.jsonl"):
        assert not same("runs/tiny", f"data.files=[{path}]")
    assert not same("runs/tiny", "data.packed=corpus.jsonl") and not same("runs/tiny", "data.text=./text")
    # From another folder: where runs lie tells where the run was started.
    (project / "below").mkdir()
    monkeypatch.chdir(project / "below")
    assert same("../runs/tiny", "data.files=[../corpus.jsonl]") and same(f"{project}/runs/tiny")
    assert not same("../runs/tiny", "data.files=[../../corpus.jsonl]")


def test_a_project_that_was_moved_is_the_same(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.rename(project, tmp_path / "moved")
    monkeypatch.chdir(tmp_path / "moved")
    assert same("runs/tiny") and same("runs/tiny", f"data.files=[{tmp_path}/moved/corpus.jsonl]")
    assert not same("runs/tiny", f"data.files=[{project}/corpus.jsonl]")
