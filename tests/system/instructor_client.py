"""Asks a server for objects by instructor, in an environment of its own; prints each as a line of JSON.

Arguments: the base URL, the model.
"""

from __future__ import annotations

import sys
from typing import Literal

import instructor  # type: ignore[import-not-found]
import openai
import pydantic

QUESTION = "What is the weather by the sea, and how are the people who live there?"


class Weather(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")  # a schema that allows other properties gets some

    place: Literal["sea", "hills"]
    windy: bool
    days: int = pydantic.Field(ge=1, le=9)


def main() -> None:
    url, model = sys.argv[1:]
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.RESPONSES_TOOLS):
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as api:
            client = instructor.from_openai(api, mode=mode)
            limit = "max_output_tokens" if mode is instructor.Mode.RESPONSES_TOOLS else "max_tokens"
            messages = [{"role": "user", "content": QUESTION}]
            found = client.create(model=model, messages=messages, response_model=Weather, max_retries=0, **{limit: 200})
        print(found.model_dump_json())


if __name__ == "__main__":
    main()
