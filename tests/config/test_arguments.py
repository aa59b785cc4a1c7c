"""Arguments: what a person types arrives as it was meant, and what cannot be read is told with what can."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import sys
import tempfile
import typing
from pathlib import Path

import pytest
import tiny
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from pydantic import TypeAdapter

from stack.config import arguments, kinds
from stack.config import schema as config
from stack.config.arguments import Door
from stack.config.checks import typed
from stack.config.command import command
from stack.config.entry import entry
from stack.config.grammar import quoted
from stack.config.kinds import Kind
from stack.config.schema import Audit, Chat, Config, Dashboard, FineTune, Planned, Report
from stack.core.errors import UserError

DOORS = {
    "train": Door("train", Config),
    "plan": Door("plan", Planned),
    "sft": Door("sft", FineTune, "base"),
    "chat": Door("chat", Chat, "checkpoint"),
    "audit": Door("audit", Audit, "checkpoint"),
    "report": Door("report", Report, "runs"),
    "dashboard": Door("dashboard", Dashboard),
}
TRAIN = DOORS["train"]
PARSER = OverridesParser.create()


def got(*words: str, door: Door = TRAIN, key: str | None = None) -> object:
    """The value of the last setting of a command line, through Hydra's grammar, OmegaConf and the schema."""
    given_ = arguments.read(list(words), door)
    override = PARSER.parse_override(given_.hydra[-1])
    name = override.key_or_group
    value = OmegaConf.to_container(OmegaConf.create({"x": override.value(), "other": "there"}), resolve=True)["x"]
    assert key in (None, name)
    return TypeAdapter(arguments.hint_of(door.schema, name)).validate_python(value)


def refusal(*words: str, door: Door = TRAIN) -> str:
    with pytest.raises(UserError) as error:
        arguments.read(list(words), door)
    return str(error.value)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to stand in, and a home."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path


# ---------------------------------------------------------------------------------------- which settings are paths

PATHS = {
    "data.files", "data.packed", "data.hub.path", "data.sources.*.files", "data.sources.*.hub.path", "tokenizer.folder",
    "chat.files", "chat.packed", "chat.hub.path", "chat.sources.*.files", "chat.sources.*.hub.path",
    "data_dir", "runs_dir", "resume", "branch", "base", "sft.replay_data",
    "checkpoint", "prompt_file", "counts", "json", "file", "runs", "out",
}  # fmt: skip
WORDS = {  # strings that are no paths
    "name", "data.name", "chat.name", "tokenizer.name", "plan.name", "data.hub.name", "data.hub.split",
    "data.hub.revision", "chat.hub.name", "chat.hub.split", "chat.hub.revision",
    "data.text", "chat.text", "track.project", "track.entity",
    "sample.prompts", "sft.tokens", "group_by",
    *(f"{group}.sources.*.hub.{key}" for group in ("data", "chat") for key in ("name", "split", "revision")),
    "data.sources.*.text", "chat.sources.*.text", "chat.sources.*.headings",
}  # fmt: skip


def strings(hint: object, prefix: str = "") -> dict[str, Kind | None]:
    """Every setting below a type that holds a string or strings, with the way it is read."""
    bare = kinds.bare(hint)
    if dataclasses.is_dataclass(bare):
        hints = kinds.hints(bare)
        return {k: v for name, inner in hints.items() for k, v in strings(inner, f"{prefix}.{name}").items()}
    if typing.get_origin(bare) is dict:
        return strings(typing.get_args(bare)[1], f"{prefix}.*")
    of = typing.get_args(bare)[0] if typing.get_origin(bare) is tuple else bare
    return {prefix.lstrip("."): kinds.kind_of(hint)} if kinds.bare(of) is str else {}


def test_every_setting_that_is_a_path_has_the_type_of_a_path() -> None:
    found = {key: kind for door in DOORS.values() for key, kind in strings(door.schema).items()}
    assert {key for key, kind in found.items() if kind in (Kind.PATH, Kind.PATHS)} == PATHS
    assert {key for key, kind in found.items() if kind is Kind.TEXT} == {"prompt", "system"}
    assert {key for key, kind in found.items() if kind is None} == WORDS


# ---------------------------------------------------------------------------------------- paths as people type them


