"""Text: every token is predicted once an epoch, the same whichever way it is fed; nothing of it is lost or misread."""

from __future__ import annotations

import gzip
import json
import lzma
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bigstep.config import DataConfig, LrConfig, RunConfig, WorkersConfig
from bigstep.data import DataPair, TokenWindows, open_data
from bigstep.data.baselines import ngram_bits
from bigstep.data.feed import Feed, Request
from bigstep.data.inspect import describe
from bigstep.data.names import name_of_set
from bigstep.data.sampler import Sampler
from bigstep.data.sources import text as source_text
from bigstep.data.sources.base import PADDING
from bigstep.data.text import divide
from bigstep.data.tokens import read_tokens, write_tokens
from bigstep.data.vocabulary import FILE, load_vocabulary, make_vocabulary
from bigstep.errors import ConfigError, DataError
from bigstep.schedules import BatchPlan, BatchStage
from bigstep.train import fit

TEXT = "Wär' ich, so wär' ich: to be, or not to be — that is the question.\n".encode() * 20


def windows(text: bytes = TEXT, length: int = 16, vocabulary: str = "bytes") -> TokenWindows:
    made = make_vocabulary(vocabulary, text)
    return TokenWindows(
        tokens=made.encode(text, "here"), length=length, vocabulary=made, name="here", text_bytes=len(text)
    )


