"""Model "auto" of the default service: its configuration describes the demo adapters."""

from __future__ import annotations

import httpx
import pytest

from tests.e2e.process import ServiceProcess

pytestmark = pytest.mark.e2e

#: Prompts that are not in any description, each a tenth or more from the threshold.
WANTED = {
    "sql": "How many customers live in Oslo?",  # the README's
    "support": "Hello, there is a mistake on the invoice for my vase. Ticket ML-21637, Sofia",
    "extract": "Simon Nguyen here. Can I order 95 scooters for Tuesday?",
    "base": "What should I know about black holes?",
}


def test_the_default_service_chooses_among_the_demo_adapters(demo: ServiceProcess) -> None:
    for name, prompt in WANTED.items():
        body = {"model": "auto", "messages": [{"role": "user", "content": prompt}], "max_tokens": 4}
        answer = httpx.post(f"{demo.url}/v1/chat/completions", json=body, timeout=300)
        assert answer.status_code == 200, answer.text
        routing = answer.json()["routing"]
        assert routing["num_candidates"] == 4
        assert [one["name"] for one in routing["adapters"]] == ([] if name == "base" else [name]), routing
        assert answer.headers["X-Polylora-Route"].partition("=")[0] == name
