"""The training loop."""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from contextlib import closing
from datetime import datetime, timezone
from pathlib import Path

import torch

from torchtitan_npu.checkpoint import CheckpointError, CheckpointStore, Saver, TrainState, load, tensor_differences
from torchtitan_npu.checkpoint.state import library_versions
from torchtitan_npu.config import Config, RunArgs, to_dict, validate_world
from torchtitan_npu.data import Batch
from torchtitan_npu.launch import Environment, gather_rows, together
from torchtitan_npu.ops import Documents
from torchtitan_npu.planning import MemoryEstimate, estimate_memory, on_device
from torchtitan_npu.train.checkpointing import Checkpointing
from torchtitan_npu.train.loss import StepLoss, count_valid_labels
from torchtitan_npu.train.memory import capacity_bytes, peak_allocated_bytes, peak_bytes
from torchtitan_npu.train.metrics import MetricsWriter, StepMetrics, format_duration, format_step
from torchtitan_npu.train.nonfinite import describe_nonfinite_gradients
from torchtitan_npu.train.optimizer import build_optimizer, set_learning_rate
from torchtitan_npu.train.parallelize import make_scaler, parallelize, refuse_device
from torchtitan_npu.train.plan_file import write_plan
from torchtitan_npu.train.profiling import Profiling
from torchtitan_npu.train.progress import make_display
from torchtitan_npu.train.resume import choose_checkpoint, compare_configuration
from torchtitan_npu.train.schedule import learning_rate_at
from torchtitan_npu.train.setup import device_name, log_header, open_loader, open_validation_loader
from torchtitan_npu.train.signals import StopSignals
from torchtitan_npu.train.spans import Spans
from torchtitan_npu.train.utilization import Utilization
from torchtitan_npu.train.validation import Validation

logger = logging.getLogger(__name__)

_ETA_AFTER_STEPS = 10


class TrainingError(RuntimeError):
    """Training cannot go on; the message says where it stands and what to do."""


