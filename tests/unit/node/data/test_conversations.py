"""Conversations in the forms that people store them in become what the template reads."""

import json
import math
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest

from node.data.conversations import Dropped, Forms, normalized
from wire.errors import DataError

CALL = {"name": "weather", "arguments": {"city": "Oslo"}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
ASKED, ANSWERED = {"role": "user", "content": "How warm?"}, {"role": "assistant", "content": "Seven."}
TALK = [ASKED, ANSWERED]
PLAIN = Forms()
TEXT = Forms(objects=False, texts=True)


def messages_of(row: dict[str, Any], forms: Forms = PLAIN) -> list[dict[str, Any]]:
    return normalized(row, "here", forms).messages


@pytest.mark.parametrize(
    "row",
    [
        {"messages": TALK},
        {"messages": json.dumps(TALK)},
        {"conversations": [{"from": "human", "value": "How warm?"}, {"from": "gpt", "value": "Seven."}]},
        {
            "messages": None,
            "conversation": [{"role": "User", "content": "How warm?"}, {"role": "bot", "content": "Seven."}],
        },
        {
            "messages": [
                {**ASKED, "tool_calls": None, "name": None},
                {**ANSWERED, "function_call": None, "weight": 1},
            ]
        },
        {
            "messages": [
                {
                    "role": "prompter",
                    "content": [
                        {"type": "text", "text": "How "},
                        {"type": "text", "text": "warm?", "image_url": None},
                    ],
                },
                ANSWERED,
            ]
        },
        {
            "messages": [
                ASKED,
                {"role": "model", "content": {"type": "output_text", "text": "Seven."}, "train": True},
            ]
        },
        {"messages": [{"role": "USER", "content": [{"type": "text"}, "\ufeffHow warm?"]}, ANSWERED]},
        {"messages": [ASKED, {**ANSWERED, "weight": "1", "loss": "true", "tool_calls": {}}]},
        {"messages": [None, ASKED, None, {**ANSWERED, "name": math.nan}]},
        {"messages": [{**ASKED, "value": ""}, {**ANSWERED, "content": "", "value": "Seven."}]},
        {"messages": {"role": ["user", "assistant"], "content": ["How warm?", "Seven."]}},
        {"instruction": "How warm?", "input": "", "output": "Seven."},
        {"instruction": "How warm?", "output": "Seven.", "text": "### Instruction: ..."},
        {"instruction": None, "prompt": "How warm?", "output": None, "completion": "Seven."},
        {"prompt": "How warm?", "completion": "Seven."},
        {"prompt": [ASKED], "completion": [ANSWERED]},
        {"question": "How warm?", "context": None, "answer": "Seven."},
        {"query": "How warm?", "response": "Seven.", "type": "MATH_Rephrased"},
        {"input": "How warm?", "output": "Seven."},
        {"conversation": [{"system": "", "input": "How warm?", "output": "Seven."}]},
        {"conversation": [{"human": "How warm?", "assistant": "Seven."}]},
        {"conversations": ["How warm?", "Seven."]},
        {"messages": [json.dumps(message) for message in TALK]},
        {"messages": [{"role": "user", "text": "How warm?"}, {"role": "ai", "text": "Seven."}]},
        {"input": [ASKED], "output": "Seven."},
        {"prompt": "How warm?", "completion": [ANSWERED]},
        {"messages": [{"role": "customer", "content": "How warm?"}, {"role": "agent", "content": "Seven."}]},
        {
            "messages": [
                {**ASKED, "content": '[{"type": "text", "text": "How warm?"}]'},
                {
                    **ANSWERED,
                    "content": ' [{"type": "text", "text": "Sev"}, {"type": "text", "text": "en."}]',
                },
            ]
        },
    ],
    ids=[
        *("openai", "json", "sharegpt", "names", "nones", "parts", "part", "marks", "strings", "nulls"),
        "both",
        "columns",
        *("alpaca", "alpaca-text", "united", "completion", "trl", "question", "query", "nemo", "xtuner"),
        *("ms-swift", "lima", "texts", "text", "nemotron", "mixed", "agent", "packed"),
    ],
)
def test_every_form_becomes_the_same(row: dict[str, Any]) -> None:
    found = normalized(row, "here", Forms())
    assert found.messages == TALK and found.answers == found.trained == (1,) and found.extra == {}


@pytest.mark.parametrize("calls", [[{"type": "function", "function": CALL}], [CALL]], ids=["wrapped", "bare"])
@pytest.mark.parametrize("as_json", [False, True])
def test_arguments_have_the_form_that_the_template_writes(calls: list[Any], as_json: bool) -> None:
    def inner(message: dict[str, Any]) -> dict[str, Any]:
        (call,) = message["tool_calls"]
        assert call.keys() - {"id"} == {"type", "function"}, "some templates read no other form"
        return call["function"]

    if as_json:
        calls = json.loads(json.dumps(calls).replace('{"city": "Oslo"}', json.dumps('{"city": "Oslo"}')))
    row = {"messages": [ASKED, {"role": "assistant", "content": None, "tool_calls": calls}]}
    assert inner(messages_of(row)[1]) == CALL
    assert inner(messages_of(row, TEXT)[1]) == {**CALL, "arguments": '{"city": "Oslo"}'}
    kept = inner(messages_of(row, Forms(texts=True))[1])["arguments"]
    assert kept == ('{"city": "Oslo"}' if as_json else {"city": "Oslo"}), "both are written as they are meant"
    twice = json.dumps(json.dumps({"city": "Oslo"}))
    # Llama's, LangChain's and Anthropic's names
    named = [{"name": CALL["name"], key: CALL["arguments"]} for key in ("parameters", "args", "input")]
    for other in (json.dumps(calls[0]), [json.dumps(calls[0])], *named, {**CALL, "arguments": twice}):
        row = {"messages": [ASKED, {"role": "assistant", "content": None, "tool_calls": other}]}
        assert inner(messages_of(row)[1]) == CALL
    assert messages_of(row)[1]["content"] == "" and messages_of(row, Forms(null=True))[1]["content"] is None


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [({"unit": None}, True), ({"a": [{"b": None}]}, True), ({"a": 1}, False), ('{"a": null}', False)],
)
@pytest.mark.parametrize("key", ["arguments", "parameters"])
def test_null_in_arguments_that_are_no_text_is_left_out_and_seen(
    arguments: Any, reported: bool, key: str
) -> None:
    call = {"id": None, "function": {"name": "weather", key: arguments}}
    row = {"messages": [ASKED, {"role": "assistant", "content": None, "tool_calls": [call]}]}
    assert normalized(row, "", Forms()).nulls == reported


