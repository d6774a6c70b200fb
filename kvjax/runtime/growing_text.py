"""Decodes text while its tokens are generated, and finds stop strings."""

from collections.abc import Sequence

from kvjax.conversion.tokenizer import Tokenizer


class GrowingText:
    """Text of new tokens as they are generated, up to the first stop string.

    The cost per token is that of decoding a few tokens and searching a few characters. It does not grow with the text.

    Args:
        tokenizer: the model's tokenizer.
        given: tokens before the first new token.
        stop: strings that end the text, and are not part of it.

    Attributes:
        stopped: whether a stop string has appeared.
    """

    def __init__(self, tokenizer: Tokenizer, given: Sequence[int], stop: Sequence[str] = ()) -> None:
        self._decoder = tokenizer.stream_decoder(given)
        self._stop = stop
        self._pieces: list[str] = []
        self._taken = 0
        self._held = ""  # complete characters that may begin a stop string
        self.stopped = False

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens, where there are no stop strings."""
        assert not self._stop
        self._pieces.append(self._decoder.extend(tokens))

    def push(self, token: int) -> bool:
        """Add one token. Returns `stopped`."""
        text = self._held + self._decoder.push(token)
        if self._stop:
            # A new stop string ends in new text, so it begins in the withheld text.
            whole = text + self._decoder.pending()
            found = [at for at in map(whole.find, self._stop) if at >= 0]
            if found:
                self._pieces.append(whole[: min(found)])
                self.stopped = True
                return True
        certain = len(text) - max((_begun(text, string) for string in self._stop), default=0)
        self._pieces.append(text[:certain])
        self._held = text[certain:]
        return self.stopped

    def take(self) -> str:
        """Text that has become certain since the last call: complete characters that cannot begin a stop string."""
        pieces, self._taken = self._pieces[self._taken :], len(self._pieces)
        return "".join(pieces)

    def rest(self) -> str:
        """Text that `take` has withheld. It is part of the result if no token follows."""
        return "" if self.stopped else self._held + self._decoder.pending()

    def whole(self) -> str:
        """The whole text, if no token follows."""
        return "".join(self._pieces) + self.rest()


def _begun(text: str, string: str) -> int:
    """Length of the longest end of `text` with which `string` begins, less than all of it."""
    return next((size for size in range(min(len(string) - 1, len(text)), 0, -1) if text.endswith(string[:size])), 0)
