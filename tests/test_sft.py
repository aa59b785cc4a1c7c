"""stack.sft: growth on the way from a base to a chat, the shared trainer, and law 5 over it."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from pathlib import Path

import pytest
import tiny
import torch
from hydra import compose, initialize_config_dir
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from stack import checkpoint
from stack.checkpoint.open import load_base
from stack.config.arguments import CONF
from stack.config.checks import typed
from stack.config.schema import FineTune
from stack.core.errors import UserError
from stack.core.ranks import ALONE
from stack.data.batches import IGNORED
from stack.data.packed import open_packed
from stack.evaluation.generate import generate
from stack.model.decoder import Decoder
from stack.model.embedding import INPUT
from stack.text import tokenizer
from stack.text.conversation import encode
from stack.training import fine_tuning

prove_resume = tiny.script("prove_resume")

BASE = ("train.steps=4",)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, and one fine-tuning that nobody stops."""
    root = tmp_path_factory.mktemp("sft")
    # Enough words for 320 entries without a reserved one, as the real vocabularies are: growth adds rows.
    draw = random.Random(0)
    words = [*tiny.WORDS, *("".join(draw.choices("abcdefgh", k=6)) for _ in range(60))]
    texts = [{"text": " ".join(draw.choices(words, k=40))} for _ in range(60)]
    (root / "corpus.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    assert tiny.train(root, *BASE).wait() == 0
    job = tiny.sft(root, "name=alone", "checkpoint.keep=9", log="alone.log")
    assert job.wait() == 0, job.output()
    return root


def configure(root: Path, *more: str) -> FineTune:
    with initialize_config_dir(CONF, version_base="1.3"):
        return typed(compose("sft", overrides=tiny.sft_settings(root, *more)), FineTune)


def whole(run: Path) -> tuple[tuple[str, str], list[dict]]:
    """Weights, moments and record of a run."""
    return prove_resume.digests(run), prove_resume.record(run)


def test_conversations_are_learnt_without_validation(root: Path) -> None:
    """Growth is measured on what is learnt, and nothing is asked."""
    job = tiny.sft(root, "name=blind", "chat.validation=0", "train.steps=6", log="blind.log")
    assert job.wait() == 0, job.output()
    assert "positions of training text: none is held out" in job.output() and "held-out answers" not in job.output()
    rows = tiny.rows(root / "runs/blind")
    assert 0 < rows[0]["growth/kl"] <= rows[0]["growth/bound"]
    assert not any(key.startswith("eval/") for row in rows for key in row) and "samples/texts" in rows[-1]


def test_the_grown_base_is_step_0_and_keeps_every_old_row_and_moment(root: Path) -> None:
    base = load_base(str(root / "runs/tiny"), "runs")
    loaded = checkpoint.load(root / "runs/alone/checkpoints/step-00000000")
    old, growth = base.num_rows, loaded.manifest.identity["growth"]
    assert loaded.manifest.num_rows > old and growth["old_vocabulary"] == base.tokenizer.digest
    assert torch.equal(loaded.weights[INPUT][:old], base.weights[INPUT])
    others = [name for name in base.weights if name != INPUT]
    assert others and all(torch.equal(loaded.weights[name], base.weights[name]) for name in others)
    for kind in ("exp_avg", "exp_avg_sq"):
        key = f"{kind}/{INPUT}"
        assert torch.equal(loaded.moments[key][:old], base.moments[key]) and base.moments[key].any()
        assert not loaded.moments[key][old:].any()
    kept = [key for key in base.moments if not key.endswith(INPUT) or key.startswith("step/")]
    assert all(torch.equal(loaded.moments[key], base.moments[key]) for key in kept)
    assert 0 < growth["kl"] <= growth["bound"] and growth["mass"] > 0
    last = checkpoint.read_manifest(root / "runs/alone/checkpoints/step-00000012").identity
    assert last["growth"] == growth and last["base"].endswith("step-00000004")


def test_the_result_opens_in_transformers_and_answers_alike(root: Path) -> None:
    folder = root / "runs/alone/checkpoints/step-00000012"
    words = tokenizer.load(folder)
    theirs, own = AutoModelForCausalLM.from_pretrained(folder), load_base(str(folder), "runs")
    messages = [{"role": "user", "content": "say the dog"}]
    ids, _ = encode(words, messages, generation_prompt=True)
    rendered = AutoTokenizer.from_pretrained(folder).apply_chat_template(messages, add_generation_prompt=True)
    assert list(rendered["input_ids"]) == ids
    model = Decoder(own.model, own.num_rows)
    checkpoint.load_weights_into(model, own.weights)
    answer = generate(model, [ids], tokens=12, stops=words.stops, banned=words.unsampled)[0]
    reference = theirs.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)[0, len(ids) :]
    assert answer == reference.tolist()
    assert GenerationConfig.from_pretrained(folder).eos_token_id == list(words.stops)
    assert theirs.get_input_embeddings().weight.data_ptr() == theirs.get_output_embeddings().weight.data_ptr()


