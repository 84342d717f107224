"""Where answers lie in what odd templates write."""

from typing import Any

import pytest

from node.data import templates
from node.data.conversations import LEFT_OUT, Dropped, normalized
from node.data.templates import Template
from wire.errors import DataError

HEAD = "{% for m in messages %}"
TAIL = "{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"
TWO = [
    {"role": "user", "content": "Hi?"},
    {"role": "assistant", "content": "<think>x</think>One."},
    {"role": "user", "content": "And?"},
    {"role": "assistant", "content": "Two."},
]
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}


@pytest.mark.parametrize(
    ("source", "messages", "expected"),
    [
        # Thoughts are taken out everywhere, and the prompt begins one, as DeepSeek's R1 has it.
        (
            "{% for m in messages %}{% if m.role == 'user' %}<U>{{ m.content }}{% else %}<A>"
            "{{ m.content.split('</think>')[-1] }}<E>{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}<A><think>\n{% endif %}",
            TWO,
            "<U>Hi?<A>[[One.<E>]]<U>And?<A>[[Two.<E>]]",
        ),
        # A system prompt before the last user's message alone.
        (
            HEAD + "{% if loop.index0 == messages | length - 2 %}<sys>{% endif %}"
            "<s>{{ m.role }}\n{{ m.content | trim }}<e>\n" + TAIL,
            [{"role": "user", "content": "  Two. "}, {"role": "assistant", "content": " Two.\n"}, *TWO[2:]],
            "<s>user\nTwo.<e>\n<s>assistant\n[[Two.<e>\n]]<sys><s>user\nAnd?<e>\n<s>assistant\n[[Two.<e>\n]]",
        ),
        # Something behind the last turn alone.
        (
            HEAD + "<s>{{ m.role }}\n{{ m.content }}<e>\n" + TAIL[:-11] + "{% else %}<end>{% endif %}",
            [TWO[2], TWO[3], TWO[2], TWO[3]],
            "<s>user\nAnd?<e>\n<s>assistant\n[[Two.<e>\n]]<s>user\nAnd?<e>\n<s>assistant\n[[Two.<e>\n<end>]]",
        ),
        # The last answer ends with a token of its own, as gpt-oss has it.
        (
            HEAD
            + "<s>{{ m.role }}<m>{{ m.content }}{{ '<return>' if loop.last and m.role == 'assistant' and "
            "not add_generation_prompt else '<e>' }}{% endfor %}"
            "{% if add_generation_prompt %}<s>assistant{% endif %}",
            [TWO[2], TWO[3], TWO[2], TWO[3]],
            "<s>user<m>And?<e><s>assistant[[<m>Two.<e>]]<s>user<m>And?<e><s>assistant[[<m>Two.<return>]]",
        ),
        # A call without a thought, where the prompt begins one, as DeepSeek's R1 and Nemotron have it.
        *(
            (
                HEAD + "<s>{{ m.role }}\n" + before + "{{ m.content }}{% for c in m.tool_calls or [] %}"
                "<call>{{ c.function | tojson }}{% endfor %}<e>\n{% endfor %}"
                "{% if add_generation_prompt %}<s>assistant\n<think>\n{% endif %}",
                [TWO[2], {"role": "assistant", "tool_calls": [CALL]}],
                f"<s>user\nAnd?<e>\n<s>assistant\n{written}<call>"
                '{"name": "weather", "arguments": {"city": "Oslo"}}<e>\n]]',
            )
            for before, written in (
                ("", "[["),
                ("{{ '<think></think>' if m.role == 'assistant' }}", "<think>[[</think>"),
            )
        ),
        # Thoughts, where the prompt says that there are none, as Qwen3.5's small models have it.
        *(
            (
                HEAD + "<s>{{ m.role }}\n{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n"
                "</think>\n{% endif %}{{ m.content }}<e>\n{% endfor %}"
                "{% if add_generation_prompt %}<s>assistant\n<think>\n\n</think>\n\n{% endif %}",
                [TWO[2], {"role": "assistant", **answer}, TWO[2], TWO[3]],
                f"<s>user\nAnd?<e>\n<s>assistant\n[[{written}<e>\n]]"
                "<s>user\nAnd?<e>\n<s>assistant\n[[Two.<e>\n]]",
            )
            for answer, written in (
                ({"content": "One.", "reasoning_content": "Hm."}, "<think>\nHm.\n</think>\nOne."),
                ({"content": "<think>\na\n</think>One."}, "<think>\na\n</think>One."),
            )
        ),
        # The assistant speaks first, and has another name.
        (
            HEAD + "{{ 'B:' if m.role == 'bot' else 'U:' }}{{ m.content }}</s>{% endfor %}"
            "{% if add_generation_prompt %}B:{% endif %}",
            TWO[3:] + TWO[2:],
            "B:[[Two.</s>]]U:And?</s>B:[[Two.</s>]]",
        ),
        # Parts of content are all that it reads.
        (
            HEAD + "<s>{{ m.role }}\n{% for part in m.content %}{{ part.text }}{% endfor %}<e>" + TAIL,
            TWO[2:],
            "<s>user\nAnd?<e><s>assistant\n[[Two.<e>]]",
        ),
        # Arguments of calls are text to it.
        (
            HEAD + "<s>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
            "{{ c.function.name + c.function.arguments }}{% endfor %}<e>" + TAIL,
            [TWO[2], {"role": "assistant", "content": None, "tool_calls": [CALL]}],
            '<s>user\nAnd?<e><s>assistant\n[[weather{"city": "Oslo"}<e>]]',
        ),
        # A thought beside a call goes once an answer follows, and the result repeats the call's name.
        (
            HEAD + "{% if m.role == 'tool' %}<r>{{ messages[1].tool_calls[0].function.name }}:{{ m.content }}"
            "{% else %}<s>{{ m.role }}<m>{{ m.content if loop.last or not m.tool_calls }}{% endif %}"
            "{% for c in m.tool_calls or () %}{{ c.function.name }}{{ c.function.arguments | tojson }}"
            "{% endfor %}<e>{% endfor %}{% if add_generation_prompt %}<s>assistant{% endif %}",
            [
                TWO[2],
                {"role": "assistant", "content": "Hm.", "tool_calls": [CALL]},
                {"role": "tool", "content": "7"},
                TWO[3],
            ],
            '<s>user<m>And?<e><s>assistant[[<m>weather{"city": "Oslo"}<e>]]<r>weather:7<e>'
            "<s>assistant[[<m>Two.<e>]]",
        ),
        # White space before the end of an answer, whose token depends on where it is.
        (
            HEAD
            + "<s>{{ m.role }}<m>{{ m.content }}{{ '<return>' if loop.last and m.role == 'assistant' and "
            "not add_generation_prompt else '<e>' }}{% endfor %}"
            "{% if add_generation_prompt %}<s>assistant{% endif %}",
            [TWO[2], {"role": "assistant", "content": "Two. \n"}, TWO[2], TWO[3]],
            "<s>user<m>And?<e><s>assistant[[<m>Two. \n<e>]]<s>user<m>And?<e><s>assistant[[<m>Two.<return>]]",
        ),
        # Calls are written of a message without content alone, as DeepSeek's R1 has it.
        (
            HEAD + "{% if m.content is none %}<A>{% for c in m.tool_calls %}{{ c.function.name }}"
            "{{ c.function.arguments | tojson }}{% endfor %}{% else %}<{{ m.role[0] }}>{{ m.content }}"
            "{% endif %}<E>{% endfor %}{% if add_generation_prompt %}<A>{% endif %}",
            [TWO[2], {"role": "assistant", "content": "", "tool_calls": [CALL]}],
            '<u>And?<E><A>[[weather{"city": "Oslo"}<E>]]',
        ),
        # Content of a call that has been answered is not null, as Qwen's QwQ has it.
        (
            HEAD + "<s>{{ m.role }}\n{{ m.content or '' if loop.last or m.role != 'assistant' else "
            "m.content.split('</think>')[-1] }}{% for c in m.tool_calls or [] %}"
            "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}<e>" + TAIL,
            [
                TWO[2],
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "content": "7"},
                TWO[3],
            ],
            '<s>user\nAnd?<e><s>assistant\n[[weather{"city": "Oslo"}<e>]]<s>tool\n7<e>'
            "<s>assistant\n[[Two.<e>]]",
        ),
        # Identities of calls must have nine characters, as Mistral has it.
        (
            HEAD
            + "{{ '<r>' + m.tool_call_id if m.role == 'tool' else '<s>' + m.role + '\n' }}{{ m.content }}"
            "{% for c in m.tool_calls or [] %}{{ raise_exception('no') if c.id | length != 9 }}{{ c.id }}"
            "{{ c.function | tojson }}{% endfor %}<e>" + TAIL,
            [
                TWO[2],
                {"role": "assistant", "tool_calls": [{"id": "call_a1B2", **CALL}, {"id": "call_x", **CALL}]},
                {"role": "tool", "content": "7", "tool_call_id": "call_x"},
                {"role": "tool", "content": "8"},
            ],
            '<s>user\nAnd?<e><s>assistant\n[[call00000{"name": "weather", "arguments": {"city": "Oslo"}}'
            'call00001{"name": "weather", "arguments": {"city": "Oslo"}}<e>]]'
            "<r>call000017<e><r>call000018<e>",
        ),
        # A role is written as it is, and "function" is the type of a tool.
        (
            "{% for t in tools or [] %}{{ t.name if t.type == 'function' }}{% endfor %}"
            + HEAD
            + "<s>{{ m.role }}\n{{ 'assistant' if m.role == 'assistant' }}{{ m.content }}"
            "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<e>" + TAIL,
            [TWO[2], {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "7"}],
            "<s>user\nAnd?<e><s>assistant\n[[assistant"
            '{"name": "weather", "arguments": {"city": "Oslo"}}<e>]]<s>tool\n7<e>',
        ),
        # A thought is all of the content beside a call, and is taken out once a question follows.
        (
            "{% set ns = namespace(last=0) %}" + HEAD + "{% if m.role == 'user' %}"
            "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}" + HEAD + "<s>{{ m.role }}\n"
            "{{ m.content if loop.index0 > ns.last else m.content.split('</think>')[-1] | trim }}"
            "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{{ c.function.name }}"
            "{% endfor %}<e>\n" + TAIL,
            [TWO[0], {"role": "assistant", "content": "<think>x</think>\n", "tool_calls": [CALL]}, *TWO[2:]],
            '<s>user\nHi?<e>\n<s>assistant\n[[{"city": "Oslo"}weather<e>\n]]'
            "<s>user\nAnd?<e>\n<s>assistant\n[[Two.<e>\n]]",
        ),
    ],
    ids=[
        *("thoughts", "moved", "end", "return", "begun", "closed", "silent", "tags", "bot", "parts"),
        *("arguments", "repeated"),
        *("space", "null", "earlier", "nine", "tool", "thought"),
    ],
)
def test_answers_are_found(source: str, messages: list[dict[str, Any]], expected: str) -> None:
    template = Template(source, {})
    rendered = template.render(normalized({"messages": messages}, "", template.forms))
    text = rendered.text
    for start, stop in sorted(rendered.assistant, reverse=True):
        text = f"{text[:start]}[[{text[start:stop]}]]{text[stop:]}"
    assert text == expected


