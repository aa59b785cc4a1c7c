"""stack.observe.page: one file without network or script, whatever a sample says; a section where its keys are."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import sys
from html.parser import HTMLParser
from pathlib import Path

import page_runs
import pytest
import tiny
from hypothesis import example, given, settings
from hypothesis import strategies as st
from page_runs import EVIL

from stack.observe import audit
from stack.observe.page import facts, memory, page, record, rows

VOID = {"meta", "link", "img", "br", "input"}


class Parsed(HTMLParser):
    """Elements with their attributes, texts by element, and what is not closed."""

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.texts: list[tuple[str, str]] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {key: value or "" for key, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        self.texts.append((self.open[-1] if self.open else "", data))

    @property
    def ids(self) -> list[str]:
        return [attributes["id"] for _, attributes in self.elements if "id" in attributes]

    def sections(self) -> list[str]:
        return [attributes["id"] for tag, attributes in self.elements if tag == "section"]


def page_of(*folders: Path) -> str:
    return page.html([record.read(folder) for folder in folders])


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("page")
    made = {"planned": {"device": "cpu", "parameters": 10**8, "activations": 5 * 10**8, "loss": 10**8, "backward": 1,
                        "peak": 7 * 10**8}, "measured": {"parameters": 10**8}}  # fmt: skip
    page_runs.write(root, "full", page_runs.full(texts=("the cat " + EVIL,)), "train.steps=60", memory=made)
    page_runs.write(root, "other", page_runs.full(), "train.steps=60", "seed=7", "optim.lr=0.5", "name=other")
    page_runs.write(root, "bare", page_runs.steps(60), "train.steps=60")
    listed = [
        {"id": 5, "text": EVIL, "occurrences": 0, "known_unused": False, "norm": 1.0, "norm2": 0.1, "nearest": []}
    ]
    (root / "runs/full/audit.json").write_text(json.dumps({"indicator": "norm2", "listed": listed}))
    return root


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run that ends with its page, by the command line, and what it said."""
    root = tmp_path_factory.mktemp("trained")
    job = tiny.train(root, "track.report=true")
    assert job.wait() == 0, job.output()
    return root / "runs/tiny", job.output()


def test_a_run_ends_with_its_page(trained: tuple[Path, str]) -> None:
    folder, said = trained
    assert f"page: {folder}/report.html" in said
    text = (folder / "report.html").read_text()
    assert text == page_of(folder)  # the record is complete when the page is written
    there = ["quality", "samples", "rows", "audit", "training", "memory", "settings", "resume"]
    assert Parsed(text).sections() == there
    assert not list(folder.glob(".*.partial"))
    audited = json.loads((folder / "audit.json").read_text())
    assert audited == audit.audit(str(folder), known=False) and audited["step"] == 6


def test_the_command_on_the_page_is_the_one_that_goes_on(trained: tuple[Path, str], tmp_path: Path) -> None:
    folder, _ = trained
    shown = [text for tag, text in Parsed((folder / "report.html").read_text()).texts if tag == "pre"]
    _, again, module, *arguments = shlex.split(shown[0])
    assert (again, module) == ("-m", "stack.train")
    job = tiny.Job(tiny.command, arguments, module, log=tmp_path / "again")
    assert job.wait() == 0 and "finished already: step 6 of 6" in job.output()
    longer = tiny.Job(tiny.command, shlex.split(shown[1])[3:], module, log=tmp_path / "longer")
    assert longer.wait() == 0 and "step 12/12" in longer.output()


def _without_matplotlib(arguments: list[str], module: str) -> None:
    sys.modules["matplotlib"] = None  # type: ignore[assignment]
    tiny.command(arguments, module)


