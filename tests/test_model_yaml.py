"""The configuration reader: what official files hold is read, everything that could act or explode is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vivace.checkpoint.config_check import check_config
from vivace.checkpoint.config_json import from_json, to_json
from vivace.checkpoint.yaml_config import parse_official_config, read_official_config
from vivace.checkpoint.yaml_reader import (
    MAX_EVENTS,
    Call,
    Ref,
    References,
    Value,
    _Builder,
    parse_hyper_yaml,
)
from vivace.checkpoint.yaml_writer import write_qwen_config, write_yaml
from vivace.config import ModelConfig
from vivace.errors import ModelFolderError
from vivace.random_checkpoint import full_config, tiny_config

TRAINING = """
mel_spec_transform1: !name:matcha.utils.audio.mel_spectrogram
    n_fft: 1920
    num_mels: 80
    sampling_rate: !ref <sample_rate>
    hop_size: 480
    win_size: 1920
    fmin: 0
    fmax: null
    center: False
hifigan: !new:cosyvoice.hifigan.hifigan.HiFiGan
    generator: !ref <hift>
    discriminator: !new:cosyvoice.hifigan.discriminator.MultipleDiscriminator
        mpd: !new:matcha.hifigan.models.MultiPeriodDiscriminator
        mrd: !new:cosyvoice.hifigan.discriminator.MultiResSpecDiscriminator
    mel_spec_transform: [
        !ref <mel_spec_transform1>
    ]
parquet_opener: !name:cosyvoice.dataset.processor.parquet_opener
tokenize: !name:cosyvoice.dataset.processor.tokenize
    get_tokenizer: !ref <get_tokenizer>
    allowed_special: !ref <allowed_special>
batch: !name:cosyvoice.dataset.processor.batch
    batch_type: 'dynamic'
    max_frames_in_batch: 2000
data_pipeline: [
    !ref <parquet_opener>,
    !ref <tokenize>,
    !ref <batch>,
]
train_conf:
    optim: adam
    optim_conf:
        lr: 1e-5 # a comment
    scheduler: constantlr
    grad_clip: 5
    save_per_step: -1
"""


def official_yaml() -> str:
    """An official file's shape: the model part as we write it, then what only training uses."""
    return write_yaml(full_config()) + TRAINING


def qwen(config: ModelConfig) -> dict[str, object]:
    return json.loads(write_qwen_config(config))


def read(text: str) -> ModelConfig:
    return parse_official_config(text, qwen(full_config()), "random-full")


def follow(text: str) -> Value:
    top = parse_hyper_yaml(text, "f")
    return References(top, "f").follow(top["x"])


def test_golden_configuration_is_read(golden_folder: Path) -> None:
    config = read_official_config(golden_folder)
    assert (config.generation, config.name) == (3, "cosyvoice3-tiny")
    assert (config.sample_rate_hz, config.token_rate_hz, config.chunk_tokens) == (24_000, 25, 25)
    assert (config.lm.hidden_size, config.lm.num_layers, config.lm.head_dim) == (128, 2, 64)
    assert (config.lm.num_heads, config.lm.num_kv_heads, config.lm.text_vocab_size) == (2, 1, 151_936)
    assert (config.lm.speech_token_size, config.lm.mix_ratio) == (729, (5, 15))
    assert config.lm.sampling.top_p == 0.8
    assert (config.flow.dit.dim, config.flow.dit.depth, config.flow.dit.static_chunk_frames) == (128, 2, 50)
    assert (config.flow.lookahead_channels, config.flow.lookahead_tokens) == (64, 3)
    assert config.flow.sigma_min == 1e-6
    assert (config.vocoder.base_channels, config.vocoder.f0_cond_channels) == (64, 32)
    assert config.vocoder.source_resblock_dilation_sizes == ((1, 3, 5),) * 3
    assert config.vocoder.source_phase == "frame"
    assert (config.samples_per_token, config.pronunciation) == (960, None)


def test_official_shape_with_training_sections_is_read() -> None:
    assert read(official_yaml()) == full_config()


@pytest.mark.parametrize("config", [full_config(), tiny_config()])
def test_written_configuration_reads_back(config: ModelConfig) -> None:
    own = dataclasses.replace(
        config,
        pronunciation="en-arpabet",
        token_text_ratio=(0.6, 8.0),
        default_voice="a: 'voice' # no comment",
        vocoder=dataclasses.replace(config.vocoder, source_phase="sample", nsf_sigma=1e-7),
        lm=dataclasses.replace(config.lm, head_dim=32),
    )
    for expected in (config, own):
        assert parse_official_config(write_yaml(expected), qwen(expected), expected.name) == expected
        assert from_json(ModelConfig, json.loads(json.dumps(to_json(expected))), "f") == expected


