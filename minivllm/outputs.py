"""RequestOutput: what came of one request. Answers vLLM's `out.outputs[0].text` and nano-vLLM's `out["text"]` alike."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from minivllm.engine.sequence import Sequence


@dataclass(frozen=True)
class RequestMetrics:
    """Seconds; None for what never happened. queue: arrival to admission. ttft: arrival to first token.

    tpot: time per output token after the first. total: arrival to end.
    """

    queue: float | None
    ttft: float | None
    tpot: float | None
    total: float | None

    @classmethod
    def of(cls, seq: Sequence) -> RequestMetrics:
        def since(end: float | None, start: float | None) -> float | None:
            return None if end is None or start is None else end - start

        decode = since(seq.finished_time, seq.first_token_time)
        later_tokens = seq.num_generated_tokens - 1
        return cls(since(seq.admitted_time, seq.arrival_time), since(seq.first_token_time, seq.arrival_time),
                   decode / later_tokens if decode is not None and later_tokens > 0 else None, since(seq.finished_time, seq.arrival_time))


@dataclass(frozen=True)
class CompletionOutput:
    """One answer. finish_reason: "stop", "length" or "abort"; stop_reason: the stop token or string, where one ended it.

    `token_ids` holds the end or stop token, `text` does not.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None = None


@dataclass(frozen=True)
class RequestOutput:
    """One request's prompt and answers. `prompt` is None where token ids were given."""

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    metrics: RequestMetrics = field(repr=False)

    def __getitem__(self, key: str) -> Any:
        """The first answer's fields by name: "text", "token_ids", "finish_reason"."""
        try:
            return getattr(self.outputs[0], key)
        except (AttributeError, TypeError):
            raise KeyError(f"{key!r}: a RequestOutput has 'text', 'token_ids', 'finish_reason', 'stop_reason' and 'index'") from None

    def as_dict(self) -> dict[str, Any]:
        """Plain data, as the command line prints it."""
        return asdict(self)
