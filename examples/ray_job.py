"""Another Ray job that uses a running service: no HTTP, no copy of the model.

    RAY_AUTH_MODE=token RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 python examples/ray_job.py "the quick brown fox" [adapter]

So it finds what `polylora serve` started on this machine. In a cluster of `ray start` run it on one of its machines,
without the second variable. It generates once, for a list, and as a stream, and sends a chat and token ids; with an
adapter's name it uses that adapter.
"""

from __future__ import annotations

import sys

import ray
from ray import serve


def main(text: str, adapter: str | None) -> None:
    ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
    service = serve.get_app_handle("polylora")

    names = [entry["id"] for entry in service.list_adapters.remote().result()]
    print("adapters:", ", ".join(names))

    greedy = {"max_new_tokens": 24, "temperature": 0.0}
    answer = service.generate.remote(text, greedy, adapter).result()
    print("one:", repr(answer["text"]), answer["meta_info"]["finish_reason"])

    # A list of texts, each with an adapter of its own or none; answers come back in order.
    answers = service.generate.remote([text, text], greedy, [None, adapter]).result()
    for result in answers:
        print("many:", result["meta_info"]["lora"], repr(result["text"]))

    pieces = service.options(stream=True).stream.remote(text, greedy, adapter)
    print("stream:", repr("".join(pieces)))

    # The calls below take the fields of OpenAI's API, and return its objects.
    messages = [{"role": "user", "content": text}]
    fields = {"max_tokens": 8, "temperature": 0.0}
    choice = service.chat.remote(messages, adapter, logprobs=True, **fields).result()["choices"][0]
    print("chat:", repr(choice["message"]["content"]))
    print("log-probabilities:", *[round(entry["logprob"], 3) for entry in choice["logprobs"]["content"]])
    events = service.options(stream=True).stream_chat.remote(messages, adapter, **fields)
    print("chat stream:", repr("".join(event["choices"][0]["delta"].get("content", "") for event in events)))
    completion = service.complete.remote([5, 6, 7], adapter, return_token_ids=True, **fields).result()
    print("token ids:", *completion["choices"][0]["token_ids"])
    try:
        service.chat.remote(messages, "no such adapter").result()
    except LookupError as error:
        print("error:", str(error).splitlines()[-1])


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None)
