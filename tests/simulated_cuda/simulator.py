"""What is done with each operation on the simulated device."""

from __future__ import annotations

import contextlib
import functools
import random
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from tests.simulated_cuda.streams import CaptureError, DeviceMixError
from tests.simulated_cuda.tensors import DeviceTensor, Owner, inner_of

aten = torch.ops.aten
INDEXED = (aten.index.Tensor, aten.index_put_.default, aten._index_put_impl_.default)
MASKS = (torch.bool, torch.uint8)
VIEWS_OF_SELF = (aten._unsafe_view.default,)
# Their results' sizes or values are for the host, which waits for the device to know them.
WAITS = {
    aten._local_scalar_dense.default: "a value goes to the host (item, bool, int, a branch)",
    aten.equal.default: "a comparison goes to the host",
    aten.nonzero.default: "the size of the result depends on values (nonzero)",
    aten.masked_select.default: "the size of the result depends on values (masked_select)",
    aten._unique2.default: "the size of the result depends on values (unique)",
    aten.unique_dim.default: "the size of the result depends on values (unique)",
    aten.unique_consecutive.default: "the size of the result depends on values (unique_consecutive)",
    aten.bincount.default: "the size of the result depends on values (bincount)",
}


class Simulator(TorchDispatchMode):
    def __init__(self, capability, seed, computes):
        super().__init__()
        self.computes = computes
        self.capability, self.seed = capability, seed
        self.random = None if seed is None else random.Random(seed)
        self.device, self.streams, self.capture = 0, [], None
        self.pinned = {}
        self.launches = 0
        self.own = {
            aten._fused_sdp_choice.default: lambda *_, **__: 0,
            aten.record_stream.default: lambda *_: None,
            aten._to_copy.default: self.to,
            aten.copy_.default: self.copy,
        }

    # -- what torch.cuda is asked ----------------------------------------------------------------------------

    def device_of(self, device):
        if device is None:
            return torch.device("cuda", self.device)
        if isinstance(device, int):
            return torch.device("cuda", device)
        device = torch.device(device)
        return torch.device("cuda", self.device if device.index is None else device.index)

    def current_stream(self, device=None):
        index = self.device_of(device).index
        return self.current_streams[index]

    def default_stream(self, device=None):
        return self.default_streams[self.device_of(device).index]

    @contextlib.contextmanager
    def use_stream(self, stream):
        if stream is None:
            yield
            return
        index, device = stream.device.index, self.device
        before, self.current_streams[index] = self.current_streams[index], stream
        self.device = index
        try:
            yield
        finally:
            self.current_streams[index], self.device = before, device

    @contextlib.contextmanager
    def use_device(self, device):
        before, self.device = self.device, self.device_of(device).index
        try:
            yield
        finally:
            self.device = before

    def forbid(self, what):
        if self.capture is not None:
            raise CaptureError(what)

    def synchronize(self, device=None):
        self.forbid("the host waits for the device")
        index = self.device_of(device).index
        for stream in list(self.streams):
            if stream.device.index == index:
                stream.run(stream.number)

    def play(self):
        """With a seed: some of what is queued runs now."""
        if self.random is not None and self.random.random() < 0.3:
            stream = self.random.choice(self.streams)
            stream.run(stream.done + self.random.randint(0, len(stream.queue)))

    # -- operations ------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.dispatch(func, args, kwargs or {})

    def is_locked(self, tensor):
        return tensor.untyped_storage().data_ptr() in self.pinned

    def lock(self, tensor):
        storage = tensor.untyped_storage()
        self.pinned[storage.data_ptr()] = True
        weakref.finalize(storage, self.pinned.pop, storage.data_ptr(), None)
        return tensor

    def dispatch(self, func, args, kwargs):
        """An operation, wherever its tensors lie."""
        flat, spec = tree_flatten((args, kwargs))
        wanted = kwargs.get("device")
        if func is aten._pin_memory.default:
            return self.lock(args[0].clone())
        if func is aten.is_pinned.default:
            return not isinstance(args[0], DeviceTensor) and self.is_locked(args[0])
        is_here = any(isinstance(a, DeviceTensor) for a in flat)
        if not is_here and (wanted is None or torch.device(wanted).type != "cuda"):
            pin = kwargs.pop("pin_memory", None)
            out = func(*args, **kwargs)
            return self.lock(out) if pin else out
        if _is_composite(func):  # inference mode asks for these whole
            with self:
                return func.decompose(*args, **kwargs)
        if func in self.own:
            return self.own[func](*args, **kwargs)
        kwargs.pop("pin_memory", None)
        flat, spec = tree_flatten((args, kwargs))
        device = self.one_device(func, flat, wanted)
        if reason := self.reason_to_wait(func, args, kwargs):
            self.forbid(f"{func}: {reason}")
            self.current_stream(device).synchronize()
            return self.at_once(func, args, kwargs, device)
        if self.capture is not None and kwargs.get("generator") is not None:
            raise CaptureError(f"{func}: draws from a generator that the graph does not know")
        return self.queue(func, flat, spec, device)

    def one_device(self, func, flat, wanted):
        """Where all tensors of an operation lie."""
        devices = {a.device for a in flat if isinstance(a, DeviceTensor)}
        if wanted is not None:  # a new tensor, maybe in the likeness of one that lies elsewhere
            return self.device_of(wanted)
        if len(devices) > 1:
            raise DeviceMixError(f"{func}: tensors of {sorted(map(str, devices))}")
        (device,) = devices
        for each in flat:
            if not isinstance(each, torch.Tensor) or isinstance(each, DeviceTensor):
                continue
            if func in INDEXED:
                self.forbid(f"{func}: numbers of places come from the host")
            elif each.dim():  # one number goes along
                raise DeviceMixError(
                    f"{func}: a tensor {tuple(each.shape)} of the CPU beside one of {device}"
                )
        return device

    @staticmethod
    def reason_to_wait(func, args, kwargs):
        """Why the host must know values before it can go on, if so."""
        if func in INDEXED and any(a is not None and a.dtype in MASKS for a in args[1]):
            return "the size depends on values (a mask as an index)"
        if func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None:
            return "the size of the result depends on values (repeat_interleave)"
        return WAITS.get(func)

    def at_once(self, func, args, kwargs, device):
        inner = tree_map(inner_of, (args, kwargs))
        out = func(*inner[0], **inner[1])
        stream = self.current_stream(device)
        return tree_map(lambda t: self.wrap(t, device, stream) if isinstance(t, torch.Tensor) else t, out)

    def wrap(self, values, device, stream, owner=None):
        return DeviceTensor(values, device, owner or Owner(values, stream))

    def queue(self, func, flat, spec, device):
        returns, arguments = func._schema.returns, func._schema.arguments
        stream = self.current_stream(device)
        args, kwargs = tree_unflatten([inner_of(a) for a in flat], spec)
        if "device" in kwargs:
            kwargs["device"] = "cpu"
        writes = any(a.alias_info is not None and a.alias_info.is_write for a in arguments)
        is_view = not writes and returns and any(r.alias_info is not None for r in returns)
        if is_view or func in VIEWS_OF_SELF:
            base = next(a for a in flat if isinstance(a, DeviceTensor))
            with torch.inference_mode(base.is_inference()):
                out = func(*args, **kwargs)
                return tree_map(
                    lambda t: DeviceTensor(t, device, base.owner) if isinstance(t, torch.Tensor) else t, out
                )
        if self.capture is not None and stream.capture is None:
            raise CaptureError(f"{func}: runs on another stream or device than the one that is captured")
        if writes:
            stream.add(lambda: func(*args, **kwargs))
            outer = tree_unflatten(flat, spec)
            return self.written(func, outer[0], outer[1])
        shapes = _shapes(func, flat, spec)
        out = tree_map(_garbage, shapes)
        if not func.__name__.startswith(
            ("empty.", "new_empty.", "empty_like.", "empty_strided.", "new_empty_strided.")
        ):
            stream.add(lambda: _fill(out, _run(func, args, kwargs)))
        return tree_map(lambda t: self.wrap(t, device, stream) if isinstance(t, torch.Tensor) else t, out)

    @staticmethod
    def written(func, args, kwargs):
        """The arguments that were written, as the operation returns them."""
        names = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        values = {a.name: v for a, v in zip(func._schema.arguments, args, strict=False)} | kwargs
        found = tuple(values[name] for name in names)
        count = len(func._schema.returns)
        return None if count == 0 else found[0] if count == 1 else found

    def to(
        self,
        x,
        *,
        dtype=None,
        layout=None,
        device=None,
        pin_memory=None,
        non_blocking=False,
        memory_format=None,
    ):
        """``aten::_to_copy``."""
        target = x.device if device is None else torch.device(device)
        dtype = dtype or x.dtype
        if target.type == "cuda":
            target = self.device_of(target)
        if isinstance(x, DeviceTensor) and target == x.device:
            leaves, spec = tree_flatten(((x,), {"dtype": dtype, "memory_format": memory_format}))
            return self.queue(aten._to_copy.default, leaves, spec, target)
        shape = _shapes(
            aten._to_copy.default, *tree_flatten(((x,), {"dtype": dtype, "memory_format": memory_format}))
        )
        if target.type == "cuda":
            stream = self.current_stream(target)
            out = self.wrap(_garbage(shape), target, stream)
        else:
            out = torch.empty_strided(shape.shape, shape.stride(), dtype=dtype)
        return self.copy(out, x, non_blocking)

    def copy(self, target, source, non_blocking=False):
        to_device, from_device = isinstance(target, DeviceTensor), isinstance(source, DeviceTensor)
        if to_device and from_device:
            device = target.device
            if source.device != device:
                self.forbid("a copy between two devices")
                raise DeviceMixError("a copy between two devices: say so if it is meant")
            leaves, spec = tree_flatten(((target, source), {}))
            return self.queue(aten.copy_.default, leaves, spec, device)
        device = target.device if to_device else source.device
        stream = self.current_stream(device)
        host = source if to_device else target
        locked = self.is_locked(host) and non_blocking
        if self.capture is not None and (not locked or stream.capture is None):
            where = "from" if to_device else "to"
            raise CaptureError(f"a copy of {tuple(host.shape)} {where} the host's memory")
        if to_device and source.dim() == 0 and not locked:
            values = source.clone()
            stream.add(lambda: target.inner.copy_(values))
        elif to_device:
            values = source if locked else source.clone()
            inner = target.inner
            stream.add(lambda: inner.copy_(values))
        else:
            inner = source.inner
            stream.add(lambda: target.copy_(inner))
            if not locked:
                stream.run(stream.number)
        if to_device and not non_blocking:
            stream.run(stream.number)
        return target

    # -- Triton ----------------------------------------------------------------------------------------------

    def launch(self, run, fn, arguments, keywords):
        self.launches += 1
        names = [*arguments, *keywords.values()]
        tensors = [a for a in names if isinstance(a, torch.Tensor)]
        for each in tensors:
            if not isinstance(each, DeviceTensor):
                raise DeviceMixError(f"{fn}: a pointer {tuple(each.shape)} to the CPU's memory")
            if each.device.index != self.device:
                raise DeviceMixError(f"{fn}: a pointer to {each.device} while cuda:{self.device} is current")
        stream = self.current_stream()
        if self.capture is not None and stream.capture is None:
            raise CaptureError(f"{fn}: runs on another stream than the one that is captured")
        args, kwargs = [inner_of(a) for a in arguments], {k: inner_of(v) for k, v in keywords.items()}
        stream.add(lambda: run(*args, **kwargs))


@functools.cache
def _is_composite(func):
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def _garbage(shape):
    if not isinstance(shape, torch.Tensor):
        return shape
    out = torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype)
    torch.empty(0, dtype=torch.uint8).set_(out.untyped_storage()).fill_(0xFF)
    return out


def _run(func, args, kwargs):
    if func is aten.mm.dtype:  # the CPU has none
        return (args[0].float() @ args[1].float()).to(args[2])
    return func(*args, **kwargs)


def _fill(out, values):
    for target, value in zip(tree_flatten(out)[0], tree_flatten(values)[0], strict=True):
        if isinstance(target, torch.Tensor):
            assert target.shape == value.shape
            target.copy_(value)


def _shapes(func, flat, spec):
    """The results without values."""

    def meta(value):
        if isinstance(value, torch.Tensor):
            if value.dim() == 0 and not isinstance(value, DeviceTensor):
                return value
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        return value

    args, kwargs = tree_unflatten([meta(a) for a in flat], spec)
    if "device" in kwargs:
        kwargs["device"] = "meta"
    if func is aten.mm.dtype:
        return (args[0].float() @ args[1].float()).to(args[2])
    return func(*args, **kwargs)
