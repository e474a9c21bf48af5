"""The weights that a trainer rank sends."""

import torch

from .buckets import dtype_name
from .link import WeightSyncError
from .lora import LoRAWeight
from .ranks import Ranks, ShardedPart, local_part, ranks_of
from .regions import Region, copy_of
from .trace import storage_id


def memory_of(named: dict[str, torch.Tensor | LoRAWeight]) -> list[tuple]:
    """Where these weights lie, and how: copies from them are right for as long as this stays the same."""
    memory = []  # of some hundred weights, in every sync: keep it short
    for name, weight in named.items():
        if isinstance(weight, LoRAWeight):
            factors = _memory(weight.lora_A), _memory(weight.lora_B)
            memory.append((name, weight.scaling, weight.transposed, *factors, _memory(local_part(weight.base))))
        else:
            memory.append((name, *_memory(local_part(weight))))
    return memory


def _memory(tensor: torch.Tensor) -> tuple:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


class Weights:
    """Tensors by name, tied ones once; of weights with adapters, the bases. `ranks` hold shards of them.

    Raises WeightSyncError for what cannot be sent.
    """

    def __init__(self, named: dict[str, torch.Tensor | LoRAWeight], memory: list[tuple], ranks: Ranks | None = None):
        self.names, self.memory = list(named), memory
        self.adapted = {name: weight for name, weight in named.items() if isinstance(weight, LoRAWeight)}
        bases = {name: weight.base if name in self.adapted else weight for name, weight in named.items()}
        factors = [factor for weight in self.adapted.values() for factor in (weight.lora_A, weight.lora_B)]
        self._check({name: local_part(base) for name, base in bases.items()}, factors)
        self.tensors = self._without_ties(bases)
        found = ranks_of(self.tensors)
        self.ranks = ranks or found
        if found.size > 1 and (found.size, found.rank) != (self.ranks.size, self.ranks.rank):
            raise WeightSyncError("tensors are sharded, and none was in the first sync: make a new session")
        local = [local_part(tensor) for tensor in self.tensors.values()]
        self.device, self.are_contiguous = local[0].device, all(tensor.is_contiguous() for tensor in local)
        self.kept = [(tensor, tensor.data_ptr()) for tensor in (*local, *factors)]
        self.metadata = [  # (name, name of the dtype, shape, bounds) of each tensor, as `plan_buckets` has them
            (name, dtype_name(t.dtype), tuple(t.shape), self.ranks.bounds(t)) for name, t in self.tensors.items()
        ]

    def were_freed(self) -> bool:
        """Whether other tensors may lie where these did: FSDP2 frees memory of tensors that live on."""
        return any(tensor.data_ptr() != address for tensor, address in self.kept)

    def held(self) -> dict[str, torch.Tensor]:
        """What this rank sends of each tensor, by name: elements [n]."""
        held = {name: self.ranks.elements(tensor) for name, tensor in self.tensors.items()}
        return {name: elements for name, elements in held.items() if len(elements)}

    def copy(self, destination: torch.Tensor, region: Region) -> tuple:
        """The copy of a region that this rank sends, as `BatchedCopy` takes it."""
        piece, tensor = region.piece, self.tensors[region.piece.name]

        def copy(destination: torch.Tensor) -> tuple:
            elements = self.ranks.elements(tensor)[piece.begin - piece.first :][: piece.count]
            return copy_of(destination, region, elements, self.adapted.get(piece.name))

        def write(out: torch.Tensor) -> None:  # what has no elements to point to: they are copied in each sync
            destination, source = copy(out)
            source(destination) if callable(source) else destination.copy_(source)

        return copy(destination) if local_part(tensor).is_contiguous() else (destination, write)

    def _check(self, local: dict[str, torch.Tensor], factors: list[torch.Tensor]) -> None:
        if len(devices := {str(tensor.device) for tensor in (*local.values(), *factors)}) > 1:
            raise WeightSyncError(f"the tensors are on {', '.join(sorted(devices))}: a sync sends those of one device")
        for name, tensor in local.items():
            if tensor.numel() and not tensor.data_ptr():  # freed, or of a subclass that wraps others, such as torchao's
                raise WeightSyncError(f"{name} ({type(tensor).__name__}) has no memory, or none any more")
        for name, weight in self.adapted.items():
            weight.check(name)

    def _without_ties(self, bases: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors by name; of tensors that share memory (tied weights), only the first."""
        tensors, first_names = {}, {}
        for name, tensor in bases.items():
            local = local_part(tensor)
            begin = tensor.begin if isinstance(tensor, ShardedPart) else local.storage_offset()
            memory = (storage_id(local), begin, tensor.shape, local.stride())  # a shard without rows has no address
            first = first_names.setdefault(memory, name)
            if first == name and tensor.numel():
                tensors[name] = tensor if isinstance(tensor, ShardedPart) else tensor.detach()
            elif tensor.numel() and self.adapted.get(first) is not self.adapted.get(name):
                raise WeightSyncError(f"{first} and {name} are tied, and do not have the same adapter")
        if not tensors:
            raise WeightSyncError("there is nothing to send: the model has no parameters")
        return tensors