def test_null_in_arguments_is_kept_where_it_was_written() -> None:
    arguments = {"city": "Oslo", "unit": None}
    call = {"function": {"name": "weather", "arguments": json.dumps(arguments)}, "id": None}
    none = {"function": {"name": "weather", "arguments": "null"}}
    made = messages_of({"messages": [ASKED, {"role": "assistant", "tool_calls": [call, none]}]})[1]
    assert [each["function"]["arguments"] for each in made["tool_calls"]] == [arguments, {}]
    legacy = {"role": "assistant", "function_call": {"name": "weather", "args": arguments}}
    (one,) = messages_of({"messages": [ASKED, json.loads(json.dumps(legacy))]})[1]["tool_calls"]
    assert one["function"] == {"name": "weather", "arguments": {"city": "Oslo"}}
    text = json.dumps([{"name": "weather", "arguments": None}])
    (bare,) = messages_of({"messages": [ASKED, {"role": "assistant", "tool_calls": text}]})[1]["tool_calls"]
    assert bare == {"type": "function", "function": {"name": "weather", "arguments": {}}}
    assert made["tool_calls"][0].keys() == {"type", "function"}
    flat = {"id": "a", "type": "tool_call", "name": "weather", "args": {}}
    (one,) = messages_of({"messages": [ASKED, {"role": "assistant", "tool_calls": [flat]}]})[1]["tool_calls"]
    assert one == {**bare, "id": "a"}