def test_values_are_data() -> None:
    text = "a: !new:x.Y\n    k: !ref <b>\nb: 'text'\nc: [1, 2.5, 1e-06, -3, True, null, '1']\nd: !name:m.f\n"
    assert parse_hyper_yaml(text, "f") == {
        "a": Call("new", "x.Y", {"k": Ref("<b>", 2)}, 1),
        "b": "text",
        "c": [1, 2.5, 1e-6, -3, True, None, "1"],
        "d": Call("name", "m.f", {}, 5),
    }


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("<a>", 6),
        ("<a> * <b>", 24),
        ("<a>*<b>", 24),
        ("<a> + <b> * 2 - 1", 13),
        ("<a> * 2 // <b>", 3),
        ("2 - 3 - 4", -5),
        ("<c> * 4", 2.0),
        ("<d>", 24),
    ],
)
def test_references_and_arithmetic(expression: str, value: int | float) -> None:
    assert follow(f"a: 6\nb: 4\nc: 0.5\nd: !ref <a> * <b>\nx: !ref {expression}\n") == value


@pytest.mark.parametrize(
    "expression",
    [
        "<a>**9**9",
        "<a> ** 2",
        "<a> / 2",
        "(<a>)",
        "<a> // 0",
        "<a> <a>",
        "-<a>",
        "<a> +",
        "",
        "__import__('os')",
        "<text> * 2",
        "<text> + <text>",
        "<flag> + 1",
        "<nothing>",
        "<a>.real",
        "<a[0]>",
        "1e400 * 2",
        "9999999999999999 * 2",
        "999999999999 * 999999999999",
        "<a>" + " * <a>" * 60,
        "<x>",
    ],
)
def test_other_expressions_are_refused(expression: str) -> None:
    with pytest.raises(ModelFolderError, match=r"^f: line \d+: "):
        follow(f"a: 6\ntext: 'ab'\nflag: True\nx: !ref {expression}\n")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: !apply:os.system ['touch marker']", "no code is run"),
        ("a: !apply:random.seed ['1']", "no code is run"),
        ("a: !apply:random.seed [1, 2]", "no code is run"),
        ("a: !apply:random.seed [!ref <a>]", "no code is run"),
        ("a: !apply:random.seed\n    k: 1", "no code is run"),
        ("a: !new:subprocess.Popen [['touch', 'marker']]", "named values only"),
        ("a: !new:", "no code is run"),
        ("a: !name:os;system", "no code is run"),
        ("a: !include:/etc/hostname", "no code is run"),
        ("a: !include:../x", "no code is run"),
        ("a: !applyref:os.system ['touch marker']", "no code is run"),
        ("a: !module:os", "no code is run"),
        ("a: !copy <b>", "no code is run"),
        ("a: !PLACEHOLDER", "no code is run"),
        ("a: !tuple (1, 2)", "no code is run"),
        ("a: !!python/object/apply:os.system ['touch marker']", "no code is run"),
        ("a: !!python/name:os.system", "no code is run"),
        ("a: !!binary aGk=", "no code is run"),
        ("a: !<tag:yaml.org,2002:python/module:os> ''", "no code is run"),
        ("%TAG ! tag:yaml.org,2002:python/\n---\na: !name:os.system ''", "directives"),
        ("a: &x [1]\nb: *x", "anchors and aliases"),
        ("a: *x", "anchors and aliases"),
        ("<<: {a: 1}", "plain word"),
        ("? [1]\n: 2", "plain word"),
        ("? !new:x.Y a\n: 2", "plain word"),
        ("a: 1\na: 2", "'a' stands twice"),
        ("a: !new:x.Y\n    k: 1\n    k: 2", "'k' stands twice"),
        ("a: " + "9" * 5_000, "digits"),
        ("a: 1\n---\nb: 2", "more than one document"),
        ("- 1", "must be a mapping"),
        ("", "is empty"),
        ("a: [1", "not valid YAML"),
        ("a: 'x", "not valid YAML"),
        ("a: \x07", "not valid YAML"),
        ("a: " + "[" * 3_000, "nested deeper"),
        ("a: " + "{b: " * 3_000, "nested deeper"),
        ("\n".join(" " * depth + "a:" for depth in range(100)), "nested deeper"),
        ("a: [" + "1," * 30_000 + "]", "more than"),
        ("a: '" + "x" * 70_000 + "'", "larger than 64 KiB"),
    ],
)
def test_everything_else_is_refused(
    text: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelFolderError, match=reason) as caught:
        parse_hyper_yaml(text, "cosyvoice3.yaml")
    assert caught.value.message.startswith("cosyvoice3.yaml: ")
    assert "\n" not in caught.value.message
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize(
    "text",
    [
        "a: " + "[" * 30_000,
        "a: " + "{a: " * 10_000,
        "a: [" + "1," * 30_000,
        "\n".join(f"k{index}: 1" for index in range(6_000)),
        "a: [" + "[1],\n" * 10_000,
    ],
)
def test_parsing_stops_after_a_bounded_number_of_events(text: str) -> None:
    builder = _Builder(text, "f")
    with pytest.raises(ModelFolderError):
        builder.document()
    assert builder.num_events <= MAX_EVENTS + 1


