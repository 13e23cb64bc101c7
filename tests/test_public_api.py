"""The public names: they exist, say what they are, and cost nothing until they are used."""

import inspect
import subprocess
import sys

import pytest

import vivace
from vivace import config, environment
from vivace.engine.request import check_request


def test_names_are_sorted_and_unique():
    assert sorted(set(vivace.__all__)) == vivace.__all__


@pytest.mark.parametrize("name", vivace.__all__)
def test_every_name_imports_and_has_a_docstring(name):
    thing = getattr(vivace, name)
    assert inspect.isclass(thing)
    # A dataclass without one gets its signature as docstring.
    assert thing.__doc__
    assert not thing.__doc__.startswith(f"{name}(")


@pytest.mark.parametrize("name", ["Engine", "AsyncEngine", "EngineRouter", "SpeechStream", "VoiceRegistry"])
def test_public_methods_have_docstrings(name):
    for method, thing in vars(getattr(vivace, name)).items():
        if not method.startswith("_") and callable(thing):
            assert thing.__doc__, f"{name}.{method}"


OF_STREAMS = {
    *("submit", "submit_transform", "submit_tokens", "push_text", "finish_text", "pull_all_text", "step"),
    *("run_forever", "take", "next_chunk", "cancel", "abort", "listen", "use_device", "end_stalled_after"),
    *("start_trace", "stop_trace"),
}
"""What of an engine is for streams, servers and benchmarks."""


def public(kind: type) -> dict[str, object]:
    return {name: thing for name, thing in vars(kind).items() if not name.startswith("_")}


@pytest.mark.parametrize(
    ("name", "own"), [("AsyncEngine", {"is_running"}), ("EngineRouter", {"is_running", "choose"})]
)
def test_every_engine_has_the_same_methods(name, own):
    """With the same parameters, but that streamed text comes apart where it is asynchronous."""
    engine, other = public(vivace.Engine), public(getattr(vivace, name))
    assert engine.keys() >= OF_STREAMS
    assert other.keys() - own == engine.keys() - OF_STREAMS
    for method in other.keys() - own - {"open", "stream"}:
        if inspect.isfunction(engine[method]):
            assert [*inspect.signature(other[method]).parameters] == [
                *inspect.signature(engine[method]).parameters
            ]


def test_waiting_threads_sleep_soon_in_programs_too(monkeypatch):
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    assert vivace.Engine is not None
    assert environment.engine_environment()["GOMP_SPINCOUNT"] == "1000"
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert vivace.AsyncEngine is not None
    assert environment.engine_environment()["GOMP_SPINCOUNT"] == "7"


def test_unknown_name():
    with pytest.raises(AttributeError, match="nothing_like_this"):
        _ = vivace.nothing_like_this


@pytest.mark.parametrize("module", ["vivace", "vivace.cli"])
def test_importing_loads_no_tensor_library(module):
    code = f"import sys, {module}; print(sorted({{'torch', 'numpy', 'onnxruntime', 'soundfile'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


LOOKS = (
    ("--help",),
    ("--version",),
    ("say", "Hi.", "--loud"),
    ("voice", "list"),
    ("voice", "remove", "nobody"),
)


@pytest.mark.parametrize("action", ["import vivace.server.run", *(f"run({words})" for words in LOOKS)])
def test_what_runs_no_model_loads_no_tensor_library(action, tmp_path, monkeypatch):
    """A look at the voices comes at once, and the server's own process stays small."""
    monkeypatch.setenv("VIVACE_VOICES", str(tmp_path))
    code = f"""
import contextlib, io, sys
def run(words):
    from vivace import cli
    sys.argv = ["vivace", *words]
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as printed:
        cli.main()
    assert words != ("voice", "list") or "heart" in printed.getvalue()
{action}
print(sorted({{"torch", "onnxruntime"}} & set(sys.modules)))"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("request_", ["Hello.", None, {"text": "Hello."}])
def test_a_text_in_place_of_a_request_is_an_error_with_advice(request_):
    with pytest.raises(vivace.InvalidRequestError, match=r"SynthesisRequest\(text\)") as caught:
        check_request(request_, config.Limits())
    assert (caught.value.code, caught.value.param) == ("invalid_type", "request")


def test_every_error_says_its_status_and_code():
    errors = [getattr(vivace, name) for name in vivace.__all__ if name.endswith("Error")]
    for kind in errors:
        assert issubclass(kind, vivace.VivaceError)
        error = kind("a message")
        assert (error.message, str(error)) == ("a message", "a message")
        assert error.code == kind.default_code
        assert 400 <= kind.http_status < 600
