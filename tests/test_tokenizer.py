"""The tokenizer against ids of the full Qwen2 vocabulary, special tokens, and damaged folders."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vivace.checkpoint import load_config
from vivace.config import Limits
from vivace.engine.frontend import Frontend
from vivace.errors import ModelFolderError
from vivace.text.special_tokens import COSYVOICE3_TOKENS, TEXT_TAGS
from vivace.text.stream import stream_clauses
from vivace.text.tokenizer import TextTokenizer

GOLDEN = Path(__file__).parent / "golden" / "frontend"


@pytest.fixture(scope="module")
def reduced_folder(tmp_path_factory):
    """The part of the Qwen2 vocabulary that the golden sentences meet, with ids of its own."""
    data = json.loads((GOLDEN / "qwen2_reduced.json").read_text(encoding="utf-8"))
    folder = tmp_path_factory.mktemp("tokenizer")
    vocab = {token: index for index, token in enumerate(data["real_ids"])}
    (folder / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    lines = ["#version: 0.2", *data["merges"], ""]
    (folder / "merges.txt").write_text("\n".join(lines), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def tokenizer(reduced_folder):
    return TextTokenizer.from_folder(reduced_folder)


@pytest.fixture(scope="module")
def real_ids():
    """Reduced id to the id in the full vocabulary, special tokens included."""
    data = json.loads((GOLDEN / "qwen2_reduced.json").read_text(encoding="utf-8"))
    base = json.loads((GOLDEN / "qwen2_ids.json").read_text(encoding="utf-8"))["base_size"]
    return [*data["real_ids"].values(), *range(base, base + len(COSYVOICE3_TOKENS))]


def golden_sentences():
    return json.loads((GOLDEN / "qwen2_ids.json").read_text(encoding="utf-8"))["sentences"]


@pytest.mark.parametrize("row", golden_sentences(), ids=lambda row: row["text"][:20])
def test_ids_equal_those_of_the_full_qwen2_vocabulary(tokenizer, real_ids, row):
    assert [real_ids[index] for index in tokenizer.encode(row["text"])] == row["ids"]


def test_special_tokens_are_those_of_the_reference_in_order():
    data = json.loads((GOLDEN / "special_tokens.json").read_text(encoding="utf-8"))["cosyvoice3"]
    assert list(COSYVOICE3_TOKENS) == [data["eos_token"], *data["additional_special_tokens"]]


def test_special_ids_follow_the_base_vocabulary(tokenizer, real_ids):
    assert real_ids[tokenizer.special_id("<|endoftext|>")] == 151_643
    assert real_ids[tokenizer.end_of_prompt_id] == 151_646
    assert tokenizer.vocab_size == len(real_ids)
    assert tokenizer.is_special(tokenizer.end_of_prompt_id)
    assert tokenizer.is_control(tokenizer.end_of_prompt_id)
    assert not tokenizer.is_control(tokenizer.special_id("[breath]"))
    assert not tokenizer.is_special(0)


@pytest.mark.parametrize("tag", sorted(TEXT_TAGS))
def test_a16_every_tag_is_one_id_inside_text(tokenizer, tag):
    before, after = tokenizer.encode("Hello"), tokenizer.encode(" you")
    assert tokenizer.encode(f"Hello{tag} you") == [*before, tokenizer.special_id(tag), *after]


@settings(max_examples=50, deadline=None)
@given(text=st.text(st.characters(codec="utf-8"), max_size=40))
def test_any_text_comes_back_from_its_ids(tokenizer, text):
    import unicodedata

    assert tokenizer.decode(tokenizer.encode(text)) == unicodedata.normalize("NFC", text)


def test_added_tokens_declared_by_the_official_configuration_keep_their_ids(reduced_folder, tmp_path):
    folder = tmp_path / "official"
    shutil.copytree(reduced_folder, folder)
    base = len(json.loads((folder / "vocab.json").read_text(encoding="utf-8")))
    declared = {str(base + i): {"content": token} for i, token in enumerate(COSYVOICE3_TOKENS[:3])}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": declared}))
    assert TextTokenizer.from_folder(folder).end_of_prompt_id == base + 3


def damage(folder: Path, kind: str) -> None:
    vocab, merges = folder / "vocab.json", folder / "merges.txt"
    if kind == "no vocab":
        vocab.unlink()
    elif kind == "no merges":
        merges.unlink()
    elif kind == "truncated vocab":
        vocab.write_bytes(vocab.read_bytes()[:5000])
    elif kind == "truncated merges":
        merges.write_text("\n".join(merges.read_text(encoding="utf-8").split("\n")[:100]), encoding="utf-8")
    elif kind == "lfs pointer":
        vocab.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    elif kind == "binary":
        vocab.write_bytes(b"\xff\xfe\x00")
    elif kind == "list":
        vocab.write_text("[1, 2]")
    elif kind == "gap":
        data = json.loads(vocab.read_text(encoding="utf-8"))
        data[next(iter(data))] = 10**6
        vocab.write_text(json.dumps(data), encoding="utf-8")
    elif kind == "foreign merges":
        merges.write_text("#version: 0.2\nxx yy\n")
    elif kind == "bad config":
        (folder / "tokenizer_config.json").write_text('{"added_tokens_decoder": 5}')
    elif kind == "deep":
        vocab.write_text("[" * 100_000)


@pytest.mark.parametrize(
    "kind",
    [
        "no vocab",
        "no merges",
        "truncated vocab",
        "truncated merges",
        "lfs pointer",
        "binary",
        "list",
        "gap",
        "foreign merges",
        "bad config",
        "deep",
    ],
)
def test_damaged_tokenizer_files_are_named_in_one_line(reduced_folder, tmp_path, kind):
    folder = tmp_path / "damaged"
    shutil.copytree(reduced_folder, folder)
    damage(folder, kind)
    with pytest.raises(ModelFolderError) as caught:
        TextTokenizer.from_folder(folder)
    assert str(folder) in caught.value.message
    assert "\n" not in caught.value.message


def test_tokens_of_streamed_clauses_are_those_of_the_whole_text(tokenizer):
    text = (
        "Hello world. The quick brown fox jumps over the lazy dog. Is it 8:05 or 9:30? "
        "收到好友从远方寄来的生日礼物，那份意外的惊喜与深深的祝福让我心中充满了甜蜜的快乐。 Hello world!"
    )
    clauses = list(stream_clauses(text))
    assert len(clauses) > 3
    assert [index for clause in clauses for index in tokenizer.encode(clause)] == tokenizer.encode(
        "".join(clauses)
    )


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_a_pipe_among_the_files_is_not_waited_for(random_model_folder, tmp_path):
    folder = Path(shutil.copytree(random_model_folder / "CosyVoice-BlankEN", tmp_path / "tokenizer"))
    os.mkfifo(folder / "tokenizer_config.json")
    with pytest.raises(ModelFolderError, match="no regular file"):
        TextTokenizer.from_folder(folder)


def test_more_tokens_than_the_model_has_rows_for_are_refused(random_model_folder):
    config = load_config(random_model_folder)
    small = replace(config, lm=replace(config.lm, text_vocab_size=300))
    with pytest.raises(ModelFolderError, match="the speech LM knows 300"):
        Frontend(random_model_folder / "CosyVoice-BlankEN", random_model_folder, small, Limits())
