"""What is generated: prompts of random tokens and how many tokens each must get, as nano-vLLM's benchmark draws them."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Workload:
    """`prompts[i]` gets exactly `output_lens[i]` tokens, end tokens ignored."""

    prompts: list[list[int]]
    output_lens: list[int]

    @classmethod
    def draw(cls, num_requests: int, input_len: tuple[int, int], output_len: tuple[int, int], max_token_id: int, seed: int = 0) -> Workload:
        """Lengths uniform in the given ranges, ends included. With 256, (100, 1024), (100, 1024), 10000 and seed 0: nano-vLLM's own."""
        rng = random.Random(seed)
        prompts = [[rng.randint(0, max_token_id) for _ in range(rng.randint(*input_len))] for _ in range(num_requests)]
        return cls(prompts, [rng.randint(*output_len) for _ in range(num_requests)])

    def shifted(self, by: int, max_token_id: int) -> Workload:
        """The same lengths, other tokens: for the next round, so that no prefix cache can help."""
        return Workload([[(token + 8 * by) % (max_token_id + 1) for token in ids] for ids in self.prompts], self.output_lens)

    @property
    def num_output_tokens(self) -> int:
        return sum(self.output_lens)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))
