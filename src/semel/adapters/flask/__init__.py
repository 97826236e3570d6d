"""Flask: a decorator for views. It runs after `before_request`, and so after authorization.

    idempotent = Idempotent("redis://localhost:6379/0")

    @app.post("/payments")
    @idempotent(required=True)
    def pay(): ...

integration  the decorator    running  one protected request    bodies  requests, and what was read of them
"""

from semel.core.extras import Needed

with Needed("semel[flask]", by=__name__):
    import flask  # noqa: F401 - asked for here, so that the answer names the extra

from semel.adapters.flask.door import Idempotent

__all__ = ["Idempotent"]