@pytest.mark.parametrize(
    "tools",
    [
        [TOOL],
        json.dumps([TOOL]),
        [json.dumps(TOOL)],
        TOOL,
        [{**TOOL, "function": {**TOOL["function"], "parameters": '{"type": "object"}', "strict": None}}],
        # As servers pass them on to templates, some of which read nothing else.
        [TOOL["function"]],
        json.dumps([{"type": "function", **TOOL["function"]}]),
    ],
    ids=["list", "json", "list-of-json", "one", "parameters", "flat", "flat-typed"],
)
def test_tools_are_objects(tools: Any) -> None:
    for key in ("tools", "tool_defs"):
        assert normalized({"messages": TALK, key: tools}, "", Forms()).extra == {"tools": [TOOL]}
    other = {"type": "web_search", "name": "web"}
    assert normalized({"messages": TALK, "tools": [other]}, "", Forms()).extra == {"tools": [other]}


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL])])
@pytest.mark.timeout(10)
def test_tools_of_a_system_message_are_the_rows(tools: Any) -> None:
    """As GLM-4's data has them. Its own template reads them there, others read those of the row."""
    system = {"role": "system", "content": "", "tools": tools}
    found = normalized({"messages": [system, *TALK]}, "", Forms())
    assert found.extra == {"tools": [TOOL]} and found.messages[0]["tools"] == [TOOL]
    system = {"role": "system", "content": "Be kind.", "functions": tools}  # as OLMo 3's data has them
    found = normalized({"messages": [system, *TALK]}, "", Forms())
    assert found.extra == {"tools": [TOOL]} and found.messages[0]["functions"] == tools


def test_text_that_is_not_declared_as_text_and_decimals_are_read() -> None:
    """As Parquet may have them."""
    given = [{key: text.encode() for key, text in message.items()} for message in TALK]
    assert messages_of({"messages": given}) == TALK
    assert messages_of({"messages": [ASKED, {**ANSWERED, "price": Decimal("1.5")}]})[1]["price"] == 1.5
    for wrong in (b"\xff", Decimal("Infinity")):
        with pytest.raises(Dropped, match="values that JSON cannot hold"):
            messages_of({"messages": [ASKED, {**ANSWERED, "more": wrong}]})


def test_times_are_as_a_template_writes_them() -> None:
    at = datetime(2023, 4, 1, tzinfo=UTC)
    assert messages_of({"messages": [{**ASKED, "at": at}, ANSWERED]})[0]["at"] == str(at)


def test_legacy_calls_become_tool_calls_with_identities() -> None:
    calls = [
        {
            "messages": [
                ASKED,
                {
                    "role": "assistant",
                    "content": None,
                    "function_call": {"name": "weather", "arguments": '{"city": "Oslo"}'},
                },
                {"role": "function", "name": "weather", "content": "7"},
                ANSWERED,
            ],
            "functions": [TOOL["function"]],
        },
        {
            "conversations": [
                {"from": "human", "value": "How warm?"},
                {"from": "function_call", "value": json.dumps(CALL)},
                {"from": "observation", "value": "7"},
                {"from": "gpt", "value": "Seven."},
            ],
            "tools": json.dumps([TOOL]),
        },
    ]
    for row in calls:
        found = normalized(row, "", Forms())
        call = {"id": "call00000", "type": "function", "function": CALL}
        assert found.messages[1] == {"role": "assistant", "content": "", "tool_calls": [call]}
        assert (
            found.messages[2].items() >= {"role": "tool", "content": "7", "tool_call_id": "call00000"}.items()
        )
        assert found.answers == (1, 3) and found.extra == {"tools": [TOOL]}


def test_calls_that_follow_an_answer_or_another_call_are_of_one_turn() -> None:
    """As ms-swift has parallel calls."""
    calls = [{"role": "tool_call", "content": json.dumps(CALL)}] * 2
    results = [{"role": "tool_response", "content": text} for text in "78"]
    for said in ([], [{"role": "assistant", "content": "I look."}]):
        found = normalized({"messages": [ASKED, *said, *calls, *results, ANSWERED]}, "", Forms())
        called = found.messages[1]
        assert called["content"] == ("I look." if said else "") and found.answers == found.trained == (1, 4)
        assert [call["id"] for call in called["tool_calls"]] == ["call00000", "call00001"]
        assert [result["tool_call_id"] for result in found.messages[2:4]] == ["call00000", "call00001"]
    unlike = [calls[0], {**calls[0], "train": False}]
    with pytest.raises(Dropped, match="labels for parts"):
        normalized({"messages": [ASKED, *unlike, *results, ANSWERED]}, "", Forms())
    alike = [{**call, "train": False} for call in calls]
    assert normalized({"messages": [ASKED, *alike, *results, ANSWERED]}, "", Forms()).trained == (4,)


