"""What a person does with the console, as a program with Playwright: `python browser_tour.py PART URL …`.

It runs in an environment of its own, without this package. Every console error, refused script or style, request to
another host and accessibility violation fails it.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright

SHOTS = os.environ.get("POLYLORA_SCREENSHOTS", "")
AXE = os.environ.get("POLYLORA_AXE", "")
#: Of all pages, shown together at the end.
VIOLATIONS: list[str] = []
SIZES = {"wide": (1440, 900), "narrow": (390, 844), "4k": (3840, 2160), "tiny": (360, 640)}
expect.set_options(timeout=60_000)


@contextmanager
def page(browser: Browser, url: str, *, theme: str = "light", size: str = "wide", expected: str = "") -> Iterator[Page]:
    """A page that must have no error but those whose text matches `expected`."""
    width, height = SIZES[size]
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=theme, reduced_motion="reduce"
    )
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    new, found = context.new_page(), []
    new.on("console", lambda message: found.append(message.text) if message.type == "error" else None)
    new.on("pageerror", lambda error: found.append(str(error)))
    new.on(
        "request",
        lambda request: found.append(request.url) if not request.url.startswith((url, "blob:", "data:")) else None,
    )
    yield new
    context.close()
    found = [each for each in found if not (expected and re.search(expected, each))]
    assert not found, found


def shot(page: Page, name: str) -> None:
    if SHOTS:
        Path(SHOTS).mkdir(parents=True, exist_ok=True)
        page.wait_for_timeout(700)
        Image.open(BytesIO(page.screenshot())).convert("RGB").save(f"{SHOTS}/{name}.webp", quality=82, method=6)


def check(page: Page) -> None:
    """No accessibility violation, and nothing wider than the window."""
    width = page.evaluate("document.documentElement.scrollWidth - innerWidth")
    if width > 0:
        VIOLATIONS.append(f"{page.url} is {width} px wider than the window")
    if AXE:
        if not page.evaluate("'axe' in window"):
            page.evaluate(Path(AXE).read_text())
        found = page.evaluate(
            "axe.run().then(r => r.violations.map(v => [v.id, v.nodes.slice(0, 3).map(n => n.html.slice(0, 160))]))"
        )
        VIOLATIONS.extend(f"{page.url} {each}" for each in found)


SCREENS = {
    "overview": "Requests per second", "playground": "Reference", "adapters": "sql-next", "aliases": "sql-live",
    "residency": "on a device", "batches": "No batch yet", "files": "No file yet", "replicas": "replica-0",
    "activity": "routable", "settings": "http.console",
}  # fmt: skip


def screens(browser: Browser, url: str) -> None:
    for theme, size in (("light", "wide"), ("dark", "wide"), ("light", "narrow"), ("dark", "4k"), ("light", "tiny")):
        with page(browser, url, theme=theme, size=size) as new:
            for name, text in SCREENS.items():
                new.goto(f"{url}/console/#/{name}")
                expect(new.get_by_text(text).first).to_be_visible()
                new.wait_for_timeout(300)
                check(new)
                if (theme, size) in (("light", "wide"), ("dark", "wide"), ("light", "narrow")) and (
                    size == "wide" or name in ("overview", "adapters", "playground")
                ):
                    shot(new, f"{name}-{'dark' if theme == 'dark' else size}")


def actions(browser: Browser, url: str, folder: Path) -> None:
    with page(browser, url, expected=r"status of 4\d\d") as new:
        new.goto(f"{url}/console/#/overview")
        first_paint_ms = new.evaluate("performance.getEntriesByName('first-contentful-paint')[0]?.startTime")
        print("first paint", first_paint_ms)
        new.get_by_role("link", name="Why, and what to do").click()
        expect(new.get_by_text("What to do:")).to_be_visible()
        check(new)
        failed = new.get_by_role("listitem").filter(has=new.get_by_text("Check", exact=True))
        expect(failed).to_contain_text("failed")  # the folder is not there: nothing was read, and the step has its name
        expect(new.get_by_role("link", name="Compare with the base")).to_have_count(0)
        expect(new.get_by_role("button", name="Unload")).to_have_count(0)
        shot(new, "adapter-failed")
        with new.expect_response("**/v1/loras/reports") as answer:
            new.get_by_role("button", name="Dismiss").click()
        assert (answer.value.request.method, answer.value.status) == ("DELETE", 200)
        expect(new.get_by_text("The failure was dismissed")).to_be_visible()
        expect(new).to_have_url(f"{url}/console/#/adapters")
        expect(new.get_by_role("link", name="sql-next", exact=True)).to_be_visible()
        expect(new.get_by_text("reports")).to_have_count(0)
        new.goto(f"{url}/console/#/adapters/sql")
        expect(new.get_by_role("heading", name="Generations")).to_be_visible()
        check(new)
        shot(new, "adapter-wide")
        new.get_by_role("button", name="Pin").click()
        expect(new.get_by_role("button", name="Unpin")).to_be_visible()
        new.get_by_role("button", name="Describe").click()
        new.get_by_label("Description").fill("Questions answered with SQL")
        check(new)
        new.get_by_role("button", name="Save").click()
        expect(new.get_by_text("Questions answered with SQL").first).to_be_visible()
        new.get_by_role("button", name="Copy as curl").first.click()
        expect(new.get_by_label("curl command")).to_contain_text("/v1/loras/sql")
        new.keyboard.press("Escape")
        dialogs(new)
        drop(new, url, folder)
        canary(new, url)
        unload(new, url)
        play(new, url)
        keyboard(new, url)
        drain(new, url)


def dialogs(new: Page) -> None:
    """A dialog takes keys as soon as it can be seen, and closes and opens however often Escape is pressed."""
    expect(new.locator("dialog")).to_have_count(0)
    seen = """button => new Promise(resolve => {
        new MutationObserver(() => {
            const dialog = document.querySelector("dialog");
            if (dialog) resolve(dialog.open);
        }).observe(document.body, { childList: true, subtree: true });
        button.click();
    })"""
    for _ in range(4):  # no click of a person in between: Chromium then closes without asking the page
        assert new.get_by_role("button", name="Copy as curl").first.evaluate(seen)
        expect(new.get_by_label("curl command")).to_be_visible()
        new.keyboard.press("Escape")
        expect(new.locator("dialog")).to_have_count(0)


def drop(new: Page, url: str, folder: Path) -> None:
    """Drop a folder on any screen; see why one is refused before it is sent; load one."""
    new.goto(f"{url}/console/#/overview")
    expect(new.get_by_text("Requests per second")).to_be_visible()
    contents = {file.name: list(file.read_bytes()) for file in folder.iterdir()}
    transfer = new.evaluate_handle(
        """contents => {
            const transfer = new DataTransfer();
            for (const [name, bytes] of Object.entries(contents))
                transfer.items.add(new File([new Uint8Array(bytes)], name));
            return transfer;
        }""",
        contents,
    )
    new.dispatch_event("main", "dragover", {"dataTransfer": transfer})
    expect(new.get_by_text("Drop the PEFT folder to load it")).to_be_visible()
    new.dispatch_event("main", "drop", {"dataTransfer": transfer})
    expect(new.get_by_text("1 pair of matrices, 16 parameters, F32")).to_be_visible()
    expect(new.get_by_text("Drop the PEFT folder to load it")).to_have_count(0)
    new.keyboard.press("Escape")
    new.goto(f"{url}/console/#/adapters")
    new.get_by_role("button", name="Load adapter").click()
    new.get_by_role("tab", name="From this computer").click()
    new.locator("dialog input[type=file]").set_input_files([folder / "adapter_config.json"])
    expect(new.get_by_text("adapter_model.safetensors is missing")).to_be_visible()
    expect(new.locator("dialog").get_by_role("button", name="Load", exact=True)).to_be_disabled()
    new.locator("dialog input[type=file]").set_input_files(sorted(folder.iterdir()))
    expect(new.get_by_text("LoRA of rank 2, alpha 4")).to_be_visible()
    new.locator("dialog").get_by_label("Name").fill("dropped")
    check(new)
    shot(new, "load-adapter")
    with new.expect_response("**/v1/loras/dropped/weights") as answer:
        new.locator("dialog").get_by_role("button", name="Load", exact=True).click()
    sent = answer.value.request
    assert sent.method == "PUT"
    assert '"r":2' in sent.headers["x-adapter-config"]
    new.keyboard.press("Escape")


def canary(new: Page, url: str) -> None:
    new.goto(f"{url}/console/#/aliases")
    handle = new.get_by_role("slider", name="Border between sql and sql-next")
    handle.focus()
    for _ in range(5):
        new.keyboard.press("ArrowLeft")
    expect(handle).to_have_attribute("aria-valuenow", "85")
    new.get_by_role("button", name="Save the weights").click()
    expect(new.get_by_text("sql-live has new weights")).to_be_visible()
    card = new.get_by_role("region", name="sql-live", exact=True)
    card.get_by_role("button", name="Promote").nth(1).click()
    new.locator("dialog").get_by_role("button", name="Promote").click()
    expect(new.get_by_text("sql-next gets all requests").first).to_be_visible()
    card.get_by_role("button", name="Versions").click()
    new.locator("dialog").get_by_role("button", name="Roll back to it").last.click()
    expect(card.get_by_text("90 %").first).to_be_visible()


def unload(new: Page, url: str) -> None:
    new.goto(f"{url}/console/#/adapters/support")
    new.get_by_role("button", name="Unload").click()
    expect(new.locator("dialog").get_by_text("alias help")).to_be_visible()
    button = new.locator("dialog").get_by_role("button", name="Unload")
    expect(button).to_be_disabled()
    check(new)
    shot(new, "unload")
    new.keyboard.press("Escape")
    new.goto(f"{url}/console/#/adapters/triage")
    new.get_by_role("button", name="Unload").click()
    new.locator("dialog input").fill("triage")
    button.click()
    expect(new.get_by_text("triage was unloaded")).to_be_visible()


def drain(new: Page, url: str) -> None:
    new.goto(f"{url}/console/#/replicas")
    timeline = new.get_by_role("region", name="Timeline, table")
    expect(timeline.get_by_role("row").nth(1)).to_contain_text("3 → 4")
    expect(timeline.get_by_text("rank rows in demand need 2.4")).to_be_visible()
    row = new.get_by_role("row").filter(has_text="replica-2")
    row.get_by_role("button", name="Drain").click()
    dialog = new.locator("dialog")
    button = dialog.get_by_role("button", name="Drain")
    expect(button).to_be_disabled()
    expect(dialog.get_by_text("all new requests")).to_have_count(0)
    check(new)
    shot(new, "drain")
    dialog.get_by_role("button", name="Copy as curl").click()
    assert "-X POST" in new.evaluate("navigator.clipboard.readText()")
    dialog.locator("input").fill("replica-2")
    button.click()
    expect(new.get_by_text("replica-2 drains")).to_be_visible()
    expect(row.get_by_text("draining")).to_be_visible()
    expect(row.get_by_role("button")).to_have_count(0)


def play(new: Page, url: str) -> None:
    new.goto(f"{url}/console/#/playground?c=base:%7Cadapter:sql%7Cadapter:sql-live")
    new.get_by_label("Max tokens").fill("24")
    new.get_by_role("button", name="Run").click()
    expect(new.get_by_text("the same as the reference")).to_have_count(2, timeout=30_000)
    assert new.locator(".answer .new").count() > 0
    check(new)
    shot(new, "playground-answers")
    new.goto(f"{url}/console/#/playground?c=base:%7Cadapter:sql%7Cmix:sql*0.7,legal-summary*0.3")
    new.get_by_role("slider", name="Weight of sql in Column 3").fill("1.5")
    expect(new.get_by_text("× 1.50")).to_be_visible()
    assert "sql*1.5" in new.evaluate("decodeURIComponent(location.hash)")
    new.get_by_role("button", name="View code").click()
    new.get_by_role("tab", name="Python").click()
    expect(new.get_by_label("Code", exact=True)).to_contain_text("base_url")
    new.keyboard.press("Escape")


def keyboard(new: Page, url: str) -> None:
    """From the address bar to an adapter's page and back, with keys alone."""
    new.goto("about:blank")  # after blur() Tab would go on where the focus was
    new.goto(f"{url}/console/#/adapters")
    expect(new.get_by_role("link", name="sql", exact=True)).to_be_visible()
    new.keyboard.press("Tab")
    assert new.evaluate("document.activeElement.className") == "skip"
    for _ in range(40):
        new.keyboard.press("Tab")
        if new.evaluate("document.activeElement.textContent.trim()") == "legal-summary":
            break
    new.keyboard.press("Enter")
    expect(new.get_by_role("heading", name="legal-summary")).to_be_visible()


