"""Draws ``serving.svg`` from the last row of a file: listeners at once, with others' published figures beside them.

python docs/pictures/make_serving.py benchmarks/results/serving.jsonl
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from vivace.bench.serving_chart import serving_svg
from vivace.bench.serving_published import PUBLISHED

if __name__ == "__main__":
    row = Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()[-1]
    Path(__file__).with_name("serving.svg").write_text(
        serving_svg(json.loads(row), PUBLISHED), encoding="utf-8"
    )
