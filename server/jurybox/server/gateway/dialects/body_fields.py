"""Fields of the bodies of OpenAI-like requests that would change the answer, and nothing here heeds.

A request that sets one is refused, because its client would take the answer for another. A field that is not listed is
used, or changes no number: who asks (`user`), how text is sampled or tokenized (only jurors do), what is cached.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from jurybox.protocol.errors import Code, Refused, plain

_WHOLE = "the model gets the whole text, or the request an error"
_RAW = "scores are the model's own numbers"
_TEMPLATE = "no chat template is applied: send the text, or serve a model of the input chat"
_DIGITS = "the answer is one number in digits"
# By name: values that change nothing, beside none, false, 0 and empty ones; and why others cannot be heeded.
_TEXTS: dict[str, tuple[tuple[Any, ...], str]] = {
    "priority": ((), "requests have the priority of their [dialects.NAME]"),
    "use_activation": ((), _RAW),
    "activation": ((), _RAW),
    "softmax": ((), _RAW),
    "truncate_prompt_tokens": ((-1,), _WHOLE),
    "max_tokens_per_doc": ((), _WHOLE),
    "dimensions": ((1,), "a score is one number"),
    "chat_template": ((), _TEMPLATE),
    "chat_template_kwargs": ((), _TEMPLATE),
    "add_generation_prompt": ((), _TEMPLATE),
    "continue_final_message": ((), _TEMPLATE),
    "mm_processor_kwargs": ((), "pictures are resized by [dialects.NAME] alone"),
    "lora_path": ((), "the model is that of [dialects.NAME]"),
}
_CHATS: dict[str, tuple[tuple[Any, ...], str]] = {
    "stream": ((), _DIGITS),
    "n": ((1,), _DIGITS),
    "logprobs": ((), _DIGITS),
    "tools": ((), _DIGITS),
    "functions": ((), _DIGITS),
    "response_format": (({"type": "text"},), _DIGITS),
    "structured_outputs": ((), _DIGITS),
    **dict.fromkeys(("guided_json", "guided_choice", "guided_regex", "guided_grammar"), ((), _DIGITS)),
}


def require_texts(given: Mapping[str, Any]) -> None:
    """Raise Refused for a field that would change the score of a text."""
    _require(given, _TEXTS.items())


def require_chat(given: Mapping[str, Any]) -> None:
    """Raise Refused for a field that would change the score of a chat, or the form in which it is said."""
    _require(given, (_TEXTS | _CHATS).items())


def _require(given: Mapping[str, Any], fields: Iterable[tuple[str, tuple[tuple[Any, ...], str]]]) -> None:
    for name, (harmless, why) in fields:
        if (value := given.get(name)) and value not in harmless:
            raise Refused(f"{name} = {plain(value, 50)} is not supported: {why}", Code.UNSUPPORTED)
