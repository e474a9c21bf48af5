"""The optimizer's state in host memory."""

from collections.abc import Iterator

import torch

from weight_sync.ranks import local_part

from .sharding import sharded_like


class Offload:
    """Moves an optimizer's moments (with Adam, twice the size of the weights) to host memory and back."""

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer
        self.memory: torch.Tensor | None = None
        self.on_host = False

    def to_host(self) -> None:
        moments = [(state, name, local_part(state[name])) for _, state, name in self._moments()]
        if self.on_host or not moments:
            return
        sizes = [local.numel() for *_, local in moments]
        if self.memory is None:  # for all parameters: a vision tower has moments only after the first image
            learning = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
            self.memory = torch.empty(2 * sum(local_part(parameter.detach()).numel() for parameter in learning))
            if moments[0][2].is_cuda:  # page-lock it: torch's own pinned memory would round up to powers of two
                register = torch.cuda.cudart().cudaHostRegister
                torch.cuda.check_error(register(self.memory.data_ptr(), self.memory.nbytes, 0))
        for (state, name, local), host in zip(moments, self.memory[: sum(sizes)].split(sizes), strict=True):
            state[name] = host.view_as(local).copy_(local)
        self.on_host = True

    def to_device(self) -> None:
        for parameter, state, name in self._moments() if self.on_host else ():
            state[name] = sharded_like(parameter, state[name])
        self.on_host = False

    def _moments(self) -> Iterator[tuple[torch.Tensor, dict, str]]:
        for parameter, state in self.optimizer.state.items():
            yield from ((parameter, state, name) for name in state if name != "step")
