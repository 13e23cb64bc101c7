"""Memory of CosyVoice 2's flow streams on a device: one page for each finished chunk, at fixed addresses.

A page holds what later chunks need of a chunk: keys and values of every attention (the estimator's per Euler step and
guidance branch, the token encoder's once), and the last inputs of every convolution. Page 0 is all zeros: it stands
before the first chunk; behind the last one lies one for rows that nobody reads. Captured graphs index pages by number,
so that all of them lie in one piece.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vivace.config import UNetFlowConfig
from vivace.errors import SynthesisError
from vivace.models.dit_stream import BRANCHES
from vivace.models.unet_stream import CONTEXT, PreparedUNet


class UNetPages:
    """The pages, and who holds them.

    Args:
        num_pages: seconds of audio, prompts included, that open streams may keep together.

    Attributes:
        attention: keys and values of the estimator, ``[pages, steps, blocks, 2, branches, heads, frames, dim_head]``.
        contexts: inputs of its convolutions, ``[pages, steps, branches, 2, channels]``.
        tokens, frames: keys and values of the encoder before and behind the repetition, ``[pages, layers, 2, heads,
            chunk, dim_head]``.
        repeated: inputs of the convolution between them, ``[pages, C, 2 * ratio]``.
        spare: number of a page that is nobody's.
    """

    def __init__(self, config: UNetFlowConfig, unet: PreparedUNet, weight: Tensor, num_pages: int) -> None:
        chunk, encoder = config.unet.static_chunk_frames, config.encoder
        assert chunk is not None, "only a causal estimator has chunks"
        self.spare = num_pages + 1
        count, ratio = num_pages + 2, config.token_mel_ratio
        steps, heads = config.num_steps, (unet.heads, chunk, unet.dim_head)
        self.attention = weight.new_zeros(count, steps, unet.num_blocks, 2, BRANCHES, *heads)
        self.contexts = weight.new_zeros(count, steps, BRANCHES, CONTEXT, unet.num_channels)
        sizes = (encoder.heads, chunk // ratio, encoder.head_dim)
        self.tokens = weight.new_zeros(count, encoder.num_blocks, 2, *sizes)
        sizes = (encoder.heads, chunk, encoder.head_dim)
        self.frames = weight.new_zeros(count, config.num_up_blocks, 2, *sizes)
        self.repeated = weight.new_zeros(count, encoder.output_size, 2 * ratio)
        self.page_bytes = self.bytes_of(config, weight.dtype)
        self._free = list(range(1, self.spare))[::-1]
        self._users: dict[int, int] = {}

    @staticmethod
    def bytes_of(config: UNetFlowConfig, dtype: torch.dtype) -> int:
        """Memory of one page, to the percent: the estimator's keys and values are nearly all of it."""
        return config.kept_values * (config.unet.static_chunk_frames or 0) * dtype.itemsize

    @property
    def frame_bytes(self) -> int:
        """What ``parts`` of a page hold together."""
        return sum(part.numel() * part.element_size() for part in self.parts(0))

    @property
    def most_pages(self) -> int:
        """Pages that there are."""
        return len(self._free) + len(self._users)

    @property
    def pages_in_use(self) -> int:
        """Pages that someone holds."""
        return len(self._users)

    def parts(self, page: int) -> list[Tensor]:
        """What a page holds, in pieces without gaps."""
        return [
            kind[page] for kind in (self.attention, self.contexts, self.tokens, self.frames, self.repeated)
        ]

    def take(self, count: int) -> list[int]:
        """Pages with one user each.

        Raises:
            SynthesisError: so many are not free; none is taken.
        """
        if count > len(self._free):
            raise SynthesisError(
                "there is no memory left for another second of audio; use fewer streams at once or shorter texts",
                code="out_of_memory",
            )
        pages = [self._free.pop() for _ in range(count)]
        self._users.update(dict.fromkeys(pages, 1))
        return pages

    def share(self, page: int) -> int:
        """One more user of a page."""
        self._users[page] += 1
        return page

    def drop(self, page: int) -> None:
        """One user less; the last one frees the page."""
        self._users[page] -= 1
        if not self._users[page]:
            del self._users[page]
            self._free.append(page)