@pytest.mark.parametrize(
    ("ids", "becomes"),
    [
        (("b", "a"), "ab"),
        (("a", "b"), "ba"),
        ((None, None), "ba"),
        (("b", "x"), "ba"),
        (("b",), "b"),
    ],
)
def test_results_stand_in_the_order_of_their_calls(ids: tuple[str | None, ...], becomes: str) -> None:
    """Most templates write no ids, so that a result answers the call at its place."""
    calls = [{"id": name, "type": "function", "function": CALL} for name in "ab"]
    for short in (False, True):
        results = [
            {"role": "tool", "content": text, **({"tool_call_id": name} if name else {})}
            for name, text in zip(ids, "ba", strict=False)
        ]
        called = {"role": "assistant", "content": "", "tool_calls": calls}
        row = {"messages": [ASKED, called, *results, ANSWERED, ASKED, called, *results, ANSWERED]}
        found = messages_of(row, Forms(short_ids=short))
        assert "".join(message["content"] for message in found if message["role"] == "tool") == becomes * 2
        if short and len(ids) == 2 and "x" not in ids:  # the calls of another turn have other ids
            assert [each["tool_call_id"] for each in found[2:4]] == ["call00000", "call00001"]
            assert [each["tool_call_id"] for each in found[7:9]] == ["call00002", "call00003"]


@pytest.mark.parametrize(
    "given",
    [
        {"reasoning_content": "Hm."},
        {"reasoning": "Hm."},
        {"reasoning_content": "", "thinking": "Hm."},
        {"reasoning_content": None, "thinking": " ", "reasoning": "Hm."},
    ],
)
def test_reasoning_has_the_name_that_templates_read(given: dict[str, Any]) -> None:
    answer = messages_of({"messages": [ASKED, {**ANSWERED, **given}]})[1]
    assert answer["reasoning_content"] == "Hm." and answer["thinking"].strip() in ("Hm.", "")


@pytest.mark.parametrize(
    "given",
    [
        {"reasoning_content": "<think>\nHm.\n</think>\n"},
        {
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                {"type": "text", "text": "Seven."},
            ]
        },
        {"content": [{"type": "reasoning", "value": "Hm."}, {"type": "text", "value": "Seven."}]},
        {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]}, "Seven."]},
    ],
    ids=["tags", "anthropic", "llama-factory", "mistral"],
)
def test_reasoning_in_parts_or_tags_is_the_answers(given: dict[str, Any]) -> None:
    answer = messages_of({"messages": [ASKED, {**ANSWERED, **given}]})[1]
    assert (answer["reasoning_content"].strip(), answer["content"]) == ("Hm.", "Seven.")


def test_a_message_in_the_channel_of_analysis_is_the_thought_of_the_answer_behind_it() -> None:
    """Harmony's format, gpt-oss's."""
    thought = {"role": "assistant", "channel": "analysis", "content": "Hm."}
    call = {"role": "assistant", "channel": "commentary", "content": "", "tool_calls": [CALL]}
    answer = {**ANSWERED, "channel": "final"}
    result = {"role": "tool", "content": "7"}
    found = normalized({"messages": [ASKED, thought, call, result, thought, thought, answer]}, "", Forms())
    assert found.answers == found.trained == (1, 3)
    assert [found.messages[index]["reasoning_content"] for index in (1, 3)] == ["Hm.", "Hm.\n\nHm."]
    for messages, reason in (
        ([ASKED, thought], "a thought without an answer"),
        ([ASKED, thought, ASKED, ANSWERED], "a thought without an answer"),
        ([ASKED, {**thought, "train": False}, ANSWERED], "labels for parts of a message"),
    ):
        with pytest.raises(Dropped, match=reason):
            normalized({"messages": messages}, "", Forms())


def test_a_mark_with_an_unknown_name_that_asks_for_labels_changes_nothing() -> None:
    marks = {
        "include_in_loss": True,
        "no_loss": False,
        "training_steps": 7,
        "trained_by": "x",
        "is_last": False,
    }
    asked = {**ASKED, "include_in_loss": False}
    found = normalized({"messages": [asked, {**ANSWERED, **marks}]}, "", Forms())
    assert found.trained == (1,)


@pytest.mark.parametrize("answer", ["[1]", "{7}", '{"degrees": 7}'])
def test_texts_by_turns_may_look_like_json(answer: str) -> None:
    said = ['{"city": "Oslo"}', answer]
    assert [message["content"] for message in messages_of({"messages": said})] == said


@pytest.mark.parametrize("answer", ['[{"text": "Oslo", "label": "city"}]', '[{"7}]', '[{"type": "city"}]'])
def test_json_that_is_no_content_in_parts_is_kept_as_it_is(answer: str) -> None:
    result = '[{"type": "text", "text": "7"}]'
    row = {"messages": [ASKED, {"role": "tool", "content": result}, {**ANSWERED, "content": answer}]}
    assert [message["content"] for message in messages_of(row)[1:]] == [result, answer]