@pytest.mark.parametrize(
    ("there", "typed", "paths"),
    [
        ((), "mine.txt", ["mine.txt"]),
        ((), "[mine.txt]", ["mine.txt"]),
        ((), "[]", []),
        ((), "~/mine.txt", ["HOME/mine.txt"]),
        ((), "[~/mine.txt, ~/b.txt]", ["HOME/mine.txt", "HOME/b.txt"]),
        ((), "a.txt,b.txt", ["a.txt", "b.txt"]),
        ((), "[a.txt , b.txt,]", ["a.txt", "b.txt"]),
        ((), "[data/*.jsonl,**/x[12].gz]", ["data/*.jsonl", "**/x[12].gz"]),
        ((), "[it's here (1).txt]", ["it's here (1).txt"]),
        ((), "x=y:z$1#é!.txt", ["x=y:z$1#é!.txt"]),
        ((), """["a b.txt",'c,d.txt']""", ["a b.txt", "c,d.txt"]),
        ((), '"a,b.txt"', ["a,b.txt"]),
        ((), r'["say \"hi\".txt"]', ['say "hi".txt']),
        ((), r"[a\ b.txt]", ["a b.txt"]),
        ((), "[${other}/a b.txt]", ["there/a b.txt"]),
        ((), "[${oc.env:NO_SUCH,there}/x,b]", ["there/x", "b"]),
        ((), "[${x.txt]", ["${x.txt"]),
        ((), "${other}", ["there"]),
        ((), "2024", ["2024"]),
        ((), "[1e3,true,null.txt]", ["1e3", "true", "null.txt"]),
        (("a,b.txt",), "a,b.txt", ["a,b.txt"]),
        (("a,b.txt",), "[a,b.txt]", ["a,b.txt"]),
        (("a,b.txt", "a"), "[a,b.txt]", ["a,b.txt"]),
        (("a,b.txt", "a", "b.txt"), "[a,b.txt]", ["a", "b.txt"]),
        (("a,b.txt", "a", "b.txt"), '["a,b.txt"]', ["a,b.txt"]),
        (("my book (1), part 2.txt", "b"), "[my book (1), part 2.txt, b, c]", ["my book (1), part 2.txt", "b", "c"]),
        (("a,1.txt", "a,2.txt"), "[a,*.txt]", ["a,*.txt"]),
        (("a,b",), r"[a\,b]", ["a,b"]),
        (("[z].txt",), "[z].txt", ["[z].txt"]),
        (("[z]",), "[z]", ["[z]"]),
        (("[z]",), "[[z]]", ["[z]"]),
        (("${w}",), "[${w}]", ["${w}"]),
        (("null",), "null", ["null"]),
        (('"q"',), '"q"', ['"q"']),
        ((" x ",), " x ", [" x "]),
    ],
)  # fmt: skip
def test_a_list_of_paths_is_taken_as_typed(there: tuple[str, ...], typed: str, paths: list[str], here: Path) -> None:
    for name in there:
        (here / name).touch()
    wanted = tuple(path.replace("HOME", str(here / "home")) for path in paths)
    for word in (f"data.files={typed}", f"++data.files={typed}", f"data.sources.my-own.files={typed}"):
        assert got(word) == wanted


@pytest.mark.parametrize("key", ["data.packed", "data_dir", "resume", "branch", "tokenizer.folder", "data.hub.path"])
def test_a_path_is_taken_as_typed(key: str, here: Path) -> None:
    for as_typed, path in {
        "~/a b": f"{here}/home/a b", "it's, (x)=y": "it's, (x)=y", '"a b"': "a b", "a,b": "a,b",
        "${other}/x": "there/x", "./null": "./null", r"a\ b": "a b", "me/set": "me/set",
        "~nobody-has-this": "~nobody-has-this",
    }.items():  # fmt: skip
        assert got(f"{key}={as_typed}") == path
    assert got("data.packed=null") is None and got("resume=NULL") is None


NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0/"), min_size=1, max_size=20).filter(
    lambda name: name not in (".", "..") and len(name.encode()) < 200 and os.path.expanduser(name) == name
)
HARD = (
    "${oc.env:USER}",
    "a,b",
    "\\",
    "\\${",
    '"',
    "[",
    "a]",
    "it's",
    "x=y",
    "\n",
    "--",
    "-m",
    "null",
    "{a:1}",
    "f(a,b)",
)


def hard(test):
    for name in HARD:
        test = example(name)(test)
    return test


@settings(deadline=None, max_examples=60)
@hard
@given(NAMES)
def test_every_file_name_survives_in_our_own_quotes(name: str) -> None:
    in_quotes = quoted(name)
    assert got(f"data.files=[{in_quotes}]") == (name,)
    assert got(f"data.files=[{in_quotes},b]") == (name, "b")
    assert got(f"data_dir={in_quotes}") == name


