"""A judge behind HTTP, against a plain forward pass of the model that the server holds."""

import contextlib
import json
import logging
import math
import os
import pickle
import random
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from scorecal.judging import endpoint, next_tokens
from scorecal.judging import server as server_module
from scorecal.judging.judge import Unsupported
from scorecal.judging.labels import LabelTree, unlisted_bound
from scorecal.judging.server import ServerJudge
from scorecal.judging.transformers import TransformersJudge

KEY = "sk-this-must-not-be-seen"


class _Model:
    """The reference: the whole model, one sequence, every logit, log-softmax in float64."""

    def __init__(self, folder):
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.known = {}

    def ids(self, text):
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def turn_ids(self, text):
        chat = [{"role": "user", "content": text}]
        return self.ids(
            self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        )

    def prompt_ids(self, prompt):
        return self.turn_ids(prompt.before + prompt.item + prompt.after)

    @torch.inference_mode()
    def logprobs(self, ids):
        return self.network(torch.tensor([ids])).logits[0].double().log_softmax(-1)

    def after(self, ids):
        if tuple(ids) not in self.known:
            self.known[tuple(ids)] = self.logprobs(ids)[-1].clone()
        return self.known[tuple(ids)]

    def labels(self, prompt):
        """Log-probabilities of one-token labels."""
        tokens = [self.ids(form)[0] for level in prompt.labels for form in level]
        return self.after(self.prompt_ids(prompt))[tokens]


