"""LLM: what a user holds. Text in, text out; below it the engine decides and the worker computes. Built in notebook 00."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence as Listed
from typing import TYPE_CHECKING, Any

from minivllm.config import ALIASES, EngineConfig
from minivllm.engine.engine import Engine
from minivllm.engine.sequence import Sequence
from minivllm.engine.stats import Stats
from minivllm.outputs import CompletionOutput, RequestMetrics, RequestOutput
from minivllm.prompts import Messages, Prompt, are_conversations, as_list, check_messages, text_of, without_names
from minivllm.sampling_params import SamplingParams
from minivllm.tokenizer import Tokenizer

if TYPE_CHECKING:
    from minivllm.weights.checkpoint import Checkpoint


class LLM:
    """A model, ready to generate. Not for several threads at once.

    model: "smollm2" (embedded; the default), a directory with config.json and weights, a .gguf file, or a hub name.
    Every other keyword is a field of `EngineConfig`; nano-vLLM's names for two of them work too.
    Raises ValueError, TypeError or FileNotFoundError that names what is wrong and what to do; nothing stays allocated then.
    """

    def __init__(self, model: str = EngineConfig.model, **settings: Any):
        config = EngineConfig(model=_path(model), **_rename_aliases(settings))
        from minivllm.weights.hub import open_model
        from minivllm.worker.model_runner import ModelRunner

        checkpoint = open_model(config.model)
        self._engine: Engine | None = None
        self.runner = ModelRunner(config, checkpoint)
        try:
            self.config = config.complete(**self.runner.limits(config))
            self._set_up(checkpoint)
        except BaseException:  # a notebook keeps the last error, and through it all that this frame holds
            self.runner.close()
            raise

    def _set_up(self, checkpoint: Checkpoint) -> None:
        self.model_config = self.runner.model_config
        self.runner.allocate(self.config.num_kv_blocks, self.config.block_size)
        self.tokenizer: Tokenizer | None = checkpoint.make_tokenizer() if checkpoint.make_tokenizer else None
        own_ends = self.tokenizer.eos_token_ids if self.tokenizer else frozenset()
        self._engine = Engine(self.config, self.runner, self.model_config.vocab_size, own_ends | self.model_config.eos_token_ids,
                              decode=self.tokenizer.decode if self.tokenizer else None)

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise RuntimeError("this LLM is closed: make a new one")
        return self._engine

    @property
    def stats(self) -> Stats:
        """Counters since construction, and gauges of the last step."""
        return self.engine.stats

    def generate(self, prompts: Prompt | Iterable[Prompt], sampling_params: SamplingParams | Listed[SamplingParams] | None = None,
                 use_tqdm: bool = True) -> list[RequestOutput]:
        """Complete each prompt; the outputs come in the prompts' order.

        A prompt is a text, a list of token ids, or a dict with "prompt" or "prompt_token_ids". One SamplingParams serves all,
        a list gives each its own. An interrupt aborts what is under way and leaves the engine ready for the next call.
        """
        prompts = as_list(prompts)
        requests = self._checked(prompts, sampling_params)
        sequences: list[Sequence] = []
        try:
            for ids, params in requests:
                sequences.append(self.engine.add(ids, params))
            self._run(sequences, use_tqdm)
        finally:
            self.engine.abort(sequences)
        _warn_of_errors(sequences, stacklevel=3)
        return [self._output(seq, text_of(prompt)) for seq, prompt in zip(sequences, prompts)]

    def chat(self, messages: Messages | list[Messages], sampling_params: SamplingParams | Listed[SamplingParams] | None = None,
             use_tqdm: bool = True) -> list[RequestOutput]:
        """Answer one conversation, or several: lists of {"role": ..., "content": ...} as OpenAI's API takes them."""
        conversations = messages if are_conversations(messages) else [messages]
        return self.generate([{"prompt_token_ids": self.chat_prompt(conversation)} for conversation in conversations], sampling_params, use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[str]:
        """The answer's text, piece by piece in whole characters. Closing the iterator aborts the request."""
        [(ids, params)] = self._checked([prompt], sampling_params)
        if self.tokenizer is None:
            raise ValueError("streaming needs text, and this model has no tokenizer: use generate() and read token_ids")
        return self._stream(ids, params)

    def chat_prompt(self, messages: Messages) -> list[int]:
        """Token ids of a conversation under the model's chat template, open for the assistant's answer."""
        check_messages(messages)
        if self.tokenizer is None:
            raise ValueError("chat needs a tokenizer, and this model has none")
        return self.tokenizer.encode(self.tokenizer.render_chat(messages), add_special_tokens=False)

    def close(self) -> None:
        """Abort what is under way and give back weights and KV cache. Safe to call twice."""
        if self._engine is not None:
            self._engine.scheduler.abort_all()
            self._engine = None
            self.runner.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _checked(self, prompts: list[Prompt], sampling_params: SamplingParams | Listed[SamplingParams] | None) -> list[tuple[list[int], SamplingParams]]:
        """Every prompt's token ids with its parameters, all checked before the first is queued."""
        many = isinstance(sampling_params, (list, tuple))
        params = list(sampling_params) if many else [SamplingParams() if sampling_params is None else sampling_params] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts but {len(params)} SamplingParams: give one for all, or one each")
        for item in params:
            if not isinstance(item, SamplingParams):
                raise TypeError(f"sampling_params must be a SamplingParams or a list of them, got {item!r:.80}")
        if self.tokenizer is None and any(item.stop for item in params):
            raise ValueError("stop strings need text, and this model has no tokenizer: use stop_token_ids")
        return [(self.engine.check(self._token_ids(prompt)), item) for prompt, item in zip(prompts, params)]

    def _token_ids(self, prompt: Prompt) -> Listed[int]:
        prompt = without_names(prompt)
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError("this model has no tokenizer: give the prompt as token ids")
            return self.tokenizer.encode(prompt)
        if isinstance(prompt, (bytes, bytearray, memoryview)) or not hasattr(prompt, "__len__"):
            raise TypeError(f"a prompt must be a text or a list of token ids, got {prompt!r:.80}")
        return prompt

    def _run(self, sequences: list[Sequence], use_tqdm: bool) -> None:
        unfinished = {seq.seq_id for seq in sequences}
        with _ProgressBar(len(sequences), self.stats, use_tqdm) as bar:
            while unfinished:
                done = unfinished.intersection(seq.seq_id for seq in self.engine.step())
                unfinished -= done
                bar.update(len(done))

    def _stream(self, ids: list[int], params: SamplingParams) -> Iterator[str]:
        seq = self.engine.add(ids, params, stream=True)
        try:
            done = False
            while not done:
                if not seq.finished:  # the steps of another call may have ended it
                    self.engine.step()
                done = seq.finished
                if done:
                    seq.detokenizer.finish()
                if piece := seq.detokenizer.take(final=done):
                    yield piece
        finally:
            if self._engine is not None:
                self.engine.abort([seq])
        _warn_of_errors([seq], stacklevel=3)

    def _output(self, seq: Sequence, prompt: str | None) -> RequestOutput:
        completion = CompletionOutput(0, self._text(seq), seq.generated_token_ids, seq.finish_reason, seq.stop_reason)
        return RequestOutput(seq.seq_id, prompt, seq.token_ids[:seq.num_prompt_tokens], [completion],
                             seq.num_cached_tokens or 0, RequestMetrics.of(seq))

    def _text(self, seq: Sequence) -> str:
        if seq.detokenizer is not None:
            seq.detokenizer.finish()
            return seq.detokenizer.text
        if self.tokenizer is None:
            return ""
        ids = seq.generated_token_ids
        return self.tokenizer.decode(ids[:-1] if seq.finish_reason == "stop" else ids)  # no stop string here, so it was a token


class _ProgressBar:
    """Finished requests, and tokens a second of either kind since the start."""

    def __init__(self, total: int, stats: Stats, shown: bool):
        self.stats = stats
        self.bar = None
        if shown:
            from tqdm.auto import tqdm

            self.bar = tqdm(total=total, desc="Generating", unit="request", dynamic_ncols=True)
            self.before = (stats.prompt_tokens, stats.generation_tokens)

    def __enter__(self) -> _ProgressBar:
        return self

    def update(self, finished: int) -> None:
        if self.bar is not None:
            seconds = max(self.bar.format_dict["elapsed"], 1e-9)
            prefill, decode = self.stats.prompt_tokens - self.before[0], self.stats.generation_tokens - self.before[1]
            self.bar.set_postfix_str(f"prefill {prefill / seconds:.0f} tok/s, decode {decode / seconds:.0f} tok/s", refresh=False)
            self.bar.update(finished)

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.close()


def _rename_aliases(settings: dict[str, Any]) -> dict[str, Any]:
    renamed = {}
    for name, value in settings.items():
        target = ALIASES.get(name, name)
        if target in renamed or (target != name and target in settings):
            raise TypeError(f"LLM got both {name!r} and {target!r}: they mean the same, give one")
        renamed[target] = None if name in ALIASES and value == -1 else value  # nano-vLLM's -1 means: choose
    return renamed


def _path(model: Any) -> Any:
    return str(model) if hasattr(model, "__fspath__") else model


def _warn_of_errors(sequences: list[Sequence], stacklevel: int) -> None:
    for seq in sequences:
        if seq.error:
            warnings.warn(f"request {seq.seq_id} was aborted: {seq.error}", stacklevel=stacklevel)
