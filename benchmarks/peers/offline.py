"""vLLM's offline engine with prefix caching and the log-probabilities of chosen tokens."""

import os

from process import Judge, Row, run

# Without these it uses one thread of two and never caches a short prompt.
os.environ |= {
    "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


def load(job: dict, facts: dict) -> Judge:
    from vllm import LLM, SamplingParams

    engine = LLM(
        job["judge"],
        dtype=job["dtype"],
        enforce_eager=True,
        block_size=32,
        enable_prefix_caching=True,
        max_model_len=2048,
    )

    def judge(rows: list[Row]) -> list[list[float]]:
        prompts = [{"prompt_token_ids": row["ids"]} for row in rows]
        sampling = [
            SamplingParams(max_tokens=1, temperature=0, logprob_token_ids=row["labels"])
            for row in rows
        ]
        answers = engine.generate(prompts, sampling, use_tqdm=False)
        return [
            [answer.outputs[0].logprobs[0][label].logprob for label in row["labels"]]
            for row, answer in zip(rows, answers, strict=True)
        ]

    return judge


if __name__ == "__main__":
    run(load, "vllm-cpu", "torch")
