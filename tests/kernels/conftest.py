"""Fixtures of the kernels' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.kernels.triton.interpreting import patch_bfloat16


@pytest.fixture(autouse=True)
def interpreted_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's bfloat16 is a GPU's."""
    patch_bfloat16(monkeypatch)


@pytest.fixture
def rows_of_products_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the interpreter compute all rows of a product alike, as tensor cores do.

    With a GPU there is nothing to patch, and the tests that ask for this see the hardware.
    """
    patch_bfloat16(monkeypatch, rows_alike=True)


@pytest.fixture
def torch_on_two_threads() -> Iterator[None]:
    """With one thread nothing is cut."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)
