"""Text from elsewhere: whatever it is, codecs take it, and it has bounds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jurybox.protocol import TensorSpec
from jurybox.protocol.errors import MOST_TEXT, ModelFailed, cut, plain, said
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
