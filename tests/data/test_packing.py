"""What is packed is the text, the whole text and its order, however often the work was killed and by how many."""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import talk

from stack.config import schema as config
from stack.core.errors import UserError
from stack.data import encoding, packing
from stack.data import sources as corpus
from stack.data.batches import Batches
from stack.data.packed import FORMAT, SPLITS, Packed, open_packed
from stack.data.sampling import train_tokenizer
from stack.text import conversation, template

ROOT = Path(packing.__file__).resolve().parents[2]
WORDS = ["the", "sea", "a", "house", "was", "old", "and", "near", "we", "went", "there", "by", "night", "\n", "1984"]
WORDS += ["émigré", "漢字", "😀", "<|endoftext|>", "<|pad|>"]


def texts_of(count: int, seed: int) -> list[str]:
    """Documents of 0 to 80 words; every eleventh is empty."""
    draw = random.Random(seed)
    return ["" if n % 11 == 5 else " ".join(draw.choices(WORDS, k=draw.randrange(1, 80))) for n in range(count)]


def write(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


# What texts and conversations have alike here.
COMMON = {
    "files": (),
    "hub": config.HubFlags(path=None, name=None, split="train", revision=None, streaming=True),
    "on_bad_row": "skip",
    "validation": 0.2,
    "seed": 3,
    "workers": 1,
    "packed": None,
}


def data_of(sources: dict[str, config.Source], **changed) -> config.Data:
    given = COMMON | {"name": "mine", "text": "text", "shard_mb": 0.02}
    return config.Data(sources=sources, **(given | changed))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Two sources, one of weight 1.5, and a tokenizer trained on them."""
    folder = tmp_path_factory.mktemp("made")
    sources = {
        "one": config.Source(files=(str(write(folder / "one.jsonl", texts_of(400, 1))),), weight=1.5),
        "two": config.Source(files=(str(write(folder / "two.jsonl", texts_of(250, 2))),)),
    }
    settings = config.Tokenizer(name="small", vocab_size=384, sample_mb=1.0, seed=0, folder=None)
    return data_of(sources), train_tokenizer(settings, data_of(sources), folder, lambda line: None)


@pytest.fixture(scope="module")
def packed(made, tmp_path_factory):
    data, tokenizer = made
    return packing.pack(data, tokenizer, tmp_path_factory.mktemp("packed"), lambda line: None)


def tree(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def changed(data, **values):
    return type(data)(**{**vars(data), **values})


def expected_texts(data: config.Data, split: str) -> list[str]:
    """What a split must hold, in order, straight from the corpus."""
    found = []
    for name, source in sorted(data.sources.items()):
        for document in corpus.documents(name, source, on_bad_row="skip", bad=Counter()):
            held_out = corpus.held_out(document.key, data.validation, data.seed)
            copies = 1 if held_out else corpus.packs(document.key, source.weight, data.seed)
            if document.text and held_out == (split == "validation"):
                found += [document.text] * copies
    return found


@pytest.mark.parametrize("name", SPLITS)
def test_a_split_is_its_documents(made, packed, name):
    data, tokenizer = made
    split, texts = packed.split(name), expected_texts(data, name)
    assert split.num_documents == len(texts) > 20
    assert split.num_bytes == sum(len(text.encode()) for text in texts)
    for text, start, length in zip(texts, split.starts.tolist(), split.lengths.tolist(), strict=True):
        ids = split.ids(start, length + 1).tolist()
        assert ids == [tokenizer.end_of_text, *tokenizer.encode(text), tokenizer.end_of_text]
    assert split.num_targets == split.lengths.sum() == sum(1 + len(tokenizer.encode(text)) for text in texts)


def test_the_splits_share_no_text(packed, made):
    assert not set(expected_texts(made[0], "train")) & set(expected_texts(made[0], "validation"))


def test_text_is_never_control(packed, made):
    """CASES, control text: documents spell <|endoftext|>; only documents and shard ends have one."""
    for shard in packed.manifest["shards"]:
        ids = np.fromfile(packed.folder / f"{shard['name']}.bin", dtype=packed.manifest["dtype"])
        assert (ids == made[1].end_of_text).sum() == shard["documents"] + 1
        assert (ids != made[1].pad).all() and ids[-1] == ids[0] == made[1].end_of_text


def test_the_manifest_adds_up(packed, made):
    tokenizer, manifest = made[1], packed.manifest
    assert (packed.vocabulary_digest, packed.num_rows) == (tokenizer.digest, tokenizer.vocab_size)
    assert packed.folder.name == f"mine-{manifest['digest'][:8]}"
    on_disk = {path.name for path in packed.folder.iterdir()}
    assert on_disk == {*manifest["files"], "manifest.json"}
    for name, file in manifest["files"].items():
        content = (packed.folder / name).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (file["size"], file["sha256"])
    train = np.concatenate(
        [np.fromfile(packed.folder / f"{s['name']}.bin", "<u2") for s in manifest["shards"] if s["split"] == "train"]
    )
    assert np.array_equal(packed.counts(), np.bincount(train, minlength=tokenizer.vocab_size))
    assert packed.counts().dtype == np.int64
    for key in ("documents", "tokens", "targets", "bytes", "shards"):
        for split in SPLITS:
            assert manifest["splits"][split][key] == sum(source[split][key] for source in manifest["sources"].values())
    one, two = manifest["sources"]["one"]["skipped"], manifest["sources"]["two"]["skipped"]
    assert one["empty"] == 36 and two["empty"] == 23
    assert one["repeats"] > 50 and one["omissions"] == two["repeats"] == two["omissions"] == 0
    read = {name: 400 if name == "one" else 250 for name in ("one", "two")}
    for name, source in manifest["sources"].items():
        skipped = source["skipped"]
        packed_once = sum(source[split]["documents"] for split in SPLITS) - skipped["repeats"]
        assert packed_once + skipped["empty"] + skipped["omissions"] == read[name]


def test_shards_are_closed_at_their_size(packed):
    for source in ("one", "two"):
        sizes = [
            packed.manifest["files"][f"{shard['name']}.bin"]["size"]
            for shard in packed.manifest["shards"]
            if shard["source"] == source and shard["split"] == "train"
        ]
        assert len(sizes) > 1 and max(sizes) < 22_000


def test_any_number_of_workers(packed, made, tmp_path):
    data, tokenizer = made
    again = packing.pack(changed(data, workers=2), tokenizer, tmp_path, lambda line: None)
    assert again.folder.name == packed.folder.name
    assert tree(again.folder) == tree(packed.folder)


def test_a_finished_folder_is_reused(made, tmp_path):
    data, tokenizer = made
    folder = packing.pack(data, tokenizer, tmp_path, lambda line: None).folder
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert packing.pack(changed(data, workers=3), tokenizer, tmp_path, lambda line: None).folder == folder
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    other = packing.pack(changed(data, seed=4), tokenizer, tmp_path, lambda line: None)
    assert other.folder != folder and other.digest != open_packed(folder).digest
    assert [path.name for path in folder.parent.iterdir() if path.name.endswith(".partial")] == []


WEIGHTED = {"half": 0.5, "two and a half": 2.5, "none": 0.0}


def test_weights(made, tmp_path):
    """A source's weight repeats and omits training documents, and never a held-out one."""
    files = made[0].sources["two"].files
    sources = {name: config.Source(files=files, weight=weight) for name, weight in WEIGHTED.items()}
    found = packing.pack(data_of(sources), made[1], tmp_path, lambda line: None).manifest["sources"]
    assert set(found) == {"half", "two and a half"}
    half, more = found["half"], found["two and a half"]
    assert half["validation"]["documents"] == more["validation"]["documents"] > 0
    training = 250 - 23 - half["validation"]["documents"]
    assert half["skipped"]["omissions"] == training - half["train"]["documents"]
    assert more["skipped"]["repeats"] == more["train"]["documents"] - training
    assert 0.3 < half["train"]["documents"] / training < 0.7 and 2.3 < more["train"]["documents"] / training < 2.7


def broken_file(folder: Path) -> config.Data:
    """200 documents, and refused rows before, between and after them, at the ends of blocks too."""
    lines = [json.dumps({"text": text}) for text in texts_of(200, 5)]
    for at in (0, 50, 51, 120, 199):
        lines.insert(at, "{broken")
    lines += ['{"text": null}', '{"other": "x"}']
    (folder / "bad.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return data_of({"bad": config.Source(files=(str(folder / "bad.jsonl"),), max_mb=0.03)}, shard_mb=0.004)


class Killed(BaseException):
    """Stands for a death at one place of the code."""


@pytest.mark.parametrize("after_rename", [True, False])
def test_a_death_at_any_block_changes_nothing(made, tmp_path, monkeypatch, after_rename):
    """Documents, refused rows and ``max_mb`` are counted once, wherever the work was stopped and taken up again."""
    data = broken_file(tmp_path)
    whole = packing.pack(data, made[1], tmp_path / "whole", lambda line: None)
    assert sum(whole.manifest["sources"]["bad"]["skipped"]["bad_rows"].values()) >= 4
    assert 0.03e6 <= sum(total["bytes"] for total in whole.manifest["splits"].values()) < 0.031e6
    replace = packing.files.replace

    def dies(path: Path, content: bytes, *, durable: bool) -> None:
        if after_rename:
            replace(path, content, durable=durable)
        raise Killed

    monkeypatch.setattr(packing.files, "replace", dies)
    deaths = 0
    while deaths < (100 if after_rename else 2):
        try:
            packing.pack(data, made[1], tmp_path / "killed", lambda line: None)
        except Killed:
            deaths += 1
        else:
            break
    assert deaths > 5 if after_rename else deaths == 2
    monkeypatch.undo()
    result = packing.pack(data, made[1], tmp_path / "killed", lambda line: None)
    assert tree(result.folder) == tree(whole.folder)


# Loads the libraries once, then packs in a process of its own for each line that it reads.
PACK = """
import json, os, sys
from pathlib import Path
from stack.config import schema as config
from stack.data import packing
from stack.text import tokenizer
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        settings, folder, root = json.loads(line)
        sources = {name: config.Source(**source) for name, source in settings.pop("sources").items()}
        data = config.Data(sources=sources, hub=config.HubFlags(**settings.pop("hub")), **settings)
        packing.pack(data, tokenizer.load(Path(folder)), Path(root), lambda line: None)
        os._exit(0)
    print(child, flush=True)
    os.waitpid(child, 0)
"""


def wait_until(holds, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.001)


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="looks for child processes under /proc")
def test_killed_for_real(made, tmp_path):
    """SIGKILL at seeded moments, with two workers and with one: none of them stays behind, and the end is equal."""
    tokenizer = made[1]  # and far more text than a fast machine packs before it is killed
    many = {"many": config.Source(files=(str(write(tmp_path / "many.jsonl", texts_of(2000, 3))),))}
    data, draw = data_of(many), random.Random(0)
    packed = packing.pack(data, tokenizer, tmp_path / "whole", lambda line: None)
    partial = tmp_path / "packed" / f"{packed.folder.name}.partial"
    server = subprocess.Popen(
        [sys.executable, "-c", PACK], cwd=ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    for workers in (2, 1):
        finished = len(list(partial.glob("*.starts.npy")))
        settings = config.plain(changed(data, workers=workers))
        print(json.dumps([settings, str(tokenizer.folder), str(tmp_path)]), file=server.stdin, flush=True)
        process = int(server.stdout.readline())
        wait_until(lambda finished=finished: len(list(partial.glob("*.starts.npy"))) >= finished + 3)
        children = children_of(process)
        assert len(children) >= (2 if workers == 2 else 0)
        time.sleep(draw.random() * 0.01)
        os.kill(process, signal.SIGKILL)
        wait_until(lambda children=children: not any(Path(f"/proc/{child}").exists() for child in children))
    server.communicate()
    assert not (tmp_path / "packed" / packed.folder.name).exists()
    shown: list[str] = []
    result = packing.pack(data, tokenizer, tmp_path, shown.append)
    assert any("resuming" in line for line in shown)
    assert tree(result.folder) == tree(packed.folder)


def test_two_at_once(packed, made, tmp_path):
    """The second waits for the first and takes what it made."""
    data, tokenizer = made
    shown: dict[int, list[str]] = {0: [], 1: []}
    results: dict[int, Packed] = {}

    def work(number: int) -> None:
        results[number] = packing.pack(data, tokenizer, tmp_path, shown[number].append)

    threads = [threading.Thread(target=work, args=(number,)) for number in shown]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum("waiting for it" in line for lines in shown.values() for line in lines) == 1
    assert results[0].folder == results[1].folder
    assert tree(results[0].folder) == tree(packed.folder)


def test_short_split(made, tmp_path):
    """CASES, short split: no document, only empty ones; one short document is enough, and then nothing is held out."""
    cases = {"none": [], "empty": ["", ""]}
    for name, texts in cases.items():
        path = write(tmp_path / f"{name}.jsonl", texts)
        with pytest.raises(UserError) as error:
            packing.pack(data_of({name: config.Source(files=(str(path),))}), made[1], tmp_path, lambda line: None)
        assert "0 documents, at least 1 is needed" in str(error.value)
        assert str(path) in str(error.value) and "data.validation=0.2" in str(error.value)
    path = write(tmp_path / "one.jsonl", ["only this"])
    shown: list[str] = []
    result = packing.pack(data_of({"one": config.Source(files=(str(path),))}), made[1], tmp_path, shown.append)
    assert [result.split(name).num_documents for name in SPLITS] == [1, 0]
    assert shown[0] == "no validation: 1 document, 9 B in all, too little to hold some of it out"
    path = write(tmp_path / "two.jsonl", [f"text {n}" for n in range(8)])
    data = data_of({"two": config.Source(files=(str(path),))}, validation=0.3)
    result = packing.pack(data, made[1], tmp_path, lambda line: None)
    assert all(result.split(name).num_documents >= 1 for name in SPLITS)


class Wide:
    """A tokenizer of more rows than uint16 can tell apart: a text is the code points of its characters."""

    def __init__(self, rows: int):
        self.vocab_size, self.digest, self.end_of_text, self.pad = rows, f"{rows:064x}", 0, 1
        self.control = {"<|im_start|>": 65_536, "<|im_end|>": 65_537}

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [[ord(character) for character in text] for text in texts]


def test_big_ids(tmp_path):
    """CASES, big ids: 65,536 never becomes 0."""
    texts = [f"{chr(65_530 + n % 6)}{chr(65_536 + n % 4)}" for n in range(40)]
    source = config.Source(files=(str(write(tmp_path / "big.jsonl", texts)),))
    data = data_of({"big": source})
    result = packing.pack(data, Wide(65_540), tmp_path, lambda line: None)
    assert result.manifest["dtype"] == "uint32"
    ids = np.concatenate([result.split(name).ids(int(s), 3) for name in SPLITS for s in result.split(name).starts])
    assert Counter(ids.tolist()) == Counter(ord(character) for text in texts for character in "\0" + text)
    with pytest.raises(OverflowError):
        packing.pack(data, Wide(65_536), tmp_path, lambda line: None)
    assert encoding.id_dtype(2**16) == np.uint16 and encoding.id_dtype(2**16 + 1) == np.uint32


def damage_truncated(folder: Path) -> str:
    path = folder / "train-00001.bin"
    size = path.stat().st_size
    os.truncate(path, size // 2)
    return f"{path} has {size // 2} bytes, {size} bytes are expected"


def damage_missing(folder: Path) -> str:
    (folder / "validation-00000.starts.npy").unlink()
    return f"{folder / 'validation-00000.starts.npy'} is missing"


def damage_manifest(folder: Path) -> str:
    (folder / "manifest.json").write_text("{")
    return f"{folder / 'manifest.json'} is damaged"


def damage_no_manifest(folder: Path) -> str:
    (folder / "manifest.json").unlink()
    return "manifest.json is missing"


def edit(folder: Path, key: str, value) -> None:
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    (folder / "manifest.json").write_text(json.dumps({**manifest, key: value}), encoding="utf-8")


def damage_format(folder: Path) -> str:
    edit(folder, "format", 99)
    return f"format 99, but this program reads format {FORMAT}"


def damage_dtype(folder: Path) -> str:
    edit(folder, "dtype", "uint32")
    return "ids as uint32, but 384 rows need uint16"


def damage_counts(folder: Path) -> str:
    counts = np.load(folder / "counts.npy")
    counts[5] += 1
    np.save(folder / "counts.npy", counts)
    return f"{folder / 'counts.npy'} counts {counts.sum()} ids of 384 rows, the manifest {counts.sum() - 1} of 384"


@pytest.mark.parametrize(
    "damage",
    [
        damage_truncated,
        damage_missing,
        damage_manifest,
        damage_no_manifest,
        damage_format,
        damage_dtype,
        damage_counts,
    ],
)
def test_a_damaged_folder_is_refused(packed, tmp_path, damage):
    folder = tmp_path / packed.folder.name
    folder.mkdir()
    for path in packed.folder.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    open_packed(folder)
    message = damage(folder)
    with pytest.raises(UserError) as error:
        open_packed(folder)
    assert message in str(error.value)


def test_the_validation_text_has_one_name(packed, made, tmp_path):
    """Neither shards nor weights nor the tokenizer change what the validation text is called."""
    data = changed(made[0], shard_mb=1.0, sources={n: config.Source(files=s.files) for n, s in made[0].sources.items()})
    other = packing.pack(data, Wide(150_000), tmp_path, lambda line: None)
    assert other.manifest["validation_digest"] == packed.manifest["validation_digest"]
    assert other.manifest["splits"]["train"]["texts"] != packed.manifest["splits"]["train"]["texts"]


# ---------------------------------------------------------------- conversations

WINDOW = 100


def conversations_of(count: int, seed: int) -> list[dict]:
    """Records of one to four exchanges, with tool calls, turns of weight 0, and every ninth a bad one."""
    draw, found = random.Random(seed), []
    for number in range(count):
        messages = [{"role": "system", "content": "the sea"}] if draw.random() < 0.3 else []
        for turn in range(draw.randrange(1, 5)):
            messages.append(
                {"role": "user", "content": f"{number} {' '.join(draw.choices(WORDS, k=draw.randrange(1, 9)))}"}
            )
            if draw.random() < 0.2:
                call = {"name": "look", "arguments": {"<|im_end|>": number}}
                messages += [
                    {"role": "assistant", "content": None, "tool_calls": [call]},
                    {"role": "tool", "content": "seen"},
                ]
            weight = {"weight": 0} if turn and draw.random() < 0.3 else {}
            messages.append(
                {"role": "assistant", "content": " ".join(draw.choices(WORDS, k=draw.randrange(1, 9)))} | weight
            )
        found.append({"messages": [m for m in messages if number % 9 != 4 or m["role"] == "user"]})
    return found


def chat_of(sources: dict[str, config.ConversationSource], **changed) -> config.Conversations:
    given = COMMON | {"name": "talk", "text": "messages", "shard_mb": 0.01, "too_long": "cut"}
    return config.Conversations(sources=sources, **(given | changed))


def write_talks(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def talked(tmp_path_factory):
    """Two sources of conversations, one of weight 1.5, and a tokenizer with chat tokens."""
    folder = tmp_path_factory.mktemp("talked")
    sources = {
        "one": config.ConversationSource(
            files=(write_talks(folder / "one.jsonl", conversations_of(150, 1)),), weight=1.5
        ),
        "two": config.ConversationSource(
            files=(write_talks(folder / "two.jsonl", conversations_of(90, 2)),), validation=0.4
        ),
    }
    return chat_of(sources), talk.tokenizer_in(folder)


@pytest.fixture(scope="module")
def packed_talk(talked, tmp_path_factory):
    shown: list[str] = []
    result = packing.pack(*talked, tmp_path_factory.mktemp("packed"), shown.append, window=WINDOW)
    return result, shown


def expected_talk(data: config.Conversations, words, split: str, window: int = WINDOW) -> list[tuple[str, list, list]]:
    """Source, ids and mask of every conversation of a split, in order, each made by itself."""
    found = []
    for name, source in sorted(data.sources.items()):
        for document in corpus.documents(name, source, on_bad_row="skip", bad=Counter()):
            held_out = corpus.held_out(document.key, source.validation or data.validation, data.seed)
            measured = corpus.held_out(document.key, min(source.validation or 1, data.validation), data.seed)
            copies = int(measured) if held_out else corpus.packs(document.digest, source.weight, data.seed)
            ids, supervised = conversation.encode(words, document.content)
            kept = conversation.fit(supervised, window)
            if kept and held_out == (split == "validation") and (data.too_long == "cut" or len(ids) <= window):
                found += [(name, ids[:kept], [int(yes) for yes in supervised[:kept]])] * copies
    return found


@pytest.mark.parametrize("name", SPLITS)
def test_a_split_is_its_conversations(talked, packed_talk, name):
    """Law 9 on disk: ids and mask, whole or cut after an answer, and the source of each."""
    words, split, expected = talked[1], packed_talk[0].split(name), expected_talk(*talked, name)
    assert split.num_documents == len(expected) > 30
    assert split.sources == ("one", "two")
    for number, (source, ids, mask) in enumerate(expected):
        start, length = int(split.starts[number]), int(split.lengths[number])
        assert split.ids(start, length + 1).tolist() == [*ids, words.end_of_text]
        assert split.supervised(start, length + 1).tolist() == [*mask, 0]
        assert split.sources[split.source_of[number]] == source
        assert length <= WINDOW and sum(mask) > 0
    assert split.num_targets == sum(sum(mask) for _, _, mask in expected)
    batches = Batches(split, window=WINDOW, global_batch=2, seed=0, pad_id=words.end_of_text)
    batch = batches.batch(range(batches.num_windows))
    assert batch.num_targets == split.num_targets
    turns = sum(sum(mask[i] and ids[i] == words.end_of_turn for i in range(len(ids))) for _, ids, mask in expected)
    assert int((batch.targets == words.end_of_turn).sum()) == turns > len(expected)


def test_every_conversation_is_counted(talked, packed_talk):
    data, words = talked
    manifest = packed_talk[0].manifest
    cut = dropped = 0
    for name, source in data.sources.items():
        bad: Counter[str] = Counter()
        lengths = {"cut": 0, "too_long": 0}
        good = list(corpus.documents(name, source, on_bad_row="skip", bad=bad))
        for document in good:
            held_out = corpus.held_out(document.key, data.share_of(source), data.seed)
            measured = corpus.held_out(document.key, data.measured_share_of(source), data.seed)
            if measured if held_out else corpus.packs(document.digest, source.weight, data.seed):
                _, supervised = conversation.encode(words, document.content)
                if len(supervised) > WINDOW:
                    lengths["too_long" if conversation.fit(supervised, WINDOW) is None else "cut"] += 1
        found = manifest["sources"][name]
        skipped = found["skipped"]
        assert skipped["bad_rows"] == bad and bad["no assistant turn"] > 2
        assert {key: skipped[key] for key in lengths} == lengths and min(lengths.values()) > 0
        once = sum(found[split]["documents"] for split in SPLITS) - skipped["repeats"]
        assert once + skipped["omissions"] + skipped["too_long"] == len(good)
        cut, dropped = cut + lengths["cut"], dropped + lengths["too_long"]
    for split in SPLITS:
        assert manifest["splits"][split]["supervised"] == packed_talk[0].split(split).num_targets
    share = Batches(packed_talk[0].split("train"), window=WINDOW, global_batch=1, seed=0, pad_id=1).padding_share
    line = packed_talk[1][-1]
    assert f"{share:.1%} padding at window {WINDOW}; {cut} cut, {dropped} too long, " in line and " learnt" in line


def test_the_mask_is_on_disk_and_in_the_manifest(packed_talk, tmp_path):
    packed, _ = packed_talk
    assert {path.name for path in packed.folder.iterdir()} == {*packed.manifest["files"], "manifest.json"}
    for shard in packed.manifest["shards"]:
        mask = np.fromfile(packed.folder / f"{shard['name']}.mask.bin", dtype=np.uint8)
        assert len(mask) == shard["ids"] and int(mask.sum()) == shard["supervised"] > 0
        assert (
            packed.manifest["files"][f"{shard['name']}.mask.bin"]["sha256"]
            == hashlib.sha256(mask.tobytes()).hexdigest()
        )
    folder = tmp_path / "damaged"
    folder.mkdir()
    for path in packed.folder.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    os.truncate(folder / "train-00001.mask.bin", 7)
    with pytest.raises(UserError, match=r"train-00001\.mask\.bin has 7 bytes"):
        open_packed(folder)


def test_conversations_by_any_number_of_workers_and_after_any_death(talked, packed_talk, tmp_path, monkeypatch):
    data, words = talked
    two = packing.pack(changed(data, workers=2), words, tmp_path / "two", lambda line: None, window=WINDOW)
    assert tree(two.folder) == tree(packed_talk[0].folder)
    replace, deaths = packing.files.replace, 0

    def dies(path: Path, content: bytes, *, durable: bool) -> None:
        replace(path, content, durable=durable)
        raise Killed

    monkeypatch.setattr(packing.files, "replace", dies)
    while deaths < 100:
        try:
            packing.pack(data, words, tmp_path / "killed", lambda line: None, window=WINDOW)
        except Killed:
            deaths += 1
        else:
            break
    monkeypatch.undo()
    result = packing.pack(data, words, tmp_path / "killed", lambda line: None, window=WINDOW)
    assert deaths > 5 and tree(result.folder) == tree(packed_talk[0].folder)


def test_window_length_rule_and_template_make_another_folder(talked, packed_talk, tmp_path, monkeypatch):
    data, words = talked
    dropping = packing.pack(changed(data, too_long="drop"), words, tmp_path, lambda line: None, window=WINDOW)
    for name in SPLITS:
        split, expected = dropping.split(name), expected_talk(changed(data, too_long="drop"), words, name)
        assert split.lengths.tolist() == [len(ids) for _, ids, _ in expected]
    assert all(
        source["skipped"]["cut"] == 0 < source["skipped"]["too_long"]
        for source in dropping.manifest["sources"].values()
    )
    wide = packing.pack(data, words, tmp_path, lambda line: None, window=2000)
    assert all(
        source["skipped"]["cut"] == source["skipped"]["too_long"] == 0 for source in wide.manifest["sources"].values()
    )
    monkeypatch.setattr(template, "TEMPLATE", template.TEMPLATE + " ")
    other = packing.pack(data, words, tmp_path, lambda line: None, window=WINDOW)
    assert len({p.folder.name for p in (packed_talk[0], dropping, wide, other)}) == 4
    with pytest.raises(AssertionError, match="have a window"):
        packing.pack(data, words, tmp_path, lambda line: None)


@pytest.mark.parametrize("too_long", ["cut", "drop"])
def test_thirteen_tokens_at_window_ten(talked, tmp_path, too_long):
    """CASES, long items: it ends after the last answer that fits, or is dropped and counted."""
    words = talked[1]
    exchange = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert [len(conversation.encode(words, exchange * n)[0]) for n in (1, 2)] == [13, 25]

    def packed_at(window: int, rows: int) -> Packed:
        texts = [[{"role": "user", "content": chr(65 + n)}, exchange[1]] for n in range(26)]
        made = [{"messages": text} for text in texts] + [{"messages": [*text, *exchange]} for text in texts[:rows]]
        source = config.ConversationSource(files=(write_talks(tmp_path / "c.jsonl", made),))
        data = chat_of({"c": source}, too_long=too_long)
        return packing.pack(data, words, tmp_path, lambda line: None, window=window)

    with pytest.raises(UserError, match=r'"cut": 0.*"too_long": 26'):  # its only answer ends after 12
        packed_at(10, 0)
    if too_long == "drop":
        with pytest.raises(UserError, match='"too_long": 26'):
            packed_at(12, 0)
    else:
        cut = packed_at(12, 0)
        assert cut.manifest["sources"]["c"]["skipped"]["cut"] == 26
        assert {length for name in SPLITS for length in cut.split(name).lengths} == {12}
    skipped = packed_at(20, 9).manifest["sources"]["c"]["skipped"]
    assert (skipped["cut"], skipped["too_long"]) == ((9, 0) if too_long == "cut" else (0, 9))


def test_big_chat_ids(tmp_path):
    """CASES, big ids: a vocabulary of 65,530 plus 10 chat tokens; 65,536 never becomes 0."""
    rows = [
        {"messages": [{"role": "user", "content": f"{chr(65_529)}{n}"}, {"role": "assistant", "content": "b"}]}
        for n in range(30)
    ]
    data = chat_of({"big": config.ConversationSource(files=(write_talks(tmp_path / "c.jsonl", rows),))})
    words = Wide(65_540)
    result = packing.pack(data, words, tmp_path, lambda line: None, window=WINDOW)
    assert result.manifest["dtype"] == "uint32"
    counts = result.counts()
    assert counts[65_536] == counts[65_537] == 2 * result.split("train").num_documents
    assert counts[0] == result.split("train").num_documents + result.manifest["splits"]["train"]["shards"]
    with pytest.raises(OverflowError):
        packing.pack(data, Wide(65_536), tmp_path, lambda line: None, window=WINDOW)


def test_short_split_of_conversations(talked, tmp_path):
    """Too long ones alone, or bad ones alone, are no split; the message counts them and names chat's own flags."""
    long = [{"messages": [{"role": "user", "content": "the sea " * 99}, {"role": "assistant", "content": "b"}]}] * 9
    data = chat_of({"long": config.ConversationSource(files=(write_talks(tmp_path / "c.jsonl", long),))})
    with pytest.raises(UserError, match=r'"too_long": 9.*chat\.validation=0\.2'):
        packing.pack(data, talked[1], tmp_path, lambda line: None, window=WINDOW)


def test_another_tokenizer_is_refused(made, packed, talked):
    open_packed(packed.folder, made[1])
    with pytest.raises(UserError) as error:
        open_packed(packed.folder, talked[1])
    for part in (
        str(packed.folder),
        packed.vocabulary_digest,
        talked[1].digest,
        "384 rows",
        "has 320",
        "tokenizer.folder=",
    ):
        assert part in str(error.value)
