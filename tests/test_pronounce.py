"""The pronouncing front end: words to tags, and the embedded tokenizer that takes them."""

from __future__ import annotations

import json
import lzma
import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vivace.errors import ModelFolderError
from vivace.text.letter_sounds import apply_rules, settle_stress, windows
from vivace.text.lexicon import Lexicon, with_ed, with_s
from vivace.text.pronounce import EMBEDDED_LEXICON, Pronouncer
from vivace.text.special_tokens import COSYVOICE3_TOKENS
from vivace.text.tokenizer import TextTokenizer

TOKENIZER_FOLDER = EMBEDDED_LEXICON.parent / "CosyVoice-BlankEN"


@pytest.fixture(scope="module")
def pronouncer():
    return Pronouncer()


def test_words_spaces_and_marks(pronouncer):
    assert pronouncer.to_tags("Hello, world!") == "[HH][AH0][L][OW1], [W][ER1][L][D]!"


@pytest.mark.parametrize(
    ("text", "tags"),
    [
        ("the apple", "[DH][IY0] [AE1][P][AH0][L]"),
        ("the pear", "[DH][AH0] [P][EH1][R]"),
        ("to record a record", "[T][UW1] [R][IH0][K][AO1][R][D] [AH0] [R][EH1][K][ER0][D]"),
        ("I read. I have read.", "[AY1] [R][IY1][D]. [AY1] [HH][AE1][V] [R][EH1][D]."),
        ("Plan B", "[P][L][AE1][N] [B][IY1]"),
        ("Vitamin A", "[V][AY1][T][AH0][M][AH0][N] [EY1]"),
        ("the XKCD", "[DH][IY0] [EH2][K][S][K][EY2][S][IY2][D][IY1]"),
        ("5 p.m. now", "[F][AY1][V] [P][IY2][EH1][M] [N][AW1]"),
        ("Dr. Lee’s six-footer", "[D][AA1][K][T][ER0] [L][IY1][Z] [S][IH1][K][S] [F][UH1][T][ER0]"),
        ("(well) — \"so\"…", "[W][EH1][L], [S][OW1],"),
        ("  so ,, what?! ", " [S][OW1], [W][AH1][T]? "),
        ("[laughter] so [HH][AH0]<|endofprompt|>", "[laughter] [S][OW1] [HH][AH0]<|endofprompt|>"),
        ("用中文 so", " [S][OW1]"),
        ("Café", "[K][AH0][F][EY1]"),
        ("MP3", "[EH2][M][P][IY1] [TH][R][IY1]"),
        ("?!", ""),
        ("", ""),
    ],
)  # fmt: skip
def test_sentences(pronouncer, text, tags):
    assert pronouncer.to_tags(text) == tags


@pytest.mark.parametrize(
    ("word", "phonemes"),
    [
        ("lighthouse", "L AY1 T HH AW2 S"),
        ("unbendable", "AH2 N B EH1 N D AH0 B AH0 L"),
        ("armless", "AA1 R M L AH0 S"),
        ("rakishly", "R EY1 K IH0 SH L IY0"),
        ("speared", "S P IH1 R D"),
        ("teacher's", "T IY1 CH ER0 Z"),
        ("dogs'", "D AO1 G Z"),
        ("xkcd", "EH2 K S K EY2 S IY2 D IY1"),
    ],
)
def test_words_that_the_dictionary_lacks(pronouncer, word, phonemes):
    got = pronouncer.pronounce(word)
    assert got == tuple(phonemes.split())


@pytest.mark.parametrize(
    ("word", "phonemes"),
    [("blorf", "B L AO1 R F"), ("gizmo", "G IH1 Z M OW0"), ("splenticate", "S P L EH1 N T IH0 K EY2 T")],
)
def test_made_up_words_are_nearly_what_a_reader_says(pronouncer, word, phonemes):
    said = [p.rstrip("012") for p in pronouncer.lexicon.guessed(word)]
    meant = [p.rstrip("012") for p in phonemes.split()]
    assert len(said) == len(meant)
    assert sum(a != b for a, b in zip(said, meant, strict=True)) <= 1


def test_inflection_follows_the_last_sound():
    assert with_s(("K", "AE1", "T"))[-1] == "S"
    assert with_s(("D", "AO1", "G"))[-1] == "Z"
    assert with_s(("B", "AH1", "S"))[-2:] == ("IH0", "Z")
    assert with_ed(("W", "AO1", "K"))[-1] == "T"
    assert with_ed(("N", "IY1", "D"))[-2:] == ("IH0", "D")


