"""The commands of the service: serve runs it, proxy runs the proxy, token makes a token."""

from __future__ import annotations

from argparse import Namespace
from typing import cast

from semel.cli.store import configured
from semel.cli.terminal import say
from semel.core.optional import Needed
from semel.errors import ConfigError

INSTALL = "semel[server]"


def serve(options: Namespace) -> int:
    """Run the service until a signal ends it."""
    with Needed(INSTALL, by="semel serve", error=ConfigError):
        from semel.server import running  # noqa: PLC0415 - few need Starlette and uvicorn
    with configured(options):  # all the time: SIGHUP reads the same file again
        return running.serve(cast("running.Options", options), say)


def proxy(options: Namespace) -> int:
    """Run the proxy until a signal ends it."""
    with Needed(INSTALL, by="semel proxy", error=ConfigError):
        from semel.server import proxy as proxying  # noqa: PLC0415 - few need uvicorn
    with configured(options):
        return proxying.serve(cast("proxying.Options", options), say)


def token(options: Namespace) -> int:
    """Make a token: its table for the file on the output, the token itself beside it."""
    with Needed(INSTALL, by="semel token", error=ConfigError):
        from semel.server.tokens import checked_table, new_token  # noqa: PLC0415
    made, digest = new_token()
    fields = {"sha256": digest, "rights": options.right or ["use"], "scopes": options.scope}
    if options.rate is not None:
        fields["rate"] = options.rate
    print(checked_table(options.name, fields), end="")
    say(f"the token of {options.name}, shown only once: {made}")
    return 0
