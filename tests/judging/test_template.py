"""A task's template: what it shows, and what it may not do."""

import pytest

from scorecal.judging.task import Item, Task, Template

GOOD = """
{%- block instruction %}Rate from {{ low }} to {{ high }}: {{ labels | join("/") }}.
{% endblock %}
{%- block item %}<{{ text }}>{% endblock %}
{%- block question %} Score?{% endblock %}
{%- block cue %}It is{% endblock %}
"""


@pytest.fixture
def make(tmp_path):
    def template(content, scale="0-3"):
        path = tmp_path / "own.j2"
        path.write_text(content, encoding="utf-8")
        return Template(Task("own", str(path), {"text": "text"}, scale=scale))

    return template


def an_item(text="a dog"):
    return Item("r1", "r1", "dev", 1.0, False, {"text": text}, "pairs.jsonl row 1")


def test_the_user_turn_is_instruction_item_and_question_and_the_cue_begins_the_answer(make):
    prompt = make(GOOD).prompt(an_item())
    assert prompt.before == "Rate from 0 to 3: 0/1/2/3.\n"
    assert (prompt.item, prompt.after, prompt.cue) == ("<a dog>", " Score?", "It is")
    assert prompt.labels == (("0",), ("1",), ("2",), ("3",))
    assert prompt.where == "pairs.jsonl row 1"


def test_question_and_cue_may_be_left_out(make):
    prompt = make(
        "{% block instruction %}Rate.{% endblock %}{% block item %}{{ text }}{% endblock %}"
    ).prompt(an_item())
    assert (prompt.before, prompt.item, prompt.after, prompt.cue) == ("Rate.", "a dog", "", "")


@pytest.mark.parametrize(
    "text", ["{{ 7 * 7 }}", "{% raw %}", "<b>&amp;</b>", "{{ text.__class__ }}", "\n\n x \n"]
)
def test_the_text_under_judgement_is_data(text, make):
    assert make(GOOD).prompt(an_item(text)).item == f"<{text}>"


def test_a_content_free_input_fills_every_field(make):
    assert make(GOOD).content_free("N/A").item == "<N/A>"
    shipped = Template(Task("sts", "sts.j2", {"sentence1": "a", "sentence2": "b"}))
    assert shipped.content_free("[MASK]").item == "Sentence 1: [MASK]\nSentence 2: [MASK]"
    assert shipped.content_free("").before == shipped.instruction


def test_the_shipped_template_asks_for_a_similarity():
    template = Template(Task("sts", "sts.j2", {"sentence1": "a", "sentence2": "b"}))
    item = Item("i", "i", "dev", None, False, {"sentence1": "A.", "sentence2": "B."}, "")
    prompt = template.prompt(item)
    assert "from 0 to 5" in prompt.before
    assert prompt.item == "Sentence 1: A.\nSentence 2: B."
    assert prompt.after.strip() == "Score:"


def test_a_template_is_known_by_its_text(make):
    first = make(GOOD).hash
    assert make(GOOD).hash == first
    assert make(GOOD.replace("Score", "Mark")).hash != first


def test_loops_and_helpers_of_jinja_work(make):
    loop = "{% for label in labels %}{{ loop.index }}{% endfor %}{{ range(2) | list }}"
    assert make(GOOD.replace("Rate from", loop)).instruction.startswith("1234[0, 1]")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("{{ text }}", "{{ txt }}"), "names the field 'txt', which `data.task.fields` lacks"),
        (("{{ low }}", "{{ text }}"), "block 'instruction' .* can't be written"),
        (("block item", "block thing"), "lacks the block 'item'"),
        (("block instruction", "block thing"), "lacks the block 'instruction'"),
        (("{{ low }}", "{{ low"), r"own\.j2' line \d+"),
        (("{{ low }}", "{% nonsense %}"), r"own\.j2' line \d+"),
        (("{{ low }}", "{{ low | nonsense }}"), r"own\.j2' line \d+.*nonsense"),
        (("{{ low }}", "{{ low + 1 }}"), r"own\.j2"),  # low is text
        (("{{ low }}", "{{ low.__class__ }}"), "is not allowed"),
        (("{{ low }}", "{{ ''.__class__.__mro__ }}"), "is not allowed"),
        (("{{ low }}", "{{ labels.__class__.__base__.__subclasses__() }}"), "is not allowed"),
        (("{{ low }}", "{% include 'sts.j2' %}"), r"own\.j2"),
    ],
)
def test_a_template_that_cannot_be_used_says_why_in_one_line(change, message, make):
    with pytest.raises(ValueError, match=message) as raised:
        make(GOOD.replace(*change))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("{{ text }}", "{{ text.__class__ }}"), "is not allowed"),
        (("{{ text }}", "{{ text.format.__globals__ }}"), "is not allowed"),
        (("Score?", "{{ text }}?"), "block 'question' .* can't be written"),
    ],
)
def test_a_template_that_fails_on_an_item_says_why(change, message, make):
    with pytest.raises(ValueError, match=message):
        make(GOOD.replace(*change)).prompt(an_item())


def test_a_template_that_is_not_there_names_the_shipped_ones():
    with pytest.raises(ValueError, match=r"no template 'none\.j2'.*one of .*sts\.j2"):
        Template(Task("own", "none.j2", {"text": "text"}))


def test_a_template_that_is_not_utf8_is_named(tmp_path):
    path = tmp_path / "own.j2"
    path.write_bytes(GOOD.replace("Rate", "Bewerte für").encode("latin-1"))
    with pytest.raises(ValueError, match=r"own\.j2' is not UTF-8"):
        Template(Task("own", str(path), {"text": "text"}))