def keys(browser: Browser, url: str, admin: str) -> None:
    with page(browser, url, expected=r"status of 4\d\d") as new:
        new.goto(f"{url}/console/")
        expect(new.get_by_role("heading", name="Sign in")).to_be_visible()
        check(new)
        shot(new, "sign-in")
        new.get_by_label("API key").fill("sk-wrong")
        new.get_by_role("button", name="Sign in").click()
        expect(new.get_by_role("alert")).to_be_visible()
        new.get_by_label("API key").fill(admin)
        new.get_by_label("Stay signed in").check()
        new.get_by_role("button", name="Sign in").click()
        expect(new.get_by_text("Administrator")).to_be_visible()
        new.reload()
        expect(new.get_by_text("Administrator")).to_be_visible()
        assert admin not in new.content()
        assert new.evaluate("JSON.stringify(localStorage) + document.cookie").find("poly-") < 0
        new.goto(f"{url}/console/#/projects")
        new.get_by_role("button", name="New project").first.click()
        new.get_by_label("Name").fill("atlas")
        new.get_by_role("button", name="Create").click()
        expect(new.get_by_role("heading", name="atlas")).to_be_visible()
        new.get_by_role("button", name="New key").click()
        new.get_by_label("For whom or what").fill("app")
        new.get_by_role("button", name="Create").click()
        project = new.get_by_label("The new key").inner_text().strip()
        assert project.startswith("sk-poly-")
        new.get_by_role("button", name="I have stored it").click()
        check(new)
        shot(new, "project")
        new.goto(f"{url}/console/#/usage")
        expect(new.get_by_role("heading", name="Usage and costs")).to_be_visible()
        check(new)
        shot(new, "usage")
        new.get_by_role("button", name="Sign out").click()
        new.get_by_label("API key").fill(project)
        new.get_by_role("button", name="Sign in").click()
        expect(new.get_by_text("project key · member")).to_be_visible()
        assert new.get_by_role("link", name="Replicas").count() == 0
        new.goto(f"{url}/console/#/playground")
        expect(new.locator("#models option[value=sql]")).to_have_count(1)  # a public adapter, which the project may use
        new.goto(f"{url}/console/#/adapters")
        expect(new.get_by_text("No adapter yet")).to_be_visible()
        check(new)
        shot(new, "project-key-adapters")


