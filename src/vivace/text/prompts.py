"""The text-token sequences that the speech LM reads: prefix, transcript of the voice, text to speak.

What follows is CosyVoice 3's way; the older generations have no system prompt and a prefix only where there is an
instruction (``styles``).

CosyVoice 3 wants ``You are a helpful assistant.<|endofprompt|>`` once, before everything that is spoken. What stands
before ``<|endofprompt|>`` steers, what stands after it is spoken:

    mode            prefix                              transcript        speech tokens of the voice
    zero-shot       system <|endofprompt|>              of the voice      read by the LM
    cross-lingual   system <|endofprompt|>              none              not read
    instruction     system instruction <|endofprompt|>  none              not read

The prefix is the same for every segment of a long text. Source: ``frontend_zero_shot``, ``frontend_cross_lingual``
and ``frontend_instruct2`` of the reference with the prompts of its ``cosyvoice3_example``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vivace.config import Limits
from vivace.errors import InvalidTextError
from vivace.text.clean import check_text, clean_text, is_speakable
from vivace.text.normalize import normalize
from vivace.text.special_tokens import END_OF_PROMPT

if TYPE_CHECKING:
    from vivace.text.styles import AnyTokenizer

SYSTEM_PROMPT = "You are a helpful assistant."
"""What the official models were trained with."""


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """The text tokens before the text to speak.

    Attributes:
        prefix_tokens: up to ``<|endofprompt|>``, which is its last id and occurs once.
        transcript_tokens: what the voice's prompt audio says; empty unless the LM reads its speech tokens.
        uses_prompt_speech: whether the LM reads the voice's speech tokens (the flow always does).
    """

    prefix_tokens: tuple[int, ...]
    transcript_tokens: tuple[int, ...]
    uses_prompt_speech: bool

    def sequence(self, text_tokens: list[int]) -> list[int]:
        """All text ids of one segment, in the order in which the LM reads them."""
        return [*self.prefix_tokens, *self.transcript_tokens, *text_tokens]


def prepare_transcript(text: str, language: str | None = None, *, limits: Limits | None = None) -> str:
    """A voice's transcript as the model reads it: normalised, without the prompt template if it begins with it.

    Users of the reference write ``You are a helpful assistant.<|endofprompt|>`` before the transcript; stored
    voices may hold it or not. Both give the same. Empty text (or nothing speakable) gives ``""``: the voice has
    no transcript.

    Raises:
        InvalidTextError: ``special_token_not_allowed`` for any other control token; codes of ``check_text``.
    """
    limits = limits or Limits()
    text = check_text(text, limits.text_characters).strip()
    template = SYSTEM_PROMPT + END_OF_PROMPT
    text = text.removeprefix(template) if text.startswith(template) else text.removeprefix(END_OF_PROMPT)
    if not is_speakable(clean_text(text)):
        return ""
    return normalize(text, language, limits=limits)


def prepare_instruction(text: str, *, limits: Limits | None = None) -> str:
    """An instruction without the parts of the template that its writer may have added at its ends.

    Raises:
        InvalidTextError: ``input_too_long``, ``invalid_utf8``, ``invalid_type``; ``special_token_not_allowed`` for a
            control token inside; all with ``param`` ``instruction``.
    """
    limits = limits or Limits()
    try:
        text = check_text(text, limits.instruction_characters).strip()
        text = text.removesuffix(END_OF_PROMPT).rstrip().removeprefix(SYSTEM_PROMPT)
        return clean_text(text)
    except InvalidTextError as error:
        message = error.message.replace("the text", "the instruction", 1)
        raise InvalidTextError(message, code=error.code, param="instruction") from None


def build_prompt(
    tokenizer: AnyTokenizer,
    *,
    transcript: str = "",
    instruction: str = "",
    system: str = SYSTEM_PROMPT,
    always_marked: bool = True,
) -> TextPrompt:
    """The prompt of one request.

    Args:
        tokenizer: the model's.
        transcript: from :func:`prepare_transcript`, then through the model's pronouncing front end if it has one.
            Empty: cross-lingual mode.
        instruction: from :func:`prepare_instruction`. Not empty: instruction mode, in which the transcript is left out,
            as in the reference, so that nothing but the text can be spoken.
        system: the model's system prompt; may be empty for a model trained without.
        always_marked: the prefix stands before every text (CosyVoice 3), or only where there is an instruction.

    Raises:
        InvalidTextError: ``special_token_not_allowed``.
    """
    steer = f"{system} {instruction}".strip() if instruction else system
    prefix: tuple[int, ...] = ()
    if always_marked or instruction:
        encode_spoken(tokenizer, steer, param="instruction")
        # In one go: where the marker is no token of its own, its characters may join the instruction's last ones.
        prefix = tuple(tokenizer.encode(steer + END_OF_PROMPT))
    if instruction or not transcript:
        return TextPrompt(prefix, (), uses_prompt_speech=False)
    spoken = tuple(encode_spoken(tokenizer, transcript, param="prompt_text"))
    return TextPrompt(prefix, spoken, uses_prompt_speech=True)


def encode_spoken(tokenizer: AnyTokenizer, text: str, *, param: str = "text") -> list[int]:
    """Ids of text that came from a user, proven free of control tokens: the last door before the model.

    Raises:
        InvalidTextError: ``special_token_not_allowed``.
    """
    ids = tokenizer.encode(text)
    if any(tokenizer.is_control(index) for index in ids):
        raise InvalidTextError(
            "the text holds a control token of the form <|name|>; remove it",
            code="special_token_not_allowed",
            param=param,
        )
    return ids
