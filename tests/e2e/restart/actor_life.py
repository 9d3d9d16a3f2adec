"""A cluster with one named actor that is killed, deserted and called again; run by `test_actors`."""

from __future__ import annotations

import asyncio
import os
import signal

import ray

from app.config import AppConfig
from app.deployments.placement.actor import PlacementActor
from app.deployments.rpc import idle_shutdown
from app.deployments.rpc.actor_unavailable import ActorUnavailable
from app.deployments.rpc.long_poll_host import Version
from app.deployments.rpc.named_actor import NAMESPACE, NamedActor
from app.deployments.rpc.transport import PROTOCOL

NAME = "a-named-actor"


class Impatient(PlacementActor):
    """Placement that loses its patience when it is told to."""

    def __init__(self, config_json: str) -> None:
        idle_shutdown.CHECK_INTERVAL_S = 0.05
        super().__init__(config_json)

    async def lose_patience(self) -> None:
        idle_shutdown.IDLE_TIMEOUT_S = 0.5

    async def pid(self) -> int:
        return os.getpid()


def is_named() -> bool:
    return {"name": f"{NAME}.v{PROTOCOL}", "namespace": NAMESPACE} in ray.util.list_named_actors(all_namespaces=True)


async def version(actor: NamedActor) -> Version:
    """Asked until it answers."""
    while True:
        try:
            return (await actor.call(Impatient.watch, None, "me", 10.0))[0]
        except ActorUnavailable as error:
            print(error)
            await asyncio.sleep(0.2)


async def main() -> None:
    actor = NamedActor(NAME, Impatient, AppConfig().model_dump_json())
    first = await version(actor)
    pending = asyncio.create_task(actor.call(Impatient.watch, first, "me", 600.0))
    os.kill(await actor.call(Impatient.pid), signal.SIGKILL)
    try:
        await pending
    except ActorUnavailable as error:
        print("killed:", error)
    second = await version(actor)
    assert second.epoch != first.epoch
    assert is_named()
    await actor.call(Impatient.lose_patience)
    while is_named():
        await asyncio.sleep(0.1)
    third = await version(actor)
    assert third.epoch not in (first.epoch, second.epoch)
    assert is_named()


if __name__ == "__main__":
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    asyncio.run(main())
    print("lived and left")
