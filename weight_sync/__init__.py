"""The machinery behind rlhf_utils.py, from the ground up. A module imports only modules listed above it.

link                 messages between trainer and worker, with deadlines and the detection of dead peers
copies               many copies as one kernel, and a digest of what they write
trace                which writes vLLM's weight loaders make
lora                 weights with LoRA adapters, which are merged as they are read
buckets              how tensors are cut into pieces, each of one trainer rank, and packed into buckets
regions              the elements of a piece that a worker needs
groups               groups of processes (NCCL, gloo) and memory that several processes map (CUDA IPC)
staging              where the weights lie at each end on their way: in buffers, or in memory that both ends map
ranks                the trainer ranks that hold shards
weights              what one of them sends
channels             links between the trainer ranks and the workers
replay               a load, recorded as copies that later syncs repeat
engine_model         the model inside a vLLM worker: preflight, reload, replay, digest
comparison           of quantized weights with what was sent
sending              the two ways to send: over a group, or by memory that workers map
sender, receiver     the two ends of a sync
example_protocols    the worker's end of the protocols of vLLM's examples
"""
