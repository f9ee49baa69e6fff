"""An answer in one piece is what its stream says, in the shape in which llama.cpp gives whole ones."""

import json

import pytest

from dipaco.inference.serve.api_error import ApiError
from dipaco.inference.serve.whole_answer import WholeAnswer

ABOUT = {"id": "1", "model": "path-1", "object": "chat.completion.chunk"}
USAGE = {"usage": {"completion_tokens": 3}}


def whole(events, size=7, about=ABOUT):
    """Put events together that come in parts of a size, wherever these end."""
    stream = "".join(f"data: {json.dumps({**about, **event})}\n\n" for event in events) + "data: [DONE]\n\n"
    data, answer = stream.encode(), WholeAnswer()
    for start in range(0, len(data), size):
        answer.add(data[start : start + size])
    return json.loads(answer.body())


def said(index=0, end=None, **delta):
    return {"choices": [{"index": index, "finish_reason": end, "delta": delta}]}


@pytest.mark.parametrize("size", [1, 40, 10**6])
def test_choices_are_told_apart_whatever_their_order(size):
    first = said(1, role="assistant", content=None)
    events = [first, said(0, role="assistant", content=None), said(1, content="b\u00e9"), said(0, content="a")]
    events += [said(1, content="d"), said(1, "length"), said(0, "stop"), {"choices": [], **USAGE}]
    assert whole(events, size) == {
        "id": "1", "model": "path-1", "object": "chat.completion", **USAGE,
        "choices": [
            {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "a"}},
            {"index": 1, "finish_reason": "length", "message": {"role": "assistant", "content": "b\u00e9d"}},
        ],
    }  # fmt: skip


def test_calls_of_tools_are_put_together():
    call = {"index": 0, "id": "x", "type": "function", "function": {"name": "w", "arguments": "{"}}
    other = {"index": 1, "id": "y", "type": "function", "function": {"name": "v", "arguments": ""}}
    more = [{"index": 0, "function": {"arguments": '"c": 1}'}}]
    events = [said(role="assistant", content=None), said(tool_calls=[call]), said(tool_calls=more)]
    (choice,) = whole([*events, said(tool_calls=[other]), said(end="tool_calls")])["choices"]
    function = {"name": "w", "arguments": '{"c": 1}'}
    assert choice["message"] == {
        "role": "assistant", "content": "",
        "tool_calls": [
            {"id": "x", "type": "function", "function": function},
            {"id": "y", "type": "function", "function": {"name": "v", "arguments": ""}},
        ],
    }  # fmt: skip


def test_log_probabilities_follow_each_other():
    events = [
        {"choices": [{"index": 0, "text": text, "logprobs": told, "finish_reason": end}]}
        for text, told, end in (("a", {"content": [1]}, None), ("b", {"content": [2]}, None), ("", None, "length"))
    ]
    (choice,) = whole(events, about={"object": "text_completion"})["choices"]
    assert choice == {"index": 0, "text": "ab", "logprobs": {"content": [1, 2]}, "finish_reason": "length"}


def test_an_answer_that_fails_is_none():
    with pytest.raises(ApiError, match="out of memory"):
        whole([said(content="a"), {"error": {"message": "out of memory"}}])
