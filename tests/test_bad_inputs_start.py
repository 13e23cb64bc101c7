"""Rows C and E of the bad inputs: the command line and the environment.

Exit codes and lines of other wrong options are tested in ``test_cli.py`` and ``test_server_run.py``.
"""

import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import httpx
import pytest

from tests.helpers import noise_voice, quiet_engine
from tests.server_helpers import FakeService, LoopbackServer, post
from vivace import SynthesisRequest, VoiceRegistry
from vivace.random_checkpoint import tiny_config

pytestmark = pytest.mark.skipif(os.name != "posix", reason="POSIX environments")
SCRIPT = Path(sysconfig.get_path("scripts")) / "vivace"


def _run(*arguments, cwd, environment=None, stdin=None, limit=None):
    """The command in a process of its own."""
    command = [sys.executable, "-m", "vivace.cli", *map(str, arguments)]
    if limit:
        command = ["bash", "-c", f'ulimit {limit}; exec "$@"', "bash", *command]
    variables = {**os.environ, "VIVACE_THREADS": "1", "VIVACE_VOICES": str(cwd)}
    for name, value in (environment or {}).items():
        variables.pop(name, None)
        if value is not None:
            variables[name] = value
    return subprocess.run(command, cwd=cwd, env=variables, input=stdin, capture_output=True, timeout=120)


# -- C: command line -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [(), ("serve", "--port"), ("say", "Hi.", "--speed")])
def test_C1_usage(vivace, arguments):
    code, lines, errors = vivace(*arguments)
    assert code == 2
    assert lines or errors


def test_C1_of_an_option_given_twice_the_last_one_counts(vivace, random_model_folder, tmp_path):
    sizes = []
    for speeds in ((1, 2), (2, 1)):
        options = [word for speed in speeds for word in ("--speed", speed)]
        assert vivace("say", "Hi.", "-m", random_model_folder, "-o", tmp_path / "x.wav", *options)[0] == 0
        sizes.append((tmp_path / "x.wav").stat().st_size)
    assert sizes[0] < 0.7 * sizes[1]


@pytest.mark.parametrize(
    "model",
    ["https://example.org/x", "owner/name", "-x", "a b", "$(touch marker)", "`touch marker`", "a\nb", ""],
)
def test_C3_folders_that_are_none(vivace, tmp_path, model):
    code, _, errors = vivace("say", "Hi.", f"--model={model}")
    assert (code, len(errors)) == (2, 1)
    assert not (tmp_path / "marker").exists()


def test_C3_a_folder_with_a_strange_name_works(vivace, random_model_folder, tmp_path):
    strange = tmp_path / 'it\'s "a" model; $HOME\nnew line'
    strange.symlink_to(random_model_folder)
    assert vivace("say", "Hi.", "-m", strange, "-o", tmp_path / "x.wav")[0] == 0


@pytest.mark.parametrize("device", ["cuda:99", "cuda:-1", "cuda:x", "cpu:x", "", "tpu"])
def test_C5_devices_that_are_none(vivace, random_model_folder, device):
    code, _, errors = vivace("say", "Hi.", "-m", random_model_folder, "--device", device)
    assert (code, len(errors)) == (2, 1)


@pytest.mark.parametrize("options", [("--max-batch", "0"), ("--gpu-memory", "nan")])
def test_C5_options_that_there_are_not(vivace, options):
    assert vivace("serve", *options)[0] == 2


@pytest.mark.parametrize("speed", ["nan", "inf", "-1", "0", "1e9"])
def test_C7_speeds(vivace, random_model_folder, tmp_path, speed):
    code, _, errors = vivace("say", "Hi.", "-m", random_model_folder, "-o", "x.wav", f"--speed={speed}")
    assert (code, len(errors)) == (1, 1)
    assert not (tmp_path / "x.wav").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="has no device that is always full")
