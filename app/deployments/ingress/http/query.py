"""Which names a query may have: those that its route says in `takes`.

In: a request whose route is found. Out: nothing, or an error that names the word that is not known and the one that may
have been meant. Rule: nothing that a list is asked for is ignored. What asks models for an answer has no query, and one
that is sent with it changes nothing; gateways send their own.
"""

from __future__ import annotations

from fastapi import Request
from fastapi.routing import APIRoute

from app.deployments.ingress.http.openapi import query_of
from app.engine.errors import InvalidRequest
from app.spelling import did_you_mean

#: What asks the models. None of these has a query of its own.
ASKING_PATHS = frozenset({
    "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/responses/input_tokens",
    "/v1/messages", "/v1/messages/count_tokens", "/v1/route",
})  # fmt: skip
_MAX_CHARS = 40


async def check_query(request: Request) -> None:
    """Raises InvalidRequest for a name that the route does not take.

    Lists and objects are sent as `name[]=` and `name[key]=`, and are called `name`.
    """
    route = request.scope.get("route")
    if not request.query_params or not isinstance(route, APIRoute):
        return
    if not route.path.startswith("/v1/") or (request.method == "POST" and route.path in ASKING_PATHS):
        return
    known = query_of(route)
    for name in request.query_params:
        if name.partition("[")[0] not in known:
            shown = name[:_MAX_CHARS]
            its_own = f"it takes {', '.join(known)}" if known else "it takes none"
            raise InvalidRequest(
                f"the query has {shown!r}, which {request.method} {route.path} does not know; "
                f"{its_own}{did_you_mean(name, known)}",
                param=shown,
            )
