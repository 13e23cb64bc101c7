"""Learns letter-to-sound rules from a pronouncing dictionary: what is said for words that it does not list.

Each letter is aligned with no, one or two phonemes (a few rounds of Viterbi training). Then every letter gets the
sound that is usual for it, and a longer context gets a rule of its own only where it changes the decision: a
decision tree over a fixed order of neighbours (IGTree, Daelemans and van den Bosch). Applying the rules is a few
dictionary look-ups per letter; ``vivace.text.letter_sounds`` does it and defines the windows.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from vivace.text.letter_sounds import windows

Phonemes = tuple[str, ...]
Aligned = list[tuple[str, Phonemes]]


def align(word: str, phonemes: Sequence[str], cost: Mapping[tuple[str, Phonemes], float]) -> Aligned | None:
    """The cheapest way to share ``phonemes`` among the letters; None where none of them can be shared so."""
    n, m = len(word), len(phonemes)
    best = [[math.inf] * (m + 1) for _ in range(n + 1)]
    taken = [[0] * (m + 1) for _ in range(n + 1)]
    best[0][0] = 0.0
    for i in range(n):
        # What is left must fit into the letters that are left, two each.
        for j in range(max(0, m - 2 * (n - i)), min(m, 2 * i) + 1):
            here = best[i][j]
            if here == math.inf:
                continue
            for count in range(min(2, m - j) + 1):
                group = tuple(phonemes[j : j + count])
                total = here + cost.get((word[i], group), 9.0 + 2.0 * count)
                if total < best[i + 1][j + count]:
                    best[i + 1][j + count] = total
                    taken[i + 1][j + count] = count
    if best[n][m] == math.inf:
        return None
    out: Aligned = []
    j = m
    for i in range(n, 0, -1):
        count = taken[i][j]
        out.append((word[i - 1], tuple(phonemes[j - count : j])))
        j -= count
    return out[::-1]


def learn_costs(lexicon: Mapping[str, Sequence[str]], rounds: int = 4) -> dict[tuple[str, Phonemes], float]:
    """Minus log probability of each (letter, phonemes) pair; stress digits do not matter for it."""
    cost: dict[tuple[str, Phonemes], float] = {}
    counts: Counter[tuple[str, Phonemes]] = Counter()
    for word, phonemes in lexicon.items():
        # First guess: letter and phoneme at the same relative place.
        for j, phoneme in enumerate(phonemes):
            counts[(word[min(len(word) - 1, j * len(word) // len(phonemes))], (phoneme,))] += 1
        counts[(word[-1], ())] += 1
    for _ in range(rounds):
        totals: Counter[str] = Counter()
        for (letter, _group), count in counts.items():
            totals[letter] += count
        cost = {
            pair: -math.log(count / totals[pair[0]]) + 0.5 * (len(pair[1]) == 2)
            for pair, count in counts.items()
        }
        counts = Counter()
        for word, phonemes in lexicon.items():
            counts.update(align(word, phonemes, cost) or ())
    return cost


def learn_rules(aligned: Sequence[Aligned], min_gain: int) -> dict[str, Phonemes]:
    """Window to phonemes; a window is kept if it puts right at least ``min_gain`` more letters than its parent."""
    nodes: defaultdict[str, Counter[Phonemes]] = defaultdict(Counter)
    parents: dict[str, str] = {}
    for pairs in aligned:
        word = "".join(letter for letter, _ in pairs)
        for index, (_, group) in enumerate(pairs):
            shorter = ""
            for window in windows(word, index):
                nodes[window][group] += 1
                parents[window] = shorter
                shorter = window
    rules: dict[str, Phonemes] = {}
    inherited: dict[str, Phonemes] = {}
    for window in sorted(nodes, key=len):
        counts = nodes[window]
        usual, count = counts.most_common(1)[0]
        parent = inherited.get(parents[window])
        if parent is None or (usual != parent and count - counts[parent] >= min_gain):
            rules[window] = inherited[window] = usual
        else:
            inherited[window] = parent
    return rules
