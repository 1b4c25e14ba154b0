"""RequestOutput: what came of one request. Answers vLLM's `out.outputs[0].text` and nano-vLLM's `out["text"]` alike."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from minivllm.engine.options import TokenLogprobs
from minivllm.engine.sequence import Sequence
from minivllm.engine.siblings import members

if TYPE_CHECKING:
    from minivllm.tokenizer import Tokenizer


@dataclass(frozen=True)
class RequestMetrics:
    """Seconds; None for what never happened. queue: arrival to admission. ttft: arrival to first token.

    tpot: time per output token after the first. total: arrival to end. Of several answers, those of the first, but the end of the last.
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
                   decode / later_tokens if decode is not None and later_tokens > 0 else None,
                   since(max((member.finished_time for member in members(seq) if member.finished_time is not None), default=None), seq.arrival_time))


class Piece(str):
    """A piece of streamed text. `index`: which of the request's n answers it belongs to."""

    index: int = 0

    @classmethod
    def of(cls, text: str, seq: Sequence) -> Piece:
        piece = cls(text)
        piece.index = index_of(seq)
        return piece


@dataclass(frozen=True)
class Logprob:
    """One token's log probability. rank: 1 for the most likely. decoded_token: its text; None where the model has no tokenizer."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(frozen=True)
class CompletionOutput:
    """One answer. finish_reason: "stop", "length" or "abort"; stop_reason: the stop token or string, where one ended it.

    `token_ids` holds the end or stop token, `text` does not. logprobs: for each token {token id: Logprob}, its own first, where asked for;
    cumulative_logprob: the sum of the tokens' own.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None

    @classmethod
    def of(cls, seq: Sequence, tokenizer: Tokenizer | None) -> CompletionOutput:
        logprobs = cumulative = None
        if seq.sampling.logprobs is not None:
            logprobs = [_logprobs(record, tokenizer) for record in seq.options.logprobs]
            cumulative = sum(values[0] for _, values, _ in seq.options.logprobs)
        return cls(index_of(seq), _text(seq, tokenizer), seq.generated_token_ids, seq.finish_reason, seq.stop_reason, logprobs, cumulative)


@dataclass(frozen=True)
class RequestOutput:
    """One request's prompt and answers. `prompt` is None where token ids were given.

    prompt_logprobs: for each prompt token {token id: Logprob}, None for the first; where asked for.
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    metrics: RequestMetrics = field(repr=False)
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    @classmethod
    def of(cls, seq: Sequence, prompt: str | None, tokenizer: Tokenizer | None) -> RequestOutput:
        """What came of the request that `seq` leads."""
        known = None
        if seq.sampling.prompt_logprobs is not None:
            known = [None if record is None else _logprobs(record, tokenizer) for record in seq.options.prompt_logprobs]
        return cls(seq.seq_id, prompt, seq.token_ids[:seq.num_prompt_tokens], [CompletionOutput.of(member, tokenizer) for member in members(seq)],
                   seq.num_cached_tokens or 0, RequestMetrics.of(seq), known)

    def __getitem__(self, key: str) -> Any:
        """The first answer's fields by name: "text", "token_ids", "finish_reason", "logprobs" and the others."""
        try:
            return getattr(self.outputs[0], key)
        except (AttributeError, TypeError):
            raise KeyError(f"{key!r}: a RequestOutput has 'text', 'token_ids', 'finish_reason', 'stop_reason', 'logprobs', "
                           f"'cumulative_logprob' and 'index'") from None

    def as_dict(self) -> dict[str, Any]:
        """Plain data, as the command line prints it."""
        return asdict(self)


def index_of(seq: Sequence) -> int:
    """Which of its request's answers `seq` is."""
    return 0 if seq.options is None else seq.options.sibling


def _text(seq: Sequence, tokenizer: Tokenizer | None) -> str:
    if seq.detokenizer is not None:
        seq.detokenizer.finish()
        return seq.detokenizer.text
    if tokenizer is None:
        return ""
    ids = seq.generated_token_ids
    return tokenizer.decode(ids[:-1] if seq.finish_reason == "stop" else ids)  # no stop string here, so it was a token


def _logprobs(record: TokenLogprobs, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    ids, values, rank = record
    ranks = [rank, *range(1, len(ids))]
    known: dict[int, Logprob] = {}
    for token, value, place in zip(ids, values, ranks):
        if token not in known:  # the token itself may be among the best; its own rank counts its equals
            known[token] = Logprob(value, place, None if tokenizer is None else tokenizer.token_text(token))
    return known
