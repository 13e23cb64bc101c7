"""Kernels are found and compiled without a GPU, under the keys that launches look for; no start can fail for it.

The complete matrix of models and GPUs: ``python -m benchmarks.kernels.compile`` (eight minutes of processor time).
"""

import io
import json
import logging
import os
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vivace.config import Limits
from vivace.engine import compile_ahead as module
from vivace.engine import kernel_compiler
from vivace.engine.compile_ahead import CompileAhead, CompileReport, compile_ahead, engine_kind
from vivace.engine.device_stages import DeviceStages
from vivace.engine.kernel_index import END, index_file, is_complete, write_index
from vivace.engine.kernel_plan import EngineKind
from vivace.kernels.gpu import Gpu, gpu_of, num_multiprocessors, stands_for
from vivace.random_checkpoint import tiny_config

ROOT = Path(__file__).parent.parent
KIND = EngineKind(tiny_config(), torch.bfloat16, Gpu((9, 0), 132), 2)


def run_module(name, *arguments, cache):
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TRITON_")}
    environment |= {"VIVACE_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", name, *arguments], capture_output=True, text=True, env=environment, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def probe(tmp_path_factory):
    pytest.importorskip("triton")
    folder = tmp_path_factory.mktemp("caches")
    return run_module("tests.compile_probe", str(folder), cache=folder)


# -- which kernels, and under which keys ------------------------------------------------------------------------------


def test_all_stages_are_planned(probe):
    third, second = set(probe["names"]["3"]), set(probe["names"]["2"])
    assert {"qkv_kernel", "attention_kernel", "output_kernel", "position_kernel"} <= third  # the flow
    assert {"conv_kernel", "phases_kernel", "inverse_kernel"} <= third  # the vocoder
    lm = {"attend_kernel", "norm_linear_kernel", "draw_kernel", "prompt_attend_kernel", "report_kernel"}
    assert lm <= third & second
    assert {"attend_pages_kernel", "join_context_kernel", "layer_norm_mish_kernel"} <= second


def test_keys_are_those_of_tensors_with_memory(probe):
    assert probe["same_keys"] == {"2": True, "3": True}


def test_a_launch_finds_what_was_compiled(probe):
    assert probe["hits"] == [True]


def test_so_does_the_module_that_launches_it(probe):
    assert probe["launcher"] == [True]


def test_every_gpu_has_kernels_of_its_own(probe):
    assert probe["shared_keys"] == 0
    for compiled in probe["shared_bytes"].values():
        assert set(compiled) == {"silu_mul_kernel", "prompt_attend_kernel"}
        assert 0 < compiled["prompt_attend_kernel"] <= Gpu((8, 6)).block_bytes


def test_turing_needs_none(probe):
    assert probe["turing"] == 0


def test_what_is_there_is_not_compiled_again(probe):
    assert probe["twice"] == [True, [None, None], True, []]


# -- children that fail -----------------------------------------------------------------------------------------------


def test_a_kernel_that_fails_hangs_or_crashes_concerns_no_other(tmp_path):
    told = run_module("tests.pool_probe", cache=tmp_path)
    assert told["outcomes"] == {
        "good": ["good 7", None, True],
        "bad": [None, "ValueError: no such tile", True],
        "slow": [None, "took more than 0.5 s", False],
        "broken": [None, "ended early", False],
    }
    assert told["heard"] == 4
    assert told["stopped"]
    assert told["is_empty"]
    assert not told["torch"]


def command(text):
    return (sys.executable, "-c", text)


LINE = '{"name": "a", "cpu_seconds": 1.5, "error": null}'
FAILED = '{"name": "b", "cpu_seconds": 0.5, "error": "too large"}'
ENDED = json.dumps(END)


def test_what_a_process_says_is_heard_to_its_end():
    ahead = CompileAhead(KIND, 2, command(f"input(); print('''{LINE}\\nwarning\\n7\\n{FAILED}\\n{ENDED}''')"))
    report = ahead.wait()
    assert report.is_complete
    assert (report.kernels, report.cpu_seconds, report.slowest) == (2, 2.0, ("a", 1.5))
    assert report.failed == (("b", "too large"),)
    ahead.close()


