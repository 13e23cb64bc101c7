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

ROWS = "benchmarks/results"


def stamped(document: dict[str, Any], commit: str | None = None) -> dict[str, Any]:
    """The document with ``commit`` (default: of the checkout) and ``date`` behind ``bench`` and ``hardware``."""
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    head = {key: document[key] for key in ("bench", "hardware")}
    return head | {"commit": commit or commit_of_checkout(), "date": date} | document


def add_row(path: Path, row: dict[str, Any]) -> bool:
    """Adds a row to a file of rows unless it is there already; whether it was not.

    The file is replaced as a whole, so that a process that ends meanwhile leaves no half row.
    """
    line = json.dumps(row)
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    if line in lines:
        return False
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    part.write_text("".join(f"{each}\n" for each in (*lines, line)), encoding="utf-8")
    part.replace(path)
    return True


def commit_of_checkout() -> str:
    """With "-dirty" where files other than the rows differ from it; "unknown" outside a checkout."""
    commit = _git("rev-parse", "--short=7", "HEAD").strip()
    if not commit:
        return "unknown"
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ":/", f":(top,exclude){ROWS}")
    return f"{commit}-dirty" if changed else commit


def _git(*arguments: str) -> str:
    try:
        run = subprocess.run(
            ["git", *arguments], capture_output=True, text=True, check=False, cwd=Path(__file__).parent
        )
    except OSError:
        return ""
    return run.stdout if run.returncode == 0 else ""


def main() -> None:
    """Reads standard input, whose last line is the document, and appends one line to the file named."""
    lines = sys.stdin.read().splitlines()
    row = json.dumps(stamped(json.loads(lines[-1])))
    with open(sys.argv[1], "a", encoding="utf-8") as file:
        file.write(row + "\n")
    print(row)


if __name__ == "__main__":
    main()
