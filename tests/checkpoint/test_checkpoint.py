"""Checkpoints: whole or not there, verified, one table, opened by Hugging Face, kept and removed by rule."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import inspect
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from stack import checkpoint
from stack.checkpoint import MANIFEST, manager
from stack.checkpoint import format as form
from stack.config import schema as config
from stack.core.errors import UserError
from stack.data.sampling import train_tokenizer
from stack.model.decoder import Decoder
from stack.model.embedding import INPUT, OUTPUT
from stack.model.huggingface import WEIGHTS
from stack.model.names import clean_name
from stack.text.tokenizer import Tokenizer
from stack.vocabulary.migrate import migrate
from stack.vocabulary.tokens import grow_tokenizer

NUM_ROWS = 320
MODEL = config.Model(
    layers=2, d=32, heads=4, kv_heads=2, head_dim=16, ffn=48, context=64, rope_theta=500.0, norm_eps=1e-5,
    qk_norm=True, init_std=0.3, zero_init=False, softcap=None, scale_input=False,
)  # fmt: skip
FILES = [
    "config.json", "generation_config.json", WEIGHTS, "tokenizer.json", "tokenizer_config.json",
    "training/optimizer.safetensors", "training/state.json", MANIFEST,
]  # fmt: skip
DAMAGE: dict[str, Callable[[bytes], bytes | None]] = {
    "half": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "longer": lambda data: data + b"}",
    "one bit": lambda data: data[:-3] + bytes([data[-3] ^ 1]) + data[-2:],
    "missing": lambda data: None,
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A real one with reserved tokens: the text gives fewer merges than were asked for."""
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "a.txt").write_text("".join(f"the sea was calm, said the {i}th man of the sea\n" for i in range(50)))
    data = config.Data(
        name="d", sources={"a": config.Source(files=(str(folder / "a.txt"),))}, files=(), text="text",
        hub=config.HubFlags(path=None, name=None, split="train", revision=None, streaming=True), on_bad_row="error",
        validation=0.1, seed=0, workers=1, shard_mb=1.0, packed=None,
    )  # fmt: skip
    settings = config.Tokenizer("t", NUM_ROWS, sample_mb=1.0, seed=0, folder=None)
    made = train_tokenizer(settings, data, folder, lambda line: None)
    assert made.vocab_size == NUM_ROWS and made.reserved
    return made


def write(folder: Path, step: int, tokenizer: Tokenizer, *, seed: int | None = None, **changes: object) -> Path:
    """A checkpoint whose tensors are a function of the seed, which is the step where none is given."""
    shape = changes.pop("model_config", MODEL)
    weights = Decoder(shape, NUM_ROWS, seed=step if seed is None else seed).state_dict()
    arguments = {
        "model_config": shape,
        "tokenizer": tokenizer,
        "weights": weights,
        "moments": {f"exp_avg/{name}": weight / 3 for name, weight in weights.items()},
        "state": {"step": step, "rng": [1, 2, 3]},
        "identity": {"run": "test", "data": "ab" * 32},
        "metric": None,
    }
    return checkpoint.save(folder, step, **{**arguments, **changes})


def weights_of(seed: int) -> str:
    return checkpoint.digest_tensors(Decoder(MODEL, NUM_ROWS, seed=seed).state_dict())


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    """A folder with the steps 100 and 200; tests take a copy."""
    folder = tmp_path_factory.mktemp("good") / "checkpoints"
    write(folder, 100, tokenizer)
    write(folder, 200, tokenizer)
    return folder


def reseal(folder: Path) -> None:
    """Make the manifest true again after a file was changed by purpose."""
    manifest = json.loads((folder / MANIFEST).read_text())
    for name in manifest["files"]:
        data = (folder / name).read_bytes()
        manifest["files"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / MANIFEST).write_text(json.dumps(manifest))


def in_child(work: Callable[[], object]) -> tuple[int, str]:
    """Run ``work`` in a forked process; its exit status (negative: the signal that ended it) and its result."""
    read, send = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.write(send, str(work()).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(send)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), text


def at_sync(monkeypatch: pytest.MonkeyPatch, name: str, act: Callable[[Path], object]) -> None:
    """Let ``act`` meet the file ``name`` at the moment when a save brings it down to the disk."""
    sync = manager.disk.sync_path

    def both(path: Path) -> None:
        sync(path)
        if path.as_posix().endswith(f".partial/{name}"):
            act(path)

    monkeypatch.setattr(manager.disk, "sync_path", both)