def fed(source: Any, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return next(iter(Feed(source, train=True)([Request(0, indices)])))


@pytest.mark.parametrize("vocabulary", ["bytes", "chars", "words:300", "words:70000"])
@pytest.mark.parametrize("length", [1, 7, 16, 1000])
def test_every_token_but_the_first_is_a_target_once(vocabulary: str, length: int) -> None:
    source = windows(length=length, vocabulary=vocabulary)
    everything = torch.arange(len(source))
    x, y = fed(source, everything)
    assert x.shape == y.shape == (len(source), length)
    kept = y != PADDING
    assert y[kept].tolist() == source.tokens[1:].tolist()
    assert x[kept].tolist() == source.tokens[:-1].tolist()
    assert torch.equal(source.targets(everything), kept.sum(1))
    assert source.targets(everything).dtype == torch.int64
    assert kept[:-1].all()  # only the last window is padded


@pytest.mark.parametrize("size", [200, 300, 70_000])
def test_large_numbers_survive_the_device_and_loaders_see_the_same(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = np.random.default_rng(0).integers(0, size, 1003).astype(np.min_scalar_type(size - 1))
    tokens[5] = size - 1
    source = TokenWindows(tokens=tokens, length=10, name="numbers")
    wanted = torch.tensor([100, 0, 3, 100, 57])
    in_memory = fed(source, wanted)
    assert in_memory[0][1, 5] == size - 1
    monkeypatch.setattr(source_text, "_HOST_BYTES", 0)
    for loaders in (0, 1):
        feed = Feed(source, train=True, loaders=loaders)
        assert feed.loaders == loaders
        read = next(iter(feed([Request(0, wanted)])))
        feed.close()
        assert torch.equal(read[0], in_memory[0])
        assert torch.equal(read[1], in_memory[1])


def test_parts_of_a_text_keep_their_windows() -> None:
    source = windows()
    part = source.subset(torch.tensor([5, 2, len(source) - 1])).subset(torch.tensor([2, 0]))
    whole = fed(source, torch.tensor([len(source) - 1, 5]))
    assert all(torch.equal(a, b) for a, b in zip(fed(part, torch.arange(2)), whole, strict=True))
    assert part.targets(torch.arange(2)).tolist() == [(whole[1][0] != PADDING).sum().item(), 16]
    assert part.fingerprint() != source.fingerprint()
    held = open_data("shakespeare", holdout=0.25, seed=3)
    assert len(held.train) + len(held.test) == len(open_data("shakespeare").train)
    assert not set(held.train.windows.tolist()) & set(held.test.windows.tolist())


def test_workers_of_an_epoch_see_every_token_once() -> None:
    source = windows()
    sampler = Sampler(len(source), seed=1, plan=BatchPlan([BatchStage(0, workers=3, local_batch=4)]))
    order, counted = sampler.order(0), 0
    for step in sampler.steps(epochs=1):
        shares = [order[slice(*step.share(worker))] for worker in range(3)]
        counted += sum(int((fed(source, share)[1] != PADDING).sum()) for share in shares if len(share))
    assert counted == len(source.tokens) - 1


@pytest.mark.parametrize("vocabulary", ["bytes", "chars", "words:300"])
def test_bytes_of_targets_are_those_of_the_text(vocabulary: str) -> None:
    source = windows(vocabulary=vocabulary)
    everything = torch.arange(len(source))
    first = len(source.vocabulary.decode(source.tokens[:1].tolist()))
    assert source.bytes(everything).sum() == len(TEXT) - first
    for window in (0, 3, len(source) - 1):
        _, y = source.read(torch.tensor([window]))
        said = source.vocabulary.decode(y[y != PADDING].tolist())
        assert source.bytes(torch.tensor([window])).item() == len(said)


@pytest.mark.parametrize("vocabulary", ["bytes", "chars", "words", "words:300"])
def test_a_vocabulary_loses_nothing_and_is_kept_with_the_run(vocabulary: str, tmp_path: Path) -> None:
    made = make_vocabulary(vocabulary, TEXT)
    assert made.decode(made.encode(TEXT, "here").tolist()) == TEXT
    source = windows(vocabulary=vocabulary)
    source.keep(tmp_path)
    assert (tmp_path / FILE).exists() == (vocabulary != "bytes")
    kept = load_vocabulary(tmp_path)
    if kept is not None:
        assert (kept.name, kept.size) == (made.name, made.size)
        assert np.array_equal(kept.encode(TEXT, "here"), made.encode(TEXT, "here"))
        (tmp_path / FILE).write_text('{"name": "chars", "tokens": 3}')
        with pytest.raises(DataError, match=r"vocabulary\.json is not a vocabulary"):
            load_vocabulary(tmp_path)


def test_words_spell_what_is_rare_in_bytes() -> None:
    words = make_vocabulary("words:258", b" the cat and the dog and the bird")
    assert words.size == 258
    assert words.encode(b"x the cat", "here").tolist() == [ord("x"), 256, *b" cat"]
    assert np.array_equal(words.lengths(), [1] * 256 + [4, 4])
    strange = bytes(range(1, 256))  # no text at all, but every byte can be spelled
    assert words.decode(words.encode(strange, "here").tolist()) == strange


def test_a_tokenizer_of_hugging_face_may_be_named(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"to": 0, "be": 1, "?": 2}, unk_token="?")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text.txt").write_text("to be or not to be " * 40)
    pair = open_data("text", str(tmp_path / "text.txt"), length=8, vocabulary=f"tokenizers:{tmp_path}/tokenizer.json")
    assert pair.train.tokens[:6].tolist() == [0, 1, 2, 2, 0, 1]
    assert pair.train.num_classes == 3
    everything = torch.arange(len(pair.train))
    counted = pair.train.bytes(everything).sum().item()  # on average: 19 bytes are six tokens
    assert counted == pytest.approx(19 / 6 * pair.train.targets(everything).sum().item(), rel=0.01)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"not a tokenizer\.json"):
        open_data("text", str(tmp_path / "text.txt"), vocabulary=f"tokenizers:{tmp_path}/tokenizer.json")


def test_shakespeare_ships_with_the_package_and_is_divided_as_elsewhere() -> None:
    pair = open_data("shakespeare", vocabulary="chars")
    assert (len(pair.train.tokens), len(pair.test.tokens)) == (1_003_854, 111_540)
    assert pair.train.num_classes == 65
    assert pair.train.vocabulary.decode(pair.train.tokens[:14].tolist()) == b"First Citizen:"
    assert Feed(pair.train, train=True).shape == {"vocabulary": 65, "length": 128}
    assert pair.fingerprint() == open_data("shakespeare", vocabulary="chars").fingerprint()
    assert pair.fingerprint() != open_data("shakespeare").fingerprint()


