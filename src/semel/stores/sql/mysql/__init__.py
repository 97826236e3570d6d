"""`mysql://user:password@host:3306/database`, also `mariadb://`: MySQL 8 and MariaDB.

table, listing   the statements
verbs            what each verb does, as generators that yield statements and receive rows
batches          the statements for many members at once
together         what the verbs do for many
sharing          who shares a statement, and what its outcome is for each
ddl, migrating   how the table comes to be
addresses        what a URL says
session          what every connection is told first
errors, effort   what a failure means, and whether a statement is sent again
threads, tasks   the connections and the runners: PyMySQL for threads, asyncmy for asyncio
many, aio_many   who sends the batches, on connections of their own
"""

from semel.stores.sql.mysql.store import (
    AsyncMySQLStore,
    MySQLStore,
    open_async_store,
    open_store,
)

__all__ = ["AsyncMySQLStore", "MySQLStore", "open_async_store", "open_store"]
