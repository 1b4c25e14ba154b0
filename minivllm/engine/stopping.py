"""StopChecker: whether a sequence ends with the token it just got. Knows no scheduler and no tokenizer.

Text is needed for stop strings only; it comes from the sequence's own detokenizer, fed here one token at a time.
"""

from __future__ import annotations

from minivllm.engine.sequence import Sequence


class StopChecker:
    """`eos_token_ids`: every token that ends the model's answer. `max_model_len`: prompt and answer together, in tokens."""

    def __init__(self, eos_token_ids: frozenset[int], max_model_len: int):
        self.eos_token_ids = eos_token_ids
        self.max_model_len = max_model_len

    def __call__(self, seq: Sequence) -> tuple[str, int | str | None] | None:
        """None, or (finish_reason, stop_reason): "stop" before "length", and a token before a string."""
        params, tokens = seq.sampling, seq.token_ids  # asked for every token: plain attributes, no properties
        token = tokens[-1]
        may_stop = not params.min_tokens or len(tokens) - seq.num_prompt_tokens > params.min_tokens
        if may_stop and token in params.stop_token_ids:
            return "stop", token
        if may_stop and token in self.eos_token_ids and not params.ignore_eos:
            return "stop", None
        if seq.detokenizer is not None:
            matched = seq.detokenizer.add(token, may_stop)
            if matched is not None:
                return "stop", matched
        if len(tokens) - seq.num_prompt_tokens == params.max_tokens or len(tokens) >= self.max_model_len:
            return "length", None
        return None
