"""What the programs of this folder ask for. They run in an environment of their own, without the project."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

ORDER = "Hello, my name is Clara Sato. I would like nine desk lamps sent to Cork on Friday."


class Order(BaseModel):
    """An order of a size and a quantity."""

    model_config = ConfigDict(extra="forbid")

    size: Literal["small", "large"]
    quantity: Literal[1, 2, 9]
