"""CosyVoice 2 and CosyVoice-300M from folder to audio: reading, writing, the engine's modes, what is missing.

Tolerance of audio: the recorded samples are rounded to half precision (2**-13 under 0.5).
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import vivace
from tests.conftest import GOLDEN, unpack_golden
from tests.helpers import quiet_engine, speech_like_wav
from tests.test_flow_regulated import golden_noise
from tests.test_hift_centred import NoNoise
from tests.test_older_lms import decode, prefill, vectors
from vivace import SamplingParams, SynthesisRequest, Voice
from vivace.checkpoint import (
    STAGES,
    convert_folder,
    find_paths,
    load_config,
    open_model,
    to_official_state,
    weight_shapes,
)
from vivace.checkpoint import names as official_names
from vivace.checkpoint.config_check import check_config
from vivace.checkpoint.config_json import from_json, to_json
from vivace.checkpoint.yaml_config import parse_official_config
from vivace.checkpoint.yaml_writer import write_qwen_config, write_yaml
from vivace.config import ModelConfig
from vivace.doctor import examine_folder
from vivace.engine.chunking import ChunkPlan
from vivace.engine.device_stages import DeviceStages
from vivace.errors import InvalidTextError, InvalidVoiceError, ModelFolderError
from vivace.models.kinds import make_flow, make_lm, make_vocoder
from vivace.random_checkpoint import full_config, tiny_config, write_random_checkpoint

HALF_PRECISION = 2**-12
OLDER = (2, 1)
OPTIONS = {"num_steps": 2, "token_text_ratio": (2.0, 2.6)}


def all_vectors(generation):
    with np.load(GOLDEN / f"cosyvoice{generation}-tiny" / "vectors.npz") as data:
        return dict(data)


@pytest.fixture(scope="session")
def golden_folders(tmp_path_factory):
    return {
        generation: unpack_golden(
            GOLDEN / f"cosyvoice{generation}-tiny", tmp_path_factory.mktemp(f"golden-{generation}")
        )
        for generation in OLDER
    }


@pytest.fixture(scope="session")
def random_folders(tmp_path_factory):
    folders = {}
    for generation in OLDER:
        folders[generation] = tmp_path_factory.mktemp(f"random-{generation}") / "model"
        write_random_checkpoint(folders[generation], dtype="float32", generation=generation)
    return folders


@pytest.fixture(scope="module", params=OLDER)
def generation(request):
    return request.param


@pytest.fixture(scope="module")
def engine(random_folders, generation, tmp_path_factory):
    voices = tmp_path_factory.mktemp("voices")
    with quiet_engine(random_folders[generation], voices=voices, **OPTIONS) as engine:
        yield engine


def golden_voice(given, generation):
    return Voice(
        name="golden",
        prompt_text="",
        speech_tokens=given["prompt_token"][0].astype(np.int32),
        mel=given["prompt_feat"][0],
        embedding=given["speaker_embedding"][0],
        meta={"generation": generation},
    )


def audio(engine, request):
    return np.concatenate([chunk.samples for chunk in engine.stream(request)])


# --- folders


def test_golden_weights_arrive_unchanged(golden_folders, generation):
    model = open_model(golden_folders[generation])
    assert model.config.generation == generation
    given = vectors(generation)
    with torch.inference_mode():
        lm = model.lm.for_speaker(given["speaker_embedding"][0].numpy())
        scores = decode(lm, prefill(lm, given), given["lm.forced_tokens"])
    torch.testing.assert_close(scores, given["lm.logits"], atol=1e-4, rtol=0)


def test_official_state_has_the_reference_keys(golden_folders, generation):
    model = open_model(golden_folders[generation])
    with np.load(GOLDEN / f"cosyvoice{generation}-tiny" / "weights.npz") as packed:
        for stage, prefix in (("lm", "llm"), ("flow", "flow"), ("vocoder", "hift")):
            state = to_official_state(stage, getattr(model, stage), model.config)
            wanted = {
                name.removeprefix(f"{prefix}/"): packed[name].shape
                for name in packed.files
                if name.startswith(f"{prefix}/")
            }
            assert {name: tuple(value.shape) for name, value in state.items()} == wanted


@pytest.mark.parametrize("generation", OLDER)
@pytest.mark.parametrize("make", [full_config, tiny_config])
def test_configurations_are_written_and_read(make, generation):
    config = make(generation)
    check_config(config, "f")
    qwen = {} if generation == 1 else json.loads(write_qwen_config(config))
    own = dataclasses.replace(config, vocoder=dataclasses.replace(config.vocoder, seams="fade"))
    if generation == 1:
        own = dataclasses.replace(own, flow=dataclasses.replace(own.flow, seams="fade"))
    for expected in (config, own):
        assert parse_official_config(write_yaml(expected), qwen, expected.name, generation) == expected
        assert from_json(ModelConfig, json.loads(json.dumps(to_json(expected))), "f") == expected


def test_golden_configurations_are_read(golden_folders):
    second, first = (load_config(golden_folders[generation]) for generation in OLDER)
    assert (second.token_rate_hz, second.chunk_tokens, second.sample_rate_hz) == (25, 25, 24_000)
    assert (second.flow.encoder.num_blocks, second.flow.num_up_blocks, second.flow.depth) == (1, 4, 4)
    assert (second.vocoder.source_phase, second.vocoder.causal) == ("linear", False)
    assert (first.token_rate_hz, first.sample_rate_hz, first.mel_fmax_hz) == (50, 22_050, 8000.0)
    assert (first.lm.text_encoder.num_blocks, first.lm.decoder.num_blocks) == (2, 2)
    assert first.flow.num_frames(60) == 103
    assert first.flow.num_tokens(103) == 59


def test_the_25_hz_model_is_a_setting(golden_folders, tmp_path):
    folder = shutil.copytree(golden_folders[1], tmp_path / "model")
    yaml = folder / "cosyvoice.yaml"
    yaml.write_text(yaml.read_text().replace("input_frame_rate: 50", "input_frame_rate: 25"))
    config = load_config(folder)
    assert (config.token_rate_hz, config.chunk_tokens, config.flow.num_frames(25)) == (25, 25, 86)
    flow = open_model(folder).flow
    with torch.inference_mode():
        stream = flow.new_stream(torch.ones(192), torch.zeros(0, 80))
        parts = [flow.step(stream, [1] * 60, is_last=False), flow.step(stream, [2] * 7, is_last=True)]
    assert sum(part.shape[1] for part in parts) == config.flow.num_frames(67)


@pytest.mark.parametrize("generation", OLDER)
def test_shape_table_agrees_with_the_modules(generation):
    config = tiny_config(generation)
    encoder = dataclasses.replace(config.flow.encoder, heads=4, ff_size=24, num_blocks=3)
    unet = dataclasses.replace(config.flow.unet, heads=3, dim_head=8, num_blocks=2, num_mid_blocks=1)
    flow = dataclasses.replace(config.flow, encoder=encoder, unet=unet)
    if generation == 1:
        flow = dataclasses.replace(flow, unet=dataclasses.replace(unet, channels=(16, 24, 32)))
        flow = dataclasses.replace(flow, num_regulator_layers=2)
    else:
        flow = dataclasses.replace(flow, num_up_blocks=2, lookahead_tokens=5)
    for sizes in (config, dataclasses.replace(config, flow=flow)):
        built = {
            "lm": make_lm(sizes.lm),
            "flow": make_flow(sizes.flow),
            "vocoder": make_vocoder(sizes.vocoder),
        }
        for stage in STAGES:
            parameters = {name: tuple(p.shape) for name, p in built[stage].named_parameters()}
            assert parameters == weight_shapes(sizes, stage)
            ours = list(parameters)
            official = [official_names.to_official_name(stage, name, generation) for name in ours]
            assert [official_names.to_our_name(stage, name, generation) for name in official] == ours


def test_full_sizes_are_those_of_the_real_models():
    """Official files: llm.pt 2.02 and 1.24 GB, flow.pt 0.45 and 0.42 GB, hift.pt 83 and 82 MB, in float32."""
    sizes = {
        generation: {
            stage: sum(
                int(np.prod(shape)) for shape in weight_shapes(full_config(generation), stage).values()
            )
            for stage in STAGES
        }
        for generation in OLDER
    }
    assert sizes[2]["lm"] == pytest.approx(505e6, rel=0.01)
    assert sizes[1]["lm"] == pytest.approx(310e6, rel=0.02)
    for generation in OLDER:
        assert sizes[generation]["flow"] == pytest.approx(110e6, rel=0.05)
        assert sizes[generation]["vocoder"] == pytest.approx(20.5e6, rel=0.03)


def test_converted_folder_sounds_the_same(random_folders, generation, engine, tmp_path):
    out = tmp_path / "native"
    summary = convert_folder(random_folders[generation], out)
    assert summary["missing"] == {}
    assert load_config(out) == load_config(random_folders[generation])
    request = SynthesisRequest("Hello there.")
    with quiet_engine(out, voices=tmp_path, **OPTIONS) as converted:
        # Memory-mapped weights are aligned otherwise, which changes the order of some sums.
        np.testing.assert_allclose(audio(converted, request), audio(engine, request), atol=1e-5)


def test_doctor_knows_the_folder(random_folders, generation):
    report = examine_folder(random_folders[generation])
    assert report.usable
    assert not report.problems
    assert all(report.features.values())
    assert report.model.startswith({2: "CosyVoice 2,", 1: "CosyVoice 300M,"}[generation])
    names = {file.name for file in report.files}
    assert f"speech_tokenizer_v{generation}.onnx" in names


# --- the reference driver's audio


def test_offline_audio_equals_the_reference(golden_folders, generation):
    given = all_vectors(generation)
    with quiet_engine(golden_folders[generation], vocoder_noise=NoNoise()) as engine:
        if generation == 1:
            engine._assets.model.flow.noise = golden_noise()
        tokens, voice = given["token"][0].tolist(), golden_voice(given, generation)
        chunks = list(engine.render_tokens(tokens, voice, stream=False))
    assert len(chunks) == 1
    np.testing.assert_allclose(chunks[0].samples, given["offline.audio"], atol=HALF_PRECISION)


def test_stream_of_cosyvoice2_equals_the_chunk_masked_whole(golden_folders):
    """The reference streams the same mel but for its last piece, with seams of its own (``test_older_streams``)."""
    given = all_vectors(2)
    with quiet_engine(golden_folders[2], vocoder_noise=NoNoise()) as engine:
        chunks = list(engine.render_tokens(given["token"][0].tolist(), golden_voice(given, 2)))
        mel = torch.from_numpy(given["flow.mel_streaming_final"])
        with torch.inference_mode():
            whole = engine._assets.model.vocoder(mel, noise=NoNoise())[0].numpy()
    assert len(chunks) > 3
    np.testing.assert_allclose(np.concatenate([c.samples for c in chunks]), whole, atol=1e-4)


class ReferenceHops(ChunkPlan):
    """The reference's borders for a prompt of 30 tokens: the first new one at 75, where the prompt is filled up to a
    multiple of 25, then every 50."""

    def next_border(self, done_tokens):
        return super().next_border(done_tokens + 25) - 25

    def ready_border(self, known_tokens):
        return max(0, super().ready_border(known_tokens + 25) - 25)


def test_stream_of_cosyvoice2_in_the_reference_way_equals_its_driver(golden_folders, tmp_path):
    folder = shutil.copytree(golden_folders[2], tmp_path / "model")
    yaml = folder / "cosyvoice2.yaml"
    text = yaml.read_text()
    yaml.write_text(text.replace("    lrelu_slope: 0.1", "    lrelu_slope: 0.1\n    seams: fade"))
    given = all_vectors(2)
    with quiet_engine(folder, vocoder_noise=NoNoise()) as engine:
        plan = engine._stages.plan
        engine._stages.plan = ReferenceHops(50, plan.lookahead_tokens, plan.frames_per_token)
        chunks = list(engine.render_tokens(given["token"][0].tolist(), golden_voice(given, 2)))
    assert [len(chunk.samples) for chunk in chunks] == given["stream.chunk_samples"].tolist()
    # The reference's last piece comes from a mel with the offline mask, ours keeps the chunk mask.
    equal = sum(given["stream.chunk_samples"][:2].tolist())
    samples = np.concatenate([chunk.samples for chunk in chunks])
    np.testing.assert_allclose(samples[:equal], given["stream.audio"][:equal], atol=HALF_PRECISION)


def test_stream_of_cosyvoice1_in_the_reference_way_equals_its_driver(golden_folders, tmp_path):
    folder = shutil.copytree(golden_folders[1], tmp_path / "model")
    yaml = folder / "cosyvoice.yaml"
    text = yaml.read_text().replace("    only_mask_loss: True", "    only_mask_loss: True\n    seams: fade")
    yaml.write_text(text.replace("    lrelu_slope: 0.1", "    lrelu_slope: 0.1\n    seams: fade"))
    given = all_vectors(1)
    with quiet_engine(folder, vocoder_noise=NoNoise()) as engine:
        engine._assets.model.flow.noise = golden_noise()
        chunks = list(engine.render_tokens(given["token"][0].tolist(), golden_voice(given, 1)))
    samples = np.concatenate([chunk.samples for chunk in chunks])
    assert len(samples) == len(given["stream.audio"])
    # The end comes before the engine's next border, so that the last two pieces reach the vocoder as one: up to their
    # seam, and what the vocoder sees of it, all is equal (``test_older_streams`` has the driver's own pieces).
    equal = sum(given["stream.chunk_samples"][:2].tolist()) - 20 * 256
    np.testing.assert_allclose(samples[:equal], given["stream.audio"][:equal], atol=HALF_PRECISION)


# --- modes


def test_seeds_and_streams(engine):
    request = SynthesisRequest("Hello there, a fox sang, and two dogs sat in the rain.")
    once, again = audio(engine, request), audio(engine, request)
    np.testing.assert_array_equal(once, again)
    other = audio(engine, dataclasses.replace(request, sampling=SamplingParams(seed=1)))
    assert len(once) != len(other) or np.abs(once - other).max() > 1e-3
    assert len(list(engine.stream(request))) > 1
    assert len(list(engine.stream(dataclasses.replace(request, stream=False)))) == 1


def test_speed(engine):
    tokens, voice = [5] * 60, engine.voices.get("noise")
    slow = sum(len(c.samples) for c in engine.render_tokens(tokens, voice))
    fast = sum(len(c.samples) for c in engine.render_tokens(tokens, voice, speed=2.0))
    assert fast == pytest.approx(slow / 2, abs=600)


def test_zero_shot_instruction_and_cross_lingual_sequences(engine, generation, sequences):
    encode = engine._assets.frontend._tokenizer.encode
    said = encode("Hello.")
    voice = engine.voices.get("noise")
    transcript = encode(voice.prompt_text)
    for options in ({}, {"instruction": "Be slow."}, {"cross_lingual": True, "language": "en"}):
        list(engine.stream(SynthesisRequest("Hello.", **options)))
    zero_shot, instructed, crossed = sequences
    assert zero_shot == (transcript, said, voice.speech_tokens.tolist())
    assert instructed == (encode("Be slow.<|endofprompt|>"), said, [])
    assert crossed == (encode("<|en|>") if generation == 1 else [], said, [])


def test_the_first_generation_hides_the_speaker_behind_an_instruction(random_folders, monkeypatch):
    from vivace.models.conformer_lm import ConformerLM

    asked = []
    original = ConformerLM.for_speaker
    monkeypatch.setattr(
        ConformerLM, "for_speaker", lambda lm, e: asked.append(e is not None) or original(lm, e)
    )
    with quiet_engine(random_folders[1], **OPTIONS) as engine:
        list(engine.stream(SynthesisRequest("Hello.")))
        list(engine.stream(SynthesisRequest("Hello.", instruction="Be slow.")))
    assert asked == [True, False]


def test_speakers_of_fine_tuning(random_folders, generation, tmp_path):
    folder = shutil.copytree(random_folders[generation], tmp_path / "model")
    torch.save({"中文女": {"embedding": torch.randn(1, 192)}}, folder / "spk2info.pt")
    with quiet_engine(folder, voices=tmp_path, **OPTIONS) as engine:
        assert engine.voices.builtin_names == ("chinese-female",)
        request = SynthesisRequest("Hello.", voice="中文女")
        same = dataclasses.replace(request, voice="chinese-female")
        np.testing.assert_array_equal(audio(engine, request), audio(engine, same))


def test_voices_are_cloned_stored_and_converted_to(engine, generation):
    made = engine.make_voice(speech_like_wav(), "Some words.", name="clone")
    flow = engine._config.flow
    assert len(made.mel) == flow.num_frames(len(made.speech_tokens))
    seconds = len(made.speech_tokens) / engine._config.token_rate_hz
    assert seconds == pytest.approx(2.0, abs=0.05)
    assert len(audio(engine, SynthesisRequest("Hello.", voice=made)))
    chunks = list(engine.transform(speech_like_wav(1.5), made))
    duration = sum(len(chunk.samples) for chunk in chunks) / engine.sample_rate_hz
    assert duration == pytest.approx(1.5, abs=0.06)


def test_a_voice_of_another_generation_is_refused(engine, generation):
    made = engine.make_voice(speech_like_wav(), "", name="other")
    other = dataclasses.replace(made, meta={**made.meta, "generation": 3})
    with pytest.raises(InvalidVoiceError, match="generation 3"):
        engine.stream(SynthesisRequest("Hello.", voice=other))


def test_streamed_text(engine, generation):
    text = ["Hello the", "re. One fox", " ran. Two do", "gs sat."]
    stream = engine.stream(SynthesisRequest(iter(text)))
    samples = np.concatenate([chunk.samples for chunk in stream])
    assert len(samples) > 0
    summary = stream.summary()
    # CosyVoice 2 reads text and speaks in turn, a first sentence by itself; 300M speaks clause by clause.
    assert summary.num_segments == (2 if generation == 2 else 3)
    again = engine.stream(SynthesisRequest(iter(["Hello there. One fox ran. ", "Two dogs sat."])))
    np.testing.assert_array_equal(samples, np.concatenate([chunk.samples for chunk in again]))


def test_control_tokens_in_a_text_are_refused(engine):
    with pytest.raises(InvalidTextError):
        engine.stream(SynthesisRequest("<|endoftext|>Hello."))


# --- CosyVoice-300M's text vocabulary


def test_without_a_rank_file_the_error_says_where_to_get_it(random_folders, tmp_path):
    folder = shutil.copytree(random_folders[1], tmp_path / "model")
    ranks = folder / "multilingual.tiktoken"
    ranks.rename(tmp_path / "elsewhere.tiktoken")
    with quiet_engine(folder, voices=tmp_path) as engine:
        with pytest.raises(ModelFolderError, match=r"openai-whisper.* --tokenizer") as caught:
            engine.stream(SynthesisRequest("Hello."))
        assert "\n" not in caught.value.message
        assert len(list(engine.render_tokens([1] * 30, engine.voices.get("noise"))))
    model = open_model(folder, tokenizer=tmp_path / "elsewhere.tiktoken")
    assert model.paths.tokenizer == tmp_path / "elsewhere.tiktoken"
    assert not examine_folder(folder).usable
    assert examine_folder(folder, tmp_path / "elsewhere.tiktoken").usable


def test_an_installed_package_may_bring_the_rank_file(random_folders, tmp_path, monkeypatch):
    folder = shutil.copytree(random_folders[1], tmp_path / "model")
    assets = tmp_path / "site" / "whisper" / "assets"
    assets.mkdir(parents=True)
    (assets.parent / "__init__.py").write_text("raise RuntimeError('it is not imported')")
    (folder / "multilingual.tiktoken").rename(assets / "multilingual.tiktoken")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert open_model(folder).paths.tokenizer == assets / "multilingual.tiktoken"
    convert_folder(folder, tmp_path / "native")  # which may go where the package is not installed
    ranks = (tmp_path / "native" / "multilingual.tiktoken").read_bytes()
    assert ranks == (assets / "multilingual.tiktoken").read_bytes()


def test_convert_says_what_the_new_folder_lacks_and_what_to_do(vivace, random_folders, tmp_path, monkeypatch):
    monkeypatch.setattr("vivace.checkpoint.files.RANK_PACKAGES", ())
    code, lines, _ = vivace("convert", random_folders[1], tmp_path / "whole")
    assert code == 0
    assert not [line for line in lines if "lack" in line or "missing" in line]
    folder = shutil.copytree(random_folders[1], tmp_path / "model")
    (folder / "multilingual.tiktoken").unlink()
    (folder / "campplus.onnx").unlink()
    code, lines, _ = vivace("convert", folder, "native")
    assert code == 0
    assert lines[0] == "native: written; use it with --model native"
    said = [line for line in lines if line.startswith("native: multilingual.tiktoken: is missing")]
    assert "text cannot be spoken" in said[0]
    assert "copy the file into the folder" in said[0]
    assert "native: campplus.onnx: is missing; voices cannot be cloned from audio" in lines
    assert lines[-1].startswith("copy what is missing into native; 'vivace doctor native'")
    json_line = vivace("convert", folder, "other", "--json")[1][-1]
    assert json.loads(json_line)["missing"].keys() >= {"tokenizer", "speaker_encoder"}


def test_the_advice_for_a_missing_rank_file_suits_commands_without_the_option(
    vivace, random_folders, tmp_path, monkeypatch
):
    monkeypatch.setattr("vivace.checkpoint.files.RANK_PACKAGES", ())
    folder = shutil.copytree(random_folders[1], tmp_path / "model")
    (folder / "multilingual.tiktoken").rename(tmp_path / "elsewhere.tiktoken")
    code, _, errors = vivace("bench", "single", "-m", folder, "--seconds", 1, "--requests", 1, "--runs", 1)
    assert code == 2
    assert "copy the file into the folder; commands that have the option --tokenizer also" in errors[-1]
    assert "or give the file with --tokenizer" not in errors[-1]


@pytest.mark.parametrize("command", ["say", "convert", "serve", "doctor"])
def test_a_tokenizer_that_is_not_there_is_named_as_it_was_given(vivace, random_folders, command, generation):
    folder = random_folders[generation]
    target = (folder, "new") if command == "convert" else (folder,)
    target = {"say": ("Hi.", "-m", folder), "serve": ("--model", folder)}.get(command, target)
    code, lines, errors = vivace(command, *target, "--tokenizer", "far/nothere.tiktoken")
    assert code == 2
    reason = "is missing; text cannot be spoken; give the path" if generation == 1 else "has no vocab.json"
    said = [line for line in (*lines, *errors) if f"far/nothere.tiktoken: {reason}" in line]
    assert said
    assert not any(str(folder) in line for line in said)


def test_an_empty_tokenizer_file_is_named_as_it_was_given(random_folders, tmp_path):
    (tmp_path / "far.tiktoken").touch()
    with pytest.raises(ModelFolderError, match=r"far\.tiktoken: is empty; ") as caught:
        open_model(random_folders[1], tokenizer=tmp_path / "far.tiktoken")
    assert caught.value.message.startswith(f"{tmp_path / 'far.tiktoken'}: ")


def test_voices_of_our_own_format_are_no_lack(random_folders, tmp_path):
    folder = shutil.copytree(random_folders[1], tmp_path / "model")
    (folder / "spk2info.pt").unlink(missing_ok=True)
    for path in (folder / "voices").glob("*"):
        path.unlink()
    assert "voices" in find_paths(folder, load_config(folder))[1]
    (folder / "voices").mkdir(exist_ok=True)
    (folder / "voices" / "one.safetensors").touch()
    assert "voices" not in find_paths(folder, load_config(folder))[1]


# --- damage and mixtures


def test_weights_of_another_generation_are_named(golden_folders, generation, tmp_path):
    folder = shutil.copytree(golden_folders[generation], tmp_path / "model")
    other = 3 - generation
    for file in ("llm.pt", "flow.pt"):
        shutil.copyfile(golden_folders[other] / file, folder / file)
        with pytest.raises(ModelFolderError, match=f"^{file}: belongs to another generation"):
            open_model(folder)
        shutil.copyfile(golden_folders[generation] / file, folder / file)


@pytest.mark.parametrize(
    ("generation", "old", "new", "reason"),
    [
        (2, "Qwen2LM", "CosyVoice3LM", "describes a CosyVoice 3 model; its file is called cosyvoice3.yaml"),
        (2, "use_cnn_module: False", "use_cnn_module: True", "use_cnn_module must be False"),
        (2, "channels: [32]", "channels: [32, 32]", "channels must be one number"),
        (2, "act_fn: 'gelu'", "act_fn: 'snakebeta'", "act_fn must be 'gelu'"),
        (2, "num_blocks: 1\n", "num_blocks: 1000000\n", "num_blocks of the flow's encoder must be 1 to 256"),
        (2, "attention_heads: 8", "attention_heads: 7", "attention_heads of the flow's encoder must divide"),
        (1, "input_frame_rate: 50", "input_frame_rate: 40", "input_frame_rate must be 25 or 50"),
        (1, "sample_rate: 22050", "sample_rate: 24000", "sample_rate must be 22050|source_phase"),
        (1, "static_chunk_size: 1\n", "static_chunk_size: 2\n", "static_chunk_size must be 1"),
        (1, "text_token_size: 600", "text_token_size: 0", "text_token_size must be 1"),
        (1, "in_channels: 320", "in_channels: 240", "in_channels must be 4 times out_channels"),
        (
            1,
            "pos_enc_layer_type: 'rel_pos_espnet'",
            "pos_enc_layer_type: 'abs_pos'",
            "pos_enc_layer_type must be",
        ),
    ],
)
def test_wrong_configurations_are_refused_by_name(golden_folders, tmp_path, generation, old, new, reason):
    folder = tmp_path / "model"
    folder.mkdir()
    source = golden_folders[generation]
    for path in source.glob("*.yaml"):
        text = path.read_text()
        assert old in text
        (folder / path.name).write_text(text.replace(old, new))
    if generation == 2:
        shutil.copytree(source / "CosyVoice-BlankEN", folder / "CosyVoice-BlankEN")
    with pytest.raises(ModelFolderError, match=reason) as caught:
        load_config(folder)
    assert "\n" not in caught.value.message


def test_engine_and_server_know_no_generation():
    """Adding one touches neither; what differs is chosen when a model is opened."""
    source = Path(vivace.__file__).parent
    paths = [path for folder in ("engine", "server", "bench") for path in (source / folder).rglob("*.py")]
    assert len(paths) > 20
    for path in paths:
        found = re.search(
            r"generation (==|!=|<|>|in )|cosyvoice[23]?\.yaml|ConformerLM|UNetFlow", path.read_text()
        )
        assert found is None or path.name == "floors.py", f"{path.name}: {found}"


def test_the_engine_asks_for_the_class_of_a_stage_in_four_places_only():
    """Each for what one class has to save time or memory; ``docs/architecture.md`` lists them."""
    source = Path(vivace.__file__).parent
    configurations = re.findall(r"^class (\w+Config)", (source / "config.py").read_text(), re.MULTILINE)
    stages = [
        name
        for path in (source / "models").glob("*.py")
        for name in re.findall(
            r"^class (\w*(?:LM|Flow|FlowModel|Conformer|HiFT|Vocoder))\b", path.read_text(), re.MULTILINE
        )
    ]
    assert {"SpeechLMConfig", "SpeechLM", "UNetFlow", "DeviceFlow", "CausalHiFT"} <= {
        *configurations,
        *stages,
    }
    names = re.compile(rf"isinstance\([^()]+, \(?[^()]*\b({'|'.join((*configurations, *stages))})\b")
    found = sorted(
        (path.name, match.group(1))
        for folder in ("engine", "server")
        for path in (source / folder).rglob("*.py")
        for match in names.finditer(path.read_text())
    )
    assert found == [
        ("device_stages.py", "DeviceFlow"),
        ("device_stages.py", "DeviceFlow"),
        ("device_stages.py", "DeviceVocoder"),
        ("device_stages.py", "FlowModel"),
        ("lm_kernels.py", "SpeechLMConfig"),
    ]


def test_stages_of_a_device_sound_the_same(random_folders, generation, engine, tmp_path):
    """All stages have a device's own way, here with plain kernels."""
    with quiet_engine(random_folders[generation], voices=tmp_path, **OPTIONS) as paged:
        paged._stages.use(DeviceStages.build(paged._assets.model, paged._assets.limits, max_rows=2))
        for options in ({}, {"stream": False}, {"speed": 1.3}):
            request = SynthesisRequest("A fox sang in the rain.", **options)
            want, got = audio(engine, request), audio(paged, request)
            assert want.shape == got.shape
            np.testing.assert_allclose(got, want, atol=1e-4)


def test_the_first_generation_by_graphs_sounds_the_same(random_folders, tmp_path):
    """What a GPU takes, here without graphs; two requests share the rows that are free."""
    request = SynthesisRequest("A fox sang in the rain. Two dogs sat.")
    with quiet_engine(random_folders[1], voices=tmp_path, **OPTIONS) as plain:
        want = audio(plain, request)
    with quiet_engine(random_folders[1], voices=tmp_path, **OPTIONS) as engine:
        engine._assets.model.lm.use_graphs = engine._assets.model.flow.use_graphs = True
        for _ in range(2):
            np.testing.assert_allclose(audio(engine, request), want, atol=1e-4)
        assert len(engine._assets.model.lm.idle_rows) == 1
