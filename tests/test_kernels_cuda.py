"""CUDA kernels compiled at run time: code kept on disk, the search for libraries, arguments; on a GPU, a launch."""

from __future__ import annotations

import ctypes

import pytest
import torch

from vivace.environment import cache_folder
from vivace.kernels import cuda_compile
from vivace.kernels.cuda import CudaModule, KernelUnavailableError
from vivace.kernels.cuda_compile import (
    bundled_compilers,
    bundled_headers,
    cache_key,
    keep,
    load_library,
    read_kept,
)
from vivace.kernels.cuda_driver import architecture, launch_config, packed

ADD = """
extern "C" __global__ void add(const float* x, float* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] += x[i];
}
"""


class FakeCompiler:
    """Counts what it compiles."""

    version = "13.0"

    def __init__(self):
        self.options = []

    def compile(self, source, *, name, options):
        self.options.append(tuple(options))
        return source.encode()[::-1]


@pytest.fixture
def fake(monkeypatch, tmp_path):
    compiler = FakeCompiler()
    monkeypatch.setattr(cuda_compile, "compiler", lambda: compiler)
    monkeypatch.setenv("VIVACE_CACHE", str(tmp_path / "cache"))
    return compiler


def compiled(source="abc", options=(), architecture="sm_90a"):
    return cuda_compile.compiled(source, name="test", options=options, architecture=architecture)


def test_compiles_once_for_each_source_options_architecture_and_compiler(fake):
    assert compiled() == compiled() == b"cba"
    assert len(fake.options) == 1
    assert fake.options[0][0] == "--gpu-architecture=sm_90a"
    compiled(source="abd")
    compiled(options=("-DA=1",))
    compiled(architecture="sm_80")
    fake.version = "13.1"
    compiled()
    assert len(fake.options) == 5
    assert fake.options[2][-1] == "-DA=1"
    assert [file.name for file in cache_folder().iterdir() if not file.name.startswith("test-")] == []


def test_key_does_not_mix_up_its_parts():
    keys = {
        cache_key("ab", ["c"], "sm_80", "13.0"),
        cache_key("abc", [], "sm_80", "13.0"),
        cache_key("ab", ["c", ""], "sm_80", "13.0"),
        cache_key("ab", ["", "c"], "sm_80", "13.0"),
    }
    assert len(keys) == 4


@pytest.mark.parametrize("damage", [b"", b"short", b"\0" * 32, b"\0" * 100])
def test_damaged_file_is_compiled_again_and_replaced(fake, damage):
    compiled()
    (file,) = cache_folder().iterdir()
    file.write_bytes(damage)
    assert compiled() == b"cba"
    assert len(fake.options) == 2
    assert read_kept(file) == b"cba"


def test_folder_that_cannot_be_written_only_means_that_nothing_is_kept(fake):
    cache_folder().write_text("not a folder")
    assert compiled() == compiled() == b"cba"
    assert len(fake.options) == 2


def test_nothing_half_written_stays_behind(tmp_path):
    target = tmp_path / "code.cubin"
    target.mkdir()  # cannot be replaced by a file
    keep(target, b"code")
    assert list(tmp_path.iterdir()) == [target]


def test_finds_the_compiler_and_headers_of_pytorchs_own_toolkit(tmp_path):
    names = [
        "nvidia/cu13/lib/libnvrtc.so.13",
        "nvidia/cu13/lib/libnvrtc-builtins.so.13.0",
        "nvidia/cu13/include/cuda_bf16.h",
        "nvidia/cuda_nvrtc/lib/libnvrtc.so.12",
        "nvidia/cuda_runtime/include/cuda_bf16.h",
    ]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    of_13, of_12 = str(tmp_path / names[0]), str(tmp_path / names[3])
    assert bundled_compilers(tmp_path, "13.0") == [of_13, of_12]
    assert bundled_compilers(tmp_path, "12.8") == [of_12, of_13]
    assert bundled_headers(tmp_path) == [
        tmp_path / "nvidia/cu13/include",
        tmp_path / "nvidia/cuda_runtime/include",
    ]
    assert bundled_compilers(tmp_path / "none", "13.0") == bundled_headers(tmp_path / "none") == []