class Trainer:
    """One rank of a training run: everything from the data to the checkpoint at the end.

    Building it does all that can fail early, in the order of cost: directories, data, checkpoint choice, model, resume.
    Every method is collective.
    """

    def __init__(self, cfg: Config, args: RunArgs, env: Environment, device: torch.device) -> None:
        self.cfg, self.args, self.env, self.device = cfg, args, env, device
        self.degrees = validate_world(cfg, env.world_size)
        refuse_device(cfg, device)
        if cfg.training.deterministic:
            torch.use_deterministic_algorithms(True)
        self._profiling = together(lambda: Profiling(cfg, args.log_dir, env, device))
        self.store = CheckpointStore(args.checkpoint_dir)
        together(self.store.prepare)
        self.loader = open_loader(cfg, args, env, self.degrees, device)
        held_out = open_validation_loader(cfg, env, self.degrees, device, self.loader)
        self.step = 0
        self.tokens = 0
        self.train_seconds = 0.0
        self.learning_rate = 0.0
        chosen = choose_checkpoint(cfg.training.resume, self.store)
        self.finished = self._already_finished(chosen)
        if self.finished:
            return

        self.model = parallelize(cfg, device)
        # From here on the random state belongs to training; initialisation must not shift it.
        torch.manual_seed(cfg.training.seed + self.degrees.dp_rank(env.rank))
        self.optimizer = build_optimizer(self.model.module.named_parameters(), self.model.decayed, cfg)
        self.scaler = make_scaler(cfg, self.model)
        memory = estimate_memory(on_device(cfg, device.type), env.world_size) if env.rank == 0 else None
        if memory is not None:
            log_header(
                cfg,
                env=env,
                device=device,
                num_parameters=self.model.num_parameters,
                degrees=self.degrees,
                memory=memory,
            )
        if chosen is not None:
            self._resume(chosen)
        self.validation = None if held_out is None else Validation(cfg, held_out, self.model, self.degrees, device)
        self.metrics = together(lambda: MetricsWriter(args.log_dir, resumed_step=self.step) if env.rank == 0 else None)
        self._capacity_bytes = capacity_bytes(device)
        self._utilization = Utilization(cfg, env, device, self.model.num_parameters)
        together(lambda: self._write_plan(memory) if memory is not None else None)
        self._spans = Spans()
        self._display = make_display(done_steps=self.step, max_steps=cfg.training.max_steps, rank=env.rank)
        checkpoint = cfg.training.checkpoint
        saver = Saver(
            self.store,
            self.model.module,
            self.optimizer,
            sharded=self.model.sharded,
            device=device,
            async_save=checkpoint.async_save,
            max_keep=checkpoint.max_keep,
            keep_every=checkpoint.keep_every,
        )
        self._signals = StopSignals()
        self.checkpoints = Checkpointing(checkpoint, saver, self._signals, rank=env.rank, last=chosen)

    def train(self) -> int:
        """Run the remaining steps, saving as configured; SIGTERM or SIGUSR1 on any rank saves and stops all.

        Returns:
            The exit status: 1 if a save failed, else 0.

        Raises:
            TrainingError: the loss or the gradient is not finite.
            CheckpointError: the last checkpoint could not be saved, or one at all and ``on_save_error`` is stop.
        """
        if self.finished:
            return 0
        with self._signals, self._display, closing(self.loader), self._profiling.around_steps():
            self._run_steps()
        self._log_end()
        return self.checkpoints.exit_status()

    def _run_steps(self) -> None:
        training = self.cfg.training
        first_step = self.step + 1
        interval_tokens, interval_seconds = 0, 0.0
        seconds_since_start = 0.0
        for step in range(first_step, training.max_steps + 1):
            self._profiling.before_step(step)
            self._spans.recorded = self._profiling.recording
            metrics = self._train_step(step)
            self._profiling.after_step(step)
            interval_tokens += self._tokens_per_step
            interval_seconds += metrics.step_time
            seconds_since_start += metrics.step_time
            final = step == training.max_steps
            validated = self._validate(step, final=final)
            tokens_per_second = self._tokens_per_step / metrics.step_time
            if self.metrics is not None:
                mfu = self._utilization.mfu(tokens_per_second)
                metrics = dataclasses.replace(metrics, validation_loss=validated)
                self.metrics.write(metrics, tokens_per_second, self.env.world_size, mfu)
            if step == 1 or step % training.log_interval == 0:
                logger.info("%s", format_step(metrics, interval_tokens / interval_seconds, self._capacity_bytes))
                interval_tokens, interval_seconds = 0, 0.0
            done = step - first_step + 1
            if done == _ETA_AFTER_STEPS and step < training.max_steps:
                # The first step warms up caches and allocators.
                remaining = (training.max_steps - step) * seconds_since_start / done
                logger.info("about %s to go, for %d more steps", format_duration(remaining), training.max_steps - step)
            self.train_seconds += metrics.step_time
            self.learning_rate = metrics.lr
            with self._spans("checkpoint"):
                self.checkpoints.after_step(step, final=final, state=self._state)
            self._display.update(
                step, loss=metrics.loss, tokens_per_second=tokens_per_second, checkpoint=self.checkpoints.describe()
            )
            if self.checkpoints.stop_signal:
                return

    def _validate(self, step: int, *, final: bool) -> float | None:
        if self.validation is None or self.checkpoints.stop_signal or not self.validation.is_due(step, final=final):
            return None
        result = self.validation.run()
        logger.info("%s", result.describe(step))
        return result.loss

    def close(self) -> None:
        """Flush and close the files of the metrics."""
        if not self.finished and self.metrics is not None:
            self.metrics.close()

    @property
    def _tokens_per_step(self) -> int:
        training = self.cfg.training
        return training.batch_size * self.degrees.dp * training.gradient_accumulation_steps * training.seq_len

    def _train_step(self, step: int) -> StepMetrics:
        training = self.cfg.training
        start = time.monotonic()
        blocked_before = self.model.communication_seconds()
        first_sample = self.loader.global_sample
        with self._spans("data"):
            batches = [next(self.loader) for _ in range(training.gradient_accumulation_steps)]
        valid_labels = count_valid_labels(batches, self.degrees)
        if valid_labels == 0:
            raise TrainingError(
                f"step {step}: none of its {self._tokens_per_step} labels is valid (global samples from "
                f"{first_sample}); the documents there have fewer than two tokens each"
            )
        loss_sum = self._accumulate_gradients(batches, valid_labels)
        self.scaler.unscale_(self.optimizer)
        overflow = self.scaler.overflowed(self.optimizer)
        grad_norm = self.model.clip_grad_norm(training.max_grad_norm)
        memory = [peak_bytes(self.device), peak_allocated_bytes(self.device)]
        rows = gather_rows([loss_sum, grad_norm, *memory, *self.checkpoints.flags()])
        self.checkpoints.agree([row[4:] for row in rows])
        self._check_finite(step, rows, first_sample, overflow=overflow)

        learning_rate = learning_rate_at(
            step,
            peak=training.learning_rate,
            minimum=training.min_lr,
            warmup_steps=training.warmup_steps,
            max_steps=training.max_steps,
            shape=training.lr_schedule,
            decay_steps=training.decay_steps,
        )
        set_learning_rate(self.optimizer, learning_rate)
        with self._spans("optimizer"):
            self._update(step)
        self.optimizer.zero_grad()
        self.step = step
        self.tokens += self._tokens_per_step
        blocked = self.model.communication_seconds()
        on_host = self.device.type == "cpu"
        seconds = {f"{name}_time": self._spans.take(name) for name in ("forward", "backward", "optimizer")}
        return StepMetrics(
            step=step,
            loss=sum(row[0] for row in self.degrees.once_per_dp_rank(rows)) / valid_labels,
            grad_norm=None if overflow else grad_norm,
            lr=learning_rate,
            tokens=self.tokens,
            step_time=time.monotonic() - start,
            data_time=self._spans.take("data"),
            comm_time=None if blocked is None or blocked_before is None else blocked - blocked_before,
            mem_bytes=int(max(row[2] for row in rows)),
            mem_allocated_bytes=None if on_host else int(max(row[3] for row in rows)),
            checkpoint_time=self._spans.take("checkpoint"),
            **(seconds if on_host else {}),
            loss_scale=self.scaler.get_scale() if self.scaler.is_enabled() else None,
            skipped_steps=self.scaler.skipped_steps if self.scaler.is_enabled() else None,
        )

    def _accumulate_gradients(self, batches: list[Batch], valid_labels: int) -> float:
        """Forward and backward of this rank's micro-batches; returns the sum of their losses in nats."""
        loss_scale = self.scaler.get_scale() if self.scaler.is_enabled() else 1.0
        step_loss = StepLoss(self.cfg, valid_labels=valid_labels, dp_degree=self.degrees.dp, loss_scale=loss_scale)
        losses = []
        for index, batch in enumerate(batches):
            inputs, labels = (t.to(self.device, non_blocking=True) for t in (batch.inputs, batch.labels))
            masked = self.cfg.data.document_mask
            documents = Documents.from_ids(batch.document_ids, self.device) if masked else None
            with self.model.micro_batch(last=index == len(batches) - 1):
                with self._spans("forward"):
                    scaled, total = step_loss(self.model, inputs, labels, documents)
                with self._spans("backward"):
                    self.scaler.scale(scaled).backward()
            losses.append(total)
        return sum(float(loss) for loss in losses)  # only now: each waits for the device

    def _update(self, step: int) -> None:
        """The optimizer's step, unless the scaled gradients overflowed: then no rank changes its weights."""
        scale, skipped = self.scaler.get_scale(), self.scaler.skipped_steps
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.scaler.skipped_steps == skipped:
            return
        if self.scaler.get_scale() < 1:
            raise TrainingError(
                f"step {step}: the gradient overflows float16 even at loss scale {scale:g}, with every loss finite; "
                "set parallel.dtype to bf16, which has the range of fp32, and start the same command again"
            )
        logger.warning(
            "step %d: the gradient overflowed at loss scale %g, so no rank applied the update (%d skipped so far); the "
            "loss scale is %g now",
            step,
            scale,
            self.scaler.skipped_steps,
            self.scaler.get_scale(),
        )

    def _check_finite(self, step: int, rows: list[list[float]], first_sample: int, *, overflow: bool) -> None:
        bad_loss = [rank for rank, row in enumerate(rows) if not math.isfinite(row[0])]
        bad_norm = [] if overflow else [rank for rank, row in enumerate(rows) if not math.isfinite(row[1])]
        if not bad_loss and not bad_norm:
            return
        what = f"the loss on rank(s) {bad_loss}"
        if not bad_loss:
            what = f"the gradient (every loss is finite; {describe_nonfinite_gradients(self.model.module)})"
        self.checkpoints.settle()
        last = self.checkpoints.last
        kept = f"the last checkpoint is {last}" if last else "there is no checkpoint"
        other_format = "" if self.cfg.parallel.dtype == "fp32" else ", or try parallel.dtype=fp32"
        raise TrainingError(
            f"step {step}: {what} is not finite; the update was not applied on any rank, and {kept}. The step read the "
            f"global samples {first_sample}..{self.loader.global_sample - 1}. Lower training.learning_rate or "
            f"lengthen training.warmup_steps{other_format}, and start the same command again"
        )

    def _already_finished(self, chosen: Path | None) -> bool:
        if chosen is None:
            return False
        step = TrainState.read(chosen).step
        if step < self.cfg.training.max_steps:
            return False
        logger.info(
            "nothing to do: %s is at step %d and training.max_steps is %d; raise training.max_steps to train on",
            chosen,
            step,
            self.cfg.training.max_steps,
        )
        return True

    def _resume(self, path: Path) -> None:
        state = together(lambda: TrainState.read(path))
        model, sharded = self.model.module, self.model.sharded
        table = tensor_differences(path, model, self.optimizer, sharded=sharded)
        compare_configuration(path, state.config, self.cfg, table)
        load(path, model, self.optimizer, sharded=sharded, device=self.device, tp_degree=self.degrees.tp)
        try:
            self.loader.load_state_dict(state.data)
        except ValueError as error:
            raise CheckpointError(f"{path}: {error}") from error
        if state.loss_scaler:
            self.scaler.load_state_dict(state.loss_scaler)
        self.step, self.tokens, self.train_seconds = state.step, state.tokens, state.train_seconds
        logger.info(
            "resumed from %s: step %d of %d, %s tokens, global sample %s",
            path,
            self.step,
            self.cfg.training.max_steps,
            f"{self.tokens:,}",
            f"{self.loader.global_sample:,}",
        )

    def _write_plan(self, memory: MemoryEstimate) -> None:
        write_plan(
            self.args.log_dir,
            self.cfg,
            self.env,
            device_name(self.device),
            num_parameters=self.model.num_parameters,
            memory=memory,
            capacity_bytes=self._capacity_bytes,
            utilization=self._utilization,
        )

    def _state(self) -> TrainState:
        return TrainState(
            step=self.step,
            tokens=self.tokens,
            world_size=self.env.world_size,
            data=self.loader.state_dict(),
            config=to_dict(self.cfg),
            loss_scaler=self.scaler.state_dict(),
            learning_rate=self.learning_rate,
            train_seconds=self.train_seconds,
            saved_at=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            versions=library_versions(),
        )

    def _log_end(self) -> None:
        last = self.checkpoints.last
        assert last is not None, "the last step saves"
        if self.checkpoints.stop_signal:
            logger.info(
                "stopped by %s after step %d of %d, saved in %s; the same command continues from there",
                self.checkpoints.stopped_by(),
                self.step,
                self.cfg.training.max_steps,
                last,
            )
        elif self.metrics is not None:
            logger.info(
                "done, %d steps. Checkpoint: %s, metrics: %s, TensorBoard: tensorboard --logdir %s",
                self.step,
                last,
                self.metrics.path,
                self.metrics.tensorboard_dir,
            )
