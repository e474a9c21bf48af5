"""The machinery behind rlhf_utils.py, from the ground up. A module imports only modules listed above it.

link                 messages between trainer and worker, with deadlines and the detection of dead peers
copies               many copies as one kernel, and a digest of what they write
trace                which writes vLLM's weight loaders make
lora                 weights with LoRA adapters, which are merged as they are read
samples              blocks that are compared where a worker reads the trainer's own memory
buckets              how tensors are packed into the buckets that travel
groups               broadcast groups (NCCL, gloo) and memory that two processes share (CUDA IPC)
channels             links and staging buffers between the trainer and its workers
ranks, packing       the trainer ranks that hold shards, and what each of them packs
replay               a load, recorded as copies that later syncs repeat
engine_model         the model inside a vLLM worker: preflight, reload, replay, digest
comparison           of quantized weights with what was sent
sender, receiver     the two ends of a sync
example_protocols    the worker's end of the protocols of vLLM's examples
"""
