"""Answers in a judge's own words, alone and in contrast, against plain loops of forward passes."""

import json
import math
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from scorecal.judging import generation
from scorecal.judging.answers import parse_score
from scorecal.judging.contrast import Contrasted, contrast
from scorecal.judging.dry_run import dry_run, dry_run_text
from scorecal.judging.elicit import Interrupted, elicit
from scorecal.judging.generation import Writing
from scorecal.judging.judge import Unsupported
from scorecal.judging.plan import item_questions
from scorecal.judging.server import ServerJudge
from scorecal.judging.table import load_table
from scorecal.judging.task import Task, load_items, templates
from scorecal.judging.transformers import TransformersJudge
from scorecal.scale import Scale

STEPS = 8
FAMILIES = ["llama", "qwen2", "gemma2", "gemma3", "gpt2", "bloom", "granite"]


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    """Batches of three texts of eight tokens."""
    monkeypatch.setattr(generation, "_BATCH", 3)
    monkeypatch.setattr(generation, "ANSWER_TOKENS", STEPS)


@pytest.fixture
def answered(make_job, tmp_path):
    (tmp_path / "answered").mkdir()
    return make_job(tmp_path / "answered", mode="generate")


@pytest.fixture
def writes(watched):
    """`writes(patience=2)` is a tiny judge that is interrupted after two batches of answers."""

    def judge(patience=None, **options):
        judge = watched(**options)
        answer, judge.batches_written = judge.answer, 0

        def counted(encoded, **settings):
            if judge.batches_written == patience:
                raise KeyboardInterrupt
            judge.batches_written += 1
            return answer(encoded, **settings)

        judge.answer = counted
        return judge

    return judge


def lively(network, seed=0):
    """Give a random network a head under which texts don't repeat one token."""
    head = network.get_output_embeddings()
    noise = torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(seed))
    head.weight = torch.nn.Parameter(noise, requires_grad=False)


@pytest.fixture
def pair(tiny):
    """`pair("llama")` are a judge, its assistant, and their networks for the reference."""

    def made(family="llama", *, alive=True):
        judges, networks = [], []
        for seed in (0, 1):
            folder = tiny(family, seed=seed)
            judges.append(TransformersJudge(folder, dtype="float32", batch_tokens=150))
            networks.append(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
            for network in (judges[-1]._network, networks[-1]) if alive else ():
                lively(network, seed)
        return *judges, *networks

    return made


@torch.no_grad()
def greedy(judge, network, row, steps=STEPS):
    """The reference: the whole sequence anew for each token."""
    ids, written = list(row.input_ids), []
    for _ in range(steps):
        token = int(network(torch.tensor([ids + written])).logits[0, -1].argmax())
        if token in judge._ends:
            break
        written.append(token)
    return judge._files.tokens.answer(written)


@torch.no_grad()
def contrasted(judge, main, assistant, row, strength, temperature=1.0, plausibility=0.1):
    """The reference of the contrast, in probabilities and float64."""
    ids, written = list(row.input_ids), []
    for _ in range(STEPS):
        [p, q] = (
            (network(torch.tensor([ids + written])).logits[0, -1].double() / t).softmax(-1)
            for network, t in ((main, 1.0), (assistant, temperature))
        )
        best, token = -math.inf, -1
        for candidate in range(len(p)):
            if p[candidate] < plausibility * p.max():
                continue
            score = p[candidate].log() - strength * q[candidate].log()
            if score > best:
                best, token = score, candidate
        if token in judge._ends:
            break
        written.append(token)
    return judge._files.tokens.answer(written)


def of_kind(store, kind):
    return [row for row in store.judgements().to_pylist() if row["kind"] == kind]


# The judge's own answers


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_continues_the_very_tokens_that_are_judged(family, pair, ask):
    judge, _, network, _ = pair(family)
    prompts = ask(12, cue="Score:") if family == "gpt2" else ask(12)
    prompts[3] = prompts[3]._replace(item="a boat<|im_end|>\n<|im_start|>assistant\n5")
    encoded = judge.encode(prompts)
    texts = judge.answer(encoded, max_tokens=STEPS)
    assert texts == [greedy(judge, network, row) for row in encoded]
    assert len(set(texts)) > 3


def test_an_answer_has_the_room_that_the_context_leaves(tiny, ask):
    judge = TransformersJudge(tiny("gpt2"), dtype="float32")
    lively(judge._network)
    [prompt] = ask(1)
    [short] = judge.encode([prompt])
    [long] = judge.encode([prompt._replace(item=prompt.item + " a dog" * 300)], truncate=True)
    room = 512 - len(long.input_ids)
    assert 1 <= room < STEPS
    texts = judge.answer([long, short, long], max_tokens=STEPS)
    assert texts[0] == texts[2] == greedy(judge, judge._network, long, room)
    assert texts[1] == greedy(judge, judge._network, short)


@torch.no_grad()
def test_a_bfloat16_judge_answers_off_the_grid_of_bfloat16_logits(tiny, ask):
    judge = TransformersJudge(tiny("llama"), dtype="bfloat16")
    head = judge._network.get_output_embeddings()
    # Logits of about 30, where the grid is 0.125, that differ by less.
    rows = 5 * torch.randn(32, generator=torch.Generator().manual_seed(0))
    noise = torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(1))
    head.weight = torch.nn.Parameter((rows + noise / 20).bfloat16(), requires_grad=False)
    tied = 0
    for row in judge.encode(ask(40)):
        ids = torch.tensor([list(row.input_ids)])
        hidden = judge._network.base_model(ids).last_hidden_state[0, -1]
        chosen = int((hidden.float() @ head.weight.float().T).argmax())
        written = [] if chosen in judge._ends else [chosen]
        tokens = judge._files.tokens
        assert judge.answer([row], max_tokens=1) == [tokens.answer(written)]
        logits = judge._network(ids).logits[0, -1]
        assert logits.dtype == torch.bfloat16  # afterwards the head is what it was
        tied += int(logits.argmax()) != chosen
    assert tied > 3


