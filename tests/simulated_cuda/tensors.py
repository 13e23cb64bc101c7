"""Tensors of the simulated device, and what PyTorch without CUDA cannot do with them."""

from __future__ import annotations

import weakref

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from tests.simulated_cuda.streams import running

aten = torch.ops.aten


class Owner:
    """Memory of tensors that lie on the device; dies with the last of them."""

    def __init__(self, values, stream):
        storage = values.untyped_storage()
        self.graph = stream.capture
        if self.graph is None:  # a graph's own memory stays
            weakref.finalize(self, _overwrite, storage, stream)


def _overwrite(storage, stream):
    if not running:
        return
    stream.add(lambda: torch.empty(0, dtype=torch.uint8).set_(storage).fill_(0xFF))  # NaN, or -1


class DeviceTensor(torch.Tensor):
    """Says that it lies on a CUDA device; its values are ``inner``'s."""

    @staticmethod
    def __new__(cls, inner, device, owner):
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=device,
        )
        self.inner, self.owner = inner, owner
        return self

    def __deepcopy__(self, memo):
        copied = memo[id(self)] = self.detach().clone()
        if isinstance(self, torch.nn.Parameter):
            copied._is_param = True
        return copied

    def __repr__(self):
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype}, {self.device})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return running[-1].dispatch(func, args, kwargs or {})


def inner_of(value):
    return value.inner if isinstance(value, DeviceTensor) else value


def _numbers(places):
    return torch.tensor(places) if len(places) else torch.zeros(0, dtype=torch.int64)


def _viewed(x, places):
    """``x[places]`` as far as it is a view, and the tensors that are left as indices, or None."""
    places = list(places) if isinstance(places, tuple) else [places]
    # Arrays of numbers become tensors on the host, as in PyTorch.
    places = [
        _numbers(p)
        if isinstance(p, list | range) or (hasattr(p, "__array__") and not isinstance(p, torch.Tensor))
        else p
        for p in places
    ]
    used = sum(p is not None and p is not Ellipsis for p in places)
    if Ellipsis in [p for p in places if not isinstance(p, torch.Tensor)]:
        where = next(i for i, p in enumerate(places) if p is Ellipsis)
        places[where : where + 1] = [slice(None)] * (x.dim() - used)
    dim, indices = 0, {}
    for place in places:
        if place is None:
            x, dim = x.unsqueeze(dim), dim + 1
        elif isinstance(place, slice):
            start, stop, step = place.indices(x.shape[dim])
            if (start, step) != (0, 1) or stop != x.shape[dim]:
                x = aten.slice(x, dim, start, max(start, stop), step)
            dim += 1
        elif isinstance(place, torch.Tensor):
            indices[dim] = place
            dim += place.dim() if place.dtype == torch.bool else 1
        else:
            x = x.select(dim, int(place))
    if x is None or not indices:
        return x, None
    return x, [indices.get(i) for i in range(max(indices) + 1)]


def _contiguous(x, memory_format=torch.contiguous_format):
    return x if x.is_contiguous(memory_format=memory_format) else x.clone(memory_format=memory_format)


def _get(x, places):
    x, rest = _viewed(x, places)
    return x if rest is None else aten.index(x, rest)


def _set(x, places, value):
    x, rest = _viewed(x, places)
    if rest is not None:
        value = value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=x.dtype)
        aten.index_put_(x, rest, value)
    elif isinstance(value, torch.Tensor):
        running[-1].copy(x, value)
    else:
        x.fill_(value)


# What PyTorch's bindings do with the device themselves, which they cannot without CUDA.
BINDINGS = {
    torch.Tensor.__bool__: lambda x: bool(x.item()),
    torch.Tensor.__float__: lambda x: float(x.item()),
    torch.Tensor.__getitem__: _get,
    torch.Tensor.__index__: lambda x: int(x.item()),
    torch.Tensor.__int__: lambda x: int(x.item()),
    torch.Tensor.__invert__: torch.bitwise_not,
    torch.Tensor.__setitem__: _set,
    torch.Tensor.contiguous: _contiguous,
    torch.Tensor.data_ptr: lambda x: x.inner.data_ptr(),
    torch.Tensor.nonzero: lambda x: aten.nonzero(x),
    torch.Tensor.tolist: lambda x: x.cpu().tolist(),
}


class IndexedDevices(TorchFunctionMode):
    """Says which of the CUDA devices ``"cuda"`` is: PyTorch without CUDA cannot."""

    def __init__(self, simulator):
        super().__init__()
        self.simulator = simulator

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in BINDINGS and isinstance(args[0], DeviceTensor):
            return BINDINGS[func](*args, **kwargs)
        if func is torch.Tensor.copy_ and any(isinstance(a, DeviceTensor) for a in args):
            return self.simulator.copy(*args, **kwargs)
        if func is torch.Tensor.cuda:
            return args[0].to(self.simulator.device_of(None))
        if "device" in kwargs:
            kwargs["device"] = self.indexed(kwargs["device"])
        if func in (torch.tensor, torch.as_tensor) and not isinstance(args[0], DeviceTensor):
            return self.tensor(func, *args, **kwargs)
        if func is torch.Tensor.to:
            if len(args) > 1 and isinstance(args[1], DeviceTensor):
                args = args[0], args[1].device, args[1].dtype
            args = [self.indexed(a) for a in args]
        return func(*args, **kwargs)

    def tensor(self, func, values, device=None, pin_memory=False, **kwargs):
        """A new one of numbers that the host has."""
        if isinstance(values, list):
            values = tree_map(lambda v: v.item() if isinstance(v, DeviceTensor) else v, values)
        made = func(values, **kwargs)
        if device is not None and torch.device(device).type == "cuda":
            return self.simulator.to(made, device=device)
        return self.simulator.lock(made) if pin_memory else made

    def indexed(self, device):
        is_cuda = isinstance(device, str | torch.device) and torch.device(device).type == "cuda"
        return self.simulator.device_of(device) if is_cuda else device


class Generator:
    """PyTorch without CUDA makes no generator for it."""

    made = torch.Generator

    def __new__(cls, device="cpu"):
        return cls.made()