class _Server:
    """Speaks the protocol as one or another kind of server does, with or without faults.

    `exact` knows `logprob_token_ids`; `cap` is the longest list; `layout` is vllm, llama or text.
    """

    def __init__(self, model, **options):
        self.model = model
        self.exact, self.cap, self.layout = False, 10_000, "vllm"
        self.choices, self.silent, self.echo, self.tokenizes = False, False, False, True
        self.context, self.miscounts, self.key, self.names = 500, 0, None, ["tiny"]
        self.fault = lambda number: None
        for name, value in options.items():
            setattr(self, name, value)
        self.requests, self.lock = [], threading.Lock()

    def __enter__(self):
        served = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def log_message(self, *_):
                pass

            def do_GET(self):
                self.send(200, {"data": [{"id": name} for name in served.names]})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with served.lock:
                    served.requests.append((self.path, body, time.monotonic()))
                    number = len(served.requests)
                served.reply(self, body, served.fault(number))

            def send(self, status, content, headers=(), cut=0):
                data = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                for name, value in [("Content-Type", "application/json"), *headers]:
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data[: len(data) - cut])
                self.close_connection = cut > 0

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.02,))
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()

    def reply(self, handler, body, fault):
        def error(status, message, headers=()):
            handler.send(status, {"error": {"message": message}}, headers)

        if self.key and handler.headers["Authorization"] != f"Bearer {self.key}":
            return error(401, f"Incorrect key: {handler.headers['Authorization']}")
        if fault == "drop":
            handler.connection.shutdown(socket.SHUT_RDWR)
            handler.close_connection = True
            return None
        if fault in (429, 500, 503):
            return error(fault, "busy", [("Retry-After-Ms", "1")])
        if isinstance(fault, tuple):
            return error(fault[0], "busy", [("Retry-After", fault[1])])
        if handler.path.endswith("/tokenize"):
            if not self.tokenizes:
                return error(404, "no such path")
            return handler.send(200, {"tokens": self.model.ids(body["prompt"])})
        if self.layout != "llama" and body["model"] not in self.names:
            return error(404, f"The model `{body['model']}` does not exist.")
        try:
            answer = self.answer(handler.path, body, wrong=fault == "wrong")
        except ValueError as refusal:
            return error(400, str(refusal))
        content = json.dumps(answer)
        if fault == "nan":
            content = content.replace('"top_logprobs": [{', '"top_logprobs": [{"x": NaN, ')
        if fault == "no json":
            content = content[: len(content) // 2]
        return handler.send(200, content.encode(), cut=9 if fault == "half" else 0)

    def answer(self, path, body, *, wrong):
        chat = path.endswith("/chat/completions")
        if chat:
            rows = [self.model.turn_ids(body["messages"][0]["content"])]
        else:
            given = body["prompt"]
            rows = [given] if isinstance(given, str) or isinstance(given[0], int) else given
            rows = [self.model.ids(row) if isinstance(row, str) else row for row in rows]
        if max(map(len, rows)) > self.context:
            raise ValueError(f"This model's maximum context length is {self.context} tokens.")
        width = body.get("top_logprobs", body.get("logprobs")) or 0
        if width > self.cap:
            raise ValueError(f"Requested logprobs of {width}, greater than {self.cap}")
        choices = [self.choice(row, body, chat, width, wrong) for row in rows]
        return {
            "model": self.names[0],
            "choices": [{"index": at, **choice} for at, choice in enumerate(choices)][::-1],
            "usage": {"prompt_tokens": sum(map(len, rows)) + self.miscounts},
        }

    def choice(self, row, body, chat, width, wrong):
        logprobs = self.model.after(row)
        said = {"text": f"seed {body.get('seed')}"}
        if chat:
            said = {"message": {"role": "assistant", "content": said["text"]}}
        if self.silent or not width:
            return said
        if body.get("echo") and self.echo:
            steps = self.model.logprobs(row)
            values = [steps[at, token].item() for at, token in enumerate(row[1:])]
            return {**said, "logprobs": {"token_logprobs": [None, *values]}}
        allowed = self.choices and body.get("structured_outputs")
        if allowed:
            tokens = [self.model.ids(text)[0] for text in allowed["choice"]]
            masked = torch.full_like(logprobs, -1e9)
            masked[tokens] = logprobs[tokens]
            logprobs = masked.log_softmax(-1).clamp(min=-9999)
        top = logprobs.topk(min(width, len(logprobs))).indices.tolist()
        if self.exact and "logprob_token_ids" in body:
            top = list(dict.fromkeys([*top[:1], *body["logprob_token_ids"]]))
        top = [] if wrong else top
        texts = [self.model.tokenizer.decode([token]) for token in top]
        values = logprobs[top].tolist()
        if chat or self.layout == "llama":
            entries = [
                {"token": text, "logprob": value, **({"id": token} if not chat else {})}
                for token, text, value in zip(top, texts, values, strict=True)
            ]
            return {**said, "logprobs": {"content": [{"top_logprobs": entries}]}}
        if self.layout == "vllm" and body.get("return_tokens_as_token_ids"):
            texts = [f"token_id:{token}" for token in top]
        return {**said, "logprobs": {"top_logprobs": [dict(zip(texts, values, strict=True))]}}


@pytest.fixture(scope="module")
def model(tiny):
    return _Model(tiny("qwen2"))


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch):
    monkeypatch.setattr(endpoint, "_FIRST_WAIT", 0.001)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)


def judge_of(server, tiny=None, **options):
    tokenizer = {} if tiny is None else {"tokenizer": tiny("qwen2")}
    return ServerJudge(**{"model": "tiny", "url": server.url, **tokenizer, **options})


def judged(judge, prompts):
    answers = sorted(judge.judge(prompts), key=lambda answer: answer.index)
    assert [answer.index for answer in answers] == list(range(len(prompts)))
    return answers


def expect_labels(model, prompts, answers, tolerance=1e-5):
    for prompt, answer in zip(prompts, answers, strict=True):
        wanted = model.labels(prompt)
        torch.testing.assert_close(answer.logprobs.double(), wanted, atol=tolerance, rtol=0)
        assert not answer.censored.any()
        assert answer.label_mass == pytest.approx(wanted.exp().sum().item(), abs=1e-5)


# What servers can do


