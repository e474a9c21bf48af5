"""The engine: a Ray actor around one vllm.AsyncLLM, the same in all topologies."""

import asyncio
import gc
import itertools
import os
import shutil
from collections.abc import Sequence
from multiprocessing.util import get_temp_dir

import ray

from rlhf_utils import WeightSyncError, end_with_children

from ..errors import RunError
from ..images import Images
from ..learning.rollout import Rollout
from .engine_start import engine_start, fork_engine_core, gpus_of, import_vllm
from .options import EngineArguments, EngineSetting, llm_options
from .quantization import quantize_by_torchao
from .sampling import rollouts_of


class EngineActor:
    """A Ray actor around vllm.AsyncLLM, whose processes are children of the actor. Many of its methods run at the same
    time. `prepare`, `sample`, `drop_caches` and `sleep` are called of all engines: ServerPool has them, too
    (trainer/topologies/server_pool.py)."""

    def __init__(self, number: int):
        self.request_ids, self.leaving = itertools.count(), False
        self.gpus = ""  # of its workers, if it reserves none
        self.asleep: str | None = None  # `sleep`'s level
        self.slept = False  # whether the weights' memory was ever released
        self.cached = False  # whether caches may have what older weights computed
        self.running = 0  # requests in flight

    async def prepare(self, device: str, bundles: list[int]) -> None:
        """Import what takes long, while the run settles what to start. `device` is "cuda" or "cpu"; the engine's
        workers use these `bundles` of its placement group."""
        if device == "cuda" and not (self.gpus or ray.get_gpu_ids()):
            self.gpus = os.environ["CUDA_VISIBLE_DEVICES"] = await gpus_of(bundles)
        if device == "cpu":
            os.environ["TORCH_COMPILE_DISABLE"] = "1"  # compiling takes longer than such a run
        import_vllm()

    async def start(
        self,
        model: str,
        args: EngineArguments,
        setting: EngineSetting,
        sleep: str,
        bundles: list[int],
        before: int | None = None,
    ) -> int:
        """Start the engine, whose workers use these `bundles` of its placement group. It sleeps at this level until the
        first sync. `before` is what another engine has returned for which it was to wait. Returns the tokens that a
        prompt and its completion may have."""
        await self.prepare(setting.device, bundles)
        options, environment = llm_options(args, model, setting, bundles)
        os.environ.update(environment)  # for the engine's processes
        if args.quantization and setting.extension:
            quantized, self.quantization = quantize_by_torchao(args.quantization)
            options = quantized | options
        max_model_len = await self.load(model, options)
        if setting.extension:
            self.from_disk = await self.llm.collective_rpc("weight_digests")  # for `serves_checkpoint`
            await self.sleep(sleep)
        return max_model_len

    async def load(self, model: str, options: dict) -> int:
        """Start vLLM with these options. Returns the tokens that a prompt and its completion may have."""
        from vllm import AsyncEngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        options = {"scheduling_policy": "priority", "disable_log_stats": True} | options
        if not options.get("numa_bind"):  # which vLLM does as it spawns
            fork_engine_core()
        with engine_start():
            arguments = AsyncEngineArgs(model, **options)
            # The usage context of vllm.LLM: with AsyncLLM's, batches are larger.
            self.llm = AsyncLLM.from_engine_args(arguments, usage_context=UsageContext.LLM_CLASS)
        gc.freeze()  # what is loaded by now. To search it again for garbage would stop all here for 0.4 s at a time
        end_with_children(unless=lambda: self.leaving)
        return self.llm.model_config.max_model_len

    async def sample(
        self,
        prompts: list[list[int]],
        sampling: list[dict],
        images: Sequence[Images | None] | None = None,
        low_priority: bool = False,
    ) -> list[Rollout]:
        """The completions of prompts, given as token ids, in order and without rewards. `sampling` has the options of
        each prompt, and `images` its images. The prompt has a token for each.

        Prompts of `low_priority` wait behind all others in vLLM's queue.
        """
        calls = []
        for ids, options, own in zip(prompts, sampling, images or [None] * len(prompts), strict=True):
            data = {"multi_modal_data": {"image": await asyncio.to_thread(own.decoded)}} if own else {}
            calls.append(self.generate({"prompt_token_ids": ids} | data, options, low_priority))
        return rollouts_of(await asyncio.gather(*calls), self.llm.get_tokenizer())

    async def generate(self, prompt: dict, options: dict, low_priority: bool = False):
        """The finished vllm.RequestOutput of a prompt with these sampling options."""
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        # flat: lists instead of an object per token
        params = SamplingParams(flat_logprobs=True, output_kind=RequestOutputKind.FINAL_ONLY, **options)
        self.cached = True
        self.running += 1
        try:
            outputs = self.llm.generate(prompt, params, str(next(self.request_ids)), priority=int(low_priority))
            (request,) = [output async for output in outputs]
            if any(own.finish_reason not in ("stop", "length") for own in request.outputs):
                raise RunError("vLLM could not finish a completion: run.log has its error")  # it raises none
            return request
        finally:
            self.running -= 1

    async def drop_caches(self) -> None:
        """Drop what was computed for earlier prompts; what is needed for prompts in flight may stay."""
        if not self.running:  # else the next sync does
            await self._reset_caches()

    async def init_weight_update_group(self, address: str, port: int, world_size: int, rank_offset: int) -> None:
        """Have the workers join the trainer's group, as the ranks from `rank_offset` on."""
        await self.llm.collective_rpc("init_weight_update_group", args=(address, port, rank_offset, world_size))

    async def receive_weights(self, version: int, *args) -> bool:
        """Have every worker take part in a sync, with these arguments of its `receive_weights`, while generation
        pauses. An engine that sleeps wakes up. Returns whether all workers serve exactly what was sent. Only then does
        generation go on, with tokens of this version. Raises WeightSyncError if the sync fails."""
        if self.asleep is None:
            await self.llm.sleep(level=0, mode="keep")  # pause_generation would do no more, and wait for 20 ms
            await self._reset_caches()
        if self.asleep == "weights":
            await self.llm.wake_up(tags=["weights"])
        receiving = self.llm.collective_rpc("receive_weights", args=args)
        checking = self.llm.collective_rpc("check_weights_changed")  # asked for at once: workers answer in turn
        results, answers = await asyncio.gather(receiving, checking)
        if errors := [result["error"] for result in results if "error" in result]:
            raise WeightSyncError(errors[0])
        served = all(answers)
        if served:
            await self.llm.update_weight_version(str(version))  # while paused, or vLLM labels some tokens wrongly
            if self.asleep not in (None, "none") and not await self.llm.wake_up(tags=["kv_cache"]):
                raise RunError("vLLM did not wake up")
            await self.llm.resume_generation()
            self.asleep = None
        return served

    async def quantized_by(self) -> str:
        """The name of the quantization."""
        return self.quantization

    async def compare_weights(self) -> None:
        """Have every worker compare its quantized weights with what the trainer sends."""
        await self.llm.collective_rpc("compare_weights")

    async def _reset_caches(self) -> None:
        """Drop what was computed with the old weights. Unfinished completions compute their keys and values anew."""
        if not self.cached:
            return
        self.cached = self.running > 0  # before the first await, in which requests may come and end
        if not await self.llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True):
            raise RunError("vLLM did not reset its prefix cache, which holds keys and values of the old weights")
        await self.llm.reset_encoder_cache()

    async def shutdown(self) -> None:
        self.leaving = True
        shutil.rmtree(get_temp_dir(), ignore_errors=True)  # which has the fork server's socket: Ray kills this actor
        self.llm.shutdown()

    # For engines that generate nothing while trainers learn

    async def sleep(self, level: str) -> None:
        """Generate nothing until the next sync, drop what was computed with the old weights, and release memory: the KV
        cache's ("kv"), the weights' as well ("weights"), or none ("none"). What is done here need not be done while the
        trainer waits."""
        await self._reset_caches()
        await self.llm.sleep(level=2 if level == "weights" else 0)  # level 2 keeps no copy of the weights
        if level == "weights":
            self.slept = True
        elif level != "none":
            await self.llm.release_kv_cache_memory()
            await self.llm.collective_rpc("empty_cache")  # which level 2 does itself
        self.asleep = level

    async def device_ids(self) -> list[str]:
        return await self.llm.collective_rpc("report_device_id")

    async def serves_checkpoint(self) -> bool:
        """Whether the first sync brought, bit for bit, the weights that this engine had loaded from disk.

        It may not if the trainer's weights have another dtype, and a loader of vLLM computes with them. Raises RunError
        if tensors of the layers were lost in a sleep: of level 2, vLLM restores only parameters and buffers.
        """
        digests = await self.llm.collective_rpc("weight_digests")  # of each worker: of parameters, and of all tensors
        same = all(now == before for (now, _), (before, _) in zip(digests, self.from_disk, strict=True))
        if same and self.slept and digests != self.from_disk:
            raise RunError("this model's layers keep tensors that vLLM loses in its sleep: --sleep weights cannot work")
        return same
