"""Text from elsewhere: whatever it is, codecs take it, and it has bounds."""

import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jurybox.protocol import TensorSpec
from jurybox.protocol.errors import (
    MOST_TEXT,
    Code,
    ModelFailed,
    RowFailed,
    cut,
    did_you_mean,
    missing_name,
    plain,
    said,
)
from jurybox.protocol.spec import ModelSpec

TEXT = st.text(st.characters(codec=None) | st.characters(categories=["Cs"]))


class Speechless(BaseException):
    def __str__(self):
        raise KeyboardInterrupt


@given(TEXT, st.integers(0, 300))
def test_any_text_comes_out_as_utf8_of_whole_characters(text, most):
    assert plain(text).encode().decode() == plain(text)
    assert len(plain(text, most)) <= max(most, 4)
    assert len(cut(text, most)) <= most
    assert plain(text).startswith(cut(text, most).decode()) or len(text) > MOST_TEXT


def test_text_that_is_fine_stays_as_it_is():
    assert plain("Grüße, \N{GRINNING FACE}\n") == "Grüße, \N{GRINNING FACE}\n"
    assert said(ModelFailed("why")) == "why"
    assert said(ValueError("why")) == "ValueError: why"


def test_an_exception_without_text_is_named():
    assert said(Speechless()).startswith("Speechless: ")
    assert len(said(ValueError("x" * 10_000_000))) <= MOST_TEXT


def test_a_shape_that_is_no_tuple_is_an_error():
    with pytest.raises(ValueError, match=r"shape 4 of one row is no tuple: expected its sizes, such as \(4,\)"):
        TensorSpec("float32", 4)


def test_a_row_that_no_message_can_describe_is_refused():
    with pytest.raises(ValueError, match="elements, expected at most"):
        TensorSpec("uint8", (1 << 20, 1 << 20))


@pytest.mark.parametrize("name", ["half \ud800 a pair", "", "long" * 100, 7])
def test_a_tensor_whose_name_no_message_can_carry_is_refused(name):
    spec = TensorSpec("float32")
    with pytest.raises(ValueError, match="names a tensor"):
        ModelSpec("m", {name: spec}, {"y": spec})


@pytest.mark.parametrize(("text", "shown"), [("12345678", "12345678"), ("123456789", "1234 ..."), ("", "")])
def test_text_that_is_too_long_ends_in_dots_and_has_the_most_characters(text, shown):
    assert plain(text, 8) == shown


def test_the_first_failed_row_and_its_reason_are_named():
    failed = RowFailed("two rows failed", errors={3: "c", 1: "a"}, outputs="outputs", version=7)
    assert (failed.index, failed.reason, failed.errors) == (1, "a", {3: "c", 1: "a"})
    assert (failed.outputs, failed.version, failed.code) == ("outputs", 7, Code.ROW_FAILED)
    none = RowFailed("some failed")
    assert (none.index, none.reason, none.errors, none.version) == (-1, "some failed", {}, 0)


@pytest.mark.parametrize(
    ("given", "known", "end"),
    [
        ("Learning_Rat", ["gamma", "learning_rate"], "; did you mean 'learning_rate'?"),
        ("alph", ["Alpha", "alpha2", "beta"], "; did you mean 'Alpha' or 'alpha2'?"),
        ("other", ["gamma", "alpha"], "; there are: alpha, gamma"),
        ("other", [], ""),
    ],
)
def test_the_most_similar_names_are_suggested_or_all_are_named(given, known, end):
    assert did_you_mean(given, known) == end


def test_a_name_that_a_module_lacks_is_told_with_what_the_module_defines():
    made = types.ModuleType("mine")
    exec("def policy(): pass\ndef _hidden(): pass\nnumber = 7\nfrom json import dumps", vars(made))
    assert missing_name(made, "reward") == "module 'mine' has no 'reward'; there are: policy"
    made.__file__ = "/mine.py"
    assert missing_name(made, "polic") == "module 'mine' (/mine.py) has no 'polic'; did you mean 'policy'?"
