"""Long text to segments: nothing lost, nothing twice, nothing too long."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vivace.text.protected import PROTECTED
from vivace.text.special_tokens import TAG_PATTERN
from vivace.text.split import split_text


def count(text: str) -> int:
    """A stand-in for the tokenizer: a tag is one token, so is every other character that is no space."""
    return len(TAG_PATTERN.findall(text)) + len(re.sub(r"\s", "", TAG_PATTERN.sub("", text)))


def squashed(text: str) -> str:
    return re.sub(r"\s", "", text)


WORDS = st.sampled_from(
    [
        *[
            "hello",
            "world.",
            "Dr.",
            "3.14",
            "v2.5.1",
            "www.example.com/a?b=1",
            "你好。",
            "世界，",
            "[laughter]",
            "No!",
            "\n",
            "今天天气很好！",
            ",",
            "—",
        ],
        *['"Quote."', "(x)", "a", "b", "c", "[AA1]", "[zh][ī]", "Привет.", "e.g.", "p.m.", "…", "1,234"],
        "<strong>yes indeed</strong>",
        "<laughter>ha. Ha, ha</laughter>",
    ]
)
TEXTS = st.lists(st.tuples(WORDS, st.sampled_from(["", " ", " ", "\n"])), max_size=40).map(
    lambda parts: "".join(word + space for word, space in parts)
)


@settings(max_examples=150, deadline=None)
@given(text=TEXTS, max_tokens=st.integers(1, 60))
def test_segments_join_to_the_text_and_fit(text, max_tokens):
    segments = split_text(text, count, max_tokens)
    # Pairs that had to be cut are opened and closed anew; without the pair tags nothing differs.
    plain = [re.sub("</?(?:strong|laughter)>", "", squashed(piece)) for piece in ("".join(segments), text)]
    assert plain[0] == plain[1]
    for segment in segments:
        assert segment == segment.strip() != ""
        # The smallest unit that may not be cut: a tag, or a pair around one character.
        assert count(segment) <= max(max_tokens, 3)
        for tag in ("strong", "laughter"):
            assert segment.count(f"<{tag}>") == segment.count(f"</{tag}>")


@settings(max_examples=80, deadline=None)
@given(text=st.text(max_size=200), max_tokens=st.integers(1, 30))
@example(text="。”你好", max_tokens=2)
@example(text="<strong>", max_tokens=1)
@example(text="a\u0301\u0301\u0301", max_tokens=1)
def test_any_text_is_split_without_loss(text, max_tokens):
    segments = split_text(text, len, max_tokens)
    drop = re.compile("</?(?:strong|laughter)>")
    assert drop.sub("", squashed("".join(segments))) == drop.sub("", squashed(text))


def test_a_text_that_fits_is_one_segment():
    assert split_text("Hello world. How are you?", count, 100) == ["Hello world. How are you?"]


def test_a5_last_sentence_without_a_period():
    assert split_text("今天天气很好", count, 80) == ["今天天气很好"]
    segments = split_text("First paragraph is here.\nhello world without an end", count, 25)
    assert segments[-1].endswith("an end")


def test_a19_two_pieces_are_both_there():
    text = (
        "Task: Classify the given sentence as overruling or non-overruling. Guidelines: - An overruling sentence "
        "is a statement that nullifies a previous case decision."
    )
    segments = split_text(text, count, 80)
    assert len(segments) >= 2
    assert squashed("".join(segments)) == squashed(text)


def test_a17_every_clause_once():
    text = "一只小羊是养,两只小羊是养,三只小羊就不是养了,是喂。"
    assert squashed("".join(split_text(text, count, 12))) == text


def test_a20_long_essay_is_split_at_sentence_ends():
    text = "我们钦佩鲁迅先生，因为他敢于向黑暗的社会宣战。" * 40
    segments = split_text(text, count, 80)
    assert all(segment.endswith("。") and count(segment) <= 80 for segment in segments)
    assert len(segments) == 14, "three sentences of 23 characters fit into 80"


def test_f65_cut_at_sentence_ends_not_at_every_enumeration_comma():
    text = "热点聚焦。一、第一条新闻的内容；二、第二条新闻的内容：很长。三、第三条新闻的内容。"
    for segment in split_text(text, count, 30):
        assert segment[-1] in "。；"


@pytest.mark.parametrize(
    "whole",
    ["Dr. Smith", "3.14", "v2.5.1", "www.example.com", "1,234,567", "at 5 p.m. today", "J. R. Tolkien"],
)
def test_nothing_is_cut_inside_numbers_addresses_and_abbreviations(whole):
    text = f"It was a nice day. We met {whole} and left. Nobody knew why."
    segments = split_text(text, count, 30)
    assert len(segments) > 1
    assert any(whole in segment for segment in segments)


def test_quotes_stay_with_their_sentence():
    segments = split_text('"Where are you going today?" he asked. "Home to my family," she said.', count, 34)
    assert segments == ['"Where are you going today?" he asked.', '"Home to my family," she said.']


def test_short_sentences_are_joined():
    segments = split_text("Yes. No. Well. " * 10, count, 40)
    assert all(count(segment) > 20 for segment in segments[:-1])


def test_t9_a_word_and_chinese_text_without_punctuation():
    for text in ("x" * 4096, "中" * 4096):
        segments = split_text(text, count, 160)
        assert "".join(segments) == text
        assert len(segments) == 26
        assert max(map(len, segments)) == 160


def test_t22_a_thousand_sentences():
    segments = split_text("Hi. " * 1000, count, 160)
    assert squashed("".join(segments)) == "Hi." * 1000
    assert len(segments) == 19, "53 sentences of three characters fit into 160"


def test_a16_tags_are_never_cut():
    text = "[laughter]" * 7 + "[zh][ī]" * 5
    segments = split_text(text, count, 2)
    assert "".join(segments) == text
    assert all(TAG_PATTERN.sub("", segment) == "" for segment in segments)


def test_a_pair_that_is_too_long_is_closed_and_opened_anew():
    text = "<strong>" + "abc " * 30 + "</strong>"
    for segment in split_text(text, count, 20):
        assert re.fullmatch(r"<strong>[abc ]+</strong>", segment)


def test_punctuation_alone_is_kept_and_blank_is_nothing():
    assert split_text("...", count, 5) == ["..."]
    assert split_text(" \n ", count, 5) == []
    assert all(
        re.search(r"\w", segment) for segment in split_text("Hello world. ... !!! Good bye.", count, 20)
    )


def test_max_tokens_below_one_is_refused():
    with pytest.raises(ValueError):
        split_text("a", count, 0)


def test_protected_spans_are_whole_where_they_fit():
    text = "see www.example.com/some/path and me@example.com or v2.5.1 now " * 5
    joined = [
        match.group() for segment in split_text(text, count, 40) for match in PROTECTED.finditer(segment)
    ]
    assert joined == [match.group() for match in PROTECTED.finditer(text)]


def test_work_grows_with_the_length_where_nothing_can_be_spoken():
    work = 0

    def letters(part: str) -> int:
        nonlocal work
        work += len(part)
        return sum(character.isalpha() for character in part)

    text = "hello " + "« » . " * 4000 + "world."
    segments = split_text(text, letters, 40)
    assert squashed("".join(segments)) == squashed(text)
    assert work < 20 * len(text)
    work = 0
    text = ("a. " + "« » . " * 300) * 30
    assert squashed("".join(split_text(text, letters, 40))) == squashed(text)
    assert work < 20 * len(text)