@pytest.mark.parametrize(
    ("server", "said"),
    [
        ({"exact": True, "cap": 20}, "gives the label tokens' log-probabilities, exact"),
        ({"layout": "llama"}, "lists the 200 likeliest tokens, more where a label is missing"),
        ({"layout": "text"}, "lists the 200 likeliest tokens, more where a label is missing"),
        ({"cap": 10, "choices": True}, "10 likeliest tokens; labels that are missing there come"),
    ],
)
def test_labels_equal_a_full_log_softmax_whatever_way_they_are_read(
    server, said, model, tiny, ask, capsys
):
    prompts = ask(40)
    with _Server(model, **server) as served:
        judge = judge_of(served, tiny)
        answers = judged(judge, prompts)
        if served.choices:  # where its list holds no label, the mass is unknown
            known = [not math.isnan(answer.label_mass) for answer in answers]
            for prompt, answer in zip(prompts, answers, strict=True):
                wanted = model.labels(prompt).log_softmax(-1)
                ratios = answer.logprobs.double().log_softmax(-1)
                torch.testing.assert_close(ratios, wanted, atol=1e-5, rtol=0)
            prompts = [prompt for prompt, kept in zip(prompts, known, strict=True) if kept]
            answers = [answer for answer, kept in zip(answers, known, strict=True) if kept]
            assert prompts
        expect_labels(model, prompts, answers)
    assert said in capsys.readouterr().err
    assert said in judge.engine()["logprobs"]


def test_more_tokens_are_asked_for_while_a_label_is_missing(model, tiny, ask, monkeypatch):
    monkeypatch.setattr(next_tokens, "_WIDTHS", (4,))
    with _Server(model, layout="llama") as served:
        expect_labels(model, ask(20), judged(judge_of(served, tiny), ask(20)))
    widths = {body.get("logprobs") for _, body, _ in served.requests}
    assert {4, 40} <= widths
    assert max(width or 0 for width in widths) <= 4000


def test_labels_beyond_the_longest_list_are_bounded(model, tiny, ask):
    prompts = ask(30)
    with _Server(model, cap=5) as served:
        answers = judged(judge_of(served, tiny), prompts)
    assert any(answer.censored.any() for answer in answers)
    for prompt, answer in zip(prompts, answers, strict=True):
        top = model.after(model.prompt_ids(prompt)).topk(5).values
        bound = min(top[-1].item(), math.log(1 - top.exp().sum().item()))
        wanted = model.labels(prompt)
        gone = wanted < top[-1] - 1e-9
        assert answer.censored.equal(gone)
        expected = torch.where(gone, bound, wanted)
        torch.testing.assert_close(answer.logprobs.double(), expected, atol=1e-4, rtol=0)
        assert answer.label_mass == pytest.approx(wanted[~gone].exp().sum().item(), abs=1e-5)
        assert bool((wanted[gone] <= bound).all())


@pytest.mark.parametrize("server", [{"exact": True}, {"layout": "llama"}])
@pytest.mark.parametrize("scale", ["1-10", "0-100"])
def test_labels_of_several_tokens_are_disjoint_events(server, scale, model, tiny, ask):
    prompts = ask(4, scale)
    with _Server(model, **server) as served:
        answers = judged(judge_of(served, tiny), prompts)
    for prompt, answer in zip(prompts, answers, strict=True):
        start = model.prompt_ids(prompt)
        forms = [model.ids(form) for (form,) in prompt.labels]
        assert max(map(len, forms)) > 1
        mass = {}
        for form in forms:
            steps = [model.after(start + form[:at])[form[at]] for at in range(len(form))]
            mass[tuple(form)] = sum(steps).exp().item()
        own = [
            mass[tuple(form)] - sum(mass[tuple(other)] for other in forms if other[:-1] == form)
            for form in forms
        ]
        torch.testing.assert_close(
            answer.logprobs.double().exp(), torch.tensor(own).double(), atol=1e-6, rtol=1e-4
        )
        assert answer.label_mass <= 1