def test_calls_and_results_in_parts_become_messages() -> None:
    """Anthropic's format."""
    said = {"type": "text", "text": "I look."}
    use = {"type": "tool_use", "id": "a", "name": CALL["name"], "input": CALL["arguments"]}
    result = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "7"}]}
    tool = {"name": "weather", "input_schema": {"type": "object"}}
    row = {
        "messages": [
            ASKED,
            {"role": "assistant", "content": [said, use]},
            {"role": "user", "content": [result, {"type": "text", "text": "Well?"}]},
            ANSWERED,
        ],
        "tools": [tool],
    }
    found = normalized(row, "", Forms())
    assert [message["role"] for message in found.messages] == [
        "user",
        "assistant",
        "tool",
        "user",
        "assistant",
    ]
    assert found.messages[1]["content"] == "I look." and found.answers == (1, 4)
    assert found.messages[1]["tool_calls"] == [{"id": "a", "type": "function", "function": CALL}]
    assert (found.messages[2]["tool_call_id"], found.messages[2]["content"]) == ("a", "7")
    assert found.messages[3]["content"] == "Well?" and found.extra == {"tools": [TOOL]}
    packed = {"type": "tool_call", "value": json.dumps(CALL)}  # LLaMA-Factory's
    (call,) = messages_of({"messages": [ASKED, {"role": "assistant", "content": [packed]}]})[1]["tool_calls"]
    assert call == {"type": "function", "function": CALL}


def test_a_system_column_comes_first_unless_there_is_one() -> None:
    system = {"role": "system", "content": "Be kind."}
    assert messages_of({"messages": TALK, "system": "Be kind."}) == [system, *TALK]
    assert messages_of({"messages": [system, *TALK], "system": "Be rude."}) == [system, *TALK]
    assert messages_of({"messages": TALK, "system": None, "system_prompt": " "}) == TALK


def test_pairs_of_turns_have_system_prompts_and_marks() -> None:
    pair = {"input": "How warm?", "output": "Seven."}
    first, last = {"system": "Be kind.", **pair}, {**pair, "output_with_loss": False}
    found = normalized({"conversation": [first, last, {"input": "", "output": "Well?"}]}, "", Forms())
    assert [message["content"] for message in found.messages] == [
        *("Be kind.", "How warm?", "Seven.", "How warm?", "Seven.", "Well?")
    ]
    assert found.answers == (2, 4, 5) and found.trained == (2, 5)
    parts = [{"text": "Be "}, {"type": "text", "text": "kind."}]
    assert messages_of({"conversation": [pair], "system": parts})[0]["content"] == "Be kind."


def test_a_rows_own_variables_are_the_templates_and_stand_behind_its_tools() -> None:
    for given in ({"enable_thinking": False, "level": None, "tools": 7}, '{"enable_thinking": false}'):
        row = {"messages": TALK, "tools": [TOOL], "chat_template_kwargs": given}
        assert normalized(row, "", Forms()).extra == {"enable_thinking": False, "tools": [TOOL]}


def test_a_prompts_answers_have_no_labels() -> None:
    found = normalized({"prompt": [*TALK, ASKED], "completion": [ANSWERED]}, "", Forms())
    assert found.messages == [*TALK, *TALK] and found.answers == (1, 3) and found.trained == (3,)


@pytest.mark.parametrize("key", ["weight", "train", "loss", "loss_mask", "loss_weight", "train_on_turn"])
def test_messages_without_weight_have_no_labels(key: str) -> None:
    row = {"messages": [*TALK, ASKED, {**ANSWERED, key: 0}]}
    found = normalized(row, "", Forms())
    assert found.answers == (1, 3) and found.trained == (1,) and found.messages == [*TALK, *TALK]


@pytest.mark.parametrize("mark", [{"masked": True}, {"ignore": 1}, {"train": "no"}, {"loss_mask": "Off"}])
def test_messages_that_are_masked_have_no_labels(mark: dict[str, Any]) -> None:
    found = normalized({"messages": [ASKED, {**ANSWERED, **mark}, *TALK]}, "", Forms())
    assert found.trained == (3,) and found.messages == [*TALK, *TALK]