def many(browser: Browser, url: str) -> None:
    with page(browser, url) as new:
        new.goto(f"{url}/console/#/adapters")
        expect(new.get_by_text("of 5,008")).to_be_visible()
        new.get_by_role("button", name="Next").click()
        expect(new.get_by_text("51–100 of 5,008")).to_be_visible()
        new.get_by_label("Name, description or digest").fill("04321")
        expect(new.get_by_role("link", name="tenant-04321")).to_be_visible()
        expect(new.get_by_text("1–1 of 1")).to_be_visible()
        new.goto(f"{url}/console/#/residency")
        expect(new.get_by_text("5,008 adapters on 3 replicas")).to_be_visible()
        check(new)
        shot(new, "residency-many")
        new.locator(".map").focus()
        new.keyboard.press("ArrowDown")
        expect(new.locator(".map-tip")).to_be_visible()


def lost(browser: Browser, url: str, folder: str) -> None:
    """`folder` gets a file when the page shows the replica that is to be dropped, and one when it does not any more."""
    with page(browser, url, expected="ERR_") as new:
        new.goto(f"{url}/console/#/replicas")
        expect(new.get_by_text("replica-1")).to_be_visible(timeout=60_000)
        (Path(folder) / "shown").touch()
        expect(new.get_by_text("replica-1")).to_have_count(0, timeout=60_000)
        (Path(folder) / "gone").touch()
        expect(new.get_by_text("the service does not answer")).to_be_visible(timeout=60_000)
        shot(new, "stale")


