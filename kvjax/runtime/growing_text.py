"""Text while it is being written, and the stop strings in it."""

from collections.abc import Sequence

from kvjax.conversion.tokenizer import Tokenizer


class GrowingText:
    """The text of new tokens while they come, up to the first stop string.

    A token costs what decoding a few does, and a search in the last characters: neither grows with the prompt or the text.

    Args:
        given: tokens before the first new one.
        stop: strings that end the text; they are no part of it.

    Attributes:
        stopped: whether one of them has appeared.
    """

    def __init__(self, tokenizer: Tokenizer, given: Sequence[int], stop: Sequence[str] = ()) -> None:
        self._decoder = tokenizer.stream_decoder(given)
        self._stop = stop
        self._pieces: list[str] = []
        self._taken = 0
        self._held = ""  # certain text that may begin a stop string
        self.stopped = False

    def push(self, token: int) -> None:
        """Take one token."""
        text = self._held + self._decoder.push(token)
        if self._stop:
            # A stop string that was not there before reaches beyond what was certain, so it begins in what was held.
            whole = text + self._decoder.pending()
            found = [at for at in map(whole.find, self._stop) if at >= 0]
            if found:
                self._pieces.append(whole[: min(found)])
                self.stopped = True
                return
        certain = len(text) - max((_begun(text, string) for string in self._stop), default=0)
        self._pieces.append(text[:certain])
        self._held = text[certain:]

    def take(self) -> str:
        """The text that has become certain since the last call: no character in pieces, and nothing that may begin a stop string."""
        pieces, self._taken = self._pieces[self._taken :], len(self._pieces)
        return "".join(pieces)

    def rest(self) -> str:
        """What `take` holds back: part of the text, if no token follows."""
        return "" if self.stopped else self._held + self._decoder.pending()

    def whole(self) -> str:
        """All of the text, if no token follows."""
        return "".join(self._pieces) + self.rest()


def _begun(text: str, string: str) -> int:
    """Characters at the end of a text which a string begins with; fewer than all of the string."""
    return next((size for size in range(min(len(string) - 1, len(text)), 0, -1) if text.endswith(string[:size])), 0)