def error_of(work: Callable[[], object]) -> str:
    with pytest.raises(UserError) as caught:
        work()
    return str(caught.value)


def silent(line: str) -> None:
    raise AssertionError(f"unexpected warning: {line}")


# What is written


@pytest.mark.parametrize("qk_norm", [True, False])
def test_hugging_face_opens_the_folder(tmp_path: Path, tokenizer: Tokenizer, qk_norm: bool) -> None:
    shape = dataclasses.replace(MODEL, qk_norm=qk_norm)
    folder = write(tmp_path, 7, tokenizer, model_config=shape)
    theirs, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())
    assert type(theirs).__name__ == ("Qwen3ForCausalLM" if qk_norm else "LlamaForCausalLM")
    assert theirs.lm_head.weight is theirs.model.embed_tokens.weight
    assert theirs.dtype == torch.float32
    assert theirs.config.rope_parameters["rope_theta"] == MODEL.rope_theta
    assert json.loads((folder / "config.json").read_text())["rope_theta"] == MODEL.rope_theta
    ours = Decoder(shape, NUM_ROWS, seed=7).eval()
    stored = {name: weight for name, weight in theirs.state_dict().items() if name != OUTPUT}
    assert checkpoint.digest_tensors(stored) == checkpoint.digest_tensors(ours.state_dict())
    ids = torch.randint(0, NUM_ROWS, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, ours.logits(ids), rtol=1e-4, atol=1e-4)


def test_tokenizer_and_generation_settings_agree(good: Path, tokenizer: Tokenizer) -> None:
    folder = good / "step-00000100"
    theirs, generation = AutoTokenizer.from_pretrained(folder), GenerationConfig.from_pretrained(folder)
    settings = AutoConfig.from_pretrained(folder)
    assert len(theirs) == settings.vocab_size == NUM_ROWS
    assert theirs.model_max_length == MODEL.context
    text = "the sea, 19 é\n\t"
    assert theirs(text).input_ids == [tokenizer.end_of_text, *tokenizer.encode(text)]
    for holder in (theirs, generation, settings):
        ids = (holder.bos_token_id, holder.eos_token_id, holder.pad_token_id)
        assert ids == (tokenizer.end_of_text, tokenizer.end_of_text, tokenizer.pad)
    assert generation.suppress_tokens == list(tokenizer.unsampled)
    assert generation.do_sample is False
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():  # every reserved row would win, were it not suppressed
        model.model.embed_tokens.weight[list(tokenizer.unsampled)] *= 100
    out = model.generate(torch.tensor([[tokenizer.end_of_text, 65]]), max_new_tokens=20)
    assert not set(out[0].tolist()) & (set(tokenizer.unsampled) - {tokenizer.pad})


@pytest.mark.parametrize("qk_norm", [True, False])
def test_a_vocabulary_with_chat_tokens_has_both_stops(tmp_path: Path, tokenizer: Tokenizer, qk_norm: bool) -> None:
    """Generation configuration, configuration and tokenizer agree; the template travels; reserved rows stay out."""
    template = "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    chat, growth = grow_tokenizer(tokenizer, NUM_ROWS, ("<|im_start|>", "<|im_end|>"), template, tmp_path)
    shape = dataclasses.replace(MODEL, qk_norm=qk_norm)
    weights, moments = migrate(growth, Decoder(shape, NUM_ROWS, seed=7).state_dict(), {})
    folder = write(tmp_path, 7, chat, model_config=shape, weights=weights, moments=moments)
    theirs, generation = AutoTokenizer.from_pretrained(folder), GenerationConfig.from_pretrained(folder)
    stops = [chat.control["<|im_end|>"], chat.end_of_text]
    assert generation.eos_token_id == AutoConfig.from_pretrained(folder).eos_token_id == stops == list(chat.stops)
    assert theirs.eos_token_id == stops[0] and theirs.bos_token_id == generation.bos_token_id == stops[1]
    assert (
        generation.suppress_tokens == [chat.pad, *chat.reserved] and len(chat.reserved) == len(tokenizer.reserved) - 2
    )
    assert theirs.chat_template == template and theirs.model_max_length == MODEL.context
    assert theirs("the sea").input_ids == chat.encode("the sea")
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.model.norm.weight.zero_()
        model.model.embed_tokens.weight.zero_()
    first = torch.tensor([[chat.end_of_text, 65]])
    for stop in stops:  # all logits are equal, so the one that is not suppressed wins
        out = model.generate(first, max_new_tokens=5, suppress_tokens=[i for i in range(NUM_ROWS) if i != stop])
        assert out[0].tolist() == [chat.end_of_text, 65, stop]


