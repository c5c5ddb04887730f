"""Anthropic's ``/v1/messages``: its requests, answers and errors, translated to and from those of chats. No I/O."""

from kvrelay.frontend.anthropic.errors import anthropic_error
from kvrelay.frontend.anthropic.messages_api import COUNTED, MESSAGES

MESSAGES_PATH = "/v1/messages"
COUNT_TOKENS_PATH = "/v1/messages/count_tokens"

__all__ = ["COUNTED", "COUNT_TOKENS_PATH", "MESSAGES", "MESSAGES_PATH", "anthropic_error"]