def test_references_cannot_multiply_work() -> None:
    # Followed naively, the last key of 30 that each name the one before eight times costs 8^30 steps.
    lines = ["k0: 1"] + [f"k{n}: !ref <k{n - 1}>" + f" * <k{n - 1}>" * 7 for n in range(1, 31)]
    top = parse_hyper_yaml("\n".join(lines), "f")
    references = References(top, "f")
    assert references.follow(top["k30"]) == 1
    assert references.num_followed == 30
    # Lists that name lists are shared, not copied.
    lines = ["k0: [1, 2]"] + [f"k{n}: [!ref <k{n - 1}>, !ref <k{n - 1}>]" for n in range(1, 200)]
    top = parse_hyper_yaml("\n".join(lines), "f")
    references = References(top, "f")
    assert isinstance(references.follow(top["k199"]), list)
    assert references.num_followed == 0


@pytest.mark.parametrize("length", [3, 100])
def test_circular_references_are_refused(length: int) -> None:
    text = "\n".join(f"k{n}: !ref <k{(n + 1) % length}>" for n in range(length))
    with pytest.raises(ModelFolderError, match="in a circle"):
        follow(text + "\nx: !ref <k0>")


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("chunk_size: 25", "chunk_size: 25\nsurprise: 1", "unknown key 'surprise'"),
        (
            "    lsm_weight: 0",
            "    lsm_weight: 0\n    beam: 2",
            "unknown key 'beam' of cosyvoice.llm.llm.CosyVoice3LM",
        ),
        ("!new:cosyvoice.flow.DiT.dit.DiT", "!new:os.DiT", "unknown class 'os.DiT'"),
        ("parquet_opener: !name:cosyvoice", "parquet_opener: !name:evil", "unknown class 'evil"),
        ("CosyVoice3LM", "Qwen2LM", "CosyVoice 2 model; its file is called cosyvoice2.yaml"),
        ("hift: !new", "feat_extractor2: !new", "unknown key 'feat_extractor2'"),
        ("chunk_size: 25\n", "", "missing key 'chunk_size'"),
        ("            depth: 22\n", "", "flow.decoder.estimator.depth is missing"),
        ("depth: 22", "depth: 1000000000", "depth must be 1 to 256"),
        ("depth: 22", "depth: -1", "depth must be"),
        ("depth: 22", "depth: '22'", "depth must be a whole number"),
        ("depth: 22", "depth: 22.0", "depth must be a whole number"),
        ("depth: 22", "depth: True", "depth must be a whole number"),
        ("heads: 16", "heads: 0", "heads must be"),
        ("dim: 1024", "dim: 1023", "dim must be a multiple of 16"),
        ("sample_rate: 24000", "sample_rate: 0", "sampling_rate must be"),
        ("sample_rate: 24000", "sample_rate: 1000000000", "sampling_rate must be"),
        ("sample_rate: 24000", "sample_rate: 16000", "do not multiply to sample_rate"),
        ("sample_rate: 24000", "sample_rate: .nan", "must be a whole number"),
        ("vocab_size: 6561", "vocab_size: 729", "vocab_size differ"),
        (
            "static_chunk_size: !ref <chunk_size> * <token_mel_ratio>",
            "static_chunk_size: 25",
            "static_chunk_size is not",
        ),
        ("solver: 'euler'", "solver: 'heun'", "solver must be 'euler'"),
        ("base_channels: 512", "base_channels: 500", "base_channels must be"),
        ("upsample_rates: [8, 5, 3]", "upsample_rates: [8, 5]", "differ in number"),
        ("upsample_rates: [8, 5, 3]", "upsample_rates: 8", "must be a short list"),
        ("mix_ratio: [5, 15]", "mix_ratio: [5]", "mix_ratio must be two"),
        ("top_p: 0.8", "top_p: 2", "top_p must be"),
        ("llm_input_size: 896\n", "llm_input_size: 1024\n", "hidden_size differs"),
        ("num_class: 1", "num_class: 2", "num_class must be 1"),
        ("hop_len: 4", "hop_len: 4\n        extra: 1", "hift.istft_params.extra is an unknown key"),
        ("lrelu_slope: 0.1", "lrelu_slope: 0.1\n    source_phase: x", "source_phase must be"),
    ],
)
def test_wrong_configurations_are_refused_by_name(old: str, new: str, reason: str) -> None:
    text = official_yaml()
    assert old in text
    with pytest.raises(ModelFolderError, match=reason) as caught:
        read(text.replace(old, new))
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_size": 0}, "hidden_size"),
        ({"num_attention_heads": 0}, "must divide hidden_size"),
        ({"num_key_value_heads": 3}, "must divide"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"vocab_size": "many"}, "vocab_size must be a whole number"),
        ({"rope_theta": None}, "rope_theta must be a number"),
        ({"model_type": "llama"}, "model_type"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["sliding_attention"]}, "layer_types"),
        ({"auto_map": {"AutoModel": "evil.py"}}, "unknown key 'auto_map'"),
    ],
)
def test_wrong_text_model_configurations_are_refused(
    changes: dict[str, object], reason: str, tmp_path: Path
) -> None:
    (tmp_path / "CosyVoice-BlankEN").mkdir()
    (tmp_path / "cosyvoice3.yaml").write_text(official_yaml())
    (tmp_path / "CosyVoice-BlankEN" / "config.json").write_text(json.dumps(qwen(full_config()) | changes))
    with pytest.raises(ModelFolderError, match=reason):
        read_official_config(tmp_path)


