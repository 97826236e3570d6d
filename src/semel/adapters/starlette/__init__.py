"""Starlette: a decorator for endpoints, plain functions and methods of an `HTTPEndpoint`.

    idempotent = Idempotent("postgresql://localhost/shop")

    @idempotent(required=True, session=async_sessionmaker(engine))
    async def pay(request: Request, session: AsyncSession) -> Response: ...

endpoints  the decorator    running  a request that runs    sessions  one that runs in a transaction

FastAPI's decorator stands on these.
"""

from semel.core.optional import Needed

with Needed("semel[starlette]", by=__name__):
    import starlette  # noqa: F401 - asked for here, so that the answer names the extra

from semel.adapters.starlette.endpoints import Idempotent

__all__ = ["Idempotent"]
