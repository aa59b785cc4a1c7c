"""wandb: what an offline run holds, what a death costs it, and that nothing it does can stop training.

The wandb is the real one, offline or before a host that does not answer; it is read back by its own reader.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import yaml

from stack.core.errors import UserError
from stack.tracking import wandb_mode, wandb_run, workspace
from stack.tracking.metrics import Metrics
from stack.tracking.tracker import Tracker

KEY = "k" * 40
SECTIONS = {"train", "eval", "memory", "throughput", "optim", "time", "samples"}


def start(root: Path, *more: str, name: str, module: str = "stack.train", init_s: float | None = None, **env: str):
    arguments = (tiny.settings if module == "stack.train" else tiny.sft_settings)(root, f"name={name}", *more)
    given = {f"OUR_{key}": value for key, value in env.items()}
    return tiny.Job(_start, str(root), module, arguments, init_s, log=root / f"{name}.log", env=given)


def _start(root: str, module: str, arguments: list[str], init_s: float | None) -> None:
    tiny.without_a_key(root, module, arguments, init_s=init_s)


def inspect(run: Path) -> list[dict[str, Any]]:
    """The records of a run folder of wandb."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", str(run), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def of_type(records: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [record[kind] for record in records if record["type"] == kind]


def history(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, without what wandb adds."""
    found = [record["item"] for record in of_type(records, "history")]
    return [{key: value for key, value in row.items() if not key.startswith("_")} for row in found]


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def as_wandb_has_it(row: dict[str, Any], tables: dict[str, int]) -> dict[str, Any]:
    """A row of ``metrics.jsonl`` as the reader gives it; ``tables`` counts the texts so far."""
    found: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, dict):
            found |= {
                f"{key}.{to}": value[of] for to, of in (("bins", "edges"), ("values", "counts")) if value["counts"]
            }
            found |= {f"{key}_{name}": entry for name, entry in value.items() if name not in ("edges", "counts")}
        elif isinstance(value, list) and value and isinstance(value[0], str):
            tables[key] = tables.get(key, 0) + len(value)
            found[f"{key}.nrows"] = tables[key]
        else:
            found[key] = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}.get(value, value)
    return found


def assert_equal(run: Path, found: list[dict[str, Any]]) -> None:
    """What wandb has is what ``metrics.jsonl`` has, row by row and value by value."""
    tables: dict[str, int] = {}
    wanted = [as_wandb_has_it(row, tables) for row in rows(run)]
    assert [{key: row.get(key) for key in want} for row, want in zip(found, wanted, strict=True)] == wanted


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base and a fine-tuning of it, offline: one because there is no key, one because it is asked for."""
    root = tmp_path_factory.mktemp("wandb")
    more = ("evaluate.every=3", "sample.every=2", "checkpoint.every=3", "track.mode=auto")
    job = start(root, *more, name="tiny")
    assert job.wait() == 0, job.output()
    job = start(root, "track.mode=offline", name="talk", module="stack.sft", WANDB_API_KEY=KEY)
    assert job.wait() == 0, job.output()
    return root


def test_an_offline_run_is_metrics_jsonl(root: Path) -> None:
    for name in ("tiny", "talk"):
        run = root / "runs" / name
        records = inspect(run / "wandb/latest-run")
        assert_equal(run, history(records))
        sections = {key.split("/")[0] for row in history(records) for key in row if "/" in key}
        assert sections >= SECTIONS | ({"growth"} if name == "talk" else set())
        axes = {
            metric["glob_name"]: metric["step_metric"] for metric in of_type(records, "metric") if "glob_name" in metric
        }
        assert axes == {f"{s}/*": "step" if s in ("memory", "throughput", "time") else "tokens" for s in sections}
        assert of_type(records, "exit")[0].get("exit_code", 0) == 0
        (alert,) = of_type(records, "alert")
        assert alert["title"] == "finished" and alert["text"].startswith(name)


def test_every_metric_of_a_run_is_on_the_dashboard(root: Path) -> None:
    keys = {key for name in ("tiny", "talk") for row in rows(root / "runs" / name) for key in row} - {"step", "tokens"}
    assert {key.split("/")[0] for key in keys} <= set(workspace.SECTIONS)
    for key in keys:
        section = key.split("/")[0]
        assert any(panel.shows(key) for panel in workspace.SECTIONS[section]), f"no panel of {section} shows {key}"


def test_the_configuration_has_every_digest_and_no_secret(root: Path) -> None:
    for name in ("tiny", "talk"):
        run = root / "runs" / name
        config = of_type(inspect(run / "wandb/latest-run"), "run")[0]["config"]["update"]
        saved = yaml.safe_load((run / "config.yaml").read_text())
        del saved["resolved"]["length"]
        assert {key: config[key] for key in saved} == saved
        identity = config["resolved"]["identity"]
        digests = ["vocabulary", "packed", *(["base_vocabulary", "base_weights"] if name == "talk" else [])]
        assert all(len(identity[key]) == 64 for key in digests)
    assert config["resolved"]["identity"]["growth"]["initialized"]
    files = [path for path in (root / "runs").rglob("*") if path.is_file()]
    assert files and not any(KEY.encode() in path.read_bytes() for path in files)


def test_samples_are_a_growing_table(root: Path) -> None:
    run = root / "runs/tiny"
    wanted = [[r["step"], r["tokens"], text] for r in rows(run) for text in r.get("samples/texts", [])]
    files = (run / "wandb/latest-run/files/media/table/samples").glob("*.json")
    tables = sorted((json.loads(path.read_text()) for path in files), key=lambda table: len(table["data"]))
    assert [table["data"] for table in tables] == [wanted[: i + 1] for i in range(len(wanted))] and len(wanted) == 3
    assert tables[-1]["columns"] == ["step", "tokens", "text"]


def test_all_of_its_files_lie_in_the_run(root: Path) -> None:
    found = sorted(path.name for path in (root / "runs/tiny").iterdir())
    assert found == [".lock", "checkpoints", "config.yaml", "metrics.jsonl", "wandb", "wandb.json"]
    assert not list((root / "runs/tiny/wandb").rglob("requirements.txt"))
    assert sorted(path.name for path in root.iterdir() if path.is_dir()) == ["data", "runs"]


def test_without_a_key_one_line_says_so_and_an_online_mode_ends_before_any_work(root: Path, tmp_path: Path) -> None:
    said = [line for line in (root / "tiny.log").read_text().splitlines() if line.startswith("wandb:")]
    assert len(said) == 1 and said[0].startswith("wandb: offline, as there is no key for http")
    job = start(tmp_path, "track.mode=online", name="online")
    begin = time.monotonic()
    assert job.wait() == 2 and time.monotonic() - begin < 20
    (line,) = job.output().splitlines()
    assert line.startswith("error: track.mode=online, but there is no key for http") and "wandb login" in line
    assert not (tmp_path / "data").exists() and not list(tmp_path.rglob("*run-*"))


def _at_a_terminal(terminal: str, root: str, arguments: list[str]) -> None:
    os.setsid()
    device = os.open(terminal, os.O_RDWR)  # the first one that a session opens is its terminal
    for number in (0, 1, 2):
        os.dup2(device, number)
    tiny.without_a_key(root, "stack.train", arguments)


def test_at_a_terminal_nothing_is_asked(tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    arguments = tiny.settings(tmp_path, "track.mode=online")
    job = tiny.Job(_at_a_terminal, os.ttyname(theirs), str(tmp_path), arguments, log=tmp_path / "log")
    try:
        assert job.wait(timeout=30) == 2, job.output()
        assert os.read(ours, 10_000).startswith(b"error: track.mode=online, but there is no key")
    finally:
        os.close(ours)
        os.close(theirs)


def test_killed_and_gone_on_the_record_is_whole_and_wandb_lacks_its_flush_interval(tmp_path: Path) -> None:
    more = (
        "track.mode=offline",
        "checkpoint.every=5",
        "evaluate.micro_batch=64",
        "sample.prompts=[]",
        "diagnostics.rows_every=0",
    )
    run = tmp_path / "runs/killed"
    job = start(tmp_path, *more, "train.steps=100000", name="killed")
    tiny.until(lambda: any(f.stat().st_size > 10_000 for f in run.glob("wandb/offline-run-*/*.wandb")))  # some rows
    time.sleep(1.5 * wandb_run.FLUSH_S)
    job.send_signal(signal.SIGKILL)
    killed = time.time()
    assert job.wait() == -signal.SIGKILL
    written = [json.loads(line) for line in (run / "metrics.jsonl").read_bytes().splitlines()[:-1]]
    (first,) = run.glob("wandb/offline-run-*")
    early = history(inspect(first))
    # Half a second is for a busy machine; the last row is held until the next one comes.
    owed = [row for row in written if row["time/unix_s"] < killed - wandb_run.FLUSH_S - 0.5][:-1]
    assert len(owed) > 3 and early[: len(owed)] == owed

    time.sleep(1)  # the folders of wandb differ in the second
    begun = max(int(path.name[5:]) for path in (run / "checkpoints").glob("step-*"))
    job = start(tmp_path, *more, f"train.steps={begun + 7}", name="killed")
    assert job.wait() == 0, job.output()
    steps = [row["step"] for row in rows(run) if "train/loss" in row]
    assert steps == list(range(1, begun + 8))  # neither gap nor duplicate
    second = max(run.glob("wandb/offline-run-*"))
    assert second != first and second.name.rsplit("-", 1)[1] == first.name.rsplit("-", 1)[1]  # one id
    late = history(inspect(second))
    assert late == [row for row in rows(run) if row["step"] > begun]
    both = [row for row in early if row["step"] <= begun] + late
    lacking = [row for row in rows(run) if row not in both]
    assert all(row["time/unix_s"] > killed - wandb_run.FLUSH_S - 0.5 for row in lacking)


def test_a_signal_loses_nothing(root: Path) -> None:
    run = root / "runs/stopped"
    job = start(root, "track.mode=offline", "train.steps=100000", name="stopped")
    tiny.until(lambda: (run / "metrics.jsonl").exists() and len(rows_of_whole_lines(run)) > 5)
    job.send_signal(signal.SIGTERM)
    assert job.wait() == 143, job.output()
    records = inspect(run / "wandb/latest-run")
    assert_equal(run, history(records))
    assert of_type(records, "exit")[0]["exit_code"] == 143
    assert [alert["title"] for alert in of_type(records, "alert")] == ["stopped by signal 15"]


def rows_of_whole_lines(run: Path) -> list[bytes]:
    return (run / "metrics.jsonl").read_bytes().splitlines()[:-1]


@pytest.mark.parametrize("mode", ["auto", "online"])
def test_a_host_that_does_not_answer_stops_nothing(root: Path, mode: str) -> None:
    with socket.socket() as host:
        host.bind(("127.0.0.1", 0))
        port = host.getsockname()[1]
        if mode == "online":
            host.listen()  # takes connections, and never says a word
        name = f"silent-{mode}"
        env = {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": f"http://127.0.0.1:{port}"}
        job = start(root, f"track.mode={mode}", "train.steps=2", name=name, init_s=1.0, **env)
        assert job.wait() == 0, job.output()
    run = root / "runs" / name
    said = [line for line in job.output().splitlines() if line.startswith("wandb:")]
    assert len(said) == 1
    assert ("cannot be reached" if mode == "auto" else "it goes on offline") in said[0]
    (offline,) = run.glob("wandb/offline-run-*")
    assert_equal(run, history(inspect(offline)))


@pytest.mark.parametrize(
    ("mode", "variable", "key", "found"),
    [
        ("disabled", "online", True, "disabled"),
        ("offline", "online", True, "offline"),
        ("auto", None, False, "offline"),
        ("auto", "offline", True, "offline"),
        ("auto", "dryrun", False, "offline"),
        ("auto", "disabled", True, "disabled"),
        ("auto", "online", True, "online"),  # asked for: not looked whether it can be reached
        ("online", "offline", True, "online"),
        ("auto", "online", False, "WANDB_MODE=online, but there is no key"),
        ("auto", "sometimes", False, "offline"),
        ("auto", "", False, "offline"),
        ("auto", None, None, "offline"),
        ("online", None, None, "API key must have 40"),
    ],
)
def test_modes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, variable: str | None, key: bool | None, found: str
) -> None:
    import wandb

    track = replace(tiny.configure(*tiny.settings(tmp_path)).track, mode=mode)
    for name in ("API_KEY", "MODE", "BASE_URL", "DATA_DIR", "CACHE_DIR", "ERROR_REPORTING"):
        monkeypatch.delenv(f"WANDB_{name}", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "none"))
    for name, value in (("DATA_DIR", tmp_path), ("CACHE_DIR", tmp_path), ("ERROR_REPORTING", "false")):
        monkeypatch.setenv(f"WANDB_{name}", str(value))
    if variable is not None:
        monkeypatch.setenv("WANDB_MODE", variable)
    if key is not False:
        monkeypatch.setenv("WANDB_API_KEY", KEY if key else "short")
    wandb.teardown()  # it looks for keys once in a process
    try:
        if found in ("online", "offline", "disabled"):
            assert wandb_mode.decide(track, tmp_path, lambda line: None)[0] == found
        else:
            with pytest.raises(UserError, match=found):
                wandb_mode.decide(track, tmp_path, lambda line: None)
    finally:
        wandb.teardown()


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("WANDB_SILENT", "maybe", "passed over: WANDB_SILENT ("),
        ("WANDB_BASE_URL", "api.example.org", "passed over: WANDB_BASE_URL ("),
        ("WANDB_SERVICE", "broken", "passed over: WANDB_SERVICE ("),
        ("WANDB_SERVICE", "3-99999-unix-/nobody/listens", "passed over: WANDB_SERVICE ("),
        ("WANDB_MODE", "sometimes", "passed over: WANDB_MODE ("),
        ("WANDB_API_KEY", "short", "cannot be read (WANDB_API_KEY invalid"),
        ("NETRC", "no text", "cannot be read ('utf-8' codec"),
        ("WANDB_CONFIG_DIR", "no text", "disabled, as it cannot be used: 'utf-8' codec"),
        ("WANDB_MODE", "", "as there is no key"),
    ],
)
def test_what_is_wrong_with_wandb_alone_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, said: str
) -> None:
    """And a mistake where an online mode was asked for."""
    import wandb

    if value == "no text":
        file = tmp_path / "bad" if variable == "NETRC" else tmp_path / "bad/settings"
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(b"\xff\xfe[")
        value = str(tmp_path / "bad")
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    own = {"NETRC": str(tmp_path / "none"), "WANDB_CONFIG_DIR": str(tmp_path / "none"), variable: value}
    track = tiny.configure(*tiny.settings(tmp_path, "track.mode=auto")).track
    for mode in ("auto", "online"):
        for name, setting in own.items():
            monkeypatch.setenv(name, setting)
        lines: list[str] = []
        wandb.teardown()
        try:
            if mode == "auto":
                found = wandb_mode.choose_mode(track, tmp_path, lines.append)
                assert found == ("disabled" if "disabled" in said else "offline")
                assert sum(said in line for line in lines) == 1 and len(lines) <= 2, lines
                assert all("short" not in line for line in lines)
            else:
                with pytest.raises(UserError, match=r"track\.mode=online, but"):
                    wandb_mode.choose_mode(replace(track, mode="online"), tmp_path, lines.append)
        finally:
            wandb.teardown()


