"""Adds a benchmark's document to a results file, with commit and date:

vivace bench streaming | python -m benchmarks.rows benchmarks/results/streaming.jsonl
"""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def stamped(document: dict[str, Any]) -> dict[str, Any]:
    """The document with ``commit`` and ``date`` behind ``bench`` and ``hardware``."""
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    head = {key: document[key] for key in ("bench", "hardware")}
    return head | {"commit": _commit(), "date": date} | document


def _commit() -> str:
    """Of the checkout, with "-dirty" where files differ from it; "unknown" outside one."""
    git = ["git", "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*"]
    try:
        run = subprocess.run(git, capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    except OSError:
        return "unknown"
    return run.stdout.strip() or "unknown"


def main() -> None:
    """Reads standard input, whose last line is the document, and appends one line to the file named."""
    lines = sys.stdin.read().splitlines()
    row = json.dumps(stamped(json.loads(lines[-1])))
    with open(sys.argv[1], "a", encoding="utf-8") as file:
        file.write(row + "\n")
    print(row)


if __name__ == "__main__":
    main()
