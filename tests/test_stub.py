"""A stub is told from code that returns nothing, and the line that a learner forgot to delete is named."""

import pytest
from test_check import NAMES, text_of

from minivllm.teach import check
from minivllm.teach import stub as stub_or_not


def prints_it(*args):
    """What a beginner writes."""
    value = len(args)
    print(value)


def keeps_it(*args):
    value = len(args)  # noqa: F841


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("function", [prints_it, keeps_it])
def test_code_that_returns_none_is_an_attempt_without_a_return(name, function):
    found = check.result(name, function)
    assert found.status == "failed" and "your function returned None: is a `return` missing?" in found.text
    assert ("print() only shows" in found.text) == (function is prints_it)


def below(*args):
    raise NotImplementedError
    return len(args)


def above(*args):
    value = len(args)  # noqa: F841
    raise NotImplementedError("write this")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("function", [above, below])
def test_a_stubs_line_that_was_left_beside_the_code_is_named(name, function):
    found = check.result(name, function)
    assert found.status == "not attempted"
    assert found.text == "not attempted yet: the line `raise NotImplementedError` is still reached, delete it"


def bare(*args):
    ...


def documented(*args):
    """To be written."""
    pass


def with_text(*args):
    """To be written."""
    raise NotImplementedError("your turn")


def returns_nothing(*args):
    return None


@pytest.mark.parametrize("function", [bare, documented, with_text, returns_nothing])
def test_every_form_of_a_stub_is_told(function):
    assert text_of("append", function) == "not attempted yet" and stub_or_not.is_stub(function)


@pytest.mark.parametrize("source, is_stub", [
    ("def f(a): raise NotImplementedError", True), ("def f(a):\n    b = a\n", False), ("def f(a): pass", True),
    ("f = lambda a: print(a)", False), ("f = lambda a: None", True),
])
def test_a_stub_without_source_is_told_by_its_bytecode(source, is_stub):
    names = {}
    exec(source, names)
    assert stub_or_not.is_stub(names["f"]) == is_stub