def test_a_page_that_fails_costs_the_run_nothing(tmp_path: Path) -> None:
    blocked = tmp_path / "runs/tiny/report.html"
    (blocked / "in the way").mkdir(parents=True)
    (tmp_path / "runs/tiny/audit.json").mkdir()
    job = tiny.train(tmp_path, "track.report=true", "train.steps=2")
    assert job.wait() == 0 and "no audit: " in job.output() and "no page: " in job.output()
    assert "checkpoints/step-00000002" in job.output()
    arguments = tiny.settings(tmp_path, "track.report=true", "train.steps=3")
    job = tiny.Job(_without_matplotlib, arguments, "stack.train", log=tmp_path / "log2")
    assert job.wait() == 0 and "no page: pictures need matplotlib: pip install" in job.output()
    assert record.read(tmp_path / "runs/tiny").step == 3


def test_the_command_writes_a_page_and_names_what_is_no_run(root: Path, tmp_path: Path) -> None:
    def report(*arguments: str) -> tiny.Job:
        job = tiny.Job(tiny.command, [*arguments, f"runs_dir={root}/runs"], "stack.report", log=tmp_path / "log")
        job.wait()
        return job

    assert report("runs=[bare]").poll() == 0
    assert (root / "runs/bare/report.html").read_text() == page_of(root / "runs/bare")
    assert report(f"runs=[bare,{root}/runs/other]", f"out={tmp_path}/new/a.html").poll() == 0
    assert (tmp_path / "new/a.html").read_text() == page_of(root / "runs/bare", root / "runs/other")
    job = report("runs=[nothing]")
    assert job.poll() == 2
    assert "error: runs: there is no run 'nothing'" in job.output() and "bare, full, other" in job.output()
    job = report("runs=[]")
    assert job.poll() == 2 and "error: 1 problem in the configuration" in job.output()


