"""stack.config.schema: every group composes, every problem is told at once, and an entry point's exit codes."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest
import tiny
import yaml
from hydra import compose, initialize_config_dir
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from stack.config.arguments import CONF
from stack.config.checks import typed
from stack.config.entry import entry
from stack.config.schema import Config, FineTune, Planned, plain
from stack.core.errors import UserError


def groups() -> list[str]:
    """``GROUP=NAME`` for every file of every group under conf/ that can be chosen."""
    files = sorted(path.relative_to(CONF) for path in Path(CONF).glob("*/*.yaml"))
    return [f"{path.parent}={path.stem}" for path in files if path.stem != "base"]


def composed(*overrides: str, entry: str = "train") -> dict:
    with initialize_config_dir(CONF, version_base="1.3"):
        return OmegaConf.to_container(compose(entry, overrides=list(overrides)), resolve=True)


BASE = composed()


def leaves(values: dict, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = []
    for key, value in values.items():
        found += leaves(value, (*path, key)) if isinstance(value, dict) and value else [(*path, key)]
    return found


def changed(path: tuple[str, ...], value: object, base: dict = BASE) -> dict:
    values = copy.deepcopy(base)
    node = values
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    return values


def message(values: dict) -> list[str]:
    """The lines of the error, without the first."""
    with pytest.raises(UserError) as error:
        typed(values)
    first, *lines = str(error.value).splitlines()
    assert int(first.split()[0]) == len(lines)
    return [line.strip() for line in lines]


def test_no_argument_is_the_laptop_and_stack_100m_is_the_real_run() -> None:
    assert typed(BASE).name == "laptop"
    assert typed(composed("name=2024")).name == "2024"
    real = typed(composed("experiment=stack_100m"))
    assert (real.name, real.train.global_batch * real.train.window) == ("stack_100m", 2**19)
    assert round(real.train.steps * 2**19 / 1e9, 1) == 20.0
    assert typed(composed("experiment=stack_100m", "data=embedded", "train.steps=3")).train.steps == 3
    assert (real.model.layers, real.model.d, real.tokenizer.vocab_size) == (30, 512, 32768)


DOORS = {
    "train-laptop": ("train",),
    "train-stack_100m": ("train", "experiment=stack_100m"),
    "plan-stack_100m": ("plan", "experiment=stack_100m"),
    "sft": ("sft", "base=x"),
    "chat": ("chat", "checkpoint=x"),
    "audit": ("audit", "checkpoint=x"),
    "report": ("report", "runs=[x]"),
    "dashboard": ("dashboard",),
}


@pytest.mark.parametrize("name", DOORS)
def test_a_default_changes_by_intent_alone(name: str) -> None:
    """What ``--cfg job`` prints of each door. A new default is a line here as well, and a reason beside the setting."""
    door, *overrides = DOORS[name]
    kept = yaml.safe_load((Path(__file__).parent / f"settings/{name}.yaml").read_text())
    assert composed(*overrides, entry=door) == kept


@pytest.mark.parametrize("choice", groups())
def test_every_group_composes_and_validates(choice: str) -> None:
    group, name = choice.split("=")
    more = [f"{group}.files=[a.txt]"] if name == "none" and group in ("data", "chat") else []
    schema, entry = {"chat": (FineTune, "sft"), "plan": (Planned, "plan")}.get(group, (Config, "train"))
    result = typed(composed(choice, *more, entry=entry), schema)
    assert isinstance(result, schema)
    assert typed(plain(result), schema) == result  # what config.yaml holds is the configuration


def test_ones_own_text_replaces_the_sources_of_the_group() -> None:
    own = typed(composed("data.files=[a.txt,b.jsonl]", "data.text=body")).data.resolved_sources()
    assert {key: (s.files, s.text) for key, s in own.items()} == {"files": (("a.txt", "b.jsonl"), "body")}
    hub = typed(composed("data.hub.path=me/set", "data.hub.streaming=false")).data.resolved_sources()["hub"].hub
    assert hub is not None and (hub.path, hub.streaming, hub.split) == ("me/set", False, "train")
    assert set(typed(BASE).data.resolved_sources()) == {"books", "speeches", "wikipedia", "recipes"}


def test_all_problems_are_told_at_once_each_with_its_flag() -> None:
    values = changed(("train", "window"), 1)
    values["optim"]["lr"] = "fast"
    values["model"]["lairs"] = 3
    values["modle"] = {}
    del values["seed"]
    values["data"]["sources"]["books"]["wieght"] = 2
    lines = message(values)
    assert len(lines) == 6
    text = "\n".join(lines)
    assert "seed: a value is missing; give seed=VALUE" in text
    assert "model.lairs: there is no such setting; did you mean model.layers?" in text
    assert "data.sources.books.wieght: there is no such setting; did you mean data.sources.books.weight?" in text
    assert "train.window=1: input should be greater than or equal to 2" in text
    assert "optim.lr='fast': input should be a valid number" in text
    assert "modle: there is no such setting; did you mean model?" in text


def test_contradictions_are_told_at_once_each_with_the_flags_to_change() -> None:
    values = changed(("model", "kv_heads"), 3)
    values["train"] |= {"window": 100_000, "epochs": 1.0}
    values["name"] = "a/b"
    values["data"]["sources"]["books"]["files"] = []
    lines = message(values)
    starts = ("model.heads=", "train.window=100000", "exactly one of train.steps", "name='a/b'", "data.sources.books: ")
    assert len(lines) == len(starts)
    assert all(any(line.startswith(start) for line in lines) for start in starts), lines
    (line,) = message(changed(("data", "sources"), {}))
    assert line.startswith("no text: give data.files=")
    (line,) = message(changed(("train", "steps"), None))
    assert line.endswith("(here: none); set the others to null")


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("tokenizer.vocab_size", 100), ("tokenizer.vocab_size", 1000), ("model.head_dim", 63), ("train.micro_batch", 0),
        ("optim.beta1", 1.0), ("optim.eps", 0.0), ("data.validation", -0.1), ("data.validation", 1.0),
        ("train.clip", -1), ("schedule.decay", 1.1), ("optim.lr", float("nan")), ("optim.lr", float("inf")),
        ("train.steps", 0), ("device", "tpu"), ("train.window", 2.5), ("seed", None), ("model.qk_norm", "perhaps"),
        ("name", [3]), ("data.files", 3), ("data_dir", ""), ("checkpoint", "often"),
    ],
)  # fmt: skip
def test_a_value_out_of_range_or_of_another_type_is_named(flag: str, value: object) -> None:
    (line,) = message(changed(tuple(flag.split(".")), value))
    assert line.startswith(f"{flag}={value!r}: ")


@settings(deadline=None)
@given(path=st.sampled_from(leaves(BASE)), data=st.data())
def test_any_misspelt_key_is_named_and_never_taken(path: tuple[str, ...], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(path[-1])))
    wrong = path[-1][:at] + data.draw(st.sampled_from("xyz")) + path[-1][at:]
    if path[:2] == ("data", "sources") and len(path) == 3:
        return  # the name of a source is free
    (line,) = message(changed((*path[:-1], wrong), 1))
    flag, meant = re.fullmatch(r"(.*): there is no such setting; did you mean (.*)\?", line).groups()
    assert flag == ".".join((*path[:-1], wrong))
    assert tuple(meant.split(".")) in leaves(BASE)  # mostly this one, or one that is as near


@settings(deadline=None)
@given(st.sampled_from([path for path in leaves(BASE) if path[:2] != ("data", "sources")]))
def test_any_setting_of_a_type_that_none_has_is_refused(path: tuple[str, ...]) -> None:
    assert any(line.startswith(".".join(path)) for line in message(changed(path, [[None]])))


def _say(arguments: list[str]) -> None:
    """The command with a job that prints its name."""
    import sys

    def job(c: Config) -> int:
        if c.name == "fault":
            raise RuntimeError("our fault")
        if c.name == "stopped":
            raise KeyboardInterrupt
        print("job", c.name)
        return 7

    sys.argv = ["stack.train", *arguments]
    entry("train", Config, job)()


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["name=a"], 7, r"^job a\n$"),
        (["train.stesp=4", "train.window=x"], 2, r"^error: 2 problems.*train\.stesp: .* did you mean train\.steps\?"),
        (["+new=1"], 2, r"^error: 1 problem .*new: there is no such setting"),
        (["experiment=nope"], 2, r"^error: experiment=nope: there is no such choice; there are laptop, stack_100m\n$"),
        (["train.steps"], 2, "^error: train.steps has no value"),
        (["--nope"], 2, "^error: --nope: there is no such flag"),
        (["--help"], 0, r"experiment: laptop.*Settings in force.*torchrun"),
        (["--cfg", "job", "name=b"], 0, r"name: b"),
        (["name=fault"], 1, r"^Traceback.*RuntimeError: our fault"),
        (["name=stopped"], 130, "^interrupted; the same command goes on"),
    ],
)
def test_exit_codes(arguments: list[str], code: int, says: str, tmp_path: Path) -> None:
    job = tiny.Job(_say, arguments, log=tmp_path / "log")
    assert job.wait() == code, job.output()
    assert re.search(says, job.output(), re.DOTALL | re.MULTILINE), job.output()
    assert ("Traceback" in job.output()) == (code == 1)