@pytest.mark.parametrize("change", [{"softcap": 30.0}, {"scale_input": True}])
def test_native_only_is_not_opened_as_something_else(tmp_path: Path, tokenizer: Tokenizer, change: dict) -> None:
    folder = write(tmp_path, 1, tokenizer, model_config=dataclasses.replace(MODEL, **change))
    loaded = checkpoint.load(folder)
    assert loaded.manifest.native_only
    assert loaded.config["architectures"] == ["StackDecoder"]
    assert loaded.config | change == loaded.config
    with pytest.raises(ValueError, match="stack_native"):
        AutoConfig.from_pretrained(folder)


def test_files_names_and_manifest(good: Path, tokenizer: Tokenizer) -> None:
    folder = good / "step-00000200"
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()) == sorted(FILES)
    assert sorted(path.name for path in folder.glob("*.safetensors")) == [WEIGHTS]
    with safe_open(folder / WEIGHTS, "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.float32}  # noqa: SIM118
        assert INPUT in file.keys() and OUTPUT not in file.keys()  # noqa: SIM118
    manifest = json.loads((folder / MANIFEST).read_text())
    assert manifest["files"].keys() == set(FILES) - {MANIFEST}
    for name, entry in manifest["files"].items():
        data = (folder / name).read_bytes()
        assert entry == {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    assert manifest["aliases"] == {OUTPUT: INPUT}
    assert (manifest["step"], manifest["num_rows"], manifest["native_only"]) == (200, NUM_ROWS, False)
    assert manifest["vocabulary_digest"] == tokenizer.digest


def test_round_trip_is_bit_equal(tmp_path: Path, tokenizer: Tokenizer) -> None:
    weights = Decoder(MODEL, NUM_ROWS, seed=3).state_dict()
    moments = {
        "exp_avg/a.weight": torch.tensor([0.0, -0.0, float("nan"), 1e-45]),
        "step/a.weight": torch.tensor(12.0),
        "count/b": torch.arange(6).reshape(2, 3).t(),
        "momentum_buffer/c": torch.randn(3, 4).bfloat16(),
    }
    state = {"metrics_bytes": 2**40, "loss": 0.1, "text": "é\u2028"}
    folder = write(tmp_path, 12, tokenizer, weights=weights, moments=moments, state=state, metric=0.75)
    loaded = checkpoint.load(folder)
    assert checkpoint.digest_tensors(loaded.weights) == checkpoint.digest_tensors(weights)
    assert checkpoint.digest_tensors(loaded.moments) == checkpoint.digest_tensors(moments)
    assert loaded.state == state
    assert loaded.manifest.identity == {"run": "test", "data": "ab" * 32}
    assert (loaded.manifest.step, loaded.manifest.metric) == (12, 0.75)


def test_no_moments_and_a_metric_that_is_not_finite(tmp_path: Path, tokenizer: Tokenizer) -> None:
    loaded = checkpoint.load(write(tmp_path, 1, tokenizer, moments={}, metric=float("nan")))
    assert loaded.moments == {}
    assert loaded.manifest.metric is None


@given(
    st.lists(st.sampled_from(["model", "layers", "3", "submodule", "my_orig_mod", "weight"]), min_size=1),
    st.lists(st.sampled_from(["_orig_mod", "module"]), max_size=3),
    st.data(),
)
def test_saved_names_hold_no_wrapper(parts: list[str], wrappers: list[str], data: st.DataObject) -> None:
    wrapped = list(parts)
    for wrapper in wrappers:
        wrapped.insert(data.draw(st.integers(0, len(wrapped) - 1)), wrapper)
    assert clean_name(".".join(wrapped)) == ".".join(parts)
    assert clean_name("exp_avg/" + ".".join(wrapped)) == "exp_avg/" + ".".join(parts)


def test_wrapped_names_and_a_tied_head_are_saved_as_the_plain_model(tmp_path: Path, tokenizer: Tokenizer) -> None:
    plain = Decoder(MODEL, NUM_ROWS, seed=5).state_dict()
    wrapped = {f"module._orig_mod.{name.replace('.mlp.', '._orig_mod.mlp.')}": w for name, w in plain.items()}
    moments = {f"exp_avg/{name}": weight for name, weight in wrapped.items()}
    wrapped[f"module.{OUTPUT}"] = plain[INPUT]
    loaded = checkpoint.load(write(tmp_path, 5, tokenizer, weights=wrapped, moments=moments))
    assert checkpoint.digest_tensors(loaded.weights) == checkpoint.digest_tensors(plain)
    assert set(loaded.moments) == {f"exp_avg/{name}" for name in plain}


NEW_PROCESS = """
from __future__ import annotations
import json, sys, torch
from pathlib import Path
from stack import checkpoint
from stack.config import schema as config
from stack.model.decoder import Decoder
{step_once}
model = Decoder(config.Model(**json.loads(sys.argv[2])), 320, seed=99)
checkpoint.load_weights_into(model, checkpoint.load(Path(sys.argv[1])).weights)
print(*step_once(model))
"""


def step_once(model: Decoder) -> tuple[str, str]:
    """Digests of the logits, and of the weights after one step on their sum of squares."""
    torch.set_num_threads(1)
    logits = model.logits(torch.arange(30).reshape(2, 15))
    logits.square().sum().backward()
    torch.optim.SGD(model.parameters(), lr=1e-3).step()
    assert [id(p) for p in model.parameters()].count(id(model.table.weight)) == 1
    return checkpoint.digest_tensors({"logits": logits}), checkpoint.digest_tensors(model.state_dict())


def test_tied_file_in_a_new_process(good: Path) -> None:
    threads = torch.get_num_threads()
    here = step_once(Decoder(MODEL, NUM_ROWS, seed=100))
    torch.set_num_threads(threads)
    script = NEW_PROCESS.format(step_once=inspect.getsource(step_once))
    there = subprocess.run(
        [sys.executable, "-c", script, str(good / "step-00000100"), json.dumps(config.plain(MODEL))],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert tuple(there.stdout.split()) == here


# Whole or not at all

CHANGES_TO_DISK = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}


def kill_at(moment: int, work: Callable[[], object]) -> int:
    """Run ``work`` in a process that SIGKILLs itself before its ``moment``-th operation on the disk."""

    def armed() -> None:
        left = moment

        def hook(event: str, args: tuple) -> None:
            nonlocal left
            if event in CHANGES_TO_DISK:
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        os.fsync = lambda handle: None  # slow, and a kill loses nothing that was handed to the kernel
        sys.addaudithook(hook)
        work()

    return in_child(armed)[0]


@pytest.mark.parametrize(("step", "stride"), [(2, 4), (1, 1)], ids=["next step", "same step"])
def test_a_kill_at_any_moment_leaves_a_good_one(tmp_path: Path, tokenizer: Tokenizer, step: int, stride: int) -> None:
    start = tmp_path / "start"
    write(start, 1, tokenizer)
    allowed = {weights_of(1), weights_of(50)}
    seen, moment, status = set(), 0, -signal.SIGKILL
    while status == -signal.SIGKILL:
        folder = tmp_path / f"killed-{moment}"
        shutil.copytree(start, folder)
        status = kill_at(moment, lambda folder=folder: write(folder, step, tokenizer, seed=50))
        last = checkpoint.newest(folder, silent)
        seen.add(checkpoint.digest_tensors(checkpoint.load(last).weights))
        assert {path.name for path in folder.iterdir()} <= {"step-00000001", f"step-{step:08d}"}
        shutil.rmtree(folder)
        moment += stride
    assert status == 0 and moment > 20
    assert seen == allowed


@pytest.mark.parametrize("name", FILES)
def test_a_kill_that_leaves_half_a_file(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    first = write(tmp_path, 1, tokenizer)

    def kill(path: Path) -> None:
        path.write_bytes(DAMAGE["half"](path.read_bytes()))
        os.kill(os.getpid(), signal.SIGKILL)

    at_sync(monkeypatch, name, kill)
    assert in_child(lambda: write(tmp_path, 1, tokenizer, seed=2))[0] == -signal.SIGKILL
    assert list(tmp_path.glob(".step-00000001.partial"))
    assert checkpoint.newest(tmp_path, silent) == first
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    assert checkpoint.digest_tensors(checkpoint.load(first).weights) == weights_of(1)


@pytest.mark.parametrize("delay", [0.0, 0.003, 0.01, 0.03, 0.06])
def test_a_kill_from_outside(tmp_path: Path, tokenizer: Tokenizer, delay: float) -> None:
    write(tmp_path, 1, tokenizer)
    pid = os.fork()
    if pid == 0:
        try:
            for step in range(2, 10_000):
                write(tmp_path, step, tokenizer)
                checkpoint.retain(tmp_path, 1)
        finally:
            os._exit(1)
    time.sleep(delay)
    os.kill(pid, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    last = checkpoint.newest(tmp_path, silent)
    loaded = checkpoint.load(last)
    assert checkpoint.digest_tensors(loaded.weights) == weights_of(loaded.manifest.step)
    assert not list(tmp_path.glob(".*"))


def test_a_reader_touches_nothing(tmp_path: Path, good: Path) -> None:
    shutil.copytree(good, tmp_path, dirs_exist_ok=True)
    (tmp_path / ".step-00000300.partial").mkdir()
    assert checkpoint.newest(tmp_path, silent, owner=False) == tmp_path / "step-00000200"
    assert (tmp_path / ".step-00000300.partial").is_dir()
    assert checkpoint.newest(tmp_path, silent) == tmp_path / "step-00000200"
    assert not (tmp_path / ".step-00000300.partial").exists()


def test_a_save_clears_what_a_killed_one_left(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / ".step-00000001.partial" / "training").mkdir(parents=True)
    (tmp_path / ".step-00000009.partial").mkdir()
    write(tmp_path, 1, tokenizer)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_the_same_step_is_replaced(tmp_path: Path, tokenizer: Tokenizer) -> None:
    first = write(tmp_path, 4, tokenizer)
    (first / WEIGHTS).unlink()
    (first / "of-an-older-save").touch()
    second = write(tmp_path, 4, tokenizer, seed=9)
    assert second == first
    assert checkpoint.digest_tensors(checkpoint.load(second).weights) == weights_of(9)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000004"]
    assert not (second / "of-an-older-save").exists()


@pytest.mark.parametrize("name", FILES)
def test_disk_full_in_the_second_save(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    first = write(tmp_path, 1, tokenizer)

    def full(path: Path) -> None:
        path.write_bytes(DAMAGE["half"](path.read_bytes()))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    at_sync(monkeypatch, name, full)
    message = error_of(lambda: write(tmp_path, 2, tokenizer))
    needed = 2 * sum(weight.nbytes for weight in Decoder(MODEL, NUM_ROWS).state_dict().values())
    for part in ("No space left on device", str(tmp_path / "step-00000002"), f"{needed:,} bytes", "free", str(first)):
        assert part in message
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    checkpoint.retain(tmp_path, 1)
    assert checkpoint.digest_tensors(checkpoint.load(first).weights) == weights_of(1)


@pytest.mark.parametrize("limit", [100, 20_000, 150_000], ids=["config", "weights", "moments"])
def test_the_kernel_refuses_to_write(tmp_path: Path, tokenizer: Tokenizer, limit: int) -> None:
    first = write(tmp_path, 1, tokenizer)
    assert (first / "config.json").stat().st_size < 20_000 < (first / WEIGHTS).stat().st_size < 150_000
    moments = {"exp_avg/a": torch.zeros(50_000)}

    def limited() -> str:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        return error_of(lambda: write(tmp_path, 2, tokenizer, moments=moments))

    status, message = in_child(limited)
    assert status == 0
    assert "File too large" in message and str(first) in message
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    checkpoint.load(first)


def test_the_device_is_full_while_the_tokenizer_is_written(tmp_path: Path, tokenizer: Tokenizer) -> None:
    class ToFullDevice(Tokenizer):
        def save_into(self, folder: Path, max_length: int | None = None) -> None:
            (folder / "tokenizer.json").symlink_to("/dev/full")
            super().save_into(folder, max_length)

    full = ToFullDevice(*(getattr(tokenizer, field.name) for field in dataclasses.fields(tokenizer)))
    message = error_of(lambda: write(tmp_path, 2, full))
    assert "No space left on device" in message and "There is no earlier good checkpoint" in message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", FILES)
def test_what_the_disk_changed_is_not_kept(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    first = write(tmp_path, 1, tokenizer)
    at_sync(monkeypatch, name, lambda path: path.write_bytes(DAMAGE["one bit"](path.read_bytes())))
    assert name in error_of(lambda: write(tmp_path, 1, tokenizer, seed=2))
    assert checkpoint.digest_tensors(checkpoint.load(first).weights) == weights_of(1)


@pytest.mark.parametrize("name", [WEIGHTS, "training/optimizer.safetensors"])
def test_what_was_written_otherwise_is_not_kept(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    whole = manager.safetensors.torch.save_file

    def flip(tensors: dict[str, Tensor], path: Path, metadata: dict[str, str]) -> None:
        whole(tensors, path, metadata)
        if path.name == Path(name).name:
            path.write_bytes(DAMAGE["one bit"](path.read_bytes()))

    monkeypatch.setattr(manager.safetensors.torch, "save_file", flip)
    message = error_of(lambda: write(tmp_path, 1, tokenizer))
    assert name in message and "read back" in message
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "run").write_text("a file where the run's folder should be")
    assert "Not a directory" in error_of(lambda: write(tmp_path / "run" / "checkpoints", 1, tokenizer))


def test_what_is_not_json_leaves_nothing(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError):
        write(tmp_path, 1, tokenizer, state={"loss": float("nan")})
    assert not list(tmp_path.iterdir())


# What is read


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_named_and_the_older_one_taken(tmp_path: Path, good: Path, name: str, damage: str) -> None:
    shutil.copytree(good, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "step-00000200" / name
    data = DAMAGE[damage](path.read_bytes())
    path.unlink()
    if data is not None:
        path.write_bytes(data)
    message = error_of(lambda: checkpoint.load(tmp_path / "step-00000200"))
    assert str(path) in message and "take another one" in message
    warnings: list[str] = []
    assert checkpoint.newest(tmp_path, warnings.append) == tmp_path / "step-00000100"
    assert len(warnings) == 1 and "step-00000200" in warnings[0] and name in warnings[0]
    checkpoint.load(tmp_path / "step-00000100")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(FILES), st.floats(0, 1, exclude_max=True))
def test_a_file_cut_anywhere(good: Path, name: str, share: float) -> None:
    path = good / "step-00000200" / name
    data = path.read_bytes()
    # The newline that ends the manifest is the one byte that means nothing.
    path.write_bytes(data[: int(share * (len(data) - 1))])
    try:
        assert str(path) in error_of(lambda: checkpoint.load(good / "step-00000200"))
        assert checkpoint.newest(good, lambda line: None) == good / "step-00000100"
    finally:
        path.write_bytes(data)


def test_sizes_and_digests_are_told(tmp_path: Path, good: Path) -> None:
    folder = shutil.copytree(good / "step-00000200", tmp_path / "copy")
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[:1234])
    message = error_of(lambda: checkpoint.load(folder))
    assert "1,234 bytes" in message and f"expected {len(data):,}" in message
    changed = DAMAGE["one bit"](data)
    (folder / WEIGHTS).write_bytes(changed)
    message = error_of(lambda: checkpoint.load(folder))
    assert hashlib.sha256(data).hexdigest() in message and hashlib.sha256(changed).hexdigest() in message


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"format": 1}', "\x00" * 900])
def test_a_manifest_that_is_none(tmp_path: Path, good: Path, text: str) -> None:
    folder = shutil.copytree(good / "step-00000200", tmp_path / "step-00000200")
    (folder / MANIFEST).write_text(text)
    assert MANIFEST in error_of(lambda: checkpoint.load(folder))


def test_another_format_and_a_manifest_without_weights(tmp_path: Path, good: Path) -> None:
    folder = shutil.copytree(good / "step-00000200", tmp_path / "copy")
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({**manifest, "format": 2}))
    assert "format 1" in error_of(lambda: checkpoint.load(folder))
    del manifest["files"][WEIGHTS]
    (folder / MANIFEST).write_text(json.dumps(manifest))
    assert f"does not name {WEIGHTS}" in error_of(lambda: checkpoint.load(folder))


def test_all_damaged_and_none_there(tmp_path: Path, good: Path) -> None:
    shutil.copytree(good, tmp_path / "checkpoints")
    for folder in (tmp_path / "checkpoints").iterdir():
        (folder / MANIFEST).unlink()
    (tmp_path / "checkpoints" / "step-00000300").mkdir()
    (tmp_path / "checkpoints" / "step-00000400").touch()
    (tmp_path / "checkpoints" / "step-by-step").mkdir()
    warnings: list[str] = []
    assert checkpoint.newest(tmp_path / "checkpoints", warnings.append) is None
    assert [line.split()[2] for line in warnings] == [f"step-00000{step}" for step in (400, 300, 200, 100)]
    assert checkpoint.newest(tmp_path / "nowhere", silent) is None
    message = error_of(lambda: checkpoint.load(good / "step-00000150"))
    assert "step-00000100, step-00000200" in message


def test_steps_are_ordered_as_numbers(tmp_path: Path, good: Path) -> None:
    for name in ("step-99999999", "step-100000000"):
        shutil.copytree(good / "step-00000100", tmp_path / name)
    assert checkpoint.newest(tmp_path, silent) == tmp_path / "step-100000000"


def test_each_file_is_opened_once(good: Path) -> None:
    def opened() -> str:
        names: list[str] = []
        sys.addaudithook(lambda event, args: names.append(str(args[0])) if event == "open" else None)
        checkpoint.load(good / "step-00000100")
        return "\n".join(name for name in names if "step-00000100" in name)

    status, names = in_child(opened)
    assert status == 0
    assert sorted(names.split("\n")) == sorted(str(good / "step-00000100" / name) for name in FILES)


@pytest.mark.parametrize(
    ("tied", "head", "says"),
    [
        (True, None, None),
        (True, "equal", None),
        (True, "other", "tie_word_embeddings=true, but"),
        (False, None, "tie_word_embeddings=false, but"),
        (False, "equal", None),
        (False, "other", "a table of its own"),
    ],
)
def test_contradicting_head(tmp_path: Path, good: Path, tied: bool, head: str | None, says: str | None) -> None:
    folder = shutil.copytree(good / "step-00000100", tmp_path / "copy")
    weights = load_file(folder / WEIGHTS)
    expected = checkpoint.digest_tensors(weights)
    if head:
        weights[OUTPUT] = weights[INPUT] + (1e-3 if head == "other" else 0)
    save_file(weights, folder / WEIGHTS)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "tie_word_embeddings": tied}))
    reseal(folder)
    if says is None:
        assert checkpoint.digest_tensors(checkpoint.load(folder).weights) == expected
    else:
        message = error_of(lambda: checkpoint.load(folder))
        assert says in message and str(folder) in message and OUTPUT in message


