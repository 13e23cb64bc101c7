"""Runs Triton kernels on the CPU, where there is no GPU. Import it before anything that imports Triton."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import triton.runtime.interpreter as interpreter

_patch = interpreter._patch_lang_tensor


def _with_index(tensor, scope):
    """NumPy no longer turns arrays of one element into integers, and the interpreter's loop bounds are such arrays."""
    _patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.reshape(())))


interpreter._patch_lang_tensor = _with_index