def test_the_widest_window_with_a_rule_decides():
    assert list(windows("cat", 1))[:4] == ["a", "at", "cat", "cat#"]
    rules = {"c": "K", "a": "A", "t": "T", "cat#": "E", "h": ""}
    assert apply_rules("cat", rules) == ["K", "E", "T"]
    assert apply_rules("cath", rules) == ["K", "A", "T"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("K AE1 T AA1 N", "K AE1 T AA2 N"),
        ("K AH0 T AA2 N", "K AH0 T AA1 N"),
        ("K AH0 T AA0", "K AH0 T AA1"),
        ("K AH0 T", "K AH1 T"),
        ("S T", "S T"),
    ],
)
def test_a_word_has_one_primary_stress(before, after):
    assert settle_stress(before.split()) == after.split()


@given(st.text(max_size=40))
def test_any_text_gives_known_tags_and_tidy_marks(pronouncer, text):
    tags = pronouncer.to_tags(text)
    for tag in re.findall(r"\[[A-Z]{1,2}[0-2]?\]", tags):
        assert tag in COSYVOICE3_TOKENS
    rest = tags
    for token in sorted(COSYVOICE3_TOKENS, key=len, reverse=True):
        rest = rest.replace(token, "x")
    assert not re.search(r"[,.?!]{2}|  |^ ?[,.?!]", rest)


@given(st.from_regex(r"[a-z]{1,12}('[a-z]{1,3})?", fullmatch=True))
def test_every_word_is_said(pronouncer, word):
    assert len(pronouncer.pronounce(word)) >= 1
    assert pronouncer.to_tags(word).startswith("[")


def test_pieces_join_as_the_whole(pronouncer):
    pieces = ["The old man,", " who sat there,", " said no.", " Then he left!"]
    assert "".join(map(pronouncer, pieces)) == pronouncer("".join(pieces))


def test_damaged_files_are_refused(tmp_path):
    with pytest.raises(ModelFolderError):
        Lexicon(tmp_path / "missing.xz")
    whole = EMBEDDED_LEXICON.read_bytes()
    for name, data in (("cut", whole[:1000]), ("junk", b"junk"), ("other", lzma.compress(b"no lexicon"))):
        path = tmp_path / name
        path.write_bytes(data)
        with pytest.raises(ModelFolderError):
            Lexicon(path)


def test_the_lexicon_is_small_and_a_folder_may_bring_its_own(tmp_path):
    assert EMBEDDED_LEXICON.stat().st_size <= 1_000_000
    assert Pronouncer.from_folder(tmp_path).lexicon.listed("cat") == ("K", "AE1", "T")
    (tmp_path / "lexicon.xz").write_bytes(lzma.compress(b'vivace lexicon 1\nA B\fcat\f!"\fa\nc\nt\f!\n"\n'))
    own = Pronouncer.from_folder(tmp_path)
    assert own.lexicon.listed("cat") == ("A", "B")
    assert own.lexicon.guessed("ca") == ("B", "A")


def test_the_embedded_tokenizer_knows_bytes_and_tags():
    tokenizer = TextTokenizer.from_folder(TOKENIZER_FOLDER)
    ids = tokenizer.encode("You.<|endofprompt|>[HH][AH0], é")
    assert ids == [
        56,
        78,
        84,
        13,
        259,
        *tokenizer.encode("[HH]"),
        *tokenizer.encode("[AH0]"),
        11,
        220,
        127,
        102,
    ]
    assert tokenizer.decode(ids) == "You.<|endofprompt|>[HH][AH0], é"
    golden = json.loads(
        (Path(__file__).parent / "golden/frontend/special_tokens.json").read_text(encoding="utf-8")
    )
    named = [golden["cosyvoice3"]["eos_token"], *golden["cosyvoice3"]["additional_special_tokens"]]
    for place, token in enumerate(named):
        assert tokenizer.encode(token) == [256 + place]


def test_a_word_of_nothing_but_endings(pronouncer):
    assert pronouncer.pronounce("cat's's") == ("K", "AE1", "T", "S", "IH0", "Z")
    said = pronouncer.to_tags("a" + "'s" * 2000)
    assert said.count("[IH0][Z]") >= 1999


def packed_lexicon(text: str, **options) -> bytes:
    return lzma.compress(text.encode(), **options)


@pytest.mark.parametrize(
    "content",
    [
        packed_lexicon("vivace lexicon 1\nAA1 B\fone\ntwo\f!\f\f"),
        packed_lexicon("vivace lexicon 1\nAA1 B\fone\f~\f\f"),
        b"",
        packed_lexicon("x" * (17 * 2**20), preset=0),
    ],
    ids=["blocks", "phonemes", "empty", "bomb"],
)
def test_hostile_lexicons_are_refused(tmp_path, content):
    path = tmp_path / "lexicon.xz"
    path.write_bytes(content)
    with pytest.raises(ModelFolderError, match="not a readable lexicon"):
        Lexicon(path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_a_pipe_in_the_lexicons_place_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "lexicon.xz")
    with pytest.raises(ModelFolderError, match="not a readable lexicon"):
        Lexicon(tmp_path / "lexicon.xz")