# Into a model


class Wrapper(nn.Module):
    """Names as DistributedDataParallel gives them."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module


def test_weights_go_into_a_wrapped_model_in_place() -> None:
    model = Decoder(MODEL, NUM_ROWS, seed=1)
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    weights = Decoder(MODEL, NUM_ROWS, seed=2).state_dict()
    checkpoint.load_weights_into(Wrapper(torch.compile(model)), weights)
    assert checkpoint.digest_tensors(model.state_dict()) == checkpoint.digest_tensors(weights)
    assert before == {name: parameter.data_ptr() for name, parameter in model.named_parameters()}


def test_weights_go_into_a_model_of_transformers(good: Path) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(good / "step-00000100"))
    weights = checkpoint.load(good / "step-00000100").weights
    checkpoint.load_weights_into(model, weights)
    assert torch.equal(model.lm_head.weight, weights[INPUT])


def test_what_does_not_fit_is_listed_and_nothing_copied() -> None:
    model = Decoder(MODEL, NUM_ROWS, seed=1)
    before = checkpoint.digest_tensors(model.state_dict())
    weights: dict[str, Tensor] = Decoder(MODEL, NUM_ROWS + 64, seed=2).state_dict()
    gone = [weights.pop(name) for name in ("model.norm.weight", "model.layers.1.mlp.up_proj.weight")]
    weights["model.layers.2.mlp.up_proj.weight"] = weights["_orig_mod.model.norm.weight"] = gone[0]
    message = error_of(lambda: checkpoint.load_weights_into(model, weights))
    assert "2 missing in the checkpoint: model.layers.1.mlp.up_proj.weight, model.norm.weight" in message
    assert "2 unexpected in it: _orig_mod.model.norm.weight, model.layers.2.mlp.up_proj.weight" in message
    assert f"{INPUT} is [384, 32] in the checkpoint and [320, 32] in the model" in message
    assert checkpoint.digest_tensors(model.state_dict()) == before


def test_digest_sees_every_difference_and_no_order() -> None:
    zero = torch.zeros(2, 3)
    same = [
        {"a": zero, "b": torch.tensor(1)},
        {"b": torch.tensor(1), "a": torch.zeros(3, 2).t()},
    ]
    different = [
        {"a": zero},
        {"a": -zero},
        {"b": zero},
        {"a": zero.reshape(3, 2)},
        {"a": zero.to(torch.int32)},
        {"a": zero, "b": torch.zeros(0)},
        {"a": zero[:1], "b": zero[:1]},
        {"a": torch.full((2, 3), float("nan"))},
    ]
    assert len({checkpoint.digest_tensors(tensors) for tensors in same}) == 1
    assert len({checkpoint.digest_tensors(tensors) for tensors in [*same, *different]}) == 1 + len(different)


# Retention


def count_hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes that SHA-256 takes from now on, a number for each call."""
    counted: list[int] = []
    real, of_file = hashlib.sha256, hashlib.file_digest

    class Counting:
        def __init__(self, data: bytes = b""):
            self.hash = real()
            self.update(data)

        def update(self, data: bytes) -> None:
            counted.append(memoryview(data).nbytes)
            self.hash.update(data)

        def hexdigest(self) -> str:
            return self.hash.hexdigest()

    def file_digest(file: BinaryIO, name: str) -> object:
        counted.append(os.fstat(file.fileno()).st_size)
        return of_file(file, name)

    monkeypatch.setattr(hashlib, "sha256", Counting)
    monkeypatch.setattr(hashlib, "file_digest", file_digest)
    return counted