@pytest.mark.parametrize("name", ["full.wav", "full.flac", "full.ogg"])
def test_C7_a_full_disk_is_said_in_one_line(vivace, random_model_folder, tmp_path, name):
    (tmp_path / name).symlink_to("/dev/full")
    code, _, errors = vivace("say", "Hi.", "-m", random_model_folder, "-o", name)
    assert (code, len(errors)) == (1, 1)
    assert not os.path.lexists(tmp_path / name)


def test_C7_a_closed_pipe_is_no_traceback(random_model_folder, tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "vivace.cli", "voice", "list", "-m", str(random_model_folder)]
    with subprocess.Popen(command, cwd=tmp_path, stdout=writer, stderr=subprocess.PIPE) as process:
        os.close(writer)
        assert b"Traceback" not in process.stderr.read()
    assert process.returncode != 0


# -- E: environment --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("devices", ["", "99,garbage"])
def test_E1_no_device_of_that_kind(random_model_folder, tmp_path, devices):
    done = _run(
        *("say", "Hi.", "-m", random_model_folder, "--device", "cuda"),
        cwd=tmp_path,
        environment={"CUDA_VISIBLE_DEVICES": devices},
    )
    assert done.returncode == 2
    assert done.stderr.startswith(b"vivace: ")
    assert done.stderr.count(b"\n") == 1


def test_E2_E3_E6_E7_the_environment_does_not_change_the_audio(
    vivace,
    random_model_folder,
    tmp_path,
):
    """Locale, home, temporary folder, time zone, proxies that lead nowhere, nonsense for libraries."""
    poor = {
        "LANG": "C",
        "LC_ALL": "C",
        "PYTHONIOENCODING": "ascii",
        "PYTHONUTF8": "0",
        "HOME": None,
        "XDG_CACHE_HOME": None,
        "TMPDIR": "/nowhere",
        "TZ": "Pacific/Kiritimati",
        "OMP_NUM_THREADS": "0",
        "HF_HUB_OFFLINE": "1",
        "https_proxy": "http://127.0.0.1:9",
    }
    text = "Grüße, Ωmega 你好."
    options = ("-m", random_model_folder, "--json", "-o")
    assert vivace("say", "-", *options, "plain.wav", stdin=text)[0] == 0
    done = _run("say", "-", *options, "poor.wav", cwd=tmp_path, environment=poor, stdin=text.encode())
    assert done.returncode == 0
    assert b"Traceback" not in done.stderr
    assert (tmp_path / "plain.wav").read_bytes() == (tmp_path / "poor.wav").read_bytes()


def test_E4_E8_few_open_files_and_secrets_in_the_environment(tmp_path):
    """The server starts with smaller limits, and says nothing of what its environment holds."""
    secret, key = "canary-of-the-cloud", "canary-of-the-server"
    variables = {
        **os.environ,
        "VIVACE_VOICES": str(tmp_path),
        "VIVACE_THREADS": "1",
        "AWS_SECRET_ACCESS_KEY": secret,
        "VIVACE_API_KEYS": key,
    }
    command = [
        "bash", "-c", 'ulimit -n 64; exec "$@"', "bash", sys.executable, "-m", "vivace.cli", "serve", "--port", "0",
    ]  # fmt: skip
    with subprocess.Popen(
        command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            url = re.search(r"http://127\.0\.0\.1:\d+/", process.stdout.readline()).group()
            with httpx.Client(base_url=url, timeout=60, verify=False) as client:
                answers = [
                    client.post("/v1/audio/speech", json={"input": "Hi."}, headers=headers)
                    for headers in ({}, {"xi-api-key": key + "x"}, {"xi-api-key": key})
                ]
                answers.append(client.get("/metrics", headers={"xi-api-key": key}))
            assert [answer.status_code for answer in answers] == [401, 401, 200, 200]
            environments = [
                Path(f"/proc/{pid}/environ").read_bytes()
                for path in Path(f"/proc/{process.pid}/task").glob("*/children")
                for pid in path.read_text().split()
            ]
        finally:
            process.send_signal(signal.SIGTERM)
            out, errors = process.communicate(timeout=60)
    seen = "".join([out, errors, *(str(answer.headers) for answer in answers), answers[3].text])
    for word in (secret, key):
        assert word not in seen
        assert not any(word.encode() in environment for environment in environments)


@pytest.mark.skipif(not SCRIPT.exists(), reason="is not installed as a command")
def test_E5_the_command_imports_nothing_from_the_folder_it_is_started_in(tmp_path):
    for name in ("torch", "yaml", "typer", "sitecustomize", "vivace"):
        (tmp_path / f"{name}.py").write_text("open('marker', 'w').close()\n")
    done = subprocess.run([SCRIPT, "doctor"], cwd=tmp_path, capture_output=True, timeout=120)
    assert done.returncode == 0
    assert not (tmp_path / "marker").exists()


def test_E6_speaking_and_serving_open_no_connection(random_model_folder, monkeypatch):
    """All of the network that there is, is the server's own socket."""
    import socket

    engine = quiet_engine(random_model_folder, num_steps=2, token_text_ratio=(2.0, 2.6))
    asked = []
    monkeypatch.setattr(socket.socket, "connect", lambda self, address: asked.append(address))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **_: asked.append(arguments))
    engine.synthesize(SynthesisRequest("Hi.", voice=noise_voice(engine._config)))
    engine.close()
    assert asked == []


