"""Writes the embedded model's text tokenizer: Qwen2's byte-level BPE without merges, so 256 base entries.

The special tokens of CosyVoice 3 follow in their order, from id 256. Files as in the official ``CosyVoice-BlankEN``.

    python -m recipes.mini.build_tokenizer --out src/vivace/assets/mini/CosyVoice-BlankEN
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from recipes.mini.config import TEXT_VOCAB_SIZE
from vivace.text.special_tokens import COSYVOICE3_TOKENS, END_OF_TEXT


def byte_characters() -> list[str]:
    """GPT-2's printable stand-in for each of the 256 bytes, in Qwen2's id order: printable ones first."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in printable] + [chr(256 + i) for i in range(len(others))]


def write(folder: Path) -> None:
    """Write vocab.json, merges.txt and tokenizer_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    base = byte_characters()
    if len(base) + len(COSYVOICE3_TOKENS) > TEXT_VOCAB_SIZE:
        raise ValueError("TEXT_VOCAB_SIZE is too small for the special tokens")
    added = {
        str(len(base) + i): {
            "content": token, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False,
            "special": True,
        }
        for i, token in enumerate(COSYVOICE3_TOKENS)
    }  # fmt: skip
    tokenizer = {
        "add_prefix_space": False,
        "added_tokens_decoder": added,
        "additional_special_tokens": [token for token in COSYVOICE3_TOKENS if token != END_OF_TEXT],
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": END_OF_TEXT,
        "errors": "replace",
        "model_max_length": 32768,
        "pad_token": END_OF_TEXT,
        "split_special_tokens": False,
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    vocab = {character: i for i, character in enumerate(base)}
    for name, value in (("vocab.json", vocab), ("tokenizer_config.json", tokenizer)):
        (folder / name).write_text(json.dumps(value, ensure_ascii=False) + "\n", encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(prog="python -m recipes.mini.build_tokenizer", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("src/vivace/assets/mini/CosyVoice-BlankEN"))
    write(parser.parse_args(argv).out)


if __name__ == "__main__":
    main()