def test_files_and_folders_are_found_by_path(tmp_path: Path) -> None:
    (tmp_path / "plain.txt").write_bytes(TEXT)
    (tmp_path / "packed.txt.gz").write_bytes(gzip.compress(TEXT))
    (tmp_path / "packed.txt.xz").write_bytes(lzma.compress(TEXT))
    prints = set()
    for name in ("plain.txt", "packed.txt.gz", "packed.txt.xz"):
        kind, path = name_of_set(str(tmp_path / name))
        assert kind == "text"
        prints.add(open_data(kind, path).fingerprint())
    assert len(prints) == 1
    assert name_of_set(str(tmp_path)) == ("text", str(tmp_path))
    assert len(open_data("text", str(tmp_path)).train.tokens) == 3 * len(TEXT) * 9 // 10
    divided = tmp_path / "divided"
    for part, text in (("train", b"train " * 100), ("val", b"val " * 30)):
        (divided / part).mkdir(parents=True)
        (divided / part / "a.txt").write_bytes(text)
    assert name_of_set(str(divided))[0] == "text"
    pair = open_data("text", str(divided))
    assert (len(pair.train.tokens), len(pair.test.tokens)) == (600, 120)


def test_a_binary_file_keeps_every_byte(tmp_path: Path) -> None:
    (tmp_path / "program").write_bytes(bytes(range(256)) * 20)
    kind, path = name_of_set(str(tmp_path / "program"))
    pair = open_data(kind, path)
    assert bytes(pair.train.tokens) + bytes(pair.test.tokens) == bytes(range(256)) * 20


def test_whole_documents_are_held_out_where_there_are_ten(tmp_path: Path) -> None:
    documents = [b"%02d " % number * 100 for number in range(25)]
    (tmp_path / "books.txt").write_bytes(b"\x1e".join(documents))
    for number, document in enumerate(documents):
        (tmp_path / "folder" / f"{number % 3}").mkdir(parents=True, exist_ok=True)
        (tmp_path / "folder" / f"{number % 3}" / f"{number:02d}.md").write_bytes(document)
    (tmp_path / "folder" / "read.txt").write_bytes(b"so that a file is seen")
    pair = open_data("text", str(tmp_path / "books.txt"))
    assert bytes(pair.test.tokens) == documents[9] + documents[19]
    assert len(pair.train.tokens) == 23 * 300
    folder = open_data("text", str(tmp_path / "folder"))
    assert len(folder.test.tokens) == 600
    assert divide([b"0123456789"]) == (b"012345678", b"9")


BAD_TEXTS = {
    "empty": (b"", {}, "is empty"),
    "too short": (b"to be", {}, r"4 tokens to train on and 1 to evaluate on.*data\.length"),
    "shorter than a sequence": (TEXT[:300], {"length": 1000}, r"takes 1,000 and one more; lower data\.length"),
    "binary as characters": (b"\0\1\2" * 500, {"vocabulary": "chars"}, "not text.*data.vocabulary=bytes"),
    "binary as words": (b"\0\1\2" * 500, {"vocabulary": "words"}, "not text.*data.vocabulary=bytes"),
    "not UTF-8": (b"abc\xff" * 500, {"vocabulary": "chars"}, r"UTF-8 text \(byte 3 is invalid\)"),
}


@pytest.mark.parametrize("case", BAD_TEXTS)
def test_a_text_that_cannot_be_used_is_one_sentence(case: str, tmp_path: Path) -> None:
    content, options, sentence = BAD_TEXTS[case]
    (tmp_path / "text.txt").write_bytes(content)
    with pytest.raises(DataError, match=sentence) as caught:
        open_data("text", str(tmp_path / "text.txt"), **options)
    assert "\n" not in str(caught.value)


def test_what_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "torn.txt.xz").write_bytes(lzma.compress(TEXT)[:-20])
    (tmp_path / "torn.txt.gz").write_bytes(b"no gzip")
    for name in ("torn.txt.xz", "torn.txt.gz"):
        with pytest.raises(DataError, match=f"{name} cannot be read: its compressed data is damaged"):
            open_data("text", str(tmp_path / name))
    (tmp_path / "bomb.txt.gz").write_bytes(gzip.compress(bytes(2**27)))
    (tmp_path / "bomb.txt.xz").write_bytes(lzma.compress(bytes(2**27)))
    for name in ("bomb.txt.gz", "bomb.txt.xz"):
        with pytest.raises(DataError, match=f"{name} is more text than is read into memory"):
            open_data("text", str(tmp_path / name))
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match="holds no text files"):
        open_data("text", str(tmp_path / "none"))
    with pytest.raises(DataError, match="cannot be read: No such file"):
        open_data("text", str(tmp_path / "absent.txt"))
    for name in ("text", "tokens"):
        with pytest.raises(DataError, match=rf"{name} needs data\.path"):
            open_data(name)
    with pytest.raises(DataError, match="lacks"):
        make_vocabulary("chars", b"abc").encode(b"abd", "here")


