"""scorecal's own judge, from text: it tokenises and plans within the time measured."""

from process import Judge, Row, run

from scorecal.judging.judge import Prompt
from scorecal.judging.transformers import TransformersJudge


def prompt(row: Row) -> Prompt:
    *texts, labels = row["prompt"]
    return Prompt(*texts, tuple(map(tuple, labels)))


def load(job: dict, facts: dict) -> Judge:
    engine = TransformersJudge(job["judge"], dtype=job["dtype"], device="cpu")

    def judge(rows: list[Row]) -> list[list[float]]:
        prompts = [prompt(row) for row in rows]
        encoded = engine.encode(prompts)
        if [list(row.input_ids) for row in encoded] != [row["ids"] for row in rows]:
            raise SystemExit("scorecal reads other tokens than the job's")
        plan = engine.plan(prompts, encoded)
        facts["tokens_computed"] = sum(chunk.tokens for chunk in plan)
        answers: list[list[float]] = [[]] * len(rows)
        for chunk in plan:
            some = [prompts[index] for index in chunk.prompts]
            part = [encoded[index] for index in chunk.prompts]
            for answer in engine.judge_chunk(some, part, chunk.cuts):
                answers[chunk.prompts[answer.index]] = answer.logprobs.tolist()
        return answers

    return judge


if __name__ == "__main__":
    run(load, "transformers", "torch")
