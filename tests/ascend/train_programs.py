"""What the ranks of test_train.py run: the trainer on cards and on the CPU, in the same processes.

Arguments: a folder with data.jsonl, and the cases, separated by commas, as "strategy:dtype" or
"strategy:dtype:tp_degree". Rank 0 prints one JSON line per case.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path

import torch
import yaml

from torchtitan_npu.config import RunArgs, load_config
from torchtitan_npu.launch import choose_device, connect, gather_rows, read_environment, read_timeouts
from torchtitan_npu.train.trainer import Trainer

STEPS = 4


def train(folder: Path, case: str, device: torch.device, steps: int, name: str) -> list[float]:
    """The losses of the steps that were run; checkpoints go to, and come from, ``name``."""
    strategy, dtype, tp = (*case.split(":"), "1")[:3]
    config = {
        "model": {"name": "llama3_debug", "dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 96}
        | {"max_seq_len": 64, "use_flash_attention": strategy != "ddp"},
        "training": {"batch_size": 2, "seq_len": 64, "learning_rate": 1e-2, "max_steps": steps, "warmup_steps": 1}
        | {"lr_schedule": "constant", "gradient_accumulation_steps": 2, "loss_chunk_tokens": 48, "z_loss_weight": 1e-3}
        | {"checkpoint": {"async_save": strategy == "fsdp", "save_interval": 2}},
        "parallel": {"strategy": strategy, "dtype": dtype, "replicate_degree": 2 if strategy == "hsdp" else 1}
        | {"tp_degree": int(tp)},
    }
    file = folder / f"{name}.{os.environ['RANK']}.yaml"
    file.write_text(yaml.safe_dump(config))
    args = RunArgs(
        data_dir=str(folder / "data.jsonl"),
        checkpoint_dir=folder / name,
        log_dir=folder / f"{name}-{device.type}-{steps}.logs",
    )
    trainer = Trainer(load_config(file), args, read_environment(), device)
    trainer.train()
    trainer.close()
    gather_rows([0.0])
    lines = (args.log_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def main() -> None:
    folder, cases = Path(sys.argv[1]), sys.argv[2].split(",")
    env = read_environment()
    logging.basicConfig(level=logging.WARNING)
    card = choose_device("npu", env)
    connect(env, read_timeouts(), card)
    cpu = torch.device("cpu")
    for case in cases:
        name = case.replace(":", "-")
        result = {
            "case": case,
            "cpu": train(folder, case, cpu, STEPS, f"{name}-cpu"),
            "npu": train(folder, case, card, STEPS, f"{name}-npu"),
        }
        if "fp32" in case:  # half on one, half on the other
            first = train(folder, case, cpu, STEPS // 2, f"{name}-moved")
            result["cpu then npu"] = first + train(folder, case, card, STEPS, f"{name}-moved")
            first = train(folder, case, card, STEPS // 2, f"{name}-back")
            result["npu then cpu"] = first + train(folder, case, cpu, STEPS, f"{name}-back")
        if env.rank == 0:
            print(json.dumps(result), flush=True)
    gather_rows([0.0])
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