PIECES = [
    "!new:",
    "!ref <",
    "*",
    "&a ",
    ": ",
    "[",
    "{",
    "\n",
    '"',
    "1e999",
    "!!python/x ",
    "%",
    "-",
    "\0",
    "null",
    "\ud83d",
]


def refusal(text: str) -> str | None:
    try:
        parse_official_config(text, qwen(tiny_config()), "x")
    except ModelFolderError as error:
        return error.message
    return None


@settings(max_examples=60, deadline=None)
@given(
    edits=st.lists(
        st.tuples(st.integers(0, 4_000), st.integers(0, 30), st.sampled_from(PIECES)), min_size=1, max_size=4
    )
)
def test_edited_files_are_read_or_refused_with_one_line(edits: list[tuple[int, int, str]]) -> None:
    text = write_yaml(tiny_config())
    for position, removed, piece in edits:
        text = text[:position] + piece + text[position + removed :]
    message = refusal(text)
    if message is not None:
        assert message.startswith(("cosyvoice3.yaml: ", "CosyVoice-BlankEN/config.json: "))
        assert "\n" not in message


def test_newer_spelling_of_rope_theta_is_read() -> None:
    values = qwen(full_config())
    values["rope_parameters"] = {"rope_type": "default", "rope_theta": values.pop("rope_theta")}
    values["layer_types"] = ["full_attention"] * 24
    assert parse_official_config(official_yaml(), values, "random-full") == full_config()


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        (("lm", "colour"), 1, "unknown key 'config.lm.colour'"),
        (("colour",), 1, "unknown key 'config.colour'"),
        (("lm", "num_layers"), "24", "must be of type int"),
        (("lm", "num_layers"), True, "must be of type int"),
        (("lm", "rope_theta"), float("nan"), "must be of type float"),
        (("lm", "mix_ratio"), [5], "must be a short list"),
        (("flow", "dit"), 3, "must be an object"),
        (("pronunciation",), 3, "must be of type str"),
    ],
)
def test_wrong_json_configurations_are_refused(path: tuple[str, ...], value: object, reason: str) -> None:
    document = json.loads(json.dumps(to_json(tiny_config())))
    place = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(ModelFolderError, match=reason):
        from_json(ModelConfig, document, "vivace.json")


def test_missing_json_keys_are_named() -> None:
    document = to_json(tiny_config())
    del document["lm"]
    with pytest.raises(ModelFolderError, match=r"config\.lm is missing"):
        from_json(ModelConfig, document, "vivace.json")


def test_impossible_sizes_are_refused_in_both_formats() -> None:
    config = tiny_config()
    check_config(config, "vivace.json")
    with pytest.raises(ModelFolderError, match=r"^vivace\.json: generation must be 1, 2 or 3"):
        check_config(dataclasses.replace(config, generation=4), "vivace.json")
    with pytest.raises(ModelFolderError, match=r"^vivace\.json: generation does not fit"):
        check_config(dataclasses.replace(config, generation=2), "vivace.json")