def test_surface_forms_of_a_level_add_up(model, tiny, ask):
    [prompt] = ask(1)
    both = prompt._replace(labels=(("0", "1"), ("2",), ("3",)))
    with _Server(model, exact=True) as served:
        [answer] = judged(judge_of(served, tiny), [both])
    wanted = model.labels(prompt)[:2].logsumexp(0).item()
    assert answer.logprobs[0].item() == pytest.approx(wanted, abs=1e-5)


def test_without_a_tokenizer_labels_are_read_by_their_text(model, ask):
    prompts = ask(20)
    with _Server(model) as served:
        judge = judge_of(served)
        expect_labels(model, prompts, judged(judge, prompts))
    assert all(path != "/v1/completions" for path, _, _ in served.requests)
    assert judge.identity() == {
        "judge": "tiny",
        "revision": "served",
        "dtype": "served",
        "tokenizer": "server",
        "chat_template": "server",
    }


def test_a_step_that_is_only_bounded_takes_no_mass_from_a_shorter_label():
    tree = LabelTree([[[1]], [[1, 0]], [[2]]])
    step = {(1,): math.log(0.5), (1, 0): math.log(0.2), (2,): math.log(0.1)}
    # By hand: "1" is 0.5 − 0.1 = 0.4 where "10" is known, at most 0.5 where it is bounded.
    assert tree.level_logprobs(step).exp().tolist() == pytest.approx([0.4, 0.1, 0.1])
    assert tree.level_logprobs(step, {(1, 0)}).exp().tolist() == pytest.approx([0.5, 0.1, 0.1])
    assert tree.censored({(1, 0)}).tolist() == [True, True, False]


def test_the_bound_is_the_lowest_listed_or_what_is_left():
    assert unlisted_bound([math.log(0.5), math.log(0.3)]) == pytest.approx(math.log(0.2))
    assert unlisted_bound([math.log(0.5), math.log(0.1)]) == pytest.approx(math.log(0.1))


# Beside judging


def test_the_plan_puts_prompts_that_begin_alike_together(model, tiny, ask):
    judge = ServerJudge("tiny", "http://localhost:1/v1", tiny("qwen2"))
    prompts = ask(300)
    encoded = judge.encode(prompts)
    plan = judge.plan(prompts, encoded)
    assert [len(chunk.prompts) for chunk in plan] == [256, 44]
    order = [index for chunk in plan for index in chunk.prompts]
    assert [encoded[i].input_ids for i in order] == sorted(row.input_ids for row in encoded)


def test_perplexity_is_that_of_the_words_inside_the_user_turn(model, tiny):
    texts = ["Rate the boat.", "a number from 0 to 5, which the old man sees"]
    with _Server(model, echo=True) as served:
        found = judge_of(served, tiny).perplexity(texts)
    for text, value in zip(texts, found.tolist(), strict=True):
        row, bare = model.turn_ids(text), len(model.ids("<|im_start|>user\n"))
        tail = len(model.ids("<|im_end|>\n<|im_start|>assistant\n"))
        steps = model.logprobs(row)
        own = [-steps[at - 1, row[at]].item() for at in range(bare, len(row) - tail)]
        assert value == pytest.approx(math.exp(sum(own) / len(own)), rel=1e-6)


@pytest.mark.parametrize("server", [{}, {"layout": "llama"}, {"cap": 0}])
def test_a_server_without_prompt_logprobs_says_so(server, model, tiny):
    with _Server(model, **server) as served, pytest.raises(Unsupported, match="gives no prompt"):
        judge_of(served, tiny).perplexity(["one", "two"])


def test_every_generated_text_has_its_own_seed(model, tiny):
    with _Server(model) as served:
        for judge in (judge_of(served), judge_of(served, tiny)):
            texts = judge.generate(["a", "a"], max_tokens=4, temperature=1.0, seed=7)
            assert texts == ["seed 7", "seed 8"]


