"""ModelRunner: StepPlan -> tensors -> model -> sampled tokens. Owns the weights, the KV-cache pool and the device.

It knows sequences only as rows of a plan. Built in notebooks 02 to 04.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from minivllm import attention
from minivllm.config import EngineConfig
from minivllm.engine.step import PlanRow, StepPlan, StepResult
from minivllm.layers.parallel import ALONE, Ranks, building_for
from minivllm.models import ModelConfig, model_class
from minivllm.sampling_params import SamplingParams
from minivllm.weights.checkpoint import Checkpoint
from minivllm.weights.load import load_weights, randomize
from minivllm.worker.batch import build_batch
from minivllm.worker.compiled import compile_parts
from minivllm.worker.cuda_graphs import DecodeGraphs, graph_sizes
from minivllm.worker.decode_batch import DecodeBatch, is_decode
from minivllm.worker.device import default_gpu_memory_utilization, default_max_num_batched_tokens, on_its_device, select_device, select_dtype
from minivllm.worker.gpu_memory import MemoryLimit, advice_when_full
from minivllm.worker.kv_cache import KVCachePool, KVCacheSpec, num_blocks_that_fit, unbind
from minivllm.worker.logits import History
from minivllm.worker.logprobs import prompt_logprobs, sampled_logprobs
from minivllm.worker.profile_run import Profile, profile_run
from minivllm.worker.sampler import SamplingBatch, sample


class ModelRunner:
    """Loads the model, or one rank's part of it, on construction; `allocate` then makes the pool. `execute` runs steps until `close`."""

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint, ranks: Ranks = ALONE):
        self.ranks = ranks
        self.device = select_device(config.device)
        self.model_config = ModelConfig.from_dict(checkpoint.config, checkpoint.generation_config)
        cls = model_class(self.model_config.architecture)
        config.check_positions(self.model_config.max_positions)
        self.dtype = select_dtype(config.dtype, self.device, self.model_config.dtype)
        self.spec = KVCacheSpec.of(self.model_config, self.dtype, ranks.size)
        shape = (self.model_config.num_heads // ranks.size, self.spec.num_kv_heads, self.spec.head_dim)
        self.backend, self.backend_reason = attention.select(config.attention_backend, self.device, self.dtype, shape, config.block_size)
        self.model: nn.Module | None = None
        self.pool: KVCachePool | None = None
        self.graphs: DecodeGraphs | None = None
        self.history = History(self.device)  # tokens of the sequences with penalties
        self.block_size = 0
        self.profile = Profile()
        utilization = config.gpu_memory_utilization or default_gpu_memory_utilization(self.device)
        self.memory_limit = MemoryLimit(self.device, utilization) if config.limit_gpu_memory and self.device.type == "cuda" else None
        try:
            with advice_when_full("loading the weights", self.device):
                self._load(cls, config, checkpoint)
        except BaseException:
            self.close()  # the error may be kept for long, the weights should not
            raise

    @on_its_device
    def _load(self, cls: type, config: EngineConfig, checkpoint: Checkpoint) -> None:
        with self.device, _default_dtype(self.dtype), building_for(self.ranks):
            self.model = cls(self.model_config)
        if config.load_format == "dummy":
            randomize(self.model)
        else:
            load_weights(self.model, checkpoint.tensors(), source=checkpoint.name)
        if config.torch_compile:
            compile_parts(self.model)

    @property
    def weight_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.model.parameters())

    @on_its_device
    @torch.inference_mode()
    def limits(self, config: EngineConfig) -> dict[str, int]:
        """What device, backend and model allow: the arguments of `EngineConfig.complete`."""
        block_size = config.block_size or self.backend.default_block_size
        utilization = config.gpu_memory_utilization or default_gpu_memory_utilization(self.device)
        most_tokens = default_max_num_batched_tokens(self.device)
        if config.num_kv_blocks is None and self.device.type == "cuda":
            with advice_when_full("trying the largest step", self.device):
                self.profile = profile_run(self, config, most_tokens, block_size, utilization)
        fitting = config.num_kv_blocks or num_blocks_that_fit(self.spec.bytes_per_token * block_size, self.device, utilization,
                                                              self.profile.activations + self.profile.graphs)
        return {"block_size": block_size, "num_kv_blocks": fitting, "max_positions": self.model_config.max_positions,
                "max_num_batched_tokens": most_tokens}

    @on_its_device
    def allocate(self, num_blocks: int, block_size: int) -> None:
        """Make the pool and give each attention layer its part."""
        self.release_pool()
        self.block_size = block_size
        with advice_when_full("making the KV cache", self.device):
            self.pool = KVCachePool(self.spec, num_blocks, block_size, self.device)
        self.pool.bind(self.model, self.backend)

    def release_pool(self) -> None:
        """Give back the pool, and the graphs with it: they hold its addresses. A new one may be allocated."""
        self.graphs = self.pool = None
        if self.model is not None:
            unbind(self.model)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def wants_graphs(self, config: EngineConfig) -> bool:
        wanted = self.device.type == "cuda" and not config.enforce_eager and getattr(self.backend, "in_graphs", False)
        return wanted and not self.profile.no_graphs

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compute a small mixed step that writes nothing, so that kernels are compiled and libraries loaded before the first request."""
        never = 1 << 30
        rows = [PlanRow(index, 0, [0] * count, [0], never, True, params, 0)
                for index, (count, params) in enumerate([(2, SamplingParams(temperature=0)), (1, SamplingParams(temperature=1))])]
        self.execute(StepPlan(rows if self.block_size > 1 else rows[1:]))

    @on_its_device
    @torch.inference_mode()
    def capture(self, config: EngineConfig) -> None:
        """On a GPU: warm up, then capture decode graphs, if the backend has them and the user does not want it eager."""
        if self.device.type == "cuda":
            self.warm_up()
        if not self.wants_graphs(config):
            return
        most_blocks = -(-config.max_model_len // config.block_size)
        batch = DecodeBatch(config.max_num_seqs, most_blocks, config.block_size, self.device)
        self.graphs = DecodeGraphs.capture(self.model, self.backend, batch, graph_sizes(config.max_num_seqs), self.ranks.size)

    @on_its_device
    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Compute one step: write the K/V of all its tokens, sample one token for each row that samples."""
        with advice_when_full("computing a step", self.device):
            return self.compute(plan)

    def compute(self, plan: StepPlan) -> StepResult:
        """As `execute`, in the caller's own context."""
        if self.graphs is not None and len(plan.rows) <= self.graphs.sizes[-1] and is_decode(plan):
            return self._sample(plan.rows, self.graphs.run(plan), self.graphs.batch.sampling)
        batch = build_batch(plan, self.block_size, self.backend, self.device)
        hidden = self.model(batch.input_ids, batch.positions, batch.attention)  # [T, hidden]
        last = hidden[batch.last_tokens]  # [B, hidden]
        broken = (~last.isfinite().all(dim=-1)).nonzero().flatten() if len(batch.sampling_rows) < len(plan.rows) else None
        result = StepResult()
        if batch.sampling_rows:
            chosen = slice(None) if broken is None else batch.sampling_rows
            logits = self.model.compute_logits(last[chosen])  # [R, V]
            result = self._sample([plan.rows[index] for index in batch.sampling_rows], logits, batch.sampling)
        result.prompt_logprobs = prompt_logprobs(plan.rows, hidden, self.model.compute_logits, self.model_config.vocab_size)
        if broken is not None:  # rows that do not sample must be finite too: their blocks will be published
            result.non_finite.update(plan.rows[index].seq_id for index in broken.tolist())
        return result

    def _sample(self, rows: list[PlanRow], logits: Tensor, batch: SamplingBatch) -> StepResult:
        if batch.penalised:
            self.history.update([rows[index] for index in batch.penalised])
        tokens = sample(logits, batch, self.history)
        result = _result(rows, tokens)
        if batch.logprob_rows:
            result.logprobs = sampled_logprobs(rows, batch.logprob_rows, logits, tokens)
        return result

    @on_its_device
    def close(self) -> None:
        """Give back weights and pool, and torch's limit as it was."""
        self.release_pool()
        self.model, self.history = None, History(self.device)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        if self.memory_limit is not None:
            self.memory_limit.restore()
            self.memory_limit = None


def _result(rows: list[PlanRow], tokens: Tensor) -> StepResult:
    """The rows' tokens; -1 marks one whose logits were not finite. Here the host waits for the device."""
    result = StepResult()
    for row, token in zip(rows, tokens.tolist()):
        if token < 0:
            result.non_finite.add(row.seq_id)
        else:
            result.tokens[row.seq_id] = token
    return result


class _default_dtype:
    """`with _default_dtype(dtype):` new float tensors have it; the caller's default comes back afterwards."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype

    def __enter__(self) -> None:
        self.before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)

    def __exit__(self, *_: object) -> None:
        torch.set_default_dtype(self.before)