@settings(deadline=None, max_examples=60)
@hard
@given(NAMES)
def test_what_exists_is_taken_as_typed(name: str) -> None:
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            Path(name).touch()
            assert got(f"data.files={name}") == (name,)
            assert got(f"data_dir={name}") == name
            if "=" not in name and name != "--" and not name.startswith("~"):
                dashes = ["--"] if name.startswith("-") else []
                assert got(*dashes, name, door=DOORS["report"]) == (name,)
                assert got(*dashes, name, door=DOORS["chat"]) == name
            parts = name.split(",")
            unclear = len(parts) > 1 and any(part.strip() in (".", "..") or set(part) & set("*?[$") for part in parts)
            assume(name == name.strip() and not unclear)
            assert got(f"data.files=[{name}]") == (name,)
        finally:
            os.chdir(before)


TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=40)


@settings(deadline=None, max_examples=60)
@example("${seed}")
@example(os.fsdecode(b"\xff"))
@given(TEXTS)
def test_a_text_of_a_person_is_never_read(text: str) -> None:
    assert got(f"prompt={text}", door=DOORS["chat"]) == text
    assert got(f"system={text}", door=DOORS["chat"]) == text


def test_a_home_that_is_not_known_and_an_empty_path_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    track = config.plain(tiny.configure(*tiny.SETTINGS, "data.files=[a]").track)
    values = {"name": "x", "group_by": [], "track": track}
    monkeypatch.setenv("HOME", "")
    with pytest.raises(UserError, match=r"file='~/x': there is no home directory here for ~; set HOME"):
        typed(values | {"file": "~/x"}, Dashboard)
    with pytest.raises(UserError, match=r"file='': the path is empty"):
        typed(values | {"file": ""}, Dashboard)


def test_a_file_of_settings_may_say_home_and_one_path_for_a_list(here: Path) -> None:
    one = TypeAdapter(config.Source).validate_python({"files": "~/a.txt"})
    assert one.files == (f"{here}/home/a.txt",)


# ---------------------------------------------------------------------------------------- what cannot be read


def test_what_the_grammar_refuses_is_told_with_quotes_that_work() -> None:
    words = ("tokenizer.name=x=y", "name=it's", "data.text=a#b", "name=[x", 'track.project="x', "name=ü", "name=${")
    for word in words:
        says = refusal(word)
        (suggestion,) = shlex.split(says.partition("in quotes it can: ")[2])
        assert got(suggestion) == word.partition("=")[2]
        assert "Exception" not in says and "input" not in says
    (suggestion,) = shlex.split(refusal("sample.prompts=[It's, 2, ok]").partition("it can: ")[2])
    assert got(suggestion) == ("It's", "2", "ok")


@settings(deadline=None, max_examples=60)
@given(TEXTS)
def test_any_name_is_read_or_told_with_quotes_that_work(text: str) -> None:
    try:
        arguments.read([f"name={text}"], TRAIN)
    except UserError as error:
        where = re.search(r"(?:it can: |, and )('.*'|\S+)(?: is one value)?$", str(error), re.DOTALL)
        assert where is not None, str(error)
        (suggestion,) = shlex.split(where[1])
        assert got(suggestion) == text.strip()


def test_other_mistakes_have_words_of_their_own(here: Path) -> None:
    (here / "book.txt").touch()
    for words, says in {
        ("train.steps", "5"): "train.steps has no value; write train.steps=VALUE",
        ("train.steps =5",): "no blanks around the =; write train.steps=5",
        ("--train.steps=5",): "settings have no dashes; write train.steps=5",
        ("--train.global-batch", "5"): "write train.global_batch=VALUE",
        ("--nope",): "--nope: there is no such flag",
        ("--cfg",): "expected one argument",
        ("--experimental-rerun", "x"): "reads a pickle",
        ("train.steps=1,2",): "several values, for one job; with -m in front",
        ("name=a,b",): """and 'name="a,b"' is one value""",
        ("sample.prompts=a,b",): "and 'sample.prompts=[a,b]' is one value",
        ("book.txt",): "your own text is data.files=book.txt",
        ("laptop",): "perhaps experiment=laptop or model=laptop",
        ("-m", "data.packed=a,b"): "'data.packed=choice(a,b)' is a job for each, 'data.packed=\"a,b\"' is one path",
        ("-m", "data.files=a,b"): "'data.files=choice(a,b)' is a job for each, 'data.files=[a,b]' is one list",
    }.items():
        assert says in refusal(*words)
    assert "takes one argument without KEY=" in refusal("a", "b", door=DOORS["sft"])
    assert "base is given twice: a base=b" in refusal("a", "base=b", door=DOORS["sft"])
    assert len(refusal("tokenizer.name=x=y", "name=it's", "nope").splitlines()) == 3  # all together


