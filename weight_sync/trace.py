"""Trace which writes vLLM's weight loaders make, by running them on tensors without storage (meta tensors)."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True)
class Write:
    """One write of a weight loader into a parameter."""

    target: str  # the parameter's name
    parameter: torch.Tensor  # as the loader sees it: before vLLM's processing (quantization, padding)
    destination: torch.Tensor  # the view of the parameter that is written
    value: object  # a view of the loaded tensor if it is copied, a number if it is filled in, None if it is computed

    @property
    def elements(self) -> tuple:
        """Identifies the written elements: target, offset, size and stride."""
        return self.target, self.destination.storage_offset(), self.destination.size(), self.destination.stride()


class WriteTrace(TorchDispatchMode):
    """Runs a weight loader without effect on the parameters, and records its writes instead."""

    def __init__(self, parameters: dict[str, torch.Tensor], source: torch.Tensor):
        super().__init__()
        self.parameters = {storage_id(parameter): (name, parameter) for name, parameter in parameters.items()}
        self.source_id, self.writes = storage_id(source), []

    def __enter__(self) -> "WriteTrace":
        self.hook = register_module_parameter_registration_hook(self._in_place)
        return super().__enter__()

    def __exit__(self, *error) -> None:
        self.hook.remove()
        super().__exit__(*error)

    def _in_place(self, module: torch.nn.Module, name: str, _) -> torch.nn.Parameter | None:
        """A view of the parameter in whose place a loader registers another one, as vLLM's Transformers backend does
        with `lm_head.bias` in each load."""
        parameter = module._parameters.get(name)
        if parameter is not None and storage_id(parameter) in self.parameters:
            return torch.nn.Parameter(parameter.data, requires_grad=False)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func._schema.is_mutable or not isinstance(args[0], torch.Tensor):
            return func(*args, **(kwargs or {}))
        parameter, value, executes = self.parameters.get(storage_id(args[0])), None, True
        if func is torch.ops.aten.copy_.default:
            executes = args[0].is_meta or not args[1].is_meta  # a meta tensor has no data for a real one
            if (parameter or not executes) and args[0].numel() != args[1].numel():
                raise ValueError(f"{list(args[1].shape)} does not fit {list(args[0].shape)}")
            value = args[1] if storage_id(args[1]) == self.source_id else None
        elif func is torch.ops.aten.fill_.Scalar:
            value = args[1]
        elif func is torch.ops.aten.zero_.default:
            value = 0
        if parameter:
            self.writes.append(Write(*parameter, args[0], value))
        return args[0] if parameter or not executes else func(*args, **(kwargs or {}))


@contextmanager
def unwrapped_loaders(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Unwrap the weight loaders: a reload bracket wraps them to count elements and to process complete layers."""
    wrapped = []
    for parameter in parameters:
        loader = getattr(parameter, "weight_loader", None)
        if getattr(loader, "__name__", "") == "online_process_loader":
            wrapped.append((parameter, loader))
            while loader.__name__ == "online_process_loader":
                loader = loader.__wrapped__
            parameter.weight_loader = loader
    try:
        yield
    finally:
        for parameter, loader in wrapped:
            parameter.weight_loader = loader


def storage_id(tensor: torch.Tensor) -> int:
    """Identifies the tensor's storage, also of tensors without an address (meta tensors, empty ones)."""
    return tensor.untyped_storage()._cdata


def parameters_and_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


def layout(parameter: torch.Tensor) -> tuple:
    """A copy into one tensor can be repeated into another one whose layout is equal.

    A quantized tensor reports the dtype and shape of a plain one, so the layout also says that it is quantized.
    """
    quantized = hasattr(parameter, "__tensor_flatten__")
    return parameter.dtype, parameter.shape, parameter.stride(), parameter.storage_offset(), quantized


def layer_of(parameter_name: str) -> str:
    return parameter_name.rpartition(".")[0]


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that a quantized tensor consists of, or the tensor itself."""
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from plain_tensors(getattr(tensor, name))
    else:
        yield tensor.as_subclass(torch.Tensor)


def strided_as(tensor: torch.Tensor, view: torch.Tensor, begin: int = 0) -> torch.Tensor:
    """The view of a tensor that is like this view of its meta tensor, whose storage begins at `begin` of its own."""
    return tensor.as_strided(view.size(), view.stride(), begin + view.storage_offset())