@pytest.mark.parametrize("mark", [{"masked": False}, {"ignore": "no"}, {"train": "yes"}, {"loss": 0.25}])
def test_messages_that_are_not_masked_have_labels(mark: dict[str, Any]) -> None:
    assert normalized({"messages": [ASKED, {**ANSWERED, **mark}]}, "", Forms()).trained == (1,)


@pytest.mark.parametrize("marks", [{"loss_mask": [0, 0, 0, 1]}, {"weights": [True, False, True, True]}])
def test_a_rows_mask_of_its_messages_says_which_have_labels(marks: dict[str, Any]) -> None:
    found = normalized({"messages": [*TALK, *TALK], **marks, "system": "Be kind."}, "", Forms())
    assert found.answers == (2, 4) and found.trained == (4,)


@pytest.mark.parametrize(
    ("row", "others"),
    [
        ({"messages": [{**ASKED, "train": True}, ANSWERED]}, True),
        ({"messages": [{"role": "system", "content": "Be kind.", "weight": 1.0}, *TALK]}, True),
        ({"messages": TALK, "loss_mask": [1, 1]}, True),
        ({"messages": [{**ASKED, "train": False, "weight": 1}, ANSWERED]}, False),
        ({"messages": [{**ASKED, "masked": False}, {**ANSWERED, "train": True}]}, False),
        ({"messages": [{**ASKED, "content": [{"text": "How warm?", "weight": 0}]}, ANSWERED]}, False),
        ({"messages": TALK, "weight": 1}, False),
    ],
)
def test_a_mark_that_asks_for_labels_on_what_others_wrote_is_seen(row: dict[str, Any], others: bool) -> None:
    found = normalized(row, "", Forms())
    assert found.others == others and len(found.trained) == 1
    assert all(message.keys() == {"role", "content"} for message in found.messages)


@pytest.mark.timeout(10)
def test_a_label_of_zero_rejects_an_answer_only_in_the_format_of_kto() -> None:
    row = {"prompt": "How warm?", "completion": "Seven.", "label": 0}
    for number in (0, 0.0, "0"):
        with pytest.raises(Dropped, match="an answer that its label rejects"):
            normalized({**row, "label": number}, "", Forms())
    assert messages_of({"instruction": "How warm?", "output": "Seven.", "label": 0}) == TALK
    assert messages_of({**row, "label": 1}) == messages_of({**row, "label": 2}) == TALK


def test_roles_have_the_names_that_the_template_compares() -> None:
    row = {"messages": [{"role": "developer", "content": "Be kind."}, *TALK]}
    roles = lambda forms: [message["role"] for message in messages_of(row, forms)]  # noqa: E731
    assert roles(Forms()) == ["system", "user", "assistant"]
    assert roles(Forms(roles=("system", "user", "bot"))) == ["system", "user", "bot"]
    assert roles(Forms(roles=("developer", "system", "assistant"))) == ["developer", "user", "assistant"]