def test_an_answer_is_asked_for_greedily_after_the_very_prompt(model, tiny, ask):
    [prompt] = ask(1)
    with _Server(model) as served:
        for judge in (judge_of(served), judge_of(served, tiny)):
            [row] = judge.encode([prompt])
            assert judge.answer([row], max_tokens=16) == ["seed None"]
            [*_, (path, body, _)] = served.requests
            assert (body["max_tokens"], body["temperature"]) == (16, 0.0)
            if path.endswith("chat/completions"):
                assert body["messages"][0]["content"] == row.text
            else:
                assert body["prompt"] == list(row.input_ids)


def test_time_and_cost_are_estimated_from_one_wave_of_requests(model, tiny, ask):
    prompts = ask(40)
    with _Server(model) as served:
        judge = judge_of(served, tiny, price=2.0, concurrency=40)
        encoded = judge.encode(prompts)
        expected = judge.expected(prompts, encoded)
    tokens = sum(len(row.input_ids) for row in encoded)
    assert expected["cost"] == pytest.approx(tokens * 2e-6)
    assert 0 < expected["seconds"] < 60


# Faults


def test_a_judge_waits_as_long_as_retry_after_says(model, tiny, ask):
    with _Server(model, exact=True) as served:
        judge = judge_of(served, tiny, concurrency=1)
        judged(judge, ask(1))
        last = len(served.requests)
        served.fault = lambda number: (429, "1") if number == last + 1 else None
        expect_labels(model, ask(1), judged(judge, ask(1)))
    (_, first, refused_at), (_, second, again_at) = served.requests[last:]
    assert first == second
    assert again_at - refused_at >= 1


def test_nothing_is_lost_or_scored_twice_in_a_thousand_faulty_requests(
    model, tiny, ask, monkeypatch
):
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.001)
    source = random.Random(0)
    kinds = [429, 500, "half", "drop", "wrong", "nan", "no json"]
    faults = [source.choice(kinds) if source.random() < 0.25 else None for _ in range(20_000)]
    prompts = ask(60)
    with _Server(model, exact=True) as served:
        judge = judge_of(served, tiny, prompts_per_request=1, retries=12)
        judged(judge, prompts[:1])
        served.fault = faults.__getitem__
        while len(served.requests) < 1000:
            expect_labels(model, prompts, judged(judge, prompts))


def test_a_server_that_stays_broken_ends_in_one_line(model, tiny, ask):
    with _Server(model, exact=True) as served:
        judge = judge_of(served, tiny, retries=2)
        judged(judge, ask(1))
        served.fault = lambda number: "nan"
        with pytest.raises(ValueError, match=r"no usable answer in 3 tries: .*same command"):
            judged(judge, ask(3))
        served.fault = lambda number: 500
        with pytest.raises(ValueError, match=r"failed 3 times \(500\): busy"):
            judged(judge, ask(3))


# Errors


def test_a_server_that_is_down_is_named_at_once(tiny, ask):
    judge = ServerJudge("tiny", "http://127.0.0.1:9/v1", tiny("qwen2"))
    with pytest.raises(
        ValueError, match=r"can't reach the server http://127.0.0.1:9/v1: .*refused"
    ):
        judged(judge, ask(1))


@pytest.mark.parametrize("layout", ["vllm", "llama"])  # llama.cpp takes any name
def test_a_wrong_model_name_is_answered_with_the_right_ones(layout, model, tiny, ask):
    with (
        _Server(model, layout=layout, names=["smol", "big"]) as served,
        pytest.raises(ValueError, match=r"no model 'tiny'.* serves big, smol.*data.judge.model"),
    ):
        judged(judge_of(served, tiny), ask(1))


def test_a_prompt_beyond_the_context_is_named(model, tiny, ask):
    prompts = ask(30)
    prompts[17] = prompts[17]._replace(item="boat " * 150)
    with (
        _Server(model, exact=True, context=120) as served,
        pytest.raises(ValueError, match=r"dev.jsonl row 18: This model's maximum context.*Shorten"),
    ):
        judged(judge_of(served, tiny), prompts)


def test_a_server_without_logprobs_is_refused_at_the_first_request(model, tiny, ask):
    with _Server(model, silent=True) as served:
        for judge in (judge_of(served), judge_of(served, tiny)):
            with pytest.raises(ValueError, match="answers without log-probabilities"):
                judged(judge, ask(300))


