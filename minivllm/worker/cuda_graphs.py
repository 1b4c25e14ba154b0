"""CUDA graphs for decode steps: a step's launches recorded once and replayed as one.

A decode of a small model is some three hundred launches of a few microseconds each; the host cannot send them as fast as the GPU does
them. A graph fixes every address and every shape, so there is one for each of a few batch sizes, over the same buffers, and a batch is
padded to the next size. Whatever asks the host or depends on its data stays outside: building the batch, and drawing the tokens. So does
the output layer: one launch, whose logits [size, V] every graph would keep for itself.
Built in notebook 09.
"""

from __future__ import annotations

import functools
import warnings

import torch
from torch import Tensor, nn

from minivllm.attention import AttentionBackend
from minivllm.engine.step import StepPlan
from minivllm.worker.decode_batch import DecodeBatch


@functools.cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all captures of a process: cuBLAS keeps a workspace of 32 MiB for every stream that it was ever used on."""
    return torch.cuda.Stream(device)


def graph_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, 8, then steps of 8 to 64, of 16 to 256, of 64 beyond; the largest is always `max_num_seqs`."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, max_num_seqs, 64)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


class DecodeGraphs:
    """Graphs of `model` over the buffers of `batch`, for `sizes`. A graph's hidden states [size, hidden] are overwritten by its next replay."""

    def __init__(self, model: nn.Module, backend: AttentionBackend, batch: DecodeBatch, sizes: list[int]):
        self.model, self.backend, self.batch, self.sizes = model, backend, batch, sizes
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self.num_replays = self.num_padded_rows = 0

    @classmethod
    def capture(cls, model: nn.Module, backend: AttentionBackend, batch: DecodeBatch, sizes: list[int], num_ranks: int) -> DecodeGraphs | None:
        """All graphs, the largest first so that the others fit into its memory. If that fails: None, with one warning.

        Of several ranks, one cannot go on without graphs while the others wait for it in theirs: RuntimeError, which ends them all.
        """
        graphs = cls(model, backend, batch, sizes)
        random_state = torch.cuda.get_rng_state(batch.device)
        try:
            pool = None
            for size in sorted(sizes, reverse=True):
                pool = graphs._capture_one(size, pool)
        except Exception as error:
            graphs.graphs.clear()  # the error's traceback holds them, and a group whose kernels are in graphs takes long to close
            if num_ranks > 1:
                raise RuntimeError("capturing CUDA graphs failed on one of several ranks: see the error above, or set enforce_eager=True") from error
            torch.cuda.synchronize(batch.device)
            torch.cuda.empty_cache()
            warnings.warn(f"no CUDA graphs: capturing failed ({type(error).__name__}: {error}); steps run one launch at a time", stacklevel=4)
            return None
        finally:
            torch.cuda.set_rng_state(random_state, batch.device)
        return graphs

    def run(self, plan: StepPlan) -> Tensor:
        """Logits [B, V] of a plan of decodes, at most as many as the largest size."""
        count = len(plan.rows)
        size = next(size for size in self.sizes if size >= count)
        self.batch.load(plan, size)
        return self.replay(size, count)

    def replay(self, size: int, count: int) -> Tensor:
        """Logits [count, V] of the buffers' first rows, by the graph of `size`."""
        graph, hidden = self.graphs[size]
        graph.replay()
        self.num_replays += 1
        self.num_padded_rows += size - count
        return self.model.compute_logits(hidden[:count])

    def forward(self, size: int) -> Tensor:
        """What a graph holds: the model over the first `size` rows of the buffers, up to their hidden states [size, hidden]."""
        metadata = self.batch.attention(size)
        metadata.plan = self.backend.prepare(metadata, [1] * size, [1] * size)
        return self.model(self.batch.columns[0, :size], self.batch.columns[1, :size], metadata)

    def _capture_one(self, size: int, pool: object) -> object:
        stream = _capture_stream(self.batch.device)
        stream.wait_stream(torch.cuda.current_stream(self.batch.device))
        with torch.cuda.stream(stream):
            self.forward(size)  # compiles kernels and makes the libraries' workspaces, which capture could not
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):  # other threads may go on
            hidden = self.forward(size)
        self.graphs[size] = (graph, hidden)
        return pool or graph.pool()
