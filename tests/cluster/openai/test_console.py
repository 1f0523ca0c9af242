"""The console in a real browser, over an application in this process: what it shows, keys, keyboard, streams."""

import re
import shutil
import time
from dataclasses import dataclass, field, replace

import pytest
from fake_engine import byte_tokenizer

from pagedray.cluster.console.routes import PAGES, add_console
from pagedray.cluster.global_scheduler import ClusterStats, GroupStatus, SchedulerReport, StoreStats
from pagedray.cluster.metrics.reports import IngressReport
from pagedray.cluster.metrics.requests import RequestMetrics
from pagedray.cluster.openai.tenancy import caller
from pagedray.scheduler.dispatcher import QUEUE_BOUNDS, TenantStats
from pagedray.scheduler.histogram import Histogram
from pagedray.scheduler.step import SchedulerStats
from pagedray.scheduler.tenants import Tenant, TenantDirectory, hash_key

KEYS = {"acme": "sk-acme-key", "operations": "sk-ops-key-1"}
EVIL = "<img src=x onerror=alert(1)>"


@dataclass
class Cluster:
    """What the console is told; it moves a little at every look."""

    looks: int = 0
    tenants: tuple[str, ...] = ("acme", "operations", EVIL)
    models: dict[str, int] = field(default_factory=lambda: {"org/tiny": 64})
    groups: bool = True
    may_sleep: set[str] = field(default_factory=set)

    async def current(self):
        self.looks += 1
        metrics = RequestMetrics()
        for _ in range(self.looks):
            metrics.histogram("time_to_first_token_seconds", "org/tiny", "acme").observe(0.05)
            metrics.histogram("inter_token_latency_seconds", "org/tiny", "acme").observe(0.012)
        groups = tuple(
            GroupStatus(
                f"replica{i}-0000000{i}",
                "org/tiny",
                64,
                SchedulerStats(3 + i, i, 512, (140, 430, 500)[i], 0, 900, 300, self.looks),
                16,
                80,
                draining=i == 1,
                nodes=(("n1",), ("n2",), ("n1", "n2"))[i],
            )
            for i in range(3 if self.groups else 0)
        )
        queue = Histogram(QUEUE_BOUNDS).so_far()
        tenants = tuple(
            TenantStats("org/tiny", name, 4 * i, 2, 1.0, 100 * self.looks, 62 * self.looks, 240 * self.looks, queue)
            for i, name in enumerate(self.tenants)
        )
        return ClusterStats(
            {"org/tiny": 12},
            groups,
            (("n1", StoreStats(2**30, 300 << 20, 9, 0, 0, 0, 0, 0)), ("n2", StoreStats(2**30, 0, 0, 0, 0, 0, 0, 0))),
            schedulers=(SchedulerReport("s", tenants),),
            ingresses=(IngressReport("i1", "n1", metrics.counts()),),
        )

    async def nodes(self):
        return [
            {
                "NodeID": f"n{i}",
                "Alive": True,
                "NodeManagerAddress": f"10.0.0.{i}",
                "Resources": {"CPU": 16, "GPU": 2 - i},
            }
            for i in (1, 2)
        ]


def application(make_api, keys=False):
    """The API over a fake engine, with the console; and what stands behind them."""
    tenants = [Tenant(name, (hash_key(key),), operator=name == "operations") for name, key in KEYS.items()]
    directory = TenantDirectory(tenants if keys else ())
    api, cluster = make_api(byte_tokenizer(), tenants=directory), Cluster()
    api.models = {name: replace(model, max_model_len=1024) for name, model in api.models.items()}
    add_console(
        api.app,
        cluster.current,
        cluster.nodes,
        models=lambda: cluster.models,
        may_sleep=lambda: cluster.may_sleep,
        caller=caller,
        sees_all=lambda tenant: tenant.operator or not directory.has_keys,
    )
    return api, cluster


# -- without a browser -------------------------------------------------------------------------------------------------


def test_the_page_needs_no_key_and_the_data_does(make_api):
    api, _ = application(make_api, keys=True)
    for path in PAGES:
        answer = api.get(f"/console/{path}")
        assert answer.status_code == 200, path
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    assert api.get("/console").headers["location"] == "console/"
    assert api.get("/console/state").status_code == 401
    shown = api.get("/console/state", headers={"Authorization": f"Bearer {KEYS['acme']}"})
    assert shown.status_code == 200 and shown.headers["cache-control"] == "no-store"
    assert {t["tenant"] for t in shown.json()["tenants"]} == {"acme", ""}
    everybody = api.get("/console/state", headers={"Authorization": f"Bearer {KEYS['operations']}"}).json()
    assert {t["tenant"] for t in everybody["tenants"]} == {"acme", "operations", EVIL}


