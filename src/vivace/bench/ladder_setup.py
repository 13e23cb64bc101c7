"""What every rung of the ladder shares: the model, three phrases of fixed length, copies in half precision."""

from __future__ import annotations

import copy
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from vivace.bench.ladder_lm import LMInput
from vivace.bench.ladder_speech import Phrase
from vivace.bench.single import RANDOM
from vivace.config import Limits
from vivace.engine.loading import Assets, load_assets
from vivace.engine.request import SynthesisRequest
from vivace.engine.text_feed import TextFeed, TextReader
from vivace.errors import InvalidRequestError, VoiceNotFoundError
from vivace.models.flow import FlowModel
from vivace.models.hift import CausalHiFT
from vivace.models.speech_lm import SpeechLM
from vivace.random_checkpoint import write_random_checkpoint
from vivace.voice import Voice

TEXTS = (
    "She opened the window, looked at the rain for a while, and then decided to stay at home until the evening.",
    "We walked along the river in the morning, the only sound was the wind in the tall grass, and nobody wanted to be"
    " the first one of us to turn back.",
    "In the spring the farmers open the gates, the cold water runs down into the fields, and after a few weeks all of"
    " the land that was dry in the winter is green again.",
)
"""As long as ``TOKENS`` when the embedded model speaks them, so that a judge hears all of their words and no more."""

LIMITS = Limits(segment_text_tokens=200)
"""Each of them is one segment."""

TOKENS = (150, 200, 230)
"""Speech tokens of the phrases: 23.2 s of audio at 25 a second."""

FEWEST_TOKENS = 30


@dataclass(slots=True)
class Setup:
    """See the module's docstring. ``close`` it.

    Attributes:
        folder: of the model; a temporary one for "random".
    """

    folder: str
    assets: Assets
    voice: Voice
    lm: SpeechLM
    flow: FlowModel
    vocoder: CausalHiFT
    phrases: list[Phrase]
    temporary: tempfile.TemporaryDirectory[str] | None = None
    _halves: dict[str, torch.nn.Module] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        return self.assets.model.device

    @property
    def capacity(self) -> int:
        """Positions of the longest segment."""
        return max(
            2 + len(phrase.given.text) + len(phrase.given.prompt_speech) + phrase.num_tokens
            for phrase in self.phrases
        )

    def speech_lm(self, *, half: bool) -> SpeechLM:
        """The speech LM in float32, or a copy of it in bfloat16."""
        if not half:
            return self.lm
        if "lm" not in self._halves:
            self._halves["lm"] = copy.deepcopy(self.lm).to(torch.bfloat16)
        lm = self._halves["lm"]
        assert isinstance(lm, SpeechLM)
        return lm

    def flow_model(self, *, half: bool) -> FlowModel:
        """The flow, likewise."""
        if not half:
            return self.flow
        if "flow" not in self._halves:
            self._halves["flow"] = copy.deepcopy(self.flow).to(torch.bfloat16)
        flow = self._halves["flow"]
        assert isinstance(flow, FlowModel)
        return flow

    def close(self) -> None:
        """Removes what was made for the run."""
        self.assets.close()
        if self.temporary is not None:
            self.temporary.cleanup()


def open_setup(model: str, device: str, tokens: tuple[int, ...]) -> Setup:
    """Loads a model in float32 and writes its phrases in tokens.

    Raises:
        ModelFolderError, VoiceNotFoundError: the model cannot be used, or has no voice of its own.
        InvalidRequestError: another generation than CosyVoice 3, or ``tokens`` is out of range.
    """
    check_tokens(tokens)
    temporary = None
    if model == RANDOM:
        temporary = tempfile.TemporaryDirectory(prefix="vivace-")
        model = str(Path(temporary.name) / RANDOM)
        write_random_checkpoint(model, "full")
    assets = load_assets(model, device=device, limits=LIMITS)
    lm, flow, vocoder = assets.model.lm, assets.model.flow, assets.model.vocoder
    if not isinstance(lm, SpeechLM) or not isinstance(flow, FlowModel) or not isinstance(vocoder, CausalHiFT):
        raise InvalidRequestError("the ladder is that of CosyVoice 3; take such a model", param="model")
    voice = assets.default_voice
    if voice is None:
        raise VoiceNotFoundError("this model has no voice of its own to measure with", param="voice")
    phrases = [read_phrase(assets, voice, text, count) for text, count in zip(TEXTS, tokens, strict=False)]
    return Setup(model, assets, voice, lm, flow, vocoder, phrases, temporary)


def check_tokens(tokens: tuple[int, ...]) -> None:
    """Raises InvalidRequestError unless there are one to three lengths that a model can speak."""
    if not 1 <= len(tokens) <= len(TEXTS) or not all(FEWEST_TOKENS <= count <= 1000 for count in tokens):
        raise InvalidRequestError(
            f"tokens must be 1 to {len(TEXTS)} numbers from {FEWEST_TOKENS} to 1000", param="tokens"
        )


def read_phrase(assets: Assets, voice: Voice, text: str, num_tokens: int) -> Phrase:
    """The first segment of a text, behind the voice's prompt.

    Raises:
        InvalidRequestError: the model folder has no tokenizer.
    """
    if assets.frontend is None:
        raise InvalidRequestError("this model folder has no tokenizer", param="model")
    text = assets.frontend.segments(text, None)[0][0]
    request = SynthesisRequest(text)
    feed = TextFeed(assets.frontend, request, voice)
    feed.add(TextReader(assets.frontend, request).read(text))
    entry = feed.next_segment()
    assert entry is not None, "a text of ours is empty"
    return Phrase(text, LMInput([*entry.prefix, *entry.text_tokens], list(entry.prompt_speech)), num_tokens)


def fix_length(assets: Assets, phrase: Phrase) -> None:
    """From now on the engine of ``assets`` speaks ``phrase`` with exactly its number of tokens."""
    assert assets.frontend is not None
    parts = assets.frontend.segments(phrase.text, None)
    share = (phrase.num_tokens + 0.5) / len(parts[0][1])
    assets.model.config = replace(assets.model.config, token_text_ratio=(share, share))
