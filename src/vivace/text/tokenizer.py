"""Text to token ids: Qwen2's byte-level BPE with CosyVoice 3's special tokens."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from vivace.errors import ModelFolderError
from vivace.text.special_tokens import CONTROL_TOKENS, COSYVOICE3_TOKENS, END_OF_PROMPT, END_OF_TEXT

# Qwen2's pre-tokenisation: contractions, words, single digits, punctuation, line breaks, spaces.
QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The files are small (the official ones 2.8 and 1.7 MB); far larger ones are not tokenizer files.
_LARGEST_FILE_BYTES = 64 * 1024 * 1024


class TextTokenizer:
    """Encodes text for the speech LM. Special tags such as ``[laughter]`` are one id each.

    Build it with :meth:`from_folder`. Encoding is thread-safe and keeps no state.
    """

    def __init__(self, tokenizer: Tokenizer, special_ids: dict[str, int]) -> None:
        self._tokenizer = tokenizer
        self._special_ids = special_ids

    @classmethod
    def from_folder(
        cls, folder: str | Path, special_tokens: tuple[str, ...] = COSYVOICE3_TOKENS
    ) -> TextTokenizer:
        """Read ``vocab.json`` and ``merges.txt``; the ids of the special tokens follow the base vocabulary.

        Args:
            folder: the tokenizer folder of a model (``CosyVoice-BlankEN`` in the official ones).
            special_tokens: the added tokens in id order.

        Raises:
            ModelFolderError: a file is missing or damaged.
        """
        folder = Path(folder)
        vocab = _read_vocab(folder / "vocab.json")
        merges = _read_merges(folder / "merges.txt", vocab)
        special_ids = _special_ids(folder, vocab, special_tokens)
        tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges, fuse_unk=False))
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(QWEN2_PATTERN), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        tokenizer.decoder = decoders.ByteLevel()
        # tokenizers numbers added tokens after the base vocabulary in the order in which they come.
        tokenizer.add_special_tokens(
            [AddedToken(token, special=True, normalized=False) for token in special_ids]
        )
        for token, expected in special_ids.items():
            if tokenizer.token_to_id(token) != expected:
                raise ModelFolderError(
                    f"{folder / 'vocab.json'}: special token {token} gets another id than {expected}; "
                    "take the tokenizer files of the same model folder"
                )
        return cls(tokenizer, special_ids)

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``; every special token in it is one id.

        The text is taken as it is: whoever passes a user's text has checked it (``normalize``,
        ``prompts``), so that no control token of the user's reaches the model.
        """
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: list[int]) -> str:
        """The text of ``ids``, special tokens included."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def count(self, text: str) -> int:
        """Number of ids of ``text``."""
        return len(self.encode(text))

    def special_id(self, token: str) -> int:
        """Id of a special token.

        Raises:
            KeyError: it is not one.
        """
        return self._special_ids[token]

    def is_special(self, token_id: int) -> bool:
        """Whether ``token_id`` is one of the added tokens (tags and control tokens)."""
        return token_id in self._special_id_set

    def is_control(self, token_id: int) -> bool:
        """Whether ``token_id`` is a control token, which only our own templates may hold."""
        return token_id in self._control_id_set

    @property
    def end_of_prompt_id(self) -> int:
        return self._special_ids[END_OF_PROMPT]

    @property
    def vocab_size(self) -> int:
        """Base vocabulary and special tokens together."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    @cached_property
    def _special_id_set(self) -> frozenset[int]:
        return frozenset(self._special_ids.values())

    @cached_property
    def _control_id_set(self) -> frozenset[int]:
        return frozenset(index for token, index in self._special_ids.items() if token in CONTROL_TOKENS)


def _special_ids(folder: Path, vocab: dict[str, int], special_tokens: tuple[str, ...]) -> dict[str, int]:
    """Ids of the special tokens: the folder's own added tokens first, ours after them, as the reference does.

    The official ``tokenizer_config.json`` declares the first three of the list with the same ids.
    """
    declared = _read_declared(folder / "tokenizer_config.json")
    size = len(vocab)
    ids: dict[str, int] = {}
    for index, token in sorted(declared.items()):
        if index == size + len(ids):
            ids[token] = index
    for token in special_tokens:
        ids.setdefault(token, size + len(ids))
    if END_OF_TEXT in vocab or END_OF_PROMPT in vocab:
        raise ModelFolderError(
            f"{folder / 'vocab.json'}: the base vocabulary holds special tokens; "
            "take vocab.json of the official model folder"
        )
    return ids


def _read_text(path: Path) -> str:
    try:
        if path.exists() and not path.is_file():
            raise ModelFolderError(f"{path}: is no regular file; download the folder again")
        if path.stat().st_size > _LARGEST_FILE_BYTES:
            raise ModelFolderError(f"{path}: too large for a tokenizer file; download the folder again")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ModelFolderError(f"{path}: file is missing; download the model folder completely") from None
    except (OSError, UnicodeDecodeError):
        raise ModelFolderError(f"{path}: file cannot be read as text; download it again") from None
    if text.startswith("version https://git-lfs"):
        raise ModelFolderError(
            f"{path}: is a Git LFS pointer, not the file; run `git lfs pull` in the folder"
        )
    return text


def _read_vocab(path: Path) -> dict[str, int]:
    try:
        data = json.loads(_read_text(path))
    except (ValueError, RecursionError):
        raise ModelFolderError(f"{path}: damaged (not valid JSON); download it again") from None
    if not isinstance(data, dict) or not all(type(index) is int for index in data.values()):
        raise ModelFolderError(f"{path}: damaged (not a map from token to id); download it again")
    if not data or sorted(data.values()) != list(range(len(data))):
        raise ModelFolderError(f"{path}: damaged (ids have gaps); download it again")
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if any(letter not in data for letter in alphabet):
        raise ModelFolderError(f"{path}: not a byte-level vocabulary (a byte is missing); download it again")
    return data


def _read_merges(path: Path, vocab: dict[str, int]) -> list[tuple[str, str]]:
    merges: list[tuple[str, str]] = []
    for number, line in enumerate(_read_text(path).split("\n"), start=1):
        line = line.rstrip("\r")
        if not line or (number == 1 and line.startswith("#version")):
            continue
        pair = line.split(" ")
        if len(pair) != 2 or any(part not in vocab for part in (*pair, "".join(pair))):
            raise ModelFolderError(
                f"{path}: line {number} does not fit vocab.json; take both files from the same model folder"
            )
        merges.append((pair[0], pair[1]))
    # A truncated file still parses: all entries but the 256 single bytes are the product of a merge.
    if len(merges) < len(vocab) - 256:
        raise ModelFolderError(f"{path}: fewer merges than vocab.json needs; download it again")
    return merges


def _read_declared(path: Path) -> dict[int, str]:
    """Added tokens that ``tokenizer_config.json`` declares, by id. The file is optional."""
    if not path.exists():
        return {}
    try:
        data = json.loads(_read_text(path))
        declared = data.get("added_tokens_decoder", {})
        return {int(index): str(entry["content"]) for index, entry in declared.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ModelFolderError(f"{path}: damaged; download it again") from None
