"""What ``transformers`` makes of a checkpoint in float32: an opinion that shares no code with SGLang or with us.

``python opinion.py`` reads lines ``{"model": DIR, "ids": [[…], …]}`` and answers each with the log-probability of every
token but the first, per sequence, or with ``{"error": …}``. It knows BF16 checkpoints only: a 4-bit one has a BF16 twin of the same values.
"""

import json
import os
import sys

import torch


def logprobs(model: str, sequences: list[list[int]]) -> list[list[float]]:
    from transformers import AutoModelForCausalLM

    net = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    result = []
    for ids in sequences:
        tokens = torch.tensor([ids])
        with torch.no_grad():
            distribution = net(tokens).logits[0].double().log_softmax(-1)
        result.append(distribution[:-1].gather(-1, tokens[0, 1:, None])[:, 0].tolist())
    return result


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints is not an answer
    for line in sys.stdin:
        job = json.loads(line)
        try:
            answer = logprobs(job["model"], job["ids"])
        except Exception as error:  # a model that transformers cannot load is a finding, not the end of the others
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
