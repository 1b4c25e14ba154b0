"""What may stand for a prompt or a conversation, brought into one form; what may not is refused with a reason."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from minivllm.keywords import unknown_keyword

Prompt = "str | Sequence[int] | dict[str, Any]"
Messages = "list[dict[str, str]]"


def as_list(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """One prompt or several -> a list. A non-empty list of ints is one prompt."""
    if isinstance(prompts, (str, dict, bytes)):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise TypeError(f"prompts must be a text, token ids or a list of these, got {prompts!r:.80}")
    prompts = list(prompts)
    first_is_token = bool(prompts) and hasattr(prompts[0], "__index__") and getattr(prompts[0], "ndim", 0) == 0
    return [prompts] if first_is_token else prompts


def text_of(prompt: Prompt) -> str | None:
    text = prompt.get("prompt") if isinstance(prompt, dict) else prompt
    return text if isinstance(text, str) else None


def are_conversations(messages: Any) -> bool:
    if not isinstance(messages, (list, tuple)) or not messages:
        raise TypeError(f"messages must be a list of {{'role': ..., 'content': ...}} or a list of such lists, got {messages!r:.80}")
    return isinstance(messages[0], (list, tuple))


def check_messages(messages: Any) -> None:
    if not isinstance(messages, (list, tuple)) or not messages:
        raise ValueError(f"a conversation needs at least one message, got {messages!r:.80}")
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise TypeError(f"a message must be a dict with the texts 'role' and 'content', got {message!r:.80}")


def without_names(prompt: Prompt) -> str | Sequence[int]:
    """vLLM's {"prompt": text} and {"prompt_token_ids": ids} -> what they hold; any other prompt as it is."""
    if not isinstance(prompt, dict):
        return prompt
    for key in prompt:
        if key not in ("prompt", "prompt_token_ids"):
            raise unknown_keyword("a prompt", str(key), ("prompt", "prompt_token_ids"))
    ids = prompt.get("prompt_token_ids")
    return prompt.get("prompt", ()) if ids is None else ids
