"""The model inside a vLLM worker, as a weight sync uses it: preflight, reload, replay, digest.

`EngineModel.reload` runs vLLM's own loaders in its reload bracket. `record` turns such a load into copies, and `replay`
repeats the copies alone.
"""

import logging
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from .buckets import Piece, dtype_name, wire_of
from .copies import BatchedCopy, digest, digest_together
from .link import WeightSyncError
from .regions import Region
from .replay import Recording, capture
from .staging import Staging
from .trace import Write, WriteTrace, layer_of, parameters_and_buffers, plain_tensors, unwrapped_loaders

PROVEN_WITH = ("0.32", "0.33")  # versions of vLLM


class EngineModel:
    """A vLLM worker's model, and what the syncs so far have left in it."""

    def __init__(self, worker):
        warn_if_unproven(worker)
        self.worker = worker
        self.model = worker.get_model()
        pack_experts_when_loaded(self.model)
        self.loading = False  # a reload bracket is open
        self.first_names: dict[str, str] = {}  # by each of a parameter's names, several if it is tied; after a trace
        self.required_elements: dict[str, int] = {}  # by parameter: what a sync must write; known after a trace
        self.expected: dict[tuple, bool] = {}  # writes of a sync, as of `expected_writes`; known after the preflight
        self.collected: dict[str, tuple[torch.Tensor, list[Write]]] = {}  # waits for the rest of a version
        self.loaded_buffers: set[str] = set()  # buffers that syncs write
        self.digest: int | None = None  # of the weights after the last sync, None unless it completed
        self.version = 0
        self.replay_steps: list[list] | None = None  # by bucket
        self.compared: list[tuple[Region, torch.Tensor]] = []  # of a replay: what it copies, and the served copy
        self.digest_total: torch.Tensor | None = None  # int64 [1]: the digest, if the steps of a replay add it up

    def preflight(self, metadata: list) -> tuple[list[str | None], list[str]]:
        """Check that these tensors, given as (name, name of the dtype, shape), load, and are all that the engine needs.

        Returns for each the name of the dtype to send it in (None if this worker does not load it), and all problems.
        """
        traced, problems = self.trace(metadata)
        dtypes = [next(map(self._wire_dtype, traced.get(name, [])), None) for name, _, _ in metadata]
        self.expected = expected_writes(traced.values())
        problems = problems or [
            f"nothing that is sent goes to the engine's {name}" for name in self.missing(self.expected)
        ]
        return dtypes, problems + self._untied(traced)

    def collect(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        """Keep these tensors for `load_if_complete`. One that comes again replaces the first.

        Raises WeightSyncError for one that the engine cannot load.
        """
        traced, problems = self.trace([(name, dtype_name(w.dtype), tuple(w.shape)) for name, w in weights])
        if problems:
            raise WeightSyncError(problems[0])
        for name, weight in weights:
            if traced[name]:  # else the weight is not for this worker
                self.collected[name], self.digest = (weight, traced[name]), None

    def load_if_complete(self) -> None:
        """Load what was collected if nothing is missing: the next version of the weights. Raises as `reload` does."""
        expected = expected_writes(writes for _, writes in self.collected.values())
        if self.collected and not self.missing(expected):
            weights = [(name, weight) for name, (weight, _) in self.collected.items()]
            self.collected = {}
            self.reload([weights], expected)
            self.version, self.digest = self.version + 1, self.weights_digest()

    def _untied(self, traced: dict[str, list[Write]]) -> list[str]:
        """Problems: tensors that the engine ties and the trainer does not. The last one loaded would win."""
        sent = {}  # names by the elements that they write
        for name, writes in traced.items():
            copied = [write.elements for write in writes if isinstance(write.value, torch.Tensor)]
            for elements in {(self.first_names.get(target, target), *where) for target, *where in copied}:
                sent.setdefault(elements, []).append(name)
        return [f"{' and '.join(names)}: the engine has one weight for them" for names in sent.values() if names[1:]]

    def _loads_only_part(self, writes: list[Write], numel: int) -> bool:
        """Whether the workers together load less than the whole tensor: some loaders cut off what does not fit."""
        padded = any(loadable_elements(write.parameter) < write.parameter.numel() for write in writes)
        if padded or not all(isinstance(write.value, torch.Tensor) for write in writes):
            return False  # padding on some workers, or a loader that computes: elements cannot be counted
        loaded = sum(write.destination.numel() for write in writes)
        return 0 < loaded < numel / self.worker.parallel_config.tensor_parallel_size

    def _wire_dtype(self, write: Write) -> str:
        """The parameter's dtype for a loader that copies, the model's for a loader that computes."""
        return dtype_name(self.worker.model_config.dtype if write.value is None else write.destination.dtype)

    def missing(self, expected: dict[tuple, bool]) -> list[str]:
        """Names of the parameters that are not wholly written."""
        written = Counter()
        for name, _, size, _ in expected:
            written[name] += size.numel()
        return sorted(name for name, numel in self.required_elements.items() if written[name] < numel)

    def reload(self, batches: Iterable[list[tuple[str, torch.Tensor]]], expected: dict[tuple, bool]) -> None:
        """Load tensors in one reload bracket, which keeps them, uncopied, until their layer is complete.

        Raises WeightSyncError if vLLM's loader has loaded less than expected.
        """
        self.digest = None
        self.loaded_buffers |= {name for name, *_ in expected} & dict(self.model.named_buffers()).keys()
        with self._context():
            with self._bracket():
                for weights in batches:
                    self.model.load_weights(weights)
                missed = self._missed(expected)
            repack_tied_layers(self.model)
        if missed:
            more = f" and {len(missed) - 1} more" if missed[1:] else ""
            raise WeightSyncError(
                f"vLLM's loader did not load all that was sent for {missed[0]}{more}: the model's load_weights leaves"
                " something out, or writes past the parameters' weight loaders, where vLLM's reload cannot see it"
            )

    @contextmanager
    def _bracket(self) -> Iterator[None]:
        """vLLM's reload bracket. A load that fails leaves it open, and the next one closes it."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self._close_bracket()
        self.loading = True
        initialize_layerwise_reload(self.model)
        yield
        self._close_bracket()

    def _close_bracket(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        if self.loading:
            finalize_layerwise_reload(self.model, self.worker.model_config)
        self.loading = False

    def _missed(self, expected: dict[tuple, bool]) -> list[str]:
        """Parameters not loaded, and layers whose parameters were not wholly loaded."""
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
        from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS

        counted: dict[str, Counter] = {}  # elements by layer and parameter, as vLLM's reload counts them
        for (target, _, size, _), is_loaded in expected.items():
            layer, _, name = target.rpartition(".")
            if is_loaded and target not in self.loaded_buffers and name not in SKIP_LOAD_TENSORS:
                counted.setdefault(layer, Counter())[target] += size.numel()
        incomplete = []
        for layer, elements in counted.items():
            module = self.model.get_submodule(layer)
            info = get_layerwise_info(module)
            if not info.can_load():
                continue  # vLLM processes and resets a layer as soon as it is complete
            served, _ = info.kernel_tensors
            for target in list(elements):
                name = target.rpartition(".")[2]
                now = module._parameters[name]
                if name in served and now is not served[name] and not now.is_meta:  # registered anew, and not counted
                    served[name].data.copy_(now)  # the bracket restores it, maybe without a look at the new one
                    del elements[target]
            if info.load_numel < elements.total():
                loaded = {f"{layer}.{name}" for name, _ in info.loaded_weights}
                incomplete += sorted(elements.keys() - loaded) or [layer]
        return incomplete

    def record(self, buckets: list[list[Piece]], open_staging: Callable[[list[list[Region]]], Staging]) -> str | None:
        """Record a load of these buckets for `replay`. Returns the reason if that is impossible.

        `open_staging` gets the regions that this worker needs of each bucket, and returns where they will arrive.
        """
        self.replay_steps = None
        traced, _ = self.trace(wire_of(buckets))
        try:
            recording = Recording(self.model, self._context, traced, buckets, self.worker.device)
            if packed := [name for name, module in self.model.named_modules() if computes_with_copy(module)]:
                return f"{packed[0]}: the engine computes with a packed copy, as vLLM does on CPU"
            staging = open_staging(recording.regions)
            replay_steps = [recording.steps(i, staging) for i in range(len(buckets))]
            copies = [step for steps in replay_steps for step in steps if isinstance(step, BatchedCopy)]
            self.compared, total = recording.compared, torch.zeros(1, dtype=torch.int64, device=self.worker.device)
            digests = not recording.layers and digest_together(copies, list(self.served_tensors()))
            self.digest_total = total if digests else None
            self.replay_steps = capture(replay_steps, total) if total.is_cuda else replay_steps
        except NotImplementedError as reason:
            return str(reason)
        except Exception as error:  # processing that cannot be captured, no memory: reload still works
            return f"{type(error).__name__}: {error}".splitlines()[0]
        return None

    @torch.no_grad()
    def replay(self, arrivals: Iterator[int]) -> int | None:
        """Run what was recorded of each bucket as it arrives. Returns the digest of all weights."""
        self.digest = None
        for i in arrivals:
            for step in self.replay_steps[i]:
                step.run(self.digest_total)
        if self.digest_total is None:
            return self.weights_digest()
        total = int(self.digest_total)
        self.digest_total.zero_()  # now, so that the next replay need not
        return total

    def state_digest(self) -> int | None:
        """The digest of the weights and of all other tensors that the model's layers keep, except the KV cache.

        Some layers compute such tensors from the weights during a load. A replay would leave them stale.
        """
        other_tensors = [
            value
            for module in self.model.modules()
            for name, value in (vars(module) | module._buffers).items()
            if isinstance(value, torch.Tensor) and value.device == self.worker.device and name != "kv_cache"
        ]
        return digest([tensor for tensor in (*self.served_tensors(buffers=False), *other_tensors) if tensor.numel()])

    def unchanged(self) -> bool:
        return self.digest is not None and self.weights_digest() == self.digest

    def trace(self, metadata: list) -> tuple[dict[str, list[Write]], list[str]]:
        """Run the loaders without effect. Returns their writes by tensor, and the problems."""
        traced, problems = {}, []
        with self._loadable_parameters() as parameters:
            for name, dtype, shape in metadata:
                source = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
                try:
                    with WriteTrace(parameters, source) as trace:
                        self.model.load_weights([(name, source)])
                    traced[name] = trace.writes
                except Exception as error:  # loaders raise anything for a name or shape that does not fit
                    reason = textwrap.shorten(f"{type(error).__name__}: {error}", 120, placeholder=" ...")
                    problems.append(f"{name} {list(shape)}: the engine cannot load it ({reason})")
                    continue
                if self._loads_only_part(traced[name], torch.Size(shape).numel()):
                    problems.append(f"{name} {list(shape)}: the engine would load only a part of it")
        return traced, problems

    @contextmanager
    def _loadable_parameters(self) -> Iterator[dict[str, torch.Tensor]]:
        """Parameters and buffers as loaders see them: inside a reload bracket, into which nothing is loaded."""
        with self._context():
            self._close_bracket()  # in an open bracket, tied parameters are separate ones
            named, firsts = self.model.named_parameters(remove_duplicate=False), {}
            self.first_names = {name: firsts.setdefault(parameter, name) for name, parameter in named}
            optional = self._optional_parameters()
            with self._bracket():
                parameters = self.model.named_parameters()
                self.required_elements = {name: loadable_elements(p) for name, p in parameters if name not in optional}
                parameters = parameters_and_buffers(self.model)
                with unwrapped_loaders(parameters.values()):
                    yield parameters

    def _optional_parameters(self) -> set[str]:
        """Parameters that a sync need not write: further names of tied ones, and the scales of attention layers."""
        from vllm.model_executor.layers.attention import is_deferred_attention_layer

        scaled = {name for name, module in self.model.named_modules() if is_deferred_attention_layer(module)}
        return {name for name, first in self.first_names.items() if name != first or layer_of(name) in scaled}

    @torch.no_grad()
    def weights_digest(self, buffers: bool = True) -> int | None:
        """A number that changes with any changed, moved or swapped element; None for a model without parameters."""
        return digest(list(self.served_tensors(buffers)))

    def served_tensors(self, buffers: bool = True) -> Iterator[torch.Tensor]:
        """Plain tensors that together hold every weight: a quantized parameter comes as values and scales.

        With `buffers`, the buffers that a sync has written come as well.
        """
        for parameter in self.model.parameters():
            if parameter.numel():
                yield from plain_tensors(parameter.detach())
        for module in self.model.modules():
            # The copy's form is opaque. Multiplying with the identity reads it.
            if computes_with_copy(module):
                size = module.weight.size(-1) if module.weight.numel() else module.input_size  # of a replicated layer
                identity = torch.eye(getattr(module, "input_size_per_partition", size), dtype=module.weight.dtype)
                yield module.cpu_linear(identity, module.weight, None)
        for name in sorted(self.loaded_buffers) if buffers else ():
            yield self.model.get_buffer(name)

    @contextmanager
    def _context(self) -> Iterator[None]:
        from vllm.config import set_current_vllm_config

        # vLLM warns of every layer that was not loaded in a bracket. A trace loads none.
        logger = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
        logger.disabled = True
        try:
            with torch.no_grad(), set_current_vllm_config(self.worker.vllm_config):
                yield
        finally:
            logger.disabled = False


def loadable_elements(parameter: torch.Tensor) -> int:
    """How many elements of a parameter a checkpoint fills: all but the padding that vLLM declares."""
    return getattr(parameter, "weight_loader_numel", parameter.numel())


def expected_writes(loads: Iterable[list[Write]]) -> dict[tuple, bool]:
    """What these loads write, each once, and whether it is loaded, or filled with a number."""
    return {write.elements: not isinstance(write.value, int | float) for writes in loads for write in writes}


def warn_if_unproven(worker) -> None:
    """Log a warning, from one worker of an engine, if this sync was not proven with its version of vLLM."""
    from vllm import __version__

    if ".".join(__version__.split(".")[:2]) not in PROVEN_WITH and worker.rank == 0:
        logging.getLogger(__name__).warning(
            "This weight sync was proven with vLLM %s, and not with %s: in its repository, run `make test test-rest`"
            " and, on GPUs, `make test-gpu` with that version before you rely on it.",
            " and ".join(PROVEN_WITH),
            __version__,
        )


def computes_with_copy(module: torch.nn.Module) -> bool:
    """Whether this layer computes with a packed copy of its weight, as linear layers do where vLLM has oneDNN."""
    # vLLM makes `cpu_linear` a closure over the copy. A function without one computes with the weight it is given.
    return bool(getattr(getattr(module, "cpu_linear", None), "__closure__", None))


def repack_tied_layers(model: torch.nn.Module) -> None:
    """On CPU, pack tied layers again: vLLM 0.32 packs a copy for each, and loads weights only into the first."""
    first_users = {}
    for module in model.modules():
        weight = getattr(module, "weight", None)
        tied = weight is not None and first_users.setdefault(id(weight), module) is not module
        if tied and computes_with_copy(module):
            module.quant_method.process_weights_after_loading(module)


def pack_experts_when_loaded(model: torch.nn.Module) -> None:
    """vLLM 0.32 packs a CPU engine's experts when it starts, but not when it loads them again. Have it do both."""
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        experts = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
        # On CPU, experts name the instruction set (ISA) that they are packed for.
        if hasattr(experts, "isa") and "process_weights_after_loading" not in vars(method):

            def process_and_pack(layer, process=method.process_weights_after_loading, experts=experts):
                process(layer)
                experts.process_weights_after_loading(layer)

            method.process_weights_after_loading = process_and_pack
