"""Ranks as threads of this process, over the real gloo group and the real wire: what they compute, without the seconds a process takes."""

from concurrent.futures import ThreadPoolExecutor

import torch.distributed as dist

from minivllm.config import EngineConfig
from minivllm.engine.engine import Engine
from minivllm.weights.hub import open_model
from minivllm.worker.distributed import Group
from minivllm.worker.model_runner import ModelRunner
from minivllm.worker.rank import RankRunner
from minivllm.worker.wire import PlanReader, PlanWriter


class GlooThreads:
    """A runner for an Engine: every step goes to each rank, as bytes, in its own thread."""

    def __init__(self, directory, size, overlap_chunk_size=None, **settings):
        config = EngineConfig(model=str(directory), device="cpu", **settings)
        checkpoint = open_model(config.model)
        self.threads = [ThreadPoolExecutor(1) for _ in range(size)]
        self.groups = [Group(rank, size, overlap_chunk_size) for rank in range(size)]
        store = dist.HashStore()
        self.runners = self.all(lambda rank: (RankRunner if rank else ModelRunner)(config, checkpoint, self.groups[rank]))
        self.all(lambda rank: self.groups[rank].connect(store, self.runners[rank].device, local=True))

    def all(self, function):
        futures = [thread.submit(function, rank) for rank, thread in enumerate(self.threads)]
        return [future.result(timeout=60) for future in futures]

    def engine(self, **settings):
        model = self.runners[0].model_config
        config = EngineConfig(**settings).complete(num_kv_blocks=1, max_positions=model.max_positions)
        self.all(lambda rank: self.runners[rank].allocate(config.num_kv_blocks, config.block_size))
        self.writer, self.readers = PlanWriter(), [PlanReader() for _ in self.runners]
        return Engine(config, self, model.vocab_size, model.eos_token_ids)

    def execute(self, plan):
        data = self.writer.encode(plan)
        plans = [reader.decode(data) for reader in self.readers]
        assert all(sent == plan for sent in plans)
        own, *others = self.all(lambda rank: self.runners[rank].execute(plans[rank]))
        assert not any(result.tokens for result in others)
        return own

    def close(self):
        self.all(lambda rank: (self.runners[rank].close(), self.groups[rank].close()))
        for thread in self.threads:
            thread.shutdown()
