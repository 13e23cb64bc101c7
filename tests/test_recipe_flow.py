"""The recipe of the embedded model's flow: rows fit together, a step learns, the file it writes loads."""

import json

import numpy as np
import pytest
import torch

from recipes.mini import train_flow
from recipes.mini.corpus import Corpus, CorpusWriter
from recipes.mini.flow_rows import LOOKAHEAD, FlowSpeech
from vivace.config import DiTConfig, FlowConfig

CODES, SIZE = 27, 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """24 short hums of three voices, with tokens and embeddings."""
    path = tmp_path_factory.mktemp("corpus")
    generator = np.random.default_rng(3)
    counts = []
    with CorpusWriter(path) as writer:
        for index in range(24):
            count = int(generator.integers(22, 40))
            phase = np.cumsum(2 * np.pi * (100 + 40 * (index % 3)) / 24000 + 0 * np.arange(count * 960))
            item = {"id": f"hum{index}", "lang": "en", "text": "", "voice": f"v{index % 3}", "mix": None}
            writer.add(item, (0.3 * np.sin(phase)).astype(np.float32))
            counts.append(count)
    offsets = np.cumsum([0, *counts], dtype=np.int64)
    tokens = generator.integers(0, CODES, offsets[-1]).astype(np.uint16)
    np.savez(path / "tokens.npz", tokens=tokens, offsets=offsets, codes=np.int64(CODES))
    speakers = np.eye(192, dtype=np.float32)[np.arange(24) % 3]
    np.savez(path / "speakers.npz", embeddings=speakers)
    return path


@pytest.fixture(scope="module")
def speech(folder):
    return FlowSpeech(Corpus(folder), folder / "tokens.npz", folder / "speakers.npz", torch.device("cpu"))


def mark(speech):
    """Write into the mel which token and which voice each frame belongs to."""
    for item, (start, count) in enumerate(zip(speech.mel_starts, speech.counts, strict=True)):
        begin = speech.token_starts[item]
        speech.mel[start : start + 2 * count, 0] = (
            speech.tokens[begin : begin + count].repeat_interleave(2).float()
        )
        speech.mel[start : start + 2 * count, 1] = item % 3


def test_rows_join_tokens_mel_and_voice(speech):
    mark(speech)
    torch.manual_seed(0)
    speech.shuffle(np.random.default_rng(0))
    rows = speech.draw(200, SIZE)
    assert rows.tokens.shape == (200, SIZE + LOOKAHEAD)
    assert rows.mel.shape == (200, 80, 2 * SIZE)
    assert torch.equal(rows.mel[:, 0, ::2], rows.tokens[:, :SIZE].float())
    assert torch.equal(rows.mel[:, 0, 1::2], rows.tokens[:, :SIZE].float())
    voice = rows.speaker.argmax(1)
    assert torch.equal(rows.mel[:, 1], voice[:, None].expand(-1, 2 * SIZE).float())
    assert set(voice.tolist()) == {0, 1, 2}


def test_rows_begin_or_end_with_an_utterance(speech):
    mark(speech)
    torch.manual_seed(1)
    rows = speech.draw(200, SIZE)
    ends_well = rows.visible == rows.valid
    assert 0.4 < ends_well.float().mean() < 0.75
    assert 0.15 < (rows.prompt == 0).float().mean() < 0.45
    assert int(rows.prompt.max()) <= SIZE * 0.6
    assert int(rows.prompt[rows.prompt > 0].min()) >= 25


def test_held_out_items_are_never_drawn(speech):
    held = {item for _, item in speech.pairs}
    assert not held & set(speech.order.tolist())


def test_what_lies_behind_a_row_has_no_influence(speech):
    torch.manual_seed(2)
    model = train_flow.FlowModel(tiny_config(CODES)).eval()
    rows = speech.draw(3, SIZE)
    valid, visible = torch.tensor([40, 30, 60]), torch.tensor([43, 30, 63])
    rows = rows._replace(valid=valid, visible=visible, prompt=torch.tensor([0, 10, 25]))
    other = rows._replace(tokens=rows.tokens.clone(), mel=rows.mel.clone())
    other.tokens[1, 30:] = 0
    other.mel[1, :, 60:] = 9.0

    def loss(given):
        torch.manual_seed(4)
        with torch.no_grad():
            return float(train_flow.flow_loss(model, given, False, 0.0))

    assert loss(rows) == pytest.approx(loss(other), rel=1e-6)
    other.mel[1, :, 50:60] = 9.0
    assert loss(rows) != pytest.approx(loss(other), rel=1e-3)


def tiny_config(codes):
    dit = DiTConfig(dim=32, depth=1, heads=2, dim_head=16, ff_mult=1)
    return FlowConfig(dit=dit, vocab_size=codes, lookahead_channels=8, num_steps=2)


def test_a_few_steps_then_the_file_loads_and_a_run_resumes(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(train_flow, "mini_flow_config", tiny_config)
    words = [
        "--data",
        str(folder),
        "--out",
        str(tmp_path),
        "--minutes",
        "5",
        "--device",
        "cpu",
        "--rows",
        "2",
    ]
    words += ["--tokens", str(folder / "tokens.npz"), "--speakers", str(folder / "speakers.npz")]
    words += ["--tokens-per-row", str(SIZE), "--steps"]
    train_flow.main([*words, "3"])
    model = train_flow.load(tmp_path / "flow.pt", torch.device("cpu"))
    assert model.config.vocab_size == CODES
    train_flow.main([*words, "1", "--resume", str(tmp_path / "resume.pt")])
    assert json.loads((tmp_path / "flow.json").read_text())["steps"] == 1
    assert "flow done" in capsys.readouterr().out


def test_files_of_another_corpus_are_refused(folder, tmp_path):
    np.savez(tmp_path / "speakers.npz", embeddings=np.zeros((3, 192), np.float32))
    with pytest.raises(ValueError, match="another corpus"):
        FlowSpeech(Corpus(folder), folder / "tokens.npz", tmp_path / "speakers.npz", torch.device("cpu"))
