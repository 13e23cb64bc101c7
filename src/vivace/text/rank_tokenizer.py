"""Text to token ids of CosyVoice-300M: Whisper's byte-pair encoding from a rank file.

A rank file has one token a line, base64, with its rank; merging always joins the pair of the lowest rank. The special
tokens follow: Whisper's own behind the vocabulary of the 50 Hz models, CosyVoice's longer list behind that of the 25 Hz
model. Which list it is follows from the size of the model's text vocabulary.
"""

from __future__ import annotations

import base64
import binascii
import re
from functools import lru_cache
from pathlib import Path

from tokenizers import Regex, pre_tokenizers

from vivace.errors import ModelFolderError
from vivace.text.tables import words

PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""Whisper's pre-tokenisation: contractions, words, numbers, punctuation, spaces."""

LANGUAGES = words("""
en zh de es ru ko fr ja pt tr pl ca nl ar sv it id hi fi vi he uk el ms cs ro da hu ta no th ur hr bg lt la mi ml cy sk
te fa lv bn sr az sl kn et mk br eu is hy ne mn bs kk sq sw gl mr pa si km sn yo so af oc ka be tg sd gu am yi lo uz fo
ht ps tk nn mt sa lb my bo tl mg as tt haw ln ha ba jw su yue minnan wuyu dialect zh/en en/zh
""")
_START = ("endoftext", "startoftranscript")
_TASKS = ("translate", "transcribe", "startoflm", "startofprev", "nospeech", "notimestamps")
_EVENTS = words(
    "ASR AED SER Speech /Speech BGM /BGM Laughter /Laughter Applause /Applause HAPPY SAD ANGRY NEUTRAL"
)
_SPEECH = words("TTS/B TTS/O TTS/Q TTS/A TTS/CO TTS/CL TTS/H")
_NUM_TIMES = 1501

_LARGEST_FILE_BYTES = 16 * 1024 * 1024
_SPECIAL = re.compile(r"<\|[^|<>]{1,40}\|>")


def special_tokens(num_ranks: int, vocab_size: int, file: str) -> list[str]:
    """The special tokens in id order. Raises ModelFolderError if no known list fills the vocabulary."""
    times = [f"{index * 0.02:.2f}" for index in range(_NUM_TIMES)]
    own = [f"SPECIAL_TOKEN_{index}" for index in range(1, 31)]
    own += [*_SPEECH, *(f"TTS/SP{index:02d}" for index in range(1, 14))]
    for events, later, least, most in (([], [], 99, 100), (_EVENTS, own, 99, len(LANGUAGES))):
        fixed = len(_START) + len(events) + len(_TASKS) + len(later) + _NUM_TIMES
        num_languages = vocab_size - num_ranks - fixed
        if least <= num_languages <= most:
            names = [*_START, *LANGUAGES[:num_languages], *events, *_TASKS, *later, *times]
            return [f"<|{name}|>" for name in names]
    raise ModelFolderError(
        f"{file}: has {num_ranks} tokens, which do not fit the model's text vocabulary of {vocab_size}; take the rank "
        "file that belongs to this model"
    )


class RankTokenizer:
    """Encodes text for CosyVoice-300M; the interface is that of ``TextTokenizer``. Thread-safe, without state."""

    def __init__(self, ranks: dict[bytes, int], specials: list[str]) -> None:
        self._ranks = ranks
        self._tokens = {rank: token for token, rank in ranks.items()}
        self._specials = {token: len(ranks) + index for index, token in enumerate(specials)}
        self._special_names = {index: token for token, index in self._specials.items()}
        self._split = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
        self._merge = lru_cache(maxsize=10_000)(self._merge_piece)

    @classmethod
    def from_file(cls, path: str | Path, vocab_size: int) -> RankTokenizer:
        """Reads a rank file.

        Args:
            vocab_size: of the model's text embedding.

        Raises:
            ModelFolderError: the file is missing, damaged or of another model.
        """
        path = Path(path)
        ranks = _read_ranks(path)
        return cls(ranks, special_tokens(len(ranks), vocab_size, path.name))

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``; every special token in it is one id."""
        ids: list[int] = []
        start = 0
        for match in _SPECIAL.finditer(text):
            if match.group() in self._specials:
                ids += self._encode_plain(text[start : match.start()])
                ids.append(self._specials[match.group()])
                start = match.end()
        return ids + self._encode_plain(text[start:])

    def decode(self, ids: list[int]) -> str:
        """The text of ``ids``, special tokens included."""
        parts = [
            self._special_names[index].encode()
            if index in self._special_names
            else self._tokens.get(index, b"")
            for index in ids
        ]
        return b"".join(parts).decode("utf-8", "replace")

    def count(self, text: str) -> int:
        """Number of ids of ``text``."""
        return len(self.encode(text))

    def special_id(self, token: str) -> int:
        """Id of a special token. Raises KeyError if it is none."""
        return self._specials[token]

    def is_special(self, token_id: int) -> bool:
        """Whether ``token_id`` is a special token."""
        return token_id in self._special_names

    def is_control(self, token_id: int) -> bool:
        """Whether ``token_id`` is a control token, which only our own templates may hold: all special ones are."""
        return token_id in self._special_names

    @property
    def end_of_prompt_id(self) -> int | None:
        """This vocabulary has no such token."""
        return None

    @property
    def vocab_size(self) -> int:
        """Base vocabulary and special tokens together."""
        return len(self._ranks) + len(self._specials)

    def _encode_plain(self, text: str) -> list[int]:
        if not text:
            return []
        pieces = self._split.pre_tokenize_str(text)
        return [index for piece, _ in pieces for index in self._merge(piece.encode())]

    def _merge_piece(self, piece: bytes) -> tuple[int, ...]:
        """Ids of one piece: the pair of the lowest rank is joined until none is in the vocabulary."""
        ranks = self._ranks
        if piece in ranks:
            return (ranks[piece],)
        parts = [piece[index : index + 1] for index in range(len(piece))]
        while len(parts) > 1:
            joined = [ranks.get(parts[index] + parts[index + 1]) for index in range(len(parts) - 1)]
            known = [rank for rank in joined if rank is not None]
            if not known:
                break
            best = joined.index(min(known))
            parts[best : best + 2] = [parts[best] + parts[best + 1]]
        return tuple(ranks[part] for part in parts)


def _read_ranks(path: Path) -> dict[bytes, int]:
    try:
        if path.stat().st_size > _LARGEST_FILE_BYTES:
            raise ModelFolderError(f"{path.name}: is too large for a rank file; download it again")
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ModelFolderError(f"{path.name}: cannot be read; download it again") from error
    ranks: dict[bytes, int] = {}
    try:
        for line in filter(None, lines):
            token, rank = line.split()
            # Not validated: official files write their empty token as a lone padding character.
            ranks[base64.b64decode(token)] = int(rank)
    except (ValueError, binascii.Error) as error:
        raise ModelFolderError(
            f"{path.name}: is no rank file, or a damaged one; download it again"
        ) from error
    if not all(bytes([byte]) in ranks for byte in range(256)):
        raise ModelFolderError(
            f"{path.name}: is cut off or no rank file (a byte is missing); download it again"
        )
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ModelFolderError(f"{path.name}: is damaged (ranks have gaps); download it again")
    return ranks
