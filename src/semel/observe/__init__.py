"""Makes an operation visible where its effects are: in logs, in SQL and in messages.

logs          scope, key digest and attempt on every log record
sql           the same as a comment in statements; cursors that add it
sqlalchemy    the same for every statement of an engine (needs SQLAlchemy)
headers       a key for the messages that an operation sends
"""

from semel.observe.headers import message_headers
from semel.observe.logs import KeyFilter
from semel.observe.sql import CommentedCursor, commented, sql_comment

__all__ = ["CommentedCursor", "KeyFilter", "commented", "message_headers", "sql_comment"]
