"""ThreadRunner: a model on ranks that are threads of this process, as a runner for an Engine. Used by notebook 10.

Each rank is a ModelRunner with its part of the weights and a pool of its own; rank 0 draws the tokens. Only the ranks' meeting place
differs from the package's: a table in this process instead of a network.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from minivllm.bench.parallel import SHAPES
from minivllm.config import EngineConfig
from minivllm.engine.engine import Engine
from minivllm.engine.step import StepPlan, StepResult
from minivllm.models import ModelConfig
from minivllm.sampling_params import SamplingParams
from minivllm.teach.thread_ranks import Table, ThreadRank, run
from minivllm.weights.hub import open_model
from minivllm.worker.model_runner import ModelRunner
from minivllm.worker.parallel_checks import check_size
from minivllm.worker.rank import RankRunner

Change = Callable[[nn.Module, ThreadRank, dict[str, Tensor]], None]


class ThreadRunner:
    """A runner for an Engine: each step runs on every rank. change: called with each rank's model, the rank and the whole weights."""

    def __init__(self, model: str, size: int, change: Change | None = None, load_format: str = "auto"):
        config, checkpoint = EngineConfig(model=model, device="cpu", dtype="float32", load_format=load_format), open_model(model)
        check_size(ModelConfig.from_dict(checkpoint.config, checkpoint.generation_config), size)
        table = Table(size)
        self.ranks = [ThreadRank(rank, table) for rank in range(size)]
        self.runners = run(self.ranks, lambda rank: (RankRunner if rank.rank else ModelRunner)(config, checkpoint, rank))
        if change is not None:
            whole = dict(checkpoint.tensors())
            for rank, runner in zip(self.ranks, self.runners):
                change(runner.model, rank, whole)

    def generate(self, prompts: list[list[int]], answers: list[int], block_size: int = 16) -> list[list[int]]:
        """Greedy tokens, as many for each prompt as `answers` says; the pools just hold them all."""
        lengths = [len(prompt) + answer for prompt, answer in zip(prompts, answers)]
        engine = self.engine(sum(-(-length // block_size) for length in lengths) + len(prompts), block_size)
        sequences = [engine.add(prompt, SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True))
                     for prompt, answer in zip(prompts, answers)]
        while engine.has_unfinished_requests():
            engine.step()
        return [seq.generated_token_ids for seq in sequences]

    def engine(self, num_blocks: int, block_size: int = 16) -> Engine:
        model = self.runners[0].model_config
        longest = min(num_blocks * block_size, model.max_positions)
        config = EngineConfig(num_kv_blocks=num_blocks, block_size=block_size, max_model_len=longest)
        config = config.complete(num_kv_blocks=num_blocks, max_positions=model.max_positions)
        for runner in self.runners:
            runner.allocate(num_blocks, block_size)
        return Engine(config, self, model.vocab_size, model.eos_token_ids)

    def execute(self, plan: StepPlan) -> StepResult:
        return run(self.ranks, lambda rank: self.runners[rank.rank].execute(plan))[0]

    def close(self) -> None:
        for runner in self.runners:
            runner.close()

    def __enter__(self) -> ThreadRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def random_model(**changes: Any) -> Iterator[str]:
    """A directory with the config.json of a small model: 8 heads, 2 kv heads, 2 layers, or as `changes` say. For load_format="dummy"."""
    with tempfile.TemporaryDirectory() as directory:
        shape = {**SHAPES["tiny"], "tie_word_embeddings": False, **changes}  # tied, a random model repeats its last token for ever
        Path(directory, "config.json").write_text(json.dumps(shape), encoding="utf-8")
        yield directory
