"""`Transport` over Ray Serve: how an ingress reaches engine replicas through the deployment's handle."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError
from ray.serve.handle import DeploymentHandle

from app.deployments.rpc.frames import unpack_frame, with_heartbeat
from app.deployments.rpc.named_actor import unwrap_errors
from app.deployments.rpc.transport import PROTOCOL, Frame, ReplicaGone, ReplicaUnreachable
from app.deployments.rpc.uds_transport import connect, frames_from_socket
from app.engine.request import GenerateRequest

logger = logging.getLogger(__name__)


class ServeTransport:
    """`Transport` over the engine deployment's handle."""

    def __init__(self, engines: DeploymentHandle[Any]) -> None:
        self._engines = engines

    async def frames(self, replica_id: str, link_id: str) -> AsyncIterator[Frame]:
        connection = await connect(replica_id)
        by_socket = connection is not None
        call: Any = self._engines.frames.options(stream=True).remote(
            link_id, by_socket, protocol=PROTOCOL, target_replica_id=replica_id
        )
        logger.debug("frames of replica %s come through %s", replica_id, "a socket" if by_socket else "Ray")
        try:
            if connection is None:
                async with aclosing(with_heartbeat(call)) as items:
                    try:
                        async for packed in items:
                            yield unpack_frame(packed)
                    except (ReplicaUnreachable, ActorUnavailableError):
                        call.cancel()  # if the replica still lives, it should stop computing for us
                        raise
            else:
                async with aclosing(frames_from_socket(call, link_id, connection)) as items:
                    async for packed in items:
                        yield unpack_frame(packed)
        except RayActorError as error:
            raise _loss(replica_id, error) from error
        except RayTaskError as error:
            if isinstance(error.cause, Exception):
                raise error.cause from None
            raise

    async def submit(self, replica_id: str, link_id: str, requests: Sequence[GenerateRequest]) -> bool:
        result: bool = await self._call(
            replica_id, self._engines.submit.remote(link_id, requests, target_replica_id=replica_id)
        )
        return result

    async def abort(self, replica_id: str, request_ids: Sequence[str]) -> None:
        await self._call(replica_id, self._engines.abort.remote(request_ids, target_replica_id=replica_id))

    async def wake(self) -> None:
        """Call any replica. Without replicas the call waits in Serve's handle, whose queue the autoscaler sees."""
        await self._call("any", self._engines.stats.remote())

    async def unload_adapter(self, replica_id: str, digest: str) -> int:
        result: int = await self._call(
            replica_id, self._engines.unload_adapter.remote(digest, target_replica_id=replica_id)
        )
        return result

    async def drain(self, replica_id: str) -> bool:
        result: bool = await self._call(replica_id, self._engines.drain.remote(target_replica_id=replica_id))
        return result

    async def stats(self, replica_id: str) -> dict[str, Any]:
        result: dict[str, Any] = await self._call(replica_id, self._engines.stats.remote(target_replica_id=replica_id))
        return result

    async def _call(self, replica_id: str, call: Any) -> Any:
        try:
            return await unwrap_errors(call)
        except RayActorError as error:
            raise _loss(replica_id, error) from error


def _loss(replica_id: str, error: RayActorError) -> ReplicaGone | ReplicaUnreachable:
    """A replica that is out of reach may live: it records its requests' usage, and none of them has killed it."""
    kind = ReplicaUnreachable if isinstance(error, ActorUnavailableError) else ReplicaGone
    return kind(f"replica {replica_id}: {type(error).__name__}")
