"""What the written pages show is true: Python examples run, commands parse, make targets and files exist."""

from __future__ import annotations

import dataclasses
import importlib
import re
import runpy
import shlex
from pathlib import Path

import pytest
import typer

from vivace import Engine, SamplingParams, SynthesisRequest
from vivace.cli import app

ROOT = Path(__file__).parent.parent
PAGES = [
    *(ROOT / name for name in ("README.md", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "recipes").rglob("*.md")),
]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
OWN_FOLDERS = ("docs/", "src/", "recipes/", "tests/", "deploy/")
"""Paths in the repository are written from its root; other folders are those of models and users."""

OF_RECIPES = {"--out", "--device", "--vocoder-gpu"}


def blocks(language: str) -> list[tuple[str, str]]:
    """(page, text) of each fenced block of a language."""
    found = []
    for page in PAGES:
        for kind, text in FENCE.findall(page.read_text(encoding="utf-8")):
            if kind == language:
                found.append((page.name, text))
    return found


def spans() -> list[tuple[str, str]]:
    """(page, text) of each inline code span, a table's escaped bars as plain ones."""
    return [
        (page.name, text.replace("\\|", "|"))
        for page in PAGES
        for text in SPAN.findall(FENCE.sub("", page.read_text(encoding="utf-8")))
    ]


def command_lines() -> list[str]:
    """Every line that calls ``vivace``, in blocks and in spans, from the word on."""
    texts = [text.replace("\\\n", " ") for _, text in blocks("") + blocks("bash")]
    lines = [line for text in texts for line in text.splitlines()]
    lines += [text for _, text in spans()]
    called = (re.search(r"(?:^|\| *)(?:\S*/)?vivace( .+)", line.partition(" #")[0].strip()) for line in lines)
    return sorted({found[1].partition(" | ")[0].strip() for found in called if found})


def parse(words: list[str]) -> None:
    """As the shell's ``vivace WORDS`` would; raises click's usage errors."""
    command = typer.main.get_command(app)
    context = command.make_context("vivace", list(words), resilient_parsing=False)
    while hasattr(command, "resolve_command"):
        name, command, words = command.resolve_command(context, list(words))
        if not words and command.params:
            return  # the page names the command and does not call it
        context = command.make_context(name, list(words), parent=context)


def all_options() -> set[str]:
    def of(command) -> set[str]:
        own = {option for parameter in command.params for option in parameter.opts}
        return own.union(*(of(child) for child in getattr(command, "commands", {}).values()))

    return of(typer.main.get_command(app))


@pytest.mark.parametrize("line", command_lines())
def test_commands_parse(line):
    words = shlex.split(line)
    if any("|" in word for word in words):  # voice add|list|remove: each is a command
        for word in words[-1].split("|"):
            parse([*words[:-1], word])
    else:
        parse(words)


def test_the_pages_call_the_commands_that_a_newcomer_needs():
    called = {line.split()[0] for line in command_lines()}
    assert {"say", "transform", "convert", "doctor", "voice"} <= called


@pytest.mark.parametrize("line", ["say Hi. --loud", "voice sing", "hum", "doctor mini --speed 2"])
def test_a_wrong_command_would_be_found(line):
    with pytest.raises(Exception, match="No such"):
        parse(shlex.split(line))


def test_options_named_alone_exist():
    named = {word for _, text in spans() if text.startswith("--") for word in text.split()}
    own = {word for word in named if word.startswith("--")} - OF_RECIPES
    assert own
    assert own <= all_options()


def test_commands_of_the_recipes_exist():
    """Modules by name, and every option by its place in the module's source."""
    lines = "\n".join(text.replace("\\\n", " ") for _, text in blocks("bash") + spans())
    calls = re.findall(r"python3? -m (recipes\.[\w.]+)([^\n#]*)", lines)
    assert len(calls) > 8
    for module, arguments in calls:
        source = (ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
        for option in re.findall(r"--[\w-]+", arguments.replace("--help", "")):
            assert f'"{option}"' in source, f"{module} {option}"


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    text = "\n".join(text for _, text in blocks("") + blocks("bash") + spans())
    named = set(re.findall(r"^make (\w+)", text, re.MULTILINE))
    assert {"demo", "test"} <= named <= targets
    assert "make test" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


@pytest.mark.parametrize(("page", "path"), sorted(s for s in spans() if s[1].startswith(OWN_FOLDERS)))
def test_files_exist(page, path):
    if " " not in path:
        assert list(ROOT.glob(path.rstrip("/"))), f"{page} names {path}"


@pytest.mark.parametrize(("page", "target"), [
    (page, target)
    for page in PAGES
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8"))
])  # fmt: skip
def test_links_lead_somewhere(page, target):
    assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_names_of_the_python_column_exist():
    """Method names of ``engine.x(...)``, fields of ``SynthesisRequest(x=...)``, modules ``vivace.x``."""
    text = "\n".join(text for page, text in spans() if page == "README.md")
    methods = re.findall(r"\b[eE]ngine\.(\w+)", text)
    assert methods
    for method in methods:
        assert hasattr(Engine, method), method
    for thing in (SynthesisRequest, SamplingParams):
        fields = {field.name for field in dataclasses.fields(thing)}
        for inside in re.findall(rf"{thing.__name__}\(([^)]*)\)", text):
            assert set(re.findall(r"(\w+)=", inside)) <= fields, inside
    for module in re.findall(r"^vivace(?:\.\w+)+$", text, re.MULTILINE):
        importlib.import_module(module)


@pytest.mark.parametrize(("page", "code"), blocks("python"))
def test_python_examples_run(page, code, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VIVACE_VOICES", str(tmp_path / "voices"))
    exec(compile(code, page, "exec"), {"__name__": "__main__"})
    if "print(" in code:
        assert capsys.readouterr().out


def test_the_first_example_is_there():
    assert any(page == "README.md" and "engine.stream(" in code for page, code in blocks("python"))


def test_the_picture_is_what_its_script_draws():
    pictures = ROOT / "docs" / "pictures"
    drawn = runpy.run_path(str(pictures / "make_streaming.py"))["draw"]()
    assert (pictures / "streaming.svg").read_text(encoding="utf-8") == drawn


def test_tests_named_in_the_table_of_faults_exist():
    """``test_file.py::test_name_*`` and, behind it in the same cell, ``test_name``."""
    page = (ROOT / "docs" / "reported_faults.md").read_text(encoding="utf-8")
    checked = 0
    for row in page.splitlines():
        cells = row.replace("\\|", "").split("|")
        if not re.match(r"[A-FT]\d+$", cells[1].strip() if len(cells) > 1 else ""):
            continue
        file = "test_normalize.py" if cells[1].strip().startswith("T") else ""
        for span in re.findall(r"`(test_[^`]+)`", cells[4]):
            file, name = span.split("::") if "::" in span else (file, span)
            source = (ROOT / "tests" / file).read_text(encoding="utf-8")
            assert re.search(rf"def {name.replace('*', '.*')}\(", source), f"{cells[1]}: {span}"
            checked += 1
    assert checked > 80
