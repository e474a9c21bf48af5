"""Record a load as the steps that later syncs replay: copies, and vLLM's own processing of quantized layers."""

import copy
import gc
from collections import Counter
from collections.abc import Callable

import torch

from .buckets import Piece
from .copies import BatchedCopy, load_kernel
from .lora import LoRAWeight, Merge
from .trace import Write, layer_of, layout, parameters_and_buffers, plain_tensors, strided_as

PROCESSED = "_already_called_process_weights_after_loading"  # vLLM's quantization methods set this flag on a layer


class Recording:
    """A load of some buckets as steps: copies, and the processing of each layer that the copies complete.

    Raises NotImplementedError, with the reason, for a load that does anything else.
    """

    def __init__(self, model, context: Callable, traced: dict[str, list[Write]], buckets: list[list[Piece]], staging):
        self.traced, self.buckets, self.staging = traced, buckets, staging
        self.device = staging.view(0, buckets[0][0]).device
        self.served = parameters_and_buffers(model)
        self.layers: dict[str, ProcessedLayer] = {}
        self.unused_scratch: dict[tuple, list[torch.Tensor]] = {}  # by shape and dtype
        pieces = Counter(piece.name for bucket in buckets for piece in bucket)
        for name, writes in traced.items():
            for write in writes:
                if write.value is None:
                    raise NotImplementedError(f"{name}: its loader computes")
                if layout(self.served.get(write.target)) != layout(write.parameter):
                    layer, _, parameter = write.target.rpartition(".")
                    self.layers.setdefault(layer, ProcessedLayer(model.get_submodule(layer), context))
                    self.layers[layer].loadable[parameter] = write.parameter
                    self.layers[layer].writes_left += pieces[name]
        for writes in traced.values():
            for write in writes:
                layer, _, parameter = write.target.rpartition(".")
                if layer in self.layers and parameter not in self.layers[layer].loadable:
                    self.layers[layer].served_as_loaded.add(parameter)

    def steps(self, i: int) -> list:
        """The steps to run once bucket `i` has arrived. Call this for every bucket, in order."""
        steps, pairs, fills = [], [], []
        for piece in self.buckets[i]:
            for write in self.traced[piece.name]:
                layer, parameter = self._destination(write)
                view = write.destination
                destination = parameter.as_strided(view.size(), view.stride(), view.storage_offset())
                if isinstance(write.value, torch.Tensor):
                    pairs += _piece_copies(destination, write.value, piece, self.staging.source(i, piece))
                elif piece.begin == 0:
                    fills.append((destination, write.value))
                if layer and layer.count_write(self.unused_scratch):
                    steps += [BatchedCopy(self.device, pairs, fills), layer]
                    pairs, fills = [], []
        return [*steps, BatchedCopy(self.device, pairs, fills)]

    def _destination(self, write: Write) -> tuple["ProcessedLayer | None", torch.Tensor]:
        """The tensor that a write goes to: the served one, or scratch memory if its layer is processed first."""
        layer, parameter = self.layers.get(layer_of(write.target)), write.target.rpartition(".")[2]
        if layer is None or parameter not in layer.loadable:
            return None, self.served[write.target].data
        if not layer.scratch and (reason := layer.prepare(self.unused_scratch, self.device)):
            if self.device.type == "cpu":
                reason = " on a CPU, so replay is off"
            raise NotImplementedError(f"vLLM packs {write.target}{reason}")
        return layer, layer.scratch[parameter]


