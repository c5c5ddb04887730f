"""The streaming client: sends requests, timestamps every piece of the answers, keeps a record of each request.

``connection`` is HTTP/1.1 on raw asyncio transports, ``events`` and ``payload`` the API's format, ``stream`` one
request, ``driver`` many requests on schedule, ``service`` other queries (health, models, token counts).
"""