def test_the_environment_beats_our_defaults(root: Path) -> None:
    found = {}
    for name, more in (("env", ()), ("both", ("track.project=given",))):
        env = {"WANDB_PROJECT": "theirs", "WANDB_NAME": "shown", "WANDB_RUN_ID": f"id{name}", "WANDB_TAGS": "a,b"}
        job = tiny.Job(_with_theirs, str(root), env, [f"name={name}", *more], log=root / f"{name}.log")
        assert job.wait() == 0, job.output()
        (record,) = of_type(inspect(root / "runs" / name / "wandb/latest-run"), "run")
        found[name] = [record[key] for key in ("project", "display_name", "run_id", "tags")]
    assert found["env"] == ["theirs", "env", "idenv", ["a", "b"]]  # name= was given, so it beats WANDB_NAME
    assert found["both"] == ["given", "both", "idboth", ["a", "b"]]


def _with_theirs(root: str, env: dict[str, str], more: list[str]) -> None:
    os.environ |= env
    tiny.command(tiny.settings(Path(root), "track.mode=offline", "train.steps=1", *more))


def test_wandb_disabled_is_heard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_DISABLED", "true")
    track = tiny.configure(*tiny.settings(tmp_path, "track.mode=auto")).track
    assert wandb_mode.decide(track, tmp_path, print) == ("disabled", "")
    assert wandb_mode.decide(replace(track, mode="offline"), tmp_path, print)[0] == "offline"


