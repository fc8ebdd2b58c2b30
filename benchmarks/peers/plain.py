"""Plain transformers: left-padded batches of similar length; a batch of one is the plain loop."""

import torch
from process import Judge, Row, run
from transformers import AutoModelForCausalLM


def load(job: dict, facts: dict) -> Judge:
    size = facts["batch"] = job["batch"]
    network = AutoModelForCausalLM.from_pretrained(job["judge"], dtype=getattr(torch, job["dtype"]))
    network.eval()

    @torch.inference_mode()
    def judge(rows: list[Row]) -> list[list[float]]:
        answers: list[list[float]] = [[]] * len(rows)
        order = sorted(range(len(rows)), key=lambda index: -len(rows[index]["ids"]))
        for start in range(0, len(order), size):
            batch = order[start : start + size]
            width = len(rows[batch[0]]["ids"])
            pads = [width - len(rows[index]["ids"]) for index in batch]
            ids = [[0] * pad + rows[index]["ids"] for pad, index in zip(pads, batch, strict=True)]
            mask = torch.tensor([[0] * pad + [1] * (width - pad) for pad in pads])
            logits = network(
                torch.tensor(ids),
                attention_mask=mask,
                position_ids=(mask.cumsum(-1) - 1).clamp(min=0),
                logits_to_keep=1,
                use_cache=False,
            ).logits[:, -1]
            logprobs = logits.float().log_softmax(-1)
            for index, row in zip(batch, logprobs, strict=True):
                answers[index] = row[rows[index]["labels"]].tolist()
        return answers

    return judge


if __name__ == "__main__":
    run(load, "transformers", "torch")
