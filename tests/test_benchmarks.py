"""The benchmarks' last line is one JSON document, with the field names of the result rows."""

from __future__ import annotations

import io
import json

from benchmarks import rows, say


def test_say_prints_one_document_and_rows_keeps_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["say", "--text", "Hi.", "--runs", "2"])
    say.main()
    printed = capsys.readouterr().out
    document = json.loads(printed.splitlines()[-1])
    assert document["bench"] == "say"
    assert document["runs"] == len(document["each"]) == 2
    assert min(document[name] for name in ("ttfb_ms_p50", "rtf", "tps", "lm_ms", "flow_ms", "vocoder_ms")) > 0
    results = tmp_path / "say.jsonl"
    monkeypatch.setattr("sys.argv", ["rows", str(results)])
    for _ in range(2):
        monkeypatch.setattr("sys.stdin", io.StringIO(printed))
        rows.main()
    kept = [json.loads(line) for line in results.read_text().splitlines()]
    assert len(kept) == 2
    assert kept[0] == kept[1]
    assert set(kept[0]) == set(document) | {"commit", "date"}
