"""Text of tokens that follow others: token by token, and from a few tokens of context, it is what decoding everything gives."""

from collections.abc import Callable, Iterable, Sequence

import pytest
import tokenizers
from checkpoints import byte_tokenizer
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from kvjax.conversion import Tokenizer
from kvjax.runtime.growing_text import GrowingText

WORDS = ["▁", "▁▁", "a", "▁hello", "▁world", "or", ".", "\ufffd", "é", "▁\ufffd"]


def byte_level() -> Tokenizer:
    """Bytes, merges, and tokens added to them: one special among the ids, one of other letters, one that looks like a byte."""
    backend = byte_tokenizer()
    backend.add_tokens(["ünï→", AddedToken(" spaced ", normalized=False), "<0x41>"])
    backend.add_special_tokens(["<|end|>"])
    return Tokenizer(backend)


def sentencepiece(*steps: decoders.Decoder) -> Tokenizer:
    """A SentencePiece vocabulary with bytes, whose decoder ends in the given steps."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    backend = tokenizers.Tokenizer(models.BPE({text: i for i, text in enumerate(tokens)}, [], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *steps])
    backend.add_tokens([" added ", "►"])
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(backend)


def leading_space() -> Tokenizer:
    return sentencepiece(decoders.Strip(content=" ", left=1))


def metaspace() -> Tokenizer:
    """Pieces whose first one alone loses its space, by another decoder."""
    backend = tokenizers.Tokenizer(models.WordLevel({text: i for i, text in enumerate(["<unk>", *WORDS])}, "<unk>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    backend.add_special_tokens(["</s>"])
    return Tokenizer(backend)


def undecoded() -> Tokenizer:
    """Words without a decoder, which come with spaces between them."""
    return Tokenizer(tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2}, "a")))


MAKERS = [byte_level, sentencepiece, leading_space, metaspace, undecoded]


def continued(decode: Callable[[Sequence[int]], str], before: list[int], ids: list[int]) -> str:
    """The definition: what the new tokens add to the text of all."""
    had, whole = decode(before), decode(before + ids)
    return whole[len(had) :] if whole.startswith(had) else decode(ids)


def tokens(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Any ids, one unknown among them, and characters in bytes, whole, broken or out of place."""
    found = [_find(tokenizer, f"<0x{byte:02X}>", BYTES[byte]) for byte in range(256)]
    of_byte = [token for token in found if token is not None]
    some = st.integers(0, tokenizer.vocab_size).map(lambda i: [i])
    if len(of_byte) == 256:
        spelled = st.sampled_from(["é", "€", "😀", "\ufffd", "a"]).map(lambda c: [of_byte[b] for b in c.encode()])
        cut = st.tuples(spelled, st.integers(0, 3), st.integers(1, 4)).map(lambda c: c[0][c[1] : c[2]])
        stray = st.sampled_from([0x80, 0xBF, 0xC3, 0xE2, 0xF0, 0xFF]).map(lambda b: [of_byte[b]])
        some = st.one_of(some, spelled, cut, stray)
    return st.lists(some, max_size=40).map(lambda parts: [i for part in parts for i in part])


def _find(tokenizer: Tokenizer, *spelled: str) -> int | None:
    """The id of the last spelling that the vocabulary has."""
    found = [tokenizer.backend.token_to_id(text) for text in spelled]
    return next((token for token in reversed(found) if token is not None), None)


def _byte_letters() -> dict[int, str]:
    """What byte-level vocabularies write for each byte: itself if it can be seen, else a letter further on."""
    seen = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in seen]
    return {byte: chr(byte) for byte in seen} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}


BYTES = _byte_letters()