def test_the_added_rows_are_watched(root: Path) -> None:
    """Their share of the softmax rises; all classes together have all of it."""
    looks = [row for row in tiny.rows(root / "runs/alone") if "rows/norm_p50" in row]
    assert [row["step"] for row in looks] == [3, 6, 9, 12]
    growth = checkpoint.read_manifest(root / "runs/alone/checkpoints/step-00000012").identity["growth"]
    named = sum(not text.startswith("<|reserved_") for _, text in growth["added"])
    for row in looks:
        assert (row["rows/count_added"], row["rows/count_reserved"]) == (named, growth["new_rows"] - 320 - named)
        masses = {key: value for key, value in row.items() if key.startswith("rows/mass_")}
        assert masses["rows/mass_added"] > 0 and sum(masses.values()) == pytest.approx(1, abs=1e-5)
        assert row["rows/grad_input_max_added"] > 0 == row["rows/grad_input_max_reserved"]
    assert looks[-1]["rows/mass_added"] > looks[0]["rows/mass_added"]
    assert "eval/loss_class_added" in looks[-1] and "eval/loss_class_reserved" not in looks[-1]


def test_only_assistants_are_learnt(root: Path) -> None:
    """Decoded, the supervised targets of the packed conversations are the answers of the file, each ended."""
    c = configure(root, "name=alone")
    base = load_base(c.base, c.runs_dir)
    parts, _ = fine_tuning.from_base(c, base, ALONE, print)
    words, packed = parts.tokenizer, parts.packed
    train = fine_tuning.materials_of(c, parts, {}).train
    batch = train.batch(range(train.num_windows))
    learnt = words.decode(batch.targets[batch.targets != IGNORED].tolist())
    talks = [json.loads(line)["messages"] for line in (root / "talk.jsonl").read_text().splitlines()]
    answers = [message["content"] for messages in talks for message in messages[1::2]]
    held = packed.split("validation").num_documents
    assert 0 < held < 40 and learnt.count("<|im_end|>") == len(learnt.split("<|im_end|>")) - 1
    said = learnt.split("<|im_end|>")[:-1]
    assert set(said) <= set(answers) and len(answers) * 0.4 < len(said) < len(answers)
    assert not {"say", "user", "assistant"} & set(said)


def test_fine_tuning_learns_and_reports_by_source(root: Path) -> None:
    rows = tiny.rows(root / "runs/alone")
    losses = [row["train/loss"] for row in rows if "train/loss" in row]
    assert len(losses) == 12 and losses[-1] < losses[0]
    validations = [row for row in rows if "eval/loss" in row]
    assert [row["step"] for row in validations] == [6, 12]
    assert "eval/stopped_files" in validations[0] and "eval/bits_per_byte" not in validations[0]
    assert "held-out answers" in (root / "alone.log").read_text()


def test_killed_three_times_once_inside_the_grown_save_it_ends_as_if_it_never_was(root: Path) -> None:
    run = root / "runs/killed"
    partial = run / "checkpoints/.step-00000000.partial"
    for _ in range(20):
        job = tiny.sft(root, "name=killed", "checkpoint.keep=9", log="killed.log")
        tiny.until(lambda job=job: partial.exists() or job.poll() is not None)
        job.send_signal(signal.SIGKILL)
        assert job.wait() == -signal.SIGKILL, job.output()
        if partial.exists():
            break
        shutil.rmtree(run)  # the save was quicker than the kill
    assert partial.exists() and not (run / "config.yaml").exists()
    plan = prove_resume.kills(seed=3, count=2, inside=1, first=2, last=11)
    start = lambda: tiny.sft(root, "name=killed", "checkpoint.keep=9", log="killed.log")  # noqa: E731
    deaths = prove_resume.die_and_go_on(start, run, plan)
    assert [d.code for d in deaths].count(-signal.SIGKILL) >= 2 and deaths[-1].code == 0
    assert whole(run) == whole(root / "runs/alone")


def test_finished_is_said_at_once(root: Path) -> None:
    job = tiny.sft(root, "name=alone", "checkpoint.keep=9", log="again.log")
    assert job.wait() == 0 and job.output().startswith("finished already: step 12 of 12")
    shown = tiny.sft(root, "name=alone", "checkpoint.keep=9", "sft.show=1", log="shown-again.log")
    assert shown.wait() == 0 and "conversation 0 of" in shown.output()