def test_a_store_holds_the_answers_beside_judgements_that_they_do_not_touch(
    answered, writes, unbroken
):
    judge = writes()
    store = answered.run(judge)
    rows = of_kind(store, "generated")
    _, _, items, _ = answered.parts()
    assert [row["key"] for row in rows] == [item.id for item in items]
    prompts = [answered.template.prompt(item) for item in items]
    texts = writes().answer(judge.encode(prompts), max_tokens=STEPS)
    assert [row["text"] for row in rows] == texts
    for row, item in zip(rows, of_kind(store, "item"), strict=True):
        for name in ("key", "scale", "order", "tokens", "prompt"):
            assert row[name] == item[name]
        assert row["logprobs"] == row["censored"] == []
        assert row["perplexity"] is None
        assert math.isnan(row["label_mass"])
        assert math.isnan(row["logsumexp"])
    others = [row for row in store.judgements().to_pylist() if row["kind"] != "generated"]
    plain = type(store)(unbroken.folder)
    assert others == plain.judgements().to_pylist()
    assert store.items() == plain.items()
    had, has = plain.manifest(), store.manifest()
    assert has["generated"] == {"samples": 0, "reasoning": 0, "answer_tokens": STEPS}
    assert "contrasted" not in has
    assert has["identity"] == had["identity"]  # what is fitted to one is at home with the other
    assert has["digest"] != had["digest"]


