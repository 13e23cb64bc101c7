"""Slots and pages of the speech LM's cache: nothing is lost, nothing is shared."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vivace.engine.kv_cache import RowPool
from vivace.errors import OverloadedError


def test_page_zero_belongs_to_nobody():
    pool = RowPool(num_slots=2, num_pages=4, page_tokens=32)
    lease = pool.open(96)
    assert sorted(lease.pages) == [1, 2, 3]
    with pytest.raises(OverloadedError):
        pool.open(1)
    pool.close(lease)
    assert pool.open(33).pages[0] in lease.pages


def test_positions_are_rounded_up_to_pages():
    pool = RowPool(num_slots=4, num_pages=100, page_tokens=32)
    assert [len(pool.open(count).pages) for count in (1, 32, 33, 64)] == [1, 1, 2, 2]


def test_slots_run_out_before_pages():
    pool = RowPool(num_slots=1, num_pages=100, page_tokens=32)
    pool.open(1)
    with pytest.raises(OverloadedError):
        pool.open(1)


def test_a_refused_row_takes_nothing():
    pool = RowPool(num_slots=2, num_pages=4, page_tokens=32)
    with pytest.raises(OverloadedError):
        pool.open(97)
    assert (pool.num_free_pages, pool.num_open_rows) == (3, 0)
    pool.check()


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 200)), max_size=60))
def test_any_order_of_opening_and_closing(moves):
    pool = RowPool(num_slots=3, num_pages=12, page_tokens=32)
    leases = []
    for opens, number in moves:
        if opens:
            try:
                leases.append(pool.open(number))
            except OverloadedError:
                assert len(leases) == 3 or -(-number // 32) > pool.num_free_pages
        elif leases:
            lease = leases.pop(number % len(leases))
            pool.close(lease)
            pool.close(lease)
        pool.check()
    assert pool.num_open_rows == len(leases)


def test_check_finds_a_page_that_two_rows_hold():
    pool = RowPool(num_slots=3, num_pages=12, page_tokens=32)
    first, second = pool.open(32), pool.open(32)
    second.pages[:] = first.pages
    with pytest.raises(AssertionError):
        pool.check()