@pytest.mark.parametrize("make", MAKERS)
def test_pieces_are_the_text_of_everything(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    any_tokens = tokens(tokenizer)

    @settings(max_examples=150)
    @given(any_tokens, any_tokens)
    def check(before: list[int], ids: list[int]) -> None:
        assert tokenizer.decode_after(before, ids) == continued(tokenizer.decode, before, ids)
        stream, certain = tokenizer.stream_decoder(before), ""
        for i, token in enumerate(ids):
            certain += stream.push(token)
            assert certain + stream.pending() == continued(tokenizer.decode, before, ids[: i + 1])

    check()


@pytest.mark.parametrize("make", MAKERS)
def test_ids_that_arrive_together_give_what_they_give_one_by_one(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    any_tokens = tokens(tokenizer)

    @settings(max_examples=150)
    @given(any_tokens, st.lists(any_tokens, max_size=6))
    def check(before: list[int], groups: list[list[int]]) -> None:
        alone, together, shown = tokenizer.stream_decoder(before), tokenizer.stream_decoder(before), ["", ""]
        for group in groups:
            shown[0] += "".join(map(alone.push, group))
            shown[1] += together.extend(group)
            assert shown[0] == shown[1]
            assert alone.pending() == together.pending()

    check()


@pytest.mark.parametrize("make", [byte_level, leading_space])
def test_stop_strings_are_found_where_they_first_appear(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    any_tokens = tokens(tokenizer)
    strings = st.lists(
        st.sampled_from(["a", "aa", "aé", "é", "€😀", " ", "or.", "ab", "hello w", "\ufffd"]), max_size=3
    )

    @settings(max_examples=150)
    @given(any_tokens, any_tokens, strings)
    @example([], tokenizer.encode("aab", add_special=False), ["ab"])
    def check(before: list[int], ids: list[int], stop: list[str]) -> None:
        text, shown = GrowingText(tokenizer, before, stop), ""
        for i, token in enumerate(ids):
            text.push(token)
            shown += text.take()
            whole = continued(tokenizer.decode, before, ids[: i + 1])
            found = [whole.index(string) for string in stop if string in whole]
            assert text.stopped is bool(found)
            assert text.whole() == whole[: min(found, default=None)]
            assert shown == text.whole()[: len(shown)]
            if found:
                break
        assert shown + text.rest() == text.whole()

    check()


class Counting(Tokenizer):
    """Counts the tokens that it decodes, and the largest call."""

    decoded = most = 0

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text."""
        some = list(ids)
        self.decoded += len(some)
        self.most = max(self.most, len(some))
        return super().decode(some, skip_special=skip_special)


@pytest.mark.parametrize("make", MAKERS)
def test_a_token_costs_a_few_however_many_came_before(make: Callable[[], Tokenizer]) -> None:
    tokenizer = Counting(make().backend)
    ordinary = [token for token in range(tokenizer.vocab_size) if not tokenizer.is_silent(token)]
    plain = [token for token in ordinary if not tokenizer.is_byte(token)]
    before, ids = plain * 200, plain * 20
    GrowingText(tokenizer, before, ["never there"])
    assert tokenizer.decoded < 20
    tokenizer.decoded = 0
    text = GrowingText(tokenizer, before, ["never there"])
    for token in ids:
        text.push(token)
    assert tokenizer.decoded < 20 * len(ids)
    assert tokenizer.most < 20
    tokenizer.decoded = 0
    tokenizer.decode_after(before, ids[:5])
    assert tokenizer.decoded < 40


def test_what_is_held_is_little() -> None:
    """Characters come as soon as their bytes are there; of what may begin a stop string, no more is held than that."""
    tokenizer = byte_level()
    stream = tokenizer.stream_decoder()
    assert [stream.push(i) for i in tokenizer.encode("a é!")] == ["a", " ", "", "é", "!"]
    text = GrowingText(tokenizer, [], ["abc", "bx"])
    shown = []
    for token in tokenizer.encode("zabacab"):
        text.push(token)
        shown.append(text.take())
    assert shown == ["z", "", "", "ab", "ac", "", ""]
    assert text.rest() == "ab"


def test_special_tokens_are_left_out() -> None:
    tokenizer = byte_level()
    end = tokenizer.backend.token_to_id("<|end|>")
    assert tokenizer.decode_after([end], [260, end, 260]) == "hellhell"
    stream = tokenizer.stream_decoder([260, end])
    assert [stream.push(i) for i in (260, end, 260)] == ["hell", "", "hell"]
