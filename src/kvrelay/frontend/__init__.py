"""The HTTP service: OpenAI's API in front of the workers.

A request is validated, tokenized, routed, sent to a worker and answered token by token. If its worker is lost, another
worker continues it. ``pipeline`` shows this path on one page; the door, ``api.server``, puts the parts together.
This file imports nothing: ``serve`` and workers need parts of the room, such as the tokenizer, without the server.
"""
