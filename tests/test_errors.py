"""How errors are worded for whoever reads them."""

from __future__ import annotations

import pytest

from vivace.errors import InvalidTextError, VivaceError
from vivace.server.errors import describe


@pytest.mark.parametrize(
    ("message", "param", "shown"),
    [
        ("the text is empty; send at least one word", "text", "The text is empty; send at least one word."),
        ("The text is empty.", None, "The text is empty."),
        ("speed must lie between 0.25 and 4", "speed", "speed must lie between 0.25 and 4."),
        ("stream_format must be audio or sse", "stream_format", "stream_format must be audio or sse."),
        ("llm.pt: is missing;\n  download it", None, "llm.pt: is missing; download it."),
        ("--gpus is a number", None, "--gpus is a number."),
        ("what now?", None, "What now?"),
    ],
)
def test_messages_are_sentences(message, param, shown):
    assert VivaceError(message, param=param).sentence == shown


def test_servers_show_them_so():
    error = InvalidTextError("the text is empty", code="empty_input", param="text")
    assert describe(error).message == error.sentence == "The text is empty."