@pytest.mark.parametrize("names", [("full",), ("full", "other", "bare")])
def test_a_page_is_one_file_that_asks_for_nothing(root: Path, names: tuple[str, ...]) -> None:
    text = page_of(*(root / "runs" / name for name in names))
    found = Parsed(text)
    assert found.open == []
    assert not {tag for tag, _ in found.elements} & {"script", "img", "iframe", "object", "embed", "base", "form"}
    for tag, attributes in found.elements:
        assert not [key for key in attributes if key.startswith("on") or key in ("src", "srcset", "srcdoc", "action")]
        assert re.match(r"#|data:,$", attributes.get("href", "#")), tag
        assert all(target.startswith("#") for target in re.findall(r"url\((.*?)\)", " ".join(attributes.values())))
    style = "".join(data for tag, data in found.texts if tag == "style")
    assert "url(" not in style and "@import" not in style
    (policy,) = [a["content"] for _, a in found.elements if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'") and "script" not in policy


@pytest.mark.parametrize("names", [("full",), ("full", "other", "bare")])
def test_every_name_is_given_once_and_every_reference_is_met(root: Path, names: tuple[str, ...]) -> None:
    found = Parsed(page_of(*(root / "runs" / name for name in names)))
    assert len(found.ids) == len(set(found.ids))
    wanted = [a["href"].removeprefix("#") for tag, a in found.elements if tag in ("a", "use")]
    wanted += [word for _, a in found.elements for word in a.get("aria-labelledby", "").split()]
    assert len(wanted) > 10 and set(wanted) <= set(found.ids)
    figures = sum(tag == "figure" for tag, _ in found.elements)
    assert figures == sum(tag == "svg" for tag, _ in found.elements) - 1  # the first one is drawn for two widths
    assert figures <= sum(tag == "table" for tag, _ in found.elements)


def test_what_a_sample_says_is_text(root: Path) -> None:
    found = Parsed(page_of(root / "runs/full"))
    texts = [data for _, data in found.texts]
    assert " " + EVIL in texts  # behind the prompt, which stands by itself
    assert f'"{EVIL}"' in texts  # a token of the audit


@settings(deadline=None, max_examples=60)
@given(st.text(max_size=60))
@example(EVIL)
@example("\0\r\x7f\x85\u2028\ufffe\ud800\t\n")
def test_any_text_is_shown_as_it_is(text: str) -> None:
    shown = page.seen(text)
    assert len(shown) == len(text)
    assert all(a == b or not a.isprintable() for a, b in zip(text, shown, strict=True))
    assert page.seen(shown) == shown  # nothing is left that HTML would change
    shown.encode()


def test_a_section_stands_where_its_keys_are(root: Path) -> None:
    everything = ["quality", "samples", "rows", "audit", "training", "memory", "settings", "resume"]
    assert Parsed(page_of(root / "runs/full")).sections() == everything
    assert Parsed(page_of(root / "runs/bare")).sections() == ["training", "memory", "settings", "resume"]
    several = Parsed(page_of(root / "runs/bare", root / "runs/other")).sections()
    assert several == ["differences", "quality", "samples", "rows", "training", "memory", "settings", "resume"]


def test_a_run_without_a_step_has_a_page(tmp_path: Path) -> None:
    text = page_of(page_runs.write(tmp_path, "none", []))
    assert Parsed(text).sections() == ["settings", "resume"]
    assert "no step was taken yet" in text


def test_differences_are_the_settings_that_differ(root: Path) -> None:
    runs = [record.read(root / "runs" / name) for name in ("full", "other")]
    (table,) = facts.differences(runs).tables
    assert {row[0] for row in table.rows} == {"seed", "optim.lr"}
    assert ("seed", "0", "7") in table.rows and ("optim.lr", "0.012", "0.5") in table.rows
    assert facts.differences(runs[:1]).tables == []
    same = facts.differences([runs[0], runs[0]])
    assert same and same.lead == "Every setting is the same."


def test_a_long_run_with_much_to_say_stays_below_5_mb(tmp_path: Path) -> None:
    sizes = []
    for count, texts in ((2000, 3), (8000, 40)):
        many = tuple("the cat " + "<&>" * 20000 for _ in range(texts))
        folder = page_runs.write(tmp_path, f"n{count}", page_runs.full(count, many), f"train.steps={count}")
        sizes.append(page.write([folder], folder / "report.html").stat().st_size)
    assert max(sizes) < 5e6


@pytest.mark.parametrize("largest", list(itertools.permutations((5, 30, 200))))
def test_the_parts_at_the_peak_add_up_to_it(largest: tuple[int, ...]) -> None:
    loss, backward, step = largest
    plan = {"parameters": 10, "moments": 20, "activations": 100, "loss": loss, "backward": backward, "step": step}
    peak = 30 + max(100 + max(loss, backward), step)
    found = memory.at_peak({part: float(gb) for part, gb in (plan | {"peak": peak}).items()})
    assert sum(found.values()) == pytest.approx(peak)
    assert all(found[part] == plan[part] for part in found if part != "other")
    assert "other" not in found


def test_keys_of_rows_are_taken_apart() -> None:
    keys = ["norm_p05", "norm_p50_rare", "norm_max_never", "distance_mean_control", "mass_added", "grad_input_norm",
            "mean_norm", "never_updated", "norm_nonfinite", "something_new"]  # fmt: skip
    found = rows.families_of(keys)
    assert list(found) == ["norm", "distance", "mass", "mean_norm", "something_new"]
    assert found["norm"] == {
        "all": {5.0: "norm_p05"},
        "rare": {50.0: "norm_p50_rare"},
        "never": {100.0: "norm_max_never"},
    }
    assert found["mass"] == {"added": {50.0: "mass_added"}}
    assert rows.middle(found["distance"]["control"]) == "distance_mean_control"


def test_the_five_figures_are_those_of_the_record(root: Path) -> None:
    text = page_of(root / "runs/full")
    values = [data.strip() for tag, data in Parsed(text).texts if tag == "dd" and data.strip()]
    for figure in ("1.940", "5.76k", "0:30", "0.60"):
        assert figure in values


def test_columns_of_growth_are_named_by_what_they_hold() -> None:
    assert facts._head({"rows": [1, 2], "initializer": "mean"}, 2) == ("rows", "initializer")
    assert facts._head([0, 4095], 2) == ("from", "to")
    assert facts._head([4096, "<|im_start|>"], 2) == ("id", "token")
    assert facts._head([7, "<|im_end|>", "<|reserved_0|>"], 3) == ("id", "token", "was")
