"""What values a checkpoint's files may hold: one mechanism for every format.

Each format declares the fields that it reads as a `Strict` model; `checked` compares a file's contents with it. Fields that
nothing reads may hold anything.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from kvjax.config.model import MAX_LAYERS

from .errors import CheckpointError, shortened

Size = Annotated[int, Field(gt=0, lt=2**31)]
"""A number of things."""

Layers = Annotated[int, Field(gt=0, le=MAX_LAYERS)]

Id = Annotated[int, Field(ge=0, lt=2**31)]
"""A token."""

Positive = Annotated[float, Field(gt=0, lt=1e30)]
"""A number well within float32."""


class Strict(BaseModel):
    """Fields of exactly their types: no text for a number, no number for a truth value, nothing infinite."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, frozen=True, populate_by_name=False)


_Schema = TypeVar("_Schema", bound=BaseModel)


def checked_under(schema: type[_Schema], fields: Mapping[str, Any], prefix: str, source: object) -> _Schema:
    """`checked`, of the fields alone whose keys begin with `prefix`."""
    held = {key.removeprefix(prefix): value for key, value in fields.items() if key.startswith(prefix)}
    return checked(schema, held, source, prefix)


def checked(schema: type[_Schema], fields: Mapping[str, Any], source: object, prefix: str = "") -> _Schema:
    """The fields that a file holds, as the schema types them.

    Args:
        schema: what is allowed.
        fields: what is there.
        source: file name for messages.
        prefix: what the file puts before the keys.

    Raises:
        CheckpointError: names file, key, value and what is allowed.
    """
    try:
        return schema.model_validate(fields)
    except (pydantic.ValidationError, RecursionError) as error:
        if isinstance(error, RecursionError):
            raise CheckpointError(f"{source}: nested too deeply") from error
        first = error.errors(include_url=False)[0]
        key = prefix + ".".join(str(part) for part in first["loc"])
        if first["type"] == "missing":
            raise CheckpointError(f"{source}: {key} is missing") from error
        allowed = first["msg"].replace("Input should", "it should").removeprefix("Value error, ")
        allowed = re.sub(r" or instance of \w+", "", allowed)
        raise CheckpointError(f"{source}: {key} is {shortened(first['input'])}; {allowed}") from error