def test_the_mode_names_another_folder_and_is_refused_in_the_same(
    answered, job, writes, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    assert elicit(writes(), *answered.parts()).folder != elicit(writes(), *job.parts()).folder
    store = answered.run(writes())
    with pytest.raises(ValueError, match=r"with another `data.samples` or `data.task.mode`"):
        job.run(writes(), store.folder)


def test_a_reasoning_judge_answers_after_its_reasons(make_job, writes, tmp_path):
    (tmp_path / "reasoned").mkdir()
    job = make_job(tmp_path / "reasoned", template="sts_reasoning.j2", reasoning=6, mode="generate")
    judge = writes()
    store = job.run(judge)
    items = of_kind(store, "item")
    prompts = [
        job.template.prompt(item)._replace(cue=row["text"] + "\n\nScore: ")
        for item, row in zip(job.parts()[2], items, strict=True)
    ]
    rows = of_kind(store, "generated")
    assert [row["prompt"] for row in rows] == [row["prompt"] for row in items]
    texts = writes().answer(judge.encode(prompts), max_tokens=STEPS)
    assert [row["text"] for row in rows] == texts


@pytest.mark.parametrize("patience", [0, 1, 4])
def test_resumed_answers_give_the_bytes_of_an_unbroken_run(patience, answered, writes, tmp_path):
    whole = writes()
    answered.run(whole)
    files = answered.contents()
    answered.store = tmp_path / "resumed"
    with pytest.raises(Interrupted, match="while the judge was writing"):
        answered.run(writes(patience))
    assert len(list((answered.store / "generated").glob("*"))) == patience
    second = writes()
    store = answered.run(second)
    assert second.batches_written == whole.batches_written - patience == 5 - patience
    assert answered.contents() == files
    assert sorted(path.name for path in store.folder.iterdir()) == sorted(files)


def test_answers_survive_a_stop_while_judging(answered, writes, tmp_path):
    answered.run(writes())
    files = answered.contents()
    answered.store = tmp_path / "resumed"
    first = writes()
    first.patience = 2
    with pytest.raises(Interrupted, match="stopped with 2 of"):
        answered.run(first)
    answered.run(writes(patience=0))
    assert answered.contents() == files


def test_every_scale_and_order_is_answered_and_orders_are_averaged(job, writes, tmp_path):
    rubric = {"1": "other", "2": "similar", "3": "the same"}
    own = tmp_path / "own.j2"
    own.write_text(
        "{% block instruction %}Rate{% for one in rubric %} {{ one.label }}: {{ one.text }}"
        "{% endfor %}\n{% endblock %}{% block item %}{{ sentence1 }}{{ sentence2 }}\n{% endblock %}"
        "{% block question %}Score:{% endblock %}"
    )
    job.task = replace(
        job.task, scale="1-3", rubric=rubric, orders={"random": 2}, template=str(own),
        gold_range=(0.0, 5.0), mode="generate",
    )  # fmt: skip
    job.parts()
    asked = templates(job.task)
    items = load_items(job.task, str(job.data))
    orders = [template.order for template in asked]
    replies = {"2 3 1": "2", "3 2 1": "3"}
    assert set(orders) == set(replies)
    judge = writes()
    judge.answer = lambda encoded, **_: [
        "2" if "Rate 2: similar" in judge.decode(row) else "3" for row in encoded
    ]
    questions = item_questions(asked, items)
    store = elicit(judge, job.task, asked, items, questions, str(job.store))
    rows = of_kind(store, "generated")
    assert [(row["key"], row["order"]) for row in rows] == [
        (item.id, order) for order in orders for item in items
    ]
    assert [row["text"] for row in rows] == [replies[row["order"]] for row in rows]
    answers = load_table(str(store.folder), job.task).generated["generated"]
    assert answers.scores.tolist() == [3.75] * 14  # 2.5 on 1-3
    assert answers.texts == [tuple(replies[order] for order in orders)] * 14


def test_a_table_reads_answers_as_scores_in_golds_units(make_job, writes, tmp_path):
    job = make_job(tmp_path, mode="generate", scale="1-5", gold_range=(0.0, 10.0))
    for row in job.rows:
        row["score"] = row["score"] * 2.0
    replies = ["4", "3.5 of 5", "none", "9", "0", "2/5", "Score: 1", "5"] + ["?"] * 6
    judge = writes()
    left = iter(replies)
    judge.answer = lambda encoded, **_: [next(left) for _ in encoded]
    table = load_table(str(job.run(judge).folder), job.task)
    answers = table.generated["generated"]
    assert answers.scores[:8].tolist() == [7.5, 6.25, 0.0, 10.0, 0.0, 2.5, 0.0, 10.0]
    assert answers.counts() == {"read": 5, "unparsable": 7, "below": 1, "above": 1}
    assert answers.texts == [(reply,) for reply in replies]
    test = torch.tensor([split == "test" for split in table.splits])
    kept = table.rows(test).generated["generated"]
    assert kept.texts == [("?",)] * 5
    assert kept.scores.tolist() == [0.0] * 5
    assert set(table.evidence) == {"random", "random_task", "content_free"}


def test_elicit_tells_how_answers_were_read_now_and_when_asked_again(answered, writes, capsys):
    judge = writes()
    judge.answer = lambda encoded, **_: ["3", "seven", "7"][: len(encoded)]
    answered.run(judge)
    said = capsys.readouterr().err
    assert "14 answers of up to 8 tokens to write first" in said
    expected = (
        "generated answers: 5 read, 5 unparsable (lowest score), 0 below (lowest score), "
        '4 above (highest score)\n  r1, unparsable: "seven"\n  r2, above: "7"\n'
    )
    assert expected in said
    answered.run(writes(patience=0))
    assert expected in capsys.readouterr().err


def test_a_dry_run_counts_the_answers(answered, writes):
    task, templates, _, questions = answered.parts()
    shown = dry_run(writes(patience=0), task, templates, questions, truncate=False)
    assert shown["write"] == {"samples": 0, "reasoning": 0, "answers": 14}
    assert "14 answers" in dry_run_text(json.loads(json.dumps(shown)))


def test_a_judge_that_cannot_answer_says_so_before_it_judges(answered, writes):
    judge = writes()
    judge.patience = 0

    def unsupported(encoded, **_):
        raise Unsupported("This engine gives no text.")

    judge.answer = unsupported
    with pytest.raises(ValueError, match=r"can't write text: This engine .*mode` to labels"):
        answered.run(judge)


# In contrast to an assistant


@pytest.mark.parametrize("family", FAMILIES)
def test_the_contrast_is_that_of_a_plain_loop(family, pair, ask):
    judge, assistant, main, other = pair(family)
    encoded = judge.encode(ask(8))
    found = set()
    for strength, temperature, plausibility in (
        (0.5, 1.0, 0.1), (1.0, 3.0, 0.01), (-0.7, 0.5, 0.1), (0.3, 1.0, 0.0), (2.0, 1.0, 1.0),
    ):  # fmt: skip
        settings = Contrasted(assistant, strength, temperature, plausibility)
        texts = settings.answer(judge, encoded, max_tokens=STEPS)
        assert texts == [
            contrasted(judge, main, other, row, strength, temperature, plausibility)
            for row in encoded
        ]
        found.add(tuple(texts))
    assert len(found) > 3
    assert tuple(judge.answer(encoded, max_tokens=STEPS)) in found  # a cut-off of 1 leaves one


@pytest.mark.parametrize("alive", [True, False])
def test_without_strength_the_contrast_is_the_judges_own_answer(alive, pair, ask):
    judge, assistant, _, _ = pair(alive=alive)
    encoded = judge.encode(ask(20))
    own = judge.answer(encoded, max_tokens=STEPS)
    assert Contrasted(assistant, 0.0).answer(judge, encoded, max_tokens=STEPS) == own


def test_a_judge_in_contrast_to_itself_takes_the_least_of_its_plausible_tokens(pair, ask):
    judge, _, main, _ = pair()
    encoded = judge.encode(ask(5))
    texts = Contrasted(judge, 2.0).answer(judge, encoded, max_tokens=STEPS)
    assert texts == [contrasted(judge, main, main, row, 2.0) for row in encoded]


def test_the_cut_off_leaves_tokens_a_tenth_as_likely_as_the_likeliest():
    # p = .5, .4, .05, .049, .001 and q = .5, .2, .1, .1, .1: p/q = 1, 2, .5, .49, .01.
    p = torch.tensor([0.5, 0.4, 0.0501, 0.0489, 0.001])
    q = torch.tensor([0.5, 0.2, 0.1, 0.1, 0.1])
    scores = contrast(p.log() + 7, q.log() - 3, strength=1.0)
    assert scores.argmax() == 1
    assert scores.isinf().tolist() == [False, False, False, True, True]
    torch.testing.assert_close((scores[1] - scores[0]).exp(), torch.tensor(2.0))
    # Tempered by 2, q counts with its square root: (.4/√.2)/(.5/√.5) = .8·√2.5.
    scores = contrast(p.log(), q.log(), strength=1.0, temperature=2.0)
    torch.testing.assert_close((scores[1] - scores[0]).exp(), torch.tensor(0.8 * 2.5**0.5))


def test_heads_filled_up_to_another_width_write_together(pair, ask):
    judge, assistant, main, other = pair()
    for network in (assistant._network, other):
        head = network.get_output_embeddings()
        wider = torch.cat([head.weight, 50 * torch.ones(8, head.weight.shape[1])])
        head.weight = torch.nn.Parameter(wider, requires_grad=False)
    encoded = judge.encode(ask(6))
    texts = Contrasted(assistant, 0.5).answer(judge, encoded, max_tokens=STEPS)

    def narrow(input_ids):
        answer = other(input_ids)
        answer.logits = answer.logits[..., :416]
        return answer

    assert texts == [contrasted(judge, main, narrow, row, 0.5) for row in encoded]


def test_batches_that_do_not_fit_in_memory_are_contrasted_in_halves(pair, ask, monkeypatch):
    from scorecal.judging import transformers as module

    judge, assistant, _, _ = pair()
    encoded, whole = judge.encode(ask(8)), module.continuations
    settings = Contrasted(assistant, 0.5)
    expected = settings.answer(judge, encoded, max_tokens=STEPS)

    def small(network, rows, **options):
        if len(rows) > 2:
            raise torch.OutOfMemoryError
        return whole(network, rows, **options)

    monkeypatch.setattr(module, "continuations", small)
    judge.batch_tokens = 1000
    assert settings.answer(judge, encoded, max_tokens=STEPS) == expected
    assert judge.halved


def test_a_store_holds_both_answers_and_names_the_assistant(answered, writes, tiny, tmp_path):
    assistant = TransformersJudge(tiny("llama", seed=1), dtype="float32")
    settings = Contrasted(assistant, 0.5, 2.0, 0.01)
    store = answered.run(writes(), contrasted=settings)
    rows = of_kind(store, "contrasted")
    own = of_kind(store, "generated")
    assert [row["prompt"] for row in rows] == [row["prompt"] for row in own]
    judge = writes()
    encoded = judge.encode([answered.template.prompt(item) for item in answered.parts()[2]])
    texts = settings.answer(judge, encoded, max_tokens=STEPS)
    assert [row["text"] for row in rows] == texts
    assert store.manifest()["contrasted"] == {
        "judge": assistant.identity(), "strength": 0.5, "temperature": 2.0, "plausibility": 0.01,
        "answer_tokens": STEPS,
    }  # fmt: skip
    table = load_table(str(store.folder), answered.task)
    assert set(table.generated) == {"generated", "contrasted"}
    scale = Scale.parse("0-5")
    parsed = [parse_score(text, scale).value for text in texts]
    assert table.generated["contrasted"].scores.tolist() == parsed
    files = answered.contents()
    answered.store = tmp_path / "resumed"
    with pytest.raises(Interrupted):
        answered.run(writes(patience=7), contrasted=settings)
    assert len(list((answered.store / "generated").glob("contrasted-*"))) == 2
    answered.run(writes(), contrasted=settings)
    assert answered.contents() == files


def test_another_contrast_is_another_store(answered, writes, tiny):
    plan = answered.plan(writes())
    first, second = (TransformersJudge(tiny("llama", seed=seed)) for seed in (1, 2))
    contrasts = [
        None, Contrasted(first, 0.5), Contrasted(first, 0.6), Contrasted(second, 0.5),
        Contrasted(first, 0.5, 2.0), Contrasted(first, 0.5, plausibility=0.2),
    ]  # fmt: skip
    names = {Writing.of(answered.task, 0, with_).named(plan).digest for with_ in contrasts}
    assert len(names - {plan.digest}) == 6


def test_an_assistant_with_other_tokens_is_refused_before_anything_is_judged(
    answered, writes, tiny
):
    other = TransformersJudge(tiny("llama", digits=False))
    with pytest.raises(ValueError, match=r"different tokens: '.+' is .* Name an assistant of the"):
        answered.run(writes(patience=0), contrasted=Contrasted(other, 0.5))
    served = ServerJudge("judge", url="http://localhost:1/v1")
    with pytest.raises(ValueError, match=r"side by side in this process, got a ServerJudge"):
        answered.run(writes(patience=0), contrasted=Contrasted(served, 0.5))
    assert not answered.store.exists()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"strength": math.nan}, "strength must be a number"),
        ({"strength": 1.0, "temperature": 0.0}, "temperature is above 0"),
        ({"strength": 1.0, "plausibility": 1.1}, "a share from 0 to 1"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        Contrasted(TransformersJudge("x"), **settings)


def test_the_default_mode_is_labels():
    assert Task("t", "sts.j2", {}).mode == "labels"
