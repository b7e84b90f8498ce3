"""Conversations: what the model reads, what it is trained on, and what is refused."""

from __future__ import annotations

import pickle
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from headrace import Dataset, InMemoryShard, Pipeline, StaticMixtureWorkSource
from headrace.core.block import Block, Origin, to_list
from headrace.core.op import BadRows
from headrace.errors import ConfigError, RecordError
from headrace.ops.chat.expand import ExpandChat
from headrace.ops.chat.template import ChatTemplate
from headrace.ops.chat.tokenize import TokenizeChat

SMALL = Path(__file__).parents[2] / "golden" / "tokenizers" / "small"
TOKENIZER = Tokenizer.from_file(str(SMALL / "tokenizer.json"))
BOS, EOS, USER = 0, 1, 3
TAGGED = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}{{ '\\n' }}"
    "{%- elif m.role == 'assistant' %}A:{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}"
    "{%- else %}({{ m.role }}){{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
)
UNTAGGED = TAGGED.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def answer(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


TALK = [
    user("hello"),
    answer("hi there"),
    user("what?"),
    answer("nothing"),
    {"role": "tool", "content": "x"},
    answer("end"),
]


def block_of(*conversations: Any) -> Block:
    ids = np.zeros((len(conversations), 7), np.int64)
    ids[:, 2] = ids[:, 5] = np.arange(len(conversations))
    return Block(0, Origin(ids), None, [c if isinstance(c, dict) else {"messages": c} for c in conversations])


def make(**settings: Any) -> TokenizeChat:
    return TokenizeChat(tokenizer_id=SMALL, **{"chat_template": TAGGED, **settings})


def run(op: Any, block: Block) -> tuple[Block, BadRows]:
    bad = BadRows()
    return op.worker()(block, bad), bad


def trained_on(op: TokenizeChat, talk: list[Any]) -> tuple[str, list[str]]:
    """The whole text, and the runs of tokens that are trained on."""
    out, bad = run(op, block_of(talk))
    assert not bad.errors
    assert out.columns is not None
    (ids,), (mask,) = (to_list(out.columns[name]) for name in ("input_ids", "loss_mask"))
    ids, mask = np.asarray(ids), np.asarray(mask)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]])))
    spans = [TOKENIZER.decode(ids[a:b].tolist(), skip_special_tokens=False) for a, b in edges.reshape(-1, 2)]
    return TOKENIZER.decode(ids.tolist(), skip_special_tokens=False), spans


@pytest.mark.parametrize(
    "settings", [{}, {"chat_template": UNTAGGED, "span_source": "prefix_diff"}, {"span_source": "prefix_diff"}]
)
def test_answers_are_trained_on_and_nothing_else(settings: dict[str, Any]) -> None:
    text, spans = trained_on(make(**settings), TALK)
    assert text == ("<|bos|><|user|>hello\nA:hi there<|eos|><|user|>what?\nA:nothing<|eos|>(tool)xA:end<|eos|>")
    assert spans == ["hi there<|eos|>", "nothing<|eos|>", "end<|eos|>"]
    assert trained_on(make(**settings, loss_scope="last_span"), TALK)[1] == ["end<|eos|>"]
    assert trained_on(make(**settings, loss_scope="after_last_user"), TALK)[1] == ["nothing<|eos|>", "end<|eos|>"]


def test_special_tokens_are_special_and_types_are_fixed() -> None:
    out, _ = run(make(), block_of(TALK))
    assert out.columns is not None
    ids, mask = out.columns["input_ids"], out.columns["loss_mask"]
    first = np.asarray(to_list(ids)[0])
    assert first[0] == BOS and first[1] == USER and first[-1] == EOS
    assert (first.dtype, np.asarray(to_list(mask)[0]).dtype) == (np.int32, np.uint8)


def test_a_template_that_marks_nothing_is_read_by_prefixes_and_that_is_said() -> None:
    op = make(chat_template=UNTAGGED)
    with pytest.warns(UserWarning, match="does not mark what an assistant wrote"):
        assert op.loaded.template is not None
    assert trained_on(op, TALK) == trained_on(make(), TALK)


def test_an_end_is_added_where_there_is_room() -> None:
    bare = TAGGED.replace("{{ eos_token }}", "")
    text, spans = trained_on(make(chat_template=bare), TALK[:2])
    assert text.endswith("A:hi there<|eos|>") and spans == ["hi there<|eos|>"]
    whole = len(to_list(run(make(chat_template=bare), block_of(TALK[:2]))[0].columns["input_ids"])[0])  # type: ignore[index]
    out, _ = run(make(chat_template=bare, max_length=whole - 1), block_of(TALK[:2]))
    assert out.columns is not None and len(to_list(out.columns["input_ids"])[0]) == whole - 1 and not out.drops
    out, _ = run(make(max_length=whole - 2), block_of(TALK[:2]))
    assert [(d.reason, d.tokens) for d in out.drops] == [("truncated", 2)]