def test_missing_library_is_an_error_that_names_it(tmp_path):
    damaged = tmp_path / "libdamaged.so"
    damaged.write_bytes(b"no library")
    with pytest.raises(KernelUnavailableError, match=r"libdamaged\.so, libnowhere\.so"):
        load_library([str(damaged), "libnowhere.so"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_no_gpu_is_an_error_before_anything_is_compiled(fake):
    with pytest.raises(KernelUnavailableError, match="add: PyTorch finds no NVIDIA GPU"):
        CudaModule(ADD, name="add")
    assert fake.options == []


def test_arguments_are_values_of_the_sizes_that_the_kernel_takes():
    number, structure = (
        ctypes.c_float(0.5),
        type("Pair", (ctypes.Structure,), {"_fields_": [("a", ctypes.c_int * 2)]})(),
    )
    assert packed([number, structure], 0, (4, 8)) == [number, structure]
    assert packed([number], 0, None) == [number]
    with pytest.raises(TypeError, match=r"\(4, 8\) bytes for a kernel that takes \(4,\)"):
        packed([number, structure], 0, (4,))
    with pytest.raises(TypeError, match="plain number"):
        packed([1], 0, None)
    with pytest.raises(TypeError, match="a tensor on cpu for a kernel on cuda:0"):
        packed([torch.zeros(1)], 0, None)


def test_launch_is_described_as_the_driver_reads_it():
    config = launch_config((7, 2), (128,), 4096, 5, cluster=(2,), cooperative=True, overlap=True)
    assert ctypes.sizeof(config) == 56
    assert (list(config.grid), list(config.block)) == ([7, 2, 1], [128, 1, 1])
    assert (config.shared_bytes, config.stream, config.num_attributes) == (4096, 5, 3)
    attributes = [config.attributes[i] for i in range(3)]
    assert [(a.id, list(a.value[:3])) for a in attributes] == [(2, [1, 0, 0]), (4, [2, 1, 1]), (6, [1, 0, 0])]
    assert ctypes.sizeof(attributes[0]) == 72
    for wrong in ((), (0,), (1, 1, 1, 1)):
        with pytest.raises(ValueError, match="one to three sizes"):
            launch_config(wrong, (1,), 0, 0)


@pytest.mark.parametrize(("capability", "name"), [((7, 5), "sm_75"), ((9, 0), "sm_90a"), ((12, 0), "sm_120")])
def test_architecture(capability, name):
    assert architecture(capability) == name


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_adds_on_the_gpu_alone_and_in_a_graph(monkeypatch, tmp_path):
    monkeypatch.setenv("VIVACE_CACHE", str(tmp_path))
    add = CudaModule(ADD, name="add").function("add")
    x, y = torch.arange(1000.0, device="cuda"), torch.ones(1000, device="cuda")

    def launch():
        add.launch((8,), (128,), [x, y, ctypes.c_int(x.numel())])

    launch()
    torch.testing.assert_close(y, x + 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    torch.testing.assert_close(y, x + 1)
    graph.replay()
    torch.testing.assert_close(y, 2 * x + 1)
    assert add.registers > 0
    assert add.local_bytes == 0
    assert add.max_blocks_per_multiprocessor(128) >= 8
    add.set_shared_bytes(60_000)
    with pytest.raises(TypeError, match="kernel that takes"):
        add.launch((8,), (128,), [x, y])
    with pytest.raises(KernelUnavailableError, match="cuModuleGetFunction"):
        CudaModule(ADD, name="add").function("subtract")
    with pytest.raises(KernelUnavailableError, match="nonsense"):
        CudaModule("nonsense", name="nonsense")
