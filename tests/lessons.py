"""What tests of exercises share: a checker's answer, looked at as a learner would see it."""

from minivllm.teach import check


def text_of(name, function):
    """What the checker of `name` says of `function`: the same every time, short, and nothing in it that only a machine reads."""
    text = check.result(name, function).text
    assert text == check.result(name, function).text, "the text differs from run to run"
    assert len(text.splitlines()) <= 13 and max(map(len, text.splitlines())) <= 130
    assert "Traceback" not in text and "0x" not in text
    return text


def in_one_line(name, function):
    """The same, so that words are found wherever the lines break."""
    return " ".join(text_of(name, function).split())
