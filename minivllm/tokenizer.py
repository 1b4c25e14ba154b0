"""Text to token ids and back: the chat template on the way in, whole characters on the way out.

Tokenizer wraps a Hugging Face tokenizer (transformers, imported when one is made). IncrementalDetokenizer needs nothing but
a function from ids to text, so the engine can use it too. Built in notebook 00; streaming is taken up again in 12.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

_INCOMPLETE = "\ufffd"  # what a decoder writes for bytes that are not (yet) a whole character


class IncrementalDetokenizer:
    """Text of a growing list of tokens, in whole characters, ended by the first stop string.

    One character may need several tokens, and a token's text may depend on the one before it (a leading space). So each
    token is decoded together with a few before it, and text that ends in an incomplete character waits for the next token.
    """

    def __init__(self, decode: Callable[[list[int]], str], stop: Sequence[str] = ()):
        self.decode = decode
        self.stop = tuple(stop)
        self.text = ""
        self.token_ids: list[int] = []
        self._window = 0    # decode from here ...
        self._settled = 0   # ... and what lies before here is in `text` already
        self._taken = 0     # characters that `take` has handed out
        self._stopped = False

    def add(self, token_id: int, may_stop: bool = True) -> str | None:
        """Take in one token. Returns the stop string that it completed, if any; `text` then ends just before it.

        Not `may_stop`: what this token completes is ordinary text.
        """
        self.token_ids.append(token_id)
        text = self._pending()
        if not text or text.endswith(_INCOMPLETE):
            return None
        self._window, self._settled = self._settled, len(self.token_ids)
        return self._extend(text, may_stop)

    def finish(self) -> str | None:
        """No more tokens come: what is still incomplete becomes text. Returns a stop string that this completed, if any."""
        text = self._pending()
        self._window = self._settled = len(self.token_ids)
        return self._extend(text)

    def take(self, final: bool = False) -> str:
        """Text that was not handed out before. Unless `final`, the beginning of a possible stop string is held back."""
        end = len(self.text) if final or self._stopped else len(self.text) - self._held_back()
        new = self.text[self._taken:end]
        self._taken = max(self._taken, end)
        return new

    def _pending(self) -> str:
        known = self.decode(self.token_ids[self._window:self._settled])
        return self.decode(self.token_ids[self._window:])[len(known):]

    def _extend(self, new: str, may_stop: bool = True) -> str | None:
        if self._stopped:
            return None
        known = len(self.text)
        self.text += new
        if not may_stop:
            return None
        # A stop string may begin in the text that was there before, but must end in the new one.
        found = [(at, s) for s in self.stop if (at := self.text.find(s, max(0, known - len(s) + 1))) >= 0]
        if not found:
            return None
        at, matched = min(found, key=lambda hit: hit[0])
        self.text = self.text[:at]
        self._stopped = True
        return matched

    def _held_back(self) -> int:
        longest = max((len(s) for s in self.stop), default=1) - 1
        for size in range(min(longest, len(self.text)), 0, -1):
            if any(s.startswith(self.text[-size:]) for s in self.stop):
                return size
        return 0


class Tokenizer:
    """A model's tokenizer. `eos_token_ids` are its own end tokens; the model's config may name more."""

    def __init__(self, hf_tokenizer: Any):
        self.hf = hf_tokenizer

    @classmethod
    def from_dir(cls, directory: str | Path) -> Tokenizer:
        """Read the tokenizer files of a model directory. Raises ValueError with the directory when there are none."""
        directory = Path(directory)
        if (directory / "tokenizer.json").exists():
            from transformers import PreTrainedTokenizerFast as reader
        else:
            from transformers import AutoTokenizer as reader  # not before it is needed: it imports a list of every model, which takes a while
        try:
            return cls(reader.from_pretrained(directory))
        except Exception as error:
            raise ValueError(f"no usable tokenizer in {directory}: {error}") from error

    @property
    def eos_token_id(self) -> int | None:
        return self.hf.eos_token_id

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return frozenset(() if self.hf.eos_token_id is None else (self.hf.eos_token_id,))

    @property
    def chat_template(self) -> str | None:
        return self.hf.chat_template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Raises ValueError for text that no encoder can take (a lone surrogate)."""
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"the prompt is not valid text: a lone surrogate at position {error.start}") from None
        return self.hf.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids`, special tokens left out; an incomplete character becomes U+FFFD."""
        return self.hf.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def token_text(self, token_id: int) -> str:
        """One token by itself, special tokens by their names."""
        return self.hf.decode([token_id], clean_up_tokenization_spaces=False)

    def render_chat(self, messages: list[dict[str, str]]) -> str:
        """The prompt for an OpenAI-style message list, open for the assistant's answer, special tokens included."""
        if self.chat_template is None:
            raise ValueError("this model's tokenizer has no chat template: use generate() with a prompt of your own")
        return self.hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
