"""CosyVoice-300M's text tokenizer against ids that tiktoken gave for a part of the rank file."""

import base64
import json

import pytest

from tests.conftest import GOLDEN
from vivace.errors import ModelFolderError
from vivace.text.rank_tokenizer import LANGUAGES, RankTokenizer, special_tokens

RECORDED = json.loads((GOLDEN / "frontend" / "whisper_ranks.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("ranks") / "multilingual.tiktoken"
    path.write_text("".join(f"{token} {rank}\n" for rank, token in enumerate(RECORDED["ranks"])))
    return path


@pytest.fixture(scope="module")
def tokenizer(path):
    return RankTokenizer.from_file(path, RECORDED["vocab_size"])


@pytest.mark.parametrize(("text", "ids"), RECORDED["texts"])
def test_ids_equal_the_reference(tokenizer, text, ids):
    assert tokenizer.encode(text) == ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.count(text) == len(ids)


def test_special_tokens_follow_the_ranks(tokenizer):
    num_ranks = len(RECORDED["ranks"])
    assert tokenizer.vocab_size == RECORDED["vocab_size"]
    assert tokenizer.encode("<|endoftext|><|startoftranscript|><|en|>") == [num_ranks + i for i in range(3)]
    assert tokenizer.special_id("<|30.00|>") == RECORDED["vocab_size"] - 1
    assert tokenizer.is_control(tokenizer.special_id("<|TTS/SP13|>"))
    assert not tokenizer.is_special(num_ranks - 1)
    with pytest.raises(KeyError):
        tokenizer.special_id("<|endofprompt|>")


@pytest.mark.parametrize(
    ("num_ranks", "vocab_size", "num_languages", "has_tts"),
    [(50_257, 51_866, 100, False), (50_257, 51_865, 99, False), (58_836, 60_515, 105, True)],
)
def test_the_list_of_special_tokens_follows_from_the_sizes(num_ranks, vocab_size, num_languages, has_tts):
    specials = special_tokens(num_ranks, vocab_size, "f")
    assert num_ranks + len(specials) == vocab_size
    assert specials[2 : 2 + num_languages] == [f"<|{code}|>" for code in LANGUAGES[:num_languages]]
    assert ("<|TTS/B|>" in specials) == has_tts


@pytest.mark.parametrize("vocab_size", [51_000, 60_000, 70_000])
def test_a_vocabulary_of_another_size_is_refused(path, vocab_size):
    with pytest.raises(ModelFolderError, match="take the rank file that belongs to this model"):
        RankTokenizer.from_file(path, vocab_size)


def _without_a_byte(lines):
    kept = [line for line in lines if line.split()[0] != base64.b64encode(b"a").decode()]
    return [f"{line.split()[0]} {rank}" for rank, line in enumerate(kept)]


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda lines: lines[:100], "a byte is missing"),
        (lambda lines: ["<html>"], "is no rank file"),
        (lambda lines: [*lines, "a b c"], "is no rank file"),
        (lambda lines: [*lines[:-1], lines[-1].split()[0] + " 99999"], "ranks have gaps"),
        (lambda lines: lines[1:], "a byte is missing|ranks have gaps"),
        (_without_a_byte, "a byte is missing"),
        (lambda lines: [line.split()[0] + " x" for line in lines], "is no rank file"),
        (lambda lines: [], "a byte is missing"),
    ],
)
def test_damaged_files_are_refused_with_one_line(path, tmp_path, damage, reason):
    broken = tmp_path / "broken.tiktoken"
    broken.write_text("\n".join(damage(path.read_text().splitlines())))
    with pytest.raises(ModelFolderError, match=reason) as caught:
        RankTokenizer.from_file(broken, RECORDED["vocab_size"])
    assert "\n" not in caught.value.message
    with pytest.raises(ModelFolderError, match="cannot be read"):
        RankTokenizer.from_file(tmp_path / "nowhere", RECORDED["vocab_size"])
