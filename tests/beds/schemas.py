"""JSON schemas."""

from typing import Any


def closed_schema(schema: Any) -> Any:
    """The same schema that also refuses fields it does not name, as the API server prunes them."""
    if isinstance(schema, dict):
        made = {key: closed_schema(value) for key, value in schema.items()}
        if isinstance(schema.get("properties"), dict):
            made.setdefault("additionalProperties", False)
        return made
    return [closed_schema(item) for item in schema] if isinstance(schema, list) else schema