def test_what_is_written_is_hashed_once_and_then_only_after_a_change(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(form, "SETTLED_NS", -1)  # stands for the time that a real save takes
    write(tmp_path, 1, tokenizer)
    hashed = count_hashed(monkeypatch)
    second = write(tmp_path, 2, tokenizer)
    checkpoint.retain(tmp_path, 2)
    assert checkpoint.newest(tmp_path, silent) == second
    assert sum(hashed) == sum((second / name).stat().st_size for name in FILES)
    hashed.clear()
    for path in (second / WEIGHTS, second / "config.json"):  # another content, and a touch
        about, data = path.stat(), path.read_bytes()
        path.write_bytes(DAMAGE["one bit"](data) if path.name == WEIGHTS else data)
        os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert checkpoint.newest(tmp_path, lambda line: None) == tmp_path / "step-00000001"
    assert sum(hashed) == sum((second / name).stat().st_size for name in (WEIGHTS, "config.json"))


def test_a_change_within_a_tick_of_the_clock_is_noticed(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact, tick = form._state, form.SETTLED_NS  # the slowest clock for which it holds
    coarse = lambda path: (*exact(path)[:3], *(time // tick * tick for time in exact(path)[3:]))  # noqa: E731
    monkeypatch.setattr(form, "_state", coarse)
    for step in range(1, 11):
        path = write(tmp_path, step, tokenizer) / "training/state.json"
        path.write_bytes(DAMAGE["one bit"](path.read_bytes()))
        assert checkpoint.newest(tmp_path, lambda line: None) is None


def dummy(source: Path, checkpoints: Path, step: int, metric: float | None) -> Path:
    """A good checkpoint of another step, without the price of a real save."""
    folder = checkpoints / f"step-{step:08d}"
    shutil.copytree(source, folder, copy_function=os.link)
    text = json.dumps({**json.loads((source / MANIFEST).read_text()), "step": step, "metric": metric})
    (folder / MANIFEST).unlink()
    (folder / MANIFEST).write_text(text)
    return folder


@settings(max_examples=40, deadline=None)
@given(
    metrics=st.lists(st.none() | st.sampled_from([0.5, 1.0, 1.5]), min_size=1, max_size=5),
    keep=st.integers(1, 3),
    data=st.data(),
)
def test_the_newest_and_the_best_stay(
    tmp_path_factory: pytest.TempPathFactory, good: Path, metrics: list, keep: int, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("retain")
    damaged = data.draw(st.sets(st.sampled_from(range(len(metrics)))))
    for step, metric in enumerate(metrics):
        path = dummy(good / "step-00000100", folder, step, metric)
        if step in damaged:
            (path / "config.json").unlink()
    sound = [step for step in range(len(metrics)) if step not in damaged]
    lowest = min((metrics[step] for step in sound if metrics[step] is not None), default=None)
    best = [step for step in sound if lowest is not None and metrics[step] == lowest][-1:]
    checkpoint.retain(folder, keep)
    stay = {*sound[-keep:], *best, *damaged}
    assert {path.name for path in folder.iterdir()} == {f"step-{step:08d}" for step in stay}


def test_a_newest_that_only_looks_good_costs_no_older_one(tmp_path: Path, good: Path) -> None:
    shutil.copytree(good, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "step-00000200" / WEIGHTS
    path.write_bytes(DAMAGE["one bit"](path.read_bytes()))
    checkpoint.retain(tmp_path, 1)
    assert checkpoint.newest(tmp_path, lambda line: None) == tmp_path / "step-00000100"


def test_a_kill_while_old_ones_go(tmp_path: Path, good: Path) -> None:
    moment, status = 0, -signal.SIGKILL
    while status == -signal.SIGKILL:
        folder = tmp_path / str(moment)
        shutil.copytree(good, folder)
        status = kill_at(moment, lambda folder=folder: checkpoint.retain(folder, 1))
        assert checkpoint.newest(folder, silent) == folder / "step-00000200"
        for path in folder.iterdir():
            checkpoint.load(path)
        moment += 1
    assert status == 0 and moment > 10
