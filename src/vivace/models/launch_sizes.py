"""How many chunks, or streams, share a launch: the cheapest way to serve all that are ready."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache


def powers_of_two(count: int, most: int) -> list[int]:
    """``count`` chunks in launches of 1, 2, 4 …, none of more than ``most``; the largest first."""
    sizes = []
    while count:
        sizes.append(min(most, 1 << (count.bit_length() - 1)))
        count -= sizes[-1]
    return sizes


def cheapest(count: int, costs: Mapping[int, float]) -> list[int]:
    """Sizes of launches that serve ``count`` chunks for the least; the largest first.

    Args:
        costs: of a launch, by its size. The last one may be larger than what is left for it.
    """
    return list(_cheapest(count, tuple(sorted(costs.items()))))


@lru_cache(maxsize=1024)  # asked for every launch
def _cheapest(count: int, costs: tuple[tuple[int, float], ...]) -> tuple[int, ...]:
    best: list[tuple[float, list[int]]] = [(0.0, [])]
    for chunks in range(1, count + 1):
        ways = ((size, one, best[max(0, chunks - size)]) for size, one in costs)
        best.append(min((cost + one, [size, *sizes]) for size, one, (cost, sizes) in ways))
    return tuple(sorted(best[count][1], reverse=True))