class ProcessedLayer:
    """A layer that vLLM processes after loading, for example quantizes.

    A replay copies the layer's weights to scratch memory, runs vLLM's own processing on a stub of the layer there, and
    copies the results into the served tensors.
    """

    def __init__(self, module: torch.nn.Module, context: Callable):
        self.module, self.context = module, context
        self.loadable: dict[str, torch.Tensor] = {}  # its processed parameters, as loaders see them
        self.scratch: dict[str, torch.Tensor] = {}  # memory for `loadable`
        self.writes_left = 0  # to the scratch memory, until the layer is complete
        self.served_as_loaded: set[str] = set()  # its parameters that processing leaves alone, such as a bias

    def prepare(self, unused_scratch: dict[tuple, list], device: torch.device) -> str:
        """Take scratch memory, and try the processing. Returns "", or why its results do not fit the served tensors."""
        for name, loadable in self.loadable.items():
            unused = unused_scratch.setdefault((loadable.shape, loadable.dtype), [])
            if unused:
                self.scratch[name] = unused.pop()
            else:
                self.scratch[name] = torch.zeros(loadable.shape, dtype=loadable.dtype, device=device)
        try:
            served, results = self._process()
        except Exception as error:  # vLLM's methods need not work a second time
            return f": {error}".splitlines()[0]
        fits = [layout(t) for t in served] == [layout(t) for t in results] and all(t.numel() for t in served)
        return "" if fits else ", and repeating its processing does not give that form"

    def count_write(self, unused_scratch: dict[tuple, list]) -> bool:
        """Count a write. Returns whether it was the last one; later layers may then use the scratch memory."""
        self.writes_left -= 1
        if self.writes_left:
            return False
        for scratch in self.scratch.values():
            unused_scratch[scratch.shape, scratch.dtype].append(scratch)
        return True

    def run(self, _) -> None:
        for served, result in zip(*self._process(), strict=True):
            served.copy_(result)

    def _process(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The served tensors, and in the same order those that vLLM's processing makes from the scratch memory."""
        stub, served = copy.copy(self.module), self.module._parameters
        # The stub gets its own weights (scratch memory) and its own copies of what processing makes, such as scales.
        processed = [name for name, p in served.items() if p is not None and name not in self.served_as_loaded]
        stub._parameters = dict(served)
        for name in processed:
            tensor = self.scratch[name] if name in self.scratch else served[name].detach().clone()
            stub._parameters[name] = torch.nn.Parameter(tensor, requires_grad=False)
        vars(stub).pop(PROCESSED, None)
        before = dict(vars(stub))
        with self.context():
            stub.quant_method.process_weights_after_loading(stub)
        vars(stub).pop(PROCESSED, None)
        if vars(stub).keys() != before.keys() or any(vars(stub)[name] is not value for name, value in before.items()):
            raise NotImplementedError("more than the layer's parameters would have to be copied")
        return tuple(
            [tensor for name in processed for tensor in plain_tensors(module._parameters[name].detach())]
            for module in (self.module, stub)
        )


class _Graph:
    """Steps as one CUDA graph: one launch, without Python's time for each step."""

    def __init__(self, steps: list, total: torch.Tensor, pool):
        self.steps, self.graph = steps, torch.cuda.CUDAGraph()  # the steps keep the graph's memory alive
        # torch.cuda.graph would collect garbage for each graph, and there may be a hundred.
        with torch.cuda.stream(torch.cuda.Stream()):
            self.graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                for step in steps:
                    step.run(total)
            finally:
                self.graph.capture_end()  # or this process could launch nothing any more

    def run(self, _) -> None:
        self.graph.replay()


def capture(steps: list[list], total: torch.Tensor) -> list[list]:
    """Capture the steps of each bucket as one CUDA graph. They sum their digest in `total`, int64 [1]."""
    load_kernel(total.device)
    for bucket_steps in steps:
        for step in bucket_steps:
            if isinstance(step, BatchedCopy):
                step.compute()  # compiles its kernels: CUDA forbids that during a capture
    torch.cuda.synchronize()
    pool = torch.cuda.graph_pool_handle()  # shared, since the graphs run one after the other
    # Drop copies without work: a bucket may hold other workers' rows only.
    steps = [[step for step in bucket if not isinstance(step, BatchedCopy) or step.has_work()] for bucket in steps]
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()  # freeing GPU memory during a capture can invalidate it
    try:
        return [[_Graph(bucket_steps, total, pool)] if bucket_steps else [] for bucket_steps in steps]
    finally:
        if enabled:
            gc.enable()


def _piece_copies(
    destination: torch.Tensor, copied: torch.Tensor, piece: Piece, source: torch.Tensor | LoRAWeight
) -> list[tuple[torch.Tensor, torch.Tensor | Merge]]:
    """What a traced copy reads from `piece`, as a list of at most one (destination, source).

    The trace saw `destination.copy_(copied)`, where `copied` is a view of a meta tensor of the full shape. `source`
    holds the piece's elements, in any dtype, or merges them. Raises NotImplementedError if the piece is only a part of
    the tensor and the copy does not read whole rows of it.
    """
    offset = copied.storage_offset()
    if piece.count < torch.Size(piece.shape).numel():
        row = torch.Size(piece.shape[1:]).numel()
        if copied.stride(0) != row or piece.begin % row or piece.count % row:
            raise NotImplementedError(f"{piece.name}: it is larger than a bucket, and not copied by rows")
        first, view_first = piece.begin // row, offset // row
        begin = max(first, view_first)
        end = max(begin, min(first + piece.count // row, view_first + copied.size(0)))
        destination = destination[begin - view_first : end - view_first]
        copied = copied[begin - view_first : end - view_first]
        offset = copied.storage_offset() - piece.begin
    if not copied.numel():
        return []
    if isinstance(source, LoRAWeight):
        columns = source.shape[1]
        if copied.stride() == (1, columns):
            destination, copied = destination.t(), copied.t()
        if copied.stride() != (columns, 1):
            raise NotImplementedError(f"{piece.name}: it is merged, and copied neither by rows nor by columns")
        return [(destination, Merge(source, strided_as(source.base, copied), *divmod(offset, columns)))]
    return [(destination, source.as_strided(copied.size(), copied.stride(), source.storage_offset() + offset))]
