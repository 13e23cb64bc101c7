"""The benchmarks' last line is one JSON document, with the field names of the result rows."""

from __future__ import annotations

import importlib
import importlib.util
import io
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from benchmarks import compare_reference, reference_side, rows, say


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


def test_reference_configuration_ends_behind_the_stages():
    yaml = "a: 1\nhift: !new:x\n    b: 2\n\n    c: 3\n# features\nget_tokenizer: !name:y\n    d: 4\n"
    assert reference_side.stages_only(yaml) == "a: 1\nhift: !new:x\n    b: 2\n\n    c: 3\n"
    assert reference_side.stages_only("hift:\n  b: 2\n") == "hift:\n  b: 2\n"


def test_reference_end_comes_exactly_where_it_is_asked_for():
    def own_sampling(scores, decoded, sampling):
        return scores.argmax()

    llm = SimpleNamespace(speech_token_size=3, stop_token_ids=[4, 5], sampling=own_sampling)
    reference_side.hold_back_end(llm, 2)
    assert llm.sampling_ids(torch.tensor([0.0, 2.0, 1.0, 9.0, 8.0]), [0], 25) == 1
    assert llm.sampling_ids(torch.tensor([0.0, 2.0, 1.0, 9.0, 8.0]), [0, 0], 25) == 4


def test_stand_in_packages_hold_whatever_is_asked_of_them(monkeypatch):
    monkeypatch.setattr(
        "sys.meta_path", [*sys.meta_path, reference_side.StandIns(frozenset({"no_such_package"}))]
    )
    module = importlib.import_module("no_such_package.part.inner")
    monkeypatch.delitem(sys.modules, "no_such_package.part.inner")
    assert callable(module.Anything)
    assert not hasattr(module, "__path__") or list(module.__path__) == []
    assert importlib.util.find_spec("no_such_other_package") is None


def test_dead_thread_of_the_reference_ends_the_process_with_its_message():
    script = (
        "import threading, time; from benchmarks.reference_side import end_process;"
        "threading.excepthook = end_process;"
        "threading.Thread(target=lambda: {}['gone']).start(); threading.Event().wait(30)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=compare_reference.ROOT, timeout=20
    )
    assert done.returncode == 1
    assert "KeyError: 'gone'" in done.stderr


def test_side_counts_with_what_it_measured_last_even_if_it_does_not_end(capfd):
    script = "; ".join(
        [
            "import threading",
            "print('a log')",
            """print('{"precision": "float32", "runs": 1}')""",
            """print('{"precision": "float32", "runs": 2}')""",
            """print('{"precision": "float16", "runs": 1}', flush=True)""",
            "threading.Event().wait(30)",
        ]
    )
    measured = compare_reference.run_side([sys.executable, "-c", script], dict(os.environ), 1.0)
    assert measured == [{"precision": "float32", "runs": 2}, {"precision": "float16", "runs": 1}]
    assert "ended after 1 s" in capfd.readouterr().err
    failing = [sys.executable, "-c", "raise SystemExit(3)"]
    assert compare_reference.run_side(failing, dict(os.environ), 20.0) == []
    assert "exit code 3" in capfd.readouterr().err


def test_ratios_need_utterances_of_equal_length():
    theirs = {
        "ttfb_ms_p50": 2390.0,
        "rtf": 1.0,
        "tps": 41.0,
        "audio_seconds": 10.0,
        "peak_memory_bytes": None,
    }
    ours = {"ttfb_ms_p50": 23.9, "rtf": 0.01, "tps": 4100.0, "audio_seconds": 9.9, "peak_memory_bytes": 1}
    assert compare_reference.ratios(theirs, ours) == {"ttfb": 100.0, "rtf": 100.0, "tps": 100.0}
    memory = compare_reference.ratios(theirs | {"peak_memory_bytes": 3}, ours | {"peak_memory_bytes": 2})[
        "memory"
    ]
    assert memory == 1.5
    with pytest.raises(SystemExit, match=r"10\.0 s and 5\.0 s"):
        compare_reference.ratios(theirs, ours | {"audio_seconds": 5.0})


def test_reference_runs_in_its_own_environment_only(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "ours")
    assert compare_reference.reference_environment(None)["PYTHONPATH"] == "ours"
    assert "PYTHONPATH" not in compare_reference.reference_environment("/env/bin/python")
