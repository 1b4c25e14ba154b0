"""IncrementalDetokenizer: whole characters, stop strings, and what is held back."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from minivllm.tokenizer import IncrementalDetokenizer

CI = settings(deadline=None, derandomize=True, database=None, max_examples=300, print_blob=False)
REPLACEMENT = "\ufffd"
characters = st.one_of(st.sampled_from("ab e\u0301éüñ你好世界한글👩\u200d👧🏽🇩🇪\n"),
                       st.characters(exclude_categories=["Cs"], exclude_characters=REPLACEMENT))
texts = st.text(characters, max_size=20)


class Bytes:
    """A byte-level vocabulary: token i is the i-th chunk of a text's bytes, wherever that cuts a character."""

    def __init__(self, chunks):
        self.chunks = list(chunks)
        self.longest_decoded = 0

    def decode(self, token_ids):
        self.longest_decoded = max(self.longest_decoded, len(token_ids))
        return b"".join(self.chunks[token] for token in token_ids).decode("utf-8", errors="replace")

    @property
    def ids(self):
        return range(len(self.chunks))

    @property
    def text(self):
        return b"".join(self.chunks).decode("utf-8", errors="replace")


def cut(data, cuts):
    edges = [0, *sorted(min(at, len(data)) for at in cuts), len(data)]  # equal edges make an empty token
    return Bytes(data[start:end] for start, end in zip(edges, edges[1:]))


def in_bytes(text):
    """`text` in one token for each byte."""
    return Bytes(bytes([byte]) for byte in text.encode())


cuts = st.lists(st.integers(0, 80), max_size=30)


def stream(vocabulary, stop=(), finish=True):
    """(what was handed out after each token, what at the end, the stop string that matched)."""
    detokenizer = IncrementalDetokenizer(vocabulary.decode, stop)
    pieces, matched = [], None
    for token in vocabulary.ids:
        matched = detokenizer.add(token)
        pieces.append(detokenizer.take())
        if matched is not None:
            break
    if finish:
        matched = detokenizer.finish() or matched
    last = detokenizer.take(final=True)
    assert "".join(pieces) + last == detokenizer.text
    return pieces, last, matched


@given(texts, cuts)
@CI
def test_the_pieces_are_the_whole_text(text, cuts):
    vocabulary = cut(text.encode(), cuts)
    pieces, last, _ = stream(vocabulary)
    assert "".join(pieces) + last == text


@given(texts, cuts)
@CI
def test_no_piece_holds_half_a_character(text, cuts):
    pieces, last, _ = stream(cut(text.encode(), cuts))
    assert REPLACEMENT not in "".join(pieces) + last


@given(texts, cuts, st.integers(0, 80))
@CI
def test_a_text_that_breaks_off_ends_as_its_decoding_does(text, cuts, end):
    vocabulary = cut(text.encode()[:end], cuts)
    pieces, last, _ = stream(vocabulary)
    assert "".join(pieces) + last == vocabulary.text
    assert REPLACEMENT not in "".join(pieces)


@given(st.binary(max_size=30), cuts)
@CI
def test_bytes_that_are_no_text_are_decoded_all_the_same(data, cuts):
    vocabulary = cut(data, cuts)
    pieces, last, _ = stream(vocabulary)
    assert "".join(pieces) + last == vocabulary.text


@given(texts, cuts)
@CI
def test_each_character_comes_with_the_token_that_completes_it(text, cuts):
    vocabulary = cut(text.encode(), cuts)
    pieces, _, _ = stream(vocabulary)
    for count in range(len(pieces) + 1):
        so_far = vocabulary.decode(range(count))
        if not so_far.endswith(REPLACEMENT):
            assert "".join(pieces[:count]) == so_far


@given(st.lists(st.sampled_from(["", " ", " the", "re", " ", "."]), max_size=12))
@example([" the", " ", " ", " the"])
@CI
def test_a_leading_space_is_dropped_at_the_start_only(words):
    """As SentencePiece decoders do: the text of a token depends on what is before it."""
    decode = lambda token_ids: "".join(words[token] for token in token_ids).removeprefix(" ")
    detokenizer = IncrementalDetokenizer(decode)
    pieces = []
    for token in range(len(words)):
        detokenizer.add(token)
        pieces.append(detokenizer.take())
    detokenizer.finish()
    assert "".join(pieces) + detokenizer.take(final=True) == decode(range(len(words)))


def test_few_tokens_are_decoded_at_a_time():
    vocabulary = in_bytes("abc你好👩🏽" * 20)
    stream(vocabulary)
    assert vocabulary.longest_decoded <= 8


def test_tokens_without_text_are_waited_for():
    assert stream(Bytes([b"a", b"", b"", b"b"]))[0] == ["a", "", "", "b"]


# Stop strings.

def first_stop(vocabulary, stop):
    """The text up to the first stop string, looked for anew in all that is there after each token."""
    for count in range(1, len(vocabulary.chunks) + 1):
        text = vocabulary.decode(range(count))
        found = [(at, s) for s in stop if (at := text.find(s)) >= 0]
        if found and not text.endswith(REPLACEMENT):
            return text[:min(found)[0]], True
    return vocabulary.text, False