@pytest.mark.parametrize("gone", [False, True], ids=["changed", "gone"])
def test_a_run_goes_on_with_the_conversations_and_questions_that_it_began_with(root: Path, gone: bool) -> None:
    """Where the conversations have changed, or are gone as the base is, it ends as if it never stopped."""
    name, talk = f"moved-{gone}", root / "talk.jsonl"
    run = shutil.copytree(root / "runs/alone", root / "runs" / name)
    shutil.rmtree(run / "checkpoints/step-00000012")
    away = [talk, root / "runs/tiny", root / "data/tokenizers"]
    for path in away if gone else []:
        path.rename(path.with_name(f"{path.name}.away"))
    before = "" if gone else talk.read_text()
    command = tiny.sft_settings(root, f"name={name}", "checkpoint.keep=9", f"chat.files=[{talk}]")
    if gone:
        talk.unlink()  # as sft_settings() makes one
    else:
        talk.write_text(before.replace("the", "The"))
    job = tiny.Job(tiny.command, command, "stack.sft", log=root / f"{name}.log")
    code = job.wait()
    for path in away if gone else []:
        path.with_name(f"{path.name}.away").rename(path)
    if not gone:
        talk.write_text(before)
    assert code == 0, job.output()
    assert whole(run) == whole(root / "runs/alone")


def test_fresh_moments_replay_and_another_optimizer(root: Path) -> None:
    job = tiny.sft(root, "name=fresh", "sft.optimizer=fresh", "sft.replay=0.34", "train.steps=2", "optim=adamw")
    assert job.wait() == 0, job.output()
    loaded = checkpoint.load(root / "runs/fresh/checkpoints/step-00000000")
    assert loaded.moments == {}
    c = configure(root, "sft.replay=0.34")
    base = load_base(c.base, c.runs_dir)
    parts, _ = fine_tuning.from_base(c, base, ALONE, print)
    train = fine_tuning.materials_of(c, parts, {}).train
    of_text = [int((train.windows_of(s) >= train.first.num_windows).sum()) for s in range(50)]
    assert sum(of_text) == int(150 * 0.34) and set(of_text) == {1, 2}
    job = tiny.sft(root, "name=other", "optim=adamw", log="other.log")
    assert job.wait() == 2 and "or start without: sft.optimizer=fresh" in job.output()


def test_what_cannot_be_is_one_message(root: Path) -> None:
    for more, said in (
        (["base=nowhere"], "nowhere"),
        (["train.window=4096"], "train.window=4096 is longer than the context of the base, 64"),
        (["sft.replay_data=data/none", "sft.replay=0.5"], "data/none"),
        (["sft.tokenz=[a]"], "sft.tokenz: there is no such setting; did you mean sft.tokens?"),
    ):
        job = tiny.sft(root, "name=wrong", *more, log="wrong.log")
        assert job.wait() == 2
        assert "Traceback" not in job.output() and said in job.output()
        os.remove(root / "wrong.log")


def test_show_prints_what_is_learnt_and_trains_nothing(root: Path) -> None:
    job = tiny.sft(root, "name=shown", "sft.show=3", log="shown.log")
    assert job.wait() == 0
    said = job.output()
    assert said.count("conversation ") == 3 and "<|im_start|>" in said and "say the" in said
    assert not (root / "runs/shown/checkpoints").exists()


def test_files_of_other_formats_are_fine_tuned_on_as_they_are(root: Path) -> None:
    """ShareGPT, Alpaca and prompt/completion in one command; a conversation is shown for what it is read as."""
    rows = {
        "sharegpt": lambda q, a: {"conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]},
        "alpaca": lambda q, a: {"instruction": q, "input": "", "output": a},
        "prompt": lambda q, a: {"prompt": q, "completion": a},
    }
    for name, row in rows.items():
        made = [row(f"say the {word} {number}", word) for number in range(2) for word in tiny.WORDS]
        (root / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in made))
    files = ",".join(f"{root}/{name}.jsonl" for name in rows)
    job = tiny.sft(root, "name=others", f"chat.files=[{files}]", "train.steps=2", log="others.log")
    assert job.wait() == 0, job.output()
    assert "‹<|im_start|>›assistant\n⟦the‹<|im_end|>›⟧" in job.output() and "0 bad rows" in job.output()
    learnt = checkpoint.read_manifest(root / "runs/others/checkpoints/step-00000002").identity["packed_folder"]
    packed = open_packed(root / learnt)
    assert sum(packed.manifest["splits"][name]["documents"] for name in ("train", "validation")) == 90


def test_two_ranks_fine_tune_as_one(root: Path) -> None:
    jobs = [
        tiny.sft(root, "name=two", "parallel=ddp", "checkpoint.keep=9", env=env, log=f"two-{env['RANK']}.log")
        for env in tiny.ranks_of(2)
    ]
    assert [job.wait() for job in jobs] == [0, 0], jobs[0].output() + jobs[1].output()
    one, two = (prove_resume.record(root / "runs" / name) for name in ("alone", "two"))
    for a, b in zip(one, two, strict=True):
        assert a.keys() == b.keys()
        for key in ("train/loss", "eval/loss"):
            assert key not in a or b[key] == pytest.approx(a[key], rel=1e-4)


def test_the_packed_conversations_of_another_vocabulary_are_refused(root: Path) -> None:
    (foreign,) = (root / "data/packed").glob("own-????????")
    with pytest.raises(UserError, match="another vocabulary"):
        open_packed(foreign, tokenizer.load(root / "runs/alone/checkpoints/step-00000012"))