def test_what_it_has_started_is_not_waited_for_and_ends_with_it():
    """A child that keeps the output open, as libraries have them, and an end that takes its time."""
    text = f"""
import json, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(json.dumps({{"name": "a", "cpu_seconds": 1.5, "error": None, "child": child.pid}}))
print({ENDED!r}, flush=True)
time.sleep(600)
"""
    ahead = CompileAhead(KIND, 2, command(text))
    assert ahead.wait(silence_s=600).is_complete
    state = Path(f"/proc/{json.loads(ahead._data.splitlines()[0])['child']}/stat")
    deadline = time.monotonic() + 30
    while state.exists() and state.read_text().split()[2] not in "ZX":
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    "text",
    [
        "raise SystemExit(3)",
        f"import sys, time; print('''{LINE}''', flush=True); time.sleep(60)",
        f"print('''{LINE}\\n{LINE[:9]}''', end='', flush=True); import os; os.abort()",
    ],
)
def test_a_process_that_fails_or_hangs_is_given_up(text):
    ahead = CompileAhead(KIND, 2, command(text))
    report = ahead.wait(silence_s=1.0)
    assert not report.is_complete
    assert report.kernels <= 1
    assert ahead._process.returncode is not None


def test_whoever_waits_for_its_turn_says_so(tmp_path, monkeypatch):
    """Or it would be taken for lost while another engine's process compiles the same."""
    monkeypatch.setattr(kernel_compiler, "_TURN_S", 0.001)
    lock, out = tmp_path / "kernels.lock", io.StringIO()
    with kernel_compiler._alone(lock, io.StringIO(), None):
        monkeypatch.setattr(kernel_compiler, "_TURNS", 3)
        with pytest.raises(InterruptedError), kernel_compiler._alone(lock, out, None):
            pass
        assert [json.loads(line) for line in out.getvalue().splitlines()] == [{}] * 3
        monkeypatch.setattr(kernel_compiler, "_TURNS", 10**9)
        stop, other = os.pipe()
        os.close(other)  # its engine has gone
        with pytest.raises(InterruptedError), kernel_compiler._alone(lock, out, stop):
            pass
        os.close(stop)
    with kernel_compiler._alone(lock, out, None):
        assert len(out.getvalue().splitlines()) == 4


def test_it_ends_once(monkeypatch):
    """Its process number may be somebody else's the second time."""
    ahead = CompileAhead(KIND, 2, command("input()"))
    ahead.close()
    monkeypatch.setattr(os, "killpg", lambda *_: pytest.fail("killed again"))
    ahead.close()


def test_a_slow_machine_has_time_for_each_kernel(monkeypatch):
    """Where nobody waits for an engine, a kernel that takes long is not taken for a lost process."""
    given = []
    report = CompileReport(0, 0.0, ("", 0.0), (), is_complete=True, folder="")
    monkeypatch.setattr(CompileAhead, "__init__", lambda self, kind, workers: None)
    monkeypatch.setattr(CompileAhead, "wait", lambda self, silence_s: given.append(silence_s) or report)
    monkeypatch.setattr(CompileAhead, "close", lambda self: None)
    assert module.compile_now(KIND) is report
    assert given[0] > kernel_compiler.KERNEL_S


def test_it_ends_with_the_engine():
    ahead = CompileAhead(KIND, 2, command("import sys; sys.stdin.read()"))
    started = time.monotonic()
    ahead.close()
    assert time.monotonic() - started < 30
    assert ahead._process.returncode == 0


# -- when it starts ---------------------------------------------------------------------------------------------------


