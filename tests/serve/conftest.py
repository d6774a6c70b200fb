"""A server of the tiny model."""

from collections.abc import Iterator

import pytest
from serve_client import Client, serving

from kvjax.models import Params


@pytest.fixture(scope="module")
def client(letters: Params) -> Iterator[Client]:
    """A server of the tiny model, whose tokens are letters."""
    with serving(letters) as found:
        yield found
