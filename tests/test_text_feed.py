"""Segments of streamed text: the first ones end where a sentence does, so that they are spoken at once."""

from types import SimpleNamespace

import pytest

from vivace.engine.frontend import PromptTokens
from vivace.engine.request import SynthesisRequest
from vivace.engine.text_feed import EARLY_ENDS, TextFeed
from vivace.random_checkpoint import tiny_config
from vivace.text.split import ends_sentence

FIRST, SECOND = EARLY_ENDS
PROMPT = PromptTokens([], [1, 2, 3], [4] * 75)


def feed(segment_tokens=200, interleaving=True, text=()):
    frontend = SimpleNamespace(
        segment_tokens=segment_tokens,
        interleaving=tiny_config().lm if interleaving else None,
        prompt=lambda *_, **__: PROMPT,
    )
    return TextFeed(frontend, SynthesisRequest(text), SimpleNamespace())


def segments(feed, *clauses):
    """Words of all segments so far, and which of them are complete."""
    feed.add([(text, [7] * count) for text, count in clauses])
    found = list(feed.waiting)
    return [entry.text for entry in found], [entry.is_all_known for entry in found]


def test_the_first_sentence_is_complete_before_the_second_one_comes():
    assert segments(feed(), ("One moment please, I am coming.", FIRST)) == (
        ["One moment please, I am coming."],
        [True],
    )


@pytest.mark.parametrize(
    "clause", [("Yes.", FIRST - 1), ("One moment please, I am", FIRST), ("Well,", SECOND)]
)
def test_what_is_short_or_no_sentence_waits_for_more(clause):
    assert segments(feed(), clause) == ([clause[0]], [False])


def test_clauses_join_until_there_is_enough():
    clauses = (
        ("Yes.", FIRST - 1),
        (" I am coming.", 3),
        (" And so is Ann.", 5),
        (" She is late.", 18),
        (" Or not.", 1),
    )
    assert segments(feed(), *clauses) == (
        ["Yes. I am coming.", "And so is Ann. She is late. Or not."],
        [True, True],
    )


def test_later_segments_end_where_they_are_full():
    """The third one holds sentence after sentence: by then there is audio to play."""
    clauses = [(f" This is sentence {number}.", SECOND) for number in range(6)]
    words, known = segments(feed(segment_tokens=3 * SECOND), *clauses)
    assert [text.count(".") for text in words] == [1, 1, 3, 1]
    assert known == [True, True, True, False]


def test_a_first_segment_that_is_full_counts_as_one_of_the_first():
    clauses = ("One two three four,", 20), (" five six,", 15), (" seven.", 9), (" Eight.", 30)
    words, known = segments(feed(segment_tokens=30), *clauses)
    assert words == ["One two three four,", "five six, seven.", "Eight."]
    assert known == [True, True, False]


def test_a_model_that_does_not_interleave_speaks_clause_by_clause():
    assert segments(feed(interleaving=False), ("Yes,", 1), (" I am.", 2)) == (["Yes,", "I am."], [True, True])


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        ("Yes.", True),
        ("“Yes!” ", True),
        ("好。", True),
        ("Well…", True),
        ("Well,", False),
        ("3.5", False),
        ("", False),
    ],
)
def test_ends_of_sentences(text, ends):
    assert ends_sentence(text) is ends
