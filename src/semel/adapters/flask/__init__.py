"""Flask: a decorator for views. It runs after `before_request`, and so after authorization.

    idempotent = Idempotent("redis://localhost:6379/0")

    @app.post("/payments")
    @idempotent(required=True)
    def pay(): ...

door  the decorator    running  one protected request    bodies  requests, and what was read of them
"""

from semel.adapters.flask.door import Idempotent

__all__ = ["Idempotent"]
