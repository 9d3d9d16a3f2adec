"""Two tenants in a minute, with OpenAI's own client: projects, keys, a limit, and the usage of each.

    POLYLORA_ADMIN_KEY=$(polylora create-admin-key) python examples/tenants.py

Needs a running service and its admin key. Everything here is OpenAI's admin API; only the fairness weight is our own
(`/v1/tenants`).
"""

from __future__ import annotations

import os
import time

import httpx
from openai import OpenAI, RateLimitError

URL = os.environ.get("POLYLORA_URL", "http://127.0.0.1:8000/v1")
ADMIN_KEY = os.environ["POLYLORA_ADMIN_KEY"]


def main() -> None:
    admin = OpenAI(base_url=URL, admin_api_key=ADMIN_KEY, api_key="none").admin.organization
    started = int(time.time())
    keys: dict[str, str] = {}
    for name in ("acme", "globex"):
        project = admin.projects.create(name=name)
        account = admin.projects.service_accounts.create(project.id, name="app")
        assert account.api_key is not None
        keys[name] = account.api_key.value  # only this answer contains the key
        base = admin.projects.rate_limits.list_rate_limits(project.id).data[0]
        print(f"{name}: {project.id}, model {base.model}")
        if name == "globex":  # two requests a minute, and half of acme's share when both wait
            admin.projects.rate_limits.update_rate_limit(base.id, project_id=project.id, max_requests_per_1_minute=2)
            httpx.patch(
                f"{URL}/tenants/{project.id}",
                headers={"Authorization": f"Bearer {ADMIN_KEY}"},
                json={"weight": 0.5},
                timeout=30,
            ).raise_for_status()
    for name, key in keys.items():
        client = OpenAI(base_url=URL, api_key=key, max_retries=0)
        model = client.models.list().data[0].id
        for number in range(1, 4):
            try:
                answer = client.chat.completions.create(
                    model=model, messages=[{"role": "user", "content": "Say hello."}], max_tokens=8
                )
                print(f"{name}, request {number}: {answer.choices[0].message.content!r}")
            except RateLimitError as error:
                print(f"{name}, request {number}: {error.code}, again in {error.response.headers['retry-after']} s")
    time.sleep(2)  # usage is up to a second late
    usage = admin.usage.completions(start_time=started, bucket_width="1m", group_by=["project_id"])
    for bucket in usage.data:
        for result in bucket.results:
            print(result.model_dump(include={"project_id", "num_model_requests", "input_tokens", "output_tokens"}))


if __name__ == "__main__":
    main()
