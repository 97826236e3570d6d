"""FastAPI: a decorator for endpoints. It runs after authorization and every other dependency.

    idempotent = Idempotent("redis://localhost:6379/0")
    idempotent.init_app(app)

    @app.post("/payments", status_code=201)
    @idempotent(required=True)
    async def pay(payment: Payment) -> Receipt: ...

endpoints  the decorator, and values that become answers    openapi  what the documentation says
"""

from semel.core.optional import Needed

with Needed("semel[fastapi]", by=__name__):
    import fastapi  # noqa: F401 - asked for here, so that the answer names the extra

from semel.adapters.fastapi.endpoints import Idempotent

__all__ = ["Idempotent"]
