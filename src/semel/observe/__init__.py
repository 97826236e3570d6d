"""Makes an operation visible where its effects are: in logs and in SQL.

logs          scope, key digest and attempt on every log record
sql           the same as a comment in statements; cursors that add it
sqlalchemy    the same for every statement of an engine (needs SQLAlchemy)
"""

from semel.observe.logs import KeyFilter
from semel.observe.sql import CommentedCursor, commented, sql_comment

__all__ = ["CommentedCursor", "KeyFilter", "commented", "sql_comment"]
