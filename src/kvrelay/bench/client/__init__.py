"""The streaming client: sends requests, timestamps every piece of the answers, keeps a record of each request.

``connection`` is HTTP/1.1 on raw asyncio transports, ``stream`` one request in the API's format, ``driver`` many
requests on schedule, ``service`` other queries (health, models, token counts).
"""
