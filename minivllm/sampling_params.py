"""SamplingParams: how one request's tokens are chosen and when its generation ends.

Pure data, checked on construction; token ids are checked against the vocabulary where it is known, when a request is added.
The worker's sampler reads how to choose, the engine's stop checker when to end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from minivllm.keywords import helpful_keywords, require_int, require_number, require_range

_OWNER = "SamplingParams"
#: Numbers between two bounds, both inside.
_RANGES = (("min_p", 0, 1), ("presence_penalty", -2, 2), ("frequency_penalty", -2, 2))
#: Ints with their bounds; None stands for itself where the default is None.
_INTS = (("seed", 0, 2**64 - 1), ("max_tokens", 1, None), ("min_tokens", 0, None), ("logprobs", 0, None), ("prompt_logprobs", 0, None),
         ("n", 1, None))


@helpful_keywords(_OWNER)
@dataclass(frozen=True)
class SamplingParams:
    """How to sample and when to stop. Names, defaults and meanings are vLLM's, except `max_tokens` (64 here).

    They apply in this order: penalties, logit_bias, allowed_token_ids and min_tokens, temperature, top_k, top_p, min_p.

    temperature: 0 takes the most likely token (greedy) after the first group; above 0 the logits are divided by it.
    top_k: keep the k most likely tokens; 0 or -1 keeps all.
    top_p: keep the smallest set of most likely tokens whose probabilities reach p, the token that crosses p included, and its equals.
    seed: fixes this request's random noise, whatever else is in its batch. None: drawn from the engine's seed.
    max_tokens: how many tokens to generate at most; None: up to the engine's `max_model_len`.
    stop: a string or strings that end the text; the stop string itself is left out of it.
    stop_token_ids: token ids that end the generation, beside the model's own end tokens.
    ignore_eos: go on after the model's own end tokens.
    min_p: keep tokens at least min_p times as likely as the most likely one; 0 keeps all.
    presence_penalty: subtracted once from the logit of every token that was generated before; -2 to 2.
    frequency_penalty: subtracted as many times as the token was generated before; -2 to 2.
    repetition_penalty: for tokens of the prompt and the answer, positive logits are divided by it, others multiplied; 1 changes nothing.
    logit_bias: {token id: what is added to its logit, -100 to 100}. Kept as a tuple of pairs, so that it can be hashed.
    allowed_token_ids: only these can be chosen; None: all.
    min_tokens: end tokens and stop_token_ids cannot be chosen among the first min_tokens tokens, and no stop string ends the text there.
    logprobs: return, for each generated token, its log probability and those of the `logprobs` most likely tokens (0: its own alone).
        They are the log_softmax of the model's raw logits, before penalties, temperature and filters, as vLLM's default has it.
    prompt_logprobs: the same for each prompt token but the first. Such a request computes its whole prompt: it uses no prefix cache.
    n: how many answers; they share the prompt's blocks. Answer i's noise depends on (seed, i, position), so answer 0 is that of n=1.
        With temperature 0 all would be equal, so n must be 1 then (as in vLLM).
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
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1

    def __post_init__(self) -> None:
        put = lambda name, value: object.__setattr__(self, name, value)  # the dataclass is frozen
        put("temperature", require_number(_OWNER, "temperature", self.temperature))
        if self.temperature < 0:
            raise ValueError(f"SamplingParams.temperature must be 0 (greedy) or more, got {self.temperature}")
        put("top_k", max(0, require_int(_OWNER, "top_k", self.top_k, -1)))
        put("top_p", require_number(_OWNER, "top_p", self.top_p))
        if not 0 < self.top_p <= 1:
            raise ValueError(f"SamplingParams.top_p must be above 0 and at most 1, got {self.top_p}")
        for name, low, high in _RANGES:
            put(name, require_range(_OWNER, name, getattr(self, name), low, high))
        put("repetition_penalty", require_number(_OWNER, "repetition_penalty", self.repetition_penalty))
        if self.repetition_penalty <= 0:
            raise ValueError(f"SamplingParams.repetition_penalty must be above 0 (1 changes nothing), got {self.repetition_penalty}")
        for name, low, high in _INTS:
            if (value := getattr(self, name)) is not None or name in ("n", "min_tokens"):
                put(name, require_int(_OWNER, name, value, low, high))
        put("stop", _strings(self.stop))
        put("stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        put("logit_bias", _biases(self.logit_bias))
        put("allowed_token_ids", None if self.allowed_token_ids is None else _token_ids("allowed_token_ids", self.allowed_token_ids))
        if not isinstance(self.ignore_eos, bool):
            raise TypeError(f"SamplingParams.ignore_eos must be True or False, got {self.ignore_eos!r}")
        self._check_together()

    def _check_together(self) -> None:
        if self.allowed_token_ids == ():
            raise ValueError("SamplingParams.allowed_token_ids is empty, so no token could be chosen: leave it out to allow all")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"SamplingParams.min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}")
        if self.n > 1 and self.greedy:
            raise ValueError(f"SamplingParams.n must be 1 with temperature 0, where all answers are equal, got {self.n}: raise temperature")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def filters(self) -> bool:
        """Whether top_k, top_p or min_p leave tokens out."""
        return self.temperature != 0 and bool(self.top_k or self.top_p < 1 or self.min_p)

    @property
    def needs_history(self) -> bool:
        """Whether the logits depend on which tokens came before."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    @property
    def edits_logits(self) -> bool:
        """Whether logits change before the temperature: what greedy requests may ask for too."""
        return bool(self.needs_history or self.logit_bias or self.allowed_token_ids is not None or self.min_tokens)

    @property
    def has_options(self) -> bool:
        """Whether the engine must do more than sample with temperature, top_k, top_p and min_p, and stop."""
        return self.edits_logits or self.logprobs is not None or self.prompt_logprobs is not None or self.n > 1


def _strings(value: object) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else () if value is None else value
    if not isinstance(strings, (list, tuple, set, frozenset)) or not all(isinstance(s, str) for s in strings):
        raise TypeError(f"SamplingParams.stop must be a string or a list of strings, got {value!r}")
    if "" in strings:
        raise ValueError("SamplingParams.stop holds an empty string, which would stop everything: leave it out")
    return tuple(strings)


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, (list, tuple, set, frozenset)):
        raise TypeError(f"SamplingParams.{name} must be a list of token ids, got {value!r}")
    return tuple(require_int(_OWNER, name, token, 0) for token in value)


def _biases(value: object) -> tuple[tuple[int, float], ...]:
    if value is None:
        return ()
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(pairs, (list, tuple)) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise TypeError(f"SamplingParams.logit_bias must be a dict of token id to bias, got {value!r:.80}")
    biases = {require_int(_OWNER, "logit_bias", token, 0): require_range(_OWNER, f"logit_bias[{token!r}]", bias, -100, 100)
              for token, bias in pairs}
    return tuple(sorted(biases.items()))