def test_content_has_the_form_that_the_template_writes() -> None:
    parts = [{"type": "text", "text": "How "}, {"type": "text", "text": "warm?"}]
    row = {"messages": [{"role": "user", "content": parts}, ANSWERED]}
    assert messages_of(row, Forms(parts=True))[0]["content"] == parts
    typed = messages_of(row, Forms(plain=False, parts=True))
    assert typed[0]["content"] == parts and typed[1]["content"] == [{"type": "text", "text": "Seven."}]
    result = {"role": "tool", "content": {"degrees": 7}}
    assert messages_of({"messages": [ASKED, result, ANSWERED]})[1]["content"] == '{"degrees": 7}'


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "no messages"),
        ([None], "no messages"),
        ([ASKED], "no assistant message"),
        ([ASKED, {**ANSWERED, "weight": 0}], "no assistant message with a weight"),
        ([ASKED, {**ANSWERED, "weight": 0.5}], "a weight other than 0 and 1"),
        ([ASKED, {**ANSWERED, "loss_weight": 0.5}], "a weight other than 0 and 1"),
        ([{"content": "How warm?"}, ANSWERED], "a message without a role"),
        ([ASKED, {"role": "assistant", "content": None}], "an answer without content"),
        (
            [ASKED, {"role": "assistant", "content": [{"type": "text", "text": " \n"}]}],
            "an answer without content",
        ),
        ([{"role": "user", "said": "How warm?"}, ANSWERED], "a question without content"),
        (
            [{"role": "user", "content": [{"type": "text", "content": "How warm?"}]}, ANSWERED],
            "content other than text",
        ),
        ([ASKED, {"role": "assistant", "content": math.nan}], "an answer without content"),
        ([ASKED, {"role": "assistant", "content": [math.inf]}], "values that JSON cannot hold"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, ANSWERED],
            "content other than text",
        ),
        ([{"role": "user", "content": {"question": "How warm?"}}, ANSWERED], "content other than text"),
        *(
            ([ASKED, {"role": "assistant", "content": [part, {"text": "Seven."}]}], "content other than text")
            for part in ({"type": "redacted_thinking", "data": "x"}, {"type": "thinking", "thinking": 7})
        ),
        *(
            (
                [
                    ASKED,
                    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": text}}]},
                ],
                "arguments that are not JSON",
            )
            for text in ("{", '{"a": NaN}', '{"a": -Infinity}', '{"a": 1e999}')
        ),
        (
            [ASKED, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "3"}}]}],
            "arguments that are no object",
        ),
        (
            [
                ASKED,
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": [["a", 1]]}}]},
            ],
            "arguments that are no object",
        ),
        ([ASKED, {**ANSWERED, "loss_mask": [0, 1]}], "labels for parts of a message"),
        ([ASKED, {**ANSWERED, "train": "sometimes"}], "a weight other than 0 and 1"),
        ([ASKED, {**ANSWERED, "mask": 1}], "a mask that does not say what 1 means"),
        *(
            ([ASKED, {**ANSWERED, key: value}], f"a mark of training with the unknown name {key}")
            for key, value in (
                ("include_in_loss", False),
                ("learn", False),
                ("no_loss", True),
                ("isMasked", True),
            )
        ),
        ([ASKED, {**ANSWERED, "train_detail": [{"train": False}]}], "labels for parts of a message"),
        *(
            ([ASKED, {**ANSWERED, "content": ["Well: ", part]}], "labels for parts of a message")
            for part in (
                {"text": "7.", "train": False},
                {"type": "text", "text": "7.", "weight": 0.0},
                {"type": "thinking", "thinking": "7.", "train": False},
            )
        ),
        ([ASKED, {"role": "assistant", "tool_calls": ["f"]}], "tool calls that are not JSON"),
        ([ASKED, {**ANSWERED, "tool_calls": 7}], "tool calls that are no objects"),
        ([ASKED, {**ANSWERED, "train": "false"}], "no assistant message with a weight"),
        ([ASKED, {"role": "assistant", "function_call": "f()"}], "a function call that is not JSON"),
        ([ASKED, {**ANSWERED, "at": object()}], "values that JSON cannot hold"),
        *(
            ([ASKED, {**ANSWERED, key: value}], "reasoning that is no text")
            for key, value in (("reasoning", {"text": "Hm."}), ("thinking", True), ("reasoning_content", [1]))
        ),
    ],
)
def test_what_cannot_be_trained_on_is_dropped_with_a_reason(messages: list[Any], reason: str) -> None:
    with pytest.raises(Dropped) as dropped:
        normalized({"messages": messages}, "here", Forms())
    assert str(dropped.value) == reason


@pytest.mark.parametrize(
    ("beside", "reason"),
    [
        ({"system": [7]}, "content other than text"),
        ({"system_prompt": {"content": "Be kind."}}, "a system prompt that is no text"),
        ({"label": False}, "an answer that its label rejects"),
        ({"kto_tag": False}, "an answer that its label rejects"),
        ({"label": "False"}, "an answer that its label rejects"),
        ({"kto_tag": 0}, "an answer that its label rejects"),
        ({"kto_tag": "0"}, "an answer that its label rejects"),
        ({"chat_template_kwargs": "{"}, "chat_template_kwargs that is not JSON"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs that is no object"),
        ({"image": "a.png"}, "images, video or sound"),
        ({"videos": ["a.mp4"]}, "images, video or sound"),
        ({"label": True}, ""),
        ({"label": 1}, ""),
        ({"weight": 0}, "a row with a weight of 0"),
        ({"train": "false"}, "a row with a weight of 0"),
        ({"weight": 0.5}, "a weight other than 0 and 1"),
        ({"loss_mask": [0] * 9 + [1]}, "labels for parts of a message"),
        ({"mask": "User"}, ""),
        ({"mask": "user, System", "type": None}, ""),
        *(({"mask": names}, "a mask of other roles") for names in ("Assistant", "gpt,User", "System")),
        ({"mask": [0, 1]}, "a mask that does not say what 1 means"),
        *(({"type": kind}, "attributes of turns") for kind in ("VALUE_TO_TEXT", "TEXT_TO_VALUE")),
        ({"type": "chat"}, ""),
        ({"loss": 0.0, "weight": None, "train": []}, ""),
        ({"kto_tag": 1}, ""),
        ({"images": [], "image": None, "audio": ""}, ""),
    ],
)
def test_a_row_is_left_out_for_what_stands_beside_its_messages(beside: dict[str, Any], reason: str) -> None:
    for row in ({"messages": TALK}, {"prompt": "How warm?", "completion": "Seven."}):
        if not reason:
            assert messages_of({**row, **beside}) == TALK
            continue
        with pytest.raises(Dropped, match=reason):
            messages_of({**row, **beside})


def test_calls_that_the_template_leaves_out_are_not_trained_on() -> None:
    row = {"messages": [ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL]}]}
    with pytest.raises(Dropped, match="tool calls that the template leaves out"):
        normalized(row, "here", replace(TEXT, texts=False))


