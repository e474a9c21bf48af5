"""What a weight sync needs of the model inside a vLLM worker: preflight, reload, replay, digest.

All that depends on how vLLM keeps a model is here. `EngineModel.load` and `finish` are vLLM's own way: its loaders, in
one of its reload brackets. `record` finds what such a load comes down to, by running the loaders over tensors without
storage and noting every write: copies and, for a layer that vLLM processes once it is loaded (quantizes, say), vLLM's
own method over scratch memory. `replay` repeats just that.
"""

import copy
import gc
import logging
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from copies import Copies, digest, digest_together, load_kernel
from weight_transport import Lanes, Piece, WeightSyncError, dtype_name, wire_of

PROCESSED = "_already_called_process_weights_after_loading"  # a flag that vLLM's quantization methods leave on a layer


# --- Which writes a load makes ----------------------------------------------------------------------------------------


def _memory(tensor: torch.Tensor) -> int:
    """Identity of a tensor's storage, also where it has no address (meta tensors)."""
    return tensor.untyped_storage()._cdata


@dataclass(frozen=True)
class _Write:
    """One write of a weight loader into a parameter."""

    owner: str  # the parameter's name
    parameter: torch.Tensor  # in the form in which the loader sees it
    destination: torch.Tensor  # the view of it that is written
    value: object  # the view of the loaded tensor that is copied, the number that is filled in, or None: computed

    @property
    def region(self) -> tuple:
        return self.owner, self.destination.storage_offset(), self.destination.size(), self.destination.stride()


class _WriteTrace(TorchDispatchMode):
    """Lets a weight loader run without effect on parameters: its writes are noted instead."""

    def __init__(self, parameters: dict[str, torch.Tensor], source: torch.Tensor):
        super().__init__()
        self.owners = {_memory(parameter): (name, parameter) for name, parameter in parameters.items()}
        self.source, self.writes = _memory(source), []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        written = func._schema.is_mutable and isinstance(args[0], torch.Tensor) and self.owners.get(_memory(args[0]))
        if not written:
            return func(*args, **(kwargs or {}))
        value = None
        if func is torch.ops.aten.copy_.default:
            if args[0].numel() != args[1].numel():
                raise ValueError(f"{list(args[1].shape)} does not fit {list(args[0].shape)}")
            value = args[1] if _memory(args[1]) == self.source else None
        elif func is torch.ops.aten.fill_.Scalar:
            value = args[1]
        elif func is torch.ops.aten.zero_.default:
            value = 0
        self.writes.append(_Write(*written, args[0], value))
        return args[0]


@contextmanager
def _unwrapped_loaders(parameters: Iterable[torch.Tensor]) -> Iterator[None]:
    """Take the bracket's wrappers, which count and process, off the weight loaders, which only copy."""
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


# --- The model --------------------------------------------------------------------------------------------------------


