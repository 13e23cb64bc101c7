"""The tables of bad inputs and faults: every row is there, and every test that they name exists."""

import re
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
DOCS = TESTS.parent / "docs"
ROWS = {"J": 25, "T": 22, "A": 26, "W": 16, "V": 12, "H": 18, "M": 20, "C": 7, "E": 9}
ALIASES = {
    **{
        name: f"test_bad_inputs_{name}.py"
        for name in ("json", "text", "voices", "websocket", "http", "start", "model")
    },
    **{
        name: f"test_{name}.py" for name in ("decode", "normalize", "voice", "checkpoint", "tokenizer", "cli")
    },
    "limits": "test_server_limits.py",
    "run": "test_server_run.py",
    "yaml": "test_model_yaml.py",
}
TEST = re.compile(r"`([\w.]+)::([\w*]+)`")


def rows(document, pattern):
    """(id, whole line) of each row of the tables."""
    text = (DOCS / document).read_text("utf-8")
    return re.findall(rf"^\| ({pattern}) (\|.*)$", text, re.MULTILINE)


def missing(line):
    """Tests that the line names and that do not exist."""
    found = []
    for file, pattern in TEST.findall(line):
        path = TESTS / ALIASES.get(file, file)
        names = (
            re.findall(r"^(?:async )?def (\w+)", path.read_text("utf-8"), re.MULTILINE)
            if path.exists()
            else []
        )
        if not any(fnmatchcase(name, pattern) for name in names):
            found.append(f"{file}::{pattern}")
    return found


def test_every_bad_input_has_its_row():
    ids = [name for name, _ in rows("bad_inputs.md", r"[A-Z]\d+")]
    assert ids == [f"{group}{number}" for group, count in ROWS.items() for number in range(1, count + 1)]
    assert len(ids) == 155


def test_every_fault_has_its_row():
    assert [name for name, _ in rows("reliability.md", r"F\d+")] == [f"F{number}" for number in range(1, 33)]


@pytest.mark.parametrize(
    ("document", "pattern"), [("bad_inputs.md", r"[A-Z]\d+"), ("reliability.md", r"F\d+")]
)
def test_every_test_that_is_named_exists(document, pattern):
    assert {name: gone for name, line in rows(document, pattern) if (gone := missing(line))} == {}


def test_a_bad_input_without_a_test_says_why():
    without = [name for name, line in rows("bad_inputs.md", r"[A-Z]\d+") if not TEST.search(line)]
    assert without == ["V12"]
