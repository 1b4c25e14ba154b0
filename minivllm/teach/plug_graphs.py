"""The real model with a learner's `pad_batch` filling the buffers of its recorded decode steps. As `plug`, for notebook 09."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from minivllm.engine.step import StepPlan
from minivllm.llm import LLM
from minivllm.prompts import Prompt
from minivllm.sampling_params import SamplingParams
from minivllm.teach import check
from minivllm.teach.plug import _call
from minivllm.teach.stub import NOT_ATTEMPTED, is_stub
from minivllm.teach.tape_graphs import TapeGraphs, recorded


def pad_batch(fn: Callable, llm: LLM, prompts: list[Prompt], params: list[SamplingParams], want: list[list[int]]) -> None:
    """Print whether `llm` generates the tokens of `want` when `fn` fills and pads the buffers that its replays read.

    A function that its checker refuses is not run: a replay would write wherever it says.
    """
    if is_stub(fn):
        print(NOT_ATTEMPTED)
        return
    if check.result("pad_batch", fn).status != "passed":
        print("run the check above first: check.pad_batch does not pass yet")
        return
    with recorded(llm, [1, 2, 4], graphs=_with(fn)) as graphs:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    same = [out["token_ids"] for out in outputs] == want
    print(f"{graphs.num_replays} replays, {graphs.num_padded_rows} rows of padding; the same tokens: {same}")


def _with(fn: Callable) -> type[TapeGraphs]:
    class PaddedGraphs(TapeGraphs):
        """Graphs whose buffers are filled by `fn`."""

        buffer: Tensor | None = None

        def run(self, plan: StepPlan) -> Tensor:
            count, batch = len(plan.rows), self.batch
            batch.load(plan, count)  # without padding
            columns = torch.cat((batch.columns[:, :count], batch.contexts[None, :count].long()))  # [4, B]
            if self.buffer is None:
                self.buffer = torch.zeros(4, self.sizes[-1], dtype=torch.int64)
            size = int(_call(fn, f"(it was given {count} rows)", self.buffer, columns, list(self.sizes)))
            batch.columns[:, :size].copy_(self.buffer[:3, :size])
            batch.contexts[:size].copy_(self.buffer[3, :size])
            return self.replay(size, count)

    return PaddedGraphs
