"""A job as a trie: what is shared, in which chunks, and where each token stands."""

from array import array
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scorecal.judging.trie import Packed, common_prefix, continued, share, trie_tokens


def rows_of(*texts: str) -> list[array]:
    return [array("i", map(ord, text)) for text in texts]


# Few letters and given beginnings: nested, equal and empty continuations are all common.
BEGINNINGS = st.sampled_from(["", "a", "abc" * 9, "abc" * 9 + "b" * 20, "b" * 30])
ROWS = st.lists(st.builds(str.__add__, BEGINNINGS, st.text("ab", min_size=1, max_size=25)),
                min_size=1, max_size=25)  # fmt: skip
BUDGETS = st.sampled_from([1, 40, 100, 10**6])


@given(st.lists(st.text("ab", max_size=9), max_size=9))
def test_trie_tokens_counts_different_beginnings(texts):
    different = {text[:length] for text in texts for length in range(1, len(text) + 1)}
    assert trie_tokens(rows_of(*texts)) == len(different)


def test_a_trie_counted_by_hand():
    # the dog | the d-uck | cat: 7 + 3 + 3
    assert trie_tokens(rows_of("the dog", "the duck", "cat")) == 7 + 3 + 3


@given(st.text("ab", max_size=20), st.text("ab", max_size=20))
def test_common_prefix_is_the_longest(one, other):
    length = common_prefix(*rows_of(one, other))
    assert one[:length] == other[:length]
    assert length == min(len(one), len(other)) or one[length] != other[length]


@given(ROWS, BUDGETS, st.sampled_from([[()], [(1,), (2,)]]))
def test_chunks_hold_each_row_once_and_count_what_they_run(texts, budget, tails):
    rows = rows_of(*texts)
    chunks = share(rows, [tails] * len(rows), budget)
    assert sorted(index for chunk in chunks for index in chunk.prompts) == list(range(len(rows)))
    ran = set()
    for chunk in chunks:
        inside = [rows[index] for index in chunk.prompts]
        cuts = [0, *chunk.cuts]
        assert len({tuple(row[: cuts[-1]]) for row in inside}) == 1
        assert all(len(row) > cuts[-1] for row in inside)  # each keeps a token to be read at
        first = 0
        for start, end in pairwise(cuts):
            first += (tuple(inside[0][:end]) not in ran) * (end - start)
            ran.add(tuple(inside[0][:end]))
        packed = Packed(continued(inside, [tails] * len(inside)), cuts[-1])
        assert chunk.tokens == first + len(packed.ids)
    assert sum(chunk.tokens for chunk in chunks) <= sum(
        len(row) + len(tail) for row in rows for tail in tails
    )


@given(ROWS, st.integers(0, 3))
def test_a_packed_token_sees_its_own_beginning_and_nothing_else(texts, base):
    rows = rows_of(*("b" * base + text for text in texts))
    packed = Packed(rows, base)
    for index, row in enumerate(rows):
        for token in range(base, len(row)):
            at = packed.place(index, token)
            seen = [
                place
                for piece in packed.pieces
                if piece.start <= at < piece.end
                for place in range(piece.start, min(piece.stop, at + 1))
            ]
            assert [packed.ids[place] for place in seen] == list(row[base : token + 1])
            assert [packed.positions[place] for place in seen] == list(range(base, token + 1))
    assert sum(piece.stop - piece.start for piece in packed.pieces) == len(packed.ids)


def test_a_shared_article_is_cut_off_and_its_summaries_are_packed_below_it():
    question, articles = "q" * 20, ["x" * 50, "y" * 50]
    texts = [question + article + letter * 9 for article in articles for letter in "abcd"]
    chunks = share(rows_of(*texts), [[()]] * 8, budget=90)
    assert [chunk.cuts for chunk in chunks] == [[20], [20]]  # each article with its four summaries
    assert [chunk.tokens for chunk in chunks] == [20 + 50 + 36, 50 + 36]
    smaller = share(rows_of(*texts), [[()]] * 8, budget=20)
    assert [chunk.cuts for chunk in smaller] == [[20, 70]] * 4
    assert sum(chunk.tokens for chunk in smaller) == trie_tokens(rows_of(*texts))


def test_ten_thousand_nested_rows_need_no_deep_recursion():
    rows = [array("i", [1]) * length for length in range(1, 3000)]
    chunks = share(rows, [[()]] * len(rows), budget=500)
    assert sum(len(chunk.prompts) for chunk in chunks) == len(rows)


@pytest.mark.parametrize("budget", [30, 10**6])
def test_short_beginnings_are_not_worth_a_piece(budget):
    """Sharing one letter costs more kernel calls than it saves."""
    chunks = share(rows_of("ab" + "c" * 20, "ad" + "c" * 20), [[()]] * 2, budget)
    assert sum(chunk.tokens for chunk in chunks) == 44
