"""Which topology a run has."""

from dataclasses import replace

from ..errors import RunError
from ..run.folder import RunFolder
from ..run.session import RaySession
from ..tasks.task import Task
from .base import Topology
from .separate import Separate
from .servers import Servers
from .shared import Shared

TOPOLOGIES = {"shared": Shared, "separate": Separate, "servers": Servers}


def choose_topology(args, task: Task, run: RunFolder, session: RaySession) -> Topology:
    """The topology that --topology names or that other flags ask for, with its devices reserved. Says which. Raises
    RunError for flags that it does not have."""
    placement, ahead, servers = args.placement, args.ahead.max_staleness, args.servers.engine_url
    name, reason = placement.topology, ""
    if name is None and servers:
        name, reason = "servers", ", for --engine-url"
    elif name is None and (ahead or placement.trainers):
        name, reason = "separate", f", for {'--max-staleness' if ahead else '--trainers'}"
    elif name is None:
        name = "shared"
    refused = {
        "--max-staleness is for engines that generate while the trainer learns": name == "shared" and ahead,
        "--trainers is for GPUs of their own: each shared GPU has a trainer rank": name == "shared"
        and placement.trainers,
        "--trainers: one trainer sends to servers": name == "servers" and (placement.trainers or 1) > 1,
        "--engine-url is for servers": name != "servers" and servers,
        "engines_per_gpu is for shared GPUs": name != "shared" and placement.engines_per_gpu,
        "--quantization: servers have their own": name == "servers" and args.engine.quantization,
    }
    if message := next((message for message, holds in refused.items() if holds), ""):
        raise RunError(f"--topology {name}: {message}")
    if name == "servers":
        task.refuse_images("servers get token ids alone")
    args.placement = replace(args.placement, topology=name)  # for --resume
    topology = TOPOLOGIES[name](args, task, run, session)
    run.say(f"--topology {name}{reason}")
    run.say(topology.remark)
    return topology
