"""ModelRunner: StepPlan -> tensors -> model -> sampled tokens. Owns the weights, the KV-cache pool and the device.

It knows sequences only as rows of a plan. Built in notebooks 02 to 04.
"""

from __future__ import annotations

import torch

from minivllm import attention
from minivllm.config import EngineConfig
from minivllm.engine.step import StepPlan, StepResult
from minivllm.models import ModelConfig, model_class
from minivllm.weights.checkpoint import Checkpoint
from minivllm.weights.load import load_weights, randomize
from minivllm.worker.batch import build_batch
from minivllm.worker.device import default_gpu_memory_utilization, default_max_num_batched_tokens, select_device, select_dtype
from minivllm.worker.kv_cache import KVCachePool, KVCacheSpec, num_blocks_that_fit
from minivllm.worker.sampler import sample


class ModelRunner:
    """Loads the model on construction; `allocate` then makes the pool. `execute` runs steps until `close`."""

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint):
        self.device = select_device(config.device)
        self.model_config = ModelConfig.from_dict(checkpoint.config, checkpoint.generation_config)
        cls = model_class(self.model_config.architecture)
        config.check_positions(self.model_config.max_positions)
        self.dtype = select_dtype(config.dtype, self.device, self.model_config.dtype)
        self.backend, self.backend_reason = attention.select(config.attention_backend, self.device)
        self.spec = KVCacheSpec.of(self.model_config, self.dtype)
        with self.device, _default_dtype(self.dtype):
            self.model = cls(self.model_config)
        try:
            if config.load_format == "dummy":
                randomize(self.model)
            else:
                load_weights(self.model, checkpoint.tensors(), source=checkpoint.name)
        except BaseException:
            self.model = None  # the error may be kept for long, the weights should not
            raise
        self.pool: KVCachePool | None = None
        self.block_size = 0
        self.bytes_at_rest = 0  # allocated on the GPU between two steps; what a step takes comes on top

    @property
    def weight_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.model.parameters())

    def limits(self, config: EngineConfig) -> dict[str, int]:
        """What device, backend and model allow: the arguments of `EngineConfig.complete`."""
        block_size = config.block_size or self.backend.default_block_size
        utilization = config.gpu_memory_utilization or default_gpu_memory_utilization(self.device)
        fitting = config.num_kv_blocks or num_blocks_that_fit(self.spec.bytes_per_token * block_size, self.device, utilization)
        return {"block_size": block_size, "num_kv_blocks": fitting, "max_positions": self.model_config.max_positions,
                "max_num_batched_tokens": default_max_num_batched_tokens(self.device)}

    def allocate(self, num_blocks: int, block_size: int) -> None:
        """Make the pool and give each attention layer its part."""
        self.block_size = block_size
        self.pool = KVCachePool(self.spec, num_blocks, block_size, self.device)
        self.pool.bind(self.model, self.backend)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self.bytes_at_rest = torch.cuda.memory_allocated(self.device)

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Compute one step: write the K/V of all its tokens, sample one token for each row that samples."""
        batch = build_batch(plan, self.block_size, self.backend, self.device)
        hidden = self.model(batch.input_ids, batch.positions, batch.attention)  # [T, hidden]
        last = hidden[batch.last_tokens]  # [B, hidden]
        finite = last.isfinite().all(dim=-1)
        result = StepResult()
        if batch.sampling_rows:
            chosen = slice(None) if len(batch.sampling_rows) == len(plan.rows) else batch.sampling_rows
            logits = self.model.compute_logits(last[chosen])  # [R, V]
            finite[chosen] &= logits.amax(dim=-1).isfinite()
            tokens = sample(logits, batch.sampling).tolist()  # here the host waits for the device
            result.tokens = {plan.rows[index].seq_id: token for index, token in zip(batch.sampling_rows, tokens)}
        result.non_finite = {row.seq_id for row, ok in zip(plan.rows, finite.tolist()) if not ok}
        return result

    def close(self) -> None:
        """Give back weights and pool."""
        self.model = self.pool = None
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


class _default_dtype:
    """`with _default_dtype(dtype):` new float tensors have it; the caller's default comes back afterwards."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype

    def __enter__(self) -> None:
        self.before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)

    def __exit__(self, *_: object) -> None:
        torch.set_default_dtype(self.before)
