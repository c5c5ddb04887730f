"""The streaming client: sends requests, stamps every piece of the answers, keeps a record of each.

``connection`` is HTTP/1.1 on raw asyncio transports, ``events`` and ``payload`` the API's format, ``stream`` one
request, ``driver`` many at their times, ``service`` what else a server is asked (health, models, token counts).
"""
