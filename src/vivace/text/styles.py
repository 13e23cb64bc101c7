"""What differs between the generations before the speech LM: tokenizer and prompt. Chosen when a model is opened."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from vivace.config import ModelConfig
from vivace.text.prompts import SYSTEM_PROMPT
from vivace.text.rank_tokenizer import RankTokenizer
from vivace.text.special_tokens import COSYVOICE2_TOKENS, COSYVOICE3_TOKENS
from vivace.text.tokenizer import TextTokenizer

AnyTokenizer: TypeAlias = TextTokenizer | RankTokenizer


@dataclass(frozen=True, slots=True)
class PromptStyle:
    """How a prompt is written.

    Attributes:
        system: what stands before every instruction and marker.
        always_marked: ``<|endofprompt|>`` stands before every text, not only behind an instruction.
        instruction_first: with streamed text the instruction stands before the interleaved groups, or in them.
        language_tags: a text in another language than the voice's begins with ``<|en|>`` or the like.
        speaker_with_instruction: the LM sees the speaker embedding also when there is an instruction.
    """

    system: str = ""
    always_marked: bool = False
    instruction_first: bool = False
    language_tags: bool = False
    speaker_with_instruction: bool = True


STYLES = {
    3: PromptStyle(SYSTEM_PROMPT, always_marked=True, instruction_first=True),
    2: PromptStyle(),
    # The reference leaves the speaker out with an instruction: its embedding would tell too much of the manner.
    1: PromptStyle(language_tags=True, speaker_with_instruction=False),
}

_SPECIAL_TOKENS = {3: COSYVOICE3_TOKENS, 2: COSYVOICE2_TOKENS}


def prompt_style(config: ModelConfig) -> PromptStyle:
    """How the prompts of a model are written."""
    return STYLES[config.generation]


def open_tokenizer(path: Path, config: ModelConfig) -> AnyTokenizer:
    """The text tokenizer of a model: a folder with Qwen2's files, or CosyVoice-300M's rank file.

    Raises:
        ModelFolderError: a file is missing, damaged or of another model.
    """
    if config.generation in _SPECIAL_TOKENS:
        return TextTokenizer.from_folder(path, _SPECIAL_TOKENS[config.generation])
    return RankTokenizer.from_file(path, config.lm.text_vocab_size)