def test_a_vocabulary_that_is_misnamed_is_refused() -> None:
    for name, sentence in [
        ("byte", "did you mean 'bytes'"),
        ("bytes:3", "must be written bytes"),
        ("words:", "must be written words:SIZE"),
        ("words:12", "from 257"),
        ("words:many", "from 257"),
        ("tiktoken", "must be written tiktoken:NAME"),
        ("tokenizers", "must be written tokenizers:PATH"),
    ]:
        with pytest.raises(ConfigError, match=sentence):
            make_vocabulary(name, TEXT)
    with pytest.raises(ConfigError, match=r"data\.vocabulary is 'chras', but did you mean 'chars'"):
        DataConfig(vocabulary="chras")
    with pytest.raises(ConfigError, match=r"data\.length is 0"):
        DataConfig(length=0)


@pytest.mark.parametrize("vocabulary", ["bytes", "chars", "words:300"])
def test_a_packed_file_is_read_as_it_was_written(vocabulary: str, tmp_path: Path) -> None:
    made = make_vocabulary(vocabulary, TEXT)
    train, test = TEXT[:1000], TEXT[1000:]
    path = tmp_path / "text.tokens"
    write_tokens(path, made.encode(train, ""), made.encode(test, ""), made, len(train), len(test))
    assert name_of_set(str(path)) == ("tokens", str(path))
    pair = open_data("tokens", str(path), length=16)
    assert isinstance(pair.train.tokens, np.memmap)
    assert pair.train.vocabulary.decode(pair.train.tokens.tolist()) == train
    assert pair.test.vocabulary.decode(pair.test.tokens.tolist()) == test
    same = TokenWindows(tokens=made.encode(train, ""), length=16, vocabulary=made, name="", text_bytes=1000)
    everything = torch.arange(len(same))
    assert all(torch.equal(a, b) for a, b in zip(fed(pair.train, everything), fed(same, everything), strict=True))
    assert pair.train.fingerprint() == same.fingerprint()
    with pytest.raises(DataError, match=r"was packed with .*, but data\.vocabulary is tiktoken:gpt2"):
        open_data("tokens", str(path), vocabulary="tiktoken:gpt2")
    assert list(tmp_path.iterdir()) == [path]  # nothing temporary is left


def test_a_bad_packed_file_is_one_sentence(tmp_path: Path) -> None:
    made = make_vocabulary("bytes", b"")
    path = tmp_path / "text.tokens"
    write_tokens(path, np.arange(200, dtype=np.uint8), np.arange(50, dtype=np.uint8), made, 200, 50)
    good = path.read_bytes()
    head = json.loads(good.split(b"\n", 1)[0])

    def with_header(**changes: Any) -> bytes:
        return json.dumps({**head, **changes}).encode().ljust(4095) + b"\n" + good[4096:]

    for content, sentence in [
        (b"", "first line does not say"),
        (b"[" * 100_000, "first line does not say"),
        (b"{}\n" + good[4096:], "first line does not say"),
        (with_header(dtype="float64"), "first line does not say"),
        (with_header(train=-1), "first line does not say"),
        (with_header(train="many"), "first line does not say"),
        (with_header(vocabulary=5), "first line does not say"),
        (with_header(vocabulary="chars", built=5), "first line does not say"),
        (with_header(vocabulary="words", built={"a": 1}), "first line does not say"),
        (with_header(vocabulary="chars", built=[0xD800]), "holds no vocabulary"),
        (with_header(train=10**15), "bytes, but its first line announces"),
        (good[:-1], "bytes, but its first line announces"),
        (with_header(vocabulary="x", size=100), "has the token 199 at place 199.*0 to 99"),
        (with_header(train=249, test=1), "two of each"),
    ]:
        path.write_bytes(content)
        with pytest.raises(DataError, match=sentence) as caught:
            open_data("tokens", str(path), length=16)
        assert str(path) in str(caught.value)
    with pytest.raises(DataError, match="cannot be written"):
        write_tokens(tmp_path / "absent" / "x.tokens", made.encode(b"ab", ""), made.encode(b"ab", ""), made, 2, 2)


