"""An offline engine as a process that answers on a socket: run with the peer's own Python, so it imports no PagedRay.

    PYTHON offline.py ENGINE MODEL SETTINGS_JSON SOCKET_FD

Each line that comes is a JSON list of [prompt token ids, tokens to generate]; each that goes is {"seconds": ...,
"output_tokens": ...}. The first that goes, once the model is loaded, is {}.
"""

import json
import socket
import sys
import time


def vllm(model, settings):
    from vllm import LLM, SamplingParams

    llm = LLM(model, **settings)

    def generate(requests):
        prompts = [{"prompt_token_ids": ids} for ids, _ in requests]
        sampling = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for _, n in requests]
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        return sum(len(choice.token_ids) for output in outputs for choice in output.outputs)

    return generate


def pagedray(model, settings):
    from pagedray import LLM, SamplingParams

    llm = LLM(model, use_tqdm=False, **settings)

    def generate(requests):
        sampling = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for _, n in requests]
        outputs = llm.generate([ids for ids, _ in requests], sampling, use_tqdm=False)
        return sum(len(choice.token_ids) for output in outputs for choice in output.outputs)

    return generate


def transformers(model, settings):
    """One static batch, padded on the left, as long as its longest answer; only the tokens asked for are counted."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(settings["threads"])
    decoder = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)

    @torch.inference_mode()
    def generate(requests):
        longest, most = max(len(ids) for ids, _ in requests), max(n for _, n in requests)
        ids = torch.tensor([[0] * (longest - len(ids)) + ids for ids, _ in requests])
        mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids, _ in requests])
        limits = {"max_new_tokens": most, "min_new_tokens": most, "do_sample": False, "pad_token_id": 0}
        out = decoder.generate(input_ids=ids, attention_mask=mask, **limits)
        assert out.shape[1] == longest + most, out.shape
        return sum(n for _, n in requests)

    return generate


def main():
    engine, model, settings, fd = sys.argv[1:]
    with socket.socket(fileno=int(fd)) as connection, connection.makefile("rw") as lines:
        generate = {"vllm": vllm, "pagedray": pagedray, "transformers": transformers}[engine](
            model, json.loads(settings)
        )
        print("{}", file=lines, flush=True)
        for line in lines:
            requests = json.loads(line)
            began = time.perf_counter()
            tokens = generate(requests)
            print(json.dumps({"seconds": time.perf_counter() - began, "output_tokens": tokens}), file=lines, flush=True)


if __name__ == "__main__":
    main()