def test_conversations_without_anything_to_train_on_are_dropped_and_counted() -> None:
    out, bad = run(make(max_length=4), block_of([user("a")], TALK, []))
    assert not len(out) and not bad.rows
    assert [(d.reason, d.ids[:, 2].tolist()) for d in out.drops if d.reason != "truncated"] == [
        ("nothing to train on", [0, 1, 2])
    ]
    out, _ = run(make(chat_template="{% if messages %}a{% generation %}{% endgeneration %}{% endif %}"), block_of([]))
    assert [(d.reason, len(d.ids)) for d in out.drops] == [("fewer than two tokens", 1)]


@pytest.mark.parametrize(
    ("talk", "message"),
    [
        ("hello", "should hold messages"),
        ([{"content": "x"}], "should hold messages"),
        (None, "field 'messages' is missing"),
        ([user("a"), answer("b\U0010fffe")], "U.10FFFE"),
        ([user("a"), {"role": "assistant"}], "refuses the messages"),
    ],
)
def test_what_is_no_conversation_is_reported(talk: Any, message: str) -> None:
    strict = TAGGED.replace("{{ m.content }}{{ eos_token }}", "{{ m.content + '' }}{{ eos_token }}")
    _, bad = run(make(chat_template=strict), block_of({"messages": talk}, TALK))
    assert bad.rows == [0] and isinstance(bad.errors[0], RecordError)
    with pytest.raises(RecordError, match=message):
        raise bad.errors[0]


def test_what_a_template_cannot_tell_is_refused() -> None:
    prompt = "{% if add_generation_prompt %}A{% endif %}"
    changing = "{% for m in messages %}{{ messages|length }}{{ m.role }}:{{ m.content }}{% endfor %}" + prompt
    silent = "{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}"
    for template, message in (
        (changing, "renders messages before number 1 otherwise"),
        (silent, "no generation prompt"),
    ):
        _, bad = run(make(chat_template=template, span_source="prefix_diff"), block_of(TALK[:2]))
        with pytest.raises(RecordError, match=message):
            raise bad.errors[0]
    first = "{% generation %}{{ messages[0].content }}{% endgeneration %}"
    _, bad = run(make(chat_template=first), block_of(TALK))
    assert "nothing comes before it" in str(bad.errors[0])
    twice = TAGGED.replace("{% endgeneration %}", "{% endgeneration %}{% generation %}!{% endgeneration %}")
    _, bad = run(make(chat_template=twice, loss_scope="after_last_user"), block_of(TALK))
    assert "marks 6 spans for 3 messages" in str(bad.errors[0])


def test_tools_thinking_and_arguments_reach_the_template() -> None:
    template = (
        "{% if tools %}T:{{ tools|tojson }}{% endif %}{% if enable_thinking %}think{% endif %}{{ style }}"
        "{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% endif %}" + TAGGED
    )
    op = make(chat_template=template, chat_template_kwargs={"style": "[brief]"})
    out, _ = run(op, block_of({"messages": TALK, "tools": [{"name": "\u00e9<"}], "enable_thinking": True}))
    assert out.columns is not None
    text = TOKENIZER.decode(np.asarray(to_list(out.columns["input_ids"])[0]).tolist(), skip_special_tokens=False)
    assert text.startswith('T:[{"name": "\u00e9<"}]think[brief]<|bos|>')
    assert op.needs(frozenset({"input_ids"})) == {"messages", "tools", "enable_thinking"}


def test_what_is_not_there_is_none_to_a_template() -> None:
    ask = "{{ '' if tools is none and documents is none else 'given' }}"
    assert ChatTemplate(ask).renderer().render([]) == ""
    assert ChatTemplate(ask).renderer().render([], tools=[1]) == "given"


@pytest.mark.parametrize("tag", ["{%generation-%}", "{%+generation+%}", "{%- generation %}", "{%\ngeneration -%}"])
def test_generation_tags_are_seen_however_they_are_written(tag: str) -> None:
    assert ChatTemplate(tag + "x{% endgeneration %}").tagged
    assert not ChatTemplate("{% if add_generation_prompt %}generation{% endif %}").tagged