def test_numbers_in_a_plain_npy_file_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "numbers.npy"
    np.save(path, (np.arange(1000) % 777).astype(np.uint16))
    with monkeypatch.context() as reading:
        reading.setattr(TokenWindows, "check", lambda part: pytest.fail("the whole file was read twice"))
        pair = open_data("tokens", str(path), length=10)
    assert (len(pair.train.tokens), len(pair.test.tokens), pair.train.num_classes) == (900, 100, 777)
    assert pair.train.bytes(torch.arange(3)) is None
    for wrong in (np.zeros((3, 3), np.uint16), np.zeros(100), np.zeros(3, np.uint16)):
        np.save(path, wrong)
        with pytest.raises(DataError, match="must hold tokens"):
            read_tokens(path)
    np.save(path, np.array([object()]), allow_pickle=True)
    with pytest.raises(DataError, match=r"not a \.npy file of numbers"):
        read_tokens(path)
    path.write_bytes(b"nonsense")
    with pytest.raises(DataError, match=r"not a \.npy file of numbers"):
        read_tokens(path)


def test_a_run_on_text_beats_a_guess() -> None:
    from bigstep.models import build_model

    torch.manual_seed(0)
    feed = Feed(windows(TEXT * 4), train=True)
    model = build_model("gpt-mini", **feed.shape)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for step in range(30):
        x, y = next(iter(feed([Request(0, torch.arange(32) + step)])))
        loss = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=PADDING)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < math.log(30)  # a text of some 30 characters; 256 are possible


def test_baselines_are_what_counts_of_tokens_and_pairs_give() -> None:
    found = ngram_bits(DataPair(windows(TEXT, length=7), windows(TEXT[:100], length=7)))
    targets, pairs = Counter(TEXT[1:]), Counter(zip(TEXT, TEXT[1:], strict=False))
    before = Counter(TEXT[:-1])
    unigram = {y: (targets[y] + 1) / (len(TEXT) - 1 + 256) for y in range(256)}
    held = list(zip(TEXT[:99], TEXT[1:100], strict=True))
    spent = [
        -sum(math.log2(unigram[y]) for _, y in held) / 99,
        -sum(math.log2((pairs[x, y] + unigram[y]) / (before[x] + 1)) for x, y in held) / 99,
    ]
    assert [found["unigram"], found["bigram"]] == pytest.approx(spent, abs=5e-4)  # three digits are kept
    assert found["unit"] == "bits per byte"
    shakespeare = describe("shakespeare")["baselines"]
    by_words = describe("shakespeare", vocabulary="words:2000")["baselines"]
    assert 3.5 < shakespeare["bigram"] < 3.7 < 4.7 < shakespeare["unigram"] < 4.9
    assert by_words["bigram"] < shakespeare["bigram"]  # of the same bytes, so the two can be compared


def test_text_is_described_in_plain_values(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes(TEXT)
    facts = describe(str(tmp_path / "text.txt"), length=10, vocabulary="chars", verify=True)
    train, _ = divide([TEXT])
    assert facts["train"]["tokens"] == len(train.decode())
    assert facts["train"]["vocabulary"]["name"] == "chars"
    assert facts["train"]["bytes_per_token"] > 1
    assert (facts["unit"], facts["train"]["corrupt"]) == ("sequences", [])
    json.dumps(facts)


def test_a_run_keeps_the_vocabulary_that_it_built(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_bytes(TEXT)
    data = DataConfig(name="text", path=str(tmp_path / "text.txt"), length=16, vocabulary="words:300")
    workers, rate = WorkersConfig(count=2, local_batch=2), LrConfig(base=0.01, scaling="none")
    config = RunConfig(workers=workers, epochs=1, lr=rate, data=data, model="gpt-mini")
    result = fit(config, out=tmp_path / "run", max_steps=2, device="cpu")
    assert result.steps == 2
    kept = load_vocabulary(tmp_path / "run")
    assert kept.size == open_data("text", data.path, vocabulary=data.vocabulary).train.num_classes < 300
    assert kept.decode(kept.encode(TEXT, "here").tolist()) == TEXT
