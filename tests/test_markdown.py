"""What language models write around words: Markdown, tables, code, formulas. The words are read, the marks are not."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vivace.text.clean import clean_text
from vivace.text.markdown import strip_markdown
from vivace.text.normalize import normalize
from vivace.text.stream import stream_clauses

ANSWER = """# Weather report 🌤️

Here's what I found for **Berlin**:

- Temperature: 5°C (41°F)
- [x] Umbrella packed ☔!

| Day | High | Low |
|-----|:----:|----:|
| Mon | 7°C | -2°C |

1. Open `settings.json`
2. Set `max_tokens` to 4096
   * nested item

```python
def f(x):
    return x ** 2
```

See [the docs](https://example.com/docs?a=1) or <https://vivace.dev>. _Note:_ it costs $5–$10/month, i.e. 20% off!

> Quote: "To be, or not to be"
---
Thanks 😀!"""
READ = (
    "Weather report. Here's what I found for Berlin: Temperature: five degrees Celsius (forty one degrees Fahrenheit) "
    "Umbrella packed! Day, High, Low. Mon, seven degrees Celsius, minus two degrees Celsius. one. Open settings.json. "
    "two. Set max tokens to four thousand and ninety six. nested item. def f(x): return x squared. See the docs or "
    "https://vivace.dev. Note: it costs five to ten dollars per month, that is twenty percent off! "
    'Quote: "To be, or not to be" Thanks!'
)


def test_an_answer_of_a_language_model():
    assert normalize(ANSWER) == READ


def test_an_answer_that_comes_letter_by_letter():
    assert "".join(stream_clauses(list(ANSWER))) == READ


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("*wow* _really_ __bold__ ~~gone~~ `code`", "wow really bold gone code"),
        (r"\*not\* a \_mark\_", "not a mark"),
        ("[words](https://example.com/a_(b)) stay", "[words](https://example.com/a_(b)) stay"),
        ("[words](https://example.com 'x')", "[words](https://example.com 'x')"),
        ('[words](docs/a.md "title") and ![alt](a.png)', "words and alt"),
        ("[laughter](https://example.com)", "[laughter](https://example.com)"),
        ("an array[0](x) and f(x)", "an array[0](x) and f(x)"),
        ("a|b", "a|b"),
        ("| a | | b |", "a, b"),
        ("| 名称 | 价格 |", "名称，价格"),
        ("- [ ] task", "task"),
        ("> > quoted twice", "quoted twice"),
        ("· dot", "dot"),
        ("-5 degrees", "-5 degrees"),
        ("Title\n=====\nText", "Title\n\nText"),
        ("It costs $5 and $10", "It costs $5 and $10"),
        ("$x$ and $y_1$", "x and y_1"),
        ("snake_case_name", "snake_case_name"),
    ],
)
def test_marks_go_and_words_stay(text, left):
    assert strip_markdown(text) == left


def test_no_space_is_left_before_a_mark_where_an_emoji_stood():
    assert clean_text("Hello 😀! Fine 🎉🎉, so 👍 go.") == "Hello! Fine, so go."


@given(st.text(alphabet="ab1 |-*_`#>[]()$\\\n.=~", max_size=60))
def test_no_letter_or_digit_is_lost(text):
    kept = [character for character in strip_markdown(text) if character.isalnum()]
    # Behind a fence stands the name of a language, in a link's brackets an address.
    if not any(mark in text for mark in ("```", "~~~", "](")):
        assert kept == [character for character in text if character.isalnum()]


@pytest.mark.parametrize(
    "piece",
    [
        "|",
        "|-",
        "[",
        "](",
        "[a](",
        "*",
        "_",
        "$",
        "$a",
        "\\(",
        "`",
        "```\n",
        "- ",
        "> ",
        "<http://",
        "=",
        "~~~",
    ],
)
def test_marks_without_end_cost_linear_time(piece):
    def seconds(count):
        started = time.perf_counter()
        strip_markdown(piece * count)
        return time.perf_counter() - started

    # Quadratic time would be minutes here.
    assert seconds(100_000) < 20
