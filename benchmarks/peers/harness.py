"""lm-evaluation-harness: the log-likelihood of each label, by its own batching."""

import os

from lm_eval.models.huggingface import HFLM
from process import Judge, Row, run


def load(job: dict, facts: dict) -> Judge:
    model = HFLM(pretrained=job["judge"], dtype=job["dtype"], device="cpu", batch_size=job["batch"])
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    vocabulary = model.model.get_output_embeddings().weight.shape[0]

    def judge(rows: list[Row]) -> list[list[float]]:
        # It keeps float32 logits of every token, twice: a user halves the batch until they fit.
        longest = max(len(row["ids"]) for row in rows)
        batch = job["batch"]
        while batch > 1 and batch * longest * vocabulary * 8 > memory / 4:
            batch //= 2
        model.batch_size_per_gpu = facts["batch"] = batch
        requests = [(("", ""), row["ids"], [label]) for row in rows for label in row["labels"]]
        likelihoods = model._loglikelihood_tokens(requests, disable_tqdm=True)
        values = iter(likelihood for likelihood, _ in likelihoods)
        return [[next(values) for _ in row["labels"]] for row in rows]

    return judge


if __name__ == "__main__":
    run(load, "lm_eval", "transformers", "torch")