def test_deep_and_broken_text() -> None:
    deep: Any = "x"
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(Dropped, match="deeply nested"):
        normalized({"messages": [ASKED, {**ANSWERED, "more": deep}]}, "", Forms())
    halves = "a\ud800b\ud83d\ude00"
    half = normalized({"messages": [ASKED, {**ANSWERED, "content": halves}]}, "", Forms())
    assert half.messages[1]["content"] == "a\ufffdb\U0001f600"


@pytest.mark.parametrize(
    "row", [{}, {"text": "a"}, {"messages": "a"}, {"messages": ["a"]}, {"messages": {"a": 1}}]
)
def test_a_row_that_is_no_conversation_is_named(row: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"^here.*; repair or remove that row$"):
        normalized(row, "here", Forms())


def test_what_a_question_is_about_follows_it_and_a_system_prompt_comes_first() -> None:
    row = {"instruction": "How warm?", "input": "Oslo, in May.", "output": "Seven.", "system": "Be brief."}
    system, asked, answer = messages_of(row)
    assert (system["content"], asked["content"]) == ("Be brief.", "How warm?\n\nOslo, in May.")
    assert answer["content"] == "Seven."
    for history in ([["Where?", "Oslo."]], '[["Where?", "Oslo."]]', (("Where?", "Oslo."),)):
        texts = [message["content"] for message in messages_of({**row, "history": history})]
        assert texts == ["Be brief.", "Where?", "Oslo.", asked["content"], "Seven."]
    assert (
        messages_of({**row, "history": None})
        == [system, asked, answer]
        == messages_of({**row, "history": ""})
    )
    with pytest.raises(Dropped, match="a history"):
        messages_of({**row, "history": ["Where?"]})


def test_a_question_with_two_answers_is_no_conversation() -> None:
    """As LLaMA-Factory has preferences; the earlier answers alone would be trained on."""
    beside = {"chosen": ANSWERED, "rejected": {**ANSWERED, "content": "Six."}}
    with pytest.raises(DataError, match="preferences"):
        messages_of({"conversations": [*TALK, ASKED], **beside})
    assert messages_of({"messages": TALK, **beside}) == TALK
    nothing = dict.fromkeys(beside)  # as Arrow has it of other rows
    assert messages_of({"messages": [*TALK, ASKED], **nothing}) == [*TALK, ASKED]


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ({"instruction": "How warm?", "output": " "}, Dropped),
        ({"prompt": None, "completion": "Seven."}, Dropped),
        ({"prompt": "How warm?", "completion": 7}, DataError),
        ({"prompt": "How warm?", "context": "In Oslo.", "completion": [ANSWERED]}, DataError),
        ({"prompt": ["How warm?"], "completion": [ANSWERED]}, DataError),
        ({"instruction": "How warm?"}, DataError),
    ],
)
def test_a_question_without_an_answer(row: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        messages_of(row)


@pytest.mark.parametrize("none", [None, [], "[]"])
def test_a_row_without_messages_may_have_a_question_and_its_answer(none: Any) -> None:
    pair = {"prompt": "How warm?", "completion": "Seven."}
    assert messages_of({"messages": none, **pair}) == messages_of(pair)
    with pytest.raises(Dropped, match="no messages"):
        messages_of({"messages": none, **pair, "completion": None})
