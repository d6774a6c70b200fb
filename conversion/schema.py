"""Validates values in a checkpoint's files, for every format.

Each format declares the fields that it reads as a `Strict` model, and `checked` validates a file against it. Fields
that are not read may have any value.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from kvjax.config.model import MAX_LAYERS

from .errors import CheckpointError, shortened

Size = Annotated[int, Field(gt=0, lt=2**31)]
"""A positive count."""

Layers = Annotated[int, Field(gt=0, le=MAX_LAYERS)]

Id = Annotated[int, Field(ge=0, lt=2**31)]
"""A token id."""

Positive = Annotated[float, Field(gt=0, lt=1e30)]
"""A positive number within the range of float32."""


class Strict(BaseModel):
    """Model whose fields need exactly their types: no text for numbers, no numbers for booleans, no infinities."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, frozen=True, populate_by_name=False)


_Schema = TypeVar("_Schema", bound=BaseModel)


def checked_under(schema: type[_Schema], fields: Mapping[str, Any], prefix: str, source: object) -> _Schema:
    """Validate the fields whose keys begin with `prefix`, as `checked` does."""
    held = {key.removeprefix(prefix): value for key, value in fields.items() if key.startswith(prefix)}
    return checked(schema, held, source, prefix)


def checked(schema: type[_Schema], fields: Mapping[str, Any], source: object, prefix: str = "") -> _Schema:
    """Validate the fields of a file.

    Args:
        schema: the expected fields.
        fields: the file's contents.
        source: file name for messages.
        prefix: prefix of the keys in the file, for messages.

    Raises:
        CheckpointError: a field is missing or invalid. The message names file, key, value and what is allowed.
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
