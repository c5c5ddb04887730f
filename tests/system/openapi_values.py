"""Values that an OpenAPI document's schemas allow, and near misses of them, from a seed."""

from __future__ import annotations

import random
from typing import Any

MAX_DEPTH = 6
STRINGS = ("", "hello", "Grüße 🙂", "\0", "user", "x" * 500, "{{ 7*7 }}", "null")
NUMBERS = (0, 1, -1, 2, 0.5, 1e9, -1e9, 2**31, 2**64, -(2**63))


class SchemaValues:
    """Draws bodies. Optional fields appear now and then; one value in 25 is of a type that was not asked for."""

    def __init__(self, document: dict[str, Any], seed: int) -> None:
        self._schemas = document["components"]["schemas"]
        self._rng = random.Random(seed)

    def make(self, schema: dict[str, Any], depth: int = 0) -> Any:
        rng = self._rng
        if "$ref" in schema:
            schema = self._schemas[schema["$ref"].rpartition("/")[2]]
        if depth and rng.random() < 0.04:
            return rng.choice((None, "text", 5, [], {}, [[]], True, 1.5))
        for union in ("anyOf", "oneOf"):
            if union in schema:
                return self.make(rng.choice(schema[union]), depth)
        if "enum" in schema:
            return rng.choice(schema["enum"])
        if "const" in schema:
            return schema["const"]
        return self._of_type(schema, depth)

    def _of_type(self, schema: dict[str, Any], depth: int) -> Any:
        rng = self._rng
        match schema.get("type"):
            case "object":
                return self._object(schema, depth)
            case "array":
                if depth > MAX_DEPTH:
                    return []
                return [self.make(schema.get("items") or {}, depth + 1) for _ in range(rng.choice((0, 1, 1, 2, 5)))]
            case "integer":
                return rng.choice((rng.randrange(40), rng.randrange(40), int(rng.choice(NUMBERS))))
            case "number":
                return rng.choice((rng.random(), rng.random() * 2, rng.choice(NUMBERS)))
            case "string":
                return rng.choice(STRINGS)
            case "boolean":
                return rng.random() < 0.5
            case "null":
                return None
            case _:
                return rng.choice((None, "text", 5, ["a"], {"a": 1}, True))

    def _object(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        rng, properties = self._rng, schema.get("properties", {})
        required = set(schema.get("required", ()))
        made = {
            name: self.make(inner, depth + 1)
            for name, inner in properties.items()
            if name in required or rng.random() < (0.15 if depth < MAX_DEPTH else 0)
        }
        extra = schema.get("additionalProperties")
        if isinstance(extra, dict) and rng.random() < 0.5:
            made[rng.choice(("5", "a", "-1"))] = self.make(extra, depth + 1)
        return made
