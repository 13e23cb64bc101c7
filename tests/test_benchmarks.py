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
from vivace.bench.single import TEXT
from vivace.checkpoint import find_paths, load_config
from vivace.random_checkpoint import write_random_checkpoint
from vivace.text.styles import open_tokenizer


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

    llm = SimpleNamespace(speech_token_size=3, eos_token=4, sampling=own_sampling)
    reference_side.hold_back_end(llm, 2)
    assert llm.sampling_ids(torch.tensor([0.0, 2.0, 1.0, 9.0, 8.0]), [0], 25) == 1
    assert llm.sampling_ids(torch.tensor([0.0, 2.0, 1.0, 9.0, 8.0]), [0, 0], 25) == 4


class CosyVoiceModel:
    """Driver of the reference as far as it is asked for: two chunks of half a second, a hop that grows."""

    def __init__(self, rate_hz=22_050):
        self.llm = SimpleNamespace(speech_token_size=3, eos_token=4, sampling=lambda scores, *_: 0)
        self.rate_hz, self.hops, self.texts = rate_hz, [], []
        self.tts_speech_token_dict, self.llm_end_dict = {}, {}

    def tts(self, text, stream, **inputs):
        assert stream
        assert set(inputs) == {
            "prompt_text",
            "llm_prompt_speech_token",
            "llm_embedding",
            "flow_prompt_speech_token",
            "prompt_speech_feat",
            "flow_embedding",
        }
        self.texts.append(text)
        for _ in range(2):
            yield {"tts_speech": torch.zeros(1, self.rate_hz // 2)}

    def llm_job(self, text, prompt_text, prompt_tokens, embedding, name):
        self.tts_speech_token_dict[name] += range(7)


class CosyVoice3Model(CosyVoiceModel):
    token_hop_len = 25

    def tts(self, text, stream, **inputs):
        self.hops.append(self.token_hop_len)
        self.token_hop_len = 100
        yield from super().tts(text, stream, **inputs)


@pytest.fixture(scope="module")
def tiny_folders(tmp_path_factory):
    folders = {}
    for generation in (1, 2, 3):
        folders[generation] = tmp_path_factory.mktemp("tiny") / str(generation)
        write_random_checkpoint(folders[generation], generation=generation)
    return folders


def test_reference_of_each_generation_is_measured_in_its_own_units(tiny_folders, monkeypatch):
    for model, folder in (
        (CosyVoiceModel(), tiny_folders[1]),
        (CosyVoice3Model(24_000), tiny_folders[3]),
    ):
        monkeypatch.setattr(
            reference_side, "load", lambda repo, matcha, path, model=model: (model, model.rate_hz)
        )
        monkeypatch.setattr(torch.cuda, "is_available", torch.cuda.is_available)
        options = SimpleNamespace(
            repo=None, matcha=None, model=folder, device="cpu", tokens=25, text_tokens=9
        )
        reference = reference_side.Reference(options)
        documents = list(reference.measure("float16", 2))
        assert [document["runs"] for document in documents] == [1, 2]
        assert documents[1]["audio_seconds"] == 1.0
        assert documents[1]["precision"] == "float16 autocast"
        assert documents[1]["tps"] > 0
        assert model.fp16 is True
        assert {text.shape for text in model.texts} == {(1, 9)}
        is_third = model.rate_hz == 24_000
        assert (reference_side.END_OF_PROMPT in model.texts[0]) is is_third
        assert model.hops == ([25, 25, 25] if is_third else [])


def test_small_vocabularies_read_the_end_of_prompt():
    for llm in (
        SimpleNamespace(llm=SimpleNamespace(), text_embedding=torch.nn.Embedding(5, 2)),
        SimpleNamespace(
            llm=SimpleNamespace(
                model=SimpleNamespace(model=SimpleNamespace(embed_tokens=torch.nn.Embedding(5, 2)))
            )
        ),
    ):
        reference_side.fit_text_tokens(llm)
        embedding = llm.text_embedding if hasattr(llm, "text_embedding") else llm.llm.model.model.embed_tokens
        read = embedding(torch.tensor([1, reference_side.END_OF_PROMPT]))
        assert torch.equal(read, embedding.weight[[1, 4]])


def test_reference_is_asked_for_the_same_tokens_in_every_generation(tiny_folders, monkeypatch):
    monkeypatch.setattr("sys.argv", ["compare", "--repo", "cosyvoice", "--seconds", "6", "--reference-fp16"])
    options = compare_reference._options()
    for generation, tokens in ((1, 300), (2, 150), (3, 150)):
        folder = tiny_folders[generation]
        config = load_config(folder)
        command = compare_reference.reference_command(options, folder, config)
        assert command[command.index("--tokens") + 1] == str(tokens)
        paths, _ = find_paths(folder, config)
        text_tokens = len(open_tokenizer(paths.tokenizer, config).encode(TEXT))
        assert command[command.index("--text-tokens") + 1] == str(text_tokens)
        assert command[-4:] == ["--precision", "float32", "--precision", "float16"]
        options.seconds = text_tokens * 20 / config.token_rate_hz
        with pytest.raises(SystemExit, match="--seconds"):
            compare_reference.reference_command(options, folder, config)
        options.seconds = 6.0


def test_one_document_compares_both_sides(tiny_folders, tmp_path, monkeypatch, capsys):
    figures = {"ttfb_ms_p50": 9e5, "rtf": 900.0, "tps": 0.01, "audio_seconds": 1.0, "peak_memory_bytes": None}
    printed = [
        json.dumps(figures | {"precision": name, "runs": 1}) for name in ("float32", "float16 autocast")
    ]
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in printed))
    python.chmod(0o755)
    arguments = ["--repo", str(tmp_path), "--reference-python", str(python), "--model", str(tiny_folders[1])]
    arguments += ["--seconds", "1", "--runs", "1", "--device", "cpu", "--dtype", "float32"]
    monkeypatch.setattr("sys.argv", ["compare", *arguments])
    compare_reference.main()
    document = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (document["generation"], document["speech_tokens"]) == (1, 50)
    assert document["reference"]["rtf"] == document["reference_float16"]["rtf"] == 900.0
    assert document["ratios"]["rtf"] == round(900.0 / document["vivace"]["rtf"], 1)
    assert document["ratios"]["tps"] == round(document["vivace"]["tps"] / 0.01, 1)
    assert document["reference_commit"] == "unknown"


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
            """print('{"precision": "float16", "runs": 1}')""",
            """print('{"precision": "float16", "ru', end='', flush=True)""",
            "threading.Event().wait(30)",
        ]
    )
    seen = []
    measured = compare_reference.run_side([sys.executable, "-c", script], dict(os.environ), 1.0, seen.append)
    assert [(document["precision"], document["runs"]) for document in seen] == [
        ("float32", 1),
        ("float32", 2),
        ("float16", 1),
    ]
    assert measured == [{"precision": "float32", "runs": 2}, {"precision": "float16", "runs": 1}]
    assert "ended after 1 s" in capfd.readouterr().err
    failing = [sys.executable, "-c", "raise SystemExit(3)"]
    assert compare_reference.run_side(failing, dict(os.environ), 20.0, seen.append) == []
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
