"""OpenAI's ``/v1/responses``, stateless: its requests and answers, translated to and from those of chats. No I/O."""

from kvrelay.frontend.responses.responses_api import RESPONSES

__all__ = ["RESPONSES"]
