"""SamplingParams: how one request's tokens are chosen and when its generation ends.

Pure data, checked on construction. The worker's sampler reads the first half of it, the engine's stop checker the second.
"""

from __future__ import annotations

from dataclasses import dataclass

from minivllm.keywords import helpful_keywords, require_int, require_number

_OWNER = "SamplingParams"
_SEED_LIMIT = 2**64 - 1


@helpful_keywords(_OWNER)
@dataclass(frozen=True)
class SamplingParams:
    """How to sample and when to stop. Names, defaults and meanings are vLLM's, except `max_tokens` (64 here).

    temperature: 0 takes the most likely token (greedy); above 0 the logits are divided by it.
    top_k: keep the k most likely tokens; 0 or -1 keeps all.
    top_p: keep the smallest set of most likely tokens whose probabilities reach p; the token that crosses p is kept.
    seed: fixes this request's random noise, whatever else is in its batch. None: drawn from the engine's seed.
    max_tokens: how many tokens to generate at most; None: up to the engine's `max_model_len`.
    stop: a string or strings that end the text; the stop string itself is left out of it.
    stop_token_ids: token ids that end the generation, beside the model's own end tokens.
    ignore_eos: go on after the model's own end tokens.
    Raises TypeError or ValueError that names the field and the value.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 64
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        put = lambda name, value: object.__setattr__(self, name, value)  # the dataclass is frozen
        put("temperature", require_number(_OWNER, "temperature", self.temperature))
        if self.temperature < 0:
            raise ValueError(f"SamplingParams.temperature must be 0 (greedy) or more, got {self.temperature}")
        put("top_k", max(0, require_int(_OWNER, "top_k", self.top_k, -1)))
        put("top_p", require_number(_OWNER, "top_p", self.top_p))
        if not 0 < self.top_p <= 1:
            raise ValueError(f"SamplingParams.top_p must be above 0 and at most 1, got {self.top_p}")
        if self.seed is not None:
            put("seed", require_int(_OWNER, "seed", self.seed, 0, _SEED_LIMIT))
        if self.max_tokens is not None:
            put("max_tokens", require_int(_OWNER, "max_tokens", self.max_tokens, 1))
        put("stop", _strings(self.stop))
        put("stop_token_ids", _token_ids(self.stop_token_ids))
        if not isinstance(self.ignore_eos, bool):
            raise TypeError(f"SamplingParams.ignore_eos must be True or False, got {self.ignore_eos!r}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def _strings(value: object) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else () if value is None else value
    if not isinstance(strings, (list, tuple, set, frozenset)) or not all(isinstance(s, str) for s in strings):
        raise TypeError(f"SamplingParams.stop must be a string or a list of strings, got {value!r}")
    if "" in strings:
        raise ValueError("SamplingParams.stop holds an empty string, which would stop everything: leave it out")
    return tuple(strings)


def _token_ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, (list, tuple, set, frozenset)):
        raise TypeError(f"SamplingParams.stop_token_ids must be a list of token ids, got {value!r}")
    return tuple(require_int(_OWNER, "stop_token_ids", token, 0) for token in value)
