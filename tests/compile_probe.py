"""What ``test_compile_ahead`` looks at, made in a process of its own: kernels are compiled there, not interpreted.

python -m tests.compile_probe FOLDER     # an empty folder for caches; prints one JSON document
"""

import hashlib
import io
import json
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
from triton import knobs
from triton.backends.nvidia import driver as nvidia
from triton.compiler.compiler import get_cache_invalidating_env_vars, get_cache_key, make_backend
from triton.runtime.build import platform_key
from triton.runtime.jit import JITFunction

from vivace.checkpoint import loading
from vivace.engine import kernel_compiler, kernel_plan
from vivace.engine.kernel_plan import EngineKind, plan
from vivace.kernels import gpu, launches, triton_launcher
from vivace.kernels.gpu import Gpu
from vivace.kernels.launches import recorded
from vivace.kernels.triton_cache import kept_in
from vivace.random_checkpoint import tiny_config

HOPPER, AMPERE, TURING = Gpu((9, 0), 132), Gpu((8, 6), 82), Gpu((7, 5), 40)
FEW = ("silu_mul_kernel", "prompt_attend_kernel")


def config_of(generation):
    """Small, but wide enough for the flow's kernels."""
    config = tiny_config(generation)
    if generation == 3:
        config = replace(config, flow=replace(config.flow, dit=replace(config.flow.dit, dim=256, heads=4)))
    return config


def kernels_of(generation, target, streams=2):
    found = []
    plan(EngineKind(config_of(generation), torch.bfloat16, target, streams), found.append)
    return found


def keys(found):
    """Of Triton's cache."""
    made = set()
    for kernel in found:
        source = launches.ASTSource(kernel.kernel, kernel.signature, kernel.constants, kernel.attributes)
        backend = make_backend(kernel.target)
        options = backend.parse_options(dict(kernel.options))
        made.add(get_cache_key(source, backend, options, get_cache_invalidating_env_vars()))
    return made


def keys_with_memory(generation):
    """The same launches with tensors that lie somewhere."""
    here = torch.device("cpu")
    for module in (gpu, loading, kernel_plan):
        module.PLANNED = here
    try:
        return keys(kernels_of(generation, HOPPER))
    finally:
        for module in (gpu, loading, kernel_plan):
            module.PLANNED = torch.device("meta")


def is_found_by_a_launch(kernel):
    """Compiles a kernel, then launches it as a real tensor's launch does, up to the point where a GPU is needed."""
    from vivace.kernels.lm_rows import silu_mul_kernel

    kernel.compile()
    hits = []
    knobs.compilation.listener = lambda **told: hits.append(told["cache_hit"])
    compile_for_real = JITFunction._do_compile
    with recorded(HOPPER, lambda _: None):
        JITFunction._do_compile = compile_for_real
        x, out = torch.zeros(16, 512, dtype=torch.bfloat16), torch.zeros(16, 256, dtype=torch.bfloat16)
        arguments = {"BLOCK": 1024, "PDL": True, "launch_pdl": True, "num_warps": 4, "grid": (16, 1)}
        silu_mul_kernel.warmup(x, out, 256, **arguments)
    knobs.compilation.listener = None
    return hits


def compiled(found):
    """Shared memory of a few of them, by name."""
    return {k.name: k.compile().metadata.shared for k in found if k.name in FEW}


def launcher_is_known_beforehand(kernel):
    """Whether the C module of a kernel is looked for where Triton, made to build it, would put it.

    Without a driver none can be linked: from here on an empty file takes its place.
    """
    built = []

    def build(src, name, **options):
        key = hashlib.sha256((src + platform_key()).encode()).hexdigest()
        built.append(kept_in(key, name + sysconfig.get_config_var("EXT_SUFFIX")))
        Path(built[-1]).touch()
        return SimpleNamespace(launch=None)

    for name, stand_in in (("compile_module_from_src", build), ("library_dirs", lambda: ["/"])):
        setattr(nvidia, name, stand_in)
    triton_launcher.has_driver.cache_clear()
    compiled = kernel.compile()
    return [kept == file for file, kept in zip(built, triton_launcher.kept(compiled), strict=True)]


def twice(found):
    """What the compiling process says of two kernels, and again: then they are there."""
    kernel_compiler.plan = lambda kind, tell: [tell(kernel) for kernel in found if kernel.name in FEW]
    kind = EngineKind(tiny_config(), torch.bfloat16, HOPPER, 2)
    said = []
    for _ in range(2):
        out = io.StringIO()
        said.append(kernel_compiler.run(kind, 2, out, None))
        said.append([json.loads(line)["error"] for line in out.getvalue().splitlines()])
    return said


def main() -> None:
    folder = Path(sys.argv[1])
    knobs.cache.dir = str(folder / "triton")
    older, hopper, ampere = kernels_of(2, HOPPER), kernels_of(3, HOPPER), kernels_of(3, AMPERE)
    silu = next(kernel for kernel in hopper if kernel.name == "silu_mul_kernel")
    document = {
        "names": {"2": sorted({k.name for k in older}), "3": sorted({k.name for k in hopper})},
        "turing": len(kernels_of(3, TURING)),
        "same_keys": {"2": keys(older) == keys_with_memory(2), "3": keys(hopper) == keys_with_memory(3)},
        "shared_keys": len(keys(hopper) & keys(ampere)),
        "launcher": launcher_is_known_beforehand(silu),
        "hits": is_found_by_a_launch(silu),
        "shared_bytes": {"hopper": compiled(hopper), "ampere": compiled(ampere)},
        "twice": twice(hopper),
    }
    print(json.dumps(document))


if __name__ == "__main__":
    main()
