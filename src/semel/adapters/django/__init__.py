"""Django: a middleware for a whole project, or a decorator for views, REST framework's included.

    MIDDLEWARE = [..., "semel.adapters.django.IdempotencyMiddleware"]
    SEMEL = {"URL": "redis://localhost:6379/0"}

    @idempotent(required=True, atomic="default")
    def pay(request): ...

settings  what `settings.SEMEL` says, and its engines   middleware   for a whole project
running   one protected request                         views        the decorator
bodies    requests and responses as values              atomic       transactions around a view
"""

from semel.core.optional import Needed

with Needed("semel[django]", by=__name__):
    import django  # noqa: F401 - asked for here, so that the answer names the extra

from semel.adapters.django.middleware import IdempotencyMiddleware
from semel.adapters.django.settings import aclose, close
from semel.adapters.django.views import Idempotent, exempt, idempotent

__all__ = ["IdempotencyMiddleware", "Idempotent", "aclose", "close", "exempt", "idempotent"]
