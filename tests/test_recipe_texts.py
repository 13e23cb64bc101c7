"""The list of what the teacher says."""

import random
from itertools import islice

import pytest

from recipes.mini import texts
from recipes.mini.generate import read_items
from recipes.mini.heldout import sentences

GLOSS = '01 entity 0 000 | that which exists; "a fine entity is here"; "too short"; "it has 3 numbers in it"'


@pytest.fixture
def wordnet(tmp_path):
    for kind in ("noun", "verb", "adj", "adv"):
        (tmp_path / f"data.{kind}").write_text(
            f'  1 licence text\n{GLOSS}\n02 thing | "Who said {kind} here?"\n'
        )
    return tmp_path


def test_examples(wordnet):
    assert texts.examples(wordnet) == [
        "A fine entity is here.",
        *(f"Who said {kind} here?" for kind in ("noun", "verb", "adj", "adv")),
    ]


def test_templates_hold_no_digits_and_every_one_is_used():
    made = list(islice(texts.from_templates(random.Random(0)), 300))
    assert not any(letter.isdigit() or letter in "{}$%" for text in made for letter in text)
    assert len({text.split()[0] for text in made}) >= 10


def test_items_are_reproducible_and_hold_nothing_held_out(wordnet, tmp_path):
    secret = sentences()[0]
    (wordnet / "data.adv").write_text(f'03 thing | "{secret.spoken}"\n')
    for name in ("one.xz", "two.xz"):
        texts.main(["--wordnet", str(wordnet), "--sentences", "200", "--out", str(tmp_path / name)])
    items = read_items(tmp_path / "one.xz", "en")
    assert items == read_items(tmp_path / "two.xz", "en")
    assert len({item["id"] for item in items}) == 200
    assert secret.spoken not in {item["text"] for item in items}
    mixes = [item["mix"] for item in items if "mix" in item]
    assert 20 < len(mixes) < 90
    assert all(sum(mix.values()) == pytest.approx(1.0, abs=0.01) and len(mix) == 3 for mix in mixes)
