"""What block attention may be told besides queries and slots."""

from typing import NamedTuple

from jaxtyping import Array, Int


class Run(NamedTuple):
    """Slots that stand as they came: what is kept, and right after it the tokens whose queries are asked, in order.

    The slot of row b's query s is `own + s` in every head, though its token's key may stand there or, past a row's end, nothing.

    Attributes:
        first: slots before it are free.
        own: slot of the first query's token; each slot from `first` on and before it holds an earlier token or is free.
    """

    first: Int[Array, "B K"]
    own: Int[Array, "B K"]