def run_of(folder: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> tuple[Tracker, wandb_run.WandbRun, list[str]]:
    """A tracker with an offline run in this process, and what it says."""
    for name, value in (("DATA_DIR", folder), ("CACHE_DIR", folder), ("ERROR_REPORTING", "false")):
        monkeypatch.setenv(f"WANDB_{name}", str(value))
    said: list[str] = []
    config = tiny.configure(*tiny.settings(folder, *more))
    metrics = Metrics(folder, 0)
    run = wandb_run.WandbRun(folder, "offline", config, {"steps": 1}, 0, said.append)
    return Tracker(metrics, run), run, said


def test_histograms_and_failures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker, run, said = run_of(tmp_path, monkeypatch)
    nan, inf = math.nan, math.inf
    values = {
        "rows/plain": {"counts": [1, 2], "edges": [0.0, 0.5, 1.0], "nonfinite": 0},
        "rows/empty": {"counts": [], "edges": [], "nonfinite": 3},
        "rows/constant": {"counts": [0, 4], "edges": [2.0, 2.0, 2.0], "nonfinite": 0},
        "rows/not_finite": {"counts": [1, 2], "edges": [nan, 0.5, inf], "nonfinite": 2},
        "new/numbers": [1.0, nan],
        "train/loss": nan,
        "train/norm": inf,
        "train/none": None,
    }
    broken = {
        "rows/broken": {"counts": [1, 2], "edges": [0.0]},
        "rows/long": {"counts": [1] * 600, "edges": [0.0] * 601},
    }
    tracker.write({"step": 1, "tokens": 10} | values | broken)
    tiny.until(lambda: run.failures == 2)
    tracker.write({"step": 2, "tokens": 20, "train/loss": 1.5})
    tracker.close(0)
    assert len(said) == 1 and "rows/broken" in said[0] and "training goes on" in said[0]
    found, second = history(inspect(next(tmp_path.glob("wandb/offline-run-*"))))
    assert second == {"step": 2, "tokens": 20, "train/loss": 1.5, "time/tracking_failures": 2}
    assert found["rows/plain.bins"] == [0, 0.5, 1] and found["rows/plain.values"] == [1, 2]
    assert found["rows/empty_nonfinite"] == 3 and not any(key.startswith("rows/empty.") for key in found)
    assert found["rows/constant.bins"] == [2, 2, 2] and found["rows/not_finite_nonfinite"] == 2
    assert (found["train/loss"], found["train/norm"], found["train/none"]) == ("NaN", "Infinity", None)
    assert rows(tmp_path)[0]["rows/not_finite"]["edges"] == ["nan", 0.5, "inf"]
    assert rows(tmp_path)[1]["time/tracking_failures"] == 2


def test_a_stall_is_told_once_and_again_after_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker, run, said = run_of(tmp_path, monkeypatch, "track.stall_minutes=0.01")
    tracker.write({"step": 1, "tokens": 10, "train/loss": 1.0})
    tiny.until(lambda: len(said) == 1)
    time.sleep(1.2)
    assert said == ["tiny: no step for 0.01 minutes"]
    tracker.alive()
    tiny.until(lambda: len(said) == 2)
    tracker.close(0)
    alerts = of_type(inspect(next(tmp_path.glob("wandb/offline-run-*"))), "alert")
    assert [alert["title"] for alert in alerts] == ["stalled", "stalled"] and run.failures == 0


def test_a_row_costs_the_training_less_than_a_millisecond(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker, _, _ = run_of(tmp_path, monkeypatch)
    seconds = []
    for step in range(300):
        row = {"step": step, "tokens": step * 2048, **{f"train/metric_{i}": step / 7 + i for i in range(30)}}
        begin = time.perf_counter()
        tracker.write(row)
        seconds.append(time.perf_counter() - begin)
        time.sleep(0.002)
    tracker.close(0)
    assert sorted(seconds)[150] < 1e-3
    assert len(history(inspect(next(tmp_path.glob("wandb/offline-run-*"))))) == 300


def test_a_damaged_id_and_a_full_queue_stop_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wandb.json").write_text("not JSON")
    monkeypatch.setattr(wandb_run, "WAITING", 2)
    tracker, run, said = run_of(tmp_path, monkeypatch)
    for step in range(50):
        tracker.write({"step": step, "tokens": step})
    tracker.close(0)
    assert run.failures > 0 and len(said) == 1
    assert [row["step"] for row in rows(tmp_path)] == list(range(50))
