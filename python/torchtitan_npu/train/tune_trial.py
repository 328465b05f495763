"""What ``torchtitan-npu tune`` times: the trainer's step, on random tokens."""

from __future__ import annotations

import torch

from torchtitan_npu.config import Config, validate_world
from torchtitan_npu.launch import Environment
from torchtitan_npu.ops import Documents
from torchtitan_npu.train.loss import StepLoss
from torchtitan_npu.train.optimizer import build_optimizer
from torchtitan_npu.train.parallelize import make_scaler, parallelize


class TuneTrial:
    """The model of a configuration on the CPU, with the optimizer and the loss that training has. Collective.

    Attributes:
        model: names the parameters, and has the engine's counters.
    """

    def __init__(self, cfg: Config, env: Environment) -> None:
        training = cfg.training
        degrees = validate_world(cfg, env.world_size)
        self._cfg, self._dp_degree = cfg, degrees.dp
        self._parallel = parallelize(cfg, torch.device("cpu"))
        self.model = self._parallel.module
        self._optimizer = build_optimizer(self.model.named_parameters(), self._parallel.decayed, cfg)
        self._scaler = make_scaler(cfg, self._parallel)
        generator = torch.Generator().manual_seed(training.seed + degrees.dp_rank(env.rank))
        shape = (training.batch_size, training.seq_len + 1)
        tokens_BT = torch.randint(cfg.model.vocab_size, shape, generator=generator)
        self._inputs_BT, self._labels_BT = tokens_BT[:, :-1], tokens_BT[:, 1:]
        one_document = torch.zeros_like(self._inputs_BT)
        self._documents = Documents.from_ids(one_document, torch.device("cpu")) if cfg.data.document_mask else None

    def step(self) -> None:
        """One whole optimizer step. Collective."""
        micro_batches = self._cfg.training.gradient_accumulation_steps
        loss_of = StepLoss(
            self._cfg,
            valid_labels=self._labels_BT.numel() * micro_batches * self._dp_degree,
            dp_degree=self._dp_degree,
            loss_scale=self._scaler.get_scale() if self._scaler.is_enabled() else 1.0,
        )
        for index in range(micro_batches):
            with self._parallel.micro_batch(last=index == micro_batches - 1):
                scaled, _ = loss_of(self._parallel, self._inputs_BT, self._labels_BT, self._documents)
                self._scaler.scale(scaled).backward()
        self._scaler.unscale_(self._optimizer)
        self._parallel.clip_grad_norm(self._cfg.training.max_grad_norm)
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad()
