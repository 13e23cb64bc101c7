"""When a segment's speech ends: tokens counted together end where they end one by one."""

from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from vivace.engine.lm_rules import SHORTEST_LIMIT_TOKENS, SegmentRules


def rules(text_tokens, max_equal):
    return SegmentRules(
        SimpleNamespace(num_text_tokens=text_tokens),
        token_text_ratio=(2.0, 6.0),
        max_tokens=60,
        max_equal_tokens=max_equal,
        attempt=0,
    )


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=40), max_size=6),
    st.integers(0, 12),
    st.integers(2, 6),
)
def test_a_run_counts_as_its_tokens_do(runs, text_tokens, max_equal):
    alone, together = rules(text_tokens, max_equal), rules(text_tokens, max_equal)
    for run in runs:
        if together.finish_reason is not None:
            break
        counted = 0
        for token in run:
            if alone.finish_reason is None:
                alone.count(token, text_is_known=True)
                counted += 1
        assert together.count_run(run, text_is_known=True) == counted
        assert together.finish_reason == alone.finish_reason
        assert together.num_speech_tokens == alone.num_speech_tokens


def test_a_run_ends_at_the_longest_length_and_at_equal_tokens():
    long, equal = rules(0, 50), rules(100, 4)
    assert long.count_run(list(range(40)), text_is_known=True) == SHORTEST_LIMIT_TOKENS
    assert equal.count_run([5, 5], text_is_known=True) == 2
    assert equal.count_run([5, 5, 5, 1], text_is_known=True) == 2
    assert (long.finish_reason, equal.finish_reason) == ("length", "length")