class EngineModel:
    """What a sync needs of the model inside a vLLM worker: preflight, loading, digest."""

    def __init__(self, worker):
        self.worker = worker
        self.model = worker.model_runner.get_model()
        self.loading = False
        self.required: dict[str, int] = {}  # elements by parameter that a sync must write, known after a trace
        self.expected: dict[str, int] = {}  # elements by layer that a load of the agreed tensors copies
        self.covered: set[tuple] = set()  # regions written one parameter at a time since the last completed sync
        self.digest: int | None = None  # of what a completed sync left, None where there was none
        self.version = 0
        self.moves: list[list] | None = None  # the steps of a replay, by bucket
        self.fused, self.total = False, None  # do they take the digest as well, and where they add it up, int64 [1]
        self.compared: dict[str, tuple] = {}  # digests of quantized weights at the last comparison

    def preflight(self, metadata: list) -> tuple[list[str | None], list[str]]:
        """Returns per tensor the dtype in which the engine keeps it (None: not on this worker), and the problems."""
        traced, problems = self._trace(metadata)
        dtypes = [next(map(self._wire_dtype, traced.get(name, [])), None) for name, _, _ in metadata]
        writes = [write for writes in traced.values() for write in writes]
        self.expected, buffers = {}, dict(self.model.named_buffers())
        for write in writes:
            if not isinstance(write.value, int | float) and write.owner not in buffers:
                layer = _layer_of(write.owner)
                self.expected[layer] = self.expected.get(layer, 0) + write.destination.numel()
        for name, _, shape in metadata:
            if self._cuts(traced.get(name, []), torch.Size(shape).numel()):
                problems.append(f"{name} {list(shape)}: the engine would load only a part of it")
        missing = self.required.keys() - self._complete({write.region for write in writes})
        if missing and not problems:
            problems = [f"nothing is sent for the engine's {name}" for name in sorted(missing)]
        return dtypes, problems

    def _cuts(self, writes: list[_Write], numel: int) -> bool:
        """Whether the workers together load less than the tensor: some loaders cut off what is too large."""
        if any(not isinstance(w.value, torch.Tensor) or _loadable(w.parameter) < w.parameter.numel() for w in writes):
            return False  # computed, or of a share that is padded on some workers
        loaded = sum(write.destination.numel() for write in writes)
        return 0 < loaded < numel / self.worker.parallel_config.tensor_parallel_size

    def _wire_dtype(self, write: _Write) -> str:
        """A loader that copies gets the parameter's own dtype; one that computes on its way, the model's."""
        return dtype_name(self.worker.model_config.dtype if write.value is None else write.destination.dtype)

    def load(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        """Load tensors, which the reload keeps until their layer is complete."""
        with self._context():
            if not self.loading:
                from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

                self.digest = None
                self.loading = True
                initialize_layerwise_reload(self.model)
            self.model.load_weights(weights)

    def finish(self, complete: bool = False) -> None:
        """Close the reload bracket: what was loaded is what the engine serves. With `complete`, that must be all."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        missed = self._missed_layers() if complete else []
        with self._context():
            finalize_layerwise_reload(self.model, self.worker.model_config)
            repack_tied_layers(self.model)
        self.loading = False
        if missed:
            raise WeightSyncError(f"vLLM's loader did not load all that was sent for {', '.join(missed)}")

    def _missed_layers(self) -> list[str]:
        """Layers into which fewer elements were copied than the preflight's trace of the same load saw."""
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        infos = {name: get_layerwise_info(module) for name, module in self.model.named_modules()}
        # A layer that has all its elements is processed and put back at once; the bracket still holds the others.
        return [
            name for name, numel in self.expected.items() if infos[name].can_load() and infos[name].load_numel < numel
        ]

    def complete(self, version: int, written: int | None) -> None:
        """Every parameter was written, with this digest: this version of the weights is in place."""
        self.covered.clear()
        self.digest, self.version = written, version

    def record(self, buckets: list[list[Piece]], lanes: Lanes) -> str | None:
        """Find what a load of these buckets comes down to, for `replay`. Returns the reason if that cannot be."""
        self.moves, self.fused = None, False
        traced, _ = self._trace(wire_of(buckets))
        try:
            recording = _Recording(self, traced, buckets, lanes)
            moves = [recording.steps(i) for i in range(len(buckets))]
            if packed := [name for name, module in self.model.named_modules() if hasattr(module, "cpu_linear")]:
                return f"{packed[0]}: the engine computes with a packed copy, as vLLM does on CPU"
            if not recording.layers:
                self.fused = digest_together([copies for (copies,) in moves], list(self.served_tensors()))
            self.total = torch.zeros(1, dtype=torch.int64, device=recording.device)
            self.moves = _captured(moves, self.total) if recording.device.type == "cuda" else moves
        except NotImplementedError as reason:
            return str(reason)
        except Exception as error:  # a layer's processing that cannot be captured, memory: reload needs none of it
            return f"{type(error).__name__}: {error}".splitlines()[0]
        return None

    @torch.no_grad()
    def replay(self, arrivals: Iterator[int]) -> int | None:
        """Copy each bucket, as it arrives, straight to where a reload brought it. Returns the digest of all."""
        self.digest = None
        for i in arrivals:
            for step in self.moves[i]:
                step.run(self.total)
        if not self.fused:
            return self.take_digest()
        written = int(self.total) % 2**64
        self.total.zero_()  # for the next replay, which need not wait for it
        return written

    def state_digest(self) -> int | None:
        """The digest of what is served and of all other tensors that the model's layers keep, but for the KV cache.

        Some are computed from the weights when those are loaded, and would be stale after a replay.
        """
        others = [
            value
            for module in self.model.modules()
            for name, value in (vars(module) | module._buffers).items()
            if isinstance(value, torch.Tensor) and value.device == self.worker.device and name != "kv_cache"
        ]
        return digest([tensor for tensor in (*self.served_tensors(), *others) if tensor.numel()])

    def load_some(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        """Load tensors that are not all there are, and serve them as soon as no layer is half written."""
        traced, problems = self._trace([(name, dtype_name(w.dtype), tuple(w.shape)) for name, w in weights])
        if problems:
            raise WeightSyncError(problems[0])
        self.load(weights)
        self.covered |= {write.region for writes in traced.values() for write in writes}
        unwritten = self.required.keys() - self._complete(self.covered)
        if not {_layer_of(name) for name in unwritten} & {_layer_of(name) for name, *_ in self.covered}:
            self.finish()
            if not unwritten:
                self.complete(self.version + 1, self.take_digest())

    def unchanged(self) -> bool:
        return self.digest is not None and not self.loading and self.take_digest() == self.digest

    def _trace(self, metadata: list) -> tuple[dict[str, list[_Write]], list[str]]:
        """Run the loaders without effect. Returns their writes by tensor, and what they cannot load."""
        traced, problems = {}, []
        with self._loadable_parameters() as parameters:
            for name, dtype, shape in metadata:
                source = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
                try:
                    with _WriteTrace(parameters, source) as trace:
                        self.model.load_weights([(name, source)])
                    traced[name] = trace.writes
                except Exception as error:  # whatever a loader raises for a name or a shape that it cannot take
                    reason = f"{type(error).__name__}: {error}".splitlines()[0][:120]
                    problems.append(f"{name} {list(shape)}: the engine cannot load it ({reason})")
        return traced, problems

    @contextmanager
    def _loadable_parameters(self) -> Iterator[dict[str, torch.Tensor]]:
        """Parameters and buffers as a checkpoint's tensors fit them, by a reload bracket that loads nothing."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        with self._context():
            if not self.loading:
                optional = self._optional_parameters()
                initialize_layerwise_reload(self.model)
                parameters = self.model.named_parameters()
                self.required = {name: _loadable(p) for name, p in parameters if name not in optional}
            parameters = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
            try:
                with _unwrapped_loaders(parameters.values()):
                    yield parameters
            finally:
                if not self.loading:
                    finalize_layerwise_reload(self.model, self.worker.model_config)

    def _optional_parameters(self) -> set[str]:
        """Parameters that need no write: tied ones but for their first name, and the attention layers' scales."""
        from vllm.model_executor.layers.attention import is_deferred_attention_layer

        scaled = {name for name, module in self.model.named_modules() if is_deferred_attention_layer(module)}
        firsts = {name for name, _ in self.model.named_parameters()}
        names = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        return {name for name in names if name not in firsts or _layer_of(name) in scaled}

    def _complete(self, regions: set[tuple]) -> set[str]:
        """Names of the parameters that these regions cover."""
        written = {}
        for name, _, size, _ in regions:
            written[name] = written.get(name, 0) + size.numel()
        return {name for name, numel in self.required.items() if written.get(name, 0) >= numel}

    @torch.no_grad()
    def take_digest(self) -> int | None:
        """A number that any changed, moved or swapped element changes; None for a model without parameters."""
        return digest(list(self.served_tensors()))

    def served_tensors(self) -> Iterator[torch.Tensor]:
        for parameter in self.model.parameters():
            if parameter.numel():
                yield from plain_tensors(parameter.detach())
        for module in self.model.modules():
            # On CPU, vLLM keeps linear weights packed in a form that cannot be read: read them by what they compute.
            if hasattr(module, "cpu_linear"):
                whole = module.weight.size(-1) if module.weight.numel() else module.input_size  # where it is replicated
                identity = torch.eye(getattr(module, "input_size_per_partition", whole), dtype=module.weight.dtype)
                yield module.cpu_linear(identity, module.weight, None)

    @torch.no_grad()
    def compare(self, wire: list, receive: Callable) -> dict[str, tuple[float, bool]]:
        """Compare each quantized weight with what `receive(dtype, shape)` brings, the tensors of `wire` one by one.

        Returns its largest error, over the largest that rounding to the format makes there (a NaN counts as infinite),
        and whether both its scales and its values changed since the last comparison. Raises WeightSyncError for weights
        that are neither int8 nor FP8.
        """
        quantized = {name: p for name, p in self.model.named_parameters() if hasattr(p, "__tensor_flatten__")}
        if unknown := {type(p).__name__ for p in quantized.values()} - {"Int8Tensor", "Float8Tensor"}:
            raise WeightSyncError(f"weights kept as {', '.join(unknown)} cannot be compared; int8 and FP8 can")
        traced, _ = self._trace(wire)
        last = {write.owner: name for name, writes in traced.items() for write in writes}
        sent, found = {}, dict.fromkeys(quantized, (math.inf, False))
        for name, dtype, shape in wire:
            tensor = receive(dtype, shape)
            for write in traced[name]:
                if write.owner in quantized:
                    if write.owner not in sent:
                        sent[write.owner] = torch.full(quantized[write.owner].shape, math.nan, device=tensor.device)
                    _strided_as(sent[write.owner], write.destination).copy_(_strided_as(tensor, write.value))
            for owner in [owner for owner in sent if last[owner] == name]:  # all its parts are here
                weight = quantized[owner]
                errors = weight.dequantize(torch.float32).sub_(sent.pop(owner)).abs_().div_(_half_steps(weight))
                # One scale for the whole weight may well stay what it is.
                digests = [digest([tensor]) for tensor in (weight.scale, weight.qdata) if tensor.numel() > 1]
                before = self.compared.get(owner, digests)
                found[owner] = float(errors.max().nan_to_num(math.inf)), all(map(operator.ne, digests, before))
                self.compared[owner] = digests
        return found

    @contextmanager
    def _context(self):
        from vllm.config import set_current_vllm_config

        # vLLM warns of every layer that a bracket leaves as it was, which a trace or a single parameter does to most.
        logger = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
        level = logger.level
        logger.setLevel(logging.ERROR)
        try:
            with torch.no_grad(), set_current_vllm_config(self.worker.vllm_config):
                yield
        finally:
            logger.setLevel(level)


# --- What a load comes down to ----------------------------------------------------------------------------------------


class _Recording:
    """The steps that a load of some buckets comes down to: copies, and the processing of layers that they complete.

    Raises NotImplementedError, with the reason, if it comes down to anything else.
    """

    def __init__(self, engine: EngineModel, traced: dict[str, list[_Write]], buckets: list[list[Piece]], lanes):
        self.traced, self.buckets, self.lanes = traced, buckets, lanes
        self.device = lanes.view(0, buckets[0][0]).device
        self.served = dict(engine.model.named_parameters()) | dict(engine.model.named_buffers())
        self.layers: dict[str, _ProcessedLayer] = {}
        self.free: dict[tuple, list[torch.Tensor]] = {}  # scratch memory by shape and dtype
        parts = Counter(piece.name for bucket in buckets for piece in bucket)
        for name, writes in traced.items():
            for write in writes:
                if write.value is None:
                    raise NotImplementedError(f"{name}: its loader computes")
                if _form(self.served.get(write.owner)) != _form(write.parameter):
                    layer, _, parameter = write.owner.rpartition(".")
                    self.layers.setdefault(layer, _ProcessedLayer(engine.model.get_submodule(layer), engine._context))
                    self.layers[layer].loadable[parameter] = write.parameter
                    self.layers[layer].awaited += parts[name]
        for write in (write for writes in traced.values() for write in writes):
            layer, _, parameter = write.owner.rpartition(".")
            if layer in self.layers and parameter not in self.layers[layer].loadable:
                self.layers[layer].copied.add(parameter)

    def steps(self, i: int) -> list:
        """The steps that bucket `i` allows."""
        steps, pairs, fills = [], [], []
        for piece in self.buckets[i]:
            for write in self.traced[piece.name]:
                layer, parameter = self._place(piece, write)
                view = write.destination
                destination = parameter.as_strided(view.size(), view.stride(), view.storage_offset())
                if isinstance(write.value, torch.Tensor):
                    pairs += _pairs(destination, write.value, piece, self.lanes.view(i, piece))
                elif piece.begin == 0:
                    fills.append((destination, write.value))
                if layer and layer.is_complete(self.free):
                    steps += [Copies(self.device, pairs, fills), layer]
                    pairs, fills = [], []
        return [*steps, Copies(self.device, pairs, fills)]

    def _place(self, piece: Piece, write: _Write) -> tuple["_ProcessedLayer | None", torch.Tensor]:
        """Where a write goes: to what is served, or to the scratch memory of a layer that is processed first."""
        layer, parameter = self.layers.get(_layer_of(write.owner)), write.owner.rpartition(".")[2]
        if layer is None or parameter not in layer.loadable:
            return None, self.served[write.owner].data
        if not layer.scratch and (reason := layer.begin(self.free, self.device)):
            raise NotImplementedError(f"the engine keeps {write.owner} in another form{reason}")
        return layer, layer.scratch[parameter]


class _ProcessedLayer:
    """A layer that vLLM processes once it is loaded, quantizes for instance.

    It is loaded into scratch memory, processed there by vLLM's own method, and the result is copied to what is served.
    """

    def __init__(self, module: torch.nn.Module, context: Callable):
        self.module, self.context = module, context
        self.loadable: dict[str, torch.Tensor] = {}  # its parameters' form when they are loaded
        self.scratch: dict[str, torch.Tensor] = {}
        self.awaited = 0  # writes that a load makes to them
        self.copied: set[str] = set()  # its parameters that are served as they are loaded

    def begin(self, free: dict[tuple, list], device: torch.device) -> str:
        """Take scratch memory that no other layer uses now. Returns why processing it does not give what is served."""
        for name, loadable in self.loadable.items():
            unused = free.setdefault((loadable.shape, loadable.dtype), [])
            new = unused.pop() if unused else torch.zeros(loadable.shape, dtype=loadable.dtype, device=device)
            self.scratch[name] = new
        try:
            served, results = self._process()
        except Exception as error:  # whatever vLLM's method makes of a layer that it has seen before
            return f": {error}".splitlines()[0]
        same = [_form(t) for t in served] == [_form(t) for t in results] and all(t.numel() for t in served)
        return "" if same else ", which its processing does not give again"

    def is_complete(self, free: dict[tuple, list]) -> bool:
        """Note a write. Was it the last? Then the scratch memory is free for the layers behind this one."""
        self.awaited -= 1
        for scratch in self.scratch.values() if not self.awaited else ():
            free[scratch.shape, scratch.dtype].append(scratch)
        return not self.awaited

    def run(self, _) -> None:
        for served, result in zip(*self._process(), strict=True):
            served.copy_(result)

    def _process(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """What is served, and what vLLM makes of the scratch memory, tensor by tensor."""
        stub, served = copy.copy(self.module), self.module._parameters
        # Of its own: what is loaded, in scratch memory, and what processing makes of it, such as scales.
        own = [name for name, parameter in served.items() if parameter is not None and name not in self.copied]
        stub._parameters = dict(served)
        for name in own:
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
            [tensor for name in own for tensor in plain_tensors(module._parameters[name].detach())]
            for module in (self.module, stub)
        )


class _Graph:
    """Steps as one CUDA graph, which is launched without the time that Python takes for each."""

    def __init__(self, steps: list, total: torch.Tensor, pool):
        self.steps, self.graph = steps, torch.cuda.CUDAGraph()  # keeps what the graph's addresses belong to
        # Not torch.cuda.graph, which collects garbage for each of a hundred graphs.
        with torch.cuda.stream(torch.cuda.Stream()):
            self.graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                for step in steps:
                    step.run(total)
            finally:
                self.graph.capture_end()  # or this process could launch nothing any more

    def run(self, _) -> None:
        self.graph.replay()


def _captured(moves: list[list], total: torch.Tensor) -> list[list]:
    load_kernel(total.device)
    torch.cuda.synchronize()
    pool = torch.cuda.graph_pool_handle()  # one for all: they run one after the other
    # A bucket of another worker's rows alone leaves nothing to do here.
    work = [[step for step in steps if not isinstance(step, Copies) or step.writes()] for steps in moves]
    gc.collect()
    gc.disable()  # what is freed during a capture can spoil it
    try:
        return [[_Graph(steps, total, pool)] if steps else [] for steps in work]
    finally:
        gc.enable()


def _pairs(
    destination: torch.Tensor, copied: torch.Tensor, piece: Piece, source: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(destination, source) of the part of a copy that reads `piece`, whose elements are `source`, in any dtype.

    `copied` is a view of the tensor without storage that stands for the whole. Raises NotImplementedError if the piece
    is a part of the whole, and what is copied of it is not simply some rows of the view.
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
    return [(destination, source.as_strided(copied.size(), copied.stride(), source.storage_offset() + offset))]


# --- Parameters and layers --------------------------------------------------------------------------------------------


def _form(parameter: torch.Tensor | None) -> tuple | None:
    """What must agree for a copy into one to be one into the other. A quantized tensor only looks like a plain one."""
    if parameter is None:
        return None
    quantized = hasattr(parameter, "__tensor_flatten__")
    return parameter.dtype, parameter.shape, parameter.stride(), parameter.storage_offset(), quantized


def _loadable(parameter: torch.Tensor) -> int:
    """Elements of a parameter that a checkpoint brings: all but the padding that vLLM declares."""
    return getattr(parameter, "weight_loader_numel", parameter.numel())


def _layer_of(parameter_name: str) -> str:
    return parameter_name.rpartition(".")[0]


def repack_tied_layers(model: torch.nn.Module) -> None:
    """A layer tied to another receives no weights of its own; on CPU its packed copy must be made again."""
    owners = {}
    for module in model.modules():
        weight = getattr(module, "weight", None)
        tied = weight is not None and owners.setdefault(id(weight), module) is not module
        if tied and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that a quantized tensor consists of, or the tensor itself."""
    if hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from plain_tensors(getattr(tensor, name))
    else:
        yield tensor.as_subclass(torch.Tensor)


def _half_steps(weight: torch.Tensor) -> torch.Tensor:
    """Half the distance from each element of a quantized tensor to the next value of its format; broadcasts to it."""
    scale = weight.scale  # of each block of elements: a row, a part of one, a square
    for dim, blocks in enumerate(scale.shape):
        if blocks > 1:
            scale = scale.repeat_interleave(weight.size(dim) // blocks, dim)
    if not weight.qdata.is_floating_point():
        return scale / 2
    format = torch.finfo(weight.qdata.dtype)
    return weight.qdata.float().abs_().clamp_(min=format.smallest_normal).mul_(scale * format.eps / 2)


def _strided_as(tensor: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    return tensor.as_strided(view.size(), view.stride(), tensor.storage_offset() + view.storage_offset())