def test_a_value_that_no_grammar_could_mend_is_left_to_the_schema() -> None:
    assert arguments.read(["train.steps=4;", "modle=~x"], TRAIN).hydra == ['++train.steps="4;"', '++modle="~x"']


@pytest.mark.parametrize(
    ("argument", "ours"),
    [
        ("train.steps=4", "++train.steps=4"),
        ("nme=xy", "++nme=xy"),
        ("experiment=laptop", "experiment=laptop"),
        ("model=laptop", "model=laptop"),
        ("hydra.verbose=true", "hydra.verbose=true"),
        ("+new=1", "+new=1"),
        ("~seed", "~seed"),
        ("name=${seed}", "++name=${seed}"),
    ],
)
def test_the_command_line_is_judged_by_our_schema(argument: str, ours: str) -> None:
    assert arguments.read([argument], TRAIN).hydra == [ours]


def test_flags_may_stand_anywhere() -> None:
    read = arguments.read(["seed=1,2", "-m", "train.steps=3", "--config-dir", "x"], TRAIN)
    assert read.hydra == ["-m", "--config-dir", "x", "++seed=1,2", "++train.steps=3"]
    assert (read.several, read.swept) == (True, ("seed",))


# ---------------------------------------------------------------------------------------- one argument without a key


@pytest.mark.parametrize("door", ["sft", "chat", "audit"])
def test_one_argument_stands_for_the_obvious_setting(door: str, here: Path) -> None:
    for path in ("runs/laptop", "my model (1)", "runs/laptop-lr=0.1", "~/x", "2024", "a,b", "./seed=3"):
        assert got(path, door=DOORS[door], key=DOORS[door].positional) == path.replace("~", str(here / "home"))


@pytest.mark.parametrize("where", ["{there}", "../{name}", "./../{name}/.", "~", ".."])
def test_a_folder_that_is_there_is_no_group_of_settings(tmp_path: Path, where: str, monkeypatch) -> None:
    (tmp_path / "beside").mkdir()
    monkeypatch.chdir(tmp_path / "beside")
    given = where.format(there=tmp_path, name=tmp_path.name if "./.." not in where else "beside")
    found = arguments.read([given], Door("chat", Chat, "checkpoint")).hydra
    assert found == [f"++checkpoint={quoted(given)}"]


def test_several_runs_stand_side_by_side(here: Path) -> None:
    assert got("laptop", "runs/a b", "c,d", "[e]", door=DOORS["report"]) == ("laptop", "runs/a b", "c,d", "[e]")


# ---------------------------------------------------------------------------------------- the whole way


def _show(arguments_: list[str]) -> None:
    """The settings of a command line that an entry point comes to, and the command that goes on."""

    def job(c: Config) -> int:
        print("GOT", [c.data.files, c.data_dir, c.name, command(c.name)])
        return 0

    sys.argv = ["stack.train", *arguments_]
    entry("train", Config, job)()


def test_what_was_typed_is_what_the_run_names_to_go_on(tmp_path: Path) -> None:
    typed = ["data.files=[it's (1), ${x.txt, ~/b]", "data_dir=~/d", "name=n", "resume=x"]
    job = tiny.Job(_show, typed, log=tmp_path / "log", env={"HOME": "/h"})
    assert job.wait() == 0, job.output()
    files, folder, name, command = eval(job.output().partition("GOT ")[2])
    assert (files, folder, name) == (("it's (1)", "${x.txt", "/h/b"), "/h/d", "n")
    assert shlex.split(command)[-5:] == ["-m", "stack.train", *typed[:3]]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["model=bigg"], "error: model=bigg: there is no such choice; there are laptop, stack_100m"),
        (["data=book.txt"], "error: data=book.txt: there is no such choice; there are climbmix"),
        (["experiment=laptp"], "did you mean experiment=laptop?"),
        (["chat=none"], "error: chat=…: stack.train has no such group"),
        (["name=${nope}"], "error: name: Interpolation key 'nope' not found"),
        (["--cfg", "job", "--info"], "error: Only one of --run, --multirun"),
        (["-m", "seed=1"], "error: stack.train does one thing at a time; leave -m out"),
        (["~nope"], "error: Could not delete from config. 'nope' does not exist."),
    ],
)
def test_what_hydra_finds_is_one_message_and_2(words: list[str], says: str, tmp_path: Path) -> None:
    job = tiny.Job(_show, words, log=tmp_path / "log")
    assert job.wait() == 2, job.output()
    assert says in job.output()
    assert "hydra.cc" not in job.output() and "HYDRA_FULL_ERROR" not in job.output()