@pytest.mark.parametrize("server", [{}, {"tokenizes": False, "miscounts": 3}])
def test_another_tokenizer_than_the_servers_is_refused(server, model, tiny, ask):
    with (
        _Server(model, exact=True, **server) as served,
        pytest.raises(ValueError, match=r"the tokenizer .* is not that of 'tiny'"),
    ):
        judged(ServerJudge("tiny", served.url, tiny("qwen2", digits=False, bos=True)), ask(1))


def test_what_a_chat_endpoint_cannot_judge_is_refused(model, ask):
    with _Server(model) as served:
        judge = judge_of(served)
        with pytest.raises(ValueError, match="can't begin its answer with the template's cue"):
            judged(judge, ask(1, cue="Score:"))
        with pytest.raises(ValueError, match="label '1' can't be told from one that begins"):
            judged(judge, ask(1, scale="1-10"))
        [prompt] = ask(1)
        served.cap = 20
        with pytest.raises(ValueError, match=r"label '\d0' in several tokens"):
            judged(judge, [prompt._replace(labels=tuple((f"{n}0",) for n in range(1, 10)))])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": None}, "no judge is named"),
        ({"url": ""}, "Set `data.judge.init_args.url` or OPENAI_BASE_URL"),
        ({"url": "localhost:8000"}, "begins with http"),
        ({"url": "http://me:secret@host/v1"}, "holds no password"),
        ({"chat_template": "plain"}, "Set `data.judge.init_args.tokenizer` too"),
        ({"concurrency": 0}, "concurrency` is at least 1"),
    ],
)
def test_settings_that_cannot_work_are_refused(options, words, ask, monkeypatch):
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    with pytest.raises(ValueError, match=words) as raised:
        judged(ServerJudge(**{"model": "m", "url": "http://127.0.0.1:9/v1", **options}), ask(1))
    assert "secret" not in str(raised.value)


def test_a_missing_client_package_is_one_line(ask, monkeypatch):
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(ValueError, match=r"pip install 'scorecal\[server\]'"):
        judged(ServerJudge("m", "http://127.0.0.1:9/v1"), ask(1))


def test_the_key_is_seen_by_the_server_only(model, tiny, ask, caplog, capsys, monkeypatch):
    caplog.set_level(logging.DEBUG)
    with _Server(model, exact=True, key=KEY) as served:
        judge = judge_of(served, tiny)
        judged(judge, ask(2))
        monkeypatch.setenv("OPENAI_API_KEY", KEY + "-wrong")
        other = judge_of(served, tiny)
        with pytest.raises(ValueError, match=r"refuses the API key \(401\).*OPENAI_API_KEY") as no:
            judged(other, ask(1))
    seen = [judge.identity(), judge.engine(), repr(judge), vars(judge), no.getrepr(), caplog.text]
    assert KEY not in " ".join(map(str, [*seen, *capsys.readouterr()]))
    assert KEY.encode() not in pickle.dumps(judge)


def test_a_store_goes_on_after_a_server_broke_down_and_holds_no_key(
    job, model, tiny, monkeypatch, capsys
):
    monkeypatch.setattr(server_module, "_CHUNK", 5)
    broken = lambda number: 500 if number > 12 else None  # noqa: E731
    with _Server(model, exact=True, key=KEY, echo=True, fault=broken) as served:
        judge = judge_of(served, tiny, retries=0, price=2.0)
        with pytest.raises(ValueError, match=r"failed 1 times \(500\).*Run the same command"):
            job.run(judge)
        kept = len(list((job.store / "parts").iterdir()))
        assert 0 < kept < 7
        served.fault = lambda number: None
        asked = len(served.requests)
        store = job.run(judge)
        again = len(served.requests) - asked
        job.run(judge)  # finished: not a request more
        assert len(served.requests) - asked == again
    assert "about $0.0" in capsys.readouterr().err
    rows = store.judgements().to_pylist()
    assert len(rows) == 33
    plain = TransformersJudge(tiny("qwen2"), dtype="float32")
    prompts = [question.prompt for question in job.parts()[3]]
    for answer in plain.judge(prompts):
        assert rows[answer.index]["logprobs"] == pytest.approx(answer.logprobs.tolist(), abs=1e-4)
    assert rows[14]["perplexity"] > 0
    for file in job.store.parent.rglob("*"):
        assert file.is_dir() or KEY.encode() not in file.read_bytes()