def newcomer(browser: Browser, url: str, folder: str) -> None:
    """A first visit to the demo service: drop a folder, compare it with the base, start a canary, find out why a load
    failed."""
    with page(browser, url, expected=r"status of 4\d\d") as new:
        new.goto(f"{url}/console/")
        expect(new.get_by_text("Requests per second")).to_be_visible()
        print("first paint", new.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime"))
        new.get_by_role("link", name="Adapters", exact=False).first.click()
        new.get_by_role("button", name="Load adapter").click()
        new.get_by_role("tab", name="From this computer").click()
        new.locator("dialog input[type=file]").set_input_files(sorted(Path(folder).iterdir()))
        new.locator("dialog").get_by_label("Name").fill("sql-next")
        new.locator("dialog").get_by_role("button", name="Load", exact=True).click()
        new.goto(f"{url}/console/#/adapters/sql-next")
        expect(new.get_by_text("Served").first).to_be_visible()
        new.get_by_text("Compare with the base").click()
        new.get_by_label("Max tokens").fill("16")
        new.get_by_role("button", name="Run").click()
        expect(new.get_by_text("the same as the reference")).to_have_count(1)
        check(new)
        shot(new, "demo-answers")
        new.goto(f"{url}/console/#/aliases")
        new.get_by_role("button", name="New alias").first.click()
        dialog = new.locator("dialog")
        dialog.get_by_label("Name").fill("shop")
        dialog.get_by_label("Target 1").fill("sql")
        dialog.get_by_role("button", name="Add target").click()
        dialog.get_by_label("Target 2").fill("sql-next")
        dialog.get_by_role("button", name="Create").click()
        expect(new.get_by_role("slider", name="Border between sql and sql-next")).to_be_visible()
        check(new)
        new.goto(f"{url}/console/#/adapters")
        new.get_by_role("button", name="Load adapter").click()
        new.locator("dialog").get_by_role("textbox", name="Name").fill("reports")
        new.locator("dialog").get_by_label("Folder or URL").last.fill("reports-2026")
        new.locator("dialog").get_by_role("button", name="Load", exact=True).click()
        new.keyboard.press("Escape")
        new.goto(f"{url}/console/#/overview")
        new.get_by_role("link", name="Why, and what to do").click()
        expect(new.get_by_text("What to do:")).to_be_visible()
        shot(new, "demo-failed")
        for name in SCREENS:
            new.goto(f"{url}/console/#/{name}")
            expect(new.get_by_role("heading", level=1)).to_be_visible()
            new.wait_for_timeout(1500)
            check(new)
            shot(new, f"demo-{name}")


def main(part: str, url: str, *words: str) -> None:
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
        browser: Any = playwright.chromium.launch(executable_path=os.environ["CHROMIUM"], args=arguments)
        if part == "open":
            screens(browser, url)
            actions(browser, url, Path(words[0]))
        else:
            words_of = {"newcomer": [Path(words[0])] if words else []}
            {"newcomer": newcomer, "keys": keys, "many": many, "lost": lost}[part](
                browser, url, *words_of.get(part, words)
            )
        browser.close()
    assert not VIOLATIONS, "\n".join(dict.fromkeys(VIOLATIONS))


if __name__ == "__main__":
    main(*sys.argv[1:])
