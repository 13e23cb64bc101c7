"""Text streamed in: the clauses depend on the text, not on where it was cut."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from vivace.errors import InvalidTextError
from vivace.text.normalize import normalize
from vivace.text.stream import ClauseStream, stream_clauses

SENTENCES = [
    "Hello there, my friend. ",
    "It costs $3.50, or 1,234 dollars! ",
    "See www.example.com. ",
    'Dr. Smith said: "No." ',
    "Then [laughter] he left on May 5, 2021.\n",
    "He is <strong>very, very. happy</strong>. ",
    "收到好友从远方寄来的生日礼物，那份意外的惊喜与深深的祝福让我心中充满了甜蜜的快乐。",
    "2022年12月29日，血压120mmHg。",
    "他突然停下来[laughter]。",
    "報道[j][ǐ]予好评！",
    "A line\r\nand another\n\n",
    "Wait... what?! ",
    "😀 emoji, 𠮷 rare. ",
    "Version v2.5.1 is out; get it. ",
    'A <break time="1s"/> pause. ',
    "x < y, and [unknown] brackets. ",
    "Bei 10 hoch 7 Metern ist natürlich Schluss. ",
    "e\u0301te\u0301 ",
    "1. Buy milk. 2. Go home. ",
    "He said it. \n \n",
    "At 5 p.m. \r",
    "!!! \nOn.  \n\r\n",
    "word " * 60,
    "字" * 250,
]


def cut(text: str, places: list[int]) -> list[str]:
    """UTF-16 cut at any place, so that a piece may end in half a character."""
    units = text.encode("utf-16-le", "surrogatepass")
    size = len(units) // 2
    borders = sorted({place % (size + 1) for place in places})
    pieces = []
    for start, end in zip([0, *borders], [*borders, size], strict=True):
        chunk = units[2 * start : 2 * end]
        # Surrogates one by one, as a JSON decoder of partial messages gives them.
        pieces.append(
            "".join(chr(int.from_bytes(chunk[i : i + 2], "little")) for i in range(0, len(chunk), 2))
        )
    return pieces


TEXTS = st.lists(st.sampled_from(SENTENCES), min_size=1, max_size=5).map("".join)


@settings(max_examples=120, deadline=None)
@given(text=TEXTS, places=st.lists(st.integers(0, 5000), max_size=12))
@example(text="He said [laughter] and $3.50. Fine", places=[10, 12, 22, 24])
def test_any_cutting_gives_the_same_clauses(text, places):
    whole = list(stream_clauses([text]))
    assert list(stream_clauses(cut(text, places))) == whole


@settings(max_examples=60, deadline=None)
@given(text=TEXTS)
def test_letter_by_letter_gives_the_same_clauses(text):
    assert list(stream_clauses(text)) == list(stream_clauses([text]))


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=120), places=st.lists(st.integers(0, 200), max_size=6))
def test_any_text_gives_the_same_for_any_cutting(text, places):
    def run(pieces: list[str]) -> list[str] | str:
        try:
            return list(stream_clauses(pieces))
        except InvalidTextError as error:
            return error.code

    assert run(cut(text, places)) == run([text])


@pytest.mark.parametrize(
    "text",
    [
        "Hello there, my friend. It costs $3.50, or 1,234 dollars! Dr. Smith left on May 5, 2021.\nNext line\nend",
        "收到好友从远方寄来的生日礼物，那份意外的惊喜。2022年12月29日，血压120mmHg。\n下一行",
        "Wait... what?! [laughter] <strong>No, never. Yes</strong>. See v2.5.1 and www.example.com. Bye",
    ],
)
def test_joined_clauses_equal_the_normalised_text(text):
    assert "".join(stream_clauses(text)) == normalize(text)


def test_a_clause_comes_as_soon_as_it_is_safe():
    stream = ClauseStream()
    assert stream.push("Hello my dear old friend, how") == ["Hello my dear old friend,"]
    assert stream.push(" are you? I") == [" how are you?"]
    assert stream.push(" am 4") == []
    assert stream.push("2 years old") == []
    assert stream.flush() == [" I am forty two years old"]


@pytest.mark.parametrize(
    ("piece", "clauses"),
    [
        ("One moment. ", ["One moment."]),
        ("One moment.\n", ["One moment."]),
        ("One moment.\r\n", ["One moment."]),
        ("One moment. \n\n", ["One moment."]),
        ("Really?! ", ["Really?!"]),
        ("Well... ", ["Well..."]),
        ("A title\n", ["A title."]),
        ("好的。\n", ["好的。"]),
        ("It is 3. ", ["It is three."]),
        # What follows may go on with the sentence.
        ("One moment.", []),
        ("It is 3.", []),
        ("It is Dr. ", []),
        ("It is No. ", []),
        ("It is 5 p.m. ", []),
        ("It is plan B. ", []),
        ("In the U.S. ", []),
        ('He asked "What?" ', []),
        ("3. ", []),
        ("A title\r", []),
    ],
)
def test_a_clause_is_there_when_its_writer_pauses_behind_it(piece, clauses):
    assert ClauseStream().push(piece) == clauses


def test_spaces_and_line_breaks_behind_a_clause_belong_to_no_other():
    stream = ClauseStream()
    assert stream.push("One moment. ") == ["One moment."]
    assert stream.push("\n") == []
    assert stream.push("\r") == []
    assert stream.push("\n ") == []
    assert stream.push("Go on.\n\n") == [" Go on."]
    assert stream.flush() == []


def test_marks_in_front_of_a_line_break_stay_in_one_line():
    for text in ("??? \nHello you.", "???\n\nHello you.", "???\n\n ...\n Hello you."):
        assert " ".join("".join(stream_clauses([text])).split()) == normalize(text)


def test_chinese_clauses_come_at_once():
    stream = ClauseStream()
    assert stream.push("收到好友从远方寄来的生日礼物，那") == ["收到好友从远方寄来的生日礼物，"]
    assert stream.push("份惊喜。") == [], "a closing quote may follow"
    assert stream.push("”他") == ["那份惊喜。”"]


def test_a16_a_tag_cut_in_two_stays_one_tag():
    clauses = list(
        stream_clauses(["Well that's kind of scary [laug", "hter]. And <str", "ong>now</st", "rong>."])
    )
    assert "".join(clauses) == "Well that's kind of scary [laughter]. And <strong>now</strong>."


def test_f59_numbers_in_streamed_text_are_normalised():
    pieces = ["It co", "sts $1", ",2", "34.5", "0 tod", "ay."]
    assert (
        "".join(stream_clauses(pieces))
        == "It costs one thousand two hundred and thirty four dollars and fifty cents today."
    )
    assert "".join(stream_clauses(["血压12", "0mm", "Hg。"])) == "血压一百二十毫米汞柱。"


def test_f55_pieces_of_a_generator_are_all_there_in_order_each_time():
    pieces = [
        "收到好友从远方寄来的生日礼物，",
        "那份意外的惊喜与深深的祝福",
        "让我心中充满了甜蜜的快乐，",
        "笑容如花儿般绽放。",
    ]
    for _ in range(6):
        assert "".join(stream_clauses(pieces)) == "".join(pieces)


def test_f56_single_sentence_generator():
    text = "在他讲述那个荒诞故事的过程中，他突然停下来，因为他自己也被逗笑了[laughter]。"
    assert "".join(stream_clauses([text])) == text


def test_decimal_and_list_numbers_do_not_end_a_clause():
    assert list(stream_clauses("Pi is 3.14 exactly. No. 7 is next. 1. Buy milk. Done")) == [
        "Pi is three point one four exactly.",
        " number seven is next.",
        " one. Buy milk.",
        " Done",
    ]


def test_the_iterator_is_lazy():
    taken = []

    def pieces():
        for piece in ["First sentence here. ", "Second one. ", "Third"]:
            taken.append(piece)
            yield piece

    clauses = stream_clauses(pieces())
    assert next(clauses) == "First sentence here."
    assert len(taken) == 1, "the space shows that the sentence is over"
    assert next(clauses) == " Second one."
    assert len(taken) == 2


@pytest.mark.parametrize(
    ("pieces", "code"),
    [
        ([], "empty_input"),
        (["", " ", "\n"], "empty_input"),
        (["!!!", "???"], "unpronounceable_input"),
        (["hello <|endof", "prompt|> x. "], "special_token_not_allowed"),
        (["hello \ud83d", "x"], "invalid_utf8"),
        (["hello \ud83d"], "invalid_utf8"),
        (["\ude00"], "invalid_utf8"),
        (["a" * 60_000, "a" * 60_000], "input_too_long"),
        ([5], "invalid_type"),
    ],
)
def test_bad_streams(pieces, code):
    with pytest.raises(InvalidTextError) as caught:
        list(stream_clauses(pieces))
    assert caught.value.code == code


def test_what_cannot_be_spoken_alone_joins_its_neighbour():
    clauses = list(stream_clauses("??? Hello you. !!! "))
    assert clauses == ["??? Hello you."]
    assert list(stream_clauses("Hello you. ... Bye.")) == ["Hello you.", " ... Bye."]
