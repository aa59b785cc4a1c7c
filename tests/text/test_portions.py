"""Long texts in portions: nothing is lost, and nothing is cut that the library can take."""

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stack.text import portions as module
from stack.text.portions import LONGEST, portions

KINDS = {"letters": r"[^\W\d_]", "digits": r"\d", "white space": r"\s", "else": r"[^\w\s]", "underscores": "_"}
stretch = st.tuples(st.sampled_from("aé文4٣ \t\n\u2028.=\u0301🙂_"), st.integers(0, 3 * LONGEST))


def kind_of(character: str) -> str:
    (kind,) = [name for name, pattern in KINDS.items() if re.fullmatch(pattern, character)]
    return kind


@given(st.lists(stretch, max_size=8))
@settings(max_examples=60, deadline=None)
def test_a_stretch_is_cut_after_every_longest_and_nothing_else(drawn):
    text = "".join(character * count for character, count in drawn)
    parts = portions(text)
    assert "".join(parts) == text
    expected, at = [], 0
    for _, same in itertools.groupby(text, key=kind_of):
        length = sum(1 for _ in same)
        expected += range(at + LONGEST, at + length, LONGEST)
        at += length
    assert list(itertools.accumulate(map(len, parts)))[:-1] == expected


@given(st.text(), st.integers(0, 40))
def test_every_character_is_of_one_kind_and_no_short_text_is_cut(text, count):
    assert portions(text * count) == [text * count] or len(text) * count > LONGEST
    assert all(map(kind_of, text))


@given(st.lists(st.sampled_from(["the", "文", "4", "_", ".", " ", "\n", "\t", "é"]), max_size=400).map("".join))
@settings(deadline=None)
def test_a_long_text_is_cut_where_a_word_ends(text):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PORTION", 50)
        patch.setattr(module, "LONGEST", 1)  # what is short enough to be looked at: nothing
        parts = portions(text)
    assert "".join(parts) == text
    for one, two in itertools.pairwise(parts):
        assert one[-1].isalnum() and two[0].isspace() and len(one) >= 50
