"""The process that trains one engine of npu_counts.py on a simulated card, and counts what a step asks of the card."""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import os
from typing import Any

import torch
import torch.distributed as dist
import torch_npu  # type: ignore[import-not-found] # noqa: F401  # torch's plug-in: `npu`
from common import Reply, serve
from engines import wrap
from model import Llama, Shape, loss_of

# Engine of npu_counts.py: the one of engines.py, and its bucket_cap_mb.
ENGINES: dict[str, tuple[str, float | None]] = {
    "plain": ("single", None),
    "fsdp2": ("fsdp2", None),
    "ours": ("ours", None),
    "ours_cap25": ("ours", 25),
}
STEPS_BEFORE = 2  # the first makes what is kept: optimizer state, communicators, buffers


class Statistics:
    """The counters of the simulator that this process has loaded."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libascendcl.so")
        self._library.sim_statistics_json.restype = ctypes.c_size_t

    def reset(self) -> None:
        """All start at zero, and peaks at what is in use now."""
        self._library.sim_reset_statistics()

    def read(self) -> dict[str, Any]:
        size = self._library.sim_statistics_json(None, ctypes.c_size_t(0))
        text = ctypes.create_string_buffer(size)
        self._library.sim_statistics_json(text, ctypes.c_size_t(size))
        counted: dict[str, Any] = json.loads(text.value)
        return counted


class Rank:
    """One rank: builds the model under its engine, then trains when told to."""

    def __init__(self, spec: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        torch.npu.set_device(spec["rank"])
        engine, bucket_cap_mb = ENGINES[spec["engine"]]
        self.card = spec["rank"]
        self.statistics = Statistics()
        if engine != "single":
            dist.init_process_group(
                "cpu:gloo,npu:hccl",
                init_method=f"file://{spec['store']}",
                rank=spec["rank"],
                world_size=spec["ranks"],
                timeout=datetime.timedelta(minutes=10),
            )
        shape = Shape(**spec["shape"])
        torch.manual_seed(0)
        model = Llama(shape)
        if engine == "single":
            model = model.bfloat16()  # the operators that FSDP's modules run, too
        self.model = wrap(engine, model.to("npu"), "bf16", bucket_cap_mb, "npu")
        torch.npu.empty_cache()  # the whole model was there for a moment
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, fused=True)
        generator = torch.Generator().manual_seed(1 + spec["rank"])
        tokens_BT = torch.randint(shape.vocab, (shape.batch, shape.seq + 1), generator=generator).to("npu")
        self.inputs_BT, self.labels_BT = tokens_BT[:, :-1].contiguous(), tokens_BT[:, 1:].contiguous()

    def step(self) -> tuple[torch.Tensor, dict[str, int]]:
        """One training step: its loss, on the card, and the peak of the card's memory that tensors use, by phase."""
        peaks = {"rest": torch.npu.memory_allocated()}

        def phase(name: str) -> None:
            peaks[name] = torch.npu.max_memory_allocated()
            torch.npu.reset_peak_memory_stats()

        torch.npu.reset_peak_memory_stats()
        loss = loss_of(self.model(self.inputs_BT), self.labels_BT)
        phase("forward")
        loss.backward()
        phase("backward")
        self.optimizer.step()
        phase("optimizer")
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach(), peaks

    def count(self) -> Reply:
        """Counters of the third step, in which nothing is made that stays."""
        for _ in range(STEPS_BEFORE):
            self.step()
        torch.npu.synchronize()
        if dist.is_initialized():
            dist.barrier()  # nothing of a step before is counted: neither here nor by a peer
            torch.npu.synchronize()
        self.statistics.reset()
        loss, peaks = self.step()
        torch.npu.synchronize()
        counted = self.statistics.read()
        return {
            "operators": counted["operators"],
            "copies": counted["copies"],
            "collectives": counted["collectives"],
            "memory": counted["memory"][str(self.card)],
            "violations": counted["violations"],
            "peaks": peaks,
            "loss": loss.item(),
        }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker", required=True, help="a specification, as WorkerGroup gives it")
    spec = json.loads(parser.parse_args().worker)
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(spec["rank"])  # names the rank in the simulator's messages
    rank = Rank(spec)
    serve({"count": rank.count})
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
