"""Record a load as the steps that later syncs replay: copies, and vLLM's own processing of quantized layers."""

import copy
import gc
from collections import Counter
from collections.abc import Callable

import torch

from .buckets import Piece
from .copies import BatchedCopy, load_kernel
from .regions import Region, cut
from .staging import Staging
from .trace import Write, layer_of, layout, parameters_and_buffers, plain_tensors, strided_as

PROCESSED = "_already_called_process_weights_after_loading"  # vLLM's quantization methods set this flag on a layer


class Recording:
    """A load of these buckets, as copies and the processing of each layer that the copies complete.

    Raises NotImplementedError, with the reason, for a load that does anything else.
    """

    def __init__(
        self, model, context: Callable, traced: dict[str, list[Write]], buckets: list[list[Piece]], device: torch.device
    ):
        self.device, self.served = device, parameters_and_buffers(model)
        self.compared: list[tuple[Region, torch.Tensor]] = []  # what a copy reads, and the served tensor that it is in
        self.layers: dict[str, ProcessedLayer] = {}
        self.unused_scratch: dict[tuple, list[torch.Tensor]] = {}  # by shape and dtype
        pieces = Counter(piece.name for bucket in buckets for piece in bucket)
        for name, writes in traced.items():
            for write in writes:
                if write.value is None:
                    raise NotImplementedError(f"{name}: its loader computes")
                served = self.served.get(write.target)
                if served is None or layout(served) != layout(write.parameter):
                    layer, _, parameter = write.target.rpartition(".")
                    self.layers.setdefault(layer, ProcessedLayer(model.get_submodule(layer), context))
                    self.layers[layer].loadable[parameter] = write.parameter
                    self.layers[layer].writes_left += pieces[name]
        for writes in traced.values():
            for write in writes:
                layer, _, parameter = write.target.rpartition(".")
                if layer in self.layers and parameter not in self.layers[layer].loadable:
                    self.layers[layer].served_as_loaded.add(parameter)
        # By bucket: each piece, each write that reads it, and what it reads, None if that is nothing.
        self.reads = [
            [
                (piece, write, isinstance(write.value, torch.Tensor) and cut(write.destination, write.value, piece))
                for piece in bucket
                for write in traced[piece.name]
            ]
            for bucket in buckets
        ]
        self.regions = [list(dict.fromkeys(read[1] for *_, read in each if read)) for each in self.reads]  # by bucket

    def steps(self, i: int, staging: Staging) -> list:
        """The steps to run once bucket `i` has arrived in this staging. Call this for every one, in order."""
        steps, pairs, fills = [], [], []
        for piece, write, read in self.reads[i]:
            layer, parameter = self._destination(write)
            if read:
                destination = strided_as(parameter, read[0])
                pairs.append(staging.copy(read[1], destination))
                if layer is None:
                    self.compared.append((read[1], destination))
            elif piece.begin == 0 and not isinstance(write.value, torch.Tensor):
                fills.append((strided_as(parameter, write.destination), write.value))
            if layer and layer.count_write(self.unused_scratch):
                steps += [BatchedCopy(self.device, pairs, fills), layer]
                pairs, fills = [], []
        # Other workers may load all of a bucket's pieces.
        return [*steps, BatchedCopy(self.device, pairs, fills)] if pairs or fills else steps

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
            if not unused:
                unused.append(torch.zeros(loadable.shape, dtype=loadable.dtype, device=device))
            self.scratch[name] = unused.pop()
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
        """The served tensors and, in the same order, what vLLM's processing makes from the scratch memory."""
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
        self.kept_alive, self.graph = (steps, total), torch.cuda.CUDAGraph()  # the graph uses their memory
        # torch.cuda.graph would leave its stream as the current one if capture_end raised.
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
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()  # freeing GPU memory during a capture can invalidate it
    try:
        return [[_Graph(bucket_steps, total, pool)] if bucket_steps else [] for bucket_steps in steps]
    finally:
        if enabled:
            gc.enable()