@pytest.mark.parametrize(
    "path", ["nothing.js", "../state", "%2e%2e/routes.py", "static/index.html", "state/", "//state"]
)
def test_there_is_no_other_page(path, make_api):
    api, _ = application(make_api, keys=True)
    assert api.get(f"/console/{path}").status_code in (401, 404)


def test_pages_fetch_from_nowhere_else_and_hold_nothing_inline(make_api):
    api, _ = application(make_api)
    for path in PAGES:
        text = api.get(f"/console/{path}").text.replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|//cdn|@import|url\(", text), path
        assert not re.search(r"<style|<script>|\son\w+=|style=|innerHTML", text), path


# -- in a browser ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: it drives the browser")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("no chromium: apt-get install chromium")
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_console(browser, listen, make_api):
    """A function that serves the application and opens its console; any error or foreign request fails the test."""
    pages = []

    def start(keys=False, expect_errors=False):
        api, cluster = application(make_api, keys)
        url = listen(api.app)
        page = browser.new_page(viewport={"width": 1280, "height": 1150})
        page.set_default_timeout(20_000)
        wrong: list[str] = []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda m: wrong.append(m.text) if m.type == "error" and not expect_errors else None)
        page.on("request", lambda r: None if r.url.startswith(url) else wrong.append(f"fetches {r.url}"))
        pages.append((page, wrong))
        page.goto(f"{url}/console")
        return page, api, cluster

    yield start
    for page, wrong in pages:
        page.close()
        assert not wrong


def until(page, script, seconds=20.0):
    """Until the expression is true. (Playwright's own way evaluates text in the page, which its policy forbids.)"""
    deadline = time.monotonic() + seconds
    while not page.evaluate(script):
        assert time.monotonic() < deadline, f"not so after {seconds} s: {script}"
        page.wait_for_timeout(20)


def test_it_shows_the_cluster_as_it_moves(open_console):
    page, _, cluster = open_console()
    until(
        page,
        "document.querySelector('#chart polyline') && Number(document.getElementById('tokens-now').textContent) > 0",
    )
    assert page.inner_text("#status") == "Live"
    assert page.locator(".node").count() == 2 and page.locator(".group").count() == 4  # one of three is on both nodes
    assert "ranks 0 of 2" in page.inner_text("#map") and "ranks 1 of 2" in page.inner_text("#map")
    assert page.inner_text("#queued") == "12" and page.inner_text("#running") == "6"
    assert page.inner_text("#ttft").endswith("ms") and page.inner_text("#cached") == "38%"
    assert page.inner_text("#map").count("leaving") == 1
    usage = page.get_by_role("meter", name="KV cache in use of group replica1")
    assert usage.first.get_attribute("aria-valuenow") == "84"
    # What a tenant is called is text, whatever it looks like.
    assert EVIL in page.inner_text("#tenants") and page.locator("#tenants img").count() == 0
    cluster.groups = False
    page.get_by_role("alert").wait_for()
    assert "No worker group is up: org/tiny" in page.get_by_role("alert").inner_text()
    cluster.may_sleep.add("org/tiny")
    page.get_by_text("Asleep until somebody asks: org/tiny").wait_for()
    assert page.get_by_role("alert").count() == 0


def test_a_chat_streams_and_is_stopped(open_console):
    page, api, _ = open_console(expect_errors=True)  # one answer is made to fail
    api.engine.script = lambda request: [*api.engine.spell("Hello")[:-1], 0.5, *api.engine.spell(" world")]
    until(page, "document.getElementById('model').value === 'org/tiny'")
    page.fill("#max-tokens", "40")
    page.fill("#message", "hi")
    page.keyboard.press("Enter")
    until(page, "document.querySelector('.message.assistant')?.textContent === 'Hello'")  # while it is being made
    assert page.get_attribute("#log", "aria-busy") == "true"
    until(page, "document.querySelector('.message.assistant').textContent === 'Hello world'")
    until(page, "document.getElementById('measure').textContent.includes('tokens')")
    assert page.get_attribute("#log", "aria-busy") is None

    api.engine.script = lambda request: [*api.engine.spell("again")[:-1], 30.0]
    page.fill("#message", "more")
    page.keyboard.press("Enter")
    until(page, "[...document.querySelectorAll('.message')].at(-1).textContent === 'again'")
    page.keyboard.press("Escape")
    until(page, "document.getElementById('send').hidden === false")
    assert page.evaluate("document.activeElement.id") == "message"
    # What was said before goes along, and what was not answered does not.
    api.engine.script = lambda request: [ValueError("broken")]
    page.fill("#message", "what?")
    page.keyboard.press("Enter")
    page.locator(".message.error").wait_for()
    api.engine.script = lambda request: api.engine.spell("ok")
    page.fill("#message", "last")
    page.keyboard.press("Enter")
    until(page, "[...document.querySelectorAll('.message')].at(-1).textContent === 'ok'")
    prompt = bytes(
        b for i in api.engine.requests[-1].prompt_token_ids for b in byte_tokenizer().token_bytes(i)
    ).decode()
    assert "more" in prompt and "Hello world" in prompt and "last" in prompt and "what?" not in prompt
    page.click("#clear")
    assert page.locator(".message").count() == 0
    assert not api.engine.running


