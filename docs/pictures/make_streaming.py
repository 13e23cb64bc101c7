"""Draws ``streaming.svg``: when chunks can be computed and which audio they give, for a prompt of 40 tokens.

python docs/pictures/make_streaming.py
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from vivace.engine.chunking import ChunkPlan

PROMPT = 40
PLAN = ChunkPlan(chunk_tokens=25, lookahead_tokens=3, frames_per_token=2)
VOCODER_TOKENS = 2
"""Four frames of look-ahead: the audio follows the mel by two tokens."""
NUM_CHUNKS = 3
LEFT, SCALE, RIGHT, HEIGHT = 124, 7, 258, 312
LAST_TOKEN = 105
WIDTH = LEFT + SCALE * LAST_TOKEN + RIGHT

STYLE = """
  .card { fill: #ffffff; stroke: #c9ced6 } text { fill: #1f2933; font: 13px system-ui, sans-serif }
  .small { font-size: 12px } .quiet { fill: #5b6673 } .inside { fill: #ffffff; font-weight: 600 }
  .prompt { fill: #aab4c0 } .kept { fill: #dfe4ea } .c0 { fill: #1565c0 } .c1 { fill: #00796b } .c2 { fill: #8e3a9d }
  .ahead { fill: none; stroke: #c75300; stroke-width: 2 } .warm { fill: #b34a00 }
  .border { stroke: #5b6673; stroke-dasharray: 4 4 } .tick { stroke: #ffffff; stroke-width: 0.6 }
  @media (prefers-color-scheme: dark) {
    .card { fill: #14191f; stroke: #3a444f } text { fill: #e6ebf0 } .quiet { fill: #a3aebb } .inside { fill: #ffffff }
    .prompt { fill: #66717e } .kept { fill: #2b343e } .c0 { fill: #2f7fd6 } .c1 { fill: #0f9080 } .c2 { fill: #a951b8 }
    .ahead { stroke: #ff9d4d } .warm { fill: #ffb070 } .border { stroke: #8a95a1 } .tick { stroke: #14191f }
  }
"""


def x_of(token: float) -> float:
    """Where a token begins."""
    return LEFT + SCALE * token


def box(kind: str, start: float, end: float, y: int, height: int = 24) -> str:
    """A bar from one token to another."""
    return f'<rect class="{kind}" x="{x_of(start):g}" y="{y}" width="{SCALE * (end - start):g}" height="{height}"/>'


def text(words: str, x: float, y: float, kind: str = "", anchor: str = "start") -> str:
    """A line of words."""
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{words}</text>'


def middle(words: str, start: float, end: float, y: float, kind: str = "") -> str:
    """Words in the middle between two tokens."""
    return text(words, x_of((start + end) / 2), y, kind, "middle")


def scale() -> list[str]:
    """Token numbers, and a dashed line at every border."""
    parts = [text("token", LEFT - 12, 44, "quiet small", "end")]
    for token in range(0, LAST_TOKEN, PLAN.chunk_tokens):
        parts.append(text(str(token), x_of(token), 44, "small", "middle"))
        parts.append(
            f'<line class="border" x1="{x_of(token)}" y1="50" x2="{x_of(token)}" y2="{HEIGHT - 40}"/>'
        )
    parts.append(text("absolute borders: multiples of 25, prompt included", x_of(0), 24, "quiet small"))
    return parts


def strip(borders: list[int]) -> list[str]:
    """The tokens themselves: prompt, then those of each chunk."""
    parts = [text("speech tokens", LEFT - 12, 77, anchor="end"), box("prompt", 0, PROMPT, 60)]
    edges = [PROMPT, *borders, LAST_TOKEN]
    for index, (start, end) in enumerate(pairwise(edges)):
        parts.append(box(f"c{index}" if index < NUM_CHUNKS else "kept", start, end, 60))
    parts += [
        f'<line class="tick" x1="{x_of(t)}" y1="60" x2="{x_of(t)}" y2="84"/>' for t in range(1, LAST_TOKEN)
    ]
    parts.append(text("voice prompt, 40 tokens", x_of(1), 100, "quiet small"))
    parts.append(middle("new tokens, 25 a second", 50, 75, 100, "quiet small"))
    return parts


def chunk(index: int, start: int, border: int) -> list[str]:
    """One chunk of the flow: what it keeps from before, what it computes, what it must know beyond its border."""
    y = 122 + 38 * index
    needed = border + PLAN.lookahead_tokens
    parts = [
        text(f"flow, chunk {index}", LEFT - 12, y + 17, anchor="end"),
        box("kept", 0, start, y),
        middle("kept: keys, values, convolution inputs", 0, PROMPT, y + 17, "quiet small"),
        box(f"c{index}", start, border, y),
        middle(f"{border - start}", start, border, y + 17, "inside small"),
        box("ahead", border, needed, y),
        text("look-ahead 3", x_of(needed) + 6, y + 17, "warm small"),
    ]
    known = f"runs at new token {needed - PROMPT}"
    parts.append(text(known, x_of(LAST_TOKEN) + 104, y + 17))
    return parts


def audio(borders: list[int]) -> list[str]:
    """What each chunk adds to the audio."""
    y = 122 + 38 * NUM_CHUNKS + 8
    parts = [text("audio given out", LEFT - 12, y + 17, anchor="end")]
    edges = [PROMPT, *(border - VOCODER_TOKENS for border in borders)]
    for index, (start, end) in enumerate(pairwise(edges)):
        parts.append(box(f"c{index}", start, end, y))
        parts.append(middle(f"{(end - start) / 25:.2f} s", start, end, y + 17, "inside small"))
    parts.append(
        text("two tokens (80 ms) behind: the vocoder's look-ahead", x_of(PROMPT), y + 44, "warm small")
    )
    parts.append(text("the prompt is not heard", x_of(1), y + 17, "quiet small"))
    return parts


def draw() -> str:
    """The picture as SVG."""
    borders, done = [], PROMPT
    for _ in range(NUM_CHUNKS):
        done = PLAN.next_border(done)
        borders.append(done)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        "<title>Chunks of a stream behind a prompt of 40 tokens</title>",
        f"<style>{STYLE}</style>",
        f'<rect class="card" x="1" y="1" width="{WIDTH - 2}" height="{HEIGHT - 2}" rx="8"/>',
        *scale(),
        *strip(borders),
    ]
    for index, (start, border) in enumerate(zip([PROMPT, *borders], borders, strict=False)):
        parts += chunk(index, start, border)
    parts += [*audio(borders), "</svg>"]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("streaming.svg").write_text(draw(), encoding="utf-8")
