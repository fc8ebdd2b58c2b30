"""llama.cpp's server: the labels among the likeliest tokens, over HTTP; a quantised GGUF."""

import http.client
import json
import os
from urllib.parse import urlsplit

import xllamacpp
from process import Judge, Row, run

PROBS = (200, 2000, 20000)  # how many tokens to ask for, until no label is missing


def load(job: dict, facts: dict) -> Judge:
    params = xllamacpp.CommonParams()
    params.model.path = job["gguf"]
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.n_ctx = 2048
    params.n_parallel = 1  # its prefix cache belongs to a slot
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = os.cpu_count() or 1
    params.warmup = False  # the first prompt does it
    server = xllamacpp.Server(params)
    connection = http.client.HTTPConnection(urlsplit(server.listening_address).netloc)
    facts["quantised"] = True

    def ask(row: Row, probs: int) -> dict[int, float]:
        body = {"prompt": row["ids"], "n_predict": 1, "n_probs": probs, "cache_prompt": True}
        connection.request("POST", "/completion", json.dumps(body))
        answer = json.load(connection.getresponse())
        top = answer["completion_probabilities"][0]["top_logprobs"]
        return {token["id"]: token["logprob"] for token in top}

    def judge(rows: list[Row]) -> list[list[float]]:
        answers = []
        for row in rows:
            for probs in PROBS:
                found = ask(row, probs)
                if all(label in found for label in row["labels"]):
                    break
            answers.append([found[label] for label in row["labels"]])
        return answers

    # The server lives as long as something refers to it.
    judge.server = server  # type: ignore[attr-defined]
    return judge


if __name__ == "__main__":
    run(load, "xllamacpp")
