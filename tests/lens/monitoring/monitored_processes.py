"""Run by torchrun: two processes watch a model under DDP, and sharded by FSDP2, and write what they saw."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from regard.lens import Monitor, qk_clip_
from tests.lens.monitoring.watched_model import Watched, batches

CLIP = 0.3
STEPS = 2


def watch(folder: Path, kind: str) -> None:
    """Train on every second batch; the last step has a batch for the first process only."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = Watched()
    trained = model
    if kind == "ddp":
        trained = DistributedDataParallel(model)
    else:
        from torch.distributed.fsdp import fully_shard

        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    optimizer, monitor = torch.optim.SGD(model.parameters(), 0.1), Monitor(model, every=1, to=folder / kind)
    for n in range(STEPS):
        with monitor:
            tokens = batches()[n * world + rank]
            trained(tokens).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        qk_clip_(model, monitor, CLIP)
    with monitor:
        last = batches()[STEPS * world]
        if rank == 0:
            trained(last)
        else:
            with monitor.pause():
                trained(last)
    torch.save(monitor.history["logit"], folder / f"{kind}-{rank}.pt")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for kind in ("ddp", "fsdp"):
        watch(Path(sys.argv[1]), kind)
    dist.destroy_process_group()
