"""Django: a middleware for a whole project, or a decorator for views, REST framework's included.

    MIDDLEWARE = [..., "semel.adapters.django.IdempotencyMiddleware"]
    SEMEL = {"URL": "redis://localhost:6379/0"}

    @idempotent(required=True, atomic="default")
    def pay(request): ...

settings  what `settings.SEMEL` says             engines     the engines of this process
bodies    requests, and what was read of them    responses   responses as values, and back
doors     transactions that are open around      running     one protected request on a thread
aio_running the same on asyncio                  atomic      record and rows in one transaction
views     the decorator                          middleware  for a whole project
streaming large answers                          uncancelled threads whose clients go away
"""

from semel.core.extras import Needed

with Needed("semel[django]", by=__name__):
    import django  # noqa: F401 - asked for here, so that the answer names the extra

from semel.adapters.django.engines import aclose, close
from semel.adapters.django.middleware import IdempotencyMiddleware
from semel.adapters.django.views import Idempotent, exempt, idempotent

__all__ = ["IdempotencyMiddleware", "Idempotent", "aclose", "close", "exempt", "idempotent"]
