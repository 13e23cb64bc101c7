"""The text front end of one model: normalisation, segments, pronunciation, prompts, tokens."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from vivace.config import Limits, ModelConfig
from vivace.errors import InvalidTextError, ModelFolderError
from vivace.text.english import speak_dots
from vivace.text.normalize import finish_sentence, normalize
from vivace.text.prompts import (
    TextPrompt,
    build_prompt,
    encode_spoken,
    prepare_instruction,
    prepare_transcript,
)
from vivace.text.protected import PROTECTED
from vivace.text.readable import ReadableText, unreadable
from vivace.text.special_tokens import TAG_PATTERN
from vivace.text.split import split_text
from vivace.text.stream import ClauseStream
from vivace.text.styles import open_tokenizer, prompt_style

if TYPE_CHECKING:
    from vivace.text.pronounce import Pronouncer
    from vivace.voice import Voice


_KEPT_PROMPTS = 64
"""Transcripts with their instructions whose tokens are kept: most requests have one that came before."""

SpokenPart: TypeAlias = tuple[str, list[int]]
"""Words as they go to the model, and their token ids."""


def _in_words(match: re.Match[str]) -> str:
    """A protected span in words; special tags stay."""
    return match.group() if TAG_PATTERN.fullmatch(match.group()) else speak_dots(match.group())


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """What stands before the text in the speech LM's sequence.

    Attributes:
        instruction: text tokens up to and including ``<|endofprompt|>``.
        prompt_text, prompt_speech: the voice's prompt; both empty where the LM must not see it.
        reads_speaker: the LM sees the voice's speaker embedding, if it reads one at all.
    """

    instruction: list[int]
    prompt_text: list[int]
    prompt_speech: list[int]
    reads_speaker: bool = True


class Frontend:
    """Text to token ids.

    Args:
        tokenizer_path: the model's ``CosyVoice-BlankEN``, or its rank file.
        folder: the model folder, which holds the pronouncing lexicon where the model uses one.

    Attributes:
        interleaving: the speech LM's configuration if it reads streamed text in turn with speaking, else None.
        language: in which the model reads everything, if it knows one only; else None.
        segment_tokens: most text tokens of a segment.
    """

    def __init__(self, tokenizer_path: Path, folder: Path, config: ModelConfig, limits: Limits) -> None:
        self.interleaving = config.lm.interleaving
        self.segment_tokens = limits.segment_text_tokens or config.segment_text_tokens
        self._limits = limits
        self._style = prompt_style(config)
        self._tokenizer = open_tokenizer(tokenizer_path, config)
        if self._tokenizer.vocab_size > config.lm.text_vocab_size:
            # A row that is not there must not be looked up: on a GPU that ends the whole process's context.
            raise ModelFolderError(
                f"{tokenizer_path}: has {self._tokenizer.vocab_size} tokens, the speech LM knows "
                f"{config.lm.text_vocab_size}; take the tokenizer files of the same model folder"
            )
        self._text_prompt = functools.lru_cache(_KEPT_PROMPTS)(self._make_text_prompt)
        self.language: str | None = None
        self._pronouncer: Pronouncer | None = None
        if config.pronunciation is not None:
            if config.pronunciation != "en-arpabet":
                raise ModelFolderError(f"{folder}: unknown pronunciation front end; use a newer Vivace")
            from vivace.text.pronounce import Pronouncer

            self._pronouncer = Pronouncer.from_folder(folder)
            self.language = "en"

    def tokens(self, text: str) -> list[int]:
        """Normalised text to ids, through the pronouncing front end where the model has one."""
        return encode_spoken(self._tokenizer, self._pronounce(text))

    def spoken_parts(self, texts: Iterable[str]) -> list[SpokenPart]:
        """Each normalised text with its ids; those that give no ids are left out."""
        parts = [(text, self.tokens(text)) for text in texts]
        return [(text, tokens) for text, tokens in parts if tokens]

    def new_readable(self) -> ReadableText | None:
        """What takes out of one text what the model cannot read; None if it reads all scripts."""
        return None if self._pronouncer is None else ReadableText()

    def segments(
        self, text: str, language: str | None, readable: ReadableText | None = None
    ) -> list[SpokenPart]:
        """Every segment of a text with its ids, in order; at least one.

        Args:
            readable: a new one from ``new_readable``, for whoever wants to know what is left out.

        Raises:
            InvalidTextError: as ``normalize``; ``unpronounceable_input`` for a text that the model cannot read.
        """
        spoken = normalize(text, self.language or language, limits=self._limits)
        readable = readable or self.new_readable()
        if readable is not None:
            spoken = readable.keep_most(spoken)
        parts = self.spoken_parts(
            split_text(finish_sentence(spoken), lambda part: len(self.tokens(part)), self.segment_tokens)
        )
        if not parts:
            raise self.nothing_spoken()
        return parts

    def nothing_spoken(self) -> InvalidTextError:
        """The error for a text that gives the model nothing to speak."""
        if self._pronouncer is not None:
            return unreadable()
        return InvalidTextError("the text holds nothing that this model can speak; use words", param="text")

    def text_stream(self, language: str | None) -> ClauseStream:
        """For text that arrives in pieces."""
        return ClauseStream(self.language or language, limits=self._limits)

    def prompt(
        self, voice: Voice, instruction: str | None, *, cross_lingual: bool, language: str | None = None
    ) -> PromptTokens:
        """The part before the text; see ``text.prompts`` for the three modes. The flow keeps the voice in each."""
        reads_prompt = not cross_lingual and len(voice.speech_tokens) > 0
        prompt = self._text_prompt(voice.prompt_text if reads_prompt else "", instruction or "")
        speech = voice.speech_tokens.tolist() if prompt.uses_prompt_speech else []
        first, text = list(prompt.prefix_tokens), list(prompt.transcript_tokens)
        if cross_lingual:
            text = self._language_tag(language)
        if not self._style.instruction_first:
            first, text = [], first + text
        reads_speaker = self._style.speaker_with_instruction or not instruction
        return PromptTokens(first, text, speech, reads_speaker)

    def _make_text_prompt(self, prompt_text: str, instruction: str) -> TextPrompt:
        """Tokens of a voice's transcript, if it is to be read, and of an instruction."""
        return build_prompt(
            self._tokenizer,
            transcript=self._pronounce(self._transcript(prompt_text)),
            instruction=prepare_instruction(instruction, limits=self._limits),
            system=self._style.system,
            always_marked=self._style.always_marked,
        )

    def _transcript(self, prompt_text: str) -> str:
        """What a voice's prompt says; empty if the model cannot read it, which then speaks as without."""
        transcript = prepare_transcript(prompt_text, self.language, limits=self._limits)
        readable = self.new_readable()
        if readable is None or not transcript:
            return transcript
        try:
            return readable.keep_most(transcript)
        except InvalidTextError:
            return ""

    def _language_tag(self, language: str | None) -> list[int]:
        """The token that names the text's language, for models that read one."""
        if language is None or not self._style.language_tags:
            return []
        try:
            return [self._tokenizer.special_id(f"<|{language.lower()}|>")]
        except KeyError:
            return []

    def _pronounce(self, text: str) -> str:
        """Phoneme tags where the model reads them; addresses and versions, which kept their dots, in words first."""
        if self._pronouncer is None:
            return text
        return self._pronouncer.to_tags(PROTECTED.sub(_in_words, text))

    def decode_prompt(self, ids: Sequence[int]) -> str:
        """Text of a prompt that an official file stores as ids, template removed."""
        end = self._tokenizer.end_of_prompt_id
        ids = list(ids)
        if end in ids:
            ids = ids[ids.index(end) + 1 :]
        return self._tokenizer.decode(ids)