# Real servers


@contextlib.contextmanager
def _started(command, **environment):
    """A server's process and its URL, once it answers."""
    import urllib.request

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [*command, str(port)],
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(600):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5).close()
                break
            assert process.poll() is None, f"{command} ended"
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(60)


def _given(name):
    value = os.environ.get(name)
    if not value:
        pytest.skip(f"{name} is not set")
    return value


def _real_prompts(ask, count):
    return [prompt._replace(where="") for prompt in ask(count, seed=1)]


@pytest.mark.server
def test_vllm_gives_the_same_labels_as_the_plain_model(ask):
    folder, python = _given("SCORECAL_JUDGE"), _given("SCORECAL_VLLM_PYTHON")
    options = "--dtype float32 --enforce-eager --block-size 32 --max-model-len 2048"
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", folder,
               "--served-model-name", "judge", *options.split(), "--host", "127.0.0.1",
               "--port"]  # fmt: skip
    settings = {
        "VLLM_CPU_OMP_THREADS_BIND": "0-1",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    model, prompts = _Model(folder), _real_prompts(ask, 200)
    with _started(command, **settings) as url:
        judge = ServerJudge("judge", url, folder, timeout=600.0)
        answers = judged(judge, prompts)
        assert "exact" in judge.engine()["logprobs"]
        for prompt, answer in zip(prompts, answers, strict=True):
            wanted = model.labels(prompt).exp()
            assert (answer.logprobs.double().exp() - wanted).abs().max() < 1e-4
        texts = ["Give a number from 0 to 5.", "Which integer between 0 and 5?"]
        perplexity = judge.perplexity(texts)
        assert bool((perplexity > 1).all())
        chat = ServerJudge("judge", url, timeout=600.0)  # top 20 and restricted answers
        for prompt, answer in zip(prompts[:8], judged(chat, prompts[:8]), strict=True):
            ratios = answer.logprobs.double().softmax(-1)
            assert (ratios - model.labels(prompt).softmax(-1)).abs().max() < 1e-3
            assert not answer.censored.any()


_LLAMA = """
import sys, threading, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.model_alias = sys.argv[1], {"judge"}
params.hostnames, params.port = ["127.0.0.1"], int(sys.argv[2])
params.n_ctx, params.n_parallel, params.endpoint_slots = 4096, 2, False
server = xllamacpp.Server(params)
threading.Event().wait()
"""


@pytest.mark.server
def test_llama_cpp_lists_every_label(ask):
    folder, gguf = _given("SCORECAL_JUDGE"), _given("SCORECAL_GGUF")
    command = [_given("SCORECAL_LLAMACPP_PYTHON"), "-c", _LLAMA, gguf]
    model, prompts = _Model(folder), _real_prompts(ask, 24)
    with _started(command) as url:
        judge = ServerJudge("judge", url, folder, concurrency=2, prompts_per_request=4)
        answers = judged(judge, prompts)
        for prompt, answer in zip(prompts, answers, strict=True):
            assert not answer.censored.any()
            # Four-bit weights are another judge: near, not equal.
            wanted = model.labels(prompt).exp()
            assert (answer.logprobs.double().exp() - wanted).abs().max() < 0.1
        with pytest.raises(Unsupported, match="no prompt log-probabilities"):
            judge.perplexity(["Give a number."])
        with pytest.raises(ValueError, match="serves judge"):
            judged(ServerJudge("another", url, folder), prompts[:1])
