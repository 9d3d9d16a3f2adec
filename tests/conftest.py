"""Fixtures every test may use."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
import torch

from tests.workers import NUM_WORKERS, GroupScheduling, group_of, turn_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Workers side by side share the cores. Our kernels' bits do not depend on the number of threads, nor may a test.
if NUM_WORKERS > 1:
    torch.set_num_threads(max((os.cpu_count() or 1) // NUM_WORKERS, 1))

if not torch.cuda.is_available():
    # GPU kernels run in Triton's interpreter. It has to know before it is imported, which torch does not do.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from app.config import DEFAULT_MODEL_URI
from app.engine.models.download.model_download import resolve_model
from tests import budgets, nightly
from tests.durations import Durations, OwnTime, Run, file_of
from tests.postgres import find_postgres
from tests.seeds import VARIABLE, any_seed, run_seed

DURATIONS = pytest.StashKey[Durations]()

# A machine that is busy with other things is slow, not wrong.
hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--engine", choices=("cpu", "xla"), default="cpu", help="engine of tests/e2e/service")
    parser.addoption("--seed", type=int, help="repeat the random data of a run that printed this seed")
    parser.addoption(
        "--long", action="store_true", help="run nightly tests too, and property and fuzz tests twenty times as long"
    )
    parser.addoption(
        "--nightly",
        action="store_true",
        help="run only what --long adds to a usual run",
    )
    parser.addoption("--share", help="I/N: run one of N groups of files that take about equally long")
    parser.addoption("--stop-after", type=float, metavar="MIN", help="skip and list tests that would end later")
    parser.addoption("--write-durations", action="store_true", help="write .ci/durations.json from this run")


@pytest.hookimpl(tryfirst=True)  # before Hypothesis' own, which reads its seed
def pytest_configure(config: pytest.Config) -> None:
    """Settle the seed before workers are started, which inherit it."""
    seed = config.getoption("--seed")
    if seed is not None:
        os.environ[VARIABLE] = str(seed)
    config.option.hypothesis_seed = config.option.hypothesis_seed or run_seed()
    torch.manual_seed(run_seed())  # for what is drawn before the first test begins
    config.option.long |= config.option.nightly
    if config.getoption("--long"):
        os.environ[budgets.VARIABLE] = str(budgets.LONG_FACTOR)
    config.stash[DURATIONS] = Durations.read()
    config.pluginmanager.register(OwnTime())
    if not hasattr(config, "workerinput"):
        num_workers = len(getattr(config.option, "tx", None) or ()) or 1
        run = Run(config, config.stash[DURATIONS], num_workers, lambda file: group_of(config.rootpath / file))
        config.pluginmanager.register(run)
        if config.getoption("--stop-after") is not None:
            nightly.stop_after(config.getoption("--stop-after"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave nightly tests to `--long`, or take only them. Where workers share tests, say which begin."""
    if not nightly.has_vllm():
        _select(config, items, lambda item: item.get_closest_marker("vllm") is None)
    if config.getoption("--nightly"):
        _select(config, items, lambda item: nightly.is_nightly(item) or nightly.goes_on_longer(item.path))
    elif not config.getoption("--long"):
        _select(config, items, lambda item: not nightly.is_nightly(item))
    durations = config.stash[DURATIONS]
    if config.getoption("--share"):
        share, num_shares = nightly.parsed_share(config.getoption("--share"))
        share_of = nightly.shares([item.nodeid for item in items], num_shares, durations)
        _select(config, items, lambda item: share_of[file_of(item.nodeid)] == share)
    if NUM_WORKERS > 1:
        turns = turn_of({item.nodeid: group_of(item.path) for item in items}, durations)
        items.sort(key=lambda item: turns[group_of(item.path)])


def _select(config: pytest.Config, items: list[pytest.Item], is_wanted: Callable[[pytest.Item], bool]) -> None:
    wanted = [item for item in items if is_wanted(item)]
    if len(wanted) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if not is_wanted(item)])
        items[:] = wanted


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    nightly.skip_what_ends_too_late(item, item.config.stash[DURATIONS])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> GroupScheduling:
    """Files that belong together are run by one worker."""
    return GroupScheduling(config, log)


def pytest_report_header() -> list[str]:
    """The seed, which databases the registry's tests run on, and whether vLLM is tested: a run says what it omits."""
    folder = find_postgres()
    found = (
        f"postgresql ({folder})" if folder else "NOT postgresql: no server found (Debian: apt-get install postgresql)"
    )
    vllm = os.environ[nightly.VLLM_PYTHON] if nightly.has_vllm() else f"left out: {nightly.VLLM_PYTHON} is not set"
    return [f"random data: --seed {run_seed()}", f"registry databases: sqlite, {found}", f"tests of vLLM: {vllm}"]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say at the end, too, how to repeat what failed, and what was not reached."""
    skipped = terminalreporter.stats.get("skipped", [])
    if missing := [report.nodeid for report in skipped if nightly.NOT_REACHED in str(report.longrepr)]:
        terminalreporter.section(f"{len(missing)} tests {nightly.NOT_REACHED} in time")
        for name in missing:
            terminalreporter.write_line(name)
    if terminalreporter.stats.get("failed") or terminalreporter.stats.get("error"):
        terminalreporter.write_line(f"the same random data again: --seed {run_seed()}")


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> None:
    """The same for what tests share: it depends on nothing that a test before took from the generator."""
    if fixturedef.scope != "function":
        name = (run_seed(), fixturedef.baseid, fixturedef.argname, getattr(request, "param_index", 0))
        torch.manual_seed(zlib.crc32(repr(name).encode()))


@pytest.fixture(autouse=True)
def _seeded_torch() -> None:
    """What a test takes from torch's own generator is drawn from the run's seed, whichever tests ran before it."""
    torch.manual_seed(any_seed())


@pytest.fixture(scope="session")
def demo_gguf() -> Path:
    """The demo base model's file, fetched into the user's cache once."""
    return resolve_model(DEFAULT_MODEL_URI)


@pytest.fixture(scope="session")
def demo_transformers(demo_gguf: Path) -> PreTrainedModel:
    """The demo base model as transformers loads it, float32. Loading takes long: share it, unchanged."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(demo_gguf.parent, gguf_file=demo_gguf.name, dtype=torch.float32)
