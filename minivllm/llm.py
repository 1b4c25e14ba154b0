"""LLM: what a user holds. Text in, text out; below it the engine decides and the worker computes. Built in notebook 00."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence as Listed
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from minivllm.config import DEFAULT_MAX_NUM_SEQS, EngineConfig, PoolTooSmallError, rename_aliases
from minivllm.engine.engine import Engine
from minivllm.engine.events import Trace
from minivllm.engine.explain import explain
from minivllm.engine.sequence import Sequence
from minivllm.engine.siblings import answered, members
from minivllm.engine.stats import Stats
from minivllm.outputs import Piece, RequestOutput
from minivllm.progress import ProgressBar
from minivllm.prompts import Messages, Prompt, are_conversations, as_list, check_messages, text_of, without_names
from minivllm.sampling_params import SamplingParams
from minivllm.tokenizer import Tokenizer

if TYPE_CHECKING:
    from minivllm.memory import MemoryAccount
    from minivllm.weights.checkpoint import Checkpoint

_LIVE: weakref.WeakSet[LLM] = weakref.WeakSet()


def close_all() -> None:
    """Close every LLM of this process that is still open, and give back its memory."""
    for llm in list(_LIVE):
        llm.close()


def _say_what_is_live() -> None:
    if _LIVE:
        held = sum(llm.runner.weight_bytes + llm.runner.pool.num_bytes for llm in _LIVE)
        warnings.warn(f"{len(_LIVE)} LLM of this process {'is' if len(_LIVE) == 1 else 'are'} still open and "
                      f"hold{'s' if len(_LIVE) == 1 else ''} {held / 2**30:.2f} GiB; close() or minivllm.close_all() gives that back", stacklevel=3)


class LLM:
    """A model, ready to generate. Not for several threads at once.

    model: "smollm2" (embedded; the default), a directory with config.json and weights, a .gguf file, or a hub name.
    Every other keyword is a field of `EngineConfig`; nano-vLLM's names for two of them work too.
    Raises ValueError, TypeError or FileNotFoundError that names what is wrong and what to do; nothing stays allocated then.
    """

    def __init__(self, model: str = EngineConfig.model, **settings: Any):
        config = EngineConfig(model=str(model) if hasattr(model, "__fspath__") else model, **rename_aliases(settings))
        from minivllm.memory import memory_account
        from minivllm.weights.hub import open_model
        from minivllm.worker.model_runner import ModelRunner

        if config.tensor_parallel_size > 1:
            from minivllm.worker.parallel_runner import ParallelRunner as ModelRunner
        _say_what_is_live()
        checkpoint = open_model(config.model)
        self._engine: Engine | None = None
        self._added: dict[int, tuple[Sequence, str | None]] = {}  # requests of the step API whose output nobody has yet
        self.runner = ModelRunner(config, checkpoint)
        try:
            limits = self.runner.limits(config)
            try:
                self.config = config.complete(**limits)
            except PoolTooSmallError as error:
                raise PoolTooSmallError(f"{error}\n{memory_account(self.runner, limits, config.max_num_seqs or DEFAULT_MAX_NUM_SEQS)}") from None
            self._set_up(checkpoint)
        except BaseException:  # a notebook keeps the last error, and through it all that this frame holds
            self.runner.close()
            raise
        _LIVE.add(self)

    def _set_up(self, checkpoint: Checkpoint) -> None:
        self.model_config = self.runner.model_config
        self.runner.allocate(self.config.num_kv_blocks, self.config.block_size)
        self.runner.capture(self.config)
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
        self.engine.check_room(sum(params.n for _, params in requests))
        sequences: list[Sequence] = []
        try:
            for ids, params in requests:
                sequences.append(self.engine.add(ids, params))
            self._run(sequences, use_tqdm)
        finally:
            self.engine.abort(sequences)
        _warn_of_errors(sequences, stacklevel=3)
        return [RequestOutput.of(seq, text_of(prompt), self.tokenizer) for seq, prompt in zip(sequences, prompts)]

    def chat(self, messages: Messages | list[Messages], sampling_params: SamplingParams | Listed[SamplingParams] | None = None,
             use_tqdm: bool = True) -> list[RequestOutput]:
        """Answer one conversation, or several: lists of {"role": ..., "content": ...} as OpenAI's API takes them."""
        conversations = messages if are_conversations(messages) else [messages]
        return self.generate([{"prompt_token_ids": self.chat_prompt(conversation)} for conversation in conversations], sampling_params, use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[Piece]:
        """The answer's text, piece by piece in whole characters. Closing the iterator aborts the request.

        A piece is a str whose `index` says which answer it belongs to, where n > 1 makes several.
        """
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

    def add_request(self, prompt: Prompt, sampling_params: SamplingParams | None = None, priority: int = 0) -> int:
        """Queue one request and return its id; `step` runs it. For those who want to look between two steps."""
        [(ids, params)] = self._checked([prompt], sampling_params)
        seq = self.engine.add(ids, params, priority=priority)
        self._added[seq.seq_id] = (seq, text_of(prompt))
        return seq.seq_id

    def step(self) -> list[RequestOutput]:
        """Run one step of everything that is queued or running; returns the added requests that have finished since the last call."""
        if self.engine.has_unfinished_requests():
            self.engine.step()
        done = [self._added.pop(request_id) for request_id, (seq, _) in list(self._added.items()) if answered(seq)]
        _warn_of_errors([seq for seq, _ in done], stacklevel=3)
        return [RequestOutput.of(seq, prompt, self.tokenizer) for seq, prompt in done]

    def has_unfinished_requests(self) -> bool:
        """Whether an added request's output has not been returned by `step` yet."""
        return bool(self._added)

    def abort(self, request_id: int) -> None:
        """End an added request now; the next `step` returns what it has, with finish_reason "abort". Unknown ids raise KeyError."""
        if request_id not in self._added:
            raise KeyError(f"no request {request_id} is under way: it was never added, or `step` has returned it")
        self.engine.abort([self._added[request_id][0]])

    @property
    def memory(self) -> MemoryAccount:
        """Where memory goes; print it."""
        from minivllm.memory import memory_account

        return memory_account(self.engine.runner, asdict(self.config), self.config.max_num_seqs)

    def start_trace(self) -> Trace:
        """Record every event of the engine from now on, into a new trace (see engine/events.py)."""
        return self.engine.scheduler.start_trace()

    def stop_trace(self) -> None:
        self.engine.scheduler.stop_trace()

    def explain(self, request_id: int) -> str:
        """One request's life in sentences. A trace must have been running since it was made."""
        trace = self.engine.scheduler.trace
        if trace is None:
            raise ValueError("nothing was recorded: call start_trace() before the request is made")
        return explain(trace, request_id)

    def close(self) -> None:
        """Abort what is under way and give back weights and KV cache. Safe to call twice."""
        _LIVE.discard(self)
        if self._engine is not None:
            self._engine.scheduler.abort_all()
            self._engine, self._added = None, {}
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
        return [(self.engine.check(self._token_ids(prompt), item), item) for prompt, item in zip(prompts, params)]

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
        unfinished = {member.seq_id for seq in sequences for member in members(seq)}
        with ProgressBar(len(unfinished), self.stats, use_tqdm) as bar:
            while unfinished:
                done = unfinished.intersection(seq.seq_id for seq in self.engine.step())
                unfinished -= done
                bar.update(len(done))

    def _stream(self, ids: list[int], params: SamplingParams) -> Iterator[str]:
        seq = self.engine.add(ids, params, stream=True)
        try:
            answers = members(seq)
            while answers:
                if not all(answer.finished for answer in answers):  # the steps of another call may have ended them
                    self.engine.step()
                for answer in list(answers):
                    if done := answer.finished:
                        answer.detokenizer.finish()
                        answers.remove(answer)
                    if piece := answer.detokenizer.take(final=done):
                        yield Piece.of(piece, answer)
        finally:
            if self._engine is not None:
                self.engine.abort([seq])
        _warn_of_errors([seq], stacklevel=3)


def _warn_of_errors(sequences: list[Sequence], stacklevel: int) -> None:
    for seq in [member for leader in sequences for member in members(leader)]:
        if seq.error:
            warnings.warn(f"request {seq.seq_id} was aborted: {seq.error}", stacklevel=stacklevel)