def test_without_a_key_there_is_no_data_and_with_one_there_is(open_console):
    page, api, _ = open_console(keys=True, expect_errors=True)  # a browser logs a 401 as an error
    until(page, "document.getElementById('status').textContent === 'Needs an API key'")
    assert page.locator(".node").count() == 0 and page.inner_text("#running") == "–"
    page.get_by_label("API key").fill(KEYS["acme"])
    page.keyboard.press("Enter")
    until(page, "document.getElementById('status').textContent === 'Live'")
    assert "(others)" in page.inner_text("#tenants") and EVIL not in page.inner_text("#tenants")
    page.fill("#message", "hi")
    page.keyboard.press("Enter")
    until(page, "document.querySelector('.message.assistant')?.textContent === 'Hello world'")
    assert page.evaluate("localStorage.length") == 0 and KEYS["acme"] not in page.content()
    page.get_by_label("API key").fill("")
    page.keyboard.press("Enter")
    until(page, "document.getElementById('status').textContent === 'Needs an API key'")
    assert page.locator(".node").count() == 0


def test_a_keyboard_and_a_screen_reader_can_use_it(open_console):
    page, _, _ = open_console()
    until(page, "document.querySelectorAll('.node').length === 2")
    assert page.title() and page.get_attribute("html", "lang") == "en"
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the playground"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "playground"
    reached = []
    for _ in range(9):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id"))
    assert ["model", "system", "temperature", "max-tokens", "clear", "log", "message", "send"] == reached[:8]
    # Every control and every figure that is a picture has a name.
    unnamed = page.evaluate(
        """[...document.querySelectorAll('input, select, textarea, button, [role=meter], svg[role=img], [role=log]')]
           .filter(e => !(e.labels?.length || e.getAttribute('aria-label') || e.textContent.trim()))
           .map(e => e.outerHTML)"""
    )
    assert unnamed == []
    for role, name in (
        ("heading", "Now"),
        ("heading", "Queues by tenant"),
        ("region", "Queues by tenant"),
        ("log", "Chat"),
    ):
        assert page.get_by_role(role, name=name).count() == 1, name
    levels = page.evaluate("[...document.querySelectorAll('h1,h2,h3,h4')].map(h => Number(h.tagName[1]))")
    assert levels[0] == 1 and all(b - a <= 1 for a, b in zip(levels, levels[1:], strict=False))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read(scheme, open_console):
    """WCAG's contrast of 4.5, of every text that is seen, against what is behind it."""
    page, _, _ = open_console()
    page.emulate_media(color_scheme=scheme)
    until(page, "document.querySelectorAll('.node').length === 2")
    page.fill("#message", "hi")
    page.keyboard.press("Enter")
    until(page, "document.getElementById('measure').textContent.includes('tokens')")
    low = page.evaluate(
        """() => {
          const parse = c => c.match(/[\\d.]+/g).map(Number);
          const light = ([r, g, b]) => [r, g, b].map(v => v / 255)
            .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
            .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
          const behind = e => { for (; e; e = e.parentElement) {
            const c = parse(getComputedStyle(e).backgroundColor);
            if (c.length < 4 || c[3] > 0) return c; }
            return [255, 255, 255]; };
          const found = [];
          for (const e of document.querySelectorAll('body *')) {
            const own = [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim());
            const box = e.getBoundingClientRect();
            if (!own || !box.width || box.right < 0 || e.disabled || getComputedStyle(e).clipPath !== 'none') continue;
            const [a, b] = [light(parse(getComputedStyle(e).color)), light(behind(e))].sort((x, y) => y - x);
            if ((a + 0.05) / (b + 0.05) < 4.5) found.push([e.textContent.trim().slice(0, 40), (a + 0.05) / (b + 0.05)]);
          }
          return found;
        }"""
    )
    assert low == []


def test_it_fits_a_telephone(open_console):
    page, _, _ = open_console()
    page.set_viewport_size({"width": 375, "height": 800})
    until(page, "document.querySelectorAll('.node').length === 2")
    assert page.evaluate("document.documentElement.scrollWidth") <= 375