def test_without_a_template_contents_follow_each_other() -> None:
    text, spans = trained_on(make(chat_template=None, apply_chat_template=False), TALK[:4])
    assert text == "hellohi there<|eos|>what?nothing<|eos|>" and spans == ["hi there<|eos|>", "nothing<|eos|>"]


def test_the_tokenizer_s_own_template_is_found(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no chat template; pass chat_template="):
        _ = make(chat_template=None).loaded
    folder = tmp_path / "chatty"
    shutil.copytree(SMALL, folder)
    (folder / "chat_template.jinja").write_text(TAGGED)
    own = TokenizeChat(tokenizer_id=folder)
    assert trained_on(own, TALK) == trained_on(make(), TALK) and own.describe() == make().describe()
    template = tmp_path / "other.jinja"
    template.write_text(TAGGED.replace("A:", "B:"))
    assert "B:hi there" in trained_on(make(chat_template=template), TALK)[0]
    assert make(chat_template=template).describe() != make().describe()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"span_source": "tags"}, "unknown span_source 'tags'"),
        ({"loss_scope": "all"}, "unknown loss_scope 'all'; known: after_last_user, all_assistant"),
        ({"max_length": 1}, "max_length must be at least 2"),
        ({"chat_template_kwargs": {"messages": []}}, "may not set 'messages'"),
        ({"mask_field_out": "input_ids"}, "not input_ids"),
        ({"tokenizer": TOKENIZER}, "exactly one of"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"chat_template": "{% for %}", "span_source": "prefix_diff"}, "the chat template is wrong in line 1"),
        ({"chat_template": "nowhere.jinja"}, "neither Jinja text nor a file that exists"),
        ({"chat_template": UNTAGGED, "span_source": "generation_tags"}, "has no {% generation %} block"),
        ({"eos_token": "<|fin|>"}, "has no such special token"),
    ],
)
def test_what_cannot_be_loaded_is_said_before_the_run(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(**settings).prepare(None)


def test_a_template_cannot_reach_out() -> None:
    renderer = ChatTemplate("{{ messages.__class__.__mro__ }}").renderer()
    with pytest.raises(RecordError, match="SecurityError"):
        renderer.render([])


# -- turns ------------------------------------------------------------------------------------------


def test_each_answered_turn_becomes_a_record() -> None:
    talk = [user("a"), answer("b"), user("c"), user("d"), answer("e"), user("f")]
    out, bad = run(ExpandChat(), block_of({"messages": talk, "x": 1}, [user("z")], TALK[:2], "no messages"))
    payloads = out.payloads()
    assert [len(p["messages"]) for p in payloads] == [2, 5, 2] and payloads[0]["x"] == 1
    assert out.origin.ids[:, 2].tolist() == [0, 0, 2] and out.origin.ids[:, -1].tolist() == [0, 1, 0]
    assert [(d.reason, d.ids[:, 2].tolist()) for d in out.drops] == [("no turn is answered", [1])]
    assert bad.rows == [3]
    payloads[0]["messages"][0]["content"] = "changed"
    assert payloads[1]["messages"][0]["content"] == "a"


def source(count: int = 30) -> StaticMixtureWorkSource:
    rows = [{"messages": [user(f"q{i} " * (i % 5 + 1)), answer(f"a{i}")] * (i % 3 + 1)} for i in range(count)]
    return StaticMixtureWorkSource([Dataset.from_dict("chat", {0: InMemoryShard(rows)})], {"chat": 1}, chunk_size=8)


@pytest.mark.parametrize("runner", ["inline", "threads", "process"])
def test_a_pipeline_from_turns_to_labels_resumes_invisibly(runner: str) -> None:
    def build() -> Pipeline:
        pipeline = Pipeline(source()).expand_chat().tokenize_chat(tokenizer_id=SMALL, chat_template=TAGGED).shuffle(8)
        return pipeline.pack_flat(64, algorithm="first_fit", num_bins=2, pad_token_id=2).batch(2, drop_last=False)

    def labels(items: Any) -> list[Any]:
        return [b.to_training(return_labels=True, dtype=np.int64)["labels"].tolist() for b in items]

    straight = labels(build().options(runner="inline"))
    assert any(label != -100 for batch in straight for row in batch for label in row)
    pipeline = build().options(runner=runner)
    running = iter(pipeline)
    got = labels([next(running), next(running)])
    state = pipeline.checkpoint()
    running.close()
    other = pickle.loads(pickle.dumps(build()))
    other.restore(state)
    assert got + labels(other) == straight


def test_nothing_is_warned_of_where_nothing_is_wrong() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make().prepare(None)