def test_E6_no_library_reports_our_use_to_its_maker(tmp_path):
    """ONNX Runtime 1.32 for Linux would: it looks up its maker's server, and leaves a mark of the machine at home."""
    code = (
        "from vivace.engine.loading import model_folder\n"
        "from vivace.models.prompt_encoders import SpeakerEncoder\n"
        "SpeakerEncoder(model_folder('mini') / 'campplus.onnx')\n"
        "from vivace.doctor import examine\n"
        "assert examine().to_dict()['machine']['onnx_providers']\n"
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ORT_", "XDG_"))}
    environment = {**kept, "HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=60)
    assert not list(tmp_path.rglob("*onnxruntime*"))


@pytest.mark.parametrize("now", [0.0, 2.0**31 + 5, 2.0**33])
def test_E7_any_date_will_do(tmp_path, monkeypatch, now):
    """1970, behind 2038, far away: times are measured with a clock that nobody sets."""
    with LoopbackServer(lambda: FakeService(tmp_path)) as server:
        monkeypatch.setattr(time, "time", lambda: now)
        answer = server.exchange(post({"input": "Hi."}, headers=("Connection: close",)))
        assert answer.startswith(b"HTTP/1.1 200")
        assert answer.endswith(b"0\r\n\r\n")
        VoiceRegistry(tmp_path).add(noise_voice(tiny_config()))
        metrics = server.exchange(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert b"vivace_ttfb_seconds_count 1.0" in metrics


CHECKS = """
from vivace import Engine, SynthesisRequest, VivaceError
engine = Engine.open({folder!r}, warm_up=False)
wrong = [
    SynthesisRequest(" "), SynthesisRequest("<|endofprompt|>"), SynthesisRequest("Hi.", speed=0.0),
    SynthesisRequest("Hi.", voice="nobody"), SynthesisRequest("Hi.", instruction="<|im_end|>"), SynthesisRequest(5),
]
for request in wrong:
    try:
        engine.synthesize(request)
    except VivaceError as error:
        print(error.code)
try:
    engine.make_voice(b"RIFF", "")
except VivaceError as error:
    print(error.code)
"""


def test_E9_no_check_is_an_assertion(random_model_folder, tmp_path):
    """The same answers with ``python -O``, which leaves assertions out."""
    program = CHECKS.format(folder=str(random_model_folder))
    done = subprocess.run(
        [sys.executable, "-O", "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.split() == [
        *("empty_input", "special_token_not_allowed", "value_out_of_range", "voice_not_found"),
        *("special_token_not_allowed", "invalid_type", "unsupported_media_type"),
    ]