stops = st.lists(st.text("ab你", min_size=1, max_size=4), min_size=1, max_size=3)


@given(st.text("ab你é", max_size=20), cuts, stops)
@CI
def test_the_text_ends_just_before_the_first_stop_string(text, cuts, stop):
    vocabulary = cut(text.encode(), cuts)
    pieces, last, matched = stream(vocabulary, stop)
    assert ("".join(pieces) + last, matched is not None) == first_stop(vocabulary, stop)
    assert matched is None or matched in stop


@given(st.text("ab你", max_size=20), cuts, stops)
@CI
def test_no_more_is_held_back_than_may_begin_a_stop_string(text, cuts, stop):
    vocabulary = cut(text.encode(), cuts)
    detokenizer = IncrementalDetokenizer(vocabulary.decode, stop)
    handed_out = ""
    for token in vocabulary.ids:
        matched = detokenizer.add(token)
        handed_out += detokenizer.take()
        held = detokenizer.text[len(handed_out):]
        assert detokenizer.text.startswith(handed_out)
        assert held == "" if matched else held == "" or any(s.startswith(held) for s in stop)
        if matched:
            break


def test_a_stop_string_across_tokens():
    assert stream(Bytes([b"one E", b"N", b"D two"]), ["END"]) == (["one ", "", ""], "", "END")


def test_a_stop_string_in_the_middle_of_a_token():
    assert stream(Bytes([b"one", b" END two"]), ["END"]) == (["one", " "], "", "END")


def test_a_stop_string_of_split_characters():
    assert stream(in_bytes("a你好b"), ["你好"]) == (["a", "", "", "", "", "", ""], "", "你好")


def test_what_might_begin_a_stop_string_is_held_back_and_then_let_go():
    assert stream(Bytes([b"a<", b"/", b"b"]), ["</s>"])[0] == ["a", "", "</b"]


def test_what_is_held_back_at_the_end_comes_out_with_final():
    assert stream(Bytes([b"a<", b"/s"]), ["</s>"]) == (["a", ""], "</s", None)


def test_of_several_stop_strings_in_one_token_the_earliest_in_the_text_counts():
    assert stream(Bytes([b"one two three"]), ["three", "two"]) == (["one "], "", "two")


def test_of_several_stop_strings_the_one_that_is_complete_first_counts():
    assert stream(Bytes([b"a", b"b", b"c", b"d"]), ["bcd", "c"]) == (["a", "", "b"], "", "c")


def test_nothing_is_added_after_a_stop_string():
    vocabulary = Bytes([b"a", b"STOP", b"b", "你".encode()[:1]])
    detokenizer = IncrementalDetokenizer(vocabulary.decode, ["STOP"])
    assert [detokenizer.add(token) for token in range(4)] == [None, "STOP", None, None]
    assert detokenizer.finish() is None and detokenizer.text == detokenizer.take(final=True) == "a"


def test_finish_makes_text_of_what_is_incomplete():
    vocabulary = Bytes([b"a", "你".encode()[:2]])
    detokenizer = IncrementalDetokenizer(vocabulary.decode)
    for token in vocabulary.ids:
        detokenizer.add(token)
    assert detokenizer.take() == "a"
    assert detokenizer.finish() is None and detokenizer.take() == REPLACEMENT
    assert detokenizer.finish() is None and detokenizer.text == "a" + REPLACEMENT


def test_finish_may_complete_a_stop_string():
    vocabulary = Bytes([b"a", b"b", b"\xff"])
    detokenizer = IncrementalDetokenizer(vocabulary.decode, ["b" + REPLACEMENT])
    assert [detokenizer.add(token) for token in range(3)] == [None, None, None]
    assert detokenizer.finish() == "b" + REPLACEMENT and detokenizer.text == "a"


def test_a_real_replacement_character_waits_one_token_only():
    assert stream(Bytes(["a\ufffd".encode(), b"b"]))[0] == ["", "a\ufffdb"]


@pytest.mark.parametrize("final", [False, True])
def test_take_hands_nothing_out_twice(final):
    vocabulary = Bytes([b"abc"])
    detokenizer = IncrementalDetokenizer(vocabulary.decode, ["cd"])
    detokenizer.add(0)
    assert detokenizer.take() == "ab" and detokenizer.take(final) == ("c" if final else "")
    assert detokenizer.take(final) == "" and detokenizer.take() == ""


def test_a_stop_string_counts_only_where_it_may_stop():
    detokenizer = IncrementalDetokenizer(lambda ids: "".join(map(chr, ids)), stop=["ab", "long stop"])
    assert [detokenizer.add(ord(character), may_stop=False) for character in "xab"] == [None] * 3
    assert [detokenizer.add(ord(character)) for character in "ya"] == [None, None]  # the first is not found later either
    assert detokenizer.add(ord("b")) == "ab" and detokenizer.text == "xaby"


def test_a_stop_string_may_begin_where_it_may_not_stop():
    detokenizer = IncrementalDetokenizer(lambda ids: "".join(map(chr, ids)), stop=["abc"])
    assert [detokenizer.add(ord(character), may_stop=False) for character in "xab"] == [None] * 3
    assert detokenizer.add(ord("c")) == "abc" and detokenizer.text == "x"
