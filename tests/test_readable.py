"""What the embedded model's front end can read, and what becomes of the rest."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vivace.errors import InvalidTextError
from vivace.text.pronounce import Pronouncer
from vivace.text.readable import LONGEST_WORD, ReadableText, plain_letters

pytestmark = pytest.mark.filterwarnings("error")


@pytest.mark.parametrize(
    "text",
    [
        "你好，世界。",
        "Привет, как дела?",
        "مرحبا بالعالم",
        "こんにちは、お元気ですか。",
        "안녕하세요",
        "สวัสดี",
        "Ελληνικά",
        "𒀀𒁀",
        "٣٤٥",
        "a" * 5_000,
        "Supercalifragilistic" * 250,
        "我用iPhone拍照，很好看。",  # scraps of what was asked for are no answer
        "[laughter]",
        "[breath][laughter] 你好",
    ],
)
def test_what_cannot_be_read_is_an_error_with_advice(text):
    with pytest.raises(InvalidTextError, match="CosyVoice checkpoint") as raised:
        ReadableText().keep_most(text)
    assert raised.value.code == "unpronounceable_input"
    assert raised.value.param == "text"


@pytest.mark.parametrize(
    ("text", "kept", "skipped"),
    [
        ("I said 你好 to everybody.", "I said to everybody.", ["你好"]),
        ("“你好” means hello there.", "means hello there.", ["你好"]),
        ("They say 你好，世界！ and wave to us.", "They say！ and wave to us.", ["你好，世界"]),
        ("Hello (привет), friends, and ሰላም.", "Hello, friends, and.", ["привет", "ሰላም"]),
        ("Hello, 你好, and goodbye.", "Hello, and goodbye.", ["你好"]),
        ("This costs ٣ coins.", "This costs coins.", ["٣"]),
        ("Kanji 漢字 and kana かな are scripts.", "Kanji and kana are scripts.", ["漢字", "かな"]),
        ("ภาษาไทย is the language of Thailand.", "is the language of Thailand.", ["ภาษาไทย"]),
        ("[HH][AY1] 你", "[HH][AY1]", ["你"]),
    ],
)
def test_the_rest_of_a_text_is_read_and_what_is_left_out_is_named(text, kept, skipped):
    readable = ReadableText()
    assert readable.keep_most(text) == kept
    assert readable.skipped == skipped


@pytest.mark.parametrize(
    "text",
    ["Plain words, 12 of them!", " naïve café, Łódź, Þór, straße and smørrebrød ", "π is 3.14, and Δx is 5 µm.", "x²",
     "Ⅳ", "y" * LONGEST_WORD, "Well [breath] so. <strong>Yes</strong>", "— “quotes” …", ""],
)  # fmt: skip
def test_what_can_be_read_stays_as_it_is(text):
    readable = ReadableText()
    assert readable.keep(text) == (text if re.search("[A-Za-z0-9²Ⅳ]", text) else "")
    assert readable.skipped == []


def test_pieces_of_a_text_are_judged_one_by_one():
    readable = ReadableText()
    assert [readable.keep(piece) for piece in ("Hi,", " 你好。", " 2 мира", " end.")] == [
        "Hi,",
        "",
        " 2",
        " end.",
    ]
    assert readable.skipped == ["你好", "мира"]


def test_a_word_without_end_is_left_out_to_its_end():
    readable = ReadableText()
    pieces = ["So", " " + "ab" * 100, "ab" * 100, "ab" * 20 + " ends", "ab here."]
    assert [readable.keep(piece) for piece in pieces] == ["So", "", "", " ends", "ab here."]
    assert [len(span) for span in readable.skipped] == [60, 60, 40]
    readable = ReadableText()
    assert readable.keep("One " + "z" * 101 + " two three " * 20).startswith("One two three two")


def test_the_list_of_what_was_left_out_is_bounded():
    readable = ReadableText()
    readable.keep("a " + "你 b " * 1_000 + "世" * 1_000)
    assert readable.skipped == ["你"] * 50 + ["…"]
    readable.keep("你 b")
    assert len(readable.skipped) == 51


@given(st.text(max_size=60))
def test_every_letter_is_kept_or_named(text):
    readable = ReadableText()
    kept = readable.keep(text)
    letters = [character for character in text if character.isalnum()]
    if kept:
        assert sorted(
            character for character in kept + "".join(readable.skipped) if character.isalnum()
        ) == sorted(letters)
    said = [character for character in kept if character.isalnum()]
    assert all(plain_letters(character)[0].isascii() for character in said if not "Ͱ" <= character <= "Ͽ")


@pytest.fixture(scope="module")
def pronouncer():
    return Pronouncer()


def test_single_greek_letters_are_names_and_foreign_latin_letters_are_said(pronouncer):
    assert pronouncer.to_tags("π") == pronouncer.to_tags("pi")
    assert pronouncer.to_tags("2π, Δx") == pronouncer.to_tags("2 pi, delta x")
    assert pronouncer.to_tags("Þór Łukasz") == pronouncer.to_tags("Thor Lukasz")
    assert pronouncer.to_tags("T̶̢͉o̷ ̶i̸n̷v̵o̷k̵e̴") == pronouncer.to_tags("To invoke")
    assert pronouncer.to_tags("straße") == pronouncer.to_tags("strasse")