def test_calls_of_which_the_template_writes_one_alone_are_not_trained_on() -> None:
    source = (
        HEAD + "<s>{{ m.role }}\n{{ m.content }}{{ m.tool_calls[0].function | tojson if m.tool_calls }}<e>"
    )
    template = Template(source + TAIL, {})
    asked = normalized(
        {"messages": [TWO[2], {"role": "assistant", "tool_calls": [CALL]}]}, "", template.forms
    )
    assert "Oslo" in template.render(asked).text
    twice = {"messages": [TWO[2], {"role": "assistant", "tool_calls": [CALL, CALL]}]}
    with pytest.raises(Dropped, match=LEFT_OUT):
        template.render(normalized(twice, "", template.forms))


def test_a_mark_of_the_data_is_never_taken_for_one_of_ours() -> None:
    source = HEAD + "{{ messages | length }}{{ m.role }}\n{{ m.content }}<e>\n" + TAIL
    template = Template(source, {})
    messages = [{"role": "user", "content": "a\U000f0003b"}, *TWO[1:]]
    with pytest.raises(Dropped, match="private characters"):
        template.render(normalized({"messages": messages}, "", template.forms))


def test_a_template_that_is_slow_for_each_of_many_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "LIMIT_SECONDS", 1.0)  # more than its process takes to start
    monkeypatch.setattr(templates, "MEAN_SECONDS", 0.001)
    loop = "{% for a in range(30000) %}{% endfor %}"
    slow = templates.ChatTemplate(loop + "{{ messages[1].content }}", {}, "here")
    one = normalized({"messages": TWO}, "here", slow.forms)
    assert slow.prompt(TWO) == "<think>x</think>One."
    with pytest.raises(DataError, match="for each of many"):
        slow.render_all([one] * 2000)
