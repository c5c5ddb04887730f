"""OpenAI's API as values and bytes: requests, their checks, answers, chunks, errors. No I/O."""