@pytest.fixture
def started(monkeypatch, tmp_path):
    """How often a process was started."""
    calls = []
    monkeypatch.setenv("VIVACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setattr(module, "num_workers", lambda: 4)
    monkeypatch.setattr(module, "can_launch", lambda: True)
    monkeypatch.setattr(CompileAhead, "__init__", lambda self, kind, workers: calls.append((kind, workers)))
    return calls


def test_nothing_starts_when_the_cache_is_full(started, tmp_path):
    pytest.importorskip("triton")
    assert CompileAhead.start(KIND) is not None
    kernel = tmp_path / "kernel"
    kernel.touch()
    write_index(index_file(KIND, tmp_path / "cache" / "triton"), [str(kernel)])
    assert CompileAhead.start(KIND) is None
    other = EngineKind(KIND.config, KIND.dtype, KIND.gpu, max_streams=8)
    assert CompileAhead.start(other) is not None
    kernel.unlink()
    assert CompileAhead.start(KIND) is not None
    assert [kind.max_streams for kind, _ in started] == [2, 8, 2]


def test_nothing_starts_without_cores_or_for_the_plain_way(started, monkeypatch):
    assert CompileAhead.start(None) is None
    with compile_ahead(ROOT, "cpu", torch.float32, 2, deterministic=False):
        pass
    with compile_ahead(ROOT / "nothing", "cuda:99", torch.float32, 2, deterministic=False):
        pass
    monkeypatch.setattr(module, "num_workers", lambda: 1)
    assert CompileAhead.start(KIND) is None
    monkeypatch.setattr(module, "num_workers", lambda: 4)
    monkeypatch.setattr(module, "can_launch", lambda: False)
    assert CompileAhead.start(KIND) is None
    assert not started


@pytest.mark.parametrize("fails", [False, True])
def test_the_rest_is_waited_for_once_the_weights_are_there(monkeypatch, fails):
    """And by nobody where they could not be read."""
    told = []
    ahead = SimpleNamespace(wait=lambda: told.append("wait"), close=lambda: told.append("close"))
    monkeypatch.setattr(module, "resolve_device", torch.device)
    monkeypatch.setattr(module, "load_config", lambda folder: KIND.config)
    monkeypatch.setattr(module, "engine_kind", lambda *arguments, **options: KIND)
    monkeypatch.setattr(CompileAhead, "start", lambda kind: ahead)
    with (
        pytest.raises(OSError, match="disk") if fails else nullcontext(),
        compile_ahead(ROOT, "cuda:0", torch.bfloat16, 2, deterministic=False),
    ):
        told.append("load")
        if fails:
            raise OSError("disk")
    assert told == (["load", "close"] if fails else ["load", "wait", "close"])


def test_a_folder_that_cannot_be_written_costs_one_warning(started, monkeypatch, tmp_path, caplog):
    knobs = pytest.importorskip("triton").knobs
    before = knobs.cache.dir
    (tmp_path / "file").touch()
    monkeypatch.setenv("VIVACE_CACHE", str(tmp_path / "file"))
    monkeypatch.setenv(
        "TRITON_CACHE_DIR", before
    )  # set anew by Triton's knob: the test ends with it as it was
    monkeypatch.delenv("TRITON_CACHE_DIR")
    try:
        with caplog.at_level(logging.WARNING):
            assert CompileAhead.start(KIND) is not None
        assert len([r for r in caplog.records if "cannot be written" in r.message]) == 1
        own = Path(knobs.cache.dir)
        assert own.is_dir()
        assert tmp_path not in own.parents
        write_index(index_file(KIND, own), [])  # to nobody's harm
        assert CompileAhead.start(KIND) is not None
    finally:
        knobs.cache.dir = before


def test_damaged_indexes_are_no_indexes(tmp_path):
    index = tmp_path / "kernels-0.json"
    for text in ("", "{", "[1]", '{"a": 1}', "null"):
        index.write_text(text)
        assert not is_complete(index)
    index.write_text("[]")
    assert is_complete(index)


def test_what_an_engine_needs_kernels_for():
    device, config = torch.device("meta"), tiny_config()
    assert gpu_of(device) is None
    with stands_for(Gpu((9, 0), 132)):
        assert num_multiprocessors(device) == 132
        assert engine_kind(config, device, torch.bfloat16, 2, deterministic=False) == KIND
        assert engine_kind(config, device, torch.int8, 2, deterministic=False) is None
    with stands_for(Gpu((7, 5), 40)):
        assert engine_kind(config, device, torch.float16, 2, deterministic=False) is None
    assert engine_kind(config, torch.device("cpu"), torch.float32, 2, deterministic=False) is None


# -- where there are no kernels ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("capability", "why"), [((7, 5), "no fast kernels"), ((9, 0), "cannot launch")])
def test_the_plain_way_is_said_once(monkeypatch, caplog, capability, why):
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: capability)
    with caplog.at_level(logging.WARNING):
        assert DeviceStages.open(SimpleNamespace(device=torch.device("cuda", 0)), Limits()) is None
    (record,) = caplog.records
    assert why in record.message


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command_compiles_for_a_gpu_that_is_not_here(vivace, monkeypatch):
    kinds = []

    def compile_now(kind):
        kinds.append(kind)
        failed = (("b", "too\nlarge"),) if kind.max_streams == 3 else ()
        return CompileReport(2, 2.0, ("a", 1.5), failed, True, "/cache")

    monkeypatch.setattr(module, "compile_now", compile_now)
    code, lines, _ = vivace("compile", "mini", "--gpu", "9.0:132", "--dtype", "bfloat16", "--json")
    assert code == 0
    assert lines[0] == "2 kernels compiled (2 s of processor time); they lie in /cache"
    assert json.loads(lines[-1])["kernels"] == 2
    code, lines, _ = vivace("compile", "mini", "--gpu", "8.6:82", "--max-streams", "3", "--deterministic")
    assert code == 1
    assert lines[0] == "b: too large"
    first, second = kinds
    assert (first.gpu, first.dtype, first.max_streams) == (Gpu((9, 0), 132), torch.bfloat16, 64)
    assert (second.gpu, second.deterministic) == (Gpu((8, 6), 82), True)


def test_the_command_says_what_it_cannot_compile(vivace, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, lines, _ = vivace("compile", "mini", "--gpu", "7.5:40")
    assert code == 0
    assert "plain way" in lines[0]
    for options in ((), ("--gpu", "9.0"), ("--gpu", "hopper")):
        code, _, errors = vivace("compile", "mini", *options)
        assert code == 1
        assert "9.0:132" in str(errors)
